"""How much an object would take along to another process, without pickling it.

Pickling gigabytes to count them would need that memory once more. So arrays, tensors and text are asked for
their size, and of a long list a thousand items stand for all.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from stoker.sources.torch_members import MOST_MEMBERS, MOST_OF_ONE, state_of

_NUMBERS = (int, float, complex, bool, type(None))
_NUMBER_BYTES = 9
"""A number in a pickle, about."""


def held_bytes(thing: object) -> int:
    """Bytes of data in a pickle of `thing`, about; code is not counted.

    >>> held_bytes({"a": np.zeros(1000), "b": [bytes([n % 256] * 100) for n in range(10_000)]})
    1008002
    >>> held_bytes([float(n) for n in range(10_000)])
    90000
    """
    total, seen = 0.0, set[int]()
    waiting = deque([(thing, 1.0)])
    kept: list[object] = []  # an id must not be given again while it is known
    while waiting and len(kept) < MOST_MEMBERS:
        value, times = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        items = _items(value)
        if items is None:
            total += times * _size(value)
            continue
        some = items[:: max(1, len(items) // MOST_OF_ONE)]
        others = [item for item in some if not isinstance(item, _NUMBERS)]
        total += times * _NUMBER_BYTES * len(items) * (1 - len(others) / max(1, len(some)))
        # One object in many places is pickled once.
        alone = len({id(item) for item in others}) > len(others) // 2
        share = len(items) / len(some) if alone else 1.0
        waiting.extend((item, times * share) for item in others)
    return int(total)


def _items(value: Any) -> Sequence[Any] | None:
    """What a container or an object holds; None where it is to be asked itself."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return array.reshape(-1).tolist() if array.dtype == object else None
    if isinstance(value, dict):
        held = cast("dict[Any, Any]", value)
        return [*held.keys(), *held.values()]
    if isinstance(value, list | tuple):
        return cast("Sequence[Any]", value)
    if isinstance(value, set | frozenset | deque):
        return [*cast("set[Any]", value)]
    if isinstance(value, str | bytes | bytearray | type) or _storage(value) is not None:
        return None
    return [*state_of(value).values()] or None


def _size(value: Any) -> int:
    """Bytes of what has no parts."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    storage = _storage(value)
    if storage is not None:
        return storage.nbytes()  # pickled whole with each view of it
    found = getattr(value, "nbytes", None)
    if isinstance(found, int):
        return found
    # Tables of other libraries say what they hold when they are asked for their size.
    return 0 if callable(value) or isinstance(value, type) else sys.getsizeof(value)


def _storage(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage()
