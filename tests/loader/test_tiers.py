"""Equal batches from every tier, and what becomes of tiers that fill, hang or are damaged."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import (
    ConfigError,
    CorruptError,
    StalledError,
)
from stoker.loader import Loader, Windows, placement, record_reads
from stoker.store import Cache, open_cache
from tests.kit.amount import example_count
from tests.kit.orders import in_order
from tests.loader.caches import write_cache
from tests.loader.layouts import COUNT, LAYOUTS, TIMED, same, values_of


def joined(batches: list[Any]) -> list[torch.Tensor]:
    """The batches of several ranks at one step, as one."""
    return [torch.cat(parts) for parts in zip(*map(values_of, batches), strict=True)]


def same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    """Tier x layout of shards x resume at any step x world size: one stream of global batches."""
    cuts = [{}, {"horizon": 2}, {"stride": (1, 3), "horizon": (1, 2)}]
    windows = data.draw(st.sampled_from([None, *(Windows(field="latent", **cut) for cut in cuts)]))
    order = data.draw(st.sampled_from(["full", "block(3,12)", "static(4)"]))
    world_size = data.draw(st.sampled_from([1, 2, 4]))
    tier = data.draw(st.sampled_from(["host", "disk"]))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    epoch = data.draw(st.integers(0, 3))
    seed = data.draw(st.integers(0, 2**32))
    common = {"windows": windows, **in_order(order), "seed": seed, "drop_last": True}
    reference = Loader(caches["one"], batch_size=4, tier="host", **common)
    reference.set_epoch(epoch)
    expected = list(reference)
    stop = data.draw(st.integers(0, len(expected) - 1))

    stopped = Loader(caches["many"], batch_size=4, tier="host", **common)
    stopped.set_epoch(epoch)
    begun = iter(stopped)
    for _ in range(stop):
        next(begun)
    state = stopped.state_dict()
    state.update(fingerprint=caches[layout].fingerprint, generation=1)  # another folder of the same records
    ranks = [
        Loader(
            caches[layout], batch_size=4 // world_size, tier=tier, rank=rank, world_size=world_size, **common
        )
        for rank in range(world_size)
    ]
    for loader in ranks:
        loader.load_state_dict(state)

    got = list(zip(*ranks, strict=True))
    assert len(got) == len(expected) - stop
    for whole, parts in zip(expected[stop:], got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(values_of(whole), joined(list(parts)), strict=True))
        assert all(part.position == whole.position for part in parts)


@settings(
    max_examples=example_count(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    same_bytes_everywhere(caches, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_same_bytes_everywhere_a_thousand_times(caches: dict[str, Cache], data: st.DataObject) -> None:
    same_bytes_everywhere(caches, data)


def test_a_batch_may_draw_from_memory_and_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """While shards are brought into memory, and for good where only some fit."""
    windows = Windows(field="latent", horizon=2)
    expected = list(Loader(cache, batch_size=6, windows=windows, tier="host", shuffle=True))
    monkeypatch.setattr(placement, "assign", lambda *_: {"device": frozenset(), "host": frozenset({0, 2})})

    mixed = Loader(cache, batch_size=6, windows=windows, tier="host", shuffle=True)

    for _ in range(2):
        got = list(mixed)
        mixed.set_epoch(0)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    engine = mixed._serving.engine
    assert engine is not None
    assert [bool(flag) for flag in engine.placement.held.memories[0].ready] == [True, False, True, False]


def test_what_memory_has_of_a_batch_is_copied_by_those_who_read_the_rest(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the step, that is; also for a model that is evaluated under `torch.inference_mode`."""
    expected = list(Loader(cache, batch_size=6, tier="host", shuffle=True))
    monkeypatch.setattr(placement, "assign", lambda *_: {"device": frozenset(), "host": frozenset({0, 2})})
    mixed = Loader(cache, batch_size=6, tier="host", shuffle=True)
    select, by = torch.index_select, set[str]()

    def noted(*arguments: Any, **settings: Any) -> torch.Tensor:
        by.add(threading.current_thread().name)
        return select(*arguments, **settings)

    monkeypatch.setattr(torch, "index_select", noted)

    with torch.inference_mode():
        got = list(mixed)

    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert by == {"stoker-read"}


def test_the_first_batches_do_not_wait_for_memory_to_fill(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(Loader(cache, batch_size=4, tier="disk", shuffle=True))
    monkeypatch.setattr(placement, "FIRST_WAIT_S", 0.0)
    loads = iter(range(100))
    gate = threading.Event()
    read = placement.Placement._fill

    def slowly(self: placement.Placement) -> None:
        gate.wait(30)
        next(loads)
        read(self)

    monkeypatch.setattr(placement.Placement, "_fill", slowly)
    loader = Loader(cache, batch_size=4, tier="host", shuffle=True)
    running = iter(loader)
    got = [next(running), next(running)]
    assert loader._serving.engine is not None
    assert loader._serving.engine.placement.serving() is None
    gate.set()
    got += running

    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_listed_batches_are_distinct(tmp_path: Path, tier: str) -> None:
    """Large outputs reuse memory, but never what somebody still holds."""
    images = torch.randint(0, 255, (40, 3, 256, 256), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"image": images}, shards=(15,))

    batches = list(Loader(cache, batch_size=8, tier=tier, shuffle=True))

    assert len({batch["image"].data_ptr() for batch in batches}) == 5
    for batch in batches:
        assert torch.equal(batch["image"], images[batch["index"]])


def test_memory_of_large_batches_is_reused_when_they_are_dropped(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (80, 3, 256, 256), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"image": images})

    addresses = [
        batch["image"].data_ptr() for batch in Loader(cache, batch_size=8, tier="host", shuffle=True)
    ]

    assert len(addresses) == 10
    assert len(set(addresses)) <= 3


def test_large_batches_are_gathered_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.loader.gather.THREADS_FROM_BYTES", 1)
    monkeypatch.setattr("stoker.loader.gather.REUSE_FROM_BYTES", 1)
    values = torch.randn(50, 33, 41)
    cache = write_cache(tmp_path, {"x": values}, shards=(17, 20))

    for batch in Loader(cache, batch_size=7, tier="host", shuffle=True):
        assert torch.equal(batch["x"], values[batch["index"]])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_flipped_bit_is_found_and_never_served(
    tmp_path: Path, fields: dict[str, torch.Tensor], tier: str
) -> None:
    cache = write_cache(tmp_path, fields, timed=TIMED, shards=(6, 6))
    shard = cache.shard(1)
    path = cache.path / shard.name
    data = bytearray(path.read_bytes())
    data[shard.columns["latent"].offset + 100] ^= 4
    os.chmod(path, 0o600)
    path.write_bytes(data)

    with pytest.raises(CorruptError, match=shard.name):
        list(Loader(open_cache(cache.path), batch_size=4, tier=tier, shuffle=True))


def test_a_read_that_hangs_is_a_stall_not_a_hang(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate = threading.Event()
    monkeypatch.setattr(record_reads.PieceReader, "read", lambda *_: gate.wait(30))

    with pytest.raises(StalledError, match=r"reading a batch .* 0\.1 s"):
        next(iter(Loader(cache, batch_size=4, tier="disk", timeout=0.1, shuffle=True)))
    gate.set()


def test_fixed_addresses_for_graphs(cache: Cache, fields: dict[str, torch.Tensor]) -> None:
    loader = Loader(cache, batch_size=5, tier="device", static=True, shuffle=True)
    addresses = set()
    for batch in loader:
        addresses.add(tuple(values.data_ptr() for values in values_of(batch)))
        assert torch.equal(batch["latent"], fields["latent"][batch["index"]])

    assert len(addresses) == 1
    assert len(loader) == COUNT // 5
    with pytest.raises(ConfigError, match="tier='device'"):
        Loader(cache, batch_size=5, static=True, shuffle=True)


def test_fixed_addresses_wait_for_memory_to_be_filled(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = placement.Placement._fill

    def slowly(self: placement.Placement) -> None:
        time.sleep(0.3)  # longer than other loaders wait before they serve from disk
        fill(self)

    monkeypatch.setattr(placement.Placement, "_fill", slowly)
    loader = Loader(cache, batch_size=5, tier="device", static=True, shuffle=True)

    assert len({batch["latent"].data_ptr() for batch in loader}) == 1


def test_what_ends_the_filling_of_memory_is_raised(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loader would serve from disk for ever, and nobody would know why."""
    gate = threading.Event()

    def failing(*_: object) -> None:
        gate.wait(30)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stoker.store.shard.Shard.verify_column", failing)
    loader = Loader(cache, batch_size=1, tier="host", shuffle=True)
    running = iter(loader)
    next(running)
    gate.set()
    assert loader._serving.engine is not None
    limit = time.monotonic() + 10
    while loader._serving.engine.placement._error is None and time.monotonic() < limit:
        time.sleep(0.01)

    with pytest.raises(OSError, match="Input/output"):
        next(running)
