"""Locks on ranges of blocks that end with their holder, between threads and processes alike."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stoker.store.pending import NO_LOCKS_ERRNOS

_FLOCK = struct.Struct("hhqqi4x")
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
"""Locks that belong to one opening of a file; None where the system has only those of a whole process."""
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.02


@contextmanager
def lock_range(path: Path, first: int, last: int, *, wait_s: float) -> Generator[bool]:
    """Hold bytes `first:last` of a file for oneself; yields whether that was got within `wait_s` seconds.

    Where the file system has no locks all go on: a block may be fetched twice, and is right all the same.
    So does whoever has a file open that was removed meanwhile: nobody else comes to it any more.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _wait(fd, first, last, time.monotonic() + wait_s)
    finally:
        os.close(fd)


def _wait(fd: int, first: int, last: int, deadline: float) -> bool:
    pause = FIRST_POLL_S
    while True:
        try:
            if _SET_LOCK is None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, max(1, last - first), 0)
                fcntl.fcntl(fd, _SET_LOCK, wanted)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(LAST_POLL_S, 2 * pause)
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
            return True
        else:
            return True
