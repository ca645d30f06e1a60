"""Rules that make fields from the columns of rows: numbers, words, times, bytes, arrays, lists, places."""

from __future__ import annotations

import datetime
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from json import detect_encoding
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stoker.schema import FLOATS, Field, Json, Sample, Schema
from stoker.sources.sql.query import Pick, picked_entries, refuse_constant, value_at
from stoker.sources.sql.rows import (
    BOOL,
    BYTES,
    FLOAT,
    FOREVER_US,
    INT,
    JSON,
    NAMES,
    NULL,
    NUMBERS,
    PICKED,
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
class RowBatch:
    """Values of some rows by column, and what rules have found in them for others."""

    columns: Mapping[str, Values]
    count: int
    centroids: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """Latitude and longitude in degrees, `(count, 2)`, by the field that has places."""

    @classmethod
    def one(cls, values: Mapping[str, Value]) -> RowBatch:
        """Return a single row."""
        return cls(columns={name: Values([tag], [value]) for name, (tag, value) in values.items()}, count=1)


class Rule(Protocol):
    """A way to make one field, or a few, from rows."""

    @property
    def field(self) -> str:
        """The field that it is named by."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads."""
        ...

    def schema(self) -> Schema:
        """Return fields that it makes."""
        ...

    def make(self, rows: RowBatch) -> Sample:
        """Return the fields, `(count, *shape)`; floats may be float64 still, and are not standardized.

        A row's values do not depend on its neighbors, to the last bit.

        Raises:
            MalformedError: A value is not as declared. Which row's is not said: ask for them one by one.
        """
        ...

    def to_json(self) -> Json:
        """Return the rule as it goes into the recipe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRule:
    """A rule that reads one column."""

    field: str
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerRule(ColumnRule, ABC):
    """A value as an int64 scalar."""

    null: int | None = None
    """The value for NULL; None: NULL is malformed."""

    def schema(self) -> Schema:
        """Return an int64 scalar."""
        return {self.field: Field(shape=(), dtype="int64")}

    def make(self, rows: RowBatch) -> Sample:
        """Return the integers."""
        column = rows.columns[self.column]
        found = [
            self.null if value.tag == NULL and self.null is not None else self._integer(value)
            for value in column.each()
        ]
        return {self.field: np.array(found, np.int64)}

    @abstractmethod
    def _integer(self, value: Value) -> int:
        """Return the integer of a value that is not NULL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRule(ColumnRule, ABC):
    """A value as an array of the declared shape."""

    dtype: str
    shape: tuple[int, ...]

    def schema(self) -> Schema:
        """Return an array of the declared shape."""
        return {self.field: Field(shape=self.shape, dtype=self.dtype)}

    def make(self, rows: RowBatch) -> Sample:
        """Return the arrays."""
        return {self.field: np.stack([*map(self._array, rows.columns[self.column].each())])}

    @abstractmethod
    def _array(self, value: Value) -> NDArray[Any]:
        """Return the array of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRule(ColumnRule):
    """A number or a truth value."""

    dtype: str
    null: float | str | None = None
    """The value for NULL: a number, or `mask`; None: NULL is malformed."""
    nan: bool = False
    """Let NaN and infinities through."""
    standardize: bool = False

    def schema(self) -> Schema:
        """Return a scalar; with `null="mask"` also `<field>_known`."""
        known = {f"{self.field}_known": Field(shape=(), dtype="bool")} if self.null == "mask" else {}
        return {self.field: Field(shape=(), dtype=self.dtype), **known}

    def make(self, rows: RowBatch) -> Sample:
        """Return the values; 0 where NULL is masked."""
        column = rows.columns[self.column]
        if self.null is None and NULL in column.tags:
            raise MalformedError(
                self.column,
                "is NULL, expected a number: null=VALUE or null='mask' in its rule lets it through",
            )
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
class WordsRule(IntegerRule):
    """Text as its place in a list."""

    words: tuple[str, ...]

    def _integer(self, value: Value) -> int:
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
class TextBytesRule(ColumnRule):
    """Text as its UTF-8 bytes, of varying length."""

    def schema(self) -> Schema:
        """Return a ragged field of bytes."""
        return {self.field: Field(shape=(-1,), dtype="uint8", ragged=True)}

    def make(self, rows: RowBatch) -> Sample:
        """Return the bytes; those of several rows padded with zeros to the longest."""
        found = [self._bytes(value) for value in rows.columns[self.column].each()]
        made = np.zeros((len(found), max(map(len, found), default=0)), np.uint8)
        for row, data in zip(made, found, strict=True):
            row[: len(data)] = np.frombuffer(data, np.uint8)
        return {self.field: made}

    def _bytes(self, value: Value) -> bytes:
        if value.tag != TEXT:
            raise MalformedError(self.column, f"is {NAMES[value.tag]}, expected text")
        return text_of(value.value, self.column).encode()

    def to_json(self) -> Json:
        """Column, and that it is text."""
        return {"column": self.column, "text": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampRule(IntegerRule):
    """A moment, as a whole number since 1970 UTC: a time, ISO 8601 text, or seconds since 1970."""

    unit: str

    def _integer(self, value: Value) -> int:
        tag, found = value
        if tag == TIME:
            micros = int(found)
        elif tag in (INT, FLOAT) and math.isfinite(found):
            micros = round(found * 1_000_000)
        elif tag == TEXT:
            micros = _iso_micros(text_of(found, self.column), self.column)
        else:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected a time")
        if not abs(micros) < FOREVER_US:
            raise MalformedError(self.column, "is an infinite time")
        return micros // UNITS[self.unit]

    def to_json(self) -> Json:
        """Column and unit."""
        return {"column": self.column, "timestamp": self.unit, "null": self.null}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesRule(ArrayRule):
    """Bytes as an array, in the order of this kind of machine (little end first)."""

    def _array(self, value: Value) -> NDArray[Any]:
        tag, data = value
        if tag != BYTES:
            raise MalformedError(self.column, f"is {NAMES[tag]}, expected bytes")
        dtype = np.dtype(self.dtype)
        wanted = math.prod(self.shape) * dtype.itemsize
        if len(data) != wanted:
            shown = f"{self.dtype} of shape {self.shape}"
            raise MalformedError(self.column, f"has {len(data):,} bytes, expected {wanted:,}: {shown}")
        return np.frombuffer(data, dtype).reshape(self.shape)

    def to_json(self) -> Json:
        """Column, dtype and shape."""
        return {"column": self.column, "bytes": self.dtype, "shape": list(self.shape)}


def numbers_of(column: Values, dtype: str, name: str, *, nan: bool = False, null: Any = None) -> NDArray[Any]:
    """Return a column as numbers of `dtype`, floats as float64; `null` stands for NULL.

    Raises:
        MalformedError: A value is not such a number.
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
    # One by one, to name the value that is wrong.
    known = (v if t == NULL and null is not None else number_of(Value(t, v), dtype, name, nan=nan)
             for t, v in zip(column.tags, values, strict=True))  # fmt: skip
    return np.array([*known], "float64" if dtype in FLOATS else dtype)


@cache
def _whole_range(dtype: str) -> tuple[int, int]:
    return (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def number_of(value: Value, dtype: str, column: str, *, nan: bool = False) -> Any:
    """Return a value as a number of `dtype`.

    Raises:
        MalformedError: It is not a number, does not fit, or is not finite.
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
    """Return text, where it is sound UTF-8.

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


# ----------------------------------------------------------------------------------------------------------
# JSON columns: arrays of numbers, and lists of objects as padded arrays with a mask.
#
# Places are turned into meters north and east of the centroid of those entries that count, on a sphere,
# with degrees of longitude as long as they are at that latitude, the shorter way round.


METRES = 6_371_008.8 * math.pi / 180
"""Meters in a degree of latitude, on a sphere of the Earth's mean radius (IUGG)."""
_LARGEST_LIST = float(np.finfo(np.float32).max)
_MARK = b"\xef"
"""Begins the mark that some programs put before text in UTF-8."""
NORTH, EAST = "@north", "@east"
"""Features that are made of places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One number of each entry."""

    path: str
    """Names joined by dots, `snr_db.mean`; or `@north`, `@east`."""
    missing: float | None = None
    """The value where an entry has no number; None: such a row is malformed."""
    low: float = 0.0
    high: float = 1.0
    """Values that become 0 and 1; others are scaled along, and never cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesRule(ColumnRule):
    """A list of objects, one row of numbers for each, filled up with zeros."""

    most: int
    """Entries at most; a row with more is malformed."""
    features: tuple[Feature, ...]
    mask: str
    """Name of the field that is True where an entry is missing or does not count."""
    present: str | None = None
    """Path to what says whether an entry counts."""
    place: tuple[str, str] | None = None
    """Paths to latitude and longitude in degrees."""
    standardize: tuple[str, ...] = ()
    """Paths of the features that are standardized."""

    def schema(self) -> Schema:
        """Return `(most, features)` float32, and the mask."""
        return {
            self.field: Field(shape=(self.most, len(self.features)), dtype="float32"),
            self.mask: Field(shape=(self.most,), dtype="bool"),
        }

    @property
    def pick(self) -> Pick:
        """The parts of the column that it uses."""
        paths = tuple(map(_steps, self._paths))
        truth = None if self.present is None else _steps(self.present)
        return Pick(column=self.column, most=self.most, paths=paths, truth=truth)

    @property
    def _paths(self) -> list[str]:
        """Each path that is used, once: features, the place, what says whether an entry counts."""
        wanted = [feature.path for feature in self.features if feature.path not in (NORTH, EAST)]
        return list(dict.fromkeys([*wanted, *(self.place or ()), *([self.present] if self.present else [])]))

    def make(self, rows: RowBatch) -> Sample:
        """Features of all entries in their order; the centroids are left in `rows`."""
        raw, counts = self._numbers(rows.columns[self.column])
        there = np.arange(self.most) < counts[:, None]
        mask = ~there | self._absent(raw, there)
        if mask.all(1).any():
            raise MalformedError(self.column, f"has {counts.min()} entries and none that counts")
        north, east = self._places(raw, there, mask, rows)
        values = np.zeros((rows.count, self.most, len(self.features)))
        for number, feature in enumerate(self.features):
            if feature.path in (NORTH, EAST):
                values[..., number] = north if feature.path == NORTH else east
                continue
            column = self._filled(raw, feature.path, there, feature.missing)
            values[..., number] = np.where(there, (column - feature.low) / (feature.high - feature.low), 0.0)
        return {self.field: values, self.mask: mask}

    def to_json(self) -> Json:
        """Return all of the rule."""
        features: list[Json] = [[f.path, f.missing, f.low, f.high] for f in self.features]
        return {
            "column": self.column, "list": self.most, "features": features, "mask": self.mask,
            "present": self.present, "place": None if self.place is None else list(self.place),
            "standardize": list(self.standardize),
        }  # fmt: skip

    def _numbers(self, column: Values) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the number at each path, `(n, most, paths)`, NaN for none, and the entries of each row."""
        paths = self._paths
        known = column.values if {*column.tags} == {NUMBERS} else []
        flat = np.frombuffer(b"".join(known), "<f8").reshape(-1, len(paths))
        counts = np.array([*map(len, known)]) // (8 * len(paths))
        if not known or (np.abs(flat) > _LARGEST_LIST).any():
            lists = [[self._checked(e, paths) for e in self._entries(v, paths)] for v in column.each()]
            flat = np.array([entry for entries in lists for entry in entries], np.float64)
            flat, counts = flat.reshape(-1, len(paths)), np.array([*map(len, lists)])
        raw = np.full((len(counts), self.most, len(paths)), np.nan)
        raw[np.arange(self.most) < counts[:, None]] = flat
        return raw, counts

    def _entries(self, value: Value, paths: Sequence[str]) -> list[list[Any]]:
        """Return the value at each path of each entry."""
        if value.tag == NUMBERS:
            numbers = np.frombuffer(value.value, "<f8").reshape(-1, len(paths))
            return [[None if math.isnan(n) else n for n in entry] for entry in numbers.tolist()]
        found = parsed(value, self.column)
        if value.tag == PICKED:
            return picked_entries(found)
        entries = cast("list[Any]", found) if isinstance(found, list) else None
        if entries is None or not all(isinstance(entry, dict) for entry in entries):
            raise MalformedError(self.column, "is not a JSON list of objects")
        if len(entries) > self.most:
            raise MalformedError(self.column, f"has {len(entries)} entries, expected {self.most} at most")
        return [[value_at(entry, _steps(path)) for path in paths] for entry in entries]

    def _checked(self, entry: Sequence[Any], paths: Sequence[str]) -> list[float]:
        return [self._number(value, path) for value, path in zip(entry, paths, strict=True)]

    def _number(self, found: Any, path: str) -> float:
        if found is None:
            return math.nan
        if isinstance(found, bool | int | float):
            return _finite(found, f"{self.column}: {path}")
        expected = "true or false" if path == self.present else "a number"
        raise MalformedError(self.column, f"has {path} = {str(found)[:40]!r}, expected {expected}")

    def _absent(self, raw: NDArray[np.float64], there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Entries that do not count."""
        if self.present is None:
            return np.zeros_like(there)
        said = raw[..., self._paths.index(self.present)]
        odd = there & (said != 0) & (said != 1)
        if odd.any():
            shown = "null" if np.isnan(said[odd][0]) else said[odd][0]
            raise MalformedError(self.column, f"has {self.present} = {shown}, expected true or false")
        return there & (said == 0)

    def _filled(
        self, raw: NDArray[np.float64], path: str, needed: NDArray[np.bool_], missing: float | None
    ) -> NDArray[np.float64]:
        """Return the numbers of a path, `missing` where an entry has none."""
        column = raw[..., self._paths.index(path)]
        gaps = np.isnan(column)
        if missing is None and (gaps & needed).any():
            raise MalformedError(self.column, f"has an entry without {path}, or it is null")
        return np.where(gaps, missing or 0.0, column)

    def _places(
        self, raw: NDArray[np.float64], there: NDArray[np.bool_], mask: NDArray[np.bool_], rows: RowBatch
    ) -> tuple[Any, Any]:
        """Meters north and east of the centroids; entries that do not count may lack a place."""
        if self.place is None:
            return 0.0, 0.0
        latitude, longitude = (self._filled(raw, path, ~mask, None) for path in self.place)
        centers = np.stack([_mean(latitude, ~mask), middle_longitudes(longitude, ~mask)], 1)
        rows.centroids[self.field] = centers
        north, east = metres_from(centers[:, None], latitude, longitude)
        return np.where(mask, 0.0, north), np.where(mask, 0.0, east)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRule:
    """A place in meters north and east of another field's centroid."""

    field: str
    columns: tuple[str, str]
    """Latitude and longitude in degrees."""
    origin: str
    """Field whose centroid it is measured from."""
    standardize: bool = False

    def schema(self) -> Schema:
        """Return `(2,)` float32: north, east."""
        return {self.field: Field(shape=(2,), dtype="float32")}

    def make(self, rows: RowBatch) -> Sample:
        """Meters, float64."""
        latitude, longitude = (numbers_of(rows.columns[name], "float64", name) for name in self.columns)
        for name, values, most in ((self.columns[0], latitude, 90), (self.columns[1], longitude, 180)):
            if not (fits := abs(values) <= most).all():
                raise MalformedError(name, f"is {values[~fits][0]}, expected degrees from -{most} to {most}")
        return {self.field: np.stack(metres_from(rows.centroids[self.origin], latitude, longitude), -1)}

    def to_json(self) -> Json:
        """Return columns and origin."""
        return {
            "columns": list(self.columns), "metres_from": self.origin, "standardize": self.standardize
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CentroidRule:
    """The centroid itself, in degrees."""

    field: str
    origin: str

    @property
    def columns(self) -> tuple[str, ...]:
        """None of its own."""
        return ()

    def schema(self) -> Schema:
        """Return `(2,)` float32: latitude, longitude."""
        return {self.field: Field(shape=(2,), dtype="float32")}

    def make(self, rows: RowBatch) -> Sample:
        """Degrees."""
        return {self.field: rows.centroids[self.origin]}

    def to_json(self) -> Json:
        """Return the field that has the places."""
        return {"centroid_of": self.origin}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonArrayRule(ArrayRule):
    """A JSON array of numbers, nested or not."""

    def _array(self, value: Value) -> NDArray[Any]:
        found = parsed(value, self.column)
        try:
            array: Any = np.asarray(found)
        except ValueError:
            array = None
        if array is None or array.shape != self.shape or array.dtype.kind not in "biuf":
            shape = "uneven" if array is None else f"{array.dtype} {array.shape}"
            raise MalformedError(self.column, f"is {shape}, expected numbers of shape {self.shape}")
        if self.dtype in FLOATS:
            return array.astype(np.float64)
        kind = FLOAT if array.dtype.kind == "f" else INT
        whole = [number_of(Value(kind, v), self.dtype, self.column) for v in array.reshape(-1).tolist()]
        return np.asarray(whole, self.dtype).reshape(self.shape)

    def to_json(self) -> Json:
        """Column, dtype and shape."""
        return {"column": self.column, "json": self.dtype, "shape": list(self.shape)}


def _mean(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean of those that count in each row, added in order: more columns change no bit."""
    total = np.zeros(len(values))
    for place in range(values.shape[1]):
        total = total + np.where(counted[:, place], values[:, place], 0.0)
    return total / counted.sum(1)


def middle_longitudes(longitudes: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """By row the mean of longitudes in degrees, along the arc that holds them all and is the shortest.

    >>> two = np.ones((2, 2), np.bool_)
    >>> middle_longitudes(np.array([[8.0, 10.0], [179.0, -178.0]]), two).tolist()
    [9.0, -179.5]
    """
    spread = np.where(counted, longitudes, -np.inf).max(1) - np.where(counted, longitudes, np.inf).min(1)
    turned, crossing = longitudes.copy(), np.zeros(len(longitudes), np.bool_)
    for row in np.flatnonzero(spread > 180):
        own = longitudes[row]
        ordered = np.sort(own[counted[row]])
        gaps = np.diff(ordered)
        if gaps.max() > 360 - (ordered[-1] - ordered[0]):
            # West of the largest gap they follow the others, past 180 degrees.
            turned[row] = np.where(own <= ordered[gaps.argmax()], own + 360, own)
            crossing[row] = True
    means = _mean(turned, counted)
    return np.where(crossing, _turned(means), means)


def _turned(degrees: Any) -> Any:
    """Return the same angle between -180 and 180 degrees; one in that range keeps every bit."""
    return degrees - 360 * np.round(degrees / 360)


def metres_from(centers: NDArray[np.float64], latitude: Any, longitude: Any) -> tuple[Any, Any]:
    """Meters north and east of `centers`, `(..., 2)`, of places in degrees.

    >>> [round(float(m)) for m in metres_from(np.array([45.0, 8.0]), 46.0, 9.0)]
    [111195, 78627]
    """
    # Python's own cosine: that of numpy differs in the last bits between processors.
    degrees = centers[..., 0]
    angles = map(math.radians, degrees.ravel().tolist())
    cosines = np.array([*map(math.cos, angles)], np.float64).reshape(degrees.shape)
    east = _turned(longitude - centers[..., 1]) * METRES * cosines
    return (latitude - degrees) * METRES, east


def parsed(value: Value, column: str) -> Any:
    """Return a JSON value as Python objects.

    Raises:
        MalformedError: The value is not JSON.
    """
    if value.tag not in (JSON, PICKED, TEXT, BYTES):
        raise MalformedError(column, f"is {NAMES[value.tag]}, expected JSON")
    try:
        encoding = (
            "utf-8" if value.tag != BYTES and value.value[:1] != _MARK else detect_encoding(value.value)
        )
        decoder = _PICKED_DECODER if value.tag == PICKED else _DECODER
        return decoder.decode(value.value.decode(encoding, "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise MalformedError(column, f"is not JSON: {error}") from error


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_PICKED_DECODER = json.JSONDecoder()
"""Of what was written here, where a number may be past the largest float."""


def _finite(value: float, what: str) -> float:
    try:
        return float(
            number_of(Value(BOOL if isinstance(value, bool) else FLOAT, float(value)), "float32", what)
        )
    except OverflowError as error:
        raise MalformedError(what, "is too large for a float") from error


@cache
def _steps(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))
