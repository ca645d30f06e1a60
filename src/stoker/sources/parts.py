"""Base of sources of several files: find a sample's file, and runs that stay within a file."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class CountedPart(Protocol):
    """One described file."""

    @property
    def count(self) -> int:
        """Samples of this file."""
        ...


PartT = TypeVar("PartT", bound=CountedPart)


def check_index(index: int, count: int) -> None:
    """Refuse an index that no sample has.

    Raises:
        IndexError: It is below 0, or `count` and more.
    """
    if not 0 <= index < count:
        raise IndexError(f"sample {index} does not exist: this source has {count}")


def even_runs(count: int, length: int) -> list[range]:
    """Return all indices in runs of `length`.

    >>> even_runs(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


class PartedSource(ABC, Generic[PartT]):
    """Samples of several files, one file after another. A subclass describes the files and reads a row."""

    @abstractmethod
    def _parts(self) -> Sequence[PartT]:
        """Return the described files, in order; they are opened on the first call."""

    @abstractmethod
    def _edges(self, part: PartT) -> Sequence[int]:
        """Return where runs of a file begin, and its number of rows."""

    def __len__(self) -> int:
        """Return the number of samples of all files."""
        return self._firsts()[-1]

    def runs(self) -> Sequence[range]:
        """Return rows that are stored together, never of two files."""
        found: list[range] = []
        for part, first in zip(self._parts(), self._firsts(), strict=False):
            pairs = itertools.pairwise(self._edges(part))
            found += [range(first + low, first + high) for low, high in pairs if high > low]
        return found

    def _find(self, index: int) -> tuple[PartT, int]:
        """Return the file of a sample, and its row there.

        Raises:
            IndexError: There is no such sample.
        """
        firsts = self._firsts()
        check_index(index, firsts[-1])
        place = bisect.bisect_right(firsts, index) - 1
        return self._parts()[place], index - firsts[place]

    def _firsts(self) -> list[int]:
        """Return the first index of each file, and the number of samples."""
        return list(itertools.accumulate((part.count for part in self._parts()), initial=0))
