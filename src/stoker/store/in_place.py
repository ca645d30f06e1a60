"""Shards whose columns lie in the user's own files.

Such a shard is a file like any other, with numbers, sums and digests, but for holes where those columns would
be. `places-*.json` beside it says which bytes of which file belong there, and reading goes there. So all that
reads shards reads them, every byte is checked as ever, and what has changed in the user's file is found.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError, SourceError, StalledError
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import Field, Schema, canonical_json, digest_json, numpy_dtype, schema_to_json
from stoker.sources.placed import PlacedPart, Placing
from stoker.sources.protocol import Source
from stoker.store import format
from stoker.store.cache import Cache
from stoker.store.folder import Folder, open_folder
from stoker.store.format import read_header
from stoker.store.recipe import Digests, Recipe, make_recipe
from stoker.store.storage import LocalFile, LocalStorage, OpenFile
from stoker.store.strict_json import read_strict
from stoker.store.values import StoredRows, from_array, store_rows
from stoker.store.write import OpenShard, ShardSpec
from stoker.units import MIB

MAX_PLACES_BYTES = 256 * MIB
CURE = "Run stoker.index_in_place again over the files as they are now: it keeps what did not change"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """One of the user's files, as it was when it was indexed."""

    path: Path
    bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnPlaces:
    """Where one column lies: runs of bytes that follow one another in the column."""

    field: str
    file: int
    """Index of the file."""
    runs: NDArray[np.int64]
    """`(k, 2)`: offset in the file, bytes."""


def runs_of(at: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets and sizes of records, joined where they follow one another: `(k, 2)`.

    >>> runs_of(np.array([100, 110, 130]), np.array([10, 10, 5])).tolist()
    [[100, 20], [130, 5]]
    """
    some = sizes > 0
    at, sizes = at[some], sizes[some]
    if not len(at):
        return np.empty((0, 2), np.int64)
    starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1] + sizes[:-1]]))
    return np.stack([at[starts], np.add.reduceat(sizes, starts)], axis=1)


def dump_places(files: Sequence[UserFile], columns: Sequence[ColumnPlaces]) -> bytes:
    """The bytes of a `places-*.json`."""
    entries: dict[str, Any] = {
        "format": 1,
        "files": [{"path": str(f.path), "bytes": f.bytes, "mtime_ns": f.mtime_ns} for f in files],
        "columns": [
            {
                "field": column.field,
                "file": column.file,
                "runs": base64.b64encode(np.ascontiguousarray(column.runs, "<i8").tobytes()).decode(),
            }
            for column in columns
        ],
    }
    return canonical_json({**entries, "digest": digest_json(entries)}).encode()


def load_places(storage: LocalStorage, name: str) -> tuple[list[UserFile], list[ColumnPlaces]]:
    """Read what `dump_places` made.

    Raises:
        CorruptError: It is damaged.
    """
    where = str(storage.path / name)
    entries = read_strict(storage.read(name, limit_bytes=MAX_PLACES_BYTES), where=where)
    try:
        if entries.pop("digest") != digest_json(entries) or entries["format"] != 1:
            raise CorruptError(f"{where} does not match its digest", advice=CURE)
        files = [
            UserFile(path=Path(f["path"]), bytes=int(f["bytes"]), mtime_ns=int(f["mtime_ns"]))
            for f in entries["files"]
        ]
        columns = [
            ColumnPlaces(
                field=str(c["field"]),
                file=int(c["file"]),
                runs=np.frombuffer(base64.b64decode(c["runs"], validate=True), "<i8").reshape(-1, 2),
            )
            for c in entries["columns"]
        ]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise CorruptError(f"{where} is malformed: {error!r}", advice=CURE) from error
    return files, columns


def placed_file(storage: LocalStorage, own: OpenFile, name: str) -> PlacedFile:
    """A shard together with the files that its columns lie in.

    Raises:
        CorruptError: A file is gone or was changed, or the places do not fit the shard.
    """
    users, columns = load_places(storage, name)
    where = str(storage.path / name)
    header = read_header(own, where=where)
    files = [_open_user(user, storage.path) for user in users]
    pieces: list[tuple[int, int, OpenFile, int]] = []
    for column in columns:
        entry = header.tensors.get(column.field)
        if entry is None or int(column.runs[:, 1].sum()) != entry.end - entry.begin:
            raise CorruptError(f"{where} does not fit its shard: field {column.field!r}", advice=CURE)
        at = header.data_start + entry.begin
        for offset, size in column.runs.tolist():
            if offset < 0 or size < 1 or offset + size > files[column.file].size:
                raise CorruptError(f"{where} names bytes beyond its file", advice=CURE)
            pieces.append((at, at + size, files[column.file], offset))
            at += size
    return PlacedFile(own, sorted(pieces, key=lambda piece: piece[0]))


def _open_user(user: UserFile, folder: Path) -> LocalFile:
    try:
        file = LocalFile(user.path)
        found = user.path.stat()
    except FileNotFoundError as error:
        raise CorruptError(
            f"{user.path}, which {folder} serves in place, is not there any more", advice=CURE, folder=folder
        ) from error
    if (found.st_size, found.st_mtime_ns) != (user.bytes, user.mtime_ns):
        raise CorruptError(
            f"{user.path}, which {folder} serves in place, was changed since it was indexed: it has "
            f"{found.st_size:,} bytes, expected {user.bytes:,} of an earlier time",
            advice=CURE,
            folder=folder,
        )
    return file


class PlacedFile:
    """An `OpenFile` that is put together from several."""

    origin: str | None = None
    generation: tuple[int, int] | None = None

    def __init__(self, own: OpenFile, pieces: list[tuple[int, int, OpenFile, int]]) -> None:
        self._own = own
        self._pieces = pieces
        self._begins = [piece[0] for piece in pieces]

    @property
    def size(self) -> int:
        """Bytes, holes included."""
        return self._own.size

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`, from wherever the bytes lie."""
        at = 0
        while at < len(out):
            file, place, room = self._place(offset + at)
            size = min(room, len(out) - at)
            file.read_into(place, out[at : at + size])
            at += size

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` from the page cache, where one file has all of it."""
        file, place, room = self._place(offset)
        return room >= sum(map(len, outs)) and bool(cast("Any", file).read_cached(place, outs))

    def ahead(self, offset: int, size: int) -> None:
        """Have the file that has the first of these bytes read ahead."""
        file, place, room = self._place(offset)
        file.ahead(place, min(room, size))

    def mend(self, offset: int, size: int) -> bool:
        """Nothing can be had anew."""
        return False

    def fileno(self) -> int:
        """None: the bytes are in several files, and lie on no pages."""
        return -1

    def close(self) -> None:
        """Release all files."""
        for file in {id(piece[2]): piece[2] for piece in self._pieces}.values():
            file.close()
        self._own.close()

    def _place(self, offset: int) -> tuple[OpenFile, int, int]:
        """Which file has a byte, where, and how many follow it there."""
        i = bisect_right(self._begins, offset) - 1
        if i >= 0 and offset < self._pieces[i][1]:
            begin, end, file, at = self._pieces[i]
            return file, at + offset - begin, end - offset
        rest = self._begins[i + 1] if i + 1 < len(self._begins) else 1 << 62
        return self._own, offset, rest - offset


# ----------------------------------------------------------------------------------------------------------
# Make a cache over the user's own files: their bytes are read once for sums, and not copied.


log = logging.getLogger("stoker")
BATCH_BYTES = 16 * MIB
READ_DEADLINE_S = 120.0
"""Seconds that one batch may take to be read from the user's files."""


def index_in_place(source: Source, cache_dir: str | Path, *, name: str) -> Cache:
    """A cache that serves the samples of `source` from the files they lie in.

    Reads every byte once, for the sums that reading is checked with from then on; what is written is about a
    2000th of that. Run again over the same files, it reads nothing; over files that were moved, it notes
    where they are now.

    Args:
        source: An `HDF5Source` or `ArraySource` over contiguous, uncompressed HDF5 or `.npy` files, or a
            `SplitOf` one.
        cache_dir, name: The index is made in `<cache_dir>/<name>/<fingerprint>`.

    Raises:
        SourceError: The files cannot be served from where they lie; says why, and what to do instead.
        ConfigError: The source has no files of its own.
        StalledError: A file could not be read in time, or another process indexes it.
    """
    if not isinstance(source, Placing):
        raise ConfigError(
            f"{source!r} does not say where its samples lie. Expected an HDF5Source or ArraySource over "
            "contiguous HDF5 or .npy files; for others use stoker.precompute"
        )
    cache_dir = Path(cache_dir)
    places = source.places()
    recipe = _recipe(source, places, Digests(cache_dir))
    folder = open_folder(cache_dir, name, recipe)
    with folder.claim("encode") as got:
        if not got:
            raise StalledError(
                f"{folder.path} is being indexed by another process. Run again when it is done"
            )
        _note_places(folder.path, places)
        if (cache := folder.complete()) is not None:
            return cache
        missing = folder.missing()
        for i, part in enumerate(places):
            first = recipe.parts[i].offset
            own = missing[(missing >= first) & (missing < first + part.count)] - first
            _index_part(folder, i, part, own)
        _check_values(source, cache := folder.finish())
        return cache


def _recipe(source: Source, places: Sequence[PlacedPart], digests: Digests) -> Recipe:
    """The recipe of the samples as they are in the files."""
    made = make_recipe(source, None, digests=digests)
    schema: Schema = {}
    for name, field in sorted(made.schema.items()):
        found = [part.fields[name].field for part in places if name in part.fields]
        if found and any(other.dtype != found[0].dtype for other in found):
            kinds = ", ".join(sorted({one.dtype for one in found}))
            raise SourceError(f"{source!r}: field {name!r} is {kinds}, not one dtype. Use stoker.precompute")
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


def _note_places(folder: Path, places: Sequence[PlacedPart]) -> None:
    """Have shards made before look for the files, which are those of the fingerprint, where they are now."""
    storage = LocalStorage(folder)
    now = [_user(one.path).path for part in places for one in part.fields.values()]
    for name in storage.list():
        if name.startswith("places-"):
            with suppress(FormatError):
                users, columns = load_places(storage, name)
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


def _index_part(folder: Folder, index: int, part: PlacedPart, rows: NDArray[np.int64]) -> None:
    """Make shards over some samples of a part."""
    recipe, storage = folder.recipe, LocalStorage(folder.path)
    users = {one.path: _user(one.path) for one in part.fields.values()}
    files = {path: LocalFile(user.path) for path, user in users.items()}
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
            # Where columns lie is known before the shard has its name: nobody ever reads its holes.
            places = spec.name.replace("shard-", "places-").replace(".safetensors", ".json")
            storage.put(places, dump_places([*users.values()], columns))
            shard = OpenShard(storage, spec, capacity=len(own), absent=frozenset(part.fields))
            try:
                _fill(shard, recipe.schema, part, own, files)
                _check_unchanged(users)
                shard.seal()
            finally:
                shard.discard()
    finally:
        for file in files.values():
            file.close()


def _sizes(part: PlacedPart, name: str) -> NDArray[np.int64]:
    """Bytes of each sample's field."""
    one = part.fields[name]
    if one.lengths is not None:
        return one.lengths * one.field.row_bytes
    return np.full(part.count, one.field.size_bytes(), np.int64)


def _runs(part: PlacedPart, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return runs_of(part.fields[name].at[rows], _sizes(part, name)[rows])


def _record_bytes(part: PlacedPart) -> NDArray[np.int64]:
    total = np.ones(part.count, np.int64)
    for name in part.fields:
        total += _sizes(part, name)
    return total


def _cut(sizes: NDArray[np.int64], most_bytes: int, most_rows: int) -> Iterator[slice]:
    """Runs of samples of at most so many bytes (or one sample) and rows."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, begin + 1), begin + most_rows, len(sizes))
        yield slice(begin, end)
        begin = end


def _shards(schema: Schema, part: PlacedPart, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for own in _cut(_record_bytes(part)[rows], format.SHARD_BYTES, format.MAX_ROWS):
        yield rows[own]


def _fill(
    shard: OpenShard,
    schema: Schema,
    part: PlacedPart,
    rows: NDArray[np.int64],
    files: Mapping[Path, LocalFile],
) -> None:
    """Add the sums of samples to a shard, a batch at a time, each in its time."""
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


def _read(
    name: str, field: Field, part: PlacedPart, rows: NDArray[np.int64], files: Mapping[Path, LocalFile]
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
            raise SourceError(f"{path} changed while it was indexed. Run again once it is written")


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
                f"{source!r}: field {name!r} of sample {number} is not what lies where its file says. "
                "It cannot be served in place; use stoker.precompute"
            )
