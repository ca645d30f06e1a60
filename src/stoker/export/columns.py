"""Which tensors an export consists of: arithmetic on a schema and on lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, arg
from stoker.schema import DTYPE_BYTES, Field, Schema
from stoker.units import GIB, format_bytes

To = Literal["safetensors", "tensordict"]
RaggedAs = Literal["nested", "pad"]
PackedAs = Literal["float32", "float16", "bfloat16", "refuse"]
FORMS: tuple[To, ...] = ("safetensors", "tensordict")
RAGGED: tuple[RaggedAs, ...] = ("nested", "pad")
PACKED: tuple[PackedAs, ...] = ("float32", "float16", "bfloat16", "refuse")
INDEX = "index"
"""The tensor of sample numbers, called as in the loader's batches."""
FILE_BYTES = 4 * GIB
"""Bytes of a safetensors file from which on there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What to export, and how what other libraries have no word for is written.

    Raises:
        ConfigError: A value is not one of those that are known.
    """

    to: To
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
        for name, known in (("to", FORMS), ("ragged", (None, *RAGGED)), ("packed", PACKED)):
            if getattr(self, name) not in known:
                words = ", ".join(str(one) for one in known if one)
                raise ConfigError(f"export: {name} is {getattr(self, name)!r}. Known: {words}")
        if self.file_bytes < 1:
            raise ConfigError(f"export: file_bytes is {self.file_bytes}, expected 1 at least")
        if self.records is not None and not 0 <= self.records[0] < self.records[1]:
            raise ConfigError(
                f"export: records {self.records[0]}:{self.records[1]} are none. Expected A:B with 0 <= A < B"
            )


Part = Literal["values", "offsets", "lengths", "index"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
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
    """The fields to export, in the order of their names.

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
    """The dtype that a field is exported as."""
    return settings.packed if f.packed else f.dtype


def tensors_of(
    fields: Schema,
    settings: ExportSettings,
    count: int,
    lengths: Mapping[str, NDArray[np.int64]],
    longest: Mapping[str, int],
) -> list[Tensor]:
    """The tensors over `count` records.

    Args:
        fields, settings: What to export.
        count: How many records.
        lengths: Of these records, per ragged field.
        longest: Steps that each ragged field is padded to.
    """
    found = [Tensor(name=INDEX, field="", part="index", dtype="int64", shape=(count,))]
    for name, f in fields.items():
        dtype = value_dtype(f, settings)
        if not f.ragged:
            found.append(Tensor(name=name, field=name, part="values", dtype=dtype, shape=(count, *f.shape)))
        elif settings.ragged == "pad":
            shape = (count, longest[name], *f.shape[1:])
            found.append(Tensor(name=name, field=name, part="values", dtype=dtype, shape=shape, padded=True))
            found.append(
                Tensor(name=f"{name}.lengths", field=name, part="lengths", dtype="int64", shape=(count,))
            )
        else:
            shape = (int(lengths[name].sum()), *f.shape[1:])
            found.append(Tensor(name=name, field=name, part="values", dtype=dtype, shape=shape))
            found.append(
                Tensor(name=f"{name}.offsets", field=name, part="offsets", dtype="int64", shape=(count + 1,))
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
