"""Whatever is asked of jobs in whatever order, by users and workers that may be late: one truth comes out.

Every step is one transaction, and transactions on one job happen one after the other; so what can happen is
some order of such steps, and the machine below tries many orders against a small model.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from stoker.errors import ConflictError, LostAttemptError
from stoker.service.database import (
    ENDED_STATES,
    HELD_STATES,
    JOBS,
    MOVES,
    WAITING_STATES,
    Database,
    Outbox,
    State,
    before,
)
from stoker.service.jobs import AttemptPolicy, JobAttempt, JobQueue, Jobs, Outcome
from stoker.service.journal import Line
from tests.service.conftest import emptied

OUTCOMES = [State.COMPLETED, State.FAILED, State.PAUSED, State.CANCELLED]
ASKED = {
    "cancel": WAITING_STATES
    | {State.PAUSED, State.RUNNING, State.PAUSING, State.CANCELLING, State.CANCELLED},
    "pause": WAITING_STATES | {State.RUNNING, State.PAUSING, State.PAUSED},
    "resume": WAITING_STATES | {State.PAUSED, State.CANCELLED, State.FAILED},
}
"""The states in which each request is granted, now or already."""


class Races(RuleBasedStateMachine):
    """Two users and two workers, one of which may be slow, on a few jobs."""

    ids = Bundle("ids")
    attempts = Bundle("attempts")

    def empty(self) -> Database:
        """A database without jobs, until `leave`."""
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        return Database(f"sqlite:///{self.folder.name}/stoker.db")

    def leave(self) -> None:
        self.database.close()
        self.folder.cleanup()

    @initialize()
    def open(self) -> None:
        self.database = self.empty()
        self.jobs, self.outbox = Jobs(self.database), Outbox(self.database)
        self.queue = JobQueue(self.database, AttemptPolicy(backoff_s=0.0, max_losses=3))
        self.known: dict[str, State] = {}
        self.holder: dict[str, JobAttempt] = {}
        self.ended: Counter[str] = Counter()

    @rule(target=ids, key=st.sampled_from(["a", "b", "c"]))
    def create(self, key: str) -> str:
        job, new = self.jobs.create({}, name="n", epochs=3, key=key)
        assert new == (job.id not in self.known)
        self.known.setdefault(job.id, State.QUEUED)
        return job.id

    @rule(id=ids, what=st.sampled_from(sorted(ASKED)))
    def ask(self, id: str, what: str) -> None:
        state = self.known[id]
        if state in ASKED[what]:
            self.moved(id, getattr(self.jobs, what)(id).state)
        else:
            with pytest.raises(ConflictError, match=f"is {state} and cannot be"):
                getattr(self.jobs, what)(id)

    @rule(id=ids)
    def extend(self, id: str) -> None:
        with suppress(ConflictError):
            self.moved(id, self.jobs.extend(id, 1).state)
            self.ended[id] = 0

    @rule(target=attempts, worker=st.sampled_from(["w1", "w2"]))
    def take(self, worker: str):
        waiting = [id for id, state in self.known.items() if state in WAITING_STATES]
        attempt = self.queue.take(worker)
        if attempt is None:
            assert not waiting
            return multiple()
        assert attempt.job.id in waiting
        self.moved(attempt.job.id, State.RUNNING)
        self.holder[attempt.job.id] = attempt
        return attempt

    @rule(attempt=attempts)
    def look(self, attempt: JobAttempt) -> None:
        if self.holds(attempt):
            assert self.queue.look(attempt) == self.known[attempt.job.id]
        else:
            with pytest.raises(LostAttemptError):
                self.queue.look(attempt)

    @rule(attempt=attempts, epoch=st.integers(1, 3))
    def report(self, attempt: JobAttempt, epoch: int) -> None:
        line = Line(kind="metrics", data={"epoch": epoch, "attempt": attempt.number})
        try:
            self.queue.report(attempt, [line], epoch)
        except LostAttemptError:
            assert not self.holds(attempt)
        else:
            assert self.holds(attempt)

    @rule(attempt=attempts, state=st.sampled_from(OUTCOMES))
    def finish(self, attempt: JobAttempt, state: State) -> None:
        id = attempt.job.id
        held, was = self.holds(attempt), self.known[id]
        try:
            self.queue.finish(attempt, Outcome(state=state), lines=[], position=0)
        except LostAttemptError:
            assert not held or was not in before(state)
        else:
            if held and was in before(state):
                self.moved(id, state)
            else:  # it had done so before
                assert was == state
                assert self.holder[id] is attempt

    @rule(attempt=consumes(attempts), lost=st.booleans())
    def give_back(self, attempt: JobAttempt, lost: bool) -> None:
        held = self.holds(attempt)
        try:
            job = self.queue.give_back(attempt, "why", lost=lost)
        except LostAttemptError:
            assert not held
        else:
            assert held
            self.moved(attempt.job.id, job.state)

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def lose(self, worker: str) -> None:
        """The worker was killed; what it had on its way to the database may still come."""
        for job in self.queue.release(worker):
            assert self.holder[job.id].job.worker == worker
            self.moved(job.id, job.state)

    @invariant()
    def the_database_agrees(self) -> None:
        assert {job.id: job.state for job in self.jobs.list()} == self.known
        with self.database.reading() as connection:
            held = connection.execute(
                sa.select(JOBS.c.worker).where(JOBS.c.state.in_(tuple(HELD_STATES)))
            ).scalars()
            assert set(held) == self.queue.workers()
        holders = {attempt.job.worker for attempt in self.holder.values() if self.holds(attempt)}
        assert self.queue.workers() == holders

    @invariant()
    def every_change_was_told(self) -> None:
        told: dict[str, str] = {}
        for event in self.outbox.read(0):
            if event.kind not in ("metrics", "batch"):
                told[event.job] = event.kind
        kinds = {State.RUNNING: "claimed", State.PENDING: "queued"}
        for id, state in self.known.items():
            expected = {kinds.get(state, str(state))} | ({"resumed"} if state is State.QUEUED else set())
            assert told[id] in expected

    def holds(self, attempt: JobAttempt) -> bool:
        return self.holder[attempt.job.id] is attempt and self.known[attempt.job.id] in HELD_STATES

    def moved(self, id: str, now: State) -> None:
        was = self.known[id]
        assert now == was or now in MOVES[was]
        if now in ENDED_STATES and now != was:
            self.ended[id] += 1
        self.known[id] = now

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.leave()


def test_what_is_asked_at_once_comes_out_as_one_order(database: Database) -> None:
    """Threads this time: the events, which are in the order of the commits, are a path through the states."""
    jobs = Jobs(database)
    queue = JobQueue(database, AttemptPolicy(backoff_s=0.0, max_losses=10_000))
    id = jobs.create({}, name="n", epochs=3)[0].id

    def user(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            with suppress(ConflictError):
                getattr(jobs, rng.choice(["cancel", "pause", "resume", "resume"]))(id)

    def worker(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            if (attempt := queue.take(f"w{seed}")) is None:
                continue
            with suppress(LostAttemptError):
                if rng.random() < 0.3:
                    queue.give_back(attempt, "why", lost=True)
                else:
                    outcome = Outcome(state=rng.choice(OUTCOMES[1:]))
                    queue.finish(attempt, outcome, lines=[], position=0)
            if rng.random() < 0.5:
                queue.release(str(attempt.job.worker))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: (user if n % 2 else worker)(n), range(6)))

    named = {"claimed": State.RUNNING, "resumed": State.QUEUED}
    path = [named.get(event.kind) or State(event.kind) for event in Outbox(database).read(0, job=id)]
    for was, now in pairwise(path):
        waits = now is State.QUEUED and State.PENDING in MOVES[was]
        assert now in MOVES[was] or waits, (was, now)
    assert jobs.get(id).state is path[-1]


QUICK = settings(
    max_examples=4, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRaces = Races.TestCase
TestRaces.settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("system", ["sqlite", "postgresql"])
def test_many_more_races(system: str, request: pytest.FixtureRequest) -> None:
    shared: Database | None = None
    if system == "postgresql":
        shared = request.getfixturevalue("shared_postgresql")

    class OnServer(Races):
        def empty(self) -> Database:
            assert shared is not None
            return emptied(shared)

        def leave(self) -> None:
            """The next one uses it too."""

    machine = Races if shared is None else OnServer
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=100, stateful_step_count=60))
