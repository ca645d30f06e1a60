"""Samples some of which hang when they are read, in ten ways; worker processes import this module."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

from stoker.schema import Field
from stoker.sources.protocol import Part, SourceIdentity
from tests.precompute.fake_sources import FakeSource

KINDS = ("fifo", "sigstop", "busy-loop", "lock-held", "import", "socket", "full-pipe")
"""Hangs that SIGKILL ends."""
UNKILLABLE = ("fuse-open", "fuse-read")
"""Hangs that it does not; each has a part of its own, all of which hangs."""
SLOW = "fuse-slow"
"""Not a hang: one sample takes longer than the deadline, but its bytes keep coming."""
MAIN = 110
"""Samples of a part, but for those of the special parts."""
SHAPE = (4, 3)


class HangSource:
    """`count` samples in parts of 110, then the special parts among them.

    Args:
        count: Samples in all.
        bad: What happens at which number, for the killable kinds.
        special: How many samples each of the parts `fuse-open`, `fuse-read` and `fuse-slow` has.
        folder: Where the pipe, the module, the mount and the notes of what hung when are.
    """

    def __init__(self, count, *, bad, special, folder):
        self.count, self.bad, self.folder = count, bad, str(folder)
        self.parts = parts(count, special)

    def __len__(self):
        return self.count

    def schema(self):
        return {"x": Field(shape=SHAPE, dtype="float32")}

    def identity(self):
        named = tuple(
            Part(name=name, count=len(numbers), digest=f"{i:064x}")
            for i, (name, numbers) in enumerate(self.parts)
        )
        return SourceIdentity(kind="hangs/1", parts=named)

    def keys(self):
        return [str(number) for number in range(self.count)]

    def runs(self):
        return [
            range(start, min(start + 8, numbers.stop))
            for _, numbers in self.parts
            for start in range(numbers.start, numbers.stop, 8)
        ]

    def read(self, number, start=None, stop=None):
        name = next(name for name, numbers in self.parts if number in numbers)
        kind = self.bad.get(number, name if name.startswith("fuse") else "")
        if kind:
            if kind != SLOW:
                # What hangs says so itself, on the clock that all processes of the machine share.
                note = Path(self.folder, "notes", f"{number}-{os.getpid()}")
                note.write_text(repr(time.monotonic()))
            self._misbehave(kind)
        return {"x": values(number)}

    def _misbehave(self, kind):
        if kind == "fifo":
            Path(self.folder, "fifo").read_bytes()
        elif kind == "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "busy-loop":
            while True:
                pass
        elif kind == "lock-held":
            re.match("(a*)*b", "a" * 60)  # backtracks for years, in C, and lets no other thread run
        elif kind == "import":
            sys.path.insert(0, self.folder)
            importlib.import_module("never_imported")
        elif kind == "socket":
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname()).recv(1)
        elif kind == "full-pipe":
            _, writing = os.pipe()
            while True:
                os.write(writing, bytes(1 << 16))
        elif kind == SLOW:
            with Path(self.folder, "mount", "slow-steady").open("rb", buffering=0) as file:
                for _ in range(8):
                    assert len(file.read(4096)) == 4096
        else:
            with Path(self.folder, "mount", f"{kind.removeprefix('fuse-')}-never").open("rb") as file:
                file.read(1)


class FreezesItself(FakeSource):
    """Reading certain samples puts the reader into a frozen cgroup, where SIGKILL does not end it."""

    def __init__(self, counts, *, frozen, group):
        super().__init__(counts)
        self.frozen, self.group = frozen, str(group)

    def read(self, number, start=None, stop=None):
        if number in self.frozen:
            Path(self.group, "tasks").write_text(str(os.getpid()))
            time.sleep(3600)  # it is frozen on its way back from the kernel
        return super().read(number, start, stop)


def parts(count, special):
    """Name and numbers of each part; the special ones lie between the first of the others."""
    left = count - sum(special.values())
    size = min(MAIN, -(-left // 4))
    following, found, first = iter(special.items()), [], 0
    while left:
        data = (f"data/part{len(found)}.h5", min(size, left))
        left -= data[1]
        for name, length in (data, next(following, ("", 0))):
            if length:
                found.append((name, range(first, first + length)))
                first += length
    return found


def values(number):
    """What sample `number` holds."""
    return np.random.default_rng(number).standard_normal(SHAPE, dtype=np.float32)
