"""What happened to jobs, in the order in which it was committed.

An event is written in the transaction of what it tells, so there is none without its fact and no fact without
its event. Its number comes from a counter whose row the writer holds until it commits: numbers have no gaps
and become visible in their order, so whoever has read up to n and asks for what comes after n misses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from stoker.service.schema import COUNTERS, EVENTS

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.database import Database

KINDS = frozenset(
    {
        "queued",
        "claimed",
        "started",
        "progress",
        "batch",
        "metrics",
        "pausing",
        "paused",
        "resumed",
        "cancelling",
        "cancelled",
        "completed",
        "failed",
        "deleted",
    }
)
"""`queued` at creation and when a lost job goes back, `claimed` by a worker, `started` told by the job itself
once it trains, `resumed` by `resume` and `extend`; the others are what they say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened."""

    number: int
    """Its place in the order; the first is 1."""
    job: str
    kind: str
    """One of `KINDS`."""
    at: float
    """Unix seconds by the database's clock."""
    data: dict[str, Json]
    size: int = 0
    """Characters of its data as JSON."""


class Outbox:
    """The events of a database, to be read from any point that has not been pruned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self, after: int, *, job: str | None = None, kinds: Collection[str] = (), limit: int = 500
    ) -> list[Event]:
        """The next events after number `after`, at most `limit`; of one job, or of some kinds, if given."""
        query = _WHOLE.where(_following(after, job)).limit(limit)
        if kinds:
            query = query.where(EVENTS.c.kind.in_(tuple(kinds)))
        with self._database.reading() as connection:
            return [Event(**row) for row in connection.execute(query).mappings()]

    def newest_of(self, kind: str, jobs: Collection[str]) -> dict[str, Event]:
        """Return the newest event of a kind for each of the jobs that have one, by job."""
        newest = (
            sa.select(sa.func.max(EVENTS.c.number))
            .where(EVENTS.c.kind == kind, EVENTS.c.job.in_(tuple(jobs)))
            .group_by(EVENTS.c.job)
        )
        with self._database.reading() as connection:
            rows = connection.execute(_WHOLE.where(EVENTS.c.number.in_(newest))).mappings()
            return {row["job"]: Event(**row) for row in rows}

    def read_page(self, after: int, *, job: str | None = None, limit: int, most: int) -> list[Event]:
        """The same, as many as have `most` characters together; the first of them has however many it has.

        Their sizes are asked for before the events, so that no more of these is ever held.
        """
        with self._database.reading() as connection:
            last, total = after, 0
            for row in connection.execute(_SIZES.where(_following(after, job)).limit(limit)):
                total += row.size
                if last > after and total > most:
                    break
                last = row.number
            if last == after:
                return []
            query = _WHOLE.where(_following(after, job), EVENTS.c.number <= last)
            return [Event(**row) for row in connection.execute(query).mappings()]

    def newest(self) -> int:
        """The number given last; 0 before the first."""
        with self._database.reading() as connection:
            return connection.execute(_COUNTED).scalar_one()

    def oldest(self) -> int:
        """The lowest number still there: who has read less far missed something. Without any, the next."""
        with self._database.reading() as connection:
            lowest = connection.execute(sa.select(sa.func.min(EVENTS.c.number))).scalar()
            return lowest or connection.execute(_COUNTED).scalar_one() + 1

    def prune(self, *, max_age_s: float, max_count: int) -> int:
        """Remove events older than `max_age_s` and all but the newest `max_count`; how many were removed.

        The newest stays whatever its age, so that the order never has to be guessed from an empty table.
        """
        newest = _COUNTED.scalar_subquery()
        too_old = EVENTS.c.at < self._database.wall - max_age_s
        too_many = EVENTS.c.number <= newest - max_count
        with self._database.writing() as connection:
            gone = connection.execute(
                EVENTS.delete().where(sa.or_(too_old, too_many), EVENTS.c.number < newest)
            )
            return gone.rowcount


_SIZE = sa.func.length(sa.cast(EVENTS.c.data, sa.Text)).label("size")
_WHOLE = sa.select(EVENTS, _SIZE).order_by(EVENTS.c.number)
_SIZES = sa.select(EVENTS.c.number, _SIZE).order_by(EVENTS.c.number)
_COUNTED = sa.select(COUNTERS.c.value).where(COUNTERS.c.name == "event")


def _following(after: int, job: str | None) -> sa.ColumnElement[bool]:
    """Events after a number; of one job, if given."""
    later = EVENTS.c.number > after
    return later if job is None else sa.and_(later, EVENTS.c.job == job)


def append(
    connection: sa.Connection,
    wall: sa.ColumnElement[float],
    job: str,
    happened: Sequence[tuple[str, dict[str, Json]]],
) -> None:
    """Write events of one job in the caller's transaction, each `(kind, data)`.

    Call it last: from here to the commit no other writer of events gets on.

    Args:
        connection: In a transaction that writes.
        wall: `Database.wall`.
        job: Whose events.
        happened: In their order.
    """
    if not happened:
        return
    last = connection.execute(
        COUNTERS.update()
        .where(COUNTERS.c.name == "event")
        .values(value=COUNTERS.c.value + len(happened))
        .returning(COUNTERS.c.value)
    ).scalar_one()
    at = connection.execute(sa.select(wall)).scalar_one()
    first = last - len(happened) + 1
    rows = [
        {"number": number, "job": job, "kind": kind, "at": at, "data": data}
        for number, (kind, data) in enumerate(happened, first)
    ]
    connection.execute(EVENTS.insert(), rows)
