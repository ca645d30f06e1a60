"""Compressed shards: the same records in fewer bytes, and no damage that goes unnoticed or takes memory."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from stoker import precompute
from stoker.errors import ConfigError, CorruptError, FormatError, StokerError
from stoker.loader import Loader
from stoker.plan import Demand, Rates, Resources, plan_tiers
from stoker.plan.rates import measure_rates
from stoker.schema import Field
from stoker.store import Cache, make_recipe, open_cache, open_folder, pull, push
from stoker.store.compressed import MAX_BLOCK_BYTES, open_compressed
from stoker.store.format import LocalFile, pack_header, read_header, read_tail
from stoker.store.maintain import compact, repair
from stoker.store.storage import attach_mirror
from tests.loader.caches import Arrays
from tests.store.fakes import RAGGED, SCHEMA, FakeSource, assert_whole, fill, make_cache

FIELDS = {
    "latent": Field(shape=(40, 16, 64), dtype="float32", time=True),
    "half": Field(shape=(300,), dtype="float16"),
    "label": Field(shape=(), dtype="int64"),
}
"""A record of several blocks, one of which many records share, and one that is too short to compress."""


class Smooth(FakeSource):
    """Records that compress: noise, but little of it."""

    def __init__(self, parts: Any = (("a", 6),)) -> None:
        super().__init__(FIELDS, parts)

    def record(self, number: int) -> dict[str, torch.Tensor]:
        return {n: v if n == "label" else (v * 8).round() / 8 for n, v in super().record(number).items()}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return make_cache(tmp_path, Smooth(), compression="zstd")


def shard_of(cache: Cache) -> Path:
    return cache.path / cache.index.shards[0].file


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def table_of(path: Path) -> tuple[np.ndarray, int]:
    """`(blocks, 4)`: begin, bytes, stored bytes, sum; and where the first block is in the file."""
    header = read_header(LocalFile(path), where="")
    entry = header.tensors["__table__"]
    raw = path.read_bytes()[header.data_start + entry.begin : header.data_start + entry.end]
    return np.frombuffer(raw, "<u8").reshape(-1, 4).copy(), header.data_start + entry.end


def rewrite(path: Path, table: np.ndarray, blocks: bytes, size: int) -> None:
    """A shard whose own digests are right, whatever its table says."""
    header = read_header(LocalFile(path), where="")
    tensors = dict(header.tensors)
    begin = tensors["__blocks__"].begin
    tensors["__blocks__"] = type(tensors["__blocks__"])("U8", (len(blocks),), begin, begin + len(blocks))
    metadata = {k: v for k, v in header.metadata.items() if k != "self"}
    metadata |= {"table": xxhash.xxh3_128_hexdigest(table.tobytes()), "bytes": str(size)}
    path.write_bytes(pack_header(tensors, metadata, header.data_start) + table.tobytes() + blocks)


def test_it_is_smaller_and_another_recipe_it_is_not(tmp_path: Path, cache: Cache) -> None:
    plain = make_cache(tmp_path / "plain", Smooth())

    assert cache.fingerprint == plain.fingerprint
    assert shard_of(cache).stat().st_size < 0.6 * shard_of(plain).stat().st_size
    assert cache.index.shards[0].raw == shard_of(plain).stat().st_size
    assert_whole(cache, Smooth())
    assert b'"format":1' in (plain.path / "index.json").read_bytes()
    assert b'"format":3' in (cache.path / "index.json").read_bytes()


def test_shards_of_all_kinds_live_in_one_cache(tmp_path: Path) -> None:
    source = Smooth((("a", 9),))
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for i, kind in enumerate(["none", "zstd", "lz4"]):
        fill(folder, source, range(3 * i, 3 * i + 3), compression=kind)

    cache = folder.finish()

    assert {cache.shard(i).compression for i in range(3)} == {"none", "zstd", "lz4"}
    assert_whole(cache, source)
    assert cache.verify().ok


def test_auto_leaves_alone_what_it_cannot_make_smaller(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    noise = Arrays({"data": torch.from_numpy(generator.integers(0, 256, (8, 4096)).astype(np.uint8))})
    smooth = Arrays({"data": torch.zeros((8, 4096), dtype=torch.uint8)})

    kinds = [
        precompute(source, None, tmp_path, name=name, workers=0, compression="auto", progress=False)
        .shard(0)
        .compression
        for name, source in (("noise", noise), ("smooth", smooth))
    ]

    assert kinds == ["none", "zstd"]


def test_every_flipped_byte_is_found_and_never_served(cache: Cache) -> None:
    path, source = shard_of(cache), Smooth()
    whole = path.read_bytes()
    table, first = table_of(path)
    ends = first + np.cumsum(table[:, 2]).astype(int)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    places = [3, 40, len(json.dumps(header)) // 2, 4095, 4096, first - 1, *(ends - 1), *(ends[:-1] + 1)]
    for place in sorted({*map(int, places)}):
        flip(path, place)
        try:
            again = open_cache(cache.path, require_complete=False)
            assert not again.verify().ok, place
            for number in range(len(source)):
                with suppress(StokerError):
                    assert torch.equal(again[number]["latent"], source.record(number)["latent"]), place
        finally:
            path.write_bytes(whole)
    assert open_cache(cache.path).verify().ok


def test_a_damaged_block_costs_its_records_alone_and_is_named_with_its_place(cache: Cache) -> None:
    table, first = table_of(shard_of(cache))
    sizes = table[:, 2].astype(int)
    hit = next(i for i in range(1, len(sizes)) if table[i, 2] < table[i, 1])  # of the latents of sample 0
    flip(shard_of(cache), first + int(sizes[:hit].sum()) + sizes[hit] // 2)

    with pytest.raises(
        CorruptError, match=rf"field 'latent' of sample 0 .*compressed block {hit} \(bytes \d+"
    ):
        open_cache(cache.path)[0]
    for verify in ("first", "off"):  # these concern sums of records; a decompressor is given no damaged bytes
        with pytest.raises(CorruptError, match="sample 0"):
            cache.shard(0, fresh=True).read("latent", 0, verify=verify)  # type: ignore[arg-type]

    report = repair(cache.path)

    assert [bad.index for bad in report.bad] == [0]
    left = open_cache(cache.path, require_complete=False)
    assert_whole(left, Smooth(), range(1, 6))
    fill(open_folder(cache.path.parents[1], "x", cache.recipe), Smooth(), [0], compression="lz4")
    assert_whole(open_folder(cache.path.parents[1], "x", cache.recipe).finish(), Smooth())


@pytest.mark.parametrize("left", [0, 10, 4095, 4096, 4200, -1])
def test_a_shard_that_was_cut_off_is_refused(cache: Cache, left: int) -> None:
    path = shard_of(cache)
    path.write_bytes(path.read_bytes()[:left])

    with pytest.raises(CorruptError, match=path.name):
        open_cache(cache.path)
    with pytest.raises((CorruptError, FormatError), match=path.name):
        cache.shard(0, fresh=True)


def test_a_shard_that_claims_more_than_it_holds_allocates_nothing(cache: Cache) -> None:
    """Digests are right in each: whoever wrote it wanted this."""
    path = shard_of(cache)
    whole = path.read_bytes()
    table, first = table_of(path)
    blocks, size = whole[first:], int(table[-1, 0] + table[-1, 1])

    def refused(change: Any, message: str, *, blocks: bytes = blocks) -> None:
        fake = table.copy()
        change(fake)
        rewrite(path, fake, blocks, int(fake[-1, 0]) + int(fake[-1, 1]))
        with pytest.raises(FormatError, match=message):
            cache.shard(0, fresh=True).read("latent", 0)
        path.write_bytes(whole)

    def larger(fake: np.ndarray) -> None:
        fake[-1, 1] = MAX_BLOCK_BYTES + 1

    def later(fake: np.ndarray) -> None:  # numbers and sums of a tebibyte
        fake[-1, 0] += 1 << 40

    def frame(fake: np.ndarray) -> None:  # the block says one size to us, another to Blosc
        fake[1, 3] = xxhash.xxh3_64_intdigest(lied[: int(table[0, 2] + table[1, 2])][int(table[0, 2]) :])

    lied = bytearray(blocks)
    at = int(table[0, 2]) + 4
    lied[at : at + 4] = (1 << 30).to_bytes(4, "little")
    assert size > 0
    refused(larger, "contradicts itself")
    refused(later, "contradicts itself")
    refused(frame, r"claims 1,073,741,824 bytes", blocks=bytes(lied))


def test_numbers_and_sums_are_never_compressed_so_none_can_be_inflated(cache: Cache) -> None:
    table, _ = table_of(shard_of(cache))
    plain = open_compressed(LocalFile(shard_of(cache)), "")
    header = read_header(plain, where="")
    tail = header.data_start + header.tensors["__number__"].begin

    own = [(size, stored) for begin, size, stored, _ in table.tolist() if begin >= tail]
    assert own
    assert all(size == stored for size, stored in own)
    with pytest.raises(CorruptError, match="claims"):
        read_tail(plain, header, "x", plain.size - tail - 1)


@pytest.mark.parametrize("schema", [SCHEMA, RAGGED, FIELDS], ids=["fixed", "ragged", "large"])
def test_a_cache_is_compressed_and_decompressed_in_place(tmp_path: Path, schema: dict) -> None:
    source = FakeSource(schema, [("a", 9), ("b", 4)])
    before = make_cache(tmp_path, source)
    for kind in ("zstd", "lz4", "none"):
        report = compact(before.path, compression=kind)
        cache = open_cache(before.path)
        serving = [i for i, shard in enumerate(cache.index.shards) if len(shard.segments)]
        assert {cache.shard(i).compression for i in serving} == {kind}
        assert_whole(cache, source)
        assert cache.statistics == before.statistics
        assert report.bytes_after == sum(cache.index.shards[i].bytes for i in serving)
        assert compact(before.path, compression=kind).written == 0
    with pytest.raises(ConfigError, match="auto"):
        compact(before.path, compression="auto")


def test_merged_shards_stay_as_most_of_them_were(tmp_path: Path) -> None:
    source = Smooth()
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for i, kind in enumerate(["zstd", "none", "zstd"]):
        fill(folder, source, range(2 * i, 2 * i + 2), compression=kind)
    folder.finish()

    compact(folder.path)

    cache = open_cache(folder.path)
    assert cache.shard(0).compression == "zstd"
    assert_whole(cache, source)


def test_a_complete_cache_stays_as_it_is_whatever_a_later_run_asks_for(tmp_path: Path) -> None:
    arrays = {"data": torch.arange(40_000).reshape(8, 5000)}
    make = {"workers": 0, "progress": False, "name": "x"}
    first = precompute(Arrays(arrays), None, tmp_path, compression="zstd", **make)

    again = precompute(Arrays(arrays), None, tmp_path, compression="none", **make)

    assert again.path == first.path
    assert again.index.generation == first.index.generation, "nothing is missing, so nothing is written"


def test_a_cache_at_an_address_is_read_block_by_block_and_damage_is_fetched_again(tmp_path: Path) -> None:
    source = Smooth((("a", 12),))
    here = make_cache(tmp_path / "own", source, compression="zstd")
    address = f"file://{tmp_path / 'shared'}"
    push(here.path, address, mirror_dir=tmp_path / "m")

    cache = open_cache(attach_mirror(address, tmp_path / "b") / "x")
    assert_whole(cache, source)
    table, first = table_of(cache.path / cache.index.shards[0].file)
    flip(cache.path / cache.index.shards[0].file, first + int(table[:2, 2].sum()) - 3)
    assert_whole(open_cache(attach_mirror(address, tmp_path / "b") / "x"), source)
    loader = Loader(cache, batch_size=4, tier="disk", shuffle="block")
    assert sorted(n for batch in loader for n in batch["index"].tolist()) == [*range(12)]

    pulled = pull(f"{address}/x", tmp_path / "c")
    assert pulled.complete
    assert_whole(open_cache(tmp_path / "c" / "x"), source)


def test_without_the_library_the_error_names_what_to_install(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numcodecs.blosc", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'stoker\[compression\]'"):
        cache.shard(0, fresh=True)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[compression\]'"):
        make_cache(tmp_path / "other", Smooth(), compression="zstd")
    with pytest.raises(ConfigError, match=r"'gzip'.*none, zstd, lz4, auto"):
        make_cache(tmp_path / "other", Smooth(), compression="gzip")
    assert shard_of(cache).exists(), "what cannot be read for want of a library is not damaged"


def test_the_plan_reads_compressed_bytes_and_holds_raw_ones(cache: Cache) -> None:
    machine = Resources(host_bytes=1 << 20, host_total_bytes=1 << 20, host_limit="machine memory", cpus=4.0)
    demand = Demand(records=100, record_bytes=1e6, batch_examples=10, example_bytes=1e6)
    rates = Rates(disk_bytes_s=1e8, unpack_bytes_s=1e9, measured=True)

    def disk(ratio: float | None) -> tuple[int, float]:
        asked = Demand(
            records=demand.records, record_bytes=1e6, batch_examples=10, example_bytes=1e6, stored_ratio=ratio
        )
        row = plan_tiers(asked, machine, tier="disk", rates=rates).rows[2]
        assert row.load_s is not None
        return row.bytes, row.load_s

    assert disk(0.5)[0] == disk(None)[0] == 100 * 10**6
    assert disk(None)[1] - disk(0.5)[1] == pytest.approx(0.05 - 0.01 / 3), (
        "half, and decompression on three cores"
    )
    plan = Loader(cache, batch_size=2, tier="host", shuffle=True).plan
    assert "cannot be mapped" in plan.reason
    assert "in each process" in plan.rows[1].note
    assert measure_rates(cache.path).unpack_bytes_s != Rates().unpack_bytes_s
