"""Train on records without time: images, rows, features. A network learns one field from the others.

It is a first check that the records can be learned from, in the loop of `stoker.run.fitting`. For a network
of one's own, train on `stoker.Loader`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.plan.resources import resolve_device, use_device
from stoker.run.fitting import FitReport, fit
from stoker.runtime.disk import explain_disk_errors
from stoker.schema import Json
from stoker.store import Cache
from stoker.train.config import EventSink, TrainConfig, TrainReport
from stoker.train.loop import ignore_event
from stoker.train.report import ReportTable, write_report
from stoker.train.run import lock_run_folder, move_previous_run
from stoker.train.state import MetricsLog

MOST_CLASSES = 1000
"""A field of whole numbers from 0 to less than this holds classes; others are predicted as numbers."""
SCALE_RECORDS = 512
"""Records from which means and scales are learned, evenly spread."""
FLAT = 4096
"""A field of at most so many values is read whole by one linear layer."""
LEAST_IMAGE = 8
"""Points of a side from which three axes are taken for an image."""
CONV_WIDTHS = (16, 32, 64)
EPS = 1e-6


# ----------------------------------------------------------------------------------------------------------
# The network: a part for each field, then a few layers over all of them.


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a field: of each value, or of all values of a large field."""

    mean: Tensor
    std: Tensor


class _Scaled(nn.Module):
    """Brings values of any dtype to mean 0 and deviation 1."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", scale.mean)
        self.register_buffer("std", scale.std)

    def forward(self, values: Tensor) -> Tensor:
        """Return float32 of the same shape; of scalars `(B, 1)`."""
        scaled = (values.float() - self.mean) / self.std
        return scaled.unsqueeze(1) if scaled.dim() == 1 else scaled


class _Flat(nn.Module):
    """All values of a field at once."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), width)

    def forward(self, values: Tensor) -> Tensor:
        """Return `(B, width)`."""
        return self.layer(values.flatten(1))


class _Image(nn.Module):
    """Three axes, channels first or last."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.is_last = shape[-1] <= 4 < shape[0]
        before = shape[-1] if self.is_last else shape[0]
        layers: list[nn.Module] = []
        for channels in CONV_WIDTHS:
            conv = nn.Conv2d(before, channels, 3, stride=2, padding=1)
            layers += [conv, nn.GroupNorm(8, channels), nn.ReLU()]
            before = channels
        self.features = nn.Sequential(*layers)
        self.layer = nn.Linear(before, width)

    def forward(self, values: Tensor) -> Tensor:
        """Return `(B, width)`."""
        images = values.movedim(-1, 1) if self.is_last else values
        return self.layer(self.features(images).mean((2, 3)))


class _Tokens(nn.Module):
    """Many rows of numbers: the mean of what one layer makes of each row and its place."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[-1], width)
        self.place = nn.Parameter(0.02 * torch.randn(math.prod(shape[:-1]), width))

    def forward(self, values: Tensor) -> Tensor:
        """Return `(B, width)`."""
        rows = values.flatten(1, -2) if values.dim() > 2 else values.unsqueeze(-1)
        return F.gelu(self.layer(rows) + self.place).mean(1)


def _part_of(shape: tuple[int, ...], width: int) -> nn.Module:
    if len(shape) == 3 and min(sorted(shape)[1:]) >= LEAST_IMAGE:
        return _Image(shape, width)
    return _Flat(shape, width) if math.prod(shape) <= FLAT else _Tokens(shape, width)


class RecordNetwork(nn.Module):
    """Predicts numbers from the fields of a record.

    Args:
        shapes: Of the fields that are read, by name.
        scales: Of the same fields.
        outputs: Numbers to predict, or classes.
        width, depth: Of the layers after the parts of the fields.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        scales: Mapping[str, Scale],
        outputs: int,
        *,
        width: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.names = list(shapes)
        # Names of fields may hold dots, which names of modules may not.
        self.scaled = nn.ModuleList(_Scaled(scales[name]) for name in self.names)
        self.parts = nn.ModuleList(_part_of(shape, width) for shape in shapes.values())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return `(B, outputs)`."""
        parts = zip(self.names, self.scaled, self.parts, strict=True)
        found: Tensor = torch.stack([part(scaled(batch[name])) for name, scaled, part in parts]).sum(0)
        for layer in self.layers:
            found = found + layer(found)
        return self.head(found)


# ----------------------------------------------------------------------------------------------------------
# What is learned: a class, or numbers.


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLearner:
    """Learns the field `target`, for `stoker.run.fitting`."""

    model: RecordNetwork
    target: str
    classes: int
    """0: numbers are predicted."""
    scaled: _Scaled
    """Of the target, where it is numbers."""

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy of each record, or the mean squared error of its numbers, `(B,)`."""
        return self._losses(self.model(batch), batch[self.target])

    def _losses(self, found: Tensor, target: Tensor) -> Tensor:
        if self.classes:
            return F.cross_entropy(found, target.flatten().long(), reduction="none")
        return (found - self.scaled(target).flatten(1)).square().mean(1)

    @torch.no_grad()
    def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the mean loss; and the accuracy, or the error of the numbers next to that of their mean."""
        self.model.eval()
        losses: list[Tensor] = []
        labels: list[Tensor] = []
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            found, target = self.model(batch), batch[self.target]
            losses.append(self._losses(found, target).double().cpu())
            if self.classes:
                right = found.argmax(1) == target.flatten()
                labels.append(torch.stack([target.flatten().long(), right.long()], 1).cpu())
            else:
                truth, mean = target.reshape(len(target), -1).double(), self.scaled.mean.flatten().double()
                guess = found.double() * self.scaled.std.flatten().double() + mean
                errors = ((guess - truth), (mean - truth), truth)
                sums += torch.stack([one.square().sum() for one in errors]).cpu()
        self.model.train()
        figures = {"val_loss": float(torch.cat(losses).mean())}
        if self.classes:
            known, right = torch.cat(labels).unbind(1)
            most = torch.bincount(known).max()
            return {
                **figures,
                "accuracy": float(right.double().mean()),
                "baseline_accuracy": float(most / len(known)),
            }
        error, still, size = (float(value) for value in sums)
        size = size or 1.0
        return {
            **figures,
            "val_nrmse": math.sqrt(error / size),
            "persistence_nrmse": math.sqrt(still / size),
        }


def measure_scales(cache: Cache, names: Sequence[str]) -> dict[str, Scale]:
    """Return the scales of fields, from some hundred records; of a large field one scale for all values."""
    chosen = cache.indices[:: max(1, -(-len(cache) // SCALE_RECORDS))].tolist()
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for number in chosen:
        record = cache[number]
        for name in names:
            values = record[name].double()
            found = values, values.square()
            if values.numel() > FLAT:
                found = found[0].mean(), found[1].mean()
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + found[0], before[1] + found[1])
    scales: dict[str, Scale] = {}
    for name, (first, second) in sums.items():
        mean = first / len(chosen)
        std = (second / len(chosen) - mean.square()).clamp(min=0).sqrt()
        constant = std <= EPS * (mean.abs() + 1e-30)
        scales[name] = Scale(mean.float(), torch.where(constant, torch.ones_like(std), std).float())
    return scales


def count_classes(caches: Sequence[Cache], target: str) -> int:
    """Return the classes that a field holds; 0 where it holds other numbers."""
    one = caches[0].schema[target]
    if one.floating or math.prod(one.shape) != 1:
        return 0
    if one.dtype == "bool":
        return 2
    known = [cache.statistics[target] for cache in caches if len(cache)]
    least, most = min(own["min"] for own in known), max(own["max"] for own in known)
    return int(most) + 1 if least >= 0 and 0 < most < MOST_CLASSES else 0


def make_learner(
    caches: Sequence[Cache], target: str, inputs: Sequence[str], config: TrainConfig
) -> SupervisedLearner:
    """Return a network for the records of some caches, with first weights by `config.seed`.

    Args:
        caches: The training cache, whose records give the scales; others may hold further classes.
        target: Field to predict.
        inputs: Fields to predict it from.
        config: Device, seed, width and depth.
    """
    schema, classes = caches[0].schema, count_classes(caches, target)
    shapes = {name: schema[name].shape or (1,) for name in inputs}
    scales = measure_scales(caches[0], [*shapes, target])
    device = resolve_device(config.device)
    use_device(device)
    outputs = classes or math.prod(schema[target].shape)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        model = RecordNetwork(shapes, scales, outputs, width=config.width, depth=config.depth)
    scaled = _Scaled(scales[target]).to(device)
    return SupervisedLearner(model=model.to(device), target=target, classes=classes, scaled=scaled)


# ----------------------------------------------------------------------------------------------------------
# The run.


@dataclass(slots=True, kw_only=True)
class SupervisedRun:
    """One call of `stoker train` on records without time."""

    target: str
    inputs: Sequence[str]
    """Fields that it is predicted from."""
    caches: Sequence[Cache]
    """For training and for validation."""
    config: TrainConfig
    folder: Path
    startup: dict[str, float] = field(default_factory=dict[str, float])

    def train(
        self,
        train: Loader,
        val: Loader | None,
        *,
        meter: StallMeter | None = None,
        on_event: EventSink = ignore_event,
        about: Callable[[], Sequence[ReportTable]] = tuple,
    ) -> TrainReport:
        """Train, or continue the run of the folder; leave metrics, curves, a report and checkpoints there.

        Raises:
            StokerError: As `fit`; or the folder is held by another run.
        """
        begun_s = time.perf_counter()

        def note_batch() -> None:
            if not self.startup:
                self.startup["first_batch_s"] = seconds = time.perf_counter() - begun_s
                on_event("ready", {"seconds": seconds})

        log = MetricsLog(self.folder / "metrics.jsonl")
        with lock_run_folder(self.folder):
            if not self.config.resume:
                with explain_disk_errors(self.folder):
                    move_previous_run(self.folder)
            learner = make_learner(self.caches, self.target, self.inputs, self.config)
            facts: dict[str, Json] = {"target": self.target, "classes": learner.classes}
            on_event("learns", {**facts, "inputs": [*self.inputs]})
            done = fit(
                learner,
                train,
                val if val is not None and len(val) else None,
                self.config,
                folder=self.folder,
                meter=meter,
                on_event=on_event,
                log=log,
                on_batch=note_batch,
            )
            report = self._report(done)
            write_report(self.folder, log.rows(), report, asdict(self.config), about())
        told = asdict(report)
        del told["run_dir"]
        on_event("done", told)
        return report

    def _report(self, done: FitReport) -> TrainReport:
        progress = done.progress
        spent_s = progress.wait_s + progress.step_s
        errors = progress.errors
        return TrainReport(
            tier=max(progress.tiers, key=lambda name: progress.tiers[name], default=""),
            stall=progress.wait_s / spent_s if spent_s else None,
            step_s=progress.step_s / progress.timed if progress.timed else None,
            epochs=progress.epoch,
            steps=progress.step,
            val_nrmse=errors.get("val_nrmse"),
            best_val_nrmse=None,
            persistence_nrmse=errors.get("persistence_nrmse"),
            rollout_nrmse=None,
            rollout_persistence_nrmse=None,
            run_dir=self.folder,
            startup=self.startup,
            parts=progress.parts,
            target=self.target,
            val_loss=errors.get("val_loss"),
            best_val_loss=progress.best,
            accuracy=errors.get("accuracy"),
            baseline_accuracy=errors.get("baseline_accuracy"),
        )
