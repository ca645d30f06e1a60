"""Read one shard: every byte that leaves here has passed a checksum since it was read from the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError, RecordError
from stoker.schema import Field, Schema, canonical_json, columns_of, numpy_dtype, schema_to_json
from stoker.store import layout
from stoker.store.header import TENSOR_DTYPES, Header, TensorEntry, read_header
from stoker.store.protocols import ColumnSink, OpenFile
from stoker.store.strict_json import read_strict
from stoker.store.sums import block_sums, record_seeds, schema_seed
from stoker.units import MIB

Verify: TypeAlias = Literal["always", "first", "off"]
"""When bytes are compared with their sums: at each read, at a block's first since opening, or never."""

PIECE_BYTES = MIB
"""Bytes read and hashed at a time: the piece is still in the core's cache when it is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one field of a shard, or the scales of a packed one, lies."""

    field: Field
    offset: int
    """Offset in the file, a multiple of 4096."""
    nbytes: int
    row_bytes: int
    """Bytes of one record; 0 for a ragged field, whose records differ."""


class Shard:
    """An open shard. Reads are positional, so several threads may share it; closed when unreferenced.

    Args:
        file: The open file; the shard takes it over.
        path: Where it lies, for messages.
        schema: The stored schema that the shard must have.
        offset: Global number of its part's first sample, so that messages name global numbers.

    Raises:
        CorruptError, FormatError: Header, numbers, offsets or sums are damaged, foreign or contradictory.
    """

    def __init__(self, file: OpenFile, path: Path, schema: Schema, *, offset: int = 0) -> None:
        self.name = path.name
        self.size = file.size
        self._file, self._path, self._offset = file, path, offset
        name = str(path)
        header = read_header(file, where=name)
        self.header_digest = header.digest
        self.part, self.rows = _check_metadata(header, schema, name)
        seed = schema_seed(schema)
        schema = self._schema = columns_of(schema)
        self._metadata = header.metadata
        self._digests = read_strict(header.metadata["columns"].encode(), where=f"the digests of {name}")
        self.padding = [
            (header.data_start + t.begin, t.end - t.begin) for n, t in header.tensors.items() if _is_pad(n)
        ]
        """Offset and bytes of each run of zeros between columns."""
        self.columns = _columns(header, schema, self.rows, name)
        tail = _read_tail(file, header, name)
        self._numbers = tail["__number__"]
        self.marked = tail.get("__marked__", np.empty(0, np.int64))
        """Part-local numbers encoded in a smaller group than the recipe's."""
        self._offsets = {
            n: _check_offsets(tail[f"{n}.offsets"], self.columns[n], name) for n in _ragged(schema)
        }
        self._sums = {n: tail[f"{n}.sums"].reshape(-1) for n in schema}
        self._blocks = {n: self._block_starts(n) for n in self._offsets}
        self._blocks_each = {
            n: layout.block_count(f, layout.axis_length(f)) for n, f in schema.items() if not f.ragged
        }
        self._per_block = {n: layout.rows_per_block(f) for n, f in schema.items()}
        self._row_bytes = {n: f.row_bytes for n, f in schema.items()}
        self._check_sums()
        self._seen: dict[str, bytearray] = {}
        """By field, for `verify="first"`: 1 for each block that was found right."""
        self._seeds = record_seeds(seed, self._numbers)
        if self._numbers.min(initial=0) < 0:
            raise FormatError(f"{name} holds a negative sample number")

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Partial statistics by field."""
        return self._described("statistics")

    @property
    def error(self) -> Mapping[str, Any]:
        """Largest conversion error by field: `{"max", "rms"}`."""
        return self._described("error")

    @property
    def environment(self) -> Mapping[str, str]:
        """Versions and hardware that made the records."""
        return self._described("environment")

    def numbers(self) -> NDArray[np.int64]:
        """Part-local sample numbers, one per row."""
        return self._numbers

    def offsets(self, field: str) -> NDArray[np.int64]:
        """Steps along axis 0 before each row of a ragged field, and their total: `(rows + 1,)`."""
        return self._offsets[field]

    def length(self, field: str, row: int) -> int:
        """Steps along axis 0 of one record; 1 for a scalar."""
        if field in self._offsets:
            offsets = self._offsets[field]
            return int(offsets[row + 1] - offsets[row])
        return layout.axis_length(self._schema[field])

    def read(
        self,
        field: str,
        row: int,
        start: int | None = None,
        stop: int | None = None,
        *,
        verify: Verify = "always",
    ) -> NDArray[Any]:
        """One record's field, or steps `start:stop` of its axis 0, verified.

        Returns:
            A fresh array; bfloat16 as its bits in uint16, a packed field as its bits in int8 (its scales are
            the field `<field>.scale`).
        Raises:
            CorruptError: A block sum differs; names shard, field and sample.
            RecordError: `start:stop` is not within the record.
        """
        f = self._schema[field]
        length = self.length(field, row)
        begin, end = 0 if start is None else start, length if stop is None else stop
        low, high = self._cover(field, row, begin, end, verify)
        data: Any = np.empty((high - low) * f.row_bytes, np.uint8)
        self._read_blocks(field, row, low, memoryview(data), verify)
        values = data.view(numpy_dtype(f.dtype))
        return (
            values.reshape((high - low, *f.shape[1:]))[begin - low : end - low]
            if f.shape
            else values.reshape(())
        )

    def read_into(
        self,
        field: str,
        row: int,
        start: int,
        stop: int,
        out: memoryview[Any],
        *,
        verify: Verify = "always",
    ) -> None:
        """The same into `out`, format `B`, of exactly the bytes asked for; without a copy where `start:stop`
        falls on block bounds or the record's end.
        """
        f = self._schema[field]
        low, high = self._cover(field, row, start, stop, verify)
        if len(out) != (stop - start) * f.row_bytes:
            raise RecordError(
                f"the buffer has {len(out)} bytes, {field!r} needs {(stop - start) * f.row_bytes}"
            )
        if (low, high) == (start, stop):
            self._read_blocks(field, row, low, out, verify)
            return
        data = memoryview(bytearray((high - low) * f.row_bytes))
        self._read_blocks(field, row, low, data, verify)
        out[:] = data[(start - low) * f.row_bytes : (stop - low) * f.row_bytes]

    def verify_column(self, field: str, sink: ColumnSink | None = None) -> None:
        """Check a whole column against its digest, reading it in pieces of at most `PIECE_BYTES`.

        Args:
            field: Which.
            sink: Takes the bytes, which may be used only if this returns.
        Raises:
            CorruptError: It differs; names the damaged samples.
        """
        column = self.columns[field]
        digest = xxhash.xxh3_128()
        scratch = memoryview(bytearray(min(PIECE_BYTES, column.nbytes))) if sink is None else None
        for begin in range(0, column.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, column.nbytes - begin)
            piece = scratch[:size] if scratch is not None else cast(ColumnSink, sink).room(begin, size)
            self._read(column.offset + begin, piece, field)
            digest.update(piece)
            if sink is not None:
                sink.filled(begin, size)
        if digest.hexdigest() != self._digests.get(field):
            rows = self._bad_rows(field) or range(self.rows)
            bad = [int(self._numbers[row]) + self._offset for row in rows]
            raise self._corrupt(
                f"{self._path}: field {field!r} does not match its digest; damaged samples: "
                f"{', '.join(map(str, bad[:10]))}{f' and {len(bad) - 10} more' if len(bad) > 10 else ''}"
            )

    def damage(self, field: str) -> dict[int, str]:
        """Rows of a column that cannot be served, each with why; all if only the column's digest differs."""
        try:
            self.verify_column(field)
        except CorruptError as error:
            # One bad sector: the rows that do not touch it are sound.
            unread = isinstance(error.__cause__, OSError)
            return self._bad_rows(field) or ({} if unread else dict.fromkeys(range(self.rows), str(error)))
        return {}

    def _bad_rows(self, field: str) -> dict[int, str]:
        bad: dict[int, str] = {}
        for row in range(self.rows):
            try:
                self.read(field, row)
            except CorruptError as error:
                bad[row] = str(error)
        return bad

    def check_padding(self) -> None:
        """Check that the bytes between columns are zero.

        Raises:
            CorruptError: They are not; records are unaffected.
        """
        for offset, size in self.padding:
            pad = bytearray(size)
            self._file.read_into(offset, memoryview(pad))
            if any(pad):
                raise CorruptError(
                    f"{self._path}: padding at byte {offset} is not zero. No record is affected"
                )

    def fileno(self) -> int:
        """The descriptor, for mapping columns; stays open as long as the shard."""
        return self._file.fileno()

    def _described(self, entry: str) -> dict[str, Any]:
        return read_strict(self._metadata[entry].encode(), where=f"{entry} of {self._path}")

    def _cover(self, field: str, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """The whole blocks that hold steps `start:stop`, or just these where their sums are not wanted."""
        length = self.length(field, row)
        if not 0 <= start <= stop <= length:
            raise RecordError(f"steps {start}:{stop} of field {field!r} asked for, the record has {length}")
        if start == stop or verify == "off" or (verify == "first" and self._known(field, row, start, stop)):
            return start, stop
        per_block = self._per_block[field]
        return start // per_block * per_block, min(-(-stop // per_block) * per_block, length)

    def _blocks_of(self, field: str, row: int, start: int, stop: int) -> slice:
        """Where the sums of the blocks that hold steps `start:stop` of a record lie."""
        per_block = self._per_block[field]
        first = int(self._blocks[field][row]) if field in self._blocks else row * self._blocks_each[field]
        return slice(first + start // per_block, first - (-stop // per_block))

    def _known(self, field: str, row: int, start: int, stop: int) -> bool:
        """Whether all of these blocks were found right before, with `verify="first"`."""
        seen = self._seen.get(field)
        return seen is not None and 0 not in seen[self._blocks_of(field, row, start, stop)]

    def _read_blocks(self, field: str, row: int, low: int, out: memoryview[Any], verify: Verify) -> None:
        """Fill `out` from step `low` on, which starts a block where sums are wanted, and check them."""
        if not len(out):
            return
        f, column, row_bytes = self._schema[field], self.columns[field], self._row_bytes[field]
        record = int(self._offsets[field][row]) * row_bytes if f.ragged else row * column.row_bytes
        self._read(column.offset + record + low * row_bytes, out, field, row)
        high = low + len(out) // row_bytes
        if verify == "off" or (verify == "first" and self._known(field, row, low, high)):
            return
        own = self._blocks_of(field, row, low, high)
        if block_sums(f, out, [len(out)], [int(self._seeds[row])]) != self._sums[field][own].tolist():
            raise self._corrupt(f"{self._where(field, row)} does not match its checksum")
        if verify == "first":
            seen = self._seen.setdefault(field, bytearray(len(self._sums[field])))
            seen[own] = bytes([1]) * (own.stop - own.start)

    def _where(self, field: str, row: int | None) -> str:
        of = "" if row is None else f" of sample {int(self._numbers[row]) + self._offset}"
        return f"{self._path}: field {field!r}{of}"

    def _read(self, offset: int, out: memoryview[Any], field: str, row: int | None = None) -> None:
        try:
            self._file.read_into(offset, out)
        except (OSError, CorruptError) as error:  # the latter: it was cut short since it was opened
            raise self._corrupt(f"{self._where(field, row)} cannot be read: {error}") from error

    def _corrupt(self, fact: str) -> CorruptError:
        """The error for damaged records."""
        folder = self._path.parent
        return CorruptError(fact, advice=repair_advice(folder), shard=self.name, folder=folder)

    def _block_starts(self, name: str) -> NDArray[np.int64]:
        """Index of each row's first sum in a ragged field, and the number of all sums."""
        f = self._schema[name]
        counts = -(-np.diff(self._offsets[name]) // layout.rows_per_block(f)) * bool(f.row_bytes)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def _check_sums(self) -> None:
        for name, f in self._schema.items():
            count = int(self._blocks[name][-1]) if f.ragged else self.rows * self._blocks_each[name]
            if count != len(self._sums[name]):
                raise FormatError(
                    f"{self._path}: {len(self._sums[name])} sums for field {name!r}, expected {count}"
                )


def repair_advice(folder: Path) -> str:
    """What to do about damaged records. Precompute reads none, so a repair has to tell it."""
    return (
        f"`stoker verify {folder} --repair` sets aside all that is damaged, and precompute "
        "then encodes it again, and only that"
    )


def _is_pad(name: str) -> bool:
    return name.startswith("__pad__")


def _ragged(schema: Schema) -> list[str]:
    return [name for name, f in schema.items() if f.ragged]


def _check_metadata(header: Header, schema: Schema, name: str) -> tuple[str, int]:
    metadata = header.metadata
    expected = {"part", "schema", "rows", "environment", "columns", "meta", "statistics", "error"}
    if not expected <= metadata.keys() or "__number__" not in header.tensors:
        raise FormatError(f"{name} lacks {sorted(expected - metadata.keys()) or '__number__'} in its header")
    if metadata["schema"] != canonical_json(schema_to_json(schema)):
        raise FormatError(f"{name} has another schema than its cache: it belongs elsewhere. Remove it")
    if metadata["format"] != str(layout.format_of(schema)):
        raise FormatError(f"{name} says format {metadata['format']}, its schema is of another")
    rows = header.tensors["__number__"].shape[0] if header.tensors["__number__"].shape else 0
    if str(rows) != metadata["rows"] or not 1 <= rows <= layout.MAX_ROWS:
        raise FormatError(f"{name} claims {metadata['rows']} rows and holds {rows} numbers")
    return metadata["part"], rows


def _columns(header: Header, schema: Schema, rows: int, name: str) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    known = {"__number__", "__marked__"}
    for field, f in schema.items():
        known |= {field, f"{field}.sums"} | ({f"{field}.offsets"} if f.ragged else set())
        entry = _entry(header, field, f.dtype, name)
        _entry(header, f"{field}.sums", "uint64", name)
        if f.ragged and _entry(header, f"{field}.offsets", "int64", name).shape != (rows + 1,):
            raise FormatError(f"{name}: field {field!r} does not have {rows + 1} offsets for {rows} rows")
        total = entry.shape[0] if entry.shape else 0
        if (
            entry.shape != ((total, *f.shape[1:]) if f.ragged else (rows, *f.shape))
            or entry.begin % layout.PAGE
        ):
            raise FormatError(f"{name}: column {field!r} has shape {entry.shape} or is not on a page")
        columns[field] = Column(
            field=f,
            offset=header.data_start + entry.begin,
            nbytes=entry.end - entry.begin,
            row_bytes=0 if f.ragged else f.size_bytes(),
        )
    if unknown := [n for n in header.tensors if n not in known and not _is_pad(n)]:
        raise FormatError(f"{name} holds tensors that its schema does not name: {', '.join(unknown[:5])}")
    return columns


def _entry(header: Header, tensor: str, dtype: str, name: str) -> TensorEntry:
    entry = header.tensors.get(tensor)
    if entry is None or entry.dtype != TENSOR_DTYPES[dtype]:
        raise FormatError(f"{name}: tensor {tensor!r} of {dtype} is missing")
    return entry


def _read_tail(file: OpenFile, header: Header, name: str) -> dict[str, NDArray[Any]]:
    """Numbers, offsets and sums, which lie together at the end, against the digest in the metadata."""
    begin = header.tensors["__number__"].begin
    data = bytearray(file.size - header.data_start - begin)
    file.read_into(header.data_start + begin, memoryview(data))
    if xxhash.xxh3_128_hexdigest(data) != header.metadata["meta"]:
        raise CorruptError(f"{name}: numbers, offsets or sums do not match their digest")
    tail: dict[str, NDArray[Any]] = {}
    for tensor, entry in header.tensors.items():
        if tensor in ("__number__", "__marked__") or tensor.endswith((".offsets", ".sums")):
            dtype = "uint64" if tensor.endswith(".sums") else "int64"
            if entry.dtype != TENSOR_DTYPES[dtype] or entry.begin < begin:
                raise FormatError(f"{name}: tensor {tensor!r} is not {dtype} at the end of the file")
            tail[tensor] = np.frombuffer(data, dtype, (entry.end - entry.begin) // 8, entry.begin - begin)
    return tail


def _check_offsets(offsets: NDArray[np.int64], column: Column, name: str) -> NDArray[np.int64]:
    total = column.nbytes // column.field.row_bytes if column.field.row_bytes else int(offsets[-1:].sum())
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != total or bool((np.diff(offsets) < 0).any()):
        raise FormatError(f"{name}: offsets of a ragged field do not rise from 0 to {total}")
    return offsets
