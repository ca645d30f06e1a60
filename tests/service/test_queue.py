"""Who works on a job, and what becomes of it when they stop answering."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from stoker.errors import LostAttemptError
from stoker.service.database import JOBS, Database, Outbox, State
from stoker.service.jobs import AttemptPolicy, JobQueue, Jobs, Outcome
from stoker.service.journal import Line
from stoker.service.views import times, took

EPOCH = Line(kind="metrics", data={"epoch": 1, "val_loss": 0.5, "checkpoint": "epoch_1"})
DONE = Outcome(state=State.COMPLETED, message="done", exit_code=0, data={"result": 1})


def make(database: Database, count: int = 1) -> list[str]:
    return [Jobs(database).create({}, name="n", epochs=3)[0].id for _ in range(count)]


def impatient(database: Database, **given) -> JobQueue:
    """No wait after a loss."""
    return JobQueue(database, AttemptPolicy(**{"backoff_s": 0.0, **given}))


def test_each_job_goes_to_one_worker(database: Database) -> None:
    ids, queue = make(database, 30), JobQueue(database)

    def work(number: int) -> list[str]:
        found = []
        while (attempt := queue.take(f"w{number}")) is not None:
            found.append(attempt.job.id)
        return found

    with ThreadPoolExecutor(6) as pool:
        claimed = [id for found in pool.map(work, range(6)) for id in found]
    claimed += work(7)  # on PostgreSQL a worker passes over a row that another is looking at

    assert sorted(claimed) == sorted(ids)


def test_the_job_that_has_waited_longest_comes_first_and_keeps_the_time_it_began(database: Database) -> None:
    first, second = make(database, 2)
    queue = JobQueue(database)

    attempt = queue.take("w")
    assert attempt is not None
    assert attempt.job.id == first
    with database.writing() as connection:
        connection.execute(JOBS.update().where(JOBS.c.id == first).values(started=1.0))
    queue.give_back(attempt, "stopped", lost=False)

    assert {queue.take("w").job.id, queue.take("w").job.id} == {first, second}
    assert Jobs(database).get(first).started == 1.0


def test_only_the_current_attempt_changes_a_job(database: Database) -> None:
    make(database)
    queue = JobQueue(database)
    attempt = queue.take("w")

    with pytest.raises(LostAttemptError):
        queue.report(replace(attempt, number=2), [EPOCH], 50)

    assert queue.report(attempt, [], 0) is State.RUNNING


@pytest.mark.parametrize("again", ["newer", "late"])
def test_a_worker_that_lost_its_job_changes_nothing(database: Database, again: str) -> None:
    (id,) = make(database)
    queue = impatient(database)
    late = queue.take("late")
    assert [job.state for job in queue.release("late")] == [State.QUEUED]
    newer = queue.take(again)
    before = Jobs(database).get(id), Outbox(database).newest()

    for call in (
        lambda: queue.look(late),
        lambda: queue.report(late, [EPOCH], 50),
        lambda: queue.finish(late, DONE, lines=[EPOCH], position=50),
        lambda: queue.give_back(late, "why", lost=True),
    ):
        with pytest.raises(LostAttemptError, match=r"attempt 1 at job .*, by worker late, is over"):
            call()

    assert (Jobs(database).get(id), Outbox(database).newest()) == before
    assert Jobs(database).metrics(id) == []
    assert queue.finish(newer, DONE, lines=[], position=0).attempt == 2


def test_only_jobs_of_the_dead_worker_are_taken_away(database: Database) -> None:
    make(database, 2)
    queue = impatient(database)
    dead, alive = queue.take("dead"), queue.take("alive")
    assert queue.workers() == {"dead", "alive"}

    assert [job.id for job in queue.release("dead")] == [dead.job.id]
    assert queue.release("dead") == []
    assert queue.workers() == {"alive"}
    assert queue.look(alive) is State.RUNNING


@pytest.mark.parametrize(
    ("ask", "ends"), [("pause", State.PAUSED), ("cancel", State.CANCELLED)], ids=["pause", "cancel"]
)
def test_what_was_asked_of_a_job_holds_when_its_worker_dies(
    database: Database, ask: str, ends: State
) -> None:
    (id,) = make(database)
    queue = impatient(database)
    queue.take("w")
    getattr(Jobs(database), ask)(id)

    assert [job.state for job in queue.release("w")] == [ends]
    assert Outbox(database).read(0)[-1].kind == ends


def test_attempts_without_an_epoch_are_bounded(embedded: Database) -> None:
    (id,) = make(embedded)
    queue = impatient(embedded, max_losses=3)
    for _ in range(2):
        queue.take("w")
        queue.release("w")
    attempt = queue.take("w")
    queue.report(attempt, [EPOCH], 10)  # it gets on: counting starts anew
    queue.release("w")
    for _ in range(2):
        queue.take("w")
        queue.release("w")

    job = Jobs(embedded).get(id)
    assert (job.state, job.attempt) == (State.FAILED, 5)
    assert job.error == ("3 attempts in a row ended without a finished epoch; the last: its worker is gone")


def test_an_epoch_that_is_trained_again_is_no_progress(embedded: Database) -> None:
    (id,) = make(embedded)
    queue, states = impatient(embedded, max_losses=3), []
    for again in (False, False, True, True):  # lost once before its first epoch
        attempt = queue.take("w")
        assert attempt is not None
        if again or attempt.number == 2:
            queue.report(attempt, [EPOCH], 10)
        queue.release("w")
        states.append(Jobs(embedded).get(id).state)

    assert states == [State.QUEUED, State.QUEUED, State.QUEUED, State.FAILED]


def test_a_failed_job_that_is_resumed_begins_with_a_clean_slate(embedded: Database) -> None:
    (id,) = make(embedded)
    queue = impatient(embedded, max_losses=2)
    for _ in range(2):
        queue.take("w")
        queue.release("w")
    assert Jobs(embedded).get(id).state == State.FAILED

    resumed = Jobs(embedded).resume(id)
    assert (resumed.error, resumed.ended) == (None, None)
    queue.take("w")
    queue.release("w")
    assert Jobs(embedded).get(id).state == State.QUEUED, "it may be lost as often as before"


def test_what_was_read_of_a_job_and_its_best_epoch_are_kept(embedded: Database) -> None:
    (id,) = make(embedded)
    queue = impatient(embedded)
    worse = Line(kind="metrics", data={"epoch": 2, "val_loss": 0.7})
    queue.report(queue.take("w"), [EPOCH, worse], 50)
    queue.release("w")
    attempt = queue.take("w")
    assert attempt.position == 50, "where the next worker reads on"

    ended = queue.finish(attempt, DONE, lines=[], position=60)
    assert (ended.best_val_loss, ended.best_epoch) == (0.5, 1)
    assert (ended.progress, ended.ended is not None) == (1.0, True)
    assert Jobs(embedded).get(id) == ended


def test_the_time_between_attempts_is_not_counted(database: Database) -> None:
    (id,) = make(database)
    jobs, queue = Jobs(database), impatient(database)

    def end(seconds: float, *, kept: bool = False) -> None:
        """End an attempt that began so many seconds ago; the job began an hour before."""
        attempt = queue.take("w")
        assert attempt is not None
        with database.writing() as connection:
            began = {"started": database.wall - 3600.0, "taken": database.wall - seconds}
            connection.execute(JOBS.update().values(**began))
        assert jobs.get(id).elapsed_s(time.time()) == pytest.approx(sum(spent) + seconds, abs=5)
        if kept:
            queue.give_back(attempt, "no room", lost=False, began=False)
        elif len(spent) == 0:
            queue.release("w")
        elif len(spent) == 1:
            queue.give_back(attempt, "stopped", lost=False)
        else:
            state = State.FAILED if len(spent) == 2 else State.COMPLETED
            queue.finish(attempt, Outcome(state=state), lines=[], position=0)
        spent.extend([] if kept else [seconds])
        after = jobs.get(id)
        assert after.taken is None
        assert after.elapsed_s(time.time() + 9999) == pytest.approx(sum(spent), abs=5)

    spent: list[float] = []
    end(100.0)
    end(500.0, kept=True)
    end(200.0)
    end(300.0)
    jobs.resume(id)
    end(400.0)
    assert took(jobs.get(id), time.time() + 9999).startswith("16 min")
    assert times(jobs.get(id), 0, None, time.time() + 9999)[0][1].startswith("16 min")


@pytest.mark.parametrize("last", [{}, {"tier": ""}, {"tier": None}])
def test_a_tier_that_is_known_stays(embedded: Database, last: dict) -> None:
    (id,) = make(embedded)
    queue = JobQueue(embedded)
    attempt = queue.take("w")

    queue.report(attempt, [Line(kind="metrics", data={**EPOCH.data, "tier": "host"})], 1)
    queue.report(attempt, [Line(kind="stall", data=last)], 2)
    both = [Line(kind="stall", data={"tier": "disk"}), Line(kind="stall", data=last)]
    queue.finish(attempt, DONE, lines=both, position=3)

    assert Jobs(embedded).get(id).tier == "disk"


def test_a_lost_job_waits_twice_as_long_each_time(embedded: Database) -> None:
    make(embedded)
    queue = impatient(embedded, backoff_s=1000.0)
    wait = sa.select(JOBS.c.not_before - embedded.wall)
    waits = []
    for _ in range(3):
        attempt = queue.take("w")
        assert attempt is not None
        assert queue.give_back(attempt, "again", lost=True).state == State.PENDING
        assert queue.take("w") is None
        with embedded.writing() as connection:
            waits.append(connection.execute(wait).scalar_one())
            connection.execute(JOBS.update().values(not_before=0.0))

    assert [round(waited, -3) for waited in waits] == [1000, 2000, 4000]


def test_a_job_given_back_in_order_is_not_counted_against_it(database: Database) -> None:
    make(database)
    queue = JobQueue(database, AttemptPolicy(max_losses=1))

    for number in range(1, 4):
        attempt = queue.take("w")
        assert attempt is not None
        assert attempt.number == number
        queue.give_back(attempt, "the service was stopped", lost=False)


def test_finishing_again_after_an_answer_that_never_came_is_harmless(database: Database) -> None:
    make(database)
    queue = JobQueue(database)
    attempt = queue.take("w")

    first = queue.finish(attempt, DONE, lines=[EPOCH], position=70)
    again = queue.finish(attempt, DONE, lines=[EPOCH], position=70)

    assert first == again
    assert [event.kind for event in Outbox(database).read(0)].count("completed") == 1
    with pytest.raises(LostAttemptError):
        queue.finish(attempt, Outcome(state=State.FAILED), lines=[], position=70)


def test_a_job_that_was_done_before_it_could_be_cancelled_is_completed(database: Database) -> None:
    (id,) = make(database)
    queue = JobQueue(database)
    attempt = queue.take("w")
    Jobs(database).cancel(id)

    assert queue.finish(attempt, DONE, lines=[], position=0).state == State.COMPLETED


def test_what_a_process_said_is_stored_with_its_events_or_not_at_all(database: Database) -> None:
    """The position in its file belongs to the same transaction."""
    (id,) = make(database)
    queue = JobQueue(database)
    attempt = queue.take("w")
    bad = Line(kind="metrics", data={"epoch": "one"})

    with pytest.raises(Exception):  # noqa: B017 -- the two systems differ in how they say it
        queue.report(attempt, [EPOCH, bad, Line(kind="metrics", data={"epoch": None})], 99)

    job = Jobs(database).get(id)
    assert (job.epoch, Jobs(database).metrics(id), job.checkpoint) == (0, [], None)
    assert [event.kind for event in Outbox(database).read(0)] == ["queued", "claimed"]


def test_a_look_says_what_is_wanted_of_a_job_now(embedded: Database) -> None:
    (id,), queue = make(embedded), JobQueue(embedded)
    attempt = queue.take("w")
    assert attempt is not None

    assert queue.look(attempt) is State.RUNNING
    Jobs(embedded).pause(id)
    assert queue.look(attempt) is State.PAUSING
    queue.finish(attempt, Outcome(state=State.PAUSED), lines=[], position=0)
    with pytest.raises(LostAttemptError):
        queue.look(attempt)


@pytest.mark.parametrize("error", ["out of memory", None])
def test_the_event_of_an_end_has_an_error_where_there_was_one(embedded: Database, error: str | None) -> None:
    make(embedded)
    queue = JobQueue(embedded)
    attempt = queue.take("w")
    assert attempt is not None

    state = State.COMPLETED if error is None else State.FAILED
    queue.finish(attempt, Outcome(state=state, error=error), lines=[], position=0)

    told = Outbox(embedded).read(0)[-1].data
    assert told.get("error") == error
    assert ("error" in told) is (error is not None)


def test_a_clock_that_was_set_back_holds_up_no_job(embedded: Database) -> None:
    (id,), queue = make(embedded), JobQueue(embedded, AttemptPolicy(backoff_s=1.0))
    attempt = queue.take("w")
    assert attempt is not None
    queue.give_back(attempt, "again", lost=True)
    assert queue.take("w") is None
    with embedded.writing() as connection:  # the clock was a day ahead when the job was given back
        connection.execute(JOBS.update().values(not_before=JOBS.c.not_before + 86_400))

    again = queue.take("w")
    assert again is not None
    assert again.job.id == id
