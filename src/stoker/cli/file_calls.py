"""Which file a process is waiting for, seen from outside, whatever holds its interpreter's lock.

A call on a file whose storage does not answer never comes back: not when it is asked to, and not when a
deadline passes in another thread. The kernel says which call a thread is in (`/proc/PID/syscall`), and how
often it has waited (`/proc/PID/status`): both unchanged, it has got no answer since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

# Calls by number: what names the file is the descriptor, the first or the second argument. Source: the
# kernel's syscall_64.tbl, and asm-generic/unistd.h. Calls that may wait for people are left out.
_X86_64: Mapping[str, str] = {
    "close": "3",
    "fd": "0 1 5 17 18 19 20 40 74 75 77 78 91 138 217 221 285 295 296 306 326 327 328",
    "first": "2 4 6 21 76 80 82 83 84 85 86 87 88 89 90 92 132 137",
    "second": "257 258 262 263 264 265 266 267 268 269 280 316 332 437 439",
}
_AARCH64: Mapping[str, str] = {
    "close": "57",
    "fd": "44 46 47 52 61 63 64 65 66 67 68 69 70 71 80 82 83 223 267 285 286 287",
    "first": "43 45 49",
    "second": "34 35 36 37 38 48 53 56 78 79 88 276 291 437 439",
}
_KINDS: Mapping[str, Mapping[int, str]] = {
    machine: {int(number): kind for kind, numbers in calls.items() for number in numbers.split()}
    for machine, calls in (("x86_64", _X86_64), ("aarch64", _AARCH64))
}
_PAGE_FAULT = -1
"""What stands in place of a number where a thread waits for a page of a file that is mapped."""
_PATH_BYTES = 4096
_STOPPED = ("T", "t")
"""States of a process that a signal or a debugger holds."""


@dataclass(frozen=True, slots=True)
class FileCall:
    """One wait of a process's main thread for a file."""

    text: str
    """Call, arguments and stack, as the kernel writes them."""
    waits: int
    """How often the thread had waited before."""


def file_call(pid: int) -> FileCall | None:
    """The call on a file that the main thread of a process is in; None: it is in none, or nobody can tell."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:  # noqa: PTH123  pathlib costs 10 ms
            text = file.read().strip()
        kind = _kind(text)
        if kind is None or (kind == "fd" and not _is_file(_name_of(pid, text))):
            return None
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            status = dict(line.split(":", 1) for line in file if ":" in line)
        if status["State"].split()[0] in _STOPPED:
            return None
        waits = int(status["voluntary_ctxt_switches"])
    except (OSError, ValueError, LookupError):  # it ended, or this system does not say
        return None
    return FileCall(text, waits)


def file_of(pid: int, call: FileCall) -> str:
    """The file that a call is about, for messages."""
    with suppress(OSError, ValueError):
        if name := _name_of(pid, call.text):
            return name
    return "a file"


def _kind(text: str) -> str | None:
    number = text.partition(" ")[0]
    if number == "running":
        return None
    return "page" if int(number) == _PAGE_FAULT else _KINDS.get(os.uname().machine, {}).get(int(number))


def _name_of(pid: int, text: str) -> str:
    kind = _kind(text)
    if kind in (None, "page"):
        return ""
    first, second = (int(word, 16) for word in text.split()[1:3])
    path = b""
    if kind in ("first", "second"):
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(first if kind == "first" else second)
            path = memory.read(_PATH_BYTES).partition(b"\0")[0]
    if kind == "close":  # the descriptor is nobody's any more
        return ""
    return os.fsdecode(path) or os.readlink(f"/proc/{pid}/fd/{first}")  # noqa: PTH115  pathlib costs 10 ms


def _is_file(name: str) -> bool:
    """Not a pipe, socket or terminal: those wait for people, and for other programs."""
    return name.startswith("/") and not name.startswith(("/dev/", "/memfd:"))
