"""Jobs from their claim to their end, with a process that stands in for training."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import ConfigError, DegradedError, NotFoundError
from stoker.runtime.locks import FileLock
from stoker.service.database import ENDED_STATES, WAITING_STATES, Database, Outbox, State
from stoker.service.executor import JobLimits, LocalExecutor
from stoker.service.folders import JobFile, StateFolder
from stoker.service.jobs import AttemptPolicy, Job, JobAttempt, JobQueue, Jobs
from stoker.service.supervisor import WorkerSlot, WorkerSupervisor, remove_orphans
from stoker.service.timeline import timeline_of
from stoker.service.worker import JobWorker, WorkerSettings
from tests.service.serve import STAND_IN, plan


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    folder.make()
    return folder


class Bench:
    """A worker in this process, and what its jobs' users see."""

    def __init__(self, database: Database, state: StateFolder, limits: JobLimits | None = None) -> None:
        self.database, self.state, self.jobs = database, state, Jobs(database)
        settings = WorkerSettings(
            name="here",
            state=str(state.path),
            program=STAND_IN,
            retry=AttemptPolicy(backoff_s=0.0, max_losses=3),
            pace=plan().settings.pace,
            limits=limits or JobLimits(grace_s=20.0),
        )
        self.queue = JobQueue(database, settings.retry)
        self.describe: Callable = lambda _database, ids: [{"id": id, "spec": {}} for id in ids]
        self.worker = JobWorker(settings, database, LocalExecutor(), self._described)

    def _described(self, database: Database, ids: list[str]):
        return self.describe(database, ids)

    def make(self, epochs: int = 3, **config) -> Job:
        return self.jobs.create(config, name="n", epochs=epochs, dataset_ids=["d"])[0]

    def attempt(self, meanwhile: Callable[[], object] | None = None) -> None:
        """One attempt at the oldest job, and something that happens once it says something."""
        attempt = self.queue.take("here")
        assert attempt is not None
        if meanwhile is None:
            self.worker.work(attempt)
            return
        helper = threading.Thread(target=self._then, args=(attempt.job.id, meanwhile))
        helper.start()
        try:
            self.worker.work(attempt)
        finally:
            helper.join(30)

    def _then(self, id: str, meanwhile: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while (job := self.jobs.get(id)).tier is None and job.state not in ENDED_STATES:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        meanwhile()

    def kinds(self, id: str) -> list[str]:
        return [event.kind for event in Outbox(self.database).read(0, job=id)]

    def witness(self, id: str) -> list[str]:
        text = (self.state.job(id).path / "witness.txt").read_text()
        return [line.split()[0] for line in text.splitlines()]


@pytest.fixture
def bench(embedded: Database, state: StateFolder) -> Bench:
    return Bench(embedded, state)


def test_a_job_is_told_what_to_do_and_its_words_are_kept(bench: Bench) -> None:
    job = bench.make(epochs=2, note="x")
    bench.attempt()

    told = JobFile.read(bench.state.job(job.id).job_file)
    assert (told.id, told.attempt, told.epochs, told.config) == (job.id, 1, 2, {"note": "x"})
    assert (told.datasets, told.checkpoint) == ([{"id": "d", "spec": {}}], None)
    done = bench.jobs.get(job.id)
    assert (done.state, done.epoch, done.progress, done.exit_code) == (State.COMPLETED, 2, 1.0, 0)
    assert (done.checkpoint, done.tier, done.message) == ("epoch", "host", "done")
    assert bench.kinds(job.id) == ["queued", "claimed", "started", "metrics", "metrics", "completed"]
    assert [row["val_loss"] for row in bench.jobs.metrics(job.id)] == [1.0, 0.5]


def test_a_paused_job_goes_on_where_it_stopped(bench: Bench) -> None:
    job = bench.make(epochs=4, epoch_s=0.2)
    bench.attempt(lambda: bench.jobs.pause(job.id))
    paused = bench.jobs.get(job.id)
    bench.jobs.resume(job.id)
    bench.attempt()

    assert (paused.state, paused.message) == (State.PAUSED, "paused with a checkpoint")
    assert bench.jobs.get(job.id).state == State.COMPLETED
    assert [row["epoch"] for row in bench.jobs.metrics(job.id)] == [1, 2, 3, 4]
    assert bench.witness(job.id) == ["start", "start", "end"]


def test_a_job_that_does_not_stop_when_asked_is_ended(embedded: Database, state: StateFolder) -> None:
    bench = Bench(embedded, state, JobLimits(grace_s=0.2))
    job = bench.make(deaf=True, epoch_s=600.0)

    bench.attempt(lambda: bench.jobs.cancel(job.id))

    ended = bench.jobs.get(job.id)
    assert (ended.state, ended.exit_code) == (State.CANCELLED, -9)
    assert bench.kinds(job.id)[-2:] == ["cancelling", "cancelled"]


def test_a_job_cancelled_before_it_starts_never_does(bench: Bench) -> None:
    job = bench.make()
    bench.jobs.cancel(job.id)

    assert bench.queue.take("here") is None
    assert not bench.state.job(job.id).path.exists()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"fail_at": 2}, "the loss is not finite"),
        ({"fail_at": 2, "silent": True}, "status 3 and did not say why; its log ends with: last words"),
    ],
    ids=["it says why", "it does not"],
)
def test_a_job_that_fails_says_why(bench: Bench, config: dict, error: str) -> None:
    job = bench.make(**config)
    bench.attempt()

    failed = bench.jobs.get(job.id)
    assert failed.state == State.FAILED
    assert failed.error is not None
    assert failed.error.endswith(error)
    assert failed.exit_code == 3


def test_a_job_that_is_killed_each_time_fails_in_the_end(bench: Bench) -> None:
    job = bench.make(die_at=2)
    for _ in range(3):
        bench.attempt()

    failed = bench.jobs.get(job.id)
    assert (failed.state, failed.epoch, failed.attempt) == (State.FAILED, 1, 3)
    assert failed.error == (
        "3 attempts in a row ended without a finished epoch; the last: its process was ended by SIGKILL"
    )


def test_a_job_that_finds_the_disk_full_waits_for_room_however_often(bench: Bench) -> None:
    job = bench.make(full_at=2)
    for _ in range(4):
        with bench.database.writing() as connection:
            connection.exec_driver_sql("UPDATE jobs SET not_before = 0")
        bench.attempt()

    waiting = bench.jobs.get(job.id)
    assert (waiting.state, waiting.epoch, waiting.attempt) == (State.PENDING, 1, 4)
    assert waiting.message.startswith("its process found the disk full")
    assert bench.queue.take("here") is None, "not at once"


@pytest.mark.parametrize("where", ["stoker.service.worker.JobFile.write", "stoker.service.worker.end_line"])
def test_a_job_whose_folder_takes_nothing_waits_for_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, full)
    job = bench.make()
    bench.attempt()

    waiting = bench.jobs.get(job.id)
    assert waiting.state == State.PENDING
    assert "No space left on device" in waiting.message
    with bench.database.reading() as connection:
        assert connection.exec_driver_sql("SELECT losses FROM jobs").scalar_one() == 0


def test_no_job_is_begun_while_the_disk_is_full(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    job = bench.make(epochs=1)
    real, full = os.statvfs, [True]

    def statvfs(path: object) -> os.statvfs_result:
        found = list(real(path))  # type: ignore[call-overload]
        if full[0]:
            found[4] = 3  # blocks for those who are not root
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    supervisor = WorkerSupervisor(bench.database, bench.state, plan(workers=0))
    supervisor.step()
    runner = threading.Thread(target=bench.worker.run)
    runner.start()
    try:
        time.sleep(0.3)
        assert bench.jobs.get(job.id).state == State.QUEUED
        assert "is full: 12.0 KiB and " in str(bench.database.trouble.why)
        full[0] = False
        until(lambda: bench.jobs.get(job.id).state == State.COMPLETED)
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 2.0)
        supervisor.step()
        assert bench.database.trouble.why is None
    finally:
        bench.worker.stop()
        runner.join(30)
        supervisor.stop()


def test_a_job_that_crashes_after_its_last_word_is_done(bench: Bench) -> None:
    job = bench.make(epochs=1, die_at_end=True)
    bench.attempt()

    done = bench.jobs.get(job.id)
    assert (done.state, done.exit_code) == (State.COMPLETED, -9)


def test_a_job_that_ends_without_a_word_is_not_done(bench: Bench) -> None:
    """As by `os._exit(0)` somewhere in a library."""
    job = bench.make(epochs=1, quiet=True)
    bench.attempt()

    waiting = bench.jobs.get(job.id)
    assert waiting.state == State.QUEUED
    assert waiting.message == "its process ended with status 0 and without a result"


def test_a_job_that_hangs_after_its_last_word_is_done(embedded: Database, state: StateFolder) -> None:
    bench = Bench(embedded, state, JobLimits(grace_s=0.2))
    job = bench.make(epochs=1, hang_at_end=True)
    bench.attempt()

    done = bench.jobs.get(job.id)
    assert (done.state, done.message, done.exit_code) == (State.COMPLETED, "done", -9)


def test_a_job_that_says_nothing_for_long_is_tried_again(embedded: Database, state: StateFolder) -> None:
    bench = Bench(embedded, state, JobLimits(event_timeout_s=0.5, grace_s=0.2))
    job = bench.make(epoch_s=600.0, deaf=True)
    bench.attempt()

    waiting = bench.jobs.get(job.id)
    assert waiting.state == State.QUEUED
    assert waiting.message.startswith("it wrote no event for ")
    with embedded.reading() as connection:
        assert connection.exec_driver_sql("SELECT losses FROM jobs").scalar_one() == 1


def test_a_job_over_a_limit_fails_with_the_figure(embedded: Database, state: StateFolder) -> None:
    bench = Bench(embedded, state, JobLimits(wall_s=0.3, grace_s=20.0))
    job = bench.make(epoch_s=600.0)
    bench.attempt()

    assert bench.jobs.get(job.id).state == State.FAILED
    assert "an attempt may take 300 ms" in str(bench.jobs.get(job.id).error)


def test_a_service_that_stops_gives_its_job_back_with_a_checkpoint(bench: Bench) -> None:
    job = bench.make(epoch_s=0.3)
    bench.attempt(bench.worker.stop)

    waiting = bench.jobs.get(job.id)
    assert (waiting.state, waiting.message) == (State.QUEUED, "the service was stopped")


def test_a_result_that_nobody_saw_is_taken_not_made_again(bench: Bench) -> None:
    """The worker was killed between the end of the process and the word to the database."""
    job = bench.make(epochs=2)
    bench.attempt()
    result = Outbox(bench.database).read(0)[-1].data["result"]
    with bench.database.writing() as connection:
        connection.exec_driver_sql("UPDATE jobs SET state = 'queued', position = 0")

    bench.attempt()

    assert Outbox(bench.database).read(0)[-1].data["result"] == result
    assert bench.witness(job.id) == ["start", "end"]
    assert bench.jobs.get(job.id).state == State.COMPLETED


def test_a_completed_job_trains_on_when_it_is_extended(bench: Bench) -> None:
    job = bench.make(epochs=1)
    bench.attempt()
    bench.jobs.extend(job.id, 2)
    bench.attempt()

    assert bench.jobs.get(job.id).epoch == 3
    assert [row["epoch"] for row in bench.jobs.metrics(job.id)] == [1, 2, 3]
    assert bench.kinds(job.id).count("completed") == 2


def test_a_job_whose_data_is_gone_fails_and_says_so(bench: Bench) -> None:
    def describe(_database: Database, ids: list[str]):
        raise NotFoundError(f"there is no data set {ids[0]!r}")

    bench.describe = describe
    job = bench.make()
    bench.attempt()

    assert bench.jobs.get(job.id).error == "there is no data set 'd'"


def test_a_database_that_is_away_for_a_while_costs_a_job_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.make(epochs=4, epoch_s=0.05)
    away, report = [30], JobQueue.report

    def unreliable(self: JobQueue, *given):
        if away[0]:
            away[0] -= 1
            raise DegradedError("not now")
        return report(self, *given)

    monkeypatch.setattr(JobQueue, "report", unreliable)
    claim = bench.queue.take("here")
    assert claim is not None
    bench.worker.work(claim)

    assert bench.witness(job.id) == ["start", "end"]
    assert [row["epoch"] for row in bench.jobs.metrics(job.id)] == [1, 2, 3, 4]


def test_a_worker_that_lost_its_job_ends_the_process_and_says_nothing(bench: Bench) -> None:
    job = bench.make(epoch_s=600.0)

    def lose() -> None:
        bench.queue.release("here")
        bench.jobs.cancel(job.id)

    bench.attempt(lose)

    assert bench.jobs.get(job.id).state == State.CANCELLED
    assert bench.kinds(job.id) == ["queued", "claimed", "started", "queued", "cancelled"]
    started = (bench.state.job(job.id).path / "witness.txt").read_text().split()[1]
    until(lambda: not Path(f"/proc/{started}").exists())


def test_a_state_folder_has_one_service_and_a_database_one_folder(
    embedded: Database, state: StateFolder, tmp_path: Path
) -> None:
    first = WorkerSupervisor(embedded, state, plan(workers=0))

    with pytest.raises(ConfigError, match="is used by a running service"):
        WorkerSupervisor(embedded, state, plan(workers=0))
    with pytest.raises(ConfigError, match="with another state folder"):
        WorkerSupervisor(embedded, StateFolder(tmp_path / "other"), plan(workers=0))
    first.stop()
    WorkerSupervisor(embedded, state, plan(workers=0)).stop()


def test_jobs_of_an_earlier_service_are_taken_up_once_its_worker_has_ended(
    embedded: Database, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a checkpoint meanwhile, on the device of the worker that is to start."""
    started: list[object] = []
    monkeypatch.setattr(WorkerSlot, "_start", lambda slot, _: started.append(slot))
    job = Jobs(embedded).create({}, name="n", epochs=1)[0]
    JobQueue(embedded).take("a-host-0-aaaaaaaa")
    earlier = FileLock(state.workers / "lock")
    assert earlier.acquire()
    supervisor = WorkerSupervisor(embedded, state, plan(workers=1))

    def later() -> State:
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 2.0)
        supervisor.step()
        return Jobs(embedded).get(job.id).state

    assert (later(), later()) == (State.RUNNING, State.RUNNING)
    assert not started
    earlier.release()
    assert later() in WAITING_STATES
    later()
    assert started
    supervisor.stop()


def test_a_job_is_taken_from_a_dead_worker_once_the_database_is_back(
    embedded: Database, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Jobs(embedded).create({}, name="n", epochs=1)[0]
    supervisor = WorkerSupervisor(embedded, state, plan(workers=0))
    JobQueue(embedded).take("dead")
    with monkeypatch.context() as away:
        away.setattr(JobQueue, "workers", lambda _: (_ for _ in ()).throw(DegradedError("not now")))
        supervisor.step()
    assert Jobs(embedded).get(job.id).state == State.RUNNING

    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 2.0)
    supervisor.step()

    assert Jobs(embedded).get(job.id).state in WAITING_STATES
    supervisor.stop()


def test_a_worker_gives_up_a_job_that_it_took_without_hearing_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was cut after the database had noted it: nobody else may take the job."""
    take, cuts = JobQueue.take, [1]

    def cut(self: JobQueue, worker: str) -> JobAttempt | None:
        attempt = take(self, worker)
        if attempt is not None and cuts:
            cuts.pop()
            raise DegradedError("cut off")
        return attempt

    monkeypatch.setattr(JobQueue, "take", cut)
    job = bench.make(epochs=1)
    runner = threading.Thread(target=bench.worker.run)
    runner.start()
    try:
        until(lambda: bench.jobs.get(job.id).state == State.COMPLETED)
    finally:
        bench.worker.stop()
        runner.join(30)
    assert bench.jobs.get(job.id).attempt == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_whose_thread_dies_says_so(
    embedded: Database, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSupervisor, "step", lambda self: sys.exit())
    supervisor = WorkerSupervisor(embedded, state, plan(workers=0))
    supervisor.start()

    ended = "the supervisor of the workers has ended; see the service's log"
    until(lambda: embedded.trouble.why == ended)
    supervisor.stop()


def test_a_jobs_folder_that_cannot_be_listed_ends_neither_supervisor_nor_chores(
    embedded: Database, state: StateFolder
) -> None:
    supervisor = WorkerSupervisor(embedded, state, plan(workers=0))
    state.jobs.rmdir()
    state.jobs.write_text("no folder")
    supervisor.start()

    supervisor.do_chores()
    for _ in range(3):
        supervisor.step()

    assert embedded.trouble.why is None
    assert all(
        t.is_alive() for t in threading.enumerate() if t.name in ("stoker-supervisor", "stoker-chores")
    )
    assert {"stoker-supervisor", "stoker-chores"} <= {t.name for t in threading.enumerate()}
    supervisor.stop()


def test_a_workers_lock_that_cannot_be_taken_ends_no_supervisor(bench: Bench) -> None:
    """Nobody knows whether earlier workers have ended, so their jobs stay with them."""
    supervisor = WorkerSupervisor(bench.database, bench.state, plan(workers=0))
    job = bench.make()
    assert JobQueue(bench.database).take("host-1-0f0f0f0f") is not None
    lock = bench.state.workers / "lock"
    lock.mkdir()
    supervisor.step()

    assert str(lock) in str(bench.database.trouble.why)
    assert bench.jobs.get(job.id).state is State.RUNNING
    lock.rmdir()
    supervisor._look_from = 0.0
    supervisor.step()
    assert bench.database.trouble.why is None
    assert bench.jobs.get(job.id).state is not State.RUNNING


def test_workers_are_watched_while_a_folder_of_a_deleted_job_does_not_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = bench.make()
    bench.state.job(gone.id).make()
    os.utime(bench.state.job(gone.id).path, (0, 0))
    bench.jobs.cancel(gone.id)
    bench.jobs.delete(gone.id)
    hangs, released = threading.Event(), threading.Event()
    monkeypatch.setattr("shutil.rmtree", lambda *_: (hangs.set(), released.wait(60)))
    supervisor = WorkerSupervisor(bench.database, bench.state, plan(workers=0))
    job = bench.make()
    JobQueue(bench.database).take("dead")
    supervisor.start()
    try:
        assert hangs.wait(30)
        until(lambda: bench.jobs.get(job.id).state is not State.RUNNING)
    finally:
        released.set()
        supervisor.stop()


def test_a_job_waits_for_data_that_another_job_makes(bench: Bench) -> None:
    job = bench.make()
    bench.describe = lambda _database, ids: [
        {"id": id, "name": "night", "health": "making", "spec": {}} for id in ids
    ]
    bench.attempt()

    waiting = bench.jobs.get(job.id)
    assert waiting.state in WAITING_STATES
    assert (waiting.epoch, waiting.error) == (0, None)
    events = Outbox(bench.database).read(0, job=job.id)
    assert any("night" in json.dumps(event.data) for event in events)
    assert [phase.kind for phase in timeline_of(waiting, Outbox(bench.database)).phases] == ["queued", "data"]


def test_folders_of_deleted_jobs_are_removed_later(bench: Bench) -> None:
    kept, gone = bench.make(), bench.make()
    for job in (kept, gone):
        bench.state.job(job.id).make()
        os.utime(bench.state.job(job.id).path, (0, 0))
    young = bench.state.job("00000000-0000-4000-8000-000000000000")
    young.make()
    bench.jobs.cancel(gone.id)
    bench.jobs.delete(gone.id)

    assert remove_orphans(bench.state, bench.jobs) == [gone.id]
    assert bench.state.job(kept.id).path.exists()
    assert young.path.exists()


# On a loaded machine a new worker needs seconds to its first heartbeat: a short timeout would kill each one.
SLOW_RETRY = AttemptPolicy(timeout_s=15.0, room_wait_s=1.5, max_losses=1000, backoff_s=0.05)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_its_job_goes_on(
    embedded: Database, state: StateFolder, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs(embedded)
    supervisor = WorkerSupervisor(embedded, state, plan(workers=1, retry=SLOW_RETRY))
    supervisor.start()
    try:
        job = jobs.create({"epoch_s": 0.2}, name="n", epochs=20)[0]
        until(lambda: jobs.get(job.id).epoch, 240.0)
        (before,) = supervisor.workers()
        os.kill(before.pid, number)
        until(lambda: jobs.get(job.id).state in ENDED_STATES, 240.0)
        (after,) = supervisor.workers()
    finally:
        assert supervisor.stop(limit_s=120.0)

    assert (jobs.get(job.id).state, jobs.get(job.id).attempt) == (State.COMPLETED, 2)
    assert after.deaths == 1
    assert "OVERLAP" not in (state.job(job.id).path / "witness.txt").read_text()
    assert f"worker {before.name} was killed by signal 9" in caplog.text
    assert ("gave no heartbeat for" in caplog.text) == (number is signal.SIGSTOP)
    assert f"job {job.id} lost its worker and is now " in caplog.text


@pytest.mark.slow  # the quick storm starts a service too
@pytest.mark.timeout(600)
def test_a_service_runs_jobs_and_replaces_dead_workers(embedded: Database, state: StateFolder) -> None:
    jobs = Jobs(embedded)
    supervisor = WorkerSupervisor(embedded, state, plan(workers=1, retry=SLOW_RETRY))
    supervisor.start()
    try:
        job = jobs.create({"epoch_s": 0.2}, name="n", epochs=20)[0]
        until(lambda: jobs.get(job.id).epoch, 240.0)
        (before,) = supervisor.workers()
        os.kill(before.pid, 9)
        until(lambda: jobs.get(job.id).state in ENDED_STATES, 240.0)
        (after,) = supervisor.workers()
        assert embedded.trouble.why is None
    finally:
        assert supervisor.stop(limit_s=120.0)

    assert (jobs.get(job.id).state, jobs.get(job.id).attempt) == (State.COMPLETED, 2)
    assert (after.deaths, after.name != before.name) == (1, True)
    log = (state.workers / "0.log").read_text()
    assert str(embedded.address()) not in log
    words = (state.job(job.id).path / "witness.txt").read_text()
    assert "OVERLAP" not in words
    assert json.loads(state.job(job.id).job_file.read_text())["checkpoint"] == "epoch"


def until(true: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
