"""From encoded tensors to stored ones, measuring what a narrower dtype costs.

Error of a record and field: `max|x - y| / max|x|` and `rms(x - y) / rms(x)`, over its finite values; 0 where
the record is all zeros. A finite value that overflows to infinity is an error, never a stored infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import RecordError
from stoker.schema import Field

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
        """Bytes of records `begin:end`; a view of `values`, valid while that lives."""
        return view_bytes(self.tensor_of(begin, end))

    def tensor_of(self, begin: int, end: int) -> Tensor:
        """Values of records `begin:end`, flat."""
        return self.values[self.starts[begin] : self.starts[end]]


def view_bytes(values: Tensor) -> memoryview[Any]:
    """The bytes of a contiguous CPU tensor of one dimension; a view, valid while the tensor lives."""
    # A tensor of no or one element is contiguous with any stride, but its dtype cannot be viewed with all.
    array: Any = values.as_strided(values.shape, (1,)).view(torch.uint8).numpy()
    return memoryview(array)


def from_array(values: NDArray[Any], dtype: str) -> Tensor:
    """An array as a tensor that shares its memory; bfloat16 comes as its bits in uint16."""
    tensor: Tensor = torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType] (torch's stub)
    return tensor.view(torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` in a schema."""
    return getattr(torch, name)


class Scratch:
    """Memory that conversions use again and again: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, good until the next one of this dtype is taken."""
        count = math.prod(shape)
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return buffer[:count].view(*shape)


@dataclass(slots=True, kw_only=True)
class FieldScratch:
    """What converting one field takes; records of several fields are alive at a time, so one each."""

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
    """Largest and root mean square error of rows, relative, from the figures of `measure`."""
    worst, largest, squares, scale = figures
    return (
        np.divide(worst, largest, out=np.zeros_like(worst), where=largest > 0),
        np.sqrt(np.divide(squares, scale, out=np.zeros_like(worst), where=scale > 0)),
    )


def measure(
    name: str, exact: Tensor, stored: Tensor, numbers: Sequence[int], scratch: Scratch
) -> NDArray[np.float64]:
    """Figures of a block of rows: largest error, largest value, sums of squares of both, `(4, rows)`."""
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
            f"{torch.finfo(stored.dtype).max:.4g}. Store it as bfloat16 or float32"
        )
    error = torch.where(finite, stored.to(exact.dtype) - exact, 0.0)
    return torch.where(finite, exact, 0.0), error
