"""How many bytes of a mirror are on this machine, and which go when there are too many.

All processes of a node share the count. It is raised before blocks are written, so a kill leaves it too high,
never too low; each clean-up counts again what is really there.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, StalledError
from stoker.runtime.libc import punch_hole
from stoker.runtime.locks import lock_range
from stoker.store.mirror.block_map import ABSENT, COMING, HERE, BlockMap, runs
from stoker.units import format_bytes

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
            "there. Put mirror_dir on a local disk (ext4, xfs, btrfs, tmpfs), or set no limit"
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
        """Bytes that are here and were read since then, in seconds since 1970; counted block by block."""
        return sum(_held_bytes(path, since) for path in self._maps())

    def used(self) -> int:
        """Bytes that are here or on their way, by the common count."""
        with suppress(FileNotFoundError, struct.error):
            return struct.unpack("<q", (self._root / USED_FILE).read_bytes())[0]
        return 0

    def _locked(self, change: Callable[[int], int]) -> None:
        path = self._root / USED_FILE
        with lock_range(path, 0, 1, timeout_s=WAIT_S) as got:
            if not got:
                raise StalledError(f"{path} has been locked for {WAIT_S:g} s. See what hangs in {self._root}")
            self._require()
            used = change(self.used())
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(fd, struct.pack("<q", used), 0)
            finally:
                os.close(fd)

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
        """Give back blocks of one file; returns how many bytes went. What somebody is writing stays."""
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
