"""Run calls that may take long or hang in background threads, and remember their results.

A call to a file system or driver that does not answer cannot be interrupted. Callers then get the last known
value with its age and the error, and only one thread hangs however many callers there are.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from stoker.errors import ConflictError, NotFoundError, ResourceError, StalledError, StokerError
from stoker.runtime.threads import Pool

if TYPE_CHECKING:
    from stoker.schema import Json


log = logging.getLogger("stoker")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedValue(Generic[T]):
    """A value and how current it is."""

    value: T | None
    """None: it was never read."""
    age_s: float
    """Seconds since the value was read; 0: it is current."""
    error: StokerError | None
    """Why the value is not current; None: it is."""

    @property
    def stale(self) -> str | None:
        """The error and the age of the value in words; None: it is current."""
        if self.error is None:
            return None
        return f"{self.error}" if self.value is None else f"{self.error} (as it was {self.age_s:.0f} s ago)"

    def needed(self) -> T:
        """Return the value, whatever its age.

        Raises:
            StokerError: It was never read.
        """
        if self.value is None:
            assert self.error is not None, "without a value there is an error"
            raise self.error
        return self.value


class CachedValue(Generic[T]):
    """A value that any number of threads ask for repeatedly, and that may take long to read.

    Args:
        ask: Reads the value; may take any time.
        what: Its name, for errors.
        wait_s: How long a caller waits for a current value.
    """

    def __init__(self, ask: Callable[[], T], what: str, *, wait_s: float) -> None:
        self._ask, self._what, self._wait_s = ask, what, wait_s
        self._pool = Pool(1, f"stoker-{what}")
        self._changed = threading.Condition()
        self._asking = False
        self._asked_at = 0.0
        self._value: T | None = None
        self._found_at = 0.0
        self._tried = -1.0
        """When the last finished attempt began."""
        self._error: StokerError | None = None

    def get(self) -> TimedValue[T]:
        """Return the current value if it can be read in time, otherwise the last known one."""
        now = time.monotonic()
        with self._changed:
            hangs = self._asking and now - self._asked_at > self._wait_s  # others waited that long
            in_time = self._changed.wait_for(lambda: self._is_of(now), 0.0 if hangs else self._wait_s)
            error = self._error if in_time else self._stalled()
            if error is None:
                return TimedValue(self._value, 0.0, None)
            return TimedValue(
                self._value, 0.0 if self._value is None else time.monotonic() - self._found_at, error
            )

    def _is_of(self, now: float) -> bool:
        """Return True if an attempt that began after `now` has ended; start one if none is running."""
        if self._tried >= now:
            return True
        if not self._asking:
            try:
                self._pool.submit(self._find_out, self._what)
            except ResourceError as error:  # no thread can be started
                self._tried, self._error = time.monotonic(), error
                return True
            self._asking, self._asked_at = True, time.monotonic()
        return False

    def _find_out(self) -> None:
        began = time.monotonic()
        value: T | None = None
        error: StokerError | None = None
        try:
            value = self._ask()
        except StokerError as refused:
            error = refused
        except Exception as unforeseen:  # the edge of the thread
            log.exception("%s cannot be read", self._what)
            error = StalledError(f"{self._what}: unexpected {type(unforeseen).__name__}; the log has it")
        with self._changed:
            if error is None:
                self._value, self._found_at = value, began
            self._error, self._tried, self._asking = error, began, False
            self._changed.notify_all()

    def _stalled(self) -> StalledError:
        return StalledError(
            f"{self._what} did not answer within {self._wait_s:g} s. It is asked again automatically",
            hint="Check whether its storage or driver hangs",
        )


# ----------------------------------------------------------------------------------------------------------
# Work that may take longer than a request: one request starts it, others ask for its state.
#
# At most two threads run it. A thread that hangs (storage that does not answer) cannot be ended: its work is
# reported as stalled after the timeout. While both hang, more work is refused.


AT_ONCE = 2
KEPT = 64
"""Ended operations that can still be looked at; the oldest goes first."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The state of one piece of work at one moment."""

    id: str
    what: str
    """Names the work and its object."""
    state: str = "running"
    """`running`, `completed` or `failed`."""
    seconds: float = 0.0
    result: dict[str, Json] | None = None
    error: str | None = None
    done: int | None = None
    """Parts of the work that are done; None: unknown."""
    total: int | None = None
    """Parts in total."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far some work is; `tell` may be called in any thread."""

    done: int | None = None
    total: int | None = None
    told: float = 0.0
    """Monotonic time of the last report."""
    ended: str = ""
    """Why the work is not wanted any more; empty: it is."""

    def tell(self, done: int, total: int) -> None:
        """Report it.

        Raises:
            ConflictError: The work is not wanted any more (`Operations.end`).
        """
        if self.ended:
            raise ConflictError(self.ended)
        self.done, self.total, self.told = done, total, time.monotonic()


@dataclass(slots=True, eq=False)
class _Running:
    operation: Operation
    done: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    began: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)


class Operations:
    """Starts work and remembers its outcome while this process lives."""

    def __init__(self, *, at_once: int = AT_ONCE, timeout_s: float = TIMEOUT_S) -> None:
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._all: dict[str, _Running] = {}
        self._pool = Pool(at_once, "stoker-operation")

    def start(
        self,
        what: str,
        work: Callable[[], dict[str, Json]],
        *,
        wait_s: float = 0.0,
        raises: bool = False,
        progress: Progress | None = None,
    ) -> Operation:
        """Start work and wait up to `wait_s` for its end; return its state.

        Args:
            what: Names the work and its object.
            work: Does it.
            wait_s: How long to wait.
            raises: Raise the error of `work` if it fails within that time. Work that has ended by then is not
                remembered, since the caller knows its outcome.
            progress: Where `work` reports how far it is. Its limit of time counts from the last report on.
        Raises:
            ConflictError: The same work is running already, or the limit of operations is reached.
            ResourceError: No thread can be started.
        """
        with self._lock:
            begun = [one.operation.what for one in self._all.values() if not one.done.is_set()]
            if what in begun:
                raise ConflictError(f"this is running already: {what}", hint="Wait for its end")
            if len(begun) >= self._at_once:
                raise ConflictError(
                    f"{len(begun)} operations are running, which is the limit", hint="Wait for one to end"
                )
            running = _Running(Operation(id=secrets.token_hex(8), what=what), progress=progress or Progress())
            self._all[running.operation.id] = running
            ended = [name for name, one in self._all.items() if one.done.is_set()]
            for name in ended[: max(0, len(self._all) - KEPT)]:
                del self._all[name]
        try:
            self._pool.submit(partial(self._run, running, work), what)
        except ResourceError:  # no thread can be started, so the slot is free again
            with self._lock:
                del self._all[running.operation.id]
            raise
        running.done.wait(min(wait_s, self._timeout_s))
        if raises and running.done.is_set():
            with self._lock:
                self._all.pop(running.operation.id, None)
            if running.failure is not None:
                raise running.failure
        return self._look(running)

    def find(self, what: str) -> Operation | None:
        """Return the operation of that name that runs now, or None."""
        with self._lock:
            named = [one for one in self._all.values() if one.operation.what == what]
        running = next((one for one in named if not one.done.is_set()), None)
        return None if running is None else self._look(running)

    def end(self, what: str, why: str) -> None:
        """End the operation of that name, if it runs, at its next report of progress."""
        with self._lock:
            for one in self._all.values():
                if one.operation.what == what:
                    one.progress.ended = why

    def get(self, id: str) -> Operation:
        """Return the state of one operation.

        Raises:
            NotFoundError: No operation has that id, or it ended too long ago.
        """
        with self._lock:
            running = self._all.get(id)
        if running is None:
            raise NotFoundError(f"operation {id!r} does not exist; only the last {KEPT} that ended are kept")
        return self._look(running)

    def _run(self, running: _Running, work: Callable[[], dict[str, Json]]) -> None:
        result: dict[str, Json] | None = None
        error: str | None = None
        try:
            result = work()
        except StokerError as refused:
            running.failure, error = refused, str(refused)
        except Exception as unforeseen:
            log.exception("%s failed", running.operation.what)
            running.failure = unforeseen
            error = f"unexpected {type(unforeseen).__name__}; the service's log has it"
        state = "failed" if error else "completed"
        with self._lock:
            running.operation = replace(
                running.operation,
                state=state,
                result=result,
                error=error,
                seconds=time.monotonic() - running.began,
            )
        running.done.set()

    def _look(self, running: _Running) -> Operation:
        with self._lock:
            found = running.operation
        if found.state != "running":
            return found
        seconds = time.monotonic() - running.began
        found = replace(found, done=running.progress.done, total=running.progress.total)
        if time.monotonic() - max(running.began, running.progress.told) < self._timeout_s:
            return replace(found, seconds=seconds)
        stalled = f"not done after {self._timeout_s:,.0f} s. Check whether its storage answers"
        return replace(found, seconds=seconds, state="failed", error=stalled)


class Trouble:
    """Why the service is degraded now, by part of it; safe to share between threads."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def note(self, part: str, why: str | None) -> None:
        """Note why a part does not work; None: it works."""
        if why is not None:
            self._why = {**self._why, part: why}
        elif part in self._why:
            self._why = {other: text for other, text in self._why.items() if other != part}

    @property
    def why(self) -> str | None:
        """All reasons together; None: the service works."""
        return "; ".join(dict.fromkeys(self._why.values())) or None
