"""Question: how long from the command to the first batch: cold, warm, and with a changed configuration?

Each start is a fresh process of `stoker demo` (its guardian's time included), one step long; data are simulated
before and not counted. `seconds` are medians of the start-up table that the command itself prints; `modules` are
the imports that take longest, by `python -X importtime` on one warm start.

    python benchmarks/startup.py [--save] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import publish

START = ["demo", "training.max_steps=1", "--json"]
CHANGED = "latent.dim=16"
IMPORTS = {
    "stoker.cli.guardian", "typer", "rich.console", "h5py", "numpy", "omegaconf", "stoker.config", "torch",
    "stoker.pipeline.demo", "torch._dynamo", "matplotlib.figure",
}  # fmt: skip
"""What is loaded for a start, and after it."""


def start(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # An installed package has its bytecode.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-m", "stoker", *START, *words],
        cwd=folder, env={**own, **environment}, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip


def phases_of(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    startup = json.loads(done.stdout)["startup"]
    parts = {phase["name"]: phase["seconds"] for phase in startup["phases"]}
    return {**parts, "in all": startup["total_s"]}


def slowest(text: str) -> dict[str, float]:
    """Seconds of the imports named, each with all that it imports first."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("import time:") and line.count("|") == 2:
            _, whole, name = line.split("|")
            if name.strip() in IMPORTS:
                found[name.strip()] = int(whole) / 1e6
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    taken: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "changed": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        start(folder)  # simulates the data, and brings files into memory
        for _ in range(arguments.runs):
            shutil.rmtree(folder / "data" / "latent_cache")
            taken["cold"].append(phases_of(start(folder)))
            taken["warm"].append(phases_of(start(folder)))
            taken["changed"].append(phases_of(start(folder, CHANGED)))
        imported = slowest(start(folder, PYTHONPROFILEIMPORTTIME="1").stderr)
    rows: list[dict[str, Any]] = [
        {"start": kind, **{part: round(statistics.median(run[part] for run in runs), 4) for part in runs[0]}}
        for kind, runs in taken.items()
    ]
    rows.append({"start": "warm", "modules": {name: round(seconds, 3) for name, seconds in imported.items()}})
    publish("startup", rows, save=arguments.save)


if __name__ == "__main__":
    main()
