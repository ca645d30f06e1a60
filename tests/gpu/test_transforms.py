"""Transforms on the device: equal integers there and here, and batches that belong to their examples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.loader import Loader, Normalization, Windows
from stoker.loader.order import bits, example_keys, integers, normal, uniform
from stoker.transforms import Crop, Flip, Noise, Normalize, Roll
from tests.loader.caches import trajectories, write_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_integers_and_uniform_numbers_are_those_of_the_cpu() -> None:
    here = example_keys(3, 1, torch.arange(1000))
    there = example_keys(3, 1, torch.arange(1000, device="cuda"))

    assert torch.equal(here, there.cpu())
    for draw in (bits, uniform, lambda keys, n: integers(keys, n, 1000)):
        assert torch.equal(draw(here, 65), draw(there, 65).cpu())
    torch.testing.assert_close(normal(there, 65).cpu(), normal(here, 65), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_augmented_batches_on_the_device_belong_to_their_examples(tmp_path: Path, tier: str) -> None:
    cache = write_cache(tmp_path, trajectories(step=(6, 4)), timed=("latent", "time"), shards=(5, 7))
    transforms = [
        Normalize(mean=0.5, std=2.0),
        Flip(axis=-2),
        Roll(axes=(-2,)),
        Crop(size=5, axes=(-2,), padding=1, border="reflect"),
        Noise(std=0.1),
    ]

    def examples(**changes: object) -> dict[tuple[int, ...], torch.Tensor]:
        settings = {
            "shuffle": True,
            "batch_size": 8,
            "windows": Windows(field="latent"),
            "transforms": transforms,
            **changes,
        }
        batches = list(Loader(cache, **settings))
        return {
            tuple(index): z
            for batch in batches
            for index, z in zip(batch.index.tolist(), batch.z0.cpu(), strict=True)
        }

    measure, host = examples(device="cuda", tier="device"), examples()
    found = examples(device="cuda", tier=tier, batch_size=5)

    assert found.keys() == measure.keys() == host.keys()
    for index, z in found.items():
        assert torch.equal(z, measure[index])
        torch.testing.assert_close(z, host[index], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_images_cut_by_the_kernel_are_those_cut_after_it(
    tmp_path: Path, dtype: torch.dtype, *, static: bool
) -> None:
    images = torch.randint(0, 256, (70, 3, 40, 36)).to(dtype)
    cache = write_cache(tmp_path, {"image": images}, shards=(30, 40))
    normalize = {"image": Normalization(mean=(0.4, 0.5, 0.6), std=0.2, divisor=255)}
    transforms = [Crop((32, 28), axes=(-2, -1)), Flip(axis=-1)]

    def batches(**settings: object) -> list[torch.Tensor]:
        loader = Loader(cache, 16, drop_last=True, transforms=transforms, normalize=normalize, **settings)
        return [batch["image"].cpu() for batch in loader]

    there = batches(device="cuda", tier="device", static=static)

    assert len(there) == 4
    assert all(torch.equal(a, b) for a, b in zip(there, batches(), strict=True))
