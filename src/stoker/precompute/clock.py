"""Where the encoder stands: for the watchdog, the progress display, and a guardian if there is one."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.errors import StalledError
from stoker.precompute.guarded import guard_page
from stoker.runtime.processes.heartbeat import BeatPage


@dataclass(slots=True)
class EncodeClock:
    """Time inside the encoder."""

    limit_s: float = 0.0
    """Seconds within which the encoder, or the loop around it, must move; 0: not bounded."""
    lanes: int = 1
    """Encoders that work at the same time."""
    seconds: float = 0.0
    calls: int = 0
    begun: float | None = None
    """`time.monotonic()` when the present call began, or None."""
    numbers: range = field(default_factory=lambda: range(0))
    """The group in hand."""
    lost: bool = False
    """The device cannot be used again in this process; the last thing a guardian is told."""
    given_up: bool = False
    """Nobody waits for the encoder any more: no further call of it may begin."""
    told: bool = True
    """Whether a guardian is told at all: its page has room for what one thread does."""

    @contextmanager
    def starting(self, limit_s: float) -> Generator[None]:
        """The encoder is tried, or brought to its device, which may hang as a call of it may."""
        self.begun = time.monotonic()
        page = self._page()
        if page is not None:
            page.write("start", limit_s=limit_s)
        try:
            yield
        finally:
            self.begun = None
            self.alive(bounded=False)

    def begin(self) -> None:
        """A call of the encoder begins.

        Raises:
            StalledError: Nobody waits for it any more.
        """
        if self.given_up:
            raise StalledError("the call was given up")
        self.begun = time.monotonic()
        self._tell("encode")

    def end(self) -> None:
        """It has returned or raised."""
        if self.begun is not None:
            self.seconds += time.monotonic() - self.begun
        self.calls += 1
        self.begun = None
        self._tell("wait", groups=1)

    def alive(self, *, bounded: bool) -> None:
        """The loop of the run goes round; `bounded`: its next round will take no longer than `limit_s`."""
        self._tell("wait", bounded=bounded)

    def give_up(self) -> None:
        """Whoever called the encoder has left: it makes no further call, and is not to be touched."""
        self.given_up = True

    def lose_device(self) -> None:
        """The device cannot be used again in this process."""
        self._tell("lost")
        self.lost = True

    def _tell(self, stage: str, *, groups: int = 0, bounded: bool = True) -> None:
        page = self._page()
        if page is not None and not self.lost:
            number = self.numbers.start if stage != "wait" else -1
            limit_s = self.limit_s if bounded else 0.0
            page.write(stage, number, done=groups, limit_s=limit_s)

    def _page(self) -> BeatPage | None:
        return guard_page() if self.told else None
