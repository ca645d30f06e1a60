"""Batches on their way to steps, where ranks wait for the same things: events in turn, the same for a seed.

Each rank loads some batches ahead. A batch goes through places one after another: it waits for the store's
and its node's link, for a disk, for a core. A step begins when its batch is there and, of several ranks, when
all have done the one before. With one rank, one place and steps of one length this is what the planner's
formula says; `tests/plan/test_simulation.py` holds it to that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_EVENTS = 20_000
"""Events of one simulation; longer epochs continue at the same pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One place that a batch goes through."""

    place: str
    """`store` is one for all, `own ...` one for each rank, every other name one on each node."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What goes on, on so many nodes."""

    nodes: int
    ranks: int
    """On each node."""
    visits: Sequence[Visit]
    """Of one batch, while steps go on."""
    inline_s: float
    """Seconds of a batch that its step waits for in any case."""
    step_s: float
    step_cores: float = 0.0
    """Cores of the node that a step and `inline_s` keep busy; below 1 they need none."""
    cores: int = 1
    """Of a node."""
    readers: int = 1
    """Of a rank, at `own readers`."""
    depth: int = 1
    spread: float = 0.0
    sync_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What came of it."""

    first_s: float
    """Until the first batch was there on every rank."""
    period_s: float
    """Seconds of a step with its wait, once it runs evenly."""
    busy: dict[str, float]
    """Per place the part of the time that it was at work; `step` is the step itself."""


class _Place:
    """So many alike that serve one after another."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * max(1, count)
        self.worked_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When it is done with what came now."""
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        self.worked_s += seconds
        return begin + seconds

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._free)


class _Run:
    """One simulation."""

    def __init__(self, traffic: Traffic, steps: int) -> None:
        self._of, self._steps = traffic, steps
        world = traffic.nodes * traffic.ranks
        self._events: list[tuple[float, int, int, int]] = []
        self._number = 0
        self._places: dict[tuple[str, int], _Place] = {}
        self._asked, self._ready, self._done = [0] * world, [0] * world, [0] * world
        self._at_work = [False] * world
        self._left = [world] * steps
        self.ends_s: list[float] = []
        self.first_s = 0.0
        sigma = float(np.sqrt(np.log1p(traffic.spread**2)))
        draws = np.random.default_rng(traffic.seed).normal(-(sigma**2) / 2, sigma, (steps, world))
        self._lengths = traffic.inline_s + traffic.step_s * np.exp(draws)

    def go(self) -> None:
        """Until every rank has done its steps."""
        world = len(self._asked)
        for rank in range(world):
            self._ask(rank, 0.0)
        while self._events:
            now, _, rank, stage = heapq.heappop(self._events)
            if stage < 0:
                self._end_step(rank, now)
            elif stage < len(self._of.visits):
                visit = self._of.visits[stage]
                self._push(self._place(visit.place, rank).serve(now, visit.seconds), rank, stage + 1)
            else:
                self._ready[rank] += 1
                if self._ready[rank] == 1 and not self._done[rank]:
                    self.first_s = max(self.first_s, now)
                self._step(rank, now)

    def busy(self) -> dict[str, float]:
        """See `Passed`."""
        found: dict[str, float] = {}
        total_s = self.ends_s[-1] or 1.0
        for (name, _), place in self._places.items():
            found[name] = max(found.get(name, 0.0), place.worked_s / place.count / total_s)
        found["step"] = self._steps * self._of.step_s / total_s
        return found

    def _push(self, at: float, rank: int, stage: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, rank, stage))

    def _place(self, name: str, rank: int) -> _Place:
        whose = -1 if name == "store" else rank if name.startswith("own ") else rank // self._of.ranks
        key = (name, whose)
        if key not in self._places:
            count = {"cores": self._of.cores, "own readers": self._of.readers}.get(name, 1)
            self._places[key] = _Place(count)
        return self._places[key]

    def _ask(self, rank: int, now: float) -> None:
        """Begin to load batches until so many are ahead of the step."""
        while self._asked[rank] < min(self._steps, self._done[rank] + self._at_work[rank] + self._of.depth):
            self._asked[rank] += 1
            self._push(now, rank, 0)

    def _step(self, rank: int, now: float) -> None:
        """Begin a step where its batch is there and all ranks are through with the one before."""
        number = self._done[rank]
        if self._at_work[rank] or not self._ready[rank] or (number and self._left[number - 1]):
            return
        self._ready[rank] -= 1
        self._at_work[rank] = True
        seconds, begin = float(self._lengths[number, rank]), max(now, self.ends_s[-1] if number else 0.0)
        cores = self._place("cores", rank)
        wanted = min(int(self._of.step_cores), self._of.cores)
        ends = [cores.serve(begin, seconds) for _ in range(wanted)]
        self._push(max(ends, default=begin + seconds), rank, -1)
        self._ask(rank, now)

    def _end_step(self, rank: int, now: float) -> None:
        number = self._done[rank]
        self._done[rank] += 1
        self._at_work[rank] = False
        self._left[number] -= 1
        if not self._left[number]:
            self.ends_s.append(now + self._of.sync_s)
            for other in range(len(self._done)):
                self._step(other, now)
        self._ask(rank, now)


def passed(traffic: Traffic, steps: int) -> Passed:
    """So many steps on every rank, or as many as tell how they go on.

    >>> link = Visit(place="link", seconds=0.01)
    >>> of = Traffic(nodes=1, ranks=2, visits=[link], inline_s=0, step_s=0.015, depth=2)
    >>> round(passed(of, 1000).period_s, 4)  # both need the link once in each step
    0.02
    """
    world = traffic.nodes * traffic.ranks
    most = max(4 * traffic.depth + 8, MOST_EVENTS // (world * (len(traffic.visits) + 2)))
    shown = min(steps, most)
    run = _Run(traffic, shown)
    run.go()
    early = min(shown - 1, max(2 * traffic.depth, shown // 5))
    first = run.ends_s[early - 1] if early else 0.0
    return Passed(
        first_s=run.first_s,
        period_s=(run.ends_s[-1] - first) / (shown - early),
        busy=run.busy(),
    )
