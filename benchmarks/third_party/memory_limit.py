"""Run a command with a limit on the memory it may use, page cache included, so that files larger than it stay on disk."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")


def drop_pages(paths: Iterable[Path]) -> None:
    """Write the files out, and have the kernel forget their pages.

    A page belongs to the group that read it first: pages that are left in memory would not count against the limit.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def remove(group: Path, wait_s: float = 20) -> None:
    """Remove a group once its last process has ended; leave it there if that takes too long."""
    until = time.monotonic() + wait_s
    while group.exists() and time.monotonic() < until:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.2)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | str]:
    """Yield a new control group with this limit, or the reason why there is none. It is removed afterwards."""
    version_2 = (ROOT / "cgroup.controllers").exists()
    group = (ROOT if version_2 else ROOT / "memory") / f"stoker-benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        yield f"no limit: {error}"
        return
    try:
        try:
            if version_2:
                (ROOT / "cgroup.subtree_control").write_text("+memory")
                (group / "memory.swap.max").write_text("0")
            name = "memory.max" if version_2 else "memory.limit_in_bytes"
            (group / name).write_text(str(limit_bytes))
        except OSError as error:
            yield f"no limit: {error}"
        else:
            yield group
    finally:
        remove(group)


def run_in(
    group: Path | str, command: list[str], environment: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in the group, as `subprocess.run` does; it joins before it allocates anything."""

    def join() -> None:
        if isinstance(group, Path):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(command, env={**environment}, text=True, preexec_fn=join, **options)
