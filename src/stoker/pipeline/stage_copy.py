"""Copy one file to local storage: verified, resumable, by one process at a time, with a deadline.

A copy is an object named by where its file lies, its size and its time, so a file that changes gets another.
`<name>.part` grows beside `<name>.journal`, a line for each block that is on the disk, with its digest: what
a killed run left is checked and kept. The object appears under its name once all of it was read back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stoker.atomic import explained, publish
from stoker.errors import SourceError, StalledError
from stoker.sources.watched import watched
from stoker.units import MIB, format_bytes

BLOCK_BYTES = 32 * MIB
PIECE_BYTES = 4 * MIB
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A file to be copied, as it is now."""

    path: Path
    bytes: int
    mtime_ns: int

    @property
    def object(self) -> str:
        """Name of its copy."""
        return hashlib.sha256(f"{self.path}\0{self.bytes}\0{self.mtime_ns}".encode()).hexdigest()[:32]


def look_at(path: Path) -> Original:
    """The file behind a path.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise SourceError(
            f"{path} cannot be staged: {error.strerror}. Check the path or the mount"
        ) from error
    return Original(path=path, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def is_staged(original: Original, objects: Path) -> bool:
    """Whether its copy is there, as it was left when it was verified."""
    try:
        note = json.loads((objects / f"{original.object}.json").read_bytes())
        found = (objects / original.object).stat()
        return [found.st_size, found.st_mtime_ns] == [note["bytes"], note["mtime_ns"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def stage_file(original: Original, objects: Path, *, deadline_s: float) -> int:
    """Make the copy of a file, or wait for whoever makes it; returns the bytes that were copied here.

    Raises:
        StalledError: A read, or the other process, made no progress for `deadline_s`.
        SourceError: The file changed, or cannot be read.
        ResourceError: No space left; what was copied is kept for the next time.
    """
    with _alone(original, objects, deadline_s):
        if is_staged(original, objects):
            return 0
        return _copy(original, objects, deadline_s)


@contextmanager
def _alone(original: Original, objects: Path, deadline_s: float) -> Generator[None]:
    """Hold the lock of an object; the wait ends when its partial copy has not grown for `deadline_s`."""
    path, part = objects / f"{original.object}.lock", objects / f"{original.object}.part"
    with explained(objects):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        since, size = time.monotonic(), -1
        while not locked(fd):
            grown = part.stat().st_size if part.exists() else -1
            if grown != size:
                since, size = time.monotonic(), grown
            elif time.monotonic() - since > deadline_s:
                raise StalledError(
                    f"{original.path} is being staged by another process, which has made no progress for "
                    f"{deadline_s:g} s ({format_bytes(max(0, size))} so far). End it, then run again"
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def locked(fd: int) -> bool:
    """Whether the lock of an open file was free; it is held from then on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy(original: Original, objects: Path, deadline_s: float) -> int:
    name = original.object
    part, journal = objects / f"{name}.part", objects / f"{name}.journal"
    with explained(objects), part.open("ab"):
        pass
    digest = xxhash.xxh3_128()
    with part.open("r+b", buffering=0) as copy:
        begin = _resume(copy.fileno(), journal, digest)
        copied = _fetch(original, copy.fileno(), journal, digest, begin, deadline_s)
    if look_at(original.path) != original:
        for path in (part, journal):
            path.unlink(missing_ok=True)
        raise SourceError(f"{original.path} changed while it was staged. Run again once it is written")
    _read_back(part, digest.hexdigest(), original)
    with explained(objects):
        publish(part, objects / name)
        found = (objects / name).stat()
        note = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "xxh3_128": digest.hexdigest()}
        temporary = objects / f"{name}.json.part"
        temporary.write_text(json.dumps({**note, "path": str(original.path)}))
        publish(temporary, objects / f"{name}.json")
    journal.unlink(missing_ok=True)
    return copied


def _resume(fd: int, journal: Path, digest: xxhash.xxh3_128) -> int:
    """Bytes of the partial copy that are right; the rest is cut off, and `digest` has seen them."""
    at = 0
    with suppress(OSError, ValueError):
        for line in journal.read_text().splitlines():
            size, wanted = line.split()
            block = os.pread(fd, int(size), at)
            if len(block) != int(size) or xxhash.xxh3_128_hexdigest(block) != wanted:
                break
            digest.update(block)
            at += len(block)
    os.ftruncate(fd, at)
    return at


def _fetch(
    original: Original, fd: int, journal: Path, digest: xxhash.xxh3_128, begin: int, deadline_s: float
) -> int:
    """Copy what is missing, block by block; returns how many bytes that were."""
    source = watched(
        lambda _: os.open(original.path, os.O_RDONLY | os.O_CLOEXEC),
        deadline_s,
        where=f"opening {original.path}",
        advice="Is the mount reachable? Run again: what was copied is kept",
    )
    lines: list[str] = []
    if begin:
        lines = journal.read_text().splitlines()[: -(-begin // BLOCK_BYTES)]
    at = begin
    try:
        while at < original.bytes:
            block = _read(original, source, at, min(BLOCK_BYTES, original.bytes - at), deadline_s)
            with explained(journal.parent):
                view, done = memoryview(block), 0
                while done < len(block):
                    done += os.pwrite(fd, view[done:], at + done)
                os.fsync(fd)  # the journal must not know of what a power cut would take
                lines.append(f"{len(block)} {xxhash.xxh3_128_hexdigest(block)}")
                journal.write_text("\n".join(lines))
            digest.update(block)
            at += len(block)
    finally:
        os.close(source)
    return at - begin


def _read(original: Original, fd: int, offset: int, size: int, deadline_s: float) -> bytes:
    """One block of the original; each piece has `deadline_s`."""

    def work(begin: object) -> bytes:
        pieces: list[bytes] = []
        at = offset
        while at < offset + size:
            begin(at)  # type: ignore[operator]
            piece = os.pread(fd, min(PIECE_BYTES, offset + size - at), at)
            if not piece:
                raise SourceError(
                    f"{original.path} ends at byte {at:,}, it had {original.bytes:,}: cut short"
                )
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    try:
        return watched(
            work,
            deadline_s,
            where=f"staging {original.path}",
            advice="Is the mount reachable? Run again: what was copied is kept",
        )
    except OSError as error:
        raise SourceError(f"{original.path} cannot be read at byte {offset:,}: {error.strerror}") from error


def _read_back(part: Path, wanted: str, original: Original) -> None:
    found = xxhash.xxh3_128()
    with part.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
    if found.hexdigest() != wanted:
        part.unlink()
        raise SourceError(
            f"the copy of {original.path} does not read back as it was written. Check the disk below "
            f"{part.parent}, or choose another data.stage_dir"
        )
