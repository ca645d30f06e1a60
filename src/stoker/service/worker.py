"""A worker process: one job after another until it is told to end.

`stoker serve` starts some of them (`supervise.py`) and hands each its `Settings` on standard input, since the
address of a database may hold a password and the command line of a process is public. SIGTERM, also from the
kernel when the service dies, lets it stop its job with a checkpoint and give it back.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.errors import Degraded, LeaseLost, ResourceError, StalledError, StokerError
from stoker.plugins import load_extension
from stoker.runtime.disk import explained
from stoker.runtime.libc import tie_to_parent
from stoker.runtime.locks import FileLock
from stoker.service.database import Database, State
from stoker.service.executor import NO_ROOM, STOPPED, Executor, Hold, Limits, LocalExecutor, RayTarget, Run
from stoker.service.folders import JobFile, Room, StateFolder
from stoker.service.jobs import Claim, Job, Leases, Line, Outcome, Terms, end_line, read_lines
from stoker.service.security import DataAccess
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.folders import JobFolder


# ----------------------------------------------------------------------------------------------------------
# One attempt at a job: start its process, tell the database what it says, act on what is asked, end it.
#
# The process keeps running while the database does not answer: what it says waits in its file, and nobody
# else can take the job meanwhile. It is ended when the job was taken away (nothing is written then), when
# someone asked for it, when it passes a limit, or when the database has been silent for longer than anybody
# would wait.


END_S = 10.0
"""How long a killed process is waited for; what hangs in the system longer keeps its job's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a worker does what."""

    poll_s: float = 0.25
    """Between two looks at a process and its file."""
    look_s: float = 1.0
    """Between two looks at what is asked of the job, and at the queue when there is none."""
    silence_s: float = 600.0
    """How long the database may stay silent before the job is stopped with a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an attempt is made with."""

    claim: Claim
    folder: JobFolder
    command: Sequence[str]
    limits: Limits
    pace: Pace


class Reason(Enum):
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


class Attempt:
    """One attempt; `run` does all of it.

    Args:
        work: What is to be done.
        leases: The database's side.
        executor: The machine's side.
        stopping: Whether the worker is to end; asked often.
    """

    def __init__(self, work: Work, leases: Leases, executor: Executor, stopping: Callable[[], bool]) -> None:
        self._work = work
        self._claim = work.claim
        self._leases = leases
        self._executor = executor
        self._stopping = stopping
        self._position = work.claim.position
        self._untold: list[Line] = []
        self._said: Line | None = None
        self._wanted = State.RUNNING
        self._heard = self._held = self._spoke = time.monotonic()
        self._reason: Reason | None = None
        self._why = ""
        self._asked = self._again = 0.0

    def run(self) -> None:
        """Work until the job's process has ended and the database knows, or the job was taken away.

        Raises:
            Degraded: The worker is to end, and the database does not answer; the lease will run out.
        """
        try:
            with explained(self._work.folder.path):
                hold = self._executor.hold(self._work.folder)
                try:
                    self._attempt(hold)
                finally:
                    hold.release()
        except (StalledError, ResourceError, OSError) as error:  # no process runs, or its folder has no room
            self._give_back(str(error), lost=False, wait_s=self._leases.terms.lease_s)
        except LeaseLost as error:
            _log.warning("%s", error)

    def _attempt(self, hold: Hold) -> None:
        end_line(self._work.folder.events)
        self._drain()
        code = None
        if self._said is None:  # else an earlier attempt came to its end unseen
            process = hold.start(self._work.command, self._work.limits)
            try:
                code = self._watch(process)
            except BaseException:
                _end_now(process)
                raise
            self._drain()
        self._until_told(lambda: self._conclude(code))

    def _watch(self, process: Run) -> int:
        """The exit status of the process, which is asked to end as soon as there is a reason."""
        while (code := process.poll()) is None:
            if not self._untold:
                self._read()
            try:
                if time.monotonic() >= self._again:
                    self._tell()
            except Degraded as error:
                _log.warning("%s", error)
                self._again = time.monotonic() + self._work.pace.look_s
            self._react(process)
            time.sleep(self._work.pace.poll_s)
        return code

    def _react(self, process: Run) -> None:
        if self._reason is not None:
            if time.monotonic() - self._asked > self._work.limits.grace_s:
                process.kill()
            return
        now, limits = time.monotonic(), self._work.limits
        silent_s, quiet_s = now - self._heard, now - self._spoke
        if self._said is not None:
            self._reason, self._asked = Reason.SAID, now
            return
        if self._wanted is not State.RUNNING:
            self._reason, self._why = Reason.ASKED, "it was asked for"
        elif self._stopping():
            self._reason, self._why = Reason.STOPPING, "the service was stopped"
        elif silent_s > self._work.pace.silence_s:
            self._reason = Reason.SILENCE
            self._why = f"the database did not answer for {format_seconds(silent_s)}"
        elif passed := process.exceeded():
            self._reason, self._why = Reason.LIMIT, passed
        elif limits.quiet_s is not None and quiet_s > limits.quiet_s:
            self._reason, self._why = Reason.QUIET, f"it has said nothing for {format_seconds(quiet_s)}"
        else:
            return
        self._asked = now
        process.terminate()

    def _read(self) -> bool:
        """Take the next lines of the process; whether there were any."""
        lines, position = read_lines(self._work.folder.events, self._position)
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
        """Report lines, or hold on to the job, or only look: what is due, and nothing more often."""
        now, lease_s = time.monotonic(), self._leases.terms.lease_s
        if self._untold and self._said is None:
            self._report()
        elif now - self._held > lease_s / 4:
            self._wanted = self._leases.heartbeat(self._claim)
            self._held = now
        elif now - self._heard > self._work.pace.look_s:
            self._wanted = self._leases.look(self._claim)
        else:
            return
        self._heard = time.monotonic()

    def _report(self) -> None:
        self._wanted = self._leases.report(self._claim, self._untold, self._position)
        self._untold, self._held = [], time.monotonic()

    def _until_told(self, tell: Callable[[], None]) -> None:
        """Try until the database answers; a worker that is to end tries for a lease and then leaves it."""
        deadline = float("inf")
        while True:
            try:
                tell()
            except Degraded as error:
                _log.warning("%s", error)
                if self._stopping():
                    deadline = min(deadline, time.monotonic() + self._leases.terms.lease_s)
                if time.monotonic() > deadline:
                    raise
                time.sleep(self._work.pace.look_s)
            else:
                return

    def _conclude(self, code: int | None) -> None:
        while True:  # at most twice again: from running to pausing to cancelling
            self._wanted = self._leases.heartbeat(self._claim)
            if (outcome := self._outcome(code)) is None:
                self._report()
                lost = self._reason in (None, Reason.QUIET) and code != NO_ROOM
                wait_s = self._leases.terms.lease_s if code == NO_ROOM else 0.0
                self._give_back(self._why or _ended_by(code), lost=lost, wait_s=wait_s)
                return
            try:
                self._leases.finish(self._claim, outcome, lines=self._untold, position=self._position)
            except LeaseLost:  # or asked for something else meanwhile, which the heartbeat tells
                continue
            return

    def _outcome(self, code: int | None) -> Outcome | None:
        """What the job comes to; None: it is to go on in another attempt.

        The last word of the process counts, not its status: one that has said that it is done may still
        crash while it ends, and one that ends with 0 without a word was cut short.
        """
        said, exceeded = self._said, self._reason is Reason.LIMIT
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
            with self._work.folder.log.open("rb") as file:
                file.seek(-min(4000, self._work.folder.log.stat().st_size), 2)
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "(nothing)")
        return f"its process ended with status {code} and did not say why; its log ends with: {last[:500]}"

    def _give_back(self, why: str, *, lost: bool, wait_s: float) -> None:
        try:
            self._until_told(
                lambda: self._leases.give_back(self._claim, why, lost=lost, wait_s=wait_s) and None
            )
        except LeaseLost as error:
            _log.warning("%s", error)


def _end_now(process: Run) -> None:
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
CHILD = (sys.executable, "-m", "stoker.service.child")
"""The process of a job; the folder of the job is added."""
MADE_LOOK_S = 2.0
"""How long a job waits between looks at a data set that is being made."""
SLOT_S = 120.0
"""How long a worker waits for the one before it to end: its job makes a checkpoint meanwhile."""
Describe = Callable[[Database, list[str]], "list[dict[str, Json]]"]
"""The registered data sets of some ids, described so that a job can open them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a worker is told at its start."""

    name: str
    """No other worker ever had it."""
    slot: int
    """Its place among the workers: one process at a time has it."""
    url: str
    """Of the database."""
    state: str
    """The state folder."""
    parent: int
    """The process that it ends with."""
    child: tuple[str, ...] = CHILD
    terms: Terms = field(default_factory=Terms)
    pace: Pace = field(default_factory=Pace)
    limits: Limits = field(default_factory=Limits)
    access: DataAccess = field(default_factory=DataAccess)
    """Which registered data its jobs may read."""
    ray: RayTarget | None = None
    """The cluster that runs its jobs; None: this machine."""

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Settings:
        """What `to_text` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["child"] = tuple(values["child"])
        for name, kind in (("terms", Terms), ("pace", Pace), ("limits", Limits)):
            values[name] = kind(**values[name])
        values["access"] = DataAccess(**{name: tuple(value) for name, value in values["access"].items()})
        values["ray"] = values["ray"] and RayTarget(**values["ray"])
        return cls(**values)


class Worker:
    """Takes one job after another.

    Args:
        settings: What it was told.
        database: Where the jobs are.
        executor: Runs their processes.
        describe: What is said of data sets in `job.json`.
    """

    def __init__(
        self, settings: Settings, database: Database, executor: Executor, describe: Describe
    ) -> None:
        self._settings = settings
        self._database = database
        self._executor = executor
        self._describe = describe
        self._leases = Leases(database, settings.terms)
        self._folders = StateFolder(Path(settings.state))
        self._room = Room(self._folders)
        self._stop = False

    def stop(self) -> None:
        """End soon: the job at hand makes a checkpoint and goes back. Also from a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Work until `stop`; a database that does not answer is asked again and again."""
        while not self._stop:
            try:
                if self._room.lack() is None and (claim := self._leases.claim(self._settings.name)):
                    self.work(claim)
                    continue
            except (Degraded, LeaseLost) as error:
                _log.warning("%s", error)
            time.sleep(self._settings.pace.look_s)

    def work(self, claim: Claim) -> None:
        """One attempt at a claimed job.

        Raises:
            Degraded: The database does not answer; the lease runs out, and the job goes to another.
        """
        folder = self._folders.job(claim.job.id)
        try:
            datasets = self._describe(self._database, claim.job.dataset_ids)
            if unmade := _being_made(claim.job, datasets):
                why = f"waits for data set {unmade}, which is being made"
                self._leases.give_back(claim, why, lost=False, wait_s=MADE_LOOK_S)
                return
            self._settings.access.check_settings(
                cast("dict[str, Json]", claim.job.config.get("settings") or {})
            )
            folder.make()
            self._job_file(claim, datasets).write(folder.job_file)
        except Degraded:
            raise
        except (ResourceError, OSError) as error:  # no room, or a folder that cannot be written: may pass
            self._leases.give_back(claim, str(error), lost=False, wait_s=self._settings.terms.lease_s)
            return
        except StokerError as error:  # what it asks for is not there
            outcome = Outcome(state=State.FAILED, message="failed", error=str(error))
            self._leases.finish(claim, outcome, lines=[], position=claim.position)
            return
        work = Work(
            claim=claim,
            folder=folder,
            command=(*self._settings.child, str(folder.path)),
            limits=self._settings.limits,
            pace=self._settings.pace,
        )
        Attempt(work, self._leases, self._executor, lambda: self._stop).run()

    def _job_file(self, claim: Claim, datasets: list[dict[str, Json]]) -> JobFile:
        job, limits = claim.job, self._settings.limits
        return JobFile(
            id=job.id,
            name=job.name,
            kind=job.kind,
            attempt=claim.attempt,
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


def take_slot(folder: StateFolder, slot: int, stopping: Callable[[], bool]) -> FileLock | None:
    """Return the lock of a slot, held for as long as this process lives; None: stopped while waiting.

    Raises:
        ResourceError: The worker before did not end in `SLOT_S`.
    """
    lock = FileLock(folder.workers / f"{slot}.lock")
    deadline = time.monotonic() + SLOT_S
    while not stopping():
        if lock.acquire(0.1):
            return lock
        if time.monotonic() > deadline:
            raise ResourceError(
                f"{lock.path} is held by a worker of an earlier service ({lock.holder()}), {SLOT_S:.0f} s "
                "after this one was started. Look at its process; this worker is started again automatically"
            )
    return None


def main() -> int:
    """The process: settings on standard input, log on standard error; the exit status."""
    settings = Settings.from_text(sys.stdin.readline())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    stopped: list[int] = []
    workers: list[Worker] = []

    def on_signal(number: int, _frame: object) -> None:
        stopped.append(number)
        for worker in workers:
            worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    tie_to_parent(signal.SIGTERM, settings.parent)
    try:
        _slot = take_slot(StateFolder(Path(settings.state)), settings.slot, lambda: bool(stopped))
        database = Database(settings.url, pool=1)
        Leases(database, settings.terms).abandon_slot(settings.name)
    except StokerError as error:
        _log.error("%s", error)
        return 1
    worker = worker_of(settings, database)
    workers.append(worker)
    if stopped:
        worker.stop()
    worker.run()
    database.close()
    return 0


def worker_of(settings: Settings, database: Database) -> Worker:
    """Return a worker whose jobs run as processes, and read what `settings.access` allows."""

    def described(database: Database, ids: list[str]) -> list[dict[str, Json]]:
        found = describe(database, ids)
        for one in found:
            settings.access.check(cast("dict[str, Json]", one["spec"]))
        return found

    return Worker(settings, database, _executor(settings, os.environ), described)


def _executor(settings: Settings, environment: Mapping[str, str]) -> Executor:
    """Where its jobs run."""
    local = LocalExecutor(environment)
    if settings.ray is None:
        return local
    return load_extension("service.ray").ray_executor(settings.ray, environment, local)


def describe(database: Database, ids: list[str]) -> list[dict[str, Json]]:
    """See `stoker.service.datasets`, which a worker without such jobs need not load."""
    if not ids:
        return []
    from stoker.service import datasets

    return datasets.describe(database, ids)


if __name__ == "__main__":
    sys.exit(main())
