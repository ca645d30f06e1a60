"""The order of examples beside the filling of a cache: as it is filled, shuffled within windows of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingRecordError
from stoker.loader.draws import Weights
from stoker.loader.order import Draws, Order, OrderKind
from stoker.loader.places import Places, weighted
from stoker.loader.turns import apportion
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.splitmix import Salt, keys_of, stream
from stoker.store import Recipe
from stoker.store.growing import BLOCKS, fill_blocks

WINDOW_BLOCKS = 4
"""Blocks whose examples are shuffled among themselves, a 64th of the set; part of the order, hence fixed."""
KIND = f"fill({BLOCKS},{WINDOW_BLOCKS})"
"""What the state keeps of it."""
ROOM = 1 << 32
"""Numbers set aside for the examples of a record whose length is not known before it is encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Records whose examples are shuffled together."""

    begin: int
    """Position of its first example."""
    stop: int
    """Position after its last one; where lengths vary, most positions are of no example."""
    slots: NDArray[np.int64]
    """The records, by their place among those that the loader serves."""


class FillOrder:
    """A pure function of recipe, samples, seed and epoch.

    Args:
        recipe: Of the cache.
        windows, indices, weights, seed: Of the loader.
        shuffled: False: by sample number.

    Raises:
        ConfigError, MissingRecordError: `indices` are no sample numbers of it, or `weights` not one for each.
    """

    def __init__(
        self,
        recipe: Recipe,
        windows: Windows | None,
        indices: Sequence[int] | NDArray[Any] | None,
        weights: Sequence[float] | NDArray[Any] | Weights | None,
        *,
        seed: int,
        shuffled: bool,
    ) -> None:
        self._seed, self._shuffled = seed, shuffled
        self.numbers = _numbers(recipe, indices)
        """Sample number of each record that is to be served, stored or not."""
        self.varying = windows is not None and recipe.schema[time_field(recipe.schema, windows.field)].ragged
        """How many examples a record has is known only once it is stored."""
        self.examples = _examples(recipe, windows, len(self.numbers))
        self.per_record = self.examples.per_record
        self.draws = None if weights is None else weighted(weights, self.places, self.examples)
        """What examples are drawn from by weight; None: each is served once."""
        self.windows = [*self._numbered(self._cut(fill_blocks(recipe)))]

    @property
    def places(self) -> Places:
        """The records, none of them anywhere yet."""
        none = np.full(len(self.numbers), -1, np.int32)
        return Places(numbers=self.numbers, shard=none, row=none, chosen=None)

    def served(
        self, window: Window, epoch: int, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples of a window in the order of an epoch, and their positions in it.

        Args:
            counts: Examples of each of its records, 0 of one that is quarantined.
        """
        if self.draws is not None:
            return self._drawn(window, epoch, counts > 0)
        room = counts if self.varying else np.full(len(counts), self.per_record, np.int64)
        ends = np.cumsum(room)
        starts = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - room, room)
        examples = np.repeat(window.slots * self.per_record, room) + starts
        here = np.repeat(counts > 0, room)
        if self._shuffled:
            order = np.argsort(keys_of(stream(self._seed, epoch, Salt.FILLING), examples), kind="stable")
            examples, here = examples[order], here[order]
        return examples[here], window.begin + np.flatnonzero(here)

    def _drawn(
        self, window: Window, epoch: int, here: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As many as the window has positions, by weight, of the records that are here; repeats occur."""
        assert self.draws is not None
        mass = np.diff(self.draws.cumulative, prepend=0.0)[window.slots] * here
        if not mass.any():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = np.arange(len(here) + 1, dtype=np.int64) * self.per_record
        order = Order(
            kind=OrderKind(kind="full"),
            count=int(first[-1]),
            seed=self._seed,
            global_batch=1,
            draws=Draws(cumulative=np.cumsum(mass), first=first),
        )
        slot, start = np.divmod(order.epoch(epoch)(window.begin, window.stop), self.per_record)
        return window.slots[slot] * self.per_record + start, np.arange(window.begin, window.stop)

    def lost(self, gone: NDArray[np.bool_]) -> int:
        """Positions to which nothing comes where these of its records are quarantined.

        Of records of varying length none are counted: they have no examples that anybody knows of.
        """
        if self.varying:
            return 0
        if self.draws is None:
            return int(gone.sum()) * self.per_record
        left = np.diff(self.draws.cumulative, prepend=0.0) * ~gone
        return sum(w.stop - w.begin for w in self.windows if not left[w.slots].any())

    def _cut(self, blocks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The records of each window."""
        if not self._shuffled:
            slots = np.arange(len(self.numbers), dtype=np.int64)
            return np.array_split(slots, BLOCKS // WINDOW_BLOCKS)
        by_start = np.argsort(blocks[:, 0])
        rank = by_start[np.searchsorted(blocks[by_start, 0], self.numbers, side="right") - 1]
        slots = np.argsort(rank, kind="stable")
        windows = -(-len(blocks) // WINDOW_BLOCKS)
        return np.split(slots, np.searchsorted(rank[slots] // WINDOW_BLOCKS, np.arange(1, windows)))

    def _numbered(self, pieces: Sequence[NDArray[np.int64]]) -> Iterator[Window]:
        """Windows with their positions; of draws each has its part by the weight of its records."""
        sizes = [len(piece) * self.per_record for piece in pieces]
        if self.draws is not None:
            mass = np.diff(self.draws.cumulative, prepend=0.0)
            wanted = (self.draws.samples or self.examples.count) / float(mass.sum())
            sizes = apportion([wanted * float(mass[piece].sum()) for piece in pieces])
        begin = 0
        for piece, size in zip(pieces, sizes, strict=True):
            if size:
                yield Window(begin=begin, stop=begin + size, slots=piece)
            begin += size


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
    """Numbers of examples, with room for any length where lengths vary."""
    if windows is None:
        return number_examples(None, records, None)
    field = recipe.schema[time_field(recipe.schema, windows.field)]
    if field.ragged:
        none = np.empty(0, np.int64)
        return Examples(count=records * ROOM, per_record=ROOM, first=none, start_every=windows.start_every)
    return number_examples(np.full(records, field.shape[0], np.int64), records, windows)
