"""A file that is not complete yet, `.<name>.part`, and the journal of its sound blocks.

The journal's first line names the content; then there is a line for each block on the disk, with its
digest. A killed run leaves both: blocks that still match are kept, the rest is cut off. So a resumed file
is as good as one that came in one go, whether or not a digest of the file was declared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias

import xxhash

from stoker.errors import DigestError, StokerError, TransferError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import publish, replace_atomically
from stoker.units import MIB

Algorithm: TypeAlias = Literal["sha256", "sha1", "md5"]
BLOCK_BYTES = 16 * MIB
LOCK_S = 2.0
HEAD = "stoker part 1 "


class PartialFile:
    """Opened by one thread; `abandon` may come from another, and nothing of it is written after that."""

    def __init__(
        self,
        target: Path,
        beat: Callable[[int], None] = lambda _: None,
        *,
        bytes: int | None = None,
        algorithm: Algorithm | None = None,
        digest: str = "",
    ) -> None:
        """Open what is there, or begin again.

        Args:
            target: The name that it gets once it is complete.
            beat: Called with the bytes that were read back so far.
            bytes: Its declared size; None: none was declared.
            algorithm, digest: Its declared digest, in hexadecimal.
        """
        self._target, self._bytes = target, bytes
        self._algorithm: Algorithm | None = algorithm
        self._digest = digest
        self._part, self.journal = paths_of(target)
        self._lock = Lock()
        self._abandoned = self._named = False
        self.at = 0
        """Bytes that are there and right."""
        self.tag = ""
        """Which content they are of."""
        self._lines: list[str] = []
        self._reset_digests()
        with explain_disk_errors(self._part):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._part, flags, 0o666)
        with suppress(OSError, ValueError):
            self._read_back(beat)
        os.ftruncate(self._fd, self.at)

    def _reset_digests(self) -> None:
        self._whole = None if self._algorithm is None else new_digest(self._algorithm)
        self._block, self._block_bytes = xxhash.xxh3_128(), 0

    def _read_back(self, beat: Callable[[int], None]) -> None:
        head, *lines = self.journal.read_text().splitlines()
        if not head.startswith(HEAD):
            return
        self.tag = head.removeprefix(HEAD)
        for line in lines:
            size, wanted = line.split()
            block = os.pread(self._fd, min(int(size), 2 * BLOCK_BYTES), self.at)
            if len(block) != int(size) or xxhash.xxh3_128_hexdigest(block) != wanted:
                return
            if self._whole is not None:
                self._whole.update(block)
            self._lines.append(line)
            self.at += len(block)
            beat(self.at)

    def begin(self, offset: int, tag: str) -> None:
        """Continue at `offset` with the content that `tag` names; 0 throws away what is there."""
        with self._lock:
            self._check()
            if offset == 0:
                self.at, self._lines = 0, []
                self._reset_digests()
                os.ftruncate(self._fd, 0)
            assert offset == self.at
            self.tag = tag
            self._write_journal()

    def write(self, piece: bytes) -> None:
        """Add what came next.

        Raises:
            ResourceError: No space left; what was journalled stays for the next run.
        """
        with self._lock:
            self._check()
            view, done = memoryview(piece), 0
            with explain_disk_errors(self._part):
                while done < len(piece):
                    done += os.pwrite(self._fd, view[done:], self.at + done)
            self.at += len(piece)
            self._block.update(piece)
            self._block_bytes += len(piece)
            if self._whole is not None:
                self._whole.update(piece)
            if self._block_bytes >= BLOCK_BYTES:
                self._commit_block()

    def _commit_block(self) -> None:
        """Write down that a block is there, once it really is."""
        if not self._block_bytes:
            return
        with explain_disk_errors(self._part):
            os.fsync(self._fd)
            self._lines.append(f"{self._block_bytes} {self._block.hexdigest()}")
            with self.journal.open("a") as journal:  # a torn last line is a block that is fetched again
                journal.write(self._lines[-1] + "\n")
        self._block, self._block_bytes = xxhash.xxh3_128(), 0

    def _write_journal(self) -> None:
        with replace_atomically(self.journal) as temporary:
            temporary.write_text("\n".join([HEAD + self.tag.replace("\n", " "), *self._lines]) + "\n")

    def finish(self) -> None:
        """Compare the file with what was declared, and give it its name.

        Raises:
            TransferError: Size or digest are others; what was fetched is thrown away.
        """
        with self._lock:
            self._check()
            if self._bytes is not None and self.at != self._bytes:
                at = self.at
                self._throw_away()
                raise TransferError(f"has {at:,} bytes, {self._bytes:,} were declared")
            if self._whole is not None and self._whole.hexdigest() != self._digest:
                found = self._whole.hexdigest()
                self._throw_away()
                raise DigestError(f"{self._algorithm} is {found}, declared was {self._digest}")
            with explain_disk_errors(self._target):
                publish(self._part, self._target)
                self.journal.unlink(missing_ok=True)
            self._block_bytes, self._named = 0, True

    def keep(self) -> None:
        """Close it for now; what is there is journalled, so that the next try continues from here."""
        with self._lock:
            if not self._abandoned and not self._named:
                with suppress(OSError, StokerError):
                    self._commit_block()
                    if not self.at:
                        self._part.unlink(missing_ok=True)
                        self.journal.unlink(missing_ok=True)
            self._close()

    def abandon(self) -> bool:
        """Let nothing more be written by the thread that has it; False: it is still writing."""
        free = self._lock.acquire(timeout=LOCK_S)
        self._abandoned = True
        if free:
            self._lock.release()
        return free

    def _check(self) -> None:
        if self._abandoned or self._fd < 0:
            raise TransferError("given up")

    def _throw_away(self) -> None:
        self.at, self._lines = 0, []
        self._reset_digests()
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            self.journal.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_digest(algorithm: Algorithm) -> Any:
    """Return a digest of `hashlib`; they tell damage from no damage, and need not withstand an attacker."""
    return hashlib.new(algorithm, usedforsecurity=False)


def paths_of(target: Path) -> tuple[Path, Path]:
    """Return the partial file of a file, and its journal."""
    return target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.journal")
