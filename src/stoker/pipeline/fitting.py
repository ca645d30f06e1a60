"""Train a module on batches of whole records: rows, images, whatever has a loss for each example.

The operator on latents has a loop of its own (`stoker.train`), with windows, roll-outs and ranks; this one is
for the rest. A step depends on weights, optimizer state, random state, batch and step number alone, and all
of these are in a checkpoint: a run that was killed ends with the same weights, bit for bit on one CPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.errors import ConfigError, DivergedError, Interrupted, StaleStateError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.runtime.files import make_folder, replacing
from stoker.schema import Json
from stoker.train.config import EventSink, TrainConfig
from stoker.train.guard import StopFlag
from stoker.train.run import (
    Checkpoint,
    Kind,
    checkpoint_to_resume,
    dump_optimizer,
    make_optimizer,
    numerics_of,
    restore_optimizer,
    save_checkpoint,
)
from stoker.train.step import Losses, Stepper, learning_rate

# ----------------------------------------------------------------------------------------------------------
# What is learnt, how, and what came of it: the words of `fitting.py`.


class Lesson(Protocol):
    """What is learnt: a module, its loss, and how it is judged."""

    @property
    def model(self) -> nn.Module:
        """On the device where batches are."""
        ...

    def losses(self, batch: Mapping[str, Tensor], /) -> Tensor:
        """Loss of each example, `(B,)`."""
        ...

    def judge(self, batches: Iterable[Mapping[str, Tensor]], /) -> Mapping[str, float]:
        """Figures over a validation set; `val_loss` is among them. The module stays in training mode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How to train."""

    epochs: int
    lr: float
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Of AdamW, on matrices only."""
    warmup: float = 0.05
    """Part of all steps over which the rate rises, 0..1."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the rate does after that: fall to a hundredth, or stay."""
    grad_clip: float | None = 1.0
    """Largest norm of the gradient; None: as it comes."""
    patience: int = 0
    """Epochs without a better validation loss after which training ends; 0: all epochs."""
    delta: float = 0.0
    """How much lower a validation loss has to be to count as better."""
    save_every_s: float = 1.0
    """Seconds between two checkpoints, at least: where epochs take a tenth of that, saving each would cost
    more than training. The last epoch, and where training is stopped, are always saved."""

    @property
    def loop(self) -> TrainConfig:
        """The same in the terms of `stoker.train`, which checks the numbers."""
        return TrainConfig(
            epochs=self.epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            grad_clip=self.grad_clip,
        )

    def rate(self, step: int, total: int) -> float:
        """Learning rate of a step, counted from 0."""
        if self.schedule == "constant" and step >= round(self.warmup * total):
            return self.lr
        return learning_rate(step, total, peak=self.lr, warmup=self.warmup)


@dataclass(slots=True, kw_only=True)
class FitProgress:
    """How far a run is; all of it goes into a checkpoint as JSON."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes finished and judged."""
    batch: int = 0
    """Batches done of the pass after those."""
    examples: int = 0
    """Examples of that pass so far."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of that pass: losses of examples, gradient norms of batches."""
    best: float | None = None
    """Lowest validation loss."""
    best_epoch: int = 0
    """Passes finished when it was measured."""
    epochs: int = 0
    """Passes that were asked for."""
    extended: int = 0
    """Passes finished when more were asked for than before: patience begins anew there."""
    row: dict[str, Json] = field(default_factory=dict[str, Json])
    """Figures of the last finished epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What a finished run came to."""

    epochs: int
    steps: int
    best: float | None
    """Lowest validation loss."""
    best_epoch: int
    """Epoch that it is of; 0 without validation."""
    row: Mapping[str, Json]
    """Figures of the last epoch, as the `epoch` event had them."""


BATCH_EVERY_S = 1.0
"""Seconds between two `batch` events, at least."""


def fit(  # noqa: PLR0913  the face: what is learnt, from what, and all else by name
    lesson: Lesson,
    train: Loader,
    val: Loader | None,
    settings: FitSettings,
    *,
    folder: Path | None = None,
    expected: bool = False,
    meter: StallMeter | None = None,
    on_event: EventSink | None = None,
) -> FitReport:
    """Train in place, going on from the newest whole checkpoint in `folder`.

    Args:
        lesson: What is learnt.
        train, val: Batches; None: no validation.
        settings: How.
        folder: Checkpoints are kept here, see `FitSettings.save_every_s`; None: none are.
        expected: There was a checkpoint, so that it is an error if there is none.
        meter: The one that `train` writes into.
        on_event: Told of `start resume skip batch epoch checkpoint stop`.
    Raises:
        ConfigError: `train` has no batch, or patience without validation.
        CorruptError: No checkpoint is whole, and there was one.
        DivergedError: A loss or gradient is not finite; names epoch, step and sample.
        Interrupted: SIGTERM or SIGINT; with a folder, a checkpoint was written first.
        StaleStateError: The checkpoint is of another network, or of other data.
    """
    if not len(train):
        raise ConfigError("the training set has no batch. Expected at least one row")
    if settings.patience and val is None:
        raise ConfigError("early stopping needs a validation set. Give one, or patience 0")
    with StopFlag() as stop:
        run = _Fit(
            lesson=lesson, train=train, val=val, settings=settings, folder=folder, meter=meter,
            tell=on_event or _silent, stop=stop,
        )  # fmt: skip
        run.take_up(expected)
        while run.goes_on():
            run.finish_pass()
        progress = run.progress
        return FitReport(
            epochs=progress.epoch,
            steps=progress.step,
            best=progress.best,
            best_epoch=progress.best_epoch,
            row=progress.row,
        )


@contextmanager
def one_thread() -> Generator[None]:
    """Torch on one thread: steps of half a millisecond lose more to the others than they gain from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _silent(_kind: str, _facts: Mapping[str, Json]) -> None:
    """Nobody listens."""


@dataclass(slots=True, kw_only=True)
class _Fit:
    """One call of `fit`."""

    lesson: Lesson
    train: Loader
    val: Loader | None
    settings: FitSettings
    folder: Path | None
    meter: StallMeter | None
    tell: Callable[[str, Mapping[str, Json]], None]
    stop: StopFlag
    progress: FitProgress = field(default_factory=FitProgress)
    device: torch.device = field(init=False)
    optimizer: Any = field(init=False)
    stepper: Stepper = field(init=False)
    sums: Tensor = field(init=False)
    """`progress.sums` on the device, float64."""
    total: int = field(init=False)
    """Steps that the learning rate is laid out for."""
    saved_s: float = field(default_factory=time.monotonic)
    """When the last checkpoint was written, or training began."""
    best: Checkpoint | None = None
    """The best epoch, while it is not written."""

    def __post_init__(self) -> None:
        model = self.lesson.model
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, self.settings.loop)
        self.stepper = Stepper(
            losses=self._losses,
            models=[model],
            optimizer=self.optimizer,
            grad_clip=self.settings.grad_clip,
            device=self.device,
        )
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.total = self.settings.epochs * len(self.train)

    def take_up(self, expected: bool) -> None:
        """Begin, or go on from the newest whole checkpoint."""
        progress = self.progress
        if self.folder is not None:
            root = self.folder / "checkpoints"
            found = checkpoint_to_resume(root, lambda why: self.tell("skip", {"why": why}), expected=expected)
            if found is not None:
                self._restore(found)
                progress = self.progress
                self.tell("resume", {"step": progress.step, "epoch": progress.epoch, "row": progress.row})
        progress.epochs = self.settings.epochs
        facts: dict[str, Json] = {
            "step": progress.step,
            "total": self.total,
            "batches": len(self.train),
            "parameters": sum(p.numel() for p in self.lesson.model.parameters()),
            "device": str(self.device),
            **numerics_of(self.device, False),
        }
        self.tell("start", facts)

    def goes_on(self) -> bool:
        """Whether epochs and patience are left."""
        progress, patience = self.progress, self.settings.patience
        waited = progress.epoch - max(progress.best_epoch, progress.extended)
        return progress.epoch < self.settings.epochs and not (patience and waited >= patience)

    def finish_pass(self) -> None:
        """The rest of a pass, its judgement, its checkpoint if one is due, and its event, in this order."""
        progress = self.progress
        if progress.batch == 0:
            self.train.set_epoch(progress.epoch)
            self.sums.zero_()
            progress.examples = 0
        if self.meter is not None:
            self.meter.reset()
        begun, begun_s = progress.examples, time.monotonic()
        self._pass()
        self.stepper.guard.check()
        train_s = time.monotonic() - begun_s
        rate = (progress.examples - begun) / train_s if train_s else None
        stall = None if self.meter is None else self.meter.epoch().stall
        self._judge({"stall": stall, "samples_per_s": rate, "seconds": round(train_s, 4)})
        if self.stop.signal_name is not None and self.goes_on():
            self._stop()

    def _pass(self) -> None:
        progress, told_s = self.progress, time.monotonic()
        self.lesson.model.train()
        for batch in self.train if progress.batch < len(self.train) else ():
            self._step(batch)
            if (now := time.monotonic()) - told_s >= BATCH_EVERY_S:
                told_s = now
                self._tell_batch()
            if self.stop.signal_name is not None:
                self._stop()

    def _losses(self, batch: Mapping[str, Tensor]) -> Losses:
        numbers = batch["index"]
        return Losses(self.lesson.losses(batch), torch.stack([numbers, torch.zeros_like(numbers)], 1))

    def _step(self, batch: Mapping[str, Tensor]) -> None:
        progress = self.progress
        rate = self.settings.rate(progress.step, self.total)
        done = self.stepper.step(batch, rate=rate, epoch=progress.epoch + 1, number=progress.step + 1)
        self.sums += torch.stack([done.losses.sum(), done.norm])
        progress.step += 1
        progress.batch += 1
        progress.examples += len(done.losses)

    def _judge(self, pace: Mapping[str, Json]) -> None:
        """Judge the weights, note the epoch, save it, and then tell of it."""
        progress, settings = self.progress, self.settings
        loss, norms = self.sums.tolist()
        begun_s = time.monotonic()
        found = {} if self.val is None else dict(self.lesson.judge(self.val))
        val_loss = found.get("val_loss")
        if val_loss is not None and not math.isfinite(val_loss):
            raise DivergedError(
                f"the validation loss of epoch {progress.epoch + 1} is {val_loss}. Expected a finite number. "
                "Lower the learning rate; the last checkpoint is from before this epoch"
            )
        progress.epoch += 1
        best = progress.best
        better = val_loss is not None and (best is None or val_loss < best - settings.delta)
        if better:
            progress.best, progress.best_epoch = val_loss, progress.epoch
        progress.row = {
            "epoch": progress.epoch,
            "step": progress.step,
            "train_loss": loss / progress.examples,
            **found,
            "learning_rate": settings.rate(progress.step - 1, self.total),
            "grad_norm": norms / progress.batch,
            **pace,
            "tier": self.train.plan.tier,
            "eval_seconds": round(time.monotonic() - begun_s, 4),
            "best_val_loss": progress.best,
            "best_epoch": progress.best_epoch,
        }
        progress.batch = 0
        if better and self.folder is not None:
            self.best = self._checkpoint()
        if time.monotonic() - self.saved_s >= settings.save_every_s or not self.goes_on():
            self._save()
        self.tell("epoch", progress.row)

    def _tell_batch(self) -> None:
        progress = self.progress
        loss, _ = self.sums.tolist()
        self.tell(
            "batch",
            {
                "epoch": progress.epoch + 1,
                "batch": progress.batch,
                "batches": len(self.train),
                "train_loss": loss / progress.examples,
            },
        )

    def _stop(self) -> None:
        """Raise Interrupted, with a checkpoint written."""
        self._save()
        progress, name = self.progress, self.stop.signal_name
        self.tell("stop", {"signal": name, "step": progress.step})
        kept = "nothing of it is kept" if self.folder is None else f"{self.folder} goes on from there"
        raise Interrupted(f"{name} after step {progress.step} in epoch {progress.epoch + 1}; {kept}")

    def _save(self) -> None:
        """Write checkpoints: of the best epoch, if it is not written yet, and then of this step."""
        if self.folder is None:
            return
        self.stepper.guard.check()
        found: dict[Kind, Checkpoint | None] = {"best": self.best, "last": self._checkpoint()}
        for kind, checkpoint in found.items():
            if checkpoint is not None:
                path = save_checkpoint(self.folder / "checkpoints", kind, checkpoint)
                facts: dict[str, Json] = {"name": path.name, "step": checkpoint.step, "kind": kind}
                self.tell("checkpoint", facts)
        self.best, self.saved_s = None, time.monotonic()

    def _checkpoint(self) -> Checkpoint:
        """All that it takes to go on from here, apart from what training changes next."""
        self.progress.sums = self.sums.tolist()
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "loader": self.train.state_dict(),
            "settings": asdict(self.settings),
            "shapes": _shapes(self.lesson.model),
        }
        optimizer = dump_optimizer(self.optimizer, self.device)
        return Checkpoint(
            step=self.progress.step,
            model={name: one.detach().clone() for name, one in self.lesson.model.state_dict().items()},
            optimizer={name: one.detach().clone() for name, one in optimizer.items()},
            state=state,
        )

    def _restore(self, found: Checkpoint) -> None:
        shapes = _shapes(self.lesson.model)
        before = found.state["shapes"]
        if before != shapes:
            differ = [name for name in {*shapes, *before} if shapes.get(name) != before.get(name)]
            raise StaleStateError(
                f"the checkpoint of step {found.step} in {self.folder} is of another network: "
                f"{', '.join(sorted(differ)[:3])}. Start again as another run"
            )
        self.lesson.model.load_state_dict(dict(found.model))
        restore_optimizer(self.optimizer, self.device, found.optimizer)
        self.progress = progress = FitProgress(**found.state["progress"])
        if progress.epochs < self.settings.epochs:
            progress.epochs, progress.extended = self.settings.epochs, progress.epoch
        self.sums.copy_(torch.tensor(progress.sums, dtype=torch.float64, device="cpu"))
        self.train.load_state_dict(found.state["loader"])


def _shapes(model: nn.Module) -> dict[str, Json]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


# ----------------------------------------------------------------------------------------------------------
# A small network that tells the classes of images apart.


WIDTHS = (16, 32, 64)


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
        """`(B, classes)`."""
        found: Tensor = self.features(images.float() / 255)
        return self.score(found.mean((2, 3)))


@dataclass(frozen=True, slots=True)
class Classification:
    """What is learnt of images with a class, for `stoker.pipeline.fitting`."""

    model: ImageClassifier

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of each image, `(B,)`."""
        return F.cross_entropy(self.model(batch["image"]), batch["label"], reduction="none")

    @torch.no_grad()
    def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Mean loss, and the part of images whose best score is that of their class."""
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


def save_model(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Weights, and what is to be known of them as JSON by name, in one file."""
    make_folder(path.parent)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        save_file(weights, temporary, metadata={name: json.dumps(value) for name, value in facts.items()})
