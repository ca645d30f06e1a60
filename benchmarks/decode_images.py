"""Question: how fast are JPEGs decoded and resized into a cache, against a plain DataLoader of two workers?

All contenders read the same files and give uint8 images of 3 x 224 x 224: `precompute` with as many workers as it
chooses or with two, which also digests, checks and stores them (whole call, into a fresh folder each time), and a torch
DataLoader with two worker processes over a Dataset that opens, decodes and resizes with Pillow (one epoch, batches of 64). Both with Pillow's
reduced decoding of JPEG (`draft`) and without. Then a second epoch: batches of the cache, against the DataLoader
again. Whole wall times, page cache warm, medians of interleaved rounds.

    python benchmarks/decode_images.py [--save] [--rounds 3] [--folder IMAGES] [--count 1456]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import stoker
from measure import medians, publish

SIZE = 224


class Plain(Dataset[Any]):
    """What people write: open, decode, resize."""

    def __init__(self, files: list[Path], draft: bool) -> None:
        self.files, self.draft = files, draft

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.files[number]) as image:
            if self.draft:
                image.draft("RGB", (SIZE, SIZE))
            small = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.asarray(small).transpose(2, 0, 1).copy())


def prepare(folder: Path, images: Path | None, count: int) -> list[Path]:
    """`count` files in `folder`: links to those of `images` in turn, or drawn ones of 480 x 640."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    found = sorted(images.rglob("*.jpg")) if images else []
    for number in range(count):
        target = folder / f"{number:05d}.jpg"
        if found:
            target.symlink_to(found[number % len(found)].resolve())
        else:
            small = generator.integers(0, 256, (12, 16, 3), np.uint8)
            Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(target, quality=90)
    return sorted(folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=1456)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), arguments)
    publish("decode_images", rows, save=arguments.save)


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    files = prepare(folder / "images", arguments.folder, arguments.count)

    def fill(reduced: bool, workers: int | None) -> float:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        begin = time.perf_counter()
        source = stoker.ImageSource(folder / "images", size=(SIZE, SIZE), reduced=reduced)
        cache = stoker.precompute(source, None, folder / "cache", name="c", workers=workers)
        took = time.perf_counter() - begin
        assert len(cache) == len(files)
        return took

    def load(draft: bool) -> float:
        begin = time.perf_counter()
        loader = DataLoader(Plain(files, draft), 64, num_workers=2)
        assert sum(len(batch) for batch in loader) == len(files)
        return time.perf_counter() - begin

    def serve() -> float:
        cache = stoker.open_cache(folder / "cache" / "c")
        loader = stoker.Loader(cache, 64, shuffle=True)
        begin = time.perf_counter()
        assert sum(len(batch["image"]) for batch in loader) == len(files)
        return time.perf_counter() - begin

    taken = medians(
        {
            "precompute": lambda: fill(True, None),
            "precompute, two workers": lambda: fill(True, 2),
            "DataLoader": lambda: load(False),
            "precompute, full decoding": lambda: fill(False, None),
            "DataLoader with draft": lambda: load(True),
            "second epoch, from the cache": serve,
        },
        rounds=arguments.rounds,
    )
    plain = taken["DataLoader"]
    what = f"{arguments.folder.name}, {len(files)} files" if arguments.folder else f"{len(files)} drawn"
    return [
        {
            "contender": name,
            "images": what,
            "images_per_s": round(len(files) / seconds),
            "times_the_plain_loader": round(plain / seconds, 2),
        }
        for name, seconds in taken.items()
    ]


if __name__ == "__main__":
    main()
