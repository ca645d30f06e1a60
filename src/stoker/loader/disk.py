"""Batches whose records are not all in memory: positional reads by a few threads, verified, a batch ahead.

Each example is read straight into its place in the batch; what is in a memory already is gathered from there,
so that a batch may draw from several tiers. Reads have a deadline: storage that does not answer costs a
`StalledError`, never a hang.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.batch import REUSE_FROM_BYTES, Buffers, lasting
from stoker.loader.chunks import Chunk, Locator, host
from stoker.loader.gather import RaggedGather, twin_for
from stoker.loader.options import Options
from stoker.loader.outputs import RECORD, Output, view_for
from stoker.loader.places import Places
from stoker.loader.tiers import Memory, bytes_of
from stoker.runtime.threads import Pool, Ticket
from stoker.store.shard import most_open
from stoker.units import KIB, MIB

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.schema import Schema
    from stoker.store import Cache, Shard
    from stoker.store.shard import Verify


# ----------------------------------------------------------------------------------------------------------
# What one thread of the disk tier reads: its piece of a batch, each example into its place.
#
# First all that the page cache has is copied, for which nothing waits. What it lacks is announced to the
# system before the first of it is read, so that more reads are under way than there are threads.


ADVISED = hasattr(os, "posix_fadvise")
"""Whether the system can be told what is about to be read."""
ALONE_FROM_BYTES = 64 * KIB
"""Reads from this size on are cheap enough one by one. What the system reads beyond them, guessing from what
lies in the page cache around, made batches up to twice as long.

Source: docs/design/026-plan-against-measured.md.
"""
JOINED_GAP_BYTES = 64 * KIB
"""Steps of a window closer than this are read in one go."""
JOINED_BYTES = 256 * KIB
"""Records next to each other on disk are read in one go up to this size: what was read is then still in the
core's cache when it is compared with its sums."""


Target: TypeAlias = tuple[int, int, int, int, int]
"""`(output, size, at, begin, count)`, all in bytes but the first: `count` from `begin` of a run on go to `at`
in an example of this output, which has `size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps of one field that are read together, counted from the window's start."""

    field: str
    first: int
    stop: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Some examples and where their values belong."""

    shard: NDArray[np.int32]
    row: NDArray[np.int32]
    starts: NDArray[np.int64]
    """Per example of the batch its shard, its row there, and its first step."""
    values: list[Any]
    """Per output a CPU tensor, or a list to be filled with tensors."""
    spaces: list[memoryview[Any] | None]
    """The bytes of the tensors; None for lists."""
    cuts: Mapping[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = dataclass_field(
        default_factory=dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
    )
    """By output that takes some rows of a ragged field: per example the first of them, and how many."""


class Rows:
    """Whole records of one field that lie next to each other on disk."""

    __slots__ = ("_bytes", "_field", "_first", "_outs", "_shard")

    def __init__(self, shard: Shard, field: str, first: int, out: memoryview[Any]) -> None:
        self._shard, self._field, self._first = shard, shard.fields[field], first
        self._outs, self._bytes = [out], len(out)

    def took(self, row: int, out: memoryview[Any]) -> bool:
        """Have another row read into `out` as well, if it is the next one and there is room; whether so."""
        if row != self._first + len(self._outs) or self._bytes + len(out) > JOINED_BYTES:
            return False
        self._outs.append(out)
        self._bytes += len(out)
        return True

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """Read them, or without `wait` only if the page cache has them; whether that was done.

        Raises:
            CorruptError: They do not match their sums.
        """
        return self._field.rows(self._first, self._outs, verify, wait=wait)

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """Descriptor, offset and bytes of what is read."""
        offset, _ = self._field.extent(self._first, 0, 0, verify)
        return self._shard.advice(offset, self._bytes)


class Steps:
    """Steps of one record that one example takes, for one output or several."""

    __slots__ = ("_first", "_place", "_row", "_run", "_shard", "_spaces")

    def __init__(
        self, shard: Shard, row: int, start: int, run: Run, spaces: list[memoryview[Any] | None], place: int
    ) -> None:
        self._shard, self._row, self._first = shard, row, start + run.first
        self._run, self._spaces, self._place = run, spaces, place

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `Rows.read`."""
        run, first = self._run, self._first
        stop = first + run.stop - run.first
        data = self._shard.fields[run.field].steps(self._row, first, stop, verify, wait=wait)
        if data is None:
            return False
        for output, size, at, begin, count in run.targets:
            space = self._spaces[output]
            assert space is not None
            to = self._place * size + at
            space[to : to + count] = data[begin : begin + count]
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """As `Rows.extent`."""
        run, first = self._run, self._first
        stop = first + run.stop - run.first
        extent = self._shard.fields[run.field].extent(self._row, first, stop, verify)
        return self._shard.advice(*extent)


class Cut:
    """Consecutive rows of one record of a ragged field."""

    __slots__ = ("_field", "_first", "_out", "_row", "_shard", "_stop")

    def __init__(
        self, shard: Shard, field: str, row: int, extent: tuple[int, int], out: memoryview[Any]
    ) -> None:
        """`extent`: the first of the rows, and how many."""
        self._shard, self._field, self._row, self._out = shard, shard.fields[field], row, out
        self._first, self._stop = extent[0], sum(extent)

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `Rows.read`."""
        data = self._field.steps(self._row, self._first, self._stop, verify, wait=wait)
        if data is None:
            return False
        self._out[:] = data
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """As `Rows.extent`."""
        return self._shard.fileno(), *self._field.extent(self._row, self._first, self._stop, verify)


class Pieces:
    """Reads pieces of batches of these outputs; safe to use from several threads."""

    def __init__(self, schema: Schema, outputs: tuple[Output, ...], threads: int) -> None:
        """`threads`: how many read at a time."""
        self._outputs = outputs
        self._whole = [i for i, output in enumerate(outputs) if output.index == RECORD]
        self._sizes = [output.example_bytes for output in outputs]
        self._runs = plan_runs(schema, outputs)
        runs = ((run.stop - run.first) * schema[run.field].row_bytes for run in self._runs)
        self._alone = ADVISED and max([0, *(self._sizes[i] for i in self._whole), *runs]) >= ALONE_FROM_BYTES
        # What all threads have open together is a part of what the process may have open.
        self._at_once = max(1, most_open() // threads)
        self._told: weakref.WeakSet[Shard] = weakref.WeakSet()
        """Shards of which nothing is read on by the system."""

    def read(self, cache: Cache, piece: NDArray[np.int64], wanted: Wanted, verify: Verify) -> int:
        """Read the examples at these places of a batch, sorted by shard and row, into their outputs.

        Returns:
            How many reads had to wait for storage.
        Raises:
            CorruptError: A record's bytes do not match their checksums.
        """
        own = wanted.shard[piece]
        begins = np.flatnonzero(np.diff(own, prepend=-1))[:: self._at_once]
        return sum(self._read(cache, some, wanted, verify) for some in np.split(piece, begins[1:]))

    def _read(self, cache: Cache, piece: NDArray[np.int64], wanted: Wanted, verify: Verify) -> int:
        """The same for a piece of few enough shards to have all of them open."""
        later = [read for read in self._reads(cache, piece, wanted) if not read.read(verify, wait=False)]
        if ADVISED:
            for read in later:
                with suppress(OSError):  # a file system that takes no advice is read all the same
                    os.posix_fadvise(*read.extent(verify), os.POSIX_FADV_WILLNEED)
        for read in later:
            read.read(verify, wait=True)
        return len(later)

    def _reads(self, cache: Cache, piece: NDArray[np.int64], wanted: Wanted) -> list[Rows | Steps | Cut]:
        shards = wanted.shard[piece].tolist()
        rows, starts = wanted.row[piece].tolist(), wanted.starts[piece].tolist()
        found: list[Rows | Steps | Cut] = []
        shard, last = None, -1
        open_rows: dict[int, Rows] = {}
        for j, number, row, start in zip(piece.tolist(), shards, rows, starts, strict=True):
            if shard is None or number != last:
                shard, last = cache.shard(number), number
                open_rows.clear()
                if self._alone and shard not in self._told:
                    self._told.add(shard)
                    with suppress(OSError):
                        os.posix_fadvise(shard.advice(0, 0)[0], 0, 0, os.POSIX_FADV_RANDOM)
            for i in self._whole:
                if i in wanted.cuts:
                    found.append(self._cut(shard, i, row, wanted, j))
                    continue
                out = self._place(shard, i, row, wanted, j)
                if i not in open_rows or not open_rows[i].took(row, out):
                    open_rows[i] = Rows(shard, self._outputs[i].field, row, out)
                    found.append(open_rows[i])
            found += [Steps(shard, row, start, run, wanted.spaces, j) for run in self._runs]
        return found

    def _cut(self, shard: Shard, i: int, row: int, wanted: Wanted, j: int) -> Cut:
        """What reads the rows that the batch's example `j` takes of output `i`."""
        output, (first, count) = self._outputs[i], (int(values[j]) for values in wanted.cuts[i])
        wanted.values[i][j] = torch.empty((count, *output.row_shape), dtype=output.dtype, device="cpu")
        return Cut(shard, output.field, row, (first, count), bytes_of(wanted.values[i][j]))

    def _place(self, shard: Shard, i: int, row: int, wanted: Wanted, j: int) -> memoryview[Any]:
        """Where output `i` of the batch's example `j` belongs, which is a record."""
        output, space = self._outputs[i], wanted.spaces[i]
        if space is not None:
            size = self._sizes[i]
            return space[j * size : (j + 1) * size]
        shape = (shard.length(output.field, row), *output.row_shape)
        wanted.values[i][j] = torch.empty(shape, dtype=output.dtype, device="cpu")
        return bytes_of(wanted.values[i][j])


def plan_runs(schema: Schema, outputs: tuple[Output, ...]) -> list[Run]:
    """Join the steps that outputs take of each field into as few reads as pays."""
    wanted: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for i, output in enumerate(outputs):
        if output.index != RECORD:
            for place, lag in enumerate(output.lags):
                wanted.setdefault(output.field, {}).setdefault(lag, []).append((i, place))
    runs: list[Run] = []
    for field, by_lag in wanted.items():
        size = schema[field].row_bytes
        gap = 1 + JOINED_GAP_BYTES // max(1, size)
        lags = sorted(by_lag)
        cuts = [0, *(k for k in range(1, len(lags)) if lags[k] - lags[k - 1] > gap), len(lags)]
        for begin, end in pairwise(cuts):
            first = lags[begin]
            targets = tuple(
                (i, outputs[i].example_bytes, place * size, (lag - first) * size, size)
                for lag in lags[begin:end]
                for i, place in by_lag[lag]
            )
            runs.append(Run(field=field, first=first, stop=lags[end - 1] + 1, targets=_joined(targets)))
    return runs


def _joined(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """The same bytes in fewer pieces: steps that lie next to each other at both ends are one."""
    joined: list[Target] = []
    for i, size, at, begin, count in sorted(targets):
        last = joined[-1] if joined else None
        if last is not None and (last[0], last[2] + last[4], last[3] + last[4]) == (i, at, begin):
            joined[-1] = (*last[:4], last[4] + count)
        else:
            joined.append((i, size, at, begin, count))
    return tuple(joined)


READ_THREADS = 4
"""Threads that read while storage is waited for. Each announces what it is about to read, so that more reads
are under way than there are threads; more of them only take turns at the interpreter's lock.

Source: `benchmarks/serve_disk.py`, and docs/design/028-verify-on-read.md.
"""
PIECE_BYTES = MIB
"""Bytes of a batch that are worth a thread of their own while all comes from the page cache."""
READ_DEADLINE_S = 60.0
"""Seconds that a batch may take to be read."""
MAX_AHEAD = 4
"""Batches read ahead at most; it starts with one, and one more whenever a batch was not ready in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A batch that is being read."""

    index: Tensor
    values: list[Any]
    """Per output a CPU tensor, or a list to be filled with tensors."""
    tickets: list[Ticket[int]]
    """Each gives how many of its reads had to wait for storage."""
    gather: Callable[[], int] | None
    """Copies the examples that are in a memory, where nothing has to be read; else a ticket does."""

    def ready(self) -> bool:
        """Whether every read has ended."""
        return all(ticket.done() for ticket in self.tickets)


class DiskBatches:
    """Makes batches out of shards, and out of host memory for what it holds already."""

    def __init__(
        self,
        cache: Cache,
        places: Places,
        outputs: tuple[Output, ...],
        locator: Locator,
        memory: Callable[[], Memory | None],
        options: Options,
    ) -> None:
        """`memory` gives the host memory that holds some of the records by now; of `options` matter the
        `timeout_s` of a batch, `verify` and `meter`.
        """
        self._cache = cache
        self._places = places
        self._outputs = outputs
        self._locator = locator
        self._memory = memory
        self._deadline_s = options.timeout_s or READ_DEADLINE_S
        self._verify: Verify = options.verify
        self._pool = Pool(READ_THREADS, "stoker-read")
        self._ahead = 1
        self._waits = True
        """Whether the last batch that was read had to wait for storage."""
        self._example_bytes = sum(output.example_bytes for output in outputs)
        self._buffers: dict[tuple[str, int], Buffers] = {}
        self._meter = options.meter
        self.fetching_s: Callable[[], float] | None = None
        """Gives the seconds that reads have waited for an object store so far; None: the files are here."""
        self._fetching_s = 0.0
        self._pieces = Pieces(cache.recipe.columns, outputs, READ_THREADS)
        self._twins = [twin_for(output, torch.device("cpu")) for output in outputs]
        self._views: tuple[Memory, list[Tensor]] | None = None
        cut = {} if locator.cuts is None else locator.cuts.rows
        self._cut = [(i, output.field) for i, output in enumerate(outputs) if output.field in cut]

    def over(self, cache: Cache, places: Places) -> None:
        """Read from another handle of the same cache from now on; not while batches are being made."""
        self._cache, self._places = cache, places

    def batches(self, chunk: Chunk, first: int) -> Iterator[list[Any]]:
        """Values per output, then `index`, of each batch of the chunk from the `first` on.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A batch was not read in time.
        """
        line: deque[Pending] = deque()
        following = first
        for current in range(first, chunk.span.batches):
            while following < chunk.span.batches and following <= current + self._ahead:
                line.append(self._begin(chunk, following))
                following += 1
            pending = line.popleft()
            if not pending.ready() and current > first:
                self._ahead = min(MAX_AHEAD, self._ahead + 1)
            yield self._finish(pending)

    def _begin(self, chunk: Chunk, number: int) -> Pending:
        size = chunk.span.batch
        own = slice(number * size, (number + 1) * size)
        values = [self._room(i, output, size) for i, output in enumerate(self._outputs)]
        return self.begin(host(chunk.records[own]), host(chunk.starts[own]), chunk.index[own], values)

    def begin(
        self, records: NDArray[np.int64], starts: NDArray[np.int64], index: Tensor, values: list[Any]
    ) -> Pending:
        """Begin to read some examples into `values`: per output a contiguous CPU tensor `(n, *shape)`, or a
        list of n for a ragged one.
        """
        shard, row = self._places.shard[records], self._places.row[records]
        memory, rest = self._memory(), np.ones(len(records), dtype=np.bool_)
        if memory is not None:
            rest = np.frombuffer(memory.ready, dtype=np.uint8)[shard] != 1
        missing = np.flatnonzero(rest)
        missing = missing[np.lexsort((row[missing], shard[missing]))]  # neighbours on disk one after another
        spaces = [None if isinstance(v, list) else bytes_of(v) for v in values]
        cuts = {i: self._locator.extent(name, records, starts) for i, name in self._cut}
        wanted = Wanted(shard=shard, row=row, starts=starts, values=values, spaces=spaces, cuts=cuts)
        tickets = [
            self._pool.submit(partial(self._pieces.read, self._cache, piece, wanted, self._verify))
            for piece in np.array_split(missing, self._count(len(missing)))
            if len(piece)
        ]
        gather = None
        if memory is not None and len(missing) < len(records):
            own, views = np.flatnonzero(~rest), self._views_of(memory)
            gather = partial(self._gather, memory, views, own, records[own], starts[own], values)
            if tickets:  # the step goes on meanwhile
                tickets.append(self._pool.submit(gather))
                gather = None
        return Pending(index=index, values=values, tickets=tickets, gather=gather)

    def _room(self, number: int, output: Output, size: int) -> Any:
        if output.ragged:
            return [None] * size
        shape = (size, *output.shape)
        if size * output.example_bytes < REUSE_FROM_BYTES:
            return lasting(shape, output.dtype)  # threads fill it, whatever mode the caller is in
        key = (str(number), size)
        if key not in self._buffers:
            self._buffers[key] = Buffers(shape, output.dtype)
        return self._buffers[key].take()

    def _count(self, examples: int) -> int:
        """How many threads shall read so many examples."""
        sized = not any(output.ragged for output in self._outputs)
        if self._waits or not sized:
            return min(READ_THREADS, max(1, examples // 4))
        return min(READ_THREADS, max(1, examples * self._example_bytes // PIECE_BYTES))

    def _finish(self, pending: Pending) -> list[Any]:
        values = self.finish(pending, self._meter)
        for i, output in enumerate(self._outputs):
            twin = self._twins[i]
            if twin is not None:
                values[i] = [twin(value) for value in values[i]] if output.ragged else twin(values[i])
        return [*values, pending.index]

    def finish(self, pending: Pending, meter: StallMeter | None = None) -> list[Any]:
        """The values that `begin` was given, filled; floats as they are stored.

        Args:
            pending: What is being read.
            meter: Told how long the caller waited for reads.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: They were not read in time.
        """
        if pending.gather is not None:
            pending.gather()
        begin = perf_counter()
        what = f"reading a batch of {self._cache.path}"
        waited = [ticket.result(self._deadline_s, what) for ticket in pending.tickets]
        if waited:
            self._waits = any(waited)
        if meter is not None:
            fetched_s = self._fetched_s(len(waited))
            meter.spent("fetch", min(fetched_s, perf_counter() - begin))
            meter.spent("read", max(0.0, perf_counter() - begin - fetched_s))
        return pending.values

    def _fetched_s(self, threads: int) -> float:
        """Seconds, of each thread, that reads have waited for an object store since this was last asked."""
        if self.fetching_s is None:
            return 0.0
        before, self._fetching_s = self._fetching_s, self.fetching_s()
        return (self._fetching_s - before) / max(1, threads)

    def _gather(
        self,
        memory: Memory,
        views: list[Tensor],
        own: NDArray[np.int64],
        records: NDArray[np.int64],
        starts: NDArray[np.int64],
        values: list[Any],
    ) -> int:
        """Copy the examples at `own` of a batch out of a memory; no read has waited."""
        rows = self._locator.rows(memory, records, starts)
        where = torch.as_tensor(own, device="cpu")
        for i, (output, view) in enumerate(zip(self._outputs, views, strict=True)):
            if output.ragged:
                gather = RaggedGather(view, None)  # converted when all are there
                found = gather(rows[f"starts:{output.field}"], rows[f"lengths:{output.field}"])
                for j, value in zip(own.tolist(), found, strict=True):
                    values[i][j] = value
            elif len(own) == len(values[i]):
                torch.index_select(view, 0, rows[output.index], out=values[i])
            else:
                values[i].index_copy_(0, where, torch.index_select(view, 0, rows[output.index]))
        return 0

    def forget(self, memory: Memory | None) -> None:
        """Refer to no memory but this one."""
        if self._views is not None and self._views[0] is not memory:
            self._views = None

    def _views_of(self, memory: Memory) -> list[Tensor]:
        if self._views is None or self._views[0] is not memory:
            schema = self._cache.recipe.columns
            views = [view_for(o, schema[o.field], memory.sources[o.field]) for o in self._outputs]
            self._views = (memory, views)
        return self._views[1]
