"""Progress of a run at a moment, and where it is shown.

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

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.units import MIB, format_bytes, format_count, format_percent, format_seconds

_RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """Activity of a worker, for progress displays."""

    number: int
    """Counted from 1 in order of starting."""
    stage: str
    """`start`, `open`, `read` or `wait`; of a node also `prepare` and `encode`."""
    sample: int
    """Sample in hand, or -1."""
    seconds: float
    """Time since its last sign of life."""
    processor_s: float = 0.0
    """Processor time that it has used so far."""
    name: str = ""
    """What it is called in place of `worker` and its number: a node that reads and encodes."""


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
    workers: tuple[WorkerView, ...]
    """What each worker is doing."""
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
    adopted: int = 0
    """Records that another cache of the folder had."""
    caches: int = 1
    """Caches that are filled in one pass; with several, all counts are of the records of all of them."""

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
        """Return the rate when `done` samples were done at `now_s`."""
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
        """Return how often it wants one."""
        ...

    def update(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""
        ...

    def note(self, text: str) -> None:
        """Say something that happened."""
        ...

    def close(self) -> None:
        """End the display: the run is over."""
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
    """Return what a run came to, in one line."""
    aside, adopted = snapshot.quarantined, snapshot.adopted
    reused = snapshot.done - aside - snapshot.encoded - adopted
    return (
        f"{snapshot.name}  {format_count(snapshot.encoded)} of {_total(snapshot)} encoded"
        f"{f', {format_count(adopted)} adopted' if adopted else ''}"
        f"{f', {format_count(reused)} reused' if reused > 0 else ''}"
        f"{f', {format_count(aside)} quarantined' if aside else ''}, {clock(snapshot.seconds)}"
    )


def _total(snapshot: Snapshot) -> str:
    """Return how many samples there are, or of several caches how many records."""
    several = f" records of {snapshot.caches} caches" if snapshot.caches > 1 else ""
    return f"{format_count(snapshot.total)}{several}"


def line(snapshot: Snapshot) -> str:
    """Return a snapshot in one line."""
    left = "" if snapshot.left_s is None else f" · {clock(snapshot.left_s)} left"
    stages = ", ".join(describe(view) for view in snapshot.workers)
    aside = f" · {format_count(snapshot.quarantined)} quarantined" if snapshot.quarantined else ""
    busy = f" · encoder busy {format_percent(snapshot.busy)}" if snapshot.call_s else ""
    return (
        f"{snapshot.name}  {format_count(snapshot.done)}/{_total(snapshot)} · "
        f"{format_count(snapshot.rate)}/s · {format_bytes(snapshot.written_bytes)}{left}"
        f"{busy}{aside}" + (f" · {stages}" if stages else "")
    )


_DOING = {
    "start": "starting",
    "prepare": "preparing",
    "open": "opening",
    "read": "reading",
    "wait": "waiting",
    "encode": "encoding",
}


def describe(view: WorkerView) -> str:
    """Return one worker in a few words.

    >>> describe(WorkerView(number=2, stage="read", sample=7428, seconds=0.42))
    'worker 2 reading sample 7,428 for 0.4 s'
    """
    doing = _DOING.get(view.stage, view.stage)
    if view.name:
        return f"{view.name} {doing}"
    who = f"worker {view.number}" if view.number else "this process"
    what = (
        f" sample {format_count(view.sample)}" if view.sample >= 0 and view.stage in ("open", "read") else ""
    )
    return f"{who} {doing}{what}" + (f" for {view.seconds:.1f} s" if view.number else "")


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> clock(84), clock(3700)
    ('0:01:24', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def automatic(stream: IO[str] | None = None) -> ProgressSink:
    """Return a live view when `stream` (standard error) is a terminal, else lines."""
    out = sys.stderr if stream is None else stream
    if out.isatty():
        return LiveProgress(out)
    return LineProgress(out)


# ----------------------------------------------------------------------------------------------------------
# The live view on a terminal: a bar, and a line for each worker, the encoder and the writer.


_WORKERS_SHOWN = 8


class LiveProgress:
    """Draws snapshots in place; whatever else is printed meanwhile appears above."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    @property
    def interval_s(self) -> float:
        """Five times a second."""
        return 0.2

    def update(self, snapshot: Snapshot) -> None:
        """Draw a snapshot."""
        self._live.update(draw(snapshot), refresh=True)

    def note(self, text: str) -> None:
        """Print above the view."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Take the view away."""
        self._live.stop()


def draw(snapshot: Snapshot) -> Group:
    """Return the view of one snapshot."""
    left = "" if snapshot.left_s is None else f"{clock(snapshot.left_s)} left"
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(snapshot.name, style="bold"),
        ProgressBar(total=max(snapshot.total, 1), completed=snapshot.done, width=38),
        f"{format_count(snapshot.done)}/{_total(snapshot)}",
        f"{format_count(snapshot.rate)}/s",
        format_bytes(snapshot.written_bytes),
        left,
    )
    return Group(head, _workers(snapshot), Text(_encoder(snapshot)), *_failure(snapshot))


def _workers(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for view in snapshot.workers[:_WORKERS_SHOWN]:
        busy = view.stage in ("open", "read") or (view.name and view.stage == "encode")
        sample = f"sample {format_count(view.sample)}" if busy and view.sample >= 0 else ""
        if view.stage == "wait":
            sample = "(for work, or for room)"
        who = f"  {view.name or f'worker {view.number}'}" if view.number else "  this process"
        since = f"{view.seconds:.1f} s" if (busy and not view.name) or view.stage == "start" else ""
        table.add_row(who, _DOING.get(view.stage, view.stage), sample, since)
    if len(snapshot.workers) > _WORKERS_SHOWN:
        table.add_row(f"  and {len(snapshot.workers) - _WORKERS_SHOWN} more", "", "", "")
    return table


def _encoder(snapshot: Snapshot) -> str:
    group, (used, capacity) = snapshot.group, snapshot.shard_fill
    where = (
        f"samples {format_count(group.start)}-{format_count(group.stop - 1)}"
        if group
        else "waiting for the first"
    )
    encoder = (
        f"  encoder {snapshot.device}   {where}, {format_seconds(snapshot.call_s)}   "
        f"busy {format_percent(snapshot.busy)} "
    )
    writer = f"  writer  {used // MIB:,} of {capacity // MIB:,} MiB"
    return encoder + writer if snapshot.call_s else writer


def _failure(snapshot: Snapshot) -> list[Text]:
    if not snapshot.quarantined:
        return []
    return [
        Text(f"  {format_count(snapshot.quarantined)} quarantined: {snapshot.last_failure}", style="yellow")
    ]
