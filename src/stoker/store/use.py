"""Which processes use a folder, so that it is not removed meanwhile, and which one changes it.

A process that has a folder open holds a shared flock on its recipe, through a descriptor that only reads.
That works on read-only mounts, needs no file of its own, and ends with its holder, however that ends. A
process that removes anything takes the exclusive lock first. The modification time of the recipe says when
the folder was last opened.

What only one process may do in a folder at a time, it does under `runtime.locks.lock_folder`. Records stay
right without those locks: the same ones may be encoded twice, and an index may know less than one before it
until it is made again. That one run trains in a folder, and one gc or repair works there, needs them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from stoker.errors import FormatError, StalledError
from stoker.runtime.files import RegularFile
from stoker.runtime.locks import LAST_POLL_S, lock_folder, lock_holder, try_lock
from stoker.store.format import RECIPE_FILE

WAIT_S = 10.0
"""How long opening waits for a clean-up, which holds the folder for as long as it unlinks files."""
NOTED_EVERY_S = 3600.0
"""Opening notes the time of use at most this often."""
INDEX_WAIT_S = 60.0
"""How long a process that writes an index or rearranges shards waits for the one before."""


class UsageLock:
    """Holds a folder open until nothing refers to this any more.

    Raises:
        FormatError: The folder has no recipe, or was removed meanwhile.
        StalledError: It could not be held for `WAIT_S` seconds; says why.
    """

    def __init__(self, folder: Path) -> None:
        self._file = _shared(folder)


def note_use(folder: Path) -> None:
    """Note that a folder was opened now. A process that only maintains it, or skips it, does not."""
    recipe = folder / RECIPE_FILE
    with suppress(OSError):  # a folder that we may only read, or that went meanwhile
        if abs(time.time() - recipe.lstat().st_mtime) > NOTED_EVERY_S:
            os.utime(recipe, follow_symlinks=False)


@contextmanager
def exclusive_use(folder: Path) -> Generator[bool]:
    """Keep all processes from opening a folder; yield True if none has it open.

    Where the file system has no locks this is unknown, which counts as open.
    """
    try:
        file = RegularFile(folder / RECIPE_FILE)
    except (OSError, FormatError):
        yield False
        return
    try:
        # Between `open` and the lock another process may have renamed the folder away, or replaced the
        # recipe. Then the lock is on a file that no other process opens.
        yield _lock_alone(file) and _is_current(file, folder)
    finally:
        file.close()


def _lock_alone(file: RegularFile) -> bool:
    with suppress(OSError):
        return try_lock(file.fileno(), without_locks=False)
    return False


@contextmanager
def preserve_times(folder: Path) -> Generator[None]:
    """Remove things from a folder without making it look used."""
    before = folder.stat()
    try:
        yield
    finally:
        with suppress(OSError):  # not ours, or read-only
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def idle_seconds(folder: Path) -> float:
    """Return the seconds since a folder was last opened or written to; 0 when its times are in the future."""
    times = [folder.stat().st_mtime]
    with suppress(FileNotFoundError):
        times.append((folder / RECIPE_FILE).lstat().st_mtime)
    return max(0.0, time.time() - max(times))


def _shared(folder: Path) -> RegularFile:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            file = RegularFile(folder / RECIPE_FILE)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{folder} holds no {RECIPE_FILE}: it is no cache, or was removed") from error
        why = _lock_shared(file, folder)
        if why is None:
            return file
        file.close()
        if time.monotonic() >= until:
            raise StalledError(f"{folder} could not be opened for {WAIT_S:g} s: {why}")
        time.sleep(LAST_POLL_S)


def _lock_shared(file: RegularFile, folder: Path) -> str | None:
    """Hold the open recipe of a folder; returns why that is of no use now, or None when it is held."""
    if not try_lock(file.fileno(), shared=True):
        return "a clean-up holds it. See whether `stoker gc` hangs"
    # The lock counts only if it is on the file that others will open (see `exclusive_use`).
    if _is_current(file, folder):
        return None
    # It was moved away, or its recipe repaired, while we waited; a file system may say so each time.
    return f"its {RECIPE_FILE} is another file each time it is looked at. See what keeps replacing it"


def _is_current(file: RegularFile, folder: Path) -> bool:
    """Return True if what is open is what the folder holds now."""
    try:
        there = (folder / RECIPE_FILE).lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), there)


def lock_maintenance(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the process that rearranges a folder's shards: one at a time.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "compact", "is being compacted or repaired")


def lock_index(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the process that writes a folder's index; read the shards under it too.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "index", "has its index written")


@contextmanager
def _only(folder: Path, purpose: str, doing: str) -> Generator[None]:
    with lock_folder(folder, purpose, timeout_s=INDEX_WAIT_S) as got:
        if not got:
            raise StalledError(
                f"{folder} {doing} by {lock_holder(folder, purpose)}, which took longer than "
                f"{INDEX_WAIT_S:g} s. Run again when it is done"
            )
        yield
