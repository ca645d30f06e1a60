"""A row as bytes: a tag and a value for each column, the same bytes for the same values from every database.

These bytes are what is digested and what is kept, so a row is parsed once, where its sample is read. Numbers
and times take 9 bytes (int64, float64, microseconds since 1970 UTC), everything else its length in 4 bytes
and then its text.
"""

from __future__ import annotations

import datetime
import decimal
import json
import struct
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

INT, FLOAT, BOOL, TIME, TEXT, BYTES, JSON, NULL, OTHER = b"IFBDTYJN?"
FOREVER_US = 2**63 - 1
"""A time that is infinite, or past 64 bits; its negative for the past."""
FIXED = frozenset({INT, FLOAT, BOOL, TIME})
"""Tags whose values take 8 bytes."""
KEYS = frozenset({INT, TEXT, TIME, BYTES})
"""Tags whose values may be keys."""
NAMES = {
    INT: "integer", FLOAT: "float", BOOL: "boolean", TIME: "time", TEXT: "text", BYTES: "bytes",
    JSON: "JSON", NULL: "NULL", OTHER: "of another type",
}  # fmt: skip
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICRO = datetime.timedelta(microseconds=1)
_LENGTH = struct.Struct("<I")


class Text(bytes):
    """Text of a database as its bytes in UTF-8, sound or not."""


class JsonText(bytes):
    """A JSON value as a database wrote it."""


class Micros(int):
    """Microseconds since 1970, UTC."""


class Value(NamedTuple):
    """One value of a row."""

    tag: int
    value: Any
    """int, float, bool, or bytes for text, bytes and JSON; None."""


class Packed(NamedTuple):
    """Some rows as bytes."""

    data: bytes | memoryview
    lengths: NDArray[np.int64]
    """Bytes of each row."""
    tags: list[Counter[int]]
    """By column how many values have which tag."""


def pack_rows(rows: Sequence[Sequence[Any]]) -> Packed:
    """Rows as their driver gave them, as bytes."""
    columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True))
    kinds = [{*map(type, column)} for column in columns]
    simple = [_PLAIN.get(next(iter(kind))) if len(kind) == 1 else None for kind in kinds]
    if all(tag is not None for tag in simple):
        tags = [tag for tag in simple if tag is not None]
        return pack_fixed([(tag, np.asarray(c)) for tag, c in zip(tags, columns, strict=True)])
    counted: list[Counter[int]] = [Counter() for _ in columns]
    parts: list[bytes] = []
    lengths = np.empty(len(rows), np.int64)
    for number, row in enumerate(rows):
        first = len(parts)
        for place, value in enumerate(row):
            begin = len(parts)
            parts += _pack(value)
            counted[place][parts[begin][0]] += 1
        lengths[number] = sum(map(len, parts[first:]))
    return Packed(b"".join(parts), lengths, counted)  # long values are copied once, here


def pack_fixed(columns: Sequence[tuple[int, NDArray[Any]]]) -> Packed:
    """Columns of numbers and times, all there, as bytes: a tag and 8 bytes each."""
    count = len(columns[0][1])
    names = [(f"{part}{place}", kind) for place, (tag, _) in enumerate(columns)
             for part, kind in (("t", "u1"), ("v", "<f8" if tag == FLOAT else "<i8"))]  # fmt: skip
    table = np.empty(count, np.dtype(names))
    for place, (tag, values) in enumerate(columns):
        table[f"t{place}"] = tag
        table[f"v{place}"] = values
    lengths = np.full(count, table.dtype.itemsize, np.int64)
    return Packed(table.tobytes(), lengths, [Counter({tag: count}) for tag, _ in columns])


_PLAIN = {int: INT, float: FLOAT, bool: BOOL, Micros: TIME}


def _pack(value: Any) -> tuple[bytes, ...]:
    kind = type(value)
    if value is None:
        return (bytes((NULL,)),)
    if kind is float:
        return (struct.pack("<Bd", FLOAT, value),)
    if kind in _PLAIN:
        return (struct.pack("<Bq", _PLAIN[kind], value),)
    tag, data = _long(value)
    if tag == FLOAT:
        return (struct.pack("<Bd", FLOAT, data),)
    if tag == TIME:
        return (struct.pack("<Bq", TIME, data),)
    return struct.pack("<BI", tag, len(data)), data


def _long(value: Any) -> tuple[int, Any]:  # noqa: PLR0911 - one line for each type that drivers give
    if isinstance(value, Text):
        return TEXT, value
    if isinstance(value, JsonText):
        return JSON, value
    if isinstance(value, bytes | bytearray | memoryview):
        return BYTES, bytes(value)
    if isinstance(value, str | uuid.UUID):
        return TEXT, str(value).encode("utf-8", "surrogateescape")
    if isinstance(value, decimal.Decimal):
        return FLOAT, float(value)
    if isinstance(value, datetime.datetime):
        return TIME, micros_of(value)
    if isinstance(value, datetime.date):
        return TIME, (value - _EPOCH.date()) // _MICRO
    if isinstance(value, list):
        return JSON, _json_list(value)  # pyright: ignore[reportUnknownArgumentType]
    return OTHER, type(value).__name__.encode()


def micros_of(moment: datetime.datetime) -> int:
    """Microseconds since 1970; without a zone it is UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return (aware - _EPOCH) // _MICRO


def _json_list(values: list[Any]) -> bytes:
    """An array of a database, as a JSON list."""
    parts = (bytes(v) if isinstance(v, JsonText) else json.dumps(v, default=str).encode() for v in values)
    return b"[" + b",".join(parts) + b"]"


def unpack_row(data: memoryview, most: int = 1 << 30) -> list[Value]:
    """The values of one row, of the first `most` columns."""
    found: list[Value] = []
    at, end = 0, len(data)
    while at < end and len(found) < most:
        tag = data[at]
        at += 1
        if tag == NULL:
            found.append(Value(tag, None))
        elif tag in FIXED:
            (value,) = struct.unpack_from("<d" if tag == FLOAT else "<q", data, at)
            found.append(Value(tag, bool(value) if tag == BOOL else value))
            at += 8
        else:
            (length,) = _LENGTH.unpack_from(data, at)
            found.append(Value(tag, bytes(data[at + 4 : at + 4 + length])))
            at += 4 + length
    return found


def shown_key(values: Sequence[Value]) -> str:
    """A key as text: the value, or a JSON list of several.

    >>> shown_key([Value(INT, 7)]), shown_key([Value(TEXT, b"a"), Value(INT, 1)])
    ('7', '["a",1]')
    """
    plain = [value.decode("utf-8", "surrogateescape") if tag in (TEXT, JSON) else
             value.hex() if tag == BYTES else value for tag, value in values]  # fmt: skip
    return str(plain[0]) if len(plain) == 1 else json.dumps(plain, separators=(",", ":"))
