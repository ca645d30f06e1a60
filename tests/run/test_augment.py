"""`training.transforms`, `training.subset` and the files beside it, from the configuration to batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.loader import Loader, subset
from stoker.run.context import Run
from stoker.run.loaders import make_loader, make_val_loader, read_numbers
from stoker.run.train import prepare, train_config
from stoker.store import Cache
from tests.run.conftest import Configure


def caches_of(config: Config) -> tuple[Cache, Cache]:
    train, val = prepare(Run(config)).caches
    return train.cache, val.cache


def states(loader: Loader) -> torch.Tensor:
    return torch.cat([batch.z0 for batch in loader]).float()


def numbers(loader: Loader) -> list[int]:
    return sorted({number for batch in loader for number, _ in batch.index.tolist()})


def test_noise_is_on_training_alone_and_normalization_on_both(configure: Configure) -> None:
    config = configure("training.transforms=[{kind: normalize}, {kind: noise, std: 3.0}]")
    train, val = caches_of(config)
    plain = states(make_val_loader(Run(configure()), val))
    statistics = train.statistics["latent"]["channels"]
    mean, std = torch.tensor(statistics["mean"]), torch.tensor(statistics["std"])

    validated = states(make_val_loader(Run(config), val, train_cache=train))
    trained = states(make_loader(Run(config), train))

    assert torch.allclose(validated, (plain - mean) / std, atol=0.01)
    assert trained.std().item() == pytest.approx(10**0.5, rel=0.1)


def test_a_run_with_transforms_trains(configure: Configure) -> None:
    transforms = "training.transforms=[{kind: normalize}, {kind: noise, std: 0.01, fields: [z0]}]"

    result = train_config(Run(configure(transforms, "training.epochs=2", "training.subset=0.5")))

    assert result.report.epochs == 2
    assert result.report.val_nrmse is not None
    assert result.report.physical_nrmse is None, "a decoder would take normalized states for stored ones"


def test_a_crop_that_makes_states_smaller_is_refused_before_the_first_step(configure: Configure) -> None:
    for crop in ("{kind: crop, size: 8, axes: [-2]}", "{kind: crop, size: 8}"):
        with pytest.raises(
            ConfigError, match=r"crop of size 8 along axes .*a state is of shape \[\d+, \d+\]"
        ):
            train_config(Run(configure(f"training.transforms=[{crop}]", "training.max_steps=1")))


def test_a_subset_is_chosen_by_the_seed_of_the_data(configure: Configure) -> None:
    train, _ = caches_of(configure())

    found = {
        seed: numbers(make_loader(Run(configure("training.subset=0.4", f"data.seed={seed}")), train))
        for seed in (0, 1)
    }

    assert found[0] == subset(train, 0.4, seed=0).tolist()
    assert found[0] != found[1]
    assert numbers(make_loader(Run(configure("training.subset=0.4", "training.seed=5")), train)) == found[0]


def test_files_choose_samples_and_weigh_them(configure: Configure, tmp_path: Path) -> None:
    train, _ = caches_of(configure())
    chosen = train.indices[[1, 3, 4]]
    np.save(tmp_path / "indices.npy", chosen)
    (tmp_path / "weights.txt").write_text("0\n2.5\n1\n")
    settings = [f"training.indices_file={tmp_path}/indices.npy"]

    assert numbers(make_loader(Run(configure(*settings)), train)) == chosen.tolist()
    settings.append(f"training.weights_file={tmp_path}/weights.txt")
    assert numbers(make_loader(Run(configure(*settings)), train)) == chosen[1:].tolist()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "is not a file"),
        ("words.txt", b"a b", "cannot be read as numbers"),
        ("halves.txt", b"1.5", "cannot be read as numbers"),
        ("broken.npy", b"\x00\x01", "cannot be read as numbers"),
        ("table.npy", np.zeros((2, 2), dtype=np.int64), r"holds int64 \(2, 2\)"),
        ("floats.npy", np.zeros(2), "holds float64"),
        ("objects.npy", np.array([{}], dtype=object), "cannot be read as numbers"),
    ],
)
def test_what_holds_no_numbers_is_refused(tmp_path: Path, name: str, content: object, says: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)

    with pytest.raises(ConfigError, match=f"training.indices_file: .*{says}.*Expected a .npy file"):
        read_numbers(str(path), "training.indices_file", np.int64)


def test_settings_that_contradict_each_other_are_refused(configure: Configure) -> None:
    train, _ = caches_of(configure())

    with pytest.raises(ConfigError, match="both choose samples"):
        make_loader(Run(configure("training.subset=0.4", "training.indices_file=x")), train)
    with pytest.raises(ConfigError, match="a mean without a std"):
        make_loader(Run(configure("training.transforms=[{kind: normalize, mean: 1}]")), train)
