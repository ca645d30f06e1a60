"""Bring a cache from an address here, as a folder of its own that needs the address no more.

A shard comes in parts to a hidden mirror beside its place, is read against every sum, and then moves to its
place. So what is there is sound, and a pull that was stopped goes on. The index is written last.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from stoker.errors import CorruptError, FormatError, IncompleteError, StalledError
from stoker.runtime.disk import explained
from stoker.runtime.files import make_folder, publish, write_file
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.runtime.threads import map_in_order
from stoker.store.cache import Cache, open_unnoted
from stoker.store.catalog import Catalog, build_index, known_index
from stoker.store.index import INDEX_FILE, ShardEntry, dump_index
from stoker.store.local import LocalStorage
from stoker.store.mirror.attach import attach
from stoker.store.mirror.folder import MirrorFolder
from stoker.store.mirror.space import MAP_PREFIX
from stoker.store.mirror.transfer import AT_ONCE, Listen, Progress, TransferReport, Wanted
from stoker.store.protocols import SOURCES_FILE
from stoker.store.recipe import RECIPE_FILE, Recipe, load_recipe
from stoker.store.remote import local_path
from stoker.store.shard_read import Shard
from stoker.store.use import INDEX_WAIT_S, indexing, maintaining

COMING = ".coming"
"""Below the cache folder: what is on its way."""
WEIGHTS = "encoders"


def pull(
    url: str,
    cache_dir: str | Path = "data/latent_cache",
    *,
    wanted: Wanted | None = None,
    listen: Listen | None = None,
) -> TransferReport:
    """Bring a cache, or the shards of it that hold what is wanted, to `<cache_dir>/<name>/<fingerprint>`.

    Stopped at any moment, the same call goes on. What is there already is kept if it is what the index at the
    address says; a later pull of more adds to it.

    Args:
        url: A cache, `s3://bucket/caches/name`, then its newest complete one; or one fingerprint's folder.
        cache_dir: The folder that holds caches by name.
        wanted: Which records; None: all.
        listen: Is told how far it is.
    Raises:
        CorruptError: A shard does not match its sums at the address either; names it.
        FormatError, IncompleteError: There is no complete cache, or none of the records asked for.
        StalledError: Another process has been pulling to the same folder, or writing its index, for a minute.
        StokerError: As `attach`.
    """
    began, wanted = time.monotonic(), wanted or Wanted()
    cache_dir = local_path(cache_dir, "the folder to pull to")
    coming = make_folder(make_folder(cache_dir, 0o700) / COMING, 0o700)
    with lock_folder(coming, "pull", timeout_s=INDEX_WAIT_S, shared=True) as got:
        if not got:
            raise StalledError(f"{lock_holder(coming, 'pull')} has been cleaning up {coming}. Run again")
        report, arrived = _pull(url, cache_dir, wanted, listen)
    report.seconds = time.monotonic() - began
    if wanted.all and not report.complete:
        raise CorruptError(
            f"{report.path} is not complete after all of {report.url} came. Run stoker verify {report.path}"
        )
    with lock_folder(coming, "pull") as last:  # another pull may be using the same mirror
        if last:
            shutil.rmtree(arrived, ignore_errors=True)
    return report


def _pull(url: str, cache_dir: Path, wanted: Wanted, listen: Listen | None) -> tuple[TransferReport, Path]:
    """Do it; also returns the mirror that it came through."""
    source = open_unnoted(attach(url, cache_dir / COMING, must_exist=True))
    mirror = LocalStorage(source.path).mirror
    if source.lost:
        raise IncompleteError(str(source.lost[0].error()))
    assert mirror is not None
    names = wanted.shards(source)
    target = cache_dir / source.path.parent.name / source.path.name
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    report = TransferReport(url=mirror.url_of(""), path=str(target))
    write_file(target / RECIPE_FILE, (source.path / RECIPE_FILE).read_bytes())
    with maintaining(target):
        _bring_shards(_Pull(source, mirror, target), names, report, listen)
        _bring_small(source, mirror, target)
        report.records, report.complete = _write_index(source, target)
    return report, mirror.root.path


def _bring_shards(pull: _Pull, names: set[str], report: TransferReport, listen: Listen | None) -> None:
    entries = [entry for entry in pull.source.index.shards if entry.file in names]
    there = Catalog(LocalStorage(pull.target), pull.source.recipe).refresh()
    known = {info.file: info.header for info in there}
    missing = [entry for entry in entries if known.get(entry.file) != entry.header]
    report.present = len(entries) - len(missing)
    progress = Progress(count=len(missing), total=sum(entry.bytes for entry in missing))
    for entry in map_in_order(pull.bring, missing, what=f"pulling {report.url}", threads=AT_ONCE):
        progress.add(entry.bytes, listen)
        report.shards += 1
        report.bytes += entry.bytes


class _Pull:
    """Brings single shards."""

    def __init__(self, source: Cache, mirror: MirrorFolder, target: Path) -> None:
        self.source, self.target = source, target
        self._mirror = mirror

    def bring(self, entry: ShardEntry) -> ShardEntry:
        """Fetch a shard, read it against its sums, and move it to its place."""
        mirror, path = self._mirror, self.source.path / entry.file
        mirror.ensure(entry.file, [(0, entry.bytes)])
        if (damage := self._damage(entry)) is not None:
            fact = f"{mirror.url_of(entry.file)} is damaged: {damage}"
            raise CorruptError(fact, advice="Push it again from where it is sound", shard=entry.file)
        publish(path, self.target / entry.file)
        path.with_name(f"{MAP_PREFIX}{entry.file}").unlink(missing_ok=True)
        return entry

    def _damage(self, entry: ShardEntry) -> str | None:
        """What is wrong with a shard, once what came wrong was fetched again; known damage aside."""
        path = self.source.path / entry.file
        try:
            shard = Shard(LocalStorage(path.parent).open(entry.file), path, self.source.schema)
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
    storage = LocalStorage(source.path)
    for name in storage.list():
        if name == SOURCES_FILE or name.startswith("failures-"):
            write_file(target / name, storage.read(name, limit_bytes=1 << 30))
    bring_weights(source.recipe, mirror.root.path, target.parent.parent)


def bring_weights(recipe: Recipe, origin: Path, cache_dir: Path) -> None:
    """Copy the weights that a recipe names from one cache folder to another, where the first has them."""
    encoder = recipe.entries["encoder"]
    digest = encoder.get("weights") if isinstance(encoder, dict) else None
    name = f"{digest}.safetensors"
    if not digest:
        return
    (cache_dir / WEIGHTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    if name in LocalStorage(cache_dir / WEIGHTS).list():
        return
    try:
        data = LocalStorage(origin / WEIGHTS).read(name, limit_bytes=1 << 40)
    except FileNotFoundError:
        return
    LocalStorage(cache_dir / WEIGHTS).put(name, data)


def _write_index(source: Cache, target: Path) -> tuple[int, bool]:
    """Write the index of what is at its place now; returns its records and whether they are all."""
    storage, recipe = LocalStorage(target), load_recipe(target)
    bad = {entry.file: entry.bad for entry in source.index.shards}
    with indexing(target), explained(target):
        infos = Catalog(storage, recipe).refresh()
        infos = [replace(info, bad=tuple(sorted({*info.bad, *bad.get(info.file, ())}))) for info in infos]
        index = build_index(storage, recipe, infos, known_index(target, recipe) or source.index)
        storage.put(INDEX_FILE, dump_index(index, recipe))
    return index.stored, index.complete
