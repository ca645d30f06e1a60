"""What a shard says of itself: parsed and checked once, good for every later opening of the same file.

Parsing costs twenty times what opening a file does. Where a cache has more shards than a process may have
open, they come and go all the time; what was read of them stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError
from stoker.schema import Schema, columns_of
from stoker.store.blocks import Blocks
from stoker.store.columns import (
    CONTENTS,
    Column,
    check_metadata,
    check_offsets,
    columns_in,
    is_pad,
    read_tail,
)
from stoker.store.compressed import CompressedFile
from stoker.store.field_read import MENDS
from stoker.store.header import read_header
from stoker.store.protocols import OpenFile
from stoker.store.strict_json import read_strict
from stoker.store.sums import record_seeds, schema_seed

PARSED_BYTES = 8192
"""About what the parsed header of one shard takes, besides its numbers, offsets and sums."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFacts:
    """Everything of a shard but its records."""

    size: int
    """Bytes of the file."""
    header_bytes: int
    header_digest: str
    """xxh3_128 of the file's first `header_bytes`, which pin all the rest."""
    part: str
    rows: int
    metadata: Mapping[str, str]
    digests: Mapping[str, Any]
    """Of whole columns, by field."""
    padding: tuple[tuple[int, int], ...]
    columns: Mapping[str, Column]
    numbers: NDArray[np.int64]
    marked: NDArray[np.int64]
    contents: NDArray[np.uint64]
    """Digest of each record's raw sample, `(rows, 2)`; zeros: unknown. No rows where all are."""
    offsets: Mapping[str, NDArray[np.int64]]
    blocks: Mapping[str, Blocks]
    nbytes: int
    """About what this takes in memory."""

    def are_of(self, file: OpenFile) -> bool:
        """Whether a file that was opened again begins as the one that these were read from."""
        if file.size != self.size:
            return False
        raw = bytearray(self.header_bytes)
        file.read_into(0, memoryview(raw))
        return xxhash.xxh3_128_hexdigest(raw) == self.header_digest


def read_facts(file: OpenFile, schema: Schema, name: str) -> ShardFacts:
    """Read and check all that a shard says of itself.

    Args:
        file: The open file.
        schema: The stored schema that the shard must have.
        name: Where it lies, for messages.
    Raises:
        CorruptError, FormatError: Header, numbers, offsets or sums are damaged, foreign or contradictory.
    """
    header = read_header(file, where=name)
    part, rows = check_metadata(header, schema, name)
    seed = schema_seed(schema)
    schema = columns_of(schema)
    columns = columns_in(header, schema, rows, name)
    digests = read_strict(header.metadata["columns"].encode(), where=f"the digests of {name}")
    most = file.stored_bytes if isinstance(file, CompressedFile) else file.size
    tail = read_tail(file, header, name, most)
    numbers = tail["__number__"]
    offsets = {
        n: check_offsets(tail[f"{n}.offsets"], columns[n], name) for n, f in schema.items() if f.ragged
    }
    seeds = record_seeds(seed, numbers)
    blocks: dict[str, Blocks] = {}
    for n, f in schema.items():
        try:
            blocks[n] = Blocks(n, f, columns[n].offset, seeds, tail[f"{n}.sums"].reshape(-1), offsets.get(n))
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
    contents = tail.get(CONTENTS, np.empty(0, np.uint64)).reshape(-1, 2)
    if len(contents) not in (0, rows):
        raise FormatError(f"{name}: {len(contents)} digests of samples for {rows} rows")
    if numbers.min(initial=0) < 0:
        raise FormatError(f"{name} holds a negative sample number")
    return ShardFacts(
        size=file.size,
        header_bytes=header.data_start,
        header_digest=header.digest,
        part=part,
        rows=rows,
        metadata=header.metadata,
        digests=digests,
        padding=tuple(
            (header.data_start + t.begin, t.end - t.begin) for n, t in header.tensors.items() if is_pad(n)
        ),
        columns=columns,
        numbers=numbers,
        marked=tail.get("__marked__", np.empty(0, np.int64)),
        contents=contents,
        offsets=offsets,
        blocks=blocks,
        nbytes=PARSED_BYTES + seeds.nbytes + sum(array.nbytes for array in tail.values()),
    )


def facts_of(file: OpenFile, schema: Schema, name: str, known: ShardFacts | None) -> ShardFacts:
    """`known`, if it is of this file, else what is read from it.

    Raises:
        CorruptError, FormatError: As `read_facts`.
    """
    try:
        if known is not None and known.are_of(file):
            return known
    except (OSError, CorruptError):
        pass  # reading all of it says what is wrong
    for _ in range(MENDS):
        try:
            return read_facts(file, schema, name)
        except CorruptError:
            if not file.mend(0, file.size):
                raise
    return read_facts(file, schema, name)
