"""A simulation of what a configuration would take elsewhere: its schema, counts and speeds measured here."""

from __future__ import annotations

import tempfile
import textwrap
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
from stoker.run.context import Run, batch_examples, last_step_s, trajectory_steps
from stoker.run.folders import find_obstacle
from stoker.run.plan import demand_of, served_loads
from stoker.run.precompute import settings_of
from stoker.runtime.files import replace_atomically
from stoker.runtime.threads import call_within
from stoker.schema import Schema
from stoker.units import format_bytes, format_count, format_percent, format_seconds

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
    known, notes = known_of(run, given={word.partition("=")[0] for word in words})
    found = simulate(parse_scenario(words, known))
    return replace(found, taken=(*notes, *found.taken))


def known_of(run: Run, given: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a scenario that a configuration knows, and where they come from in words.

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
            tried, count = _tried(run, job, located)
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


def _tried(run: Run, job: CacheJob, located: CacheLocation) -> tuple[dict[str, float], int]:
    """Seconds to read, encode and write a sample, each stage alone, and how many were tried."""
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


# ----------------------------------------------------------------------------------------------------------
# Draw a simulation: for each way how long precompute, the first epoch and all others take.


BLUE, ORANGE, PALE, GREY, TEXT = "#1f6fb4", "#d9731a", "#d5dce3", "#9aa5b1", "#24313f"


def draw_simulation(found: Simulation, path: Path) -> None:
    """Write a PNG or SVG, by the name's ending; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = [way for way in found.ways if way.fits][::-1]
    picture: Any = Figure(figsize=(10, 1.9 + 0.44 * len(ways)), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(1, 1)
    for place, way in enumerate(ways):
        left = 0.0
        later_s = way.total_s - way.encoding_s - way.first_epoch_s
        for seconds, colour in ((way.encoding_s, ORANGE), (way.first_epoch_s, PALE), (later_s, BLUE)):
            axes.barh(place, seconds, left=left, color=colour, height=0.62)
            left += seconds
        cost = "" if way.cost is None else f", costs {way.cost:,.0f}"
        said = f"  {format_seconds(way.total_s)}, stall {format_percent(way.stall)}{cost}"
        axes.text(left, place, said, va="center", fontsize=8.5, color=TEXT)
    most_s = max((way.total_s for way in ways), default=1.0)
    axes.set_xlim(0, 1.45 * most_s)
    axes.set_yticks(range(len(ways)), [way.name for way in ways])
    axes.xaxis.set_major_formatter(_tick)
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=TEXT, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    names = {"precompute": ORANGE, "first epoch": PALE, "all others": BLUE}
    handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in names.items()]
    axes.legend(
        handles=handles, fontsize=8.5, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1)
    )
    one = found.scenario
    title = f"{one.nodes} nodes with {one.gpus} ranks each, {one.records:,} records, {one.epochs} epochs"
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    written: dict[str, Any] = {"color": TEXT, "x": 0.01, "ha": "left"}
    said = found.reason.partition("; ")[0]
    picture.supxlabel("\n".join(textwrap.wrap(said, 130)), fontsize=8.5, **written)
    with replace_atomically(path) as temporary:
        picture.savefig(temporary, format=path.suffix.lstrip(".").lower() or "png")


def _tick(value: float, _place: int) -> str:
    return format_seconds(value) if value else "0"
