"""Real caches for the loader's tests: arrays in, shards of chosen sizes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.schema import Field, Schema
from stoker.sources.protocol import Part, SourceIdentity
from stoker.store import Cache, WriterSettings, make_recipe, open_folder
from stoker.store.failures import Failure


class Arrays:
    """A source over arrays: one sample per row, or per entry of a list for fields of varying length."""

    def __init__(
        self,
        fields: dict[str, Any],
        timed: Sequence[str] = (),
        parts: Sequence[int] = (),
        axes: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.fields, self.axes = fields, axes or {}
        self.count = len(next(iter(fields.values())))
        self.parts = list(parts) or [self.count]
        self.timed = set(timed)

    def __len__(self) -> int:
        return self.count

    def schema(self) -> Schema:
        found = {}
        for name, values in self.fields.items():
            ragged = isinstance(values, list)
            one = values[0]
            shape = (-1, *one.shape[1:]) if ragged else tuple(one.shape)
            dtype = str(one.dtype).removeprefix("torch.")
            axes, time = self.axes.get(name, ()), name in self.timed
            found[name] = Field(shape=shape, dtype=dtype, time=time, ragged=ragged, axes=axes)
        return found

    def identity(self) -> SourceIdentity:
        parts = tuple(
            Part(name=f"part{i}", count=count, digest=f"{i}" * 16) for i, count in enumerate(self.parts)
        )
        return SourceIdentity(kind="arrays/1", parts=parts)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        return {name: values[number].numpy() for name, values in self.fields.items()}

    def runs(self) -> list[range]:
        return [range(self.count)]

    def keys(self) -> list[str]:
        return [str(number) for number in range(self.count)]


def write_cache(
    folder: Path,
    fields: dict[str, Any],
    *,
    timed: Sequence[str] = (),
    shards: Sequence[int] = (),
    parts: Sequence[int] = (),
    skip: Sequence[int] = (),
    quarantine: bool = True,
    name: str = "c",
    dtype: Any = None,
    compression: Sequence[str] = ("none",),
    axes: dict[str, tuple[str, ...]] | None = None,
) -> Cache:
    """Store tensors (or lists of tensors, for varying length) as a cache with shards of these many rows.

    Shards take turns at the kinds of `compression`. Samples in `skip` are quarantined, or left missing with
    `quarantine=False`. `axes` are those of folded fields, as `folded` gives them.
    """
    source = Arrays(fields, timed, parts, axes)
    recipe = make_recipe(source, None, dtype=dtype)
    target = open_folder(folder, name, recipe)
    numbers = [n for n in range(source.count) if n not in set(skip)]
    bounds = np.cumsum([0, *shards]).tolist() if shards else [0]
    if bounds[-1] < len(numbers):
        bounds.append(len(numbers))
    part_ends = np.cumsum(source.parts).tolist()
    for i, (begin, end) in enumerate(pairwise(bounds)):
        kind: Any = compression[i % len(compression)]
        writer = target.writer(WriterSettings(compression=kind))
        own = numbers[begin:end]
        for low, high in zip([0, *part_ends], part_ends, strict=False):
            piece = [n for n in own if low <= n < high]
            if piece:
                rows = {
                    field: [v[n] for n in piece] if isinstance(v, list) else v[piece]
                    for field, v in fields.items()
                }
                writer.append(piece, rows)
        writer.commit()
    if quarantine:
        for number in skip:
            target.quarantine(Failure(number=number, stage="read", error="broken", attempts=2, kind="sample"))
    return target.finish()


def folded(name: str, tensors: Sequence[torch.Tensor], lead: int) -> dict[str, Any]:
    """Tensors of which the `lead` first axes vary, as the fields that are stored of them."""
    return {
        name: [tensor.flatten(0, lead - 1) for tensor in tensors],
        f"{name}.shape": torch.tensor([tensor.shape[:lead] for tensor in tensors]),
    }


def trajectories(
    count: int = 24, steps: int = 9, step: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Random trajectories `latent`, a scalar `nu`, a vector `bc` and a clock `time`."""
    generator = torch.Generator().manual_seed(7)
    return {
        "latent": torch.randn((count, steps, *step), generator=generator).to(dtype),
        "nu": torch.randn(count, generator=generator),
        "bc": torch.randn((count, 3), generator=generator),
        "time": torch.arange(steps, dtype=torch.float32).repeat(count, 1)
        + torch.arange(count)[:, None] * 100,
    }
