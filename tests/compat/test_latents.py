"""The earlier names of the latent cache give what the real thing gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stoker
from stoker.compat import (
    GridEncoder,
    GridEncoderConfig,
    MultiTaskDistributedSampler,
    PreloadedCacheDataset,
    RawFieldDataset,
    build_latent_pair_loader,
    build_parallel_latent_loader,
    get_optimal_workers,
    is_network_storage,
    latent_pair_collate,
)
from stoker.errors import ConfigError, EncoderError, ResourceError
from tests.conftest import write_burgers

TRAIN = Path("cache/burgers1d_train")


def test_a_configuration_of_earlier_names_gives_batches_of_trajectories(earlier: dict[str, Any]) -> None:
    loader = build_latent_pair_loader(OmegaConf.create(earlier), shuffle=False)

    batch = next(iter(loader))

    assert loader.dataset.path.parent.resolve() == TRAIN.resolve()
    assert batch["z0"].shape == (3 * 3, 4, 8)  # 3 trajectories of 9 steps: 5 by stride 2, less a horizon of 2
    assert batch["future"].shape == (9, 1, 4, 8)
    assert batch["index"][:4].tolist() == [[0, 0], [0, 2], [0, 4], [1, 0]]
    assert batch["task_names"] == ["burgers1d"] * 9
    assert [batch[name] for name in ("input_fields", "coords", "meta")] == [None] * 3
    assert len(loader) == 4
    again = build_latent_pair_loader(earlier, split="val")
    assert len(again.dataset) == 4


def test_inverse_losses_find_their_fields_in_the_batch(earlier: dict[str, Any]) -> None:
    earlier["training"]["use_inverse_losses"] = True
    loader = build_latent_pair_loader(earlier, shuffle=False)
    dataset = PreloadedCacheDataset(loader.dataset.path, 12, time_stride=2, rollout_horizon=2)

    batch, pairs = next(iter(loader)), latent_pair_collate([dataset[i] for i in range(3)])

    assert batch["input_fields"]["data"].shape == (9, 32, 1)
    assert batch["coords"].shape == (9, 32, 2)
    assert batch["coords"][0, [0, -1]].tolist() == [[0, 0], [1, 0]]
    assert batch["meta"] == {"grid_shape": (1, 32)}
    assert batch["cond"].keys() == {"Nu"}
    with h5py.File("raw/burgers1d_train.h5") as file:
        raw = torch.from_numpy(file["tensor"][1, 2])
    assert torch.equal(batch["input_fields"]["data"][4, :, 0], raw)  # sample 1 at step 2
    assert torch.equal(pairs["input_fields"]["data"], batch["input_fields"]["data"])
    assert torch.equal(pairs["coords"], batch["coords"])
    assert pairs["meta"] == batch["meta"]


def test_several_tasks_say_whose_each_pair_is(earlier: dict[str, Any]) -> None:
    write_burgers(Path("raw/advection1d_train.h5"), samples=2)
    earlier["data"]["task"] = ["burgers1d", "advection1d"]

    loader = build_latent_pair_loader(earlier, shuffle=False)
    names = [name for batch in loader for name in batch["task_names"]]

    assert (names.count("burgers1d"), names.count("advection1d")) == (36, 6)


def test_a_gpu_that_is_not_there_is_the_cpu_and_one_line(
    earlier: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    earlier["training"]["device"] = "cuda"

    with caplog.at_level("INFO", "stoker"):
        batch = next(iter(build_latent_pair_loader(earlier)))

    assert batch["z0"].device.type == "cpu"
    lines = [line for line in caplog.messages if "falling back to CPU" in line]
    assert lines == ["CUDA requested but not available; falling back to CPU"]


def test_an_unknown_setting_is_refused(earlier: dict[str, Any]) -> None:
    earlier["training"]["cache_dir"] = "x"

    with pytest.raises(ConfigError, match=r"training\.cache_dir is not a setting"):
        build_latent_pair_loader(earlier)


def test_preloaded_trajectories_are_those_of_the_loader(earlier: dict[str, Any]) -> None:
    loader = build_latent_pair_loader(earlier, shuffle=False)
    dataset = PreloadedCacheDataset(TRAIN, 12, time_stride=2, rollout_horizon=2)

    batches = [
        latent_pair_collate([dataset[i] for i in range(first, first + 3)]) for first in range(0, 12, 3)
    ]

    assert len(dataset) == 12
    for batch, expected in zip(batches, loader, strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in ("z0", "z1", "future"))
        assert batch["cond"].keys() == expected["cond"].keys() == {"Nu"}
        assert torch.equal(batch["cond"]["Nu"], expected["cond"]["Nu"])
        assert batch["task_names"] == expected["task_names"]
        assert batch.keys() == expected.keys() - {"index"}
    workers = DataLoader(dataset, batch_size=3, collate_fn=latent_pair_collate)
    assert torch.equal(next(iter(workers))["z1"], batches[0]["z1"])
    own = next(iter(dataset.loader(3, shuffle=False)))
    assert torch.equal(own["z0"], batches[0]["z0"])
    with pytest.raises(IndexError):
        dataset[12]


def test_preloading_says_what_is_missing_or_does_not_fit(
    earlier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_latent_pair_loader(earlier)

    with pytest.raises(ValueError, match="Cache incomplete: 12/13"):
        PreloadedCacheDataset(TRAIN, 13)
    monkeypatch.setattr("stoker.extras.compat.latents.check_sufficient_ram", lambda _: False)
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
            cache_dtype=torch.float32, shuffle=False, **changes,
        )  # fmt: skip

    batch = next(iter(loader()))

    assert batch["z0"].shape == (12, 2, 3)
    expected = encoder(Waves()[1]["u"])
    torch.testing.assert_close(batch["z0"][6:], expected[:6])
    torch.testing.assert_close(batch["z1"][6:], expected[1:])
    assert batch["cond"]["speed"][6:].unique().tolist() == pytest.approx([0.1])
    assert loader().dataset.path == loader(timeout=5).dataset.path
    assert loader(world_size=2, rank=1).dataset.complete
    grid = stoker.GridEncoder(channels=1, grid=(1, 8), patch=(1, 4), tokens=2, dim=4, seed=0)
    with pytest.raises(ConfigError, match=r"grid_shape is \(8, 8\), and the encoder's grid \(1, 8\)"):
        build_parallel_latent_loader(Waves(), grid, None, (8, 8), "u", cache_dir=tmp_path)


class Earlier(nn.Module):
    """An encoder of the earlier form."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 5)

    def forward(self, fields: dict[str, Tensor], coords: Tensor, *, meta: dict[str, Any]) -> Tensor:
        assert meta == {"grid_shape": (1, 8)}
        return self.project(torch.cat([fields["u"], coords], -1))


def test_encoders_are_called_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = Earlier()
    config = GridEncoderConfig(latent_len=2, latent_dim=4, field_channels={"u": 1})
    coords = torch.rand(1, 8, 2)
    settings: dict[str, Any] = {"num_workers": 0, "cache_dtype": None, "shuffle": False}

    own = build_parallel_latent_loader(
        Waves(), encoder, coords, (1, 8), "u", cache_dir=tmp_path / "a", **settings
    )
    grid = build_parallel_latent_loader(
        Waves(), GridEncoder(config), coords, (1, 8), "u", cache_dir=tmp_path / "b", **settings
    )

    u = Waves()[0]["u"]
    expected = encoder({"u": u.reshape(7, 8, 1)}, coords.expand(7, 8, 2), meta={"grid_shape": (1, 8)})
    torch.testing.assert_close(next(iter(own))["z0"][:6], expected[:6].detach())
    expected = GridEncoder(config)({"u": u.reshape(7, 8, 1)}, coords, meta={"grid_shape": (1, 8)})
    torch.testing.assert_close(next(iter(grid))["z0"][:6], expected[:6])
    with pytest.raises(ConfigError, match=r"grid_shape is None"):
        build_parallel_latent_loader(Waves(), encoder, coords, None, "u", cache_dir=tmp_path)
    with pytest.raises(EncoderError, match=r"lacks u"):
        GridEncoder(config)({"v": u}, coords, meta={"grid_shape": (1, 8)})


def test_ranks_share_each_task_equally() -> None:
    def of_rank(rank: int, **changes: Any) -> list[int]:
        sampler = MultiTaskDistributedSampler([10, 3], 4, rank, seed=1, **changes)
        sampler.set_epoch(2)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        return indices

    ranks = [of_rank(rank) for rank in range(4)]

    assert [len(indices) for indices in ranks] == [4] * 4
    assert all(sum(i >= 10 for i in indices) == 1 for indices in ranks)
    assert {i for indices in ranks for i in indices} == set(range(13))
    assert of_rank(0) == ranks[0] != list(MultiTaskDistributedSampler([10, 3], 4, 0, seed=1))
    with pytest.raises(ConfigError, match=r"\[10, 3\]"):
        of_rank(0, drop_last=True)


def test_workers_and_storage_are_those_of_this_process(tmp_path: Path) -> None:
    assert 1 <= get_optimal_workers() <= 8
    assert get_optimal_workers(1) == 1
    assert get_optimal_workers(0) == 0
    assert get_optimal_workers(8, encoder_size_mb=1e9) == 1
    assert not is_network_storage("/proc")


def test_raw_samples_with_the_latents_that_are_there(tmp_path: Path) -> None:
    source = stoker.TorchSource(Waves(), time=("u",))
    encoder = stoker.ModuleEncoder(nn.Flatten(), field="u", time="steps")
    cache = stoker.precompute(source, encoder, tmp_path, name="w", workers=0)

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
