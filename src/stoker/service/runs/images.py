"""Train on images in a folder for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stoker.errors import SourceError
from stoker.pipeline.fitting import Classification, ImageClassifier, save_model
from stoker.pipeline.precompute import CacheResult
from stoker.service.runs.run import MODEL, JobRun, best_weights, fit_records, source_of


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
