"""SIGINT and SIGTERM during a run: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from stoker.errors import Interrupted

TOGETHER_S = 0.3
"""Signals this close are one request: one to a whole group reaches a child twice, by its guardian as well."""
_EXIT_INTERRUPTED = 130


def takes(number: signal.Signals) -> bool:
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
        self._previous: dict[signal.Signals, Any] = {}
        self._write_fd = -1
        self._since = 0.0
        self._raises = False

    @contextmanager
    def raising(self) -> Generator[None]:
        """Have a signal end what is done while entered, as a KeyboardInterrupt does.

        For what may take long, cannot look at `signal`, and leaves nothing half done. Code that catches
        every Exception, as reading samples does, lets it pass.

        Raises:
            Interrupted: One came.
        """
        try:
            try:
                self._raises = True
                if self.signal is not None:
                    raise KeyboardInterrupt
                yield
            finally:
                self._raises = False
        except KeyboardInterrupt:
            if self.signal is None:
                raise
            raise Interrupted(f"stopped by {self.signal.name}. Run it again to resume") from None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for number in (signal.SIGINT, signal.SIGTERM):
                if self._patient or takes(number):
                    self._previous[number] = signal.signal(number, self._arrived)
        return self

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if not self._patient and now - self._since > TOGETHER_S:
                os._exit(_EXIT_INTERRUPTED)  # sealed shards are whole whatever happens; workers die with us
            return
        self.signal, self._since = signal.Signals(number), now
        os.write(self._write_fd, b"x")
        if self._raises:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write_fd)
            self.fd = self._write_fd = -1
