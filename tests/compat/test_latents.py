"""The earlier names of the latent cache give what the real thing gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stoker
from stoker.compat import (
    PreloadedCacheDataset,
    RawFieldDataset,
    build_latent_pair_loader,
    build_parallel_latent_loader,
    latent_pair_collate,
)
from stoker.errors import ConfigError, ResourceError

TRAIN = Path("cache/burgers1d_train")


def test_a_configuration_of_earlier_names_gives_batches_of_trajectories(earlier: dict[str, Any]) -> None:
    loader = build_latent_pair_loader(OmegaConf.create(earlier), order="sequential")

    batch = next(iter(loader))

    assert loader.dataset.path.parent.resolve() == TRAIN.resolve()
    assert batch.z0.shape == (3 * 3, 4, 8)  # 3 trajectories of 9 steps: 5 by stride 2, less a horizon of 2
    assert batch.future.shape == (9, 1, 4, 8)
    assert batch.index[:4].tolist() == [[0, 0], [0, 2], [0, 4], [1, 0]]
    again = build_latent_pair_loader(earlier, split="val")
    assert len(again.dataset) == 4


def test_an_unknown_setting_is_refused(earlier: dict[str, Any]) -> None:
    earlier["training"]["cache_dir"] = "x"

    with pytest.raises(ConfigError, match=r"training\.cache_dir is not a setting"):
        build_latent_pair_loader(earlier)


def test_preloaded_trajectories_are_those_of_the_loader(earlier: dict[str, Any]) -> None:
    loader = build_latent_pair_loader(earlier, order="sequential")
    dataset = PreloadedCacheDataset(TRAIN, 12, time_stride=2, rollout_horizon=2)

    batches = [
        latent_pair_collate([dataset[i] for i in range(first, first + 3)]) for first in range(0, 12, 3)
    ]

    assert len(dataset) == 12
    for batch, expected in zip(batches, loader, strict=True):
        assert torch.equal(batch["z0"], expected.z0)
        assert torch.equal(batch["z1"], expected.z1)
        assert torch.equal(batch["future"], expected.future)
        assert batch["cond"].keys() == expected.cond.keys()
        assert all(torch.equal(batch["cond"][name], expected.cond[name]) for name in expected.cond)
        assert batch["task_names"] == ["burgers1d_train"] * 9
    workers = DataLoader(dataset, batch_size=3, collate_fn=latent_pair_collate)
    assert torch.equal(next(iter(workers))["z1"], batches[0]["z1"])
    own = next(iter(dataset.loader(3, order="sequential")))
    assert torch.equal(own.z0, batches[0]["z0"])
    with pytest.raises(IndexError):
        dataset[12]


def test_preloading_says_what_is_missing_or_does_not_fit(
    earlier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_latent_pair_loader(earlier)

    with pytest.raises(ValueError, match="Cache incomplete: 12/13"):
        PreloadedCacheDataset(TRAIN, 13)
    monkeypatch.setattr("stoker.compat.latents.check_sufficient_ram", lambda required_mb: False)
    with pytest.raises(ResourceError, match="Insufficient RAM for PreloadedCacheDataset"):
        PreloadedCacheDataset(TRAIN, 12)


def test_a_horizon_beyond_a_trajectory(earlier: dict[str, Any]) -> None:
    build_latent_pair_loader(earlier)

    with pytest.raises(ValueError, match="trajectory 0 has 9 states of stride 1, too few for a horizon of 9"):
        PreloadedCacheDataset(TRAIN, 12, rollout_horizon=9)[0]


class Waves(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        steps = torch.arange(7.0)[:, None, None, None]
        return {"u": torch.sin(steps + number).expand(7, 1, 8, 1).clone(), "speed": torch.tensor(number / 10)}


def test_a_dataset_is_encoded_once_and_given_as_pairs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Unflatten(1, (2, 3)))

    def loader(**changes: Any) -> stoker.Loader:
        return build_parallel_latent_loader(
            Waves(), encoder, None, (1, 8), "u", batch_size=2, num_workers=0, cache_dir=tmp_path,
            cache_dtype=torch.float32, order="sequential", **changes,
        )  # fmt: skip

    batch = next(iter(loader()))

    assert batch.z0.shape == (12, 2, 3)
    expected = encoder(Waves()[1]["u"])
    torch.testing.assert_close(batch.z0[6:], expected[:6])
    torch.testing.assert_close(batch.z1[6:], expected[1:])
    assert batch.cond["speed"][6:].unique().tolist() == pytest.approx([0.1])
    assert loader().dataset.path == loader(timeout=5).dataset.path
    assert loader(world=2, rank=1).dataset.complete
    grid = stoker.GridEncoder(channels=1, grid=(1, 8), patch=(1, 4), tokens=2, dim=4, seed=0)
    with pytest.raises(ConfigError, match=r"grid_shape is \(8, 8\), and the encoder's grid \(1, 8\)"):
        build_parallel_latent_loader(Waves(), grid, None, (8, 8), "u", cache_dir=tmp_path)


def test_raw_samples_with_the_latents_that_are_there(tmp_path: Path) -> None:
    source = stoker.TorchSource(Waves(), time=("u",))
    encoder = stoker.ModuleEncoder(nn.Flatten(), field="u", time="steps")
    cache = stoker.precompute(source, encoder, tmp_path, name="w", readers=0)

    raw, latent = (
        RawFieldDataset(Waves(), field_name="u")[3],
        RawFieldDataset(source, cache.path, field_name="u")[3],
    )

    assert (raw["idx"], raw["cached"], raw["cache_path"], raw["bc"]) == (3, False, None, None)
    assert torch.equal(raw["fields"], Waves()[3]["u"])
    assert raw["params"]["speed"] == pytest.approx(0.3)
    assert latent["cached"]
    assert latent["latent"].shape == (7, 8)
    assert latent["cache_path"] == str(cache.path)
    assert "fields" not in latent
    nowhere = RawFieldDataset(Waves(), tmp_path / "nowhere", field_name="u")
    assert not nowhere[0]["cached"]
    again = build_parallel_latent_loader(
        nowhere, nn.Flatten(), field_name="u", num_workers=0, cache_dir=tmp_path
    )
    assert len(again.dataset) == 10
