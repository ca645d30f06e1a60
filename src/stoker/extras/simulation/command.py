"""`stoker plan --simulate`: words in, tables out; a configuration gives what the words leave out.

Without a configuration nothing here imports torch.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, tell_settings
from stoker.cli.output import Cells, bold, table
from stoker.errors import ConfigError
from stoker.runtime.files import make_folder
from stoker.runtime.threads import call_within
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.extras.simulation.result import Simulation
    from stoker.plan.trials import Interval
    from stoker.precompute.measure import Trial
    from stoker.run.build import CacheJob
    from stoker.run.caches import CacheLocation
    from stoker.run.context import Run
    from stoker.schema import Schema

TRIAL_TIMEOUT_S = 120.0
"""Timeout of a trial of the stages of precompute, which itself begins nothing new after 15 s."""


def knows(word: str) -> bool:
    """Return True if `word`, as `nodes=8`, is one of a simulation."""
    from stoker.extras.simulation.scenario import KEYS, PRICE_KEYS

    return word.partition("=")[0] in {*KEYS, *PRICE_KEYS}


def simulated(out: CommandOutput, words: list[str], *, as_markdown: bool, picture: Path | None) -> None:
    """Simulate what `words` say, and print it.

    Raises:
        ConfigError: There is more than one CONFIG, or an unknown word.
    """
    if picture is not None:
        from stoker.plan.resources import require_writable

        require_writable(picture.parent, "the folder of --picture")
    files, settings = tell_settings(words)
    overrides = [word for word in settings if "." in word.partition("=")[0]]
    asked = [word for word in settings if word not in overrides]
    if len(files) > 1 or (overrides and not files):
        found = ", ".join(map(str, files)) or f"{overrides[0]} and no CONFIG"
        raise ConfigError(f"found {found}", hint="Expected words like nodes=8 gpus=8, and one CONFIG at most")
    from stoker.extras.simulation.run import simulate
    from stoker.extras.simulation.scenario import parse_scenario

    if files:
        from stoker.config import load_config
        from stoker.run.context import Run
        from stoker.runtime.libc import keep_freed_memory

        keep_freed_memory()  # as where caches are filled: without it an encoder's time may double
        run = Run(load_config(files[0], overrides))
        known, notes = find_known(run, given={word.partition("=")[0] for word in asked})
        found = simulate(parse_scenario(asked, known))
        found = replace(found, taken=(*notes, *found.taken))
    else:
        found = simulate(parse_scenario(asked))
    if picture is not None:
        from stoker.extras.simulation.result import draw_simulation

        make_folder(picture.parent)
        draw_simulation(found, picture)
    if as_markdown and not out.as_json:
        from stoker.extras.simulation.result import markdown

        out.write(markdown(found) + "\n")
    else:
        out.show(found, show_simulation)


def show_simulation(found: Simulation, console: Console) -> None:
    """Encoders, ways, what limits each, which to take."""
    from stoker.extras.simulation.result import HEAD, cells, encoding_cells, remarks

    head, *rows = encoding_cells(found)
    table(console, [bold(*head), *[_plain(row) for row in rows]], fixed=6, right=(0, 1, 2, 4, 5), gap=2)
    console.print()
    rows = [cells(way) for way in found.ways]
    table(
        console, [bold(*HEAD), *[_plain(row) for row in rows]], fixed=len(HEAD), right=(2, 3, 5, 6, 7), gap=2
    )
    console.print()
    for line in remarks(found):
        console.print(escape(line), soft_wrap=True)
    console.print("", escape(found.reason), sep="\n", soft_wrap=True)
    if found.taken:
        console.print(escape(f"taken: {'; '.join(found.taken)}"), soft_wrap=True)


def _plain(row: tuple[str, ...]) -> Cells:
    return tuple(escape(cell) for cell in row)


# ----------------------------------------------------------------------------------------------------------
# What a configuration knows of a scenario: its schema, counts, and speeds measured here.


def find_known(run: Run, given: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of a scenario that a configuration knows, and where they come from in words.

    `given` are keys that need not be found out: their values win anyway.
    """
    from stoker.extras.simulation.scenario import KEYS
    from stoker.plan import probe
    from stoker.run.caches import locate_with_job
    from stoker.run.context import batch_examples, last_step_s
    from stoker.run.plan import demand_of, served_loads

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
    known |= (order := _order_of(run))
    for name, value in order.items():
        if value not in (True, "global") and name not in given:
            said = str(value).lower()
            notes.append(
                f"{name}={said}, of training.{name}={str(getattr(run.config.training, name)).lower()}"
            )
    if not {"host_memory", "cores"} <= given:
        notes.append(f"{format_bytes(here.host_bytes)} of memory and {here.cpus:g} cores, as here")
    step_s = last_step_s(run, located.recipe.schema)
    if step_s is not None:
        known["step_s"] = step_s
        notes += [] if "step" in given else [f"step={format_seconds(step_s)}, of its last run here"]
    if job is not None:
        known["raw_bytes"] = float(sum(field.size_bytes() for field in job.source.schema().values()))
        if not {"encode", "read", "write"} <= given:
            tried, ranges, count = _measure_stages(run, job, located)
            known |= tried
            left_out = {KEYS[key][0] for key in given if key in KEYS}
            known["ranges"] = {name: likely for name, likely in ranges.items() if name not in left_out}
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


def _order_of(run: Run) -> dict[str, Any]:
    """Return how a configuration shuffles and divides, as fields of a scenario."""
    from stoker.loader.order import order_text

    training = run.config.training
    kind = order_text(training.shuffle, training.partition)
    shuffle = "block" if kind.startswith("block") else not kind.startswith("sequential")
    return {"shuffle": shuffle, "partition": "global" if training.partition == "global" else "static"}


def _examples_of_one(run: Run, schema: Schema) -> int:
    """Return the number of windows cut from one record; 1 where records have no time, or differ in length."""
    from stoker.run.context import trajectory_steps

    windows = run.windows_for(schema)
    steps = trajectory_steps(schema)
    return 1 if windows is None or steps <= 1 else max(1, windows.count(steps))


def _measure_stages(
    run: Run, job: CacheJob, located: CacheLocation
) -> tuple[dict[str, float], dict[str, Interval], int]:
    """Return seconds to read, encode and write a sample, their ranges, and how many samples were tried.

    Each stage is timed alone.
    """
    from stoker.plan.resources import find_obstacle
    from stoker.precompute.measure import Trial, try_stages
    from stoker.run.precompute import settings_of

    place, trial = Path(run.config.training.latent_cache_dir), Trial()
    beside = place if place.is_dir() and find_obstacle(place) is None else None
    with tempfile.TemporaryDirectory(prefix=".simulate-", dir=beside) as folder:
        where, settings = (Path(folder), job.name, located.recipe), settings_of(run, job)
        call_within(
            TRIAL_TIMEOUT_S,
            lambda: try_stages(job.source, job.encoder, where, settings, trial),
            f"a trial of {job.name}",
        )
    reads = trial.reads_s or trial.opens_s
    found = {
        "read_s": fmean(reads.values()) if reads else 0.0,
        "encode_s": trial.encode_s,
        "write_s": trial.writes_s / max(1, trial.records),
    }
    return found, stage_ranges(trial), trial.records


STRETCHES = 5
"""Into which the samples of a trial are cut: the mean of each counts as one result."""


def stage_ranges(trial: Trial) -> dict[str, Interval]:
    """Return the likely seconds of reading and encoding a sample, from stretches of one trial."""
    from stoker.plan.trials import Interval, next_interval

    reads = list((trial.reads_s or trial.opens_s).values())
    calls = trial.encodes_s[-(-len(trial.encodes_s) // 4) :]
    encodes = [seconds / samples for seconds, samples in calls if samples]
    found: dict[str, Interval] = {}
    for name, each in (("read_s", reads), ("encode_s", encodes)):
        size = len(each) // STRETCHES
        means = [fmean(each[at * size : (at + 1) * size]) for at in range(STRETCHES)] if size else []
        likely = next_interval(means)
        if likely is not None:
            found[name] = Interval(max(0.0, likely.low), likely.high)
    return found
