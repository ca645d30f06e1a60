"""Which blocks of a mirrored file are here: a byte for each, in a small file that all processes map.

A byte is 0 (absent), 2 (room is taken, bytes are on their way) or 1 (here). It becomes 1 after its block was
written, and 0 before its bytes are given back, so a kill at any moment leaves blocks absent, never torn.
A reader looks at `generation` before and after: unchanged, what was marked at first was whole until the end.
After a power cut the map may be younger than the bytes; then their sums say so.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.units import MIB

BLOCK_BYTES = MIB
_MAGIC = b"stokmap1"
_HEADER = struct.Struct("<8sQQQ224s")
_GENERATION_AT = 24
ABSENT, HERE, COMING = 0, 1, 2


class BlockMap:
    """The map of one file.

    Args:
        path: Where it is.

    Raises:
        FileNotFoundError: There is none.
        CorruptError: It is none, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            length = os.fstat(fd).st_size
            if length < _HEADER.size:
                raise CorruptError(f"{path} is no map of blocks")
            self._map = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        magic, self.size, self.block_bytes, _, etag = _HEADER.unpack_from(self._map)
        self.count = -(-self.size // self.block_bytes) if self.block_bytes else 0
        if magic != _MAGIC or length != _length(self.count) or not self.block_bytes:
            raise CorruptError(f"{path} is no map of blocks, or is damaged")
        self.etag = etag.rstrip(b"\0").decode(errors="replace")
        self.state: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, self.count, _HEADER.size)
        """`ABSENT`, `HERE` or `COMING` for each block, `(count,)`."""
        at = _used_at(self.count)
        self.used: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, self.count, at)
        """When each was last read, in seconds since 1970, `(count,)`; 0: goes first."""
        self._generation: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, 1, _GENERATION_AT)

    @property
    def generation(self) -> int:
        """Another number whenever blocks were given back, by any process, or the map was made again."""
        return int(self._generation[0])

    def blocks(self, begin: int, end: int) -> tuple[int, int]:
        """The blocks, first and one past the last, that hold bytes `begin:end`."""
        return begin // self.block_bytes, min(self.count, -(-end // self.block_bytes))

    def holds(self, first: int, last: int) -> bool:
        """Whether blocks `first` to `last`, without it, are all here."""
        data: Any = self._map
        return data[_HEADER.size + first : _HEADER.size + last].count(HERE) == last - first

    def absent(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of blocks among `first` to `last` that are not here."""
        missing = np.flatnonzero(self.state[first:last] != HERE) + first
        return runs(missing)

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """First byte, and one past the last, of blocks."""
        return first * self.block_bytes, min(self.size, last * self.block_bytes)

    def expect(self, first: int, last: int) -> None:
        """Mark blocks that are about to be written, by who holds the lock on them."""
        self.state[first:last] = COMING

    def add(self, first: int, last: int) -> None:
        """Mark blocks whose bytes have been written."""
        self.used[first:last] = _now()
        self.state[first:last] = HERE

    def drop(self, first: int, last: int) -> None:
        """Unmark blocks whose bytes are about to go."""
        # Random, not counted up: two that drop at once would both write the same next count, and a reader
        # that came between them would see no change.
        self._generation[0] = secrets.randbits(64)
        self.state[first:last] = ABSENT

    def touch(self, first: int, last: int) -> None:
        """Note that blocks were read now."""
        self.used[first:last] = _now()


def runs(blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Sorted numbers as runs: first, and one past the last.

    >>> runs(np.array([3, 4, 7]))
    [(3, 5), (7, 8)]
    """
    if not len(blocks):
        return []
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(blocks, breaks)]


def new_map(size: int, *, block_bytes: int = BLOCK_BYTES, etag: str = "", whole: bool = False) -> bytes:
    """The bytes of a map of a file of `size` bytes, of which all is here or nothing."""
    count = -(-size // block_bytes)
    data = bytearray(_length(count))
    tag = etag.encode()
    # What does not fit is left out: reads are then not bound to a version, and sums alone guard them.
    _HEADER.pack_into(
        data, 0, _MAGIC, size, block_bytes, secrets.randbits(64), tag if len(tag) <= 224 else b""
    )
    if whole:
        data[_HEADER.size : _HEADER.size + count] = b"\1" * count
        np.frombuffer(data, np.uint32, count, _used_at(count))[:] = _now()
    return bytes(data)


def _now() -> int:
    return int(time.time()) & 0xFFFFFFFF


def _used_at(count: int) -> int:
    return _HEADER.size + -(-count // 8) * 8


def _length(count: int) -> int:
    return _used_at(count) + 4 * count
