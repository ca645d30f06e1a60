"""Question: is what `stoker profile` predicts of a tier what is then measured?

Two ways of the earlier systems, a `.pt` file per sample and one SQLite query per sample, profiled as anybody's
loader; and a Stoker configuration, profiled with its own training steps. Then the samples are served from each
tier to the same step. Figures are milliseconds of a step with its wait, medians over rounds in which profile and
measurement take turns, so that a machine that drifts hits both; one thread, so that a step's time is steady.

    python benchmarks/profile_prediction.py [--save] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from measure import publish
from stoker.config import load_config
from stoker.profile.result import ENCODE, Profile
from stoker.profile.run import profile
from stoker.run.build import build_jobs
from stoker.run.caches import locate
from stoker.run.context import Run
from stoker.run.demo import BurgersSpec, write_burgers
from stoker.run.loaders import make_loader
from stoker.run.precompute import fill_caches
from stoker.run.profile import profile_config
from stoker.run.train import loop_settings
from stoker.train.run import steps_of

COUNT, SHAPE, BATCH = 1024, (16, 512), 32
STEPS = 60
Step = Callable[[Any], object]


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


def make_step() -> Step:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.GELU(), torch.nn.Linear(256, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch) -> None:
        loss = (model(batch["z"]) - batch["z"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def wall_of(passes: Iterable[Any], step: Step) -> float:
    """Median seconds of a step and its wait; the first batches of a pass are not waited for as others are."""
    taken: list[float] = []
    for batches in repeat(passes):
        before = time.perf_counter()
        for number, batch in enumerate(batches):
            step(batch)
            now = time.perf_counter()
            if number > 1:
                taken.append(now - before)
            before = now
        if len(taken) >= STEPS:
            return statistics.median(taken)
    raise AssertionError


def of_a_loader(make: type, folder: Path) -> tuple[Callable[[], Profile], dict[str, Callable[[], float]]]:
    """How to profile one of the earlier ways, and how to measure each tier in its place."""
    data, step = make(folder), make_step()
    loaders = {
        tier: stoker.cached(
            Held(data), cache_dir=folder / "cache", batch_size=BATCH, tier=tier, version="held",
            precompute={"workers": 0},
         shuffle=True)
        for tier in ("host", "disk")
    }  # fmt: skip
    slow = DataLoader(data, batch_size=BATCH, shuffle=True)
    return (
        lambda: profile(slow, step, steps=20),
        {tier: lambda loader=loader: wall_of(loader, step) for tier, loader in loaders.items()},
    )


def of_a_configuration(folder: Path) -> tuple[Callable[[], Profile], dict[str, Callable[[], float]]]:
    """The same of a training on simulated trajectories; without a cache each sample is encoded once an epoch."""
    write_burgers(folder / "burgers.hdf5", BurgersSpec())
    own = ["data.files", "training.latent_cache_dir", "training.run_dir"]
    where = [
        f"{key}={folder / name}" for key, name in zip(own, ("burgers.hdf5", "cache", "run"), strict=True)
    ]
    config = load_config(None, [*where, "training.batch_size=64", "training.device=cpu", "model.width=64"])
    fill_caches(Run(config), ["train"])
    (job,) = build_jobs(Run(config).for_task("burgers"), ["train"])
    loaders = {}
    for tier in ("host", "disk"):
        tiered = load_config(None, [*where, "training.batch_size=64", f"training.tier={tier}"])
        loaders[tier] = make_loader(Run(tiered), locate(Run(config).for_task("burgers"), "train").cache)
    host = loaders["host"]
    step = steps_of(host, loop_settings(Run(config), len(host), resume=False))

    def without_a_cache() -> float:
        """An epoch's mean: all samples are read and encoded in it, one group of eight after another."""
        began, numbers = time.perf_counter(), iter(range(len(job.source)))
        for batch, _ in zip(chain.from_iterable(repeat(host)), range(len(host)), strict=False):
            for number in chain([next(numbers, None)], [next(numbers, None)]):
                if number is not None and number % 8 == 0:
                    group = [job.source.read(n) for n in range(number, min(number + 8, len(job.source)))]
                    names = group[0]
                    stacked = {k: torch.from_numpy(np.stack([one[k] for one in group])) for k in names}
                    with torch.inference_mode():
                        job.encoder.encode(stacked)
            step(batch)
        return (time.perf_counter() - began) / len(host)

    measuring = {tier: lambda loader=loader: wall_of(loader, step) for tier, loader in loaders.items()}
    return lambda: profile_config(Run(config), steps=20), {**measuring, ENCODE: without_a_cache}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[Path], Any]] = {
        "a .pt file per sample": lambda folder: of_a_loader(Files, folder),
        "a query per sample": lambda folder: of_a_loader(Rows, folder),
        "a configuration": of_a_configuration,
    }
    rows: list[dict[str, Any]] = []
    for name, make in cases.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            profiling, measuring = make(Path(folder))
            taken: dict[str, list[tuple[float, float, float]]] = {tier: [] for tier in measuring}
            for _ in range(arguments.rounds):
                found = profiling()
                for tier in (row for row in found.tiers if row.tier in measuring):
                    taken[tier.tier].append((found.loop.wall_s, tier.wall_s, measuring[tier.tier]()))
        for tier, figures in taken.items():
            columns = zip(*figures, strict=True)
            before, predicted, measured = (1e3 * statistics.median(column) for column in columns)
            error = statistics.median(p / m - 1 for _, p, m in figures)
            rows.append({
                "loading": name, "tier": tier, "before_ms": round(before, 3), "verdict": found.verdict,
                "predicted_ms": round(predicted, 3), "measured_ms": round(measured, 3), "error": round(error, 4),
                "errors": [round(p / m - 1, 4) for _, p, m in figures],
            })  # fmt: skip
    publish("profile_prediction", rows, save=arguments.save)


if __name__ == "__main__":
    main()
