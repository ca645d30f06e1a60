"""What a job's process says about itself: whole lines of JSON at the end of `events.jsonl`.

A line is one `write`, so a kill leaves whole lines, and at most one that was not finished.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from stoker.precompute.progress import Snapshot, line
from stoker.runtime.disk import explained
from stoker.schema import Json

EVERY_S = 1.0
"""Seconds between two lines on how encoding goes, at least."""


class Journal:
    """The file, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
        self.epoch = _end_of(path)
        """The newest epoch that was told of; 0: none."""

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite are null.

        Raises:
            ResourceError: The disk is full.
        """
        text = json.dumps({"kind": kind, "data": _plain(data)}, allow_nan=False, separators=(",", ":"))
        left = text.encode() + b"\n"
        with explained(self._path):
            while left:  # a disk that fills up takes a part, and refuses the next
                left = left[os.write(self._fd, left) :]
        if kind == "metrics":
            self.epoch = max(self.epoch, int(data["epoch"]))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


class EncodingProgress:
    """How encoding goes, as `progress` lines and in the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due = 0.0

    @property
    def interval_s(self) -> float:
        """As often as lines may come."""
        return EVERY_S

    def update(self, snapshot: Snapshot) -> None:
        """A line, if one is due or the last sample is done."""
        if time.monotonic() < self._due and snapshot.done < snapshot.total:
            return
        self._due = time.monotonic() + EVERY_S
        facts = {"message": line(snapshot), "cache": snapshot.name, "encoded": snapshot.done}
        self._journal.tell("progress", {**facts, "samples": snapshot.total})

    def note(self, text: str) -> None:
        """Something that happened."""
        self._journal.tell("progress", {"message": text})

    def close(self) -> None:
        """Nothing is held."""


def _end_of(path: Path) -> int:
    """The newest epoch in a file, whose last line is ended if a kill left it half written."""
    data, epoch = path.read_bytes(), 0
    if data and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for text in data.split(b"\n"):
        if b'"metrics"' in text:
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(text)
                epoch = max(epoch, int(said["data"]["epoch"])) if said["kind"] == "metrics" else epoch
    return epoch


def _plain(value: Any) -> Json:
    """The same for JSON: NaN and infinities as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in cast("Mapping[object, Any]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value
