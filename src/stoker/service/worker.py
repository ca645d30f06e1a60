"""A worker process: one job after another until it is told to end.

`stoker serve` starts some of them (`supervisor.py`), tells each its `WorkerSettings`, and watches its
heartbeat. SIGTERM, also when the service dies, lets it stop its job with a checkpoint and give it back.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
    JobHold,
    JobLimits,
    JobProcess,
    JobProgram,
    LocalExecutor,
    RayTarget,
)
from stoker.service.folders import DiskRoom, JobFile, StateFolder
from stoker.service.jobs import AttemptPolicy, Job, JobAttempt, JobQueue, Line, Outcome, end_line, read_lines
from stoker.service.security import DataAccess
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.folders import JobFolder

# ----------------------------------------------------------------------------------------------------------
# One attempt at a job: start its process, tell the database what it says, act on what is asked, end it.
#
# The process keeps running while the database does not answer: what it says waits in its file. It is ended
# when the attempt is over for the database (nothing is written then), when someone asked for it, when it
# passes a limit, or when the database has been silent for longer than anybody would wait.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPace:
    """How often a worker does what."""

    poll_s: float = 0.25
    """Between two looks at a process and its file."""
    look_s: float = 1.0
    """Between two looks at what is asked of the job, and at the queue when there is none."""
    silence_s: float = 600.0
    """How long the database may stay silent before the job is stopped with a checkpoint."""


class EndReason(Enum):
    """Why a process is asked to end before its time."""

    ASKED = auto()
    """Someone paused or cancelled the job."""
    STOPPING = auto()
    """The worker is to end."""
    SILENCE = auto()
    """The database does not answer."""
    LIMIT = auto()
    """It used more than it may: the job fails."""
    QUIET = auto()
    """It says nothing, as one that hangs: another attempt is made."""
    SAID = auto()
    """It has said its last word and is only to end."""


class AttemptRunner:
    """Makes one attempt; `run` does all of it.

    Args:
        worker: Whose attempt it is: it has the database's side and the machine's side.
        attempt: Which.
        folder: Of the job.
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
        """Work until the job's process has ended and the database knows, or the job was taken away.

        Raises:
            Degraded: The worker is to end, and the database does not answer; the service gives the job back.
        """
        try:
            with explain_disk_errors(self._folder.path):
                hold = self._worker.executor.hold(self._folder)
                try:
                    self._run(hold)
                finally:
                    hold.release()
        except (StalledError, ResourceError, OSError) as error:  # no process runs, or its folder has no room
            self._give_back(str(error), lost=False, wait_s=self._queue.retry.room_wait_s)
        except LostAttemptError as error:
            _log.warning("%s", error)

    def _run(self, hold: JobHold) -> None:
        end_line(self._folder.events)
        self._drain()
        code = None
        if self._said is None:  # else an earlier attempt came to its end unseen
            self._worker.beat()
            process = hold.start(self._settings.program, self._settings.limits)
            try:
                code = self._watch(process)
            except BaseException:
                _end_now(process)
                raise
            self._drain()
        self._until_told(lambda: self._conclude(code))

    def _watch(self, process: JobProcess) -> int:
        """Return the exit status of the process, which is asked to end as soon as there is a reason."""
        while (code := process.poll()) is None:
            self._worker.beat()
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
            self._reason, self._asked = EndReason.SAID, now
            return
        if self._wanted is not State.RUNNING:
            self._reason, self._why = EndReason.ASKED, "it was asked for"
        elif self._worker.stopping:
            self._reason, self._why = EndReason.STOPPING, "the service was stopped"
        elif silent_s > self._settings.pace.silence_s:
            self._reason = EndReason.SILENCE
            self._why = f"the database did not answer for {format_seconds(silent_s)}"
        elif passed := process.exceeded():
            self._reason, self._why = EndReason.LIMIT, passed
        elif limits.quiet_s is not None and quiet_s > limits.quiet_s:
            self._reason, self._why = EndReason.QUIET, f"it has said nothing for {format_seconds(quiet_s)}"
        else:
            return
        self._asked = now
        process.terminate()

    def _read(self) -> bool:
        """Take the next lines of the process; whether there were any."""
        lines, position = read_lines(self._folder.events, self._position)
        if more := position > self._position:
            self._untold, self._position, self._spoke = lines, position, time.monotonic()
            self._said = next((line for line in lines if line.kind in ("completed", "failed")), None)
        return more

    def _drain(self) -> None:
        """Read to the last word of the process, telling all but the lines around that word.

        Those are told with the end of the attempt, so that a worker that is killed between the two leaves
        them for the next one to find.
        """
        while self._said is None:
            if self._untold:
                self._until_told(self._report)
            if not self._read():
                return

    def _tell(self) -> None:
        """Report lines, or ask what is wanted of the job, as soon as it is due."""
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
        """Try until the database answers; a worker that is to end tries for a while and then leaves it."""
        deadline = float("inf")
        while True:
            self._worker.beat()
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
        while True:  # at most twice again: from running to pausing to cancelling
            self._wanted = self._queue.look(self._attempt)
            if (outcome := self._outcome(code)) is None:
                self._report()
                lost = self._reason in (None, EndReason.QUIET) and code != NO_ROOM
                wait_s = self._queue.retry.room_wait_s if code == NO_ROOM else 0.0
                self._give_back(self._why or _ended_by(code), lost=lost, wait_s=wait_s)
                return
            try:
                self._queue.finish(self._attempt, outcome, lines=self._untold, position=self._position)
            except LostAttemptError:  # or asked for something else meanwhile, which the look tells
                continue
            return

    def _outcome(self, code: int | None) -> Outcome | None:
        """What the job comes to; None: it is to go on in another attempt.

        The last word of the process counts, not its status: one that has said that it is done may still
        crash while it ends, and one that ends with 0 without a word was cut short.
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
        """The end of the log of a process that failed without a word."""
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
    """Kill it and see that it is gone."""
    process.kill()
    deadline = time.monotonic() + END_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _ended_by(code: int | None) -> str:
    if code == STOPPED:
        return "its process stopped with a checkpoint, though it was not asked to"
    if code == NO_ROOM:
        return "its process found the disk full; it continues from its last checkpoint when there is room"
    if code is None or code >= 0:
        return f"its process ended with status {code} and without a result"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was ended by {name}"


_log = logging.getLogger(__name__)
MADE_LOOK_S = 2.0
"""How long a job waits between looks at a data set that is being made."""
Describe = Callable[[Database, list[str]], "list[dict[str, Json]]"]
"""The registered data sets of some ids, described so that a job can open them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is told at its start."""

    name: str = ""
    """No other worker ever had it."""
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
        settings: What it was told.
        database: Where the jobs are.
        executor: Runs their processes.
        describe: What is said of data sets in `job.json`.
        beat: Called all along, at least once in `AttemptPolicy.timeout_s`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        database: Database,
        executor: Executor,
        describe: Describe,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.executor = executor
        self.beat = beat
        self.queue = JobQueue(database, settings.retry)
        self.stopping = False
        """Whether it is to end."""
        self._database = database
        self._describe = describe
        self._folders = StateFolder(Path(settings.state))
        self._room = DiskRoom(self._folders)

    def stop(self) -> None:
        """End soon: the job at hand makes a checkpoint and goes back. Also from a signal handler."""
        self.stopping = True

    def run(self) -> None:
        """Work until `stop`; a database that does not answer is asked again and again."""
        name, is_free = self.settings.name, True
        while not self.stopping:
            self.beat()
            try:
                # Between attempts it has no job. One that it has by the database's word was taken without an
                # answer, or could not be given back.
                if not is_free:
                    self.queue.release(name, "its worker lost sight of it")
                    is_free = True
                if self._room.lack() is None and (attempt := self.queue.take(name)):
                    is_free = False
                    self.work(attempt)
                    continue
            except (DegradedError, LostAttemptError) as error:
                is_free = False
                _log.warning("%s", error)
            time.sleep(self.settings.pace.look_s)

    def work(self, attempt: JobAttempt) -> None:
        """Make one attempt at a job.

        Raises:
            Degraded: The database does not answer; the service gives the job back when this worker ends.
        """
        job = attempt.job
        folder = self._folders.job(job.id)
        try:
            datasets = self._describe(self._database, job.dataset_ids)
            if unmade := _being_made(job, datasets):
                why = f"waits for data set {unmade}, which is being made"
                self.queue.give_back(attempt, why, lost=False, wait_s=MADE_LOOK_S)
                return
            self.settings.access.check_settings(cast("dict[str, Json]", job.config.get("settings") or {}))
            folder.make()
            self._job_file(attempt, datasets).write(folder.job_file)
        except DegradedError:
            raise
        except (ResourceError, OSError) as error:  # no room, or a folder that cannot be written: may pass
            self.queue.give_back(attempt, str(error), lost=False, wait_s=self.settings.retry.room_wait_s)
            return
        except StokerError as error:  # what it asks for is not there
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
            limits={
                "memory_bytes": limits.memory_bytes,
                "wall_s": limits.wall_s,
                "grace_s": limits.grace_s,
            },
        )


def _being_made(job: Job, datasets: list[dict[str, Json]]) -> str:
    """Return the names of data sets that a job needs and another one still makes.

    Raises:
        ConfigError: One was to be made, and is not.
    """
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
    beat = partial(connection.heartbeat.write, "wait")
    beat()
    if settings.ray is None:
        preload(settings.program.modules)
    try:
        database = Database(settings.url, pool=1)
    except StokerError as error:
        _log.error("%s", error)
        return 1
    worker = worker_of(settings, database, beat)
    workers.append(worker)
    if stopped:
        worker.stop()
    worker.run()
    database.close()
    return 0


def worker_of(
    settings: WorkerSettings, database: Database, beat: Callable[[], None] = lambda: None
) -> JobWorker:
    """Return a worker whose jobs run as processes, and read what `settings.access` allows."""

    def described(database: Database, ids: list[str]) -> list[dict[str, Json]]:
        found = describe(database, ids)
        for one in found:
            settings.access.check(cast("dict[str, Json]", one["spec"]))
        return found

    return JobWorker(settings, database, _executor(settings), described, beat)


def _executor(settings: WorkerSettings) -> Executor:
    """Return what runs its jobs."""
    local = LocalExecutor()
    if settings.ray is None:
        return local
    return load_extension("service.ray").ray_executor(settings.ray, os.environ, local)


def describe(database: Database, ids: list[str]) -> list[dict[str, Json]]:
    """See `stoker.service.datasets`, which a worker without such jobs need not load."""
    if not ids:
        return []
    from stoker.service import datasets

    return datasets.describe(database, ids)
