"""Batches on their way to steps, where ranks wait for the same things: events in turn, the same for a seed.

Each rank loads some batches ahead. A batch goes through places one after another: it waits for the store's
and its node's link, for a disk, for a core. A step begins when its batch is there and, of several ranks, when
all have done the one before. With one rank, one place and steps of one length this is what the planner's
formula says; `tests/plan/test_simulation.py` holds it to that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.errors import ResourceError
from stoker.extras.simulation.scenario import Scenario
from stoker.plan.rates import Rates
from stoker.plan.resources import Resources
from stoker.plan.tiers import DEVICE_RESERVE, DEVICE_RESERVE_UNSEEN, Demand, Plan, plan_tiers

MOST_EVENTS = 20_000
"""Events of one simulation; longer epochs continue at the same pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One place that a batch goes through."""

    place: str
    """`store` is one for all, `own ...` one for each rank, every other name one on each node."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraffic:
    """The traffic of a run on so many nodes."""

    nodes: int
    ranks: int
    """On each node."""
    visits: Sequence[Visit]
    """Of one batch, while steps compute."""
    inline_s: float
    """Seconds of a batch that its step waits for in any case."""
    step_s: float
    step_cores: float = 0.0
    """Cores of the node that a step and `inline_s` keep busy; below 1 they need none."""
    cores: int = 1
    """Of a node."""
    workers: int = 1
    """Of a rank, at `own workers`."""
    depth: int = 1
    spread: float = 0.0
    sync_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTimes:
    """Its result."""

    first_s: float
    """Until the first batch was there on every rank."""
    period_s: float
    """Seconds of a step with its wait, once it runs evenly."""
    busy: dict[str, float]
    """Per place the part of the time that it was at work; `step` is the step itself."""


class _Server:
    """So many alike that serve one after another."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * max(1, count)
        self.worked_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when it has served the new request."""
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        self.worked_s += seconds
        return begin + seconds

    @property
    def count(self) -> int:
        """Their number."""
        return len(self._free)


class _EventLoop:
    """One simulation."""

    def __init__(self, traffic: RunTraffic, steps: int) -> None:
        self._of, self._steps = traffic, steps
        world_size = traffic.nodes * traffic.ranks
        self._events: list[tuple[float, int, int, int]] = []
        self._number = 0
        self._places: dict[tuple[str, int], _Server] = {}
        self._asked, self._ready, self._done = [0] * world_size, [0] * world_size, [0] * world_size
        self._at_work = [False] * world_size
        self._left = [world_size] * steps
        self.ends_s: list[float] = []
        self.first_s = 0.0
        sigma = float(np.sqrt(np.log1p(traffic.spread**2)))
        draws = np.random.default_rng(traffic.seed).normal(-(sigma**2) / 2, sigma, (steps, world_size))
        self._lengths = traffic.inline_s + traffic.step_s * np.exp(draws)

    def go(self) -> None:
        """Run until every rank has done its steps."""
        world_size = len(self._asked)
        for rank in range(world_size):
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
        """See `QueueTimes`."""
        found: dict[str, float] = {}
        total_s = self.ends_s[-1] or 1.0
        for (name, _), place in self._places.items():
            found[name] = max(found.get(name, 0.0), place.worked_s / place.count / total_s)
        found["step"] = self._steps * self._of.step_s / total_s
        return found

    def _push(self, at: float, rank: int, stage: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, rank, stage))

    def _place(self, name: str, rank: int) -> _Server:
        whose = -1 if name == "store" else rank if name.startswith("own ") else rank // self._of.ranks
        key = (name, whose)
        if key not in self._places:
            count = {"cores": self._of.cores, "own workers": self._of.workers}.get(name, 1)
            self._places[key] = _Server(count)
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


def simulate_queues(traffic: RunTraffic, steps: int) -> QueueTimes:
    """Simulate so many steps on every rank, or as many as show their steady pace.

    >>> link = Visit(place="link", seconds=0.01)
    >>> of = RunTraffic(nodes=1, ranks=2, visits=[link], inline_s=0, step_s=0.015, depth=2)
    >>> round(simulate_queues(of, 1000).period_s, 4)  # both need the link once in each step
    0.02
    """
    world_size = traffic.nodes * traffic.ranks
    most = max(4 * traffic.depth + 8, MOST_EVENTS // (world_size * (len(traffic.visits) + 2)))
    shown = min(steps, most)
    run = _EventLoop(traffic, shown)
    run.go()
    early = min(shown - 1, max(2 * traffic.depth, shown // 5))
    first = run.ends_s[early - 1] if early else 0.0
    return QueueTimes(
        first_s=run.first_s,
        period_s=(run.ends_s[-1] - first) / (shown - early),
        busy=run.busy(),
    )


# ----------------------------------------------------------------------------------------------------------
# What one batch asks of links, disks and cores: the planner's loads, taken apart by what they wait for.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """Load of one batch of one rank on shared resources. Seconds are those without a queue."""

    inline_s: float = 0.0
    """The step waits for these in any case."""
    overlapped_s: float = 0.0
    """The loading thread of a rank works on it during the step."""
    read_s: float = 0.0
    """One of its workers works on it."""
    aside_s: float = 0.0
    """Of its own reads, which no other rank's hold up: a figure that was measured, or latency."""
    requests: float = 0.0
    """To the store."""
    far_bytes: float = 0.0
    """From the store, over the node's link."""
    disk_bytes: float = 0.0
    """From the node's own disk."""
    encode_s: float = 0.0
    """The device encodes, in line."""


def demand_of(scenario: Scenario, records: int) -> Demand:
    """Load of one rank on its node, which serves it from so many records."""
    return Demand(
        records=records,
        record_bytes=scenario.record_bytes,
        batch_examples=scenario.batch,
        example_bytes=scenario.taken_bytes,
        device="cpu" if scenario.on_cpu else "cuda",
        step_cpus=scenario.busy_cores,
    )


def resources_of(scenario: Scenario) -> Resources:
    """Return one rank's share of its node; host memory is shared by all of them, so it is not divided."""
    return Resources(
        host_bytes=scenario.host_memory_bytes,
        host_total_bytes=scenario.host_memory_bytes,
        host_limit="one node",
        device="cpu" if scenario.on_cpu else "cuda",
        device_bytes=scenario.gpu_memory_bytes,
        device_total_bytes=scenario.gpu_memory_bytes,
        device_name="the GPU",
        cpus=scenario.node_cores / scenario.gpus,
    )


def plan_tier(scenario: Scenario, tier: str, records: int) -> Plan:
    """Return the planner's decision for one rank; what bytes from disks and links take is left to queues.

    Raises:
        ResourceError: They do not fit that tier; the message is for this page, not for settings.
    """
    rates = Rates(
        copy_bytes_s=scenario.copy_bytes_s,
        disk_bytes_s=math.inf,
        h2d_bytes_s=scenario.h2d_bytes_s,
        device_bytes_s=scenario.device_bytes_s,
        measured=True,
        served=scenario.served,
    )
    try:
        return plan_tiers(
            demand_of(scenario, records),
            resources_of(scenario),
            tier=tier,
            reserve_bytes=_reserve(scenario),
            step_s=scenario.step_s,
            rates=rates,
        )
    except ResourceError as error:
        raise ResourceError(error.fact.removeprefix(f"tier {tier}: ")) from error


def _reserve(scenario: Scenario) -> int | None:
    """GPU memory left to the model: what it takes and the planner's part for the rest; None: its rule."""
    if scenario.on_cpu:
        return None
    part = DEVICE_RESERVE_UNSEEN if scenario.model_bytes is None else DEVICE_RESERVE
    return int(scenario.gpu_memory_bytes * part) + (scenario.model_bytes or 0)


def asked_of_tiers(scenario: Scenario, plan: Plan, *, far: float, near: float) -> BatchCost:
    """Return a batch that draws from the tiers of `plan` by what they hold.

    Args:
        scenario: The run.
        plan: Where records are, from `plan_tier`.
        far, near: Of what the disk tier serves, the parts that come from the store, and from the node's disk.
    """
    total = sum(row.records for row in plan.rows) or 1
    inline_s = overlapped_s = aside_s = disk = 0.0
    for row in plan.rows:
        part = row.records / total
        if not row.records:
            continue
        inline_s += part * (row.direct_s or 0.0) + (1 - part) * scenario.fixed_s.get(row.tier, 0.0)
        # What the step waits for in any case is not done during it, and keeps the loading thread busy too.
        busy_s = part * (row.load_s or 0.0) if row.overlapped_s else 0.0
        if row.tier == "disk":
            disk = part
        if row.tier == "disk" and row.served is not None and not far:
            aside_s += busy_s  # found with the disk itself: what it takes, without a queue
        else:
            overlapped_s += busy_s
    taken = disk * scenario.batch * scenario.taken_bytes
    fetched = disk * scenario.batch * scenario.fetched_bytes
    asked = 1.0  # requests for one example; in block order one brings its neighbors along
    if scenario.order == "block":
        asked = min(1.0, scenario.record_bytes / scenario.fetch_bytes)
    requests = far * disk * scenario.batch * asked
    found = "disk" in scenario.served and not far
    return BatchCost(
        inline_s=inline_s,
        overlapped_s=overlapped_s,
        aside_s=aside_s + _latency_s(scenario, requests),
        requests=requests,
        far_bytes=far * fetched,
        disk_bytes=0.0 if found else near * taken,
    )


def _latency_s(scenario: Scenario, requests: float) -> float:
    """What so many requests wait for answers, so many of them at once; their bytes are the links' affair."""
    return scenario.store_latency_s * requests / scenario.requests


def encoded_for_one(scenario: Scenario) -> float:
    """Return samples that are encoded for one example: 1, or of a window its part of the sample."""
    return min(1.0, scenario.taken_bytes / scenario.record_bytes)


def asked_to_encode(scenario: Scenario) -> BatchCost:
    """Return a batch whose samples are read and encoded for it."""
    samples = scenario.batch * encoded_for_one(scenario)
    raw = samples * scenario.sample_bytes
    read_s, encode_s = samples * scenario.read_s, samples * scenario.encode_s
    requests = float(scenario.batch) if scenario.shared else 0.0
    wait_s = _latency_s(scenario, requests)
    moved = {"far_bytes": raw} if scenario.shared else {"disk_bytes": raw}
    if not scenario.workers:
        return BatchCost(inline_s=read_s, encode_s=encode_s, aside_s=wait_s, requests=requests, **moved)
    return BatchCost(read_s=read_s, encode_s=encode_s, aside_s=wait_s, requests=requests, **moved)


def traffic_of(scenario: Scenario, asked: BatchCost) -> RunTraffic:
    """Return the queues of a run in which every batch asks that."""
    whole = max(1, math.ceil(scenario.node_cores))
    slower = whole / scenario.node_cores if scenario.gpus * scenario.busy_cores > scenario.node_cores else 1.0
    spare = scenario.node_cores / scenario.gpus - scenario.busy_cores
    visits = [
        Visit(place="store", seconds=asked.far_bytes / (scenario.store_bytes_s or math.inf)),
        Visit(place="link", seconds=asked.far_bytes / (scenario.network_bytes_s or math.inf)),
        Visit(place="disk", seconds=asked.disk_bytes / scenario.disk_bytes_s),
        Visit(place="own wait", seconds=asked.aside_s),
        Visit(place="own workers", seconds=asked.read_s),
        Visit(place="own thread", seconds=asked.overlapped_s),
    ]
    return RunTraffic(
        nodes=scenario.nodes,
        ranks=scenario.gpus,
        visits=[visit for visit in visits if visit.seconds > 0],
        inline_s=asked.inline_s + asked.encode_s,
        step_s=scenario.step_s * slower,
        step_cores=scenario.busy_cores,
        cores=whole,
        workers=max(1, min(scenario.workers, int(spare))),
        depth=scenario.depth,
        spread=scenario.step_spread,
        sync_s=scenario.sync_s,
        seed=scenario.seed,
    )
