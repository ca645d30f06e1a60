"""Read records of one field of a shard, each compared with its sums as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, RecordError
from stoker.schema import Field, numpy_dtype
from stoker.store.blocks import Blocks, Verify
from stoker.store.protocols import OpenFile

MENDS = 2
"""Times that bytes which do not match their sums are fetched again, where they come from elsewhere."""


class ShardFile:
    """The file of a shard; errors name it, the field and the sample.

    Args:
        file: The open file.
        path: Where it lies.
        numbers: Part-local number of each row's sample.
        offset: Global number of the part's first sample.
    """

    def __init__(self, file: OpenFile, path: Path, numbers: NDArray[np.int64], offset: int) -> None:
        self.file, self.path, self._numbers, self._offset = file, path, numbers, offset

    def where(self, field: str, row: int | None) -> str:
        """Names a field, or a record of it."""
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
        """The error for damaged records."""
        folder = self.path.parent
        if (origin := self.file.origin) is not None:
            fact = f"{fact} (it was fetched again from {origin}, and is no better)"
        return CorruptError(fact, advice=repair_advice(folder), shard=self.path.name, folder=folder)


class FieldReader:
    """Reads one field; safe to use from several threads.

    `wait=False` reads only what the page cache has: the answer is False or None where it lacks some.
    """

    def __init__(self, name: str, field: Field, blocks: Blocks, file: ShardFile) -> None:
        self._name, self._field, self._blocks, self._file = name, field, blocks, file
        self.length = blocks.length

    def read(self, row: int, start: int | None, stop: int | None, verify: Verify) -> NDArray[Any]:
        """One record, or steps `start:stop` of its axis 0, in a fresh array; see `Shard.read`."""
        begin, end = 0 if start is None else start, self.length(row) if stop is None else stop
        data = cast("memoryview[Any]", self.steps(row, begin, end, verify))
        values: NDArray[Any] = np.asarray(data).view(numpy_dtype(self._field.dtype))
        return values.reshape((end - begin, *self._field.shape[1:]) if self._field.shape else ())

    def steps(
        self, row: int, start: int, stop: int, verify: Verify, *, wait: bool = True
    ) -> memoryview[Any] | None:
        """The bytes of steps `start:stop` of a record, in memory of their own, format `B`.

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
        """The same into `out`, without a copy where `start:stop` is whole blocks."""
        blocks = self._blocks
        if len(out) != (stop - start) * blocks.step_bytes:
            raise self._unfit(out, row, stop - start)
        if self._cover(row, start, stop, verify) == (start, stop):
            self._fill(row, start, [out], verify, wait=True)
        else:
            out[:] = cast("memoryview[Any]", self.steps(row, start, stop, verify))

    def rows(self, first: int, outs: Sequence[memoryview[Any]], verify: Verify, *, wait: bool = True) -> bool:
        """Whole records from row `first` on, each into a buffer of its own, in one read where nothing waits.

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
        """Offset in the file and bytes of what is read for steps `start:stop` of a record."""
        low, high = self._cover(row, start, stop, verify)
        return self._blocks.place(row, low), (high - low) * self._blocks.step_bytes

    def _fill(self, row: int, low: int, outs: Sequence[memoryview[Any]], verify: Verify, wait: bool) -> bool:
        """Fill `outs` with what lies together from step `low` of `row` on: whole blocks where sums are
        wanted, a buffer for each record. Each is checked while it is still in the core's cache.
        """
        blocks, file = self._blocks, self._file
        offset, generation = blocks.place(row, low), file.file.generation
        if not wait and not file.file.read_cached(offset, outs):
            return False
        for own, out in enumerate(outs, row):
            if wait:
                file.read(offset, out, self._name, own)
            right, mends = self._right(own, low, out, verify, generation), MENDS
            while not right and mends and file.file.mend(offset, len(out)):
                generation = file.file.generation
                file.read(offset, out, self._name, own)
                right, mends = self._right(own, low, out, verify, generation), mends - 1
            offset += len(out)
            if not right:
                raise file.corrupt(f"{file.where(self._name, own)} does not match its checksum")
        return True

    def _cover(self, row: int, start: int, stop: int, verify: Verify) -> tuple[int, int]:
        """As `Blocks.cover`; whole blocks where they may be fetched again before they are read."""
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
    """What to do about damaged records. Precompute reads none, so a repair has to tell it."""
    return (
        f"`stoker verify {folder} --repair` sets aside all that is damaged, and precompute "
        "then encodes it again, and only that"
    )
