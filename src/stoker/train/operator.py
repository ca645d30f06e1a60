"""The latent operator: z1 = z0 + f(z0, cond), a small transformer conditioned layer by layer.

f begins as zero, so that an untrained operator is the persistence guess, and it works in the units of the
training data: states to deviation one going in, steps in units of the usual step coming out.
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
        for name, size in (("z_mean", shape.dim), ("cond_mean", shape.cond)):
            self.register_buffer(name, torch.zeros(size))
        for name, size in (("z_std", shape.dim), ("step_std", shape.dim), ("cond_std", shape.cond)):
            self.register_buffer(name, torch.ones(size))

    def set_scales(self, scales: Scales) -> None:
        """Take over the sizes of the training data; they are saved with the weights."""
        for name in ("z_mean", "z_std", "step_std", "cond_mean", "cond_std"):
            self.get_buffer(name).copy_(getattr(scales, name))

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
        return z0 + buffer("step_std") * step

    def errors(self, z0: Tensor, states: Tensor, cond: Tensor) -> Tensor:
        """Mean squared error per example in units of the usual step, `(B,)`, unrolled over all `states`.

        Args:
            z0, states, cond: `(B, L, D)`, `(B, H, L, D)`, `(B, C)`.
        """
        total = z0.new_zeros(len(z0))
        z = z0
        for k in range(states.shape[1]):
            z = self(z, cond)
            total = total + ((z - states[:, k]) / self.get_buffer("step_std")).square().mean((1, 2))
        return total / states.shape[1]


class Objective(nn.Module):
    """`LatentOperator.errors` as a module's call, which is what data parallel training wraps."""

    def __init__(self, operator: LatentOperator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, z0: Tensor, states: Tensor, cond: Tensor) -> Tensor:
        """Mean squared error per example, `(B,)`."""
        return self.operator.errors(z0, states, cond)


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
