"""One attempt at a job, and what all kinds of data have in common: caches first, then training on records."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from stoker.config import Config
from stoker.errors import IncompleteError, ResourceError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.pipeline.context import Run
from stoker.pipeline.fitting import FitReport, Lesson, fit
from stoker.pipeline.precompute import CacheResult, fill_caches
from stoker.schema import Json
from stoker.service.folders import JobFile
from stoker.service.runs.journal import EncodingProgress, Journal
from stoker.service.runs.settings import splits_of
from stoker.service.training_config import TrainingConfig
from stoker.sources.protocol import Source
from stoker.train.config import TrainConfig
from stoker.train.run import own_folder
from stoker.train.state import newest_checkpoint
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
    run: JobRun, make: Callable[[Sequence[CacheResult]], tuple[Lesson, Mapping[str, Any]]]
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
        lesson, facts = make(caches)
        lesson.model.to(device)
        plan = train.plan
        tiers = {"tier": plan.tier, "tiers": plan.records_by_tier(), "reason": plan.reason}
        run.tell_started(caches, {"device": str(device), **tiers, **facts})
        return fit(
            lesson,
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
        delta=config.early_stop_delta,
        checkpoint_every=None,
        save_every_s=1.0,
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
