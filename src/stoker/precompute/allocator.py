"""Keep freed activations in the process instead of handing their pages back to the kernel.

An encoder on a CPU allocates and frees the same large activations in every call. By default glibc maps each
afresh, and the kernel zeroes every page of it: that can take as long as the encoding itself. Raising
malloc's mmap and trim thresholds keeps the memory; `release_memory` gives it back once the run is over.
Threads get arenas of their own, whose heaps end at 64 MiB: what is larger is mapped whatever the thresholds
are. With one arena the heap of the process serves all threads.

They are settings of the whole process that cannot be read, and so not be put back: only a process that Stoker
has started sets them, never one of a user's that calls `precompute`.

Source: figures in `docs/precompute.md`.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 1 << 30


@functools.cache
def keep_freed_memory() -> bool:
    """Raise the thresholds to 1 GiB and allow one arena, once per process.

    Threads that have an arena keep it, and pass it on when they end: call this before any thread starts.

    Returns:
        Whether this C library has all three settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _THRESHOLD_BYTES, _M_TRIM_THRESHOLD: _THRESHOLD_BYTES, _M_ARENA_MAX: 1}
    return all(mallopt(setting, value) for setting, value in settings.items())


def release_memory() -> None:
    """Hand freed memory back to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
