"""OpenMP threads, on which torch computes on a CPU: our threads keep none, so that yours keep their speed.

A thread in which torch computes in parallel keeps a team of OpenMP threads. Once all teams together have more
threads than there are cores, GNU's OpenMP lets each team sleep where it would spin until there is more work.
A model on the CPU then took up to 1.4 times as long, although the other teams did nothing.
Source: docs/LOG.md, 2026-11-28, twelfth session; libgomp, `gomp_managed_threads`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_SOFT = 1
"""`omp_pause_soft`: teams go, settings stay."""
_forked = False


@functools.cache
def _library(torch_file: str) -> Any:
    """Return the OpenMP library that torch computes with; None where there is none that we know."""
    folder = Path(torch_file).parent / "lib"
    own = [str(path) for name in ("libgomp*", "libiomp5*", "libomp*") for path in sorted(folder.glob(name))]
    for name in (*own, "libgomp.so.1", "libiomp5.so", "libomp.so"):
        with suppress(OSError):  # it is not loaded
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def _function(name: str) -> Any:
    torch = sys.modules.get("torch")
    path = getattr(torch, "__file__", None)  # None too while torch is being imported
    if path is None or not hasattr(torch, "get_num_threads") or sys.platform != "linux":
        return None
    return getattr(_library(path), name, None)


def use_one_thread_here() -> bool:
    """Have torch compute on one thread in the calling thread; other threads keep what they have.

    Returns:
        Whether that is settled: torch may not be loaded yet.
    """
    if (limit := _function("omp_set_num_threads")) is None:
        return False
    sys.modules["torch"].get_num_threads()  # torch sets it once in each thread: before ours
    limit(1)
    return True


def end_team() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operation starts others.

    Does nothing in a process that was forked: the threads stayed behind, and waiting for them has no end.
    """
    if not _forked and (pause := _function("omp_pause_resource_all")) is not None:
        pause(_SOFT)


def _after_fork() -> None:
    global _forked  # noqa: PLW0603  of this process
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
