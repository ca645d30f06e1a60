"""A source that is fine in the test's own process and misbehaves when a reader loads it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.precompute.fake_sources import FakeSource

READER = any("stoker.precompute.worker" in argument for argument in sys.orig_argv)


def misbehave(mode):
    if mode == "raise":
        raise RuntimeError("this import is broken on purpose")
    if mode == "exit":
        os._exit(7)
    if mode == "slow":
        time.sleep(1)
    if mode == "hang":
        time.sleep(3600)


class BreaksAtUnpickling(FakeSource):
    """Does something bad while a reader unpickles it."""

    def __init__(self, counts, mode, **rest):
        super().__init__(counts, **rest)
        self.mode = mode

    def __setstate__(self, state):
        self.__dict__.update(state)
        if READER:
            misbehave(self.mode)


class LoadsOnce(BreaksAtUnpickling):
    """Good for the first reader alone; `mode` is what happens to the others.

    Its second half is read once three others have failed, so that the run does not end before that.
    """

    def read(self, number, start=None, stop=None):
        deadline = time.monotonic() + 100
        while number >= len(self) // 2 and self._failed() < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().read(number, start, stop)

    def _failed(self):
        return sum(1 for path in Path(self.marker).iterdir() if path.name.startswith("failed-"))

    def __setstate__(self, state):
        self.__dict__.update(state)
        if READER:
            first = Path(self.marker) / "loaded"
            if first.exists():
                (Path(self.marker) / f"failed-{os.getpid()}").touch()
                misbehave(self.mode)
            first.touch()
