"""Serving to a device with memory of its own: nothing is on the wrong side, and the host waits for nothing.

The device is made up (`tests/kit/fake_device.py`); `tests/gpu` asks the same of a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.loader import placement
from tests.kit.fake_device import FakeTensor, fake_device
from tests.kit.ways import DRAWN, SOME_WAITS, WAYS, check_batches, loader_of, mixture_of, most_chunk_waits


def values_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, FakeTensor), f"{name} is on the host"
    return tensor.values


def filled(loader: Any) -> None:
    """Wait until all records are on the device, and serve an epoch that finds them there.

    Its first batch copies the tables of records to the device, once, which the host may wait for.
    """
    list(loader)
    placement = loader._serving.running().placement
    until = time.monotonic() + 60
    while not placement.complete and time.monotonic() < until:
        time.sleep(0.01)
    assert placement.complete
    list(loader)
    loader.set_epoch(0)


@pytest.mark.parametrize("way", {**WAYS, **DRAWN})
def test_batches_are_made_on_the_device_and_none_waits_for_it(
    way_caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected = list(loader_of(way_caches, way, tier="host"))

    with fake_device(monkeypatch) as waits:
        loader = loader_of(way_caches, way, tier="device", device="cuda")
        filled(loader)
        waits.seen.clear()
        got = list(loader)
        seen = [*waits.seen]

    check_batches(got, expected, values_of)
    if way not in SOME_WAITS:
        assert len(seen) <= most_chunk_waits(way), seen  # an epoch is one chunk here


def test_a_mixture_is_made_on_the_device(way_caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(mixture_of(way_caches, tier="host"))

    with fake_device(monkeypatch) as waits:
        mixture = mixture_of(way_caches, tier="device", device="cuda")
        list(mixture)
        mixture.set_epoch(0)
        waits.seen.clear()
        got = list(mixture)
        seen = [*waits.seen]

    check_batches(got, expected, values_of)
    assert not seen


PARTS = [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("on_device", PARTS)
@pytest.mark.parametrize("way", {**WAYS, **DRAWN})
def test_a_part_is_on_the_device_and_the_rest_comes_without_a_wait(
    way_caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch, way: str, on_device: int
) -> None:
    expected = list(loader_of(way_caches, way, tier="host"))
    homes = {"device": frozenset(range(on_device)), "host": frozenset(range(on_device, 3))}
    monkeypatch.setattr(placement, "assign", lambda *_: homes)

    with fake_device(monkeypatch) as waits:
        loader = loader_of(way_caches, way, tier="device", device="cuda")
        filled(loader)
        waits.seen.clear()
        got = list(loader)
        seen = [*waits.seen]

    check_batches(got, expected, values_of)
    groups = 2 * len(got) if way in GROUP_WAITS else 0
    assert len(seen) <= groups, seen


GROUP_WAITS = {name for name, (cache, how) in {**WAYS, **DRAWN}.items() if cache == "shaped"}
"""Sizes of images come with the copied records, and are read once for a group of batches and field."""


def test_batches_of_a_cache_that_is_being_filled_are_copied_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [{"x": torch.full((3,), float(n)), "u": torch.ones(1 + n % 3, 2)} for n in range(40)]
    source = stoker.TorchSource(data, version="1")

    with fake_device(monkeypatch) as waits:
        cache = stoker.precompute(source, None, tmp_path, name="f", workers=0, progress=None, wait=False)
        waits.seen.clear()
        got = list(stoker.Loader(cache, 8, device="cuda", seed=1))
        seen = [*waits.seen]

    numbers = [n for batch in got for n in batch["index"].values.tolist()]
    assert sorted(numbers) == [*range(40)]
    for batch in got:
        assert batch["x"].values[:, 0].tolist() == batch["index"].values.tolist()
        assert all(isinstance(one, FakeTensor) for one in batch["u"])
    assert not seen
