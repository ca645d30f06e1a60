"""Block sums: xxh3 over a few steps of one record, so that a window verifies only what it touches.

The seed of a sum depends on schema and sample number: bytes of another record never pass for this one's,
even when a whole page was put back in the wrong place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.schema import Field, Schema, canonical_json, schema_to_json
from stoker.splitmix import keys_of
from stoker.store.layout import rows_per_block

digest = xxhash.xxh3_64_intdigest
"""The sum of a block: `digest(bytes, seed)`."""


def schema_seed(schema: Schema) -> int:
    """The xxh3_64 of a stored schema's canonical JSON, as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(canonical_json(schema_to_json(schema)).encode())


def record_seeds(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One seed per record: number `n` gets output `n` of the splitmix64 stream with state `seed`.

    Args:
        seed: From `schema_seed`.
        numbers: Part-local sample numbers, `(n,)`.
    Returns:
        `(n,)` uint64.
    """
    return keys_of(seed, numbers)


def match(data: memoryview[Any], block_bytes: int, seed: int, sums: Sequence[int], first: int) -> bool:
    """Whether every block of one record has the sum that was stored for it.

    Args:
        data: Whole blocks of the record, of which the record's last may be shorter; format `B`.
        block_bytes: Bytes of a block.
        seed: The record's.
        sums: Stored sums, of which `first` is that of the first block in `data`.
        first: Its place.
    """
    size = len(data)
    if size <= block_bytes:
        return not size or digest(data, seed) == sums[first]
    for begin in range(0, size, block_bytes):
        if digest(data[begin : begin + block_bytes], seed) != sums[first]:
            return False
        first += 1
    return True


def block_sums(field: Field, data: memoryview[Any], sizes: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """Sums of records that lie one after another in `data`.

    Args:
        field: Gives the bytes of a block.
        data: Bytes of all records, format `B`.
        sizes: Bytes of each record.
        seeds: Seed of each record.
    Returns:
        All sums, record by record.
    """
    block = rows_per_block(field) * field.row_bytes
    sums: list[int] = []
    begin = 0
    for size, seed in zip(sizes, seeds, strict=True):
        end = begin + size
        if size <= block:
            if size:
                sums.append(digest(data[begin:end], seed))
        else:
            sums.extend(digest(data[at : min(at + block, end)], seed) for at in range(begin, end, block))
        begin = end
    return sums
