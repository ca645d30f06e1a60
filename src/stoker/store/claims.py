"""Advisory claims: who encodes, compacts or writes the index now.

A claim is an flock on a small file in the folder, so it ends with its holder, however that ends. Records
stay right without claims: the same ones may be encoded twice, and an index may know less than one before it
until it is made again. That one run trains in a folder, and one gc, repair or mend works there, needs them.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from stoker.atomic import explained
from stoker.errors import FormatError, ResourceError, StalledError
from stoker.store.local import NOT_A_FILE_ERRNOS, LocalStorage
from stoker.store.pending import NO_LOCKS_ERRNOS

POLL_S = 0.02
INDEX_WAIT_S = 60.0
"""How long whoever writes an index or rearranges shards waits for the one before."""


@contextmanager
def claim(folder: Path, purpose: str, *, wait_s: float = 0.0, shared: bool = False) -> Generator[bool]:
    """Hold `<folder>/.claim-<purpose>`; yields whether it was got within `wait_s` seconds.

    A `shared` claim keeps out those that are not shared, and only those. Where there are no locks, or no room
    for the file, nobody can claim anything, and all go on.

    Raises:
        ReadOnlyError: The folder cannot be written, so nothing in it can be claimed.
        FormatError: The claim file is a link or not a regular file.
    """
    try:
        fd = _open(folder / f".claim-{purpose}")
    except ResourceError:  # a clean-up must go on to make room
        yield True
        return
    try:
        got = _lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + wait_s)
        if got:
            _sign(fd)
        yield got
    finally:
        os.close(fd)


def maintaining(folder: Path) -> AbstractContextManager[None]:
    """Hold the claim of the process that rearranges a folder's shards: one at a time.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "compact", "is being compacted or repaired")


def indexing(folder: Path) -> AbstractContextManager[None]:
    """Hold the claim of the process that writes a folder's index; read the shards under it too.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "index", "has its index written")


@contextmanager
def _only(folder: Path, purpose: str, doing: str) -> Generator[None]:
    with claim(folder, purpose, wait_s=INDEX_WAIT_S) as got:
        if not got:
            raise StalledError(
                f"{folder} {doing} by {holder(folder, purpose)}, which took longer than {INDEX_WAIT_S:g} s. "
                "Run again when it is done"
            )
        yield


def _open(path: Path) -> int:
    try:
        with explained(path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in NOT_A_FILE_ERRNOS:
            raise FormatError(f"{path} is not a regular file. Remove it") from error
        raise


def holder(folder: Path, purpose: str) -> str:
    """Who holds a claim, as `process 17 on host`; `another process` where that is not known."""
    try:
        text = LocalStorage(folder).read(f".claim-{purpose}", limit_bytes=1024).decode(errors="replace")
    except (OSError, FormatError):
        return "another process"
    return text if re.fullmatch(r"process \d+ on \S+", text) else "another process"


def _sign(fd: int) -> None:
    """Say in the claim file who has it, for the messages of those who have not."""
    with suppress(OSError):  # a full disk is no reason to do without the claim
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def _lock(fd: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
            return True
        else:
            return True
