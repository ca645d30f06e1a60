"""The format of a cache: names of its files, where columns are in a shard, and the header of a shard.

docs/reference/format.md describes it. Nothing here opens a file: `OpenFile` and `PendingWrite` are what the
store asks of one, wherever its bytes are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError
from stoker.runtime.files import RegularFile
from stoker.runtime.jsonio import as_list, as_object, canonical_json, is_count, read_strict
from stoker.schema import DTYPE_BYTES, Field, Schema, schema_text
from stoker.units import KIB, MIB

RECIPE_FILE = "recipe.json"
INDEX_FILE = "index.json"
SOURCES_FILE = "sources.jsonl"
"""A cache's list of its source files: name, bytes and digest of each as one JSON line."""
KEYS_FILE = "keys.jsonl"
"""The keys of a cache's samples, see `stoker.store.keys`."""
WEIGHTS_FOLDER = "encoders"
"""Below the folder that holds caches by name: weights of encoders, by digest."""
DAMAGED = ".damaged-"
"""Prefix of shards that a repair set aside."""
FINGERPRINT = re.compile(r"[0-9a-f]{16}")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def check_name(name: str, *, where: str) -> str:
    """Return `name` if it is a plain file name.

    Raises:
        FormatError: It is absolute, has a parent or hidden part, or characters that the store never uses.
    """
    if not PLAIN_NAME.fullmatch(name) or ".." in name:
        raise FormatError(f"{where} names the file {name!r}, which is not a plain name in this folder")
    return name


def is_shard_name(name: str) -> bool:
    """Return True if a file of a cache folder is a shard, by its name."""
    return name.startswith("shard-") and name.endswith(".safetensors")


def is_failures_name(name: str) -> bool:
    """Return True if a file of a cache folder lists failures, by its name."""
    return name.startswith("failures-") and name.endswith(".jsonl")


def places_name(shard: str) -> str | None:
    """Return the file that says where the columns of a shard are, if not in it; None: it is not a shard.

    >>> places_name("shard-0a1b-000000.safetensors")
    'places-0a1b-000000.json'
    """
    if not is_shard_name(shard):
        return None
    return f"places-{shard[len('shard-') : -len('.safetensors')]}.json"


# ----------------------------------------------------------------------------------------------------------
# What the store asks of a file: one that is being written, and one that is open for reading.


Buffer: TypeAlias = "bytes | bytearray | memoryview[Any]"


class PendingWrite(Protocol):
    """A file being written under a temporary name; it exists for others only after `commit`."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`, whatever short writes and interrupts the system makes."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back what was written."""
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        ...

    def commit(self) -> None:
        """Make the file durable, then visible under its name, then make the name durable.

        Raises:
            OSError: The file was not made durable; it is discarded and must be made again.
        """
        ...

    def discard(self) -> None:
        """Remove the temporary; safe to call twice and after `commit`."""
        ...


class OpenFile(Protocol):
    """A file opened for positional reads; safe to use from several threads."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        ...

    @property
    def origin(self) -> str | None:
        """The URL that its bytes come from; None: they are on this machine."""
        ...

    @property
    def generation(self) -> tuple[int, int] | None:
        """Another value whenever bytes may have been fetched again; None: they are on this machine."""
        ...

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`; a short file is a `CorruptError` that names it."""
        ...

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill buffers one after another from `offset` on with what needs no wait for storage.

        False: not all of it can be had so, or that is not known; the buffers may hold anything then.
        """
        ...

    def prefetch(self, offset: int, size: int) -> None:
        """Begin to load bytes that will be read soon; waits for nothing."""
        ...

    def refetch(self, offset: int, size: int) -> bool:
        """Have bytes that do not match their sums fetched again at the next read; False: from nowhere."""
        ...

    def fileno(self) -> int:
        """Return the descriptor, for mapping; -1 if it has none."""
        ...

    @property
    def direct_fd(self) -> int:
        """A descriptor with the bytes that are `here`, at the same offsets; -1 where they are elsewhere."""
        ...

    def here(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these extents `direct_fd` has, until `generation` changes."""
        ...

    def close(self) -> None:
        """Release the file; safe to call twice."""
        ...


class LocalFile(RegularFile):
    """A file of this machine as an `OpenFile`."""

    origin: str | None = None
    generation: tuple[int, int] | None = None

    @property
    def direct_fd(self) -> int:
        """Its own."""
        return self.fileno()

    def here(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for all."""
        return np.ones(len(begins), np.bool_)

    def refetch(self, offset: int, size: int) -> bool:
        """Return False: the bytes are nowhere else."""
        return False


# ----------------------------------------------------------------------------------------------------------
# Where columns are in a shard: pure arithmetic.
#
# Every column starts on a page, so that shards can be mapped one after another into one range of addresses.
# The largest fixed column comes first: a shard that is committed early then moves only its smaller columns.


FORMATS = (1, 2, 3)
"""Formats that this version reads; it writes the first that can hold a schema; 3: compressed shards."""
COMPRESSED_FORMAT = 3
"""Of a compressed shard, and of an index that names one; the ordinary shard in it keeps its own."""
PAGE = 4096
"""Alignment of columns in bytes; part of the format, whatever the machine's own page size."""
BLOCK_BYTES = 16 * KIB
"""Bytes that one block sum aims to cover."""
SHARD_BYTES = 256 * MIB
"""Bytes of records at which a shard with fixed fields only is committed."""
RAGGED_SHARD_BYTES = 32 * MIB
"""The same for a shard with a ragged field, which is kept in memory until committed."""
MAX_ROWS = 1 << 20
"""Records in one shard at most; bounds what a writer keeps per record in memory."""


def format_of(schema: Schema) -> int:
    """Return the format of a cache of this schema: 2 with marks that workers of 1 do not know."""
    return 2 if any(field.quantized or field.kept or field.axes for field in schema.values()) else 1


def align(offset: int) -> int:
    """Return the next multiple of `PAGE` at or above `offset`."""
    return -(-offset // PAGE) * PAGE


def axis_length(field: Field) -> int:
    """Return the steps along axis 0 of one record of a fixed field; a scalar has one."""
    return field.shape[0] if field.shape else 1


def rows_per_block(field: Field) -> int:
    """Return the steps along a record's axis 0 that share one block sum.

    >>> rows_per_block(Field(shape=(101, 16, 32), dtype="float16"))
    16
    """
    return max(1, BLOCK_BYTES // max(1, field.row_bytes))


def block_count(field: Field, length: int) -> int:
    """Return the block sums of one record whose axis 0 has `length` steps; none where there are no bytes."""
    return -(-length // rows_per_block(field)) if field.row_bytes else 0


def is_fixed(schema: Schema) -> bool:
    """Return True if every record has the same size, so that a shard can be written as it comes."""
    return not any(field.ragged for field in schema.values())


def record_bytes(schema: Schema) -> int:
    """Return the bytes of one record, over its fixed fields."""
    return sum(field.size_bytes() for field in schema.values() if not field.ragged)


def row_capacity(schema: Schema, shard_bytes: int) -> int:
    """Return the records of a full shard with fixed fields only; the same for every shard of a cache.

    A multiple of `PAGE / gcd(bytes, PAGE)` for each field where the shard has room for that, so that full
    shards fill complete pages.
    """
    size = record_bytes(schema)
    capacity = min(MAX_ROWS, shard_bytes // size if size else MAX_ROWS)
    whole_pages = math.lcm(
        *(PAGE // math.gcd(f.size_bytes(), PAGE) for f in schema.values() if f.size_bytes())
    )
    if whole_pages <= capacity:
        capacity -= capacity % whole_pages
    return max(1, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limits at which a shard is full."""

    rows: int
    """Most records."""
    bytes: int
    """Bytes of records; what fills a shard with a ragged field, whose records differ."""
    fixed: bool

    def is_full(self, rows: int, size: int) -> bool:
        """Return True if a shard of so many records and bytes takes no more."""
        return rows >= self.rows or (not self.fixed and size >= self.bytes)


def capacity(schema: Schema, shard_bytes: int) -> Capacity:
    """Return the limits at which a shard of about `shard_bytes` is full.

    Raises:
        ConfigError: `shard_bytes` is less than 1.
    """
    if shard_bytes < 1:
        raise ConfigError(
            f"shard_bytes is {shard_bytes}, expected 1 at least", hint=f"Leave it out for {SHARD_BYTES}"
        )
    if not is_fixed(schema):
        return Capacity(rows=MAX_ROWS, bytes=min(shard_bytes, RAGGED_SHARD_BYTES), fixed=False)
    rows = row_capacity(schema, shard_bytes)
    return Capacity(rows=rows, bytes=rows * record_bytes(schema), fixed=True)


def column_order(schema: Schema) -> list[str]:
    """Return the fields in column order: the largest fixed one, other fixed ones, then ragged ones."""
    fixed = [name for name, field in schema.items() if not field.ragged]
    largest = max(fixed, key=lambda name: schema[name].size_bytes(), default=None)
    first = [] if largest is None else [largest]
    return first + [n for n in fixed if n != largest] + [n for n in schema if schema[n].ragged]


def place_columns(order: Sequence[str], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offsets of columns from the start of the data, and the aligned end of the last one.

    >>> place_columns(["z", "c"], {"z": 5000, "c": 12})
    ({'z': 0, 'c': 8192}, 12288)
    """
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        offsets[name] = end
        end = align(end + sizes[name])
    return offsets, end


# ----------------------------------------------------------------------------------------------------------
# The safetensors header of a shard: build it, and parse it with limits before anything is allocated.
#
# A header carries a digest of itself (its own value blanked), so that a shard proves itself without an
# index.


MAX_HEADER_BYTES = 64 * MIB
MAX_TENSORS = 100_000
MAX_AXES = 32
TENSOR_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "uint64": "U64",
}  # fmt: skip
"""Our dtype names to those of safetensors; uint64 appears in block sums only."""
REFETCHES = 2
"""Times that damaged bytes are fetched again where they come from an object store."""
ITEM_BYTES: Mapping[str, int] = {TENSOR_DTYPES[name]: size for name, size in DTYPE_BYTES.items()} | {"U64": 8}
"""Bytes of a number, by the dtype as safetensors spells it."""
_BLANK = "0" * 32
_SELF = re.compile(rb'"self":"[0-9a-f]{32}"')


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    dtype: str
    """As safetensors spells it, e.g. `"F16"`."""
    shape: tuple[int, ...]
    begin: int
    """First byte, from the start of the data."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A parsed header whose digest was right."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    """Offset of the data in the file, a multiple of `PAGE`."""
    digest: str
    """xxh3_128 of the file's first `data_start` bytes; the index pins it."""


def pack_header(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], data_start: int | None
) -> bytes:
    """Return the first bytes of a shard, up to its data.

    Args:
        tensors, metadata: What the header says; `self` is added.
        data_start: Where the data begins, if that is settled; None: on the next page.
    """
    entries: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for name, t in tensors.items()
    }
    text = canonical_json({"__metadata__": {**metadata, "self": _BLANK}, **entries}).encode()
    size = align(8 + len(text)) if data_start is None else data_start
    assert size >= 8 + len(text), "a header outgrew the room reserved for it"
    blanked = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    digest = xxhash.xxh3_128_hexdigest(blanked)
    return blanked.replace(f'"self":"{_BLANK}"'.encode(), f'"self":"{digest}"'.encode(), 1)


def read_header(file: OpenFile, *, where: str) -> Header:
    """Parse and check the header of a shard.

    Raises:
        CorruptError: Its digest is wrong, or what it says disagrees with the file.
        FormatError: It is larger than any header this version writes, or of another format.
    """
    raw = _read_raw(file, where)
    found = _SELF.findall(raw)
    if len(found) != 1:
        raise CorruptError(f"{where} has no digest of its header: not a shard, or damaged")
    blanked = raw.replace(found[0], f'"self":"{_BLANK}"'.encode(), 1)
    if xxhash.xxh3_128_hexdigest(blanked) != found[0][8:-1].decode():
        raise CorruptError(f"{where}: the header does not match its digest")
    entries = read_strict(raw[8:].rstrip(b" "), where=f"the header of {where}")
    metadata = as_object(entries.pop("__metadata__", None))
    if metadata is None or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: metadata is missing or not text")
    if metadata.get("format") not in [str(number) for number in FORMATS]:
        raise FormatError(
            f"{where} has format {metadata.get('format')!r}, this version reads {FORMATS}",
            hint="Upgrade stoker",
        )
    tensors = _check_tensors(entries, file.size - len(raw), where)
    digest = xxhash.xxh3_128_hexdigest(raw)
    return Header(tensors=tensors, metadata=metadata, data_start=len(raw), digest=digest)


def _read_raw(file: OpenFile, where: str) -> bytes:
    prefix = bytearray(8)
    if file.size < PAGE:
        raise CorruptError(f"{where} has {file.size} bytes, a shard has {PAGE} at least: truncated")
    file.read_into(0, memoryview(prefix))
    size = 8 + int.from_bytes(prefix, "little")
    if size > min(MAX_HEADER_BYTES, file.size) or size % PAGE:
        raise CorruptError(
            f"{where}: the header claims {size:,} bytes, expected a multiple of {PAGE} within the "
            f"file's {file.size:,} and {MAX_HEADER_BYTES:,}"
        )
    raw = bytearray(size)
    file.read_into(0, memoryview(raw))
    return bytes(raw)


def _check_tensors(entries: dict[str, Any], data_bytes: int, where: str) -> dict[str, TensorEntry]:
    if len(entries) > MAX_TENSORS:
        raise FormatError(f"{where} has {len(entries):,} tensors, expected {MAX_TENSORS:,} at most")
    tensors = {name: _tensor(name, entry, where) for name, entry in entries.items()}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            raise CorruptError(f"{where}: tensor {name!r} starts at byte {tensor.begin}, expected {at}")
        at = tensor.end
    if at != data_bytes:
        raise CorruptError(f"{where}: tensors end at byte {at:,} of the data, the file has {data_bytes:,}")
    return tensors


def _tensor(name: str, value: object, where: str) -> TensorEntry:
    entry = as_object(value) or {}
    shape, offsets = as_list(entry.get("shape")), as_list(entry.get("data_offsets"))
    if len(entry) == 3 and shape is not None and offsets is not None and len(shape) <= MAX_AXES:
        item_bytes = ITEM_BYTES.get(str(entry.get("dtype")))
        if item_bytes and len(offsets) == 2 and all(map(is_count, [*shape, *offsets])):
            begin, end = offsets
            if end - begin == math.prod(shape) * item_bytes:
                return TensorEntry(str(entry["dtype"]), tuple(shape), begin, end)
    raise CorruptError(f"{where}: the entry of tensor {name!r} is malformed or contradicts itself")


# ----------------------------------------------------------------------------------------------------------
# What a shard's header and its tail say, each compared with the schema that the shard must have.


CONTENTS = "__contents__"
"""Tensor of a shard: for each record the digest of the raw sample that it was encoded from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Location of one field of a shard, or of the scales of a quantized one."""

    field: Field
    offset: int
    """Offset in the file, a multiple of 4096."""
    nbytes: int
    row_bytes: int
    """Bytes of one record; 0 for a ragged field, whose records differ."""


def is_pad(name: str) -> bool:
    """Return True if a tensor only fills the room between columns."""
    return name.startswith("__pad__")


def check_metadata(header: Header, schema: Schema, name: str) -> tuple[str, int]:
    """Return the shard's part and number of rows.

    Raises:
        FormatError: Its metadata is not that of a shard of this schema.
    """
    metadata = header.metadata
    expected = {"part", "schema", "rows", "environment", "columns", "meta", "statistics", "error"}
    if not expected <= metadata.keys() or "__number__" not in header.tensors:
        raise FormatError(f"{name} lacks {sorted(expected - metadata.keys()) or '__number__'} in its header")
    if metadata["schema"] != schema_text(schema):
        raise FormatError(f"{name} has another schema than its cache: it belongs elsewhere", hint="Remove it")
    if metadata["format"] != str(format_of(schema)):
        raise FormatError(f"{name} says format {metadata['format']}, its schema is of another")
    rows = header.tensors["__number__"].shape[0] if header.tensors["__number__"].shape else 0
    if str(rows) != metadata["rows"] or not 1 <= rows <= MAX_ROWS:
        raise FormatError(f"{name} claims {metadata['rows']} rows and holds {rows} numbers")
    return metadata["part"], rows


def columns_in(header: Header, schema: Schema, rows: int, name: str) -> dict[str, Column]:
    """Return where each field is.

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
        if entry.shape != ((total, *f.shape[1:]) if f.ragged else (rows, *f.shape)) or entry.begin % PAGE:
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
    """Return numbers, offsets and sums, which are stored at the end, once they match their digest.

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
    """Return the offsets of a ragged field, if they rise from 0 to the column's end.

    Raises:
        FormatError: They do not.
    """
    total = column.nbytes // column.field.row_bytes if column.field.row_bytes else int(offsets[-1:].sum())
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != total or bool((np.diff(offsets) < 0).any()):
        raise FormatError(f"{name}: offsets of a ragged field do not rise from 0 to {total}")
    return offsets
