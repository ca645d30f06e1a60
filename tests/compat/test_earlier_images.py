"""Cells of the earlier notebook, run on a small folder in DexYCB's layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stoker
import stoker.extras.compat.settings
from stoker.compat import (
    GPUCachedDataset,
    GPUDataLoader,
    create_gpu_cached_dataloaders,
    disable_compile_for_debug,
    disable_torch_compile,
    find_optimal_batch_size,
)
from stoker.errors import ConfigError
from stoker.extras.compat.images import FOLDER_VARIABLE
from tests.compat.page import snippets

KEYS = {
    "image", "hand_joints", "hand_joints_valid", "mano_pose", "mano_shape", "object_poses", "object_ids",
    "num_objects", "has_hand", "camera_intrinsics",
}  # fmt: skip
"""Of a batch, as the earlier dataset named them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two subjects, eight sequences, a camera, two images of each: 28 to train on, and 4 to validate on."""
    pytest.importorskip("PIL", reason="pip install 'stoker[images]'")
    from stoker.testing import write_dexycb

    return write_dexycb(tmp_path_factory.mktemp("dexycb"), sequences=8, cameras=1)


@pytest.fixture
def config(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a notebook has in its dictionary before the GPU keys are put into it."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stoker.extras.compat.settings, "_said", set[str]())
    return {
        "batch_size": 8,
        "learning_rate": 1e-4,
        "num_epochs": 3,
        "save_compressed": True,
        "hidden_dim": 64,
    }


@pytest.fixture
def images(config: dict[str, Any]) -> GPUCachedDataset:
    """The cell that makes a dataset by hand, with small images."""
    return GPUCachedDataset(
        split="train",
        max_samples=100000,
        image_size=(24, 40),
        device="cuda",
        dtype=torch.bfloat16,
        cache_path="./gpu_cache",
        normalize=True,
        load_dinov2_features=False,
    )


def test_the_cell_that_makes_both_loaders(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Five keys are added to a large dictionary; a line lists the others, another says there is no GPU."""
    config.update(
        {
            "gpu_max_samples": 100000,
            "gpu_max_samples_val": 10000,
            "gpu_cache_path": "./gpu_cache",
            "use_bfloat16": True,
            "preload_dinov2": False,
        }
    )
    with caplog.at_level(logging.WARNING, "stoker"):
        train_loader, val_loader = create_gpu_cached_dataloaders(config)

    (listed,) = [r.getMessage() for r in caplog.records if "learning_rate" in r.getMessage()]
    assert all(key in listed for key in ("hidden_dim", "num_epochs", "save_compressed"))
    assert "precompute.compression" in listed
    assert "gpu_max_samples" not in listed
    no_gpu = [r for r in caplog.records if "no GPU" in r.getMessage()]
    assert len(no_gpu) == (0 if torch.cuda.is_available() else 1)
    assert (len(train_loader), len(val_loader)) == (3, 1)  # train leaves a short last batch out
    assert Path("gpu_cache").is_dir()
    batch = next(iter(train_loader))
    assert set(batch) >= KEYS
    assert (batch["image"].dtype, batch["image"].shape) == (torch.bfloat16, (8, 3, 224, 224))
    assert {name: batch[name].dtype for name in ("camera_intrinsics", "hand_joints", "mano_pose")} == {
        "camera_intrinsics": torch.float32, "hand_joints": torch.float32, "mano_pose": torch.float32,
    }  # fmt: skip
    assert {batch[name].dtype for name in ("has_hand", "hand_joints_valid")} == {torch.bool}
    assert {batch[name].dtype for name in ("object_ids", "num_objects")} == {torch.int64}


def test_the_snippet_of_the_page_runs(config: dict[str, Any]) -> None:
    (code,) = snippets("Images in GPU memory")
    names: dict[str, Any] = {"config": {**config, "image_size": (24, 40)}}

    exec(code, names)

    assert [len(names[name].dataset) for name in ("train_loader", "val_loader")] == [28, 4]


def test_a_second_start_reads_no_image(config: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    config.update({"gpu_cache_path": tmp_path / "cache", "image_size": (24, 40)})
    first = create_gpu_cached_dataloaders(config)

    second = create_gpu_cached_dataloaders(config)

    assert [one.dataset.cache.path for one in first] == [one.dataset.cache.path for one in second]


def test_the_cell_that_makes_datasets_by_hand(images: GPUCachedDataset) -> None:
    train_loader = GPUDataLoader(images, batch_size=256, shuffle=True, drop_last=False, num_workers=4)

    (batch,) = train_loader
    item = images[0]

    assert train_loader.batch_size == 256
    assert len(batch["image"]) == len(images) == images.num_samples
    assert set(item) == set(batch)
    assert item["image"].shape == (3, 24, 40)
    assert set(batch["has_hand"].tolist()) == {False, True}
    stored = 3 * 24 * 40 * len(images) / 1e9
    assert stored < images._get_memory_usage() < 2 * stored


class Hands(nn.Module):
    """Takes a batch as the earlier models did, and fails beyond a number of images."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.to_joints = most, nn.Linear(3, 63)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        if len(batch["image"]) > self.most:
            raise torch.OutOfMemoryError("planted: out of memory")
        joints = self.to_joints(batch["image"].float().mean((2, 3)))
        return {"hand_joints": joints.view(-1, 21, 3), "stages": [joints]}


def test_the_cell_that_looks_for_the_batch_size(
    images: GPUCachedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    model = Hands(most=100)
    with caplog.at_level(logging.INFO, "stoker"):
        size = find_optimal_batch_size(model, images, initial=16, maximum=2048)

    assert 95 <= size <= 100
    lines = [record.getMessage() for record in caplog.records]
    assert "batch size 64 works" in lines
    assert "batch size 128 does not fit" in lines
    assert model.to_joints.weight.grad is None
    loader = GPUDataLoader(images, batch_size=8)
    assert find_optimal_batch_size(Hands(most=100), loader, 64, 80) == 80


def test_a_model_that_fails_otherwise_ends_the_search(images: GPUCachedDataset) -> None:
    """The earlier search tried for ever."""

    class Broken(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        find_optimal_batch_size(Broken(), images)
    with pytest.raises(ConfigError, match="step"):
        find_optimal_batch_size(nn.Identity(), images, 4, 8)


def test_the_cell_that_switches_compilation_off_is_the_function_of_the_package() -> None:
    """What it does is tested there (tests/train)."""
    assert disable_compile_for_debug is disable_torch_compile


@pytest.mark.parametrize(
    ("value", "fact"),
    [(None, "DEX_YCB_DIR is not set"), ("/no/such/dexycb", "DEX_YCB_DIR is /no/such/dexycb")],
)
def test_no_folder_is_said_before_anything_is_made(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str | None, fact: str
) -> None:
    if value is None:
        monkeypatch.delenv(FOLDER_VARIABLE)
    else:
        monkeypatch.setenv(FOLDER_VARIABLE, value)

    with pytest.raises(ConfigError, match=fact):
        create_gpu_cached_dataloaders(config)
    with pytest.raises(ConfigError, match="data_dir is missing/folder"):
        create_gpu_cached_dataloaders({**config, "data_dir": "missing/folder"})
    with pytest.raises(ConfigError, match="int8"):
        GPUCachedDataset(dtype=torch.int8)
    assert not Path("gpu_cache").exists()


def test_features_without_the_model_on_this_machine(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for in the local cache of Hugging Face alone."""
    pytest.importorskip("huggingface_hub")
    asked: list[dict[str, Any]] = []

    def not_there(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        raise FileNotFoundError("planted: not in the local cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", not_there)

    with pytest.raises(ConfigError, match="dinov2_folder"):
        create_gpu_cached_dataloaders({**config, "preload_dinov2": True})
    assert asked == [{"name": "facebook/dinov2-large", "local_files_only": True}]
