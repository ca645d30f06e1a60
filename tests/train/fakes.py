"""A loader of latent pairs in memory, with the state that the real one has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class FakeBatch:
    z0: Tensor
    z1: Tensor
    future: Tensor | None
    cond: dict[str, Tensor]
    index: Tensor


class FakeLoader:
    """Windows of `latent` `(n, T, ...)`; shuffled by epoch, or in order."""

    def __init__(
        self,
        latent: Tensor,
        *,
        batch_size: int = 8,
        shuffle: bool = True,
        cond: Mapping[str, Tensor] | None = None,
        stride: int = 1,
        horizon: int = 1,
    ) -> None:
        self.latent, self.cond, self.batch_size, self.shuffle = latent, dict(cond or {}), batch_size, shuffle
        self.stride, self.horizon = stride, horizon
        starts = torch.arange(latent.shape[1] - stride * horizon)
        self.ids = torch.cartesian_prod(torch.arange(len(latent)), starts)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self.ids) // self.batch_size if self.shuffle else -(-len(self.ids) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def batch(self, ids: Tensor) -> FakeBatch:
        number, start = ids[:, 0], ids[:, 1]
        rows = [self.latent[number, start + k * self.stride] for k in range(self.horizon + 1)]
        future = torch.stack(rows[2:], dim=1) if self.horizon > 1 else None
        cond = {name: value[number][:, None] for name, value in self.cond.items()}
        return FakeBatch(rows[0], rows[1], future, cond, ids)

    def __iter__(self) -> Iterator[FakeBatch]:
        first, self.position = self.position, 0
        order = torch.arange(len(self.ids))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.epoch))
        for place in range(first, len(self)):
            self.position = place + 1
            yield self.batch(self.ids[order[place * self.batch_size : (place + 1) * self.batch_size]])
        self.epoch, self.position = self.epoch + 1, 0


def waves(samples: int = 6, steps: int = 9, tokens: int = 4, seed: int = 0) -> Tensor:
    """Points that turn by a fixed angle a step, two in each token: `(samples, steps, tokens, 4)`."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand((samples, 1, tokens, 2), generator=generator) * 6.28
    angle = 0.3 * torch.arange(steps)[None, :, None, None] + phase
    return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)
