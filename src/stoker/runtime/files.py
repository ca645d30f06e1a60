"""Files and folders that appear under their name complete or not at all, and survive a power cut.

Everything that writes a result (shards, checkpoints, reports, made-up data) does it here, in this order:
write under a temporary name in the same folder, sync the bytes, rename, sync the folder. Each step needs the
one before: a name must not lead to bytes that are not on the disk, and a rename is durable only with its
folder. A failed fsync is never tried again: the kernel has dropped the pages that it could not write, and the
second call would report success.

| you write | use |
|---|---|
| a small file, from bytes | `write_file` |
| a file or folder by somebody else's code, to a path | `replacing` |
| a large file, piece by piece, in a folder that is swept | `PendingFile` |
| a file that must not replace one that is there | `create_file` |

A kill leaves a temporary behind, which nobody reads. Those of `PendingFile` are locked by their writer, so
`dead_temporaries` finds the ones whose writer is dead.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.errors import ReadOnlyError
from stoker.runtime.disk import READ_ONLY_ERRNOS, explained
from stoker.runtime.libc import start_writeback
from stoker.runtime.locks import try_lock
from stoker.units import MIB

NO_FOLDER_ERRNOS = (
    *READ_ONLY_ERRNOS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Why a folder can never be made where it is asked for: a file is in the way, the file system takes none."""
TEMPORARY = ".tmp-"
"""Prefix of what `PendingFile` writes. Every version of Stoker uses it, so it must never change."""
TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]+-[A-Za-z0-9_.-]+")
"""What is swept: a folder may hold others' files that begin alike."""
FLUSH_BYTES = 8 * MIB
"""Bytes after which the kernel is asked to begin writing them out, so that the final fsync is short."""


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary path to make a file or a folder of files at; it becomes `path` when the block ends well.

    Use it with `with replacing(path) as temporary:`. Nothing is there yet: open it for writing, or make it a
    folder. When the block raises, what was made is removed and `path` is as it was. A kill leaves a
    temporary `.<name>.<8 hex>.part` behind, which nobody reads.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explained(path):
            yield temporary
            publish(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what `replacing` left in a folder when it was killed.

    Nothing tells these temporaries from ones that are being written, so hold the lock that their
    writers hold.
    """
    for temporary in folder.glob(".*.part"):
        _remove(temporary)


def create_file(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Write a small file atomically and durably, unless there is one; returns whether this process made it.

    Args:
        path: Its name.
        data: All of it.
        mode: Permissions, from its first byte on.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explained(path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            _sync(temporary)
            try:
                os.link(temporary, path)  # a rename would replace what another process has put there
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True
    finally:
        _remove(temporary)


def publish(temporary: Path, path: Path) -> None:
    """Make a finished file or folder durable, give it its name, and make the name durable.

    A file replaces a file in one step. Nothing replaces a folder that holds anything: that is an error.
    """
    if temporary.is_dir():
        for file in temporary.iterdir():
            _sync(file)
    _sync(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder that a setting names, and those above it, unless it is there.

    Raises:
        ReadOnlyError: None can be made there.
        ResourceError: No space or quota left.
        OSError: Another failure of the system, as it came.
    """
    try:
        with explained(path):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, ReadOnlyError) or error.errno not in NO_FOLDER_ERRNOS:
            raise
        raise ReadOnlyError(
            f"{path} cannot be made: {_in_the_way(path, str(error.strerror))}. Choose another folder"
        ) from error
    return path


def _in_the_way(path: Path, why: str) -> str:
    place = next(place for place in (path, *path.parents) if os.path.lexists(place) or place == Path())
    return f"{why} (in {place})" if place.is_dir() else f"{place} is not a folder"


def sync_folder(path: Path) -> None:
    """Make names in a folder durable; errors as `explained`."""
    with explained(path):
        _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class PendingFile:
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

    def write_at(self, offset: int, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        with explained(self._folder):
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], offset + at)
        self._unflushed += len(view)
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            start_writeback(self._fd)

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


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically and durably, replacing one of that name.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    pending = PendingFile(path.parent, path.name)
    try:
        pending.write_at(0, data)
        pending.commit()
    finally:
        pending.discard()


def dead_temporaries(folder: Path, *, remove: bool) -> Iterator[tuple[Path, int]]:
    """Yield temporaries of `PendingFile` whose writers are dead, with their bytes.

    On a file system without locks none counts as dead.

    Args:
        folder: Where they are; one that is not there has none.
        remove: Remove each before it is yielded.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries if TEMPORARY_NAME.fullmatch(entry.name)):
            with suppress(OSError):  # it has got its name meanwhile
                size = _dead_bytes(folder / name, remove=remove)
                if size is not None:
                    yield folder / name, size


def _dead_bytes(path: Path, *, remove: bool) -> int | None:
    """Return the size of a temporary, removed if asked; None: its writer lives, or it is something else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        # A shared lock meets the writer's, and a descriptor that only reads can have it everywhere.
        if not stat.S_ISREG(status.st_mode) or not try_lock(fd, shared=True, without_locks=False):
            return None
        if remove:
            path.unlink()
        else:
            path.lstat()
        return status.st_size
    finally:
        os.close(fd)
