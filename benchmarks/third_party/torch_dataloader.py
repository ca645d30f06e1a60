"""Question: how long until the first batch, how long for each batch, how much memory, in PyTorch's own benchmark?

PyTorch's `benchmarks/data/dataloader_benchmark.py` trains on JPEG files that are resized, cropped and normalized, with
the same result in each epoch. Its `benchmark_dataloader` runs as it is. For Stoker the name `DataLoader` in its module
stands for `stoker.cached`; nothing else differs. Each contender is a process of its own, since memory is measured.

Its model, ResNet-18, would take all of the time on a CPU: `create_model` makes one linear layer over means of 16 x 16 pixels here. Images are made,
320 x 240, and prepared by Pillow as the original's torchvision transforms do, so that torchvision is not needed.

- `workers 0`, `2`, `4`: the DataLoader. `stoker, first run`: fills the cache inside the call that makes the loader,
  and so in `dataloader_init_time`. `stoker, later run`: finds it there.
- All columns are the original's. `avg_data_load_time` and `avg_batch_time`: seconds per batch. `memory_increase_mb`:
  proportional set size of all processes at its peak, less that before.

    python benchmarks/third_party/run.py torch_dataloader --save
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from shared import arguments, save

import stoker

MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
CONTENDERS = ("workers 0", "workers 2", "workers 4", "stoker, first run", "stoker, later run")


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """JPEG files: resized to 256, the 224 pixels in the middle, normalized. A label for each."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("*.jpg")))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.files[number]).convert("RGB")
        scale = 256 / min(image.size)
        image = image.resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR
        )
        left, top = (image.width - 224) // 2, (image.height - 224) // 2
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
        return torch.from_numpy(((pixels - MEAN) / DEVIATION).transpose(2, 0, 1).copy()), number % 1000


def make_images(folder: Path, count: int) -> None:
    """Write photographs of a kind: smooth colors with some noise."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        colors = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((320, 240))
        noise = rng.integers(-8, 8, (240, 320, 3))
        pixels = np.clip(np.asarray(colors, np.int16) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05d}.jpg", quality=90)


def load(checkout: Path) -> ModuleType:
    """The original's module. Its imports of torchvision serve its `main` and `create_model`, which are not used."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.models"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["torchvision"])["transforms"] = sys.modules["torchvision.transforms"]
    vars(sys.modules["torchvision.models"])["resnet18"] = None
    path = checkout / "benchmarks" / "data" / "dataloader_benchmark.py"
    spec = importlib.util.spec_from_file_location("dataloader_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["create_model"] = lambda: torch.nn.Sequential(
        torch.nn.AvgPool2d(16), torch.nn.Flatten(), torch.nn.Linear(3 * 14 * 14, 1000)
    )
    return module


def with_stoker(cache: Path) -> Any:
    """What stands for `DataLoader`: it takes the same arguments."""

    def make(dataset: Any, batch_size: int, shuffle: bool, **_: Any) -> stoker.Loader:
        return stoker.cached(dataset, cache_dir=cache, batch_size=batch_size, shuffle=shuffle)

    return make


def main() -> None:
    given = arguments("torch_dataloader", __doc__, contender={"choices": CONTENDERS})
    folder, cache = given.work / "images", given.work / "images-cache"
    if given.contender is None:
        for old in (folder, cache):
            shutil.rmtree(old, ignore_errors=True)
        make_images(folder, 640 if given.quick else 3_200)
        options = ["--original", given.original, "--work", given.work, *(["--quick"] if given.quick else [])]
        rows = []
        for name in CONTENDERS:
            command = [sys.executable, __file__, *map(str, options), "--contender", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
            rows.append({"contender": name, **json.loads(done.stdout.splitlines()[-1])})
        save("torch_dataloader", given.original, rows, given)
        for old in (folder, cache):
            shutil.rmtree(old)
        return
    module, workers = load(given.original), 0
    if given.contender.startswith("stoker"):
        vars(module)["DataLoader"] = with_stoker(cache)
    else:
        workers = int(given.contender.split()[1])
    context = "forkserver" if workers else None
    batches = 20 if given.quick else 100
    figures = module.benchmark_dataloader(Images(folder), 32, workers, 1, batches, context)
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
