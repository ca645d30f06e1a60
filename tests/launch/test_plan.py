"""`stoker launch`: what is checked before, what is sent, and the commands around it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run, run_json
from tests.launch.box import a_repository, git
from tests.launch.vast import INSTANCE, OFFER, Vast

SECRET = "planted-secret-value-9876543210"
CONFIG = """\
training: {epochs: 1}
launch:
  secrets: [WANDB_API_KEY]
  upload: b2:bucket/runs
  gpu: RTX_4090
  max_price: 0.5
fetch:
  files:
    a.h5: {from: "b2:bucket/a.h5"}
"""


@pytest.fixture
def project(tmp_path: Path, vast: Vast, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose commit is at its remote, and the variables that the settings promise."""
    where = tmp_path / "project"
    a_repository(where, {"configs/c.yaml": CONFIG, "other.py": "1\n"})
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "far"], check=True, timeout=60)
    git(where, "remote", "add", "origin", str(tmp_path / "far"))
    git(where, "push", "-q", "origin", "main")
    monkeypatch.chdir(where)
    for name in [name for name in os.environ if name.startswith(("RCLONE_CONFIG", "VAST"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("RCLONE_CONFIG_B2_TYPE", "s3")
    monkeypatch.setenv("RCLONE_CONFIG_B2_SECRET_ACCESS_KEY", SECRET[::-1])
    monkeypatch.setenv("VAST_API_KEY", "planted-account-key-55555")
    monkeypatch.setenv("VAST_API_URL", vast.url)
    return where


def test_a_dry_run_shows_script_and_request_and_sends_nothing(project: Path, vast: Vast) -> None:
    found = run_json("launch", "vast", "configs/c.yaml", "training.epochs=3", "--dry-run")

    assert found["onstart"].startswith("#!/usr/bin/env bash\n")
    assert "A=(configs/c.yaml training.epochs=3)" in found["onstart"]
    assert f"COMMIT={git(project, 'rev-parse', 'HEAD').strip()}" in found["onstart"]
    assert "run fetch data fetch" in found["onstart"]
    request = found["request"]
    assert request["onstart"] == found["onstart"]
    assert request["env"] == dict.fromkeys(
        ["WANDB_API_KEY", "RCLONE_CONFIG_B2_TYPE", "RCLONE_CONFIG_B2_SECRET_ACCESS_KEY"], "***"
    )
    assert (request["label"], request["disk"], found["query"]["gpu_name"]) == (
        "stoker:c", 64, {"eq": "RTX 4090"},
    )  # fmt: skip
    assert vast.asked == []


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("launch.workdir=here", "launch.workdir: .here. is not absolute"),
        ("launch.gpus=65", r"launch.gpus: 65 is given\nhint: Expected a whole number from 1 to 64"),
    ],
)
def test_what_no_script_can_hold_is_refused_by_its_setting(project: Path, override: str, fact: str) -> None:
    _, message = run("launch", "vast", "configs/c.yaml", override, "--dry-run", exit_code=3)

    assert re.search(fact, message)
    assert "should" not in message, "words of pydantic"


def test_no_secret_is_in_any_output(project: Path, vast: Vast) -> None:
    outputs: list[str] = []
    for words in (
        ["--dry-run"], ["--dry-run", "--json"], ["--dry-run", "--debug"], [], ["--json"],
    ):  # fmt: skip
        vast.instances = []
        outputs += run("launch", "vast", "configs/c.yaml", *words)
    for fault, code in ((401, 3), (500, 1), (b"<html>", 1), (404, 1)):
        for words in (["--debug"], ["--json"]):
            vast.faults = [None, fault]
            outputs += run("launch", "vast", "configs/c.yaml", *words, exit_code=code)
            assert any("Traceback" in text for text in outputs[-2:]) == (words == ["--debug"])

    for secret in (SECRET, SECRET[::-1], "planted-account-key-55555"):
        assert not [text for text in outputs if secret in text]


def test_up_rents_the_cheapest_with_the_variables(project: Path, vast: Vast) -> None:
    vast.instances = []
    vast.offers = [OFFER | {"id": 8, "dph_total": 0.9}, OFFER]

    found = run_json("launch", "vast", "up", "configs/c.yaml")

    assert (found["instance"], found["offer"]["id"]) == (78, 7)
    method, path, body, _ = vast.asked[-1]
    assert (method, path) == ("PUT", "/v0/asks/7/")
    assert body["env"]["WANDB_API_KEY"] == SECRET
    assert body["env"]["RCLONE_CONFIG_B2_SECRET_ACCESS_KEY"] == SECRET[::-1]
    assert SECRET not in body["onstart"]


def test_an_offer_that_somebody_else_took_is_followed_by_the_next(project: Path, vast: Vast) -> None:
    vast.instances = []
    vast.offers = [OFFER, OFFER | {"id": 8, "dph_total": 0.9}]
    vast.faults = [None, None, 404]

    assert run_json("launch", "vast", "configs/c.yaml")["offer"]["id"] == 8


@pytest.mark.parametrize("taken", [3, 4])
def test_three_further_offers_are_tried(project: Path, vast: Vast, taken: int) -> None:
    vast.instances = []
    vast.offers = [OFFER | {"id": number, "dph_total": number / 100} for number in range(11, 17)]
    vast.faults = [None, None, 404, 410, 400, 404][: 2 + taken]

    if taken == 3:
        assert run_json("launch", "vast", "configs/c.yaml")["offer"]["id"] == 14
    else:
        run("launch", "vast", "configs/c.yaml", exit_code=1)

    asked = [path for method, path, *_ in vast.asked if method == "PUT"]
    assert asked == [f"/v0/asks/{number}/" for number in (11, 12, 13, 14)]


def test_a_run_is_not_started_twice(project: Path, vast: Vast) -> None:
    vast.instances = [INSTANCE | {"label": "stoker:c"}]

    _, notes = run("launch", "vast", "configs/c.yaml", exit_code=3)

    assert "instance 77 of stoker:c is running already" in notes
    assert [method for method, *_ in vast.asked] == ["GET"]


def test_status_logs_and_down_touch_the_machines_of_this_run_alone(project: Path, vast: Vast) -> None:
    vast.instances = [INSTANCE | {"label": "stoker:c"}, INSTANCE | {"id": 99, "label": "mine"}]

    status = run_json("launch", "vast", "status", "configs/c.yaml")
    log = run_json("launch", "vast", "logs", "configs/c.yaml", "--lines", "5")
    down = run_json("launch", "vast", "down", "configs/c.yaml")
    refused = run("launch", "vast", "down", "configs/c.yaml", "--instance", "99", exit_code=3)[1]

    assert [one["id"] for one in status["instances"]] == [77]
    assert log == {"instance": 77, "log": "line 1\nline 2\n"}
    assert down["done"] == "stopped"
    assert "no instance 99" in refused
    changes = [(method, path) for method, path, *_ in vast.asked if "/99/" in path or method != "GET"]
    assert changes == [("PUT", "/v0/instances/request_logs/77/"), ("PUT", "/v0/instances/77/")]
    run("launch", "vast", "down", "configs/c.yaml", "--destroy")
    assert vast.asked[-1][:2] == ("DELETE", "/v0/instances/77/")


def test_search_lists_offers(project: Path) -> None:
    stdout, _ = run("launch", "vast", "search", "configs/c.yaml")

    assert "RTX 4090 24 GiB  0.410 $/h" in stdout


def _change(project: Path) -> None:
    (project / "configs/c.yaml").write_text(CONFIG + "data: {seed: 2}\n")


def _commit(project: Path) -> None:
    _change(project)
    git(project, "commit", "-qam", "more")


def _untracked(project: Path) -> None:
    git(project, "rm", "-q", "--cached", "configs/c.yaml")


def _password(project: Path) -> None:
    git(project, "remote", "set-url", "origin", "https://me:hunter22@host/x.git")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(_change, "changes that are not committed", id="changed"),
        pytest.param(_commit, "is not at any remote", id="not-pushed"),
        pytest.param(_untracked, "is not committed", id="untracked"),
        pytest.param(_password, "carries a password", id="password"),
    ],
)
def test_code_that_the_machine_would_not_find_is_refused(
    project: Path, vast: Vast, spoil: Any, message: str
) -> None:
    spoil(project)

    _, notes = run("launch", "vast", "configs/c.yaml", exit_code=3)

    assert message in notes
    assert "hunter22" not in notes
    assert vast.asked == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WANDB_API_KEY", "", "WANDB_API_KEY is not set here"),
        ("RCLONE_CONFIG_B2_TYPE", "", "the rclone remote b2: is not described"),
        ("WANDB_API_KEY", "configs/c.yaml", "would show the value of WANDB_API_KEY"),
        ("VAST_API_KEY", "", "VAST_API_KEY"),
    ],
)
def test_secrets_are_checked_before(
    project: Path, vast: Vast, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)

    _, notes = run("launch", "vast", "configs/c.yaml", exit_code=3)

    assert message in notes
    assert vast.asked == []


def test_what_is_not_pinned_is_refused(project: Path) -> None:
    words = ["launch", "vast", "configs/c.yaml", "--dry-run"]

    assert "names no version" in run(*words, "launch.install=stoker", exit_code=3)[1]
    assert "PIP=(stoker==0.1.0)" in run(*words, "launch.install=stoker==0.1.0")[0]
    assert (
        "PIP=(-c pins.txt stoker)" in run(*words, "launch.install=stoker", "launch.constraints=pins.txt")[0]
    )


def test_a_command_is_in_the_script_once_and_quoted(project: Path) -> None:
    command = "python other.py --name 'a b' $HOME"
    found = run_json("launch", "vast", "configs/c.yaml", f"launch.command={command}", "--dry-run")

    script = found["onstart"]
    assert f"\nC={shlex.quote(command)}\n" in script
    assert "validate" not in script
    assert script.count("$HOME") == 2, "in C, and in the settings given on the command line"
    for empty in ("launch.command=", "launch.command=''"):
        assert "ranks train" in run_json("launch", "vast", "configs/c.yaml", empty, "--dry-run")["onstart"]


def test_a_file_of_the_command_that_is_not_committed_is_told(project: Path) -> None:
    (project / "train.py").write_text("1\n")
    words = ["launch", "script", "configs/c.yaml"]

    _, notes = run(*words, "launch.command=python other.py -x /etc/passwd && python train.py")
    _, silent = run(*words, "launch.command=python other.py nothing.py")

    assert "train.py" in notes
    assert "other.py" not in notes
    assert "commit" not in silent


def test_a_script_for_other_machines(project: Path, vast: Vast) -> None:
    plain, _ = run("launch", "script", "configs/c.yaml")
    run("launch", "script", "configs/c.yaml", "--slurm", "--out", "job.sh")
    slurm = Path("job.sh").read_text()

    assert "stop() { :; }" in plain
    assert "CONTAINER" not in plain + slurm
    assert "#SBATCH --signal=B:TERM@180\n" in slurm
    assert os.access("job.sh", os.X_OK)
    assert vast.asked == []


def test_changes_beside_the_configuration_are_told(project: Path) -> None:
    (project / "other.py").write_text("2\n")

    _, notes = run("launch", "script", "configs/c.yaml")

    assert "other.py" in notes
    assert json.dumps(notes).count("other.py") == 1
