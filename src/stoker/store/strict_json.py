"""Read JSON that only this package writes: canonical text or nothing.

Accepting exactly the bytes that `canonical_json` gives rules out duplicate keys, NaN, odd spacing and most
damage in one comparison, before any entry is looked at.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard, cast

from stoker.errors import CorruptError
from stoker.schema import canonical_json


def read_strict(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse a canonical JSON object.

    Raises:
        CorruptError: `data` is not JSON, not an object, or not in canonical form; names `where`.
    """
    try:
        text = data.decode("ascii")
        value = as_object(json.loads(text))
        canonical = value is not None and canonical_json(value) == text
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{where} is not readable JSON ({error}): damaged, or not written by Stoker"
        ) from error
    if value is None or not canonical:
        raise CorruptError(f"{where} is not a canonical JSON object: damaged, or not written by Stoker")
    return value


def as_object(value: object) -> dict[str, Any] | None:
    """`value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """`value` if it is a JSON array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def is_count(value: object, limit: int = 1 << 62) -> TypeGuard[int]:
    """Whether `value` is an integer with `0 <= value <= limit`; `True` and `1.0` are not."""
    return type(value) is int and 0 <= value <= limit
