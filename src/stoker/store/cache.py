"""A cache, opened: records by sample index, verified on every read."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, SupportsIndex, overload

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    IncompleteError,
    MissingRecordError,
    ReadOnlyError,
    RecordError,
    ResourceError,
    StalledError,
)
from stoker.schema import Schema, unfolded
from stoker.store.access import Column, Table, describe, is_index, preview, read_many, sample_index, selected
from stoker.store.failures import Failure
from stoker.store.format import RECIPE_FILE, axis_length, is_shard_name
from stoker.store.index import (
    Index,
    LostShard,
    Segments,
    ShardCatalog,
    ShardInfo,
    build_index,
    known_index,
    load_index,
    load_recipe,
    segments_of,
    spread,
    without_lost,
    write_index,
)
from stoker.store.keys import SampleKeys, joint_keys, read_keys
from stoker.store.recipe import Difference, Recipe, diff_recipes
from stoker.store.shard import OpenShards, Shard, ShardFacts, offsets_in
from stoker.store.storage import UsageLock, display_path, lock_index, note_use, open_storage, resolve_local
from stoker.store.values import read_field
from stoker.store.verify import VerifyReport, verify
from stoker.units import format_count, format_few

if TYPE_CHECKING:
    from stoker.store.dataset import CacheDataset
    from stoker.store.joins import JoinedColumns

log = logging.getLogger("stoker")
MOST_NAMED = 20
"""Names of caches that an error lists."""
_AGAIN = "Run precompute again: it leaves that file out and encodes its records again"


class Filler(Protocol):
    """Encodes what is missing. Precompute implements it; a cache handle may carry one."""

    def fill(self, numbers: Sequence[int], timeout_s: float) -> None:
        """Encode and store at least these samples (in complete encode batches) before returning.

        Raises:
            StalledError: `timeout_s` passed.
            MissingRecordError: A sample was quarantined; the message says why.
        """
        ...

    def begin(self) -> BackgroundFill:
        """Encode the first samples; another process encodes the rest of what is missing, by `fill_blocks`."""
        ...


class BackgroundFill(Protocol):
    """A cache that is being filled while others read what is there."""

    served: bool
    """A loader has served a full epoch, and the filling has ended."""
    agreed: bool
    """All ranks serve their first epoch in the order of filling, as this one does."""

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """Return what is stored now, and `(count,)` which samples are stored or quarantined for good.

        Raises:
            StokerError: Filling ended with an error; the same at every call.
        """
        ...

    def done(self) -> bool:
        """Return True if filling has ended well: the cache is complete and has its index.

        Raises:
            StokerError: As `look`.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until more may be there, `timeout_s` at most.

        Raises:
            StalledError: Nothing has been stored for longer than all timeouts together.
        """
        ...

    def forget(self) -> None:
        """Read again which records are damaged; call it when some were repaired."""
        ...


class Cache:
    """Records of a finished encoding, opened: what `open_cache` and `precompute` return.

    `len(cache)` counts stored records; `cache[index]` goes by sample index. Threads may share a handle, which
    can be pickled by its path and used in a `with` block.

    Examples:
        >>> import stoker, torch
        >>> cache = stoker.precompute([{"x": torch.ones(2) * i} for i in range(5)], None, "caches", name="a")
        >>> cache[-1]["x"], cache[1:3]["x"].shape, cache["x"][0]
        (tensor([4., 4.]), torch.Size([2, 2]), tensor([0., 0.]))
        >>> cache.complete, cache.quarantined, cache.schema["x"].dtype
        (True, {}, 'float32')
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        index: Index,
        lost: tuple[LostShard, ...] = (),
        *,
        use: UsageLock | None = None,
    ) -> None:
        self.path = path
        """The fingerprint's folder."""
        self.recipe = recipe
        self.index = index
        self.lost = lost
        """Shards that were gone when it was opened; `index` serves nothing from them."""
        self.filler: Filler | None = None
        """Encodes what is missing; a loader asks it."""
        self.filling: BackgroundFill | None = None
        """The work under way to complete it (`precompute(wait=False)`); a loader serves meanwhile."""
        self.joined: JoinedColumns | None = None
        """Columns of a table next to the records, see `open_cache`; None: none."""
        self._use = use or UsageLock(path)
        self._storage = open_storage(path)
        self._shards = OpenShards()

    @property
    def name(self) -> str:
        """The name it was made under."""
        return self.index.name

    @property
    def fingerprint(self) -> str:
        """16 hex digits; the folder's name."""
        return self.index.fingerprint

    @property
    def schema(self) -> Schema:
        """Fields of a record, as stored: name to `Field`."""
        return self.recipe.schema

    @property
    def variants(self) -> Mapping[str, int]:
        """Number of variants of each field that was stored in several: axis 0 of the field in a record."""
        return self.recipe.variants

    @property
    def complete(self) -> bool:
        """True if every sample is stored or quarantined."""
        return self.index.complete

    @property
    def quarantined(self) -> Mapping[int, Failure]:
        """Samples that could not be encoded, by index, each with its stage and error."""
        return self.index.quarantined

    @property
    def statistics(self) -> Mapping[str, Any]:
        """By field: count, nonfinite, mean, std, min, max, and per channel under `channels`."""
        return self.index.statistics

    @cached_property
    def segments(self) -> Segments:
        """The locations of records, as runs."""
        return segments_of(self.index.shards, self.recipe)

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """Sample indices of stored records, sorted, `(len(self),)`. Read-only."""
        indices = spread(self.segments.first, self.segments.count)
        indices.flags.writeable = False
        return indices

    def __len__(self) -> int:
        return self.index.stored

    def __contains__(self, number: object) -> bool:
        return isinstance(number, SupportsIndex) and self._find(operator.index(number)) is not None

    @overload
    def __getitem__(self, key: SupportsIndex) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, key: str) -> Column: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any] | Tensor) -> dict[str, Any]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return a copy of the record of a sample, of several samples, or a field of all; every byte checked.

        `cache[5]` is the record of sample 5 and `cache[-1]` that of the last sample, `{field: tensor}`.
        `cache[10:20]` has those samples of the range that are stored, and `cache[[3, 5]]` the ones named.
        Their fields are stacked to `(n, *shape)` (a list of tensors if the length varies). `index` has their
        sample indices.
        `cache["latent"]` is a `Column`. Quantized fields come as float32. Fields of particles and meshes
        whose steps and points vary come as `(T, N, *rest)`.

        Raises:
            MissingRecordError: A sample is not stored; says whether it was quarantined, and why.
            CorruptError: A record is damaged; names shard and field.
            RecordError: There is no such field.
        """
        if isinstance(key, str):
            if key not in served_schema(self):
                raise RecordError(
                    f"{self.name} has no field {key!r}", hint=f"It has {', '.join(served_schema(self))}"
                )
            return Column(self, key)
        if not is_index(key):
            indices = selected(key, self.index.count, self.indices, next(iter(self.schema), "data"))
            return read_many(self.__getitem__, served_schema(self), indices)
        number = sample_index(key, self.index.count)
        place = self.locate(number)
        shard = self.shard(place[0])
        joined = {} if self.joined is None else self.joined.record(number)
        record = {name: read_field(shard, name, field, place[1]) for name, field in self.schema.items()}
        return unfolded(record, self.schema) | joined

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the stored records by sample index."""
        for index in self.indices.tolist():
            yield self[index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files. What is read of it afterwards opens them again."""
        self._shards.trim(0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path alone; what is not complete is opened as it is then."""
        return _reopened, (self.path, self.joined)

    def preview(self, records: int = 3) -> Table:
        """Return the first values of the first records, a table to print or to show in a notebook.

        Args:
            records: How many records.
        """
        return preview(self, records)

    def _repr_html_(self) -> str:
        return describe(self).html()

    def why(self, other: Cache) -> list[Difference]:
        """Return what differs between the recipes of two caches; an empty list: they have one fingerprint.

        Args:
            other: The cache to compare with.
        """
        return diff_recipes(self.recipe, other.recipe)

    def __repr__(self) -> str:
        state = f"{format_count(len(self))} of {format_count(self.index.count)}"
        state = "complete" if self.complete else state
        return f"Cache({self.name!r}, {self.fingerprint}, {format_count(len(self), 'record')}, {state})"

    def shard(self, i: int, *, fresh: bool = False) -> Shard:
        """Return shard `i` of the index, open. Those not used for longest are closed once unreferenced.

        Args:
            i: Its place in the index.
            fresh: Open it again and compare it with the index.

        Raises:
            CorruptError: The file is missing or is not the one that the index pins.
            ResourceError: The process may not open another file.
        """
        return self._open_shard(i) if fresh else self._shards.get(i, partial(self._open_shard, i))

    def _open_shard(self, i: int, known: ShardFacts | None = None) -> Shard:
        """Return shard `i`, compared with the index. `known`: as for `Shard`."""
        entry = self.index.shards[i]
        part, path = self.recipe.parts[entry.part], self.path / entry.file
        try:
            file = self._storage.open(entry.file)
            shard = Shard(file, path, self.schema, offset=part.offset, known=known)
        except FileNotFoundError as error:
            raise self._unusable(path, f"{path} is missing") from error
        except FormatError as error:  # the index pins it as a sound one
            raise self._unusable(path, str(error)) from error
        if shard.header_digest != entry.header or shard.part != part.key:
            raise self._unusable(path, f"{path} is not the shard that the index pins: swapped or replaced")
        return shard

    def keys(self) -> SampleKeys:
        """Return the key of each sample, by sample index, as its source named it: a file, a row, an id.

        Raises:
            MissingRecordError: The cache was made before keys were kept.

        Examples:
            >>> import stoker, torch
            >>> data = stoker.TorchSource([{"x": torch.ones(1) * i} for i in range(3)], keys=["a", "b", "c"])
            >>> cache = stoker.precompute(data, None, "caches", name="keyed")
            >>> list(cache.keys()), cache.keys().index("c"), cache.get("c")["x"]
            (['a', 'b', 'c'], 2, tensor([2.]))
        """
        return self._keys

    @cached_property
    def _keys(self) -> SampleKeys:
        return read_keys(self._storage, self.index.count)

    def get(self, key: str) -> dict[str, Tensor]:
        """Return the record of the sample with a key; see `keys` and `cache[index]`.

        Args:
            key: One of `keys()`.

        Raises:
            MissingRecordError: No sample has it, or several have.
        """
        return self[self._keys.index(key)]

    def where(self, condition: str) -> NDArray[np.int64]:
        """Return the sample indices of served records that meet a condition, for `indices=` of a `Loader`.

        Args:
            condition: SQL as after WHERE (SQLite's), over fields that hold one number, joined columns, `key`
                and `sample_index`.

        Raises:
            ConfigError: It is not such a condition, and names the columns. Or it uses a name that stands for
                two: names are equal where they differ in case alone, and the sample's `key` is not a field
                of that name.
            MissingRecordError: It uses `key`, and the cache was made before keys were kept.

        Examples:
            >>> import stoker, torch
            >>> data = [{"x": torch.ones(2), "label": i % 3} for i in range(6)]
            >>> cache = stoker.precompute(data, None, "caches", name="labels")
            >>> cache.where("label > 0 AND sample_index < 4")
            array([1, 2])
        """
        from stoker.store.where import find_where

        return find_where(self, condition)

    def as_dataset(self) -> CacheDataset:
        """Return the served records as a map-style `Dataset`, for a `DataLoader` with a sampler of its own.

        It can be pickled, and reads the items of a batch together. A `Loader` is faster and needs no workers.

        Examples:
            >>> import stoker, torch
            >>> cache = stoker.precompute([{"x": torch.ones(2)}] * 6, None, "caches", name="six")
            >>> batches = torch.utils.data.DataLoader(cache.as_dataset(), batch_size=3)
            >>> next(iter(batches))["x"].shape
            torch.Size([3, 2])
        """
        from stoker.store.dataset import CacheDataset  # imports torch.utils.data

        return CacheDataset(self)

    def lengths(self, field: str) -> NDArray[np.int64]:
        """Return the steps along axis 0 of a field of each stored record, in the order of `indices`.

        Args:
            field: Name of the field.

        Raises:
            RecordError: There is no such field, or it is a scalar.
        """
        spec = self.recipe.columns.get(field)
        if spec is None or not spec.shape:
            raise RecordError(f"field {field!r} has no axis 0", hint=f"Fields: {', '.join(self.schema)}")
        if not spec.ragged:
            return np.full(len(self), axis_length(spec), np.int64)
        segments = self.segments
        pieces = [np.empty(0, np.int64)]
        every = offsets_in(self.shard, segments.shard.tolist(), field, where=str(self.path))
        for offsets, row, count in zip(every, segments.row, segments.count, strict=True):
            pieces.append(np.diff(offsets[row : row + count + 1]))
        return np.concatenate(pieces)

    def verify(self, subset: float = 1.0, *, seed: int = 0) -> VerifyReport:
        """Return which records are damaged, after reading all of them or a seeded sample.

        Args:
            subset: Fraction of the records, `0 < subset <= 1`; 1 also checks columns, headers, index, keys.
            seed: Decides which records, below 1.
        """
        return verify(self, subset, seed)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the place of a sample's record: its shard in the index, and its row there.

        Args:
            index: Sample index, from 0.

        Raises:
            MissingRecordError: It is not stored.
        """
        place = self._find(index)
        if place is None:
            raise self._missing(index)
        return place

    def _find(self, number: int) -> tuple[int, int] | None:
        """Return shard and row of a sample."""
        segments = self.segments
        i = int(np.searchsorted(segments.first, number, side="right")) - 1
        if i < 0 or number >= int(segments.first[i] + segments.count[i]):
            return None
        return int(segments.shard[i]), int(segments.row[i]) + number - int(segments.first[i])

    def _unusable(self, path: Path, fact: str) -> CorruptError:
        return CorruptError(fact, hint=_AGAIN, shard=path.name, folder=self.path)

    def _missing(self, number: int) -> MissingRecordError:
        failure = self.quarantined.get(number)
        if failure is not None:
            return MissingRecordError(
                f"sample {number} was quarantined in stage {failure.stage} after {failure.attempts} "
                f"attempts: {failure.error}",
                hint="Precompute again with retry_quarantined to try once more",
            )
        if not 0 <= number < self.index.count:
            return MissingRecordError(
                f"sample {number} does not exist: {self.name} has {self.index.count} samples, from 0",
                hint="Use an index below that",
            )
        return MissingRecordError(
            f"sample {number} is not encoded yet: {self!r}", hint="Run precompute to fill the gaps"
        )


def open_cache(
    path: str | Path,
    *,
    require_complete: bool = True,
    join: Mapping[str, Any] | None = None,
    updates: Cache | str | Path | Sequence[Cache | str | Path] = (),
) -> Cache:
    """Return a cache, opened for reading.

    Args:
        path: A fingerprint's folder, or `<cache_dir>/<name>`: then the newest complete one, by the
            sequence in their indexes. A lost or damaged index is made again from shards, read in full.
            Also a URL, as `s3://bucket/caches/name`: what is read of it is kept in a mirror
            (docs/how-to/objects.md).
        require_complete: Refuse a cache with missing records.
        join: Columns of a table next to the records, by the arguments of `stoker.store.join_table`.
        updates: Caches of the same fields, dtypes and encoder, or their paths. Their records take the place
            of those with the same keys, of the last one that has the key. Nothing is copied or changed, and
            a quarantined sample among them is served.

    Raises:
        ConfigError: Records of `updates` have other fields or another encoder, or a key is not unique.
        MissingRecordError: A key of `updates` is not one of this cache.
        FormatError: There is no cache, or none that you may read.
        IncompleteError: Records are missing; says how many, and which shard is gone.
        CorruptError: A shard has another size than the index says.

    Examples:
        >>> import stoker, torch
        >>> made = stoker.precompute([{"x": torch.ones(2)}] * 5, None, "caches", name="ones")
        >>> cache = stoker.open_cache("caches/ones")
        >>> len(cache), cache.fingerprint == made.fingerprint
        (5, True)
    """
    cache = peek_cache(path, require_complete=require_complete)
    note_use(cache.path)
    given = [updates] if isinstance(updates, Cache | str | Path) else updates
    if given:
        from stoker.store.updated import UpdatedCache

        for one in given:
            cache = UpdatedCache((cache, one if isinstance(one, Cache) else open_cache(one)))
    if join is None:
        return cache
    from stoker.store.joins import join_table  # few caches have a table next to them

    return join_table(cache, **join)


def peek_cache(path: str | Path, *, require_complete: bool = True) -> Cache:
    """As `open_cache`, and does not count as a use: for opening several to choose one."""
    folder = resolve_local(path)
    try:
        cache = _open_folder(folder) if (folder / RECIPE_FILE).exists() else _newest(folder)
    except PermissionError as error:
        raise FormatError(
            f"{error.filename} cannot be read: {error.strerror}",
            hint="Folders of a cache are made for their owner alone; the owner shares them with chmod -R "
            "g+rX",
        ) from error
    if require_complete and cache.lost:
        raise cache.lost[0].error()
    if require_complete and not cache.complete:
        raise IncompleteError(
            f"{display_path(cache.path)} holds {len(cache)} of {cache.index.count} records "
            f"({len(cache.quarantined)} quarantined)",
            hint="Run again what made it, to encode the rest",
        )
    return cache


def open_indexed(folder: Path, recipe: Recipe) -> Cache:
    """Return the cache of a folder whose index is sound, with what is there of its shards, by name and size.

    Raises:
        FileNotFoundError, FormatError: As `load_index`.
    """
    use = UsageLock(folder)  # before the index is read, so that no shard it names goes in between
    index = load_index(folder, recipe)
    return Cache(folder, recipe, *without_lost(index, folder, open_storage(folder).sizes()), use=use)


def _open_folder(folder: Path) -> Cache:
    recipe = load_recipe(folder)
    try:
        return open_indexed(folder, recipe)
    except FileNotFoundError:
        if any(map(is_shard_name, open_storage(folder).list())):  # else a first run that stored nothing
            log.info("%s has no index, as after a kill; its shards are read to make one", folder)
    except FormatError as error:
        log.warning("the index of %s is made again from its shards: %s", folder, error)
    return rebuild_index(folder, recipe)


def rebuild_index(folder: Path, recipe: Recipe) -> Cache:
    """Read every shard in full and make the index from what is sound.

    The index is kept in memory where the folder cannot be written or is full. The same holds where a shard
    cannot be opened now, so that the next opening finds its records.
    """
    use = UsageLock(folder)
    storage = open_storage(folder)
    catalog = ShardCatalog(storage, recipe)
    catalog.verify()
    with suppress(ReadOnlyError, ResourceError, StalledError), lock_index(folder):
        if not catalog.unread:
            return Cache(folder, recipe, write_index(storage, recipe, catalog.refresh), use=use)
    index = build_index(storage, recipe, catalog.refresh(), None)
    return Cache(folder, recipe, index, use=use)


_FIND = "Check the path: `stoker cache ls` lists caches, `stoker precompute CONFIG` makes one"


def _newest(folder: Path) -> Cache:
    try:
        # A hidden folder is being removed.
        visible = (p for p in folder.iterdir() if not p.name.startswith("."))
        found = sorted(p for p in visible if (p / RECIPE_FILE).exists())
    except NotADirectoryError as error:
        raise FormatError(f"{display_path(folder)} is a file, and a cache is a folder", hint=_FIND) from error
    except FileNotFoundError as error:
        beside = sorted(
            {path.parent.parent.name for path in folder.parent.glob(f"[!.]*/[!.]*/{RECIPE_FILE}")}
        )
        near = get_close_matches(folder.name, beside, n=1)
        hint = f"Did you mean {display_path(folder.parent / near[0])}?" if near else _FIND
        raise FormatError(f"there is no cache at {folder}", hint=hint) from error
    if not found:
        raise _no_cache(folder)
    caches = _readable(found)
    complete = [cache for cache in caches if cache.complete]
    newest = max(complete or caches, key=lambda cache: (cache.index.sequence, cache.fingerprint))
    if len(complete) > 1:
        _warn_several(folder, len(complete), newest.fingerprint)
    return newest


def _no_cache(folder: Path) -> FormatError:
    """Return the error for a folder without recipes: it may be the one that holds caches by name."""
    names = sorted({path.parent.parent.name for path in folder.glob(f"[!.]*/[!.]*/{RECIPE_FILE}")})
    if not names:
        return FormatError(
            f"{display_path(folder)} holds no cache: no folder in it has a {RECIPE_FILE}", hint=_FIND
        )
    return FormatError(
        f"{display_path(folder)} is not a cache. It holds caches by name: {format_few(names, MOST_NAMED)}",
        hint=f"Name one, as {display_path(folder / names[0])}",
    )


def _readable(found: Sequence[Path]) -> list[Cache]:
    """Return the caches that can be opened; an index is made again only where none is sound.

    Raises:
        FormatError, OSError: None can be opened; that of the first one.
    """
    caches, refused = _open_each(found, _open_sound)
    if not caches:
        caches, refused = _open_each(found, _open_folder)
    if not caches:
        raise refused[0]
    # Without an index it is still being filled, which is nothing to warn of.
    if skipped := [str(error) for error in refused if not isinstance(error, FileNotFoundError)]:
        log.warning("skipped what cannot be read: %s", "; ".join(skipped))
    return caches


def _open_each(
    found: Sequence[Path], opening: Callable[[Path], Cache]
) -> tuple[list[Cache], list[FormatError | OSError]]:
    caches: list[Cache] = []
    refused: list[FormatError | OSError] = []
    for path in found:
        try:
            caches.append(opening(path))
        except (FormatError, OSError) as error:
            refused.append(error)
    return caches, refused


def _open_sound(folder: Path) -> Cache:
    return open_indexed(folder, load_recipe(folder))


_warned: set[Path] = set()


def _warn_several(folder: Path, count: int, fingerprint: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        log.warning(
            "%s holds %d complete caches; opened the newest, %s. Name its folder to open another",
            display_path(folder),
            count,
            fingerprint,
        )


# ----------------------------------------------------------------------------------------------------------
# A cache while it is being filled: in which order that is done, and what of it is there by now.
#
# The process that fills and those that serve meanwhile agree on the order: it follows from the recipe.


BLOCKS = 256
"""Blocks that the samples of a cache are cut into; part of the order, therefore fixed. So few that reading
them out of order decodes few chunks of a source twice, so many that the first are soon there."""


def fill_blocks(recipe: Recipe) -> NDArray[np.int64]:
    """Return the order in which a cache is filled: stretches `[start, stop)` of samples, `(n, 2)`.

    Blocks are whole groups, and come shuffled by the fingerprint: a source is often sorted, and training
    during the filling should not see it sorted.
    """
    size = recipe.encode_batch.consecutive
    firsts = np.concatenate(
        [np.arange(part.offset, part.offset + part.count, size, dtype=np.int64) for part in recipe.parts]
    )
    blocks = min(BLOCKS, len(firsts))
    starts = firsts[np.arange(blocks) * len(firsts) // max(1, blocks)]
    keys = [xxhash.xxh3_64_intdigest(f"{recipe.fingerprint} {i}".encode()) for i in range(blocks)]
    order = np.argsort(np.array(keys, np.uint64), kind="stable")
    return np.stack([starts, np.append(starts[1:], recipe.count)[:blocks]], axis=1)[order]


class GrowingCache:
    """Records in a folder while a process fills it, read from the shards themselves.

    Quarantined samples that are tried `again` are no more settled than missing ones.
    """

    def __init__(self, path: Path, recipe: Recipe, again: Mapping[int, Failure]) -> None:
        self._path, self._recipe, self._again = path, recipe, again
        self._storage = open_storage(path)
        self.forget()

    def forget(self) -> None:
        """Read again which records are noted as damaged."""
        self._catalog = ShardCatalog(self._storage, self._recipe)
        self._index = known_index(self._path, self._recipe)
        self._seen: dict[str, int] | None = None

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """As `BackgroundFill.look`."""
        sizes = self._storage.sizes()
        seen = {name: n for name, n in sizes.items() if is_shard_name(name) or name.startswith("failures-")}
        if seen != self._seen:
            self._index = build_index(self._storage, self._recipe, self._catalog.refresh(), self._index)
            self._cache = Cache(self._path, self._recipe, self._index)
            self._settled = np.zeros(self._recipe.count, np.bool_)
            self._settled[self._cache.indices] = True
            given_up = [n for n, why in self._index.quarantined.items() if self._again.get(n) != why]
            self._settled[given_up] = True
            self._seen = seen
        return self._cache, self._settled


class FilledCache:
    """A cache that this rank found complete and another did not; a `BackgroundFill`.

    Its first epoch comes in the order of filling too, since ranks serve parts of one order.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._settled = reopen(cache), np.ones(cache.recipe.count, np.bool_)
        self.served, self.agreed = False, True
        """As in the protocol."""

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """As in the protocol."""
        return self._cache, self._settled

    def done(self) -> bool:
        """As in the protocol."""
        return True

    def wait(self, timeout_s: float) -> None:
        """As in the protocol."""

    def forget(self) -> None:
        """As in the protocol."""


# ----------------------------------------------------------------------------------------------------------
# Several caches of one schema as one: their records are numbered one after another. Shards stay where they
# are and are opened by the cache that they belong to, so code that serves a cache serves a joint one.


class JointCache(Cache):
    """Handle on the records of several caches; the samples of one follow those of the one before.

    Raises:
        ConfigError: They differ in their fields, so they are no one set of records.
    """

    def __init__(self, members: Sequence[Cache]) -> None:
        _check_alike(members)
        recipe = _joint_recipe(members)
        self.members = tuple(members)
        self._first_shard = np.cumsum([0, *(len(member.index.shards) for member in members)])
        path = Path(os.path.commonpath([member.path for member in members]))
        super().__init__(path, recipe, _joint_index(members, recipe), use=UsageLock(members[0].path))
        if any(member.joined is not None for member in members):
            from stoker.store.joins import joint_columns

            self.joined = joint_columns(members)
        if any(member.filler is not None for member in members):
            self.filler = _JointFiller(self.members)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Number of each member's first sample here."""
        return tuple(np.cumsum([0, *(member.recipe.count for member in self.members)])[:-1].tolist())

    def _open_shard(self, i: int, known: ShardFacts | None = None) -> Shard:
        """Return shard `i`, opened by the cache that it belongs to."""
        member = int(np.searchsorted(self._first_shard, i, side="right")) - 1
        return self.members[member]._open_shard(i - int(self._first_shard[member]), known)

    @cached_property
    def _keys(self) -> SampleKeys:
        return joint_keys([member.keys() for member in self.members])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the paths of the members, and the columns of a table that is joined to all of them."""
        by_members = any(member.joined is not None for member in self.members)
        return _joint_again, (type(self), self.members, None if by_members else self.joined)

    def of(self, members: Sequence[Cache]) -> Cache:
        """Return the same cache of members that were opened again."""
        return _joint_again(type(self), members, self.joined)

    def owners(self, error: CorruptError) -> list[Cache]:
        """Return the members that serve the damaged shard: several, if a cache is given twice.

        Raises:
            CorruptError: None of them.
        """
        found = [member for member in self.members if _serves(member, error)]
        if not found:
            raise error
        return found


def _serves(cache: Cache, error: CorruptError) -> bool:
    if isinstance(cache, JointCache):
        return any(_serves(member, error) for member in cache.members)
    return cache.path == error.folder


def reopen(cache: Cache) -> Cache:
    """Return the same generation under a handle of its own: locks and descriptors do not survive a fork."""
    if isinstance(cache, JointCache):
        return cache.of([reopen(member) for member in cache.members])
    again = type(cache)(cache.path, cache.recipe, cache.index)
    again.filler, again.joined = cache.filler, cache.joined
    return again


def _reopened(path: Path, joined: JoinedColumns | None) -> Cache:
    cache = peek_cache(path, require_complete=False)
    cache.joined = joined
    return cache


def _joint_again(
    kind: Callable[[Sequence[Cache]], JointCache], members: Sequence[Cache], joined: JoinedColumns | None
) -> JointCache:
    cache = kind(members)
    if joined is not None:
        cache.joined = joined
    return cache


def same_fields(caches: Sequence[Cache]) -> bool:
    """Return True if records of these caches have the same fields, dtypes, variants and joined columns."""
    kinds = [(one.schema, one.recipe.entries["dtype"], served_schema(one), one.variants) for one in caches]
    return all(kind == kinds[0] for kind in kinds)


class _JointFiller:
    """Asks the members' fillers, each for its own samples."""

    def __init__(self, members: Sequence[Cache]) -> None:
        self._members = members

    def fill(self, numbers: Sequence[int], timeout_s: float) -> None:
        """As `Filler.fill`, with the joint numbers.

        Raises:
            IncompleteError: A member cannot encode.
        """
        until, offset = time.monotonic() + timeout_s, 0
        for member in self._members:
            own = [number - offset for number in numbers if 0 <= number - offset < member.recipe.count]
            if own and member.filler is None:
                raise IncompleteError(
                    f"{member.path} lacks {len(own)} samples, the first is {own[0]}, and has no source at "
                    "hand",
                    hint="Run the precompute that made it again",
                )
            if own and member.filler is not None:
                member.filler.fill(own, until - time.monotonic())
            offset += member.recipe.count

    def begin(self) -> NoReturn:
        """Refused: what fills several caches at once would need an order of all of them."""
        paths = ", ".join(str(member.path) for member in self._members if not member.complete)
        raise ConfigError(
            f"caches served as one must be complete, {paths} are not", hint="Precompute them first"
        )


def _check_alike(members: Sequence[Cache]) -> None:
    for member in members:
        if not same_fields([members[0], member]):
            a, b = (
                {name: (f.shape, f.dtype) for name, f in served_schema(c).items()}
                for c in (members[0], member)
            )
            raise ConfigError(
                f"{members[0].path} has records of {a}, {member.path} of {b}",
                hint="One batch can hold records of both only where all fields are the same; mix='batch' "
                "serves batches of one cache each",
            )


def _joint_recipe(members: Sequence[Cache]) -> Recipe:
    parts: list[Mapping[str, Any]] = [
        {**part, "name": f"{place}/{part['name']}"}
        for place, member in enumerate(members)
        for part in member.recipe.entries["source"]["parts"]
    ]
    source = {"kind": "joint/1", "parts": parts, "caches": [member.fingerprint for member in members]}
    return Recipe(entries={**members[0].recipe.entries, "source": source})


def _joint_index(members: Sequence[Cache], recipe: Recipe) -> Index:
    shards: list[ShardInfo] = []
    quarantined: dict[int, Failure] = {}
    parts = samples = 0
    for member in members:
        shards += [replace(entry, part=entry.part + parts) for entry in member.index.shards]
        for number, failure in member.quarantined.items():
            quarantined[number + samples] = replace(failure, number=number + samples)
        parts += len(member.recipe.parts)
        samples += member.recipe.count
    return Index(
        fingerprint=recipe.fingerprint,
        name="+".join(member.name for member in members),
        generation=sum(member.index.generation for member in members),
        sequence=0,
        count=samples,
        stored=sum(member.index.stored for member in members),
        complete=all(member.complete for member in members),
        shards=tuple(shards),
        quarantined=quarantined,
        statistics={},
        error={},
    )


def served_schema(cache: Cache) -> Schema:
    """Return the fields of the records, and of the columns joined to them."""
    return dict(cache.schema) if cache.joined is None else {**cache.schema, **cache.joined.schema}


def served_indices(cache: Cache) -> NDArray[np.int64]:
    """Return the sample indices that are served, sorted: `indices` without those that a table leaves out."""
    served = None if cache.joined is None else cache.joined.indices
    return cache.indices if served is None else served
