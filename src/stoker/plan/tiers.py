"""Decide how many records each tier holds, what a batch then costs, and why.

This module is arithmetic. It takes sizes, limits and rates and returns a `Plan`; it never asks the
machine anything (`plan.resources` and `plan.rates` do) and never moves a byte (`loader` does). So every
decision here can be tested with made-up numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from stoker.errors import ConfigError, ResourceError, arg
from stoker.plan.rates import THREADS, BatchLoad, Rates
from stoker.plan.remote import RemoteDemand
from stoker.plan.resources import Resources
from stoker.plan.trials import Interval, say_range, say_why_wide
from stoker.schema import JsonResult
from stoker.units import GIB, format_bytes, format_count, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# A plan in words: why these tiers, with the figures that decided.
#
# Text only; nothing here decides.


NO_STALL = 0.01
"""A stall below this is called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts from which a plan was made."""

    demand: Demand
    resources: Resources
    rates: Rates
    reserves: dict[str, int]
    """Bytes left free, per memory tier."""
    budgets: dict[str, int]
    """Bytes that may be filled, per memory tier."""

    def free(self, tier: str) -> tuple[int, str]:
        """Return bytes of a memory tier that are free, and what limits them."""
        found = self.resources
        if tier == "device":
            return found.device_bytes, found.device_name
        return found.host_bytes, found.host_limit


def explain(plan: Plan, facts: PlanFacts, asked: str) -> str:
    """Return the reason of `plan`: what went where, what decided, its cost, and what would do as well."""
    parts = [_placed(plan, asked)]
    parts += [_budget(row, facts) for row in plan.rows if row.tier in facts.budgets and row.records]
    if facts.demand.on_cpu and asked in ("auto", "device"):
        parts.append("with device cpu the device tier is the host tier")
    if facts.demand.stored_ratio is not None:
        parts.append(_compressed(facts.demand.stored_ratio, facts.rates))
    if facts.demand.remote is not None:
        parts.append(facts.demand.remote.say())
    if facts.demand.missing_records:
        parts.append(f"{format_count(facts.demand.missing_records)} of them not stored yet")
    parts.append(_cost(plan))
    parts += _as_well(plan)
    if not facts.rates.measured:
        parts.append("speeds are typical ones, not measured here")
    return "; ".join(part for part in parts if part)


def _compressed(ratio: float, rates: Rates) -> str:
    return (
        f"shards are compressed to {format_percent(ratio)} of their bytes, and decompressed at "
        f"{format_bytes(rates.unpack_bytes_s)}/s: on the disk tier at each use, in memory once. They cannot "
        "be mapped, so each process holds a copy in host memory"
    )


def _does_not_fit(facts: PlanFacts, tier: str, stored: int) -> ResourceError:
    """Return the error for a tier that was asked for and cannot hold `stored` records."""
    demand = facts.demand
    free, limit = facts.free(tier)
    return ResourceError(
        f"tier {tier}: {format_count(stored)} records of {format_bytes(demand.record_bytes)} take "
        f"{format_bytes(stored * demand.record_bytes)}, but {format_bytes(facts.budgets[tier])} of {tier} "
        f"memory may be filled ({format_bytes(free)} free, {limit}, less a reserve of "
        f"{format_bytes(facts.reserves[tier])})",
        hint=f"Use {arg('tier', 'auto')}, which puts the rest on a slower tier, store a smaller dtype, or "
        "lower reserve_bytes",
    )


def table(plan: Plan) -> str:
    """Return the tiers that hold something, one a line, and from which step on nothing waits."""
    rows = [("tier", "records", "bytes", "load/batch")]
    rows += [
        (
            row.tier,
            format_count(row.records),
            format_bytes(row.bytes),
            "-" if row.load_s is None else format_seconds(row.load_s),
        )
        for row in plan.rows
        if row.records
    ]
    lines = [f"{tier:<7}{records:>12}{size:>12}{load:>13}" for tier, records, size, load in rows]
    return "\n".join([*lines, _cost(plan)])


def _placed(plan: Plan, asked: str) -> str:
    held = [row for row in plan.rows if row.records]
    total = sum(row.records for row in plan.rows)
    size = format_bytes(plan.bytes)
    why = "" if asked == "auto" else f", as tier={asked} asks"
    if not held:
        return f"no records to place{why}"
    if len(held) == 1:
        return f"all {format_count(total, 'record')} ({size}) on the {held[0].tier} tier{why}"
    shares = ", ".join(f"{format_count(row.records)} on the {row.tier} tier" for row in held)
    return f"{format_count(total, 'record')} ({size}): {shares}{why}"


def _budget(row: TierShare, facts: PlanFacts) -> str:
    free, limit = facts.free(row.tier)
    return (
        f"{format_bytes(row.bytes)} of the {format_bytes(facts.budgets[row.tier])} that may be filled there "
        f"({format_bytes(free)} usable, {limit}, reserve {format_bytes(facts.reserves[row.tier])})"
    )


def _cost(plan: Plan) -> str:
    if plan.no_stall_step_s is None:
        return "the stall is not known while records are missing"
    if plan.step_s is None:
        return f"no stall (below 1 %) at steps of {format_seconds(plan.no_stall_step_s)} or longer"
    stall, likely = plan.stall_at(plan.step_s), plan.stall_range_at(plan.step_s)
    assert stall is not None
    said = f"waits {format_percent(stall)} of its time at a step of {format_seconds(plan.step_s)}"
    if likely is None:
        return said
    served = [row.served for row in plan.rows if row.records and row.served is not None]
    return f"{said}, {say_range(likely)}{say_why_wide(likely, [load.use for load in served])}"


def _as_well(plan: Plan) -> list[str]:
    """Slower tiers that would not stall either, or from which length of a step on."""
    fastest = next((i for i, row in enumerate(plan.rows) if row.records), len(plan.rows))
    slower = [row for row in plan.rows[fastest + 1 :] if not row.records and row.direct_s is not None]
    said: list[str] = []
    for row in slower:
        assert row.direct_s is not None
        if row.stall is None:
            from_s = max(row.overlapped_s, 99 * row.direct_s)
            said.append(f"the {row.tier} tier would not stall at steps of {format_seconds(from_s)} or longer")
        elif row.stall < NO_STALL:
            said.append(f"the {row.tier} tier would stall {format_percent(row.stall)}")
    return [*said, *_compared(plan, slower)]


def _compared(plan: Plan, slower: Sequence[TierShare]) -> list[str]:
    """Compare the tier that was chosen with slower ones that trials found to wait less.

    No trial moves records: the fastest memory that has room holds them, so a plan made twice is the same.
    Where ranges overlap, that rule decides. Where they do not, the user may name the other tier.
    """
    likely = None if plan.step_s is None else plan.stall_range_at(plan.step_s)
    stall = plan.predicted_stall
    if likely is None or stall is None:
        return []
    said: list[str] = []
    for row in slower:
        if row.stall is None or row.stall_range is None or row.stall >= stall or stall < NO_STALL:
            continue
        found = (
            f"the {row.tier} tier was found to wait {format_percent(row.stall)}, {say_range(row.stall_range)}"
        )
        if row.stall_range.overlaps(likely):
            said.append(f"{found}: the ranges overlap, so the faster memory is used")
        else:
            said.append(f"{found}, less than the {plan.tier} tier: {arg('tier', row.tier)} chooses it")
    return said


Tier: TypeAlias = Literal["device", "host", "disk", "encode"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""From the fastest to the slowest; rows of a plan come in this order."""

HOST_RESERVE = 0.2
"""Part of usable host memory left to everything else (the model on a CPU, other programs)."""
DEVICE_RESERVE = 0.02
"""Part of a GPU's memory left free once steps have shown what the model takes."""
DEVICE_RESERVE_UNSEEN = 0.5
"""Part of a GPU's memory left to a model that has not run a step yet."""

HOST_CALL_S, DEVICE_CALL_S, DISK_CALL_S = 5e-6, 10e-6, 100e-6
"""Cost of a batch before its first byte moves.

Source: benchmarks of the serving path (a loader's Python, a kernel's launch, one read's latency).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Records and batches to serve. Sizes are of stored bytes, means where records differ."""

    records: int
    """Records wanted in all."""
    record_bytes: float
    """Bytes of one record."""
    batch_examples: int
    """Examples in one batch."""
    example_bytes: float
    """Bytes that one example takes out of a tier (a window takes fewer than its record)."""
    device: str = "cpu"
    """Where batches are wanted: `cpu` or `cuda[:i]`."""
    missing_records: int = 0
    """How many of `records` are not stored yet, so that only the encoder can serve them."""
    step_cpus: float = 1.0
    """Cores that a step keeps busy: one that starts a GPU's kernels, or all threads that compute on a CPU."""
    encoded_first: int = 0
    """How many of the others are to be encoded before anything is served; they are placed as stored ones."""
    remote: RemoteDemand | None = None
    """Where the cache lies if not on this machine; None: it does."""
    stored_ratio: float | None = None
    """Bytes on disk for each of these bytes, where shards are compressed; None: they are not."""
    table_bytes: int = 0
    """Bytes that a GPU needs in addition to the records: where they are, and the order of an epoch."""

    def __post_init__(self) -> None:
        """Refuse what cannot be planned for."""
        if min(self.records, self.record_bytes, self.example_bytes, self.missing_records) < 0:
            raise ConfigError(f"a demand has no negative numbers, got {self}")
        if self.batch_examples < 1 or self.missing_records > self.records:
            raise ConfigError(
                f"batch of {self.batch_examples} examples, {self.missing_records} of {self.records} records "
                "missing",
                hint="Expected a batch of at least 1 and no more missing than there are",
            )

    @property
    def on_cpu(self) -> bool:
        """True if the device is the CPU, whose own memory is the host tier."""
        return self.device == "cpu"

    @property
    def batch_bytes(self) -> float:
        """Bytes that one batch takes out of a tier."""
        return self.batch_examples * self.example_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShare(JsonResult):
    """One row of a plan: what a tier holds, and what a batch served by it alone would cost."""

    json_keys = ("tier", "records", "bytes", "load_s", "overlapped_s", "stall", "stall_range", "note")

    tier: Tier
    records: int
    bytes: int
    direct_s: float | None
    """Seconds of loading one batch from this tier alone that the step waits for; None: not known."""
    overlapped_s: float
    """Seconds of it that overlap with the step before."""
    stall: float | None
    """Stall with every batch from this tier, 0..1; None until the time of a step is known."""
    note: str
    served: BatchLoad | None = None
    """Measured by serving some batches, where that was done."""
    stall_range: Interval | None = None
    """The stall that a run is likely to have; None: this tier was not tried with such steps."""

    def wait_range_s(self, step_s: float) -> Interval | None:
        """Return seconds that a step is likely to wait for a batch; None: it was not tried several times."""
        if self.served is None or self.served.lost_range is None:
            return None
        low, high = (load.lost_s(step_s) or 0.0 for load in self.served.bounds())
        return Interval(min(low, high), max(low, high))

    def beyond_s(self, step_s: float) -> float:
        """Return seconds that a batch was found to cost beyond what its load says, or below it."""
        tried_s = None if self.served is None else self.served.lost_s(step_s)
        if tried_s is None or self.direct_s is None:
            return 0.0
        return tried_s - _wait(self.direct_s, self.overlapped_s, step_s)

    @property
    def load_s(self) -> float | None:
        """Seconds to load one batch from this tier alone; None: not known."""
        return None if self.direct_s is None else self.direct_s + self.overlapped_s


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(JsonResult):
    """Records that each tier holds, and the reasons; `print` shows it as a table."""

    json_keys = (
        "tiers", "bytes", "reason", "predicted_stall", "predicted_stall_low", "predicted_stall_high", "tier",
        "step_s", "no_stall_step_s", "rows",
    )  # fmt: skip

    rows: tuple[TierShare, ...]
    """One per tier, in the order of `TIERS`."""
    tier: Tier
    """The tier that holds most records (the faster one of equals)."""
    reason: str
    """The decision in words, with its figures."""
    no_stall_step_s: float | None
    """Steps at least this long wait less than 1 % of their time; None while records are missing."""
    step_s: float | None = None
    """The time of a step that the plan was made with; None: not known yet."""

    def __repr__(self) -> str:
        held = ", ".join(f"{r.tier} {format_count(r.records, 'record')}" for r in self.rows if r.records)
        return f"Plan({held or 'no records'}, {format_bytes(self.bytes)})"

    def __str__(self) -> str:
        return table(self)

    def records_by_tier(self) -> dict[str, int]:
        """Return records per tier, all four tiers."""
        return {row.tier: row.records for row in self.rows}

    def holding(self, records: int) -> Plan:
        """Return the same decision for another number of records: the largest tier takes the difference."""
        more = records - sum(row.records for row in self.rows)
        rows = tuple(
            replace(row, records=row.records + more, bytes=row.bytes * (row.records + more) // row.records)
            if row.tier == self.tier and row.records
            else row
            for row in self.rows
        )
        return replace(self, rows=rows)

    @property
    def tiers(self) -> dict[str, int]:
        """Records by tier, as `records_by_tier`."""
        return self.records_by_tier()

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return sum(row.bytes for row in self.rows)

    @property
    def predicted_stall(self) -> float | None:
        """The stall to expect at the step that the plan was made with; None until one was timed."""
        return None if self.step_s is None else self.stall_at(self.step_s)

    @property
    def predicted_stall_low(self) -> float | None:
        """The least stall of nine runs in ten; None: batches were not tried with such steps."""
        likely = None if self.step_s is None else self.stall_range_at(self.step_s)
        return None if likely is None else likely.low

    @property
    def predicted_stall_high(self) -> float | None:
        """The largest stall of nine runs in ten; None: as for `predicted_stall_low`."""
        likely = None if self.step_s is None else self.stall_range_at(self.step_s)
        return None if likely is None else likely.high

    def stall_range_at(self, step_s: float) -> Interval | None:
        """Return the stall that a run is likely to have (90 %); None: a tier of it was not tried with steps.

        Of several tiers their ranges add up, as if all were low or high together: what makes them vary is
        mostly the machine, which they share.

        Args:
            step_s: As for `stall_at`.
        """
        held = [(row.wait_range_s(step_s), row.records) for row in self.rows if row.records]
        stall = self.stall_at(step_s)
        if not held or stall is None:
            return None
        total, low, high = sum(records for _, records in held), 0.0, 0.0
        for likely, records in held:
            if likely is None:
                return None
            low, high = low + likely.low * records / total, high + likely.high * records / total
        return Interval(min(stall, _part(low, step_s)), max(stall, _part(high, step_s)))

    def stall_at(self, step_s: float) -> float | None:
        """Return the stall to expect at `step_s` seconds a step, 0..1; None while records are missing.

        A batch draws from the tiers in proportion to what they hold.

        Args:
            step_s: Seconds that a step takes without waiting.
        """
        loads = _mean_loads(self.rows)
        if loads is None:
            return None
        total = sum(row.records for row in self.rows) or 1
        beyond_s = sum(row.beyond_s(step_s) * row.records / total for row in self.rows)
        return _part(_wait(*loads, step_s) + beyond_s, step_s)


def stall_of(load_s: float, step_s: float, *, prefetch: bool) -> float:
    """Return the part of a step's wall time that it waits for data, 0..1.

    Args:
        load_s, step_s: Seconds to load one batch, and to compute one step.
        prefetch: Loading overlaps with the step, on a separate core.

    >>> stall_of(0.070, 0.031, prefetch=True)  # the step waits for what loading takes longer
    0.5571428571428572
    >>> stall_of(0.010, 0.030, prefetch=False)  # the step waits for all of it
    0.25
    >>> stall_of(0.010, 0.030, prefetch=True)
    0.0
    """
    return _part(_wait(0.0, load_s, step_s) if prefetch else load_s, step_s)


def plan_tiers(
    demand: Demand,
    resources: Resources,
    *,
    tier: str = "auto",
    reserve_bytes: int | None = None,
    step_s: float | None = None,
    rates: Rates | None = None,
) -> Plan:
    """Fill the fastest tier first, then the next; an explicit tier takes everything or is refused.

    Args:
        demand, resources: What is to be served, and what this process may use.
        tier: `auto`, or the one tier that must hold all stored records.
        reserve_bytes: Memory of the device to leave to the model (host memory where the device is the
            CPU). None: 2 % of a GPU once `step_s` is known or `tier="device"` was asked for, else half
            of it; 20 % of host memory.
        step_s: Measured seconds a step computes, if known.
        rates: Measured speeds; None: typical ones, and the plan says so.

    Raises:
        ConfigError: `tier` or `step_s` is not one.
        ResourceError: The explicit tier cannot hold the stored records.

    >>> machine = Resources(host_bytes=500, host_total_bytes=800, host_limit="machine memory", cpus=2.0)
    >>> demand = Demand(records=50, record_bytes=10, batch_examples=4, example_bytes=10)
    >>> plan_tiers(demand, machine).records_by_tier()
    {'device': 0, 'host': 40, 'disk': 10, 'encode': 0}
    """
    if tier not in ("auto", *TIERS):
        raise ConfigError(f"tier {tier!r} is unknown", hint=f"Expected auto, {', '.join(TIERS)}")
    if step_s is not None and not (math.isfinite(step_s) and step_s > 0):
        raise ConfigError(f"a step of {step_s} s cannot be planned for", hint="Expected seconds above 0")
    rates = rates or Rates()
    reserves = reserves_of(demand, resources, tier, reserve_bytes, step_s)
    budgets = {
        "device": max(0, resources.device_bytes - reserves["device"]),
        "host": max(0, resources.host_bytes - reserves["host"]),
    }
    facts = PlanFacts(demand=demand, resources=resources, rates=rates, reserves=reserves, budgets=budgets)
    counts = _place(demand, budgets, tier, facts)
    rows = tuple(_row(name, counts[name], facts, step_s) for name in TIERS)
    served = [row for row in rows if not (demand.on_cpu and row.tier == "device")]
    loads = _mean_loads(rows)
    plan = Plan(
        rows=rows,
        tier=max(served, key=lambda row: row.records).tier,
        reason="",
        no_stall_step_s=None if loads is None else shortest_quiet_step(*loads),
        step_s=step_s,
    )
    return replace(plan, reason=explain(plan, facts, tier))


def reserves_of(
    demand: Demand, resources: Resources, tier: str, reserve_bytes: int | None, step_s: float | None = None
) -> dict[str, int]:
    """Return bytes per memory that are left to everything else; arguments as for `plan_tiers`."""
    peak = resources.device_again_bytes
    seen = step_s is not None or tier == "device" or peak is not None
    device = int(resources.device_total_bytes * (DEVICE_RESERVE if seen else DEVICE_RESERVE_UNSEEN))
    device += peak or 0
    host = int(resources.host_bytes * HOST_RESERVE)
    if reserve_bytes is not None and demand.on_cpu:
        host = reserve_bytes
    elif reserve_bytes is not None:
        device = reserve_bytes
    return {"device": device + demand.table_bytes, "host": host}


def _place(demand: Demand, budgets: dict[str, int], tier: str, facts: PlanFacts) -> dict[Tier, int]:
    """Return records per tier. Missing ones are always the encoder's."""
    stored = demand.records - demand.missing_records
    if tier == "device" and demand.on_cpu:
        tier = "host"
    if tier in budgets and stored * demand.record_bytes > budgets[tier]:
        raise _does_not_fit(facts, tier, stored)
    device = 0 if demand.on_cpu else _fitting(stored, demand.record_bytes, budgets["device"])
    if tier not in ("auto", "device"):
        device = 0
    host = _fitting(stored - device, demand.record_bytes, budgets["host"])
    if tier in ("disk", "encode"):
        host = 0
    return {
        "device": device,
        "host": host,
        "disk": stored - device - host,
        "encode": demand.missing_records,
    }


def _fitting(records: int, record_bytes: float, budget_bytes: int) -> int:
    return min(records, int(budget_bytes // record_bytes)) if record_bytes else records


def _row(tier: Tier, records: int, facts: PlanFacts, step_s: float | None) -> TierShare:
    loads = _loads(tier, facts)
    row = TierShare(
        tier=tier,
        records=records,
        bytes=round(records * facts.demand.record_bytes),
        direct_s=None if loads is None else loads[0],
        overlapped_s=0.0 if loads is None else loads[1],
        stall=None,
        note=_note(tier, records, facts),
        served=facts.rates.served.get(tier),
    )
    if loads is None or step_s is None:
        return row
    stall, likely = _part(_wait(*loads, step_s) + row.beyond_s(step_s), step_s), row.wait_range_s(step_s)
    if likely is None:
        return replace(row, stall=stall)
    low, high = (_part(wait_s, step_s) for wait_s in likely)
    return replace(row, stall=stall, stall_range=Interval(min(stall, low), max(stall, high)))


def _loads(tier: Tier, facts: PlanFacts) -> tuple[float, float] | None:
    """Return seconds to load one batch from `tier` alone: those waited for, and those the step hides.

    On a CPU the step wants all cores, so only waiting for a disk overlaps with it, not copying. Towards a
    GPU everything does, given a second core. A gather on the GPU goes through the same queue as the step.
    """
    demand, rates = facts.demand, facts.rates
    size, spare_core = demand.batch_bytes, facts.resources.cpus >= 2
    if tier == "encode" or (tier == "device" and demand.on_cpu):
        return None
    served = rates.served.get(tier)
    if served is not None:
        free = facts.resources.cpus - demand.step_cpus >= 1
        return (served.direct_s, served.overlapped_s) if free else (served.alone_s, 0.0)
    if tier == "device":
        return DEVICE_CALL_S + size / rates.device_bytes_s, 0.0
    copy_s = HOST_CALL_S + size / rates.copy_bytes_s + (0.0 if demand.on_cpu else size / rates.h2d_bytes_s)
    disk_s = 0.0
    if tier == "disk":
        stored = size if demand.stored_ratio is None else size * demand.stored_ratio
        disk_s = DISK_CALL_S + stored / rates.disk_bytes_s
        if demand.remote is not None:
            disk_s += demand.remote.fetched_for(stored) / rates.network_bytes_s
        if demand.stored_ratio is not None:
            threads = max(1.0, min(THREADS, facts.resources.cpus - demand.step_cpus))
            disk_s += size / (threads * rates.unpack_bytes_s)
    if not spare_core:
        return copy_s + disk_s, 0.0
    return (copy_s, disk_s) if demand.on_cpu else (0.0, copy_s + disk_s)


def _note(tier: Tier, records: int, facts: PlanFacts) -> str:
    resources, reserve = facts.resources, facts.reserves
    if tier == "device" and facts.demand.on_cpu:
        return "device cpu: the device tier is the host tier"
    if tier == "device":
        return (
            f"{format_bytes(resources.device_bytes)} free of {format_bytes(resources.device_total_bytes)} on "
            f"{resources.device_name}, reserve {format_bytes(reserve['device'])}"
        )
    if tier == "host":
        copies = "for all processes of this node" if facts.demand.stored_ratio is None else "in each process"
        return (
            f"one copy {copies}; {format_bytes(resources.host_bytes)} usable "
            f"({resources.host_limit}), reserve {format_bytes(reserve['host'])}"
        )
    if tier == "disk":
        unpacked = "" if facts.demand.stored_ratio is None else ", decompressed"
        return f"read{unpacked} and verified at each use"
    first = facts.demand.encoded_first
    if not records and not first:
        return "nothing is missing"
    need = (records + first) * facts.demand.record_bytes
    free = "" if resources.disk_bytes is None else f", {format_bytes(resources.disk_bytes)} free"
    counted = f"{format_count(first)} are encoded first, and counted above as stored"
    which = counted if first else "not stored yet"
    return f"{which}; storing them takes {format_bytes(need)} of disk{free}"


def _mean_loads(rows: tuple[TierShare, ...]) -> tuple[float, float] | None:
    """Return seconds to load a mean batch: those waited for, those the step hides; None: unknown."""
    total = sum(row.records for row in rows) or 1
    direct_s = overlapped_s = 0.0
    for row in rows:
        if not row.records:
            continue
        if row.direct_s is None:
            return None
        direct_s += row.direct_s * row.records / total
        overlapped_s += row.overlapped_s * row.records / total
    return direct_s, overlapped_s


def _wait(direct_s: float, overlapped_s: float, step_s: float) -> float:
    """Return seconds waited for a batch: `overlapped_s` of its load overlap the step, `direct_s` do not."""
    return direct_s + max(0.0, overlapped_s - step_s)


def _part(wait_s: float, step_s: float) -> float:
    """Waiting over wall time."""
    return wait_s / (wait_s + step_s) if wait_s > 0 else 0.0


def shortest_quiet_step(direct_s: float, overlapped_s: float) -> float:
    """Return the shortest step that waits at most 1 % of its time.

    >>> shortest_quiet_step(0.0, 0.07), shortest_quiet_step(0.001, 0.0)
    (0.07, 0.099)
    """
    # Above `overlapped_s` only the direct part is waited for: direct / (direct + step) <= 0.01.
    return max(overlapped_s, 99 * direct_s)


# ----------------------------------------------------------------------------------------------------------
# What would cure a stall, said from what was measured and from what a plan knows of the other tiers.
#
# Text only, and a pure function: the run's figures come from its meter, the room and the load times of the
# tiers from a plan made with the step that was measured.


MEANINGS = {
    "read": "reading from disk",
    "gather": "putting batches together in memory",
    "copy": "copying them to the device",
    "transform": "the transforms",
    "wait": "waiting for another thread",
}
"""Reasons for a wait, in words, by the names of the meter's parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStall:
    """Stall that a run's meter measured."""

    stall: float
    step_s: float
    """Seconds of a step, loading left out."""
    wait_s: float
    parts: Mapping[str, float]
    """Seconds of `wait_s` by what they were for."""
    tier: str
    """The tier that served most examples."""


def over_budget(waiting: MeasuredStall, budget: float, plan: Plan) -> str | None:
    """Say that a stall is above `budget`, what was expected, and a cure; None: it is not above.

    Args:
        plan: Of the same records with `tier="auto"` and the step that was measured.
    """
    if waiting.stall <= budget:
        return None
    return (
        f"stall {format_percent(waiting.stall)}: steps waited {format_seconds(waiting.wait_s)} for data, "
        f"{said_parts(waiting.parts) or 'cause unknown'}. The limit is {format_percent(budget)}. "
        f"{cure(waiting, plan)}"
    )


def said_parts(parts: Mapping[str, float]) -> str:
    """Return the parts of a wait in words, the longest first; those below a twentieth are left out.

    >>> said_parts({"read": 5.5, "gather": 0.5, "wait": 0.01})
    '5.5 s of it reading from disk, 500 ms putting batches together in memory'
    """
    total = sum(parts.values())
    shown = sorted((item for item in parts.items() if item[1] >= total / 20 > 0), key=lambda item: -item[1])
    return ", ".join(
        f"{format_seconds(seconds)} {'' if place else 'of it '}{MEANINGS[part]}"
        for place, (part, seconds) in enumerate(shown)
    )


def cure(waiting: MeasuredStall, plan: Plan) -> str:
    """Return what to do about the longest part of a wait."""
    main = max(waiting.parts, key=lambda part: waiting.parts[part], default="gather")
    faster = plan.tier
    if faster != waiting.tier and waiting.tier == "disk":
        expected, held = plan.stall_at(waiting.step_s), plan.records_by_tier()
        whole = held[faster] == sum(held.values())
        room = "the" if whole else f"{format_count(held[faster])} of the {format_count(sum(held.values()))}"
        return f"Use training.tier=auto: the {faster} tier has room for {room} records" + (
            "" if expected is None else f", and would stall {format_percent(expected)}"
        )
    if main == "read":
        size = format_bytes(plan.bytes)
        host = next(row for row in plan.rows if row.tier == "host")
        return (
            f"The records take {size}, more than the host tier has room for ({host.note}). Free memory for "
            "them, store a smaller dtype (latent_cache_dtype), or put the cache on a faster disk"
        )
    if main == "copy":
        device = next(row for row in plan.rows if row.tier == "device")
        return (
            "The device tier copies nothing, but has no room for the records "
            f"({device.note}). Store a smaller dtype (latent_cache_dtype), or lower reserve_bytes"
        )
    if main == "transform":
        return "Make the transforms cheaper, or have them work on batches that are on the device already"
    if main == "wait":
        return "Another thread was late: give this process a core that no other process uses"
    return (
        f"A step of {format_seconds(waiting.step_s)} is short for a batch of this size: give this process "
        "a core that the step leaves free, or store a smaller dtype (latent_cache_dtype)"
    )


# ----------------------------------------------------------------------------------------------------------
# How many records the memory of a GPU holds, for those that one might rent. Bytes follow from the schema and
# the storage dtype, so the answer is for one's own data.


MEMORY_GIB: Mapping[str, float] = {
    "V100 16 GB": 15.7,
    "V100 32 GB": 31.7,
    "A100 40 GB": 39.4,
    "A100 80 GB": 79.1,
    "H100 80 GB": 79.1,
    "H200 141 GB": 139.7,
}
"""`total_memory` as torch reports it, a few tenths less than on the label."""
PEAK_FLOPS: Mapping[str, float] = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}
"""Products of half precision a second, without sparsity. Source: the makers' data sheets (SXM forms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(JsonResult):
    """One GPU."""

    gpu: str
    memory_bytes: int
    """All of it."""
    usable_bytes: int
    """Bytes left for records."""
    records: int
    """Records that it holds."""
    share: float
    """Part of the data set that this is, 0..1."""


def gpu_table(record_bytes: float, records: int, *, model_bytes: int | None = None) -> tuple[GpuRow, ...]:
    """Return what each GPU of `MEMORY_GIB` would hold.

    Args:
        record_bytes: Of one record, as stored: `stoker.store.format.record_bytes` of a cache's columns.
        records: How many there are.
        model_bytes: Peak of the model's own memory; None: by the rule for one that was not seen yet.

    Raises:
        ConfigError: A record has no bytes.

    >>> [row.records for row in gpu_table(602_112, 100_000, model_bytes=8 * GIB)][::5]
    [13171, 100000]
    """
    if not record_bytes > 0 or records < 0:
        raise ConfigError(
            f"{records} records of {record_bytes} bytes cannot be placed", hint="Expected above 0"
        )
    rows: list[GpuRow] = []
    for name, gib in MEMORY_GIB.items():
        memory = int(gib * GIB)
        reserve = DEVICE_RESERVE_UNSEEN if model_bytes is None else DEVICE_RESERVE
        usable = max(0, int(memory * (1 - reserve)) - (model_bytes or 0))
        held = min(records, int(usable // record_bytes))
        rows.append(
            GpuRow(
                gpu=name,
                memory_bytes=memory,
                usable_bytes=usable,
                records=held,
                share=held / records if records else 1.0,
            )
        )
    return tuple(rows)


def known_gpu(name: str, memory_bytes: int) -> str | None:
    """Return the entry of `MEMORY_GIB` that a GPU is, by the name that its driver gives; None: none of them.

    >>> known_gpu("NVIDIA A100-SXM4-40GB", int(39.4 * GIB)), known_gpu("NVIDIA L4", 23 * GIB)
    ('A100 40 GB', None)
    >>> known_gpu("NVIDIA GH200 480GB", 95 * GIB)  # no H200
    """
    alike = [entry for entry in MEMORY_GIB if re.search(rf"\b{entry.split()[0]}\b", name)]
    return min(alike, key=lambda entry: abs(MEMORY_GIB[entry] * GIB - memory_bytes), default=None)


def peak_flops(name: str) -> float:
    """Return `PEAK_FLOPS` of an entry of `MEMORY_GIB`."""
    return PEAK_FLOPS[name.split(maxsplit=1)[0]]


def say_gpus(record_bytes: float, records: int, *, model_bytes: int | None = None) -> str:
    """Return the table in one sentence; arguments as for `gpu_table`.

    >>> say_gpus(1e9, 100, model_bytes=0).partition("; ")[2]
    '16 on V100 16 GB, 33 on V100 32 GB, 41 on A100 40 GB, 83 on A100 80 GB, 83 on H100 80 GB'
    """
    rows = gpu_table(record_bytes, records, model_bytes=model_bytes)
    whole = ", ".join(row.gpu for row in rows if row.share == 1)
    parts = ", ".join(f"{format_count(row.records)} on {row.gpu}" for row in rows if row.share < 1)
    places = "; ".join(filter(None, (whole and f"all on {whole}", parts)))
    left = (
        "half of each left to the model"
        if model_bytes is None
        else f"{format_bytes(model_bytes)} for the model"
    )
    return f"{format_count(records, 'record')} of {format_bytes(record_bytes)}, {left}: {places}"


def say_together(held: int, records: int) -> str:
    """Say how many devices like this one hold what it cannot hold alone; empty if none are needed.

    >>> say_together(300, 1000)[:66]
    'one device holds 300 of 1,000 records, 4 of them hold all together'
    >>> say_together(1000, 1000), say_together(0, 1000)
    ('', '')
    """
    if not 0 < held < records:
        return ""
    count = -(-records // held)
    return (
        f"one device holds {format_count(held)} of {format_count(records)} records, {count} of them hold all "
        f"together: `torchrun --nproc-per-node {count} -m stoker train CONFIG training.partition=static`, "
        f"1/{count} of the examples each, shuffled separately"
    )
