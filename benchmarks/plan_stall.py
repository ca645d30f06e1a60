"""Question: is the stall that a plan predicts the one that a run then has?

4,000 latent trajectories of 103 KiB: windows (t, t+1) from host memory and from disk in the page cache; whole records from disk
past it (windows would find their neighbors in it), of 32,000 of them, so that no run comes to the end of a pass: in a cache
larger than memory every read is cold, in a small one the system has read the neighbors of most records by then. Two batch
sizes each, and steps that sleep (as one on a GPU leaves the CPU alone) or multiply matrices on one core: 12 combinations. The
plan knows the step by a hundred of it alone, and the tiers by a second or two of serving, most of it beside an
imitation of that step, as `stoker plan` does after a run. `measured` is all that the run lacks to the step alone, `stall` what the meter saw as waiting: threads that read also
delay the step itself, by the interpreter's lock. `within` is the part of the rounds whose `measured` lies in the plan's range, which should be 0.9, and `width_points` how wide that is. Medians of rounds of step, plan and run one after another. Last, W2 with a step of 2 ms where a core is free and where none is.

    python benchmarks/plan_stall.py [--save] [--seconds 1] [--only "disk, cold"]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import publish
from serve_memory import Records, cache_of
from stoker.loader.outputs import make_outputs
from stoker.monitor import StallMeter
from stoker.plan import Demand, Interval, Rates, plan_tiers, probe
from stoker.plan.rates import drop_from_page_cache
from stoker.run.plan import TimedStep, served_loads

WINDOWS = stoker.Windows()
TRAJECTORIES, STEPS = 4_000, 101
COLD_TIMES = 8
"""So many times as many trajectories are read past the page cache."""
RUNS = 7
"""Of W2 with a step of 2 ms, which a moment's disturbance changes most."""
COLD_ROUNDS = 9
"""One run of a second in three has a wait of 60 to 120 ms for the drive, 6 to 12 points."""
ALONE = 100
"""Steps that are timed with nothing beside them."""


@dataclass
class Place:
    """Where batches come from."""

    tier: str
    cache: stoker.Cache
    windows: stoker.Windows | None = WINDOWS
    batches: tuple[int, int] = (64, 512)
    rounds: int = 5
    """Of step, plan and run."""
    before: Callable[[], None] = lambda: None
    """Called before each epoch."""


def sleeping(step_s: float) -> Callable[[], None]:
    return lambda: time.sleep(step_s)


def multiplying(step_s: float) -> Callable[[], None]:
    """Products of matrices for that long, the interpreter's lock free most of the time."""
    a = torch.randn(192, 192)

    def step() -> None:
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            torch.mm(a, a)

    return step


def alone(step: Callable[[], None]) -> float:
    """Seconds of the step with nothing beside it."""
    step()
    begin = time.perf_counter()
    for _ in range(ALONE):
        step()
    return (time.perf_counter() - begin) / ALONE


def predicted(place: Place, batch: int, step_s: float, step_cpus: float) -> dict[str, float]:
    """What a plan says that was made with the tiers as they are now, with its range."""
    place.before()
    step = TimedStep(seconds=step_s, cpus=step_cpus)
    served = served_loads(place.cache, place.windows, batch, tiers=[place.tier], step=step)
    for _ in range(30):  # memory was still being filled, while a large cache goes to the drive
        if place.tier in served:
            break
        time.sleep(1)
        served = served_loads(place.cache, place.windows, batch, tiers=[place.tier], step=step)
    else:
        raise SystemExit(f"the {place.tier} tier did not serve in 30 tries")
    outputs = make_outputs(place.cache.schema, place.windows, None)
    demand = Demand(
        records=len(place.cache),
        record_bytes=place.cache.schema["latent"].size_bytes(),
        batch_examples=batch,
        example_bytes=sum(output.example_bytes for output in outputs),
        step_cpus=step_cpus,
    )
    plan = plan_tiers(
        demand, probe(), tier=place.tier, step_s=step_s, rates=Rates(served=served, measured=True)
    )
    stall = plan.stall_at(step_s)
    assert stall is not None
    likely = plan.stall_range_at(step_s) or Interval(stall, stall)
    load = served[place.tier]
    return {
        "predicted": stall,
        "low": likely.low,
        "high": likely.high,
        "trials": load.trials,
        "others_cpus": 0.0 if load.use is None else load.use.others_cpus,
    }


def measured(place: Place, batch: int, step: Callable[[], None], seconds: float) -> dict[str, float]:
    """A run of that many seconds, after one third of it to begin with."""
    meter = StallMeter()
    loader = stoker.Loader(
        place.cache, batch, windows=place.windows, tier=place.tier, meter=meter, shuffle=True
    )
    begin, counted = time.perf_counter(), False
    while time.perf_counter() - begin < seconds * 4 / 3:
        place.before()
        for _ in loader:
            step()
            now = time.perf_counter() - begin
            if not counted and now >= seconds / 3:
                meter.reset()
                counted = True
            if now >= seconds * 4 / 3:
                break
    report = meter.epoch()
    return {"stall": report.stall, "batch_s": (report.wait_s + report.step_s) / max(1, report.batches - 1)}


def once(
    place: Place, batch: int, step: Callable[[], None], step_cpus: float, seconds: float
) -> dict[str, float]:
    """Step, plan and run, one after another."""
    step_s = alone(step)
    expected = predicted(place, batch, step_s, step_cpus)
    found = measured(place, batch, step, seconds)
    lacks = max(0.0, 1 - step_s / found["batch_s"])
    return {
        **expected,
        "measured": lacks,
        "within": float(expected["low"] <= lacks <= expected["high"]),
        "stall": found["stall"],
        "step_ms": step_s * 1e3,
        "batch_ms": found["batch_s"] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", choices=["disk, cold", "disk, warm", "host", "W2"])
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        latent = torch.randn(TRAJECTORIES, STEPS, 16, 32, generator=torch.Generator().manual_seed(0)).half()
        cache = cache_of(Records({"latent": latent}, time=("latent",)), Path(folder) / "warm", shards=4)
        many = Records({"latent": latent.repeat(COLD_TIMES, 1, 1, 1)}, time=("latent",))
        large = cache_of(many, Path(folder) / "cold", shards=4 * COLD_TIMES)
        del latent, many
        files = [large.path / shard.file for shard in large.index.shards]
        places = {
            "disk, cold": Place(
                "disk", large, None, (8, 32), COLD_ROUNDS, lambda: drop_from_page_cache(files)
            ),
            "disk, warm": Place("disk", cache),
            "host": Place("host", cache),
        }
        steps = {"sleep 2 ms": (sleeping(2e-3), 0.0), "multiply 8 ms": (multiplying(8e-3), 1.0)}
        for name, place in places.items():
            if arguments.only not in (None, name):
                continue
            for batch in place.batches:
                for doing, (step, step_cpus) in steps.items():
                    rounds = [
                        once(place, batch, step, step_cpus, arguments.seconds) for _ in range(place.rounds)
                    ]
                    found = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                    rows.append(
                        {
                            "tier": name,
                            "batch": batch,
                            "step": doing,
                            **{key: round(value, 4) for key, value in found.items()},
                            "points": round(100 * (found["predicted"] - found["measured"]), 1),
                            "within": statistics.fmean(each["within"] for each in rounds),
                            "width_points": round(
                                100 * statistics.median(each["high"] - each["low"] for each in rounds), 1
                            ),
                            "rounds": [
                                [round(each[k], 3) for k in ("predicted", "low", "high", "measured")]
                                for each in rounds
                            ],
                        }
                    )
                    print(rows[-1], file=sys.stderr)
        if rows:
            within = [row["within"] for row in rows]
            rows.append(
                {
                    "ranges": len(within),
                    "rounds_within": round(statistics.fmean(within), 3),
                    "width_points": round(statistics.median(row["width_points"] for row in rows), 1),
                }
            )
            print(rows[-1], file=sys.stderr)
        if arguments.only in (None, "W2"):
            rows += two_milliseconds(cache, arguments.seconds)
    part = "" if arguments.only is None else "_" + arguments.only.replace(", ", "-")
    publish(f"plan_stall{part}", rows, save=arguments.save)


def two_milliseconds(cache: stoker.Cache, seconds: float) -> list[dict[str, Any]]:
    """W2 in batches of 256, a step of 2 ms: with all cores, and held to one."""
    rows: list[dict[str, Any]] = []
    cores = os.sched_getaffinity(0)
    for name, own in (("all cores", cores), ("one core", {min(cores)})):
        os.sched_setaffinity(0, own)
        try:
            for doing, step in (("sleep 2 ms", sleeping(2e-3)), ("multiply 2 ms", multiplying(2e-3))):
                found = [measured(Place("host", cache), 256, step, seconds)["stall"] for _ in range(RUNS)]
                of = {"stall": statistics.median(found), "lowest": min(found), "highest": max(found)}
                rows.append({"W2": doing, "on": name, **{key: round(value, 4) for key, value in of.items()}})
        finally:
            os.sched_setaffinity(0, cores)
    return rows


if __name__ == "__main__":
    main()
