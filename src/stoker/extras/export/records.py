"""Records of a cache in order of number: every byte verified as it is read, in pieces, by a few threads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, IncompleteError, RecordError, arg
from stoker.plugins import plugins_of
from stoker.runtime.threads import map_in_order
from stoker.schema import DTYPE_BYTES, SCALE_SUFFIX, Field, Schema, numpy_dtype
from stoker.store import Cache
from stoker.store.shard import Shard
from stoker.store.values import from_array, torch_dtype, unpack_rows
from stoker.units import GIB, MIB, format_bytes, format_count

PIECE_BYTES = 4 * MIB
"""Bytes of records that are read and handed on at a time, at most; one record at least."""
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRun:
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
        """Take the records of the sample numbers `between`, without those that are quarantined.

        Raises:
            IncompleteError: No record is in that range.
        """
        self.cache = cache
        low, high = between or (0, cache.recipe.count)
        self.runs: list[RecordRun] = []
        self.count = 0
        at = cache.segments
        for shard, row, first, count in zip(
            at.shard.tolist(), at.row.tolist(), at.first.tolist(), at.count.tolist(), strict=True
        ):
            begin, end = max(first, low), min(first + count, high)
            if begin < end:
                run = RecordRun(
                    shard=shard, row=row + begin - first, first=self.count, number=begin, count=end - begin
                )
                self.runs.append(run)
                self.count += run.count
        if not self.count:
            raise IncompleteError(
                f"{cache.path} has no record of the samples {format_count(low)} to {format_count(high - 1)}"
            )

    def between(self, begin: int, end: int) -> Iterator[RecordRun]:
        """Yield the runs of the records at these places."""
        for run in self.runs:
            low, high = max(begin, run.first), min(end, run.first + run.count)
            if low < high:
                skip = low - run.first
                yield RecordRun(
                    shard=run.shard, row=run.row + skip, first=low, number=run.number + skip, count=high - low
                )

    def numbers(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return sample numbers of the records at these places."""
        found = [np.arange(run.number, run.number + run.count) for run in self.between(begin, end)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def lengths(self, field: str) -> NDArray[np.int64]:
        """Return steps of each record in a ragged field."""

        def of_run(run: RecordRun) -> NDArray[np.int64]:
            return np.diff(self.cache.shard(run.shard).offsets(field)[run.row : run.row + run.count + 1])

        what = f"reading the lengths of {self.cache.path}"
        return np.concatenate([np.empty(0, np.int64), *map_in_order(of_run, self.runs, what=what)])

    def pieces(
        self, name: str, dtype: str, begin: int, end: int, padded_to: int | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the values of a field of the records at these places, as bytes, piece by piece.

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

        def read(run: RecordRun) -> NDArray[np.uint8]:
            values, lengths = _values(self.cache.shard(run.shard), name, f, run, dtype)
            if padded_to is not None:
                values = _pad(values, lengths, padded_to)
            return _bytes(values)

        what = f"reading {name!r} of {self.cache.path}"
        yield from map_in_order(read, self._parts(name, begin, end), what=what, threads=THREADS)

    def _parts(self, name: str, begin: int, end: int) -> Iterator[RecordRun]:
        """Runs of about `PIECE_BYTES`."""
        f = self.cache.schema[name]
        for run in self.between(begin, end):
            step = max(1, PIECE_BYTES // max(1, f.size_bytes())) if not f.ragged else None
            at = 0
            while at < run.count:
                some = min(step, run.count - at) if step else self._fitting(name, f, run, at)
                yield RecordRun(
                    shard=run.shard,
                    row=run.row + at,
                    first=run.first + at,
                    number=run.number + at,
                    count=some,
                )
                at += some

    def _fitting(self, name: str, f: Field, run: RecordRun, at: int) -> int:
        """Return how many records of a ragged field, from `at` on, make one piece."""
        offsets = self.cache.shard(run.shard).offsets(name)
        first = run.row + at
        most = int(offsets[first]) + PIECE_BYTES // max(1, f.row_bytes)
        return min(max(1, int(np.searchsorted(offsets, most, side="right")) - 1 - first), run.count - at)


def _values(shard: Shard, name: str, f: Field, run: RecordRun, dtype: str) -> tuple[Tensor, list[int]]:
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


def _rows(shard: Shard, name: str, run: RecordRun) -> NDArray[np.uint8]:
    """Return the bytes of one column of consecutive rows, verified."""
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
    """Return `(records, to, *shape)`: each record's steps, then zeros."""
    out = values.new_zeros((len(lengths), to, *values.shape[1:]))
    for own, steps in zip(out, values.split(lengths), strict=True):
        own[: len(steps)] = steps
    return out


def _bytes(values: Tensor) -> NDArray[np.uint8]:
    return values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)


# ----------------------------------------------------------------------------------------------------------
# Which tensors an export consists of: arithmetic on a schema and on lengths.


RaggedAs = Literal["nested", "pad"]
PackedAs = Literal["float32", "float16", "bfloat16", "refuse"]
RAGGED: tuple[RaggedAs, ...] = ("nested", "pad")
PACKED: tuple[PackedAs, ...] = ("float32", "float16", "bfloat16", "refuse")
INDEX = "index"
"""The tensor of sample numbers, called as in the loader's batches."""
FILE_BYTES = 4 * GIB
"""Bytes of a safetensors file from which on there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What to export, and in which form fields of varying length and quantized ones are written.

    Raises:
        ConfigError: A value is not one of those that are known.
    """

    to: str
    """`safetensors`, `tensordict`, or an exporter of another package."""
    fields: Sequence[str] | None = None
    """Fields of the records; None: all."""
    records: tuple[int, int] | None = None
    """Sample numbers from the first on and below the second; None: all."""
    ragged: RaggedAs | None = None
    """Fields of varying length: `nested` puts the records' steps one after another, with `<field>.offsets`;
    `pad` fills up with zeros to the longest, with `<field>.lengths`. Needed where there is such a field."""
    packed: PackedAs = "float32"
    """What fields stored as int8 or float8 with scales become; `refuse`: they are an error."""
    file_bytes: int = FILE_BYTES
    """Bytes of tensors in one safetensors file, at most, where more than one record is in it."""

    def __post_init__(self) -> None:
        forms = tuple(plugins_of("stoker.exporters"))
        for name, known in (("to", forms), ("ragged", (None, *RAGGED)), ("packed", PACKED)):
            if getattr(self, name) not in known:
                words = ", ".join(str(one) for one in known if one)
                raise ConfigError(f"export: {name} is {getattr(self, name)!r}. Known: {words}")
        if self.file_bytes < 1:
            raise ConfigError(f"export: file_bytes is {self.file_bytes}, expected 1 at least")
        if self.records is not None and not 0 <= self.records[0] < self.records[1]:
            raise ConfigError(
                f"export: records is {self.records[0]}:{self.records[1]}. Expected A:B with 0 <= A < B"
            )


Part = Literal["values", "offsets", "lengths", "index"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTensor:
    """One tensor of an export, over some of its records."""

    name: str
    field: str
    part: Part
    """What of the field it holds; `index`: sample numbers, of no field."""
    dtype: str
    shape: tuple[int, ...]
    padded: bool = False
    """Records of varying length are filled up to the length of axis 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def chosen_fields(schema: Schema, settings: ExportSettings) -> Schema:
    """Return the fields to export, in the order of their names.

    Raises:
        ConfigError: One is unknown, cannot be written as asked, or has a name that the export needs.
    """
    wanted = list(schema) if settings.fields is None else list(settings.fields)
    unknown = [name for name in wanted if name not in schema]
    if unknown or not wanted:
        raise ConfigError(
            f"export: {', '.join(unknown) or 'no field'} was asked for. Fields: {', '.join(schema)}"
        )
    fields = {name: schema[name] for name in sorted({*wanted})}
    packed = [name for name, f in fields.items() if f.packed]
    if packed and settings.packed == "refuse":
        raise ConfigError(
            f"export: {', '.join(packed)} of {fields[packed[0]].dtype} with scales, which no other library "
            f"decodes. Choose what they become, {arg('packed', 'float32', setting='--packed')}, or "
            f"leave them out "
            f"with {arg('fields', setting='--fields')}"
        )
    names = [INDEX]
    for name, f in fields.items():
        names += [name, *([f"{name}.offsets", f"{name}.lengths"] if f.ragged else [])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"export: a field is called {twice[0]!r}, which the export needs for itself. Leave it out"
        )
    return fields


def check_ragged(fields: Schema, settings: ExportSettings, lengths: Mapping[str, NDArray[np.int64]]) -> None:
    """Refuse to choose for the user how fields of varying length are written.

    Raises:
        ConfigError: There is one, and nothing was said; says what each choice takes.
    """
    if settings.ragged is not None or not lengths:
        return
    nested = sum(int(own.sum()) * fields[name].row_bytes for name, own in lengths.items())
    padded = sum(int(own.max(initial=0)) * len(own) * fields[name].row_bytes for name, own in lengths.items())
    raise ConfigError(
        f"export: {', '.join(lengths)} differ in length from record to record. Choose "
        f"{arg('ragged', 'nested', setting='--ragged')} (one "
        f"after another with offsets, {format_bytes(nested)} as stored) or "
        f"{arg('ragged', 'pad', setting='--ragged')} (zeros up to the "
        f"longest, {format_bytes(padded)})"
    )


def value_dtype(f: Field, settings: ExportSettings) -> str:
    """Return the dtype that a field is exported as."""
    return settings.packed if f.packed else f.dtype


def tensors_of(
    fields: Schema,
    settings: ExportSettings,
    count: int,
    lengths: Mapping[str, NDArray[np.int64]],
    longest: Mapping[str, int],
) -> list[ExportTensor]:
    """Return the tensors over `count` records.

    Args:
        fields, settings: What to export.
        count: How many records.
        lengths: Of these records, per ragged field.
        longest: Steps that each ragged field is padded to.
    """
    found = [ExportTensor(name=INDEX, field="", part="index", dtype="int64", shape=(count,))]
    for name, f in fields.items():
        dtype = value_dtype(f, settings)
        if not f.ragged:
            found.append(
                ExportTensor(name=name, field=name, part="values", dtype=dtype, shape=(count, *f.shape))
            )
        elif settings.ragged == "pad":
            shape = (count, longest[name], *f.shape[1:])
            found.append(
                ExportTensor(name=name, field=name, part="values", dtype=dtype, shape=shape, padded=True)
            )
            found.append(
                ExportTensor(
                    name=f"{name}.lengths", field=name, part="lengths", dtype="int64", shape=(count,)
                )
            )
        else:
            shape = (int(lengths[name].sum()), *f.shape[1:])
            found.append(ExportTensor(name=name, field=name, part="values", dtype=dtype, shape=shape))
            found.append(
                ExportTensor(
                    name=f"{name}.offsets", field=name, part="offsets", dtype="int64", shape=(count + 1,)
                )
            )
    return found


def cut(sizes: NDArray[np.int64] | int, count: int, limit: int) -> list[tuple[int, int]]:
    """Stretches of records of at most `limit` bytes each, and one record at least.

    Args:
        sizes: Bytes of each record; one number where all have the same.
        count: How many records there are.
        limit: Bytes.

    >>> cut(3, 5, 7), cut(np.array([3, 9, 1, 1]), 4, 5)
    ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 2), (2, 4)])
    """
    if isinstance(sizes, int):
        step = max(1, limit // max(1, sizes))
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]
    ends = np.cumsum(sizes)
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < count:
        before = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, before + limit, side="right")))
        found.append((begin, stop))
        begin = stop
    return found
