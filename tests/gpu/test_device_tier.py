"""The device tier's kernels and its loading, on a CUDA device: the same bits as on the CPU."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.loader import Loader, Normalization, Windows
from stoker.store import Cache
from tests.kit.orders import in_order
from tests.loader.caches import trajectories, write_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LATENT = Normalization(mean=[0.1, -0.2, 0.3, 0.0, 1.0, 0.5], std=[1.0, 2.0, 0.5, 1.5, 3.0, 0.7], axis=-1)
IMAGE = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), divisor=255)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    image = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8)
    fields = {**trajectories(), "image": image}
    return write_cache(tmp_path_factory.mktemp("c"), fields, timed=("latent", "time"), shards=(5, 8))


def values_of(loader: Any) -> list[torch.Tensor]:
    return [
        part.cpu()
        for batch in loader
        for part in (batch.index, batch.z0, batch.z1, batch.future, *batch.cond.values())
    ]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_the_bits_of_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.loader.kernels import interpreted

    monkeypatch.setattr(interpreted, "DEVICE", "cuda")
    for check in interpreted.CHECKS:
        check()


@pytest.mark.parametrize("order", ["full", "sequential", "block(8,64)", "static(1)"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_normalised_batches_are_the_same_bits_on_every_tier(
    cache: Cache, dtype: str | None, order: str
) -> None:
    given: dict[str, Any] = {
        "windows": Windows(field="latent", horizon=3),
        "normalize": {"latent": LATENT, "image": IMAGE},
        "dtype": dtype,
        **in_order(order),
        "seed": 3,
    }
    expected = values_of(Loader(cache, 16, tier="host", **given))

    for tier in ("device", "host", "disk"):
        got = values_of(Loader(cache, 16, tier=tier, device="cuda", **given))
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), tier


def test_examples_drawn_by_weight_are_the_same_on_the_device(cache: Cache) -> None:
    given: dict[str, Any] = {
        "shuffle": True,
        "windows": Windows(field="latent", horizon=2),
        "weights": range(1, 25),
        "seed": 3,
    }
    expected = values_of(Loader(cache, 16, tier="host", **given))

    got = values_of(Loader(cache, 16, tier="device", device="cuda", **given))

    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_set_larger_than_the_buffers_arrives_in_other_streams(tmp_path: Path) -> None:
    records = torch.randint(0, 256, (70, 1 << 20), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"x": records}, shards=(30, 3))
    loader = Loader(cache, 10, tier="device", device="cuda", shuffle=False)

    for _ in range(2):
        for batch in loader:
            assert torch.equal(batch["x"].cpu(), records[batch["index"].cpu()])


def test_serving_an_epoch_never_waits_for_the_device(cache: Cache) -> None:
    loader = Loader(
        cache, 16, tier="device", device="cuda", windows=Windows(field="latent"), drop_last=True, shuffle=True
    )
    list(loader)

    with warnings.catch_warnings():  # "prototype feature"
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in loader:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_sees_every_static_batch(cache: Cache) -> None:
    """The pattern of docs/how-to/loader.md: the gather outside the graph, the step inside."""
    given: dict[str, Any] = {"normalize": {"image": IMAGE}, "shuffle": False}
    loader = Loader(cache, 8, tier="device", device="cuda", static=True, **given)
    total = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    first = next(iter(loader))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total.add_(first["image"].sum() + first["index"].sum())
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total.add_(first["image"].sum() + first["index"].sum())
    total.zero_()

    for _ in loader:
        graph.replay()

    plain = Loader(cache, 8, tier="host", **given)
    expected = sum(float(batch["image"].double().sum() + batch["index"].sum()) for batch in plain)
    assert float(total) == pytest.approx(expected, rel=1e-4)
