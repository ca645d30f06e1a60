"""Whether a process still moves: by its heartbeat, and by what the kernel has read for it.

A large sample over slow storage is one call for the reader, without a beat for minutes. The kernel's count of
bytes read tells it from one that hangs. Spinning on a file that never ends would look the same, so there is a
last moment all the same.
"""

from __future__ import annotations

from pathlib import Path

MOST_DEADLINES = 10
"""Deadlines that one stage of one sample may last at most, however much is read meanwhile."""


class Patience:
    """When a process must have moved.

    Half a deadline without a beat, and its bytes are looked at for the first time; then every half. So it is
    overdue one deadline after its last byte at the latest.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/io")
        self._since = float("nan")
        self._due = 0.0
        self._bytes = -1

    def due(self, since: float, limit_s: float) -> float:
        """When to look at it; `since` is when it last moved by its own word. `time.monotonic()` seconds."""
        if since != self._since:
            self._since, self._due, self._bytes = since, since + limit_s / 2, -1
        return self._due

    def overdue(self, limit_s: float, now: float) -> bool:
        """Asked when `due` has passed: whether it hangs. If not, `due` is later now."""
        count = self._count()
        if self._bytes < 0:  # where we look late, it still gets a moment to show that it moves
            self._due = max(self._since + limit_s, now + limit_s / 4)
        elif count > self._bytes and now < self._since + MOST_DEADLINES * limit_s:
            self._due = now + limit_s / 2
        else:
            return True
        self._bytes = count
        return False

    def _count(self) -> int:
        """Bytes of files, pipes and pages read so far; 0 where the kernel does not say."""
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split(": ") for line in lines)
        return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))
