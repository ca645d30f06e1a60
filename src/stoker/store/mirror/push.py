"""Bring a cache from here to an address, each shard as one object, the index last."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from stoker.errors import CorruptError, FormatError
from stoker.runtime.threads import map_in_order
from stoker.store.cache import Cache, open_cache
from stoker.store.catalog import Catalog, ShardInfo, write_index
from stoker.store.index import ShardEntry
from stoker.store.local import LocalStorage, places_name
from stoker.store.mirror.attach import MIRROR_DIR, attach
from stoker.store.mirror.folder import MirrorFolder
from stoker.store.mirror.pull import bring_weights
from stoker.store.mirror.transfer import AT_ONCE, Listen, Progress, TransferReport
from stoker.store.protocols import SOURCES_FILE
from stoker.store.recipe import RECIPE_FILE
from stoker.store.use import indexing


def push(
    path: str | Path,
    url: str,
    *,
    mirror_dir: str | Path = MIRROR_DIR,
    listen: Listen | None = None,
) -> TransferReport:
    """Bring a complete cache to `<url>/<name>/<fingerprint>`.

    Each shard is read against its sums before it goes. Stopped at any moment, the same call goes on; what is
    there already stays, and serves together with what is pushed.

    Args:
        path: The cache: a fingerprint's folder, or `<cache_dir>/<name>`.
        url: The folder of caches at the address, `s3://bucket/caches`.
        mirror_dir: Where the address has its mirror; little is kept there.
        listen: Is told how far it is.
    Raises:
        CorruptError: A shard here is damaged; names it.
        IncompleteError, FormatError: It is no complete cache, or its records lie in other files.
        ReadOnlyError: The address may not be written.
        StalledError: Another process of this machine wrote the index there for a minute.
        StokerError: As `attach`.
    """
    began, cache = time.monotonic(), open_cache(path)
    root = attach(url, mirror_dir)
    target = root / cache.path.parent.name / cache.path.name
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = LocalStorage(target)
    if storage.mirror is None:
        raise FormatError(f"{url} is itself a cache. Give the folder that holds caches by name")
    report = TransferReport(url=storage.mirror.url_of(""), path=str(cache.path))
    entries = _own_entries(cache)
    storage.put(RECIPE_FILE, (cache.path / RECIPE_FILE).read_bytes())
    bring_weights(cache.recipe, cache.path.parent.parent, root)
    _send_shards(cache, entries, storage.mirror, report, listen)
    for name in LocalStorage(cache.path).list():
        if name == SOURCES_FILE or name.startswith("failures-"):
            storage.put(name, (cache.path / name).read_bytes())
    bad = {entry.file: entry.bad for entry in entries}
    catalog = Catalog(storage, cache.recipe)

    def list_shards() -> list[ShardInfo]:
        return [replace(info, bad=bad.get(info.file, info.bad)) for info in catalog.refresh()]

    with indexing(target):
        index = write_index(storage, cache.recipe, list_shards)
    report.records, report.complete = index.stored, index.complete
    report.seconds = time.monotonic() - began
    return report


def _own_entries(cache: Cache) -> list[ShardEntry]:
    """The shards that serve.

    Raises:
        FormatError: Their records lie elsewhere.
    """
    if LocalStorage(cache.path).mirror is not None:
        raise FormatError(f"{cache.path} is a copy of an address, in part. Pull it, and push that")
    entries = [entry for entry in cache.index.shards if len(entry.segments)]
    for entry in entries:
        places = places_name(entry.file)
        if places and (cache.path / places).exists():
            raise FormatError(
                f"{cache.path} serves files in place, which are not part of it. Precompute a cache of them"
            )
    return entries


def _send_shards(
    cache: Cache,
    entries: list[ShardEntry],
    mirror: MirrorFolder,
    report: TransferReport,
    listen: Listen | None,
) -> None:
    there = mirror.names.sizes()
    missing = [entry for entry in entries if there.get(entry.file) != entry.bytes]
    report.present = len(entries) - len(missing)
    progress = Progress(count=len(missing), total=sum(entry.bytes for entry in missing))

    def send(entry: ShardEntry) -> ShardEntry:
        _check(cache, entry)
        mirror.names.put_file(entry.file, cache.path / entry.file)
        return entry

    for entry in map_in_order(send, missing, what=f"pushing {cache.path}", threads=AT_ONCE):
        progress.add(entry.bytes, listen)
        report.shards += 1
        report.bytes += entry.bytes


def _check(cache: Cache, entry: ShardEntry) -> None:
    """Read a shard against every sum; rows that the index leaves out aside."""
    shard = cache.fresh_shard(next(i for i, one in enumerate(cache.index.shards) if one is entry))
    for name in shard.columns:
        for row, why in shard.damage(name).items():
            if row not in entry.bad:
                raise CorruptError(f"{why}. Nothing of it was pushed", shard=entry.file, folder=cache.path)
