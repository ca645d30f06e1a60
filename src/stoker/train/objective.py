"""What `train` teaches the operator on latents, and the loss of each of its stages.

Inverse encoding and inverse decoding are those of Universal Physics Transformers (Alkin et al., 2024), with
an encoder E that is frozen and a decoder D that is trained:

- inverse encoding: `D(E(x))` is close to `x`. `E(x)` is the stored state z0, `x` the stored raw field.
- inverse decoding: `E(D(z))` is close to `z`, for the state `z` that the operator predicts for z1. So its
  predictions stay states that some field has.

A `consistency` stage unrolls the operator over all K states of a window, so that it meets its own errors (as
in Brandstetter et al., 2022, but with gradients through all steps). It adds two agreements:

- Of starts: K steps from z0 and K - 1 steps from the true z1 end in the same state. Points of one trajectory
  have one end (Song et al., 2023).
- Of step splits, where each example draws its stride: one step of twice the stride is two steps of it,
  `f_2dt(z) = f_dt(f_dt(z))` (Frans et al., 2024). This is for examples whose doubled stride is drawn too.

In both the second side is the target, and has no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.schema import Json
from stoker.train.config import FieldSpace, PhysicalSpace, TrainConfig, TrainStage
from stoker.train.evaluate import Errors, Validation, evaluate, judge
from stoker.train.loop import PassSummary, TrainProgress
from stoker.train.operator import (
    FieldDecoder,
    LatentOperator,
    OperatorShape,
    PairBatch,
    PairLoader,
    raw_field,
    to_pairs,
)
from stoker.train.state import Checkpoint, dump_optimizer, make_optimizer, numerics_of
from stoker.train.step import Losses, Stepper, StepResult

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
    """What `evaluate` measures errors on."""
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
        """Go on to stage `number`."""
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
