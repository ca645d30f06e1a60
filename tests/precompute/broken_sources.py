"""A source that is fine in the test's own process and misbehaves when a reader loads it."""

from __future__ import annotations

import os
import sys
import time

from tests.precompute.fake_sources import FakeSource

READER = any("stoker.precompute.reader" in argument for argument in sys.orig_argv)


def misbehave(mode):
    if mode == "raise":
        raise RuntimeError("this import is broken on purpose")
    if mode == "exit":
        os._exit(7)
    if mode == "hang":
        time.sleep(3600)


class BreaksAtUnpickling(FakeSource):
    """Does something bad while a reader unpickles it."""

    def __init__(self, counts, mode):
        super().__init__(counts)
        self.mode = mode

    def __setstate__(self, state):
        self.__dict__.update(state)
        if READER:
            misbehave(self.mode)
