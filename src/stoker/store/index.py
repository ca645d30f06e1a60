"""`index.json`: which shard and row holds which sample, pinned by digests, opened in O(shards).

The index is derived. It names each shard's file with a digest of its header, which in turn pins everything in
the shard; lost or damaged, it is made again from the shards.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.errors import CorruptError, FormatError, IncompleteError
from stoker.schema import canonical_json
from stoker.store.failures import Failure, failure_from_json
from stoker.store.format import COMPRESSED_FORMAT, FORMATS
from stoker.store.recipe import Recipe
from stoker.store.storage import LocalStorage, check_name
from stoker.store.strict_json import as_object, is_count, read_strict
from stoker.units import MIB

INDEX_FILE = "index.json"
MAX_INDEX_BYTES = 1024 * MIB
START = b'{"complete":'
"""How every index begins; a huge file that is none is refused after one small read."""
LISTED_SEGMENTS = 16
"""Segments of a shard listed as JSON; more are packed, so that opening stays quick however numbers lie."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardEntry:
    """One shard, as the index pins it."""

    file: str
    part: int
    """Index of its part in the recipe."""
    rows: int
    bytes: int
    """Size of the file."""
    header: str
    """xxh3_128 of the file up to its data."""
    segments: NDArray[np.int64]
    """`(k, 3)`: row, first part-local number, count. Rows that serve; another shard may hold the rest."""
    bad: tuple[int, ...] = ()
    """Rows found damaged; never served."""
    raw: int | None = None
    """Of a compressed shard the bytes of the ordinary one; None: it is an ordinary one."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of the ordinary shard."""
        return self.bytes if self.raw is None else self.raw


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """What `index.json` says."""

    fingerprint: str
    name: str
    generation: int
    """Counts the rewrites of this index."""
    sequence: int
    """Orders the fingerprints of one name by when they were first indexed, without any clock."""
    count: int
    """Samples of the source."""
    stored: int
    complete: bool
    """Whether stored and quarantined samples are all there are."""
    shards: tuple[ShardEntry, ...]
    quarantined: Mapping[int, Failure]
    statistics: Mapping[str, Any]
    error: Mapping[str, Any]

    @property
    def stored_ratio(self) -> float | None:
        """Bytes on disk for each byte of the ordinary shards; None where no shard is compressed."""
        shards = [shard for shard in self.shards if len(shard.segments)]
        if all(shard.raw is None for shard in shards):
            return None
        return sum(shard.bytes for shard in shards) / sum(shard.raw_bytes for shard in shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Where records lie: int64 arrays, one entry per run of consecutive numbers in consecutive rows.

    Sorted by `first`; no number is in two runs.
    """

    first: NDArray[np.int64]
    """Global number of the run's first sample."""
    count: NDArray[np.int64]
    shard: NDArray[np.int64]
    """Index of the shard, as for `Cache.shard`."""
    row: NDArray[np.int64]
    """Row of the run's first sample in its shard."""


def segments_of(shards: Sequence[ShardEntry], recipe: Recipe) -> Segments:
    """All shards' segments in global numbers.

    Raises:
        CorruptError: Two of them hold the same number.
    """
    row, first, count = _all_segments(shards).T
    lengths = [len(shard.segments) for shard in shards]
    first = first + np.repeat([recipe.parts[shard.part].offset for shard in shards], lengths).astype(np.int64)
    order = np.argsort(first, kind="stable")
    shard_ids = np.repeat(np.arange(len(shards)), lengths)[order]
    first, count, row = first[order], count[order], row[order]
    if bool((first[1:] < (first + count)[:-1]).any()):
        raise CorruptError("the index gives one sample to two shards")
    return Segments(first=first, count=count, shard=shard_ids, row=row)


def _all_segments(shards: Sequence[ShardEntry]) -> NDArray[np.int64]:
    return np.concatenate([np.empty((0, 3), np.int64), *(shard.segments for shard in shards)])


def dump_index(index: Index, recipe: Recipe) -> bytes:
    """The bytes of `index.json`."""
    entries: dict[str, Any] = {
        "format": _format(index.shards, recipe),
        "fingerprint": index.fingerprint,
        "name": index.name,
        "generation": index.generation,
        "sequence": index.sequence,
        "count": index.count,
        "stored": index.stored,
        "complete": index.complete,
        "schema": recipe.entries["schema"],
        "shards": [
            {
                "file": shard.file,
                "part": shard.part,
                "rows": shard.rows,
                "bytes": shard.bytes,
                "header": shard.header,
                "segments": _pack(shard.segments),
                "bad": list(shard.bad),
                **({} if shard.raw is None else {"raw": shard.raw}),
            }
            for shard in index.shards
        ],
        "quarantined": [
            {name: getattr(failure, name) for name in Failure.__slots__}
            for _, failure in sorted(index.quarantined.items())
        ],
        "statistics": index.statistics,
        "error": index.error,
    }
    text = canonical_json(entries)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # In its place among the sorted names, without writing all of it a second time.
    return text.replace('"error":', f'"digest":"{digest}","error":', 1).encode()


def _format(shards: Sequence[ShardEntry], recipe: Recipe) -> int:
    """That of the recipe, unless a shard is compressed: a version that cannot read it stops at the index."""
    compressed = any(shard.raw is not None for shard in shards)
    return COMPRESSED_FORMAT if compressed else recipe.entries["format"]


def load_index(folder: Path, recipe: Recipe) -> Index:
    """Read and check `index.json` of a folder.

    Raises:
        FileNotFoundError: There is none.
        FormatError: It is of another format, cache or recipe, or names files outside the folder.
        CorruptError: It is damaged, or contradicts itself.
    """
    path = folder / INDEX_FILE
    entries = read_index_entries(folder)
    own = ("schema", "fingerprint")
    expected = {"schema": recipe.entries["schema"], "fingerprint": recipe.fingerprint}
    formats = (recipe.entries["format"], COMPRESSED_FORMAT)
    if entries.get("format") not in formats or any(entries.get(name) != expected[name] for name in own):
        raise FormatError(
            f"{path} is of the cache {entries.get('fingerprint')}, expected {recipe.fingerprint}"
        )
    try:
        return _parse(entries, recipe, str(path))
    except (KeyError, TypeError, AttributeError, UnicodeError, binascii.Error) as error:
        raise CorruptError(f"{path} is malformed: {error!r}") from error


def read_index_entries(folder: Path) -> dict[str, Any]:
    """The index as JSON, its digest checked and nothing else."""
    path = folder / INDEX_FILE
    storage = LocalStorage(folder)
    file = storage.open(INDEX_FILE)
    try:
        start = bytearray(min(len(START), file.size))
        file.read_into(0, memoryview(start))
    finally:
        file.close()
    if bytes(start) != START:
        raise CorruptError(f"{path} does not begin like an index: damaged, or not written by Stoker")
    data = storage.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES)
    entries = read_strict(data, where=str(path))
    if entries.pop("digest", None) != _digest_without(data):
        raise CorruptError(f"{path} does not match its digest")
    if entries.get("format") not in FORMATS:
        raise FormatError(
            f"{path} has format {entries.get('format')!r}, this version reads {FORMATS}. Upgrade stoker"
        )
    return entries


def _digest_without(data: bytes) -> str:
    """The digest of an index in canonical form but for its own `digest`, which only numbers come before."""
    before, found, after = data.partition(b'"digest":"')
    return hashlib.sha256(before + after[len('",') + 64 :] if found else data).hexdigest()


def _parse(entries: Mapping[str, Any], recipe: Recipe, where: str) -> Index:
    listed = entries["shards"]
    segments = _unpack_all([entry["segments"] for entry in listed])
    shards = tuple(
        _shard_entry(entry, own, recipe, where) for entry, own in zip(listed, segments, strict=True)
    )
    failures = [failure_from_json(entry) for entry in entries["quarantined"]]
    index = Index(
        fingerprint=entries["fingerprint"],
        name=_text(entries["name"]),
        generation=entries["generation"],
        sequence=entries["sequence"],
        count=entries["count"],
        stored=entries["stored"],
        complete=entries["complete"],
        shards=shards,
        quarantined={failure.number: failure for failure in failures},
        statistics=_object(entries["statistics"]),
        error=_object(entries["error"]),
    )
    _check_bounds(shards, recipe, where)
    stored = int(_all_segments(shards)[:, 2].sum())
    whole = stored + len(index.quarantined) == index.count
    numbers_fit = all(is_count(n) for n in (index.generation, index.sequence)) and index.count == recipe.count
    files_differ = len({shard.file for shard in shards}) == len(shards)
    known = all(failure.number < recipe.count for failure in failures)
    if not (known and numbers_fit and files_differ and stored == index.stored and whole is index.complete):
        raise CorruptError(f"{where} contradicts itself: its counts or files do not add up")
    segments_of(shards, recipe)
    return index


def _shard_entry(
    entry: Mapping[str, Any], segments: NDArray[np.int64], recipe: Recipe, where: str
) -> ShardEntry:
    shard = ShardEntry(
        file=check_name(_text(entry["file"]), where=where),
        part=entry["part"],
        rows=entry["rows"],
        bytes=entry["bytes"],
        header=_text(entry["header"]),
        segments=segments,
        bad=tuple(entry["bad"]),
        raw=entry.get("raw"),
    )
    fits = is_count(shard.part, len(recipe.parts) - 1) and is_count(shard.rows) and is_count(shard.bytes)
    fits = fits and (shard.raw is None or is_count(shard.raw))
    if fits and all(is_count(row, shard.rows - 1) for row in shard.bad):
        return shard
    raise CorruptError(f"{where}: the entry of {shard.file} is out of bounds")


def _check_bounds(shards: Sequence[ShardEntry], recipe: Recipe, where: str) -> None:
    """Compare segments with rows and parts, all shards at once."""
    row, first, count = _all_segments(shards).T
    lengths = [len(shard.segments) for shard in shards]
    rows = np.repeat([shard.rows for shard in shards], lengths)
    samples = np.repeat([recipe.parts[shard.part].count for shard in shards], lengths)
    # Compared without adding, so that nothing wraps around.
    fits = (row >= 0) & (first >= 0) & (count >= 1) & (row <= rows - count) & (first <= samples - count)
    if not fits.all():
        raise CorruptError(f"{where}: segments are out of the bounds of their shard or part")


def _object(value: Any) -> dict[str, Any]:
    entries = as_object(value)
    if entries is None:
        raise TypeError(f"{value!r:.100} is not an object")
    return entries


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _pack(segments: NDArray[np.int64]) -> list[list[int]] | str:
    if len(segments) <= LISTED_SEGMENTS:
        return segments.tolist()
    return base64.b64encode(np.ascontiguousarray(segments, "<i8").tobytes()).decode()


def _unpack_all(all_segments: Sequence[Any]) -> list[NDArray[np.int64]]:
    """The segments of every shard: those that are listed in one go, since a shard has one as a rule."""
    listed = [own for own in all_segments if not isinstance(own, str)]
    flat = [number for own in listed for segment in own for number in segment]
    if not all(len(segment) == 3 for own in listed for segment in own) or not _are_counts(flat):
        raise TypeError("a segment is not three counts")
    table = np.array(flat, np.int64).reshape(-1, 3)
    pieces = iter(np.split(table, np.cumsum([len(own) for own in listed])[:-1]))
    return [_unpack(own) if isinstance(own, str) else next(pieces) for own in all_segments]


def _are_counts(values: Sequence[Any]) -> bool:
    return {*map(type, values)} <= {int} and all(
        map(is_count, (min(values, default=0), max(values, default=0)))
    )


def _unpack(segments: str) -> NDArray[np.int64]:
    data = base64.b64decode(segments.encode("ascii"), validate=True)
    if len(data) % 24:
        raise TypeError(f"{len(data)} bytes of segments, expected a multiple of 24")
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 3)


# ----------------------------------------------------------------------------------------------------------
# Which rows of which shards serve: arithmetic on runs, so that it costs O(runs) and not O(records).
#
# A run is `(row, first number, count)`: consecutive rows that hold consecutive numbers.


BLOCK = 1 << 20
"""Records that are spread at a time, in 16 MiB; more where one run has more."""


def runs_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The runs in the numbers of consecutive rows from 0 on: `(k, 3)`.

    >>> runs_of(np.array([4, 5, 6, 2, 3])).tolist()
    [[0, 4, 3], [3, 2, 2]]
    """
    if not len(numbers):
        return np.empty((0, 3), np.int64)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1]).astype(np.int64)
    return np.stack([begins, numbers[begins], np.diff(begins, append=len(numbers))], axis=1)


def numbers_of(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number in each row that runs cover, in their order.

    >>> numbers_of(np.array([[0, 4, 3], [3, 2, 2]])).tolist()
    [4, 5, 6, 2, 3]
    """
    return spread(runs[:, 1], runs[:, 2])


def choose_rows(
    runs: Sequence[NDArray[np.int64]], bad: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Which rows of each shard serve: runs `(k, 3)`, sorted by number.

    A number stored twice is served from the first shard in the list, and its first row there.

    Args:
        runs: What each shard holds, in part-local numbers.
        bad: Rows of each shard that never serve.
        offsets: Global number of the first sample of each shard's part.
    """
    if not runs:
        return []
    sound = [without_rows(own, rows) if len(rows) else own for own, rows in zip(runs, bad, strict=True)]
    shard = np.repeat(np.arange(len(sound)), [len(own) for own in sound])
    base = np.array(offsets, np.int64)
    table = np.column_stack([shard, np.concatenate(sound)])
    table[:, 2] += base[shard]
    table = table[np.argsort(table[:, 2], kind="stable")]
    contested = _contested(table[:, 2], table[:, 3])
    if contested.any():
        table = np.concatenate([table[~contested], _settle(table[contested])])
    table = table[np.lexsort((table[:, 2], table[:, 0]))]
    table[:, 2] -= base[table[:, 0]]
    return np.split(table[:, 1:], np.searchsorted(table[:, 0], np.arange(1, len(sound))))


def without_rows(runs: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
    """The runs with some rows cut out."""
    numbers = numbers_of(runs)
    places = spread(runs[:, 0], runs[:, 2])
    keep = ~np.isin(places, rows)
    return _joined(np.zeros(int(keep.sum()), np.int64), places[keep], numbers[keep])[:, 1:]


def _contested(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the runs, sorted by `first`, may share a number with another one."""
    reach = np.maximum.accumulate(first + count)
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = first[1:] >= reach[:-1]
    cluster = np.cumsum(fresh) - 1
    return np.bincount(cluster)[cluster] > 1 if len(first) else fresh


def _settle(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs `(k, 4)` of (shard, row, number, count), number by number, so that each is in one of them."""
    count = table[:, 3]
    shard, row, number = (
        np.repeat(table[:, 0], count),
        spread(table[:, 1], count),
        spread(table[:, 2], count),
    )
    order = np.lexsort((row, shard, number))
    shard, row, number = shard[order], row[order], number[order]
    first = np.concatenate([[True], np.diff(number) != 0])
    return _joined(shard[first], row[first], number[first])


def _joined(shard: NDArray[np.int64], row: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs `(k, 4)` of consecutive rows and numbers in one shard."""
    breaks = (np.diff(number) != 1) | (np.diff(shard) != 0) | (np.diff(row) != 1)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(number)), np.bool_), breaks]))
    counts = np.diff(begins, append=len(number))
    return np.stack([shard[begins], row[begins], number[begins], counts], axis=1)


def spread(first: NDArray[np.int64], count: NDArray[np.int64], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """`first`, `first + 1`, ... of each run, one after another.

    Made in blocks, so that at its peak it takes no more memory than what comes out.

    >>> spread(np.array([4, 0]), np.array([3, 2])).tolist()
    [4, 5, 6, 0, 1]
    """
    ends = np.cumsum(count)
    out = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    begin = done = 0
    while begin < len(count):
        stop = max(begin + 1, int(np.searchsorted(ends, done + BLOCK, side="right")))
        own, end = slice(begin, stop), int(ends[stop - 1])
        before = ends[own] - count[own] - done
        out[done:end] = np.repeat(first[own] - before, count[own]) + np.arange(end - done, dtype=np.int64)
        begin, done = stop, end
    return out


# ----------------------------------------------------------------------------------------------------------
# Shards that an index names and that are gone since, or not as long any more: their records are missing.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LostShard:
    """One shard that served records and cannot any more."""

    path: Path
    entry: ShardEntry
    """As the index has it, segments included."""
    size: int | None
    """Bytes of the file that is there instead; None: there is no regular file."""

    @property
    def records(self) -> int:
        """How many records it served."""
        return int(self.entry.segments[:, 2].sum())

    def error(self) -> IncompleteError | CorruptError:
        """What to raise where its records are needed."""
        advice = f"Run precompute again: it encodes its {self.records} records again, and only those"
        if self.size is None:
            return IncompleteError(f"{self.path} is missing. {advice}")
        return CorruptError(
            f"{self.path} has {self.size} bytes, expected {self.entry.bytes}: truncated or replaced. {advice}"
        )


def without_lost(index: Index, folder: Path, sizes: Mapping[str, int]) -> tuple[Index, tuple[LostShard, ...]]:
    """The index with nothing served from shards that are lost, in their places, and those shards.

    Args:
        index, folder: The index of a folder.
        sizes: Bytes by name of the files that are there.
    """
    lost = tuple(
        LostShard(path=folder / shard.file, entry=shard, size=sizes.get(shard.file))
        for shard in index.shards
        if len(shard.segments) and sizes.get(shard.file) != shard.bytes
    )
    if not lost:
        return index, lost
    gone = {shard.entry.file for shard in lost}
    nothing = np.empty((0, 3), np.int64)
    shards = tuple(replace(s, segments=nothing) if s.file in gone else s for s in index.shards)
    stored = index.stored - sum(shard.records for shard in lost)
    return replace(index, shards=shards, stored=stored, complete=False), lost
