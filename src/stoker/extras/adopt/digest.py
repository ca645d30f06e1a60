"""Digest the files of a folder block by block: an untouched folder of millions is known by its stamps alone.

The fingerprint of a cache is made of content. So every byte is read once before the first sample is stored,
by several threads. What is digested is remembered, so a run that was killed does not begin again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stoker.errors import FormatError, SourceError
from stoker.extras.adopt.listing import ListedBlock, Listing
from stoker.extras.adopt.source import AdoptSource
from stoker.runtime.files import write_file
from stoker.runtime.jsonio import as_object, canonical_json, read_object
from stoker.runtime.threads import map_in_order
from stoker.schema import Json, digest_json
from stoker.sources.files import why_unreadable
from stoker.sources.protocol import FileRef, Part
from stoker.store.recipe import FULL_BYTES, SETTLED_S, digest_file
from stoker.units import MIB, format_count

SAVED_EVERY_S = 10.0
SMALL_BYTES = 2 * MIB
"""Up to this size a sample of a file would be all of it."""


def digest_blocks(
    source: AdoptSource, memo: Path, identity: Literal["auto", "full"], say: Callable[[str], None]
) -> None:
    """Digest the content of all files of a source, block by block; what is known of untouched files is kept.

    Args:
        source: Gets the digests.
        memo: File that remembers digests of blocks by the stamps of their files.
        identity: `auto`: files beyond the first 4 GiB by a sample of their bytes; `full`: all bytes.
        say: Told how far it is, now and then.

    Raises:
        SourceError: A file changed while it was digested.
        StalledError: A file could not be read in time.
    """
    known = _load_memo(memo)
    digester = _BlockDigester(source.folder, source.listing, identity)
    parts: list[Part] = []
    fresh: dict[str, Json] = {}
    any_sampled, saved, total = False, time.monotonic(), len(source)
    for number, block in enumerate(source.listing.blocks()):
        stamp = f"{block.stamp} {identity}"
        found = as_object(known.get(stamp))
        if found is None:
            digest, sampled = digester.digest(block)
            found: dict[str, Json] | None = {"digest": digest, "sampled": sampled}
            if time.time() - block.changed_ns / 1e9 > SETTLED_S:
                fresh[stamp] = found
        any_sampled = any_sampled or bool(found["sampled"])
        parts.append(Part(name=f"block {number}", count=block.count, digest=str(found["digest"])))
        if fresh and time.monotonic() - saved > SAVED_EVERY_S:
            saved = time.monotonic()
            _save_memo(memo, known | fresh)
            say(f"{format_count(block.first + block.count)} of {format_count(total)} samples digested")
    source.set_parts(tuple(parts), sampled=any_sampled)
    if fresh:
        _save_memo(memo, known | fresh)


@dataclass(slots=True)
class _BlockDigester:
    """Digests the files of blocks, several at a time."""

    root: Path
    listing: Listing
    identity: Literal["auto", "full"]
    before_bytes: int = 0
    containers: dict[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])
    """Digests of files with samples of several blocks."""

    def digest(self, block: ListedBlock) -> tuple[str, bool]:
        """Return the digest of a block, and whether a file was only sampled."""
        samples = self.listing.samples(block.first, block.count)
        files: dict[str, bool] = {}
        wanted: list[tuple[str, bool]] = []
        for sample in samples:
            for part in sample.parts:
                if part.file in files:
                    continue
                self.before_bytes += part.size if part.file not in self.containers else 0
                large = part.size > SMALL_BYTES and self.before_bytes > FULL_BYTES
                sampled = self.identity == "auto" and large
                files[part.file] = part.row >= 0 or part.offset >= 0
                if part.file not in self.containers:
                    wanted.append((part.file, sampled))
        what = f"digesting the files of {self.root}"
        found = dict(self.containers)
        for (file, sampled), digest in zip(
            wanted, map_in_order(self._of_file, wanted, what=what), strict=True
        ):
            found[file] = (digest, sampled)
            if files[file]:
                self.containers[file] = found[file]
        content: list[Json] = [
            [
                sample.key,
                [[part.role, part.file, part.offset, part.row] for part in sample.parts],
                dict(sample.values),
                [list(fault) for fault in sample.faults],
            ]
            for sample in samples
        ]
        digests: list[Json] = [[file, found[file][0]] for file in files]
        return digest_json([content, digests]), any(found[file][1] for file in files)

    def _of_file(self, item: tuple[str, bool]) -> str:
        name, sampled = item
        path = self.root / name
        if (why := why_unreadable(path)) is not None:
            return f"unreadable: {why}"
        try:
            return digest_file(FileRef(name=name, path=path), sampled=sampled).digest
        except SourceError as error:
            if isinstance(error.__cause__, OSError):
                return f"unreadable: {error.__cause__.errno}"
            raise


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
