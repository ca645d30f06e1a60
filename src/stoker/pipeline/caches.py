"""What a configuration asks for and what is there, without encoding anything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.config import Config
from stoker.encoders.steady import is_steady
from stoker.errors import ConfigError, FormatError, SourceError, StokerError
from stoker.loader import Windows
from stoker.loader.outputs import make_outputs
from stoker.loader.windows import number_examples, state_fields, time_field
from stoker.pipeline.build import Job, build_jobs, device_of, tasks_of
from stoker.pipeline.folders import cache_dir_of
from stoker.pipeline.gone import find_without_source
from stoker.runtime.jsonio import read_strict
from stoker.schema import Json, JsonResult, Schema, canonical_json, digest_json, schema_to_json
from stoker.store import Cache, Digests, Recipe, make_recipe, open_cache
from stoker.store.format import RECIPE_FILE
from stoker.store.mirror.root import address_of
from stoker.store.remote import is_url, local_path
from stoker.store.storage import open_storage
from stoker.train.operator import unequal_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """One cache of a configuration."""

    recipe: Recipe
    folder: Path
    """The recipe's folder, which need not exist."""
    cache: Cache | None
    """What is stored so far, complete or not."""
    source_gone: bool = False

    @property
    def missing(self) -> int:
        """Samples neither stored nor quarantined."""
        done = 0 if self.cache is None else len(self.cache) + len(self.cache.index.quarantined)
        return self.recipe.count - done


def locate(config: Config, task: str, split: str) -> Located:
    """The recipe of one cache, and the cache if it has been begun.

    Raises:
        StokerError: As `build_jobs`; a source that is gone is an error only where no cache matches the rest.
    """
    return locate_with_job(config, task, split)[1]


def locate_with_job(config: Config, task: str, split: str) -> tuple[Job | None, Located]:
    """As `locate`, after the job that makes the cache; None for that where the source is gone."""
    config = config.for_task(task)
    try:
        job = build_jobs(config, task, [split])[0]
        return job, locate_job(config, job)
    except SourceError:
        found = find_without_source(config, task, [split])
        if found is None:
            raise
        cache = found[split]
        return None, Located(recipe=cache.recipe, folder=cache.path, cache=cache, source_gone=True)


def locate_job(config: Config, job: Job) -> Located:
    """As `locate`, of a source that is there."""
    recipe = job_recipe(config, job)
    folder = cache_dir_of(config) / job.name / recipe.fingerprint
    try:
        cache = open_cache(folder, require_complete=False)
    except (StokerError, OSError):
        cache = None  # nothing there yet, or nothing that can be served
    return Located(recipe=recipe, folder=folder, cache=cache)


def recipe_of(config: Config, task: str, split: str) -> Recipe:
    """The recipe that `config` gives for one cache, its files digested.

    Raises:
        StokerError: As `build_jobs` and `make_recipe`.
    """
    config = config.for_task(task)
    return job_recipe(config, build_jobs(config, task, [split])[0])


def job_recipe(config: Config, job: Job) -> Recipe:
    """As `recipe_of`, of sources and an encoder that are made already."""
    digests = Digests(cache_dir_of(config), config.identity)
    dtype = config.training.latent_cache_dtype
    return make_recipe(job.source, job.encoder, dtype=dtype, encode_batch=job.encode_batch, digests=digests)


def windows_of(config: Config) -> Windows:
    """How trajectories are cut; pairs of the earlier systems began `time_stride` steps apart."""
    training = config.training
    start_every = training.start_every
    windows = Windows(
        stride=training.time_stride,
        horizon=training.rollout_horizon,
        start_every=start_every,
        field=training.state_fields,
    )
    if training.batch_trajectories is not None and "start_every" not in training.model_fields_set:
        return replace(windows, start_every=windows.strides[0])
    return windows


def windows_for(config: Config, schema: Schema) -> Windows | None:
    """How records of `schema` are cut; None where no field has time, so that each is an example."""
    timed = any(field.evolves and not field.kept for field in schema.values())
    return windows_of(config) if timed else None


def no_operator(schema: Schema) -> str:
    """Why `stoker train` has nothing to train on records without time, and what to do instead."""
    return (
        f"records have {', '.join(schema)}, none with time, and `stoker train` trains an operator that "
        "goes from one step to the next. For a steady problem name the field that data follows from, as "
        "data.input=nu. Else fill the cache with `stoker precompute`, and train in Python on "
        "stoker.Loader(stoker.open_cache(FOLDER), 64)"
    )


def windows_in(config: Config, schema: Schema) -> int | None:
    """Windows that training cuts from one record of `schema`; None where records differ in length.

    A record of a steady problem is one example.

    Raises:
        ConfigError: None, so that no loader could serve them; the records have no time; or the operator
            cannot take the state fields side by side.
    """
    windows = windows_for(config, schema)
    if windows is None:
        if not is_steady(schema):
            raise ConfigError(no_operator(schema))
        return 1
    if schema[main := time_field(schema, windows.field)].folded:
        raise ConfigError(
            f"field {main!r} has other points in every record, and `stoker train` trains an operator on "
            "latents of one shape. Set encoder.kind=mesh; or train in Python on stoker.Loader(..., "
            "windows=stoker.Windows(), ragged='pack') (docs/meshes.md)"
        )
    make_outputs(schema, windows, None)
    states = state_fields(schema, windows)
    if why := unequal_tokens({name: schema[name].shape[1:] or (1,) for name in states}):
        raise ConfigError(why)
    field = schema[time_field(schema, windows.field)]
    if field.ragged:
        return None
    return number_examples(np.array([field.shape[0]]), 1, windows).count


def batch_size_of(config: Config, steps: int) -> int:
    """Windows in a batch; `training.batch_trajectories` counts whole trajectories of `steps` steps."""
    training = config.training
    if training.batch_trajectories is None:
        return training.batch_size
    if steps <= 1:
        return training.batch_trajectories
    return max(1, training.batch_trajectories * windows_of(config).count(steps))


def trajectory_steps(schema: Schema) -> int:
    """Steps of the longest field with time; 1 without one."""
    return max((field.shape[0] for field in schema.values() if field.time and not field.ragged), default=1)


# ----------------------------------------------------------------------------------------------------------
# What a cache holds, from its index alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary(JsonResult):
    """One cache, as `stoker inspect` shows it."""

    name: str
    path: str
    address: str | None
    """Where it lies, if that is not this machine; `path` is then its mirror."""
    fingerprint: str
    records: int
    """Records stored."""
    count: int
    """Samples of the source; stored and quarantined together, when complete."""
    fields: Schema
    """Fields as stored."""
    shards: int
    bytes: int
    """Bytes of all shards on disk."""
    raw_bytes: int
    """Bytes of all shards uncompressed."""
    complete: bool
    quarantined: tuple[dict[str, Json], ...]
    """Number, stage and error of each sample set aside."""
    statistics: Mapping[str, Any]
    """Per field, as kept in the index."""
    error: Mapping[str, Any]
    """Per field: largest and root-mean-square rounding error of the storage dtype, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder(JsonResult):
    """The caches of one folder, as `stoker inspect` lists them."""

    path: str
    caches: tuple[CacheSummary, ...]
    """By name; of each name the one that `open_cache` would open."""
    unreadable: Mapping[str, str]
    """Why a cache that is there cannot be opened, by its name."""


def inspect_path(path: str | Path) -> CacheSummary | CacheFolder:
    """Return what a cache holds, or a folder of several caches.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
    """
    names = [] if is_url(path) else names_in(Path(path))
    if not names:
        return inspect_cache(path)
    caches: list[CacheSummary] = []
    unreadable: dict[str, str] = {}
    for name in names:
        try:
            caches.append(inspect_cache(Path(path, name)))
        except StokerError as error:
            unreadable[name] = str(error)
    return CacheFolder(path=str(path), caches=tuple(caches), unreadable=unreadable)


def names_in(folder: Path) -> list[str]:
    """Return the names of the caches in a folder, sorted; none where it is a cache itself."""
    if next(folder.glob(f"*/{RECIPE_FILE}"), None) is not None:
        return []
    return sorted({recipe.parent.parent.name for recipe in folder.glob(f"*/*/{RECIPE_FILE}")})


def inspect_cache(path: str | Path) -> CacheSummary:
    """Read a cache's index; costs O(shards), no record is read.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
    """
    cache = open_cache(path, require_complete=False)
    return CacheSummary(
        name=cache.name,
        path=str(cache.path),
        address=address_of(cache.path),
        fingerprint=cache.fingerprint,
        records=len(cache),
        count=cache.recipe.count,
        fields=cache.schema,
        shards=len(cache.index.shards),
        bytes=shard_bytes(cache),
        raw_bytes=raw_bytes(cache),
        complete=cache.complete,
        quarantined=tuple(list_quarantined(cache)),
        statistics=cache.statistics,
        error=cache.index.error,
    )


def list_quarantined(cache: Cache) -> list[dict[str, Json]]:
    """Number, stage, error and attempts of each sample set aside, by number."""
    return [
        {"number": number, "stage": f.stage, "error": f.error, "attempts": f.attempts, "kind": f.kind}
        for number, f in sorted(cache.index.quarantined.items())
    ]


def shard_bytes(cache: Cache) -> int:
    """Bytes of all shards on disk."""
    return sum(shard.bytes for shard in cache.index.shards)


def raw_bytes(cache: Cache) -> int:
    """Bytes of all shards uncompressed."""
    return sum(shard.raw_bytes for shard in cache.index.shards)


def worst_error(cache: Cache) -> float | None:
    """Largest relative rounding error over all fields; None where nothing was rounded."""
    errors = [entry.get("max") for entry in cache.index.error.values()]
    return max((error for error in errors if error is not None), default=None)


# ----------------------------------------------------------------------------------------------------------
# What a run folder remembers between commands: whether its run finished, and how long a step took.
#
# `run.json` lies beside the checkpoints. An interrupted run with the same settings goes on where it
# stopped; a finished one, or one with other settings, begins anew. The time of a step counts for steps of
# the same work only.


FILE = "run.json"
LIMIT_BYTES = 1 << 20


def run_dir_of(config: Config) -> Path:
    """`training.run_dir`, or `runs/{task}`, or `runs/{task}+{task}`.

    Raises:
        ConfigError: It is an address.
    """
    return local_path(config.training.run_dir or f"runs/{'+'.join(tasks_of(config))}", "training.run_dir")


def settings_digest(config: Config, fingerprints: Mapping[str, str]) -> str:
    """What an interrupted run must share with this one: model, training and data, wherever they lie."""
    settings: dict[str, Any] = config.to_dict()
    training = {k: v for k, v in settings["training"].items() if k not in _FREE}
    kept: dict[str, Json] = {"training": training, "model": settings["model"], "caches": dict(fingerprints)}
    if settings["stages"]:  # how long each is may change from one to the next
        kept["stages"] = [{k: v for k, v in own.items() if k != "epochs"} for own in settings["stages"]]
        del training["epochs"]
    if settings["tasks"] is not None:
        kept["tasks"] = settings["tasks"]
    return digest_json(kept)


_FREE = (
    "tier", "reserve_bytes", "run_dir", "latent_cache_dir", "checkpoint_every", "device", "max_stall",
    "rank_deadline", "trackers", "price_per_hour",
)  # fmt: skip
"""Settings of `training` that change no batch."""


def unfinished(config: Config, digest: str) -> int | None:
    """Ranks with which an interrupted run of these settings was begun in the run folder; None: none was."""
    diary = _read(run_dir_of(config))
    if diary.get("settings") != digest or diary.get("finished") is not False:
        return None
    return diary.get("ranks", 1)


def work_digest(config: Config, schema: Schema) -> str:
    """What decides how long a step takes: the model, its batch of records like `schema`, and the device."""
    training = config.training
    work: dict[str, Json] = {
        "model": config.to_dict()["model"],
        "fields": schema_to_json(schema),
        "batch_size": batch_size_of(config, trajectory_steps(schema)),
        "horizon": windows_of(config).horizons[1],
        "device": device_of(config),
        "amp": training.amp,
    }
    return digest_json(work)


def last_step_s(config: Config, schema: Schema) -> float | None:
    """Seconds that a step of the last run here took, loading left out; None when there was none like it."""
    diary = _read(run_dir_of(config))
    step_s = diary.get("step_s")
    if not isinstance(step_s, float) or step_s <= 0 or diary.get("work") != work_digest(config, schema):
        return None
    return step_s


def write_diary(
    run_dir: Path, *, digest: str, finished: bool, work: str, step_s: float | None, ranks: int = 1
) -> None:
    """Note the state of a run; `digest` and `work` as `settings_digest` and `work_digest` make them.

    Args:
        ranks: With how many it was begun.

    Raises:
        ReadOnlyError: The folder cannot be written.
    """
    text = canonical_json(
        {"settings": digest, "finished": finished, "work": work, "step_s": step_s, "ranks": ranks}
    )
    open_storage(run_dir).put(FILE, text.encode())


def _read(run_dir: Path) -> dict[str, Any]:
    """The diary; empty when there is none, or a damaged one."""
    with suppress(OSError, FormatError):
        return read_strict(open_storage(run_dir).read(FILE, limit_bytes=LIMIT_BYTES), where=FILE)
    return {}
