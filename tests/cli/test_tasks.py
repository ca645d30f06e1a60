"""Several tasks on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import run, run_json
from tests.conftest import write_burgers

TWO = ("tasks.wide.encoder.patch_size=8", "data.task=[burgers1d,wide]")


@pytest.fixture
def tasks(project: Path) -> Path:
    """A second task, on a grid of twice as many points."""
    for split, samples in (("train", 6), ("val", 2)):
        write_burgers(project / "raw" / f"wide_{split}.h5", samples=samples, points=64, nu=0.1)
    return project


def test_each_task_is_encoded_and_found_again(tasks: Path) -> None:
    first = run_json("precompute", "c.yaml", *TWO)
    second = run_json("precompute", "c.yaml", *TWO)

    assert [cache["name"] for cache in first["caches"]] == [
        "burgers1d_train", "burgers1d_val", "wide_train", "wide_val",
    ]  # fmt: skip
    assert [cache["encoded"] for cache in first["caches"]] == [12, 4, 6, 2]
    assert [cache["encoded"] for cache in second["caches"]] == [0, 0, 0, 0]
    assert first["failed"] == second["failed"] == []


def test_the_exit_code_tells_of_a_task_that_failed_while_the_others_are_done(tasks: Path) -> None:
    command = ("precompute", "c.yaml", "data.task=[nowhere,wide]", TWO[0])

    found = run_json(*command, exit_code=3)
    shown, said = run(*command, exit_code=3)

    assert [cache["name"] for cache in found["caches"]] == ["wide_train", "wide_val"]
    assert [(failure["task"], failure["exit_code"]) for failure in found["failed"]] == [("nowhere", 3)]
    assert "task nowhere failed: " in shown
    assert "task nowhere failed, " in said


def test_a_task_with_too_many_damaged_samples_is_named_and_the_others_are_served(tasks: Path) -> None:
    import h5py
    import numpy as np

    with h5py.File(tasks / "raw" / "burgers1d_train.h5", "a") as file:
        file["tensor"][3] = np.nan

    found = run_json("precompute", "c.yaml", *TWO, exit_code=4)
    inspected = run_json("cache", "show", str(next((tasks / "data/latent_cache/burgers1d_train").iterdir())))

    assert [cache["name"] for cache in found["caches"]] == ["wide_train", "wide_val"]
    assert found["failed"][0]["task"] == "burgers1d"
    assert [sample["number"] for sample in inspected["quarantined"]] == [3]


def test_all_tasks_are_planned(tasks: Path) -> None:
    plan = run_json("plan", "c.yaml", *TWO)
    shown, _ = run("plan", "c.yaml", *TWO)

    assert plan["tiers"]["host"] == 18
    assert list(plan["tasks"]) == ["burgers1d", "wide"]
    assert "wide" in shown
    assert {"bytes", "reason", "predicted_stall"} <= plan.keys()


def test_validate_has_rows_of_every_task_and_says_if_one_operator_can_take_them(tasks: Path) -> None:
    rows = run_json("validate", "c.yaml", *TWO)["rows"]
    bad = run_json("validate", "c.yaml", *TWO, "tasks.wide.latent.tokens=2", exit_code=3)["rows"]

    checks = [row["check"] for row in rows]
    assert {"data burgers1d_train", "data wide_train", "cache wide_val"} <= set(checks)
    assert checks.count("windows") == checks.count("memory") == 2
    assert [row["detail"] for row in rows if row["check"] == "tasks"] == ["one operator for burgers1d, wide"]
    (failed,) = [row["detail"] for row in bad if row["status"] == "fail"]
    assert "burgers1d (4 tokens of 8 numbers) and wide (2 tokens of 8 numbers)" in failed


def test_training_shows_each_task(tasks: Path) -> None:
    printed = run_json("train", "c.yaml", *TWO, "training.epochs=1")
    shown, _ = run("train", "c.yaml", *TWO, "training.epochs=1", "--no-live")

    assert list(printed["tasks"]) == ["burgers1d", "wide"]
    assert printed["tasks"]["wide"].keys() >= {"val_nrmse", "persistence_nrmse", "rollout_nrmse"}
    assert "wide" in shown
    assert printed["run_dir"] == "runs/burgers1d+wide"


def test_why_compares_the_cache_of_the_task_that_is_named(tasks: Path) -> None:
    run_json("precompute", "c.yaml", *TWO)

    explained = run_json("cache", "why", "c.yaml", "data.task=wide", TWO[0], "encoder.fourier=[1]")

    assert "wide_train" in explained["a"]
    assert any(difference["entry"].startswith("encoder") for difference in explained["differences"])
