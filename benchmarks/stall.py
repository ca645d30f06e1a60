"""Question: how much of a training step is spent waiting for data, before Stoker and with it?

A small step (two linear layers, forward, backward, AdamW) on pairs (t, t + 1) of 200 Burgers-sized latent trajectories, fed by
a DataLoader over per-sample `.pt` files, one over a dict in RAM, and a Loader over the same records. Each DataLoader runs with
0, 1 and 2 workers (persistent), and the fastest is its result. `stall` is the time the step waited for its batch as a fraction
of the whole; `compute_ms` is the step on one resident batch, measured in the same run. Medians of three rounds, in turn.

    python benchmarks/stall.py [--save]      also draws docs/images/stall.png with --save
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import stoker
from measure import publish
from serve_memory import PairFiles, PairsInMemory, Records, cache_of

STEPS, BATCH, ROUNDS = 60, 64, 3
WORKERS = (0, 1, 2)


def make_step() -> Callable[[torch.Tensor, torch.Tensor], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(z0: torch.Tensor, z1: torch.Tensor) -> None:
        loss = nn.functional.mse_loss(z0.float() + model(z0.float()), z1.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def fed_by(
    loader: Iterable[Any], pick: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, float]:
    """Run the step for `STEPS` batches and split its wall time into waiting and computing."""
    step, batches = make_step(), forever(loader)
    resident = pick(next(batches))
    for _ in range(5):
        step(*resident)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step(*resident)
    compute = (time.perf_counter() - begin) / STEPS
    waited = 0.0
    begin = time.perf_counter()
    for _ in range(STEPS):
        asked = time.perf_counter()
        batch = pick(next(batches))
        waited += time.perf_counter() - asked
        step(*batch)
    wall = time.perf_counter() - begin
    return {
        "compute_ms": round(compute * 1e3, 3),
        "step_ms": round(wall / STEPS * 1e3, 3),
        "stall": round(waited / wall, 4),
    }


def best(name: str, by_workers: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """The fastest number of workers: medians, the range of its step, and every number's median."""
    medians = {w: statistics.median(run["step_ms"] for run in runs) for w, runs in by_workers.items()}
    workers = min(medians, key=medians.__getitem__)
    runs = by_workers[workers]
    return {
        "feed": name,
        "batch": BATCH,
        "workers": workers,
        **{key: statistics.median(run[key] for run in runs) for key in ("compute_ms", "step_ms", "stall")},
        "range_ms": [min(run["step_ms"] for run in runs), max(run["step_ms"] for run in runs)],
        "step_ms_by_workers": medians,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    rows = rows[::-1]
    names = [row["feed"] for row in rows]
    waits = [row["step_ms"] * row["stall"] for row in rows]
    computes = [row["step_ms"] * (1 - row["stall"]) for row in rows]
    ends = [row["step_ms"] for row in rows]
    spread = [[end - low for end, (low, _) in zip(ends, (row["range_ms"] for row in rows), strict=True)],
              [high - end for end, (_, high) in zip(ends, (row["range_ms"] for row in rows), strict=True)]]  # fmt: skip
    axes.barh(names, computes, color="#2f6f9f", label="compute")
    axes.barh(names, waits, left=computes, color="#d98a3d", label="waiting for data", xerr=spread, capsize=3)
    for place, row in enumerate(rows):
        axes.text(row["range_ms"][1], place, f"  stall {row['stall']:.0%}", va="center", fontsize=9)
    axes.set_xlabel("milliseconds a step")
    axes.set_xlim(0, max(row["range_ms"][1] for row in rows) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    latent = torch.randn(200, 101, 16, 32, generator=torch.Generator().manual_seed(0)).half()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        cache = cache_of(Records({"latent": latent}, time=("latent",)), Path(folder), shards=4)
        files = PairFiles(Path(folder) / "pt", latent)
        rivals = {"DataLoader, .pt files": files, "DataLoader, dict in RAM": PairsInMemory(latent)}
        feeds: dict[
            tuple[str, int], tuple[Iterable[Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]
        ] = {
            (name, workers): (
                DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
                tuple,
            )
            for name, data in rivals.items()
            for workers in WORKERS
        }
        ours = stoker.Loader(cache, batch_size=BATCH, windows=stoker.Windows(), shuffle=True)
        feeds["Stoker", 0] = (ours, lambda batch: (batch.z0, batch.z1))
        measured: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in feeds}
        for _ in range(ROUNDS):
            for key, (loader, pick) in feeds.items():
                measured[key].append(fed_by(loader, pick))
        rows = [
            best(name, {w: runs for (n, w), runs in measured.items() if n == name})
            for name in (*rivals, "Stoker")
        ]
    publish("stall", rows, save=arguments.save)
    if arguments.save:
        draw(rows, Path(__file__).parent.parent / "docs" / "images" / "stall.png")


if __name__ == "__main__":
    main()
