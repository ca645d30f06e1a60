"""Offsets of samples in the user's own files, for caches that serve them in place.

A field can be served in place when its bytes in the file are its values as served. They are contiguous,
uncompressed, in the machine's byte order, with the axes in the order of serving. Anything else is refused,
with the cure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.schema import DTYPE_BYTES, Field
from stoker.sources.hdf5_fields import SPACE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldLocations:
    """One field of the samples of a part, as it is stored in a file."""

    field: Field
    """With the dtype that is in the file."""
    path: Path
    at: NDArray[np.int64]
    """Offset in bytes of each sample, `(count,)`."""
    lengths: NDArray[np.int64] | None = None
    """Steps along axis 0 of each sample, where they differ."""

    def take(self, rows: NDArray[np.int64]) -> FieldLocations:
        """Return the same of some samples."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return replace(self, at=self.at[rows], lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartLocations:
    """The samples of one part of a source."""

    count: int
    fields: Mapping[str, FieldLocations]
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """Values that are in no file, `(count, *shape)`: parameters from names and attributes."""

    def take(self, rows: NDArray[np.int64]) -> PartLocations:
        """Return the same of some samples."""
        return PartLocations(
            count=len(rows),
            fields={name: one.take(rows) for name, one in self.fields.items()},
            values={name: values[rows] for name, values in self.values.items()},
        )


@runtime_checkable
class InPlaceSource(Protocol):
    """A source that can say where its samples are stored."""

    def places(self) -> Sequence[PartLocations]:
        """Return one entry for each part of its identity.

        Raises:
            SourceError: They cannot be served in place; says why, and what to do.
        """
        ...


_CURE = "Encode it once instead: stoker.precompute(source, None, cache_dir, name=...)"


def offset_of(dataset: Any, *, where: str) -> int:
    """First byte of an HDF5 dataset, or of a memory-mapped `.npy`, in its file.

    Raises:
        SourceError: Its bytes are not one run of plain values.
    """
    if isinstance(dataset, np.memmap):
        if not dataset.flags.c_contiguous:
            raise SourceError(
                f"{where} is stored in Fortran order, so the bytes of a sample are not contiguous. {_CURE}"
            )
        return int(dataset.offset)
    if not dataset.size:
        return 0
    offset = dataset.id.get_offset() if hasattr(dataset, "id") and dataset.chunks is None else None
    if offset is None:
        how = f"in chunks of {tuple(dataset.chunks)}" if dataset.chunks else "not as one run of bytes"
        packed = f", compressed with {dataset.compression}" if getattr(dataset, "compression", None) else ""
        raise SourceError(f"{where} is stored {how}{packed}, so it cannot be served in place. {_CURE}")
    return int(offset)


def plain_dtype(dtype: np.dtype[Any], *, where: str) -> str:
    """Return the name of a stored dtype that can be served as it is.

    Raises:
        SourceError: It needs converting.
    """
    name = dtype.newbyteorder("=").name
    native = dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")
    if name not in DTYPE_BYTES or not native:
        raise SourceError(f"{where} is of {dtype.str}, which has to be converted to be served. {_CURE}")
    return name


def check_order(axes: Sequence[str], *, where: str) -> None:
    """Refuse axes of a sample that are stored in another order than they are served.

    Raises:
        SourceError: As said.
    """
    time = [axis for axis in axes if axis == "t"]
    space = [axis for axis in axes if axis in SPACE]
    served = [*time, *space, *(axis for axis in axes if axis not in (*time, *space))]
    if served != [*axes]:
        raise SourceError(
            f"{where} has axes {' '.join(axes)}, served are {' '.join(served)}: its values have to be "
            f"rearranged. {_CURE}"
        )


def row_places(dataset: Any, rows: NDArray[np.int64], *, where: str) -> NDArray[np.int64]:
    """Offsets of rows along axis 0 of a dataset."""
    row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
    return offset_of(dataset, where=where) + rows * row_bytes
