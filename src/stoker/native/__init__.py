"""Compiled code for what the interpreter is too slow for; twins in Python give the same bytes.

`core.c` is built into the wheel for Linux on x86-64 and arm64 (`hatch_build.py`). Where it was not built, the
twins run.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
"""Of the functions; a library of another version is not used."""
SHORT_RUN = 64
"""Values of one channel, below which each value is given a scale of its own."""
READ, NOT_READ, WRONG = 0, 1, 2
"""States of a record after `read_records`: read and right, not all there, or not what its sums say."""

_size, _number, _pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> Any:
    """Return the library; None where it was not built, or is of another version."""
    try:
        found = ctypes.CDLL(str(Path(__file__).parent / f"core-{platform.machine()}.so"))
        if found.stoker_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    found.stoker_gather.argtypes = (_pointer, _number, _size, _pointer, _size, _size, _pointer)
    found.stoker_gather.restype = _number
    found.stoker_copy.argtypes = (_size, _pointer, _pointer, _size)
    found.stoker_copy.restype = None
    found.stoker_scale.argtypes = (
        *(_pointer, _number, _size, _pointer, _size, _size),
        *(_pointer, _pointer, _size, _size, _pointer),
    )
    found.stoker_scale.restype = _number
    found.stoker_digest.argtypes = (_pointer, _size, ctypes.c_uint64)
    found.stoker_digest.restype = ctypes.c_uint64
    found.stoker_announce.argtypes = (_size, _pointer, _pointer, _pointer)
    found.stoker_announce.restype = None
    pointers = (_pointer,) * 4
    found.stoker_read.argtypes = (_size, *pointers, _size, _pointer, _pointer, ctypes.c_int, _pointer)
    found.stoker_read.restype = _number
    return found


def can_gather(view: Tensor) -> bool:
    """Return True if `RowGather` takes rows of this view: it is on the host, and a row is in one piece."""
    if library() is None or view.device.type != "cpu" or not len(view):
        return False
    expected = 1
    for size, stride in zip(reversed(view.shape[1:]), reversed(view.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class RowGather:
    """Copies rows of a view, as `torch.index_select(view, 0, index, out=out)`.

    Args:
        view: `(n, *row)`, see `can_gather`.
    """

    def __init__(self, view: Tensor) -> None:
        self._view = view  # its memory stays as long as this
        row = view.itemsize * prod(view.shape[1:])
        self._gather = library().stoker_gather
        self._from = view.data_ptr(), len(view), view.itemsize * view.stride(0)
        self._row = row

    def __call__(self, index: Tensor, out: Tensor) -> Tensor:
        """Copy the rows `index` into `out`, and return it.

        Args:
            index: `(count,)` int64 on the host, in one piece.
            out: `(count, *row)` of the view's dtype, in one piece.
        Raises:
            IndexError: A number is not among the rows.
        """
        wrong = self._gather(*self._from, index.data_ptr(), len(index), self._row, out.data_ptr())
        if wrong >= 0:
            raise IndexError(f"row {int(index[wrong])} of {len(self._view)} asked for")
        return out


class RowScale:
    """Copies rows of bytes as float32, times the scale of their channel, plus its shift.

    Args:
        view: `(n, *row)` uint8, see `can_gather`.
        scale, shift: `(channels,)` float32.
        inner: Consecutive values of one channel; value `i` has channel `i // inner % channels`.
    """

    def __init__(self, view: Tensor, scale: Tensor, shift: Tensor, inner: int) -> None:
        self._view = view
        self._row = prod(view.shape[1:])
        if inner < SHORT_RUN:  # a whole number of eights, after which they repeat
            scale, shift = (v.repeat_interleave(inner).repeat(SHORT_RUN) for v in (scale, shift))
            inner = 0
        self._scale, self._shift, self._inner = scale.contiguous(), shift.contiguous(), inner
        self._from = view.data_ptr(), len(view), view.itemsize * view.stride(0)
        self._call = library().stoker_scale

    def __call__(self, index: Tensor, out: Tensor) -> Tensor:
        """Write the rows `index` to `out`, and return it; arguments and errors as `RowGather`."""
        wrong = self._call(
            *self._from, index.data_ptr(), len(index), self._row,
            self._scale.data_ptr(), self._shift.data_ptr(), len(self._scale), self._inner, out.data_ptr(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"row {int(index[wrong])} of {len(self._view)} asked for")
        return out


class Extents(NamedTuple):
    """Bytes of records in files, and where they go, `(n,)` each."""

    fds: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    outs: NDArray[np.int64]
    """Addresses."""
    seeds: NDArray[np.int64]
    """Addresses of the records' seeds, uint64."""
    sums: NDArray[np.int64]
    """Addresses of the sums of their first blocks, uint64."""

    def take(self, some: NDArray[np.int64]) -> Extents:
        """Return these of them."""
        fds, offsets, sizes, outs, seeds, sums = self
        return Extents(fds[some], offsets[some], sizes[some], outs[some], seeds[some], sums[some])


def announce(records: Extents) -> None:
    """Have the system begin to load these bytes."""
    fds, offsets, sizes = records[:3]
    library().stoker_announce(len(fds), fds.ctypes.data, offsets.ctypes.data, sizes.ctypes.data)


def copy(origins: NDArray[np.int64], targets: NDArray[np.int64], size: int) -> None:
    """Copy `size` bytes from each of the first addresses to that of the second; nothing is checked here."""
    origins, targets = np.ascontiguousarray(origins), np.ascontiguousarray(targets)
    library().stoker_copy(len(origins), origins.ctypes.data, targets.ctypes.data, size)


def read_records(records: Extents, block_bytes: int, *, check: bool, flags: int = 0) -> NDArray[np.uint8]:
    """Read records into memory and compare them with their sums.

    Args:
        records: Which, and where to; all in range, since nothing is checked here.
        block_bytes: Bytes that share a sum; the last of a record may be fewer.
        check: Whether to compare.
        flags: Of `preadv2`, as `os.RWF_NOWAIT`.

    Returns:
        `READ`, `NOT_READ` or `WRONG` for each.
    """
    states = np.empty(len(records.fds), np.uint8)
    fds, offsets, sizes, outs, seeds, sums = (values.ctypes.data for values in records)
    library().stoker_read(
        len(states), fds, offsets, sizes, outs, block_bytes, seeds, sums if check else None, flags,
        states.ctypes.data,
    )  # fmt: skip
    return states
