"""Read one shard: every byte that leaves here has passed a checksum since it was read from the file."""

from __future__ import annotations

import errno
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError, RecordError, ResourceError
from stoker.runtime.jsonio import read_strict
from stoker.runtime.threads import map_in_order
from stoker.schema import Field, Schema, columns_of, numpy_dtype
from stoker.store import format
from stoker.store.compressed import CompressedFile, open_compressed
from stoker.store.format import (
    CONTENTS,
    REFETCHES,
    Column,
    OpenFile,
    check_metadata,
    check_offsets,
    columns_in,
    is_pad,
    read_header,
    read_tail,
)
from stoker.store.values import match, record_seeds, schema_seed
from stoker.units import MIB, format_few

# ----------------------------------------------------------------------------------------------------------
# Blocks of one field of a shard: where its records' steps are, and whether bytes match their sums.
#
# Everything here runs for each record that is served from disk, and holds the interpreter's lock while it
# does. So sums and seeds are looked up as plain integers in the arrays that the shard came with: a check
# costs little more than the hashes themselves.


T = TypeVar("T")
R = TypeVar("R")
Verify: TypeAlias = Literal["always", "first", "off"]
"""When bytes are compared with their sums: at each read, at a block's first since opening (and since it was
fetched, where bytes come from a store), or never."""


class RecordPlaces(NamedTuple):
    """Where the records of one field are, their seeds and their sums, which the shard keeps in memory."""

    begin: int
    """Offset of the first record in the file."""
    unit_bytes: int
    """Bytes of a record; of a step, where `offsets` are given."""
    block_bytes: int
    seeds: int
    """Address of the first record's seed, 8 bytes each."""
    sums: int
    """Address of the first sum, 8 bytes each."""
    sums_each: int
    """Sums of a record, where `firsts` are not given."""
    offsets: NDArray[np.int64] | None
    """Steps before each record of a ragged field, and their total, `(rows + 1,)`."""
    firsts: NDArray[np.int64] | None
    """Sums before each record of a ragged field."""


class Blocks:
    """Steps, blocks and sums of one field.

    Args:
        name: The field's, for messages.
        field: The field.
        begin: Offset of its column in the file.
        seeds: Seed of each record, `(rows,)` uint64.
        sums: Of all blocks, record by record, uint64.
        offsets: Steps before each record of a ragged field, and their total, `(rows + 1,)`; else None.

    Raises:
        FormatError: There are more or fewer sums than blocks.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        begin: int,
        seeds: NDArray[np.uint64],
        sums: NDArray[np.uint64],
        offsets: NDArray[np.int64] | None,
    ) -> None:
        self._name = name
        self.step_bytes = field.row_bytes
        self._begin = begin
        self._steps = format.rows_per_block(field)
        self._bytes = self._steps * field.row_bytes
        self._length = 0 if field.ragged else format.axis_length(field)
        self._each = 0 if field.ragged else format.block_count(field, self._length)
        self._offsets: Any = None
        self._firsts: Any = None
        count = len(seeds) * self._each
        if offsets is not None:
            counts = -(-np.diff(offsets) // self._steps) * bool(field.row_bytes)
            firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
            self._offsets, self._firsts, count = offsets.data, firsts.data, int(firsts[-1])
        if count != len(sums):
            raise FormatError(f"{len(sums)} sums for field {name!r}, expected {count}")
        self._sums: Any = sums.data  # items are plain integers, which numpy's are not
        self._seeds: Any = seeds.data
        self.record_places = self._record_places(seeds, sums, offsets)
        """For reads of many records in one call."""
        self._seen: dict[object, bytearray] = {}
        """For `verify="first"`: 1 for each block that was found right, in the file's present generation."""

    def _record_places(
        self, seeds: NDArray[np.uint64], sums: NDArray[np.uint64], offsets: NDArray[np.int64] | None
    ) -> RecordPlaces:
        return RecordPlaces(
            begin=self._begin,
            unit_bytes=self.step_bytes * (self._length if offsets is None else 1),
            block_bytes=self._bytes,
            seeds=seeds.ctypes.data,
            sums=sums.ctypes.data,
            sums_each=self._each,
            offsets=offsets,
            firsts=None if self._firsts is None else np.asarray(self._firsts),
        )

    def length(self, row: int) -> int:
        """Return the steps along axis 0 of one record; 1 for a scalar."""
        if self._offsets is None:
            return self._length
        return self._offsets[row + 1] - self._offsets[row]

    def place(self, row: int, step: int = 0) -> int:
        """Return the offset in the file of a step of a record."""
        before = row * self._length if self._offsets is None else self._offsets[row]
        return self._begin + (before + step) * self.step_bytes

    def cover(self, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """Return the complete blocks that hold steps `start:stop`, or these steps if no sum is wanted.

        Raises:
            RecordError: They are not within the record.
        """
        length = self.length(row)
        if not 0 <= start <= stop <= length:
            raise RecordError(
                f"steps {start}:{stop} of field {self._name!r} asked for, the record has {length}"
            )
        if start == stop or self._trusts(row, start, stop, verify):
            return start, stop
        return start // self._steps * self._steps, min(-(-stop // self._steps) * self._steps, length)

    def right(
        self, row: int, low: int, data: memoryview[Any], verify: Verify, generation: object = None
    ) -> bool:
        """Return True if a record's bytes from step `low` on are what was stored.

        Args:
            row: Which record.
            low: Starts a block, unless no sum is wanted.
            data: Complete blocks, format `B`.
            verify: When to compare.
            generation: The file's, see `OpenFile`: what was found right in another one is compared again.
        """
        if verify == "off" or not len(data):
            return True
        first = (row * self._each if self._firsts is None else self._firsts[row]) + low // self._steps
        if verify == "always":
            return match(data, self._bytes, self._seeds[row], self._sums, first)
        seen = self._seen.get(generation)
        if seen is None:
            if generation is not None:
                self._seen = {}  # a thread that read before marks blocks in the table of then
            # One table, whichever thread is first: where `cover` trusts it, parts of blocks are read.
            seen = self._seen.setdefault(generation, bytearray(len(self._sums)))
        stop = first + -(-len(data) // self._bytes)
        if 0 in seen[first:stop]:
            if not match(data, self._bytes, self._seeds[row], self._sums, first):
                return False
            seen[first:stop] = b"\1" * (stop - first)
        return True

    def _trusts(self, row: int, start: int, stop: int, verify: Verify) -> bool:
        """Return True if these steps are served without a look at their sums."""
        if verify != "first":
            return verify == "off"
        if (seen := self._seen.get(None)) is None:
            return False
        first = row * self._each if self._firsts is None else self._firsts[row]
        return 0 not in seen[first + start // self._steps : first - (-stop // self._steps)]


# ----------------------------------------------------------------------------------------------------------
# Read records of one field of a shard, each compared with its sums as soon as it is there.


class ShardFile:
    """The file of a shard; errors name it, the field and the sample.

    Args:
        file: The open file.
        path: Where it is.
        numbers: Part-local number of each row's sample.
        offset: Global number of the part's first sample.
    """

    def __init__(self, file: OpenFile, path: Path, numbers: NDArray[np.int64], offset: int) -> None:
        self.file, self.path, self._numbers, self._offset = file, path, numbers, offset

    def where(self, field: str, row: int | None) -> str:
        """Return the names a field, or a record of it."""
        of = "" if row is None else f" of sample {int(self._numbers[row]) + self._offset}"
        return f"{self.path}: field {field!r}{of}"

    def read(self, offset: int, out: memoryview[Any], field: str, row: int | None = None) -> None:
        """Fill `out` from `offset`.

        Raises:
            CorruptError: It cannot be read.
        """
        try:
            self.file.read_into(offset, out)
        except (OSError, CorruptError) as error:  # the latter: it was cut short since it was opened
            raise self.corrupt(f"{self.where(field, row)} cannot be read: {error}") from error

    def corrupt(self, fact: str) -> CorruptError:
        """Return the error for damaged records."""
        folder = self.path.parent
        if (origin := self.file.origin) is not None:
            fact = f"{fact} (it was fetched again from {origin}, and is no better)"
        return CorruptError(fact, hint=repair_advice(folder), shard=self.path.name, folder=folder)


class FieldReader:
    """Reads one field; safe to use from several threads.

    `wait=False` reads only what the page cache has: the answer is False or None where it lacks some.
    """

    def __init__(self, name: str, field: Field, blocks: Blocks, file: ShardFile) -> None:
        self._name, self._field, self._blocks, self._file = name, field, blocks, file
        self.length = blocks.length
        self.record_places = blocks.record_places
        """See `Blocks`."""

    def read(self, row: int, start: int | None, stop: int | None, verify: Verify) -> NDArray[Any]:
        """Return one record, or steps `start:stop` of its axis 0, in a fresh array; see `Shard.read`."""
        begin, end = 0 if start is None else start, self.length(row) if stop is None else stop
        data = cast("memoryview[Any]", self.steps(row, begin, end, verify))
        values: NDArray[Any] = np.asarray(data).view(numpy_dtype(self._field.dtype))
        return values.reshape((end - begin, *self._field.shape[1:]) if self._field.shape else ())

    def steps(
        self, row: int, start: int, stop: int, verify: Verify, *, wait: bool = True
    ) -> memoryview[Any] | None:
        """Return the bytes of steps `start:stop` of a record, in memory of their own, format `B`.

        Raises:
            CorruptError: They do not match their sums; names shard, field and sample.
            RecordError: They are not within the record.
        """
        blocks = self._blocks
        low, high = self._cover(row, start, stop, verify)
        data = np.empty((high - low) * blocks.step_bytes, np.uint8).data
        if not self._fill(row, low, [data], verify, wait):
            return None
        return data[(start - low) * blocks.step_bytes : (stop - low) * blocks.step_bytes]

    def read_into(self, row: int, start: int, stop: int, out: memoryview[Any], verify: Verify) -> None:
        """Read the same into `out`, without a copy where `start:stop` is complete blocks."""
        blocks = self._blocks
        if len(out) != (stop - start) * blocks.step_bytes:
            raise self._unfit(out, row, stop - start)
        if self._cover(row, start, stop, verify) == (start, stop):
            self._fill(row, start, [out], verify, wait=True)
        else:
            out[:] = cast("memoryview[Any]", self.steps(row, start, stop, verify))

    def rows(self, first: int, outs: Sequence[memoryview[Any]], verify: Verify, *, wait: bool = True) -> bool:
        """Read complete records from row `first` on into a buffer each, in one read where nothing waits.

        Args:
            first: Row of the first record.
            outs: A buffer for each, format `B`, of exactly its bytes.
            verify: When to compare them with their sums.
            wait: Whether to wait for storage.
        Returns:
            Whether they are there; if not, `outs` may hold anything.
        Raises:
            CorruptError, RecordError: As `steps`.
        """
        blocks = self._blocks
        for row, out in enumerate(outs, first):
            if len(out) != blocks.length(row) * blocks.step_bytes:
                raise self._unfit(out, row, blocks.length(row))
        return self._fill(first, 0, outs, verify, wait)

    def extent(self, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """Return the offset in the file and bytes of what is read for steps `start:stop` of a record."""
        low, high = self._cover(row, start, stop, verify)
        return self._blocks.place(row, low), (high - low) * self._blocks.step_bytes

    def _fill(self, row: int, low: int, outs: Sequence[memoryview[Any]], verify: Verify, wait: bool) -> bool:
        """Fill `outs` with what is together from step `low` of `row` on: complete blocks where sums are
        wanted, a buffer for each record. Each is checked while it is still in the core's cache.
        """
        blocks, file = self._blocks, self._file
        offset, generation = blocks.place(row, low), file.file.generation
        if not wait and not file.file.read_cached(offset, outs):
            return False
        for own, out in enumerate(outs, row):
            if wait:
                file.read(offset, out, self._name, own)
            right, left = self._right(own, low, out, verify, generation), REFETCHES
            while not right and left and file.file.refetch(offset, len(out)):
                generation = file.file.generation
                file.read(offset, out, self._name, own)
                right, left = self._right(own, low, out, verify, generation), left - 1
            offset += len(out)
            if not right:
                raise file.corrupt(f"{file.where(self._name, own)} does not match its checksum")
        return True

    def _cover(self, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """As `Blocks.cover`; complete blocks where they may be fetched again before they are read."""
        again = verify == "first" and self._file.file.generation is not None
        return self._blocks.cover(row, start, stop, "always" if again else verify)

    def _right(
        self, row: int, low: int, data: memoryview[Any], verify: Verify, before: tuple[int, int] | None
    ) -> bool:
        """As `Blocks.right`, of bytes that were read when the file's generation had been `before`."""
        changed = verify == "first" and self._file.file.generation != before
        return self._blocks.right(row, low, data, "always" if changed else verify, before)

    def _unfit(self, out: memoryview[Any], row: int, steps: int) -> RecordError:
        return RecordError(
            f"the buffer has {len(out)} bytes, {steps} steps of row {row} of {self._name!r} need "
            f"{steps * self._blocks.step_bytes}"
        )


def repair_advice(folder: Path) -> str:
    """Return what to do about damaged records. Precompute reads none, so a repair has to tell it."""
    return (
        f"`stoker cache verify {folder} --repair` sets aside all that is damaged, and precompute "
        "then encodes it again, and only that"
    )


# ----------------------------------------------------------------------------------------------------------
# What a shard says of itself: parsed and checked once, good for every later opening of the same file.
#
# Parsing costs twenty times what opening a file does. Where a cache has more shards than a process may have
# open, they come and go all the time; what was read of them stays.


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
    """Of complete columns, by field."""
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
        """Return True if a file that was opened again begins as the one that these were read from."""
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
        name: Where it is, for messages.
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
            raise FormatError.of_all([error.problem.within(f"{name}: ")]) from error
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
    for _ in range(REFETCHES):
        try:
            return read_facts(file, schema, name)
        except CorruptError:
            if not file.refetch(0, file.size):
                raise
    return read_facts(file, schema, name)


PIECE_BYTES = MIB
"""Bytes read and hashed at a time: the piece is still in the core's cache when it is hashed."""
AHEAD_BYTES = 4 * MIB
"""Bytes of a column that the system is asked to read ahead of them."""


class ColumnSink(Protocol):
    """Takes a column that is read in pieces, from the first to the last. Called by the reading thread."""

    @property
    def piece_bytes(self) -> int:
        """The most bytes that it has room for at a time."""
        ...

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """Memory, format `B`, for the `size` bytes from `offset` of the column on."""
        ...

    def filled(self, offset: int, size: int) -> None:
        """Note that the memory which `room` gave last holds its bytes now."""
        ...


class Shard:
    """An open shard. Reads are positional, so several threads may share it; closed when unreferenced.

    Args:
        file: The open file; the shard takes it over.
        path: Where it is, for messages.
        schema: The stored schema that the shard must have.
        offset: Global number of its part's first sample, so that messages name global numbers.
        known: What it said of itself when it was open before: taken over if its header is still the same.

    Raises:
        CorruptError, FormatError: Header, numbers, offsets or sums are damaged, foreign or contradictory.
    """

    def __init__(
        self,
        file: OpenFile,
        path: Path,
        schema: Schema,
        *,
        offset: int = 0,
        known: ShardFacts | None = None,
    ) -> None:
        self.name = path.name
        self.size = file.size
        """Bytes of the file."""
        file = open_compressed(file, str(path))
        self.compression = file.compression if isinstance(file, CompressedFile) else "none"
        """Compression of its columns: `none`, `zstd` or `lz4`."""
        self.file, self._path, self._offset = file, path, offset
        self.facts = facts = facts_of(file, schema, str(path), known)
        """All that it says of itself; good for opening it again."""
        self.header_digest, self.part, self.rows = facts.header_digest, facts.part, facts.rows
        self.raw_bytes = facts.size
        """Bytes of the ordinary shard; those of the file unless it is compressed."""
        self.padding = facts.padding
        """Offset and bytes of each run of zeros between columns."""
        self.columns = facts.columns
        self.marked = facts.marked
        """Part-local numbers encoded in a smaller group than the recipe's."""
        self.contents = facts.contents
        """Digest of each record's raw sample, `(rows, 2)`; zeros: unknown. No rows where all are."""
        self._numbers = facts.numbers
        self._bytes = ShardFile(file, path, self._numbers, offset)
        self.fields = {
            name: FieldReader(name, facts.columns[name].field, blocks, self._bytes)
            for name, blocks in facts.blocks.items()
        }
        """Reads each field's records, many at once or without waiting."""

    def described(self, what: Literal["statistics", "error", "environment"]) -> Mapping[str, Any]:
        """Return what the header says of the records.

        Args:
            what: `statistics`: partial ones by field; `error`: the largest of a conversion by field,
                `{"max", "rms"}`; `environment`: versions and hardware that made them.
        """
        return read_strict(self.facts.metadata[what].encode(), where=f"{what} of {self._path}")

    def numbers(self) -> NDArray[np.int64]:
        """Return the part-local sample numbers, one per row."""
        return self._numbers

    def offsets(self, field: str) -> NDArray[np.int64]:
        """Return the steps along axis 0 before each row of a ragged field, and their total: `(rows + 1,)`."""
        return self.facts.offsets[field]

    def length(self, field: str, row: int) -> int:
        """Return the steps along axis 0 of one record; 1 for a scalar."""
        return self.fields[field].length(row)

    def read(
        self,
        field: str,
        row: int,
        start: int | None = None,
        stop: int | None = None,
        *,
        verify: Verify = "always",
    ) -> NDArray[Any]:
        """Return one record's field, or steps `start:stop` of its axis 0, verified.

        Returns:
            A fresh array; bfloat16 as its bits in uint16, a quantized field as its bits in int8 (its scales
            are the field `<field>.scale`).
        Raises:
            CorruptError: A block sum differs; names shard, field and sample.
            RecordError: `start:stop` is not within the record.
        """
        return self.fields[field].read(row, start, stop, verify)

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
        self.fields[field].read_into(row, start, stop, out, verify)

    def verify_column(self, field: str, sink: ColumnSink | None = None) -> None:
        """Check a complete column against its digest, reading it in pieces.

        Args:
            field: Which.
            sink: Takes the bytes, which may be used only if this returns.
        Raises:
            CorruptError: It differs; names the damaged samples.
        """
        digest, left = self._digest(field, sink), REFETCHES
        while digest != self.facts.digests.get(field) and left and self._refetch(field):
            digest, left = self._digest(field, sink), left - 1
        if digest != self.facts.digests.get(field):
            rows = self._bad_rows(field) or range(self.rows)
            bad = [int(self._numbers[row]) + self._offset for row in rows]
            raise self._bytes.corrupt(
                f"{self._path}: field {field!r} does not match its digest; damaged samples: "
                f"{format_few(bad, 10)}"
            )

    def _refetch(self, field: str) -> bool:
        """Have a column fetched again where it can be."""
        return self.file.refetch(self.columns[field].offset, self.columns[field].nbytes)

    def _digest(self, field: str, sink: ColumnSink | None) -> str:
        """Return the digest of a column as it is, handed to `sink` on the way."""
        column = self.columns[field]
        digest = xxhash.xxh3_128()
        scratch = memoryview(bytearray(min(PIECE_BYTES, column.nbytes))) if sink is None else None
        most = PIECE_BYTES if sink is None else sink.piece_bytes
        for begin in range(0, column.nbytes, most):
            size = min(most, column.nbytes - begin)
            self._announce(column.offset, begin, column.nbytes, most)
            piece = scratch[:size] if scratch is not None else cast(ColumnSink, sink).room(begin, size)
            self._bytes.read(column.offset + begin, piece, field)
            digest.update(piece)
            if sink is not None:
                sink.filled(begin, size)
        return digest.hexdigest()

    def _announce(self, offset: int, begin: int, size: int, piece: int) -> None:
        """Have the system read ahead of piece `begin` of a column; it may have been told not to do so."""
        ahead = max(AHEAD_BYTES, 2 * piece)
        first = begin + ahead - piece if begin else 0
        count = min(begin + ahead, size) - first
        if count > 0:
            self.file.prefetch(offset + first, count)

    def damage(self, field: str) -> dict[int, str]:
        """Return the damaged rows of a column, each with why; all if only its digest differs."""
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
            self.file.read_into(offset, memoryview(pad))
            if any(pad):
                raise CorruptError(
                    f"{self._path}: padding at byte {offset} is not zero. No record is affected"
                )

    def advice(self, offset: int, size: int) -> tuple[int, int, int]:
        """Return descriptor, offset and size in the file of some bytes of a column, for `posix_fadvise`."""
        if isinstance(self.file, CompressedFile):
            return self.file.advice(offset, size)
        return self.file.fileno(), offset, size

    def stored_extents(
        self, begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where bytes `begin:end` of the ordinary shard are in the file, each an array."""
        if isinstance(self.file, CompressedFile):
            return self.file.stored_extents(begin, end)
        return begin, end

    def fileno(self) -> int:
        """Return the descriptor, for mapping columns; stays open as long as the shard."""
        return self.file.fileno()


# ----------------------------------------------------------------------------------------------------------
# The shards that a process has open: up to a limit over all caches, and what it knows of the others.
#
# The descriptors of a process are few (often 1,024) and belong to all code in it, so caches share a part
# of them equally, and opening a shard closes those that were not used for longest. A shard in use stays
# open: it is closed when nothing refers to it.


MOST_OPEN = 1024
"""Shards kept open by all caches of a process; more do not make anything quicker."""
FACTS_BYTES = 256 * MIB
"""Memory for what is known of shards, over all caches of a process."""

_living: dict[int, weakref.ref[OpenShards]] = {}
"""Of this process, by identity. Changed by single operations of a dict, which need no lock."""


def most_open() -> int:
    """Return the shards that a process keeps open: a quarter of the descriptors it may have.

    Another quarter is for those in use and the rest for workers, sockets and the user.
    """
    return max(4, min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class OpenShards:
    """Shards of one cache by their place in its index. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._facts: OrderedDict[int, ShardFacts] = OrderedDict()
        self._facts_bytes = 0

    def get(self, i: int, opening: Callable[[ShardFacts | None], Shard]) -> Shard:
        """Return shard `i`, open.

        Args:
            opening: Opens it, given what is known of it. Several threads may do so at a time.
        Raises:
            ResourceError: The process may not open another file, even with all shards closed.
        """
        with self._lock:
            shard = self._open.get(i)
            if shard is not None:
                self._open.move_to_end(i)
                return shard
            facts = self._facts.get(i)
        if id(self) not in _living:
            self._join()
        fresh = self._opened(opening, facts)
        with self._lock:
            shard = self._open.setdefault(i, fresh)
            self._open.move_to_end(i)
            self._keep(i, shard.facts)
        self.trim(most_open() // max(1, len(_living)))
        return shard

    def trim(self, most: int) -> None:
        """Refer to `most` shards at most, those used last."""
        with self._lock:
            while len(self._open) > most:
                self._open.popitem(last=False)

    def _join(self) -> None:
        """Become one of those that share the descriptors; the others make room."""
        own = id(self)
        _living[own] = weakref.ref(self, lambda _: _living.pop(own, None))
        everybody = list(_living.values())
        for other in everybody:
            if (shards := other()) is not None:
                shards.trim(most_open() // len(everybody))

    def _opened(self, opening: Callable[[ShardFacts | None], Shard], facts: ShardFacts | None) -> Shard:
        try:
            return opening(facts)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        for other in list(_living.values()):  # the process has used more than its part: give all of ours back
            if (shards := other()) is not None:
                shards.trim(0)
        try:
            return opening(facts)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ResourceError(
                f"a shard cannot be opened: the process has all of its {allowed} file descriptors open, and "
                "next to none of them are shards",
                hint=f"Allow more (ulimit -n {4 * allowed}), or close files",
            ) from error

    def _keep(self, i: int, facts: ShardFacts) -> None:
        """Remember what a shard said of itself, and forget the oldest of that where it takes too much."""
        if i not in self._facts:
            self._facts_bytes += facts.nbytes
        self._facts[i] = facts
        self._facts.move_to_end(i)
        while self._facts_bytes > FACTS_BYTES // max(1, len(_living)) and len(self._facts) > 1:
            self._facts_bytes -= self._facts.popitem(last=False)[1].nbytes


# ----------------------------------------------------------------------------------------------------------
# Where the records of ragged fields begin, over many shards: the shards alone know, so each is opened.


FEW_SHARDS = 8
"""Fewer are read one after another: they take less time than the threads would."""


def offsets_in(
    opened: Callable[[int], Shard], shards: Sequence[int], field: str, *, where: str
) -> Iterator[NDArray[np.int64]]:
    """Return the offsets of a ragged field in each of some shards, in their order; see `Shard.offsets`.

    Args:
        opened: Gives a shard by its place in the index, as `Cache.shard`.
        shards: Which.
        field: A ragged one.
        where: Names the cache.
    Raises:
        CorruptError: A shard is damaged.
        StalledError: One was not opened in time.
    """

    def read(shard: int) -> NDArray[np.int64]:
        return opened(shard).offsets(field)

    return map_shards(read, shards, what=f"opening the shards of {where}")


def map_shards(work: Callable[[T], R], shards: Sequence[T], *, what: str) -> Iterator[R]:
    """Yield what `work` makes of each shard, in their order; in threads where that pays."""
    if len(shards) < FEW_SHARDS:
        return map(work, shards)
    return map_in_order(work, shards, what=what)
