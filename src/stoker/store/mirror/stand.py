"""One file of a mirror that is here in part: its bytes in a sparse file, and a map of its blocks.

The map is made after its file and removed before it, so where there is a map, it is of that file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from stoker.errors import CorruptError
from stoker.runtime.disk import explained
from stoker.runtime.files import PendingFile
from stoker.store.local import LocalFile
from stoker.store.mirror.block_map import BlockMap, new_map
from stoker.store.mirror.space import MAP_PREFIX
from stoker.store.protocols import Buffer
from stoker.store.remote import Object


class Stand:
    """An open file that stands for an object.

    Args:
        folder, name: Where it is.

    Raises:
        FileNotFoundError, CorruptError: There is none, or none that can be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._fd = -1
        self.name = name
        self.map_path = folder / f"{MAP_PREFIX}{name}"
        self.map = BlockMap(self.map_path)
        self.file = LocalFile(folder / name)
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
        with explained(self._path.parent):
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], begin + at)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def make_stand(folder: Path, found: Object, *, block_bytes: int) -> None:
    """Make a file that stands for an object, with nothing of it here. Call it under the folder's lock."""
    remove_stand(folder, found.name)
    pending = PendingFile(folder, found.name)
    try:
        pending.truncate(found.bytes)
        pending.show()
    finally:
        pending.discard()
    _put_map(folder, found.name, new_map(found.bytes, block_bytes=block_bytes, etag=found.etag))


def mark_whole(folder: Path, name: str, *, block_bytes: int, etag: str) -> None:
    """Say that a file was written here and is all there; it has no map so far."""
    size = (folder / name).stat().st_size
    _put_map(folder, name, new_map(size, block_bytes=block_bytes, etag=etag, whole=True))


def remove_stand(folder: Path, name: str) -> None:
    """Remove map and file; whoever has them open keeps what they hold."""
    for path in (folder / f"{MAP_PREFIX}{name}", folder / name):
        with explained(folder), suppress(FileNotFoundError):
            path.unlink()


def _put_map(folder: Path, name: str, data: bytes) -> None:
    pending = PendingFile(folder, f"{MAP_PREFIX}{name}")
    try:
        pending.write_at(0, data)
        pending.show()
    finally:
        pending.discard()
