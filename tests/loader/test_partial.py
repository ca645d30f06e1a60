"""Batches drawn from several memories at once. A device is a CPU's memory here; its tier is what counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.loader import Loader, Normalization, Windows, disk
from stoker.loader.placement import replan
from stoker.loader.record_reads import PieceReader
from stoker.schema import QUANTIZED_DTYPES
from stoker.store import Cache
from tests.kit.amount import example_count
from tests.kit.orders import in_order
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import same, values_of

SHARDS = (3, 4, 5, 2, 6, 4)
COUNT = sum(SHARDS)
HOMES = ("device", "host", "disk")
WINDOWS = (None, Windows(field="latent"), Windows(field="latent", stride=2, horizon=3))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(
        tmp_path_factory.mktemp("fixed"), trajectories(COUNT), timed=("latent", "time"), shards=SHARDS
    )


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    generator = torch.Generator().manual_seed(3)
    lengths = [2 + (7 * i) % 5 for i in range(COUNT)]
    fields = {
        "latent": [torch.randn((n, 3), generator=generator) for n in lengths],
        "nu": torch.randn(COUNT, generator=generator),
    }
    return write_cache(tmp_path_factory.mktemp("ragged"), fields, timed=("latent",), shards=SHARDS)


def homes_of(where: list[str]) -> dict[str, frozenset[int]]:
    return {
        tier: frozenset(shard for shard, home in enumerate(where) if home == tier)
        for tier in ("device", "host")
    }


def move(loader: Loader, where: list[str]) -> None:
    """Have these shards in these memories, as a new plan would; done at once instead of in a thread."""
    engine = loader._serving.running()
    engine.placement._settle(homes_of(where))
    if engine.placement._freed:
        engine.placement._reclaim()
    engine.placement._line.submit(lambda: None).result(30, "what was to be filled before")
    engine.placement._fill()
    assert engine.placement.complete


def flat(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values_of(batch):
        found += value if isinstance(value, list) else [value]
    return found


def equal(a: Any, b: Any) -> bool:
    one, other = flat(a), flat(b)
    return (
        a.position == b.position
        and len(one) == len(other)
        and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(one, other, strict=True))
    )


def loader_at(cache: Cache, where: list[str], **settings: Any) -> Loader:
    loader = Loader(cache, tier="disk", **{"shuffle": True, **settings})
    move(loader, where)
    return loader


def same_wherever_shards_are(cache: Cache, ragged: Cache, data: st.DataObject) -> None:
    """Any assignment of shards to memories, changed again and again between batches: one stream."""
    varying = data.draw(st.booleans())
    common: dict[str, Any] = {
        "windows": data.draw(st.sampled_from([None, Windows()] if varying else WINDOWS)),
        **in_order(data.draw(st.sampled_from(["full", "block(3,12)", "static(1)", "sequential"]))),
        "batch_size": data.draw(st.integers(1, 9)),
        "seed": data.draw(st.integers(0, 9)),
        "dtype": data.draw(st.sampled_from([None, "float32"])),
        "normalize": data.draw(st.sampled_from([None, {"latent": Normalization(mean=0.25, std=1.5)}])),
    }
    targets = st.lists(st.sampled_from(HOMES), min_size=len(SHARDS), max_size=len(SHARDS))
    held = data.draw(st.integers(1, 64))  # batches made at once
    records = ragged if varying else cache
    expected = list(Loader(records, tier="disk", **common))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "GROUP_BYTES", held * 500)
        loader = loader_at(records, data.draw(targets), **common)
        moves = sorted(data.draw(st.lists(st.integers(1, max(1, len(expected) - 1)), max_size=4)))
        got: list[Any] = []
        running: Iterator[Any] = iter(loader)
        for stop in [*moves, len(expected)]:
            while len(got) < stop:
                got.append(next(running))
            move(loader, data.draw(targets))
        assert next(running, None) is None

    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


@settings(
    max_examples=example_count(90), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_batches_are_the_same_wherever_shards_are_and_move(
    cache: Cache, ragged: Cache, data: st.DataObject
) -> None:
    same_wherever_shards_are(cache, ragged, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batches_are_the_same_wherever_shards_are_a_thousand_times(
    cache: Cache, ragged: Cache, data: st.DataObject
) -> None:
    same_wherever_shards_are(cache, ragged, data)


@pytest.mark.parametrize(
    ("where", "tiers"),
    [
        pytest.param(["device"] * 6, {"device"}, id="device"),
        pytest.param(["device"] * 3 + ["host"] * 3, {"host"}, id="device-and-host"),
        pytest.param(["device"] * 2 + ["host"] * 2 + ["disk"] * 2, {"disk"}, id="all"),
        pytest.param(["host"] * 6, {"host"}, id="host"),
    ],
)
def test_the_slowest_tier_that_a_batch_came_from_is_told(
    cache: Cache, where: list[str], tiers: set[str]
) -> None:
    loader = loader_at(cache, where, batch_size=COUNT)

    assert {strip.tier for strip in loader._serving.running().strips(0, 0)} == tiers


def test_rows_in_memory_are_not_read_from_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch costs follows the fractions: a row in memory costs what memory costs."""
    read: list[int] = []
    loader = loader_at(cache, ["device", "device", "host", "host", "disk", "disk"], batch_size=7)
    reading = PieceReader.read

    def noted(self: Any, cache: Any, piece: Any, *rest: Any) -> int:
        read.append(len(piece))
        return reading(self, cache, piece, *rest)

    monkeypatch.setattr(PieceReader, "read", noted)

    batches = list(loader)

    assert sum(len(batch["index"]) for batch in batches) == COUNT
    assert sum(read) == sum(cache.index.shards[shard].rows for shard in (4, 5))


def test_every_example_exactly_once_while_shards_move(cache: Cache) -> None:
    loader = loader_at(cache, ["disk"] * 6, batch_size=5, seed=3)
    seen: list[int] = []
    for epoch in range(4):
        for number, batch in enumerate(loader):
            seen += batch["index"].tolist()
            move(loader, [HOMES[(number + shard + epoch) % 3] for shard in range(6)])

        assert sorted(seen) == list(range(COUNT))
        seen.clear()


@pytest.mark.parametrize("windows", [WINDOWS[1], Windows(field="latent", horizon=4)])
@pytest.mark.parametrize("batch_size", [4, 7])
def test_a_window_of_block_order_copies_its_trajectories_once(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, windows: Windows, batch_size: int
) -> None:
    """A set larger than the device slides through it: far fewer bytes than each example's steps."""
    per_record = windows.count(9)
    order = f"block({per_record},{4 * per_record})"
    common: dict[str, Any] = {"windows": windows, **in_order(order), "batch_size": batch_size, "seed": 5}
    expected = list(Loader(cache, tier="disk", **common))
    loader = loader_at(cache, ["device"] + ["host"] * 3 + ["disk"] * 2, **common)
    copied: list[tuple[int, int]] = []
    far = disk.PartialBatches._far

    def noted(self: Any, records: Any, starts: Any, *rest: Any) -> Any:
        values, rows, read = far(self, records, starts, *rest)
        copied.append((sum(v.nbytes for v in values), len(records)))
        assert rows is not None or len(records) < 2 * per_record
        return values, rows, read

    monkeypatch.setattr(disk.PartialBatches, "_far", noted)
    loader._serving.running()._pace.batches = 64

    got = list(loader)

    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    whole = cache.recipe.columns["latent"].size_bytes() + 4 + 12 + 36
    away = COUNT - cache.index.shards[0].rows
    assert sum(size for size, _ in copied) < 1.6 * away * whole
    assert sum(count for _, count in copied) == away * per_record, "every example once"


def test_a_transform_gets_the_keys_of_its_examples(cache: Cache) -> None:
    """Groups of batches are cut again into batches, and their examples with them."""

    def note(batch: Any, keys: torch.Tensor) -> Any:
        batch["keys"] = keys
        return batch

    expected = list(Loader(cache, batch_size=4, tier="host", transforms=[note], shuffle=True))
    loader = loader_at(cache, ["device", "host", "disk"] * 2, batch_size=4, transforms=[note])

    assert all(same(a, b) for a, b in zip(loader, expected, strict=True))


def test_batches_own_their_memory(cache: Cache) -> None:
    loader = loader_at(cache, ["device", "host"] * 3, batch_size=4, seed=1)
    copies = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    loader.set_epoch(0)

    held = list(loader)

    for batch, copy in zip(held, copies, strict=True):
        assert all(torch.equal(batch[name], copy[name]) for name in copy)


def test_damage_is_found_where_a_batch_is_mixed(tmp_path: Path) -> None:
    from stoker.errors import CorruptError

    cache = write_cache(tmp_path, {"x": torch.randn(40, 64)}, shards=(20, 20))
    shard = cache.shard(1)
    path = cache.path / shard.name
    data = bytearray(path.read_bytes())
    data[shard.columns["x"].offset + 5] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    loader = loader_at(cache, ["device", "disk"], batch_size=8)

    with pytest.raises(CorruptError, match="checksum"):
        list(loader)


def test_the_demand_is_kept_for_a_plan_made_again(cache: Cache) -> None:
    design = Loader(cache, batch_size=3, shuffle=True)._serving.design

    assert replan(design, design.measure()).records_by_tier() == design.plan.records_by_tier()
    on_disk = replace(design, options=replace(design.options, tier="disk"))
    assert replan(on_disk, design.measure()).tier == "disk"


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("windows", [None, Windows(field="latent", horizon=2)])
def test_packed_fields_are_moved_packed(tmp_path: Path, dtype: str, windows: Windows | None) -> None:
    fields = trajectories(COUNT, 9, (4, 40), torch.float32)
    packed = write_cache(tmp_path, fields, timed=("latent", "time"), shards=SHARDS, dtype=dtype)
    expected = list(Loader(packed, batch_size=5, windows=windows, tier="host", shuffle=True))

    loader = loader_at(packed, ["device", "host", "disk"] * 2, batch_size=5, windows=windows)

    assert all(equal(a, b) for a, b in zip(loader, expected, strict=True))
