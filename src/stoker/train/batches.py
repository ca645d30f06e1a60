"""What the loop asks of a loader, and a batch as the operator takes it.

The loop knows loaders by shape only, so anything that yields latent pairs and can save its place will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.encoders.steady import INPUT, SOLUTION, is_steady
from stoker.errors import ConfigError, RecordError
from stoker.scale.ranks import ALONE, Ranks

MASK = "future_mask"
"""Name in `cond` of the mask of states of `future` that are within an example's own horizon."""


class PairBatch(Protocol):
    """Windows of trajectories: a state, the next one, and maybe more of them."""

    @property
    def z0(self) -> Any:
        """States, `(B, L, D)`; `(B, D)` and `(B, *grid, D)` are taken as one and as many tokens. A dict of
        several fields of equal tokens is taken as one state, side by side."""
        ...

    @property
    def z1(self) -> Any:
        """The states one stride later, of the same shape."""
        ...

    @property
    def future(self) -> Any:
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


class SteadyBatch(NamedTuple):
    """Records of a steady problem as a `PairBatch`: `z0` is the input's latent, `z1` the solution's."""

    z0: Tensor
    z1: Tensor
    future: None
    cond: dict[str, Tensor]
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - the name that batches have


def as_pairs(batch: PairBatch | Mapping[str, Any]) -> PairBatch:
    """Return a batch of windows as it is, and records of a steady problem as pairs.

    Raises:
        ConfigError: Records of anything else.
    """
    if not isinstance(batch, Mapping):
        return batch
    if not is_steady(batch):
        raise ConfigError(
            f"a batch has {', '.join(batch)} of whole records. Training needs pairs of states: make the "
            f"loader with windows=stoker.Windows(), or records with {INPUT!r} and {SOLUTION!r}"
        )
    index: Tensor = batch["index"]
    return SteadyBatch(
        z0=batch[INPUT],
        z1=batch[SOLUTION],
        future=None,
        cond={name: value for name, value in batch.items() if name not in (INPUT, SOLUTION, "index")},
        index=torch.stack([index, torch.zeros_like(index)], 1),
    )


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
    steady: bool = False
    """`z0` is an input and no state: nothing is the same if time stands still."""
    mask: Tensor | None = None
    """1 for `states` within the example's own horizon, else 0, `(B, H)` float32; None: all are."""


def to_pairs(batch: PairBatch | Mapping[str, Any], widths: Mapping[str, int], device: torch.device) -> Pairs:
    """Bring a batch to the device, conditions in the order of `widths`.

    Raises:
        RecordError: The batch has other conditions than training began with.
    """
    steady, batch = isinstance(batch, Mapping), as_pairs(batch)
    found = cond_widths(batch)
    if found != dict(widths):
        raise RecordError(
            f"a batch has the conditions {found}, training began with {dict(widths)}. "
            f"Train on caches whose samples carry the same parameters"
        )
    z0, z1 = _state(batch.z0, device, 1), _state(batch.z1, device, 1)
    states, mask = z1[:, None], None
    if batch.future is not None:
        states = torch.cat([states, _state(batch.future, device, 2)], dim=1)
    if MASK in batch.cond:
        own = batch.cond[MASK].to(device, torch.float32, non_blocking=True)[..., 0]
        mask = F.pad(own, (1, 0), value=1.0)
    columns = [batch.cond[name].reshape(len(z0), -1) for name in widths]
    cond = [column.to(device, torch.float32, non_blocking=True) for column in columns]
    flat = torch.cat(cond, dim=1) if cond else z0.new_empty((len(z0), 0))
    return Pairs(z0, states, flat, batch.index, steady, mask)


def cond_widths(batch: PairBatch | Mapping[str, Any]) -> dict[str, int]:
    """Numbers per example of each condition, by name in sorted order."""
    given = as_pairs(batch).cond
    conditions = {name: values for name, values in given.items() if values.ndim <= 2}
    return {name: conditions[name][0].numel() for name in sorted(conditions)}


def unequal_tokens(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why one operator cannot take states of these shapes, by field; None where it can.

    >>> unequal_tokens({"u": (16, 8), "v": (4, 4, 2), "w": (16, 1)})
    >>> unequal_tokens({"u": (16, 8), "v": (4, 8)}).partition(" have")[0]
    'the state fields u (16, 8), v (4, 8)'
    """
    if len({math.prod(shape[:-1]) for shape in shapes.values()}) == 1:
        return None
    said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return (
        f"the state fields {said} have different numbers of tokens, so the operator cannot take them "
        "side by side. Name fields of one grid in Windows(field=...) or training.state_fields, or one"
    )


def _state(found: Tensor | Mapping[str, Tensor], device: torch.device, axes: int) -> Tensor:
    """States `(B,)`, `(B, D)`, `(B, L, D)` or `(B, *grid, D)` as `(B, L, D)`; several fields side by side.

    Args:
        axes: Axes before those of a state: 2 for `future`.
    Raises:
        RecordError: The fields have different numbers of tokens.
    """
    given = found if isinstance(found, Mapping) else {"": found}
    # One number a step is a token of one number.
    fields = {name: v[..., None] if v.ndim == axes else v for name, v in given.items()}
    flat = [
        values.to(device, torch.float32, non_blocking=True).reshape(
            *values.shape[:axes], -1, values.shape[-1]
        )
        for values in fields.values()
    ]
    if why := unequal_tokens({name: tuple(v.shape[axes:]) for name, v in fields.items()}):
        raise RecordError(why)
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


def raw_field(batch: PairBatch, name: str, device: torch.device) -> Tensor:
    """A raw field of a batch, as `data0`, `(B, *shape)` float32 on the device.

    Raises:
        RecordError: The batch does not carry it.
    """
    if name not in batch.cond:
        raise RecordError(
            f"a batch has no raw field {name!r}, only {', '.join(sorted(batch.cond)) or 'no conditions'}. "
            f"Store it with the latents: precompute.keep={name[:-1]}, or keeping(encoder, {name[:-1]!r})"
        )
    return batch.cond[name].to(device, torch.float32, non_blocking=True)


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
    guess: Tensor | None = None
    """Mean solution of a steady problem, `(L, D)`; None: the guess is `z0` itself."""


def measure_scales(pairs: Iterator[Pairs], ranks: Ranks = ALONE) -> Scales:
    """Scales of some batches of all ranks, summed in float64 in their order."""
    states: list[Tensor] = []
    steps: list[Tensor] = []
    conds: list[Tensor] = []
    batches = list(pairs)
    guess = None
    if batches and batches[0].steady:
        means = torch.stack([batch.states[:, 0].double().mean(0) for batch in batches])
        guess = ranks.mean(means.mean(0), "the mean solution").float()
    for batch in batches:
        z0 = batch.z0.double()
        step = (batch.states[:, 0] - (batch.z0 if guess is None else guess)).double()
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
        guess=guess,
    )


def _deviation(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation from mean and mean square, `(2, n)`; deviation 1 where nothing varies."""
    mean, square = moments
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6 * square.sqrt(), deviation, 1.0).float()
