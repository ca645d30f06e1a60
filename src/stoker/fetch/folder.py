"""Files that lie in folders: of this machine, or of what is mounted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stoker.errors import TransferError
from stoker.fetch.origin import PIECE_BYTES, Version


class FolderOrigin:
    """A path. Opening it never waits for a writer: pipes and devices are refused."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, offset: int, tag: str, *, stall_s: float) -> FileStream:
        """See `Origin`."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"{self._path}: {error.strerror}") from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise TransferError(f"{self._path} is no regular file")
        version = Version(bytes=found.st_size, tag=f"{found.st_size} {found.st_mtime_ns} {found.st_ino}")
        return FileStream(fd, offset if tag in ("", version.tag) else 0, version, self._path)


class FileStream:
    """An open file."""

    def __init__(self, fd: int, offset: int, version: Version, path: Path) -> None:
        self._fd, self._at, self._path = fd, offset, path
        self.offset, self.version = offset, version

    def read(self) -> bytes:
        """See `Stream`."""
        try:
            piece = os.pread(self._fd, PIECE_BYTES, self._at)
        except OSError as error:
            raise TransferError(f"{self._path}: {error.strerror}", passing=True) from error
        self._at += len(piece)
        return piece

    def stop(self) -> None:
        """Nothing ends a read of a file; its thread is left behind."""

    def close(self) -> None:
        """Close it; in the thread that reads."""
        os.close(self._fd)
