"""Train on simulations: the operator on latents, as `stoker train` does it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stoker.pipeline.context import Run, settings_digest, work_digest, write_diary
from stoker.pipeline.train import Prepared, prepare, train_prepared
from stoker.schema import Json
from stoker.service.runs.journal import EncodingProgress
from stoker.service.runs.run import JobRun, log
from stoker.train.state import checkpoint_to_resume

_BATCH_EVERY_S = 1.0


def train_operator(run: JobRun) -> dict[str, Any]:
    """Train; what the job came to, by name."""
    began = time.monotonic()
    _ = run.device  # a GPU that was asked for and is not there is said before anything is encoded
    lines = _Lines(run)
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


def _go_on(run: JobRun, whole: Run, prepared: Prepared, lines: _Lines) -> None:
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


class _Lines:
    """What happens in the loop, as lines."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._due = 0.0
        self._step: dict[str, Json] = {}
        self._total = 1
        self._tier: str | None = None
        self.prepared: Prepared | None = None
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
