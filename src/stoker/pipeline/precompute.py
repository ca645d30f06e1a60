"""Fill the caches of a configuration, or find the cache whose source is gone."""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

from stoker.config import Config
from stoker.config.names import in_settings
from stoker.encoders.protocol import Encoder
from stoker.errors import (
    ConfigError,
    DeviceError,
    FormatError,
    IncompleteError,
    SourceError,
    SplitError,
    StokerError,
)
from stoker.pipeline.build import (
    Job,
    build_jobs,
    build_source,
    device_of,
    record_schema,
    share_encoders,
    tasks_of,
)
from stoker.pipeline.caches import job_recipe, list_quarantined, shard_bytes, windows_in, worst_error
from stoker.pipeline.encode_batch import measured_jobs
from stoker.pipeline.folders import cache_dir_of, is_open, require_writable
from stoker.pipeline.gone import find_without_source
from stoker.pipeline.loaders import cache_sharing, check_beside, encoders_of
from stoker.pipeline.staging import stage_task
from stoker.precompute import (
    Deadlines,
    EncodeFiller,
    PrecomputeReport,
    PrecomputeSettings,
    begin_precompute,
    run_precompute,
)
from stoker.precompute.progress import ProgressSink
from stoker.precompute.share import Engine
from stoker.runtime.files import make_folder
from stoker.scale.ranks import ALONE, Ranks
from stoker.scale.ray_settings import RaySettings
from stoker.schema import Json, JsonResult, Schema, canonical_json, schema_to_json
from stoker.sources.files import canonical_split
from stoker.store import Cache, open_cache
from stoker.store.mirror.root import address_of, shown
from stoker.store.storage import open_storage
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# What ranks say of the caches that they filled: the work of all, and that all see the same records.


def agreed(caches: Sequence[CacheResult], ranks: Ranks, nodes: Sequence[int]) -> list[CacheResult]:
    """The caches, with what was done by all that share the cache folder in place of what this rank did.

    Args:
        caches: As this rank left them.
        ranks: All are to make this call.
        nodes: The machines that share the folder with this one.

    Raises:
        IncompleteError: Ranks see different records, so they would serve different batches.
        StalledError: A rank did not come.
    """
    own = [[cache.encoded, cache.adopted, cache.encode_seconds] for cache in caches]
    told = [json.loads(text) for text in ranks.tell(json.dumps([ranks.node, own]), "the end of precompute")]
    beside = [figures for node, figures in told if node in nodes]
    results: list[CacheResult] = []
    for result, *by_rank in zip(caches, *beside, strict=True):
        encoded, adopted, seconds = (sum(column) for column in zip(*by_rank, strict=True))
        # Whoever is done with the folder last may have stored what was tried again.
        cache = result.cache if ranks.world == 1 else _opened_again(result.cache)
        reused = max(0, len(cache) - encoded - adopted)
        results.append(
            replace(
                result, cache=cache, encoded=encoded, adopted=adopted, reused=reused, encode_seconds=seconds
            )
        )
    _check_equal([result.cache for result in results], ranks)
    return results


def _opened_again(cache: Cache) -> Cache:
    again = open_cache(cache.path)
    again.filler, again.filling = cache.filler, cache.filling
    return again


def _check_equal(caches: Sequence[Cache], ranks: Ranks) -> None:
    seen = [[c.name, c.fingerprint, len(c), xxhash.xxh3_64_hexdigest(c.numbers.tobytes())] for c in caches]
    told = [json.loads(text) for text in ranks.tell(json.dumps(seen), "a look at the caches of all ranks")]
    for rank, theirs in enumerate(told):
        for first, other in zip(told[0], theirs, strict=True):
            (name, key, count, _), (_, other_key, others, _) = first, other
            if first != other:
                raise IncompleteError(
                    f"{name}: rank 0 sees {format_count(count)} records of recipe {key}, rank {rank} "
                    f"{format_count(others)} of {other_key}. They would serve different batches. Expected "
                    "the same data and settings on every machine, and no sample set aside on one alone: "
                    "run `stoker precompute --retry-quarantined` there, or share the cache folder"
                )


# ----------------------------------------------------------------------------------------------------------
# The JSON report of a precompute run.


def write_manifest(path: Path, config: Config, caches: Sequence[CacheResult]) -> None:
    """Write the report of the earlier precompute script, with every cache's own figures beside it.

    Raises:
        ReadOnlyError: The file cannot be written.
    """
    summary: Mapping[str, Any] = {
        cache.name: {
            "num_samples": len(cache.cache),
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
def engine_of(config: Config, ranks: Ranks) -> Generator[Engine | None]:
    """The engine of `precompute.engine`, connected from its first use to the end of the block; None: local.

    Raises:
        ConfigError: Ray is asked for by several ranks at once, or is not installed.
    """
    if config.precompute.engine == "local":
        yield None
        return
    if ranks.world > 1:
        raise ConfigError(
            f"precompute.engine=ray under torchrun: each of {ranks.world} ranks would drive the cluster. Run "
            "`stoker precompute --engine ray` once before, without torchrun"
        )
    try:
        from stoker.scale.ray_engine import RayEngine
    except ImportError as error:
        raise ConfigError(
            "precompute.engine=ray (--engine ray) needs Ray. Install it: pip install 'stoker[ray]'"
        ) from error
    wanted = config.precompute.ray
    settings = RaySettings(
        address=wanted.address,
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        max_retries=wanted.max_retries,
        placement=wanted.placement,
        connect_s=wanted.connect,
        wait_s=wanted.wait,
        slice_s=wanted.slice,
    )
    with RayEngine(settings) as engine:
        yield engine


_log = logging.getLogger("stoker")

Training: TypeAlias = Literal["windows", "records"]
"""What training reads of caches: windows of trajectories, or whole records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """One cache, and what it took to fill it."""

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

    def served(self, cache: Cache) -> CacheResult:
        """The same when a loader had served `cache`: it is complete by then, if it was being filled."""
        more = len(cache) - len(self.cache)
        return self if more <= 0 else replace(self, cache=cache, encoded=self.encoded + more)

    @property
    def name(self) -> str:
        """`{task}_{split}`."""
        return self.cache.name

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
    def place(self) -> str:
        """Its address, or where it has none its folder."""
        return shown(self.cache.path)

    @property
    def error(self) -> float | None:
        """Largest rounding error of the storage dtype, relative to a record's largest value."""
        return worst_error(self.cache)

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "name": self.name,
            "split": self.split,
            "path": str(self.cache.path),
            "address": address_of(self.cache.path),
            "fingerprint": self.cache.fingerprint,
            "records": len(self.cache),
            "count": self.count,
            "encoded": self.encoded,
            "reused": self.reused,
            "adopted": self.adopted,
            "quarantined": len(self.failures),
            "bytes": self.bytes,
            "seconds": self.seconds,
            "encode_seconds": self.encode_seconds,
            "source_gone": self.source_gone,
            "complete": self.cache.complete,
            "fields": schema_to_json(self.fields),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """Why the caches of one task of several are not complete."""

    task: str
    error: StokerError

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        error = in_settings(self.error)
        return {"task": self.task, "error": error, "exit_code": self.error.exit_code}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeResult(JsonResult):
    """All caches of a configuration, in the order of tasks and splits."""

    caches: tuple[CacheResult, ...]
    failed: tuple[TaskFailure, ...] = ()
    """Of several tasks those without a complete cache: one that fails leaves the others alone."""

    @property
    def exit_code(self) -> int:
        """0, or what the command line answers for the errors: 1 where they are of several kinds."""
        codes = {failure.error.exit_code for failure in self.failed}
        return max(codes, default=0) if len(codes) < 2 else 1


def precompute_config(
    config: Config,
    *,
    splits: Sequence[str] = (),
    manifest: Path | None = None,
    ranks: Ranks = ALONE,
) -> PrecomputeResult:
    """Encode what is missing from the caches of `config`.

    Args:
        config: The settings.
        splits: Which splits; none: what training needs, `data.split` and, beside `train`, `val`.
        manifest: Where to write a JSON report of this run.
        ranks: The processes that do it together.
    Raises:
        StokerError: As `build_jobs` and `run_precompute`; of several tasks only what ends the whole run.
    """
    if manifest is not None:
        make_folder(require_writable(manifest.parent, "the folder of --manifest"))
    tasks = tasks_of(config)
    caches: list[CacheResult] = []
    failed: list[TaskFailure] = []
    encoders: dict[str, Encoder] = {}
    for task in tasks:
        own = config.for_task(task)
        try:
            caches += fill_caches(own, list(splits) or wanted_splits(own), encoders=encoders, ranks=ranks)
        except DeviceError:  # nothing more can be done in this process
            raise
        except StokerError as error:
            if len(tasks) == 1:
                raise
            _log.error("task %s failed, the others go on: %s", task, in_settings(error))
            failed.append(TaskFailure(task=task, error=error))
    if manifest is not None and ranks.leads:
        write_manifest(manifest, config, caches)
    return PrecomputeResult(caches=tuple(caches), failed=tuple(failed))


def wanted_splits(config: Config) -> list[str]:
    """The splits of `data.split`; training needs `val` beside `train`, so it is added where it exists."""
    splits = [canonical_split(split) for split in config.data.wanted_splits]
    if splits != ["train"]:
        return splits
    try:
        for task in tasks_of(config):
            len(build_source(config.for_task(task), task, "val"))
    except SplitError as error:
        _log.info("only train is encoded: %s", error)
        return splits
    except SourceError:
        pass  # `fill_caches` meets it again, and says it or does without the source
    return ["train", "val"]


def fill_caches(
    config: Config,
    splits: Sequence[str],
    *,
    training: Training | None = None,
    encoders: dict[str, Encoder] | None = None,
    ranks: Ranks = ALONE,
    progress: ProgressSink | None = None,
) -> list[CacheResult]:
    """One complete cache per task and split; where the raw data is gone, the cache that matches the rest.

    Args:
        config: The settings.
        splits: Names of splits.
        training: What training is to read of them, if it is. Then samples that failed for a passing reason
            (a hang, an input/output error) are not tried again, since what it reads must not change from run
            to run by luck, and records too short for a window are refused before they are encoded.
        encoders: Those so far by identity, so that tasks share what is equal; None: none yet.
        ranks: The processes that fill them together, and are all to make this call.
        progress: Where progress goes; None: to standard error.
    Raises:
        ConfigError: No cache can lie in the cache folder, or no window can be cut.
        SourceError: The data is gone and no cache matches, or it cannot be read.
        IncompleteError: More samples were quarantined than allowed.
    """
    cache_dir = cache_dir_of(config)
    if not is_open(cache_dir):  # one that is may be read-only, if its caches are complete
        require_writable(cache_dir, "training.latent_cache_dir")
    results: list[CacheResult] = []
    known, nodes = {} if encoders is None else encoders, cache_sharing(config, ranks)
    for task in tasks_of(config):
        began, own = time.monotonic(), config.for_task(task)
        try:
            if own.data.stage != "never":
                stage_task(own, task)
            jobs = share_encoders(build_jobs(own, task, splits), known)
            jobs = measured_jobs(own, task, jobs, encoders_of(own, ranks)[0], ranks)
        except SourceError as error:
            found = find_without_source(own, task, splits)
            if found is None:
                raise
            _log.info("%s: the raw data is gone, its cache is used (%s)", task, error)
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
            results += _fill_jobs(own, jobs, training=training, ranks=ranks, nodes=nodes, progress=progress)
    return agreed(results, ranks, nodes)


def _fill_jobs(
    config: Config,
    jobs: Sequence[Job],
    *,
    training: Training | None,
    ranks: Ranks,
    nodes: Sequence[int],
    progress: ProgressSink | None,
) -> list[CacheResult]:
    """The caches of one task; what can be refused is refused before the first of them is filled."""
    schemas = [record_schema(job) for job in jobs]
    for schema in schemas if training == "windows" else ():
        windows_in(config, schema)
    results: list[CacheResult] = []
    beside = training is not None and not config.precompute.wait
    with engine_of(config, ranks) as engine:
        run = begin_precompute if beside else partial(run_precompute, engine=engine)
        for job, schema in zip(jobs, schemas, strict=True):
            settings = settings_of(config, job, ranks, nodes=nodes)
            if progress is not None:
                settings = replace(settings, progress=progress)
            ready = _ready(config, job, settings) if training else None
            if beside and ready is None:
                check_beside(config, schema, ranks)
            results.append(ready or _fill(config, job, settings, run=run))
    return results


def settings_of(
    config: Config, job: Job, ranks: Ranks = ALONE, *, nodes: Sequence[int] = (0,)
) -> PrecomputeSettings:
    """How the records of `job` are made; `nodes`: machines that share the cache folder."""
    wanted, devices = config.precompute, encoders_of(config, ranks)
    return PrecomputeSettings(
        dtype=config.training.latent_cache_dtype,
        encode_batch=job.encode_batch,
        readers=wanted.readers,
        device=devices[0] if len(devices) == 1 else device_of(config),
        devices=devices,
        deadlines=Deadlines(**wanted.deadlines.model_dump()),
        max_quarantined=wanted.max_quarantined,
        retry_quarantined=wanted.retry_quarantined,
        nan=wanted.nan,
        identity=config.identity,
        overwrite=wanted.overwrite,
        max_error=wanted.max_error,
        compression=wanted.compression,
        progress="auto" if ranks.leads else None,
        part=(nodes.index(ranks.node), len(nodes)),
        among="alone" if ranks.local_world == 1 else "first" if ranks.local_rank == 0 else "rest",
    )


def _ready(config: Config, job: Job, settings: PrecomputeSettings) -> CacheResult | None:
    """The cache as it is, if every sample is stored or set aside."""
    began = time.monotonic()
    if settings.overwrite or settings.retry_quarantined:
        return None
    recipe = job_recipe(config, job)
    try:
        cache = open_cache(cache_dir_of(config) / job.name / recipe.fingerprint)
    except (FormatError, IncompleteError, OSError):
        return None  # precompute mends it, or says what is wrong
    if len(cache.quarantined) > settings.max_quarantined * recipe.count:
        return None
    cache.filler = EncodeFiller(
        job.source,
        job.encoder,
        cache_dir_of(config),
        name=job.name,
        settings=settings,
        fingerprint=cache.fingerprint,
    )
    spent_s = time.monotonic() - began
    return CacheResult(cache=cache, split=job.split, reused=len(cache), seconds=spent_s)


def _fill(
    config: Config, job: Job, settings: PrecomputeSettings, *, run: Callable[..., PrecomputeReport]
) -> CacheResult:
    began = time.monotonic()
    cache_dir = cache_dir_of(config)
    report = run(job.source, job.encoder, cache_dir, name=job.name, settings=settings)
    return CacheResult(
        cache=report.cache,
        split=job.split,
        encoded=report.encoded,
        reused=report.reused,
        adopted=report.adopted,
        seconds=time.monotonic() - began,
        encode_seconds=report.encode_seconds,
    )
