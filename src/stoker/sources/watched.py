"""Calls of foreign code that may never return, in a thread of their own and under a deadline.

For what must happen in the user's own process; precompute reads in processes, which can be killed.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

from stoker.errors import StalledError

T = TypeVar("T")


def watched(work: Callable[[Callable[[int], None]], T], deadline_s: float, *, where: str, advice: str) -> T:
    """What `work` returns or raises; it gets a function to call with the number of each item it begins.

    The clock starts anew with each item. A thread cannot be ended, so one that stalls is left behind; it is a
    daemon and holds up no exit. Code that keeps the interpreter's lock for ever stops this process as a
    whole, and no deadline within it can help.

    Raises:
        StalledError: An item took longer than `deadline_s`; names it and the line it stands at.
    """
    outcome: Future[T] = Future()
    item = (-1, time.monotonic())

    def begin(number: int) -> None:
        nonlocal item
        item = (number, time.monotonic())

    def run() -> None:
        try:
            outcome.set_result(work(begin))
        except BaseException as error:  # noqa: BLE001  a thread's edge: raised again in the caller's
            outcome.set_exception(error)

    thread = Thread(target=run, name="stoker-watched", daemon=True)
    thread.start()
    while not outcome.done():
        number, since = item
        left_s = since + deadline_s - time.monotonic()
        if left_s <= 0:
            raise StalledError(
                f"{where}: item {number} did not arrive within {deadline_s:g} s; "
                f"it is at {_lines(thread)}. {advice}"
            )
        wait([outcome], left_s)
    return outcome.result()


def _lines(thread: Thread) -> str:
    """The innermost calls of a thread, innermost first: often a library's, so the caller's are there too."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    calls = [] if frame is None else traceback.extract_stack(frame)[-3:]
    return ", called from ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in reversed(calls))
