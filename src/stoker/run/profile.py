"""Profile the training of a configuration: its own steps, and every stage before them.

Some of its samples are read, encoded and stored in a folder that is removed afterwards: the cost of a record
is known also where the cache is complete. The training loop is fed from that cache, or from those records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from stoker.errors import ConfigError, StalledError
from stoker.loader import Loader
from stoker.plan import Demand, Resources, measure_rates, probe, stall_of
from stoker.plan.resources import find_obstacle
from stoker.precompute.measure import Trial, try_stages
from stoker.profile.result import (
    ENCODE,
    LoopTimes,
    Profile,
    SampleStage,
    StackSamples,
    TierForecast,
    check_prices,
    forecast_other_gpus,
    gpus_for,
    largest,
    predict,
    say_used,
    watch,
)
from stoker.profile.run import NO_PRICES, STEPS, TIMEOUT_S, LoopProbe, loop_times, take, time_limit
from stoker.run.build import CacheJob
from stoker.run.caches import CacheLocation, locate_with_job
from stoker.run.context import Run, batch_examples, inputs_of, target_of, windows_in
from stoker.run.loaders import joined, make_loader
from stoker.run.plan import TimedStep, demand_of, served_loads
from stoker.run.precompute import settings_of
from stoker.run.train import loop_settings
from stoker.runtime.threads import call_within
from stoker.store import Cache
from stoker.train.run import steps_of
from stoker.units import format_count, format_seconds

SHOWN = 3
"""Samples that cannot be read, by name."""


@dataclass(slots=True, kw_only=True)
class _TrialResult:
    """Result of making a few records."""

    cache: Cache | None
    """Where they were written; None: the raw data is gone."""
    trial: Trial
    stacks: StackSamples


def profile_config(
    run: Run,
    *,
    steps: int = STEPS,
    price_per_hour: float | None = None,
    prices: Mapping[str, float] = NO_PRICES,
    timeout_s: float = TIMEOUT_S,
) -> Profile:
    """Profile the training of the first task. Nothing is left behind, and no run is touched.

    Args:
        run: The settings.
        steps: Batches timed of each kind.
        price_per_hour, prices: As for `stoker.profile`; None: `training.price_per_hour`.
        timeout_s: Seconds for the samples, and again for the steps.

    Raises:
        ConfigError: The records have no time, so that there is no loop; there are too few for two batches; or
            no GPU of the table has a name of `prices`.
        StalledError: It takes longer than `timeout_s`; the message names stage and sample.
        StokerError: As `locate`, and as encoding.
    """
    check_prices(prices)
    run = run.parts()[0]
    job, located = locate_with_job(run, run.split)
    windows_in(run, located.recipe.schema)
    device, config = run.device, run.config
    price = config.training.price_per_hour if price_per_hour is None else price_per_hour
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=_place(run)) as folder:
        tried = _try(run, job, located, Path(folder), timeout_s)
        complete = located.cache is not None and not located.missing
        cache = located.cache if complete else tried.cache
        assert cache is not None  # a cache without its source is complete, else `locate` had refused it
        served_cache = joined(run, cache, run.split) if complete else cache
        loader = _loader(run, served_cache, complete=complete)
        with time_limit(timeout_s, f"{config.where} did not get through {3 * steps} steps"):
            loop = _loop(run, loader, steps=steps, folder=Path(folder) / "run")
        if not complete:
            loop = replace(loop, examples=round(loop.examples * located.recipe.count / len(cache)))
        loop = replace(loop, samples_s=tried.trial.reads_s, names=tried.trial.names)
        demand, resources = demand_of(run, located), probe(device=device, path=Path(folder))
        step = TimedStep(seconds=loop.compute_s, cpus=demand.step_cpus)
        served = (
            served_loads(cache, run.windows_for(cache.schema), loop.batch_examples, step=step)
            if device == "cpu"
            else {}
        )
        rates = replace(measure_rates(cache.path, device=device), served=served)
    stages = _stages(tried.trial)
    unkept = _unkept(loop, demand, stages, resources)
    return Profile(
        loop=loop,
        tiers=(*predict(loop, demand, resources, rates), *([] if unkept is None else [unkept])),
        stages=stages,
        bottleneck=largest(_made(stages)),
        stacks=tried.stacks,
        gpus=gpus_for(demand),
        elsewhere=forecast_other_gpus(loop, demand, resources, rates, prices),
        elsewhere_note=say_used(loop, resources),
        price_per_hour=price,
        served_from=loader.plan.tier,
        remarks=_remarks(located, tried.trial, complete=complete),
    )


def _place(run: Run) -> Path | None:
    """Return the folder for trial records: next to the caches, to time the same disk; None: anywhere."""
    place = run.cache_dir
    if find_obstacle(place) is not None:
        return None
    place.mkdir(parents=True, exist_ok=True)
    return place


def _try(
    run: Run, job: CacheJob | None, located: CacheLocation, folder: Path, timeout_s: float
) -> _TrialResult:
    """Make a few records, with an eye on what the code does meanwhile."""
    tried = _TrialResult(cache=None, trial=Trial(), stacks=StackSamples())
    if job is None:
        return tried
    place, settings = (folder, job.name, located.recipe), settings_of(run, job)

    def make() -> None:
        tried.cache = try_stages(job.source, job.encoder, place, settings, tried.trial)

    def work() -> None:
        tried.stacks = watch(make)

    try:
        call_within(timeout_s, work, "the trial")
    except StalledError as error:
        at = tried.trial
        raise StalledError(
            f"sample {at.number} of {job.name} stands at stage {at.stage!r}, {timeout_s:g} s after its "
            "trial began",
            hint="Expected some hundred samples by then: look at that file, or give more --timeout",
        ) from error
    return tried


class _RepeatedPasses:
    """One pass of a loader after another; its first batches are waited for in each."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


def _loader(run: Run, cache: Cache, *, complete: bool) -> Loader:
    """As training would have it; over a few records with nothing that wants all of them."""
    if complete:
        return make_loader(run, cache)
    training, schema = run.config.training, cache.schema
    batch = min(batch_examples(run, schema), len(cache) * (windows_in(run, schema) or 1))
    return Loader(
        cache,
        batch,
        shuffle=True,
        windows=run.windows_for(schema),
        indices=list(cache.indices),
        device=run.device,
        tier=training.tier if training.tier != "encode" else "disk",
        seed=training.seed,
    )


def _loop(run: Run, loader: Loader, *, steps: int, folder: Path) -> LoopTimes:
    """Return whole training steps on the loader's batches."""
    if not len(loader):
        raise ConfigError(
            f"{loader.dataset.path} makes no batch of {loader.batch_size}",
            hint="Use a smaller training.batch_size",
        )
    where = torch.device(run.device)
    watched = LoopProbe(_RepeatedPasses(loader), steps=steps, device=where)
    settings, target = loop_settings(run, len(loader), resume=False), target_of(run, loader.dataset.schema)
    if target is None:
        step = steps_of(loader, settings)
    else:
        from stoker.run import fitting  # most runs train an operator
        from stoker.run.supervised import make_learner

        inputs = inputs_of(run.config, loader.dataset.schema, target)
        step = fitting.steps_of(make_learner([loader.dataset], target, inputs, settings), loader, settings)
    take(watched, step)
    size = loader.batch_size
    return loop_times(watched, where, examples=len(loader) * size, batch_examples=size)


def _stages(trial: Trial) -> tuple[SampleStage, ...]:
    """Return the seconds one sample takes in each stage; all samples of a file share its opening."""
    if not trial.records:
        return ()
    read_s = fmean(trial.reads_s.values()) if trial.reads_s else 0.0
    extra = [max(0.0, seconds - read_s) for seconds in trial.opens_s.values()]
    open_s = fmean(extra) if extra else 0.0
    tried = len(trial.reads_s) + len(trial.opens_s)
    return (
        SampleStage(
            name="open",
            seconds=sum(extra) / max(1, tried),
            note=f"{format_seconds(open_s)} for each of {format_count(len(extra))} files or tables",
        ),
        SampleStage(name="read", seconds=read_s, note=f"mean of {format_count(tried, 'sample')}"),
        SampleStage(name="encode", seconds=trial.encode_s, note=format_count(len(trial.encodes_s), "call")),
        SampleStage(
            name="write",
            seconds=trial.writes_s / trial.records,
            note=f"converting, checksums, writing; then {format_seconds(trial.commit_s)} to commit a shard",
        ),
    )


def _made(stages: tuple[SampleStage, ...]) -> tuple[SampleStage, ...]:
    """Those that a loop without a cache has as well."""
    return tuple(stage for stage in stages if stage.name != "write")


def _unkept(
    loop: LoopTimes, demand: Demand, stages: tuple[SampleStage, ...], resources: Resources
) -> TierForecast | None:
    """Return a loop that reads and encodes each sample once an epoch, as those without a cache do."""
    made = _made(stages)
    if not made or not loop.batches:
        return None
    load_s = sum(stage.seconds for stage in made) * demand.records / loop.batches
    overlaps = not demand.on_cpu and resources.cpus >= 2
    stall = stall_of(load_s, loop.compute_s, prefetch=overlaps)
    return TierForecast(
        tier=ENCODE,
        wall_s=loop.compute_s / (1 - stall) if stall < 1 else load_s,
        stall=stall,
        fits=True,
        why="each sample is read and encoded once an epoch",
    )


def _remarks(located: CacheLocation, trial: Trial, *, complete: bool) -> tuple[str, ...]:
    said: list[str] = []
    if located.source_gone:
        said.append("the raw data is gone: no stage before the cache could be timed")
    if not complete:
        have = 0 if located.cache is None else len(located.cache)
        said.append(
            f"{format_count(have)} of {format_count(located.recipe.count)} records are stored: the loop was "
            f"fed from {format_count(trial.records)} that were made for this and are gone again"
        )
    if trial.failures:
        more = "" if len(trial.failures) <= SHOWN else f", and {len(trial.failures) - SHOWN} more"
        said.append(f"not readable: {'; '.join(trial.failures[:SHOWN])}{more}")
    return tuple(said)
