"""What a disk says: that it is full, that it cannot be written, how much it still takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import ReadOnlyError, ResourceError
from stoker.units import format_bytes

READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(path: Path) -> Generator[None]:
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
                f"{path}: {error.strerror}{_free(path)}. What was finished is kept; make room and run again",
                full=True,
            ) from error
        if error.errno in READ_ONLY_ERRNOS:
            raise ReadOnlyError(
                f"{path} cannot be written: {error.strerror}. Choose another folder, or change who may write"
            ) from error
        raise


def _free(path: Path) -> str:
    with suppress(OSError):
        usage = os.statvfs(path if path.is_dir() else path.parent)
        return f" ({format_bytes(usage.f_bavail * usage.f_frsize)} and {usage.f_favail:,} inodes free)"
    return ""
