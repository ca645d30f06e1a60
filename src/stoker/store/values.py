"""From encoded tensors to stored ones, measuring what a narrower dtype costs.

Error of a record and field: `max|x - y| / max|x|` and `rms(x - y) / rms(x)`, over its finite values; 0 where
the record is all zeros. A finite value that overflows to infinity is an error, never a stored infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import RecordError, arg
from stoker.schema import (
    SCALE_BLOCK,
    SCALE_SUFFIX,
    Field,
    Schema,
    scale_field,
    schema_text,
)
from stoker.splitmix import keys_of
from stoker.store.format import axis_length, rows_per_block

if TYPE_CHECKING:
    from stoker.store.shard import Shard

CHUNK = 32_768
"""Elements converted at a time: stays in the core's cache, below the size at which torch starts threads."""
TINY = 1e-20
"""Sums of squares below this, and those that overflow float32, are taken in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Records of one field as they go into a column."""

    values: Tensor
    """Stored dtype, one-dimensional, contiguous, all records one after another."""
    starts: Sequence[int]
    """Element offset of each record, and the end: `n + 1` entries."""
    lengths: Sequence[int]
    """Steps along axis 0 of each record."""
    max_error: NDArray[np.float64]
    """`(n,)`, relative to the record's largest value."""
    rms_error: NDArray[np.float64]
    """`(n,)`, relative to the record's root mean square."""

    def bytes_of(self, begin: int, end: int) -> memoryview[Any]:
        """Return the bytes of records `begin:end`; a view of `values`, valid while that lives."""
        return view_bytes(self.tensor_of(begin, end))

    def tensor_of(self, begin: int, end: int) -> Tensor:
        """Return values of records `begin:end`, flat."""
        return self.values[self.starts[begin] : self.starts[end]]


def view_bytes(values: Tensor) -> memoryview[Any]:
    """Return the bytes of a contiguous CPU tensor of one dimension; a view, valid while the tensor lives."""
    # A tensor of no or one element is contiguous with any stride, but its dtype cannot be viewed with all.
    array: Any = values.as_strided(values.shape, (1,)).view(torch.uint8).numpy()
    return memoryview(array)


def from_array(values: NDArray[Any], dtype: str) -> Tensor:
    """Return an array as a tensor that shares its memory; bfloat16 comes as its bits in uint16."""
    tensor: Tensor = torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType] (torch's stub)
    return tensor.view(torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name` in a schema."""
    return getattr(torch, name)


class Scratch:
    """Memory that conversions use again and again: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, good until the next one of this dtype is taken."""
        count = math.prod(shape)
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return buffer[:count].view(*shape)


@dataclass(slots=True, kw_only=True)
class FieldScratch:
    """Memory to convert one field; records of several fields are alive at a time, so one each."""

    stored: Scratch = dataclass_field(default_factory=Scratch)
    scales: Scratch = dataclass_field(default_factory=Scratch)
    error: Scratch = dataclass_field(default_factory=Scratch)


def store_rows(
    name: str,
    field: Field,
    values: Tensor | Sequence[Tensor],
    numbers: Sequence[int],
    scratch: FieldScratch | None = None,
) -> StoredRows:
    """Convert records of one field to its stored dtype.

    Args:
        name, field: The field as stored.
        values: `(n, *shape)`, or `n` tensors when ragged; CPU, any dtype.
        numbers: Their sample numbers, for messages.
        scratch: Memory to convert into; the result is good until it is used again. None: fresh memory.
    Raises:
        RecordError: A finite value is beyond what the stored dtype holds.
    """
    dtype = torch_dtype(field.dtype)
    if isinstance(values, Tensor):
        flat = values.detach().reshape(len(values), -1)
        stored, worst, rms = _convert(name, flat, dtype, numbers, scratch or FieldScratch())
        width = flat.shape[1]
        starts: Sequence[int] = range(0, len(flat) * width + 1, width) if width else [0] * (len(flat) + 1)
        length = field.shape[0] if field.shape else 1
        lengths: Sequence[int] = [length] * len(flat)
    else:
        pieces = [
            _convert(name, v.detach().reshape(1, -1), dtype, [n], FieldScratch())
            for v, n in zip(values, numbers, strict=True)
        ]
        stored = torch.cat([piece[0] for piece in pieces])
        worst, rms = (np.concatenate([piece[i] for piece in pieces]) for i in (1, 2))
        starts = np.cumsum([0, *(len(piece[0]) for piece in pieces)]).tolist()
        lengths = [len(value) for value in values]
    return StoredRows(values=stored, starts=starts, lengths=lengths, max_error=worst, rms_error=rms)


def _convert(
    name: str, flat: Tensor, dtype: torch.dtype, numbers: Sequence[int], scratch: FieldScratch
) -> tuple[Tensor, NDArray[np.float64], NDArray[np.float64]]:
    """Rows `(n, width)` as stored, one-dimensional, with each row's largest and root mean square error."""
    count, width = flat.shape
    if flat.dtype == dtype:
        return flat.contiguous().reshape(-1), np.zeros(count), np.zeros(count)
    exact_in_dtype = torch.promote_types(flat.dtype, dtype) == dtype
    stored = scratch.stored.take(flat.shape, dtype)
    # Largest error, largest value, sum of squared errors, sum of squares.
    figures = np.zeros((4, count))
    high = max(1, CHUNK // max(1, width))
    for top in range(0, count, high):
        for left in range(0, width, CHUNK):
            block = (slice(top, top + high), slice(left, left + CHUNK))
            stored[block].copy_(flat[block])
            if not exact_in_dtype:
                found = measure(name, flat[block], stored[block], numbers[block[0]], scratch.error)
                np.maximum(figures[:2, block[0]], found[:2], out=figures[:2, block[0]])
                figures[2:, block[0]] += found[2:]
    return (
        stored.reshape(-1),
        *relative(figures),
    )


def relative(figures: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest and root mean square error of rows, relative, from the figures of `measure`."""
    worst, largest, squares, scale = figures
    return (
        np.divide(worst, largest, out=np.zeros_like(worst), where=largest > 0),
        np.sqrt(np.divide(squares, scale, out=np.zeros_like(worst), where=scale > 0)),
    )


def measure(
    name: str, exact: Tensor, stored: Tensor, numbers: Sequence[int], scratch: Scratch
) -> NDArray[np.float64]:
    """Return `(4, rows)`: largest error, largest value and sums of squares of both, of a block of rows."""
    exact = exact.to(torch.float64 if exact.dtype == torch.float64 else torch.float32)
    error = scratch.take(exact.shape, exact.dtype).copy_(stored).sub_(exact)
    squares, scale = _squares(error), _squares(exact)
    if not (np.isfinite(squares).all() and np.isfinite(scale).all() and (scale > TINY).all()):
        exact, error = _finite_only(name, exact.double(), stored, numbers)
        squares, scale = _squares(error), _squares(exact)
    return np.stack([_largest(error), _largest(exact), squares, scale])


def _largest(rows: Tensor) -> NDArray[Any]:
    values: NDArray[Any] = rows.numpy()
    return np.maximum(values.max(1), -values.min(1))


def _squares(rows: Tensor) -> NDArray[Any]:
    values: NDArray[Any] = rows.numpy()
    return np.einsum("ij,ij->i", values, values)


def _finite_only(name: str, exact: Tensor, stored: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    finite = torch.isfinite(exact)
    overflown = finite & ~torch.isfinite(stored)
    if bool(overflown.any()):
        row = int(overflown.any(dim=1).nonzero()[0, 0])
        value = float(exact[row][overflown[row]].abs().max())
        dtype = str(stored.dtype).removeprefix("torch.")
        raise RecordError(
            f"sample {numbers[row]}: field {name!r} holds {value:.4g}, {dtype} ends at "
            f"{torch.finfo(stored.dtype).max:.4g}",
            hint="Store it as bfloat16 or float32",
        )
    error = torch.where(finite, stored.to(exact.dtype) - exact, 0.0)
    return torch.where(finite, exact, 0.0), error


# ----------------------------------------------------------------------------------------------------------
# Floats in one byte each: int8 or float8 times a scale that a block of the last axis shares.
#
# A block of 128 elements (the last one of an axis may be shorter) is divided by its scale, `max|x|` over
# the largest number of the dtype, and rounded to nearest, ties to even. Decoding is one float32 product,
# rounded once, so it gives the same bits on every device and for any shape of a batch. The scales are
# float32 and are in a column of their own, `<field>.scale`, with digest and block sums like any other.


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
    """Return the columns of one field: itself, and its scales where it is quantized; see `store_rows`.

    Raises:
        RecordError: A value is not finite or beyond what the stored dtype holds; names sample and field.
    """
    if not field.quantized:
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
    """Return records `(n, *shape)` as bits and scales, both one-dimensional, and the two errors of each."""
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
        "cannot hold",
        hint=f"Store it as bfloat16 or float32, or leave the sample out ({arg('nan', 'reject')})",
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
    # One rounded up, next to the largest float32, would decode to infinity.
    return torch.where(torch.isinf(step * most), torch.nextafter(step, torch.zeros_like(step)), step)


def unpack(bits: Tensor, scales: Tensor, dtype: str, out: Tensor | None = None) -> Tensor:
    """Return the floats that quantized values stand for.

    Args:
        bits: `(..., width)`, int8 or, for float8, its bits in int8.
        scales: `(..., blocks)`, float32.
        dtype: One of `schema.QUANTIZED_DTYPES`.
        out: Float32, of the shape of `bits`, contiguous; None: a fresh tensor.
    """
    if out is None:
        out = torch.empty(bits.shape, dtype=torch.float32, device=bits.device)
    out.copy_(bits if dtype == "int8" else bits.view(torch.float8_e4m3fn))
    for values, own in zip(_blocks(out), _split(scales, bits.shape[-1]), strict=True):
        values.mul_(own[..., None])
    return out


def unpack_rows(field: Field, bits: Tensor, scales: Tensor) -> Tensor:
    """Return the same for flat columns of any number of steps; flat."""
    width = field.shape[-1]
    if not bits.numel():
        return torch.empty(0, dtype=torch.float32, device="cpu")
    lines = bits.view(torch.int8).view(-1, width)
    return unpack(lines, scales.view(len(lines), -1), field.dtype).view(-1)


def read_field(shard: Shard, name: str, field: Field, row: int) -> Tensor:
    """Return one record's field, verified and decoded, in memory of its own."""
    values = from_array(shard.read(name, row), field.dtype)
    if not field.quantized:
        return values
    scales: Any = shard.read(name + SCALE_SUFFIX, row)
    return unpack(values.view(torch.int8), from_array(scales, "float32"), field.dtype)


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Views `(..., blocks, size)` of the full blocks of the last axis, and of the short one at its end."""
    width = values.shape[-1]
    whole = width // SCALE_BLOCK
    if whole:
        yield values[..., : whole * SCALE_BLOCK].unflatten(-1, (whole, SCALE_BLOCK))
    if width % SCALE_BLOCK:
        yield values[..., None, whole * SCALE_BLOCK :]


def _split(scales: Tensor, width: int) -> Iterator[Tensor]:
    """Yield the scales of the pieces that `_blocks` gives."""
    whole = width // SCALE_BLOCK
    if whole:
        yield scales[..., :whole]
    if width % SCALE_BLOCK:
        yield scales[..., whole:]


# ----------------------------------------------------------------------------------------------------------
# Statistics of stored values, gathered while they are written: count, mean, std, min, max.
#
# Sums are float64 and additive, so partial statistics of shards merge into those of the cache. Per channel
# (last axis) where there are at most 64. The order of addition follows the order of writing; merged results
# are rounded to 9 significant digits, which hides it: count, min and max are exact, mean and std agree to
# 1e-9 of the root mean square, for equal records in any order and any shards.


MAX_CHANNELS = 64
_BYTES = ("uint8", "int8", "bool")
_HALF_DTYPES = ("float16", "bfloat16")
LANES = 2048
"""Columns that sums run over side by side: adding wide rows is fast, adding rows of a few channels is not."""
BYTE_LANES, BYTE_ROWS = 2048, 256
"""For bytes: columns, and rows that are added in float32. That is exact: 256 x 255^2 < 2^24."""

Partial: TypeAlias = "dict[str, Any]"
"""Per channel `count` of finite values, `sum`, `squares`, `min`, `max`; and `nonfinite` values in all."""


def channel_count(field: Field) -> int:
    """Return the channels that get statistics of their own; 1: the entire field."""
    axes = field.shape[1:] if field.time or field.ragged else field.shape
    return axes[-1] if len(axes) and 1 <= axes[-1] <= MAX_CHANNELS else 1


class Accumulator:
    """Running sums of one field of one shard."""

    def __init__(self, field: Field) -> None:
        self._channels = channel_count(field)
        self._bytes = field.dtype in _BYTES and not field.quantized
        lanes = BYTE_LANES if self._bytes else LANES
        self._width = max(1, lanes // self._channels) * self._channels
        self._rows = BYTE_ROWS if self._bytes else max(1, CHUNK // self._width)
        self._count = np.zeros(self._channels, np.int64)
        self._nonfinite = 0
        # One buffer for all chunks: a fresh one each time would be a fresh mapping, and twice as slow.
        dtype = torch.float32 if self._bytes else torch.float64
        self._buffer = torch.empty(self._rows * self._width, dtype=dtype, device="cpu")
        # Torch widens 16 bits to 32 with vector instructions, to 64 one by one: two steps are twice as fast.
        self._float32: Tensor | None = None
        if field.dtype in _HALF_DTYPES:
            self._float32 = torch.empty(len(self._buffer), dtype=torch.float32, device="cpu")
        self._sum, self._squares = np.zeros(self._width), np.zeros(self._width)
        self._min, self._max = np.full(self._width, np.inf), np.full(self._width, -np.inf)

    def update(self, values: Tensor) -> None:
        """Add stored values, `(n, *shape)`, any storable dtype, CPU, contiguous."""
        flat = values.reshape(-1)
        if self._bytes:
            self._add_bytes((flat.view(torch.uint8) if flat.dtype == torch.bool else flat).numpy())
            return
        step = self._rows * self._width
        for begin in range(0, len(flat), step):
            chunk = flat[begin : begin + step]
            if self._float32 is not None:
                chunk = self._float32[: len(chunk)].copy_(chunk)
            self._add(self._buffer[: len(chunk)].copy_(chunk).numpy())

    def _add(self, values: NDArray[np.float64]) -> None:
        whole = len(values) - len(values) % self._width
        table, rest = values[:whole].reshape(-1, self._width), values[whole:]
        with np.errstate(invalid="ignore"):  # infinities of both signs; found right below
            total = table.sum(0)
            finite = math.isfinite(float(total.sum()) + float(rest.sum()))
        if not finite:
            self._add_finite_only(values)
            return
        self._count += len(values) // self._channels
        if whole:
            self._sum += total
            self._squares += np.einsum("ij,ij->j", table, table)
            self._bound(table.min(0), table.max(0))
        self._add_rest(rest)

    def _add_bytes(self, values: NDArray[Any]) -> None:
        """Add bytes. Minimum and maximum need no conversion; `BYTE_ROWS` rows add up exactly in float32."""
        whole = len(values) - len(values) % self._width
        table = values[:whole].reshape(-1, self._width)
        buffer = self._buffer.numpy().reshape(self._rows, self._width)
        self._count += len(values) // self._channels
        if whole:
            self._bound(table.min(0), table.max(0))
        for begin in range(0, len(table), self._rows):
            rows = table[begin : begin + self._rows]
            some = buffer[: len(rows)]
            np.copyto(some, rows)
            self._sum += some.sum(0)
            self._squares += np.einsum("ij,ij->j", some, some)
        self._add_rest(values[whole:].astype(np.float64))

    def _add_rest(self, values: NDArray[np.float64]) -> None:
        """Add finite values that fill no row."""
        lanes = slice(0, len(values))
        self._sum[lanes] += values
        self._squares[lanes] += values * values
        self._bound(values, values)

    def _bound(self, low: NDArray[Any], high: NDArray[Any]) -> None:
        lanes = slice(0, len(low))
        np.minimum(self._min[lanes], low, out=self._min[lanes])
        np.maximum(self._max[lanes], high, out=self._max[lanes])

    def _add_finite_only(self, values: NDArray[np.float64]) -> None:
        table, lanes = values.reshape(-1, self._channels), slice(0, self._channels)
        finite = np.isfinite(table)
        self._nonfinite += int(finite.size - finite.sum())
        self._count += finite.sum(0)
        kept = np.where(finite, table, 0.0)
        self._sum[lanes] += kept.sum(0)
        self._squares[lanes] += np.square(kept).sum(0)
        np.minimum(self._min[lanes], np.where(finite, table, np.inf).min(0), out=self._min[lanes])
        np.maximum(self._max[lanes], np.where(finite, table, -np.inf).max(0), out=self._max[lanes])

    def partial(self) -> Partial:
        """Return what a shard's header carries."""
        lanes = (-1, self._channels)
        return {
            "count": self._count.tolist(),
            "nonfinite": self._nonfinite,
            "sum": self._sum.reshape(lanes).sum(0).tolist(),
            "squares": self._squares.reshape(lanes).sum(0).tolist(),
            "min": _plain(self._min.reshape(lanes).min(0)),
            "max": _plain(self._max.reshape(lanes).max(0)),
        }


def widest_partial(field: Field) -> Partial:
    """Return a partial whose JSON is as long as any other of this field, to reserve room in a header."""
    long = [-2.2250738585072014e-308] * channel_count(field)
    count = [1 << 62] * channel_count(field)
    return {
        "count": [*count],
        "nonfinite": 1 << 62,
        "sum": [*long],
        "squares": [*long],
        "min": [*long],
        "max": [*long],
    }


def summarize(partials: Iterable[Partial]) -> dict[str, Any]:
    """Merge partials of one field into readable statistics.

    Returns:
        `count`, `nonfinite`, `mean`, `std` (of the population), `min`, `max` over finite values, None where
        there are none; and the last four again as lists under `channels`, when there are several.
    """
    merged = [*partials]
    if not merged:
        return {"count": 0, "nonfinite": 0, "mean": None, "std": None, "min": None, "max": None}
    count: NDArray[np.int64] = np.array([p["count"] for p in merged], np.int64).sum(0)
    total, squares = (np.array(_exact_sums([p[key] for p in merged])) for key in ("sum", "squares"))
    lowest = _extreme([p["min"] for p in merged], min)
    highest = _extreme([p["max"] for p in merged], max)
    result: dict[str, Any] = {
        "count": int(count.sum()),
        "nonfinite": sum(p["nonfinite"] for p in merged),
        **_moments(int(count.sum()), math.fsum(total), math.fsum(squares)),
        "min": _extreme([[v] for v in lowest], min)[0],
        "max": _extreme([[v] for v in highest], max)[0],
    }
    if len(count) > 1:
        moments = [
            _moments(int(n), float(s), float(q)) for n, s, q in zip(count, total, squares, strict=True)
        ]
        result["channels"] = {
            "mean": [m["mean"] for m in moments],
            "std": [m["std"] for m in moments],
            "min": lowest,
            "max": highest,
        }
    return result


def _moments(count: int, total: float, squares: float) -> dict[str, float | None]:
    if not count:
        return {"mean": None, "std": None}
    mean = total / count
    variance = max(0.0, squares / count - mean * mean)
    scale = math.sqrt(max(squares, 0.0) / count)
    return {"mean": _rounded(mean, scale), "std": _rounded(math.sqrt(variance), scale)}


def _rounded(value: float, scale: float) -> float:
    """`value` to 9 significant digits of `scale`."""
    if not math.isfinite(value) or not scale:
        return value if math.isfinite(value) else 0.0
    return round(value, 8 - math.floor(math.log10(scale))) + 0.0


def _exact_sums(columns: Sequence[Any]) -> list[float]:
    return [math.fsum(values) for values in zip(*columns, strict=True)]


def _extreme(columns: Sequence[Any], pick: Any) -> list[float | None]:
    return [pick((v for v in values if v is not None), default=None) for values in zip(*columns, strict=True)]


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


# ----------------------------------------------------------------------------------------------------------
# Block sums: xxh3 over a few steps of one record, so that a window verifies only what it touches.
#
# The seed of a sum depends on schema and sample number: bytes of another record never pass for this one's,
# even when an entire page was put back in the wrong place.


digest = xxhash.xxh3_64_intdigest
"""The sum of a block: `digest(bytes, seed)`."""


def schema_seed(schema: Schema) -> int:
    """Return the xxh3_64 of a stored schema's canonical JSON, as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(schema_text(schema).encode())


def record_seeds(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one seed per record: number `n` gets output `n` of the splitmix64 stream with state `seed`.

    Args:
        seed: From `schema_seed`.
        numbers: Part-local sample numbers, `(n,)`.
    Returns:
        `(n,)` uint64.
    """
    return keys_of(seed, numbers)


def match(data: memoryview[Any], block_bytes: int, seed: int, sums: Sequence[int], first: int) -> bool:
    """Return True if every block of one record has the sum that was stored for it.

    Args:
        data: Complete blocks of the record, of which the record's last may be shorter; format `B`.
        block_bytes: Bytes of a block.
        seed: The record's.
        sums: Stored sums, of which `first` is that of the first block in `data`.
        first: Its place.
    """
    size = len(data)
    if size <= block_bytes:
        return not size or digest(data, seed) == sums[first]
    for begin in range(0, size, block_bytes):
        if digest(data[begin : begin + block_bytes], seed) != sums[first]:
            return False
        first += 1
    return True


def block_sums(field: Field, data: memoryview[Any], sizes: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """Return the sums of records that are one after another in `data`.

    Args:
        field: Gives the bytes of a block.
        data: Bytes of all records, format `B`.
        sizes: Bytes of each record.
        seeds: Seed of each record.
    Returns:
        All sums, record by record.
    """
    block = rows_per_block(field) * field.row_bytes
    sums: list[int] = []
    begin = 0
    for size, seed in zip(sizes, seeds, strict=True):
        end = begin + size
        if size <= block:
            if size:
                sums.append(digest(data[begin:end], seed))
        else:
            sums.extend(digest(data[at : min(at + block, end)], seed) for at in range(begin, end, block))
        begin = end
    return sums
