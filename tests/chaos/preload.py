"""The preloaded library of calls.c from Python: build it, go on under it, arm it, read its records."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("calls.c")
KILL, ERRNO, SHORT, STOP = 1, 2, 3, 4
FIXED = struct.Struct("<IIQqqQqIIQ24s")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""So that forking is safe: what a child inherits is whole."""


NUMBERS = (
    "size", "used", "sequence", "fired", "armed", "at", "action", "error", "sticky", "keep_data", "stop_op",
)  # fmt: skip


class Region(ctypes.Structure):
    """The head of the shared region; see calls.c."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in NUMBERS),
        ("stop_name", ctypes.c_char * 24),
        ("root", ctypes.c_char * 4096),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call."""

    op: str
    sequence: int
    path: str
    other: str
    result: int
    error: int
    inode: int
    offset: int
    writes: bool
    data: bytes


def missing_tools() -> str:
    """Why the library cannot be used here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux (LD_PRELOAD)"
    if shutil.which("cc") is None:
        return "needs cc, a C compiler, which is not on PATH"
    if not sysconfig.get_config_var("HAVE_DYNAMIC_LOADING"):
        return "needs a Python that loads libraries dynamically"
    return ""


def build() -> Path:
    """The compiled library, made once for each user and version of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"stoker-chaos-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is somebody else's"
    library = folder / f"calls-{digest}.so"
    if not library.exists():
        temporary = folder / f"calls-{digest}.{os.getpid()}"
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", str(temporary), str(SOURCE), "-ldl"],
            check=True,
            timeout=60,
            capture_output=True,
        )
        temporary.replace(library)
    return library


def environment() -> dict[str, str]:
    """The environment of a program under the library; without it where that is not possible."""
    library = {} if missing_tools() else {"LD_PRELOAD": str(build())}
    return {**os.environ, **ONE_THREAD, **library}


def ensure(module: str) -> None:
    """Go on under the library; if need be as `python -m module` in place of this process."""
    if _library() is None:
        if why := missing_tools():
            sys.exit(f"{module} {why}")
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment())
    spare_children()


def spare_children() -> None:
    """Programs that are started from here run without the library; forks keep it."""
    os.environ.pop("LD_PRELOAD", None)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "chaos_region"):
        return None
    library.chaos_region.restype = ctypes.c_void_p
    library.chaos_records_offset.restype = ctypes.c_uint64
    return library


@functools.cache
def region() -> Region:
    """The head of the region."""
    library = _library()
    assert library is not None, "this process does not run under the library"
    return Region.from_address(library.chaos_region())


def _records_address() -> int:
    library = _library()
    assert library is not None
    return ctypes.addressof(region()) + library.chaos_records_offset()


def arm(root: Path, *, keep_data: bool = False) -> None:
    """Count and record calls below `root` from now on, without faults."""
    head = region()
    head.armed = 0
    ctypes.memset(_records_address(), 0, head.used)
    head.used = head.sequence = head.fired = head.at = head.action = head.sticky = head.stop_op = 0
    head.keep_data = keep_data
    head.root = os.fsencode(root)
    head.armed = 1


def fault(at: int, action: int, *, error: int = 0, sticky: bool = False) -> None:
    """Fault the call with this place in the sequence; after `arm`."""
    head = region()
    head.at, head.action, head.error, head.sticky = at, action, error, sticky


def stop_after(op: str) -> None:
    """Stop the process (SIGSTOP) after every call of this name; after `arm`."""
    head = region()
    head.stop_name = op.encode()
    head.stop_op, head.action = 1, STOP


def disarm() -> None:
    """Let calls pass uncounted; records stay."""
    region().armed = 0


def mark(text: str) -> None:
    """Put a line among the records."""
    library = _library()
    if library is not None:
        library.chaos_mark(text.encode())


def fired() -> int:
    """Faults that took place since `arm`."""
    return region().fired


def calls() -> list[Call]:
    """What was recorded since `arm`, in order."""
    head, begin = region(), _records_address()
    assert head.used + begin - ctypes.addressof(head) < head.size, "the region is too small for this scenario"
    data = ctypes.string_at(begin, head.used)
    found: list[Call] = []
    at = 0
    while at < len(data):
        size, writes, sequence, result, error, inode, offset, path, other, held, op = FIXED.unpack_from(
            data, at
        )
        if not size:  # reserved by a process that was killed before it wrote
            break
        here = at + FIXED.size
        tail = data[here : here + path + other + held]
        found.append(
            Call(
                op=op.split(b"\0")[0].decode(),
                sequence=sequence,
                path=os.fsdecode(tail[:path]),
                other=os.fsdecode(tail[path : path + other]),
                result=result,
                error=error,
                inode=inode,
                offset=offset,
                writes=bool(writes),
                data=tail[path + other :],
            )
        )
        at += size
    return found
