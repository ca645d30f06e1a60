"""Where the records of ragged fields begin, over many shards: the shards alone know, so each is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.runtime.threads import map_in_order
from stoker.store.shard_read import Shard

FEW_SHARDS = 8
"""Fewer are opened one after another."""


def offsets_in(
    opened: Callable[[int], Shard], shards: Sequence[int], field: str, *, where: str
) -> Iterator[NDArray[np.int64]]:
    """The offsets of a ragged field in each of some shards, in their order; see `Shard.offsets`.

    Args:
        opened: Gives a shard by its place in the index, as `Cache.shard`.
        shards: Which.
        field: A ragged one.
        where: Names the cache.
    Raises:
        CorruptError: A shard is damaged.
        StalledError: One was not opened in time.
    """

    def read(shard: int) -> NDArray[np.int64]:
        return opened(shard).offsets(field)

    if len(shards) < FEW_SHARDS:
        return map(read, shards)
    return map_in_order(read, shards, what=f"opening the shards of {where}")
