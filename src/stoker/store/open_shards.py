"""The shards that a process has open: as many as it may, over all caches, and what it knows of the others.

The descriptors of a process are few (often 1,024) and belong to everybody in it, so caches share a part of
them equally, and whoever opens one closes those that were not used for longest. A shard in use stays open:
it is closed when nobody refers to it.
"""

from __future__ import annotations

import errno
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from stoker.errors import ResourceError
from stoker.store.shard_facts import ShardFacts
from stoker.store.shard_read import Shard
from stoker.units import MIB

MOST_OPEN = 1024
"""Shards kept open by all caches of a process; more do not make anything quicker."""
FACTS_BYTES = 256 * MIB
"""Memory for what is known of shards, over all caches of a process."""

_living: dict[int, weakref.ref[OpenShards]] = {}
"""Of this process, by identity. Changed by single operations of a dict, which need no lock."""


def most_open() -> int:
    """Shards that a process keeps open: a quarter of the descriptors it may have.

    Another quarter is for those in use and the rest for readers, sockets and the user.
    """
    return max(4, min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class OpenShards:
    """Shards of one cache by their place in its index. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._facts: OrderedDict[int, ShardFacts] = OrderedDict()
        self._facts_bytes = 0

    def get(self, i: int, opening: Callable[[ShardFacts | None], Shard]) -> Shard:
        """Shard `i`, open.

        Args:
            opening: Opens it anew, given what is known of it. Several threads may be at it at a time.
        Raises:
            ResourceError: The process may not open another file, even with all shards closed.
        """
        with self._lock:
            shard = self._open.get(i)
            if shard is not None:
                self._open.move_to_end(i)
                return shard
            facts = self._facts.get(i)
        if id(self) not in _living:
            self._join()
        fresh = self._opened(opening, facts)
        with self._lock:
            shard = self._open.setdefault(i, fresh)
            self._open.move_to_end(i)
            self._keep(i, shard.facts)
        self.trim(most_open() // max(1, len(_living)))
        return shard

    def trim(self, most: int) -> None:
        """Refer to `most` shards at most, those used last."""
        with self._lock:
            while len(self._open) > most:
                self._open.popitem(last=False)

    def _join(self) -> None:
        """Become one of those that share the descriptors; the others make room."""
        own = id(self)
        _living[own] = weakref.ref(self, lambda _: _living.pop(own, None))
        everybody = list(_living.values())
        for other in everybody:
            if (shards := other()) is not None:
                shards.trim(most_open() // len(everybody))

    def _opened(self, opening: Callable[[ShardFacts | None], Shard], facts: ShardFacts | None) -> Shard:
        try:
            return opening(facts)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        for other in list(_living.values()):  # the process has used more than its part: give all of ours back
            if (shards := other()) is not None:
                shards.trim(0)
        try:
            return opening(facts)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ResourceError(
                f"a shard cannot be opened: the process has all of its {allowed} file descriptors open, and "
                f"next to none of them are shards. Allow more (ulimit -n {4 * allowed}), or close files"
            ) from error

    def _keep(self, i: int, facts: ShardFacts) -> None:
        """Remember what a shard said of itself, and forget the oldest of that where it takes too much."""
        if i not in self._facts:
            self._facts_bytes += facts.nbytes
        self._facts[i] = facts
        self._facts.move_to_end(i)
        while self._facts_bytes > FACTS_BYTES // max(1, len(_living)) and len(self._facts) > 1:
            self._facts_bytes -= self._facts.popitem(last=False)[1].nbytes
