"""The arena: a fixed piece of anonymous shared memory, cut into slots, through which arrays travel.

One arena per reader, never shared between readers: the kernel may still be copying into the slots of a reader
that was killed in the middle of a read, and such a slot must not belong to its replacement. A memfd has no
name, so nothing outlives the processes that hold it.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ResourceError
from stoker.precompute.layout import Layout, align
from stoker.schema import Sample, Schema, numpy_dtype


class Arena:
    """Slots of one reader. `fd` is inherited by the reader, which maps the same bytes."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self.layout = layout
        self._map = mmap.mmap(fd, layout.arena_bytes)

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """A fresh arena, which takes no memory until `reserve`, or until it is written to."""
        fd = os.memfd_create("stoker-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, layout.arena_bytes)
            return cls(fd, layout)
        except OSError:
            os.close(fd)
            raise

    def reserve(self) -> None:
        """Take its memory now rather than by a fault in the middle of a run.

        Raises:
            ResourceError: There is not enough.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.layout.arena_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ResourceError(
                    f"no memory for a reader's arena of {self.layout.arena_bytes:,} bytes: {error.strerror}. "
                    f"Use fewer readers or a smaller memory_bytes"
                ) from error
            raise

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable."""
        size = self.layout.slot_bytes
        return memoryview(self._map)[index * size : (index + 1) * size]

    def arrays(self, index: int) -> Sample:
        """Views of a slot by field (modes `group` and `steps`); shapes are `Layout.shapes()`."""
        return slot_arrays(self.slot(index), self.layout.schema, self.layout.shapes())

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last array that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def slot_arrays(memory: memoryview, schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Sample:
    """Arrays of the given shapes one after another in `memory`, each on a page of its own."""
    arrays: Sample = {}
    offset = 0
    for name, shape in shapes.items():
        dtype = numpy_dtype(schema[name].dtype)
        count = math.prod(shape)
        array: NDArray[Any] = (
            np.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else (np.empty(0, dtype))
        )
        arrays[name] = array.reshape(shape)
        offset += align(array.nbytes)
    return arrays


def private_arrays(schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Sample:
    """Zeroed arrays of this process alone, aligned as those in a slot."""
    size = sum(align(math.prod(shape) * schema[name].itemsize) for name, shape in shapes.items())
    return slot_arrays(memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE))), schema, shapes)
