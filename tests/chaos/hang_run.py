"""One precompute over samples that hang; prints what became of it as one JSON object.

`python -m tests.chaos.hang_run --samples 1000 --each 6 --special 4 --deadline 1`

Mounts its own file system. It ends with this process, and frees the workers that could not be killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import StokerError
from stoker.precompute import PrecomputeSettings, Timeouts, run_precompute, workers
from stoker.precompute import workers as supervisor_module
from stoker.precompute.checks import describe_failures
from stoker.store import open_cache
from tests.chaos.hang_source import KINDS, SLOW, UNKILLABLE, HangSource, parts, values

ROOT = Path(__file__).parents[2]


class Recorded(workers.Worker):
    """A reader that notes when it was killed and when it was ready to work."""

    kills: ClassVar[list[tuple[int, int, float]]] = []
    """Process, sample in hand, time."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ready_at = None

    def ready(self):
        super().ready()
        self.ready_at = self.ready_at or time.monotonic()

    def dismiss(self, loss=None):
        if loss is not None:
            self.kills.append((self.process.pid, loss.number, time.monotonic()))
        return super().dismiss(loss)


class Watched(supervisor_module.Supervisor):
    """A supervisor that notes who took the place of whom."""

    replaced: ClassVar[list[tuple[float, Recorded]]] = []
    """When a reader was lost, and its replacement."""

    def _lose(self, worker, loss):
        lost_at, before = time.monotonic(), set(self._roster.working)
        super()._lose(worker, loss)
        new = set(self._roster.working) - before
        self.replaced += [(lost_at, self._roster.working[number]) for number in new]


class Plain:
    """An encoder that leaves samples as they are, eight at a time."""

    independent_steps = False

    def schema(self, sample_schema):
        return sample_schema

    def encode_batch_size(self, sample_schema):
        return EncodeBatchSize(samples=8, steps=None)

    def encode(self, batch):
        return batch

    def to(self, device):
        pass

    def weights(self):
        return {}

    def identity(self):
        return {"class": "Plain", "config": {}, "version": 1}


class Lines(logging.Handler):
    """What is logged."""

    said: ClassVar[list[str]] = []

    def emit(self, record):
        self.said.append(record.getMessage())


def plan(count, each, special):
    """What hangs where: `each` samples of every killable kind, spread over all parts but the special ones."""
    normal = [n for name, numbers in parts(count, special) if name.startswith("data") for n in numbers]
    # The first of each part is whole, so that no part looks dead from the beginning.
    normal = [n for n in normal if n - 1 in normal and n + 1 in normal]
    chosen = random.Random(0).sample(normal, each * len(KINDS))
    return {number: KINDS[i % len(KINDS)] for i, number in enumerate(chosen)}


def mount(folder):
    """The file system of `hang_fuse.py`; it is there until this process has ended."""
    folder.mkdir()
    reading, _ = os.pipe()  # the kernel closes the other end, when nothing of ours is left
    command = [sys.executable, "-m", "tests.chaos.hang_fuse", str(folder)]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=reading, stdout=subprocess.PIPE, start_new_session=True
    )
    if server.stdout.readline() != b"mounted\n":
        sys.exit("FUSE cannot be mounted")


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--folder", type=Path, help="an empty one; else a new temporary one")
    words.add_argument("--samples", type=int, default=1000)
    words.add_argument("--each", type=int, default=6, help="samples of each killable kind")
    words.add_argument("--special", type=int, default=4, help="samples of each FUSE part; 0: no FUSE")
    words.add_argument("--workers", type=int, default=4)
    words.add_argument("--deadline", type=float, default=1.0)
    asked = words.parse_args()
    workers.Worker = Recorded
    sys.modules["stoker.precompute.run"].Supervisor = Watched
    logging.getLogger("stoker").addHandler(Lines())
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="stoker-hangs-"))
    os.mkfifo(folder / "fifo")
    (folder / "notes").mkdir()
    (folder / "never_imported.py").write_text("import time\ntime.sleep(3600)\n")
    if asked.special:
        mount(folder / "mount")
    print_result(folder, asked)


def print_result(folder, asked):
    special = dict.fromkeys((*UNKILLABLE, SLOW), asked.special)
    bad = plan(asked.samples, asked.each, special)
    source = HangSource(asked.samples, bad=bad, special=special, folder=folder)
    settings = PrecomputeSettings(
        workers=asked.workers,
        timeouts=Timeouts(start=30, open=asked.deadline, read=asked.deadline),
        max_quarantined=1,
        progress=None,
    )
    began = time.monotonic()
    try:
        report = run_precompute(source, Plain(), folder / "cache", name="c", settings=settings)
    except StokerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    taken_s = time.monotonic() - began
    sys.stdout.write(json.dumps(figures(source, report, folder) | {"taken_s": taken_s}) + "\n")
    sys.stdout.write(f"{time.monotonic()!r}\n")  # from here on it only has to end
    sys.stdout.flush()


def figures(source, report, folder):
    """What the test asserts on, and the documents show."""
    cache = open_cache(report.path)
    expected = dict(source.bad)
    for name, numbers in source.parts:
        if name in UNKILLABLE:
            expected |= dict.fromkeys(numbers, name)
    stored = cache.indices.tolist()
    hung_at = {
        tuple(map(int, path.name.split("-"))): float(path.read_text())
        for path in (folder / "notes").iterdir()
    }
    killed = [at - hung_at[number, pid] for pid, number, at in Recorded.kills if (number, pid) in hung_at]
    replaced = [max(0.0, worker.ready_at - at) for at, worker in Watched.replaced if worker.ready_at]
    failures = cache.quarantined
    return {
        "folder": str(folder),
        "samples": len(source),
        "stored": len(stored),
        "lost": len(source) - len(set(stored) | set(failures)),
        "wrong": sum(not (cache[n]["x"].numpy() == values(n)).all() for n in stored),
        "quarantined": sorted(failures),
        "expected": {str(number): kind for number, kind in sorted(expected.items())},
        "names": {str(n): name for name, numbers in source.parts for n in numbers if n in expected},
        "failures": {str(n): dataclasses.asdict(failure) for n, failure in failures.items()},
        "listed": {str(n): describe_failures({n: failure})[0] for n, failure in failures.items()},
        "said": Lines.said,
        "workers_lost": report.lost_workers,
        "workers_abandoned": report.abandoned_workers,
        "hangs": len(hung_at),
        "killed_after_s": killed,
        "replaced_after_s": replaced,
    }


if __name__ == "__main__":
    main()
