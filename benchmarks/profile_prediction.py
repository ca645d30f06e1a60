"""Is what `stoker profile` predicts of a tier what is then measured? Command: python benchmarks/profile_prediction.py [--save]

Two ways of the earlier systems: a `.pt` file per sample, and one SQLite query per sample. Each is profiled, then
its samples are encoded as they are and served from host memory and from disk to the same step. Prediction and
measurement are milliseconds of a step with its wait; one thread, so that a step's time is steady.
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.profile.run import profile

COUNT, SHAPE, BATCH = 1024, (16, 512), 32


class Files(Dataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(COUNT):
            torch.save({"z": torch.randn(SHAPE)}, folder / f"sample_{number:05d}.pt")

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int):
        return torch.load(self.folder / f"sample_{number:05d}.pt", weights_only=True)


class Rows(Dataset):
    def __init__(self, folder: Path) -> None:
        self.database = sqlite3.connect(folder / "samples.db")
        self.database.execute("create table samples (number integer, z blob)")
        blobs = (
            (n, np.random.default_rng(n).standard_normal(SHAPE, dtype=np.float32).tobytes())
            for n in range(COUNT)
        )
        self.database.executemany("insert into samples values (?, ?)", blobs)
        self.database.commit()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int):
        row = self.database.execute("select z from samples where number = ?", (number,)).fetchone()
        return {"z": torch.from_numpy(np.frombuffer(row[0], dtype=np.float32).reshape(SHAPE).copy())}


class Held(Dataset):
    """The same samples in memory, for filling the cache."""

    def __init__(self, source: Dataset) -> None:
        self.z = torch.stack([source[number]["z"] for number in range(COUNT)])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int):
        return {"z": self.z[number]}


def make_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.GELU(), torch.nn.Linear(256, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch) -> None:
        loss = (model(batch["z"]) - batch["z"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def wall_of(loader, step, steps: int = 60) -> float:
    """Median seconds of a step and its wait."""
    taken: list[float] = []
    while len(taken) < steps:
        before = time.perf_counter()
        for number, batch in enumerate(loader):
            step(batch)
            now = time.perf_counter()
            if number > 1:
                taken.append(now - before)
            before = now
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    torch.set_num_threads(1)
    rows = []
    for name, make in (("a .pt file per sample", Files), ("a query per sample", Rows)):
        with tempfile.TemporaryDirectory() as folder:
            data = make(Path(folder))
            step = make_step()
            found = profile(DataLoader(data, batch_size=BATCH, shuffle=True), step, steps=20)
            print(f"{name}: {found.verdict}")
            for tier in found.tiers:
                loader = stoker.cached(
                    Held(data), cache_dir=Path(folder) / "cache", batch_size=BATCH, tier=tier.tier,
                    identity="held", precompute={"readers": 0},
                )  # fmt: skip
                measured = wall_of(loader, step)
                error = tier.wall_s / measured - 1
                rows.append({
                    "loading": name, "tier": tier.tier, "before_ms": 1e3 * found.loop.wall_s,
                    "predicted_ms": 1e3 * tier.wall_s, "measured_ms": 1e3 * measured, "error": error,
                })  # fmt: skip
                print(
                    "  "
                    + ", ".join(
                        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()
                    )
                )
    if save:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        record = {
            "commit": commit,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "rows": rows,
        }
        path = Path(__file__).parent / "results" / "profile_prediction.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
