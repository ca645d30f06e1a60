"""Schemas of samples and records: fields with shape, dtype and the meaning of axis 0.

Shape and dtype are data here, not types: a `Schema` is checked once at each border (reader,
encoder, shard header) and then trusted. This module never imports torch, because reader
processes use it and must start in a tenth of a second; dtypes are therefore plain names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import RecordError
from stoker.runtime.jsonio import Json, canonical_json

if TYPE_CHECKING:
    import torch

TIER_ALIASES = {"gpu": "device", "ram": "host"}
"""Other names of tiers that arguments and settings take."""


def as_json(value: Any) -> Any:
    """Return `value` as JSON holds it: dataclasses by field, paths as text, enums by value, tuples as lists.

    What has a `to_json` of its own is asked for it.

    >>> as_json({"where": PurePath("runs/x"), "sizes": (1, 2)})
    {'where': 'runs/x', 'sizes': [1, 2]}
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in cast("list[Any]", value)]
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    return value


class JsonResult:
    """A dataclass that a command prints: with `--json` its fields, or the attributes in `json_keys`."""

    __slots__ = ()
    json_keys: ClassVar[tuple[str, ...]] = ()
    """Fields and properties in their order; empty: all fields."""
    json_within: ClassVar[str] = ""
    """A field whose own keys come first, next to the others and not below its name."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        names = self.json_keys or [one.name for one in fields(cast("Any", self))]
        within = as_json(getattr(self, self.json_within)) if self.json_within else {}
        return {**within, **{name: as_json(getattr(self, name)) for name in names}}


Sample: TypeAlias = "dict[str, NDArray[Any]]"
"""One raw item: field name to array. bfloat16 travels as uint16 bits, the schema says which."""

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes per element of each dtype a store may hold."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

DtypeName: TypeAlias = "str | torch.dtype | np.dtype[Any] | type[np.generic]"
"""A dtype as users name it: `"float16"`, `torch.float16`, `np.float16`."""


def dtype_name(dtype: object) -> Any:
    """Return the name of a dtype; what is not a dtype is returned as it is, for the check that follows.

    >>> dtype_name(np.float16), dtype_name("bfloat16")
    ('float16', 'bfloat16')
    """
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        return np.dtype(dtype).name
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


def dtype_names(dtypes: object) -> Any:
    """Return the name of a dtype, or names by field; see `dtype_name`."""
    if isinstance(dtypes, Mapping):
        return {name: dtype_name(dtype) for name, dtype in cast("Mapping[str, object]", dtypes).items()}
    return dtype_name(dtypes)


QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
"""What floats may be quantized to: one byte each, times a scale that a block of them shares."""
SCALE_BLOCK = 128
"""Elements of the last axis that share one scale."""
SCALE_SUFFIX = ".scale"
"""Ends the name of the column of scales; no field of a record ends so."""
RESERVED_SUFFIXES = (".offsets", ".sums", SCALE_SUFFIX)
"""Ends of names that shards use for their own columns."""


def is_reserved_name(name: str) -> bool:
    """Return True if no field of a record may have this name.

    >>> is_reserved_name(""), is_reserved_name("__len__"), is_reserved_name("x.scale"), is_reserved_name("x")
    (True, True, True, False)
    """
    return not name or name.startswith("__") or name.endswith(RESERVED_SUFFIXES)


SHAPE_SUFFIX = ".shape"
"""Ends the name of the field that holds the sizes of a folded field's axes, int64."""
LENGTHS_SUFFIX = ".lengths"
"""Ends the name of the lengths of a field that is padded, or cut by a choice, in a batch: `(n,)` int64."""
AXIS_WORDS = ("t", "p", "e", "k")
"""Axes of particles and meshes: time, points, edges, cells. Edges and cells hold numbers of points."""
VARIES = "*"
"""A folded axis without such a meaning, whose size differs from sample to sample; one of a fixed size is that
size, as `"3"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of every sample or record: its shape, its dtype, and what axis 0 means.

    Raises:
        RecordError: No cache can hold such a field.

    Examples:
        >>> from stoker.schema import Field
        >>> field = Field(shape=(101, 1, 64, 2), dtype="float32", time=True)
        >>> field.step_shape, field.size_bytes()
        ((1, 64, 2), 51712)
    """

    shape: tuple[int, ...]
    """Shape of one sample; axis 0 is -1 when `ragged`."""
    dtype: str
    """Name of a dtype: bool, uint8, int8 to int64, float16, bfloat16, float32 or float64."""
    time: bool = False
    """Axis 0 is time, so that windows and pieces may be cut from it."""
    ragged: bool = False
    """The length of axis 0 differs from sample to sample."""
    quantized: bool = False
    """Floats, stored as `dtype` times a float32 scale for each block of 128 on the last axis."""
    kept: bool = False
    """Of the raw sample, kept next to what was encoded: neither a state nor a condition of a window."""
    axes: tuple[str, ...] = ()
    """Of particles and meshes: words (`AXIS_WORDS`) of the axes whose sizes differ from sample to sample.
    With one, axis 0 is that axis. With two, `("t", "p")`, the field is *folded*: axis 0 is both, one row for
    each point of each step, and their sizes are in the field `<name>.shape`. Images of any height and width,
    `("3", "*", "*")`, are folded as well: the leading axes up to the last that varies (`VARIES`)."""
    exact: bool = False
    """Stored as it is where all floats are to be stored in fewer bits: times and coordinates."""

    def __post_init__(self) -> None:
        """Refuse shapes and dtypes that no store can hold."""
        if self.dtype not in DTYPE_BYTES:
            raise RecordError(
                f"dtype {self.dtype!r} cannot be stored", hint=f"Known: {', '.join(DTYPE_BYTES)}"
            )
        if (self.ragged or self.time) and not self.shape:
            raise RecordError("a scalar field has no axis 0, so it cannot be ragged or have time")
        if any(size < 0 for size in self.shape[1 if self.ragged else 0 :]):
            raise RecordError(f"shape {self.shape} has a negative size")
        if self.quantized and (self.dtype not in QUANTIZED_DTYPES or not self.step_shape):
            raise RecordError(f"{self.dtype} of shape {self.shape} cannot be quantized with scales")
        if self.dtype == "float8_e4m3fn" and not self.quantized:
            raise RecordError("float8_e4m3fn is stored with scales only")
        known = len(set(self.axes)) == len(self.axes) and set(self.axes) <= {*AXIS_WORDS}
        known = known or (self.plain and self.folded and self.axes[-1] == VARIES)
        if self.axes and not (known and self.ragged and not (self.folded and self.time)):
            raise RecordError(f"axes {self.axes} do not fit a field of shape {self.shape}")

    @property
    def folded(self) -> bool:
        """True if axis 0 stands for several axes."""
        return len(self.axes) > 1

    @property
    def plain(self) -> bool:
        """True if the axes of a folded field are neither time nor points: `VARIES`, or a size."""
        return bool(self.axes) and all(word == VARIES or word.isdecimal() for word in self.axes)

    def made_up_sizes(self, length: int) -> list[int]:
        """Return sizes of the axes for a made-up sample.

        Args:
            length: About the size of those that vary.
        """
        return [int(word) if word.isdecimal() else length + (word == "p") for word in self.axes]

    @property
    def evolves(self) -> bool:
        """True if the field has time, as axis 0 or folded into it."""
        return self.time or self.axes[:1] == ("t",)

    @property
    def numbers_points(self) -> bool:
        """True if the values are numbers of points: edges or cells of a mesh."""
        return self.axes[:1] in (("e",), ("k",))

    @property
    def floating(self) -> bool:
        """True if the values are floats, however they are stored."""
        return self.quantized or self.dtype in FLOATS

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Shape of one step along axis 0 where that is time or ragged, else of the entire field."""
        return self.shape[1:] if self.time or self.ragged else self.shape

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along axis 0 (of the entire field, for a scalar)."""
        return math.prod(self.shape[1:]) * self.itemsize

    def size_bytes(self, length: int | None = None) -> int:
        """Return the bytes of one sample's field.

        Args:
            length: Length along axis 0, which a ragged field needs.

        Raises:
            RecordError: The field is ragged, and `length` is None.
        """
        if self.ragged and length is None:
            raise RecordError("the size of a ragged field depends on its length")
        if not self.shape:
            return self.itemsize
        return self.row_bytes * (self.shape[0] if length is None else length)

    def to_json(self) -> dict[str, Json]:
        """Return the entry of `schema_from_json`; marks only where they are set.

        So that schemas without them read as they did before there were such fields.
        """
        marked = {"packed": self.quantized, "kept": self.kept, "exact": self.exact}
        marks: dict[str, Json] = {mark: True for mark, is_set in marked.items() if is_set}
        if self.axes:
            marks["axes"] = list(self.axes)
        return {
            "shape": list(self.shape), "dtype": self.dtype, "time": self.time, "ragged": self.ragged, **marks
        }  # fmt: skip


Schema: TypeAlias = "dict[str, Field]"
"""Field name to `Field`, in the order in which fields are stored."""


def scale_field(field: Field) -> Field:
    """Return the scales of a quantized field, one for each block of the last axis.

    >>> scale_field(Field(shape=(101, 16, 300), dtype="int8", time=True, quantized=True)).shape
    (101, 16, 3)
    """
    shape = (*field.shape[:-1], -(-field.shape[-1] // SCALE_BLOCK))
    return Field(shape=shape, dtype="float32", time=field.time, ragged=field.ragged, axes=field.axes)


def columns_of(schema: Schema) -> Schema:
    """Return the columns that hold the fields of a schema: each quantized field is followed by its scales."""
    columns: Schema = {}
    for name, field in schema.items():
        columns[name] = field
        if field.quantized:
            columns[name + SCALE_SUFFIX] = scale_field(field)
    return columns


def with_lengths(schema: Schema) -> Schema:
    """Return the fields of a padded batch: each ragged one is followed by `<name>.lengths`.

    >>> list(with_lengths({"x": Field(shape=(-1, 3), dtype="float32", ragged=True)}))
    ['x', 'x.lengths']
    """
    padded: Schema = {}
    for name, field in schema.items():
        padded[name] = field
        if field.ragged:
            padded[name + LENGTHS_SUFFIX] = Field(shape=(), dtype="int64")
    return padded


def size_field(field: Field) -> Field:
    """Return the field `<name>.shape` of a folded field: the sizes of its axes.

    >>> size_field(Field(shape=(-1, 3), dtype="float32", ragged=True, axes=("t", "p"))).shape
    (2,)
    """
    return Field(shape=(len(field.axes),), dtype="int64", kept=field.kept)


def without_sizes(schema: Schema) -> Schema:
    """Return the schema without the fields that hold the sizes of folded ones."""
    sizes = {name + SHAPE_SUFFIX for name, field in schema.items() if field.folded}
    return {name: field for name, field in schema.items() if name not in sizes}


def without_points(schema: Schema) -> Schema:
    """Return the schema without particles, meshes, fields of several varying axes, and their sizes."""
    points = {name for name, field in schema.items() if field.axes}
    sizes = {name + SHAPE_SUFFIX for name in points if schema[name].folded}
    return {name: field for name, field in schema.items() if name not in points | sizes}


def unfolded(record: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return the record with folded fields unfolded to `(T, N, *rest)`, without the fields of their sizes.

    Arrays or tensors; nothing is copied. Fields that the record lacks are left out.

    Args:
        record: A sample as `read` gives it, or a record.
        schema: Its fields.

    Raises:
        RecordError: The sizes of a field do not make up its rows.
    """
    folded = {name for name, field in schema.items() if field.folded and name in record}
    sizes = {name + SHAPE_SUFFIX for name in folded}
    found: dict[str, Any] = {}
    for name, value in record.items():
        if name in folded:
            shape = [int(size) for size in record[name + SHAPE_SUFFIX]]
            if min(shape) < 0 or math.prod(shape) != len(value):
                raise RecordError(
                    f"field {name!r} has {len(value)} rows, its sizes are {' x '.join(map(str, shape))}"
                )
            found[name] = value.reshape(*shape, *value.shape[1:])
        elif name not in sizes:
            found[name] = value
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype that carries `name`: the bits of bfloat16 in uint16, of float8 in int8."""
    return np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "int8"}.get(name, name))


def schema_to_json(schema: Schema) -> dict[str, Json]:
    """Return a schema as JSON, the inverse of `schema_from_json`."""
    return {name: field.to_json() for name, field in schema.items()}


def schema_from_json(data: Mapping[str, Any]) -> Schema:
    """Read what `schema_to_json` wrote.

    Raises:
        RecordError: A field lacks an entry, or an entry has the wrong type.
    """
    try:
        return {
            str(name): Field(
                shape=tuple(int(size) for size in f["shape"]),
                dtype=str(f["dtype"]),
                time=bool(f["time"]),
                ragged=bool(f["ragged"]),
                quantized=bool(f.get("packed", False)),
                kept=bool(f.get("kept", False)),
                axes=tuple(str(word) for word in f.get("axes", ())),
                exact=bool(f.get("exact", False)),
            )
            for name, f in data.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"not a schema: {error}") from error


def schema_text(schema: Schema) -> str:
    """Return a schema as canonical JSON."""
    return canonical_json(schema_to_json(schema))


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Json]:
    """Return settings of all sections by their full name.

    >>> flatten_settings({"training": {"lr": 0.1, "shuffle": "block"}})
    {'training.lr': 0.1, 'training.shuffle': 'block'}
    """
    found: dict[str, Json] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_settings(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            found[prefix + name] = cast("Json", value)
    return found


def digest_json(data: Any) -> str:
    """Return the sha256 of canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def check_sample(sample: Sample, schema: Schema, *, where: str) -> None:
    """Compare one sample with its schema.

    Args:
        sample, schema: What came, and what was declared.
        where: Names path and sample in the error.

    Raises:
        RecordError: A field is missing, unknown, or has another shape or dtype.
    """
    if sample.keys() != schema.keys():
        missing, unknown = sorted(schema.keys() - sample.keys()), sorted(sample.keys() - schema.keys())
        raise RecordError(f"{where}: fields differ from the schema: missing {missing}, undeclared {unknown}")
    for name, field in schema.items():
        array = sample[name]
        expected = numpy_dtype(field.dtype)
        shape = (array.shape[0], *field.shape[1:]) if field.ragged and array.ndim else field.shape
        if array.dtype != expected or array.shape != shape:
            raise RecordError(
                f"{where}: field {name!r} is {array.dtype} {array.shape}, expected {field.dtype} "
                f"{field.shape}",
                hint="One sample differs from the rest; fix or exclude it",
            )
