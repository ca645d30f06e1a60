"""Start, watch and end the processes of jobs: the seam between a worker and a machine.

A worker uses only the protocol `Executor`. `LocalExecutor` runs processes on this machine, `RayExecutor`
(`stoker.extras.ray`) on a cluster.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from stoker.errors import StalledError
from stoker.runtime.locks import FileLock
from stoker.runtime.processes.child import TORCH, Child
from stoker.runtime.processes.entry import Connection
from stoker.service.folders import JobFolder
from stoker.units import format_bytes, format_seconds

STOPPED = 75
"""Exit status of a job that was asked to stop and has made a checkpoint; 0 is done, anything else failed."""
NO_ROOM = 74
"""Exit status of a job that found the disk full: it resumes from its last checkpoint when there is space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgram:
    """The program of a job's process."""

    target: str = "stoker.service.child:serve"
    """A function in the form of `Child`; it calls `begin_job` first."""
    modules: tuple[str, ...] = (*TORCH, "torch._dynamo", "stoker.service.child", "stoker.service.runs")
    """Modules that are imported before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Resources that a job may use."""

    memory_bytes: int | None = None
    """Private memory of all its processes together; file pages that the system can drop do not count."""
    wall_s: float | None = None
    """Timeout of one attempt, which then stops with a checkpoint and fails."""
    grace_s: float = 30.0
    """Timeout of the checkpoint when it is asked to stop, and of the exit after its last event."""
    event_timeout_s: float | None = 3600.0
    """Longest time between two events; after that the process hangs, and the job is tried again."""
    devices: str | None = None
    """`CUDA_VISIBLE_DEVICES`; None: as the service itself, empty: none."""

    def late(self, ran_s: float) -> str:
        """Return by how much an attempt exceeds its time limit; empty if it does not."""
        if self.wall_s is None or ran_s <= self.wall_s:
            return ""
        return f"it ran for {format_seconds(ran_s)}; an attempt may take {format_seconds(self.wall_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTarget:
    """A Ray cluster and the settings of jobs there."""

    address: str
    """`http://host:8265`, as `ray start --head` prints it."""
    python: str
    """The interpreter of nodes."""
    gpus: float = 0.0
    """GPUs of one job."""


class JobProcess(Protocol):
    """One process of a job. No call blocks."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it or its children run."""
        ...

    def exceeded(self) -> str:
        """Return the limit that it exceeds, with figures; empty if none."""
        ...

    def terminate(self) -> None:
        """Ask it to write a checkpoint and exit."""
        ...

    def kill(self) -> None:
        """Kill it and all its children."""
        ...


class JobLock(Protocol):
    """The lock on a job; it passes to the job's process with `start`."""

    def start(self, program: JobProgram, limits: JobLimits) -> JobProcess:
        """Start the job's process with its output in the log of the job's folder.

        Raises:
            ResourceError: The system cannot start another process.
        """
        ...

    def release(self) -> None:
        """Release the lock; no effect after `start`."""
        ...


class Executor(Protocol):
    """Runs processes of jobs, at most one per job at a time."""

    def lock(self, folder: JobFolder) -> JobLock:
        """Return the lock on a job after ending what is left of an earlier attempt.

        This keeps a job from running twice when its worker was killed and hangs in the system.

        Raises:
            StalledError: An earlier process of the job cannot be ended.
        """
        ...


# ----------------------------------------------------------------------------------------------------------
# Job processes on this machine: each in its own session, tied to its worker, at most one per job.
#
# A job is locked (`flock`) through a file in its folder. The worker takes the lock, the job's process
# inherits it, and the worker closes its own descriptor: the lock ends exactly when the last process of the
# job ends. The file says which process holds it. A later worker that finds the lock taken kills that process.
# This is correct because a job is only given to another worker when the one before it is dead.
#
# A process dies with its worker, so that no process runs without supervision.


TAKE_OVER_S = 10.0
"""Timeout of ending an earlier attempt: releasing GPU memory takes seconds."""
END_S = 10.0
"""How long to wait for a killed process; one that hangs longer in the system keeps its job's lock."""
_MEMORY_EVERY_S = 2.0


class LocalExecutor:
    """Starts processes of jobs on this machine.

    Args:
        take_over_s: Timeout of ending an earlier process.
    """

    def __init__(self, *, take_over_s: float = TAKE_OVER_S) -> None:
        self._take_over_s = take_over_s

    def lock(self, folder: JobFolder) -> LocalJobLock:
        """See `Executor.lock`."""
        # Not the usual note: the process named here is killed by the next holder.
        lock = FileLock(folder.lock, note=f"process {identity(os.getpid())}\n")
        deadline = time.monotonic() + self._take_over_s
        while not lock.acquire(0.02):
            holder = lock.note()
            _end(holder)
            if time.monotonic() > deadline:
                raise StalledError(
                    f"{folder.lock} is still held ({holder or 'by an unnamed process'}), "
                    f"{format_seconds(self._take_over_s)} after its process was killed: the earlier attempt "
                    "hangs in the system or runs on another machine",
                    hint="The job is tried again later",
                )
        return LocalJobLock(lock, folder)


class LocalJobLock:
    """The lock of a job, held by this process; `LocalExecutor.lock` makes it."""

    def __init__(self, lock: FileLock, folder: JobFolder) -> None:
        self._lock = lock
        self._folder = folder

    def start(self, program: JobProgram, limits: JobLimits) -> LocalProcess:
        """See `JobLock.start`."""
        try:
            return LocalProcess(start_job(self._folder, program, self._lock.fileno(), limits.devices), limits)
        finally:
            self.release()

    def release(self) -> None:
        """See `JobLock.release`."""
        self._lock.release()


def start_job(folder: JobFolder, program: JobProgram, lock: int, devices: str | None = None) -> Child:
    """Start the process of a job, which ends with this one.

    Args:
        folder: The job's; its log takes what the process prints.
        program: What it runs.
        lock: Descriptor of a file that the process writes its identity to and keeps open.
        devices: `CUDA_VISIBLE_DEVICES`; None: as here.

    Raises:
        ResourceError: The system cannot start another process.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(folder.log, flags, 0o600)
    try:
        return Child(
            program.target,
            what=f"a process for the job in {folder.path}",
            arguments={"folder": str(folder.path), "devices": devices},
            shared=[lock],
            output=log,
            modules=program.modules,
        )
    finally:
        os.close(log)


def begin_job(connection: Connection) -> Path:
    """Make this process the one of a job, before it does anything else.

    Args:
        connection: As `start_job` made it.

    Returns:
        The job's folder.
    """
    (lock,) = connection.shared
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"group {identity(os.getpid())}\n".encode(), 0)
    if connection.arguments["devices"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = connection.arguments["devices"]
    return Path(connection.arguments["folder"])


class LocalProcess:
    """A job's process and those that it started; `LocalJobLock.start` makes it."""

    def __init__(self, child: Child, limits: JobLimits) -> None:
        self._child = child
        self._limits = limits
        self._started = time.monotonic()
        self._memory_due = self._started
        self._memory_bytes = 0
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the first."""
        return self._child.pid

    def poll(self) -> int | None:
        """See `JobProcess.poll`."""
        if self._code is None and self._is_over():
            self._child.kill()  # its children; the pid is not reused before `wait` has collected it
            if self._child.wait(END_S):
                assert self._child.exit is not None
                # Without a code it died with the process that it was forked from, which was killed.
                self._code = -signal.SIGKILL if self._child.exit.code is None else self._child.exit.code
                self._child.close()
        return self._code

    def _is_over(self) -> bool:
        """Return True if the process has ended but was not collected yet."""
        poller = select.poll()
        poller.register(self._child.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def exceeded(self) -> str:
        """See `JobProcess.exceeded`."""
        ran_s, limits = time.monotonic() - self._started, self._limits
        if late := limits.late(ran_s):
            return late
        if limits.memory_bytes is None:
            return ""
        if time.monotonic() >= self._memory_due:
            self._memory_due = time.monotonic() + _MEMORY_EVERY_S
            self._memory_bytes = own_memory_bytes(self.pid)
        if self._memory_bytes > limits.memory_bytes:
            return (
                f"its processes hold {format_bytes(self._memory_bytes)} of memory; "
                f"the limit is {format_bytes(limits.memory_bytes)}"
            )
        return ""

    def terminate(self) -> None:
        """See `JobProcess.terminate`; only the first process is asked, which ends its own children."""
        if self._code is None:
            self._child.terminate()

    def kill(self) -> None:
        """See `JobProcess.kill`."""
        if self._code is None:
            self._child.kill()


def identity(pid: int) -> str:
    """Return an identity that no other process has, also not with this pid after a reboot or in a container.

    Raises:
        OSError: The process does not exist.
    """
    started = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{pid} {started} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def own_memory_bytes(pid: int) -> int:
    """Return the private memory of process `pid` and its descendants, without file pages."""
    total = 0
    with suppress(psutil.Error):
        for process in (first := psutil.Process(pid), *first.children(recursive=True)):
            with suppress(OSError, ValueError):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) * 1024
    return total


def _end(holder: str) -> None:
    """Kill the process that a lock file names (`identity`), if it still lives on this machine."""
    kind, _, who = holder.partition(" ")
    with suppress(OSError, ValueError):
        pid = int(who.split(" ")[0])
        if identity(pid) != who or pid == os.getpid():
            return
        if kind == "group":
            os.killpg(pid, signal.SIGKILL)
        elif kind == "process":
            os.kill(pid, signal.SIGKILL)
