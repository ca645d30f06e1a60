"""What `stoker serve` runs next to its web server: workers, started again when they die or hang, and chores.

One service has a state folder at a time, and a state folder has one database: jobs are handed from worker to
worker through their folders, so two services that shared a database alone would lose checkpoints.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.errors import ConfigError, DegradedError, ResourceError, StokerError
from stoker.runtime.files import replace_atomically
from stoker.runtime.locks import FileLock
from stoker.runtime.processes.child import Child, preload
from stoker.runtime.threads import Pool, Ticket
from stoker.service.database import Database, Outbox, claim_folder
from stoker.service.folders import DiskRoom, StateFolder
from stoker.service.jobs import JobQueue, Jobs
from stoker.service.worker import WorkerSettings

_log = logging.getLogger(__name__)
KEEP_EVENTS_S = 14 * 86_400.0
"""How long events can be read again; metrics and jobs stay."""
KEEP_EVENTS = 1_000_000
"""How many events at most."""
CHORES_EVERY_S = 600.0
WRITE_EVERY_S = 10.0
"""How often, while all is well, it is seen whether the database takes something and the disk has room."""
ORPHAN_S = 3600.0
"""Age of a job's folder that no job belongs to before it is removed."""
_STEADY_S = 10.0
"""A worker that gives up sooner is started again after a wait, each time a longer one."""
_SHORTEST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


WORKER_MODULES = ("stoker.service.worker", "stoker.service.datasets")
"""What a worker finds imported."""
SLOT_S = 120.0
"""How long a worker of an earlier service is waited for in silence: its job makes a checkpoint meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """How many workers there are and what they are told."""

    workers: int = 1
    devices: Sequence[str | None] = (None,)
    """`CUDA_VISIBLE_DEVICES` of each worker's jobs, the list again from its start when there are more."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)
    """What all of them are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as the supervisor sees it."""

    slot: int
    name: str
    pid: int
    alive: bool
    deaths: int
    """How often the worker of this slot died by itself."""
    device: str | None


class WorkerSupervisor:
    """Keeps workers running and does the chores; `start`, and `stop` when the server ends.

    Args:
        database: Of the jobs.
        folder: The state folder.
        plan: The workers.

    Raises:
        ConfigError: Another service has the state folder now, or the database belongs to another folder.
        Degraded: The database does not answer.
    """

    def __init__(self, database: Database, folder: StateFolder, plan: WorkerPlan) -> None:
        folder.make()
        self._lock = _sole_service(folder)
        try:
            with database.writing() as connection:
                claim_folder(connection, _identity(folder))
        except StokerError:
            self._lock.release()
            raise
        self._database = database
        self._folder = folder
        self._room = DiskRoom(folder)
        self._queue = JobQueue(database, plan.settings.retry)
        settings = replace(plan.settings, url=database.address(), state=str(folder.path))
        self._slots = [
            WorkerSlot(number, plan.devices[number % len(plan.devices)], settings, folder)
            for number in range(plan.workers)
        ]
        self._stopping = threading.Event()
        self._look_from = self._write_from = 0.0
        self._looked = self._heard_from = time.monotonic()
        self._away = False
        # Two threads: a disk that hangs under a job's folder holds up the chores, and not the workers.
        self._watch: Ticket[None] | None = None

    def start(self) -> None:
        """Start the workers, and threads that watch them and do the chores."""
        if self._slots:
            preload(WORKER_MODULES)
        self._watch = Pool(1, "stoker-supervisor").submit(self._run)
        Pool(1, "stoker-chores").submit(self._run_chores)

    def stop(self, *, limit_s: float = 60.0) -> bool:
        """Have every worker stop its job with a checkpoint and end, and kill those that do not in `limit_s`.

        Returns:
            Whether all ended by themselves.
        """
        deadline = time.monotonic() + limit_s
        self._stopping.set()
        if self._watch is not None:
            self._watch.wait(limit_s)
        in_order = [slot.end(deadline) for slot in self._slots]
        self._lock.release()
        return all(in_order)

    def workers(self) -> list[WorkerState]:
        """Return every worker, by slot."""
        return [slot.state() for slot in self._slots]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.step()
                self._stopping.wait(0.25)
        finally:
            if not self._stopping.is_set():
                ended = "the supervisor of the workers has ended: see the service's log"
                self._database.trouble.note("workers", ended)
        for slot in self._slots:
            slot.terminate()

    def step(self) -> None:
        """Do what is due: start workers, kill those that hang, take jobs from dead ones."""
        now = time.monotonic()
        timeout_s = self._queue.retry.timeout_s
        if now - self._looked > timeout_s / 2:
            self._heard_from = (
                now  # this process, or all of the machine, stood still: nobody else is to blame
            )
        self._looked = now
        ended = [slot.look(now, heard_from=self._heard_from) for slot in self._slots]
        if not any(ended) and now < self._look_from:
            return
        self._look_from = now + min(1.0, timeout_s / 4)
        try:
            self._see_whether_all_is_well(now)
            self._away = False
            self._take_jobs_from_dead_workers()
        except DegradedError as error:
            if not self._away:
                _log.error("%s", error)
            self._away = True

    def _take_jobs_from_dead_workers(self) -> None:
        """Give jobs back whose worker is dead: one of ours, or one of an earlier service that has ended."""
        for name in self._queue.workers() - {slot.name for slot in self._slots if slot.works}:
            if self._is_dead(name):
                for job in self._queue.release(name):
                    _log.warning("job %s lost its worker and is now %s", job.id, job.state)

    def _is_dead(self, name: str) -> bool:
        number = slot_of(name)
        if number is None:
            return True
        if number < len(self._slots):
            return self._slots[number].is_ours  # the slot is ours once all who had it are dead
        with FileLock(_slot_file(self._folder, number), create=False) as lock:
            return lock.acquire()

    def _run_chores(self) -> None:
        while not self._stopping.is_set():
            self.do_chores()
            self._stopping.wait(CHORES_EVERY_S)

    def do_chores(self) -> None:
        """Remove old events and the folders of deleted jobs; what fails is logged and tried again later."""
        try:
            Outbox(self._database).prune(max_age_s=KEEP_EVENTS_S, max_count=KEEP_EVENTS)
            remove_orphans(self._folder, Jobs(self._database))
        except (DegradedError, OSError) as error:
            _log.warning("chores: %s. They are tried again in %g s", error, CHORES_EVERY_S)

    def _see_whether_all_is_well(self, now: float) -> None:
        trouble = self._database.trouble
        writes = now >= self._write_from or trouble.why is not None
        if writes:
            self._write_from = now + WRITE_EVERY_S
            trouble.note("disk", self._room.lack())
        self._database.check(writes=writes)


class WorkerSlot:
    """The place of one worker: its process, and the ones that had the place before it.

    A lock says who has the place: the service, and the worker, which inherits it. A service that finds it
    taken waits for a worker of an earlier service, which makes a checkpoint of its job.
    """

    def __init__(
        self, number: int, device: str | None, settings: WorkerSettings, folder: StateFolder
    ) -> None:
        self._number, self._device, self._folder = number, device, folder
        self._settings = replace(settings, limits=replace(settings.limits, devices=device))
        self._lock = FileLock(_slot_file(folder, number))
        self.is_ours = False
        """All workers that had this place in an earlier service have ended."""
        self.name = ""
        """Of its worker, or of the last one that it had."""
        self._child: Child | None = None
        self._is_killed = False
        self._deaths = 0
        self._born = self._start_from = 0.0
        self._wait_s = _SHORTEST_WAIT_S
        self._complain_from = time.monotonic() + SLOT_S

    def look(self, now: float, *, heard_from: float) -> bool:
        """Start its worker when none runs, kill one that hangs; return whether one was found dead.

        Args:
            now: The monotonic time.
            heard_from: Silence before this time does not count.
        """
        if found_dead := self._child is not None and self._child.ended():
            self._bury(now)
        elif self._child is not None and not self._is_killed:
            self._kill_if_silent(self._child, now, heard_from)
        if self._child is None and now >= self._start_from and self._have_lock(now):
            self._start(now)
        return found_dead

    def _bury(self, now: float) -> None:
        assert self._child is not None
        assert self._child.exit is not None
        code = self._child.exit.code
        _log.error("worker %s %s; it is started again", self.name, self._child.exit)
        self._child.close()
        self._child, self._is_killed = None, False
        self._deaths += 1
        lived_s = now - self._born
        by_itself = code is not None and code >= 0 and lived_s < _STEADY_S  # what it cannot bear may last
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if by_itself else _SHORTEST_WAIT_S
        self._start_from = now + self._wait_s if by_itself or lived_s < 1.0 else now

    def _kill_if_silent(self, child: Child, now: float, heard_from: float) -> None:
        silent_s = now - max(heard_from, self._born, child.heartbeat.look().time_ns / 1e9)
        if silent_s > self._settings.retry.timeout_s:
            _log.error(
                "worker %s gave no heartbeat for %.1f s (%s) and is killed; its job is tried again",
                self.name, silent_s, child.kernel_view(),
            )  # fmt: skip
            child.kill()
            self._is_killed = True

    def _have_lock(self, now: float) -> bool:
        if self.is_ours:
            return True
        why = "it is held by a worker of an earlier service. Look at its process"
        try:
            self.is_ours = self._lock.acquire()
        except StokerError as error:  # no room for the file, say
            why = str(error)
        if not self.is_ours and now > self._complain_from:
            self._complain_from = now + SLOT_S
            _log.error("%s cannot be locked: %s. Worker %d waits for it", self._lock.path, why, self._number)
        return self.is_ours

    def _start(self, now: float) -> None:
        self.name, self._born = f"{os.uname().nodename}-{self._number}-{secrets.token_hex(4)}", now
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            log = os.open(self._folder.workers / f"{self._number}.log", flags, 0o600)
            try:
                self._child = Child(
                    "stoker.service.worker:serve",
                    what=f"worker {self.name}",
                    payload=pickle.dumps(replace(self._settings, name=self.name)),
                    shared=[self._lock.fileno()],
                    output=log,
                    modules=WORKER_MODULES,
                    death_signal=signal.SIGTERM,
                )
            finally:
                os.close(log)
        except (OSError, ResourceError) as error:
            _log.error("worker %s cannot be started: %s", self.name, error)
            self._start_from = now + self._wait_s
        self._born = time.monotonic()

    @property
    def works(self) -> bool:
        """Whether its worker may still do something: one that was killed may not, also while it hangs."""
        return self._child is not None and not self._is_killed and not self._child.ended()

    def state(self) -> WorkerState:
        """Return the worker as it stands."""
        return WorkerState(
            slot=self._number,
            name=self.name,
            pid=0 if self._child is None else self._child.pid,
            alive=self._child is not None and self._child.exit is None,
            deaths=self._deaths,
            device=self._device,
        )

    def terminate(self) -> None:
        """Ask its worker to stop its job with a checkpoint and end."""
        if self._child is not None:
            self._child.terminate()

    def end(self, deadline: float) -> bool:
        """Wait for the end of its worker, and kill it, and its job with it, at the monotonic time `deadline`.

        Returns:
            Whether it ended by itself.
        """
        in_order = True
        if self._child is not None:
            self._child.terminate()
            in_order = self._child.wait(max(0.0, deadline - time.monotonic()))
            if not in_order:
                self._child.stop(0.0, 10.0)  # what hangs in the system is left to it
            self._child.close()
            self._child = None
        self._lock.release()
        return in_order


def slot_of(name: str) -> int | None:
    """Return the slot that a worker's name says it has; None of a name that says none.

    >>> slot_of("a-host-3-0f0f0f0f"), slot_of("by hand")
    (3, None)
    """
    words = name.rsplit("-", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdecimal() else None


def _slot_file(folder: StateFolder, number: int) -> Path:
    return folder.workers / f"{number}.lock"


def remove_orphans(folder: StateFolder, jobs: Jobs) -> list[str]:
    """Remove folders of jobs that were deleted; their ids."""
    removed: list[str] = []
    for path in sorted(folder.jobs.iterdir()):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < ORPHAN_S or jobs.exists(path.name):
                continue
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def _sole_service(folder: StateFolder) -> FileLock:
    """Return the lock on a state folder, held until it is released."""
    lock = FileLock(folder.path / "service.lock")
    if not lock.acquire():
        raise ConfigError(
            f"{folder.path} belongs to a service that runs now ({lock.holder()}): one service has a state "
            "folder at a time. Stop it, or start this one with another folder"
        )
    return lock


def _identity(folder: StateFolder) -> str:
    """What a state folder is known by, wherever it is moved to."""
    path = folder.path / "folder-id"
    if not path.exists():
        with replace_atomically(path) as temporary:
            temporary.write_text(secrets.token_hex(16))
    return path.read_text()
