from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import (
    ConfigError,
    CorruptError,
    IncompleteError,
    MissingRecordError,
    ResourceError,
    StaleStateError,
    StalledError,
)
from stoker.loader import Loader, RecordBatch, WindowBatch, Windows, arguments, pieces, residency
from stoker.monitor.meter import StallMeter
from stoker.store import Cache, open_cache
from tests.loader.caches import trajectories, write_cache

TIMED = ("latent", "time")
LAYOUTS: dict[str, tuple[int, ...]] = {"one": (), "unequal": (5, 7, 1), "many": (2,) * 11}
COUNT, STEPS = 24, 9


@pytest.fixture(scope="module")
def fields() -> dict[str, torch.Tensor]:
    return trajectories(COUNT, STEPS)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, torch.Tensor]) -> dict[str, Cache]:
    return {
        name: write_cache(tmp_path_factory.mktemp(name), fields, timed=TIMED, shards=shards)
        for name, shards in LAYOUTS.items()
    }


@pytest.fixture
def cache(caches: dict[str, Cache]) -> Cache:
    return caches["unequal"]


def values_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, WindowBatch):
        future = [] if batch.future is None else [batch.future]
        return [batch.index, batch.z0, batch.z1, *future, *(batch.cond[name] for name in sorted(batch.cond))]
    return [batch[name] for name in sorted(batch)]


def same(a: Any, b: Any) -> bool:
    return a.position == b.position and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(values_of(a), values_of(b), strict=True)
    )


def joined(batches: list[Any]) -> list[torch.Tensor]:
    """The batches of several ranks at one step, as one."""
    return [torch.cat(parts) for parts in zip(*map(values_of, batches), strict=True)]


def indices(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in loader for row in values_of(batch)[0].reshape(-1, 2).tolist()]


@pytest.mark.parametrize("tier", ["host", "disk", "auto", "device"])
@pytest.mark.parametrize("windows", [Windows(field="latent"), Windows(field="latent", stride=2, horizon=3)])
def test_windows_equal_slices_of_the_trajectories(
    cache: Cache, fields: dict[str, torch.Tensor], tier: str, windows: Windows
) -> None:
    seen = 0
    for batch in Loader(cache, batch_size=7, windows=windows, tier=tier):
        number, start = batch.index.unbind(1)
        steps = [fields["latent"][number, start + k * windows.stride] for k in range(windows.horizon + 1)]
        assert torch.equal(batch.z0, steps[0])
        assert torch.equal(batch.z1, steps[1])
        if windows.horizon == 1:
            assert batch.future is None
        else:
            assert torch.equal(batch.future, torch.stack(steps[2:], 1))
        assert torch.equal(batch.cond["nu"], fields["nu"][number, None])
        assert torch.equal(batch.cond["bc"], fields["bc"][number])
        assert torch.equal(batch.cond["time"], fields["time"][number, start, None])
        seen += len(batch.index)

    assert seen == COUNT * windows.count(STEPS)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_records_come_whole_with_their_numbers(
    cache: Cache, fields: dict[str, torch.Tensor], tier: str
) -> None:
    batches = list(Loader(cache, batch_size=5, tier=tier))

    for batch in batches:
        for name, values in fields.items():
            assert torch.equal(batch[name], values[batch["index"]])
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(COUNT))


@settings(max_examples=220, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    """Tier x layout of shards x resume at any step x world size: one stream of global batches."""
    windows = data.draw(st.sampled_from([None, Windows(field="latent"), Windows(field="latent", horizon=2)]))
    order = data.draw(st.sampled_from(["full", "block(3,12)", "static(4)"]))
    world = data.draw(st.sampled_from([1, 2, 4]))
    tier = data.draw(st.sampled_from(["host", "disk"]))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    epoch = data.draw(st.integers(0, 3))
    seed = data.draw(st.integers(0, 2**32))
    common = {"windows": windows, "order": order, "seed": seed, "drop_last": True}
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
        Loader(caches[layout], batch_size=4 // world, tier=tier, rank=rank, world=world, **common)
        for rank in range(world)
    ]
    for loader in ranks:
        loader.load_state_dict(state)

    got = list(zip(*ranks, strict=True))
    assert len(got) == len(expected) - stop
    for whole, parts in zip(expected[stop:], got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(values_of(whole), joined(list(parts)), strict=True))
        assert all(part.position == whole.position for part in parts)


def test_a_batch_may_draw_from_memory_and_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """While shards are brought into memory, and for good where only some fit."""
    windows = Windows(field="latent", horizon=2)
    expected = list(Loader(cache, batch_size=6, windows=windows, tier="host"))
    monkeypatch.setattr(residency, "assign", lambda *_: {"device": frozenset(), "host": frozenset({0, 2})})

    mixed = Loader(cache, batch_size=6, windows=windows, tier="host")

    for _ in range(2):
        got = list(mixed)
        mixed.set_epoch(0)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    engine = mixed._engine
    assert engine is not None
    assert [bool(flag) for flag in engine.residency.held.memories[0].ready] == [True, False, True, False]


def test_the_first_batches_do_not_wait_for_memory_to_fill(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(Loader(cache, batch_size=4, tier="disk"))
    monkeypatch.setattr(residency, "FIRST_WAIT_S", 0.0)
    loads = iter(range(100))
    gate = threading.Event()
    read = residency.Residency._fill

    def slowly(self: residency.Residency) -> None:
        gate.wait(30)
        next(loads)
        read(self)

    monkeypatch.setattr(residency.Residency, "_fill", slowly)
    loader = Loader(cache, batch_size=4, tier="host")
    running = iter(loader)
    got = [next(running), next(running)]
    assert loader._engine is not None
    assert loader._engine.residency.serving() is None
    gate.set()
    got += running

    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_listed_batches_are_distinct(tmp_path: Path, tier: str) -> None:
    """Large outputs reuse memory, but never what somebody still holds."""
    images = torch.randint(0, 255, (40, 3, 256, 256), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"image": images}, shards=(15,))

    batches = list(Loader(cache, batch_size=8, tier=tier))

    assert len({batch["image"].data_ptr() for batch in batches}) == 5
    for batch in batches:
        assert torch.equal(batch["image"], images[batch["index"]])


def test_memory_of_large_batches_is_reused_when_they_are_dropped(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (80, 3, 256, 256), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"image": images})

    addresses = [batch["image"].data_ptr() for batch in Loader(cache, batch_size=8, tier="host")]

    assert len(addresses) == 10
    assert len(set(addresses)) <= 3


def test_large_batches_are_gathered_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.loader.gather.THREADS_FROM_BYTES", 1)
    monkeypatch.setattr("stoker.loader.gather.REUSE_FROM_BYTES", 1)
    values = torch.randn(50, 33, 41)
    cache = write_cache(tmp_path, {"x": values}, shards=(17, 20))

    for batch in Loader(cache, batch_size=7, tier="host"):
        assert torch.equal(batch["x"], values[batch["index"]])


def test_epochs_differ_repeat_and_advance_by_themselves(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, seed=3)
    first, second = indices_of_records(loader), indices_of_records(loader)

    assert first != second
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert indices_of_records(Loader(cache, batch_size=5, seed=3)) == first
    loader.set_epoch(1)
    assert indices_of_records(loader) == second
    assert indices_of_records(Loader(cache, batch_size=5, seed=4)) != first


def indices_of_records(loader: Loader) -> list[int]:
    return [number for batch in loader for number in batch["index"].tolist()]


def test_an_abandoned_pass_starts_its_epoch_again(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5)
    first = next(iter(loader))

    assert loader.state_dict()["position"] == 5
    assert same(next(iter(loader)), first)
    assert loader.epoch == 0


def test_the_state_after_the_last_batch_is_the_next_epoch(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5)
    for _batch, _ in zip(loader, range(len(loader)), strict=False):
        pass

    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    assert loader.epoch == 1


@pytest.mark.parametrize("strip_bytes", [0, 1 << 14])
@pytest.mark.parametrize("windows", [None, Windows(field="latent", horizon=2)])
def test_two_passes_at_once_do_not_disturb_each_other(
    cache: Cache, windows: Windows | None, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are made ahead for one of them, and both take from the same loader."""
    expected = []
    for epoch in (0, 1):
        reference = Loader(cache, batch_size=3, windows=windows, tier="disk")
        reference.set_epoch(epoch)
        expected.append(list(reference))
    monkeypatch.setattr("stoker.loader.chunks.CHUNK_EXAMPLES", 9)
    monkeypatch.setattr("stoker.loader.gather.STRIP_BATCHES", 2)
    monkeypatch.setattr("stoker.loader.engine.STRIP_BATCHES", 2)
    monkeypatch.setattr("stoker.loader.gather.STRIP_OUTPUT_BYTES", strip_bytes)
    loader = Loader(cache, batch_size=3, windows=windows, tier="host")

    first = iter(loader)
    begun = next(first)
    loader.set_epoch(1)
    second = iter(loader)

    assert same(begun, expected[0][0])
    assert same(next(second), expected[1][0])
    for a, b, x, y in zip(first, second, expected[0][1:], expected[1][1:], strict=True):
        assert same(a, x)
        assert same(b, y)


@pytest.mark.parametrize("drop_last", [False, True])
def test_short_epochs_are_made_ahead_and_stay_what_they_are(cache: Cache, drop_last: bool) -> None:
    """Chunks of several epochs are made in one piece of work; a jump throws them away."""
    ahead = Loader(cache, batch_size=7, drop_last=drop_last, tier="host")

    for epoch in [*range(9), 3, 4, 5, 20, 21]:
        alone = Loader(cache, batch_size=7, drop_last=drop_last, tier="disk")
        alone.set_epoch(epoch)
        ahead.set_epoch(epoch)
        assert all(same(a, b) for a, b in zip(ahead, alone, strict=True))


def test_a_trainer_that_prefetches_saves_the_batch_it_used(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5)
    batches = list(loader)

    resumed = Loader(cache, batch_size=5)
    resumed.load_state_dict(loader.state_dict(batches[1].position))

    assert all(same(a, b) for a, b in zip(resumed, batches[2:], strict=True))


def test_set_epoch_keeps_a_restored_position(cache: Cache) -> None:
    """Trainers restore, and then call set_epoch with the epoch that they restored themselves."""
    loader = Loader(cache, batch_size=5)
    batches = list(loader)
    state = loader.state_dict(batches[0].position)
    resumed = Loader(cache, batch_size=5)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)

    assert same(next(iter(resumed)), batches[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"order": "block(2,4)"}, "order"),
        ({"batch_size": 6}, "global_batch 5 there, 6 here"),
        ({"indices": range(20)}, "examples 24 there, 20 here"),
        ({"indices": [*range(23), 0]}, "records"),
        ({"windows": Windows(field="latent")}, "windows"),
    ],
)
def test_a_state_of_another_loader_is_refused_by_name(cache: Cache, changes: dict, named: str) -> None:
    state = Loader(cache, batch_size=5).state_dict()

    with pytest.raises(StaleStateError, match=named):
        Loader(cache, **{"batch_size": 5, **changes}).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 99}, {"version": 1, "epoch": 0}])
def test_what_is_no_state_is_refused(cache: Cache, state: dict) -> None:
    with pytest.raises(StaleStateError, match="not the state of a loader"):
        Loader(cache, batch_size=5).load_state_dict(state)


def test_a_state_of_other_types_is_refused(cache: Cache) -> None:
    loader: Any = Loader(cache, batch_size=5)
    with pytest.raises(StaleStateError, match=r"is a dict, as state_dict.* gives it, not None"):
        loader.load_state_dict(None)
    with pytest.raises(StaleStateError, match=r"example 'a'\. Expected whole numbers"):
        loader.load_state_dict({**loader.state_dict(), "position": "a"})


def test_another_batch_size_goes_on_with_the_next_example(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5)
    order = indices_of_records(Loader(cache, batch_size=5))
    running = iter(loader)
    next(running), next(running)
    other = Loader(cache, batch_size=3)
    with pytest.raises(StaleStateError, match="allow_rebatch=True"):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(loader.state_dict(), allow_rebatch=True)

    assert indices_of_records(other) == order[10:]


@pytest.mark.parametrize("world", [2, 4])
def test_no_sample_is_lost_or_doubled_over_ranks(cache: Cache, world: int) -> None:
    training = [Loader(cache, batch_size=3, rank=rank, world=world) for rank in range(world)]
    evaluation = [
        Loader(cache, batch_size=3, rank=rank, world=world, order="sequential") for rank in range(world)
    ]

    assert len({len(loader) for loader in training}) == 1
    assert all(loader.drop_last for loader in training)
    served = [number for loader in training for number in indices_of_records(loader)]
    assert len(set(served)) == len(served) == COUNT // (3 * world) * 3 * world
    pieces = [indices_of_records(loader) for loader in evaluation]
    assert [number for piece in pieces for number in piece] == list(range(COUNT))


def test_sequential_order_serves_in_sample_order(cache: Cache) -> None:
    assert indices_of_records(Loader(cache, batch_size=5, order="sequential")) == list(range(COUNT))
    assert indices_of_records(Loader(cache, batch_size=5, shuffle=False)) == list(range(COUNT))


def test_chosen_indices_and_weights(cache: Cache) -> None:
    chosen = [3, 3, 20, 7]
    assert indices_of_records(Loader(cache, batch_size=2, indices=chosen, order="sequential")) == chosen
    assert sorted(indices_of_records(Loader(cache, batch_size=2, indices=chosen))) == sorted(chosen)
    weights = np.zeros(COUNT)
    weights[[4, 9]] = 1.0
    drawn = indices_of_records(Loader(cache, batch_size=4, weights=weights))
    assert set(drawn) == {4, 9}
    assert len(drawn) == COUNT
    assert drawn == indices_of_records(Loader(cache, batch_size=4, weights=weights, tier="disk"))
    with pytest.raises(MissingRecordError, match="first sample 24"):
        Loader(cache, indices=[1, 24])
    with pytest.raises(ConfigError, match="one weight"):
        Loader(cache, weights=[1.0])
    with pytest.raises(ConfigError, match="finite"):
        Loader(cache, weights=[-1.0] * COUNT)


def test_floats_are_cast_on_request(cache: Cache, fields: dict[str, torch.Tensor]) -> None:
    for tier in ("host", "disk"):
        for batch in Loader(cache, batch_size=5, dtype="float32", tier=tier):
            assert batch["latent"].dtype == torch.float32
            assert torch.equal(batch["latent"], fields["latent"][batch["index"]].float())
            assert batch["index"].dtype == torch.int64
    with pytest.raises(ConfigError, match="int32"):
        Loader(cache, dtype="int32")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.uint8, torch.bool]
)
def test_every_stored_dtype_is_served_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.randn(10, 5, 3) * 50).to(dtype)
    cache = write_cache(tmp_path, {"x": values}, shards=(4,))

    for tier in ("host", "disk"):
        for batch in Loader(cache, batch_size=3, tier=tier):
            assert batch["x"].dtype == dtype
            assert torch.equal(batch["x"], values[batch["index"]])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_trajectories_of_varying_length(tmp_path: Path, tier: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 2, 9, 1, 7, 3]
    latent = [torch.randn((t, 4), generator=generator) for t in lengths]
    clock = [torch.arange(t, dtype=torch.float32) for t in lengths]
    cache = write_cache(tmp_path, {"latent": latent, "time": clock}, timed=TIMED, shards=(2, 3))
    windows = Windows(horizon=2)

    batches = list(Loader(cache, batch_size=3, windows=windows, tier=tier))

    got = sorted(tuple(row) for batch in batches for row in batch.index.tolist())
    assert got == [(i, s) for i, t in enumerate(lengths) for s in range(max(0, t - 2))]
    for batch in batches:
        for j, (number, start) in enumerate(batch.index.tolist()):
            assert torch.equal(batch.z0[j], latent[number][start])
            assert torch.equal(batch.z1[j], latent[number][start + 1])
            assert torch.equal(batch.future[j], latent[number][start + 2 : start + 3])
            assert batch.cond["time"][j].tolist() == [start]
    whole = list(Loader(cache, batch_size=4, tier=tier))
    for batch in whole:
        for j, number in enumerate(batch["index"].tolist()):
            assert torch.equal(batch["latent"][j], latent[number])


def test_transforms_get_a_key_that_belongs_to_the_example(cache: Cache) -> None:
    seen: dict[str, dict[int, int]] = {}

    def loader(name: str, **changes: Any) -> Loader:
        def note(batch: RecordBatch, keys: torch.Tensor) -> RecordBatch:
            seen.setdefault(name, {}).update(zip(batch["index"].tolist(), keys.tolist(), strict=True))
            batch["nu"] = batch["nu"] + 1
            return batch

        return Loader(cache, transforms=[note], **{"batch_size": 5, **changes})

    plain = list(Loader(cache, batch_size=5))
    for batch, before in zip(loader("host"), plain, strict=True):
        assert torch.equal(batch["nu"], before["nu"] + 1)
        assert batch.position == before.position
    list(loader("disk", tier="disk", batch_size=3))
    for rank in (0, 1):
        list(loader("ranks", batch_size=2, rank=rank, world=2))
    again = loader("epoch 1")
    again.set_epoch(1)
    list(again)

    assert seen["host"] == seen["disk"] == seen["ranks"]
    assert len(set(seen["host"].values())) == COUNT
    assert seen["epoch 1"] != seen["host"]


def test_the_meter_is_told_of_every_batch(cache: Cache) -> None:
    meter = StallMeter()
    loader = Loader(cache, batch_size=5, windows=Windows(field="latent"), meter=meter, tier="host")
    total = sum(len(batch.index) for batch in loader)

    report = meter.epoch()
    assert (report.batches, report.examples) == (len(loader), total)
    assert report.bytes == total * (2 * 24 * 2 + 4 + 12 + 4)
    assert set(report.tiers) <= {"host", "disk"}


def test_the_meter_knows_what_a_wait_was_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower bounds alone: a sleep is never shorter than asked for."""
    pause_s, read = 0.01, pieces.Pieces.read

    def slow_read(*args: Any) -> int:
        time.sleep(pause_s)
        return read(*args)

    def slow_transform(batch: Any, keys: torch.Tensor) -> Any:
        time.sleep(pause_s)
        return batch

    found: dict[str, dict[str, float]] = {}
    for name, wanted in {"disk": {"tier": "disk"}, "transform": {"transforms": [slow_transform]}}.items():
        with monkeypatch.context() as patch:
            patch.setattr(pieces.Pieces, "read", slow_read)
            meter = StallMeter()
            loader = Loader(cache, batch_size=5, windows=Windows(field="latent"), meter=meter, **wanted)
            batches = len(list(loader))
        found[name] = meter.epoch().parts
        assert sum(found[name].values()) == pytest.approx(meter.epoch().wait_s)
    assert batches > 2
    assert found["disk"]["read"] > pause_s
    assert found["transform"]["transform"] >= (batches - 1) * pause_s
    assert "transform" not in found["disk"]


def test_it_looks_like_a_dataloader(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    arguments._said.clear()
    with caplog.at_level(logging.WARNING, logger="stoker"):
        for _ in range(2):
            loader = Loader(
                cache,
                5,
                shuffle=True,
                num_workers=4,
                pin_memory=True,
                prefetch_factor=2,
                persistent_workers=True,
            )
    said = [record.message for record in caplog.records]

    assert len([line for line in said if "num_workers=4" in line]) == 1
    assert len(loader) == 5
    assert (loader.batch_size, loader.drop_last, loader.dataset) == (5, False, cache)
    loader.sampler.set_epoch(7)
    assert loader.epoch == 7
    assert "24 examples in 5 batches of 5, full order" in repr(loader)
    assert "24 examples in 1 batch of 24, full order" in repr(Loader(cache, batch_size=24))
    with pytest.raises(TypeError, match=r"argument 'batchsize'\. Did you mean batch_size\?"):
        Loader(cache, batchsize=3)
    with pytest.raises(ConfigError, match="transforms="):
        Loader(cache, collate_fn=list)
    with pytest.raises(ConfigError, match="same thing twice"):
        Loader(cache, shuffle=True, order="full")


def test_a_loader_inside_a_dataloader_is_refused_with_the_cure(cache: Cache) -> None:
    class Inside(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Loader(cache, batch_size=2))

    workers = torch.utils.data.DataLoader(Inside(), num_workers=1, batch_size=None)

    with pytest.raises(ConfigError, match="needs no workers"):
        next(iter(workers))


def test_after_a_fork_it_serves_the_same(cache: Cache) -> None:
    code = f"""
import os, torch
torch.set_num_threads(1)
from stoker.loader import Loader
from stoker.store import open_cache
loader = Loader(open_cache({str(cache.path)!r}), batch_size=5, tier="host")
def digest():
    loader.set_epoch(0)
    return [batch["latent"].float().sum().item() for epoch in range(3) for batch in loader]
before = digest()
assert len(set(before)) == len(before) > 1
child = os.fork()
if not child:
    os._exit(0 if digest() == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_what_does_not_fit_is_refused_with_figures(cache: Cache) -> None:
    with pytest.raises(ResourceError, match="24 records"):
        Loader(cache, tier="host", reserve_bytes=2**60)
    plan = Loader(cache, reserve_bytes=2**60).plan
    assert plan.tier == "disk"
    assert plan.records_by_tier()["disk"] == COUNT
    with pytest.raises(ConfigError, match="tier"):
        Loader(cache, tier="gpu")


def test_an_incomplete_cache_is_refused_with_figures(tmp_path: Path, fields: dict[str, torch.Tensor]) -> None:
    write_cache(tmp_path, fields, timed=TIMED, skip=[2, 5], quarantine=False)
    opened = open_cache(tmp_path / "c", require_complete=False)

    with pytest.raises(IncompleteError, match="22 of 24 records; 2 are missing, the first is sample 2"):
        Loader(opened)


def test_a_filler_encodes_what_is_missing(tmp_path: Path, fields: dict[str, torch.Tensor]) -> None:
    write_cache(tmp_path, fields, timed=TIMED, skip=[2, 5], quarantine=False)
    opened = open_cache(tmp_path / "c", require_complete=False)
    asked: list[int] = []

    class Filler:
        def fill(self, numbers: list[int], deadline_s: float) -> None:
            asked.extend(numbers)
            assert deadline_s > 0
            write_cache(tmp_path, fields, timed=TIMED)

    opened.filler = Filler()

    assert sorted(indices_of_records(Loader(opened, batch_size=5))) == list(range(COUNT))
    assert asked == [2, 5]


def test_quarantined_samples_are_absent_and_counted(tmp_path: Path, fields: dict[str, torch.Tensor]) -> None:
    cache = write_cache(tmp_path, fields, timed=TIMED, skip=[2, 5], shards=(6, 6))

    loader = Loader(cache, batch_size=4)

    assert sorted(indices_of_records(loader)) == sorted(set(range(COUNT)) - {2, 5})
    assert "2 quarantined samples are absent" in loader.plan.reason
    assert indices_of_records(Loader(cache, indices=[1, 2, 3], order="sequential")) == [1, 3]


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
        list(Loader(open_cache(cache.path), batch_size=4, tier=tier))


def test_a_read_that_hangs_is_a_stall_not_a_hang(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate = threading.Event()
    monkeypatch.setattr(pieces.Pieces, "read", lambda *_: gate.wait(30))

    with pytest.raises(StalledError, match=r"reading a batch .* 0\.1 s"):
        next(iter(Loader(cache, batch_size=4, tier="disk", timeout=0.1)))
    gate.set()


def test_fixed_addresses_for_graphs(cache: Cache, fields: dict[str, torch.Tensor]) -> None:
    loader = Loader(cache, batch_size=5, tier="device", static=True)
    addresses = set()
    for batch in loader:
        addresses.add(tuple(values.data_ptr() for values in values_of(batch)))
        assert torch.equal(batch["latent"], fields["latent"][batch["index"]])

    assert len(addresses) == 1
    assert len(loader) == COUNT // 5
    with pytest.raises(ConfigError, match="tier='device'"):
        Loader(cache, batch_size=5, static=True)


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"world": 0}, {"rank": 1}, {"batch_size": 0, "order": "static"}]
)
def test_batches_and_ranks_that_are_none_are_refused(cache: Cache, changes: dict) -> None:
    with pytest.raises(ConfigError, match="Expected batch_size"):
        Loader(cache, **{"batch_size": 2, **changes})


def test_fixed_addresses_wait_for_memory_to_be_filled(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = residency.Residency._fill

    def slowly(self: residency.Residency) -> None:
        time.sleep(0.3)  # longer than other loaders wait before they serve from disk
        fill(self)

    monkeypatch.setattr(residency.Residency, "_fill", slowly)
    loader = Loader(cache, batch_size=5, tier="device", static=True)

    assert len({batch["latent"].data_ptr() for batch in loader}) == 1


def test_what_ends_the_filling_of_memory_is_raised(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loader would serve from disk for ever, and nobody would know why."""
    gate = threading.Event()

    def failing(*_: object) -> None:
        gate.wait(30)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stoker.store.shard_read.Shard.verify_column", failing)
    loader = Loader(cache, batch_size=1, tier="host")
    running = iter(loader)
    next(running)
    gate.set()
    assert loader._engine is not None
    limit = time.monotonic() + 10
    while loader._engine.residency._error is None and time.monotonic() < limit:
        time.sleep(0.01)

    with pytest.raises(OSError, match="Input/output"):
        next(running)


@pytest.mark.parametrize("other", [torch.randn(5, 4, 2), [torch.randn(n, 2) for n in (6, 6, 3, 6, 6)]])
def test_time_fields_of_different_lengths_are_refused(tmp_path: Path, other: Any) -> None:
    """Windows of one would reach into another record of the other."""
    main = torch.randn(5, 6, 2) if isinstance(other, torch.Tensor) else [torch.randn(6, 2) for _ in range(5)]
    cache = write_cache(tmp_path, {"latent": main, "u": other}, timed=("latent", "u"))

    with pytest.raises(ConfigError, match="different lengths"):
        Loader(cache, windows=Windows())


def test_a_field_that_batches_would_hide_is_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"index": torch.randn(5, 3)})

    with pytest.raises(ConfigError, match="another name"):
        Loader(cache)


def test_windows_on_what_has_no_time_are_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(5, 3)})

    with pytest.raises(ConfigError, match="Leave windows= out"):
        Loader(cache, windows=Windows())
