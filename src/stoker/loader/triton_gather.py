# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false
# Triton is optional and has no types; what its compiler reads are not Python functions.
"""Provide one kernel that gathers rows by index and converts them on the way, by the rule of `Conversion`.

A program copies `tiles` runs of `block` values of one row. Everything but the rows is known when the kernel
is compiled, once per output, so what an output does not need costs nothing. Product and sum must not be
contracted (`enable_fp_fusion=False`): the values are those of `gather.RowConverter`, to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from stoker.loader.gather import ImageViews, OutputMemory
    from stoker.loader.outputs import Conversion

LONGEST_BLOCK = 2048
"""Values that one program has in flight."""
MOST_TILES = 4
"""Runs of them that it copies one after another, for rows that are long enough."""
VALUES_PER_WARP = 256


# Batches are slices of one long index: a variant for each alignment would be compiled amid training.
@triton.jit(do_not_specialize_on_alignment=["index", "begins", "flips"])
def _gather(  # noqa: PLR0913, PLR0917 - a kernel has no dataclasses
    source,
    index,
    out,
    scale,
    shift,
    begins,
    flips,
    row_stride,
    step_stride,
    values: tl.constexpr,
    step: tl.constexpr,
    channels: tl.constexpr,
    inner: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    kept_h: tl.constexpr,
    kept_w: tl.constexpr,
    moved: tl.constexpr,
    mirrored: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row).to(tl.int64)
    top = 0
    left = 0
    if moved:
        top = tl.load(begins + 2 * row).to(tl.int32)
        left = tl.load(begins + 2 * row + 1).to(tl.int32)
    flip = 0
    if mirrored:
        flip = tl.load(flips + row).to(tl.int32)
    for tile in range(tiles):
        first = (tl.program_id(1) * tiles + tile) * block
        value = first + tl.arange(0, block)
        inside = value < values
        stored = value
        if moved or mirrored:
            column = value % kept_w
            line = value // kept_w % kept_h
            column = column + flip * (kept_w - 1 - 2 * column)
            stored = value // (kept_w * kept_h) * (height * width) + (line + top) * width + column + left
        at = stored // step
        rest = stored - at * step
        x = tl.load(source + place * row_stride + at * step_stride + rest, mask=inside).to(tl.float32)
        if channels == 1:
            x = x * tl.load(scale) + tl.load(shift)
        elif channels > 1:
            if inner % block == 0 and not moved and not mirrored:  # one channel for the whole run
                channel = first // inner % channels
                x = x * tl.load(scale + channel) + tl.load(shift + channel)
            else:
                channel = stored // inner % channels
                x = x * tl.load(scale + channel, mask=inside) + tl.load(shift + channel, mask=inside)
        tl.store(out + row * values + value, x.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """Sizes by which the kernel cuts the rows of one output."""

    block: int
    tiles: int
    runs: int
    """Programs for each row."""
    warps: int


def shape_for(values: int, inner: int, channels: int) -> KernelShape:
    """Return runs as long as a program can have, of one channel each where channels are long enough.

    >>> shape_for(150_528, 50_176, 3)
    KernelShape(block=1024, tiles=4, runs=37, warps=4)
    >>> shape_for(512, 1, 0)
    KernelShape(block=512, tiles=1, runs=1, warps=2)
    """
    block = min(LONGEST_BLOCK, 1 << max(0, values - 1).bit_length())
    if channels > 1:
        while inner % block and block > VALUES_PER_WARP and inner >= VALUES_PER_WARP:
            block //= 2
    tiles = max(1, min(MOST_TILES, values // (4 * block)))
    return KernelShape(
        block=block,
        tiles=tiles,
        runs=-(-values // (block * tiles)),
        warps=max(1, min(8, block // VALUES_PER_WARP)),
    )


class TritonGather:
    """Gathers rows of one view and converts them in one launch."""

    def __init__(self, view: Tensor, conversion: Conversion, room: OutputMemory) -> None:
        """`room` gives the memory of batches; `view` and `conversion` are as for `ConvertingGather`."""
        stored = tuple(view.shape[1:])
        self._view = view.view(torch.uint8) if view.dtype == torch.bool else view
        self._room = room
        whole = len(view) == 0 or view[0].is_contiguous()
        self._strides = (view.stride(0), 0 if whole else view.stride(1))
        values = math.prod(self._room.shape[1:])
        self._shape = shape_for(values, conversion.inner, len(conversion.scale))
        table = [conversion.scale or (1.0,), conversion.shift or (0.0,)]
        numbers = torch.tensor(table, dtype=torch.float32, device=view.device)
        self._scale, self._shift = numbers.unbind(0)
        image = stored[-2:] if conversion.crop is not None or conversion.flip else (1, 1)
        self._constants = {
            "values": values,
            "step": max(1, math.prod(stored if whole else stored[1:])),
            "channels": len(conversion.scale),
            "inner": conversion.inner,
            "height": image[0],
            "width": image[1],
            "kept_h": (conversion.crop or image)[0],
            "kept_w": (conversion.crop or image)[1],
            "block": self._shape.block,
            "tiles": self._shape.tiles,
            "num_warps": self._shape.warps,
            "enable_fp_fusion": False,
        }
        self._middle: Tensor | None = None
        if conversion.crop is not None:
            middle = [(size - kept) // 2 for size, kept in zip(image, conversion.crop, strict=True)]
            self._middle = torch.tensor(middle, device=view.device)

    def __call__(self, index: Tensor, views: ImageViews = (None, None)) -> Tensor:
        """Return rows `index`, converted, `(len(index), *shape)`; `views` crop and mirror them."""
        out = self._room.take(len(index))
        if not out.numel():
            return out
        begins, flips = views
        if begins is None and self._middle is not None:
            begins = self._middle.expand(len(index), 2)
        with torch.cuda.device_of(self._view):
            _gather[(len(index), self._shape.runs)](
                self._view,
                index,
                out,
                self._scale,
                self._shift,
                index if begins is None else begins.contiguous(),
                index if flips is None else flips.view(torch.uint8),
                *self._strides,
                moved=begins is not None,
                mirrored=flips is not None,
                **self._constants,
            )
        return out
