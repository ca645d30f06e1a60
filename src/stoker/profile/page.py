"""The picture and the page of a profile; the page needs no other file."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from pathlib import Path
from typing import Any

from stoker.atomic import replacing
from stoker.profile.result import Profile
from stoker.profile.stacks import Stack, Stacks
from stoker.units import format_bytes, format_percent, format_seconds

COMPUTE, COPY, WAIT = "#1f6fb4", "#9aa5b1", "#d9731a"
DEEPEST = 12
LEAST = 0.01
"""Calls that take less of the time are not drawn."""
STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem;
margin: 2rem auto; padding: 0 1rem; } img { width: 100%; background: #fff; border-radius: .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; border-bottom: 1px solid #9995; }
"""


def write_page(profile: Profile, path: Path) -> None:
    """Write the page, with its picture inside."""
    picture = base64.b64encode(draw(profile)).decode()
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table(profile)
    )
    slow = "".join(f"<li>sample {n:,}: {format_seconds(s)}</li>" for n, s in profile.loop.stragglers())
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>profile</title>'
        f"<style>{STYLE}</style><h1>{html.escape(profile.verdict)}</h1>"
        f'<img alt="time of a step, and where loading spends it" src="data:image/png;base64,{picture}">'
        f"<table>{rows}</table>"
        + (f"<h2>Samples that take far longer than others</h2><ul>{slow}</ul>" if slow else "")
        + f"<p>{html.escape(profile.gpus)}</p></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def table(profile: Profile) -> list[tuple[str, ...]]:
    """What the loop does now, and what it would do with each tier."""
    loop = profile.loop

    def line(name: str, wall_s: float, stall: float, note: str) -> tuple[str, ...]:
        cost = profile.cost(wall_s)
        epoch = format_seconds(wall_s * profile.batches) + ("" if cost is None else f", cost {cost:.3g}")
        return (name, format_seconds(wall_s), f"stall {format_percent(stall)}", f"epoch {epoch}", note)

    parts = (
        f"{format_seconds(loop.compute_s)} compute, {format_seconds(loop.copy_s)} copy, "
        f"{format_seconds(loop.wait_s)} waiting; a sample {format_seconds(loop.sample_s)}, "
        f"batch of {loop.batch_examples} ({format_bytes(loop.batch_bytes)}), {loop.workers} workers"
    )
    rows = [line("your loop", loop.wall_s, loop.stall, parts)]
    for tier in profile.tiers:
        rows.append(
            line(tier.tier, tier.wall_s, tier.stall, "" if tier.fits else f"does not fit: {tier.why}")
        )
    return rows


def draw(profile: Profile) -> bytes:
    """A PNG: bars of a step on the left, what reading samples spends its time on on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    bars, flame = figure.subplots(1, 2, width_ratios=(1, 1.4))
    _draw_bars(bars, profile)
    _draw_flame(flame, profile.stacks)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_bars(axes: Any, profile: Profile) -> None:
    loop = profile.loop
    rows = [("your loop", loop.compute_s, loop.step_s - loop.compute_s, loop.wait_s)]
    rows += [(t.tier, loop.compute_s, 0.0, t.wall_s - loop.compute_s) for t in profile.tiers if t.fits]
    for place, (_, compute, copy, wait) in enumerate(rows):
        left = 0.0
        for value, colour in ((compute, COMPUTE), (max(0.0, copy), COPY), (wait, WAIT)):
            axes.barh(place, 1000 * value, left=1000 * left, color=colour, height=0.6)
            left += value
        axes.text(1000 * left, place, f" {format_seconds(left)}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("ms a step")
    axes.set_title("compute (blue), copy and cache misses (grey), waiting (orange)", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_flame(axes: Any, stacks: Stacks) -> None:
    """Calls below calls, as wide as they take time."""
    axes.set_axis_off()
    axes.set_title(
        "reading samples, in this process: callers above, what they call below", fontsize=9, loc="left"
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(-DEEPEST, 0)
    if stacks.total:
        _draw_calls(axes, stacks, stacks.total, 0, 0.0)
    else:
        axes.text(0.02, -1, "no single samples could be read", fontsize=9)


def _draw_calls(axes: Any, stacks: Stacks, total: int, depth: int, left: float) -> None:
    """The calls at one depth, each with those below it."""
    groups: dict[str, Counter[Stack]] = {}
    for stack, count in stacks.seen.items():
        if len(stack) > depth:
            file, number, name = stack[depth]
            groups.setdefault(f"{name}  {Path(file).name}:{number}", Counter())[stack] += count
    for place, (name, seen) in enumerate(sorted(groups.items(), key=lambda pair: -pair[1].total())):
        width = seen.total() / total
        if width < LEAST or depth >= DEEPEST:
            continue
        shade = ("#f3c9a5", "#eeb07c", "#f7dcc4")[(depth + place) % 3]
        axes.barh(-depth - 0.5, width, left=left, color=shade, edgecolor="white", height=0.95)
        axes.text(left + 0.004, -depth - 0.5, name[: int(width * 85)], va="center", fontsize=7, clip_on=True)
        _draw_calls(axes, Stacks(seen), total, depth + 1, left)
        left += width
