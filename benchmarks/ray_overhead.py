"""Question: what does precompute on Ray cost beside the local engine, with the same processes at work?

Data: 2,000 smooth trajectories (201, 1024) float32 in PDEBench's layout, contiguous, page cache warm; encoder: the
patch network of `precompute_wall.py`, bound by arithmetic. Both engines have one process that encodes, with all of
torch's threads, and one reader; Ray on a cluster of its own on this machine, connected before the clock starts.

- `local_s`, `ray_s`: the whole call of precompute into an empty folder, medians of runs taken in turns.
- `ratio`: ray over local.
- `connect_s`: starting the cluster and connecting, once a command. `first_s`: the first run of the cluster above
  the later ones: its workers start and import torch.
- `tasks`: slices that a run was cut into; `shards_local`, `shards_ray`: files made.

    python benchmarks/ray_overhead.py [--save] [--samples 2000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import stoker
from measure import publish
from precompute_wall import make_encoder, write
from stoker.plan.resources import probe
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.interrupts import Interrupts
from stoker.scale import ray_round
from stoker.scale.ray_engine import RayEngine


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "burgers.hdf5", given.samples, None)
        row = measure(folder, given.samples, given.rounds)
    publish("ray_overhead", [row], save=given.save)


def measure(folder: Path, samples: int, rounds: int) -> dict[str, Any]:
    """Runs of both engines in turns; the first of each is not counted."""
    source = stoker.HDF5Source(folder / "burgers.hdf5", preset="pdebench")
    encoder = make_encoder("mlp")
    settings = PrecomputeSettings(readers=1, progress=None)
    tasks = 0
    order = ray_round.Round._order

    def counted(self: ray_round.Round, one: Any) -> dict[str, Any]:
        nonlocal tasks
        tasks += 1
        return order(self, one)

    ray_round.Round._order = counted
    taken: dict[str, list[float]] = {"local": [], "ray": []}
    shards: dict[str, int] = {}
    with RayEngine(num_cpus=int(probe().cpus)) as engine:  # so one task runs at a time
        begun = time.perf_counter()
        engine._cluster.connect(Interrupts(), store_bytes=64 * 2**20)
        connect_s = time.perf_counter() - begun
        for turn in range(rounds + 1):
            for kind, who in (("local", None), ("ray", engine)):
                tasks = 0
                begun = time.perf_counter()
                report = run_precompute(
                    source, encoder, folder / f"{kind}{turn}", name="c", settings=settings, engine=who
                )
                taken[kind].append(time.perf_counter() - begun)
                shards[kind] = len(report.cache.index.shards)
    first, later = taken["ray"][0], statistics.median(taken["ray"][1:])
    local = statistics.median(taken["local"][1:])
    return {
        "samples": samples,
        "local_s": round(local, 2),
        "ray_s": round(later, 2),
        "ratio": round(later / local, 3),
        "connect_s": round(connect_s, 2),
        "first_s": round(first - later, 2),
        "tasks": tasks,
        "shards_local": shards["local"],
        "shards_ray": shards["ray"],
    }


if __name__ == "__main__":
    main()
