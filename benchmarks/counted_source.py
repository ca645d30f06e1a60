"""An HDF5 source that notes how many bytes each worker process has read; for `precompute_wall.py`.

In a module of its own without torch, since workers import it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import stoker


def bytes_read() -> int:
    """Bytes that this process has read so far, from files and caches alike."""
    return int(Path("/proc/self/io").read_text().split()[1])


class CountedSource(stoker.HDF5Source):
    """Appends `process bytes` to the file `log` whenever another MiB was read."""

    log = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "log": self.log}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.log, self._begin, self._noted = state["log"], bytes_read(), 0

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Any:
        sample = super().read(number, start, stop)
        if self.log and hasattr(self, "_begin"):
            total = bytes_read() - self._begin
            if total - self._noted >= 1 << 20:
                self._noted = total
                with Path(self.log).open("a", encoding="ascii") as file:  # several processes append
                    file.write(f"{os.getpid()} {total}\n")
        return sample


def total_read(log: Path) -> int:
    """Bytes read by all processes that wrote to `log`."""
    last = {}
    if log.exists():
        for line in log.read_text().splitlines():
            process, total = line.split()
            last[process] = int(total)
    return sum(last.values())
