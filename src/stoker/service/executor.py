"""How a job's process is started, watched and ended: the seam between a worker and a machine.

A worker asks an `Executor` and knows nothing else about processes. `LocalExecutor` runs them on this machine,
`ray.RayExecutor` on a cluster.
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
"""The same of one that found the disk full: it goes on from its last checkpoint when there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgram:
    """What the process of a job runs."""

    target: str = "stoker.service.child:serve"
    """A function, as `Child` takes it; it calls `begin_job` first."""
    modules: tuple[str, ...] = (*TORCH, "stoker.service.child", "stoker.service.runs")
    """What it finds imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What a job may use."""

    memory_bytes: int | None = None
    """Memory of its own, all its processes together; pages of files that the system can drop do not count."""
    wall_s: float | None = None
    """How long one attempt may run; then it is stopped with a checkpoint and fails."""
    grace_s: float = 30.0
    """How long it may take to make its checkpoint when asked to stop, and to end after its last word."""
    quiet_s: float | None = 3600.0
    """How long it may say nothing at all; then it is taken to hang and is tried again."""
    devices: str | None = None
    """`CUDA_VISIBLE_DEVICES`; None: as the service itself, empty: none."""

    def late(self, ran_s: float) -> str:
        """Return that an attempt took longer than it may, with figures; empty while it did not."""
        if self.wall_s is None or ran_s <= self.wall_s:
            return ""
        return f"it ran for {format_seconds(ran_s)}; an attempt may take {format_seconds(self.wall_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTarget:
    """A cluster, and how jobs are run there."""

    address: str
    """`http://host:8265`, as `ray start --head` prints it."""
    python: str
    """The interpreter of nodes."""
    gpus: float = 0.0
    """GPUs that a job takes."""


class JobProcess(Protocol):
    """One process of a job. No call waits for it."""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it, or what it started, runs."""
        ...

    def exceeded(self) -> str:
        """Return which of its limits it has passed, with figures; empty while none."""
        ...

    def terminate(self) -> None:
        """Ask it to make a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End it and every process it started."""
        ...


class JobHold(Protocol):
    """The sole right to run a job's process; it passes to the process once that is started."""

    def start(self, program: JobProgram, limits: JobLimits) -> JobProcess:
        """Start the job's process, its output going to the log of the job's folder.

        Raises:
            ResourceError: The system cannot start another process.
        """
        ...

    def release(self) -> None:
        """Let go of it; without effect after `start`."""
        ...


class Executor(Protocol):
    """Runs processes of jobs, never two of one job at once."""

    def hold(self, folder: JobFolder) -> JobHold:
        """Return the right to run a job, after whatever is left of an earlier attempt has been ended.

        This is what keeps a job from running twice when its worker was killed and hangs in the system.

        Raises:
            StalledError: An earlier process of the job cannot be ended.
        """
        ...


# ----------------------------------------------------------------------------------------------------------
# Job processes on this machine: a session each, tied to its worker, one at a time for a job.
#
# The right to run a job is a lock (`flock`) on a file in its folder. The worker takes it, the job's process
# inherits it, and the worker gives up its own share: the lock ends with the last process of the job and
# with nothing else. Its file says which process holds it. A worker that has the job later and finds the lock
# taken ends that process, which is right since a job is only ever given to a worker when the one before it
# is dead.
#
# A process dies with its worker, so that what nobody watches does not run on.


TAKE_OVER_S = 10.0
"""How long ending what is left of an earlier attempt may take: memory of a GPU is given back in seconds."""
END_S = 10.0
"""How long a killed process is waited for; what hangs in the system longer keeps its job's lock."""
_MEMORY_EVERY_S = 2.0


class LocalExecutor:
    """Starts processes of jobs on this machine.

    Args:
        take_over_s: How long ending an earlier process may take.
    """

    def __init__(self, *, take_over_s: float = TAKE_OVER_S) -> None:
        self._take_over_s = take_over_s

    def hold(self, folder: JobFolder) -> LocalHold:
        """See `Executor.hold`."""
        # Not the usual signature: who takes over kills the very process that is named here.
        lock = FileLock(folder.lock, note=f"process {identity(os.getpid())}\n")
        deadline = time.monotonic() + self._take_over_s
        while not lock.acquire(0.02):
            holder = lock.note()
            _end(holder)
            if time.monotonic() > deadline:
                raise StalledError(
                    f"{folder.lock} is still held ({holder or 'by nobody named'}), "
                    f"{format_seconds(self._take_over_s)} after its process was killed: the earlier attempt "
                    "hangs in the system or runs on another machine. The job is tried again later"
                )
        return LocalHold(lock, folder)


class LocalHold:
    """The lock of a job, held by this process; `LocalExecutor.hold` makes it."""

    def __init__(self, lock: FileLock, folder: JobFolder) -> None:
        self._lock = lock
        self._folder = folder

    def start(self, program: JobProgram, limits: JobLimits) -> LocalProcess:
        """See `JobHold.start`."""
        try:
            return LocalProcess(start_job(self._folder, program, self._lock.fileno(), limits.devices), limits)
        finally:
            self.release()

    def release(self) -> None:
        """See `JobHold.release`."""
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
    """A job's process and those that it started; `LocalHold.start` makes it."""

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
            self._child.kill()  # what it left behind: its number is no other's until `wait` has seen its end
            if self._child.wait(END_S):
                assert self._child.exit is not None
                # Without a code it went with the process that it was forked from, which was killed.
                self._code = -signal.SIGKILL if self._child.exit.code is None else self._child.exit.code
                self._child.close()
        return self._code

    def _is_over(self) -> bool:
        """Return whether the process has ended, which is not noted yet."""
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
                f"{format_bytes(limits.memory_bytes)} are allowed"
            )
        return ""

    def terminate(self) -> None:
        """See `JobProcess.terminate`: to the first process alone, which ends its own workers in order."""
        if self._code is None:
            self._child.terminate()

    def kill(self) -> None:
        """See `JobProcess.kill`."""
        if self._code is None:
            self._child.kill()


def identity(pid: int) -> str:
    """Name a process so that no other of its number, of another boot or in another container, passes for it.

    Raises:
        OSError: No such process.
    """
    started = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{pid} {started} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def own_memory_bytes(pid: int) -> int:
    """Memory that only process `pid` and its descendants keep from others: not pages of files."""
    total = 0
    with suppress(psutil.Error):
        for process in (first := psutil.Process(pid), *first.children(recursive=True)):
            with suppress(OSError, ValueError):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) * 1024
    return total


def _end(holder: str) -> None:
    """Kill the process that a lock file names (`identity`), if that very process still lives in reach."""
    kind, _, who = holder.partition(" ")
    with suppress(OSError, ValueError):
        pid = int(who.split(" ")[0])
        if identity(pid) != who or pid == os.getpid():
            return
        if kind == "group":
            os.killpg(pid, signal.SIGKILL)
        elif kind == "process":
            os.kill(pid, signal.SIGKILL)
