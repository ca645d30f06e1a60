"""SIGTERM and SIGINT as a flag that the loop looks at between two steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from stoker.precompute.interrupts import TOGETHER_S, takes


class StopFlag:
    """Context in which the first signal only sets `signal_name`; a second one acts as it would without us.

    Outside the main thread, where Python allows no handlers, it never sets anything. A signal that the
    program ignores stays ignored.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._since = 0.0

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if takes(number):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self._since = signal.Signals(number).name, now
        elif now - self._since > TOGETHER_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
