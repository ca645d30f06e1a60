"""PostgreSQL's binary COPY as columns.

Source: "Binary Format" in PostgreSQL's documentation of COPY. After a header each row is the number of its
fields, and each field its length and its bytes, most significant first. So rows of numbers without NULL are
as long as each other, and a whole buffer is one array; others are cut field by field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.sources.sql.rows import (
    BOOL,
    FLOAT,
    FOREVER_US,
    INT,
    TIME,
    Column,
    JsonText,
    Micros,
    Plain,
    Text,
    as_list,
)

SIGNATURE = b"PGCOPY\n\xff\r\n\x00"
_HEADER = len(SIGNATURE) + 8
_TRAILER = b"\xff\xff"
YEAR_2000_US = 946_684_800_000_000
"""Where PostgreSQL's times begin, in microseconds since 1970."""
DAY_US = 86_400_000_000
"""Microseconds in a day."""

FIXED_TYPES: dict[int, tuple[int, str]] = {
    16: (BOOL, "?"), 20: (INT, ">i8"), 21: (INT, ">i2"), 23: (INT, ">i4"), 700: (FLOAT, ">f4"),
    701: (FLOAT, ">f8"), 1114: (TIME, ">i8"), 1184: (TIME, ">i8"), 1082: (TIME, ">i4"),
}  # fmt: skip
"""By type's number in PostgreSQL: what it becomes, and how it is sent: bool, int8, int2, int4, float4,
float8, timestamp, timestamptz, date."""
_DATE = 1082


TEXT_TYPE = 25
_TEXTS = {TEXT_TYPE: Text, 1042: Text, 1043: Text, 114: JsonText, 17: bytes}
"""text, bpchar, varchar, json, bytea: sent as the bytes that they are."""
_UUID, _JSONB = 2950, 3802
COPIED = frozenset({*FIXED_TYPES, *_TEXTS, _UUID, _JSONB})
"""Types that this reads."""
_TWO, _FOUR = struct.Struct(">h").unpack_from, struct.Struct(">i").unpack_from


class MalformedCopyError(Exception):
    """The stream is not what PostgreSQL's documentation says."""


def copied_columns(
    chunks: Iterable[bytes | memoryview], types: Sequence[int], block_bytes: int
) -> Iterator[list[Column]]:
    """Columns of consecutive rows, some `block_bytes` at a time, as `pack_columns` takes them.

    Raises:
        MalformedCopyError: The stream has flags or extensions that this does not know, or is cut off.
    """
    held = bytearray()
    begun, at_once = False, block_bytes
    for chunk in chunks:
        held += chunk
        if not begun and len(held) >= _HEADER:
            if not held.startswith(SIGNATURE) or any(held[len(SIGNATURE) : _HEADER]):
                raise MalformedCopyError("its header is not known")
            del held[:_HEADER]
            begun = True
        if begun and len(held) >= at_once:
            columns, used = _rows(bytes(held), types)
            if used:
                yield columns
                del held[:used]
            at_once = len(held) + block_bytes
    while (found := _rows(bytes(held), types))[1]:
        yield found[0]
        del held[: found[1]]
    if bytes(held) != _TRAILER:
        raise MalformedCopyError("it is cut off")


def _rows(data: bytes, types: Sequence[int]) -> tuple[list[Column], int]:
    """The whole rows that `data` begins with, and their bytes."""
    fixed = _even(data, types) if all(number in FIXED_TYPES for number in types) else None
    if fixed is not None:
        return fixed
    columns: list[list[bytes | None]] = [[] for _ in types]
    used, size, rows = 0, len(data), 0
    while used + 2 <= size and (fields := _TWO(data, used)[0]) >= 0:
        if fields != len(types):
            raise MalformedCopyError(f"it has a row of {fields} fields, expected {len(types)}")
        at = used + 2
        for column in columns:
            if at + 4 > size:
                at = size + 1
                break
            (length,) = _FOUR(data, at)
            at += 4
            column.append(None if length < 0 else data[at : at + length])
            at += max(0, length)
        if at > size:
            break
        rows, used = rows + 1, at
    return [_column(column[:rows], number) for column, number in zip(columns, types, strict=True)], used


def _even(data: bytes, types: Sequence[int]) -> tuple[list[Column], int] | None:
    """The same where rows are as long as each other; None where one holds a NULL."""
    parts: list[tuple[str, str]] = [("fields", ">i2")]
    for place, number in enumerate(types):
        parts += [(f"length{place}", ">i4"), (f"value{place}", FIXED_TYPES[number][1])]
    row = np.dtype(parts)
    table = np.frombuffer(data, row, len(data) // row.itemsize)
    columns: list[Column] = []
    if not len(table) or (table["fields"] != len(types)).any():
        return None
    for place, number in enumerate(types):
        values = table[f"value{place}"]
        if (table[f"length{place}"] != values.dtype.itemsize).any():
            return None
        columns.append(_plain(values, number))
    return columns, table.nbytes


def _plain(values: NDArray[Any], number: int) -> Plain:
    tag = FIXED_TYPES[number][0]
    if tag == TIME:
        values = _since_1970(values.astype(np.int64), DAY_US if number == _DATE else 1)
    return Plain(tag, values)


def _column(column: Sequence[bytes | None], number: int) -> Column:
    """Values of one type, as drivers give them; None for NULL."""
    there = [value for value in column if value is not None]
    if number in FIXED_TYPES:
        found = _plain(np.frombuffer(b"".join(there), FIXED_TYPES[number][1]), number)
        if len(there) == len(column):
            return found
        known = iter(map(Micros, as_list(found)) if found.tag == TIME else as_list(found))
    elif number == _UUID:
        known = map(_uuid, there)
    elif number == _JSONB:
        known = (JsonText(value[1:]) for value in there)  # after a byte for the version
    else:
        known = map(_TEXTS[number], there)
    return [None if value is None else next(known) for value in column]


def _uuid(value: bytes) -> Text:
    text = value.hex()
    return Text(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode())


def _since_1970(values: NDArray[np.int64], unit_us: int) -> NDArray[np.int64]:
    """Times in microseconds; infinite ones stay at the ends of 64 bits."""
    low, high = -(FOREVER_US // unit_us), (FOREVER_US - YEAR_2000_US) // unit_us
    moved = values.clip(low, high) * unit_us + YEAR_2000_US
    return np.where(values > high, FOREVER_US, np.where(values < low, -FOREVER_US, moved))
