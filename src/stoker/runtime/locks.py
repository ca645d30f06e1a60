"""Locks between processes that end with their holder, however it ends.

A lock is a `flock` on a small file. The kernel releases it when the holder closes the file, exits or is
killed. So nothing has to be cleaned up, and no lock is ever stale. The file itself stays, and its text says
who held it last, for messages. Some file systems have no locks (NFS without its lock daemon, some FUSE ones).
There every process gets every lock: work may be done twice, and what is written is right all the same.

| you have | use |
|---|---|
| the path of a lock file | `FileLock` |
| a folder that only one process may train in, export to, ... | `lock_folder` |
| a file whose ranges are locked one by one | `lock_range` |
| a file that is open already | `try_lock` |

A forked child does not keep the locks of its parent: a lock that outlived its holder in some worker would
keep all others out. A child that is started with `pass_fds` does.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import FormatError, ResourceError
from stoker.runtime.disk import explain_disk_errors

FIRST_POLL_S, LAST_POLL_S = 0.001, 0.02
"""The kernel has no `flock` with a timeout, so a waiter asks again and again, at growing intervals."""
NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What locking a file says on a file system that has no locks."""
NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What opening with `O_NOFOLLOW | O_NONBLOCK` says of a link, of a pipe without a reader, of a folder."""
FOLDER_LOCK = ".claim-"
"""Prefix of lock files in a folder. Every version of Stoker uses these names, so they must never change."""
_NOTE_BYTES = 200
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux on 64 bits: type, whence, start, length, pid."""
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
"""Locks that belong to one opening of a file; None where the system has only those of an entire process."""


def try_lock(fd: int, *, shared: bool = False, without_locks: bool = True) -> bool:
    """Lock an open file if it is not locked. Closing the file unlocks it.

    Args:
        fd: A descriptor of the file; one that only reads is enough.
        shared: Keep out only those that want it for themselves.
        without_locks: What to return where the file system has no locks.

    Returns:
        Whether the lock was got.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS_ERRNOS:
            raise
        return without_locks
    return True


def _try_lock_range(fd: int, first: int, last: int) -> bool:
    if _SET_LOCK is None:  # locking all of the file keeps the promise, and makes others wait longer
        return try_lock(fd)
    try:
        fcntl.fcntl(fd, _SET_LOCK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, max(1, last - first), 0))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS_ERRNOS:
            raise
    return True


class _LockedFile:
    """An open file that carries a lock; a forked child closes it."""

    def __init__(self, path: Path, *, create: bool, mode: int = 0o600) -> None:
        _close_after_fork()
        # O_NONBLOCK: opening a planted pipe would wait for a writer for ever.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        self.fd = os.open(path, flags, mode)
        _OPEN.add(self)

    def close(self) -> None:
        """Unlock; the lock goes with the last descriptor, so one that a child was given keeps it."""
        fd, self.fd = self.fd, -1
        _OPEN.discard(self)
        if fd >= 0:
            os.close(fd)


_OPEN: set[_LockedFile] = set()


@functools.cache
def _close_after_fork() -> None:
    def close_all() -> None:
        # Parent and child share the lock. Closing leaves it to the parent; LOCK_UN would take it away.
        for file in [*_OPEN]:
            file.close()

    os.register_at_fork(after_in_child=close_all)


_SIGN_S = 0.2
"""Seconds that a holder is given to sign; writing a few bytes takes far less."""


def _poll(attempt: Callable[[], bool], timeout_s: float) -> bool:
    """Try until it succeeds or `timeout_s` have passed; returns whether it succeeded."""
    deadline, pause = time.monotonic() + timeout_s, FIRST_POLL_S
    while not attempt():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(LAST_POLL_S, 2 * pause)
    return True


class FileLock:
    """A lock that one process, or several that share it, hold on a file.

        with FileLock(path) as lock:
            if not lock.acquire(timeout_s=10):
                raise StalledError(f"{path} is held by {lock.holder()}")

    Args:
        path: The lock file. It is made if need be, and stays afterwards.
        shared: Keep out only those that want it for themselves.
        create: False: where there is no file it is free, and `acquire` succeeds without making one.
        mode: Permissions of a new lock file.
        note: What the file says about its holder; None: `process 17 on host`.
    """

    def __init__(
        self,
        path: Path,
        *,
        shared: bool = False,
        create: bool = True,
        mode: int = 0o600,
        note: str | None = None,
    ) -> None:
        self.path = path
        self._shared, self._create, self._mode, self._note = shared, create, mode, note
        self._file: _LockedFile | None = None

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock, waiting for up to `timeout_s`; returns whether it was got.

        Raises:
            ReadOnlyError: No lock file can be made there.
            ResourceError: No space or quota left for it.
            FormatError: A link, pipe or folder is in its place.
        """
        assert self._file is None, "held already"
        return _poll(self._try, timeout_s)

    def _try(self) -> bool:
        try:
            file = self._open()
        except FileNotFoundError:
            if self._create:
                raise
            return True
        try:
            if try_lock(file.fd, shared=self._shared) and self._is_in_place(file.fd):
                self._file = file
                self._sign(file.fd)
                return True
        finally:
            if self._file is not file:
                file.close()
        return False

    def _open(self) -> _LockedFile:
        try:
            with explain_disk_errors(self.path):
                file = _LockedFile(self.path, create=self._create, mode=self._mode)
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS:
                raise FormatError(f"{self.path} is not a regular file", hint="Remove it") from error
            raise
        if not stat.S_ISREG(os.fstat(file.fd).st_mode):
            file.close()
            raise FormatError(f"{self.path} is not a regular file", hint="Remove it")
        return file

    def _is_in_place(self, fd: int) -> bool:
        # The file may be removed between our open and our lock. Two processes would then each hold
        # "the" lock, on two files. The link count comes first: some file systems give a file another inode
        # each time it is looked up.
        status = os.fstat(fd)
        if status.st_nlink:
            return True
        with suppress(FileNotFoundError):
            return os.path.samestat(status, self.path.lstat())
        return False

    def _sign(self, fd: int) -> None:
        note = signature() if self._note is None else self._note
        with suppress(OSError):  # a full disk is no reason to do without the lock
            os.ftruncate(fd, 0)
            os.pwrite(fd, note.encode(), 0)

    def note(self) -> str:
        """Return what the lock file says now; empty where it cannot be read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            return os.pread(fd, _NOTE_BYTES, 0).decode(errors="replace").strip()
        except OSError:
            return ""
        finally:
            os.close(fd)

    def holder(self) -> str:
        """Return who holds the lock, as `process 17 on host`; `another process` where that is not known."""
        _poll(lambda: bool(self.note()) or not self.path.exists(), _SIGN_S)  # it signs after it has locked
        note = self.note()
        if re.fullmatch(r"\d+", note):  # as `stoker data fetch` once signed
            return f"process {note}"
        return note if re.fullmatch(r"process \d+ on \S+", note) else "another process"

    def fileno(self) -> int:
        """Return the descriptor that holds the lock, to be passed to a child that is to hold it too."""
        assert self._file is not None
        return self._file.fd

    def release(self) -> None:
        """Give the lock back; safe to call twice, and without effect in a forked child."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def signature() -> str:
    """Return what a lock file says about this process."""
    return f"process {os.getpid()} on {os.uname().nodename}"


@contextmanager
def lock_folder(
    folder: Path, purpose: str, *, timeout_s: float = 0.0, shared: bool = False
) -> Generator[bool]:
    """Hold the lock of a folder for a purpose; yields whether it was got within `timeout_s`.

    Where there are no locks, or no room for the file, all processes get it: a clean-up must be able to make
    room.

    Raises:
        ReadOnlyError: The folder cannot be written, so nothing in it can be locked.
        FormatError: The lock file is a link or not a regular file.
    """
    with FileLock(folder / f"{FOLDER_LOCK}{purpose}", shared=shared) as lock:
        try:
            got = lock.acquire(timeout_s)
        except ResourceError:
            got = True
        yield got


def lock_holder(folder: Path, purpose: str) -> str:
    """Return who holds the lock of a folder, as `FileLock.holder`."""
    return FileLock(folder / f"{FOLDER_LOCK}{purpose}").holder()


@contextmanager
def lock_range(path: Path, first: int, last: int, *, timeout_s: float) -> Generator[bool]:
    """Hold the bytes `first:last` of a file; yields whether that was got within `timeout_s`.

    Threads keep each other out too. A file that was removed meanwhile counts as free: no other
    process comes to it.
    """
    try:
        file = _LockedFile(path, create=False)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _poll(lambda: _try_lock_range(file.fd, first, last), timeout_s)
    finally:
        file.close()
