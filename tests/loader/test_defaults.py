"""A program that calls `torch.set_default_device` or `torch.set_default_dtype`.

Host memory stays on the host: `meta` stands for a GPU here, and whatever lands on it by mistake has no
values, and fails or differs. Tables stay float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import stoker
from stoker.encoders.wrappers import FieldStatistics, NormalizedEncoder
from stoker.loader import Loader, Mixture, Normalization, Windows
from stoker.loader.outputs import find_conversion
from stoker.schema import Field
from stoker.store import Cache
from stoker.transforms import Crop, Flip, Noise, Normalize, Roll
from tests.loader.caches import Arrays, trajectories, write_cache
from tests.loader.layouts import values_of


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cache]:
    folder = tmp_path_factory.mktemp("c")
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (24, 3, 12, 12), dtype=torch.uint8, generator=generator)
    ragged = [torch.randn(4 + n % 5, 6, generator=generator) for n in range(24)]
    return {
        "timed": write_cache(folder, trajectories(), timed=("latent", "time"), shards=(5, 8), name="t"),
        "images": write_cache(folder, {"image": images}, shards=(5, 8), name="i"),
        "large": write_cache(folder, {"x": torch.randn((24, 80_000), generator=generator)}, name="l"),
        "ragged": write_cache(folder, {"u": ragged}, shards=(5, 8), name="r"),
        "packed": write_cache(folder, {"z": torch.randn(24, 4, 64)}, shards=(9,), name="p", dtype="int8"),
    }


IMAGE = {"image": Normalization(mean=(0.4, 0.5, 0.6), std=0.2, divisor=255)}
LATENT = Windows(field="latent", horizon=2)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("timed", {"windows": LATENT}),
    "windows, transforms": (
        "timed",
        {"windows": LATENT, "transforms": [Normalize(mean=0.5, std=2.0), Roll(axes=(-2,)), Noise(std=0.1)]},
    ),
    "normalized": ("images", {"normalize": IMAGE, "dtype": "bfloat16"}),
    "cropped": ("images", {"normalize": IMAGE, "transforms": [Crop((8, 8), axes=(-2, -1)), Flip(axis=-1)]}),
    "large": ("large", {}),
    "large, cast": ("large", {"dtype": "float16"}),
    "ragged": ("ragged", {}),
    "ragged, padded": ("ragged", {"ragged": "pad"}),
    "ragged, packed": ("ragged", {"ragged": "pack"}),
    "packed": ("packed", {"dtype": "float16"}),
    "weights": ("timed", {"weights": range(1, 25)}),
    "block": ("timed", {"windows": LATENT, "shuffle": "block(3,12)"}),
    "bucket": ("ragged", {"shuffle": "bucket(2)"}),
}


def batches(loader: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for batch in loader:
        for value in values_of(batch):
            found.extend(value if isinstance(value, list) else [value])
    return found


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_every_tier_serves_the_same_batches(caches: dict[str, Cache], way: str, tier: str) -> None:
    name, settings = WAYS[way]
    expected = batches(Loader(caches[name], 8, tier="host", seed=1, **{"shuffle": True, **settings}))

    with default_device("meta"):
        got = batches(Loader(caches[name], 8, tier=tier, seed=1, **{"shuffle": True, **settings}))

    assert all(value.device.type == "cpu" for value in got)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_mixture_serves_the_same_batches(caches: dict[str, Cache]) -> None:
    def served() -> list[Any]:
        mixture = Mixture([caches["timed"], caches["timed"]], 6, windows=LATENT, names=["a", "b"], seed=2)
        return [[b.z0, b.z1, b.tasks, *b.mask.values()] for b in mixture]

    expected = served()
    with default_device("meta"):
        got = served()

    assert len(got) == len(expected)
    for batch, wanted in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))


def grid() -> stoker.GridEncoder:
    return stoker.GridEncoder(channels=3, grid=(8, 12), patch=(2, 3), tokens=6, dim=5, seed=1)


def overlapping_grid() -> stoker.GridEncoder:
    return stoker.GridEncoder(channels=3, grid=(8, 12), patch=(2, 3), tokens=9, dim=5, seed=1)


def normalized_grid() -> NormalizedEncoder:
    statistics = FieldStatistics(
        field="data", method="standard", shift=(0.1, 0.2, 0.3), scale=(0.7, 1.3, 2.1), digest="0" * 64
    )
    return NormalizedEncoder(grid(), statistics)


def small_network() -> stoker.ModuleEncoder:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return stoker.ModuleEncoder(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(288, 7)))


ENCODERS = [grid, overlapping_grid, normalized_grid, small_network]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_encoding_stores_the_same_records(tmp_path: Path, encoder: Any) -> None:
    fields = torch.randn((10, 8, 12, 3), generator=torch.Generator().manual_seed(1))
    source = Arrays({"data": fields})
    expected = stoker.precompute(source, encoder(), tmp_path / "here", name="d", workers=0, dtype="int8")

    with default_device("meta"):
        cache = stoker.precompute(source, encoder(), tmp_path / "there", name="d", workers=0, dtype="int8")
        got = [cache[number]["latent"] for number in range(10)]

    assert cache.fingerprint == expected.fingerprint
    assert all(torch.equal(value, expected[number]["latent"]) for number, value in enumerate(got))


@pytest.mark.parametrize("way", WAYS)
def test_batches_do_not_depend_on_the_default_dtype(caches: dict[str, Cache], way: str) -> None:
    name, settings = WAYS[way]
    expected = batches(Loader(caches[name], 8, tier="host", seed=1, **{"shuffle": True, **settings}))

    with default_dtype(torch.bfloat16):
        got = batches(Loader(caches[name], 8, tier="host", seed=1, **{"shuffle": True, **settings}))

    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_records_do_not_depend_on_the_default_dtype(encoder: Any) -> None:
    batch = {"data": torch.randn((4, 8, 12, 3), generator=torch.Generator().manual_seed(1))}
    expected = encoder().encode(dict(batch))["latent"]
    made = encoder() if encoder is small_network else None  # a network of one's own is made as one says

    with default_dtype(torch.bfloat16):
        got = (made or encoder()).encode(dict(batch))["latent"]

    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_the_table_that_a_kernel_multiplies_by_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not needed: what the kernel is launched with is looked at."""
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: launched.append(args)

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = lambda **_: lambda function: Kernel()  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    language.constexpr = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "stoker.loader.triton_gather", raising=False)
    monkeypatch.setattr(
        stoker.loader, "triton_gather", None, raising=False
    )  # so that it is as before afterwards
    what = find_conversion(Field(shape=(3, 4, 4), dtype="uint8"), IMAGE["image"], "float32")
    assert what is not None

    with default_dtype(torch.bfloat16):
        from stoker.loader.gather import ConvertingGather
        from stoker.loader.triton_gather import TritonGather

        view = torch.zeros((5, 3, 4, 4), dtype=torch.uint8)
        TritonGather(view, what, ConvertingGather(view, what, 2, static=False).room)(torch.arange(2))
    monkeypatch.delitem(sys.modules, "stoker.loader.triton_gather")

    _, _, out, scale, shift, *_ = launched[0]
    assert out.dtype == scale.dtype == shift.dtype == torch.float32
    assert (tuple(scale.tolist()), tuple(shift.tolist())) == (what.scale, what.shift)
