"""Question: how long does a whole precompute take on Ray, against the local engine with as many workers?

A cluster of this machine alone, connected and with its workers' imports done before anything is timed: what that
takes is stated apart (`start`). Then whole calls of precompute in turns, with one and with two workers: local
encoders in one process or in two (`device=["cpu", "cpu"]`), tasks that take two processors or one. Two encoders:
`cheap` multiplies by two, so what lies around it is all there is; `sleeps` waits 50 ms a sample. All records are
compared, in the first round. `ratio` is the median of the rounds' ratios, Ray's time over the local engine's, `more_s`
that of the differences: what a run costs more however long it is. `next_task`: the same work with tasks that end after
a second against one task, over the number of tasks more: what it costs that a task ends before its slice does.

    python benchmarks/ray_overhead.py [--save] [--rounds 2] [--cheap 40000] [--sleeps 200]
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

from devices import Rows
from measure import publish
from stoker.encoders.protocol import EncodeBatchSize
from stoker.extras.ray.engine import RayEngine
from stoker.precompute import PrecomputeReport, PrecomputeSettings, run_precompute
from stoker.schema import Field

WORKERS = (1, 2)
WIDTH = 1024
GROUP = 8
SLEEP_S = {"cheap": 0.0, "sleeps": 0.05}


class Doubling:
    """Twice each sample, after a wait."""

    independent_steps = False

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def schema(self, sample_schema: Any) -> dict[str, Field]:
        """As the sample's."""
        return {"latent": Field(shape=sample_schema["data"].shape, dtype="float32")}

    def encode_batch_size(self, sample_schema: Any) -> EncodeBatchSize:
        """Of fixed size."""
        return EncodeBatchSize(samples=GROUP, steps=None)

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Wait, and multiply."""
        if self.sleep_s and batch["data"].any():  # not when it is tried on zeros
            time.sleep(self.sleep_s * len(batch["data"]))
        return {"latent": batch["data"] * 2}

    def to(self, device: torch.device) -> None:
        """Nothing to move."""

    def weights(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def identity(self) -> dict[str, Any]:
        """By name and wait."""
        return {"class": "Doubling", "version": 1, "sleep_s": self.sleep_s}


def run(
    folder: Path, encoder: str, count: int, workers: int, *, on_ray: bool, slice_s: float = 600.0
) -> tuple[float, PrecomputeReport]:
    """Seconds of a whole call, and what came of it."""
    devices = ("cpu",) if on_ray else ("cpu",) * workers
    settings = PrecomputeSettings(devices=devices, progress=None)
    engine = RayEngine(num_cpus=max(WORKERS) / workers, slice=slice_s) if on_ray else None
    begin = time.perf_counter()
    report = run_precompute(
        Rows(count, WIDTH), Doubling(SLEEP_S[encoder]), folder, name="rows", settings=settings, engine=engine
    )
    return time.perf_counter() - begin, report


def same(one: PrecomputeReport, other: PrecomputeReport) -> bool:
    """Whether two caches hold the same records, bit by bit."""
    pairs = ((one.cache[i]["latent"], other.cache[i]["latent"]) for i in range(one.records))
    return one.records == other.records == one.cache.recipe.count and all(torch.equal(a, b) for a, b in pairs)


def start(folder: Path) -> dict[str, Any]:
    """Start Ray, have both workers import what they need, and say what each takes."""
    begin = time.perf_counter()
    ray.init(
        num_cpus=max(WORKERS), include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20
    )
    up = time.perf_counter()
    first, _ = run(folder / "first", "cheap", 2000, max(WORKERS), on_ray=True)
    again, _ = run(folder / "again", "cheap", 2000, max(WORKERS), on_ray=True)
    return {
        "case": "start",
        "ray_init_s": round(up - begin, 2),
        "workers_import_s": round(first - again, 2),
    }


def next_task(folder: Path) -> float:
    """Seconds that a task more takes, of the same work."""
    groups = 15
    one, _ = run(folder / "one", "sleeps", groups * GROUP, 1, on_ray=True)
    many, _ = run(folder / "many", "sleeps", groups * GROUP, 1, on_ray=True, slice_s=1.0)
    tasks = math.ceil(groups / math.ceil(1.0 / (GROUP * SLEEP_S["sleeps"])))  # each ends with its group
    shutil.rmtree(folder)
    print("next task", round((many - one) / (tasks - 1), 2), file=sys.stderr, flush=True)
    return (many - one) / (tasks - 1)


def turn(folder: Path, encoder: str, count: int, workers: int, *, compare: bool) -> tuple[float, float]:
    """Seconds of the local engine and of Ray for the same."""
    local_s, local = run(folder / "local", encoder, count, workers, on_ray=False)
    ray_s, on_ray = run(folder / "ray", encoder, count, workers, on_ray=True)
    assert not compare or same(local, on_ray)
    shutil.rmtree(folder)
    print(encoder, workers, round(local_s, 2), round(ray_s, 2), file=sys.stderr, flush=True)
    return local_s, ray_s


def main() -> None:
    """Measure, in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cheap", type=int, default=40_000, help="samples")
    parser.add_argument("--sleeps", type=int, default=200, help="samples")
    arguments = parser.parse_args()
    counts = {"cheap": arguments.cheap, "sleeps": arguments.sleeps}
    torch.set_num_threads(1)
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as text:
        rows = [start(Path(text))]
        tasks: list[float] = []
        for number in range(arguments.rounds):
            tasks.append(next_task(Path(text) / "tasks"))
            for case in ((encoder, workers) for encoder in counts for workers in WORKERS):
                taken.setdefault(case, []).append(
                    turn(Path(text) / "turn", case[0], counts[case[0]], case[1], compare=number == 0)
                )
        ray.shutdown()
    rows.append(
        {
            "case": "next_task",
            "median_s": round(statistics.median(tasks), 2),
            "rounds": [round(one, 2) for one in tasks],
        }
    )
    for (encoder, workers), pairs in taken.items():
        ratios = [ray_s / local_s for local_s, ray_s in pairs]
        rows.append(
            {
                "case": encoder, "workers": workers, "samples": counts[encoder],
                "local_s": round(statistics.median(pair[0] for pair in pairs), 2),
                "ray_s": round(statistics.median(pair[1] for pair in pairs), 2),
                "more_s": round(statistics.median(ray_s - local_s for local_s, ray_s in pairs), 2),
                "ratio": round(statistics.median(ratios), 2), "rounds": [round(ratio, 2) for ratio in ratios],
            }
        )  # fmt: skip
    publish("ray_overhead", rows, save=arguments.save)


if __name__ == "__main__":
    main()
