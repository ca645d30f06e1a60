"""One process below a run: started, asked for its stacks, killed, collected. Nothing here waits for it.

Nothing is asked of the process to find out how it is: its pidfd, its heartbeat page and /proc tell.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import ResourceError
from stoker.precompute.layout import Layout
from stoker.runtime.processes.heartbeat import BeatPage
from stoker.runtime.processes.oom import oom_kills
from stoker.runtime.processes.output import Drain, Output
from stoker.runtime.processes.wire import Channel, Frame

_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What every reader of a run is started with."""

    payload: bytes
    """The source, pickled once."""
    frame: Frame
    """The rest of the start frame."""
    layout: Layout
    """Of each reader's arena."""
    logs: Path
    """Folder of the readers' output and stack dumps."""
    drain: Drain
    """Takes in their output."""


class Child:
    """A process in a session of its own, with a socket, a heartbeat page and a pipe for its output.

    Args:
        module: What it runs; its words: descriptors of socket, page, `shared` and stacks, and our number.
        shared: Descriptors of memory that both map; they stay the caller's.
        what: It in words, as `a reader process`.
        log: Where standard output and error go, and the stacks that it wrote before its end.
        drain: Takes in its output.

    Raises:
        ResourceError: No process or descriptor is left.
    """

    def __init__(self, module: str, shared: Sequence[int], *, what: str, log: Path, drain: Drain) -> None:
        self.log = log
        self._drain = drain
        self._oom_kills = oom_kills()
        try:
            with ExitStack() as undo:  # whatever fails, no descriptor of a process that never was stays open
                self._start(module, shared, undo)
                undo.pop_all()
        except OSError as error:
            raise ResourceError(
                f"{what} cannot be started: {error}. Use fewer readers, or raise the limits "
                "on open files and processes (ulimit -n, ulimit -u)"
            ) from error
        self._drain.add(self._output)

    def _start(self, module: str, shared: Sequence[int], undo: ExitStack) -> None:
        self.beat = BeatPage.create()
        undo.callback(self.beat.close)
        self._stack_fd = os.memfd_create("stoker-stack", os.MFD_CLOEXEC)
        undo.callback(os.close, self._stack_fd)
        self._output = Output(self.log)
        undo.callback(self._output.close, keep=False)
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs:
            fds = (theirs.fileno(), self.beat.fd, *shared, self._stack_fd)
            self._process = _spawn(module, fds, self._output.write_fd)
        undo.callback(self._process.kill)
        self._output.handed_over()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.channel = Channel(ours)

    def ask_for_stacks(self) -> None:
        """Its handler writes them without the interpreter's help."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL to it and to what it has started."""
        self._signal(signal.SIGKILL)
        if self._process.returncode is None:  # so the number of its session is still its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ended(self) -> bool:
        """Whether it is gone; its exit code is collected then."""
        return self._process.poll() is not None

    def processor_s(self) -> float:
        """Processor time that it has used so far; 0 where the kernel does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user and kernel mode

    def kernel_view(self) -> str:
        """Its number, its state, and what it waits for in the kernel."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            wchan = Path(f"/proc/{self.pid}/wchan").read_text() or "0"
        except OSError:
            return "process gone"
        lines = (line for line in status.splitlines() if line.startswith("State:"))
        state = next((line.split(None, 1)[1] for line in lines), "?")
        return f"process {self.pid}, state {state}" + (f", in {wchan}" if wchan != "0" else "")

    def death(self) -> str:
        """How it ended by itself: exit code or signal, and whether memory was short."""
        code = self._process.returncode
        if code >= 0:
            return f"exited with code {code}"
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
            how += ", and the memory cgroup counts an out-of-memory kill"
        return how

    def tail(self) -> str:
        """The end of what it printed, or nothing."""
        return self._output.tail(_TAIL_BYTES)

    def record(self, what: str) -> None:
        """Put down in its log what became of it, with the stacks that it wrote."""
        stacks = os.pread(self._stack_fd, os.fstat(self._stack_fd).st_size, 0).decode(errors="replace")
        self._output.drain()
        self._output.append("\n".join(filter(None, (what, stacks))) + "\n")

    def abandon(self) -> None:
        """Let everything go but what tells of its end, which may never come."""
        self.channel.close()
        self._drain.remove(self._output)
        self._output.close(keep=True)

    def close(self, *, keep_log: bool) -> None:
        """Let all descriptors go."""
        self.abandon()
        self._output.close(keep=keep_log)
        self.beat.close()
        os.close(self._stack_fd)
        os.close(self.pidfd)


def _spawn(module: str, fds: tuple[int, ...], output_fd: int) -> subprocess.Popen[bytes]:
    """Start a process with these descriptors, its output, and nothing else of ours."""
    command = [sys.executable, "-P", "-m", module, *map(str, fds), str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=fds,
        start_new_session=True,
    )
