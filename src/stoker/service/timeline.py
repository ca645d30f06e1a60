"""The timeline of a job: when it waited, filled caches and trained, and what its steps waited for.

Made of the job's events. `stall` events say how the time of training was spent since the last of them
(`StallSums` writes them); the others say when a phase began.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, Field

from stoker.monitor.meter import GpuWatch
from stoker.units import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.monitor.meter import MissingGpu
    from stoker.schema import Json
    from stoker.service.database import Event, Outbox
    from stoker.service.jobs import Job, Jobs
    from stoker.service.journal import Journal

LEAST_S = 2.0
"""Seconds of an interval, at least."""
PART_OF_RUN = 0.01
"""Part of the time since training began that an interval has at least: a week is some 1,000 intervals."""
MOMENT_S = 0.5
"""A start that is shorter and leads back to the queue counts as waiting; gaps that are shorter are closed."""
MOST_EVENTS = 20_000
"""Events that a timeline is made of; the newest ones."""
MOST_INTERVALS = 200
"""Intervals of a timeline; neighbors are added up."""
PHASES = {
    "queued": "waited in the queue",
    "data": "waited for data that is generated",
    "start": "started and opened its data",
    "fill": "filled caches",
    "train": "trained",
    "make": "made data",
    "paused": "was paused",
}
WAITS = {
    "fetch": "bytes from storage that is not local",
    "read": "reading from disk",
    "gather": "putting batches together",
    "copy": "copying to the device",
    "transform": "transforms",
    "wait": "a thread that prepares batches",
}
"""What a step waited for, by the names of `StallReport.parts`."""
_BEGINS = {
    "queued": "queued",
    "resumed": "queued",
    "claimed": "start",
    "started": "train",
    "paused": "paused",
}
_ENDS = ("completed", "failed", "cancelled")
KINDS = (*_BEGINS, *_ENDS, "stall")
"""Kinds of events that a timeline is made of."""


class StallSums:
    """Writes where the time of training went, as `stall` events.

    Args:
        journal: Of the job.
        gpu: Measures how busy the GPU is; by default nothing does.
    """

    def __init__(self, journal: Journal, gpu: GpuWatch | MissingGpu | None = None) -> None:
        self._journal, self._gpu = journal, gpu
        self.begin()

    def begin(self) -> None:
        """Start again: time before this call is not of training."""
        self._begun_s = self._since_s = time.monotonic()
        self._sums: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._tiers: Counter[str] = Counter()

    def take(self, kind: str, told: Mapping[str, Any]) -> None:
        """Add an event of the training loop, and write the sums when they are due."""
        if kind == "epoch":
            _add(self._sums, {"validate_s": told.get("eval_seconds") or 0.0})
        elif kind in ("checkpoint", "best"):
            _add(self._sums, {"checkpoint_s": told["seconds"]})
        elif kind in ("done", "stop"):
            self.write()
        elif kind == "stall":
            _add(self._sums, {name: told[name] for name in ("step_s", "wait_s", "first_wait_s")})
            _add(self._waits, told["parts"])
            self._tiers.update(told["tiers"])
            now_s = time.monotonic()
            if now_s - self._since_s >= max(LEAST_S, PART_OF_RUN * (now_s - self._begun_s)):
                self.write()

    def write(self) -> None:
        """Write what is not written yet, as at the end of training."""
        sums, now_s = self._sums, time.monotonic()
        if any(sums.values()):
            busy = self._gpu.take() if isinstance(self._gpu, GpuWatch) else None
            facts: dict[str, Json] = {
                "until": time.time(),
                "seconds": round(now_s - self._since_s, 3),
                "busy_s": round(sums.get("step_s", 0.0), 4),
                "first_wait_s": round(sums.get("first_wait_s", 0.0), 4),
                "validate_s": round(sums.get("validate_s", 0.0), 4),
                "checkpoint_s": round(sums.get("checkpoint_s", 0.0), 4),
                "waits": {name: round(spent, 4) for name, spent in self._waits.items() if spent > 0},
                **({"tier": self._tiers.most_common(1)[0][0]} if self._tiers else {}),
                "gpu_busy": round(busy, 4) if isinstance(busy, float) else None,
            }
            self._journal.tell("stall", facts)
        self._since_s = now_s
        for part in (self._sums, self._waits, self._tiers):
            part.clear()


class Phase(BaseModel):
    """What a job did for some time."""

    kind: str = Field(description=", ".join(PHASES))
    begin: float = Field(description="Unix seconds.")
    end: float = Field(description="Unix seconds; of the current phase, now.")


class Interval(BaseModel):
    """Where the time of training went."""

    begin: float = Field(description="Unix seconds.")
    end: float = Field(description="Unix seconds.")
    busy_s: float = Field(description="Seconds in steps.")
    waits_s: dict[str, float] = Field(description=f"Seconds that steps waited, by cause: {', '.join(WAITS)}.")
    first_wait_s: float = Field(description="Seconds until the first batch of each epoch.")
    validate_s: float = Field(0.0, description="Seconds of validation.")
    checkpoint_s: float = Field(0.0, description="Seconds of writing checkpoints.")
    tier: str = Field(description="Where most records came from.")
    gpu_busy: float | None = Field(None, description="How busy the GPU was, 0 to 1; null: not measured.")

    def spent_s(self) -> dict[str, float]:
        """Return the seconds by the names of `SPENT`, those of nothing else included."""
        named = {
            "busy": self.busy_s,
            "validate": self.validate_s,
            "checkpoint": self.checkpoint_s,
            "first": self.first_wait_s,
            **self.waits_s,
        }
        return {**named, "other": max(0.0, self.end - self.begin - sum(named.values()))}


class JobTimeline(BaseModel):
    """Where a job's time went."""

    job_id: str
    phases: list[Phase]
    intervals: list[Interval]
    stall: float | None = Field(description="Part of the time of steps that they waited for data; 0 to 1.")
    summary: list[str] = Field(description="The same in sentences.")


def timeline_of(job: Job, outbox: Outbox, *, most: int = MOST_INTERVALS) -> JobTimeline:
    """Return the timeline of a job.

    Args:
        job: The job, read before its events.
        outbox: Has the events.
        most: Intervals at most.
    """
    events = outbox.last_of([job.id], KINDS, limit=MOST_EVENTS)
    found = _intervals([event for event in events if event.kind == "stall"])
    intervals = merged(found, most)
    phases = _phases(job, events, time.time())
    if found and not phases:  # the events of its start are not kept any more
        phases = [Phase(kind="train", begin=found[0].begin, end=found[-1].end)]
    busy_s, waits_s = _totals(found)
    spent_s = busy_s + sum(waits_s.values())
    stall = sum(waits_s.values()) / spent_s if spent_s else None
    summary = [*_tier_changes(found), *_phase_times(phases)] if stall is None else [
        _say_stall(stall, waits_s, spent_s), *_tier_changes(found), *_phase_times(phases)
    ]  # fmt: skip
    return JobTimeline(job_id=job.id, phases=phases, intervals=intervals, stall=stall, summary=summary)


def phases_of(events: Sequence[Event], until: float, *, work: str = "train") -> list[Phase]:
    """Return the phases that events begin and end; the last one ends at `until` if nothing ended it.

    Args:
        events: Of one job, in order.
        until: Unix seconds.
        work: The phase that `started` begins.
    """
    phases: list[Phase] = []
    current: Phase | None = None
    for event in events:
        kind = work if event.kind == "started" else _BEGINS.get(event.kind)
        if kind is None and event.kind not in _ENDS:
            continue
        if current is not None:
            current.end = max(current.begin, event.at)
            phases += _filled(current, event)
        current = None if kind is None else Phase(kind=kind, begin=event.at, end=event.at)
        if current is not None and kind == "queued":
            current = _still_waiting(phases, "data" if event.data.get("waits_for") else "queued", current)
    if current is not None:
        current.end = max(current.begin, until)
        phases.append(current)
    return phases


def _phases(job: Job, events: Sequence[Event], now: float) -> list[Phase]:
    work = "make" if job.kind == "generation" else "train"
    return phases_of(events, now if job.ended is None else job.ended, work=work)


def _still_waiting(phases: list[Phase], kind: str, new: Phase) -> Phase:
    """Return the wait that begins, or continues if only a start of a moment broke it off, which is removed.

    Data that is being generated breaks a wait off again and again.
    """
    new.kind = kind
    if phases and phases[-1].kind == "start" and phases[-1].end - phases[-1].begin <= MOMENT_S:
        new.begin = phases.pop().begin
        if phases and phases[-1].kind == kind:
            new.begin = phases.pop().begin
    return new


def _filled(phase: Phase, then: Event) -> list[Phase]:
    """Return a phase, its part cut off in which caches were filled."""
    seconds = then.data.get("fill_s")
    if then.kind != "started" or not isinstance(seconds, int | float) or seconds <= 0:
        return [phase]
    begin = max(phase.begin, phase.end - float(seconds))
    return [
        Phase(kind=phase.kind, begin=phase.begin, end=begin),
        Phase(kind="fill", begin=begin, end=phase.end),
    ]


def _intervals(events: Sequence[Event]) -> list[Interval]:
    """Return intervals that adjoin where their events were stored a moment too early or too late."""
    found = list(map(_interval, events))
    for before, after in pairwise(found):
        if abs(after.begin - before.end) < MOMENT_S:
            after.begin = before.end
    return found


def _interval(event: Event) -> Interval:
    told = cast("Mapping[str, Any]", event.data)
    # Stored later, where the database did not answer for a while.
    until = float(told.get("until") or event.at)
    waits_s = {name: float(spent) for name, spent in dict(told.get("waits") or {}).items()}
    return Interval(
        begin=until - float(told.get("seconds") or 0.0),
        end=until,
        busy_s=float(told.get("busy_s") or 0.0),
        waits_s=waits_s,
        first_wait_s=float(told.get("first_wait_s") or 0.0),
        validate_s=float(told.get("validate_s") or 0.0),
        checkpoint_s=float(told.get("checkpoint_s") or 0.0),
        gpu_busy=told.get("gpu_busy"),
        tier=str(told.get("tier") or ""),
    )


def merged(intervals: Sequence[Interval], most: int) -> list[Interval]:
    """Return about `most` intervals, twice as many at most, each the sum of neighbors without a gap.

    Seconds are kept: nothing is left out.
    """
    if not intervals:
        return []
    least_s = (intervals[-1].end - intervals[0].begin) / most
    found: list[Interval] = []
    for interval in intervals:
        last = found[-1] if found else None
        if last is None or interval.begin - last.end > max(1.0, least_s) or last.end - last.begin >= least_s:
            found.append(interval.model_copy(update={"waits_s": dict(interval.waits_s)}))
            continue
        if last.gpu_busy is not None and interval.gpu_busy is not None:
            long_s, more_s = last.end - last.begin, interval.end - interval.begin
            busy_s = last.gpu_busy * long_s + interval.gpu_busy * more_s
            last.gpu_busy = busy_s / (long_s + more_s) if long_s + more_s else last.gpu_busy
        elif last.gpu_busy is None:
            last.gpu_busy = interval.gpu_busy
        last.end = max(last.end, interval.end)
        last.busy_s += interval.busy_s
        last.first_wait_s += interval.first_wait_s
        last.validate_s += interval.validate_s
        last.checkpoint_s += interval.checkpoint_s
        _add(last.waits_s, interval.waits_s)
    return found


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the values of `more` to those of the same names."""
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _totals(intervals: Sequence[Interval]) -> tuple[float, dict[str, float]]:
    waits_s: dict[str, float] = {}
    for interval in intervals:
        _add(waits_s, interval.waits_s)
    return sum(interval.busy_s for interval in intervals), waits_s


def _say_stall(stall: float, waits_s: Mapping[str, float], spent_s: float) -> str:
    """Return the stall in a sentence, with its causes, the longest first."""
    causes = [
        f"{WAITS.get(name, name)} {format_percent(waited / spent_s)}"
        for name, waited in sorted(waits_s.items(), key=lambda pair: -pair[1])
        if waited >= 0.0005 * spent_s
    ]
    because = f": {', '.join(causes)}" if causes else ""
    return f"Steps waited {format_percent(stall)} of their time for data{because}."


def _tier_changes(intervals: Sequence[Interval]) -> list[str]:
    """Return when most records began to come from another tier."""
    moves: list[str] = []
    for before, after in pairwise(intervals):
        if before.tier and after.tier and before.tier != after.tier:
            at = format_seconds(after.begin - intervals[0].begin)
            moves.append(
                f"After {at} of training records came from {after.tier}, before that from {before.tier}."
            )
    return moves if len(moves) <= 3 else [f"Records moved between tiers {len(moves)} times.", moves[-1]]


def _phase_times(phases: Sequence[Phase]) -> list[str]:
    """Return how long each phase took, all attempts together."""
    took: dict[str, float] = {}
    for phase in phases:
        _add(took, {phase.kind: phase.end - phase.begin})
    said = [f"{PHASES[kind]} {format_seconds(took[kind])}" for kind in PHASES if took.get(kind)]
    return [f"The job {', '.join(said)}."] if said else []


# ----------------------------------------------------------------------------------------------------------
# The same for all jobs of the machine: one line for each job, and how the time of all workers was spent.


MOST_JOBS = 200
"""Jobs that a timeline of the machine is made of; the newest ones."""
COLUMNS = 120
"""Columns of the timeline of the machine."""
NOT_WORKING = ("queued", "data", "paused")
"""Phases in which no worker has the job."""


class JobPhases(BaseModel):
    """What one job did in the time of a machine's timeline."""

    job_id: str
    name: str
    worker: str | None = Field(description="The worker that holds it, or held it last.")
    phases: list[Phase]


class Column(BaseModel):
    """How the time of all workers was spent between two times."""

    begin: float = Field(description="Unix seconds.")
    end: float = Field(description="Unix seconds.")
    spent_s: dict[str, float] = Field(description="Seconds of all workers together, by what they did.")
    gpu_busy: float | None = Field(description="As the jobs measured it, 0 to 1; null: not measured.")


class MachineTimeline(BaseModel):
    """Where the time of all workers went."""

    begin: float = Field(description="Unix seconds.")
    end: float = Field(description="Unix seconds.")
    jobs: list[JobPhases] = Field(description="Jobs that a worker had in this time, the oldest first.")
    columns: list[Column]
    stall: float | None = Field(description="Part of the time of steps that they waited for data; 0 to 1.")
    summary: list[str] = Field(description="The same in sentences.")


def machine_timeline(
    jobs: Jobs, outbox: Outbox, seconds: float, *, columns: int = COLUMNS
) -> MachineTimeline:
    """Return where the time of all workers went, up to now.

    Args:
        jobs: All jobs.
        outbox: Has the events.
        seconds: How far back.
        columns: Columns that this time is divided into.
    """
    end = time.time()
    begin = end - seconds
    found = jobs.active_since(begin, limit=MOST_JOBS)[::-1]
    ids = [job.id for job in found]
    steps: dict[str, list[Event]] = {id: [] for id in ids}
    spans: dict[str, list[Event]] = {id: [] for id in ids}
    for event in outbox.last_of(ids, [kind for kind in KINDS if kind != "stall"], limit=MOST_EVENTS):
        steps[event.job].append(event)
    # An interval is stored when it ends; one that begins in this time may end after it.
    stalls = outbox.last_of(ids, ["stall"], limit=MOST_EVENTS, since=begin)
    known = stalls[0].at if len(stalls) == MOST_EVENTS else begin
    for event in stalls:
        spans[event.job].append(event)
    lines: list[JobPhases] = []
    every = [Column(begin=begin + seconds * i / columns, end=begin + seconds * (i + 1) / columns,
                    spent_s={}, gpu_busy=None) for i in range(columns)]  # fmt: skip
    gpu: list[list[tuple[float, float]]] = [[] for _ in every]
    intervals: list[Interval] = []
    for job in found:
        phases = _within(_phases(job, steps[job.id], end), begin)
        if all(one.kind in NOT_WORKING for one in phases):
            continue
        lines.append(JobPhases(job_id=job.id, name=job.name, worker=job.worker, phases=phases))
        own = _intervals(spans[job.id])
        intervals += own
        for phase in phases:
            if phase.kind in ("start", "fill") and phase.begin >= known:
                _spread(every, phase.begin, phase.end, {phase.kind: phase.end - phase.begin})
        for one in own:
            for place, share in _spread(every, one.begin, one.end, one.spent_s()):
                gpu[place] += [] if one.gpu_busy is None else [(one.gpu_busy, share)]
    for column, shares in zip(every, gpu, strict=True):
        total = sum(share for _, share in shares)
        column.gpu_busy = sum(busy * share for busy, share in shares) / total if total else None
    busy_s, waits_s = _totals(intervals)
    spent_s = busy_s + sum(waits_s.values())
    stall = sum(waits_s.values()) / spent_s if spent_s else None
    summary = [_say_jobs(lines, len(found), seconds), *_say_gpu(every)]
    if known > begin:
        summary.append(f"Columns begin {_round(end - known)} ago: earlier intervals are too many to add up.")
    summary += [] if stall is None else [_say_stall(stall, waits_s, spent_s)]
    return MachineTimeline(begin=begin, end=end, jobs=lines, columns=every, stall=stall, summary=summary)


def _within(phases: Sequence[Phase], begin: float) -> list[Phase]:
    """Return the phases that end after `begin`, the first of them cut off there."""
    late = [one for one in phases if one.end > begin]
    return [one.model_copy(update={"begin": max(begin, one.begin)}) for one in late]


def _spread(
    columns: Sequence[Column], begin: float, end: float, spent_s: Mapping[str, float]
) -> list[tuple[int, float]]:
    """Add seconds to the columns that they were spent in; return each column's place and its share.

    Shares add up to 1 for what lies completely in the columns; the rest is left out.
    """
    if end <= begin:
        return []
    first, long_s = columns[0].begin, columns[0].end - columns[0].begin
    places = range(
        max(0, int((begin - first) / long_s)), min(len(columns) - 1, int((end - first) / long_s)) + 1
    )
    found: list[tuple[int, float]] = []
    for place in places:
        column = columns[place]
        share = (min(end, column.end) - max(begin, column.begin)) / (end - begin)
        if share > 0:
            found.append((place, share))
            _add(column.spent_s, {kind: spent * share for kind, spent in spent_s.items() if spent > 0})
    return found


def _say_jobs(lines: Sequence[JobPhases], asked: int, seconds: float) -> str:
    worked_s = sum(
        one.end - one.begin for line in lines for one in line.phases if one.kind not in NOT_WORKING
    )
    over = f" (of the newest {MOST_JOBS:,})" if asked == MOST_JOBS else ""
    said = f"{format_count(len(lines), 'job')}{over} in the last {_round(seconds)}"
    return f"{said}, together {format_seconds(worked_s)} of work." if lines else f"No {said[2:]}."


def _round(seconds: float) -> str:
    """Return a time without a rest of zero: `15 min`, `6 h`."""
    return format_seconds(seconds).removesuffix(" 0 s").removesuffix(" 0 min")


def _say_gpu(columns: Sequence[Column]) -> list[str]:
    known = [one.gpu_busy for one in columns if one.gpu_busy is not None]
    return (
        [f"The GPU was busy {format_percent(sum(known) / len(known))} of the time of training."]
        if known
        else []
    )


# ----------------------------------------------------------------------------------------------------------
# The picture on the page of a job: phases on one line, below it how each interval of training was spent.


WIDTH, HEIGHT = 1000.0, 96.0
"""Size of the picture of the intervals, in its own units."""
SHOWN_PART = 0.001
"""Part of the time that a legend names at least."""
TICKS = 5
"""Times below the picture."""


class Rect(BaseModel):
    """A part of the picture."""

    kind: str
    """Selects the color: a name of `PHASES` or `WAITS`, `busy`, `first` or `other`."""
    text: str
    x: float
    y: float
    width: float
    height: float


class TimelinePicture(BaseModel):
    """A timeline as it is drawn."""

    phases: list[Rect]
    columns: list[Rect]
    legend: list[tuple[str, str, str]]
    """Kind, its name and how long it took, of the columns."""
    ticks: list[str]
    """Times since the beginning, evenly."""
    summary: list[str]


SPENT = {
    "start": PHASES["start"],
    "fill": PHASES["fill"],
    "busy": "in steps",
    "validate": "validation",
    "checkpoint": "writing checkpoints",
    "other": "outside of steps: starting, logging",
    "first": "first batch of an epoch",
    **WAITS,
}
"""Parts of a column, from the bottom, and their names."""


def draw_timeline(timeline: JobTimeline) -> TimelinePicture | None:
    """Return the picture of a timeline; None before anything has happened."""
    if not timeline.phases:
        return None
    begin = timeline.phases[0].begin
    total_s = max([timeline.phases[-1].end, *(one.end for one in timeline.intervals)]) - begin
    if total_s <= 0:
        return None

    across = partial(_across, begin, total_s)
    phases = [
        Rect(kind=one.kind, text=f"{PHASES[one.kind]} {format_seconds(one.end - one.begin)}",
             x=across(one.begin), y=0.0, width=round(across(one.end) - across(one.begin), 2), height=14.0)
        for one in timeline.phases
    ]  # fmt: skip
    columns: list[Rect] = []
    totals: dict[str, float] = {}
    for one in timeline.intervals:
        spent_s = one.spent_s()
        _add(totals, spent_s)
        columns += _column(spent_s, sum(spent_s.values()), across(one.begin), across(one.end))
    ticks = [format_seconds(total_s * place / (TICKS - 1)) if place else "0" for place in range(TICKS)]
    return TimelinePicture(
        phases=phases, columns=columns, legend=_legend(totals), ticks=ticks, summary=timeline.summary
    )


def _legend(totals: Mapping[str, float]) -> list[tuple[str, str, str]]:
    least_s = SHOWN_PART * sum(totals.values())
    return [
        (kind, name, format_seconds(totals[kind]))
        for kind, name in SPENT.items()
        if totals.get(kind, 0.0) > least_s
    ]


def _across(begin: float, total_s: float, at: float) -> float:
    """Return the place of a time in the picture."""
    return round(WIDTH * min(1.0, max(0.0, (at - begin) / total_s)), 2)


def _column(spent_s: Mapping[str, float], total_s: float, begin: float, end: float) -> list[Rect]:
    """Return the parts of one interval, from the bottom; `total_s` is as high as the picture."""
    y = HEIGHT
    found: list[Rect] = []
    for kind in (name for name in SPENT if spent_s.get(name, 0.0) > 0):
        part = spent_s[kind] / total_s
        y -= (height := HEIGHT * part)
        found.append(
            Rect(kind=kind, text=f"{SPENT[kind]} {format_percent(part)}", x=begin, y=round(y, 2),
                 width=round(end - begin, 2), height=round(height, 2))
        )  # fmt: skip
    return found


class MachinePicture(BaseModel):
    """The timeline of a machine as it is drawn."""

    jobs: list[tuple[JobPhases, list[Rect]]]
    hidden: int
    """Older jobs that have no line."""
    columns: list[Rect]
    gpu: list[str]
    """Lines of how busy the GPU was, as points; the top is 100 %."""
    legend: list[tuple[str, str, str]]
    ticks: list[str]
    summary: list[str]


LINES = 24
"""Jobs with a line of their own."""


def draw_machine(timeline: MachineTimeline, workers: int) -> MachinePicture | None:
    """Return the picture of a machine's timeline; None: no job ran.

    Args:
        timeline: What to draw.
        workers: Workers of the machine; all of them busy all the time is as high as the picture.
    """
    if not timeline.jobs:
        return None
    begin, total_s = timeline.begin, timeline.end - timeline.begin

    across = partial(_across, begin, total_s)
    rows: list[tuple[JobPhases, list[Rect]]] = []
    for line in timeline.jobs[-LINES:]:
        rects = [
            Rect(kind=one.kind, text=f"{line.name}: {PHASES[one.kind]} {format_seconds(one.end - one.begin)}",
                 x=across(one.begin), y=0.0, width=max(1.0, across(one.end) - across(one.begin)), height=14.0)
            for one in line.phases
        ]  # fmt: skip
        rows.append((line, rects))
    long_s = timeline.columns[0].end - timeline.columns[0].begin
    full_s = max([workers * long_s, *(sum(one.spent_s.values()) for one in timeline.columns)])
    totals: dict[str, float] = {}
    columns: list[Rect] = []
    gpu: list[list[str]] = [[]]
    for one in timeline.columns:
        columns += _column(one.spent_s, full_s, across(one.begin), across(one.end))
        _add(totals, one.spent_s)
        if one.gpu_busy is None:
            gpu.append([])
        else:
            middle = across((one.begin + one.end) / 2)
            gpu[-1].append(f"{middle},{round(HEIGHT * (1.0 - min(1.0, one.gpu_busy)), 2)}")
    ago = [
        format_seconds(total_s * place / 3).removesuffix(" 0 s").removesuffix(" 0 min") for place in (3, 2, 1)
    ]
    return MachinePicture(
        jobs=rows,
        hidden=max(0, len(timeline.jobs) - LINES),
        columns=columns,
        gpu=[" ".join(points) for points in gpu if points],
        legend=_legend(totals),
        ticks=[*ago, "now"],
        summary=timeline.summary,
    )
