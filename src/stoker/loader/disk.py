"""Make batches whose records are not all in memory: verified positional reads, a batch ahead.

Each example is read straight into its place in the batch; what is in a memory already is gathered from there,
so that a batch may draw from several tiers. Reads have a deadline: storage that does not answer costs a
`StalledError`, never a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import StalledError
from stoker.loader.batch import REUSE_FROM_BYTES, Buffers, allocate
from stoker.loader.choose import ChosenRows, Taken
from stoker.loader.chunks import RECORD, Chunk, ColumnStrip, HostPlaces, Locator, chosen_in, to_host
from stoker.loader.gather import (
    STRIP_BATCHES,
    ChosenGather,
    RaggedGather,
    gather_into,
    make_converter,
    view_for,
)
from stoker.loader.outputs import OutputSpec
from stoker.loader.record_reads import PieceReader, ReadRequest
from stoker.loader.tiers import Memory, begin_thread, bytes_of
from stoker.runtime.threads import Pool, Ticket
from stoker.store.mirror import FETCH_ENDS_S
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.loader.choose import Draw
    from stoker.loader.options import Options
    from stoker.loader.records import RecordTable
    from stoker.monitor.meter import StallMeter
    from stoker.schema import Schema
    from stoker.store import Cache
    from stoker.store.mirror import MirrorRoot
    from stoker.store.shard import Verify

READ_THREADS = 4
"""Threads that read while storage is waited for. Each announces what it is about to read, so that more reads
are under way than there are threads; more of them only take turns at the interpreter's lock.

Source: `benchmarks/serve_disk.py`, and docs/design/028-verify-on-read.md.
"""
PIECE_BYTES = MIB
"""Bytes of a batch that are worth a thread of their own while all comes from the page cache."""
READ_TIMEOUT_S = 60.0
"""Seconds that a batch may take to be read from files of this machine."""
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
        mirrors: tuple[MirrorRoot, ...] = (),
    ) -> None:
        """`memory` gives the host memory that holds some of the records by now; of `options` matter the
        `timeout_s` of a batch, `verify` and `meter`. `threads` gather a large batch from memory together.
        `mirrors` are those that the cache comes through.
        """
        self._cache = cache
        self._table = table
        self._outputs = outputs
        self._locator = locator
        self._memory = memory
        self._is_asked = bool(options.timeout_s)
        """True if the user gave the timeout."""
        # A fetch has a timeout of its own, whose error says more: that must come first.
        self.timeout_s = options.timeout_s or (FETCH_ENDS_S if mirrors else READ_TIMEOUT_S)
        """Seconds that a batch may take to be read; from a store, without any byte that comes."""
        self._verify: Verify = options.verify
        self._pool = Pool(READ_THREADS, "stoker-read")
        self._gatherers = Pool(threads - 1, "stoker-gather") if threads > 1 else None
        self._depth = 1
        self._waits = True
        """True if the last batch that was read had to wait for storage."""
        self._example_bytes = sum(output.example_bytes for output in outputs)
        self._buffers: dict[tuple[str, int], Buffers] = {}
        self._meter = options.meter
        self._mirrors = mirrors
        self._fetching_s = 0.0
        """Seconds that reads had waited for a store when it was last asked."""
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
        waited = [self._result(ticket, what) for ticket in pending.tickets]
        if waited:
            self._waits = any(waited)
        if meter is not None:
            fetched_s = self._fetched_s(len(waited))
            meter.spent("fetch", min(fetched_s, perf_counter() - begin))
            meter.spent("read", max(0.0, perf_counter() - begin - fetched_s))
        return pending.values

    def _result(self, ticket: Ticket[int], what: str) -> int:
        """Return what the reads of a ticket returned, as `Ticket.result`.

        From a store a batch takes several fetches, each with its own timeout, so that bytes that come extend
        the wait. A timeout that the user gave ends it in any case.
        """
        came = self._came_bytes()
        while not ticket.wait(self.timeout_s) and self._mirrors:
            before, came = came, self._came_bytes()
            if self._is_asked or came == before:
                said = [one.retries.describe_slowest() for one in self._mirrors]
                raise StalledError(
                    "; ".join([f"{what} took longer than {self.timeout_s:g} s", *filter(None, said)]),
                    hint="See whether the store answers and the network holds, then run again: what arrived "
                    "is kept",
                )
        return ticket.result(0.0 if self._mirrors else self.timeout_s, what)

    def _came_bytes(self) -> int:
        """Return the bytes that came from stores so far."""
        return sum(one.counters.bytes for one in self._mirrors)

    def _fetched_s(self, threads: int) -> float:
        """Return seconds, of each thread, that reads waited for an object store since the last call."""
        if not self._mirrors:
            return 0.0
        before, self._fetching_s = self._fetching_s, sum(one.counters.wait_s for one in self._mirrors)
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
    on_host: HostPlaces
    """The same in host memory."""
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
            group = ticket.result(self._disk.timeout_s * WAIT_FACTOR, "bringing a batch to the device")
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
                on_host=HostPlaces(records, starts),
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
        if not self._cuda:
            return value
        if isinstance(value, list):  # one copy for all records of varying length
            return over_together(cast("list[Tensor]", value), self._over)
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
        rows = self._locator.rows(near, group.records, group.starts, group.on_host)
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


def over_together(values: list[Tensor], over: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return tensors that differ in length as parts of what `over` makes of all of them in one piece."""
    if not values:
        return []
    return [*cast("Any", over(torch.cat(values))).split([len(value) for value in values])]


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
