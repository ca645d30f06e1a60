"""A plan in words: why these tiers, with the figures that decided.

Text only; nothing here decides. It is separate from `tiers.py` so that the arithmetic stays readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import arg
from stoker.plan.rates import Rates
from stoker.plan.resources import Resources
from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.plan.tiers import Demand, Plan, TierShare

NO_STALL = 0.01
"""A stall below this is called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plan was made from."""

    demand: Demand
    resources: Resources
    rates: Rates
    reserves: dict[str, int]
    """Bytes left free, per memory tier."""
    budgets: dict[str, int]
    """Bytes that may be filled, per memory tier."""


def explain(plan: Plan, facts: Facts, asked: str) -> str:
    """The reason of `plan`: what went where, what decided, what it costs, and what would do as well."""
    parts = [_placed(plan, asked)]
    parts += [_budget(row, facts) for row in plan.rows if row.tier in facts.budgets and row.records]
    if facts.demand.on_cpu and asked in ("auto", "device"):
        parts.append("with device cpu the device tier is the host tier")
    if facts.demand.stored_ratio is not None:
        parts.append(_compressed(facts.demand.stored_ratio, facts.rates))
    if facts.demand.elsewhere is not None:
        parts.append(facts.demand.elsewhere.say())
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


def say_need(facts: Facts, tier: str, stored: int) -> str:
    """The error for a tier that was asked for and cannot hold `stored` records."""
    demand, resources = facts.demand, facts.resources
    free, limit, name = (
        (resources.device_bytes, resources.device_name, "device memory")
        if tier == "device"
        else (resources.host_bytes, resources.host_limit, "host memory")
    )
    return (
        f"tier {tier}: {format_count(stored)} records of {format_bytes(demand.record_bytes)} take "
        f"{format_bytes(stored * demand.record_bytes)}, but {format_bytes(facts.budgets[tier])} of {name} "
        f"may be filled ({format_bytes(free)} free, {limit}, less a reserve of "
        f"{format_bytes(facts.reserves[tier])}). Use {arg('tier', 'auto')}, which puts the rest on a "
        f"slower tier, "
        "store a smaller dtype, or lower reserve_bytes"
    )


def table(plan: Plan) -> str:
    """The tiers that hold something, one a line, and from which step on nothing waits."""
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
    size = format_bytes(sum(row.bytes for row in plan.rows))
    why = "" if asked == "auto" else f", as tier={asked} asks"
    if not held:
        return f"no records to place{why}"
    if len(held) == 1:
        return f"all {format_count(total, 'record')} ({size}) on the {held[0].tier} tier{why}"
    shares = ", ".join(f"{format_count(row.records)} on the {row.tier} tier" for row in held)
    return f"{format_count(total, 'record')} ({size}): {shares}{why}"


def _budget(row: TierShare, facts: Facts) -> str:
    resources = facts.resources
    free, limit = (
        (resources.device_bytes, resources.device_name)
        if row.tier == "device"
        else (resources.host_bytes, resources.host_limit)
    )
    return (
        f"{format_bytes(row.bytes)} of the {format_bytes(facts.budgets[row.tier])} that may be filled there "
        f"({format_bytes(free)} usable, {limit}, reserve {format_bytes(facts.reserves[row.tier])})"
    )


def _cost(plan: Plan) -> str:
    if plan.no_stall_step_s is None:
        return "the stall is not known while records are missing"
    if plan.step_s is None:
        return f"no stall (below 1 %) at steps of {format_seconds(plan.no_stall_step_s)} or longer"
    stall = plan.predicted_stall(plan.step_s)
    assert stall is not None
    return f"stall {format_percent(stall)} at a step of {format_seconds(plan.step_s)}"


def _as_well(plan: Plan) -> list[str]:
    """Slower tiers that would not stall either, or from which length of a step on."""
    fastest = next((i for i, row in enumerate(plan.rows) if row.records), len(plan.rows))
    slower = [row for row in plan.rows[fastest + 1 :] if not row.records and row.direct_s is not None]
    said: list[str] = []
    for row in slower:
        assert row.direct_s is not None
        if row.stall is None:
            from_s = max(row.beside_s, 99 * row.direct_s)
            said.append(f"the {row.tier} tier would not stall at steps of {format_seconds(from_s)} or longer")
        elif row.stall < NO_STALL:
            said.append(f"the {row.tier} tier would stall {format_percent(row.stall)} as well")
    return said
