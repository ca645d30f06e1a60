"""What a cache folder holds: its recipe, its shards, and `index.json`, which says what row holds what sample.

The index is derived. It names each shard's file with a digest of its header, which in turn pins everything in
the shard. Lost or damaged, it is made again from the shards: each proves itself by its own digests, except
for rows that an earlier index noted as damaged.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.errors import CorruptError, FormatError, IncompleteError, ResourceError, StalledError
from stoker.runtime.files import sync_folder
from stoker.runtime.jsonio import as_object, canonical_json, is_count, read_strict
from stoker.runtime.threads import FailedAttempt, RetryPolicy, retry
from stoker.store.failures import Failure, failure_from_json, read_failures
from stoker.store.format import (
    COMPRESSED_FORMAT,
    FORMATS,
    INDEX_FILE,
    RECIPE_FILE,
    check_name,
    is_shard_name,
)
from stoker.store.recipe import Recipe, parse_recipe
from stoker.store.remote import Expected, ReplacedError
from stoker.store.shard import Shard, map_shards, repair_advice
from stoker.store.storage import Storage, open_storage
from stoker.store.values import Accumulator, read_field, summarize
from stoker.units import MIB, format_bytes

log = logging.getLogger("stoker")
MAX_RECIPE_BYTES = 256 * MIB
MAX_INDEX_BYTES = 1024 * MIB
START = b'{"complete":'
"""How every index begins; a huge file that is not one is refused after one small read."""
LISTED_SEGMENTS = 16
"""Segments of a shard listed as JSON; more are packed, so that opening stays quick however numbers are."""
INDEX_TRIES = 20
"""Times that an index is made while other machines replace it; each of them makes progress meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardInfo:
    """One sound shard of a cache."""

    file: str
    part: int
    """Index of its part in the recipe."""
    rows: int
    bytes: int
    """Size of the file."""
    header: str
    """xxh3_128 of the (ordinary) file up to its data; pins everything in it."""
    segments: NDArray[np.int64]
    """`(k, 3)`: row, first part-local number, count. In an index the rows that serve, as another shard may
    hold the rest; else all of them. Not a number per row: a cache may have 10^9 of them."""
    bad: tuple[int, ...] = ()
    """Rows found damaged; never served."""
    raw: int | None = None
    """Of a compressed shard the bytes of the ordinary one; None: it is an ordinary one."""
    statistics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Partial ones by field, as its header has them; empty in an index, which has merged ones."""
    error: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Largest error of a conversion by field, as its header has them; empty in an index."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of the ordinary shard."""
        return self.bytes if self.raw is None else self.raw

    @property
    def records(self) -> int:
        """Rows that `segments` cover."""
        return int(self.segments[:, 2].sum())

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Part-local number of each row that `segments` cover."""
        return numbers_of(self.segments)


def load_recipe(folder: Path) -> Recipe:
    """Read `recipe.json` of a fingerprint's folder.

    Raises:
        FormatError: It is missing, of another format, or it is not a recipe.
        CorruptError: Its digest is not the folder's name.
    """
    try:
        data = open_storage(folder).read(RECIPE_FILE, limit_bytes=MAX_RECIPE_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(f"{folder} holds no {RECIPE_FILE}, so it is not a cache of Stoker") from error
    return parse_recipe(data, folder)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """Content of `index.json`."""

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
    """True if stored and quarantined samples are all there are."""
    shards: tuple[ShardInfo, ...]
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
    """Locations of records: int64 arrays, one entry per run of consecutive numbers in consecutive rows.

    Sorted by `first`; no number is in two runs.
    """

    first: NDArray[np.int64]
    """Global number of the run's first sample."""
    count: NDArray[np.int64]
    shard: NDArray[np.int64]
    """Index of the shard, as for `Cache.shard`."""
    row: NDArray[np.int64]
    """Row of the run's first sample in its shard."""


def segments_of(shards: Sequence[ShardInfo], recipe: Recipe) -> Segments:
    """Return all shards' segments in global numbers.

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


def _all_segments(shards: Sequence[ShardInfo]) -> NDArray[np.int64]:
    return np.concatenate([np.empty((0, 3), np.int64), *(shard.segments for shard in shards)])


def dump_index(index: Index, recipe: Recipe) -> bytes:
    """Return the bytes of `index.json`."""
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


def _format(shards: Sequence[ShardInfo], recipe: Recipe) -> int:
    """That of the recipe, unless a shard is compressed: a version that cannot read it stops at the index."""
    compressed = any(shard.raw is not None for shard in shards)
    return COMPRESSED_FORMAT if compressed else recipe.entries["format"]


def load_index(folder: Path, recipe: Recipe) -> Index:
    """Read and check `index.json` of a folder.

    Raises:
        FileNotFoundError: It is missing.
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
    """Return the index as JSON, its digest checked and nothing else."""
    path = folder / INDEX_FILE
    file = open_storage(folder).open(INDEX_FILE)
    try:
        start = bytearray(min(len(START), file.size))
        file.read_into(0, memoryview(start))
        if bytes(start) != START:
            raise CorruptError(f"{path} does not begin like an index: damaged, or not written by Stoker")
        if file.size > MAX_INDEX_BYTES:
            limit = format_bytes(MAX_INDEX_BYTES)
            raise FormatError(f"{path} has {format_bytes(file.size)}, expected {limit} at most")
        content = bytearray(file.size)
        file.read_into(0, memoryview(content))
    finally:
        file.close()
    data = bytes(content)
    entries = read_strict(data, where=str(path))
    if entries.pop("digest", None) != _digest_without(data):
        raise CorruptError(f"{path} does not match its digest")
    if entries.get("format") not in FORMATS:
        raise FormatError(
            f"{path} has format {entries.get('format')!r}, this version reads {FORMATS}",
            hint="Upgrade stoker",
        )
    return entries


def _digest_without(data: bytes) -> str:
    """Return the digest of an index in canonical form without its own `digest` entry."""
    before, found, after = data.partition(b'"digest":"')
    return hashlib.sha256(before + after[len('",') + 64 :] if found else data).hexdigest()


def _parse(entries: Mapping[str, Any], recipe: Recipe, where: str) -> Index:
    listed = entries["shards"]
    segments = _unpack_all([entry["segments"] for entry in listed])
    shards = tuple(_shard(entry, own, recipe, where) for entry, own in zip(listed, segments, strict=True))
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


def _shard(entry: Mapping[str, Any], segments: NDArray[np.int64], recipe: Recipe, where: str) -> ShardInfo:
    shard = ShardInfo(
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


def _check_bounds(shards: Sequence[ShardInfo], recipe: Recipe, where: str) -> None:
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
    """Return the segments of every shard; listed ones are parsed together, as most shards have one."""
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
# Shards that an index names and that are gone since, or not as long any more: their records are missing.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LostShard:
    """One shard that served records and cannot any more."""

    path: Path
    entry: ShardInfo
    """As the index has it."""
    size: int | None
    """Bytes of the file that is there instead; None: there is no regular file."""

    def error(self) -> IncompleteError | CorruptError:
        """Return what to raise where its records are needed."""
        advice = f"Run precompute again: it encodes its {self.entry.records} records again, and only those"
        if self.size is None:
            return IncompleteError(f"{self.path} is missing", hint=advice)
        return CorruptError(
            f"{self.path} has {self.size} bytes, expected {self.entry.bytes}: truncated or replaced",
            hint=advice,
        )


def without_lost(index: Index, folder: Path, sizes: Mapping[str, int]) -> tuple[Index, tuple[LostShard, ...]]:
    """Return the index with nothing served from shards that are lost, in their places, and those shards.

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
    stored = index.stored - sum(shard.entry.records for shard in lost)
    return replace(index, shards=shards, stored=stored, complete=False), lost


# ----------------------------------------------------------------------------------------------------------
# What shards there are, read from the shards themselves, and the index made from that.


def read_info(storage: Storage, name: str, recipe: Recipe) -> ShardInfo:
    """Read header, numbers and sums of one shard.

    Raises:
        FormatError: It is damaged (`CorruptError`), or of no part of `recipe`.
    """
    shard = Shard(storage.open(name), storage.path / name, recipe.schema)
    part = part_of(shard, recipe)
    if part is None:
        raise FormatError(f"{storage.path / name} belongs to another cache", hint="Remove it")
    return ShardInfo(
        file=name,
        part=part,
        rows=shard.rows,
        bytes=shard.size,
        header=shard.header_digest,
        segments=runs_of(shard.numbers()),
        statistics=shard.described("statistics"),
        error=shard.described("error"),
        raw=None if shard.compression == "none" else shard.raw_bytes,
    )


def part_of(shard: Shard, recipe: Recipe) -> int | None:
    """Return the part of `recipe` whose records a shard holds; None for one of another cache."""
    part = recipe.part_by_key.get(shard.part)
    return None if part is None or int(shard.numbers().max()) >= recipe.parts[part].count else part


class DamagedShardError(CorruptError):
    """A shard that serves in part turned out to be damaged while the rest of its records was counted."""

    def __init__(self, path: Path, why: Exception) -> None:
        fact = why.fact if isinstance(why, CorruptError) else str(why)
        fact, folder = f"{path} can no longer be read: {fact}", path.parent
        super().__init__(fact, hint=repair_advice(folder), shard=path.name, folder=folder)


class ShardCatalog:
    """Shards of one folder. They are immutable, so each is read once however often `refresh` is called.

    Args:
        storage, recipe: The folder.
        noted: Leave out the rows that the index notes as damaged; False: look at them again.
    """

    def __init__(self, storage: Storage, recipe: Recipe, *, noted: bool = True) -> None:
        self._storage, self._recipe = storage, recipe
        self._infos: dict[str, ShardInfo] = {}
        self._refused: set[tuple[str, int]] = set()
        self.unread: set[str] = set()
        """Shards that could not be opened and may be sound: a process that only reads keeps no index then."""
        self._bad: dict[str, tuple[int, ...]] | None = None if noted else {}

    def refresh(self) -> list[ShardInfo]:
        """Return the sound shards here now, by name. Others are left out with a warning."""
        if self._bad is None:
            self._bad = noted_damage(known_index(self._storage.path, self._recipe))
        sizes = {name: size for name, size in self._storage.sizes().items() if is_shard_name(name)}
        self._infos = {name: info for name, info in self._infos.items() if sizes.get(name) == info.bytes}
        new = [n for n, size in sizes.items() if n not in self._infos and (n, size) not in self._refused]
        for name, info in zip(new, self._read(new), strict=True):
            if isinstance(info, ShardInfo):
                self._infos[name] = replace(info, bad=self._bad.get(name, ()))
            else:
                self._refused.add((name, sizes[name]))
                if name in self.unread:
                    log.warning(
                        "shard not read: %s. Its records count as missing; the next run tries again", info
                    )
                    continue
                log.warning(
                    "shard left out: %s. Precompute encodes again what only it held; then it may be deleted",
                    info,
                )
        return [self._infos[name] for name in sizes if name in self._infos]

    def _read(self, names: Sequence[str]) -> Iterator[ShardInfo | str]:
        """Return what each shard holds, or what is wrong with it, in their order."""

        def read(name: str) -> ShardInfo | str:
            try:
                return read_info(self._storage, name, self._recipe)
            except (FormatError, OSError) as error:
                if isinstance(error, OSError):
                    self.unread.add(name)
                return str(error)  # an error that is kept would hold the folder open

        return map_shards(read, names, what=f"reading the shards of {self._storage.path}")

    def exclude(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Note damaged rows of shards, by file; they count as missing from now on."""
        for info in self.refresh():
            self._infos[info.file] = _without(info, rows.get(info.file, ()))

    def verify(self) -> None:
        """Read every byte of every shard and exclude the rows that are damaged."""
        for info in self.refresh():
            self._verify(info)

    def _verify(self, info: ShardInfo) -> bool:
        """Read every byte of a shard and exclude what is damaged; returns whether that is any more."""
        rows = damaged_rows(self._storage, info, self._recipe, self.unread)
        if {*rows} <= {*info.bad}:
            return False
        log.warning("shard %s: %d of %d records are damaged and left out", info.file, len(rows), info.rows)
        self._infos[info.file] = _without(info, rows)
        return True

    def write_index(self) -> Index:
        """`write_index` of what is here now; damage that it meets is left out, and counts as missing."""
        while True:
            try:
                return write_index(self._storage, self._recipe, self.refresh)
            except DamagedShardError as error:
                if not self._verify(self._infos[error.shard]):
                    raise


def _without(info: ShardInfo, rows: Sequence[int]) -> ShardInfo:
    """Return the same with more rows known to be damaged."""
    bad = {*info.bad, *(row for row in rows if row < info.rows)}
    return info if len(bad) == len(info.bad) else replace(info, bad=tuple(sorted(bad)))


def noted_damage(index: Index | None) -> dict[str, tuple[int, ...]]:
    """Return the rows that an index notes as damaged, by file."""
    return {} if index is None else {shard.file: shard.bad for shard in index.shards if shard.bad}


def damaged_rows(
    storage: Storage, info: ShardInfo, recipe: Recipe, unread: set[str] | None = None
) -> list[int]:
    """Return the rows of a shard that do not match their sums, over all fields.

    All rows if it cannot be opened. Where the system did not let us open it, its name is added to `unread`.
    """
    try:
        shard = Shard(storage.open(info.file), storage.path / info.file, recipe.schema)
    except (FormatError, OSError) as error:
        log.warning("shard %s cannot be read any more: %s", info.file, error)
        if unread is not None and isinstance(error, OSError):
            unread.add(info.file)
        return [*range(info.rows)]
    rows: set[int] = set()
    for name in shard.columns:
        if damage := shard.damage(name):
            rows.update(damage)
            log.warning("shard %s: %s", info.file, next(iter(damage.values())))
    return sorted(rows)


def presence(infos: Sequence[ShardInfo], recipe: Recipe) -> NDArray[np.bool_]:
    """Return which samples are stored: `(recipe.count,)` bool.

    Raises:
        ResourceError: There is no memory for a byte per sample.
    """
    try:
        stored = np.zeros(recipe.count, np.bool_)
    except (MemoryError, ValueError) as error:
        raise ResourceError(
            f"the recipe has {recipe.count:,} samples, and a byte for each does not fit in memory"
        ) from error
    for info in infos:
        stored[np.delete(info.numbers, info.bad) + recipe.parts[info.part].offset] = True
    return stored


def write_index(
    storage: Storage,
    recipe: Recipe,
    list_shards: Callable[[], Sequence[ShardInfo]],
    first: Collection[str] = (),
    *,
    reread: Collection[str] = (),
) -> Index:
    """Make the index of a folder and put it in place; an unchanged one stays as it is.

    Call it under the lock `index`, so that a later index never knows less. Other machines do not see that
    lock at a URL: there, the index is made again when another machine has replaced it meanwhile.

    Args:
        storage, recipe: The folder.
        list_shards: Returns its sound shards.
        first: Shards that serve before those that the previous index knew.
        reread: Shards of which every byte was read again: what the previous index noted as damaged in them
            is forgotten.
    Raises:
        DamagedShardError: Nothing was written.
        StalledError: Other machines replaced it each time.
    """

    def attempt() -> Index:
        # Before the list: a shard that another machine adds to both after the list makes the put fail.
        version = storage.version(INDEX_FILE)
        return _write_index(storage, recipe, list_shards(), first, version, reread)

    def give_up(failed: FailedAttempt) -> StalledError:
        return StalledError(
            f"the index of {storage.path} was replaced by other machines {failed.attempts} times while it "
            "was made",
            hint="See how many are writing to it, then run again",
        )

    policy = RetryPolicy(first_s=0.0, attempts=INDEX_TRIES)
    return retry(attempt, ReplacedError, policy, give_up=give_up)


def _write_index(
    storage: Storage,
    recipe: Recipe,
    infos: Sequence[ShardInfo],
    first: Collection[str],
    version: Expected,
    reread: Collection[str],
) -> Index:
    previous = known_index(storage.path, recipe)
    if previous is not None:
        noted = noted_damage(previous)
        infos = [i if i.file in reread else _without(i, noted.get(i.file, ())) for i in infos]
    index = build_index(storage, recipe, infos, previous, first)
    if previous is not None:
        same = replace(index, generation=previous.generation)
        if dump_index(same, recipe) == dump_index(previous, recipe):
            sync_folder(storage.path)  # the process that put it there may have been killed before that
            return previous
    storage.put(INDEX_FILE, dump_index(index, recipe), expected=version)
    return index


def known_index(folder: Path, recipe: Recipe) -> Index | None:
    """Return the index of a folder, or None where it is missing, damaged or foreign."""
    try:
        return load_index(folder, recipe)
    except (FormatError, OSError):
        return None


def build_index(
    storage: Storage,
    recipe: Recipe,
    infos: Sequence[ShardInfo],
    previous: Index | None,
    first: Collection[str] = (),
) -> Index:
    """Return the index after `previous`. Shards of `first` serve first, then those it knew, then others."""
    order = {} if previous is None else {shard.file: i for i, shard in enumerate(previous.shards)}
    infos = sorted(
        infos, key=lambda info: (info.file not in first, order.get(info.file, len(order)), info.file)
    )
    offsets = [recipe.parts[info.part].offset for info in infos]
    chosen = choose_rows([info.segments for info in infos], [info.bad for info in infos], offsets)
    serving = [replace(info, segments=rows) for info, rows in zip(infos, chosen, strict=True)]
    stored = sum(info.records for info in serving)
    present = presence(infos, recipe)
    quarantined: dict[int, Failure] = {
        number: failure for number, failure in read_failures(storage, recipe).items() if not present[number]
    }
    return Index(
        fingerprint=recipe.fingerprint,
        name=storage.path.absolute().parent.name,
        generation=1 if previous is None else previous.generation + 1,
        sequence=next_sequence(storage.path) if previous is None else previous.sequence,
        count=recipe.count,
        stored=stored,
        complete=stored + len(quarantined) == recipe.count,
        shards=tuple(replace(info, statistics={}, error={}) for info in serving),
        quarantined=quarantined,
        statistics=_statistics(storage, recipe, serving),
        error=_error(recipe, infos),
    )


def next_sequence(folder: Path) -> int:
    """Return one more than the largest sequence among the fingerprints next to `folder`."""
    sequences = [0]
    for sibling in folder.parent.iterdir():
        try:
            sequences.append(int(read_index_entries(sibling)["sequence"]))
        except (FormatError, OSError, KeyError, TypeError, ValueError):
            continue
    return max(sequences) + 1


def _statistics(storage: Storage, recipe: Recipe, serving: Sequence[ShardInfo]) -> dict[str, Any]:
    partials: list[Mapping[str, Any]] = []
    for info in serving:
        if info.records == info.rows:
            partials.append(info.statistics)
        elif info.records:
            # Some of its rows are served from other shards: count only the rest.
            partials.append(_recount(storage, info, recipe))
    return {name: summarize([partial[name] for partial in partials]) for name in recipe.schema}


def _recount(storage: Storage, info: ShardInfo, recipe: Recipe) -> dict[str, Any]:
    path = storage.path / info.file
    partial: dict[str, Any] = {}
    try:
        shard = Shard(storage.open(info.file), path, recipe.schema, offset=recipe.parts[info.part].offset)
        for name, field in recipe.schema.items():
            accumulator = Accumulator(field)
            for row, _, count in info.segments.tolist():
                for at in range(row, row + count):
                    accumulator.update(read_field(shard, name, field, at).reshape(-1))
            partial[name] = accumulator.partial()
    except (FormatError, OSError) as error:
        raise DamagedShardError(path, error) from error
    return partial


def _error(recipe: Recipe, infos: Sequence[ShardInfo]) -> dict[str, Any]:
    return {
        name: {
            key: max((float(info.error[name][key]) for info in infos), default=0.0) for key in ("max", "rms")
        }
        for name in recipe.schema
    }


# ----------------------------------------------------------------------------------------------------------
# Rows of shards that serve: arithmetic on runs, so that it costs O(runs) and not O(records).
#
# A run is `(row, first number, count)`: consecutive rows that hold consecutive numbers.


BLOCK = 1 << 20
"""Records that are spread at a time, in 16 MiB; more where one run has more."""


def runs_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the runs in the numbers of consecutive rows from 0 on: `(k, 3)`.

    >>> runs_of(np.array([4, 5, 6, 2, 3])).tolist()
    [[0, 4, 3], [3, 2, 2]]
    """
    if not len(numbers):
        return np.empty((0, 3), np.int64)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1]).astype(np.int64)
    return np.stack([begins, numbers[begins], np.diff(begins, append=len(numbers))], axis=1)


def numbers_of(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number in each row that runs cover, in their order.

    >>> numbers_of(np.array([[0, 4, 3], [3, 2, 2]])).tolist()
    [4, 5, 6, 2, 3]
    """
    return spread(runs[:, 1], runs[:, 2])


def choose_rows(
    runs: Sequence[NDArray[np.int64]], bad: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Return which rows of each shard serve: runs `(k, 3)`, sorted by number.

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
    """Return the runs with some rows cut out."""
    numbers = numbers_of(runs)
    places = spread(runs[:, 0], runs[:, 2])
    keep = ~np.isin(places, rows)
    return _joined(np.zeros(int(keep.sum()), np.int64), places[keep], numbers[keep])[:, 1:]


def _contested(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the runs, sorted by `first`, may share a number with another one."""
    reach = np.maximum.accumulate(first + count)
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = first[1:] >= reach[:-1]
    cluster = np.cumsum(fresh) - 1
    return np.bincount(cluster)[cluster] > 1 if len(first) else fresh


def _settle(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return runs `(k, 4)` of (shard, row, number, count) in which each number comes once."""
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
    """Return runs `(k, 4)` of consecutive rows and numbers in one shard."""
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
