"""A cache while it is being filled: in which order that is done, and what of it is there by now.

Whoever fills and whoever serves meanwhile agree on the order without a word: it follows from the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.store.cache import Cache
from stoker.store.catalog import Catalog, build_index, is_shard_name, known_index
from stoker.store.failures import Failure
from stoker.store.local import LocalStorage
from stoker.store.recipe import Recipe

BLOCKS = 256
"""Blocks that the samples of a cache are cut into; part of the order, therefore fixed. So few that reading
them out of order decodes few chunks of a source twice, so many that the first are soon there."""


def fill_blocks(recipe: Recipe) -> NDArray[np.int64]:
    """The order in which a cache is filled block by block: stretches `[start, stop)` of samples, `(n, 2)`.

    Blocks are whole groups, and come shuffled by the fingerprint: a source is often sorted, and who trains
    beside the filling should not meet it sorted.
    """
    size = recipe.group.samples
    firsts = np.concatenate(
        [np.arange(part.offset, part.offset + part.count, size, dtype=np.int64) for part in recipe.parts]
    )
    blocks = min(BLOCKS, len(firsts))
    starts = firsts[np.arange(blocks) * len(firsts) // max(1, blocks)]
    keys = [xxhash.xxh3_64_intdigest(f"{recipe.fingerprint} {i}".encode()) for i in range(blocks)]
    order = np.argsort(np.array(keys, np.uint64), kind="stable")
    return np.stack([starts, np.append(starts[1:], recipe.count)[:blocks]], axis=1)[order]


class Growing:
    """What a folder holds while somebody fills it, read from the shards themselves.

    Args:
        path, recipe: The folder.
        again: Quarantined samples that are being tried again: no more settled than missing ones.
    """

    def __init__(self, path: Path, recipe: Recipe, again: Mapping[int, Failure]) -> None:
        self._path, self._recipe, self._again = path, recipe, again
        self._storage = LocalStorage(path)
        self.forget()

    def forget(self) -> None:
        """Read anew which records are noted as damaged."""
        self._catalog = Catalog(self._storage, self._recipe)
        self._index = known_index(self._path, self._recipe)
        self._seen: dict[str, int] | None = None

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """As `stoker.store.protocols.Filling.look`."""
        sizes = self._storage.sizes()
        seen = {name: n for name, n in sizes.items() if is_shard_name(name) or name.startswith("failures-")}
        if seen != self._seen:
            self._index = build_index(self._storage, self._recipe, self._catalog.refresh(), self._index)
            self._cache = Cache(self._path, self._recipe, self._index)
            self._settled = np.zeros(self._recipe.count, np.bool_)
            self._settled[self._cache.numbers] = True
            given_up = [n for n, why in self._index.quarantined.items() if self._again.get(n) != why]
            self._settled[given_up] = True
            self._seen = seen
        return self._cache, self._settled
