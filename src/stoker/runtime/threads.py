"""Run work in daemon threads: a pool, a call with a timeout, a map over many items; repeat what may succeed.

`concurrent.futures` joins its threads when the interpreter exits, so one read that hangs would hang the exit.
Here the exit waits `EXIT_S` for work in progress, and leaves a stuck thread behind. It has to wait: the
interpreter ends a daemon thread when that asks for the lock, and inside torch's C++ this is an abort.
Idle threads end after a while, so nothing needs to be closed.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import resource
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar, cast

from stoker.errors import ResourceError, StalledError
from stoker.runtime.openmp import end_team, use_one_thread_here
from stoker.units import format_bytes, format_count

log = logging.getLogger("stoker")
T = TypeVar("T")
R = TypeVar("R")

IDLE_S = 20.0
"""An idle thread ends after this long; the next piece of work starts another."""
TEAM_S = 0.01
"""An idle thread ends its OpenMP threads after this long; at once, each call would have to start others."""
EXIT_S = 5.0
"""Seconds that the exit of the interpreter waits for work in progress, all pools together."""
MAP_THREADS = 16
"""As many requests as keep network storage busy; see `benchmarks/many_shards.py`."""
MAP_AHEAD = 4
"""Results per thread that may wait to be taken."""
MAP_TIMEOUT_S = 600.0
"""Seconds that one item of a map may take."""
MAP_CLOSE_S = 30.0
"""Seconds at most for the items in progress when the rest of a map is given up."""


class Ticket(Generic[T]):
    """Hold the outcome of work that was given to a pool, for the process that gave it.

    Threads do not survive a fork, so a child process never waits for a ticket of its parent.
    """

    __slots__ = ("_done", "_error", "_process", "_value", "_work", "began")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = threading.Event()
        self._process = os.getpid()
        self._value: T | None = None
        self._error: BaseException | None = None
        self.began: float | None = None
        """Monotonic time at which a thread began the work."""

    def run(self) -> threading.Event:
        """Do the work; its outcome waits in the ticket. Called once, by a thread of the pool.

        Returns:
            To be set once the caller refers neither to the ticket nor to its work. A process that waits may
            then rely on nothing of it being held, such as an open folder.
        """
        work, self._work, done = self._work, None, self._done
        assert work is not None
        self.began = time.monotonic()
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            del work, self  # which the frame of an error would keep
        return done

    def drop(self) -> None:
        """Give the work up before it began."""
        self._work = None
        self._error = StalledError("the program is ending, and no further work is begun")
        self._done.set()

    def done(self) -> bool:
        """Return True if the outcome is there."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the work, good or bad; return whether it came.

        In a forked process no thread does the work, so this returns at once there.
        """
        if self.done() or self._process != os.getpid():
            return self.done()
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float, what: str) -> T:
        """Return the outcome, or raise the error of the work.

        Args:
            timeout_s: Seconds to wait for it.
            what: Names the work in the error.

        Raises:
            StalledError: It is not there after `timeout_s`, and the thread is left behind; or the process
                that began it is the one that this one was forked from.
        """
        if not self.wait(timeout_s):
            if self._process != os.getpid():
                raise StalledError(
                    f"{what} was begun by process {self._process}, and this one was forked from it without "
                    "its threads",
                    hint="Begin a pass here, with iter(loader)",
                )
            raise StalledError(
                f"{what} made no progress for {timeout_s:g} s",
                hint="See whether the storage behind it answers, then run this again: what is saved stays",
            )
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error keeps this frame, and the ticket keeps the error: a circle
        return cast(T, self._value)


class Pool:
    """At most `size` daemon threads that run tickets in the order in which they came.

    A forked process starts without threads and without the work that waited in its parent.
    """

    def __init__(self, size: int, name: str, *, all_cores: bool = False) -> None:
        """`all_cores`: the work may compute on all of them; False: each thread computes on one."""
        self.size = size
        self._name = name
        self._all_cores = all_cores
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._line: deque[Ticket[Any]] = deque()
        self._change = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], T], what: str = "") -> Ticket[T]:
        """Have `work` done by one of the threads, or, once the interpreter exits, at once by this one.

        Args:
            work: Errors that it raises are kept in the ticket.
            what: Names it in the error; empty: the name of the threads.

        Raises:
            ResourceError: No thread can be started; nothing of the work is kept.
        """
        ticket = Ticket(work)
        if is_exiting():
            ticket.run().set()
            return ticket
        with self._change:
            if self._idle > len(self._line):
                self._change.notify()
            elif self._threads < self.size:
                # Where no thread can be started, nothing of this call may stay: neither work nor a place.
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                launch_thread(thread, what or self._name)
                self._threads += 1
            self._line.append(ticket)
        return ticket

    def call_within(self, timeout_s: float, work: Callable[[], T], what: str) -> T:
        """Return the result of `work`, done by a thread that is left behind if it does not come back.

        A call that hangs keeps its thread, so that `size` limits how many hang at a time.

        Args:
            timeout_s: Seconds to wait for a free thread, and then for the result.
            work: Errors that it raises pass through.
            what: Names the work in an error.

        Raises:
            StalledError: No result in time, or no thread was free.
            ResourceError: No thread can be started.
        """
        ticket = self.submit(work, what)
        if not ticket.wait(timeout_s):
            if self._cancel(ticket):
                raise StalledError(
                    f"{what} was not begun within {timeout_s:g} s: {self.size} calls that have not come "
                    "back are the limit",
                    hint="Wait until the storage answers again",
                )
            left_s = (ticket.began or time.monotonic()) + timeout_s - time.monotonic()
            if not ticket.wait(max(0.0, left_s)):
                raise _unanswered(what, timeout_s, STORAGE_HINT)
        try:
            return ticket.result(0.0, what)
        finally:
            del ticket  # as in `result`

    def close(self) -> None:
        """Drop the work that was not begun, and end each thread as soon as it is idle."""
        with self._change:
            self._is_closed = True
            while self._line:
                self._line.popleft().drop()
            self._change.notify_all()

    def wind_down(self, until: float) -> None:
        """Drop the work that was not begun, and wait for the rest until the monotonic time `until`."""
        while True:
            with self._change:
                while self._line:
                    self._line.popleft().drop()
                busy = self._threads > self._idle
            if not busy or time.monotonic() >= until:
                return
            time.sleep(0.001)

    def _cancel(self, ticket: Ticket[Any]) -> bool:
        """Take work back that no thread has begun; return whether that was so."""
        with self._change:
            if ticket not in self._line:
                return False
            self._line.remove(ticket)
        ticket.drop()
        return True

    def _serve(self) -> None:
        alone = has_team = False
        while True:
            with self._change:
                while not self._line:
                    self._idle += 1
                    called = not self._is_closed and self._change.wait(TEAM_S if has_team else IDLE_S)
                    if not called and has_team:
                        end_team()
                        called, has_team = True, False
                    self._idle -= 1
                    if not called and not self._line:
                        self._threads -= 1
                        return
                ticket = self._line.popleft()
            if not (alone or self._all_cores):
                alone = use_one_thread_here()
            has_team = self._all_cores
            over = ticket.run()
            del ticket  # its outcome may be a large batch, which must not live until the next piece of work
            over.set()


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start work that lasts, such as a heartbeat, in a daemon thread of its own; return the thread.

    Nothing waits for its result, so an error of it goes to the log.

    Raises:
        ResourceError: No thread can be started.
    """

    def run() -> None:
        try:
            work()
        except Exception:
            log.exception("the thread %s ended early", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    launch_thread(thread, name)
    return thread


def launch_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread.

    Args:
        thread: It may be started later where this fails.
        what: Names its work in the error.

    Raises:
        ResourceError: The system allows no further one.
    """
    try:
        thread.start()
    except RuntimeError as error:
        limits = " and ".join(_limits_on_threads())
        raise ResourceError(
            f"no thread can be started for {what} ({error}): this process has "
            f"{threading.active_count()}{limits and ', and is limited to '}{limits}",
            hint="Raise the limits on memory and processes (ulimit -v, ulimit -u, pids.max of a container), "
            "or run less at a time: fewer workers, fewer other processes",
        ) from None


def _limits_on_threads() -> Iterator[str]:
    """Yield the limits of this process that a thread counts for: each has an address range of its own."""
    memory, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    if memory != resource.RLIM_INFINITY:
        yield f"{format_bytes(memory)} of address space (ulimit -v)"
    if processes != resource.RLIM_INFINITY:
        yield f"{format_count(processes)} processes and threads of its user (ulimit -u)"


STORAGE_HINT = "It should within milliseconds; check the mount, or use another folder"


class ItemClock:
    """Restart the timeout of `call_within` with each item that the work begins."""

    def __init__(self) -> None:
        self.latest = (-1, time.monotonic())
        """Number of the latest item, and the monotonic time at which it was begun."""

    def begin(self, number: int) -> None:
        """Note that the work begins item `number`."""
        self.latest = (number, time.monotonic())


def call_within(
    timeout_s: float,
    work: Callable[[], T],
    what: str,
    *,
    hint: str = STORAGE_HINT,
    clock: ItemClock | None = None,
) -> T:
    """Return the result of `work`, run in a thread of its own that is left behind if it does not come back.

    For foreign code and storage in this process. A thread cannot be ended; it is a daemon and holds up no
    exit. Code that keeps the interpreter's lock for ever stops the entire process, and no timeout within it
    can help: run that in a child process.

    Args:
        timeout_s: Seconds for the call, or for each item that `clock` is told of.
        work: Errors that it raises pass through.
        what: Names the work in an error.
        hint: The next step for the reader of the error.
        clock: Told by `work` of each item that it begins.

    Raises:
        StalledError: No result in time. With a clock it names the item and the line of code at which the
            work is.
        ResourceError: No thread can be started.
    """
    ticket = Ticket(work)
    # In a list that the thread empties: as an argument the ticket would outlive the thread's work.
    thread = threading.Thread(target=_run_only, args=([ticket],), name="stoker-call", daemon=True)
    launch_thread(thread, what)
    since, number = time.monotonic(), -1 if clock is None else clock.latest[0]
    while not ticket.wait(max(0.0, since + timeout_s - time.monotonic())):
        if clock is not None and clock.latest[1] > since:
            number, since = clock.latest
        elif clock is None:
            raise _unanswered(what, timeout_s, hint)
        else:
            item = f"item {number}" if number >= 0 else "its first item"
            raise StalledError(
                f"{what}: {item} did not arrive within {timeout_s:g} s; it is at {_lines(thread)}", hint=hint
            )
    try:
        return ticket.result(0.0, what)
    finally:
        del ticket  # as in `result`


def _run_only(tickets: list[Ticket[Any]]) -> None:
    over = tickets.pop().run()
    over.set()


def map_in_order(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    what: str,
    threads: int = MAP_THREADS,
    timeout_s: float = MAP_TIMEOUT_S,
) -> Generator[R]:
    """Yield what `work` makes of each item, in their order, however long each took.

    Working on many files takes long because storage takes long to answer, so a few threads ask at a time.

    Args:
        work: Called by several threads at once.
        items: Taken as they are needed.
        what: Names the work in an error: `reading the shards of ...`.
        threads: How many items are worked on at a time.
        timeout_s: Seconds to wait for one result.

    Raises:
        StalledError: A result was not there in time; says which item's.
        BaseException: The first error of `work`, when it is its item's turn.
    """
    pool = Pool(threads, "stoker-map")
    line: deque[tuple[T, Ticket[R]]] = deque()

    def next_result() -> R:
        item, ticket = line.popleft()
        if not ticket.wait(timeout_s):
            raise StalledError(
                f"{what}: {item} was not done after {timeout_s:g} s",
                hint="The storage behind it does not answer; run it again when it does",
            )
        try:
            return ticket.result(0.0, what)
        finally:
            del ticket  # as in `result`

    try:
        for item in items:
            line.append((item, pool.submit(partial(work, item))))
            if len(line) >= threads * MAP_AHEAD:
                yield next_result()
        while line:
            yield next_result()
    finally:
        pool.close()
        limit = time.monotonic() + min(timeout_s, MAP_CLOSE_S)
        for _, ticket in line:  # the caller may release a lock next
            ticket.wait(max(0.0, limit - time.monotonic()))


def is_exiting() -> bool:
    """Return True if the interpreter is about to exit: long work should end where it can."""
    return _ending.is_set()


def pause(seconds: float) -> None:
    """Sleep, but not beyond the moment at which the interpreter begins to exit."""
    _ending.wait(seconds)


def _unanswered(what: str, timeout_s: float, hint: str) -> StalledError:
    return StalledError(f"{what} did not answer within {timeout_s:g} s", hint=hint)


_looking = threading.Lock()
# A fork waits for whoever looks: the child would have neither that thread nor the garbage collector.
os.register_at_fork(
    before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release
)


def frame_of(thread: int) -> FrameType | None:
    """Return what the thread of this number (`threading.get_ident`) is at; None: it has ended.

    In Python 3.11 a garbage collection inside `sys._current_frames` can stop the entire process. It holds the
    list of threads. A finalizer lets another thread run, and that waits for the list with the interpreter's
    lock. So none is begun there. Source: python/cpython#106883; 3.12 collects elsewhere.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  the documented way
        finally:
            if collects:
                gc.enable()


def _lines(thread: threading.Thread) -> str:
    """Return the innermost calls of a thread, innermost first: often a library's, then its callers."""
    frame = frame_of(thread.ident or 0)
    calls = [] if frame is None else traceback.extract_stack(frame)[-3:]
    return ", called from ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in reversed(calls))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_ending = threading.Event()


def _after_fork() -> None:
    # A lock may have been held by a thread that this process does not have, so all of it is made again, and
    # here, where no second thread can do the same.
    for pool in list(_pools):
        pool._reset()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _wind_down() -> None:
    _ending.set()
    until = time.monotonic() + EXIT_S
    for pool in list(_pools):
        pool.wind_down(until)


# ----------------------------------------------------------------------------------------------------------
# Repeat an operation that may succeed the next time: one loop, with pauses that grow, and limits.


_JITTER = random.SystemRandom()
"""Leaves the global state of `random` alone: a user's program may have seeded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Pauses between attempts, each `factor` times as long as the one before, and when to give up."""

    first_s: float
    longest_s: float = 60.0
    factor: float = 2.0
    jitter: float = 0.0
    """Part of a pause that chance may take away, so that many who failed together do not return together."""
    attempts: int | None = None
    """Attempts at most; None: any number."""
    timeout_s: float | None = None
    """Seconds from the first attempt after which no further one begins; None: any number."""

    def pause_s(self, failures: int, draw: float | None = None) -> float:
        """Return the seconds to wait after so many failed attempts in a row.

        Args:
            failures: 1 or more.
            draw: A number between 0 and 1 in place of a random one, where pauses must be the same each time.

        >>> [RetryPolicy(first_s=0.5, longest_s=3).pause_s(failures) for failures in (1, 2, 3, 4)]
        [0.5, 1.0, 2.0, 3]
        """
        longest = min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 60))
        if not self.jitter:
            return longest
        draw = _JITTER.random() if draw is None else draw
        return longest * (1 - self.jitter * (1 - draw))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One failed attempt, and what has been spent up to then."""

    error: Exception
    attempts: int
    spent_s: float
    pause_s: float
    """Seconds until the next attempt, if there is one."""


def retry(
    operation: Callable[[], T],
    transient: type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool],
    policy: RetryPolicy,
    *,
    asked_pause_s: Callable[[Exception], float] = lambda _: 0.0,
    on_retry: Callable[[FailedAttempt], None] = lambda _: None,
    give_up: Callable[[FailedAttempt], Exception] | None = None,
) -> T:
    """Return what `operation` returns in the end.

    Args:
        operation: One attempt; what it has achieved when it fails may stay.
        transient: Errors after which another attempt may help: types, or a predicate over type and fields.
            Every other error is raised at once.
        policy: Pauses and limits.
        asked_pause_s: The least pause, as far as an error states one, such as a Retry-After.
        on_retry: Gets each failure that is followed by a pause and another attempt.
        give_up: Makes the error to raise, from the last one, when a limit is reached or the process ends.
            None: the last error itself is raised.
    """
    began, failures = time.monotonic(), 0
    while True:
        try:
            return operation()
        except Exception as error:
            retries = (
                isinstance(error, transient) if isinstance(transient, type | tuple) else transient(error)
            )
            if not retries:
                raise
            failures += 1
            spent_s = time.monotonic() - began
            wait_s = max(policy.pause_s(failures), asked_pause_s(error))
            late = policy.timeout_s is not None and spent_s + wait_s > policy.timeout_s
            is_last = failures == policy.attempts or late or is_exiting()
            if is_last and give_up is None:
                raise
            failed = FailedAttempt(error=error, attempts=failures, spent_s=spent_s, pause_s=wait_s)
            try:
                if is_last and give_up is not None:
                    raise give_up(failed) from error
                on_retry(failed)
            finally:
                del failed  # the error keeps this frame, and this has the error: a circle
        pause(wait_s)
