"""The board: one actor that holds the latest report of each task, and no more.

A module of its own, so that the actor's process imports nothing but this: it starts at once, without torch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

MOST_NOTES = 1000
"""Notes that wait for the driver; older ones are dropped."""
MOST_REPORTS = 10_000
"""Reports that are kept; older ones, of tasks that have ended, are dropped."""


class Board:
    """An actor on the driver's node. Its state need not be saved: after a restart it gets new reports."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._count = 0

    def report(self, key: tuple[int, int], report: dict[str, Any]) -> None:
        """Store how far a task is; `key` is its slice and attempt."""
        self._count += 1
        self._reports.pop(key, None)
        self._reports[key] = self._count, report  # the latest come last
        if len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]

    def note(self, text: str) -> None:
        """Store a message of a task for people."""
        self._notes.append(text)

    def read(
        self, running: list[tuple[int, int]]
    ) -> tuple[dict[tuple[int, int], tuple[int, dict[str, Any]]], list[str]]:
        """Return the latest report of each of the tasks `running`, numbered, and new notes."""
        notes = list(self._notes)
        self._notes.clear()
        return {key: self._reports[key] for key in running if key in self._reports}, notes
