"""How long a batch takes from each tier, found by having some served: what a plan's stall is made of.

Arithmetic on bytes misses what reading small pieces costs a processor, which for a disk tier is most of it.
So where a cache is there, a plan is made with the time that its own batches take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stoker.errors import StokerError
from stoker.loader import Loader, Windows
from stoker.loader.ahead import HANDOVER_S
from stoker.monitor import StallMeter
from stoker.plan import Load
from stoker.store import Cache
from stoker.units import MIB

SECONDS = 0.3
"""For each trial of a tier; half of it again beforehand."""
AT_STEP_TIMES = 3
"""The trial beside steps takes so many times as long: it is what a stall is read off."""
UNUSUAL_TIMES, UNUSUAL_S = 8, 20e-3
"""What takes so many times as long as half of the batches do, and so many seconds, counts as that long. Of
a drive that others use too a batch in a thousand has to wait for 60 to 200 ms, and a trial meets one or not.

Source: `benchmarks/plan_stall.py`, cold disk.
"""
LEAST_PAUSES = 4
"""Batches, at least, that are timed with pauses between them."""
SERVED_BYTES = 64 * MIB
"""Bytes of records that are served for it; filling memory with more would take time."""


NEIGHBOURS = 32
"""Records next to one another that are of the same trial."""
LEAST_TIMED = 8
"""Batches, at least, that are timed; more only while there are records that were not read before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is known by its time, to be imitated."""

    seconds: float
    cpus: float
    """Cores that it keeps busy; below 1 it leaves them to others, as one on a GPU does."""

    def imitation(self) -> Callable[[], None]:
        """Takes as long, and the same cores: products of matrices by as many threads as torch has here."""
        if self.cpus < 1:
            return partial(time.sleep, self.seconds)
        matrix = torch.randn(192, 192)

        def compute() -> None:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                torch.mm(matrix, matrix)

        return compute


def served_loads(
    cache: Cache,
    windows: Windows | None,
    batch_size: int,
    *,
    tiers: Sequence[str] = ("disk", "host"),
    seconds: float = SECONDS,
    step: Step | None = None,
) -> dict[str, Load]:
    """Per tier what loading a batch takes, on this machine as it is now; a tier that fails is left out.

    The host's is of batches that end in host memory. The disk's depends on how much of the cache the page
    cache holds now: this looks at it as training would find it, and reads no record twice if it can, since
    what was read once comes from there. With a `step` it is also tried what batches cost beside such steps:
    who loads takes turns with them at cores and at the interpreter's lock, which no sum of parts tells.
    """
    found: dict[str, Load] = {}
    size = sum(shard.raw_bytes for shard in cache.index.shards)  # of a mirror they may not be here yet
    numbers = list(cache.numbers)
    part = numbers[:: max(1, round(size / SERVED_BYTES))]
    for tier in tiers:
        with suppress(StokerError, OSError):
            own = [part] * 3 if tier == "host" else _apart(numbers, batch_size)
            loaders = [
                partial(Loader, cache, batch_size, windows=windows, tier=tier, indices=some) for some in own
            ]
            load = _load(loaders, tier, seconds, step)
            if load is not None:
                found[tier] = load
    return found


def _apart(numbers: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    """Records for each trial, half of them for the one beside steps; all for each where they are too few.

    They take turns by runs of neighbours: over all of the cache, since parts of it may be slower than others
    (of a virtual drive the host has some in memory), and not record by record, since around what one trial
    has read the system reads on, and batches of records from there take half as long again.

    Source: `benchmarks/plan_stall.py`, cold disk.
    """
    if len(numbers) < 8 * LEAST_TIMED * batch_size:
        return [numbers] * 3
    whose = np.arange(len(numbers)) // NEIGHBOURS % 4
    of = np.asarray(numbers)
    return [of[whose == 1].tolist(), of[whose == 3].tolist(), of[whose % 2 == 0].tolist()]


def _load(
    loaders: Sequence[Callable[..., Loader]], tier: str, seconds: float, step: Step | None
) -> Load | None:
    """First without a step, then, from disk, with pauses so long that every read is over when they end, then
    beside steps. None: another tier served, or passes are of one batch.
    """
    meter = StallMeter()
    alone_s = _serve(loaders[0](meter=meter), meter, _nothing, seconds, seconds / 2)
    if set(meter.epoch().tiers) != {tier} or alone_s is None:
        return None
    direct_s = min(alone_s, HANDOVER_S)
    if tier == "disk":
        # Idle threads are dearer to wake than ones at work, so this is not what the first part shows.
        pauses = max(seconds, LEAST_PAUSES * 3 * alone_s)
        _serve(loaders[1](meter=meter), meter, partial(time.sleep, 2 * alone_s), pauses, pauses / 2)
        report = meter.epoch()
        direct_s = min(alone_s, report.wait_s / max(1, report.batches - 1))
    at_step = None
    if step is not None:
        work = step.imitation()
        step_s = _mean_s(work, seconds / 2)
        longer = max(AT_STEP_TIMES * seconds, LEAST_TIMED * (step_s + alone_s))
        batch_s = _serve(loaders[2](meter=meter), meter, work, longer, seconds / 2)
        at_step = None if batch_s is None else (step_s, max(0.0, batch_s - step_s))
    beside_s = alone_s - direct_s if tier == "disk" else alone_s if alone_s > direct_s else 0.0
    return Load(alone_s=alone_s, direct_s=direct_s, beside_s=beside_s, at_step=at_step)


def _nothing() -> None:
    """No step."""


def _mean_s(work: Callable[[], None], seconds: float) -> float:
    """How long `work` takes with nothing beside it."""
    work()
    begin, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begin < seconds:
        work()
        count += 1
    return (time.perf_counter() - begin) / count


def _serve(
    loader: Loader, meter: StallMeter, work: Callable[[], None], seconds: float, before_s: float
) -> float | None:
    """Serve for `before_s`, until memory is filled and enough is read ahead; then time a batch and its `work`
    for `seconds`.

    From disk no longer than one pass, if that is long enough: the next one would find its records in memory.
    """
    begin, counted, spent_s = time.perf_counter(), False, 0.0
    times_s: list[float] = []
    early = len(loader) // 6 if loader.plan.tier == "disk" else len(loader) + 1
    most_s = before_s + seconds
    while spent_s < most_s and not (early < len(loader) and len(times_s) >= LEAST_TIMED):
        last_s = 0.0
        for number, _ in enumerate(loader):
            work()
            spent_s = time.perf_counter() - begin
            if counted and number:
                times_s.append(spent_s - last_s)
            last_s = spent_s
            if not counted and (spent_s >= before_s or number >= early):
                meter.reset()
                counted = True
            if spent_s >= most_s and (len(times_s) >= LEAST_TIMED or spent_s >= 4 * most_s):
                break
    return _typical_s(times_s) if times_s else None


def _typical_s(times_s: Sequence[float]) -> float:
    """The mean, in which what is unusually long counts for less.

    >>> round(_typical_s([0.002, 0.004] * 100 + [0.200]), 4)  # a mean would say 0.004
    0.0031
    """
    most_s = max(UNUSUAL_TIMES * statistics.median(times_s), UNUSUAL_S)
    return statistics.fmean(min(time_s, most_s) for time_s in times_s)
