"""Question: how full are batches packed to a budget of tokens, and how long does it take to plan an epoch?

A million records of lognormal length (median 400, cut at the budget), packed to batches of 4,096 tokens. Nothing is read:
a plan takes lengths alone. `used` is the fraction of the budget that holds tokens, over all batches; `seconds` is the
time to make the plan, once.

- `stoker`: `Loader(batch_tokens=4096)`, best fit within windows of the shuffled order, the batches shuffled again;
- `stoker, 8 ranks`: the same, split so that ranks have equally many batches;
- `first fit`: each record of the shuffled order to the first batch that has room, all batches of a window open;
- `next fit`: each record to the current batch, or to a new one: what a sampler with a token count does;
- `grain best fit`: Grain's `BestFitPackIterDataset` with 1,024 bins, if it is installed. It handles the records
  themselves, so it packs the first `--grain` of them, and Stoker's fraction for these is in `stoker_used`.

And the plan of batches by shape: the same records in 40 groups, batches of 64 on 8 ranks; `full` is the fraction of the
batches that have 64 examples.

    python benchmarks/packing.py [--save] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import publish
from stoker.loader.batching import WINDOW_BATCHES, GroupPlanner, TokenPlanner

COUNT, QUICK, BUDGET, SHAPES, BATCH, RANKS = 1_000_000, 20_000, 4096, 40, 64, 8
PLAIN: dict[str, Any] = {"seed": 0, "shuffle": True, "drop_last": False}


def lengths_of(count: int) -> NDArray[np.int64]:
    """Lognormal lengths, as those of chats and documents."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, count)
    return np.minimum(BUDGET, drawn.astype(np.int64) + 1)


def first_fit(lengths: NDArray[np.int64]) -> int:
    """Batches that first fit takes: a tree over the batches of a window gives the first with room."""
    batches, total = 0, np.cumsum(lengths)
    cuts = np.searchsorted(total, np.arange(0, total[-1], WINDOW_BATCHES * BUDGET)).tolist()
    for begin, end in zip(cuts, [*cuts[1:], len(lengths)], strict=True):
        leaves = 1 << (end - begin).bit_length()
        room = [BUDGET] * (2 * leaves)
        used = 0
        for length in lengths[begin:end].tolist():
            node = 1
            while node < leaves:
                node = 2 * node if room[2 * node] >= length else 2 * node + 1
            used = max(used, node - leaves + 1)
            room[node] -= length
            while node > 1:
                node //= 2
                room[node] = max(room[2 * node], room[2 * node + 1])
        batches += used
    return batches


def next_fit(lengths: NDArray[np.int64]) -> int:
    """Batches if each is closed by the first record that does not fit."""
    batches, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            batches, room = batches + 1, BUDGET
        room -= length
    return batches


def grain_best_fit(lengths: NDArray[np.int64]) -> int | None:
    """Batches of Grain's best fit; None: it is not installed."""
    try:
        import grain
    except ImportError:
        return None
    records = [{"ids": np.ones(length, np.int32)} for length in lengths.tolist()]
    packed = grain.experimental.BestFitPackIterDataset(
        grain.MapDataset.source(records).to_iter_dataset(),
        length_struct={"ids": BUDGET},
        num_packing_bins=WINDOW_BATCHES,
    )
    return sum(1 for _ in packed)


def timed(name: str, lengths: NDArray[np.int64], make: Callable[[], int]) -> dict[str, Any]:
    """One row: batches, what they use of the budget, and seconds."""
    begin = time.perf_counter()
    batches = make()
    seconds = time.perf_counter() - begin
    used = float(lengths.sum()) / (batches * BUDGET)
    row = {"packing": name, "records": len(lengths), "batches": batches, "used": round(used, 4)}
    return {**row, "seconds": round(seconds, 3)}


def packed(lengths: NDArray[np.int64], ranks: int) -> int:
    """Batches of Stoker's plan of one epoch."""
    plan = TokenPlanner(lengths, BUDGET, world_size=ranks, **PLAIN).epoch(1)
    return len(plan.bounds) - 1


def by_shape(count: int) -> dict[str, Any]:
    """The row of a plan by shape."""
    rng = np.random.default_rng(0)
    groups = rng.choice(SHAPES, count, p=rng.dirichlet(np.ones(SHAPES)))
    groups = np.unique(groups, return_inverse=True)[1]
    begin = time.perf_counter()
    plan = GroupPlanner(groups, BATCH, by="shape", world_size=RANKS, **PLAIN).epoch(1)
    seconds = time.perf_counter() - begin
    full = float((np.diff(plan.bounds) == BATCH).mean())
    row = {"packing": f"by shape, {SHAPES} shapes, {RANKS} ranks", "records": count}
    return {**row, "batches": len(plan.bounds) - 1, "full": round(full, 4), "seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few records, to see that it runs")
    parser.add_argument("--grain", type=int, default=50_000, help="records that Grain packs")
    given = parser.parse_args()
    lengths = lengths_of(QUICK if given.quick else COUNT)
    rows = [
        timed("stoker", lengths, lambda: packed(lengths, 1)),
        timed(f"stoker, {RANKS} ranks", lengths, lambda: packed(lengths, RANKS)),
        timed("first fit", lengths, lambda: first_fit(lengths)),
        timed("next fit", lengths, lambda: next_fit(lengths)),
    ]
    some = lengths[: 2000 if given.quick else given.grain]
    begin = time.perf_counter()
    if (batches := grain_best_fit(some)) is not None:
        seconds, row = time.perf_counter() - begin, timed("grain best fit", some, lambda: batches)
        own = float(some.sum()) / (packed(some, 1) * BUDGET)
        rows.append({**row, "seconds": round(seconds, 3), "stoker_used": round(own, 4)})
    rows.append(by_shape(len(lengths)))
    publish("packing", rows, save=given.save)


if __name__ == "__main__":
    main()
