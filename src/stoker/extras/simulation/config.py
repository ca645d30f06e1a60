"""A simulation of what a configuration would take elsewhere: its schema, counts and speeds measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stoker.extras.simulation.result import Simulation
from stoker.extras.simulation.run import simulate
from stoker.extras.simulation.scenario import parse_scenario
from stoker.plan import probe
from stoker.precompute.measure import Trial, try_stages
from stoker.run.build import CacheJob
from stoker.run.caches import CacheLocation, locate_with_job
from stoker.run.context import Run, batch_examples, find_obstacle, last_step_s, trajectory_steps
from stoker.run.plan import demand_of, served_loads
from stoker.run.precompute import settings_of
from stoker.runtime.threads import call_within
from stoker.schema import Schema
from stoker.units import format_bytes, format_count, format_seconds

TRIAL_DEADLINE_S = 120.0
"""For a trial of the stages of precompute, which itself begins nothing new after 15 s."""


def simulate_words(words: Sequence[str], run: Run | None = None) -> Simulation:
    """Simulate what `key=value` words say; with a configuration they need not say what it knows.

    Args:
        words: As `nodes=8`, `step=20ms`; they win over what is known.
        run: Gives records, their sizes, batch and examples; the speed of reading, encoding and writing,
            tried on some samples here; this machine's memory and cores.

    Raises:
        ConfigError: A word that is wrong or lacking.
        StokerError: As `locate`, and as encoding.
    """
    if run is None:
        return simulate(parse_scenario(words))
    known, notes = find_known(run, given={word.partition("=")[0] for word in words})
    found = simulate(parse_scenario(words, known))
    return replace(found, taken=(*notes, *found.taken))


def find_known(run: Run, given: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of a scenario that a configuration knows, and where they come from in words.

    `given` are keys that need not be found out: their values win anyway.
    """
    run = run.parts()[0]
    job, located = locate_with_job(run, run.split)
    demand = demand_of(run, located)
    here = probe()
    known: dict[str, Any] = {
        "records": demand.records,
        "record_bytes": demand.record_bytes,
        "batch": demand.batch_examples,
        "example_bytes": demand.example_bytes,
        "examples": demand.records * _examples_of_one(run, located.recipe.schema),
        "host_memory_bytes": here.host_bytes,
        "cores": here.cpus,
    }
    notes: list[str] = []
    if not {"host_memory", "cores"} <= given:
        notes.append(f"{format_bytes(here.host_bytes)} of memory and {here.cpus:g} cores, as here")
    step_s = last_step_s(run, located.recipe.schema)
    if step_s is not None:
        known["step_s"] = step_s
        notes += [] if "step" in given else [f"step={format_seconds(step_s)}, of its last run here"]
    if job is not None:
        known["raw_bytes"] = float(sum(field.size_bytes() for field in job.source.schema().values()))
        if not {"encode", "read", "write"} <= given:
            tried, count = _measure_stages(run, job, located)
            known |= tried
            said = ", ".join(f"{name[:-2]}={format_seconds(value)}" for name, value in tried.items())
            notes.append(f"{said}, of {format_count(count)} samples here")
    if located.cache is not None and not located.missing and "gpu_memory" not in given:
        known["served"] = served_loads(
            located.cache,
            run.windows_for(located.recipe.schema),
            batch_examples(run, located.recipe.schema),
        )
        notes.append("loads of batches, measured on the cache here")
    return known, notes


def _examples_of_one(run: Run, schema: Schema) -> int:
    """Windows cut from one record; 1 where records have no time, or differ in length."""
    windows = run.windows_for(schema)
    steps = trajectory_steps(schema)
    return 1 if windows is None or steps <= 1 else max(1, windows.count(steps))


def _measure_stages(run: Run, job: CacheJob, located: CacheLocation) -> tuple[dict[str, float], int]:
    """Return seconds to read, encode and write a sample, each stage alone, and how many were tried."""
    place, trial = Path(run.config.training.latent_cache_dir), Trial()
    beside = place if place.is_dir() and find_obstacle(place) is None else None
    with tempfile.TemporaryDirectory(prefix=".simulate-", dir=beside) as folder:
        where, settings = (Path(folder), job.name, located.recipe), settings_of(run, job)
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
