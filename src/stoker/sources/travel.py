"""A source as bytes for another process; what cannot go there is named, with its path and the cure."""

from __future__ import annotations

import functools
import io
import re
import sys
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import SourceError, StokerError, arg
from stoker.sources.torch_members import Finding, Member, members, obstacles

_HERE = f"Or read in this process alone: {arg('readers', 0)} (cached: precompute={{'readers': 0}})"
_MOST_NAMED = 5
_INNER = re.compile(r"^(?:job\.)?source(?:\._source)*\._dataset\b")
"""The path of a Dataset inside whatever wraps it."""


def packed(thing: object, name: str = "source", *, otherwise: str = _HERE) -> bytes:
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
        return _dumped(thing)
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
    """cloudpickle, and functions of `functools.lru_cache` from where no other process can import them.

    cloudpickle sends classes of a script with their code, but such a function by its name alone, which the
    other process does not know. It is made anew there, and remembers nothing yet.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _CACHE) and not _is_importable(obj):
            settings = cast("Any", obj).cache_parameters()
            return _cached_anew, (cast("Any", obj).__wrapped__, settings["maxsize"], settings["typed"])
        return super().reducer_override(obj)


_CACHE = type(functools.lru_cache(len))


def _cached_anew(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_importable(function: Any) -> bool:
    """Return whether another process finds this very object by module and name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is function


def _dumped(thing: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(thing)
        return file.getvalue()


def _refuse(found: list[Finding], otherwise: str) -> None:
    shown = [Finding(_plain(one.path), one.what, one.cure) for one in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    cures = ". ".join(dict.fromkeys(one.cure for one in shown))
    raise SourceError(
        f"{'; '.join(map(str, shown))}{more}, which cannot be sent to another process, and samples are read "
        f"in others. {cures}. {otherwise}"
    )


def _culprit(thing: object, name: str) -> Member | None:
    """The innermost member that cannot be pickled by itself."""
    worst: Member | None = None
    for member in members(thing, name):
        if worst is not None and not member.path.startswith(worst.path):
            continue
        if not _picklable(member.value):
            worst = member
    return worst


def _picklable(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _plain(path: str) -> str:
    """A path as the user knows it: their Dataset, not what it is wrapped in.

    >>> _plain("source._source._dataset.file"), _plain("source.path")
    ('dataset.file', 'source.path')
    """
    return _INNER.sub("dataset", path)
