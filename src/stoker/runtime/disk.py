"""What a disk says: that it is full, that it cannot be written, how much it still takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from stoker.errors import ReadOnlyError, ResourceError
from stoker.units import format_bytes, format_count

READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explain_disk_errors(path: Path) -> Generator[None]:
    """Turn a full disk or a read-only place into an error that says so.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ReadOnlyError):
            raise
        if error.errno in FULL_ERRNOS:
            raise ResourceError(
                f"{path}: {error.strerror}{_free(path)}",
                hint="What was finished is kept; make room and run again",
                full=True,
            ) from error
        if error.errno in READ_ONLY_ERRNOS:
            raise ReadOnlyError(
                f"{path} cannot be written: {error.strerror}",
                hint="Choose another folder, or change who may write",
            ) from error
        raise


def _free(path: Path) -> str:
    with suppress(OSError):
        free = free_space(path if path.is_dir() else path.parent)
        return f" ({format_bytes(free.bytes)} and {format_inodes(free.inodes)} free)"
    return ""


class FreeSpace(NamedTuple):
    """Bytes that a file system still takes from this user."""

    bytes: int
    inodes: int | None
    """Files that can still be made; None: no limit but the room."""
    total_bytes: int = 0
    """Size of the file system."""

    def require(
        self,
        folder: Path,
        needed_bytes: int,
        need: str,
        *,
        reserve_bytes: int,
        advice: str,
        files: int = 0,
    ) -> None:
        """Check that something fits on a disk, before it is begun.

        Args:
            folder: Where it is to be written.
            needed_bytes: What it takes.
            need: What it is, with its verb: `20 records need`.
            reserve_bytes: What is to stay free, since others write there too.
            advice: What to do when it does not fit, after "Make room,".
            files: How many files it makes.

        Raises:
            ResourceError: It does not fit, in bytes or in files.
        """
        if needed_bytes + reserve_bytes > self.bytes:
            raise ResourceError(
                f"{folder} has {format_bytes(self.bytes)} free, {need} {format_bytes(needed_bytes)} and "
                f"{format_bytes(reserve_bytes)} of reserve",
                hint=f"Make room, {advice}",
            )
        if self.inodes is not None and self.inodes < files:
            raise ResourceError(
                f"{folder} has room for {format_count(self.inodes)} more files, {need} {format_count(files)}",
                hint=f"Remove files there, {advice}",
            )


def free_space(path: Path, *, nearest: bool = False) -> FreeSpace:
    """Return what is free on the file system of a path. A network file system that is away hangs here.

    Args:
        path: A file or folder.
        nearest: Look at the nearest folder above that is there, for a path that is yet to be made.

    Raises:
        OSError: The path is not there, or cannot be looked at.
    """
    place = path.absolute()
    while nearest and not os.path.exists(place) and place != place.parent:  # noqa: PTH110  Path.exists raises EACCES
        place = place.parent
    stat = os.statvfs(place)
    # Of unlimited inodes a file system says that it has none at all.
    inodes = stat.f_favail if stat.f_files else None
    return FreeSpace(stat.f_bavail * stat.f_frsize, inodes, stat.f_blocks * stat.f_frsize)


def format_inodes(inodes: int | None) -> str:
    """Return a number of free inodes as text: `1,234 inodes`, `unlimited inodes`."""
    return "unlimited inodes" if inodes is None else f"{inodes:,} inodes"
