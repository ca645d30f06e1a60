"""Whole records of one field from several shards, read in few calls and without the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker import native

if TYPE_CHECKING:
    from stoker.store import Shard

# First all that the page cache has is read, for which nothing waits; then the rest, announced before.
PASSES = (os.RWF_NOWAIT, 0) if hasattr(os, "RWF_NOWAIT") else (0,)


class RecordReads:
    """Records to be read.

    Args:
        shards: The shards that they are in.
        own: Place of each record's shard among them, `(n,)`.
        rows: Their rows there, `(n,)`.
        field: The field.
    """

    def __init__(
        self, shards: Sequence[Shard], own: NDArray[np.intp], rows: NDArray[np.int64], field: str
    ) -> None:
        self._shards, self._own = shards, own
        places = [shard.fields[field].record_places for shard in shards]
        fds = [shard.file.direct_fd for shard in shards]
        self._block_bytes = places[0].block_bytes
        table = np.array([place[:6] for place in places], np.int64)[own]
        self._fds = np.array(fds, np.int32)[own]
        self._begins, self.sizes = table[:, 0] + rows * table[:, 1], table[:, 1]
        self._seeds, self._sums = table[:, 3] + 8 * rows, table[:, 4] + 8 * table[:, 5] * rows
        self._generations: dict[int, object] = {}
        self.may: NDArray[np.bool_] = self._fds >= 0
        """Which can be read here, `(n,)`."""
        for number, (shard, place) in enumerate(zip(shards, places, strict=True)):
            generation = shard.file.generation if fds[number] >= 0 else None
            if generation is None and place.offsets is None:
                continue
            of_shard = np.flatnonzero(own == number)
            if place.offsets is not None and place.firsts is not None:
                first, last = place.offsets[rows[of_shard]], place.offsets[rows[of_shard] + 1]
                self._begins[of_shard] = place.begin + first * place.unit_bytes
                self.sizes[of_shard] = (last - first) * place.unit_bytes
                self._sums[of_shard] = place.sums + 8 * place.firsts[rows[of_shard]]
            if generation is not None:
                self._generations[number] = generation
                begins = self._begins[of_shard]
                self.may[of_shard] &= shard.file.here(begins, begins + self.sizes[of_shard])

    def read(self, outs: NDArray[np.int64], *, check: bool) -> tuple[NDArray[np.bool_], int]:
        """Read those that can be into memory at these addresses.

        Args:
            outs: Room for each record, `(n,)`.
            check: Whether to compare them with their sums.

        Returns:
            Which are there and right, `(n,)`, and how many were waited for.
        """
        done, waited = np.zeros(len(outs), np.bool_), 0
        every = native.Extents(self._fds, self._begins, self.sizes, outs, self._seeds, self._sums)
        for flags in PASSES:
            left = np.flatnonzero(self.may & ~done)
            if not len(left):
                break
            some = every.take(left)
            if not flags:
                native.announce(some)
                waited = len(left)
            done[left] = native.read_records(some, self._block_bytes, check=check, flags=flags) == native.READ
        for number, generation in self._generations.items():
            if self._shards[number].file.generation != generation:  # bytes may have gone meanwhile
                done[self._own == number] = False
        return done, waited
