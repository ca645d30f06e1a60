"""A precompute with real workers, killed as a whole tree at random moments and started again.

`python -m tests.chaos.trees --runs 100` kills and resumes; `--cycles 50` does the same in one place again and
again and counts what is left behind, and then lets one process lose its workers as often. Figures as JSON.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stoker.store import Cache, open_cache
from tests.chaos import children, program
from tests.chaos.checks import left_behind
from tests.chaos.writers import SHARD_ROWS, Counts, fill, in_child, same_records, shared_counts

SAMPLES = 120
WORKERS = 2
GROUP = 4
QUEUED_GROUPS = 4
"""Groups that may be between encoder and open shard when the kill comes: handed over, not yet appended."""
DEADLINE_S = 60.0
PAUSE_S = 0.01
"""What a group takes to encode, so that kills come at every stage."""
Found = tuple[dict[str, Any], list[str]]


def descendants(pid: int) -> list[int]:
    """Processes started by a process, by those, and so on; itself first."""
    found = [pid]
    for parent in found:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(child) for child in tasks.read_text().split()]
    return found


def kill_tree(pid: int) -> list[int]:
    """SIGKILL to a process and everything below it, which are returned; the first is left to be reaped."""
    tree = descendants(pid)
    for member in tree:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    return tree


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def random_moment(counts: Counts, chance: random.Random) -> None:
    """Return while nothing is encoded yet (one in four), or when a random number of records is."""
    encoded = chance.randrange(-SAMPLES // 3, SAMPLES)
    limit = time.monotonic() + DEADLINE_S
    while counts.sum() < encoded and time.monotonic() < limit:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.5) if encoded < 0 else chance.uniform(0, 2 * PAUSE_S))


def run_of(root: Path, reference: Cache, chance: random.Random) -> dict[str, Any]:
    """Start, kill the tree at a random moment, start again to the end, compare."""
    counts = shared_counts(SAMPLES)
    work = functools.partial(fill, root, counts, PAUSE_S, WORKERS)
    pid, pipe = children.start(work)
    random_moment(counts, chance)
    tree = kill_tree(pid)
    data, _ = children.listen(pid, pipe, DEADLINE_S)
    first = children.ended_of(pid, data)
    first.reap()
    limit = time.monotonic() + 2.0
    while any(map(alive, tree)) and time.monotonic() < limit:
        time.sleep(0.01)
    wrong = [
        f"orphan: process {member} lives 2 s after its tree was killed" for member in filter(alive, tree)
    ]
    again = children.run(work, deadline_s=DEADLINE_S)
    if again.hung or again.code != 0:
        wrong.append(f"not resumed: {again.error or again}")
    else:
        wrong += in_child(functools.partial(differences, root, reference))
    redone = int(counts.sum()) - SAMPLES
    killed = first.signal == signal.SIGKILL
    return {"wrong": wrong, "killed": killed, "redone": redone, "workers": len(tree) - 1}


def differences(root: Path, reference: Cache) -> list[str]:
    """How a resumed cache differs from one that was made in one go."""
    cache = open_cache(root / "c")
    wrong = [] if same_records(cache, reference) else ["differs: records are not those of an undisturbed run"]
    return wrong + left_behind(root)


def leavings(place: Path) -> set[str]:
    """Shared segments, temporary files, and processes of ours, by name."""
    shm = (path.name for path in Path("/dev/shm").glob("*"))
    others = (program.PREFIX, "PostgreSQL.")
    found = {f"shared segment {name}" for name in shm if not name.startswith(others)}
    found |= {f"temporary {path}" for path in place.rglob("*")}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={place}".encode() in (entry / "environ").read_bytes():
                found.add(f"process {entry.name}: {(entry / 'cmdline').read_bytes()[:200]!r}")
    return found


def left_after(place: Path, before: set[str]) -> list[str]:
    """What is still there when what ends by itself (as other programs on this machine) has had 2 s for it."""
    limit = time.monotonic() + 2.0
    while (left := leavings(place) - before) and time.monotonic() < limit:
        time.sleep(0.05)
    return [f"left behind: {what}" for what in sorted(left)]


def lose_workers(root: Path, cycles: int, seed: int, say: children.Say) -> None:
    """One process runs again and again, its workers killed at random; says how many descriptors it has."""
    chance, counts = random.Random(seed), shared_counts(SAMPLES)
    for i in range(cycles):
        delay_s = chance.uniform(0.1, 0.5)
        killer = os.fork()
        if not killer:
            time.sleep(delay_s)
            for pid in descendants(os.getppid())[1:]:
                if pid != os.getpid():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            os._exit(0)
        fill(root / str(i), counts, PAUSE_S, WORKERS, lambda value: None)
        os.waitpid(killer, 0)
        say({"descriptors": len(os.listdir("/proc/self/fd")), "children": len(descendants(os.getpid())) - 1})
        shutil.rmtree(root / str(i))


def cycle(base: Path, reference: Cache, cycles: int, chance: random.Random) -> Found:
    """Kill and resume in turn, then lose workers in one process; what is left of both."""
    place = base / "temporary"
    place.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    before = leavings(place)
    wrong: list[str] = []
    for i in range(cycles):
        wrong += run_of(base / f"cycle-{i}", reference, chance)["wrong"]
        shutil.rmtree(base / f"cycle-{i}", ignore_errors=True)
    # The first run opens what stays open: the counts are compared from the second on.
    work = functools.partial(lose_workers, base / "one", cycles, chance.randrange(1 << 32))
    ended = children.run(work, deadline_s=DEADLINE_S * cycles)
    held = [value for value in ended.said if isinstance(value, dict) and "descriptors" in value]
    if ended.code != 0 or len(held) != cycles:
        wrong.append(f"failed: {ended.error or ended}")
    elif held[-1] != held[min(1, cycles - 1)]:
        wrong.append(f"left behind: {held[-1]} after the last cycle, {held[1]} after the second")
    wrong += left_after(place, before)
    found = {
        "cycles": cycles,
        "descriptors_after_second": held[1]["descriptors"] if len(held) > 1 else None,
        "descriptors_after_last": held[-1]["descriptors"] if held else None,
    }
    return found, wrong


def runs_of(base: Path, reference: Cache, count: int, chance: random.Random) -> Found:
    """Kill and resume in a place of its own each time."""
    runs, wrong = list[dict[str, Any]](), list[str]()
    for i in range(count):
        runs.append(run_of(base / str(i), reference, chance))
        wrong += runs[-1].pop("wrong")
        shutil.rmtree(base / str(i), ignore_errors=True)
    if not runs:
        return {}, wrong
    bound = SHARD_ROWS + GROUP * QUEUED_GROUPS
    redone = [run["redone"] for run in runs]
    wrong += [f"redone: {count} records, {bound} at most" for count in redone if count > bound]
    found = {
        "runs": len(runs),
        "killed_before_the_end": sum(run["killed"] for run in runs),
        "with_workers": sum(run["workers"] > 0 for run in runs),
        "redone_most": max(redone),
        "redone_mean": round(sum(redone) / len(redone), 2),
        "redone_allowed": bound,
        "records": SAMPLES,
    }
    return found, wrong


def run(argv: Sequence[str]) -> program.Figures:
    """Do the runs and cycles that the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments, begun = parser.parse_args(argv), time.monotonic()
    chance = random.Random(arguments.seed)
    with program.workplace() as base:
        work = functools.partial(fill, base / "whole", shared_counts(SAMPLES), PAUSE_S, WORKERS)
        children.run(work, deadline_s=DEADLINE_S)
        reference = open_cache(base / "whole" / "c")
        found, wrong = runs_of(base, reference, arguments.runs, chance)
        if arguments.cycles:
            more, more_wrong = cycle(base, reference, arguments.cycles, chance)
            found, wrong = found | more, wrong + more_wrong
    return program.figures(found, wrong, begun)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(program.main(run))
