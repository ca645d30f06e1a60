"""What one batch asks of links, disks and cores: the planner's loads, taken apart by what they wait for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.errors import ResourceError
from stoker.plan.rates import Rates
from stoker.plan.resources import Resources
from stoker.plan.simulation.queues import Traffic, Visit
from stoker.plan.simulation.scenario import Scenario
from stoker.plan.tiers import DEVICE_RESERVE, DEVICE_RESERVE_UNSEEN, Demand, Plan, plan_tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one batch of one rank needs of shared resources. Seconds are those without a queue."""

    inline_s: float = 0.0
    """The step waits for these in any case."""
    beside_s: float = 0.0
    """The loading thread of a rank works on it during the step."""
    read_s: float = 0.0
    """One of its readers works on it."""
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
    """What one rank asks of its node, which serves it from so many records."""
    return Demand(
        records=records,
        record_bytes=scenario.record_bytes,
        batch_examples=scenario.batch,
        example_bytes=scenario.taken_bytes,
        device="cpu" if scenario.on_cpu else "cuda",
        step_cpus=scenario.busy_cores,
    )


def resources_of(scenario: Scenario) -> Resources:
    """One rank's share of its node; host memory is shared by all of them, so it is not divided."""
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


def planned(scenario: Scenario, tier: str, records: int) -> Plan:
    """The planner's decision for one rank; what bytes from disks and links take is left to queues.

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
        raise ResourceError(str(error).partition(". Use ")[0].removeprefix(f"tier {tier}: ")) from error


def _reserve(scenario: Scenario) -> int | None:
    """GPU memory left to the model: what it takes and the planner's part for the rest; None: its rule."""
    if scenario.on_cpu:
        return None
    part = DEVICE_RESERVE_UNSEEN if scenario.model_bytes is None else DEVICE_RESERVE
    return int(scenario.gpu_memory_bytes * part) + (scenario.model_bytes or 0)


def asked_of_tiers(scenario: Scenario, plan: Plan, *, far: float, near: float) -> Asked:
    """A batch that draws from the tiers of `plan` by what they hold.

    Args:
        scenario: The run.
        plan: Where records lie, of `planned`.
        far, near: Of what the disk tier serves, the parts that come from the store, and from the node's disk.
    """
    total = sum(row.records for row in plan.rows) or 1
    inline_s = beside_s = aside_s = disk = 0.0
    for row in plan.rows:
        part = row.records / total
        if not row.records:
            continue
        inline_s += part * (row.direct_s or 0.0) + (1 - part) * scenario.fixed_s.get(row.tier, 0.0)
        # What the step waits for in any case is not done during it, and keeps the loading thread busy too.
        busy_s = part * (row.load_s or 0.0) if row.beside_s else 0.0
        if row.tier == "disk":
            disk = part
        if row.tier == "disk" and row.served is not None and not far:
            aside_s += busy_s  # found with the disk itself: what it takes, whoever waits
        else:
            beside_s += busy_s
    taken = disk * scenario.batch * scenario.taken_bytes
    fetched = disk * scenario.batch * scenario.fetched_bytes
    asked = 1.0  # requests for one example; in block order one brings its neighbours along
    if scenario.order == "block":
        asked = min(1.0, scenario.record_bytes / scenario.fetch_bytes)
    requests = far * disk * scenario.batch * asked
    found = "disk" in scenario.served and not far
    return Asked(
        inline_s=inline_s,
        beside_s=beside_s,
        aside_s=aside_s + _latency_s(scenario, requests),
        requests=requests,
        far_bytes=far * fetched,
        disk_bytes=0.0 if found else near * taken,
    )


def _latency_s(scenario: Scenario, requests: float) -> float:
    """What so many requests wait for answers, so many of them at once; their bytes are the links' affair."""
    return scenario.store_latency_s * requests / scenario.requests


def encoded_for_one(scenario: Scenario) -> float:
    """Samples that are encoded for one example: 1, or of a window its part of the sample."""
    return min(1.0, scenario.taken_bytes / scenario.record_bytes)


def asked_to_encode(scenario: Scenario) -> Asked:
    """A batch whose samples are read and encoded for it."""
    samples = scenario.batch * encoded_for_one(scenario)
    raw = samples * scenario.sample_bytes
    read_s, encode_s = samples * scenario.read_s, samples * scenario.encode_s
    requests = float(scenario.batch) if scenario.shared else 0.0
    wait_s = _latency_s(scenario, requests)
    moved = {"far_bytes": raw} if scenario.shared else {"disk_bytes": raw}
    if not scenario.readers:
        return Asked(inline_s=read_s, encode_s=encode_s, aside_s=wait_s, requests=requests, **moved)
    return Asked(read_s=read_s, encode_s=encode_s, aside_s=wait_s, requests=requests, **moved)


def traffic_of(scenario: Scenario, asked: Asked) -> Traffic:
    """The queues of a run in which every batch asks that."""
    whole = max(1, math.ceil(scenario.node_cores))
    slower = whole / scenario.node_cores if scenario.gpus * scenario.busy_cores > scenario.node_cores else 1.0
    spare = scenario.node_cores / scenario.gpus - scenario.busy_cores
    visits = [
        Visit(place="store", seconds=asked.far_bytes / (scenario.store_bytes_s or math.inf)),
        Visit(place="link", seconds=asked.far_bytes / (scenario.network_bytes_s or math.inf)),
        Visit(place="disk", seconds=asked.disk_bytes / scenario.disk_bytes_s),
        Visit(place="own wait", seconds=asked.aside_s),
        Visit(place="own readers", seconds=asked.read_s),
        Visit(place="own thread", seconds=asked.beside_s),
    ]
    return Traffic(
        nodes=scenario.nodes,
        ranks=scenario.gpus,
        visits=[visit for visit in visits if visit.seconds > 0],
        inline_s=asked.inline_s + asked.encode_s,
        step_s=scenario.step_s * slower,
        step_cores=scenario.busy_cores,
        cores=whole,
        readers=max(1, min(scenario.readers, int(spare))),
        depth=scenario.depth,
        spread=scenario.step_spread,
        sync_s=scenario.sync_s,
        seed=scenario.seed,
    )
