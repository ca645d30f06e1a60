"""Gather batches from memory, at the speed of `index_select`.

The loop over batches runs in C as far as possible. Each output is a `map` of its gather over the slices of an
index that was prepared for many batches. A `zip` over the outputs makes a batch. Small outputs are
gathered for many batches in one call; large ones reuse buffers and are cut over threads by rows.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, repeat
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ResourceError
from stoker.loader.batch import REUSE_FROM_BYTES, Buffers, allocate, to_device
from stoker.loader.choose import Taken
from stoker.loader.chunks import RECORD
from stoker.native import RowGather, RowScale, can_gather
from stoker.runtime.threads import Pool, Ticket
from stoker.units import KIB, MIB

if TYPE_CHECKING:
    from stoker.loader.outputs import Conversion, OutputSpec
    from stoker.loader.tiers import Memory
    from stoker.schema import Field, Schema

# ----------------------------------------------------------------------------------------------------------
# Gather and convert in plain torch: what every kernel must agree with, and what a CPU runs.
#
# On a CPU a batch is converted piece by piece, each small enough to stay in the core's cache between the
# passes (to float32, times scale, plus shift, to the batch's dtype): whole-batch passes go to memory and
# back each time. Pieces are shared out to threads.


PIECE_BYTES = 256 * KIB
"""Float32 values of the rows that are converted together, at least one row: below the caches of the second
level, above what makes the calls themselves count.

Source: `benchmarks/serve_memory.py`, W3f, 2 cores.
"""
NARROW_PIECE_BYTES = 2 * MIB
"""The same for outputs narrower than float32. All passes but the last are over scratch, which may fill a part
of the third level's cache, and with fewer calls threads wait less for the interpreter's lock.
"""
SHORT_RUN = 64
"""Channels that change after fewer values than this get a scale per value: short runs crawl."""

ImageViews: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""Where crops begin, `(n, 2)` int64 rows and columns, and which examples are mirrored, `(n,)` bool."""


class RowConverter:
    """Converts rows of one output that were gathered, on the device they are on."""

    def __init__(self, conversion: Conversion, shape: tuple[int, ...], device: torch.device) -> None:
        """`shape` is that of one stored row."""
        self._conversion = conversion
        self._stored = shape
        self.shape = shape if conversion.crop is None else (*shape[:-2], *conversion.crop)
        """Shape of one row handed out."""
        self._lines: tuple[int, ...] = ()
        self._scale = self._shift = torch.empty(0, device="cpu")
        if conversion.scale:
            self._scale, self._shift = self._by_channel(device)

    def compiled(self, view: Tensor) -> RowScale | None:
        """Return what gathers and normalizes rows of `view` in one pass; None where that is done in torch."""
        conversion = self._conversion
        plain = conversion.crop is None and not conversion.flip and conversion.dtype == torch.float32
        if not (plain and conversion.scale and view.dtype == torch.uint8 and can_gather(view)):
            return None
        scale, shift = torch.tensor([conversion.scale, conversion.shift], dtype=torch.float32, device="cpu")
        inner = conversion.inner if len(scale) > 1 else math.prod(view.shape[1:])
        return RowScale(view, scale, shift, inner)

    def _by_channel(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the scale and shift in the shape that a row's values are seen in, which `_lines` keeps."""
        conversion, channels, values = self._conversion, len(self._conversion.scale), math.prod(self.shape)
        inner = conversion.inner
        if conversion.crop is not None:
            inner = inner // math.prod(self._stored[-2:]) * math.prod(conversion.crop)
        pair = torch.tensor([conversion.scale, conversion.shift], dtype=torch.float32, device=device)
        if channels == 1:
            self._lines = (values,)
            return pair[0], pair[1]
        if inner >= SHORT_RUN:
            self._lines = (values // (channels * inner), channels, inner)
            return pair[0, :, None], pair[1, :, None]
        self._lines = (values,)
        each = pair.repeat_interleave(inner, dim=1).repeat(1, values // (channels * inner))
        return each[0], each[1]

    def __call__(self, rows: Tensor, views: ImageViews = (None, None)) -> Tensor:
        """Return the rows `(n, *stored shape)` as they are handed out, fresh: `(n, *self.shape)`."""
        if self._conversion.crop is not None or self._conversion.flip:
            rows = cut_images(rows, self._conversion.crop, *views)
        if not self._conversion.scale:
            return rows.to(self._conversion.dtype)
        out = torch.empty((len(rows), *self.shape), dtype=self._conversion.dtype, device=rows.device)
        self.into(rows, out, torch.empty(self.work_shape(len(rows)), dtype=torch.float32, device=rows.device))
        return out

    def work_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the float32 scratch that `into` needs; 0 rows where it needs none."""
        return (
            rows if self._conversion.scale and self._conversion.dtype != torch.float32 else 0,
            *self.shape,
        )

    def into(self, rows: Tensor, out: Tensor, work: Tensor) -> None:
        """Convert `rows`, crops and mirrors done, into `out`; `work` has the shape that `work_shape` says."""
        if not self._conversion.scale:
            out.copy_(rows)
            return
        values = out if not len(work) else work if len(work) == len(rows) else work[: len(rows)]
        self.normalize_(values.copy_(rows))
        if len(work):
            out.copy_(values)

    def lined(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a float32 output as `scaled_` takes them."""
        return out.view(len(out), *self._lines).unbind(0) if self._conversion.scale else out.unbind(0)

    def scaled_(self, row: Tensor) -> None:
        """Normalization one of `lined` where it is: the least there is to do for a row, call by call."""
        if self._conversion.scale:
            row.mul_(self._scale).add_(self._shift)

    def normalize_(self, values: Tensor) -> Tensor:
        """Float32 rows, contiguous, normalized where they are; any shape of a row with as many values."""
        if self._conversion.scale:
            values.view(len(values), *self._lines).mul_(self._scale).add_(self._shift)
        return values


class ConvertingGather:
    """Gathers rows of one view and converts them: on a CPU piece by piece, elsewhere batch by batch."""

    def __init__(
        self,
        view: Tensor,
        conversion: Conversion,
        batch: int,
        *,
        pool: Pool | None = None,
        static: bool = False,
    ) -> None:
        """`batch` is the size of a full batch.

        Args:
            view: Rows as stored.
            fused: What is done to them.
            pool: Converts large batches in addition to the caller's thread; None: without.
            static: Every full batch is written over the last.
        """
        self._view = view
        self._conversion = conversion
        self._moved = conversion.crop is not None or conversion.flip
        self._converter = RowConverter(conversion, tuple(view.shape[1:]), view.device)
        self.room = OutputMemory(
            (batch, *self._converter.shape), conversion.dtype, view.device, static=static
        )
        """Where batches go."""
        self._pool = pool if self.room.bytes >= THREADS_FROM_BYTES else None
        narrow = bool(self._converter.work_shape(1)[0])
        self._scale = self._converter.compiled(view)
        most = NARROW_PIECE_BYTES if narrow or self._scale is not None else PIECE_BYTES
        self._rows = max(1, most // max(1, 4 * math.prod(view.shape[1:])))
        self._in_place = self._rows == 1 and not self._moved and not narrow
        self._scratch: deque[tuple[Tensor, Tensor]] = deque()
        self._select = _selector(view)

    def __call__(self, index: Tensor, views: ImageViews = (None, None)) -> Tensor:
        """Return rows `index`, converted, `(len(index), *shape)`; `views` crop and mirror them."""
        if self._view.device.type != "cpu":
            rows = torch.index_select(self._view, 0, index)
            return self.room.fixed(self._converter(rows, views))
        out = self.room.take(len(index))
        if self._scale is not None:
            work = partial(self._scale_rows, index, out, iter(range(0, len(index), self._rows)))
        elif self._in_place:
            # Large enough to be read in place. What rows take is prepared for all of them before, since
            # threads that hold the interpreter's lock wait for each other longer than they work.
            rows = [self._view[number] for number in index.tolist()]
            work = partial(
                self._convert_rows, zip(rows, out.unbind(0), self._converter.lined(out), strict=True)
            )
        else:
            work = partial(self._convert, index, views, out, iter(range(0, len(index), self._rows)))
        _run_on_all(self._pool, work)
        return out

    def _scale_rows(self, index: Tensor, out: Tensor, pieces: Iterator[int]) -> None:
        """Convert pieces of the batch in one pass."""
        assert self._scale is not None
        for begin in pieces:
            end = min(begin + self._rows, len(index))
            self._scale(index[begin:end], out[begin:end])

    def _convert_rows(self, rows: Iterator[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Convert rows until none is left; threads share the iterator, so a slow one does less."""
        for row, out, lined in rows:
            out.copy_(row)
            self._converter.scaled_(lined)

    def _convert(self, index: Tensor, views: ImageViews, out: Tensor, pieces: Iterator[int]) -> None:
        """Do the same with pieces of the batch."""
        rows, work = scratch = self._take_scratch()
        for begin in pieces:
            end = min(begin + self._rows, len(index))
            raw = self._select(index[begin:end], out=rows[: end - begin])
            if self._moved:
                own = [None if view is None else view[begin:end] for view in views]
                raw = cut_images(raw, self._conversion.crop, *own)
            self._converter.into(raw, out[begin:end], work)
        self._scratch.append(scratch)

    def _take_scratch(self) -> tuple[Tensor, Tensor]:
        """Return room for the rows of a piece as stored, and as float32."""
        try:
            return self._scratch.pop()
        except IndexError:
            return self._make_scratch()

    def _make_scratch(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return (
                self._view.new_empty((self._rows, *self._view.shape[1:])),
                torch.empty(self._converter.work_shape(self._rows), dtype=torch.float32, device="cpu"),
            )


class OutputMemory:
    """Memory for batches of one output: a fixed place, memory that nothing refers to any more, or fresh."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, static: bool
    ) -> None:
        self.shape, self._dtype, self._device = shape, dtype, device
        self.bytes = math.prod(shape) * dtype.itemsize
        """Of a full batch."""
        self._fixed = allocate(shape, dtype, device) if static else None
        reused = self.bytes >= REUSE_FROM_BYTES and device.type == "cpu" and not static
        self._buffers = Buffers(shape, dtype) if reused else None

    def take(self, count: int) -> Tensor:
        """Return a tensor for `count` examples, content undefined; only that of a full batch is not fresh."""
        if count == self.shape[0]:
            if self._fixed is not None:
                return self._fixed
            if self._buffers is not None:
                return self._buffers.take()
        if self._buffers is not None:  # threads write it, and have no part in the caller's inference mode
            return allocate((count, *self.shape[1:]), self._dtype, self._device)
        return torch.empty((count, *self.shape[1:]), dtype=self._dtype, device=self._device)

    def fixed(self, made: Tensor) -> Tensor:
        """Return the same values, in the fixed place if there is one."""
        return made if self._fixed is None else self._fixed.copy_(made)


def cut_images(
    rows: Tensor, crop: tuple[int, int] | None, begins: Tensor | None, flips: Tensor | None
) -> Tensor:
    """Return the crops and mirrors of images, `(n, ..., h, w)`, of `(n, ..., H, W)`.

    Args:
        crop: Rows and columns kept; None: all.
        begins: First row and column of each example, `(n, 2)` int64; None: the middle.
        flips: Which examples are mirrored, `(n,)` bool; None: none.
    """
    height, width = rows.shape[-2:]
    kept_h, kept_w = crop or (height, width)
    down = torch.arange(kept_h, device=rows.device).expand(len(rows), kept_h)
    along = torch.arange(kept_w, device=rows.device).expand(len(rows), kept_w)
    if flips is not None:
        along = torch.where(flips[:, None], kept_w - 1 - along, along)
    if begins is None:
        down, along = down + (height - kept_h) // 2, along + (width - kept_w) // 2
    else:
        down, along = down + begins[:, :1], along + begins[:, 1:]
    places = (down[:, :, None] * width + along[:, None, :]).view(len(rows), 1, -1)
    flat = rows.reshape(len(rows), -1, height * width)
    taken = torch.gather(flat, 2, places.expand(-1, flat.shape[1], -1))
    return taken.view(*rows.shape[:-2], kept_h, kept_w)


# ----------------------------------------------------------------------------------------------------------
# Which kernel converts an output while it is gathered.


def make_converting_gather(
    view: Tensor, conversion: Conversion, batch: int, pool: Pool | None, *, static: bool
) -> Callable[..., Tensor]:
    """Return a gather from `view` that does what `conversion` says; arguments as for `ConvertingGather`."""
    converter = ConvertingGather(view, conversion, batch, pool=pool, static=static)
    # A kernel goes by float32, and from float64 to a narrow dtype that would round twice.
    if view.device.type != "cuda" or view.dtype == torch.float64:
        return converter
    triton_gather = _triton()
    if triton_gather is None:
        return converter
    return FallbackGather(triton_gather.TritonGather(view, conversion, converter.room), converter)


class FallbackGather:
    """A kernel, until it turns out with the first batch that it does not run here: then its twin."""

    def __init__(self, kernel: Callable[..., Tensor], converter: Callable[..., Tensor]) -> None:
        self._gather, self._converter = kernel, converter
        self._tried = False

    def __call__(self, index: Tensor, *views: ImageViews) -> Tensor:
        """Return the rows `index`, converted; `views` crop and mirror them."""
        if self._tried:
            return self._gather(index, *views)
        try:
            made = self._gather(index, *views)
        except (torch.OutOfMemoryError, Warning):
            raise  # memory may be there next time, and a warning that is an error is the caller's to see
        except Exception as error:  # noqa: BLE001 - a compiler for this very GPU fails in ways of its own
            _say(f"the kernel for {torch.cuda.get_device_name(index.device)} failed: {error}")
            self._gather = self._converter
            made = self._gather(index, *views)
        self._tried = True
        return made


def make_converter(output: OutputSpec, device: torch.device) -> RowConverter | None:
    """Return what converts gathered rows of an output; None: they are handed out as stored."""
    return None if output.conversion is None else RowConverter(output.conversion, output.row_shape, device)


@functools.cache
def _triton() -> Any:
    try:
        from stoker.loader import triton_gather
    except ImportError as error:
        _say(f"Triton is not here ({error})")
        return None
    except Warning:
        raise  # it is an error because the caller wants that
    except Exception as error:  # noqa: BLE001 - another version of Triton fails in ways of its own
        _say(f"this version of Triton cannot be used ({type(error).__name__}: {error})")
        return None
    return triton_gather


@functools.cache
def _say(why: str) -> None:
    logging.getLogger("stoker").warning(
        "%s; batches on the GPU are normalized and cast in plain torch: the same values, several passes", why
    )


STRIP_BATCHES = 128
"""Batches whose slices are made in one go."""
STRIP_OUTPUT_BYTES = 16 * KIB
"""Outputs up to this size per batch are gathered on a CPU for a strip at once."""
GPU_CALL_BYTES = 8 * MIB
"""On a GPU, one call gathers up to this many bytes, because starting a call takes some 15 us of the
host's time. A batch that is kept keeps the others of its call in memory.

Source: docs/project/benchmarks.md, an H200: 15 us of the host for each `index_select`.
"""
THREADS_FROM_BYTES = 4 * MIB
"""Outputs from this size on, about a millisecond, are gathered by several threads; below that they lose.

Source: designs measured for the host tier, 2 cores.
"""
WORDS_FROM_BYTES = 64 * KIB
"""Examples from this size on are copied as words of 8 bytes: torch then copies a row 10 to 25 % sooner than
as bytes or halves. Below, the two views that it takes cost what it gains.

Source: `benchmarks/serve_memory.py`, W2t and W3, 2 cores.
"""
WORD = torch.int64
PIECES_PER_THREAD = 4
"""Pieces into which a large gather is cut, for each thread."""
GATHER_TIMEOUT_S = 300.0
"""Seconds that one thread may take for its part of a batch in memory."""


class Gather:
    """Copies rows of one view into batches; `gather(index)` gives `(len(index), *shape)`."""

    def __init__(self, view: Tensor, output: OutputSpec, batch: int, pool: Pool | None) -> None:
        """`pool`: threads that gather too, in addition to the caller's; `batch`: the size of a full batch."""
        native = can_gather(view)
        words = _words(view) if output.example_bytes >= WORDS_FROM_BYTES and not native else None
        self._view = view if words is None else words
        self._select = _selector(self._view)
        self._batch = batch
        self._given = None if words is None else (view.dtype, output.shape)
        """What a batch of words is handed out as."""
        size = batch * output.example_bytes
        large = size >= REUSE_FROM_BYTES and view.device.type == "cpu"
        self._buffers = Buffers((batch, *self._view.shape[1:]), self._view.dtype) if large else None
        parts = 1
        if pool is not None and size >= THREADS_FROM_BYTES:
            parts = min(batch, PIECES_PER_THREAD * (1 + pool.size))
        self._pieces = [*pairwise(batch * part // parts for part in range(parts + 1))]
        self._pool = pool

    def direct(self) -> Callable[[Tensor], Tensor]:
        """Return the quickest equivalent of this gather."""
        if self._buffers is None and self._given is None:
            if not isinstance(self._select, RowGather):
                return partial(torch.index_select, self._view, 0)
            return self._fresh
        return self

    def _fresh(self, index: Tensor) -> Tensor:
        view = self._view
        out = torch.empty((len(index), *view.shape[1:]), dtype=view.dtype, device=view.device)
        return self._select(index, out=out)

    def __call__(self, index: Tensor) -> Tensor:
        """Gather one batch; a short one is always fresh."""
        if self._buffers is None or len(index) != self._batch:
            rows = self._fresh(index)
        else:
            rows = self._buffers.take()
            self._fill(index, rows)
        if self._given is None:
            return rows
        dtype, shape = self._given
        return rows.view(dtype).view(len(index), *shape)

    def _fill(self, index: Tensor, out: Tensor) -> None:
        if self._pool is None or len(self._pieces) == 1:
            self._select(index, out=out)
            return
        _run_on_all(self._pool, partial(_select, self._select, index, out, iter(self._pieces)))


def _selector(view: Tensor) -> Callable[..., Tensor]:
    """Return what copies rows `index` of a view into `out`."""
    if can_gather(view):
        return RowGather(view)
    return partial(torch.index_select, view, 0)


def gather_into(
    view: Tensor, index: Tensor, out: Tensor, places: Tensor | None = None, pool: Pool | None = None
) -> None:
    """Copy rows `index` of a view on the host into `out`, by all threads of a pool if they are many bytes.

    Args:
        places: Rows of `out` that they go to, no row twice; None: all of it, in order.
    """
    size, row_bytes = len(index), out.itemsize * prod(out.shape[1:])
    if row_bytes >= WORDS_FROM_BYTES and not (places is None and can_gather(view)):
        from_words, to_words = _words(view), _words(out)
        if from_words is not None and to_words is not None:
            view, out = from_words, to_words
    if size * row_bytes < THREADS_FROM_BYTES:
        pool = None
    parts = 1 if pool is None else min(size, PIECES_PER_THREAD * (1 + pool.size))
    # A list's iterator may be shared by threads; neither a generator nor `pairwise` may.
    pieces = iter([*pairwise(size * part // parts for part in range(parts + 1))])
    if places is None:
        _run_on_all(pool, partial(_select, _selector(view), index, out, pieces))
    else:
        _run_on_all(pool, partial(_scatter, view, index, out, pieces, places))


def _run_on_all(pool: Pool | None, work: Callable[[], None]) -> None:
    """Do work in this thread and in all of a pool, which share what is to be done."""
    tickets: list[Ticket[None]] = []
    try:
        if pool is not None:
            with suppress(ResourceError):  # no thread can be started: fewer share the work
                tickets.extend(pool.submit(work) for _ in range(pool.size))
        work()
    finally:  # they write into memory that is used again
        for ticket in tickets:
            ticket.wait(GATHER_TIMEOUT_S)
    for ticket in tickets:
        ticket.result(0.0, "a gather from memory")


def _words(view: Tensor) -> Tensor | None:
    """Return the same rows as `(n, words)`, without copying; None where they are not aligned words."""
    size = view.itemsize * prod(view.shape[1:])
    begins = (size, view.itemsize * view.storage_offset(), view.data_ptr())
    if view.device.type != "cpu" or not view.is_contiguous() or any(at % WORD.itemsize for at in begins):
        return None
    return view.flatten(1).view(WORD)


def _select(
    select: Callable[..., Tensor], index: Tensor, out: Tensor, pieces: Iterator[tuple[int, int]]
) -> None:
    """Gather pieces until none is left; threads share the iterator, so a slow one does less."""
    for begin, end in pieces:
        select(index[begin:end], out=out[begin:end])


def _scatter(
    view: Tensor, index: Tensor, out: Tensor, pieces: Iterator[tuple[int, int]], places: Tensor
) -> None:
    """Do the same, to other rows of `out`."""
    for begin, end in pieces:
        out.index_copy_(0, places[begin:end], torch.index_select(view, 0, index[begin:end]))


LONG_ROWS = 1 << 10
"""Rows of a record from which on it is copied as one piece, on average over a batch. An image of varying
size has a row for each number, and an index of as many entries would cost more than the copy."""


class RaggedGather:
    """Gathers whole records of varying length: a list of tensors that share one fresh allocation."""

    def __init__(self, view: Tensor, converter: RowConverter | None) -> None:
        """`converter` converts what was gathered."""
        self._view = view
        self._converter = converter

    def __call__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[Tensor]:
        """Return the steps `starts .. starts + lengths` of each record."""
        ends = np.cumsum(lengths)
        if ends[-1] >= LONG_ROWS * len(ends):
            pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
            rows = torch.cat([self._view.narrow(0, start, length) for start, length in pairs])
            return list(_cut(rows if self._converter is None else self._converter(rows), lengths.tolist()))
        steps = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
        rows = torch.index_select(self._view, 0, to_device(steps, self._view.device))
        return list(_cut(rows if self._converter is None else self._converter(rows), lengths.tolist()))


class ChosenGather:
    """Gathers some rows of each record, `(n, count)` of them, by a gather of single rows."""

    def __init__(
        self, gather: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """`shape`: of one example; `dtype`: of what `gather` returns."""
        self._gather, self._shape, self._dtype = gather, shape, dtype

    def __call__(self, index: Tensor) -> Tensor:
        """Return `(len(index), *shape)`."""
        if not index.shape[1]:  # no record has a row
            return torch.zeros((len(index), *self._shape), dtype=self._dtype, device=index.device)
        return self._gather(index.reshape(-1)).view(len(index), *self._shape)


class MemoryBatches:
    """Makes batches out of one memory that holds everything."""

    def __init__(
        self,
        memory: Memory,
        schema: Schema,
        outputs: tuple[OutputSpec, ...],
        batch: int,
        *,
        static: bool,
        threads: int,
    ) -> None:
        pool = Pool(threads - 1, "stoker-gather") if threads > 1 else None
        self._outputs = outputs
        self._batch = batch
        self._static = static
        self._index_out: Tensor | None = None
        self._gathers: list[Any] = []
        self._per_call: list[int] = []
        """Batches that one call gathers, by position: bits and scales of a quantized field share one name."""
        for output in outputs:
            view = view_for(output, schema[output.field], memory.sources[output.field])
            alone = static or output.ragged or output.taken not in (None, Taken.ROWS)
            self._per_call.append(1 if alone else _per_call(output.example_bytes * batch, memory.tier))
            if output.ragged:
                self._gathers.append(RaggedGather(view, make_converter(output, view.device)))
            elif output.taken is None:
                self._gathers.append(_make_gather(view, output, batch, pool, static=static))
            elif output.taken is Taken.ROWS:
                rows = batch * (output.shape[0] if len(output.shape) == view.dim() else 1)
                of_rows = replace(output, shape=tuple(view.shape[1:]))
                gather = _make_gather(view, of_rows, rows, pool, static=static)
                made = output.dtype if output.conversion is None else output.conversion.dtype
                self._gathers.append(ChosenGather(gather, output.shape, made))
            else:
                self._gathers.append(
                    allocate((batch,), output.dtype, view.device).copy_ if static else torch.clone
                )

    def columns(
        self, rows: Mapping[str, Any], index: Tensor, batch: int, views: Mapping[str, ImageViews]
    ) -> list[Iterable[Any]]:
        """Return consecutive batches that only need to be asked for, `STRIP_BATCHES` of them at most.

        They come as columns: per output and then for `index` the tensors of the batches, large ones made as
        they are asked for.

        Args:
            rows: Per index kind the rows of consecutive batches, one after another; for ragged outputs
                `starts:<field>` and `lengths:<field>`, numpy. A field of sizes that stays on the host is
                `shapes:<field>`, numpy.
            index: What the batches hand out as `index`, as long.
            batch: Examples per batch.
            views: By output, of all examples, how they are cropped and mirrored on the way.
        """
        cuts: dict[str, tuple[Tensor, ...]] = {}
        columns: list[Iterable[Any]] = []
        for output, gather, count in zip(self._outputs, self._gathers, self._per_call, strict=True):
            if output.ragged:
                starts, lengths = (rows[f"{kind}:{output.field}"] for kind in ("starts", "lengths"))
                bounds = range(batch, len(starts), batch)
                columns.append(map(gather, np.split(starts, bounds), np.split(lengths, bounds)))
                continue
            if (shapes := rows.get(f"shapes:{output.field}")) is not None:
                columns.append(_cut(torch.from_numpy(shapes), batch))
                continue
            moved = views.get(output.name, ())
            if count > 1 and not moved:
                calls = map(gather, _cut(rows[output.index], count * batch))
                columns.append(chain.from_iterable(map(_cut, calls, repeat(batch))))
            else:
                if output.index not in cuts:
                    cuts[output.index] = _cut(rows[output.index], batch)
                of_each = [repeat(None) if v is None else _cut(v, batch) for v in moved]
                each = [zip(*of_each, strict=False)] if moved else []
                columns.append(map(gather, cuts[output.index], *each))
        columns.append(self._index(_cut(index, batch)))
        return columns

    def _index(self, cut: tuple[Tensor, ...]) -> Iterable[Tensor]:
        return map(self._to_fixed_index, cut) if self._static else cut

    def _to_fixed_index(self, index: Tensor) -> Tensor:
        if self._index_out is None:
            self._index_out = allocate(index.shape, index.dtype, index.device)
        return self._index_out.copy_(index)


def _make_gather(view: Tensor, output: OutputSpec, batch: int, pool: Pool | None, *, static: bool) -> Any:
    """Return what copies rows of `view` into batches of so many rows, as the output is handed out."""
    if output.conversion is not None:
        return make_converting_gather(view, output.conversion, batch, pool, static=static)
    if static:
        fixed = allocate((batch, *output.shape), output.dtype, view.device)
        return partial(_selector(view), out=fixed)
    return Gather(view, output, batch, pool).direct()


def _per_call(batch_bytes: int, tier: str) -> int:
    if tier == "device":
        return max(1, min(STRIP_BATCHES, GPU_CALL_BYTES // max(1, batch_bytes)))
    return STRIP_BATCHES if batch_bytes <= STRIP_OUTPUT_BYTES else 1


def _cut(rows: Tensor, sizes: int | list[int]) -> tuple[Tensor, ...]:
    return cast("Any", rows).split(sizes)


def view_for(output: OutputSpec, field: Field, source: Tensor) -> Tensor:
    """Return the tensor whose axis 0 the output's index counts, `(n, *output.shape)`, without copying.

    Args:
        source: `Memory.sources` of the field.
    """
    if output.index == RECORD:
        return source if output.ragged else source.reshape(len(source), *output.shape)
    steps = source if field.ragged else source.reshape(-1, *field.shape[1:])
    if output.taken is not None:
        return steps
    if output.count is None:
        return steps[output.lag :].reshape(-1, *output.shape)
    length = len(steps) - output.lags[-1]
    stride = steps.stride()
    return steps.as_strided(
        (length, *output.shape),
        (stride[0], output.every * stride[0], *stride[1:]),
        steps.storage_offset() + output.lag * stride[0],
    )
