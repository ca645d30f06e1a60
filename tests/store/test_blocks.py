"""Reading many records at once gives what reading them one by one gives, the same errors included."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stoker.errors import CorruptError, RecordError
from stoker.schema import Field
from stoker.store import Cache, Shard
from stoker.store import shard as shard_module
from stoker.store.format import LocalFile
from stoker.store.values import block_sums, match
from tests.kit.amount import example_count
from tests.store.fakes import FakeSource, make_cache

SCHEMA = {
    "long": Field(shape=(2500, 3), dtype="float32", time=True),  # blocks of 1,365 steps: the second is short
    "even": Field(shape=(4, 8192), dtype="int16"),  # one block a step
    "small": Field(shape=(5,), dtype="float16"),
    "number": Field(shape=(), dtype="int64"),
    "empty": Field(shape=(0, 4), dtype="float32"),
    "words": Field(shape=(-1, 4096), dtype="float32", ragged=True),  # 0 to 6 blocks
}
ROWS = 7


def sizes(shard: Shard, field: str, rows: range) -> list[int]:
    return [shard.length(field, row) * shard.columns[field].field.row_bytes for row in rows]


def room(shard: Shard, field: str, rows: range) -> list[memoryview[Any]]:
    return [memoryview(bytearray(size)) for size in sizes(shard, field, rows)]


def one_by_one(shard: Shard, field: str, rows: range, verify: Any = "always") -> list[bytes] | str:
    """Their bytes, or the first error's message."""
    try:
        return [shard.read(field, row, verify=verify).tobytes() for row in rows]
    except CorruptError as error:
        return str(error)


def together(shard: Shard, field: str, rows: range, verify: Any, wait: bool) -> list[bytes] | str:
    outs = room(shard, field, rows)
    try:
        if not shard.fields[field].rows(rows.start, outs, verify, wait=wait):
            assert not wait
            assert shard.fields[field].rows(rows.start, outs, verify)
    except CorruptError as error:
        return str(error)
    return [bytes(out) for out in outs]


@pytest.fixture(scope="module")
def cache() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield make_cache(Path(folder), FakeSource(SCHEMA, [("a", ROWS)]))


def fresh(cache: Cache) -> Shard:
    return Cache(cache.path, cache.recipe, cache.index).shard(0)


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data())
def test_rows_together_are_the_rows_one_by_one_and_so_is_damage(cache: Cache, data: st.DataObject) -> None:
    """A flipped bit in any block of any row is found, and names shard, field and sample."""
    field = data.draw(st.sampled_from([*SCHEMA]))
    first = data.draw(st.integers(0, ROWS - 1))
    rows = range(first, data.draw(st.integers(first + 1, ROWS)))
    wait, verify = data.draw(st.booleans()), data.draw(st.sampled_from(["always", "first"]))
    shard = fresh(cache)
    before = one_by_one(shard, field, rows)
    assert together(shard, field, rows, verify, wait) == before
    column = shard.columns[field]
    if not column.nbytes:
        return

    at = column.offset + data.draw(st.integers(0, column.nbytes - 1))
    path = cache.path / shard.name
    flip(path, at)
    try:
        shard = fresh(cache)
        alone, found = one_by_one(shard, field, rows), together(fresh(cache), field, rows, verify, wait)
        assert found == alone
        ends = np.cumsum([0, *sizes(shard, field, range(ROWS))])
        hit = int(np.searchsorted(ends, at - column.offset, side="right")) - 1
        if hit in rows:
            assert f"{shard.name}: field {field!r} of sample {hit} does not match its checksum" in str(found)
            assert isinstance(together(shard, field, rows, "off", wait), list)
        else:
            assert found == before
    finally:
        flip(path, at)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 4]))


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data())
def test_steps_are_those_of_the_record_wherever_blocks_begin(cache: Cache, data: st.DataObject) -> None:
    field, row = (
        data.draw(st.sampled_from(["long", "even", "words", "small"])),
        data.draw(st.integers(0, ROWS - 1)),
    )
    shard = fresh(cache)
    length = shard.length(field, row)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    verify = data.draw(st.sampled_from(["always", "first", "off"]))
    wanted = shard.read(field, row)[start:stop].tobytes()

    for _ in range(2):  # the second time, "first" knows these blocks
        found = shard.fields[field].steps(row, start, stop, verify)
        assert found is not None
        assert bytes(found) == wanted
        soon = shard.fields[field].steps(row, start, stop, verify, wait=False)
        assert soon is None or bytes(soon) == wanted


def test_threads_that_read_first_at_the_same_time_agree_on_what_was_compared(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a part of a block would be compared with the sum of the whole block, and found damaged."""
    shard = fresh(cache)
    known = shard.fields["long"]._blocks
    rows = [memoryview(shard.read("long", row).tobytes()) for row in range(2)]
    part: list[tuple[int, int]] = []

    def interrupted(size: int) -> bytearray:
        monkeypatch.undo()  # as if another thread did this while the first one makes its table
        assert known.right(0, 0, rows[0], "first")
        part.append(known.cover(0, 10, 20, "first"))
        return bytearray(size)

    monkeypatch.setattr(shard_module, "bytearray", interrupted, raising=False)
    assert known.right(1, 0, rows[1], "first")

    low, high = part[0]
    assert known.right(0, low, rows[0][low * known.step_bytes : high * known.step_bytes], "first")


def test_a_buffer_of_another_size_is_refused(cache: Cache) -> None:
    shard = cache.shard(0)
    outs = room(shard, "small", range(2))
    with pytest.raises(RecordError, match="the buffer has 9 bytes, 5 steps of row 1 of 'small' need 10"):
        shard.fields["small"].rows(0, [outs[0], outs[1][:9]], "always")


def test_what_the_page_cache_lacks_is_left_to_the_next_call(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFile, "read_cached", lambda *_: False)
    shard = fresh(cache)
    outs = room(shard, "small", range(2))

    assert not shard.fields["small"].rows(0, outs, "always", wait=False)
    assert shard.fields["long"].steps(0, 3, 5, "always", wait=False) is None
    assert shard.fields["small"].rows(0, outs, "always")
    assert [bytes(out) for out in outs] == one_by_one(shard, "small", range(2))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 40])
def test_sums_match_what_they_were_made_of_and_nothing_else(size: int) -> None:
    field = Field(shape=(-1, 8), dtype="float32", ragged=True)
    block = 16384 // 32 * 32
    data = memoryview(bytearray(np.random.default_rng(0).bytes(size * 1024)))
    sums = [7, *block_sums(field, data, [len(data)], [3])]

    assert match(data, block, 3, sums, 1)
    if size:
        assert not match(data, block, 4, sums, 1)
        for at in (0, len(data) // 2, len(data) - 1):
            data[at] ^= 1
            assert not match(data, block, 3, sums, 1)
            data[at] ^= 1
