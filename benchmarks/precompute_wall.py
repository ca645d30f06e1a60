"""Question: does precompute run at the encoder's own speed, and how much faster is it than the one-by-one loop?

Data: smooth trajectories (201, 1024) float32 in PDEBench's layout, once contiguous and once with gzip and h5py's
default chunks. Everything that is timed runs in a process of its own with the same number of torch threads:

- `encoder_s`: the encoder alone, groups of the recipe's size taken in turn from four in memory, memory kept
  between calls as precompute keeps it. Measured before and after, the smaller counts.
- `wall_s`: the whole call of precompute, imports left out, page cache warm. `digest_s` of it is the sha256 of
  the source file, which only the first run on a file pays; `start_s` is the time to the first encoder call without it.
- `loop_s`: what the earlier system did: read one sample, encode it alone, save one `.pt` file; from 200
  samples, and without waiting for the disk, which precompute does.
- `workers_s`: the same loop behind a DataLoader with a worker for each core, which reads ahead: what people write next.
- `floor_s`: for gzip (encoder + reading) / cores, in core seconds, or the encoder if that is longer.
- `others_s`: CPU seconds that other processes used during the timed run (kernel threads included): where this is
  not small beside `wall_s`, the row says little.
- `bytes_read_over_stored`: bytes that all workers together read from the file, over the data's size in it.

    python benchmarks/precompute_wall.py [--save] [--quick] [--samples 3000] [--gzip-samples 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

import stoker
from counted_source import CountedSource, total_read
from measure import publish

TIME, SPACE = 201, 1024
LOOP_SAMPLES = 200


def write(path: Path, count: int, compression: str | None) -> None:
    """Smooth random trajectories, written in slabs."""
    generator = np.random.default_rng(0)
    x = np.linspace(0, 2 * np.pi, SPACE, endpoint=False, dtype=np.float32)
    t = np.linspace(0, 1, TIME, dtype=np.float32)
    with h5py.File(path, "w") as file:
        tensor = file.create_dataset("tensor", (count, TIME, SPACE), "f4", compression=compression)
        file["x-coordinate"], file["t-coordinate"] = x, np.append(t, 2.0).astype(np.float32)
        file.attrs["Nu"] = 0.01
        slab = tensor.chunks[0] if tensor.chunks else 50  # whole rows of chunks, or each is packed many times
        base = np.sin(3 * x + 5 * t[:, None])
        for first in range(0, count, slab):
            phase = generator.uniform(0.5, 2, (min(slab, count - first), 1, 1)).astype(np.float32)
            tensor[first : first + len(phase)] = base * phase + phase
    with path.open("rb+") as file:
        os.fsync(file.fileno())


class PatchMlp(nn.Module):
    """A nonlinear patch encoder: 16 tokens of 64 points through a small MLP, about 10 ms a sample on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 32))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.net(data.view(*data.shape[:2], 16, 64))


def make_encoder(kind: str) -> Any:
    """`mlp` is bound by arithmetic; `grid` (one linear map, 0.3 ms a sample) is cheaper than reading its input."""
    if kind == "grid":
        return stoker.GridEncoder(channels=1, grid=(1, SPACE), patch=(1, 4), tokens=16, dim=32, seed=0)
    torch.manual_seed(0)
    return stoker.ModuleEncoder(PatchMlp(), field="data", output="latent", time="whole", version="1")


def run_encoder(path: str, kind: str, count: str) -> dict[str, float]:
    """Seconds a sample of the encoder alone."""
    from stoker.runtime.libc import keep_freed_memory

    encoder = make_encoder(kind)
    source = stoker.HDF5Source(path, preset="pdebench")
    size = encoder.encode_batch_size(source.schema()).samples
    extra = {name: torch.zeros(size) for name in source.schema() if name != "data"}
    batches = [
        {
            "data": torch.stack([torch.from_numpy(source.read(n)["data"]) for n in range(at, at + size)]),
            **extra,
        }
        for at in range(0, 4 * size, size)
    ]
    keep_freed_memory()
    calls = -(-int(count) // size)
    with torch.inference_mode():
        for batch in batches:
            encoder.encode(batch)
        begin = time.perf_counter()
        for call in range(calls):
            encoder.encode(batches[call % 4])
    return {"sample_s": (time.perf_counter() - begin) / (calls * size)}


class FirstCall:
    """Passes everything on to an encoder, and notes in a file when it was first given a whole group.

    In a file, since the call is made in a child; the clock is the same for all processes.
    """

    def __init__(self, inner: Any, mark: Path) -> None:
        self._inner, self._mark = inner, mark

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def encode(self, batch: dict[str, torch.Tensor], /) -> dict[str, torch.Tensor]:
        if len(batch["data"]) > 1 and not self._mark.exists():  # not the probe with one sample of zeros
            self._mark.write_text(str(time.perf_counter()))
        return self._inner.encode(batch)


def run_precompute(path: str, kind: str, target: str, workers: str) -> dict[str, float]:
    """One whole call, with what it spent before the first call of the encoder."""
    from stoker.precompute import PrecomputeSettings, engine
    from stoker.store import recipe

    marks: dict[str, float] = {}
    mark = Path(f"{target}.first")
    mark.unlink(missing_ok=True)
    digest, encoder = recipe._digest, FirstCall(make_encoder(kind), mark)

    def timed_digest(*args: Any, **kwargs: Any) -> str:
        begin = time.perf_counter()
        found = digest(*args, **kwargs)
        marks["digest_s"] = time.perf_counter() - begin
        return found

    recipe._digest = timed_digest
    source = CountedSource(path, preset="pdebench")
    source.log = target + ".log"
    encoder.encode_batch_size(source.schema())
    settings = PrecomputeSettings(
        dtype="float16", workers=None if workers == "auto" else int(workers), progress=None
    )
    begin = time.perf_counter()
    report = engine.run_precompute(source, encoder, target, name="bench", settings=settings)
    wall = time.perf_counter() - begin
    digest_s = marks.get("digest_s", 0.0)
    return {
        "wall_s": wall, "digest_s": digest_s, "start_s": float(mark.read_text()) - begin - digest_s,
        "in_encoder_s": report.encode_seconds, "workers_at_end": report.workers, "records": report.records,
    }  # fmt: skip


def run_loop(path: str, kind: str, folder: str) -> dict[str, float]:
    """The earlier system: one sample at a time, encoded alone, one pickle each."""
    encoder = make_encoder(kind)
    Path(folder).mkdir()
    count = LOOP_SAMPLES
    begin = time.perf_counter()
    with h5py.File(path) as file, torch.inference_mode():
        for number in range(count):
            data = torch.from_numpy(file["tensor"][number % len(file["tensor"])]).view(1, TIME, 1, SPACE, 1)
            latent = encoder.encode({"data": data})["latent"][0].half()
            torch.save({"latent": latent}, Path(folder) / f"sample_{number:05d}.pt")
    return {"sample_s": (time.perf_counter() - begin) / count}


class RawRows(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of a file, opened by each worker for itself."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count = path, count
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        self.file = self.file or h5py.File(self.path)
        return torch.from_numpy(self.file["tensor"][number % len(self.file["tensor"])])


def run_workers(path: str, kind: str, folder: str) -> dict[str, float]:
    """A DataLoader whose workers read ahead, samples encoded alone, one pickle each; its start is not counted."""
    encoder = make_encoder(kind)
    Path(folder).mkdir()
    workers = len(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader(
        RawRows(path, LOOP_SAMPLES + 1), batch_size=None, num_workers=workers
    )
    begin = 0.0
    with torch.inference_mode():
        for number, data in enumerate(loader):
            begin = begin or time.perf_counter()
            latent = encoder.encode({"data": data.view(1, TIME, 1, SPACE, 1)})["latent"][0].half()
            torch.save({"latent": latent}, Path(folder) / f"sample_{number:05d}.pt")
    return {"sample_s": (time.perf_counter() - begin) / LOOP_SAMPLES}


def run_read(path: str) -> dict[str, float]:
    """Reading and decompressing everything once, in the order in which it is stored."""
    source = stoker.HDF5Source(path, preset="pdebench")
    source.schema()
    begin = time.perf_counter()
    for number in range(len(source)):
        source.read(number)
    return {"reading_s": time.perf_counter() - begin}


MODES = {
    "encoder": run_encoder, "precompute": run_precompute, "loop": run_loop, "workers": run_workers, "read": run_read,
}  # fmt: skip


def alone(mode: str, threads: int, *arguments: object) -> dict[str, float]:
    """Run one of `MODES` in a fresh process with so many torch threads; adds what other processes used meanwhile."""
    busy, used = busy_s(), resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(
        [sys.executable, __file__, "--mode", mode, *map(str, arguments)],
        capture_output=True, text=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    if out.returncode:
        raise SystemExit(out.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {**json.loads(out.stdout.splitlines()[-1]), "others_s": max(0.0, busy_s() - busy - own)}


def busy_s() -> float:
    """CPU time of the whole machine so far, without idling and waiting for disks."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def measure(
    layout: str, path: Path, count: int, folder: Path, kind: str, threads: int, turns: int
) -> list[dict[str, Any]]:
    """Rows for one file and encoder."""
    with h5py.File(path) as file:
        stored = file["tensor"].id.get_storage_size()
    reading = alone("read", 1, path)["reading_s"]  # also warms the page cache, for all alike
    probe = max(40, count // 3)
    own = [alone("encoder", threads, path, kind, probe)["sample_s"]]
    taken: dict[str, list[dict[str, float]]] = {}
    for _ in range(turns):
        for asked in ("auto",) if layout == "contiguous" else ("auto", "1", "2"):
            target = folder / "cache"
            result = alone("precompute", threads, path, kind, target, asked)
            assert result["records"] == count
            log = Path(f"{target}.log")
            result["bytes_read_over_stored"] = total_read(log) / stored
            log.unlink(missing_ok=True)
            taken.setdefault(asked, []).append(result)
            shutil.rmtree(target)
        own.append(alone("encoder", threads, path, kind, probe)["sample_s"])
    loop = alone("loop", threads, path, kind, folder / "loop")["sample_s"] * count
    shutil.rmtree(folder / "loop")
    workers = alone("workers", threads, path, kind, folder / "workers")["sample_s"] * count
    shutil.rmtree(folder / "workers")
    cores = len(os.sched_getaffinity(0))
    encoder = min(own) * count
    floor = (
        encoder if layout == "contiguous" else max(encoder, (encoder * min(threads, cores) + reading) / cores)
    )
    rows: list[dict[str, Any]] = []
    for asked, results in taken.items():
        best = min(results, key=lambda result: result["wall_s"])
        wall = best["wall_s"]
        rows.append(
            {
                "layout": layout, "encoder": kind, "threads": threads, "samples": count, "workers": asked,
                "encoder_s": round(encoder, 2), "reading_s": round(reading, 2), "floor_s": round(floor, 2),
                "wall_s": round(wall, 2), "loop_s": round(loop, 2), "workers_s": round(workers, 2),
                "times_faster_than_workers": round(workers / wall, 2),
                "wall_over_encoder": round(wall / encoder, 3),
                "without_digest": round((wall - best["digest_s"]) / encoder, 3),
                "floor_over_wall": round(floor / wall, 3), "times_faster_than_loop": round(loop / wall, 2),
                **{name: round(best[name], 3) for name in ("digest_s", "start_s", "in_encoder_s", "bytes_read_over_stored", "others_s")},
                "workers_at_end": best["workers_at_end"],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--gzip-samples", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--layouts", nargs="*", default=["contiguous", "gzip"])
    parser.add_argument("--encoders", nargs="*", default=["mlp", "grid"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument(
        "--folder", type=Path, help="where files are made, on the disk in question; default: TMPDIR"
    )
    parser.add_argument("--data", type=Path, help="keep the files here and use those that are there")
    parser.add_argument("--mode", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        mode, *rest = arguments.mode
        print(json.dumps(MODES[mode](*rest)))
        return
    if arguments.quick:
        arguments.samples = arguments.gzip_samples = 60
        arguments.threads, arguments.save = [1], False
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that gigabytes do not stay behind
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = arguments.data or Path(name)
        for layout in arguments.layouts:
            count = arguments.samples if layout == "contiguous" else arguments.gzip_samples
            path = folder / f"{layout}-{count}.h5"
            if not path.exists():
                write(path, count, None if layout == "contiguous" else "gzip")
            for encoder in arguments.encoders:
                for threads in arguments.threads:
                    rows += measure(layout, path, count, Path(name), encoder, threads, arguments.turns)
    publish("precompute_wall", rows, save=arguments.save)


if __name__ == "__main__":
    main()
