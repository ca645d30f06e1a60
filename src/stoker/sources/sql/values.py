"""Fields made of one value of a row: numbers, text by class, times, bytes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

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
class Row:
    """Values of one row by column, and what rules have found in it for others."""

    values: Mapping[str, Value]
    centroids: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Latitude and longitude in degrees, by the field that has places."""


class Rule(Protocol):
    """How one field, or a few, come out of a row."""

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

    def make(self, row: Row) -> Sample:
        """The fields; floats may be float64 still, and are not standardised.

        Raises:
            MalformedError: A value is not as declared.
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

    def make(self, row: Row) -> Sample:
        """The value; 0 where NULL is masked."""
        value = row.values[self.column]
        absent = value.tag == NULL
        if absent and self.null is None:
            raise MalformedError(self.column, "is NULL. Give its rule null=VALUE, or null='mask'")
        if absent:
            found: Any = 0 if self.null == "mask" else self.null
        else:
            found = number_of(value, self.dtype, self.column, nan=self.nan)
        dtype = "float64" if self.dtype in FLOATS else self.dtype
        sample: Sample = {self.field: np.asarray(found, dtype)}
        if self.null == "mask":
            sample[f"{self.field}_known"] = np.asarray(not absent)
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

    def make(self, row: Row) -> Sample:
        """The number of the word."""
        tag, value = row.values[self.column]
        if tag == NULL and self.null is not None:
            return {self.field: np.asarray(self.null, np.int64)}
        if tag != TEXT:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected text")
        word = text_of(value, self.column)
        if word not in self.words:
            known = ", ".join(self.words[:8]) + (" and others" if len(self.words) > 8 else "")
            raise MalformedError(self.column, f"is {word[:40]!r}, expected one of {known}")
        return {self.field: np.asarray(self.words.index(word), np.int64)}

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

    def make(self, row: Row) -> Sample:
        """Times as they are, ISO 8601 text, or seconds since 1970."""
        tag, value = row.values[self.column]
        if tag == NULL and self.null is not None:
            return {self.field: np.asarray(self.null, np.int64)}
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
        return {self.field: np.asarray(micros // UNITS[self.unit], np.int64)}

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

    def make(self, row: Row) -> Sample:
        """The bytes as they are."""
        tag, value = row.values[self.column]
        if tag != BYTES:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected bytes")
        dtype = np.dtype(self.dtype)
        wanted = math.prod(self.shape) * dtype.itemsize
        if len(value) != wanted:
            shown = f"{self.dtype} of shape {self.shape}"
            raise MalformedError(self.column, f"has {len(value):,} bytes, expected {wanted:,}: {shown}")
        return {self.field: np.frombuffer(value, dtype).reshape(self.shape).copy()}

    def to_json(self) -> Json:
        """Column, dtype and shape."""
        return {"column": self.column, "bytes": self.dtype, "shape": list(self.shape)}


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
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not low <= whole <= high:
        raise MalformedError(column, f"is {whole}, expected {low} to {high} ({dtype})")
    return whole


_LARGEST = {
    "float16": 65504.0, "bfloat16": 3.38e38, "float32": float(np.finfo(np.float32).max), "float64": math.inf,
}  # fmt: skip


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
