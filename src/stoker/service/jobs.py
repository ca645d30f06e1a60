"""Jobs: created, read and controlled by the API and the pages, taken and reported on by workers.

Each request is one UPDATE that names the states it may start from (`database.MOVES`); nothing is read first
and written later. The same request twice is not an error: the second answer equals the first.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from stoker.errors import ConfigError, ConflictError, LostAttemptError, NotFoundError
from stoker.service.database import (
    DATASETS,
    ENDED_STATES,
    EXTENSIONS,
    HELD_STATES,
    JOBS,
    METRICS,
    WAITING_STATES,
    State,
    append,
    before,
)
from stoker.service.journal import SHOWN
from stoker.service.listing import JobFilter, check_tags, condition, elapsed, order
from stoker.service.security import check_name

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.database import Database
    from stoker.service.journal import Line

KINDS = ("training", "generation")
NAME_LENGTH = 200
"""Characters of a name, and of an idempotency key."""
MAX_EPOCHS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The state of one job at one moment. Times are unix seconds by the database's clock."""

    id: str
    name: str
    kind: str
    """`training` or `generation`."""
    state: State
    config: dict[str, Json]
    """The configuration as it was accepted."""
    dataset_ids: list[str]
    tags: list[str]
    """In alphabetical order."""
    created: float
    started: float | None
    """When a worker took it for the first time."""
    ended: float | None
    attempt: int
    """How often a worker took it."""
    worker: str | None
    """The worker that holds it, or held it last."""
    epoch: int
    """Epochs finished."""
    epochs: int
    """Epochs wanted."""
    progress: float
    """0 to 1."""
    message: str
    """Its current work, in words."""
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_epoch: int | None
    learning_rate: float | None
    stall: float | None
    """Share of a step that waited for data, 0 to 1."""
    tier: str | None
    """Where its batches come from: device, host, disk or encode."""
    checkpoint: str | None
    """Name of the newest checkpoint in its folder."""
    parent: str | None
    """The job that it continues."""
    error: str | None
    exit_code: int | None
    """Of its last process; negative: the signal that ended it."""
    worked_s: float
    """Seconds that workers had it, without the current attempt."""
    taken: float | None
    """When the current attempt began; None: no worker has it."""

    def elapsed_s(self, now: float) -> float:
        """Return the seconds that workers had the job, up to `now`."""
        return max(0.0, self.worked_s + (0.0 if self.taken is None else now - self.taken))


_FIELDS = tuple(JOBS.c[field.name] for field in fields(Job))
_ONE = sa.select(*_FIELDS).where(JOBS.c.id == sa.bindparam("id"))
"""Built once: building it takes as long as executing it."""


def job_of(row: sa.RowMapping) -> Job:
    """Return a job from a row with at least its columns."""
    values: dict[str, Any] = {column.name: row[column] for column in _FIELDS}
    values["state"] = State(values["state"])
    return Job(**values)


class Jobs:
    """The jobs of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(  # noqa: PLR0913 - the parts of a job, by name
        self,
        config: dict[str, Json],
        *,
        name: str,
        epochs: int,
        kind: str = "training",
        dataset_ids: Sequence[str] = (),
        tags: Sequence[str] = (),
        key: str | None = None,
        parent: str | None = None,
    ) -> tuple[Job, bool]:
        """Return the job, and whether this call created it: requests with the same `key` share one job.

        Raises:
            ConflictError: The key belongs to a job with another body.
            ConfigError: The name, key, kind, a tag or the number of epochs is invalid.
            DegradedError: The database does not answer; with a key it is safe to try again.
        """
        _check(name=name, key=key, kind=kind, epochs=epochs)
        body = {"config": config, "name": name, "kind": kind, "dataset_ids": list(dataset_ids)}
        asked = {**body, "epochs": epochs, "parent": parent}
        if tags:  # a key of an earlier version has a digest without tags
            asked["tags"] = check_tags(tags)
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, allow_nan=False).encode()).hexdigest()
        values = {**asked, "id": str(uuid.uuid4()), "key": key, "digest": digest, "state": State.QUEUED}
        made = (
            self._database.insert(JOBS)
            .values(**values, created=self._database.wall)
            .on_conflict_do_nothing(index_elements=["key"])
            .returning(*_FIELDS)
        )
        with self._database.writing() as connection:
            if (row := connection.execute(made).mappings().one_or_none()) is not None:
                append(connection, self._database.wall, row["id"], [("queued", {"name": name})])
                return job_of(row), True
            there = sa.select(*_FIELDS, JOBS.c.digest).where(JOBS.c.key == key)
            row = connection.execute(there).mappings().one_or_none()
        if row is None:  # it was deleted between the two
            return self.create(config, name=name, epochs=epochs, kind=kind, dataset_ids=dataset_ids,
                               tags=tags, key=key, parent=parent)  # fmt: skip
        if row["digest"] != digest:
            raise ConflictError(
                f"the idempotency key {key!r} belongs to job {row['id']}, which was asked for with another "
                "body",
                hint="Use a new key for another job",
            )
        return job_of(row), False

    def get(self, id: str) -> Job:
        """Return one job.

        Raises:
            NotFoundError: The job does not exist.
        """
        with self._database.reading() as connection:
            return _found(connection, id)

    def exists(self, id: str) -> bool:
        """Return True if a job exists."""
        with self._database.reading() as connection:
            return connection.execute(sa.select(JOBS.c.number).where(JOBS.c.id == id)).first() is not None

    def list(self, which: JobFilter | State | None = None, *, limit: int = 50, offset: int = 0) -> list[Job]:
        """Return jobs of a filter or a state, or of all, in the order of the filter: the newest first."""
        chosen = _filter(which)
        ordered = order(chosen.sort, self._database.wall)
        shown = (
            sa.select(JOBS.c.number).where(condition(chosen)).order_by(*ordered).limit(limit).offset(offset)
        )
        query = sa.select(*_FIELDS).where(JOBS.c.number.in_(shown)).order_by(*ordered)
        with self._database.reading() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def count(self, which: JobFilter | State | None = None) -> int:
        """Return the number of jobs of a filter or a state, or of all."""
        query = sa.select(sa.func.count()).select_from(JOBS).where(condition(_filter(which)))
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one()

    def tags(self, *, limit: int = 500) -> list[str]:
        """Return the tags of all jobs, or `limit` of the newest, each once, in alphabetical order."""
        used = sa.type_coerce(JOBS.c.tags, sa.Text) > ""
        query = sa.select(JOBS.c.tags).where(used).group_by(JOBS.c.tags).limit(limit)
        newest = query.order_by(sa.func.max(JOBS.c.number).desc())
        with self._database.reading() as connection:
            rows = connection.execute(newest).scalars()
            return sorted([*dict.fromkeys(tag for tags in rows for tag in tags)][:limit])

    def counts(self, which: JobFilter | None = None) -> dict[State, int]:
        """Return the number of jobs of a filter, or of all, in each state."""
        query = sa.select(JOBS.c.state, sa.func.count()).where(condition(_filter(which)))
        query = query.group_by(JOBS.c.state)
        with self._database.reading() as connection:
            found = {State(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in State}

    def running(self) -> list[Job]:
        """Return the jobs that a worker has, the oldest first."""
        query = sa.select(*_FIELDS).where(JOBS.c.state.in_(tuple(HELD_STATES))).order_by(JOBS.c.number)
        with self._database.reading() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def waiting_before(self, id: str) -> int:
        """Return how many jobs wait that are taken before this one."""
        own = sa.select(JOBS.c.number).where(JOBS.c.id == id).scalar_subquery()
        earlier = sa.select(sa.func.count()).where(
            JOBS.c.state.in_(tuple(WAITING_STATES)), JOBS.c.number < own
        )
        with self._database.reading() as connection:
            return connection.execute(earlier).scalar_one()

    def longest_wait_s(self) -> float:
        """Return for how long the oldest job waits that no worker has taken yet, or 0."""
        oldest = sa.select(self._database.wall - sa.func.min(JOBS.c.created)).where(
            JOBS.c.state.in_(tuple(WAITING_STATES)), JOBS.c.attempt == 0
        )
        with self._database.reading() as connection:
            return max(0.0, connection.execute(oldest).scalar() or 0.0)

    def cancel(self, id: str) -> Job:
        """End a job: at once without a worker, else as soon as its process has ended (`cancelling`).

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: It is completed or failed.
        """
        idle = (*WAITING_STATES, State.PAUSED)
        now = JOBS.c.state.in_(idle)
        return self._ask(
            id,
            "cancelled",
            (*idle, State.RUNNING, State.PAUSING),
            {
                "state": sa.case((now, State.CANCELLED), else_=State.CANCELLING),
                "ended": sa.case((now, self._database.wall), else_=JOBS.c.ended),
            },
            already=(State.CANCELLING, State.CANCELLED),
        )

    def pause(self, id: str) -> Job:
        """Stop a job with a checkpoint: at once without a worker, else through `pausing`.

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: It has ended, or is being cancelled.
        """
        to = sa.case((JOBS.c.state.in_(tuple(WAITING_STATES)), State.PAUSED), else_=State.PAUSING)
        return self._ask(
            id,
            "paused",
            (*WAITING_STATES, State.RUNNING),
            {"state": to},
            already=(State.PAUSING, State.PAUSED),
        )

    def resume(self, id: str) -> Job:
        """Queue a job again; it continues from its newest valid checkpoint.

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: It runs (or is pausing or cancelling), or is completed.
        """
        values = {"state": State.QUEUED, **self._fresh()}
        allowed = (State.PAUSED, State.CANCELLED, State.FAILED)
        return self._ask(id, "resumed", allowed, values, already=tuple(WAITING_STATES))

    def extend(self, id: str, epochs: int, *, key: str | None = None) -> Job:
        """Let a completed job train `epochs` more, from its last checkpoint.

        The same `key` again returns the job and adds nothing, whatever its state is by then.

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: It is not completed, so resume a stopped job first; or the key belongs to another
                number of epochs.
            ConfigError: `epochs` is below 1 or too large, or the key is invalid.
        """
        _check(name="more", key=key, kind="training", epochs=epochs)
        same_key = sa.and_(EXTENSIONS.c.job == id, EXTENSIONS.c.key == key)
        total = JOBS.c.epoch + epochs
        values = {
            "state": State.QUEUED,
            "epochs": total,
            "progress": 1.0 * JOBS.c.epoch / total,
            **self._fresh(),
        }
        allowed = (State.COMPLETED,)
        with self._database.writing() as connection:
            job = self._moved(connection, id, allowed, values, ~sa.exists().where(same_key))
            if job is not None:
                if key is not None:
                    connection.execute(EXTENSIONS.insert().values(job=id, key=key, epochs=epochs))
                return job
            job = _found(connection, id)
            known = connection.execute(sa.select(EXTENSIONS.c.epochs).where(same_key)).scalar()
        if known is None:
            raise _refusal(job, "extended", allowed)
        if known != epochs:
            raise ConflictError(
                f"the idempotency key {key!r} gave job {id} {known:,} more epochs, and not {epochs:,}",
                hint="Use a new key for further epochs",
            )
        return job

    def change(
        self,
        id: str,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        add_tags: Sequence[str] = (),
        remove_tags: Sequence[str] = (),
    ) -> Job:
        """Change the name of a job or its tags, in any state; return it.

        Args:
            id: The job.
            name: The new name; None: the same.
            tags: All tags; None: those that it has.
            add_tags: Tags to add to these.
            remove_tags: Tags to take off; one that the job does not have is not an error.

        Raises:
            NotFoundError: The job does not exist.
            ConfigError: The name or a tag is invalid, or there are too many tags.
        """
        own = (
            sa.select(*_FIELDS).where(JOBS.c.id == id).with_for_update()
        )  # the tags may depend on those read
        with self._database.writing() as connection:
            if (row := connection.execute(own).mappings().one_or_none()) is None:
                raise _unknown(id)
            job = job_of(row)
            base = {*(job.tags if tags is None else tags), *add_tags} - {tag.strip() for tag in remove_tags}
            changed = replace(job, name=job.name if name is None else name, tags=check_tags(base))
            if changed != job:
                _check(name=changed.name, key=None, kind=job.kind, epochs=job.epochs)
                values: dict[str, Json] = {"name": changed.name, "tags": list(changed.tags)}
                connection.execute(JOBS.update().where(JOBS.c.id == id).values(**values))
                append(connection, self._database.wall, id, [("changed", values)])
        return changed

    def delete(self, id: str) -> None:
        """Delete a job without a worker, with its metrics; the service removes its folder later.

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: It waits or runs; cancel it first.
        """
        allowed = (*ENDED_STATES, State.PAUSED)
        with self._database.writing() as connection:
            gone = connection.execute(JOBS.delete().where(JOBS.c.id == id, JOBS.c.state.in_(allowed)))
            if not gone.rowcount:
                raise _refusal(_found(connection, id), "deleted", allowed)
            append(connection, self._database.wall, id, [("deleted", {})])

    def active_since(self, at: float, *, limit: int) -> Sequence[Job]:
        """Return the newest jobs that a worker has taken and that had not ended at a time (Unix seconds)."""
        query = sa.select(*_FIELDS).where(
            JOBS.c.started.is_not(None), sa.or_(JOBS.c.ended.is_(None), JOBS.c.ended >= at)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(JOBS.c.number.desc()).limit(limit)).mappings()
            return [job_of(row) for row in rows]

    def metrics(self, id: str, *, limit: int = 100, after: int = 0) -> list[dict[str, Json]]:
        """Return what was measured from epoch `after` + 1 on, one row per epoch: `epoch`, `at` and the rest.

        Raises:
            NotFoundError: The job does not exist.
        """
        query = (
            sa.select(METRICS)
            .where(METRICS.c.job == id, METRICS.c.epoch > after)
            .order_by(METRICS.c.epoch)
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
            if not rows:
                _found(connection, id)
        return [{**row["data"], "epoch": row["epoch"], "at": row["at"]} for row in rows]

    def _fresh(self) -> dict[str, Any]:
        """Return the columns of its end that a job resets when it is queued again."""
        return {
            "ended": None,
            "error": None,
            "exit_code": None,
            "losses": 0,
            "not_before": 0.0,
            "message": "",
        }

    def _ask(
        self,
        id: str,
        what: str,
        allowed: Sequence[State],
        values: Mapping[str, Any],
        *,
        already: Sequence[State],
    ) -> Job:
        with self._database.writing() as connection:
            if (job := self._moved(connection, id, allowed, values)) is None:
                job = _found(connection, id)
                if job.state not in already:
                    raise _refusal(job, what, allowed)
        return job

    def _moved(
        self,
        connection: sa.Connection,
        id: str,
        allowed: Sequence[State],
        values: Mapping[str, Any],
        *only_if: sa.ColumnElement[bool],
    ) -> Job | None:
        """Return the job after its move and the event of it; None: it is in another state."""
        move = (
            JOBS.update()
            .where(JOBS.c.id == id, JOBS.c.state.in_(allowed), *only_if)
            .values(**values)
            .returning(*_FIELDS)
        )
        if (row := connection.execute(move).mappings().one_or_none()) is None:
            return None
        job = job_of(row)
        kind = "resumed" if job.state is State.QUEUED else job.state.value
        append(connection, self._database.wall, id, [(kind, {"epochs": job.epochs})])
        return job


def _found(connection: sa.Connection, id: str) -> Job:
    row = connection.execute(_ONE, {"id": id}).mappings().one_or_none()
    if row is None:
        raise _unknown(id)
    return job_of(row)


def _unknown(id: str) -> NotFoundError:
    return NotFoundError(f"job {id!r} does not exist", hint="`stoker job list` shows all jobs")


def _filter(which: JobFilter | State | None) -> JobFilter:
    if isinstance(which, JobFilter):
        return which
    return JobFilter(states=frozenset() if which is None else frozenset({which}))


def _refusal(job: Job, what: str, allowed: Sequence[State]) -> ConflictError:
    return ConflictError(
        f"job {job.id} is {job.state} and cannot be {what}: that takes a job that is "
        f"{', '.join(sorted(allowed))}",
        state=job.state,
    )


def _check(*, name: str, key: str | None, kind: str, epochs: int) -> None:
    for label, text in (("name", name), ("idempotency key", key or "-")):
        if not 1 <= len(text) <= NAME_LENGTH or not text.isprintable():
            raise ConfigError(
                f"the {label} of a job has 1 to {NAME_LENGTH} printable characters; {text[:40]!r} "
                f"({len(text)}) has not"
            )
    check_name(name)
    if kind not in KINDS:
        raise ConfigError(f"a job of kind {kind!r} is unknown; there are {', '.join(KINDS)}")
    if not 1 <= epochs <= MAX_EPOCHS:
        raise ConfigError(f"a job has 1 to {MAX_EPOCHS:,} epochs, not {epochs:,}")


# ----------------------------------------------------------------------------------------------------------
# Attempts: which worker has which job.
#
# A worker takes a job and has it until the attempt is over. The supervisor gives the job back (`release`)
# once the worker is dead. Every UPDATE by a worker contains the number of its attempt, so that a statement
# that was on its way when the worker was killed cannot change a later attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPolicy:
    """How long a worker may hang, and how often a job may lose its worker."""

    timeout_s: float = 30.0
    """A worker without a heartbeat for this long is killed, and its job is tried again."""
    room_wait_s: float = 30.0
    """Wait before the next attempt after one that found no space, or could not start."""
    max_losses: int = 5
    """Attempts in a row that may end without a result and without a finished epoch; then the job fails."""
    backoff_s: float = 2.0
    """Wait before the next attempt after a loss; twice as long after each further one, 64 times at most."""

    @property
    def longest_wait_s(self) -> float:
        """The longest wait of a job; a longer one means that the clock was set back."""
        return max(self.room_wait_s, 64 * self.backoff_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt:
    """One attempt of a worker at a job."""

    job: Job
    """As it was when the worker took it."""
    number: int
    """Increases with each attempt at the job that began."""
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
    """Data of the last event of the process."""


class JobQueue:
    """The jobs of a database, as workers and their supervisor see them."""

    def __init__(self, database: Database, retry: AttemptPolicy | None = None) -> None:
        self._database = database
        self.retry = retry or AttemptPolicy()

    def take(self, worker: str) -> JobAttempt | None:
        """Give the oldest waiting job to a worker and return the attempt; None if no job waits.

        Each job goes to one of many concurrent callers, and none waits for another (PostgreSQL skips rows
        that are being taken).
        """
        database, now = self._database, self._database.wall
        due = sa.or_(JOBS.c.not_before <= now, JOBS.c.not_before > now + self.retry.longest_wait_s)
        oldest = (
            sa.select(JOBS.c.number)
            .where(JOBS.c.state.in_(tuple(WAITING_STATES)), due)
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
                message="",
                started=sa.func.coalesce(JOBS.c.started, database.wall),
                taken=database.wall,
            )
            .returning(JOBS)
        )
        with database.reading() as connection:  # usually no job waits, and nothing needs to be locked
            if connection.execute(oldest).first() is None:
                return None
        with database.writing() as connection:
            if (row := connection.execute(take).mappings().one_or_none()) is None:
                return None
            attempt = JobAttempt(job=job_of(row), number=row["attempt"], position=row["position"])
            told: dict[str, Json] = {"attempt": attempt.number, "worker": worker}
            append(connection, database.wall, attempt.job.id, [("claimed", told)])
        return attempt

    def look(self, attempt: JobAttempt) -> State:
        """Return the requested state of the job: running, pausing or cancelling.

        Raises:
            LostAttemptError: Another attempt began, or the job has ended.
        """
        held = sa.select(JOBS.c.state).where(_of(attempt), JOBS.c.state.in_(tuple(HELD_STATES)))
        with self._database.reading() as connection:
            if (state := connection.execute(held).scalar()) is None:
                raise _lost(attempt)
        return State(state)

    def report(self, attempt: JobAttempt, lines: Sequence[Line], position: int) -> State:
        """Store the lines up to `position` in one transaction; return the same as `look`.

        Metrics become rows, and all lines become events. `completed` and `failed` are left to `finish`.

        Raises:
            LostAttemptError: Another attempt began, or the job has ended; nothing was stored.
        """
        with self._database.writing() as connection:
            values = {**_shown(lines), "position": position}
            if (row := self._changed(connection, attempt, HELD_STATES, values)) is None:
                raise _lost(attempt)
            self._store(connection, attempt.job.id, lines)
        return State(row["state"])

    def finish(self, attempt: JobAttempt, outcome: Outcome, *, lines: Sequence[Line], position: int) -> Job:
        """End the attempt with the last lines of its process in one transaction; return the job.

        Calling it again after a lost answer is safe.

        Raises:
            LostAttemptError: Another attempt began, the job has ended otherwise, or cannot go from its state
                to the outcome; nothing was stored.
        """
        values = {
            **_shown(lines),
            "position": position,
            "state": outcome.state,
            "message": outcome.message,
            "error": outcome.error,
            "exit_code": outcome.exit_code,
            "ended": self._database.wall if outcome.state in ENDED_STATES else None,
            "worked_s": elapsed(self._database.wall),
            "taken": None,
        }
        if outcome.state is State.COMPLETED:
            values["progress"] = 1.0
        told: dict[str, Json] = {
            **(outcome.data or {}),
            "message": outcome.message,
            "attempt": attempt.number,
        }
        if outcome.error is not None:
            told["error"] = outcome.error
        with self._database.writing() as connection:
            if (
                row := self._changed(connection, attempt, before(outcome.state) & HELD_STATES, values)
            ) is None:
                return self._done_before(connection, attempt, outcome)
            if attempt.job.kind == "generation" and outcome.state is State.COMPLETED:
                of_job = sa.and_(DATASETS.c.id.in_(attempt.job.dataset_ids), DATASETS.c.health == "making")
                connection.execute(DATASETS.update().where(of_job).values(health="unknown"))
            self._store(connection, attempt.job.id, lines, then=(outcome.state.value, told))
        return job_of(row)

    def give_back(
        self, attempt: JobAttempt, why: str, *, lost: bool, wait_s: float = 0.0, began: bool = True
    ) -> Job:
        """Give back a job that continues later, or carry out a pending request; return the job.

        Args:
            attempt: The attempt that is over.
            why: For the events.
            lost: Whether the attempt failed; after `AttemptPolicy.max_losses` in a row the job fails.
            wait_s: Seconds before another worker may take it.
            began: False if no process was started; then it does not count as an attempt.

        Raises:
            LostAttemptError: Another attempt began, or the job has ended.
        """
        with self._database.writing() as connection:
            row = self._let_go(connection, _of(attempt), why, lost=lost, wait_s=wait_s, began=began)
            if row is None:
                raise _lost(attempt)
        return job_of(row)

    def workers(self) -> set[str]:
        """Return the workers that have a job."""
        held = sa.select(JOBS.c.worker).where(JOBS.c.state.in_(tuple(HELD_STATES))).distinct()
        with self._database.reading() as connection:
            return set(connection.execute(held).scalars())

    def release(self, worker: str, why: str = "its worker is gone") -> list[Job]:
        """Give back the jobs of a dead worker, each in its own transaction; return them.

        A running job waits for its next attempt, or fails after too many; a pausing or cancelling job is
        paused or cancelled.
        """
        of_worker = sa.and_(JOBS.c.state.in_(tuple(HELD_STATES)), JOBS.c.worker == worker)
        with self._database.reading() as connection:
            numbers = connection.execute(sa.select(JOBS.c.number).where(of_worker)).scalars().all()
        released: list[Job] = []
        for number in numbers:
            with self._database.writing() as connection:
                row = self._let_go(connection, sa.and_(JOBS.c.number == number, of_worker), why, lost=True)
            if row is not None:
                released.append(job_of(row))
        return released

    def _changed(
        self,
        connection: sa.Connection,
        attempt: JobAttempt,
        states: frozenset[State],
        values: Mapping[str, Any],
    ) -> sa.RowMapping | None:
        change = (
            JOBS.update()
            .where(_of(attempt), JOBS.c.state.in_(tuple(states)))
            .values(**values)
            .returning(JOBS)
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
        began: bool = True,
    ) -> sa.RowMapping | None:
        """End an attempt without a result; the same UPDATE decides on the next state."""
        database, retry = self._database, self.retry
        state, losses = JOBS.c.state, JOBS.c.losses + int(lost)
        wait = retry.backoff_s * _power_of_two(JOBS.c.losses) if lost else sa.literal(wait_s)
        spent = sa.and_(state == State.RUNNING, losses >= retry.max_losses)
        to = sa.case(
            (state == State.PAUSING, State.PAUSED),
            (state == State.CANCELLING, State.CANCELLED),
            (spent, State.FAILED),
            (wait > 0.0, State.PENDING),
            else_=State.QUEUED,
        )
        ends = sa.or_(spent, state == State.CANCELLING)
        error = f"{retry.max_losses} attempts in a row ended without a finished epoch; the last: {why}"
        change = (
            JOBS.update()
            .where(which, state.in_(tuple(HELD_STATES)))
            .values(
                state=to,
                losses=losses,
                attempt=JOBS.c.attempt - int(not began),
                started=JOBS.c.started if began else sa.case((JOBS.c.attempt > 1, JOBS.c.started)),
                worked_s=elapsed(database.wall) if began else JOBS.c.worked_s,
                taken=None,
                not_before=database.wall + wait,
                message=why,
                error=sa.case((spent, error), else_=JOBS.c.error),
                ended=sa.case((ends, database.wall), else_=None),
            )
            .returning(JOBS)
        )
        if (row := connection.execute(change).mappings().one_or_none()) is not None:
            kind = "queued" if State(row["state"]) in WAITING_STATES else row["state"]
            told: dict[str, Json] = {"message": why, "attempt": row["attempt"]}
            if not began:
                told["waits_for"] = "data"
            if row["error"] is not None:
                told["error"] = row["error"]
            append(connection, database.wall, row["id"], [(kind, told)])
        return row

    def _done_before(self, connection: sa.Connection, attempt: JobAttempt, outcome: Outcome) -> Job:
        same = sa.and_(_of(attempt), JOBS.c.state == outcome.state)
        row = connection.execute(sa.select(JOBS).where(same)).mappings().one_or_none()
        if row is None:
            raise _lost(attempt)
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
            # The line may be read long after it was written, as when the database was away.
            at: Any = data.get("at")
            at = min(at, time.time()) if isinstance(at, int | float) else self._database.wall
            row = self._database.insert(METRICS).values(job=job, epoch=data["epoch"], at=at, data=data)
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=["job", "epoch"],
                    set_={"at": row.excluded.at, "data": row.excluded.data},
                )
            )
        append(connection, self._database.wall, job, [*told, *([then] if then else [])])


def _of(attempt: JobAttempt) -> sa.ColumnElement[bool]:
    return sa.and_(JOBS.c.id == attempt.job.id, JOBS.c.attempt == attempt.number)


def _lost(attempt: JobAttempt) -> LostAttemptError:
    return LostAttemptError(
        f"attempt {attempt.number} at job {attempt.job.id}, by worker {attempt.job.worker}, is over: the job "
        "continued without it, or has ended. Nothing was changed"
    )


def _power_of_two(losses: sa.ColumnElement[int]) -> sa.ColumnElement[float]:
    """Return 1, 2, 4 ... 64."""
    return sa.case(*((losses == count, float(2**count)) for count in range(6)), else_=64.0)


def _shown(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the changes of lines to the row of their job: the newest values, and the best epoch."""
    values: dict[str, Any] = {}
    measured: list[tuple[int, float]] = []
    for line in lines:
        shown = {name: line.data[name] for name in SHOWN if name in line.data}
        # An interval without batches has no tier; the job keeps its last one.
        values.update({name: value for name, value in shown.items() if value or name != "tier"})
        epoch, loss = line.data.get("epoch"), line.data.get("val_loss")
        if line.kind == "metrics" and isinstance(epoch, int):
            measured.append((epoch, float(loss) if isinstance(loss, int | float) else math.inf))
    if measured:
        told = sa.select(sa.func.max(METRICS.c.epoch)).where(METRICS.c.job == JOBS.c.id).scalar_subquery()
        advances = sa.func.coalesce(told, 0) < max(measured)[0]  # a repeated epoch is not progress
        values["losses"] = sa.case((advances, 0), else_=JOBS.c.losses)
        epoch, loss = min(measured, key=lambda pair: pair[1])
        better = sa.func.coalesce(JOBS.c.best_val_loss, math.inf) > loss
        values["best_val_loss"] = sa.case((better, loss), else_=JOBS.c.best_val_loss)
        values["best_epoch"] = sa.case((better, epoch), else_=JOBS.c.best_epoch)
    return values
