"""What a shard's header and its tail say, each compared with the schema that the shard must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError
from stoker.schema import Field, Schema, canonical_json, schema_to_json
from stoker.store import layout
from stoker.store.header import TENSOR_DTYPES, Header, TensorEntry
from stoker.store.protocols import OpenFile

CONTENTS = "__contents__"
"""Tensor of a shard: for each record the digest of the raw sample that it was encoded from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one field of a shard, or the scales of a packed one, lies."""

    field: Field
    offset: int
    """Offset in the file, a multiple of 4096."""
    nbytes: int
    row_bytes: int
    """Bytes of one record; 0 for a ragged field, whose records differ."""


def is_pad(name: str) -> bool:
    """Whether a tensor only fills the room between columns."""
    return name.startswith("__pad__")


def check_metadata(header: Header, schema: Schema, name: str) -> tuple[str, int]:
    """The shard's part and number of rows.

    Raises:
        FormatError: Its metadata is not that of a shard of this schema.
    """
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


def columns_in(header: Header, schema: Schema, rows: int, name: str) -> dict[str, Column]:
    """Where each field lies.

    Raises:
        FormatError: A tensor is missing, unknown, or not where and what the schema says.
    """
    columns: dict[str, Column] = {}
    known = {"__number__", "__marked__", CONTENTS}
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
    if unknown := [n for n in header.tensors if n not in known and not is_pad(n)]:
        raise FormatError(f"{name} holds tensors that its schema does not name: {', '.join(unknown[:5])}")
    return columns


def _entry(header: Header, tensor: str, dtype: str, name: str) -> TensorEntry:
    entry = header.tensors.get(tensor)
    if entry is None or entry.dtype != TENSOR_DTYPES[dtype]:
        raise FormatError(f"{name}: tensor {tensor!r} of {dtype} is missing")
    return entry


def read_tail(file: OpenFile, header: Header, name: str, most: int) -> dict[str, NDArray[Any]]:
    """Numbers, offsets and sums, which are stored together at the end, against the digest in the metadata.

    They are never compressed: more than `most`, the bytes of the file, are refused before they are allocated.
    """
    begin = header.tensors["__number__"].begin
    size = file.size - header.data_start - begin
    if size > most:
        raise CorruptError(f"{name} claims {size:,} bytes of numbers and sums, the file has {most:,}")
    data = bytearray(size)
    file.read_into(header.data_start + begin, memoryview(data))
    if xxhash.xxh3_128_hexdigest(data) != header.metadata["meta"]:
        raise CorruptError(f"{name}: numbers, offsets or sums do not match their digest")
    tail: dict[str, NDArray[Any]] = {}
    for tensor, entry in header.tensors.items():
        if tensor in ("__number__", "__marked__", CONTENTS) or tensor.endswith((".offsets", ".sums")):
            dtype = "uint64" if tensor == CONTENTS or tensor.endswith(".sums") else "int64"
            if entry.dtype != TENSOR_DTYPES[dtype] or entry.begin < begin:
                raise FormatError(f"{name}: tensor {tensor!r} is not {dtype} at the end of the file")
            tail[tensor] = np.frombuffer(data, dtype, (entry.end - entry.begin) // 8, entry.begin - begin)
    return tail


def check_offsets(offsets: NDArray[np.int64], column: Column, name: str) -> NDArray[np.int64]:
    """The offsets of a ragged field, if they rise from 0 to the column's end.

    Raises:
        FormatError: They do not.
    """
    total = column.nbytes // column.field.row_bytes if column.field.row_bytes else int(offsets[-1:].sum())
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != total or bool((np.diff(offsets) < 0).any()):
        raise FormatError(f"{name}: offsets of a ragged field do not rise from 0 to {total}")
    return offsets
