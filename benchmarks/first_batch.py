"""Question: how long from process start to the first batch when the cache is there, and does it grow with the cache?

Each size runs in fresh processes (median of 5, after one that is not counted): `torch_s` is `import torch` alone, `after_torch_s` everything from then to
the first batch in hand (import stoker, open the cache, plan, verify what is served, gather).

    python benchmarks/first_batch.py [--save] [--records 100 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from measure import medians_of_processes, publish
from serve_memory import Records, cache_of

CHILD = """
import json, sys, time
begin = time.perf_counter()
import torch
torch.set_num_threads(1)
imported = time.perf_counter()
import stoker
cache = stoker.open_cache(sys.argv[1])
opened = time.perf_counter()
loader = stoker.Loader(cache, batch_size=64, shuffle=True, tier=sys.argv[2])
batch = next(iter(loader))
done = time.perf_counter()
assert batch["latent"].shape == (64, 16, 32)
print(json.dumps({"torch_s": imported - begin, "open_s": opened - imported, "after_torch_s": done - imported}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--records", type=int, nargs="*", default=[100, 1_000, 10_000, 100_000])
    arguments = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for count in arguments.records:
            generator = torch.Generator().manual_seed(0)
            fields = {
                "latent": torch.randn(count, 16, 32, generator=generator).half(),
                "params": torch.randn(count, 4, generator=generator),
            }
            cache = cache_of(Records(fields), Path(folder) / str(count), shards=4)
            for tier in ("auto", "host", "disk"):
                row = medians_of_processes(["-c", CHILD, str(cache.path), tier], runs=5)
                rows.append({"records": count, "tier": tier, **row})
    publish("first_batch", rows, save=arguments.save)


if __name__ == "__main__":
    main()
