"""Signals during a run, and how a process that a guardian has started ends in order."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from stoker.errors import Interrupted, StalledError
from stoker.runtime.libc import tie_to_parent
from stoker.runtime.processes.heartbeat import HeartbeatPage

TOGETHER_S = 0.3
"""Signals this close are one request: one to a whole group reaches a child twice, by its guardian as well."""
_EXIT_INTERRUPTED = 130
_STALL = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else 0
"""A signal that nothing else is likely to use, so one of a user is not taken for it; 0: not found."""


def takes(number: int) -> bool:
    """Return True if a call may handle a signal.

    False if the signal is ignored, as a shell does with SIGINT for jobs in its background. False if C code
    handles it: Python cannot restore such a handler.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


class Interrupts:
    """Catches both signals while entered, in the main thread only; elsewhere it never fires.

    A signal that the program ignores stays ignored. `fd` becomes readable at the first signal, so that a poll
    ends at once. `patient`: a second signal changes nothing, where the sender repeats the first, and none is
    ignored.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self.fd = -1
        self.signal: signal.Signals | None = None
        """The first signal that arrived, or None."""
        self._previous: dict[int, Any] = {}
        self._write_fd = -1
        self._since = 0.0
        self._raises = False
        self._stall: tuple[str, Callable[[], bool]] | None = None
        self._stalled = ""
        """Why what is done was ended, between the signal of `stall` and its error."""

    @contextmanager
    def raising(self) -> Generator[None]:
        """Have a signal end what is done while entered, as a KeyboardInterrupt does.

        For what may take long, cannot look at `signal`, and leaves nothing half done. Code that catches
        every Exception, as reading samples does, lets it pass.

        Raises:
            Interrupted: One came.
            StalledError: Another thread called `stall`.
        """
        try:
            try:
                self._raises, self._stalled = True, ""
                if self.signal is not None:
                    raise KeyboardInterrupt
                yield
            finally:
                self._raises = False
        except KeyboardInterrupt:
            if self.signal is not None:
                raise Interrupted(f"stopped by {self.signal.name}. Run it again to resume") from None
            why, self._stalled = self._stalled, ""
            if why:
                raise StalledError(why) from None
            raise

    @property
    def can_stall(self) -> bool:
        """`stall` has an effect: signals are caught, in the main thread."""
        return _STALL in self._previous

    def stall(self, why: str, still: Callable[[], bool]) -> None:
        """End what is done within `raising`; for another thread, which has seen that it hangs.

        Code in C that neither waits in the kernel nor lets Python look at signals is not ended.

        Args:
            why: The message of the error.
            still: Asked in the main thread when the signal has arrived; False: it hangs no longer.
        """
        if self.can_stall:
            self._stall = why, still
            signal.pthread_kill(threading.main_thread().ident or 0, _STALL)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for number in (signal.SIGINT, signal.SIGTERM):
                if self._patient or takes(number):
                    self._previous[number] = signal.signal(number, self._arrived)
            if _STALL and takes(_STALL):
                self._previous[_STALL] = signal.signal(_STALL, self._stall_arrived)
        return self

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if not self._patient and now - self._since > TOGETHER_S:
                os._exit(_EXIT_INTERRUPTED)  # committed shards stay complete; workers die with us
            return
        self.signal, self._since = signal.Signals(number), now
        os.write(self._write_fd, b"x")
        if self._raises:
            raise KeyboardInterrupt

    def _stall_arrived(self, _number: int, _frame: FrameType | None) -> None:
        asked, self._stall = self._stall, None
        if asked is not None and self._raises and asked[1]():
            self._stalled = asked[0]
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        previous, self._previous = self._previous, {}  # nobody sends `stall` from now on
        for number, handler in previous.items():
            signal.signal(number, handler)
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write_fd)
            self.fd = self._write_fd = -1


# ----------------------------------------------------------------------------------------------------------
# The process that a guardian has started: how it says where it stands, and ends in order.
#
# Its heartbeat page says which stage it is in, since when, and how long that stage may last; outside the
# run of a precompute nothing is bounded. Being guarded is a fact about the whole process, so it is kept
# here once, and only the command line sets it (`attach`).


GUARD_VARIABLE = "STOKER_GUARD"
"""Environment variable by which a guardian passes a `Lifeline`; read by the command line."""
EXIT_S = 120.0
"""How long a process may take to end once it has done its work: trackers send what they still hold."""
_page: HeartbeatPage | None = None
_started_ns = (
    time.monotonic_ns()
)  # the kernel's start time of a process would count what a shell did before `exec`
_notes_fd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifeline:
    """What a guardian hands to its child."""

    page_fd: int
    """The heartbeat page."""
    stack_fd: int
    """Where stacks go, on a crash and at SIGUSR1."""
    notes_fd: int
    """What the children of this command did once and for all, a line each."""
    parent: int
    """The guardian's process id."""
    started_ns: int
    """When the command began, on the clock of `time.monotonic_ns`."""

    def to_text(self) -> str:
        """For the environment."""
        return f"{self.page_fd} {self.stack_fd} {self.notes_fd} {self.parent} {self.started_ns}"

    @classmethod
    def from_text(cls, text: str) -> Lifeline:
        """Return what `to_text` wrote."""
        page_fd, stack_fd, notes_fd, parent, started_ns = map(int, text.split())
        return cls(
            page_fd=page_fd, stack_fd=stack_fd, notes_fd=notes_fd, parent=parent, started_ns=started_ns
        )


def attach(lifeline: Lifeline) -> None:
    """Make this process a guarded one: it ends in order when its guardian dies, and says where it stands."""
    global _page, _notes_fd, _started_ns  # noqa: PLW0603  being guarded is a fact about the process
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the guardian waits for signals with all of them blocked
    for fd in (lifeline.page_fd, lifeline.stack_fd, lifeline.notes_fd):
        os.set_inheritable(fd, False)  # workers must not hold them
    tie_to_parent(signal.SIGTERM, lifeline.parent)
    faulthandler.enable(file=lifeline.stack_fd)
    faulthandler.register(signal.SIGUSR1, file=lifeline.stack_fd, all_threads=True, chain=False)
    _page = HeartbeatPage(lifeline.page_fd)
    _notes_fd = lifeline.notes_fd
    _started_ns = lifeline.started_ns


def guard_page() -> HeartbeatPage | None:
    """Return the page of this process, or None without a guardian."""
    return _page


def started_ns() -> int:
    """Return when this command began, on the clock of `time.monotonic_ns`: when its guardian did."""
    return _started_ns


def first_time(what: str) -> bool:
    """Return whether no process of this command did `what` (one line) yet, and note that it is done now.

    A guardian starts the command again with the same words, and not all of them are to be done twice.
    Without a guardian every time is the first.
    """
    if _notes_fd is None:
        return True
    size = os.fstat(_notes_fd).st_size
    if what in os.pread(_notes_fd, size, 0).decode().splitlines():
        return False
    os.pwrite(_notes_fd, f"{what}\n".encode(), size)
    return True


def say_end(code: int) -> None:
    """Tell the guardian that only the end is left, which a thread that hangs in a write would hold up."""
    if _page is not None and _page.look().stage != "lost":  # which is what it needs to know then
        _page.write("end", code, limit_s=EXIT_S)
