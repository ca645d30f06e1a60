"""Batches whose records are not all in memory: positional reads by a few threads, verified, a batch ahead.

Each example is read straight into its place in the batch; what is in a memory already is gathered from there,
so that a batch may draw from several tiers. Reads have a deadline: storage that does not answer costs a
`StalledError`, never a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.arguments import Options
from stoker.loader.buffers import REUSE_FROM_BYTES, Buffers, lasting
from stoker.loader.chunks import Chunk, Locator, host
from stoker.loader.gather import RaggedGather
from stoker.loader.kernels.choose import twin_for
from stoker.loader.memory import Memory, bytes_of
from stoker.loader.outputs import Output, view_for
from stoker.loader.pieces import Pieces, Wanted
from stoker.loader.places import Places
from stoker.runtime.threads import Pool, Ticket
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache
    from stoker.store.blocks import Verify

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
