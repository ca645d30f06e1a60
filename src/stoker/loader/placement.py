"""Decide which shards are in which memory now, bring them there, and release them.

A loader starts at once: a thread reads, verifies and places shards, and until a shard is there its records
come from the next slower tier. Small caches are in memory before the first batch. The device is filled once
the model has shown what it needs, and what is held follows the memory that is free (`PlacementWatch`).
Batches are the same bytes from everywhere, so only the clock tells the difference.

The thread that serves makes and removes memories, between two batches. The thread that fills loads and drops
shards inside of them, which is safe at any time (`Memory.drop`).
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stoker.errors import ResourceError, StalledError
from stoker.loader import tiers as device_tier
from stoker.loader.tiers import Memory, map_host
from stoker.plan import Plan, Resources, plan_tiers
from stoker.plan.placement import (
    LEAST_GAIN,
    MOST_BACKOFF_S,
    ShortageBackoff,
    move_to_disk,
    plan_gain,
    short_memories,
)
from stoker.plan.resources import device_again, give_back
from stoker.plan.tiers import reserves_of
from stoker.runtime.threads import Pool, Ticket, is_exiting
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.loader.design import Design
    from stoker.loader.records import RecordTable
    from stoker.store import Cache


# ----------------------------------------------------------------------------------------------------------
# Look at the machine while a loader runs, and say when its plan should change.
#
# A look happens every two seconds at most, between two batches of the thread that serves. What follows from
# it is arithmetic (`plan.placement`); `Placement` does it.


LOOK_S = 2.0
"""Seconds between two looks at the machine, at least; one takes about a millisecond."""
STEPS_SEEN = 3
"""Steps after which a model has shown how much of its device it needs."""
FAULTS_SEEN = 64
"""From this many major page faults between two looks on, the system is asked which shards it has evicted."""

log = logging.getLogger("stoker")


def replan(design: Design, resources: Resources) -> Plan:
    """Return the plan for these resources; what the tier asked for cannot hold goes to slower ones."""
    demand, options = design.demand, design.options
    try:
        return plan_tiers(demand, resources, tier=options.tier, reserve_bytes=options.reserve_bytes)
    except ResourceError:
        return plan_tiers(demand, resources, reserve_bytes=options.reserve_bytes)


def major_faults() -> int:
    """Return the page faults of this process so far that had to read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class PlacementWatch:
    """The plan of one loader as it changes. Used by the thread that serves, and by no other."""

    def __init__(self, design: Design) -> None:
        demand, options = design.demand, design.options
        self._design = design
        self._wanted = shard_parts(design.cache, design.table.shards(), demand.record_bytes).keys()
        # How much of its device a model needs is not known before it has run, unless the user set it.
        self.seen = demand.on_cpu or options.tier != "auto" or options.reserve_bytes is not None
        """True once the device may be filled."""
        self._faults = major_faults()
        now = time.monotonic()
        self._calm = ShortageBackoff(since_s=now)
        self._next_s = now + LOOK_S
        self.plan = design.plan if self.seen else replan(design, replace(self._usable(), device_bytes=0))
        """What is to be held now."""

    def due(self, steps: int, now_s: float) -> bool:
        """Return True if it is time for a look."""
        return now_s >= self._next_s or (not self.seen and steps >= STEPS_SEEN)

    def look(self, steps: int, now_s: float) -> bool:
        """Look, and return True if `plan` has changed."""
        self._next_s = now_s + LOOK_S
        shown = not self.seen and steps >= STEPS_SEEN
        self.seen = self.seen or shown
        usable = self._usable()
        demand, options = self._design.demand, self._design.options
        made = replace(demand, table_bytes=0)  # tables are there by now, and the peak has an order
        reserves = reserves_of(made, usable, options.tier, options.reserve_bytes)
        room = {"device": usable.device_bytes, "host": usable.host_bytes}
        tight = short_memories(self.plan, room, reserves)
        if tight:
            return self._shrink(tight, usable, now_s)
        fresh = replan(self._design, usable)
        if not shown and (plan_gain(self.plan, fresh) < LEAST_GAIN or not self._calm.over(now_s)):
            return False
        # Calm for as long as we ever wait: after the next shortage the waits are short again.
        if self._calm.over(now_s) and now_s - self._calm.since_s >= MOST_BACKOFF_S:
            self._calm = ShortageBackoff(since_s=self._calm.since_s)
        return self._adopt(fresh)

    def refused(self, now_s: float) -> None:
        """Plan without the device: another process took its memory between the look and the filling."""
        self._shrink(frozenset({"device"}), self._usable(), now_s)

    def evict(self, records: int, now_s: float) -> None:
        """Note that the system has evicted so many records from host memory; disk serves them for a while."""
        self._calm = self._calm.after_shortage(now_s)
        log.warning(
            "the system evicted %d records from host memory; they come from disk now. Batches stay the same",
            records,
        )
        self.plan = move_to_disk(self.plan, "host", records)

    def faulted(self) -> bool:
        """Return True if the process met many page faults that went to disk since the last call."""
        now = major_faults()
        before, self._faults = self._faults, now
        return now - before >= FAULTS_SEEN

    def _usable(self) -> Resources:
        usable = self._design.reservation.usable(self._design.measure(), self._wanted)
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
        return self._adopt(replan(self._design, usable))

    def _adopt(self, fresh: Plan) -> bool:
        changed = fresh.records_by_tier() != self.plan.records_by_tier()
        self.plan = fresh
        return changed


FIRST_WAIT_S = 0.05
"""How long the first batch waits for memory to be filled before it is read from disk instead."""
LEAST_RESIDENT = 0.9
"""A shard of which the system keeps less than this in memory is read from disk instead, which is quicker."""


def assign(cache: Cache, table: RecordTable, plan: Plan) -> dict[str, frozenset[int]]:
    """Return the shards of `device` and of `host`: entire shards, in order, up to the planned records.

    What that leaves of the device's part goes to the host, unless the host is full already.
    """
    budget = plan.records_by_tier()
    if budget["host"] and not budget["disk"]:
        budget["host"] += budget["device"]
    wanted = table.shards()
    targets: dict[str, frozenset[int]] = {}
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
        targets[tier] = frozenset(taken)
    return targets


def shard_parts(
    cache: Cache, shards: Iterable[int], record_bytes: float, *, own: Hashable = None
) -> dict[Hashable, int]:
    """Return the bytes of each shard, by keys that all loaders of a shard share, or that are this `own`'s."""
    entries = cache.index.shards
    return {(own, entries[s].file, entries[s].header): int(entries[s].rows * record_bytes) for s in shards}


def reserve_plan(design: Design) -> None:
    """Note in the ledger what a plan is to hold, before anything is taken."""
    _reserve_shards(design, assign(design.cache, design.table, design.plan), on_device=True)


def _reserve_shards(design: Design, targets: Mapping[str, frozenset[int]], *, on_device: bool) -> None:
    """Note in the ledger which shards are to be in which memory."""
    cache, demand, reservation = design.cache, design.demand, design.reservation
    reservation.parts["host"] = shard_parts(cache, targets["host"], demand.record_bytes)
    if on_device:
        own = id(reservation)
        parts = shard_parts(cache, targets["device"], demand.record_bytes, own=own)
        reservation.parts[demand.device] = parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySet:
    """The memories of a loader at one time. Another object whenever batches should be made in another way."""

    device: Memory | None = None
    host: Memory | None = None
    whole: Memory | None = None
    """The fastest of them that holds every record served by now; None: none does."""

    @property
    def memories(self) -> list[Memory]:
        """Those there are, the faster one first."""
        return [memory for memory in (self.device, self.host) if memory is not None]


class Placement:
    """The memories of one loader. One thread fills, one serves; other methods are the latter's."""

    def __init__(self, design: Design) -> None:
        self._design = design
        self._stopped = False
        self._error: Exception | None = None
        self._faults = major_faults()
        self._lock = threading.Lock()
        self._line = Pool(1, "stoker-fill")
        helpers = design.fill_threads - 1
        self._helpers = Pool(helpers, "stoker-fill") if helpers else None
        self._targets: Mapping[str, frozenset[int]] = {}
        self._steps = 0
        self._freed: Ticket[Any] | None = None
        """A device memory was removed; done once the thread that fills does not refer to it any more."""
        self._watched = not design.options.static and design.options.tier not in ("disk", "encode")
        self.complete = False
        """True once every shard is where it should be."""
        self.held = MemorySet()
        self._watch = PlacementWatch(design)
        self._settle(self._planned())

    @property
    def plan(self) -> Plan:
        """Records that each tier is to hold now."""
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
        """Fill no more; for the owner, when no pass will follow."""
        self._stopped = True

    def serving(self) -> Memory | None:
        """Return the memory that holds everything by now, or None.

        Raises:
            CorruptError: A shard that was being brought into memory does not match its checksums.
            Exception: Anything else that ended the filling (an I/O error, no memory).
        """
        if self._error is not None:
            raise self._error
        return self.held.whole

    def turn(self, batches: int) -> MemorySet:
        """Return what is held now; call it between batches, after `batches` more of them were used.

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
                    self._evict(now)
        return self.held

    def faulted(self) -> int:
        """Return the page faults of this process that went to disk since this was made.

        Each is a record that was evicted and read again; more than a few mean that host memory is short.
        """
        return major_faults() - self._faults

    def _planned(self) -> dict[str, frozenset[int]]:
        return assign(self._design.cache, self._design.table, self._watch.plan)

    @torch.inference_mode(False)  # what is made here outlives the caller's mode, and a thread fills it
    def _settle(self, targets: Mapping[str, frozenset[int]]) -> None:
        """Make `targets` the placement: remove the memories that cannot become that, and add new ones.

        A device memory that needs another size is removed here and made again at a later turn. By then
        nothing refers to it any more. There may be no room for both.
        """
        device, host = self.held.device, self.held.host
        # The fill thread may still refer to a memory that is replaced, so its bytes are not free yet.
        # `_reclaim` makes the new one once the pool has run the empty ticket.
        if device is not None and device.shards != targets["device"]:
            device_tier.finish_reads(self._design.options.device)
            device, self._freed = None, self._line.submit(bool)  # no work: done after what is being filled
        if device is None and targets["device"] and self._freed is None:
            device = self._on_device(targets["device"])
            if device is None:
                return self._settle(self._planned())
        if host is not None and not self._fits(host, targets["host"]):
            host = None
        if host is None and targets["host"]:
            host = map_host(self._design.cache, self._design.table, targets["host"])
        with self._lock:
            self.complete = False
            self._targets = targets
            self._hold(device, host)
        self._account()

    def _fits(self, host: Memory, shards: frozenset[int]) -> bool:
        """Return True if a host memory can hold just these shards from now on."""
        return shards == host.shards if host.drop is None else shards <= host.shards

    def _on_device(self, shards: frozenset[int]) -> Memory | None:
        """Return room for `shards` on the device; None, and another plan, if the device is full after all."""
        design = self._design
        with suppress(torch.OutOfMemoryError):
            return device_tier.allocate_on_device(design.cache, design.table, shards, design.options.device)
        # The error is gone, and with it the fields that there was room for.
        give_back(design.options.device)
        self._watch.refused(time.monotonic())
        return None

    def _reclaim(self) -> None:
        """Give the removed memory back to the device, and make the memory that replaces it."""
        self._freed = None
        give_back(self._design.options.device)
        self._settle(self._targets)
        self._line.submit(self._fill)

    def _evict(self, now_s: float) -> None:
        """Serve from disk what the system has evicted from host memory."""
        host = self.held.host
        if host is None or host.drop is None or host.resident is None:
            return
        lost = [
            s for s in sorted(self._targets["host"]) if host.ready[s] and host.resident(s) < LEAST_RESIDENT
        ]
        if lost:
            self._watch.evict(sum(self._design.cache.index.shards[s].rows for s in lost), now_s)
            self._settle({**self._targets, "host": self._targets["host"] - frozenset(lost)})
            self._line.submit(self._fill)

    def _hold(self, device: Memory | None, host: Memory | None) -> None:
        """Note what is held. A memory that served everything continues to until a shard of it is to go."""
        wanted = self._design.table.shards()
        staying = self._targets["host"] | self._targets["device"]  # shards on their way to the device stay
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
        # A new object makes the loader build its batches in another way, so only if something changed.
        if (device, host, whole) != (before.device, before.host, before.whole):
            self.held = MemorySet(device=device, host=host, whole=whole)

    def _account(self) -> None:
        """Tell other loaders of this process what this one is to hold, and has taken."""
        design, (device, host) = self._design, (self.held.device, self.held.host)
        _reserve_shards(design, self._targets, on_device=self._watch.seen)
        taken = design.reservation.taken
        taken[design.demand.device] = 0 if device is None else sum(t.nbytes for t in device.sources.values())
        held = sum(design.reservation.parts["host"].values())
        taken["host"] = 0 if host is None else int(held * host.private)

    def _fill(self) -> None:
        targets, held = self._targets, self.held
        try:
            self._release(targets, held)
            todo = deque(
                (memory, shard)
                for memory in held.memories
                for shard in sorted(targets[memory.tier])
                if not memory.ready[shard]
            )
            load = partial(self._load, todo, targets)
            tickets: list[Ticket[None]] = []
            if self._helpers is not None:
                with suppress(ResourceError):  # no thread can be started: fewer fill
                    helpers = min(self._helpers.size, len(todo) - 1)
                    tickets.extend(self._helpers.submit(load) for _ in range(helpers))
            load()
            for ticket in tickets:  # nothing may refer to a memory that is to go
                while not ticket.wait(LOOK_S):
                    pass
            if self._error is not None or self._stopped or is_exiting() or targets is not self._targets:
                return
            # `_settle` holds the same lock: an outdated fill must not put old memories back.
            with self._lock:
                if targets is not self._targets:
                    return
                self._hold(held.device, held.host)
            self._release(targets, held)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: kept, and raised where batches are made
            self._error = error
            return
        self.complete = True

    def _load(self, todo: deque[tuple[Memory, int]], targets: Mapping[str, frozenset[int]]) -> None:
        """Bring shards into memory until none is left; several threads share `todo`.

        An error is kept at once: another thread may be waiting for storage that does not answer.
        """
        try:
            device_tier.begin_thread(self._design.options.device)
            while todo:
                # Other targets: the serving thread has queued another `_fill`, which takes over.
                if self._stopped or is_exiting() or targets is not self._targets:
                    return
                try:
                    memory, shard = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                # In this order: other threads read `ready` without a lock, and gather where it is 1.
                memory.load(shard)
                memory.ready[shard] = 1
        except Exception as error:  # noqa: BLE001 - the edge of a thread, as in `_fill`
            self._error = error
            todo.clear()

    def _release(self, targets: Mapping[str, frozenset[int]], held: MemorySet) -> None:
        """Drop the shards of host memory that have another target, once they are there."""
        host, device = held.host, held.device
        if host is None or host.drop is None:
            return
        for shard in sorted(host.shards - targets["host"]):
            awaited = shard in targets["device"] and not (device is not None and device.ready[shard])
            if host.ready[shard] and not awaited and targets is self._targets:
                # First 0, then the drop: no new batch may gather from a shard whose memory goes.
                host.ready[shard] = 0
                host.drop(shard)
