"""What the API and the pages may ask of jobs."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, ConflictError, NotFoundError
from stoker.service.database import DATASETS, MOVES, Database, Outbox, State, before
from stoker.service.jobs import JobQueue, Jobs, Outcome
from stoker.service.journal import Line
from stoker.service.listing import JobFilter
from stoker.service.views import took


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)


def make(jobs: Jobs, **given):
    return jobs.create({"batch_size": 256}, **{"name": "a job", "epochs": 3, **given})[0]


def running(database: Database, **given):
    """A job that a worker holds."""
    job = make(Jobs(database), **given)
    return job, JobQueue(database).take("worker")


def completed(database: Database, epoch: int = 3):
    job, attempt = running(database)
    said = Line(kind="metrics", data={"epoch": epoch, "val_loss": 0.5})
    JobQueue(database).finish(attempt, Outcome(state=State.COMPLETED), lines=[said], position=9)
    return job


def test_every_state_can_be_reached_and_the_ended_ones_left_on_request_alone() -> None:
    assert {end for ends in MOVES.values() for end in ends} == set(State)
    assert before(State.CANCELLED) == {State.PENDING, State.QUEUED, State.PAUSED, State.CANCELLING}


def test_a_job_is_read_back_as_it_was_asked_for(jobs: Jobs, database: Database) -> None:
    made, new = jobs.create({"lr": 1e-3}, name="überfällig ✓", epochs=7, dataset_ids=["a", "b"], parent="p")

    assert new
    assert jobs.get(made.id) == made
    assert (made.state, made.config, made.dataset_ids) == ("queued", {"lr": 1e-3}, ["a", "b"])
    assert (made.epochs, made.epoch, made.progress, made.parent) == (7, 0, 0.0, "p")
    assert [event.kind for event in Outbox(database).read(0, job=made.id)] == ["queued"]


def test_a_hundred_at_once_with_one_key_are_one_job(jobs: Jobs) -> None:
    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(lambda _: jobs.create({}, name="n", epochs=1, key="k"), range(100)))

    assert len({job.id for job, _ in answers}) == 1
    assert [new for _, new in answers].count(True) == 1
    assert jobs.count() == 1


def test_a_key_with_another_body_is_refused(jobs: Jobs) -> None:
    first = make(jobs, key="k")

    with pytest.raises(ConflictError, match=f"'k' belongs to job {first.id}.*Use a new key"):
        make(jobs, key="k", epochs=4)


def test_the_key_of_a_deleted_job_is_free(jobs: Jobs) -> None:
    first = make(jobs, key="k")
    jobs.cancel(first.id)
    jobs.delete(first.id)

    assert make(jobs, key="k").id != first.id


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": ""}, "1 to 200 printable characters"),
        ({"name": "a\0b"}, "1 to 200 printable characters"),
        ({"name": " "}, "blank"),
        ({"name": "x" * 201}, r"\(201\) has not"),
        ({"key": "\ud800"}, "idempotency key"),
        ({"kind": "mining"}, "training, generation"),
        ({"epochs": 0}, "1 to 1,000,000 epochs, not 0"),
    ],
)
def test_what_no_job_can_have_is_refused(embedded: Database, given: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(Jobs(embedded), **given)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=50))
@example("'; DROP TABLE jobs; --")
@example("\0 \ud800 %s %(name)s :name {}")
def test_any_text_is_stored_as_it_is(database: Database, text: str) -> None:
    jobs = Jobs(database)
    name = f"n{text if text.isprintable() else ''}"

    job, _ = jobs.create({"text": text}, name=name, epochs=1, dataset_ids=[text])

    assert (job.name, job.config["text"], job.dataset_ids) == (name, text, [text])
    with pytest.raises(NotFoundError):
        jobs.get(name)


def test_jobs_are_listed_newest_first_by_state_and_page(jobs: Jobs) -> None:
    made = [make(jobs, name=str(number)) for number in range(5)]
    jobs.pause(made[1].id)

    assert [job.name for job in jobs.list()] == ["4", "3", "2", "1", "0"]
    assert [job.name for job in jobs.list(limit=2, offset=1)] == ["3", "2"]
    assert [job.name for job in jobs.list(State.PAUSED)] == ["1"]
    assert (jobs.count(), jobs.count(State.QUEUED)) == (5, 4)


def test_a_job_that_waits_is_cancelled_and_paused_at_once(jobs: Jobs) -> None:
    one, other = make(jobs), make(jobs)

    assert jobs.cancel(one.id).state == jobs.cancel(one.id).state == State.CANCELLED
    assert jobs.pause(other.id).state == jobs.pause(other.id).state == State.PAUSED
    assert jobs.get(one.id).ended is not None
    assert jobs.get(other.id).ended is None
    assert jobs.cancel(other.id).state == State.CANCELLED


def test_a_job_that_runs_is_cancelled_once_its_process_has_ended(database: Database) -> None:
    jobs = Jobs(database)
    job, attempt = running(database)

    assert jobs.cancel(job.id).state == jobs.cancel(job.id).state == State.CANCELLING
    assert jobs.get(job.id).ended is None
    with pytest.raises(ConflictError, match="is cancelling and cannot be paused"):
        jobs.pause(job.id)
    JobQueue(database).finish(attempt, Outcome(state=State.CANCELLED), lines=[], position=0)
    assert jobs.cancel(job.id).state == State.CANCELLED
    kinds = [event.kind for event in Outbox(database).read(0)]
    assert kinds == ["queued", "claimed", "cancelling", "cancelled"]


def test_a_job_is_not_resumed_before_it_has_paused(database: Database) -> None:
    """Otherwise it would run twice."""
    jobs = Jobs(database)
    job, attempt = running(database)
    jobs.pause(job.id)

    with pytest.raises(ConflictError, match=r"is pausing and cannot be resumed.*cancelled, failed, paused"):
        jobs.resume(job.id)
    JobQueue(database).finish(attempt, Outcome(state=State.PAUSED), lines=[], position=0)
    assert jobs.resume(job.id).state == jobs.resume(job.id).state == State.QUEUED


def test_a_completed_job_takes_more_epochs_and_nothing_else(database: Database) -> None:
    """An early stop at epoch 2 of 3, and 5 more, make 7."""
    jobs = Jobs(database)
    job = completed(database, epoch=2)

    for refused in (jobs.cancel, jobs.pause, jobs.resume):
        with pytest.raises(ConflictError, match="is completed and cannot be"):
            refused(job.id)
    more = jobs.extend(job.id, 5)

    assert (more.state, more.epochs, more.ended) == (State.QUEUED, 7, None)
    assert more.progress == pytest.approx(2 / 7), "the bar of a completed job is full, and this one is not"
    with pytest.raises(
        ConflictError, match="is queued and cannot be extended: that takes a job that is completed"
    ):
        jobs.extend(job.id, 5)


def test_a_repeated_request_for_more_epochs_adds_none(database: Database) -> None:
    """Its answer may have been lost, and the job may have run on and ended since."""
    jobs, queue = Jobs(database), JobQueue(database)
    job = completed(database, epoch=3)

    def complete(epoch: int) -> None:
        attempt = queue.take("worker")
        assert attempt is not None
        said = Line(kind="metrics", data={"epoch": epoch, "val_loss": 0.5})
        queue.finish(attempt, Outcome(state=State.COMPLETED), lines=[said], position=9 + epoch)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: jobs.extend(job.id, 5, key="a"), range(20)))
    assert {(one.state, one.epochs) for one in answers} == {(State.QUEUED, 8)}
    complete(8)
    assert (jobs.extend(job.id, 5, key="a").state, jobs.get(job.id).epochs) == (State.COMPLETED, 8)
    with pytest.raises(ConflictError, match=r"'a'.* 5 more epochs, and not 6"):
        jobs.extend(job.id, 6, key="a")
    with pytest.raises(ConfigError, match="idempotency key"):
        jobs.extend(job.id, 5, key="\0")

    assert jobs.extend(job.id, 5, key="b").epochs == 13
    with pytest.raises(ConflictError, match="is queued"):
        jobs.extend(job.id, 5, key="c")
    complete(13)
    assert jobs.extend(job.id, 5, key="a").epochs == 13, "also the key before the last"
    other = completed(database)
    assert jobs.extend(other.id, 5, key="a").epochs == 8, "the key counts for one job"
    jobs.cancel(other.id)
    jobs.delete(other.id)
    with pytest.raises(NotFoundError):
        jobs.extend(other.id, 5, key="a")


def test_a_job_that_waits_or_runs_is_not_deleted(database: Database) -> None:
    jobs = Jobs(database)
    job, _ = running(database)

    with pytest.raises(ConflictError, match="is running and cannot be deleted"):
        jobs.delete(job.id)

    assert jobs.get(job.id).state == State.RUNNING


def test_a_deleted_job_is_gone_with_its_metrics(database: Database) -> None:
    jobs = Jobs(database)
    job = completed(database)
    jobs.delete(job.id)

    for ask in (jobs.get, jobs.metrics, jobs.cancel, jobs.delete):
        with pytest.raises(NotFoundError, match=job.id):
            ask(job.id)
    assert Outbox(database).read(0)[-1].kind == "deleted"


def test_a_row_of_metrics_has_the_time_it_was_written_and_none_in_the_future(database: Database) -> None:
    job, attempt = running(database)
    rows = [Line(kind="metrics", data={"epoch": e, "at": at}) for e, at in ((1, 1000.0), (2, 9e12), (3, "x"))]
    JobQueue(database).report(attempt, rows, 10)

    first, second, third = Jobs(database).metrics(job.id)
    assert first["at"] == 1000.0
    assert max(second["at"], third["at"]) <= time.time()


def test_metrics_are_a_row_an_epoch_the_last_one_told(database: Database) -> None:
    job, attempt = running(database)
    rows = [Line(kind="metrics", data={"epoch": e, "val_loss": 1 / e}) for e in (1, 2, 3)]
    JobQueue(database).report(attempt, rows, 10)
    JobQueue(database).report(attempt, [Line(kind="metrics", data={"epoch": 2, "val_loss": 9.0})], 20)

    found = Jobs(database).metrics(job.id)
    assert [(row["epoch"], row["val_loss"]) for row in found] == [(1, 1.0), (2, 9.0), (3, 1 / 3)]
    assert [row["epoch"] for row in Jobs(database).metrics(job.id, after=1, limit=1)] == [2]
    best = Jobs(database).get(job.id)
    assert (best.best_epoch, best.best_val_loss, best.val_loss) == (3, 1 / 3, 9.0)


def listed(jobs: Jobs, **chosen) -> list[str]:
    """The names that a list shows; the count has to agree."""
    which = JobFilter(**chosen)
    found = [job.name for job in jobs.list(which)]
    assert jobs.count(which) == len(found)
    return found


@pytest.fixture
def several(jobs: Jobs, database: Database) -> Jobs:
    """Jobs that differ in all that a list can be searched by."""
    flow, cells = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
    with database.writing() as connection:
        connection.execute(DATASETS.delete())
        for id, name in ((flow, "flow 100%"), (cells, "cells")):
            spec = {"kind": "hdf5", "origin": "registered", "spec": {}, "facts": {}, "report": []}
            row = {"id": id, "name": name, "health": "good", "created": 1.0, **spec}
            connection.execute(DATASETS.insert().values(**row))
    queue = JobQueue(database)
    for name, loss, state in (("beta", 0.5, State.COMPLETED), ("Alpha", 0.25, State.FAILED)):
        make(jobs, name=name, dataset_ids=[flow], tags=["night", "base"] if loss < 0.4 else ["night"])
        attempt = queue.take("w")
        assert attempt is not None
        lines = [Line(kind="metrics", data={"epoch": 1, "val_loss": loss})]
        error = "the LOSS is nan" if state is State.FAILED else None
        queue.finish(attempt, Outcome(state=state, error=error), lines=lines, position=1)
    make(jobs, name="gamma_100%", dataset_ids=[cells])
    jobs.pause(make(jobs, name="make cells", kind="generation", dataset_ids=[cells]).id)
    return jobs


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({}, ["make cells", "gamma_100%", "Alpha", "beta"]),
        ({"text": "alpha"}, ["Alpha"]),
        ({"text": " loss is "}, ["Alpha"]),
        ({"text": "nigh"}, ["Alpha", "beta"]),
        ({"text": "100%"}, ["gamma_100%", "Alpha", "beta"]),
        ({"text": "a_1"}, ["gamma_100%"]),
        ({"text": "nothing"}, []),
        ({"states": frozenset({State.PAUSED, State.FAILED})}, ["make cells", "Alpha"]),
        ({"kind": "generation"}, ["make cells"]),
        ({"dataset": "cells"}, ["make cells", "gamma_100%"]),
        ({"dataset": str(uuid.UUID(int=1))}, ["Alpha", "beta"]),
        ({"dataset": "%"}, []),
        ({"tags": ("night",)}, ["Alpha", "beta"]),
        ({"tags": ("night", "base")}, ["Alpha"]),
        ({"tags": ("nigh",)}, []),
        ({"tags": ("night",), "states": frozenset({State.COMPLETED})}, ["beta"]),
        ({"sort": "created"}, ["beta", "Alpha", "gamma_100%", "make cells"]),
        ({"sort": "name"}, ["Alpha", "beta", "gamma_100%", "make cells"]),
        ({"sort": "-name"}, ["make cells", "gamma_100%", "beta", "Alpha"]),
        ({"sort": "state"}, ["beta", "Alpha", "make cells", "gamma_100%"]),
        ({"sort": "loss"}, ["Alpha", "beta", "make cells", "gamma_100%"]),
        ({"sort": "-loss"}, ["beta", "Alpha", "make cells", "gamma_100%"]),
    ],
)
def test_a_list_is_searched_filtered_and_sorted(several: Jobs, chosen: dict, names: list[str]) -> None:
    assert listed(several, **chosen) == names


def test_jobs_that_never_ran_are_the_last_by_duration(several: Jobs) -> None:
    for sort in ("duration", "-duration"):
        assert listed(several, sort=sort)[2:] == ["make cells", "gamma_100%"]


def test_a_paused_job_has_no_duration_to_sort_by(jobs: Jobs, database: Database) -> None:
    ended = completed(database)
    paused, attempt = running(database, name="paused")
    jobs.pause(paused.id)
    JobQueue(database).finish(attempt, Outcome(state=State.PAUSED), lines=[], position=1)
    runs, _ = running(database, name="runs")

    assert [took(jobs.get(id), time.time()) == "–" for id in (ended.id, paused.id, runs.id)] == [0, 1, 0]
    for sort in ("duration", "-duration"):
        assert listed(jobs, sort=sort)[2] == "paused"


def test_a_job_is_found_by_the_start_of_its_id(several: Jobs) -> None:
    job = several.list()[1]

    assert listed(several, text=job.id[:13]) == [job.name]


@pytest.mark.parametrize(
    ("chosen", "is_found"),
    [
        ({"tags": ("Night",)}, True),
        ({"tags": ("night",)}, False),
        ({"text": "NIGHT"}, True),
        ({"text": "über"}, True),
        ({"text": "ÜBER"}, True),
    ],
)
def test_capitals_mean_the_same_on_both_databases(jobs: Jobs, chosen: dict, is_found: bool) -> None:
    make(jobs, name="Über", tags=["Night"])

    assert listed(jobs, **chosen) == ["Über"] * is_found


def test_the_start_of_an_id_is_found_in_capitals(several: Jobs) -> None:
    job = several.list()[1]

    assert listed(several, text=job.id[:13].upper()) == [job.name]


def test_name_and_tags_are_changed_in_any_state_and_told_once(jobs: Jobs, database: Database) -> None:
    job, _ = running(database, tags=["b", "a", "b"])
    assert (job.tags, jobs.tags()) == (["a", "b"], ["a", "b"])

    changed = jobs.change(job.id, name="other", add_tags=["c"], remove_tags=["a", "x"])
    again = jobs.change(job.id, name="other", add_tags=["c"], remove_tags=["a", "x"])

    assert changed == again == jobs.get(job.id)
    assert (changed.name, changed.tags, changed.state) == ("other", ["b", "c"], State.RUNNING)
    assert jobs.change(job.id, tags=[]).tags == []
    assert jobs.tags() == []
    events = [event.data for event in Outbox(database).read(0, job=job.id) if event.kind == "changed"]
    assert events == [{"name": "other", "tags": ["b", "c"]}, {"name": "other", "tags": []}]
    with pytest.raises(NotFoundError):
        jobs.change("none", name="n")


def test_the_tags_of_the_newest_jobs_are_listed(jobs: Jobs) -> None:
    for tags in (["old"], ["b", "c"], ["a"], []):
        make(jobs, tags=tags)

    assert jobs.tags() == ["a", "b", "c", "old"]
    assert jobs.tags(limit=2) == ["a", "b"]
    assert jobs.tags(limit=3) == ["a", "b", "c"]


def test_tags_that_are_added_at_the_same_time_are_all_kept(jobs: Jobs) -> None:
    job = make(jobs)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: jobs.change(job.id, add_tags=[f"t{n}"]), range(8)))

    assert jobs.get(job.id).tags == [f"t{n}" for n in range(8)]


@pytest.mark.parametrize("tags", [[""], ["a,b"], ["a\nb"], ["x" * 41], [str(n) for n in range(11)]])
def test_a_tag_that_no_list_can_show_is_refused(embedded: Database, tags: list[str]) -> None:
    jobs = Jobs(embedded)
    job = make(jobs)

    with pytest.raises(ConfigError):
        make(jobs, tags=tags)
    with pytest.raises(ConfigError):
        jobs.change(job.id, add_tags=tags)
    assert jobs.get(job.id) == job


def test_a_key_with_other_tags_is_another_body(jobs: Jobs) -> None:
    first = make(jobs, key="k", tags=["a"])

    assert make(jobs, key="k", tags=["a"]) == first
    with pytest.raises(ConflictError):
        make(jobs, key="k")
