"""Draw a simulation: for each way how long precompute, the first epoch and all others take."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from stoker.plan import Simulation
from stoker.runtime.files import replacing
from stoker.units import format_percent, format_seconds

BLUE, ORANGE, PALE, GREY, TEXT = "#1f6fb4", "#d9731a", "#d5dce3", "#9aa5b1", "#24313f"


def draw_simulation(found: Simulation, path: Path) -> None:
    """Write a PNG or SVG, by the name's ending; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = [way for way in found.ways if way.fits][::-1]
    picture: Any = Figure(figsize=(10, 1.9 + 0.44 * len(ways)), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(1, 1)
    for place, way in enumerate(ways):
        left = 0.0
        later_s = way.total_s - way.encoding_s - way.first_epoch_s
        for seconds, colour in ((way.encoding_s, ORANGE), (way.first_epoch_s, PALE), (later_s, BLUE)):
            axes.barh(place, seconds, left=left, color=colour, height=0.62)
            left += seconds
        cost = "" if way.cost is None else f", costs {way.cost:,.0f}"
        said = f"  {format_seconds(way.total_s)}, stall {format_percent(way.stall)}{cost}"
        axes.text(left, place, said, va="center", fontsize=8.5, color=TEXT)
    most_s = max((way.total_s for way in ways), default=1.0)
    axes.set_xlim(0, 1.45 * most_s)
    axes.set_yticks(range(len(ways)), [way.name for way in ways])
    axes.xaxis.set_major_formatter(_tick)
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=TEXT, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    names = {"precompute": ORANGE, "first epoch": PALE, "all others": BLUE}
    handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in names.items()]
    axes.legend(
        handles=handles, fontsize=8.5, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1)
    )
    one = found.scenario
    title = f"{one.nodes} nodes with {one.gpus} ranks each, {one.records:,} records, {one.epochs} epochs"
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    written: dict[str, Any] = {"color": TEXT, "x": 0.01, "ha": "left"}
    said = found.reason.partition("; ")[0]
    picture.supxlabel("\n".join(textwrap.wrap(said, 130)), fontsize=8.5, **written)
    with replacing(path) as temporary:
        picture.savefig(temporary, format=path.suffix.lstrip(".").lower() or "png")


def _tick(value: float, _place: int) -> str:
    return format_seconds(value) if value else "0"
