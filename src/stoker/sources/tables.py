"""Samples from rows of Parquet files; a row group is decoded once for all of its rows."""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.arguments import check_texts, listed
from stoker.sources.files import Paths, find_keyed_files, source_errors
from stoker.sources.protocol import (
    FileRef,
    Part,
    PartedSource,
    SourceIdentity,
    check_index,
    even_runs,
    read_as,
    read_dtype,
)
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# Columns of Arrow tables as fields of samples; what Parquet files and Hugging Face datasets have in common.
#
# Numbers and bool are scalars. A list of numbers is an array of varying length, or of its fixed size. Binary
# values and `{bytes, path}` (how datasets keep images and sound) are their bytes, uint8 of varying length. A
# struct is its members, as `<column>.<member>`.
#
# Text, dates and null are not numbers. To leave a column of text out, name the others; `text={"caption":
# "bytes"}` reads it as its UTF-8 bytes. A null is an error of
# its row.


_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowField:
    """One field of every sample, and where it is in a row."""

    name: str
    path: tuple[str, ...]
    """Column, then members of structs."""
    field: Field
    dtype: np.dtype[Any]
    """The dtype that values get."""
    narrowed: bool
    """True where they have more digits in the table."""


def import_arrow(what: str) -> Any:
    """Return the module `pyarrow`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{what} needs pyarrow, which is not installed", hint="Run pip install 'stoker[parquet]'"
        ) from error


def checked_columns(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of columns that a user gave.

    Raises:
        ConfigError: It is text, or names none.
    """
    names = listed(columns)
    if columns is not None and (not names or not all(isinstance(name, str) for name in names)):
        raise ConfigError(f"columns is {columns!r}", hint="Expected a list of names, as columns=['u', 'v']")
    return None if columns is None else tuple(columns)


def readable_columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the columns of a Parquet file that a store can hold, and why it cannot hold the others, by name.

    Raises:
        ConfigError: pyarrow is not installed.
        SourceError: The file cannot be read.
    """
    import_arrow(str(path))
    schema = _opened(path).schema_arrow
    refused = {name: why for name in schema.names if (why := _refusal(schema, name))}
    return [name for name in schema.names if name not in refused], refused


def _refusal(schema: Any, name: str, text: Collection[str] = ()) -> str | None:
    """Return what a column is that a store cannot hold; None: it can."""
    fields = _walk(name, (name,), schema.field(name).type, text)
    return next((field for field in fields if isinstance(field, str)), None)


def checked_text(text: Mapping[str, str] | None) -> frozenset[str]:
    """Return the columns of text that are read as their UTF-8 bytes.

    Raises:
        ConfigError: A rule is another than `"bytes"`.
    """
    for name, rule in (text or {}).items():
        if rule != "bytes":
            raise ConfigError(
                f"{arg('text', {name: rule})} is not a rule",
                hint=f"Expected {arg('text', {name: 'bytes'})}; to leave a column out, name the others",
            )
    return frozenset(text or ())


def fields_of(
    schema: Any, columns: Sequence[str] | None, *, where: str, text: Collection[str] = ()
) -> tuple[ArrowField, ...]:
    """Return the fields of the columns of an Arrow schema, in their order.

    Args:
        schema: Of the table.
        columns: Which; None: all.
        text: Columns of text to be read as their UTF-8 bytes.
        where: Names the table in messages.

    Raises:
        SourceError: A column is not there, or holds no numbers, or two fields have one name.
    """
    names = list(schema.names)
    wanted = names if columns is None else list(columns)
    if twice := sorted({name for name in wanted if names.count(name) > 1}):
        raise SourceError(
            f"{where} has several columns named {', '.join(twice)}",
            hint="Rename them, or name the others with columns=",
        )
    if missing := [name for name in wanted if name not in names]:
        raise SourceError(f"{where} has no column {', '.join(missing)}", hint=f"It has {', '.join(names)}")
    if unknown := sorted({*text} - {*names}):
        raise SourceError(f"{where} has no column {unknown[0]!r} of text", hint=f"It has {', '.join(names)}")
    if refused := {name: why for name in wanted if (why := _refusal(schema, name, text))}:
        rest = [name for name in wanted if name not in refused]
        shown = ", ".join(f"{name} is {why}" for name, why in refused.items())
        columns = arg("columns", rest, setting="data.parquet.columns")
        cure = f"Name the columns to read, as {columns}" if rest else "Convert them when it is written"
        strings = {name: "bytes" for name, why in refused.items() if why in _TEXT}
        cure += f". For the bytes of a text give {arg('text', strings)}" if strings else ""
        raise SourceError(f"{where}: {shown}, and a store holds numbers", hint=cure)
    walked = (_walk(name, (name,), schema.field(name).type, text) for name in wanted)
    found = [field for fields in walked for field in fields if isinstance(field, ArrowField)]
    every = [field.name for field in found]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise SourceError(
            f"{where}: {', '.join(twice)} occurs twice: members of a struct are named STRUCT.MEMBER",
            hint=f"Rename one, or leave it out with {arg('columns', setting='data.parquet.columns')}",
        )
    if narrowed := [field.name for field in found if field.narrowed]:
        _log.warning("%s: float64 is read as float32: %s", where, ", ".join(narrowed))
    return tuple(found)


_TEXT = ("string", "large_string", "string_view")
"""Types of text, as Arrow writes them."""


def _walk(
    name: str, path: tuple[str, ...], kind: Any, text: Collection[str] = ()
) -> Iterator[ArrowField | str]:
    """Yield fields of one column, or what is wrong with it."""
    if name in text and str(kind) in _TEXT:
        kind = import_module("pyarrow").large_binary()
    types = import_module("pyarrow").types
    if types.is_struct(kind):
        members = [(kind.field(i).name, kind.field(i).type) for i in range(kind.num_fields)]
        if {member for member, _ in members} == {"bytes", "path"}:
            yield from _walk(name, (*path, "bytes"), dict(members)["bytes"])
            return
        for member, inner in members:
            yield from _walk(f"{name}.{member}", (*path, member), inner)
        return
    found = _field(kind, types)
    if found is None:
        yield str(kind)
    else:
        field, dtype, narrowed = found
        yield ArrowField(name=name, path=path, field=field, dtype=dtype, narrowed=narrowed)


_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names of dtypes that numpy names otherwise. `to_pandas_dtype` needs pandas before pyarrow 26."""


def _field(kind: Any, types: Any) -> tuple[Field, np.dtype[Any], bool] | None:
    """Return the field of a column, what its values become, and whether they lose digits so."""
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Field(shape=(-1,), dtype="uint8", ragged=True), np.dtype(np.uint8), False
    shape: list[int] = []
    if (own := getattr(kind, "shape", None)) and hasattr(kind, "value_type"):  # a tensor of a fixed shape
        shape, kind = list(own), kind.value_type
    elif own and hasattr(kind, "storage_type"):  # datasets' Array2D and the like
        kind = kind.storage_type
        while types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        shape = [-1 if size is None else int(size) for size in own]
    else:
        if types.is_list(kind) or types.is_large_list(kind):
            shape, kind = [-1], kind.value_type
        while types.is_fixed_size_list(kind):
            shape, kind = [*shape, kind.list_size], kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    try:
        stored = np.dtype(_NUMPY_NAMES.get(str(kind), str(kind)))
        # One number keeps all its digits: a time since 1970 has more than float32 holds.
        dtype = read_dtype(stored, where="") if shape or stored != np.float64 else stored
    except SourceError:
        return None
    if -1 in shape[1:]:
        return None
    return (
        Field(shape=tuple(shape), dtype=dtype.name, ragged=-1 in shape),
        dtype,
        dtype != stored == np.float64,
    )


def sample_of(table: Any, row: int, fields: Sequence[ArrowField], *, where: str) -> Sample:
    """Return one row of an Arrow table as a sample.

    Raises:
        SourceError: A value is null, or has another shape than its column says; names row and column.
    """
    sample: Sample = {}
    for field in fields:
        value = table.column(field.path[0])[row]
        for member in field.path[1:]:
            value = None if not value.is_valid else value[member]
            if value is None:
                break
        at = f"{where}, column {'.'.join(field.path)!r}"
        if value is None or not value.is_valid:
            hint = (
                " (a path to a file outside the table is not followed)" if field.path[-1] == "bytes" else ""
            )
            raise SourceError(f"{at} is null{hint}", hint="Fill it, or leave the row or the column out")
        sample[field.name] = _value(value, field, at)
    return sample


def _value(value: Any, field: ArrowField, where: str) -> NDArray[Any]:
    shape, dtype = field.field.shape, field.dtype
    if not shape:
        return np.asarray(value.as_py(), dtype=dtype)
    buffer = getattr(value, "as_buffer", None)
    if buffer is not None:
        return np.frombuffer(buffer() or b"", dtype=np.uint8).copy()
    inner = getattr(value, "value", value) if hasattr(value.type, "storage_type") else value
    values = inner.values
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        if values.null_count:
            break
        values = values.flatten()
    if values.null_count:
        raise SourceError(f"{where} holds a null", hint="Fill it, or leave the row out")
    flat = read_as(values.to_numpy(zero_copy_only=False), dtype, where=where)
    each = math.prod(size for size in shape if size >= 0)
    if len(flat) % each if field.field.ragged else len(flat) != each:
        raise SourceError(
            f"{where} has {len(flat)} numbers, its shape is {shape}", hint="Fix or leave out the row"
        )
    return flat.reshape(shape)


VERSION = 1
"""Bumped by hand when the same files would give other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """One Parquet file."""

    name: str
    path: Path
    edges: tuple[int, ...]
    """First row of each row group, and the total."""

    @property
    def count(self) -> int:
        """Rows in it."""
        return self.edges[-1]


class ParquetSource(PartedSource[ParquetFile]):
    """Rows of Parquet files.

    Args:
        path: A file, a folder, a pattern, or a list of these.
        columns: Which columns are fields; None: all, which must then be numbers, lists of numbers or bytes.
        key: A column whose values name the samples, for splits that do not depend on the order of rows; None:
            file and row.
        text: Columns of text to be read as their UTF-8 bytes, uint8 of varying length, as
            `{"caption": "bytes"}` for `stoker.Tokenize`.

    Raises:
        SourceError: On first use: a file is damaged, or a column holds no numbers.
        ConfigError: pyarrow is not installed, or `columns` is not a list of names.

    Examples:
        >>> import pyarrow, pyarrow.parquet, stoker
        >>> table = pyarrow.table({"name": ["a", "b"], "x": [0.5, 1.5], "path": [[1, 2, 3], [4]]})
        >>> pyarrow.parquet.write_table(table, "rows.parquet")
        >>> source = stoker.ParquetSource("rows.parquet", columns=["x", "path"], key="name")
        >>> source.read(1)["path"].tolist(), source.schema()["path"].ragged, source.keys()
        ([4], True, ['a', 'b'])
    """

    def __init__(
        self,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        text: Mapping[str, str] | None = None,
    ) -> None:
        import_arrow("ParquetSource")
        self._text = checked_text(text)
        check_texts(key=key)
        root, paths, keys = find_keyed_files(path, suffixes=(".parquet", ".pq"), what="Parquet")
        self._paths = [(file.relative_to(root).as_posix(), file) for file in paths]
        self._keyed = dict(zip(paths, keys, strict=True))
        self._columns = checked_columns(columns)
        self._key = key
        self._described: tuple[tuple[ParquetFile, ...], tuple[ArrowField, ...]] | None = None
        self._block: tuple[Path, int, Any] | None = None

    def __repr__(self) -> str:
        """Return the first file, and how many there are."""
        return f"ParquetSource({str(self._paths[0][1])!r}, {format_count(len(self._paths), 'file')})"

    def __getstate__(self) -> dict[str, Any]:
        """The description travels; decoded rows stay."""
        return {**self.__dict__, "_block": None}

    def schema(self) -> Schema:
        """Return fields of every sample."""
        return {field.name: field.field for field in self._describe()[1]}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one row; no field has time.

        Raises:
            SourceError: Damaged data, or a null; names file, row and column.
            IndexError: There is no such sample.
        """
        table, row = self._find(index)
        group = bisect.bisect_right(table.edges, row) - 1
        where = self.locate(index)
        with source_errors(f"{where}, in row group {group}, cannot be read", "Copy the file again"):
            rows = self._rows(table, group)
            return sample_of(rows, row - table.edges[group], self._describe()[1], where=where)

    def locate(self, index: int) -> str:
        """Return file and row."""
        table, row = self._find(index)
        return f"{table.path}: row {row}"

    def _parts(self) -> Sequence[ParquetFile]:
        return self._describe()[0]

    def _edges(self, part: ParquetFile) -> Sequence[int]:
        """Rows of a row group are read together."""
        return part.edges

    def keys(self) -> Sequence[str]:
        """Return file and row, or the values of the key column.

        Raises:
            SourceError: A key is null, or there is no such column.
        """
        if self._key is None:
            return [
                f"{self._keyed[table.path]}:{row}" for table in self._parts() for row in range(table.count)
            ]
        found: list[str] = []
        for table in self._parts():
            with _opened(table.path) as file:
                if self._key not in file.schema_arrow.names:
                    raise SourceError(f"{table.path} has no column {self._key!r} to take keys from")
                values = file.read([self._key]).column(0).to_pylist()
            if None in values:
                raise SourceError(f"{table.path}: key {self._key!r} of row {values.index(None)} is null")
            found += map(str, values)
        return found

    def identity(self) -> SourceIdentity:
        """Return the files, and which columns are read."""
        tables, fields = self._describe()
        parts = tuple(
            Part(name=t.name, count=t.count, files=(FileRef(name=t.name, path=t.path),))
            for t in tables
            if t.count
        )
        settings: dict[str, Json] = {"columns": [list(field.path) for field in fields]}
        return SourceIdentity(kind=f"parquet/{VERSION}", parts=parts, settings=settings)

    def _rows(self, table: ParquetFile, group: int) -> Any:
        if self._block is None or self._block[:2] != (table.path, group):
            columns = sorted({field.path[0] for field in self._describe()[1]})
            self._block = None  # two groups at a time would be twice the memory
            with _opened(table.path) as file:
                self._block = (table.path, group, file.read_row_group(group, columns=columns))
        return self._block[2]

    def _describe(self) -> tuple[tuple[ParquetFile, ...], tuple[ArrowField, ...]]:
        if self._described is None:
            tables: list[ParquetFile] = []
            common: tuple[ArrowField, ...] | None = None
            for name, path in self._paths:
                with _opened(path) as file:
                    fields = fields_of(file.schema_arrow, self._columns, where=str(path), text=self._text)
                    counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                if common is not None and fields != common:
                    raise SourceError(
                        f"{path} has other columns than {self._paths[0][1]}: "
                        f"{', '.join(field.name for field in fields)}",
                        hint=f"Name those of both with {arg('columns', setting='data.parquet.columns')}",
                    )
                common = fields
                edges = tuple(int(edge) for edge in np.cumsum([0, *counts]))
                tables.append(ParquetFile(name=name, path=path, edges=edges))
            if not any(table.count for table in tables):
                raise SourceError(f"{self!r} holds no rows", hint="Check the path")
            self._described = tuple(tables), common or ()
        return self._described


def _opened(path: Path) -> Any:
    """Return an open Parquet file.

    Raises:
        SourceError: It is damaged or no Parquet file.
    """
    size = path.stat().st_size if path.exists() else 0
    with source_errors(f"{path} is not a readable Parquet file, {size:,} bytes", "Copy or write it again"):
        return import_module("pyarrow.parquet").ParquetFile(path)


# ----------------------------------------------------------------------------------------------------------
# Samples from a loaded Hugging Face `datasets.Dataset`, read from its Arrow tables as they are.


RUN = 256
"""Rows taken from the tables at a time."""


class DatasetsSource:
    """Rows of a `datasets.Dataset`: `DatasetsSource(load_dataset("...", split="train"))`.

    Its fingerprint, which changes with every `map`, `filter` or file, is its identity. Formats and transforms
    (`set_format`, `set_transform`) do not reach what is read; images and sound come as bytes.

    Args:
        dataset: One split, not a `DatasetDict`, and not streaming.
        columns: Which columns are fields; None: all, which must then be numbers, lists of numbers or bytes.
        text: Columns of text to be read as their UTF-8 bytes, uint8 of varying length, as
            `{"caption": "bytes"}` for `stoker.Tokenize`.

    Raises:
        ConfigError: It is not such a dataset, `columns` is not a list of names, or pyarrow is not installed.
        SourceError: A column holds no numbers.

    Examples:
        >>> import datasets, stoker  # doctest: +SKIP
        >>> rows = datasets.Dataset.from_dict({"x": [0.5, 1.5]})  # doctest: +SKIP
        >>> len(stoker.DatasetsSource(rows))  # doctest: +SKIP
        2
    """

    def __init__(
        self, dataset: Any, *, columns: Sequence[str] | None = None, text: Mapping[str, str] | None = None
    ) -> None:
        import_arrow("DatasetsSource")
        strings = checked_text(text)
        if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format")):
            raise ConfigError(
                f"DatasetsSource takes a datasets.Dataset, got {type(dataset).__name__}",
                hint="Name a split, as load_dataset(..., split='train'); streaming ones have no numbers to "
                "read by",
            )
        self._dataset = dataset.with_format("arrow")
        self._fingerprint = str(dataset._fingerprint)
        self._fields: tuple[ArrowField, ...] = fields_of(
            dataset.features.arrow_schema, checked_columns(columns), where="the dataset", text=strings
        )
        self._block: tuple[int, Any] | None = None

    def __repr__(self) -> str:
        """Return rows and fingerprint."""
        return f"DatasetsSource({len(self)} rows, {self._fingerprint})"

    def __getstate__(self) -> dict[str, Any]:
        """Rows that were read stay."""
        return {**self.__dict__, "_block": None}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def schema(self) -> Schema:
        """Return fields of every sample."""
        return {field.name: field.field for field in self._fields}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one row; no field has time.

        Raises:
            SourceError: Damaged data, or a null; names row and column.
            IndexError: There is no such sample.
        """
        check_index(index, len(self))
        first = index // RUN * RUN
        where = self.locate(index)
        with source_errors(f"{where} cannot be read", "Load or write the dataset again"):
            if self._block is None or self._block[0] != first:
                self._block = (first, self._dataset[first : first + RUN])
            return sample_of(self._block[1], index - first, self._fields, where=where)

    def locate(self, index: int) -> str:
        """Return the row."""
        return f"{self!r}: row {index}"

    def runs(self) -> Sequence[range]:
        """Return ranges of rows that are read together."""
        return even_runs(len(self), RUN)

    def keys(self) -> Sequence[str]:
        """Return row numbers."""
        return [str(index) for index in range(len(self))]

    def identity(self) -> SourceIdentity:
        """Return the dataset's fingerprint, and which columns are read."""
        digest = hashlib.sha256(self._fingerprint.encode()).hexdigest()
        part = Part(name="dataset", count=len(self), digest=digest)
        settings: dict[str, Json] = {"columns": [list(field.path) for field in self._fields]}
        return SourceIdentity(kind=f"datasets/{VERSION}", parts=(part,), settings=settings)
