"""Calls below calls, as wide as they take time: a picture of plain HTML, which fits any width and theme."""

from __future__ import annotations

import html
from collections import Counter
from pathlib import Path

from stoker.profile.stacks import Stack, Stacks

DEEPEST = 14
LEAST = 0.01
"""Calls that take less of the time are not drawn."""
ROW_REM = 1.5
SHADES = ("#f3c9a5", "#eeb07c", "#f7dcc4")


def flame(stacks: Stacks) -> str:
    """The picture; words where nothing was seen."""
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
