"""What samples and records look like: fields with shape, dtype and the meaning of axis 0.

Shape and dtype are data here, not types: a `Schema` is checked once at each border (reader,
encoder, shard header) and then trusted. This module never imports torch, because reader
processes use it and must start in a tenth of a second; dtypes are therefore plain names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import RecordError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What canonical JSON can hold; NaN and infinities are refused when it is written."""

Sample: TypeAlias = "dict[str, NDArray[Any]]"
"""One raw item: field name to array. bfloat16 travels as uint16 bits, the schema says which."""

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes per element of each dtype a store may hold."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of every sample or record."""

    shape: tuple[int, ...]
    """Shape of one sample; axis 0 is -1 when `ragged`."""
    dtype: str
    """A key of `DTYPE_BYTES`."""
    time: bool = False
    """Axis 0 is time, so that windows and pieces may be cut from it."""
    ragged: bool = False
    """The length of axis 0 differs from sample to sample."""

    def __post_init__(self) -> None:
        """Refuse shapes and dtypes that no store can hold."""
        if self.dtype not in DTYPE_BYTES:
            raise RecordError(f"dtype {self.dtype!r} cannot be stored. Known: {', '.join(DTYPE_BYTES)}")
        if (self.ragged or self.time) and not self.shape:
            raise RecordError("a scalar field has no axis 0, so it cannot be ragged or have time")
        if any(size < 0 for size in self.shape[1 if self.ragged else 0 :]):
            raise RecordError(f"shape {self.shape} has a negative size")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along axis 0 (of the whole field, for a scalar)."""
        return math.prod(self.shape[1:]) * self.itemsize

    def size_bytes(self, length: int | None = None) -> int:
        """Bytes of one sample's field; a ragged one needs its `length` along axis 0."""
        if self.ragged and length is None:
            raise RecordError("the size of a ragged field depends on its length")
        if not self.shape:
            return self.itemsize
        return self.row_bytes * (self.shape[0] if length is None else length)


Schema: TypeAlias = "dict[str, Field]"
"""Field name to `Field`, in the order in which fields are stored."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype that carries `name`; bfloat16 is carried as its bits in uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def schema_to_json(schema: Schema) -> dict[str, Json]:
    """A schema as JSON, the inverse of `schema_from_json`."""
    return {
        name: {"shape": list(f.shape), "dtype": f.dtype, "time": f.time, "ragged": f.ragged}
        for name, f in schema.items()
    }


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
            )
            for name, f in data.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"not a schema: {error}") from error


def canonical_json(data: Any) -> str:
    """JSON with sorted keys, no spaces, no NaN: equal values give equal text.

    >>> canonical_json({"b": 1.0, "a": [True, None]})
    '{"a":[true,null],"b":1.0}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_json(data: Any) -> str:
    """The sha256 of canonical JSON, 64 hex digits."""
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
                f"{where}: field {name!r} is {array.dtype} {array.shape}, "
                f"expected {field.dtype} {field.shape}. One sample differs from the rest; mend or exclude it"
            )
