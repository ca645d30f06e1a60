"""Datasets, modules and functions whose fingerprints are pinned.

Their source text and their names are part of the fingerprints: nothing in this file may change.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Held(Dataset[Any]):
    """Items of several forms from a tensor held in memory."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.values = torch.arange(48, dtype=torch.float32).reshape(8, 6) / 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        values = self.values[index]
        if self.form == "tensor":
            return values
        if self.form == "tuple":
            return values, index % 3
        if self.form == "nested":
            return {"a": values[:2], "b": {"c": values[2:].numpy().astype(np.float64), "d": index > 3}}
        if self.form == "ragged":
            return {"x": values[: 1 + index % 4]}
        if self.form == "text":
            return {"x": values, "kind": ("even", "odd")[index % 2], "note": f"n{index}"}
        return {"x": values.reshape(3, 2), "y": values[0]}


class Drawn(Dataset[Tensor]):
    """Items with noise from torch's own numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) + index


class Files(Dataset[Any]):
    """Items read from a folder of `.npy` files."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.names = sorted(name for name in os.listdir(root) if name.endswith(".npy"))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return {"x": np.load(os.path.join(self.root, self.names[index]))}


class Pooled(nn.Module):
    """Means of pairs of numbers, exact in every float dtype for the values used here."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.5, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(*x.shape[:-1], -1, 2) * self.weight).sum(-1)


class Two(nn.Module):
    """Two outputs from two fields."""

    def forward(self, u: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        return u * 2, latent + 1


def halved(x: Tensor) -> Tensor:
    """Return a half of it."""
    return x / 2
