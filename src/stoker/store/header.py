"""The safetensors header of a shard: build it, and parse it with limits before anything is allocated.

A header carries a digest of itself (its own value blanked), so that a shard proves itself without an index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from stoker.errors import CorruptError, FormatError
from stoker.schema import DTYPE_BYTES, canonical_json
from stoker.store.layout import FORMATS, PAGE, align
from stoker.store.protocols import OpenFile
from stoker.store.strict_json import as_list, as_object, is_count, read_strict
from stoker.units import MIB

MAX_HEADER_BYTES = 64 * MIB
MAX_TENSORS = 100_000
MAX_AXES = 32
TENSOR_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "uint64": "U64",
}  # fmt: skip
"""Our dtype names to those of safetensors; uint64 appears in block sums only."""
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
    """The first bytes of a shard, up to its data.

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
            f"{where} has format {metadata.get('format')!r}, this version reads {FORMATS}. Upgrade stoker"
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
