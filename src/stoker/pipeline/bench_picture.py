"""Draw what `stoker bench` found: a bar for each limit and tier, and how much of its limit a tier reaches."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runtime.files import replacing
from stoker.units import format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.bench import BenchResult, Figure

BLUE, ORANGE, GREY, TEXT = "#1f6fb4", "#d9731a", "#9aa5b1", "#24313f"
PALE = "#d5dce3"


def draw_bench(result: BenchResult, path: Path) -> None:
    """Write a PNG; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    rows = len(result.limits) + len(result.tiers)
    picture: Any = Picture(figsize=(10, 1.7 + 0.42 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    picture.get_layout_engine().set(w_pad=0.15, h_pad=0.12, hspace=0.06)
    if result.tiers:
        heights = [len(result.tiers) + 0.6, len(result.limits) + 0.6]
        tiers, limits = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
        _draw_tiers(tiers, result)
    else:
        limits = picture.subplots(1, 1)
    _draw_limits(limits, result)
    written: dict[str, Any] = {"color": TEXT, "x": 0.01, "ha": "left"}
    picture.suptitle(f"{result.machine}\n{result.cache}".strip(), fontsize=9, **written)
    picture.supxlabel("\n".join(textwrap.wrap(result.advice, 130)), fontsize=8.5, **written)
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png")


def _draw_tiers(axes: Any, result: BenchResult) -> None:
    """A tier's bar lies on the pale bar of its limit."""
    names = list(result.tiers)[::-1]
    for place, name in enumerate(names):
        figure = result.tiers[name]
        limit = result.limits.get(figure.limit or "")
        top = max(figure.bytes_s, 0.0 if limit is None else limit.bytes_s)
        if limit is not None:
            axes.barh(place, limit.bytes_s, color=PALE, height=0.62)
        axes.barh(place, figure.bytes_s, color=BLUE, height=0.62)
        said = "" if figure.fraction is None else f"{format_percent(figure.fraction)} of {figure.limit}, "
        batch = "" if figure.batch_s is None else f"{format_seconds(figure.batch_s)} a batch"
        _label(axes, top, place, f"{_rate(figure.bytes_s)}   {said}{batch}", figure)
    _finish(axes, names, "what each tier serves, beside its limit")


def _draw_limits(axes: Any, result: BenchResult) -> None:
    names = list(result.limits)[::-1]
    for place, name in enumerate(names):
        figure = result.limits[name]
        axes.barh(place, figure.bytes_s, color=GREY, height=0.62)
        _label(axes, figure.bytes_s, place, f"{_rate(figure.bytes_s)}   {figure.what}", figure)
    _finish(axes, names, "what this machine can do at most")
    axes.set_xlabel("bytes a second, logarithmic", fontsize=9, color=TEXT)


def _label(axes: Any, x: float, place: int, text: str, figure: Figure) -> None:
    scattered = figure.scatter > 0.2
    shown = text + (f"   rounds differ by {format_percent(figure.scatter)}" if scattered else "")
    style = {"va": "center", "fontsize": 8.5, "color": ORANGE if scattered else TEXT}
    axes.text(x, place, f"  {shown}", **style)


def _finish(axes: Any, names: list[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    axes.set_xscale("log")
    values = [float(patch.get_width()) for patch in axes.patches] or [1.0]
    axes.set_xlim(min(values) / 4, max(values) * 60)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.tick_params(which="both", labelsize=8.5, color=GREY, labelcolor=TEXT, left=False)
    axes.xaxis.set_major_formatter(_tick)
    axes.xaxis.set_minor_formatter("")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def _tick(value: float, _place: int) -> str:
    return _rate(value)


def _rate(bytes_s: float) -> str:
    """Bytes a second, in the decimal units of data sheets.

    >>> _rate(1e12), _rate(7.25e9), _rate(85e6)
    ('1 TB/s', '7.25 GB/s', '85 MB/s')
    """
    unit, name = next(
        ((unit, name) for unit, name in ((1e12, "TB/s"), (1e9, "GB/s")) if bytes_s >= unit), (1e6, "MB/s")
    )
    return f"{bytes_s / unit:.3g} {name}"
