"""Fields made of one value of a row: numbers, text by class, times, bytes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.schema import FLOATS, Field, Json, Sample, Schema
from stoker.sources.sql.rows import (
    BOOL,
    BYTES,
    FLOAT,
    FOREVER_US,
    INT,
    JSON,
    NAMES,
    NULL,
    TEXT,
    TIME,
    Value,
    Values,
    micros_of,
)

UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000}
"""Microseconds in the units of times."""


class MalformedError(Exception):
    """A value is not what its rule says."""

    def __init__(self, column: str, fact: str) -> None:
        super().__init__(fact)
        self.column = column


@dataclass(slots=True, kw_only=True)
class Rows:
    """Values of some rows by column, and what rules have found in them for others."""

    columns: Mapping[str, Values]
    count: int
    centroids: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """Latitude and longitude in degrees, `(count, 2)`, by the field that has places."""

    @classmethod
    def one(cls, values: Mapping[str, Value]) -> Rows:
        """A single row."""
        return cls(columns={name: Values([tag], [value]) for name, (tag, value) in values.items()}, count=1)


class Rule(Protocol):
    """How one field, or a few, come out of rows."""

    @property
    def field(self) -> str:
        """The field that it is named by."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads."""
        ...

    def schema(self) -> Schema:
        """Fields that it makes."""
        ...

    def make(self, rows: Rows) -> Sample:
        """The fields, `(count, *shape)`; floats may be float64 still, and are not standardised.

        A row's values do not depend on its neighbours, to the last bit.

        Raises:
            MalformedError: A value is not as declared. Which row's is not said: ask for them one by one.
        """
        ...

    def to_json(self) -> Json:
        """The rule as it goes into the recipe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number or a truth value."""

    field: str
    column: str
    dtype: str
    null: float | str | None = None
    """What stands for NULL: a number, or `mask`; None: NULL is malformed."""
    nan: bool = False
    """Whether NaN and infinities are let through."""
    standardize: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    def schema(self) -> Schema:
        """A scalar; with `null="mask"` also `<field>_known`."""
        known = {f"{self.field}_known": Field(shape=(), dtype="bool")} if self.null == "mask" else {}
        return {self.field: Field(shape=(), dtype=self.dtype), **known}

    def make(self, rows: Rows) -> Sample:
        """The values; 0 where NULL is masked."""
        column = rows.columns[self.column]
        if self.null is None and NULL in column.tags:
            raise MalformedError(self.column, "is NULL. Give its rule null=VALUE, or null='mask'")
        stand_in = 0 if self.null == "mask" else self.null
        sample: Sample = {
            self.field: numbers_of(column, self.dtype, self.column, nan=self.nan, null=stand_in)
        }
        if self.null == "mask":
            sample[f"{self.field}_known"] = np.array(column.tags) != NULL
        return sample

    def to_json(self) -> Json:
        """Column, dtype, and what stands for NULL."""
        return {"column": self.column, "dtype": self.dtype, "null": self.null, "nan": self.nan,
                "standardize": self.standardize}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Text as its place in a list."""

    field: str
    column: str
    words: tuple[str, ...]
    null: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    def schema(self) -> Schema:
        """An int64 scalar."""
        return {self.field: Field(shape=(), dtype="int64")}

    def make(self, rows: Rows) -> Sample:
        """The numbers of the words."""
        return {self.field: np.array([*map(self._place, rows.columns[self.column].each())], np.int64)}

    def _place(self, value: Value) -> int:
        if value.tag == NULL and self.null is not None:
            return self.null
        if value.tag != TEXT:
            raise MalformedError(self.column, f"is {NAMES[value.tag]}, expected text")
        word = text_of(value.value, self.column)
        if word not in self.words:
            known = ", ".join(self.words[:8]) + (" and others" if len(self.words) > 8 else "")
            raise MalformedError(self.column, f"is {word[:40]!r}, expected one of {known}")
        return self.words.index(word)

    def to_json(self) -> Json:
        """Column and words."""
        return {"column": self.column, "text": list(self.words), "null": self.null}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A moment, as a whole number since 1970 UTC."""

    field: str
    column: str
    unit: str
    null: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    def schema(self) -> Schema:
        """An int64 scalar."""
        return {self.field: Field(shape=(), dtype="int64")}

    def make(self, rows: Rows) -> Sample:
        """Times as they are, ISO 8601 text, or seconds since 1970."""
        return {self.field: np.array([*map(self._time, rows.columns[self.column].each())], np.int64)}

    def _time(self, found: Value) -> int:
        tag, value = found
        if tag == NULL and self.null is not None:
            return self.null
        if tag == TIME:
            micros = int(value)
        elif tag in (INT, FLOAT) and math.isfinite(value):
            micros = round(value * 1_000_000)
        elif tag == TEXT:
            micros = _iso_micros(text_of(value, self.column), self.column)
        else:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected a time")
        if not abs(micros) < FOREVER_US:
            raise MalformedError(self.column, "is an infinite time")
        return micros // UNITS[self.unit]

    def to_json(self) -> Json:
        """Column and unit."""
        return {"column": self.column, "timestamp": self.unit, "null": self.null}


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Bytes as an array, in the order of this kind of machine (little end first)."""

    field: str
    column: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    def schema(self) -> Schema:
        """An array of the declared shape."""
        return {self.field: Field(shape=self.shape, dtype=self.dtype)}

    def make(self, rows: Rows) -> Sample:
        """The bytes as they are."""
        return {self.field: np.stack([*map(self._array, rows.columns[self.column].each())])}

    def _array(self, found: Value) -> NDArray[Any]:
        tag, value = found
        if tag != BYTES:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected bytes")
        dtype = np.dtype(self.dtype)
        wanted = math.prod(self.shape) * dtype.itemsize
        if len(value) != wanted:
            shown = f"{self.dtype} of shape {self.shape}"
            raise MalformedError(self.column, f"has {len(value):,} bytes, expected {wanted:,}: {shown}")
        return np.frombuffer(value, dtype).reshape(self.shape)

    def to_json(self) -> Json:
        """Column, dtype and shape."""
        return {"column": self.column, "bytes": self.dtype, "shape": list(self.shape)}


def numbers_of(column: Values, dtype: str, name: str, *, nan: bool = False, null: Any = None) -> NDArray[Any]:
    """A column as numbers of `dtype`, floats as float64; `null` stands for NULL.

    Raises:
        MalformedError: A value is no such number.
    """
    values = column.values
    tags = {*column.tags}
    if null is not None and NULL in tags:
        values = [null if value is None else value for value in values]
        tags.discard(NULL)
    if tags == {FLOAT} and dtype in FLOATS and not nan:
        found = np.array(values, np.float64)
        if (np.abs(found) <= _LARGEST[dtype]).all():
            return found
    elif tags == {INT} and dtype not in FLOATS:
        low, high = _whole_range(dtype)
        if all(low <= value <= high for value in values):
            return np.array(values, dtype)
    # One by one, to say which is no such number.
    known = (v if t == NULL and null is not None else number_of(Value(t, v), dtype, name, nan=nan)
             for t, v in zip(column.tags, values, strict=True))  # fmt: skip
    return np.array([*known], "float64" if dtype in FLOATS else dtype)


@cache
def _whole_range(dtype: str) -> tuple[int, int]:
    return (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def number_of(value: Value, dtype: str, column: str, *, nan: bool = False) -> Any:
    """A value as a number of `dtype`.

    Raises:
        MalformedError: It is none, does not fit, or is not finite.
    """
    tag, found = value
    if tag not in (INT, FLOAT, BOOL):
        raise MalformedError(column, f"is {NAMES[tag]}{_shown(value)}, expected a number ({dtype})")
    if dtype in FLOATS:
        number = float(found)
        if not nan and not abs(number) <= _LARGEST[dtype]:
            raise MalformedError(column, f"is {number}, expected a finite {dtype}")
        return number
    if isinstance(found, float) and not found.is_integer():
        raise MalformedError(column, f"is {found}, expected a whole number ({dtype})")
    whole = int(found)
    low, high = _whole_range(dtype)
    if not low <= whole <= high:
        raise MalformedError(column, f"is {whole}, expected {low} to {high} ({dtype})")
    return whole


_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.38e38,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


def text_of(data: bytes, column: str) -> str:
    """Text, where it is sound UTF-8.

    Raises:
        MalformedError: It is not.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(column, f"is not UTF-8 at byte {error.start}") from error


def _shown(value: Value) -> str:
    return f" {value.value[:40].decode(errors='replace')!r}" if value.tag in (TEXT, JSON) else ""


def _iso_micros(text: str, column: str) -> int:
    try:
        return micros_of(datetime.datetime.fromisoformat(text))
    except ValueError as error:
        raise MalformedError(column, f"is {text[:40]!r}, expected a time as 2026-01-31T12:00:00") from error
