"""Train a module on batches of whole records: rows, images, whatever has a loss for each example.

It is the loop that trains the operator on latents (`stoker.train.loop`), with another objective. A run that
was killed ends with the same weights, bit for bit on one CPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import ConfigError, DivergedError, StaleStateError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.runtime.files import make_folder, replace_atomically
from stoker.schema import Json
from stoker.train.config import EventSink, TrainConfig, TrainStage
from stoker.train.loop import (
    Losses,
    PassSummary,
    StallRecorder,
    Stepper,
    StepResult,
    StopFlag,
    TrainLoop,
    TrainProgress,
    ignore_event,
)
from stoker.train.run import LEAST_LR
from stoker.train.state import (
    Checkpoint,
    MetricsLog,
    checkpoint_to_resume,
    dump_optimizer,
    make_optimizer,
    numerics_of,
    restore_optimizer,
)


class Learner(Protocol):
    """Module to train, its loss, and how it is judged."""

    @property
    def model(self) -> nn.Module:
        """On the device where batches are."""
        ...

    def losses(self, batch: Mapping[str, Tensor], /) -> Tensor:
        """Return the loss of each example, `(B,)`."""
        ...

    def judge(self, batches: Iterable[Mapping[str, Tensor]], /) -> Mapping[str, float]:
        """Figures over a validation set; `val_loss` is among them. The module stays in training mode."""
        ...


@dataclass(slots=True, kw_only=True)
class RecordProgress(TrainProgress):
    """Progress of a run on records."""

    examples: int = 0
    """Examples of this pass so far."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of this pass: losses of examples, gradient norms of batches."""
    epochs: int = 0
    """Passes that were asked for."""
    extended: int = 0
    """Passes finished when more were asked for than before: patience begins again there."""
    row: dict[str, Json] = field(default_factory=dict[str, Json])
    """Figures of the last finished epoch."""

    @property
    def epochs_without_better(self) -> int:
        """Passes since the best evaluation, or since more passes were asked for."""
        return self.epoch - max(self.best_epoch, self.extended)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Results of a finished run."""

    epochs: int
    steps: int
    best: float | None
    """Lowest validation loss."""
    best_epoch: int
    """Epoch that it is of; 0 without validation."""
    row: Mapping[str, Json]
    """Figures of the last epoch, as the `epoch` event had them."""
    progress: RecordProgress


BATCH_EVERY_S = 1.0
"""Seconds between two `batch` events, at least."""


def fit(  # noqa: PLR0913  the face: what is learned, from what, and all else by name
    learner: Learner,
    train: Loader,
    val: Loader | None,
    config: TrainConfig,
    *,
    folder: Path | None = None,
    expected: bool = False,
    meter: StallMeter | None = None,
    on_event: EventSink | None = None,
    log: MetricsLog | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> FitReport:
    """Train in place, continuing from the newest complete checkpoint in `folder`.

    Args:
        learner: What is learned.
        train, val: Batches; None: no validation.
        config: How; what is of the operator alone counts for nothing here.
        folder: Checkpoints are kept here, see `TrainConfig.save_every_s`; None: none are.
        expected: There was a checkpoint, so that a missing one is an error.
        meter: The one that `train` writes into.
        on_event: Told of `start resume skip batch stall epoch checkpoint best stop`.
        log: Gets the lines of `metrics.jsonl`; then `step` is told and written in place of `batch`, and the
            meter's lines go next to it. None: nothing is written.
        on_batch: Called when a batch is there, before its step.

    Raises:
        ConfigError: `train` has no batch, or patience without validation.
        CorruptError: No checkpoint is complete, and there was one.
        DivergedError: A loss or gradient is not finite; names epoch, step and sample.
        Interrupted: SIGTERM or SIGINT; with a folder, a checkpoint was written first.
        StaleStateError: The checkpoint is of another network, or of other data.
    """
    if not len(train):
        raise ConfigError("the training set has no batch", hint="Expected at least one row")
    if config.patience and val is None:
        raise ConfigError(
            f"TrainConfig.patience is {config.patience}, and early stopping needs a validation set",
            hint="Give one, or leave patience out",
        )
    tell = on_event or ignore_event
    objective = _RecordObjective(
        learner=learner, train=train, val=val, config=config, by_step=log is not None
    )
    with StopFlag() as stop:
        if folder is not None:
            root = folder / "checkpoints"
            found = checkpoint_to_resume(root, lambda why: tell("skip", {"why": why}), expected=expected)
            if found is not None:
                objective.restore(found, root)
                done = objective.progress
                facts = {"step": done.step, "epoch": done.epoch + 1, "row": done.row}
                tell("resume", {**facts, "path": str(found.folder)})
                if log is not None:
                    log.keep(lambda row: row.get("step", 0) <= done.step)
        progress = objective.progress
        progress.epochs = config.epochs
        loop = TrainLoop(
            objective=objective,
            loader=train,
            config=config,
            folder=folder,
            stop=stop,
            log=log or MetricsLog(Path(), writes=False),
            validates=val is not None,
            tell=tell,
            meter=meter,
            recorder=StallRecorder(meter, None if log is None else log.path.parent, tell),
            on_batch=on_batch,
        )
        loop.train_stage("start")
        loop.recorder.close(progress)
    return FitReport(
        epochs=progress.epoch,
        steps=progress.step,
        best=progress.best,
        best_epoch=progress.best_epoch,
        row=progress.row,
        progress=progress,
    )


def steps_of(learner: Learner, loader: Loader, config: TrainConfig) -> Callable[[Any], object]:
    """Return a function that takes one complete training step on a batch of `loader`, and keeps nothing."""
    stepper = _RecordObjective(learner=learner, train=loader, val=None, config=config).stepper()
    return partial(stepper.step, rate=LEAST_LR, epoch=1, number=1)


@dataclass(slots=True, kw_only=True)
class _RecordObjective:
    """A learner in training."""

    learner: Learner
    train: Loader
    val: Loader | None
    config: TrainConfig
    by_step: bool = False
    """Tell `step` every so many steps, and not `batch` once a second."""
    progress: RecordProgress = field(default_factory=RecordProgress)
    device: torch.device = field(init=False)
    optimizer: Any = field(init=False)
    sums: Tensor = field(init=False)
    """`progress.sums` on the device, float64."""
    _begun: int = 0
    """Examples of this pass when this call began with it."""
    _told_s: float = 0.0
    """When the last `batch` event was, or the pass began."""
    _told: tuple[float, int] = (0.0, 0)
    """Sum of losses and examples of the pass at the last `step` event."""

    def __post_init__(self) -> None:
        """Make an optimizer for the module, where it is."""
        model = self.learner.model.train()
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, self.config)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    @property
    def stage(self) -> TrainStage:
        """The only one."""
        return self.config.all_stages[0]

    @property
    def facts(self) -> dict[str, Json]:
        """Facts to report at the start."""
        count = sum(p.numel() for p in self.learner.model.parameters())
        return {"parameters": count, **numerics_of(self.device, False)}

    def stepper(self, ranks: Ranks = SINGLE_PROCESS, stopped: Callable[[], bool] = lambda: False) -> Stepper:
        """Return what moves the module's weights."""
        return Stepper(
            losses=self._losses,
            models=[self.learner.model],
            optimizer=self.optimizer,
            grad_clip=self.config.grad_clip,
            device=self.device,
            ranks=ranks,
            stopped=stopped,
        )

    def _losses(self, batch: Mapping[str, Tensor]) -> Losses:
        numbers = batch["index"]
        return Losses(self.learner.losses(batch), torch.stack([numbers, torch.zeros_like(numbers)], 1))

    def twin(self) -> None:
        """Return None: a learner holds its module, so it cannot be copied without it."""

    def begin_pass(self, *, resumed: bool) -> None:
        """Zero the sums of a pass."""
        if not resumed:
            self.sums.zero_()
            self.progress.examples = 0
        self._begun, self._told_s = self.progress.examples, time.monotonic()
        self._told = (self.sums.tolist()[0], self.progress.examples)

    def count(self, done: StepResult, lr: float, log_every: int) -> tuple[str, dict[str, Json]] | None:
        """Add losses and norm of a step; return an event where it is time for one."""
        progress = self.progress
        self.sums += torch.stack([done.losses.sum(), done.norm])
        progress.examples += len(done.losses)
        if self.by_step:
            return None if progress.step % log_every else self._step_event(done, lr)
        if (now := time.monotonic()) - self._told_s < BATCH_EVERY_S:
            return None
        self._told_s = now
        loss, _ = self.sums.tolist()
        return "batch", {
            "epoch": progress.epoch + 1,
            "batch": progress.batch,
            "batches": len(self.train),
            "train_loss": loss / progress.examples,
        }

    def _step_event(self, done: StepResult, lr: float) -> tuple[str, dict[str, Json]]:
        progress, (before, examples) = self.progress, self._told
        loss, _ = self.sums.tolist()
        self._told = (loss, progress.examples)
        return "step", {
            "step": progress.step,
            "epoch": progress.epoch + 1,
            "loss": (loss - before) / (progress.examples - examples),
            "lr": lr,
            "grad_norm": float(done.norm),
        }

    def evaluate(self, interruptible: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        """Judge the weights on the validation set."""
        assert self.val is not None  # the loop asks only where there is one
        progress = self.progress
        progress.errors = dict(self.learner.judge(interruptible(self.val)))
        loss = self.error
        if loss is not None and not math.isfinite(loss):
            raise DivergedError(
                f"the validation loss of epoch {progress.epoch + 1} is {loss}",
                hint="Expected a finite number. Lower the learning rate; the last checkpoint is from before "
                "this epoch",
            )

    @property
    def error(self) -> float | None:
        """The validation loss."""
        return self.progress.errors.get("val_loss")

    def epoch_row(self, figures: PassSummary) -> dict[str, Json]:
        """Return the figures of a pass, and keep them."""
        progress = self.progress
        loss, norms = self.sums.tolist()
        rate = (progress.examples - self._begun) / figures.train_s if figures.train_s else None
        progress.row = {
            "epoch": figures.epoch,
            "step": progress.step,
            "train_loss": loss / progress.examples,
            **({"loss": loss / progress.examples} if self.by_step else {}),
            **progress.errors,
            "learning_rate": figures.lr,
            "grad_norm": norms / progress.batch,
            "stall": figures.stall,
            "samples_per_s": rate,
            "seconds": round(figures.train_s, 4),
            "tier": self.train.plan.tier,
            "eval_seconds": round(figures.eval_s, 4),
            "best_val_loss": progress.best,
            "best_epoch": progress.best_epoch,
        }
        return progress.row

    def checkpoint(self, place: Mapping[str, Any]) -> Checkpoint:
        """Return all that it takes to continue."""
        model = self.learner.model
        self.progress.sums = self.sums.tolist()
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "loader": dict(place),
            "settings": asdict(self.config),
            "shapes": _shapes(model),
        }
        optimizer = dump_optimizer(self.optimizer, self.device)
        step = self.progress.step
        return Checkpoint(step=step, model=model.state_dict(), optimizer=optimizer, state=state)

    def restore(self, found: Checkpoint, root: Path) -> None:
        """Continue from a checkpoint in `root`.

        Raises:
            StaleStateError: It is of another network, or of other data.
        """
        model, before = self.learner.model, found.state["shapes"]
        if before != (shapes := _shapes(model)):
            differ = [name for name in {*shapes, *before} if shapes.get(name) != before.get(name)]
            raise StaleStateError(
                f"the checkpoint of step {found.step} in {root} is of another network: "
                f"{', '.join(sorted(differ)[:3])}",
                hint="Start again as another run",
            )
        model.load_state_dict(dict(found.model))
        restore_optimizer(self.optimizer, self.device, found.optimizer)
        saved = found.state["progress"]
        # Checkpoints of earlier versions do not say so: batches that are counted wait to be judged.
        self.progress = progress = RecordProgress(**{"unjudged": saved["batch"] > 0, **saved})
        if progress.epochs < self.config.epochs:
            progress.epochs, progress.extended = self.config.epochs, progress.epoch
        self.sums.copy_(torch.tensor(progress.sums, dtype=torch.float64, device="cpu"))
        self.train.load_state_dict(found.state["loader"])


def _shapes(model: nn.Module) -> dict[str, Json]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


@contextmanager
def one_thread() -> Generator[None]:
    """Keep torch on one thread: steps of half a millisecond lose more to threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------
# A small network that tells the classes of images apart.


WIDTHS = (16, 32, 64)
ONE_PIXEL = 2 ** len(WIDTHS)
"""Pixels of a side up to which the layers leave one pixel of an image."""


class ImageClassifier(nn.Module):
    """Images `(B, C, H, W)` uint8 in, a score for each class out; the first layer learns their range."""

    def __init__(self, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm2d(channels)]
        before = channels
        for width in WIDTHS:
            layers += [
                nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            before = width
        self.features = nn.Sequential(*layers)
        self.score = nn.Sequential(nn.Dropout(dropout), nn.Linear(before, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, `(B, classes)`."""
        found: Tensor = self.features(images.float() / 255)
        return self.score(found.mean((2, 3)))


@dataclass(frozen=True, slots=True)
class Classification:
    """Learns the class of images, for `stoker.run.fitting`."""

    model: ImageClassifier

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy of each image, `(B,)`."""
        before, shape = self.model.training, batch["image"].shape
        if shape[0] == 1 and max(shape[-2:]) <= ONE_PIXEL:  # as the last batch of a pass may be
            self.model.eval()  # there is one value to normalize: with the statistics of earlier batches
        scores = self.model(batch["image"])
        self.model.train(before)
        return F.cross_entropy(scores, batch["label"], reduction="none")

    @torch.no_grad()
    def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the mean loss, and the part of images whose best score is that of their class."""
        before = self.model.training
        self.model.eval()
        losses: list[Tensor] = []
        right: list[Tensor] = []
        for batch in batches:
            scores = self.model(batch["image"])
            losses.append(F.cross_entropy(scores, batch["label"], reduction="none").double())
            right.append((scores.argmax(1) == batch["label"]).double())
        self.model.train(before)
        return {"val_loss": float(torch.cat(losses).mean()), "accuracy": float(torch.cat(right).mean())}


def save_model(path: Path, state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write weights, and facts about them as JSON by name, to one file; equal ones give equal bytes."""
    make_folder(path.parent)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    data = save(weights, metadata={name: json.dumps(value) for name, value in facts.items()})
    # The library writes the members of `metadata` in random order, so the header is written again, sorted.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with replace_atomically(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(memoryview(data)[end:])
