"""Find records in other caches of a folder that were encoded from the very same samples.

`adopt.py` takes over shards of parts that did not change at all. When something changed inside a part (rows
were added to a table, an image to a folder, a file got another name), its key is another one. Then samples
are read again, and each is looked up by the digest of what was read. A record depends on its sample, the
encoder and the stored dtype alone, so with equal digests and otherwise equal recipes it is the same record
(docs/design/041).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import FormatError, StalledError
from stoker.schema import Sample, Schema, canonical_json, schema_to_json
from stoker.store.adopt import FINGERPRINT
from stoker.store.cache import Cache, open_indexed
from stoker.store.local import LocalStorage
from stoker.store.protocols import SOURCES_FILE
from stoker.store.recipe import Recipe, load_recipe
from stoker.store.strict_json import read_strict
from stoker.units import GIB, format_count

log = logging.getLogger("stoker")
MOST_NAMED = 5
"""Changed files that are named one by one."""
_BITS = 21
"""Of a row's number, at most 2^20, and of a shard's."""


def digest_samples(arrays: Sample, schema: Schema, members: Sequence[int]) -> NDArray[np.uint64]:
    """Return a digest for each of several samples: of its fields' names, dtypes, shapes and bytes.

    Args:
        arrays: Fields as `(samples, *shape)`. Time may be padded at the end.
        schema: Fields of a sample.
        members: Which rows of `arrays`.

    Returns:
        `(len(members), 2)`: the halves of xxh3_128.
    """
    head = canonical_json(schema_to_json(schema)).encode()
    found = np.empty((len(members), 2), np.uint64)
    for i, member in enumerate(members):
        digest = xxhash.xxh3_128(head)
        for name, field in schema.items():
            array = arrays[name][member]
            if field.ragged:
                digest.update(str(array.shape[0]).encode())
            elif field.time:
                array = array[: field.shape[0]]
            data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            digest.update(data)
        found[i] = np.frombuffer(digest.digest(), ">u8")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Records of one cache that samples were found in."""

    cache: Cache
    members: list[int]
    """Places of the samples among those that were looked up."""
    places: NDArray[np.int64]
    """Shard and row of the record of each, `(len(members), 2)`."""
    moved: list[int]
    """Those of `members` that have another place in their group there."""


class SameSamples:
    """Records of other caches by the digest of their samples.

    It keeps those caches in use, so that no clean-up removes them.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._group = recipe.group.samples
        self._caches = _alike(folder, recipe)
        tables = [_table(cache, place) for place, cache in enumerate(self._caches)]
        table = np.concatenate([*tables, np.empty((0, 3), np.uint64)])
        self._table = table[np.lexsort((table[:, 1], table[:, 0]))]
        self._refused: set[tuple[int, int]] = set()
        if self._caches and not len(self._table):
            log.info(
                "%s: the caches here keep no digests of samples: changed files are encoded again entirely",
                folder.parent.name,
            )

    def __len__(self) -> int:
        """Return the number of records that may be found."""
        return len(self._table)

    def refuse(self, digests: NDArray[np.uint64]) -> None:
        """Find these no more: their records are damaged."""
        self._refused |= {(int(high), int(low)) for high, low in digests}

    def find(self, digests: NDArray[np.uint64], locals_: Sequence[int]) -> list[Match]:
        """Return where the records of samples are, for those that are found.

        Args:
            digests: As `digest_samples`.
            locals_: Their numbers within the part that they are in now.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        begins = np.searchsorted(self._table[:, 0], digests[:, 0])
        for member, (begin, (high, low)) in enumerate(zip(begins.tolist(), digests.tolist(), strict=True)):
            at = begin
            while at < len(self._table) and self._table[at, 0] == high and self._table[at, 1] != low:
                at += 1
            here = at < len(self._table) and self._table[at, 0] == high
            if here and (high, low) not in self._refused and (high or low):
                cache, place = divmod(int(self._table[at, 2]), 1 << 2 * _BITS)
                found.setdefault(cache, []).append((member, *divmod(place, 1 << _BITS)))
        return [self._match(self._caches[i], rows, locals_) for i, rows in found.items()]

    def _match(self, cache: Cache, rows: list[tuple[int, int, int]], locals_: Sequence[int]) -> Match:
        moved: list[int] = []
        for member, shard, row in rows:
            try:
                there = int(cache.shard(shard).numbers()[row])
            except (FormatError, OSError):
                continue  # the copy will find out as well
            if there % self._group != locals_[member] % self._group:
                moved.append(member)
        places = np.array([[shard, row] for _, shard, row in rows], np.int64)
        return Match(cache=cache, members=[member for member, _, _ in rows], places=places, moved=moved)


def _alike(folder: Path, recipe: Recipe) -> list[Cache]:
    """Return caches whose recipes differ from ours in the source alone, the newest of our name first.

    Those of other names count too: where a file gets another name, its samples may change their split.
    """
    found: list[Cache] = []
    wanted = _without_source(recipe)
    for path in sorted(folder.parent.parent.glob("[!.]*/*")):
        if not FINGERPRINT.fullmatch(path.name) or path.name == recipe.fingerprint:
            continue
        try:
            theirs = load_recipe(path)
            if _without_source(theirs) == wanted:
                found.append(open_indexed(path, theirs))
        except (FormatError, StalledError, OSError):
            continue
    name = folder.parent.name
    return sorted(found, key=lambda cache: (cache.name == name, cache.index.sequence), reverse=True)


def _without_source(recipe: Recipe) -> dict[str, Any]:
    return {name: entry for name, entry in recipe.entries.items() if name != "source"}


def _table(cache: Cache, place: int) -> NDArray[np.uint64]:
    """Return what a cache serves, `(n, 3)`: digest (2), and `place`, shard and row in one number."""
    tables: list[NDArray[np.uint64]] = []
    for i, entry in enumerate(cache.index.shards):
        try:
            contents = cache.shard(i).contents if len(entry.segments) else ()
        except (FormatError, OSError):
            continue
        if not len(contents):
            continue
        rows = np.concatenate([np.arange(row, row + count) for row, _, count in entry.segments.tolist()])
        table = np.empty((len(rows), 3), np.uint64)
        table[:, :2] = contents[rows]
        table[:, 2] = rows + (place << 2 * _BITS | i << _BITS)
        tables.append(table)
    return np.concatenate([*tables, np.empty((0, 3), np.uint64)])


def changes_of_files(folder: Path, recipe: Recipe) -> list[str]:
    """Return a line for each part of the source that is not as in the newest cache of the same name.

    That cache must differ in the source's parts alone.
    """
    caches = [cache for cache in _alike(folder, recipe) if cache.name == folder.parent.name]
    if not caches or _settings(caches[0].recipe) != _settings(recipe):
        return []
    before = {part.name: part for part in caches[0].recipe.parts if part.count}
    now = {part.name: part for part in recipe.parts if part.count}
    digests = _digests(caches[0].path)
    called = {digests[name]: name for name in before.keys() - now.keys() if name in digests}
    renamed = {file.name: called[file.digest] for file in recipe.files if file.digest in called}
    again = "read again, and encoded only where they are new"
    if recipe.entries["encoder"] is None:
        again = "stored again"
    lines = [f"{old} is called {name} now" for name, old in renamed.items() if name in now]
    for name, part in now.items():
        count = format_count(part.count, "sample")
        if name not in before and name not in renamed:
            lines.append(f"{name} is new, {count}")
        elif name in before and before[name].key != part.key:
            lines.append(f"{name} changed: its {count} are {again}")
    gone = before.keys() - now.keys() - {*renamed.values()}
    lines += [f"{name} is gone, {format_count(before[name].count, 'sample')}" for name in sorted(gone)]
    more = len(lines) - MOST_NAMED
    return lines if more <= 0 else [*lines[:MOST_NAMED], f"{more} more files changed"]


def _settings(recipe: Recipe) -> dict[str, Any]:
    source: dict[str, Any] = recipe.entries["source"]
    return {name: entry for name, entry in source.items() if name not in ("parts", "sampled")}


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files behind a cache by name, where it has them."""
    try:
        lines = LocalStorage(folder).read(SOURCES_FILE, limit_bytes=GIB).splitlines()
        entries = [read_strict(line, where=SOURCES_FILE) for line in lines]
        return {str(entry["name"]): str(entry["digest"]) for entry in entries}
    except (FormatError, OSError, KeyError):
        return {}
