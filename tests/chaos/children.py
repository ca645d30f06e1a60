"""Run a function in a forked child with a deadline; the parent learns how it ended and what it said."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Say = Callable[[Any], None]
"""Sends one JSON value to the parent, at once."""


@dataclass(slots=True, kw_only=True)
class Ended:
    """How a child ended."""

    pid: int
    said: list[Any]
    """What it sent, in order, until it ended."""
    signal: int = 0
    code: int | None = None
    hung: bool = False
    """Whether it was killed at its deadline."""
    error: str = ""
    """Class and message of the exception that ended it, if one did."""
    bases: tuple[str, ...] = ()
    """Its class and the classes that inherits from."""
    place: str = ""
    """Where it was raised."""

    def reap(self) -> None:
        """Give its process id back; until then it stays taken, as by another process of the same number."""
        os.waitpid(self.pid, 0)


def start(function: Callable[[Say], object]) -> tuple[int, int]:
    """Fork a child that runs `function`; its process id, and the pipe it talks through."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return pid, here
    code = 0
    try:
        os.close(here)

        def say(value: Any) -> None:
            os.write(there, json.dumps(value).encode() + b"\n")

        try:
            function(say)
        except BaseException as error:
            code = 3
            say(_described(error))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _described(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "raised": f"{type(error).__name__}: {error}",
        "bases": [base.__name__ for base in type(error).__mro__],
        "place": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
    }


def run(function: Callable[[Say], object], *, deadline_s: float = 30.0, reap: bool = True) -> Ended:
    """Fork, wait for the end or the deadline, and tell.

    Args:
        function: What the child does.
        deadline_s: When it is killed.
        reap: Whether its process id is free again afterwards; else call `Ended.reap`, once.
    """
    pid, pipe = start(function)
    data, hung = listen(pid, pipe, deadline_s)
    ended = ended_of(pid, data)
    ended.hung = hung
    if reap:
        ended.reap()
    return ended


def listen(pid: int, pipe: int, deadline_s: float) -> tuple[bytes, bool]:
    """What a child says until it ends, and whether it had to be killed at the deadline for that."""
    limit = time.monotonic() + deadline_s
    data, hung = b"", False
    process = os.pidfd_open(pid)
    sources = [pipe, process]
    try:
        while True:
            ready, _, _ = select.select(sources, [], [], max(0.0, limit - time.monotonic()))
            if pipe in ready:
                piece = os.read(pipe, 1 << 16)
                data += piece
                if not piece:
                    sources = [process]
            elif ready:  # it has ended, and all that it said is read
                return data, hung
            else:
                hung = True
                limit = time.monotonic() + 5.0
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        os.close(process)
        os.close(pipe)


def ended_of(pid: int, data: bytes) -> Ended:
    """How a child that has ended did so; it is not reaped yet."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    said = [json.loads(line) for line in data.split(b"\n") if line.endswith((b"}", b"]", b'"'))]
    ended = Ended(pid=pid, said=said)
    if info.si_code == os.CLD_EXITED:
        ended.code = info.si_status
    else:
        ended.signal = info.si_status
    for value in said:
        if isinstance(value, dict) and "raised" in value:
            ended.error, ended.bases, ended.place = value["raised"], tuple(value["bases"]), value["place"]
    return ended
