"""Which blocks of which files some examples are read from, many examples at a time.

Blocks are those that a mirror fetches and gives back (`store.mirror`), numbered over all shards of a cache.
Reads nothing but headers: where a column begins is asked of each shard once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.loader.outputs import RECORD, Output
from stoker.loader.pieces import plan_runs
from stoker.loader.places import Places
from stoker.loader.windows import Examples
from stoker.schema import Field
from stoker.store.layout import axis_length, rows_per_block

if TYPE_CHECKING:
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Steps of one field that an example takes."""

    name: str
    field: Field
    first: int = 0
    stop: int | None = None
    """From the window's start; None: whole records."""


class Reach:
    """Where the examples of one loader lie. Used by one thread."""

    def __init__(
        self, cache: Cache, places: Places, examples: Examples, outputs: tuple[Output, ...], block_bytes: int
    ) -> None:
        """`block_bytes`: of the blocks that files are fetched in."""
        self._cache, self._places, self._examples = cache, places, examples
        self.block_bytes = block_bytes
        sizes = np.array([entry.bytes for entry in cache.index.shards], dtype=np.int64)
        ends = np.cumsum(-(-sizes // block_bytes))
        self.first: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), ends])
        """First block of each shard, and how many blocks there are, `(shards + 1,)`."""
        entries = enumerate(cache.index.shards)
        self._compressed = {i for i, entry in entries if entry.raw is not None}
        schema = cache.recipe.columns
        whole = dict.fromkeys(output.field for output in outputs if output.index == RECORD)
        self._taken = [Taken(name=name, field=schema[name]) for name in whole] + [
            Taken(name=run.field, field=schema[run.field], first=run.first, stop=run.stop)
            for run in plan_runs(schema, outputs)
            if run.field not in whole
        ]
        self._begins = {one.name: np.full(len(sizes), -1, np.int64) for one in self._taken}
        """Where each column begins in each shard; -1: not asked yet."""

    def blocks(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks that these examples lie in, each once, in the order in which they are first taken."""
        records, starts = self._examples.locate(examples, self._examples.first)
        shard, row = self._places.shard[records], self._places.row[records].astype(np.int64)
        self._ask(np.unique(shard))
        taken: list[NDArray[np.int64]] = []
        owners: list[NDArray[np.int64]] = []
        for one in self._taken:
            begin, end = self._extent(one, shard, row, starts)
            self._to_file(shard, begin, end)
            low = begin // self.block_bytes
            count = np.where(end > begin, -(-end // self.block_bytes) - low, 0)
            owner = np.repeat(np.arange(len(shard)), count)
            inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
            taken.append((self.first[shard] + low)[owner] + inside)
            owners.append(owner)
        every = np.concatenate(taken)
        blocks, first = np.unique(every[np.argsort(np.concatenate(owners), kind="stable")], return_index=True)
        return blocks[np.argsort(first)]

    def place(self, block: int) -> tuple[int, int]:
        """Shard, and which of its blocks."""
        shard = int(np.searchsorted(self.first, block, side="right")) - 1
        return shard, block - int(self.first[shard])

    def _ask(self, shards: NDArray[np.int32]) -> None:
        for shard in shards.tolist():
            for name, begins in self._begins.items():
                if begins[shard] < 0:
                    begins[shard] = self._cache.shard(shard).columns[name].offset

    def _extent(
        self, one: Taken, shard: NDArray[np.int32], row: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First byte, and one past the last, of what each example reads of a field, in the ordinary shard."""
        before, length = self._lengths(one, shard, row)
        low, high = np.zeros_like(row), length
        if one.stop is not None:  # whole blocks of sums, within the record
            steps = rows_per_block(one.field)
            low = (starts + one.first) // steps * steps
            high = np.minimum(-(-(starts + one.stop) // steps) * steps, length)
        begin, size = self._begins[one.name][shard], one.field.row_bytes
        return begin + (before + low) * size, begin + (before + high) * size

    def _to_file(self, shard: NDArray[np.int32], begin: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        """Put the places in the file in place of those in the ordinary shard, where shards are compressed."""
        for number in self._compressed.intersection(np.unique(shard).tolist()):
            own = shard == number
            begin[own], end[own] = self._cache.shard(number).stored_extents(begin[own], end[own])

    def _lengths(
        self, one: Taken, shard: NDArray[np.int32], row: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps before each record in its shard, and its own."""
        if not one.field.ragged:
            length = axis_length(one.field)
            return row * length, np.full_like(row, length)
        before, after = np.zeros_like(row), np.zeros_like(row)
        for number in np.unique(shard).tolist():
            own = np.flatnonzero(shard == number)
            offsets = self._cache.shard(number).offsets(one.name)
            before[own], after[own] = offsets[row[own]], offsets[row[own] + 1]
        return before, after - before
