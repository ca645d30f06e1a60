"""Each way of getting records to steps, what it takes, and which one to choose."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stoker.errors import ResourceError
from stoker.extras.simulation.queues import (
    BatchCost,
    QueueTimes,
    asked_of_tiers,
    asked_to_encode,
    encoded_for_one,
    plan_tier,
    simulate_queues,
    traffic_of,
)
from stoker.extras.simulation.result import (
    EncodingEstimate,
    Simulation,
    Way,
    choose_way,
    encodings,
    find_bottleneck,
    first_epoch_while_encoding_s,
    list_defaults,
    pick_quickest,
)
from stoker.extras.simulation.scenario import Order, Scenario
from stoker.plan.tiers import Plan
from stoker.plan.trials import Interval
from stoker.units import format_bytes, format_count, format_percent

# ----------------------------------------------------------------------------------------------------------
# Epochs in which memory is filled during training: both read through the same link.


PARTS = 1000
"""Into which the filling is cut; each is short enough that what is held hardly changes in it."""
LEAST = 1e-9
"""Parts of an epoch, or of what is filled, too small to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEpochs:
    """The first epochs of a run, up to the one in which all is in place."""

    epochs: tuple[tuple[float, float], ...]
    """Of each the seconds, and the bytes that one node reads; at least one."""
    filled_s: float | None
    """From the first batch until all is in place; None: the run is over before."""


def fill_beside(
    fill_bytes: float,
    demand_bytes: float,
    epoch_s: float,
    link_bytes_s: float,
    *,
    after_bytes: float = 0.0,
    most: int = 1,
) -> FirstEpochs:
    """Return the epochs until all is filled.

    Batches take what is not held yet from the place of the records, and so does the filling; while both want
    more than the link gives they get half each. What is held grows, so batches need the link less and less.

    Args:
        fill_bytes: To be filled on this node.
        demand_bytes: That its batches take in an epoch of what is being filled.
        epoch_s: Of an epoch with all of it in place.
        link_bytes_s: Of the node, from the place of the records.
        after_bytes: That its batches take through the link in every epoch, filled or not.
        most: Epochs, at most.

    >>> [(round(seconds, 6), round(moved)) for seconds, moved in fill_beside(100.0, 100.0, 10.0, 1e9).epochs]
    [(10.0, 100)]
    >>> found = fill_beside(400.0, 100.0, 1.0, 10.0, most=99)  # a link that is asked for more than it gives
    >>> len(found.epochs), round(found.filled_s), round(sum(moved for _, moved in found.epochs))
    (15, 79, 788)
    """
    found, filled, now_s = list[tuple[float, float]](), 0.0, 0.0
    filled_s: float | None = None
    part_s = fill_bytes / link_bytes_s / PARTS
    while filled_s is None and len(found) < most:
        began_s, done, moved = now_s, 0.0, 0.0
        while filled_s is None and done < 1 - LEAST:
            asked = after_bytes + demand_bytes * (1 - filled / fill_bytes)
            pace = min(1 / epoch_s, link_bytes_s / 2 / asked)
            step_s = min(part_s, (1 - done) / pace)
            into = min(fill_bytes - filled, (link_bytes_s - asked * pace) * step_s)
            filled, done, now_s = filled + into, done + pace * step_s, now_s + step_s
            moved += into + asked * pace * step_s
            if filled >= fill_bytes * (1 - LEAST):
                filled_s = now_s
        now_s += (1 - done) * epoch_s
        moved += (1 - done) * after_bytes
        found.append((now_s - began_s, moved))
    return FirstEpochs(epochs=tuple(found), filled_s=filled_s)


# ----------------------------------------------------------------------------------------------------------
# What a local copy with a size limit has of what one node asks for, epoch after epoch.
#
# A small set is gone through in the run's own order, and what was not used for the longest time makes room:
# the share of hits depends on how much of the set fits, not on how large the set is.


ITEMS = 4096
"""Records that stand for all, or as many blocks of them as make so many."""
MOST_IN_BLOCK = 16
"""Records in a block; with more of them the share hardly changes."""
PASSES = 6
"""Times that the node asks for as many records as there are; the second half of it is counted."""
MANY = 64
"""Nodes; with more of them the share hardly changes."""


def hit_share(
    fraction: float, nodes: int, *, order: Order = "full", in_block: float = 1, seed: int = 0
) -> float:
    """Return the part of one node's reads that its local copy serves once it is full, 0..1.

    In a full shuffle of one node a record that was read at one place of an epoch is read again at another of
    the next. A copy of the fraction c still has it with the probability c + (1 - c) ln(1 - c): the product of
    two uniform places must exceed 1 - c. With many nodes each asks for other records in each
    epoch, and what is kept is of use in proportion to its size: c. A static order asks every node for the
    same part each time, which is then a set of its own. Where many records come in one block, each block is
    asked for many times in an epoch, at places of no pattern: c again.

    Args:
        fraction: Part of the set that fits.
        nodes: Among which each epoch is divided.
        order: As of the loader; in block order neighbors are asked for together, so that `in_block` is 1.
        in_block: Records that are fetched and given up together.
        seed: Of the orders.

    >>> round(hit_share(0.5, 1), 2), round(0.5 + 0.5 * float(np.log(0.5)), 2)
    (0.15, 0.15)
    >>> round(hit_share(0.5, 16), 1), hit_share(1.0, 4), hit_share(0.25, 4, order="static")
    (0.5, 1.0, 1.0)
    >>> round(hit_share(0.5, 1, in_block=16), 1)
    0.5
    """
    needed = 1 / nodes if order == "static" else 1.0
    block = min(MOST_IN_BLOCK, max(1, round(in_block)))
    room = int(min(fraction, 1.0) * ITEMS / block)
    if fraction >= needed:
        return 1.0
    if not room:
        return 0.0
    generator, nodes = np.random.default_rng(seed), min(nodes, MANY)
    epochs = PASSES * nodes
    held: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    own = np.arange(ITEMS // nodes)
    for epoch in range(epochs):
        wanted = generator.permutation(own) if order == "static" else generator.permutation(ITEMS)[: len(own)]
        for item in (wanted // block).tolist():
            hit = item in held
            if hit:
                held.move_to_end(item)
            else:
                held[item] = None
                if len(held) > room:
                    held.popitem(last=False)
            if 2 * epoch >= epochs:
                hits, asked = hits + hit, asked + 1
    return hits / max(1, asked)


GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordPlacement:
    """Where a way keeps records: what is moved there once, and what then is asked of links."""

    asked: BatchCost
    fill_bytes: float = 0.0
    """Read once by each node, during the first epochs."""
    cold: tuple[BatchCost, float] | None = None
    """The same two, `asked` and `far`, of the first epochs: of a copy that fills with what batches read."""
    far: float = 0.0
    """Of what an epoch asks for, the part that comes from the place of the records, once all is filled."""
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    encoded_samples: float = 0.0
    """In an epoch."""
    remark: str = ""


def simulate(scenario: Scenario) -> Simulation:
    """Return every way of serving this run, in time, bytes, memory and money; the same for the same scenario.

    Raises:
        ConfigError: A part of it means nothing; what merely does not fit is said in its way.

    >>> one = Scenario(records=10_000, record_bytes=1e6, batch=32, step_s=0.02, host_memory_bytes=2**36)
    >>> found = simulate(one)
    >>> found.fastest, round(found.way("host").epoch_s, 1)
    ('host', 8.7)
    """
    tried = encodings(scenario)
    encoding = pick_quickest(tried)
    base = simulate_queues(traffic_of(scenario, BatchCost()), scenario.batches)
    ways: list[Way] = []
    for name, (what, keep) in WAYS.items():
        try:
            kept = keep(scenario)
        except ResourceError as error:
            ways.append(Way(name=name, what=what, why_not=str(error)))
            continue
        if kept is not None:
            ways.append(_way(scenario, (name, what), kept, None if name == "encode" else encoding, base))
    steps_s = scenario.batches * base.period_s
    found = Simulation(
        scenario=scenario,
        encodings=tried,
        encoding=encoding,
        first_epoch_while_encoding_s=first_epoch_while_encoding_s(scenario, encoding, steps_s),
        ways=tuple(ways),
        taken=list_defaults(scenario),
        **choose_way(scenario, ways),
    )
    bounds = scenario.bounds()
    return found if bounds is None else _with_ranges(found, *map(simulate, bounds))


def _with_ranges(found: Simulation, low: Simulation, high: Simulation) -> Simulation:
    """Return a simulation with the ranges that its least and its largest times give."""

    def likely(now: float, one: float, other: float) -> Interval:
        return Interval(min(now, one, other), max(now, one, other))

    ways: list[Way] = []
    for way in found.ways:
        one, other = low.way(way.name), high.way(way.name)
        ways.append(
            replace(
                way,
                encoding_range_s=likely(way.encoding_s, one.encoding_s, other.encoding_s),
                epoch_range_s=likely(way.epoch_s, one.epoch_s, other.epoch_s),
                total_range_s=likely(way.total_s, one.total_s, other.total_s),
                stall_range=likely(way.stall, one.stall, other.stall),
            )
            if way.fits
            else way
        )
    return replace(
        found,
        ways=tuple(ways),
        first_epoch_while_encoding_range_s=likely(
            found.first_epoch_while_encoding_s,
            low.first_epoch_while_encoding_s,
            high.first_epoch_while_encoding_s,
        ),
        **choose_way(found.scenario, ways),
    )


def _way(
    scenario: Scenario,
    names: tuple[str, str],
    kept: _RecordPlacement,
    encoding: EncodingEstimate | None,
    base: QueueTimes,
) -> Way:
    """Return the cost of a way: by queues for an even epoch, by the filling for the first one."""
    even = simulate_queues(traffic_of(scenario, kept.asked), scenario.batches)
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
    bottleneck, cure = find_bottleneck(scenario, kept.asked, even, base)
    way = Way(
        name=names[0],
        what=names[1],
        encoding_s=0.0 if encoding is None else encoding.seconds,
        first_batch_s=start_s + simulate_queues(empty, 1).first_s,
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


def _filling(scenario: Scenario, kept: _RecordPlacement, epoch_s: float, moved: float) -> FirstEpochs:
    """Return the first epochs, or the first one, of which a node moves `moved` where nothing is kept."""
    far = kept.far
    if kept.cold is not None:
        asked, far = kept.cold
        epoch_s = scenario.batches * simulate_queues(traffic_of(scenario, asked), scenario.batches).period_s
    if not kept.fill_bytes:
        return FirstEpochs(epochs=((epoch_s, far * moved),), filled_s=0.0)
    demand = (1 - far) * scenario.epoch_examples / scenario.nodes * scenario.taken_bytes
    room = (kept.fill_bytes, demand, epoch_s, scenario.link_bytes_s)
    return fill_beside(*room, after_bytes=far * moved, most=scenario.epochs)


def _cost(scenario: Scenario, way: Way, encoding: EncodingEstimate | None) -> float | None:
    """Return the cost of used nodes, bytes out of the store, and a month of keeping the records there."""
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


def _encode(scenario: Scenario) -> _RecordPlacement | None:
    """Nothing is kept; None: what encoding takes is not known."""
    if not scenario.encode_s and not scenario.read_s:
        return None
    samples = scenario.epoch_examples * encoded_for_one(scenario)
    times = samples / scenario.records
    said = f"{format_count(samples)} samples are encoded in each epoch"
    if times >= 1.005:
        said += f", each {times:.2f} times on average: what examples share is encoded for each of them"
    return _RecordPlacement(asked=asked_to_encode(scenario), far=1.0, encoded_samples=samples, remark=said)


def _store(scenario: Scenario) -> _RecordPlacement | None:
    if not scenario.shared:
        return None
    plan = plan_tier(scenario, "disk", scenario.records)
    remark = _say_blocks(scenario).removeprefix(", ")
    return _RecordPlacement(asked=asked_of_tiers(scenario, plan, far=1.0, near=0.0), far=1.0, remark=remark)


def _say_blocks(scenario: Scenario) -> str:
    """Return a remark on the cost of blocks, where a record is much smaller than one."""
    times = scenario.fetched_bytes / scenario.taken_bytes
    if times < 1.5:
        return ""
    size, moved = format_bytes(scenario.taken_bytes), format_bytes(scenario.fetched_bytes)
    return (
        f", each read of {size} moves {moved} in blocks, {times:.1f} times as much: "
        "shuffle=block uses neighbors, fetch=1B is a mounted folder"
    )


def _mirror(scenario: Scenario) -> _RecordPlacement | None:
    """Return a partial copy on disk; None where nothing is mirrored, or all of it fits, which is `disk`."""
    if not scenario.shared or not 0 < scenario.disk_bytes < scenario.set_bytes:
        return None
    hits = _hits(scenario, scenario.disk_bytes / scenario.set_bytes)
    plan = plan_tier(scenario, "disk", scenario.records)
    return _RecordPlacement(
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


def _disk(scenario: Scenario) -> _RecordPlacement:
    return _disk_of(scenario, 1)


def _disk_of(scenario: Scenario, parts: int) -> _RecordPlacement:
    """Return the placement of one part of the set on each node's disk."""
    held = scenario.set_bytes / parts
    if (scenario.shared or scenario.disk_bytes) and scenario.disk_bytes < held:
        raise ResourceError(
            f"{format_bytes(held)} of records on each node, {format_bytes(scenario.disk_bytes)} of disk"
        )
    plan = plan_tier(scenario, "disk", scenario.records)
    return _RecordPlacement(
        asked=asked_of_tiers(scenario, plan, far=0.0, near=1.0),
        fill_bytes=held if scenario.shared else 0.0,
        far=0.0 if scenario.shared else 1.0,
        disk_bytes=held,
    )


def _in_memory(scenario: Scenario, plan: Plan, held: int) -> _RecordPlacement:
    """Return records of `plan` in memory, `held` of them on the node; the rest from their place.

    Where that is a store, as many of the rest as fit each node's disk are copied there.
    """
    rows = {row.tier: row for row in plan.rows}
    rest = rows["disk"].records
    part = rest / sum(row.records for row in plan.rows)
    room = min(scenario.disk_bytes / scenario.record_bytes, rest) if scenario.shared else 0.0
    hits = _hits(scenario, room / rest) if room else 0.0
    near = hits if scenario.shared else 1.0
    return _RecordPlacement(
        asked=asked_of_tiers(scenario, plan, far=1 - near, near=near),
        cold=(asked_of_tiers(scenario, plan, far=1.0, near=0.0), part) if 0 < hits < 1 else None,
        fill_bytes=(held + (room if hits == 1 else 0.0)) * scenario.record_bytes,
        far=part * (1 - hits),
        device_bytes=rows["device"].bytes,
        host_bytes=rows["host"].bytes,
        disk_bytes=room * scenario.record_bytes,
    )


def _host(scenario: Scenario) -> _RecordPlacement:
    return _in_memory(scenario, plan_tier(scenario, "host", scenario.records), scenario.records)


def _device(scenario: Scenario) -> _RecordPlacement | None:
    """Return the placement of the complete set on each GPU."""
    if scenario.on_cpu:
        return None
    return _in_memory(scenario, plan_tier(scenario, "device", scenario.records), scenario.records)


def _static(scenario: Scenario) -> _RecordPlacement | None:
    """Each GPU keeps its own part."""
    if scenario.on_cpu or scenario.world_size == 1:
        return None
    plan = plan_tier(scenario, "device", math.ceil(scenario.records / scenario.world_size))
    kept = _in_memory(scenario, plan, math.ceil(scenario.records / scenario.nodes))
    return replace(kept, remark=_say_static(scenario, scenario.world_size))


def _static_host(scenario: Scenario) -> _RecordPlacement | None:
    """Each node keeps the parts of its ranks in memory."""
    if scenario.nodes == 1:
        return None
    records = math.ceil(scenario.records / scenario.nodes)
    kept = _in_memory(scenario, plan_tier(scenario, "host", records), records)
    return replace(kept, remark=_say_static(scenario, scenario.world_size))


def _static_disk(scenario: Scenario) -> _RecordPlacement | None:
    """Each node keeps the parts of its ranks on its disk."""
    if scenario.nodes == 1 or not scenario.shared:
        return None
    return replace(_disk_of(scenario, scenario.nodes), remark=_say_static(scenario, scenario.world_size))


def _say_static(scenario: Scenario, parts: int) -> str:
    return (
        f"training.partition=static: each of {parts} ranks shuffles its own "
        f"{format_count(math.ceil(scenario.records / parts))} records alone"
    )


def _tiers(scenario: Scenario) -> _RecordPlacement | None:
    """Return the planner's own choice; None where it is one tier alone, which has a way of its own."""
    plan = plan_tier(scenario, "auto", scenario.records)
    held = [row for row in plan.rows if row.records]
    if len(held) < 2:
        return None
    memory = sum(row.records for row in held if row.tier != "disk")
    kept = _in_memory(scenario, plan, memory)
    where = {"device": "on each GPU", "host": "in host memory", "disk": _say_rest(scenario, kept)}
    lie = ", ".join(f"{format_count(row.records)} {where[row.tier]}" for row in held)
    return replace(kept, remark=f"of {format_count(scenario.records)} records {lie}")


def _say_rest(scenario: Scenario, kept: _RecordPlacement) -> str:
    """Return where records are that memory does not hold."""
    if not scenario.shared:
        return "on the disk"
    if not kept.far:
        return "on the nodes' disks"
    copied = ", with no local disk to copy them to"
    if kept.disk_bytes:
        copied = (
            f", with room for {format_count(kept.disk_bytes / scenario.record_bytes)} on each node's disk"
        )
    return f"in the store{copied}: {format_percent(kept.far)} of all reads go there{_say_blocks(scenario)}"


WAYS: dict[str, tuple[str, Callable[[Scenario], _RecordPlacement | None]]] = {
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
"""How each works, and what it keeps; None: not applicable."""
