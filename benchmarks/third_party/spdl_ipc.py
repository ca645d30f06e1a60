"""Question: how long from a dataset to the first batch, in SPDL's benchmark of what it costs to start workers?

`examples/benchmark_ipc_dataloader.py` of SPDL times how long a DataLoader takes from `iter` to its first batch while
the dataset, a list of byte strings, is pickled to each worker. Its `measure_startup` runs as it is. For Stoker the name
`DataLoader` in its module stands for `stoker.cached`. Stoker serves without worker processes, so nothing is sent at a
start; it pays earlier. Both are shown:

- `startup_s`: the original's figure, seconds from `iter` to the first batch, a mean over passes.
- `construct_s`: seconds that the loader takes to be made before, not in the original's figure. For Stoker this computes
  the key of the dataset and opens the cache. `fill_s`: that of the first pass, which fills the cache.

    python benchmarks/third_party/run.py spdl_ipc --save
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from shared import arguments, save

import stoker


class Timed:
    """Stands for `DataLoader`, and notes how long it takes to be made."""

    def __init__(self, make: Any) -> None:
        self.make, self.took = make, list[float]()

    def __call__(self, *words: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        made = self.make(*words, **options)
        self.took.append(time.perf_counter() - begin)
        return made


def with_stoker(cache: Path) -> Any:
    def make(dataset: Any, batch_size: int, **_: Any) -> stoker.Loader:
        return stoker.cached(dataset, cache_dir=cache, batch_size=batch_size, shuffle=False)

    return make


def main() -> None:
    given = arguments("spdl_ipc", __doc__)
    sys.path.insert(0, str(given.original / "examples"))
    import benchmark_ipc_dataloader as module

    sizes, counts, runs = ((4,), (1, 2), 1) if given.quick else ((16, 128), (1, 2, 4), 2)
    loader, context = module.DataLoader, multiprocessing.get_context("spawn")
    cache = given.work / "strings-cache"
    shutil.rmtree(cache, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        dataset = module.ByteStringDataset((size << 20) // 64, 64)
        for contender in (*(f"workers {count}" for count in counts), "stoker"):
            timed = Timed(with_stoker(cache) if contender == "stoker" else loader)
            vars(module)["DataLoader"] = timed
            workers = 0 if contender == "stoker" else int(contender.split()[1])
            samples = module.measure_startup(dataset, workers, mp_ctx=context, batch_size=256, runs=runs)
            row = {
                "payload_mib": size,
                "contender": contender,
                "startup_s": round(statistics.mean(samples), 4),
            }
            row["construct_s"] = round(statistics.mean(timed.took[1:]), 4)
            rows.append(row | ({"fill_s": round(timed.took[0], 2)} if contender == "stoker" else {}))
    shutil.rmtree(cache)
    save("spdl_ipc", given.original, rows, given)


if __name__ == "__main__":
    main()
