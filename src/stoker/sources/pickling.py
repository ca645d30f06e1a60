"""A source as bytes for another process; what cannot go there is named, with its path and the cure."""

from __future__ import annotations

import functools
import io
import marshal
import re
import sys
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from stoker.errors import SourceError, StokerError, arg
from stoker.sources.torch_identity import (
    MOST_MEMBERS,
    MOST_OF_ONE,
    HeldObject,
    PicklingObstacle,
    members,
    obstacles,
    state_of,
)

_HERE = f"Or read in this process alone: {arg('workers', 0)} (cached: precompute={{'workers': 0}})"
_MOST_NAMED = 5
_INNER = re.compile(r"^(?:job\.)?source(?:\._source)*\._dataset\b")
"""The path of a Dataset inside whatever wraps it."""


def pickle_for_process(thing: object, name: str = "source", *, otherwise: str = _HERE) -> bytes:
    """`thing` pickled, classes and functions of scripts and notebooks with their code.

    Args:
        thing, name: What, and what its path begins with.
        otherwise: What else can be done about it, as the last sentence of a message.

    Raises:
        SourceError: A member cannot, or should not, go to another process; names it and says what to do.
    """
    found = obstacles(thing, name)
    if found:
        _refuse(found, otherwise)
    try:
        return dumps(thing)
    except StokerError:
        raise
    except Exception as error:
        culprit = _culprit(thing, name)
        path = name if culprit is None else _plain(culprit.path)
        kind = "" if culprit is None else f" ({type(culprit.value).__name__})"
        raise SourceError(
            f"{path}{kind} cannot be sent to another process: {type(error).__name__}: {error}. Make it on "
            "first use in __getitem__ instead of in __init__, or leave it out of the state (__getstate__). "
            f"{otherwise}"
        ) from error


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, for two kinds of object that it does not send as we need them.

    - Functions of `functools.lru_cache` that no other process can import. cloudpickle sends their name alone.
      Here they are made again in the other process, with an empty cache.
    - Code. Since cloudpickle 3.1.3 it arrives without its file name, so that its text is not found there,
      and the fingerprint of a Dataset of local classes would differ between processes.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, _CACHE) and not _is_importable(obj):
            settings = cast("Any", obj).cache_parameters()
            return _cached_anew, (cast("Any", obj).__wrapped__, settings["maxsize"], settings["typed"])
        return super().reducer_override(obj)


_CACHE = type(functools.lru_cache(len))


def _cached_anew(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_importable(function: Any) -> bool:
    """Return True if another process finds this very object by module and name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is function


def dumps(thing: object) -> bytes:
    """Return the pickle of an object, as it is sent to a process."""
    with io.BytesIO() as file:
        _Pickler(file).dump(thing)
        return file.getvalue()


def _refuse(found: list[PicklingObstacle], otherwise: str) -> None:
    shown = [PicklingObstacle(_plain(one.path), one.what, one.cure) for one in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    cures = ". ".join(dict.fromkeys(one.cure for one in shown))
    raise SourceError(
        f"{'; '.join(map(str, shown))}{more}, which cannot be sent to another process, and samples are read "
        f"in others. {cures}. {otherwise}"
    )


def _culprit(thing: object, name: str) -> HeldObject | None:
    """Return the innermost member that cannot be pickled alone."""
    worst: HeldObject | None = None
    for member in members(thing, name):
        if worst is not None and not member.path.startswith(worst.path):
            continue
        if not _picklable(member.value):
            worst = member
    return worst


def _picklable(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _plain(path: str) -> str:
    """Return a path as the user knows it: their Dataset, not what it is wrapped in.

    >>> _plain("source._source._dataset.file"), _plain("source.path")
    ('dataset.file', 'source.path')
    """
    return _INNER.sub("dataset", path)


# ----------------------------------------------------------------------------------------------------------
# How much an object would take along to another process, without pickling it.
#
# Pickling gigabytes to count them would need that memory once more. So arrays, tensors and text are asked
# for their size, and of a long list a thousand items stand for all.


_NUMBERS = (int, float, complex, bool, type(None))
_NUMBER_BYTES = 9
"""A number in a pickle, about."""


def estimate_pickle_bytes(thing: object) -> int:
    """Return bytes of data in a pickle of `thing`, about; code is not counted.

    >>> estimate_pickle_bytes({"a": np.zeros(1000), "b": [bytes([n % 256] * 100) for n in range(10_000)]})
    1008002
    >>> estimate_pickle_bytes([float(n) for n in range(10_000)])
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
    """Return what a container or an object holds; None where its own size is to be taken."""
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
    """Return bytes of what has no parts."""
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
