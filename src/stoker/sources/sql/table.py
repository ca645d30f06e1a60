"""One bulk read of a table: one query, one snapshot, some attempts, keys that are checked."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stoker.errors import SourceError, StalledError
from stoker.runtime.retry import FailedAttempt, RetryPolicy, retry
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import digest_json
from stoker.sources.sql.postgres import LostError, PostgresSession
from stoker.sources.sql.request import Request
from stoker.sources.sql.rows import KEYS, NAMES, NULL, REAL, Packed, Text
from stoker.sources.sql.spill import Spill
from stoker.sources.sql.sqlite import SqliteSession
from stoker.units import format_bytes, format_count

T = TypeVar("T")
_log = logging.getLogger("stoker")
_NAMED = 3
"""Keys that an error names."""


class Session(Protocol):
    """One connection and one snapshot."""

    def columns(self) -> Mapping[str, str]:
        """Names of the columns; `real` for those of floats of 4 bytes."""
        ...

    def first(self, sql: str) -> tuple[Any, ...] | None:
        """The first row of another statement."""
        ...

    def batches(self) -> Iterator[tuple[Packed, list[tuple[Any, ...]]]]:
        """All rows in the order of their key: as bytes, and their keys."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows as they were at one moment."""

    rows: Spill
    tags: tuple[Counter[int], ...]
    """By selected column how many values are of which kind."""
    digest: str
    """The sha256 of all rows in order."""
    version: str | None
    """What `version_query` gave in the same snapshot."""
    dropped: int
    """Rows that `where` leaves out."""
    single: frozenset[str]
    """Columns that the database itself holds as floats of 4 bytes."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be had without reading rows."""

    count: int
    version: str | None


def read_table(request: Request) -> Table:
    """All rows that are asked for.

    Raises:
        SourceError: A column is missing, a key is NULL or comes twice, or there are no rows.
        StalledError: The database did not answer in time, or was lost in every attempt.
        ResourceError: There is no room for the rows.
    """
    return _with(request, _read)


def look_at(request: Request) -> Facts:
    """Number of rows and version.

    Raises:
        SourceError, StalledError: As `read_table`.
    """

    def look(session: Session, _: Callable[[int], None], request: Request) -> Facts:
        _check_columns(session, request)
        (count,) = session.first(request.count_sql(filtered=True)) or (0,)
        return Facts(count=int(count), version=_version(session, request))

    return _with(request, look)


def _with(request: Request, work: Callable[[Session, Callable[[int], None], Request], T]) -> T:
    """What `work` makes of a session; a lost one is followed by another, some times."""
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
            f"{shown}: no connection, or none that lasted, in {failure.attempts} attempts: {failure.error}. "
            "Check that the database runs and can be reached"
        )

    def attempts() -> T:
        return retry(
            attempt,
            LostError,
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


def _read(session: Session, begin: Callable[[int], None], request: Request) -> Table:
    there = _check_columns(session, request)
    version = _version(session, request)
    rows = Spill(request.spill_dir)
    seen = _take(session, rows, begin, request)
    seen.check()
    dropped = 0
    if request.where is not None:
        (total,) = session.first(request.count_sql(filtered=False)) or (0,)
        dropped = int(total) - seen.count
    if not seen.count:
        raise SourceError(_nothing_left(request, dropped))
    rows.seal()
    _tell(request, seen.count, dropped, rows.size_bytes)
    return Table(
        rows=rows,
        tags=tuple(seen.tags),
        digest=seen.digest.hexdigest(),
        version=version,
        dropped=dropped,
        single=frozenset(name for name in request.selected if there[name] == REAL),
    )


def _take(session: Session, rows: Spill, begin: Callable[[int], None], request: Request) -> _Seen:
    seen = _Seen(request)
    for packed, keys in session.batches():
        begin(seen.count)
        seen.add(packed, keys)
        rows.append(packed.data, packed.lengths)
    return seen


def _nothing_left(request: Request, dropped: int) -> str:
    if dropped:
        return (
            f"{request.where_it_is}: where ({request.where}) drops all {format_count(dropped)} rows. "
            "Loosen it, or leave it out"
        )
    return f"{request.where_it_is} has no rows. Check that it is the right table"


def _tell(request: Request, count: int, dropped: int, size_bytes: int) -> None:
    note = f"; where drops {format_count(dropped)}" if request.where is not None else ""
    _log.info("%s: %s rows, %s%s", request.where_it_is, format_count(count), format_bytes(size_bytes), note)


def _check_columns(session: Session, request: Request) -> Mapping[str, str]:
    there = session.columns()
    missing = [name for name in request.selected if name not in there]
    if missing:
        raise SourceError(
            f"{request.where_it_is} has no column {', '.join(missing)}. It has {', '.join(there)}"
        )
    return there


def _version(session: Session, request: Request) -> str | None:
    if request.version_query is None:
        return None
    row = session.first(request.version_query)
    if row is None or all(value is None for value in row):
        raise SourceError(
            f"{request.where_it_is}: version_query gives {'no row' if row is None else 'NULL'}. Expected a "
            "value that changes whenever the rows do"
        )
    return digest_json([f"{type(value).__name__} {value}" for value in row])


class _Seen:
    """What is noted of rows as they come, in the order of their keys."""

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
            raise SourceError(f"{where}: key {names} is NULL in {format_count(nulls)} rows. {cure}")
        if self._again and request.unique:
            shown = ", ".join(", ".join(map(_shown, key)) for key in self._twice)
            more = " and others" if self._again > len(self._twice) else ""
            raise SourceError(
                f"{where}: key {names} comes again in {format_count(self._again)} rows: {shown}{more}. {cure}"
            )
        kinds = {tag for found in tags for tag in found}
        if not kinds <= KEYS or any(len(found) > 1 for found in tags):
            raise SourceError(
                f"{where}: key {names} has values of type {', '.join(sorted(NAMES[tag] for tag in kinds))}. "
                "Expected integers or text, one kind in a column"
            )


def _shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, Text) else str(value)
