"""A worker process: runs one job after another until it is stopped.

`stoker serve` starts workers (`supervisor.py`), gives each its `WorkerSettings`, and watches its heartbeat.
On SIGTERM, which it also gets when the service dies, it stops its job with a checkpoint and gives it back.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from stoker.errors import DegradedError, LostAttemptError, ResourceError, StalledError, StokerError
from stoker.plugins import load_extension
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.processes.child import preload
from stoker.runtime.processes.entry import Connection
from stoker.service.database import Database, State
from stoker.service.executor import (
    END_S,
    NO_ROOM,
    STOPPED,
    Executor,
    JobLimits,
    JobLock,
    JobProcess,
    JobProgram,
    LocalExecutor,
    RayTarget,
)
from stoker.service.folders import DiskRoom, JobFile, StateFolder
from stoker.service.jobs import AttemptPolicy, Job, JobAttempt, JobQueue, Outcome
from stoker.service.journal import Line, end_line, read_lines
from stoker.service.security import DataAccess
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.folders import JobFolder

# ----------------------------------------------------------------------------------------------------------
# One attempt at a job: start its process, store its events, carry out requests, end it.
#
# The process keeps running while the database does not answer: its events wait in its file. It is ended when
# the database says that the attempt is over (nothing is stored then), when a user asks for it, when it
# exceeds a limit, or when the database does not answer for too long.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPace:
    """Intervals of a worker."""

    poll_s: float = 0.25
    """Seconds between two checks of the process and its file, and of the queue without a job."""
    look_s: float = 1.0
    """Seconds between two checks of the requests for the job, and of a database that does not answer."""
    database_timeout_s: float = 600.0
    """How long the database may not answer before the job is stopped with a checkpoint."""


class EndReason(Enum):
    """Why a process is asked to end before its time."""

    REQUEST = auto()
    """A user paused or cancelled the job."""
    SHUTDOWN = auto()
    """The worker stops."""
    DATABASE_TIMEOUT = auto()
    """The database does not answer."""
    LIMIT = auto()
    """It exceeds a limit: the job fails."""
    HANG = auto()
    """It writes no events: another attempt is made."""
    LAST_EVENT = auto()
    """It has written its last event and only has to exit."""


class AttemptRunner:
    """Makes one attempt at a job with `run`.

    Args:
        worker: Has the queue and the executor.
        attempt: The attempt.
        folder: The job's folder.
    """

    def __init__(self, worker: JobWorker, attempt: JobAttempt, folder: JobFolder) -> None:
        self._worker, self._attempt, self._folder = worker, attempt, folder
        self._queue, self._settings = worker.queue, worker.settings
        self._position = attempt.position
        self._untold: list[Line] = []
        self._said: Line | None = None
        self._wanted = State.RUNNING
        self._heard = self._spoke = time.monotonic()
        self._reason: EndReason | None = None
        self._why = ""
        self._asked = self._again = 0.0

    def run(self) -> None:
        """Run until the process has ended and the outcome is stored, or the job was given to another worker.

        Raises:
            DegradedError: The worker stops, and the database does not answer; the service gives the job back.
        """
        try:
            with explain_disk_errors(self._folder.path):
                lock = self._worker.executor.lock(self._folder)
                try:
                    self._run(lock)
                finally:
                    lock.release()
        except (StalledError, ResourceError, OSError) as error:  # no process runs, or its folder has no space
            self._give_back(str(error), lost=False, wait_s=self._queue.retry.room_wait_s)
        except LostAttemptError as error:
            _log.warning("%s", error)

    def _run(self, lock: JobLock) -> None:
        end_line(self._folder.events)
        self._drain()
        code = None
        if self._said is None:  # else an earlier attempt ended without being noticed
            self._worker.heartbeat()
            process = lock.start(self._settings.program, self._settings.limits)
            try:
                code = self._watch(process)
            except BaseException:
                _end_now(process)
                raise
            self._drain()
        self._until_told(lambda: self._conclude(code))

    def _watch(self, process: JobProcess) -> int:
        """Return the exit status of the process, which is asked to end when there is a reason."""
        while (code := process.poll()) is None:
            self._worker.heartbeat()
            if not self._untold:
                self._read()
            try:
                if time.monotonic() >= self._again:
                    self._tell()
            except DegradedError as error:
                _log.warning("%s", error)
                self._again = time.monotonic() + self._settings.pace.look_s
            self._react(process)
            time.sleep(self._settings.pace.poll_s)
        return code

    def _react(self, process: JobProcess) -> None:
        if self._reason is not None:
            if time.monotonic() - self._asked > self._settings.limits.grace_s:
                process.kill()
            return
        now, limits = time.monotonic(), self._settings.limits
        silent_s, quiet_s = now - self._heard, now - self._spoke
        if self._said is not None:
            self._reason, self._asked = EndReason.LAST_EVENT, now
            return
        if self._wanted is not State.RUNNING:
            self._reason, self._why = EndReason.REQUEST, "it was asked for"
        elif self._worker.stopping:
            self._reason, self._why = EndReason.SHUTDOWN, "the service was stopped"
        elif silent_s > self._settings.pace.database_timeout_s:
            self._reason = EndReason.DATABASE_TIMEOUT
            self._why = f"the database did not answer for {format_seconds(silent_s)}"
        elif passed := process.exceeded():
            self._reason, self._why = EndReason.LIMIT, passed
        elif limits.event_timeout_s is not None and quiet_s > limits.event_timeout_s:
            self._reason, self._why = EndReason.HANG, f"it wrote no event for {format_seconds(quiet_s)}"
        else:
            return
        self._asked = now
        process.terminate()

    def _read(self) -> bool:
        """Read the next lines of the process; return whether there were any."""
        lines, position = read_lines(self._folder.events, self._position)
        if more := position > self._position:
            self._untold, self._position, self._spoke = lines, position, time.monotonic()
            self._said = next((line for line in lines if line.kind in ("completed", "failed")), None)
        return more

    def _drain(self) -> None:
        """Read to the last event of the process and store all but the last batch of lines.

        That batch is stored together with the end of the attempt, so that the next worker finds it again when
        this one is killed in between.
        """
        while self._said is None:
            if self._untold:
                self._until_told(self._report)
            if not self._read():
                return

    def _tell(self) -> None:
        """Store new lines, or check for requests, when that is due."""
        if self._untold and self._said is None:
            self._report()
        elif time.monotonic() - self._heard > self._settings.pace.look_s:
            self._wanted = self._queue.look(self._attempt)
        else:
            return
        self._heard = time.monotonic()

    def _report(self) -> None:
        self._wanted = self._queue.report(self._attempt, self._untold, self._position)
        self._untold = []

    def _until_told(self, tell: Callable[[], None]) -> None:
        """Call `tell` until the database answers; a worker that stops gives up after a while."""
        deadline = float("inf")
        while True:
            self._worker.heartbeat()
            try:
                tell()
            except DegradedError as error:
                _log.warning("%s", error)
                if self._worker.stopping:
                    deadline = min(deadline, time.monotonic() + self._queue.retry.timeout_s)
                if time.monotonic() > deadline:
                    raise
                time.sleep(self._settings.pace.look_s)
            else:
                return

    def _conclude(self, code: int | None) -> None:
        while True:  # at most three times: a job goes from running to pausing to cancelling
            self._wanted = self._queue.look(self._attempt)
            if (outcome := self._outcome(code)) is None:
                self._report()
                lost = self._reason in (None, EndReason.HANG) and code != NO_ROOM
                wait_s = self._queue.retry.room_wait_s if code == NO_ROOM else 0.0
                self._give_back(self._why or _ended_by(code), lost=lost, wait_s=wait_s)
                return
            try:
                self._queue.finish(self._attempt, outcome, lines=self._untold, position=self._position)
            except LostAttemptError:  # or another request came meanwhile, which `look` returns
                continue
            return

    def _outcome(self, code: int | None) -> Outcome | None:
        """Return how the job ends; None: it continues in another attempt.

        The last event of the process counts, not its status. A process that reported its end may still crash
        while it exits. One that exits with 0 without an event was cut short.
        """
        said, exceeded = self._said, self._reason is EndReason.LIMIT
        data = {} if said is None else said.data
        message = str(data.get("message", ""))
        if said is not None and said.kind == "completed":
            return Outcome(state=State.COMPLETED, message=message, exit_code=code, data=data)
        if self._wanted is State.CANCELLING:
            return Outcome(state=State.CANCELLED, message="cancelled", exit_code=code)
        if said is not None or exceeded or (code is not None and code > 0 and code not in (STOPPED, NO_ROOM)):
            error = self._why if exceeded else str(data.get("error") or message) or self._last_words(code)
            return Outcome(
                state=State.FAILED, message=message or "failed", error=error, exit_code=code, data=data
            )
        if self._wanted is State.PAUSING:
            stopped = code == STOPPED
            how = "with a checkpoint" if stopped else "at its last checkpoint: it did not stop in time"
            return Outcome(state=State.PAUSED, message=f"paused {how}", exit_code=code)
        return None

    def _last_words(self, code: int | None) -> str:
        """Return the end of the log of a process that failed without an event."""
        try:
            with self._folder.log.open("rb") as file:
                file.seek(-min(4000, self._folder.log.stat().st_size), 2)
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "(nothing)")
        return f"its process ended with status {code} and did not say why; its log ends with: {last[:500]}"

    def _give_back(self, why: str, *, lost: bool, wait_s: float) -> None:
        try:
            self._until_told(
                lambda: self._queue.give_back(self._attempt, why, lost=lost, wait_s=wait_s) and None
            )
        except LostAttemptError as error:
            _log.warning("%s", error)


def _end_now(process: JobProcess) -> None:
    """Kill a process and wait for its end."""
    process.kill()
    deadline = time.monotonic() + END_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _ended_by(code: int | None) -> str:
    if code == STOPPED:
        return "its process stopped with a checkpoint, though it was not asked to"
    if code == NO_ROOM:
        return "its process found the disk full; it continues from its last checkpoint when there is space"
    if code is None or code >= 0:
        return f"its process ended with status {code} and without a result"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was ended by {name}"


_log = logging.getLogger(__name__)
MADE_LOOK_S = 2.0
"""Seconds between two checks of a data set that is being made."""
Describe = Callable[[Database, list[str]], "list[dict[str, Json]]"]
"""The registered data sets of some ids, described so that a job can open them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker."""

    name: str = ""
    """Unique for all time."""
    url: str = ""
    """Of the database, with its password."""
    state: str = ""
    """The state folder."""
    program: JobProgram = field(default_factory=JobProgram)
    retry: AttemptPolicy = field(default_factory=AttemptPolicy)
    pace: WorkerPace = field(default_factory=WorkerPace)
    limits: JobLimits = field(default_factory=JobLimits)
    access: DataAccess = field(default_factory=DataAccess)
    """Which registered data its jobs may read."""
    ray: RayTarget | None = None
    """The cluster that runs its jobs; None: this machine."""


class JobWorker:
    """Takes one job after another.

    Args:
        settings: Its settings.
        database: Has the jobs.
        executor: Runs their processes.
        describe: Describes data sets for `job.json`.
        heartbeat: Called regularly, at least once in `AttemptPolicy.timeout_s`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        database: Database,
        executor: Executor,
        describe: Describe,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.executor = executor
        self.heartbeat = heartbeat
        self.queue = JobQueue(database, settings.retry)
        self.stopping = False
        """True if it ends after the current job."""
        self._database = database
        self._describe = describe
        self._folders = StateFolder(Path(settings.state))
        self._room = DiskRoom(self._folders)

    def stop(self) -> None:
        """End soon: the current job writes a checkpoint and is given back. Safe in a signal handler."""
        self.stopping = True

    def run(self) -> None:
        """Work until `stop`; retry a database that does not answer."""
        name, is_free = self.settings.name, True
        while not self.stopping:
            self.heartbeat()
            wait_s = self.settings.pace.poll_s
            try:
                # Between attempts it has no job. If the database says otherwise, the answer to `take` was
                # lost or the job could not be given back.
                if not is_free:
                    self.queue.release(name, "its worker lost track of it")
                    is_free = True
                if self._room.lack() is None and (attempt := self.queue.take(name)):
                    is_free = False
                    self.work(attempt)
                    continue
            except (DegradedError, LostAttemptError) as error:
                is_free, wait_s = False, self.settings.pace.look_s
                _log.warning("%s", error)
            time.sleep(wait_s)

    def work(self, attempt: JobAttempt) -> None:
        """Make one attempt at a job.

        Raises:
            DegradedError: The database does not answer; the service gives the job back when this worker ends.
        """
        job = attempt.job
        folder = self._folders.job(job.id)
        try:
            datasets = self._describe(self._database, job.dataset_ids)
            if unmade := _being_made(job, datasets):
                why = f"waits for data set {unmade}, which is being generated"
                self.queue.give_back(attempt, why, lost=False, wait_s=MADE_LOOK_S, began=False)
                return
            self.settings.access.check_settings(cast("dict[str, Json]", job.config.get("settings") or {}))
            folder.make()
            self._job_file(attempt, datasets).write(folder.job_file)
        except DegradedError:
            raise
        except (ResourceError, OSError) as error:  # no space, or a folder that cannot be written: may pass
            self.queue.give_back(attempt, str(error), lost=False, wait_s=self.settings.retry.room_wait_s)
            return
        except StokerError as error:  # something that it names does not exist
            outcome = Outcome(state=State.FAILED, message="failed", error=str(error))
            self.queue.finish(attempt, outcome, lines=[], position=attempt.position)
            return
        AttemptRunner(self, attempt, folder).run()

    def _job_file(self, attempt: JobAttempt, datasets: list[dict[str, Json]]) -> JobFile:
        job, limits = attempt.job, self.settings.limits
        return JobFile(
            id=job.id,
            name=job.name,
            kind=job.kind,
            attempt=attempt.number,
            epochs=job.epochs,
            epoch=job.epoch,
            checkpoint=job.checkpoint,
            config=job.config,
            datasets=datasets,
            dataset_ids=job.dataset_ids,
            caches=str(self._folders.caches),
            data=str(self._folders.data),
            connections=_connections(datasets, self.settings.access.connections),
            limits={
                "memory_bytes": limits.memory_bytes,
                "wall_s": limits.wall_s,
                "grace_s": limits.grace_s,
            },
        )


def _connections(datasets: list[dict[str, Json]], known: Mapping[str, str]) -> dict[str, str]:
    """Return the connections that data sets name, of those that the operator named."""
    specs = (cast("Mapping[str, Any]", one["spec"]) for one in datasets)
    return {str(one["connection"]): known[str(one["connection"])] for one in specs if "connection" in one}


def _being_made(job: Job, datasets: list[dict[str, Json]]) -> str:
    """Return the names of data sets that a job needs and another job still makes."""
    if job.kind == "generation":
        return ""
    return ", ".join(str(one["name"]) for one in datasets if one.get("health") == "making")


def serve(connection: Connection) -> int:
    """Work until SIGTERM or SIGINT; return the exit status.

    Args:
        connection: As `WorkerSlot` makes it: settings as payload, and the lock of the slot, which ends with
            this process.
    """
    settings: WorkerSettings = cloudpickle.loads(connection.payload)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    stopped: list[int] = []
    workers: list[JobWorker] = []

    def on_signal(number: int, _frame: object) -> None:
        stopped.append(number)
        for worker in workers:
            worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    heartbeat = partial(connection.heartbeat.write, "wait")
    heartbeat()
    if settings.ray is None:
        preload(settings.program.modules)
    try:
        database = Database(settings.url, pool=1)
    except StokerError as error:
        _log.error("%s", error)
        return 1
    worker = worker_of(settings, database, heartbeat)
    workers.append(worker)
    if stopped:
        worker.stop()
    worker.run()
    database.close()
    return 0


def worker_of(
    settings: WorkerSettings, database: Database, heartbeat: Callable[[], None] = lambda: None
) -> JobWorker:
    """Return a worker whose jobs run as processes, and read what `settings.access` allows."""

    def described(database: Database, ids: list[str]) -> list[dict[str, Json]]:
        found = describe(database, ids)
        for one in found:
            settings.access.check(cast("dict[str, Json]", one["spec"]))
        return found

    return JobWorker(settings, database, _executor(settings), described, heartbeat)


def _executor(settings: WorkerSettings) -> Executor:
    """Return the executor of its jobs."""
    local = LocalExecutor()
    if settings.ray is None:
        return local
    return load_extension("service.ray").ray_executor(settings.ray, os.environ, local)


def describe(database: Database, ids: list[str]) -> list[dict[str, Json]]:
    """Call `datasets.describe`, which a worker without such jobs need not import."""
    if not ids:
        return []
    from stoker.service import datasets

    return datasets.describe(database, ids)
