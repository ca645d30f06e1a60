"""Memory that two processes share and that grows with need: one fills it and says so, the other looks.

A memfd, so that it has no name and goes with the last of them. Fields begin on a page each, as in an arena:
kernels may round otherwise by alignment.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping

from stoker.precompute.arena import slot_arrays
from stoker.precompute.layout import align
from stoker.schema import Sample, Schema, numpy_dtype

Shapes = Mapping[str, "tuple[int, ...]"]
"""Whole shapes of arrays by field."""


class Exchange:
    """One end of such memory; nobody may write it while the other still looks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Exchange:
        """Fresh memory, empty so far."""
        return cls(os.memfd_create("stoker-exchange", os.MFD_CLOEXEC))

    def arrays(self, schema: Schema, shapes: Shapes) -> Sample:
        """Views of it by field, one after another; it is as large as they need afterwards.

        Raises:
            OSError: There is not so much memory.
        """
        sizes = (
            math.prod(shape) * numpy_dtype(schema[name].dtype).itemsize for name, shape in shapes.items()
        )
        size = max(mmap.PAGESIZE, sum(map(align, sizes)))
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, size)  # or memory that is short would end us by a signal later
        if len(self._map) < size:
            self._map = mmap.mmap(self.fd, size)  # the one before goes with the last array that views it
        return slot_arrays(memoryview(self._map), schema, dict(shapes))

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
