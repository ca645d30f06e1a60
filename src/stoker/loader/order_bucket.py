"""An order whose batches hold records of similar length, so that little of them is padding.

The full shuffle is cut into windows of some global batches. Within a window examples are sorted by length
and cut into batches again, and the batches are shuffled. So every example comes once in an epoch, near the
place that the shuffle gave it, and what comes at a position is a function of seed, epoch and the lengths
that are stored: tier, readers, ranks and resuming change nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.loader.order import Order, keys_of, mix, permutations, stream


def bucketed(order: Order, epoch: int) -> NDArray[np.int64]:
    """The examples of an epoch by position, `(count,)`.

    A short last batch is of what the shuffle puts last, of any length: else its lengths would always be the
    same ones, which `drop_last` would never serve.
    """
    assert order.lengths is not None
    base, size = stream(order.seed, epoch), order.global_batch
    whole = permutations(order.count, [base])[0]
    steps = order.count // size
    for first in range(0, steps, order.kind.batches):
        window = whole[first * size : min(first + order.kind.batches, steps) * size]
        rows = window[np.argsort(order.lengths[window], kind="stable")].reshape(-1, size)
        # Sorted inside a batch, the first rank would have all of the short ones.
        rows = np.take_along_axis(rows, np.argsort(keys_of(mix(base + 1), rows), axis=1), axis=1)
        turns = np.argsort(keys_of(mix(base + 2), np.arange(first, first + len(rows))))
        window[:] = rows[turns].reshape(-1)
    return whole
