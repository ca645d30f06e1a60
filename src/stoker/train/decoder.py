"""A trainable decoder from states to fields, which begins as the encoder's exact one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.encoders.decode import Decode
from stoker.scale.ranks import ALONE, Ranks


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
        """Fields of states `(..., L, D)`, float32."""
        shape, buffer = self.shape, self.get_buffer
        z = states.reshape(-1, shape.tokens, shape.dim)
        x = self.enter((z - buffer("z_mean")) / buffer("z_std")) + self.position
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        x = self.leave(F.gelu(self.up(F.layer_norm(x, (shape.width,))), approximate="tanh"))
        correction = self._placed(x.float()) * buffer("std")
        base = buffer("mean") if self._base is None else self._base(z.float())
        return (base + correction).reshape(*states.shape[:-2], *shape.field)

    def errors(self, states: Tensor, fields: Tensor) -> Tensor:
        """Mean squared error per example in units of the fields' deviation, `(B,)`."""
        wrong = (self(states) - fields) / self.get_buffer("std")
        return wrong.square().flatten(1).mean(1)

    def _placed(self, values: Tensor) -> Tensor:
        """Values of tokens `(n, L, v)` where their cells lie in the field, `(n, *field)`."""
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


def field_scales(batches: Iterable[Tensor], ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel over some batches of fields `(B, *field)` of all ranks, `(C,)`."""
    sums = [
        torch.stack([rows.mean(0), rows.square().mean(0)])
        for rows in (batch.double().reshape(-1, batch.shape[-1]) for batch in batches)
    ]
    mean, square = ranks.mean(torch.stack(sums).mean(0), "the scales of the fields")
    std = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(std > 1e-6 * square.sqrt(), std, 1.0).float()
