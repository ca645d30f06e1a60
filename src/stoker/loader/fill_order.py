"""The order of examples beside the filling of a cache: as it is filled, shuffled within windows of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingRecordError
from stoker.loader.order import keys_of, stream
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.store import Recipe
from stoker.store.growing import BLOCKS, fill_blocks

WINDOW_BLOCKS = 4
"""Blocks whose examples are shuffled among themselves, a 64th of the set; part of the order, hence fixed."""
KIND = f"fill({BLOCKS},{WINDOW_BLOCKS})"
"""What the state keeps of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Records whose examples are shuffled together."""

    begin: int
    """Position of its first example."""
    stop: int
    """Position after its last one."""
    slots: NDArray[np.int64]
    """The records, by their place among those that the loader serves."""


class FillOrder:
    """A pure function of recipe, samples, seed and epoch.

    Args:
        recipe: Of the cache.
        windows, indices, seed: Of the loader.
        shuffled: False: by sample number.

    Raises:
        ConfigError, MissingRecordError: `indices` are no sample numbers of it.
    """

    def __init__(
        self,
        recipe: Recipe,
        windows: Windows | None,
        indices: Sequence[int] | NDArray[Any] | None,
        *,
        seed: int,
        shuffled: bool,
    ) -> None:
        self._seed, self._shuffled = seed, shuffled
        self.numbers = _numbers(recipe, indices)
        """Sample number of each record that is to be served, stored or not."""
        self.examples = _examples(recipe, windows, len(self.numbers))
        self.per_record = self.examples.per_record
        self.windows = [*self._cut(fill_blocks(recipe))]

    def shuffled(self, window: Window, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples of a window in the order of an epoch, and their positions in it."""
        starts = np.arange(self.per_record, dtype=np.int64)
        examples = (window.slots[:, None] * self.per_record + starts).reshape(-1)
        if self._shuffled:
            keys = keys_of(stream(self._seed, epoch, salt=3), examples)
            examples = examples[np.argsort(keys, kind="stable")]
        return examples, np.arange(window.begin, window.stop, dtype=np.int64)

    def _cut(self, blocks: NDArray[np.int64]) -> Iterator[Window]:
        if not self._shuffled:
            slots = np.arange(len(self.numbers), dtype=np.int64)
            pieces = np.array_split(slots, BLOCKS // WINDOW_BLOCKS)
        else:
            by_start = np.argsort(blocks[:, 0])
            rank = by_start[np.searchsorted(blocks[by_start, 0], self.numbers, side="right") - 1]
            slots = np.argsort(rank, kind="stable")
            windows = -(-len(blocks) // WINDOW_BLOCKS)
            pieces = np.split(slots, np.searchsorted(rank[slots] // WINDOW_BLOCKS, np.arange(1, windows)))
        begin = 0
        for piece in pieces:
            if len(piece):
                stop = begin + len(piece) * self.per_record
                yield Window(begin=begin, stop=stop, slots=piece)
                begin = stop


def _numbers(recipe: Recipe, indices: Sequence[int] | NDArray[Any] | None) -> NDArray[np.int64]:
    if indices is None:
        return np.arange(recipe.count, dtype=np.int64)
    wanted = np.asarray(indices)
    if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
        raise ConfigError(f"indices must be a list of sample numbers, got {wanted.dtype} {wanted.shape}")
    if len(wanted) == 0 or wanted.min() < 0 or wanted.max() >= recipe.count:
        raise MissingRecordError(f"indices= must name samples of the cache, from 0 to {recipe.count - 1}")
    return wanted.astype(np.int64)


def _examples(recipe: Recipe, windows: Windows | None, records: int) -> Examples:
    if windows is None:
        return number_examples(None, records, None)
    steps = recipe.schema[time_field(recipe.schema, windows.field)].shape[0]
    return number_examples(np.full(records, steps, np.int64), records, windows)
