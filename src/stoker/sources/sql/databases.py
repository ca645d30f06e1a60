"""Rows from SQLite, through the standard library, in one read transaction."""

from __future__ import annotations

import math
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Any, cast
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, ResourceError, SourceError, StalledError, arg
from stoker.sources.files import check_opened_since, confined_sources, descriptors
from stoker.sources.sql.query import (
    JSONB,
    JSONB_LIST,
    ListReader,
    Pick,
    Request,
    decode_picked,
    list_reader,
    quoted,
    slice_numbers,
    unpacked_in_postgres,
)
from stoker.sources.sql.rows import (
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
    PickedNumbers,
    Text,
    as_list,
    pack_columns,
)
from stoker.units import KIB, MIB

BATCH_BYTES = 8 * MIB
"""Rows are fetched so many bytes at a time, about."""
_PARSED_BYTES = 512 * KIB
"""The same where JSON is parsed here."""
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
        self._row_bytes = 0.0
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
        selected = self._request.selected
        order = tuple(f"{quoted(name)} COLLATE BINARY" for name in self._request.key)
        asked = {name: (pick, pick.in_sqlite(quoted(name))) for name, pick in self._request.picks.items()}
        picks = {selected.index(name): pick for name, (pick, sql) in asked.items() if sql is not None}
        readers = {place: found for place, pick in picks.items() if (found := list_reader(pick)) is not None}
        picked = {
            name: sql
            for name, (_, sql) in asked.items()
            if sql is not None and selected.index(name) not in readers
        }
        cursor = self._execute(self._request.select_sql(order, picked))
        for columns in self._parsed(cursor, readers) if readers else self._fetched(cursor):
            for place in picks.keys() - readers.keys():
                columns[place] = decode_picked(columns[place], picks[place])
            packed = pack_columns(columns)
            self._row_bytes = len(packed.data) / len(columns[0])
            yield packed, list(zip(*columns[: len(self._request.key)], strict=True))
            self._deadline = time.monotonic() + self._timeouts.statement_s

    def _fetched(self, cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
        """Yield columns of consecutive rows, about `BATCH_BYTES` of packed rows at a time."""
        size = 64
        while rows := self._fetch(cursor, size):
            yield list(zip(*rows, strict=True))
            size = next_size(len(rows), round(self._row_bytes * len(rows)))

    def _parsed(self, cursor: sqlite3.Cursor, readers: Mapping[int, ListReader]) -> Iterator[list[Any]]:
        """Yield the same, about `BATCH_BYTES` of what was fetched at a time, with JSON parsed.

        It is parsed a little at a time, so that it is in the processor's cache.
        """
        size, held_bytes = 8, 0
        held: list[list[Any]] = [[] for _ in self._request.selected]
        while rows := self._fetch(cursor, size):
            columns: list[Any] = list(zip(*rows, strict=True))
            size_bytes = sum(map(_size_bytes, columns))
            for place, reader in readers.items():
                columns[place] = reader.keep(columns[place])
            for column, more in zip(held, columns, strict=True):
                column.extend(more)
            held_bytes += size_bytes
            if held_bytes >= BATCH_BYTES or len(held[0]) >= _MOST_ROWS:
                yield held
                held, held_bytes = [[] for _ in held], 0
            size = next_size(len(rows), size_bytes, _PARSED_BYTES)
        if held[0]:
            yield held

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


def next_size(rows: int, size_bytes: int, target_bytes: int = BATCH_BYTES) -> int:
    """Return how many rows to fetch next: about `target_bytes`, at most four times as many as before.

    >>> next_size(64, 64 * 100), next_size(64, 64 * MIB)
    (256, 8)
    """
    return max(1, min(4 * rows, _MOST_ROWS, target_bytes * rows // max(1, size_bytes)))


def _size_bytes(column: Sequence[Any]) -> int:
    """Return about what the values of a column take in memory."""
    kinds = {*map(type, column)}
    return 32 * len(column) if kinds <= _SMALL else sum(map(sys.getsizeof, column))


_SMALL = {int, float, NoneType}


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
NUMBERS_TYPE = -1022
"""In place of the number of `float8[]`: what was picked of a list, not a column of that type."""
_NO_DIMENSIONS, _TWO_DIMENSIONS = 12, 28
"""Bytes that go before the numbers of an array."""
_HEX = np.array([[*f"{byte:02x}".encode()] for byte in range(256)], np.uint8)
COPIED = frozenset({*FIXED_TYPES, *_TEXTS, _UUID, _JSONB, NUMBERS_TYPE})
"""Types that this reads."""
_ROWS_OF_A_LAYOUT = 8
"""On average, for rows of one layout to be read at once."""
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
    pieces: list[bytes] = []
    size, begun, at_once = 0, False, block_bytes
    for chunk in chunks:
        pieces.append(bytes(chunk))
        size += len(chunk)
        if not begun and size >= _HEADER:
            data = b"".join(pieces)
            if not data.startswith(SIGNATURE) or any(data[len(SIGNATURE) : _HEADER]):
                raise MalformedCopyError("its header is not known")
            pieces, begun = [data[_HEADER:]], True
        if begun and size >= at_once:
            columns, rest = _taken(pieces, types)
            if columns is not None:
                yield columns
            # A row longer than that is looked at when twice as much of it is there, not block by block.
            at_once = block_bytes if columns is not None else 2 * len(rest)
            pieces, size = [rest], len(rest)
    if not begun:
        raise MalformedCopyError("it is cut off")
    ended = pieces[-1:] == [_TRAILER]
    columns, rest = _taken(pieces[:-1] if ended else pieces, types)
    while columns is not None:
        yield columns
        columns, rest = _taken([rest], types)
    if rest != (b"" if ended else _TRAILER):
        raise MalformedCopyError("it is cut off")


def _taken(pieces: Sequence[bytes], types: Sequence[int]) -> tuple[list[Column] | None, bytes]:
    """Return the columns of the rows that the pieces hold, None if there is no row; and what is left over."""
    data = b"".join(pieces)
    even = _even(data, types) if all(number in FIXED_TYPES for number in types) else None
    if even is None:
        rows = [piece for piece in pieces if piece]
        together = _by_length(rows, types) if rows else None
        even = None if together is None else (together, len(data))
    columns, used = even or _rows(data, types)
    return (columns if used else None), data[used:]


def _rows(data: bytes, types: Sequence[int]) -> tuple[list[Column], int]:
    """Return the whole rows that `data` begins with, and their bytes."""
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
    """Return the same of numbers and times alone, at once; None where one is NULL."""
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


def _by_length(rows: Sequence[bytes], types: Sequence[int]) -> list[Column] | None:
    """Return the columns of rows, those of equal layout at once.

    Returns:
        None if a piece is not one row, as servers send them, or if there are too many layouts.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(len(row), []).append(place)
    layouts, most = len(groups), max(1, len(rows) // _ROWS_OF_A_LAYOUT)
    columns = [_Scattered(len(rows), number) for number in types]
    for places in groups.values():
        left = np.array(places)
        table = np.frombuffer(b"".join([rows[place] for place in places]), np.uint8).reshape(len(left), -1)
        while len(left):
            layout = _layout(table[0].tobytes(), len(types))
            if layout is None or layouts > most:
                return None
            heads = [0, 1, *(at - part for at, _ in layout for part in (4, 3, 2, 1))]
            same = (table[:, heads] == table[0, heads]).all(1)
            rest, other = left[~same], table[~same]
            if len(rest):
                left, table = left[same], table[same]
                layouts += 1
            for column, (at, length) in zip(columns, layout, strict=True):
                column.put(left, None if length < 0 else table[:, at : at + length])
            left, table = rest, other
    return [column.whole() for column in columns]


def _layout(row: bytes, fields: int) -> list[tuple[int, int]] | None:
    """Return where each field of a row begins, and its length or -1; None if it is not just one row."""
    layout, at = list[tuple[int, int]](), 2
    if len(row) < 2 or _TWO(row)[0] != fields:
        return None
    for _ in range(fields):
        if at + 4 > len(row):
            return None
        (length,) = _FOUR(row, at)
        layout.append((at + 4, length))
        at += 4 + max(0, length)
    return layout if at == len(row) else None


class _Scattered:
    """A column that is put together of rows in any order."""

    def __init__(self, count: int, number: int) -> None:
        self._number = number
        self._count = count
        self._parts: list[tuple[NDArray[np.int64], Column | None]] = []

    def put(self, places: NDArray[np.int64], values: NDArray[np.uint8] | None) -> None:
        """Add the values of some rows, `(rows, bytes)`, or None for NULL."""
        self._parts.append((places, None if values is None else _column_of(values, self._number)))

    def whole(self) -> Column:
        """Return the values in the order of their rows."""
        parts = self._parts
        if all(isinstance(part, NumberColumn) for _, part in parts):
            plain = cast("list[NumberColumn]", [part for _, part in parts])
            if len(plain) == 1:
                return plain[0]
            values = np.empty(self._count, plain[0].values.dtype)
            for (places, _), part in zip(parts, plain, strict=True):
                values[places] = part.values
            return NumberColumn(plain[0].tag, values)
        found: list[Any] = [None] * self._count
        for places, part in parts:
            if part is None:
                continue
            known = as_list(part)
            if isinstance(part, NumberColumn) and part.tag == TIME:
                known = [*map(Micros, known)]
            if len(known) == self._count:
                return known
            for place, value in zip(places.tolist(), known, strict=True):
                found[place] = value
        return found


def _column_of(values: NDArray[np.uint8], number: int) -> Column:
    """Return values of one type and one length, `(rows, bytes)`, as drivers give them."""
    if number in FIXED_TYPES:
        return _plain(np.ascontiguousarray(values).view(FIXED_TYPES[number][1])[:, 0], number)
    if number == NUMBERS_TYPE:
        return _lists_of_numbers(values)
    count, length = values.shape
    if number == _UUID:
        texts = _HEX[values].reshape(count, 2 * length)
        values = np.insert(texts, (8, 12, 16, 20), ord("-"), 1)
        count, length = values.shape
        return _cut(values.tobytes(), count, length, Text)
    if number == _JSONB:  # after a byte for the version
        return _cut(values[:, 1:].tobytes(), count, length - 1, JsonText)
    return _cut(values.tobytes(), count, length, _TEXTS[number])


def _cut(data: bytes, count: int, length: int, kind: Callable[[bytes], Any]) -> list[Any]:
    return [kind(data[at * length : (at + 1) * length]) for at in range(count)]


def _lists_of_numbers(values: NDArray[np.uint8]) -> list[Any]:
    """Return arrays of `float8[][]` without NULL, of the same number of numbers each.

    Source: `array_send` in PostgreSQL: dimensions, whether there are NULLs, the type; of each dimension its
    size and first index; of each number its length and its bytes.
    """
    count, length = values.shape
    if length == _NO_DIMENSIONS:
        return [PickedNumbers(b"")] * count
    numbers = np.ascontiguousarray(values[:, _TWO_DIMENSIONS:]).view([("length", ">i4"), ("value", ">f8")])
    if (values[:, :4] != (0, 0, 0, 2)).any() or (numbers["length"] != 8).any():
        raise MalformedCopyError("it has an array of another form")
    return slice_numbers(numbers["value"], [1] * count)


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
    elif number == NUMBERS_TYPE:
        known = (_lists_of_numbers(np.frombuffer(value, np.uint8)[None])[0] for value in there)
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
_SORTED_AS_BYTES = frozenset({25, 1042, 1043, 19})
"""text, bpchar, varchar, name: whose order would else follow the database's language."""
_BEFORE_PICKS = "stoker_picks"
_FLOAT4 = 700
"""PostgreSQL's `real`."""
_PASSING = ("08", "57P", "53")
"""SQLSTATE classes after which another try makes sense: connection, shutdown, too many of something."""
_FINAL = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")


class PickedDifferentlyError(Exception):
    """Not all values of lists are numbers; from the beginning, the session picks them in another way."""


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
        self._picked_as_text = False
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
        picks = {name: p for name, p in request.picks.items() if types[name] in (JSONB, JSONB_LIST)}
        copied = COPIED.issuperset(types[name] for name in request.selected if name not in picks)
        as_numbers = copied and bool(picks) and not self._picked_as_text
        aliases = {name: f"stoker_unpacked_{place}" for place, name in enumerate(picks)}
        picked = {
            name: pick.in_postgres(aliases[name], types[name], as_numbers=as_numbers)
            for name, pick in picks.items()
        }
        unpacked = {aliases[name]: unpacked_in_postgres(quoted(name), types[name]) for name in picks}
        sql = request.select_sql(tuple(map(self._order, request.key)), picked, unpacked)
        texts = {} if as_numbers else picks
        if as_numbers:
            self._execute(f"SAVEPOINT {_BEFORE_PICKS}")
        try:
            if copied:
                other = NUMBERS_TYPE if as_numbers else TEXT_TYPE
                kinds = [other if name in picks else types[name] for name in request.selected]
                yield from self._copied(sql, kinds, texts)
            else:
                yield from self._fetched(sql, texts)
        except self._psycopg.Error as error:
            # 22: a value cannot be cast, as text to a number.
            if as_numbers and (error.sqlstate or "").startswith("22"):
                self._picked_as_text = True
                self._execute(f"ROLLBACK TO SAVEPOINT {_BEFORE_PICKS}")
                raise PickedDifferentlyError(self._text(error)) from None
            raise self._translate(error) from None

    def _copied(
        self, sql: str, types: list[int], picked: Mapping[str, Pick]
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

    def _fetched(
        self, sql: str, picked: Mapping[str, Pick]
    ) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        size = 64
        with self._connection.cursor(name="stoker_rows") as cursor:
            cursor.execute(sql, binary=True)
            while rows := cursor.fetchmany(size):
                packed, keys = self._packed(list(zip(*rows, strict=True)), picked)
                yield packed, keys
                size = next_size(len(rows), len(packed.data))

    def _packed(
        self, columns: list[Column], picked: Mapping[str, Pick]
    ) -> tuple[Packed, list[tuple[Any, ...]]]:
        for name, pick in picked.items():
            place = self._request.selected.index(name)
            columns[place] = decode_picked(as_list(columns[place]), pick)
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
        limits = [f"SET LOCAL {name} = {max(1, round(1000 * seconds))}" for name, seconds in settings.items()]
        self._execute("; ".join(["SET LOCAL client_encoding = 'UTF8'", *limits]))

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
