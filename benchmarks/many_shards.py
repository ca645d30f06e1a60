"""Question: what grows with the number of shards, to a hundred thousand, and with a thousand million examples?

`index`: an index over shards of ten trajectories, of which each gives 1,000 windows; the files are there, and empty (an
open looks at sizes alone). `open_s` is `open_cache`, `inspect_s` what `stoker cache show` does, `loader_s` a `Loader` on the
disk tier over windows in full order, made and its first batch located; `us_per_batch` what it does for a batch of 256 but
reading it; `MiB` what the process grew by at its peak.
`build`: the index made from real shards by one thread and by several, as `seconds` and from storage that takes 5 ms to
open a file; whether both wrote the same bytes. `verify_s` reads all of them.
`read`: records at random from more shards than may be open, in us a record, as the shards are opened anew each time
(`opened`) and with what was parsed of them kept (`known`).
`compact`: these shards merged, per shard; MiB as above. Figures of `index` are medians of fresh processes.

    python benchmarks/many_shards.py [--save] [--shards 1000 10000 100000] [--real 1000 4000]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import medians_of_processes, publish
from scale import peak_bytes
from serve_memory import Records

SHARDS = (1_000, 10_000, 100_000)
REAL = (1_000, 4_000)
RECORDS, STEPS, BATCH = 10, 1_001, 256
DELAY_S = 0.005
TURNS = 3
READS = 2_000


def sparse_cache(folder: Path, shards: int) -> Path:
    """A cache folder with an index over so many shards, whose files are holes."""
    from stoker.schema import Field
    from stoker.store import make_recipe, open_folder
    from stoker.store.index import Index, ShardInfo, dump_index

    class Trajectories(Records):
        def __len__(self) -> int:
            return shards * RECORDS

        def schema(self) -> Any:
            return {"x": Field(shape=(STEPS, 16), dtype="float32", time=True)}

    recipe = make_recipe(Trajectories({}), None)
    path = open_folder(folder, "sparse", recipe).path
    size = RECORDS * STEPS * 64
    entries = []
    for i in range(shards):
        name = f"shard-0123456789ab-{i:06d}.safetensors"
        with (path / name).open("wb") as file:
            file.truncate(size)
        segments = np.array([[0, i * RECORDS, RECORDS]])
        entries.append(
            ShardInfo(file=name, part=0, rows=RECORDS, bytes=size, header=f"{i:032x}", segments=segments)
        )
    count = shards * RECORDS
    index = Index(
        fingerprint=recipe.fingerprint, name="sparse", generation=1, sequence=1, count=count, stored=count,
        complete=True, shards=tuple(entries), quarantined={}, statistics={}, error={},
    )  # fmt: skip
    (path / "index.json").write_bytes(dump_index(index, recipe))
    return path


def index_costs(path: Path) -> dict[str, float]:
    """Run in a process of its own."""
    import stoker.loader.design  # noqa: F401 - what is imported once is no cost of the shards
    from stoker.loader import Loader, Windows
    from stoker.run.caches import inspect_cache
    from stoker.store import open_cache

    torch.set_num_threads(1)
    before, begin = peak_bytes(), time.perf_counter()
    cache = open_cache(path)
    opened = time.perf_counter()
    loader = Loader(cache, BATCH, windows=Windows(), tier="disk", device="cpu", shuffle=True)
    chunks = loader._serving.running()._chunks(torch.device("cpu")).of(0, 0)
    first = next(chunks)
    made = time.perf_counter()
    batches = sum(next(chunks).span.batches for _ in range(8))
    located = time.perf_counter()
    grown = peak_bytes() - before
    again = time.perf_counter()
    inspect_cache(path)
    assert first.span.batches
    return {
        "examples": loader._serving.design.examples.count,
        "index_MB": (path / "index.json").stat().st_size / 1e6,
        "open_s": opened - begin,
        "loader_s": made - opened,
        "us_per_batch": (located - made) / batches * 1e6,
        "inspect_s": time.perf_counter() - again,
        "MiB": grown / 2**20,
    }


def real_cache(folder: Path, shards: int) -> Any:
    """A folder of real shards of two records of 1 KiB, with no index yet."""
    from stoker.store import WriterSettings, make_recipe, open_folder

    values = torch.arange(shards * 2 * 256, dtype=torch.float32).reshape(-1, 256)
    work = open_folder(folder, "real", make_recipe(Records({"x": values}), None))
    writer = work.writer(WriterSettings(shard_bytes=2048, commit_after_s=1e9))
    sync, os.fsync = os.fsync, lambda fd: None  # the disk is not what is measured
    try:
        for first in range(0, len(values), 1000):
            some = values[first : first + 1000]
            writer.append(range(first, first + len(some)), {"x": some})
        writer.commit()
    finally:
        os.fsync = sync
    return work


def build_costs(work: Any) -> dict[str, Any]:
    """The index of a folder made afresh, by one thread and by several, from quick and from slow storage."""
    from stoker.store import index, open_cache
    from stoker.store.folder import Folder
    from stoker.store.storage import Storage

    class Slow(Storage):
        def open(self, name: str) -> Any:
            time.sleep(DELAY_S)
            return super().open(name)

    found: dict[str, Any] = {}
    texts = set()
    few = index.FEW_SHARDS
    for storage, name in ((Storage, ""), (Slow, "slow_")):
        for threads, word in ((1, "one_s"), (16, "many_s")):
            index.FEW_SHARDS = few if threads > 1 else 10**9
            (work.path / "index.json").unlink(missing_ok=True)
            fresh = Folder(work.path, "real", work.recipe)
            fresh._catalog._storage = storage(work.path)
            begin = time.perf_counter()
            fresh.finish()
            found[name + word] = round(time.perf_counter() - begin, 3)
            texts.add((work.path / "index.json").read_bytes())
    index.FEW_SHARDS = few
    begin = time.perf_counter()
    assert open_cache(work.path).verify().ok
    return {**found, "same_bytes": len(texts) == 1, "verify_s": round(time.perf_counter() - begin, 3)}


def read_costs(path: Path) -> dict[str, float]:
    """Records at random, with a thousand descriptors."""
    from stoker.store import open_cache, shard

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    cache = open_cache(path)
    numbers = np.random.default_rng(0).integers(0, len(cache), READS).tolist()
    found = {}
    kept = shard.FACTS_BYTES
    for name, allowed in (("opened_us", 0), ("known_us", kept)):
        shard.FACTS_BYTES = allowed
        for measured in (False, True):
            begin = time.perf_counter()
            for number in numbers:
                cache[number]
            if measured:
                found[name] = (time.perf_counter() - begin) / READS * 1e6
    return found


def compact_costs(path: Path) -> dict[str, float]:
    """Run in a process of its own."""
    from stoker.store.maintain import compact

    before, begin = peak_bytes(), time.perf_counter()
    report = compact(path)
    took = time.perf_counter() - begin
    return {
        "us_per_shard": took / report.merged * 1e6,
        "shards_after": report.shards_after,
        "MiB": (peak_bytes() - before) / 2**20,
    }


CHILDREN = {"index": index_costs, "read": read_costs, "compact": compact_costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--shards", type=int, nargs="*", default=SHARDS)
    parser.add_argument("--real", type=int, nargs="*", default=REAL)
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child[0]](Path(arguments.child[1]))))
        return
    rows: list[dict[str, Any]] = []

    def child(what: str, shards: int, path: Path, runs: int) -> None:
        found = medians_of_processes([__file__, "--child", what, str(path)], runs=runs)
        rows.append({"what": what, "shards": shards, **found})

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for shards in arguments.shards:
            child("index", shards, sparse_cache(Path(folder) / f"s{shards}", shards), TURNS)
        for shards in arguments.real:
            work = real_cache(Path(folder) / f"r{shards}", shards)
            rows.append({"what": "build", "shards": shards, **build_costs(work)})
            child("read", shards, work.path, TURNS)
            row = compact_costs(work.path)  # once: there is nothing left to merge then
            rows.append({"what": "compact", "shards": shards, **{k: round(v, 4) for k, v in row.items()}})
    publish("many_shards", rows, save=arguments.save)


if __name__ == "__main__":
    main()
