"""Train on radio rows: where a transmitter is, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stoker.errors import SourceError
from stoker.pipeline.fitting import one_thread
from stoker.pipeline.precompute import CacheResult
from stoker.pipeline.radio import Triangulation, TriangulationModel, save_regressor
from stoker.service.probes import RadioSet
from stoker.service.runs.run import MODEL, JobRun, best_weights, fit_records, source_of
from stoker.sources.sql.source import SQLSource


def train_rows(run: JobRun) -> dict[str, Any]:
    """Train; what the job came to, by name."""
    made: list[TriangulationModel] = []
    known: dict[str, Any] = {}

    def make(caches: Sequence[CacheResult]) -> tuple[Triangulation, Mapping[str, Any]]:
        source = source_of(caches[0])
        if not isinstance(source, SQLSource):
            raise SourceError(f"{caches[0].name} is not made of the rows of a database")
        model = TriangulationModel(dropout=run.config.dropout_rate)
        model.set_statistics(source.statistics)
        made.append(model)
        known["statistics"] = dict(source.statistics)
        known["caches"] = {one.split: one.cache.fingerprint for one in caches}
        return Triangulation(model), {"dropped": _dropped(run, caches), "database": source.where_it_is}

    with one_thread():
        report = fit_records(run, make)
    (model,) = made
    model.cpu().load_state_dict(dict(best_weights(run)))
    facts = {**known, "architecture": "triangulation", "config": run.config.model_dump(mode="json")}
    save_regressor(run.folder / MODEL, model, facts)
    row = cast("Mapping[str, Any]", report.row)
    errors = {name: row[name] for name in ("rmse_m", "p50_m", "p68_m", "p95_m") if name in row}
    return {"best_val_loss": report.best, "best_epoch": report.best_epoch, "epoch": report.epochs, **errors}


def _dropped(run: JobRun, caches: Sequence[CacheResult]) -> int:
    """Rows of the data sets that `min_snr_db` and `max_gdop` leave out; rows of other sets do not count."""
    datasets = cast("Sequence[Mapping[str, Any]]", run.job.datasets)
    there = sum(RadioSet.of(one["spec"]).rows() for one in datasets)
    return max(0, there - sum(one.count for one in caches))
