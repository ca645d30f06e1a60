"""Count how long training waits for data and for what, and watch how busy a GPU is.

The loader writes into the meter, so that nothing above it needs a callback. It calls `waited` and `handed`
for each batch, `ended` at the end of a pass, and `spent` where it knows what a wait was for. The time from
handing one batch over to being asked for the next is the step. All times are of the host's clock. On a GPU
whose queue runs ahead, a wait shorter than the queue is counted although the device never idled. So the
stall is an upper bound there.
"""

# pynvml ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, TypeAlias, get_args

import pynvml

from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.threads import Pool, is_exiting
from stoker.schema import Json

Part: TypeAlias = Literal["fetch", "read", "gather", "copy", "transform", "wait"]
"""Reason for a wait. `fetch`: bytes from an object store or shared storage. `read`: reading from disk.
`gather`: putting the batch together in memory, and all time without another cause. `copy`: copying it to the
device or into page-locked memory. `transform`: the user's transforms. `wait`: waiting for another thread."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """Totals since the meter was reset."""

    stall: float
    """Waiting as a fraction of waiting and stepping, 0..1; the wait for a pass's first batch is left out."""
    wait_s: float
    """Seconds waited for batches, each pass's first one left out."""
    step_s: float
    """Seconds spent outside the loader, between batches."""
    first_wait_s: float
    """Seconds waited for the first batch of each pass: start-up (opening, filling a tier), not stall."""
    batches: int
    """Batches handed over."""
    examples: int
    """Examples in them."""
    bytes: int
    """Bytes of the batches handed over."""
    tiers: dict[str, int]
    """Examples by the tier that served them."""
    ceiling_step_s: float | None
    """Seconds of a step that finds its batch ready, measured in the same run; None: not measured."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """`wait_s` by what it was spent on; the names are `PARTS`."""
    rank: int = 0
    """The process that this is about."""

    @property
    def mean_step_s(self) -> float:
        """Seconds outside the loader per batch; 0 before the first."""
        return self.step_s / self.batches if self.batches else 0.0

    @property
    def lost(self) -> float | None:
        """Fraction that the run is below its compute-only ceiling, 0..1; None until it is measured.

        Unlike `stall` it also counts what loading costs a step by competing for cores or the bus.
        """
        if self.ceiling_step_s is None or not self.batches:
            return None
        spent_s = self.wait_s + self.step_s
        return max(0.0, 1.0 - self.ceiling_step_s * self.batches / spent_s) if spent_s else 0.0

    def since(self, earlier: StallReport) -> StallReport:
        """Return what was added after an earlier report.

        Args:
            earlier: A report of the same meter, which was not reset in between.
        """
        return _combined(self, earlier, -1)

    def plus(self, other: StallReport) -> StallReport:
        """Return both together, with the ceiling of `self`, or of `other` where it has none.

        Args:
            other: The report to add.
        """
        return _combined(self, other, 1)

    def to_json(self) -> dict[str, Json]:
        """Return all figures by name."""
        return {**asdict(self), "mean_step_s": self.mean_step_s, "lost": self.lost}


def _combined(a: StallReport, b: StallReport, sign: int) -> StallReport:
    """Return `a` and `sign` times `b`, field by field."""
    sums: dict[str, Any] = {}
    for name in (f.name for f in fields(StallReport)):
        mine, other = getattr(a, name), getattr(b, name)
        if isinstance(mine, dict):
            sums[name] = {key: mine.get(key, 0) + sign * other.get(key, 0) for key in mine | other}
        elif name not in ("stall", "ceiling_step_s", "rank"):
            sums[name] = mine + sign * other
    spent_s = sums["wait_s"] + sums["step_s"]
    stall = sums["wait_s"] / spent_s if spent_s else 0.0
    ceiling_s = b.ceiling_step_s if a.ceiling_step_s is None else a.ceiling_step_s
    return replace(a, **sums, stall=stall, ceiling_step_s=ceiling_s)


class StallMeter:
    """Counts how long a loop waits for its batches: give it to a `Loader` as `meter=`.

    Written by one loader, read by the code that reports, in the thread that iterates.

    Args:
        rank: This process among those that train together, for reports.

    Examples:
        >>> import stoker, torch
        >>> from stoker.monitor import StallMeter
        >>> meter = StallMeter()
        >>> loader = stoker.cached([{"x": torch.ones(1)}] * 10, batch_size=4, meter=meter)
        >>> for batch in loader:
        ...     pass
        >>> meter.epoch().batches, meter.epoch().examples, 0 <= meter.epoch().stall <= 1
        (3, 10, True)
    """

    __slots__ = (
        "_batches", "_bytes", "_ceiling_s", "_examples", "_first_s", "_handed_ns", "_parts",
        "_rank", "_spent", "_step_ns", "_tiers", "_wait_s", "_waited_s",
    )  # fmt: skip

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._ceiling_s: float | None = None
        self.reset()

    def reset(self) -> None:
        """Start counting again; the ceiling stays."""
        self._wait_s = self._first_s = self._waited_s = 0.0
        self._step_ns = self._batches = self._examples = self._bytes = 0
        self._handed_ns = 0
        self._tiers: dict[str, int] = {}
        self._parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._spent: list[tuple[Part, float]] = []

    def waited(self, wait_s: float) -> None:
        """Add seconds that the loader took for the batch about to be handed over; may be called in parts."""
        self._waited_s += wait_s

    def spent(self, part: Part, seconds: float) -> None:
        """Say what some of the wait in progress is for. The rest counts as `gather`."""
        self._spent.append((part, seconds))

    def outside(self, seconds: float) -> None:
        """Leave out time that the caller spent since the last hand-over on neither wait nor step.

        Args:
            seconds: As validation or a checkpoint took.
        """
        if self._handed_ns:
            self._step_ns -= int(seconds * 1e9)

    def handed(self, size_bytes: int, examples: int, tier: str) -> None:
        """Count a batch, at the moment it leaves the loader."""
        now = perf_counter_ns()
        if self._handed_ns:
            # What passed since the last hand-over is its step and then this wait.
            self._step_ns += now - self._handed_ns - int(self._waited_s * 1e9)
            self._wait_s += self._waited_s
            left_s = self._waited_s
            for part, seconds in self._spent:
                self._parts[part] += (took := min(seconds, left_s))
                left_s -= took
            self._parts["gather"] += left_s
        else:
            self._first_s += self._waited_s
        if self._spent:
            self._spent.clear()
        self._waited_s = 0.0
        self._handed_ns = now
        self._batches += 1
        self._examples += examples
        self._bytes += size_bytes
        self._tiers[tier] = self._tiers.get(tier, 0) + examples

    def ended(self) -> None:
        """Close the last batch's step, when the loader is asked for one more and has none."""
        if self._handed_ns:
            self._step_ns += perf_counter_ns() - self._handed_ns
        self._handed_ns = 0
        self._waited_s = 0.0
        self._spent.clear()

    def ceiling(self, step_s: float) -> None:
        """Note how long a step takes that finds its batch ready, as measured by the training loop.

        Args:
            step_s: Seconds of one step.
        """
        self._ceiling_s = step_s

    def epoch(self) -> StallReport:
        """Return totals since `reset`; does not reset. A pass broken off lacks the step of its last batch."""
        step_s = max(0.0, self._step_ns / 1e9)
        spent_s = self._wait_s + step_s
        return StallReport(
            stall=self._wait_s / spent_s if spent_s else 0.0,
            wait_s=self._wait_s,
            step_s=step_s,
            first_wait_s=self._first_s,
            batches=self._batches,
            examples=self._examples,
            bytes=self._bytes,
            tiers=dict(self._tiers),
            ceiling_step_s=self._ceiling_s,
            parts={part: seconds for part, seconds in self._parts.items() if seconds},
            rank=self._rank,
        )


# ----------------------------------------------------------------------------------------------------------
# A meter's figures as they come: one JSON line per interval, and a summary at the end.
#
# Usable in any training loop: `tick()` after each step costs a look at the clock until an interval is over.


EVERY_S = 10.0
"""Seconds of an interval: a day of training is 8,640 lines, some 3 MB."""


def journal_name(rank: int) -> str:
    """Return the file of a rank in a run's folder.

    >>> journal_name(0), journal_name(3)
    ('stall.jsonl', 'stall-rank3.jsonl')
    """
    return f"stall-rank{rank}.jsonl" if rank else "stall.jsonl"


class StallJournal:
    """Cuts a meter's totals into intervals. One thread writes and reads the meter, and calls this."""

    def __init__(
        self,
        meter: StallMeter,
        path: Path | None = None,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` is the file to append to; None: `tick` only returns the intervals."""
        self._meter = meter
        self._path = path
        self._every_s = every_s
        self._clock = clock
        self._begun_s = self._since_s = clock()
        self._due_s = self._begun_s + every_s
        self._before: StallReport | None = None
        self._total: StallReport | None = None

    def tick(self, facts: Mapping[str, Json] | None = None) -> StallReport | None:
        """Return the interval that is over by now, written down together with `facts`; None before it is."""
        return self.cut(facts) if self._clock() >= self._due_s else None

    def cut(self, facts: Mapping[str, Json] | None = None) -> StallReport | None:
        """End the interval now; None when no batch was handed over in it.

        Raises:
            ResourceError: No space is left.
            ReadOnlyError: The file cannot be written.
        """
        now_s, report = self._clock(), self._meter.epoch()
        interval = report if self._before is None else report.since(self._before)
        seconds, self._since_s = now_s - self._since_s, now_s
        self._due_s, self._before = now_s + self._every_s, report
        if not interval.batches:
            return None
        self._total = interval if self._total is None else self._total.plus(interval)
        self._write("interval", interval, seconds, facts or {})
        return interval

    def restarted(self) -> None:
        """Begin a new interval: the meter was reset since the last one, as between two passes."""
        self._before = None

    def close(self, facts: Mapping[str, Json] | None = None) -> StallReport | None:
        """End the last interval and write the summary of all of them; None when there was no batch."""
        self.cut()
        if self._total is not None:
            self._write("summary", self._total, self._clock() - self._begun_s, facts or {})
        return self._total

    def _write(self, kind: str, report: StallReport, seconds: float, facts: Mapping[str, Json]) -> None:
        if self._path is None:
            return
        row = {"kind": kind, "seconds": round(seconds, 3), **facts, **report.to_json()}
        with explain_disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


# ----------------------------------------------------------------------------------------------------------
# How busy a GPU is, by NVIDIA's management library; or, in words, why nothing can be said.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One look at a GPU, all processes on it taken together."""

    name: str
    utilization: float | None
    """Part of the last sample period in which a kernel ran, 0..1; None: not reported (as on a MIG slice)."""
    used_bytes: int
    total_bytes: int
    power_w: float | None
    """Board power in watts; None: not reported."""

    def to_json(self) -> dict[str, Json]:
        """Return all figures by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGpu:
    """There is nothing to sample."""

    reason: str

    def to_json(self) -> dict[str, Json]:
        """Return the reason, so that a report says it in place of figures."""
        return {"absent": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """The driver of this machine's GPUs."""

    version: str
    cuda: tuple[int, int]
    """The newest version of CUDA that it runs."""


class GpuSampler:
    """One GPU, held open; made by `open_gpu`. Close it when done."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def sample(self) -> GpuSample | MissingGpu:
        """Look now; a GPU that fell off the bus is absent, not an error of the training."""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            name = pynvml.nvmlDeviceGetName(self._handle)
        except pynvml.NVMLError as error:
            return MissingGpu(reason=str(error))
        return GpuSample(
            name=name if isinstance(name, str) else bytes(name).decode(),
            utilization=self._utilisation(),
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            power_w=self._power_w(),
        )

    def close(self) -> None:
        """Let go of the library."""
        pynvml.nvmlShutdown()

    def _utilisation(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except pynvml.NVMLError:
            return None

    def _power_w(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
        except pynvml.NVMLError:
            return None


def open_gpu(uuid: str | None = None) -> GpuSampler | MissingGpu:
    """Open a GPU for sampling.

    Args:
        uuid: As in `torch.cuda.get_device_properties(i).uuid`, since this library numbers GPUs without
            regard to CUDA_VISIBLE_DEVICES; None: its first one.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"no NVIDIA driver ({error})")
    try:
        if uuid is None:
            return GpuSampler(pynvml.nvmlDeviceGetHandleByIndex(0))
        if uuid.startswith(("GPU-", "MIG-")):
            return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        with suppress(pynvml.NVMLError):
            return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))  # a part of a GPU
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return MissingGpu(reason=f"the driver has no such GPU ({error})")


def find_driver() -> GpuDriver | MissingGpu:
    """Return the driver that is loaded, as its own library says."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"no NVIDIA driver ({error})")
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"the driver does not say what it is ({error})")
    finally:
        pynvml.nvmlShutdown()
    text = version if isinstance(version, str) else bytes(version).decode()
    return GpuDriver(version=text, cuda=(cuda // 1000, cuda % 1000 // 10))


# ----------------------------------------------------------------------------------------------------------
# How busy a GPU was between two looks: sampled in the background, or in words why nothing can be said.


SAMPLE_EVERY_S = 1.0
"""Seconds between samples; the driver's own figure is of the last sixth of a second to a second."""
STOP_S = 5.0
"""Seconds that a sample in progress has to end; the thread of a driver that hangs is left behind."""


class GpuWatch:
    """Samples one GPU until `stop`; `take` is the mean since it was last asked."""

    def __init__(
        self,
        uuid: str | None = None,
        *,
        opening: Callable[[str | None], GpuSampler | MissingGpu] = open_gpu,
        every_s: float = SAMPLE_EVERY_S,
    ) -> None:
        """`uuid`, `opening`: which GPU, and how it is opened (in the thread: the caller does not wait)."""
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        self._absent: MissingGpu | None = None
        self._over = threading.Event()
        self._ticket = Pool(1, "stoker-gpu-watch").submit(partial(self._watch, uuid, opening, every_s))

    def take(self) -> float | MissingGpu:
        """Return mean utilization since the last call, 0..1; or why it is not known."""
        with self._lock:
            total, count = self._sum, self._count
            self._sum, self._count = 0.0, 0
            if count:
                return total / count
            return self._absent or MissingGpu(reason="no sample was taken yet")

    def stop(self) -> None:
        """End sampling."""
        self._over.set()
        self._ticket.wait(STOP_S)

    def _watch(
        self, uuid: str | None, opening: Callable[[str | None], GpuSampler | MissingGpu], every_s: float
    ) -> None:
        gpu = opening(uuid)
        if isinstance(gpu, MissingGpu):
            self._note(gpu)
            return
        try:
            while not (self._over.is_set() or is_exiting()):
                sample = gpu.sample()
                if isinstance(sample, MissingGpu):
                    self._note(sample)
                    return
                self._note(
                    MissingGpu(reason=f"{sample.name} does not report how busy it is")
                    if sample.utilization is None
                    else sample.utilization
                )
                self._over.wait(every_s)
        finally:
            with suppress(Exception):  # the driver is gone: there is nothing to close
                gpu.close()

    def _note(self, found: float | MissingGpu) -> None:
        with self._lock:
            if isinstance(found, MissingGpu):
                self._absent = found
            else:
                self._sum, self._count = self._sum + found, self._count + 1
