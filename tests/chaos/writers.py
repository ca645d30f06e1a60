"""Eight processes fill one cache at once while some of them are killed at random.

`python -m tests.chaos.writers --rounds 200` prints its figures as JSON. The processes run the real
precompute, each reading by itself, forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.runtime.locks import lock_holder
from stoker.store import load_recipe, open_cache
from stoker.store.format import is_shard_name
from stoker.store.index import damaged_rows, read_info
from stoker.store.storage import open_storage
from tests.chaos import children, program
from tests.chaos.checks import left_behind
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

WRITERS = 8
SAMPLES = 400
ROW_BYTES = 6 * 3 * 4 + 4
SHARD_ROWS = 8
DEADLINE_S = 60.0
Counts = np.ndarray[Any, np.dtype[np.int64]]


class CountedEncoder(FakeEncoder):
    """Counts each sample that it encodes, in memory shared by all processes; a group takes `pause_s`."""

    def __init__(self, counts: Counts, pause_s: float) -> None:
        super().__init__(by_shape=True)
        self.counts, self.pause_s = counts, pause_s
        self.last: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "counts": self.counts.filename}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "counts": np.memmap(state["counts"], np.int64, "r+")}

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(self.pause_s)
        numbers = np.rint(batch["nu"].numpy().astype(np.float64) * 7).astype(np.int64)
        again, self.last = numbers.tolist() == self.last, numbers.tolist()
        for number in set[int]() if again else {*self.last}:  # the first call is made twice, and compared
            self.counts[number] += 1
        return super().encode(batch)


def shared_counts(samples: int) -> Counts:
    """Zeros that forked processes share, and others find by the name of our descriptor."""
    fd = os.memfd_create("counts")
    os.ftruncate(fd, 8 * samples)
    return np.memmap(f"/proc/{os.getpid()}/fd/{fd}", np.int64, "r+")


def fill(root: Path, counts: Counts, pause_s: float, workers: int, say: children.Say) -> None:
    """What a process does: precompute until the cache is whole."""
    logging.getLogger("stoker").setLevel(logging.ERROR)
    program.limit_shards(SHARD_ROWS * ROW_BYTES)
    settings = PrecomputeSettings(workers=workers, progress=None)
    source = FakeSource((len(counts),), run=SHARD_ROWS)
    report = run_precompute(source, CountedEncoder(counts, pause_s), root, name="c", settings=settings)
    say([report.records, report.encoded])


def same_records(a: Any, b: Any) -> bool:
    """Whether two caches hold the same numbers and bits."""
    return a.indices.tolist() == b.indices.tolist() and all(
        torch.equal(value, b[number][name])
        for number in a.indices.tolist()
        for name, value in a[number].items()
    )


def damage(root: Path, reference: Any, samples: int) -> list[str]:
    """What is wrong with a finished cache."""
    cache = open_cache(root / "c")
    wrong = [] if same_records(cache, reference) else ["corrupt: records differ from an undisturbed run"]
    if len(cache) != samples or not cache.verify().ok:
        wrong.append(f"corrupt: {len(cache)} of {samples} records, verified: {cache.verify().ok}")
    storage, recipe = open_storage(cache.path), load_recipe(cache.path)
    for name in filter(is_shard_name, storage.list()):
        if damaged_rows(storage, read_info(storage, name, recipe), recipe):
            wrong.append(f"corrupt: {name}")
    return wrong + left_behind(root)


def round_of(root: Path, reference: Any, chance: random.Random, kills: int) -> dict[str, Any]:
    """Start the writers, kill some at random moments, start others in their place, wait for all."""
    counts = shared_counts(SAMPLES)
    work: Callable[[children.Say], object] = functools.partial(fill, root, counts, 0.002, 0)
    running = [children.start(work) for _ in range(WRITERS)]
    begun = time.monotonic()
    killed = 0
    for moment in sorted(chance.uniform(0.0, 0.5) for _ in range(kills)):
        time.sleep(max(0.0, begun + moment - time.monotonic()))
        i = whom(root, [pid for pid, _ in running], chance)
        pid, pipe = running[i]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        ended = children.ended_of(pid, children.listen(pid, pipe, DEADLINE_S)[0])
        ended.reap()
        killed += ended.signal == signal.SIGKILL
        running[i] = children.start(work)
    wrong: list[str] = []
    for pid, pipe in running:
        data, hung = children.listen(pid, pipe, max(0.1, begun + DEADLINE_S - time.monotonic()))
        ended = children.ended_of(pid, data)
        ended.reap()
        if hung:
            wrong.append(f"deadlock: process {pid} was not done after {DEADLINE_S:g} s")
        elif ended.code != 0 or not ended.said or ended.said[-1][0] != SAMPLES:
            wrong.append(f"failed: {ended.error or ended}")
    wrong += in_child(lambda: damage(root, reference, SAMPLES))
    return {
        "wrong": wrong,
        "killed": killed,
        "encodes": int(counts.sum()),
        "seconds": time.monotonic() - begun,
    }


def whom(root: Path, running: list[int], chance: random.Random) -> int:
    """Which process to kill: every other time the one that holds the claim to encode, if it can be told."""
    names = [f"process {pid} on {os.uname().nodename}" for pid in running]
    folders = [*root.glob("c/*")]
    name = lock_holder(folders[0], "encode") if folders and chance.random() < 0.5 else ""
    return names.index(name) if name in names else chance.randrange(len(running))


def in_child(look: Callable[[], list[str]]) -> list[str]:
    """The result of a look by a fresh process; that it failed, if it did."""
    ended = children.run(lambda say: say(look()), deadline_s=DEADLINE_S)
    return (
        ended.said[0] if ended.code == 0 and ended.said else [f"cannot be looked at: {ended.error or ended}"]
    )


def run(argv: Sequence[str]) -> program.Figures:
    """Run as many rounds as the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=4, help="processes killed in each round")
    parser.add_argument("--seed", type=int, default=0)
    arguments, begun = parser.parse_args(argv), time.monotonic()
    chance, rounds = random.Random(arguments.seed), list[dict[str, Any]]()
    with program.workplace() as base:
        work = functools.partial(fill, base / "reference", shared_counts(SAMPLES), 0.0, 0)
        children.run(work, deadline_s=DEADLINE_S)
        reference = open_cache(base / "reference" / "c")
        for i in range(arguments.rounds):
            rounds.append(round_of(base / str(i), reference, chance, arguments.kills))
            shutil.rmtree(base / str(i), ignore_errors=True)
    encodes = [figures["encodes"] / SAMPLES for figures in rounds]
    found = {
        "rounds": len(rounds),
        "writers": WRITERS,
        "killed": sum(figures["killed"] for figures in rounds),
        "encodes_per_record": round(sum(encodes) / len(encodes), 4),
        "encodes_per_record_worst": round(max(encodes), 4),
        "longest_round_s": round(max(figures["seconds"] for figures in rounds), 2),
    }
    return program.figures(found, [text for figures in rounds for text in figures["wrong"]], begun)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(program.main(run))
