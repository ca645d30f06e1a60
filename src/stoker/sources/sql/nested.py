"""JSON columns: arrays of numbers, and lists of objects as padded arrays with a mask.

Places are turned into metres north and east of the centroid of those entries that count, on a sphere, with
degrees of longitude as long as they are at that latitude, the shorter way round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.schema import FLOATS, Field, Json, Sample, Schema
from stoker.sources.sql.rows import BOOL, BYTES, FLOAT, INT, JSON, NAMES, TEXT, Value
from stoker.sources.sql.values import MalformedError, Row, number_of

METRES = 6_371_008.8 * math.pi / 180
"""Metres in a degree of latitude, on a sphere of the Earth's mean radius (IUGG)."""
NORTH, EAST = "@north", "@east"
"""Features that are made of places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One number of each entry."""

    path: str
    """Names joined by dots, `snr_db.mean`; or `@north`, `@east`."""
    missing: float | None = None
    """What stands where there is none; None: such a row is malformed."""
    low: float = 0.0
    high: float = 1.0
    """Values that become 0 and 1; others are scaled along, and never cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A list of objects, one row of numbers for each, filled up with zeros."""

    field: str
    column: str
    most: int
    """Entries at most; a row with more is malformed."""
    features: tuple[Feature, ...]
    mask: str
    """Name of the field that is True where there is no entry, or one that does not count."""
    present: str | None = None
    """Path to what says whether an entry counts."""
    place: tuple[str, str] | None = None
    """Paths to latitude and longitude in degrees."""
    standardize: tuple[str, ...] = ()
    """Paths of the features that are standardised."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    def schema(self) -> Schema:
        """`(most, features)` float32, and the mask."""
        return {
            self.field: Field(shape=(self.most, len(self.features)), dtype="float32"),
            self.mask: Field(shape=(self.most,), dtype="bool"),
        }

    def make(self, row: Row) -> Sample:
        """Features of all entries in their order; the centroid is left in `row`."""
        entries = self._entries(row.values[self.column])
        mask = np.ones(self.most, np.bool_)
        for place, entry in enumerate(entries):
            mask[place] = self.present is not None and not self._truth(entry, self.present)
        if mask.all():
            raise MalformedError(self.column, f"has {len(entries)} entries and none that counts")
        north, east = self._places(entries, mask, row)
        values = np.zeros((self.most, len(self.features)))
        for place, entry in enumerate(entries):
            for number, feature in enumerate(self.features):
                if feature.path in (NORTH, EAST):
                    values[place, number] = (north if feature.path == NORTH else east)[place]
                else:
                    found = self._number(entry, feature)
                    values[place, number] = (found - feature.low) / (feature.high - feature.low)
        return {self.field: values, self.mask: mask}

    def to_json(self) -> Json:
        """All of the rule."""
        features: list[Json] = [[f.path, f.missing, f.low, f.high] for f in self.features]
        return {
            "column": self.column, "list": self.most, "features": features, "mask": self.mask,
            "present": self.present, "place": None if self.place is None else list(self.place),
            "standardize": list(self.standardize),
        }  # fmt: skip

    def _entries(self, value: Value) -> list[dict[str, Any]]:
        found = parsed(value, self.column)
        entries = cast("list[Any]", found) if isinstance(found, list) else None
        if entries is None or not all(isinstance(entry, dict) for entry in entries):
            raise MalformedError(self.column, "is no JSON list of objects")
        if len(entries) > self.most:
            raise MalformedError(self.column, f"has {len(entries)} entries, expected {self.most} at most")
        return entries

    def _places(self, entries: Sequence[dict[str, Any]], mask: Any, row: Row) -> tuple[Any, Any]:
        """Metres north and east of the centroid; entries that do not count may lack a place."""
        zeros = np.zeros(len(entries))
        if self.place is None:
            return zeros, zeros
        degrees = np.zeros((2, len(entries)))
        for place, entry in enumerate(entries):
            for axis, path in enumerate(self.place):
                absent = 0.0 if mask[place] else None
                degrees[axis, place] = self._number(entry, Feature(path=path, missing=absent))
        counted = ~mask[: len(entries)]
        centre = (float(degrees[0, counted].mean()), middle_longitude(degrees[1, counted]))
        row.centroids[self.field] = centre
        north, east = metres_from(centre, degrees[0], degrees[1])
        return np.where(counted, north, 0.0), np.where(counted, east, 0.0)

    def _number(self, entry: dict[str, Any], feature: Feature) -> float:
        found = _at(entry, feature.path)
        if found is None:
            if feature.missing is None:
                raise MalformedError(self.column, f"has an entry without {feature.path}, or it is null")
            return feature.missing
        if isinstance(found, bool | int | float):
            return _finite(found, f"{self.column}: {feature.path}")
        raise MalformedError(self.column, f"has {feature.path} = {str(found)[:40]!r}, expected a number")

    def _truth(self, entry: dict[str, Any], path: str) -> bool:
        found = _at(entry, path)
        if found not in (True, False):
            raise MalformedError(self.column, f"has {path} = {str(found)[:40]!r}, expected true or false")
        return bool(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in metres north and east of another field's centroid."""

    field: str
    columns: tuple[str, str]
    """Latitude and longitude in degrees."""
    origin: str
    """Field whose centroid it is measured from."""
    standardize: bool = False

    def schema(self) -> Schema:
        """`(2,)` float32: north, east."""
        return {self.field: Field(shape=(2,), dtype="float32")}

    def make(self, row: Row) -> Sample:
        """Metres, float64."""
        latitude, longitude = (
            number_of(row.values[name], "float64", name, nan=False) for name in self.columns
        )
        for name, value, most in ((self.columns[0], latitude, 90), (self.columns[1], longitude, 180)):
            if not abs(value) <= most:
                raise MalformedError(name, f"is {value}, expected degrees from -{most} to {most}")
        return {self.field: np.stack(metres_from(row.centroids[self.origin], latitude, longitude))}

    def to_json(self) -> Json:
        """Columns and origin."""
        return {
            "columns": list(self.columns), "metres_from": self.origin, "standardize": self.standardize
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Centroid:
    """The centroid itself, in degrees."""

    field: str
    origin: str

    @property
    def columns(self) -> tuple[str, ...]:
        """None of its own."""
        return ()

    def schema(self) -> Schema:
        """`(2,)` float32: latitude, longitude."""
        return {self.field: Field(shape=(2,), dtype="float32")}

    def make(self, row: Row) -> Sample:
        """Degrees."""
        return {self.field: np.asarray(row.centroids[self.origin])}

    def to_json(self) -> Json:
        """The field that has the places."""
        return {"centroid_of": self.origin}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A JSON array of numbers, nested or not."""

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
        """The array."""
        found = parsed(row.values[self.column], self.column)
        try:
            array: Any = np.asarray(found)
        except ValueError:
            array = None
        if array is None or array.shape != self.shape or array.dtype.kind not in "biuf":
            shape = "uneven" if array is None else f"{array.dtype} {array.shape}"
            raise MalformedError(self.column, f"is {shape}, expected numbers of shape {self.shape}")
        if self.dtype in FLOATS:
            return {self.field: array.astype(np.float64)}
        kind = FLOAT if array.dtype.kind == "f" else INT
        whole = [number_of(Value(kind, v), self.dtype, self.column) for v in array.reshape(-1).tolist()]
        return {self.field: np.asarray(whole, self.dtype).reshape(self.shape)}

    def to_json(self) -> Json:
        """Column, dtype and shape."""
        return {"column": self.column, "json": self.dtype, "shape": list(self.shape)}


def middle_longitude(longitudes: NDArray[np.float64]) -> float:
    """The mean of longitudes in degrees, along the arc that holds them all and is the shortest.

    >>> middle_longitude(np.array([8.0, 10.0])), middle_longitude(np.array([179.0, -178.0]))
    (9.0, -179.5)
    """
    ordered = np.sort(longitudes)
    gaps = np.diff(ordered)
    if not len(gaps) or gaps.max() <= 360 - (ordered[-1] - ordered[0]):
        return float(longitudes.mean())
    west = (
        longitudes <= ordered[gaps.argmax()]
    )  # of the largest gap: they follow the others, past 180 degrees
    return float(_turned(np.where(west, longitudes + 360, longitudes).mean()))


def _turned(degrees: Any) -> Any:
    """The same angle between -180 and 180 degrees; what lies there stays as it is, to the last bit."""
    return degrees - 360 * np.round(degrees / 360)


def metres_from(centre: tuple[float, float], latitude: Any, longitude: Any) -> tuple[Any, Any]:
    """Metres north and east of `centre`, of places in degrees.

    >>> [round(float(m)) for m in metres_from((45.0, 8.0), 46.0, 9.0)]
    [111195, 78627]
    """
    east = _turned(longitude - centre[1]) * METRES * math.cos(math.radians(centre[0]))
    return (latitude - centre[0]) * METRES, east


def parsed(value: Value, column: str) -> Any:
    """What JSON means.

    Raises:
        MalformedError: It is none.
    """
    if value.tag not in (JSON, TEXT, BYTES):
        raise MalformedError(column, f"is {NAMES[value.tag]}, expected JSON")
    try:
        return json.loads(value.value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(column, f"is not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(value: float, what: str) -> float:
    try:
        return float(
            number_of(Value(BOOL if isinstance(value, bool) else FLOAT, float(value)), "float32", what)
        )
    except OverflowError as error:
        raise MalformedError(what, "is too large for a float") from error


def _at(entry: Any, path: str) -> Any:
    """What lies at a path, None where it leads nowhere."""
    for name in path.split("."):
        if not isinstance(entry, dict):
            return None
        entry = cast("dict[str, Any]", entry).get(name)
    return entry
