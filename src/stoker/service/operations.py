"""Work that may take longer than an answer: begun by one request, looked at by others.

Two threads at most do it. A thread that hangs (storage that does not answer) cannot be ended: its work is
answered as stalled at its deadline, and when both hang, more work is refused until one comes back.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker.errors import Conflict, NotFound, ResourceError, StokerError

if TYPE_CHECKING:
    from stoker.schema import Json

log = logging.getLogger("stoker")
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
                raise Conflict(f"it is being done already: {what}. Wait for that one")
            if self._threads >= self._at_once:
                raise Conflict(
                    f"{self._threads} operations are running, which is the limit. Wait for one to end"
                )
            self._threads += 1
            running = _Running(Operation(id=secrets.token_hex(8), what=what))
            self._all[running.operation.id] = running
            ended = [name for name, one in self._all.items() if one.done.is_set()]
            for name in ended[: max(0, len(self._all) - KEPT)]:
                del self._all[name]
        try:
            threading.Thread(target=self._run, args=(running, work), name=what, daemon=True).start()
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
            raise NotFound(f"there is no operation {id!r}; those that ended are kept for a while only")
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
