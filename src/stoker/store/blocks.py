"""Blocks of one field of a shard: where its records' steps lie, and whether bytes match their sums.

Everything here runs for each record that is served from disk, and holds the interpreter's lock while it does.
So sums and seeds are looked up as plain integers in the arrays that the shard came with: a check costs little
more than the hashes themselves.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import FormatError, RecordError
from stoker.schema import Field
from stoker.store import layout
from stoker.store.sums import match

Verify: TypeAlias = Literal["always", "first", "off"]
"""When bytes are compared with their sums: at each read, at a block's first since opening (and since it was
fetched, where bytes come from elsewhere), or never."""


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
        self._steps = layout.rows_per_block(field)
        self._bytes = self._steps * field.row_bytes
        self._length = 0 if field.ragged else layout.axis_length(field)
        self._each = 0 if field.ragged else layout.block_count(field, self._length)
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
        self._seen: dict[object, bytearray] = {}
        """For `verify="first"`: 1 for each block that was found right, in the file's present generation."""

    def length(self, row: int) -> int:
        """Steps along axis 0 of one record; 1 for a scalar."""
        if self._offsets is None:
            return self._length
        return self._offsets[row + 1] - self._offsets[row]

    def place(self, row: int, step: int = 0) -> int:
        """Offset in the file of a step of a record."""
        before = row * self._length if self._offsets is None else self._offsets[row]
        return self._begin + (before + step) * self.step_bytes

    def cover(self, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """The whole blocks that hold steps `start:stop`, or just these where their sums are not wanted.

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
        """Whether a record's bytes from step `low` on are what was stored.

        Args:
            row: Which record.
            low: Starts a block, unless no sum is wanted.
            data: Whole blocks, format `B`.
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
        """Whether these steps are served without a look at their sums."""
        if verify != "first":
            return verify == "off"
        if (seen := self._seen.get(None)) is None:
            return False
        first = row * self._each if self._firsts is None else self._firsts[row]
        return 0 not in seen[first + start // self._steps : first - (-stop // self._steps)]
