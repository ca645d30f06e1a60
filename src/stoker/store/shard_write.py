"""Write one shard as its records come, and seal it.

With fixed fields only, each column is written at the place it has in a full shard, and nothing is kept but
checksums; a shard that is sealed early moves its smaller columns down. Columns of a shard with a ragged field
stay in memory until it is sealed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.schema import (
    SCALE_SUFFIX,
    Field,
    Schema,
    canonical_json,
    columns_of,
    schema_to_json,
)
from stoker.store import layout
from stoker.store.columns import CONTENTS
from stoker.store.compressed import Compression, PlainShard, compress_shard
from stoker.store.convert import StoredRows
from stoker.store.header import TENSOR_DTYPES, TensorEntry, pack_header
from stoker.store.packing import unpack_rows
from stoker.store.protocols import Pending, Storage
from stoker.store.statistics import Accumulator, widest_partial
from stoker.store.sums import block_sums, record_seeds, schema_seed
from stoker.units import MIB

MOVE_BYTES = 4 * MIB
LONGEST = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a shard says about itself, whatever its records."""

    schema: Schema
    part: str
    """Key of the recipe's part that its records belong to."""
    writer: str
    """Who wrote it: a token that no two writers share."""
    seq: int
    """Place among the writer's shards."""
    environment: Mapping[str, str]
    """Versions and hardware, for whoever compares last bits."""

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
        """`absent` names columns whose bytes lie elsewhere: they get sums and room, and are a hole here."""
        self._storage = storage
        self._compression: Compression = compression
        self.spec = spec
        self.rows = 0
        self.size = 0
        columns = columns_of(spec.schema)
        self._streamed, self._absent = layout.is_fixed(columns), absent
        self._order = layout.column_order(columns)
        full = {n: 0 if f.ragged else f.size_bytes() * capacity for n, f in columns.items()}
        offsets, _ = layout.place_columns(self._order, full)
        self._columns = {
            n: _Column(field=f, statistics=Accumulator(f) if n in spec.schema else None, offset=offsets[n])
            for n, f in columns.items()
        }
        self._numbers: list[NDArray[np.int64]] = []
        self._marked: list[int] = []
        self._contents: list[NDArray[np.uint64]] = []
        self._seed = schema_seed(spec.schema)
        self._data_start = len(pack_header(self._widest_tensors(), self._metadata(widest=True), None))
        self._pending: Pending = storage.create(spec.name)

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
                if column.field.packed:
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

    def seal(self) -> None:
        """Complete the file and give it its name."""
        try:
            offsets, end = layout.place_columns(self._order, {n: c.size for n, c in self._columns.items()})
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
        """Move a column towards the start; pieces go in order, so overlapping is no harm."""
        for begin in range(0, column.size, MOVE_BYTES):
            size = min(MOVE_BYTES, column.size - begin)
            data = self._pending.read_at(self._data_start + column.offset + begin, size)
            self._pending.write_at(self._data_start + offset + begin, data)
        column.offset = offset

    def _tail(self) -> list[tuple[str, str, NDArray[Any]]]:
        """Numbers, offsets and sums: name, dtype, little-endian array."""
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
            "format": str(layout.format_of(spec.schema)),
            "part": spec.part,
            "schema": canonical_json(schema_to_json(spec.schema)),
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
