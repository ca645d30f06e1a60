"""Question: is this version of Stoker as fast as another one?

Both versions are checkouts of the repository. Each case runs once in the one and once in the other, then in the
opposite order, and so on; the ratio is taken within each pair and the median of the pairs is reported with the
quartiles. `after_over_before` is a ratio of speeds: 1 is equal, above 1 the version under test is faster. Every pair has
two fresh processes, because two processes of one version differ more than two versions do. In a pair of a serving case
the processes take turns, and the median of a process's turns counts. Only public names are used, so that versions with
different insides can be compared. Caches are made by the earlier version and read by both.

- `W1`: 20,000 records of 1 KiB, batches of 256. `W2w`: windows of 1,000 trajectories, batches of 64. `W2t`: whole
  trajectories, batches of 16. `W3`: 4,000 uint8 images of 48 KiB, batches of 128. `W3f`: the same, normalized to float32.
- `disk`: records of 103 KiB from the drive, pages dropped before each turn. `stall`: W2w with a small training step.
- `precompute mlp|grid|gzip`: one whole call; an expensive encoder, a cheap one, and the cheap one on gzip data.
  `precompute gzip long` has four times the samples of `precompute gzip`.
- `first batch`: from the start of a process to the first batch of a finished cache.
- `cached small|images`: the first call of `stoker.cached` on 200 samples in memory, and on uint8 images of 150 KB.

    python benchmarks/before_after.py BEFORE [--after CHECKOUT] [--save] [--quick] [--only W1 W3] [--pairs 7]
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

SERVING = ("W1", "W2w", "W2t", "W3", "W3f", "disk", "stall")
FRESH = (
    "precompute mlp",
    "precompute grid",
    "precompute gzip",
    "precompute gzip long",
    "first batch",
    "cached small",
    "cached images",
)
TURN_S = 0.5
"""A turn of serving lasts at least this long."""
TURNS = 5
"""Turns of each process of a serving case, after one that is not counted."""
TIMEOUT_S = 600
ROOT = Path(__file__).resolve().parent.parent


def fields(case: str, scale: int) -> tuple[str, torch.Tensor]:
    """The field and the values of a serving case; `scale` divides the number of records."""
    generator = torch.Generator().manual_seed(0)
    if case in ("W3", "W3f"):
        size = (4_000 // scale, 128, 128, 3)
        return "image", torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if case in ("W2w", "W2t", "stall"):
        return "latent", torch.randn(1_000 // scale, 101, 16, 32, generator=generator).half()
    if case == "disk":
        return "latent", torch.randn(6_000 // scale, 103, 512, generator=generator).half()
    return "latent", torch.randn(20_000 // scale, 512, generator=generator).half()


def make(case: str, folder: Path, scale: int) -> None:
    """Write the cache of a serving case, or the data of another one."""
    import h5py
    import numpy as np

    import stoker

    if not case.startswith(("precompute", "cached")):
        name, values = fields(case, scale)
        axes = {2: "n c", 3: "n x c", 4: "n y x c"}[values.ndim]
        if case in ("W2w", "W2t", "stall"):
            axes = "n t x c"
        with h5py.File(folder / "values.h5", "w") as file:
            file[name] = values.numpy()
        source = stoker.HDF5Source(folder / "values.h5", fields={name: f"{name}: {axes}"})
        cache = stoker.precompute(source, None, folder / "cache", name="train", progress=None)
        (folder / "path").write_text(str(cache.path))
    if case.startswith("precompute"):
        counts = {"mlp": 600, "grid": 3_000, "gzip": 600, "gzip long": 2_400}
        count = counts[case.removeprefix("precompute ")] // scale
        wave = np.sin(np.linspace(0, 50, 201 * 1024, dtype=np.float32)).reshape(201, 1024)
        options: dict[str, Any] = (
            {"shuffle": True, "compression": "gzip", "chunks": (1, 201, 1024)} if "gzip" in case else {}
        )
        with h5py.File(folder / "data.h5", "w") as file:
            tensor = file.create_dataset("tensor", (count, 201, 1024), dtype="f4", **options)
            for number in range(count):
                tensor[number] = wave * (1 + number / count)


def main_of_version() -> None:
    """Run in a process of one version: `serve CASE FOLDER` or `once CASE FOLDER SCALE`."""
    mode, case, place, scale = sys.argv[2:6]
    folder = Path(place)
    torch.set_num_threads(1)
    if mode == "make":
        make(case, folder, int(scale))
        return
    if mode == "once":
        print(json.dumps(once(case, folder, int(scale))))
        return
    work = serving(case, folder)
    work()
    print("ready", flush=True)
    for _line in sys.stdin:
        begin, units = time.perf_counter(), 0
        while not units or time.perf_counter() - begin < TURN_S:
            units += work()
        print(json.dumps((time.perf_counter() - begin) / units), flush=True)


def serving(case: str, folder: Path) -> Callable[[], int]:
    """A function that serves one epoch and returns its batches."""
    import stoker
    import stoker.loader

    cache = stoker.open_cache((folder / "path").read_text())
    size = {"W1": 256, "W2w": 64, "W2t": 16, "W3": 128, "W3f": 128, "disk": 32, "stall": 64}[case]
    options: dict[str, Any] = {
        "shuffle": True,
        "batch_size": size,
        "seed": 1,
        "tier": "disk" if case == "disk" else "host",
    }
    if case in ("W2w", "stall"):
        options["windows"] = stoker.Windows(stride=1, horizon=1)
    if case == "W3f":
        normalize = getattr(stoker.loader, "Normalization", None) or stoker.loader.Normalize
        options["normalize"] = {"image": normalize(mean=0.5, std=0.25, divisor=255)}
    loader = stoker.Loader(cache, **options)
    step = _step() if case == "stall" else None

    def work() -> int:
        if case == "disk":
            _drop_pages(folder / "cache")
        count = 0
        for batch in loader:
            if step is not None:
                step(batch)
            count += 1
        return count

    return work


def _step() -> Callable[[Any], None]:
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.GELU(), torch.nn.Linear(256, 512))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        loss = (model(batch[0].flatten(1).float()) - batch[1].flatten(1).float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Patches(torch.nn.Module):
    """A patch encoder bound by arithmetic: about 10 ms a sample on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 32))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """`(samples, time, 1, 1024, 1)` to `(samples, time, 16, 32)`."""
        return self.net(data.reshape(*data.shape[:2], 16, 64))


class Images(torch.utils.data.Dataset[Any]):
    """uint8 images of 150 KB, made from their number: about as expensive as a fast decoder."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, 256, (224, 224, 3), dtype=torch.uint8, generator=generator), number % 10


def once(case: str, folder: Path, scale: int) -> float:
    """Seconds of a case that starts in a fresh process."""
    import stoker

    if case == "first batch":
        cache = stoker.open_cache((folder / "path").read_text())
        next(iter(stoker.Loader(cache, batch_size=64, shuffle=True)))
        return time.time() - float(os.environ["BENCH_STARTED"])
    target = folder / f"out-{os.getpid()}"
    try:
        if case.startswith("cached"):
            data: Any = Images(4_000 // scale)
            if case == "cached small":
                rows = torch.randn(200, 1024)
                data = torch.utils.data.TensorDataset(rows, torch.arange(200))
            begin = time.perf_counter()
            next(iter(stoker.cached(data, batch_size=32, cache_dir=target, shuffle=True)))
            return time.perf_counter() - begin
        torch.manual_seed(0)
        encoder: Any = stoker.GridEncoder(channels=1, grid=(1, 1024), patch=(1, 4), tokens=16, dim=32, seed=0)
        if case == "precompute mlp":
            encoder = stoker.ModuleEncoder(
                Patches(), field="data", output="latent", time="whole", version="1"
            )
        source = stoker.HDF5Source(folder / "data.h5", preset="pdebench")
        begin = time.perf_counter()
        stoker.precompute(source, encoder, target, name="bench", dtype="float16", progress=None)
        return time.perf_counter() - begin
    finally:
        shutil.rmtree(target, ignore_errors=True)


def command(checkout: Path, *words: object) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that run this file with the package of a checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "BENCH_STARTED": str(time.time()),
    }
    return [sys.executable, __file__, "--version-of", *map(str, words)], environment


def run_once(checkout: Path, case: str, folder: Path, scale: int, mode: str = "once") -> float:
    """Run one fresh process and return the seconds it printed."""
    words, environment = command(checkout, mode, case, folder, scale)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{case} with {checkout}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if mode == "once" else 0.0


def serve_pair(case: str, versions: dict[str, Path], folder: Path, first: int) -> dict[str, float]:
    """Median seconds a batch of one fresh process for each version; `first`: 0 or 1, which begins."""
    taken: dict[str, list[float]] = {name: [] for name in versions}
    with ExitStack() as stack:
        children = {}
        for name, checkout in versions.items():
            words, environment = command(checkout, "serve", case, folder, 1)
            child = subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True)
            stack.callback(child.wait, TIMEOUT_S)
            stack.callback(child.kill)
            children[name] = child
            if child.stdout.readline().strip() != "ready":
                raise SystemExit(f"{case} with {checkout} did not start")
        for turn in range(TURNS + 1):
            for name in sorted(versions, reverse=bool((turn + first) % 2)):
                children[name].stdin.write("turn\n")
                children[name].stdin.flush()
                taken[name].append(json.loads(children[name].stdout.readline()))
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def measure_pairs(
    case: str, versions: dict[str, Path], folder: Path, scale: int, pairs: int
) -> list[dict[str, float]]:
    """Seconds of both versions, pair by pair; the first pair of a case that is not of serving is not counted."""
    if case in SERVING:
        return [serve_pair(case, versions, folder, pair % 2) for pair in range(pairs)]
    taken = [
        {
            name: run_once(versions[name], case, folder, scale)
            for name in sorted(versions, reverse=bool(pair % 2))
        }
        for pair in range(pairs + 1)
    ]
    return taken[1:]


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--only", nargs="*", default=[*SERVING, *FRESH], choices=[*SERVING, *FRESH])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    options = parser.parse_args()
    from measure import publish

    versions = {"before": options.before.resolve(), "after": options.after.resolve()}
    scale, rows = (20, []) if options.quick else (1, [])
    for case in options.only:
        with tempfile.TemporaryDirectory(prefix="before-after-") as place:
            folder = Path(place)
            run_once(versions["before"], case, folder, scale, mode="make")
            taken = measure_pairs(case, versions, folder, scale, 1 if options.quick else options.pairs)
        ratios = sorted(row["before"] / row["after"] for row in taken)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows.append(
            {
                "case": case,
                "after_over_before": round(statistics.median(ratios), 3),
                "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
                "before_s": round(statistics.median(row["before"] for row in taken), 7),
                "after_s": round(statistics.median(row["after"] for row in taken), 7),
                "pairs": len(taken),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    before = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10"], cwd=versions["before"], capture_output=True, text=True
    )
    rows.insert(0, {"before": before.stdout.strip()})
    publish("before_after", rows, save=options.save and not options.quick)


if __name__ == "__main__":
    main_of_version() if sys.argv[1:2] == ["--version-of"] else main()
