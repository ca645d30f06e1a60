"""Samples from rows of Parquet files; a row group is decoded once for all of its rows."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import SourceError, arg
from stoker.schema import Json, Sample, Schema
from stoker.sources.arrow import ArrowField, checked_columns, fields_of, import_arrow, sample_of
from stoker.sources.files import Paths, find_keyed_files
from stoker.sources.given import check_texts
from stoker.sources.hdf5_open import FOREIGN_ERRORS
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.units import format_count

VERSION = 1
"""Bumped by hand when the same files would give other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One Parquet file."""

    name: str
    path: Path
    edges: tuple[int, ...]
    """First row of each row group, and the total."""


class ParquetSource:
    """Rows of Parquet files.

    Args:
        path: A file, a folder, a pattern, or a list of these.
        columns: Which columns are fields; None: all, which must then be numbers, lists of numbers or bytes.
        key: A column whose values name the samples, for splits that do not depend on the order of rows; None:
            file and row.

    Raises:
        SourceError: On first use: a file is damaged, or a column holds no numbers.
        ConfigError: pyarrow is not installed, or `columns` is no list of names.
    """

    def __init__(self, path: Paths, *, columns: Sequence[str] | None = None, key: str | None = None) -> None:
        import_arrow("ParquetSource")
        check_texts(key=key)
        root, paths, keys = find_keyed_files(path, suffixes=(".parquet", ".pq"), what="Parquet")
        self._paths = [(file.relative_to(root).as_posix(), file) for file in paths]
        self._keyed = dict(zip(paths, keys, strict=True))
        self._columns = checked_columns(columns)
        self._key = key
        self._scanned: tuple[tuple[Table, ...], tuple[ArrowField, ...]] | None = None
        self._block: tuple[Path, int, Any] | None = None

    def __repr__(self) -> str:
        """The first file, and how many there are."""
        return f"ParquetSource({str(self._paths[0][1])!r}, {format_count(len(self._paths), 'file')})"

    def __getstate__(self) -> dict[str, Any]:
        """The description travels; decoded rows stay."""
        return {**self.__dict__, "_block": None}

    def __len__(self) -> int:
        """Rows of all files."""
        return sum(table.edges[-1] for table in self._scan()[0])

    def schema(self) -> Schema:
        """Fields of every sample."""
        return {field.name: field.field for field in self._scan()[1]}

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one row; no field has time.

        Raises:
            SourceError: Damaged data, or a null; names file, row and column.
            IndexError: No such number.
        """
        table, row = self._find(number)
        group = bisect.bisect_right(table.edges, row) - 1
        where = self.locate(number)
        try:
            rows = self._rows(table, group)
            return sample_of(rows, row - table.edges[group], self._scan()[1], where=where)
        except FOREIGN_ERRORS as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(
                f"{where}, in row group {group}, cannot be read ({type(error).__name__}: {error}). "
                "Copy the file again"
            ) from error

    def locate(self, number: int) -> str:
        """File and row."""
        table, row = self._find(number)
        return f"{table.path}: row {row}"

    def _find(self, number: int) -> tuple[Table, int]:
        tables, _ = self._scan()
        firsts = list(itertools.accumulate((table.edges[-1] for table in tables), initial=0))
        if not 0 <= number < firsts[-1]:
            raise IndexError(f"sample {number} does not exist: this source has {firsts[-1]}")
        place = bisect.bisect_right(firsts, number) - 1
        return tables[place], number - firsts[place]

    def runs(self) -> Sequence[range]:
        """Row groups."""
        found: list[range] = []
        first = 0
        for table in self._scan()[0]:
            found += [range(first + low, first + high) for low, high in itertools.pairwise(table.edges)]
            first += table.edges[-1]
        return [run for run in found if len(run)]

    def keys(self) -> Sequence[str]:
        """File and row, or the values of the key column.

        Raises:
            SourceError: A key is null, or there is no such column.
        """
        if self._key is None:
            return [
                f"{self._keyed[table.path]}:{row}"
                for table in self._scan()[0]
                for row in range(table.edges[-1])
            ]
        found: list[str] = []
        for table in self._scan()[0]:
            with _opened(table.path) as file:
                if self._key not in file.schema_arrow.names:
                    raise SourceError(f"{table.path} has no column {self._key!r} to take keys from")
                values = file.read([self._key]).column(0).to_pylist()
            if None in values:
                raise SourceError(f"{table.path}: key {self._key!r} of row {values.index(None)} is null")
            found += map(str, values)
        return found

    def identity(self) -> SourceIdentity:
        """The files, and which columns are read."""
        tables, fields = self._scan()
        parts = tuple(
            Part(name=t.name, count=t.edges[-1], files=(FileRef(name=t.name, path=t.path),))
            for t in tables
            if t.edges[-1]
        )
        settings: dict[str, Json] = {"columns": [list(field.path) for field in fields]}
        return SourceIdentity(kind=f"parquet/{VERSION}", parts=parts, settings=settings)

    def _rows(self, table: Table, group: int) -> Any:
        if self._block is None or self._block[:2] != (table.path, group):
            columns = sorted({field.path[0] for field in self._scan()[1]})
            self._block = None  # two groups at a time would be twice the memory
            with _opened(table.path) as file:
                self._block = (table.path, group, file.read_row_group(group, columns=columns))
        return self._block[2]

    def _scan(self) -> tuple[tuple[Table, ...], tuple[ArrowField, ...]]:
        if self._scanned is None:
            tables: list[Table] = []
            common: tuple[ArrowField, ...] | None = None
            for name, path in self._paths:
                with _opened(path) as file:
                    fields = fields_of(file.schema_arrow, self._columns, where=str(path))
                    counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                if common is not None and fields != common:
                    raise SourceError(
                        f"{path} has other columns than {self._paths[0][1]}: "
                        f"{', '.join(field.name for field in fields)}. Name those of both with "
                        f"{arg('columns', setting='data.parquet.columns')}"
                    )
                common = fields
                edges = tuple(int(edge) for edge in np.cumsum([0, *counts]))
                tables.append(Table(name=name, path=path, edges=edges))
            if not any(table.edges[-1] for table in tables):
                raise SourceError(f"{self!r} holds no rows. Check the path")
            self._scanned = tuple(tables), common or ()
        return self._scanned


def _opened(path: Path) -> Any:
    """An open Parquet file.

    Raises:
        SourceError: It is damaged or no Parquet file.
    """
    parquet = import_module("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except FOREIGN_ERRORS as error:
        size = path.stat().st_size if path.exists() else 0
        raise SourceError(
            f"{path} is not a readable Parquet file, {size:,} bytes ({error}). Copy or write it again"
        ) from error
