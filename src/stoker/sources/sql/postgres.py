"""Rows from PostgreSQL, through psycopg, in one read-only transaction of one snapshot."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from stoker.errors import ConfigError, SourceError, StalledError, arg
from stoker.sources.sql.copy_binary import (
    COPIED,
    DAY_US,
    TEXT_TYPE,
    YEAR_2000_US,
    MalformedCopyError,
    copied_columns,
)
from stoker.sources.sql.pick import received
from stoker.sources.sql.request import Request, quoted
from stoker.sources.sql.rows import (
    FOREVER_US,
    REAL,
    Column,
    JsonText,
    Micros,
    Packed,
    as_list,
    pack_columns,
)
from stoker.sources.sql.sqlite import next_size
from stoker.units import KIB

COPY_BYTES = 256 * KIB
"""Taken up at a time, while the server makes more."""
_SORTED_AS_BYTES = frozenset({25, 1042, 1043, 18, 19})
"""text, bpchar, varchar, char, name: whose order would else follow the database's language."""
_FLOAT4 = 700
"""PostgreSQL's `real`."""
_PASSING = ("08", "57P", "53")
"""SQLSTATE classes after which another try makes sense: connection, shutdown, too many of something."""
_FINAL = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")


class LostError(Exception):
    """There is no connection, or none any more; another try may have one."""


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
                raise SourceError(f"{request.address.shown}: {text}. Check the URL and your rights") from None
            raise LostError(text) from None
        self._types: dict[str, int] = {}
        self._begin()

    def close(self) -> None:
        """End the transaction."""
        self._connection.close()

    def columns(self) -> Mapping[str, str]:
        """Names of the columns, and their types by number, or `real`."""
        cursor = self._execute(self._request.probe_sql())
        self._types = {entry.name: entry.type_code for entry in cursor.description or ()}
        return {name: REAL if number == _FLOAT4 else str(number) for name, number in self._types.items()}

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """The first row of another statement."""
        cursor = self._execute(sql)
        row = cursor.fetchone()
        return None if row is None else tuple(row)

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """All rows in the order of their key: as bytes, and their keys."""
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
                raise LostError(f"what COPY sends is not a stream of rows: {error}") from error

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
            columns[place] = [received(value) for value in as_list(columns[place])]
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

    def _errors(self) -> _Translated:
        return _Translated(self)

    def said(self, error: Any) -> Exception:
        """What PostgreSQL said, as an error of ours."""
        where, timeouts, text = self._request.where_it_is, self._timeouts, self._text(error)
        state = error.sqlstate or ""
        if state == "57014":
            return StalledError(
                f"{where}: a statement took more than {timeouts.statement_s:g} s and was ended ({text}). "
                f"Make an index on {', '.join(self._request.key)}, or wait longer: "
                f"{arg('statement_s', ..., call='Timeouts')}"
            )
        if state == "55P03":
            return StalledError(
                f"{where}: locked for more than {timeouts.lock_s:g} s ({text}). End who holds it, or wait "
                f"longer: {arg('lock_s', ..., call='Timeouts')}"
            )
        lost = isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        if state.startswith(_PASSING) or (lost and not state):
            return LostError(text)
        return SourceError(f"{where}: {text}. Check table, columns, query and where")

    def _text(self, error: BaseException) -> str:
        return self._request.address.hide(" ".join(str(error).split()))


class _Translated:
    """Turns errors of psycopg into ours, and hides what is secret in them."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, driver().Error):
            raise self._session.said(error) from None


def driver() -> Any:
    """The module psycopg.

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
    """A time of PostgreSQL; infinite ones stay at the ends of 64 bits."""
    return Micros(max(-FOREVER_US, min(since_2000_us + YEAR_2000_US, FOREVER_US)))


def _adapt(connection: Any) -> None:
    """Have JSON handed over as it was sent, and times as numbers, for they may lie outside Python's years."""
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
