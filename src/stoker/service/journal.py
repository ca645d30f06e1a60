"""`events.jsonl`: events of a job's process, appended by the process and read by its worker.

A line is `{"kind": ..., "data": {...}}` as Python writes JSON: a number may be `NaN` or `Infinity`, which are
read as null. A line is one `write`, so a kill leaves at most one incomplete line, the last.

Only complete lines are read, and the position in bytes is stored, so that another worker continues there.
A line that cannot be parsed is not dropped: it becomes a note with the beginning of its text.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from stoker.runtime.disk import explain_disk_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stoker.schema import Json

LINE_KINDS = frozenset({"started", "progress", "batch", "metrics", "stall", "completed", "failed"})
LINE_BYTES = 256 * 1024
"""A longer line becomes a note."""
CHUNK_BYTES = 4 * LINE_BYTES
"""Bytes of one read."""
_MAX_INT = 2**31 - 1
_TEXT = 2000
"""Longest text in the row of a job."""
_NUMBERS = frozenset({"progress", "train_loss", "val_loss", "learning_rate", "stall"})
_TEXTS = {"message": _TEXT, "tier": 20, "checkpoint": _TEXT, "error": _TEXT}
SHOWN = (*sorted(_NUMBERS), "epoch", "message", "tier", "checkpoint")
"""Fields of a line that are copied to the row of its job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One event of a job's process."""

    kind: str
    """One of `LINE_KINDS`."""
    data: dict[str, Json]
    """Finite numbers only; others are None."""


class Journal:
    """The file of events, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_disk_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
            end_line(path)
        self.epoch = _newest_epoch(path)
        """The newest epoch with metrics; 0: none."""

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event.

        Raises:
            ResourceError: The disk is full.
        """
        left = json.dumps({"kind": kind, "data": dict(data)}, separators=(",", ":")).encode() + b"\n"
        with explain_disk_errors(self._path):
            while left:  # a disk that fills up takes a part and then fails
                left = left[os.write(self._fd, left) :]
        if kind == "metrics":
            self.epoch = max(self.epoch, int(data["epoch"]))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _newest_epoch(path: Path) -> int:
    epoch, position, before = 0, 0, -1
    while position > before:
        before = position
        lines, position = read_lines(path, position)
        epoch = max([epoch, *(cast("int", line.data["epoch"]) for line in lines if line.kind == "metrics")])
    return epoch


def read_lines(path: Path, position: int) -> tuple[list[Line], int]:
    """Return the complete lines after byte `position`, about 1 MiB at most, and the next position."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return [], position
    try:
        chunk = os.pread(fd, CHUNK_BYTES, position)
    finally:
        os.close(fd)
    end = chunk.rfind(b"\n") + 1
    if not end and len(chunk) == CHUNK_BYTES:  # one longer line: its pieces become notes
        end = len(chunk)
    return [parse(text) for text in chunk[:end].split(b"\n") if text.strip()], position + end


def end_line(path: Path) -> None:
    """End the line that a killed process left incomplete, so that the next process starts a new one.

    The caller must hold the job's lock.
    """
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
        finally:
            os.close(fd)


def parse(text: bytes) -> Line:
    """Return the parsed line, or a note that it cannot be parsed."""
    if len(text) <= LINE_BYTES:
        with suppress(ValueError, RecursionError):
            value: object = json.loads(text, parse_float=_finite, parse_constant=lambda _: None)
            if isinstance(value, dict):
                found = cast("dict[str, Any]", value)
                kind, data = found.get("kind"), found.get("data")
                if kind in LINE_KINDS and isinstance(data, dict):
                    shown = _fitting(cast("dict[str, Any]", data))
                    if kind != "metrics" or isinstance(shown.get("epoch"), int):
                        return Line(kind=str(kind), data=shown)
    start = text[:200].decode(errors="replace")
    return Line(kind="progress", data={"unreadable": start, "unreadable_bytes": len(text)})


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _fitting(data: dict[str, Any]) -> dict[str, Json]:
    """Return the data, with values renamed that do not fit the job's column of their name."""
    kept: dict[str, Json] = {}
    for name, value in data.items():
        if not _fits(name, value):
            kept[f"unreadable_{name}"] = repr(value)[:200]
        elif name in _TEXTS:
            kept[name] = value.replace("\0", "�").encode(errors="replace").decode()[: _TEXTS[name]]
        else:
            kept[name] = value
    if kept.get("progress", 0.0) is None:
        del kept["progress"]
    return kept


def _fits(name: str, value: Any) -> bool:
    if name in _NUMBERS:
        return value is None or (type(value) in (int, float) and abs(value) < 1e300)
    if name == "epoch":
        return type(value) is int and 0 <= value <= _MAX_INT
    return name not in _TEXTS or isinstance(value, str)
