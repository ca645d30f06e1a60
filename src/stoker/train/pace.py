"""Report a run's meter during the run: to listeners, to `stall.jsonl`, and in the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.monitor.journal import EVERY_S, StallJournal, journal_name
from stoker.monitor.meter import PARTS, StallMeter, StallReport
from stoker.plan.tiers import TIERS
from stoker.scale.ranks import ALONE, Ranks
from stoker.schema import Json
from stoker.train.run import Progress

TELL_S = 1.0
"""Seconds between two events `stall`."""


class Pace:
    """Reads the meter of one call of `train`. A run without a meter has one that says nothing."""

    def __init__(
        self,
        meter: StallMeter | None,
        folder: Path,
        tell: Callable[[str, Mapping[str, Json]], None],
        ranks: Ranks = ALONE,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._tell = tell
        self._ranks = ranks
        self._facts: dict[str, Json] = {}
        self._total = 0
        self._journals: tuple[StallJournal, StallJournal] | None = None
        if meter is not None:
            meter.reset()
            folder.mkdir(parents=True, exist_ok=True)  # on a machine without rank 0 it does not exist yet
            path = folder / journal_name(meter.epoch().rank)
            self._journals = (
                StallJournal(meter, every_s=TELL_S, clock=clock),
                StallJournal(meter, path, every_s=EVERY_S, clock=clock),
            )

    def begin_pass(self) -> None:
        """Start counting again: time between two passes is neither waiting nor stepping."""
        if self._meter is not None and self._journals is not None:
            self._meter.reset()
            for journal in self._journals:
                journal.restarted()

    def tick(self, progress: Progress, total: int) -> None:
        """After a step: tell and write what is due."""
        if self._journals is None:
            return
        told, written = self._journals
        self._facts = {"step": progress.step, "epoch": progress.epoch + 1}
        self._total = total
        self._say(told.tick())
        written.tick(self._facts)

    def _say(self, interval: StallReport | None) -> None:
        if interval is not None:
            self._tell("stall", {**self._facts, "total": self._total, **interval.to_json()})

    def end_pass(self, progress: Progress) -> None:
        """Add the pass of all ranks to `progress`."""
        if self._meter is None or self._journals is None:
            return
        told, written = self._journals
        self._say(told.cut())  # a pass shorter than an interval is one
        written.cut(self._facts)
        report = self._meter.epoch()
        own = [report.wait_s, report.step_s, report.batches]
        own += [report.tiers.get(tier, 0) for tier in TIERS] + [report.parts.get(part, 0.0) for part in PARTS]
        wait_s, step_s, batches, *rest = self._ranks.sums(own, "the end of a pass")
        progress.wait_s += wait_s
        progress.step_s += step_s
        progress.timed += int(batches)
        for tier, examples in zip(TIERS, rest, strict=False):
            if examples:
                progress.tiers[tier] = progress.tiers.get(tier, 0) + int(examples)
        for part, seconds in zip(PARTS, rest[len(TIERS) :], strict=True):
            if seconds:
                progress.parts[part] = progress.parts.get(part, 0.0) + seconds

    def close(self, progress: Progress) -> None:
        """Write the summary of this call."""
        if self._journals is not None:
            self._journals[1].close({"step": progress.step, "epoch": progress.epoch})
