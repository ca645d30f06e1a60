"""A set of images under its earlier names: own dtypes, true sizes, seeded order, nothing dropped unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stoker
from stoker.compat import GPUCachedDataset, GPUDataLoader, create_gpu_cached_dataloaders
from stoker.errors import ConfigError
from tests.encoders.tiny_dinov2 import make_model


class Hands(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images of bytes with joints, a mask and a number; of image 5 nothing can be read where `broken`."""

    def __init__(self, count: int = 50, broken: bool = False) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self.broken and number == 5:
            raise OSError("broken image")
        return {
            "image": torch.full((3, 4, 6), number, dtype=torch.uint8),
            "hand_joints": torch.full((21, 3), 1 / 3) * number,
            "has_hand": torch.tensor(number % 2 == 0),
            "object_ids": torch.tensor([number, -1]),
        }


def cached(folder: Path, **changes: Any) -> GPUCachedDataset:
    settings: dict[str, Any] = {
        "device": "cpu", "cache_path": folder, "max_samples": None, "dataset": Hands(),
        "precompute": {"workers": 0}, **changes,
    }  # fmt: skip
    return GPUCachedDataset("train", **settings)


def test_images_are_normalised_and_every_other_field_keeps_its_dtype(tmp_path: Path) -> None:
    dataset = cached(tmp_path, dtype=torch.bfloat16)

    batch = next(iter(GPUDataLoader(dataset, 8, shuffle=False)))

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert batch["image"].dtype == torch.bfloat16
    torch.testing.assert_close(batch["image"][7, :, 0, 0].float(), (7 / 255 - mean) / std, rtol=0, atol=0.02)
    assert batch["hand_joints"].dtype == torch.float32
    assert batch["hand_joints"][7, 0, 0] == pytest.approx(7 / 3)
    assert batch["has_hand"].tolist() == [True, False] * 4
    assert batch["object_ids"].dtype == torch.int64
    assert "shuffled" in repr(GPUDataLoader(dataset, 8).loader)  # unasked, as the earlier system did
    plain = next(iter(cached(tmp_path, normalize=False).loader(8, shuffle=False)))
    assert plain["image"][7, 0, 0, 0] == pytest.approx(7 / 255)


def test_it_has_items_a_length_and_a_true_size(tmp_path: Path) -> None:
    dataset = cached(tmp_path)

    assert len(dataset) == dataset.num_samples == 50
    assert dataset[7]["object_ids"].tolist() == [7, -1]
    assert dataset[-1]["object_ids"].tolist() == [49, -1]
    assert dataset._get_memory_usage() == 50 * (72 + 21 * 3 * 4 + 1 + 16) / 1e9
    with pytest.raises(IndexError):
        dataset[50]


def test_each_epoch_has_its_order_and_repeats_with_the_seed(tmp_path: Path) -> None:
    def epochs() -> list[list[int]]:
        dataset = cached(tmp_path)
        return [[int(i) for b in dataset.get_batch_generator(8) for i in b["index"]] for _ in range(2)]

    one, two = epochs()

    assert sorted(one) == sorted(two) == [*range(50)]
    assert one != two
    assert epochs() == [one, two]


def test_an_image_that_cannot_be_read_is_set_aside_and_named(tmp_path: Path) -> None:
    dataset = cached(tmp_path, dataset=Hands(broken=True), precompute={"workers": 0, "max_quarantined": 0.1})

    assert len(dataset) == 49
    assert "broken image" in dataset.cache.quarantined[5].error
    assert dataset[5]["object_ids"].tolist() == [6, -1]


def test_the_factory_takes_the_earlier_keys(tmp_path: Path) -> None:
    config = {
        "gpu_max_samples": None, "gpu_max_samples_val": None, "gpu_cache_path": tmp_path, "batch_size": 16,
        "use_bfloat16": False, "device": "cpu", "datasets": {"train": Hands(), "val": Hands(20)},
        "precompute": {"workers": 0},
    }  # fmt: skip

    train, val = create_gpu_cached_dataloaders(config)

    assert (len(train), len(val)) == (3, 2)
    assert next(iter(val))["index"].tolist() == [*range(16)]
    assert next(iter(train))["image"].dtype == torch.float32
    assert train.dataset.cache.path != val.dataset.cache.path
    with pytest.raises(ConfigError, match=r"gpu_maxsamples.*gpu_max_samples"):
        create_gpu_cached_dataloaders({"gpu_maxsamples": 3})


def test_features_of_a_local_model_lie_beside_the_images(tmp_path: Path) -> None:
    """Under the earlier name, and equal to what the encoder gives; one more setting, another cache."""
    pytest.importorskip("transformers", reason="pip install 'stoker[features]'")
    folder = make_model(tmp_path / "model")
    sized = [{"image": torch.full((3, 14, 28), n, dtype=torch.uint8), "n": n} for n in range(6)]
    common: dict[str, Any] = {"dataset": sized, "normalize": False}

    dataset = cached(tmp_path, load_dinov2_features=True, dinov2_folder=folder, **common)

    encoder = stoker.FeatureEncoder(folder, "mean")
    wanted = encoder.encode({"image": torch.stack([one["image"] for one in sized])})["features"]
    (batch,) = GPUDataLoader(dataset, 6, shuffle=False)
    torch.testing.assert_close(batch["dinov2_features"], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch["image"][:, 0, 0, 0], torch.arange(6) / 255)
    assert batch["n"].tolist() == [*range(6)]
    assert dataset.cache.path != cached(tmp_path, **common).cache.path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dataset": None}, "DEX_YCB_DIR"),
        ({"dataset": [torch.ones(3)] * 4}, "Expected one named 'image'"),
        ({"max_samples": 3}, "draw from it yourself"),
    ],
)
def test_what_it_does_not_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.delenv("DEX_YCB_DIR", raising=False)
    with pytest.raises(ConfigError, match=says):
        cached(tmp_path, **changes)


def test_a_folder_in_dexycbs_layout(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    from stoker.testing import write_dexycb

    root = write_dexycb(tmp_path / "raw", sequences=8)
    dataset = GPUCachedDataset(
        "train", 10, (24, 40), "cpu", cache_path=tmp_path / "cache", data_dir=root, precompute={"workers": 0}
    )

    batch = next(iter(dataset.loader(10, shuffle=False)))

    assert len(dataset) == 10
    assert batch["image"].shape == (10, 3, 24, 40)
    assert set(batch["has_hand"].tolist()) == {False, True}
    assert dataset.cache.name == "dexycb_train"
