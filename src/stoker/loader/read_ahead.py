"""Fetch what the next steps take before they ask for it, and say what a mirror may give back first.

For caches that lie elsewhere (`store.mirror`). Which blocks come next is known (`horizon`): they are fetched
in the order in which they are needed, as many bytes at a time as the way holds, as far ahead as a few seconds
or a quarter of the mirror. Where the mirror is smaller than the set, blocks are ranked by their next use, so
that what is needed last goes first (Belady, IBM Systems Journal 1966), over the end of an epoch too. Nothing
depends on it: a block that is not here is fetched by whoever reads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.loader.horizon import Depth, Horizon
from stoker.loader.order import Ids, OrderKind
from stoker.loader.ranks import Share
from stoker.loader.reach import Reach
from stoker.plan import Elsewhere
from stoker.runtime.threads import Pool, ending
from stoker.store.joint import Joint
from stoker.store.local import LocalStorage
from stoker.store.mirror.block_map import BLOCK_BYTES
from stoker.units import GIB, MIB

if TYPE_CHECKING:
    from stoker.store import Cache
    from stoker.store.mirror.folder import MirrorFolder

AT_ONCE = 32
"""Requests of one loader at a time, at most; how many there are follows from `Depth`."""
LEAST_DEPTH_BYTES, MOST_DEPTH_BYTES = 32 * MIB, 256 * MIB
"""The least is four requests: what is near answers so soon that the way holds little, and yet a server has
more cores than one.
"""
LEAD_S = 2.0
"""Seconds of the rate at which bytes come that may lie here ahead of need: a server that is busy says to wait
for about one."""
MOST_LEAD_BYTES = GIB
LEAD_PART = 4
"""What is ahead of need takes at most one part in so many of a mirror."""
REFILL_AT = 0.75
"""More is begun once what is here ahead of need has fallen to this part of the most."""
RANKED_FROM = 0.7
"""Blocks are ranked once so much of a mirror is filled."""
LOOK_S = 0.05
"""Seconds that one turn looks ahead, at most, before it sees to requests again."""

log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring blocks of one shard."""

    shard: int
    first: int
    stop: int


class ReadAhead:
    """Reads ahead for one loader. `at` is called by the thread that serves; all else is done by others."""

    def __init__(
        self, share: Share, ids: Callable[[int], Ids], reach: Reach, mirrors: Sequence[Mirrored]
    ) -> None:
        """`ids` gives the order of an epoch; `mirrors`: where each shard comes from."""
        self._reach, self._mirrors = reach, mirrors
        self._room = min((m.room for m in mirrors if m.room is not None), default=None)
        self._run_blocks = min(m.folder.root.run_blocks for m in mirrors)
        self._depth = Depth(LEAST_DEPTH_BYTES, MOST_DEPTH_BYTES)
        self._horizon = Horizon(share, ids, reach.blocks, lambda: self.most_blocks)
        self._line, self._pool = Pool(1, "stoker-horizon"), Pool(AT_ONCE, "stoker-fetch-ahead")
        self._lock = threading.Lock()
        self._where: tuple[int, int] = (0, 0)
        self._turning = self._again = False
        self._under_way = 0
        self._begun = 0
        """Stretches whose runs were begun, counted like `Horizon.passed`."""
        self._ahead: dict[int, int] = {}
        """Blocks of those stretches, each with the last of them that takes it."""
        self._runs: deque[Run] = deque()
        self._ranked = -1

    def at(self, epoch: int, position: int) -> None:
        """Serving has come to here."""
        self._where = (epoch, position)
        self._nudge()

    @property
    def lead_bytes(self) -> int:
        """How many bytes may be here ahead of need."""
        lead = min(MOST_LEAD_BYTES, max(2 * self._depth.bytes, int(LEAD_S * self._depth.bytes_s)))
        return lead if self._room is None else min(lead, self._room // LEAD_PART)

    @property
    def most_blocks(self) -> int:
        """How many blocks a stretch may take: few, as what is begun is counted by stretches."""
        return max(1, self.lead_bytes // LEAD_PART // self._reach.block_bytes)

    def _nudge(self) -> None:
        with self._lock:
            self._again = True
            if self._turning:
                return
            self._turning = True
        self._line.submit(self._turns)

    def _turns(self) -> None:
        while True:
            with self._lock:
                if not self._again or ending():
                    self._turning = False
                    return
                self._again = False
            try:
                self._turn()
            except (StokerError, OSError) as error:  # whoever reads the same will meet it, and say so
                log.debug("nothing is read ahead at %s: %s", self._where, error)

    def _turn(self) -> None:
        self._horizon.at(*self._where)
        self._fetch()
        if self._room is None or self._room >= int(self._reach.first[-1]) * self._reach.block_bytes:
            return
        until = time.monotonic() + LOOK_S
        while self._horizon.extend():
            if time.monotonic() > until:
                self._again = True
                return
        if self._horizon.passed != self._ranked:
            self._ranked = self._horizon.passed
            self._rank()

    def _fetch(self) -> None:
        """Begin requests until enough is under way, or here ahead of need."""
        most = min(self._depth.bytes, self.lead_bytes)
        while self._under_way < most and (run := self._next_run()) is not None:
            size = (run.stop - run.first) * self._reach.block_bytes
            with self._lock:
                self._under_way += size
            self._pool.submit(partial(self._bring, run, size))

    def _next_run(self) -> Run | None:
        while True:
            while self._runs:
                run = self._runs.popleft()
                if self._mirrors[run.shard].lacks(run, self._reach.block_bytes):
                    return run
            blocks = self._more()
            if not blocks:
                return None
            self._runs.extend(runs_of(np.array(blocks), self._reach, self._run_blocks))

    def _more(self) -> list[int]:
        """The blocks that are needed next and were not begun. Several stretches together, so that neighbours
        that an order takes one after the other come in one request.
        """
        horizon, fresh = self._horizon, list[int]()
        passed, most, until = horizon.passed, self.lead_bytes, time.monotonic() + LOOK_S
        self._ahead = {block: last for block, last in self._ahead.items() if last >= passed}
        if len(self._ahead) * self._reach.block_bytes > REFILL_AT * most:
            return fresh
        while not self._ahead or len(self._ahead) * self._reach.block_bytes < most:
            begun = max(0, self._begun - passed)
            if begun == len(horizon.stretches) and not horizon.extend():
                break
            own: list[int] = horizon.stretches[begun].own.tolist()
            fresh += [block for block in own if block not in self._ahead]
            self._ahead.update(dict.fromkeys(own, passed + begun))
            self._begun = passed + begun + 1
            if time.monotonic() > until:
                self._again = True
                break
        return fresh

    def _bring(self, run: Run, size: int) -> None:
        came, begin, got = self._depth.came, time.perf_counter(), False
        try:
            got = not ending() and self._mirrors[run.shard].bring(run, self._reach.block_bytes)
        except (StokerError, OSError) as error:
            log.debug("%s was not read ahead: %s", run, error)
        finally:
            with self._lock:
                self._under_way -= size
                if got:
                    self._depth.ended(size, came, time.perf_counter() - begin)
            self._nudge()

    def _rank(self) -> None:
        first, filled = self._reach.first, {}
        for mirror in self._mirrors:
            if mirror.folder.root not in filled:
                filled[mirror.folder.root] = mirror.filled
        if max(filled.values()) < RANKED_FROM:
            return
        away = self._horizon.next_use(int(first[-1]))
        used = np.maximum(1, int(time.time()) - 1 - away).astype(np.uint32)
        for shard, mirror in enumerate(self._mirrors):
            mirror.rank(used[first[shard] : first[shard + 1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """A shard that lies elsewhere."""

    folder: MirrorFolder
    file: str

    @property
    def room(self) -> int | None:
        """Bytes that the mirror may hold; None: as many as there are."""
        return self.folder.root.space.limit_bytes

    @property
    def filled(self) -> float:
        """The part of that which is taken, 0..1."""
        return self.folder.root.space.used() / self.room if self.room else 0.0

    def lacks(self, run: Run, block_bytes: int) -> bool:
        """Whether some of these blocks are not here."""
        return self.folder.absent_bytes(self.file, [(run.first * block_bytes, run.stop * block_bytes)]) > 0

    def bring(self, run: Run, block_bytes: int) -> bool:
        """Fetch these blocks; whether they came."""
        return self.folder.bring(self.file, [(run.first * block_bytes, run.stop * block_bytes)])

    def rank(self, used: NDArray[np.uint32]) -> None:
        """Say which blocks go first: those with the least number."""
        self.folder.rank(self.file, used)


def runs_of(blocks: NDArray[np.int64], reach: Reach, most: int) -> list[Run]:
    """Neighbours joined into requests of at most so many blocks, in the order in which they are first
    needed.
    """
    order = np.argsort(blocks, kind="stable")
    ranked = blocks[order]
    shards = np.searchsorted(reach.first, ranked, side="right") - 1
    cuts = np.flatnonzero((np.diff(ranked) != 1) | (np.diff(shards) != 0)) + 1
    found: list[tuple[int, Run]] = []
    for piece, places in zip(np.split(ranked, cuts), np.split(order, cuts), strict=True):
        for at in range(0, len(piece), most):
            some = piece[at : at + most]
            shard, first = reach.place(int(some[0]))
            when = int(places[at : at + most].min())
            found.append((when, Run(shard=shard, first=first, stop=first + len(some))))
    return [run for _, run in sorted(found, key=lambda one: one[0])]


def fetching_of(cache: Cache) -> Callable[[], float] | None:
    """Gives the seconds that reads of a cache have waited for where it lies; None where that is here."""
    counters = list({id(m.folder.counters): m.folder.counters for m in mirrored(cache) or ()}.values())
    return (lambda: sum(one.wait_s for one in counters)) if counters else None


def elsewhere_of(
    cache: Cache, kind: OrderKind, *, examples: int, example_bytes: float, step_examples: int
) -> Elsewhere | None:
    """What a plan asks about a cache that lies elsewhere; None where its files are all on this machine."""
    shards = mirrored(cache)
    if not shards:
        return None
    rooms = [shard.room for shard in shards if shard.room is not None]
    return Elsewhere(
        url=shards[0].folder.url,
        bytes=sum(entry.bytes for entry in cache.index.shards),
        room_bytes=min(rooms, default=None),
        block_bytes=BLOCK_BYTES,
        examples=examples,
        example_bytes=example_bytes * (cache.index.stored_ratio or 1.0),
        step_examples=step_examples,
        order=str(kind),
    )


def read_ahead_of(
    cache: Cache, reach: Callable[[int], Reach], share: Share, ids: Callable[[int], Ids]
) -> ReadAhead | None:
    """What reads ahead for a loader of `cache`; None where its files are all on this machine.

    Args:
        cache: What is served.
        reach: Gives which blocks of so many bytes examples lie in.
        share, ids: As `Horizon`.
    """
    shards = mirrored(cache)
    return None if not shards else ReadAhead(share, ids, reach(BLOCK_BYTES), shards)


def mirrored(cache: Cache) -> list[Mirrored] | None:
    """Where each shard of a cache comes from; None where some are files of this machine."""
    if isinstance(cache, Joint):
        parts = [mirrored(member) for member in cache.members]
        return None if None in parts else [one for part in parts if part is not None for one in part]
    folder = LocalStorage(cache.path).mirror
    if folder is None:
        return None
    return [Mirrored(folder=folder, file=entry.file) for entry in cache.index.shards]
