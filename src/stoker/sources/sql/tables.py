"""One bulk read of a table: one query, one snapshot, some attempts, keys that are checked."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stoker.errors import ConfigError, SourceError, StalledError
from stoker.runtime.threads import FailedAttempt, ItemClock, RetryPolicy, call_within, retry
from stoker.schema import Sample, Schema, digest_json
from stoker.sources.files import open_regular
from stoker.sources.sql.databases import (
    ConnectionLostError,
    PickedDifferentlyError,
    PostgresSession,
    SqliteSession,
)
from stoker.sources.sql.query import Request, parse_database_url, relation_of
from stoker.sources.sql.rows import (
    FLOAT,
    INT,
    KEYS,
    NAMES,
    NULL,
    REAL,
    TEXT,
    Packed,
    Spill,
    Text,
    Value,
    pack_rows,
    shown_key,
    unpack_row,
)
from stoker.sources.sql.rules import Columns, InferredRule, fields_of, parse_columns, plain
from stoker.sources.sql.values import MalformedError, NumberRule, RowBatch, Rule
from stoker.units import format_bytes, format_count, format_few

T = TypeVar("T")
_log = logging.getLogger("stoker")
_NAMED = 3
"""Keys that an error names."""


class Session(Protocol):
    """One connection and one snapshot."""

    def columns(self) -> Mapping[str, str]:
        """Return names of the columns; `real` for those of floats of 4 bytes."""
        ...

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """Return the first row of another statement."""
        ...

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """Yield all rows in the order of their key: as bytes, and their keys."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """Rows as they were at one moment."""

    rows: Spill
    tags: tuple[Counter[int], ...]
    """By selected column how many values are of which kind."""
    digest: str
    """The sha256 of all rows in order."""
    version: str | None
    """The answer to `version_query` in the same snapshot."""
    dropped: int
    """Rows that `where` leaves out."""
    single: frozenset[str]
    """Columns that the database itself holds as floats of 4 bytes."""


@dataclass(frozen=True, slots=True)
class TableSummary:
    """Facts of a table that need no read of its rows."""

    count: int
    version: str | None


def read_table(request: Request) -> TableSnapshot:
    """Return all rows that are asked for.

    Raises:
        SourceError: A column is missing, a key is NULL or comes twice, or there are no rows.
        StalledError: The database did not answer in time, or was lost in every attempt.
        ResourceError: There is no room for the rows.
    """
    return _with(request, _read)


def look_at(request: Request) -> TableSummary:
    """Return number of rows and version.

    Raises:
        SourceError, StalledError: As `read_table`.
    """

    def look(session: Session, _: Callable[[int], None], request: Request) -> TableSummary:
        _check_columns(session, request)
        (count,) = session.first(request.count_sql(filtered=True)) or (0,)
        return TableSummary(count=int(count), version=_version(session, request))

    return _with(request, look)


def _with(request: Request, work: Callable[[Session, Callable[[int], None], Request], T]) -> T:
    """Return what `work` makes of a session; a lost session is replaced a few times."""
    timeouts = request.timeouts

    clock, shown = ItemClock(), request.address.shown

    def attempt() -> T:
        clock.begin(0)
        session = _session(request)
        try:
            return work(session, clock.begin, request)
        finally:
            session.close()

    def note(failure: FailedAttempt) -> None:
        _log.warning("%s: %s; next try in %.3g s", shown, failure.error, failure.pause_s)

    def give_up(failure: FailedAttempt) -> StalledError:
        return StalledError(
            f"{shown}: no connection, or none that lasted, in {failure.attempts} attempts: {failure.error}",
            hint="Check that the database runs and can be reached",
        )

    def attempts() -> T:
        return retry(
            attempt,
            ConnectionLostError,
            RetryPolicy(first_s=timeouts.backoff_s, longest_s=math.inf, attempts=timeouts.attempts),
            on_retry=note,
            give_up=give_up,
        )

    return call_within(
        timeouts.silence_s,
        attempts,
        f"reading {request.where_it_is}",
        hint="The database or the disk below it does not answer; end what hangs, and start again",
        clock=clock,
    )


def _session(request: Request) -> Session:
    return SqliteSession(request) if request.address.kind == "sqlite" else PostgresSession(request)


def _read(session: Session, begin: Callable[[int], None], request: Request) -> TableSnapshot:
    there = _check_columns(session, request)
    version = _version(session, request)
    try:
        rows = Spill(request.spill_dir)
        seen = _take(session, rows, begin, request)
    except PickedDifferentlyError as error:
        _log.debug("%s: picked as text: %s", request.where_it_is, error)
        rows = Spill(request.spill_dir)
        seen = _take(session, rows, begin, request)
    seen.check()
    dropped = 0
    if request.where is not None:
        (total,) = session.first(request.count_sql(filtered=False)) or (0,)
        dropped = int(total) - seen.count
    if not seen.count:
        raise _nothing_left(request, dropped)
    rows.finish_writing()
    _log_summary(request, seen.count, dropped, rows.size_bytes)
    return TableSnapshot(
        rows=rows,
        tags=tuple(seen.tags),
        digest=seen.digest.hexdigest(),
        version=version,
        dropped=dropped,
        single=frozenset(name for name in request.selected if there[name] == REAL),
    )


def _take(session: Session, rows: Spill, begin: Callable[[int], None], request: Request) -> RowChecker:
    seen = RowChecker(request)
    for packed, keys in session.batches():
        begin(seen.count)
        seen.add(packed, keys)
        rows.append(packed.data, packed.lengths)
    return seen


def _nothing_left(request: Request, dropped: int) -> SourceError:
    if dropped:
        return SourceError(
            f"{request.where_it_is}: where ({request.where}) drops all {format_count(dropped)} rows",
            hint="Loosen it, or leave it out",
        )
    return SourceError(f"{request.where_it_is} has no rows", hint="Check that it is the right table")


def _log_summary(request: Request, count: int, dropped: int, size_bytes: int) -> None:
    note = f"; where drops {format_count(dropped)}" if request.where is not None else ""
    _log.info("%s: %s rows, %s%s", request.where_it_is, format_count(count), format_bytes(size_bytes), note)


def _check_columns(session: Session, request: Request) -> Mapping[str, str]:
    there = session.columns()
    missing = [name for name in request.selected if name not in there]
    if missing:
        raise SourceError(
            f"{request.where_it_is} has no column {', '.join(missing)}", hint=f"It has {', '.join(there)}"
        )
    return there


def _version(session: Session, request: Request) -> str | None:
    if request.version_query is None:
        return None
    row = session.first(request.version_query)
    if row is None or all(value is None for value in row):
        raise SourceError(
            f"{request.where_it_is}: version_query gives {'no row' if row is None else 'NULL'}",
            hint="Expected a value that changes whenever the rows do",
        )
    return digest_json([f"{type(value).__name__} {value}" for value in row])


class RowChecker:
    """Counts, digests and checks rows as they arrive, in the order of their keys."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._last: list[tuple[Any, ...]] = []
        self._twice: list[tuple[Any, ...]] = []
        self._again = 0
        self.count = 0
        self.digest = hashlib.sha256()
        self.tags: list[Counter[int]] = [Counter() for _ in request.selected]

    def add(self, packed: Packed, keys: list[tuple[Any, ...]]) -> None:
        """Take up some rows."""
        self.count += len(keys)
        self.digest.update(packed.data)
        for known, new in zip(self.tags, packed.tags, strict=True):
            known.update(new)
        keys = self._last + keys
        if again := sum(map(operator.eq, keys, keys[1:])):
            self._again += again
            twice = dict.fromkeys(key for key, after in itertools.pairwise(keys) if key == after)
            self._twice += [key for key in twice if key not in self._twice][: _NAMED - len(self._twice)]
        self._last = keys[-1:]

    def check(self) -> None:
        """Refuse keys that do not tell rows apart.

        Raises:
            SourceError: Names the keys.
        """
        request, tags = self._request, self.tags[: len(self._request.key)]
        where, names = request.where_it_is, ", ".join(request.key)
        cure = "Give a key that is unique to each row, one column or several"
        if nulls := max(found[NULL] for found in tags):
            raise SourceError(f"{where}: key {names} is NULL in {format_count(nulls)} rows", hint=cure)
        if self._again and request.unique:
            shown = ", ".join(", ".join(map(_shown, key)) for key in self._twice)
            more = " and others" if self._again > len(self._twice) else ""
            raise SourceError(
                f"{where}: key {names} is repeated in {format_count(self._again)} rows: {shown}{more}",
                hint=cure,
            )
        kinds = {tag for found in tags for tag in found}
        if not kinds <= KEYS or any(len(found) > 1 for found in tags):
            raise SourceError(
                f"{where}: key {names} has values of type {', '.join(sorted(NAMES[tag] for tag in kinds))}",
                hint="Expected integers or text, one kind in a column",
            )


def _shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, Text) else str(value)


# ----------------------------------------------------------------------------------------------------------
# Rows of a table by their key, from CSV, Parquet or a database, as fields by the same rules as samples.


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTable:
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
    """By key the reason why its row is malformed."""


def read_labels(
    table: str | Path, *, key: str | Sequence[str], columns: Columns, name: str | None = None
) -> LabelTable:
    """Return all rows of a table.

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
        raise SourceError(f"{_shown_key(table)} has no rows", hint="Check that it is the right table")
    decided = tuple(
        _decided(rule, keyed, single, _shown_key(table)) if isinstance(rule, InferredRule) else rule
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
    return LabelTable(
        schema=schema,
        fields=tuple(rule.field for rule in decided),
        samples=samples,
        rows=len(keyed),
        repeated=repeated,
        malformed=malformed,
    )


def _made(rules: Sequence[Rule], values: Mapping[str, Value]) -> Sample:
    rows = RowBatch.one(values)
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
                raise SourceError(
                    f"{_shown_key(table)}: key {column} is NULL in a row", hint="Give each row a key"
                )
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
            f"{path} cannot be read: {error}", hint="Expected a CSV file in UTF-8 with a header"
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
        raise SourceError(f"{path} cannot be read: {error}", hint="Expected a Parquet file") from error


def _database_rows(
    table: str | Path, wanted: tuple[str, ...], keys: int, name: str | None, single: set[str]
) -> Iterator[list[Value]]:
    relation, shown = relation_of(name, None)
    request = Request(
        address=parse_database_url(table), relation=relation, name=shown, key=wanted[:keys],
        columns=wanted[keys:], unique=False,
    )  # fmt: skip
    found = read_table(request)
    single.update(found.single)
    for number in range(len(found.rows)):
        yield unpack_row(found.rows.row(number))
    found.rows.close()


def _check(path: Path, wanted: tuple[str, ...], there: Sequence[str]) -> None:
    if missing := [column for column in wanted if column not in there]:
        raise SourceError(f"{path} has no column {', '.join(missing)}", hint=f"It has {', '.join(there)}")


def _decided(
    rule: InferredRule, keyed: Sequence[tuple[str, Mapping[str, Value]]], single: Collection[str], where: str
) -> Rule:
    """Return a number's dtype as it is found; words must be listed, as they change with the table."""
    tags = {values[rule.column].tag for _, values in keyed} - {NULL}
    if rule.words or not tags or not tags <= {INT, FLOAT}:
        raise SourceError(
            f"{where}, column {rule.column} holds no numbers alone",
            hint="Give it a rule, as {'text': [WORDS]}, so that a corrected table means the same numbers",
        )
    floats = "float32" if rule.column in single else "float64"
    return NumberRule(field=rule.field, column=rule.column, dtype=floats if FLOAT in tags else "int64")


def _shown_key(table: str | Path) -> str:
    return parse_database_url(table).shown


def format_keys(keys: Sequence[object]) -> str:
    """Return the first of some keys, for messages.

    >>> format_keys([1, 2, 3, 4, 5])
    '1, 2, 3 and 2 more'
    """
    return format_few(keys, _NAMED)
