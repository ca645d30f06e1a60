"""A real control group whose limit is lowered while a loader serves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoker.plan.resources import memory_limits
from stoker.units import MIB
from tests.loader.caches import write_cache

CHILD = """
import hashlib, os, sys, time
with open(sys.argv[2], "w") as file:
    file.write(str(os.getpid()))
import torch
torch.set_num_threads(1)
from stoker.loader import Loader, placement
from stoker.store import open_cache
placement.LOOK_S = 0.05
loader = Loader(open_cache(sys.argv[1]), batch_size=16, shuffle=True, seed=1)
epochs = {}
while True:
    digest, epoch = hashlib.sha256(), loader.epoch % 2
    loader.set_epoch(epoch)
    for batch in loader:
        digest.update(batch["x"].numpy().tobytes())
    assert epochs.setdefault(epoch, digest.hexdigest()) == digest.hexdigest(), "a batch changed"
    held = loader.plan.records_by_tier()
    print(held["host"], held["disk"], flush=True)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group of our own, below that of this process, or below its mount where that is not allowed."""
    found = None
    for folder in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        made = Path(folder) / f"stoker-test-{os.getpid()}"
        limit = made / ("memory.limit_in_bytes" if "memory" in folder else "memory.max")
        try:
            made.mkdir()
            limit.write_text(str(600 * MIB))
            found = made
        except OSError:
            if made.is_dir():
                made.rmdir()
            continue
        break
    if found is None:
        pytest.skip("no memory control group may be made here")
    yield found
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            found.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


def lower_limit(group: Path, limit_bytes: int) -> None:
    names = ("memory.limit_in_bytes", "memory.max")
    (limit,) = [group / name for name in names if (group / name).exists()]
    limit.write_text(str(limit_bytes))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_limit_lowered_in_a_running_job_costs_memory_and_no_batch(tmp_path: Path, group: Path) -> None:
    """The kernel takes back what is mapped; the loader must notice before it reads page by page."""
    cache = write_cache(tmp_path, {"x": torch.randn(256, 64 * 1024)}, shards=(32,) * 8)  # 64 MiB
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(cache.path), str(group / "cgroup.procs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert wait_for(child, lambda host, disk: (host, disk) == (256, 0)), "memory was to spare"

        lower_limit(group, held_bytes(child.pid) + 60 * MIB)

        assert wait_for(child, lambda host, disk: 0 < host < 256 and host + disk == 256)
        lower_limit(group, settled_bytes(child.pid) + 4 * MIB)
        assert wait_for(child, lambda host, disk: host < 100 and host + disk == 256)
        assert child.poll() is None, "it was killed"
    finally:
        child.kill()
        error = child.communicate()[1]
    assert "Traceback" not in error, error


def held_bytes(pid: int) -> int:
    """What the kernel cannot take back from the group of a process."""
    proc = Path(f"/proc/{pid}")
    limits = memory_limits((proc / "cgroup").read_text(), (proc / "mountinfo").read_text(), Path("/"))
    return limits[0].held_bytes


def settled_bytes(pid: int) -> int:
    """Return the same once it has stopped growing: batches read ahead cannot be taken back either."""
    held, quiet = held_bytes(pid), 0
    while quiet < 3:
        time.sleep(1.0)
        before, held = held, held_bytes(pid)
        quiet = 0 if held > before + MIB else quiet + 1
    return held


def wait_for(child: subprocess.Popen[str], wanted: object) -> bool:
    """Whether a line of two numbers comes that is as wanted, within minutes: memory is short there."""
    assert child.stdout is not None
    assert callable(wanted)
    until = time.monotonic() + 150
    while time.monotonic() < until and (line := child.stdout.readline()):
        if wanted(*map(int, line.split())):
            return True
    return False
