"""Question: how much longer does a model on the CPU take when its batches come from a loader?

The model is 477 x 512 times 512 x 512, once a sample (about 5 ms on one core of 50 GFLOP/s), on all cores, and is
given the same 64 rows each time. Only its own time counts, not the time that the loader takes. Each run is a
fresh process. Reported are medians over the runs of the median over the batches of two epochs.

- `alone`: no loader. `tensors`: batches are taken from a tensor by `index_select`, in the same thread.
- `disk`, `host`: Stoker's tiers, over 1,024 records of 768 KiB in batches of 64.
- `to_alone`: the time over that of `alone`.

    python benchmarks/beside_loader.py [--save] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from measure import medians, medians_of_processes, publish

COUNT, BATCH, EPOCHS = 1_024, 64, 2
SHAPE = (3, 256, 256)
WIDTH, ROWS = 512, 477
CONTENDERS = ("alone", "tensors", "disk", "host")


class Records(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"data": torch.full(SHAPE, float(number))}


def model(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(rows * (1 + value) @ weight).mean(0) for value in x])


def epochs_of(contender: str, folder: Path) -> Callable[[], Iterable[Any]]:
    """Return what gives the batches of one epoch."""
    if contender == "alone":
        return lambda: range(COUNT // BATCH)
    if contender == "tensors":
        values = torch.zeros((COUNT, *SHAPE))
        return lambda: (values.index_select(0, some) for some in torch.randperm(COUNT).split(BATCH))
    import stoker

    loader = stoker.cached(
        Records(),
        None,
        cache_dir=folder,
        name="records",
        version="1",
        batch_size=BATCH,
        tier=contender,
        shuffle=True,
    )
    return lambda: loader


def run(contender: str, folder: Path) -> float:
    x = torch.rand(BATCH)
    rows, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    model(x, rows, weight)
    epoch, took = epochs_of(contender, folder), []
    for _ in range(EPOCHS):
        for _batch in epoch():
            begin = time.perf_counter()
            model(x, rows, weight)
            took.append(time.perf_counter() - begin)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:

        def timed(name: str) -> float:
            return medians_of_processes([__file__, "--child", name, folder], runs=1)["batch_s"]

        took = medians({name: partial(timed, name) for name in CONTENDERS}, rounds=arguments.runs)
    rows = [
        {
            "contender": name,
            "batch_ms": round(1e3 * seconds, 1),
            "to_alone": round(seconds / took["alone"], 2),
        }
        for name, seconds in took.items()
    ]
    publish("beside_loader", rows, save=arguments.save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps({"batch_s": run(sys.argv[2], Path(sys.argv[3]))}))
    else:
        main()
