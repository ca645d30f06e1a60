"""A training run as it goes on: one screen on a terminal, a line every ten seconds without one.

Both are drawn from the events of the training loop alone. The picture is made by `draw`, a pure function of
`Screen`; so what is on the screen can be tested without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.schema import Json
from stoker.train.config import EventSink
from stoker.units import format_count, format_percent, format_seconds

LINE_S = 10.0
"""Seconds between two lines without a terminal."""
BAR = 28
"""Columns of a bar."""
PARTS = ("fetch", "read", "gather", "copy", "transform", "wait")


@dataclass(slots=True, kw_only=True)
class Screen:
    """What is known of a run; filled by its events."""

    name: str = ""
    tiers: dict[str, int] = field(default_factory=dict[str, int])
    """Records per tier, as planned."""
    reason: str = ""
    """Why."""
    step: int = 0
    total: int = 0
    epoch: int = 0
    loss: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The last interval of the meter."""
    left_s: float | None = None
    """Seconds to go; None before the pace is known."""
    error: float | None = None
    """Validation error of the last epoch."""

    def take(self, kind: str, facts: Mapping[str, Json], elapsed_s: float, done: int) -> None:
        """Take in one event; `done` steps were done by this process in `elapsed_s`."""
        known = cast("Mapping[str, Any]", facts)
        if kind == "serve":
            self.tiers, self.reason, self.name = known["tiers"], known["reason"], known["name"]
        elif kind in ("start", "stage"):
            self.step, self.total = known["step"], known["total"]
        elif kind == "step":
            self.step, self.loss, self.epoch = known["step"], known["loss"], known["epoch"]
        elif kind == "stall":
            self.step, self.epoch, self.last = known["step"], known["epoch"], known
            self.left_s = (self.total - self.step) * elapsed_s / done if done else None
        elif kind == "epoch":
            self.error = known.get("val_nrmse")

    @property
    def rate(self) -> float:
        """Examples a second in the last interval."""
        spent_s = self.last.get("wait_s", 0.0) + self.last.get("step_s", 0.0)
        return self.last.get("examples", 0) / spent_s if spent_s else 0.0

    def parts(self) -> dict[str, float]:
        """What was waited for in the last interval, as parts of its wall time."""
        spent_s = self.last.get("wait_s", 0.0) + self.last.get("step_s", 0.0)
        found = self.last.get("parts", {})
        return {part: found.get(part, 0.0) / spent_s if spent_s else 0.0 for part in PARTS}


def draw(screen: Screen) -> Group:
    """One screen: how far, how fast, waiting for what, and from where it is served."""
    head = Table.grid(padding=(0, 2))
    left = "" if screen.left_s is None else f"{format_seconds(screen.left_s)} left"
    head.add_row(
        Text(screen.name or "train", style="bold"),
        ProgressBar(total=max(1, screen.total), completed=screen.step, width=BAR),
        f"step {format_count(screen.step)} of {format_count(screen.total)}",
        f"epoch {screen.epoch}",
        left,
    )
    figures = [f"{format_count(screen.rate)} samples/s"]
    figures += [] if screen.loss is None else [f"loss {screen.loss:.3g}"]
    figures += [] if screen.error is None else [f"NRMSE {screen.error:.3g}"]
    lost = screen.last.get("lost")
    figures += [] if lost is None else [f"{format_percent(lost)} below its compute-only ceiling"]
    return Group(head, Text("  " + " · ".join(figures)), _waits(screen), _tiers(screen), _reason(screen))


def _waits(screen: Screen) -> RenderableType:
    stall = screen.last.get("stall")
    table = Table.grid(padding=(0, 2))
    if stall is None:
        return Text("  stall  measured in a moment", style="dim")
    colour = "green" if stall < 0.02 else "yellow" if stall < 0.1 else "red"
    figure = Text(format_percent(stall), style=colour)
    table.add_row("  stall ", _bar(stall, colour), figure, " · ".join(_said(screen)))
    return table


def _said(screen: Screen) -> list[str]:
    """Parts of the wait that are worth a word."""
    return [f"{part} {format_percent(value)}" for part, value in screen.parts().items() if value >= 0.0005]


def _tiers(screen: Screen) -> Table:
    """A bar per tier: the share of examples that it serves now, and the records that are meant for it."""
    served = cast("Mapping[str, int]", screen.last.get("tiers", {}))
    total = sum(served.values())
    table = Table.grid(padding=(0, 2))
    for tier, records in screen.tiers.items():
        share = served.get(tier, 0) / total if total else 0.0
        if records or share:
            meant = format_count(records, "record")
            table.add_row(f"  {tier:<6}", _bar(share, "blue"), format_percent(share) + " of batches", meant)
    return table


def _reason(screen: Screen) -> RenderableType:
    return Padding(Text(screen.reason, style="dim"), (0, 0, 0, 2)) if screen.reason else Text("")


def _bar(fraction: float, style: str) -> ProgressBar:
    done = min(1.0, fraction)
    return ProgressBar(total=1.0, completed=done, width=BAR, complete_style=style, finished_style=style)


def line(screen: Screen) -> str:
    """The same in one line."""
    parts = [f"step {format_count(screen.step)} of {format_count(screen.total)}"]
    parts += [f"{format_count(screen.rate)} samples/s"]
    parts += [] if screen.loss is None else [f"loss {screen.loss:.3g}"]
    waits = _said(screen)
    stall = format_percent(screen.last.get("stall", 0.0))
    parts.append(f"stall {stall}" + (f" ({', '.join(waits)})" if waits else ""))
    served = cast("Mapping[str, int]", screen.last.get("tiers", {}))
    if served:
        parts.append(f"{max(served, key=lambda tier: served[tier])} tier")
    parts += [] if screen.left_s is None else [f"{format_seconds(screen.left_s)} left"]
    return " · ".join(parts)


class Watcher:
    """Listens to the training loop and shows it; `listen` is the `EventSink`."""

    def __init__(
        self,
        say: Callable[[str], None],
        show: Callable[[Screen], None] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` draws a screen; None: `say` gets a line every `LINE_S` instead."""
        self._screen = Screen()
        self._say = say
        self._show = show
        self._clock = clock
        self._begun_s = clock()
        self._first = 0
        self._due_s = clock() + LINE_S

    def listen(self, kind: str, facts: Mapping[str, Json]) -> None:
        """Take in one event, and show what is due."""
        now_s = self._clock()
        if kind in ("start", "stage"):
            self._begun_s, self._first = now_s, cast(int, facts["step"])
        done = cast(int, facts["step"]) - self._first if kind == "stall" else 0
        self._screen.take(kind, facts, now_s - self._begun_s, done)
        if self._show is not None:
            if kind in ("serve", "start", "stage", "stall", "epoch"):
                self._show(self._screen)
        elif kind == "stall" and now_s >= self._due_s:
            self._due_s = now_s + LINE_S
            self._say(line(self._screen))


@contextmanager
def watching(console: Console, say: Callable[[str], None], *, live: bool) -> Generator[EventSink]:
    """Show a run while the block lasts; what is printed meanwhile appears above the screen.

    Args:
        console: Where the screen is drawn.
        say: Prints one line.
        live: Draw a screen; else lines.
    """
    if not live:
        yield Watcher(say, None).listen
        return
    view = Live(console=console, auto_refresh=False, transient=True)

    def show(screen: Screen) -> None:
        view.start()  # not before training: what encodes has a screen of its own
        view.update(draw(screen), refresh=True)

    try:
        yield Watcher(say, show).listen
    finally:
        view.stop()
