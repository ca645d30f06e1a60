"""Calls of the C library that Python has no function for. Linux and glibc; others get an error or no effect.

Memory of freed activations: an encoder on a CPU allocates and frees the same large activations in every call.
By default glibc maps each again, and the kernel zeroes every page of it: that can take as long as the
encoding itself. `keep_freed_memory` raises malloc's mmap and trim thresholds, and `release_memory` gives the
memory back once the run is over. Threads get arenas of their own, whose heaps end at 64 MiB: what is larger
is mapped whatever the thresholds are, so one arena then serves all threads. They are settings of the entire
process, and cannot be read, so they cannot be restored. Only a process that Stoker has started sets them,
never one of a user's that calls `precompute`. Source: figures in `docs/explanation/precompute.md`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
from typing import Any

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 1 << 30
_SYNC_FILE_RANGE_WRITE = 2
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


@functools.cache
def _libc() -> Any:
    """Return the C library of this process, with the types of the calls below."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    size, pointer, number, offset = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    types: dict[str, list[Any]] = {
        "sync_file_range": [number, offset, offset, ctypes.c_uint],
        "fallocate64": [number, number, offset, offset],
        "mmap": [pointer, size, number, number, number, ctypes.c_long],
        "munmap": [pointer, size],
        "madvise": [pointer, size, number],
        "mincore": [pointer, size, pointer],
        "malloc_trim": [size],
        "mallopt": [number, number],
        "prctl": [number, ctypes.c_ulong],
    }
    for name, arguments in types.items():
        if (function := getattr(libc, name, None)) is not None:
            function.argtypes = arguments
            function.restype = pointer if name == "mmap" else number
    return libc


def tie_to_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send a signal to this process when its parent ends.

    Args:
        number: The signal.
        parent: Process id of the parent; this process exits at once if that has ended already.
    """
    if prctl := getattr(_libc(), "prctl", None):
        prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(0)


@functools.cache
def keep_freed_memory() -> bool:
    """Raise malloc's thresholds to 1 GiB and allow one arena, once per process.

    Threads that have an arena keep it, and pass it on when they end: call this before any thread starts.

    Returns:
        Whether this C library has all three settings.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _THRESHOLD_BYTES, _M_TRIM_THRESHOLD: _THRESHOLD_BYTES, _M_ARENA_MAX: 1}
    return all(mallopt(setting, value) for setting, value in settings.items())


def release_memory() -> None:
    """Hand freed memory back to the kernel."""
    if trim := getattr(_libc(), "malloc_trim", None):
        trim(0)


def start_writeback(fd: int) -> None:
    """Ask the kernel to begin writing the dirty pages of a file, and wait for none of them."""
    if sync := getattr(_libc(), "sync_file_range", None):
        sync(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def punch_hole(fd: int, begin: int, end: int) -> None:
    """Give the bytes `begin:end` of a file back to the file system; they read as zeros.

    Raises:
        OSError: It cannot do that.
    """
    call = getattr(_libc(), "fallocate64", None)
    if call is None or call(fd, _KEEP_SIZE_PUNCH_HOLE, begin, end - begin):
        raise OSError(ctypes.get_errno(), "the file system gives no part of a file back")


def reserve_addresses(size_bytes: int) -> int:
    """Reserve addresses without memory behind them; returns the first.

    Raises:
        OSError: The system has not that many.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc().mmap(None, size_bytes, _PROT_NONE, flags, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot reserve {size_bytes} bytes of addresses")
    return int(address)


def map_file_at(address: int, size_bytes: int, fd: int, offset: int) -> None:
    """Map a part of a file, for reading, over addresses that were reserved.

    Raises:
        OSError: The system refused the map.
    """
    where = _libc().mmap(address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    if where != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unmap(address: int, size_bytes: int) -> None:
    """Give back addresses and what is mapped there."""
    _libc().munmap(address, size_bytes)


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """Tell the kernel how mapped memory will be used (`madvise`); returns whether it took the advice."""
    return _libc().madvise(address, size_bytes, advice) == 0


def resident_pages(address: int, size_bytes: int, out: int) -> bool:
    """Write a byte for each page of a map to address `out`, with bit 0 set if it is in memory (`mincore`).

    Returns:
        Whether the system could tell.
    """
    return _libc().mincore(address, size_bytes, out) == 0
