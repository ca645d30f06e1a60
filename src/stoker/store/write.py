"""Write records of a folder into shards: convert, checksum, write as it comes, commit by size or age."""

from __future__ import annotations

import dataclasses
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, FormatError, RecordError, arg
from stoker.runtime.jsonio import canonical_json, read_strict
from stoker.schema import SCALE_SUFFIX, Field, Schema, columns_of, numpy_dtype, schema_text
from stoker.store import format
from stoker.store.compressed import Compression, PlainShard, check_compression, compress_shard
from stoker.store.format import CONTENTS, TENSOR_DTYPES, PendingWrite, TensorEntry, pack_header
from stoker.store.values import (
    Accumulator,
    FieldScratch,
    StoredRows,
    block_sums,
    from_array,
    record_seeds,
    schema_seed,
    store_columns,
    torch_dtype,
    unpack_rows,
    widest_partial,
)
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.store.cache import Cache
    from stoker.store.recipe import Recipe
    from stoker.store.shard import Shard
    from stoker.store.storage import Storage

# ----------------------------------------------------------------------------------------------------------
# Write one shard as its records come, and commit it.
#
# With fixed fields only, each column is written at the place it has in a full shard, and nothing is kept
# but checksums; a shard that is committed early moves its smaller columns down. Columns of a shard with a
# ragged field stay in memory until it is committed.


MOVE_BYTES = 4 * MIB
LONGEST = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Description of a shard, whatever its records."""

    schema: Schema
    part: str
    """Key of the recipe's part that its records belong to."""
    writer: str
    """Who wrote it: a token that no two writers share."""
    seq: int
    """Place among the writer's shards."""
    environment: Mapping[str, str]
    """Versions and hardware, for comparing last bits."""

    @property
    def name(self) -> str:
        """File name."""
        return f"shard-{self.writer}-{self.seq:06d}.safetensors"


@dataclasses.dataclass(slots=True, kw_only=True)
class _Column:
    """One column of the open shard."""

    field: Field
    statistics: Accumulator | None
    """Of the values; scales have none of their own."""
    offset: int
    """Where it is being written, from the start of the data."""
    size: int = 0
    digest: Any = dataclasses.field(default_factory=xxhash.xxh3_128)
    sums: list[int] = dataclasses.field(default_factory=list[int])
    lengths: list[int] = dataclasses.field(default_factory=list[int])
    kept: list[bytes] = dataclasses.field(default_factory=list[bytes])
    max_error: float = 0.0
    rms_error: float = 0.0


class OpenShard:
    """A shard being filled. After an error in `add` only `discard` makes sense."""

    def __init__(
        self,
        storage: Storage,
        spec: ShardSpec,
        *,
        capacity: int,
        absent: frozenset[str] = frozenset(),
        compression: Compression = "none",
    ) -> None:
        """`absent` names columns whose bytes are in other files: they get sums, and a hole here."""
        self._storage = storage
        self._compression: Compression = compression
        self.spec = spec
        self.rows = 0
        self.size = 0
        columns = columns_of(spec.schema)
        self._streamed, self._absent = format.is_fixed(columns), absent
        self._order = format.column_order(columns)
        # Columns of fixed size are written where they are in a full shard. `commit` moves them together if
        # fewer records came. If any is ragged, the sizes are known only at the end, so all wait in memory.
        full = {n: 0 if f.ragged else f.size_bytes() * capacity for n, f in columns.items()}
        offsets, _ = format.place_columns(self._order, full)
        self._columns = {
            n: _Column(field=f, statistics=Accumulator(f) if n in spec.schema else None, offset=offsets[n])
            for n, f in columns.items()
        }
        self._numbers: list[NDArray[np.int64]] = []
        self._marked: list[int] = []
        self._contents: list[NDArray[np.uint64]] = []
        self._seed = schema_seed(spec.schema)
        # The header comes first in the file and is known last. So it gets the room of the longest one
        # possible.
        self._data_start = len(pack_header(self._widest_tensors(), self._metadata(widest=True), None))
        self._pending: PendingWrite = storage.create(spec.name)

    def add(
        self,
        numbers: NDArray[np.int64],
        records: Mapping[str, StoredRows],
        begin: int,
        end: int,
        *,
        contents: NDArray[np.uint64] | None = None,
    ) -> None:
        """Append records.

        Args:
            numbers: Part-local numbers of all records in `records`.
            records: Every column.
            begin, end: Which of them to append.
            contents: Digests of the raw samples of all records in `records`, `(n, 2)`; zeros: unknown.
        """
        numbers = numbers[begin:end]
        seeds: list[int] = record_seeds(self._seed, numbers).tolist()
        for name, column in self._columns.items():
            rows = records[name]
            data = rows.bytes_of(begin, end)
            item = column.field.itemsize
            sizes = [
                (b - a) * item
                for a, b in zip(rows.starts[begin:end], rows.starts[begin + 1 : end + 1], strict=True)
            ]
            column.sums += block_sums(column.field, data, sizes, seeds)
            column.digest.update(data)
            if column.statistics is not None:
                values = rows.tensor_of(begin, end)
                if column.field.quantized:
                    scales = records[name + SCALE_SUFFIX].tensor_of(begin, end)
                    values = unpack_rows(column.field, values, scales)
                column.statistics.update(values)
            column.max_error = max(column.max_error, float(rows.max_error[begin:end].max(initial=0.0)))
            column.rms_error = max(column.rms_error, float(rows.rms_error[begin:end].max(initial=0.0)))
            if column.field.ragged:
                column.lengths += rows.lengths[begin:end]
            if name in self._absent:
                pass
            elif self._streamed:
                self._pending.write_at(self._data_start + column.offset + column.size, data)
            else:
                column.kept.append(bytes(data))
            column.size += len(data)
            self.size += len(data)
        self._numbers.append(numbers)
        unknown = np.zeros((end - begin, 2), np.uint64)
        self._contents.append(unknown if contents is None else contents[begin:end])
        self.rows += end - begin

    def mark(self, numbers: Sequence[int]) -> None:
        """Note part-local numbers that were encoded in a smaller group than the recipe's."""
        self._marked += numbers

    def commit(self) -> None:
        """Complete the file and give it its name."""
        try:
            offsets, end = format.place_columns(self._order, {n: c.size for n, c in self._columns.items()})
            tensors = self._place(offsets, end)
            tail = self._tail()
            meta = xxhash.xxh3_128()
            for name, dtype, array in tail:
                tensors[name] = TensorEntry(TENSOR_DTYPES[dtype], array.shape, end, end + array.nbytes)
                data = array.tobytes()
                self._pending.write_at(self._data_start + end, data)
                meta.update(data)
                end += array.nbytes
            self._pending.truncate(self._data_start + end)
            metadata = {**self._metadata(widest=False), "meta": meta.hexdigest()}
            self._pending.write_at(0, pack_header(tensors, metadata, self._data_start))
            if not self._compressed(tensors, self._data_start + end):
                self._pending.commit()
        finally:
            self._pending.discard()

    def _compressed(self, tensors: Mapping[str, TensorEntry], size: int) -> bool:
        """Write the shard compressed, if that is asked for and pays; the ordinary one is given up then."""
        if self._compression == "none":
            return False
        plain = PlainShard(
            read=self._pending.read_at, size=size, tensors=tensors, data_start=self._data_start
        )
        create = partial(self._storage.create, self.spec.name)
        return compress_shard(plain, self._compression, create)

    def discard(self) -> None:
        """Forget the records and remove the file."""
        self._pending.discard()

    def _place(self, offsets: Mapping[str, int], end: int) -> dict[str, TensorEntry]:
        """Bring columns to their final places, with zeros between them."""
        tensors: dict[str, TensorEntry] = {}
        for i, name in enumerate(self._order):
            column, at = self._columns[name], offsets[name]
            if self._streamed and column.offset != at and name not in self._absent:
                self._move(column, at)
            for data in column.kept:
                self._pending.write_at(self._data_start + at, data)
                at += len(data)
            f = column.field
            shape = (sum(column.lengths), *f.shape[1:]) if f.ragged else (self.rows, *f.shape)
            close = offsets[name] + column.size
            tensors[name] = TensorEntry(TENSOR_DTYPES[f.dtype], shape, offsets[name], close)
            pad = (offsets[self._order[i + 1]] if i + 1 < len(self._order) else end) - close
            if pad:
                self._pending.write_at(self._data_start + close, bytes(pad))
                tensors[f"__pad__{i}"] = TensorEntry("U8", (pad,), close, close + pad)
        return tensors

    def _move(self, column: _Column, offset: int) -> None:
        """Move a column towards the start; pieces go in order, so they may overlap."""
        for begin in range(0, column.size, MOVE_BYTES):
            size = min(MOVE_BYTES, column.size - begin)
            data = self._pending.read_at(self._data_start + column.offset + begin, size)
            self._pending.write_at(self._data_start + offset + begin, data)
        column.offset = offset

    def _tail(self) -> list[tuple[str, str, NDArray[Any]]]:
        """Return the numbers, offsets and sums: name, dtype, little-endian array."""
        tail: list[tuple[str, str, NDArray[Any]]] = [
            ("__number__", "int64", np.concatenate(self._numbers).astype("<i8"))
        ]
        if self._marked:
            tail.append(("__marked__", "int64", np.unique(np.array(self._marked, "<i8"))))
        contents = np.concatenate(self._contents)
        if contents.any():
            tail.append((CONTENTS, "uint64", contents.astype("<u8")))
        for name, column in self._columns.items():
            if column.field.ragged:
                tail.append((f"{name}.offsets", "int64", np.cumsum([0, *column.lengths]).astype("<i8")))
        for name, column in self._columns.items():
            sums = np.array(column.sums, "<u8")
            tail.append(
                (f"{name}.sums", "uint64", sums if column.field.ragged else sums.reshape(self.rows, -1))
            )
        return tail

    def _metadata(self, *, widest: bool) -> dict[str, str]:
        """Metadata of the header; `widest` makes it as long as it can become, to reserve room."""
        spec, columns = self.spec, self._columns
        fields = {n: (c, c.statistics) for n, c in columns.items() if c.statistics is not None}
        error = -2.2250738585072014e-308
        return {
            "format": str(format.format_of(spec.schema)),
            "part": spec.part,
            "schema": schema_text(spec.schema),
            "writer": spec.writer,
            "seq": str(spec.seq),
            "rows": str(LONGEST if widest else self.rows),
            "environment": canonical_json(dict(spec.environment)),
            "columns": canonical_json(
                {n: "0" * 32 if widest else c.digest.hexdigest() for n, c in columns.items()}
            ),
            "meta": "0" * 32,
            "statistics": canonical_json(
                {n: widest_partial(c.field) if widest else s.partial() for n, (c, s) in fields.items()}
            ),
            "error": canonical_json(
                {
                    n: {"max": error if widest else c.max_error, "rms": error if widest else c.rms_error}
                    for n, (c, _) in fields.items()
                }
            ),
        }

    def _widest_tensors(self) -> dict[str, TensorEntry]:
        names = ["__number__", "__marked__", CONTENTS]
        for i, name in enumerate(self._columns):
            names += [name, f"__pad__{i}", f"{name}.offsets", f"{name}.sums"]
        shapes = {n: (LONGEST, *c.field.shape) for n, c in self._columns.items()}
        return {n: TensorEntry("BOOL", shapes.get(n, (LONGEST, LONGEST)), LONGEST, LONGEST) for n in names}


# ----------------------------------------------------------------------------------------------------------
# Copy records from the shards of one cache into another shard, with everything that is known of them.


def copy_rows(out: OpenShard, cache: Cache, table: NDArray[np.int64]) -> None:
    """Append records of `cache` to `out`; each is checked against its sums as it is read.

    Bits, conversion errors, marks and the digests of their samples stay.

    Args:
        out: The shard that is being filled, of the same schema.
        cache: Where the records are.
        table: `(n, 3)`: the part-local number to store a record under, its shard in `cache`, and its row.

    Raises:
        CorruptError: A record is damaged; nothing was appended.
    """
    numbers, places = table[:, 0].copy(), table[:, 1:].tolist()
    origins = {i: _Origin(cache.shard(i)) for i in dict.fromkeys(table[:, 1].tolist())}
    records = {name: _read(cache, name, origins, places) for name in cache.recipe.columns}
    contents = np.array([origins[i].contents_of(row) for i, row in places], np.uint64).reshape(-1, 2)
    out.add(numbers, records, 0, len(table), contents=contents)
    pairs = zip(numbers.tolist(), places, strict=True)
    out.mark([number for number, (i, row) in pairs if origins[i].is_marked(row)])


class _Origin:
    """Errors, digests and marks of the records of a shard. It does not hold the shard open."""

    def __init__(self, shard: Shard) -> None:
        self.error = shard.described("error")
        self._numbers, self._contents = shard.numbers(), shard.contents
        self._marked = frozenset(shard.marked.tolist())

    def contents_of(self, row: int) -> tuple[int, int]:
        """Return the digest of a record's raw sample; zeros: unknown."""
        return (*self._contents[row].tolist(),) if len(self._contents) else (0, 0)

    def is_marked(self, row: int) -> bool:
        """Return True if a record was encoded in a smaller group than the recipe's."""
        return bool(self._marked) and int(self._numbers[row]) in self._marked


def _read(cache: Cache, name: str, origins: dict[int, _Origin], places: list[list[int]]) -> StoredRows:
    f = cache.recipe.columns[name]
    lengths = [cache.shard(i).length(name, row) for i, row in places]
    ends = np.cumsum([0, *(length * f.row_bytes for length in lengths)]).tolist()
    data: Any = np.empty(ends[-1], np.uint8)
    view = memoryview(data)
    for (i, row), length, begin, end in zip(places, lengths, ends, ends[1:], strict=False):
        cache.shard(i).read_into(name, row, 0, length, view[begin:end])
    none = {"max": 0.0, "rms": 0.0}  # what is said of a quantized field, not of its scales
    errors = [origins[i].error.get(name, none) for i, _ in places]
    return StoredRows(
        values=from_array(data.view(numpy_dtype(f.dtype)), f.dtype),
        starts=[end // f.itemsize for end in ends],
        lengths=lengths,
        # What the shard says of its worst record stands for each of them.
        max_error=np.array([error["max"] for error in errors]),
        rms_error=np.array([error["rms"] for error in errors]),
    )


EARLY_S, EARLY_SHARE = 0.2, 0.05
"""An early commit comes after 0.2 s, or a 20th of the time so far: about 200 shards in the first hour."""
OPEN_PARTS = 4
"""Parts with an open shard at a time: workers' work interleaves where one part ends and the next begins."""
OPEN_PARTS_BY_LENGTH = 16
"""The same where samples of one length are encoded together, which come from several parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """Limits by which a writer cuts shards, and checks that it makes.

    Raises:
        ConfigError: A time or an error bound is out of range. `layout.capacity` checks `shard_bytes`.
    """

    shard_bytes: int = format.SHARD_BYTES
    """Bytes of records in a full shard."""
    commit_after_s: float = 30.0
    """Seconds after its first record at which a shard is committed even if it is not full."""
    early: bool = False
    """A loader serves what is committed: commit after `EARLY_S` at first, then ever more rarely."""
    max_error: float | None = None
    """Largest conversion error of a record and field, as a fraction of its largest value; None: any."""
    device: str = "cpu"
    """Where records are encoded; noted in the shards."""
    float32: str = "unknown"
    """How products of float32 are computed while encoding; noted in the shards."""
    compression: Compression = "none"
    """Compression of shards; the records are the same."""

    def __post_init__(self) -> None:
        check_compression(self.compression)
        if self.commit_after_s <= 0:
            raise ConfigError(f"commit_after_s is {self.commit_after_s}, expected more than 0")
        if self.max_error is not None and self.max_error < 0:
            raise ConfigError(f"max_error is {self.max_error}, expected 0 at least, or None for any")


_Key: TypeAlias = tuple[int, str]
"""Part, and the environment that made the records as JSON; empty: this process."""


class RecordWriter:
    """Appends records to shards of its own. One thread only; any number of writers may fill one folder.

    `rows` and `bytes` count what was appended so far; what is in an open shard is lost by a kill.
    """

    def __init__(self, storage: Storage, recipe: Recipe, settings: WriterSettings) -> None:
        self.rows = 0
        self.bytes = 0
        self._storage, self._recipe, self._settings = storage, recipe, settings
        self._token = secrets.token_hex(6)
        self._seq = 0
        self._open: dict[_Key, OpenShard] = {}
        self._since: dict[_Key, float] = {}
        self._latest: _Key | None = None
        self._begun = time.monotonic()
        self._scratch = {name: FieldScratch() for name in recipe.schema}
        self._capacity = format.capacity(recipe.columns, settings.shard_bytes)

    def append(
        self,
        numbers: range | Sequence[int],
        records: Mapping[str, Tensor | list[Tensor]],
        *,
        marked: Sequence[int] = (),
        contents: NDArray[np.uint64] | None = None,
    ) -> None:
        """Store records.

        Args:
            numbers: Global sample numbers of one part, one per record.
            records: Fixed fields `(n, *shape)`, ragged ones a list of `n` tensors; on the CPU, in the encoded
                dtype (or already the stored one). Not kept after the call.
            marked: Those of `numbers` that were encoded in a smaller group than the recipe's.
            contents: Digests of their raw samples, `(n, 2)`, by which a grown source finds the records again.
        Raises:
            RecordError: A record does not fit the schema, overflows its dtype, or loses more than
                `max_error`; nothing of the call was stored.
            ResourceError: No space left; the open shards are gone, committed ones are kept.
        """
        numbers = [int(number) for number in numbers]
        if not numbers:
            return
        part, local = self._local(numbers)
        stored = self._convert(numbers, records)
        marks = {self._recipe.part_of(number)[1] for number in marked}
        begin = 0
        while begin < len(numbers):
            shard = self._shard((part, ""))
            end = begin + self._room(shard, stored, begin)
            try:
                shard.add(local, stored, begin, end, contents=contents)
            except BaseException:
                self.abort()
                raise
            shard.mark([number for number in local[begin:end].tolist() if number in marks])
            if self._capacity.is_full(shard.rows, shard.size):
                self._commit((part, ""))
            begin = end
        self.rows += len(numbers)
        self.bytes += sum(rows.values.nbytes for rows in stored.values())
        self.tick()

    def copy(
        self,
        numbers: Sequence[int],
        origin: Cache,
        places: NDArray[np.int64],
        *,
        marked: Sequence[int] = (),
    ) -> list[int]:
        """Store records of another cache as they are, bit for bit.

        Args:
            numbers: Global sample numbers of one part to store them under.
            origin: The other cache. Its recipe differs from ours in the source alone.
            places: Shard and row in `origin` of each, `(n, 2)`.
            marked: Those of `numbers` that have another place in their group here than there.

        Returns:
            Those of `numbers` whose record proved damaged: they were not stored.
        """
        part, local = self._local([int(number) for number in numbers])
        marks = {self._recipe.part_of(number)[1] for number in marked}
        table = np.column_stack([local, places])
        made_in = {int(i): _environment_of(origin, int(i)) for i in np.unique(places[:, 0])}
        damaged: list[int] = []
        for environment in dict.fromkeys(made_in.values()):
            own = table[[made_in[int(i)] == environment for i in places[:, 0]]]
            while len(own):
                shard = self._shard((part, environment))
                room = self._capacity.rows - shard.rows if self._capacity.fixed else 1
                for rows in self._copied(shard, origin, own[:room], damaged):
                    shard.mark([number for number in rows[:, 0].tolist() if number in marks])
                    self.rows += len(rows)
                own = own[room:]
                if not shard.rows:
                    self._drop((part, environment))
                elif self._capacity.is_full(shard.rows, shard.size):
                    self._commit((part, environment))
        self.tick()
        offset = self._recipe.parts[part].offset
        return [number + offset for number in damaged]

    def _copied(
        self, shard: OpenShard, origin: Cache, table: NDArray[np.int64], damaged: list[int]
    ) -> Iterator[NDArray[np.int64]]:
        """Copy rows at once, or one by one where one of them is damaged; yield those that were copied."""
        try:
            copy_rows(shard, origin, table)
        except FormatError:  # met while reading, before anything was appended
            if len(table) > 1:
                for at in range(len(table)):
                    yield from self._copied(shard, origin, table[at : at + 1], damaged)
            else:
                damaged.append(int(table[0, 0]))
        except BaseException:
            self.abort()
            raise
        else:
            yield table

    def tick(self) -> None:
        """Commit shards that are older than their time; call when idle."""
        now, after_s = time.monotonic(), self._settings.commit_after_s
        if self._settings.early:
            after_s = min(after_s, max(EARLY_S, EARLY_SHARE * (now - self._begun)))
        for key in [key for key, since in self._since.items() if now - since >= after_s]:
            self._commit(key)

    def commit(self) -> None:
        """Commit what is open; returns when it is durable. The writer may be used again."""
        for key in [*self._open]:
            self._commit(key)

    def abort(self) -> None:
        """Drop what is not committed."""
        for shard in self._open.values():
            shard.discard()
        self._open.clear()
        self._since.clear()

    @property
    def shard_fill(self) -> tuple[int, int]:
        """Bytes in the shard last appended to, and bytes at which it is full."""
        shard = None if self._latest is None else self._open.get(self._latest)
        return (0 if shard is None else shard.size), self._capacity.bytes

    def _local(self, numbers: list[int]) -> tuple[int, NDArray[np.int64]]:
        part, _ = self._recipe.part_of(numbers[0])
        entry = self._recipe.parts[part]
        local = np.array(numbers, np.int64) - entry.offset
        if local.min() < 0 or local.max() >= entry.count:
            raise RecordError(
                f"samples {min(numbers)} to {max(numbers)} are not of one part; {entry.name!r} has "
                f"{entry.offset} to {entry.offset + entry.count - 1}",
                hint="Append part by part",
            )
        return part, local

    def _convert(
        self, numbers: list[int], records: Mapping[str, Tensor | list[Tensor]]
    ) -> dict[str, StoredRows]:
        schema, encoded = self._recipe.schema, self._recipe.encoded
        if records.keys() != schema.keys():
            raise RecordError(
                f"samples from {numbers[0]}: records have fields {sorted(records)}, "
                f"the schema has {sorted(schema)}"
            )
        stored: dict[str, StoredRows] = {}
        for name, field in schema.items():
            _check_shape(name, records[name], encoded[name], field, numbers)
            stored |= store_columns(name, field, records[name], numbers, self._scratch[name])
            bound = self._settings.max_error
            worst = int(stored[name].max_error.argmax())
            error = stored[name].max_error[worst]
            if bound is not None and error > bound:
                wider = "float16" if field.quantized else "float32"
                raise RecordError(
                    f"sample {numbers[worst]}: field {name!r} loses {error:.3g} of its largest value as "
                    f"{field.dtype}, {bound:.3g} is allowed",
                    hint=f"Store it wider, as with {arg('dtype', wider)}, or raise {arg('max_error')}",
                )
        return stored

    def _shard(self, key: _Key) -> OpenShard:
        part, made_in = key
        shard = self._open.get(key)
        if shard is None:
            by_length = self._recipe.encode_batch.lengths
            if len(self._open) >= (OPEN_PARTS_BY_LENGTH if by_length else OPEN_PARTS):
                self._commit(min(self._since, key=self._since.__getitem__))
            spec = ShardSpec(
                schema=self._recipe.schema,
                part=self._recipe.parts[part].key,
                writer=self._token,
                seq=self._seq,
                environment=read_strict(made_in.encode(), where="an environment")
                if made_in
                else environment(self._settings),
            )
            shard = OpenShard(
                self._storage,
                spec,
                capacity=self._capacity.rows,
                compression=self._settings.compression,
            )
            self._seq += 1
            self._open[key] = shard
            self._since[key] = time.monotonic()
        self._latest = key
        return shard

    def _room(self, shard: OpenShard, stored: Mapping[str, StoredRows], begin: int) -> int:
        """Return the records from `begin` on that still go into `shard`; one at least."""
        count = len(next(iter(stored.values())).lengths)
        room = min(count - begin, self._capacity.rows - shard.rows)
        if self._capacity.fixed:
            return room
        size, taken = shard.size, 0
        while taken < room and (size < self._capacity.bytes or not taken):
            row = begin + taken
            size += sum((r.starts[row + 1] - r.starts[row]) * r.values.itemsize for r in stored.values())
            taken += 1
        return taken

    def _drop(self, key: _Key) -> None:
        self._since.pop(key)
        self._open.pop(key).discard()

    def _commit(self, key: _Key) -> None:
        self._since.pop(key)
        self._open.pop(key).commit()


def _environment_of(cache: Cache, i: int) -> str:
    """Return what made the records of a shard, as JSON; `{}` where the shard cannot be read."""
    try:
        return canonical_json(dict(cache.shard(i).described("environment")))
    except (FormatError, OSError):
        return "{}"


def _check_shape(
    name: str, values: Tensor | list[Tensor], encoded: Field, field: Field, numbers: Sequence[int]
) -> None:
    count = len(numbers)
    if isinstance(values, list) != field.ragged or (field.ragged and len(values) != count):
        kind = f"a list of {count} tensors" if field.ragged else "one tensor"
        raise RecordError(f"samples from {numbers[0]}: field {name!r} must be {kind}")
    tensors = values if isinstance(values, list) else [values]
    wanted = (-1 if field.ragged else count, *field.shape[field.ragged :])
    dtypes = {torch_dtype(encoded.dtype), torch_dtype((encoded if field.quantized else field).dtype)}
    for number, tensor in zip(
        numbers, tensors, strict=False
    ):  # one tensor holds all numbers of a fixed field
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted) and shape[field.ragged :] == wanted[field.ragged :]
        if not fits or tensor.dtype not in dtypes or tensor.device.type != "cpu":
            raise RecordError(
                f"sample {number}: field {name!r} is {tensor.dtype} {shape} on {tensor.device}, "
                f"expected {encoded.dtype} {wanted} on the CPU"
            )


def environment(settings: WriterSettings) -> dict[str, str]:
    """Return what may change the last bits of a record: versions, hardware, threads, precision."""
    device = settings.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": device
        if not device.startswith("cuda")
        else f"{device} {torch.cuda.get_device_name(device)}",
        "threads": str(torch.get_num_threads()),
        "float32": settings.float32,
    }


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
