"""Question: does a first epoch through `stoker.cached` cost more than the same epoch of a plain `DataLoader`?

Every run is a fresh process with an empty cache folder. The clock starts when torch is imported and the dataset is
there; `import stoker` counts. Rivals are `DataLoader` with 0, 1 and 2 workers, which encode each batch where it is used.
Reported are medians over the runs, in seconds: the first batch, the end of the first epoch, the second epoch.
Before its clock starts, every run writes to 3 GiB of memory and frees it: on a virtual machine the first touch of a page
that the host has taken back costs ten times as much as later ones, and would decide the result.

- `ram`: 200 samples (16, 32) float32 in memory. `records`: 20,000 of 1 KiB. `images`: 4,000 uint8 images of 150 KB.
- `jpeg`: 1,456 JPEG files of 640 x 480, decoded to uint8. `hdf5`: 1,000 samples (101, 256) float32, gzip, one a chunk.
- `sql`: 20,000 rows of 8 numbers in SQLite.
- With `--encoder`, a module that multiplies 250 MFLOP a sample (about 5 ms on one core of 50 GFLOP/s); the sets that
  are longer are cut to 1,000 samples, since a rival's epoch would take minutes.

    python benchmarks/first_minute.py [--save] [--only ram hdf5] [--runs 5] [--jpegs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CASES = ("ram", "records", "images", "jpeg", "hdf5", "sql")
CONTENDERS = ("DataLoader 0", "DataLoader 1", "DataLoader 2", "cached", "cached wait=False")
BATCH = 64
SOME = 1_000
"""Samples of a case with an encoder."""
WIDTH, ROWS = 512, 477
"""2 x 477 x 512 x 512 = 250 MFLOP."""
TIMEOUT_S = 900
TOUCHED_BYTES = 3 << 30


class Heavy(nn.Module):
    """Work that grows with the number of samples and with nothing else; gives 32 values for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / 32)
        self.rows = nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        means = x.flatten(1).float().mean(1)
        return torch.stack([(self.rows * (1 + mean) @ self.weight).mean(0)[:32] for mean in means])


class InMemory(Dataset[dict[str, Tensor]]):
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"data": self.values[number]}


class Jpegs(Dataset[dict[str, Tensor]]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        from PIL import Image

        with Image.open(self.paths[number]) as image:
            return {"data": torch.from_numpy(np.array(image.convert("RGB")))}


class Gzip(Dataset[dict[str, Tensor]]):
    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.file = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        import h5py

        self.file = self.file or h5py.File(self.path)
        return {"data": torch.from_numpy(self.file["data"][number])}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.connection = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.connection = self.connection or sqlite3.connect(self.path)
        row = self.connection.execute("SELECT * FROM numbers WHERE id = ?", (number,)).fetchone()
        return {"data": torch.tensor(row[1:], dtype=torch.float32)}


def make(case: str, folder: Path, jpegs: Path | None) -> None:
    """Write the files of a case."""
    generator = np.random.default_rng(0)
    if case == "jpeg":
        from PIL import Image

        found = sorted(jpegs.rglob("*.jpg")) if jpegs is not None else []
        for number in range(1_456):
            if found:
                shutil.copy(found[number % len(found)], folder / f"{number:04}.jpg")
                continue
            coarse = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((640, 480)).save(folder / f"{number:04}.jpg", quality=90)
    elif case == "hdf5":
        import h5py

        values = np.cumsum(generator.normal(size=(1_000, 101, 256)).astype("f4"), axis=2).round(2)
        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("data", data=values, chunks=(1, 101, 256), compression="gzip")
    elif case == "sql":
        connection = sqlite3.connect(folder / "a.db")
        connection.execute(
            f"CREATE TABLE numbers (id INTEGER PRIMARY KEY, {', '.join(f'x{n} REAL' for n in range(8))})"
        )
        values = generator.normal(size=(20_000, 8)).tolist()
        connection.executemany(
            f"INSERT INTO numbers VALUES ({', '.join('?' * 9)})", [(n, *row) for n, row in enumerate(values)]
        )
        connection.commit()
        connection.close()


def dataset_of(case: str, folder: Path, *, encoder: bool) -> Dataset[Any]:
    """A dataset over the files of a case, or over memory."""
    most = SOME if encoder else 1_000_000
    generator = torch.Generator().manual_seed(0)
    if case == "ram":
        return InMemory(torch.randn(200, 16, 32, generator=generator))
    if case == "records":
        return InMemory(torch.randn(min(most, 20_000), 256, generator=generator))
    if case == "images":
        size = (min(most, 4_000), 224, 224, 3)
        return InMemory(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))
    if case == "jpeg":
        return Jpegs(sorted(folder.glob("*.jpg"))[:most])
    return Gzip(folder / "a.h5", 1_000) if case == "hdf5" else Rows(folder / "a.db", min(most, 20_000))


def run(case: str, contender: str, folder: Path, cache: Path, *, encoder: bool) -> dict[str, float]:
    """One run of one contender, in this process."""
    dataset = dataset_of(case, folder, encoder=encoder)
    module = Heavy().eval().requires_grad_(False) if encoder else None
    np.ones(TOUCHED_BYTES, np.uint8)
    begin = time.perf_counter()
    if contender.startswith("DataLoader"):
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=int(contender[-1]))

        def epoch(first: Callable[[], None]) -> int:
            count = 0
            for batch in loader:
                values = batch["data"] if module is None else module(batch["data"])
                first()
                count += len(values)
            return count
    else:
        import stoker

        served = stoker.cached(
            dataset,
            module,
            cache_dir=cache,
            batch_size=BATCH,
            wait="wait=False" not in contender,
            shuffle=True,
        )

        def epoch(first: Callable[[], None]) -> int:
            count = 0
            for batch in served:
                values = next(iter(batch.values()))
                first()
                count += len(values)
            return count

    took: dict[str, float] = {}
    with torch.no_grad():
        counted = epoch(lambda: took.setdefault("first_batch_s", time.perf_counter() - begin) and None)
        took["first_epoch_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        epoch(lambda: None)
        took["second_epoch_s"] = time.perf_counter() - begin
    assert counted == len(dataset), (counted, len(dataset))  # type: ignore[arg-type]
    return took


def measured(case: str, contender: str, folder: Path, *, encoder: bool) -> dict[str, float]:
    """The same in a fresh process with an empty cache folder."""
    os.sync()  # what the run before wrote must not slow this one down
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        words = [case, contender, str(folder), cache, *(["--encoder"] if encoder else [])]
        done = subprocess.run(
            [sys.executable, __file__, "--child", *words],
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},  # as if installed
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        sys.exit(f"{case}, {contender}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from measure import publish

    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jpegs", type=Path)
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for case in arguments.only:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
            folder = Path(made) / "data"
            folder.mkdir()
            make(case, folder, arguments.jpegs)
            for encoder in (False, True):
                taken: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.contenders}
                for _ in range(arguments.runs):
                    for name in arguments.contenders:
                        taken[name].append(measured(case, name, folder, encoder=encoder))
                for name, runs in taken.items():
                    medians = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                    rows.append({"case": case, "encoder": encoder, "contender": name, **medians})
                    print(json.dumps(rows[-1]), flush=True)
    publish("first_minute", rows, save=arguments.save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        case, contender, folder, cache = sys.argv[2:6]
        print(json.dumps(run(case, contender, Path(folder), Path(cache), encoder="--encoder" in sys.argv)))
        sys.stdout.flush()
        os._exit(0)  # threads of a background fill are no part of the question
    main()
