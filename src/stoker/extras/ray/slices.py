"""Cut what is missing into slices for workers elsewhere: whole groups, evenly among those that have nothing.

Arithmetic on numbers; nothing here knows who the workers are, or how fast. A worker ends early when its time
is up, or when others have nothing left to do; what it did not get to comes back and is cut again. So workers
are started seldom, and a slow worker does not hold up others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.store import Recipe

MOST_SAMPLES = 2**18
"""In a slice: its numbers are sent to the worker, 8 bytes each."""
NEAR = 8
"""A slice is shortened by up to this part of it to end where a run of the source does."""


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
    """Hands out slices, and takes back what a worker did not get to, or was lost with.

    Args:
        recipe: Says where groups begin.
        missing: Numbers to encode, ascending.
        runs: Of the source; a slice ends with one where that is near, so that one worker reads a compressed
            chunk.
    """

    def __init__(self, recipe: Recipe, missing: NDArray[np.int64], runs: Sequence[range]) -> None:
        self._size = recipe.group.samples
        self._offsets = np.array([part.offset for part in recipe.parts], np.int64)
        self._edges = np.array([run.start for run in runs], np.int64)
        self._left: deque[NDArray[np.int64]] = deque([missing] if len(missing) else [])
        """The samples that no worker has, in pieces of complete groups."""
        self._made = 0
        self._again: deque[Slice] = deque()
        """What was lost with its worker."""

    @property
    def empty(self) -> bool:
        """True if there is nothing to hand out."""
        return not self._again and not self._left

    def take(self, idle: int) -> Slice:
        """Return the next slice, one of `idle` workers' share of what is left; there must be something."""
        if self._again:
            return self._again.popleft()
        wanted = -(-sum(map(len, self._left)) // max(1, idle))
        piece = self._left.popleft()
        end = self._end(piece, min(wanted, MOST_SAMPLES))
        if end < len(piece):
            self._left.appendleft(piece[end:])
        self._made += 1
        return Slice(key=self._made - 1, numbers=piece[:end])

    def put_back(self, rest: NDArray[np.int64]) -> None:
        """A worker ended before it got to these."""
        if len(rest):
            self._left.append(rest)

    def give_back(self, lost: Slice, unstored: NDArray[np.int64]) -> None:
        """A worker was lost: what of its slice is not stored goes to the next one, which counts that."""
        rest = np.intersect1d(lost.numbers, unstored)
        if len(rest):
            self._again.append(Slice(key=lost.key, numbers=rest, losses=lost.losses + 1))

    def _end(self, piece: NDArray[np.int64], wanted: int) -> int:
        """How much of a piece makes a slice: whole groups, up to the end of a run if that is near."""
        if wanted >= len(piece):
            return len(piece)
        latest = self._group_end(int(piece[wanted - 1]))
        at = int(np.searchsorted(self._edges, latest, side="right")) - 1
        if at >= 0 and self._edges[at] > piece[0]:
            near = int(np.searchsorted(piece, self._group_end(int(self._edges[at]) - 1)))
            if near >= wanted - wanted // NEAR:
                return near
        return int(np.searchsorted(piece, latest))

    def _group_end(self, number: int) -> int:
        """Return the sample after the last of its group, which may be a short one at the end of a part."""
        part = int(np.searchsorted(self._offsets, number, side="right")) - 1
        first = int(self._offsets[part])
        end = first + ((number - first) // self._size + 1) * self._size
        later = self._offsets[part + 1 : part + 2]
        return min(end, int(later[0])) if len(later) else end
