"""What the loop asks of a loader, and a batch as the operator takes it.

The loop knows loaders by shape only, so anything that yields latent pairs and can save its place will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.errors import RecordError
from stoker.scale.ranks import ALONE, Ranks


class PairBatch(Protocol):
    """Windows of trajectories: a state, the next one, and maybe more of them."""

    @property
    def z0(self) -> Tensor:
        """States, `(B, L, D)`; `(B, D)` and `(B, *grid, D)` are taken as one and as many tokens."""
        ...

    @property
    def z1(self) -> Tensor:
        """The states one stride later, of the same shape."""
        ...

    @property
    def future(self) -> Tensor | None:
        """The `H - 1` states after `z1`, `(B, H - 1, ...)`, or None."""
        ...

    @property
    def cond(self) -> Mapping[str, Tensor]:
        """Conditions by name, each `(B, C)`; what has more axes is raw data for other losses, and none."""
        ...

    @property
    def index(self) -> Tensor:
        """Sample number and start, `(B, 2)` int64."""
        ...


class PairLoader(Protocol):
    """A loader that can save its place. A finished pass moves it to the next epoch automatically."""

    def __iter__(self) -> Iterator[PairBatch]:
        """One pass, or the rest of the pass that a loaded state began."""
        ...

    def __len__(self) -> int:
        """Batches of a whole pass."""
        ...

    def set_epoch(self, epoch: int, /) -> None:
        """Begin this epoch at its first batch with the next pass."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Place after the batches handed out so far; can be written as JSON."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Continue from a saved state."""
        ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """A batch on the training device, float32."""

    z0: Tensor
    """`(B, L, D)`."""
    states: Tensor
    """The states that follow, `(B, H, L, D)`."""
    cond: Tensor
    """All conditions side by side, `(B, C)`; C may be 0."""
    index: Tensor
    """`(B, 2)` int64, where the loader left it."""


def to_pairs(batch: PairBatch, widths: Mapping[str, int], device: torch.device) -> Pairs:
    """Bring a batch to the device, conditions in the order of `widths`.

    Raises:
        RecordError: The batch has other conditions than training began with.
    """
    found = cond_widths(batch)
    if found != dict(widths):
        raise RecordError(
            f"a batch has the conditions {found}, training began with {dict(widths)}. "
            f"Train on caches whose samples carry the same parameters"
        )
    z0 = _tokens(batch.z0.to(device, torch.float32, non_blocking=True))
    z1 = _tokens(batch.z1.to(device, torch.float32, non_blocking=True))
    states = z1[:, None]
    if batch.future is not None:
        future = batch.future.to(device, torch.float32, non_blocking=True)
        states = torch.cat([states, future.reshape(len(z0), -1, *z0.shape[1:])], dim=1)
    columns = [batch.cond[name].reshape(len(z0), -1) for name in widths]
    cond = [column.to(device, torch.float32, non_blocking=True) for column in columns]
    return Pairs(z0, states, torch.cat(cond, dim=1) if cond else z0.new_empty((len(z0), 0)), batch.index)


def cond_widths(batch: PairBatch) -> dict[str, int]:
    """Numbers per example of each condition, by name in sorted order."""
    conditions = {name: values for name, values in batch.cond.items() if values.ndim <= 2}
    return {name: conditions[name][0].numel() for name in sorted(conditions)}


def _tokens(states: Tensor) -> Tensor:
    """`(B, D)`, `(B, L, D)` or `(B, *grid, D)` as `(B, L, D)`."""
    return states.reshape(len(states), -1, states.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Sizes of states, steps and conditions in the training data, float32."""

    z_mean: Tensor
    """`(D,)`."""
    z_std: Tensor
    """`(D,)`."""
    step_std: Tensor
    """Root mean square of z1 - z0, `(D,)`. The loss is in this unit: a short time step is learnt as well."""
    cond_mean: Tensor
    """`(C,)`."""
    cond_std: Tensor
    """`(C,)`; 1 where a condition never varies."""


def measure_scales(pairs: Iterator[Pairs], ranks: Ranks = ALONE) -> Scales:
    """Scales of some batches of all ranks, summed in float64 in their order."""
    states: list[Tensor] = []
    steps: list[Tensor] = []
    conds: list[Tensor] = []
    for batch in pairs:
        z0, step = batch.z0.double(), (batch.states[:, 0] - batch.z0).double()
        rows = z0.shape[0] * z0.shape[1]
        states.append(torch.stack([z0.sum((0, 1)), z0.square().sum((0, 1))]) / rows)
        steps.append(step.square().mean((0, 1)))
        cond = batch.cond.double()
        conds.append(torch.stack([cond.mean(0), cond.square().mean(0)]))
    state, step, cond = (
        ranks.mean(torch.stack(found).mean(0), "the scales of the data") for found in (states, steps, conds)
    )
    z_mean, z_std = _deviation(state)
    cond_mean, cond_std = _deviation(cond)
    step_std = step.sqrt()
    # A dimension that hardly moves would get an error unit of its rounding noise.
    step_std = step_std.clamp_min(1e-3 * step_std.max().item())
    return Scales(
        z_mean=z_mean,
        z_std=z_std,
        step_std=torch.where(step_std > 0, step_std, 1.0).float(),
        cond_mean=cond_mean,
        cond_std=cond_std,
    )


def _deviation(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation from mean and mean square, `(2, n)`; deviation 1 where nothing varies."""
    mean, square = moments
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6 * square.sqrt(), deviation, 1.0).float()
