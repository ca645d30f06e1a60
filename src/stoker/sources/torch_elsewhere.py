"""The probed items of a Dataset, read once more in a process of their own.

What differs there would differ in every reader: items drawn from the state of a process (its number, a seed
of its own, the order of a set), a value set in this process alone, a module that another process does not
find. The process is a plain child in a session of its own; each item has a deadline, and past it the child is
killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from stoker.errors import SourceError, StalledError, arg
from stoker.sources.travel import packed

START_S = 120.0
"""Seconds for the child to start and to import what the Dataset needs."""
_END_S = 5.0
_TAIL = 600


def read_elsewhere(source: object, name: str, *, deadline_s: float) -> dict[int, dict[str, str] | str]:
    """Digests by field of each probed sample as another process reads it; text where it failed there.

    Raises:
        SourceError: The source cannot go there, or ended the process.
        StalledError: Starting, or one item, took too long.
    """
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as output:
        payload.write(packed(source))
        payload.seek(0)
        ours, theirs = os.pipe()
        try:
            child = _start(payload, output, theirs)
        finally:
            os.close(theirs)
        try:
            return _collect(ours, child, output, name, deadline_s)
        finally:
            os.close(ours)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            # One that waits for storage ends when that answers: nothing here waits for it.
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_END_S)


def _start(payload: IO[bytes], output: IO[bytes], answer: int) -> subprocess.Popen[bytes]:
    paths = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker.sources.torch_child", str(answer), paths],
        stdin=payload,
        stdout=output,
        stderr=output,
        pass_fds=(answer,),
        start_new_session=True,
    )


def _collect(
    answer: int, child: subprocess.Popen[bytes], output: IO[bytes], name: str, deadline_s: float
) -> dict[int, dict[str, str] | str]:
    found: dict[int, dict[str, str] | str] = {}
    text, number, until = b"", -1, time.monotonic() + START_S
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([answer], [], [], left)[0]:
            where = "starting it" if number < 0 else f"item {number}"
            raise StalledError(
                f"{name}: read in a second process, {where} took more than "
                f"{START_S if number < 0 else deadline_s:g} s. Fix what it waits for, give it more time "
                f"(source.probe_deadline_s = 300), or read in this process with {arg('readers', 0)}"
            )
        data = os.read(answer, 1 << 16)
        if not data:
            break
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if message["kind"] == "done":
                return found
            if message["kind"] == "refused":
                raise SourceError(
                    f"{name} cannot be loaded in a second process, as readers are:\n{message['error']}\n"
                    f"Fix that, or read in this process with {arg('readers', 0)}"
                )
            number, until = int(message["number"]), time.monotonic() + deadline_s
            if message["kind"] == "item":
                found[number] = message["found"]
    code = child.wait(timeout=10)
    output.seek(0)
    tail = output.read().decode(errors="replace").strip()[-_TAIL:]
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    raise SourceError(
        f"{name}: a second process that read item {number} {how}. Readers would do the same: fix the "
        f"Dataset, or read in this process with {arg('readers', 0)}" + (f". It said: {tail}" if tail else "")
    )


def check_alike(
    here: Mapping[int, Mapping[str, str]], there: Mapping[int, Mapping[str, str] | str], name: str
) -> None:
    """Refuse what is not the same in both processes.

    Raises:
        SourceError: Names sample and field.
    """
    for number, fields in here.items():
        other = there.get(number, "it was not read")
        if isinstance(other, str):
            raise SourceError(
                f"{name}: sample {number} can be read in this process and not in a second one: {other}. "
                "What it needs exists in this process alone: pass it to the Dataset in __init__, or read "
                f"in this process with {arg('readers', 0)}"
            )
        for field, digest in fields.items():
            if other.get(field) != digest:
                raise SourceError(
                    f"{name}: sample {number}, field {field!r} is another in a second process, so each "
                    "reader would give its own. Fix what depends on the process (its number, hash() of "
                    "text, the order of a set, a value set after import): hand it to the Dataset in "
                    "__init__. If it is drawn at random, seed it by the sample number, or store one draw "
                    f"with {arg('random', 'freeze')}"
                )
