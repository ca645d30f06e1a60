"""Read one shard: every byte that leaves here has passed a checksum since it was read from the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.schema import Schema
from stoker.store.blocks import Verify
from stoker.store.compressed import CompressedFile, open_compressed
from stoker.store.field_read import MENDS, FieldReader, ShardFile
from stoker.store.protocols import ColumnSink, OpenFile
from stoker.store.shard_facts import ShardFacts, facts_of
from stoker.store.strict_json import read_strict
from stoker.units import MIB

PIECE_BYTES = MIB
"""Bytes read and hashed at a time: the piece is still in the core's cache when it is hashed."""
AHEAD_BYTES = 4 * MIB
"""Bytes of a column that the system is asked to read ahead of them."""


class Shard:
    """An open shard. Reads are positional, so several threads may share it; closed when unreferenced.

    Args:
        file: The open file; the shard takes it over.
        path: Where it lies, for messages.
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
        self._file, self._path, self._offset = file, path, offset
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
        """What the header says of the records.

        Args:
            what: `statistics`: partial ones by field; `error`: the largest of a conversion by field,
                `{"max", "rms"}`; `environment`: versions and hardware that made them.
        """
        return read_strict(self.facts.metadata[what].encode(), where=f"{what} of {self._path}")

    def numbers(self) -> NDArray[np.int64]:
        """Part-local sample numbers, one per row."""
        return self._numbers

    def offsets(self, field: str) -> NDArray[np.int64]:
        """Steps along axis 0 before each row of a ragged field, and their total: `(rows + 1,)`."""
        return self.facts.offsets[field]

    def length(self, field: str, row: int) -> int:
        """Steps along axis 0 of one record; 1 for a scalar."""
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
        """One record's field, or steps `start:stop` of its axis 0, verified.

        Returns:
            A fresh array; bfloat16 as its bits in uint16, a packed field as its bits in int8 (its scales are
            the field `<field>.scale`).
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
        """Check a whole column against its digest, reading it in pieces of at most `PIECE_BYTES`.

        Args:
            field: Which.
            sink: Takes the bytes, which may be used only if this returns.
        Raises:
            CorruptError: It differs; names the damaged samples.
        """
        digest, mends = self._digest(field, sink), MENDS
        while digest != self.facts.digests.get(field) and mends and self._mend(field):
            digest, mends = self._digest(field, sink), mends - 1
        if digest != self.facts.digests.get(field):
            rows = self._bad_rows(field) or range(self.rows)
            bad = [int(self._numbers[row]) + self._offset for row in rows]
            raise self._bytes.corrupt(
                f"{self._path}: field {field!r} does not match its digest; damaged samples: "
                f"{', '.join(map(str, bad[:10]))}{f' and {len(bad) - 10} more' if len(bad) > 10 else ''}"
            )

    def _mend(self, field: str) -> bool:
        """Have a column fetched anew where it can be."""
        return self._file.mend(self.columns[field].offset, self.columns[field].nbytes)

    def _digest(self, field: str, sink: ColumnSink | None) -> str:
        """The digest of a column as it is, handed to `sink` on the way."""
        column = self.columns[field]
        digest = xxhash.xxh3_128()
        scratch = memoryview(bytearray(min(PIECE_BYTES, column.nbytes))) if sink is None else None
        for begin in range(0, column.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, column.nbytes - begin)
            self._announce(column.offset, begin, column.nbytes)
            piece = scratch[:size] if scratch is not None else cast(ColumnSink, sink).room(begin, size)
            self._bytes.read(column.offset + begin, piece, field)
            digest.update(piece)
            if sink is not None:
                sink.filled(begin, size)
        return digest.hexdigest()

    def _announce(self, offset: int, begin: int, size: int) -> None:
        """Have the system read ahead of piece `begin` of a column: it may have been told not to by itself."""
        first = begin + AHEAD_BYTES - PIECE_BYTES if begin else 0
        count = min(begin + AHEAD_BYTES, size) - first
        if count > 0:
            self._file.ahead(offset + first, count)

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

    def advice(self, offset: int, size: int) -> tuple[int, int, int]:
        """Descriptor, offset and bytes of the file that hold some bytes of a column, for `posix_fadvise`."""
        if isinstance(self._file, CompressedFile):
            return self._file.advice(offset, size)
        return self._file.fileno(), offset, size

    def stored_extents(
        self, begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where bytes `begin:end` of the ordinary shard are in the file, each an array."""
        if isinstance(self._file, CompressedFile):
            return self._file.stored_extents(begin, end)
        return begin, end

    def fileno(self) -> int:
        """The descriptor, for mapping columns; stays open as long as the shard."""
        return self._file.fileno()
