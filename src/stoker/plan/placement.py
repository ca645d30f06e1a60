"""Decide whether what memory holds should change now. Arithmetic, like `tiers`; nothing moves here.

Memory that became short is given back at the next look. Memory that became free is filled only once there has
been no shortage for a while, longer after each shortage. Half of the reserve lies between the two limits, so
that free memory may waver without records moving to and fro.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakSet

from stoker.plan.resources import Resources
from stoker.plan.tiers import Plan
from stoker.units import format_bytes

BACKOFF_S = 30.0
"""Seconds without a shortage before more is held than now; doubled by each shortage."""
MOST_BACKOFF_S = 600.0
LEAST_GAIN = 0.05
"""A plan is worth moving for that serves this part of the records from faster memory."""

MEMORIES: tuple[Literal["device", "host"], ...] = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortageBackoff:
    """Time since the last shortage, and how long it must be before more memory is filled."""

    since_s: float
    """When memory was last short, or when the first look was."""
    backoff_s: float = BACKOFF_S

    def after_shortage(self, now_s: float) -> ShortageBackoff:
        """Return what follows a shortage at `now_s`.

        >>> ShortageBackoff(since_s=0.0).after_shortage(50.0)
        ShortageBackoff(since_s=50.0, backoff_s=60.0)
        """
        return ShortageBackoff(since_s=now_s, backoff_s=min(MOST_BACKOFF_S, 2 * self.backoff_s))

    def over(self, now_s: float) -> bool:
        """Return True if it has been calm for long enough."""
        return now_s - self.since_s >= self.backoff_s


def short_memories(plan: Plan, usable: Mapping[str, int], reserves: Mapping[str, int]) -> frozenset[str]:
    """Return the memories of which `plan` holds more than there is, less half the reserve.

    Args:
        plan: What is held, or being brought in.
        usable: Bytes per memory that may be held in all, what is held included.
        reserves: Bytes per memory that a plan leaves free.
    """
    held = {row.tier: row.bytes for row in plan.rows}
    return frozenset(m for m in MEMORIES if held[m] and held[m] > usable[m] - reserves[m] // 2)


def plan_gain(plan: Plan, fresh: Plan) -> float:
    """Return the part of all records that `fresh` serves from faster memory than `plan` does."""
    before, after = plan.records_by_tier(), fresh.records_by_tier()
    total = sum(before.values()) or 1
    device = after["device"] - before["device"]
    memory = device + after["host"] - before["host"]
    return max(device, memory) / total


def move_to_disk(plan: Plan, tier: str, records: int) -> Plan:
    """Return the plan with that many records of `tier` on disk instead."""
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


# ----------------------------------------------------------------------------------------------------------
# One account of memory for all loaders of a process, so that two do not plan for the same free bytes.
#
# A loader claims what it means to hold the moment it has decided, long before a byte of it is read: until
# then the machine reports that memory as free to everybody. Records that the system shares (a mapped shard,
# which two loaders of one cache both serve) are counted once. Arithmetic only; nothing here asks the
# machine.


class Reservation:
    """The memory that one loader reserves, and how much of it is filled. It ends with its last reference."""

    __slots__ = ("__weakref__", "_ledger", "parts", "taken")

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.parts: dict[str, Mapping[Hashable, int]] = {}
        """Per memory (`host`, or a device's name) the bytes of each part, by a key that tells parts apart."""
        self.taken: dict[str, int] = {}
        """Per memory the bytes that the machine no longer reports as free because of this claim."""

    def usable(self, resources: Resources, wanted: Collection[Hashable] = ()) -> Resources:
        """Return what this claim may use: free bytes and its own, less what others claim and did not take.

        Args:
            resources: As the machine reports them.
            wanted: Keys of parts that this claim wants; holding what another one holds costs nothing.
        """
        host = self._ledger.balance("host", self, wanted)
        device = self._ledger.balance(resources.device, self, wanted)
        return replace(
            resources,
            host_bytes=max(0, resources.host_bytes + host),
            host_limit=resources.host_limit + _less(host),
            device_bytes=max(0, resources.device_bytes + device),
            device_name=resources.device_name + _less(device),
        )


class MemoryLedger:
    """All claims of a process. For several threads at once."""

    def __init__(self) -> None:
        self._claims: WeakSet[Reservation] = WeakSet()
        self._lock = threading.Lock()

    def claim(self) -> Reservation:
        """Return a new claim, of nothing yet."""
        made = Reservation(self)
        with self._lock:
            self._claims.add(made)
        return made

    def balance(self, memory: str, own: Reservation, wanted: Collection[Hashable]) -> int:
        """Return bytes to add to what the machine reports as free of `memory`, for `own`; mostly below 0."""
        with self._lock:
            others = [claim for claim in self._claims if claim is not own]
        parts: dict[Hashable, int] = {}
        for claim in others:
            parts.update(claim.parts.get(memory, {}))
        due = sum(size for key, size in parts.items() if key not in wanted)
        taken = sum(claim.taken.get(memory, 0) for claim in others)
        return own.taken.get(memory, 0) - max(0, due - taken)


def _less(balance: int) -> str:
    return f", less {format_bytes(-balance)} for other loaders" if balance < 0 else ""


MEMORY_LEDGER = MemoryLedger()
"""The account of this process."""
