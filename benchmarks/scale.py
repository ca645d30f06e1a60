"""Question: what grows with the number of examples, from a thousand to a thousand million?

`order`: everything that the loader does for a batch but gathering it (the order, which record and which step each
example is, `index`), over an index without a cache: windows of trajectories of 1,000 steps. `first_s` is the time to
the first batch of the epoch, which makes the whole order up to 2^27 examples; `us_per_batch` the mean of the batches
after it, as fast as they are asked for (a step that computes hides it: a thread makes them ahead); `MiB` what the
process grew by at its peak. `open`: `open_cache` of a real cache of tiny records, and its first record. Every figure
is the median of fresh processes.

    python benchmarks/scale.py [--save] [--examples 1000 1000000000] [--records 100 1000000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import medians_of_processes, publish
from serve_memory import Records, cache_of

EXAMPLES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
RECORDS = (100, 1_000, 10_000, 100_000, 1_000_000)
WINDOWS, BATCH = 1_000, 256
BATCHES = 2_048
"""Batches timed; more epochs where one has fewer."""
TURNS = 3

OPEN = """
import json, sys, time
import numpy, torch, stoker.store
begin = time.perf_counter()
cache = stoker.store.open_cache(sys.argv[1])
opened = time.perf_counter()
cache[len(cache) // 2]
print(json.dumps({"open_ms": (opened - begin) * 1e3, "first_record_ms": (time.perf_counter() - opened) * 1e3}))
"""


def chunks(count: int) -> Any:
    """What a loader makes batches from, over `count` examples of no cache."""
    from stoker.loader.batch import Examples
    from stoker.loader.chunks import Chunks, Locator
    from stoker.loader.order import Order, OrderKind, RankShare

    per_record = min(WINDOWS, count // 10)
    examples = Examples(count=count, per_record=per_record, first=np.empty(0, np.int64))
    locator = Locator(
        examples=examples,
        first=examples.first,
        indices=np.arange(count // per_record, dtype=np.int64),
        windowed=True,
        step_lengths={},
        ragged=(),
        lengths={},
    )
    order = Order(kind=OrderKind(kind="full"), count=count, seed=0, global_batch=BATCH)
    share = RankShare(
        positions=count, batch_size=BATCH, rank=0, world_size=1, drop_last=True, contiguous=False
    )
    return Chunks(order, share, locator, torch.device("cpu"), lambda: None)


def order_costs(count: int) -> dict[str, float]:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    made = chunks(10_000)  # what is imported and set up once is no cost of the count
    next(iter(made.of(0, 0)))
    before = peak_bytes()
    made, batches, first_s, begin = chunks(count), 0, 0.0, time.perf_counter()
    for epoch in range(BATCHES):
        for chunk in made.of(epoch, 0):
            if not first_s:
                first_s, begin = time.perf_counter() - begin, time.perf_counter()
                continue
            batches += chunk.span.batches
            if batches >= BATCHES:
                break
        if batches >= BATCHES:
            break
    return {
        "first_s": first_s,
        "us_per_batch": (time.perf_counter() - begin) / batches * 1e6,
        "MiB": (peak_bytes() - before) / 2**20,
    }


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--examples", type=int, nargs="*", default=EXAMPLES)
    parser.add_argument("--records", type=int, nargs="*", default=RECORDS)
    parser.add_argument("--child", type=int)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(order_costs(arguments.child)))
        return
    rows: list[dict[str, Any]] = []
    for count in arguments.examples:
        row = medians_of_processes([__file__, "--child", str(count)], runs=TURNS)
        rows.append({"what": "order", "examples": count, **row})
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for count in arguments.records:
            values = {"x": torch.arange(count * 2, dtype=torch.float32).reshape(count, 2)}
            cache = cache_of(Records(values), Path(folder) / str(count), shards=4)
            row = medians_of_processes(["-c", OPEN, str(cache.path)], runs=TURNS)
            rows.append({"what": "open", "records": count, **row})
    publish("scale", rows, save=arguments.save)


if __name__ == "__main__":
    main()
