"""Question: does `workers=None` find the best number of workers, and does reading scale with workers?

Four sources, each with the encoder that its users have: contiguous and gzip HDF5 in PDEBench's layout (grid
encoder), a folder of JPEGs (resized to 96 x 128, stored as uint8), rows of an SQLite table with JSON columns.
For each number of workers the whole call of precompute is timed in a process of its own, imports left out, page
cache warm, one torch thread, in turns. The row holds records a second for each, `auto_of_best` (`workers=None`
against the best fixed number), and `two_of_one`.

    python benchmarks/workers.py [--save] [--rounds 3] [--only gzip]
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
import time
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from measure import RESULTS, commit, publish
from precompute_wall import SPACE, write
from stoker.extras.radio.demo import TABLE, RadioSpec, radio_columns, write_radio

WORKERS: tuple[int | None, ...] = (1, 2, 3, 4, None)


def write_jpegs(folder: Path, count: int) -> None:
    """Smooth random pictures of 480 x 640."""
    from PIL import Image

    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        small = generator.integers(0, 256, (12, 16, 3), np.uint8)
        Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(
            folder / f"{number:05d}.jpg", quality=90
        )


def write_rows(path: Path, count: int) -> None:
    """Radio rows, as `stoker demo radio` makes them."""
    write_radio(f"sqlite:///{path}", RadioSpec(rows=count))


def make(kind: str, folder: Path) -> tuple[Any, Any]:
    """Source and encoder."""
    if kind in ("contiguous", "gzip"):
        encoder = stoker.GridEncoder(channels=1, grid=(1, SPACE), patch=(1, 4), tokens=16, dim=32, seed=0)
        return stoker.HDF5Source(folder / f"{kind}.hdf5", preset="pdebench"), encoder
    if kind == "jpeg":
        return stoker.ImageSource(folder / "jpeg", size=(96, 128)), None
    address = f"sqlite:///{folder / 'rows.sqlite'}"
    return stoker.SQLSource(address, table=TABLE, key="recording_session_id", columns=radio_columns()), None


def run(kind: str, folder: str, workers: str) -> dict[str, float]:
    """One whole call."""
    from stoker.precompute import PrecomputeSettings, run_precompute

    source, encoder = make(kind, Path(folder))
    target = Path(folder) / "cache"
    begin = time.perf_counter()
    report = run_precompute(
        source,
        encoder,
        target,
        name="c",
        settings=PrecomputeSettings(workers=json.loads(workers), dtype="float16"),
    )
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return {"rate": report.records / seconds, "seconds": seconds, "workers": report.workers}


def fresh(*arguments: str) -> dict[str, float]:
    """`run` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def question(kind: str, folder: Path, rounds: int) -> dict[str, Any]:
    """One source: every number of workers in turns; the first turn warms and is not counted."""
    taken: dict[str, list[dict[str, float]]] = {json.dumps(workers): [] for workers in WORKERS}
    for turn in range(rounds + 1):
        for workers, results in taken.items():
            result = fresh(kind, str(folder), workers)
            if turn:
                results.append(result)
    rates = {name: statistics.median(one["rate"] for one in ones) for name, ones in taken.items()}
    best = max((name for name in rates if name != "null"), key=lambda name: rates[name])
    return {
        "source": kind,
        "commit": commit(),
        "records_s": {("auto" if n == "null" else n): round(rate, 1) for n, rate in rates.items()},
        "best_fixed": int(best),
        "auto_ended_with": [int(one["workers"]) for one in taken["null"]],
        "auto_of_best": round(rates["null"] / rates[best], 3),
        "two_of_one": round(rates["2"] / rates["1"], 3),
        "seconds_of_best": round(statistics.median(one["seconds"] for one in taken[best]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", choices=["contiguous", "gzip", "jpeg", "sql"])
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(*options.child)))
        return
    makers = {
        "contiguous": lambda folder, n: write(folder / "contiguous.hdf5", n, None),
        "gzip": lambda folder, n: write(folder / "gzip.hdf5", n, "gzip"),
        "jpeg": lambda folder, n: write_jpegs(folder / "jpeg", n),
        "sql": lambda folder, n: write_rows(folder / "rows.sqlite", n),
    }
    counts = {"contiguous": 3000, "gzip": 1500, "jpeg": 4000, "sql": 8000}
    rows = []
    for kind, make_data in makers.items():
        if options.only in (None, kind):
            with tempfile.TemporaryDirectory() as folder:
                make_data(Path(folder), int(counts[kind] * options.scale))
                rows.append(question(kind, Path(folder), options.rounds))
    publish("workers", others("workers", rows) + rows, save=options.save)


def others(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved rows of sources that were not measured now: all four together take longer than a coffee."""
    saved = RESULTS / f"{name}.jsonl"
    lines = saved.read_text().splitlines()[1:] if saved.exists() else []
    measured = {row["source"] for row in rows}
    return [row for row in map(json.loads, lines) if row["source"] not in measured]


if __name__ == "__main__":
    main()
