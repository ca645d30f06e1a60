"""Question: does a GPU fed by Stoker wait for data, and how near do its tiers come to what the hardware moves?

`gather`: batches of the device tier against a device-to-device copy that moves the same bytes (half of those read and written), for W1
(1 KiB records), W2w (pairs of 1 KiB steps), W3 (uint8 images) and W3f (the same, normalized); host time and launches per batch; and the
same rows by `index_select`, by the plain twin and by the kernel. `load`: filling the device tier against the pinned copy rate. `host`: the
host tier, batches wanted on the device, against the pinned copy rate. `train`: a step of a ResNet-18 on 224 px and of the reference
operator, fed by the device tier, the host tier and a plain DataLoader with the same batches: stall is what the run takes beyond the
same step on one resident batch; the loss curves are compared with the DataLoader's. `encode`: precompute of uint8 images by a frozen vision
transformer for several encode batch sizes, against the same model on resident batches, and against a loop that encodes and saves one sample
at a time. `further` is the rate of the samples beyond the first quarter: what starts once (digest, child, CUDA) is not in it.

    python benchmarks/gpu_serve.py [--save] [--only gather] [--device cpu --quick]

With `--device cpu` everything runs through its twin, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import stoker
from gpu_models import (
    Step,
    VisionTransformer,
    image_step,
    labelled_images,
    latent_step,
    launches_per_batch,
    waves,
)
from measure import publish
from serve_memory import MEAN, STD, Records, cache_of
from stoker.loader import Normalization
from stoker.loader.gather import ConvertingGather, make_converting_gather
from stoker.loader.outputs import find_conversion
from stoker.monitor.meter import GpuSample, GpuSampler, open_gpu
from stoker.schema import Field
from stoker.sources.arrays import ArraySource

EPOCHS = 4
"""Epochs in a row: the device need not wait for the order of the next one, which is made while it works."""
IMAGES = Normalization(mean=MEAN, std=STD, divisor=255)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything."""

    records: int
    trajectories: int
    images: int
    side: int
    batches: tuple[int, int]
    """Examples in a small and in a large batch."""
    steps: int
    width: int
    depth: int


FULL = Size(
    records=200_000,
    trajectories=4_000,
    images=16_384,
    side=224,
    batches=(256, 65_536),
    steps=300,
    width=64,
    depth=6,
)
# Width 8: at 4, torch 2.13 corrupts the heap on some processors (convolution backward, channels_last, one thread),
# with the bare model as well.
QUICK = Size(records=600, trajectories=20, images=48, side=32, batches=(8, 64), steps=5, width=8, depth=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how much to measure."""

    device: torch.device
    size: Size
    folder: Path

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], rounds: int = 5) -> float:
        """The best of some rounds, each until the device is done."""
        best = float("inf")
        for turn in range(rounds + 1):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            if turn:
                best = min(best, time.perf_counter() - begin)
        return best

    def copy_rate(self, size_bytes: int) -> float:
        """Bytes a second that a copy within the device's memory writes."""
        source = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        target, turns = torch.empty_like(source), max(1, min(50, (8 << 30) // size_bytes))
        return (
            turns * size_bytes / self.seconds(lambda: [target.copy_(source) for _ in range(turns)], rounds=2)
        )

    def pinned_rate(self, size_bytes: int) -> float:
        """Bytes a second from page-locked memory to the device."""
        source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        target = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        turns = max(1, min(50, (4 << 30) // size_bytes))
        work = lambda: [target.copy_(source, non_blocking=True) for _ in range(turns)]  # noqa: E731
        return turns * size_bytes / self.seconds(work, rounds=2)

    def epoch(self, loader: Iterable[Any]) -> tuple[float, float, int]:
        """Seconds of a pass until the device is done, seconds until the host is, batches."""
        self.wait()
        begin, count = time.perf_counter(), 0
        for _batch in loader:
            count += 1
        host = time.perf_counter() - begin
        self.wait()
        return time.perf_counter() - begin, host, count


def filled(loader: stoker.Loader) -> None:
    """Serve epochs until every record is in the memory that it is to be in: batches before come from slower tiers."""
    until = time.monotonic() + 60
    for _batch in loader:
        pass
    assert loader._serving.engine is not None
    while not loader._serving.engine.placement.complete and time.monotonic() < until:
        time.sleep(0.01)
    for _batch in loader:
        pass


def served(bench: Bench, name: str, loader: stoker.Loader, moved: int) -> dict[str, Any]:
    """One loader against a copy; `moved` is bytes read and written for a batch. Epochs follow each other without a wait."""
    filled(loader)
    turns = [*range(EPOCHS)]
    best = min(
        (bench.epoch(batch for _ in turns for batch in loader) for _ in range(5)), key=lambda taken: taken[0]
    )
    copy = bench.copy_rate(max(1, moved // 2))
    rate = moved / 2 * best[2] / best[0]
    return {
        "part": "gather", "workload": name, "batch": loader.batch_size, "batch_MiB": round(moved / 2**21, 2),
        "us_per_batch": round(best[0] / best[2] * 1e6, 1), "host_us": round(best[1] / best[2] * 1e6, 1),
        "launches": launches_per_batch(loader) if bench.device.type == "cuda" else None,
        "examples_per_s": round(loader.batch_size * best[2] / best[0]),
        "GB_s": round(rate / 1e9, 2), "copy_GB_s": round(copy / 1e9, 2), "of_copy": round(rate / copy, 3),
    }  # fmt: skip


def gather(bench: Bench) -> Iterator[dict[str, Any]]:
    """Batches of the device tier, and rows by each way to gather them."""
    size, side = bench.size, bench.size.side
    given: dict[str, Any] = {"shuffle": True, "tier": "device", "device": bench.device, "drop_last": True}
    records = Records(
        {"latent": torch.randn(size.records, 16, 32).half(), "params": torch.randn(size.records, 4)}
    )
    cache = cache_of(records, bench.folder / "w1", 4)
    for batch in size.batches:
        yield served(bench, "W1", stoker.Loader(cache, batch, **given), 2 * batch * 1040)
    steps = Records({"latent": torch.randn(size.trajectories, 101, 16, 32).half()}, time=("latent",))
    cache = cache_of(steps, bench.folder / "w2", 4)
    for batch in size.batches:
        loader = stoker.Loader(cache, batch, windows=stoker.Windows(), **given)
        yield served(bench, "W2w", loader, 2 * 2 * batch * 1024)
    images = torch.randint(0, 256, (size.images, 3, side, side), dtype=torch.uint8)
    cache = cache_of(Records({"image": images}), bench.folder / "w3", 4)
    values = 3 * side * side
    for batch in (size.batches[0], 4 * size.batches[0]):
        if batch > size.images:
            continue
        yield served(bench, "W3", stoker.Loader(cache, batch, **given), 2 * batch * values)
        for dtype in ("float32", "bfloat16"):
            loader = stoker.Loader(cache, batch, normalize={"image": IMAGES}, dtype=dtype, **given)
            moved = batch * values * (1 + getattr(torch, dtype).itemsize)
            yield served(bench, f"W3f {dtype}", loader, moved)
    yield from kernels(bench, images)


def kernels(bench: Bench, images: Tensor) -> Iterator[dict[str, Any]]:
    """The same rows by `index_select`, by the plain twin and by the kernel chosen for the device."""
    rows, batch = images.to(bench.device), bench.size.batches[0]
    index = torch.randperm(len(rows), device=bench.device)[:batch]
    field = Field(shape=tuple(images.shape[1:]), dtype="uint8")
    turns = 20 if bench.device.type == "cuda" else 2
    for dtype in ("float32", "bfloat16"):
        what = find_conversion(field, IMAGES, dtype)
        assert what is not None
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "index_select, uint8": lambda chosen: torch.index_select(rows, 0, chosen),
            "twin": ConvertingGather(rows, what, batch),
            "chosen": make_converting_gather(rows, what, batch, None, static=False),
        }
        for name, way in ways.items():
            took = bench.seconds(lambda way=way: [way(index) for _ in range(turns)]) / turns
            written = 1 if name.startswith("index") else what.dtype.itemsize
            moved = batch * rows[0].numel() * (1 + written)
            copy = bench.copy_rate(moved // 2)
            yield {
                "part": "kernel", "way": name, "dtype": dtype, "us": round(took * 1e6, 1),
                "images_per_s": round(batch / took), "of_copy": round(moved / 2 / took / copy, 3),
            }  # fmt: skip


def load(bench: Bench) -> Iterator[dict[str, Any]]:
    """Filling the device tier from a warm page cache, against the pinned copy rate."""
    size = bench.size
    records = Records({"x": torch.randint(0, 256, (size.images, 3 * size.side**2), dtype=torch.uint8)})
    cache = cache_of(records, bench.folder / "load", min(16, size.images))
    total = records.fields["x"].nbytes
    pinned = bench.pinned_rate(1 << 20)
    for turn in ("first", "again"):
        loader = stoker.Loader(cache, 1, tier="device", device=bench.device, shuffle=False)
        bench.wait()
        begin, running = time.perf_counter(), iter(loader)
        next(running)
        assert loader._serving.engine is not None
        while loader._serving.engine.placement.serving() is None and time.perf_counter() - begin < 600:
            time.sleep(0.001)
        took = time.perf_counter() - begin
        yield {
            "part": "load", "turn": turn, "GiB": round(total / 2**30, 2), "seconds": round(took, 3),
            "GB_s": round(total / took / 1e9, 2), "pinned_GB_s": round(pinned / 1e9, 2),
            "of_pinned": round(total / took / pinned, 3),
        }  # fmt: skip


def host(bench: Bench) -> Iterator[dict[str, Any]]:
    """The host tier, its batches wanted on the device."""
    size = bench.size
    images = torch.randint(0, 256, (min(size.images, 8_192), 3, size.side, size.side), dtype=torch.uint8)
    cache = cache_of(Records({"image": images}), bench.folder / "host", 4)
    batch = size.batches[0]
    loader = stoker.Loader(
        cache, batch, tier="host", device=bench.device, drop_last=True, pin_memory=True, shuffle=True
    )
    filled(loader)
    best = min((bench.epoch(loader) for _ in range(3)), key=lambda taken: taken[0])
    moved = batch * images[0].numel()
    rate, pinned = moved * best[2] / best[0], bench.pinned_rate(moved)
    yield {
        "part": "host", "batch": batch, "us_per_batch": round(best[0] / best[2] * 1e6, 1), "GB_s": round(rate / 1e9, 2),
        "pinned_GB_s": round(pinned / 1e9, 2), "of_pinned": round(rate / pinned, 3),
    }  # fmt: skip


class Images(Dataset[Any]):
    """One normalized image and its label an item, as a user writes it; by the Loader's arithmetic and in its dtype, since
    a training step with batch norms makes a visible difference of every last bit."""

    def __init__(self, fields: dict[str, Tensor], dtype: str) -> None:
        self.fields = fields
        what = find_conversion(Field(shape=tuple(fields["image"].shape[1:]), dtype="uint8"), IMAGES, dtype)
        assert what is not None
        self.scale, self.shift = (torch.tensor(values).view(3, 1, 1) for values in (what.scale, what.shift))
        self.dtype = what.dtype

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image = self.fields["image"][number].float().mul_(self.scale).add_(self.shift).to(self.dtype)
        return image, self.fields["label"][number]


class Pairs(Dataset[Any]):
    """One pair of states an item."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        number, start = place
        return self.rows[number, start], self.rows[number, start + 1]


class SameBatches:
    """The batches of a Loader, as lists of what a dataset is asked for; each whole pass goes on to the next epoch."""

    def __init__(self, loader: stoker.Loader, steps: int) -> None:
        """Looks at enough epochs for the DataLoader's part of `steps`, so that this costs nothing later."""
        self.epochs: list[list[Any]] = []
        self.next = 0
        for _ in range(2 + (steps + 20) // len(loader)):
            made = [batch["index"] if isinstance(batch, dict) else batch.index for batch in loader]
            self.epochs.append(
                [[tuple(i) if isinstance(i, list) else i for i in ids.tolist()] for ids in made]
            )
        loader.set_epoch(0)

    def __len__(self) -> int:
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[Any]:
        yield from self.epochs[self.next]
        self.next += 1


class Utilisation:
    """Samples the GPU ten times a second while a block runs."""

    def __init__(self, device: torch.device) -> None:
        self.seen: list[float] = []
        self._over = threading.Event()
        cuda = device.type == "cuda"
        self._gpu = open_gpu(str(torch.cuda.get_device_properties(device).uuid) if cuda else None)
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)

    def _sample(self) -> None:
        while isinstance(self._gpu, GpuSampler) and not self._over.wait(0.1):
            sample = self._gpu.sample()
            if isinstance(sample, GpuSample) and sample.utilization is not None:
                self.seen.append(sample.utilization)

    @property
    def mean(self) -> float | None:
        return round(sum(self.seen) / len(self.seen), 3) if self.seen else None


Feed = tuple[Iterable[Any], Callable[[Any], tuple[Tensor, Tensor]]]
"""Batches, and what a step takes of each."""


def fed(
    bench: Bench, make_step: Callable[[], Step], feed: Feed, steps: int
) -> tuple[dict[str, Any], list[float]]:
    """Train on a feed, and on its first batch over and over: what waiting for data adds."""
    batches, pick = feed

    def forever() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from map(pick, batches)

    step, resident = make_step(), next(forever())
    for _ in range(min(10, steps)):
        step(*resident)
    compute = bench.seconds(lambda: [step(*resident) for _ in range(steps)], rounds=2)
    step, running, losses = make_step(), forever(), list[Tensor]()
    for _ in range(min(10, steps)):
        losses.append(step(*next(running)))
    bench.wait()
    with Utilisation(bench.device) as gpu:
        begin = time.perf_counter()
        for _ in range(steps):
            losses.append(step(*next(running)))
        bench.wait()
        took = time.perf_counter() - begin
    row = {
        "step_ms": round(took / steps * 1e3, 3), "compute_ms": round(compute / steps * 1e3, 3),
        "stall": round(max(0.0, 1 - compute / took), 4), "examples_per_s": round(len(resident[0]) * steps / took),
        "gpu_utilisation": gpu.mean,
    }  # fmt: skip
    return row, torch.stack(losses).cpu().tolist()


def compared(
    bench: Bench, model: str, make_step: Callable[[], Step], feeds: dict[str, Feed]
) -> Iterator[dict[str, Any]]:
    """Each feed's figures, with its loss curve against that of the first."""
    reference: list[float] = []
    for name, feed in feeds.items():
        steps = (
            bench.size.steps
            if name.startswith("stoker")
            else max(min(10, bench.size.steps), bench.size.steps // 10)
        )
        row, losses = fed(bench, make_step, feed, steps)
        reference = reference or losses
        apart = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, reference, strict=False)]
        yield {
            "part": "train", "model": model, "feed": name, **row, "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4), "curve_apart": round(max(apart), 6), "steps_compared": len(apart),
        }  # fmt: skip


def train(bench: Bench) -> Iterator[dict[str, Any]]:
    """Real steps. The DataLoader serves the very batches that the Loader does, made one sample at a time."""
    size, device, batch = bench.size, bench.device, bench.size.batches[0]

    def there(tensors: Any) -> Any:
        return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)

    given: dict[str, Any] = {"shuffle": True, "drop_last": True, "device": device}
    fields = labelled_images(min(size.images, 8_192), size.side)
    cache = cache_of(Records(fields), bench.folder / "images", 4)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    given_images: dict[str, Any] = {"shuffle": True, "normalize": {"image": IMAGES}, "dtype": dtype, **given}
    loaders = {tier: stoker.Loader(cache, batch, tier=tier, **given_images) for tier in ("device", "host")}
    plain = DataLoader(Images(fields, dtype), batch_sampler=SameBatches(loaders["host"], size.steps))
    feeds: dict[str, Feed] = {"DataLoader": (plain, there)}
    for tier, loader in loaders.items():
        feeds[f"stoker, {tier}"] = (loader, lambda made: (made["image"], made["label"]))
    yield from compared(bench, "ResNet-18", lambda: image_step(device, width=size.width), feeds)

    rows = waves(size.trajectories, 41, 16, 32)
    cache = cache_of(Records({"latent": rows}, time=("latent",)), bench.folder / "waves", 4)
    given["windows"] = stoker.Windows()
    loaders = {tier: stoker.Loader(cache, batch, tier=tier, **given) for tier in ("device", "host")}
    plain = DataLoader(Pairs(rows), batch_sampler=SameBatches(loaders["host"], size.steps))
    feeds = {"DataLoader": (plain, there)}
    for tier, loader in loaders.items():
        feeds[f"stoker, {tier}"] = (loader, lambda made: (made.z0, made.z1))
    width = 4 * size.width
    yield from compared(
        bench, "operator", lambda: latent_step(device, 16, 32, width=width, depth=size.depth), feeds
    )


def precompute_seconds(
    file: Path, encoder: stoker.ModuleEncoder, folder: Path, device: torch.device
) -> float:
    """Seconds of a precompute of all samples of a file, from its digest to the complete cache."""
    source = ArraySource(file, fields={"data": "n c h w"})
    begin = time.perf_counter()
    cache = stoker.precompute(source, encoder, folder, name="encode", device=str(device), progress=None)
    took = time.perf_counter() - begin
    assert len(cache) == len(np.load(file, mmap_mode="r"))
    return took


def encode(bench: Bench) -> Iterator[dict[str, Any]]:
    """Images through a frozen model, by the number of samples in one call of it."""
    size, device = bench.size, bench.device
    count = min(size.images, 4_096)
    path = bench.folder / "raw.npy"
    images = torch.randint(0, 256, (count, 3, size.side, size.side), dtype=torch.uint8)
    np.save(path, images.numpy())
    part = bench.folder / "part.npy"
    np.save(part, images[: count // 4].numpy())
    model = VisionTransformer(side=size.side, width=6 * size.width, depth=2 * size.depth).to(device).eval()
    groups = [group for group in (8, 32, 128, 512) if group <= count // 4]

    def save_one_by_one() -> None:
        target = bench.folder / "loop"
        target.mkdir(exist_ok=True)
        with torch.inference_mode():
            for number in range(least):
                torch.save(model(images[number : number + 1].to(device)).cpu(), target / f"{number}.pt")

    least = min(count, 256)
    loop = least / bench.seconds(save_one_by_one, rounds=1)
    for group in groups:
        resident = images[:group].to(device)
        calls = max(1, min(count, 2_048) // group)
        with torch.inference_mode():
            own = group * calls / bench.seconds(lambda: [model(resident) for _ in range(calls)], rounds=1)  # noqa: B023
        encoder = stoker.ModuleEncoder(model, field="data", output="feature", version="1", encode_batch=group)
        bench.wait()
        with Utilisation(device) as gpu:
            few_s, took = (
                precompute_seconds(file, encoder, bench.folder / f"{group}-{file.stem}", device)
                for file in (part, path)
            )
        further = (count - count // 4) / max(took - few_s, 1e-9)
        rate = count / took
        yield {
            "part": "encode", "encode_batch": group, "samples": count, "samples_per_s": round(rate),
            "model_alone_per_s": round(own), "of_model_alone": round(rate / own, 3), "loop_per_s": round(loop),
            "further_per_s": round(further), "further_of_model_alone": round(further / own, 3),
            "times_faster_than_loop": round(rate / loop, 2), "seconds": round(took, 2), "gpu_utilisation": gpu.mean,
        }  # fmt: skip


PARTS = {"gather": gather, "load": load, "host": host, "train": train, "encode": encode}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="so little that figures mean nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=PARTS)
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for name, part in PARTS.items():
        if arguments.only in {None, name}:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                size = QUICK if arguments.quick else FULL
                bench = Bench(device=torch.device(arguments.device), size=size, folder=Path(folder))
                rows += part(bench)
    publish("gpu_serve", rows, save=arguments.save)


if __name__ == "__main__":
    main()
