"""Stop at the first loss or gradient that is not finite, and name the sample."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stoker.errors import DivergedError, arg
from stoker.precompute.share import TOGETHER_S, takes
from stoker.scale.ranks import ALONE, Ranks
from stoker.train.operator import Pairs

LOSS = "the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step before the weights move."""

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
        self, device: torch.device, ranks: Ranks = ALONE, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """`stop` says whether this process was asked to stop; ranks exchange it with the step's result."""
        self._ranks = ranks
        self._stop = stop
        self.stopping = False
        """Whether any rank had been asked to stop when the ranks last exchanged a result."""
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
        bad, stops = self._ranks.sums([float(own), float(self._stop())], where)
        self.stopping = stops > 0
        if bad:
            told = self._ranks.tell(_describe(facts) if own else "", where)
            # A gradient that one rank spoils is spoilt on all: who lost the loss itself knows the sample.
            blamed = [text for text in told if text.startswith(LOSS)] or [text for text in told if text]
            raise DivergedError(blamed[0])


def check_finite(pairs: Pairs) -> None:
    """Refuse a batch from which no scales can be learnt.

    Raises:
        DivergedError: A state or condition is not finite; names the first sample.
    """
    bad = torch.zeros(len(pairs.z0), dtype=torch.bool, device=pairs.z0.device)
    for values in (pairs.z0, pairs.states, pairs.cond):
        bad |= ~torch.isfinite(values).flatten(1).all(1)
    if bool(bad.any()):
        number, start = pairs.index[int(bad.int().argmax())].tolist()
        raise DivergedError(
            f"sample {number}, time step {start} holds a NaN or an infinity ({int(bad.sum())} of {len(bad)} "
            f"examples of a batch do). Expected finite states and parameters. Look at cache[{number}]; "
            f"precompute with {arg('nan', 'reject')} leaves such samples out"
        )


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
