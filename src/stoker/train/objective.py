"""Losses of the operator on latents, stage by stage, and its validation.

Inverse encoding and inverse decoding are those of Universal Physics Transformers (Alkin et al., 2024), with
an encoder E that is frozen and a decoder D that is trained:

- inverse encoding: `D(E(x))` is close to `x`. `E(x)` is the stored state z0, `x` the stored raw field.
- inverse decoding: `E(D(z))` is close to `z`, for the state `z` that the operator predicts for z1. So its
  predictions stay states that some field has.

A `consistency` stage unrolls the operator over all K states of a window, so that it meets its own errors.
This is as in Brandstetter et al., 2022, but with gradients through all steps. It adds two agreements:

- Of starts: K steps from z0 and K - 1 steps from the true z1 end in the same state. Points of one trajectory
  have one end (Song et al., 2023).
- Of step splits, where each example draws its stride: one step of twice the stride is two steps of it,
  `f_2dt(z) = f_dt(f_dt(z))` (Frans et al., 2024). This is for examples whose doubled stride is drawn too.

In both the second side is the target, and has no gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.encoders.grid import Decode, DecodeByRecord
from stoker.schema import Json
from stoker.train.config import FieldSpace, PhysicalSpace, TrainConfig, TrainStage
from stoker.train.loop import Losses, PassSummary, Stepper, StepResult, TrainProgress
from stoker.train.operator import (
    FieldDecoder,
    LatentOperator,
    OperatorShape,
    PairBatch,
    PairLoader,
    Pairs,
    raw_field,
    to_pairs,
)
from stoker.train.state import Checkpoint, dump_optimizer, make_optimizer, numerics_of
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
        """Return the number of trajectories met, up to as many as are wanted."""
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
"""Validation data: one set, or one for each task; None where this rank has no part of it."""

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


# ----------------------------------------------------------------------------------------------------------
# What is learned: the stages and their losses.


DOUBLED = ("stride", "dt")
"""Conditions that are twice as large for a step of twice the stride."""


class StageLoss(nn.Module):
    """The loss of a stage per example as a module's call, which is what data parallel training wraps."""

    def __init__(
        self,
        operator: LatentOperator,
        stage: TrainStage | None = None,
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
        self._stage = stage or TrainStage()
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
        """Return the loss per example, `(B,)`.

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
        """Return how far predictions of one state are apart, `(B,)`."""
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
    """Return mean over steps, of those that count."""
    total = torch.zeros_like(errors[0])
    for k, error in enumerate(errors):
        total = total + (error if mask is None else error * mask[:, k])
    return total / (len(errors) if mask is None else mask[:, : len(errors)].sum(1))


# ----------------------------------------------------------------------------------------------------------
# The operator and its decoder in training.


DECODER = "decoder."
"""Begins the names of the decoder's weights in a checkpoint."""


@dataclass(slots=True, kw_only=True)
class OperatorProgress(TrainProgress):
    """Progress of a run of the operator."""

    loss_sum: float = 0.0
    """Sum of the losses of the batches of this pass."""
    best_val: float | None = None
    """Lowest `val_nrmse` of all stages."""
    stages: list[dict[str, Json]] = field(default_factory=list["dict[str, Json]"])
    """The stages that ended, as in `TrainReport`."""


@dataclass(slots=True, kw_only=True)
class OperatorObjective:
    """Everything that a checkpoint holds, alive."""

    config: TrainConfig
    model: LatentOperator
    shape: OperatorShape
    widths: dict[str, int]
    """Numbers per example of each condition, in the order in which the operator takes them."""
    device: torch.device
    ranks: Ranks
    decoder: FieldDecoder | None = None
    """From states to fields, in a run some stage of which trains it."""
    space: FieldSpace | None = None
    """Data that the decoder is trained with."""
    validation: Validation = None
    """The data that `evaluate` measures errors on."""
    physical: Mapping[str, PhysicalSpace] = field(default_factory=dict[str, PhysicalSpace])
    """How that is done in fields, by task; of one alone under an empty name."""
    progress: OperatorProgress = field(default_factory=OperatorProgress)
    optimizer: Any = field(init=False)
    """`torch.optim.AdamW`, whose methods carry no types."""
    loss_sum: Tensor = field(init=False)
    """`progress.loss_sum` on the device, float64; of this rank's examples."""
    _recent: Tensor = field(init=False)
    """The same since the last `step` line."""
    _logged: int = 0
    """Step of that line, or at which this pass began."""

    def __post_init__(self) -> None:
        """Have the weights of the stage in `progress` move, by an optimizer of its own."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._recent = torch.zeros_like(self.loss_sum)
        self._free()

    def begin_stage(self, number: int) -> None:
        """Continue with stage `number`."""
        progress = self.progress
        progress.stage, progress.stage_step, progress.stage_epoch = number, progress.step, progress.epoch
        progress.best, progress.best_epoch = None, progress.epoch
        self._free()

    def _free(self) -> None:
        """Give the weights of this stage gradients and an optimizer, and others none."""
        self.model.requires_grad_(self.stage.trains_operator)
        if self.decoder is not None:
            self.decoder.requires_grad_(self.stage.trains_decoder)
        self.optimizer = make_optimizer(self._trained, self.config)

    @property
    def stage(self) -> TrainStage:
        """The stage that the run is in."""
        return self.config.all_stages[self.progress.stage]

    @property
    def _trained(self) -> nn.ModuleList:
        """The models whose weights move in this stage."""
        stage = self.stage
        found: list[nn.Module] = [self.model] if stage.trains_operator else []
        return nn.ModuleList([*found, *([self.decoder] if self.decoder and stage.trains_decoder else [])])

    @property
    def _amp(self) -> bool:
        """True if losses are computed in bfloat16."""
        return self.device.type == "cuda" if self.config.amp is None else self.config.amp

    @property
    def numerics(self) -> dict[str, Json]:
        """Settings that decide the last bits of a step, in addition to those of the run."""
        return numerics_of(self.device, self._amp)

    @property
    def facts(self) -> dict[str, Json]:
        """The facts to report when a stage starts."""
        count = sum(p.numel() for p in self.model.parameters())
        return {"stage": self.stage.name, "parameters": count, **self.numerics}

    def stepper(self, ranks: Ranks = SINGLE_PROCESS, stopped: Callable[[], bool] = lambda: False) -> Stepper:
        """Return what moves the weights of this stage, its gradients being means over `ranks`."""
        return Stepper(
            losses=partial(self._losses, loss=ranks.data_parallel(self._loss())),
            models=[*self._trained],
            optimizer=self.optimizer,
            grad_clip=self.config.grad_clip,
            device=self.device,
            amp=self._amp,
            ranks=ranks,
            stopped=stopped,
        )

    def _loss(self) -> StageLoss:
        """Return the loss of this stage."""
        at, columns = 0, dict[str, int]()
        for name, width in self.widths.items():
            if width == 1:
                columns[name] = at
            at += width
        return StageLoss(
            self.model,
            self.stage,
            decoder=self.decoder if self.stage.trains_decoder else None,
            encode=None if self.space is None else self.space.encode,
            columns=columns,
            most_stride=self.config.most_stride,
        )

    def _losses(self, batch: PairBatch, loss: nn.Module) -> Losses:
        """Return the losses of a batch by `loss`, a module as `_loss` gives it, maybe wrapped."""
        pairs, fields = to_pairs(batch, self.widths, self.device), None
        if self.decoder is not None and self.space is not None and self.stage.trains_decoder:
            names = (f"{self.space.field}{k}" for k in (0, 1))
            fields = tuple(raw_field(batch, name, self.device) for name in names)
        errors = loss(pairs.z0, pairs.states, pairs.cond, pairs.mask, fields)
        return Losses(errors, pairs.index, getattr(batch, "task", None))

    def twin(self) -> OperatorObjective:
        """Return a copy of everything that a step changes."""
        twin = replace(
            self,
            model=copy.deepcopy(self.model),
            decoder=copy.deepcopy(self.decoder),
            progress=copy.deepcopy(self.progress),
        )
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return twin

    def begin_pass(self, *, resumed: bool) -> None:
        """Zero the sums of a pass, and those between two lines."""
        if not resumed:
            self.loss_sum.zero_()
        self._recent.zero_()
        self._logged = self.progress.step

    def count(self, done: StepResult, lr: float, log_every: int) -> tuple[str, dict[str, Json]] | None:
        """Add the loss of a step; return the event `step` every `log_every` steps."""
        for total in (self.loss_sum, self._recent):
            total.add_(done.mean)
        progress = self.progress
        if progress.step % log_every:
            return None
        loss = self.ranks.all_mean(self._recent, f"step {progress.step + 1}")
        row: dict[str, Json] = {
            "step": progress.step,
            "epoch": progress.epoch + 1,
            "loss": float(loss) / (progress.step - self._logged),
            "lr": lr,
            "grad_norm": float(done.norm),
        }
        self._recent.zero_()
        self._logged = progress.step
        return "step", row

    def evaluate(self, interruptible: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        """Measure the errors on the validation set, of several tasks on that of each."""

        def errors(loader: PairLoader | None, task: str) -> Errors:
            if loader is not None:
                loader.set_epoch(0)
            decode = self.physical[task].decode if task in self.physical else None
            return evaluate(
                self.model,
                interruptible(() if loader is None else loader),
                self.widths,
                stride=self.config.stride,
                samples=self.config.rollout_samples,
                amp=self._amp,
                ranks=self.ranks,
                decode=decode if self.decoder is None else self.decoder,
                raw=None if self.decoder is None or self.space is None else f"{self.space.field}1",
            ).errors

        progress = self.progress
        progress.errors = judge(self.validation, errors)
        latent = progress.errors.get("val_nrmse")
        if latent is not None:
            progress.best_val = latent if progress.best_val is None else min(progress.best_val, latent)

    @property
    def error(self) -> float | None:
        """The error of one step: of states, and where a decoder is trained of fields."""
        return self.progress.errors.get("physical_nrmse" if self.stage.name == "decoder" else "val_nrmse")

    def epoch_row(self, figures: PassSummary) -> dict[str, Json]:
        """Return the line of a pass; all ranks ask for it."""
        progress = self.progress
        loss = self.ranks.all_mean(self.loss_sum, "the end of an epoch")
        return {
            "epoch": figures.epoch,
            "step": progress.step,
            "loss": float(loss) / max(1, progress.batch),
            **progress.errors,
            "stall": figures.stall,
            "seconds": round(figures.train_s, 3),
            "eval_seconds": round(figures.eval_s, 3),
        }

    def checkpoint(self, place: Mapping[str, Any]) -> Checkpoint | None:
        """Return all that it takes to continue, on rank 0; all ranks ask for it."""
        self.progress.loss_sum = float(self.ranks.all_mean(self.loss_sum, "a checkpoint"))
        if not self.ranks.is_rank_zero:
            return None
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "loader": dict(place),
            "config": asdict(self.config),
            "stage": self.stage.name,
            "shape": asdict(self.shape),
            "decoder": None if self.decoder is None else asdict(self.decoder.shape),
            "widths": self.widths,
            "numerics": self.numerics,
        }
        own = {} if self.decoder is None else self.decoder.state_dict()
        return Checkpoint(
            step=self.progress.step,
            model={**self.model.state_dict(), **{DECODER + name: value for name, value in own.items()}},
            optimizer=dump_optimizer(self.optimizer, self.device),
            state=state,
        )
