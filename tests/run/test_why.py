from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from stoker import cached
from stoker.errors import ConfigError, FormatError
from stoker.run.caches import explain
from stoker.run.context import Run
from stoker.run.precompute import fill_caches
from tests.run.conftest import Configure


def write_settings(configure: Configure, path: Path, *overrides: str) -> Path:
    path.write_text(configure(*overrides).to_yaml())
    return path


def test_the_nearest_cache_is_the_one_that_differs_least(configure: Configure, tmp_path: Path) -> None:
    fill_caches(Run(configure("latent.dim=6", "encoder.seed=3")), ["train"])
    near = fill_caches(Run(configure("encoder.seed=3")), ["train"])[0]

    found = explain(write_settings(configure, tmp_path / "c.yaml"))

    assert found.b == str(near.cache.path)
    assert [d.entry for d in found.differences] == ["encoder.weights"]


@pytest.mark.parametrize("swap", [False, True])
def test_normalising_is_one_difference(configure: Configure, tmp_path: Path, swap: bool) -> None:
    plain = write_settings(configure, tmp_path / "a.yaml")
    normalized = write_settings(configure, tmp_path / "b.yaml", "data.normalize=true")

    found = explain(normalized, plain) if swap else explain(plain, normalized)

    assert [(d.entry, d.a, d.b) for d in found.differences] == [
        ("encoder.normalized", *(("yes", "no") if swap else ("no", "yes")))
    ]


def test_samples_of_a_torch_dataset_were_probed(tmp_path: Path) -> None:
    for value in (0.0, 1.0):
        cached(
            TensorDataset(torch.full((4, 3), value)), cache_dir=tmp_path, name="x", batch_size=2, shuffle=True
        )

    found = {d.entry: d.note for d in explain(*(tmp_path / "x").iterdir()).differences}

    assert found["source.parts[0].digest"] == "probed samples or code differ"


def test_a_folder_is_compared_with_its_neighbours_not_with_itself(configure: Configure) -> None:
    one = fill_caches(Run(configure()), ["train"])[0]
    two = fill_caches(Run(configure("encoder.seed=3")), ["train"])[0]

    assert explain(one.cache.path).b == str(two.cache.path)


def test_a_lone_cache_has_nothing_to_be_compared_with(configure: Configure) -> None:
    only = fill_caches(Run(configure()), ["train"])[0]

    with pytest.raises(FormatError, match="no other cache"):
        explain(only.cache.path)


def test_settings_are_compared_by_the_cache_of_the_same_name(configure: Configure, tmp_path: Path) -> None:
    val = fill_caches(Run(configure()), ["train", "val"])[1]

    found = explain(val.cache.path, write_settings(configure, tmp_path / "c.yaml"))

    assert found.same
    assert "burgers1d_val" in found.b


def test_settings_of_other_data_are_refused(configure: Configure, tmp_path: Path) -> None:
    cache = fill_caches(Run(configure()), ["train"])[0].cache

    with pytest.raises(ConfigError, match="Compare caches of one name"):
        explain(cache.path, write_settings(configure, tmp_path / "c.yaml", "data.task=other"))
