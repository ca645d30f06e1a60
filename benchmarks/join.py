"""Question: what does it cost to serve latents, text and labels from three joined caches instead of one?

20,000 samples of latents (4, 32, 32) float16, text (16, 256) float16 that four samples share, and a label, shuffled, in
batches of 64 from host memory and from disk (page cache warm). `one` is a cache with all three fields, where each
sample has its own copy of the text. `zip` joins three caches by key. `files` is what is written by hand today: one
`.npz` for latents and one for text per sample, read by a DataLoader with the best of 0 and 2 workers, warm.
Figures are seconds per batch, best of interleaved turns; ratios are to `one`.

    python benchmarks/join.py [--save] [--samples 20000]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

import stoker
from measure import interleaved, publish

BATCH, SHARED = 64, 4
FILES = 4_000
"""Samples in files of their own: enough for the rate, and quick to write."""


def sample(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    return {"latents": rng.standard_normal((4, 32, 32)).astype(np.float16), "label": np.int64(i % 1000)}


def text(i: int) -> dict[str, Any]:
    return {"text": np.random.default_rng(-i - 1 & 0xFFFF).standard_normal((16, 256)).astype(np.float16)}


class Items(Dataset[dict[str, Any]]):
    """Items made by a function."""

    def __init__(self, count: int, make: Callable[[int], dict[str, Any]]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.make(i)


def whole(i: int) -> dict[str, Any]:
    return {**sample(i), **text(i // SHARED)}


def only(name: str, i: int) -> dict[str, Any]:
    return {name: sample(i)[name]}


class Files(Dataset[dict[str, Any]]):
    """Two files for each sample."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        with np.load(self.folder / f"{i}.npz") as one, np.load(self.folder / f"{i}_text.npz") as other:
            return {"latents": one["latents"], "label": one["label"], "text": other["text"]}


def store(folder: Path, name: str, count: int, make: Any, keys: list[str]) -> stoker.Cache:
    source = stoker.TorchSource(Items(count, make), version=name, keys=keys)
    return stoker.precompute(source, None, folder, name=name, progress=None)


def epoch(loader: Any) -> int:
    """Serve an epoch; return its batches."""
    return sum(1 for _ in loader)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=20_000)
    given = parser.parse_args()
    count = given.samples
    with tempfile.TemporaryDirectory() as made:
        folder, keys = Path(made), [f"image {i}" for i in range(count)]
        texts = [f"text {i}" for i in range(-(-count // SHARED))]
        one = store(folder, "one", count, whole, keys)
        parts = {
            "latents": store(folder, "latents", count, partial(only, "latents"), keys),
            "text": store(folder, "text", len(texts), text, texts),
            "label": store(folder, "label", count, partial(only, "label"), keys),
        }
        caption = {key: texts[i // SHARED] for i, key in enumerate(keys)}
        joined = stoker.zip(**parts, on={"text": caption})
        files = folder / "files"
        files.mkdir()
        for i in range(min(FILES, count)):
            np.savez(files / f"{i}.npz", **sample(i))
            np.savez(files / f"{i}_text.npz", **text(i // SHARED))
        rows = []
        for tier in ("host", "disk"):
            loaders: dict[str, Any] = {
                name: stoker.Loader(cache, BATCH, shuffle=True, tier=tier)
                for name, cache in (("one", one), ("zip", joined))
            }
            for workers in (0, 2):
                loaders[f"files, {workers} workers"] = DataLoader(
                    Files(files, min(FILES, count)),
                    batch_size=BATCH,
                    shuffle=True,
                    num_workers=workers,
                    persistent_workers=workers > 0,
                )
            each = interleaved({name: partial(epoch, loader) for name, loader in loaders.items()}, rounds=3)
            rows.append({"tier": tier, **{f"{name}_s": seconds for name, seconds in each.items()},
                         "zip_to_one": each["zip"] / each["one"],
                         "files_to_zip": min(s for n, s in each.items() if n.startswith("files")) / each["zip"],
                         "bytes_one": sum(s.bytes for s in one.index.shards),
                         "bytes_zip": sum(s.bytes for c in parts.values() for s in c.index.shards)})  # fmt: skip
    publish("join", rows, save=given.save)


if __name__ == "__main__":
    main()
