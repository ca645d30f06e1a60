"""Question: how long does one epoch of training take with a DataLoader, with the best other loader, with Stoker?

Three workloads (`headline_work.py`), on a GPU where there is one. All contenders train the same model on the same
examples, in shuffled batches of float32. An epoch counts everything: waiting, encoding, steps.

- `dataloader`: DataLoader over the raw files. A frozen encoder runs in the training step. Best of 0, 1, 2 and 4
  persistent workers; page-locked memory where there is a GPU.
- `by_hand`: each example encoded once into a `.pt` file, then a DataLoader with the best of 0 and 2 workers.
- `other`: the installed loader (`rivals.py`) whose later epochs are the fastest, at the best of its settings. It
  stores encoded examples too, as a careful user would do by hand. One without windows stores both states of a pair.
- `tensor`: everything encoded once into one tensor in memory, then `index_select`. Not a loader: the limit.
- `stoker`: `stoker.cached` or `stoker.Loader` as in the README, default settings.

Torch uses one thread, or one for each core if that makes the DataLoader faster, the same number for all. What stores
encodes with a plain loop: DataLoader with the best number of workers, encoder on batches. Stoker uses its own pipeline.
Each run is a new process with an empty folder. Imports are done before its clock starts.

`first_epoch_s` begins with nothing stored and ends after one epoch of training. `later_epoch_s` is the mean of the
epochs after it. `stall` is the fraction of these in which the step waits for its batch, encoding included. Medians of
five interleaved runs, with the lowest and highest. Rows with the role `tried` are single runs that chose settings.

A run fails if its loss does not fall, or if an epoch has another number of examples. It also fails if its loss
after three epochs is off from that of the DataLoader by more than a fifth.

    python benchmarks/headline.py [--save] [--quick] [--only images]

`--save` also draws docs/images/headline.svg and headline-dark.svg; `pictures.py` draws saved results again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headline_work import WORKLOADS, Example, Workload, quick
from measure import publish
from pictures import draw_headline
from rivals import RIVALS, versions

WORKERS = (0, 1, 2, 4)
SOME_WORKERS = (0, 2)
RUNS = 5
EPOCHS = 3
"""Of every run, at least."""
RUN_TIMEOUT_S = 300
LOSS_TOLERANCE = 0.2
LEFT_OUT = ("MONAI CacheDataset",)
"""Of `rivals.py`: the same as a tensor in memory, and eight seconds to import."""
IN_MEMORY = ("SPDL", "torchdata nodes", "Grain")
"""Those that gather from tensors in memory: these are saved to a file too, so that a second start has them."""
FIXED_SETTINGS = ("tensordict memmap", *IN_MEMORY)
"""Those whose documentation has no worker processes for data in memory or in a memory map."""

Feed = Callable[[], Iterator[Example]]
"""One shuffled epoch: encoded examples in batches on the device."""


@dataclass(frozen=True)
class Run:
    """One run: what it trains, from where, with which settings."""

    workload: Workload
    contender: str
    raw: Path
    """The raw files."""
    store: Path
    """An empty folder of its own."""
    workers: int = 0
    fill_workers: int = 0
    """Of the plain loop that encodes."""
    threads: int = 1
    """Of torch."""
    encoded: Path | None = None
    """Examples that are encoded already: for choosing settings."""
    epochs: int = EPOCHS
    later_s: float = 0.5
    """More epochs follow while later ones have taken less."""

    @property
    def device(self) -> torch.device:
        """A GPU where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def encoder(self) -> nn.Module | None:
        """The frozen encoder, always with the same weights."""
        if self.workload.encoder is None:
            return None
        torch.manual_seed(0)
        return self.workload.encoder().eval().requires_grad_(False).to(self.device)

    def loader(self, data: Dataset[Any], *, shuffle: bool, workers: int) -> DataLoader[Any]:
        """A DataLoader as one would write it for speed."""
        return DataLoader(
            data,
            self.workload.batch,
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
        )

    def to_device(self, batch: Iterable[Any]) -> Example:
        return tuple(torch.as_tensor(one).to(self.device, non_blocking=True) for one in batch)


# ------------------------------------------------------------------------------------------------- contenders


def dataloader(run: Run) -> Feed:
    """Raw examples from workers, encoded where they are used."""
    encoder = run.encoder()
    loader = run.loader(run.workload.examples(run.raw), shuffle=True, workers=run.workers)

    def epoch() -> Iterator[Example]:
        for batch in loader:
            with torch.no_grad():
                example = run.workload.encode(encoder, run.to_device(batch))  # type: ignore[arg-type]
            yield example

    return epoch


def encode_all(run: Run) -> Example:
    """All examples, each sample encoded once, in memory."""
    if run.encoded is not None:
        return tuple(torch.load(run.encoded, weights_only=True))
    encoder, parts = run.encoder(), []
    samples = run.loader(run.workload.samples(run.raw), shuffle=False, workers=run.fill_workers)
    with torch.no_grad():
        for batch in samples:
            example = run.workload.encode(encoder, run.to_device(batch))  # type: ignore[arg-type]
            parts.append([one.cpu() for one in example])
    return tuple(torch.cat(ones) for ones in zip(*parts, strict=True))


class PtFiles(Dataset[Any]):
    """One `.pt` file for each example."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return torch.load(self.folder / f"{number}.pt", weights_only=True)


def by_hand(run: Run) -> Feed:
    """Encode into one `.pt` file for each example, then load these."""
    examples = encode_all(run)
    for number, example in enumerate(zip(*examples, strict=True)):
        torch.save([one.clone() for one in example], run.store / f"{number}.pt")
    loader = run.loader(PtFiles(run.store, len(examples[0])), shuffle=True, workers=run.workers)
    return lambda: map(run.to_device, loader)


def tensor(run: Run) -> Feed:
    """Encode into one tensor for each field, saved to a file and kept on the device."""
    examples = encode_all(run)
    torch.save(list(examples), run.store / "encoded.pt")
    examples = tuple(one.to(run.device) for one in examples)

    def epoch() -> Iterator[Example]:
        order = torch.randperm(len(examples[0]), device=run.device)
        for chosen in order.split(run.workload.batch):
            yield tuple(one.index_select(0, chosen) for one in examples)

    return epoch


def other(run: Run) -> Feed:
    """Encode, store as a rival does, and read with that."""
    make = RIVALS[run.contender][2]
    examples = encode_all(run)
    if run.contender in IN_MEMORY:
        torch.save(list(examples), run.store / "encoded.pt")
    fields = {
        f"f{place}": one.reshape(len(one), -1) if one.ndim == 1 else one for place, one in enumerate(examples)
    }
    epoch = make(fields, run.store / "rival", run.workload.batch, run.workers)

    def feed() -> Iterator[Example]:
        for batch in epoch():
            found = batch if isinstance(batch, list | tuple) else [batch[name] for name in fields]
            yield run.to_device(found)

    return feed


def with_stoker(run: Run) -> Feed:
    """Stoker, as its README has it."""
    import stoker

    encoder = run.encoder()
    settings = {"batch_size": run.workload.batch, "shuffle": True, "device": run.device}
    if run.workload.name == "pde":
        source = stoker.HDF5Source(next(run.raw.glob("*.hdf5")), preset="pdebench")
        steps = stoker.ModuleEncoder(encoder, time="steps")  # type: ignore[arg-type]
        cache = stoker.precompute(source, steps, run.store, name="pde", device=str(run.device))
        windows = stoker.Loader(cache, windows=stoker.Windows(stride=1, horizon=1), **settings)
        return lambda: ((batch.z0, batch.z1) for batch in windows)
    loader = stoker.cached(run.workload.samples(run.raw), encoder, cache_dir=run.store, **settings)  # type: ignore[arg-type]
    return lambda: map(tuple, loader)


CONTENDERS: dict[str, Callable[[Run], Feed]] = {
    "DataLoader": dataloader,
    "DataLoader, .pt by hand": by_hand,
    "one tensor by hand": tensor,
    "Stoker": with_stoker,
}
"""Any other name is one of `RIVALS`."""


# -------------------------------------------------------------------------------------------------- measuring


def warm_up(run: Run) -> None:
    """Import what a contender needs; touch the device."""
    if run.contender in RIVALS:
        importlib.import_module(RIVALS[run.contender][0])
    elif run.contender == "Stoker":
        import stoker

        _ = stoker.cached, stoker.HDF5Source, stoker.Loader
    import h5py
    from PIL import Image

    _ = h5py.File, Image.open
    torch.zeros(1, device=run.device)


def measured(run: Run) -> dict[str, Any]:
    """Fill and train, in this process."""
    torch.set_num_threads(run.threads)
    warm_up(run)
    torch.manual_seed(0)
    model = run.workload.model().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds: list[float] = []
    stalls: list[float] = []
    losses: list[float] = []
    counts: list[int] = []
    begin = time.perf_counter()
    feed = CONTENDERS.get(run.contender, other)(run)
    while len(seconds) < run.epochs or (sum(seconds[1:]) < run.later_s and len(seconds) < 30):
        waited, total, count, batches = 0.0, 0.0, 0, iter(feed())
        while True:
            asked = time.perf_counter()
            example = next(batches, None)
            if example is not None and run.device.type == "cuda":
                torch.cuda.synchronize()
            waited += time.perf_counter() - asked
            if example is None:
                break
            loss = run.workload.loss(model, example)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(example[0])  # waits for the device
            count += len(example[0])
        now = time.perf_counter()
        seconds.append(now - begin)
        stalls.append(waited / (now - begin))
        losses.append(total / count)
        counts.append(count)
        begin = now
    return {
        "first_epoch_s": seconds[0],
        "later_epoch_s": statistics.mean(seconds[1:]),
        "stall": statistics.mean(stalls[1:]),
        "losses": losses[: run.epochs],
        "counts": sorted({*counts}),
    }


def save_encoded(run: Run, path: Path) -> dict[str, Any]:
    """Encode once, for the runs that choose settings."""
    examples = encode_all(run)
    torch.save(list(examples), path)
    return {"examples": len(examples[0])}


def in_child(work: Callable[[], Any], log: Path) -> Any:
    """The result of `work` in a process forked from this one, which has imported torch and computed nothing.

    Raises:
        RuntimeError: It failed, with the end of its output; or took longer than the timeout.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        os.setsid()  # its own children end with it
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            theirs.send(work())
            theirs.close()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        if ours.poll(RUN_TIMEOUT_S):
            with contextlib.suppress(EOFError):
                return ours.recv()
        else:
            log.write_text(f"no result after {RUN_TIMEOUT_S} s")
        raise RuntimeError(log.read_text()[-1500:])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, 9)
        process.join()
        ours.close()


class Bench:
    """The runs of one workload, in one folder."""

    def __init__(self, workload: Workload, folder: Path, *, is_quick: bool = False) -> None:
        self.workload = quick(workload) if is_quick else workload
        self.folder, self.is_quick = folder, is_quick
        self.raw, self.encoded = folder / "raw", folder / "encoded.pt"
        self.raw.mkdir()
        self.fill_workers, self.threads = 0, 1
        self.losses: list[float] = []
        """Of the DataLoader, the first contender that runs."""
        in_child(lambda: self.workload.make(self.raw, self.workload.count), folder / "log")
        self.examples = in_child(
            partial(save_encoded, self.run_of("one tensor by hand"), self.encoded), folder / "log"
        )["examples"]
        if self.examples % workload.batch:
            raise SystemExit(f"{workload.name}: {self.examples} examples are not whole batches")

    def run_of(self, contender: str, workers: int = 0) -> Run:
        return Run(
            self.workload, contender, self.raw, self.raw, workers=workers, fill_workers=self.fill_workers
        )

    def measure(self, run: Run) -> dict[str, Any]:
        """One run in an empty folder; its losses and counts are checked."""
        if self.is_quick:
            run = replace(run, later_s=0.0)
        else:
            os.sync()  # what the run before wrote must not slow this one down
        with tempfile.TemporaryDirectory(dir=self.folder) as store:
            found = in_child(partial(measured, replace(run, store=Path(store))), self.folder / "log")
        losses, counts = found["losses"], found.pop("counts")
        if counts != [self.examples]:
            raise RuntimeError(f"an epoch had {counts} examples, expected {self.examples}")
        if losses[-1] >= losses[0]:
            raise RuntimeError(f"the loss does not fall: {losses}")
        if run.contender == "DataLoader" and len(losses) >= EPOCHS:
            self.losses = self.losses or losses
        elif self.losses and len(losses) >= EPOCHS:
            apart = abs(losses[EPOCHS - 1] / self.losses[EPOCHS - 1] - 1)
            if apart > LOSS_TOLERANCE:
                raise RuntimeError(f"loss {losses[EPOCHS - 1]:.4g}, {apart:.0%} off that of the DataLoader")
        return found

    def attempt(self, name: str, workers: int, threads: int) -> dict[str, Any]:
        """One run of two epochs, to choose settings by."""
        encoded = None if name == "DataLoader" else self.encoded
        run = replace(self.run_of(name, workers), threads=threads, encoded=encoded, epochs=2, later_s=0.3)
        found = self.measure(run)
        settings = f"{workers} workers, torch threads: {threads}"
        note(f"{self.workload.name}: {name}, {settings}: {found['later_epoch_s']:.3f} s an epoch")
        return {
            "workload": self.workload.name,
            "role": "tried",
            "contender": name,
            "workers": workers,
            "threads": threads,
            "later_epoch_s": round(found["later_epoch_s"], 4),
            "stall": round(found["stall"], 4),
        }

    def others(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """All other loaders that are installed and work, and why the rest is missing."""
        rows: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        for name in RIVALS:
            if name in LEFT_OUT:
                continue
            if importlib.util.find_spec(RIVALS[name][0]) is None:
                missing[name] = "not installed"
                continue
            for workers in (0,) if self.is_quick or name in FIXED_SETTINGS else SOME_WORKERS:
                try:
                    rows.append(self.attempt(name, workers, self.threads))
                except RuntimeError as error:
                    missing[f"{name}, {workers} workers"] = str(error).strip().splitlines()[-1]
        for name, reason in missing.items():
            note(f"{self.workload.name}: left out: {name}: {reason}")
        return rows, missing

    def choose(self) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Return contender and settings of each role, and a row for each attempt."""
        choices = SOME_WORKERS if self.is_quick else WORKERS
        tried = [self.attempt("DataLoader", workers, 1) for workers in choices]
        cores = len(os.sched_getaffinity(0))
        if cores > 1 and not self.is_quick:
            choices = sorted({0, fastest(tried)["workers"]})
            tried += [self.attempt("DataLoader", workers, cores) for workers in choices]
        entries = {"dataloader": fastest(tried)}
        self.fill_workers, self.threads = entries["dataloader"]["workers"], entries["dataloader"]["threads"]
        if self.workload.encoder is not None:  # without one, its files are the raw data
            found = [
                self.attempt("DataLoader, .pt by hand", workers, self.threads) for workers in SOME_WORKERS
            ]
            entries["by_hand"] = fastest(found)
            tried += found
        found, missing = self.others()
        if found:
            entries["other"] = fastest(found)
        tried += found
        if missing:
            tried.append({"workload": self.workload.name, "role": "left out", **missing})
        entries["tensor"] = {"contender": "one tensor by hand", "workers": 0}
        entries["stoker"] = {"contender": "Stoker", "workers": 0}
        return entries, tried

    def rows(self) -> list[dict[str, Any]]:
        """Choose settings, then measure all in turns."""
        entries, tried = self.choose()
        taken: dict[str, list[dict[str, Any]]] = {role: [] for role in entries}
        for turn in range(1 if self.is_quick else RUNS):
            for role, entry in entries.items():
                found = self.measure(self.run_of(entry["contender"], entry["workers"]))
                taken[role].append(found)
                first, later = (
                    f"first {found['first_epoch_s']:.2f} s",
                    f"later {found['later_epoch_s']:.3f} s",
                )
                note(f"{self.workload.name}, run {turn + 1}: {entry['contender']}: {first}, {later}")
        return [self.row(role, entries[role], found) for role, found in taken.items()] + tried

    def row(self, role: str, entry: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Medians and ranges of a contender's runs."""
        row: dict[str, Any] = {
            "workload": self.workload.name,
            "role": role,
            "contender": entry["contender"],
            "workers": None if role in ("tensor", "stoker") else entry["workers"],
            "threads": self.threads,
            "examples": self.examples,
            "batch": self.workload.batch,
            "runs": len(runs),
        }
        for key in ("first_epoch_s", "later_epoch_s", "stall"):
            values = [run[key] for run in runs]
            row[key] = round(statistics.median(values), 4)
            row[f"{key.removesuffix('_s')}_range"] = [round(min(values), 4), round(max(values), 4)]
        row["losses"] = [
            round(statistics.median(values), 5) for values in zip(*(r["losses"] for r in runs), strict=False)
        ]
        return row


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: row["later_epoch_s"])


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="little data, one run")
    parser.add_argument("--only", nargs="*", choices=[one.name for one in WORKLOADS])
    arguments = parser.parse_args()
    if arguments.save and (arguments.quick or arguments.only):
        parser.error("--save takes a complete run: neither --quick nor --only")

    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        if not arguments.only or workload.name in arguments.only:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                rows += Bench(workload, Path(folder), is_quick=arguments.quick).rows()
    publish("headline", [{"rivals": versions()}, *rows], save=arguments.save)
    if arguments.save:
        draw_headline()


if __name__ == "__main__":
    main()
