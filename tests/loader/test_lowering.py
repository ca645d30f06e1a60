"""Crops and mirrors that a gather does on the device tier: the same bytes as when they come after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.loader import Loader, Normalization, serving
from stoker.loader.outputs import make_outputs
from stoker.loader.transform import find_fused_cuts
from stoker.plan import MemoryLedger
from stoker.store import Cache
from stoker.transforms import Crop, Flip, Noise
from tests.loader.caches import write_cache
from tests.loader.placement.machine import Machine, Running

COUNT = 26
CROP = Crop((5, 6), axes=(-2, -1), fields=("image",))
FLIP = Flip(axis=-1, fields=("image",))
NORMALISE = {"image": Normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), divisor=255)}


@pytest.fixture(scope="module", params=["uint8", "float16", "float32"])
def cache(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Cache:
    values = torch.randint(0, 256, (COUNT, 3, 8, 9), generator=torch.Generator().manual_seed(1))
    fields = {"image": values.to(getattr(torch, request.param)), "label": torch.arange(COUNT)}
    return write_cache(tmp_path_factory.mktemp("images"), fields, shards=(10, 16))


def batches(loader: Loader) -> list[Any]:
    found = []
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        found += [(batch["image"].clone(), batch["label"].clone(), batch.position) for batch in loader]
    return found


@pytest.mark.parametrize("normalize", [None, NORMALISE], ids=["plain", "normalized"])
@pytest.mark.parametrize(
    "transforms", [[CROP], [FLIP], [CROP, FLIP], [CROP, FLIP, Noise(0.1, fields=("image",))], [FLIP, CROP]]
)
def test_the_bytes_are_those_of_transforms_after_the_gather(
    cache: Cache, transforms: list[Any], normalize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(transforms[-1], Noise) and not (normalize or cache.schema["image"].floating):
        pytest.skip("noise is for floats")
    done: list[int] = []
    strip = serving.Strip

    def counted(**given: Any) -> Any:
        done.append(given["transformed"])
        return strip(**given)

    settings: dict[str, Any] = {
        "shuffle": True,
        "batch_size": 4,
        "transforms": transforms,
        "normalize": normalize,
        "seed": 2,
    }
    expected = batches(Loader(cache, tier="disk", **settings))
    running = Running(cache, Machine(device=10), MemoryLedger(), tier="device", **settings)
    monkeypatch.setattr(serving, "Strip", counted)

    got = batches(running.loader)

    assert set(done) == {1 if transforms == [FLIP, CROP] else min(2, len(transforms))}
    assert len(got) == len(expected)
    for (image, label, at), (other, other_label, other_at) in zip(got, expected, strict=True):
        assert image.dtype == other.dtype
        assert torch.equal(image, other)
        assert torch.equal(label, other_label)
        assert at == other_at


@pytest.mark.parametrize(
    "transforms",
    [
        [Noise(0.1, fields=("image",)), CROP],
        [Crop((5, 6), axes=(-3, -2), fields=("image",))],
        [Crop((5, 6), axes=(-1, -2), fields=("image",))],
        [Crop((5, 6), axes=(-2, -1), padding=1, fields=("image",))],
        [Crop((9, 9), axes=(-2, -1), fields=("image",))],
        [Flip(axis=-2, fields=("image",))],
        [Flip(axis=-1, negate=(0,), fields=("image",))],
        [Flip(axis=-1, fields=("image", "label"))],
        [Flip(axis=-1, fields=("nothing",))],
        [lambda batch, _: batch, FLIP],
    ],
    ids=lambda transforms: getattr(transforms[0], "__name__", str(transforms[0]))[:40],
)
def test_what_a_gather_cannot_do_is_left_to_the_transforms(cache: Cache, transforms: list[Any]) -> None:
    outputs = make_outputs(cache.schema, None, None)

    assert find_fused_cuts(transforms, outputs, 0, windowed=False).count == 0
    assert find_fused_cuts([CROP], outputs, 0, windowed=True).count == 0


def test_channels_within_a_plane_are_not_cut_by_the_gather(tmp_path: Path) -> None:
    """Kernels find a value's channel by its place, which a crop moves."""
    cache = write_cache(tmp_path, {"image": torch.zeros(4, 8, 9, 3)})
    by_last = {"image": Normalization(mean=(0.1, 0.2, 0.3), std=1.0, axis=-1)}

    crop = Crop((5, 2), axes=(-2, -1), fields=("image",))

    assert (
        find_fused_cuts([crop], make_outputs(cache.schema, None, None, by_last), 0, windowed=False).count == 0
    )
    assert find_fused_cuts([crop], make_outputs(cache.schema, None, None), 0, windowed=False).count == 1


def test_integers_that_float32_does_not_hold_are_left_alone(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"image": torch.zeros(4, 3, 8, 9, dtype=torch.int64)})

    assert find_fused_cuts([CROP], make_outputs(cache.schema, None, None), 0, windowed=False).count == 0
