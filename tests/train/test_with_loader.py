"""The loop on the real Loader, over a real cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import StaleStateError
from stoker.monitor.meter import StallMeter
from stoker.train.config import TrainConfig, TrainReport
from stoker.train.run import train
from stoker.train.state import load_checkpoint
from tests.conftest import write_burgers


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    """12 trajectories of two viscosities, as latents `(9, 8, 4)`."""
    folder = tmp_path_factory.mktemp("data")
    for nu in (0.01, 0.1):
        write_burgers(folder / f"1D_Burgers_Sols_Nu{nu}.hdf5", samples=6, nu=nu)
    source = stoker.HDF5Source(str(folder / "*.hdf5"), preset="pdebench")
    encoder = stoker.GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=8, dim=4, seed=0)
    return stoker.precompute(source, encoder, folder / "cache", name="b", workers=0)


def run(cache: stoker.Cache, folder: Path, *, sink: Any = None, seed: int = 0, **changes: Any) -> TrainReport:
    meter = StallMeter()
    windows = stoker.Windows(stride=1, horizon=1)
    loader = stoker.Loader(cache, batch_size=16, windows=windows, seed=seed, meter=meter, shuffle=True)
    val = stoker.Loader(cache, batch_size=16, windows=windows, shuffle=False)
    settings: dict[str, Any] = {"epochs": 3, "width": 16, "depth": 1, "heads": 2, "log_every": 1}
    return train(loader, val, TrainConfig(**{**settings, **changes}), folder, meter=meter, on_event=sink)


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_checkpoint(sorted((folder / "checkpoints").glob("last-*"))[-1]).model


def test_the_default_device_changes_nothing(cache: stoker.Cache, tmp_path: Path) -> None:
    """`meta` stands for a GPU: whatever lands there by mistake has no values."""
    run(cache, tmp_path / "plain", epochs=1)
    torch.set_default_device("meta")
    try:
        run(cache, tmp_path / "other", epochs=1)
    finally:
        torch.set_default_device(None)

    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "other")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Stopped(Exception):
    pass


@pytest.mark.parametrize("step", [3, 6, 7, 17])
def test_a_killed_run_resumes_to_the_same_bits(cache: stoker.Cache, tmp_path: Path, step: int) -> None:
    def die(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step" and facts["step"] == step:
            raise Stopped

    report = run(cache, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(cache, tmp_path / "killed", sink=die, checkpoint_every=2)
    resumed = run(cache, tmp_path / "killed", resume=True)

    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed.val_nrmse == report.val_nrmse
    assert report.steps == 18


def test_the_report_names_the_tier_and_the_parameter_is_a_condition(
    cache: stoker.Cache, tmp_path: Path
) -> None:
    report = run(cache, tmp_path)

    assert report.tier in ("device", "host")
    assert report.stall is not None
    assert report.rollout_nrmse is not None
    state = load_checkpoint(next((tmp_path / "checkpoints").glob("best-*"))).state
    assert state["widths"] == {"Nu": 1}


def test_a_run_is_not_resumed_with_another_order(cache: stoker.Cache, tmp_path: Path) -> None:
    run(cache, tmp_path, epochs=1)

    with pytest.raises(StaleStateError):
        run(cache, tmp_path, seed=1, resume=True)
