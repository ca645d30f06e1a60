"""What `stoker train` adds to the page of its run: start-up, tiers, caches, machine, settings, recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stoker.config import Config
from stoker.loader import Loader
from stoker.monitor.trackers import flat
from stoker.pipeline.diary import run_dir_of
from stoker.pipeline.machine import describe_machine
from stoker.pipeline.precompute import CacheResult
from stoker.pipeline.tracking import COST, GPU, RunTracking
from stoker.train.metrics import MetricsLog
from stoker.train.report import Section
from stoker.units import format_bytes, format_count, format_percent, format_seconds


class Ready(Protocol):
    """The caches of a run."""

    @property
    def caches(self) -> tuple[CacheResult, ...]:
        """All of them."""
        ...


def sections(
    config: Config, prepared: Ready, loaders: Sequence[Loader], tracked: RunTracking
) -> list[Section]:
    """The tables, in the order of the page."""
    return [
        _startup(tracked),
        _tiers(loaders),
        *_used(config, tracked),
        _caches(prepared.caches),
        Section(title="Machine", rows=[("machine", describe_machine())]),
        Section(title="Settings", rows=_pairs(flat(config.to_dict())), folded=True),
        *(
            Section(title=f"Recipe of {r.name}", rows=_pairs(flat(r.cache.recipe.entries)), folded=True)
            for r in prepared.caches
        ),
    ]


def _startup(tracked: RunTracking) -> Section:
    phases = tracked.startup.phases
    rows = [(phase.name, format_seconds(phase.seconds), phase.note) for phase in phases]
    rows.append(("in all", format_seconds(sum(phase.seconds for phase in phases)), ""))
    return Section(title="Start-up", rows=rows)


def _tiers(loaders: Sequence[Loader]) -> Section:
    rows: list[Sequence[str]] = []
    for loader in loaders:
        held = loader.plan.records_by_tier().items()
        where = ", ".join(f"{format_count(records)} {tier}" for tier, records in held if records)
        rows.append((loader.dataset.name, where, loader.plan.reason))
    return Section(title="Tiers", heading=("cache", "records", "why"), rows=rows)


def _used(config: Config, tracked: RunTracking) -> list[Section]:
    """Rate, GPU and cost by epoch; a GPU that was not measured is said to be so."""
    kept = [row for row in MetricsLog(run_dir_of(config) / "metrics.jsonl").rows() if "epoch" in row]
    rows = [
        (
            str(row["epoch"]),
            _shown(row, "training/epoch_time_sec", format_seconds),
            _shown(row, "training/samples_per_sec", format_count),
            _shown(row, "training/stall", format_percent),
            _shown(row, GPU, "{:.0f} %".format),
            _shown(row, COST, "{:.3g}".format),
        )
        for row in kept
        if row.get("kind") == "metrics"
    ]
    heading = ("epoch", "time", "samples/s", "stall", "GPU", "cost so far")
    if tracked.gpu is not None:
        rows.append(("GPU", f"not measured: {tracked.gpu.reason}", "", "", "", ""))
    return [Section(title="Pace and cost", heading=heading, rows=rows)] if rows else []


def _shown(row: Mapping[str, Any], name: str, form: Any) -> str:
    return form(row[name]) if isinstance(row.get(name), int | float) else "-"


def _caches(caches: Sequence[CacheResult]) -> Section:
    rows = [
        (
            result.name,
            format_count(len(result.cache)),
            format_bytes(result.bytes),
            format_count(result.encoded),
            format_count(result.reused),
            format_count(len(result.failures)),
            result.cache.fingerprint,
            str(result.cache.path),
        )
        for result in caches
    ]
    heading = ("cache", "records", "bytes", "encoded", "reused", "quarantined", "fingerprint", "path")
    return Section(title="Caches", heading=heading, rows=rows)


def _pairs(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "-" if value is None else str(value)) for name, value in entries.items()]
