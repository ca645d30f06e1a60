"""Epochs in which memory is filled beside training: both read through the same link."""

from __future__ import annotations

PARTS = 1000
"""Into which the filling is cut; each is short enough that what is held hardly changes in it."""


def fill_beside(
    fill_bytes: float, demand_bytes: float, epoch_s: float, link_bytes_s: float, *, most: int = 1
) -> list[tuple[float, float]]:
    """Seconds, and bytes that one node reads, of each epoch until all is filled, at least one.

    Batches take what is not held yet from where the records lie, and so does the filling; while both want
    more than the link gives they get half each. What is held grows, so batches need the link less and less.

    Args:
        fill_bytes: To be filled on this node.
        demand_bytes: That its batches take in an epoch, wherever from.
        epoch_s: Of an epoch with all of it in place.
        link_bytes_s: Of the node, from where the records lie.
        most: Epochs, at most.

    >>> [(round(seconds, 6), round(moved)) for seconds, moved in fill_beside(100.0, 100.0, 10.0, 1e9)]
    [(10.0, 100)]
    >>> epochs = fill_beside(400.0, 100.0, 1.0, 10.0, most=9)  # a link that is asked for more than it gives
    >>> round(sum(seconds for seconds, _ in epochs)), round(sum(moved for _, moved in epochs))
    (72, 716)
    """
    filled, found = 0.0, list[tuple[float, float]]()
    quick = demand_bytes / epoch_s
    part_s = fill_bytes / link_bytes_s / PARTS
    while not found or (filled < fill_bytes and len(found) < most):
        served = moved = seconds = 0.0
        while demand_bytes - served > 1e-9 * demand_bytes:
            lacking = max(0.0, 1 - filled / fill_bytes)
            for_batches = link_bytes_s / 2 if lacking else link_bytes_s
            pace = quick if lacking * quick <= for_batches else for_batches / lacking
            rest_s = (demand_bytes - served) / pace
            step_s = min(part_s, rest_s) if lacking else rest_s
            into = min(fill_bytes - filled, (link_bytes_s - lacking * pace) * step_s) if lacking else 0.0
            served += pace * step_s
            filled += into
            moved += into + lacking * pace * step_s
            seconds += step_s
        found.append((seconds, moved))
    return found
