"""The timeline of a job: when it waited, filled caches and trained, and what its steps waited for.

Made of the job's events. `stall` events say how the time of training was spent since the last of them
(`StallSums` writes them); the others say when a phase began.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, Field

from stoker.units import format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.schema import Json
    from stoker.service.database import Event, Outbox
    from stoker.service.jobs import Job
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
    "start": "started and opened its data",
    "fill": "filled caches",
    "train": "trained",
    "paused": "was paused",
}
WAITS = {
    "fetch": "bytes from storage that is not local",
    "read": "reading from disk",
    "gather": "putting batches together",
    "copy": "copying to the device",
    "transform": "transforms",
    "wait": "another thread",
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
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._begun_s = self._since_s = time.monotonic()
        self._sums: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()

    def add(self, told: Mapping[str, Any]) -> None:
        """Take up a `stall` event of the training loop, and write one of the job when it is due."""
        self._sums.update({name: told[name] for name in ("step_s", "wait_s", "first_wait_s")})
        self._waits.update(told["parts"])
        self._tiers.update(told["tiers"])
        now_s = time.monotonic()
        if now_s - self._since_s >= max(LEAST_S, PART_OF_RUN * (now_s - self._begun_s)):
            self.write()

    def write(self) -> None:
        """Write what is not written yet, as at the end of training."""
        busy_s, wait_s = self._sums["step_s"], self._sums["wait_s"]
        now_s = time.monotonic()
        if busy_s + wait_s:
            facts: dict[str, Json] = {
                "until": time.time(),
                "seconds": round(now_s - self._since_s, 3),
                "busy_s": round(busy_s, 4),
                "first_wait_s": round(self._sums["first_wait_s"], 4),
                "waits": {name: round(spent, 4) for name, spent in self._waits.items() if spent > 0},
                "tier": self._tiers.most_common(1)[0][0] if self._tiers else "",
            }
            self._journal.tell("stall", facts)
        self._since_s = now_s
        for sums in (self._sums, self._waits, self._tiers):
            sums.clear()


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
    tier: str = Field(description="Where most records came from.")

    @property
    def other_s(self) -> float:
        """Seconds of neither: validation and checkpoints."""
        spent_s = self.busy_s + sum(self.waits_s.values()) + self.first_wait_s
        return max(0.0, self.end - self.begin - spent_s)


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
    events = outbox.last_of(job.id, KINDS, limit=MOST_EVENTS)
    found = _intervals([event for event in events if event.kind == "stall"])
    intervals = merged(found, most)
    phases = phases_of(events, time.time() if job.ended is None else job.ended)
    if found and not phases:  # the events of its start are not kept any more
        phases = [Phase(kind="train", begin=found[0].begin, end=found[-1].end)]
    busy_s, waits_s = _totals(found)
    spent_s = busy_s + sum(waits_s.values())
    stall = sum(waits_s.values()) / spent_s if spent_s else None
    summary = [*_tier_changes(found), *_phase_times(phases)] if stall is None else [
        _say_stall(stall, waits_s, spent_s), *_tier_changes(found), *_phase_times(phases)
    ]  # fmt: skip
    return JobTimeline(job_id=job.id, phases=phases, intervals=intervals, stall=stall, summary=summary)


def phases_of(events: Sequence[Event], until: float) -> list[Phase]:
    """Return the phases that events begin and end; the last one ends at `until` if nothing ended it.

    Args:
        events: Of one job, in order.
        until: Unix seconds.
    """
    phases: list[Phase] = []
    current: Phase | None = None
    for event in events:
        kind = _BEGINS.get(event.kind)
        if kind is None and event.kind not in _ENDS:
            continue
        if current is not None:
            current.end = max(current.begin, event.at)
            phases += _filled(current, event)
        current = None if kind is None else Phase(kind=kind, begin=event.at, end=event.at)
        if kind == "queued":
            current = _still_waiting(phases) or current
    if current is not None:
        current.end = max(current.begin, until)
        phases.append(current)
    return phases


def _still_waiting(phases: list[Phase]) -> Phase | None:
    """Take off the wait that a start of a moment has broken off, as when data is still being made."""
    if len(phases) < 2 or (phases[-2].kind, phases[-1].kind) != ("queued", "start"):
        return None
    if phases[-1].end - phases[-1].begin > MOMENT_S:
        return None
    phases.pop()
    return phases.pop()


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
        last.end = max(last.end, interval.end)
        last.busy_s += interval.busy_s
        last.first_wait_s += interval.first_wait_s
        for name, spent in interval.waits_s.items():
            last.waits_s[name] = last.waits_s.get(name, 0.0) + spent
    return found


def _totals(intervals: Sequence[Interval]) -> tuple[float, Counter[str]]:
    waits_s: Counter[str] = Counter()
    for interval in intervals:
        waits_s.update(interval.waits_s)
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
    took: Counter[str] = Counter()
    for phase in phases:
        took[phase.kind] += cast("int", phase.end - phase.begin)
    said = [f"{PHASES[kind]} {format_seconds(took[kind])}" for kind in PHASES if took[kind] > 0]
    return [f"The job {', '.join(said)}."] if said else []


# ----------------------------------------------------------------------------------------------------------
# The picture on the page of a job: phases on one line, below it how each interval of training was spent.


WIDTH, HEIGHT = 1000.0, 96.0
"""Size of the picture of the intervals, in its own units."""
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
    "busy": "in steps",
    "other": "validation, checkpoints and the rest",
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

    def across(at: float) -> float:
        return round(WIDTH * min(1.0, max(0.0, (at - begin) / total_s)), 2)

    phases = [
        Rect(kind=one.kind, text=f"{PHASES[one.kind]} {format_seconds(one.end - one.begin)}",
             x=across(one.begin), y=0.0, width=round(across(one.end) - across(one.begin), 2), height=14.0)
        for one in timeline.phases
    ]  # fmt: skip
    columns: list[Rect] = []
    totals: Counter[str] = Counter()
    for one in timeline.intervals:
        spent_s = {"busy": one.busy_s, "other": one.other_s, "first": one.first_wait_s, **one.waits_s}
        for kind, seconds in spent_s.items():
            totals[kind] += cast("int", seconds)
        columns += _column(spent_s, across(one.begin), across(one.end))
    legend = [(kind, name, format_seconds(totals[kind])) for kind, name in SPENT.items() if totals[kind] > 0]
    ticks = [format_seconds(total_s * place / (TICKS - 1)) if place else "0" for place in range(TICKS)]
    return TimelinePicture(
        phases=phases, columns=columns, legend=legend, ticks=ticks, summary=timeline.summary
    )


def _column(spent_s: Mapping[str, float], begin: float, end: float) -> list[Rect]:
    """Return the parts of one interval, from the bottom; together they are as high as the picture."""
    total_s, y = sum(spent_s.values()), HEIGHT
    found: list[Rect] = []
    for kind in (name for name in SPENT if spent_s.get(name, 0.0) > 0):
        part = spent_s[kind] / total_s
        y -= (height := HEIGHT * part)
        found.append(
            Rect(kind=kind, text=f"{SPENT[kind]} {format_percent(part)}", x=begin, y=round(y, 2),
                 width=round(end - begin, 2), height=round(height, 2))
        )  # fmt: skip
    return found
