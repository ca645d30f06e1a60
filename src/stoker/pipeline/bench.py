"""What this machine can do at most, and what each tier reaches of it for one's own cache.

Two rounds over all contenders in turns, so that a machine that gets busy in between is seen by how far the
two figures differ. Nothing is written but the picture; reads are of the cache's own shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.loader import Loader, Windows
from stoker.monitor import StallMeter
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.folders import require_writable
from stoker.pipeline.locate import batch_size_of, locate, trajectory_steps, windows_for
from stoker.plan import Plan, limits, probe
from stoker.plan.limits import Limit
from stoker.runtime.files import make_folder
from stoker.schema import JsonResult
from stoker.sources.files import canonical_split
from stoker.store import Cache, open_cache
from stoker.store.layout import record_bytes
from stoker.units import KIB, MIB, format_bytes, format_count, format_percent, format_seconds

ROUNDS = 2
SCATTER = 0.2
"""Figures of two rounds that differ by more than this part are called scattered."""
SERVED_BYTES = 256 * MIB
"""Bytes of records that are served to measure; more than a processor's own caches hold."""
FILL_S = 10.0
"""Seconds that filling a tier with them may take."""
LEAST_S = 0.1
"""Seconds of a contender's turn at least."""
PLAIN_BYTES, PLAIN_BATCH = 4 * KIB, 256
"""Rows and batch of the limits where there is no cache to take them from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One limit or one tier, measured."""

    what: str
    """What was done, in words."""
    bytes_s: float
    """The better one of two rounds."""
    scatter: float
    """How far the two are apart: 1 - worse / better."""
    limit: str | None = None
    """For a tier: the limit that it is held against."""
    fraction: float | None = None
    """For a tier: what it reaches of that limit."""
    batch_s: float | None = None
    """For a tier: seconds of one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult(JsonResult):
    """All figures, and what to do."""

    machine: str
    cache: str
    """Name, records and batch; empty where there was no cache."""
    limits: Mapping[str, Figure]
    tiers: Mapping[str, Figure]
    advice: str
    picture: Path | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is served: a cache, and how."""

    cache: Cache
    windows: Windows | None
    batch_size: int
    device: str
    files: Sequence[Path]
    """The shards."""
    served: Sequence[int]
    """Numbers of the samples that are served to measure: no more than fill a tier in a moment."""

    def loader(self, tier: str, meter: StallMeter | None = None) -> Loader:
        """A loader of these batches from one tier."""
        return Loader(
            self.cache,
            self.batch_size,
            windows=self.windows,
            tier=tier,
            device=self.device,
            indices=self.served,
            meter=meter,
        )


def job_of_config(config: Config) -> Job:
    """The training cache of a configuration, in its batches.

    Raises:
        ConfigError: Nothing is encoded yet.
    """
    split = canonical_split(config.data.wanted_splits[0])
    located = locate(config, tasks_of(config)[0], split)
    if located.cache is None or located.missing:
        raise ConfigError(
            f"{located.folder} lacks {located.missing} records. `stoker bench` serves what is there: "
            "run `stoker precompute` with the same settings first"
        )
    schema = located.cache.schema
    batch_size = batch_size_of(config, trajectory_steps(schema))
    return _job(located.cache, windows_for(config, schema), batch_size, device_of(config))


def job_of_cache(path: Path, batch_size: int) -> Job:
    """A cache by its folder: windows of its trajectories, or whole records where there are none."""
    cache = open_cache(path)
    timed = any(f.time for f in cache.schema.values())
    return _job(cache, Windows() if timed else None, batch_size, "cpu")


def _job(cache: Cache, windows: Windows | None, batch_size: int, device: str) -> Job:
    files = [cache.path / shard.file for shard in cache.index.shards]
    numbers = list(cache.numbers)
    part = max(1, int(len(numbers) * min(1.0, SERVED_BYTES / sum(file.stat().st_size for file in files))))
    return Job(
        cache=cache,
        windows=windows,
        batch_size=batch_size,
        device=device,
        files=files,
        served=numbers[:part],
    )


def run_bench(job: Job | None, *, seconds: float, picture: Path | None) -> BenchResult:
    """Measure for about `seconds`, and draw.

    Raises:
        ConfigError: `seconds` is not above 0, or the folder of `picture` cannot be written.
        StokerError: As `Loader`.
    """
    if not seconds > 0:
        raise ConfigError(f"--seconds is {seconds:g}. Expected more than 0")
    if picture is not None:
        require_writable(picture.parent, "the folder of --picture")
    begun = time.monotonic()
    limited, served = _limits(job), _served(job)
    turn_s = max(LEAST_S, seconds / ROUNDS / max(1, len(limited) + len(served)))
    found: dict[str, list[float]] = {name: [] for name in [*limited, *served]}
    for _ in range(ROUNDS):
        for name, (_, measure) in {**limited, **{n: s[:2] for n, s in served.items()}}.items():
            found[name].append(measure(turn_s))
    figures = {name: _figure(what, found[name]) for name, (what, _) in limited.items() if any(found[name])}
    tiers = {
        name: _held(_figure(what, found[name]), limit, figures, _batch_bytes(job))
        for name, (what, _, limit) in served.items()
        if any(found[name])
    }
    result = BenchResult(
        machine=_machine(),
        cache="" if job is None else _about(job),
        limits=figures,
        tiers=tiers,
        advice=_advice(job, figures, tiers),
        picture=picture,
        seconds=time.monotonic() - begun,
    )
    if picture is not None:
        from stoker.pipeline.bench_picture import draw_bench

        make_folder(picture.parent)
        draw_bench(result, picture)
    return result


def _limits(job: Job | None) -> dict[str, tuple[str, Limit]]:
    row, batch = (PLAIN_BYTES, PLAIN_BATCH) if job is None else (_row_bytes(job), job.batch_size)
    held = SERVED_BYTES if job is None else min(SERVED_BYTES, sum(path.stat().st_size for path in job.files))
    found: dict[str, tuple[str, Limit]] = {
        "copy": ("copying 64 MiB within memory, one thread", limits.copy_limit()),
        "gather": (
            f"gathering {batch} rows of {format_bytes(row)} at random, one thread",
            limits.gather_limit(row, batch, source_bytes=held),
        ),
    }
    if job is None:
        return found
    size = _example_bytes(job)
    block = format_bytes(-(-size // limits.PAGE_BYTES) * limits.PAGE_BYTES)
    found["disk, sequential"] = ("direct reads of 8 MiB in order", limits.sequential_limit(job.files))
    found["disk, random"] = (f"direct reads of {block} at random", limits.random_limit(job.files, size))
    found["page cache"] = (
        f"reads of {block} at random that need no disk",
        limits.random_limit(job.files, size, cached=True),
    )
    if job.device != "cpu":
        found["to the GPU"] = ("page-locked memory to the GPU", limits.to_device_limit(job.device))
        found["gather, GPU"] = (
            f"gathering {batch} rows of {format_bytes(row)} on the GPU",
            limits.gather_limit(row, batch, job.device, source_bytes=held),
        )
    return found


def _served(job: Job | None) -> dict[str, tuple[str, Limit, str]]:
    """Per tier: what is done, how it is measured, and the limit that it is held against."""
    if job is None:
        return {}
    cold = _Served(job, "disk", cold=True)
    host = "gather" if job.device == "cpu" else "to the GPU"
    found: dict[str, tuple[str, Limit, str]] = {}
    if job.device != "cpu":
        found["device"] = ("batches from the GPU's memory", _Served(job, "device"), "gather, GPU")
    found["host"] = ("batches from host memory", _Served(job, "host"), host)
    found["disk, warm"] = ("batches read and verified, no disk needed", _Served(job, "disk"), "page cache")
    found["disk, cold"] = ("batches read from the disk and verified", cold, "disk, random")
    return found


class _Served:
    """Measures a tier by having batches served; filling it is no part of the figure.

    Each turn has a loader of its own, since what one holds in memory another could not read from the disk.
    """

    def __init__(self, job: Job, tier: str, *, cold: bool = False) -> None:
        self._job = job
        self._tier = tier
        self._cold = cold

    def __call__(self, seconds: float) -> float:
        """Bytes a second; 0 where the tier could not be filled in time."""
        meter = StallMeter()
        loader = self._job.loader(self._tier, meter)
        if not self._cold:
            self._fill(loader, meter, max(FILL_S, seconds))
        count, took = 0, 0.0
        meter.reset()
        while took < seconds:
            if self._cold:
                limits.drop_from_page_cache(self._job.files)
            begin = time.perf_counter()
            for _ in loader:
                count += 1
                if took + time.perf_counter() - begin >= seconds:
                    break
            took += time.perf_counter() - begin
        whole = set(meter.epoch().tiers) == {self._tier}
        return count * _batch_bytes(self._job) / took if whole else 0.0

    def _fill(self, loader: Loader, meter: StallMeter, seconds: float) -> None:
        """Serve whole epochs until one comes from the tier alone, or time is over."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            meter.reset()
            for _ in loader:
                if time.perf_counter() >= end:
                    break
            if set(meter.epoch().tiers) == {self._tier}:
                break


def _figure(what: str, values: Sequence[float]) -> Figure:
    best = max(values)
    return Figure(what=what, bytes_s=best, scatter=1 - min(values) / best)


def _held(figure: Figure, limit: str, figures: Mapping[str, Figure], batch_bytes: float) -> Figure:
    """A tier's figure beside its limit."""
    against = figures.get(limit)
    return Figure(
        what=figure.what,
        bytes_s=figure.bytes_s,
        scatter=figure.scatter,
        limit=limit,
        fraction=None if against is None else figure.bytes_s / against.bytes_s,
        batch_s=batch_bytes / figure.bytes_s,
    )


def _example_bytes(job: Job) -> int:
    """Bytes of one example as it is stored."""
    schema = job.cache.schema
    if any(f.ragged for f in schema.values()):
        return sum(path.stat().st_size for path in job.files) // max(1, len(job.cache))
    if job.windows is None:
        return record_bytes(schema)
    steps = job.windows.horizons[1] + 1
    return sum(f.row_bytes * steps if f.time else f.size_bytes() for f in schema.values())


def _row_bytes(job: Job) -> int:
    """Bytes that one row of a gather takes: a step of a window, or the largest field of a record."""
    schema = job.cache.schema
    if job.windows is None:
        return max(f.row_bytes if f.ragged else f.size_bytes() for f in schema.values())
    return max(f.row_bytes for f in schema.values() if f.time)


def _batch_bytes(job: Job | None) -> float:
    return 0.0 if job is None else float(_example_bytes(job) * job.batch_size)


def _about(job: Job) -> str:
    cache, batch = job.cache, format_bytes(_batch_bytes(job))
    kind = "records" if job.windows is None else "windows"
    size = format_bytes(sum(file.stat().st_size for file in job.files))
    held = f"{cache.name}, {format_count(len(cache), 'record')}, {size}"
    return f"{held}; a batch is {job.batch_size} {kind}, {batch}"


def _machine() -> str:
    found = probe()
    return f"{found.cpus:g} cores, {format_bytes(found.host_bytes)} of memory usable ({found.host_limit})"


def _advice(job: Job | None, figures: Mapping[str, Figure], tiers: Mapping[str, Figure]) -> str:
    """What to do, in a sentence or three."""
    said: list[str] = []
    if job is None:
        said.append("Name a CONFIG or the folder of a cache to see what its tiers reach of these limits.")
    else:
        whole = Loader(job.cache, job.batch_size, windows=job.windows, device=job.device)
        said += _choice(whole.plan, tiers)
    busy = {name: figure.scatter for name, figure in {**figures, **tiers}.items() if figure.scatter > SCATTER}
    if busy:
        worst = max(busy, key=lambda name: busy[name])
        said.append(
            f"Two rounds differ by up to {format_percent(busy[worst])} ({worst}): something else is using "
            "this machine. Run it again when that is over, or with more --seconds."
        )
    return " ".join(said)


def _choice(plan: Plan, tiers: Mapping[str, Figure]) -> list[str]:
    """Which tier the records belong to, and from which step on nothing waits."""
    held = plan.tier
    figure = tiers.get("disk, cold" if held == "disk" else held)
    size = format_bytes(sum(row.bytes for row in plan.rows))
    if figure is None or figure.batch_s is None:
        return [f"The records ({size}) belong on the {held} tier; leave tier=auto."]
    batch, quiet = format_seconds(figure.batch_s), format_seconds(99 * figure.batch_s)
    fits = f"fit the {held} tier: leave tier=auto."
    large = "do not fit in memory and come from disk: a smaller latent_cache_dtype would help."
    said = [
        f"The records ({size}) {large if held == 'disk' else fits}",
        f"A batch takes {batch} there: steps of {batch} or longer do not wait where a core is free to "
        f"prefetch, and steps of {quiet} or longer wait less than 1 % in any case.",
    ]
    if figure.fraction is not None and held == "disk" and figure.fraction < 0.5:
        said.append(
            f"That is {format_percent(figure.fraction)} of what the drive gives: larger records, whole ones, "
            "or order=block make its reads longer."
        )
    return said
