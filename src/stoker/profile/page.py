"""The page of a profile: bars of a step, tables, where reading passes its time. It needs no other file."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from stoker.profile.result import ENCODE, Profile, Stack, StackSamples
from stoker.runtime.files import make_folder, replace_atomically
from stoker.units import format_bytes, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# Calls below calls, as wide as they take time: a picture of plain HTML, which fits any width and theme.


DEEPEST = 14
LEAST = 0.01
"""Calls that take less of the time are not drawn."""
ROW_REM = 1.5
SHADES = ("#f3c9a5", "#eeb07c", "#f7dcc4")


def flame(stacks: StackSamples) -> str:
    """Return the picture; words where nothing was seen."""
    if not stacks.total:
        return "<p>No single samples could be read.</p>"
    cells: list[str] = []
    deepest = _draw(stacks.seen, stacks.total, (0, 0.0), cells)
    return f'<div class="flame" style="height:{ROW_REM * deepest:g}rem">{"".join(cells)}</div>'


def _draw(seen: Counter[Stack], total: int, place: tuple[int, float], cells: list[str]) -> int:
    """Add the calls at one depth, each with those below it; returns how many rows there are by now."""
    depth, left = place
    groups: dict[str, Counter[Stack]] = {}
    for stack, count in seen.items():
        if len(stack) > depth:
            file, number, name = stack[depth]
            groups.setdefault(f"{name}  {Path(file).name}:{number}", Counter())[stack] += count
    rows = depth
    for order, (name, below) in enumerate(sorted(groups.items(), key=lambda pair: -pair[1].total())):
        width = below.total() / total
        if width < LEAST or depth >= DEEPEST:
            continue
        words = html.escape(name)
        cells.append(
            f'<b style="left:{100 * left:.2f}%;width:{100 * width:.2f}%;top:{ROW_REM * depth:g}rem;'
            f'background:{SHADES[(depth + order) % 3]}" title="{words}, {100 * width:.0f} %">{words}</b>'
        )
        rows = max(rows, depth + 1, _draw(below, total, (depth + 1, left), cells))
        left += width
    return rows


Rows: TypeAlias = Sequence[Sequence[str]]
STYLE = """
:root { color-scheme: light dark; --line: #9995; --dim: #6b6b6b;
--compute: #3b82c4; --copy: #9aa5b1; --wait: #e08a3c; }
@media (prefers-color-scheme: dark) { :root { --dim: #9a9a9a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; line-height: 1.35; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { color: var(--dim); margin: .4rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line);
text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; color: var(--dim); min-width: 16rem; }
.bars { display: grid; grid-template-columns: max-content 1fr; gap: .35rem .8rem; align-items: center; }
.bars > div { display: flex; align-items: center; min-width: 0; } .bars i { display: block; height: 1.2rem; }
.bars small { margin-left: .5rem; white-space: nowrap; }
.compute { background: var(--compute); } .copy { background: var(--copy); } .wait { background: var(--wait); }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .8rem; vertical-align: -.05rem; }
.key:first-child { margin-left: 0; }
.flame { position: relative; font-size: 11px; line-height: 1.5rem; color: #3a2410; }
.flame b { position: absolute; height: 1.45rem; box-sizing: border-box; overflow: hidden; white-space: nowrap;
text-overflow: ellipsis; font-weight: 400; padding: 0 .25rem; border-radius: .15rem; }
"""
FULL = 70
"""Per cent of the width that the longest bar takes; the rest is for its figure."""


def write_page(profile: Profile, path: Path, *, title: str = "") -> None:
    """Write the page; `title` is what was profiled."""
    name = html.escape(f"profile of {title}" if title else "profile")
    parts = [
        f"<h1>{html.escape(profile.verdict)}</h1>",
        f"<p>{html.escape(_about(profile))}</p>",
        f"<h2>A step and its wait</h2>{_bars(profile)}",
        _table(("", "a step", "stall", "an epoch", "cost", ""), tier_rows(profile)),
        _section("What is done to a sample", ("stage", "a sample", "part", ""), stage_rows(profile)),
        _section(
            "On other GPUs",
            ("GPU", "holds", "step at best", "stall", "an epoch", "cost"),
            gpu_rows(profile),
            (profile.elsewhere_note, profile.gpus),
        ),
        _lines("Samples that take far longer than others", straggler_lines(profile)),
        _lines("Remarks", profile.remarks),
        "<h2>Where making samples passes its time</h2>",
        "<p>Callers above, what they call below, as wide as they take time; looked at every millisecond.</p>",
        flame(profile.stacks),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )
    make_folder(path.parent)
    with replace_atomically(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def tier_rows(profile: Profile) -> Rows:
    """Return what the loop does now, and what it would do with each tier."""
    loop = profile.loop

    def line(name: str, wall_s: float, stall: float, note: str) -> tuple[str, ...]:
        cost = profile.cost(wall_s)
        return (
            name,
            format_seconds(wall_s),
            format_percent(stall),
            format_seconds(wall_s * profile.batches),
            "-" if cost is None else f"{cost:.3g}",
            note,
        )

    parts = (
        f"{format_seconds(loop.compute_s)} compute, {format_seconds(loop.copy_s)} copy, "
        f"{format_seconds(loop.wait_s)} waiting"
    )
    rows = [line("your loop", loop.wall_s, loop.stall, parts)]
    for tier in profile.tiers:
        note = tier.why if tier.fits else f"does not fit: {tier.why}"
        rows.append(line("no cache" if tier.tier == ENCODE else tier.tier, tier.wall_s, tier.stall, note))
    return rows


def stage_rows(profile: Profile) -> Rows:
    """Return what one sample takes in each stage."""
    whole_s = sum(stage.seconds for stage in profile.stages) or 1.0
    return [
        (stage.name, format_seconds(stage.seconds), format_percent(stage.seconds / whole_s), stage.note)
        for stage in profile.stages
    ]


def gpu_rows(profile: Profile) -> Rows:
    """Return what other GPUs would do."""
    return [
        (
            one.gpu,
            format_percent(one.share),
            "-" if one.step_s is None else format_seconds(one.step_s),
            "-" if one.stall is None else format_percent(one.stall),
            "-" if one.epoch_s is None else format_seconds(one.epoch_s),
            "-" if one.cost is None else f"{one.cost:.3g}",
        )
        for one in profile.elsewhere
    ]


def straggler_lines(profile: Profile) -> Sequence[str]:
    """Return samples that take far longer than the others, the slowest first."""
    names = profile.loop.names
    return [
        f"sample {number:,} takes {format_seconds(seconds)}"
        + (f" ({names[number]})" if number in names else "")
        for number, seconds in profile.loop.stragglers()
    ]


def _about(profile: Profile) -> str:
    loop = profile.loop
    workers = f", {loop.workers} workers" if not profile.served_from else ""
    return (
        f"batches of {loop.batch_examples:,} ({format_bytes(loop.batch_bytes)}), {loop.batches:,} an epoch, "
        f"on {loop.device}{workers}; reading a sample takes {format_seconds(loop.sample_s)}"
    )


def _bars(profile: Profile) -> str:
    """Return a bar each for the loop and every tier that fits."""
    loop = profile.loop
    rows = [("your loop", loop.compute_s, max(0.0, loop.step_s - loop.compute_s), loop.wait_s)]
    rows += [
        ("no cache" if t.tier == ENCODE else t.tier, loop.compute_s, 0.0, t.wall_s - loop.compute_s)
        for t in profile.tiers
        if t.fits
    ]
    longest = max(sum(parts) for _, *parts in rows) or 1.0
    drawn: list[str] = []
    for name, *parts in rows:
        pieces = "".join(
            f'<i class="{kind}" style="width:{FULL * part / longest:.2f}%"></i>'
            for kind, part in zip(("compute", "copy", "wait"), parts, strict=True)
        )
        drawn.append(f"<span>{name}</span><div>{pieces}<small>{format_seconds(sum(parts))}</small></div>")
    key = "".join(
        f'<span class="key {kind}"></span>{words}'
        for kind, words in (
            ("compute", "compute"),
            ("copy", "copy, and what loading costs the step beside it"),
            ("wait", "waiting for data"),
        )
    )
    return f'<div class="bars">{"".join(drawn)}</div><p>{key}</p>'


def _table(heading: Sequence[str], rows: Rows) -> str:
    """Return a table; a cell beyond the figures is text that may wrap."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    figures = len(heading) - (heading[-1] == "")
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if place >= figures else ''}>{html.escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _section(title: str, heading: Sequence[str], rows: Rows, notes: Sequence[str] = ()) -> str:
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
    return f"<h2>{title}</h2>{_table(heading, rows)}{said}" if rows else ""


def _lines(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<h2>{title}</h2>{items}" if lines else ""
