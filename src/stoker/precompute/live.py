"""The live view on a terminal: a bar, and a line for each reader, the encoder and the writer."""

from __future__ import annotations

from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.precompute.progress import Snapshot, clock
from stoker.units import MIB, format_bytes, format_count, format_percent, format_seconds

_READERS_SHOWN = 8


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
    """The view of one snapshot."""
    left = "" if snapshot.left_s is None else f"{clock(snapshot.left_s)} left"
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(snapshot.name, style="bold"),
        ProgressBar(total=max(snapshot.total, 1), completed=snapshot.done, width=38),
        f"{format_count(snapshot.done)}/{format_count(snapshot.total)}",
        f"{format_count(snapshot.rate)}/s",
        format_bytes(snapshot.written_bytes),
        left,
    )
    return Group(head, _readers(snapshot), Text(_encoder(snapshot)), *_failure(snapshot))


def _readers(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for view in snapshot.readers[:_READERS_SHOWN]:
        busy = view.stage in ("open", "read") or (view.name and view.stage == "encode")
        sample = f"sample {format_count(view.sample)}" if busy and view.sample >= 0 else ""
        if view.stage == "wait":
            sample = "(for work, or for room)"
        who = f"  {view.name or f'reader {view.number}'}" if view.number else "  this process"
        since = f"{view.seconds:.1f} s" if (busy and not view.name) or view.stage == "start" else ""
        table.add_row(who, view.stage, sample, since)
    if len(snapshot.readers) > _READERS_SHOWN:
        table.add_row(f"  and {len(snapshot.readers) - _READERS_SHOWN} more", "", "", "")
    return table


def _encoder(snapshot: Snapshot) -> str:
    group, (used, capacity) = snapshot.group, snapshot.shard_fill
    where = (
        f"samples {format_count(group.start)}-{format_count(group.stop - 1)}"
        if group
        else "waiting for the first"
    )
    return (
        f"  encoder {snapshot.device}   {where}, {format_seconds(snapshot.call_s)}   "
        f"busy {format_percent(snapshot.busy)}   writer  {used // MIB:,} of {capacity // MIB:,} MiB"
    )


def _failure(snapshot: Snapshot) -> list[Text]:
    if not snapshot.quarantined:
        return []
    return [
        Text(f"  {format_count(snapshot.quarantined)} quarantined: {snapshot.last_failure}", style="yellow")
    ]
