"""Question: what does it cost to read 512 random rows of large bags, beside reading them entirely?

Bags of 20,000 rows of 1,536 float16 values (59 MiB), batches of 8 bags, shuffled, other rows in every epoch. Stoker with
`choose={"features": Rows(512)}` from disk and from host memory; entire bags by Stoker, of which the loop then takes the
rows; and loaders of a few lines as one writes them by hand: an HDF5 file per bag read with a list of rows or entirely
(h5py), and an `.npy` per bag by `np.memmap`. Those verify nothing; Stoker compares every block that it reads with its
checksum. From disk each turn begins with a cold page cache, unless `--warm` is given. `mb_per_s` counts the bytes of chosen
rows alone; `of_entire` compares with entire bags by Stoker on the same tier.

    python benchmarks/choose.py [--save] [--bags 16] [--rows 20000] [--rounds 3] [--warm]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import stoker
from measure import interleaved, publish
from stoker.plan.rates import drop_from_page_cache

WIDTH, TAKEN, BATCH = 1536, 512, 8


class Bags(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random bags; the same for the same number."""

    def __init__(self, count: int, rows: int) -> None:
        self.count, self.rows = count, rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        # Bits of any kind below the exponents of infinities: quicker to draw than normal numbers.
        bits = torch.randint(0, 0x7BFF, (self.rows, WIDTH), generator=generator, dtype=torch.int16)
        return {"features": bits.view(torch.float16)}


def of_stoker(loader: stoker.Loader, files: list[Path]) -> int:
    """One epoch; returns its batches."""
    drop_from_page_cache(files)
    return sum(1 for _ in loader)


def rows_of_entire(loader: stoker.Loader, files: list[Path]) -> int:
    """The same rows of bags that are read entirely."""
    drop_from_page_cache(files)
    batches = 0
    for batch in loader:
        torch.stack([bag[torch.randperm(len(bag))[:TAKEN].sort().values] for bag in batch["features"]])
        batches += 1
    return batches


def by_hand(files: list[Path], read: Callable[[Path, np.random.Generator], Any], *, cold: bool) -> int:
    """One epoch of a loop that reads bag by bag."""
    drop_from_page_cache(files if cold else [])
    generator = np.random.default_rng()
    batches = 0
    for own in np.split(generator.permutation(len(files)), range(BATCH, len(files), BATCH)):
        torch.from_numpy(np.stack([read(files[number], generator) for number in own]))
        batches += 1
    return batches


def some_rows(rows: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.sort(generator.choice(rows, TAKEN, replace=False))


def h5py_rows(path: Path, generator: np.random.Generator) -> Any:
    with h5py.File(path) as file:
        features: Any = file["features"]
        return features[some_rows(len(features), generator)]


def h5py_entire(path: Path, generator: np.random.Generator) -> Any:
    with h5py.File(path) as file:
        features: Any = file["features"]
        return features[:][some_rows(len(features), generator)]


def memmap_rows(path: Path, generator: np.random.Generator) -> Any:
    features = np.load(path, mmap_mode="r")
    return features[some_rows(len(features), generator)]


def written(folder: Path, bags: Bags) -> Iterator[tuple[Path, Path]]:
    """The bags as HDF5, in chunks of 256 rows, and as `.npy`."""
    for number in range(len(bags)):
        values = bags[number]["features"].numpy()
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("features", data=values, chunks=(min(256, len(values)), WIDTH))
        np.save(folder / f"{number}.npy", values)
        yield folder / f"{number}.h5", folder / f"{number}.npy"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--bags", type=int, default=16)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    taken = {"features": stoker.Rows(TAKEN)}
    bags, cold = Bags(arguments.bags, arguments.rows), not arguments.warm
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        h5, npy = (list(files) for files in zip(*written(folder, bags), strict=True))
        cache = stoker.precompute(stoker.TorchSource(bags, version="1"), None, folder / "caches", name="bags")
        shards = [cache.path / shard.file for shard in cache.index.shards] if cold else []
        rows: list[dict[str, Any]] = []
        for tier, others in (
            (
                "disk",
                {
                    "h5py, rows": partial(by_hand, h5, h5py_rows, cold=cold),
                    "h5py, entire": partial(by_hand, h5, h5py_entire, cold=cold),
                    "np.memmap, rows": partial(by_hand, npy, memmap_rows, cold=cold),
                },
            ),
            ("host", {}),
        ):
            files = shards if tier == "disk" else []
            chosen = stoker.Loader(cache, BATCH, shuffle=True, tier=tier, choose=taken)
            entire = stoker.Loader(cache, BATCH, shuffle=True, tier=tier)
            best = interleaved(
                {
                    "stoker, Rows": partial(of_stoker, chosen, files),
                    "stoker, entire": partial(rows_of_entire, entire, files),
                    **others,
                },
                rounds=arguments.rounds,
            )
            for contender, batch_s in best.items():
                size = min(BATCH, arguments.bags) * min(TAKEN, arguments.rows) * WIDTH * 2
                rows.append(
                    {
                        "tier": f"{tier}, cold" if files else tier,
                        "contender": contender,
                        "bag_rows": arguments.rows,
                        "ms_per_batch": round(batch_s * 1e3, 2),
                        "mb_per_s": round(size / batch_s / 1e6, 1),
                        "of_entire": round(best["stoker, entire"] / batch_s, 2),
                    }
                )
            chosen.close()
            entire.close()
    publish("choose", rows, save=arguments.save)


if __name__ == "__main__":
    main()
