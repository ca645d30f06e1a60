"""Batches for a device that does not hold all their records: what it holds is gathered there, the rest is
assembled in host memory and copied over.

Several batches are made at once (a *group*), so that small ones share their copies. Per group the rows that
are not on the device are gathered from host memory, and read where that lacks them too, into page-locked
memory, and copied on a stream of their own, all by a thread that is ahead of the batches. The serving thread
then gathers every row of the group on the device, with stand-ins for those that are not there, and puts the
copied rows in their places. So a batch is drawn uniformly from all memories, and a row costs what it costs
where it is.

In `block` order a group is a window of the order: only a few trajectories, each with many of its examples.
Then these are copied whole, which is fewer bytes than the steps that the examples take, and are on the device
for as long as the window lasts: a window that slides through a set larger than the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.chunks import Chunk, Locator, host
from stoker.loader.disk import READ_DEADLINE_S, DiskBatches
from stoker.loader.gather import STRIP_BATCHES, RaggedGather, twin_for
from stoker.loader.outputs import RECORD, Output, view_for
from stoker.loader.places import Places
from stoker.loader.tiers import Memory, begin_thread
from stoker.runtime.threads import Pool, Ticket
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.schema import Schema
    from stoker.store import Cache

GROUP_BYTES = 4 * MIB
"""Batches are made together up to this size: below it a copy to a GPU is bound by calls, not by bytes."""
WINDOW_BYTES = 64 * MIB
"""Batches of one window of the order are made together up to this size."""
MAX_AHEAD = 4
"""Groups made ahead at most; it starts with one, and one more whenever a group was not ready in time: copying
has then taken longer than the steps."""
WAIT_FACTOR = 2 * (MAX_AHEAD + 1)
"""A group may wait for those before it, each of which has the time that a batch has to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
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
    index: Tensor
    tier: str
    """The slowest tier that some row came from."""
    done: Any
    """CUDA event after which all of it is on the device; None: it is."""


class PartialBatches:
    """Makes batches on `device` out of its memory, host memory and disk. One per loader and process."""

    def __init__(
        self,
        outputs: tuple[Output, ...],
        cache: Cache,
        places: Places,
        locator: Locator,
        disk: Callable[[tuple[Output, ...]], DiskBatches],
        device: torch.device,
    ) -> None:
        """`disk` makes what assembles rows of outputs in host memory; `locator` is one on the CPU."""
        self._outputs = outputs
        self._twins = [twin_for(output, device) for output in outputs]
        self._schema = cache.recipe.columns
        self._places = places
        self._locator = locator
        self._disk = disk(outputs)
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._pool = Pool(1, "stoker-stage")
        self._ahead = 1
        self.meter: StallMeter | None = None
        self._example_bytes = sum(output.example_bytes for output in outputs)
        self._views: tuple[Memory, list[Tensor]] | None = None
        self._whole = _whole_records(outputs, self._schema)
        self._record_bytes = sum(output.example_bytes for output in self._whole)
        self._disk_whole = disk(self._whole)

    def strips(
        self, chunk: Chunk, near: Memory | None, window: int, most: Callable[[], int]
    ) -> Iterator[tuple[list[Iterable[Any]], int, str]]:
        """The chunk's batches, some at a time: columns per output and `index`, how many batches, and the
        slowest tier that was read.

        Args:
            chunk: Which batches.
            near: The memory on the device; it may still be filling.
            window: Positions of an epoch that draw from few records (`block` order); 0: there are none.
            most: Gives how many batches to make at once, at most.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A group was not there in time.
        """
        size, last = chunk.span.batch, chunk.span.batches
        # The thread refers to no memory of the device, which can so be let go of while groups are ahead.
        ready = None if near is None else near.ready
        line: deque[tuple[int, Ticket[Group]]] = deque()
        following = 0
        while following < last or line:
            while following < last and len(line) <= self._ahead:
                batches = min(most(), self._count(chunk, following, window))
                own = slice(following * size, (following + batches) * size)
                line.append((batches, self._pool.submit(partial(self._stage, chunk, own, ready))))
                following += batches
            batches, ticket = line.popleft()
            if not ticket.done() and following > batches:
                self._ahead = min(MAX_AHEAD, self._ahead + 1)
            begin = perf_counter()
            group = ticket.result(READ_DEADLINE_S * WAIT_FACTOR, "bringing a batch to the device")
            if self.meter is not None:
                self.meter.spent("read" if group.tier == "disk" else "copy", perf_counter() - begin)
            columns = [_cut(value, size) for value in [*self._place(group, near), group.index]]
            yield columns, batches, group.tier

    def _count(self, chunk: Chunk, number: int, window: int) -> int:
        """How many batches from this one on make a good group."""
        span = chunk.span
        batch_bytes = max(1, span.batch * self._example_bytes)
        count = min(STRIP_BATCHES, GROUP_BYTES // batch_bytes)
        if window:
            left = window - (span.position + number * span.step) % window
            count = max(count, min(-(-left // span.step), WINDOW_BYTES // batch_bytes))
        return max(1, min(count, span.batches - number))

    def _stage(self, chunk: Chunk, own: slice, ready: bytearray | None) -> Group:
        """Bring what is not near to the device; in the thread of the pool."""
        begin_thread(self._device)
        with torch.cuda.stream(self._stream) if self._cuda else nullcontext():
            return self._staged(host(chunk.records[own]), host(chunk.starts[own]), chunk.index[own], ready)

    def _staged(
        self, records: NDArray[np.int64], starts: NDArray[np.int64], index: Tensor, ready: bytearray | None
    ) -> Group:
        here = np.zeros(len(records), dtype=np.bool_)
        if ready is not None:
            here = np.frombuffer(ready, dtype=np.uint8)[self._places.shard[records]] == 1
        where = np.flatnonzero(~here)
        values, rows, read = self._far(records[where], starts[where], index)
        tier = "disk" if read else "host" if len(where) else "device"
        some = len(where) < len(records)
        if some:  # the first one that is near stands in for those that are not
            at = int(np.argmax(here))
            records, starts = np.where(here, records, records[at]), np.where(here, starts, starts[at])
        return Group(
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
        self, records: NDArray[np.int64], starts: NDArray[np.int64], index: Tensor
    ) -> tuple[list[Any], dict[str, Tensor] | None, bool]:
        """Rows in host memory, or the records that they are cut from where those are fewer bytes: `values`
        and `rows` of a group, and whether disk was read.
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
        pending = disk.begin(records, starts, index, room)
        return disk.finish(pending), rows, bool(pending.tickets)

    def _room(self, output: Output, count: int) -> Any:
        if output.ragged:
            return [None] * count
        # Page-locked memory comes from torch's own cache, which gives it out again after its copy has ended.
        return torch.empty((count, *output.shape), dtype=output.dtype, pin_memory=self._cuda, device="cpu")

    def _located(self, values: NDArray[np.int64]) -> Any:
        """Records or starts where the rows of the device's memory are looked up."""
        return self._over(torch.as_tensor(values, device="cpu")) if self._cuda else values

    def _over(self, value: Any) -> Any:
        """The same on the device; page-locked first, so that the copy goes on by itself."""
        if isinstance(value, list):
            return [self._over(one) for one in cast("list[Tensor]", value)]
        if not self._cuda:
            return value
        pinned = value if value.is_pinned() else value.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _place(self, group: Group, near: Memory | None) -> list[Any]:
        """Values per output, in order, on the device, as handed out."""
        if group.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(group.done)
            rows = [] if group.rows is None else [*group.rows.values()]
            for tensor in _tensors([group.records, group.starts, group.far, group.values, rows, group.index]):
                tensor.record_stream(stream)
        far = group.values if group.rows is None else self._cut_out(group.values, group.rows)
        made = far if near is None or group.records is None else self._joined(group, near, far)
        return [
            value if twin is None
            else [twin(one) for one in value] if isinstance(value, list)
            else twin(value)
            for twin, value in zip(self._twins, made, strict=True)
        ]  # fmt: skip

    def _cut_out(self, records: list[Tensor], rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Per output its rows of whole records."""
        sources = {output.field: value for output, value in zip(self._whole, records, strict=True)}
        return [
            torch.index_select(
                view_for(output, self._schema[output.field], sources[output.field]), 0, rows[output.index]
            )
            for output in self._outputs
        ]

    def _joined(self, group: Group, near: Memory, values: list[Any]) -> list[Any]:
        rows = self._locator.rows(near, group.records, group.starts)
        made: list[Any] = []
        for output, view, far in zip(self._outputs, self._views_of(near), values, strict=True):
            if output.ragged:
                found = RaggedGather(view, None)(
                    rows[f"starts:{output.field}"], rows[f"lengths:{output.field}"]
                )
                for j, value in zip(group.far_places, far, strict=True):
                    found[j] = value
            else:
                found = torch.index_select(view, 0, rows[output.index])
                if group.far is not None:
                    found.index_copy_(0, group.far, far)
            made.append(found)
        return made

    def forget(self, near: Memory | None, host: Memory | None) -> None:
        """Refer to no memory but these: that of the host once groups made before have been read from it."""
        if self._views is not None and self._views[0] is not near:
            self._views = None
        for disk in (self._disk, self._disk_whole):  # both are used by the thread alone
            self._pool.submit(partial(disk.forget, host))

    def _views_of(self, memory: Memory) -> list[Tensor]:
        if self._views is None or self._views[0] is not memory:
            views = [view_for(o, self._schema[o.field], memory.sources[o.field]) for o in self._outputs]
            self._views = (memory, views)
        return self._views[1]


def _whole_records(outputs: tuple[Output, ...], schema: Schema) -> tuple[Output, ...]:
    """The fields of windows as whole records; none where that is no gain or no tensor."""
    fields = {output.field: schema[output.field] for output in outputs}
    if any(field.ragged for field in fields.values()) or all(o.index == RECORD for o in outputs):
        return ()
    dtypes = {output.field: output.dtype for output in outputs}
    return tuple(
        Output(name=name, field=name, index=RECORD, shape=field.shape, dtype=dtypes[name])
        for name, field in fields.items()
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(cast("list[Any]", value))


def _cut(value: Any, size: int) -> Iterable[Any]:
    """Batches of `size` rows."""
    if isinstance(value, list):
        rows = cast("list[Tensor]", value)
        return [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return cast("tuple[Tensor, ...]", value.split(size))
