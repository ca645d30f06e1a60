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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.errors import Degraded, LeaseLost, ResourceError, StokerError
from stoker.runtime.libc import tie_to_parent
from stoker.runtime.locks import FileLock
from stoker.service.access import DataAccess
from stoker.service.attempt import Attempt, Pace, Work
from stoker.service.database import Database
from stoker.service.executor import Limits
from stoker.service.folders import Room, StateFolder
from stoker.service.job_file import JobFile
from stoker.service.jobs import Job
from stoker.service.leases import Claim, Leases, Outcome, Terms
from stoker.service.local import LocalExecutor
from stoker.service.ray_client import RayJobs, RayTarget, ray_token
from stoker.service.ray_executor import RayExecutor
from stoker.service.states import State

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.executor import Executor

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
    return RayExecutor(settings.ray, RayJobs(settings.ray.address, ray_token(environment)), local)


def describe(database: Database, ids: list[str]) -> list[dict[str, Json]]:
    """See `stoker.service.datasets`, which a worker without such jobs need not load."""
    if not ids:
        return []
    from stoker.service import datasets

    return datasets.describe(database, ids)


if __name__ == "__main__":
    sys.exit(main())
