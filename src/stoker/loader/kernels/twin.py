"""Gather and convert in plain torch: what every kernel must agree with, and what a CPU runs.

On a CPU a batch is converted piece by piece, each small enough to stay in the core's cache between the passes
(to float32, times scale, plus shift, to the batch's dtype): whole-batch passes go to memory and back each
time. Pieces are shared out to threads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from stoker.loader.buffers import REUSE_FROM_BYTES, Buffers, lasting
from stoker.loader.fused import Fused
from stoker.runtime.threads import Pool
from stoker.units import KIB, MIB

PIECE_BYTES = 256 * KIB
"""Float32 values of the rows that are converted together, at least one row: below the caches of the second
level, above what makes the calls themselves count.

Source: `benchmarks/serve_memory.py`, W3f, 2 cores.
"""
NARROW_PIECE_BYTES = 2 * MIB
"""The same for outputs narrower than float32. All passes but the last are over scratch, which may fill a part
of the third level's cache, and with fewer calls threads wait less for the interpreter's lock.
"""
THREADS_FROM_BYTES = 4 * MIB
"""Outputs from this size on are converted by several threads."""
CONVERT_DEADLINE_S = 300.0
"""Seconds that one thread may take for its part of a batch in memory."""
SHORT_RUN = 64
"""Channels that change after fewer values than this get a scale per value: short runs crawl."""

Views: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""Where crops begin, `(n, 2)` int64 rows and columns, and which examples are mirrored, `(n,)` bool."""


class Twin:
    """Converts rows of one output that were gathered, on the device they are on."""

    def __init__(self, fused: Fused, shape: tuple[int, ...], device: torch.device) -> None:
        """`shape` is that of one stored row."""
        self._fused = fused
        self._stored = shape
        self.shape = shape if fused.crop is None else (*shape[:-2], *fused.crop)
        """Shape of one row handed out."""
        self._lines: tuple[int, ...] = ()
        self._scale = self._shift = torch.empty(0, device="cpu")
        if fused.scale:
            self._scale, self._shift = self._by_channel(device)

    def _by_channel(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scale and shift in the shape that a row's values are seen in, which `_lines` keeps."""
        fused, channels, values = self._fused, len(self._fused.scale), math.prod(self.shape)
        inner = fused.inner
        if fused.crop is not None:
            inner = inner // math.prod(self._stored[-2:]) * math.prod(fused.crop)
        pair = torch.tensor([fused.scale, fused.shift], dtype=torch.float32, device=device)
        if channels == 1:
            self._lines = (values,)
            return pair[0], pair[1]
        if inner >= SHORT_RUN:
            self._lines = (values // (channels * inner), channels, inner)
            return pair[0, :, None], pair[1, :, None]
        self._lines = (values,)
        each = pair.repeat_interleave(inner, dim=1).repeat(1, values // (channels * inner))
        return each[0], each[1]

    def __call__(self, rows: Tensor, views: Views = (None, None)) -> Tensor:
        """Rows `(n, *stored shape)` as they are handed out, fresh: `(n, *self.shape)`."""
        if self._fused.crop is not None or self._fused.flip:
            rows = cut(rows, self._fused.crop, *views)
        if not self._fused.scale:
            return rows.to(self._fused.dtype)
        out = torch.empty((len(rows), *self.shape), dtype=self._fused.dtype, device=rows.device)
        self.into(rows, out, torch.empty(self.work_shape(len(rows)), dtype=torch.float32, device=rows.device))
        return out

    def work_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the float32 values that `into` needs room for beside its output; 0 where it needs none."""
        return (rows if self._fused.scale and self._fused.dtype != torch.float32 else 0, *self.shape)

    def into(self, rows: Tensor, out: Tensor, work: Tensor) -> None:
        """Convert `rows`, crops and mirrors done, into `out`; `work` has the shape that `work_shape` says."""
        if not self._fused.scale:
            out.copy_(rows)
            return
        values = out if not len(work) else work if len(work) == len(rows) else work[: len(rows)]
        self.normalise_(values.copy_(rows))
        if len(work):
            out.copy_(values)

    def lined(self, out: Tensor) -> tuple[Tensor, ...]:
        """The rows of a float32 output as `scaled_` takes them."""
        return out.view(len(out), *self._lines).unbind(0) if self._fused.scale else out.unbind(0)

    def scaled_(self, row: Tensor) -> None:
        """Normalise one of `lined` where it is: the least there is to do for a row, call by call."""
        if self._fused.scale:
            row.mul_(self._scale).add_(self._shift)

    def normalise_(self, values: Tensor) -> Tensor:
        """Float32 rows, contiguous, normalised where they are; any shape of a row with as many values."""
        if self._fused.scale:
            values.view(len(values), *self._lines).mul_(self._scale).add_(self._shift)
        return values


class TwinGather:
    """Gathers rows of one view and converts them: on a CPU piece by piece, elsewhere batch by batch."""

    def __init__(
        self,
        view: Tensor,
        fused: Fused,
        batch: int,
        *,
        pool: Pool | None = None,
        static: bool = False,
    ) -> None:
        """`batch` is the size of a full batch.

        Args:
            view: Rows as stored.
            fused: What is done to them.
            pool: Converts large batches beside the caller's thread; None: without.
            static: Every full batch is written over the last.
        """
        self._view = view
        self._fused = fused
        self._moved = fused.crop is not None or fused.flip
        self._twin = Twin(fused, tuple(view.shape[1:]), view.device)
        self._room = Room((batch, *self._twin.shape), fused.dtype, view.device, static=static)
        self._pool = pool if self._room.bytes >= THREADS_FROM_BYTES else None
        narrow = bool(self._twin.work_shape(1)[0])
        most = NARROW_PIECE_BYTES if narrow else PIECE_BYTES
        self._rows = max(1, most // max(1, 4 * math.prod(view.shape[1:])))
        self._in_place = self._rows == 1 and not self._moved and not narrow
        self._scratch: deque[tuple[Tensor, Tensor]] = deque()

    def __call__(self, index: Tensor, views: Views = (None, None)) -> Tensor:
        """Rows `index` of the view, converted: `(len(index), *shape)`; `views` crop and mirror them."""
        if self._view.device.type != "cpu":
            rows = torch.index_select(self._view, 0, index)
            return self._room.fixed(self._twin(rows, views))
        out = self._room.take(len(index))
        if self._in_place:
            # Large enough to be read where they lie. What rows take is prepared for all of them before, since
            # threads that hold the interpreter's lock wait for each other longer than they work.
            rows = [self._view[number] for number in index.tolist()]
            work = partial(self._convert_rows, zip(rows, out.unbind(0), self._twin.lined(out), strict=True))
        else:
            work = partial(self._convert, index, views, out, iter(range(0, len(index), self._rows)))
        tickets = [] if self._pool is None else [self._pool.submit(work) for _ in range(self._pool.size)]
        work()
        for ticket in tickets:
            ticket.result(CONVERT_DEADLINE_S, "a gather from memory")
        return out

    def _convert_rows(self, rows: Iterator[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Convert rows until none is left; threads share the iterator, so a slow one does less."""
        for row, out, lined in rows:
            out.copy_(row)
            self._twin.scaled_(lined)

    def _convert(self, index: Tensor, views: Views, out: Tensor, pieces: Iterator[int]) -> None:
        """The same with pieces of the batch."""
        rows, work = scratch = self._take_scratch()
        for begin in pieces:
            end = min(begin + self._rows, len(index))
            raw = torch.index_select(self._view, 0, index[begin:end], out=rows[: end - begin])
            if self._moved:
                own = [None if view is None else view[begin:end] for view in views]
                raw = cut(raw, self._fused.crop, *own)
            self._twin.into(raw, out[begin:end], work)
        self._scratch.append(scratch)

    def _take_scratch(self) -> tuple[Tensor, Tensor]:
        """Room for the rows of a piece as stored, and as float32."""
        try:
            return self._scratch.pop()
        except IndexError:
            return self._make_scratch()

    def _make_scratch(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return (
                self._view.new_empty((self._rows, *self._view.shape[1:])),
                torch.empty(self._twin.work_shape(self._rows), dtype=torch.float32, device="cpu"),
            )


class Room:
    """Where batches of one output go: one place for ever, memory nobody refers to any more, or fresh."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, static: bool
    ) -> None:
        self.shape, self._dtype, self._device = shape, dtype, device
        self.bytes = math.prod(shape) * dtype.itemsize
        """Of a full batch."""
        self._fixed = lasting(shape, dtype, device) if static else None
        reused = self.bytes >= REUSE_FROM_BYTES and device.type == "cpu" and not static
        self._buffers = Buffers(shape, dtype) if reused else None

    def take(self, count: int) -> Tensor:
        """A tensor for `count` examples, content undefined; only that of a full batch is not fresh."""
        if count == self.shape[0]:
            if self._fixed is not None:
                return self._fixed
            if self._buffers is not None:
                return self._buffers.take()
        if self._buffers is not None:  # threads write it, and have no part in the caller's inference mode
            return lasting((count, *self.shape[1:]), self._dtype, self._device)
        return torch.empty((count, *self.shape[1:]), dtype=self._dtype, device=self._device)

    def fixed(self, made: Tensor) -> Tensor:
        """The same values in the one place for ever, where there is one."""
        return made if self._fixed is None else self._fixed.copy_(made)


def cut(rows: Tensor, crop: tuple[int, int] | None, begins: Tensor | None, flips: Tensor | None) -> Tensor:
    """Crops and mirrors of images, `(n, ..., h, w)`, of `(n, ..., H, W)`.

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
