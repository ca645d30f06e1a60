"""The paths that need a CUDA device: encoding on it, serving from it, training on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.encoders.module import ModuleEncoder
from stoker.loader import placement
from stoker.precompute import PrecomputeSettings, queue, run_precompute
from stoker.precompute.encoder_processes import EncoderProcesses
from stoker.precompute.run import StageBuilder
from stoker.train.config import TrainConfig
from stoker.train.run import train
from tests.conftest import write_burgers
from tests.kit.orders import in_order
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import values_of
from tests.precompute.fake_sources import FakeSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def encoder() -> stoker.GridEncoder:
    return stoker.GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=8, dim=4, seed=0)


@pytest.fixture
def cache(tmp_path: Path) -> stoker.Cache:
    path = write_burgers(tmp_path / "b_Nu0.01.hdf5", samples=50)
    source = stoker.HDF5Source(path, preset="pdebench")
    return stoker.precompute(source, encoder(), tmp_path / "cache", name="b", dtype="float16", workers=0)


def flat(batches: Any) -> list[torch.Tensor]:
    return [
        part.cpu()
        for b in batches
        for part in (b.index, b.z0, b.z1, b.future, *b.cond.values())
        if part is not None
    ]


def test_encoding_on_the_device_gives_the_records_of_the_cpu_within_rounding(
    cache: stoker.Cache, tmp_path: Path
) -> None:
    source = stoker.HDF5Source(tmp_path / "b_Nu0.01.hdf5", preset="pdebench")

    settings = PrecomputeSettings(workers=2, device="cuda", dtype="float16")
    report = run_precompute(source, encoder(), tmp_path / "gpu", name="b", settings=settings)

    assert report.encoded == 50
    assert report.fingerprint == cache.fingerprint
    for number in range(50):
        torch.testing.assert_close(
            report.cache[number]["latent"].float(), cache[number]["latent"].float(), rtol=2e-3, atol=2e-3
        )


def test_the_first_samples_are_encoded_here_and_no_record_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then children take over, to which this process leaves the memory of the device."""
    monkeypatch.setattr(queue, "FIRST_START_S", 0.5)
    monkeypatch.setattr(StageBuilder, "keep_encoder", lambda _: None)  # it is quick, and would stay
    monkeypatch.setattr(StageBuilder, "is_ready", lambda _: True)
    module = (
        torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).cuda().eval()
    )
    children: list[bool] = []
    start = EncoderProcesses.__init__

    def counted(self: EncoderProcesses, *given: Any, **named: Any) -> None:
        children.append(builders[-1].clock.calls > 0)
        start(self, *given, **named)

    builders: list[StageBuilder] = []
    begin = StageBuilder.head_start
    monkeypatch.setattr(StageBuilder, "head_start", lambda self: (builders.append(self), begin(self))[1])
    monkeypatch.setattr(EncoderProcesses, "__init__", counted)

    def encoded(folder: str, **settings: Any) -> stoker.Cache:
        source = FakeSource((300, 300), delay_s=0.004, run=13)
        taken = ModuleEncoder(module, field="data", encode_batch=4, version="1")
        return stoker.precompute(source, taken, tmp_path / folder, name="a", **settings)

    here, there = encoded("here"), encoded("there", workers=1)

    assert children == [True, False]
    assert here.fingerprint == there.fingerprint
    for number in range(600):
        assert torch.equal(here[number]["latent"], there[number]["latent"]), number


@pytest.mark.parametrize("order", ["full", "sequential", "block(8,64)"])
def test_the_device_tier_serves_the_same_bytes_as_the_host_tier(cache: stoker.Cache, order: str) -> None:
    windows = stoker.Windows(stride=1, horizon=2)
    expected = flat(stoker.Loader(cache, 16, windows=windows, tier="host", **in_order(order), seed=5))

    for tier in ("device", "host", "disk", "auto"):
        loader = stoker.Loader(
            cache, 16, windows=windows, tier=tier, device="cuda", **in_order(order), seed=5
        )
        batches = list(loader)
        assert all(batch.z0.device.type == "cuda" for batch in batches), tier
        got = flat(batches)
        assert len(got) == len(expected), tier
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), tier


def test_resume_moves_between_device_and_host(cache: stoker.Cache) -> None:
    windows = stoker.Windows()
    expected = flat(stoker.Loader(cache, 16, windows=windows, tier="host", seed=1, shuffle=True))
    begun = stoker.Loader(cache, 16, windows=windows, tier="device", device="cuda", seed=1, shuffle=True)
    passing = iter(begun)
    head = [next(passing) for _ in range(7)]

    resumed = stoker.Loader(cache, 16, windows=windows, tier="host", seed=1, shuffle=True)
    resumed.load_state_dict(begun.state_dict())

    got = flat(head) + flat(resumed)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_static_batches_keep_their_addresses(cache: stoker.Cache) -> None:
    loader = stoker.Loader(
        cache,
        16,
        windows=stoker.Windows(),
        tier="device",
        device="cuda",
        static=True,
        drop_last=True,
        shuffle=True,
    )

    addresses = {(batch.z0.data_ptr(), batch.z1.data_ptr()) for batch in loader}

    assert len(addresses) == 1


def test_batches_own_their_memory_on_the_device(cache: stoker.Cache) -> None:
    loader = stoker.Loader(
        cache, 16, windows=stoker.Windows(), tier="device", device="cuda", seed=2, shuffle=True
    )
    copies = [batch.z0.clone() for batch in loader]
    loader.set_epoch(0)

    held = list(loader)

    assert all(torch.equal(batch.z0, copy) for batch, copy in zip(held, copies, strict=True))


def test_the_plan_counts_the_device(cache: stoker.Cache) -> None:
    plan = stoker.Loader(cache, 16, windows=stoker.Windows(), device="cuda", shuffle=True).plan

    assert plan.tier == "device"
    assert plan.records_by_tier()["device"] == 50


def test_training_on_the_device_resumes_and_beats_persistence(cache: stoker.Cache, tmp_path: Path) -> None:
    def loaders() -> tuple[stoker.Loader, stoker.Loader]:
        windows = stoker.Windows()
        train_loader = stoker.Loader(
            cache, 32, windows=windows, device="cuda", indices=range(40), seed=0, shuffle=True
        )
        val = stoker.Loader(cache, 32, windows=windows, device="cuda", indices=range(40, 50), shuffle=False)
        return train_loader, val

    config: dict[str, Any] = {"lr": 2e-3, "width": 32, "depth": 2, "heads": 4, "device": "cuda", "seed": 0}
    train(*loaders(), TrainConfig(epochs=20, **config), tmp_path / "run")
    report = train(*loaders(), TrainConfig(epochs=40, resume=True, **config), tmp_path / "run")

    assert report.epochs == 40
    assert report.val_nrmse is not None
    assert report.persistence_nrmse is not None
    assert report.val_nrmse < report.persistence_nrmse


@pytest.fixture
def sharded(tmp_path: Path) -> stoker.Cache:
    return write_cache(
        tmp_path, trajectories(64, 9, (4, 64)), timed=("latent", "time"), shards=(8,) * 8, name="s"
    )


@pytest.mark.parametrize("on_device", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("order", ["full", "block(8,64)"])
@pytest.mark.parametrize("windows", [None, stoker.Windows(field="latent", horizon=3)])
def test_a_part_on_the_device_serves_the_same_bytes(
    sharded: stoker.Cache, monkeypatch: pytest.MonkeyPatch, on_device: int, order: str, windows: Any
) -> None:
    common: dict[str, Any] = {"windows": windows, **in_order(order), "seed": 3, "batch_size": 12}
    expected = list(stoker.Loader(sharded, tier="host", **common))
    homes = {"device": frozenset(range(on_device)), "host": frozenset(range(on_device, 6))}
    monkeypatch.setattr(placement, "assign", lambda *_: homes)

    loader = stoker.Loader(sharded, device="cuda", tier="device", **common)

    for _ in range(3):  # memory fills, buffers are used again
        loader.set_epoch(0)
        for got, wanted in zip(loader, expected, strict=True):
            assert got.position == wanted.position
            for a, b in zip(values_of(got), values_of(wanted), strict=True):
                assert a.device.type == "cuda"
                assert torch.equal(a.cpu(), b)


def test_the_device_is_filled_after_three_steps_and_given_back_under_pressure(
    sharded: stoker.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "LOOK_S", 0.0)
    loader = stoker.Loader(sharded, 4, device="cuda", seed=1, shuffle=True)
    expected = list(stoker.Loader(sharded, 4, tier="host", seed=1, shuffle=True))
    for batch, wanted in zip(loader, expected, strict=True):
        assert torch.equal(batch["latent"].cpu(), wanted["latent"])
    list(loader)
    until = time.monotonic() + 60
    while not loader._serving.running().placement.complete and time.monotonic() < until:
        time.sleep(0.01)
        list(loader)
    held = loader._serving.running().placement.held
    assert held.whole is not None
    assert held.whole.tier == "device"
    del held, batch
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]

    thief = torch.empty(before - (256 << 20), dtype=torch.uint8, device="cuda")
    loader.set_epoch(0)
    for batch, wanted in zip(loader, expected, strict=True):
        assert torch.equal(batch["latent"].cpu(), wanted["latent"])

    assert loader._serving.running().placement.held.device is None
    del thief
    torch.cuda.empty_cache()
