"""How many readers: start with one, add while the encoder waits for data and another one helps."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW_S = 0.75
_WINDOW_GROUPS = 4
_WAITS_MUCH = 0.15
_GAIN = 1.05


@dataclass(slots=True, kw_only=True)
class Pace:
    """Decides from what it is told; asks no clock and starts nothing.

    A window of time ends when it is long enough and enough groups came through. A reader is added when the
    encoder spent more than 15 % of the window waiting, and the last addition raised the rate by 5 % or more.
    """

    most: int
    """Upper bound: cores, and what the memory in flight allows."""
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    groups: int = 0
    _rate: float = 0.0
    _settled: bool = False

    def step(self, waited_s: float, elapsed_s: float, groups: int) -> None:
        """Count what happened since the last call: time waited for readers, time in all, groups encoded."""
        self.waited_s += waited_s
        self.elapsed_s += elapsed_s
        self.groups += groups

    def another(self, readers: int) -> bool:
        """Whether to add a reader to the `readers` there are; ends the window if it is full."""
        if self._settled or readers >= self.most:
            return False
        if self.elapsed_s < _WINDOW_S or self.groups < _WINDOW_GROUPS * readers:
            return False
        rate, waits = self.groups / self.elapsed_s, self.waited_s / self.elapsed_s
        helped = rate >= self._rate * _GAIN
        self.restart()
        if waits <= _WAITS_MUCH:
            return False
        self._settled = not helped
        self._rate = rate
        return helped

    def settle(self) -> None:
        """Add no more: another reader did not start."""
        self._settled = True

    def restart(self) -> None:
        """Begin a new window, as when readers have just been started."""
        self.waited_s, self.elapsed_s, self.groups = 0.0, 0.0, 0
