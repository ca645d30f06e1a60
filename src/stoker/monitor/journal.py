"""A meter's figures as they come: one JSON line per interval, and a summary at the end.

Usable in any training loop: `tick()` after each step costs a look at the clock until an interval is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.monitor.meter import StallMeter, StallReport
from stoker.runtime.disk import explained
from stoker.schema import Json

EVERY_S = 10.0
"""Seconds of an interval: a day of training is 8,640 lines, some 3 MB."""


def journal_name(rank: int) -> str:
    """The file of a rank in a run's folder.

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
        """The interval that is over by now, written down together with `facts`; None before it is."""
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
        """The meter was reset since the last interval was cut, as between two passes."""
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
        with explained(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
