"""Orders of a loader by one text, for tests that go through several."""

from __future__ import annotations

from typing import Any

ORDERS: dict[str, dict[str, Any]] = {"full": {"shuffle": True}, "sequential": {"shuffle": False}}


def in_order(text: str) -> dict[str, Any]:
    """Return the arguments of a `Loader` for `full`, `sequential`, `block(2,4)`, `bucket` or `static(2)`."""
    if text.startswith("static"):
        return {"shuffle": True, "partition": text}
    return ORDERS.get(text, {"shuffle": text})
