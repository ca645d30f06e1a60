"""Measure the limits of this machine, and how much of them each tier reaches.

Two rounds over all contenders in turns, so that a machine that gets busy in between is seen by how far the
two figures differ. Nothing is written but the picture; reads are of the cache's own shards.
"""

from __future__ import annotations

import itertools
import tempfile
import textwrap
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import ConfigError
from stoker.loader import Loader, Windows
from stoker.monitor import StallMeter
from stoker.plan import Plan, probe, rates
from stoker.plan.rates import Limit
from stoker.plan.resources import require_writable
from stoker.precompute.measure import EncodeBatch
from stoker.run.build import EncodeBatchChoice, build_jobs, measure_jobs, settled_batch
from stoker.run.caches import locate
from stoker.run.context import Run, batch_examples
from stoker.runtime.files import make_folder, replace_atomically
from stoker.runtime.threads import Pool
from stoker.schema import JsonResult
from stoker.store import Cache, open_cache
from stoker.store.format import record_bytes
from stoker.store.remote import TIMEOUT_S as STORE_TIMEOUT_S
from stoker.store.storage import MIRROR_DIR, attach_mirror, display_path, open_storage
from stoker.units import KIB, MIB, format_bytes, format_count, format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from stoker.store.format import Buffer
    from stoker.store.mirror import MirrorFolder

ROUNDS = 2
STORE = "store"
"""With this begin the names of all figures that a store has a part in."""
SCATTER = 0.2
"""Figures of two rounds that differ by more than this part are called scattered."""
SERVED_BYTES = 256 * MIB
"""Bytes of records that are served to measure; more than a processor's own caches hold."""
LEAST_FILL_S = 1.0
"""Seconds that filling a tier with them may take at least; all fillings have as long as measuring."""
LEAST_S = 0.1
"""Seconds of a contender's turn at least."""
PLAIN_BYTES, PLAIN_BATCH = 4 * KIB, 256
"""Rows and batch of the limits where there is no cache to take them from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigure:
    """One limit or one tier, measured."""

    what: str
    """The work that was timed, in words."""
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
    limits: Mapping[str, BenchFigure]
    tiers: Mapping[str, BenchFigure]
    advice: str
    picture: Path | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Cache to serve, and how."""

    cache: Cache
    windows: Windows | None
    batch_size: int
    device: str
    files: Sequence[Path]
    """The shards; none where they are at a URL."""
    remote: MirrorFolder | None = None
    """Where the shards come from; its local folder is empty, and temporary."""
    served: Sequence[int]
    """Numbers of the samples that are served to measure: no more than fill a tier in a moment."""

    def loader(self, tier: str, meter: StallMeter | None = None) -> Loader:
        """Return a loader of these batches from one tier."""
        return Loader(
            self.cache,
            self.batch_size,
            shuffle=True,
            windows=self.windows,
            tier=tier,
            device=self.device,
            indices=self.served,
            meter=meter,
        )


def job_of_config(run: Run) -> BenchJob:
    """Return the training cache of a configuration, in its batches.

    Raises:
        ConfigError: Nothing is encoded yet, or all samples are quarantined.
    """
    run = run.parts()[0]
    located = locate(run, run.split)
    if located.cache is None or located.missing:
        raise ConfigError(
            f"{located.folder} lacks {located.missing} records",
            hint="`stoker bench` serves what is there: run `stoker precompute` with the same settings first",
        )
    schema = located.cache.schema
    batch = batch_examples(run, schema)
    return _job(located.cache, run.windows_for(schema), batch, device=run.device, or_all=True)


def job_of_cache(path: Path, batch_size: int, *, or_all: bool = False) -> BenchJob:
    """Return a cache by its folder: windows of its trajectories, or entire records if it has none.

    Args:
        path: Of the cache.
        batch_size: Examples in a batch.
        or_all: Take a batch of all examples where there are fewer.

    Raises:
        ConfigError: It has no records, or fewer than a batch.
        StokerError: As `open_cache`.
    """
    cache = open_cache(path)
    timed = any(f.time for f in cache.schema.values())
    return _job(cache, Windows() if timed else None, batch_size, device="cpu", or_all=or_all)


@contextmanager
def job_of_url(url: str, batch_size: int, *, or_all: bool = False) -> Generator[BenchJob]:
    """Yield a cache at a URL, as `job_of_cache`; nothing of its shards is kept afterwards.

    Raises:
        ConfigError: It has no records, or fewer than a batch.
        StokerError: As `attach_mirror`.
    """
    with (
        _temporary_parent(MIRROR_DIR) as parent,
        tempfile.TemporaryDirectory(prefix=".bench-", dir=parent, ignore_cleanup_errors=True) as folder,
    ):
        job = job_of_cache(attach_mirror(url, folder, must_exist=True), batch_size, or_all=or_all)
        with job.cache:
            yield replace(job, files=(), remote=open_storage(job.cache.path).mirror)


@contextmanager
def _temporary_parent(folder: Path) -> Generator[Path]:
    """Make a folder where it is missing, with those above it; afterwards remove those made, if empty."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield make_folder(folder)
    finally:
        with suppress(OSError):  # another process has put something there, or removed it
            for one in missing:
                one.rmdir()


def _job(cache: Cache, windows: Windows | None, batch_size: int, *, device: str, or_all: bool) -> BenchJob:
    """Return what is served of a cache.

    Raises:
        ConfigError: It has no records, or fewer than a batch.
    """
    numbers = list(cache.indices)
    if not numbers:
        place = display_path(cache.path)
        raise ConfigError(
            f"{place} has no records, so there is nothing to read",
            hint="Encode some with `stoker precompute` first. "
            f"`stoker cache show {place}` says which samples are quarantined",
        )
    count, kind = len(numbers), "record"
    if windows is not None:
        kind = "window"
        with Loader(cache, 1, windows=windows, tier="disk") as loader:
            count = len(loader)
    if batch_size > count and not or_all:
        raise ConfigError(
            f"a batch of {batch_size} is more than the {format_count(count, kind)} of "
            f"{display_path(cache.path)}",
            hint=f"Give --batch-size {count} or less",
        )
    part = max(1, int(len(numbers) * min(1.0, SERVED_BYTES / max(1, _set_bytes(cache)))))
    return BenchJob(
        cache=cache,
        windows=windows,
        batch_size=min(batch_size, count),
        device=device,
        files=[cache.path / shard.file for shard in cache.index.shards],
        served=numbers[:part],
    )


def _set_bytes(cache: Cache) -> int:
    return sum(shard.bytes for shard in cache.index.shards)


def run_bench(job: BenchJob | None, *, seconds: float, picture: Path | None) -> BenchResult:
    """Measure for about `seconds`, and draw. Filling slow tiers may take as long again.

    Idle threads of the loaders end within `runtime.threads.IDLE_S`; all others have ended.

    Raises:
        ConfigError: `seconds` is not above 0, or the folder of `picture` cannot be written.
        StokerError: As `Loader`.
    """
    if not seconds > 0:
        raise ConfigError(f"--seconds is {seconds:g}", hint="Expected more than 0")
    if picture is not None:
        require_writable(picture.parent, "the folder of --picture")
    begun = time.monotonic()
    limited, served = _limits(job), _served(job, seconds)
    turn_s = max(LEAST_S, seconds / ROUNDS / max(1, len(limited) + len(served)))
    found: dict[str, list[float]] = {name: [] for name in [*limited, *served]}
    for _ in range(ROUNDS):
        for name, (_, measure) in {**limited, **{n: s[:2] for n, s in served.items()}}.items():
            if found[name] != [0.0]:  # what could not be filled once is not tried again
                found[name].append(measure(turn_s))
    figures = {name: _figure(what, found[name]) for name, (what, _) in limited.items() if any(found[name])}
    tiers = {
        name: _compare_with_limit(_figure(what, found[name]), limit, figures, _batch_bytes(job))
        for name, (what, _, limit) in served.items()
        if any(found[name])
    }
    result = BenchResult(
        machine=_machine(),
        cache="" if job is None else _about(job),
        limits=figures,
        tiers=tiers,
        advice=_advice(job, figures, tiers, [name for name in served if name not in tiers]),
        picture=picture,
        seconds=time.monotonic() - begun,
    )
    if picture is not None:
        make_folder(picture.parent)
        draw_bench(result, picture)
    return result


def _limits(job: BenchJob | None) -> dict[str, tuple[str, Limit]]:
    row, batch = (PLAIN_BYTES, PLAIN_BATCH) if job is None else (_row_bytes(job), job.batch_size)
    held = SERVED_BYTES if job is None else min(SERVED_BYTES, _set_bytes(job.cache))
    found: dict[str, tuple[str, Limit]] = {
        "copy": ("copying 64 MiB within memory, one thread", rates.copy_limit()),
        "gather": (
            f"gathering {batch} rows of {format_bytes(row)} at random, one thread",
            rates.gather_limit(row, batch, source_bytes=held),
        ),
    }
    if job is None:
        return found
    if job.remote is not None:
        what = f"{GETS} requests of {format_bytes(GET_BYTES)} at a time"
        found[STORE] = (f"{what}, nothing kept", _store_limit(job, kept=False))
        found[f"{STORE}, kept"] = (f"{what}, written to files", _store_limit(job, kept=True))
        return found
    size = _example_bytes(job)
    block = format_bytes(-(-size // rates.PAGE_BYTES) * rates.PAGE_BYTES)
    found["disk, sequential"] = ("direct reads of 8 MiB in order", rates.sequential_limit(job.files))
    found["disk, random"] = (f"direct reads of {block} at random", rates.random_limit(job.files, size))
    found["page cache"] = (
        f"reads of {block} at random that need no disk",
        rates.random_limit(job.files, size, cached=True),
    )
    if job.device != "cpu":
        found["to the GPU"] = ("page-locked memory to the GPU", rates.to_device_limit(job.device))
        found["gather, GPU"] = (
            f"gathering {batch} rows of {format_bytes(row)} on the GPU",
            rates.gather_limit(row, batch, job.device, source_bytes=held),
        )
    return found


def _served(job: BenchJob | None, seconds: float) -> dict[str, tuple[str, Limit, str]]:
    """Per tier: what is done, how it is measured, and the limit that it is held against."""
    if job is None:
        return {}
    if job.remote is not None:
        first = "batches of a first epoch in block order, nothing here before"
        return {f"{STORE}, first epoch": (first, _FirstEpoch(job), f"{STORE}, kept")}
    filled = 2 if job.device == "cpu" else 3
    fill_s = max(LEAST_FILL_S, seconds / ROUNDS / filled)
    host = "gather" if job.device == "cpu" else "to the GPU"
    found: dict[str, tuple[str, Limit, str]] = {}
    if job.device != "cpu":
        device = _TierMeasurement(job, "device", fill_s)
        found["device"] = ("batches from the GPU's memory", device, "gather, GPU")
    found["host"] = ("batches from host memory", _TierMeasurement(job, "host", fill_s), host)
    warm = _TierMeasurement(job, "disk", fill_s)
    found["disk, warm"] = ("batches read and verified, no disk needed", warm, "page cache")
    cold = _TierMeasurement(job, "disk", None)
    found["disk, cold"] = ("batches read from the disk and verified", cold, "disk, random")
    return found


class _TierMeasurement:
    """Measures a tier by having batches served; the figure excludes the filling, the time of a turn does not.

    Each turn has a loader of its own: records that one holds in memory, another could not read from the disk.
    """

    def __init__(self, job: BenchJob, tier: str, fill_s: float | None) -> None:
        """`fill_s` is how long filling may take; None: each pass reads from the disk."""
        self._job = job
        self._tier = tier
        self._fill_s = fill_s

    def __call__(self, seconds: float) -> float:
        """Return bytes a second; 0 where the tier could not be filled in time."""
        begun = time.perf_counter()
        if self._tier == "disk" and self._fill_s is not None and not self._warm(self._fill_s):
            return 0.0
        meter = StallMeter()
        with self._job.loader(self._tier, meter) as loader:
            if self._tier != "disk" and not self._fill(loader, meter, self._fill_s or 0.0):
                return 0.0
            return self._rate(loader, meter, max(LEAST_S, seconds - (time.perf_counter() - begun)))

    def _rate(self, loader: Loader, meter: StallMeter, seconds: float) -> float:
        count, took = 0, 0.0
        meter.reset()
        while took < seconds:
            if self._fill_s is None:
                rates.drop_from_page_cache(self._job.files)
            begin = time.perf_counter()
            for _ in loader:
                count += 1
                if took + time.perf_counter() - begin >= seconds:
                    break
            took += time.perf_counter() - begin
        whole = set(meter.epoch().tiers) == {self._tier}
        return count * _batch_bytes(self._job) / took if whole else 0.0

    def _warm(self, seconds: float) -> bool:
        """Have each record in the page cache; returns False where time is over."""
        end = time.perf_counter() + seconds
        with Loader(self._job.cache, 1, tier="disk", indices=self._job.served) as loader:
            return all(time.perf_counter() < end for _ in loader)

    def _fill(self, loader: Loader, meter: StallMeter, seconds: float) -> bool:
        """Serve whole epochs until one comes from the tier alone; returns False where time is over."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            meter.reset()
            for _ in loader:
                if time.perf_counter() >= end:
                    break
            if set(meter.epoch().tiers) == {self._tier}:
                return True
        return False


GET_BYTES, GETS = 8 * MIB, 16
"""Of the plain requests that a store is measured with."""


def _store_limit(job: BenchJob, *, kept: bool) -> Limit:
    """Return the rate of plain requests for parts of shards; `kept`: written to a file here as well."""
    folder = job.remote
    assert folder is not None
    shards = job.cache.index.shards
    pieces = [
        (s.file, at, min(at + GET_BYTES, s.bytes)) for s in shards for at in range(0, s.bytes, GET_BYTES)
    ]
    following, lock = itertools.cycle(pieces), threading.Lock()

    def get(until: float) -> int:
        came = 0
        with tempfile.TemporaryFile(dir=folder.root.path) as file:

            def sink(data: Buffer) -> None:
                nonlocal came
                came += len(data)
                if kept:
                    file.write(data)

            while time.perf_counter() < until:
                with lock:
                    name, begin, end = next(following)
                file.seek(0)
                file.truncate()  # so that each byte takes new room, as in a first epoch
                folder.read_plain(name, begin, end, sink)
        return came

    def measure(seconds: float) -> float:
        begun = time.perf_counter()
        pool = Pool(GETS, "stoker-get")
        try:
            tickets = [pool.submit(partial(get, begun + seconds)) for _ in range(GETS)]
            what, most_s = f"reading {folder.url}", seconds + STORE_TIMEOUT_S
            came = sum(ticket.result(most_s, what) for ticket in tickets)
        finally:
            pool.close()
        return came / (time.perf_counter() - begun)

    return measure


class _FirstEpoch:
    """Measures batches of a cache at a URL of which nothing is here: each turn has a folder of its own."""

    def __init__(self, job: BenchJob) -> None:
        self._job = job

    def __call__(self, seconds: float) -> float:
        """Return bytes a second."""
        job, remote = self._job, self._job.remote
        assert remote is not None
        with tempfile.TemporaryDirectory(dir=remote.root.path, ignore_cleanup_errors=True) as folder:
            cache = open_cache(attach_mirror(remote.url, folder, must_exist=True))
            # Closed before the folder is removed: what is read ahead is read from there.
            with Loader(cache, job.batch_size, shuffle="block", windows=job.windows, tier="disk") as loader:
                count, begun = 0, time.perf_counter()
                for _ in loader:
                    count += 1
                    if time.perf_counter() - begun >= seconds:
                        break
                return count * _batch_bytes(job) / (time.perf_counter() - begun)


def _figure(what: str, values: Sequence[float]) -> BenchFigure:
    best = max(values)
    return BenchFigure(what=what, bytes_s=best, scatter=1 - min(values) / best)


def _compare_with_limit(
    figure: BenchFigure, limit: str, figures: Mapping[str, BenchFigure], batch_bytes: float
) -> BenchFigure:
    """Return a tier's figure with the part of its limit that it reaches."""
    against = figures.get(limit)
    return replace(
        figure,
        limit=limit,
        fraction=None if against is None else figure.bytes_s / against.bytes_s,
        batch_s=batch_bytes / figure.bytes_s,
    )


def _example_bytes(job: BenchJob) -> int:
    """Return bytes of one example as it is stored."""
    schema = job.cache.schema
    if any(f.ragged for f in schema.values()):
        return _set_bytes(job.cache) // max(1, len(job.cache))
    if job.windows is None:
        return record_bytes(schema)
    steps = job.windows.horizons[1] + 1
    return sum(f.row_bytes * steps if f.time else f.size_bytes() for f in schema.values())


def _row_bytes(job: BenchJob) -> int:
    """Return bytes that one row of a gather takes: a step of a window, or the largest field of a record."""
    schema = job.cache.schema
    if job.windows is None:
        return max(f.row_bytes if f.ragged else f.size_bytes() for f in schema.values())
    return max(f.row_bytes for f in schema.values() if f.time)


def _batch_bytes(job: BenchJob | None) -> float:
    return 0.0 if job is None else float(_example_bytes(job) * job.batch_size)


def _about(job: BenchJob) -> str:
    cache, batch = job.cache, format_bytes(_batch_bytes(job))
    kind = "records" if job.windows is None else "windows"
    size = format_bytes(_set_bytes(job.cache))
    held = f"{cache.name}, {format_count(len(cache), 'record')}, {size}"
    return f"{held}; a batch is {job.batch_size} {kind}, {batch}"


def _machine() -> str:
    found = probe()
    return f"{found.cpus:g} cores, {format_bytes(found.host_bytes)} of memory usable ({found.host_limit})"


def _advice(
    job: BenchJob | None,
    figures: Mapping[str, BenchFigure],
    tiers: Mapping[str, BenchFigure],
    unfilled: Sequence[str],
) -> str:
    """Return advice, in a sentence or three."""
    said: list[str] = []
    if job is None:
        said.append("Name a CONFIG or the folder of a cache to see what its tiers reach of these limits.")
    else:
        first = tiers.get(f"{STORE}, first epoch")
        if first is not None:
            took = format_seconds(_set_bytes(job.cache) / first.bytes_s)
            said.append(f"The first epoch takes about {took}; what fits stays here for the next.")
        with Loader(
            job.cache, job.batch_size, shuffle=True, windows=job.windows, device=job.device
        ) as loader:
            said += _choice(loader.plan, tiers)
    if unfilled:
        said.append(f"No figure of {', '.join(unfilled)}: filling took too long. Give more --seconds.")
    said += _say_scatter({**figures, **tiers})
    return " ".join(said)


def _say_scatter(figures: Mapping[str, BenchFigure]) -> list[str]:
    """Say which figure differs most between the rounds, and what that tells."""
    scattered = {name: one.scatter for name, one in figures.items() if one.scatter > SCATTER}
    if not scattered:
        return []
    worst = max(scattered, key=lambda name: scattered[name])
    said = f"Two rounds differ by up to {format_percent(scattered[worst])} ({worst}): "
    if not worst.startswith(STORE):
        busy = "something else is using this machine. Run it again when that is over, or with more --seconds."
        return [said + busy]
    here = [name for name in scattered if not name.startswith(STORE)]
    memory = f"So was {here[0]}: this machine was busy too" if here else "Copying in memory was not"
    return [
        f"{said}the store, the network to it or the disk here was slower in one of them. {memory}. "
        "Run it again, or with more --seconds."
    ]


def _choice(plan: Plan, tiers: Mapping[str, BenchFigure]) -> list[str]:
    """Say which tier the records go in, and from which step on nothing waits."""
    held = plan.tier
    figure = tiers.get("disk, cold" if held == "disk" else held)
    size = format_bytes(plan.bytes)
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
            "or shuffle=block make its reads longer."
        )
    return said


# ----------------------------------------------------------------------------------------------------------
# Draw what `stoker bench` found: a bar for each limit and tier, and how much of its limit a tier reaches.


BLUE, ORANGE, GREY, TEXT = "#1f6fb4", "#d9731a", "#9aa5b1", "#24313f"
PALE = "#d5dce3"


def draw_bench(result: BenchResult, path: Path) -> None:
    """Write a PNG; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    rows = len(result.limits) + len(result.tiers)
    picture: Any = Picture(figsize=(10, 1.7 + 0.42 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    picture.get_layout_engine().set(w_pad=0.15, h_pad=0.12, hspace=0.06)
    if result.tiers:
        heights = [len(result.tiers) + 0.6, len(result.limits) + 0.6]
        tiers, limits = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
        _draw_tiers(tiers, result)
    else:
        limits = picture.subplots(1, 1)
    _draw_limits(limits, result)
    written: dict[str, Any] = {"color": TEXT, "x": 0.01, "ha": "left"}
    picture.suptitle(f"{result.machine}\n{result.cache}".strip(), fontsize=9, **written)
    picture.supxlabel("\n".join(textwrap.wrap(result.advice, 130)), fontsize=8.5, **written)
    with replace_atomically(path) as temporary:
        picture.savefig(temporary, format="png")


def _draw_tiers(axes: Any, result: BenchResult) -> None:
    """Draw each tier's bar on the pale bar of its limit."""
    names = list(result.tiers)[::-1]
    for place, name in enumerate(names):
        figure = result.tiers[name]
        limit = result.limits.get(figure.limit or "")
        top = max(figure.bytes_s, 0.0 if limit is None else limit.bytes_s)
        if limit is not None:
            axes.barh(place, limit.bytes_s, color=PALE, height=0.62)
        axes.barh(place, figure.bytes_s, color=BLUE, height=0.62)
        said = "" if figure.fraction is None else f"{format_percent(figure.fraction)} of {figure.limit}, "
        batch = "" if figure.batch_s is None else f"{format_seconds(figure.batch_s)} a batch"
        _label(axes, top, place, f"{format_rate(figure.bytes_s)}   {said}{batch}", figure)
    _finish(axes, names, "what each tier serves, next to its limit")


def _draw_limits(axes: Any, result: BenchResult) -> None:
    names = list(result.limits)[::-1]
    for place, name in enumerate(names):
        figure = result.limits[name]
        axes.barh(place, figure.bytes_s, color=GREY, height=0.62)
        _label(axes, figure.bytes_s, place, f"{format_rate(figure.bytes_s)}   {figure.what}", figure)
    _finish(axes, names, "what this machine can do at most")
    axes.set_xlabel("bytes a second, logarithmic", fontsize=9, color=TEXT)


def _label(axes: Any, x: float, place: int, text: str, figure: BenchFigure) -> None:
    scattered = figure.scatter > 0.2
    shown = text + (f"   rounds differ by {format_percent(figure.scatter)}" if scattered else "")
    style = {"va": "center", "fontsize": 8.5, "color": ORANGE if scattered else TEXT}
    axes.text(x, place, f"  {shown}", **style)


def _finish(axes: Any, names: list[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    axes.set_xscale("log")
    values = [float(patch.get_width()) for patch in axes.patches] or [1.0]
    axes.set_xlim(min(values) / 4, max(values) * 60)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.tick_params(which="both", labelsize=8.5, color=GREY, labelcolor=TEXT, left=False)
    axes.xaxis.set_major_formatter(_tick)
    axes.xaxis.set_minor_formatter("")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def _tick(bytes_s: float, _place: int) -> str:
    return format_rate(bytes_s)


# ----------------------------------------------------------------------------------------------------------
# Measure the encode batch of a configuration, to show it.


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBench(JsonResult):
    """The encode batch of a task: what is in force, and what was measured now."""

    json_within = "found"
    json_keys = ("task", "setting", "fixed_rule", "in_force")

    task: str
    settled: EncodeBatchChoice | None
    """The setting in force; None: `auto`, and nothing was encoded or measured before."""
    fixed_rule: int
    """Samples in one call by the fixed rule."""
    found: EncodeBatch

    @property
    def setting(self) -> str:
        """The setting with what was measured, as `key=value`."""
        samples = self.found.samples
        return f"precompute.encode_batch={'null' if samples is None else samples}"

    @property
    def in_force(self) -> int | None:
        """Samples in one call as it is now; None: not known yet."""
        return None if self.settled is None else self.settled.samples or self.fixed_rule


def bench_encode(run: Run) -> EncodeBench:
    """Measure the encoder of the first task on its device; nothing is encoded or noted.

    Raises:
        ConfigError: There is no encoder.
        StokerError: As `build_jobs` and `measure_encode_batch`.
    """
    run = run.parts()[0]
    (job,) = build_jobs(run, [run.split])
    if job.encoder is None:
        raise ConfigError("encoder.kind is identity: samples are stored as they are, and none is encoded")
    schema = job.source.schema()
    return EncodeBench(
        task=run.task,
        settled=settled_batch(run, job.encoder, job.source),
        fixed_rule=job.encoder.encode_batch_size(schema).samples,
        found=measure_jobs(run, [job]),
    )
