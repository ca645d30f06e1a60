"""Merge short shards into full ones: a cache of many interrupted runs becomes as quick as one of one run.

Shards that are not compressed as asked are written again on the way, full ones too.

Records travel with everything that their shards said of them: bits, conversion errors, marks, environment
(shards of different environments are never merged). New shards appear by the usual commit, then an index in
which they serve; the old ones stay for whoever opened an earlier generation, until `gc` removes them.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, FormatError
from stoker.schema import Json, canonical_json
from stoker.store import layout
from stoker.store.cache import Cache, open_cache
from stoker.store.catalog import Catalog, write_index
from stoker.store.compressed import Compression, check_compression
from stoker.store.copies import copy_rows
from stoker.store.index import Index, ShardEntry
from stoker.store.local import LocalStorage
from stoker.store.mirror.root import address_of
from stoker.store.shard_read import Shard
from stoker.store.shard_write import OpenShard, ShardSpec
from stoker.store.use import indexing, maintaining
from stoker.units import MIB

CHUNK_BYTES = 4 * MIB
"""Bytes of records read before they are written."""
CHUNK_ROWS = 1024
PUBLISH_S, PUBLISH_TIMES = 10.0, 10.0
"""What was merged serves after this many seconds, or this many times what writing an index took."""


@dataclass(slots=True, kw_only=True)
class CompactReport:
    """What merging came to."""

    path: str
    address: str | None = None
    """Where it lies, if that is not this machine."""
    generation: int = 0
    """Of the index, afterwards."""
    shards_before: int = 0
    """Shards that served records."""
    shards_after: int = 0
    merged: int = 0
    """Short shards whose records serve from others now."""
    written: int = 0
    """Shards that were written."""
    records: int = 0
    """Records in them."""
    bytes_before: int = 0
    """Bytes of shards that served records."""
    bytes_after: int = 0
    superseded_bytes: int = 0
    """Bytes of shards that serve nothing any more; gc removes them."""
    left: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Shards with damaged records, left as they are: file and why."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "path": self.path,
            "address": self.address,
            "generation": self.generation,
            "shards_before": self.shards_before,
            "shards_after": self.shards_after,
            "merged": self.merged,
            "written": self.written,
            "records": self.records,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "superseded_bytes": self.superseded_bytes,
            "left": [{"shard": shard, "why": why} for shard, why in self.left],
        }


def compact(
    path: str | Path, *, shard_bytes: int = layout.SHARD_BYTES, compression: str | None = None
) -> CompactReport:
    """Merge the short shards of a cache, and rewrite those that are not compressed as asked.

    Does nothing where merging would not lessen the number of shards and all are stored as asked, so a second
    call finds nothing to do.
    Killed at any moment, the cache serves what it served; the next call begins anew with what is not merged.

    Args:
        path: A fingerprint's folder, or `<cache_dir>/<name>`: then the newest complete one.
        shard_bytes: Bytes of records in a full shard.
        compression: `none`, `zstd` or `lz4`; None: merged shards are stored as most of their records were.
    Raises:
        ConfigError: `shard_bytes` is less than 1, or `compression` is not known or not installed.
        FormatError, IncompleteError: There is no cache, or a shard is lost. `verify --repair` mends that.
        ReadOnlyError, ResourceError: The folder cannot be written, or is full.
        StalledError: Somebody else has been compacting or repairing it all the while.
    """
    kind = None if compression is None else _checked(compression)
    cache = open_cache(path, require_complete=False)
    if cache.lost:
        raise cache.lost[0].error()
    with maintaining(cache.path):
        merge = _Merge(cache, shard_bytes, kind)
        report = CompactReport(
            path=str(cache.path),
            address=address_of(cache.path),
            shards_before=len(_serving(merge.cache.index)),
            bytes_before=sum(shard.bytes for shard in _serving(merge.cache.index)),
        )
        try:
            for group in merge.groups(report.left):
                report.merged += len(group.files)
                report.records += merge.run(group)
        finally:
            merge.publish()
        report.written = len(merge.written)
    index = merge.cache.index
    report.generation, report.shards_after = index.generation, len(_serving(index))
    report.bytes_after = sum(shard.bytes for shard in _serving(index))
    report.superseded_bytes = sum(shard.bytes for shard in index.shards if not len(shard.segments))
    return report


def _checked(compression: str) -> Compression:
    kind = check_compression(compression)
    if kind == "auto":
        raise ConfigError("compression 'auto' is for new shards. Give none, zstd or lz4")
    return kind


def _serving(index: Index) -> list[ShardEntry]:
    return [shard for shard in index.shards if len(shard.segments)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Shards of one part and one environment that become others."""

    part: int
    compression: Compression
    environment: Mapping[str, str]
    files: frozenset[str]


class _Merge:
    """One compaction: the cache as it is now, and the shards written so far."""

    def __init__(self, cache: Cache, shard_bytes: int, compression: Compression | None) -> None:
        self._compression: Compression | None = compression
        self.written: list[str] = []
        self._storage, self._recipe = LocalStorage(cache.path), cache.recipe
        self._catalog = Catalog(self._storage, self._recipe)
        self._writer = secrets.token_hex(6)
        self._capacity = layout.capacity(self._recipe.columns, shard_bytes)
        self._fresh: list[str] = []
        self._publish_at = 0.0
        self.cache = self._index()

    def groups(self, left: list[tuple[str, str]]) -> Iterator[_Group]:
        """What is worth merging; shards with damaged records are noted in `left` and stay as they are."""
        cache, found = self.cache, dict[tuple[int, str], dict[int, float]]()
        for i, entry in enumerate(cache.index.shards):
            if not len(entry.segments):
                continue
            try:
                shard = cache.shard(i)
            except (FormatError, OSError) as error:
                left.append((entry.file, str(error)))
                continue
            fill = self._fill(shard, int(entry.segments[:, 2].sum()))
            if fill < 1 or self._differs(shard):
                environment = canonical_json(dict(shard.described("environment")))
                found.setdefault((entry.part, environment), {})[i] = fill
        for (part, _), fills in sorted(found.items()):
            if not self._worth(fills):
                continue
            sound = {i: fill for i, fill in fills.items() if _is_sound(cache, i, left)}
            if places := self._worth(sound):
                files = frozenset(cache.index.shards[i].file for i in places)
                yield _Group(
                    compression=self._kind(places),
                    part=part,
                    environment=cache.shard(places[0]).described("environment"),
                    files=files,
                )

    def _differs(self, shard: Shard) -> bool:
        """True if a shard is not stored as asked."""
        return self._compression is not None and shard.compression != self._compression

    def _worth(self, fills: Mapping[int, float]) -> list[int]:
        """The shards to write again: all where that makes them fewer, else those that differ."""
        if _gains(fills):
            return [*fills]
        return [i for i in fills if self._differs(self.cache.shard(i))]

    def _kind(self, places: Sequence[int]) -> Compression:
        """As asked, else as most of the records are stored."""
        if self._compression is not None:
            return self._compression
        records = Counter[str]()
        for i in places:
            records[self.cache.shard(i).compression] += self.cache.index.shards[i].rows
        return cast("Compression", records.most_common(1)[0][0])

    def run(self, group: _Group) -> int:
        """Write the records of a group into full shards; `publish` makes them serve, now or later."""
        # By name: another generation has other places.
        places = sorted(self._places[file] for file in group.files)
        table = np.concatenate([_served_rows(self.cache.index.shards[i], i) for i in places])
        table = table[np.argsort(table[:, 0], kind="stable")]
        out: OpenShard | None = None
        fresh: list[str] = []
        try:
            begin = 0
            while begin < len(table):
                out = out or self._create(group, len(self.written) + len(fresh))
                end = begin + min(self._chunk_rows(), self._capacity.rows - out.rows, len(table) - begin)
                copy_rows(out, self.cache, table[begin:end])
                begin = end
                if begin == len(table) or self._capacity.is_full(out.rows, out.size):
                    out.seal()
                    fresh.append(out.spec.name)
                    out = None
        finally:
            if out is not None:
                out.discard()
        self.written += fresh
        self._fresh += fresh
        if time.monotonic() >= self._publish_at:
            self.publish()
        return len(table)

    def publish(self) -> None:
        """Write an index in which what was written so far serves, if anything was since the last one."""
        if self._fresh:
            self.cache = self._index(self._fresh)
            self._fresh = []

    def _index(self, first: Sequence[str] = ()) -> Cache:
        """Another generation: O(shards), so one for many groups. Killed before it, they are merged anew."""
        path, begun = self._storage.path, time.monotonic()
        with indexing(path):
            index = write_index(self._storage, self._recipe, self._catalog.refresh, first)
        self._places = {shard.file: i for i, shard in enumerate(index.shards)}
        now = time.monotonic()
        self._publish_at = now + max(PUBLISH_S, PUBLISH_TIMES * (now - begun))
        return Cache(path, self._recipe, index)

    def _fill(self, shard: Shard, served: int) -> float:
        """How much of a full shard the records are that a shard serves."""
        rows = served / self._capacity.rows
        if self._capacity.fixed:
            return rows
        size = sum(column.nbytes for column in shard.columns.values())
        return max(rows, size / self._capacity.bytes * served / shard.rows)

    def _chunk_rows(self) -> int:
        if not self._capacity.fixed:
            return 1
        size = layout.record_bytes(self._recipe.columns)
        return max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(1, size)))

    def _create(self, group: _Group, seq: int) -> OpenShard:
        spec = ShardSpec(
            schema=self._recipe.schema,
            part=self._recipe.parts[group.part].key,
            writer=self._writer,
            seq=seq,
            environment=group.environment,
        )
        return OpenShard(self._storage, spec, capacity=self._capacity.rows, compression=group.compression)


def _gains(fills: Mapping[int, float]) -> bool:
    """Whether shards of these fills become fewer by merging."""
    return len(fills) > max(1, math.ceil(round(sum(fills.values()), 6)))


def _is_sound(cache: Cache, i: int, left: list[tuple[str, str]]) -> bool:
    """Whether every record that a shard serves matches its sums; each byte of it is read."""
    entry = cache.index.shards[i]
    rows = set(_served_rows(entry, i)[:, 2].tolist())
    try:
        shard = cache.fresh_shard(i)
        damage = [why for name in shard.columns for row, why in shard.damage(name).items() if row in rows]
    except (FormatError, OSError) as error:
        damage = [str(error)]
    if damage:
        left.append((entry.file, damage[0]))
    return not damage


def _served_rows(entry: ShardEntry, i: int) -> NDArray[np.int64]:
    """`(n, 3)`: part-local number, `i`, row, of each record that a shard serves."""
    pieces = [np.empty((0, 3), np.int64)]
    for row, first, count in entry.segments.tolist():
        steps = np.arange(count)
        pieces.append(np.stack([first + steps, np.full(count, i), row + steps], axis=1))
    return np.concatenate(pieces)
