"""What the programs of this folder share: a place to work in, and figures as one line of JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.store import Folder, RecordWriter, WriterSettings
from stoker.units import MIB

Figures = dict[str, Any]
PREFIX = "stoker-chaos-"
SHOWN = 20
"""Findings that are printed; all are counted."""


@contextmanager
def workplace() -> Generator[Path]:
    """A folder, removed afterwards: in memory where there is room, since no program relies on the medium."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 256 * MIB
    base = Path(tempfile.mkdtemp(prefix=PREFIX, dir=shm if roomy else None))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def figures(found: Mapping[str, Any], wrong: Sequence[str], begun: float) -> Figures:
    """What a program found, with what is wrong and how long it took since `begun` (monotonic)."""
    seconds = round(time.monotonic() - begun, 1)
    return {**found, "seconds": seconds, "wrong_count": len(wrong), "wrong": [*wrong[:SHOWN]]}


def main(run: Callable[[Sequence[str]], Figures]) -> int:
    """Run with the arguments of this process and print the figures; 1 if anything is wrong."""
    found = run(sys.argv[1:])
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["wrong_count"] else 0


def limit_shards(size_bytes: int) -> None:
    """Let whatever writes in this process fill shards of `size_bytes`."""
    whole = Folder.writer

    def writer(folder: Folder, settings: WriterSettings | None = None) -> RecordWriter:
        return whole(folder, replace(settings or WriterSettings(), shard_bytes=size_bytes))

    Folder.writer = writer
