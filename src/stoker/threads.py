"""A few daemon threads that never keep a process alive, for reads, order and large gathers.

`concurrent.futures` joins its threads when the interpreter exits, so that one read that hangs would hang the
exit; here the exit waits `EXIT_S` for work in hand, and a thread that is stuck is left behind. It has to
wait: the interpreter ends a daemon thread as that asks for the lock, and inside torch's C++ that is an abort.
Idle threads end by themselves, so nothing needs to be closed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from stoker.errors import StalledError

T = TypeVar("T")

IDLE_S = 20.0
"""An idle thread ends after this long; the next piece of work starts another."""
EXIT_S = 5.0
"""Seconds that the exit of the interpreter waits for work in hand, all pools together."""


class Ticket(Generic[T]):
    """Work that was handed to a pool, for the process that did so: threads do not survive a fork."""

    __slots__ = ("_done", "_error", "_process", "_value", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = threading.Event()
        self._process = os.getpid()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> threading.Event:
        """Do the work; its outcome waits in the ticket. Called once, by a thread of the pool.

        Returns:
            To be set once the caller refers neither to the ticket nor to its work. Whoever waits may then
            rely on nothing of it being held, such as a folder that is open.
        """
        work, self._work = self._work, None
        assert work is not None
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks for the result
            self._error = error
        finally:
            del work  # which the frames of an error would keep
        return self._done

    def drop(self) -> None:
        """Give it up: it will not be done any more."""
        self._error = StalledError("the program is ending, and no further work is begun")
        self._done.set()

    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._done.is_set()

    def wait(self, deadline_s: float) -> None:
        """Wait until the work is over, whatever became of it; in another process nobody is at it."""
        if self._process == os.getpid():
            self._done.wait(deadline_s)

    def result(self, deadline_s: float, what: str) -> T:
        """The outcome, or the error that the work raised.

        Args:
            deadline_s: Seconds to wait for it.
            what: Names the work in the error.

        Raises:
            StalledError: It is not there after `deadline_s`, and the thread is left behind; or it was begun
                by the process that this one was forked from.
        """
        if not self.done() and self._process != os.getpid():
            raise StalledError(
                f"{what} was begun by process {self._process}, and this one was forked from it without its "
                "threads. Begin a pass here, with iter(loader)"
            )
        if not self._done.wait(deadline_s):
            raise StalledError(
                f"{what} made no progress for {deadline_s:g} s. See whether the storage behind it answers, "
                "then run this again: what is saved stays"
            )
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Pool:
    """At most `size` threads that run tickets in the order in which they came."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self._name = name
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """Without a thread, as at first or after a fork."""
        self._line: deque[Ticket[Any]] = deque()
        self._change = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._process = os.getpid()

    def wind_down(self, until: float) -> None:
        """Drop what was not begun, and wait for what was until the monotonic time `until`."""
        if self._process != os.getpid():  # its threads are those of the process that forked
            return
        while True:
            with self._change:
                while self._line:
                    self._line.popleft().drop()
                busy = self._threads > self._idle
            if not busy or time.monotonic() >= until:
                return
            time.sleep(0.001)

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Have `work` done by one of the threads, or, once the interpreter exits, at once by this one."""
        ticket = Ticket(work)
        if ending():
            ticket.run().set()
            return ticket
        if self._process != os.getpid():
            self._begin()
        with self._change:
            if self._idle > len(self._line):
                self._change.notify()
            elif self._threads < self.size:
                # Where no thread can be started, nothing of this call may stay: neither work nor a place.
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                self._threads += 1
            self._line.append(ticket)
        return ticket

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._line:
                    self._idle += 1
                    called = self._change.wait(IDLE_S)
                    self._idle -= 1
                    if not called and not self._line:
                        self._threads -= 1
                        return
                ticket = self._line.popleft()
            over = ticket.run()
            del ticket  # its outcome may be a large batch, which must not live until the next piece of work
            over.set()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_ending = threading.Event()


def ending() -> bool:
    """Whether the interpreter is about to exit: long work should end where it can."""
    return _ending.is_set()


@atexit.register
def _wind_down() -> None:
    _ending.set()
    until = time.monotonic() + EXIT_S
    for pool in list(_pools):
        pool.wind_down(until)
