"""Repeat a trial until the mean of its results is known well enough, and say in which range a run will lie.

Two intervals of the same results (Student's t, 90 %). That of the mean decides when to stop: repeating makes
it narrower. That of one more result is reported: a run is one more result, and on a shared machine two runs
differ however often the trials were repeated.

Sources: repeat until the interval of the mean is narrow: Georges, Buytaert and Eeckhout, "Statistically
rigorous Java performance evaluation", OOPSLA 2007. The interval of one more result (a prediction interval):
Hahn and Meeker, "Statistical Intervals", Wiley 1991. Both take results for independent and normal;
`tests/plan/test_trials.py` counts how often they hold where they are not.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LEAST_TRIALS = 4
"""Trials on a quiet machine. If each meets one of two states, three are alike in one case of four, and hide
the other state. Four are alike in one of eight."""
MOST_TRIALS = 12
NARROW = 0.05
"""Half of the interval of the mean, as a part of the mean, at which no more trials are needed."""
_T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
"""The 95th percentile of Student's t by degrees of freedom, from 1: 90 % lie between it and its negative."""
_NORMAL_95 = 1.645


class Interval(NamedTuple):
    """The lowest and the highest likely value."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """Their difference."""
        return self.high - self.low

    def overlaps(self, other: Interval) -> bool:
        """Return True if a value may lie in both.

        >>> Interval(0.0, 0.2).overlaps(Interval(0.1, 0.3)), Interval(0.0, 0.1).overlaps(Interval(0.2, 0.3))
        (True, False)
        """
        return self.low <= other.high and other.low <= self.high


def _t(count: int) -> float:
    return _T_95[count - 2] if count - 2 < len(_T_95) else _NORMAL_95


def mean_interval(results: Sequence[float]) -> Interval:
    """Return the 90 % interval of the mean that results come from; at least two.

    >>> [round(bound, 2) for bound in mean_interval([9.0, 10.0, 11.0, 10.0])]
    [9.04, 10.96]
    """
    half = _t(len(results)) * statistics.stdev(results) / math.sqrt(len(results))
    mean = statistics.fmean(results)
    return Interval(mean - half, mean + half)


def next_interval(results: Sequence[float]) -> Interval | None:
    """Return the 90 % interval of one more result; None with fewer than two.

    >>> [round(bound, 2) for bound in next_interval([9.0, 10.0, 11.0, 10.0])]
    [7.85, 12.15]
    """
    if len(results) < 2:
        return None
    half = _t(len(results)) * statistics.stdev(results) * math.sqrt(1 + 1 / len(results))
    mean = statistics.fmean(results)
    return Interval(mean - half, mean + half)


def repeat_trial(
    trial: Callable[[int], float | None],
    limit_s: float,
    *,
    least: int = LEAST_TRIALS,
    most: int = MOST_TRIALS,
    narrow: float = NARROW,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return results of a trial, repeated until their mean is known well enough or the time is over.

    Args:
        trial: Called with 0, 1, ...; None: it has no result. If the `least` have none, it is given up.
        limit_s: After so many seconds only the `least` trials are begun, after three times as many none.
        least, most: Trials, at least and at most.
        narrow: Half of the interval of the mean, as a part of the mean, that is narrow enough.
        clock: Seconds.
    """
    begin, results = clock(), list[float]()
    for number in range(most):
        spent_s = clock() - begin
        if len(results) >= least and (spent_s >= limit_s or _is_narrow(results, narrow)):
            break
        if number and spent_s >= 3 * limit_s:
            break
        result = trial(number)
        if result is not None:
            results.append(result)
        elif not results and number + 1 >= least:
            break
    return results


def _is_narrow(results: Sequence[float], narrow: float) -> bool:
    found = mean_interval(results)
    return found.width / 2 <= narrow * abs(found.low + found.high) / 2


# ----------------------------------------------------------------------------------------------------------
# How much of the machine other processes used meanwhile: why trials differ.


SHARED_CPUS, SHARED_PRESSURE = 0.25, 0.1
"""Cores that others used, or the part of the time that some process waited for one, from which on a machine
counts as shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """The cores that other processes used during some time."""

    cpus: float
    """Cores of the machine that this process may run on."""
    others_cpus: float
    """Of those, the cores that all other processes used together, on average."""
    pressure: float | None
    """Part of the time that some process waited for a core (`/proc/pressure/cpu`); None: not known here. It
    is known of all cores together, so not where this process may use only some."""

    @property
    def is_shared(self) -> bool:
        """True if others used so much that times vary by it."""
        return self.others_cpus >= SHARED_CPUS or (
            self.pressure is not None and self.pressure >= SHARED_PRESSURE and self.others_cpus > 0.1
        )


class UseMeter:
    """Counts what other processes use from now on, of the cores that this one may run on.

    What runs on other cores of the machine slows nothing here, so it is left out.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.perf_counter,
        cores: Set[int] | None = None,
    ) -> None:
        """`cores`: numbers of those that this process may run on; None: as the system says now."""
        self._proc, self._clock = proc, clock
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._begin = self._now()

    def read(self) -> MachineUse | None:
        """Return the use since the meter was made; None where the system does not tell."""
        begin, end = self._begin, self._now()
        wall_s = end[0] - begin[0]
        if begin[1] is None or end[1] is None or wall_s <= 0:
            return None
        pressure = None
        if begin[3] is not None and end[3] is not None:
            pressure = min(1.0, max(0.0, (end[3] - begin[3]) / wall_s))
        others_s = end[1] - begin[1] - (end[2] - begin[2])
        return MachineUse(
            cpus=float(len(self._cores)), others_cpus=max(0.0, others_s / wall_s), pressure=pressure
        )

    def _now(self) -> tuple[float, float | None, float, float | None]:
        """Return the time, and seconds of cores used by all, used by this process, and of waiting for one."""
        busy_s = self._busy_s()
        is_entire_machine = self._cores >= busy_s.keys()
        return (
            self._clock(),
            sum(busy_s[core] for core in self._cores) if busy_s.keys() >= self._cores else None,
            time.process_time(),
            self._waited_s() if is_entire_machine else None,
        )

    def _busy_s(self) -> dict[int, float]:
        """Return seconds that each core was at work, by its number; empty where the system does not tell."""
        try:
            text = (self._proc / "stat").read_text()
        except OSError:
            return {}
        found: dict[int, float] = {}
        for core, times in re.findall(r"^cpu(\d+) (\d+(?: \d+){6,})", text, re.MULTILINE):
            user, nice, system, _idle, _wait, irq, softirq = map(int, times.split()[:7])
            found[int(core)] = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        return found

    def _waited_s(self) -> float | None:
        try:
            found = re.search(r"some .*total=(\d+)", (self._proc / "pressure/cpu").read_text())
        except OSError:  # older kernels, and systems that keep it off
            return None
        return None if found is None else int(found[1]) / 1e6


# ----------------------------------------------------------------------------------------------------------
# In words.


WIDE = 0.1
"""A range of stalls wider than this is explained."""


def say_range(likely: Interval) -> str:
    """Say a likely range of fractions in a sentence.

    >>> say_range(Interval(0.02, 0.09)), say_range(Interval(0.0, 0.21))
    ('likely between 2 and 9 %', 'likely between 0 and 21 %')
    """
    low, high = _percentages(likely)
    return f"likely {low} %" if low == high else f"likely between {low} and {high} %"


def format_range(likely: Interval) -> str:
    """Return a range of fractions for a column of a table.

    >>> format_range(Interval(0.004, 0.09)), format_range(Interval(0.0056, 0.0058))
    ('0.4 to 9 %', '0.6 %')
    """
    low, high = _percentages(likely)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _percentages(likely: Interval) -> list[str]:
    return [f"{100 * bound:.{1 if 0 < bound < 0.0095 else 0}f}" for bound in likely]


def say_why_wide(likely: Interval, uses: Sequence[MachineUse | None]) -> str:
    """Say why a range of stalls is wide, and what to do; empty where it is narrow.

    Args:
        likely: The range.
        uses: Of the machine, during the trials of each tier.
    """
    if likely.width <= WIDE:
        return ""
    known = [use for use in uses if use is not None]
    most = max(known, key=lambda use: use.others_cpus, default=None)
    if most is not None and most.is_shared:
        waited = (
            ""
            if most.pressure is None
            else f", and processes waited for a core {most.pressure:.0%} of the time"
        )
        return (
            f" (a wide range: during the trials other processes used {most.others_cpus:.1f} of {most.cpus:g} "
            f"cores{waited.replace('%', ' %')}. Stop them and plan again, or give this process cores of its "
            "own, as with taskset)"
        )
    others = (
        "how much other processes used is not known here" if most is None else "others used few of the cores"
    )
    return (
        f" (a wide range: the trials differed, and {others}. The drive may do that, or threads that take "
        "turns: plan again, and compare with the stall of a run)"
    )
