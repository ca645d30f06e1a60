"""Columns of Arrow tables as fields of samples; what Parquet files and Hugging Face datasets have in common.

numbers, bool              a scalar
list of numbers            an array of varying length; of a fixed size: an array of that shape
binary, {bytes, path}      the bytes, uint8 of varying length (how datasets keep images and sound)
struct                     its members, as `<column>.<member>`

Text, dates and null are no numbers: a column of text is left out by naming the others, a null is an error of
its row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field, Sample
from stoker.sources.dtypes import read_as, read_dtype
from stoker.sources.given import listed

_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowField:
    """One field of every sample, and where it is in a row."""

    name: str
    path: tuple[str, ...]
    """Column, then members of structs."""
    field: Field
    dtype: np.dtype[Any]
    """What values become."""
    narrowed: bool
    """Whether they have more digits in the table."""


def import_arrow(what: str) -> Any:
    """The module `pyarrow`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{what} needs pyarrow, which is not installed. Run pip install 'stoker[parquet]'"
        ) from error


def checked_columns(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """What a user gave as the names of columns.

    Raises:
        ConfigError: It is text, or names none.
    """
    names = listed(columns)
    if columns is not None and (not names or not all(isinstance(name, str) for name in names)):
        raise ConfigError(f"columns is {columns!r}. Expected a list of names, as columns=['u', 'v']")
    return None if columns is None else tuple(columns)


def fields_of(schema: Any, columns: Sequence[str] | None, *, where: str) -> tuple[ArrowField, ...]:
    """The fields of the columns of an Arrow schema, in their order.

    Args:
        schema: Of the table.
        columns: Which; None: all.
        where: Names the table in messages.

    Raises:
        SourceError: A column is not there, or holds no numbers, or two fields have one name.
    """
    names = list(schema.names)
    wanted = names if columns is None else list(columns)
    if twice := sorted({name for name in wanted if names.count(name) > 1}):
        raise SourceError(
            f"{where} has several columns named {', '.join(twice)}. Rename them, or name the others with "
            "columns="
        )
    if missing := [name for name in wanted if name not in names]:
        raise SourceError(f"{where} has no column {', '.join(missing)}. It has {', '.join(names)}")
    found: list[ArrowField] = []
    refused: dict[str, str] = {}
    for name in wanted:
        fields = [*_walk(name, (name,), schema.field(name).type)]
        if bad := next((field for field in fields if isinstance(field, str)), None):
            refused[name] = bad
        found += [field for field in fields if isinstance(field, ArrowField)]
    if refused:
        rest = [name for name in wanted if name not in refused]
        shown = ", ".join(f"{name} is {why}" for name, why in refused.items())
        cure = f"Name the columns to read, as columns={rest}" if rest else "Convert them when it is written"
        raise SourceError(f"{where}: {shown}, and a store holds numbers. {cure}")
    every = [field.name for field in found]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise SourceError(
            f"{where}: {', '.join(twice)} occurs twice: members of a struct are named STRUCT.MEMBER. "
            f"Rename one, or leave it out with {arg('columns', setting='data.parquet.columns')}"
        )
    if narrowed := [field.name for field in found if field.narrowed]:
        _log.warning("%s: float64 is read as float32: %s", where, ", ".join(narrowed))
    return tuple(found)


def _walk(name: str, path: tuple[str, ...], kind: Any) -> Iterator[ArrowField | str]:
    """Fields of one column, or what is wrong with it."""
    types = import_module("pyarrow").types
    if types.is_struct(kind):
        members = [(kind.field(i).name, kind.field(i).type) for i in range(kind.num_fields)]
        if {member for member, _ in members} == {"bytes", "path"}:
            yield from _walk(name, (*path, "bytes"), dict(members)["bytes"])
            return
        for member, inner in members:
            yield from _walk(f"{name}.{member}", (*path, member), inner)
        return
    found = _field(kind, types)
    if found is None:
        yield str(kind)
    else:
        field, dtype, narrowed = found
        yield ArrowField(name=name, path=path, field=field, dtype=dtype, narrowed=narrowed)


def _field(kind: Any, types: Any) -> tuple[Field, np.dtype[Any], bool] | None:
    """Return the field of a column, what its values become, and whether they lose digits so."""
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Field(shape=(-1,), dtype="uint8", ragged=True), np.dtype(np.uint8), False
    shape: list[int] = []
    if (own := getattr(kind, "shape", None)) and hasattr(kind, "value_type"):  # a tensor of a fixed shape
        shape, kind = list(own), kind.value_type
    elif own and hasattr(kind, "storage_type"):  # datasets' Array2D and the like
        kind = kind.storage_type
        while types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        shape = [-1 if size is None else int(size) for size in own]
    else:
        if types.is_list(kind) or types.is_large_list(kind):
            shape, kind = [-1], kind.value_type
        while types.is_fixed_size_list(kind):
            shape, kind = [*shape, kind.list_size], kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    try:
        stored = np.dtype(kind.to_pandas_dtype())
        # One number keeps all its digits: a time since 1970 has more than float32 holds.
        dtype = read_dtype(stored, where="") if shape or stored != np.float64 else stored
    except SourceError:
        return None
    if -1 in shape[1:]:
        return None
    return (
        Field(shape=tuple(shape), dtype=dtype.name, ragged=-1 in shape),
        dtype,
        dtype != stored == np.float64,
    )


def sample_of(table: Any, row: int, fields: Sequence[ArrowField], *, where: str) -> Sample:
    """One row of an Arrow table as a sample.

    Raises:
        SourceError: A value is null, or has another shape than its column says; names row and column.
    """
    sample: Sample = {}
    for field in fields:
        value = table.column(field.path[0])[row]
        for member in field.path[1:]:
            value = None if not value.is_valid else value[member]
            if value is None:
                break
        at = f"{where}, column {'.'.join(field.path)!r}"
        if value is None or not value.is_valid:
            hint = (
                " (a path to a file outside the table is not followed)" if field.path[-1] == "bytes" else ""
            )
            raise SourceError(f"{at} is null{hint}. Fill it, or leave the row or the column out")
        sample[field.name] = _value(value, field, at)
    return sample


def _value(value: Any, field: ArrowField, where: str) -> NDArray[Any]:
    shape, dtype = field.field.shape, field.dtype
    if not shape:
        return np.asarray(value.as_py(), dtype=dtype)
    buffer = getattr(value, "as_buffer", None)
    if buffer is not None:
        return np.frombuffer(buffer() or b"", dtype=np.uint8).copy()
    inner = getattr(value, "value", value) if hasattr(value.type, "storage_type") else value
    values = inner.values
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        if values.null_count:
            break
        values = values.flatten()
    if values.null_count:
        raise SourceError(f"{where} holds a null. Fill it, or leave the row out")
    flat = read_as(values.to_numpy(zero_copy_only=False), dtype, where=where)
    each = math.prod(size for size in shape if size >= 0)
    if len(flat) % each if field.field.ragged else len(flat) != each:
        raise SourceError(f"{where} has {len(flat)} numbers, its shape is {shape}. Fix or leave out the row")
    return flat.reshape(shape)
