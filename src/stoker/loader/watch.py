"""Look at the machine while a loader runs, and say when its plan should change.

A look happens every two seconds at most, between two batches of the thread that serves. What follows from it
is arithmetic (`plan.moves`); `residency` carries it out.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace

from stoker.errors import ResourceError
from stoker.plan import Claim, Demand, Plan, Resources, plan_tiers
from stoker.plan.moves import LEAST_GAIN, MOST_PATIENCE_S, Calm, gain, short, without
from stoker.plan.resources import device_again
from stoker.plan.tiers import reserves_of
from stoker.units import format_bytes

LOOK_S = 2.0
"""Seconds between two looks at the machine, at least; one takes about a millisecond."""
STEPS_SEEN = 3
"""Steps after which a model has shown how much of its device it needs."""
FAULTS_SEEN = 64
"""Major page faults between two looks from which on it is asked which shards the system has put out."""

log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a plan is made from, so that it can be made again."""

    demand: Demand
    tier: str
    """The tier that was asked for; where it no longer holds everything, the rest goes where it can."""
    reserve_bytes: int | None
    look: Callable[[], Resources]
    """What this process may use now."""

    def plan(self, resources: Resources) -> Plan:
        """The plan for these resources; never refused."""
        try:
            return plan_tiers(self.demand, resources, tier=self.tier, reserve_bytes=self.reserve_bytes)
        except ResourceError:
            return plan_tiers(self.demand, resources, reserve_bytes=self.reserve_bytes)

    @property
    def waits_for_steps(self) -> bool:
        """Whether the device may be filled only once the model has shown what it needs."""
        return not self.demand.on_cpu and self.tier == "auto" and self.reserve_bytes is None


def major_faults() -> int:
    """Page faults of this process so far that had to read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Watch:
    """The plan of one loader as it changes. Asked by the thread that serves, and by no other."""

    def __init__(self, plan: Plan, ask: Ask, claim: Claim, wanted: Collection[Hashable]) -> None:
        """`plan` is what to aim at, `wanted` the keys of the shards that are served (`Claim.usable`)."""
        self._ask = ask
        self._claim = claim
        self._wanted = wanted
        self.seen = not ask.waits_for_steps
        """Whether the device may be filled by now."""
        self._faults = major_faults()
        now = time.monotonic()
        self._calm = Calm(since_s=now)
        self._next_s = now + LOOK_S
        self.plan = plan if self.seen else ask.plan(replace(self._usable(), device_bytes=0))
        """What is to be held now."""

    def due(self, steps: int, now_s: float) -> bool:
        """Whether it is time for a look."""
        return now_s >= self._next_s or (not self.seen and steps >= STEPS_SEEN)

    def look(self, steps: int, now_s: float) -> bool:
        """Look, and say whether `plan` is another one now."""
        self._next_s = now_s + LOOK_S
        shown = not self.seen and steps >= STEPS_SEEN
        self.seen = self.seen or shown
        usable = self._usable()
        ask = self._ask
        made = replace(ask.demand, table_bytes=0)  # tables are there by now, and the peak has an order
        reserves = reserves_of(made, usable, ask.tier, ask.reserve_bytes)
        room = {"device": usable.device_bytes, "host": usable.host_bytes}
        tight = short(self.plan, room, reserves)
        if tight:
            return self._shrink(tight, usable, now_s)
        fresh = ask.plan(usable)
        if not shown and (gain(self.plan, fresh) < LEAST_GAIN or not self._calm.over(now_s)):
            return False
        if self._calm.over(now_s) and now_s - self._calm.since_s >= MOST_PATIENCE_S:
            self._calm = Calm(since_s=self._calm.since_s)
        return self._adopt(fresh)

    def refused(self, now_s: float) -> None:
        """The device had no room after all: somebody else took it between the look and the filling."""
        self._shrink(frozenset({"device"}), self._usable(), now_s)

    def put_out(self, records: int, now_s: float) -> None:
        """That many records were put out of host memory by the system; they come from disk for a while."""
        self._calm = self._calm.after_shortage(now_s)
        log.warning(
            "%d records were put out of host memory and come from disk now. Batches stay the same", records
        )
        self.plan = without(self.plan, "host", records)

    def faulted(self) -> bool:
        """Whether the process met many page faults that went to disk since this was last asked."""
        now = major_faults()
        before, self._faults = self._faults, now
        return now - before >= FAULTS_SEEN

    def _usable(self) -> Resources:
        usable = self._claim.usable(self._ask.look(), self._wanted)
        if not self.seen:
            return replace(usable, device_bytes=0)
        return replace(usable, device_again_bytes=device_again(usable.device))

    def _shrink(self, tight: frozenset[str], usable: Resources, now_s: float) -> bool:
        """Hold what there is room for, and nothing on a device that is short until it has been calm."""
        self._calm = self._calm.after_shortage(now_s)
        if "device" in tight or not self.plan.records_by_tier()["device"]:
            usable = replace(usable, device_bytes=0)
        log.warning(
            "%s memory is short (%s of it may be held): records move to a slower tier. Batches stay the same",
            " and ".join(sorted(tight)),
            ", ".join(
                format_bytes(usable.device_bytes if m == "device" else usable.host_bytes)
                for m in sorted(tight)
            ),
        )
        return self._adopt(self._ask.plan(usable))

    def _adopt(self, fresh: Plan) -> bool:
        changed = fresh.records_by_tier() != self.plan.records_by_tier()
        self.plan = fresh
        return changed
