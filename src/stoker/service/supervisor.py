"""Supervise the workers of `stoker serve`, restart those that die or hang, and do chores.

Only one service uses a state folder at a time, and a state folder has one database. Workers hand jobs over
through their folders, so two services that share only a database would lose checkpoints.
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

from stoker.errors import ConfigError, DegradedError, ResourceError, StokerError
from stoker.runtime.files import replace_atomically
from stoker.runtime.locks import FileLock
from stoker.runtime.processes.child import Child, preload
from stoker.runtime.threads import Pool, Ticket
from stoker.service.audit import AuditLog
from stoker.service.database import Database, Outbox, bind_folder
from stoker.service.folders import DiskRoom, StateFolder
from stoker.service.jobs import JobQueue, Jobs
from stoker.service.worker import WorkerSettings

_log = logging.getLogger(__name__)
KEEP_EVENTS_S = 14 * 86_400.0
"""How long events are kept; metrics and jobs stay."""
KEEP_EVENTS = 1_000_000
"""Most events that are kept."""
CHORES_EVERY_S = 600.0
WRITE_EVERY_S = 10.0
"""Seconds between two checks, without problems, that the database can be written and the disk has space."""
ORPHAN_S = 3600.0
"""Age at which a folder without a job is removed."""
_STEADY_S = 10.0
"""A worker that exits sooner is restarted after a wait, which doubles each time."""
_SHORTEST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


WORKER_MODULES = ("stoker.service.worker", "stoker.service.datasets")
"""Modules that are imported before a worker starts."""
EARLIER_S = 120.0
"""How long to wait for workers of an earlier service without a message: their jobs write checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The number of workers and their settings."""

    workers: int = 1
    devices: Sequence[str | None] = (None,)
    """`CUDA_VISIBLE_DEVICES` of the jobs of each worker; repeated if there are more workers."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)
    """Settings of every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as the supervisor sees it."""

    slot: int
    name: str
    pid: int
    alive: bool
    deaths: int
    """How often the worker of this slot died."""
    device: str | None


class WorkerSupervisor:
    """Keeps workers running and does chores; call `start`, and `stop` when the server ends.

    Its workers inherit a lock. The workers of an earlier service hold it while they write checkpoints of
    their jobs. Until then no worker is started and no job is given back, so two jobs never share a device.

    Args:
        database: Of the jobs.
        folder: The state folder.
        plan: The workers.

    Raises:
        ConfigError: Another service uses the state folder, or the database belongs to another folder.
        DegradedError: The database does not answer.
    """

    def __init__(self, database: Database, folder: StateFolder, plan: WorkerPlan) -> None:
        folder.make()
        self._lock = _sole_service(folder)
        try:
            with database.writing() as connection:
                bind_folder(connection, _identity(folder))
        except StokerError:
            self._lock.release()
            raise
        self._database = database
        self._folder = folder
        self._room = DiskRoom(folder)
        self._queue = JobQueue(database, plan.settings.retry)
        self._workers_lock = FileLock(folder.workers / "lock")
        self._has_workers_lock = False
        self._complain_from = time.monotonic() + EARLIER_S
        settings = replace(plan.settings, url=database.address(), state=str(folder.path))
        self._slots = [
            WorkerSlot(number, plan.devices[number % len(plan.devices)], settings, folder, self._workers_lock)
            for number in range(plan.workers)
        ]
        self._stopping = threading.Event()
        self._look_from = self._write_from = 0.0
        self._looked = self._heard_from = time.monotonic()
        self._is_away = False
        """True if the last step failed, which is logged once."""
        # Two threads: a disk that hangs under a job's folder delays the chores, but not the workers.
        self._watch: Ticket[None] | None = None

    def start(self) -> None:
        """Start the threads that run the workers and do the chores."""
        if self._slots:
            preload(WORKER_MODULES)
        self._watch = Pool(1, "stoker-supervisor").submit(self._run)
        Pool(1, "stoker-chores").submit(self._run_chores)

    def stop(self, *, limit_s: float = 60.0) -> bool:
        """Let every worker stop its job with a checkpoint and exit; kill those that take more than `limit_s`.

        Returns:
            Whether all exited without being killed.
        """
        deadline = time.monotonic() + limit_s
        self._stopping.set()
        if self._watch is not None:
            self._watch.wait(limit_s)
        in_order = [slot.end(deadline) for slot in self._slots]
        self._workers_lock.release()
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
                ended = "the supervisor of the workers has ended; see the service's log"
                self._database.trouble.note("workers", ended)
        for slot in self._slots:
            slot.terminate()

    def step(self) -> None:
        """Start workers, kill those that hang, and give the jobs of dead ones back, as far as due."""
        now = time.monotonic()
        timeout_s = self._queue.retry.timeout_s
        if now - self._looked > timeout_s / 2:
            self._heard_from = now  # this process, or the entire machine, stood still, not the workers
        self._looked = now
        slots = self._slots if self._has_workers_lock else ()
        ended = [slot.look(now, heard_from=self._heard_from) for slot in slots]
        if not any(ended) and now < self._look_from:
            return
        self._look_from = now + min(1.0, timeout_s / 4)
        try:
            self._check_health(now)
            if self._lock_workers(now):
                self._take_jobs_from_dead_workers()
        except DegradedError as error:
            if not self._is_away:
                _log.error("%s", error)
            self._is_away = True
        except (StokerError, OSError) as error:
            why = f"the workers cannot be looked after: {error}"
            if not self._is_away:
                _log.error("%s", why)
            self._is_away = True
            self._database.trouble.note("workers", why)
        else:
            self._is_away = False
            self._database.trouble.note("workers", None)

    def _lock_workers(self, now: float) -> bool:
        """Take the lock of the workers; return False while workers of an earlier service have it."""
        self._has_workers_lock = self._has_workers_lock or self._workers_lock.acquire()
        if not self._has_workers_lock and now > self._complain_from:
            self._complain_from = now + EARLIER_S
            path = self._workers_lock.path
            _log.error(
                "a worker of an earlier service has %s. Check its process: jobs wait for its end", path
            )
        return self._has_workers_lock

    def _take_jobs_from_dead_workers(self) -> None:
        for name in self._queue.workers() - {slot.name for slot in self._slots if slot.works}:
            for job in self._queue.release(name):
                _log.warning("job %s lost its worker and is now %s", job.id, job.state)

    def _run_chores(self) -> None:
        while not self._stopping.is_set():
            self.do_chores()
            self._stopping.wait(CHORES_EVERY_S)

    def do_chores(self) -> None:
        """Remove old events and the folders of deleted jobs; failures are logged and tried again later."""
        try:
            Outbox(self._database).prune(max_age_s=KEEP_EVENTS_S, max_count=KEEP_EVENTS)
            AuditLog(self._database).prune(max_age_s=KEEP_EVENTS_S, max_count=KEEP_EVENTS)
            remove_orphans(self._folder, Jobs(self._database))
        except (DegradedError, OSError) as error:
            _log.warning("chores: %s. They are tried again in %g s", error, CHORES_EVERY_S)

    def _check_health(self, now: float) -> None:
        trouble = self._database.trouble
        writes = now >= self._write_from or trouble.why is not None
        if writes:
            self._write_from = now + WRITE_EVERY_S
            trouble.note("disk", self._room.lack())
        self._database.check(writes=writes)


class WorkerSlot:
    """The slot of one worker: starts its process, which inherits `lock`, and restarts it."""

    def __init__(
        self, number: int, device: str | None, settings: WorkerSettings, folder: StateFolder, lock: FileLock
    ) -> None:
        self._number, self._device, self._folder = number, device, folder
        self._settings = replace(settings, limits=replace(settings.limits, devices=device))
        self._lock = lock
        self.name = ""
        """Name of its current or last worker."""
        self._child: Child | None = None
        self._is_killed = False
        self._deaths = 0
        self._born = self._start_from = 0.0
        self._wait_s = _SHORTEST_WAIT_S

    def look(self, now: float, *, heard_from: float) -> bool:
        """Start its worker if none runs, kill it if it hangs; return whether it was found dead.

        Args:
            now: The monotonic time.
            heard_from: Missing heartbeats before this time do not count.
        """
        if found_dead := self._child is not None and self._child.ended():
            self._handle_death(now)
        elif self._child is not None and not self._is_killed:
            self._kill_if_silent(self._child, now, heard_from)
        if self._child is None and now >= self._start_from:
            self._start(now)
        return found_dead

    def _handle_death(self, now: float) -> None:
        assert self._child is not None
        assert self._child.exit is not None
        code = self._child.exit.code
        _log.error("worker %s %s; it is started again", self.name, self._child.exit)
        self._child.close()
        self._child, self._is_killed = None, False
        self._deaths += 1
        lived_s = now - self._born
        gave_up = code is not None and code >= 0 and lived_s < _STEADY_S  # its reason may last
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if gave_up else _SHORTEST_WAIT_S
        self._start_from = now + self._wait_s if gave_up or lived_s < 1.0 else now

    def _kill_if_silent(self, child: Child, now: float, heard_from: float) -> None:
        silent_s = now - max(heard_from, self._born, child.heartbeat.look().time_ns / 1e9)
        if silent_s > self._settings.retry.timeout_s:
            _log.error(
                "worker %s gave no heartbeat for %.1f s (%s) and is killed; its job is tried again",
                self.name, silent_s, child.kernel_view(),
            )  # fmt: skip
            child.kill()
            self._is_killed = True

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
        """True if its worker may still do something; a killed one may not, even while it hangs."""
        return self._child is not None and not self._is_killed and not self._child.ended()

    def state(self) -> WorkerState:
        """Return the state of its worker."""
        return WorkerState(
            slot=self._number,
            name=self.name,
            pid=0 if self._child is None else self._child.pid,
            alive=self._child is not None and self._child.exit is None,
            deaths=self._deaths,
            device=self._device,
        )

    def terminate(self) -> None:
        """Ask its worker to stop its job with a checkpoint and exit."""
        if self._child is not None:
            self._child.terminate()

    def end(self, deadline: float) -> bool:
        """Wait for the end of its worker; kill it with its job at the monotonic time `deadline`.

        Returns:
            Whether it exited without being killed.
        """
        in_order = True
        if self._child is not None:
            self._child.terminate()
            in_order = self._child.wait(max(0.0, deadline - time.monotonic()))
            if not in_order:
                self._child.stop(0.0, 10.0)  # one that hangs in the system is left behind
            self._child.close()
            self._child = None
        return in_order


def remove_orphans(folder: StateFolder, jobs: Jobs) -> list[str]:
    """Remove the folders of deleted jobs; return their ids."""
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
            f"{folder.path} is used by a running service ({lock.holder()})",
            hint="Only one service uses a state folder at a time: stop it, or start this one with another "
            "folder",
        )
    return lock


def _identity(folder: StateFolder) -> str:
    """Return the id of a state folder, which stays the same when the folder is moved."""
    path = folder.path / "folder-id"
    if not path.exists():
        with replace_atomically(path) as temporary:
            temporary.write_text(secrets.token_hex(16))
    return path.read_text()
