"""What every benchmark shares: interleaved timing, the hardware's name, JSON lines with the commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(contenders: dict[str, Callable[[], int]], *, rounds: int = 5) -> dict[str, float]:
    """Best seconds per unit for each contender, measured in turns so that drift hits all alike.

    A contender does some work and returns how many units it did. One unmeasured turn each comes first.
    """
    best: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            begin = time.perf_counter()
            units = work()
            took = (time.perf_counter() - begin) / units
            if turn:
                best[name] = min(best.get(name, took), took)
    return best


def medians(contenders: dict[str, Callable[[], float]], *, rounds: int = 3) -> dict[str, float]:
    """Median of what each contender returns (seconds it timed itself), in turns."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            taken[name].append(work())
    return {name: statistics.median(values) for name, values in taken.items()}


def medians_of_processes(command: list[str], *, runs: int) -> dict[str, float]:
    """Medians of the figures that `python command...` prints as JSON, over fresh processes.

    One more comes first that is not counted: it may read files that later ones find in memory.
    """
    # An installed package has its bytecode.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    taken = []
    for _ in range(runs + 1):
        out = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        taken.append(json.loads(out.stdout))
    return {key: round(statistics.median(run[key] for run in taken[1:]), 4) for key in taken[0]}


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, versions: what a figure means nothing without."""
    import numpy
    import torch

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def commit() -> str:
    """The commit measured, marked when the tree had changes (results and prose apart)."""
    root = Path(__file__).parent
    text = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "../src", "."], cwd=root, capture_output=True, text=True
    ).stdout
    changed = [line for line in dirty.splitlines() if "results/" not in line]
    return f"{text}+changes" if changed else text


def publish(name: str, rows: list[dict[str, Any]], *, save: bool) -> None:
    """Print rows as JSON lines; with `save`, replace `results/<name>.jsonl` too."""
    head = {"benchmark": name, "commit": commit(), "when": time.strftime("%Y-%m-%d"), **hardware()}
    lines = [json.dumps(head)] + [json.dumps(row) for row in rows]
    print("\n".join(lines))
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
