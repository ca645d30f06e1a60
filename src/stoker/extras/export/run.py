"""Export a cache: check first, write everything to a temporary folder, and rename it at the end.

Records come in the order of their index, every byte verified as it is read, in pieces, by a few threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, IncompleteError, RecordError, StalledError, arg
from stoker.plugins import find_plugin, plugins_of
from stoker.runtime.disk import explain_disk_errors, free_space
from stoker.runtime.files import make_folder, publish
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.runtime.threads import map_in_order
from stoker.schema import DTYPE_BYTES, SCALE_SUFFIX, Field, Json, JsonResult, Schema, numpy_dtype
from stoker.store import Cache, open_cache
from stoker.store.format import FINGERPRINT, RECIPE_FILE, TENSOR_DTYPES
from stoker.store.remote import local_path
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
        """Yield runs of about `PIECE_BYTES`."""
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
    if not f.quantized:
        return _shaped(from_array(raw.view(numpy_dtype(f.dtype)), f.dtype), f), lengths
    scales: Any = _rows(shard, name + SCALE_SUFFIX, run)
    exact = unpack_rows(f, torch.from_numpy(raw.view(np.int8)), torch.from_numpy(scales.view(np.float32)))
    values = exact.to(torch_dtype(dtype))
    if dtype != "float32" and not bool(torch.isfinite(values).all()):
        raise RecordError(
            f"a record among the samples {run.number} to {run.number + run.count - 1} holds "
            f"{float(exact.abs().max()):.4g} in {name!r}, which {dtype} cannot hold",
            hint="Choose packed='float32'",
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

    Examples:
        >>> from stoker.export import ExportSettings
        >>> ExportSettings(to="safetensors", fields=["latent"], records=(0, 1000)).packed
        'float32'
    """

    to: str
    """`safetensors`, `tensordict`, or an exporter of another package."""
    fields: Sequence[str] | None = None
    """Fields of the records; None: all."""
    records: tuple[int, int] | None = None
    """Sample indices from the first on and below the second; None: all."""
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
                given = arg(name, getattr(self, name), setting=f"--{name}")
                raise ConfigError(f"export: {given} is not known", hint=f"Expected {words}")
        if self.file_bytes < 1:
            raise ConfigError(f"export: file_bytes is {self.file_bytes}, expected 1 at least")
        if self.records is not None and not 0 <= self.records[0] < self.records[1]:
            raise ConfigError(
                f"export: records is {self.records[0]}:{self.records[1]}", hint="Expected A:B with 0 <= A < B"
            )


Part = Literal["values", "offsets", "lengths", "index"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTensor:
    """One tensor of an export, over some of its records."""

    name: str
    """Its name in the file."""
    field: str
    """Field of the records; empty for `index`."""
    part: Part
    """What of the field it holds: `values`, `offsets`, `lengths`; or `index`, the sample indices."""
    dtype: str
    """Name of its dtype, as `float32`."""
    shape: tuple[int, ...]
    """Shape over all its records; axis 0 is records, or steps of all records."""
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
            f"export: there is no field {', '.join(unknown) or 'in the list'}",
            hint=f"Fields: {', '.join(schema)}",
        )
    fields = {name: schema[name] for name in sorted({*wanted})}
    packed = [name for name, f in fields.items() if f.quantized]
    if packed and settings.packed == "refuse":
        raise ConfigError(
            f"export: {', '.join(packed)} of {fields[packed[0]].dtype} with scales, which no other library "
            "decodes",
            hint=f"Choose what they become, {arg('packed', 'float32', setting='--packed')}, or leave them "
            f"out with {arg('fields', setting='--fields')}",
        )
    names = [INDEX]
    for name, f in fields.items():
        names += [name, *([f"{name}.offsets", f"{name}.lengths"] if f.ragged else [])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"export: a field is called {twice[0]!r}, which the export needs for itself", hint="Leave it out"
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
        f"export: {', '.join(lengths)} differ in length from record to record",
        hint=f"Choose {arg('ragged', 'nested', setting='--ragged')} (one after another with offsets, "
        f"{format_bytes(nested)} as stored) or {arg('ragged', 'pad', setting='--ragged')} (zeros up to the "
        f"longest, {format_bytes(padded)})",
    )


def value_dtype(f: Field, settings: ExportSettings) -> str:
    """Return the dtype that a field is exported as."""
    return settings.packed if f.quantized else f.dtype


def tensors_of(
    fields: Schema,
    settings: ExportSettings,
    count: int,
    lengths: Mapping[str, NDArray[np.int64]],
    longest: Mapping[str, int],
) -> list[ExportTensor]:
    """Return the tensors over `count` records, for the `tensors` of an `Exporter`.

    Args:
        fields: What to export, by name.
        settings: In which form.
        count: How many records.
        lengths: Steps of each of these records, by ragged field.
        longest: Steps that each ragged field is padded to.

    Returns:
        The sample indices, then one tensor for each field, two for a ragged one.

    Examples:
        >>> from stoker.export import ExportSettings, tensors_of
        >>> from stoker.schema import Field
        >>> fields = {"x": Field(shape=(3,), dtype="float32")}
        >>> found = tensors_of(fields, ExportSettings(to="safetensors"), 10, {}, {})
        >>> [(tensor.name, tensor.dtype, tensor.shape) for tensor in found]
        [('index', 'int64', (10,)), ('x', 'float32', (10, 3))]
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
    """Return stretches of records of at most `limit` bytes each, and one record at least.

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


# ----------------------------------------------------------------------------------------------------------
# Files of an export while they are made: counted and hashed as they are written.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile(JsonResult):
    """One file of an export."""

    file: str
    """Name in the folder."""
    bytes: int
    """Its size."""
    sha256: str
    """Of all of it, 64 hex digits."""
    records: int
    """Records in it."""
    first: int
    """Sample index of the first record in it."""
    last: int
    """Sample index of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWriter:
    """Writes the files of an export; the `write` of an `Exporter` gets one."""

    folder: Path
    """The temporary folder, which gets its name at the end."""
    records: Records
    """The records to export: `records.count` is their number, and places go from 0 to it."""
    on_write: Callable[[int], None]
    """Called with the number of bytes of each write."""

    def file(self, name: str, between: tuple[int, int], pieces: Iterator[Any]) -> ExportedFile:
        """Write one file, and return its name, size and digest.

        Args:
            name: Name of the file.
            between: Places of its first record, and one past its last.
            pieces: Its bytes, piece by piece.

        Raises:
            ResourceError: No space left.
        """
        digest, size = hashlib.sha256(), 0
        with explain_disk_errors(self.folder), (self.folder / name).open("xb", buffering=0) as file:
            for piece in pieces:
                data = memoryview(piece).cast("B")
                at = 0
                while at < len(data):
                    at += file.write(data[at:])
                digest.update(data)
                size += len(data)
                self.on_write(len(data))
        numbers = self.records.numbers(*between)
        return ExportedFile(
            file=name,
            bytes=size,
            sha256=digest.hexdigest(),
            records=between[1] - between[0],
            first=int(numbers[0]),
            last=int(numbers[-1]),
        )

    def values(
        self, tensor: ExportTensor, between: tuple[int, int], lengths: NDArray[np.int64] | None
    ) -> Iterator[Any]:
        """Yield the verified bytes of a tensor over some records, piece by piece.

        Args:
            tensor: As `Exporter.tensors` returned it.
            between: Places of the first record, and one past the last.
            lengths: Steps of each of these records, for a ragged field; else None.
        """
        if tensor.part == "index":
            yield self.records.numbers(*between).astype("<i8").data
        elif tensor.part == "values":
            to = tensor.shape[1] if tensor.padded else None
            yield from self.records.pieces(tensor.field, tensor.dtype, *between, padded_to=to)
        elif lengths is not None:
            both = {"lengths": lengths, "offsets": np.concatenate([[0], np.cumsum(lengths)])}
            yield both[tensor.part].astype("<i8").data


Lengths: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Steps of each record, for each ragged field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A layout of files, as a plugin of the group `stoker.exporters` names it.

    Examples:
        >>> from stoker.export import Exporter, tensors_of
        >>> def tensors(fields, settings, count, lengths):
        ...     return tensors_of(fields, settings, count, {}, {})
        >>> def write(writer, fields, settings, lengths):
        ...     every = (0, writer.records.count)
        ...     return [
        ...         writer.file(f"{tensor.name}.raw", every, writer.values(tensor, every, None))
        ...         for tensor in tensors(fields, settings, writer.records.count, lengths)
        ...     ]
        >>> RAW = Exporter(tensors=tensors, write=write)  # the object that an entry point names
    """

    tensors: Callable[[Schema, ExportSettings, int, Lengths], list[ExportTensor]]
    """Takes fields, settings, the number of records and the lengths of ragged fields. Returns the tensors of
    the export, for the disk space that they need. Raises `ConfigError` where it cannot hold a field."""
    write: Callable[[ExportWriter, Schema, ExportSettings, Lengths], list[ExportedFile]]
    """Takes an `ExportWriter`, fields, settings and lengths. Writes all files with `ExportWriter.file`, and
    returns what it returned; the manifest is added."""


MANIFEST = "manifest.json"
SPARE_BYTES = 16 * MIB
"""Room for headers, manifest and what the file system keeps of files."""

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export."""

    path: str
    """Folder of the export."""
    to: str
    """Name of the exporter."""
    cache: str
    """Folder of the cache."""
    fingerprint: str
    """That of the cache, 16 hex digits."""
    generation: int
    """Of the cache's index."""
    records: int
    """Records written."""
    bytes: int
    """Size of all files."""
    fields: Mapping[str, Mapping[str, Json]]
    """By field: dtype and shape of a record as stored, dtype as exported, and `ragged` as written."""
    files: tuple[ExportedFile, ...]
    """All but the manifest."""
    quarantined: tuple[Mapping[str, Json], ...]
    """Samples in the range that are not in it: number, stage and error."""
    seconds: float
    """Wall time of the call."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            **self.manifest(),
            "path": self.path,
            "cache": self.cache,
            "seconds": self.seconds,
        }

    def manifest(self) -> dict[str, Json]:
        """Return the content of the manifest, which names no place of this machine."""
        return {
            "to": self.to,
            "fingerprint": self.fingerprint,
            "generation": self.generation,
            "records": self.records,
            "bytes": self.bytes,
            "fields": {name: dict(entry) for name, entry in self.fields.items()},
            "files": [file.to_json() for file in self.files],
            "quarantined": [dict(entry) for entry in self.quarantined],
        }


def export_cache(
    cache: Cache | str | Path,
    out: str | Path,
    settings: ExportSettings,
    *,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the records of a cache as files of another library, in order of their sample indices.

    Every byte is verified as it is read. `out` appears complete or not at all. After a stop at any moment,
    the same call starts again and removes what was left.

    Args:
        cache: A complete one, or the path of one.
        out: A folder that does not exist yet, or is empty.
        settings: What to export, and as what.
        progress: Called with the bytes written so far, and in all.

    Returns:
        What was written, as in the manifest, and how long it took.

    Raises:
        ConfigError: `settings` do not fit the cache; or `out` is a URL, a file, not empty, or inside a cache.
        ReadOnlyError: `out` cannot be made.
        IncompleteError: Records are missing, or the range has none.
        CorruptError: A record is damaged; names it.
        RecordError: A packed value is beyond what its new dtype holds.
        ResourceError: The disk has no room.
        StalledError: Another process exports to the same folder, or storage does not answer.

    Examples:
        >>> import stoker, torch
        >>> from safetensors.torch import load_file
        >>> from stoker.export import ExportSettings, export_cache
        >>> cache = stoker.precompute([{"x": torch.ones(3)}] * 10, None, "caches", name="ones")
        >>> report = export_cache(cache, "exported", ExportSettings(to="safetensors"))
        >>> load_file(f"exported/{report.files[0].file}")["x"].shape
        torch.Size([10, 3])
    """
    begun, out = time.monotonic(), local_path(out, "export: the folder to write to")
    _check_place(out)
    if not isinstance(cache, Cache):
        cache = open_cache(cache)
    if not cache.complete:
        raise IncompleteError(
            f"{cache.path} holds {len(cache)} of {cache.index.count} records", hint="Run precompute first"
        )
    if cache.joined is not None:
        raise ConfigError(
            "export: joined columns are not exported", hint="Export the cache as it was opened first"
        )
    fields = chosen_fields(cache.schema, settings)
    records = Records(cache, settings.records)
    lengths = {name: records.lengths(name) for name, f in fields.items() if f.ragged}
    check_ragged(fields, settings, lengths)
    exporter: Exporter = find_plugin("stoker.exporters", settings.to, "export: to").load()
    total = sum(tensor.nbytes for tensor in exporter.tensors(fields, settings, records.count, lengths))
    with _new_folder(out, total) as folder:
        writer = ExportWriter(folder=folder, records=records, on_write=_counter(progress, total))
        files = exporter.write(writer, fields, settings, lengths)
        report = ExportReport(
            path=str(out),
            to=settings.to,
            cache=str(cache.path),
            fingerprint=cache.fingerprint,
            generation=cache.index.generation,
            records=records.count,
            bytes=sum(file.bytes for file in files),
            fields=_describe(fields, settings),
            files=tuple(files),
            quarantined=tuple(_quarantined(cache, settings.records)),
            seconds=round(time.monotonic() - begun, 3),
        )
        (folder / MANIFEST).write_text(json.dumps(report.manifest(), indent=2) + "\n")
    return report


def _describe(fields: Schema, settings: ExportSettings) -> dict[str, dict[str, Json]]:
    return {
        name: {
            "stored": f.dtype,
            "dtype": value_dtype(f, settings),
            "shape": list(f.shape),
            "ragged": settings.ragged if f.ragged else None,
        }
        for name, f in fields.items()
    }


def _quarantined(cache: Cache, between: tuple[int, int] | None) -> list[dict[str, Json]]:
    low, high = between or (0, cache.recipe.count)
    return [
        {"number": number, "stage": failure.stage, "error": failure.error}
        for number, failure in sorted(cache.quarantined.items())
        if low <= number < high
    ]


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, max(total, done))

    return wrote


def _check_place(out: Path) -> None:
    """Check that the folder does not exist or is empty, and is outside of every cache.

    Raises:
        ConfigError: It is not so.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"export: {out} is a file", hint="Choose a folder that does not exist, or is empty")
    own = out.resolve()
    for folder in (own, *own.parents):
        recipes = (folder / RECIPE_FILE, *folder.glob(f"{'[0-9a-f]' * 16}/{RECIPE_FILE}"))
        if any(FINGERPRINT.fullmatch(recipe.parent.name) and recipe.exists() for recipe in recipes):
            raise ConfigError(
                f"export: {out} is in {folder}, which is a cache: its files are Stoker's own",
                hint="Choose a folder outside of it",
            )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"export: {out} exists and is not empty", hint="Choose another folder, or remove it"
        )


@contextmanager
def _new_folder(out: Path, size_bytes: int) -> Generator[Path]:
    """Yield a temporary folder, which becomes `out` when the block ends without an error."""
    make_folder(out.parent)
    _check_room(out, size_bytes)
    temporary = make_folder(out.with_name(f".{out.name}.export"))
    with lock_folder(temporary, "export") as got:
        if not got:
            raise StalledError(
                f"export: {lock_holder(temporary, 'export')} is exporting to {out}",
                hint="Wait for it, or choose another folder",
            )
        try:
            for left in temporary.iterdir():  # by an export that was killed
                if not left.name.startswith(".claim-"):
                    left.unlink()
            with explain_disk_errors(out):
                yield temporary
                publish(temporary, out)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(temporary)
            raise
        with suppress(
            OSError
        ):  # only now: without it the folder could be taken for one left by a killed export
            (out / ".claim-export").unlink()


def _check_room(out: Path, size_bytes: int) -> None:
    free_space(out.parent).require(
        out.parent,
        size_bytes,
        "the export needs",
        reserve_bytes=SPARE_BYTES,
        advice="choose another folder, or export a part (records, fields)",
    )


# ----------------------------------------------------------------------------------------------------------
# Plain safetensors files: each field one tensor over all records, or over those in a file of several.
#
# One file is `records.safetensors`. Several have the form in which large models are published: files
# `records-00001-of-00003.safetensors`, tensors named apart by the file's number (`latent.00001`), and
# `records.safetensors.index.json`, which says in which file each tensor is.


NAME = "records"
ALIGN = 8
"""Tensors of the widest items come first, after a header of a multiple of this: so all are aligned."""


def tensors_by_file(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[list[ExportTensor]]:
    """Return the tensors of each file; `lengths`: of all records, per ragged field."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    return [
        tensors_of(fields, settings, end - begin, _between(lengths, begin, end), longest)
        for begin, end in file_bounds(fields, settings, count, lengths)
    ]


def file_bounds(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[tuple[int, int]]:
    """Return the places of the records in each file."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    nothing = {name: np.zeros(1, np.int64) for name in lengths}
    one = sum(tensor.nbytes for tensor in tensors_of(fields, settings, 1, nothing, longest))
    if settings.ragged == "pad" or not lengths:
        return cut(one, count, settings.file_bytes)
    sizes = np.full(count, one, np.int64)
    for tensor in tensors_of(fields, settings, 1, {name: np.ones(1, np.int64) for name in lengths}, longest):
        if tensor.field in lengths and tensor.part == "values":
            sizes += lengths[tensor.field] * tensor.nbytes
    return cut(sizes, count, settings.file_bytes)


def write_safetensors(
    writer: ExportWriter, fields: Schema, settings: ExportSettings, lengths: Lengths
) -> list[ExportedFile]:
    """Write all files; returns what they are, the index apart.

    Raises:
        StokerError: As `Records.pieces`; or the disk has no room.
    """
    cuts = file_bounds(fields, settings, writer.records.count, lengths)
    of_each = tensors_by_file(fields, settings, writer.records.count, lengths)
    found: list[ExportedFile] = []
    weight_map: dict[str, str] = {}
    for i, (between, tensors) in enumerate(zip(cuts, of_each, strict=True), 1):
        name = f"{NAME}-{i:05d}-of-{len(cuts):05d}.safetensors" if len(cuts) > 1 else f"{NAME}.safetensors"
        suffix = f".{i:05d}" if len(cuts) > 1 else ""
        own = _between(lengths, *between)
        found.append(writer.file(name, between, _pieces(writer, tensors, between, own, suffix)))
        weight_map |= {tensor.name + suffix: name for tensor in tensors}
    if len(cuts) > 1:
        total = sum(tensor.nbytes for tensors in of_each for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (writer.folder / f"{NAME}.safetensors.index.json").write_text(text + "\n")
    return found


def _between(lengths: Lengths, begin: int, end: int) -> dict[str, NDArray[np.int64]]:
    return {name: own[begin:end] for name, own in lengths.items()}


def _pieces(
    writer: ExportWriter,
    tensors: list[ExportTensor],
    between: tuple[int, int],
    lengths: Lengths,
    suffix: str,
) -> Iterator[Any]:
    """Yield the bytes of one file."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name + suffix] = {
            "dtype": TENSOR_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGN) * ALIGN)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered:
        yield from writer.values(tensor, between, lengths.get(tensor.field))


def _tensors_of_all_files(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[ExportTensor]:
    files = tensors_by_file(fields, settings, count, lengths)
    return [tensor for tensors in files for tensor in tensors]


SAFETENSORS = Exporter(tensors=_tensors_of_all_files, write=write_safetensors)

# ----------------------------------------------------------------------------------------------------------
# The memory-mapped layout of tensordict: `TensorDict.load_memmap(folder)` reads it back.
#
# A file of raw values per tensor, `<name>.memmap`, and `meta.json`, which has shape and dtype of each and
# the batch size. Written by its documented form, so that tensordict need not be installed here.


META = "meta.json"
TAKEN = ("shape", "device")
"""Keys of `meta.json` in addition to the names of tensors. Its other own keys begin with `_`."""


def tensors(fields: Schema, settings: ExportSettings, count: int, lengths: Lengths) -> list[ExportTensor]:
    """Return the tensors; `lengths`: of all records, per ragged field.

    Raises:
        ConfigError: A name cannot be one of a file, or means something else in `meta.json`.
    """
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    found = tensors_of(fields, settings, count, lengths, longest)
    for tensor in found:
        if tensor.name in TAKEN or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tensor.name):
            raise ConfigError(
                f"export: a field is called {tensor.name!r}, which the layout of tensordict has no file "
                "name for",
                hint=f"Leave it out with {arg('fields', setting='--fields')}, or export to safetensors",
            )
    return found


def write_tensordict(
    writer: ExportWriter, fields: Schema, settings: ExportSettings, lengths: Lengths
) -> list[ExportedFile]:
    """Write a file for each tensor, then `meta.json`.

    Raises:
        StokerError: As `Records.pieces`; or the disk has no room.
    """
    count = writer.records.count
    meta: dict[str, Any] = {}
    found: list[ExportedFile] = []
    for tensor in tensors(fields, settings, count, lengths):
        meta[tensor.name] = {
            "device": "cpu",
            "shape": list(tensor.shape),
            "dtype": f"torch.{tensor.dtype}",
            "is_nested": False,
        }
        if tensor.nbytes:  # a file of no bytes cannot be mapped: the shape says it all
            pieces = writer.values(tensor, (0, count), lengths.get(tensor.field))
            found.append(writer.file(f"{tensor.name}.memmap", (0, count), pieces))
    # Steps of nested records are not as many as records: then the set has no batch dimension.
    nested = bool(lengths) and settings.ragged == "nested"
    meta |= {
        "shape": [] if nested else [count],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
    }
    (writer.folder / META).write_text(json.dumps(meta) + "\n")
    return found


TENSORDICT = Exporter(tensors=tensors, write=write_tensordict)
