"""Whether disk and memory hold what is about to be written and read; asked before the first sample."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stoker.errors import ConfigError, ResourceError, arg
from stoker.plan.resources import Resources, storage_of
from stoker.precompute.arena import slot_size
from stoker.precompute.settings import PrecomputeSettings
from stoker.runtime.disk import FreeSpace
from stoker.runtime.locks import FileLock
from stoker.schema import Schema, columns_of
from stoker.store import Recipe
from stoker.store.mirror.root import mirror_limit
from stoker.store.write import OPEN_PARTS
from stoker.units import MIB, format_bytes, format_count

log = logging.getLogger("stoker")

_SHARD_BYTES = 256 * MIB
_RESERVE_BYTES = 16 * MIB
_OVERHEAD = 1.01
_SPARE_INODES = 16
_READER_BYTES = 64 * MIB
"""What a reader takes beside its arena: an interpreter, numpy and h5py are 35 MiB of its own."""
_RAGGED_BYTES = MIB


def needed_bytes(schema: Schema, records: int) -> int:
    """Bytes of that many records with checksums; ragged fields, of unknown size, count as empty."""
    columns = columns_of(schema)
    each = sum(field.size_bytes(0 if field.ragged else None) for field in columns.values())
    return int(records * (each + 8 + 8 * len(columns)) * _OVERHEAD)


def check_space(folder: Path, schema: Schema, records: int, resources: Resources) -> None:
    """Compare what is needed with what is free, in bytes and in inodes.

    Raises:
        ResourceError: It does not fit; nothing has been written.
    """
    needed = needed_bytes(schema, records)
    if (limit := mirror_limit(folder)) is not None:  # what is put elsewhere makes room here
        needed = min(needed, limit + OPEN_PARTS * _SHARD_BYTES)
    files = needed // _SHARD_BYTES + 1 + _SPARE_INODES
    free_bytes = sys.maxsize if resources.disk_bytes is None else resources.disk_bytes
    FreeSpace(free_bytes, resources.disk_inodes).require(
        folder,
        needed,
        f"{format_count(records)} records need",
        reserve_bytes=_RESERVE_BYTES,
        files=files,
        advice="choose another cache folder, or a smaller dtype",
    )


def fit_memory(
    samples: Schema, recipe: Recipe, settings: PrecomputeSettings, resources: Resources
) -> tuple[PrecomputeSettings, int]:
    """Have the settings ask for no more memory than there is.

    Half of what is free may be in flight and a quarter may be workers; the rest is the encoder's.

    Args:
        samples: Fields of a raw sample.
        recipe: Its group, and its records as encoded and as stored.
        settings: Their `memory_bytes` and `workers` are upper bounds.
        resources: What is free for this process.

    Returns:
        The settings, and how many workers there may be at most.

    Raises:
        ResourceError: Not even one group with its records and a reader fit; nothing has been read.
    """
    group = recipe.group
    needed = _READER_BYTES + sum(
        _group_bytes(schema, group.samples, group.steps)
        # In a slot and on its way to the encoder; as encoded; as stored.
        for schema in (samples, samples, recipe.encoded, recipe.columns)
    )
    if needed > resources.host_bytes:
        raise ResourceError(
            f"{format_bytes(resources.host_bytes)} of host memory are free ({resources.host_limit}, "
            f"{format_bytes(resources.host_total_bytes)} in all), a reader and one group of "
            f"{format_count(group.samples)} samples need {format_bytes(needed)}. Raise the limit, end other "
            "programs, or give the encoder a smaller group"
        )
    most = max(1, resources.host_bytes // 4 // _READER_BYTES)
    workers = settings.workers
    if workers is not None and workers > most:
        log.warning(
            "%s instead of %d: %s of host memory are free (%s)",
            format_count(most, "reader"),
            workers,
            format_bytes(resources.host_bytes),
            resources.host_limit,
        )
        workers = most
    memory_bytes = min(settings.memory_bytes, resources.host_bytes // 2)
    return replace(settings, memory_bytes=memory_bytes, workers=workers), most


def fit_copies(
    held_bytes: int, settings: PrecomputeSettings, resources: Resources, *, wanted: int
) -> tuple[PrecomputeSettings, int]:
    """Bound workers by the data that each of them has a copy of.

    A copy is there twice while a reader unpickles it, and once more here, for workers that have to be
    replaced. All of that may take a quarter of what is free.

    Args:
        held_bytes: Data that the source holds in memory.
        settings: Their `workers` are an upper bound.
        resources: What is free for all processes that read on this machine.
        wanted: Workers that there would be at most without this bound.

    Returns:
        The settings, whose `workers` are 0 where not even one copy fits, and how many there may be at most.
    """
    room = resources.host_bytes // 4
    most = max(0, room - held_bytes) // max(1, 2 * held_bytes)
    if settings.workers == 0 or most >= wanted:
        return settings, most
    log.warning(
        "the source holds %s in memory, of which each reader has a copy; %s of host memory are free (%s): "
        "%s. Data in files, opened in __getitem__, is read by as many as pay",
        format_bytes(held_bytes),
        format_bytes(resources.host_bytes),
        resources.host_limit,
        f"{most} workers at most" if most else "samples are read in this process, without timeouts",
    )
    fewest = most if settings.workers is not None or not most else None
    return replace(settings, workers=fewest), most


def _group_bytes(schema: Schema, samples: int, steps: int | None) -> int:
    """Bytes of one group, or of one chunk over time."""
    if any(field.ragged for field in schema.values()):
        return _RAGGED_BYTES
    return slot_size(schema, samples, steps or 0)


# ----------------------------------------------------------------------------------------------------------
# A folder for a cache in memory: in the system's memory file system, gone with whoever asked for it.
#
# Its files are the pages that are served, mapped as they are: nothing is on a disk, and nothing is there
# twice. It counts against the limits of this process, which are asked before the first sample
# (`Resources.disk_bytes` of such a folder). A process that is killed cannot tidy up: its folder is unlocked
# then, and the next to make one removes it.


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
