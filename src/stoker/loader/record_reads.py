"""Records of one field, or parts of them, from several shards: few calls, without the interpreter's lock."""

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
        self._fds_of = [shard.file.direct_fd for shard in shards]
        self._block_bytes = places[0].block_bytes
        table = np.array([place[:6] for place in places], np.int64)[own]
        self._fds = np.array(self._fds_of, np.int32)[own]
        self._begins, self.sizes = table[:, 0] + rows * table[:, 1], table[:, 1]
        self._seeds, self._sums = table[:, 3] + 8 * rows, table[:, 4] + 8 * table[:, 5] * rows
        self._generations: dict[int, object] = {}
        self.may: NDArray[np.bool_] = self._fds >= 0
        """Which can be read here, `(n,)`."""
        for number, place in enumerate(places):
            if place.offsets is None or place.firsts is None:
                continue
            of_shard = np.flatnonzero(own == number)
            first, last = place.offsets[rows[of_shard]], place.offsets[rows[of_shard] + 1]
            self._begins[of_shard] = place.begin + first * place.unit_bytes
            self.sizes[of_shard] = (last - first) * place.unit_bytes
            self._sums[of_shard] = place.sums + 8 * place.firsts[rows[of_shard]]

    def cut(self, first: NDArray[np.int64], stop: NDArray[np.int64], *, check: bool) -> NDArray[np.int64]:
        """Read bytes `first:stop` of each record only, or, to check them, the blocks that they are in.

        Args:
            first, stop: Bytes of the records, `(n,)`; what a record does not have cannot be read here.
            check: As `read` will be told.

        Returns:
            The first byte that is read of each.
        """
        self.may &= (first >= 0) & (stop <= self.sizes)
        unit = self._block_bytes if check else 1
        low = first // unit * unit
        high = np.minimum(-(-stop // unit) * unit, self.sizes)
        self._begins += low
        self._sums += 8 * (low // self._block_bytes)
        self.sizes = np.maximum(high - low, 0)
        return low

    def look(self) -> None:
        """Note which of what is to be read is here, where shards are fetched."""
        for number, shard in enumerate(self._shards):
            generation = shard.file.generation if self._fds_of[number] >= 0 else None
            if generation is not None:
                of_shard = np.flatnonzero(self._own == number)
                self._generations[number] = generation
                begins = self._begins[of_shard]
                self.may[of_shard] &= shard.file.here(begins, begins + self.sizes[of_shard])

    def read(self, outs: NDArray[np.int64], *, check: bool) -> tuple[NDArray[np.bool_], int]:
        """Read those that can be into memory at these addresses. Call `look` before.

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
