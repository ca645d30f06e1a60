"""Which shards are in which memory now, and bringing them there.

A loader starts at once: shards are read, verified and placed by a thread, and until a shard is there its
records are read from disk. As batches are the same bytes from either, nobody can tell but by the clock. Small
caches are in memory before the first batch.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import StalledError
from stoker.loader.memory import Memory
from stoker.loader.places import Places
from stoker.loader.pool import Pool, ending
from stoker.plan import Plan

if TYPE_CHECKING:
    from stoker.store import Cache

FIRST_WAIT_S = 0.05
"""How long the first batch waits for memory to be filled before it is read from disk instead."""


def assign(cache: Cache, places: Places, plan: Plan) -> dict[str, frozenset[int]]:
    """Which shards go to `device` and to `host`: whole shards, in order, up to the planned records."""
    budget = plan.records_by_tier()
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


def major_faults() -> int:
    """Page faults of this process so far that had to read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Residency:
    """The memories of a loader while they fill. One thread fills, one serves."""

    memories: Sequence[Memory]
    whole: Memory | None
    """The memory that is to hold every record served, or None."""
    complete: bool = False
    """Every shard is where it is meant to be."""
    _stopped: bool = False
    _error: Exception | None = None
    _faults: int = field(default_factory=major_faults)

    def fill(self, wait_s: float) -> None:
        """Begin to fill in a thread, and give it a moment to finish.

        Raises:
            Exception: What went wrong in that moment; what goes wrong later is raised by `serving`.
        """
        if self.complete or not self.memories:
            self.complete = True
            return
        ticket = Pool(1, "stoker-fill").submit(self._fill)
        try:
            ticket.result(wait_s, "filling memory")
        except StalledError:
            logging.getLogger("stoker").debug("memory is filled beside the first batches")

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
        return self.whole if self.complete else None

    def faulted(self) -> int:
        """Page faults of this process that went to disk since this was made: records that were put out of
        memory and came back. More than a few mean that the host tier does not hold.
        """
        return major_faults() - self._faults

    def _fill(self) -> None:
        try:
            for memory in self.memories:
                for shard in sorted(memory.shards):
                    if self._stopped or ending():
                        return
                    if not memory.ready[shard]:
                        memory.load(shard)
                        memory.ready[shard] = 1
        except Exception as error:  # noqa: BLE001 - the edge of a thread: kept, and raised where batches are made
            self._error = error
            return
        self.complete = True
