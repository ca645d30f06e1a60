"""One reader seen from outside: what it owes, whether it still moves, and what is done when it does not."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stoker.errors import ResourceError
from stoker.precompute.arena import Arena
from stoker.precompute.layout import Layout
from stoker.precompute.parcel import ReaderView
from stoker.precompute.patience import Patience
from stoker.precompute.process import Launch, LoggedChild
from stoker.precompute.queue import GroupWork
from stoker.precompute.settings import Deadlines
from stoker.runtime.processes.heartbeat import Beat

DUMP_S = 0.15
"""How long a reader past its deadline gets to write its stack before it is killed."""

GRACE_S = 5.0
"""How long a killed reader may take to vanish before it counts as abandoned, stuck in the kernel."""


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
    """A reader process and the groups it owes.

    Raises:
        ResourceError: No process or descriptor is left.
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
        self.failed = False
        """It was lost; its log is kept."""
        self.loss: Loss | None = None
        """Why it was killed."""
        self.until = 0.0
        """When it must have written its stack, or be gone; `time.monotonic()` seconds."""
        self.arena = _arena(launch.layout)
        log = launch.logs / f"reader-{number}-{os.getpid()}.txt"
        try:
            self.process = LoggedChild(
                "stoker.precompute.reader:serve",
                (self.arena.fd,),
                what="a reader process",
                log=log,
                drain=launch.drain,
                modules=launch.modules,
            )
        except BaseException:
            self.arena.close()
            raise
        self.channel, self.beat = self.process.channel, self.process.heartbeat
        self.channel.send(launch.frame, launch.payload)
        self._loaded = False
        self._since = self._moved = time.monotonic()
        self._overdue: Loss | None = None
        self._seen = self.beat.look()
        self._patience = Patience(self.process.pid)

    def ready(self) -> None:
        """It has unpickled the source."""
        self._loaded = True
        if self.state == "starting":
            self.state = "ready"
        self.touch()

    def view(self, now_ns: int) -> ReaderView:
        """Where it stands, by its own word; `now_ns` is `time.monotonic_ns()`."""
        beat = self.beat.look()
        seconds = max(0, now_ns - (beat.time_ns or now_ns)) / 1e9
        return ReaderView(
            number=self.number,
            stage=beat.stage,
            sample=beat.number,
            seconds=seconds,
            processor_s=self.process.processor_s(),
        )

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
        """When to look whether it has moved, in `time.monotonic()` seconds; None while it owes nothing."""
        if self.state in ("dumping", "killed"):
            return self.until
        clock = self._clock(deadlines, slots)
        return None if clock is None else self._patience.due(*clock)

    def _clock(self, deadlines: Deadlines, slots: int) -> tuple[float, float] | None:
        """Since when it has not moved, by its own word, and how long it may stay so."""
        beat = self.beat.look()
        if beat != self._seen:  # whatever a page holds that was scribbled over, it cannot have moved later
            self._seen = beat
            self._moved = min(beat.time_ns / 1e9, time.monotonic())
        if self.state == "starting":
            return self._since, deadlines.start
        if beat.stage in ("open", "read"):
            return self._moved, deadlines.open if beat.stage == "open" else deadlines.read
        if self.work and self.held < slots:  # it has work and room, and does not take it
            return max(self._moved, self._since), deadlines.read
        return None

    def advance(self, deadlines: Deadlines, slots: int, now: float) -> Loss | None:
        """Take the next step against a reader past its deadline; the loss, at the moment it is killed."""
        if self.state in ("starting", "ready"):
            clock = self._clock(deadlines, slots)
            if clock is None or now < self._patience.due(*clock):
                return None
            if self._patience.overdue(clock[1], now):
                self._ask_for_stacks(self._seen, clock[1], now)
        elif self.state == "dumping" and now >= self.until:
            if self.beat.look() == self._seen and self._overdue is not None:
                return self.dismiss(self._overdue)
            self.state = "ready" if self._loaded else "starting"  # slow, not stuck
            self.touch()
        return None

    def _ask_for_stacks(self, beat: Beat, limit_s: float, now: float) -> None:
        stage = "start" if self.state == "starting" else beat.stage
        where = "waiting for work that it was given" if stage == "wait" else f'in stage "{stage}"'
        self._overdue = Loss(
            stage=stage,
            number=beat.number if stage in ("open", "read") else -1,
            cause=f"reader {self.number} made no progress for {limit_s:g} s {where} "
            f"({self.process.kernel_view()})",
        )
        self.process.request_stacks()
        self.state, self.until = "dumping", now + DUMP_S

    def dismiss(self, loss: Loss | None = None) -> Loss | None:
        """Kill it, without waiting; what is left of its clock is the time to vanish."""
        self.process.kill()
        self.state, self.until, self.loss = "killed", time.monotonic() + GRACE_S, loss
        return loss

    def reap(self) -> bool:
        """Whether the process has ended; its exit code is collected then."""
        if self.state != "reaped" and self.process.ended():
            self.state = "reaped"
        return self.state == "reaped"

    def death(self) -> Loss:
        """The loss of a process that ended by itself, with exit code or signal and the end of its output."""
        beat = self.beat.look()
        busy = beat.stage in ("open", "read")
        where = f' in stage "{beat.stage}"' if busy else ""
        tail = self.process.tail()
        cause = f"reader {self.number} (process {self.process.pid}) {self.process.exit}{where}"
        return Loss(
            stage=beat.stage,
            number=beat.number if busy else -1,
            cause=cause + (f"; its last output: {tail.splitlines()[-1][:200]}" if tail else ""),
        )

    def close(self) -> None:
        """Let descriptors go; the log stays if the reader was lost."""
        self.arena.close()
        self.process.discard(keep_log=self.failed)


def _arena(layout: Layout) -> Arena:
    try:
        return Arena.create(layout)
    except OSError as error:
        raise ResourceError(
            f"no descriptor or address is left for a reader's arena: {error}. Use fewer readers, or raise "
            "the limits (ulimit -n, ulimit -v)"
        ) from error
