"""Metrics of a run: one JSON object per line, readable while it grows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.runtime.disk import explained
from stoker.runtime.files import replacing
from stoker.schema import Json


class MetricsLog:
    """`metrics.jsonl` of a run: lines of kind `start`, `step` and `epoch`. `writes`: true on rank 0 alone."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes

    def append(self, row: Mapping[str, Json]) -> None:
        """Add a line; numbers that JSON cannot hold become null.

        Raises:
            ResourceError: No space is left.
            ReadOnlyError: The file cannot be written.
        """
        if not self._writes:
            return
        line = json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False)
        with explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All lines; one that a kill left half-written is passed over."""
        if not self.path.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)  # pyright: ignore[reportUnknownArgumentType] -- JSON
        return rows

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other lines: those that a resumed run is about to write again."""
        if not self._writes:
            return
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows() if wanted(row))
        with replacing(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _finite(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value
