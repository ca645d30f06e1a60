"""Configurations of the earlier latent cache train to the figure of the same settings of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.commands import run, run_json
from tests.conftest import write_burgers

CONFIGS = Path(__file__).parent / "earlier_configs"
SMALL = ["model.width=16", "model.depth=1", "model.heads=2", "training.device=cpu"]
TODAY: dict[str, dict[str, Any]] = {
    "burgers_32dim": {
        "data.task": "burgers1d", "data.root": "raw", "encoder.patch_size": 1,
        "latent.dim": 32, "latent.tokens": 16, "precompute.workers": 2,
        "training.batch_trajectories": 4, "training.start_every": 2, "training.time_stride": 2,
        "training.epochs": 2, "training.lr": 1e-3, "training.weight_decay": 0.03, "training.seed": 17,
        "training.latent_cache_dir": "cache",
    },
    "burgers_512dim": {
        "data.task": "burgers1d", "data.root": "raw", "encoder.patch_size": 1,
        "latent.dim": 64, "latent.tokens": 32, "precompute.workers": 0,
        "training.batch_trajectories": 2, "training.epochs": 1, "training.lr": 2e-3,
        "training.grad_clip": 0.5, "training.tier": "disk", "training.rollout_horizon": 2,
        "training.latent_cache_dir": "cache", "training.latent_cache_dtype": "null",
    },
    "two_tasks": {
        "data.task": "[burgers1d,advection1d]", "data.root": "raw", "encoder.patch_size": 4,
        "latent.dim": 16, "latent.tokens": 8, "precompute.workers": 1, "training.tier": "host",
        "training.batch_trajectories": 3, "training.epochs": 1, "training.latent_cache_dir": "cache",
    },
}  # fmt: skip
"""The same settings by the names of today."""


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    for task, seed in (("burgers1d", 0), ("advection1d", 5)):
        write_burgers(tmp_path / "raw" / f"{task}_train.h5", samples=6, seed=seed)
        write_burgers(tmp_path / "raw" / f"{task}_val.h5", samples=3, seed=seed + 1)
    (tmp_path / "empty.yaml").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", TODAY)
def test_an_earlier_file_trains_to_the_figure_of_today(name: str, raw: Path) -> None:
    today = [f"{key}={value}" for key, value in TODAY[name].items()]

    new = run_json("train", "empty.yaml", *today, *SMALL, "training.run_dir=new")
    old = run_json(
        "compat", "train", "--config", str(CONFIGS / f"{name}.yaml"), "--stage", "operator", *SMALL
    )

    assert old["val_nrmse"] == new["val_nrmse"]
    assert old["rollout_nrmse"] == new["rollout_nrmse"]
    assert (old["steps"], old["epochs"]) == (new["steps"], new["epochs"])
    assert old["cache_reused"], "the earlier file names the same caches"
    assert old["tasks"] == new["tasks"]


def test_batches_count_trajectories_and_epochs_come_from_the_flag(raw: Path) -> None:
    """Steps of an epoch are trajectories by batch size, whatever windows there are."""
    config = str(CONFIGS / "burgers_32dim.yaml")

    report = run_json("compat", "train", "--config", config, "--epochs", "1", "training.batch_size=3", *SMALL)

    assert (report["epoch_steps"], report["epochs"]) == (2, 1)


def test_flags_of_the_earlier_script_mean_what_they_did(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDEBENCH_ROOT", str(raw / "raw"))
    flags = [
        "--config", str(CONFIGS / "burgers_512dim.yaml"), "--tasks", "burgers1d",
        "--splits", "train", "val", "--cache-dir", "elsewhere", "--cache-dtype", "float32",
        "--latent-dim", "6", "--latent-len", "4", "--device", "cpu", "--batch-size", "4",
        "--num-workers", "2", "--no-parallel", "--pin-memory", "--limit", "2", "--overwrite",
        "--manifest", "report.json", "--hdf5-timeout", "60", "--dataloader-timeout", "90",
        "--cache-write-timeout", "30", "--watchdog-timeout", "120", "--skip-auto-copy", "-v",
    ]  # fmt: skip

    stdout, said = run("compat", "precompute_latent_cache", *flags, "--json")
    caches = json.loads(stdout)["caches"]

    assert "2 workers read" in said
    assert f"data.root is {raw / 'raw'}, of PDEBENCH_ROOT" in said
    assert [(c["name"], c["records"]) for c in caches] == [("burgers1d_train", 2), ("burgers1d_val", 2)]
    assert caches[0]["fields"]["latent"]["shape"] == [9, 4, 6]
    summary = json.loads(Path("report.json").read_text())["summary"]
    assert summary["burgers1d_train"]["num_samples"] == 2


def test_a_second_run_and_the_check_say_that_the_cache_is_valid(raw: Path) -> None:
    config = str(CONFIGS / "burgers_32dim.yaml")
    run("compat", "precompute", "--config", config, "--num-workers", "0", "--device", "cpu")

    _, said = run("compat", "precompute", "--config", config, "--device", "cpu")
    rows = run_json("compat", "validate_config", "--config", config, *SMALL)["rows"]

    assert "Cache is valid and up-to-date, skipping regeneration" in said
    assert {row["status"] for row in rows if row["check"].startswith("cache ")} == {"pass"}
    assert any("no effect here" in row["detail"] for row in rows)


def test_a_missing_split_stops_no_other_and_is_said(raw: Path) -> None:
    words = ["--config", str(CONFIGS / "two_tasks.yaml"), "--tasks", "burgers1d", "--num-workers", "0"]

    stdout, said = run("compat", "precompute", *words, "--splits", "train", "test", exit_code=3)
    run("compat", "precompute", *words, "--splits", "test", exit_code=3)

    assert "burgers1d_train" in stdout
    assert "skipped: " in said
    assert "test" in said.partition("skipped: ")[2]


def test_another_stage_is_refused_by_name(raw: Path) -> None:
    config = str(CONFIGS / "burgers_32dim.yaml")

    error = run_json("compat", "train", "--config", config, "--stage", "distill", exit_code=3)["error"]

    assert "distill" in error
    assert "consistency" in error


def test_an_imported_cache_trains_without_raw_data(raw: Path) -> None:
    for split, count in (("train", 5), ("val", 2)):
        folder = Path(f"cache/burgers1d_{split}")
        folder.mkdir(parents=True)
        for number in range(count):
            torch.manual_seed(number)
            torch.save({"latent": torch.randn(9, 16, 32).half()}, folder / f"sample_{number:05d}.pt")
    config = str(CONFIGS / "burgers_32dim.yaml")
    gone = ["data.root=gone", *SMALL]

    _, before = run("compat", "train", "--config", config, *gone, exit_code=3)
    for split in ("train", "val"):
        run(
            "cache", "import-pt", f"cache/burgers1d_{split}", "--out", "cache", "--name", f"burgers1d_{split}"
        )
    stdout, said = run("compat", "train", "--config", config, *gone, "--json")
    _, wrong = run("compat", "train", "--config", config, *gone, "latent.dim=64", exit_code=3)
    today = run_json(
        "train", "empty.yaml", "data.task=burgers1d", "training.latent_cache_dir=cache",
        "training.run_dir=new", "training.epochs=1", *gone,
    )  # fmt: skip

    assert "stoker cache adopt cache/burgers1d_train --out cache --name burgers1d_train" in before
    assert json.loads(stdout)["steps"] == 4
    assert "cannot be checked" in said
    assert "latent.dim is 64, and it has 32" in wrong
    assert today["cache_reused"]
    assert today["caches"][0]["records"] == 5
