"""The device tier: one resident tensor per field, filled shard by shard through verified reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.memory import (
    Layout,
    Memory,
    bytes_of,
    make_layout,
    read_column,
    record_rows,
    record_steps,
    torch_dtype,
    unit_shape,
)
from stoker.loader.places import Places

if TYPE_CHECKING:
    from stoker.store import Cache


def resident(cache: Cache, places: Places, shards: frozenset[int], device: torch.device) -> Memory:
    """Allocate the fields of `shards` on `device`; loading copies them there one shard at a time."""
    schema = cache.recipe.columns
    layout = make_layout(cache, shards, schema, 1, {})
    sources = {
        name: torch.empty((layout.span(name), *unit_shape(f)), dtype=torch_dtype(f), device=device)
        for name, f in schema.items()
    }
    tables = {name: record_steps(cache, layout, places, name) for name in layout.steps}
    return Memory(
        tier="device",
        device=device,
        sources=sources,
        rows=_placed(record_rows(layout, places), device),
        steps={name: _placed(table, device) for name, table in tables.items()},
        load=partial(_load, cache, layout, sources),
        shards=shards,
        ready=bytearray(len(cache.index.shards)),
    )


def _placed(table: NDArray[np.int64], device: torch.device) -> Any:
    """A table where the order is made: numpy on a CPU."""
    return table if device.type == "cpu" else torch.as_tensor(table).to(device)


def _load(cache: Cache, layout: Layout, sources: Mapping[str, Tensor], shard: int) -> None:
    target_device = next(iter(sources.values())).device
    for name, source in sources.items():
        begin, count = layout.part(name, shard)
        target = source[begin : begin + count]
        staging = torch.empty(target.shape, dtype=target.dtype)
        read_column(cache, shard, name, bytes_of(staging))
        target.copy_(staging)
    if target_device.type == "cuda":
        torch.cuda.synchronize(target_device)  # the copies are in this thread's stream, batches are not
