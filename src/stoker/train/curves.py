"""Draw the curves of a run: training loss, validation error beside persistence, stall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG from the lines of `metrics.jsonl`; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # takes half a second, and most runs are longer
    from matplotlib.figure import Figure

    steps = [row for row in rows if row.get("kind") == "step"]
    epochs = [row for row in rows if row.get("kind") == "epoch"]
    figure: Any = Figure(figsize=(10, 3.2), dpi=120)
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.16, top=0.9, wspace=0.35)
    _plot(left, "step", steps, {"loss": "training loss"}, log=True)
    _plot(left, "step", epochs, {"loss": "epoch mean"}, log=True)
    _plot(middle, "epoch", epochs, {"val_nrmse": "one step", "rollout_nrmse": "roll-out"}, log=True)
    _plot(middle, "epoch", epochs, {"persistence_nrmse": "persistence"}, log=True, style="--")
    _plot(right, "epoch", epochs, {"stall": "stall"}, log=False)
    right.set_ylim(0, 1)
    for axes, title in (
        (left, "loss, in usual steps squared"),
        (middle, "validation NRMSE"),
        (right, "stall"),
    ):
        axes.set_title(title, fontsize=10)
        axes.tick_params(which="both", labelsize=8)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _plot(
    axes: Any,
    x: str,
    rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    *,
    log: bool,
    style: str = "-",
) -> None:
    """Plot `names` (column to label) over column `x`, leaving out what is missing or cannot be drawn."""
    for name, label in names.items():
        points = [(row[x], row[name]) for row in rows if row.get(name) is not None]
        points = [(at, value) for at, value in points if value > 0 or not log]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.4, marker=".", markersize=3)
            if log:
                axes.set_yscale("log")
    axes.set_xlabel(x, fontsize=9)
