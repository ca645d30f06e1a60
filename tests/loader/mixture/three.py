"""What the tests of mixtures share: three caches that differ, and batches compared."""

from __future__ import annotations

from typing import Any

import torch

from stoker.loader import TaskBatch, Windows
from tests.loader.caches import trajectories

TIMED = ("latent", "time")


WINDOWS = Windows(field="latent")


MODES: list[dict[str, Any]] = [
    {"mode": "concat", "mix": "batch"},
    {"mode": "weighted", "weights": {"a": 3, "b": 1, "c": 2}, "epoch_examples": 97},
    {"mode": "round_robin"},
    {"mode": "round_robin", "exhausted": "longest"},
]


def narrow(count: int = 10) -> dict[str, torch.Tensor]:
    """Other lengths, other latents, other conditions: `re` instead of `bc`, a wider `nu` in float64."""
    fields = trajectories(count, 7, (2, 6))
    fields["nu"] = torch.arange(2 * count, dtype=torch.float64).view(count, 2)
    fields["re"] = torch.arange(count, dtype=torch.int32)
    del fields["bc"]
    return fields


def values_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, TaskBatch):
        future = [] if batch.future is None else [batch.future]
        named = [*batch.cond.values(), *batch.mask.values()]
        return [batch.index, batch.z0, batch.z1, *future, *named, batch.tasks]
    tensors = [batch[name] for name in sorted(batch) if name not in ("task", "mask")]
    return [*tensors, *batch["mask"].values()]


def same(a: Any, b: Any) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(values_of(a), values_of(b), strict=True)
    )
