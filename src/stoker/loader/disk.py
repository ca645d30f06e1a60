"""Make batches whose records are not all in memory: verified positional reads, a batch ahead.

Each example is read straight into its place in the batch; what is in a memory already is gathered from there,
so that a batch may draw from several tiers. Reads have a deadline: storage that does not answer costs a
`StalledError`, never a hang.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker import native
from stoker.loader.batch import REUSE_FROM_BYTES, Buffers, allocate
from stoker.loader.choose import ChosenRows, Taken
from stoker.loader.chunks import RECORD, Chunk, ColumnStrip, Locator, chosen_in, to_host
from stoker.loader.gather import (
    STRIP_BATCHES,
    ChosenGather,
    RaggedGather,
    gather_into,
    make_converter,
    view_for,
)
from stoker.loader.outputs import OutputSpec, StepRun, plan_runs
from stoker.loader.record_reads import RecordReads
from stoker.loader.tiers import Memory, begin_thread, bytes_of
from stoker.runtime.threads import Pool, Ticket
from stoker.store.format import rows_per_block
from stoker.store.shard import most_open
from stoker.units import KIB, MIB

if TYPE_CHECKING:
    from stoker.loader.choose import Draw
    from stoker.loader.options import Options
    from stoker.loader.records import RecordTable
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
"""True if the system can be told what is about to be read."""
ALONE_FROM_BYTES = 64 * KIB
"""Reads from this size on are cheap enough one by one. What the system reads beyond them, guessing from what
is in the page cache around them, made batches up to twice as long.

Source: docs/design/026-plan-against-measured.md.
"""
JOINED_BYTES = 256 * KIB
"""Most bytes to read in one call from records next to each other on disk.

The bytes are then still in the core's cache when they are compared with their checksums.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
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
    chosen: Mapping[str, ChosenRows] = dataclass_field(default_factory=dict[str, "ChosenRows"])
    """What is chosen of the examples' records, by group."""


class RecordRead:
    """Whole records of one field that are neighbors on disk."""

    __slots__ = ("_bytes", "_field", "_first", "_name", "_outs", "_shard")

    def __init__(self, shard: Shard, field: str, first: int, out: memoryview[Any]) -> None:
        self._shard, self._field, self._first = shard, shard.fields[field], first
        self._outs, self._bytes = [out], len(out)
        self._name = field

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
        if not wait or self._bytes <= JOINED_BYTES or self._shard.fileno() < 0:
            return self._field.rows(self._first, self._outs, verify, wait=wait)
        # A large record of a file here: the system reads ahead while a piece is compared.
        (out,) = self._outs
        length, block = self._field.length(self._first), rows_per_block(self._shard.columns[self._name].field)
        size = len(out) // length
        steps = max(1, JOINED_BYTES // size // block) * block
        for start in range(0, length, steps):
            stop = min(start + steps, length)
            self._field.read_into(self._first, start, stop, out[start * size : stop * size], verify)
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """Descriptor, offset and bytes of what is read."""
        offset, _ = self._field.extent(self._first, 0, 0, verify)
        return self._shard.advice(offset, self._bytes)


class StepRead:
    """Steps of one record that one example takes, for one output or several."""

    __slots__ = ("_first", "_place", "_row", "_run", "_shard", "_spaces")

    def __init__(
        self,
        shard: Shard,
        row: int,
        start: int,
        run: StepRun,
        spaces: list[memoryview[Any] | None],
        place: int,
    ) -> None:
        self._shard, self._row, self._first = shard, row, start + run.first
        self._run, self._spaces, self._place = run, spaces, place

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `RecordRead.read`."""
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
        """As `RecordRead.extent`."""
        run, first = self._run, self._first
        stop = first + run.stop - run.first
        extent = self._shard.fields[run.field].extent(self._row, first, stop, verify)
        return self._shard.advice(*extent)


class RowsRead:
    """Rows of one record that are read together: no block of sums lies between two of them unread."""

    __slots__ = ("_field", "_out", "_row", "_rows", "_shard")

    def __init__(self, shard: Shard, field: str, row: int, rows: Sequence[int], out: memoryview[Any]) -> None:
        """`out`: the bytes of these rows, one after another."""
        self._shard, self._field, self._row, self._rows = shard, shard.fields[field], row, rows
        self._out = out

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `RecordRead.read`."""
        rows, out, first = self._rows, self._out, self._rows[0]
        data = self._field.steps(self._row, first, rows[-1] + 1, verify, wait=wait)
        if data is None:
            return False
        if len(data) == len(out):
            out[:] = data
            return True
        size = len(out) // len(rows)
        for place, row in enumerate(rows):
            at = (row - first) * size
            out[place * size : (place + 1) * size] = data[at : at + size]
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """As `RecordRead.extent`."""
        extent = self._field.extent(self._row, self._rows[0], self._rows[-1] + 1, verify)
        return self._shard.advice(*extent)


DiskRead: TypeAlias = RecordRead | StepRead | RowsRead


class PieceReader:
    """Reads pieces of batches of these outputs; safe to use from several threads."""

    def __init__(self, schema: Schema, outputs: tuple[OutputSpec, ...], threads: int) -> None:
        """`threads`: how many read at a time."""
        self._outputs = outputs
        self._whole = [i for i, output in enumerate(outputs) if output.index == RECORD]
        self._sizes = [output.example_bytes for output in outputs]
        self._runs = plan_runs(schema, outputs)
        runs = ((run.stop - run.first) * schema[run.field].row_bytes for run in self._runs)
        self._blocks = {
            i: rows_per_block(schema[output.field])
            for i, output in enumerate(outputs)
            if output.taken is Taken.ROWS and output.example_bytes
        }
        """By output of chosen rows how many rows share a sum."""
        most = max([0, *(self._sizes[i] for i in self._whole), *runs])
        self._alone = ADVISED and (most >= ALONE_FROM_BYTES or bool(self._blocks))
        # What all threads have open together is a part of what the process may have open.
        self._at_once = max(1, most_open() // threads)
        self._native = native.library() is not None
        self._only_records = len(self._whole) == len(outputs)
        """True if nothing is left where all whole records were read together."""
        self._told: weakref.WeakSet[Shard] = weakref.WeakSet()
        """Shards of which nothing is read on by the system."""

    def read(self, cache: Cache, piece: NDArray[np.int64], wanted: ReadRequest, verify: Verify) -> int:
        """Read the examples at these places of a batch, sorted by shard and row, into their outputs.

        Returns:
            How many reads had to wait for storage.
        Raises:
            CorruptError: A record's bytes do not match their checksums.
        """
        waited, begins = 0, np.flatnonzero(np.diff(wanted.shard[piece], prepend=-1))[:: self._at_once]
        for some in np.split(piece, begins[1:]):  # of few enough shards to have all of them open
            done: dict[int, NDArray[np.bool_]] = {}
            for i in self._whole if self._native and verify != "first" else ():
                if i not in wanted.cuts:
                    done[i], slow = self._read_together(cache, some, i, wanted, verify)
                    waited += slow
            if self._only_records and len(done) == len(self._outputs) and all(map(np.all, done.values())):
                continue
            reads = self._reads(cache, some, wanted, done)
            later = [read for read in reads if not read.read(verify, wait=False)]
            if ADVISED:
                for read in later:
                    with suppress(OSError):  # a file system that takes no advice is read all the same
                        os.posix_fadvise(*read.extent(verify), os.POSIX_FADV_WILLNEED)
            for read in later:
                read.read(verify, wait=True)
            waited += len(later)
        return waited

    def _read_together(
        self, cache: Cache, piece: NDArray[np.int64], i: int, wanted: ReadRequest, verify: Verify
    ) -> tuple[NDArray[np.bool_], int]:
        """Read records of output `i` in few calls, without the interpreter's lock.

        Returns:
            Which are there and right, and how many were waited for. The others are to be read one by one.
        """
        name, rows = self._outputs[i].field, wanted.row[piece].astype(np.int64)
        numbers, own = np.unique(wanted.shard[piece], return_inverse=True)
        shards = [cache.shard(number) for number in numbers.tolist()]
        for shard in shards:
            self._tell(shard)
        reads = RecordReads(shards, own, rows, name)
        if not reads.may.any():
            return reads.may, 0
        if (space := wanted.spaces[i]) is None:
            for k, j in enumerate(piece.tolist()):
                self._place(shards[own[k]], i, int(rows[k]), wanted, j)
            outs = np.array([wanted.values[i][j].data_ptr() for j in piece.tolist()], np.int64)
        else:
            outs = np.frombuffer(space, np.uint8).ctypes.data + piece * self._sizes[i]
            reads.may &= reads.sizes == self._sizes[i]  # no byte goes beyond a record's room
        return reads.read(outs, check=verify != "off")

    def _tell(self, shard: Shard) -> None:
        """Have the system read nothing on of a shard whose records are large."""
        if self._alone and shard not in self._told:
            self._told.add(shard)
            with suppress(OSError):
                os.posix_fadvise(shard.advice(0, 0)[0], 0, 0, os.POSIX_FADV_RANDOM)

    def _reads(
        self,
        cache: Cache,
        piece: NDArray[np.int64],
        wanted: ReadRequest,
        done: Mapping[int, NDArray[np.bool_]],
    ) -> list[DiskRead]:
        """Return what reads the examples at these places, but for the outputs that are `done`."""
        shards = wanted.shard[piece].tolist()
        rows, starts = wanted.row[piece].tolist(), wanted.starts[piece].tolist()
        found: list[DiskRead] = []
        shard, last = None, -1
        open_rows: dict[int, RecordRead] = {}
        for k, (j, number, row, start) in enumerate(zip(piece.tolist(), shards, rows, starts, strict=True)):
            if shard is None or number != last:
                shard, last = cache.shard(number), number
                open_rows.clear()
                self._tell(shard)
            for i in self._whole:
                if i in done and done[i][k]:
                    continue
                if i in wanted.cuts:
                    found.append(self._cut(shard, i, row, wanted, j))
                    continue
                out = self._place(shard, i, row, wanted, j)
                if i not in open_rows or not open_rows[i].took(row, out):
                    open_rows[i] = RecordRead(shard, self._outputs[i].field, row, out)
                    found.append(open_rows[i])
            found += [StepRead(shard, row, start, run, wanted.spaces, j) for run in self._runs]
            for i in self._blocks:
                found += self._rows(shard, i, row, wanted, j)
        return found

    def _cut(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> StepRead:
        """Return what reads the rows that the batch's example `j` takes of output `i`."""
        output, (first, count) = self._outputs[i], (int(values[j]) for values in wanted.cuts[i])
        wanted.values[i][j] = torch.empty((count, *output.row_shape), dtype=output.dtype, device="cpu")
        space = bytes_of(wanted.values[i][j])
        run = StepRun(field=output.field, first=0, stop=count, targets=((0, 0, 0, 0, len(space)),))
        return StepRead(shard, row, first, run, [space], 0)

    def _rows(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> Iterator[RowsRead]:
        """Yield what reads the rows that are chosen of the batch's example `j` for output `i`."""
        output, space, chosen = self._outputs[i], wanted.spaces[i], wanted.chosen[self._outputs[i].group]
        assert space is not None
        rows, begin = chosen.rows[j, : chosen.lengths[j]], j * self._sizes[i]
        size = self._sizes[i] // chosen.rows.shape[1]
        cuts = np.flatnonzero(np.diff(rows // self._blocks[i]) > 1) + 1
        numbers = rows.tolist()
        for first, stop in pairwise((0, *cuts.tolist(), len(numbers))):
            if first < stop:
                out = space[begin + first * size : begin + stop * size]
                yield RowsRead(shard, output.field, row, numbers[first:stop], out)

    def _place(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> memoryview[Any]:
        """Return where output `i` of the batch's example `j` belongs, which is a record."""
        output, space = self._outputs[i], wanted.spaces[i]
        if space is not None:
            size = self._sizes[i]
            return space[j * size : (j + 1) * size]
        shape = (shard.length(output.field, row), *output.row_shape)
        wanted.values[i][j] = torch.empty(shape, dtype=output.dtype, device="cpu")
        return bytes_of(wanted.values[i][j])


READ_THREADS = 4
"""Threads that read while storage is waited for. Each announces what it is about to read, so that more reads
are under way than there are threads; more of them only take turns at the interpreter's lock.

Source: `benchmarks/serve_disk.py`, and docs/design/028-verify-on-read.md.
"""
PIECE_BYTES = MIB
"""Bytes of a batch that are worth a thread of their own while all comes from the page cache."""
READ_TIMEOUT_S = 60.0
"""Seconds that a batch may take to be read."""
MAX_PREFETCH = 4
"""Batches read ahead at most; it starts with one, and one more whenever a batch was not ready in time."""
PREFETCH_BYTES = 1024 * MIB
"""Bytes of batches that may be read ahead. Larger batches are read ahead one at a time, to save memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBatch:
    """A batch that is being read."""

    index: Tensor
    values: list[Any]
    """Per output a CPU tensor, or a list to be filled with tensors."""
    tickets: list[Ticket[int]]
    """Each gives how many of its reads had to wait for storage."""
    gather: Callable[[], int] | None
    """Copies the examples that are in a memory, where nothing has to be read; else a ticket does."""

    def ready(self) -> bool:
        """Return True if every read has ended."""
        return all(ticket.done() for ticket in self.tickets)


class FieldViews:
    """The views that outputs are gathered from, kept for the last memory that was asked for."""

    def __init__(self, schema: Schema, outputs: tuple[OutputSpec, ...]) -> None:
        self._schema, self._outputs = schema, outputs
        self._kept: tuple[Memory, list[Tensor]] | None = None

    def of(self, memory: Memory) -> list[Tensor]:
        """Return a view of this memory for each output."""
        if self._kept is None or self._kept[0] is not memory:
            views = [view_for(o, self._schema[o.field], memory.sources[o.field]) for o in self._outputs]
            self._kept = (memory, views)
        return self._kept[1]

    def forget(self, memory: Memory | None) -> None:
        """Refer to no memory but this one."""
        if self._kept is not None and self._kept[0] is not memory:
            self._kept = None


def _bytes_in(values: Sequence[Any]) -> int:
    """Return the bytes of a batch: per output a tensor, or a list of tensors."""
    return sum(one.nbytes for value in values for one in (value if isinstance(value, list) else (value,)))


class DiskBatches:
    """Makes batches out of shards, and out of host memory for what it holds already."""

    def __init__(  # noqa: PLR0913 - what the engine of a loader knows
        self,
        cache: Cache,
        table: RecordTable,
        outputs: tuple[OutputSpec, ...],
        locator: Locator,
        memory: Callable[[], Memory | None],
        options: Options,
        *,
        threads: int = 1,
    ) -> None:
        """`memory` gives the host memory that holds some of the records by now; of `options` matter the
        `timeout_s` of a batch, `verify` and `meter`. `threads` gather a large batch from memory together.
        """
        self._cache = cache
        self._table = table
        self._outputs = outputs
        self._locator = locator
        self._memory = memory
        self._timeout_s = options.timeout_s or READ_TIMEOUT_S
        self._verify: Verify = options.verify
        self._pool = Pool(READ_THREADS, "stoker-read")
        self._gatherers = Pool(threads - 1, "stoker-gather") if threads > 1 else None
        self._depth = 1
        self._waits = True
        """True if the last batch that was read had to wait for storage."""
        self._example_bytes = sum(output.example_bytes for output in outputs)
        self._buffers: dict[tuple[str, int], Buffers] = {}
        self._meter = options.meter
        self.fetching_s: Callable[[], float] | None = None
        """Gives the seconds that reads have waited for an object store so far; None: the files are here."""
        self._fetching_s = 0.0
        self._pieces = PieceReader(cache.recipe.columns, outputs, READ_THREADS)
        self._converters = [make_converter(output, torch.device("cpu")) for output in outputs]
        self._views = FieldViews(cache.recipe.columns, outputs)
        cut = {} if locator.cuts is None else locator.cuts.rows
        self._cut = [(i, output.field) for i, output in enumerate(outputs) if output.field in cut]

    def strips(self, chunk: Chunk) -> Iterator[ColumnStrip]:
        """Yield the batches of a chunk, one at a time, the next ones being read meanwhile.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A batch was not read in time.
        """
        line: deque[PendingBatch] = deque()
        following, size = 0, chunk.span.batch
        for current in range(chunk.span.batches):
            while following < chunk.span.batches and following <= current + self._depth:
                own = slice(following * size, (following + 1) * size)
                values = [self._room(i, output, size) for i, output in enumerate(self._outputs)]
                records, starts = to_host(chunk.records[own]), to_host(chunk.starts[own])
                draw = None if chunk.draw is None else chunk.draw.of(own)
                line.append(self.begin(records, starts, chunk.index[own], values, chunk.source, draw))
                following += 1
            pending = line.popleft()
            # No step ran before the first batch of a chunk, so that one says nothing about the depth.
            late = current > 0 and not pending.ready()
            values = self.finish(pending, self._meter)
            if (
                late
                and self._depth < MAX_PREFETCH
                and (self._depth + 1) * _bytes_in(values) <= PREFETCH_BYTES
            ):
                self._depth += 1
            for i, (output, convert) in enumerate(zip(self._outputs, self._converters, strict=True)):
                if convert is not None:
                    values[i] = [*map(convert, values[i])] if output.ragged else convert(values[i])
            yield ColumnStrip([*([value] for value in values), [pending.index]], current, 1, "disk")

    def begin(
        self,
        records: NDArray[np.int64],
        starts: NDArray[np.int64],
        index: Tensor,
        values: list[Any],
        source: tuple[Cache, RecordTable] | None = None,
        draw: Draw | None = None,
    ) -> PendingBatch:
        """Begin to read some examples into `values`: per output a contiguous CPU tensor `(n, *shape)`, or a
        list of n for a ragged one. `source` and `draw` are as in `Chunk`.
        """
        cache, table = source or (self._cache, self._table)
        shard, row = table.shard[records], table.row[records]
        memory, rest = self._memory(), np.ones(len(records), dtype=np.bool_)
        if memory is not None:
            # A copy: the fill thread changes `ready` meanwhile, and each example must be gathered or read.
            rest = np.frombuffer(memory.ready, dtype=np.uint8)[shard] != 1
        missing = np.flatnonzero(rest)
        missing = missing[np.lexsort((row[missing], shard[missing]))]  # neighbors on disk one after another
        spaces = [None if isinstance(v, list) else bytes_of(v) for v in values]
        cuts = {i: self._locator.extent(name, records, starts) for i, name in self._cut}
        chosen = {} if draw is None else draw.on_host().rows()
        self._tell(chosen, values)
        wanted = ReadRequest(
            shard=shard, row=row, starts=starts, values=values, spaces=spaces, cuts=cuts, chosen=chosen
        )
        tickets = [
            self._pool.submit(partial(self._pieces.read, cache, piece, wanted, self._verify))
            for piece in np.array_split(missing, self._count(len(missing)))
            if len(piece)
        ]
        gather = None
        if memory is not None and len(missing) < len(records):
            own, views = np.flatnonzero(~rest), self._views.of(memory)
            some = None if draw is None else draw.of(own)
            gather = partial(self._gather, memory, views, own, records[own], starts[own], values, some)
            if tickets:  # the step runs meanwhile
                tickets.append(self._pool.submit(gather))
                gather = None
        return PendingBatch(index=index, values=values, tickets=tickets, gather=gather)

    def _room(self, number: int, output: OutputSpec, size: int) -> Any:
        if output.ragged:
            return [None] * size
        shape = (size, *output.shape)
        if size * output.example_bytes < REUSE_FROM_BYTES:
            return allocate(shape, output.dtype)  # threads fill it, whatever mode the caller is in
        key = (str(number), size)
        if key not in self._buffers:
            self._buffers[key] = Buffers(shape, output.dtype)
        return self._buffers[key].take()

    def _count(self, examples: int) -> int:
        """Return how many threads read so many examples."""
        sized = not any(output.ragged for output in self._outputs)
        if self._waits or not sized:
            return min(READ_THREADS, max(1, examples // 4))
        return min(READ_THREADS, max(1, examples * self._example_bytes // PIECE_BYTES))

    def finish(self, pending: PendingBatch, meter: StallMeter | None = None) -> list[Any]:
        """Return the values that `begin` was given, filled; floats as they are stored.

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
        waited = [ticket.result(self._timeout_s, what) for ticket in pending.tickets]
        if waited:
            self._waits = any(waited)
        if meter is not None:
            fetched_s = self._fetched_s(len(waited))
            meter.spent("fetch", min(fetched_s, perf_counter() - begin))
            meter.spent("read", max(0.0, perf_counter() - begin - fetched_s))
        return pending.values

    def _fetched_s(self, threads: int) -> float:
        """Return seconds, of each thread, that reads waited for an object store since the last call."""
        if self.fetching_s is None:
            return 0.0
        before, self._fetching_s = self._fetching_s, self.fetching_s()
        return (self._fetching_s - before) / max(1, threads)

    def _gather(  # noqa: PLR0913, PLR0917 - what `begin` knows
        self,
        memory: Memory,
        views: list[Tensor],
        own: NDArray[np.int64],
        records: NDArray[np.int64],
        starts: NDArray[np.int64],
        values: list[Any],
        draw: Draw | None,
    ) -> int:
        """Copy the examples at `own` of a batch out of a memory; no read has waited."""
        rows = self._locator.rows(memory, records, starts)
        if draw is not None:
            rows |= chosen_in(memory, self._outputs, records, draw.on_host().rows())
        where = torch.as_tensor(own, device="cpu")
        for i, (output, view) in enumerate(zip(self._outputs, views, strict=True)):
            if output.ragged:
                gather = RaggedGather(view, None)  # converted when all are there
                found = gather(rows[f"starts:{output.field}"], rows[f"lengths:{output.field}"])
                for j, value in zip(own.tolist(), found, strict=True):
                    values[i][j] = value
            elif output.taken is None:
                places = None if len(own) == len(values[i]) else where
                gather_into(view, rows[output.index], values[i], places, self._gatherers)
            elif output.taken is Taken.ROWS and (count := rows[output.index].shape[1]):
                places = (where[:, None] * count + torch.arange(count, device="cpu")).reshape(-1)
                out = values[i].view(-1, *view.shape[1:])
                gather_into(view, rows[output.index].reshape(-1), out, places, self._gatherers)
        return 0

    def _tell(self, chosen: Mapping[str, ChosenRows], values: list[Any]) -> None:
        """Put what batches say of choices in its place."""
        for output, value in zip(self._outputs, values, strict=True):
            if output.taken is Taken.LENGTHS:
                value.copy_(torch.from_numpy(chosen[output.group].lengths))
            elif output.taken is Taken.START:
                value.copy_(torch.from_numpy(chosen[output.group].start))

    def forget(self, memory: Memory | None) -> None:
        """Refer to no memory but this one."""
        self._views.forget(memory)


# ----------------------------------------------------------------------------------------------------------
# Batches for a device that does not hold all their records: what it holds is gathered there, the rest is
# assembled in host memory and copied over.
#
# Several batches are made at once (a *group*), so that small ones share their copies. Per group the rows
# that are not on the device are gathered from host memory, and read where that lacks them too, into
# page-locked memory, and copied on a stream of their own, all by a thread that is ahead of the batches. The
# serving thread then gathers every row of the group on the device, with stand-ins for those that are not
# there, and puts the copied rows in their places. So a batch is drawn uniformly from all memories, and a row
# costs what it costs where it is.
#
# In `block` order a group is a window of the order: only a few trajectories, each with many of its examples.
# Then these are copied entirely, which is fewer bytes than the steps that the examples take, and are on the
# device for as long as the window lasts: a window that slides through a set larger than the device.


GROUP_BYTES = 4 * MIB
"""Batches are made together up to this size: below it a copy to a GPU is bound by calls, not by bytes."""
WINDOW_BYTES = 64 * MIB
"""Batches of one window of the order are made together up to this size."""
MAX_GROUP_PREFETCH = 4
"""Groups made ahead at most; it starts with one, and one more whenever a group was not ready in time: copying
has then taken longer than the steps."""
WAIT_FACTOR = 2 * (MAX_GROUP_PREFETCH + 1)
"""A group may wait for those before it, each of which has the time that a batch has to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedGroup:
    """Consecutive batches, everything that is not on the device yet on its way there."""

    records: Any
    """Per example a record that is near: its own, or a stand-in. On the device; None: nothing is near."""
    starts: Any
    far: Tensor | None
    """Which examples were not near, on the device; None: all were."""
    far_places: list[int]
    """The same on the host."""
    values: list[Any]
    """Per output the rows of these, as stored: a tensor, or a list of tensors. With `rows`, per field that is
    served the records that they are cut from."""
    rows: Mapping[str, Tensor] | None
    """Per kind of index the rows of these in `values`; None: they are there one after another."""
    chosen: Mapping[str, ChosenRows]
    """What is chosen of `records`, by group, on the device."""
    index: Tensor
    tier: str
    """The slowest tier that some row came from."""
    done: Any
    """CUDA event after which all of it is on the device; None: it is."""


class PartialBatches:
    """Makes batches on `device` out of its memory, host memory and disk. One per loader and process."""

    def __init__(  # noqa: PLR0913 - what the engine of a loader knows
        self,
        outputs: tuple[OutputSpec, ...],
        cache: Cache,
        table: RecordTable,
        locator: Locator,
        disk: Callable[[tuple[OutputSpec, ...]], DiskBatches],
        device: torch.device,
        *,
        window: int,
        most: Callable[[], int],
        meter: StallMeter | None,
    ) -> None:
        """Prepare to make batches; nothing is read yet.

        Args:
            outputs, cache, table: Of the loader.
            locator: One on the CPU.
            disk: Makes what assembles rows of outputs in host memory.
            device: Where batches are wanted.
            window: Positions of an epoch that draw from few records (`block` order); 0: no such windows.
            most: Gives how many batches to make at once, at most.
            meter: Told how long groups were waited for.
        """
        self._outputs = outputs
        self._converters = [make_converter(output, device) for output in outputs]
        self._schema = cache.recipe.columns
        self._table = table
        self._locator = locator
        self._disk = disk(outputs)
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._pool = Pool(1, "stoker-stage", all_cores=True)
        self._depth = 1
        self._window, self._most, self._meter = window, most, meter
        self._example_bytes = sum(output.example_bytes for output in outputs)
        self._views = FieldViews(self._schema, outputs)
        self._whole = _whole_records(outputs, self._schema)
        self._record_bytes = sum(output.example_bytes for output in self._whole)
        self._disk_whole = disk(self._whole)

    def strips(self, chunk: Chunk, near: Memory | None) -> Iterator[ColumnStrip]:
        """Yield the batches of a chunk, some at a time.

        Args:
            chunk: Which batches.
            near: The memory on the device; it may still be filling.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A group was not there in time.
        """
        size, last = chunk.span.batch, chunk.span.batches
        # The thread refers to no memory of the device, so that can be released while groups are prefetched.
        ready = None if near is None else near.ready
        line: deque[tuple[int, Ticket[StagedGroup]]] = deque()
        number = following = 0
        while following < last or line:
            while following < last and len(line) <= self._depth:
                batches = min(self._most(), self._count(chunk, following))
                own = slice(following * size, (following + batches) * size)
                line.append((batches, self._pool.submit(partial(self._stage, chunk, own, ready))))
                following += batches
            batches, ticket = line.popleft()
            if not ticket.done() and following > batches:
                self._depth = min(MAX_GROUP_PREFETCH, self._depth + 1)
            begin = perf_counter()
            group = ticket.result(READ_TIMEOUT_S * WAIT_FACTOR, "bringing a batch to the device")
            if self._meter is not None:
                self._meter.spent("read" if group.tier == "disk" else "copy", perf_counter() - begin)
            columns = [_cut(value, size) for value in [*self._place(group, near), group.index]]
            yield ColumnStrip(columns, number, batches, group.tier)
            number += batches

    def _count(self, chunk: Chunk, number: int) -> int:
        """Return how many batches from this one on make a good group."""
        span, window = chunk.span, self._window
        batch_bytes = max(1, span.batch * self._example_bytes)
        count = min(STRIP_BATCHES, GROUP_BYTES // batch_bytes)
        if window:
            left = window - (span.position + number * span.step) % window
            count = max(count, min(-(-left // span.step), WINDOW_BYTES // batch_bytes))
        return max(1, min(count, span.batches - number))

    def _stage(self, chunk: Chunk, own: slice, ready: bytearray | None) -> StagedGroup:
        """Bring what is not near to the device; in the thread of the pool."""
        begin_thread(self._device)
        with torch.cuda.stream(self._stream) if self._cuda else nullcontext():
            index = chunk.index[own]
            records, starts = to_host(chunk.records[own]), to_host(chunk.starts[own])
            here = np.zeros(len(records), dtype=np.bool_)
            if ready is not None:
                # A copy, as in `DiskBatches.begin`: a shard that arrives later counts from the next group on.
                here = np.frombuffer(ready, dtype=np.uint8)[self._table.shard[records]] == 1
            where = np.flatnonzero(~here)
            draw = None if chunk.draw is None else chunk.draw.of(own).on_host()
            far_draw = None if draw is None else draw.of(where)
            values, rows, read = self._far(records[where], starts[where], index, far_draw)
            tier = "disk" if read else "host" if len(where) else "device"
            some = len(where) < len(records)
            if some:  # the first one that is near stands in for those that are not
                at = int(np.argmax(here))
                records, starts = np.where(here, records, records[at]), np.where(here, starts, starts[at])
                draw = None if draw is None else draw.standing_in(here, at)
            return StagedGroup(
                chosen=self._chosen(draw) if some and draw is not None else {},
                records=self._located(records) if some else None,
                starts=self._located(starts) if some else None,
                far=self._over(torch.as_tensor(where, device="cpu")) if len(where) else None,
                far_places=where.tolist(),
                values=[self._over(value) for value in values],
                rows=None if rows is None else {name: self._over(own) for name, own in rows.items()},
                index=self._over(index),
                tier=tier,
                done=self._stream.record_event() if self._cuda else None,
            )

    def _far(
        self, records: NDArray[np.int64], starts: NDArray[np.int64], index: Tensor, draw: Draw | None
    ) -> tuple[list[Any], dict[str, Tensor] | None, bool]:
        """Return `values` and `rows` of a group, and whether disk was read.

        Those are rows in host memory, or the records that they are cut from where these are fewer bytes.
        """
        disk, outputs, rows = self._disk, self._outputs, None
        if self._whole and len(records) * self._example_bytes > self._record_bytes:
            some, own = np.unique(records, return_inverse=True)
            if len(some) * self._record_bytes < len(records) * self._example_bytes:
                disk, outputs = self._disk_whole, self._whole
                rows = {RECORD: torch.as_tensor(own, device="cpu")}
                for name, length in self._locator.step_lengths.items():
                    rows[name] = torch.as_tensor(own * length + starts, device="cpu")
                records, starts = some, np.zeros_like(some)
        room = [self._room(output, len(records)) for output in outputs]
        pending = disk.begin(records, starts, index, room, draw=draw)
        return disk.finish(pending), rows, bool(pending.tickets)

    def _room(self, output: OutputSpec, count: int) -> Any:
        if output.ragged:
            return [None] * count
        # Page-locked memory comes from torch's own cache, which gives it out again after its copy has ended.
        return torch.empty((count, *output.shape), dtype=output.dtype, pin_memory=self._cuda, device="cpu")

    def _chosen(self, draw: Draw) -> dict[str, ChosenRows]:
        return {
            name: ChosenRows(rows=self._located(own.rows), lengths=self._located(own.lengths))
            for name, own in draw.rows().items()
        }

    def _located(self, values: NDArray[np.int64]) -> Any:
        """Return the records or starts where the rows of the device's memory are looked up."""
        return self._over(torch.as_tensor(values, device="cpu")) if self._cuda else values

    def _over(self, value: Any) -> Any:
        """Return the same on the device; page-locked first, so that the copy runs without the caller."""
        if isinstance(value, list):
            return [self._over(one) for one in cast("list[Tensor]", value)]
        if not self._cuda:
            return value
        pinned = value if value.is_pinned() else value.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _place(self, group: StagedGroup, near: Memory | None) -> list[Any]:
        """Return the values per output, in order, on the device, as handed out."""
        if group.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(group.done)
            rows = [] if group.rows is None else [*group.rows.values()]
            rows += [part for own in group.chosen.values() for part in (own.rows, own.lengths)]
            # They were allocated on the copy stream. Unless the allocator knows of this stream too, it gives
            # their memory out again while kernels here still read it.
            for tensor in _tensors([group.records, group.starts, group.far, group.values, rows, group.index]):
                tensor.record_stream(stream)
        far = group.values if group.rows is None else self._cut_out(group.values, group.rows)
        made = far if near is None or group.records is None else self._joined(group, near, far)
        return [
            value if converter is None
            else [converter(one) for one in value] if isinstance(value, list)
            else converter(value)
            for converter, value in zip(self._converters, made, strict=True)
        ]  # fmt: skip

    def _cut_out(self, records: list[Tensor], rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Return per output its rows of whole records."""
        sources = {output.field: value for output, value in zip(self._whole, records, strict=True)}
        return [
            torch.index_select(
                view_for(output, self._schema[output.field], sources[output.field]), 0, rows[output.index]
            )
            for output in self._outputs
        ]

    def _joined(self, group: StagedGroup, near: Memory, values: list[Any]) -> list[Any]:
        rows = self._locator.rows(near, group.records, group.starts)
        if group.chosen:
            rows |= chosen_in(near, self._outputs, group.records, group.chosen)
        made: list[Any] = []
        for output, view, far in zip(self._outputs, self._views.of(near), values, strict=True):
            if output.ragged:
                found = RaggedGather(view, None)(
                    rows[f"starts:{output.field}"], rows[f"lengths:{output.field}"]
                )
                for j, value in zip(group.far_places, far, strict=True):
                    found[j] = value
            else:
                index = rows[output.index]
                if output.taken is None:
                    found = torch.index_select(view, 0, index)
                elif output.taken is Taken.ROWS:
                    gather = ChosenGather(partial(torch.index_select, view, 0), output.shape, view.dtype)
                    found = gather(index)
                else:
                    found = index.clone()
                if group.far is not None:
                    found.index_copy_(0, group.far, far)
            made.append(found)
        return made

    def forget(self, near: Memory | None, host: Memory | None) -> None:
        """Refer to no memory but these: that of the host once groups made before have been read from it."""
        self._views.forget(near)
        for disk in (self._disk, self._disk_whole):  # both are used by the thread alone
            self._pool.submit(partial(disk.forget, host))


def _whole_records(outputs: tuple[OutputSpec, ...], schema: Schema) -> tuple[OutputSpec, ...]:
    """Return the fields of windows as entire records; none where that saves nothing or gives no tensor."""
    fields = {output.field: schema[output.field] for output in outputs}
    if any(field.ragged for field in fields.values()) or all(o.index == RECORD for o in outputs):
        return ()
    if any(output.taken is not None for output in outputs):
        return ()
    dtypes = {output.field: output.dtype for output in outputs}
    return tuple(
        OutputSpec(name=name, field=name, index=RECORD, shape=field.shape, dtype=dtypes[name])
        for name, field in fields.items()
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(cast("list[Any]", value))


def _cut(value: Any, size: int) -> Iterable[Any]:
    """Return the batches of `size` rows."""
    if isinstance(value, list):
        rows = cast("list[Tensor]", value)
        return [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return cast("tuple[Tensor, ...]", value.split(size))
