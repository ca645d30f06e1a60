"""Question: how close does the Loader come to the memory it reads, and to what people use today?

Workloads and limits are those of the design (docs/project/benchmarks.md): W1 20,000 records of 1 KiB; W2w windows
of 1,000 trajectories; W2t whole trajectories; W3 4,000 uint8 images; W3f the same, normalized to float32 and to
bfloat16. `limit` is one thread of `torch.index_select(..., out=reused)` (W3f: row by row copy, multiply, add into
a reused output); `ring` the same loop into a ring of 4 buffers with the order made beforehand.
Every contender serves shuffled batches that outlive the next one. Figures are seconds per batch and fractions of
the limit; every verified cache is served at 1, 8 and 40 shards. Loaders of others (`rivals.py`) take part where they are
installed (`pip install -r benchmarks/requirements.txt`); a row names their versions, and who is missing is said. Those
that store records in files of their own get up to 160 MiB of them.

    python benchmarks/serve_memory.py [--save] [--only W1]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stoker
from measure import interleaved, publish
from rivals import rivals, versions
from stoker.loader import Normalization
from stoker.store.folder import open_folder
from stoker.store.recipe import make_recipe

SHARDS = (1, 8, 40)
TURN_S = 0.05
"""A turn lasts at least this long, for every contender. One epoch of W1 takes 2 ms, most of which went to bringing
a contender's own copy of the data back into the cache; only `limit` and `ring`, which share theirs, were spared."""


class Records:
    """Records already in memory, as a source: what precompute would have written."""

    def __init__(self, fields: dict[str, Tensor], time: tuple[str, ...] = ()) -> None:
        self.fields, self.time = fields, time

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        return {name: rows[number].numpy() for name, rows in self.fields.items()}

    def runs(self) -> list[range]:
        return [range(len(self))]

    def keys(self) -> list[str]:
        return [str(number) for number in range(len(self))]

    def identity(self) -> Any:
        from stoker.sources.protocol import Part, SourceIdentity

        return SourceIdentity(kind="bench/1", parts=(Part(name="memory", count=len(self), digest="0" * 64),))

    def schema(self) -> Any:
        from stoker.schema import Field

        return {
            name: Field(
                shape=tuple(rows.shape[1:]),
                dtype=str(rows.dtype).removeprefix("torch."),
                time=name in self.time,
            )
            for name, rows in self.fields.items()
        }


def cache_of(source: Records, folder: Path, shards: int, dtype: str | None = None) -> stoker.Cache:
    """A sealed cache of `source` in `shards` shards of nearly equal size; `dtype` to store floats in."""
    work = open_folder(folder, f"shards{shards}{dtype or ''}", make_recipe(source, None, dtype=dtype))
    writer = work.writer()
    count = len(source)
    bounds = [count * k // shards for k in range(shards + 1)]
    for begin, end in itertools.pairwise(bounds):
        for first in range(begin, end, 500):
            last = min(first + 500, end)
            writer.append(
                range(first, last), {name: rows[first:last] for name, rows in source.fields.items()}
            )
        writer.commit()
    return work.finish()


def drain(batches: Iterator[Any]) -> int:
    """Serve one epoch; each batch lives until the next one has come, as in a training loop."""
    return sum(1 for _batch in batches)


def steadily(contenders: dict[str, Callable[[], int]], *, rounds: int = 12) -> dict[str, float]:
    """`interleaved`, with whole passes repeated until a turn has lasted `TURN_S`."""

    def turn(work: Callable[[], int]) -> int:
        begin, units = time.perf_counter(), 0
        while not units or time.perf_counter() - begin < TURN_S:
            units += work()
        return units

    return interleaved({name: partial(turn, work) for name, work in contenders.items()}, rounds=rounds)


def index_loop(
    fields: list[Tensor], order: Tensor, batch: int, ring: int, shift: int = 0
) -> Callable[[], int]:
    """The limit: gather the same bytes into `ring` reused buffers, nothing else."""
    buffers = [[rows.new_empty((batch, *rows.shape[1:])) for rows in fields] for _ in range(ring)]
    ids = list(order[: len(order) // batch * batch].split(batch))
    sources = [(rows, rows[shift:] if shift else None) for rows in fields]
    twins = [[torch.empty_like(b) for b in out] for out in buffers] if shift else buffers

    def work() -> int:
        for position, chosen in enumerate(ids):
            out, twin = buffers[position % ring], twins[position % ring]
            for (rows, shifted), into, into2 in zip(sources, out, twin, strict=True):
                torch.index_select(rows, 0, chosen, out=into)
                if shifted is not None:
                    torch.index_select(shifted, 0, chosen, out=into2)
        return len(ids)

    return work


def two_threads(rows: Tensor, order: Tensor, batch: int) -> Callable[[], int]:
    """The limit with two threads, each filling half of one reused buffer: what the memory gives at most."""
    buffer = rows.new_empty((batch, *rows.shape[1:]))
    ids = list(order[: len(order) // batch * batch].split(batch))

    def half(own: slice) -> None:
        for chosen in ids:
            torch.index_select(rows, 0, chosen[own], out=buffer[own])

    def work() -> int:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(half, (slice(0, batch // 2), slice(batch // 2, batch))))
        return len(ids)

    return work


class PerSampleFiles(Dataset[Any]):
    """One `.pt` file a sample, read on demand: what the earlier systems called legacy."""

    def __init__(self, folder: Path, fields: dict[str, Tensor]) -> None:
        self.folder, self.count = folder, len(next(iter(fields.values())))
        folder.mkdir()
        for number in range(self.count):
            torch.save({k: v[number].clone() for k, v in fields.items()}, folder / f"sample_{number:05d}.pt")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return torch.load(self.folder / f"sample_{number:05d}.pt", weights_only=True)


class InMemory(Dataset[Any]):
    """A list of dicts in RAM: what the earlier systems called preload."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.items = [
            {k: v[n].clone() for k, v in fields.items()} for n in range(len(next(iter(fields.values()))))
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class PairsInMemory(Dataset[Any]):
    """Windows `(t, t + 1)` of trajectories in RAM, one pair an item."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.per = rows, rows.shape[1] - 1

    def __len__(self) -> int:
        return len(self.rows) * self.per

    def __getitem__(self, example: int) -> tuple[Tensor, Tensor]:
        number, start = divmod(example, self.per)
        return self.rows[number, start], self.rows[number, start + 1]


class PairFiles(PairsInMemory):
    """The same pairs from one `.pt` file a trajectory."""

    def __init__(self, folder: Path, rows: Tensor) -> None:
        super().__init__(rows)
        self.files = PerSampleFiles(folder, {"latent": rows})

    def __getitem__(self, example: int) -> tuple[Tensor, Tensor]:
        number, start = divmod(example, self.per)
        latent = self.files[number]["latent"]
        return latent[start], latent[start + 1]


class Batched(Dataset[Any]):
    """Hand-written batched gather: the item is a whole batch, chosen by a batch sampler."""

    def __init__(self, fields: list[Tensor], shift: int = 0) -> None:
        self.fields, self.shift = fields, shift

    def __getitem__(self, ids: list[int]) -> list[Tensor]:
        chosen = torch.as_tensor(ids)
        batch = [torch.index_select(rows, 0, chosen) for rows in self.fields]
        if self.shift:
            batch += [torch.index_select(rows[self.shift :], 0, chosen) for rows in self.fields]
        return batch


def batched_loader(dataset: Batched, count: int, batch: int, ids: Tensor | None = None) -> Any:
    """A DataLoader without workers over whole batches, shuffled anew each epoch."""

    def epoch() -> Iterator[list[int]]:
        order = torch.randperm(count) if ids is None else ids[torch.randperm(len(ids))]
        return iter([part.tolist() for part in order.split(batch) if len(part) == batch])

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            return epoch()

        def __len__(self) -> int:
            return count // batch

    return DataLoader(dataset, sampler=Sampler(), batch_size=None)


def limited(batches: Any, most: int) -> Iterator[Any]:
    return itertools.islice(batches, most)  # makes no batch beyond the last


def others(fields: dict[str, Tensor], folder: Path, batch: int) -> dict[str, Callable[[], int]]:
    """Installed rivals as contenders; large batches in fewer a turn."""
    large = batch * sum(rows[0].nbytes for rows in fields.values()) > 8 << 20
    return {
        name: lambda epoch=epoch, most=most: drain(limited(epoch(), 4 if large else most))
        for name, (epoch, most) in rivals(fields, folder, batch).items()
    }


def report(name: str, best: dict[str, float], batch_bytes: int) -> list[dict[str, Any]]:
    limit, ring = best["limit"], best["ring"]
    rivals = {
        k: v for k, v in best.items() if not k.startswith(("limit", "ring")) and not k.startswith("stoker")
    }
    rows = []
    for contender, took in best.items():
        row = {
            "workload": name, "contender": contender, "us_per_batch": round(took * 1e6, 1),
            "GB_per_s": round(batch_bytes / took / 1e9, 2),
            "of_limit": round(limit / took, 4), "of_ring": round(ring / took, 4),
        }  # fmt: skip
        if contender.startswith("stoker"):
            row["times_best_rival"] = round(min(rivals.values()) / took, 2)
        rows.append(row)
    return rows


def workload_1(folder: Path) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    fields = {
        "latent": torch.randn(20_000, 16, 32, generator=generator).half(),
        "params": torch.randn(20_000, 4, generator=generator),
    }
    order, rows, batch = torch.randperm(20_000), list(fields.values()), 256
    files = PerSampleFiles(folder / "pt", fields)
    contenders: dict[str, Callable[[], int]] = {
        "limit": index_loop(rows, order, batch, ring=1),
        "ring": index_loop(rows, order, batch, ring=4),
    }
    for shards in SHARDS:
        loader = stoker.Loader(
            cache_of(Records(fields), folder, shards),
            batch_size=batch,
            drop_last=True,
            tier="host",
            shuffle=True,
        )
        contenders[f"stoker, {shards} shards"] = lambda loader=loader: drain(iter(loader))
    plain: dict[str, Any] = {
        "DataLoader over .pt files": (DataLoader(files, batch, shuffle=True, drop_last=True), 8),
        "DataLoader over dict in RAM": (
            DataLoader(InMemory(fields), batch, shuffle=True, drop_last=True),
            40,
        ),
        "DataLoader over TensorDataset": (
            DataLoader(TensorDataset(*rows), batch, shuffle=True, drop_last=True),
            40,
        ),
        "DataLoader, batched index": (batched_loader(Batched(rows), 20_000, batch), 1000),
    }
    for name, (loader, most) in plain.items():
        contenders[name] = lambda loader=loader, most=most: drain(limited(loader, most))
    contenders |= others(fields, folder, batch)
    return report("W1", steadily(contenders), batch * (1024 + 16))


def trajectories() -> Tensor:
    return torch.randn(1_000, 101, 16, 32, generator=torch.Generator().manual_seed(0)).half()


def workload_2_windows(folder: Path) -> list[dict[str, Any]]:
    latent, batch = trajectories(), 256
    flat = latent.view(-1, 16, 32)
    pairs = (torch.arange(1_000)[:, None] * 101 + torch.arange(100)).flatten()
    order = pairs[torch.randperm(len(pairs))]
    contenders: dict[str, Callable[[], int]] = {
        "limit": index_loop([flat], order, batch, ring=1, shift=1),
        "ring": index_loop([flat], order, batch, ring=4, shift=1),
    }
    source = Records({"latent": latent}, time=("latent",))
    for shards in SHARDS:
        cache = cache_of(source, folder, shards)
        loader = stoker.Loader(
            cache, batch_size=batch, drop_last=True, tier="host", windows=stoker.Windows(), shuffle=True
        )
        contenders[f"stoker, {shards} shards"] = lambda loader=loader: drain(iter(loader))
    memory = PairsInMemory(latent)
    flat_pairs = TensorDataset(latent[:, :-1].reshape(-1, 16, 32), latent[:, 1:].reshape(-1, 16, 32))
    plain: dict[str, Any] = {
        "DataLoader over .pt files": (DataLoader(PairFiles(folder / "pt", latent), batch, shuffle=True), 3),
        "DataLoader over dict in RAM": (DataLoader(memory, batch, shuffle=True, drop_last=True), 40),
        "DataLoader over TensorDataset": (DataLoader(flat_pairs, batch, shuffle=True, drop_last=True), 40),
        "DataLoader, batched index": (
            batched_loader(Batched([flat], shift=1), len(pairs), batch, pairs),
            1000,
        ),
    }
    for name, (loader, most) in plain.items():
        contenders[name] = lambda loader=loader, most=most: drain(limited(loader, most))
    return report("W2w", steadily(contenders), 2 * batch * 1024)


def workload_2_trajectories(folder: Path) -> list[dict[str, Any]]:
    latent, batch = trajectories(), 8
    order = torch.randperm(1_000)
    contenders: dict[str, Callable[[], int]] = {
        "limit": index_loop([latent], order, batch, ring=1),
        "ring": index_loop([latent], order, batch, ring=4),
    }
    source = Records({"latent": latent}, time=("latent",))
    for shards in SHARDS:
        loader = stoker.Loader(
            cache_of(source, folder, shards), batch_size=batch, drop_last=True, tier="host", shuffle=True
        )
        contenders[f"stoker, {shards} shards"] = lambda loader=loader: drain(iter(loader))
    fields = {"latent": latent}
    plain: dict[str, Any] = {
        "DataLoader over .pt files": DataLoader(PerSampleFiles(folder / "pt", fields), batch, shuffle=True),
        "DataLoader over dict in RAM": DataLoader(InMemory(fields), batch, shuffle=True),
        "DataLoader over TensorDataset": DataLoader(TensorDataset(latent), batch, shuffle=True),
        "DataLoader, batched index": batched_loader(Batched([latent]), 1_000, batch),
    }
    for name, loader in plain.items():
        contenders[name] = lambda loader=loader: drain(iter(loader))
    contenders |= others(fields, folder, batch)
    return report("W2t", steadily(contenders), batch * latent[0].nbytes)


def workload_3(folder: Path) -> list[dict[str, Any]]:
    images = torch.randint(
        0, 256, (4_000, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    order, batch = torch.randperm(4_000), 256
    contenders: dict[str, Callable[[], int]] = {
        "limit": index_loop([images], order, batch, ring=1),
        "ring": index_loop([images], order, batch, ring=4),
        "limit, 2 threads": two_threads(images, order, batch),
    }
    for shards in SHARDS:
        cache = cache_of(Records({"image": images}), folder, shards)
        loader = stoker.Loader(cache, batch_size=batch, drop_last=True, tier="host", shuffle=True)
        contenders[f"stoker, {shards} shards"] = lambda loader=loader: drain(iter(loader))
    fields = {"image": images}
    plain: dict[str, Any] = {
        "DataLoader over .pt files": DataLoader(PerSampleFiles(folder / "pt", fields), batch, shuffle=True),
        "DataLoader over dict in RAM": DataLoader(InMemory(fields), batch, shuffle=True),
        "DataLoader over TensorDataset": DataLoader(TensorDataset(images), batch, shuffle=True),
        "DataLoader, batched index": batched_loader(Batched([images]), 4_000, batch),
    }
    for name, loader in plain.items():
        contenders[name] = lambda loader=loader: drain(limited(loader, 5))
    contenders |= others(fields, folder, batch)
    return report("W3", steadily(contenders, rounds=5), batch * images[0].nbytes)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, for values of 0..1."""


def rows_to_floats(
    images: Tensor, order: Tensor, batch: int, *, ring: int, dtype: torch.dtype
) -> Callable[[], int]:
    """The limit of W3f: each row copied into a reused output, multiplied and added to while it is in the cache."""
    scale = (1 / (255 * torch.tensor(STD))).view(3, 1, 1)
    shift = (-torch.tensor(MEAN) / torch.tensor(STD)).view(3, 1, 1)
    buffers = [torch.empty((batch, *images.shape[1:]), dtype=dtype) for _ in range(ring)]
    ids = [part.tolist() for part in order[: len(order) // batch * batch].split(batch)]

    def work() -> int:
        for position, chosen in enumerate(ids):
            out = buffers[position % ring]
            for place, number in enumerate(chosen):
                out[place].copy_(images[number]).mul_(scale).add_(shift)
        return len(ids)

    return work


class Normalized(Dataset[Any]):
    """Items of another dataset, images normalized one by one as a user's transform does."""

    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, number: Any) -> Any:
        item = self.inner[number]
        image = item["image"] if isinstance(item, dict) else item[0]
        return image.float().div_(255).sub_(self.mean).div_(self.std).to(self.dtype)


def workload_3_floats(folder: Path, name: str = "float32") -> list[dict[str, Any]]:
    images = torch.randint(
        0, 256, (4_000, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    order, batch, dtype = torch.randperm(4_000), 256, getattr(torch, name)
    limit = partial(rows_to_floats, images, order[: 6 * batch], batch, dtype=dtype)
    contenders: dict[str, Callable[[], int]] = {"limit": limit(ring=1), "ring": limit(ring=4)}
    normalize = {"image": Normalization(mean=MEAN, std=STD, divisor=255)}
    for shards in SHARDS:
        cache = cache_of(Records({"image": images}), folder, shards)
        loader = stoker.Loader(
            cache,
            batch_size=batch,
            drop_last=True,
            tier="host",
            normalize=normalize,
            dtype=name,
            shuffle=True,
        )
        contenders[f"stoker, {shards} shards"] = lambda loader=loader: drain(limited(loader, 6))
    files, memory = PerSampleFiles(folder / name, {"image": images[:1024]}), InMemory({"image": images})
    plain: dict[str, Any] = {
        "DataLoader over .pt files": DataLoader(Normalized(files, dtype), batch, shuffle=True),
        "DataLoader over dict in RAM": DataLoader(Normalized(memory, dtype), batch, shuffle=True),
        "DataLoader over TensorDataset": DataLoader(
            Normalized(TensorDataset(images), dtype), batch, shuffle=True
        ),
        "DataLoader, batched index": batched_loader(Normalized(Batched([images]), dtype), 4_000, batch),  # type: ignore[arg-type]
    }
    for contender, loader in plain.items():
        contenders[contender] = lambda loader=loader: drain(limited(loader, 2))
    best = steadily(contenders, rounds=4)
    return report(f"W3f {name}", best, batch * images[0].numel() * (1 + dtype.itemsize))


WORKLOADS = {
    "W1": workload_1, "W2w": workload_2_windows, "W2t": workload_2_trajectories, "W3": workload_3,
    "W3f": workload_3_floats, "W3f-bf16": partial(workload_3_floats, name="bfloat16"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", choices=WORKLOADS)
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for name, workload in WORKLOADS.items():
        if arguments.only in {None, name}:
            # W3's limit is one thread; its goal is stated for two, which the Loader takes for large batches by itself
            torch.set_num_threads(1)
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                rows += workload(Path(folder))
    name = "serve_memory" if arguments.only is None else f"serve_memory_{arguments.only}"
    publish(name, [{"rivals": versions()}, *rows], save=arguments.save)


if __name__ == "__main__":
    main()
