"""Digest source files, remembering what was digested before.

Content decides a fingerprint, not names or times; but a file whose relative name, size, times, device and
inode are as before is taken as unchanged, so that a hit costs a stat and no read. Name, size and modification
time alone would not do: copies that keep times (`cp -p`, `rsync -t`, `tar`) share them with other contents.
A file that was moved, or whose permissions changed, is therefore digested once more.

`identity="auto"` digests in full while the sizes of the files up to and including this one are at most
4 GiB together, and samples the files from there on; a first file above 4 GiB is sampled too. So whether a
file is sampled depends on the sizes before it, its digest on nothing else: files added at the end leave the
digests of the others as they were, files added earlier may turn full digests into sampled ones.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from stoker.errors import ConfigError, FormatError, ResourceError, SourceError
from stoker.schema import canonical_json
from stoker.sources.files import open_regular, stamp_of
from stoker.sources.protocol import FileRef
from stoker.store.local import LocalStorage
from stoker.store.strict_json import as_object, read_strict
from stoker.store.sums import record_seeds
from stoker.units import GIB, MIB

MEMO = ".digests"
MEMO_LIMIT_BYTES = 256 * MIB
FULL_BYTES = 4 * GIB
"""Up to this running total of sizes, in the order of a source's files, `auto` digests in full."""
SAMPLE_BYTES = MIB
SAMPLE_BLOCKS = 256
"""Blocks read between head and tail of a sampled file, at most; one for each 64 MiB of the file."""
SETTLED_S = 2.0
"""Age below which a digest is not remembered: the file may change within one tick of its time stamp. Age is
counted from the change time, which unlike the modification time no program can set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What the content of one file is known by."""

    name: str
    """Name relative to the source's root."""
    bytes: int
    digest: str
    """sha256, 64 hex digits: of all bytes, or of size, head, tail and seeded blocks when `sampled`."""
    sampled: bool
    stamp: tuple[int, ...] = field(default=(), compare=False)
    """Size, times, device and inode when it was digested; not part of what it is known by."""


class Digester(Protocol):
    """Whoever knows what files hold; `Digests` reads them."""

    def files(self, refs: Sequence[FileRef]) -> list[FileDigest]:
        """Digest files, in their order.

        Raises:
            SourceError: A file is missing, unreadable, not regular, or changed while it was read.
        """
        ...


class Digests:
    """Digests files, with a memo in `<cache_dir>/.digests` when a folder is given.

    A damaged memo is ignored, and a folder that cannot be written is no error: then nothing is remembered.
    """

    def __init__(self, cache_dir: Path | None = None, identity: Literal["auto", "full"] = "auto") -> None:
        if identity not in ("auto", "full"):
            raise ConfigError(f"identity is {identity!r}, expected 'auto' or 'full'")
        self._storage = None if cache_dir is None else LocalStorage(Path(cache_dir))
        self._identity = identity

    def files(self, refs: Sequence[FileRef]) -> list[FileDigest]:
        """Digest files, in their order.

        Raises:
            SourceError: A file is missing, unreadable, not regular, or changed while it was read.
        """
        memo = self._load()
        found: list[FileDigest] = []
        fresh: dict[str, str] = {}
        before = 0
        for ref in refs:
            status = _stat(ref)
            before += status.st_size
            sampled = self._identity == "auto" and before > FULL_BYTES
            known_by = stamp_of(status)
            key = " ".join((*map(str, known_by), "sampled" if sampled else "full", ref.name))
            digest = memo.get(key) or fresh.get(key)
            if digest is None:
                digest = _digest(ref, status, sampled=sampled)
                if time.time() - status.st_ctime > SETTLED_S:
                    fresh[key] = digest
            found.append(
                FileDigest(
                    name=ref.name, bytes=status.st_size, digest=digest, sampled=sampled, stamp=known_by
                )
            )
        if fresh:
            self._save(fresh)
        return found

    def _load(self) -> dict[str, str]:
        if self._storage is None:
            return {}
        try:
            memo = read_strict(self._storage.read(MEMO, limit_bytes=MEMO_LIMIT_BYTES), where=MEMO)
        except (OSError, FormatError):
            return {}
        files = as_object(memo.get("files"))
        return (
            files
            if memo.get("format") == 1 and files is not None and _digest_of(files) == memo.get("check")
            else {}
        )

    def _save(self, fresh: dict[str, str]) -> None:
        if self._storage is None:
            return
        files = self._load() | fresh  # read again: another process may have added to it meanwhile
        text = canonical_json({"format": 1, "files": files, "check": _digest_of(files)})
        with suppress(OSError, ResourceError):  # ReadOnlyError is an OSError
            self._storage.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._storage.put(MEMO, text.encode())


def digest_file(ref: FileRef, *, sampled: bool) -> FileDigest:
    """One file as it is now, whatever is remembered.

    Raises:
        SourceError: As `Digests.files`.
    """
    status = _stat(ref)
    digest = _digest(ref, status, sampled=sampled)
    return FileDigest(
        name=ref.name, bytes=status.st_size, digest=digest, sampled=sampled, stamp=stamp_of(status)
    )


def _digest_of(files: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(files).encode()).hexdigest()


def _stat(ref: FileRef) -> os.stat_result:
    try:
        return ref.path.stat()
    except OSError as error:
        raise SourceError(f"{ref.path} cannot be read: {error.strerror}. Check the path") from error


def _times(status: os.stat_result) -> tuple[int, ...]:
    """What a write to a file changes."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(ref: FileRef, before: os.stat_result, *, sampled: bool) -> str:
    try:
        with open_regular(ref.path) as file:
            fd = file.fileno()
            digest = (
                _sampled(fd, before.st_size) if sampled else hashlib.file_digest(file, "sha256").hexdigest()
            )
            after = os.fstat(fd)
    except OSError as error:
        raise SourceError(f"{ref.path} cannot be read: {error.strerror}") from error
    if _times(after) != _times(before):
        raise SourceError(f"{ref.path} changed while it was digested. Run again once it is written")
    return digest


def sampled_offsets(size: int) -> list[int]:
    """Where a sampled file of `size` bytes is read: head, seeded blocks, tail, each `SAMPLE_BYTES` long."""
    last = max(0, size - SAMPLE_BYTES)
    blocks = min(SAMPLE_BLOCKS, size // (64 * MIB))
    # Seeded by the size alone: the same positions on every machine, and known to nobody who writes the file.
    inner = record_seeds(size, np.arange(blocks)) % np.uint64(last + 1)
    return [0, *sorted(inner.tolist()), last]


def _sampled(fd: int, size: int) -> str:
    total = hashlib.sha256(str(size).encode())
    for offset in sampled_offsets(size):
        total.update(os.pread(fd, SAMPLE_BYTES, offset))
    return total.hexdigest()
