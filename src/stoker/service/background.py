"""What may take long to find out, or hang: asked for in a thread of its own, and remembered.

A file system or a driver that does not answer cannot be interrupted. Whoever wants to know gets what was
known last, with its age and with what is wrong, and one thread hangs however often it is asked.
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
class LastKnown(Generic[T]):
    """What is known of something."""

    value: T | None
    """None: it was never found out."""
    age_s: float
    """Since it was asked for; 0: it is as it is now."""
    error: StokerError | None
    """Why it is not of now; None: it is."""

    @property
    def stale(self) -> str | None:
        """In words what is wrong and how old this is; None: it is of now."""
        if self.error is None:
            return None
        return f"{self.error}" if self.value is None else f"{self.error} (as it was {self.age_s:.0f} s ago)"

    def needed(self) -> T:
        """The value, of whatever age.

        Raises:
            StokerError: It was never found out.
        """
        if self.value is None:
            assert self.error is not None, "what was found out is kept"
            raise self.error
        return self.value


class Recent(Generic[T]):
    """One thing that is asked for again and again, by any number of threads.

    Args:
        ask: Finds it out, in however long.
        what: Its name, for errors.
        wait_s: How long anybody waits for it.
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
        """When the last attempt that has ended began."""
        self._error: StokerError | None = None

    def get(self) -> LastKnown[T]:
        """As it is now, if that can be found out in time; else as it was."""
        now = time.monotonic()
        with self._changed:
            hangs = self._asking and now - self._asked_at > self._wait_s  # others have waited that long
            in_time = self._changed.wait_for(lambda: self._is_of(now), 0.0 if hangs else self._wait_s)
            error = self._error if in_time else self._stalled()
            if error is None:
                return LastKnown(self._value, 0.0, None)
            return LastKnown(
                self._value, 0.0 if self._value is None else time.monotonic() - self._found_at, error
            )

    def _is_of(self, now: float) -> bool:
        """Whether it was asked for after `now`, and came to an end; begins that where nobody does."""
        if self._tried >= now:
            return True
        if not self._asking:
            try:
                self._pool.submit(self._find_out)
            except RuntimeError as error:  # no thread can be started
                self._tried = time.monotonic()
                self._error = StalledError(f"{self._what} cannot be asked now: {error}. Ask again later")
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
            log.exception("%s cannot be found out", self._what)
            error = StalledError(f"{self._what}: unexpected {type(unforeseen).__name__}; the log has it")
        with self._changed:
            if error is None:
                self._value, self._found_at = value, began
            self._error, self._tried, self._asking = error, began, False
            self._changed.notify_all()

    def _stalled(self) -> StalledError:
        return StalledError(
            f"{self._what} did not answer within {self._wait_s:g} s. It is asked again automatically; look "
            "whether its storage or driver hangs"
        )


class TimedCalls:
    """Ask questions of any kind, each with a timeout; one that hangs counts against the limit.

    Args:
        at_once: Questions at most.
        wait_s: How long an answer may take, and how long a free thread is waited for.
    """

    def __init__(self, *, at_once: int, wait_s: float) -> None:
        self._pool = Pool(at_once, "stoker-look")
        self._wait_s = wait_s

    def ask(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work`; errors as `Pool.call_within`."""
        return self._pool.call_within(self._wait_s, work, what)


# ----------------------------------------------------------------------------------------------------------
# Work that may take longer than an answer: begun by one request, looked at by others.
#
# Two threads at most do it. A thread that hangs (storage that does not answer) cannot be ended: its work is
# answered as stalled at its deadline, and when both hang, more work is refused until one comes back.


AT_ONCE = 2
KEPT = 64
"""Ended operations that can still be looked at; the oldest goes first."""
DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One piece of work as it stood at one moment."""

    id: str
    what: str
    """What is done to which thing."""
    state: str = "running"
    """`running`, `completed` or `failed`."""
    seconds: float = 0.0
    result: dict[str, Json] | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Running:
    operation: Operation
    done: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    began: float = field(default_factory=time.monotonic)


class Operations:
    """Begins work and remembers how it ended, for as long as this process lives."""

    def __init__(self, *, at_once: int = AT_ONCE, deadline_s: float = DEADLINE_S) -> None:
        self._at_once = at_once
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._all: dict[str, _Running] = {}
        self._threads = 0
        self._pool = Pool(at_once, "stoker-operation")

    def start(
        self, what: str, work: Callable[[], dict[str, Json]], *, wait_s: float = 0.0, raises: bool = False
    ) -> Operation:
        """Begin, and wait up to `wait_s` for the end.

        Args:
            what: What is done to which thing.
            work: Does it.
            wait_s: How long to wait.
            raises: Raise what `work` raised within that time, in place of an operation that failed. Work that
                has ended by then is not remembered: the caller knows how.
        Raises:
            Conflict: The same is being done already, or the limit of operations is reached.
        """
        with self._lock:
            if any(one.operation.what == what and not one.done.is_set() for one in self._all.values()):
                raise ConflictError(f"it is being done already: {what}. Wait for that one")
            if self._threads >= self._at_once:
                raise ConflictError(
                    f"{self._threads} operations are running, which is the limit. Wait for one to end"
                )
            self._threads += 1
            running = _Running(Operation(id=secrets.token_hex(8), what=what))
            self._all[running.operation.id] = running
            ended = [name for name, one in self._all.items() if one.done.is_set()]
            for name in ended[: max(0, len(self._all) - KEPT)]:
                del self._all[name]
        try:
            self._pool.submit(partial(self._run, running, work))
        except RuntimeError as error:  # no thread can be started: the place is free again
            with self._lock:
                self._threads -= 1
                del self._all[running.operation.id]
            raise ResourceError(f"{what} cannot be begun: {error}. Ask again later") from None
        running.done.wait(min(wait_s, self._deadline_s))
        if raises and running.done.is_set():
            with self._lock:
                self._all.pop(running.operation.id, None)
            if running.failure is not None:
                raise running.failure
        return self._look(running)

    def get(self, id: str) -> Operation:
        """How one stands.

        Raises:
            NotFound: None of that id, or too long ago.
        """
        with self._lock:
            running = self._all.get(id)
        if running is None:
            raise NotFoundError(f"there is no operation {id!r}; those that ended are kept for a while only")
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
            self._threads -= 1
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
        if seconds < self._deadline_s:
            return replace(found, seconds=seconds)
        stalled = f"not done after {self._deadline_s:,.0f} s. Look whether its storage answers"
        return replace(found, seconds=seconds, state="failed", error=stalled)
