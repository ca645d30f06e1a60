"""Every way to serve a cache, to a GPU: the bits of the CPU, and no wait for the device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.loader import placement
from tests.kit.ways import DRAWN, SOME_WAITS, WAYS, check_batches, loader_of, mixture_of, most_chunk_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"


def values_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.device.type == DEVICE, name
    return tensor.cpu()


def check(batches: list[Any], expected: list[Any], *, drawn: bool = False) -> None:
    """Compare batches with those of the CPU; of normal numbers the last bits are the device's own."""
    check_batches(batches, expected, values_of, tolerance=2e-3 if drawn else 0.0)


@contextmanager
def no_waits() -> Iterator[None]:
    """Make it an error to wait for the device."""
    with warnings.catch_warnings():  # "prototype feature"
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("way", {**WAYS, **DRAWN})
def test_every_tier_gives_the_bits_of_the_cpu(way_caches: dict[str, Any], way: str, tier: str) -> None:
    expected = list(loader_of(way_caches, way, tier="host"))
    loader = loader_of(way_caches, way, tier=tier, device=DEVICE)

    for _ in range(3):  # memory fills, buffers are used again
        loader.set_epoch(0)
        check(list(loader), expected, drawn=way in DRAWN)


@pytest.mark.parametrize("way", {**WAYS, **DRAWN})
def test_a_part_on_the_device_gives_the_bits_of_the_cpu(
    way_caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected = list(loader_of(way_caches, way, tier="host"))
    homes = {"device": frozenset([0]), "host": frozenset([1])}
    monkeypatch.setattr(placement, "assign", lambda *_: homes)
    loader = loader_of(way_caches, way, tier="device", device=DEVICE)

    for _ in range(3):
        loader.set_epoch(0)
        check(list(loader), expected, drawn=way in DRAWN)


WAITLESS = [
    way
    for way in {**WAYS, **DRAWN}
    if way not in SOME_WAITS and not most_chunk_waits(way) and way != "buckets"  # not tried on a GPU yet
]


@pytest.mark.parametrize("way", WAITLESS)
def test_no_batch_waits_for_the_device(way_caches: dict[str, Any], way: str) -> None:
    loader = loader_of(way_caches, way, tier="device", device=DEVICE)
    for _ in range(3):  # filled, and what is kept for later is made
        list(loader)

    with no_waits():
        assert list(loader)


@pytest.mark.parametrize("way", ["lists", "packed", "crops", "many shapes, padded", "joined caches"])
def test_fields_of_varying_length_wait_once_for_many_batches(way_caches: dict[str, Any], way: str) -> None:
    loader = loader_of(way_caches, way, tier="device", device=DEVICE, batch_size=4)
    for _ in range(3):
        list(loader)
    batches = iter(loader)
    next(batches)  # the rows of the chunk are known now, and that is the epoch

    with no_waits():
        assert len(list(batches)) == 11


def test_a_mixture_gives_the_bits_of_the_cpu(way_caches: dict[str, Any]) -> None:
    expected = list(mixture_of(way_caches, tier="host"))
    mixture = mixture_of(way_caches, tier="device", device=DEVICE)

    for _ in range(2):
        mixture.set_epoch(0)
        check(list(mixture), expected)


def test_a_loader_resumes_in_another_stream_and_thread(way_caches: dict[str, Any]) -> None:
    """Rows that were copied in the loader's own stream are read in that of the caller."""
    expected = list(loader_of(way_caches, "joined caches", tier="host"))
    loader = loader_of(way_caches, "joined caches", tier="host", device=DEVICE)
    found: list[Any] = []

    def serve() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1_000_000)
            found.extend(loader)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(60)

    check(found, expected)


def test_page_locked_buffers_are_not_written_again_before_their_copy(tmp_path: Path) -> None:
    """The device is kept busy, so that copies of many groups wait behind it."""
    data = [{"x": torch.full((64, 1024), float(number))} for number in range(96)]
    cache = stoker.precompute(data, None, tmp_path, name="x", workers=0, progress=None)
    loader = stoker.Loader(cache, 4, tier="host", device=DEVICE, seed=1, shuffle=True)
    kept: list[Any] = []
    for _ in range(2):
        for batch in loader:
            torch.cuda._sleep(5_000_000)
            kept.append(batch)

    for batch in kept:
        assert torch.equal(batch["x"][:, 0, 0].cpu(), batch["index"].cpu().float())
        assert bool((batch["x"] == batch["x"][:, :1, :1]).all())


def test_batches_of_a_cache_that_is_being_filled_come_to_the_device(tmp_path: Path) -> None:
    data = [{"x": torch.full((3,), float(n)), "u": torch.full((1 + n % 3, 2), float(n))} for n in range(60)]
    source = stoker.TorchSource(data, version="1")
    cache = stoker.precompute(source, None, tmp_path, name="f", workers=0, progress=None, wait=False)
    loader = stoker.Loader(cache, 8, device=DEVICE, seed=1, shuffle=True)

    for _ in range(3):  # while it is filled, and from the device afterwards
        numbers: list[int] = []
        for batch in loader:
            own = batch["index"].tolist()
            assert batch["x"].device.type == DEVICE
            assert batch["x"][:, 0].tolist() == own
            assert [int(one[0, 0]) for one in batch["u"]] == own
            numbers += own
        assert sorted(numbers) == [*range(60)]


def test_batches_are_handed_to_other_libraries_without_a_copy(way_caches: dict[str, Any]) -> None:
    batch = next(iter(loader_of(way_caches, "crops", tier="device", device=DEVICE)))

    for name in ("clip", "large", "label"):
        there = torch.from_dlpack(batch[name].__dlpack__())
        assert there.data_ptr() == batch[name].data_ptr()
        assert torch.equal(there, batch[name])


def test_jax_takes_batches_of_the_device(way_caches: dict[str, Any]) -> None:
    pytest.importorskip("jax")
    expected = list(loader_of(way_caches, "crops", tier="host"))
    got = list(
        loader_of(way_caches, "crops", tier="device", device=DEVICE, transforms=stoker.integrations.to_jax)
    )

    for batch, wanted in zip(got, expected, strict=True):
        assert batch["large"].tolist() == wanted["large"].tolist()
        assert batch["label"].tolist() == wanted["label"].tolist()
