"""Question: what of the drive does the disk tier reach, cold and warm, and what do others?

Three sets on the drive under `--folder`, each larger than what a turn reads: records of 1 KiB (in shuffled and in
block order), records of 103 KiB, whole trajectories of 2 MiB. Every contender serves shuffled batches. `limit` is
16 threads that read the same records with O_DIRECT into page-aligned buffers made
beforehand, nothing else; `buffered` the same through the page cache. Before every cold turn all pages of the set's
files are dropped (POSIX_FADV_DONTNEED), and the row says how much of what was served came from the drive; before the
warm ones everything is read once. Each round has another order of contenders, and the round after it the same one
backwards: a drive that others use too is quicker at some times, and who always comes after whom would profit from it.
`over_off` of "off again", the same contender once more, says how far such ratios can be trusted.

With `--checks` only what checking costs, in more rounds: Stoker's contenders in full order, cold; saved apart.
With `--ahead` only what it brings to announce batches of the order to the system that are further ahead than the
loader reads: cold, printed and not saved.

    python benchmarks/serve_disk.py [--checks] [--save] [--only 103] [--folder /data]
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

import stoker
from measure import publish
from serve_memory import PerSampleFiles, Records, cache_of
from stoker.loader import serving
from stoker.loader.chunks import Chunk, ColumnStrip, to_host
from stoker.loader.disk import MAX_PREFETCH, DiskBatches

PAGE = 4096
THREADS = 16
"""Of `limit` and `buffered`; more do not make the drive quicker."""
ROUNDS = {True: 16, False: 6}
"""Cold and warm, even; a drive that others use as well gives another rate each time."""
CHECK_ROUNDS = 40
POLICIES: dict[str, Literal["always", "off"]] = {"always": "always", "off": "off", "off again": "off"}
TURN_BYTES = 512 * 1024**2
"""What a turn serves at most. The loader reads up to four batches ahead of where a turn ends, so turns are long."""
FILES = 256
"""Records that are also stored as a `.pt` file each: so many that a turn reads none twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Records of one size."""

    name: str
    count: int
    shape: tuple[int, ...]
    batch: int
    orders: tuple[str, ...] = ("full",)
    turn_bytes: int = TURN_BYTES

    @property
    def record_bytes(self) -> int:
        return int(np.prod(self.shape)) * 2

    @property
    def batches(self) -> int:
        """Batches in a turn."""
        return max(2, min(self.count // self.batch, self.turn_bytes // (self.batch * self.record_bytes)))


WORKLOADS = (
    Workload(
        name="1 KiB",
        count=400_000,
        shape=(16, 32),
        batch=256,
        orders=("full", "block"),
        turn_bytes=24 * 1024**2,
    ),
    Workload(name="103 KiB", count=3_072, shape=(101, 16, 32), batch=64),
    Workload(name="2 MiB trajectory", count=256, shape=(64, 16, 1024), batch=8),
)


def values(workload: Workload) -> torch.Tensor:
    """Different bytes in every record, made quickly."""
    rows = torch.empty((workload.count, *workload.shape), dtype=torch.float16)
    noise = torch.randn(workload.shape, generator=torch.Generator().manual_seed(0)).half()
    torch.add(
        noise, torch.arange(workload.count).half().reshape(-1, *[1] * len(workload.shape)) / 64, out=rows
    )
    return rows


class Place:
    """Where each record lies on the drive, for those that read it without Stoker."""

    def __init__(self, cache: stoker.Cache, size: int) -> None:
        self.files: list[Path] = []
        self.spots: list[tuple[int, int]] = []
        for number, entry in enumerate(cache.index.shards):
            shard = cache.shard(number)
            self.files.append(cache.path / entry.file)
            begin = shard.columns["latent"].offset
            self.spots += [(number, begin + row * size) for row in range(entry.rows)]
        self.size = size

    def drop(self) -> None:
        """Have the kernel forget the pages of every file."""
        for path in self.files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def reads(place: Place, workload: Workload, *, direct: bool, seed: list[int]) -> Callable[[], int]:
    """`THREADS` threads that read records in shuffled order into buffers of their own."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    fds = [os.open(path, flags) for path in place.files]
    if not direct:
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    room = -(-(place.size + PAGE) // PAGE) * PAGE
    buffers = [mmap.mmap(-1, room) for _ in range(THREADS)]
    pool = ThreadPoolExecutor(THREADS)

    def some(job: tuple[int, list[int]]) -> None:
        thread, numbers = job
        view = memoryview(buffers[thread])
        for number in numbers:
            file, offset = place.spots[number]
            if direct:
                begin = offset // PAGE * PAGE
                stop = -(-(offset + place.size) // PAGE) * PAGE
                os.preadv(fds[file], [view[: stop - begin]], begin)
            else:
                os.preadv(fds[file], [view[: place.size]], offset)

    def work() -> int:
        seed[0] += 1
        order = np.random.default_rng(seed[0]).permutation(workload.count)
        own = order[: workload.batches * workload.batch]
        jobs = [(thread, own[thread::THREADS].tolist()) for thread in range(THREADS)]
        list(pool.map(some, jobs))
        return len(own)

    return work


def served(loader: Any, workload: Workload) -> Callable[[], int]:
    """A turn of a loader: a pass that is given up after some batches, each epoch another."""
    epoch = [0]

    def work() -> int:
        epoch[0] += 1
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch[0])
        return sum(len(_first(batch)) for batch in islice(loader, workload.batches))

    return work


def _first(batch: Any) -> Any:
    return batch["latent"] if isinstance(batch, dict) else batch


def memmap_rows(path: Path, workload: Workload, seed: list[int]) -> Callable[[], int]:
    """A flat file, `numpy.memmap`, a fancy index per batch: what one writes by hand."""

    def work() -> int:
        seed[0] += 1
        rows = np.memmap(path, dtype=np.float16, mode="r", shape=(workload.count, *workload.shape))
        order = np.random.default_rng(seed[0]).permutation(workload.count)
        for number in range(workload.batches):
            torch.from_numpy(rows[order[number * workload.batch : (number + 1) * workload.batch]])
        return workload.batches * workload.batch

    return work


class Contender:
    """Something that serves, and the files that it reads."""

    def __init__(self, work: Callable[[], int], files: list[Path]) -> None:
        self.work, self.files = work, files

    def turn(self, *, cold: bool) -> tuple[float, float]:
        """Seconds per record, and bytes that came from the drive per record."""
        if cold:
            for path in self.files:
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        before, begin = drive_bytes(), time.perf_counter()
        count = self.work()
        return (time.perf_counter() - begin) / count, (drive_bytes() - before) / count


def drive_bytes() -> int:
    """Bytes that this process has had read from drives so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def contenders(workload: Workload, folder: Path) -> Iterator[tuple[str, Contender]]:
    rows = values(workload)
    cache = cache_of(Records({"latent": rows}), folder, 4)
    flat = folder / "flat.bin"
    rows.numpy().tofile(flat)
    with flat.open("rb+") as file:
        os.fsync(file.fileno())
    place, seed = Place(cache, workload.record_bytes), [0]
    yield "limit", Contender(reads(place, workload, direct=True, seed=seed), place.files)
    yield "buffered", Contender(reads(place, workload, direct=False, seed=seed), place.files)
    for order in workload.orders:
        for policy, verify in POLICIES.items():
            loader = stoker.Loader(
                cache,
                batch_size=workload.batch,
                tier="disk",
                shuffle=True if order == "full" else order,
                verify=verify,
                drop_last=True,
            )
            name = f"stoker, {order} order, verify={policy}"
            yield name, Contender(served(loader, workload), place.files)
    yield "numpy memmap", Contender(memmap_rows(flat, workload, seed), [flat])
    few = rows[:FILES]
    files = PerSampleFiles(folder / "pt", {"latent": few})
    os.sync()
    loader = DataLoader(files, min(workload.batch, len(few)), shuffle=True, drop_last=True)
    small = Workload(
        name="",
        count=len(few),
        shape=workload.shape,
        batch=workload.batch,
        turn_bytes=min(workload.turn_bytes, 32 * 1024**2),
    )
    paths = sorted((folder / "pt").iterdir())
    yield "torch.load of .pt files", Contender(served(loader, small), paths)


def rounds(names: list[str], count: int) -> Iterator[list[str]]:
    """The order of contenders in each of so many rounds: shuffled, then the same backwards."""
    shuffled = random.Random(0)
    for _ in range(count // 2):
        order = shuffled.sample(names, len(names))
        yield order
        yield order[::-1]


def measured(workload: Workload, folder: Path) -> Iterator[dict[str, Any]]:
    """Medians over rounds in which all contenders take turns; `of_limit` of the limit of the same round."""
    folder.mkdir()
    all_of_them = dict(contenders(workload, folder))
    for contender in all_of_them.values():
        contender.turn(cold=True)
    for cold in (True, False):
        if not cold:
            for path in {path for contender in all_of_them.values() for path in contender.files}:
                path.read_bytes()
        taken: dict[str, list[tuple[float, float]]] = {}
        names = [name for name in all_of_them if cold or name != "limit"]  # O_DIRECT knows no warm
        for order in rounds(names, ROUNDS[cold]):
            for name in order:
                taken.setdefault(name, []).append(all_of_them[name].turn(cold=cold))
        limits = [seconds for seconds, _ in taken["limit" if cold else "buffered"]]
        for name in all_of_them:
            if name not in taken:
                continue
            seconds, from_drive = map(statistics.median, zip(*taken[name], strict=True))
            reached = [limit / took for limit, (took, _) in zip(limits, taken[name], strict=True)]
            row = {
                "records": workload.name,
                "cache": "cold" if cold else "warm",
                "contender": name,
                "us_per_record": round(seconds * 1e6, 1),
                "MB_per_s": round(workload.record_bytes / seconds / 1e6, 1),
                "of_limit": round(statistics.median(reached), 3),
                "lowest": round(min(reached), 3),
                "highest": round(max(reached), 3),
                "from_drive": round(from_drive / workload.record_bytes, 2),
            }
            if "verify" in name:
                off = statistics.median(took for took, _ in taken[name.split("=")[0] + "=off"])
                row["over_off"] = round(seconds / off, 3)
            yield row


def checks(workload: Workload, folder: Path) -> Iterator[dict[str, Any]]:
    """What checking costs: means and medians over many cold rounds of the policies alone."""
    folder.mkdir()
    names = [f"stoker, full order, verify={policy}" for policy in POLICIES]
    policies = {name: own for name, own in contenders(workload, folder) if name in names}
    for contender in policies.values():
        contender.turn(cold=True)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for order in rounds(names, CHECK_ROUNDS):
        for name in order:
            taken[name].append(policies[name].turn(cold=True)[0])
    off_s = [seconds for name in names[1:] for seconds in taken[name]]
    for name in names:
        row: dict[str, Any] = {"records": workload.name, "contender": name, "rounds": CHECK_ROUNDS}
        for how, of in {"median": statistics.median, "mean": statistics.fmean}.items():
            row[f"{how}_us"] = round(1e6 * of(taken[name]), 1)
            row[f"{how}_over_both_off"] = round(of(taken[name]) / of(off_s), 3)
        yield row


class Announced(DiskBatches):
    """Announces so many batches more than are read ahead."""

    further = 0

    def strips(self, chunk: Chunk) -> Iterator[ColumnStrip]:
        """As the loader's, and tells the system of later ones in a thread."""
        told, size = 0, chunk.span.batch
        for number, strip in enumerate(super().strips(chunk)):
            begin = max(told, number + 1 + MAX_PREFETCH)
            told = max(told, min(chunk.span.batches, number + 1 + MAX_PREFETCH + self.further))
            if begin < told:
                ANNOUNCER.submit(self._announce, to_host(chunk.records[begin * size : told * size]))
            yield strip

    def _announce(self, records: np.ndarray) -> None:
        shards, rows = self._table.shard[records], self._table.row[records]
        for i in np.lexsort((rows, shards)).tolist():
            shard = self._cache.shard(int(shards[i]))
            place, _ = shard.fields["latent"].extent(int(rows[i]), 0, 0, "always")
            os.posix_fadvise(shard.fileno(), place, self._example_bytes, os.POSIX_FADV_WILLNEED)


ANNOUNCER = ThreadPoolExecutor(1)


def ahead(workload: Workload, folder: Path) -> Iterator[dict[str, Any]]:
    """The rate with batches announced over that without, of the same round."""
    folder.mkdir()
    cache = cache_of(Records({"latent": values(workload)}), folder, 4)
    files = Place(cache, workload.record_bytes).files
    for order in workload.orders:
        taken: dict[str, list[float]] = {}
        contenders: dict[str, Contender] = {}
        for further in (0, 8, 32):
            serving.DiskBatches = type("", (Announced,), {"further": further})  # type: ignore[misc]
            loader = stoker.Loader(
                cache,
                batch_size=workload.batch,
                tier="disk",
                shuffle=True if order == "full" else order,
                drop_last=True,
            )
            contenders[str(further)] = Contender(served(loader, workload), files)
            contenders[str(further)].turn(cold=True)
        for names in rounds(list(contenders), ROUNDS[True]):
            for name in names:
                taken.setdefault(name, []).append(contenders[name].turn(cold=True)[0])
        for name, seconds in taken.items():
            ratios = [base / own for base, own in zip(taken["0"], seconds, strict=True)]
            yield {
                "records": workload.name,
                "order": order,
                "announced": int(name),
                "MB_per_s": round(workload.record_bytes / statistics.median(seconds) / 1e6, 1),
                "of_none": round(statistics.median(ratios), 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument(
        "--folder", type=Path, help="a folder of the drive to be measured; default: temporary"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        if arguments.only in workload.name:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
                how = ahead if arguments.ahead else checks if arguments.checks else measured
                rows += how(workload, Path(scratch) / "set")
    save = arguments.save and not arguments.ahead
    publish("serve_disk_checks" if arguments.checks else "serve_disk", rows, save=save)


if __name__ == "__main__":
    main()
