"""Epochs in which memory is filled during training: both read through the same link."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = 1000
"""Into which the filling is cut; each is short enough that what is held hardly changes in it."""
LEAST = 1e-9
"""Parts of an epoch, or of what is filled, too small to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """The first epochs of a run, up to the one in which all is in place."""

    epochs: tuple[tuple[float, float], ...]
    """Of each the seconds, and the bytes that one node reads; at least one."""
    filled_s: float | None
    """From the first batch until all is in place; None: the run is over before."""


def fill_beside(
    fill_bytes: float,
    demand_bytes: float,
    epoch_s: float,
    link_bytes_s: float,
    *,
    after_bytes: float = 0.0,
    most: int = 1,
) -> Filling:
    """The epochs until all is filled.

    Batches take what is not held yet from where the records lie, and so does the filling; while both want
    more than the link gives they get half each. What is held grows, so batches need the link less and less.

    Args:
        fill_bytes: To be filled on this node.
        demand_bytes: That its batches take in an epoch of what is being filled.
        epoch_s: Of an epoch with all of it in place.
        link_bytes_s: Of the node, from where the records lie.
        after_bytes: That its batches take through the link in every epoch, filled or not.
        most: Epochs, at most.

    >>> [(round(seconds, 6), round(moved)) for seconds, moved in fill_beside(100.0, 100.0, 10.0, 1e9).epochs]
    [(10.0, 100)]
    >>> found = fill_beside(400.0, 100.0, 1.0, 10.0, most=99)  # a link that is asked for more than it gives
    >>> len(found.epochs), round(found.filled_s), round(sum(moved for _, moved in found.epochs))
    (15, 79, 788)
    """
    found, filled, now_s = list[tuple[float, float]](), 0.0, 0.0
    filled_s: float | None = None
    part_s = fill_bytes / link_bytes_s / PARTS
    while filled_s is None and len(found) < most:
        began_s, done, moved = now_s, 0.0, 0.0
        while filled_s is None and done < 1 - LEAST:
            asked = after_bytes + demand_bytes * (1 - filled / fill_bytes)
            pace = min(1 / epoch_s, link_bytes_s / 2 / asked)
            step_s = min(part_s, (1 - done) / pace)
            into = min(fill_bytes - filled, (link_bytes_s - asked * pace) * step_s)
            filled, done, now_s = filled + into, done + pace * step_s, now_s + step_s
            moved += into + asked * pace * step_s
            if filled >= fill_bytes * (1 - LEAST):
                filled_s = now_s
        now_s += (1 - done) * epoch_s
        moved += (1 - done) * after_bytes
        found.append((now_s - began_s, moved))
    return Filling(epochs=tuple(found), filled_s=filled_s)
