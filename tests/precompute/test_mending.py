"""A damaged or lost file of a cache: the next run encodes what it held, says so, and nothing else."""

from __future__ import annotations

import pytest

from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.store import open_cache
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

SETTINGS = PrecomputeSettings(workers=0, progress=None)


def run(folder):
    return run_precompute(FakeSource((6, 4)), FakeEncoder(), folder, name="c", settings=SETTINGS)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@pytest.fixture
def cache(tmp_path):
    """Two shards: samples 0 to 5, and 6 to 9."""
    return run(tmp_path).cache


@pytest.fixture
def shard(cache):
    entry = next(entry for entry in cache.index.shards if entry.part == 1)
    return cache.path / entry.file


def assert_repaired(folder, cache, *, encoded):
    before = {number: cache[number] for number in range(6)}

    report = run(folder)

    assert (report.encoded, report.reused) == (encoded, 10 - encoded)
    again = open_cache(cache.path)
    assert again.complete
    assert again.verify().ok
    assert all((again[number]["latent"] == before[number]["latent"]).all() for number in before)
    assert run(folder).encoded == 0


@pytest.mark.chaos
@pytest.mark.parametrize("offset", [0, 3, 7, 8, 50, 300, 1000, 4095])
def test_a_flipped_byte_in_a_shards_header_costs_that_shards_records(tmp_path, cache, shard, offset, caplog):
    flip(shard, offset)

    assert_repaired(tmp_path, cache, encoded=4)

    assert str(shard) in caplog.text


@pytest.mark.chaos
def test_a_flipped_byte_in_its_numbers_or_sums_does_too(tmp_path, cache, shard):
    flip(shard, shard.stat().st_size - 3)

    assert_repaired(tmp_path, cache, encoded=4)


@pytest.mark.chaos
@pytest.mark.parametrize("size", [0, 100, 5000])
def test_so_does_a_truncated_shard(tmp_path, cache, shard, size):
    shard.write_bytes(shard.read_bytes()[:size])

    assert_repaired(tmp_path, cache, encoded=4)


@pytest.mark.chaos
def test_so_does_a_lost_one(tmp_path, cache, shard):
    shard.unlink()

    assert_repaired(tmp_path, cache, encoded=4)


@pytest.mark.chaos
def test_so_does_one_in_whose_place_another_was_put(tmp_path, cache, shard):
    other = next(path for path in cache.path.glob("shard-*") if path != shard)
    shard.write_bytes(other.read_bytes().ljust(shard.stat().st_size, b"\0")[: shard.stat().st_size])

    assert_repaired(tmp_path, cache, encoded=4)


@pytest.mark.chaos
@pytest.mark.parametrize("damaged", [False, True])
def test_a_damaged_index_is_made_again_from_records_that_are_read(tmp_path, cache, shard, damaged):
    """It alone knew which rows are damaged, so none is trusted on its shard's header."""
    flip(cache.path / "index.json", 100)
    if damaged:
        part = next(i for i, entry in enumerate(cache.index.shards) if entry.part == 1)
        flip(shard, cache.shard(part).columns["latent"].offset)

    assert_repaired(tmp_path, cache, encoded=int(damaged))
