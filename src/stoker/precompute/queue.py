"""What is left to encode: fixed groups, handed out so that what a reader has decoded serves its next group.

A group is `samples` consecutive numbers of one part, counted from the part's beginning, so it is the same
group whatever is missing, whoever reads it, and however far the source has grown since. Little is held for
each; a `GroupWork` is made when it is handed out.

Groups and runs (rows of chunks) rarely end together: a group that lies across two runs needs both of them
decoded. Were runs dealt out in turn, every one of them would be decoded by two readers. So each reader works
through a stretch of its own from front to back. One that has nothing left takes half of the longest stretch,
and that cut costs a run decoded twice, unless a group ends there; so few cuts of the costly kind are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ITEM_BYTES = 16 * 1024**2
_ITEM_GROUPS = 256
_RUNS_A_SHARED_ONE = 12
"""One run in so many may be decoded twice; at least one, since a second reader gains more than that costs."""
_NOBODY = -1


@dataclass(slots=True, kw_only=True)
class GroupWork:
    """One group that someone reads."""

    key: int
    """Place among the groups of this run."""
    part: int
    """Index of the part."""
    numbers: range
    """Its members; fewer than the group's size at a part's end."""
    avoid: int = -1
    """Reader that failed on it; another one is to try, where there is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpan:
    """Where a part lies in the numbering."""

    offset: int
    """Number of its first sample."""
    count: int
    """Its samples."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Consecutive groups that one reader works through."""

    owner: int
    """Number of the reader, or `_NOBODY`."""
    next: int
    """The first group not handed out."""
    stop: int
    """The first group after it."""


class WorkQueue:
    """Groups with missing members, in order for each reader; those given back come again last."""

    def __init__(
        self,
        parts: Sequence[PartSpan],
        group_samples: int,
        missing: NDArray[np.int64],
        *,
        bad: Callable[[int], bool],
    ) -> None:
        self._parts = parts
        self._size = group_samples
        self._missing = missing
        self._bad = bad
        offsets = np.array([part.offset for part in parts], np.int64)
        self._part_of = np.searchsorted(offsets, missing, side="right") - 1
        base = offsets[self._part_of] if len(missing) else missing
        self._firsts, index = np.unique(
            base + (missing - base) // group_samples * group_samples, return_index=True
        )
        self._group_parts = self._part_of[index]
        self.settled: set[int] = set()
        """Members that are stored without being encoded."""
        self._again: deque[GroupWork] = deque()
        self.on_hold: frozenset[int] = frozenset()
        """Parts of which nothing is handed out: whether their storage answers is about to be known."""
        self._outstanding = 0
        self._stretches = [_Stretch(owner=_NOBODY, next=0, stop=len(self._firsts))]
        self._edges = np.arange(1, len(self._firsts))
        self._clean = np.ones(len(self._edges), bool)
        self._shared = 0
        self._weight = 1

    def follow_runs(self, runs: Sequence[range], group_bytes: int) -> None:
        """Cut between readers where runs end from now on.

        Args:
            runs: Of the source; a group goes with the run of its first member.
            group_bytes: Bytes of one group's samples, to judge how much to hand out at a time.
        """
        starts = np.array([run.start for run in runs], np.int64)
        owner = np.searchsorted(starts, self._firsts, side="right") - 1
        self._edges = np.flatnonzero(np.diff(owner)) + 1
        # Clean: the group before ends with its run, or earlier, so no reader needs the runs of both sides.
        ends = np.append(starts[1:], runs[-1].stop)[owner] if len(runs) else self._firsts
        parts = np.array([part.offset + part.count for part in self._parts], np.int64)
        lasts = np.minimum(self._firsts + self._size, parts[self._group_parts])
        self._clean = (lasts <= ends)[self._edges - 1]
        self._weight = max(1, group_bytes)

    def follow_blocks(self, blocks: NDArray[np.int64]) -> None:
        """Hand out block after block, whoever asks, so that the first are whole before the last are begun.

        Args:
            blocks: Stretches `[start, stop)` of samples that end where groups do, `(n, 2)`.
        """
        bounds = np.searchsorted(self._firsts, blocks).tolist()
        self._stretches = [_Stretch(owner=_NOBODY, next=low, stop=high) for low, high in bounds if low < high]

    @property
    def groups(self) -> int:
        """Groups of this run in all."""
        return len(self._firsts)

    @property
    def finished(self) -> bool:
        """Nothing left to hand out, and nothing handed out that has not come back."""
        return self._outstanding == 0 and not self._again and not self.untaken

    def wanted(self, work: GroupWork) -> list[int]:
        """Members to encode: missing, and neither set aside nor settled in the meantime."""
        low, high = np.searchsorted(self._missing, (work.numbers.start, work.numbers.stop))
        settled = self.settled
        return [n for n in self._missing[low:high].tolist() if not self._bad(n) and n not in settled]

    def absent(self, work: GroupWork) -> list[int]:
        """Members that are zeros: they have been set aside."""
        return [number for number in work.numbers if self._bad(number)]

    @property
    def untaken(self) -> int:
        """Groups that were never handed out."""
        return sum(stretch.stop - stretch.next for stretch in self._stretches)

    def take(self, reader: int, readers: int) -> list[GroupWork]:
        """The next item for `reader` out of `readers`: consecutive groups; empty if there is none for it."""
        while self._again:
            suits = (i for i, work in enumerate(self._again) if self._suits(work, reader, readers))
            place = next(suits, None)
            if place is None or (self.untaken and self._again[place].avoid >= 0):
                break  # what failed once comes after everything else: its storage may be back by then
            work = self._again[place]
            del self._again[place]
            if self.wanted(work):
                self._outstanding += 1
                return [work]
        while (stretch := self._stretch(reader)) is not None:
            stop = min(stretch.stop, stretch.next + self._item_groups(stretch, readers))
            if self.on_hold:
                stop = next((key for key in range(stretch.next, stop) if self._held(key)), stop)
            works = [self._work(key) for key in range(stretch.next, stop)]
            stretch.next = stop
            if works := [work for work in works if self.wanted(work)]:
                self._outstanding += len(works)
                return works
        return []

    def _suits(self, work: GroupWork, reader: int, readers: int) -> bool:
        return work.part not in self.on_hold and (readers < 2 or work.avoid != reader)

    def _held(self, key: int) -> bool:
        return bool(self.on_hold) and int(self._group_parts[key]) in self.on_hold

    def leave(self, reader: int) -> None:
        """A reader is gone; what was its stretch is anybody's."""
        for stretch in self._stretches:
            if stretch.owner == reader:
                stretch.owner = _NOBODY

    def _item_groups(self, stretch: _Stretch, readers: int) -> int:
        left = (stretch.stop - stretch.next) // (4 * max(readers, 1))
        return max(1, min(_ITEM_BYTES // self._weight, _ITEM_GROUPS, left))

    def _stretch(self, reader: int) -> _Stretch | None:
        """The stretch that `reader` goes on with: its own, one that nobody has, or half of the longest."""
        self._stretches = [stretch for stretch in self._stretches if stretch.next < stretch.stop]
        ready = [stretch for stretch in self._stretches if not self._held(stretch.next)]
        for owner in (reader, _NOBODY):
            for stretch in ready:
                if stretch.owner == owner:
                    stretch.owner = reader
                    return stretch
        for stretch in sorted(ready, key=lambda one: one.next - one.stop):
            cut = self._cut(stretch)
            if cut is not None:
                rest = _Stretch(owner=reader, next=cut, stop=stretch.stop)
                stretch.stop = cut
                self._stretches.append(rest)
                return None if self._held(cut) else rest
        return None

    def _cut(self, stretch: _Stretch) -> int | None:
        """Where to halve a stretch: at a clean edge near the middle, else while the price is low.

        A last group goes to the other reader where that decodes nothing twice.
        """
        if stretch.stop - stretch.next == 1:
            free = not len(self._edges) or stretch.next in self._edges[self._clean]
            return stretch.next if free else None
        low, high = np.searchsorted(self._edges, (stretch.next + 1, stretch.stop))
        edges, clean = self._edges[low:high], self._clean[low:high]
        middle, size = (stretch.next + stretch.stop) / 2, stretch.stop - stretch.next
        if not len(self._edges):
            return stretch.next + size // 2  # one run: the source has no wish
        spent = self._shared >= max(1, (len(self._edges) + 1) // _RUNS_A_SHARED_ONE)
        if clean.any():
            nearest = int(edges[clean][np.abs(edges[clean] - middle).argmin()])
            if spent or abs(nearest - middle) <= size / 4:
                return nearest
        if spent:
            return None
        self._shared += 1
        return int(edges[np.abs(edges - middle).argmin()]) if len(edges) else stretch.next + size // 2

    def _work(self, key: int) -> GroupWork:
        part = int(self._group_parts[key])
        first = int(self._firsts[key])
        end = self._parts[part].offset + self._parts[part].count
        return GroupWork(key=key, part=part, numbers=range(first, min(first + self._size, end)))

    def done(self) -> None:
        """One group that was handed out is dealt with."""
        self._outstanding -= 1

    def give_back(self, work: GroupWork, *, avoid: int = -1) -> None:
        """A group that was handed out must be read again; `avoid` names the reader that failed on it."""
        self._outstanding -= 1
        work.avoid = avoid
        if avoid < 0:
            self._again.appendleft(work)
        else:
            self._again.append(work)

    def part_numbers(self, part: int) -> list[int]:
        """Every number of a part that this run was to store."""
        return self._missing[self._part_of == part].tolist()
