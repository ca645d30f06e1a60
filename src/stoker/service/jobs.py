"""Jobs as the API and the pages see them: make one, look at it, ask something of it.

Each request is one UPDATE that names the states it starts from (`states.py`); nothing is read first and
written later. Asking twice for the same thing is no error: the second answer is the first.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from stoker.errors import ConfigError, Conflict, NotFound
from stoker.service.outbox import append
from stoker.service.schema import JOBS, METRICS
from stoker.service.states import ENDED, WAITING, State

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.database import Database

KINDS = ("training", "generation")
NAME_LENGTH = 200
"""Characters of a name, and of an idempotency key."""
MAX_EPOCHS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as it stood at one moment. Times are unix seconds by the database's clock."""

    id: str
    name: str
    kind: str
    """`training` or `generation`."""
    state: State
    config: dict[str, Json]
    """What was asked for, as it was accepted."""
    dataset_ids: list[str]
    created: float
    started: float | None
    """When a worker took it for the first time."""
    ended: float | None
    attempt: int
    """How often a worker took it."""
    worker: str | None
    """Who holds it, or held it last."""
    epoch: int
    """Epochs finished."""
    epochs: int
    """Epochs wanted."""
    progress: float
    """0 to 1."""
    message: str
    """What it does now, in words."""
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
    """The job it goes on from."""
    error: str | None
    exit_code: int | None
    """Of its last process; negative: the signal that ended it."""


_FIELDS = tuple(JOBS.c[field.name] for field in fields(Job))
_ONE = sa.select(*_FIELDS).where(JOBS.c.id == sa.bindparam("id"))
"""Made once: making it takes as long as asking."""


def job_of(row: sa.RowMapping) -> Job:
    """A job from a row that holds at least its columns."""
    values: dict[str, Any] = {column.name: row[column] for column in _FIELDS}
    values["state"] = State(values["state"])
    return Job(**values)


class Jobs:
    """The jobs of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(  # noqa: PLR0913 -- what a job is made of, by name
        self,
        config: dict[str, Json],
        *,
        name: str,
        epochs: int,
        kind: str = "training",
        dataset_ids: Sequence[str] = (),
        key: str | None = None,
        parent: str | None = None,
    ) -> tuple[Job, bool]:
        """The job, and whether it was made now: `key` has one job however often and at once it is asked for.

        Raises:
            Conflict: The key belongs to a job that was asked for with something else.
            ConfigError: A name, key, kind or number that no job can have.
            Degraded: The database does not answer; with a key it is safe to ask again.
        """
        _check(name=name, key=key, kind=kind, epochs=epochs)
        body = {"config": config, "name": name, "kind": kind, "dataset_ids": list(dataset_ids)}
        asked = {**body, "epochs": epochs, "parent": parent}
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
            return self.create(config, name=name, epochs=epochs, kind=kind, dataset_ids=dataset_ids, key=key,
                               parent=parent)  # fmt: skip
        if row["digest"] != digest:
            raise Conflict(
                f"the idempotency key {key!r} belongs to job {row['id']}, which was asked for with another "
                "body. Use a new key for another job"
            )
        return job_of(row), False

    def get(self, id: str) -> Job:
        """One job.

        Raises:
            NotFound: There is none of that id.
        """
        with self._database.reading() as connection:
            return _found(connection, id)

    def exists(self, id: str) -> bool:
        """Whether there is a job of that id."""
        with self._database.reading() as connection:
            return connection.execute(sa.select(JOBS.c.number).where(JOBS.c.id == id)).first() is not None

    def list(self, state: State | None = None, *, limit: int = 50, offset: int = 0) -> list[Job]:
        """Jobs in a state or in any, the newest first."""
        query = sa.select(*_FIELDS).order_by(JOBS.c.number.desc()).limit(limit).offset(offset)
        if state is not None:
            query = query.where(JOBS.c.state == state)
        with self._database.reading() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def count(self, state: State | None = None) -> int:
        """How many jobs there are in a state, or in any."""
        query = sa.select(sa.func.count()).select_from(JOBS)
        if state is not None:
            query = query.where(JOBS.c.state == state)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one()

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state."""
        query = sa.select(JOBS.c.state, sa.func.count()).group_by(JOBS.c.state)
        with self._database.reading() as connection:
            found = {State(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in State}

    def cancel(self, id: str) -> Job:
        """End it: at once when nobody works on it, else as soon as its process has ended (`cancelling`).

        Raises:
            NotFound: There is none of that id.
            Conflict: It is completed or failed.
        """
        idle = (*WAITING, State.PAUSED)
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
        """Stop it with a checkpoint: at once when nobody works on it, else through `pausing`.

        Raises:
            NotFound: There is none of that id.
            Conflict: It has ended, or is about to be cancelled.
        """
        to = sa.case((JOBS.c.state.in_(tuple(WAITING)), State.PAUSED), else_=State.PAUSING)
        return self._ask(
            id, "paused", (*WAITING, State.RUNNING), {"state": to}, already=(State.PAUSING, State.PAUSED)
        )

    def resume(self, id: str) -> Job:
        """Queue it again; it goes on from its newest valid checkpoint.

        Raises:
            NotFound: There is none of that id.
            Conflict: It still runs (also while it is pausing or cancelling), or is completed.
        """
        values = {"state": State.QUEUED, **self._fresh()}
        allowed = (State.PAUSED, State.CANCELLED, State.FAILED)
        return self._ask(id, "resumed", allowed, values, already=tuple(WAITING))

    def extend(self, id: str, epochs: int) -> Job:
        """Let a completed job train `epochs` more, from its last checkpoint.

        Raises:
            NotFound: There is none of that id.
            Conflict: It is not completed; what was stopped is resumed first.
            ConfigError: `epochs` is below 1 or makes too many.
        """
        _check(name="more", key=None, kind="training", epochs=epochs)
        values = {"state": State.QUEUED, "epochs": JOBS.c.epoch + epochs, **self._fresh()}
        return self._ask(id, "extended", (State.COMPLETED,), values, already=())

    def delete(self, id: str) -> None:
        """Forget a job that nobody works on, with its metrics; its folder is removed later by the service.

        Raises:
            NotFound: There is none of that id.
            Conflict: It waits or runs: cancel it first.
        """
        allowed = (*ENDED, State.PAUSED)
        with self._database.writing() as connection:
            gone = connection.execute(JOBS.delete().where(JOBS.c.id == id, JOBS.c.state.in_(allowed)))
            if not gone.rowcount:
                raise _refusal(_found(connection, id), "deleted", allowed)
            append(connection, self._database.wall, id, [("deleted", {})])

    def metrics(self, id: str, *, limit: int = 100, after: int = 0) -> list[dict[str, Json]]:
        """What was measured, an epoch a row, in order, from epoch `after` + 1 on: `epoch`, `at` and the rest.

        Raises:
            NotFound: There is no job of that id.
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
        """What a job that starts anew forgets of its end."""
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
        move = (
            JOBS.update()
            .where(JOBS.c.id == id, JOBS.c.state.in_(allowed))
            .values(**values)
            .returning(*_FIELDS)
        )
        with self._database.writing() as connection:
            if (row := connection.execute(move).mappings().one_or_none()) is None:
                job = _found(connection, id)
                if job.state in already:
                    return job
                raise _refusal(job, what, allowed)
            job = job_of(row)
            kind = "resumed" if job.state is State.QUEUED else job.state.value
            append(connection, self._database.wall, id, [(kind, {"epochs": job.epochs})])
        return job


def _found(connection: sa.Connection, id: str) -> Job:
    row = connection.execute(_ONE, {"id": id}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no job {id!r}. `stoker job list` shows those there are")
    return job_of(row)


def _refusal(job: Job, what: str, allowed: Sequence[State]) -> Conflict:
    return Conflict(
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
    if kind not in KINDS:
        raise ConfigError(f"a job of kind {kind!r} is unknown; there are {', '.join(KINDS)}")
    if not 1 <= epochs <= MAX_EPOCHS:
        raise ConfigError(f"a job has 1 to {MAX_EPOCHS:,} epochs, not {epochs:,}")
