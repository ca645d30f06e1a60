"""What a run looks like while it goes on: one snapshot, and where it is shown.

A sink is anything with these few methods; `LineProgress` writes a line every ten seconds, `live.LiveProgress`
draws on a terminal. The engine takes a snapshot no more often than the sink asks for.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol

from stoker.precompute.parcel import ReaderView
from stoker.units import format_bytes, format_count, format_percent

_RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    name: str
    """The cache's name."""
    total: int
    """Samples of the source."""
    done: int
    """Samples stored or set aside, with those from earlier runs."""
    encoded: int
    """Samples that this run encoded."""
    seconds: float
    """Since the run began."""
    rate: float
    """Samples a second over the last while; 0 until the first is done."""
    written_bytes: int
    """Bytes of records made by this run."""
    readers: tuple[ReaderView, ...]
    """What each reader is doing."""
    device: str
    """Where the encoder runs."""
    group: range
    """Samples that the encoder has in hand, or had last."""
    call_s: float
    """Mean time of one encoder call."""
    busy: float
    """Fraction of the time since the first group that the encoder was working."""
    shard_fill: tuple[int, int]
    """Bytes in the open shard, and its capacity."""
    quarantined: int
    """Samples set aside in this cache."""
    last_failure: str = ""
    """The latest of them in words."""

    @property
    def left_s(self) -> float | None:
        """Seconds to go at this rate; None before there is one."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


class Rate:
    """Samples a second over the last ten seconds, or over the last two groups where these took longer.

    >>> rate = Rate(0.0)
    >>> [round(rate(now, done), 2) for now, done in ((0, 0), (20, 8), (40, 16), (50, 16), (60, 24))]
    [0.0, 0.4, 0.4, 0.32, 0.4]
    """

    def __init__(self, begun_s: float) -> None:
        self._history: deque[tuple[float, int]] = deque([(begun_s, 0)])

    def __call__(self, now_s: float, done: int) -> float:
        """The rate when `done` samples were done at `now_s`."""
        history = self._history
        if done != history[-1][1]:
            history.append((now_s, done))
        while len(history) > 3 and now_s - history[1][0] > _RATE_WINDOW_S:
            history.popleft()
        then_s, before = history[0]
        return (done - before) / (now_s - then_s) if now_s > then_s else 0.0


class ProgressSink(Protocol):
    """Shows snapshots."""

    @property
    def interval_s(self) -> float:
        """How often it wants one."""
        ...

    def update(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""
        ...

    def note(self, text: str) -> None:
        """Say something that happened."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class LineProgress:
    """A line every ten seconds, the first within two, so that a hang before the first group is seen.

    Where there was one, the last line says what the run came to.
    """

    def __init__(self, stream: IO[str], *, every_s: float = 10.0, first_s: float = 1.5) -> None:
        self._stream = stream
        self._every_s = every_s
        self._due = time.monotonic() + first_s
        self._said = False
        self._last: Snapshot | None = None

    @property
    def interval_s(self) -> float:
        """Half a second; most snapshots are passed over."""
        return 0.5

    def update(self, snapshot: Snapshot) -> None:
        """Write a line if one is due."""
        self._last = snapshot
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self._said = True
            self.note(line(snapshot))

    def note(self, text: str) -> None:
        """Write a line now."""
        with suppress(OSError):  # a full disk below a log ends no run
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Write the last line; a run that was short enough has said nothing, and ends so."""
        if self._said and self._last is not None:
            self.note(outcome(self._last))


def outcome(snapshot: Snapshot) -> str:
    """What a run came to, in one line."""
    reused, aside = snapshot.done - snapshot.quarantined - snapshot.encoded, snapshot.quarantined
    return (
        f"{snapshot.name}  {format_count(snapshot.encoded)} of {format_count(snapshot.total)} encoded"
        f"{f', {format_count(reused)} reused' if reused > 0 else ''}"
        f"{f', {format_count(aside)} quarantined' if aside else ''}, {clock(snapshot.seconds)}"
    )


def line(snapshot: Snapshot) -> str:
    """A snapshot in one line."""
    left = "" if snapshot.left_s is None else f" · {clock(snapshot.left_s)} left"
    stages = ", ".join(describe(view) for view in snapshot.readers)
    aside = f" · {format_count(snapshot.quarantined)} quarantined" if snapshot.quarantined else ""
    return (
        f"{snapshot.name}  {format_count(snapshot.done)}/{format_count(snapshot.total)} · "
        f"{format_count(snapshot.rate)}/s · {format_bytes(snapshot.written_bytes)}{left} · "
        f"encoder busy {format_percent(snapshot.busy)}{aside}" + (f" · {stages}" if stages else "")
    )


def describe(view: ReaderView) -> str:
    """One reader in a few words.

    >>> describe(ReaderView(number=2, stage="read", sample=7428, seconds=0.42))
    'reader 2 read sample 7,428 0.4 s'
    """
    if view.name:
        return f"{view.name} {view.stage}"
    who = f"reader {view.number}" if view.number else "this process"
    what = (
        f" sample {format_count(view.sample)}" if view.sample >= 0 and view.stage in ("open", "read") else ""
    )
    return f"{who} {view.stage}{what}" + (f" {view.seconds:.1f} s" if view.number else "")


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(84), clock(3700)
    ('0:01:24', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def automatic(stream: IO[str] | None = None) -> ProgressSink:
    """A live view when `stream` (standard error) is a terminal, else lines."""
    out = sys.stderr if stream is None else stream
    if out.isatty():
        from stoker.precompute.live import LiveProgress

        return LiveProgress(out)
    return LineProgress(out)
