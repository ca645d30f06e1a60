"""Files that appear under their name whole or not at all.

A file is written under a temporary name that its writer holds an flock on, so that one whose writer died can
be told from one that is being written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker.runtime.disk import explained
from stoker.runtime.files import publish
from stoker.runtime.locks import try_lock
from stoker.store.protocols import Buffer
from stoker.units import MIB

TEMPORARY = ".tmp-"
TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]+-[A-Za-z0-9_.-]+")
"""What is swept: a folder may hold others' files that begin alike."""
FLUSH_BYTES = 8 * MIB
"""Bytes after which the kernel is asked to begin writing them out, so that the final fsync is short."""


@functools.cache
def _sync_range() -> Callable[..., int] | None:
    """Linux `sync_file_range`, or None elsewhere."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


class LocalPending:
    """A temporary file that `commit` turns into `name`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._unflushed = 0
        with explained(folder):
            self._fd, self._temporary = self._begin()

    def _begin(self) -> tuple[int, Path]:
        while True:
            path = self._folder / f"{TEMPORARY}{secrets.token_hex(6)}-{self._name}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                # Without locks nobody can tell that we are dead, so nobody sweeps.
                if try_lock(fd) and os.fstat(fd).st_nlink:
                    return fd, path
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # a sweeper came between creating and locking: the file is going, make another

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        with explained(self._folder):
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], offset + at)
        self._unflushed += len(view)
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            if sync := _sync_range():
                sync(self._fd, 0, 0, 2)  # 2: start writing what is dirty, wait for nothing

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back `size` bytes."""
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OSError(errno.EIO, f"read {len(data)} of {size} bytes back from {self._temporary}")
        return data

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        with explained(self._folder):
            os.ftruncate(self._fd, size)

    @property
    def path(self) -> Path:
        """The temporary."""
        return self._temporary

    def show(self) -> None:
        """Give the file its name without making anything durable: it is a copy that can be had again."""
        with explained(self._folder):
            self._temporary.replace(self._folder / self._name)
        self._close()

    def commit(self) -> None:
        """Make the bytes durable, then the name."""
        try:
            with explained(self._folder):
                publish(self._temporary, self._folder / self._name)
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        """Remove the temporary, or leave it to be swept later; safe to call twice and after `commit`."""
        if self._fd >= 0:
            with suppress(OSError):  # the error that led here is the one to report
                self._temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        # Synced or given up, so an error means nothing; the number is free even then: never close it again.
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.discard()


def put_file(path: Path, data: bytes) -> None:
    """Write a small file atomically and durably, replacing one of that name."""
    pending = LocalPending(path.parent, path.name)
    try:
        pending.write_at(0, data)
        pending.commit()
    finally:
        pending.discard()
