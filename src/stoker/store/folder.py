"""One fingerprint's folder while it is being filled, by any number of processes at once."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, FormatError, ReadOnlyError
from stoker.runtime.disk import explained
from stoker.runtime.files import make_folder, sync_folder
from stoker.runtime.locks import lock_folder
from stoker.schema import canonical_json
from stoker.store.adopt import adopt_shards
from stoker.store.cache import Cache, open_indexed
from stoker.store.catalog import Catalog, presence
from stoker.store.digests import FileDigest
from stoker.store.failures import Failure, append_failures, read_failures
from stoker.store.local import LocalStorage
from stoker.store.protocols import SOURCES_FILE
from stoker.store.recipe import RECIPE_FILE, Recipe, load_recipe
from stoker.store.same_samples import SameSamples, changes_of_files
from stoker.store.strict_json import as_object
from stoker.store.use import Use, indexing, note_use
from stoker.store.writer import RecordWriter, WriterSettings

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("stoker")
CACHE_NAME = re.compile(r"\w[\w.+=-]{0,127}")


class Folder:
    """What is stored, what is missing, and how to add to it.

    Every handle has a token of its own and writes only files that carry it, the index excepted.
    """

    def __init__(self, path: Path, name: str, recipe: Recipe) -> None:
        self.path = path
        self.name = name
        self.recipe = recipe
        self._storage = LocalStorage(path)
        self._catalog = Catalog(self._storage, recipe)
        self._token = secrets.token_hex(6)
        self._use = Use(path)
        note_use(path)

    def complete(self) -> Cache | None:
        """The cache, if its index is sound and says so, and its shards are those that the index pins.

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
        sync_folder(self.path)  # whoever gave the last file its name may have been killed before that
        return cache

    def adopt(self) -> int:
        """Take over shards of sibling fingerprints for parts that did not change; returns records gained."""
        for line in changes_of_files(self.path, self.recipe):
            log.info("%s: %s", self.name, line)
        gained, failures = adopt_shards(self._storage, self.recipe, self._catalog)
        known = self.failures()
        self.quarantine_many([failure for failure in failures if failure.number not in known])
        return gained

    def same_samples(self) -> SameSamples | None:
        """Records of sibling caches by the digest of their samples; None: none is known, or none is missing.

        `adopt` needs parts that did not change. This needs the samples to be read.
        """
        if not len(self.missing()):
            return None
        same = SameSamples(self.path, self.recipe)
        return same if len(same) else None

    def missing(self, *, retry_quarantined: bool = False, retry_transient: bool = True) -> NDArray[np.int64]:
        """Global numbers that are neither stored nor given up, sorted.

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
        """Records stored, each sample once."""
        return int(presence(self._catalog.refresh(), self.recipe).sum())

    def failures(self) -> dict[int, Failure]:
        """Failures by global number, of samples that are not stored."""
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
        """A writer of records.

        Raises:
            ConfigError: `settings.shard_bytes` is less than 1.
        """
        return RecordWriter(self._storage, self.recipe, settings or WriterSettings())

    def claim(self, purpose: str = "encode", *, shared: bool = False) -> AbstractContextManager[bool]:
        """An advisory claim; yields False if somebody else holds it (`shared`: by himself)."""
        return lock_folder(self.path, purpose, shared=shared)

    def finish(self) -> Cache:
        """Write the index over everything sealed so far, by whomever, and open it.

        Of several processes that finish at once, each sees at least what those before it saw. Records that
        prove damaged on the way are left out of it, so `missing` may have grown afterwards.
        """
        with indexing(self.path):
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
    if not CACHE_NAME.fullmatch(name) or ".." in name or name == "encoders":
        raise ConfigError(
            f"a cache cannot be called {name!r}. Use letters, digits, '_', '-', '+', '=' and '.'"
        )
    cache_dir = Path(cache_dir)
    path = cache_dir / name / recipe.fingerprint
    storage = LocalStorage(path)
    try:
        with explained(path):
            _make_folders(cache_dir, path)
            storage.sweep()
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


def _make_folders(cache_dir: Path, path: Path) -> None:
    if (path / RECIPE_FILE).exists():
        return  # written when the folders above it were durable
    made = [folder for folder in cache_dir.parents if not folder.exists()]
    for folder in (cache_dir, path.parent, path):
        make_folder(folder, 0o700)
    for folder in (path.parent, cache_dir, cache_dir.parent, *(folder.parent for folder in made)):
        if os.access(folder, os.R_OK):  # one that we may not list cannot be opened to be synced
            sync_folder(folder)


def _put_recipe(storage: LocalStorage, recipe: Recipe) -> None:
    with suppress(FormatError):
        load_recipe(storage.path)
        return
    storage.put(RECIPE_FILE, recipe.text.encode())


def _put_sources(storage: LocalStorage, files: Sequence[FileDigest]) -> None:
    if not files or (storage.path / SOURCES_FILE).exists():
        return
    lines = [
        canonical_json({"name": f.name, "bytes": f.bytes, "digest": f.digest, "sampled": f.sampled})
        for f in files
    ]
    storage.put(SOURCES_FILE, ("\n".join(lines) + "\n").encode())


def _put_weights(cache_dir: Path, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
    from stoker.encoders.weights import weights_to_bytes

    digest = str((as_object(recipe.entries["encoder"]) or {}).get("weights"))
    if not re.fullmatch(r"[0-9a-f]{16,64}", digest):
        return
    storage = LocalStorage(cache_dir / "encoders")
    storage.path.mkdir(mode=0o700, exist_ok=True)
    if not (storage.path / f"{digest}.safetensors").exists():
        storage.put(f"{digest}.safetensors", weights_to_bytes(weights))
