"""Question: how much of a training step is spent waiting for data, before Stoker and with it?

A real step (the reference operator, forward, backward, AdamW) on pairs (t, t + 1) of 200 Burgers-sized latent trajectories, fed by
a DataLoader over per-sample `.pt` files, one over a dict in RAM, and a Loader over the same records. `stall` is the time the
step waited for its batch as a fraction of the whole; `compute_ms` is the step on one resident batch, measured in the same run.

    python benchmarks/stall.py [--save]      also draws docs/images/stall.png with --save
"""

from __future__ import annotations

import argparse
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

STEPS, BATCH = 60, 64


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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
    names = [row["feed"] for row in rows][::-1]
    waits = [row["step_ms"] * row["stall"] for row in rows][::-1]
    computes = [row["step_ms"] * (1 - row["stall"]) for row in rows][::-1]
    axes.barh(names, computes, color="#2f6f9f", label="compute")
    axes.barh(names, waits, left=computes, color="#d98a3d", label="waiting for data")
    for place, row in enumerate(rows[::-1]):
        axes.text(row["step_ms"], place, f"  stall {row['stall']:.1%}", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a step (log scale)")
    axes.set_xlim(right=max(row["step_ms"] for row in rows) * 4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
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
        feeds: dict[str, tuple[Iterable[Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
            "DataLoader, .pt files": (DataLoader(files, BATCH, shuffle=True), tuple),
            "DataLoader, dict in RAM": (DataLoader(PairsInMemory(latent), BATCH, shuffle=True), tuple),
            "Stoker": (
                stoker.Loader(cache, batch_size=BATCH, windows=stoker.Windows()),
                lambda batch: (batch.z0, batch.z1),
            ),
        }
        rows = [
            {"feed": name, "batch": BATCH, **fed_by(loader, pick)} for name, (loader, pick) in feeds.items()
        ]
    publish("stall", rows, save=arguments.save)
    if arguments.save:
        draw(rows, Path(__file__).parent.parent / "docs" / "images" / "stall.png")


if __name__ == "__main__":
    main()
