"""Push a cache to a URL and pull one: what is asked for, how far it is, and what came of it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError, IncompleteError, StalledError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import make_folder, publish, write_file
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.runtime.threads import map_in_order
from stoker.schema import JsonResult
from stoker.store.cache import Cache, open_cache, peek_cache
from stoker.store.format import (
    INDEX_FILE,
    KEYS_FILE,
    RECIPE_FILE,
    SOURCES_FILE,
    WEIGHTS_FOLDER,
    is_failures_name,
    places_name,
)
from stoker.store.index import (
    ShardCatalog,
    ShardInfo,
    build_index,
    dump_index,
    known_index,
    load_recipe,
    noted_damage,
    write_index,
)
from stoker.store.mirror import MirrorFolder
from stoker.store.mirror_blocks import MAP_PREFIX
from stoker.store.recipe import Recipe
from stoker.store.remote import local_path
from stoker.store.shard import Shard
from stoker.store.storage import (
    INDEX_WAIT_S,
    MIRROR_DIR,
    MirrorStorage,
    attach_mirror,
    display_path,
    lock_index,
    lock_maintenance,
    open_storage,
)

AT_ONCE = 4
"""Shards on their way at a time; each in several parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSelection:
    """Records that a pull is for; by default all. All shards that hold any of them are brought.

    Raises:
        ConfigError: It contradicts itself.
    """

    rank: int | None = None
    """Only what this rank of `world_size` reads in the order `static(world_size)`, from 0."""
    world_size: int | None = None
    records: tuple[int, int] | None = None
    """Only samples from the first number up to the second, without it."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if (self.rank is None) != (self.world_size is None) or (self.rank is not None and self.records):
            raise ConfigError("give rank and world_size together, or records, or none of them")
        if self.rank is not None and self.world_size is not None and not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}, expected 0 to {self.world_size - 1}")
        if self.records and not 0 <= self.records[0] < self.records[1]:
            raise ConfigError(
                f"records are {self.records[0]}:{self.records[1]}, expected FIRST:STOP, FIRST < STOP"
            )

    @property
    def all(self) -> bool:
        """True if nothing is left out."""
        return self.rank is None and self.records is None

    def shards(self, cache: Cache) -> set[str]:
        """Return the shards that hold any of the records, by file name.

        Raises:
            IncompleteError: None of the `records` is stored.
        """
        segments = cache.segments
        if self.records is not None:
            first, stop = self.records
            hit = (segments.first < stop) & (segments.first + segments.count > first)
            if not hit.any():
                raise IncompleteError(
                    f"{display_path(cache.path)} has no record of samples {first:,} to {stop - 1:,}: it has "
                    f"{cache.index.count:,} samples, from 0",
                    hint="Ask for others",
                )
        else:
            hit = _overlap(segments.count, *self._positions(len(cache)))
        return {cache.index.shards[i].file for i in np.unique(segments.shard[hit]).tolist()}

    def _positions(self, count: int) -> tuple[int, int]:
        """Places among the stored records. A record whose windows two ranks share belongs to both."""
        if self.rank is None or self.world_size is None:
            return 0, count
        return count * self.rank // self.world_size, -(-count * (self.rank + 1) // self.world_size)


def _overlap(counts: NDArray[np.int64], begin: int, end: int) -> NDArray[np.bool_]:
    ends = np.cumsum(counts)
    return (ends - counts < end) & (ends > begin)


@dataclass(slots=True, kw_only=True)
class TransferReport(JsonResult):
    """Results of a push or a pull."""

    url: str
    path: str
    shards: int = 0
    """Shards that were brought."""
    bytes: int = 0
    """Their bytes."""
    present: int = 0
    """Shards that were there before."""
    records: int = 0
    """Records stored at the end where they were brought to."""
    complete: bool = False
    """True if that is a complete cache."""
    seconds: float = 0.0


@dataclass(slots=True)
class TransferProgress:
    """Progress of a transfer; the argument of `listen`."""

    count: int = 0
    """Shards to bring."""
    total: int = 0
    """Their bytes."""
    done: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int, listen: Listen | None) -> None:
        """Count a shard; safe from several threads."""
        with self._lock:
            self.done += 1
            self.bytes += size
            if listen is not None:
                listen(self)


Listen: TypeAlias = Callable[[TransferProgress], None]


# ----------------------------------------------------------------------------------------------------------
# Bring a cache from a URL here, as a folder of its own that needs the URL no more.
#
# A shard comes in parts to a hidden mirror next to its place, is read against every sum, and then moves to
# its place. So what is there is sound, and a pull that was stopped resumes. The index is written last.


COMING = ".coming"
"""Below the cache folder: what is on its way."""


def pull(
    url: str,
    cache_dir: str | Path = "data/latent_cache",
    *,
    wanted: RecordSelection | None = None,
    listen: Listen | None = None,
) -> TransferReport:
    """Bring a cache, or the shards of it that hold what is wanted, to `<cache_dir>/<name>/<fingerprint>`.

    Stopped at any moment, the same call resumes. What is there already is kept if it is what the index at the
    URL says; a later pull of more adds to it.

    Args:
        url: A cache, `s3://bucket/caches/name`, then its newest complete one; or one fingerprint's folder.
        cache_dir: The folder that holds caches by name.
        wanted: Which records; None: all.
        listen: Is told how far it is.
    Raises:
        CorruptError: A shard does not match its sums at the URL either; names it.
        FormatError, IncompleteError: There is no complete cache, or none of the records asked for.
        StalledError: Another process has been pulling to the same folder, or writing its index, for a minute.
        StokerError: As `attach_mirror`.
    """
    began, wanted = time.monotonic(), wanted or RecordSelection()
    cache_dir = local_path(cache_dir, "the folder to pull to")
    coming = make_folder(make_folder(cache_dir, 0o700) / COMING, 0o700)
    with lock_folder(coming, "pull", timeout_s=INDEX_WAIT_S, shared=True) as got:
        if not got:
            raise StalledError(
                f"{lock_holder(coming, 'pull')} has been cleaning up {coming}", hint="Run again"
            )
        report, arrived = _pull(url, cache_dir, wanted, listen)
    report.seconds = time.monotonic() - began
    if wanted.all and not report.complete:
        raise CorruptError(
            f"{report.path} is not complete after all of {report.url} came",
            hint=f"Run `stoker cache verify {report.path}`",
        )
    with lock_folder(coming, "pull") as last:  # another pull may be using the same mirror
        if last:
            shutil.rmtree(arrived, ignore_errors=True)
    return report


def _pull(
    url: str, cache_dir: Path, wanted: RecordSelection, listen: Listen | None
) -> tuple[TransferReport, Path]:
    """Do it; also returns the mirror that it came through."""
    source = peek_cache(attach_mirror(url, cache_dir / COMING, must_exist=True))
    mirror = open_storage(source.path).mirror
    if source.lost:
        lost = source.lost[0].error()
        raise IncompleteError(lost.problem.fact, hint=lost.problem.hint)
    assert mirror is not None
    names = wanted.shards(source)
    target = cache_dir / source.path.parent.name / source.path.name
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    report = TransferReport(url=mirror.url, path=str(target))
    write_file(target / RECIPE_FILE, (source.path / RECIPE_FILE).read_bytes())
    with lock_maintenance(target):
        _bring_shards(_Pull(source, mirror, target), names, report, listen)
        _bring_small(source, mirror, target)
        report.records, report.complete = _write_index(source, target)
    return report, mirror.root.path


def _bring_shards(pull: _Pull, names: set[str], report: TransferReport, listen: Listen | None) -> None:
    entries = [entry for entry in pull.source.index.shards if entry.file in names]
    there = ShardCatalog(open_storage(pull.target), pull.source.recipe).refresh()
    known = {info.file: info.header for info in there}
    missing = [entry for entry in entries if known.get(entry.file) != entry.header]
    report.present = len(entries) - len(missing)
    progress = TransferProgress(count=len(missing), total=sum(entry.bytes for entry in missing))
    for entry in map_in_order(pull.bring, missing, what=f"pulling {report.url}", threads=AT_ONCE):
        progress.add(entry.bytes, listen)
        report.shards += 1
        report.bytes += entry.bytes


class _Pull:
    """Brings single shards."""

    def __init__(self, source: Cache, mirror: MirrorFolder, target: Path) -> None:
        self.source, self.target = source, target
        self._mirror = mirror

    def bring(self, entry: ShardInfo) -> ShardInfo:
        """Fetch a shard, read it against its sums, and move it to its place."""
        mirror, path = self._mirror, self.source.path / entry.file
        mirror.ensure(entry.file, [(0, entry.bytes)])
        if (damage := self._damage(entry)) is not None:
            fact = f"{mirror.url_of(entry.file)} is damaged: {damage}"
            raise CorruptError(fact, hint="Push it again from where it is sound", shard=entry.file)
        publish(path, self.target / entry.file)
        path.with_name(f"{MAP_PREFIX}{entry.file}").unlink(missing_ok=True)
        return entry

    def _damage(self, entry: ShardInfo) -> str | None:
        """Return what is wrong with a shard, once what came wrong was fetched again; known damage aside."""
        path = self.source.path / entry.file
        try:
            shard = Shard(open_storage(path.parent).open(entry.file), path, self.source.schema)
            if shard.header_digest != entry.header:
                return "it is not the shard that the index pins"
            for name in shard.columns:
                for row, why in shard.damage(name).items():
                    if row not in entry.bad:
                        return why
        except FormatError as error:
            return str(error)
        return None


def _bring_small(source: Cache, mirror: MirrorFolder, target: Path) -> None:
    """Failures, names of sources, and the encoder's weights."""
    storage = open_storage(source.path)
    for name in storage.list():
        if name in (SOURCES_FILE, KEYS_FILE) or is_failures_name(name):
            write_file(target / name, storage.read(name, limit_bytes=1 << 30))
    bring_weights(source.recipe, mirror.root.path, target.parent.parent)


def bring_weights(recipe: Recipe, origin: Path, cache_dir: Path) -> None:
    """Copy the weights that a recipe names from one cache folder to another, where the first has them."""
    name = f"{recipe.weights}.safetensors"
    if not recipe.weights:
        return
    (cache_dir / WEIGHTS_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    if name in open_storage(cache_dir / WEIGHTS_FOLDER).list():
        return
    try:
        data = open_storage(origin / WEIGHTS_FOLDER).read(name, limit_bytes=1 << 40)
    except FileNotFoundError:
        return
    open_storage(cache_dir / WEIGHTS_FOLDER).put(name, data)


def _write_index(source: Cache, target: Path) -> tuple[int, bool]:
    """Write the index of what is at its place now; returns its records and whether they are all."""
    storage, recipe = open_storage(target), load_recipe(target)
    with lock_index(target), explain_disk_errors(target):
        catalog = ShardCatalog(storage, recipe)
        catalog.exclude(noted_damage(source.index))
        previous = known_index(target, recipe) or source.index
        index = build_index(storage, recipe, catalog.refresh(), previous)
        storage.put(INDEX_FILE, dump_index(index, recipe))
    return index.stored, index.complete


# ----------------------------------------------------------------------------------------------------------
# Bring a cache from here to a URL, each shard as one object, the index last.


def push(
    path: str | Path,
    url: str,
    *,
    mirror_dir: str | Path = MIRROR_DIR,
    listen: Listen | None = None,
) -> TransferReport:
    """Bring a complete cache to `<url>/<name>/<fingerprint>`.

    Each shard is read against its sums before it goes. Stopped at any moment, the same call resumes; what is
    there already stays, and serves together with what is pushed.

    Args:
        path: The cache: a fingerprint's folder, or `<cache_dir>/<name>`.
        url: The folder of caches at the URL, `s3://bucket/caches`.
        mirror_dir: Where the URL has its mirror; little is kept there.
        listen: Is told how far it is.
    Raises:
        CorruptError: A shard here is damaged; names it.
        IncompleteError, FormatError: It is no complete cache, or its records are in other files.
        ReadOnlyError: The URL may not be written.
        StalledError: Another process of this machine wrote the index there for a minute.
        StokerError: As `attach_mirror`.
    """
    began, cache = time.monotonic(), open_cache(path)
    root = attach_mirror(url, mirror_dir)
    target = root / cache.path.parent.name / cache.path.name
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = open_storage(target)
    if not isinstance(storage, MirrorStorage):
        raise FormatError(f"{url} is itself a cache", hint="Give the folder that holds caches by name")
    report = TransferReport(url=storage.mirror.url, path=str(cache.path))
    entries = _own_entries(cache)
    storage.put(RECIPE_FILE, (cache.path / RECIPE_FILE).read_bytes())
    bring_weights(cache.recipe, cache.path.parent.parent, root)
    _send_shards(cache, entries, storage, report, listen)
    for name in open_storage(cache.path).list():
        if name in (SOURCES_FILE, KEYS_FILE) or is_failures_name(name):
            storage.put(name, (cache.path / name).read_bytes())
    catalog = ShardCatalog(storage, cache.recipe)
    catalog.exclude(noted_damage(cache.index))
    with lock_index(target):
        index = write_index(storage, cache.recipe, catalog.refresh)
    report.records, report.complete = index.stored, index.complete
    report.seconds = time.monotonic() - began
    return report


def _own_entries(cache: Cache) -> list[ShardInfo]:
    """Return the shards that serve.

    Raises:
        FormatError: Their records are in other files.
    """
    if open_storage(cache.path).mirror is not None:
        raise FormatError(f"{cache.path} is a copy of an address, in part", hint="Pull it, and push that")
    entries = [entry for entry in cache.index.shards if len(entry.segments)]
    for entry in entries:
        places = places_name(entry.file)
        if places and (cache.path / places).exists():
            raise FormatError(
                f"{cache.path} serves files in place, which are not part of it",
                hint="Precompute a cache of them",
            )
    return entries


def _send_shards(
    cache: Cache,
    entries: list[ShardInfo],
    storage: MirrorStorage,
    report: TransferReport,
    listen: Listen | None,
) -> None:
    there = storage.sizes()
    missing = [entry for entry in entries if there.get(entry.file) != entry.bytes]
    report.present = len(entries) - len(missing)
    progress = TransferProgress(count=len(missing), total=sum(entry.bytes for entry in missing))

    def send(entry: ShardInfo) -> ShardInfo:
        _check(cache, entry)
        storage.put_file(entry.file, cache.path / entry.file)
        return entry

    for entry in map_in_order(send, missing, what=f"pushing {cache.path}", threads=AT_ONCE):
        progress.add(entry.bytes, listen)
        report.shards += 1
        report.bytes += entry.bytes


def _check(cache: Cache, entry: ShardInfo) -> None:
    """Read a shard against every sum; rows that the index leaves out aside."""
    shard = cache.shard(next(i for i, one in enumerate(cache.index.shards) if one is entry), fresh=True)
    for name in shard.columns:
        for row, why in shard.damage(name).items():
            if row not in entry.bad:
                raise CorruptError(f"{why}. Nothing of it was pushed", shard=entry.file, folder=cache.path)
