"""How long a batch takes from each tier, found by having some served: what a plan's stall is made of.

Arithmetic on bytes misses what reading small pieces costs a processor, which for a disk tier is most of it.
So where a cache is there, a plan is made with the time that its own batches take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from stoker.errors import StokerError
from stoker.loader import Loader, Windows
from stoker.loader.ahead import HANDOVER_S
from stoker.monitor import StallMeter
from stoker.plan import Load
from stoker.store import Cache
from stoker.units import MIB

SECONDS = 0.3
"""For each tier; half of it again beforehand."""
SERVED_BYTES = 64 * MIB
"""Bytes of records that are served for it; filling memory with more would take time."""


def served_loads(
    cache: Cache,
    windows: Windows | None,
    batch_size: int,
    *,
    tiers: Sequence[str] = ("disk", "host"),
    seconds: float = SECONDS,
) -> dict[str, Load]:
    """Per tier what loading a batch takes, on this machine as it is now; a tier that fails is left out.

    The host's is of batches that end in host memory. The disk's depends on how much of the cache the page
    cache holds now: this looks at it as training would find it.
    """
    found: dict[str, Load] = {}
    size = sum((cache.path / shard.file).stat().st_size for shard in cache.index.shards)
    numbers = list(cache.numbers)
    part = numbers[:: max(1, round(size / SERVED_BYTES))]
    for tier in tiers:
        own = part if tier == "host" else numbers
        with suppress(StokerError, OSError):
            load = _load(cache, windows, batch_size, tier, own, seconds)
            if load is not None:
                found[tier] = load
    return found


def _load(
    cache: Cache, windows: Windows | None, batch_size: int, tier: str, numbers: Sequence[int], seconds: float
) -> Load | None:
    """Nothing is between two batches, so all time is waiting: for reads, or for what this thread does."""
    meter = StallMeter()
    loader = Loader(cache, batch_size, windows=windows, tier=tier, indices=numbers, meter=meter)
    begin, counted, spent_s = time.perf_counter(), False, 0.0
    while spent_s < 1.5 * seconds:
        for _ in loader:
            spent_s = time.perf_counter() - begin
            if not counted and spent_s >= seconds / 2:
                # Memory is filled by now, buffers are made and enough is read ahead.
                meter.reset()
                counted = True
            if spent_s >= 1.5 * seconds:
                break
    report = meter.epoch()
    timed = report.batches - 1
    if set(report.tiers) != {tier} or timed < 1:
        return None
    batch_s = (report.wait_s + report.step_s) / timed
    if tier == "disk":
        direct_s = min(batch_s, report.parts.get("gather", 0.0) / timed)
        return Load(alone_s=batch_s, direct_s=direct_s, beside_s=batch_s - direct_s)
    if batch_s <= HANDOVER_S:
        return Load(alone_s=batch_s, direct_s=batch_s, beside_s=0.0)
    return Load(alone_s=batch_s, direct_s=HANDOVER_S, beside_s=batch_s)
