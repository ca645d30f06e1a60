"""Decide whether what memory holds should change now. Arithmetic, like `tiers`; nothing moves here.

Memory that became short is given back at the next look; memory that became free is filled only once there has
been no shortage for a while, longer after each shortage. Between the two lies half of the reserve, so that
what is free may waver without anything moving to and fro.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stoker.plan.tiers import Plan

PATIENCE_S = 30.0
"""Seconds without a shortage before more is held than now; doubled by each shortage."""
MOST_PATIENCE_S = 600.0
LEAST_GAIN = 0.05
"""A plan is worth moving for that serves this part of the records from faster memory."""

MEMORIES: tuple[Literal["device", "host"], ...] = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """How long there has been no shortage, and how long there must be none before more memory is filled."""

    since_s: float
    """When memory was last short, or when the first look was."""
    patience_s: float = PATIENCE_S

    def after_shortage(self, now_s: float) -> Calm:
        """What follows a shortage at `now_s`.

        >>> Calm(since_s=0.0).after_shortage(50.0)
        Calm(since_s=50.0, patience_s=60.0)
        """
        return Calm(since_s=now_s, patience_s=min(MOST_PATIENCE_S, 2 * self.patience_s))

    def over(self, now_s: float) -> bool:
        """Whether it has been calm for long enough."""
        return now_s - self.since_s >= self.patience_s


def short(plan: Plan, usable: Mapping[str, int], reserves: Mapping[str, int]) -> frozenset[str]:
    """The memories of which `plan` holds more than there is, less half the reserve.

    Args:
        plan: What is held, or being brought in.
        usable: Bytes per memory that may be held in all, what is held included.
        reserves: Bytes per memory that a plan leaves free.
    """
    held = {row.tier: row.bytes for row in plan.rows}
    return frozenset(m for m in MEMORIES if held[m] and held[m] > usable[m] - reserves[m] // 2)


def gain(plan: Plan, fresh: Plan) -> float:
    """The part of all records that `fresh` serves from faster memory than `plan` does."""
    before, after = plan.records_by_tier(), fresh.records_by_tier()
    total = sum(before.values()) or 1
    device = after["device"] - before["device"]
    memory = device + after["host"] - before["host"]
    return max(device, memory) / total


def without(plan: Plan, tier: str, records: int) -> Plan:
    """The plan with that many records of `tier` on disk instead."""
    held = {row.tier: row for row in plan.rows}[tier]
    moved = min(records, held.records)
    size = held.bytes * moved // held.records if held.records else 0
    change = {tier: -1, "disk": 1}
    rows = tuple(
        replace(
            row,
            records=row.records + change.get(row.tier, 0) * moved,
            bytes=row.bytes + change.get(row.tier, 0) * size,
        )
        for row in plan.rows
    )
    return replace(plan, rows=rows, tier=max(rows, key=lambda row: row.records).tier)
