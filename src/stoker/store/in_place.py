"""Make a cache over the user's own files: their bytes are read once for sums, and not copied."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, FormatError, ReadOnlyError, SourceError, StalledError
from stoker.runtime.files import RegularFile
from stoker.runtime.locks import lock_folder
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import Field, Schema, numpy_dtype, schema_to_json
from stoker.sources.hdf5_fields import InPlaceSource, PartLocations
from stoker.sources.protocol import Source
from stoker.store import format
from stoker.store.cache import Cache
from stoker.store.folder import Folder, open_folder
from stoker.store.format import places_name
from stoker.store.places import ColumnPlaces, UserFile, dump_places, load_places, runs_of
from stoker.store.recipe import Digests, Recipe, make_recipe
from stoker.store.storage import open_storage
from stoker.store.values import StoredRows, from_array, store_rows
from stoker.store.write import OpenShard, ShardSpec
from stoker.units import MIB

log = logging.getLogger("stoker")
BATCH_BYTES = 16 * MIB
READ_DEADLINE_S = 120.0
"""Seconds that one batch may take to be read from the user's files."""


def index_in_place(
    source: Source, cache_dir: str | Path, *, name: str, identity: Literal["auto", "full"] = "auto"
) -> Cache:
    """Return a cache that serves the samples of `source` from the files they are in.

    Reads every byte once, for the sums that reading is checked with from then on; what is written is about a
    2000th of that. Run again over the same files, it reads nothing; over files that were moved, it notes
    where they are now.

    Args:
        source: An `HDF5Source` or `ArraySource` over contiguous, uncompressed HDF5 or `.npy` files, or a
            `SplitOf` one.
        cache_dir: Local folder of caches.
        name: Name of the cache: the index is made in `<cache_dir>/<name>/<fingerprint>`.
        identity: How files are digested for the fingerprint. `"auto"`: the first 4 GiB in full, of further
            files a sample. `"full"`: all bytes.

    Returns:
        A complete cache, whose records are as the files hold them.

    Raises:
        SourceError: The files cannot be served from where they are; says why, and what to do instead.
        ConfigError: The source has no files of its own.
        StalledError: A file could not be read in time, or another process indexes it and makes no progress.

    Examples:
        >>> import numpy, stoker
        >>> numpy.save("points.npy", numpy.arange(12, dtype="float32").reshape(4, 3))
        >>> cache = stoker.index_in_place(stoker.ArraySource("points.npy"), "caches", name="points")
        >>> cache[1]["data"]
        tensor([3., 4., 5.])
    """
    places = _places_of(source)
    folder = open_folder(Path(cache_dir), name, _recipe(source, places, Digests(Path(cache_dir), identity)))
    folder.note_keys(source)
    while True:
        progress = folder.path.stat().st_mtime_ns
        try:
            with lock_folder(folder.path, "encode", timeout_s=READ_DEADLINE_S) as got:
                if got:
                    return _index(folder, source, places)
        except ReadOnlyError:  # another user's folder
            if (cache := folder.complete()) is not None:
                return cache
            raise
        if folder.path.stat().st_mtime_ns == progress:
            raise StalledError(
                f"{folder.path} is being indexed by another process, which has made no progress for "
                f"{READ_DEADLINE_S:g} s",
                hint="Run again when it is done",
            )


def in_place_recipe(source: Source, digests: Digests) -> Recipe:
    """Return the recipe of what `index_in_place` makes.

    Raises:
        SourceError, ConfigError: As `index_in_place`.
    """
    return _recipe(source, _places_of(source), digests)


def _places_of(source: Source) -> Sequence[PartLocations]:
    if not isinstance(source, InPlaceSource):
        raise ConfigError(
            f"{source!r} does not say where its samples lie",
            hint="Expected an HDF5Source or ArraySource over contiguous HDF5 or .npy files; for others use "
            "stoker.precompute, in settings precompute.in_place=false",
        )
    return source.places()


def _index(folder: Folder, source: Source, places: Sequence[PartLocations]) -> Cache:
    """Make what the folder lacks, under its lock."""
    _note_places(folder.path, places)
    if (cache := folder.complete()) is not None:
        return cache
    missing = folder.missing()
    for i, part in enumerate(places):
        first = folder.recipe.parts[i].offset
        own = missing[(missing >= first) & (missing < first + part.count)] - first
        _index_part(folder, i, part, own)
    _check_values(source, cache := folder.finish())
    return cache


def _recipe(source: Source, places: Sequence[PartLocations], digests: Digests) -> Recipe:
    """Return the recipe of the samples as they are in the files."""
    made = make_recipe(source, None, digests=digests)
    schema: Schema = {}
    for name, field in sorted(made.schema.items()):
        found = [part.fields[name].field for part in places if name in part.fields]
        if found and any(other.dtype != found[0].dtype for other in found):
            kinds = ", ".join(sorted({one.dtype for one in found}))
            raise SourceError(
                f"{source!r}: field {name!r} is {kinds}, not one dtype", hint="Use stoker.precompute"
            )
        schema[name] = replace(field, dtype=found[0].dtype) if found else field
    dtypes = {name: field.dtype for name, field in schema.items()}
    entries: Mapping[str, Any] = {
        **made.entries,
        "schema": schema_to_json(schema),
        "dtype": dtypes,
        "encoded": dtypes,
        "in_place": True,
    }
    return Recipe(entries=entries, files=made.files, refs=made.refs)


def _note_places(folder: Path, places: Sequence[PartLocations]) -> None:
    """Have shards made before look for the files, which are those of the fingerprint, where they are now."""
    storage = open_storage(folder)
    now = [_user(one.path).path for part in places for one in part.fields.values()]
    for name in storage.list():
        if name.startswith("places-"):
            with suppress(FormatError):
                users, columns = load_places(storage.path / name)
                current = [
                    user if user.path in now else replace(user, path=_moved(user.path, now)) for user in users
                ]
                fresh = [_user(user.path) if user.path.exists() else user for user in current]
                if fresh != users:
                    storage.put(name, dump_places(fresh, columns))


def _moved(path: Path, now: Sequence[Path]) -> Path:
    """Return where a file is now: of those with its name the one whose folders agree most, if it is one."""

    def agreement(other: Path) -> int:
        pairs = zip(reversed(path.parts), reversed(other.parts), strict=False)
        return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

    named = sorted({other for other in now if other.name == path.name}, key=agreement, reverse=True)
    if not named or (len(named) > 1 and agreement(named[0]) == agreement(named[1])):
        return path  # gone, or any of several: the file is missing where it was, and reading it says so
    return named[0]


def _user(path: Path) -> UserFile:
    real = path.resolve()
    found = real.stat()
    return UserFile(path=real, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _index_part(folder: Folder, index: int, part: PartLocations, rows: NDArray[np.int64]) -> None:
    """Make shards over some samples of a part."""
    recipe, storage = folder.recipe, open_storage(folder.path)
    users = {one.path: _user(one.path) for one in part.fields.values()}
    files = {path: RegularFile(user.path) for path, user in users.items()}
    token = secrets.token_hex(6)
    try:
        for seq, own in enumerate(_shards(recipe.schema, part, rows)):
            spec = ShardSpec(
                schema=recipe.schema, part=recipe.parts[index].key, writer=token, seq=seq, environment={}
            )
            listed = [*users]
            columns = [
                ColumnPlaces(field=field, file=listed.index(one.path), runs=_runs(part, field, own))
                for field, one in part.fields.items()
            ]
            # Where columns are is known before the shard has its name: its holes are never read.
            storage.put(f"{places_name(spec.name)}", dump_places([*users.values()], columns))
            shard = OpenShard(storage, spec, capacity=len(own), absent=frozenset(part.fields))
            try:
                for _ in _fill(shard, recipe.schema, part, own, files):
                    with suppress(OSError):
                        os.utime(folder.path)  # tells those who wait that there is progress
                _check_unchanged(users)
                shard.commit()
            finally:
                shard.discard()
    finally:
        for file in files.values():
            file.close()


def _sizes(part: PartLocations, name: str) -> NDArray[np.int64]:
    """Return the bytes of each sample's field."""
    one = part.fields[name]
    if one.lengths is not None:
        return one.lengths * one.field.row_bytes
    return np.full(part.count, one.field.size_bytes(), np.int64)


def _runs(part: PartLocations, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return runs_of(part.fields[name].at[rows], _sizes(part, name)[rows])


def _record_bytes(part: PartLocations) -> NDArray[np.int64]:
    total = np.ones(part.count, np.int64)
    for name in part.fields:
        total += _sizes(part, name)
    return total


def _cut(sizes: NDArray[np.int64], most_bytes: int, most_rows: int) -> Iterator[slice]:
    """Yield runs of samples of at most so many bytes (or one sample) and rows."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, begin + 1), begin + most_rows, len(sizes))
        yield slice(begin, end)
        begin = end


def _shards(schema: Schema, part: PartLocations, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for own in _cut(_record_bytes(part)[rows], format.SHARD_BYTES, format.MAX_ROWS):
        yield rows[own]


def _fill(
    shard: OpenShard,
    schema: Schema,
    part: PartLocations,
    rows: NDArray[np.int64],
    files: Mapping[Path, RegularFile],
) -> Iterator[None]:
    """Add the sums of samples to a shard, a batch at a time, each in its time; yields after each."""
    batches = [rows[own] for own in _cut(_record_bytes(part)[rows], BATCH_BYTES, format.MAX_ROWS)]
    for batch in batches:

        def read(batch: NDArray[np.int64] = batch) -> dict[str, StoredRows]:
            return {name: _read(name, field, part, batch, files) for name, field in schema.items()}

        where = ", ".join(str(path) for path in files) or "the index"
        clock = ItemClock()
        clock.begin(int(batch[0]))
        hint = "Is the storage reachable? Run again"
        stored = call_within(READ_DEADLINE_S, read, where, hint=hint, clock=clock)
        shard.add(batch, stored, 0, len(batch))
        yield


def _read(
    name: str, field: Field, part: PartLocations, rows: NDArray[np.int64], files: Mapping[Path, RegularFile]
) -> StoredRows:
    one = part.fields.get(name)
    numbers = rows.tolist()
    if one is None:
        values = np.ascontiguousarray(part.values[name][rows])
        return store_rows(name, field, from_array(values, field.dtype), numbers)
    data: Any = np.empty(int(_sizes(part, name)[rows].sum()), np.uint8)
    view, at = memoryview(data), 0
    try:
        for offset, size in _runs(part, name, rows).tolist():
            files[one.path].read_into(offset, view[at : at + size])
            at += size
    except (OSError, FormatError) as error:
        raise SourceError(
            f"{one.path}: field {name!r} of samples {numbers[0]} to {numbers[-1]}: {error}"
        ) from error
    values = data.view(numpy_dtype(field.dtype))
    if one.lengths is None:
        return store_rows(name, field, from_array(values.reshape(-1, *field.shape), field.dtype), numbers)
    edges = np.cumsum([0, *one.lengths[rows].tolist()]).tolist()
    steps = values.reshape(-1, *field.shape[1:])
    each = [from_array(steps[low:high], field.dtype) for low, high in pairwise(edges)]
    return store_rows(name, field, each, numbers)


def _check_unchanged(users: Mapping[Path, UserFile]) -> None:
    for path, user in users.items():
        if _user(path) != user:
            raise SourceError(f"{path} changed while it was indexed", hint="Run again once it is written")


def _check_values(source: Source, cache: Cache) -> None:
    """Compare one sample as the source reads it with the bytes that are served: places may be misread.

    Raises:
        SourceError: They differ.
    """
    number = len(source) // 2
    wanted, found = source.read(number), cache[number]
    for name, value in wanted.items():
        if not np.array_equal(
            found[name].numpy().astype(value.dtype), value, equal_nan=value.dtype.kind == "f"
        ):
            raise SourceError(
                f"{source!r}: field {name!r} of sample {number} is not what lies where its file says",
                hint="It cannot be served in place; use stoker.precompute",
            )
