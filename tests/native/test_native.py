"""The compiled library gives the bytes of its twins in Python, and refuses what they refuse."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import native
from stoker.loader import Loader
from tests.loader.caches import write_cache
from tests.loader.layouts import same

ROOT = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(native.library() is None, reason="core.c was not compiled: no C compiler")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="no C compiler")
def test_where_there_is_a_compiler_the_library_is_there() -> None:
    """Else all that follows would be left out without a word."""
    assert native.library() is not None, "install again: pip install -e ."


def address(values: Any) -> int:
    return np.asarray(values).ctypes.data


@needs_library
@given(size=st.one_of(st.integers(0, 300), st.integers(0, 40_000)), seed=st.integers(0, 2**64 - 1))
def test_digests_are_those_of_xxhash(size: int, seed: int) -> None:
    """Of every size up to 300 too: short ones have algorithms of their own."""
    for some in {size, *range(size % 17, 301, 17)}:
        check_digest(some, seed)


def check_digest(size: int, seed: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert native.library().stoker_digest(address(data), size, seed) == xxhash.xxh3_64_intdigest(data, seed)


@needs_library
@given(
    rows=st.integers(1, 40),
    shape=st.lists(st.integers(1, 12), max_size=3),
    picked=st.lists(st.integers(0, 39), max_size=30),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]),
    overlap=st.integers(1, 3),
)
def test_rows_are_those_of_index_select(
    rows: int, shape: list[int], picked: list[int], dtype: torch.dtype, overlap: int
) -> None:
    """Windows too, which overlap."""
    size = int(np.prod(shape, dtype=int))
    base = torch.arange((rows + 1) * size).to(dtype)
    view = base.as_strided((rows, *shape), (max(1, size // overlap), *torch.empty(shape).stride()))
    index = torch.tensor([number % rows for number in picked], dtype=torch.int64)
    assert native.can_gather(view)
    out = torch.empty((len(index), *shape), dtype=dtype)
    assert torch.equal(native.RowGather(view)(index, out), torch.index_select(view, 0, index))


@needs_library
@given(
    channels=st.integers(1, 5),
    inner=st.one_of(st.integers(1, 70), st.integers(1000, 1100)),
    groups=st.integers(1, 3),
    picked=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_bytes_are_scaled_to_the_bits_of_torch(
    channels: int, inner: int, groups: int, picked: list[int], seed: int
) -> None:
    """Channels in long runs, in short ones, and value by value; outputs at any address."""
    generator = torch.Generator().manual_seed(seed)
    view = torch.randint(0, 256, (7, groups, channels, inner), dtype=torch.uint8, generator=generator)
    scale, shift = torch.randn(2, channels, generator=generator)
    index = torch.tensor(picked)
    expected = view[index].float().mul_(scale[:, None]).add_(shift[:, None])
    for offset in (0, 1, 3):
        room = torch.empty(expected.numel() + offset)
        out = room[offset:].view(expected.shape)
        assert torch.equal(native.RowScale(view, scale, shift, inner)(index, out), expected)


@needs_library
@pytest.mark.parametrize("number", [-1, 5])
def test_a_number_that_is_no_row_is_refused_and_nothing_is_written(number: int) -> None:
    out = torch.full((2, 3), 7.0)
    with pytest.raises(IndexError, match=f"row {number} of 5"):
        native.RowGather(torch.zeros(5, 3))(torch.tensor([0, number]), out)
    one = torch.ones(1)
    with pytest.raises(IndexError, match=f"row {number} of 5"):
        native.RowScale(torch.zeros(5, 3, dtype=torch.uint8), one, one, 3)(torch.tensor([0, number]), out)
    assert out.tolist() == [[7.0] * 3] * 2


def test_views_whose_rows_are_not_in_one_piece_are_left_to_torch() -> None:
    assert not native.can_gather(torch.zeros(4, 6)[:, ::2])
    assert not native.can_gather(torch.zeros(4, 6, 2).transpose(1, 2))
    assert not native.can_gather(torch.zeros(0, 6))


RECORD, BLOCK, COUNT = 40_000, 16_384, 60


@pytest.fixture
def records(tmp_path: Path) -> dict[str, Any]:
    return make_records(tmp_path)


def make_records(folder: Path) -> dict[str, Any]:
    """A file of records, with their seeds and sums."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (COUNT, RECORD), np.uint8)
    (folder / "file").write_bytes(data.tobytes())
    seeds = rng.integers(0, 2**63, COUNT, np.uint64)
    sums = [
        [xxhash.xxh3_64_intdigest(row[at : at + BLOCK], int(seed)) for at in range(0, RECORD, BLOCK)]
        for row, seed in zip(data, seeds, strict=True)
    ]
    return {"data": data, "seeds": seeds, "sums": np.array(sums, np.uint64), "path": folder / "file"}


def read(
    records: dict[str, Any], rows: list[int], *, size: int = RECORD, check: bool = True
) -> tuple[Any, Any]:
    """The states and bytes of some records."""
    out = np.zeros((len(rows), size), np.uint8)
    numbers = np.array(rows, np.int64)
    fd = os.open(records["path"], os.O_RDONLY)
    try:
        found = native.Extents(
            np.full(len(rows), fd, np.int32), numbers * size, np.full(len(rows), size, np.int64),
            address(out) + np.arange(len(rows)) * size, address(records["seeds"]) + 8 * numbers,
            address(records["sums"]) + 24 * numbers,
        )  # fmt: skip
        native.announce(found)
        states = native.read_records(found, BLOCK, check=check)
    finally:
        os.close(fd)
    return states, out


@needs_library
@given(rows=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=80))
def test_records_are_read_in_any_order_and_neighbors_together(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int]
) -> None:
    made = make_records(tmp_path_factory.mktemp("read"))
    states, out = read(made, rows)
    assert states.tolist() == [native.READ] * len(rows)
    assert np.array_equal(out, made["data"][rows])


@needs_library
def test_damage_and_a_short_file_are_told_by_record(records: dict[str, Any]) -> None:
    content = bytearray(records["path"].read_bytes())
    content[7 * RECORD + 39_999] ^= 1
    records["path"].write_bytes(content[: 50 * RECORD - 1])

    states, _ = read(records, [*range(40, COUNT), 6, 7, 8])
    told = dict(zip([*range(40, COUNT), 6, 7, 8], states.tolist(), strict=True))
    assert told[7] == native.WRONG
    assert all(told[row] == native.READ for row in (6, 8, *range(40, 43)))
    assert all(told[row] == native.NOT_READ for row in range(49, COUNT))
    unchecked, _ = read(records, [7], check=False)
    assert unchecked.tolist() == [native.READ]


@needs_library
@pytest.mark.parametrize("damaged", [None, 0, 700_000])
def test_a_record_that_is_read_in_pieces_is_compared_in_all_of_them(
    tmp_path: Path, damaged: int | None
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 700_001, np.uint8)
    sums = [xxhash.xxh3_64_intdigest(data[at : at + BLOCK], 5) for at in range(0, len(data), BLOCK)]
    stored = data.copy()
    if damaged is not None:
        stored[damaged] ^= 1
    (tmp_path / "file").write_bytes(stored.tobytes())
    made = {"seeds": np.array([5], np.uint64), "sums": np.array(sums, np.uint64), "path": tmp_path / "file"}
    states, out = read(made, [0], size=len(data))
    assert states.tolist() == [native.READ if damaged is None else native.WRONG]
    assert damaged is not None or np.array_equal(out[0], data)


@needs_library
@pytest.mark.parametrize("verify", ["always", "off"])
def test_batches_from_disk_are_those_of_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    """Large and small records, several shards, a field of varying length beside them."""
    fields: dict[str, Any] = {
        "a": torch.randn(200, 40, 30),
        "b": torch.arange(200),
        "c": torch.randn(200, 100),
    }
    lengths = torch.randint(0, 40, (200,)).tolist()
    fields["d"] = [torch.randn(0 if n < 3 else n * 20, 30) for n in lengths]
    cache = write_cache(tmp_path, fields, shards=(37, 80, 20))
    made = Loader(cache, 16, shuffle=True, seed=3, tier="disk", verify=verify)
    batches = [batch for _ in range(2) for batch in made]
    monkeypatch.setattr(native, "library", lambda: None)
    twin = Loader(stoker.open_cache(cache.path), 16, shuffle=True, seed=3, tier="disk", verify=verify)
    for one, other in zip(batches, [batch for _ in range(2) for batch in twin], strict=True):
        assert one.position == other.position
        for name, value in one.items():
            both = (value, other[name]) if isinstance(value, list) else ([value], [other[name]])
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), name


@needs_library
def test_damage_on_disk_is_met_with_the_error_of_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_cache(tmp_path, {"a": torch.randn(50, 40, 30)}, shards=(20,))
    shard = sorted(cache.path.glob("shard-*"))[0]
    column = cache.shard(0).columns["a"]
    content = bytearray(shard.read_bytes())
    content[column.offset + 3 * column.nbytes // 20 + 11] ^= 4
    shard.write_bytes(content)

    said: list[str] = []
    for library in (native.library, lambda: None):
        monkeypatch.setattr(native, "library", library)
        with pytest.raises(stoker.errors.CorruptError) as caught:
            list(Loader(stoker.open_cache(cache.path), 10, tier="disk"))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "does not match its checksum" in said[0]


@needs_library
@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
def test_windows_from_disk_are_those_of_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any, ragged: bool
) -> None:
    """Neighboring steps, steps far from each other, and the end of a record, whose last block is short."""
    lengths = [60 + 7 * (n % 5) if ragged else 61 for n in range(30)]
    values: Any = [torch.randn(length, 16, 33) for length in lengths]
    fields = {"a": values if ragged else torch.stack(values), "b": torch.arange(30)}
    cache = write_cache(tmp_path, fields, shards=(7, 12), timed=("a",))
    windows = stoker.Windows(stride=7, horizon=3)
    made = Loader(cache, 16, shuffle=True, seed=3, tier="disk", verify=verify, windows=windows)
    with monkeypatch.context() as patch:
        patch.delattr("stoker.loader.record_reads.StepRead.read")  # nothing is left to the twin
        batches = list(made)
    monkeypatch.setattr(native, "library", lambda: None)
    again = stoker.open_cache(cache.path)
    twin = Loader(again, 16, shuffle=True, seed=3, tier="disk", verify=verify, windows=windows)
    for one, other in zip(batches, twin, strict=True):
        assert same(one, other)


@needs_library
def test_damage_beside_a_window_in_its_block_is_met(tmp_path: Path) -> None:
    """Complete blocks are compared, though a window is only a part of one."""
    cache = write_cache(tmp_path, {"a": torch.randn(3, 500, 8)}, timed=("a",))
    shard = next(cache.path.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[cache.shard(0).columns["a"].offset + 3] ^= 1  # of the first step of the first record
    shard.write_bytes(content)
    again = stoker.open_cache(cache.path)
    loader = Loader(again, 1, tier="disk", windows=stoker.Windows())
    loader.load_state_dict(loader.state_dict((0, 100)))

    with pytest.raises(stoker.errors.CorruptError, match="does not match its checksum"):
        next(iter(loader))
