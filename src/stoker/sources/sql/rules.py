"""Rules as they are written: a dtype, or a mapping that says what a column holds.

    columns = {
        "power": "float32",                        # the column of that name, as a number
        "gdop": {"dtype": "float32", "null": 50},  # what stands for NULL; "mask": 0, and a field that says so
        "site": {"text": ["north", "south"]},      # text by its place in the list; "intern": all there are;
                                                   # "bytes": as its UTF-8 bytes
        "at": {"timestamp": "ms"},                 # since 1970 UTC, int64
        "trace": {"bytes": "float32", "shape": [256]},
        "matrix": {"json": "float32", "shape": [3, 3]},
        "receivers": {"column": "features", "list": 7, "features": ["snr.mean", "@north", "@east"],
                      "place": ["lat", "lon"], "present": "heard", "mask": "absent"},
        "target": {"columns": ["tx_lat", "tx_lon"], "metres_from": "receivers", "standardize": true},
        "center": {"centroid_of": "receivers"},
    }

A key names the field; its column has the same name unless `column` says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.schema import DTYPE_BYTES, FLOATS, Field, Json, Sample, Schema
from stoker.sources.arguments import listed
from stoker.sources.sql.query import Pick
from stoker.sources.sql.values import (
    EAST,
    NORTH,
    UNITS,
    BytesRule,
    CentroidRule,
    ColumnRule,
    EntriesRule,
    Feature,
    JsonArrayRule,
    MalformedError,
    NumberRule,
    PlaceRule,
    RowBatch,
    Rule,
    TextBytesRule,
    TimestampRule,
    WordsRule,
)

Columns: TypeAlias = "Mapping[str, Any] | Sequence[str]"
"""Fields and their rules, or columns whose dtypes follow from what they hold."""

_DTYPES = tuple(name for name in DTYPE_BYTES if name not in ("float8_e4m3fn", "bfloat16"))
_COMMON_NAMES = {
    "int": "int64", "integer": "int64", "bigint": "int64", "long": "int64", "float": "float32",
    "real": "float32", "double": "float64", "boolean": "bool", "str": "text", "string": "text",
    "varchar": "text", "datetime": "timestamp", "date": "timestamp",
}  # fmt: skip
"""Names that other languages have for a dtype, or for a rule."""
_ALLOWED = {
    "dtype": ("column", "dtype", "null", "nan", "standardize"),
    "text": ("column", "text", "null"),
    "timestamp": ("column", "timestamp", "null"),
    "bytes": ("column", "bytes", "shape"),
    "json": ("column", "json", "shape"),
    "list": ("column", "list", "features", "mask", "present", "place", "standardize"),
    "metres_from": ("columns", "metres_from", "standardize"),
    "centroid_of": ("centroid_of",),
}
"""By what a rule is recognized, and what else it may say."""
_FEATURE = ("path", "missing", "range")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredRule(ColumnRule):
    """A column whose rule follows from what it holds: a number's dtype, or the words of text."""

    words: bool = False
    null: int | None = None

    def schema(self) -> Schema:
        """Not known yet."""
        raise AssertionError(self.field)

    def make(self, rows: RowBatch) -> Sample:
        """Not known yet."""
        raise MalformedError(self.column, "has no rule yet")

    def to_json(self) -> Json:
        """Return the rule, which follows from the rows."""
        return {"column": self.column, "text" if self.words else "dtype": "as found", "null": self.null}


def parse_columns(columns: Columns) -> tuple[Rule, ...]:
    """Rules in the order of their fields, those that others are measured from first.

    Raises:
        ConfigError: A rule is malformed, or two make one field.
    """
    given: Mapping[Any, Any] = (
        columns if isinstance(columns, Mapping) else dict.fromkeys(listed(columns) or ())
    )
    if not given or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"columns is {columns!r}", hint="Expected names of columns, or fields and their rules"
        )
    rules = [_rule(str(name), rule) for name, rule in given.items()]
    origins = {rule.field for rule in rules if isinstance(rule, EntriesRule) and rule.place}
    for rule in rules:
        if isinstance(rule, PlaceRule | CentroidRule) and rule.origin not in origins:
            raise ConfigError(
                f"columns[{rule.field!r}] is measured from {rule.origin!r}, which has no place",
                hint="Expected a list with place=[latitude, "
                f"longitude]{': ' if origins else ''}{', '.join(sorted(origins))}",
            )
    names = [n for rule in rules for n in ([rule.field] if isinstance(rule, InferredRule) else rule.schema())]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two rules make a field {min(twice)!r}", hint="Name the fields and masks apart")
    return tuple(sorted(rules, key=lambda rule: isinstance(rule, PlaceRule | CentroidRule)))


def _rule(name: str, given: Any) -> Any:
    where = f"columns[{name!r}]"
    if given is None or isinstance(given, str):
        given = {} if given is None else _short(given, where)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} is {given!r}", hint="Expected a dtype, or a mapping such as {'dtype': 'float32'}"
        )
    rule = dict(cast("Mapping[str, Any]", given))
    kind = next((kind for kind in _ALLOWED if kind in rule), "dtype")
    if unknown := [key for key in rule if key not in _ALLOWED[kind]]:
        near = get_close_matches(str(unknown[0]), _ALLOWED[kind], n=1)
        hint = (
            f"Did you mean {near[0]}?" if near else f"A rule with {kind} may have {', '.join(_ALLOWED[kind])}"
        )
        raise ConfigError(f"{where}: {unknown[0]!r} is not known", hint=hint)
    return _MAKERS[kind](name, rule, where)


def _short(text: str, where: str) -> dict[str, Any]:
    if text in _DTYPES:
        return {"dtype": text}
    if text == "text":
        return {"text": "intern"}
    if text == "timestamp":
        return {"timestamp": "us"}
    raise ConfigError(
        f"{where} is {text!r}",
        hint=f"{_meant(text, 'text', 'timestamp')}Expected a dtype ({', '.join(_DTYPES)}), text, timestamp "
        "or a mapping",
    )


def _meant(dtype: str, *others: str) -> str:
    """Return what a name of another language, or a misspelt one, stands for here, as a sentence."""
    known = _COMMON_NAMES.get(dtype.lower())
    near = [known] if known in (*_DTYPES, *others) else get_close_matches(dtype, [*_DTYPES, *others], n=1)
    return f"Did you mean {near[0]}? " if near else ""


def _number(name: str, rule: dict[str, Any], where: str) -> Rule:
    column, null = rule.get("column", name), rule.get("null")
    if "dtype" not in rule:
        if len(rule) > ("column" in rule):
            raise ConfigError(f"{where}: say the dtype as well, as dtype: float32")
        return InferredRule(field=name, column=column)
    dtype = _dtype(rule["dtype"], where)
    if null is not None and null != "mask" and not isinstance(null, bool | int | float):
        raise ConfigError(f"{where}: null is {null!r}", hint="Expected a number, or 'mask'")
    standardize = rule.get("standardize", False)
    if standardize and dtype not in FLOATS:
        raise ConfigError(f"{where}: {dtype} cannot be standardized", hint="Give a float dtype")
    return NumberRule(field=name, column=column, dtype=dtype, null=null, nan=bool(rule.get("nan", False)),
                  standardize=bool(standardize))  # fmt: skip


def _words(name: str, rule: dict[str, Any], where: str) -> Rule:
    column, words, null = rule.get("column", name), rule["text"], rule.get("null")
    if words == "intern":
        return InferredRule(field=name, column=column, words=True, null=null)
    if words == "bytes":
        if null is not None:
            raise ConfigError(
                f"{where}: null is {null!r}", hint="Text as bytes has nothing for NULL: leave it out"
            )
        return TextBytesRule(field=name, column=column)
    if not (found := listed(words)) or len({*map(str, found)}) < len(found):
        raise ConfigError(
            f"{where}: text is {words!r}", hint="Expected a list of different words, 'intern' or 'bytes'"
        )
    return WordsRule(field=name, column=column, words=tuple(map(str, words)), null=null)


def _times(name: str, rule: dict[str, Any], where: str) -> Rule:
    unit = rule["timestamp"]
    if unit not in UNITS:
        raise ConfigError(f"{where}: timestamp is {unit!r}", hint=f"Expected {', '.join(UNITS)}")
    return TimestampRule(field=name, column=rule.get("column", name), unit=unit, null=rule.get("null"))


def _raw(name: str, rule: dict[str, Any], where: str) -> Rule:
    dtype, shape = _dtype(rule["bytes"], where), _shape(rule, where)
    return BytesRule(field=name, column=rule.get("column", name), dtype=dtype, shape=shape)


def _array(name: str, rule: dict[str, Any], where: str) -> Rule:
    dtype, shape = _dtype(rule["json"], where), _shape(rule, where)
    return JsonArrayRule(field=name, column=rule.get("column", name), dtype=dtype, shape=shape)


def _entries(name: str, rule: dict[str, Any], where: str) -> Rule:
    most, given = rule["list"], listed(rule.get("features"))
    if not isinstance(most, int) or most < 1 or not given:
        raise ConfigError(f"{where}: expected list: N (1 or more) and features: [PATH, ...]")
    features = tuple(_feature(feature, where) for feature in given)
    paths = [feature.path for feature in features]
    place = rule.get("place")
    if place is not None and listed(place, 2) is None:
        raise ConfigError(f"{where}: place is {place!r}", hint="Expected two paths, [latitude, longitude]")
    if place is None and {NORTH, EAST} & {*paths}:
        raise ConfigError(f"{where}: {NORTH} and {EAST} need place: [latitude, longitude]")
    standardize = cast("tuple[str, ...] | None", listed(rule.get("standardize", ())))
    if standardize is None or not {*standardize} <= {*paths}:
        raise ConfigError(
            f"{where}: standardize is {rule['standardize']!r}", hint=f"Expected some of {paths}"
        )
    return EntriesRule(
        field=name,
        column=rule.get("column", name),
        most=most,
        features=features,
        mask=rule.get("mask", f"{name}_mask"),
        present=rule.get("present"),
        place=None if place is None else (str(place[0]), str(place[1])),
        standardize=standardize,
    )


def _feature(given: Any, where: str) -> Feature:
    if isinstance(given, str):
        return Feature(path=given)
    if not isinstance(given, Mapping) or "path" not in given or {*cast("Any", given)} - {*_FEATURE}:
        raise ConfigError(f"{where}: feature {given!r}", hint="Expected a path, or path, missing and range")
    rule = cast("Mapping[str, Any]", given)
    bounds, missing = listed(rule.get("range", (0.0, 1.0)), 2), rule.get("missing")
    low, high = (0.0, 0.0) if bounds is None or not all(map(_is_number, bounds)) else cast("Any", bounds)
    if not high > low:
        raise ConfigError(f"{where}: range {rule['range']!r} of {rule['path']}", hint="Expected [low, high]")
    if missing is not None and not _is_number(missing):
        raise ConfigError(f"{where}: missing {missing!r} of {rule['path']}", hint="Expected a number")
    return Feature(path=rule["path"], missing=None if missing is None else float(missing),
                   low=float(low), high=float(high))  # fmt: skip


def _place(name: str, rule: dict[str, Any], where: str) -> Rule:
    columns = listed(rule.get("columns"), 2)
    if columns is None:
        raise ConfigError(f"{where}: expected columns: [LATITUDE, LONGITUDE]")
    return PlaceRule(field=name, columns=(str(columns[0]), str(columns[1])), origin=str(rule["metres_from"]),
                 standardize=bool(rule.get("standardize", False)))  # fmt: skip


def _centroid(name: str, rule: dict[str, Any], where: str) -> Rule:
    return CentroidRule(field=name, origin=str(rule["centroid_of"]))


_MAKERS = {
    "dtype": _number, "text": _words, "timestamp": _times, "bytes": _raw, "json": _array, "list": _entries,
    "metres_from": _place, "centroid_of": _centroid,
}  # fmt: skip


def _dtype(name: Any, where: str) -> str:
    if name not in _DTYPES:
        raise ConfigError(
            f"{where}: dtype {name!r} is not known",
            hint=f"{_meant(str(name))}Expected {', '.join(_DTYPES)}",
        )
    return str(name)


def _shape(rule: dict[str, Any], where: str) -> tuple[int, ...]:
    shape = rule.get("shape")
    if isinstance(shape, int):
        shape = [shape]
    sizes = listed(shape)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ConfigError(f"{where}: shape is {shape!r}", hint="Expected sizes, as [16] or [3, 3]")
    return cast("tuple[int, ...]", sizes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def picks_of(rules: Sequence[Rule]) -> dict[str, Pick]:
    """Of which columns a database may pick what is used: those that a single rule reads, a list's."""
    workers = Counter(column for rule in rules for column in rule.columns)
    picks = [rule.pick for rule in rules if isinstance(rule, EntriesRule) and workers[rule.column] == 1]
    return {pick.column: pick for pick in picks if pick.can_be_asked}


def fields_of(rules: Sequence[Rule]) -> Schema:
    """Return all fields that rules make."""
    found: dict[str, Field] = {}
    for rule in rules:
        found.update(rule.schema())
    return found


def plain(sample: Mapping[str, Any], schema: Schema) -> Sample:
    """Return fields in the dtypes and the order of `schema`."""
    return {name: np.array(sample[name], np.dtype(f.dtype), order="C") for name, f in schema.items()}


# ----------------------------------------------------------------------------------------------------------
# Mean and deviation of the training rows, and fields shifted and scaled by them.
#
# The recipe holds the rule (which fields, which rows); the numbers are derived from it, in float64, in the
# order of the keys, and kept to seven digits, so that the last bits of a sum do not make other samples.


@dataclass(frozen=True, slots=True, kw_only=True)
class Standardization:
    """Map of the values of one field to mean 0 and deviation 1: `(value - mean) / deviation`."""

    field: str
    places: tuple[int, ...]
    """Places on the last axis that it is about; of a scalar none."""
    mask: str | None
    """Field that is True where a value does not count, or `None`."""
    known: str | None = None
    """Field that is False where a value does not count."""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def values(self, samples: Sample) -> NDArray[np.float64]:
        """Return values that count, `(n, places)`."""
        array = np.asarray(samples[self.field], np.float64)
        if self.mask is not None:
            array = array[~samples[self.mask]]
        if self.known is not None:
            array = array[samples[self.known]]
        return array.reshape(-1, 1) if not self.places else array.reshape(-1, array.shape[-1])[:, self.places]

    def apply(self, samples: Sample) -> None:
        """Standardize in place; what does not count stays as it is."""
        array = np.array(samples[self.field], np.float64)
        if not self.places:
            counted = True if self.known is None else samples[self.known]
            array = np.where(counted, (array - self.mean[0]) / self.deviation[0], array)
        else:
            counted = np.ones(array.shape[:-1], np.bool_) if self.mask is None else ~samples[self.mask]
            for place, mean, deviation in zip(self.places, self.mean, self.deviation, strict=True):
                array[counted, place] = (array[counted, place] - mean) / deviation
        samples[self.field] = array


def standards_of(rules: Sequence[Rule]) -> tuple[Standardization, ...]:
    """Return what rules ask to be standardized; mean and deviation are still to be found."""
    found: list[Standardization] = []
    for rule in rules:
        if isinstance(rule, NumberRule) and rule.standardize:
            known = f"{rule.field}_known" if rule.null == "mask" else None
            found.append(Standardization(field=rule.field, places=(), mask=None, known=known))
        elif isinstance(rule, PlaceRule) and rule.standardize:
            found.append(Standardization(field=rule.field, places=(0, 1), mask=None))
        elif isinstance(rule, EntriesRule) and rule.standardize:
            paths = [feature.path for feature in rule.features]
            places = tuple(paths.index(path) for path in rule.standardize)
            found.append(Standardization(field=rule.field, places=places, mask=rule.mask))
    return tuple(found)


def fitted(standards: Sequence[Standardization], batches: Iterable[Sample]) -> tuple[Standardization, ...]:
    """Return the same with mean and deviation of samples that come in batches; a deviation of 0 becomes 1.

    Source: Chan, Golub and LeVeque, 1979, for sums of chunks that lose no digits to the mean.
    """
    sums: list[tuple[int, Any, Any]] = [(0, 0.0, 0.0) for _ in standards]
    for samples in batches:
        sums = [_joined(own, standard.values(samples)) for own, standard in zip(sums, standards, strict=True)]
    found: list[Standardization] = []
    for standard, (count, mean, square) in zip(standards, sums, strict=True):
        width = len(standard.places) or 1
        means = np.broadcast_to(mean, width)
        spread = np.broadcast_to(np.sqrt(square / max(count, 1)), width)
        found.append(
            replace(
                standard,
                # A mean of 0 comes out as some 1e-17 of the deviation, which differs between machines.
                mean=tuple(
                    float(f"{value:.7g}") if abs(value) > 1e-9 * around else 0.0
                    for value, around in zip(means, spread, strict=True)
                ),
                deviation=tuple(float(f"{value:.7g}") if value > 0 else 1.0 for value in spread),
            )
        )
    return tuple(found)


def _joined(known: tuple[int, Any, Any], values: NDArray[np.float64]) -> tuple[int, Any, Any]:
    if not len(values):
        return known
    count, mean, square = known
    own = values.mean(0)
    total, step = count + len(values), own - mean
    squares = square + np.square(values - own).sum(0) + np.square(step) * (count * len(values) / total)
    return total, mean + step * (len(values) / total), squares


def to_json(standards: Sequence[Standardization]) -> Mapping[str, Any]:
    """Mean and deviation by field, to be kept with a model that predicts it."""
    return {s.field: {"places": list(s.places), "mean": list(s.mean), "deviation": list(s.deviation)}
            for s in standards}  # fmt: skip
