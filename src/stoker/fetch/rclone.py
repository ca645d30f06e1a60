"""Remotes of the rclone binary. What it needs to know is in its configuration or environment, not here."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import time
from contextlib import suppress
from typing import Any

from stoker.errors import TransferError
from stoker.fetch.origin import PIECE_BYTES, Listed, Version
from stoker.fetch.wanted import ALGORITHMS

MISSING = (3, 4)
"""Exit codes of rclone: a folder or a file is not there."""
FATAL = 7
UNKNOWN_REMOTE = "didn't find section"
END_S = 5.0
ERROR_BYTES = 64 * 1024
_TIME = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ")


class RcloneOrigin:
    """`remote:path`; one process that writes the file to us, killed where it stalls."""

    def __init__(self, source: str) -> None:
        self._source = source

    def open(self, offset: int, tag: str, *, stall_s: float) -> RcloneStream:
        """See `Origin`."""
        found = self._look(stall_s)
        if found.get("IsDir"):
            raise TransferError(f"{self._source} is a folder, or is not there. Name a file")
        size = int(found["Size"])
        version = Version(bytes=None if size < 0 else size, tag=f"{size} {found.get('ModTime', '')}")
        offset = offset if tag in ("", version.tag) else 0
        words = [*_base(stall_s), "cat", "--offset", str(offset), "--", self._source]
        return RcloneStream(_start(words), offset, version, self._source, stall_s)

    def _look(self, stall_s: float) -> dict[str, Any]:
        words = [*_base(stall_s), "lsjson", "--stat", "--", self._source]
        output = _answer(words, self._source, stall_s)
        try:
            found = json.loads(output)
            return found if isinstance(found, dict) and isinstance(found.get("Size"), int) else {}["Size"]
        except (ValueError, KeyError):
            raise TransferError(f"{self._source}: rclone's answer cannot be read", passing=True) from None


def list_remote(source: str, deadline_s: float) -> list[Listed]:
    """All files below a folder of a remote, with the digests that it keeps."""
    kinds = [word for algorithm in ALGORITHMS for word in ("--hash-type", algorithm)]
    words = [*_base(min(60.0, deadline_s)), "lsjson", "-R", "--files-only", "--hash", *kinds, "--", source]
    output = _answer(words, source, deadline_s)
    try:
        return [_listed(one) for one in json.loads(output)]
    except (ValueError, KeyError, TypeError):
        raise TransferError(f"{source}: rclone's list cannot be read", passing=True) from None


def _listed(entry: dict[str, Any]) -> Listed:
    size, digests = int(entry["Size"]), entry.get("Hashes") or {}
    for algorithm, digits in ALGORITHMS.items():
        digest = digests.get(algorithm)
        if isinstance(digest, str) and len(digest) == digits:
            return Listed(name=str(entry["Path"]), bytes=size, algorithm=algorithm, digest=digest.lower())
    return Listed(name=str(entry["Path"]), bytes=None if size < 0 else size)


def _answer(words: list[str], source: str, deadline_s: float) -> bytes:
    """What a call of rclone puts out."""
    process = _start(words)
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_S)
        raise TransferError(f"{source}: rclone did not answer for {deadline_s:g} s", passing=True) from None
    if process.returncode:
        raise failure(source, process.returncode, errors)
    return output


class RcloneStream:
    """The output of a running `rclone cat`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        offset: int,
        version: Version,
        source: str,
        stall_s: float,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._source, self._stall_s = process, source, stall_s
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self._said = b""
        self._open = {self._out, self._err}
        self.offset, self.version = offset, version

    def read(self) -> bytes:
        """See `Stream`."""
        until = time.monotonic() + self._stall_s
        while self._out in self._open:
            ready, _, _ = select.select([*self._open], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TransferError(
                    f"{self._source}: rclone gave nothing for {self._stall_s:g} s", passing=True
                )
            if self._err in ready:
                self._hear()
            if self._out in ready:
                piece = os.read(self._out, PIECE_BYTES)
                if piece:
                    return piece
                self._open.discard(self._out)
        self._end()
        return b""

    def _hear(self) -> None:
        """Take what it says about errors, so that it never waits for us to."""
        piece = os.read(self._err, ERROR_BYTES)
        self._said = (self._said + piece)[-ERROR_BYTES:]
        if not piece:
            self._open.discard(self._err)

    def _end(self) -> None:
        try:
            _, rest = self._process.communicate(timeout=self._stall_s)
        except subprocess.TimeoutExpired:
            raise TransferError(f"{self._source}: rclone does not end", passing=True) from None
        if self._process.returncode:
            raise failure(self._source, self._process.returncode, self._said + (rest or b""))

    def close(self) -> None:
        """See `Stream`."""
        self.stop()
        with suppress(subprocess.TimeoutExpired, ValueError):
            self._process.communicate(timeout=END_S)

    def stop(self) -> None:
        """See `Stream`."""
        if self._process.poll() is None:
            self._process.kill()


def failure(source: str, code: int, said: bytes) -> TransferError:
    """What rclone's exit code and last words mean."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = _TIME.sub("", lines[-1].strip()) if lines else "it said nothing"
    passing = code not in (*MISSING, FATAL) and UNKNOWN_REMOTE not in last
    return TransferError(f"{source}: rclone ended with exit code {code}: {last}", passing=passing)


def _base(stall_s: float) -> list[str]:
    """One try of its own: how often and when to try again is decided here."""
    limit = f"{max(1, round(stall_s))}s"
    once = ["--retries", "1", "--low-level-retries", "1"]
    return ["rclone", *once, "--contimeout", limit, "--timeout", limit, "--log-level", "ERROR"]


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError:
        raise TransferError(
            "rclone is not installed, which remotes need. Install it: apt-get install rclone, or rclone.org"
        ) from None
    except OSError as error:
        raise TransferError(f"rclone cannot be started: {error.strerror}", passing=True) from error
