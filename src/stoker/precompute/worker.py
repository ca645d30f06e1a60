"""One reader process seen from outside: start it, judge its progress, end it. Nothing here waits.

Nothing is asked of the reader to find out how it is: its heartbeat page, its pidfd and /proc tell.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from stoker.errors import ResourceError
from stoker.precompute.arena import Arena
from stoker.precompute.beat import Beat, BeatPage
from stoker.precompute.layout import Layout
from stoker.precompute.oom import oom_kills
from stoker.precompute.queue import GroupWork
from stoker.precompute.settings import Deadlines
from stoker.precompute.wire import Channel, Frame

DUMP_S = 0.15
"""How long a reader past its deadline gets to write its stack before it is killed."""

GRACE_S = 5.0
"""How long a killed reader may take to vanish before it counts as abandoned, stuck in the kernel."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A reader is gone, or as good as gone."""

    stage: str
    """Where it was."""
    number: int
    """The sample in hand, or -1."""
    cause: str
    """In words, with exit code or signal, or the deadline that passed."""


class Worker:
    """A reader process, its channel, arena and heartbeat page, and the groups it owes.

    Raises:
        ResourceError: No memory for its arena, no process or descriptor left, or no room for its log.
    """

    def __init__(self, number: int, launch: Launch) -> None:
        self.number = number
        self.state: Literal["starting", "ready", "dumping", "killed", "reaped"] = "starting"
        self.work: dict[int, GroupWork] = {}
        """Groups handed out and not yet delivered, by key, in the order of handing out."""
        self.items: deque[int] = deque()
        """The last key of each item handed out, oldest first."""
        self.held = 0
        """Filled slots that the caller has not given back."""
        self.delivering = False
        """It has read a sample."""
        self.log = launch.logs / f"reader-{number}-{os.getpid()}.txt"
        """Standard output and error of the process, and its stack if it was killed for hanging."""
        self.failed = False
        """It was lost; its log is kept."""
        self._oom_kills = oom_kills()
        try:
            self._start(launch)
        except OSError as error:
            raise ResourceError(
                f"a reader process cannot be started: {error}. Use fewer readers, or raise the limits on "
                "open files and processes (ulimit -n, ulimit -u)"
            ) from error
        self._since = time.monotonic()
        self._until = 0.0
        self._overdue: Loss | None = None
        self._seen = self.beat.look()
        self.channel.send(launch.frame, launch.payload)

    def _start(self, launch: Launch) -> None:
        with ExitStack() as undo:  # whatever fails, no descriptor of a reader that never was stays open
            self.arena = Arena.create(launch.layout)
            undo.callback(self.arena.close)
            self.beat = BeatPage.create()
            undo.callback(self.beat.close)
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs, self.log.open("wb", buffering=0) as output:
                self._process = _spawn(theirs.fileno(), self.beat.fd, self.arena.fd, output)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
            self.channel = Channel(ours)
            undo.pop_all()

    def ready(self) -> None:
        """It has unpickled the source."""
        if self.state == "starting":
            self.state = "ready"
        self.touch()

    def touch(self) -> None:
        """We have just heard from it or sent it something: its clock starts anew."""
        self._since = time.monotonic()

    def hand_out(self, works: list[GroupWork], absent: Callable[[GroupWork], list[int]]) -> None:
        """Send an item and remember that it is owed; `absent` names the members that are zeros."""
        for work in works:
            self.work[work.key] = work
        self.items.append(works[-1].key)
        groups = [[work.key, work.numbers.start, len(work.numbers), absent(work)] for work in works]
        self.channel.send({"kind": "work", "groups": groups})
        self.touch()

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.held -= 1
        if self.state in ("starting", "ready", "dumping"):
            self.channel.send({"kind": "free", "slot": slot})
            self.touch()

    def delivered(self, key: int) -> GroupWork | None:
        """A group has come whole; None if it was not owed."""
        if self.items and self.items[0] == key:
            self.items.popleft()
        return self.work.pop(key, None)

    def deadline(self, deadlines: Deadlines, slots: int) -> float | None:
        """When it must have moved, in `time.monotonic()` seconds; None while it owes nothing."""
        if self.state in ("dumping", "killed"):
            return self._until
        beat = self.beat.look()
        if self.state == "starting":
            return self._since + deadlines.start
        if beat.stage in ("open", "read"):
            return beat.time_ns / 1e9 + (deadlines.open if beat.stage == "open" else deadlines.read)
        if self.work and self.held < slots:  # it has work and room, and does not take it
            return max(beat.time_ns / 1e9, self._since) + deadlines.read
        return None

    def advance(self, deadlines: Deadlines, slots: int, now: float) -> Loss | None:
        """Take the next step against a reader past its deadline; the loss, at the moment it is killed."""
        due = self.deadline(deadlines, slots)
        if due is None or now < due:
            return None
        if self.state in ("starting", "ready"):
            self._begin_dump(deadlines, now)
            return None
        if self.state == "dumping":
            if self.beat.look().time_ns != self._seen.time_ns and self._overdue is not None:
                self.state = "ready" if self._overdue.stage != "start" else "starting"  # slow, not stuck
                self.touch()
                return None
            self.kill()
            self._until = now + GRACE_S
            return self._overdue
        return None

    def _begin_dump(self, deadlines: Deadlines, now: float) -> None:
        beat = self._seen = self.beat.look()
        stage = "start" if self.state == "starting" else beat.stage
        limit = getattr(deadlines, stage if stage != "wait" else "read")
        where = "waiting for work that it was given" if stage == "wait" else f'in stage "{stage}"'
        number = beat.number if stage in ("open", "read") else -1
        self._overdue = Loss(
            stage=stage,
            number=number,
            cause=f"reader {self.number} made no progress for {limit:g} s {where} ({self._kernel_view()})",
        )
        self._signal(signal.SIGUSR1)
        self.state = "dumping"
        self._until = now + DUMP_S

    def _kernel_view(self) -> str:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            wchan = Path(f"/proc/{self.pid}/wchan").read_text() or "0"
        except OSError:
            return "process gone"
        state = next(
            (line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:")), "?"
        )
        return f"process {self.pid}, state {state}" + (f", in {wchan}" if wchan != "0" else "")

    def kill(self) -> None:
        """SIGKILL, without waiting."""
        self._signal(signal.SIGKILL)
        self.state = "killed"

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def reap(self) -> bool:
        """Whether the process has ended; its exit code is collected then."""
        if self.state != "reaped" and self._process.poll() is not None:
            self.state = "reaped"
        return self.state == "reaped"

    def death(self) -> Loss:
        """The loss of a process that ended by itself, with exit code or signal and the end of its output."""
        code = self._process.returncode
        beat: Beat = self.beat.look()
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
                how += ", and the memory cgroup counts an out-of-memory kill"
        busy = beat.stage in ("open", "read")
        where = f' in stage "{beat.stage}"' if busy else ""
        tail = self.tail()
        cause = f"reader {self.number} (process {self.pid}) {how}{where}"
        return Loss(
            stage=beat.stage,
            number=beat.number if busy else -1,
            cause=cause + (f"; its last output: {tail.splitlines()[-1][:200]}" if tail else ""),
        )

    def tail(self) -> str:
        """The end of what the process wrote, or nothing."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Let descriptors go; the log stays if the reader was lost."""
        self.channel.close()
        self.arena.close()
        self.beat.close()
        os.close(self.pidfd)
        if not self.failed:
            self.log.unlink(missing_ok=True)


def _spawn(socket_fd: int, beat_fd: int, arena_fd: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a reader with three descriptors and nothing else of ours."""
    fds = (socket_fd, beat_fd, arena_fd)
    command = [sys.executable, "-P", "-m", "stoker.precompute.reader", *map(str, fds), str(os.getpid())]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds, start_new_session=True
    )
