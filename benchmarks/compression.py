"""Question: what does a compressed cache cost and save on the disk tier?

Contenders are the uncompressed cache, Zarr with Blosc and HDF5 with gzip, in the same run.

The records are latents (float16) and raw fields (float32) of one-dimensional waves, made here, or those of `--file`, a
PDEBench file. Every contender serves shuffled batches of whole records. The others have one record in a chunk, the best
they can have for that, and the codec that made it smallest of those named; HDF5 is read by the workers of a DataLoader,
since it has one lock, Zarr by as many threads as Stoker has. `cold`: the pages of all files are dropped before each turn.
`warm`: they are in memory, so the time is that of decompression. `fill_s` is the time to write.

    python benchmarks/compression.py [--quick] [--save] [--file 1D_Burgers_Sols_Nu0.01.hdf5]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from torch.utils.data import DataLoader, Dataset
from zarr.codecs import BloscCodec

import stoker
from measure import interleaved, publish
from serve_memory import Records
from stoker.encoders.grid import GridEncoder
from stoker.loader.disk import READ_THREADS
from stoker.schema import Field
from stoker.store.compressed import TARGET_BYTES

BATCH = 16
KINDS = ("none", "zstd", "lz4", "auto")


def waves(count: int) -> np.ndarray:
    """Trajectories `(count, 101, 256)`: a few waves that travel and flatten."""
    generator = np.random.default_rng(0)
    x, t = np.linspace(0, 2 * np.pi, 256), np.linspace(0, 1, 101)[:, None]
    out = np.zeros((count, 101, 256), np.float32)
    for number in range(count):
        for mode in range(1, 9):
            a, phase, speed = generator.standard_normal(3)
            out[number] += a / mode * np.exp(-0.05 * mode**2 * t) * np.sin(mode * x + phase + 3 * speed * t)
    return out


def latents(fields: np.ndarray) -> torch.Tensor:
    """`(count, 101, 16, 256)` float16 by the frozen encoder."""
    encoder = GridEncoder(channels=1, grid=(1, 256), patch=(1, 16), tokens=16, dim=256)
    encoder.schema({"data": Field(shape=(101, 1, 256, 1), dtype="float32", time=True)})
    data = torch.from_numpy(fields)[:, :, None, :, None]
    return torch.cat([next(iter(encoder.encode({"data": one}).values())).half() for one in data.split(8)])


def drop(folder: Path) -> None:
    """Have the kernel forget the pages of every file."""
    for path in filter(Path.is_file, folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Stored(Dataset[np.ndarray]):
    """One HDF5 dataset by record, opened in each worker."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.file = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> np.ndarray:
        self.file = self.file or h5py.File(self.path)
        return self.file["data"][number]


def of_stoker(folder: Path, values: torch.Tensor, kind: str) -> Callable[[], int]:
    records = Records({"latent": values}, ("latent",))
    cache = stoker.precompute(records, None, folder, name="x", workers=0, progress=False, compression=kind)
    loader = stoker.Loader(cache, batch_size=BATCH, tier="disk", shuffle=True)
    return lambda: sum(len(batch["latent"]) for batch in loader)


def of_zarr(folder: Path, values: torch.Tensor, shuffle: str) -> Callable[[], int]:
    data = values.numpy()
    codec = BloscCodec(cname="zstd", clevel=3, shuffle=shuffle, blocksize=TARGET_BYTES)
    array = zarr.create_array(
        folder / "x.zarr", shape=data.shape, chunks=(1, *data.shape[1:]), dtype=data.dtype, compressors=codec
    )
    array[:] = data
    pool, generator = ThreadPoolExecutor(READ_THREADS), np.random.default_rng(0)

    def serve() -> int:
        order = generator.permutation(len(data)).tolist()
        for begin in range(0, len(order), BATCH):
            torch.from_numpy(np.stack([*pool.map(array.__getitem__, order[begin : begin + BATCH])]))
        return len(order)

    return serve


def of_hdf5(folder: Path, values: torch.Tensor, codec: dict[str, Any], workers: int) -> Callable[[], int]:
    data = values.numpy()
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(1, *data.shape[1:]), shuffle=True, **codec)
    kept = {"persistent_workers": True} if workers else {}
    loader = DataLoader(Stored(path, len(data)), BATCH, shuffle=True, num_workers=workers, **kept)
    return lambda: sum(len(batch) for batch in loader)


def contenders(values: torch.Tensor, root: Path) -> dict[str, tuple[Path, Callable[[], int], float]]:
    """By name: where it is, one epoch of it, and the seconds that writing took."""
    workers = len(os.sched_getaffinity(0))
    ways: dict[str, Callable[[Path], Callable[[], int]]] = {
        f"stoker {kind}": partial(of_stoker, values=values, kind=kind) for kind in KINDS
    }
    ways |= {
        f"zarr blosc zstd {shuffle}": partial(of_zarr, values=values, shuffle=shuffle)
        for shuffle in ("shuffle", "bitshuffle")
    }
    ways |= {
        "h5py gzip": partial(
            of_hdf5, values=values, codec={"compression": "gzip", "compression_opts": 4}, workers=workers
        ),
        "h5py lzf": partial(of_hdf5, values=values, codec={"compression": "lzf"}, workers=workers),
    }
    made = {}
    for name, make in ways.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir(parents=True)
        begun = time.perf_counter()
        epoch = make(folder)
        made[name] = (folder, epoch, time.perf_counter() - begun)
    return made


def cold(folder: Path, epoch: Callable[[], int]) -> int:
    drop(folder)
    return epoch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few records: shows that it works")
    parser.add_argument("--file", type=Path, help="a PDEBench file with `tensor` (N, 101, 256)")
    arguments = parser.parse_args()

    count, rounds = (32, 1) if arguments.quick else (512, 5)
    fields = h5py.File(arguments.file)["tensor"][:count] if arguments.file else waves(count)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root:
        for name, values in (("latents", latents(fields)), ("raw fields", torch.from_numpy(fields))):
            made = contenders(values, Path(root) / name.replace(" ", "-"))
            warm = {which: epoch for which, (_, epoch, _) in made.items()}
            dropped = {which: partial(cold, folder, epoch) for which, (folder, epoch, _) in made.items()}
            cold_s, warm_s = interleaved(dropped, rounds=rounds), interleaved(warm, rounds=rounds)
            plain = size_of(made["stoker none"][0])
            rows += [
                {
                    "set": name,
                    "contender": which,
                    "size_ratio": round(size_of(folder) / plain, 3),
                    "fill_s": round(fill_s, 2),
                    "cold_us_per_record": round(1e6 * cold_s[which], 1),
                    "warm_us_per_record": round(1e6 * warm_s[which], 1),
                }
                for which, (folder, _, fill_s) in made.items()
            ]
    publish("compression", rows, save=arguments.save)


if __name__ == "__main__":
    main()
