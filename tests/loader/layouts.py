"""Trajectories in shards of several layouts, and batches compared."""

from __future__ import annotations

from typing import Any

import torch

from stoker.loader import Loader, WindowBatch

TIMED = ("latent", "time")


LAYOUTS: dict[str, tuple[int, ...]] = {
    "one": (),
    "unequal": (5, 7, 1),
    "many": (2,) * 11,
    "compressed": (9, 8),
    "mixed": (6, 6, 6),
}
"""Rows of the shards; see `COMPRESSION`."""
COMPRESSION = {"compressed": ("zstd",), "mixed": ("lz4", "none")}
COUNT, STEPS = 24, 9


def values_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, WindowBatch):
        future = [] if batch.future is None else [batch.future]
        return [batch.index, batch.z0, batch.z1, *future, *(batch.cond[name] for name in sorted(batch.cond))]
    return [batch[name] for name in sorted(batch)]


def same(a: Any, b: Any) -> bool:
    return a.position == b.position and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(values_of(a), values_of(b), strict=True)
    )


def indices_of_records(loader: Loader) -> list[int]:
    return [number for batch in loader for number in batch["index"].tolist()]
