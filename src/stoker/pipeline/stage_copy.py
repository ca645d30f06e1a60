"""Copy one file to local storage: verified, resumable, by one process at a time, with a deadline.

A copy is an object named by where its file lies, its size and its time, so a file that changes gets another.
It grows as files that are fetched do (`stoker.fetch.partial`): what a killed run left is checked and kept.
The object appears under its name once all of it was read back.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import SourceError, StalledError
from stoker.fetch.folder import FolderOrigin
from stoker.fetch.partial import Partial, paths_of
from stoker.fetch.wanted import Wanted
from stoker.runtime.disk import explained
from stoker.runtime.files import replacing
from stoker.runtime.locks import FileLock
from stoker.runtime.threads import ItemClock, call_within
from stoker.units import format_bytes

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
    part, _ = paths_of(objects / original.object)
    with FileLock(objects / f"{original.object}.lock") as lock:
        since, size = time.monotonic(), -1
        while not lock.acquire():
            grown = part.stat().st_size if part.exists() else -1
            if grown != size:
                since, size = time.monotonic(), grown
            elif time.monotonic() - since > deadline_s:
                raise StalledError(
                    f"{original.path} is being staged by {lock.holder()}, which has made no progress for "
                    f"{deadline_s:g} s ({format_bytes(max(0, size))} so far). End it, then run again"
                )
            time.sleep(POLL_S)
        yield


def _copy(original: Original, objects: Path, deadline_s: float) -> int:
    target = objects / original.object
    wanted = Wanted(name=original.object, source=str(original.path), bytes=original.bytes)
    partial = Partial(wanted, target, _not_told)
    begun = partial.at
    try:
        clock = ItemClock()
        call_within(
            deadline_s,
            lambda: _receive(original, partial, clock.begin, deadline_s),
            f"staging {original.path}",
            hint="Is the mount reachable? Run again: what was copied is kept",
            clock=clock,
        )
    except StalledError:
        partial.abandon()  # by the thread that is left behind
        raise
    except BaseException:
        partial.keep()
        raise
    partial.keep()
    if look_at(original.path) != original:
        for path in paths_of(target):
            path.unlink(missing_ok=True)
        raise SourceError(f"{original.path} changed while it was staged. Run again once it is written")
    _publish(original, Partial(wanted, target, _not_told), target)
    return original.bytes - begun


def _receive(original: Original, partial: Partial, begin: Callable[[int], None], deadline_s: float) -> None:
    """Copy what is missing; each piece of the original has `deadline_s`."""
    stream = FolderOrigin(original.path).open(partial.at, "", stall_s=deadline_s)
    try:
        partial.begin(stream.offset, stream.version.tag)
        begin(partial.at)
        while piece := stream.read():
            partial.write(piece)
            begin(partial.at)
    finally:
        stream.close()
    if partial.at < original.bytes:
        raise SourceError(
            f"{original.path} ends at byte {partial.at:,}, it had {original.bytes:,}: cut short"
        )


def _publish(original: Original, whole: Partial, target: Path) -> None:
    """Name the copy, once opening it again has read every block back."""
    try:
        if whole.at < original.bytes:
            raise SourceError(
                f"the copy of {original.path} does not read back as it was written. Check the disk below "
                f"{target.parent}, or choose another data.stage_dir"
            )
        whole.finish()
    finally:
        whole.keep()
    with explained(target.parent):
        found = target.stat()
        note = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "path": str(original.path)}
        with replacing(target.with_name(f"{target.name}.json")) as temporary:
            temporary.write_text(json.dumps(note))


def _not_told(_: int) -> None:
    """How far a copy is read back interests nobody."""
