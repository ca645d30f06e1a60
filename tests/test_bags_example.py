"""The example on bags of features: taken over as they are, and a part of each read in an epoch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import stoker

EXAMPLE = Path(__file__).parent.parent / "examples" / "bags.py"


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Bags of which a few rows tell the label."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "h5_files"
    folder.mkdir()
    lines = ["slide,label"]
    for number in range(32):
        rows, label = int(rng.integers(40, 900)), int(rng.integers(2))
        features = rng.normal(size=(rows, 16)).astype(np.float16)
        features[: rows // 8, 0] += 4 * (2 * label - 1)
        with h5py.File(folder / f"slide{number:02}.h5", "w") as file:
            file["features"] = features
            file["coords"] = rng.integers(0, 10_000, (rows, 2))
        lines.append(f"slide{number:02},{label}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    return folder


def example() -> Any:
    spec = importlib.util.spec_from_file_location("bags", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_labels_of_bags_are_learned_from_random_rows(slides: Path, tmp_path: Path) -> None:
    right = example().main(slides, tmp_path / "labels.csv", tmp_path / "caches", rows=64)

    assert right[-1] >= 0.9


def test_another_part_of_a_bag_comes_in_each_epoch(slides: Path, tmp_path: Path) -> None:
    bags = stoker.adopt(slides, tmp_path / "caches", name="bags")
    loader = stoker.Loader(bags, 4, choose={("features", "coords"): stoker.Rows(32)})
    epochs = [torch.cat([batch["coords"] for batch in loader]) for _ in range(2)]

    assert epochs[0].shape == (32, 32, 2)
    assert not torch.equal(*epochs)
    for number in range(32):
        own = {tuple(row) for row in bags[number]["coords"].tolist()}
        assert {tuple(row) for row in epochs[0][number].tolist()} <= own
