"""One optimizer step and its learning rate, which are the same whatever is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stoker.scale.ranks import ALONE, Ranks
from stoker.train.guard import FiniteGuard, StepFacts

FINAL_RATE = 0.01
"""Part of the peak learning rate at which the cosine ends."""


def learning_rate(step: int, total: int, *, peak: float, warmup: float) -> float:
    """Return the rate of a step, counted from 0: a linear rise, then a cosine down to a hundredth of `peak`.

    >>> [round(learning_rate(step, 4, peak=1.0, warmup=0.5), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.505]
    """
    rise = round(warmup * total)
    if step < rise:
        return peak * (step + 1) / rise
    part = (step - rise) / max(1, total - rise)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * part)))


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of a batch, with a graph behind it."""

    values: Tensor
    """Of each example, `(B,)`."""
    index: Tensor
    """Sample number and start of each example, `(B, 2)`."""
    task: str | None = None
    """Of a mixture: which cache the sample numbers are of."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step came to; tensors on the device, so that nothing waits for it."""

    losses: Tensor
    """Of each example, `(B,)`."""
    mean: Tensor
    """Their mean, from which the gradient is."""
    norm: Tensor
    """Norm of the gradient before it was clipped."""


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Moves the weights of some models, batch by batch."""

    losses: Callable[[Any], Losses]
    """The objective: the losses of a batch."""
    models: Sequence[nn.Module]
    """Each is clipped on its own: what a decoder learns must not shorten an operator's steps."""
    optimizer: Any
    """A `torch.optim.Optimizer`, whose methods carry no types."""
    grad_clip: float | None
    """Largest norm of a model's gradient; None: as it comes."""
    device: torch.device
    amp: bool = False
    """Compute losses in bfloat16 where that is safe."""
    ranks: Ranks = ALONE
    stopped: Callable[[], bool] = lambda: False
    """Returns True once this process is asked to stop; the ranks exchange it with each step."""
    guard: FiniteGuard = field(init=False)
    """Raises at the first step that is not finite."""

    def __post_init__(self) -> None:
        """Make the guard of these steps."""
        self.guard = FiniteGuard(self.device, self.ranks, self.stopped)

    def step(self, batch: Any, *, rate: float, epoch: int, number: int) -> Stepped:
        """Move the weights once.

        Args:
            batch: One batch of the loader.
            rate: The learning rate.
            epoch, number: Of this step, both from 1, for messages.
        Raises:
            DivergedError: This step (on a GPU: the one before) is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            found = self.losses(batch)
        mean: Any = found.values.mean()
        self.optimizer.zero_grad(set_to_none=True)
        with self.ranks.waiting(f"step {number}"):
            mean.backward()
        limit = self.grad_clip or math.inf
        norms = [nn.utils.clip_grad_norm_(model.parameters(), limit) for model in self.models]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        facts = StepFacts(
            epoch=epoch, step=number, errors=found.values, norm=norm, index=found.index, task=found.task
        )
        self.guard.submit(facts)
        self.optimizer.step()
        return Stepped(found.values.detach(), mean.detach(), norm)
