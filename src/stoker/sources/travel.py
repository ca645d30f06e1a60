"""A source as bytes for another process; what cannot go there is named, with its path and the cure."""

from __future__ import annotations

import re
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import SourceError, StokerError
from stoker.sources.torch_members import Finding, Member, members, obstacles

_HERE = "Or read in this process alone: precompute={'readers': 0} in cached(), readers=0 in precompute()"
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
        return cloudpickle.dumps(thing)  # pyright: ignore[reportUnknownMemberType]
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
        cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType]
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _plain(path: str) -> str:
    """A path as the user knows it: their Dataset, not what it is wrapped in.

    >>> _plain("source._source._dataset.file"), _plain("source.path")
    ('dataset.file', 'source.path')
    """
    return _INNER.sub("dataset", path)
