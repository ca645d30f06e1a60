"""Question: what does serving files from where they lie cost beside a cache that holds their bytes?

Contiguous HDF5 of 256 MiB is indexed in place and, in turns, stored by precompute without an encoder: seconds, and
bytes on the disk. Then both caches are served, in turns, from the disk tier (in the page cache) as whole records
and as windows, and from the host tier; a plain loop over h5py with the same batches is the limit that a user has today.

    python benchmarks/in_place.py [--save]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import stoker
from measure import interleaved, publish

COUNT, STEPS, POINTS, BATCH = 640, 101, 1024, 16


def stored_bytes(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def served(loader: stoker.Loader) -> int:
    """One epoch; batches."""
    return sum(1 for _ in loader)


def read_plainly(path: Path) -> int:
    """The same records by h5py, shuffled, one call each; batches."""
    order = np.random.default_rng(0).permutation(COUNT)
    with h5py.File(path) as file:
        data = file["tensor"]
        for begin in range(0, COUNT, BATCH):
            torch.stack([torch.from_numpy(data[int(n)]) for n in order[begin : begin + BATCH]])
    return COUNT // BATCH


def made(how: Any, folder: Path) -> int:
    """Make a cache from nothing; one."""
    shutil.rmtree(folder, ignore_errors=True)
    how(folder)
    return 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        path = folder / "a.h5"
        with h5py.File(path, "w") as file:
            values = np.random.default_rng(0).standard_normal((COUNT, STEPS, POINTS), dtype=np.float32)
            file["t-coordinate"], file["x-coordinate"] = np.arange(STEPS + 1.0), np.arange(float(POINTS))
            file["tensor"] = values
            del values
        source = stoker.HDF5Source(path)
        ways = {
            "in place": lambda where: stoker.index_in_place(source, where, name="a"),
            "stored": lambda where: stoker.precompute(source, None, where, name="a", workers=0),
        }
        making = interleaved({k: partial(made, how, folder / k) for k, how in ways.items()}, rounds=3)
        caches = {k: stoker.open_cache(folder / k / "a") for k in ways}
        bytes_on_disk = {k: stored_bytes(cache.path) for k, cache in caches.items()}
        rows.append(
            {
                "case": "making",
                **{f"{k}_s": round(v, 3) for k, v in making.items()},
                **{f"{k}_bytes": size for k, size in bytes_on_disk.items()},
            }
        )
        windows = {"windows": stoker.Windows(stride=4, horizon=2, start_every=20)}
        for case, settings in {
            "disk records": {"tier": "disk"},
            "disk windows": {"tier": "disk", **windows},
            "host records": {"tier": "host"},
        }.items():
            loaders = {
                k: stoker.Loader(cache, BATCH, drop_last=True, **{"shuffle": True, **settings})
                for k, cache in caches.items()
            }
            contenders: dict[str, Any] = {k: partial(served, loader) for k, loader in loaders.items()}
            if case == "disk records":
                contenders["h5py"] = partial(read_plainly, path)
            best = interleaved(contenders)
            rows.append(
                {
                    "case": case,
                    **{f"{k}_ms": round(1e3 * v, 3) for k, v in best.items()},
                    **{f"{k}_ratio": round(v / best["stored"], 3) for k, v in best.items() if k != "stored"},
                }
            )
    publish("in_place", rows, save=arguments.save)


if __name__ == "__main__":
    main()
