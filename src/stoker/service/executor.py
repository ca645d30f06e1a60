"""How a job's process is started, watched and ended: the seam between a worker and a machine.

A worker asks an `Executor` and knows nothing else about processes. `local.py` runs them on this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from stoker.errors import ResourceError, StalledError
from stoker.runtime.locks import FileLock
from stoker.service.confine import identity
from stoker.service.folders import JobFolder
from stoker.units import format_bytes, format_seconds

STOPPED = 75
"""Exit status of a job that was asked to stop and has made a checkpoint; 0 is done, anything else failed."""
NO_ROOM = 74
"""The same of one that found the disk full: it goes on from its last checkpoint when there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTarget:
    """A cluster, and how jobs are run there."""

    address: str
    """`http://host:8265`, as `ray start --head` prints it."""
    python: str
    """The interpreter of nodes."""
    gpus: float = 0.0
    """GPUs that a job takes."""


class Run(Protocol):
    """One process of a job. No call waits for it."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. When it has ended, all of it has."""
        ...

    def exceeded(self) -> str:
        """Which of its limits it has passed, with figures; empty while none."""
        ...

    def terminate(self) -> None:
        """Ask it to make a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End it and every process it started."""
        ...


class Hold(Protocol):
    """The sole right to run a job's process; it passes to the process once that is started."""

    def start(self, command: Sequence[str], limits: Limits) -> Run:
        """Start `command`, its output going to the log of the job's folder.

        Raises:
            ResourceError: The system cannot start another process.
        """
        ...

    def release(self) -> None:
        """Let go of it; nothing to do after `start`."""
        ...


class Executor(Protocol):
    """Runs processes of jobs, never two of one job at once."""

    def hold(self, folder: JobFolder) -> Hold:
        """The right to run the job of a folder, after whatever is left of an earlier attempt has been ended.

        This is what keeps a job from running twice when a worker was declared dead and is not.

        Raises:
            StalledError: An earlier process of the job cannot be ended.
        """
        ...


# ----------------------------------------------------------------------------------------------------------
# Job processes on this machine: a process group each, tied to its worker, one at a time for a job.
#
# The right to run a job is a lock (`flock`) on a file in its folder. The worker takes it, the job's process
# inherits it, and the worker gives up its own share: the lock ends with the last process of the job and
# with nothing else. Its file says which process holds it. Whoever claims the job later and finds the lock
# taken ends that process, which is right since a claim is only ever given once the earlier one has run out.
#
# A process dies with its worker (the kernel sees to that), so that what nobody watches does not run on.


TAKE_OVER_S = 10.0
"""How long ending what is left of an earlier attempt may take: memory of a GPU is given back in seconds."""
_MEMORY_EVERY_S = 2.0
_CONFINE = str(Path(__file__).with_name("confine.py"))


class LocalExecutor:
    """Starts processes of jobs on this machine.

    Args:
        environment: What they see of the environment.
        take_over_s: How long ending an earlier process may take.
    """

    def __init__(self, environment: Mapping[str, str], *, take_over_s: float = TAKE_OVER_S) -> None:
        self._environment = dict(environment)
        self._take_over_s = take_over_s

    def hold(self, folder: JobFolder) -> LocalHold:
        """See `Executor.hold`."""
        # Not the usual signature: whoever takes over kills the very process that is named here.
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
        return LocalHold(lock, folder, self._environment)


class LocalHold:
    """The lock of a job, held by this process; `LocalExecutor.hold` makes it."""

    def __init__(self, lock: FileLock, folder: JobFolder, environment: Mapping[str, str]) -> None:
        self._lock = lock
        self._folder = folder
        self._environment = dict(environment)

    def start(self, command: Sequence[str], limits: Limits) -> LocalRun:
        """See `Hold.start`; the command's first word is a path."""
        environment = dict(self._environment)
        if limits.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = limits.devices
        lock = self._lock.fileno()
        confined = [sys.executable, "-I", "-S", _CONFINE, str(os.getpid()), str(lock), *command]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(self._folder.log, flags, 0o600)
        try:
            process = subprocess.Popen(
                confined,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(
                f"{self._folder.path}: no process can be started for the job: {error.strerror}"
            ) from error
        finally:
            os.close(log)
            self.release()
        return LocalRun(process, limits)

    def release(self) -> None:
        """See `Hold.release`."""
        self._lock.release()


class LocalRun:
    """A process group on this machine; `LocalHold.start` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._started = time.monotonic()
        self._memory_due = self._started
        self._memory_bytes = 0

    @property
    def pid(self) -> int:
        """Of the first process of the group."""
        return self._process.pid

    def poll(self) -> int | None:
        """See `Run.poll`."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            self.kill()  # what it left behind, while its number cannot be another's yet
        return self._process.poll()

    def exceeded(self) -> str:
        """See `Run.exceeded`."""
        ran_s, limits = time.monotonic() - self._started, self._limits
        if limits.wall_s is not None and ran_s > limits.wall_s:
            return f"it ran for {format_seconds(ran_s)}; an attempt may take {format_seconds(limits.wall_s)}"
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
        """See `Run.terminate`: to the first process alone, which ends its own readers in order."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `Run.kill`."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # before it has made its group
                os.kill(self.pid, signal.SIGKILL)


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
    """Kill whom a lock file names (`confine.identity`), if that very process still lives in reach."""
    kind, _, who = holder.partition(" ")
    with suppress(OSError, ValueError):
        pid = int(who.split(" ")[0])
        if identity(pid) != who or pid == os.getpid():
            return
        if kind == "group":
            os.killpg(pid, signal.SIGKILL)
        elif kind == "process":
            os.kill(pid, signal.SIGKILL)
