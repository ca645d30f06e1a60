"""What may take long to find out, or hang: asked for in a thread of its own, and remembered.

A file system or a driver that does not answer cannot be interrupted. Whoever wants to know gets what was
known last, with its age and with what is wrong, and one thread hangs however often it is asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stoker.errors import StalledError, StokerError
from stoker.runtime.threads import Pool

log = logging.getLogger("stoker")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
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
        self._changed = threading.Condition()
        self._asking = False
        self._asked_at = 0.0
        self._value: T | None = None
        self._found_at = 0.0
        self._tried = -1.0
        """When the last attempt that has ended began."""
        self._error: StokerError | None = None

    def get(self) -> Known[T]:
        """As it is now, if that can be found out in time; else as it was."""
        now = time.monotonic()
        with self._changed:
            hangs = self._asking and now - self._asked_at > self._wait_s  # others have waited that long
            in_time = self._changed.wait_for(lambda: self._is_of(now), 0.0 if hangs else self._wait_s)
            error = self._error if in_time else self._stalled()
            if error is None:
                return Known(self._value, 0.0, None)
            return Known(
                self._value, 0.0 if self._value is None else time.monotonic() - self._found_at, error
            )

    def _is_of(self, now: float) -> bool:
        """Whether it was asked for after `now`, and came to an end; begins that where nobody does."""
        if self._tried >= now:
            return True
        if not self._asking:
            try:
                threading.Thread(target=self._find_out, name=f"stoker-{self._what}", daemon=True).start()
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


class Patience:
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
