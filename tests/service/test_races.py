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

from stoker.errors import Conflict, LeaseLost
from stoker.service.database import ENDED, HELD, JOBS, MOVES, WAITING, Database, Outbox, State, before
from stoker.service.jobs import Claim, Jobs, Leases, Line, Outcome, Terms
from tests.service.conftest import emptied

OUTCOMES = [State.COMPLETED, State.FAILED, State.PAUSED, State.CANCELLED]
ASKED = {
    "cancel": WAITING | {State.PAUSED, State.RUNNING, State.PAUSING, State.CANCELLING, State.CANCELLED},
    "pause": WAITING | {State.RUNNING, State.PAUSING, State.PAUSED},
    "resume": WAITING | {State.PAUSED, State.CANCELLED, State.FAILED},
}
"""The states in which each request is granted, now or already."""


class Races(RuleBasedStateMachine):
    """Two users and two workers, one of which may be slow, on a few jobs."""

    ids = Bundle("ids")
    claims = Bundle("claims")

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
        self.leases = Leases(self.database, Terms(lease_s=60.0, backoff_s=0.0, max_losses=3))
        self.known: dict[str, State] = {}
        self.holder: dict[str, Claim] = {}
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
            with pytest.raises(Conflict, match=f"is {state} and cannot be"):
                getattr(self.jobs, what)(id)

    @rule(id=ids)
    def extend(self, id: str) -> None:
        with suppress(Conflict):
            self.moved(id, self.jobs.extend(id, 1).state)
            self.ended[id] = 0

    @rule(target=claims, worker=st.sampled_from(["w1", "w2"]))
    def claim(self, worker: str):
        waiting = [id for id, state in self.known.items() if state in WAITING]
        claim = self.leases.claim(worker)
        if claim is None:
            assert not waiting
            return multiple()
        assert claim.job.id in waiting
        self.moved(claim.job.id, State.RUNNING)
        self.holder[claim.job.id] = claim
        return claim

    @rule(claim=claims)
    def heartbeat(self, claim: Claim) -> None:
        if self.holds(claim):
            assert self.leases.heartbeat(claim) == self.known[claim.job.id]
        else:
            with pytest.raises(LeaseLost):
                self.leases.heartbeat(claim)

    @rule(claim=claims, epoch=st.integers(1, 3))
    def report(self, claim: Claim, epoch: int) -> None:
        line = Line(kind="metrics", data={"epoch": epoch, "attempt": claim.attempt})
        try:
            self.leases.report(claim, [line], epoch)
        except LeaseLost:
            assert not self.holds(claim)
        else:
            assert self.holds(claim)

    @rule(claim=claims, state=st.sampled_from(OUTCOMES))
    def finish(self, claim: Claim, state: State) -> None:
        id = claim.job.id
        held, was = self.holds(claim), self.known[id]
        try:
            self.leases.finish(claim, Outcome(state=state), lines=[], position=0)
        except LeaseLost:
            assert not held or was not in before(state)
        else:
            if held and was in before(state):
                self.moved(id, state)
            else:  # it had done so before
                assert was == state
                assert self.holder[id] is claim

    @rule(claim=consumes(claims), lost=st.booleans())
    def give_back(self, claim: Claim, lost: bool) -> None:
        held = self.holds(claim)
        try:
            job = self.leases.give_back(claim, "why", lost=lost)
        except LeaseLost:
            assert not held
        else:
            assert held
            self.moved(claim.job.id, job.state)

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def lose(self, worker: str) -> None:
        """The worker is declared dead; it may still come back and speak."""
        self.leases.abandon(worker)
        for job in self.leases.sweep():
            assert self.holder[job.id].worker == worker
            self.moved(job.id, job.state)

    @invariant()
    def the_database_agrees(self) -> None:
        assert {job.id: job.state for job in self.jobs.list()} == self.known
        with self.database.reading() as connection:
            leased = connection.execute(sa.select(JOBS.c.id).where(JOBS.c.lease_until.is_not(None))).scalars()
            assert set(leased) == {id for id, state in self.known.items() if state in HELD}

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

    def holds(self, claim: Claim) -> bool:
        return self.holder[claim.job.id] is claim and self.known[claim.job.id] in HELD

    def moved(self, id: str, now: State) -> None:
        was = self.known[id]
        assert now == was or now in MOVES[was]
        if now in ENDED and now != was:
            self.ended[id] += 1
        self.known[id] = now

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.leave()


def test_what_is_asked_at_once_comes_out_as_one_order(database: Database) -> None:
    """Threads this time: the events, which are in the order of the commits, are a path through the states."""
    jobs = Jobs(database)
    leases = Leases(database, Terms(lease_s=60.0, backoff_s=0.0, max_losses=10_000))
    id = jobs.create({}, name="n", epochs=3)[0].id

    def user(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            with suppress(Conflict):
                getattr(jobs, rng.choice(["cancel", "pause", "resume", "resume"]))(id)

    def worker(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            if (claim := leases.claim(f"w{seed}")) is None:
                continue
            with suppress(LeaseLost):
                if rng.random() < 0.3:
                    leases.give_back(claim, "why", lost=True)
                else:
                    outcome = Outcome(state=rng.choice(OUTCOMES[1:]))
                    leases.finish(claim, outcome, lines=[], position=0)
            if rng.random() < 0.5:
                leases.abandon(claim.worker)
                leases.sweep()

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
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=400, stateful_step_count=60))
