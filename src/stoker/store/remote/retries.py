"""Repeat what may pass, with growing pauses, until a deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stoker.errors import StalledError
from stoker.runtime.retry import FailedAttempt, RetryPolicy, retry
from stoker.runtime.threads import ending
from stoker.store.remote.protocol import PassingError

T = TypeVar("T")
log = logging.getLogger("stoker")

DEADLINE_S = 300.0
"""All attempts of one operation together."""
POLICY = RetryPolicy(first_s=0.1, longest_s=5.0, jitter=0.5)
SAY_AFTER = 4
"""Attempts in a row after which a warning says what does not work."""
SAY_AGAIN_S = 30.0
"""Seconds between two such warnings."""


@dataclass(slots=True)
class Retries:
    """Counts attempts that had to be repeated; one for each mirror."""

    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def run(self, operation: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
        """What `operation` returns in the end.

        Args:
            operation: One attempt; what it has achieved when it fails may stay.
            what: For messages, as `get s3://bucket/x`.
            deadline_s: Seconds from now after which no further attempt begins.
        Raises:
            StalledError: The deadline passed; names the last failure and the number of attempts. Or the
                process ends.
        """
        say_at = 0.0

        def note(failure: FailedAttempt) -> None:
            nonlocal say_at
            with self._lock:
                self.count += 1
            if failure.attempts >= SAY_AFTER and failure.spent_s >= say_at:
                say_at = failure.spent_s + SAY_AGAIN_S
                left_s = deadline_s - failure.spent_s
                text = "%s failed %d times, trying on for %.0f s: %s"
                log.warning(text, what, failure.attempts, left_s, failure.error)

        def give_up(failure: FailedAttempt) -> StalledError:
            if ending():
                return StalledError(f"{what}: the process ends")
            return StalledError(
                f"{what} failed {failure.attempts} times in {failure.spent_s:.1f} s, {deadline_s:g} s are "
                f"allowed: {failure.error}. See whether the store answers and the network holds, then run "
                "again: what arrived is kept"
            )

        return retry(
            operation,
            PassingError,
            replace(POLICY, timeout_s=deadline_s),
            on_retry=note,
            give_up=give_up,
        )
