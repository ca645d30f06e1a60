"""A simulation of what a configuration would take elsewhere: its schema, counts and speeds measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stoker.config import Config
from stoker.pipeline.build import Job, device_of, tasks_of
from stoker.pipeline.diary import last_step_s
from stoker.pipeline.folders import obstacle
from stoker.pipeline.locate import Located, batch_size_of, locate_with_job, trajectory_steps, windows_for
from stoker.pipeline.plan import demand_of
from stoker.pipeline.precompute import settings_of
from stoker.pipeline.served import served_loads
from stoker.plan import Simulation, probe, simulate
from stoker.plan.simulation import parse_scenario
from stoker.precompute.trial import Trial, try_stages
from stoker.runtime.threads import call_within
from stoker.schema import Schema
from stoker.sources.files import canonical_split
from stoker.units import format_bytes, format_count, format_seconds

TRIAL_DEADLINE_S = 120.0
"""For a trial of the stages of precompute, which itself begins nothing new after 15 s."""


def simulate_words(words: Sequence[str], config: Config | None = None) -> Simulation:
    """Simulate what `key=value` words say; with a configuration they need not say what it knows.

    Args:
        words: As `nodes=8`, `step=20ms`; they win over what is known.
        config: Gives records, their sizes, batch and examples; the speed of reading, encoding and writing,
            tried on some samples here; this machine's memory and cores.

    Raises:
        ConfigError: A word that is wrong or lacking.
        StokerError: As `locate`, and as encoding.
    """
    if config is None:
        return simulate(parse_scenario(words))
    known, notes = known_of(config, given={word.partition("=")[0] for word in words})
    found = simulate(parse_scenario(words, known))
    return replace(found, taken=(*notes, *found.taken))


def known_of(config: Config, given: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a scenario that a configuration knows, and where they come from in words.

    `given` are keys that need not be found out: their values win anyway.
    """
    task, split = tasks_of(config)[0], canonical_split(config.data.wanted_splits[0])
    own = config.for_task(task)
    job, located = locate_with_job(config, task, split)
    demand = demand_of(own, located, device_of(own))
    here = probe()
    known: dict[str, Any] = {
        "records": demand.records,
        "record_bytes": demand.record_bytes,
        "batch": demand.batch_examples,
        "example_bytes": demand.example_bytes,
        "examples": demand.records * _examples_of_one(own, located.recipe.schema),
        "host_memory_bytes": here.host_bytes,
        "cores": here.cpus,
    }
    notes: list[str] = []
    if not {"host_memory", "cores"} <= given:
        notes.append(f"{format_bytes(here.host_bytes)} of memory and {here.cpus:g} cores, as here")
    step_s = last_step_s(own, located.recipe.schema)
    if step_s is not None:
        known["step_s"] = step_s
        notes += [] if "step" in given else [f"step={format_seconds(step_s)}, of its last run here"]
    if job is not None:
        known["raw_bytes"] = float(sum(field.size_bytes() for field in job.source.schema().values()))
        if not {"encode", "read", "write"} <= given:
            tried, count = _tried(own, job, located)
            known |= tried
            said = ", ".join(f"{name[:-2]}={format_seconds(value)}" for name, value in tried.items())
            notes.append(f"{said}, of {format_count(count)} samples here")
    if located.cache is not None and not located.missing and "gpu_memory" not in given:
        known["served"] = served_loads(
            located.cache,
            windows_for(own, located.recipe.schema),
            batch_size_of(own, trajectory_steps(located.recipe.schema)),
        )
        notes.append("loads of batches, measured on the cache here")
    return known, notes


def _examples_of_one(config: Config, schema: Schema) -> int:
    """Windows cut from one record; 1 where records have no time, or differ in length."""
    windows = windows_for(config, schema)
    steps = trajectory_steps(schema)
    return 1 if windows is None or steps <= 1 else max(1, windows.count(steps))


def _tried(config: Config, job: Job, located: Located) -> tuple[dict[str, float], int]:
    """Seconds to read, encode and write a sample, each stage alone, and how many were tried."""
    place, trial = Path(config.training.latent_cache_dir), Trial()
    beside = place if place.is_dir() and obstacle(place) is None else None
    with tempfile.TemporaryDirectory(prefix=".simulate-", dir=beside) as folder:
        where, settings = (Path(folder), job.name, located.recipe), settings_of(config, job)
        call_within(
            TRIAL_DEADLINE_S,
            lambda: try_stages(job.source, job.encoder, where, settings, trial),
            f"a trial of {job.name}",
        )
    reads = trial.reads_s or trial.opens_s
    found = {
        "read_s": fmean(reads.values()) if reads else 0.0,
        "encode_s": trial.encode_s,
        "write_s": trial.writes_s / max(1, trial.records),
    }
    return found, trial.records
