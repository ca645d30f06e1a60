"""What was fetched into a folder before, so that a file that is there need not be read to be known.

`.stoker-fetch.json` has size, time and digest of each file as it was when it got its name. A file that was
touched since is compared in full again.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from stoker.errors import ResourceError
from stoker.fetch.partial import new_digest
from stoker.fetch.wanted import Wanted
from stoker.runtime.files import replacing
from stoker.runtime.locks import FileLock
from stoker.units import MIB

RECORD = ".stoker-fetch.json"
LOCK = ".stoker-fetch.lock"
PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A file as it was when it was fetched, or compared."""

    bytes: int
    mtime_ns: int
    algorithm: str | None
    digest: str
    source: str
    tag: str


class Record:
    """The record of one folder; only the thread that made it may write."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self._files: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path.read_bytes())
            if isinstance(found, dict) and isinstance(files := cast("Any", found).get("files"), dict):
                self._files = cast("dict[str, Any]", files)

    def of(self, name: str) -> Known | None:
        """What is known of a file."""
        try:
            return Known(**self._files[name])
        except (KeyError, TypeError):
            return None

    def put(self, name: str, known: Known) -> None:
        """Remember a file."""
        self._files[name] = asdict(known)
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps({"files": self._files}, indent=1, sort_keys=True))


def look(target: Path) -> os.stat_result | None:
    """The regular file at a path, not followed; None where there is none."""
    with suppress(OSError):
        found = target.lstat()
        if stat.S_ISREG(found.st_mode):
            return found
    return None


def is_known(wanted: Wanted, found: os.stat_result, known: Known | None) -> bool:
    """Whether the file is the wanted one as far as the record says, without reading it."""
    if known is None or (found.st_size, found.st_mtime_ns) != (known.bytes, known.mtime_ns):
        return False
    if wanted.bytes is not None and wanted.bytes != known.bytes:
        return False
    if wanted.algorithm is not None:
        return (wanted.algorithm, wanted.digest) == (known.algorithm, known.digest)
    return wanted.source == known.source


def is_same(wanted: Wanted, target: Path, found: os.stat_result, beat: Callable[[int], None]) -> bool:
    """Whether the file at a path has the declared digest; reads it."""
    if wanted.algorithm is None or wanted.bytes not in (None, found.st_size):
        return False
    digest, at = new_digest(wanted.algorithm), 0
    with target.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            at += len(piece)
            beat(at)
    return digest.hexdigest() == wanted.digest


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Be the only one that fetches into a folder; a lock of a dead process holds nobody up.

    Raises:
        ResourceError: Another process is at it.
    """
    with FileLock(folder / LOCK, mode=0o666) as lock:
        if not lock.acquire():
            raise ResourceError(
                f"{folder}: another stoker fetch ({lock.holder()}) is at it. Wait for it, then run again"
            )
        yield
