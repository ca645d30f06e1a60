"""Settings of a training run, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from stoker.errors import ConfigError, arg
from stoker.schema import Json

if TYPE_CHECKING:  # reading settings must not cost the import of torch
    from torch import Tensor

    from stoker.encoders.grid import Decode, DecodeByRecord

EventSink: TypeAlias = Callable[[str, Mapping[str, Json]], None]
"""Told what happens: a kind (`ready start resume skip stage step batch stall epoch checkpoint best stop
done`), and its facts."""


BatchT_co = TypeVar("BatchT_co", covariant=True)


class BatchLoader(Protocol[BatchT_co]):
    """A loader that can save its place. A finished pass moves it to the next epoch automatically."""

    def __iter__(self) -> Iterator[BatchT_co]:
        """Yield one pass, or the rest of the pass that a loaded state began."""
        ...

    def __len__(self) -> int:
        """Return the number of batches of a complete pass."""
        ...

    def set_epoch(self, epoch: int, /) -> None:
        """Begin this epoch at its first batch with the next pass."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the place after the batches handed out so far; can be written as JSON."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Continue from a saved state."""
        ...


Schedule: TypeAlias = Literal["cosine", "constant"]
"""Course of the learning rate after its rise: fall to a hundredth, or stay."""

StageName: TypeAlias = Literal["operator", "decoder", "consistency"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""The stages that there are; a run has some of them, each once, `operator` first."""


def _number(default: Any, *, least: float | None = None, most: float = math.inf, whole: bool = False) -> Any:
    """Return a setting that is a finite number from `least` to `most`; above 0 where `least` is None."""
    return field(default=default, metadata={"least": least, "most": most, "whole": whole})


def _count(default: int | None, *, least: int = 1) -> Any:
    """Return a setting that is a whole number of at least `least`."""
    return _number(default, least=least, whole=True)


def _check_numbers(settings: TrainStage | TrainConfig) -> None:
    """Refuse numbers that are out of range.

    Raises:
        ConfigError: Names the setting, its value, and what is expected.
    """
    for one in fields(settings):
        value: Any = getattr(settings, one.name)
        if not one.metadata or (value is None and str(one.type).endswith("| None")):
            continue
        least, most, whole = (one.metadata[name] for name in ("least", "most", "whole"))
        if not isinstance(value, (int,) if whole else (int, float)) or not (
            math.isfinite(value) and (least or 0) <= value <= most and (value or least is not None)
        ):
            bound = "above 0" if least is None else f"of at least {least}"
            bound += f" and at most {most}" if math.isfinite(most) else ""
            kind = "whole number" if whole else "number"
            raise ConfigError(
                f"{type(settings).__name__}.{one.name} is {value!r}", hint=f"Expected a {kind} {bound}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStage:
    """A part of a run with a loss, a length and a learning rate of its own.

    - `operator`: the operator learns the next states.
    - `decoder`: a decoder from states to fields learns from stored raw fields, on true states and on those
      that the operator predicts.
    - `consistency`: the operator is unrolled over the loader's horizon, and its predictions of one state from
      different starts and step splits are made to agree (`objective.py`).

    Raises:
        ConfigError: A number is out of range, or the name is unknown.
    """

    name: StageName = "operator"
    epochs: int = _count(10)
    """Passes over its loader."""
    lr: float = _number(1e-3)
    """Peak learning rate; rise and decay are those of the stage."""
    patience: int | None = _count(None)
    """Epochs without a better error after which it ends; of `decoder` in physical space, else of states."""
    freeze_operator: bool = True
    """Of `decoder`: the operator stays as it is."""
    lambda_inv_enc: float = _number(0.0, least=0)
    """Weight of the inverse-encoding loss; a `decoder` stage has 1 if this is 0."""
    lambda_inv_dec: float = _number(0.0, least=0)
    """Weight of the inverse-decoding loss."""
    lambda_consistency: float = _number(1.0, least=0)
    """Of `consistency`: weight of the agreement between predictions."""

    def __post_init__(self) -> None:
        """Check names and ranges."""
        if self.name not in STAGES:
            raise ConfigError(f"stage {self.name!r} is unknown", hint=f"Known: {', '.join(STAGES)}")
        _check_numbers(self)

    @property
    def trains_operator(self) -> bool:
        """True if the stage changes the operator's weights."""
        return self.name != "decoder" or not self.freeze_operator

    @property
    def trains_decoder(self) -> bool:
        """True if the stage changes the decoder's weights."""
        return self.name == "decoder" or self.lambda_inv_enc > 0 or self.lambda_inv_dec > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings that say how to train.

    Raises:
        ConfigError: A number is out of range.
    """

    epochs: int = _count(10)
    """Passes over the training loader."""
    max_steps: int | None = _count(None)
    """Steps after which training ends whatever `epochs` says; None: no limit."""
    lr: float = _number(1e-3)
    """Peak learning rate of AdamW."""
    warmup: float = _number(0.05, least=0, most=1)
    """Part of all steps over which the rate rises, 0..1."""
    schedule: Schedule = "cosine"
    """Course of the rate after that."""
    weight_decay: float = _number(1e-4, least=0)
    """Of AdamW, on matrices only."""
    grad_clip: float | None = _number(1.0)
    """Largest norm of the gradient; None: as it comes."""
    seed: int = _count(0, least=0)
    """Decides the first weights. The order of examples is the loader's."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:<i>`, or `auto`, which takes a GPU where there is one."""
    amp: bool | None = None
    """Compute in bfloat16 where that is safe; None: on CUDA only."""
    width: int = _count(128)
    """Width of the operator; a multiple of `heads`."""
    depth: int = _count(3)
    """Layers of the operator."""
    heads: int = _count(4)
    """Attention heads."""
    scale_batches: int = _count(16)
    """Batches read beforehand to learn the scales of states and steps."""
    log_every: int | None = _count(None)
    """Steps between two `step` lines; None: 50, or a fortieth of all steps where that is less."""
    checkpoint_every: int | None = _count(500)
    """Steps between two checkpoints within an epoch; None: only at each epoch's end."""
    save_every_s: float = _number(0.0, least=0)
    """Seconds between two checkpoints at epochs' ends, at least: where epochs take a tenth of that, saving
    each would cost more than training. The last epoch, and where training is stopped, are always saved."""
    patience: int | None = _count(None)
    """Epochs without a better validation error after which training ends; None: all epochs."""
    delta: float = _number(0.0, least=0)
    """How much lower a validation error has to be to count as better."""
    stride: int = _count(1)
    """Stored steps between z0 and z1, as in the loader's windows; whole trajectories are chained by it."""
    rollout_samples: int = _count(8, least=0)
    """Trajectories rolled out in validation when windows carry no `future`; 0 for none."""
    most_stride: int = _count(1)
    """The largest stride where loaders draw it; in a `consistency` stage two steps are then one of twice the
    stride, up to this one."""
    lambda_inv_enc: float = 0.0
    """Weight of the inverse-encoding loss where there are no `stages`."""
    lambda_inv_dec: float = 0.0
    """Weight of the inverse-decoding loss there."""
    stages: tuple[TrainStage, ...] = ()
    """Parts of the run, in order; none: one of `operator` with the `epochs`, `lr` and `patience` above."""
    resume: bool = False
    """Continue from the newest valid checkpoint of the run's folder, if there is one."""

    @property
    def all_stages(self) -> tuple[TrainStage, ...]:
        """The stages, at least one."""
        return self.stages or (
            TrainStage(
                epochs=self.epochs,
                lr=self.lr,
                patience=self.patience,
                lambda_inv_enc=self.lambda_inv_enc,
                lambda_inv_dec=self.lambda_inv_dec,
            ),
        )

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _check_numbers(self)
        if self.schedule not in get_args(Schedule):
            known = ", ".join(get_args(Schedule))
            raise ConfigError(f"TrainConfig.schedule is {self.schedule!r}", hint=f"Known: {known}")
        if self.width % self.heads:
            raise ConfigError(
                f"TrainConfig.width {self.width} is not a multiple of heads {self.heads}",
                hint=f"Use {arg('width', -(-self.width // self.heads) * self.heads)}",
            )
        _ = self.all_stages  # checked as they are made


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalSpace:
    """Map for validation from states to the fields that they stand for."""

    decode: Decode | DecodeByRecord
    """From states `(..., L, D)` to fields; by record where its points decide where the fields are."""
    reconstruction: Callable[[], float | None]
    """Error of encoder and storage, asked for once when training is over; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpace:
    """Data that a decoder is trained with: the raw field, and the encoder's maps to states and back."""

    field: str
    """Name of the raw field. Batches carry it as `cond[field + "0"]` at z0 and `cond[field + "1"]` at z1."""
    decode: Decode | None = None
    """The encoder's exact decoder, which training begins with; None: it begins with the mean field."""
    encode: Callable[[Tensor], Tensor] | None = None
    """From fields `(B, *field)` to states `(B, L, D)`, with gradients; None: there is no
    inverse-decoding loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Results of a finished run."""

    tier: str
    """Tier that served most examples; empty where nothing measured it."""
    stall: float | None
    """Waiting for data as a part of waiting and stepping, 0..1; None without a meter."""
    step_s: float | None
    """Seconds of one step, loading left out; None without a meter."""
    epochs: int
    """Passes finished, those before a resume included."""
    steps: int
    """Optimizer steps, those before a resume included."""
    val_nrmse: float | None
    """One-step error on the validation set: root of summed squared error over that of z1."""
    best_val_nrmse: float | None
    """The lowest of all epochs; its weights are in the checkpoint `best`."""
    persistence_nrmse: float | None
    """The same error of the guess z1 = z0."""
    rollout_nrmse: float | None
    """Error over whole roll-outs, each step fed with the last prediction."""
    rollout_persistence_nrmse: float | None
    """The same error of the guess that nothing changes after z0."""
    run_dir: Path
    """Folder with `metrics.jsonl`, `curves.png`, `report.html` and `checkpoints`."""
    startup: dict[str, float]
    """Seconds from the call: `first_batch_s` until the first batch was there."""
    tasks: dict[str, dict[str, float | None]] = field(default_factory=dict[str, "dict[str, float | None]"])
    """The errors above for each task, where several are trained on; those above are then their means."""
    stages: list[dict[str, Json]] = field(default_factory=list["dict[str, Json]"])
    """Each stage that ended: `name`, `epochs`, `steps`, and the errors above as they were at its end."""
    finished: bool = True
    """True if no stage is left to do."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds waited for data, by what for: `fetch`, `read`, `gather`, `copy`, `transform`, `wait`."""
    ceiling_step_s: float | None = None
    """Seconds of a step that never waits, measured in this run; None: the run was too short for it."""
    lost: float | None = None
    """How far the run was below that ceiling, 0..1: waiting, and whatever made its steps longer."""
    physical_nrmse: float | None = None
    """One-step error of decoded fields against decoded truth; None without a decoder."""
    physical_persistence_nrmse: float | None = None
    """The same error of the guess z1 = z0."""
    physical_rollout_nrmse: float | None = None
    """Error of decoded roll-outs."""
    physical_rollout_persistence_nrmse: float | None = None
    """The same error of the guess that nothing changes after z0."""
    reconstruction_nrmse: float | None = None
    """Error of encoder and storage: decoded records against their raw fields; None: not measured."""
    target: str | None = None
    """Field that was learned, of records without time; then `persistence_nrmse` is the error of its mean."""
    val_loss: float | None = None
    """Loss on the validation set, of records without time."""
    best_val_loss: float | None = None
    """The lowest of all epochs; its weights are in the checkpoint `best`."""
    accuracy: float | None = None
    """Part of the validation set whose class was named, 0..1; None: numbers are predicted."""
    baseline_accuracy: float | None = None
    """The same of the guess that all have the most common class."""
