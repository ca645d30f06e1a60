"""Records of a cache in order of number: every byte verified as it is read, in pieces, by a few threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import IncompleteError, RecordError
from stoker.runtime.threads import map_in_order
from stoker.schema import SCALE_SUFFIX, Field, numpy_dtype
from stoker.store import Cache
from stoker.store.convert import from_array, torch_dtype
from stoker.store.packing import unpack_rows
from stoker.store.shard_read import Shard
from stoker.units import MIB, format_count

PIECE_BYTES = 4 * MIB
"""Bytes of records that are read and handed on at a time, at most; one record at least."""
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive records in consecutive rows of one shard."""

    shard: int
    row: int
    first: int
    """Place of the first among the records to export."""
    number: int
    """Its sample number."""
    count: int


class Records:
    """The records to export."""

    def __init__(self, cache: Cache, between: tuple[int, int] | None) -> None:
        """Those of the sample numbers `between`, which may be quarantined ones in part.

        Raises:
            IncompleteError: There is none.
        """
        self.cache = cache
        low, high = between or (0, cache.recipe.count)
        self.runs: list[Run] = []
        self.count = 0
        at = cache.segments
        for shard, row, first, count in zip(
            at.shard.tolist(), at.row.tolist(), at.first.tolist(), at.count.tolist(), strict=True
        ):
            begin, end = max(first, low), min(first + count, high)
            if begin < end:
                run = Run(
                    shard=shard, row=row + begin - first, first=self.count, number=begin, count=end - begin
                )
                self.runs.append(run)
                self.count += run.count
        if not self.count:
            raise IncompleteError(
                f"{cache.path} has no record of the samples {format_count(low)} to {format_count(high - 1)}"
            )

    def between(self, begin: int, end: int) -> Iterator[Run]:
        """The runs of the records at these places."""
        for run in self.runs:
            low, high = max(begin, run.first), min(end, run.first + run.count)
            if low < high:
                skip = low - run.first
                yield Run(
                    shard=run.shard, row=run.row + skip, first=low, number=run.number + skip, count=high - low
                )

    def numbers(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample numbers of the records at these places."""
        found = [np.arange(run.number, run.number + run.count) for run in self.between(begin, end)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def lengths(self, field: str) -> NDArray[np.int64]:
        """Steps of each record in a ragged field."""

        def of_run(run: Run) -> NDArray[np.int64]:
            return np.diff(self.cache.shard(run.shard).offsets(field)[run.row : run.row + run.count + 1])

        what = f"reading the lengths of {self.cache.path}"
        return np.concatenate([np.empty(0, np.int64), *map_in_order(of_run, self.runs, what=what)])

    def pieces(
        self, name: str, dtype: str, begin: int, end: int, padded_to: int | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """The values of a field of the records at these places, as bytes, piece by piece.

        Args:
            name: The field.
            dtype: What packed values become; else the stored one.
            begin, end: Places.
            padded_to: Steps of each record of a ragged field, filled up with zeros; None: as many as it has.
        Raises:
            CorruptError: A record's bytes do not match their checksums.
            RecordError: A value is beyond what `dtype` holds; names the sample.
            StalledError: A piece was not read in time.
        """
        f = self.cache.schema[name]

        def read(run: Run) -> NDArray[np.uint8]:
            values, lengths = _values(self.cache.shard(run.shard), name, f, run, dtype)
            if padded_to is not None:
                values = _pad(values, lengths, padded_to)
            return _bytes(values)

        what = f"reading {name!r} of {self.cache.path}"
        yield from map_in_order(read, self._parts(name, begin, end), what=what, threads=THREADS)

    def _parts(self, name: str, begin: int, end: int) -> Iterator[Run]:
        """Runs of about `PIECE_BYTES`."""
        f = self.cache.schema[name]
        for run in self.between(begin, end):
            step = max(1, PIECE_BYTES // max(1, f.size_bytes())) if not f.ragged else None
            at = 0
            while at < run.count:
                some = min(step, run.count - at) if step else self._fitting(name, f, run, at)
                yield Run(
                    shard=run.shard,
                    row=run.row + at,
                    first=run.first + at,
                    number=run.number + at,
                    count=some,
                )
                at += some

    def _fitting(self, name: str, f: Field, run: Run, at: int) -> int:
        """Records from `at` on of a ragged field that are a piece."""
        offsets = self.cache.shard(run.shard).offsets(name)
        first = run.row + at
        most = int(offsets[first]) + PIECE_BYTES // max(1, f.row_bytes)
        return min(max(1, int(np.searchsorted(offsets, most, side="right")) - 1 - first), run.count - at)


def _values(shard: Shard, name: str, f: Field, run: Run, dtype: str) -> tuple[Tensor, list[int]]:
    """Values of a run one after another, `(steps, *shape)` or flat for packed ones, and steps of each."""
    lengths = [shard.length(name, run.row + k) for k in range(run.count)]
    raw = _rows(shard, name, run)
    if not f.packed:
        return _shaped(from_array(raw.view(numpy_dtype(f.dtype)), f.dtype), f), lengths
    scales: Any = _rows(shard, name + SCALE_SUFFIX, run)
    exact = unpack_rows(f, torch.from_numpy(raw.view(np.int8)), torch.from_numpy(scales.view(np.float32)))
    values = exact.to(torch_dtype(dtype))
    if dtype != "float32" and not bool(torch.isfinite(values).all()):
        raise RecordError(
            f"a record among the samples {run.number} to {run.number + run.count - 1} holds "
            f"{float(exact.abs().max()):.4g} in {name!r}, which {dtype} cannot hold. Choose packed='float32'"
        )
    return _shaped(values, f), lengths


def _rows(shard: Shard, name: str, run: Run) -> NDArray[np.uint8]:
    """The bytes of one column of consecutive rows, verified."""
    step = shard.columns[name].field.row_bytes
    sizes = [shard.length(name, run.row + k) * step for k in range(run.count)]
    ends = np.cumsum([0, *sizes]).tolist()
    data = np.empty(ends[-1], np.uint8)
    view: Any = data.data
    outs = [view[begin:end] for begin, end in pairwise(ends)]
    reader = shard.fields[name]
    if not reader.rows(run.row, outs, "always", wait=False):
        reader.rows(run.row, outs, "always")
    return data


def _shaped(values: Tensor, f: Field) -> Tensor:
    return values.reshape(-1, *(f.shape[1:] if f.shape else ()))


def _pad(values: Tensor, lengths: list[int], to: int) -> Tensor:
    """`(records, to, *shape)`: each record's steps, then zeros."""
    out = values.new_zeros((len(lengths), to, *values.shape[1:]))
    for own, steps in zip(out, values.split(lengths), strict=True):
        own[: len(steps)] = steps
    return out


def _bytes(values: Tensor) -> NDArray[np.uint8]:
    return values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)
