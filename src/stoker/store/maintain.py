"""Keep a cache sound and quick: repair sets aside what is damaged, compact merges short shards."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError
from stoker.runtime.files import zero_ranges
from stoker.runtime.jsonio import canonical_json
from stoker.schema import JsonResult
from stoker.store import format
from stoker.store.cache import Cache, open_cache
from stoker.store.compressed import Compression, check_compression
from stoker.store.format import DAMAGED, FINGERPRINT, RECIPE_FILE, is_shard_name
from stoker.store.index import (
    Index,
    ShardCatalog,
    ShardInfo,
    load_index,
    load_recipe,
    part_of,
    write_index,
)
from stoker.store.recipe import Recipe
from stoker.store.shard import Shard
from stoker.store.storage import (
    UsageLock,
    display_path,
    lock_index,
    lock_maintenance,
    mirror_url,
    note_use,
    open_storage,
    resolve_local,
    sweep,
)
from stoker.store.verify import BadRecord, bad_keys
from stoker.store.write import OpenShard, ShardSpec, copy_rows
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# Set aside what is damaged or lost, so that the rest serves and precompute knows what to make again.
#
# Nothing good is deleted. Damaged records are noted in a new generation of the index and never serve; the
# other records of their shard do. A shard that cannot be read at all becomes `.damaged-<name>`, and stays
# until gc.


log = logging.getLogger("stoker")
REPAIR_ADVICE = ". `stoker cache verify"
"""Where errors of damaged records begin to say what a repair need not."""


@dataclass(frozen=True, slots=True)
class UnusedShard:
    """A shard that stays as it is."""

    shard: str
    """File name."""
    why: str


@dataclass(slots=True, kw_only=True)
class RepairReport(JsonResult):
    """Damage found, what was done about it, and what has to be encoded again."""

    json_keys = (
        "path", "records", "ok", "bad", "set_aside", "lost", "unread", "swept", "index", "generation",
        "missing",
    )  # fmt: skip
    path: str
    records: int = 0
    """Records read, in all shards."""
    bad: list[BadRecord] = field(default_factory=list[BadRecord])
    """Everything damaged or lost, as `verify` lists it."""
    set_aside: list[str] = field(default_factory=list[str])
    """Shards that cannot be read at all, by their names before."""
    lost: list[str] = field(default_factory=list[str])
    """Shards that the index named and that are gone."""
    unread: list[UnusedShard] = field(default_factory=list[UnusedShard])
    """Shards that the system failed to read."""
    swept: int = 0
    """Temporaries of dead writers removed."""
    index: str = ""
    """Why the index was made again from the shards; empty where it was sound."""
    generation: int = 0
    """Of the index, afterwards."""
    missing: list[int] = field(default_factory=list[int])
    """Samples neither stored nor quarantined, afterwards."""

    @property
    def ok(self) -> bool:
        """True if the cache is complete afterwards."""
        return not self.missing


def repair(folder: str | Path, *, shards: Collection[str] | None = None) -> RepairReport:
    """Read every byte of a fingerprint's folder, and set aside what is wrong.

    Killed at any moment, nothing is worse than before, and the next call resumes.

    Args:
        folder: What to read.
        shards: Read only these, by file name, as long as the index is sound; None: all.

    Raises:
        FormatError: It is no cache, or its recipe is damaged: then nothing says what it holds.
        ReadOnlyError: It cannot be written.
        StalledError: Another process has been compacting or repairing it all the time.
    """
    folder = resolve_local(folder)
    recipe = load_recipe(folder)
    _use = UsageLock(folder)
    note_use(folder)
    with lock_maintenance(folder):
        return _Repair(folder, recipe, shards).run()


class _Repair:
    """One repair of one folder."""

    def __init__(self, folder: Path, recipe: Recipe, only: Collection[str] | None) -> None:
        self._folder, self._recipe = folder, recipe
        self._storage = open_storage(folder)
        self._report = RepairReport(path=str(folder))
        self._previous = self._load_index()
        # Without an index nothing says what is damaged in the others.
        self._only = only if self._previous is not None else None
        self._catalog = ShardCatalog(self._storage, recipe, noted=self._only is not None)
        self._noted: dict[str, set[int]] = {}
        """Rows by shard that were known to be damaged before."""

    def run(self) -> RepairReport:
        report = self._report
        report.swept = sweep(self._folder)
        previous = self._previous
        self._noted = {shard.file: {*shard.bad} for shard in (previous.shards if previous else ())}
        names = [name for name in self._storage.list() if is_shard_name(name)]
        chosen = [name for name in names if self._only is None or name in self._only]
        unusable = [name for name in chosen if not self._examine(name)]
        self._note_unserved(previous, unusable)
        with lock_index(self._folder):
            # Rows of shards that were not read stay noted, also those that another process noted meanwhile.
            reread = chosen if self._only is None else ()
            index = write_index(self._storage, self._recipe, self._catalog.refresh, reread=reread)
        for name in unusable:
            self._set_aside(name)
        if self._only is None:
            report.bad += bad_keys(self._storage, self._recipe.count)
        report.generation = index.generation
        done = np.zeros(self._recipe.count, np.bool_)
        done[[*index.quarantined]] = True
        for shard in index.shards:
            for _, first, count in shard.segments.tolist():
                begin = self._recipe.parts[shard.part].offset + first
                done[begin : begin + count] = True
        report.missing = np.flatnonzero(~done).tolist()
        return report

    def _load_index(self) -> Index | None:
        try:
            return load_index(self._folder, self._recipe)
        except FileNotFoundError:
            self._report.index = "there was none"
        except (FormatError, OSError) as error:
            self._report.index = str(error)
        return None

    def _examine(self, name: str) -> bool:
        """Read a shard in full and note its damaged rows; returns False where nothing of it can be used."""
        report, path = self._report, self._folder / name
        try:
            shard = Shard(self._storage.open(name), path, self._recipe.schema)
        except FormatError as error:
            log.warning("shard set aside: %s", str(error))
            return False
        except OSError as error:
            report.unread.append(UnusedShard(name, str(error)))
            return True
        place = part_of(shard, self._recipe)
        if place is None:
            log.warning("shard set aside: %s belongs to another cache", path)
            return False
        report.records += shard.rows
        damage: dict[int, str] = {}
        for column in shard.columns:
            damage |= shard.damage(column)
        numbers = shard.numbers() + self._recipe.parts[place].offset
        report.bad += [
            BadRecord(index=int(numbers[row]), shard=name, why=why.partition(REPAIR_ADVICE)[0])
            for row, why in sorted(damage.items())
            if row not in self._noted.get(name, ())
        ]
        if damage:
            self._catalog.exclude({name: [*damage]})
        self._repair_padding(shard, path)
        return True

    def _repair_padding(self, shard: Shard, path: Path) -> None:
        """Zeros between columns are the one thing whose right value is known; no record is touched."""
        try:
            shard.check_padding()
        except CorruptError as error:
            self._report.bad.append(BadRecord(index=-1, shard=path.name, why=str(error)))
            if self._storage.mirror is not None:
                return  # an object is not changed in place, and nothing is read from there
            zero_ranges(path, shard.padding)
        except OSError as error:  # a bad sector where no record is
            self._report.unread.append(UnusedShard(path.name, str(error)))

    def _note_unserved(self, previous: Index | None, unusable: Sequence[str]) -> None:
        """Name the records that served from shards which are gone or cannot be used."""
        present = {*self._storage.list()}
        for shard in () if previous is None else previous.shards:
            if shard.file in present and shard.file not in unusable:
                continue
            if shard.file not in present and len(shard.segments):
                self._report.lost.append(shard.file)
            offset = self._recipe.parts[shard.part].offset
            why = f"{self._folder / shard.file} " + (
                "cannot be used: it is damaged or foreign" if shard.file in present else "is missing"
            )
            self._report.bad += [
                BadRecord(index=offset + first + k, shard=shard.file, why=why)
                for _, first, count in shard.segments.tolist()
                for k in range(count)
            ]

    def _set_aside(self, name: str) -> None:
        self._storage.rename(name, f"{DAMAGED}{name}")
        self._report.set_aside.append(name)


def folder_to_repair(path: str | Path) -> Path:
    """Return the fingerprint's folder that `path` names: itself, or the only one below it.

    Raises:
        FormatError: No cache is there, or several: a damaged one among them must not be skipped.
    """
    path = resolve_local(path)
    if (path / RECIPE_FILE).exists() or (FINGERPRINT.fullmatch(path.resolve().name) and path.is_dir()):
        return path
    found: list[Path] = []
    if path.is_dir():
        visible = (p for p in path.iterdir() if not p.name.startswith("."))
        found = sorted(p for p in visible if (p / RECIPE_FILE).exists())
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        one = found[0] if found else path / "NAME" / "FINGERPRINT"
        raise FormatError(
            f"{path}: one cache to repair was expected, found {names}",
            hint=f"Name the folder of one, as {display_path(one)}",
        )
    return found[0]


# ----------------------------------------------------------------------------------------------------------
# Merge short shards into full ones: a cache of many interrupted runs becomes as quick as one of one run.
#
# Shards that are not compressed as asked are written again on the way, full ones too.
#
# Records travel with everything that their shards said of them: bits, conversion errors, marks, environment
# (shards of different environments are never merged). New shards appear by the usual commit, then an index
# in which they serve; the old ones stay for readers of an earlier generation, until `gc` removes them.


CHUNK_BYTES = 4 * MIB
"""Bytes of records read before they are written."""
CHUNK_ROWS = 1024
PUBLISH_S, PUBLISH_TIMES = 10.0, 10.0
"""What was merged serves after this many seconds, or this many times what writing an index took."""


@dataclass(slots=True, kw_only=True)
class CompactReport(JsonResult):
    """Results of merging."""

    path: str
    address: str | None = None
    """Where it is, if that is not this machine."""
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
    left: list[UnusedShard] = field(default_factory=list[UnusedShard])
    """Shards with damaged records."""


def compact(
    path: str | Path, *, shard_bytes: int = format.SHARD_BYTES, compression: str | None = None
) -> CompactReport:
    """Merge the short shards of a cache, and rewrite those that are not compressed as asked.

    Does nothing where merging would not lessen the number of shards and all are stored as asked, so a second
    call finds nothing to do.
    Killed at any moment, the cache serves what it served; the next call starts with what is not merged.

    Args:
        path: A fingerprint's folder, or `<cache_dir>/<name>`: then the newest complete one.
        shard_bytes: Bytes of records in a full shard.
        compression: `none`, `zstd` or `lz4`; None: merged shards are stored as most of their records were.
    Raises:
        ConfigError: `shard_bytes` is less than 1, or `compression` is not known or not installed.
        FormatError, IncompleteError: There is no cache, or a shard is lost. `verify --repair` fixes that.
        ReadOnlyError, ResourceError: The folder cannot be written, or is full.
        StalledError: Another process has been compacting or repairing it all the time.
    """
    kind = None if compression is None else _checked(compression)
    cache = open_cache(path, require_complete=False)
    if cache.lost:
        raise cache.lost[0].error()
    with lock_maintenance(cache.path):
        merge = _Merge(cache, shard_bytes, kind)
        report = CompactReport(
            path=str(cache.path),
            address=mirror_url(cache.path),
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
        raise ConfigError("compression 'auto' is for new shards", hint="Give none, zstd or lz4")
    return kind


def _serving(index: Index) -> list[ShardInfo]:
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
        self._storage, self._recipe = open_storage(cache.path), cache.recipe
        self._catalog = ShardCatalog(self._storage, self._recipe)
        self._writer = secrets.token_hex(6)
        self._capacity = format.capacity(self._recipe.columns, shard_bytes)
        self._fresh: list[str] = []
        self._publish_at = 0.0
        self.cache = self._index()

    def groups(self, left: list[UnusedShard]) -> Iterator[_Group]:
        """Yield what is worth merging; shards with damaged records go to `left` and stay as they are."""
        cache, found = self.cache, dict[tuple[int, str], dict[int, float]]()
        for i, entry in enumerate(cache.index.shards):
            if not len(entry.segments):
                continue
            try:
                shard = cache.shard(i)
            except (FormatError, OSError) as error:
                left.append(UnusedShard(entry.file, str(error)))
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
        """Return the shards to write again: all where that makes them fewer, else those that differ."""
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
                    out.commit()
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
        """Write and return another generation; it costs O(shards), so one serves many groups."""
        path, begun = self._storage.path, time.monotonic()
        with lock_index(path):
            index = write_index(self._storage, self._recipe, self._catalog.refresh, first)
        self._places = {shard.file: i for i, shard in enumerate(index.shards)}
        now = time.monotonic()
        self._publish_at = now + max(PUBLISH_S, PUBLISH_TIMES * (now - begun))
        return Cache(path, self._recipe, index)

    def _fill(self, shard: Shard, served: int) -> float:
        """Return how much of a full shard the records are that a shard serves."""
        rows = served / self._capacity.rows
        if self._capacity.fixed:
            return rows
        size = sum(column.nbytes for column in shard.columns.values())
        return max(rows, size / self._capacity.bytes * served / shard.rows)

    def _chunk_rows(self) -> int:
        if not self._capacity.fixed:
            return 1
        size = format.record_bytes(self._recipe.columns)
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
    """Return True if shards of these fills become fewer by merging."""
    return len(fills) > max(1, math.ceil(round(sum(fills.values()), 6)))


def _is_sound(cache: Cache, i: int, left: list[UnusedShard]) -> bool:
    """Return True if every record that a shard serves matches its sums; each byte of it is read."""
    entry = cache.index.shards[i]
    rows = set(_served_rows(entry, i)[:, 2].tolist())
    try:
        shard = cache.shard(i, fresh=True)
        damage = [why for name in shard.columns for row, why in shard.damage(name).items() if row in rows]
    except (FormatError, OSError) as error:
        damage = [str(error)]
    if damage:
        left.append(UnusedShard(entry.file, damage[0]))
    return not damage


def _served_rows(entry: ShardInfo, i: int) -> NDArray[np.int64]:
    """`(n, 3)`: part-local number, `i`, row, of each record that a shard serves."""
    pieces = [np.empty((0, 3), np.int64)]
    for row, first, count in entry.segments.tolist():
        steps = np.arange(count)
        pieces.append(np.stack([first + steps, np.full(count, i), row + steps], axis=1))
    return np.concatenate(pieces)
