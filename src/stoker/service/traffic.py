"""Counts of answers and their times for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of answer times."""


class RequestTraffic:
    """Counts of one process; changed only by its event loop."""

    def __init__(self) -> None:
        self.answers = Counter[int]()
        """Answers by status, refusals included."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def note(self, status: int, seconds: float) -> None:
        """Count one answer that began after `seconds`."""
        self.answers[status] += 1
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def lines(self) -> Iterator[str]:
        """Yield the counts in Prometheus' text format."""
        yield from counts("stoker_answers_total", "counter", "status", self.answers)
        yield "# TYPE stoker_answer_seconds histogram"
        total = 0
        for bound, count in zip((*BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += count
            yield f'stoker_answer_seconds_bucket{{le="{bound}"}} {total}'
        yield f"stoker_answer_seconds_sum {self._seconds:.6f}"
        yield f"stoker_answer_seconds_count {total}"


def counts(
    name: str, kind: str, label: str, found: Mapping[int, float] | Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines of one metric with a label; no line without values.

    >>> list(counts("jobs", "gauge", "state", {"queued": 2}))
    ['# TYPE jobs gauge', 'jobs{state="queued"} 2']
    """
    if found:
        yield f"# TYPE {name} {kind}"
    for value, count in found.items():
        yield f'{name}{{{label}="{value}"}} {count}'
