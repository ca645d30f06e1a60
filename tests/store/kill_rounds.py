"""Fill a cache in forked children that are killed at random moments; check after each what is left.

A process of its own, so that forking meets no threads: `python -m tests.store.kill_rounds FOLDER`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from stoker.store import WriterSettings, make_recipe, open_folder
from tests.store.fakes import FakeSource, batch_of

SOURCE = FakeSource(parts=[("a", 120)])
SHARD_ROWS, GROUP = 10, 4


def fill_missing(root: Path, report: int) -> None:
    """What each child does: encode what is missing, a group at a time, and tell of each group."""
    folder = open_folder(root, "x", make_recipe(SOURCE, None))
    missing = folder.missing().tolist()
    os.write(report, b".")
    writer = folder.writer(WriterSettings(shard_bytes=SHARD_ROWS * 1156))
    for begin in range(0, len(missing), GROUP):
        group = missing[begin : begin + GROUP]
        writer.append(group, batch_of(SOURCE, group))
        os.write(report, b"+")
    writer.commit()
    folder.finish()


def round_of(root: Path, wait_groups: int, delay_s: float) -> int:
    """Fork, let it append some groups and go on for a moment, kill it; returns how many it had appended."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        fill_missing(root, there)
        os._exit(0)
    os.close(there)
    assert os.read(here, 1) == b"."
    groups = sum(len(os.read(here, 1)) for _ in range(wait_groups))  # fewer, when it is done before
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(here, 4096):
        groups += len(piece)
    os.close(here)
    return groups


def main() -> None:
    """Kill until all is stored."""
    root, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    stored = kills = 0
    while stored < len(SOURCE):
        groups = round_of(root, chance.randrange(6), chance.uniform(0, 0.004))
        folder = open_folder(root, "x", make_recipe(SOURCE, None))
        # What was in the open shard is lost, and the group that was being appended may be cut by a seal.
        assert folder.stored_count() >= stored + GROUP * groups - SHARD_ROWS, (stored, groups)
        assert not [path for path in folder.path.iterdir() if path.name.startswith(".tmp")]
        stored = folder.stored_count()
        kills += 1
    sys.stdout.write(str(kills))


if __name__ == "__main__":
    main()
