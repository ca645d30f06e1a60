"""A source that is fine in the test's own process and misbehaves when a reader loads it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.precompute.fake_sources import FakeSource

READER = any("stoker.precompute.reader" in argument for argument in sys.orig_argv)


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
    """Good for the first reader alone; `mode` is what happens to the others."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if READER:
            first = Path(self.marker) / "loaded"
            if first.exists():
                misbehave(self.mode)
            first.touch()
