"""Prepare the next batches during a step, if that was measured to be faster.

Waking a thread costs some 30 us, more than a small batch takes, and a step that leaves no core free gains
nothing. So both ways are timed, a strip of batches each, and the quicker one is kept; the other is tried
again ever more rarely. Batches are the same, in the same order; only the thread that makes them changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.loader.chunks import RECORD
from stoker.loader.outputs import OutputSpec, plan_runs
from stoker.plan import RemoteDemand
from stoker.runtime.threads import Pool, Ticket, is_exiting
from stoker.store.cache import JointCache
from stoker.store.format import axis_length, rows_per_block
from stoker.store.mirror_blocks import BLOCK_BYTES
from stoker.store.storage import open_storage
from stoker.units import GIB, MIB

if TYPE_CHECKING:
    from stoker.loader.batch import Examples
    from stoker.loader.batching import BatchPlanner
    from stoker.loader.order import Ids, OrderKind, RankShare
    from stoker.loader.records import RecordTable
    from stoker.schema import Field
    from stoker.store import Cache
    from stoker.store.mirror import MirrorFolder, MirrorRoot

T = TypeVar("T")

HANDOVER_S = 30e-6
"""What it costs to have another thread make something.

Source: `benchmarks/plan_stall.py`, 2 cores.
"""
GAIN = 0.01
"""Part of a step's time that there must be to gain before the thread is tried."""
SLOWER = 3
"""Strips in a row that must be slower with the thread, by more than `GAIN`, before it is given up."""
MOST_STRIPS = 64
"""Strips, at most, until it is tried again."""
TURN_S = 1e-3
"""Small batches are made several at a time, of so many seconds together: one waking for all of them. To wake
a thread on an idle core takes the waking one 30 to 100 us too.

Source: `benchmarks/plan_stall.py`, W2 with a step of 2 ms, 2 cores.
"""
MOST_AT_ONCE = 8
TIMEOUT_S = 300.0
"""Seconds that one batch from memory may take."""
BEGIN_TIMEOUT_S = 3600.0
"""Seconds until the next strip is there; what is waited for meanwhile has its own, shorter ones."""


class PendingStrip:
    """The last strip that a thread began; all passes of a loader share it."""

    def __init__(self) -> None:
        self.ticket: Ticket[Any] | None = None

    def wait(self) -> None:
        """Until that strip has begun; a pass that was left may still be at it."""
        if self.ticket is not None:
            self.ticket.wait(BEGIN_TIMEOUT_S)
        self.ticket = None


class Strips(Generic[T]):
    """The strips of one pass.

    To begin one takes milliseconds (the order, the placement, slices). So where a thread makes the batches,
    it begins the next strip too, after the last batches of this one.
    """

    def __init__(self, source: Iterator[T], turn: PendingStrip) -> None:
        self._source = source
        self._turn = turn
        self._ticket: Ticket[T | None] | None = None

    def __iter__(self) -> Strips[T]:
        """Itself."""
        return self

    def __next__(self) -> T:
        """Return the next strip, begun now unless it was before."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            self._turn.wait()
            return next(self._source)
        self._turn.ticket = None  # it refers to what batches come from
        found = ticket.result(BEGIN_TIMEOUT_S, "beginning the next batches")
        if found is None:
            raise StopIteration
        return found

    def begin(self, pool: Pool) -> None:
        """Have the next one begun by a thread."""
        self._ticket = self._turn.ticket = pool.submit(partial(next, self._source, None))

    def close(self) -> None:
        """End the pass; nothing of it is at work afterwards."""
        if self._ticket is not None and not is_exiting():
            self._turn.wait()
        self._ticket = None


class BatchPrefetcher:
    """Decides for one loader. Called by the thread that iterates."""

    def __init__(self, *, cores: int, clock: Callable[[], float] = perf_counter) -> None:
        """`cores` are those that this process may use; with one there is nothing to gain."""
        self._pool = Pool(1, "stoker-prefetch", all_cores=True) if cores > 1 else None
        self._clock = clock
        self.in_thread = False
        """True if batches are made by the thread while the step computes."""
        self._begun_s = 0.0
        self._count = 0
        self._made: deque[float] = deque(maxlen=3)
        """Seconds in which the first batches of the last strips were made in line."""
        self._inline_s = 0.0
        """Seconds of a batch and its step when the last strip was made in line."""
        self._left = 0
        """Strips until the thread is tried again."""
        self._patience = 1
        self._slower = 0

    def of(self, batches: Iterable[Any], count: int, strips: Strips[Any] | None = None) -> Iterator[Any]:
        """Return the `count` batches of a strip, made in the quicker way; `strips` follow."""
        source = iter(batches)
        if self._pool is None:
            return source
        self._count, self._begun_s = count, self._clock()
        if self.in_thread:
            at_once = max(1, min(MOST_AT_ONCE, int(TURN_S / max(self._made[-1], 1e-9))))
            then = partial(strips.begin, self._pool) if strips else _nothing
            return _prefetch(source, self._pool, at_once, count, then)
        first = _some(source, 1)
        self._made.append(self._clock() - self._begun_s)
        return chain(_drained(first), source)

    def ended(self) -> None:
        """Compare the stall of the strip that has ended, and choose the steps of the next one."""
        if self._pool is None or not self._count:
            return
        each_s, self._count = (self._clock() - self._begun_s) / self._count, 0
        if self.in_thread:
            self._slower = self._slower + 1 if each_s > (1 + GAIN) * self._inline_s else 0
            # The thread costs more than it hides. Each failed trial makes the next one 4 times as far away.
            if self._slower == SLOWER:
                self.in_thread, self._slower = False, 0
                self._left = self._patience = min(MOST_STRIPS, 4 * self._patience)
            return
        self._inline_s = each_s
        self._left -= 1
        # The least that there is to hide, and the least to hide it behind: where in doubt, in line.
        gain_s = min(*self._made, each_s - max(self._made)) - HANDOVER_S
        self.in_thread = len(self._made) > 1 and self._left <= 0 and gain_s > GAIN * each_s


def _prefetch(
    source: Iterator[Any], pool: Pool, at_once: int, count: int, then: Callable[[], None]
) -> Iterator[Any]:
    """Yield the `count` batches of `source`, made while earlier ones are used; call `then` after the last."""
    size, left = 1, count - 1
    made = _some(source, 1)  # nothing is used meanwhile, so another thread would not be quicker
    ticket: Ticket[deque[Any]] | None = None
    try:
        while made:
            # Sizes double from 1, so that the second batch does not wait for many others.
            size = min(at_once, 2 * size, left)
            left -= size
            ticket = pool.submit(partial(_some, source, size)) if size else None
            if not left:
                then()
                then = _nothing
            yield from _drained(made)
            made = ticket.result(TIMEOUT_S, "a batch from memory") if ticket else ()
    finally:
        if ticket is not None and not is_exiting():  # alive at the exit: the thread may never come back
            ticket.wait(TIMEOUT_S)  # two threads must not gather into the same buffers


def _nothing() -> None:
    """Nothing follows."""


def _some(source: Iterator[Any], count: int) -> deque[Any]:
    return deque(islice(source, count))


def _drained(made: deque[Any]) -> Iterator[Any]:
    """Yield the batches that are released one by one: the memory of a large one is wanted for the next."""
    while made:
        yield made.popleft()


# ----------------------------------------------------------------------------------------------------------
# What comes next: the blocks that the next steps of an order take, up to one epoch ahead.
#
# An order is a pure function of seed and epoch, so what an epoch begins with is known while the one before
# it still runs. Nothing here reads or waits; `BlockPrefetcher` does.


MOST_KNOWN = 1 << 22
"""Blocks, counted once in each stretch, that are known ahead at most: 32 MiB."""
MOST_EXAMPLES = 1 << 14
"""Examples in a stretch at most, so that to make one takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some consecutive steps of an epoch."""

    begin: tuple[int, int]
    end: tuple[int, int]
    """Epoch and position of the first step, and of what follows the last."""
    own: NDArray[np.int64]
    """Blocks that this rank takes, in the order in which it first does."""
    every: NDArray[np.int64]
    """Blocks that any rank takes."""


class UpcomingBlocks:
    """The stretches from where a rank is on. Used by one thread."""

    def __init__(
        self,
        share: RankShare,
        ids: Callable[[int], Ids],
        blocks: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        most_blocks: Callable[[], int],
    ) -> None:
        """`ids`: an epoch's order; `blocks`: what examples take; `most_blocks`: what a stretch may take."""
        self._share, self._ids, self._blocks, self._most_blocks = share, ids, blocks, most_blocks
        self.stretches: deque[Stretch] = deque()
        """From the one that is being served on."""
        self.passed = 0
        """Stretches that are behind."""
        self._known = 0
        self._steps = 1
        """Of the next stretch that is made."""

    def at(self, epoch: int, position: int) -> None:
        """Note that serving has reached this position."""
        while self.stretches and self.stretches[0].end <= (epoch, position):
            self._known -= len(self.stretches.popleft().every)
            self.passed += 1
        # A jump: a state was loaded, or a pass was left. What is known is of another place.
        if not (self.stretches and self.stretches[0].begin <= (epoch, position)):
            self.passed += len(self.stretches)
            self.stretches.clear()
            self._known = 0
            self._add(epoch, position)

    @property
    def whole(self) -> bool:
        """True if an epoch from here on is known: what is not in it is not served at all."""
        epoch, position = self.stretches[0].begin
        return self.stretches[-1].end >= (epoch + 1, position)

    def extend(self) -> bool:
        """Know one more stretch; False if enough is known."""
        if self.whole or self._known >= MOST_KNOWN:
            return False
        self._add(*self.stretches[-1].end)
        return True

    def next_use(self, count: int) -> NDArray[np.int64]:
        """Return the stretches until any rank takes each of `count` blocks; the number known if none does."""
        uses = np.full(count, len(self.stretches), np.int64)
        # From the last stretch to the first: the nearest use is written last, and stays.
        for away in range(len(self.stretches) - 1, -1, -1):
            uses[self.stretches[away].every] = away
        return uses

    def _add(self, epoch: int, position: int) -> None:
        share = self._share
        if share.batches is not None:
            self._add_planned(share.batches, epoch, position)
            return
        whole, tail = share.whole_and_tail(position)
        if not whole and not tail:
            epoch, position = epoch + 1, 0
            whole, tail = share.whole_and_tail(position)
        ids = self._ids(epoch)
        steps = min(whole, self._steps, max(1, MOST_EXAMPLES // share.step))
        if steps:
            own = self._blocks(share.take(ids, position, steps))
            end = position + steps * share.step
            alone = share.world_size == 1 or share.contiguous
            every = own if alone else self._blocks(ids(position, end))
        else:
            own = self._blocks(share.take_tail(ids, position))
            end = share.positions
            every = own if share.contiguous else self._blocks(ids(position, end))
        after = (epoch, end) if steps and (whole > steps or tail) else (epoch + 1, 0)
        self._append((epoch, position), after, own, every, steps)

    def _add_planned(self, batches: BatchPlanner, epoch: int, position: int) -> None:
        """As `_add`, of batches that differ in size."""
        plan = batches.epoch(epoch)
        if (step := plan.step_at(position)) == plan.steps:
            epoch, position, step = epoch + 1, 0, 0
            plan = batches.epoch(epoch)
        mean = max(1, len(plan.ids) // max(1, plan.steps))
        stop = min(plan.steps, step + max(1, min(self._steps, MOST_EXAMPLES // mean)))
        every = plan.ids[plan.step_bounds[step] : plan.step_bounds[stop]]
        begins, sizes = (values[step:stop] for values in plan.of_rank(self._share.rank))
        own = [plan.ids[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        after = (epoch, int(plan.step_bounds[stop])) if stop < plan.steps else (epoch + 1, 0)
        blocks = self._blocks(np.concatenate(own)), self._blocks(every)
        self._append((epoch, position), after, *blocks, stop - step)

    def _append(
        self,
        begin: tuple[int, int],
        end: tuple[int, int],
        own: NDArray[np.int64],
        every: NDArray[np.int64],
        steps: int,
    ) -> None:
        self.stretches.append(Stretch(begin=begin, end=end, own=own, every=every))
        self._known += len(every)
        each = max(1, len(every) // max(1, steps))
        self._steps = max(1, min(2 * max(1, steps), self._most_blocks() // each))


class RequestDepth:
    """Bytes of requests to keep in flight: twice the product of bandwidth and shortest answer.

    A rate is all bytes that came in during one request, divided by its time. So it counts all requests that
    are in flight together (the estimate of BBR, Cardwell et al., ACM Queue 2016). The shortest answer is
    taken from many more requests: the few last ones may all have waited for each other.
    """

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least, self._most = least_bytes, most_bytes
        self.came = 0
        """Bytes that have come in all."""
        self._rates: deque[float] = deque(maxlen=64)
        self._took: deque[float] = deque(maxlen=2048)

    def ended(self, size: int, came_before: int, took_s: float) -> None:
        """Note that a request of `size` bytes took so long; `came_before` is `came` as it began."""
        self.came += size
        if took_s > 0:
            self._rates.append((self.came - came_before) / took_s)
            self._took.append(took_s)

    @property
    def bytes_s(self) -> float:
        """The most that has come in a second of late; 0: not known."""
        return max(self._rates, default=0.0)

    @property
    def bytes(self) -> int:
        """Bytes of requests to keep in flight now."""
        held = self.bytes_s * min(self._took, default=0.0)
        return int(min(self._most, max(self._least, 2 * held)))


# ----------------------------------------------------------------------------------------------------------
# Which blocks of which files some examples are read from, many examples at a time.
#
# Blocks are those that a mirror fetches and gives back (`store.mirror`), numbered over all shards of a
# cache. Reads nothing but headers: where a column begins is asked of each shard once.


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldExtent:
    """Steps of one field that an example takes."""

    name: str
    field: Field
    first: int = 0
    stop: int | None = None
    """From the window's start; None: whole records."""


class BlockLocator:
    """Finds the blocks that the examples of one loader are in. Used by one thread."""

    def __init__(
        self,
        cache: Cache,
        table: RecordTable,
        examples: Examples,
        outputs: tuple[OutputSpec, ...],
        block_bytes: int,
    ) -> None:
        """`block_bytes`: of the blocks that files are fetched in."""
        self._cache, self._table, self._examples = cache, table, examples
        self.block_bytes = block_bytes
        sizes = np.array([entry.bytes for entry in cache.index.shards], dtype=np.int64)
        ends = np.cumsum(-(-sizes // block_bytes))
        self.first: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), ends])
        """First block of each shard, and how many blocks there are, `(shards + 1,)`."""
        entries = enumerate(cache.index.shards)
        self._compressed = {i for i, entry in entries if entry.raw is not None}
        schema = cache.recipe.columns
        whole = dict.fromkeys(output.field for output in outputs if output.index == RECORD)
        self._taken = [FieldExtent(name=name, field=schema[name]) for name in whole] + [
            FieldExtent(name=run.field, field=schema[run.field], first=run.first, stop=run.stop)
            for run in plan_runs(schema, outputs)
            if run.field not in whole
        ]
        self._begins = {one.name: np.full(len(sizes), -1, np.int64) for one in self._taken}
        """Where each column begins in each shard; -1: not asked yet."""

    def blocks(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks that these examples are in, each once, in the order of first use."""
        records, starts = self._examples.locate(examples, self._examples.first)
        shard, row = self._table.shard[records], self._table.row[records].astype(np.int64)
        self._ask(np.unique(shard))
        taken: list[NDArray[np.int64]] = []
        owners: list[NDArray[np.int64]] = []
        for one in self._taken:
            begin, end = self._extent(one, shard, row, starts)
            self._to_file(shard, begin, end)
            low = begin // self.block_bytes
            count = np.where(end > begin, -(-end // self.block_bytes) - low, 0)
            owner = np.repeat(np.arange(len(shard)), count)
            inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
            taken.append((self.first[shard] + low)[owner] + inside)
            owners.append(owner)
        # Sorted by example first, so that `return_index` gives the first use of each block.
        every = np.concatenate([np.empty(0, np.int64), *taken])
        owned = np.concatenate([np.empty(0, np.int64), *owners])
        blocks, first = np.unique(every[np.argsort(owned, kind="stable")], return_index=True)
        return blocks[np.argsort(first)]

    def place(self, block: int) -> tuple[int, int]:
        """Shard, and which of its blocks."""
        shard = int(np.searchsorted(self.first, block, side="right")) - 1
        return shard, block - int(self.first[shard])

    def _ask(self, shards: NDArray[np.int32]) -> None:
        for shard in shards.tolist():
            for name, begins in self._begins.items():
                if begins[shard] < 0:
                    begins[shard] = self._cache.shard(shard).columns[name].offset

    def _extent(
        self, one: FieldExtent, shard: NDArray[np.int32], row: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte, and one past the last, of what examples read of a field in an ordinary shard."""
        before, length = self._lengths(one, shard, row)
        low, high = np.zeros_like(row), length
        if one.stop is not None:  # whole blocks of sums, within the record
            steps = rows_per_block(one.field)
            low = (starts + one.first) // steps * steps
            high = np.minimum(-(-(starts + one.stop) // steps) * steps, length)
        begin, size = self._begins[one.name][shard], one.field.row_bytes
        return begin + (before + low) * size, begin + (before + high) * size

    def _to_file(self, shard: NDArray[np.int32], begin: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        """Put the places in the file in place of those in the ordinary shard, where shards are compressed."""
        for number in self._compressed.intersection(np.unique(shard).tolist()):
            own = shard == number
            begin[own], end[own] = self._cache.shard(number).stored_extents(begin[own], end[own])

    def _lengths(
        self, one: FieldExtent, shard: NDArray[np.int32], row: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps before each record in its shard, and its own."""
        if not one.field.ragged:
            length = axis_length(one.field)
            return row * length, np.full_like(row, length)
        before, after = np.zeros_like(row), np.zeros_like(row)
        for number in np.unique(shard).tolist():
            own = np.flatnonzero(shard == number)
            offsets = self._cache.shard(number).offsets(one.name)
            before[own], after[own] = offsets[row[own]], offsets[row[own] + 1]
        return before, after - before


# ----------------------------------------------------------------------------------------------------------
# Fetch what the next steps take before they ask for it, and say what a mirror may give back first.
#
# For remote caches (`store.mirror`). Which blocks come next is known (`upcoming`): they are
# fetched in the order in which they are needed, as many bytes at a time as the way holds, as far ahead as a
# few seconds or a part of the mirror. Where the mirror is smaller than the set, blocks are ranked by
# their next use, so that what is needed last goes first (Belady, IBM Systems Journal 1966), over the end of
# an epoch too. Nothing depends on it: a block that is not here is fetched when it is read.


AT_ONCE = 32
"""Requests of one loader at a time, at most; how many there are follows from `RequestDepth`."""
LEAST_DEPTH_BYTES, MOST_DEPTH_BYTES = 32 * MIB, 256 * MIB
"""The least is four requests: what is near answers so soon that the way holds little, and yet a server has
more cores than one.
"""
LEAD_S = 2.0
"""Seconds of the rate at which bytes come that may be here ahead of need: a server that is busy says to wait
for about one."""
MOST_LEAD_BYTES = GIB
STRETCHES = 4
"""Stretches that are ahead of need at least, where there is enough: what was begun is counted by them."""
REFILL_AT = 0.75
"""More is begun once what is here ahead of need has fallen to this part of the most."""
SOON_PART = 2
"""A request takes along neighbors that are needed a little later: of one part in so many of that lead."""
RANKED_FROM = 0.7
"""Blocks are ranked once so much of a mirror is filled."""
LOOK_S = 0.05
"""Seconds that one turn looks ahead, at most, before it sees to requests again."""

log = logging.getLogger("stoker")


class MirroredShard(NamedTuple):
    """A shard of a remote cache."""

    folder: MirrorFolder
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Neighboring blocks of one shard."""

    shard: int
    first: int
    stop: int

    def extent(self, block_bytes: int) -> tuple[int, int]:
        """Return its first byte, and one past the last."""
        return self.first * block_bytes, self.stop * block_bytes


class BlockPrefetcher:
    """Reads ahead for one loader. `at` is called by the thread that serves; all else is done by others."""

    def __init__(
        self,
        share: RankShare,
        ids: Callable[[int], Ids],
        locator: BlockLocator,
        mirrors: Sequence[MirroredShard],
    ) -> None:
        """`ids` gives the order of an epoch; `mirrors`: where each shard comes from."""
        self._locator, self._mirrors = locator, mirrors
        self._room, self._ranks = mirror_room(mirrors), share.world_size
        self._set_bytes = int(locator.first[-1]) * locator.block_bytes
        self._run_blocks = min(m.folder.root.run_blocks for m in mirrors)
        self._depth = RequestDepth(LEAST_DEPTH_BYTES, MOST_DEPTH_BYTES)
        self._upcoming = UpcomingBlocks(share, ids, locator.blocks, lambda: self.most_blocks)
        self._line, self._pool = Pool(1, "stoker-blocks"), Pool(AT_ONCE, "stoker-fetch")
        self._lock = threading.Lock()
        self._where: tuple[int, int] = (0, 0)
        self._turning = self._again = False
        self._under_way = 0
        self._begun = 0
        """Stretches whose runs were begun, counted like `UpcomingBlocks.passed`."""
        self._requested: dict[int, int] = {}
        """Blocks of those stretches, each with the last of them that takes it."""
        self._runs: deque[BlockRun] = deque()
        self._ranked = -1

    def at(self, epoch: int, position: int) -> None:
        """Note that serving has reached this position."""
        self._where = (epoch, position)
        self._nudge()

    @property
    def lead_bytes(self) -> int:
        """The most bytes that may be loaded before they are needed."""
        lead = min(MOST_LEAD_BYTES, max(2 * self._depth.bytes, int(LEAD_S * self._depth.bytes_s)))
        if self._room is None or self._room >= self._set_bytes:
            return lead
        # Half of a mirror that one process reads; if all ranks are on one machine, each has its part.
        return min(lead, self._room // (1 + self._ranks))

    @property
    def most_blocks(self) -> int:
        """The most blocks of a stretch: few, since what was begun is counted by stretches."""
        return max(1, self.lead_bytes // STRETCHES // self._locator.block_bytes)

    def _nudge(self) -> None:
        # `_turns` decides to end under the same lock, so no position is lost between its last look and its
        # end.
        with self._lock:
            self._again = True
            if self._turning:
                return
            self._turning = True
        self._line.submit(self._turns)

    def _turns(self) -> None:
        while True:
            with self._lock:
                if not self._again or is_exiting():
                    self._turning = False
                    return
                self._again = False
            try:
                self._turn()
            except (StokerError, OSError) as error:  # the read itself will meet it, and report it
                log.debug("nothing is read ahead at %s: %s", self._where, error)

    def _turn(self) -> None:
        self._upcoming.at(*self._where)
        self._fetch()
        if self._room is None or self._room >= self._set_bytes:
            return
        until = time.monotonic() + LOOK_S
        while self._upcoming.extend():
            if time.monotonic() > until:
                self._again = True
                return
        if self._upcoming.passed != self._ranked:
            self._ranked = self._upcoming.passed
            self._rank()

    def _fetch(self) -> None:
        """Begin requests until enough is under way, or here ahead of need."""
        most = min(self._depth.bytes, self.lead_bytes)
        # Read without the lock: other threads only lower it, so at worst a request begins one turn later.
        while self._under_way < most and (run := self._next_run()) is not None:
            size = (run.stop - run.first) * self._locator.block_bytes
            self._pool.submit(partial(self._bring, run, size))  # first: it may have no thread for it
            with self._lock:
                self._under_way += size

    def _next_run(self) -> BlockRun | None:
        while True:
            while self._runs:
                run = self._runs.popleft()
                folder, file = self._mirrors[run.shard]
                if folder.absent_bytes(file, [run.extent(self._locator.block_bytes)]) > 0:
                    return run
            fresh = self._more()
            if not fresh:
                return None
            self._runs.extend(self._joined(fresh))

    def _joined(self, fresh: list[int]) -> Iterator[BlockRun]:
        """Yield requests for these blocks, and for neighbors of theirs that are needed soon after them.

        An order by blocks takes examples of its window at random, so neighbors are needed at different times.
        A request for each of them would be several times as slow.
        """
        soon = self._soon()
        first = self._locator.first
        for run in runs_of(np.array([*fresh, *soon]), self._locator, self._run_blocks):
            blocks = range(int(first[run.shard]) + run.first, int(first[run.shard]) + run.stop)
            early = [block for block in blocks if block in soon]
            if len(early) < len(blocks):
                self._requested.update((block, soon[block]) for block in early)
                yield run

    def _soon(self) -> dict[int, int]:
        """Return blocks of the stretches after those begun, each with the last stretch that takes it."""
        upcoming, most = self._upcoming, self.lead_bytes // SOON_PART // self._locator.block_bytes
        soon: dict[int, int] = {}
        at, until = self._begun - upcoming.passed, time.monotonic() + LOOK_S
        while len(soon) < most and time.monotonic() < until:
            if at == len(upcoming.stretches) and not upcoming.extend():
                break
            own: list[int] = upcoming.stretches[at].own.tolist()
            soon.update((block, upcoming.passed + at) for block in own if block not in self._requested)
            at += 1
        return soon

    def _more(self) -> list[int]:
        """Return the blocks that are needed next and were not begun.

        These are of several stretches, so that neighbors that an order takes one after the other come in one
        request.
        """
        upcoming, fresh = self._upcoming, list[int]()
        passed, most, until = upcoming.passed, self.lead_bytes, time.monotonic() + LOOK_S
        self._requested = {block: last for block, last in self._requested.items() if last >= passed}
        if len(self._requested) * self._locator.block_bytes > REFILL_AT * most:
            return fresh
        while not self._requested or len(self._requested) * self._locator.block_bytes < most:
            begun = max(0, self._begun - passed)
            if begun == len(upcoming.stretches) and not upcoming.extend():
                break
            own: list[int] = upcoming.stretches[begun].own.tolist()
            fresh += [block for block in own if block not in self._requested]
            self._requested.update(dict.fromkeys(own, passed + begun))
            self._begun = passed + begun + 1
            if time.monotonic() > until:
                self._again = True
                break
        return fresh

    def _bring(self, run: BlockRun, size: int) -> None:
        came, begin, got = self._depth.came, time.perf_counter(), False
        try:
            folder, file = self._mirrors[run.shard]
            got = not is_exiting() and folder.bring(file, [run.extent(self._locator.block_bytes)])
        except (StokerError, OSError) as error:
            log.debug("%s was not read ahead: %s", run, error)
        finally:
            with self._lock:
                self._under_way -= size
                if got:
                    self._depth.ended(size, came, time.perf_counter() - begin)
            self._nudge()

    def _rank(self) -> None:
        first, spaces = self._locator.first, {folder.root.space for folder, _ in self._mirrors}
        filled = (space.used() / space.limit_bytes for space in spaces if space.limit_bytes)
        if max(filled, default=0.0) < RANKED_FROM:
            return
        away = self._upcoming.next_use(int(first[-1]))
        # A mirror removes the blocks first that were read longest ago. So the later a block is needed, the
        # older the time that it gets.
        used = np.maximum(1, int(time.time()) - 1 - away).astype(np.uint32)
        for shard, (folder, file) in enumerate(self._mirrors):
            folder.rank(file, used[first[shard] : first[shard + 1]])


def runs_of(blocks: NDArray[np.int64], locator: BlockLocator, most: int) -> list[BlockRun]:
    """Return neighboring blocks joined into requests of at most `most`, the first needed ones first."""
    order = np.argsort(blocks, kind="stable")
    ranked = blocks[order]
    shards = np.searchsorted(locator.first, ranked, side="right") - 1
    cuts = np.flatnonzero((np.diff(ranked) != 1) | (np.diff(shards) != 0)) + 1
    found: list[tuple[int, BlockRun]] = []
    for piece, places in zip(np.split(ranked, cuts), np.split(order, cuts), strict=True):
        for at in range(0, len(piece), most):
            some = piece[at : at + most]
            shard, first = locator.place(int(some[0]))
            when = int(places[at : at + most].min())
            found.append((when, BlockRun(shard=shard, first=first, stop=first + len(some))))
    return [run for _, run in sorted(found, key=lambda one: one[0])]


def find_mirror_roots(cache: Cache) -> tuple[MirrorRoot, ...]:
    """Return the mirrors that records of a cache come through; none if all files are local."""
    caches = cache.members if isinstance(cache, JointCache) else (cache,)
    folders = [open_storage(one.path).mirror for one in caches]
    return tuple({id(one.root): one.root for one in folders if one is not None}.values())


def describe_remote(
    cache: Cache, kind: OrderKind, *, examples: int, example_bytes: float, step_examples: int
) -> RemoteDemand | None:
    """Return what a plan asks about a remote cache; None where its files are all on this machine."""
    shards = find_mirrors(cache)
    if not shards:
        return None
    return RemoteDemand(
        url=shards[0].folder.url,
        bytes=sum(entry.bytes for entry in cache.index.shards),
        room_bytes=mirror_room(shards),
        block_bytes=BLOCK_BYTES,
        examples=examples,
        example_bytes=example_bytes * (cache.index.stored_ratio or 1.0),
        step_examples=step_examples,
        order=str(kind),
    )


def make_block_prefetcher(
    cache: Cache, locator: Callable[[int], BlockLocator], share: RankShare, ids: Callable[[int], Ids]
) -> BlockPrefetcher | None:
    """Return what reads ahead for a loader of `cache`; None where its files are all on this machine.

    Args:
        cache: What is served.
        locator: Gives which blocks of so many bytes examples are in.
        share, ids: As `UpcomingBlocks`.
    """
    shards = find_mirrors(cache)
    return None if not shards else BlockPrefetcher(share, ids, locator(BLOCK_BYTES), shards)


def mirror_room(shards: Sequence[MirroredShard]) -> int | None:
    """Return the bytes that the smallest of the mirrors may hold; None: no limit."""
    rooms = (shard.folder.root.space.limit_bytes for shard in shards)
    return min((room for room in rooms if room is not None), default=None)


def find_mirrors(cache: Cache) -> list[MirroredShard] | None:
    """Return where each shard of a cache comes from; None where some are files of this machine."""
    if isinstance(cache, JointCache):
        parts = [find_mirrors(member) for member in cache.members]
        return None if None in parts else [one for part in parts if part is not None for one in part]
    folder = open_storage(cache.path).mirror
    if folder is None:
        return None
    return [MirroredShard(folder=folder, file=entry.file) for entry in cache.index.shards]
