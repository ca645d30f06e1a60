"""Commands under real `torchrun`, on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

LONG_S = 120.0
"""Against hangs only: starting a rank takes seconds on a busy machine."""


@contextmanager
def torchrun(count: int, *words: str, cwd: Path) -> Generator[subprocess.Popen[str]]:
    """`torchrun --nproc-per-node count words`; everything that is left of it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *words],
        cwd=cwd,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen: list[psutil.Process] = []
    try:
        seen = [psutil.Process(process.pid)]
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            seen += seen[0].children(recursive=True)
        for one in seen:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


def rank_process(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process that does the work of a rank, below its guardian."""
    found: list[psutil.Process] = []
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "stoker.cli.main" in child.cmdline() and child.environ().get("RANK") == str(rank):
                found.append(child)
    assert len(found) == 1, f"{len(found)} processes of rank {rank}"
    return found[0]


def wait_until(happened: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    """Return when it happened; fail when the launcher ends before, or it takes too long."""
    until = time.monotonic() + LONG_S
    while not happened():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
