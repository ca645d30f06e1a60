"""Benchmarks that need hardware run their twins here, so that they work when the hardware is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_the_cpu_and_trains_alike() -> None:
    done = subprocess.run(
        [sys.executable, "gpu_serve.py", "--device", "cpu", "--quick"],
        cwd=ROOT / "benchmarks",
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert {row["part"] for row in rows} == {"gather", "kernel", "load", "host", "train", "encode"}
    trained = [row for row in rows if row["part"] == "train"]
    assert len(trained) == 6
    for row in trained:
        assert row["steps_compared"] == 10
        assert row["curve_apart"] < 1e-6, "the batches are not those of the DataLoader"


def test_the_gpu_probe_runs_on_the_cpu() -> None:
    parts = ["serving", "static_transforms", "order"]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_probe.py", "--device", "cpu", *parts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:.:benchmarks", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert {fact["part"] for fact in facts} == {*parts}
    assert all(fact["ok"] for fact in facts), facts


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_session_says_so_and_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "run", "gpu", str(tmp_path / "out")], capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 2
    assert "GPU" in done.stderr
    assert not (tmp_path / "out").exists()


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  *is_available*) exit 0 ;;
  *{failing}*) echo '{said}'; exit {code} ;;
  *) echo '{{"part": "fake"}}' ;;
esac
"""


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")
@pytest.mark.parametrize(
    ("failing", "said", "code", "ends_with"),
    [
        ("nothing", "", 0, 0),
        ("test_transforms", "", 1, 1),
        ("gpu_probe.py kernel", "", 3, 1),
        ("--only load", "the kernel failed; batches are cast in plain torch", 0, 1),
    ],
    ids=["all is well", "a test fails", "a probe fails", "a kernel was replaced"],
)
def test_a_gpu_session_saves_its_results_and_fails_where_a_step_did(
    tmp_path: Path, failing: str, said: str, code: int, ends_with: int
) -> None:
    """With an interpreter that only pretends."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(failing=failing.replace(" ", "\\ "), said=said, code=code))
    python.chmod(0o755)

    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu_session.sh", str(tmp_path / "out")],
        env={**os.environ, "PYTHON": str(python), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == ends_with, done.stdout + done.stderr
    summary = (tmp_path / "out" / "summary.txt").read_text()
    steps = [line.split()[0] for line in summary.splitlines() if " rc=" in line]
    assert {"env", "kernel", "t_tier", "t_cuda", "t_pressure", "claims", "b_gather", "b_train"} <= set(steps)
    assert ("plain torch" in summary) == ("plain torch" in said)
    facts = (tmp_path / "out" / "facts.jsonl").read_text().splitlines()
    assert len(facts) >= len(steps) - 1
    assert (tmp_path / "out" / "logs.tar.gz").stat().st_size
    assert not list(tmp_path.glob("stoker-gpu-session-*"))
