"""One fingerprint's folder while it is being filled, by any number of processes at once."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.encoders.weights import weights_to_bytes
from stoker.errors import ConfigError, FormatError, ReadOnlyError, SourceError, StalledError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import make_folder, sync_folder
from stoker.runtime.jsonio import canonical_json, read_strict
from stoker.runtime.locks import lock_folder
from stoker.schema import Sample, Schema, schema_text
from stoker.sources.protocol import Source, keys_follow_identity
from stoker.store.cache import Cache, open_indexed
from stoker.store.failures import Failure, append_failures, read_failures
from stoker.store.format import FINGERPRINT, RECIPE_FILE, SOURCES_FILE, WEIGHTS_FOLDER, is_shard_name
from stoker.store.index import (
    ShardCatalog,
    damaged_rows,
    known_index,
    load_recipe,
    noted_damage,
    presence,
    read_info,
)
from stoker.store.keys import has_keys, put_keys
from stoker.store.recipe import FileDigest, Recipe
from stoker.store.storage import Storage, UsageLock, lock_index, note_use, open_storage, sweep
from stoker.store.write import RecordWriter, WriterSettings
from stoker.units import GIB, format_count

if TYPE_CHECKING:
    from torch import Tensor


# ----------------------------------------------------------------------------------------------------------
# Find records in other caches of a folder that were encoded from the very same samples.
#
# `adopt_shards` takes over shards of parts that did not change at all. When something changed inside a part
# (rows were added to a table, an image to a folder, a file got another name), its key is another one. Then
# samples are read again, and each is looked up by the digest of what was read. A record depends on its
# sample, the encoder and the stored dtype alone, so with equal digests and otherwise equal recipes it is
# the same record (docs/design/041).


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
    head = xxhash.xxh3_128(schema_text(schema).encode())
    found: list[bytes] = []
    for member in members:
        digest = head.copy()
        for name, field in schema.items():
            array = arrays[name][member, ...]
            if field.ragged:
                digest.update(str(array.shape[0]).encode())
            elif field.time:
                array = array[: field.shape[0]]
            data: Any = array if array.flags.c_contiguous else np.ascontiguousarray(array)
            digest.update(data)
        found.append(digest.digest())
    return np.frombuffer(b"".join(found), ">u8").reshape(-1, 2).astype(np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMatch:
    """Records of one cache that samples were found in."""

    cache: Cache
    members: list[int]
    """Places of the samples among those that were looked up."""
    places: NDArray[np.int64]
    """Shard and row of the record of each, `(len(members), 2)`."""
    moved: list[int]
    """Those of `members` that have another place in their group there."""


class SampleLookup:
    """Records of other caches by the digest of their samples.

    It keeps those caches in use, so that no clean-up removes them.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
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

    def find(self, digests: NDArray[np.uint64], in_batch: Sequence[int]) -> list[SampleMatch]:
        """Return where the records of samples are, for those that are found.

        Args:
            digests: As `digest_samples`.
            in_batch: Their places in encode batches, `Recipe.place`.
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
        return [self._match(self._caches[i], rows, in_batch) for i, rows in found.items()]

    def _match(self, cache: Cache, rows: list[tuple[int, int, int]], in_batch: Sequence[int]) -> SampleMatch:
        moved: list[int] = []
        for member, shard, row in rows:
            try:
                there = int(cache.shard(shard).numbers()[row])
            except (FormatError, OSError):
                continue  # the copy will find out as well
            if cache.recipe.place(cache.index.shards[shard].part, there) != in_batch[member]:
                moved.append(member)
        places = np.array([[shard, row] for _, shard, row in rows], np.int64)
        return SampleMatch(cache=cache, members=[member for member, _, _ in rows], places=places, moved=moved)


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
        lines = open_storage(folder).read(SOURCES_FILE, limit_bytes=GIB).splitlines()
        entries = [read_strict(line, where=SOURCES_FILE) for line in lines]
        return {str(entry["name"]): str(entry["digest"]) for entry in entries}
    except (FormatError, OSError, KeyError):
        return {}


# ----------------------------------------------------------------------------------------------------------
# Take over what a sibling cache has encoded already.
#
# When files are added to a source, the parts that were there keep their keys; their shards carry part-local
# numbers, so they serve in the new cache as they are: by a hard link, or a copy.


def siblings(folder: Path) -> list[Path]:
    """Return the folders of other fingerprints of the same name."""
    paths = sorted(path for path in folder.parent.iterdir() if FINGERPRINT.fullmatch(path.name))
    return [path for path in paths if path.name != folder.name and path.is_dir()]


def adopt_shards(storage: Storage, recipe: Recipe, catalog: ShardCatalog) -> tuple[int, list[Failure]]:
    """Link shards of unchanged parts into our folder where they hold records that we lack.

    Returns:
        How many records were gained, and failures of the sample's own kind in those parts, in our numbering.
    """
    stored = presence(catalog.refresh(), recipe)
    before = int(stored.sum())
    failures: list[Failure] = []
    for path in siblings(storage.path):
        try:
            theirs = load_recipe(path)
        except (FormatError, OSError):
            continue
        ours = {part.key: part for part in recipe.parts}
        common = {part.key for part in theirs.parts if part.count} & ours.keys()
        if not common:
            continue
        try:
            _use = UsageLock(path)  # so that no clean-up removes it while shards are linked
        except (FormatError, StalledError, OSError):
            continue
        _link_shards(storage, recipe, catalog, open_storage(path), theirs)
        stored = presence(catalog.refresh(), recipe)
        for number, failure in read_failures(open_storage(path), theirs).items():
            part, local = theirs.part_of(number)
            key = theirs.parts[part].key
            if failure.kind == "sample" and key in common and not stored[ours[key].offset + local]:
                failures.append(replace(failure, number=ours[key].offset + local))
    return int(stored.sum()) - before, failures


def _link_shards(
    storage: Storage, recipe: Recipe, catalog: ShardCatalog, sibling: Storage, theirs: Recipe
) -> None:
    bad = noted_damage(known_index(sibling.path, theirs))
    index = known_index(storage.path, recipe)
    stored, here = presence(catalog.refresh(), recipe), {*storage.list()}
    # Indexed here and gone: removed as damaged, as errors advise. A sibling's link is the same damaged file.
    removed = set[str]() if index is None else {shard.file for shard in index.shards} - here
    linked: list[str] = []
    for name in filter(is_shard_name, sibling.list()):
        if name in here:
            continue
        try:
            info = read_info(sibling, name, recipe)
        except (FormatError, OSError):
            continue  # of a part that we do not have, or damaged
        if name in removed:
            bad[name] = (*damaged_rows(sibling, info, recipe),)
        sound = np.delete(info.numbers, bad.get(name, ())) + recipe.parts[info.part].offset
        if not stored[sound].all():
            storage.link(sibling, name)
            linked.append(name)
            stored[sound] = True
    catalog.exclude({name: bad.get(name, ()) for name in linked})


# ----------------------------------------------------------------------------------------------------------
# The folder, and what fills it.


CACHE_NAME = re.compile(r"\w[\w.+=-]{0,127}")


class Folder:
    """Cache folder: what is stored, what is missing, and how to add to it.

    Every handle has a token of its own and writes only files that carry it, the index excepted.
    """

    def __init__(self, path: Path, name: str, recipe: Recipe) -> None:
        self.path = path
        self.name = name
        self.recipe = recipe
        self._storage = open_storage(path)
        self._catalog = ShardCatalog(self._storage, recipe)
        self._token = secrets.token_hex(6)
        self._use = UsageLock(path)
        note_use(path)

    def complete(self) -> Cache | None:
        """Return the cache, if its index is sound and says so, and its shards are those that the index pins.

        Reads headers, numbers and sums, no records. With a damaged index every byte is read, as `open_cache`
        does: only the index knew which rows are damaged.
        """
        try:
            cache = open_indexed(self.path, self.recipe)
        except FileNotFoundError:
            return None
        except (FormatError, OSError) as error:
            log.warning("the index of %s is made again from its shards: %s", self.path, error)
            self._catalog.verify()
            return None
        headers = {info.file: info.header for info in self._catalog.refresh()}
        serving = [shard for shard in cache.index.shards if len(shard.segments)]
        pinned = all(headers.get(shard.file) == shard.header for shard in serving)
        if not (cache.complete and pinned):
            return None
        sync_folder(self.path)  # the process that named the last file may have been killed before that
        return cache

    def adopt(self) -> int:
        """Take over shards of sibling fingerprints for parts that did not change; returns records gained."""
        for line in changes_of_files(self.path, self.recipe):
            log.info("%s: %s", self.name, line)
        gained, failures = adopt_shards(self._storage, self.recipe, self._catalog)
        known = self.failures()
        self.quarantine_many([failure for failure in failures if failure.number not in known])
        return gained

    def note_keys(self, source: Source) -> None:
        """Keep the keys of the source's samples next to their records, for those who join caches by key.

        Most sources may name the same samples otherwise than before: by a file in another folder, by another
        column, or as the caller says. So the source is asked again also where keys are kept.

        Args:
            source: Of these records.
        """
        if keys_follow_identity(source) and has_keys(self._storage, self.recipe.count):
            return
        try:
            put_keys(self._storage, source.keys())
        except ReadOnlyError:
            log.debug("%s: the keys of its samples cannot be written", self.path)
        except SourceError as error:
            kept = has_keys(self._storage, self.recipe.count)
            said = "keeps the keys that an earlier run noted" if kept else "has no keys of its samples"
            log.warning("%s %s: %s", self.path, said, error)

    def same_samples(self) -> SampleLookup | None:
        """Return a lookup of records in sibling caches by the digest of their samples; None if of no use.

        `adopt` needs parts that did not change. This needs the samples to be read.
        """
        if not len(self.missing()):
            return None
        same = SampleLookup(self.path, self.recipe)
        return same if len(same) else None

    def missing(self, *, retry_quarantined: bool = False, retry_transient: bool = True) -> NDArray[np.int64]:
        """Return the global numbers that are neither stored nor given up, sorted.

        Args:
            retry_quarantined: Count every quarantined sample as missing.
            retry_transient: Count those as missing that failed by a hang, a signal, EIO or lack of memory in
                one run so far.
        """
        wanted = ~presence(self._catalog.refresh(), self.recipe)
        if not retry_quarantined:
            for number, failure in read_failures(self._storage, self.recipe).items():
                if failure.sticky or not retry_transient:
                    wanted[number] = False
        return np.flatnonzero(wanted)

    def stored_count(self) -> int:
        """Return the records stored, each sample once."""
        return int(presence(self._catalog.refresh(), self.recipe).sum())

    def failures(self) -> dict[int, Failure]:
        """Return the failures by global number, of samples that are not stored."""
        stored = presence(self._catalog.refresh(), self.recipe)
        return {
            n: failure for n, failure in read_failures(self._storage, self.recipe).items() if not stored[n]
        }

    def quarantine(self, failure: Failure) -> None:
        """Note, durably, that a sample could not be encoded."""
        self.quarantine_many([failure])

    def quarantine_many(self, failures: Sequence[Failure]) -> None:
        """Note several at the cost of one."""
        if failures:
            append_failures(self._storage, self._token, failures, self.recipe)

    def writer(self, settings: WriterSettings | None = None) -> RecordWriter:
        """Return a writer of records.

        Raises:
            ConfigError: `settings.shard_bytes` is less than 1.
        """
        return RecordWriter(self._storage, self.recipe, settings or WriterSettings())

    def lock(self, purpose: str = "encode", *, shared: bool = False) -> AbstractContextManager[bool]:
        """Return an advisory lock; it yields False if another process holds it (`shared`: exclusively)."""
        return lock_folder(self.path, purpose, shared=shared)

    def finish(self) -> Cache:
        """Write the index over all shards committed so far, by any process, and open it.

        Of several processes that finish at once, each sees at least what those before it saw. Records that
        prove damaged on the way are left out of it, so `missing` may have grown afterwards.
        """
        with lock_index(self.path):
            index = self._catalog.write_index()
        return Cache(self.path, self.recipe, index, use=self._use)


def open_folder(
    cache_dir: Path,
    name: str,
    recipe: Recipe,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Folder:
    """Make or open `<cache_dir>/<name>/<fingerprint>/`.

    Args:
        cache_dir, name, recipe: Where, under which name, and of what.
        weights: The encoder's weights, kept once in `<cache_dir>/encoders`.
    Raises:
        ConfigError: `name` is not a plain name.
        ReadOnlyError: The folder does not exist and cannot be made. One that exists may be read-only.
    """
    if not CACHE_NAME.fullmatch(str(name)) or ".." in name or name == WEIGHTS_FOLDER:
        raise ConfigError(
            f"a cache cannot be called {name!r}", hint="Use letters, digits, '_', '-', '+', '=' and '.'"
        )
    cache_dir = Path(cache_dir)
    path = cache_dir / name / recipe.fingerprint
    storage = open_storage(path)
    try:
        with explain_disk_errors(path):
            _make_folders(cache_dir, path, ignored_by_git=storage.mirror is None)
            sweep(storage.path)
            _put_recipe(storage, recipe)
            _put_sources(storage, recipe.files)
            if weights:
                _put_weights(cache_dir, recipe, weights)
    except ReadOnlyError as error:
        try:
            load_recipe(path)
        except (FormatError, OSError):
            raise error from None
    return Folder(path, name, recipe)


def _make_folders(cache_dir: Path, path: Path, *, ignored_by_git: bool) -> None:
    if (path / RECIPE_FILE).exists():
        return  # written when the folders above it were durable
    made = [folder for folder in cache_dir.parents if not folder.exists()]
    ignored_by_git &= not cache_dir.exists()
    for folder in (cache_dir, path.parent, path):
        make_folder(folder, 0o700)
    if ignored_by_git:
        (cache_dir / ".gitignore").write_text("*\n")
    for folder in (path.parent, cache_dir, cache_dir.parent, *(folder.parent for folder in made)):
        if os.access(folder, os.R_OK):  # one that we may not list cannot be opened to be synced
            sync_folder(folder)


def _put_recipe(storage: Storage, recipe: Recipe) -> None:
    with suppress(FormatError):
        load_recipe(storage.path)
        return
    storage.put(RECIPE_FILE, recipe.text.encode())


def _put_sources(storage: Storage, files: Sequence[FileDigest]) -> None:
    if not files or (storage.path / SOURCES_FILE).exists():
        return
    lines = [
        canonical_json({"name": f.name, "bytes": f.bytes, "digest": f.digest, "sampled": f.sampled})
        for f in files
    ]
    storage.put(SOURCES_FILE, ("\n".join(lines) + "\n").encode())


def _put_weights(cache_dir: Path, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
    digest = recipe.weights
    if not re.fullmatch(r"[0-9a-f]{16,64}", digest):
        return
    storage = open_storage(cache_dir / WEIGHTS_FOLDER)
    storage.path.mkdir(mode=0o700, exist_ok=True)
    if not (storage.path / f"{digest}.safetensors").exists():
        storage.put(f"{digest}.safetensors", weights_to_bytes(weights))
