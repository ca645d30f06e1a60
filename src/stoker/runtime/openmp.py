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
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_SOFT = 1
"""`omp_pause_soft`: the team goes, settings stay."""
_inherited = threading.local()
"""`team` is set in a thread that was copied by a fork, which copies none of its team."""


@functools.cache
def _library(torch_file: str) -> Any:
    """Return GNU's OpenMP, if torch computes with it. Other libraries do not slow teams down so."""
    package = Path(torch_file).parent
    own = [*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")]
    for name in (*sorted(map(str, own)), "libgomp.so.1"):
        with suppress(OSError):  # it is not loaded
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def _function(name: str) -> Any:
    torch = sys.modules.get("torch")
    if sys.platform != "linux" or not hasattr(torch, "get_num_threads"):  # it may be half imported
        return None
    return getattr(_library(str(getattr(torch, "__file__", ""))), name, None)


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

    Does nothing in the thread that a fork has copied: its team stayed behind, and waiting for it has no end.
    """
    if not hasattr(_inherited, "team") and (pause := _function("omp_pause_resource_all")) is not None:
        pause(_SOFT)


def _after_fork() -> None:
    _inherited.team = True


os.register_at_fork(after_in_child=_after_fork)
