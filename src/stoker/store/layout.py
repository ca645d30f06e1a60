"""Where columns lie in a shard: pure arithmetic, no files.

Every column starts on a page, so that shards can be mapped side by side into one range of addresses. The
largest fixed column comes first: a shard that is sealed early then moves only its smaller columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker.schema import Field, Schema
from stoker.units import KIB, MIB

FORMATS = (1, 2, 3)
"""Formats that this version reads; it writes the first that can hold a schema; 3: compressed shards."""
COMPRESSED_FORMAT = 3
"""Of a compressed shard, and of an index that names one; the ordinary shard in it keeps its own."""
PAGE = 4096
"""Alignment of columns in bytes; part of the format, whatever the machine's own page size."""
BLOCK_BYTES = 16 * KIB
"""Bytes that one block sum aims to cover."""
SHARD_BYTES = 256 * MIB
"""Bytes of records at which a shard with fixed fields only is sealed."""
RAGGED_SHARD_BYTES = 32 * MIB
"""The same for a shard with a ragged field, which is kept in memory until sealed."""
MAX_ROWS = 1 << 20
"""Records in one shard at most; bounds what a writer keeps per record in memory."""


def format_of(schema: Schema) -> int:
    """The format of a cache of this schema: 2 with marks that readers of 1 do not know."""
    return 2 if any(field.packed or field.kept or field.axes for field in schema.values()) else 1


def align(offset: int) -> int:
    """The next multiple of `PAGE` at or above `offset`."""
    return -(-offset // PAGE) * PAGE


def axis_length(field: Field) -> int:
    """Steps along axis 0 of one record of a fixed field; a scalar has one."""
    return field.shape[0] if field.shape else 1


def rows_per_block(field: Field) -> int:
    """Steps along a record's axis 0 that share one block sum.

    >>> rows_per_block(Field(shape=(101, 16, 32), dtype="float16"))
    16
    """
    return max(1, BLOCK_BYTES // max(1, field.row_bytes))


def block_count(field: Field, length: int) -> int:
    """Block sums of one record whose axis 0 has `length` steps; none where there are no bytes."""
    return -(-length // rows_per_block(field)) if field.row_bytes else 0


def is_fixed(schema: Schema) -> bool:
    """Whether every record has the same size, so that a shard can be written as it comes."""
    return not any(field.ragged for field in schema.values())


def record_bytes(schema: Schema) -> int:
    """Bytes of one record, over its fixed fields."""
    return sum(field.size_bytes() for field in schema.values() if not field.ragged)


def row_capacity(schema: Schema, shard_bytes: int) -> int:
    """Records of a full shard with fixed fields only; the same for every shard of a cache.

    A multiple of `PAGE / gcd(bytes, PAGE)` for each field where the shard has room for that, so that full
    shards fill whole pages.
    """
    size = record_bytes(schema)
    capacity = min(MAX_ROWS, shard_bytes // size if size else MAX_ROWS)
    whole_pages = math.lcm(
        *(PAGE // math.gcd(f.size_bytes(), PAGE) for f in schema.values() if f.size_bytes())
    )
    if whole_pages <= capacity:
        capacity -= capacity % whole_pages
    return max(1, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """When a shard is full."""

    rows: int
    """Most records."""
    bytes: int
    """Bytes of records; what fills a shard with a ragged field, whose records differ."""
    fixed: bool

    def is_full(self, rows: int, size: int) -> bool:
        """Whether a shard of so many records and bytes takes no more."""
        return rows >= self.rows or (not self.fixed and size >= self.bytes)


def capacity(schema: Schema, shard_bytes: int) -> Capacity:
    """When a shard of about `shard_bytes` is full.

    Raises:
        ConfigError: `shard_bytes` is less than 1.
    """
    if shard_bytes < 1:
        raise ConfigError(
            f"shard_bytes is {shard_bytes}, expected 1 at least. Leave it out for {SHARD_BYTES}"
        )
    if not is_fixed(schema):
        return Capacity(rows=MAX_ROWS, bytes=min(shard_bytes, RAGGED_SHARD_BYTES), fixed=False)
    rows = row_capacity(schema, shard_bytes)
    return Capacity(rows=rows, bytes=rows * record_bytes(schema), fixed=True)


def column_order(schema: Schema) -> list[str]:
    """Fields in the order of their columns: the largest fixed one, other fixed ones, then ragged ones."""
    fixed = [name for name, field in schema.items() if not field.ragged]
    largest = max(fixed, key=lambda name: schema[name].size_bytes(), default=None)
    first = [] if largest is None else [largest]
    return first + [n for n in fixed if n != largest] + [n for n in schema if schema[n].ragged]


def place_columns(order: Sequence[str], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of columns from the start of the data, and the aligned end of the last one.

    >>> place_columns(["z", "c"], {"z": 5000, "c": 12})
    ({'z': 0, 'c': 8192}, 12288)
    """
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        offsets[name] = end
        end = align(end + sizes[name])
    return offsets, end
