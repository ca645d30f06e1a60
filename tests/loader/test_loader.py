from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.errors import (
    ConfigError,
    IncompleteError,
    MissingRecordError,
    ResourceError,
)
from stoker.loader import Loader, RecordBatch, Weights, Windows, options, record_reads
from stoker.loader.design import Design
from stoker.loader.serving import Engine
from stoker.monitor.meter import StallMeter
from stoker.plan.resources import is_out_of_memory
from stoker.store import Cache, open_cache
from tests.kit import forked as subprocess
from tests.loader.caches import write_cache
from tests.loader.layouts import COUNT, STEPS, TIMED, indices_of_records, values_of


def indices(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in loader for row in values_of(batch)[0].reshape(-1, 2).tolist()]


@pytest.mark.parametrize("tier", ["host", "disk", "auto", "device"])
@pytest.mark.parametrize("windows", [Windows(field="latent"), Windows(field="latent", stride=2, horizon=3)])
def test_windows_equal_slices_of_the_trajectories(
    cache: Cache, fields: dict[str, torch.Tensor], tier: str, windows: Windows
) -> None:
    seen = 0
    for batch in Loader(cache, batch_size=7, windows=windows, tier=tier, shuffle=True):
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
    batches = list(Loader(cache, batch_size=5, tier=tier, shuffle=True))

    for batch in batches:
        for name, values in fields.items():
            assert torch.equal(batch[name], values[batch["index"]])
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(COUNT))


def test_sequential_order_serves_in_sample_order(cache: Cache) -> None:
    assert indices_of_records(Loader(cache, batch_size=5, shuffle=False)) == list(range(COUNT))
    assert indices_of_records(Loader(cache, batch_size=5, shuffle=False)) == list(range(COUNT))


def test_chosen_indices_and_weights(cache: Cache) -> None:
    chosen = [3, 3, 20, 7]
    assert indices_of_records(Loader(cache, batch_size=2, indices=chosen, shuffle=False)) == chosen
    assert sorted(indices_of_records(Loader(cache, batch_size=2, indices=chosen, shuffle=True))) == sorted(
        chosen
    )
    weights = np.zeros(COUNT)
    weights[[4, 9]] = 1.0
    drawn = indices_of_records(Loader(cache, batch_size=4, weights=weights))
    assert set(drawn) == {4, 9}
    assert len(drawn) == COUNT
    assert drawn == indices_of_records(Loader(cache, batch_size=4, weights=weights, tier="disk"))
    with pytest.raises(MissingRecordError, match="first sample 24"):
        Loader(cache, indices=[1, 24], shuffle=True)
    with pytest.raises(ConfigError, match="one weight"):
        Loader(cache, weights=[1.0])
    with pytest.raises(ConfigError, match="finite"):
        Loader(cache, weights=[-1.0] * COUNT)


def test_floats_are_cast_on_request(cache: Cache, fields: dict[str, torch.Tensor]) -> None:
    for tier in ("host", "disk"):
        for batch in Loader(cache, batch_size=5, dtype="float32", tier=tier, shuffle=True):
            assert batch["latent"].dtype == torch.float32
            assert torch.equal(batch["latent"], fields["latent"][batch["index"]].float())
            assert batch["index"].dtype == torch.int64
    with pytest.raises(ConfigError, match="int32"):
        Loader(cache, dtype="int32", shuffle=True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.uint8, torch.bool]
)
def test_every_stored_dtype_is_served_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.randn(10, 5, 3) * 50).to(dtype)
    cache = write_cache(tmp_path, {"x": values}, shards=(4,))

    for tier in ("host", "disk"):
        for batch in Loader(cache, batch_size=3, tier=tier, shuffle=True):
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

    batches = list(Loader(cache, batch_size=3, windows=windows, tier=tier, shuffle=True))

    got = sorted(tuple(row) for batch in batches for row in batch.index.tolist())
    assert got == [(i, s) for i, t in enumerate(lengths) for s in range(max(0, t - 2))]
    for batch in batches:
        for j, (number, start) in enumerate(batch.index.tolist()):
            assert torch.equal(batch.z0[j], latent[number][start])
            assert torch.equal(batch.z1[j], latent[number][start + 1])
            assert torch.equal(batch.future[j], latent[number][start + 2 : start + 3])
            assert batch.cond["time"][j].tolist() == [start]
    whole = list(Loader(cache, batch_size=4, tier=tier, shuffle=True))
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

        return Loader(cache, transforms=[note], **{"shuffle": True, "batch_size": 5, **changes})

    plain = list(Loader(cache, batch_size=5, shuffle=True))
    for batch, before in zip(loader("host"), plain, strict=True):
        assert torch.equal(batch["nu"], before["nu"] + 1)
        assert batch.position == before.position
    list(loader("disk", tier="disk", batch_size=3))
    for rank in (0, 1):
        list(loader("ranks", batch_size=2, rank=rank, world_size=2))
    again = loader("epoch 1")
    again.set_epoch(1)
    list(again)

    assert seen["host"] == seen["disk"] == seen["ranks"]
    assert len(set(seen["host"].values())) == COUNT
    assert seen["epoch 1"] != seen["host"]


def test_the_meter_is_told_of_every_batch(cache: Cache) -> None:
    meter = StallMeter()
    loader = Loader(
        cache, batch_size=5, windows=Windows(field="latent"), meter=meter, tier="host", shuffle=True
    )
    total = sum(len(batch.index) for batch in loader)

    report = meter.epoch()
    assert (report.batches, report.examples) == (len(loader), total)
    assert report.bytes == total * (2 * 24 * 2 + 4 + 12 + 4 + 4)  # the last is dt, a difference of times
    assert set(report.tiers) <= {"host", "disk"}


def test_the_meter_knows_what_a_wait_was_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower bounds alone: a sleep is never shorter than asked for."""
    pause_s, read = 0.01, record_reads.PieceReader.read

    def slow_read(*args: Any) -> int:
        time.sleep(pause_s)
        return read(*args)

    def slow_transform(batch: Any, keys: torch.Tensor) -> Any:
        time.sleep(pause_s)
        return batch

    found: dict[str, dict[str, float]] = {}
    for name, wanted in {"disk": {"tier": "disk"}, "transform": {"transforms": [slow_transform]}}.items():
        with monkeypatch.context() as patch:
            patch.setattr(record_reads.PieceReader, "read", slow_read)
            meter = StallMeter()
            loader = Loader(
                cache,
                batch_size=5,
                windows=Windows(field="latent"),
                meter=meter,
                **{"shuffle": True, **wanted},
            )
            batches = len(list(loader))
        found[name] = meter.epoch().parts
        assert sum(found[name].values()) == pytest.approx(meter.epoch().wait_s)
    assert batches > 2
    assert found["disk"]["read"] > pause_s
    assert found["transform"]["transform"] >= (batches - 1) * pause_s
    assert "transform" not in found["disk"]


def test_it_looks_like_a_dataloader(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    options._said.clear()
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
    assert "24 examples in 5 batches of 5, shuffled" in repr(loader)
    assert "24 examples in 1 batch of 24, shuffled" in repr(Loader(cache, batch_size=24, shuffle=True))
    with pytest.raises(TypeError, match=r"argument 'batchsize'\. Did you mean batch_size\?"):
        Loader(cache, batchsize=3, shuffle=True)
    with pytest.raises(ConfigError, match="transforms="):
        Loader(cache, collate_fn=list, shuffle=True)
    with pytest.raises(ConfigError, match=r"'random'.*'block'"):
        Loader(cache, shuffle="random")
    with pytest.raises(ConfigError, match=r"'half'.*'static'"):
        Loader(cache, shuffle=True, partition="half")
    with pytest.raises(ConfigError, match="shuffle=True"):
        Loader(cache, shuffle="block", partition="static")


def test_a_loader_inside_a_dataloader_is_refused_with_the_cure(cache: Cache) -> None:
    class Inside(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Loader(cache, batch_size=2, shuffle=True))

    workers = torch.utils.data.DataLoader(Inside(), num_workers=1, batch_size=None)

    with pytest.raises(ConfigError, match="needs no workers"):
        next(iter(workers))


def test_after_a_fork_it_serves_the_same(cache: Cache) -> None:
    code = f"""
import os, signal, torch
torch.set_num_threads(2)
large = torch.ones(1 << 22)
large.sum()  # torch has threads now
from stoker.loader import Loader
from stoker.store import open_cache
loader = Loader(open_cache({str(cache.path)!r}), batch_size=5, shuffle=True, tier="host")
def digest():
    loader.set_epoch(0)
    return [batch["latent"].float().sum().item() for epoch in range(3) for batch in loader]
before = digest()
assert len(set(before)) == len(before) > 1
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if digest() == before and large.sum() == large.numel() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_two_threads_that_ask_for_the_first_batch_share_one_engine(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines would hold the records twice, and one of them would never be stopped."""
    made: list[object] = []
    both = threading.Event()

    class Slow(Engine):
        def __init__(self, design: Design, *more: Any) -> None:
            made.append(self)
            if len(made) > 1:
                both.set()
            both.wait(0.3)  # time for the other thread to begin an engine of its own
            super().__init__(design, *more)

    monkeypatch.setattr("stoker.loader.serving.Engine", Slow)
    loader = Loader(cache, batch_size=5, shuffle=True)
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda _: next(iter(loader))["index"].tolist(), range(2)))

    assert len(made) == 1
    assert first[0] == first[1]


def test_what_does_not_fit_is_refused_with_figures(cache: Cache) -> None:
    with pytest.raises(ResourceError, match="24 records"):
        Loader(cache, tier="host", reserve_bytes=2**60, shuffle=True)
    plan = Loader(cache, reserve_bytes=2**60, shuffle=True).plan
    assert plan.tier == "disk"
    assert plan.records_by_tier()["disk"] == COUNT
    with pytest.raises(ConfigError, match="tier"):
        Loader(cache, tier="vram", shuffle=True)


def test_an_incomplete_cache_is_refused_with_figures(tmp_path: Path, fields: dict[str, torch.Tensor]) -> None:
    write_cache(tmp_path, fields, timed=TIMED, skip=[2, 5], quarantine=False)
    opened = open_cache(tmp_path / "c", require_complete=False)

    with pytest.raises(IncompleteError, match="22 of 24 records; 2 are missing, the first is sample 2"):
        Loader(opened, shuffle=True)


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

    assert sorted(indices_of_records(Loader(opened, batch_size=5, shuffle=True))) == list(range(COUNT))
    assert asked == [2, 5]


def test_quarantined_samples_are_absent_and_counted(tmp_path: Path, fields: dict[str, torch.Tensor]) -> None:
    cache = write_cache(tmp_path, fields, timed=TIMED, skip=[2, 5], shards=(6, 6))

    loader = Loader(cache, batch_size=4, shuffle=True)

    assert sorted(indices_of_records(loader)) == sorted(set(range(COUNT)) - {2, 5})
    assert "2 quarantined samples are absent" in loader.plan.reason
    assert indices_of_records(Loader(cache, indices=[1, 2, 3], shuffle=False)) == [1, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 1},
        {"batch_size": 0, "shuffle": True, "partition": "static"},
    ],
)
def test_batches_and_ranks_that_are_none_are_refused(cache: Cache, changes: dict) -> None:
    with pytest.raises(ConfigError, match="Expected batch_size"):
        Loader(cache, **{"shuffle": True, "batch_size": 2, **changes})


@pytest.mark.parametrize("other", [torch.randn(5, 4, 2), [torch.randn(n, 2) for n in (6, 6, 3, 6, 6)]])
def test_time_fields_of_different_lengths_are_refused(tmp_path: Path, other: Any) -> None:
    """Windows of one would reach into another record of the other."""
    main = torch.randn(5, 6, 2) if isinstance(other, torch.Tensor) else [torch.randn(6, 2) for _ in range(5)]
    cache = write_cache(tmp_path, {"latent": main, "u": other}, timed=("latent", "u"))

    with pytest.raises(ConfigError, match="different lengths"):
        Loader(cache, windows=Windows(), shuffle=True)


def test_a_field_that_batches_would_hide_is_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"index": torch.randn(5, 3)})

    with pytest.raises(ConfigError, match="another name"):
        Loader(cache, shuffle=True)


def test_windows_on_what_has_no_time_are_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(5, 3)})

    with pytest.raises(ConfigError, match="Leave windows= out"):
        Loader(cache, windows=Windows(), shuffle=True)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_that_memory_cannot_hold_is_named_with_its_size(
    tmp_path: Path, tier: str, shuffle: bool
) -> None:
    """256 TiB are refused by the allocator at once, more than a process can have addresses for."""
    cache = write_cache(tmp_path, {"x": torch.zeros((1, 1 << 24))})
    count = 1 << 22
    weights = Weights([1.0], samples=count)

    with (
        Loader(cache, count, weights=weights, shuffle=shuffle, tier=tier) as loader,
        pytest.raises(ResourceError, match=r"4,194,304 examples .*256 TiB") as raised,
    ):
        next(iter(loader))

    assert "batch_size" in {one.name for one in raised.value.arguments}
    assert is_out_of_memory(raised.value)  # as `find_batch_size` asks
