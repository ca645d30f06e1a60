"""Question: how long from the command to the first batch, in parts, and what is left of it at the second start?

Three measurements, each start in a fresh process:

- `start`: `stoker demo`, one step long: cold, warm, and with a changed configuration. `seconds` are medians of the
  start-up table that the command itself prints; `modules` are the imports that take longest.
- `second_start`: seconds of cache work at the first and at the second start with the same configuration, and of a
  plain start, which loads a `.pt` file for each sample into a dictionary (page cache warm for both).
- `parts`: fetch, validate, precompute, and `train` up to its first batch, from an empty folder, against the serial
  script of the earlier guide: copy file after file, read each once, one sample at a time through the encoder into a
  `.pt` file, then load them all. Measured for one and for two units of data; `at_declared_s` is the line through both at
  `declared_samples`. Files come from `file://`, so a download adds its own time to both sides.

    python benchmarks/startup.py [--save] [--quick] [--runs 3] [--samples 400]
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

from measure import publish
from precompute_wall import write

START = ["demo", "training.max_steps=1", "--json"]
CHANGED = "latent.dim=16"
FILES = 4
DECLARED_SAMPLES = 10_000
"""What PDEBench publishes of one equation and one parameter."""
PARTS = ("fetch", "validate", "precompute", "program start", "first batch")
IMPORTS = {
    "stoker.cli.process", "typer", "rich.console", "h5py", "numpy", "omegaconf", "stoker.config", "torch",
    "stoker.run.demo", "torch._dynamo", "matplotlib.figure",
}  # fmt: skip
"""What is loaded for a start, and after it."""

LOAD_PT = """
import json, sys, time
from pathlib import Path
import torch
begin = time.perf_counter()
files = sorted(Path(sys.argv[1]).glob("*.pt"))
samples = {n: torch.load(path, weights_only=True) for n, path in enumerate(files)}
print(json.dumps({"load_s": time.perf_counter() - begin, "samples": len(samples)}))
"""

TO_PT = """
import sys, torch, stoker
from pathlib import Path
out = Path(sys.argv[2])
out.mkdir()
at = 0
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if folder.name != "encoders" and not folder.name.startswith("."):
        cache = stoker.open_cache(folder)
        for number in cache.indices.tolist():
            torch.save({name: value.clone() for name, value in cache[number].items()}, out / f"{at:06d}.pt")
            at += 1
"""

SERIAL = """
import json, sys, time
from pathlib import Path
marks = [time.perf_counter()]
import shutil, h5py, torch, stoker
marks.append(time.perf_counter())
origin, folder = map(Path, sys.argv[1:3])
folder.mkdir()
for path in sorted(origin.glob("*.h5")):
    shutil.copyfile(path, folder / path.name)
marks.append(time.perf_counter())
for path in sorted(folder.glob("*.h5")):
    with h5py.File(path) as file:
        for row in file["tensor"]:
            assert row.shape == (201, 1024)
marks.append(time.perf_counter())
encoder = stoker.GridEncoder(channels=1, grid=(1, 1024), patch=(1, 4), tokens=16, dim=32, seed=0)
at = 0
with torch.inference_mode():
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            for row in file["tensor"]:
                latent = encoder.encode({"data": torch.from_numpy(row).view(1, 201, 1, 1024, 1)})["latent"][0].half()
                torch.save({"latent": latent}, folder / f"{at:06d}.pt")
                at += 1
marks.append(time.perf_counter())
samples = [torch.load(path, weights_only=True)["latent"] for path in sorted(folder.glob("*.pt"))]
pairs = [(n, t) for n in range(len(samples)) for t in range(200)]
batch = torch.stack([samples[n][t] for n, t in pairs[:64]])
marks.append(time.perf_counter())
names = ("program start", "fetch", "validate", "precompute", "first batch")
print(json.dumps(dict(zip(names, [b - a for a, b in zip(marks, marks[1:])]))))
"""

CONFIG = """
data: {{task: burgers, files: "{folder}/data/*.h5", preset: pdebench, splits: {{train: 0.8, val: 0.2}}}}
latent: {{dim: 32, tokens: 16}}
encoder: {{patch_size: 4, seed: 0}}
model: {{width: 32, depth: 1, heads: 4}}
training: {{batch_size: 64, max_steps: 1, latent_cache_dir: "{folder}/cache", latent_cache_dtype: float16}}
fetch: {{folder: "{folder}/data", files: {{{wanted}}}}}
"""


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # An installed package has its bytecode.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**own, **environment}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)[:200]}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done


def start(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return command(folder, "-m", "stoker", *START, *words, **environment)


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


def starts(root: Path, runs: int) -> list[dict[str, Any]]:
    """Rows `start` and `second_start`."""
    taken: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "changed": []}
    folder = root / "demo"
    folder.mkdir()
    start(folder)  # simulates the data, and brings files into memory
    for _ in range(runs):
        shutil.rmtree(folder / "data" / "latent_cache")
        taken["cold"].append(phases_of(start(folder)))
        taken["warm"].append(phases_of(start(folder)))
        taken["changed"].append(phases_of(start(folder, CHANGED)))
    imported = slowest(start(folder, PYTHONPROFILEIMPORTTIME="1").stderr)
    medians = {
        kind: {part: round(statistics.median(run[part] for run in found), 4) for part in found[0]}
        for kind, found in taken.items()
    }
    rows: list[dict[str, Any]] = [{"what": "start", "start": kind, **row} for kind, row in medians.items()]
    modules = {name: round(seconds, 3) for name, seconds in imported.items()}
    return [*rows, {"what": "start", "start": "warm", "modules": modules}]


def second_start(root: Path, samples: int, runs: int) -> dict[str, Any]:
    """Cache work of a training's second start, against its first and against loading `.pt` files."""
    origin, folder = root / "second-origin", root / "second"
    config = prepare(origin, folder, samples)
    shutil.copytree(origin, folder / "data")
    found: dict[str, list[float]] = {"first": [], "second": [], "plain": []}
    train = ("-m", "stoker", "train", str(config), "--json")
    for turn in range(runs):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        found["first"].append(phases_of(command(folder, *train))["caches"])
        found["second"].append(phases_of(command(folder, *train))["caches"])
        if not turn:
            command(folder, "-c", TO_PT, str(folder / "cache"), str(folder / "pt"))
        loaded = json.loads(command(folder, "-c", LOAD_PT, str(folder / "pt")).stdout)
        found["plain"].append(loaded["load_s"])
    first, second, plain = (statistics.median(values) for values in found.values())
    shutil.rmtree(folder)
    return {
        "what": "second_start", "samples": samples, "first_cache_s": round(first, 3), "second_cache_s": round(second, 3),
        "load_every_pt_s": round(plain, 3), "second_of_first": round(second / first, 4), "second_of_plain": round(second / plain, 4),
    }  # fmt: skip


def prepare(origin: Path, folder: Path, samples: int) -> Path:
    """Write `FILES` files at `origin` and the settings in `folder`; the settings' path."""
    origin.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number in range(FILES):
        write(origin / f"burgers_{number}.h5", samples // FILES, None)
    config = folder / "c.yaml"
    files = sorted(origin.glob("*.h5"))
    wanted = ", ".join(f'{path.name}: {{from: "{path.as_uri()}"}}' for path in files)
    config.write_text(CONFIG.format(folder=folder, wanted=wanted))
    return config


def ours(config: Path, folder: Path) -> dict[str, float]:
    """Seconds of each part of a first start with Stoker."""
    taken: dict[str, float] = {}
    for part in ("fetch", "validate", "precompute"):
        begin = time.perf_counter()
        command(folder, "-m", "stoker", part, str(config), "--json")
        taken[part] = time.perf_counter() - begin
    phases = phases_of(command(folder, "-m", "stoker", "train", str(config), "--json"))
    taken["program start"] = phases["program and settings"]
    taken["first batch"] = phases["in all"] - phases["program and settings"]
    return taken


def parts(root: Path, samples: int, runs: int) -> list[dict[str, Any]]:
    """Rows `parts`: both ways at two sizes, and the line through them."""
    measured: dict[str, dict[int, dict[str, float]]] = {"stoker": {}, "serial script": {}}
    for count in (samples, 2 * samples):
        taken: dict[str, list[dict[str, float]]] = {"stoker": [], "serial script": []}
        for turn in range(runs):
            origin, folder = root / f"origin-{count}-{turn}", root / f"ours-{count}-{turn}"
            config = prepare(origin, folder, count)
            taken["stoker"].append(ours(config, folder))
            serial = command(folder, "-c", SERIAL, str(origin), str(folder / "serial"))
            taken["serial script"].append(json.loads(serial.stdout))
            shutil.rmtree(origin)
            shutil.rmtree(folder)
        for way, found in taken.items():
            measured[way][count] = {part: statistics.median(run[part] for run in found) for part in PARTS}
    rows: list[dict[str, Any]] = []
    for way, sizes in measured.items():
        small, large = sizes.values()
        slope = {part: max(0.0, (large[part] - small[part]) / samples) for part in PARTS}
        slope["program start"] = 0.0  # imports and settings, whatever the data
        declared = {part: small[part] + slope[part] * (DECLARED_SAMPLES - samples) for part in PARTS}
        rows.append(
            {
                "what": "parts", "way": way, "samples": [*sizes], "declared_samples": DECLARED_SAMPLES,
                "seconds": [{part: round(size[part], 3) for part in PARTS} for size in sizes.values()],
                "in_all_s": [round(sum(size.values()), 2) for size in sizes.values()],
                "at_declared_s": {part: round(value, 1) for part, value in declared.items()},
                "at_declared_in_all_s": round(sum(declared.values()), 1),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--only", choices=("start", "second_start", "parts"))
    arguments = parser.parse_args()
    runs, samples = (1, 16) if arguments.quick else (arguments.runs, arguments.samples)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        if arguments.only in (None, "start"):
            rows += starts(Path(name), runs)
        if arguments.only in (None, "second_start"):
            rows.append(second_start(Path(name), samples, runs))
        if arguments.only in (None, "parts"):
            rows += parts(Path(name), samples, 1)
    publish("startup", rows, save=arguments.save and not arguments.quick and arguments.only is None)


if __name__ == "__main__":
    main()
