"""Repeat an operation that may succeed the next time: one loop, with pauses that grow, and limits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stoker.runtime.threads import is_exiting, pause

T = TypeVar("T")


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
        draw = random.random() if draw is None else draw  # noqa: S311 - no secret
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
