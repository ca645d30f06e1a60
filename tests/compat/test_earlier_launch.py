"""Command lines of the earlier launcher and its fetch scripts, with a provider and a bucket made here."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import run, run_json
from tests.compat.page import snippets
from tests.launch.box import a_repository, git
from tests.launch.vast import OFFER, Vast, serving

KEY, SECRET = "planted-key-id-0001", "planted-app-key-9876543210"
CONFIG = """\
training: {epochs: 1}
launch: {secrets: [HF_TOKEN]}
fetch:
  files:
    a.h5: {from: "B2TRAIN:lab/a.h5"}
"""
RCLONE = """\
#!{python} -IS
import json, os, sys
words, place = sys.argv[1:-1], sys.argv[-1]
remote, _, path = place.partition(":")
assert os.environ[f"RCLONE_CONFIG_{{remote}}_SECRET_ACCESS_KEY"] == {secret!r}
top = os.path.join({bucket!r}, path)
if "cat" in words:
    with open(top, "rb") as file:
        file.seek(int(words[words.index("--offset") + 1]))
        sys.stdout.buffer.write(file.read())
elif "--stat" in words:
    size = os.path.getsize(top) if os.path.isfile(top) else -1
    print(json.dumps({{"Size": size, "IsDir": size < 0, "ModTime": "t"}}))
elif not os.path.isdir(top):
    sys.exit(3)
else:
    paths = [os.path.join(at, name) for at, _, names in os.walk(top) for name in names]
    print(json.dumps([{{"Path": os.path.relpath(one, top), "Size": os.path.getsize(one)}} for one in paths]))
"""
"""A remote that is a folder; it wants the earlier variables to have become its own."""


@pytest.fixture
def vast() -> Iterator[Vast]:
    with serving() as world:
        yield world


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the earlier `.env` had, exported."""
    for name in [name for name in os.environ if name.startswith(("RCLONE_CONFIG", "VAST", "B2_", "WANDB"))]:
        monkeypatch.delenv(name)
    given = {
        "B2_KEY_ID": KEY, "B2_APP_KEY": SECRET, "B2_BUCKET": "lab", "B2_S3_REGION": "us-west-004",
        "B2_S3_ENDPOINT": "https://s3.example", "WANDB_API_KEY": "planted-wandb-1234", "HOME": str(tmp_path),
        "HF_TOKEN": "planted-hf-123456", "VAST_API_KEY": "planted-account-key-55555",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def project(tmp_path: Path, vast: Vast, variables: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose commit is at its remote."""
    where = tmp_path / "project"
    a_repository(where, {"configs/c.yaml": CONFIG, "configs/burgers.yaml": CONFIG})
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "far"], check=True, timeout=60)
    git(where, "remote", "add", "origin", str(tmp_path / "far"))
    git(where, "push", "-q", "origin", "main")
    monkeypatch.chdir(where)
    monkeypatch.setenv("VAST_API_URL", vast.url)
    return where


@pytest.fixture
def bucket(tmp_path: Path, variables: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket `lab` behind a program named rclone; the working directory is empty."""
    top, binary, here = tmp_path / "bucket", tmp_path / "bin" / "rclone", tmp_path / "here"
    for folder in (binary.parent, here):
        folder.mkdir()
    binary.write_text(RCLONE.format(python=sys.executable, secret=SECRET, bucket=str(top)))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(here)
    lab = top / "lab"
    for name in (
        "pdebench/full/burgers1d/burgers1d_train_000.h5", "pdebench/full/burgers1d/burgers1d_train_001.h5",
        "pdebench/full/burgers1d/burgers1d_val.h5", "pdebench/cfd_full_v1/cfd_train.h5",
        "pdebench/cfd_full_v1/cfd_val.h5", "pdebench/old.tar.gz", "pdebench/single.h5",
        "pdebench/burgers1d_full_v1/burgers1d_test.h5",
    ):  # fmt: skip
        (lab / name).parent.mkdir(parents=True, exist_ok=True)
        (lab / name).write_bytes(name.encode())
    return lab


def vast_launch(*words: str, exit_code: int = 0) -> dict[str, object]:
    return run_json("compat", "vast_launch", *words, exit_code=exit_code)


def test_the_earlier_flags_are_in_the_request(project: Path, vast: Vast) -> None:
    found = run_json(
        "compat", "vast_launch", "launch", "--config", "configs/c.yaml", "--gpu", "A100_SXM4",
        "--num-gpus", "2",
        "--image", "a/b:c", "--disk", "128", "--region", "DE", "--stage", "operator", "--branch", "main",
        "--workdir", "/workspace/w", "--auto-shutdown", "--run-arg", "training.epochs=3", "--dry-run",
    )  # fmt: skip

    request, query = found["request"], found["query"]
    assert (request["image"], request["disk"]) == ("a/b:c", 128)
    assert (query["gpu_name"], query["num_gpus"], query["geolocation"]) == (
        {"eq": "A100 SXM4"}, {"eq": 2}, {"in": ["DE"]},
    )  # fmt: skip
    assert "training.epochs=3" in found["onstart"]
    assert "/workspace/w" in found["onstart"]
    assert {"HF_TOKEN", "WANDB_API_KEY", "RCLONE_CONFIG_B2TRAIN_ACCESS_KEY_ID"} <= set(request["env"])
    assert set(request["env"].values()) == {"***"}
    assert vast.asked == []
    for secret in (KEY, SECRET, "planted-wandb-1234", "planted-hf-123456"):
        assert secret not in str(found)


def test_renting_after_looking_again(project: Path, vast: Vast) -> None:
    """The first look finds nothing; the one that rents does."""
    vast.instances = []
    vast.faults = [b'{"offers": []}']

    found = vast_launch("launch", "--config", "configs/c.yaml", "--retries", "3", "--retry-wait", "0")

    assert found["instance"] == 78
    rented = [(method, body) for method, _, body, _ in vast.asked if method == "PUT"]
    assert len(rented) == 1
    assert rented[0][1]["env"]["RCLONE_CONFIG_B2TRAIN_SECRET_ACCESS_KEY"] == SECRET


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        (["--no-precompute"], "launch.cache"),
        (["--use-lightning"], "how-to/trainers"),
        (["--cache-version", "v3"], "launch.cache"),
        (["--resume-from-wandb", "a/b/c"], "launch.upload"),
        (["--resume-mode", "must"], "launch.upload"),
        (["--stage", "diffusion"], "consistency"),
        (["--stage", "decoder"], "stages=[operator,decoder]"),
        (["--run-arg", "--strict-exit"], "training.epochs=3"),
        (["--branch", "HEAD~1"], "git"),
        (["--region", "Europe"], "launch.region"),
    ],
)
def test_a_flag_that_cannot_be_honored_names_the_new_way(
    project: Path, vast: Vast, flags: list[str], way: str
) -> None:
    found = vast_launch("launch", "--config", "configs/c.yaml", *flags, exit_code=3)

    assert way in str(found["error"])
    assert vast.asked == []


def test_a_branch_that_is_not_checked_out(project: Path) -> None:
    git(project, "checkout", "-q", "-b", "other")
    (project / "configs" / "c.yaml").write_text(CONFIG + "\n# changed\n")
    git(project, "commit", "-qam", "other")

    error = str(vast_launch("launch", "--config", "configs/c.yaml", "--branch", "main", exit_code=3)["error"])

    assert "git checkout main" in error


def test_the_other_commands(project: Path, vast: Vast) -> None:
    vast.offers = [OFFER, OFFER | {"id": 8, "dph_total": 0.9}]

    assert [
        one["id"] for one in run_json("compat", "vast_launch", "search", "--gpu", "RTX_4090")["offers"]
    ] == [7, 8]
    assert len(run_json("compat", "vast_launch", "search", "--limit", "1")["offers"]) == 1
    assert "launch.upload" in str(vast_launch("resume", "--config", "configs/c.yaml", exit_code=3)["error"])
    resumed = run_json(
        "compat", "vast_launch", "resume", "configs/c.yaml", "launch.upload=B2TRAIN:lab/runs", "--dry-run"
    )
    assert "B2TRAIN:lab/runs" in resumed["onstart"]
    assert "VAST_API_KEY" in str(vast_launch("set-key", "abc", exit_code=3)["error"])
    assert "stoker precompute CONFIG" in str(vast_launch("preprocess", "a", exit_code=3)["error"])


def test_what_becomes_of_each_variable_is_shown_without_values(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("B2_KEY_ID")
    Path(".env").write_text(f"# keys\nexport KEY_ID='{KEY}'\nWANDB_PROJECT=pde\n")

    found = vast_launch("setup-env")
    shown = "".join(run("compat", "vast_launch", "setup-env"))

    states = {row["name"]: row["set"] for row in found["variables"]}  # type: ignore[union-attr]
    assert states == {
        "B2_KEY_ID": True, "B2_APP_KEY": True, "B2_BUCKET": True, "B2_S3_ENDPOINT": True,
        "B2_S3_REGION": True, "WANDB_API_KEY": True, "WANDB_PROJECT": True, "WANDB_ENTITY": False,
        "VAST_API_KEY": True,
    }  # fmt: skip
    assert "RCLONE_CONFIG_UPSB2_ENDPOINT" in found["made"]  # type: ignore[operator]
    assert not [text for text in (str(found), shown) if KEY in text or SECRET in text]


def test_tasks_are_fetched_with_all_their_shards(bucket: Path) -> None:
    report = run_json("compat", "setup_vast_data", "burgers1d cfd", "data/pdebench")

    names = {path.name: path.read_text() for path in Path("data/pdebench").glob("*.h5")}
    assert set(names) == {
        "burgers1d_train_000.h5", "burgers1d_train_001.h5", "burgers1d_val.h5", "cfd_train.h5", "cfd_val.h5",
    }  # fmt: skip
    assert names["cfd_train.h5"] == "pdebench/cfd_full_v1/cfd_train.h5"
    assert report["failed"] == []
    assert not [name for name in os.environ if name.startswith("RCLONE_CONFIG")]
    said = run("compat", "setup_vast_data", "cfd", "--dry-run")
    assert "cfd: no file of the split test" in said[1]


def test_nothing_is_fetched_if_a_task_or_key_is_missing(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = run_json("compat", "setup_vast_data", "cfd darcy2d", exit_code=3)["error"]
    key = run_json("compat", "fetch_datasets_b2", "single", "sngle", "old", exit_code=3)["error"]
    monkeypatch.setenv("CACHE_VERSION", "v2")
    version = run_json("compat", "setup_vast_data", "cfd", exit_code=3)["error"]

    assert "darcy2d_train.h5" in task
    assert "sngle" in key
    assert "single.h5" in key
    assert "old.tar.gz" in key
    assert "launch.cache" in version
    assert not Path("data").exists()


def test_keys_are_fetched_as_file_and_as_folder(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATASETS", "single,cfd_full_v1")
    monkeypatch.setenv("CLEAN_OLD_SPLITS", "1")
    monkeypatch.setenv("WORKDIR", "w")
    (Path("w") / "data" / "pdebench").mkdir(parents=True)
    kept = Path("w/data/pdebench/kept.h5")
    kept.touch()

    shown = run_json("compat", "fetch_datasets_b2", "--dry-run")
    _, said = run("compat", "fetch_datasets_b2")

    there = {str(path.relative_to("w/data/pdebench")) for path in Path("w").rglob("*.h5")}
    assert there == {"single.h5", "cfd_full_v1/cfd_train.h5", "cfd_full_v1/cfd_val.h5", "kept.h5"}
    assert {one["name"] for one in shown["files"]} == there - {"kept.h5"}
    assert "CLEAN_OLD_SPLITS" in said


def test_missing_variables_are_named(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("B2_APP_KEY")
    monkeypatch.delenv("B2_BUCKET")

    error = run_json("compat", "fetch_datasets_b2", "single", exit_code=3)["error"]

    assert "B2_APP_KEY" in error
    assert "B2_BUCKET" in error
    assert "B2_KEY_ID," not in error


def test_the_snippet_of_the_page_runs(
    project: Path, bucket: Path, vast: Vast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (code,) = snippets("Starting on a rented GPU")

    commands = [shlex.split(line, comments=True) for line in code.splitlines()]

    for program, *words in commands:
        assert program == "stoker"
        assert run(*words)[0]
    assert len(commands) == 4
    assert vast.asked == []
