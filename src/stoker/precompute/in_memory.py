"""A folder for a cache in memory: in the system's memory file system, gone with whoever asked for it.

Its files are the pages that are served, mapped as they are: nothing is on a disk, and nothing is there twice.
It counts against the limits of this process, which are asked before the first sample (`Resources.disk_bytes`
of such a folder). A process that is killed cannot tidy up: its folder is unlocked then, and the next to make
one removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from stoker.errors import ConfigError, arg
from stoker.plan.resources import storage_of
from stoker.runtime.locks import FileLock

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the memory file system itself, not a place for temporary files
_OWNER = ".owner"
_YOUNG_S = 60.0
"""A folder without a lock that is younger may be about to get one."""


class MemoryFolder:
    """A new folder in memory, which is locked while it is in use.

    Raises:
        ConfigError: There is no such file system, or it cannot be written.
    """

    def __init__(self, base: Path = SHARED_MEMORY) -> None:
        mount = storage_of(base) if base.is_dir() else None
        if mount is None or not mount.in_memory or not os.access(base, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{arg('cache_dir', None)} keeps the cache in memory, in {base}, which is not there, "
                f"not in memory, or "
                f"cannot be written. Give a folder, as {arg('cache_dir', '.stoker')}"
            )
        prefix = f"stoker-{os.getuid()}-"
        for left in base.glob(f"{prefix}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._lock = FileLock(self.path / _OWNER)
        self._lock.acquire(timeout_s=10.0)  # another process may be looking whether it is in use
        self._owner = os.getpid()

    def goes_with(self, user: object) -> None:
        """Remove it when `user` is collected, or this process ends."""
        weakref.finalize(user, self.remove)

    def remove(self) -> None:
        """Give the memory back; what is mapped of it stays until it is let go of. A fork does nothing."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()
            self._owner = -1


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a process that ended without doing so."""
    with suppress(OSError), FileLock(folder / _OWNER, create=False) as lock:
        was_locked = lock.path.exists()
        if lock.acquire() and (was_locked or time.time() - folder.stat().st_mtime > _YOUNG_S):
            shutil.rmtree(folder, ignore_errors=True)
