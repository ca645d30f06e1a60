"""Digest the files of a folder block by block: an untouched folder of millions is known by its stamps alone.

The fingerprint of a cache is made of content. So every byte is read once before the first sample is stored,
by several threads. What is digested is remembered, so a run that was killed does not begin again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import FormatError, SourceError
from stoker.extras.adopt.listing import FilePart, ListedBlock, Listing
from stoker.extras.adopt.source import AdoptSource
from stoker.runtime.files import write_file
from stoker.runtime.jsonio import as_object, canonical_json, read_object
from stoker.runtime.threads import map_in_order
from stoker.schema import Json, digest_json
from stoker.sources.files import why_unreadable
from stoker.sources.protocol import FileRef, Part
from stoker.store.recipe import SETTLED_S, digest_file
from stoker.units import MIB, format_count, format_few

SAVED_EVERY_S = 10.0
BATCH_FILES = 64
"""Small files that a thread digests before it takes more: handing one over costs as much as digesting it."""
BATCH_BYTES = 8 * MIB
TRIES = 2
"""Times that a file is read before it counts as unreadable, which makes another cache."""
UNREADABLE = "unreadable: "
"""What the digest of a file begins with that cannot be read."""


def digest_blocks(source: AdoptSource, memo: Path, say: Callable[[str], None]) -> None:
    """Digest the content of all files of a source, block by block; what is known of untouched files is kept.

    Args:
        source: Gets the digests.
        memo: File that remembers digests of blocks by the stamps of their files.
        say: Told how far it is, now and then.

    Raises:
        SourceError: A file changed while it was digested.
        StalledError: A file could not be read in time.
    """
    known = _load_memo(memo)
    digester = _BlockDigester(source.folder, source.listing)
    parts: list[Part] = []
    fresh: dict[str, Json] = {}
    any_sampled, saved, total = False, time.monotonic(), len(source)
    for number, block in enumerate(source.listing.blocks()):
        found = as_object(known.get(block.stamp))
        if found is None:
            digested = digester.digest(block)
            found: dict[str, Json] | None = {"digest": digested.digest, "sampled": digested.sampled}
            if digested.readable and time.time() - block.changed_ns / 1e9 > SETTLED_S:
                fresh[block.stamp] = found
        any_sampled = any_sampled or bool(found["sampled"])
        parts.append(Part(name=f"block {number}", count=block.count, digest=str(found["digest"])))
        if fresh and time.monotonic() - saved > SAVED_EVERY_S:
            saved = time.monotonic()
            _save_memo(memo, known | fresh)
            say(f"{format_count(block.first + block.count)} of {format_count(total)} samples digested")
    source.set_parts(tuple(parts), sampled=any_sampled)
    if fresh:
        _save_memo(memo, known | fresh)


class _BlockDigest(NamedTuple):
    digest: str
    sampled: bool
    """True if a file was digested by a sample of its bytes."""
    readable: bool
    """False if a file could not be read, which may pass."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A few small files, or one large file, that one thread digests."""

    files: Sequence[FilePart]

    def __str__(self) -> str:
        return format_few([file.file for file in self.files], 1)


@dataclass(slots=True)
class _BlockDigester:
    """Digests the files of blocks, several at a time."""

    root: Path
    listing: Listing
    containers: dict[str, str] = field(default_factory=dict[str, str])
    """Digests of files with samples of several blocks."""

    def digest(self, block: ListedBlock) -> _BlockDigest:
        """Return the digest of a block."""
        samples = self.listing.samples(block.first, block.count)
        files: dict[str, FilePart] = {}
        for sample in samples:
            for part in sample.parts:
                files.setdefault(part.file, part)
        found = {file: self.containers[file] for file in files if file in self.containers}
        batches = _batches([part for file, part in files.items() if file not in found])
        what = f"digesting the files of {self.root}"
        for batch, own in zip(batches, map_in_order(self._of_batch, batches, what=what), strict=True):
            for part, digest in zip(batch.files, own, strict=True):
                found[part.file] = digest
                if part.row >= 0 or part.offset >= 0:
                    self.containers[part.file] = digest
        content: list[Json] = [
            [
                sample.key,
                [[part.role, part.file, part.offset, part.row] for part in sample.parts],
                dict(sample.values),
                [list(fault) for fault in sample.faults],
            ]
            for sample in samples
        ]
        digests: list[Json] = [[file, found[file]] for file in files]
        return _BlockDigest(
            digest=digest_json([content, digests]),
            sampled=any(part.sampled for part in files.values()),
            readable=not any(digest.startswith(UNREADABLE) for digest in found.values()),
        )

    def _of_batch(self, batch: _Batch) -> list[str]:
        return [self._of_file(part) for part in batch.files]

    def _of_file(self, part: FilePart) -> str:
        path = self.root / part.file
        if (why := why_unreadable(path)) is not None:
            return f"{UNREADABLE}{why}"
        errors: list[int | None] = []
        while len(errors) < TRIES:
            try:
                return digest_file(FileRef(name=part.file, path=path), sampled=part.sampled).digest
            except SourceError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                errors.append(error.__cause__.errno)
        return f"{UNREADABLE}{errors[-1]}"


def _batches(parts: Sequence[FilePart]) -> list[_Batch]:
    """Return files in their order, those of a batch few enough, and small enough, for one thread."""
    found: list[list[FilePart]] = []
    size = 0
    for part in parts:
        if not found or len(found[-1]) >= BATCH_FILES or size + part.size > BATCH_BYTES:
            found.append([])
            size = 0
        found[-1].append(part)
        size += part.size
    return [_Batch(files) for files in found]


def _load_memo(path: Path) -> dict[str, Any]:
    try:
        memo = read_object(path)
    except (OSError, FormatError):
        return {}
    blocks = as_object(memo.get("blocks")) or {}
    return blocks if memo.get("check") == _check(blocks) else {}


def _save_memo(path: Path, blocks: Mapping[str, Json]) -> None:
    text = canonical_json({"blocks": dict(blocks), "check": _check(blocks)})
    write_file(path, text.encode())


def _check(blocks: Mapping[str, Json]) -> str:
    return hashlib.sha256(canonical_json(dict(blocks)).encode()).hexdigest()
