"""Datasets of a file as fields of samples: which axis is the sample, time, space, channel; and their offsets.

Axes are words: `n` sample, `t` time, `x y z` space, anything else a channel or feature axis. They are
declared by the user, stated in the file, or found by `hdf5_formats.read_axes`. Fields with space axes
come out as `(T, H, W, C)`: time first, space in stored order, channels last; one space axis gets H = 1.
Without time the first axis is absent; with three space axes there is one more. Other fields keep their
order, with time moved to the front.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, arg
from stoker.schema import DTYPE_BYTES, Field, Json
from stoker.sources.protocol import read_dtype

SPACE = ("x", "y", "z")
_WORDS = {
    "batch": "n", "sample": "n", "samples": "n", "trajectory": "n", "b": "n",
    "time": "t", "step": "t", "channel": "c", "channels": "c", "v": "c",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One dataset of a sample (or of a whole file of samples), as stored."""

    dataset: str
    """Path in the file, or below a sample's group."""
    axes: tuple[str, ...]
    """One word per stored axis."""
    shape: tuple[int, ...]
    """As stored, the sample axis included."""
    dtype: str
    """The dtype it is read as: native byte order, float64 as float32, complex128 as complex64."""
    chunks: tuple[int, ...] | None = None
    """Chunk shape; None when contiguous."""
    narrowed: bool = False
    """Stored with more bits than it is read with (float64, complex128)."""
    parts: tuple[str, ...] = ()
    """Names of the components of the channel axis, when the file gives them."""

    @property
    def rows(self) -> int | None:
        """Samples in the dataset; None without a sample axis."""
        return self.shape[self.axes.index("n")] if "n" in self.axes else None

    @property
    def steps(self) -> int | None:
        """Stored time steps; None without a time axis."""
        return self.shape[self.axes.index("t")] if "t" in self.axes else None

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of this dataset, as read."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return size // max(self.rows or 1, 1)


class FieldRole(Enum):
    """The kind of a field; see `stoker.sources.hdf5_formats` for all but data."""

    DATA = "data"
    TIME = "time"
    DT = "dt"
    COORDINATE = "coordinate"
    BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLayout:
    """One field of a sample: one dataset, or several stacked along the channel axis."""

    name: str
    """Name in the sample."""
    pieces: tuple[Piece, ...]
    """In channel order."""
    role: FieldRole = FieldRole.DATA
    """The kind of field that they make."""
    points: int = 0
    """Of times and coordinates: entries that belong to the data; the dataset may have one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The fields and samples of one file."""

    fields: tuple[FieldLayout, ...]
    """In schema order; scalars of `values` follow."""
    rows: int
    """Samples in the file."""
    groups: tuple[str, ...] = ()
    """With a group per sample: their names, in natural order."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Parameters of the whole file; each becomes a scalar float32 field."""
    notes: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Further facts that identify the file's content (boundary conditions)."""
    left_out: tuple[str, ...] = ()
    """Parameters of the file that the user's fields do not name."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All datasets, in the order of the fields."""
        return tuple(piece for one in self.fields for piece in one.pieces)

    def row_name(self, row: int) -> str:
        """Return the name of a sample inside its file, for keys."""
        return self.groups[row] if self.groups else str(row)

    def row_place(self, row: int) -> str:
        """Return the place of a sample inside its file, for messages."""
        return f"group {self.groups[row]!r}" if self.groups else f"row {row}"


def parse_axes(text: str, *, where: str) -> tuple[str, ...]:
    """Split `"n t x c"` into words, with other names (`time`; `b` and `batch` for `n`) replaced.

    Raises:
        SourceError: Empty, a word twice, or not words.
    """
    axes = tuple(_WORDS.get(word.lower(), word.lower()) for word in text.split())
    if not axes or len(set(axes)) < len(axes) or not all(axis.isidentifier() for axis in axes):
        raise SourceError(
            f"{where}: axes {text!r} are not distinct words",
            hint="Write one word per axis: n sample, t time, x y z space, c channel; for example 'n t x' or "
            "'n t y x c'",
        )
    return axes


def declared_axes(dataset: Any, *, where: str) -> tuple[str, ...] | None:
    """Axes that a dataset itself states: an attribute `axes`, or HDF5 dimension labels on every axis."""
    stated = dataset.attrs.get("axes")
    if stated is not None:
        text = as_text(stated)
        return parse_axes(
            text.replace(",", " ") if " " in text or "," in text else " ".join(text), where=where
        )
    if "DIMENSION_LABELS" not in dataset.attrs:
        return None
    labels = [dimension.label for dimension in dataset.dims]
    return parse_axes(" ".join(labels), where=where) if labels and all(labels) else None


def as_text(value: Any) -> str:
    """Return an HDF5 attribute as text, whatever string type it was written with."""
    if isinstance(value, np.ndarray):
        return " ".join(as_text(item) for item in cast("NDArray[Any]", value).ravel().tolist())
    return value.decode() if isinstance(value, bytes) else str(value)


def make_piece(
    dataset: Any, name: str, axes: Sequence[str], *, where: str, parts: Sequence[str] = ()
) -> Piece:
    """Describe an open dataset.

    Raises:
        SourceError: It has no data, a dtype that is not a number, or another number of axes than declared.
    """
    shape = dataset.shape
    if shape is None or math.prod(shape) == 0:
        raise SourceError(
            f"{where}: dataset {name!r} is empty, shape {shape}", hint="Leave the file out, or fix it"
        )
    if len(axes) != len(shape):
        raise SourceError(
            f"{where}: dataset {name!r} has {len(shape)} axes {tuple(shape)}, declared were {len(axes)}: "
            f"{' '.join(axes)!r}",
            hint=f"Declare one word per axis, for example {arg('fields', {name: 'n t x c'})}",
        )
    dtype = read_dtype(dataset.dtype, where=f"{where}: dataset {name!r}")
    return Piece(
        dataset=name,
        axes=tuple(axes),
        shape=tuple(int(size) for size in shape),
        dtype=dtype.name,
        narrowed=dtype.itemsize < dataset.dtype.itemsize,
        chunks=None if dataset.chunks is None else tuple(int(size) for size in dataset.chunks),
        parts=tuple(parts),
    )


def sample_axes(piece: Piece) -> tuple[str, ...]:
    """Return the axes of one sample of a piece, in stored order."""
    return tuple(axis for axis in piece.axes if axis != "n")


def sample_shape(piece: Piece, strides: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one sample in stored order, after subsampling."""
    return tuple(
        -(-size // strides.get(axis, 1))
        for axis, size in zip(piece.axes, piece.shape, strict=True)
        if axis != "n"
    )


def arrange(raw: NDArray[Any], axes: Sequence[str]) -> NDArray[Any]:
    """Return one sample from stored to served order: `(T, H, W, C)` with space, else time first.

    Args:
        raw: One sample, axes in stored order.
        axes: Their words, without `n`.
    Returns:
        A view where the order allows it. complex64 becomes float32: twice the channels with space
        axes, else a trailing axis of 2.
    """
    time = [axis for axis in axes if axis == "t"]
    space = [axis for axis in axes if axis in SPACE]
    rest = [axis for axis in axes if axis != "t" and axis not in SPACE]
    array = raw.transpose([list(axes).index(axis) for axis in (*time, *space, *rest)])
    if np.iscomplexobj(array):
        array = np.ascontiguousarray(array)[..., None].view(np.float32)
    if not space:
        return array
    grid = array.shape[: len(time) + len(space)]
    if len(space) == 1:
        grid = (*grid[: len(time)], 1, *grid[len(time) :])
    channels = math.prod(array.shape[len(time) + len(space) :])
    return array.reshape((*grid, channels))


def piece_field(piece: Piece, strides: Mapping[str, int]) -> Field:
    """Return the field that `arrange` makes of a piece, without reading data."""
    axes = sample_axes(piece)
    sizes = dict(zip(axes, sample_shape(piece, strides), strict=True))
    time = (sizes["t"],) if "t" in sizes else ()
    space = tuple(sizes[axis] for axis in axes if axis in SPACE)
    rest = tuple(size for axis, size in sizes.items() if axis != "t" and axis not in SPACE)
    is_complex = piece.dtype == "complex64"
    dtype = "float32" if is_complex else piece.dtype
    if not space:
        return Field(shape=(*time, *rest, *((2,) if is_complex else ())), dtype=dtype, time=bool(time))
    channels = math.prod(rest) * (2 if is_complex else 1)
    grid = (1, *space) if len(space) == 1 else space
    return Field(shape=(*time, *grid, channels), dtype=dtype, time=bool(time))


def stacked_field(layout: FieldLayout, strides: Mapping[str, int], *, where: str) -> Field:
    """Return the field that the pieces of a layout give together.

    Raises:
        SourceError: The pieces cannot be stacked.
    """
    if layout.role is not FieldRole.DATA:
        return _included_field(layout, strides)
    fields = [piece_field(piece, strides) for piece in layout.pieces]
    first = fields[0]
    if len(fields) == 1:
        return first
    for piece, other in zip(layout.pieces, fields, strict=True):
        if (other.shape[:-1], other.dtype, other.time) != (first.shape[:-1], first.dtype, first.time):
            raise SourceError(
                f"{where}: datasets {layout.pieces[0].dataset!r} and {piece.dataset!r} cannot be stacked as "
                f"channels of {layout.name!r}: {first.dtype} {first.shape} and {other.dtype} {other.shape}",
                hint="Name them as separate fields",
            )
    shape = (*first.shape[:-1], sum(one.shape[-1] for one in fields))
    return Field(shape=shape, dtype=first.dtype, time=first.time)


def _included_field(layout: FieldLayout, strides: Mapping[str, int]) -> Field:
    """Return what `stoker.sources.hdf5_formats.finish` makes of one sample."""
    if layout.role is FieldRole.DT:
        return Field(shape=(), dtype="float32")
    if layout.role is FieldRole.TIME:
        steps = -(-layout.points // strides.get("t", 1))
        return Field(shape=(steps,), dtype="float32", time=True, exact=True)
    if layout.role is FieldRole.COORDINATE:
        points = -(-layout.points // strides.get(layout.name, 1))
        return Field(shape=(points,), dtype="float32", kept=True, exact=True)
    (piece,) = layout.pieces
    time = "t" in piece.axes
    return Field(shape=sample_shape(piece, strides), dtype=piece.dtype, time=time, kept=True, exact=True)


def channel_names(layout: FieldLayout, strides: Mapping[str, int]) -> tuple[str, ...]:
    """Return one name per channel of a field with space axes, in order; empty for other fields."""
    names: list[str] = []
    for piece in layout.pieces if layout.role is FieldRole.DATA else ():
        if not any(axis in SPACE for axis in piece.axes):
            return ()
        count = piece_field(piece, strides).shape[-1]
        base = piece.dataset.rsplit("/", 1)[-1]
        if len(piece.parts) == count:
            names.extend(piece.parts)
        else:
            names.extend([base] if count == 1 else [f"{base}_{index}" for index in range(count)])
    return tuple(names)


def layout_to_json(layout: FileLayout) -> list[Json]:
    """Return the layout as it goes into a recipe: which datasets, which axes; no sizes."""
    return [
        {"field": one.name, "datasets": [{"name": p.dataset, "axes": " ".join(p.axes)} for p in one.pieces]}
        for one in layout.fields
    ]


# ----------------------------------------------------------------------------------------------------------
# Offsets of samples in the user's own files, for caches that serve them in place.
#
# A field can be served in place when its bytes in the file are its values as served. They are contiguous,
# uncompressed, in the machine's byte order, with the axes in the order of serving. Anything else is
# refused, with the cure.


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


_CURE = (
    "Copy it once instead: stoker.precompute(source, None, cache_dir, name=...), in settings "
    "precompute.in_place=false"
)


def offset_of(dataset: Any, *, where: str) -> int:
    """First byte of an HDF5 dataset, or of a memory-mapped `.npy`, in its file.

    Raises:
        SourceError: Its bytes are not one run of plain values.
    """
    if isinstance(dataset, np.memmap):
        if not dataset.flags.c_contiguous:
            raise SourceError(
                f"{where} is stored in Fortran order, so the bytes of a sample are not contiguous", hint=_CURE
            )
        return int(dataset.offset)
    if not dataset.size:
        return 0
    offset = dataset.id.get_offset() if hasattr(dataset, "id") and dataset.chunks is None else None
    if offset is None:
        how = f"in chunks of {tuple(dataset.chunks)}" if dataset.chunks else "not as one run of bytes"
        packed = f", compressed with {dataset.compression}" if getattr(dataset, "compression", None) else ""
        raise SourceError(f"{where} is stored {how}{packed}, so it cannot be served in place", hint=_CURE)
    return int(offset)


def plain_dtype(dtype: np.dtype[Any], *, where: str) -> str:
    """Return the name of a stored dtype that can be served as it is.

    Raises:
        SourceError: It needs converting.
    """
    name = dtype.newbyteorder("=").name
    native = dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")
    if name not in DTYPE_BYTES or not native:
        raise SourceError(f"{where} is of {dtype.str}, which has to be converted to be served", hint=_CURE)
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
            "rearranged",
            hint=_CURE,
        )


def row_places(dataset: Any, rows: NDArray[np.int64], *, where: str) -> NDArray[np.int64]:
    """Offsets of rows along axis 0 of a dataset."""
    row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
    return offset_of(dataset, where=where) + rows * row_bytes
