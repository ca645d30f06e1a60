"""A small network that finds a transmitter from what receivers measured, and how far off it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.errors import DivergedError

Batch: TypeAlias = "Mapping[str, Tensor]"


class PositionRegressor(nn.Module):
    """Receivers in, place out; neither their number nor their order matters."""

    def __init__(self, features: int = 6, width: int = 64) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.weigh = nn.Linear(width, 1)
        self.place = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, receivers: Tensor, mask: Tensor) -> Tensor:
        """`(B, R, F)` and `(B, R)`, True where there is nothing, to `(B, 2)`."""
        each = self.each(receivers)
        weights = self.weigh(each).squeeze(-1).masked_fill(mask, -torch.inf).softmax(-1)
        counted = (~mask).unsqueeze(-1)
        mean = (each * counted).sum(1) / counted.sum(1)
        return self.place(torch.cat([(weights.unsqueeze(-1) * each).sum(1), mean], -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predicted places lie from true ones."""

    mean_m: float
    median_m: float


def position_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean square distance in standardised units."""
    return F.mse_loss(model(batch["receivers"], batch["signal_mask"]), batch["target"])


def fit(
    model: nn.Module, batches: Callable[[int], Iterable[Batch]], *, epochs: int, steps: int, lr: float
) -> list[float]:
    """Train in place.

    Args:
        model: On the device of the batches.
        batches: The batches of an epoch.
        epochs, steps: Passes, and steps in all; the rate falls to 0 over them.
        lr: Highest learning rate.
    Returns:
        Mean loss of each epoch.
    Raises:
        DivergedError: A loss is not finite.
    """
    with one_thread():
        return _fit(model, batches, epochs, steps, lr)


@contextmanager
def one_thread() -> Generator[None]:
    """Torch on one thread: steps of half a millisecond lose more to the others than they gain from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fit(
    model: nn.Module, batches: Callable[[int], Iterable[Batch]], epochs: int, steps: int, lr: float
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(2, steps))
    found: list[float] = []
    for epoch in range(epochs):
        losses: list[Tensor] = []
        for batch in batches(epoch):
            optimizer.zero_grad(set_to_none=True)
            loss = position_loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        found.append(float(torch.stack(losses).mean()))
        if not math.isfinite(found[-1]):
            raise DivergedError(f"the loss of epoch {epoch} is {found[-1]}. Lower training.lr")
    return found


@torch.no_grad()
def position_errors(model: nn.Module, batches: Iterable[Batch], metres: Tensor) -> Errors:
    """Distances over all of `batches`; `metres` is what one standardised unit stands for, `(2,)`."""
    with one_thread():
        far = [
            ((model(batch["receivers"], batch["signal_mask"]) - batch["target"]) * metres).norm(dim=-1)
            for batch in batches
        ]
    distances = torch.cat(far)
    return Errors(mean_m=float(distances.mean()), median_m=float(distances.median()))


def save_regressor(path: Path, model: nn.Module, statistics: Mapping[str, Any]) -> None:
    """Weights, and what turns a prediction into metres, in one file: the one is useless without the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata={"statistics": json.dumps(statistics)})
