"""`stoker train` on particles and on meshes: from files to errors at the points of each record."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import stoker
from stoker.config import load_config
from stoker.encoders.mesh import mesh_encoder_for
from stoker.errors import ConfigError
from stoker.run.context import Run
from stoker.run.precompute import fill_caches
from stoker.run.train import train_config
from stoker.schema import unfolded
from stoker.sources.meshes import MeshSource
from tests.cli.commands import run_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "particles_and_meshes.py"
SMALL = (
    "training.max_steps=3",
    "data.splits={train: 0.5, val: 0.5}",
    "precompute.workers=0",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("particles_and_meshes", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "kind"), [("particles", "springs"), ("mesh", "heat")])
def test_training_reports_errors_at_the_points(
    example: ModuleType, tmp_path: Path, name: str, kind: str
) -> None:
    example.write(tmp_path, 10)
    config = load_config(tmp_path / f"{name}.yaml", SMALL)

    report = train_config(Run(config)).report

    assert report.physical_nrmse is not None
    assert report.physical_rollout_nrmse is not None
    assert report.physical_persistence_nrmse is not None
    cache = stoker.open_cache(tmp_path / "cache" / f"{kind}_val")
    source = fill_caches(Run(config), ["val"])[0].cache.filler.source  # pyright: ignore
    encoder = mesh_encoder_for(source.schema(), tokens=config.latent.tokens, dim=config.latent.dim)
    wrong = size = still = moved = 0.0
    for number in cache.indices.tolist():
        sample = unfolded(source.read(number), source.schema())
        names = encoder.fields
        raw = [sample[n] - sample[n][:1] if n == encoder.moving else sample[n] for n in names]
        truth = torch.from_numpy(np.concatenate(raw, -1)).double()
        back = encoder.decode(cache[number]["latent"], cache[number]["coords"]).double()
        wrong, size = wrong + float((back - truth).square().sum()), size + float(truth.square().sum())
        states = back[::2]  # validation begins a window at each stride
        still += float(states.diff(dim=0).square().sum())
        moved += float(states[1:].square().sum())
    assert report.physical_persistence_nrmse == pytest.approx((still / moved) ** 0.5, rel=1e-4)
    assert report.reconstruction_nrmse is not None
    if len(cache) <= 4:  # all of them were compared
        assert report.reconstruction_nrmse == pytest.approx((wrong / size) ** 0.5, rel=1e-4)
    assert report.reconstruction_nrmse < 0.05


def test_the_commands_take_such_caches(example: ModuleType, tmp_path: Path) -> None:
    example.write(tmp_path, 12)
    settings = [str(tmp_path / "particles.yaml"), "precompute.workers=0", "precompute.keep=positions"]

    first, again = run_json("precompute", *settings), run_json("precompute", *settings)
    assert first["caches"][0]["encoded"] > 0
    assert again["caches"][0]["encoded"] == 0
    path = again["caches"][0]["path"]
    assert not run_json("cache", "verify", path)["bad"]
    assert {"positions", "positions.shape", "latent"} <= run_json("cache", "show", path)["fields"].keys()
    run_json("cache", "export", path, str(tmp_path / "out"), "--to", "safetensors", "--ragged", "nested")
    record = stoker.open_cache(path)[int(stoker.open_cache(path).indices[0])]
    assert record["positions"].shape[:1] == record["latent"].shape[:1]
    assert record["positions"].shape[1:] == record["coords"].shape


def test_an_operator_on_raw_points_is_told_to_encode_them(example: ModuleType, tmp_path: Path) -> None:
    example.write(tmp_path, 8)

    with pytest.raises(ConfigError, match=r"encoder\.kind=mesh"):
        train_config(Run(load_config(tmp_path / "mesh.yaml", [*SMALL, "encoder.kind=identity"])))


def test_records_in_float16_keep_their_coordinates(example: ModuleType, tmp_path: Path) -> None:
    example.write(tmp_path, 4)
    source = MeshSource(tmp_path / "heat.zarr")
    encoder = mesh_encoder_for(source.schema(), tokens=4, dim=8)

    cache = stoker.precompute(source, encoder, tmp_path / "c", name="m", dtype="float16", workers=0)

    assert cache[0]["latent"].dtype == torch.float16
    np.testing.assert_array_equal(cache[0]["coords"], source.read(0)["coords"])
