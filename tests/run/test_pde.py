"""Data sets in the layouts of PDEBench and The Well are trained on with one command, to a physical error."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import stoker
from stoker.config import load_config
from stoker.encoders.grid import GridEncoder
from stoker.encoders.wrappers import SteadyEncoder
from stoker.errors import ConfigError, EncoderError
from stoker.run.caches import locate
from stoker.run.context import Run
from stoker.run.train import train_config
from stoker.schema import Field
from stoker.train.config import TrainConfig
from stoker.train.run import train

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """The example that solves small problems."""
    spec = importlib.util.spec_from_file_location("pde_layouts", ROOT / "examples" / "pde_layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def darcy(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small steady problem; it is only read."""
    return made.darcy(tmp_path_factory.mktemp("darcy"), 24)


def settings(path: Path, name: str, folder: Path, *more: str) -> Any:
    own = {
        "data.files": path,
        "training.latent_cache_dir": folder / "caches",
        "training.run_dir": folder / "run",
        "training.device": "cpu",
        "training.max_steps": 3,
        "precompute.workers": 0,
        "model.width": 16,
        "model.depth": 1,
    }
    return load_config(ROOT / "configs" / name, [*(f"{key}={value}" for key, value in own.items()), *more])


SETS = {
    "darcy": (lambda made, folder: made.darcy(folder, 48), "train_darcy.yaml", ()),
    "cfd3d": (lambda made, folder: made.cfd(folder, 3, 12, 4, 16, 0.02), "train_pde_3d.yaml", ()),
    "well-obstacle": (
        lambda made, folder: made.well_2d(folder),
        "train_well_2d.yaml",
        ("encoder.patch_size=4", "data.include=[time,dt,coordinates,boundary]"),
    ),
}
MORE = {
    "cfd1d": (lambda made, folder: made.MAKERS["cfd1d"](folder), "train_burgers_32dim.yaml", ()),
    "cfd2d": (lambda made, folder: made.MAKERS["cfd2d"](folder), "train_pde_2d.yaml", ()),
    "reaction": (lambda made, folder: made.MAKERS["reaction"](folder), "train_pde_2d.yaml", ()),
    "water": (lambda made, folder: made.MAKERS["water"](folder), "train_pde_2d.yaml", ()),
    "well3d": (lambda made, folder: made.MAKERS["well3d"](folder), "train_pde_3d.yaml", ()),
}


@pytest.mark.parametrize(
    ("make", "name", "more"),
    [
        *(pytest.param(*one, id=key) for key, one in SETS.items()),
        *(pytest.param(*one, id=key, marks=pytest.mark.slow) for key, one in MORE.items()),
    ],
)
def test_one_command_comes_to_a_physical_error(
    made: ModuleType, tmp_path: Path, make: Callable[..., Path], name: str, more: tuple[str, ...]
) -> None:
    report = train_config(Run(settings(make(made, tmp_path), name, tmp_path, *more))).report

    assert report.physical_nrmse is not None
    assert report.physical_persistence_nrmse is not None
    assert 0 < report.physical_nrmse < 2 * report.physical_persistence_nrmse
    assert report.reconstruction_nrmse is not None
    assert report.reconstruction_nrmse < 0.1
    assert (report.rollout_nrmse is None) == (name == "train_darcy.yaml")


def test_a_steady_problem_is_a_pair_of_latents_without_time(made: ModuleType, tmp_path: Path) -> None:
    config = settings(made.darcy(tmp_path, 48), "train_darcy.yaml", tmp_path)
    report = train_config(Run(config)).report
    located = locate(Run(config).for_task("darcy2d"), "train")
    cache = located.cache
    assert cache is not None

    assert cache.schema.keys() == {"latent", "latent_input", "beta"}
    assert not any(field.time for field in cache.schema.values())
    source = stoker.HDF5Source(config.data.files, split="train", splits=config.data.splits)
    encoder = GridEncoder(channels=1, grid=(16, 16), patch=(4, 4), tokens=16, dim=16)
    for name, field in (("latent_input", "nu"), ("latent", "data")):
        back = encoder.decode(cache[0][name])
        torch.testing.assert_close(back, torch.from_numpy(source.read(0)[field]), atol=2e-3, rtol=2e-3)
    # the baseline is the mean solution, and an untrained operator is as good as that
    solutions = torch.stack([cache[n]["latent"] for n in cache.indices.tolist()]).double()
    val = locate(Run(config).for_task("darcy2d"), "val").cache
    assert val is not None
    truth = torch.stack([val[n]["latent"] for n in val.indices.tolist()]).double()
    mean = float((truth - solutions.mean(0)).norm() / truth.norm())
    assert report.persistence_nrmse == pytest.approx(mean, rel=0.05)

    with pytest.raises(ConfigError, match=r"data\.input"):
        train_config(
            Run(settings(Path(str(config.data.files)), "train_darcy.yaml", tmp_path, "data.input=null"))
        )
    loader = stoker.Loader(cache, 16, seed=1, shuffle=True)
    again = train(loader, None, TrainConfig(epochs=1, width=16, depth=1), tmp_path / "by-hand")
    assert again.steps == len(loader)
    plain = stoker.precompute(source, encoder, tmp_path / "plain", workers=0, name="plain")
    with pytest.raises(ConfigError, match=r"windows=stoker\.Windows\(\)"):
        train(stoker.Loader(plain, 16, shuffle=True), None, TrainConfig(epochs=1), tmp_path / "refused")
    Path(str(config.data.files)).unlink()
    assert locate(Run(config).for_task("darcy2d"), "train").source_gone


def test_a_field_with_time_is_no_input_of_a_steady_problem() -> None:
    size: dict[str, Any] = {"channels": 1, "grid": (4, 4), "patch": (2, 2), "tokens": 4, "dim": 4}
    both = SteadyEncoder(GridEncoder(**size, field="a"), GridEncoder(**size))
    plane = Field(shape=(4, 4, 1), dtype="float32")
    film = Field(shape=(3, 4, 4, 1), dtype="float32", time=True)

    assert both.schema({"data": plane, "a": plane})["latent_input"].shape == (4, 4)
    with pytest.raises(EncoderError, match="time axis"):
        both.schema({"data": film, "a": plane})


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("data.input=data",), "data.input is 'data'"),
        (("data.input=nope",), r"data.input is 'nope'.*may name: \{'nu': \(16, 16, 1\)\}$"),
        (("stages=[operator,consistency]",), "operator, consistency"),
        (("training.use_inverse_losses=true", "training.lambda_inv_dec=0"), "lambda_inv_enc is 1 "),
        (("data.input=null", "encoder.kind=mesh", "stages=[operator,decoder]"), "encoder.kind is mesh"),
    ],
)
def test_what_a_problem_cannot_train_is_refused(
    darcy: Path, tmp_path: Path, more: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        train_config(Run(settings(darcy, "train_darcy.yaml", tmp_path, *more)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_times_and_steps_are_conditions_of_a_window(made: ModuleType, tmp_path: Path) -> None:
    source = stoker.HDF5Source(made.cfd(tmp_path, 1, 4, 6, 64, 0.25), include=("time", "dt", "coordinates"))
    encoder = GridEncoder(channels=3, grid=(1, 64), patch=(1, 4), tokens=16, dim=8)
    cache = stoker.precompute(source, encoder, tmp_path / "c", name="c", workers=0, dtype="float16")
    batch = next(iter(stoker.Loader(cache, 8, windows=stoker.Windows(stride=2), shuffle=False)))

    assert cache.schema["time"].dtype == "float32"
    torch.testing.assert_close(batch.cond["time"][:, 0], 0.25 * batch.index[:, 1].float())
    assert batch.cond["dt"].shape == (8, 1)
    assert batch.cond["x"].shape == (8, 64, 1)
