"""What a run looks like while it goes on: one snapshot, and where it is shown.

A sink is anything with these few methods; `LineProgress` writes a line every ten seconds, `live.LiveProgress`
draws on a terminal. The engine takes a snapshot no more often than the sink asks for.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol

from stoker.precompute.parcel import ReaderView
from stoker.units import format_bytes, format_count, format_percent


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
    """A line every ten seconds, the first within two, so that a hang before the first group is seen."""

    def __init__(self, stream: IO[str], *, every_s: float = 10.0, first_s: float = 1.5) -> None:
        self._stream = stream
        self._every_s = every_s
        self._due = time.monotonic() + first_s

    @property
    def interval_s(self) -> float:
        """Half a second; most snapshots are passed over."""
        return 0.5

    def update(self, snapshot: Snapshot) -> None:
        """Write a line if one is due."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self.note(line(snapshot))

    def note(self, text: str) -> None:
        """Write a line now."""
        with suppress(OSError):  # a full disk below a log ends no run
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


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
