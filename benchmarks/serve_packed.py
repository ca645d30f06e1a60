"""Question: what do packed records (int8, float8, a scale for each block) cost and save beside float16?

800 records of float32 latents (101, 4, 128), 202 KiB each, stored as float16 (served as float16, and converted to float32
as packed ones are) and packed. From host memory and from disk past the page cache, shuffled batches, each turn a pass,
in turns. `record_bytes` are those stored; `of_float16` compares with float16 converted to float32: the same batches, but for
rounding.

    python benchmarks/serve_packed.py [--save]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import interleaved, publish
from serve_memory import Records, cache_of, drain
from stoker.plan.rates import drop_from_page_cache

COUNT, SHAPE, BATCH, ROUNDS = 800, (101, 4, 128), 32, 5
BATCHES = COUNT // BATCH


def served(loader: stoker.Loader, files: list[Path]) -> int:
    """One epoch; from disk, of a cold one."""
    if files:
        drop_from_page_cache(files)
    return drain(itertools.islice(iter(loader), BATCHES))


def contenders(caches: dict[str, stoker.Cache], tier: str) -> dict[str, Callable[[], int]]:
    """Stored dtypes from one tier; float16 also as it is stored."""
    found: dict[str, Callable[[], int]] = {}
    for name, cache in caches.items():
        files = [cache.path / shard.file for shard in cache.index.shards] if tier == "disk" else []
        wanted = {name: "float32"} if name != "float16" else {name: "float32", "float16, as stored": None}
        for label, dtype in wanted.items():
            loader = stoker.Loader(cache, BATCH, drop_last=True, tier=tier, dtype=dtype, shuffle=True)
            found[label] = partial(served, loader, files)
    return found


def worst(cache: stoker.Cache, latent: torch.Tensor) -> float:
    """The largest error of a value, as a part of its record's largest value; over 20 records."""
    found = 0.0
    for number in range(0, COUNT, COUNT // 20):
        error = (cache[number]["latent"].float() - latent[number]).abs().max() / latent[number].abs().max()
        found = max(found, float(error))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        latent = torch.randn(COUNT, *SHAPE, generator=torch.Generator().manual_seed(0))
        source = Records({"latent": latent}, time=("latent",))
        caches = {
            dtype: cache_of(source, Path(folder), 4, dtype) for dtype in ("float16", "int8", "float8_e4m3fn")
        }
        errors = {name: worst(cache, latent) for name, cache in caches.items()}
        del latent, source
        for tier in ("host", "disk"):
            best = interleaved(contenders(caches, tier), rounds=ROUNDS)
            for name, batch_s in best.items():
                stored = name.split(",")[0]
                columns = caches[stored].recipe.columns.values()
                rows.append(
                    {
                        "tier": "disk, cold" if tier == "disk" else tier,
                        "stored": name,
                        "record_bytes": sum(field.size_bytes() for field in columns),
                        "worst_error": round(errors[stored], 5),
                        "us_per_batch": round(batch_s * 1e6, 1),
                        "records_per_s": round(BATCH / batch_s),
                        "of_float16": round(best["float16"] / batch_s, 3),
                    }
                )
    publish("serve_packed", rows, save=arguments.save)


if __name__ == "__main__":
    main()
