from __future__ import annotations

import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import RecordBatch, WindowBatch
from stoker.loader.order import child_keys, example_keys
from stoker.loader.transform import run
from stoker.transforms import Crop, Flip, Noise, Normalize, Views

KEYS = example_keys(0, 0, torch.arange(10))


def images() -> RecordBatch:
    batch = RecordBatch(image=torch.rand(10, 6, 6, 3), label=torch.arange(10), index=torch.arange(10, 20))
    batch.position = (0, 10)
    return batch


def test_each_view_is_the_transforms_with_keys_of_its_own() -> None:
    inside = [Crop(size=6, padding=2, fields=("image",)), Flip(fields=("image",))]
    batch = images()

    made = Views(transforms=inside, count=3)(batch, KEYS)

    assert made["image"].shape == (10, 3, 6, 6, 3)
    for view in range(3):
        expected = run(inside, batch, child_keys(KEYS, view))["image"]
        assert torch.equal(made["image"][:, view], expected)
    assert not torch.equal(made["image"][:, 0], made["image"][:, 1])
    assert made["label"] is batch["label"]
    assert made["index"] is batch["index"]
    assert made.position == batch.position


def test_what_comes_before_is_common_to_all_views() -> None:
    shared = Noise(std=1.0, fields=("image",))
    nothing = Normalize(mean=0.0, std=1.0, fields=("image",))

    made = run([shared, Views(transforms=[nothing])], images(), KEYS)["image"]

    assert torch.equal(made[:, 0], made[:, 1])


def test_views_of_windows() -> None:
    z = torch.randn(10, 4, 5, 3)
    batch = WindowBatch(
        z[:, 0], z[:, 1], None, {"nu": torch.ones(10, 1)}, torch.zeros(10, 2, dtype=torch.int64), (0, 10)
    )

    made = Views(transforms=[Noise(std=0.1, fields=("z0",))])(batch, KEYS)

    assert made.z0.shape == (10, 2, 5, 3)
    assert made.z1 is batch.z1
    assert made.future is None


def test_no_view_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Views(transforms=[], count=0)
