"""Read samples so that each HDF5 chunk is decompressed once.

h5py's default chunks cut the sample *and* the time axis, so a sample read alone decompresses every chunk
it shares with its neighbours again. Here a block is read instead: as many samples as one row of chunks
holds, over all time, decoded once and kept until a sample of another block is asked for. Reading the
samples of a run in order therefore touches each chunk once, whole or in pieces along time.

A block is bounded by `BLOCK_LIMIT_BYTES`. A file whose chunk rows are larger is read with fewer samples
per block, at the price of decompressing chunks more than once; `redundancy` says how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.dtypes import read_as
from stoker.sources.hdf5_layout import FileLayout, Piece, sample_axes, sample_shape
from stoker.sources.hdf5_open import FOREIGN_ERRORS, FilePool, cause_of
from stoker.units import MIB

BLOCK_BYTES = 8 * MIB
"""What a block aims for: large enough that calls cost nothing, small enough that runs stay even."""

BLOCK_LIMIT_BYTES = 512 * MIB
"""What all blocks of one source copy may hold. One row of h5py's default chunks of a
(10000, 201, 1024) float32 file is 258 MiB."""

_DIRECT_BYTES = 32 * 1024
"""From here on a contiguous sample is read by a call of its own: the call costs less than a second copy."""

_CONTIGUOUS_BLOCK_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How much of one piece is read at a time."""

    samples: int
    """Samples per block; blocks start at multiples of it."""
    steps: int | None
    """Time steps (after subsampling) per block; None: all, or no time axis."""
    redundancy: int
    """How often a chunk is decompressed when all samples are read in order."""


def plan_block(piece: Piece, strides: Mapping[str, int], limit_bytes: int) -> Block:
    """The block of a piece: pure arithmetic on shapes.

    Args:
        piece: As stored.
        strides: Subsampling by axis word.
        limit_bytes: What one block may hold.
    """
    size, rows = piece.sample_bytes, piece.rows or 1
    per_chunk = _chunk(piece, "n")
    stride = strides.get("t", 1)
    size = max(1, size // stride if piece.steps else size)
    if piece.chunks is None and size >= _DIRECT_BYTES:
        return Block(samples=1, steps=1 if piece.steps else None, redundancy=1)
    row_bytes = per_chunk * size
    aim = min(_CONTIGUOUS_BLOCK_BYTES if piece.chunks is None else BLOCK_BYTES, limit_bytes)
    if row_bytes <= limit_bytes and (per_chunk > 1 or size <= aim):
        samples = per_chunk * max(1, aim // row_bytes)
        return Block(samples=min(samples, max(rows, 1)), steps=None, redundancy=1)
    if size <= limit_bytes and per_chunk > 1:
        pieces = math.ceil(per_chunk / (limit_bytes // size))
        return Block(samples=math.ceil(per_chunk / pieces), steps=None, redundancy=pieces)
    if piece.steps is None:
        return Block(samples=1, steps=None, redundancy=per_chunk)
    unit = math.lcm(_chunk(piece, "t"), stride) // stride
    step_bytes = max(1, size // math.ceil(piece.steps / stride))
    return Block(samples=1, steps=unit * max(1, aim // (unit * step_bytes)), redundancy=per_chunk)


def _chunk(piece: Piece, axis: str) -> int:
    """Chunk length along an axis; 1 when contiguous or without the axis."""
    if piece.chunks is None or axis not in piece.axes:
        return 1
    at = piece.axes.index(axis)
    return min(piece.chunks[at], piece.shape[at])


def block_bytes(piece: Piece, block: Block, strides: Mapping[str, int]) -> int:
    """Bytes that a kept block of this piece holds."""
    size = piece.sample_bytes // strides.get("t", 1)
    if block.steps is not None and piece.steps:
        size = size * block.steps * strides.get("t", 1) // piece.steps
    return block.samples * size


def run_length(layout: FileLayout, blocks: Sequence[Block]) -> int:
    """Consecutive rows of a file that are cheap to read together.

    A multiple of every heavy piece's block where that stays small, and about `BLOCK_BYTES`.
    """
    total = max(1, sum(piece.sample_bytes for piece in layout.pieces))
    heavy = [
        block.samples
        for piece, block in zip(layout.pieces, blocks, strict=True)
        if piece.rows is not None and piece.sample_bytes * 8 >= total
    ]
    common = math.lcm(*heavy) if heavy else 1
    length = common if common <= 4 * max(heavy, default=1) else max(heavy)
    return length * max(1, BLOCK_BYTES // (length * total))


def fetch(dataset: Any, selection: tuple[slice, ...], out: NDArray[Any]) -> None:
    """The one place where sample bytes leave HDF5: `out` gets `dataset[selection]` in its dtype."""
    dataset.read_direct(out, selection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample's piece lies."""

    path: Path
    """The file."""
    row: int
    """Row along the sample axis; ignored by pieces without one."""
    group: str
    """The sample's group; empty when samples are rows."""
    label: str
    """The file and where the sample is in it, for messages."""
    slot: int
    """Position of the piece in the layout: one block is kept per piece."""


class BlockReader:
    """Reads samples of pieces through blocks. One per process and copy of a source; never pickled."""

    def __init__(self, pool: FilePool, strides: Mapping[str, int]) -> None:
        self._pool = pool
        self._strides = dict(strides)
        self._kept: dict[int, tuple[tuple[object, ...], NDArray[Any]]] = {}
        self._damaged: set[tuple[object, ...]] = set()

    def read(self, place: Place, piece: Piece, block: Block, span: tuple[int, int] | None) -> NDArray[Any]:
        """One sample of one piece, axes in stored order without `n`, freshly allocated.

        Args:
            place: Which sample.
            piece, block: What is read, and how much at a time.
            span: Time steps (after subsampling) `start, stop`; None without a time axis.

        Raises:
            SourceError: Names file, dataset and sample.
        """
        if span is None:
            if block.samples == 1:
                return self._direct(place, piece, (place.row, place.row + 1), None, drop=True)
            return self._from_block(place, piece, block, (0, 0), None)
        start, stop = span
        total = _steps(piece, self._strides)
        steps = min(block.steps or total, total)
        if start >= stop:
            return self._direct(place, piece, (place.row, place.row + 1), (start, start), drop=True)
        aligned = start % steps == 0 and (stop % steps == 0 or stop == total)
        if block.samples == 1 and aligned:
            return self._direct(place, piece, (place.row, place.row + 1), span, drop=True)
        cuts = [
            (max(first, start), min(first + steps, stop))
            for first in range(start - start % steps, stop, steps)
        ]
        found = [self._from_block(place, piece, block, (cut[0] // steps * steps, steps), cut) for cut in cuts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=sample_axes(piece).index("t"))

    def _from_block(
        self, place: Place, piece: Piece, block: Block, window: tuple[int, int], cut: tuple[int, int] | None
    ) -> NDArray[Any]:
        """Copy the steps `cut` of a sample out of the block that starts at step `window[0]`."""
        first = place.row - place.row % block.samples if piece.rows is not None else 0
        rows = (first, min(first + block.samples, piece.rows or 1))
        begin, steps = window
        span = None if cut is None else (begin, min(begin + steps, _steps(piece, self._strides)))
        key = (place.path, place.group, piece.dataset, first, begin)
        if key in self._damaged:
            return self._direct(place, piece, (place.row, place.row + 1), cut, drop=True)
        if place.slot not in self._kept or self._kept[place.slot][0] != key:
            self._kept.pop(place.slot, None)  # before the next is read, or two blocks would be held
            try:
                self._kept[place.slot] = (key, self._direct(place, piece, rows, span, drop=False))
            except SourceError:
                # One bad chunk must not cost its neighbours: from here on sample by sample.
                self._damaged.add(key)
                return self._direct(place, piece, (place.row, place.row + 1), cut, drop=True)
        kept = self._kept[place.slot][1]
        index: list[int | slice] = [slice(None)] * kept.ndim
        if piece.rows is not None:
            index[piece.axes.index("n")] = place.row - first
        if cut is not None:
            index[piece.axes.index("t")] = slice(cut[0] - begin, cut[1] - begin)
        return kept[tuple(index)].copy()

    def _direct(
        self, place: Place, piece: Piece, rows: tuple[int, int], span: tuple[int, int] | None, *, drop: bool
    ) -> NDArray[Any]:
        """Read rows and steps into a fresh array; `drop` removes the sample axis (of length 1)."""
        stride = self._strides.get("t", 1)
        selection: list[slice] = []
        shape: list[int] = []
        for axis, size in zip(piece.axes, piece.shape, strict=True):
            if axis == "n":
                selection.append(slice(*rows))
                shape.append(rows[1] - rows[0])
            elif axis == "t" and span is not None:
                selection.append(slice(span[0] * stride, (span[1] - 1) * stride + 1, stride))
                shape.append(span[1] - span[0])
            else:
                selection.append(slice(0, size))
                shape.append(size)
        out = np.empty(shape, dtype=piece.dtype)
        name = f"{place.group}/{piece.dataset}" if place.group else piece.dataset
        dataset = self._pool.dataset(place.path, name, keep=not place.group)
        if tuple(dataset.shape) != piece.shape:
            raise SourceError(
                f"{place.label}: dataset {name!r} has shape {tuple(dataset.shape)}, expected "
                f"{piece.shape} as in the rest. One sample differs, or the file changed; fix or exclude it"
            )
        if out.size:
            try:
                fetch(dataset, tuple(selection), out)
            except FOREIGN_ERRORS as error:
                raise SourceError(
                    f"{place.label}: dataset {name!r} cannot be read ({error}). The file is damaged there; "
                    "copy or download it again, or leave the sample out"
                ) from cause_of(error)
            if piece.narrowed and not np.isfinite(out).all():  # HDF5 narrows without a word
                exact = np.empty(shape, dtype=dataset.dtype)
                fetch(dataset, tuple(selection), exact)
                where = f"{place.label}: dataset {name!r}"
                read_as(exact, out.dtype, where=where)
        return out.squeeze(axis=piece.axes.index("n")) if drop and "n" in piece.axes else out


def _steps(piece: Piece, strides: Mapping[str, int]) -> int:
    """Time steps after subsampling."""
    return sample_shape(piece, strides)[sample_axes(piece).index("t")]
