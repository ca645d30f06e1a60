"""Columns lie on pages, and full shards fill whole ones where they can."""

from __future__ import annotations

import pytest

from stoker.schema import Field, Schema
from stoker.store.format import PAGE, block_count, column_order, place_columns, row_capacity


def fixed(**sizes: int) -> Schema:
    return {name: Field(shape=(size,), dtype="uint8") for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("schema", "shard_bytes", "rows"),
    [
        pytest.param(fixed(z=1024), 10_000, 8, id="four-rows-a-page"),
        pytest.param(fixed(z=1024, c=16), 1_000_000, 768, id="256-rows-fill-a-page-of-the-small-one"),
        pytest.param(fixed(z=1001), 10_000, 9, id="no-room-for-4096-rows"),
        pytest.param(fixed(z=8192), 10_000, 1, id="pages-already"),
        pytest.param(fixed(z=8192), 100, 1, id="larger-than-a-shard"),
        pytest.param(fixed(z=0), 100, 1 << 20, id="nothing-to-store"),
        pytest.param(fixed(z=1), 1 << 28, 1 << 20, id="no-more-than-the-limit"),
    ],
)
def test_full_shards_fill_whole_pages_where_they_can(schema: Schema, shard_bytes: int, rows: int) -> None:
    assert row_capacity(schema, shard_bytes) == rows


def test_the_largest_fixed_column_comes_first_and_ragged_ones_last() -> None:
    schema = {"r": Field(shape=(-1, 900), dtype="int64", ragged=True), **fixed(a=3, z=50, b=9)}

    order = column_order(schema)

    assert order == ["z", "a", "b", "r"]
    offsets, end = place_columns(order, {"z": 5000, "a": 0, "b": 1, "r": 4096})
    assert offsets == {"z": 0, "a": 2 * PAGE, "b": 2 * PAGE, "r": 3 * PAGE}
    assert end == 4 * PAGE


def test_blocks_cover_16_kib() -> None:
    kib = Field(shape=(101, 16, 32), dtype="float16")

    assert [block_count(kib, length) for length in (0, 1, 16, 17, 101)] == [0, 1, 1, 2, 7]
    assert block_count(Field(shape=(3, 1 << 20), dtype="uint8"), 3) == 3
    assert block_count(Field(shape=(3, 0), dtype="uint8"), 3) == 0
    assert block_count(Field(shape=(), dtype="int64"), 1) == 1
