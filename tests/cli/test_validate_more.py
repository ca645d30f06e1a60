"""Rows of `stoker validate` about the machine, trackers, encoder, cache and launch."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from stoker.monitor import meter
from stoker.plan.resources import disk_space
from stoker.run.validate import check_driver, check_each, check_shared_memory, unreachable
from tests.cli.commands import run, run_json


def rows_of(*words: str, exit_code: int = 0) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in run_json("validate", "c.yaml", *words, exit_code=exit_code)["rows"]}


# --- machine


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 256 KiB and 12 files, really mounted."""
    place = tmp_path / "tiny"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=256k,nr_inodes=12"):
        pytest.skip(f"nothing may be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(bytes(place), 2)


def test_a_disk_without_room_and_without_inodes_fails_with_6(project: Path, tiny: Path) -> None:
    full = rows_of(f"training.latent_cache_dir={tiny}", exit_code=6)

    assert full["disk"]["status"] == "fail"
    assert re.search(r"\b2(52|56) KiB free", full["disk"]["detail"])  # digests may have been noted before
    assert full["inodes"]["status"] == "fail"
    assert re.search(r"room for (10|11) more files", full["inodes"]["detail"])
    run("precompute", "c.yaml", f"training.latent_cache_dir={tiny}", exit_code=6)


def test_little_shared_memory_is_something_to_look_at(tiny: Path, tmp_path: Path) -> None:
    little, none = check_shared_memory(tiny), check_shared_memory(tmp_path / "nowhere")

    assert little.status == none.status == "warn"
    assert "256 KiB in" in little.detail
    assert "--shm-size" in little.detail
    assert "No such file" in none.detail


def test_inodes_alone_can_be_too_few(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where nothing may be mounted: the limit is injected."""
    monkeypatch.setattr("stoker.plan.resources.disk_space", lambda path: (disk_space(path)[0], 3))

    rows = rows_of(exit_code=6)

    assert (rows["disk"]["status"], rows["inodes"]["status"]) == ("pass", "fail")
    assert "room for 3 more files" in rows["inodes"]["detail"]


@pytest.mark.parametrize(
    ("built", "cuda", "status", "said"),
    [
        pytest.param("12.8", 12040, "pass", "driver 550.1 runs CUDA 12.4", id="same-major"),
        pytest.param("12.8", 11080, "fail", "runs CUDA 11.8, torch is built for CUDA 12.8", id="too-old"),
        pytest.param(None, 12040, "warn", "the GPU stands idle", id="cpu-build"),
        pytest.param("12.8", None, "warn", "steps run on the CPU", id="no-driver"),
        pytest.param(None, None, "pass", "torch is a build for the CPU", id="neither"),
    ],
)
def test_the_driver_must_run_what_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch, built: str | None, cuda: int | None, status: str, said: str
) -> None:
    def init() -> None:
        if cuda is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(torch.version, "cuda", built)
    fakes: dict[str, Any] = {
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "550.1",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(meter.pynvml, name, fake)

    row = check_driver()

    assert (row.check, row.status) == ("driver", status)
    assert said in row.detail


# --- trackers


@pytest.fixture
def server() -> Iterator[str]:
    """Something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.monitor.trackers.find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
def test_each_tracker_is_reachable_or_offline(server: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b")
    every = ("tensorboard", "wandb", "mlflow")

    def told(**environment: str) -> list[tuple[str, str]]:
        return [(row.status, row.detail) for row in check_each(every, {"HOME": "/nowhere", **environment})]

    def user(address: str) -> str:
        return address.replace("//", "//me:mine@")

    board, wandb, mlflow = told()
    assert board == ("pass", "event files in the run's folder")
    assert wandb[0] == mlflow[0] == "pass"
    assert "no WANDB_API_KEY" in wandb[1]
    assert "mlflow.db" in mlflow[1]
    _, wandb, mlflow = told(WANDB_API_KEY="secret-key", WANDB_BASE_URL=server, MLFLOW_TRACKING_URI=user(dead))
    assert "mine" not in mlflow[1]
    assert wandb == ("pass", f"{server} answers")
    assert mlflow[0] == "warn"
    assert dead in mlflow[1]
    assert "does not answer" in mlflow[1]
    _, wandb, mlflow = told(
        HOME=str(tmp_path), WANDB_BASE_URL=dead, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/c.yaml/x/m.db"
    )
    assert (wandb[0], mlflow[0]) == ("warn", "pass")
    _, wandb, _ = told(WANDB_MODE="offline", WANDB_API_KEY="secret-key", WANDB_BASE_URL=dead)
    assert wandb[1].startswith("offline, as WANDB_MODE")


def test_a_server_that_takes_no_connection_is_given_up() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        why = unreachable(f"http://127.0.0.1:{port}", answer_s=0.2)
        for one in held:
            one.close()
    assert why is not None
    assert "timed out" in why or "no answer" in why


def test_a_tracker_that_is_not_installed_fails_by_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.monitor.trackers.find_spec", lambda name: None)

    rows = rows_of("training.trackers=[wandb,mlflow]", exit_code=3)

    assert rows["tracker wandb"]["status"] == rows["tracker mlflow"]["status"] == "fail"
    assert "pip install 'stoker[trackers]'" in rows["tracker wandb"]["detail"]


# --- encoder and cache


def test_an_encoder_that_does_not_work_is_found_without_a_sample(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "loads on cpu" in rows_of()["encoder burgers1d"]["detail"]

    def broken(*_: Any) -> Any:
        raise RuntimeError("the weights are of another shape")

    monkeypatch.setattr("stoker.encoders.grid.GridEncoder.encode", broken)
    rows = rows_of(exit_code=3)

    assert rows["encoder burgers1d"]["status"] == "fail"
    assert (
        "fails on a sample of zeros on cpu: RuntimeError: the weights" in rows["encoder burgers1d"]["detail"]
    )


def test_a_cache_that_is_not_used_says_why(project: Path) -> None:
    run("precompute", "c.yaml")

    detail = rows_of("latent.dim=6")["cache burgers1d_train"]["detail"]

    assert "is of another recipe" in detail
    assert "encoder.config.dim is 6, was 8" in detail


# --- launch


@pytest.fixture
def repository(project: Path) -> Path:
    """The project, committed, with a remote that has the commit."""
    far = project / "far.git"
    (project / ".gitignore").write_text("data\nruns\nraw\nfar.git\n")
    quiet: Any = {"cwd": project, "check": True, "capture_output": True, "timeout": 60}
    for words in (
        ["init", "-q", "-b", "main"], ["config", "user.email", "a@b.c"], ["config", "user.name", "a"],
        ["add", "."], ["commit", "-qm", "one"], ["init", "-q", "--bare", str(far)],
        ["remote", "add", "origin", str(far)], ["push", "-q", "origin", "main"],
    ):  # fmt: skip
        subprocess.run(["git", *words], **quiet)
    return project


def test_launch_is_checked_where_it_was_set_alone(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "do-not-show-me")
    asked = ("launch.secrets=[A_TOKEN]", "launch.image=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel")

    assert not [check for check in rows_of() if check.startswith("launch")]
    fine = rows_of(*asked)
    (repository / "c.yaml").write_text((repository / "c.yaml").read_text() + "\n# changed\n")
    changed = rows_of(*asked, exit_code=3)

    launch = {check: row["status"] for check, row in fine.items() if check.startswith("launch")}
    assert launch == dict.fromkeys(
        ["launch image", "launch code", "launch secrets", "launch script"], "pass"
    ), fine
    assert fine["launch secrets"]["detail"] == "A_TOKEN"
    assert "do-not-show-me" not in str(fine)
    assert changed["launch code"]["status"] == "fail"
    assert "not committed" in changed["launch code"]["detail"]


@pytest.mark.parametrize(
    ("settings", "check", "status", "said"),
    [
        pytest.param(
            "launch.image='Pytorch/Two Words'", "launch image", "fail", "not the name of an image", id="form"
        ),
        pytest.param(
            "launch.image=pytorch/pytorch", "launch image", "warn", "another image tomorrow", id="no-tag"
        ),
        pytest.param(
            "launch.image=a.b:5000/c:latest", "launch image", "warn", "another image tomorrow", id="latest"
        ),
        pytest.param("launch.secrets=[NOT_SET]", "launch secrets", "fail", "NOT_SET is not set", id="secret"),
    ],
)
def test_a_wrong_launch_setting_is_named(
    repository: Path, settings: str, check: str, status: str, said: str
) -> None:
    rows = rows_of(settings, exit_code=3 if status == "fail" else 0)

    assert rows[check]["status"] == status
    assert said in rows[check]["detail"]


def test_a_commit_that_was_not_pushed_is_named(repository: Path) -> None:
    subprocess.run(
        ["git", "commit", "-q", "--allow-empty", "-m", "two"], cwd=repository, check=True, timeout=60
    )

    rows = rows_of("launch.gpu=RTX_4090", exit_code=3)

    assert "is not at any remote" in rows["launch code"]["detail"]
    assert "launch script" not in rows
