"""Benchmarks that need hardware run their twins here, so that they work when the hardware is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
    assert {row["part"] for row in rows} == {"gather", "kernel", "load", "host", "train"}
    trained = [row for row in rows if row["part"] == "train"]
    assert len(trained) == 6
    for row in trained:
        assert row["steps_compared"] == 10
        assert row["curve_apart"] < 1e-6, "the batches are not those of the DataLoader"
