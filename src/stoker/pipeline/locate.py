"""What a configuration asks for and what is there, without encoding anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stoker.config import Config
from stoker.encoders.steady import is_steady
from stoker.errors import ConfigError, SourceError, StokerError
from stoker.loader import Windows
from stoker.loader.outputs import make_outputs
from stoker.loader.windows import number_examples, state_fields, time_field
from stoker.pipeline.build import Job, build_jobs
from stoker.pipeline.folders import cache_dir_of
from stoker.pipeline.gone import find_without_source
from stoker.schema import Schema
from stoker.store import Cache, Digests, Recipe, make_recipe, open_cache
from stoker.train.batches import unequal_tokens


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
