"""Write JSON in one form, and read JSON with checks.

| you read | use |
|---|---|
| a file that only this package writes | `read_strict`: canonical text or nothing |
| a small file of notes, of which a damaged one counts as missing | `read_object` |
| text of a user or another program | `parse_json`: a key that comes twice is an error |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

from stoker.errors import CorruptError
from stoker.units import MIB

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What canonical JSON can hold; NaN and infinities are refused when it is written."""


def canonical_json(data: Any) -> str:
    """Return JSON with sorted keys, no spaces, no NaN: equal values give equal text.

    >>> canonical_json({"b": 1.0, "a": [True, None]})
    '{"a":[true,null],"b":1.0}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def read_strict(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse a canonical JSON object.

    Accepting exactly the bytes that `canonical_json` gives rules out duplicate keys, NaN, odd spacing and
    most damage in one comparison, before any entry is looked at.

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


def read_object(path: Path, *, limit_bytes: int = 64 * MIB) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is larger than `limit_bytes`, or is not a JSON object whose keys differ.
    """
    with path.open("rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"{path} is larger than {limit_bytes:,} bytes")
    value = as_object(parse_json(data))
    if value is None:
        raise ValueError(f"{path} holds no JSON object")
    return value


def parse_json(data: bytes | str) -> Any:
    """Parse JSON in which no key comes twice in one object; Python would keep the last in silence.

    Raises:
        ValueError: It is not JSON, is nested too deep, or a key comes twice; names the key.
    """
    try:
        return json.loads(data, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError(f"nested too deep ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} comes twice in one object")
    return found


def as_object(value: object) -> dict[str, Any] | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """Return `value` if it is a JSON array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def is_count(value: object, limit: int = 1 << 62) -> TypeGuard[int]:
    """Return True if `value` is an integer with `0 <= value <= limit`; `True` and `1.0` are not."""
    return type(value) is int and 0 <= value <= limit
