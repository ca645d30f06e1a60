"""Programs that this process starts itself: a Python of ours, or a foreign one such as git or rclone.

`run_program` returns what a short one prints; `OutputStream` reads the output of a long one as it comes. A
program that only writes to our pipes ends with us: its next write fails.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import ResourceError, StalledError
from stoker.units import GIB, MIB, format_bytes

KILL_S = 5.0
"""Seconds that a killed program may take to end; one that waits in the kernel is left behind."""
ERROR_BYTES = 64 << 10
"""The end of what a program writes to standard error that is kept."""
_PIECE_BYTES = MIB


class SpawnedProcess:
    """A program that runs as a child of this process. Signals never reach a later process of its number.

    Args:
        words: The program and its arguments.
        options: As of `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        self._process = subprocess.Popen[bytes](words, **options)
        self.pid = self._process.pid
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self.pidfd = -1
        """Readable when it has ended; -1 where the system has no such thing."""
        with suppress(AttributeError, OSError):  # not on macOS, nor in every sandbox
            self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to it alone; without effect once it has ended."""
        self._process.send_signal(number)

    def poll(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        if self.pidfd >= 0:
            is_readable(self.pidfd, timeout_s)
            return self._process.poll() is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Release its pidfd; safe to call twice."""
        self._process.poll()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read, at most so long; return whether it can."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


class OutputStream:
    """The standard output of a foreign program, piece by piece. One thread reads; another may call `kill`.

    Args:
        words: The program and its arguments; it gets no standard input.
        timeout_s: The longest wait for a piece, and for the end after the last one.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], timeout_s: float) -> None:
        self._name, self._timeout_s = words[0], timeout_s
        pipe = subprocess.PIPE
        self._process = SpawnedProcess(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._open = {self._out, self._err}
        self.errors = b""
        """The end of what it wrote to standard error."""

    def read(self) -> bytes:
        """Return the next piece as soon as there is one; empty at the end.

        Raises:
            StalledError: Nothing came in time.
        """
        until = time.monotonic() + self._timeout_s
        # Standard error is read as well: a program whose pipe is full would wait for us.
        while self._out in self._open:
            ready, _, _ = select.select([*self._open], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise StalledError(f"{self._name} wrote nothing for {self._timeout_s:g} s")
            if self._err in ready:
                self._read_errors()
            if self._out in ready:
                if piece := os.read(self._out, _PIECE_BYTES):
                    return piece
                self._open.discard(self._out)
        return b""

    def finish(self) -> int:
        """Wait for the end of the program after the last piece; return its exit code.

        Raises:
            StalledError: It did not end in time.
        """
        until = time.monotonic() + self._timeout_s
        while self._err in self._open and is_readable(self._err, until - time.monotonic()):
            self._read_errors()
        if not self._process.poll(until - time.monotonic()):
            raise StalledError(f"{self._name} did not end within {self._timeout_s:g} s")
        code = self._process.code()
        assert code is not None
        return code

    def kill(self) -> None:
        """End the program, so that a `read` that waits returns; harmless afterwards."""
        self._process.signal(9)

    def close(self) -> None:
        """End the program and release its pipes."""
        self.kill()
        self._process.poll(KILL_S)
        self._process.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_errors(self) -> None:
        piece = os.read(self._err, ERROR_BYTES)
        self.errors = (self.errors + piece)[-ERROR_BYTES:]
        if not piece:
            self._open.discard(self._err)


class ProgramResult(NamedTuple):
    """Result of a program."""

    code: int
    output: bytes
    errors: bytes
    """The end of what it wrote to standard error."""

    @property
    def last_error_line(self) -> str:
        """The last line that it wrote to standard error, or its exit code."""
        lines = [line for line in self.errors.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


def run_program(words: Sequence[str | Path], *, timeout_s: float, limit_bytes: int = GIB) -> ProgramResult:
    """Run a foreign program to its end and return its exit code and output.

    Args:
        words: The program and its arguments; it gets no standard input.
        timeout_s: Seconds for all of it.
        limit_bytes: The largest output.

    Raises:
        FileNotFoundError, OSError: It cannot be started.
        StalledError: It did not end in time; it is killed.
        ResourceError: It printed more than `limit_bytes`; it is killed.
    """
    until = time.monotonic() + timeout_s
    stream = OutputStream([str(word) for word in words], timeout_s)
    output = bytearray()
    try:
        while piece := stream.read():
            output += piece
            if len(output) > limit_bytes:
                raise ResourceError(f"{words[0]} printed more than {format_bytes(limit_bytes)}")
            if time.monotonic() > until:
                raise StalledError(f"{words[0]} did not end within {timeout_s:g} s")
        return ProgramResult(stream.finish(), bytes(output), stream.errors)
    finally:
        stream.close()
