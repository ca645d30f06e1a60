"""Decide how many records each tier holds, what a batch then costs, and why.

This module is arithmetic. It takes sizes, limits and rates and returns a `Plan`; it never asks the
machine anything (`plan.resources` and `plan.rates` do) and never moves a byte (`loader` does). So every
decision here can be tested with made-up numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from stoker.errors import ConfigError, ResourceError
from stoker.plan.elsewhere import Elsewhere
from stoker.plan.rates import THREADS, Load, Rates
from stoker.plan.resources import Resources
from stoker.plan.words import Facts, explain, say_need, table
from stoker.schema import Json
from stoker.units import format_bytes, format_count

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
"""What a batch costs before its first byte moves.

Source: benchmarks of the serving path (a loader's Python, a kernel's launch, one read's latency).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served. Sizes are of stored bytes, means where records differ."""

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
    elsewhere: Elsewhere | None = None
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
                "missing. Expected a batch of at least 1 and no more missing than there are"
            )

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU, whose own memory is the host tier."""
        return self.device == "cpu"

    @property
    def batch_bytes(self) -> float:
        """Bytes that one batch takes out of a tier."""
        return self.batch_examples * self.example_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShare:
    """One row of a plan: what a tier holds, and what a batch served by it alone would cost."""

    tier: Tier
    records: int
    bytes: int
    direct_s: float | None
    """Seconds of loading one batch from this tier alone that the step waits for; None: not known."""
    beside_s: float
    """Seconds of it that overlap with the step before."""
    stall: float | None
    """Stall with every batch from this tier, 0..1; None until the time of a step is known."""
    note: str
    served: Load | None = None
    """What was found by serving some batches, where that was done."""

    def beyond_s(self, step_s: float) -> float:
        """Seconds that a batch was found to cost beyond what its load says, or below it."""
        tried_s = None if self.served is None else self.served.lost_s(step_s)
        if tried_s is None or self.direct_s is None:
            return 0.0
        return tried_s - _wait(self.direct_s, self.beside_s, step_s)

    @property
    def load_s(self) -> float | None:
        """Seconds to load one batch from this tier alone; None: not known."""
        return None if self.direct_s is None else self.direct_s + self.beside_s

    def to_json(self) -> dict[str, Json]:
        """All fields by name, units as in the names."""
        return {
            "tier": self.tier,
            "records": self.records,
            "bytes": self.bytes,
            "load_s": self.load_s,
            "beside_s": self.beside_s,
            "stall": self.stall,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Which tier holds how many records, and why; `print` shows it as a table."""

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
        return f"Plan({held or 'no records'}, {format_bytes(sum(row.bytes for row in self.rows))})"

    def __str__(self) -> str:
        return table(self)

    def records_by_tier(self) -> dict[str, int]:
        """Records per tier, all four tiers."""
        return {row.tier: row.records for row in self.rows}

    def holding(self, records: int) -> Plan:
        """The same decision for another number of records: the tier that holds most takes the difference."""
        more = records - sum(row.records for row in self.rows)
        rows = tuple(
            replace(row, records=row.records + more, bytes=row.bytes * (row.records + more) // row.records)
            if row.tier == self.tier and row.records
            else row
            for row in self.rows
        )
        return replace(self, rows=rows)

    def predicted_stall(self, step_s: float) -> float | None:
        """The stall to expect at `step_s` seconds a step, 0..1; None while records are missing.

        A batch draws from the tiers in proportion to what they hold.
        """
        loads = _mean_loads(self.rows)
        if loads is None:
            return None
        total = sum(row.records for row in self.rows) or 1
        beyond_s = sum(row.beyond_s(step_s) * row.records / total for row in self.rows)
        return _part(_wait(*loads, step_s) + beyond_s, step_s)

    def to_json(self) -> dict[str, Json]:
        """What `stoker plan --json` prints; `predicted_stall` is null until a step was timed."""
        return {
            "tiers": dict(self.records_by_tier()),
            "bytes": sum(row.bytes for row in self.rows),
            "reason": self.reason,
            "predicted_stall": None if self.step_s is None else self.predicted_stall(self.step_s),
            "tier": self.tier,
            "step_s": self.step_s,
            "no_stall_step_s": self.no_stall_step_s,
            "rows": [row.to_json() for row in self.rows],
        }


def stall_of(load_s: float, step_s: float, *, prefetch: bool) -> float:
    """The part of a step's wall time that it waits for data, 0..1.

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
        raise ConfigError(f"tier {tier!r} is unknown. Expected auto, {', '.join(TIERS)}")
    if step_s is not None and not (math.isfinite(step_s) and step_s > 0):
        raise ConfigError(f"a step of {step_s} s cannot be planned for. Expected seconds above 0")
    rates = rates or Rates()
    reserves = reserves_of(demand, resources, tier, reserve_bytes, step_s)
    budgets = {
        "device": max(0, resources.device_bytes - reserves["device"]),
        "host": max(0, resources.host_bytes - reserves["host"]),
    }
    facts = Facts(demand=demand, resources=resources, rates=rates, reserves=reserves, budgets=budgets)
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
    """Bytes per memory that are left to everything else; arguments as for `plan_tiers`."""
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


def _place(demand: Demand, budgets: dict[str, int], tier: str, facts: Facts) -> dict[Tier, int]:
    """Records per tier. Missing ones are always the encoder's."""
    stored = demand.records - demand.missing_records
    if tier == "device" and demand.on_cpu:
        tier = "host"
    if tier in budgets and stored * demand.record_bytes > budgets[tier]:
        raise ResourceError(say_need(facts, tier, stored))
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


def _row(tier: Tier, records: int, facts: Facts, step_s: float | None) -> TierShare:
    loads = _loads(tier, facts)
    row = TierShare(
        tier=tier,
        records=records,
        bytes=round(records * facts.demand.record_bytes),
        direct_s=None if loads is None else loads[0],
        beside_s=0.0 if loads is None else loads[1],
        stall=None,
        note=_note(tier, records, facts),
        served=facts.rates.served.get(tier),
    )
    if loads is None or step_s is None:
        return row
    return replace(row, stall=_part(_wait(*loads, step_s) + row.beyond_s(step_s), step_s))


def _loads(tier: Tier, facts: Facts) -> tuple[float, float] | None:
    """Seconds to load one batch from `tier` alone: those waited for, and those that overlap with the step.

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
        return (served.direct_s, served.beside_s) if free else (served.alone_s, 0.0)
    if tier == "device":
        return DEVICE_CALL_S + size / rates.device_bytes_s, 0.0
    copy_s = HOST_CALL_S + size / rates.copy_bytes_s + (0.0 if demand.on_cpu else size / rates.h2d_bytes_s)
    disk_s = 0.0
    if tier == "disk":
        stored = size if demand.stored_ratio is None else size * demand.stored_ratio
        disk_s = DISK_CALL_S + stored / rates.disk_bytes_s
        if demand.elsewhere is not None:
            disk_s += demand.elsewhere.fetched_for(stored) / rates.network_bytes_s
        if demand.stored_ratio is not None:
            threads = max(1.0, min(THREADS, facts.resources.cpus - demand.step_cpus))
            disk_s += size / (threads * rates.unpack_bytes_s)
    if not spare_core:
        return copy_s + disk_s, 0.0
    return (copy_s, disk_s) if demand.on_cpu else (0.0, copy_s + disk_s)


def _note(tier: Tier, records: int, facts: Facts) -> str:
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
    """Seconds to load a mean batch: those waited for, and those that overlap with the step; None: unknown."""
    total = sum(row.records for row in rows) or 1
    direct = beside = 0.0
    for row in rows:
        if not row.records:
            continue
        if row.direct_s is None:
            return None
        direct += row.direct_s * row.records / total
        beside += row.beside_s * row.records / total
    return direct, beside


def _wait(direct_s: float, beside_s: float, step_s: float) -> float:
    """Seconds waited for a batch of whose load `beside_s` overlaps the step and `direct_s` does not."""
    return direct_s + max(0.0, beside_s - step_s)


def _part(wait_s: float, step_s: float) -> float:
    """Waiting over wall time."""
    return wait_s / (wait_s + step_s) if wait_s > 0 else 0.0


def shortest_quiet_step(direct_s: float, beside_s: float) -> float:
    """The shortest step that waits at most 1 % of its time.

    >>> shortest_quiet_step(0.0, 0.07), shortest_quiet_step(0.001, 0.0)
    (0.07, 0.099)
    """
    # Above `beside_s` only the direct part is waited for: direct / (direct + step) <= 0.01.
    return max(beside_s, 99 * direct_s)
