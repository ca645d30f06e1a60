"""Datasets whose values every storage dtype and every processor gives back alike: multiples of a quarter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


def quarters(*shape: int, first: int = 0) -> Tensor:
    """Return multiples of 1/4 below 60, in an order that no axis repeats."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + first) % 241 / 4).reshape(shape)


class Numbers(Dataset[Tensor]):
    """Item i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Trajectories(Dataset[dict[str, Tensor]]):
    """Two states with time, a clock, a parameter and a vector."""

    def __init__(self, count: int = 14, steps: int = 9, tokens: int = 4, dim: int = 6) -> None:
        self.sizes = (count, steps, tokens, dim)

    def __len__(self) -> int:
        return self.sizes[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _, *sizes = self.sizes
        return {
            "latent": quarters(*sizes, first=31 * index),
            "flow": quarters(sizes[0], 5, first=17 * index),
            "time": torch.arange(sizes[0], dtype=torch.float32) / 2 + 100 * index,
            "nu": torch.tensor(index / 8),
            "bc": quarters(3, first=index),
        }


class Narrow(Dataset[dict[str, Tensor]]):
    """Other lengths, other states and other conditions than `Trajectories`."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "latent": quarters(7, 2, 6, first=13 * index),
            "nu": torch.tensor([index / 8, index / 4]),
            "re": torch.tensor(index, dtype=torch.int32),
        }


class Pictures(Dataset[dict[str, Tensor]]):
    """Images of bytes with a label."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = (torch.arange(3 * 6 * 8) * 5 + 11 * index) % 251
        return {"image": values.reshape(3, 6, 8).to(torch.uint8), "label": torch.tensor(index % 4)}
