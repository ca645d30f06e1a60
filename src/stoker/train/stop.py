"""SIGTERM and SIGINT as a flag that the loop looks at between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopFlag:
    """Context in which the first signal only sets `signal_name`; a second one acts as it would without us.

    Outside the main thread, where Python allows no handlers, it never sets anything.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
