"""The start-up script with the real git, rclone and stoker, an S3 server, and the provider on loopback.

pip is the real one in `test_everything_is_really_installed_and_run` alone; apt-get never is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import pytest

from stoker.extras.launch.script import StartScript
from tests.conftest import write_burgers
from tests.fetch.s3 import SECRET_KEY, Bucket, a_bucket, missing
from tests.launch.box import KEY, SECRET, SRC, Box, a_box, a_repository, wait_for
from tests.launch.test_hostile import Onlooker

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
CONFIG = """\
data: {files: [raw/a.hdf5], splits: {train: 0.8, val: 0.1, test: 0.1}}
latent: {dim: 4, tokens: 2}
model: {width: 8, depth: 1, heads: 1}
training: {batch_size: 4, epochs: 2, device: cpu, run_dir: runs/a}
"""


class Project:
    """A repository, an S3 server with its data, and machines that run it."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self.root, self.bucket = root, bucket
        self.offer(write_burgers(root / "far.hdf5", samples=20).read_bytes())

    def offer(self, data: bytes) -> None:
        """Have this as the data, and a commit that says so."""
        self.data = data
        self.bucket.put("data/a.hdf5", data)
        entry = {
            "from": "s3:bucket/data/a.hdf5", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(),
        }  # fmt: skip
        fetch = {"folder": "raw", "files": {"a.hdf5": entry}, "stall": 20, "tries": 2}
        shutil.rmtree(self.root / "repo", ignore_errors=True)
        self.commit = a_repository(self.root / "repo", {"c.yaml": CONFIG + f"fetch: {json.dumps(fetch)}\n"})

    def script(self, box: Box, **more: Any) -> str:
        settings: dict[str, Any] = {
            "target": "vast", "name": "run", "repo": str(self.root / "repo"), "commit": self.commit,
            "config": "c.yaml", "workdir": str(box.workdir), "fetch": True, "cache_dir": "data/latent_cache",
            "run_dir": "runs/a", "upload": "s3:bucket/up", "cache": "s3:bucket/cache", "api": box.url,
            "secrets": ("PLANTED", *self.bucket.variables()), "stall_minutes": 5.0,
        }  # fmt: skip
        return StartScript(**(settings | more)).render()

    @contextmanager
    def machine(self, name: str) -> Iterator[Box]:
        """A machine whose variables are known to its first process alone, as at the provider."""
        with a_box(self.root / name, real=True) as box:
            secrets = {"PLANTED": box.environment.pop("PLANTED"), **self.bucket.variables()}
            for variable in ("CONTAINER_ID", "CONTAINER_API_KEY"):
                secrets[variable] = box.environment.pop(variable)
            lines = [f"{variable}={value}" for variable, value in secrets.items()]
            (box.root / "environ").write_text("\0".join(lines) + "\0")
            yield box
            box.clear()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with a_bucket() as bucket:
        yield Project(tmp_path, bucket)


def encoded(output: str) -> bool:
    return re.search(r"\d+ of \d+ encoded", output) is not None


@pytest.mark.timeout(900)
def test_a_fresh_machine_its_second_start_and_another_machine(project: Project) -> None:
    outputs: list[str] = []
    with project.machine("one") as box:
        onlooker = Onlooker(box)
        onlooker.start()
        for more in ({}, {"overrides": ("training.epochs=3",)}, {"overrides": ("training.epochs=3",)}):
            code, output = box.run(project.script(box, **more), timeout=280)
            assert code == 0, output
            outputs.append(output)
        onlooker.done.set()
        onlooker.join(60)
        assert len(box.asked) == 3
    with project.machine("two") as box:
        code, output = box.run(project.script(box), timeout=280)
        assert code == 0, output
        outputs.append(output)

    assert [encoded(output) for output in outputs] == [True, False, False, False], "it was encoded again"
    assert "there already" in outputs[1], "files were fetched again"
    assert "finished before" in outputs[2]
    assert b"epoch 3" not in outputs[0].encode()
    assert "epoch 3" in outputs[1]
    assert b"stoker-launch: step train" in project.bucket.get("up/run/run.log")
    assert b'"kind"' in project.bucket.get("up/run/run/metrics.jsonl")
    texts = [*outputs, str(onlooker.seen), str(project.bucket.get("up/run/run.log"))]
    assert any(b"stoker" in words and b"train" in words for words in onlooker.seen), "it looked"
    for secret in (SECRET, KEY, SECRET_KEY):
        assert not [text for text in texts if secret in text]


@pytest.mark.timeout(600)
def test_a_machine_that_is_taken_away_is_followed_by_another_that_goes_on(project: Project) -> None:
    """A notice: checkpoint, upload, stop within the grace; and a machine that vanishes without one."""
    long = {"overrides": ("training.epochs=100000",), "upload_minutes": 0.05, "grace": 60}
    with project.machine("one") as box:
        process = box.start(project.script(box, **long))
        run = box.workdir / "code/runs/a/metrics.jsonl"
        wait_for(lambda: run.exists() and run.read_text().count('"epoch"') > 3, seconds=280)
        process.terminate()
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert box.stopped()
        assert (box.workdir / "exit_code").read_text() == "130\n"
    with project.machine("two") as box:
        process = box.start(project.script(box, **long))
        log = box.workdir / "run.log"
        wait_for(lambda: "step train" in (log.read_text() if log.exists() else ""), seconds=280)
        before = len(project.bucket.asked)
        put = "/bucket/up/run/run/checkpoints/"
        wait_for(
            lambda: any(
                path.startswith(put) and method == "PUT" for method, path in project.bucket.asked[before:]
            ),
            seconds=280,
        )
        box.clear()
        process.communicate(timeout=60)
        assert "resumed at step" in log.read_text(), log.read_text()
        assert not encoded(log.read_text())


FAILURES = {
    "environment": 100, "code": 128, "fetch": 3, "validate": 3, "precompute": 4, "train": 1, "upload": 1,
    "stop": 1,
}  # fmt: skip
"""Steps, and the exit code of the failure that `spoil` brings about; dependencies have another test."""


def spoil(project: Project, box: Box, step: str) -> dict[str, Any]:
    """Let one step really fail; returns what differs in the script."""
    if step == "environment":
        (box.root / "bin" / "git").unlink()
    elif step == "code":
        return {"commit": "1" * 40}
    elif step == "fetch":
        project.bucket.put("data/a.hdf5", project.data[:-1])
    elif step == "validate":
        return {"overrides": ("data.files=raw/b.hdf5",)}
    elif step == "precompute":
        with h5py.File(project.root / "far.hdf5", "r+") as file:
            file["tensor"][3:] = float("nan")
        project.offer((project.root / "far.hdf5").read_bytes())
    elif step == "train":
        return {"overrides": ("training.lr=1e30",)}
    elif step == "upload":
        project.bucket.faults["up/run/run.log"] = "403"
    elif step == "stop":
        box.answers = [500] * 5
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("step", FAILURES)
def test_each_step_that_fails_stops_the_machine_keeps_its_code_and_is_named(
    project: Project, step: str
) -> None:
    with project.machine("one") as box:
        more = spoil(project, box, step)

        code, output = box.run(project.script(box, **more), timeout=280)

        assert code == FAILURES[step], output
        assert f"stoker-launch: step {step} failed with exit code" in output
        assert len(box.asked) == (5 if step == "stop" else 1)
        if step not in ("upload", "stop"):
            assert f"step {step} failed" in project.bucket.get("up/run/run.log").decode()


@pytest.mark.timeout(600)
def test_everything_is_really_installed_and_run(tmp_path: Path) -> None:
    """A virtual environment beside the image's packages, pip, the repository itself; without a network."""
    repo = tmp_path / "repo"
    shutil.copytree(SRC, repo / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SRC.parent / "configs", repo / "configs", dirs_exist_ok=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(SRC.parent / name, repo)
    data = write_burgers(tmp_path / "far.hdf5", samples=20)
    entry = {"from": str(data), "bytes": data.stat().st_size}
    text = CONFIG + f"fetch: {json.dumps({'folder': 'raw', 'files': {'a.hdf5': entry}})}\n"
    commit = a_repository(repo, {"c.yaml": text})
    with a_box(tmp_path / "box") as box:
        (box.root / "bin" / "python3").unlink()
        (box.root / "bin" / "python3").symlink_to(sys.executable)
        box.environment |= {
            "PYTHONPATH": sysconfig.get_paths()["purelib"],  # the packages of the image
            "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0",
        }  # fmt: skip
        one = StartScript(
            target="box", name="run", repo=str(repo), commit=commit, config="c.yaml", fetch=True,
            workdir=str(box.workdir), cache_dir="data", run_dir="runs/a",
        )  # fmt: skip

        broken = one.model_copy(update={"install": ("./nothing-there",)})
        code, output = box.run(broken.render(), timeout=280)
        assert code == 1, output
        assert "step dependencies failed with exit code 1" in output
        code, output = box.run(one.render(), timeout=280)
        assert code == 0, output

        assert (box.workdir / "code/runs/a/report.html").exists()
        found = list((box.workdir / "venv").rglob("site-packages/stoker/__init__.py"))
        assert len(found) == 1, "the code of the commit was installed"
