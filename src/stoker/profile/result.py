"""Results of a profile, and forecasts for each tier: arithmetic on measured seconds."""

from __future__ import annotations

import html
import inspect
import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from stoker.errors import ConfigError, ResourceError
from stoker.plan import Demand, Rates, Resources, plan_tiers
from stoker.plan.tiers import MEMORY_GIB, known_gpu, peak_flops, say_gpus
from stoker.plan.trials import Interval, say_range
from stoker.runtime.files import make_folder, replace_atomically
from stoker.runtime.threads import frame_of, start_thread
from stoker.schema import Json, JsonResult
from stoker.units import GIB, format_bytes, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# What a loop would do on GPUs that are not here: arithmetic on one step counted here, and on data sheets.
#
# A step there takes as long as its matrix products do at the part of the data sheet's rate that is reached
# here, or at `USED` of it where this is no GPU of the table; but no less than calling its kernels takes. So
# it is the best case: memory traffic is not counted. Its use is to say whether data would come fast enough.


USED = 0.3
"""Part of a data sheet's rate that a step is taken to reach where none was measured."""
CALL_S = 5e-6
"""Seconds of a call of a kernel in Python. Source: ordinary figures for eager steps; graphs take less."""
TO_MODEL = 0.5
"""Part of a GPU's memory left to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpu(JsonResult):
    """Forecast of the loop on a GPU that this machine does not have."""

    gpu: str
    share: float
    """Part of the data that its memory holds, 0..1."""
    step_s: float | None
    """A step without a wait, at best; None: the products of a step are not known."""
    stall: float | None
    """The wait at such steps, with the rest of the data in host memory or on disk."""
    epoch_s: float | None
    cost: float | None
    """Of an epoch; None without a price."""


def part_used(loop: LoopTimes, resources: Resources) -> tuple[float, bool]:
    """Return the part of the data sheet's rate that a step reaches, and whether that was measured here."""
    here = known_gpu(resources.device_name, resources.device_total_bytes)
    if here is None or not loop.flops or not loop.compute_s:
        return USED, False
    return min(1.0, loop.flops / loop.compute_s / peak_flops(here)), True


def check_prices(prices: Mapping[str, float]) -> None:
    """Check that each name of `prices` begins the name of a GPU of the table.

    Raises:
        ConfigError: One does not.
    """
    unknown = [name for name in prices if not any(gpu.startswith(name) for gpu in MEMORY_GIB)]
    if unknown:
        raise ConfigError(
            f"no GPU of the table is called {unknown[0]!r}", hint=f"Known are {', '.join(MEMORY_GIB)}"
        )


def forecast_other_gpus(
    loop: LoopTimes, demand: Demand, resources: Resources, rates: Rates, prices: Mapping[str, float]
) -> tuple[OtherGpu, ...]:
    """Return what each GPU of the table would do with the loop.

    Args:
        loop, demand: What was measured, and what is to be served.
        resources, rates: Of this machine, whose host memory and disk the GPU is taken to have.
        prices: What an hour costs, by the beginning of a GPU's name.
    """
    used, _ = part_used(loop, resources)
    there = replace(demand, device="cuda", step_cpus=1.0)
    speeds = Rates(copy_bytes_s=rates.copy_bytes_s, disk_bytes_s=rates.disk_bytes_s, measured=True)
    found: list[OtherGpu] = []
    for gpu, gib in MEMORY_GIB.items():
        memory = int(gib * GIB)
        step_s = (
            None
            if loop.flops is None
            else max(loop.flops / (used * peak_flops(gpu)), CALL_S * loop.calls) or None
        )
        machine = replace(
            resources, device="cuda", device_bytes=memory, device_total_bytes=memory, device_name=gpu,
            device_again_bytes=None,
        )  # fmt: skip
        reserve = int(TO_MODEL * memory)
        plan = plan_tiers(there, machine, reserve_bytes=reserve, step_s=step_s, rates=speeds)
        stall = None if step_s is None else plan.stall_at(step_s)
        epoch_s = None if step_s is None or stall is None else step_s / (1 - stall) * loop.batches
        price = next((prices[name] for name in prices if gpu.startswith(name)), None)
        found.append(
            OtherGpu(
                gpu=gpu,
                share=plan.records_by_tier()["device"] / demand.records if demand.records else 1.0,
                step_s=step_s,
                stall=stall,
                epoch_s=epoch_s,
                cost=None if price is None or epoch_s is None else price * epoch_s / 3600,
            )
        )
    return tuple(found)


def say_used(loop: LoopTimes, resources: Resources) -> str:
    """Return how far the times are to be trusted."""
    if loop.flops is None:
        return "one step could not be counted, so its time on other GPUs is not known"
    used, known = part_used(loop, resources)
    of = f"{100 * used:.3g} % of its data sheet"
    as_if = f"was used as well as this one, {of}" if known else f"reached {of}"
    return (
        f"at best: {loop.flops:.3g} operations in matrix products as if each GPU {as_if}, and no less than "
        f"{format_seconds(CALL_S)} for each of {loop.calls:,} kernels"
    )


# ----------------------------------------------------------------------------------------------------------
# What the code does while samples are read: the stack of the thread that reads, looked at every
# millisecond.
#
# Sampling slows what is watched by less than counting calls does, and sees time spent in files and
# databases.


EVERY_S = 0.001
SWITCH_S = 0.0005
"""How soon a thread that computes lets the one that looks in; Python's own is longer than the interval."""
WAITER_S = 50e-6
"""Of that for each thread: all that wait for the interpreter wake once in it. With 0.5 ms, 800 threads that
polled took all time of two cores, and a loop got a seventeenth of it (docs/LOG.md, 2026-11-29)."""
Line: TypeAlias = tuple[str, int, str]
"""File, number of the line, function."""
Stack: TypeAlias = tuple[Line, ...]
"""From the outermost call inwards."""
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclass(slots=True)
class StackSamples:
    """Count of each stack that was seen."""

    seen: Counter[Stack] = field(default_factory=Counter[Stack])

    @property
    def total(self) -> int:
        """Looks in all."""
        return self.seen.total()

    def hottest(self) -> tuple[Line, float] | None:
        """Return the innermost line of the user's code that takes most time, and its part; None: none."""
        lines: Counter[Line] = Counter()
        for stack, count in self.seen.items():
            own = [line for line in stack if not _of_library(line[0])]
            if own or stack:
                lines[(own or stack)[-1]] += count
        if not lines:
            return None
        line, count = lines.most_common(1)[0]
        return line, count / self.total


def watch(work: Callable[[], None]) -> StackSamples:
    """Do `work`, and say where its time went."""
    stacks, over = StackSamples(), threading.Event()
    thread, base = threading.get_ident(), len(_stack(inspect.currentframe()))

    def look() -> None:
        while not over.wait(EVERY_S):
            found = _stack(frame_of(thread))[base + 1 :]  # below us, and below the call of `work`
            if found:
                stacks.seen[found] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, max(SWITCH_S, WAITER_S * threading.active_count())))
    looker = start_thread(look, "stoker-profile")
    try:
        work()
    finally:
        over.set()
        looker.join()
        sys.setswitchinterval(before)
    return stacks


def time_samples(read: Callable[[int], object], numbers: Sequence[int]) -> dict[int, float]:
    """Return seconds that each sample takes."""
    took: dict[int, float] = {}
    for number in numbers:
        begin = time.perf_counter()
        read(number)
        took[number] = time.perf_counter() - begin
    return took


def source_of(line: Line) -> str:
    """Return a line as it is written, and where."""
    text = linecache.getline(line[0], line[1]).strip()
    return (
        f"`{text}` ({Path(line[0]).name}:{line[1]})"
        if text
        else f"{line[2]} ({Path(line[0]).name}:{line[1]})"
    )


def _stack(frame: FrameType | None) -> Stack:
    found: list[Line] = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def _of_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or file.startswith("<")


STRAGGLER, STRAGGLER_S = 5.0, 0.001
"""A sample that takes so many times the median is one, and at least so many seconds."""
SHOWN = 5
NOTHING = 0.02
"""A stall that no cure is offered for: the rest of the gap is how steps vary."""
ENCODE = "encode"
"""The row of a loop that reads and encodes every sample each time it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes(JsonResult):
    """Measured times of a loop; seconds are per batch."""

    json_keys = ("stall", "wait_s", "step_s", "cached_s", "compute_s", "copy_s", "sample_s", "flops")

    wait_s: float
    """Waited for the loader, while the loop ran as it is."""
    step_s: float
    """A step of it, with a batch that the loader has just made."""
    cached_s: float
    """A step with a batch at hand: no loading at the same time."""
    compute_s: float
    """A step with a batch that lies on the device."""
    flops: float | None = None
    """Operations in matrix products of a step; None: not known."""
    calls: int = 0
    """Kernels that a step calls."""
    samples_s: dict[int, float]
    """Seconds to read single samples in this process, by number."""
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    """The file that a sample is read from, by index, as far as that is known."""
    batch_bytes: int
    batch_examples: int
    examples: int
    """Of the whole data set."""
    workers: int
    device: str

    @property
    def wall_s(self) -> float:
        """A step and its wait."""
        return self.wait_s + self.step_s

    @property
    def stall(self) -> float:
        """Waiting as a part of that, 0..1."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0

    @property
    def copy_s(self) -> float:
        """Seconds that bringing a batch to the device adds to a step; 0 on a CPU, which has it already."""
        return 0.0 if self.device == "cpu" else max(0.0, self.cached_s - self.compute_s)

    @property
    def batches(self) -> int:
        """Steps of an epoch."""
        return -(-self.examples // max(1, self.batch_examples))

    @property
    def sample_s(self) -> float:
        """Median of reading one sample."""
        ordered = sorted(self.samples_s.values())
        return ordered[len(ordered) // 2] if ordered else 0.0

    def stragglers(self) -> list[tuple[int, float]]:
        """Return samples that take far longer than the others, the slowest first."""
        slow = [(n, s) for n, s in self.samples_s.items() if s > max(STRAGGLER_S, STRAGGLER * self.sample_s)]
        return sorted(slow, key=lambda pair: -pair[1])[:SHOWN]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStage:
    """One thing that is done to every sample before it can be in a batch."""

    name: str
    seconds: float
    """For one sample."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast(JsonResult):
    """One tier in place of the loader."""

    tier: str
    wall_s: float
    """A step and its wait, predicted."""
    stall: float
    stall_range: Interval | None = None
    """The stall that nine runs in ten have; None: batches were not tried with such steps."""
    fits: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(JsonResult):
    """Times of a training loop, and what would make it faster."""

    json_within = "loop"
    json_keys = (
        "verdict", "stages", "bottleneck", "stragglers", "served_from", "gpus", "elsewhere", "remarks",
    )  # fmt: skip

    loop: LoopTimes
    """Measured times, in seconds for each batch: `wait_s`, `step_s`, `stall` (0 to 1) and others."""
    tiers: tuple[TierForecast, ...]
    """For each tier in place of the loader: `wall_s` and `stall` predicted, `stall_range`, `fits`, `why`."""
    stages: tuple[SampleStage, ...] = ()
    """Stages of making a sample, in order, each timed alone."""
    bottleneck: str
    """The place where loading passes most of its time, and its part; empty: samples cannot be read alone."""
    stacks: StackSamples
    """The lines of code in which loading passes its time."""
    gpus: str
    """GPUs whose memory would hold the data."""
    elsewhere: tuple[OtherGpu, ...] = ()
    """The loop forecast on GPUs that this machine does not have."""
    elsewhere_note: str = ""
    """How far the times on other GPUs can be trusted."""
    price_per_hour: float | None = None
    """As given to `profile`."""
    served_from: str = ""
    """The tier that the loop is fed from as it is; empty: the loader is not Stoker's."""
    remarks: tuple[str, ...] = ()
    """Further findings, as samples that cannot be read."""

    @property
    def best(self) -> TierForecast | None:
        """The fastest tier that fits; None: no tier fits."""
        return min((t for t in self.tiers if t.fits), key=lambda t: t.wall_s, default=None)

    @property
    def unkept(self) -> TierForecast | None:
        """Without a cache; None: not known."""
        return next((tier for tier in self.tiers if tier.tier == ENCODE), None)

    @property
    def batches(self) -> int:
        """Steps of an epoch."""
        return self.loop.batches

    def cost(self, wall_s: float) -> float | None:
        """Return the cost of one epoch; None without a price.

        Args:
            wall_s: Seconds of one step with its wait.
        """
        return None if self.price_per_hour is None else self.price_per_hour * wall_s * self.batches / 3600

    @property
    def verdict(self) -> str:
        """What was found, in one sentence."""
        loop, best = self.loop, self.best
        begin = f"{format_percent(loop.stall)} of each step is waiting for data"
        if self.served_from:
            return f"{begin} from the {self.served_from} tier{self._without_cache()}"
        why = f", most of it in {self.bottleneck}" if self.bottleneck and loop.stall > NOTHING else ""
        if best is None:
            return f"{begin}{why}; no tier holds {format_bytes(loop.batch_bytes * self.batches)} here"
        gain = loop.wall_s / best.wall_s if best.wall_s else 1.0
        if gain < 1.05 or loop.stall <= NOTHING:
            return (
                f"{begin}{why}: this loop is bound by its own steps, and serving from memory would not help"
            )
        return (
            f"{begin}{why}; served from the {best.tier} tier a step would take {format_seconds(best.wall_s)} "
            f"instead of {format_seconds(loop.wall_s)}, {gain:.1f}x"
        )

    def _without_cache(self) -> str:
        """Return what the cache is worth, and what another tier would be."""
        best, unkept = self.best, self.unkept
        if self.loop.stall <= NOTHING:
            said = ": this loop is bound by its own steps"
        elif best is not None and best.wall_s * 1.05 < self.loop.wall_s:
            said = f"; from the {best.tier} tier a step would take {format_seconds(best.wall_s)}"
        else:
            said = ", and no tier that fits is faster"
        if unkept is None:
            return said
        most = f", most of it in {self.bottleneck}" if self.bottleneck else ""
        return f"{said}; without a cache {format_percent(unkept.stall)} would be{most}"

    @property
    def stragglers(self) -> list[dict[str, Json]]:
        """Samples that take far longer than the others, as JSON holds them."""
        names = self.loop.names
        return [{"number": n, "seconds": s, "name": names.get(n, "")} for n, s in self.loop.stragglers()]

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on; the loop and each tier say what an epoch takes and costs."""

        def epoch(wall_s: float) -> dict[str, Json]:
            return {"epoch_s": wall_s * self.batches, "epoch_cost": self.cost(wall_s)}

        tiers: list[Json] = [{**tier.to_json(), **epoch(tier.wall_s)} for tier in self.tiers]
        return {**JsonResult.to_json(self), "tiers": tiers, **epoch(self.loop.wall_s)}


def demand_of(loop: LoopTimes, cpus: float) -> Demand:
    """Return what serving a loop's batches would ask for, with records stored as the batches are."""
    record = loop.batch_bytes / max(1, loop.batch_examples)
    return Demand(
        records=loop.examples,
        record_bytes=record,
        batch_examples=max(1, loop.batch_examples),
        example_bytes=record,
        device=loop.device,
        step_cpus=cpus if loop.device == "cpu" else 1.0,
    )


def predict(loop: LoopTimes, demand: Demand, resources: Resources, rates: Rates) -> tuple[TierForecast, ...]:
    """Return what a step would take with records served from each tier."""
    step_s = max(loop.compute_s, 1e-9)
    found: list[TierForecast] = []
    for tier in ("device", "host", "disk"):
        if tier == "device" and loop.device == "cpu":
            continue
        try:
            plan_tiers(demand, resources, tier=tier, step_s=step_s, rates=rates)
            fits, why = True, ""
        except ResourceError as error:
            fits, why = False, str(error)
        plan = plan_tiers(demand, resources, tier="disk", step_s=step_s, rates=rates)
        row = next(row for row in plan.rows if row.tier == tier)
        stall = row.stall or 0.0
        found.append(
            TierForecast(
                tier=tier,
                wall_s=step_s / (1 - stall),
                stall=stall,
                stall_range=row.stall_range,
                fits=fits,
                why=why,
            )
        )
    return tuple(found)


def largest(stages: tuple[SampleStage, ...]) -> str:
    """Return the stage that takes most of making a record, and its part; empty without any."""
    whole_s = sum(stage.seconds for stage in stages)
    if not whole_s:
        return ""
    most = max(stages, key=lambda stage: stage.seconds)
    return f"{most.name}, {100 * most.seconds / whole_s:.0f} % of making a record"


def gpus_for(demand: Demand) -> str:
    """Return which GPUs would hold the data, in a sentence."""
    return say_gpus(max(1.0, demand.record_bytes), demand.records)


# ----------------------------------------------------------------------------------------------------------
# The page of a profile: bars of a step, tables, and calls below calls, as wide as they take time. It is plain
# HTML, fits any width and theme, and needs no other file.


DEEPEST = 14
LEAST = 0.01
"""Calls that take less of the time are not drawn."""
ROW_REM = 1.5
SHADES = ("#f3c9a5", "#eeb07c", "#f7dcc4")


def flame(stacks: StackSamples) -> str:
    """Return the picture; words where nothing was seen."""
    if not stacks.total:
        return "<p>No single samples could be read.</p>"
    cells: list[str] = []
    deepest = _draw(stacks.seen, stacks.total, (0, 0.0), cells)
    return f'<div class="flame" style="height:{ROW_REM * deepest:g}rem">{"".join(cells)}</div>'


def _draw(seen: Counter[Stack], total: int, place: tuple[int, float], cells: list[str]) -> int:
    """Add the calls at one depth, each with those below it; returns how many rows there are by now."""
    depth, left = place
    groups: dict[str, Counter[Stack]] = {}
    for stack, count in seen.items():
        if len(stack) > depth:
            file, number, name = stack[depth]
            groups.setdefault(f"{name}  {Path(file).name}:{number}", Counter())[stack] += count
    rows = depth
    for order, (name, below) in enumerate(sorted(groups.items(), key=lambda pair: -pair[1].total())):
        width = below.total() / total
        if width < LEAST or depth >= DEEPEST:
            continue
        words = html.escape(name)
        cells.append(
            f'<b style="left:{100 * left:.2f}%;width:{100 * width:.2f}%;top:{ROW_REM * depth:g}rem;'
            f'background:{SHADES[(depth + order) % 3]}" title="{words}, {100 * width:.0f} %">{words}</b>'
        )
        rows = max(rows, depth + 1, _draw(below, total, (depth + 1, left), cells))
        left += width
    return rows


Rows: TypeAlias = Sequence[Sequence[str]]
STYLE = """
:root { color-scheme: light dark; --line: #9995; --dim: #6b6b6b;
--compute: #3b82c4; --copy: #9aa5b1; --wait: #e08a3c; }
@media (prefers-color-scheme: dark) { :root { --dim: #9a9a9a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; line-height: 1.35; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { color: var(--dim); margin: .4rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line);
text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; color: var(--dim); min-width: 16rem; }
.bars { display: grid; grid-template-columns: max-content 1fr; gap: .35rem .8rem; align-items: center; }
.bars > div { display: flex; align-items: center; min-width: 0; } .bars i { display: block; height: 1.2rem; }
.bars small { margin-left: .5rem; white-space: nowrap; }
.compute { background: var(--compute); } .copy { background: var(--copy); } .wait { background: var(--wait); }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .8rem; vertical-align: -.05rem; }
.key:first-child { margin-left: 0; }
.flame { position: relative; font-size: 11px; line-height: 1.5rem; color: #3a2410; }
.flame b { position: absolute; height: 1.45rem; box-sizing: border-box; overflow: hidden; white-space: nowrap;
text-overflow: ellipsis; font-weight: 400; padding: 0 .25rem; border-radius: .15rem; }
"""
FULL = 70
"""Per cent of the width that the longest bar takes; the rest is for its figure."""


def write_page(profile: Profile, path: Path, *, title: str = "") -> None:
    """Write the page; `title` is what was profiled."""
    name = html.escape(f"profile of {title}" if title else "profile")
    parts = [
        f"<h1>{html.escape(profile.verdict)}</h1>",
        f"<p>{html.escape(_about(profile))}</p>",
        f"<h2>A step and its wait</h2>{_bars(profile)}",
        _table(("", "a step", "stall", "an epoch", "cost", ""), tier_rows(profile)),
        _section("What is done to a sample", ("stage", "a sample", "part", ""), stage_rows(profile)),
        _section(
            "On other GPUs",
            ("GPU", "holds", "step at best", "stall", "an epoch", "cost"),
            gpu_rows(profile),
            (profile.elsewhere_note, profile.gpus),
        ),
        _lines("Samples that take far longer than others", straggler_lines(profile)),
        _lines("Remarks", profile.remarks),
        "<h2>Where making samples passes its time</h2>",
        "<p>Callers above, what they call below, as wide as they take time; looked at every millisecond.</p>",
        flame(profile.stacks),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )
    make_folder(path.parent)
    with replace_atomically(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def tier_rows(profile: Profile) -> Rows:
    """Return what the loop does now, and what it would do with each tier."""
    loop = profile.loop

    def line(name: str, wall_s: float, stall: float, note: str) -> tuple[str, ...]:
        cost = profile.cost(wall_s)
        return (
            name,
            format_seconds(wall_s),
            format_percent(stall),
            format_seconds(wall_s * profile.batches),
            "-" if cost is None else f"{cost:.3g}",
            note,
        )

    parts = (
        f"{format_seconds(loop.compute_s)} compute, {format_seconds(loop.copy_s)} copy, "
        f"{format_seconds(loop.wait_s)} waiting"
    )
    rows = [line("your loop", loop.wall_s, loop.stall, parts)]
    for tier in profile.tiers:
        note = tier.why if tier.fits else f"does not fit: {tier.why}"
        if tier.stall_range is not None:
            note = "; ".join(filter(None, (f"stall {say_range(tier.stall_range)}", note)))
        rows.append(line("no cache" if tier.tier == ENCODE else tier.tier, tier.wall_s, tier.stall, note))
    return rows


def stage_rows(profile: Profile) -> Rows:
    """Return the time of one sample in each stage."""
    whole_s = sum(stage.seconds for stage in profile.stages) or 1.0
    return [
        (stage.name, format_seconds(stage.seconds), format_percent(stage.seconds / whole_s), stage.note)
        for stage in profile.stages
    ]


def gpu_rows(profile: Profile) -> Rows:
    """Return what other GPUs would do."""
    return [
        (
            one.gpu,
            format_percent(one.share),
            "-" if one.step_s is None else format_seconds(one.step_s),
            "-" if one.stall is None else format_percent(one.stall),
            "-" if one.epoch_s is None else format_seconds(one.epoch_s),
            "-" if one.cost is None else f"{one.cost:.3g}",
        )
        for one in profile.elsewhere
    ]


def straggler_lines(profile: Profile) -> Sequence[str]:
    """Return samples that take far longer than the others, the slowest first."""
    names = profile.loop.names
    return [
        f"sample {number:,} takes {format_seconds(seconds)}"
        + (f" ({names[number]})" if number in names else "")
        for number, seconds in profile.loop.stragglers()
    ]


def _about(profile: Profile) -> str:
    loop = profile.loop
    workers = f", {loop.workers} workers" if not profile.served_from else ""
    return (
        f"batches of {loop.batch_examples:,} ({format_bytes(loop.batch_bytes)}), {loop.batches:,} an epoch, "
        f"on {loop.device}{workers}; reading a sample takes {format_seconds(loop.sample_s)}"
    )


def _bars(profile: Profile) -> str:
    """Return a bar each for the loop and every tier that fits."""
    loop = profile.loop
    rows = [("your loop", loop.compute_s, max(0.0, loop.step_s - loop.compute_s), loop.wait_s)]
    rows += [
        ("no cache" if t.tier == ENCODE else t.tier, loop.compute_s, 0.0, t.wall_s - loop.compute_s)
        for t in profile.tiers
        if t.fits
    ]
    longest = max(sum(parts) for _, *parts in rows) or 1.0
    drawn: list[str] = []
    for name, *parts in rows:
        pieces = "".join(
            f'<i class="{kind}" style="width:{FULL * part / longest:.2f}%"></i>'
            for kind, part in zip(("compute", "copy", "wait"), parts, strict=True)
        )
        drawn.append(f"<span>{name}</span><div>{pieces}<small>{format_seconds(sum(parts))}</small></div>")
    key = "".join(
        f'<span class="key {kind}"></span>{words}'
        for kind, words in (
            ("compute", "compute"),
            ("copy", "copy, and what loading costs the step that runs meanwhile"),
            ("wait", "waiting for data"),
        )
    )
    return f'<div class="bars">{"".join(drawn)}</div><p>{key}</p>'


def _table(heading: Sequence[str], rows: Rows) -> str:
    """Return a table; a cell beyond the figures is text that may wrap."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    figures = len(heading) - (heading[-1] == "")
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if place >= figures else ''}>{html.escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _section(title: str, heading: Sequence[str], rows: Rows, notes: Sequence[str] = ()) -> str:
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
    return f"<h2>{title}</h2>{_table(heading, rows)}{said}" if rows else ""


def _lines(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<h2>{title}</h2>{items}" if lines else ""
