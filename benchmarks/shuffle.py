"""Question: how well does each kind of order shuffle, on data that lie sorted, and does training notice?

Sorted data are the worst case: 20,000 examples of ten labels, label after label, as files of classes or of parameters
lie on disk. For each order, over two epochs:

- `batch_entropy`: entropy of the labels in a batch of 64, over what batches drawn at random have (1 is random);
- `distance`: mean distance between the places of successive examples, over that of random ones, a third of the
  count (1 is random);
- `rank_correlation`: Spearman's, between the place in the data and the position in the epoch (0 is random);
- `again`: how many of a batch's pairs are in one batch again in the next epoch, over what chance gives (1 is random).

Convergence, as Xu et al. (CorgiPile, SIGMOD 2022) judge orders, on such sorted data: logistic regression by SGD
with one example's step after another in batches of 64, accuracy on examples kept back, after one epoch and after
four, mean of five seeds. And the demo of this package (`--demo`): its NRMSE on the validation set after three
epochs, trajectories sorted by their energy, mean of two seeds with their standard deviation.

    python benchmarks/shuffle.py [--save] [--demo]
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from measure import publish
from stoker.loader.order import Order, parse_order

COUNT, LABELS, BATCH, WORLD = 20_000, 10, 64, 4
ORDERS = (
    "full",
    f"static({WORLD})",
    "block(64,16384)",
    "block(64,4096)",
    "block(64,1024)",
    "block(256,1024)",
    "block(1024,1024)",
    "sequential",
)
FEATURES, HELD_BACK = 32, 4000


def epoch_of(kind: str, seed: int, epoch: int) -> NDArray[np.int64]:
    """The examples of an epoch, in order; whole batches."""
    parsed = parse_order(kind, world_size=WORLD, example_bytes=4)
    order = Order(kind=parsed, count=COUNT, seed=seed, global_batch=BATCH)
    return np.asarray(order.epoch(epoch)(0, order.positions // BATCH * BATCH))


def entropy_of(labels: NDArray[np.int64]) -> float:
    """Mean entropy of the labels of a batch, in nats."""
    counts = np.stack([(labels == label).sum(1) for label in range(LABELS)], 1) / labels.shape[1]
    logs = np.log(np.where(counts > 0, counts, 1.0))
    return float(-(counts * logs).sum(1).mean())


def pairs_of(batches: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every pair of examples that is in one batch, as one number each, sorted."""
    first, second = np.triu_indices(BATCH, 1)
    ordered = np.sort(batches, 1)
    return np.sort((ordered[:, first] * COUNT + ordered[:, second]).ravel())


def quality(kind: str) -> dict[str, Any]:
    """The four figures of one order."""
    labels = np.arange(COUNT) * LABELS // COUNT
    random = np.random.default_rng(0).permutation(COUNT)[: COUNT // BATCH * BATCH].reshape(-1, BATCH)
    epochs = [epoch_of(kind, 1, epoch) for epoch in range(2)]
    batches = [ids.reshape(-1, BATCH) for ids in epochs]
    places = np.arange(len(epochs[0]))
    pairs = [pairs_of(one) for one in batches]
    chance = len(pairs[0]) * (BATCH - 1) / (COUNT - 1)
    return {
        "order": kind,
        "batch_entropy": round(entropy_of(labels[batches[0]]) / entropy_of(labels[random]), 3),
        "distance": round(float(np.abs(np.diff(epochs[0])).mean()) / (COUNT / 3), 3),
        "rank_correlation": round(float(np.corrcoef(epochs[0].argsort().argsort(), places)[0, 1]), 3),
        "again": round(len(np.intersect1d(*pairs)) / chance, 2),
    }


def accuracy(kind: str, seed: int, epochs: int) -> float:
    """Of a logistic regression on sorted examples, on those kept back."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(LABELS, FEATURES)) * 0.35
    labels = np.arange(COUNT) * LABELS // COUNT
    data = centers[labels] + generator.normal(size=(COUNT, FEATURES))
    asked = generator.integers(0, LABELS, HELD_BACK)
    unseen = centers[asked] + generator.normal(size=(HELD_BACK, FEATURES))
    weights, bias = np.zeros((FEATURES, LABELS)), np.zeros(LABELS)
    for epoch in range(epochs):
        for ids in epoch_of(kind, seed, epoch).reshape(-1, BATCH):
            scores = data[ids] @ weights + bias
            scores = np.exp(scores - scores.max(1, keepdims=True))
            error = scores / scores.sum(1, keepdims=True)
            error[np.arange(BATCH), labels[ids]] -= 1
            weights -= 0.1 * data[ids].T @ error / BATCH
            bias -= 0.1 * error.mean(0)
    return float(((unseen @ weights + bias).argmax(1) == asked).mean())


def demo(kind: str, seeds: int = 2) -> dict[str, Any]:
    """The demo's error with trajectories sorted by energy."""
    from stoker.run.demo import DATA, _make_data, demo_config, run_demo

    config = demo_config([])
    if not Path(DATA).exists():
        _make_data(config)
        with h5py.File(DATA, "r+") as file:
            values = file["tensor"][:]
            file["tensor"][:] = values[np.argsort((values[:, 0] ** 2).mean(-1))]
    found = []
    for seed in range(seeds):
        run = run_demo(
            [
                f"training.shuffle={'true' if kind == 'full' else kind}",
                f"training.seed={seed}",
                f"training.run_dir=runs/{seed}",
                f"data.files={DATA}",
            ]
        )
        found.append(run.train.report.val_nrmse)
    return {
        "order": kind,
        "demo_nrmse": round(float(np.mean(found)), 5),
        "spread": round(float(np.std(found)), 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--demo", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in ORDERS:
        row = quality(kind)
        for epochs in (1, 4):
            row[f"accuracy_{epochs}"] = round(
                float(np.mean([accuracy(kind, s, epochs) for s in range(5)])), 4
            )
        rows.append(row)
    assert math.isclose(rows[0]["distance"], 1, abs_tol=0.02)
    if arguments.demo:
        here = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            rows += [demo(kind) for kind in ("full", "static(4)", "block(64,256)", "block(64,64)")]
            os.chdir(here)
    publish("shuffle", rows, save=arguments.save)


if __name__ == "__main__":
    main()
