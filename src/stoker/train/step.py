"""One optimizer step, the same whatever is trained: its learning rate, its guard, and the flag that ends it.

The guard stops at the first loss or gradient that is not finite, and names the sample.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import DivergedError
from stoker.runtime.signals import TOGETHER_S, takes
from stoker.train.config import Schedule

FINAL_RATE = 0.01
"""Part of the peak learning rate at which the cosine ends."""


def learning_rate(
    step: int, total: int, *, peak: float, warmup: float, schedule: Schedule = "cosine"
) -> float:
    """Return the rate of a step, counted from 0: a linear rise, then a cosine down to a hundredth of `peak`.

    With the schedule `constant` it stays at `peak` after the rise.

    >>> [round(learning_rate(step, 4, peak=1.0, warmup=0.5), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.505]
    """
    rise = round(warmup * total)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule == "constant":
        return peak
    part = (step - rise) / max(1, total - rise)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * part)))


LOSS = "the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about a step before the weights move."""

    epoch: int
    step: int
    errors: Tensor
    """Error per example, `(B,)`."""
    norm: Tensor
    """Norm of all gradients, a scalar."""
    index: Tensor
    """Sample number and start per example, `(B, 2)`."""
    task: str | None = None
    """Of a mixture: which cache the sample numbers are of."""


class FiniteGuard:
    """Looks at every step of all ranks. On a CPU at once; on a GPU one step later: the queue never drains.

    `check` must be called before weights are saved: a poisoned step must not become a checkpoint.
    """

    def __init__(
        self, device: torch.device, ranks: Ranks = SINGLE_PROCESS, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """`stop` says whether this process was asked to stop; ranks exchange it with the step's result."""
        self._ranks = ranks
        self._stop = stop
        self.stopping = False
        """True if any rank had been asked to stop when the ranks last exchanged a result."""
        self._device, self._cuda = device, device.type == "cuda"
        self._flag = torch.ones((), dtype=torch.bool, pin_memory=self._cuda, device="cpu")
        self._event = torch.cuda.Event() if self._cuda else None
        self._pending: StepFacts | None = None

    def submit(self, facts: StepFacts) -> None:
        """Take a step in, before its optimizer step.

        Raises:
            DivergedError: It (on a GPU: the one before) is not finite.
        """
        self.check()
        finite = torch.isfinite(facts.errors).all() & torch.isfinite(facts.norm)
        self._flag.copy_(finite.detach(), non_blocking=self._cuda)
        self._pending = facts
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))  # of another GPU it says nothing
        else:
            self.check()

    def check(self) -> None:
        """Judge the step submitted last.

        Raises:
            DivergedError: It is not finite.
        """
        facts, self._pending = self._pending, None
        if facts is None:
            return
        if self._event is not None:
            self._event.synchronize()
        own, where = not bool(self._flag), f"step {facts.step}"
        bad, stops = self._ranks.all_sum([float(own), float(self._stop())], where)
        self.stopping = stops > 0
        if bad:
            told = self._ranks.all_gather(_describe(facts) if own else "", where)
            # A gradient that one rank spoils is spoilt on all: who lost the loss itself knows the sample.
            blamed = [text for text in told if text.startswith(LOSS)] or [text for text in told if text]
            raise DivergedError(blamed[0])


def _describe(facts: StepFacts) -> str:
    errors = facts.errors.detach().float().cpu()
    bad = ~torch.isfinite(errors)
    count = int(bad.sum())
    row = int(bad.int().argmax() if count else errors.argmax())  # the first bad one
    number, start = int(facts.index[row, 0]), int(facts.index[row, 1])
    what = LOSS if count else "the gradient"
    of = "" if facts.task is None else f" of {facts.task}"
    sample = f"sample {number}{of}"
    blame = f"first at {sample}, time step {start}" if count else f"largest loss at {sample}"
    more = f" ({count} of {len(errors)} examples)" if count else ""
    return (
        f"{what} is not finite in epoch {facts.epoch}, step {facts.step}, {blame}{more}. "
        f"Expected a finite number. Look at cache[{number}] for NaN or extreme values, else lower "
        f"training.lr; the last checkpoint is from before this step"
    )


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
class StepResult:
    """Results of a step; tensors on the device, so that nothing waits for it."""

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
    ranks: Ranks = SINGLE_PROCESS
    stopped: Callable[[], bool] = lambda: False
    """Returns True once this process is asked to stop; the ranks exchange it with each step."""
    guard: FiniteGuard = field(init=False)
    """Raises at the first step that is not finite."""

    def __post_init__(self) -> None:
        """Make the guard of these steps."""
        self.guard = FiniteGuard(self.device, self.ranks, self.stopped)

    def step(self, batch: Any, *, rate: float, epoch: int, number: int) -> StepResult:
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
        return StepResult(found.values.detach(), mean.detach(), norm)


# ----------------------------------------------------------------------------------------------------------
# SIGTERM and SIGINT as a flag that the loop looks at between two steps.


class StopFlag:
    """Context in which the first signal only sets `signal_name`; a second one acts as it would without us.

    Outside the main thread, where Python allows no handlers, it never sets anything. A signal that the
    program ignores stays ignored.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._since = 0.0

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if takes(number):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self._since = signal.Signals(number).name, now
        elif now - self._since > TOGETHER_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
