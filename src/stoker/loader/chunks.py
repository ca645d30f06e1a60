"""Turn positions in the order into rows of shards, for many batches at a time.

A chunk holds, for up to `CHUNK_EXAMPLES` consecutive examples of one rank, which record and which start each
one is. A thread makes the next chunks while this one is served, those of several short epochs in one
piece of work. So the order adds almost no time to a batch, and its memory does not grow with the epoch.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.batch import to_device
from stoker.loader.choose import Choices, Draw, Taken
from stoker.runtime.threads import Pool, Ticket

if TYPE_CHECKING:
    from stoker.loader.batch import Examples
    from stoker.loader.batching import BatchPlan
    from stoker.loader.choose import ChosenRows
    from stoker.loader.order import Ids, Order, RankShare
    from stoker.loader.outputs import OutputSpec
    from stoker.loader.records import Cuts, RecordTable
    from stoker.loader.tiers import Memory
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache

CHUNK_EXAMPLES = 1 << 16
"""Examples in a chunk at most, and in those made in one piece of work: a few megabytes. Arrays of
four times as many are memory that is new to the process, whose pages cost more than what is put in them.

Source: `benchmarks/serve_memory.py`, W1, 2 cores.
"""
DEVICE_CHUNK_EXAMPLES = 1 << 18
"""The same on a GPU, whose batches are larger: a chunk takes some thirty launches, whatever its size."""
CHUNKS_AT_ONCE = 64
"""Chunks made in one piece of work at most. With short epochs the calls of numpy, each a turn of the
interpreter's lock that the serving thread waits for, cost more than what they compute.

Source: `benchmarks/serve_memory.py`, W1 and W2t, 2 cores.
"""
ORDER_TIMEOUT_S = 600.0
"""Seconds to wait for an order that is being made; 2^27 examples take 4 s on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """Consecutive batches of one rank and epoch."""

    epoch: int
    position: int
    """Position of the epoch at which the first batch begins."""
    batches: int
    batch: int
    """Examples in each of them."""
    step: int
    """Positions from one batch to the next."""
    short: bool
    """This is the short batch that ends an epoch."""
    last: bool
    """The epoch ends with this span."""
    ends: Sequence[int] = ()
    """Position after each batch, where they are not one `step` apart: some examples were passed over, or
    batches differ in size."""
    begins: NDArray[np.int64] | None = dataclass_field(default=None, compare=False)
    """Where each batch begins in the order, where batches differ in size; None: at the rank's part of a step.
    """

    @property
    def end(self) -> int:
        """Position after the last batch."""
        return self.ends[-1] if self.ends else self.position + self.batches * self.step

    def positions(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return where a loader resumes after each of `count` batches from the `first` on."""
        begin = self.position + (first + 1) * self.step
        ends = self.ends[first : first + count] or [begin + i * self.step for i in range(count)]
        after = [(self.epoch, end) for end in ends]
        if self.last and first + count == self.batches:
            after[-1] = (self.epoch + 1, 0)
        return after


class HostPlaces(NamedTuple):
    """Where examples are, in host memory."""

    records: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The examples of a span, located. Arrays are numpy, or torch on the device that the order is made on."""

    span: BatchRun
    examples: Any
    """Example numbers, `(n,)` int64."""
    records: Any
    """Places in `RecordTable`, `(n,)` int64."""
    starts: Any
    """First step of each window, `(n,)` int64; 0 for whole records."""
    index: Tensor
    """What batches hand out as `index`: `(n,)` sample indices, or `(n, 2)` with starts."""
    rows: Mapping[str, Any] | None
    """`Locator.rows` of `memory`; None if nothing was filled yet when this was made."""
    memory: Callable[[], Memory | None] | None
    """Gives the memory that `rows` are of while it is there; another one may serve by now."""
    on_host: HostPlaces | None = None
    """Records and starts in host memory, if the order was made there; None: a device made it."""
    source: tuple[Cache, RecordTable] | None = None
    """What `records` are places in, while the cache is being filled; None: the loader's own."""
    draw: Draw | None = None
    """What decides which part of each record is read; None: all is."""


class ColumnStrip(NamedTuple):
    """Consecutive batches of a chunk as columns: per output, and last for `index`, the values by batch."""

    columns: list[Iterable[Any]]
    number: int
    """Place of the first of them among the batches of the chunk."""
    batch_count: int
    """How many."""
    tier: str
    """The slowest tier that was read."""
    transformed: int = 0
    """How many of the loader's first transforms are done already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Everything that turns examples into rows, on one device."""

    examples: Examples
    first: Any
    """`examples.first` on the device."""
    indices: Any
    """Sample index of each record, on the device."""
    windowed: bool
    step_lengths: Mapping[str, int]
    """Steps per record behind each index of a fixed field with time."""
    ragged: tuple[str, ...]
    """Fields of varying length that are handed out as whole records."""
    lengths: Mapping[str, NDArray[np.int64]]
    """Per ragged field its steps in each record."""
    cuts: Cuts | None = None
    """How windows are cut from fields whose steps are many rows; None: they are not."""
    choices: Choices = ()
    """What part of each record is read."""
    seed: int = 0
    sizes: Mapping[str, Any] = dataclass_field(default_factory=dict[str, Any])
    """By group of `choices` the rows of each record: `(records,)` on the device."""

    shapes: Mapping[str, NDArray[np.int64]] = dataclass_field(default_factory=dict[str, Any])
    """For a GPU: by field of sizes those of each record, `(records, axes)`, in host memory, where records are
    given their axes. Empty on a CPU, where such a field is gathered as others are."""

    def extent(self, name: str, records: Any, starts: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first row in the record, and the number of rows, that examples take of a field."""
        own = to_host(records)
        if self.cuts is not None and name in self.cuts.rows:
            rows = self.cuts.rows[name][own]
            return to_host(starts) * rows, self.cuts.steps * rows
        return np.zeros(len(own), np.int64), self.lengths[name][own]

    def draw(self, epoch: int, examples: Any, records: Any) -> Draw | None:
        """Return what decides which part of each example's record is read; None: all is."""
        if not self.choices:
            return None
        sizes = {name: sizes[records] for name, sizes in self.sizes.items()}
        return Draw(choices=self.choices, seed=self.seed, epoch=epoch, examples=examples, sizes=sizes)

    def locate(self, examples: Any) -> tuple[Any, Any, Tensor]:
        """Return records, starts and `index` of examples, as in `Chunk`."""
        records, starts = self.examples.locate(examples, self.first)
        numbers = self.indices[records]
        index = _tensor(numbers)
        if self.windowed:
            both = torch.empty((len(index), 2), dtype=torch.int64, device=index.device)
            both[:, 0], both[:, 1] = index, _tensor(starts)
            index = both
        return records, starts, index

    def rows(
        self, memory: Memory, records: Any, starts: Any, on_host: HostPlaces | None = None
    ) -> dict[str, Any]:
        """Return the rows of examples in `memory`, per kind of index; ragged whole records stay numpy.

        Args:
            on_host: Records and starts in host memory; None: a device is waited for where they are needed.
        """
        if on_host is None and self.ragged:
            on_host = HostPlaces(to_host(records), to_host(starts) if self.cuts is not None else starts)
        own = memory.rows[records]
        rows: dict[str, Any] = {RECORD: _tensor(own)}
        if on_host is not None:
            rows |= {f"shapes:{name}": shapes[on_host.records] for name, shapes in self.shapes.items()}
        for name, length in self.step_lengths.items():
            rows[name] = _tensor(own * length + starts)
        for name, table in memory.steps.items():
            if name in self.ragged and on_host is not None:
                first, rows[f"lengths:{name}"] = self.extent(name, *on_host)
                rows[f"starts:{name}"] = memory.host_steps[name][on_host.records] + first
            else:
                rows[f"steps:{name}"] = _tensor(table[records] + starts)
        return rows


def chosen_in(
    memory: Memory, outputs: Iterable[OutputSpec], records: Any, chosen: Mapping[str, ChosenRows]
) -> dict[str, Tensor]:
    """Return what `outputs` take of choices in `memory`, per kind of index.

    Rows of a field are `(n, count)` int64, or `(n, 0)` where no record has any. All of them are in the
    memory, also those that stand for rows behind the last real one, which are set to zero afterwards.
    """
    found: dict[str, Tensor] = {}
    for output in outputs:
        if output.taken is None:
            continue
        own = chosen[output.group]
        if output.taken is not Taken.ROWS:
            found[output.index] = _tensor(own.lengths if output.taken is Taken.LENGTHS else own.start)
        elif output.field in memory.steps:
            places = _tensor(memory.steps[output.field][records])[:, None] + _tensor(own.rows)
            found[output.index] = _existing(places, _tensor(own.lengths), len(memory.sources[output.field]))
        else:
            length = memory.sources[output.field].shape[1]
            found[output.index] = _tensor(memory.rows[records])[:, None] * length + _tensor(own.rows)
    return found


def _existing(places: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return rows of a ragged field with those of other records in place of rows of empty records.

    Behind an empty record there may be no row: in memory that is mapped, not even an address.
    """
    if not count or (places.device.type == "cpu" and not lengths.any()):
        return places[:, :0]
    longest = places.index_select(0, lengths.argmax()[None])  # without waiting for a device
    return torch.where(lengths[:, None] > 0, places, longest).clamp_(max=count - 1)


class Chunks:
    """The chunks of one loader, epoch after epoch."""

    def __init__(
        self,
        order: Order,
        share: RankShare,
        locator: Locator,
        device: torch.device,
        serving: Callable[[], Memory | None],
        meter: StallMeter | None = None,
    ) -> None:
        """`serving` gives the memory that batches come from; None while they come from another tier."""
        self._order = order
        self._share = share
        self._locator = locator
        self._device = device
        self._order_device = None if order.sorted_on_host else device
        """Where orders are made; None: on the host, which then knows the rows of each example too."""
        self._serving = serving
        self._orders: dict[int, Ids] = {}
        self._lock = threading.Lock()
        # A GPU makes an order in no time, and must make it in the stream that the caller works in.
        self._pool = Pool(2, "stoker-order") if device.type == "cpu" else None
        self._made: deque[Chunk] = deque()
        self._prefetched: tuple[BatchRun, Ticket[list[Chunk]]] | None = None
        self._at_once = 1
        self._meter = meter

    def spans(self, epoch: int, position: int) -> Iterator[BatchRun]:
        """Yield how the rest of an epoch is cut into chunks; the short last batch is one of its own."""
        share = self._share
        most = CHUNK_EXAMPLES if self._device.type == "cpu" else DEVICE_CHUNK_EXAMPLES
        if share.batches is not None:
            yield from planned_spans(share.batches.epoch(epoch), share.rank, epoch, position, most)
            return
        per_chunk = max(1, most // share.batch_size)
        whole, tail = share.whole_and_tail(position)
        for first in range(0, whole, per_chunk):
            count = min(per_chunk, whole - first)
            yield BatchRun(
                epoch=epoch,
                position=position + first * share.step,
                batches=count,
                batch=share.batch_size,
                step=share.step,
                short=False,
                last=not tail and first + count == whole,
            )
        if tail:
            at = position + whole * share.step
            yield BatchRun(
                epoch=epoch, position=at, batches=1, batch=tail, step=share.step, short=True, last=True
            )

    def of(self, epoch: int, position: int) -> Iterator[Chunk]:
        """Yield the chunks of the rest of an epoch."""
        for span in self.spans(epoch, position):
            begin = perf_counter()
            chunk = self._take(span)
            if self._meter is not None:
                self._meter.spent("wait", perf_counter() - begin)
            if self._prefetched is None and self._pool is not None:
                following = self._following(self._made[-1].span if self._made else span)
                if following:
                    self._prefetched = (following[0], self._pool.submit(partial(self._make, following)))
            middle = self._order.positions // 2 - span.position
            long = self._order.positions > CHUNK_EXAMPLES
            if long and self._pool is not None and middle in range(span.end - span.position):
                # The next order takes longer than a chunk is served, so it is begun earlier.
                self._pool.submit(partial(self._ids, [epoch + 1]))
            yield chunk

    def order(self, epoch: int) -> Ids:
        """Return the order of an epoch, which is kept for all that serve it."""
        return self._ids([epoch])[epoch]

    def _following(self, span: BatchRun) -> list[BatchRun]:
        """Return the spans after `span` that are made in one piece of work, also those of later epochs."""
        epoch, found, room = span.epoch, list[BatchRun](), CHUNK_EXAMPLES
        rest = iter(()) if span.last else self.spans(epoch, span.end)
        while True:
            for one in rest:
                room -= one.batches * one.batch
                if found and (room < 0 or len(found) == self._at_once):
                    return found
                found.append(one)
            epoch += 1
            if not self._share.steps(epoch=epoch):
                return found
            rest = self.spans(epoch, 0)

    def _take(self, span: BatchRun) -> Chunk:
        if not self._made and self._prefetched is not None and self._prefetched[0] == span:
            self._made.extend(self._prefetched[1].result(ORDER_TIMEOUT_S, "making the order of examples"))
            self._prefetched = None
            # Only a reader that continues from one chunk to the next gets ever more of them at once.
            self._at_once = min(CHUNKS_AT_ONCE, 2 * self._at_once)
        if self._made and self._made[0].span == span:
            return self._made.popleft()
        self._made.clear()
        self._prefetched, self._at_once = None, 1
        return self._make([span])[0]

    def _make(self, spans: Sequence[BatchRun]) -> list[Chunk]:
        """Return the chunks of consecutive spans, all arrays in one go."""
        orders = self._ids(list(dict.fromkeys(span.epoch for span in spans)))
        parts = [self._examples(orders[span.epoch], span) for span in spans]
        examples, on_host = parts[0] if len(parts) == 1 else np.concatenate(parts), None
        if self._order_device is None and self._device.type != "cpu":  # its rows are found without a wait
            known = self._locator.examples
            on_host = HostPlaces(*known.locate(examples, known.first))
            examples = to_device(examples, self._device)
        records, starts, index = self._locator.locate(examples)
        memory = self._serving()
        rows = None if memory is None else self._locator.rows(memory, records, starts, on_host)
        chunks: list[Chunk] = []
        end = 0
        for span in spans:
            own = slice(end, end := end + span.batches * span.batch)
            chunks.append(
                Chunk(
                    span=span,
                    examples=examples[own],
                    records=records[own],
                    starts=starts[own],
                    index=index[own],
                    rows=None if rows is None else {name: values[own] for name, values in rows.items()},
                    memory=None if memory is None else weakref.ref(memory),
                    on_host=None if on_host is None else HostPlaces(*(part[own] for part in on_host)),
                    draw=self._locator.draw(span.epoch, examples[own], records[own]),
                )
            )
        return chunks

    def _examples(self, ids: Ids, span: BatchRun) -> Any:
        """Return the examples of a span, in serving order."""
        if span.begins is not None:
            first = int(span.begins[0])
            between = ids(first, int(span.begins[-1]) + span.batch)
            if len(between) == span.batches * span.batch:
                return between
            places = (span.begins[:, None] - first + np.arange(span.batch)).reshape(-1)
            return between[places if isinstance(between, np.ndarray) else to_device(places, between.device)]
        if span.short:
            return self._share.take_tail(ids, span.position)
        return self._share.take(ids, span.position, span.batches)

    def _ids(self, epochs: Sequence[int]) -> dict[int, Ids]:
        with self._lock:
            missing = [epoch for epoch in epochs if epoch not in self._orders]
            if missing:
                made = self._order.epochs(missing, self._order_device)
                # What is asked for and what is being served; more would only hold memory.
                keep = {*list(self._orders)[-1:], *epochs}
                self._orders = {e: ids for e, ids in self._orders.items() if e in keep}
                self._orders.update(zip(missing, made, strict=True))
            return self._orders


def planned_spans(plan: BatchPlan, rank: int, epoch: int, position: int, most: int) -> Iterator[BatchRun]:
    """Yield the batches of a rank from a position on, as runs of equal size of up to `most` examples."""
    begins, sizes = plan.of_rank(rank)
    bounds, step = plan.step_bounds, plan.step_at(position)
    breaks = np.flatnonzero(np.diff(sizes)) + 1
    while step < plan.steps:
        size = int(sizes[step])
        after = int(np.searchsorted(breaks, step, side="right"))
        stop = int(breaks[after]) if after < len(breaks) else plan.steps
        stop = min(stop, step + max(1, most // max(1, size)))
        yield BatchRun(
            epoch=epoch,
            position=int(bounds[step]),
            batches=stop - step,
            batch=size,
            step=size * plan.world_size,
            short=False,
            last=stop == plan.steps,
            ends=bounds[step + 1 : stop + 1].tolist(),
            begins=begins[step:stop],
        )
        step = stop


def to_host(values: Any) -> NDArray[np.int64]:
    """Return the same numbers as a numpy array, wherever they are."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def _tensor(values: Any) -> Tensor:
    """Return the same numbers as a tensor where they are, whatever torch's default device is."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


RECORD = "record"
"""The index that counts virtual rows of records; others are `steps:<length or field>`."""
