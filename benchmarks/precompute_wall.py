"""Question: does precompute run at the encoder's own speed, and how much faster is it than the one-by-one loop?

Data: Burgers-like trajectories (201, 1024) float32 in PDEBench's layout, once contiguous and once with gzip and h5py's
default chunks. `encoder` is the encoder's own time on resident data in the same groups and threads; `loop` is what the earlier system
did: read one sample, encode it alone, save one `.pt` file. `floor` for gzip is (encoder + reading) / cores.

    python benchmarks/precompute_wall.py [--save] [--samples 2000] [--gzip-samples 500]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import stoker
from measure import publish

TIME, SPACE = 201, 1024

PRECOMPUTE = """
import json, sys, time
begin = time.perf_counter()
import stoker
from stoker.precompute import PrecomputeSettings, run_precompute
source = stoker.HDF5Source(sys.argv[1], preset="pdebench")
encoder = stoker.GridEncoder(channels=1, grid=(1, 1024), patch=(1, 4), tokens=int(sys.argv[4]), dim=int(sys.argv[5]), seed=0)
imported = time.perf_counter()
readers = None if sys.argv[3] == "auto" else int(sys.argv[3])
report = run_precompute(source, encoder, sys.argv[2], name="bench", settings=PrecomputeSettings(dtype="float16", readers=readers))
print(json.dumps({"wall_s": time.perf_counter() - imported, "import_s": imported - begin, "encode_s": report.encode_seconds, "records": report.records}))
"""


def write(path: Path, count: int, compression: str | None) -> None:
    """Smooth random trajectories, written in slabs."""
    generator = np.random.default_rng(0)
    x = np.linspace(0, 2 * np.pi, SPACE, endpoint=False, dtype=np.float32)
    t = np.linspace(0, 1, TIME, dtype=np.float32)
    with h5py.File(path, "w") as file:
        tensor = file.create_dataset("tensor", (count, TIME, SPACE), "f4", compression=compression)
        file["x-coordinate"], file["t-coordinate"] = x, np.append(t, 2.0).astype(np.float32)
        file.attrs["Nu"] = 0.01
        for first in range(0, count, 50):
            phase = generator.uniform(0, 6.28, (min(50, count - first), 1, 1)).astype(np.float32)
            tensor[first : first + len(phase)] = np.sin(3 * x + phase + 5 * t[:, None]) + 0.3 * np.cos(
                7 * x - t[:, None] * phase
            )


def encoder(tokens: int, dim: int) -> stoker.GridEncoder:
    return stoker.GridEncoder(channels=1, grid=(1, SPACE), patch=(1, 4), tokens=tokens, dim=dim, seed=0)


def own_time(path: Path, count: int, tokens: int, dim: int) -> float:
    """The encoder alone: the same groups, data in memory."""
    encode = encoder(tokens, dim)
    source = stoker.HDF5Source(path, preset="pdebench")
    size = encode.group(source.schema()).samples
    samples = torch.stack([torch.from_numpy(source.read(number)["data"]) for number in range(size)])
    extra = {name: torch.zeros(size) for name in source.schema() if name != "data"}
    from stoker.precompute.encode import tune_allocator

    tune_allocator()
    with torch.inference_mode():
        encode.encode({"data": samples, **extra})
        begin = time.perf_counter()
        for _ in range(-(-count // size)):
            encode.encode({"data": samples, **extra})
        return time.perf_counter() - begin


def earlier_loop(path: Path, folder: Path, count: int, tokens: int, dim: int) -> float:
    """One sample at a time: read, encode alone, one pickle each."""
    encode = encoder(tokens, dim)
    folder.mkdir()
    begin = time.perf_counter()
    with h5py.File(path) as file, torch.inference_mode():
        for number in range(count):
            data = torch.from_numpy(file["tensor"][number]).view(1, TIME, 1, SPACE, 1)
            latent = encode.encode({"data": data})["latent"][0].half()
            torch.save({"latent": latent}, folder / f"sample_{number:05d}.pt")
    os.sync()
    return time.perf_counter() - begin


def read_time(path: Path) -> float:
    """Reading and decompressing everything once, in the order in which it is stored."""
    source = stoker.HDF5Source(path, preset="pdebench")
    begin = time.perf_counter()
    for run in source.runs():
        for number in run:
            source.read(number)
    return time.perf_counter() - begin


def measure(kind: str, path: Path, count: int, folder: Path, tokens: int, dim: int) -> list[dict[str, Any]]:
    reading = read_time(path)  # also warms the page cache, for all alike
    own, walls, loops = [], {}, []
    for turn in range(3):
        own.append(own_time(path, count, tokens, dim))
        for readers in ("auto", "1", "2"):
            target = folder / f"cache-{kind}-{readers}-{turn}"
            out = subprocess.run(
                [sys.executable, "-c", PRECOMPUTE, str(path), str(target), readers, str(tokens), str(dim)],
                capture_output=True, text=True, timeout=1800,
            )  # fmt: skip
            if out.returncode:
                raise SystemExit(out.stderr)
            result = json.loads(out.stdout.splitlines()[-1])
            walls.setdefault(readers, []).append(result["wall_s"])
            shutil.rmtree(target)
        if turn == 0:
            loops.append(earlier_loop(path, folder / f"loop-{kind}", count, tokens, dim))
            shutil.rmtree(folder / f"loop-{kind}")
    cores = len(os.sched_getaffinity(0))
    best = min(own)
    floor = best if kind == "contiguous" else max(best, (best + reading) / cores)
    return [
        {
            "layout": kind, "samples": count, "latent": [tokens, dim], "readers": readers,
            "encoder_s": round(best, 2), "reading_s": round(reading, 2), "wall_s": round(min(taken), 2), "loop_s": round(min(loops), 2),
            "wall_over_encoder": round(min(taken) / best, 3), "floor_over_wall": round(floor / min(taken), 3),
            "times_faster_than_loop": round(min(loops) / min(taken), 2),
        }
        for readers, taken in walls.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--gzip-samples", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        for kind, count, compression in (
            ("contiguous", arguments.samples, None),
            ("gzip", arguments.gzip_samples, "gzip"),
        ):
            path = folder / f"{kind}.h5"
            write(path, count, compression)
            rows += measure(kind, path, count, folder, arguments.tokens, arguments.dim)
            path.unlink()
    publish("precompute_wall", rows, save=arguments.save)


if __name__ == "__main__":
    main()
