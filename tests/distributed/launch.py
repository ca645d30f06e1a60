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

ROOT = Path(__file__).parents[2]
LONG_S = 120.0
"""Against hangs only: starting a rank takes seconds on a busy machine."""


@contextmanager
def torchrun(count: int, *words: str, cwd: Path) -> Generator[subprocess.Popen[str]]:
    """`torchrun --nproc-per-node count words`; everything that is left of it is killed at the end."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *words],
        cwd=cwd,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
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


def rank_processes(launcher: subprocess.Popen[str], module: str) -> list[tuple[psutil.Process, int]]:
    """The processes that run a module, each with its rank."""
    found: list[tuple[psutil.Process, int]] = []
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if module in words and "stoker.runtime.processes.preloaded" not in words:  # which imports it
                found.append((child, int(child.environ()["RANK"])))
    return found


def rank_process(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process that does the work of a rank, below its guardian."""
    (found,) = (process for process, own in rank_processes(launcher, "stoker.cli.main") if own == rank)
    return found


def wait_until(happened: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    """Return when it happened; fail when the launcher ends before, or it takes too long."""
    until = time.monotonic() + LONG_S
    while not happened():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
