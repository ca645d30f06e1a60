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
LEAST_PAUSES = 4
"""Batches, at least, that are timed with pauses between them."""
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
    """First without a step, then, from disk, with pauses so long that every read is over when they end."""
    meter = StallMeter()
    loader = Loader(cache, batch_size, windows=windows, tier=tier, indices=numbers, meter=meter)
    _serve(loader, meter, 0.0, seconds)
    report = meter.epoch()
    timed = report.batches - 1
    if set(report.tiers) != {tier} or timed < 1:
        return None
    batch_s = (report.wait_s + report.step_s) / timed
    if tier != "disk":
        direct_s = min(batch_s, HANDOVER_S)
        return Load(alone_s=batch_s, direct_s=direct_s, beside_s=batch_s if batch_s > direct_s else 0.0)
    # Threads that were idle are dearer to wake than ones at work, so this is not what the first part shows.
    _serve(loader, meter, 2 * batch_s, max(seconds, LEAST_PAUSES * 3 * batch_s))
    report = meter.epoch()
    direct_s = min(batch_s, report.wait_s / max(1, report.batches - 1))
    return Load(alone_s=batch_s, direct_s=direct_s, beside_s=batch_s - direct_s)


def _serve(loader: Loader, meter: StallMeter, pause_s: float, seconds: float) -> None:
    """Serve for half of `seconds`, until memory is filled and enough is read ahead; then count for them."""
    begin, counted, spent_s = time.perf_counter(), False, 0.0
    while spent_s < 1.5 * seconds:
        for _ in loader:
            if pause_s:
                time.sleep(pause_s)
            spent_s = time.perf_counter() - begin
            if not counted and spent_s >= seconds / 2:
                meter.reset()
                counted = True
            if spent_s >= 1.5 * seconds:
                break
