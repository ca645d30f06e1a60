"""Rows from SQLite, through the standard library, in one read transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from stoker.errors import ResourceError, SourceError, StalledError, arg
from stoker.sources.files import check_opened_since, confined_sources, descriptors
from stoker.sources.sql.pick import received
from stoker.sources.sql.request import Request, quoted
from stoker.sources.sql.rows import Packed, Text, pack_columns
from stoker.units import MIB

BATCH_BYTES = 8 * MIB
"""Rows are fetched so many bytes at a time, about."""
_MOST_ROWS = 8192
_STEPS = 20_000
"""Instructions of SQLite between two looks at the clock: some milliseconds at most."""
_opening = Lock()


class SqliteSession:
    """One connection and one transaction; every statement sees the same rows."""

    def __init__(self, request: Request) -> None:
        self._request, self._timeouts = request, request.timeouts
        path = Path(request.address.target)
        if not path.is_file():
            raise SourceError(f"{request.address.shown}: no such file. Expected a SQLite database")
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
        """Names of the columns; SQLite's have no types."""
        cursor = self._execute(self._request.probe_sql())
        return {_text(entry[0]): "" for entry in cursor.description or ()}

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """The first row of another statement."""
        row = self._execute(sql).fetchone()
        return None if row is None else tuple(_text(v) if isinstance(v, Text) else v for v in row)

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """All rows in the order of their key: as bytes, and their keys."""
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
                columns[place] = tuple(map(received, columns[place]))
            packed = pack_columns(columns)
            yield packed, list(zip(*columns[:width], strict=True))
            size = next_size(len(rows), len(packed.data))
            self._deadline = time.monotonic() + self._timeouts.statement_s

    def _execute(self, sql: str) -> sqlite3.Cursor:
        self._deadline = time.monotonic() + self._timeouts.statement_s
        try:
            return self._connection.execute(sql)
        except sqlite3.Error as error:
            raise self._said(error) from error

    def _fetch(self, cursor: sqlite3.Cursor, size: int) -> list[Any]:
        try:
            return cursor.fetchmany(size)
        except sqlite3.Error as error:
            raise self._said(error) from error

    def _late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _said(self, error: sqlite3.Error) -> Exception:
        """What SQLite said, as an error of ours."""
        where, timeouts = self._request.where_it_is, self._timeouts
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StalledError(
                f"{where}: locked by a writer for more than {timeouts.lock_s:g} s. End it, have it use WAL "
                f"(PRAGMA journal_mode=WAL), or wait longer: {arg('lock_s', ..., call='Timeouts')}"
            )
        if code == sqlite3.SQLITE_INTERRUPT:
            return StalledError(
                f"{where}: a statement took more than {timeouts.statement_s:g} s and was ended. Make an "
                f"index on {', '.join(self._request.key)}, or wait longer: "
                f"{arg('statement_s', ..., call='Timeouts')}"
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM):
            return ResourceError(f"{where}: SQLite has no room to sort: {error}. Make an index on the key")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return SourceError(f"{where}: {error}. Expected a sound SQLite database; restore it")
        if code == sqlite3.SQLITE_CANTOPEN:
            return SourceError(
                f"{where}: {error}. A database in WAL mode needs a folder that can be written, or a writer's "
                "-shm file next to it"
            )
        return SourceError(f"{where}: {error}. Check table, columns, query and where")


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
    """Rows to fetch next, so that they are about `BATCH_BYTES`; at most four times as many as before.

    >>> next_size(64, 64 * 100), next_size(64, 64 * MIB)
    (256, 8)
    """
    return max(1, min(4 * rows, _MOST_ROWS, BATCH_BYTES * rows // max(1, size_bytes)))


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
