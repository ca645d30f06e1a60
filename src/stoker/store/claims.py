"""Advisory claims: who encodes, compacts or writes the index now.

A claim is an flock on a small file in the folder, so it ends with its holder, however that ends. Claims
save work; nothing relies on them for correctness.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stoker.errors import FormatError, ReadOnlyError

POLL_S = 0.02


@contextmanager
def claim(folder: Path, purpose: str, *, wait_s: float = 0.0) -> Generator[bool]:
    """Hold `<folder>/.claim-<purpose>`; yields whether it was got within `wait_s` seconds.

    Raises:
        ReadOnlyError: The folder cannot be written, so nothing in it can be claimed.
        FormatError: The claim file is a link or not a regular file.
    """
    path = folder / f".claim-{purpose}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ReadOnlyError(
                f"{folder} cannot be written ({error.strerror}), so no claim can be taken"
            ) from error
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FormatError(f"{path} is not a regular file. Remove it") from error
        raise
    try:
        yield _lock(fd, time.monotonic() + wait_s)
    finally:
        os.close(fd)


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True
