"""How many readers: more while the encoder waits and another one helps, fewer while several are idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

_WINDOW_S = 0.75
_WINDOW_GROUPS = 4
_WAITS_MUCH = 0.15
_WAITS_LITTLE = 0.02
_GAIN = 1.05
_IDLE_READERS = 1.25
_SPARE_PROCESSOR = 0.25
_FIRST_REST = 8
_LONGEST_REST = 64

Change: TypeAlias = Literal[-1, 0, 1]


@dataclass(slots=True, kw_only=True)
class Pace:
    """Decides from what it is told; asks no clock and starts nothing.

    A window of time ends when it is long enough and enough groups came through. A reader is added when the
    encoder spent more than 15 % of the window waiting, and taken back when the next window was not 5 %
    faster: then this source gives no more, or something else is the limit. None is tried while this process
    and its readers use all processors: it would cost a start and bring nothing. One is taken away when the
    encoder hardly waited while more than one reader stood before a full arena. After a change that did not
    pay, the next trial comes 8 windows later, then 16, up to 64: a later file may be slower to read.
    """

    most: int
    """Upper bound: by cores, and by what the memory in flight allows."""
    processors: float = float("inf")
    """Processors that there are for us."""
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    idle_s: float = 0.0
    groups: int = 0
    _trial: Change = 0
    _before: float = 0.0
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def step(self, waited_s: float, elapsed_s: float, groups: int, idle: int = 0) -> None:
        """Count what happened since the last call.

        Args:
            waited_s: Time that the encoder waited for readers.
            elapsed_s: Time in all.
            groups: Groups encoded.
            idle: Readers that have filled all their slots.
        """
        self.waited_s += waited_s
        self.elapsed_s += elapsed_s
        self.idle_s += idle * elapsed_s
        self.groups += groups

    def full(self, readers: int) -> bool:
        """Whether the window is long enough to decide on."""
        return self.elapsed_s >= _WINDOW_S and self.groups >= _WINDOW_GROUPS * readers

    def change(self, readers: int, processor_s: float = 0.0) -> Change:
        """How many to add to the `readers` there are, or to do without; ends the window if it is full.

        Args:
            readers: At work.
            processor_s: Processor time used in the window, by this process and them.
        """
        if not self.full(readers):
            return 0
        spare = self.processors - processor_s / self.elapsed_s
        rate, waits, idle = (x / self.elapsed_s for x in (self.groups, self.waited_s, self.idle_s))
        self.restart()
        trial, self._trial = self._trial, 0
        self._rest = max(0, self._rest - 1)
        if trial > 0 and rate < self._before * _GAIN:
            return self._undo(-1)
        if trial < 0 and waits > _WAITS_MUCH and rate < self._before:
            return self._undo(1)
        if trial:
            self._next_rest = _FIRST_REST
        self._before = rate
        if waits > _WAITS_MUCH and readers < self.most and not self._rest and spare > _SPARE_PROCESSOR:
            self._trial = 1
        elif waits < _WAITS_LITTLE and idle > _IDLE_READERS and readers > 1 and not self._rest:
            self._trial = -1
        return self._trial

    def settle(self) -> None:
        """Try nothing for a long time: another reader did not start."""
        self._trial, self._rest, self._next_rest = 0, _LONGEST_REST, _LONGEST_REST

    def restart(self) -> None:
        """Begin a new window, as when readers have just been started."""
        self.waited_s = self.elapsed_s = self.idle_s = 0.0
        self.groups = 0

    def _undo(self, change: Change) -> Change:
        self._rest = self._next_rest
        self._next_rest = min(_LONGEST_REST, 2 * self._next_rest)
        return change
