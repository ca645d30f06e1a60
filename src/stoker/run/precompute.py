"""Fill the caches of a configuration, or find the cache whose source is gone."""

from __future__ import annotations

import datetime
import json
import logging
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import xxhash

from stoker.config import Config
from stoker.config.names import in_settings
from stoker.distributed.ranks import Ranks
from stoker.errors import (
    ConfigError,
    DeviceError,
    FormatError,
    IncompleteError,
    ReadOnlyError,
    SourceError,
    SplitError,
    StokerError,
)
from stoker.plan.resources import is_open, require_writable
from stoker.plugins import find_plugin
from stoker.precompute import (
    EncodeFiller,
    PrecomputeReport,
    PrecomputeSettings,
    Timeouts,
    begin_precompute,
    run_precompute,
)
from stoker.precompute.engine import agree_on_order
from stoker.precompute.settings import Engine
from stoker.run.build import CacheJob, build_jobs, build_source, measured_jobs, record_schema
from stoker.run.caches import (
    find_without_source,
    is_imported,
    job_recipe,
    list_quarantined,
    shard_bytes,
    worst_error,
)
from stoker.run.context import Run, encode_devices, names_of_caches, windows_in
from stoker.run.loaders import check_beside
from stoker.runtime.files import make_folder
from stoker.schema import Json, JsonResult, Schema, canonical_json
from stoker.store import Cache, load_recipe, open_cache, open_folder
from stoker.store.storage import display_path, mirror_url, open_storage
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.store.maintain import RepairReport

# ----------------------------------------------------------------------------------------------------------
# What ranks say of the caches that they filled: the work of all, and that all see the same records.


def agreed(caches: Sequence[CacheResult], ranks: Ranks, nodes: Sequence[int]) -> list[CacheResult]:
    """Return the caches, with the work of all ranks that share the folder in place of this rank's.

    A cache that any rank is filling is served in the order of filling by all.

    Args:
        caches: As this rank left them.
        ranks: All are to make this call.
        nodes: The machines that share the folder with this one.

    Raises:
        IncompleteError: Ranks see different records, so they would serve different batches.
        StalledError: A rank did not come.
    """
    own = [[cache.encoded, cache.adopted, cache.encode_seconds] for cache in caches]
    filling = [result.cache.filling is not None for result in caches]
    told = [
        json.loads(text)
        for text in ranks.all_gather(json.dumps([ranks.node_rank, own, filling]), "the end of precompute")
    ]
    for result, *by_rank in zip(caches, *(of_rank for _, _, of_rank in told), strict=True):
        agree_on_order(result.cache, filling=any(by_rank))
    by_node = [figures for node, figures, _ in told if node in nodes]
    results: list[CacheResult] = []
    for result, *by_rank in zip(caches, *by_node, strict=True):
        encoded, adopted, seconds = (sum(column) for column in zip(*by_rank, strict=True))
        # The rank that finishes last may have stored samples that were tried again.
        cache = result.cache if ranks.world_size == 1 else _opened_again(result.cache)
        reused = max(0, len(cache) - encoded - adopted)
        results.append(
            replace(
                result, cache=cache, encoded=encoded, adopted=adopted, reused=reused, encode_seconds=seconds
            )
        )
    _check_equal([result.cache for result in results], ranks)
    return results


def _opened_again(cache: Cache) -> Cache:
    if cache.filling is not None:
        return cache
    again = open_cache(cache.path)
    again.filler = cache.filler
    return again


def _check_equal(caches: Sequence[Cache], ranks: Ranks) -> None:
    # Of a cache that is being filled ranks see different parts, and wait for the same.
    numbers = [np.arange(c.recipe.count) if c.filling is not None else c.indices for c in caches]
    seen = [
        [c.name, c.fingerprint, len(own), xxhash.xxh3_64_hexdigest(own.tobytes())]
        for c, own in zip(caches, numbers, strict=True)
    ]
    told = [
        json.loads(text) for text in ranks.all_gather(json.dumps(seen), "a look at the caches of all ranks")
    ]
    for rank, theirs in enumerate(told):
        for first, other in zip(told[0], theirs, strict=True):
            (name, key, count, _), (_, other_key, others, _) = first, other
            if first != other:
                raise IncompleteError(
                    f"{name}: rank 0 sees {format_count(count)} records of recipe {key}, rank {rank} "
                    f"{format_count(others)} of {other_key}. They would serve different batches",
                    hint="Expected the same data and settings on every machine, and no sample set aside on "
                    "one alone: run `stoker precompute --retry-quarantined` there, or share the cache folder",
                )


# ----------------------------------------------------------------------------------------------------------
# The JSON report of a precompute run.


def write_manifest(path: Path, config: Config, caches: Sequence[CacheResult]) -> None:
    """Write the report of the earlier precompute script, and every cache's own figures.

    Raises:
        ReadOnlyError: The file cannot be written.
    """
    summary: Mapping[str, Any] = {
        cache.name: {
            "num_samples": cache.records,
            "total_mb": cache.bytes / 1e6,
            "elapsed_min": cache.seconds / 60,
            "skipped": None if cache.encoded else "nothing to encode",
        }
        for cache in caches
    }
    text = canonical_json(
        {
            "generated_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cache_dir": config.training.latent_cache_dir,
            "summary": summary,
            "caches": [cache.to_json() for cache in caches],
        }
    )
    open_storage(path.parent).put(path.name, text.encode())


# ----------------------------------------------------------------------------------------------------------
# Who encodes, as the settings say: this machine, or a cluster.


@contextmanager
def engine_of(run: Run) -> Generator[Engine | None]:
    """The engine of `precompute.engine`, connected from its first use to the end of the block; None: local.

    Raises:
        ConfigError: A cluster is asked for by several ranks at once, or the engine cannot be used.
    """
    name = run.config.precompute.engine
    if name == "local":
        yield None
        return
    if run.ranks.world_size > 1:
        raise ConfigError(
            f"precompute.engine={name} under torchrun: each of {run.ranks.world_size} ranks would drive the "
            "cluster",
            hint=f"Run `stoker precompute --engine {name}` once before, without torchrun",
        )
    plugin = find_plugin("stoker.engines", name, "precompute.engine")
    with plugin.load()(run.config) as engine:
        yield engine


log = logging.getLogger("stoker")

Training: TypeAlias = Literal["windows", "records"]
"""The form in which training reads caches: windows of trajectories, or complete records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult(JsonResult):
    """One cache, and what it took to fill it."""

    json_keys = (
        "name", "split", "path", "address", "fingerprint", "records", "count", "encoded", "reused", "adopted",
        "quarantined", "bytes", "seconds", "encode_seconds", "source_gone", "complete", "fields", "error",
    )  # fmt: skip

    cache: Cache
    split: str
    encoded: int = 0
    """Records that this run encoded."""
    reused: int = 0
    """Records that were there before."""
    adopted: int = 0
    """Records taken over from a cache of the source as it was before."""
    seconds: float = 0.0
    """Wall time, the check of the source included."""
    encode_seconds: float = 0.0
    """Time inside the encoder."""
    source_gone: bool = False
    """The raw data is not there any more; the cache was found by everything else."""

    @property
    def name(self) -> str:
        """`{task}_{split}`."""
        return self.cache.name

    @property
    def path(self) -> Path:
        """The fingerprint's folder."""
        return self.cache.path

    @property
    def address(self) -> str | None:
        """The URL of that folder; None: it is on this machine alone."""
        return mirror_url(self.cache.path)

    @property
    def fingerprint(self) -> str:
        """The cache key."""
        return self.cache.fingerprint

    @property
    def records(self) -> int:
        """Records stored."""
        return len(self.cache)

    @property
    def quarantined(self) -> int:
        """Samples set aside."""
        return len(self.cache.index.quarantined)

    @property
    def complete(self) -> bool:
        """Every sample is stored or set aside."""
        return self.cache.complete

    @property
    def count(self) -> int:
        """Samples of the source."""
        return self.cache.recipe.count

    @property
    def fields(self) -> Schema:
        """Fields as stored."""
        return self.cache.schema

    @property
    def failures(self) -> list[dict[str, Json]]:
        """Quarantined samples."""
        return list_quarantined(self.cache)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return shard_bytes(self.cache)

    @property
    def error(self) -> float | None:
        """Largest rounding error of the storage dtype, relative to a record's largest value."""
        return worst_error(self.cache)


def as_served(result: CacheResult, cache: Cache) -> CacheResult:
    """Return the result when a loader had served `cache`: it is complete by then, if it was being filled."""
    more = len(cache) - result.records
    return result if more <= 0 else replace(result, cache=cache, encoded=result.encoded + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure(JsonResult):
    """Why the caches of one task of several are not complete."""

    json_keys = ("task", "error", "exit_code")

    task: str
    cause: StokerError

    @property
    def error(self) -> str:
        """The error in words."""
        return in_settings(self.cause)

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this cache alone."""
        return self.cause.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeResult(JsonResult):
    """All caches of a configuration, in the order of tasks and splits."""

    caches: tuple[CacheResult, ...]
    failed: tuple[TaskFailure, ...] = ()
    """Of several tasks those without a complete cache: one that fails leaves the others alone."""

    @property
    def exit_code(self) -> int:
        """0, or what the command line answers for the errors: 1 where they are of several kinds."""
        codes = {failure.exit_code for failure in self.failed}
        return max(codes, default=0) if len(codes) < 2 else 1


def precompute_config(
    run: Run, *, splits: Sequence[str] = (), manifest: Path | None = None
) -> PrecomputeResult:
    """Encode what is missing from the caches of a configuration.

    Args:
        run: Its settings, and the processes that do it together.
        splits: Which splits; none: what training needs: `data.split`, and `val` in addition to `train`.
        manifest: Where to write a JSON report of this run.
    Raises:
        StokerError: As `build_jobs` and `run_precompute`; of several tasks only what ends the whole run.
    """
    if manifest is not None:
        make_folder(require_writable(manifest.parent, "the folder of --manifest"))
        if manifest.is_dir():
            raise ConfigError(f"--manifest {manifest} is a folder", hint="Name a file, as report.json")
    caches: list[CacheResult] = []
    failed: list[TaskFailure] = []
    for part in run.parts():
        try:
            caches += fill_caches(part, list(splits) or wanted_splits(part))
        except DeviceError:  # nothing more can be done in this process
            raise
        except StokerError as error:
            if len(run.tasks) == 1:
                raise
            log.error("task %s failed, the others continue: %s", part.task, in_settings(error))
            failed.append(TaskFailure(task=part.task, cause=error))
    if manifest is not None and run.ranks.is_rank_zero:
        write_manifest(manifest, run.config, caches)
    return PrecomputeResult(caches=tuple(caches), failed=tuple(failed))


def wanted_splits(run: Run) -> list[str]:
    """Return the splits of `data.split`; `val`, which training needs, is added to `train` where it exists."""
    if run.splits != ["train"]:
        return run.splits
    try:
        for part in run.parts():
            len(build_source(part, "val"))
    except SplitError as error:
        log.info("only train is encoded: %s", error)
        return run.splits
    except SourceError:
        pass  # `fill_caches` meets it again, and says it or does without the source
    return ["train", "val"]


def fill_caches(run: Run, splits: Sequence[str], *, training: Training | None = None) -> list[CacheResult]:
    """Return one complete cache per task and split; without raw data, the cache that matches the rest.

    Args:
        run: The settings; all of its ranks are to make this call.
        splits: Names of splits.
        training: What training is to read of them, if it is. Then samples that failed for a passing reason
            (a hang, an input/output error) are not tried again, since what it reads must not change from run
            to run by luck, and records too short for a window are refused before they are encoded.
    Raises:
        ConfigError: No cache can lie in the cache folder, or no window can be cut.
        SourceError: The data is gone and no cache matches, or it cannot be read.
        IncompleteError: More samples were quarantined than allowed.
    """
    if not is_open(run.cache_dir):  # one that is may be read-only, if its caches are complete
        require_writable(run.cache_dir, "training.latent_cache_dir")
    results: list[CacheResult] = []
    nodes = run.nodes  # agreed on before ranks may fail one by one
    for part in run.parts():
        began = time.monotonic()
        try:
            if part.config.data.stage != "never":
                from stoker.run.staging import stage_task  # few runs stage files

                stage_task(part)
            jobs = measured_jobs(part, build_jobs(part, splits))
        except SourceError as error:
            found = find_without_source(part, splits)
            if found is None:
                raise
            log.info("%s: the raw data is gone, its cache is used (%s)", part.task, error)
            results += [
                CacheResult(
                    cache=cache,
                    split=split,
                    reused=len(cache),
                    seconds=time.monotonic() - began,
                    source_gone=True,
                )
                for split, cache in found.items()
            ]
        else:
            results += _fill_jobs(part, jobs, training)
    return agreed(results, run.ranks, nodes)


def _fill_jobs(run: Run, jobs: Sequence[CacheJob], training: Training | None) -> list[CacheResult]:
    """Return the caches of one task; what can be refused is refused before the first of them is filled."""
    schemas = [record_schema(job) for job in jobs]
    for schema in schemas if training == "windows" else ():
        windows_in(run, schema)
    results: list[CacheResult] = []
    while_training = training is not None and not run.config.precompute.wait
    with engine_of(run) as engine:
        fill = begin_precompute if while_training else partial(run_precompute, engine=engine)
        for job, schema in zip(jobs, schemas, strict=True):
            settings = settings_of(run, job)
            ready = _ready(run, job, settings) if training else None
            if while_training and ready is None and not run.config.precompute.in_place:
                check_beside(run, schema)
            results.append(ready or _fill(run, job, settings, fill=fill))
    return results


def settings_of(run: Run, job: CacheJob) -> PrecomputeSettings:
    """Return the settings by which the records of `job` are made."""
    config, ranks, devices, nodes = run.config, run.ranks, encode_devices(run), run.nodes
    wanted = config.precompute
    return PrecomputeSettings(
        dtype=config.training.latent_cache_dtype,
        encode_batch=job.encode_batch,
        workers=wanted.workers,
        device=devices[0] if len(devices) == 1 else run.device,
        devices=devices,
        timeouts=Timeouts(**wanted.timeouts.model_dump()),
        max_quarantined=wanted.max_quarantined,
        retry_quarantined=wanted.retry_quarantined,
        nan=wanted.nan,
        identity=config.identity,
        overwrite=wanted.overwrite,
        max_error=wanted.max_error,
        compression=wanted.compression,
        progress=run.progress or ("auto" if ranks.is_rank_zero else None),
        part=(nodes.index(ranks.node_rank), len(nodes)),
        among="alone" if ranks.local_world_size == 1 else "first" if ranks.local_rank == 0 else "rest",
    )


def _ready(run: Run, job: CacheJob, settings: PrecomputeSettings) -> CacheResult | None:
    """Return the cache as it is if every sample is stored or set aside, else None."""
    began = time.monotonic()
    if settings.overwrite or settings.retry_quarantined or run.config.precompute.in_place:
        return None  # in place: whether its files are where they were is looked at
    recipe = job_recipe(run, job)
    try:
        cache = open_cache(run.cache_dir / job.name / recipe.fingerprint)
    except (FormatError, IncompleteError, OSError):
        return None  # precompute repairs it, or says what is wrong
    if len(cache.quarantined) > settings.max_quarantined * recipe.count:
        return None
    cache.filler = EncodeFiller(
        job.source,
        job.encoder,
        run.cache_dir,
        name=job.name,
        settings=settings,
        fingerprint=cache.fingerprint,
    )
    spent_s = time.monotonic() - began
    return CacheResult(cache=cache, split=job.split, reused=len(cache), seconds=spent_s)


def _fill(
    run: Run, job: CacheJob, settings: PrecomputeSettings, *, fill: Callable[..., PrecomputeReport]
) -> CacheResult:
    began = time.monotonic()
    if run.config.precompute.in_place:
        cache = _serve_in_place(run, job)
        return CacheResult(cache=cache, split=job.split, reused=len(cache), seconds=time.monotonic() - began)
    report = fill(job.source, job.encoder, run.cache_dir, name=job.name, settings=settings)
    return CacheResult(
        cache=report.cache,
        split=job.split,
        encoded=report.encoded,
        reused=report.reused,
        adopted=report.adopted,
        seconds=time.monotonic() - began,
        encode_seconds=report.encode_seconds,
    )


def _serve_in_place(run: Run, job: CacheJob) -> Cache:
    """Return a cache that serves samples from the files they are in.

    Raises:
        SourceError: As `index_in_place`; values are not finite, and `precompute.nan` refuses them.
    """
    from stoker.store.in_place import index_in_place  # few runs serve files in place

    cache = index_in_place(job.source, run.cache_dir, name=job.name, identity=run.config.identity)
    if run.config.precompute.nan == "reject":
        found = {name: field["nonfinite"] for name, field in cache.statistics.items() if field["nonfinite"]}
        if found:
            said = ", ".join(f"{name}: {format_count(count)}" for name, count in found.items())
            raise SourceError(
                f"{job.name} holds NaN or infinity ({said}), and samples that are served from their files "
                "cannot be left out",
                hint="Give precompute.in_place=false, which leaves them out of a copy, or "
                "precompute.nan=allow",
            )
    return cache


# ----------------------------------------------------------------------------------------------------------
# Repair a cache, and encode again what was damaged where the settings that made it are at hand.


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult(JsonResult):
    """Result of a repair."""

    json_within = "report"
    json_keys = ("ok", "encoded", "missing", "encode_again", "command")

    report: RepairReport
    encoded: int | None
    """Records encoded again; None where no settings were given."""
    missing: tuple[int, ...] = ()
    """Samples that are neither stored nor quarantined, in the end."""
    imported: bool = False
    """The cache was made by `adopt`."""

    @property
    def ok(self) -> bool:
        """True if the cache is complete now."""
        return not self.missing

    @property
    def command(self) -> str:
        """The command that encodes the missing samples; empty where none are missing."""
        if self.ok:
            return ""
        if not self.imported:
            place = shlex.quote(display_path(Path(self.report.path)))
            return f"stoker cache verify {place} --repair --config CONFIG [KEY=VALUE...]"
        cache_dir, name = map(shlex.quote, _place_of(Path(self.report.path)))
        return f"stoker cache adopt FOLDER --out {cache_dir} --name {name}"

    @property
    def encode_again(self) -> str:
        """`missing` as people write it."""
        return number_ranges(self.missing)


def number_ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as people write them.

    >>> number_ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def repair_cache(path: str | Path, run: Run | None = None) -> RepairResult:
    """Set aside what is damaged in a cache, and with the settings of `run` encode it again.

    Args:
        path: A fingerprint's folder, or the folder of a name with one fingerprint.
        run: Of the settings that the cache was made with.
    Raises:
        FormatError: There is no cache, or its recipe is damaged and no settings were given.
        ConfigError: The settings make another cache.
        StokerError: As `repair` and `run_precompute`.
    """
    from stoker.store.maintain import folder_to_repair, repair  # most runs repair nothing

    folder = folder_to_repair(path)
    cache_dir, name = _place_of(folder)
    made = None if run is None else _job_of(run, folder)
    if made is not None:
        # Writes the recipe where it is damaged.
        open_folder(Path(cache_dir), name, job_recipe(*made))
    try:
        report = repair(folder)
    except ReadOnlyError as error:
        report = _nothing_to_repair(folder, error)
    if made is None or report.ok:
        imported = is_imported(load_recipe(folder))
        return RepairResult(report=report, encoded=None, missing=tuple(report.missing), imported=imported)
    settings, job = replace(settings_of(*made), overwrite=False), made[1]
    if made[0].config.precompute.in_place:
        _serve_in_place(*made)
        return RepairResult(report=report, encoded=0)
    again = run_precompute(job.source, job.encoder, cache_dir, name=job.name, settings=settings)
    return RepairResult(report=report, encoded=again.encoded)


def _nothing_to_repair(folder: Path, error: ReadOnlyError) -> RepairReport:
    """Return the report of a repair with nothing to do, for a folder that cannot be written.

    Raises:
        ReadOnlyError: `error`, where something is damaged or missing.
    """
    from stoker.store.maintain import RepairReport

    cache = open_cache(folder, require_complete=False)
    found = cache.verify()
    if not (found.ok and cache.complete):
        raise error
    log.info("%s cannot be written; it was read in full, and nothing needs repair", folder)
    return RepairReport(path=str(folder), records=found.records, generation=cache.index.generation)


def _place_of(folder: Path) -> tuple[str, str]:
    """Return cache folder and name of a fingerprint's folder, however that was given."""
    parent = folder.absolute().parent
    return str(folder.parent.parent if len(folder.parts) > 2 else parent.parent), parent.name


def _job_of(run: Run, folder: Path) -> tuple[Run, CacheJob]:
    """Return the task and the job that make the cache in `folder`.

    Raises:
        ConfigError: No job makes it.
    """
    name = folder.resolve().parent.name
    named = names_of_caches(run)
    if name not in named:
        raise ConfigError(
            f"the settings make {', '.join(named)}, {folder} is of {name}", hint="Give those that made it"
        )
    part, split = named[name]
    (job,) = build_jobs(part, [split])
    made = job_recipe(part, job).fingerprint
    if made != folder.resolve().name:
        raise ConfigError(
            f"the settings make the cache {made} of {name}, {folder} is another one",
            hint=f"`stoker cache why {folder} CONFIG` says what differs",
        )
    return part, job
