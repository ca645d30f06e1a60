"""Child processes: started, watched, asked for their stacks, ended, explained.

    child = Child("package.module:function", what="a process to read files", arguments={"path": "x"})
    child.socket, child.heartbeat         # to talk with it, and to see what it is doing
    child.wait(10.0) or child.stop(1.0)   # no method waits longer than it is told to
    child.exit                            # how it ended; str() says it in words
    child.close()

It is forked from a preloaded process where that is possible, and a Python of its own otherwise (macOS, under
a debugger, after `set_start_method("spawn")`); nothing else differs. It ends with its owner: when that closes
the socket, and by a signal when that dies. Nothing is asked of a child to find out how it is: its pidfd, its
heartbeat page and /proc tell.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import ResourceError, StalledError
from stoker.runtime.processes.entry import STACK_SIGNAL, Target
from stoker.runtime.processes.heartbeat import HeartbeatPage, anonymous_file
from stoker.runtime.processes.preloaded import NotPreloadedError, preloaded
from stoker.runtime.processes.wire import Channel, pack
from stoker.runtime.threads import start_thread
from stoker.units import GIB, KIB, MIB, format_bytes

# ----------------------------------------------------------------------------------------------------------
# Programs that this process starts itself: a Python of ours, or a foreign one such as git or rclone.
#
# `run_program` returns what a short one prints; `OutputStream` reads the output of a long one as it comes.
# A program that only writes to our pipes ends with us: its next write fails.


KILL_S = 5.0
"""Seconds that a killed program may take to end; one that waits in the kernel is left behind."""
ERROR_BYTES = 64 << 10
"""The end of what a program writes to standard error that is kept."""
_PIECE_BYTES = MIB


class SpawnedProcess:
    """A program that runs as a child of this process. Signals never reach a later process of its number.

    Args:
        words: The program and its arguments.
        options: As of `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        self._process = subprocess.Popen[bytes](words, **options)
        self.pid = self._process.pid
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self.pidfd = -1
        """Readable when it has ended; -1 where the system has no such thing."""
        with suppress(AttributeError, OSError):  # not on macOS, nor in every sandbox
            self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to it alone; without effect once it has ended."""
        self._process.send_signal(number)

    def poll(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        if self.pidfd >= 0:
            is_readable(self.pidfd, timeout_s)
            return self._process.poll() is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Release its pidfd; safe to call twice."""
        self._process.poll()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read, at most so long; return whether it can."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


class OutputStream:
    """The standard output of a foreign program, piece by piece. One thread reads; another may call `kill`.

    Args:
        words: The program and its arguments; it gets no standard input.
        timeout_s: The longest wait for a piece, and for the end after the last one.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], timeout_s: float) -> None:
        self._name, self._timeout_s = words[0], timeout_s
        pipe = subprocess.PIPE
        self._process = SpawnedProcess(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._open = {self._out, self._err}
        self.errors = b""
        """The end of what it wrote to standard error."""

    def read(self) -> bytes:
        """Return the next piece as soon as there is one; empty at the end.

        Raises:
            StalledError: Nothing came in time.
        """
        until = time.monotonic() + self._timeout_s
        # Standard error is read as well: a program whose pipe is full would wait for us.
        while self._out in self._open:
            ready, _, _ = select.select([*self._open], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise StalledError(f"{self._name} wrote nothing for {self._timeout_s:g} s")
            if self._err in ready:
                self._read_errors()
            if self._out in ready:
                if piece := os.read(self._out, _PIECE_BYTES):
                    return piece
                self._open.discard(self._out)
        return b""

    def finish(self) -> int:
        """Wait for the end of the program after the last piece; return its exit code.

        Raises:
            StalledError: It did not end in time.
        """
        until = time.monotonic() + self._timeout_s
        while self._err in self._open and is_readable(self._err, until - time.monotonic()):
            self._read_errors()
        if not self._process.poll(until - time.monotonic()):
            raise StalledError(f"{self._name} did not end within {self._timeout_s:g} s")
        code = self._process.code()
        assert code is not None
        return code

    def kill(self) -> None:
        """End the program, so that a `read` that waits returns; harmless afterwards."""
        self._process.signal(9)

    def close(self) -> None:
        """End the program and release its pipes."""
        self.kill()
        self._process.poll(KILL_S)
        self._process.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_errors(self) -> None:
        piece = os.read(self._err, ERROR_BYTES)
        self.errors = (self.errors + piece)[-ERROR_BYTES:]
        if not piece:
            self._open.discard(self._err)


class ProgramResult(NamedTuple):
    """Result of a program."""

    code: int
    output: bytes
    errors: bytes
    """The end of what it wrote to standard error."""

    @property
    def last_error_line(self) -> str:
        """The last line that it wrote to standard error, or its exit code."""
        lines = [line for line in self.errors.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


def run_program(words: Sequence[str | Path], *, timeout_s: float, limit_bytes: int = GIB) -> ProgramResult:
    """Run a foreign program to its end and return its exit code and output.

    Args:
        words: The program and its arguments; it gets no standard input.
        timeout_s: Seconds for all of it.
        limit_bytes: The largest output.

    Raises:
        FileNotFoundError, OSError: It cannot be started.
        StalledError: It did not end in time; it is killed.
        ResourceError: It printed more than `limit_bytes`; it is killed.
    """
    until = time.monotonic() + timeout_s
    stream = OutputStream([str(word) for word in words], timeout_s)
    output = bytearray()
    try:
        while piece := stream.read():
            output += piece
            if len(output) > limit_bytes:
                raise ResourceError(f"{words[0]} printed more than {format_bytes(limit_bytes)}")
            if time.monotonic() > until:
                raise StalledError(f"{words[0]} did not end within {timeout_s:g} s")
        return ProgramResult(stream.finish(), bytes(output), stream.errors)
    finally:
        stream.close()


# ----------------------------------------------------------------------------------------------------------
# What worker processes print: taken from their pipes at once, and kept up to a bound.
#
# A worker must never wait because it printed, and must not fill the disk either. So a thread empties the
# pipes, also while the caller encodes, and each log keeps its beginning and its latest part. A pipe, unlike
# a file, ends with us: a worker stuck in the kernel holds nothing of ours open.


MAX_LOG_BYTES = 1024**2
"""A log is cut back to its first half when it has reached this size."""
_CHUNK_BYTES = 1 << 16
_CHUNKS = 16
"""Taken at a time, so that a flood does not keep others from the log; a pipe holds no more than these."""
_JOIN_S = 1.0


class Output:
    """The pipe of one worker, and the log it goes to; the file is made when there is something to keep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out_bytes = 0
        """Bytes that went by without being kept."""
        self._lock = threading.Lock()
        self._log = -1
        self._size = 0
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def handed_over(self) -> None:
        """Close our copy of the other end, which the worker has now; it would keep the pipe from ending."""
        os.close(self.write_fd)
        self.write_fd = -1

    def drain(self) -> bool:
        """Keep what has arrived; False at the end of the pipe."""
        with self._lock:
            for _ in range(_CHUNKS if self.read_fd >= 0 else 0):
                try:
                    data = os.read(self.read_fd, _CHUNK_BYTES)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                self._keep(data)
            return self.read_fd >= 0

    def append(self, text: str) -> None:
        """Add something of ours to the log."""
        with self._lock:
            self._keep(text.encode(errors="replace"))

    def _keep(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk below a log ends no run
            if self._log < 0:
                self._log = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._size + len(data) > MAX_LOG_BYTES:
                keep = min(self._size, MAX_LOG_BYTES // 2)
                self.left_out_bytes += self._size - keep
                os.ftruncate(self._log, keep)
                note = f"\n... {self.left_out_bytes} bytes of output are left out here ...\n".encode()
                self._size = keep + os.write(self._log, note)
            self._size += os.write(self._log, data)

    def tail(self, size: int) -> str:
        """Return the end of the log, or nothing."""
        self.drain()
        with self._lock, suppress(OSError):
            if self._log >= 0:
                return os.pread(self._log, size, max(0, self._size - size)).decode(errors="replace").strip()
        return ""

    def close(self, *, keep: bool) -> None:
        """Let the descriptors go; the file too unless it is to be kept. Safe to call twice."""
        self.drain()
        with self._lock:
            for fd in (self.read_fd, self.write_fd, self._log):
                if fd >= 0:
                    os.close(fd)
            self.read_fd = self.write_fd = self._log = -1
        if not keep:
            self.path.unlink(missing_ok=True)


class Drain:
    """A thread that empties the pipes of all workers; started with the first of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._outputs: dict[int, Output] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def add(self, output: Output) -> None:
        """Look after one more."""
        with self._lock:
            self._outputs[output.read_fd] = output
            self._epoll.register(output.read_fd, select.EPOLLIN)
            if self._thread is None:
                self._thread = start_thread(self._run, "stoker-output")

    def remove(self, output: Output) -> None:
        """Leave it alone from now on; to be called before it is closed."""
        with self._lock:
            if self._outputs.get(output.read_fd) is output:
                self._forget(output.read_fd)

    def _forget(self, fd: int) -> None:
        del self._outputs[fd]
        self._epoll.unregister(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._stop:
                    return
                output = self._outputs.get(fd)
                going = output is None or output.drain()
                with self._lock:  # the number may be another pipe's by now
                    if not going and self._outputs.get(fd) is output:
                        self._forget(fd)

    def close(self) -> None:
        """End the thread; safe to call twice."""
        if self._epoll.closed:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        # A thread that a disk holds will need the descriptors once more.
        if self._thread is None or not self._thread.is_alive():
            self._epoll.close()
            os.close(self._stop)


# ----------------------------------------------------------------------------------------------------------
# Whether a process still moves: by its heartbeat, and by what the kernel has read for it.
#
# A large sample over slow storage is one call for a worker, without a heartbeat for minutes. The kernel's
# count of bytes read tells it from one that hangs. Spinning on a file that never ends would look the same,
# so there is a last moment all the same.


MOST_DEADLINES = 10
"""Timeouts that one stage of one sample may last at most, however much is read meanwhile."""


class ProgressTimeout:
    """Time by which a process must have made progress.

    Half a timeout without a heartbeat, and its bytes are looked at for the first time; then every half. So it
    is overdue one timeout after its last byte at the latest.
    """

    def __init__(self, pid: int, *, first_thread: bool = False) -> None:
        """`first_thread`: count what this thread reads, and not the others of the process."""
        self._path = Path(f"/proc/{pid}/task/{pid}/io" if first_thread else f"/proc/{pid}/io")
        self._since = float("nan")
        self._due = 0.0
        self._bytes = -1

    def due(self, since: float, limit_s: float) -> float:
        """Return when to look at it (`time.monotonic()`); `since` is when it last moved by its own word."""
        if since != self._since:
            self._since, self._due, self._bytes = since, since + limit_s / 2, -1
        return self._due

    def overdue(self, limit_s: float, now: float) -> bool:
        """Return True if the process hangs; call it once `due` has passed. If False, `due` is later now."""
        count = self._count()
        if self._bytes < 0:  # where we look late, it still gets a moment to show that it moves
            self._due = max(self._since + limit_s, now + limit_s / 4)
        elif count > self._bytes and now < self._since + MOST_DEADLINES * limit_s:
            self._due = now + limit_s / 2
        else:
            return True
        self._bytes = count
        return False

    def _count(self) -> int:
        """Return the bytes of files, pipes and pages read so far; 0 where the kernel does not say."""
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split(": ") for line in lines)
        return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))


# ----------------------------------------------------------------------------------------------------------
# How often the kernel has killed for memory in our cgroup, so that a death by SIGKILL can be explained.


_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = _PROC, root: Path = _ROOT) -> int:
    """Return the `oom_kill` count of the memory cgroup of this process, v2 or v1; 0 if it has none."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if hierarchy == "0":
            found = _count(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            found = _count(root / "memory" / relative / "memory.oom_control")
        else:
            continue
        if found is not None:
            return found
    return 0


def _count(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)


StartMethod = Literal["fork", "spawn"]

LIGHT = ("cloudpickle", "numpy", "h5py", "stoker.precompute.worker")
"""Modules for children that need no torch: workers of most sources."""
TORCH = (
    *LIGHT,
    "torch",
    "torch.utils.data",
    "stoker.precompute.encoder_processes",
    "stoker.sources.torch_dataset",
)
"""Modules for all others."""

_STATUS_S = 5.0
"""How long the preloaded process may take to say how a child ended, once it has."""
_TAIL_BYTES = 2000
_DEBUGGERS = ("pydevd", "debugpy")
_state: dict[str, StartMethod] = {"method": "fork" if sys.platform == "linux" else "spawn"}


def set_start_method(method: StartMethod) -> None:
    """Choose how children start from now on: forked from a preloaded process, or each a Python of its own."""
    _state["method"] = method


def start_method() -> StartMethod:
    """Return how the next child starts. A debugger follows only a Python that it has started itself."""
    return "spawn" if any(name in sys.modules for name in _DEBUGGERS) else _state["method"]


def preload(modules: tuple[str, ...] = TORCH) -> None:
    """Start to import in the background what later children need; returns at once.

    Args:
        modules: As given to `Child` later.
    """
    if start_method() == "fork":
        with suppress(OSError):  # the child that needs it says so
            preloaded(modules).start()


def is_preloaded(modules: tuple[str, ...] = TORCH) -> bool:
    """Return True if a child can be started without waiting for imports of a preloaded process."""
    return start_method() != "fork" or preloaded(modules).is_ready()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """Exit status of a child."""

    code: int | None
    """Exit code; negative: the number of the signal that killed it; None: unknown, since the process
    that it was forked from was killed, and it with that."""
    out_of_memory: bool = False
    """It was killed by SIGKILL, and the kernel counts a kill for memory in our control group since."""

    def __str__(self) -> str:
        """In words, to follow the name of the process."""
        if self.code is None:
            return "ended with the preloaded process that it was forked from, which was killed"
        if self.code >= 0:
            return f"exited with code {self.code}"
        how = f"was killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        return how + (", and the memory cgroup counts an out-of-memory kill" if self.out_of_memory else "")


class ProcessMemory(NamedTuple):
    """Memory of a process, without what it shares with others through files and shared memory."""

    bytes: int
    peak_bytes: int
    """The most that it has held, about."""


class Child:
    """A process in a session of its own, with a socket, a heartbeat page and shared descriptors.

    Args:
        target: A function of an `entry.Connection`: `module:name`, or, pickled by value where it belongs to
            a script or notebook, the function itself.
        what: The process in words, as `a worker process`.
        arguments: Plain values for the target (`Connection.arguments`).
        payload: Bytes for the target (`Connection.payload`).
        shared: Descriptors of memory or files that both have; they stay the caller's.
        output: Where standard output and error go: an `Output`, a descriptor, or nowhere.
        modules: What it finds imported: `LIGHT`, `TORCH`, or a tuple of your own.
        death_signal: What it gets when its owner dies; SIGTERM lets it end in order, None lets it live on.
        own_path: Whether it finds modules where the caller does; else only where Stoker and its packages are.
        load_main: Whether the caller's `__main__` is imported there as `__mp_main__`, as multiprocessing's
            spawn does: for data that was pickled by reference. Scripts then need `if __name__ == "__main__"`.

    Raises:
        ResourceError: No process or descriptor is left.
    """

    def __init__(  # noqa: PLR0913  all by name
        self,
        target: str | Target,
        *,
        what: str,
        arguments: Mapping[str, Any] | None = None,
        payload: bytes = b"",
        shared: Sequence[int] = (),
        output: Output | int | None = None,
        modules: tuple[str, ...] = TORCH,
        death_signal: signal.Signals | None = signal.SIGKILL,
        own_path: bool = True,
        load_main: bool = False,
    ) -> None:
        self.exit: ExitStatus | None = None
        """How it ended, once `ended` or `wait` has seen that."""
        # Counted before the start: a kill for memory may be this child's only if the count has risen since.
        self._oom_kills = oom_kills()
        self._closed = False
        self._output = output if isinstance(output, Output) else None
        pickled = b"" if isinstance(target, str) else cloudpickle.dumps(target)
        plan = {
            "target": target if isinstance(target, str) else "",
            "pickled_bytes": len(pickled),
            "arguments": dict(arguments or {}),
            "death_signal": int(death_signal or 0),
            "sys_path": [entry or _folder_name() for entry in sys.path] if own_path else None,
            "main": _main_of_caller() if load_main else None,
            **_inherited(),
        }
        try:
            with ExitStack() as undo:  # whatever fails, no descriptor of a process that never was stays open
                self._start(plan, pickled + payload, shared, output, modules, undo)
                undo.pop_all()
        except OSError as error:
            raise ResourceError(
                f"{what} cannot be started: {error}",
                hint="Use fewer workers, or raise the limits on open files and processes (ulimit -n, ulimit "
                "-u)",
            ) from error

    def _start(
        self,
        plan: dict[str, Any],
        payload: bytes,
        shared: Sequence[int],
        output: Output | int | None,
        modules: tuple[str, ...],
        undo: ExitStack,
    ) -> None:
        self.heartbeat = HeartbeatPage.create()
        undo.callback(self.heartbeat.close)
        self._stack_fd = anonymous_file("stoker-stack")
        undo.callback(os.close, self._stack_fd)
        self.socket, theirs = socket.socketpair()
        undo.enter_context(self.socket)
        with ExitStack() as passed, theirs:
            plan_fd = anonymous_file("stoker-plan")
            passed.callback(os.close, plan_fd)
            _write_all(plan_fd, pack(plan, payload))
            _write_all(plan_fd, payload)
            if isinstance(output, Output):
                output_fd = output.write_fd
            elif output is None:
                output_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                passed.callback(os.close, output_fd)
            else:
                output_fd = output
            folder_fd = _working_folder()
            passed.callback(os.close, folder_fd)
            own = (plan_fd, theirs.fileno(), self.heartbeat.fd, self._stack_fd, output_fd, folder_fd)
            self._process = _started((*own, *shared), modules)
        # If anything below fails, the caller has no object to stop the process with.
        undo.callback(self._process.signal, signal.SIGKILL)
        if self._output is not None:
            self._output.handed_over()
        self.pid = self._process.pid
        self.pidfd = self._process.pidfd
        """Readable when it has ended; -1 where the system has no such thing."""

    def request_stacks(self) -> None:
        """Have it write the stacks of its threads, which works while it hangs; see `stacks`."""
        self._process.signal(STACK_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks that it wrote, on request or in a crash."""
        return os.pread(self._stack_fd, os.fstat(self._stack_fd).st_size, 0).decode(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM to it alone."""
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it and to what it has started."""
        self._process.signal(signal.SIGKILL)
        if self.exit is None:  # so the number of its session is still its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Return True if it has ended; `exit` tells how from then on."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        if self.exit is None and self._process.poll(timeout_s):
            code = self._process.code()
            killed = code is None or code == -signal.SIGKILL
            self.exit = ExitStatus(code=code, out_of_memory=killed and oom_kills() > self._oom_kills)
        return self.exit is not None

    def stop(self, terminate_s: float, kill_s: float = 5.0) -> bool:
        """End it: SIGTERM and so much time, then SIGKILL and so much time.

        Returns:
            Whether it is gone. One that waits in the kernel for storage is not, and is left behind.
        """
        if terminate_s > 0 and not self.ended():
            self.terminate()
            self.wait(terminate_s)
        if not self.ended():
            self.kill()
        return self.wait(kill_s)

    def processor_s(self) -> float:
        """Return the processor time that it has used so far; 0 where the kernel does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user and kernel mode

    def memory(self) -> ProcessMemory:
        """Return the memory that it has to itself; zeros where the kernel does not say."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return ProcessMemory(bytes=0, peak_bytes=0)
        lines = (line.split() for line in status.splitlines() if line.startswith(("VmHWM:", "Rss")))
        sizes = {name: KIB * int(size) for name, size, *_ in lines}
        own = sizes.get("RssAnon:", 0)
        # The kernel notes the peak of all together; what is mapped of files and shared memory stays mapped.
        shared = sizes.get("RssFile:", 0) + sizes.get("RssShmem:", 0)
        return ProcessMemory(bytes=own, peak_bytes=max(own, sizes.get("VmHWM:", 0) - shared))

    def kernel_view(self) -> str:
        """Return its number, its state, and what it waits for in the kernel, in words."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            wchan = Path(f"/proc/{self.pid}/wchan").read_text() or "0"
        except OSError:
            return "process gone"
        lines = (line for line in status.splitlines() if line.startswith("State:"))
        state = next((line.split(None, 1)[1] for line in lines), "?")
        return f"process {self.pid}, state {state}" + (f", in {wchan}" if wchan != "0" else "")

    def tail(self) -> str:
        """Return the end of what it printed to its `Output`, or nothing."""
        return "" if self._output is None else self._output.tail(_TAIL_BYTES)

    def record(self, what: str) -> None:
        """Put down in its log what became of it, with the stacks that it wrote."""
        if self._output is not None:
            self._output.drain()
            self._output.append("\n".join(filter(None, (what, self.stacks()))) + "\n")

    def close(self) -> None:
        """Let its descriptors go, except its output's. Safe to call twice.

        Does not wait: one that has not ended may do so later, how is then unknown.
        """
        if self._closed:
            return
        self._closed = True
        self.socket.close()
        self.heartbeat.close()
        os.close(self._stack_fd)
        self._process.close()
        self.pidfd = -1


class LoggedChild(Child):
    """A `Child` that talks in frames, and whose output goes to a file.

    Args:
        target: What it runs, as `module:name`.
        shared: Descriptors of memory that both map; they stay the caller's.
        what: It in words, as `a worker process`.
        log: Where standard output and error go, and the stacks that it wrote before its end.
        drain: Takes in its output.
        modules: What it finds imported.
        death_signal: What it gets when we die.

    Raises:
        ResourceError: No process or descriptor is left.
    """

    def __init__(  # noqa: PLR0913  all by name
        self,
        target: str,
        shared: Sequence[int],
        *,
        what: str,
        log: Path,
        drain: Drain,
        modules: tuple[str, ...] = TORCH,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log = log
        self._drain = drain
        self._logged = Output(log)
        try:
            super().__init__(
                target,
                what=what,
                shared=shared,
                output=self._logged,
                modules=modules,
                death_signal=death_signal,
            )
        except BaseException:
            self._logged.close(keep=False)
            raise
        self.channel = Channel(self.socket)
        self._drain.add(self._logged)

    def abandon(self) -> None:
        """Let everything go but what tells of its end, which may never come."""
        self.channel.close()
        self._drain.remove(self._logged)
        self._logged.close(keep=True)

    def discard(self, *, keep_log: bool) -> None:
        """Let all descriptors go."""
        self.abandon()
        self._logged.close(keep=keep_log)
        self.close()


class _Process(Protocol):
    """A child as the kernel sees it, however it was started."""

    pid: int
    pidfd: int

    def signal(self, number: int) -> None: ...
    def poll(self, timeout_s: float) -> bool: ...
    def code(self) -> int | None: ...
    def close(self) -> None: ...


class _ForkedProcess:
    """A child of a preloaded process, which waits for it and says how it ended."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket) -> None:
        self.pid, self.pidfd, self._status = pid, pidfd, status

    def signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def poll(self, timeout_s: float) -> bool:
        if self.pidfd < 0:  # closed before its end, and left behind: its number alone tells
            return not Path(f"/proc/{self.pid}").exists()
        return is_readable(self.pidfd, timeout_s)

    def code(self) -> int | None:
        data = b""
        with suppress(OSError):  # also of a socket that is closed: how it ended is unknown
            self._status.settimeout(_STATUS_S)
            data = self._status.recv(64)
        self._status.close()  # its number may be another process's from now on
        return json.loads(data) if data else None

    def close(self) -> None:
        self._status.close()
        os.close(self.pidfd)
        self.pidfd = -1


def _started(fds: tuple[int, ...], modules: tuple[str, ...]) -> _Process:
    if start_method() == "fork":
        with suppress(NotPreloadedError):
            return _fork(fds, modules)
    return _spawn(fds)


def _fork(fds: tuple[int, ...], modules: tuple[str, ...]) -> _ForkedProcess:
    status, theirs = socket.socketpair()
    try:
        with theirs:
            pid, pidfd = preloaded(modules).fork((theirs.fileno(), *fds))
    except BaseException:
        status.close()
        raise
    return _ForkedProcess(pid, pidfd, status)


def _spawn(fds: tuple[int, ...]) -> SpawnedProcess:
    with ExitStack() as passed:
        moved: list[int] = []
        for fd in fds:  # standard descriptors may be closed here: none of these may have such a number
            moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            passed.callback(os.close, moved[-1])
        words = ["stoker.runtime.processes.preloaded", "run", str(os.getpid()), *map(str, moved)]
        return SpawnedProcess(
            [sys.executable, "-P", "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=moved[4],
            stderr=moved[4],
            pass_fds=moved,
            start_new_session=True,
        )


def _inherited() -> dict[str, Any]:
    """Return what a child of ours would inherit, for a process that is not one."""
    kinds = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
    return {
        "owner": os.getpid(),
        "environment": dict(os.environ),
        "umask": _umask(),
        "processors": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [],
        "limits": [(kind, resource.getrlimit(kind)) for kind in kinds],
    }


def _folder_name() -> str:
    """Return the working folder by name; one that was deleted has none."""
    with suppress(OSError):
        return str(Path.cwd())
    return os.sep


def _working_folder() -> int:
    try:
        return os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return os.open(os.sep, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _umask() -> int:
    """Return our umask, which Python can only read by setting it, under the eyes of other threads."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _main_of_caller() -> dict[str, str]:
    """Return where the caller's `__main__` comes from, as multiprocessing tells it its children."""
    found = spawn.get_preparation_data(threading.current_thread().name)
    return {name: value for name, value in found.items() if name.startswith("init_main")}


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
