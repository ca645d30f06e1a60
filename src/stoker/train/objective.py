"""The loss of a stage: errors of the operator, inverse losses, consistency.

Inverse encoding and inverse decoding are those of Universal Physics Transformers (Alkin et al., 2024), with
an encoder E that is frozen and a decoder D that is trained:

- inverse encoding: `D(E(x))` is close to `x`. `E(x)` is the stored state z0, `x` the stored raw field.
- inverse decoding: `E(D(z))` is close to `z`, for the state `z` that the operator predicts for z1. So its
  predictions stay states that some field has.

A `consistency` stage unrolls the operator over all K states of a window (so that it meets its own errors,
as in Brandstetter et al., 2022, but with gradients through all steps) and adds two agreements:

- Of starts: K steps from z0 and K - 1 steps from the true z1 end in the same state. Points of one trajectory
  have one end (Song et al., 2023).
- Of step splits, where each example draws its stride: one step of twice the stride is two steps of it,
  `f_2dt(z) = f_dt(f_dt(z))` (Frans et al., 2024), for examples whose doubled stride is drawn in training too.

In both the second side is the target, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from stoker.train.config import Stage
from stoker.train.operator import FieldDecoder, LatentOperator

DOUBLED = ("stride", "dt")
"""Conditions that are twice as large for a step of twice the stride."""


class Objective(nn.Module):
    """The loss of a stage per example as a module's call, which is what data parallel training wraps."""

    def __init__(
        self,
        operator: LatentOperator,
        stage: Stage | None = None,
        *,
        decoder: FieldDecoder | None = None,
        encode: Callable[[Tensor], Tensor] | None = None,
        columns: Mapping[str, int] | None = None,
        most_stride: int = 1,
    ) -> None:
        """Take what the stage needs.

        Args:
            operator, decoder: The models; the decoder only where the stage trains it.
            stage: None: `operator` without inverse losses.
            encode: Fields to states, with gradients.
            columns: Place of each condition of one number in the condition.
            most_stride: The largest stride that examples draw.
        """
        super().__init__()
        self.operator, self.decoder = operator, decoder
        self._stage = stage or Stage()
        self._encode, self._most_stride = encode, most_stride
        columns = columns or {}
        self._doubled = [columns[name] for name in DOUBLED if name in columns]
        self._stride = columns.get("stride")

    def forward(
        self,
        z0: Tensor,
        states: Tensor,
        cond: Tensor,
        mask: Tensor | None = None,
        fields: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Loss per example, `(B,)`.

        Args:
            z0, states, cond: `(B, L, D)`, `(B, H, L, D)`, `(B, C)`.
            mask: Which states count, `(B, H)`; None: all.
            fields: Raw fields at z0 and z1, where the stage needs them.
        """
        stage, operator = self._stage, self.operator
        steps = 1 if stage.name == "decoder" and stage.freeze_operator else states.shape[1]
        with torch.set_grad_enabled(torch.is_grad_enabled() and stage.trains_operator):
            found = operator.unrolled(z0, cond, steps)
        total = z0.new_zeros(len(z0))
        if stage.trains_operator:
            total = total + _mean([operator.distance(z, states[:, k]) for k, z in enumerate(found)], mask)
        if stage.name == "consistency" and stage.lambda_consistency:
            total = total + stage.lambda_consistency * self._disagreement(z0, states, cond, found)
        if self.decoder is None or fields is None:
            return total
        weight = stage.lambda_inv_enc or (1.0 if stage.name == "decoder" else 0.0)
        if weight:
            wrong = self.decoder.errors(z0, fields[0])
            if stage.name == "decoder":
                wrong = (wrong + self.decoder.errors(found[0], fields[1])) / 2
            total = total + weight * wrong
        if stage.lambda_inv_dec and self._encode is not None:
            again = self._encode(self.decoder(found[0]))
            scale = operator.get_buffer("z_std")
            wrong = ((again - found[0]) / scale).square().mean((1, 2))
            total = total + stage.lambda_inv_dec * wrong
        return total

    def _disagreement(self, z0: Tensor, states: Tensor, cond: Tensor, found: list[Tensor]) -> Tensor:
        """How far predictions of one state are apart, `(B,)`."""
        operator, total = self.operator, z0.new_zeros(len(z0))
        if len(found) > 1:
            with torch.no_grad():
                target = operator.unrolled(states[:, 0], operator.later(cond), len(found) - 1)[-1]
            total = total + operator.distance(found[-1], target)
        if self._stride is None or self._most_stride < 2:
            return total
        twice = cond.clone()
        twice[:, self._doubled] *= 2
        fits = twice[:, self._stride] <= self._most_stride
        with torch.no_grad():
            target = operator.unrolled(z0, cond, 2)[-1]
        return total + fits * operator.distance(operator(z0, twice), target)


def _mean(errors: list[Tensor], mask: Tensor | None) -> Tensor:
    """Mean over steps, of those that count."""
    total = torch.zeros_like(errors[0])
    for k, error in enumerate(errors):
        total = total + (error if mask is None else error * mask[:, k])
    return total / (len(errors) if mask is None else mask[:, : len(errors)].sum(1))
