"""Bodies of requests: read whole within a size and a time, and JSON that no part behind this has to fear."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class Gone(Exception):  # noqa: N818 (no error: the other side left)
    """The client left before its body was whole."""


async def read_body(receive: Receive, *, most: int, within_s: float) -> bytes | None:
    """The whole body; None when it is larger than `most` bytes.

    Raises:
        TimeoutError: It was not whole within `within_s`.
        Gone: The client left.
    """
    pieces: list[bytes] = []
    size = 0
    async with asyncio.timeout(within_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > most:
                return None
            if not message.get("more_body", False):
                return b"".join(pieces)


async def discard(receive: Receive, *, most: int, within_s: float) -> bool:
    """Read a body and keep nothing of it; False when that was not all of it.

    A connection that is closed with a body unread takes our answer with it.
    """
    size = 0
    try:
        async with asyncio.timeout(within_s):
            while size <= most:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        pass
    return False


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what comes after it."""
    waiting = [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again


def fault_in_json(body: bytes, *, depth: int, members: int, text_chars: int) -> str:
    """What is wrong with a body as JSON, in words; empty for a sound one.

    Refused are nesting deeper than `depth` (which would end the parser), more values than `members` (each
    costs a check), strings longer than `text_chars`, names given twice, NaN and infinities, and characters
    that no database takes.
    """
    level = 0
    for match in _BRACKETS.finditer(body):
        first = match[0][:1]
        level += (first in b"[{") - (first in b"]}")
        if level > depth:
            return f"it is nested deeper than {depth} levels"
    try:
        value = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except ValueError as error:  # also text that is not UTF-8, and numbers of thousands of digits
        return f"it is not JSON: {error}"
    return _fault_in_values(value, members, text_chars)


def _fault_in_values(value: object, members: int, text_chars: int) -> str:
    todo, seen = [value], 0
    while todo:
        one, seen = todo.pop(), seen + 1
        if seen + len(todo) > members:
            return f"it has more than {members:,} values"
        if isinstance(one, dict):
            pairs = cast("dict[str, object]", one)
            todo += [*pairs.keys(), *pairs.values()]
        elif isinstance(one, list):
            todo += cast("list[object]", one)
        elif isinstance(one, str):
            if len(one) > text_chars:
                return f"a string has {len(one):,} characters, expected {text_chars:,} at most"
            if "\0" in one or any("\ud800" <= char <= "\udfff" for char in one):
                return "a string holds NUL or half a surrogate pair"
        elif isinstance(one, float) and one in (float("inf"), float("-inf")):
            return "a number is too large"
    return ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a member twice")
    return found
