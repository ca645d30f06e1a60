"""Which shards are in which memory now, and bringing them there or letting go of them.

A loader starts at once: shards are read, verified and placed by a thread, and until a shard is there its
records come from the next slower tier. Small caches are in memory before the first batch. The device is
filled once the model has shown what it needs, and what is held follows the memory there is (`Watch`). As
batches are the same bytes from everywhere, nobody can tell but by the clock.

The thread that serves makes and removes memories, between two batches; the thread that fills loads and drops
shards inside of them, which is safe at any time (`Memory.drop`).
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from stoker.errors import ResourceError, StalledError
from stoker.loader import tiers as device_tier
from stoker.loader.tiers import Memory, map_host
from stoker.plan import Demand, Plan, Reservation, Resources, plan_tiers
from stoker.plan.placement import LEAST_GAIN, MOST_PATIENCE_S, Calm, gain, short, without
from stoker.plan.resources import device_again, give_back
from stoker.plan.tiers import reserves_of
from stoker.runtime.threads import Pool, Ticket, is_exiting
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.loader.design import Design
    from stoker.loader.places import Places
    from stoker.store import Cache


# ----------------------------------------------------------------------------------------------------------
# Look at the machine while a loader runs, and say when its plan should change.
#
# A look happens every two seconds at most, between two batches of the thread that serves. What follows from
# it is arithmetic (`plan.placement`); `Residency` carries it out.


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

    def __init__(self, plan: Plan, ask: Ask, claim: Reservation, wanted: Collection[Hashable]) -> None:
        """`plan` is what to aim at, `wanted` keys of the shards that are served (`Reservation.usable`)."""
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


FIRST_WAIT_S = 0.05
"""How long the first batch waits for memory to be filled before it is read from disk instead."""
LEAST_RESIDENT = 0.9
"""A shard of which the system keeps less than this in memory is read from disk instead, which is quicker."""


def assign(cache: Cache, places: Places, plan: Plan) -> dict[str, frozenset[int]]:
    """Which shards go to `device` and to `host`: whole shards, in order, up to the planned records.

    What is left of the device's part by that goes to the host with its own, unless that is full already.
    """
    budget = plan.records_by_tier()
    if budget["host"] and not budget["disk"]:
        budget["host"] += budget["device"]
    wanted = places.shards()
    homes: dict[str, frozenset[int]] = {}
    for tier in ("device", "host"):
        left = budget[tier]
        taken: list[int] = []
        for shard in wanted:
            rows = cache.index.shards[shard].rows
            if rows > left:
                break
            left -= rows
            taken.append(shard)
        wanted = wanted[len(taken) :]
        homes[tier] = frozenset(taken)
    return homes


def parts_of(
    cache: Cache, shards: Iterable[int], record_bytes: float, *, own: Hashable = None
) -> dict[Hashable, int]:
    """Bytes of each shard, by keys that are equal for all loaders that serve it, or for this `own` alone."""
    entries = cache.index.shards
    return {(own, entries[s].file, entries[s].header): int(entries[s].rows * record_bytes) for s in shards}


def claim_plan(claim: Reservation, cache: Cache, places: Places, plan: Plan, demand: Demand) -> None:
    """Note in the ledger what a plan means to hold, before anything is taken."""
    _claim_homes(claim, cache, assign(cache, places, plan), demand, on_device=True)


def _claim_homes(
    claim: Reservation, cache: Cache, homes: Mapping[str, frozenset[int]], demand: Demand, *, on_device: bool
) -> None:
    """Note in the ledger which shards are meant to be in which memory."""
    claim.parts["host"] = parts_of(cache, homes["host"], demand.record_bytes)
    if on_device:
        claim.parts[demand.device] = parts_of(cache, homes["device"], demand.record_bytes, own=id(claim))


def _nothing() -> None:
    """Work that only tells that what came before it is over."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """The memories of a loader at one time. Another object whenever batches should be made in another way."""

    device: Memory | None = None
    host: Memory | None = None
    whole: Memory | None = None
    """The fastest of them that holds every record served by now; None: none does."""

    @property
    def memories(self) -> list[Memory]:
        """Those there are, the faster one first."""
        return [memory for memory in (self.device, self.host) if memory is not None]


class Residency:
    """The memories of one loader. One thread fills, one serves; other methods are the latter's."""

    def __init__(self, design: Design) -> None:
        self._design = design
        self._stopped = False
        self._error: Exception | None = None
        self._faults = major_faults()
        self._lock = threading.Lock()
        self._line = Pool(1, "stoker-fill")
        self._homes: Mapping[str, frozenset[int]] = {}
        self._steps = 0
        self._freed: Ticket[None] | None = None
        """A device memory was removed; done once the thread that fills does not refer to it any more."""
        self._watched = not design.static and design.ask.tier not in ("disk", "encode")
        self.complete = False
        """Every shard is where it is meant to be."""
        self.held = Held()
        keys = parts_of(design.cache, design.places.shards(), design.ask.demand.record_bytes)
        self._watch = Watch(design.plan, design.ask, design.claim, keys.keys())
        self._settle(self._planned())

    @property
    def plan(self) -> Plan:
        """Which tier is to hold how many records now."""
        return self._watch.plan

    def fill(self, wait_s: float) -> None:
        """Begin to fill in a thread, and give it a moment to finish.

        Raises:
            Exception: What went wrong in that moment; what goes wrong later is raised by `serving`.
        """
        if not self.held.memories:
            self.complete = True
            return
        ticket = self._line.submit(self._fill)
        try:
            ticket.result(wait_s, "filling memory")
        except StalledError:
            logging.getLogger("stoker").debug("memory is filled while the first batches are served")

    def stop(self) -> None:
        """Fill no more; for the owner, when nobody will iterate again."""
        self._stopped = True

    def serving(self) -> Memory | None:
        """The memory that holds everything by now, or None.

        Raises:
            CorruptError: A shard that was being brought into memory does not match its checksums.
            Exception: Anything else that ended the filling (an I/O error, no memory).
        """
        if self._error is not None:
            raise self._error
        return self.held.whole

    def turn(self, batches: int) -> Held:
        """What is held now; to be asked between batches, after `batches` more of them were used.

        Raises:
            Exception: As `serving`.
        """
        if self._error is not None:
            raise self._error
        self._steps += batches
        if self._watched:
            if self._freed is not None and self._freed.done():
                self._reclaim()
            now = time.monotonic()
            if self._watch.due(self._steps, now):
                if self._watch.look(self._steps, now):
                    self._settle(self._planned())
                    self._line.submit(self._fill)
                elif self._watch.faulted():
                    self._put_out(now)
        return self.held

    def faulted(self) -> int:
        """Page faults of this process that went to disk since this was made: records that were put out of
        memory and came back. More than a few mean that the host tier does not hold.
        """
        return major_faults() - self._faults

    def _planned(self) -> dict[str, frozenset[int]]:
        return assign(self._design.cache, self._design.places, self._watch.plan)

    @torch.inference_mode(False)  # what is made here outlives the caller's mode, and a thread fills it
    def _settle(self, homes: Mapping[str, frozenset[int]]) -> None:
        """Make `homes` what is meant to be held: remove the memories that cannot become that, add new ones.

        A device memory that is to have another size is removed here and made anew at a later turn, when
        nobody refers to it any more: there may be no room for both.
        """
        device, host = self.held.device, self.held.host
        if device is not None and device.shards != homes["device"]:
            device_tier.finish_reads(self._design.device)
            device, self._freed = None, self._line.submit(_nothing)  # after what is being filled now
        if device is None and homes["device"] and self._freed is None:
            device = self._on_device(homes["device"])
            if device is None:
                return self._settle(self._planned())
        if host is not None and not self._fits(host, homes["host"]):
            host = None
        if host is None and homes["host"]:
            host = map_host(self._design.cache, self._design.places, homes["host"])
        with self._lock:
            self.complete = False
            self._homes = homes
            self._hold(device, host)
        self._account()

    def _fits(self, host: Memory, shards: frozenset[int]) -> bool:
        """Whether a host memory can hold just these shards from now on."""
        return shards == host.shards if host.drop is None else shards <= host.shards

    def _on_device(self, shards: frozenset[int]) -> Memory | None:
        """Room for `shards` on the device; None, and a plan without it, where there is none after all."""
        design = self._design
        with suppress(torch.OutOfMemoryError):
            return device_tier.resident(design.cache, design.places, shards, design.device)
        # The error is gone, and with it the fields that there was room for.
        give_back(design.device)
        self._watch.refused(time.monotonic())
        return None

    def _reclaim(self) -> None:
        """Give the memory of what was removed back to the device, and make what comes in its place."""
        self._freed = None
        give_back(self._design.device)
        self._settle(self._homes)
        self._line.submit(self._fill)

    def _put_out(self, now_s: float) -> None:
        """Serve from disk what the system has put out of host memory."""
        host = self.held.host
        if host is None or host.drop is None or host.resident is None:
            return
        lost = [s for s in sorted(self._homes["host"]) if host.ready[s] and host.resident(s) < LEAST_RESIDENT]
        if lost:
            self._watch.put_out(sum(self._design.cache.index.shards[s].rows for s in lost), now_s)
            self._settle({**self._homes, "host": self._homes["host"] - frozenset(lost)})
            self._line.submit(self._fill)

    def _hold(self, device: Memory | None, host: Memory | None) -> None:
        """Note what is held; what served everything goes on to until a shard of it is to go."""
        wanted = self._design.places.shards()
        staying = self._homes["host"] | self._homes["device"]  # shards on their way to the device stay
        whole = next(
            (
                memory
                for memory in (device, host)
                if memory is not None
                and all(memory.ready[shard] for shard in wanted)
                and (memory.tier == "device" or staying.issuperset(wanted))
            ),
            None,
        )
        before = self.held
        if (device, host, whole) != (before.device, before.host, before.whole):
            self.held = Held(device=device, host=host, whole=whole)

    def _account(self) -> None:
        """Tell other loaders of this process what this one means to hold, and has taken."""
        design, claim = self._design, self._design.claim
        _claim_homes(claim, design.cache, self._homes, design.ask.demand, on_device=self._watch.seen)
        device = self.held.device
        claim.taken[design.ask.demand.device] = (
            0 if device is None else sum(t.nbytes for t in device.sources.values())
        )
        host = self.held.host
        held = 0 if host is None else sum(claim.parts["host"].values())
        claim.taken["host"] = 0 if host is None else int(held * host.private)

    def _fill(self) -> None:
        homes, held = self._homes, self.held
        try:
            device_tier.begin_thread(self._design.device)
            self._release(homes, held)
            for memory in held.memories:
                for shard in sorted(homes[memory.tier]):
                    if self._stopped or is_exiting() or homes is not self._homes:
                        return
                    if not memory.ready[shard]:
                        memory.load(shard)
                        memory.ready[shard] = 1
            with self._lock:
                if homes is not self._homes:
                    return
                self._hold(held.device, held.host)
            self._release(homes, held)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: kept, and raised where batches are made
            self._error = error
            return
        self.complete = True

    def _release(self, homes: Mapping[str, frozenset[int]], held: Held) -> None:
        """Drop the shards of host memory that are meant to be elsewhere, unless they are not there yet."""
        host, device = held.host, held.device
        if host is None or host.drop is None:
            return
        for shard in sorted(host.shards - homes["host"]):
            awaited = shard in homes["device"] and not (device is not None and device.ready[shard])
            if host.ready[shard] and not awaited and homes is self._homes:
                host.ready[shard] = 0
                host.drop(shard)
