"""The latent operator: z1 = guess + f(z0, cond), a small transformer conditioned layer by layer.

The guess is that nothing changes, z0. In a steady problem z0 is an input and not a state. Then the guess is
the mean solution of the training data. f begins as zero, so that an untrained operator is that guess. It
works in the units of the training data: states go in with deviation one, steps come out in units of the
usual step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.encoders.grid import Decode
from stoker.encoders.wrappers import INPUT, SOLUTION, is_steady
from stoker.errors import ConfigError, Problem, RecordError
from stoker.train.config import BatchLoader

# ----------------------------------------------------------------------------------------------------------
# A trainable decoder from states to fields, which begins as the encoder's exact one.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All that decides the shapes of a decoder's weights."""

    tokens: int
    dim: int
    field: tuple[int, ...]
    """Shape of one field, channels last."""
    width: int


class FieldDecoder(nn.Module):
    """Maps states `(..., L, D)` to fields `(..., *field)` float32: the exact decoder, and a correction.

    The correction is a small network on each token, its neighbors and its place, and begins as zero. So
    an untrained decoder is the exact one; where the encoder has none, it is the mean field. The exact part
    stays as it is: what it cannot give back, as waves that the encoder dropped, the correction learns.
    """

    def __init__(self, shape: DecoderShape, base: Decode | None, seed: int = 0) -> None:
        super().__init__()
        self.shape, self._base = shape, base
        channels = shape.field[-1]
        self._layout = _layout(shape)
        values = math.ceil(math.prod(shape.field) / shape.tokens)
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            with torch.device("cpu"):
                self.enter = nn.Linear(shape.dim, shape.width)
                self.near = nn.Conv1d(shape.width, shape.width, 3, padding=1, groups=shape.width)
                self.position = nn.Parameter(0.02 * torch.randn(shape.tokens, shape.width))
                self.up = nn.Linear(shape.width, 2 * shape.width)
                self.leave = nn.Linear(2 * shape.width, values)
        finally:
            torch.set_rng_state(before)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self.register_buffer("z_mean", torch.zeros(shape.dim))
        self.register_buffer("z_std", torch.ones(shape.dim))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def set_scales(self, z_mean: Tensor, z_std: Tensor, mean: Tensor, std: Tensor) -> None:
        """Take over mean and deviation of states `(D,)` and of fields `(C,)`."""
        for name, value in (("z_mean", z_mean), ("z_std", z_std), ("mean", mean), ("std", std)):
            self.get_buffer(name).copy_(value)

    def forward(self, states: Tensor) -> Tensor:
        """Return fields of states `(..., L, D)`, float32."""
        shape, buffer = self.shape, self.get_buffer
        z = states.reshape(-1, shape.tokens, shape.dim)
        x = self.enter((z - buffer("z_mean")) / buffer("z_std")) + self.position
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        x = self.leave(F.gelu(self.up(F.layer_norm(x, (shape.width,))), approximate="tanh"))
        correction = self._placed(x.float()) * buffer("std")
        base = buffer("mean") if self._base is None else self._base(z.float())
        return (base + correction).reshape(*states.shape[:-2], *shape.field)

    def errors(self, states: Tensor, fields: Tensor) -> Tensor:
        """Return mean squared error per example in units of the fields' deviation, `(B,)`."""
        wrong = (self(states) - fields) / self.get_buffer("std")
        return wrong.square().flatten(1).mean(1)

    def _placed(self, values: Tensor) -> Tensor:
        """Return values of tokens `(n, L, v)` where their cells lie in the field, `(n, *field)`."""
        count, field = len(values), self.shape.field
        if self._layout is None:
            return values.reshape(count, -1)[:, : math.prod(field)].reshape(count, *field)
        down, across = self._layout
        height, width, channels = field
        cells = values.view(count, down, across, height // down, width // across, channels)
        return cells.permute(0, 1, 3, 2, 4, 5).reshape(count, *field)


def _layout(shape: DecoderShape) -> tuple[int, int] | None:
    """Cells down and across that tokens stand for, as square as can be; None: in the order of the values."""
    if len(shape.field) != 3:
        return None
    height, width, _ = shape.field
    fits = [
        (down, shape.tokens // down)
        for down in range(1, shape.tokens + 1)
        if shape.tokens % down == 0 and height % down == 0 and width % (shape.tokens // down) == 0
    ]
    return min(fits, key=lambda own: abs(math.log(height * own[1] / (own[0] * width))), default=None)


def field_scales(batches: Iterable[Tensor], ranks: Ranks = SINGLE_PROCESS) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel over some batches of fields `(B, *field)` of all ranks, `(C,)`."""
    sums = [
        torch.stack([rows.mean(0), rows.square().mean(0)])
        for rows in (batch.double().reshape(-1, batch.shape[-1]) for batch in batches)
    ]
    mean, square = ranks.all_mean(torch.stack(sums).mean(0), "the scales of the fields")
    std = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(std > 1e-6 * square.sqrt(), std, 1.0).float()


# ----------------------------------------------------------------------------------------------------------
# Batches of latent pairs, and a batch as the operator takes it.


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


PairLoader: TypeAlias = BatchLoader[PairBatch]
"""A loader of pairs, as the loop asks for it."""


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
            f"a batch has {', '.join(batch)} of whole records",
            hint="Training needs pairs of states: make the loader with windows=stoker.Windows(), or records "
            f"with {INPUT!r} and {SOLUTION!r}",
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
            f"a batch has the conditions {found}, training began with {dict(widths)}",
            hint="Train on caches whose samples carry the same parameters",
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
    """Return how many numbers per example each condition has, by name in sorted order."""
    given = as_pairs(batch).cond
    conditions = {name: values for name, values in given.items() if values.ndim <= 2}
    return {name: conditions[name][0].numel() for name in sorted(conditions)}


def unequal_tokens(shapes: Mapping[str, tuple[int, ...]]) -> Problem | None:
    """Say why one operator cannot take states of these shapes, by field; None where it can.

    >>> unequal_tokens({"u": (16, 8), "v": (4, 4, 2), "w": (16, 1)})
    >>> unequal_tokens({"u": (16, 8), "v": (4, 8)}).fact.partition(" have")[0]
    'the state fields u (16, 8), v (4, 8)'
    """
    if len({math.prod(shape[:-1]) for shape in shapes.values()}) == 1:
        return None
    said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return Problem(
        f"the state fields {said} have different numbers of tokens, so the operator cannot take them "
        "side by side",
        hint="Name fields of one grid in Windows(field=...) or training.state_fields, or one",
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
        raise RecordError.of_all([why])
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


def raw_field(batch: PairBatch, name: str, device: torch.device) -> Tensor:
    """Return a raw field of a batch, as `data0`, `(B, *shape)` float32 on the device.

    Raises:
        RecordError: The batch does not carry it.
    """
    if name not in batch.cond:
        raise RecordError(
            f"a batch has no raw field {name!r}, only {', '.join(sorted(batch.cond)) or 'no conditions'}",
            hint=f"Store it with the latents: precompute.keep={name[:-1]}, or keep_fields(encoder, "
            f"{name[:-1]!r})",
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
    """Root mean square of z1 - z0, `(D,)`. The loss is in this unit: a short time step is learned as well."""
    cond_mean: Tensor
    """`(C,)`."""
    cond_std: Tensor
    """`(C,)`; 1 where a condition never varies."""
    guess: Tensor | None = None
    """Mean solution of a steady problem, `(L, D)`; None: the guess is `z0` itself."""


def measure_scales(pairs: Iterator[Pairs], ranks: Ranks = SINGLE_PROCESS) -> Scales:
    """Return the scales of some batches of all ranks, summed in float64 in their order."""
    states: list[Tensor] = []
    steps: list[Tensor] = []
    conds: list[Tensor] = []
    batches = list(pairs)
    guess = None
    if batches and batches[0].steady:
        means = torch.stack([batch.states[:, 0].double().mean(0) for batch in batches])
        guess = ranks.all_mean(means.mean(0), "the mean solution").float()
    for batch in batches:
        z0 = batch.z0.double()
        step = (batch.states[:, 0] - (batch.z0 if guess is None else guess)).double()
        rows = z0.shape[0] * z0.shape[1]
        states.append(torch.stack([z0.sum((0, 1)), z0.square().sum((0, 1))]) / rows)
        steps.append(step.square().mean((0, 1)))
        cond = batch.cond.double()
        conds.append(torch.stack([cond.mean(0), cond.square().mean(0)]))
    state, step, cond = (
        ranks.all_mean(torch.stack(found).mean(0), "the scales of the data")
        for found in (states, steps, conds)
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
    """Return mean and deviation from mean and mean square, `(2, n)`; deviation 1 where nothing varies."""
    mean, square = moments
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6 * square.sqrt(), deviation, 1.0).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShape:
    """All that decides the shapes of an operator's weights."""

    tokens: int
    """Tokens of a state, L."""
    dim: int
    """Numbers a token, D."""
    cond: int
    """Numbers of the condition, C; may be 0."""
    width: int
    """Width of the layers."""
    depth: int
    """Layers."""
    heads: int
    """Attention heads; divide `width`."""
    steady: bool = False
    """From the input of a steady problem to its solution."""


class LatentOperator(nn.Module):
    """Maps states `(B, L, D)` and conditions `(B, C)` to the states one stride later, all float32."""

    def __init__(self, shape: OperatorShape, seed: int = 0) -> None:
        super().__init__()
        with torch.device("cpu"):  # whatever the default device is: equal weights from equal seeds
            self._make(shape, seed)

    def _make(self, shape: OperatorShape, seed: int) -> None:
        # Its own random stream: the caller's draws neither change the weights nor are changed by them.
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            self.enter = nn.Linear(shape.dim, shape.width)
            self.position = nn.Parameter(0.02 * torch.randn(shape.tokens, shape.width))
            self.condition = nn.Linear(shape.cond, shape.width) if shape.cond else None
            self.layers = nn.ModuleList(_Layer(shape.width, shape.heads) for _ in range(shape.depth))
            self.leave = nn.Linear(shape.width, shape.dim)
        finally:
            torch.set_rng_state(before)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self._width = shape.width
        self.steady = shape.steady
        if shape.steady:
            self.register_buffer("mean_solution", torch.zeros(shape.tokens, shape.dim))
        self.clock: tuple[int, int] | None = None
        """Places of `time` and `dt` in the condition, where it has both: a roll-out moves the time on."""
        for name, size in (("z_mean", shape.dim), ("cond_mean", shape.cond)):
            self.register_buffer(name, torch.zeros(size))
        for name, size in (("z_std", shape.dim), ("step_std", shape.dim), ("cond_std", shape.cond)):
            self.register_buffer(name, torch.ones(size))

    def set_scales(self, scales: Scales) -> None:
        """Take over the sizes of the training data; they are saved with the weights."""
        for name in ("z_mean", "z_std", "step_std", "cond_mean", "cond_std"):
            self.get_buffer(name).copy_(getattr(scales, name))
        if scales.guess is not None:
            self.get_buffer("mean_solution").copy_(scales.guess)

    def guess(self, z0: Tensor) -> Tensor:
        """Return what a model must beat to have learned anything, `(B, L, D)`."""
        return self.get_buffer("mean_solution").expand_as(z0) if self.steady else z0

    def forward(self, z0: Tensor, cond: Tensor) -> Tensor:
        """Return the next states, `(B, L, D)`."""
        buffer = self.get_buffer
        x = self.enter((z0 - buffer("z_mean")) / buffer("z_std")) + self.position
        if self.condition is None:
            hint = x.new_zeros((len(z0), self._width))
        else:
            hint = self.condition((cond - buffer("cond_mean")) / buffer("cond_std"))
        for layer in self.layers:
            x = layer(x, F.silu(hint))
        step = self.leave(F.layer_norm(x, (self._width,)))
        return self.guess(z0) + buffer("step_std") * step

    def later(self, cond: Tensor) -> Tensor:
        """Return the condition one step later, `(B, C)`: its time moved on by `dt`, if it has both."""
        if self.clock is None:
            return cond
        time, step = self.clock
        moved = cond.clone()
        moved[:, time] += cond[:, step]
        return moved

    def unrolled(self, z0: Tensor, cond: Tensor, steps: int) -> list[Tensor]:
        """Return the states after 1 to `steps` steps, each `(B, L, D)`, each predicted from the last."""
        found: list[Tensor] = []
        for _ in range(steps):
            z0 = self(z0, cond)
            cond = self.later(cond)
            found.append(z0)
        return found

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return mean squared difference of states per example in units of the usual step, `(B,)`."""
        return ((a - b) / self.get_buffer("step_std")).square().mean((1, 2))


class _Layer(nn.Module):
    """Attention and a two-layer network, each scaled, shifted and gated by the condition.

    Source: adaLN-Zero (Peebles and Xie, 2023): the gates begin at zero, so that depth costs nothing at first.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:
        """Return the block's output `(B, L, W)` for tokens `(B, L, W)` and a condition `(B, W)`."""
        shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = self.modulate(hint)[:, None].chunk(6, dim=-1)
        x = x + gate_a * self._attend(self._norm(x) * (1 + scale_a) + shift_a)
        y = self._norm(x) * (1 + scale_b) + shift_b
        return x + gate_b * self.down(F.gelu(self.up(y), approximate="tanh"))

    def _attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],))
