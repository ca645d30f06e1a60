"""The latent operator: z1 = guess + f(z0, cond), a small transformer conditioned layer by layer.

The guess is that nothing changes, z0. In a steady problem z0 is an input and not a state, and the guess is
the mean solution of the training data. f begins as zero, so that an untrained operator is that guess, and
it works in the units of the training data: states to deviation one going in, steps in units of the usual
step coming out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.train.batches import Scales


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
        """The next states, `(B, L, D)`."""
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
        """The condition one step later, `(B, C)`: its time moved on by `dt`, if it has both."""
        if self.clock is None:
            return cond
        time, step = self.clock
        moved = cond.clone()
        moved[:, time] += cond[:, step]
        return moved

    def unrolled(self, z0: Tensor, cond: Tensor, steps: int) -> list[Tensor]:
        """The states after 1 to `steps` steps, each `(B, L, D)`, every one predicted from the one before."""
        found: list[Tensor] = []
        for _ in range(steps):
            z0 = self(z0, cond)
            cond = self.later(cond)
            found.append(z0)
        return found

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Mean squared difference of states per example in units of the usual step, `(B,)`."""
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
        """`(B, L, W)` and `(B, W)` to `(B, L, W)`."""
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
