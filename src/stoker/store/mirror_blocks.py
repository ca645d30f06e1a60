"""Map of the blocks of a mirrored file that are here: a byte each, in a file that processes share.

A byte is 0 (absent), 2 (room is taken, bytes are on their way) or 1 (here). It becomes 1 after its block was
written, and 0 before its bytes are given back, so a kill at any moment leaves blocks absent, never torn.
A reader looks at `generation` before and after: if it is unchanged, what was marked stayed complete.
After a power cut the map may be younger than the bytes; then their sums say so.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, StalledError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import PendingFile, RegularFile
from stoker.runtime.libc import punch_hole
from stoker.runtime.locks import lock_range
from stoker.units import MIB, format_bytes

if TYPE_CHECKING:
    from stoker.store.format import Buffer
    from stoker.store.remote import RemoteObject

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
        FileNotFoundError: It is missing.
        CorruptError: It is not a map, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            length = os.fstat(fd).st_size
            if length < _HEADER.size:
                raise CorruptError(f"{path} is not a map of blocks")
            self._map = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        magic, self.size, self.block_bytes, _, etag = _HEADER.unpack_from(self._map)
        self.count = -(-self.size // self.block_bytes) if self.block_bytes else 0
        if magic != _MAGIC or length != _length(self.count) or not self.block_bytes:
            raise CorruptError(f"{path} is not a map of blocks, or is damaged")
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
        """Return the blocks, first and one past the last, that hold bytes `begin:end`."""
        return begin // self.block_bytes, min(self.count, -(-end // self.block_bytes))

    def holds(self, first: int, last: int) -> bool:
        """Return True if blocks `first` to `last`, without it, are all here."""
        data: Any = self._map
        return data[_HEADER.size + first : _HEADER.size + last].count(HERE) == last - first

    def absent(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return runs of blocks among `first` to `last` that are not here."""
        missing = np.flatnonzero(self.state[first:last] != HERE) + first
        return runs(missing)

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Return the first byte, and one past the last, of blocks."""
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
    """Return sorted numbers as runs: first, and one past the last.

    >>> runs(np.array([3, 4, 7]))
    [(3, 5), (7, 8)]
    """
    if not len(blocks):
        return []
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(blocks, breaks)]


def new_map(size: int, *, block_bytes: int = BLOCK_BYTES, etag: str = "", whole: bool = False) -> bytes:
    """Return the bytes of a map of a file of `size` bytes, of which all is here or nothing."""
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


# ----------------------------------------------------------------------------------------------------------
# How many bytes of a mirror are on this machine, and which go when there are too many.
#
# All processes of a node share the count. It is raised before blocks are written, so a kill leaves it too
# high, never too low; each clean-up counts again what is really there.


log = logging.getLogger("stoker")
USED_FILE = ".used"
MAP_PREFIX = ".map-"
SLACK = 0.1
"""A clean-up frees this part of the limit more than is needed: it looks at every block that is here."""
WAIT_S = 60.0


def require_holes(folder: Path) -> None:
    """Check that parts of files in `folder` can be given back.

    Raises:
        ConfigError: They cannot, so no limit can be kept there.
    """
    probe = folder / f".tmp-{os.urandom(6).hex()}-probe"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, bytes(8192), 0)
        punch_hole(fd, 0, 4096)
    except OSError as error:
        raise ConfigError(
            f"the file system of {folder} cannot give back parts of files, so mirror_bytes cannot be kept "
            "there",
            hint="Put mirror_dir on a local disk (ext4, xfs, btrfs, tmpfs), or set no limit",
        ) from error
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


class Space:
    """The bytes of all mirrored files below `root`.

    Args:
        root: The folder of the mirror.
        limit_bytes: How many there may be; None: as many as fit.
    """

    def __init__(self, root: Path, limit_bytes: int | None, require: Callable[[], None]) -> None:
        """`require` raises a `ResourceError` where the mirror was removed."""
        self._root, self._require = root, require
        self.limit_bytes = limit_bytes
        self.evicted_bytes = 0
        """What this process gave back."""
        self._alone = threading.Lock()
        """Threads wait here for each other: the lock between processes is polled, which takes up to 20 ms."""

    def take(self, count: int, mark: Callable[[], None] | None = None) -> None:
        """Count bytes that are about to be written, and make room for them if need be.

        Args:
            count: How many.
            mark: Marks their blocks as coming, before anybody else counts.
        """

        def change(used: int) -> int:
            limit = self.limit_bytes
            if limit is not None and used + count > limit:
                used = self._shrink(max(0, int(limit * (1 - SLACK)) - count))
            if mark is not None:
                mark()
            return used + count

        self._locked(change)

    def free(self, count: int) -> int:
        """Give back at least `count` bytes, as far as there are so many; returns how many."""
        before = self.evicted_bytes
        self._locked(lambda _: self._shrink(max(0, self.held() - count)))
        return self.evicted_bytes - before

    def held(self, since: float = 0) -> int:
        """Return the bytes that are here and were read since then (seconds since 1970), counted by block."""
        return sum(_held_bytes(path, since) for path in self._maps())

    def used(self) -> int:
        """Return the bytes that are here or on their way, by the common count."""
        with suppress(FileNotFoundError, struct.error):
            return struct.unpack("<q", (self._root / USED_FILE).read_bytes())[0]
        return 0

    def _locked(self, change: Callable[[int], int]) -> None:
        path = self._root / USED_FILE
        with self._only_one() as got:
            if not got:
                raise StalledError(
                    f"{path} has been locked for {WAIT_S:g} s", hint=f"See what hangs in {self._root}"
                )
            self._require()
            used = change(self.used())
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(fd, struct.pack("<q", used), 0)
            finally:
                os.close(fd)

    @contextmanager
    def _only_one(self) -> Generator[bool]:
        """Keep all others on this machine from the count; yields whether that was got in time."""
        if not self._alone.acquire(timeout=WAIT_S):
            yield False
            return
        try:
            with lock_range(self._root / USED_FILE, 0, 1, timeout_s=WAIT_S) as got:
                yield got
        finally:
            self._alone.release()

    def _shrink(self, goal: int) -> int:
        """Give back what was unused longest until `goal` bytes are left; returns what is left."""
        left, held = 0, list[tuple[Path, BlockMap, NDArray[np.int64]]]()
        for path in self._maps():
            with suppress(OSError, CorruptError):
                blocks = BlockMap(path)
                self._drop(path, blocks, np.flatnonzero(blocks.state == COMING))  # what the dead left
                held.append((path, blocks, np.flatnonzero(blocks.state == HERE)))
                left += int((blocks.state != ABSENT).sum()) * blocks.block_bytes
        if left <= goal or not held:
            return left
        owner = np.repeat(np.arange(len(held)), [len(here) for _, _, here in held])
        numbers = np.concatenate([here for _, _, here in held])
        used = np.concatenate([blocks.used[here] for _, blocks, here in held])
        sizes = np.array([blocks.block_bytes for _, blocks, _ in held], np.int64)
        order = np.argsort(used, kind="stable")
        order = order[: int(np.searchsorted(np.cumsum(sizes[owner[order]]), left - goal)) + 1]
        for i in np.unique(owner[order]).tolist():
            path, blocks, _ = held[i]
            gone = self._drop(path, blocks, np.sort(numbers[order[owner[order] == i]]))
            self.evicted_bytes += gone
            left -= gone
        log.debug("%s: %s left after a clean-up", self._root, format_bytes(left))
        return left

    def _maps(self) -> list[Path]:
        patterns = (f"[!.]*/{MAP_PREFIX}*", f"[!.]*/[!.]*/{MAP_PREFIX}*")
        return sorted(path for pattern in patterns for path in self._root.glob(pattern))

    @staticmethod
    def _drop(path: Path, blocks: BlockMap, numbers: NDArray[np.int64]) -> int:
        """Give back blocks of one file; return how many bytes went. Blocks that are being written stay."""
        gone = 0
        if not len(numbers):
            return gone
        try:
            data = os.open(path.with_name(path.name.removeprefix(MAP_PREFIX)), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return gone
        try:
            for first, last in runs(numbers):
                with lock_range(path, first, last, timeout_s=0) as got:
                    if got:
                        blocks.drop(first, last)
                        punch_hole(data, *blocks.extent(first, last))
                        gone += (last - first) * blocks.block_bytes
        except OSError as error:
            log.warning("%s: %s", path, error)
        finally:
            os.close(data)
        return gone


def _held_bytes(path: Path, since: float) -> int:
    with suppress(OSError, CorruptError):
        blocks = BlockMap(path)
        return int(((blocks.state != ABSENT) & (blocks.used >= since)).sum()) * blocks.block_bytes
    return 0


# ----------------------------------------------------------------------------------------------------------
# One file of a mirror that is here in part: its bytes in a sparse file, and a map of its blocks.
#
# The map is made after its file and removed before it, so where there is a map, it is of that file.


class BlockFile:
    """An open file that stands for an object.

    Args:
        folder, name: Where it is.

    Raises:
        FileNotFoundError, CorruptError: It is missing or cannot be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._fd = -1
        self.name = name
        self.map_path = folder / f"{MAP_PREFIX}{name}"
        self.map = BlockMap(self.map_path)
        self.file = RegularFile(folder / name)
        if self.file.size != self.map.size:
            raise CorruptError(f"{folder / name} has {self.file.size} bytes, its map {self.map.size}")
        self._path = folder / name
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, begin: int, data: Buffer) -> None:
        """Write bytes that came; the map is not touched.

        Raises:
            ResourceError: The disk is full.
        """
        view, at = memoryview(data), 0
        with explain_disk_errors(self._path.parent):
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], begin + at)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def make_block_file(folder: Path, found: RemoteObject, *, block_bytes: int) -> None:
    """Make a file that stands for an object, with nothing of it here. Call it under the folder's lock."""
    remove_block_file(folder, found.name)
    pending = PendingFile(folder, found.name)
    try:
        pending.truncate(found.bytes)
        pending.show()
    finally:
        pending.discard()
    _put_map(folder, found.name, new_map(found.bytes, block_bytes=block_bytes, etag=found.etag))


def mark_complete(folder: Path, name: str, *, block_bytes: int, etag: str) -> None:
    """Say that a file was written here and is all there; it has no map so far."""
    size = (folder / name).stat().st_size
    _put_map(folder, name, new_map(size, block_bytes=block_bytes, etag=etag, whole=True))


def remove_block_file(folder: Path, name: str) -> None:
    """Remove map and file; a process that has them open keeps what they hold."""
    for path in (folder / f"{MAP_PREFIX}{name}", folder / name):
        with explain_disk_errors(folder), suppress(FileNotFoundError):
            path.unlink()


def _put_map(folder: Path, name: str, data: bytes) -> None:
    pending = PendingFile(folder, f"{MAP_PREFIX}{name}")
    try:
        pending.write_at(0, data)
        pending.show()
    finally:
        pending.discard()
