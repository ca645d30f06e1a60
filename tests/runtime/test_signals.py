"""Signals during a run: what is done is ended, and nothing else is."""

from __future__ import annotations

import threading
import time

import pytest

from stoker.errors import StalledError
from stoker.runtime.signals import Interrupts


def stall_after(interrupts: Interrupts, seconds: float, *, still: bool = True) -> threading.Timer:
    timer = threading.Timer(seconds, interrupts.stall, ("it hangs", lambda: still))
    timer.start()
    return timer


def test_a_stall_ends_what_is_done() -> None:
    with Interrupts() as interrupts:
        timer = stall_after(interrupts, 0.1)
        begun = time.monotonic()
        with pytest.raises(StalledError, match="it hangs"), interrupts.raising():
            time.sleep(60)
        assert time.monotonic() - begun < 30
        timer.join()
        with interrupts.raising():  # and not what is done after it
            time.sleep(0.01)


@pytest.mark.parametrize("where", ["outside", "it moved on"])
def test_a_stall_that_comes_late_ends_nothing(where: str) -> None:
    with Interrupts() as interrupts:
        timer = stall_after(interrupts, 0.1, still=where == "outside")
        if where == "outside":
            timer.join()
            time.sleep(0.05)
        with interrupts.raising():
            time.sleep(0.3)
        timer.join()
    assert interrupts.signal is None


def test_another_thread_cannot_be_interrupted() -> None:
    seen = []

    def look() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.can_stall)
            interrupts.stall("it hangs", lambda: True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert seen == [False]
