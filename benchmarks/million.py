"""Question: what of their limits do the host and disk tiers reach over a million records in 40 shards, cold and warm?

Records of 4 KiB, batches of 256 in shuffled order, all contenders in turns in one process; ratios are of the same
round, figures medians. Limits do only the operation itself:

- `host, warm`: one thread of `torch.index_select` from one tensor into a ring of 4 buffers, order made beforehand.
- `host, cold`: direct reads of 8 MiB of the same files in order, 4 at a time; Stoker loads all shards from the drive,
  verified, while it serves, until batches come from memory alone.
- `disk, cold`: 16 threads that read the same records with O_DIRECT. `disk, warm`: one thread of `preadv` for each record
  from the page cache, into a reused buffer, in order of place within a batch.
- others: `numpy.memmap` with a fancy index for each batch, of a flat file on the same drive.

`from_drive`: bytes that came from the drive for each byte served.

    python benchmarks/million.py [--records 1000000] [--save] [--folder /data]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import stoker
from measure import publish
from serve_disk import Place, Workload, drive_bytes, memmap_rows, reads, rounds, served
from serve_memory import Records, cache_of, index_loop
from stoker.plan.rates import drop_from_page_cache, sequential_limit

RECORDS, SHAPE, BATCH, SHARDS = 1_000_000, (128, 16), 256, 40
MIB = 1024**2
FILL_S = 3.0


def preads(place: Place, workload: Workload, seed: list[int]) -> Callable[[], int]:
    """Records of shuffled batches from the page cache, one after another."""
    fds = [os.open(path, os.O_RDONLY) for path in place.files]
    buffer = memoryview(bytearray(BATCH * place.size))
    views = [buffer[at * place.size : (at + 1) * place.size] for at in range(BATCH)]

    def work() -> int:
        seed[0] += 1
        order = np.random.default_rng(seed[0]).permutation(workload.count)
        for number in range(workload.batches):
            own = np.sort(order[number * BATCH : (number + 1) * BATCH]).tolist()
            for view, record in zip(views, own, strict=True):
                file, offset = place.spots[record]
                os.preadv(fds[file], [view], offset)
        return workload.batches * BATCH

    return work


LOAD = """
import sys, time, stoker
from serve_disk import drive_bytes
from stoker.monitor import StallMeter
cache = stoker.open_cache(sys.argv[1])
before, begun = drive_bytes(), time.perf_counter()
meter = StallMeter()
loader = stoker.Loader(cache, int(sys.argv[2]), tier="host", shuffle=True, meter=meter)
next(iter(loader))
while True:  # until a batch comes from memory alone; few are asked for, since they are read beside the filling
    time.sleep(0.05)
    meter.reset()
    next(iter(loader))
    if set(meter.epoch().tiers) == {"host"}:
        break
print(time.perf_counter() - begun, drive_bytes() - before)
"""


def loaded(cache: stoker.Cache) -> tuple[float, float]:
    """Load all into host memory in a process of its own: seconds until it serves, bytes read."""
    words = [sys.executable, "-c", LOAD, str(cache.path), str(BATCH)]
    said = subprocess.run(
        words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=600
    )
    seconds, drive = map(float, said.stdout.split())
    return seconds, drive


def timed(work: Callable[[], int], size: int) -> tuple[float, float]:
    """Bytes a second, and bytes from the drive for each byte served."""
    before, begun = drive_bytes(), time.perf_counter()
    served_bytes = work() * size
    return served_bytes / (time.perf_counter() - begun), (drive_bytes() - before) / served_bytes


def measured(folder: Path, records: int) -> Iterator[dict[str, Any]]:
    rows = torch.empty((records, *SHAPE), dtype=torch.float16)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).half()
    torch.add(noise, (torch.arange(records) % 4096).half().reshape(-1, 1, 1) / 64, out=rows)
    cache = cache_of(Records({"latent": rows}), folder, SHARDS)
    size = rows[0].nbytes
    flat = folder / "flat.bin"
    rows.numpy().tofile(flat)
    os.sync()
    place, seed = Place(cache, size), [0]
    files = [*place.files, flat]

    def loader(tier: Literal["host", "disk"]) -> Any:
        return stoker.Loader(cache, BATCH, tier=tier, shuffle=True, drop_last=True)

    def of_host() -> dict[str, Callable[[], tuple[float, float]]]:
        turn = Workload(name="", count=records, shape=SHAPE, batch=BATCH, turn_bytes=512 * MIB)
        loop = index_loop([rows], torch.randperm(records)[: turn.batches * BATCH], BATCH, ring=4)
        own = served(loader("host"), turn)
        return {"limit": lambda: timed(lambda: loop() * BATCH, size), "stoker": lambda: timed(own, size)}

    def of_disk(
        turn_bytes: int, limit: Callable[[Workload], Callable[[], int]]
    ) -> dict[str, Callable[[], tuple[float, float]]]:
        turn = Workload(name="", count=records, shape=SHAPE, batch=BATCH, turn_bytes=turn_bytes)
        found = {
            "limit": limit(turn),
            "stoker": served(loader("disk"), turn),
            "numpy memmap": memmap_rows(flat, turn, seed),
        }
        return {name: partial(timed, work, size) for name, work in found.items()}

    def of_filling() -> dict[str, Callable[[], tuple[float, float]]]:
        sequential, whole = sequential_limit(place.files), records * size

        def own() -> tuple[float, float]:
            seconds, drive = loaded(cache)
            return whole / seconds, drive / whole

        return {"limit": lambda: (sequential(FILL_S), 1.0), "stoker": own}

    cases: dict[str, tuple[int, Callable[[], dict[str, Callable[[], tuple[float, float]]]]]] = {
        "disk, cold": (16, lambda: of_disk(48 * MIB, lambda w: reads(place, w, direct=True, seed=seed))),
        "host, cold": (6, of_filling),
        "disk, warm": (12, lambda: of_disk(256 * MIB, lambda w: preads(place, w, seed))),
        "host, warm": (16, of_host),
    }
    for case, (turns, make) in cases.items():
        contenders, cold = make(), case.endswith("cold")
        for path in () if cold else files:
            path.read_bytes()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for order in [[*contenders], *rounds([*contenders], turns)]:
            for name in order:
                if cold:
                    drop_from_page_cache(files)
                found[name].append(contenders[name]())
        del contenders  # what maps a file keeps its pages
        gc.collect()
        for name, (_, *values) in found.items():
            ratios = [own / limit for (own, _), (limit, _) in zip(values, found["limit"][1:], strict=True)]
            yield {
                "case": case, "contender": name,
                "MB_per_s": round(statistics.median(rate for rate, _ in values) / 1e6, 1),
                "of_limit": round(statistics.median(ratios), 3), "lowest": round(min(ratios), 3),
                "highest": round(max(ratios), 3),
                "from_drive": round(statistics.median(part for _, part in values), 2),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument(
        "--folder", type=Path, help="a folder of the drive to be measured; default: temporary"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        rows = list(measured(Path(scratch), arguments.records))
    head = {"records": arguments.records, "record_bytes": 4096, "shards": SHARDS}
    publish("million", [{**head, **row} for row in rows], save=arguments.save)


if __name__ == "__main__":
    main()
