"""What `stoker serve` runs beside its web server: workers, started again when they die, and the chores.

One service has a state folder at a time, and a state folder has one database: jobs are handed from worker to
worker through their folders, so two services that shared a database alone would lose checkpoints.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stoker.errors import ConfigError, Degraded, StokerError
from stoker.runtime.files import replacing
from stoker.runtime.locks import FileLock
from stoker.service.database import Database, Outbox, claim_folder
from stoker.service.executor import Limits, RayTarget
from stoker.service.folders import Room, StateFolder
from stoker.service.jobs import Jobs, Leases, Terms
from stoker.service.security import DataAccess
from stoker.service.worker import CHILD, Pace, Settings

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Staff:
    """How many workers there are and what they are told."""

    workers: int = 1
    devices: Sequence[str | None] = (None,)
    """`CUDA_VISIBLE_DEVICES` of each worker's jobs, the list again from its start when there are more."""
    child: tuple[str, ...] = CHILD
    terms: Terms = field(default_factory=Terms)
    pace: Pace = field(default_factory=Pace)
    limits: Limits = field(default_factory=Limits)
    access: DataAccess = field(default_factory=DataAccess)
    """Which registered data jobs may read."""
    ray: RayTarget | None = None
    """The cluster that runs the jobs; None: this machine."""


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


class Supervisor:
    """Keeps workers running and does the chores; `start`, and `stop` when the server ends.

    Args:
        database: Of the jobs.
        folder: The state folder.
        staff: The workers.
        environment: What workers and jobs see of the environment.

    Raises:
        ConfigError: Another service has the state folder now, or the database belongs to another folder.
        Degraded: The database does not answer.
    """

    def __init__(
        self, database: Database, folder: StateFolder, staff: Staff, environment: Mapping[str, str]
    ) -> None:
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
        self._room = Room(folder)
        self._environment = dict(environment)
        self._leases = Leases(database, staff.terms)
        self._crew = [_Member(self, slot, staff) for slot in range(staff.workers)]
        self._stopping = threading.Event()
        self._look_from = self._sweep_from = self._write_from = 0.0
        self._away = False
        self._thread = threading.Thread(target=self._run, name="stoker-supervisor", daemon=True)
        # Apart from the thread that watches the workers: a disk that hangs under a job's folder holds it up.
        self._chores_thread = threading.Thread(target=self._run_chores, name="stoker-chores", daemon=True)

    def start(self) -> None:
        """Start the workers and a thread that watches them.

        The thread starts them itself and stays until they have ended: the kernel ends a worker with the
        thread that started it.
        """
        self._thread.start()
        self._chores_thread.start()

    def stop(self, *, limit_s: float = 60.0) -> bool:
        """Have every worker stop its job with a checkpoint and end, and kill those that do not in `limit_s`.

        Returns:
            Whether all ended by themselves.
        """
        deadline = time.monotonic() + limit_s
        self._stopping.set()
        if started := self._thread.ident is not None:
            self._thread.join(limit_s)
        in_order = [member.ended(deadline) for member in self._crew]
        if started:
            self._thread.join(10.0)
        self._lock.release()
        return all(in_order)

    def workers(self) -> list[WorkerState]:
        """Every worker, by slot."""
        return [member.state() for member in self._crew]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.step()
                self._stopping.wait(0.25)
        finally:
            if not self._stopping.is_set():
                ended = "the supervisor of the workers has ended: see the service's log"
                self._database.trouble.note("workers", ended)
        for member in self._crew:
            member.terminate()
        while any(member.alive() for member in self._crew):
            time.sleep(0.1)

    def step(self) -> None:
        """Do what is due: start workers, take jobs from dead ones. Waits for nothing."""
        now = time.monotonic()
        dead = [name for member in self._crew if (name := member.look(now))]
        if not dead and now < self._look_from:
            return
        self._look_from = now + min(1.0, self._leases.terms.lease_s / 4)
        try:
            self._see_whether_all_is_well(now)
            if self._away:
                # workers could not say that they live either: they get a lease for it before anyone judges
                self._away, self._sweep_from = False, now + self._leases.terms.lease_s
            for name in dead:
                self._leases.abandon(name)
            if now >= self._sweep_from:
                for job in self._leases.sweep():
                    _log.warning("job %s lost its worker and is now %s", job.id, job.state)
        except Degraded as error:
            if not self._away:
                _log.error("%s", error)
            self._away = True

    def _run_chores(self) -> None:
        while not self._stopping.is_set():
            self.do_chores()
            self._stopping.wait(CHORES_EVERY_S)

    def do_chores(self) -> None:
        """Remove old events and the folders of deleted jobs; what fails is logged and tried again later."""
        try:
            Outbox(self._database).prune(max_age_s=KEEP_EVENTS_S, max_count=KEEP_EVENTS)
            remove_orphans(self._folder, Jobs(self._database))
        except (Degraded, OSError) as error:
            _log.warning("chores: %s. They are tried again in %g s", error, CHORES_EVERY_S)

    def _see_whether_all_is_well(self, now: float) -> None:
        trouble = self._database.trouble
        writes = now >= self._write_from or trouble.why is not None
        if writes:
            self._write_from = now + WRITE_EVERY_S
            trouble.note("disk", self._room.lack())
        self._database.check(writes=writes)

    def launch(self, settings: Settings) -> subprocess.Popen[bytes]:
        """Start the process of a worker."""
        settings = replace(settings, url=self._database.address(), state=str(self._folder.path))
        log = self._folder.workers / f"{settings.slot}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "stoker.service.worker"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(f"{settings.to_text()}\n".encode())
        return process


class _Member:
    """The worker of one slot: its process, and the ones before it."""

    def __init__(self, supervisor: Supervisor, slot: int, staff: Staff) -> None:
        device = staff.devices[slot % len(staff.devices)]
        self._supervisor = supervisor
        self._slot, self._device = slot, device
        self._settings = Settings(
            name="",
            slot=slot,
            url="",
            state="",
            parent=os.getpid(),
            child=staff.child,
            terms=staff.terms,
            pace=staff.pace,
            limits=replace(staff.limits, devices=device),
            access=staff.access,
            ray=staff.ray,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._name = ""
        self._deaths = 0
        self._born = self._start_from = 0.0
        self._wait_s = _SHORTEST_WAIT_S

    def look(self, now: float) -> str | None:
        """Start it when it does not run; the name of one that was found dead."""
        dead = None
        if self._process is not None and (code := self._process.poll()) is not None:
            _log.error("worker %s ended with status %d; it is started again", self._name, code)
            dead, self._process = self._name, None
            self._deaths += 1
            lived_s = now - self._born
            by_itself = code >= 0 and lived_s < _STEADY_S  # what it cannot bear may last
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if by_itself else _SHORTEST_WAIT_S
            self._start_from = now + self._wait_s if by_itself or lived_s < 1.0 else now
        if self._process is None and now >= self._start_from:
            self._name = f"{os.uname().nodename}-{self._slot}-{secrets.token_hex(4)}"  # see abandon_slot
            try:
                self._process = self._supervisor.launch(replace(self._settings, name=self._name))
            except OSError as error:
                _log.error("worker %s cannot be started: %s", self._name, error)
                self._start_from = now + self._wait_s
            self._born = now
        return dead

    def state(self) -> WorkerState:
        return WorkerState(
            slot=self._slot,
            name=self._name,
            pid=0 if self._process is None else self._process.pid,
            alive=self.alive(),
            deaths=self._deaths,
            device=self._device,
        )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def ended(self, deadline: float) -> bool:
        """Whether it ends until then; else it is killed, and its job with it."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # what hangs in the system is left to it
                self._process.wait(10.0)
            return False
        return True


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
        with replacing(path) as temporary:
            temporary.write_text(secrets.token_hex(16))
    return path.read_text()
