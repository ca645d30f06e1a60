"""Validation: the error of one step, that of predicting no change, and those of complete roll-outs.

An error is always `sqrt(sum |prediction - truth|^2 / sum |truth|^2)` over the whole set, in latent space,
summed in float64; with a decoder also of the decoded fields, in their own units. Doing nothing
(persistence, z1 = z0; of a steady problem the mean solution of the training data) is the guess that a model
must beat to have learned anything: with short time steps its error is small, so an error alone says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.encoders.grid import Decode, DecodeByRecord
from stoker.train.config import PhysicalSpace
from stoker.train.operator import LatentOperator, PairBatch, PairLoader, Pairs, raw_field, to_pairs
from stoker.units import MIB

ERRORS = (
    "val_nrmse", "persistence_nrmse", "rollout_nrmse", "rollout_persistence_nrmse",
    "physical_nrmse", "physical_persistence_nrmse", "physical_rollout_nrmse",
    "physical_rollout_persistence_nrmse",
)  # fmt: skip
"""Errors of one step, of the guess z1 = z0, of roll-outs, and of the guess that their first state stays: in
latent space, then of decoded fields against decoded truth. What the encoder itself loses is in neither."""
Errors: TypeAlias = "dict[str, float | None]"
"""Errors by name; None: not measured."""
FIELD_BYTES = 256 * MIB
"""Decoded fields compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Errors on a validation set."""

    errors: Errors
    """By the names of `ERRORS`. Those of roll-outs are None where there was nothing to roll out, and one that
    is infinite, which JSON does not hold, is None too. Those of fields are absent without a decoder."""
    rollout_steps: int
    """Steps of the longest roll-out."""
    windows: int
    """Windows evaluated."""


def evaluate(  # noqa: PLR0913  what to judge, on what, and the rest by name
    model: LatentOperator,
    batches: Iterable[PairBatch],
    widths: Mapping[str, int],
    *,
    stride: int,
    samples: int,
    amp: bool = False,
    ranks: Ranks = SINGLE_PROCESS,
    decode: Decode | DecodeByRecord | None = None,
    raw: str | None = None,
) -> Evaluation:
    """Go once over the batches, which are this rank's part of the set; the errors are those of all ranks.

    Windows with `future` are rolled out over it. Without, the windows of `samples` trajectories are chained
    (start 0, `stride`, 2 `stride`, ...) and those are rolled out in full, if no window is missing.

    Args:
        model, amp: The operator, on its device, and whether to compute in bfloat16.
        batches, widths: The validation set, and its conditions as in training.
        stride, samples: Stored steps between z0 and z1; trajectories kept in memory for roll-outs, which
            are the first of all ranks together. Those whose windows lie on two ranks are left out.
        ranks: The processes that go over the set together.
        decode: From states to fields, to judge those as well.
        raw: The raw field that decoded predictions of one step are compared with, as batches call it at
            z1; None: decoded states. Roll-outs are always compared with those.
    """
    device = next(model.parameters()).device
    one, still, far, far_still = (_Errors(decode) for _ in range(4))
    chains = _Chains(stride, samples)
    windows = steps = 0
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
        for batch in batches:
            pairs = to_pairs(batch, widths, device)
            windows += len(pairs.z0)
            z1 = pairs.states[:, 0]
            predicted = model(pairs.z0, pairs.cond)
            numbers = pairs.index[:, 0]
            field = None if raw is None else raw_field(batch, raw, device)
            one.add(predicted, z1, numbers, field)
            still.add(model.guess(pairs.z0), z1, numbers, field)
            if pairs.states.shape[1] == 1:
                if not pairs.steady:
                    chains.add(pairs)
                continue
            steps = max(steps, pairs.states.shape[1])
            cond = pairs.cond
            for k in range(pairs.states.shape[1]):
                predicted = model(predicted, cond) if k else predicted
                cond = model.later(cond)
                far.add(predicted, pairs.states[:, k], numbers)
                far_still.add(pairs.z0, pairs.states[:, k], numbers)
        for start, truth, conds, numbers in chains.whole(_share(len(chains), samples, ranks)):
            steps = max(steps, len(truth))
            state = start
            for target, cond in zip(truth, conds, strict=True):
                state = model(state, cond)
                far.add(state, target, numbers)
                far_still.add(start, target, numbers)
    halves = [half for error in (one, still, far, far_still) for half in (error.latent, error.physical)]
    parts = [float(part) for half in halves for part in (half.wrong, half.size)]
    *sums, windows = ranks.all_sum([*parts, windows], "the end of an evaluation")
    steps = max(int(told) for told in ranks.all_gather(str(steps), "the end of an evaluation"))
    nrmse = [_nrmse(*sums[at : at + 2]) for at in range(0, len(sums), 2)]
    found = dict(zip(ERRORS, nrmse[0::2] + ([] if decode is None else nrmse[1::2]), strict=False))
    errors: Errors = {
        name: value if math.isfinite(value) and (steps or "rollout" not in name) else None
        for name, value in found.items()
    }
    return Evaluation(errors=errors, rollout_steps=steps, windows=int(windows))


def _share(found: int, wanted: int, ranks: Ranks) -> int:
    """Return how many of its `found` trajectories this rank rolls out: the first `wanted` of all ranks'."""
    before = ranks.all_gather(str(found), "the roll-outs")[: ranks.rank]
    return max(0, min(found, wanted - sum(map(int, before))))


def _nrmse(wrong: float, size: float) -> float:
    """Return the error; 0 of 0 is 0."""
    return (wrong / size) ** 0.5 if size else float(wrong > 0)


class _Errors:
    """One error in latent space and, with a decoder, in physical space."""

    def __init__(self, decode: Decode | DecodeByRecord | None) -> None:
        self.latent, self.physical = _Error(), _Error()
        self._decode = decode

    def add(self, guess: Tensor, truth: Tensor, numbers: Tensor, field: Tensor | None = None) -> None:
        """Guesses and truth `(n, L, D)` of samples with these numbers `(n,)`; their raw fields, if given."""
        self.latent.add(guess, truth)
        if isinstance(self._decode, DecodeByRecord):
            host = numbers.cpu()
            for number in host.unique().tolist():
                own = (host == number).nonzero()[:, 0].to(guess.device)
                pair = (self._decode.of(number, states.index_select(0, own)) for states in (guess, truth))
                self.physical.add(*pair)
        elif self._decode is not None and len(truth):
            # Fields in three dimensions can be a thousand times larger than their states.
            count = max(1, FIELD_BYTES // self._decode(truth[:1]).nbytes)
            for at in range(0, len(truth), count):
                part = slice(at, at + count)
                true = self._decode(truth[part]) if field is None else field[part]
                self.physical.add(self._decode(guess[part]), true)


class _Error:
    """Sums of squares that stay on the device until the end: no wait for a GPU per batch."""

    def __init__(self) -> None:
        self.wrong: Tensor | float = 0.0
        self.size: Tensor | float = 0.0

    def add(self, guess: Tensor, truth: Tensor) -> None:
        self.wrong = self.wrong + (guess - truth).double().square().sum()
        self.size = self.size + truth.double().square().sum()


@dataclass(slots=True)
class _Chain:
    """Windows of one trajectory by their place in the chain."""

    first: Tensor | None = None
    states: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    conds: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class _Chains:
    """Trajectories put together from their windows, in whatever order these come."""

    def __init__(self, stride: int, samples: int) -> None:
        self._stride = stride
        self._samples = samples
        self._chains: dict[int, _Chain] = {}

    def add(self, pairs: Pairs) -> None:
        """Keep those of a batch that belong to a chain."""
        for row, (number, start) in enumerate(pairs.index.tolist()):
            if start % self._stride or (number not in self._chains and len(self._chains) >= self._samples):
                continue
            chain = self._chains.setdefault(number, _Chain())
            chain.states[start // self._stride] = pairs.states[row, 0]
            chain.conds[start // self._stride] = pairs.cond[row]
            if start == 0:
                chain.first = pairs.z0[row]

    def __len__(self) -> int:
        """Trajectories met, up to as many as are wanted."""
        return len(self._chains)

    def whole(self, count: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the first `count` of them, by length: states `(n, L, D)` that they begin with, truth
        `(steps, n, L, D)`, conditions `(steps, n, C)` and sample numbers `(n,)`.

        A chain with a gap is left out: its first steps alone would look like a complete roll-out.
        """
        by_length: dict[int, list[_Chain]] = {}
        numbers: dict[int, list[int]] = {}
        for number, chain in islice(self._chains.items(), count):
            length = next(k for k in range(len(chain.states) + 1) if k not in chain.states)
            if chain.first is not None and length == len(chain.states):
                by_length.setdefault(length, []).append(chain)
                numbers.setdefault(length, []).append(number)
        return [
            (
                torch.stack([chain.first for chain in chains if chain.first is not None]),
                torch.stack([torch.stack([chain.states[k] for k in range(length)]) for chain in chains], 1),
                torch.stack([torch.stack([chain.conds[k] for k in range(length)]) for chain in chains], 1),
                torch.tensor(numbers[length], device="cpu"),
            )
            for length, chains in by_length.items()
        ]


# ----------------------------------------------------------------------------------------------------------
# What a validation comes to: the errors of one task, or those of each of several and their means.
#
# All errors are kept side by side, `val_nrmse` and for a task `val_nrmse/<task>`: so they go through
# metrics, checkpoints and pictures like any other figure.


Validation: TypeAlias = "PairLoader | Mapping[str, PairLoader | None] | None"
"""What is validated on: one set, or one for each task; None where this rank has no part of it."""

LOST = "reconstruction_nrmse"
OF_TASK = "/"
"""Stands between the name of an error and that of the task."""


def judge(loader: Validation, errors_of: Callable[[PairLoader | None, str], Errors]) -> Errors:
    """Return the errors on a set; of several tasks each one's, and their means without weights.

    An error that only some tasks have (their encoder has a decoder) has no mean.

    Args:
        loader: The set, or the sets by task.
        errors_of: Measures the errors on one set, that of a task (empty: there is one set); called for every
            task, in their order, on every rank.
    """
    if not isinstance(loader, Mapping):
        return errors_of(loader, "")
    found = {task: errors_of(one, task) for task, one in loader.items()}
    first, *others = found.values()
    shared = [name for name in first if all(name in other for other in others)]
    errors: Errors = {name: mean([own[name] for own in found.values()]) for name in shared}
    for task, own in found.items():
        errors |= {f"{name}{OF_TASK}{task}": error for name, error in own.items()}
    return errors


def by_task(errors: Mapping[str, float | None]) -> dict[str, Errors]:
    """Return the errors of each task by their names; empty where there is only one task.

    >>> by_task({"val_nrmse": 2.0, "val_nrmse/a": 1.0, "val_nrmse/b": 3.0})
    {'a': {'val_nrmse': 1.0}, 'b': {'val_nrmse': 3.0}}
    """
    found: dict[str, Errors] = {}
    for key, error in errors.items():
        name, mark, task = key.partition(OF_TASK)
        if mark:
            found.setdefault(task, {})[name] = error
    return found


def with_lost(errors: Mapping[str, float | None], spaces: Mapping[str, PhysicalSpace]) -> Errors:
    """Return the errors, and what each task's encoder loses, with its mean."""
    lost = {task: space.reconstruction() for task, space in spaces.items()}
    tasks = by_task(errors).keys() or {""}
    own = {f"{LOST}{OF_TASK}{task}" if task else LOST: value for task, value in lost.items()}
    return {**errors, LOST: mean([lost.get(task) for task in tasks]), **own}


def mean(errors: list[float | None]) -> float | None:
    """Return the mean of errors that are all known."""
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known and len(known) == len(errors) else None
