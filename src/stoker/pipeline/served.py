"""How long a batch takes from each tier, found by having some served: what a plan's stall is made of.

Arithmetic on bytes misses what reading small pieces costs a processor, which for a disk tier is most of it.
So where a cache is there, a plan is made with the time that its own batches take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from stoker.errors import StokerError
from stoker.loader import Loader, Windows
from stoker.loader.ahead import HANDOVER_S
from stoker.monitor import StallMeter
from stoker.plan import Load
from stoker.store import Cache
from stoker.units import MIB

SECONDS = 0.3
"""For each tier; half of it again beforehand."""
LEAST_PAUSES = 4
"""Batches, at least, that are timed with pauses between them."""
SERVED_BYTES = 64 * MIB
"""Bytes of records that are served for it; filling memory with more would take time."""


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
    size = sum((cache.path / shard.file).stat().st_size for shard in cache.index.shards)
    numbers = list(cache.numbers)
    part = numbers[:: max(1, round(size / SERVED_BYTES))]
    for tier in tiers:
        with suppress(StokerError, OSError):
            own = [part] * 3 if tier == "host" else _thirds(numbers, batch_size)
            loaders = [
                partial(Loader, cache, batch_size, windows=windows, tier=tier, indices=some) for some in own
            ]
            load = _load(loaders, tier, seconds, step)
            if load is not None:
                found[tier] = load
    return found


def _thirds(numbers: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    """Parts of the records, one for each trial; all of them for each where that would be too few."""
    count = len(numbers) // 3
    if count < 2 * LEAST_TIMED * batch_size:
        return [numbers] * 3
    return [numbers[at * count : (at + 1) * count] for at in range(3)]


def _load(
    loaders: Sequence[Callable[..., Loader]], tier: str, seconds: float, step: Step | None
) -> Load | None:
    """First without a step, then, from disk, with pauses so long that every read is over when they end, then
    beside steps.
    """
    meter = StallMeter()
    _serve(loaders[0](meter=meter), meter, _nothing, seconds)
    report = meter.epoch()
    timed = report.batches - 1
    if set(report.tiers) != {tier} or timed < 1:
        return None
    alone_s = (report.wait_s + report.step_s) / timed
    direct_s = min(alone_s, HANDOVER_S)
    if tier == "disk":
        # Idle threads are dearer to wake than ones at work, so this is not what the first part shows.
        pauses = max(seconds, LEAST_PAUSES * 3 * alone_s)
        _serve(loaders[1](meter=meter), meter, partial(time.sleep, 2 * alone_s), pauses)
        report = meter.epoch()
        direct_s = min(alone_s, report.wait_s / max(1, report.batches - 1))
    at_step = None
    if step is not None:
        work = step.imitation()
        step_s = _mean_s(work, seconds / 2)
        _serve(loaders[2](meter=meter), meter, work, max(seconds, LEAST_TIMED * (step_s + alone_s)))
        report = meter.epoch()
        batch_s = (report.wait_s + report.step_s) / max(1, report.batches - 1)
        at_step = (step_s, max(0.0, batch_s - step_s))
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


def _serve(loader: Loader, meter: StallMeter, work: Callable[[], None], seconds: float) -> None:
    """Serve for half of `seconds`, until memory is filled and enough is read ahead; then count for them.

    From disk no longer than one pass, if that is long enough: the next one would find its records in memory.
    """
    begin, counted, spent_s, timed = time.perf_counter(), False, 0.0, 0
    early = len(loader) // 3 if loader.plan.tier == "disk" else len(loader) + 1
    while spent_s < 1.5 * seconds and not (early < len(loader) and timed >= LEAST_TIMED):
        for number, _ in enumerate(loader):
            work()
            spent_s = time.perf_counter() - begin
            timed += counted
            if not counted and (spent_s >= seconds / 2 or number >= early):
                meter.reset()
                counted = True
            if spent_s >= 1.5 * seconds and (timed >= LEAST_TIMED or spent_s >= 6 * seconds):
                break
