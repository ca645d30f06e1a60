"""The heartbeat page: what a process is doing, readable without its help.

One memfd of a page per worker, and one for a process under a guardian. The process writes
(stage, sample, monotonic time, bytes or groups done) at every step; the
caller looks whenever a timeout is near. A worker that hangs, spins, is stopped or holds the interpreter's
lock simply stops writing, and that is all the caller needs to know.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import Any

STAGES: tuple[str, ...] = ("start", "open", "read", "wait", "encode", "lost", "end")
"""Stages of a process.

- start: imports, unpickling, an encoder brought to its device.
- open: first sample of a part; read: the others.
- wait: for work or room.
- encode: a call of the encoder.
- lost: the device cannot be used again in this process.
- end: done, its exit code in place of the sample.
"""

_PAGE = 4096
_LAYOUT = struct.Struct("<qqqdqqq")  # sequence, stage, number, limit s, monotonic ns, done, sequence again


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One look at a page."""

    stage: str
    """One of `STAGES`."""
    number: int
    """Sample in hand, or -1."""
    time_ns: int
    """`time.monotonic_ns()` when it was written; 0 before the first beat."""
    done: int
    """So far: bytes of samples read; by a process that encodes, groups."""
    limit_s: float
    """Seconds that this stage may last by the process's own word; 0: it gave none."""


def anonymous_file(name: str) -> int:
    """Return a descriptor of a fresh file without a path: memory where the system has that, else a disk's."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class HeartbeatPage:
    """A page in shared memory, written by one worker and read by the caller."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _PAGE)
        self._sequence = 0
        self._done = 0
        self._last = (0, -1, 0.0)
        self._seen: tuple[Any, ...] = _LAYOUT.unpack(bytes(_LAYOUT.size))

    @classmethod
    def create(cls) -> HeartbeatPage:
        """Return a fresh page in stage `start`."""
        fd = anonymous_file("stoker-beat")
        os.ftruncate(fd, _PAGE)
        return cls(fd)

    def write(self, stage: str, number: int = -1, *, done: int = 0, limit_s: float = 0.0) -> None:
        """Say what is being done now; `done` adds to the count."""
        self._last = (STAGES.index(stage), number, limit_s)
        self.progress(done)

    def progress(self, done: int) -> None:
        """Still at the same stage and sample, and `done` further on."""
        self._done += done
        self._sequence += 1
        # Not `pack_into`, which fills the place with zeros first: a look at that moment would find no beat.
        self._map[: _LAYOUT.size] = _LAYOUT.pack(
            self._sequence, *self._last, time.monotonic_ns(), self._done, self._sequence
        )

    def look(self) -> Heartbeat:
        """Return the latest beat; the one seen before while the worker is in the middle of writing."""
        for _ in range(8):
            values: tuple[Any, ...] = _LAYOUT.unpack(self._map[: _LAYOUT.size])
            if values[0] == values[6]:
                self._seen = values
                break
        _, stage, number, limit_s, time_ns, done, _ = self._seen
        known = STAGES[stage] if 0 <= stage < len(STAGES) else "wait"
        return Heartbeat(stage=known, number=number, time_ns=time_ns, done=done, limit_s=limit_s)

    def close(self) -> None:
        """Let the memory go; safe to call twice."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)
