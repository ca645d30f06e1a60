"""Each way of getting records to steps, what it takes, and which one to choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.errors import ResourceError
from stoker.plan.simulation.filling import Filling, fill_beside
from stoker.plan.simulation.loads import (
    Asked,
    asked_of_tiers,
    asked_to_encode,
    encoded_for_one,
    planned,
    traffic_of,
)
from stoker.plan.simulation.mirror import hit_share
from stoker.plan.simulation.pace import Encoding, beside_s, encodings, quickest
from stoker.plan.simulation.queues import Passed, passed
from stoker.plan.simulation.report import choose, limited, say_taken
from stoker.plan.simulation.result import Simulation, Way
from stoker.plan.simulation.scenario import Scenario
from stoker.plan.tiers import Plan
from stoker.units import format_bytes, format_count, format_percent

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Where a way keeps records: what is moved there once, and what then is asked of links."""

    asked: Asked
    fill_bytes: float = 0.0
    """Read once by each node, during the first epochs."""
    cold: tuple[Asked, float] | None = None
    """The same two, `asked` and `far`, of the first epochs: of a copy that fills with what batches read."""
    far: float = 0.0
    """Of what an epoch asks for, the part that comes from where the records lie, once all is filled."""
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    encoded_samples: float = 0.0
    """In an epoch."""
    remark: str = ""


def simulate(scenario: Scenario) -> Simulation:
    """Every way of serving this run, in time, bytes, memory and money; the same for the same scenario.

    Raises:
        ConfigError: A part of it means nothing; what merely does not fit is said in its way.

    >>> one = Scenario(records=10_000, record_bytes=1e6, batch=32, step_s=0.02, host_memory_bytes=2**36)
    >>> found = simulate(one)
    >>> found.fastest, round(found.way("host").epoch_s, 1)
    ('host', 8.7)
    """
    tried = encodings(scenario)
    encoding = quickest(tried)
    base = passed(traffic_of(scenario, Asked()), scenario.batches)
    ways: list[Way] = []
    for name, (what, keep) in WAYS.items():
        try:
            kept = keep(scenario)
        except ResourceError as error:
            ways.append(Way(name=name, what=what, why_not=str(error)))
            continue
        if kept is not None:
            ways.append(_way(scenario, (name, what), kept, None if name == "encode" else encoding, base))
    return Simulation(
        scenario=scenario,
        encodings=tried,
        encoding=encoding,
        beside_s=beside_s(scenario, encoding, scenario.batches * base.period_s),
        ways=tuple(ways),
        taken=say_taken(scenario),
        **choose(scenario, ways),
    )


def _way(
    scenario: Scenario, names: tuple[str, str], kept: _Kept, encoding: Encoding | None, base: Passed
) -> Way:
    """What a way comes to: the queues for an even epoch, the filling for the first one."""
    even = passed(traffic_of(scenario, kept.asked), scenario.batches)
    epoch_s = scenario.batches * even.period_s
    each_node = scenario.epoch_examples / scenario.nodes
    moved = each_node * scenario.fetched_bytes
    if encoding is None:
        moved = each_node * scenario.sample_bytes * encoded_for_one(scenario)
    filling = _filling(scenario, kept, epoch_s, moved)
    early, later = filling.epochs, scenario.epochs - len(filling.epochs)
    start_s = scenario.start_s + (0.0 if encoding is None else encoding.seconds)
    empty = traffic_of(
        scenario,
        replace(kept.asked, far_bytes=scenario.batch * moved / each_node if scenario.shared else 0.0),
    )
    bottleneck, cure = limited(scenario, kept.asked, even, base)
    way = Way(
        name=names[0],
        what=names[1],
        encoding_s=0.0 if encoding is None else encoding.seconds,
        first_batch_s=start_s + passed(empty, 1).first_s,
        first_epoch_s=early[0][0],
        filling_epochs=len(early) if kept.fill_bytes else 0,
        filled_s=filling.filled_s,
        epoch_s=epoch_s,
        stall=max(0.0, 1 - base.period_s / even.period_s),
        first_node_bytes=early[0][1],
        first_bytes=early[0][1] * scenario.nodes,
        epoch_node_bytes=kept.far * moved,
        epoch_bytes=kept.far * moved * scenario.nodes,
        device_bytes=kept.device_bytes,
        host_bytes=kept.host_bytes,
        disk_bytes=kept.disk_bytes,
        encoded_samples=kept.encoded_samples,
        total_s=start_s + sum(seconds for seconds, _ in early) + later * epoch_s,
        read_bytes=scenario.nodes * (sum(moved for _, moved in early) + later * kept.far * moved),
        bottleneck=bottleneck,
        cure=cure,
        remark=kept.remark,
    )
    return replace(way, cost=_cost(scenario, way, encoding))


def _filling(scenario: Scenario, kept: _Kept, epoch_s: float, moved: float) -> Filling:
    """The first epochs, or the first one, of which a node moves `moved` where nothing is kept."""
    far = kept.far
    if kept.cold is not None:
        asked, far = kept.cold
        epoch_s = scenario.batches * passed(traffic_of(scenario, asked), scenario.batches).period_s
    if not kept.fill_bytes:
        return Filling(epochs=((epoch_s, far * moved),), filled_s=0.0)
    demand = (1 - far) * scenario.epoch_examples / scenario.nodes * scenario.taken_bytes
    room = (kept.fill_bytes, demand, epoch_s, scenario.link_bytes_s)
    return fill_beside(*room, after_bytes=far * moved, most=scenario.epochs)


def _cost(scenario: Scenario, way: Way, encoding: Encoding | None) -> float | None:
    """Nodes while they are used, bytes out of the store, a month of keeping the records there."""
    prices = scenario.prices
    if not prices.any_given:
        return None
    training_s = way.total_s - (0.0 if encoding is None else encoding.seconds)
    node_s = scenario.nodes * training_s + (0.0 if encoding is None else encoding.nodes * encoding.seconds)
    read = way.read_bytes + (encoding.read_bytes if encoding else 0.0)
    kept = 0.0 if encoding is None else scenario.set_bytes
    return (
        (prices.node_hour or 0.0) * node_s / 3600
        + (prices.gb_read or 0.0) * (read / GB if scenario.shared else 0.0)
        + (prices.gb_month or 0.0) * kept / GB
    )


def _encode(scenario: Scenario) -> _Kept | None:
    """Nothing is kept; None: what encoding takes is not known."""
    if not scenario.encode_s and not scenario.read_s:
        return None
    samples = scenario.epoch_examples * encoded_for_one(scenario)
    times = samples / scenario.records
    said = f"{format_count(samples)} samples are encoded in each epoch"
    if times >= 1.005:
        said += f", each {times:.2f} times on average: what examples share is encoded for each of them"
    return _Kept(asked=asked_to_encode(scenario), far=1.0, encoded_samples=samples, remark=said)


def _store(scenario: Scenario) -> _Kept | None:
    if not scenario.shared:
        return None
    plan = planned(scenario, "disk", scenario.records)
    remark = _say_blocks(scenario).removeprefix(", ")
    return _Kept(asked=asked_of_tiers(scenario, plan, far=1.0, near=0.0), far=1.0, remark=remark)


def _say_blocks(scenario: Scenario) -> str:
    """What blocks cost, where a record is much smaller than one."""
    times = scenario.fetched_bytes / scenario.taken_bytes
    if times < 1.5:
        return ""
    size, moved = format_bytes(scenario.taken_bytes), format_bytes(scenario.fetched_bytes)
    return (
        f", each read of {size} moves {moved} in blocks, {times:.1f} times as much: "
        "order=block uses neighbours, fetch=1B is a mounted folder"
    )


def _mirror(scenario: Scenario) -> _Kept | None:
    """None where there is nothing to mirror, or room for all of it, which is `disk`."""
    if not scenario.shared or not 0 < scenario.disk_bytes < scenario.set_bytes:
        return None
    hits = _hits(scenario, scenario.disk_bytes / scenario.set_bytes)
    plan = planned(scenario, "disk", scenario.records)
    return _Kept(
        asked=asked_of_tiers(scenario, plan, far=1 - hits, near=hits),
        far=1 - hits,
        cold=(asked_of_tiers(scenario, plan, far=1.0, near=0.0), 1.0),
        disk_bytes=min(scenario.disk_bytes, scenario.set_bytes / (scenario.nodes if hits == 1 else 1)),
        remark=f"the copy has {format_percent(hits)} of what is asked for{_say_blocks(scenario)}",
    )


def _hits(scenario: Scenario, fraction: float) -> float:
    """The part of what is asked for that a copy on each node's disk has, with room for such a part of it."""
    order = scenario.order
    in_block = 1.0 if order == "block" else max(1.0, scenario.fetch_bytes / scenario.record_bytes)
    return hit_share(fraction, scenario.nodes, order=order, in_block=in_block, seed=scenario.seed)


def _disk(scenario: Scenario) -> _Kept:
    return _disk_of(scenario, 1)


def _disk_of(scenario: Scenario, parts: int) -> _Kept:
    """One part of the set on each node's disk."""
    held = scenario.set_bytes / parts
    if (scenario.shared or scenario.disk_bytes) and scenario.disk_bytes < held:
        raise ResourceError(
            f"{format_bytes(held)} of records on each node, {format_bytes(scenario.disk_bytes)} of disk"
        )
    plan = planned(scenario, "disk", scenario.records)
    return _Kept(
        asked=asked_of_tiers(scenario, plan, far=0.0, near=1.0),
        fill_bytes=held if scenario.shared else 0.0,
        far=0.0 if scenario.shared else 1.0,
        disk_bytes=held,
    )


def _in_memory(scenario: Scenario, plan: Plan, held: int) -> _Kept:
    """Records of `plan` in memory, `held` of them on the node; the rest from where they lie.

    Where that is a store, as many of the rest as fit each node's disk are copied there.
    """
    rows = {row.tier: row for row in plan.rows}
    rest = rows["disk"].records
    part = rest / sum(row.records for row in plan.rows)
    room = min(scenario.disk_bytes / scenario.record_bytes, rest) if scenario.shared else 0.0
    hits = _hits(scenario, room / rest) if room else 0.0
    near = hits if scenario.shared else 1.0
    return _Kept(
        asked=asked_of_tiers(scenario, plan, far=1 - near, near=near),
        cold=(asked_of_tiers(scenario, plan, far=1.0, near=0.0), part) if 0 < hits < 1 else None,
        fill_bytes=(held + (room if hits == 1 else 0.0)) * scenario.record_bytes,
        far=part * (1 - hits),
        device_bytes=rows["device"].bytes,
        host_bytes=rows["host"].bytes,
        disk_bytes=room * scenario.record_bytes,
    )


def _host(scenario: Scenario) -> _Kept:
    return _in_memory(scenario, planned(scenario, "host", scenario.records), scenario.records)


def _device(scenario: Scenario) -> _Kept | None:
    """The whole set on each GPU."""
    if scenario.on_cpu:
        return None
    return _in_memory(scenario, planned(scenario, "device", scenario.records), scenario.records)


def _static(scenario: Scenario) -> _Kept | None:
    """Each GPU keeps its own part."""
    if scenario.on_cpu or scenario.world == 1:
        return None
    plan = planned(scenario, "device", math.ceil(scenario.records / scenario.world))
    kept = _in_memory(scenario, plan, math.ceil(scenario.records / scenario.nodes))
    return replace(kept, remark=_say_static(scenario, scenario.world))


def _static_host(scenario: Scenario) -> _Kept | None:
    """Each node keeps the parts of its ranks in memory."""
    if scenario.nodes == 1:
        return None
    records = math.ceil(scenario.records / scenario.nodes)
    kept = _in_memory(scenario, planned(scenario, "host", records), records)
    return replace(kept, remark=_say_static(scenario, scenario.world))


def _static_disk(scenario: Scenario) -> _Kept | None:
    """Each node keeps the parts of its ranks on its disk."""
    if scenario.nodes == 1 or not scenario.shared:
        return None
    return replace(_disk_of(scenario, scenario.nodes), remark=_say_static(scenario, scenario.world))


def _say_static(scenario: Scenario, parts: int) -> str:
    return (
        f"order=static: each of {parts} ranks shuffles its own "
        f"{format_count(math.ceil(scenario.records / parts))} records alone"
    )


def _tiers(scenario: Scenario) -> _Kept | None:
    """The planner's own choice; None where it is one tier alone, which has a way of its own."""
    plan = planned(scenario, "auto", scenario.records)
    held = [row for row in plan.rows if row.records]
    if len(held) < 2:
        return None
    memory = sum(row.records for row in held if row.tier != "disk")
    kept = _in_memory(scenario, plan, memory)
    where = {"device": "on each GPU", "host": "in host memory", "disk": _say_rest(scenario, kept)}
    lie = ", ".join(f"{format_count(row.records)} {where[row.tier]}" for row in held)
    return replace(kept, remark=f"of {format_count(scenario.records)} records {lie}")


def _say_rest(scenario: Scenario, kept: _Kept) -> str:
    """Where records lie that memory does not hold."""
    if not scenario.shared:
        return "on the disk where they lie"
    if not kept.far:
        return "on the nodes' disks"
    copied = ", with no local disk to copy them to"
    if kept.disk_bytes:
        copied = (
            f", with room for {format_count(kept.disk_bytes / scenario.record_bytes)} on each node's disk"
        )
    return f"in the store{copied}: {format_percent(kept.far)} of all reads go there{_say_blocks(scenario)}"


WAYS: dict[str, tuple[str, Callable[[Scenario], _Kept | None]]] = {
    "encode": ("read and encode for every batch", _encode),
    "store": ("read every record from the store in every epoch", _store),
    "mirror": ("a local copy with a size limit, the oldest makes room", _mirror),
    "disk": ("all records on each node's disk", _disk),
    "tiers": ("the fastest memory first, the rest where it fits", _tiers),
    "host": ("all records in each node's memory", _host),
    "device": ("all records on each GPU", _device),
    "static": ("each GPU keeps its own part", _static),
    "static-host": ("each node keeps its ranks' parts in memory", _static_host),
    "static-disk": ("each node keeps its ranks' parts on its disk", _static_disk),
}
"""What each does, and what it keeps; None there: it means nothing here."""
