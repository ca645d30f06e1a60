"""The process that a guardian has started: how it says where it stands, and ends in order.

Its heartbeat page says which stage it is in, since when, and how long that stage may last; outside the
run of a precompute nothing is bounded. Being guarded is a fact about the whole process, so it is kept here
once, and only the command line sets it (`attach`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import dataclass

from stoker.runtime.libc import tie_to_parent
from stoker.runtime.processes.heartbeat import HeartbeatPage

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
