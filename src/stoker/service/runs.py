"""Run one attempt at a job: caches first, then training; or the generation of a data set."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from stoker.config import Config
from stoker.errors import ConfigError, IncompleteError, ResourceError, SourceError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.precompute.progress import Snapshot, line
from stoker.run.context import Run, settings_digest, work_digest, write_diary
from stoker.run.fitting import (
    Classification,
    ImageClassifier,
    Learner,
    fit,
    save_model,
)
from stoker.run.loaders import loader_arguments
from stoker.run.precompute import CacheResult, fill_caches
from stoker.run.train import PreparedCaches, prepare, train_prepared, watch_gpu
from stoker.schema import Json
from stoker.service.folders import JobFile
from stoker.service.job_config import JobConfig, splits_of
from stoker.service.journal import Journal
from stoker.service.kinds import kind_of
from stoker.service.timeline import StallSums
from stoker.sources.protocol import Source
from stoker.train.config import TrainConfig
from stoker.train.run import lock_run_folder
from stoker.train.state import Checkpoint, checkpoint_to_resume, newest_checkpoint
from stoker.units import format_count

log = logging.getLogger("stoker")

MODEL = "model.safetensors"
"""File with the best weights of a finished job, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One attempt at a job."""

    folder: Path
    job: JobFile
    config: JobConfig
    settings: Config
    """The configuration as settings of `stoker train`."""
    journal: Journal

    @property
    def device(self) -> torch.device:
        """Device of the training.

        Raises:
            ResourceError: `accelerator=gpu` without a GPU.
        """
        device = torch.device(Run(self.settings).device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ResourceError(
                f"accelerator is 'gpu', and torch {torch.__version__} sees no CUDA device on this machine",
                hint="Give accelerator='auto', which takes one where there is one",
            )
        return device

    def share(self, epoch: float) -> float:
        """Return the part of the job that is done after `epoch` epochs, 0 to 1."""
        return min(1.0, epoch / self.job.epochs)

    def caches(self) -> list[CacheResult]:
        """Return the caches of training and validation, completed."""
        progress = EncodingProgress(self.journal)
        run = Run(self.settings, progress=progress)
        return fill_caches(run, splits_of(self.config), training="records")

    def tell_started(self, caches: Sequence[CacheResult], facts: Mapping[str, Any]) -> None:
        """Report the data of the training, its tier, and the reason for the tier."""
        train = caches[0]
        message = f"trains on {format_count(len(train.cache), 'record')}, served from {facts['tier']}"
        log.info("%s: %s", message, facts["reason"])
        self.journal.tell(
            "started",
            {
                "message": message,
                "epochs": self.job.epochs,
                "train_samples": len(train.cache),
                "val_samples": sum(len(one.cache) for one in caches[1:]),
                "quarantined": sum(len(one.cache.quarantined) for one in caches),
                "encoded": sum(one.encoded for one in caches),
                "reused": sum(one.reused for one in caches),
                "fill_s": round(sum(one.seconds for one in caches), 3),
                "caches": [
                    {"name": one.name, "fingerprint": one.cache.fingerprint, "path": str(one.cache.path)}
                    for one in caches
                ],
                **facts,
            },
        )


Facts = Mapping[str, Any]
MakeLearner = Callable[[JobRun, Sequence[CacheResult]], tuple[Learner, Facts, Facts]]
"""Makes from the caches the learner (its module on the CPU), facts to save with it, and facts to report."""


def source_of(result: CacheResult) -> Source:
    """Return the source of a cache, which was opened to find the cache.

    Raises:
        IncompleteError: The data does not exist any more.
    """
    filler = result.cache.filler
    source = getattr(filler, "source", None)
    if source is None:
        raise IncompleteError(
            f"the data that {result.name} was made from does not exist any more",
            hint="A job needs it to start; restore it",
        )
    return source


def train_records(
    run: JobRun, make: MakeLearner, *, architecture: str, figures: Sequence[str]
) -> dict[str, Any]:
    """Train on complete records and save the best weights; return the results of the job, by name.

    Caches come first, then loaders, then epochs, each with its checkpoint.

    Args:
        run: The attempt.
        make: Makes what is learned. Torch's random state is that of the job's seed when it is called.
        architecture: What the saved model says it is.
        figures: Names of the last epoch's figures that the job reports.
    """
    device, meter = run.device, StallMeter()
    with lock_run_folder(run.folder):
        caches = run.caches()
        train = _loader(run, caches[0], device, meter=meter)
        val = _loader(run, caches[1], device, shuffle=False) if len(caches) > 1 else None
        torch.manual_seed(run.config.seed)
        learner, saved, told = make(run, caches)
        learner.model.to(device)
        plan = train.plan
        tiers = {"tier": plan.tier, "tiers": plan.records_by_tier(), "reason": plan.reason}
        run.tell_started(caches, {"device": str(device), **tiers, **told})
        events = _TrainingEvents(run, caches)
        report = fit(
            learner,
            train,
            val,
            fit_settings(run),
            folder=run.folder,
            expected=run.job.checkpoint is not None,
            meter=meter,
            on_event=events.take,
        )
        events.take("done", {})
    save_best(run, caches, architecture, lambda _: saved)
    row = cast("Mapping[str, Any]", report.row)
    found = {name: row[name] for name in figures if name in row}
    early = {}
    if report.epochs < run.job.epochs:
        patience = run.config.early_stop_patience
        early = {"message": f"stopped early: no epoch was better than {report.best_epoch} in {patience}"}
        log.info("%s", early["message"])
    known = {"best_val_loss": report.best, "best_epoch": report.best_epoch, "epoch": report.epochs}
    return {**known, **found, **early}


def fit_settings(run: JobRun) -> TrainConfig:
    """Return the settings of the training loop."""
    config = run.config
    return TrainConfig(
        epochs=run.job.epochs,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup=config.warmup,
        schedule=config.lr_scheduler,
        grad_clip=config.max_grad_norm,
        patience=config.early_stop_patience or None,
        checkpoint_every=None,
        save_every_s=1.0,
        delta=config.early_stop_delta,
    )


def save_best(
    run: JobRun, caches: Sequence[CacheResult], architecture: str, about: Callable[[Checkpoint], Facts]
) -> None:
    """Save the weights of the best epoch in the job's folder, with facts about its checkpoint."""
    found = best_checkpoint(run)
    facts = {
        **about(found),
        "caches": {one.split: one.cache.fingerprint for one in caches},
        "architecture": architecture,
        "config": run.config.model_dump(mode="json"),
    }
    save_model(run.folder / MODEL, found.model, facts)


def best_checkpoint(run: JobRun) -> Checkpoint:
    """Return the checkpoint of the best epoch, or of the last without validation."""
    root = run.folder / "checkpoints"
    for kind in ("best", "last"):
        found = newest_checkpoint(root, lambda why: _report_skipped(run, why), kind)
        if found is not None:
            return found
    raise IncompleteError(f"{root} has no valid checkpoint after training", hint="Check the disk")


def _loader(
    run: JobRun,
    result: CacheResult,
    device: torch.device,
    *,
    shuffle: bool = True,
    meter: StallMeter | None = None,
) -> Loader:
    return Loader(
        result.cache,
        run.settings.training.batch_size,
        shuffle=shuffle,
        meter=meter,
        **loader_arguments(run.settings, device),
    )


class _TrainingEvents:
    """Writes the events of the training loop to the journal, of records and of the operator."""

    def __init__(self, run: JobRun, caches: Sequence[CacheResult]) -> None:
        self._run, self._caches = run, caches
        self._stall = StallSums(run.journal, watch_gpu(str(run.device)))
        self._due = 0.0
        self._steps = 1
        self._latest: dict[str, Any] = {}
        """Figures that are reported with each epoch."""
        self._samples = 0
        """Samples since the last epoch."""
        self.checkpoint = run.job.checkpoint

    def take(self, kind: str, facts: Mapping[str, Json]) -> None:
        """Write one event of the loop."""
        told = cast("Mapping[str, Any]", facts)
        self._stall.take(kind, told)
        if kind == "serve":
            self._latest["tier"] = max(told["tiers"], key=told["tiers"].__getitem__)
            self._run.tell_started(self._caches, {**told, "tier": self._latest["tier"]})
        elif kind in ("start", "stage"):
            self._steps = max(1, told["total"])
        elif kind == "batch":
            done = self._run.share(told["epoch"] - 1 + told["batch"] / told["batches"])
            self._tell_batch(done, told)
        elif kind == "step":
            self._latest |= {"learning_rate": told["lr"], "grad_norm": told["grad_norm"]}
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + EVERY_S
                loss = {"epoch": told["epoch"], "train_loss": told["loss"], **self._latest}
                done = min(1.0, told["step"] / self._steps)
                self._tell_batch(done, {"step": told["step"], "steps": self._steps, **loss})
        elif kind == "stall":
            self._samples += told["examples"]
        elif kind == "epoch":
            rate = self._samples / told["seconds"] if told["seconds"] else None
            self._tell_epoch({"samples_per_s": rate, "at": time.time(), **told})
            self._samples = 0
        elif kind in ("checkpoint", "best"):
            self.checkpoint = Path(told["path"]).name
        elif kind == "skip":
            _report_skipped(self._run, told["why"])
        elif kind == "resume":
            self._take_resume(told)

    def _tell_batch(self, progress: float, facts: Mapping[str, Any]) -> None:
        # The row of a job counts finished epochs; this one is not finished.
        self._run.journal.tell("batch", {**facts, "epoch": facts["epoch"] - 1, "progress": progress})

    def _take_resume(self, told: Mapping[str, Any]) -> None:
        journal, row = self._run.journal, told.get("row")
        if "path" in told:
            self.checkpoint = Path(told["path"]).name
        if row and row["epoch"] > journal.epoch:  # a kill came between its checkpoint and its event
            self._tell_epoch(row)
        message = f"continues after epoch {told['epoch'] - 1}, step {told['step']}"
        journal.tell("progress", {"message": message})

    def _tell_epoch(self, row: Mapping[str, Any]) -> None:
        epoch = int(row["epoch"])
        told = {name: value for name, value in row.items() if name not in ("kind", "loss")}
        if "loss" in row:  # of the operator
            told |= {"train_loss": row["loss"], "val_loss": row.get("val_nrmse")}
        told |= {"progress": self._run.share(epoch), "message": f"epoch {epoch} of {self._run.job.epochs}"}
        told = {**self._latest, **told, "checkpoint": self.checkpoint}
        told = {name: value for name, value in told.items() if value is not None}
        losses = f"loss {told['train_loss']:.4g}, validation {told.get('val_loss', math.nan):.4g}"
        log.info("%s: %s, %.3g s", told["message"], losses, told["seconds"])
        self._run.journal.tell("metrics", told)


def _report_skipped(run: JobRun, why: str) -> None:
    log.warning("a damaged checkpoint is skipped: %s", why)
    run.journal.tell("progress", {"message": f"a damaged checkpoint is skipped: {why}"})


EVERY_S = 1.0
"""Least seconds between two reports of the encoding progress, and of the steps of the operator."""


class EncodingProgress:
    """Writes the progress of encoding to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between two reports."""
        return EVERY_S

    def update(self, snapshot: Snapshot) -> None:
        """Write a report if one is due or the last sample is done."""
        if time.monotonic() < self._due and snapshot.done < snapshot.total:
            return
        self._due = time.monotonic() + EVERY_S
        facts = {"message": line(snapshot), "cache": snapshot.name, "encoded": snapshot.done}
        self._journal.tell("progress", {**facts, "samples": snapshot.total})

    def note(self, text: str) -> None:
        """Report a message."""
        self._journal.tell("progress", {"message": text})

    def close(self) -> None:
        """Do nothing: no resource is open."""


# ----------------------------------------------------------------------------------------------------------
# Train on images in a folder for each class.


def train_images(run: JobRun) -> dict[str, Any]:
    """Train; return the results of the job, by name."""
    return train_records(run, _images_learner, architecture="classifier", figures=("accuracy",))


def _images_learner(run: JobRun, caches: Sequence[CacheResult]) -> tuple[Learner, Facts, Facts]:
    classes: tuple[str, ...] = getattr(source_of(caches[0]), "classes", ())
    if len(classes) < 2:
        raise SourceError(
            f"{run.job.datasets[0]['name']} has {len(classes)} classes",
            hint="Expected at least two folders of images, one for each class",
        )
    model = ImageClassifier(caches[0].fields["image"].shape[0], len(classes), run.config.dropout_rate)
    facts = {"classes": list(classes)}
    return Classification(model), facts, facts


# ----------------------------------------------------------------------------------------------------------
# Train on simulations: the operator on latents, as `stoker train` does it.


def train_operator(run: JobRun) -> dict[str, Any]:
    """Train; return the results of the job, by name."""
    began = time.monotonic()
    _ = run.device  # a missing GPU is reported before anything is encoded
    whole = Run(run.settings, progress=EncodingProgress(run.journal))
    prepared = prepare(whole)
    _prepare_resume(run, whole, prepared)
    events = _TrainingEvents(run, prepared.caches)
    result = train_prepared(whole, prepared, started=began, on_event=events.take)
    save_best(
        run,
        prepared.caches,
        "operator",
        lambda best: {"shape": best.state["shape"], "conditions": best.state["widths"]},
    )
    report = result.report
    return {
        "epoch": report.epochs,
        "best_val_loss": report.best_val_nrmse,
        "val_nrmse": report.val_nrmse,
        "persistence_nrmse": report.persistence_nrmse,
        "rollout_nrmse": report.rollout_nrmse,
        "stall": report.stall,
        "tier": report.tier,
        "checkpoint": events.checkpoint,
    }


def _prepare_resume(run: JobRun, whole: Run, prepared: PreparedCaches) -> None:
    """Prepare the loop to resume from the job's checkpoint, also after a finished job got more epochs.

    Raises:
        CorruptError: All checkpoints are damaged.
    """
    root = run.folder / "checkpoints"
    found = checkpoint_to_resume(
        root, lambda why: _report_skipped(run, why), expected=run.job.checkpoint is not None
    )
    if found is None:
        return
    write_diary(
        run.folder,
        digest=settings_digest(run.settings, prepared.fingerprints),
        finished=False,
        work=work_digest(whole, prepared.caches[0].cache.schema),
        step_s=None,
    )


# ----------------------------------------------------------------------------------------------------------
# Generate a data set: completely or not at all, even if the process is killed.


def generate(job: JobFile, journal: Journal) -> dict[str, Any]:
    """Generate the data set of a job; return the results of the job, by name.

    Raises:
        ConfigError: The job does not name one data set to generate.
        StalledError: Another job locked the database for too long.
    """
    datasets = cast("Sequence[Mapping[str, Any]]", job.datasets)
    if len(datasets) != 1 or "make" not in datasets[0]["spec"]:
        raise ConfigError(f"job {job.id} names no data set to generate", hint="Expected exactly one")
    dataset = datasets[0]
    spec: Mapping[str, Any] = dataset["spec"]
    journal.tell("started", {"message": f"makes {dataset['name']}"})
    made = kind_of(str(dataset["kind"])).generate(spec, journal)
    return {"epoch": job.epochs, "message": f"{dataset['name']} is there", "made": made}


def train(run: JobRun, kind: str) -> dict[str, Any]:
    """Train on data of a kind; return the results of the job, by name."""
    return kind_of(kind).train(run)
