"""Time how fast this machine copies and reads: about 0.3 s in all, once per process.

Rates decide nothing about what fits; they turn bytes into the seconds that a batch takes. Callers keep the
result; the figures are of one thread in a quiet moment, so they are a guide, not a promise.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from stoker.plan.resources import device_memory
from stoker.runtime.threads import Pool, call_within
from stoker.units import MIB

BUDGET_S = 0.1
"""Time for each of the rates."""
DEADLINE_S = 10.0
"""After this long without an answer the storage counts as stalled."""
BLOCK_BYTES = MIB
COPY_BYTES = 32 * MIB
ROW_BYTES = 4096
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds that loading one batch takes."""

    alone_s: float
    """All of them, where nothing overlaps with the step."""
    direct_s: float
    """Where a core is free to prefetch: those that the step waits for nevertheless."""
    beside_s: float
    """Those that overlap with the step before."""
    at_step: tuple[float, float] | None = None
    """Seconds of a step of its kind, and those that a batch then costs beyond it: waited for, or because who
    loads slows the step; None: not tried."""

    def lost_s(self, step_s: float) -> float | None:
        """What a batch costs beyond steps of any length, by what was tried; None: nothing was."""
        if self.at_step is None:
            return None
        tried_s, lost_s = self.at_step
        return lost_s + max(0.0, self.alone_s - lost_s) * max(0.0, 1 - step_s / tried_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second. The defaults are those of an ordinary machine, for plans made without timing."""

    copy_bytes_s: float = 4e9
    """Copying within host memory, one thread, into memory that is already there."""
    disk_bytes_s: float = 500e6
    """Reading blocks of 1 MiB at random places with 4 threads, past the page cache."""
    unpack_bytes_s: float = 1e9
    """Decompressing records of compressed shards, one thread, from the page cache."""
    network_bytes_s: float = 100e6
    """From an object store or shared storage, several requests at a time; not timed."""
    h2d_bytes_s: float = 12e9
    """Pinned host memory to the GPU."""
    device_bytes_s: float = 500e9
    """Copying within the GPU's memory."""
    measured: bool = False
    """Whether anything was timed here."""
    served: Mapping[str, Load] = field(default_factory=dict[str, "Load"])
    """Per tier the load of one batch of the demand, where some were served to find out; wins over rates."""


def measure_rates(path: Path | None = None, *, device: str = "cpu") -> Rates:
    """Time copies, reads below `path` and, on a GPU, its copies; what cannot be timed stays typical.

    Args:
        path: A file to read from (a shard), or a folder whose largest file is taken.
        device: `cpu` or `cuda[:i]`.

    Raises:
        ResourceError: There is no such GPU.
        StalledError: The storage of `path` does not answer.
    """
    typical = Rates()
    disk = None if path is None else call_within(DEADLINE_S, lambda: _disk_rate(path), f"reading {path}")
    unpack = None if path is None else call_within(DEADLINE_S, lambda: _unpack_rate(path), f"reading {path}")
    h2d, inside = (None, None) if device == "cpu" else _device_rates(device)
    return Rates(
        copy_bytes_s=_copy_rate(),
        disk_bytes_s=disk or typical.disk_bytes_s,
        unpack_bytes_s=unpack or typical.unpack_bytes_s,
        h2d_bytes_s=h2d or typical.h2d_bytes_s,
        device_bytes_s=inside or typical.device_bytes_s,
        measured=True,
    )


def _copy_rate() -> float:
    """Rows at random places into one reused batch, as serving does; all touched before the clock starts."""
    source = np.ones((COPY_BYTES // ROW_BYTES, ROW_BYTES), dtype=np.uint8)
    batch = np.zeros((BLOCK_BYTES // ROW_BYTES, ROW_BYTES), dtype=np.uint8)
    rows = itertools.cycle(np.random.default_rng(0).permutation(len(source)).reshape(-1, len(batch)))
    # mode="clip" is what makes numpy write straight into `out`
    return _median_rate(lambda: np.take(source, next(rows), axis=0, out=batch, mode="clip"), BLOCK_BYTES)


def _median_rate(copy: Callable[[], object], size_bytes: int) -> float:
    """The median of the repeats that fit in half the budget."""
    times_s: list[float] = []
    end = time.perf_counter() + BUDGET_S / 2
    while not times_s or time.perf_counter() < end:
        started = time.perf_counter()
        copy()
        times_s.append(time.perf_counter() - started)
    return size_bytes / max(statistics.median(times_s), 1e-9)


def _disk_rate(path: Path) -> float | None:
    """None where there is no file with enough to read."""
    file = _largest(path)
    blocks = 0 if file is None else file.stat().st_size // BLOCK_BYTES
    if file is None or blocks < THREADS:
        return None
    places = random.Random(0).sample(range(blocks), min(blocks, 4096))  # noqa: S311  no secret
    end = time.perf_counter() + BUDGET_S
    started = time.perf_counter()
    pool = Pool(THREADS, "stoker-rates")
    jobs = [pool.submit(partial(_read_blocks, file, places[n::THREADS], end)) for n in range(THREADS)]
    read = sum(job.result(DEADLINE_S, f"reading {file} for its rate") for job in jobs)
    return read / max(time.perf_counter() - started, 1e-9)


def _unpack_rate(path: Path) -> float | None:
    """None where the largest file is no compressed shard."""
    from stoker.store.compressed import decompression_rate  # the store imports torch

    file = _largest(path)
    return None if file is None else decompression_rate(file, BUDGET_S / 2)


def _read_blocks(file: Path, places: list[int], end: float) -> int:
    """Bytes read until `end`. Past the page cache, which would give the rate of memory."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # a file system without direct reads, tmpfs for one
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    read = 0
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # aligned, as direct reads demand
            for place in places:
                read += os.preadv(descriptor, [block], place * BLOCK_BYTES)
                if time.perf_counter() >= end:
                    break
    finally:
        os.close(descriptor)
    return read


def _largest(path: Path) -> Path | None:
    if path.is_file():
        return path
    files = (entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else ()
    return max(files, key=lambda file: file.stat().st_size, default=None)


def _device_rates(device: str) -> tuple[float, float]:
    """Pinned memory to the GPU, and within it."""
    device_memory(device)  # says in words when there is no such GPU
    import torch

    pinned = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    other = torch.zeros_like(on_device)

    def finish(source: torch.Tensor) -> None:
        other.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    finish(pinned)  # the first copy also sets things up
    return _median_rate(lambda: finish(pinned), COPY_BYTES), _median_rate(
        lambda: finish(on_device), COPY_BYTES
    )
