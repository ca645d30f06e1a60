"""Results of a profile, and forecasts for each tier: arithmetic on measured seconds."""

from __future__ import annotations

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
from stoker.plan.gpus import MEMORY_GIB, known_gpu, peak_flops, say_gpus
from stoker.runtime.threads import start_thread
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
"""What a call of a kernel takes in Python. Source: ordinary figures for eager steps; graphs take less."""
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


def forecast_other_gpus(
    loop: LoopTimes, demand: Demand, resources: Resources, rates: Rates, prices: Mapping[str, float]
) -> tuple[OtherGpu, ...]:
    """Return what each GPU of the table would do with the loop.

    Args:
        loop, demand: What was measured, and what is to be served.
        resources, rates: Of this machine, whose host memory and disk the GPU is taken to have.
        prices: What an hour costs, by the beginning of a GPU's name.
    """
    unknown = [name for name in prices if not any(gpu.startswith(name) for gpu in MEMORY_GIB)]
    if unknown:
        raise ConfigError(f"no GPU of the table is called {unknown[0]!r}. Known are {', '.join(MEMORY_GIB)}")
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
            frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  the documented way
            found = _stack(frame)[base + 1 :]  # below us, and below the call of `work`
            if found:
                stacks.seen[found] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
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
    """What a sample is read from, by number, as far as that is known."""
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
    tiers: tuple[TierForecast, ...]
    stages: tuple[SampleStage, ...] = ()
    """What is done to a sample, one thing after another, each timed alone."""
    bottleneck: str
    """What most of loading passes in, and its part; empty where samples could not be read alone."""
    stacks: StackSamples
    gpus: str
    """What memory of GPUs would hold the data."""
    elsewhere: tuple[OtherGpu, ...] = ()
    elsewhere_note: str = ""
    """How far the times on other GPUs can be trusted."""
    price_per_hour: float | None = None
    served_from: str = ""
    """The tier that the loop is fed from as it is; empty: a loader of somebody else."""
    remarks: tuple[str, ...] = ()
    """What else was noticed, as samples that cannot be read."""

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
        """Of one epoch; None without a price."""
        return None if self.price_per_hour is None else self.price_per_hour * wall_s * self.batches / 3600

    @property
    def verdict(self) -> str:
        """One sentence."""
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
        stall = next(row.stall for row in plan.rows if row.tier == tier) or 0.0
        found.append(TierForecast(tier=tier, wall_s=step_s / (1 - stall), stall=stall, fits=fits, why=why))
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
