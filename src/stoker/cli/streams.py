"""The standard streams, when they are closed, full or read by nobody any more. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import TextIO

from stoker.errors import ResourceError

INTERRUPTED = "interrupted; the same command resumes"
"""What a command says that a signal ended."""


def keep_standard_streams() -> None:
    """Point closed standard streams at nothing, or the next file opened (a shard) would be one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  a descriptor, for the whole process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def printing(stream: TextIO) -> Generator[None]:
    """Write to `stream` and flush it; a reader that went away (`| head`) is left to the caller.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        ResourceError: It cannot be written. After either, what is written goes nowhere.
    """
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
        raise
    except OSError as error:
        _discard(stream)
        raise ResourceError(
            f"standard output cannot be written: {error.strerror}. Make room, or send the output elsewhere"
        ) from error


def _discard(stream: TextIO) -> None:
    """Point `stream` at nothing, or Python would fail again on the rest of its buffer at the very end."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
