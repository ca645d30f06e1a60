"""A file of a mirror, opened: what is read is fetched first, where it is not here."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stoker.errors import CorruptError, ResourceError

if TYPE_CHECKING:
    from stoker.store.mirror.fetch import Fetcher
    from stoker.store.mirror.stand import Stand

TRIES = 3
"""Times that blocks are fetched which are given back before they are read; then they go past the mirror."""


class MirrorFile:
    """An `OpenFile` of an object. Safe to use from several threads."""

    def __init__(self, fetcher: Fetcher, stand: Stand) -> None:
        self._fetcher, self._stand = fetcher, stand
        self._direct = 0
        """Reads that went past the mirror."""
        self._counters = fetcher.counters

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._stand.map.size

    @property
    def origin(self) -> str:
        """Where its bytes come from."""
        return self._fetcher.origin(self._stand)

    @property
    def generation(self) -> tuple[int, int]:
        """Another value whenever bytes that were read before may have been fetched again."""
        return self._stand.map.generation, self._direct

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`, fetching what is not here.

        Raises:
            CorruptError: The file ends before `out` is full, or was replaced since it was opened.
            StalledError, ServiceError: It cannot be fetched.
        """
        if not len(out) or self._read_here(offset, [out]):
            self._counters.hits += 1  # under no lock: a count for people may miss one of two threads
            return
        self._check(offset, len(out))
        begin = perf_counter()
        try:
            self._fetched(offset, out)
        finally:
            self._counters.add(misses=1, wait_s=perf_counter() - begin)

    def _fetched(self, offset: int, out: memoryview[Any]) -> None:
        for _ in range(TRIES):
            try:
                self._fetcher.fetch(self._stand, [(offset, offset + len(out))])
            except ResourceError:
                break  # the disk is full; what is asked for can be had all the same
            if self._read_here(offset, [out]):
                return
        self._direct += 1  # two threads may count as one: each still sees another value than before its read
        self._fetcher.read_direct(self._stand, offset, out)

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` with what is here and in the page cache."""
        return self._read_here(offset, outs, wait=False)

    def fileno(self) -> int:
        """None: pages of it may not be here, and must be fetched before they are read."""
        return -1

    def ahead(self, offset: int, size: int) -> None:
        """Begin to fetch bytes that will be read."""
        self._fetcher.ahead(self._stand, [(offset, offset + size)])

    def mend(self, offset: int, size: int) -> bool:
        """Have bytes that are not what they should be fetched anew at the next read."""
        self._fetcher.mend(self._stand, offset, offset + size)
        return True

    def close(self) -> None:
        """Nothing: what is open goes with the last who refers to it."""

    def _read_here(self, offset: int, outs: Sequence[memoryview[Any]], *, wait: bool = True) -> bool:
        stand = self._stand
        blocks, size = stand.map, sum(map(len, outs))
        first, last = blocks.blocks(offset, offset + size)
        if offset + size > blocks.size:
            return False
        before = blocks.generation
        if not blocks.holds(first, last):
            return False
        if not wait:
            there = stand.file.read_cached(offset, outs)
        else:
            there = True
            stand.file.read_into(offset, outs[0])
        if not there or blocks.generation != before:
            return False
        blocks.touch(first, last)
        return True

    def _check(self, offset: int, size: int) -> None:
        if offset + size > self.size:
            raise CorruptError(
                f"{self.origin} ends at byte {self.size}, expected {offset + size}: truncated or replaced"
            )
