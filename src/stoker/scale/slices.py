"""Cut what is missing into slices for workers elsewhere: whole groups, large at first and small at the end.

Arithmetic on numbers; nothing here knows who the workers are. A slice is so long that starting on it costs
little beside it, so short that the last ones end together, and ends where a run of the source ends when that
is near, so that a compressed chunk is read by one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.store import Recipe

SHARE = 2
"""A slice is at most this fraction of what is left for each worker: the last ones are short."""
FIRST_SHARE = 16
"""The same while nothing is known about how long a group takes."""
FIRST_GROUPS = 16
"""Groups of a slice at most while nothing is known."""
SHORTEST_S = 2.0
"""Work in a slice at least, where it is known: readers start anew for each."""


@dataclass(slots=True, kw_only=True)
class Slice:
    """Samples that one worker is to encode."""

    key: int
    """Its number, counted from 0."""
    numbers: NDArray[np.int64]
    """Of samples, ascending; whole groups as far as they are missing."""
    losses: int = 0
    """How often a worker was lost while it had this, or what this is the rest of."""

    @property
    def span(self) -> str:
        """Its first and last sample."""
        return f"{self.numbers[0]}-{self.numbers[-1]}"


class Slices:
    """Hands out slices, and takes back what a lost worker did not store.

    Args:
        recipe: Says where groups begin.
        missing: Numbers to encode, ascending.
        runs: Of the source; a slice ends with one where that is near.
        longest_s: Work in a slice at most.
    """

    def __init__(
        self, recipe: Recipe, missing: NDArray[np.int64], runs: Sequence[range], *, longest_s: float
    ) -> None:
        self._size = recipe.group.samples
        self._longest_s = longest_s
        offsets = np.array([part.offset for part in recipe.parts], np.int64)
        base = offsets[np.searchsorted(offsets, missing, side="right") - 1] if len(missing) else missing
        groups = base + (missing - base) // self._size * self._size
        firsts, self._begins = np.unique(groups, return_index=True)
        self._begins = np.append(self._begins, len(missing))
        starts = np.array([run.start for run in runs], np.int64)
        owner = np.searchsorted(starts, firsts, side="right")
        self._edges = np.flatnonzero(np.diff(owner)) + 1
        """Groups with which another run of the source begins."""
        self._missing = missing
        self._next = 0
        self._made = 0
        self._again: deque[Slice] = deque()
        self._seconds, self._groups = 0.0, 0

    @property
    def groups_left(self) -> int:
        """Groups that nobody has been given yet; those that came back are not counted."""
        return len(self._begins) - 1 - self._next

    @property
    def empty(self) -> bool:
        """Whether there is nothing to hand out."""
        return not self._again and not self.groups_left

    def take(self, workers: int) -> Slice:
        """The next slice for one of `workers`; there must be one."""
        if self._again:
            return self._again.popleft()
        first, stop = self._next, self._end(self._next + self._wanted(max(1, workers)))
        self._next = stop
        self._made += 1
        return Slice(key=self._made - 1, numbers=self._missing[self._begins[first] : self._begins[stop]])

    def give_back(self, lost: Slice, unstored: NDArray[np.int64]) -> bool:
        """A worker was lost: what of its slice is not stored goes to the next one. False: nothing is left."""
        rest = np.intersect1d(lost.numbers, unstored)
        if not len(rest):
            return False
        self._again.append(Slice(key=lost.key, numbers=rest, losses=lost.losses + 1))
        return True

    def learn(self, done: Slice, seconds: float) -> None:
        """A slice took so long, its start included."""
        self._seconds += seconds
        self._groups += -(-len(done.numbers) // self._size)

    def _wanted(self, workers: int) -> int:
        """Groups in the next slice, before it is fitted to runs."""
        left = self.groups_left
        if not self._groups:
            return max(1, min(left // (FIRST_SHARE * workers), FIRST_GROUPS))
        pace = self._groups / max(self._seconds, 1e-6)
        share = left // (SHARE * workers)
        return max(1, min(self._longest_s * pace, max(SHORTEST_S * pace, share)).__floor__())

    def _end(self, wanted: int) -> int:
        """Where a slice ends: with a run, if one ends in its second half."""
        last = len(self._begins) - 1
        if wanted >= last:
            return last
        half = self._next + (wanted - self._next) // 2
        near = self._edges[np.searchsorted(self._edges, half, side="right") :]
        near = near[: np.searchsorted(near, wanted, side="right")]
        return int(near[-1]) if len(near) else wanted
