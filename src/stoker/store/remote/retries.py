"""Repeat what may pass, with growing pauses, until a deadline."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stoker.errors import StalledError
from stoker.runtime.threads import ending
from stoker.store.remote.protocol import PassingError

T = TypeVar("T")
log = logging.getLogger("stoker")

DEADLINE_S = 300.0
"""All attempts of one operation together."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 5.0
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
        began, attempts, say_at = time.monotonic(), 0, 0.0
        while True:
            attempts += 1
            try:
                return operation()
            except PassingError as error:
                pause = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempts, 20))
                pause *= random.uniform(0.5, 1)  # noqa: S311 -- so that many do not come back together
                spent = time.monotonic() - began
                if spent + pause > deadline_s:
                    raise StalledError(
                        f"{what} failed {attempts} times in {spent:.1f} s, {deadline_s:g} s are allowed: "
                        f"{error}. See whether the store answers and the network holds, then run again: what "
                        "arrived is kept"
                    ) from error
                with self._lock:
                    self.count += 1
                if attempts >= SAY_AFTER and spent >= say_at:
                    say_at = spent + SAY_AGAIN_S
                    left_s = deadline_s - spent
                    log.warning("%s failed %d times, trying on for %.0f s: %s", what, attempts, left_s, error)
                if ending():
                    raise StalledError(f"{what}: the process ends") from error
                time.sleep(pause)
