"""Draw the curves of a run: training loss, validation errors and persistence, stall."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from stoker.runtime.files import replacing
from stoker.units import format_percent

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Points: TypeAlias = Sequence[tuple[int, float]]

MARGIN = 1.3
"""Factor between the curves and the ends of a logarithmic axis: what hardly changes looks flat."""
BLUE, ORANGE, GREY, TEXT = "#1f6fb4", "#d9731a", "#9aa5b1", "#24313f"
TASKS = (BLUE, ORANGE, "#3a8f5c", "#8a5bb0", "#b0413e", "#5b6b78")
"""Colours of tasks, where there are several; with more of them they come again."""
OF_TASK = "val_nrmse/"
"""How the error of one task of several begins; `judge.py` writes them."""
STALL_TOPS = (10, 25, 50, 100)
"""Ends of the stall's axis in per cent: the first that holds all of it, so that a small stall looks small."""


def draw_curves(rows: Rows, path: Path) -> None:
    """Write a PNG from the lines of `metrics.jsonl`; works without a display and leaves pyplot alone."""
    # Here because it takes half a second, and most runs are longer.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04)
    for axes, draw in zip(figure.subplots(1, 3), _panels(rows), strict=True):
        _prepare(axes)
        draw(axes)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def curves_as_svg(rows: Rows) -> list[str]:
    """The same three as SVG without a background, their text in the colour of the page around them."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn: list[str] = []
    for number, draw in enumerate(_panels(rows)):
        figure: Any = Figure(figsize=(4.4, 3.3), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        _prepare(axes)
        draw(axes)
        text = io.StringIO()
        # Names within the picture must differ from those of the others on the page.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": str(number), "font.family": "sans-serif"}):
            about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=about)
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r'\bid="([\w.]+_\d+)"', rf'id="{number}-\1"', svg)
        for ink in (TEXT, "#000000", "#262626"):
            svg = svg.replace(ink, "currentColor")
        drawn.append(svg)
    return drawn


def _panels(rows: Rows) -> tuple[Callable[[Any], None], ...]:
    """What draws each of the three pictures."""
    steps = [row for row in rows if row.get("kind") == "step"]
    epochs = [row for row in rows if row.get("kind") == "epoch"]
    return (
        lambda axes: _draw_loss(axes, steps, epochs),
        lambda axes: _draw_errors(axes, epochs),
        lambda axes: _draw_stall(axes, epochs),
    )


def _prepare(axes: Any) -> None:
    axes.tick_params(which="both", labelsize=8, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(which="major", color=GREY, alpha=0.25, linewidth=0.6)


def _draw_loss(axes: Any, steps: Rows, epochs: Rows) -> None:
    """Loss over steps: between two lines of the log, and over each epoch."""
    _label(axes, "training loss: error² / (change in a step)²", "step")
    _line(
        axes, _points(steps, "step", "loss"), BLUE, "recent steps", alpha=0.4, linewidth=1.0, markersize=0.0
    )
    _line(axes, _points(epochs, "step", "loss"), BLUE, "epoch")
    _logarithmic(axes)
    _whole_numbers(axes, 0, max((row["step"] for row in [*steps, *epochs]), default=0))


def _draw_errors(axes: Any, epochs: Rows) -> None:
    """Validation errors, each with its own persistence as a dashed line of the same colour; of several tasks
    those of one step.
    """
    measured = any(_points(epochs, "epoch", "val_nrmse"))
    _label(axes, "validation NRMSE" if measured else "validation NRMSE: not measured", "epoch")
    tasks = list(
        dict.fromkeys(name[len(OF_TASK) :] for row in epochs for name in row if name.startswith(OF_TASK))
    )
    for name, persistence, label, color in [
        (f"{OF_TASK}{task}", f"persistence_nrmse/{task}", task, TASKS[place % len(TASKS)])
        for place, task in enumerate(tasks)
    ] or [
        ("val_nrmse", "persistence_nrmse", "one step", BLUE),
        ("rollout_nrmse", "rollout_persistence_nrmse", "roll-out", ORANGE),
    ]:
        _line(axes, _points(epochs, "epoch", name), color, label)
        for _, still in _points(epochs, "epoch", persistence)[-1:]:  # it is the same in every epoch
            dashed = {"linestyle": "--", "linewidth": 1.2, "alpha": 0.8}
            axes.axhline(still, color=color, label=f"{label}, persistence", **dashed)
    _logarithmic(axes)
    _whole_numbers(axes, 1, max((row["epoch"] for row in epochs), default=1))


def _draw_stall(axes: Any, epochs: Rows) -> None:
    """The part of each epoch's time that was waited for data."""
    points = _points(epochs, "epoch", "stall", least=-1.0)
    percent = [(epoch, 100 * stall) for epoch, stall in points]
    _label(axes, "stall: not measured", "epoch")
    if points:
        mean = sum(stall for _, stall in points) / len(points)
        axes.set_title(f"stall: {format_percent(mean)} of the time", fontsize=10, loc="left", color=TEXT)
        axes.fill_between(*zip(*percent, strict=True), color=BLUE, alpha=0.12, linewidth=0)
    _line(axes, percent, BLUE, "")
    highest = max((stall for _, stall in percent), default=0.0)
    axes.set_ylim(0, next(top for top in STALL_TOPS if highest <= top))
    axes.yaxis.set_major_formatter("{x:g} %")
    _whole_numbers(axes, 1, max((row["epoch"] for row in epochs), default=1))


def _points(rows: Rows, x: str, y: str, *, least: float = 0.0) -> Points:
    """`(x, y)` of the rows that have `y` above `least`: a logarithmic axis has no place for 0."""
    return [(row[x], row[y]) for row in rows if row.get(y) is not None and row[y] > least]


def _line(axes: Any, points: Points, color: str, label: str, **style: float) -> None:
    """A line; each point has a mark while there are few of them."""
    if points:
        size = 3.0 if len(points) <= 40 else 0.0
        shown: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": size, **style}
        axes.plot(*zip(*points, strict=True), color=color, label=label or None, **shown)


def _label(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    axes.set_xlabel(x, fontsize=9, color=TEXT)


def _logarithmic(axes: Any) -> None:
    """A logarithmic axis with plain numbers, and a legend; nothing where nothing is drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = [float(value) for line in axes.lines for value in line.get_ydata()]
    if not values:
        axes.set_yticks([])
        return
    low, high = min(values) / MARGIN, max(values) * MARGIN
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    decades = math.log10(high / low)
    # A range of a decade or two holds one power of ten, or none.
    marked = (1, 1.5, *range(2, 10)) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=marked))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8, frameon=False, labelcolor=TEXT)


def _whole_numbers(axes: Any, first: int, last: int) -> None:
    """Ticks at whole numbers, a handful of them whatever the length of the run."""
    from matplotlib.ticker import MaxNLocator

    margin = 0.03 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
