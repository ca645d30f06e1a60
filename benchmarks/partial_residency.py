"""Question: where only a part of a set fits the faster tier, is the stall the one that its plan predicts?

2,000 records of 103 KiB in 40 shards, whole records in batches of 32. `reserve_bytes` leaves room in host memory for a fraction
of the set; the rest is read from disk, its pages dropped before each epoch. Steps sleep (2 ms) or multiply matrices (8 ms).
The plan knows each tier by serving from it alone beside an imitation of the step, and mixes them by what they hold.
`measured` and `stall` as in `plan_stall.py`; medians of rounds of step, plan and run one after another.

    python benchmarks/partial_residency.py [--save] [--seconds 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import publish
from plan_stall import alone, multiplying, sleeping
from serve_memory import Records, cache_of
from stoker.loader.outputs import make_outputs
from stoker.monitor import StallMeter
from stoker.plan import Demand, Plan, Rates, plan_tiers, probe
from stoker.plan.rates import drop_from_page_cache
from stoker.run.plan import TimedStep, served_loads

RECORDS, BATCH, ROUNDS = 2_000, 32, 3
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


def reserve(cache: stoker.Cache, fraction: float) -> int:
    """Host memory to leave, so that this fraction of the records may be held, and half a shard more."""
    size = len(cache) * cache.schema["latent"].size_bytes()
    return max(0, probe().host_bytes - int((fraction + 0.0125) * size))


def planned(cache: stoker.Cache, fraction: float, step: TimedStep, files: list[Path]) -> Plan:
    """The plan for that fraction, made with both tiers as they are now."""
    drop_from_page_cache(files)
    served = served_loads(cache, None, BATCH, step=step)
    example_bytes = sum(output.example_bytes for output in make_outputs(cache.schema, None, None))
    demand = Demand(
        records=len(cache),
        record_bytes=cache.schema["latent"].size_bytes(),
        batch_examples=BATCH,
        example_bytes=example_bytes,
        step_cpus=step.cpus,
    )
    rates = Rates(served=served, measured=True)
    return plan_tiers(
        demand, probe(), reserve_bytes=reserve(cache, fraction), step_s=step.seconds, rates=rates
    )


def measured(
    cache: stoker.Cache, fraction: float, step: Callable[[], None], files: list[Path], seconds: float
) -> dict[str, float]:
    """A run of that many seconds, after one third of it to begin with."""
    meter = StallMeter()
    loader = stoker.Loader(cache, BATCH, reserve_bytes=reserve(cache, fraction), meter=meter, shuffle=True)
    held = loader.plan.records_by_tier()["host"]
    files = files[
        round(held / len(cache) * len(files)) :
    ]  # those held must stay, or memory would fault them in
    begin, counted = time.perf_counter(), False
    while time.perf_counter() - begin < seconds * 4 / 3:
        drop_from_page_cache(files)
        for _ in loader:
            step()
            now = time.perf_counter() - begin
            if not counted and now >= seconds / 3:
                meter.reset()
                counted = True
            if now >= seconds * 4 / 3:
                break
    report = meter.epoch()
    batch_s = (report.wait_s + report.step_s) / max(1, report.batches - 1)
    return {"held": held / len(cache), "stall": report.stall, "batch_s": batch_s}


def once(
    cache: stoker.Cache, fraction: float, step: Callable[[], None], cpus: float, seconds: float
) -> dict[str, float]:
    """Step, plan and run, one after another."""
    files = [cache.path / shard.file for shard in cache.index.shards]
    step_s = alone(step)
    expected = planned(cache, fraction, TimedStep(seconds=step_s, cpus=cpus), files).stall_at(step_s)
    assert expected is not None
    found = measured(cache, fraction, step, files, seconds)
    return {
        "held": found["held"],
        "predicted": expected,
        "measured": max(0.0, 1 - step_s / found["batch_s"]),
        "stall": found["stall"],
        "batch_ms": found["batch_s"] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        latent = torch.randn(RECORDS, 101, 16, 32, generator=torch.Generator().manual_seed(0)).half()
        cache = cache_of(Records({"latent": latent}, time=("latent",)), Path(folder), shards=40)
        del latent
        steps = {"sleep 2 ms": (sleeping(2e-3), 0.0), "multiply 8 ms": (multiplying(8e-3), 1.0)}
        for doing, (step, cpus) in steps.items():
            for fraction in FRACTIONS:
                rounds = [once(cache, fraction, step, cpus, arguments.seconds) for _ in range(ROUNDS)]
                found = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                points = round(100 * (found["predicted"] - found["measured"]), 1)
                row = {key: round(value, 4) for key, value in found.items()}
                rows.append({"fraction": fraction, "step": doing, **row, "points": points})
                print(rows[-1], file=sys.stderr)
    publish("partial_residency", rows, save=arguments.save)


if __name__ == "__main__":
    main()
