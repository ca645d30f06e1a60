"""Batches from memory, at the speed of `index_select`.

The loop over batches runs in C as far as possible: each output is a `map` of its gather over the slices of
an index that was prepared for many batches, and a `zip` over the outputs makes a batch. Small outputs are
gathered for many batches in one call; large ones reuse buffers and are cut over threads by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise, repeat
from math import prod
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.buffers import REUSE_FROM_BYTES, Buffers, lasting, sent
from stoker.loader.kernels.choose import converting, twin_for
from stoker.loader.kernels.twin import Twin, Views
from stoker.loader.memory import Memory
from stoker.loader.outputs import Output, view_for
from stoker.runtime.threads import Pool
from stoker.schema import Schema
from stoker.units import KIB, MIB

STRIP_BATCHES = 128
"""Batches whose slices are made in one go."""
STRIP_OUTPUT_BYTES = 16 * KIB
"""Outputs up to this size per batch are gathered on a CPU for a strip at once."""
GPU_CALL_BYTES = 8 * MIB
"""On a GPU, one call gathers up to this many bytes, because starting a call takes an estimated 10 us of the
host's time. A batch that is kept keeps the others of its call in memory.

Source: `index_select` of torch 2.8 and later, by counting its operations; not yet measured on a GPU.
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
GATHER_DEADLINE_S = 300.0
"""Seconds that one thread may take for its part of a batch in memory."""


class Gather:
    """Copies rows of one view into batches; `gather(index)` gives `(len(index), *shape)`."""

    def __init__(self, view: Tensor, output: Output, batch: int, pool: Pool | None) -> None:
        """`pool` gathers beside the caller's thread, None without; `batch` is the size of a full batch."""
        words = _words(view) if output.example_bytes >= WORDS_FROM_BYTES else None
        self._view = view if words is None else words
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
        """The quickest equivalent of this gather."""
        if self._buffers is None and self._given is None:
            return partial(torch.index_select, self._view, 0)
        return self

    def __call__(self, index: Tensor) -> Tensor:
        """Gather one batch; a short one is always fresh."""
        if self._buffers is None or len(index) != self._batch:
            rows = torch.index_select(self._view, 0, index)
        else:
            rows = self._buffers.take()
            self._fill(index, rows)
        if self._given is None:
            return rows
        dtype, shape = self._given
        return rows.view(dtype).view(len(index), *shape)

    def _fill(self, index: Tensor, out: Tensor) -> None:
        if self._pool is None or len(self._pieces) == 1:
            torch.index_select(self._view, 0, index, out=out)
            return
        pieces = iter(self._pieces)
        work = partial(_select, self._view, index, out, pieces)
        tickets = [self._pool.submit(work) for _ in range(self._pool.size)]
        work()
        for ticket in tickets:
            ticket.result(GATHER_DEADLINE_S, "a gather from memory")


def _words(view: Tensor) -> Tensor | None:
    """The same rows as `(n, words)`, without copying; None where they are no whole, aligned words."""
    size = view.itemsize * prod(view.shape[1:])
    begins = (size, view.itemsize * view.storage_offset(), view.data_ptr())
    if view.device.type != "cpu" or not view.is_contiguous() or any(at % WORD.itemsize for at in begins):
        return None
    return view.flatten(1).view(WORD)


def _select(view: Tensor, index: Tensor, out: Tensor, pieces: Iterator[tuple[int, int]]) -> None:
    """Gather pieces until none is left; threads share the iterator, so a slow one does less."""
    for begin, end in pieces:
        torch.index_select(view, 0, index[begin:end], out=out[begin:end])


class FixedGather:
    """Gathers into one and the same tensor, for `static=True`."""

    def __init__(self, view: Tensor, output: Output, batch: int) -> None:
        self._view = view
        self._out = lasting((batch, *output.shape), output.dtype, view.device)

    def __call__(self, index: Tensor) -> Tensor:
        """Gather one batch over the previous one."""
        return torch.index_select(self._view, 0, index, out=self._out)


class RaggedGather:
    """Gathers whole records of varying length: a list of tensors that share one fresh allocation."""

    def __init__(self, view: Tensor, twin: Twin | None) -> None:
        """`twin` converts what was gathered."""
        self._view = view
        self._twin = twin

    def __call__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[Tensor]:
        """Steps `starts .. starts + lengths` of each record."""
        ends = np.cumsum(lengths)
        steps = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
        rows = torch.index_select(self._view, 0, sent(steps, self._view.device))
        return list(_cut(rows if self._twin is None else self._twin(rows), lengths.tolist()))


class MemoryBatches:
    """Makes batches out of one memory that holds everything."""

    def __init__(
        self,
        memory: Memory,
        schema: Schema,
        outputs: tuple[Output, ...],
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
        """Batches that one call gathers, by position: bits and scales of a packed field share one name."""
        for output in outputs:
            view = view_for(output, schema[output.field], memory.sources[output.field])
            own = static or output.ragged
            self._per_call.append(1 if own else _per_call(output.example_bytes * batch, memory.tier))
            if output.ragged:
                self._gathers.append(RaggedGather(view, twin_for(output, view.device)))
            elif output.fused is not None:
                self._gathers.append(converting(view, output.fused, batch, pool, static=static))
            elif static:
                self._gathers.append(FixedGather(view, output, batch))
            else:
                self._gathers.append(Gather(view, output, batch, pool).direct())

    def strips(
        self, rows: Mapping[str, Any], index: Tensor, batch: int, views: Mapping[str, Views]
    ) -> Iterator[list[Iterable[Any]]]:
        """Consecutive batches, `STRIP_BATCHES` at a time, that only need to be asked for.

        Yields columns: per output and then for `index` the tensors of the strip's batches, large ones made as
        they are asked for.

        Args:
            rows: Per index kind the rows of consecutive batches, one after another; for ragged outputs
                `starts:<field>` and `lengths:<field>`, numpy.
            index: What the batches hand out as `index`, as long.
            batch: Examples per batch.
            views: By output, of all examples, how they are cropped and mirrored on the way.
        """
        for begin in range(0, len(index), STRIP_BATCHES * batch):
            own = slice(begin, begin + STRIP_BATCHES * batch)
            cuts: dict[str, tuple[Tensor, ...]] = {}
            columns: list[Iterable[Any]] = []
            for output, gather, count in zip(self._outputs, self._gathers, self._per_call, strict=True):
                if output.ragged:
                    starts, lengths = (rows[f"{kind}:{output.field}"][own] for kind in ("starts", "lengths"))
                    bounds = range(batch, len(starts), batch)
                    columns.append(map(gather, np.split(starts, bounds), np.split(lengths, bounds)))
                    continue
                moved = [None if v is None else v[own] for v in views.get(output.name, ())]
                if count > 1 and not moved:
                    calls = map(gather, _cut(rows[output.index][own], count * batch))
                    columns.append(chain.from_iterable(map(_cut, calls, repeat(batch))))
                else:
                    if output.index not in cuts:
                        cuts[output.index] = _cut(rows[output.index][own], batch)
                    of_each = [repeat(None) if v is None else _cut(v, batch) for v in moved]
                    each = [zip(*of_each, strict=False)] if moved else []
                    columns.append(map(gather, cuts[output.index], *each))
            columns.append(self._index(_cut(index[own], batch)))
            yield columns

    def _index(self, cut: tuple[Tensor, ...]) -> Iterable[Tensor]:
        return map(self._to_fixed_index, cut) if self._static else cut

    def _to_fixed_index(self, index: Tensor) -> Tensor:
        if self._index_out is None:
            self._index_out = lasting(index.shape, index.dtype, index.device)
        return self._index_out.copy_(index)


def _per_call(batch_bytes: int, tier: str) -> int:
    if tier == "device":
        return max(1, min(STRIP_BATCHES, GPU_CALL_BYTES // max(1, batch_bytes)))
    return STRIP_BATCHES if batch_bytes <= STRIP_OUTPUT_BYTES else 1


def _cut(rows: Tensor, sizes: int | list[int]) -> tuple[Tensor, ...]:
    return cast(Any, rows).split(sizes)
