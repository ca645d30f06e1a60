"""What a local copy with a size limit has of what one node asks for, epoch after epoch.

A small set is gone through in the run's own order, and what was not used for the longest time makes room: the
share of hits depends on how much of the set fits, not on how large the set is.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from stoker.plan.simulation.scenario import Order

ITEMS = 4096
"""Records that stand for all, or as many blocks of them as make so many."""
MOST_IN_BLOCK = 16
"""Records in a block; with more of them the share hardly changes."""
PASSES = 6
"""Times that the node asks for as many records as there are; the second half of it is counted."""
MANY = 64
"""Nodes; with more of them the share hardly changes."""


def hit_share(
    fraction: float, nodes: int, *, order: Order = "full", in_block: float = 1, seed: int = 0
) -> float:
    """The part of one node's reads that its local copy serves once it is full, 0..1.

    In a full shuffle of one node a record that was read at one place of an epoch is read again at another of
    the next: of a copy of the fraction c it is still there with the probability c + (1 - c) ln(1 - c), since
    the product of two uniform places must exceed 1 - c. With many nodes each asks for other records in each
    epoch, and what is kept is of use in proportion to its size: c. A static order asks every node for the
    same part each time, which is then a set of its own. Where many records come in one block, each block is
    asked for many times in an epoch, at places of no pattern: c again.

    Args:
        fraction: Of the whole set that fits.
        nodes: Among which each epoch is divided.
        order: As of the loader; in block order neighbours are asked for together, so that `in_block` is 1.
        in_block: Records that are fetched and given up together.
        seed: Of the orders.

    >>> round(hit_share(0.5, 1), 2), round(0.5 + 0.5 * float(np.log(0.5)), 2)
    (0.15, 0.15)
    >>> round(hit_share(0.5, 16), 1), hit_share(1.0, 4), hit_share(0.25, 4, order="static")
    (0.5, 1.0, 1.0)
    >>> round(hit_share(0.5, 1, in_block=16), 1)
    0.5
    """
    needed = 1 / nodes if order == "static" else 1.0
    block = min(MOST_IN_BLOCK, max(1, round(in_block)))
    room = int(min(fraction, 1.0) * ITEMS / block)
    if fraction >= needed:
        return 1.0
    if not room:
        return 0.0
    generator, nodes = np.random.default_rng(seed), min(nodes, MANY)
    epochs = PASSES * nodes
    held: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    own = np.arange(ITEMS // nodes)
    for epoch in range(epochs):
        wanted = generator.permutation(own) if order == "static" else generator.permutation(ITEMS)[: len(own)]
        for item in (wanted // block).tolist():
            hit = item in held
            if hit:
                held.move_to_end(item)
            else:
                held[item] = None
                if len(held) > room:
                    held.popitem(last=False)
            if 2 * epoch >= epochs:
                hits, asked = hits + hit, asked + 1
    return hits / max(1, asked)
