"""Do the same to many files at once: results in the order of the files, and no wait without a deadline.

What takes long with many files is waiting for storage to answer, so a few threads ask at a time. They are
daemons: one that hangs in a read is left behind and keeps no process alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from stoker.errors import StalledError

T = TypeVar("T")
R = TypeVar("R")

THREADS = 16
"""As many requests as keep network storage busy; see `benchmarks/many_shards.py`."""
AHEAD = 4
"""Results per thread that may wait to be taken."""
DEADLINE_S = 600.0
"""Seconds that one item may take."""
LAST_S = 30.0
"""Seconds at most for what had begun when the rest is given up."""


class _Task(Generic[T, R]):
    """One item, and what became of it."""

    __slots__ = ("done", "error", "item", "result")

    def __init__(self, item: T) -> None:
        self.item = item
        self.done = threading.Event()
        self.result: R | None = None
        self.error: BaseException | None = None

    def run(self, work: Callable[[T], R]) -> None:
        try:
            self.result = work(self.item)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever takes the result
            self.error = error
        self.done.set()


def in_order(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    what: str,
    threads: int = THREADS,
    deadline_s: float = DEADLINE_S,
) -> Generator[R]:
    """What `work` makes of each item, in their order, however long each took.

    Args:
        work: Called by several threads at once.
        items: Taken as they are needed.
        what: Names the work in an error: `reading the shards of ...`.
        threads: How many items are worked on at a time.
        deadline_s: Seconds to wait for one result.

    Raises:
        StalledError: A result was not there in time; says which item's.
        BaseException: The first error of `work`, when it is its item's turn.
    """
    tasks: SimpleQueue[_Task[T, R] | None] = SimpleQueue()
    line: deque[_Task[T, R]] = deque()
    started = 0

    def serve() -> None:
        while (task := tasks.get()) is not None:
            task.run(work)

    def next_result() -> R:
        task = line.popleft()
        if not task.done.wait(deadline_s):
            raise StalledError(
                f"{what}: {task.item} was not done after {deadline_s:g} s. The storage behind it does not "
                "answer; run it again when it does"
            )
        if task.error is not None:
            raise task.error
        return cast(R, task.result)

    try:
        for item in items:
            line.append(_Task(item))
            if started < threads:
                started += 1
                threading.Thread(target=serve, name="stoker-files", daemon=True).start()
            tasks.put(line[-1])
            if len(line) >= threads * AHEAD:
                yield next_result()
        while line:
            yield next_result()
    finally:
        begun = set(line)
        with suppress(Empty):
            while True:  # given up: what was not begun is not done
                begun.discard(cast("_Task[T, R]", tasks.get_nowait()))
        for _ in range(started):
            tasks.put(None)
        limit = time.monotonic() + min(deadline_s, LAST_S)
        for task in begun:  # whoever called may release a claim next
            task.done.wait(max(0.0, limit - time.monotonic()))
