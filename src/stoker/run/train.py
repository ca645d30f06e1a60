"""Caches, loaders, training loop: the main job of one configuration, and what it is tracked by.

The names `startup/*` and `training/*` are those of the earlier systems. Every row of them also goes to
`metrics.jsonl` (`kind: metrics`) and to whatever listens to the run, as the event `metrics`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.monitor.meter import GpuWatch, MissingGpu
from stoker.plan.resources import require_writable
from stoker.precompute import EncodeFiller
from stoker.precompute.background import SpotCheck, SpotChecks, SpotReport
from stoker.run.caches import locate
from stoker.run.context import (
    Run,
    describe_machine,
    inputs_of,
    kept_fields,
    on_own_device,
    only_stage,
    settings_digest,
    stages_of,
    target_of,
    trains_decoder,
    work_digest,
    write_diary,
)
from stoker.run.loaders import RunLoaders, StageLoaders, normalized, serve
from stoker.run.physical import field_space, physical_space
from stoker.run.precompute import CacheResult, as_served, fill_caches
from stoker.schema import Json, JsonResult, as_json, flatten_settings
from stoker.store import Cache
from stoker.train.config import EventSink, FieldSpace, PhysicalSpace, TrainConfig, TrainReport
from stoker.train.report import ReportTable
from stoker.train.run import lock_run_folder, train
from stoker.train.state import MetricsLog
from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.monitor.trackers import Ending, TrackerProcesses

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# What a run is told by while it continues: start-up, stall, GPU and cost by name, to wherever they are kept.

EVERY_S = 10.0
"""Seconds between two rows within an epoch."""
COST = "cost/run"
GPU = "training/gpu_utilization_pct"
ERRORS = {
    "val_nrmse": "validation/nrmse",
    "rollout_nrmse": "validation/rollout_nrmse",
    "physical_nrmse": "validation/physical_nrmse",
    "physical_rollout_nrmse": "validation/physical_rollout_nrmse",
}
"""Errors of an epoch by the names under which they are tracked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupPhase(JsonResult):
    """A part of what passes before the first step."""

    name: str
    seconds: float
    note: str = ""
    """Its work, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Phases before training, with their times."""

    started_s: float
    """When the process began, on the clock of `time.monotonic`."""
    phases: list[StartupPhase]
    """In order; the first batch is added when it is there."""
    values: Mapping[str, float]
    """Figures by name, as far as they are known."""


@dataclass(slots=True)
class _MeterTotals:
    """Totals of the meter over some intervals."""

    wait_s: float = 0.0
    step_s: float = 0.0
    examples: int = 0
    tiers: dict[str, int] | None = None

    def add(self, facts: Mapping[str, Any]) -> None:
        """Take in one event `stall`."""
        self.wait_s += facts["wait_s"]
        self.step_s += facts["step_s"]
        self.examples += facts["examples"]
        tiers = self.tiers or {}
        for tier, examples in facts["tiers"].items():
            tiers[tier] = tiers.get(tier, 0) + examples
        self.tiers = tiers

    def values(self) -> dict[str, float]:
        """Return stall, rate, and the part of the examples that each tier served; empty without a meter."""
        spent_s = self.wait_s + self.step_s
        if not spent_s or not self.examples:
            return {}
        shares = {f"tier/{tier}": n / self.examples for tier, n in (self.tiers or {}).items()}
        rate = self.examples / spent_s
        return {"training/stall": self.wait_s / spent_s, "training/samples_per_sec": rate, **shares}


class RunTracking:
    """Listens to the training loop; `tracking` makes one and ends it."""

    def __init__(self, run: Run, startup: Startup, *, tell: EventSink | None = None) -> None:
        """`tell`: told every row too."""
        self.startup = startup
        self.values: dict[str, float] = dict(startup.values)
        """The newest figure by name."""
        self.gpu: MissingGpu | None = None
        """Why there is no figure of the GPU, as far as that is known."""
        self._run, self._started, self._tell = run, startup.started_s, tell
        self._folder = run.run_dir
        self._price = run.config.training.price_per_hour
        self._paid = 0.0
        self._trackers: TrackerProcesses | None = None
        self._is_begun = False
        self._watch: GpuWatch | None = None
        self._step = 0
        self._due_s = 0.0
        self._interval, self._epoch = _MeterTotals(), _MeterTotals()

    def listen(self, kind: str, facts: Mapping[str, Json]) -> None:
        """Take in one event of the loop."""
        known = cast("Mapping[str, Any]", facts)
        self._step = known.get("step", self._step)
        if kind == "start":
            self._start(resumed=self._step > 0)
        elif kind == "ready":
            self.startup.phases.append(StartupPhase(name="first batch", seconds=known["seconds"]))
            total_s = time.monotonic() - self._started
            self.values["startup/total_startup_time_min"] = total_s / 60
        elif kind == "stall":
            self._take_interval(known)
        elif kind == "step" and self._trackers is not None:
            row = {"training/loss": known["loss"], "training/lr": known["lr"]}
            self._trackers.log(self._step, {**row, "training/grad_norm": known["grad_norm"]})
        elif kind == "epoch":
            self._take_epoch(known)
        if kind in ("start", "ready") and self._is_begun and self._is_up:
            startup = {name: v for name, v in self.values.items() if name.startswith("startup/")}
            phases: list[Json] = [phase.to_json() for phase in self.startup.phases]
            self._keep(startup, {"phases": phases, "gpu": None if self.gpu is None else self.gpu.reason})

    @property
    def _is_up(self) -> bool:
        """The first batch was there."""
        return "startup/total_startup_time_min" in self.values

    def end(self, status: Ending) -> None:
        """Let go of everything, trackers last: they have a deadline."""
        if self._watch is not None:
            self._watch.stop()
        if self._trackers is not None:
            self._trackers.end(status)

    def _start(self, *, resumed: bool) -> None:
        """Only now: until here an earlier run in the folder had not been moved aside."""
        if resumed:
            costs = [row[COST] for row in MetricsLog(self._folder / "metrics.jsonl").rows() if COST in row]
            self._paid = costs[-1] if costs else 0.0
        if names := self._run.config.training.trackers:
            from stoker.monitor.trackers import TrackedRun, TrackerProcesses  # most runs have none

            run = TrackedRun(
                name=self._folder.resolve().name,
                folder=self._folder,
                settings=self._run.config.to_dict(),
                resumed=resumed,
            )
            self._trackers = TrackerProcesses(names, run, log.warning)
        self._is_begun = True
        watched = watch_gpu(self._run.device)
        if isinstance(watched, MissingGpu):
            self.gpu = watched
        else:
            self._watch = watched
        self._due_s = time.monotonic() + EVERY_S

    def _take_interval(self, facts: Mapping[str, Any]) -> None:
        self._interval.add(facts)
        self._epoch.add(facts)
        now_s = time.monotonic()
        if now_s >= self._due_s and self._trackers is not None:
            self._due_s = now_s + EVERY_S
            self._trackers.log(self._step, {**self._interval.values(), **self._costs()})
            self._interval = _MeterTotals()

    def _take_epoch(self, facts: Mapping[str, Any]) -> None:
        values = {**self._epoch.values(), "training/epoch_time_sec": float(facts["seconds"])}
        values |= {"training/epoch_loss": float(facts["loss"]), **self._costs()}
        values |= {name: facts[key] for key, name in ERRORS.items() if facts.get(key) is not None}
        if self._watch is not None:
            found = self._watch.take()
            if isinstance(found, MissingGpu):
                self.gpu = found
            else:
                self.gpu, values[GPU] = None, 100 * found
        self._interval, self._epoch = _MeterTotals(), _MeterTotals()
        self.values |= values
        self._keep(values, {"epoch": facts["epoch"]})

    def _costs(self) -> dict[str, float]:
        if self._price is None:
            return {}
        return {COST: self._paid + self._price * (time.monotonic() - self._started) / 3600}

    def _keep(self, values: Mapping[str, float], more: Mapping[str, Json]) -> None:
        """Keep a row for all listeners."""
        row: dict[str, Json] = {"kind": "metrics", "step": self._step, **more, **values}
        MetricsLog(self._folder / "metrics.jsonl").append(row)
        if self._trackers is not None:
            self._trackers.log(self._step, values)
        if self._tell is not None:
            self._tell("metrics", row)


@contextmanager
def tracking(tracked: RunTracking) -> Generator[RunTracking]:
    """Track a run while the block lasts, and tell how it ended."""
    status: Ending = "failed"
    try:
        yield tracked
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        tracked.end(status)


def watch_gpu(device: str) -> GpuWatch | MissingGpu:
    """Return a watch on the GPU that a run computes on; on a CPU, why nothing is watched."""
    if device == "cpu":
        return MissingGpu(reason="the device is cpu")
    # As the driver's library knows the GPU, which numbers them without regard to CUDA_VISIBLE_DEVICES.
    return GpuWatch(str(torch.cuda.get_device_properties(device).uuid))


# ----------------------------------------------------------------------------------------------------------
# What `stoker train` adds to the page of its run: start-up, tiers, caches, machine, settings, recipes.


def sections(
    run: Run, prepared: PreparedCaches, loaders: Sequence[Loader], tracked: RunTracking
) -> list[ReportTable]:
    """Return the tables, in the order of the page."""
    return [
        _startup_rows(tracked),
        _tiers(loaders),
        *_used(run.run_dir, tracked),
        _caches(prepared.caches),
        ReportTable(title="Machine", rows=[("machine", describe_machine())]),
        ReportTable(title="Settings", rows=_pairs(run.config.to_dict()), folded=True),
        *(
            ReportTable(title=f"Recipe of {r.name}", rows=_pairs(r.cache.recipe.entries), folded=True)
            for r in prepared.caches
        ),
    ]


def _startup_rows(tracked: RunTracking) -> ReportTable:
    phases = tracked.startup.phases
    rows = [(phase.name, format_seconds(phase.seconds), phase.note) for phase in phases]
    rows.append(("in all", format_seconds(sum(phase.seconds for phase in phases)), ""))
    return ReportTable(title="Start-up", rows=rows)


def _tiers(loaders: Sequence[Loader]) -> ReportTable:
    rows: list[Sequence[str]] = []
    for loader in loaders:
        held = loader.plan.records_by_tier().items()
        where = ", ".join(f"{format_count(records)} {tier}" for tier, records in held if records)
        rows.append((loader.dataset.name, where, loader.plan.reason))
    return ReportTable(title="Tiers", heading=("cache", "records", "why"), rows=rows)


def _used(run_dir: Path, tracked: RunTracking) -> list[ReportTable]:
    """Return rate, GPU and cost by epoch; a row says why if the GPU was not measured."""
    kept = [row for row in MetricsLog(run_dir / "metrics.jsonl").rows() if "epoch" in row]
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
    return [ReportTable(title="Pace and cost", heading=heading, rows=rows)] if rows else []


def _shown(row: Mapping[str, Any], name: str, form: Any) -> str:
    return form(row[name]) if isinstance(row.get(name), int | float) else "-"


def _caches(caches: Sequence[CacheResult]) -> ReportTable:
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
    return ReportTable(title="Caches", heading=heading, rows=rows)


def _pairs(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "-" if value is None else str(value)) for name, value in flatten_settings(entries).items()]


# ----------------------------------------------------------------------------------------------------------
# The run.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Results of a run."""

    report: TrainReport
    phases: tuple[StartupPhase, ...]
    """Phases before the first step, in order."""
    metrics: Mapping[str, float]
    """The last figure of each name that was tracked."""
    gpu: str | None
    """Why there is no figure of the GPU; None: there is one."""
    caches: tuple[CacheResult, ...]
    """The training cache, then the validation cache; both of each task in turn."""
    cache_s: float
    """Seconds until all caches were ready."""
    total_s: float
    """Seconds from the start of the process to the first batch."""
    train_s: float
    """Seconds of the training loop."""
    reason: str
    """Why the records are served from where they are."""
    epoch_steps: int
    """Steps of one whole epoch."""
    repaired: int = 0
    """Damaged records of both caches that were encoded again while they were served."""
    spot_check: SpotReport | None = None
    """Records compared with what source and encoder give now; None: not asked for."""
    over_budget: str | None = None
    """Why the run waited longer than `training.max_stall` allows, and the cure; None: it did not."""

    @property
    def cache_reused(self) -> bool:
        """True if nothing had to be encoded."""
        return not any(cache.encoded for cache in self.caches)

    @property
    def extent(self) -> str:
        """Length of training in words; a last epoch that was cut short (`max_steps`) counts in part."""
        steps, epochs = self.report.steps, round(self.report.steps / self.epoch_steps, 2)
        shown = f"{format_count(steps)} step{'s' * (steps != 1)}"
        if steps < self.epoch_steps:
            return f"{shown} of the {format_count(self.epoch_steps)} of an epoch"
        return f"{epochs:g} epoch{'s' * (epochs != 1)}, {shown}"

    @property
    def first_batch_s(self) -> float:
        """Seconds from ready caches to the first batch; 0 where all steps were done before."""
        return self.report.startup.get("first_batch_s", 0.0)

    @property
    def pictures(self) -> list[str]:
        """Curves and report, as paths."""
        run_dir = self.report.run_dir
        return [str(run_dir / name) for name in ("curves.png", "report.html") if (run_dir / name).is_file()]

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        report: dict[str, Any] = as_json(self.report)
        parts = report.pop("parts")
        del report["finished"]
        return {
            **report,
            "stall_parts": parts,
            "over_budget": self.over_budget,
            "epoch_steps": self.epoch_steps,
            "startup": {
                **report["startup"],
                "cache_s": self.cache_s,
                "first_batch_s": self.first_batch_s,
                "total_s": self.total_s,
                "phases": as_json(self.phases),
            },
            "metrics": {**self.metrics, **({} if self.gpu is None else {GPU: None})},
            "gpu": self.gpu,
            "cache_reused": self.cache_reused,
            "train_s": self.train_s,
            "repaired": self.repaired,
            "spot_check": as_json(self.spot_check),
            "reason": self.reason,
            "caches": as_json(self.caches),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCaches:
    """Ready caches of a run."""

    caches: tuple[CacheResult, ...]
    """The training cache, then the validation cache; both of each task in turn."""
    begun_s: float
    """When they were begun with, on the clock of `time.monotonic`."""
    seconds: float
    """Seconds until they were ready."""

    @property
    def reused(self) -> bool:
        """True if nothing had to be encoded."""
        return not any(cache.encoded for cache in self.caches)

    def phases(self, started_s: float, now_s: float) -> list[StartupPhase]:
        """Return the phases from the start of the process until now, just before training."""
        counts = (
            f"{r.name} {format_count(r.encoded)} encoded"
            + (f", {format_count(r.adopted)} adopted" if r.adopted else "")
            for r in self.caches
            if r.encoded or r.adopted
        )
        note = ", ".join(counts) or "nothing to encode"
        ready_s = self.begun_s + self.seconds
        return [
            StartupPhase(name="program and settings", seconds=self.begun_s - started_s),
            StartupPhase(name="caches", seconds=self.seconds, note=note),
            StartupPhase(name="plan and loaders", seconds=now_s - ready_s),
        ]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the caches by split; by name where there are several tasks."""
        several = len(self.caches) > 2
        return {r.name if several else r.split: r.cache.fingerprint for r in self.caches}


def train_config(
    run: Run,
    *,
    started: float | None = None,
    on_event: EventSink | None = None,
    stage: str | None = None,
) -> TrainResult:
    """Encode what is missing, then train; an interrupted run with the same settings continues.

    Args:
        run: The settings; all of its ranks are to make this call.
        started: When the process began, on the clock of `time.monotonic`; None: now.
        on_event: Told of what happens in the training loop.
        stage: Do this stage alone, by its name; None or `all`: all that are left.
    Raises:
        ConfigError: The split to train on is `val`, or one operator cannot take all tasks.
        StokerError: As `fill_caches` and `train`.
    """
    started = time.monotonic() if started is None else started
    run = on_own_device(run)
    only_stage(run.config, stage)
    return train_prepared(run, prepare(run), started=started, on_event=on_event, stage=stage)


def prepare(run: Run) -> PreparedCaches:
    """Return the caches that training reads: the first of `data.split`, and `val`.

    The run's folder is held meanwhile, so that a second run in it is refused before it encodes anything.
    """
    began = time.monotonic()
    if names := run.config.training.trackers:
        from stoker.monitor.trackers import check_trackers  # most runs have none

        check_trackers(names)
    splits = training_splits(run)
    if trains_decoder(run):
        log.info(
            "a decoder is trained on raw fields, so caches keep %s: these are separate caches",
            ", ".join(kept_fields(run)),
        )
    if len(run.tasks) > 1:
        from stoker.run.tasks import check_together  # most runs have one task

        check_together({part.task: locate(part, splits[0]).recipe.schema for part in run.parts()})
    run_dir = require_writable(run.run_dir, "training.run_dir")
    with lock_run_folder(run_dir) if run.ranks.is_rank_zero else nullcontext():
        caches = fill_caches(run, splits, training="windows")
    return PreparedCaches(caches=tuple(caches), begun_s=began, seconds=time.monotonic() - began)


def training_splits(run: Run) -> tuple[str, str]:
    """Return the split to train on, and the one to validate on.

    Raises:
        ConfigError: The split to train on is `val`.
    """
    if run.split == "val":
        raise ConfigError(
            f"data.split is {run.config.data.wanted_splits[0]!r}, which training validates on",
            hint="Expected the split to train on, as data.split=train; precompute takes any",
        )
    return run.split, "val"


def train_prepared(
    run: Run,
    prepared: PreparedCaches,
    *,
    started: float,
    on_event: EventSink | None = None,
    stage: str | None = None,
) -> TrainResult:
    """Train on ready caches; see `train_config`."""
    config, ranks, run_dir = run.config, run.ranks, run.run_dir
    meter = StallMeter(rank=ranks.rank)
    digest = settings_digest(config, prepared.fingerprints)
    work = work_digest(run, prepared.caches[0].cache.schema)
    caches = [r.cache for r in prepared.caches]
    target = target_of(run.parts()[0], caches[0].schema)
    space = None if target is not None else _field_space(run, prepared)
    make = partial(serve, run, caches, digest=digest, meter=meter)
    loaders = StageLoaders(config, lambda horizon: make(horizon=horizon))
    served = loaders.served
    shared, epoch_steps = served.shared, len(served.train)

    def note(kind: str, facts: Mapping[str, Json]) -> None:
        if kind in ("start", "done"):  # said while the folder is still ours; another stage may take it up
            over, step_s = facts.get("finished") is True, cast("float | None", facts.get("step_s"))
            write_diary(run_dir, digest=digest, finished=over, work=work, step_s=step_s, ranks=shared.begun)
        if on_event is not None:
            on_event(kind, facts)
        tracked.listen(kind, facts)

    _tell_before(run_dir, prepared, served, on_event if ranks.is_rank_zero else None)
    checks = begin_spot_checks(config, caches[::2]) if ranks.is_rank_zero else None
    began = time.monotonic()
    with tracking(RunTracking(run, _startup(prepared, started, began), tell=on_event)) as tracked:
        told: dict[str, Any] = {
            "meter": meter,
            "on_event": note,
            "about": lambda: sections(run, prepared, loaders.served.loaders, tracked),
        }
        try:
            if target is not None:
                report = _train_target(run, served, target, told)
            else:
                report = _train_operator(run, prepared, loaders, space, stage, told)
        finally:
            checked = None if checks is None else checks.finish()
        train_s = time.monotonic() - began
    return TrainResult(
        report=report,
        cache_s=prepared.seconds,
        total_s=began - started + report.startup.get("first_batch_s", 0.0),
        train_s=train_s,
        epoch_steps=epoch_steps,
        **_final_facts(prepared, loaders.served, tracked),
        spot_check=checked,
        over_budget=_stall_verdict(run, prepared.caches[0].cache, report),
    )


def _train_operator(
    run: Run,
    prepared: PreparedCaches,
    loaders: StageLoaders,
    space: FieldSpace | None,
    stage: str | None,
    told: Mapping[str, Any],
) -> TrainReport:
    served = loaders.served
    return train(
        served.train,
        served.val,
        loop_settings(run, len(served.train), resume=served.shared.resume),
        run.run_dir,
        ranks=run.ranks,
        physical=_physical(run, prepared),
        space=space,
        loader_of=loaders.loader_of,
        only=only_stage(run.config, stage),
        **told,
    )


def _train_target(run: Run, served: RunLoaders, target: str, told: Mapping[str, Any]) -> TrainReport:
    """Train a network to predict one field of records without time."""
    from stoker.run.supervised import SupervisedRun  # most runs train an operator

    assert isinstance(served.train, Loader)  # there is one task
    assert not isinstance(served.val, dict)
    caches = [loader.dataset for loader in served.loaders]
    own = SupervisedRun(
        target=target,
        inputs=inputs_of(run.config, caches[0].schema, target),
        caches=caches,
        config=loop_settings(run, len(served.train), resume=served.shared.resume),
        folder=run.run_dir,
    )
    return own.train(served.train, served.val, **told)


def _final_facts(prepared: PreparedCaches, served: RunLoaders, tracked: RunTracking) -> dict[str, Any]:
    """Return what became of the caches and what was tracked, by the names of `TrainResult`."""
    return {
        "phases": tuple(tracked.startup.phases),
        "metrics": tracked.values,
        "gpu": None if tracked.gpu is None else tracked.gpu.reason,
        "caches": _final_caches(prepared.caches, served),
        "reason": served.reason,
        "repaired": sum(loader.repaired for loader in served.loaders),
    }


def _stall_verdict(run: Run, cache: Cache, report: TrainReport) -> str | None:
    if run.config.training.max_stall is None:
        return None
    from stoker.run.plan import verdict_of  # most runs have no such limit

    return verdict_of(run, cache, report)


def _startup(prepared: PreparedCaches, started_s: float, now_s: float) -> Startup:
    """Return the start-up up to now."""
    values = {
        "startup/cache_precompute_time_min": prepared.seconds / 60,
        "startup/cache_reused": float(prepared.reused),
    }
    return Startup(started_s=started_s, phases=prepared.phases(started_s, now_s), values=values)


def _tell_before(run_dir: Path, prepared: PreparedCaches, served: RunLoaders, sink: EventSink | None) -> None:
    """Log what becomes of an earlier run here, and where records are served from."""
    if not served.shared.resume and any((run_dir / "checkpoints").glob("*")):
        log.info(
            "%s holds a run that is finished or of other settings: training starts again, and its "
            "checkpoints and metrics move to checkpoints.previous and metrics.previous.jsonl. Those before "
            "keep a number, as checkpoints.previous-1; delete them when they are not needed",
            run_dir,
        )
    for ready, loader in zip(prepared.caches[::2], served.loaders, strict=False):
        if sink is not None:
            tiers: dict[str, Json] = dict(loader.plan.records_by_tier())
            sink("serve", {"name": ready.cache.name, "tiers": tiers, "reason": loader.plan.reason})


def _final_caches(results: Sequence[CacheResult], served: RunLoaders) -> tuple[CacheResult, ...]:
    """Return the caches after training; those that were filled meanwhile have more records."""
    now = {loader.dataset.path: loader.dataset for loader in served.loaders}
    return tuple(as_served(result, now.get(result.path, result.cache)) for result in results)


def begin_spot_checks(config: Config, caches: Sequence[Cache]) -> SpotChecks | None:
    """Return the comparisons that `verify.spot_check` asks for, begun; None where it asks for none.

    Args:
        config: The settings.
        caches: The training cache of each task.
    """
    count, checks = config.verify.spot_check, list[SpotCheck]()
    for cache in caches if count else ():
        if not cache.complete:
            why = "is being filled now, so nothing was stored to compare"
        elif not isinstance(cache.filler, EncodeFiller):
            why = "was made of raw data that is gone, so nothing can be compared"
        else:
            checks.append(cache.filler.spot_check(cache, count, seed=config.training.seed))
            continue
        log.warning("verify.spot_check: %s %s", cache.path, why)
    return SpotChecks(checks) if checks else None


def _physical(run: Run, prepared: PreparedCaches) -> dict[str, PhysicalSpace]:
    """Return by task how to judge in fields, without tasks whose records are normalized after encoding."""
    found: dict[str, PhysicalSpace] = {}
    for part, result in zip(run.parts(), prepared.caches[1::2], strict=True):
        space = None if normalized(part.config) else physical_space(result.cache)
        if space is not None:
            found[part.task if len(run.tasks) > 1 else ""] = space
    return found


def _field_space(run: Run, prepared: PreparedCaches) -> FieldSpace | None:
    """Return what stages that train a decoder need; None without such a stage.

    Raises:
        ConfigError: There are several tasks, or states do not reach the loop as they were encoded.
    """
    if not trains_decoder(run):
        return None
    if len(run.tasks) > 1:
        raise ConfigError(
            "inverse losses and the stage decoder train one decoder, and there are the tasks "
            f"{', '.join(run.tasks)}",
            hint="Train each alone with data.task, or leave them out",
        )
    if normalized(run.config):
        raise ConfigError(
            "training.transforms normalizes states, and a decoder is trained on states as they were encoded",
            hint="Use data.normalize, which scales samples before they are encoded",
        )
    return field_space(prepared.caches[0].cache)


def loop_settings(run: Run, batches: int, *, resume: bool) -> TrainConfig:
    """Return the loop's settings from `training` and `model`; `batches` is the length of an epoch."""
    training, model = run.config.training, run.config.model
    return TrainConfig(
        epochs=training.epochs,
        max_steps=training.max_steps,
        lr=training.lr,
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        seed=training.seed,
        device=run.device,
        amp=training.amp,
        width=model.width,
        depth=model.depth,
        heads=model.heads,
        checkpoint_every=max(1, training.checkpoint_every * batches),
        patience=training.early_stop_patience or None,
        stride=run.windows.strides[0],
        most_stride=run.windows.strides[1],
        stages=stages_of(run.config),
        resume=resume,
    )
