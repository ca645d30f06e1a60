"""Who works on which job: leases with a fencing token, by the database's clock.

A worker claims a job, and from then on says at least once a lease that it is alive. Whoever is late loses
the job: `sweep` gives it to others, and what the late one still reports is refused, because the number of the
claim (`attempt`) is part of every UPDATE it makes. No process's own clock decides anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from stoker.errors import LeaseLost
from stoker.service.dataset_table import DATASETS
from stoker.service.jobs import Job, job_of
from stoker.service.lines import SHOWN, Line
from stoker.service.outbox import append
from stoker.service.schema import JOBS, METRICS
from stoker.service.states import ENDED, HELD, WAITING, State, before

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long a lease is, and how often a job may lose its worker."""

    lease_s: float = 30.0
    """A worker that was not heard of for this long has lost its job."""
    max_losses: int = 5
    """Attempts in a row that may end without a result and without a finished epoch; then the job fails."""
    backoff_s: float = 2.0
    """Wait before the next attempt after a loss; twice as long after each further one, 64 times at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker's hold on a job."""

    job: Job
    """As it was when it was claimed."""
    worker: str
    attempt: int
    """The fencing token: a later claim has a higher one."""
    position: int
    """Bytes of the job's `events.jsonl` that are already in the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    state: State
    """completed, failed, paused or cancelled."""
    message: str = ""
    error: str | None = None
    exit_code: int | None = None
    data: Mapping[str, Json] | None = None
    """What the process said at its end."""


class Leases:
    """Claims on the jobs of a database."""

    def __init__(self, database: Database, terms: Terms | None = None) -> None:
        self._database = database
        self.terms = terms or Terms()

    def claim(self, worker: str) -> Claim | None:
        """The oldest job that waits, now this worker's; None when none does.

        Many may ask at once: each job goes to one of them, and none waits for another (PostgreSQL skips rows
        that are being claimed).
        """
        database, clock = self._database, self._database.lease_clock
        oldest = (
            sa.select(JOBS.c.number)
            .where(JOBS.c.state.in_(tuple(WAITING)), JOBS.c.not_before <= clock)
            .order_by(JOBS.c.number)
            .limit(1)
        )
        take = (
            JOBS.update()
            .where(JOBS.c.number == oldest.with_for_update(skip_locked=True).scalar_subquery())
            .values(
                state=State.RUNNING,
                worker=worker,
                attempt=JOBS.c.attempt + 1,
                lease_until=clock + self.terms.lease_s,
                message="",
                started=sa.func.coalesce(JOBS.c.started, database.wall),
            )
            .returning(JOBS)
        )
        with database.reading() as connection:  # most of the time nothing waits: no reason to lock anything
            if connection.execute(oldest).first() is None:
                return None
        with database.writing() as connection:
            if (row := connection.execute(take).mappings().one_or_none()) is None:
                return None
            claim = Claim(job=job_of(row), worker=worker, attempt=row["attempt"], position=row["position"])
            told: dict[str, Json] = {"attempt": claim.attempt, "worker": worker}
            append(connection, database.wall, claim.job.id, [("claimed", told)])
        return claim

    def look(self, claim: Claim) -> State:
        """What is wanted of the job now: running, pausing or cancelling; costs no write.

        Raises:
            LeaseLost: Another has it, or it has ended.
        """
        held = sa.select(JOBS.c.state).where(_of(claim), JOBS.c.state.in_(tuple(HELD)))
        with self._database.reading() as connection:
            if (state := connection.execute(held).scalar()) is None:
                raise _lost(claim)
        return State(state)

    def heartbeat(self, claim: Claim) -> State:
        """Hold on to the job for another lease; what is wanted of it now: running, pausing or cancelling.

        Raises:
            LeaseLost: Another has it, or it has ended.
        """
        with self._database.writing() as connection:
            return State(self._held(connection, claim, {})["state"])

    def report(self, claim: Claim, lines: Sequence[Line], position: int) -> State:
        """Store what the job's process wrote up to `position`, all or nothing, and hold on; as `heartbeat`.

        Metrics become rows, everything becomes events. The lines `completed` and `failed` are for `finish`.

        Raises:
            LeaseLost: Another has it, or it has ended: nothing was stored.
        """
        with self._database.writing() as connection:
            row = self._held(connection, claim, {**_shown(lines), "position": position})
            self._store(connection, claim.job.id, lines)
        return State(row["state"])

    def finish(self, claim: Claim, outcome: Outcome, *, lines: Sequence[Line], position: int) -> Job:
        """End the attempt and let go of the job, with the last lines of its process, in one transaction.

        Asking again after an answer that never came is safe: the second time finds it done.

        Raises:
            LeaseLost: Another has it, or it has ended otherwise: nothing was stored.
        """
        values = {
            **_shown(lines),
            "position": position,
            "state": outcome.state,
            "message": outcome.message,
            "error": outcome.error,
            "exit_code": outcome.exit_code,
            "lease_until": None,
            "ended": self._database.wall if outcome.state in ENDED else None,
        }
        if outcome.state is State.COMPLETED:
            values["progress"] = 1.0
        told: dict[str, Json] = {**(outcome.data or {}), "message": outcome.message, "attempt": claim.attempt}
        if outcome.error is not None:
            told["error"] = outcome.error
        with self._database.writing() as connection:
            if (row := self._changed(connection, claim, before(outcome.state) & HELD, values)) is None:
                return self._done_before(connection, claim, outcome)
            if claim.job.kind == "generation" and outcome.state is State.COMPLETED:
                of_job = sa.and_(DATASETS.c.id.in_(claim.job.dataset_ids), DATASETS.c.health == "making")
                connection.execute(DATASETS.update().where(of_job).values(health="unknown"))
            self._store(connection, claim.job.id, lines, then=(outcome.state.value, told))
        return job_of(row)

    def give_back(self, claim: Claim, why: str, *, lost: bool, wait_s: float = 0.0) -> Job:
        """Let go of a job that is to go on later: another worker takes it, or what was asked of it is done.

        Args:
            claim: The hold.
            why: For the events.
            lost: Whether the attempt failed by itself; after `Terms.max_losses` in a row the job fails.
            wait_s: How long nobody is to take it.

        Raises:
            LeaseLost: Another has it, or it has ended.
        """
        with self._database.writing() as connection:
            row = self._let_go(connection, _of(claim), why, lost=lost, wait_s=wait_s)
            if row is None:
                raise _lost(claim)
        return job_of(row)

    def abandon(self, worker: str) -> int:
        """End the leases of a worker that is known to be dead, so that `sweep` need not wait; how many."""
        return self._abandon(JOBS.c.worker == worker)

    def abandon_slot(self, worker: str) -> int:
        """The same for all that had a worker's slot before it: named alike up to the last dash."""
        slot = worker.rpartition("-")[0] + "-"
        alike = JOBS.c.worker.startswith(slot, autoescape=True)
        return self._abandon(sa.and_(alike, JOBS.c.worker != worker))

    def _abandon(self, workers: sa.ColumnElement[bool]) -> int:
        with self._database.writing() as connection:
            ended = connection.execute(
                JOBS.update()
                .where(workers, JOBS.c.state.in_(tuple(HELD)))
                .values(lease_until=self._database.lease_clock - 1.0)
            )
            return ended.rowcount

    def sweep(self) -> list[Job]:
        """Take the jobs away from workers that were not heard of for a lease, a transaction each.

        A job that ran waits for its next attempt, or fails when it had too many; one that was being paused or
        cancelled is paused or cancelled.
        """
        late = sa.and_(JOBS.c.state.in_(tuple(HELD)), JOBS.c.lease_until < self._database.lease_clock)
        with self._database.reading() as connection:
            numbers = connection.execute(sa.select(JOBS.c.number).where(late)).scalars().all()
        swept: list[Job] = []
        for number in numbers:
            with self._database.writing() as connection:
                row = self._let_go(
                    connection, sa.and_(JOBS.c.number == number, late), "its worker is gone", lost=True
                )
            if row is not None:
                swept.append(job_of(row))
        return swept

    def _held(self, connection: sa.Connection, claim: Claim, values: Mapping[str, Any]) -> sa.RowMapping:
        """The row after an UPDATE under the fence, which every change by a worker begins with."""
        until = self._database.lease_clock + self.terms.lease_s
        row = self._changed(connection, claim, HELD, {**values, "lease_until": until})
        if row is None:
            raise _lost(claim)
        return row

    def _changed(
        self, connection: sa.Connection, claim: Claim, states: frozenset[State], values: Mapping[str, Any]
    ) -> sa.RowMapping | None:
        change = (
            JOBS.update().where(_of(claim), JOBS.c.state.in_(tuple(states))).values(**values).returning(JOBS)
        )
        return connection.execute(change).mappings().one_or_none()

    def _let_go(
        self,
        connection: sa.Connection,
        which: sa.ColumnElement[bool],
        why: str,
        *,
        lost: bool,
        wait_s: float = 0.0,
    ) -> sa.RowMapping | None:
        """End an attempt without a result: where the job goes is decided in the one UPDATE."""
        database, terms = self._database, self.terms
        state, losses = JOBS.c.state, JOBS.c.losses + int(lost)
        wait = terms.backoff_s * _power_of_two(JOBS.c.losses) if lost else sa.literal(wait_s)
        spent = sa.and_(state == State.RUNNING, losses >= terms.max_losses)
        to = sa.case(
            (state == State.PAUSING, State.PAUSED),
            (state == State.CANCELLING, State.CANCELLED),
            (spent, State.FAILED),
            (wait > 0.0, State.PENDING),
            else_=State.QUEUED,
        )
        ends = sa.or_(spent, state == State.CANCELLING)
        error = f"{terms.max_losses} attempts in a row ended without a finished epoch; the last: {why}"
        change = (
            JOBS.update()
            .where(which, state.in_(tuple(HELD)))
            .values(
                state=to,
                losses=losses,
                lease_until=None,
                not_before=database.lease_clock + wait,
                message=why,
                error=sa.case((spent, error), else_=JOBS.c.error),
                ended=sa.case((ends, database.wall), else_=None),
            )
            .returning(JOBS)
        )
        if (row := connection.execute(change).mappings().one_or_none()) is not None:
            kind = "queued" if State(row["state"]) in WAITING else row["state"]
            told: dict[str, Json] = {"message": why, "attempt": row["attempt"]}
            if row["error"] is not None:
                told["error"] = row["error"]
            append(connection, database.wall, row["id"], [(kind, told)])
        return row

    def _done_before(self, connection: sa.Connection, claim: Claim, outcome: Outcome) -> Job:
        same = sa.and_(_of(claim), JOBS.c.state == outcome.state)
        row = connection.execute(sa.select(JOBS).where(same)).mappings().one_or_none()
        if row is None:
            raise _lost(claim)
        return job_of(row)

    def _store(
        self,
        connection: sa.Connection,
        job: str,
        lines: Sequence[Line],
        then: tuple[str, dict[str, Json]] | None = None,
    ) -> None:
        told = [(line.kind, line.data) for line in lines if line.kind not in ("completed", "failed")]
        for data in (data for kind, data in told if kind == "metrics"):
            row = self._database.insert(METRICS).values(
                job=job, epoch=data["epoch"], at=self._database.wall, data=data
            )
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=["job", "epoch"],
                    set_={"at": row.excluded.at, "data": row.excluded.data},
                )
            )
        append(connection, self._database.wall, job, [*told, *([then] if then else [])])


def _of(claim: Claim) -> sa.ColumnElement[bool]:
    """The fence."""
    return sa.and_(JOBS.c.id == claim.job.id, JOBS.c.attempt == claim.attempt, JOBS.c.worker == claim.worker)


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(
        f"worker {claim.worker} no longer has job {claim.job.id} (attempt {claim.attempt}): its lease ended "
        "and the job went on without it, or it has ended. Nothing was changed"
    )


def _power_of_two(losses: sa.ColumnElement[int]) -> sa.ColumnElement[float]:
    """1, 2, 4 ... 64."""
    return sa.case(*((losses == count, float(2**count)) for count in range(6)), else_=64.0)


def _shown(lines: Sequence[Line]) -> dict[str, Any]:
    """What lines change in the row of their job: the newest of each, and the best epoch there was."""
    values: dict[str, Any] = {}
    measured: list[tuple[int, float]] = []
    for line in lines:
        values.update({name: line.data[name] for name in SHOWN if name in line.data})
        epoch, loss = line.data.get("epoch"), line.data.get("val_loss")
        if line.kind == "metrics" and isinstance(epoch, int):
            measured.append((epoch, float(loss) if isinstance(loss, int | float) else math.inf))
    if measured:
        told = sa.select(sa.func.max(METRICS.c.epoch)).where(METRICS.c.job == JOBS.c.id).scalar_subquery()
        gets_on = sa.func.coalesce(told, 0) < max(measured)[0]  # an epoch told again is no progress
        values["losses"] = sa.case((gets_on, 0), else_=JOBS.c.losses)
        epoch, loss = min(measured, key=lambda pair: pair[1])
        better = sa.func.coalesce(JOBS.c.best_val_loss, math.inf) > loss
        values["best_val_loss"] = sa.case((better, loss), else_=JOBS.c.best_val_loss)
        values["best_epoch"] = sa.case((better, epoch), else_=JOBS.c.best_epoch)
    return values
