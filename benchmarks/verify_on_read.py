"""Question: what does it cost to compare what the disk tier reads with its checksums?

A cache is served from the disk tier with each policy of `Loader(verify=...)`, in turns; `off` is the limit that the
others are divided by. First cold, its pages dropped before each epoch: that is what the tier is for. Then in the page
cache, where reads cost least and the share of checking is largest: whole records and single-step windows, and
the same reads by one thread without a loader, to see the checks alone.

    python benchmarks/verify_on_read.py [--save]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import interleaved, publish
from serve_memory import Records, cache_of

POLICIES = ("off", "first", "always")
SHAPES = {"8 KiB": (8, 16, 32), "103 KiB": (101, 16, 32), "1 MiB": (32, 128, 128)}
CACHE_BYTES = 256 << 20
COLD_ROUNDS = 11
"""A shared drive gives another rate each time: best of so many."""


def served(loader: stoker.Loader) -> int:
    """One epoch; batches."""
    return sum(1 for _ in loader)


def served_cold(cache: stoker.Cache, loader: stoker.Loader) -> int:
    """The same, from the disk: what the page cache has of the shards is dropped first."""
    for shard in cache.index.shards:
        fd = os.open(cache.path / shard.file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return served(loader)


def read_alone(cache: stoker.Cache, verify: Any) -> int:
    """Every record once, by this thread, into one buffer; records."""
    rows = 0
    for number in range(len(cache.index.shards)):
        shard = cache.shard(number)
        length = shard.length("latent", 0)
        out = memoryview(bytearray(shard.columns["latent"].row_bytes))
        for row in range(shard.rows):
            shard.read_into("latent", row, 0, length, out, verify=verify)
        rows += shard.rows
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name, shape in SHAPES.items():
            size_bytes = 2 * torch.Size(shape).numel()
            generator = torch.Generator().manual_seed(0)
            latent = torch.randn((CACHE_BYTES // size_bytes, *shape), generator=generator).half()
            cache = cache_of(
                Records({"latent": latent}, ("latent",)), Path(folder) / name.replace(" ", ""), shards=4
            )
            ways: dict[str, dict[str, Any]] = {
                "cold records": {},
                "records": {},
                "windows": {"windows": stoker.Windows()},
            }
            for way, settings in ways.items():
                contenders: dict[str, Callable[[], int]] = {}
                for verify in POLICIES:
                    # A handle of its own, so that no policy profits from what another has checked.
                    own = stoker.open_cache(cache.path)
                    kept = range(len(own)) if way != "windows" else range(0, len(own), max(1, shape[0] // 2))
                    loader = stoker.Loader(
                        own,
                        batch_size=32,
                        tier="disk",
                        indices=kept,
                        verify=verify,
                        drop_last=True,
                        **{"shuffle": True, **settings},
                    )
                    once = (
                        partial(served, loader)
                        if way != "cold records"
                        else partial(served_cold, own, loader)
                    )
                    contenders[verify] = once
                rounds = COLD_ROUNDS if way == "cold records" else 5
                rows.append(row(f"{way} of {name}", interleaved(contenders, rounds=rounds)))
            alone = {
                verify: partial(read_alone, stoker.open_cache(cache.path), verify) for verify in POLICIES
            }
            rows.append(row(f"{name} by one thread, no loader", interleaved(alone)))
    publish("verify_on_read", rows, save=arguments.save)


def row(name: str, seconds: dict[str, float]) -> dict[str, Any]:
    """One line: microseconds per batch or record, and each policy over `off`."""
    return {
        "case": name,
        **{f"{policy}_us": round(1e6 * value, 1) for policy, value in seconds.items()},
        **{f"{policy}_ratio": round(seconds[policy] / seconds["off"], 3) for policy in ("first", "always")},
    }


if __name__ == "__main__":
    main()
