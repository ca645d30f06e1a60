"""Pictures of the README, drawn from saved results: SVG, for light and dark pages, with a title and a description.

python benchmarks/pictures.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from headline_work import WORKLOADS
from measure import RESULTS

PICTURES = Path(__file__).parent.parent / "docs" / "images"


@dataclass(frozen=True)
class Theme:
    """Colors of Okabe and Ito (2008), which color-blind readers can tell apart."""

    background: str
    text: str
    accent: str
    """What the picture is about."""
    muted: str
    """What it is compared with."""
    lines: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1f2328", "#0072b2", "#b5bcc4", ("#0072b2", "#d55e00", "#009e73", "#cc79a7"))
DARK = Theme("#0d1117", "#e6edf3", "#56b4e9", "#586069", ("#56b4e9", "#e69f00", "#3fbf93", "#e3a6c6"))


def draw_picture(
    path: Path,
    size: tuple[float, float],
    paint: Callable[[Any, Theme], None],
    *,
    title: str,
    description: str,
) -> None:
    """Write `path` and its dark twin, `name-dark.svg`; `size` in inches: 8.33 are 800 pixels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    for theme, place in ((LIGHT, path), (DARK, path.with_stem(f"{path.stem}-dark"))):
        colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text)
        style: dict[Any, Any] = {
            **colors,
            "axes.edgecolor": theme.muted,
            "axes.facecolor": theme.background,
            "figure.facecolor": theme.background,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": path.stem,  # equal figures give equal files
        }
        with mpl.rc_context(style):
            figure = plt.figure(figsize=size, layout="constrained")
            paint(figure, theme)
            figure.savefig(place, metadata={"Date": None, "Creator": None})
            plt.close(figure)
        told = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n"
        text = re.sub(r"(<svg [^>]*)>", rf'\1 role="img">\n{told}', place.read_text(), count=1)
        place.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def machine(head: dict[str, Any]) -> str:
    """What a result was measured on, from its first line."""
    gpu = head["gpu"] or "no GPU"
    version = head["torch"].split("+")[0]
    return f"{head['cpu']}, {head['cores']} cores, {head['memory_gib']:.0f} GiB, {gpu}, torch {version}"


def read_results(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a result, which names commit and hardware, and its rows."""
    head, *rows = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    return head, rows


# --------------------------------------------------------------------------------------------------- headline

LABELS = {
    "dataloader": "DataLoader",
    "by_hand": "DataLoader, .pt cache",
    "other": "Best other: {}",
    "stoker": "Stoker",
}
"""Roles in the picture, from the top."""


def draw_headline(path: Path = PICTURES / "headline.svg") -> None:
    """Bars of all workloads: the first epoch on the left, later ones on the right, one scale for each workload."""
    head, rows = read_results("headline")
    titles = {one.name: one.title for one in WORKLOADS}
    shown = [row for row in rows if row.get("role") in LABELS]
    groups = [[row for row in shown if row["workload"] == name][::-1] for name in titles]
    heights = [0.27 * len(group) for group in groups]
    size = (8.33, sum(heights) + 0.54 * len(groups) + 0.7)
    runs = max(row["runs"] for row in shown)
    keys = {"first_epoch": "First epoch, empty cache (s)", "later_epoch": "Each later epoch (s)"}

    def paint(figure: Any, theme: Theme) -> None:
        figure.set_layout_engine(None)
        grid = figure.subplots(len(groups), 2, sharex="row", sharey="row", height_ratios=heights)
        figure.subplots_adjust(left=0.245, right=0.985, top=1 - 0.62 / size[1], bottom=0.55 / size[1])
        figure.subplots_adjust(hspace=0.66 * len(groups) / sum(heights), wspace=0.04)
        for panels, title, group in zip(grid, titles.values(), groups, strict=True):
            top = panels[0].get_position().y1 + 0.06 / size[1]
            figure.text(0.006, top, title, fontsize=10.5, fontweight="bold")
            panels[0].set_xlim(0, 1.9 * max(row[f"{key}_range"][1] for row in group for key in keys))
            for panel, key in zip(panels, keys, strict=True):
                draw_bars(panel, theme, group, key)
        for panel, text in zip(grid[0], keys.values(), strict=True):
            left = panel.get_position().x0
            figure.text(left, 1 - 0.08 / size[1], text, va="top", fontsize=10.5, color=theme.accent)
        text = f"{machine(head)}. Medians of {runs} runs, lines from lowest to highest. Factors: against the DataLoader."
        figure.text(0.5, 0.1 / size[1], text, ha="center", fontsize=8.5)

    told = "; ".join(
        f"{row['workload']}, {LABELS[row['role']].format(row['contender'])}: "
        f"{row['first_epoch_s']:.2f} s, then {row['later_epoch_s']:.2f} s"
        for row in shown
    )
    draw_picture(
        path,
        size,
        paint,
        title="Seconds per epoch of training: DataLoader, the best other loader, Stoker",
        description=f"First epoch and later epochs. {told}. {machine(head)}.",
    )


def draw_bars(panel: Any, theme: Theme, group: list[dict[str, Any]], key: str) -> None:
    """One bar for each contender, with its number at the end."""
    values = [row[f"{key}_s"] for row in group]
    lows, highs = zip(*(row[f"{key}_range"] for row in group), strict=True)
    errors = [
        [value - low for value, low in zip(values, lows, strict=True)],
        [high - value for value, high in zip(values, highs, strict=True)],
    ]
    colors = [theme.accent if row["role"] == "stoker" else theme.muted for row in group]
    caps = {"ecolor": theme.text, "elinewidth": 1, "capsize": 2.5}
    panel.barh(range(len(group)), values, height=0.68, color=colors, xerr=errors, error_kw=caps)
    base = next(row[f"{key}_s"] for row in group if row["role"] == "dataloader")
    for place, (row, value, high) in enumerate(zip(group, values, highs, strict=True)):
        text, weight = f"{value:.{2 if value >= 1 else 3}f} s", "normal"
        if row["role"] == "stoker":
            text, weight = f"{text}{compared(base / value)}", "bold"
        options = {"fontsize": 9.5, "fontweight": weight, "color": theme.text}
        panel.annotate(text, (high, place), (5, 0), textcoords="offset points", va="center", **options)
    names = [LABELS[row["role"]].format(row["contender"]) for row in group]
    panel.set_yticks(range(len(group)), names, fontsize=9.5)
    panel.tick_params(axis="y", length=0)
    panel.locator_params(axis="x", nbins=5, integer=True)
    panel.tick_params(axis="x", labelsize=9)


def compared(ratio: float) -> str:
    """How many times faster or slower; nothing within five percent."""
    if 1 / 1.05 < ratio < 1.05:
        return ""
    if ratio < 1:
        return f", {1 / ratio:.1f}x slower"
    return f", {ratio:.{0 if ratio >= 10 else 1}f}x faster"


# ------------------------------------------------------------------------------------------------ determinism

WIDTHS = (9.0, 6.4, 4.2, 2.2, 1.0)
"""Of lines on top of each other, the first at the bottom."""


def draw_determinism(path: Path = PICTURES / "determinism.svg") -> None:
    """All loss curves on top of each other; below, how far each is from the first."""
    head, rows = read_results("determinism")
    texts = [f"{row['run']}{'' if row is rows[0] else chr(10) + apart(row)}" for row in rows]

    def paint(figure: Any, theme: Theme) -> None:
        panel, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        for row, text, width, color in zip(rows, texts, WIDTHS, (*theme.lines, theme.text), strict=False):
            steps = range(1, len(row["losses"]) + 1)
            panel.plot(steps, row["losses"], linewidth=width, color=color, label=text, solid_capstyle="round")
            pairs = zip(row["losses"], rows[0]["losses"], strict=True)
            below.plot(steps, [abs(loss / base - 1) for loss, base in pairs], linewidth=1.5, color=color)
        for row in rows:
            if (step := row["killed_after"]) is not None and row["ranks"] == 1:
                panel.annotate(
                    "SIGKILL, then resumed",
                    (step, row["losses"][step - 1]),
                    (0, 45),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9.5,
                    arrowprops={"arrowstyle": "->", "color": theme.text, "shrinkB": 6},
                )
        panel.set_yscale("log")
        below.set_xlabel("training step", fontsize=9.5)
        below.set_ylabel("difference\nfrom 1 rank", fontsize=9.5)
        below.set_ylim(bottom=-1e-8)
        panel.set_ylabel("loss", fontsize=9.5)
        panel.set_xlim(0, len(rows[0]["losses"]) + 1)
        figure.legend(
            loc="outside right upper", frameon=False, fontsize=9.5, labelspacing=0.9, handlelength=2.5
        )
        figure.supxlabel(
            f"{machine(head)}. All runs have the same batches, bit for bit. Differences are relative.",
            fontsize=8.5,
        )

    draw_picture(
        path,
        (8.33, 4.2),
        paint,
        title="Training losses with 1, 2 and 4 ranks, and after kills",
        description=f"The curves lie on top of each other. {'; '.join(texts)}.".replace("\n", ": "),
    )


def apart(row: dict[str, Any]) -> str:
    """How far a run is from the first."""
    if row["equal_losses"] == len(row["losses"]):
        return "the same loss, bit for bit"
    return f"loss differs by {row['largest_difference']:.1e} at most"


if __name__ == "__main__":
    draw_headline()
    draw_determinism()
