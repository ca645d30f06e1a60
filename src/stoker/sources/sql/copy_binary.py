"""PostgreSQL's binary COPY as columns, where every value has a fixed width and none is NULL.

Source: "Binary Format" in PostgreSQL's documentation of COPY. After a header each row is the number of its
fields, and each field its length and its bytes, most significant first. So rows without NULL are as long as
each other, and a whole buffer is one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.sources.sql.rows import BOOL, FLOAT, FOREVER_US, INT, TIME

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


class UnevenError(Exception):
    """A row is not as long as the others: it holds a NULL."""


def copied_columns(
    chunks: Iterable[bytes | memoryview], types: Sequence[int], block_bytes: int
) -> Iterator[list[tuple[int, NDArray[Any]]]]:
    """Columns of consecutive rows, some `block_bytes` at a time, as `pack_fixed` takes them.

    Raises:
        UnevenError: A value is NULL; what was given before still holds.
    """
    parts: list[tuple[str, str]] = [("fields", ">i2")]
    for place, number in enumerate(types):
        parts += [(f"length{place}", ">i4"), (f"value{place}", FIXED_TYPES[number][1])]
    row = np.dtype(parts)
    held = bytearray()
    begun = False
    for chunk in chunks:
        held += chunk
        if not begun and len(held) >= _HEADER:
            _check_header(held)
            del held[:_HEADER]
            begun = True
        if len(held) >= block_bytes + row.itemsize:
            whole = block_bytes // row.itemsize * row.itemsize or row.itemsize
            yield _columns(np.frombuffer(bytes(held[:whole]), row), types)
            del held[:whole]
    if bytes(held[-2:]) != _TRAILER or (len(held) - 2) % row.itemsize:
        raise UnevenError
    if len(held) > 2:
        yield _columns(np.frombuffer(bytes(held[:-2]), row), types)


def _check_header(held: bytearray) -> None:
    if not held.startswith(SIGNATURE) or any(held[len(SIGNATURE) : _HEADER]):
        raise UnevenError  # flags or an extension that this does not know: rows are fetched the other way


def _columns(table: NDArray[Any], types: Sequence[int]) -> list[tuple[int, NDArray[Any]]]:
    if (table["fields"] != len(types)).any():
        raise UnevenError
    found: list[tuple[int, NDArray[Any]]] = []
    for place, number in enumerate(types):
        values = table[f"value{place}"]
        if (table[f"length{place}"] != values.dtype.itemsize).any():
            raise UnevenError
        tag = FIXED_TYPES[number][0]
        if tag == TIME:
            values = _since_1970(values.astype(np.int64), DAY_US if number == _DATE else 1)
        found.append((tag, values))
    return found


def _since_1970(values: NDArray[np.int64], unit_us: int) -> NDArray[np.int64]:
    """Times in microseconds; infinite ones stay at the ends of 64 bits."""
    low, high = -(FOREVER_US // unit_us), (FOREVER_US - YEAR_2000_US) // unit_us
    moved = values.clip(low, high) * unit_us + YEAR_2000_US
    return np.where(values > high, FOREVER_US, np.where(values < low, -FOREVER_US, moved))
