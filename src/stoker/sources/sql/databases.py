"""Rows from SQLite, through the standard library, in one read transaction."""

from __future__ import annotations

import math
import sqlite3
import struct
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, ResourceError, SourceError, StalledError, arg
from stoker.sources.files import check_opened_since, confined_sources, descriptors
from stoker.sources.sql.query import (
    BOOL,
    FLOAT,
    FOREVER_US,
    INT,
    REAL,
    TIME,
    Column,
    JsonText,
    Micros,
    NumberColumn,
    Packed,
    Request,
    Text,
    as_list,
    decode_picked,
    pack_columns,
    quoted,
)
from stoker.units import KIB, MIB

BATCH_BYTES = 8 * MIB
"""Rows are fetched so many bytes at a time, about."""
_MOST_ROWS = 8192
_STEPS = 20_000
"""Instructions of SQLite between two looks at the clock: some milliseconds at most."""
_MOST_TABLES = 8
"""Tables that a message lists."""
_opening = Lock()


class SqliteSession:
    """One connection and one transaction; every statement sees the same rows."""

    def __init__(self, request: Request) -> None:
        self._request, self._timeouts = request, request.timeouts
        path = Path(request.address.target)
        if not path.is_file():
            raise SourceError(
                f"{path.absolute()}: no such file",
                hint=f"Expected a SQLite database. Check {arg('url', setting='data.sql.url')}",
            )
        self._deadline = time.monotonic() + self._timeouts.statement_s
        self._connection = connect_read_only(
            path,
            timeout=self._timeouts.lock_s,
            isolation_level=None,
            check_same_thread=True,
        )
        self._connection.text_factory = Text
        self._connection.set_progress_handler(self._late, _STEPS)
        self._execute("BEGIN")

    def close(self) -> None:
        """End the transaction."""
        self._connection.close()

    def columns(self) -> Mapping[str, str]:
        """Return names of the columns; SQLite's have no types."""
        cursor = self._execute(self._request.probe_sql())
        return {_text(entry[0]): "" for entry in cursor.description or ()}

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """Return the first row of another statement."""
        row = self._execute(sql).fetchone()
        return None if row is None else tuple(_text(v) if isinstance(v, Text) else v for v in row)

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """Yield all rows in the order of their key: as bytes, and their keys."""
        width = len(self._request.key)
        order = tuple(f"{quoted(name)} COLLATE BINARY" for name in self._request.key)
        asked = {name: pick.in_sqlite(quoted(name)) for name, pick in self._request.picks.items()}
        picked = {name: sql for name, sql in asked.items() if sql is not None}
        places = [self._request.selected.index(name) for name in picked]
        cursor = self._execute(self._request.select_sql(order, picked))
        size = 64
        while rows := self._fetch(cursor, size):
            columns = list(zip(*rows, strict=True))
            for place in places:
                columns[place] = tuple(map(decode_picked, columns[place]))
            packed = pack_columns(columns)
            yield packed, list(zip(*columns[:width], strict=True))
            size = next_size(len(rows), len(packed.data))
            self._deadline = time.monotonic() + self._timeouts.statement_s

    def _execute(self, sql: str) -> sqlite3.Cursor:
        self._deadline = time.monotonic() + self._timeouts.statement_s
        with self._errors():
            return self._connection.execute(sql)

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _fetch(self, cursor: sqlite3.Cursor, size: int) -> list[Any]:
        with self._errors():
            return cursor.fetchmany(size)

    def _late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _translate(self, error: sqlite3.Error) -> Exception:
        """Return an error of SQLite as one of ours."""
        where, timeouts = self._request.where_it_is, self._timeouts
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StalledError(
                f"{where}: locked by a writer for more than {timeouts.lock_s:g} s",
                hint="End it, have it use WAL (PRAGMA journal_mode=WAL), or wait longer: "
                f"{arg('lock_s', ..., call='QueryTimeouts')}",
            )
        if code == sqlite3.SQLITE_INTERRUPT:
            return StalledError(
                f"{where}: a statement took more than {timeouts.statement_s:g} s and was ended",
                hint=f"Make an index on {', '.join(self._request.key)}, or wait longer: "
                f"{arg('statement_s', ..., call='QueryTimeouts')}",
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM):
            return ResourceError(
                f"{where}: SQLite has no room to sort: {error}", hint="Make an index on the key"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return SourceError(f"{where}: {error}", hint="Expected a sound SQLite database; restore it")
        if code == sqlite3.SQLITE_CANTOPEN:
            return SourceError(
                f"{where}: {error}",
                hint="A database in WAL mode needs a folder that can be written, or a writer's -shm file "
                "next to it",
            )
        return SourceError(f"{where}: {error}", hint=self._advice(str(error)))

    def _advice(self, said: str) -> str:
        if not said.startswith("no such table"):
            return "Check table, columns, query and where"
        with suppress(sqlite3.Error):
            rows = self._connection.execute(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
                "AND name NOT LIKE 'sqlite_%' ORDER BY name"
            )
            if names := [
                name if isinstance(name, str) else bytes(name).decode("utf-8", "replace")
                for (name,) in rows.fetchmany(_MOST_TABLES)
            ]:
                return f"Tables there: {', '.join(names)}"
        return "The database has no tables: check its path"


def connect_read_only(path: Path, **given: Any) -> sqlite3.Connection:
    """Return a connection that reads a database file.

    Args:
        path: The file; it need not be quoted.
        **given: As for `sqlite3.connect`.
    Raises:
        SourceError: It is outside of the paths that the process is confined to.
    """
    # One at a time: the check takes any new descriptor that is inside for the one that was opened here.
    with nullcontext() if confined_sources() is None else _opening:
        before = descriptors()
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, **given)
        try:
            check_opened_since(before, path)
        except SourceError:
            connection.close()
            raise
    return connection


def next_size(rows: int, size_bytes: int) -> int:
    """Return how many rows to fetch next: about `BATCH_BYTES`, at most four times as many as before.

    >>> next_size(64, 64 * 100), next_size(64, 64 * MIB)
    (256, 8)
    """
    return max(1, min(4 * rows, _MOST_ROWS, BATCH_BYTES * rows // max(1, size_bytes)))


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# ----------------------------------------------------------------------------------------------------------
# PostgreSQL's binary COPY as columns.
#
# Source: "Binary Format" in PostgreSQL's documentation of COPY. After a header each row is the number of
# its fields, and each field its length and its bytes, most significant first. So rows of numbers without
# NULL are as long as each other, and a whole buffer is one array; others are cut field by field.


SIGNATURE = b"PGCOPY\n\xff\r\n\x00"
_HEADER = len(SIGNATURE) + 8
_TRAILER = b"\xff\xff"
YEAR_2000_US = 946_684_800_000_000
"""The first moment of PostgreSQL's times, in microseconds since 1970."""
DAY_US = 86_400_000_000
"""Microseconds in a day."""

FIXED_TYPES: dict[int, tuple[int, str]] = {
    16: (BOOL, "?"), 20: (INT, ">i8"), 21: (INT, ">i2"), 23: (INT, ">i4"), 700: (FLOAT, ">f4"),
    701: (FLOAT, ">f8"), 1114: (TIME, ">i8"), 1184: (TIME, ">i8"), 1082: (TIME, ">i4"),
}  # fmt: skip
"""By type's number in PostgreSQL: what it becomes, and how it is sent: bool, int8, int2, int4, float4,
float8, timestamp, timestamptz, date."""
_DATE = 1082


TEXT_TYPE = 25
_TEXTS = {TEXT_TYPE: Text, 1042: Text, 1043: Text, 114: JsonText, 17: bytes}
"""text, bpchar, varchar, json, bytea: sent as the bytes that they are."""
_UUID, _JSONB = 2950, 3802
COPIED = frozenset({*FIXED_TYPES, *_TEXTS, _UUID, _JSONB})
"""Types that this reads."""
_TWO, _FOUR = struct.Struct(">h").unpack_from, struct.Struct(">i").unpack_from


class MalformedCopyError(Exception):
    """The stream is not what PostgreSQL's documentation says."""


def copied_columns(
    chunks: Iterable[bytes | memoryview], types: Sequence[int], block_bytes: int
) -> Iterator[list[Column]]:
    """Yield columns of consecutive rows, some `block_bytes` at a time, as `pack_columns` takes them.

    Raises:
        MalformedCopyError: The stream has flags or extensions that this does not know, or is cut off.
    """
    held = bytearray()
    begun, at_once = False, block_bytes
    for chunk in chunks:
        held += chunk
        if not begun and len(held) >= _HEADER:
            if not held.startswith(SIGNATURE) or any(held[len(SIGNATURE) : _HEADER]):
                raise MalformedCopyError("its header is not known")
            del held[:_HEADER]
            begun = True
        if begun and len(held) >= at_once:
            columns, used = _rows(bytes(held), types)
            if used:
                yield columns
                del held[:used]
            # A row longer than that is looked at when twice as much of it is there, not block by block.
            at_once = len(held) + (block_bytes if used else len(held))
    while (found := _rows(bytes(held), types))[1]:
        yield found[0]
        del held[: found[1]]
    if bytes(held) != _TRAILER:
        raise MalformedCopyError("it is cut off")


def _rows(data: bytes, types: Sequence[int]) -> tuple[list[Column], int]:
    """Return the whole rows that `data` begins with, and their bytes."""
    fixed = _even(data, types) if all(number in FIXED_TYPES for number in types) else None
    if fixed is not None:
        return fixed
    columns: list[list[bytes | None]] = [[] for _ in types]
    used, size, rows = 0, len(data), 0
    while used + 2 <= size and (fields := _TWO(data, used)[0]) >= 0:
        if fields != len(types):
            raise MalformedCopyError(f"it has a row of {fields} fields, expected {len(types)}")
        at = used + 2
        for column in columns:
            if at + 4 > size:
                at = size + 1
                break
            (length,) = _FOUR(data, at)
            at += 4
            column.append(None if length < 0 else data[at : at + length])
            at += max(0, length)
        if at > size:
            break
        rows, used = rows + 1, at
    return [_column(column[:rows], number) for column, number in zip(columns, types, strict=True)], used


def _even(data: bytes, types: Sequence[int]) -> tuple[list[Column], int] | None:
    """Return the same where rows are as long as each other; None where one holds a NULL."""
    parts: list[tuple[str, str]] = [("fields", ">i2")]
    for place, number in enumerate(types):
        parts += [(f"length{place}", ">i4"), (f"value{place}", FIXED_TYPES[number][1])]
    row = np.dtype(parts)
    table = np.frombuffer(data, row, len(data) // row.itemsize)
    columns: list[Column] = []
    if not len(table) or (table["fields"] != len(types)).any():
        return None
    for place, number in enumerate(types):
        values = table[f"value{place}"]
        if (table[f"length{place}"] != values.dtype.itemsize).any():
            return None
        columns.append(_plain(values, number))
    return columns, table.nbytes


def _plain(values: NDArray[Any], number: int) -> NumberColumn:
    tag = FIXED_TYPES[number][0]
    if tag == TIME:
        values = _since_1970(values.astype(np.int64), DAY_US if number == _DATE else 1)
    return NumberColumn(tag, values)


def _column(column: Sequence[bytes | None], number: int) -> Column:
    """Return values of one type, as drivers give them; None for NULL."""
    there = [value for value in column if value is not None]
    if number in FIXED_TYPES:
        found = _plain(np.frombuffer(b"".join(there), FIXED_TYPES[number][1]), number)
        if len(there) == len(column):
            return found
        known = iter(map(Micros, as_list(found)) if found.tag == TIME else as_list(found))
    elif number == _UUID:
        known = map(_uuid, there)
    elif number == _JSONB:
        known = (JsonText(value[1:]) for value in there)  # after a byte for the version
    else:
        known = map(_TEXTS[number], there)
    return [None if value is None else next(known) for value in column]


def _uuid(value: bytes) -> Text:
    text = value.hex()
    return Text(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode())


def _since_1970(values: NDArray[np.int64], unit_us: int) -> NDArray[np.int64]:
    """Times in microseconds; infinite ones stay at the ends of 64 bits."""
    low, high = -(FOREVER_US // unit_us), (FOREVER_US - YEAR_2000_US) // unit_us
    moved = values.clip(low, high) * unit_us + YEAR_2000_US
    return np.where(values > high, FOREVER_US, np.where(values < low, -FOREVER_US, moved))


# ----------------------------------------------------------------------------------------------------------
# Rows from PostgreSQL, through psycopg, in one read-only transaction of one snapshot.


COPY_BYTES = 256 * KIB
"""Taken up at a time, while the server makes more."""
_SORTED_AS_BYTES = frozenset({25, 1042, 1043, 18, 19})
"""text, bpchar, varchar, char, name: whose order would else follow the database's language."""
_FLOAT4 = 700
"""PostgreSQL's `real`."""
_PASSING = ("08", "57P", "53")
"""SQLSTATE classes after which another try makes sense: connection, shutdown, too many of something."""
_FINAL = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")


class ConnectionLostError(Exception):
    """The connection failed or was lost; another attempt may succeed."""


class PostgresSession:
    """One connection and one transaction; every statement sees the same rows."""

    def __init__(self, request: Request) -> None:
        self._request, self._timeouts = request, request.timeouts
        self._psycopg = driver()
        connect_s = max(2, math.ceil(self._timeouts.connect_s))  # libpq takes whole seconds from 2 on
        try:
            self._connection = self._psycopg.connect(
                request.address.target,
                connect_timeout=connect_s,
                application_name="stoker",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=int(1000 * (connect_s + self._timeouts.statement_s)),
            )
        except self._psycopg.Error as error:
            text = self._text(error)
            if any(final in text for final in _FINAL) or not isinstance(
                error, self._psycopg.OperationalError
            ):
                raise SourceError(
                    f"{request.address.shown}: {text}", hint="Check the URL and your rights"
                ) from None
            raise ConnectionLostError(text) from None
        self._types: dict[str, int] = {}
        self._begin()

    def close(self) -> None:
        """End the transaction."""
        self._connection.close()

    def columns(self) -> Mapping[str, str]:
        """Return names of the columns, and their types by number, or `real`."""
        cursor = self._execute(self._request.probe_sql())
        self._types = {entry.name: entry.type_code for entry in cursor.description or ()}
        return {name: REAL if number == _FLOAT4 else str(number) for name, number in self._types.items()}

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """Return the first row of another statement."""
        cursor = self._execute(sql)
        row = cursor.fetchone()
        return None if row is None else tuple(row)

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """Yield all rows in the order of their key: as bytes, and their keys."""
        request, types = self._request, self._types
        asked = {name: pick.in_postgres(quoted(name), types[name]) for name, pick in request.picks.items()}
        picked = {name: sql for name, sql in asked.items() if sql is not None}
        kinds = [TEXT_TYPE if name in picked else types[name] for name in request.selected]
        sql = request.select_sql(tuple(map(self._order, request.key)), picked)
        with self._errors():
            if COPIED.issuperset(kinds):
                yield from self._copied(sql, kinds, picked)
            else:
                yield from self._fetched(sql, picked)

    def _copied(
        self, sql: str, types: list[int], picked: Collection[str]
    ) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        with (
            self._connection.cursor() as cursor,
            cursor.copy(f"COPY ({sql}) TO STDOUT (FORMAT BINARY)") as copy,
        ):
            try:
                for columns in copied_columns(copy, types, COPY_BYTES):
                    yield self._packed(columns, picked)
            except MalformedCopyError as error:
                raise ConnectionLostError(f"what COPY sends is not a stream of rows: {error}") from error

    def _fetched(self, sql: str, picked: Collection[str]) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        size = 64
        with self._connection.cursor(name="stoker_rows") as cursor:
            cursor.execute(sql, binary=True)
            while rows := cursor.fetchmany(size):
                packed, keys = self._packed(list(zip(*rows, strict=True)), picked)
                yield packed, keys
                size = next_size(len(rows), len(packed.data))

    def _packed(self, columns: list[Column], picked: Collection[str]) -> tuple[Packed, list[tuple[Any, ...]]]:
        for name in picked:
            place = self._request.selected.index(name)
            columns[place] = [decode_picked(value) for value in as_list(columns[place])]
        keys = zip(*map(as_list, columns[: len(self._request.key)]), strict=True)
        return pack_columns(columns), list(keys)

    def _order(self, name: str) -> str:
        return quoted(name) + (' COLLATE "C"' if self._types[name] in _SORTED_AS_BYTES else "")

    def _begin(self) -> None:
        connection, timeouts = self._connection, self._timeouts
        connection.isolation_level = self._psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        _adapt(connection)
        settings = {
            "statement_timeout": timeouts.statement_s,
            "lock_timeout": timeouts.lock_s,
            "idle_in_transaction_session_timeout": timeouts.silence_s,
        }
        self._execute("SET LOCAL client_encoding = 'UTF8'")
        for name, seconds in settings.items():
            self._execute(f"SET LOCAL {name} = {max(1, round(1000 * seconds))}")

    def _execute(self, sql: str) -> Any:
        with self._errors():
            return self._connection.execute(sql)

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Turn errors of psycopg into ours, without what is secret in them."""
        try:
            yield
        except self._psycopg.Error as error:
            raise self._translate(error) from None

    def _translate(self, error: Any) -> Exception:
        """Return an error of PostgreSQL as one of ours."""
        where, timeouts, text = self._request.where_it_is, self._timeouts, self._text(error)
        state = error.sqlstate or ""
        if state == "57014":
            return StalledError(
                f"{where}: a statement took more than {timeouts.statement_s:g} s and was ended ({text})",
                hint=f"Make an index on {', '.join(self._request.key)}, or wait longer: "
                f"{arg('statement_s', ..., call='QueryTimeouts')}",
            )
        if state == "55P03":
            return StalledError(
                f"{where}: locked for more than {timeouts.lock_s:g} s ({text})",
                hint=f"End who holds it, or wait longer: {arg('lock_s', ..., call='QueryTimeouts')}",
            )
        lost = isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        if state.startswith(_PASSING) or (lost and not state):
            return ConnectionLostError(text)
        return SourceError(f"{where}: {text}", hint="Check table, columns, query and where")

    def _text(self, error: BaseException) -> str:
        return self._request.address.hide(" ".join(str(error).split()))


def driver() -> Any:
    """Return the module psycopg.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module("psycopg")
    except ImportError as error:
        raise ConfigError(
            "PostgreSQL is read through psycopg, which is not installed: pip install 'stoker[sql]'"
        ) from error


def since_1970(since_2000_us: int) -> Micros:
    """Return a time of PostgreSQL; infinite ones stay at the ends of 64 bits."""
    return Micros(max(-FOREVER_US, min(since_2000_us + YEAR_2000_US, FOREVER_US)))


def _adapt(connection: Any) -> None:
    """Have JSON passed on as it was sent, and times as numbers: they may be outside Python's years."""
    load = import_module("psycopg.types.json").set_json_loads
    load(JsonText, connection)
    loader = import_module("psycopg.adapt").Loader
    binary = import_module("psycopg.pq").Format.BINARY

    def micros(self: Any, data: Any) -> Micros:
        return since_1970(int.from_bytes(bytes(data), "big", signed=True))

    def days(self: Any, data: Any) -> Micros:
        return since_1970(int.from_bytes(bytes(data), "big", signed=True) * DAY_US)

    for name, function in (("timestamp", micros), ("timestamptz", micros), ("date", days)):
        kind = type("_Time", (loader,), {"format": binary, "load": function})
        connection.adapters.register_loader(name, kind)
