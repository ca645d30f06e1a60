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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""Of the functions; a library of another version is not used."""
READ, NOT_READ, WRONG = 0, 1, 2
"""States of a record after `read_records`: read and right, not all there, or not what its sums say."""

_size, _number, _pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p


def library_path(machine: str = platform.machine()) -> Path:
    """Return where the library for a processor is, if it was built."""
    return Path(__file__).parent / f"core-{machine}.so"


@functools.cache
def library() -> Any:
    """Return the library; None where it was not built, or is of another version."""
    try:
        found = ctypes.CDLL(str(library_path()))
        if found.stoker_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    found.stoker_gather.argtypes = (_pointer, _number, _size, _pointer, _size, _size, _pointer)
    found.stoker_gather.restype = _number
    found.stoker_digest.argtypes = (_pointer, _size, ctypes.c_uint64)
    found.stoker_digest.restype = ctypes.c_uint64
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


def read_records(  # noqa: PLR0913, PLR0917 - what the call of C takes
    fds: NDArray[np.int32],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    outs: NDArray[np.int64],
    block_bytes: int,
    seeds: NDArray[np.int64],
    sums: NDArray[np.int64] | None,
    flags: int,
) -> NDArray[np.uint8]:
    """Read records into memory and compare them with their sums, `(n,)` each.

    Args:
        fds, offsets, sizes: The bytes to read.
        outs: Addresses that they go to.
        block_bytes: Bytes that share a sum; the last of a record may be fewer.
        seeds: Addresses of the records' seeds, uint64.
        sums: Addresses of the sum of each record's first block, uint64; None: nothing is compared.
        flags: Of `preadv2`, as `os.RWF_NOWAIT`.
    Returns:
        `READ`, `NOT_READ` or `WRONG` for each.
    """
    states = np.empty(len(fds), np.uint8)
    library().stoker_read(
        len(fds), fds.ctypes.data, offsets.ctypes.data, sizes.ctypes.data, outs.ctypes.data, block_bytes,
        seeds.ctypes.data, None if sums is None else sums.ctypes.data, flags, states.ctypes.data,
    )  # fmt: skip
    return states
