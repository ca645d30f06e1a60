"""The log of a job, from its end or from a place on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

TAIL_BYTES = 1 << 20
"""Most that is read of a log for one answer."""
PIECE_BYTES = 64 << 10
LINE_CHARS = 4096
"""What is shown of one line."""
POLL_S = 0.5
BEATS = 30
"""Looks without news after which a reader gets a sign of life."""


def tail(log: Path, lines: int) -> tuple[list[str], int, bool]:
    """The last lines of a log, the bytes up to there, and whether there are earlier ones."""
    size = _size(log)
    start = max(0, size - TAIL_BYTES)
    data = _read(log, start, size - start)
    found = data.decode("utf-8", "replace").splitlines()
    if start and found:
        found = found[1:]  # begun before what was read
    cut = len(found) > lines or start > 0
    return [line[:LINE_CHARS] for line in found[-lines:]], start + len(data), cut


async def follow(
    log: Path, after: int, ended: Callable[[], bool], closing: Callable[[], bool]
) -> AsyncGenerator[str]:
    """What is appended to a log after byte `after`, as Server-Sent Events, until `ended` or `closing`.

    The id of each is the place after it, so a reader that was cut off goes on with `Last-Event-ID`.
    """
    quiet = 0
    while not closing():
        over = await asyncio.to_thread(ended)
        data = await asyncio.to_thread(_read, log, after, PIECE_BYTES)
        whole = data if len(data) == PIECE_BYTES or over else data[: data.rfind(b"\n") + 1]
        if b"\n" in whole[:-1] or whole:
            whole = whole[: whole.rfind(b"\n") + 1] or whole
            after += len(whole)
            lines = [line[:LINE_CHARS] for line in whole.decode("utf-8", "replace").splitlines()]
            yield f"id: {after}\nevent: log\ndata: {json.dumps({'lines': lines})}\n\n"
            quiet = 0
        elif over:
            yield f"id: {after}\nevent: end\ndata: {{}}\n\n"
            return
        else:
            quiet += 1
            if quiet % BEATS == 0:
                yield ": all is well\n\n"
            await asyncio.sleep(POLL_S)


def _size(log: Path) -> int:
    try:
        return log.lstat().st_size
    except OSError:
        return 0  # not begun


def _read(log: Path, start: int, count: int) -> bytes:
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, count, start)
    finally:
        os.close(fd)
