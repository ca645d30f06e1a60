"""Question: how much memory do several training processes on one host take, all together?

`processes` processes serve one epoch of the same set in shuffled batches, and are measured while all of them still hold
what they serve from. `stoker`: `Loader(cache, tier="host")`, one copy for the host. `own copy`: each reads the whole set
into its own tensors, the earlier "RAM preload", and serves it through a DataLoader without workers. `own copy, workers`: the same with two
DataLoader workers a process.

- `pss_mib`: proportional set size over all processes and their children. A page that `n` of them share counts 1/n in each, so
  the sum is the memory that they take. `rss_mib` counts it n times; `peak_rss_mib` sums the peaks of the processes.
- `over_set`: what it took beyond `torch` being imported in each, over the bytes of the set. One copy is 1.

    python benchmarks/memory.py [--save] [--quick] [--records 131072] [--processes 1 2 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from measure import publish
from serve_memory import Records, cache_of

SHAPE = (16, 128)
"""Of a float16 record: 4 KiB."""
BATCH = 256
TIMEOUT_S = 240

CHILD = """
import os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
way, path, mark, batch = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
import stoker
kept, seen = None, 0
if way == "stoker":
    kept = stoker.Loader(stoker.open_cache(path), batch_size=batch, shuffle=True, tier="host")
    for one in kept:
        seen += len(one["latent"])
elif way.startswith("own copy"):
    cache = stoker.open_cache(path)
    tensors = torch.empty(len(cache), *cache.schema["latent"].shape, dtype=torch.float16)
    for number in range(len(cache)):
        tensors[number] = cache[number]["latent"]
    dataset = torch.utils.data.TensorDataset(tensors)
    workers = 2 if way.endswith("workers") else 0
    kept = torch.utils.data.DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=workers,
                                       persistent_workers=bool(workers))
    for (one,) in kept:
        seen += len(one)
mark.write_text(str(seen))
until = time.monotonic() + 240
while not (mark.parent / "end").exists() and time.monotonic() < until:
    time.sleep(0.02)
os._exit(0)
"""


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of one process: `pss`, `rss`, `peak`."""
    sizes = {"pss": 0, "rss": 0, "peak": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        if name in ("Pss:", "Rss:"):
            sizes[name.rstrip(":").lower()] = int(size) * 1024
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            sizes["peak"] = int(line.split()[1]) * 1024
    return sizes


def measured(way: str, path: Path, processes: int, records: int) -> dict[str, int]:
    """Bytes over all processes that serve in one way, while all of them are alive."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        marks = [Path(name) / str(rank) for rank in range(processes)]
        started = [
            subprocess.Popen([sys.executable, "-c", CHILD, way, str(path), str(mark), str(BATCH)]) for mark in marks
        ]  # fmt: skip
        try:
            until = time.monotonic() + TIMEOUT_S
            while not all(mark.exists() and mark.read_text() for mark in marks):
                if time.monotonic() > until or any(process.poll() is not None for process in started):
                    raise SystemExit(f"{way} with {processes} processes did not serve the set")
                time.sleep(0.05)
            seen = {int(mark.read_text()) for mark in marks}
            assert way == "nothing" or seen == {records}, seen
            pids = [pid for process in started for pid in family(process.pid)]
            each = [memory_of(pid) for pid in pids]
            return {key: sum(sizes[key] for sizes in each) for key in ("pss", "rss", "peak")}
        finally:
            (Path(name) / "end").touch()
            for process in started:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    parser.add_argument("--records", type=int, default=131_072)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    arguments = parser.parse_args()
    records, counts = (8_192, [1, 2]) if arguments.quick else (arguments.records, arguments.processes)
    size = records * SHAPE[0] * SHAPE[1] * 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        generator = torch.Generator().manual_seed(0)
        latent = torch.randn(records, *SHAPE, generator=generator).half()
        cache = cache_of(Records({"latent": latent}), Path(folder) / "cache", shards=4)
        del latent
        for processes in counts:
            nothing = measured("nothing", cache.path, processes, records)
            for way in ("stoker", "own copy", "own copy, workers"):
                sizes = measured(way, cache.path, processes, records)
                rows.append(
                    {
                        "way": way, "processes": processes, "set_mib": round(size / 2**20),
                        **{f"{key}_mib": round(sizes[key] / 2**20) for key in ("pss", "rss")},
                        "peak_rss_mib": round(sizes["peak"] / 2**20),
                        "imports_mib": round(nothing["pss"] / 2**20),
                        "over_set": round((sizes["pss"] - nothing["pss"]) / size, 3),
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    publish("memory", rows, save=arguments.save and not arguments.quick)


if __name__ == "__main__":
    main()
