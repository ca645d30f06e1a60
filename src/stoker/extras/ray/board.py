"""Where tasks say how far they are: one actor, which holds the latest word of each and no more."""

from __future__ import annotations

from collections import deque
from typing import Any

MOST_NOTES = 1000
"""Notes that wait for the driver; older ones go."""
MOST_VIEWS = 10_000
"""Words that are kept; older ones go, which are of tasks that have ended."""


class Board:
    """An actor on the driver's node. Its state need not be saved: after a restart it gets new reports."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._words = 0

    def tell(self, place: tuple[int, int], view: dict[str, Any]) -> None:
        """A task says how far it is; `place` is its slice and attempt."""
        self._words += 1
        self._views.pop(place, None)
        self._views[place] = self._words, view  # the latest come last
        if len(self._views) > MOST_VIEWS:
            del self._views[next(iter(self._views))]

    def note(self, text: str) -> None:
        """A task says something that a person should read."""
        self._notes.append(text)

    def look(
        self, running: list[tuple[int, int]]
    ) -> tuple[dict[tuple[int, int], tuple[int, dict[str, Any]]], list[str]]:
        """The latest word of each of the tasks `running`, numbered, and notes since the last look."""
        notes = list(self._notes)
        self._notes.clear()
        return {place: self._views[place] for place in running if place in self._views}, notes
