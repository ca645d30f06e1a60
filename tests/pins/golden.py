"""Golden values: a JSON file for each kind of pin, a line for each case, so that a diff names the case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def load(kind: str) -> dict[str, Any]:
    """Return the golden values of one kind, by case."""
    return json.loads((FOLDER / f"{kind}.json").read_text())


def save(kind: str, values: Mapping[str, Any]) -> None:
    """Write the golden values of one kind."""
    lines = (f"{json.dumps(name)}: {json.dumps(values[name], sort_keys=True)}" for name in sorted(values))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def plain(value: Any) -> Any:
    """Return `value` as it comes back from JSON: lists in place of tuples, text as keys."""
    return json.loads(json.dumps(value))
