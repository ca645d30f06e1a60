"""Floats in one byte each: int8 or float8 times a scale that a block of the last axis shares.

A block of 128 elements (the last one of an axis may be shorter) is divided by its scale, `max|x|` over the
largest number of the dtype, and rounded to nearest, ties to even. Decoding is one float32 product, rounded
once, so it gives the same bits on every device and for any shape of a batch. The scales are float32 and lie
in a column of their own, `<field>.scale`, with digest and block sums like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import RecordError, arg
from stoker.schema import SCALE_BLOCK, SCALE_SUFFIX, Field, scale_field
from stoker.store.convert import (
    CHUNK,
    FieldScratch,
    StoredRows,
    from_array,
    measure,
    relative,
    store_rows,
)
from stoker.store.layout import axis_length

if TYPE_CHECKING:
    from stoker.store.shard_read import Shard

LARGEST: Mapping[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number of each dtype, which a block's largest value becomes."""
ROUNDING = 1 + 1e-6
"""Above what rounding a scale to float32 costs, where it is not denormal."""


def store_columns(
    name: str,
    field: Field,
    values: Tensor | Sequence[Tensor],
    numbers: Sequence[int],
    scratch: FieldScratch | None = None,
) -> dict[str, StoredRows]:
    """The columns of one field: itself, and its scales where it is packed; see `store_rows`.

    Raises:
        RecordError: A value is not finite or beyond what the stored dtype holds; names sample and field.
    """
    if not field.packed:
        return {name: store_rows(name, field, values, numbers, scratch)}
    scales = scale_field(field)
    if isinstance(values, Tensor):
        bits, steps, worst, rms = _pack(name, field, values.detach(), numbers, scratch or FieldScratch())
        lengths = [[axis_length(column)] * len(values) for column in (field, scales)]
    else:
        # An empty first piece, for a call without records.
        nothing = _pack(
            name,
            field,
            torch.empty((0, 0, *field.shape[1:]), dtype=torch.float32, device="cpu"),
            [],
            FieldScratch(),
        )
        pieces = [nothing] + [
            _pack(name, field, value.detach()[None], [number], FieldScratch())
            for value, number in zip(values, numbers, strict=True)
        ]
        bits, steps = torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])
        worst, rms = (np.concatenate([piece[i] for piece in pieces]) for i in (2, 3))
        lengths = [[len(value) for value in values]] * 2
    none = np.zeros(len(worst))
    return {
        name: _rows(field, bits, lengths[0], worst, rms),
        name + SCALE_SUFFIX: _rows(scales, steps, lengths[1], none, none),
    }


def _rows(
    field: Field,
    values: Tensor,
    lengths: Sequence[int],
    worst: NDArray[np.float64],
    rms: NDArray[np.float64],
) -> StoredRows:
    step = field.row_bytes // field.itemsize
    starts = np.cumsum([0, *(length * step for length in lengths)]).tolist()
    return StoredRows(values=values, starts=starts, lengths=lengths, max_error=worst, rms_error=rms)


def _pack(
    name: str, field: Field, values: Tensor, numbers: Sequence[int], scratch: FieldScratch
) -> tuple[Tensor, Tensor, NDArray[np.float64], NDArray[np.float64]]:
    """Records `(n, *shape)` as bits and scales, both one-dimensional, and each record's two errors."""
    count, width = len(values), field.shape[-1]
    lines = values.numel() // max(1, count * width)
    lined = values.reshape(count, lines, width)
    bits = scratch.stored.take((count, lines, width), torch.int8)
    scales = scratch.scales.take((count, lines, scale_field(field).shape[-1]), torch.float32)
    figures = np.zeros((4, count))
    high, wide = max(1, CHUNK // max(1, lines * width)), max(1, CHUNK // max(1, width))
    for top in range(0, count, high):
        for left in range(0, lines if width else 0, wide):
            block = (slice(top, top + high), slice(left, left + wide))
            exact, own = lined[block], numbers[block[0]]
            _check_finite(name, field, exact, own)
            _pack_block(exact.to(torch.float32), bits[block], scales[block], field.dtype)
            decoded = unpack(bits[block], scales[block], field.dtype)
            found = measure(name, exact.flatten(1), decoded.flatten(1), own, scratch.error)
            np.maximum(figures[:2, block[0]], found[:2], out=figures[:2, block[0]])
            figures[2:, block[0]] += found[2:]
    return bits.reshape(-1), scales.reshape(-1), *relative(figures)


def _check_finite(name: str, field: Field, values: Tensor, numbers: Sequence[int]) -> None:
    """Refuse what no scale brings into range."""
    rows = torch.isfinite(values.to(torch.float32)).flatten(1).all(1)
    if bool(rows.all()):
        return
    row = int((~rows).nonzero()[0, 0])
    found = values[row][~torch.isfinite(values[row].to(torch.float32))][0]
    raise RecordError(
        f"sample {numbers[row]}: field {name!r} holds {float(found):.4g}, which {field.dtype} with scales "
        f"cannot hold. Store it as bfloat16 or float32, or leave the sample out ({arg('nan', 'reject')})"
    )


def _pack_block(exact: Tensor, bits: Tensor, scales: Tensor, dtype: str) -> None:
    """Fill `bits` `(..., width)` and `scales` `(..., blocks)` from float32 values."""
    most = LARGEST[dtype]
    for values, out, own in zip(_blocks(exact), _blocks(bits), _split(scales, exact.shape[-1]), strict=True):
        step = _steps(values.abs().amax(-1), most)
        own.copy_(step)
        ratio = values / torch.where(step > 0, step, 1.0)[..., None]
        if dtype == "int8":
            out.copy_(ratio.round_().clamp_(-most, most))
        else:
            out.copy_(ratio.clamp_(-most, most).to(torch.float8_e4m3fn).view(torch.int8))


def _steps(largest: Tensor, most: float) -> Tensor:
    """Scales of blocks whose largest values are given; zero for a block of zeros."""
    step = (largest.double() / most).float()
    # Denormal scales are coarse, and one rounded down would cut the largest values off.
    short = largest.double() > most * step.double() * ROUNDING
    step = torch.where(short, torch.nextafter(step, torch.full_like(step, torch.inf)), step)
    # One rounded up, beside the largest float32, would decode to infinity.
    return torch.where(torch.isinf(step * most), torch.nextafter(step, torch.zeros_like(step)), step)


def unpack(bits: Tensor, scales: Tensor, dtype: str, out: Tensor | None = None) -> Tensor:
    """The floats that packed values stand for.

    Args:
        bits: `(..., width)`, int8 or, for float8, its bits in int8.
        scales: `(..., blocks)`, float32.
        dtype: One of `schema.PACKED_DTYPES`.
        out: Float32, of the shape of `bits`, contiguous; None: a fresh tensor.
    """
    if out is None:
        out = torch.empty(bits.shape, dtype=torch.float32, device=bits.device)
    out.copy_(bits if dtype == "int8" else bits.view(torch.float8_e4m3fn))
    for values, own in zip(_blocks(out), _split(scales, bits.shape[-1]), strict=True):
        values.mul_(own[..., None])
    return out


def unpack_rows(field: Field, bits: Tensor, scales: Tensor) -> Tensor:
    """The same for flat columns of any number of steps; flat."""
    width = field.shape[-1]
    if not bits.numel():
        return torch.empty(0, dtype=torch.float32, device="cpu")
    lines = bits.view(torch.int8).view(-1, width)
    return unpack(lines, scales.view(len(lines), -1), field.dtype).view(-1)


def read_field(shard: Shard, name: str, field: Field, row: int) -> Tensor:
    """One record's field, verified and decoded, in memory of its own."""
    values = from_array(shard.read(name, row), field.dtype)
    if not field.packed:
        return values
    scales: Any = shard.read(name + SCALE_SUFFIX, row)
    return unpack(values.view(torch.int8), from_array(scales, "float32"), field.dtype)


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Views `(..., blocks, size)` of the whole blocks of the last axis, and of the short one at its end."""
    width = values.shape[-1]
    whole = width // SCALE_BLOCK
    if whole:
        yield values[..., : whole * SCALE_BLOCK].unflatten(-1, (whole, SCALE_BLOCK))
    if width % SCALE_BLOCK:
        yield values[..., None, whole * SCALE_BLOCK :]


def _split(scales: Tensor, width: int) -> Iterator[Tensor]:
    """The scales of the pieces that `_blocks` gives."""
    whole = width // SCALE_BLOCK
    if whole:
        yield scales[..., :whole]
    if width % SCALE_BLOCK:
        yield scales[..., whole:]
