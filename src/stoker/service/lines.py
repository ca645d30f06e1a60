"""What a job's process says about itself: lines of JSON, `{"kind": ..., "data": {...}}`, appended to a file.

The reader takes whole lines only and remembers how far it came in bytes, so that another worker goes on where
it stopped. A line that is none is not dropped: it comes out as a note with the beginning of its text.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.schema import Json

KINDS = frozenset({"started", "progress", "batch", "metrics", "completed", "failed"})
LINE_BYTES = 256 * 1024
"""A longer line is noted, not read."""
CHUNK_BYTES = 4 * LINE_BYTES
"""Read at once."""
_MAX_INT = 2**31 - 1
_TEXT = 2000
"""Characters kept of a text that is shown in the row of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that a job's process said."""

    kind: str
    """One of `KINDS`."""
    data: dict[str, Json]
    """Finite numbers only: where one was not, None."""


def read_lines(path: Path, position: int) -> tuple[list[Line], int]:
    """The whole lines that follow byte `position`, about a MiB of them at most, and where the next begins."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return [], position
    try:
        chunk = os.pread(fd, CHUNK_BYTES, position)
    finally:
        os.close(fd)
    end = chunk.rfind(b"\n") + 1
    if not end and len(chunk) == CHUNK_BYTES:  # one line longer than all that: its pieces are noted
        end = len(chunk)
    return [parse(text) for text in chunk[:end].split(b"\n") if text.strip()], position + end


def end_line(path: Path) -> None:
    """End the line that a killed process left half written, so that the next one begins a line of its own.

    Only who holds the job's lock may do it.
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
    """The line that `text` is, or a note that it is none."""
    if len(text) <= LINE_BYTES:
        with suppress(ValueError, RecursionError):
            value: object = json.loads(text, parse_float=_finite, parse_constant=lambda _: None)
            if isinstance(value, dict):
                found = cast("dict[str, Any]", value)
                kind, data = found.get("kind"), found.get("data")
                if kind in KINDS and isinstance(data, dict):
                    shown = _fitting(cast("dict[str, Any]", data))
                    if kind != "metrics" or isinstance(shown.get("epoch"), int):
                        return Line(kind=str(kind), data=shown)
    start = text[:200].decode(errors="replace")
    return Line(kind="progress", data={"unreadable": start, "unreadable_bytes": len(text)})


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _fitting(data: dict[str, Any]) -> dict[str, Json]:
    """The same, without values under the names of a job's columns that do not fit there."""
    kept: dict[str, Json] = {}
    for name, value in data.items():
        fits = True
        if name in _NUMBERS:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = value is None or (is_number and abs(value) < 1e300)
        elif name == "epoch":
            fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT
        elif name in _TEXTS:
            fits = isinstance(value, str)
        kept[name if fits else f"unreadable_{name}"] = _shortened(name, value) if fits else repr(value)[:200]
    if kept.get("progress", 0.0) is None:
        del kept["progress"]
    return kept


def _shortened(name: str, value: Any) -> Any:
    if name not in _TEXTS:
        return value
    return value.replace("\0", "�").encode(errors="replace").decode()[: _TEXTS[name]]


_NUMBERS = frozenset({"progress", "train_loss", "val_loss", "learning_rate", "stall"})
_TEXTS = {"message": _TEXT, "tier": 20, "checkpoint": _TEXT, "error": _TEXT}
SHOWN = (*sorted(_NUMBERS), "epoch", "message", "tier", "checkpoint")
"""What a line sets in the row of its job, under the same name."""
