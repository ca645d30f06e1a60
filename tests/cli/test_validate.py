"""`stoker validate`: what it finds before anything runs."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import StalledError
from stoker.precompute.checks import needed_bytes
from stoker.schema import Field
from stoker.units import MIB
from tests.cli.commands import run, run_json
from tests.conftest import write_burgers


def test_validate_has_a_row_for_each_thing(project: Path) -> None:
    report = run_json("validate", "c.yaml")

    checks = {row["check"].split()[0]: row["status"] for row in report["rows"]}
    assert checks.keys() == {
        "config", "training", "data", "encoder", "cache", "windows", "run", "gpu", "driver", "shm", "memory",
        "disk", "inodes",
    }  # fmt: skip
    assert set(checks.values()) <= {"pass", "warn"}
    assert all({"check", "status", "detail"} == row.keys() for row in report["rows"])
    text, _ = run("validate", "c.yaml")
    assert "0 failed" in text


def test_validate_prints_the_settings_in_force(project: Path) -> None:
    text, _ = run("validate", "c.yaml", "latent.dim=6", "--print-config")
    (project / "again.yaml").write_text(text)

    printed = run_json("validate", "again.yaml", "--print-config")

    assert printed["latent"] == {"dim": 6, "tokens": 4}
    assert printed["precompute"]["workers"] == 0


@pytest.mark.parametrize(
    ("override", "check", "exit_code"),
    [
        pytest.param("latent.dimm=3", "config", 3, id="unknown-setting"),
        pytest.param("data.root=nowhere", "data", 3, id="no-files"),
        pytest.param("precompute.devices=[cuda:77]", "encoders", 6, id="no-such-device"),
        pytest.param("encoder.patch_size=5", "encoder", 3, id="patch-does-not-divide"),
        pytest.param("training.reserve_bytes=999999999999999", "memory", 6, id="no-memory"),
    ],
)
def test_validate_fails_with_the_code_of_what_failed(
    project: Path, override: str, check: str, exit_code: int
) -> None:
    report = run_json("validate", "c.yaml", override, "training.tier=host", exit_code=exit_code)

    assert check in {row["check"].split()[0] for row in report["rows"] if row["status"] == "fail"}


def test_validate_shows_disk_also_when_memory_does_not_suffice(project: Path) -> None:
    report = run_json(
        "validate", "c.yaml", "training.reserve_bytes=999999999999999", "training.tier=host", exit_code=6
    )

    assert [row["check"] for row in report["rows"]][-3:] == ["memory", "disk", "inodes"]


def test_validate_shows_memory_also_when_the_disk_does_not_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalled(path: Path) -> tuple[int, int]:
        if "latent_cache" in str(path):
            raise StalledError(f"{path} does not answer")
        return 1 << 30, 1 << 20

    monkeypatch.setattr("stoker.plan.resources.disk_space", stalled)
    rows = run_json("validate", "c.yaml", exit_code=6)["rows"]

    assert {row["check"]: row["status"] for row in rows[-2:]} == {"memory": "pass", "disk": "fail"}


@pytest.mark.parametrize("command", ["precompute", "train", "plan"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.files=nowhere.h5", "nowhere.h5 does not exist"),
        ("encoder.checkpoint=nowhere.safetensors", "nowhere.safetensors does not exist"),
        ("encoder.patch_size=5", "[1, 5]' does not divide grid"),
    ],
)
def test_a_setting_that_names_what_is_not_there_exits_with_3(
    project: Path, command: str, override: str, said: str
) -> None:
    _, message = run(command, "c.yaml", override, exit_code=3)

    assert said in message


@pytest.mark.parametrize(
    ("overrides", "check", "said"),
    [
        pytest.param(["training.rollout_horizon=9"], "windows", "training.rollout_horizon", id="window"),
        pytest.param(["data.task=[burgers1d,b]"], "data b_train", "no file for data.task 'b'", id="tasks"),
        pytest.param(["data.split=val"], "training", "data.split=train", id="split"),
        pytest.param(["data.split=[train,foo]"], "data", 'split "foo" has no file', id="later-split"),
        pytest.param(["training.run_dir=c.yaml/x"], "run folder", "c.yaml is not a folder", id="run-folder"),
        pytest.param(
            ["training.latent_cache_dir=c.yaml"], "disk", "c.yaml is not a folder", id="cache-folder"
        ),
    ],
)
def test_validate_fails_for_what_precompute_or_train_refuse(
    project: Path, overrides: list[str], check: str, said: str
) -> None:
    rows = run_json("validate", "c.yaml", *overrides, exit_code=3)["rows"]

    failed = [row for row in rows if row["status"] == "fail"]
    assert any(row["check"].startswith(check) and said in row["detail"] for row in failed), failed
    refusing = "precompute" if check == "data" else "train"
    _, message = run(refusing, "c.yaml", *overrides, exit_code=3)
    assert said in message
    assert message.startswith("error: ")
    # Digests of files that are older than two seconds are noted: on a busy machine these are.
    made = [path.name for path in (project / "data").rglob("*") if path.is_file()]
    assert set(made) <= {".digests"}, "refused only after something was encoded"


def test_validate_finds_a_split_that_the_other_splits_encoder_does_not_fit(project: Path) -> None:
    write_burgers(project / "raw" / "burgers1d_val.h5", samples=4, points=64)

    rows = run_json("validate", "c.yaml", exit_code=3)["rows"]
    run("train", "c.yaml", exit_code=3)

    assert [row["check"] for row in rows if row["status"] == "fail"] == ["encoder burgers1d_val"]
    assert not list(project.glob("data/latent_cache/burgers1d_train/*/shard-*"))


@pytest.mark.parametrize(("spare", "exit_code"), [(0, 0), (-1, 6)])
def test_validate_and_precompute_ask_for_the_same_room(
    project: Path, monkeypatch: pytest.MonkeyPatch, spare: int, exit_code: int
) -> None:
    """Both caches must fit one after the other, with the reserve that precompute keeps."""
    record = {"latent": Field(shape=(9, 4, 8), dtype="float16"), "Nu": Field(shape=(), dtype="float32")}
    first, second = needed_bytes(record, 12), needed_bytes(record, 4)
    free = first + second + 16 * MIB + spare
    monkeypatch.setattr("stoker.plan.resources.disk_space", lambda path: (free, None))

    rows = run_json("validate", "c.yaml", exit_code=exit_code)["rows"]
    monkeypatch.setattr("stoker.plan.resources.disk_space", lambda path: (free - first, None))
    run("precompute", "c.yaml", "--splits", "val", exit_code=exit_code)

    assert {row["check"]: row["status"] for row in rows}["disk"] == ("fail" if exit_code else "pass")


def test_a_complete_cache_in_a_folder_that_cannot_be_written_is_no_failure(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("precompute", "c.yaml")
    monkeypatch.setattr(
        "stoker.plan.resources.find_obstacle",
        lambda path, **_: "no" if "latent_cache" in str(path) else None,
    )

    rows = run_json("validate", "c.yaml")["rows"]

    assert {row["status"] for row in rows if row["check"] != "driver"} == {
        "pass"
    }  # a CUDA build may lack one


@pytest.mark.parametrize(
    ("command", "override", "cure"),
    [
        ("plan", "data.preset=well", "data.preset=pdebench"),
        ("train", "encoder.patch_size=5", "'encoder.patch_size=[1, 4]'"),
        ("validate", "encoder.patch_size=5", "'encoder.patch_size=[1, 4]'"),
        ("precompute", "latent.tokens=500", "latent.tokens="),
    ],
)
def test_a_cure_is_said_as_a_setting(project: Path, command: str, override: str, cure: str) -> None:
    stdout, message = run(command, "c.yaml", override, exit_code=3)

    assert f" {cure}" in stdout + message


def test_state_fields_of_unequal_tokens_are_refused_as_training_refuses_them(project: Path) -> None:
    for split in ("train", "val"):
        with h5py.File(project / "raw" / f"two_{split}.h5", "w") as file:
            file["u"] = np.zeros((6, 9, 16), np.float32)
            file["v"] = np.zeros((6, 9, 4, 8), np.float32)
    two = ["data.task=two", "data.fields={u: n t x, v: n t y x}", "encoder.kind=identity"]
    both = [*two, "training.state_fields=[u, v]"]

    report = run_json("validate", "c.yaml", *both, exit_code=3)

    (row,) = [row for row in report["rows"] if row["status"] == "fail"]
    assert row["check"] == "windows"
    assert "u (1, 16, 1), v (4, 8, 1)" in row["detail"]
    assert row["detail"].split(". ")[0] in run("train", "c.yaml", *both, exit_code=3)[1]
    assert not (project / "data").exists(), "refused before anything is encoded"
    run_json("validate", "c.yaml", *two, "training.state_fields=[u]")
