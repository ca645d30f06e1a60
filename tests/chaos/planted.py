"""Commit protocols that are known to be bad: the harness must find something wrong with each."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.runtime import files, locks
from stoker.store import folder, load_recipe, storage


def none() -> None:
    """The protocol as it is."""


def _sync_only(kind: Callable[[int], bool]) -> None:
    real = os.fsync
    os.fsync = lambda fd: (
        real(fd) if kind(os.fstat(fd if isinstance(fd, int) else fd.fileno()).st_mode) else None
    )


def no_fsync() -> None:
    """Files are not synced, folders are."""
    _sync_only(stat.S_ISDIR)


def no_folder_fsync() -> None:
    """Files are synced, folders are not."""
    _sync_only(stat.S_ISREG)


def _replace_publish(publish: Callable[[Path, Path], None]) -> None:
    files.publish = publish


def in_place() -> None:
    """Files are written under their final names."""

    def publish(temporary: Path, path: Path) -> None:
        data = temporary.read_bytes()
        with path.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            file.write(data[len(data) // 2 :])
            os.fsync(file.fileno())
        temporary.unlink()
        files.sync_folder(path.parent)

    _replace_publish(publish)


def manifest_first() -> None:
    """The index names a shard before the shard has its name."""
    real = files.publish

    def publish(temporary: Path, path: Path) -> None:
        if path.name.startswith("shard-"):
            temporary.rename(path)  # for as long as the index is made
            folder.Folder(path.parent, path.parent.parent.name, load_recipe(path.parent)).finish()
            path.rename(temporary)
        real(temporary, path)

    _replace_publish(publish)


def short_write() -> None:
    """What a write reports is not looked at."""

    def write_at(self: files.PendingFile, offset: int, data: Any) -> None:
        os.pwrite(self._fd, data, offset)

    files.PendingFile.write_at = write_at


def fsync_again() -> None:
    """A failed fsync is tried again, and believed."""
    real = os.fsync

    def fsync(fd: Any) -> None:
        try:
            real(fd)
        except OSError:
            real(fd)

    os.fsync = fsync


def lock_by_pid() -> None:
    """A lock is a file with a process id; it holds while there is such a process."""

    @contextmanager
    def lock_folder(path: Path, purpose: str, *, timeout_s: float = 0.0) -> Generator[bool]:
        file = path / f".claim-{purpose}"
        while True:
            try:
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:
                if not _alive(file):
                    file.unlink(missing_ok=True)
                time.sleep(0.01)
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)
        try:
            yield True
        finally:
            file.unlink()

    assert folder.lock_folder is locks.lock_folder
    folder.lock_folder = locks.lock_folder = storage.lock_folder = lock_folder


def _alive(file: Path) -> bool:
    try:
        os.kill(int(file.read_text() or 0), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return False
    return True


def swallowed() -> None:
    """A write that fails is taken for one that succeeded."""
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        try:
            return real(fd, data, offset)
        except OSError:
            return memoryview(data).nbytes

    os.pwrite = pwrite


PROTOCOLS: dict[str, Callable[[], None]] = {
    "none": none,
    "no-fsync": no_fsync,
    "no-folder-fsync": no_folder_fsync,
    "in-place": in_place,
    "manifest-first": manifest_first,
    "short-write": short_write,
    "fsync-again": fsync_again,
    "lock-by-pid": lock_by_pid,
    "swallowed": swallowed,
}
