"""Where the records of a configuration would be served from, and what a step would wait for.

What fits is arithmetic on limits and headers. On a CPU some batches of a complete cache are served, to find
the time that they take, and errors of smaller dtypes are measured on a few stored records. So records are
read, and of a remote cache fetched into its mirror; none is encoded or written to a cache.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from stoker.errors import ConfigError, CorruptError, RecordError, StokerError, docs_url
from stoker.loader import Loader, Windows
from stoker.loader.order import order_text, parse_order
from stoker.loader.prefetch import HANDOVER_S, describe_remote
from stoker.loader.records import RecordTable, find_records
from stoker.monitor import StallMeter
from stoker.plan import BatchLoad, Demand, Plan, RemoteDemand, Resources, measure_rates, plan_tiers, probe
from stoker.plan.resources import require_folder
from stoker.plan.tiers import TIERS, GpuRow, MeasuredStall, gpu_table, over_budget, say_gpus, say_together
from stoker.plan.trials import LEAST_TRIALS, MOST_TRIALS, Interval, UseMeter, next_interval, repeat_trial
from stoker.run.build import CacheJob
from stoker.run.caches import CacheLocation, locate_with_job, raw_bytes
from stoker.run.context import Run, batch_examples, encode_devices, last_step_s, trajectory_steps
from stoker.schema import SCALE_SUFFIX, Field, Json, JsonResult, Schema, as_json, columns_of
from stoker.sources.hdf5_fields import InPlaceSource
from stoker.store import Cache, Recipe
from stoker.store.format import is_fixed, record_bytes
from stoker.store.recipe import stored_schema
from stoker.store.values import from_array, store_columns
from stoker.train.config import TrainReport
from stoker.units import MIB, format_bytes, format_count

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# What a smaller storage dtype would buy, in bytes and tiers, and cost, measured on the cache's own records.
#
# Bytes and tiers are arithmetic on the schema. The cost is measured on a few records, read, verified and
# stored again in memory as the other dtype; nothing is written.


DTYPES = ("float16", "int8", "float8_e4m3fn")
"""Dtypes that are tried where they are smaller than the stored one."""
SAMPLES = 8
"""Records whose error is measured."""
PIECE_BYTES = 8 * MIB
"""Of each field of such a record the first steps, up to so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerDtype(JsonResult):
    """One dtype that would take fewer bytes."""

    json_keys = ("dtype", "bytes", "tiers", "tier", "samples", "max_error", "rms_error", "refused")

    dtype: str
    bytes: int
    """Of all records, in place of `Plan`'s."""
    plan: Plan
    """Where the records would lie then."""
    samples: int = 0
    """Records that the errors were measured on; 0: none is stored yet."""
    max_error: float | None = None
    """The worst `max|x - y| / max|x|` of a record and field; None: not measured."""
    rms_error: float | None = None
    """The worst `rms(x - y) / rms(x)`."""
    refused: str = ""
    """Why records cannot be stored so; empty where they can."""

    @property
    def tiers(self) -> dict[str, int]:
        """Records by tier."""
        return self.plan.records_by_tier()

    @property
    def tier(self) -> str:
        """The tier that would hold most of them."""
        return self.plan.tier


Planned = Callable[[Demand], Plan]
"""`plan_tiers` with everything given but the demand."""


def smaller_dtypes(located: CacheLocation, demand: Demand, planned: Planned) -> tuple[SmallerDtype, ...]:
    """Return every dtype of `DTYPES` that would make records smaller, in that order."""
    recipe, cache = located.recipe, located.cache
    lengths = _mean_lengths(recipe, cache)
    now = _record_bytes(recipe.schema, lengths)
    places = _chosen(cache) if cache is not None and len(cache) else None
    found: list[SmallerDtype] = []
    for dtype in DTYPES:
        try:
            schema = stored_schema(recipe.encoded, dtype)
        except ConfigError:  # a field takes fewer bytes in float16
            continue
        part = _record_bytes(schema, lengths) / now if now else 1.0
        if part >= 1:
            continue
        wanted = replace(
            demand, record_bytes=demand.record_bytes * part, example_bytes=demand.example_bytes * part
        )
        plan = planned(wanted)
        one = SmallerDtype(dtype=dtype, bytes=round(wanted.records * wanted.record_bytes), plan=plan)
        found.append(one if cache is None or places is None else _measured(one, schema, cache, places))
    return tuple(found)


def say(smaller: tuple[SmallerDtype, ...], plan: Plan, max_error: float | None) -> str:
    """Say the smallest dtype within the bound that the user set; empty if no dtype qualifies."""
    allowed = [
        one
        for one in smaller
        if not one.refused and (max_error is None or one.max_error is None or one.max_error <= max_error)
    ]
    if not allowed:
        return ""
    best = min(allowed, key=lambda one: (one.bytes, one.max_error or 0.0))
    before = plan.bytes
    moved = [
        f"{format_count(after, 'record')} on the {tier} tier instead of {format_count(was)}"
        for (tier, after), was in zip(
            best.plan.records_by_tier().items(), plan.records_by_tier().values(), strict=True
        )
        if after > was
    ]
    bound = "" if max_error is None else f" (limit you set: {max_error:.2g})"
    cost = "its error is known once some records are encoded"
    if best.max_error is not None:
        cost = (
            f"largest error {best.max_error:.2g} of a record's largest value{bound}, "
            f"rms {best.rms_error:.2g}, measured on {format_count(best.samples)} of them"
        )
    return (
        f"training.latent_cache_dtype={best.dtype} would take {format_bytes(best.bytes)} instead of "
        f"{format_bytes(before)}{''.join(f', {text}' for text in moved)}; {cost}"
    )


def _mean_lengths(recipe: Recipe, cache: Cache | None) -> Mapping[str, float]:
    """Return the mean steps of ragged fields; 1 without a stored record."""
    ragged = [name for name, field in recipe.schema.items() if field.ragged]
    if cache is None or not len(cache):
        return dict.fromkeys(ragged, 1.0)
    return {name: float(cache.lengths(name).mean()) for name in ragged}


def _record_bytes(schema: Schema, lengths: Mapping[str, float]) -> float:
    size = 0.0
    for name, field in columns_of(schema).items():
        steps = lengths[name.removesuffix(SCALE_SUFFIX)] if field.ragged else 0.0
        size += field.row_bytes * steps if field.ragged else field.size_bytes()
    return size


def _chosen(cache: Cache) -> RecordTable:
    count = min(SAMPLES, len(cache))
    numbers = cache.indices[np.linspace(0, len(cache) - 1, count).round().astype(np.int64)]
    return find_records(cache, numbers)


def _measured(one: SmallerDtype, schema: Schema, cache: Cache, places: RecordTable) -> SmallerDtype:
    """Return it with the worst error over fields and records."""
    worst = rms = 0.0
    try:
        for name, field in schema.items():
            stored = cache.schema[name]
            if not field.floating or field.dtype == stored.dtype or stored.quantized:
                continue
            for shard, row, number in zip(places.shard, places.row, places.indices, strict=True):
                values = _first_steps(cache, int(shard), int(row), name, stored)
                piece = replace(field, shape=(len(values), *field.shape[1:]), ragged=False)
                rows = store_columns(name, piece, values[None], [int(number)])[name]
                worst, rms = max(worst, float(rows.max_error[0])), max(rms, float(rows.rms_error[0]))
    except RecordError as error:
        return replace(one, refused=str(error))
    return replace(one, samples=len(places.indices), max_error=worst, rms_error=rms)


def _first_steps(cache: Cache, shard: int, row: int, name: str, field: Field) -> Tensor:
    """Return a record's field along axis 0, as far as `PIECE_BYTES` reach."""
    handle = cache.shard(shard)
    steps = min(handle.length(name, row), max(1, PIECE_BYTES // max(1, field.row_bytes)))
    return from_array(handle.read(name, row, 0, steps), field.dtype)


# ----------------------------------------------------------------------------------------------------------
# How long a batch takes from each tier, found by having some served: what a plan's stall is made of.
#
# Arithmetic on bytes misses what reading small pieces costs a processor, which for a disk tier is most of
# it. So where a cache is there, a plan is made with the time that its own batches take.


SECONDS = 0.3
"""For each trial of a tier; half of it again beforehand."""
AT_STEP_TIMES = 3
"""The trials with steps take so many times as long together: the stall is taken from them."""
REPEATED_TIMES = 3
"""While trials differ they are repeated, until they have taken so many times as long."""
REPEATED_S = 5.0
"""Seconds at most until which they are repeated: a step of a second makes them long."""
UNUSUAL_TIMES, UNUSUAL_S = 8, 20e-3
"""What takes so many times as long as half of the batches do, and so many seconds, counts as that long. Of
a drive that others use too a batch in a thousand has to wait for 60 to 200 ms, and a trial meets one or not.

Source: `benchmarks/plan_stall.py`, cold disk.
"""
LEAST_PAUSES = 4
"""Batches, at least, that are timed with pauses between them."""
SERVED_BYTES = 64 * MIB
"""Bytes of records that are served for it; filling memory with more would take time."""


NEIGHBOURS = 32
"""Records next to one another that are of the same trial."""
LEAST_TIMED = 8
"""Batches, at least, that are timed; more only while there are records that were not read before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A step that is known by its time, to be imitated."""

    seconds: float
    cpus: float
    """Cores that it keeps busy; below 1 it leaves them to others, as one on a GPU does."""

    def imitation(self) -> Callable[[], None]:
        """Takes as long, and the same cores: products of matrices by as many threads as torch has here."""
        if self.cpus < 1:
            return partial(time.sleep, self.seconds)
        matrix = torch.randn(192, 192)

        def compute() -> None:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                torch.mm(matrix, matrix)

        return compute


def served_loads(
    cache: Cache,
    windows: Windows | None,
    batch_size: int,
    *,
    tiers: Sequence[str] = ("disk", "host"),
    seconds: float = SECONDS,
    step: TimedStep | None = None,
) -> dict[str, BatchLoad]:
    """Per tier what loading a batch takes, on this machine as it is now; a tier that fails is left out.

    Of damaged records a warning says so.

    The host's is of batches that end in host memory. The disk's depends on how much of the cache the page
    cache holds now. This measures it as training would find it. It reads no record twice if it can, since the
    second read would come from the page cache. With a `step` batches are also timed while such steps run:
    loading and steps share cores and the interpreter's lock, which no sum of parts tells.
    """
    found: dict[str, BatchLoad] = {}
    size = sum(shard.raw_bytes for shard in cache.index.shards)  # of a mirror they may not be here yet
    numbers = list(cache.indices)
    part = numbers[:: max(1, round(size / SERVED_BYTES))]
    for tier in tiers:
        own = [part] * 3 if tier == "host" else _apart(numbers, batch_size)
        make = partial(Loader, cache, batch_size, windows=windows, tier=tier)
        try:
            load = _load(make, own, tier, seconds, step)
        except CorruptError as error:
            log.warning("the %s tier was not timed: %s", tier, error)
        except (StokerError, OSError) as error:
            log.debug("the %s tier was not timed: %s", tier, error)
        else:
            if load is not None:
                found[tier] = load
    return found


def _apart(numbers: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    """Records for each trial, half of them for the one with steps; all for each where they are too few.

    They take turns by runs of neighbors over all of the cache. Parts of it may be slower than others: the
    host has some of a virtual drive in memory. They do not take turns record by record, since the
    system reads ahead around each read of a trial, and batches of such records take half as long again.

    Source: `benchmarks/plan_stall.py`, cold disk.
    """
    if len(numbers) < 8 * LEAST_TIMED * batch_size:
        return [numbers] * 3
    whose = np.arange(len(numbers)) // NEIGHBOURS % 4
    of = np.asarray(numbers)
    return [of[whose == 1].tolist(), of[whose == 3].tolist(), of[whose % 2 == 0].tolist()]


def _load(
    make: Callable[..., Loader],
    own: Sequence[Sequence[int]],
    tier: str,
    seconds: float,
    step: TimedStep | None,
) -> BatchLoad | None:
    """First without a step, then, from disk, with pauses so long that every read is over when they end, then
    with steps. None: another tier served, or passes are of one batch.
    """
    use = UseMeter()
    alone = _Trials(make, own[0], tier)
    alone_s = alone.times_s(_nothing, seconds)
    if not alone_s:
        return None
    mean_s = fmean(alone_s)
    direct_s = min(mean_s, HANDOVER_S)
    if tier == "disk":
        # Idle threads are dearer to wake than ones at work, so this is not what the first part shows.
        pauses = max(seconds, LEAST_PAUSES * 3 * mean_s)
        meter = StallMeter()
        loader = make(meter=meter, indices=own[1])
        _serve(loader, meter, partial(time.sleep, 2 * mean_s), pauses, pauses / 2)
        report = meter.epoch()
        direct_s = min(mean_s, report.wait_s / max(1, report.batches - 1))
    load = BatchLoad(
        alone_s=mean_s,
        direct_s=direct_s,
        overlapped_s=mean_s - direct_s if tier == "disk" or mean_s > direct_s else 0.0,
        alone_range=_at_least_0(next_interval(alone_s)),
        trials=len(alone_s),
        use=use.read(),
    )
    if step is None:
        return load
    work = step.imitation()
    longer = max(AT_STEP_TIMES * seconds, LEAST_TIMED * (step.seconds + mean_s))
    trials = _Trials(make, own[2], tier)
    batches_s = trials.times_s(work, longer)
    if not batches_s:
        return load
    step_s = fmean(trials.steps_s)
    return replace(
        load,
        at_step=(step_s, max(0.0, fmean(batches_s) - step_s)),
        lost_range=_at_least_0(
            next_interval([b - s for b, s in zip(batches_s, trials.steps_s, strict=True)])
        ),
        trials=len(batches_s),
        use=use.read(),
    )


def _at_least_0(found: Interval | None) -> Interval | None:
    """Return an interval of times, of which none is below 0."""
    return None if found is None else Interval(max(0.0, found.low), max(0.0, found.high))


class _Trials:
    """The same trial again and again, each from disk over records of its own.

    From memory the same loader serves all of them: filling memory again would take time, and show nothing.
    """

    def __init__(self, make: Callable[..., Loader], numbers: Sequence[int], tier: str) -> None:
        self._make, self._numbers, self._tier = make, numbers, tier
        self._meter = StallMeter()
        self._loader: Loader | None = None
        self._parts: list[Sequence[int]] = []
        self.steps_s: list[float] = []
        """Seconds of the step alone, of each trial."""

    def times_s(self, work: Callable[[], None], seconds: float) -> list[float]:
        """Return the mean seconds of a batch and its `work`, one of each trial.

        Args:
            work: Done after each batch.
            seconds: Of all trials together, if no more are needed than the least.
        """
        each_s = seconds / LEAST_TRIALS

        def once(number: int) -> float | None:
            before_s = seconds / (2 if number == 0 else 6) / (AT_STEP_TIMES if work is not _nothing else 1)
            least = -(-LEAST_TIMED // LEAST_TRIALS)
            found_s = _serve(self._next(number), self._meter, work, each_s, before_s, least)
            # While memory is being filled, another tier serves: that says nothing of this one.
            if found_s is None or set(self._meter.epoch().tiers) != {self._tier}:
                return None
            if work is not _nothing:  # with each trial, since what slows batches slows steps too
                self.steps_s.append(_mean_s(work, each_s / 4))
            return found_s

        return repeat_trial(once, min(REPEATED_TIMES * seconds, REPEATED_S))

    def _next(self, number: int) -> Loader:
        if self._tier != "disk" and self._loader is not None:
            return self._loader
        self._loader = self._make(meter=self._meter, indices=self._part(number))
        return self._loader

    def _part(self, number: int) -> Sequence[int]:
        """Return the records of one trial: parts by runs of neighbors, as long as each has enough batches."""
        if self._tier != "disk":
            return self._numbers
        if not self._parts:
            whole = self._make(indices=self._numbers)
            count = max(
                1, min(MOST_TRIALS, len(whole) // (2 * LEAST_TIMED), len(self._numbers) // NEIGHBOURS)
            )
            whose = np.arange(len(self._numbers)) // NEIGHBOURS % count
            of = np.asarray(self._numbers)
            self._parts = [of[whose == part].tolist() for part in range(count)]
        return self._parts[number % len(self._parts)]


def _nothing() -> None:
    """No step."""


def _mean_s(work: Callable[[], None], seconds: float) -> float:
    """Return the mean seconds of `work` when nothing else runs."""
    work()
    begin, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begin < seconds:
        work()
        count += 1
    return (time.perf_counter() - begin) / count


def _serve(
    loader: Loader,
    meter: StallMeter,
    work: Callable[[], None],
    seconds: float,
    before_s: float,
    least: int = LEAST_TIMED,
) -> float | None:
    """Serve for `before_s`, until memory is filled and enough is read ahead; then time a batch and its `work`
    for `seconds`, and at least so many.

    From disk no longer than one pass, if that is long enough: the next one would find its records in memory.
    """
    begin, counted, spent_s = time.perf_counter(), False, 0.0
    times_s: list[float] = []
    early = len(loader) // 6 if loader.plan.tier == "disk" else len(loader) + 1
    most_s = before_s + seconds
    while spent_s < most_s and not (early < len(loader) and len(times_s) >= least):
        last_s = 0.0
        for number, _ in enumerate(loader):
            work()
            spent_s = time.perf_counter() - begin
            if counted and number:
                times_s.append(spent_s - last_s)
            last_s = spent_s
            if not counted and (spent_s >= before_s or number >= early):
                meter.reset()
                counted = True
            if spent_s >= most_s and (len(times_s) >= least or (times_s and spent_s >= 4 * most_s)):
                break
    return _typical_s(times_s) if times_s else None


def _typical_s(times_s: Sequence[float]) -> float:
    """Return the mean, in which what is unusually long counts for less.

    >>> round(_typical_s([0.002, 0.004] * 100 + [0.200]), 4)  # a mean would say 0.004
    0.0031
    """
    most_s = max(UNUSUAL_TIMES * statistics.median(times_s), UNUSUAL_S)
    return fmean(min(time_s, most_s) for time_s in times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(JsonResult):
    """Where the records of the training split would be served from, once they are encoded."""

    json_within = "plan"
    json_keys = ("reason", "records", "missing", "smaller", "advice", "gpus", "together")

    plan: Plan
    records: int
    missing: int
    """Records still to be encoded; the plan counts them as stored."""
    smaller: tuple[SmallerDtype, ...] = ()
    """Storage dtypes that would take fewer bytes, what they would buy and cost."""
    advice: str = ""
    """How records would take fewer bytes, in words: served in place, or in the best dtype of `smaller`."""
    gpus: tuple[GpuRow, ...] = ()
    """Records that the memory of GPUs would hold, half of it left to the model."""
    on_gpus: str = ""
    """That in words."""
    together: str = ""
    """Return how many devices hold all records if one does not; empty if one does, or without a device."""

    @property
    def reason(self) -> str:
        """The decision in words."""
        first = f"{format_count(self.missing, 'record')} to be encoded first; " if self.missing else ""
        return first + self.plan.reason


def plan_config(run: Run) -> PlanResult:
    """Plan the training split of the first task.

    Raises:
        ConfigError: The cache folder is not a folder.
        ResourceError: The tier asked for cannot hold it.
        StokerError: As `locate`.
    """
    require_folder(run.cache_dir, "training.latent_cache_dir")
    first = run.parts()[0]
    return _plan_split(first)


def _plan_split(run: Run, resources: Resources | None = None) -> PlanResult:
    """Plan the training split of one task; see `plan_located`."""
    job, located = locate_with_job(run, run.split)
    result = plan_located(run, located, resources)
    offer = in_place_offer(run, job, result) if job is not None and result.missing else ""
    return replace(result, advice="\n".join(filter(None, (offer, result.advice))))


def in_place_offer(run: Run, job: CacheJob, result: PlanResult) -> str:
    """Say how to serve the files themselves where they hold the samples as they are stored; else empty."""
    config = run.config
    plain = job.encoder is None and config.training.latent_cache_dtype is None
    if not plain or config.precompute.in_place or not isinstance(job.source, InPlaceSource):
        return ""
    try:
        places, schema = job.source.places(), job.source.schema()
    except StokerError:  # chunks, compression, another order of bytes
        return ""
    if any(one.field.dtype != schema[name].dtype for part in places for name, one in part.fields.items()):
        return ""  # float64, of which a copy takes half
    return (
        "nothing needs encoding, and the files hold the samples as they are stored. precompute.in_place=true "
        f"would serve them from there: {format_bytes(result.plan.bytes)} would not be copied, only read once "
        f"for checksums ({docs_url('how-to/sources')})"
    )


def plan_located(run: Run, located: CacheLocation, resources: Resources | None = None) -> PlanResult:
    """Plan one cache, whose missing records count as stored; `resources`: None asks the machine."""
    config, device = run.config, run.device
    _ = encode_devices(run)  # one that is not there is refused before anything is measured
    demand = demand_of(run, located)
    cache = located.cache if located.cache is not None and not located.missing else None
    step_s = last_step_s(run, located.recipe.schema)
    rates = measure_rates(located.folder if located.cache is not None else None, device=device)
    if cache is not None and device == "cpu":
        step = None if step_s is None else TimedStep(seconds=step_s, cpus=demand.step_cpus)
        windows, batch_size = run.windows_for(cache.schema), batch_examples(run, cache.schema)
        rates = replace(rates, served=served_loads(cache, windows, batch_size, step=step))
    planned = partial(
        plan_tiers,
        resources=probe(device=device, path=run.cache_dir) if resources is None else resources,
        reserve_bytes=config.training.reserve_bytes,
        step_s=step_s,
        rates=rates,
    )
    plan = planned(demand, tier=config.training.tier)
    smaller = () if config.precompute.in_place else smaller_dtypes(located, demand, planned)
    return PlanResult(
        plan=plan,
        records=sum(plan.tiers.values()),
        missing=located.missing,
        smaller=smaller,
        advice=say(smaller, plan, config.precompute.max_error),
        gpus=gpu_table(demand.record_bytes, demand.records) if demand.record_bytes else (),
        on_gpus=say_gpus(demand.record_bytes, demand.records) if demand.record_bytes else "",
        together="" if device == "cpu" else say_together(plan.records_by_tier()["device"], demand.records),
    )


def left_by(plan: Plan, resources: Resources) -> Resources:
    """Return the resources that a plan leaves to the next one."""
    held = {row.tier: row.bytes for row in plan.rows}
    return replace(
        resources,
        host_bytes=max(0, resources.host_bytes - held["host"]),
        device_bytes=max(0, resources.device_bytes - held["device"]),
    )


def demand_of(run: Run, located: CacheLocation) -> Demand:
    """Return what training would ask for: records, their size, and the bytes of one batch of windows."""
    schema, cache = located.recipe.schema, located.cache
    if is_fixed(schema):
        size = float(record_bytes(columns_of(schema)))
    else:
        size = raw_bytes(cache) / len(cache) if cache is not None and len(cache) else 0.0
    quarantined = 0 if cache is None else len(cache.index.quarantined)
    return Demand(
        stored_ratio=None if cache is None else cache.index.stored_ratio,
        remote=None if cache is None else _remote_demand(run, cache, size),
        records=located.recipe.count - quarantined,
        record_bytes=size,
        batch_examples=batch_examples(run, schema),
        example_bytes=example_bytes(run, schema, size),
        device=run.device,
        encoded_first=located.missing,
        step_cpus=1.0 if run.device != "cpu" else float(torch.get_num_threads()),
    )


def _remote_demand(run: Run, cache: Cache, size: float) -> RemoteDemand | None:
    """Return where a remote cache is, and how training would read it; None: the cache is local."""
    schema, training = cache.recipe.schema, run.config.training
    windows = run.windows_for(schema)
    each = 1 if windows is None else windows.count(trajectory_steps(schema))
    example = example_bytes(run, schema, size)
    return describe_remote(
        cache,
        parse_order(
            order_text(training.shuffle, training.partition), world_size=1, example_bytes=max(1, int(example))
        ),
        examples=max(1, each * len(cache)),
        example_bytes=example,
        step_examples=batch_examples(run, schema),
    )


def example_bytes(run: Run, schema: Schema, size: float) -> float:
    """Return bytes of one window: its steps of the fields with time, and all of the other fields."""
    if not is_fixed(schema):
        return size
    steps = run.windows.horizons[1] + 1
    return float(sum(f.row_bytes * steps if f.time else f.size_bytes() for f in columns_of(schema).values()))


# ----------------------------------------------------------------------------------------------------------
# Where the records of several tasks would be served from, each in the memory that those before it leave.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlans:
    """The plans of all tasks."""

    tasks: Mapping[str, PlanResult]
    """By task, in the order of the settings."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys of one plan, summed over the tasks, and each task's own below `tasks`."""
        results = self.tasks.values()
        plans = [one.plan for one in results]
        return {
            "tiers": {tier: sum(one.plan.tiers[tier] for one in results) for tier in TIERS},
            "bytes": sum(one.plan.bytes for one in results),
            "reason": "; ".join(f"{task}: {one.reason}" for task, one in self.tasks.items()),
            # The steps of the task that waits longest decide; unknown until all are known.
            "predicted_stall": _largest([plan.predicted_stall for plan in plans]),
            "predicted_stall_low": _largest([plan.predicted_stall_low for plan in plans]),
            "predicted_stall_high": _largest([plan.predicted_stall_high for plan in plans]),
            "records": sum(one.records for one in results),
            "missing": sum(one.missing for one in results),
            "tasks": as_json(self.tasks),
        }


def _largest(stalls: Sequence[float | None]) -> float | None:
    known = [stall for stall in stalls if stall is not None]
    return max(known) if known and len(known) == len(stalls) else None


def plan_tasks(run: Run) -> TaskPlans:
    """Plan the training split of every task.

    Raises:
        ConfigError: The cache folder is not a folder.
        ResourceError: The tier asked for cannot hold them.
        StokerError: As `locate`.
    """
    plans: dict[str, PlanResult] = {}
    cache_dir = require_folder(run.cache_dir, "training.latent_cache_dir")
    resources = probe(device=run.device, path=cache_dir)
    for part in run.parts():
        plans[part.task] = _plan_split(part, resources)
        resources = left_by(plans[part.task].plan, resources)
    return TaskPlans(tasks=plans)


# ----------------------------------------------------------------------------------------------------------
# Whether a run kept its budget of waiting (`training.max_stall`), and what would have helped where not.


def verdict_of(run: Run, cache: Cache, report: TrainReport) -> str | None:
    """Say what is wrong with a run's stall, and the cure; None: within `training.max_stall`, if set.

    Args:
        cache: The one that was trained on.
    """
    budget, device = run.config.training.max_stall, run.device
    if budget is None or report.stall is None or report.step_s is None or report.stall <= budget:
        return None
    located = CacheLocation(recipe=cache.recipe, folder=cache.path, cache=cache)
    plan = plan_tiers(
        demand_of(run, located),
        probe(device=device, path=cache.path),
        reserve_bytes=run.config.training.reserve_bytes,
        step_s=max(report.step_s, 1e-9),
        rates=measure_rates(cache.path, device=device),
    )
    waiting = MeasuredStall(
        stall=report.stall,
        step_s=report.step_s,
        wait_s=sum(report.parts.values()),
        parts=report.parts,
        tier=report.tier,
    )
    return over_budget(waiting, budget, plan)
