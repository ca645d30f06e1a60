"""One attempt at a job, and what all kinds of data have in common: caches first, then training on records."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from stoker.config import Config
from stoker.errors import ConfigError, IncompleteError, ResourceError, SourceError, StalledError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.plugins import load_extension
from stoker.precompute.progress import Snapshot, line
from stoker.run.context import Run, settings_digest, work_digest, write_diary
from stoker.run.demo import BurgersSpec, write_burgers
from stoker.run.fitting import (
    Classification,
    FitReport,
    ImageClassifier,
    Learner,
    fit,
    one_thread,
    save_model,
)
from stoker.run.precompute import CacheResult, fill_caches
from stoker.run.train import PreparedCaches, prepare, train_prepared
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import Json
from stoker.service.folders import JobFile, Journal
from stoker.service.probes import RadioSet
from stoker.service.training_config import TrainingConfig, splits_of
from stoker.sources.protocol import Source
from stoker.sources.sql.query import parse_database_url
from stoker.sources.sql.source import SQLSource
from stoker.train.config import TrainConfig
from stoker.train.run import own_folder
from stoker.train.state import checkpoint_to_resume, newest_checkpoint
from stoker.units import format_count

log = logging.getLogger("stoker")

MODEL = "model.safetensors"
"""The best weights of a finished job, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One attempt."""

    folder: Path
    job: JobFile
    config: TrainingConfig
    settings: Config
    """The same in the pipeline's terms."""
    journal: Journal

    @property
    def device(self) -> torch.device:
        """Where to compute.

        Raises:
            ResourceError: `accelerator=gpu` where there is none.
        """
        device = torch.device(Run(self.settings).device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ResourceError(
                f"accelerator is 'gpu', and torch {torch.__version__} sees no CUDA device on this machine. "
                "Give accelerator='auto', which takes one where there is one"
            )
        return device

    def share(self, epoch: float) -> float:
        """Part of the job that is done after `epoch` epochs, 0..1."""
        return min(1.0, epoch / self.job.epochs)

    def caches(self) -> list[CacheResult]:
        """The caches of training and of validation, encoded as far as they were not."""
        progress = EncodingProgress(self.journal)
        run = Run(self.settings, progress=progress)
        return fill_caches(run, splits_of(self.config), training="records")

    def tell_started(self, caches: Sequence[CacheResult], facts: Mapping[str, Any]) -> None:
        """Say what is trained on, from where, and why from there."""
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
                "caches": [
                    {"name": one.name, "fingerprint": one.cache.fingerprint, "path": str(one.cache.path)}
                    for one in caches
                ],
                **facts,
            },
        )


def source_of(result: CacheResult) -> Source:
    """Where a cache was made from; it was opened to find the cache.

    Raises:
        IncompleteError: The data is gone.
    """
    filler = result.cache.filler
    source = getattr(filler, "source", None)
    if source is None:
        raise IncompleteError(
            f"the data that {result.name} was made from is gone. A job needs it to begin; bring it back"
        )
    return source


def fit_records(
    run: JobRun, make: Callable[[Sequence[CacheResult]], tuple[Learner, Mapping[str, Any]]]
) -> FitReport:
    """Train on whole records: caches, loaders, then epochs, each with its checkpoint.

    Args:
        run: The attempt.
        make: From the caches what is learnt, its module on the CPU, and facts of the data to tell; torch's
            random state is that of the job's seed when it is called.
    """
    device, meter = run.device, StallMeter()
    with own_folder(run.folder):
        caches = run.caches()
        train = _loader(run, caches[0], device, meter=meter)
        val = _loader(run, caches[1], device, order="sequential") if len(caches) > 1 else None
        torch.manual_seed(run.config.seed)
        learner, facts = make(caches)
        learner.model.to(device)
        plan = train.plan
        tiers = {"tier": plan.tier, "tiers": plan.records_by_tier(), "reason": plan.reason}
        run.tell_started(caches, {"device": str(device), **tiers, **facts})
        return fit(
            learner,
            train,
            val,
            fit_settings(run),
            folder=run.folder,
            expected=run.job.checkpoint is not None,
            meter=meter,
            on_event=_Lines(run).take,
        )


def fit_settings(run: JobRun) -> TrainConfig:
    """How to train."""
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


def best_weights(run: JobRun) -> Mapping[str, torch.Tensor]:
    """Weights of the best epoch, or of the last where nothing was judged."""
    root = run.folder / "checkpoints"
    for kind in ("best", "last"):
        found = newest_checkpoint(root, lambda why: _passed_over(run, why), kind)
        if found is not None:
            return found.model
    raise IncompleteError(f"{root} holds no whole checkpoint after training. Look at the disk")


def _loader(
    run: JobRun,
    result: CacheResult,
    device: torch.device,
    *,
    order: str = "full",
    meter: StallMeter | None = None,
) -> Loader:
    training = run.settings.training
    return Loader(
        result.cache,
        training.batch_size,
        tier=training.tier,
        device=device,
        seed=training.seed,
        order=order,
        reserve_bytes=training.reserve_bytes,
        meter=meter,
    )


class _Lines:
    """What happens in training, as lines."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._checkpoint = run.job.checkpoint

    def take(self, kind: str, facts: Mapping[str, Json]) -> None:
        """One event of `fit`."""
        journal, told = self._run.journal, cast("Mapping[str, Any]", facts)
        if kind == "batch":
            done = told["epoch"] - 1 + told["batch"] / told["batches"]
            # The row of a job counts finished epochs, and this one is not.
            journal.tell("batch", {**told, "epoch": told["epoch"] - 1, "progress": self._run.share(done)})
        elif kind == "epoch":
            self._tell_epoch(told)
        elif kind == "checkpoint":
            self._checkpoint = Path(told["path"]).name
        elif kind == "skip":
            _passed_over(self._run, told["why"])
        elif kind == "resume":
            row = told["row"]
            if row and row["epoch"] > journal.epoch:  # a kill came between its checkpoint and its line
                self._tell_epoch(row)
            journal.tell(
                "progress", {"message": f"continues after epoch {told['epoch']}, step {told['step']}"}
            )

    def _tell_epoch(self, row: Mapping[str, Any]) -> None:
        epoch = int(row["epoch"])
        more = {"progress": self._run.share(epoch), "message": f"epoch {epoch} of {self._run.job.epochs}"}
        losses = f"loss {row['train_loss']:.4g}, validation {row.get('val_loss', math.nan):.4g}"
        log.info("%s: %s, %.3g s", more["message"], losses, row["seconds"])
        known = {} if self._checkpoint is None else {"checkpoint": self._checkpoint}
        self._run.journal.tell("metrics", {**row, **known, **more})


def _passed_over(run: JobRun, why: str) -> None:
    log.warning("a damaged checkpoint is passed over: %s", why)
    run.journal.tell("progress", {"message": f"a damaged checkpoint is passed over: {why}"})


EVERY_S = 1.0
"""Seconds between two lines on how encoding goes, at least."""


class EncodingProgress:
    """How encoding goes, as `progress` lines and in the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due = 0.0

    @property
    def interval_s(self) -> float:
        """As often as lines may come."""
        return EVERY_S

    def update(self, snapshot: Snapshot) -> None:
        """A line, if one is due or the last sample is done."""
        if time.monotonic() < self._due and snapshot.done < snapshot.total:
            return
        self._due = time.monotonic() + EVERY_S
        facts = {"message": line(snapshot), "cache": snapshot.name, "encoded": snapshot.done}
        self._journal.tell("progress", {**facts, "samples": snapshot.total})

    def note(self, text: str) -> None:
        """Something that happened."""
        self._journal.tell("progress", {"message": text})

    def close(self) -> None:
        """Nothing is held."""


# ----------------------------------------------------------------------------------------------------------
# Train on radio rows: where a transmitter is, and how sure that is.


def train_rows(run: JobRun) -> dict[str, Any]:
    """Train; what the job came to, by name."""
    radio = load_extension("service.radio")
    made: list[Any] = []
    known: dict[str, Any] = {}

    def make(caches: Sequence[CacheResult]) -> tuple[Any, Mapping[str, Any]]:
        source = source_of(caches[0])
        if not isinstance(source, SQLSource):
            raise SourceError(f"{caches[0].name} is not made of the rows of a database")
        model = radio.TriangulationModel(dropout=run.config.dropout_rate)
        model.set_statistics(source.statistics)
        made.append(model)
        known["statistics"] = dict(source.statistics)
        known["caches"] = {one.split: one.cache.fingerprint for one in caches}
        return radio.Triangulation(model), {"dropped": _dropped(run, caches), "database": source.where_it_is}

    with one_thread():
        report = fit_records(run, make)
    (model,) = made
    model.cpu().load_state_dict(dict(best_weights(run)))
    facts = {**known, "architecture": "triangulation", "config": run.config.model_dump(mode="json")}
    save_model(run.folder / MODEL, model, facts)
    row = cast("Mapping[str, Any]", report.row)
    errors = {name: row[name] for name in ("rmse_m", "p50_m", "p68_m", "p95_m") if name in row}
    return {"best_val_loss": report.best, "best_epoch": report.best_epoch, "epoch": report.epochs, **errors}


def _dropped(run: JobRun, caches: Sequence[CacheResult]) -> int:
    """Rows of the data sets that `min_snr_db` and `max_gdop` leave out; rows of other sets do not count."""
    datasets = cast("Sequence[Mapping[str, Any]]", run.job.datasets)
    there = sum(RadioSet.of(one["spec"]).rows() for one in datasets)
    return max(0, there - sum(one.count for one in caches))


# ----------------------------------------------------------------------------------------------------------
# Train on images in a folder for each class.


def train_images(run: JobRun) -> dict[str, Any]:
    """Train; what the job came to, by name."""
    made: list[ImageClassifier] = []
    known: dict[str, Any] = {}

    def make(caches: Sequence[CacheResult]) -> tuple[Classification, Mapping[str, Any]]:
        classes: tuple[str, ...] = getattr(source_of(caches[0]), "classes", ())
        if len(classes) < 2:
            raise SourceError(
                f"{run.job.datasets[0]['name']} has {len(classes)} classes. Expected at least two folders of "
                "images, one for each class"
            )
        model = ImageClassifier(caches[0].fields["image"].shape[0], len(classes), run.config.dropout_rate)
        made.append(model)
        known["classes"] = list(classes)
        known["caches"] = {one.split: one.cache.fingerprint for one in caches}
        return Classification(model), {"classes": list(classes)}

    report = fit_records(run, make)
    (model,) = made
    model.cpu().load_state_dict(dict(best_weights(run)))
    facts = {**known, "architecture": "classifier", "config": run.config.model_dump(mode="json")}
    save_model(run.folder / MODEL, model, facts)
    row = cast("Mapping[str, Any]", report.row)
    accuracy = {"accuracy": row["accuracy"]} if "accuracy" in row else {}
    return {"best_val_loss": report.best, "best_epoch": report.best_epoch, "epoch": report.epochs, **accuracy}


# ----------------------------------------------------------------------------------------------------------
# Train on simulations: the operator on latents, as `stoker train` does it.


_BATCH_EVERY_S = 1.0


def train_operator(run: JobRun) -> dict[str, Any]:
    """Train; what the job came to, by name."""
    began = time.monotonic()
    _ = run.device  # a GPU that was asked for and is not there is said before anything is encoded
    lines = _OperatorLines(run)
    whole = Run(run.settings, progress=EncodingProgress(run.journal))
    prepared = prepare(whole)
    _go_on(run, whole, prepared, lines)
    lines.prepared = prepared
    result = train_prepared(whole, prepared, started=began, on_event=lines.take)
    report = result.report
    return {
        "epoch": report.epochs,
        "best_val_loss": report.best_val_nrmse,
        "val_nrmse": report.val_nrmse,
        "persistence_nrmse": report.persistence_nrmse,
        "rollout_nrmse": report.rollout_nrmse,
        "stall": report.stall,
        "tier": report.tier,
        "checkpoint": lines.checkpoint,
    }


def _go_on(run: JobRun, whole: Run, prepared: PreparedCaches, lines: _OperatorLines) -> None:
    """Have the loop take up the job's checkpoint, also when it was given more epochs after it had finished.

    Raises:
        CorruptError: There was a checkpoint, and none is whole.
    """
    root = run.folder / "checkpoints"
    found = checkpoint_to_resume(root, lines.passed_over, expected=run.job.checkpoint is not None)
    if found is None:
        return
    lines.epoch = int(found.state["progress"]["epoch"])
    run.journal.tell("progress", {"message": f"continues after epoch {lines.epoch}, step {found.step}"})
    write_diary(
        run.folder,
        digest=settings_digest(run.settings, prepared.fingerprints),
        finished=False,
        work=work_digest(whole, prepared.caches[0].cache.schema),
        step_s=None,
    )


class _OperatorLines:
    """What happens in the loop, as lines."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._due = 0.0
        self._step: dict[str, Json] = {}
        self._total = 1
        self._tier: str | None = None
        self.prepared: PreparedCaches | None = None
        self.checkpoint = run.job.checkpoint
        self.epoch = 0

    def take(self, kind: str, facts: Mapping[str, Json]) -> None:
        """One event of the loop."""
        told: Mapping[str, Any] = facts
        if kind == "serve" and self.prepared is not None:
            tiers = told["tiers"]
            self._tier = max(tiers, key=lambda name: tiers[name])
            self._run.tell_started(self.prepared.caches, {**told, "tier": self._tier})
        elif kind in ("start", "stage"):
            self._total = max(1, told["total"])
        elif kind == "step":
            self._take_step(told)
        elif kind == "epoch":
            self._take_epoch(told)
        elif kind in ("checkpoint", "best"):
            self.checkpoint = str(told["path"]).rpartition("/")[2]
        elif kind == "skip":
            self.passed_over(told["why"])

    def passed_over(self, why: str) -> None:
        """A damaged checkpoint."""
        log.warning("a damaged checkpoint is passed over: %s", why)
        self._run.journal.tell("progress", {"message": f"a damaged checkpoint is passed over: {why}"})

    def _take_step(self, told: Mapping[str, Any]) -> None:
        self._step = {"learning_rate": told["lr"], "grad_norm": told["grad_norm"]}
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _BATCH_EVERY_S
        facts = {"step": told["step"], "steps": self._total, "train_loss": told["loss"]}
        done = {"progress": min(1.0, told["step"] / self._total), "epoch": self.epoch}
        self._run.journal.tell("batch", {**facts, **done, **self._step})

    def _take_epoch(self, told: Mapping[str, Any]) -> None:
        self.epoch = int(told["epoch"])
        row = {name: value for name, value in told.items() if name not in ("kind", "loss")}
        row |= {"train_loss": told["loss"], "val_loss": told.get("val_nrmse"), "tier": self._tier}
        row |= {"progress": self._run.share(self.epoch), "checkpoint": self.checkpoint, **self._step}
        row["message"] = f"epoch {self.epoch} of {self._run.job.epochs}"
        log.info("%s: loss %.4g, validation %s", row["message"], told["loss"], told.get("val_nrmse"))
        self._run.journal.tell("metrics", {name: one for name, one in row.items() if one is not None})


# ----------------------------------------------------------------------------------------------------------
# Make a data set: the whole of it or nothing, however often the process is killed.


WAIT_S = 3600.0
"""How long the maker before, who writes into the same database, is waited for."""


def generate(job: JobFile, journal: Journal) -> dict[str, Any]:
    """Make what the job's one data set says; what the job came to, by name.

    Raises:
        ConfigError: It is none that the service makes.
        StalledError: Another maker had the database all that time.
    """
    datasets = cast("Sequence[Mapping[str, Any]]", job.datasets)
    if len(datasets) != 1 or "make" not in datasets[0]["spec"]:
        raise ConfigError(f"job {job.id} names no data set to make. Expected one, as `generate` notes it")
    dataset = datasets[0]
    spec: Mapping[str, Any] = dataset["spec"]
    journal.tell("started", {"message": f"makes {dataset['name']}"})
    made = _radio(spec, journal) if dataset["kind"] == "radio" else _burgers(spec)
    return {"epoch": job.epochs, "message": f"{dataset['name']} is there", "made": made}


def _radio(spec: Mapping[str, Any], journal: Journal) -> bool:
    radio = load_extension("service.radio")
    wanted, path = radio.RadioSpec(**spec["make"]), Path(parse_database_url(str(spec["url"])).target)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_folder(path.parent, "generate") as free:
        if not free:
            journal.tell("progress", {"message": f"waits for {lock_holder(path.parent, 'generate')}"})
    with lock_folder(path.parent, "generate", timeout_s=WAIT_S) as free:
        if not free:
            raise StalledError(
                f"{path} was written to by {lock_holder(path.parent, 'generate')} for {WAIT_S:g} s. "
                "See its job"
            )
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # jobs read while others are made
        journal.tell("progress", {"message": f"makes {format_count(wanted.rows)} rows"})
        return radio.write_radio(path, wanted)


def _burgers(spec: Mapping[str, Any]) -> bool:
    path = Path(str(spec["path"]))
    if path.is_file():  # it appears whole or not at all
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_burgers(path, BurgersSpec(**spec["make"]))
    return True


def train(run: JobRun, kind: str) -> dict[str, Any]:
    """Train on data of a kind; return what the job came to, by name."""
    return {"radio": train_rows, "images": train_images, "hdf5": train_operator}[kind](run)
