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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from stoker.plan.resources import device_memory
from stoker.plan.trials import Interval, MachineUse
from stoker.runtime.threads import Pool, call_within
from stoker.units import MIB

BUDGET_S = 0.1
"""Time for each of the rates."""
TIMEOUT_S = 10.0
"""After this long without an answer the storage counts as stalled."""
BLOCK_BYTES = MIB
COPY_BYTES = 32 * MIB
ROW_BYTES = 4096
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Seconds that loading one batch takes."""

    alone_s: float
    """All of them, where nothing overlaps with the step."""
    direct_s: float
    """Where a core is free to prefetch: those that the step waits for nevertheless."""
    overlapped_s: float
    """Those that overlap with the step before."""
    at_step: tuple[float, float] | None = None
    """Seconds of a step of its kind, and those that a batch then costs beyond it: waited for, or because who
    loads slows the step; None: not tried."""
    lost_range: Interval | None = None
    """Of `at_step`: the cost of a batch beyond its step that a run is likely to have; None: not known."""
    alone_range: Interval | None = None
    """The same of `alone_s`."""
    trials: int = 1
    """How often the trial was repeated that the stall is taken from."""
    use: MachineUse | None = None
    """Cores that other processes used meanwhile; None: not known."""

    def bounds(self) -> tuple[BatchLoad, BatchLoad]:
        """Return the least and the largest likely load; what has no range stays as it is."""
        return self._bound(0), self._bound(1)

    def _bound(self, side: int) -> BatchLoad:
        times = 1.0
        if self.alone_range is not None and self.alone_s > 0:
            times = max(0.0, self.alone_range[side] / self.alone_s)
        at_step = self.at_step
        if at_step is not None and self.lost_range is not None:
            at_step = (at_step[0], self.lost_range[side])
        return replace(
            self,
            alone_s=times * self.alone_s,
            direct_s=times * self.direct_s,
            overlapped_s=times * self.overlapped_s,
            at_step=at_step,
            alone_range=None,
            lost_range=None,
        )

    def lost_s(self, step_s: float) -> float | None:
        """Return what a batch costs beyond steps of any length, by what was tried; None: nothing was."""
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
    """True if anything was timed here."""
    served: Mapping[str, BatchLoad] = field(default_factory=dict[str, "BatchLoad"])
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
    disk = None if path is None else call_within(TIMEOUT_S, lambda: _disk_rate(path), f"reading {path}")
    unpack = None if path is None else call_within(TIMEOUT_S, lambda: _unpack_rate(path), f"reading {path}")
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
    """Return the median of the repeats that fit in half the budget."""
    times_s: list[float] = []
    end = time.perf_counter() + BUDGET_S / 2
    while not times_s or time.perf_counter() < end:
        started = time.perf_counter()
        copy()
        times_s.append(time.perf_counter() - started)
    return size_bytes / max(statistics.median(times_s), 1e-9)


def _disk_rate(path: Path) -> float | None:
    """Return the rate of reading; None without a file that is large enough."""
    file = _largest(path)
    blocks = [] if file is None else _blocks([file], BLOCK_BYTES)
    if len(blocks) < THREADS:
        return None
    random.Random(0).shuffle(blocks)  # noqa: S311  no secret
    return _read(blocks, BLOCK_BYTES, THREADS, BUDGET_S, times=1)


def _unpack_rate(path: Path) -> float | None:
    """Return the rate of decompressing; None if the largest file is not a compressed shard."""
    from stoker.store.compressed import decompression_rate  # the store imports torch

    file = _largest(path)
    return None if file is None else decompression_rate(file, BUDGET_S / 2)


def _largest(path: Path) -> Path | None:
    if path.is_file():
        return path
    files = (entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else ()
    return max(files, key=lambda file: file.stat().st_size, default=None)


def _device_rates(device: str) -> tuple[float, float]:
    """Return the rates of copies from pinned memory to the GPU, and within it."""
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


# ----------------------------------------------------------------------------------------------------------
# What this machine can do at most: each limit as a function of the seconds it may take.
#
# The loops hold nothing but the operation itself, on data of the user's own shape: rows of a record's size
# are gathered, a cache's own shards are read (past the page cache, so nothing is written and no cache is
# drained of what others need). `stoker bench` compares the tiers with them.


Limit: TypeAlias = Callable[[float], float]
"""`limit(seconds)` works that long and returns bytes a second."""

BUFFER_BYTES = 64 * MIB
"""Bytes of one copy; more than the caches of a processor hold."""
PAGE_BYTES = 4096
SEQUENTIAL_BYTES = 8 * MIB
READ_THREADS = 16
"""Reads in flight at random places; at 8 a drive may be left waiting."""
CACHED_BYTES = 128 * MIB
"""Bytes that are read through the page cache."""
ANSWER_S = 10.0
"""Beyond its own seconds, in which a disk has to answer a measurement."""
WARM_S = 5.0
"""Seconds to bring them there."""
WORKERS = 4
"""Reads in flight one after another."""


def copy_limit() -> Limit:
    """Return the rate of copying within host memory, by one thread, into existing memory."""
    import torch

    source = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
    into = torch.zeros_like(source)
    return lambda seconds: _repeat(lambda: into.copy_(source), BUFFER_BYTES, seconds)


def gather_limit(row_bytes: int, batch: int, device: str = "cpu", *, source_bytes: int) -> Limit:
    """Return the rate of `torch.index_select` of random `batch` rows of `source_bytes` into one buffer."""
    import torch

    count = max(batch, source_bytes // max(1, row_bytes))
    source = torch.ones((count, max(1, row_bytes)), dtype=torch.uint8, device=device)
    into = torch.zeros((batch, max(1, row_bytes)), dtype=torch.uint8, device=device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    places = list(order[: count // batch * batch].view(-1, batch))
    at = iter(())

    def one() -> None:
        nonlocal at
        index = next(at, None)
        if index is None:
            at = iter(places)
            index = next(at)
        torch.index_select(source, 0, index, out=into)

    finish = (lambda: torch.cuda.synchronize(device)) if device != "cpu" else None
    return lambda seconds: _repeat(one, batch * row_bytes, seconds, finish)


def to_device_limit(device: str) -> Limit:
    """Return the rate of copying from page-locked memory to a GPU."""
    import torch

    pinned = torch.ones(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
    into = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)

    def one() -> None:
        into.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(device)

    return lambda seconds: _repeat(one, BUFFER_BYTES, seconds)


def sequential_limit(files: Sequence[Path]) -> Limit:
    """Return the rate of reading files from end to end past the page cache."""
    return lambda seconds: _read(_blocks(files, SEQUENTIAL_BYTES), SEQUENTIAL_BYTES, WORKERS, seconds)


def random_limit(files: Sequence[Path], block_bytes: int, *, cached: bool = False) -> Limit:
    """Return the rate of reading random blocks of files: past the page cache, or (`cached`) through it."""
    size = -(-max(1, block_bytes) // PAGE_BYTES) * PAGE_BYTES
    blocks = _blocks(files, size)
    if cached:
        blocks = blocks[: max(1, CACHED_BYTES // size)]
    random.Random(0).shuffle(blocks)  # noqa: S311  no secret
    if cached:
        return lambda seconds: _read_again(blocks, size, seconds)
    return lambda seconds: _read(blocks, size, READ_THREADS, seconds)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Have the next reads of `files` come from the disk; what others have mapped stays."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _repeat(
    one: Callable[[], Any], size_bytes: int, seconds: float, finish: Callable[[], None] | None = None
) -> float:
    """Return bytes a second over repeats; the first one is not counted, since it touches new memory."""
    import torch

    finish = finish or (lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other collapse where anything else runs
    try:
        one()
        finish()
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begin < seconds:
            one()
            count += 1
        finish()
        return count * size_bytes / max(time.perf_counter() - begin, 1e-9)
    finally:
        torch.set_num_threads(threads)


def _blocks(files: Sequence[Path], size: int) -> list[tuple[Path, int]]:
    """Return whole blocks of all files, in order; at most a million."""

    def look() -> list[int]:
        return [file.stat().st_size for file in files]

    pool = Pool(1, "stoker-limits")
    try:
        sizes = pool.submit(look).result(ANSWER_S, "looking at the files to read")
    finally:
        pool.close()
    found = [
        (file, at) for file, end in zip(files, sizes, strict=True) for at in range(0, end - size + 1, size)
    ]
    return found[:: max(1, len(found) // 1_000_000)]


def _read(
    blocks: Sequence[tuple[Path, int]],
    size: int,
    threads: int,
    seconds: float,
    *,
    direct: bool = True,
    times: int = 1_000_000,
) -> float:
    """Return bytes a second of reading all blocks `times` over, or for `seconds`; 0: no full block."""
    if not blocks:
        return 0.0
    flags = os.O_RDONLY | os.O_CLOEXEC
    handles: dict[Path, int] = {}
    pool = Pool(threads, "stoker-limits")
    try:
        opening = {
            file: pool.submit(partial(_open, file, flags, direct=direct))
            for file in dict.fromkeys(file for file, _ in blocks)
        }
        until = time.perf_counter() + ANSWER_S
        for file, ticket in opening.items():
            handles[file] = ticket.result(max(0.0, until - time.perf_counter()), f"opening {file}")
        begin = time.perf_counter()
        work = _Shared([(handles[file], at) for file, at in blocks], times)
        parts = [pool.submit(partial(_reader, work, size, begin + seconds)) for _ in range(threads)]
        until = begin + seconds + ANSWER_S
        read = sum(part.result(until - time.perf_counter(), "reading for the disk's limit") for part in parts)
        return read / max(time.perf_counter() - begin, 1e-9)
    except BaseException:
        handles.clear()  # threads may still read them: a number that is used again would be read instead
        raise
    finally:
        pool.close()
        for handle in handles.values():
            os.close(handle)


def _read_again(blocks: Sequence[tuple[Path, int]], size: int, seconds: float) -> float:
    """Return the same through the page cache, everything read once before."""
    _read(blocks, size, READ_THREADS, WARM_S, direct=False, times=1)
    return _read(blocks, size, READ_THREADS, seconds, direct=False)


def _open(file: Path, flags: int, *, direct: bool) -> int:
    if direct:
        try:
            return os.open(file, flags | os.O_DIRECT)
        except OSError:  # a file system without direct reads, tmpfs for one
            descriptor = os.open(file, flags)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return descriptor
    return os.open(file, flags)


class _Shared:
    """Hands out the same places over and over, to any number of threads."""

    def __init__(self, places: Sequence[tuple[int, int]], times: int) -> None:
        self._places = places
        self._numbers = itertools.count()
        self._end = len(places) * times

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while (number := next(self._numbers)) < self._end:
            yield self._places[number % len(self._places)]


def _reader(work: _Shared, size: int, end: float) -> int:
    """Read blocks that the threads share until time is over."""
    read = 0
    with mmap.mmap(-1, size) as block:  # aligned, as direct reads demand
        for handle, at in work:
            read += os.preadv(handle, [block], at)
            if time.perf_counter() >= end:
                break
    return read
