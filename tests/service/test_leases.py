"""Who works on a job, and what becomes of it when they stop answering."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from stoker.errors import LeaseLost
from stoker.service.database import JOBS, META, Database, Outbox, State
from stoker.service.jobs import Jobs, Leases, Line, Outcome, Terms

EPOCH = Line(kind="metrics", data={"epoch": 1, "val_loss": 0.5, "checkpoint": "epoch_1"})
DONE = Outcome(state=State.COMPLETED, message="done", exit_code=0, data={"result": 1})


def make(database: Database, count: int = 1) -> list[str]:
    return [Jobs(database).create({}, name="n", epochs=3)[0].id for _ in range(count)]


def impatient(database: Database, **given) -> Leases:
    """Leases that have run out as soon as they are given, and no wait after a loss."""
    return Leases(database, Terms(**{"lease_s": -1.0, "backoff_s": 0.0, **given}))


def test_each_job_goes_to_one_worker(database: Database) -> None:
    ids, leases = make(database, 30), Leases(database)

    def work(number: int) -> list[str]:
        found = []
        while (claim := leases.claim(f"w{number}")) is not None:
            found.append(claim.job.id)
        return found

    with ThreadPoolExecutor(6) as pool:
        claimed = [id for found in pool.map(work, range(6)) for id in found]
    claimed += work(7)  # on PostgreSQL a worker passes over a row that another is looking at

    assert sorted(claimed) == sorted(ids)


def test_the_job_that_has_waited_longest_comes_first_and_keeps_the_time_it_began(database: Database) -> None:
    first, second = make(database, 2)
    leases = Leases(database)

    claim = leases.claim("w")
    assert claim is not None
    assert claim.job.id == first
    with database.writing() as connection:
        connection.execute(JOBS.update().where(JOBS.c.id == first).values(started=1.0))
    leases.give_back(claim, "stopped", lost=False)

    assert {leases.claim("w").job.id, leases.claim("w").job.id} == {first, second}
    assert Jobs(database).get(first).started == 1.0


def test_an_attempt_is_its_workers_alone(database: Database) -> None:
    make(database)
    leases = Leases(database)
    claim = leases.claim("w")

    with pytest.raises(LeaseLost):
        leases.heartbeat(replace(claim, worker="another"))

    assert leases.heartbeat(claim) is State.RUNNING


@pytest.mark.parametrize("again", ["newer", "late"])
def test_a_worker_that_lost_its_lease_changes_nothing(database: Database, again: str) -> None:
    (id,) = make(database)
    late, leases = impatient(database).claim("late"), impatient(database, lease_s=30.0)
    assert [job.state for job in leases.sweep()] == [State.QUEUED]
    newer = leases.claim(again)
    before = Jobs(database).get(id), Outbox(database).newest()

    for attempt in (
        lambda: leases.look(late),
        lambda: leases.heartbeat(late),
        lambda: leases.report(late, [EPOCH], 50),
        lambda: leases.finish(late, DONE, lines=[EPOCH], position=50),
        lambda: leases.give_back(late, "why", lost=True),
    ):
        with pytest.raises(LeaseLost, match=r"worker late no longer has job .* \(attempt 1\)"):
            attempt()

    assert (Jobs(database).get(id), Outbox(database).newest()) == before
    assert Jobs(database).metrics(id) == []
    assert leases.finish(newer, DONE, lines=[], position=0).attempt == 2


def test_a_lease_that_is_held_is_not_swept(database: Database) -> None:
    make(database)
    claim = impatient(database).claim("w")  # it has run out, and nobody has swept yet

    Leases(database).heartbeat(claim)

    assert Leases(database).sweep() == []


def test_jobs_of_a_dead_worker_need_not_wait_for_the_lease(database: Database) -> None:
    make(database, 2)
    leases = Leases(database, Terms(backoff_s=0.0))
    dead, alive = leases.claim("dead"), leases.claim("alive")

    leases.abandon("dead")

    assert [job.id for job in leases.sweep()] == [dead.job.id]
    assert leases.heartbeat(alive) == State.RUNNING


def test_who_takes_a_slot_knows_that_all_before_it_are_dead(database: Database) -> None:
    make(database, 3)
    leases = Leases(database, Terms(backoff_s=0.0))
    (dead, other, own) = (leases.claim(name) for name in ("a_host-1-aa", "a_host-10-aa", "a_host-1-bb"))

    assert leases.abandon_slot("a_host-1-bb") == 1

    assert [job.id for job in leases.sweep()] == [dead.job.id]
    for alive in (other, own):
        leases.heartbeat(alive)


@pytest.mark.parametrize(
    ("ask", "ends"), [("pause", State.PAUSED), ("cancel", State.CANCELLED)], ids=["pause", "cancel"]
)
def test_what_was_asked_of_a_job_holds_when_its_worker_dies(
    database: Database, ask: str, ends: State
) -> None:
    (id,) = make(database)
    leases = impatient(database)
    leases.claim("w")
    getattr(Jobs(database), ask)(id)

    assert [job.state for job in leases.sweep()] == [ends]
    assert Outbox(database).read(0)[-1].kind == ends


def test_attempts_without_an_epoch_are_bounded(embedded: Database) -> None:
    (id,) = make(embedded)
    leases = impatient(embedded, max_losses=3)
    for _ in range(2):
        leases.claim("w")
        leases.sweep()
    claim = leases.claim("w")
    leases.report(claim, [EPOCH], 10)  # it gets on: counting starts anew
    leases.sweep()
    for _ in range(2):
        leases.claim("w")
        leases.sweep()

    job = Jobs(embedded).get(id)
    assert (job.state, job.attempt) == (State.FAILED, 5)
    assert job.error == ("3 attempts in a row ended without a finished epoch; the last: its worker is gone")


def test_an_epoch_that_is_trained_again_is_no_progress(embedded: Database) -> None:
    (id,) = make(embedded)
    leases, states = impatient(embedded, max_losses=3), []
    for again in (False, False, True, True):  # lost once before its first epoch
        claim = leases.claim("w")
        assert claim is not None
        if again or claim.attempt == 2:
            leases.report(claim, [EPOCH], 10)
        leases.sweep()
        states.append(Jobs(embedded).get(id).state)

    assert states == [State.QUEUED, State.QUEUED, State.QUEUED, State.FAILED]


def test_a_failed_job_that_is_resumed_begins_with_a_clean_slate(embedded: Database) -> None:
    (id,) = make(embedded)
    leases = impatient(embedded, max_losses=2)
    for _ in range(2):
        leases.claim("w")
        leases.sweep()
    assert Jobs(embedded).get(id).state == State.FAILED

    resumed = Jobs(embedded).resume(id)
    assert (resumed.error, resumed.ended) == (None, None)
    leases.claim("w")
    leases.sweep()
    assert Jobs(embedded).get(id).state == State.QUEUED, "it may be lost as often as before"


def test_what_was_read_of_a_job_and_its_best_epoch_are_kept(embedded: Database) -> None:
    (id,) = make(embedded)
    leases = impatient(embedded)
    worse = Line(kind="metrics", data={"epoch": 2, "val_loss": 0.7})
    leases.report(leases.claim("w"), [EPOCH, worse], 50)
    leases.sweep()
    claim = leases.claim("w")
    assert claim.position == 50, "where the next worker reads on"

    ended = leases.finish(claim, DONE, lines=[], position=60)
    assert (ended.best_val_loss, ended.best_epoch) == (0.5, 1)
    assert (ended.progress, ended.ended is not None) == (1.0, True)
    assert Jobs(embedded).get(id) == ended


def test_a_lost_job_waits_twice_as_long_each_time(embedded: Database) -> None:
    make(embedded)
    leases = impatient(embedded, backoff_s=1000.0)
    wait = sa.select(JOBS.c.not_before - embedded.lease_clock)
    waits = []
    for _ in range(3):
        claim = leases.claim("w")
        assert claim is not None
        assert leases.give_back(claim, "again", lost=True).state == State.PENDING
        assert leases.claim("w") is None
        with embedded.writing() as connection:
            waits.append(connection.execute(wait).scalar_one())
            connection.execute(JOBS.update().values(not_before=0.0))

    assert [round(waited, -3) for waited in waits] == [1000, 2000, 4000]


def test_a_job_given_back_in_order_is_not_counted_against_it(database: Database) -> None:
    make(database)
    leases = Leases(database, Terms(max_losses=1))

    for attempt in range(1, 4):
        claim = leases.claim("w")
        assert claim is not None
        assert claim.attempt == attempt
        leases.give_back(claim, "the service was stopped", lost=False)


def test_finishing_again_after_an_answer_that_never_came_is_harmless(database: Database) -> None:
    make(database)
    leases = Leases(database)
    claim = leases.claim("w")

    first = leases.finish(claim, DONE, lines=[EPOCH], position=70)
    again = leases.finish(claim, DONE, lines=[EPOCH], position=70)

    assert first == again
    assert [event.kind for event in Outbox(database).read(0)].count("completed") == 1
    with pytest.raises(LeaseLost):
        leases.finish(claim, Outcome(state=State.FAILED), lines=[], position=70)


def test_a_job_that_was_done_before_it_could_be_cancelled_is_completed(database: Database) -> None:
    (id,) = make(database)
    leases = Leases(database)
    claim = leases.claim("w")
    Jobs(database).cancel(id)

    assert leases.finish(claim, DONE, lines=[], position=0).state == State.COMPLETED


def test_what_a_process_said_is_stored_with_its_events_or_not_at_all(database: Database) -> None:
    """The position in its file belongs to the same transaction."""
    (id,) = make(database)
    leases = Leases(database)
    claim = leases.claim("w")
    bad = Line(kind="metrics", data={"epoch": "one"})

    with pytest.raises(Exception):  # noqa: B017 -- the two systems differ in how they say it
        leases.report(claim, [EPOCH, bad, Line(kind="metrics", data={"epoch": None})], 99)

    job = Jobs(database).get(id)
    assert (job.epoch, Jobs(database).metrics(id), job.checkpoint) == (0, [], None)
    assert [event.kind for event in Outbox(database).read(0)] == ["queued", "claimed"]


def test_leases_of_an_earlier_boot_have_run_out(embedded: Database) -> None:
    """The clock of a machine starts anew with it; a lease from before would hold for days."""
    make(embedded)
    Leases(embedded).claim("w")
    with embedded.writing() as connection:
        connection.execute(META.update().where(META.c.name == "boot").values(value="another"))

    reopened = Database(str(embedded))

    assert [job.state for job in Leases(reopened, Terms(backoff_s=0.0)).sweep()] == [State.QUEUED]
    reopened.close()


def test_a_look_says_what_is_wanted_of_a_job_now(embedded: Database) -> None:
    (id,), leases = make(embedded), Leases(embedded)
    claim = leases.claim("w")
    assert claim is not None

    assert leases.look(claim) is State.RUNNING
    Jobs(embedded).pause(id)
    assert leases.look(claim) is State.PAUSING
    leases.finish(claim, Outcome(state=State.PAUSED), lines=[], position=0)
    with pytest.raises(LeaseLost):
        leases.look(claim)


@pytest.mark.parametrize("error", ["out of memory", None])
def test_the_event_of_an_end_has_an_error_where_there_was_one(embedded: Database, error: str | None) -> None:
    make(embedded)
    leases = Leases(embedded)
    claim = leases.claim("w")
    assert claim is not None

    state = State.COMPLETED if error is None else State.FAILED
    leases.finish(claim, Outcome(state=state, error=error), lines=[], position=0)

    told = Outbox(embedded).read(0)[-1].data
    assert told.get("error") == error
    assert ("error" in told) is (error is not None)
