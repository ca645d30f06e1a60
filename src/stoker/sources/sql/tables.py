"""Rows of a table by their key, from CSV, Parquet or a database, as fields by the same rules as samples."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, SourceError
from stoker.schema import Sample, Schema
from stoker.sources.files import open_regular
from stoker.sources.sql.address import parse_address
from stoker.sources.sql.parse import Columns, Undecided, fields_of, parse_columns, plain
from stoker.sources.sql.request import Request, relation_of
from stoker.sources.sql.rows import FLOAT, INT, NULL, TEXT, Value, pack_rows, shown_key, unpack_row
from stoker.sources.sql.table import read_table
from stoker.sources.sql.values import MalformedError, Number, Rows, Rule

_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Rows of a table as fields."""

    schema: Schema
    fields: tuple[str, ...]
    """Those that rules are for; the rest of `schema` says what is there and what is known of them."""
    samples: Mapping[str, Sample]
    """By key; of a key that comes more than once, the first row."""
    rows: int
    repeated: tuple[str, ...]
    """Keys that come more than once."""
    malformed: Mapping[str, str]
    """By key why its row is none."""


def read_labels(
    table: str | Path, *, key: str | Sequence[str], columns: Columns, name: str | None = None
) -> Labels:
    """All rows of a table.

    Args:
        table: A `.csv`, `.tsv` or `.parquet` file, a SQLite file, or a database's URL.
        key: Column that names the rows, or columns that do together.
        columns: Fields and their rules, as of `SQLSource`.
        name: The table's name, in a database.

    Raises:
        ConfigError: A rule is malformed, or a package is missing.
        SourceError: The table cannot be read, or lacks a column.
    """
    rules = parse_columns(columns)
    keys = (key,) if isinstance(key, str) else tuple(key)
    wanted = (*keys, *dict.fromkeys(c for rule in rules for c in rule.columns if c not in keys))
    single = set[str]()
    keyed = list(_rows(table, wanted, len(keys), name, single))
    if not keyed:
        raise SourceError(f"{_shown(table)} has no rows. Check that it is the right table")
    decided = tuple(
        _decided(rule, keyed, single, _shown(table)) if isinstance(rule, Undecided) else rule
        for rule in rules
    )
    schema = fields_of(decided)
    times = Counter(found for found, _ in keyed)
    samples: dict[str, Sample] = {}
    malformed: dict[str, str] = {}
    for found, values in keyed:
        if found in samples or found in malformed:
            continue
        try:
            samples[found] = plain(_made(decided, values), schema)
        except MalformedError as error:
            malformed[found] = f"column {error.column} {error}"
    repeated = tuple(found for found, count in times.items() if count > 1)
    return Labels(
        schema=schema,
        fields=tuple(rule.field for rule in decided),
        samples=samples,
        rows=len(keyed),
        repeated=repeated,
        malformed=malformed,
    )


def _made(rules: Sequence[Rule], values: Mapping[str, Value]) -> Sample:
    rows = Rows.one(values)
    sample: Sample = {}
    for rule in rules:
        sample.update(rule.make(rows))
    return {name: array[0, ...] for name, array in sample.items()}


def _rows(
    table: str | Path, wanted: tuple[str, ...], keys: int, name: str | None, single: set[str]
) -> Iterator[tuple[str, dict[str, Value]]]:
    """Each row's key, the first `keys` columns, as text, and its values by column.

    Columns that hold floats of 4 bytes are added to `single`.
    """
    kind = Path(str(table)).suffix.lower() if "://" not in str(table) else ""
    if kind in (".csv", ".tsv"):
        yield from _csv_rows(Path(table), wanted, keys, "\t" if kind == ".tsv" else ",")
        return
    file = kind == ".parquet"
    rows = (
        _parquet_rows(Path(table), wanted, single)
        if file
        else _database_rows(table, wanted, keys, name, single)
    )
    for values in rows:
        for column, value in zip(wanted[:keys], values, strict=False):
            if value.tag == NULL:
                raise SourceError(f"{_shown(table)}: key {column} is NULL in a row. Give each row a key")
        yield shown_key(values[:keys]), dict(zip(wanted, values, strict=True))


def _csv_rows(
    path: Path, wanted: tuple[str, ...], keys: int, mark: str
) -> Iterator[tuple[str, dict[str, Value]]]:
    """Cells as numbers where they are some; an empty one is NULL. A key of one column stays text."""
    try:
        with io.TextIOWrapper(
            io.BufferedReader(open_regular(path)), newline="", encoding="utf-8-sig"
        ) as file:
            reader = csv.DictReader(file, delimiter=mark)
            _check(path, wanted, reader.fieldnames or ())
            for line in reader:
                if empty := [column for column in wanted[:keys] if not line[column]]:
                    raise SourceError(f"{path}, line {reader.line_num}: key {empty[0]} is empty")
                cells = {column: _cell(line[column]) for column in wanted}
                own = [cells[column] for column in wanted[:keys]]
                yield line[wanted[0]].strip() if keys == 1 else shown_key(own), cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(
            f"{path} cannot be read: {error}. Expected a CSV file in UTF-8 with a header"
        ) from error


def _cell(text: str | None) -> Value:
    if not text or not text.strip():
        return Value(NULL, None)
    try:
        return Value(INT, int(text))
    except ValueError:
        pass
    try:
        return Value(FLOAT, float(text))
    except ValueError:
        return Value(TEXT, text.strip().encode())


def _parquet_rows(path: Path, wanted: tuple[str, ...], single: set[str]) -> Iterator[list[Value]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path} is read through pyarrow, which is not installed: pip install 'stoker[parquet]'"
        ) from error
    try:
        open_regular(path).close()
        file = parquet.ParquetFile(path)
        _check(path, wanted, file.schema_arrow.names)
        kinds = {column: str(file.schema_arrow.field(column).type) for column in wanted}
        single.update(column for column, kind in kinds.items() if kind in ("float", "halffloat"))
        for batch in file.iter_batches(columns=list(wanted)):
            columns: list[Any] = [batch.column(column).to_pylist() for column in wanted]
            for row in zip(*columns, strict=True):
                yield unpack_row(memoryview(pack_rows([row]).data))
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} cannot be read: {error}. Expected a Parquet file") from error


def _database_rows(
    table: str | Path, wanted: tuple[str, ...], keys: int, name: str | None, single: set[str]
) -> Iterator[list[Value]]:
    relation, shown = relation_of(name, None)
    request = Request(
        address=parse_address(table), relation=relation, name=shown, key=wanted[:keys], columns=wanted[keys:],
        unique=False,
    )  # fmt: skip
    found = read_table(request)
    single.update(found.single)
    for number in range(len(found.rows)):
        yield unpack_row(found.rows.row(number))
    found.rows.close()


def _check(path: Path, wanted: tuple[str, ...], there: Sequence[str]) -> None:
    if missing := [column for column in wanted if column not in there]:
        raise SourceError(f"{path} has no column {', '.join(missing)}. It has {', '.join(there)}")


def _decided(
    rule: Undecided, keyed: Sequence[tuple[str, Mapping[str, Value]]], single: Collection[str], where: str
) -> Rule:
    """A number's dtype as it is found; words have to be listed, for they would change with the table."""
    tags = {values[rule.column].tag for _, values in keyed} - {NULL}
    if rule.words or not tags or not tags <= {INT, FLOAT}:
        raise SourceError(
            f"{where}, column {rule.column} holds no numbers alone. Give it a rule, as {{'text': [WORDS]}}, "
            "so that a corrected table means the same numbers"
        )
    floats = "float32" if rule.column in single else "float64"
    return Number(field=rule.field, column=rule.column, dtype=floats if FLOAT in tags else "int64")


def _shown(table: str | Path) -> str:
    return parse_address(table).shown


def named(keys: Sequence[object]) -> str:
    """The first of some keys, for messages.

    >>> named([1, 2, 3, 4, 5])
    '1, 2, 3 and 2 more'
    """
    more = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
    return ", ".join(map(str, keys[:_NAMED])) + more
