"""What one thread of the disk tier reads: its piece of a batch, each example into its place.

First all that the page cache has is copied, for which nothing waits. What it lacks is announced to the system
before the first of it is read, so that more reads are under way than there are threads. Compiled code reads
what it can (`RecordReads`); the rest is read one by one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import native
from stoker.loader.choose import ChosenRows, Taken
from stoker.loader.chunks import RECORD
from stoker.loader.outputs import OutputSpec, StepRun, plan_runs
from stoker.loader.tiers import bytes_of
from stoker.store.format import rows_per_block
from stoker.store.shard import most_open
from stoker.units import KIB

if TYPE_CHECKING:
    from stoker.schema import Schema
    from stoker.store import Cache, Shard
    from stoker.store.shard import Verify

# First all that the page cache has is read, for which nothing waits; then the rest, announced before.
PASSES = (os.RWF_NOWAIT, 0) if hasattr(os, "RWF_NOWAIT") else (0,)


class RecordReads:
    """Records to be read.

    Args:
        shards: The shards that they are in.
        own: Place of each record's shard among them, `(n,)`.
        rows: Their rows there, `(n,)`.
        field: The field.
    """

    def __init__(
        self, shards: Sequence[Shard], own: NDArray[np.intp], rows: NDArray[np.int64], field: str
    ) -> None:
        self._shards, self._own = shards, own
        places = [shard.fields[field].record_places for shard in shards]
        self._fds_of = [shard.file.direct_fd for shard in shards]
        self._block_bytes = places[0].block_bytes
        table = np.array([place[:6] for place in places], np.int64)[own]
        self._fds = np.array(self._fds_of, np.int32)[own]
        self._begins, self.sizes = table[:, 0] + rows * table[:, 1], table[:, 1]
        self._seeds, self._sums = table[:, 3] + 8 * rows, table[:, 4] + 8 * table[:, 5] * rows
        self._generations: dict[int, object] = {}
        self.may: NDArray[np.bool_] = self._fds >= 0
        """Which can be read here, `(n,)`."""
        for number, place in enumerate(places):
            if place.offsets is None or place.firsts is None:
                continue
            of_shard = np.flatnonzero(own == number)
            first, last = place.offsets[rows[of_shard]], place.offsets[rows[of_shard] + 1]
            self._begins[of_shard] = place.begin + first * place.unit_bytes
            self.sizes[of_shard] = (last - first) * place.unit_bytes
            self._sums[of_shard] = place.sums + 8 * place.firsts[rows[of_shard]]

    def cut(self, first: NDArray[np.int64], stop: NDArray[np.int64], *, check: bool) -> NDArray[np.int64]:
        """Read bytes `first:stop` of each record only, or, to check them, the blocks that they are in.

        Args:
            first, stop: Bytes of the records, `(n,)`; what a record does not have cannot be read here.
            check: As `read` will be told.

        Returns:
            The first byte that is read of each.
        """
        self.may &= (first >= 0) & (stop <= self.sizes)
        unit = self._block_bytes if check else 1
        low = first // unit * unit
        high = np.minimum(-(-stop // unit) * unit, self.sizes)
        self._begins += low
        self._sums += 8 * (low // self._block_bytes)
        self.sizes = np.maximum(high - low, 0)
        return low

    def look(self) -> None:
        """Note which of what is to be read is here, where shards are fetched."""
        for number, shard in enumerate(self._shards):
            generation = shard.file.generation if self._fds_of[number] >= 0 else None
            if generation is not None:
                of_shard = np.flatnonzero(self._own == number)
                self._generations[number] = generation
                begins = self._begins[of_shard]
                self.may[of_shard] &= shard.file.here(begins, begins + self.sizes[of_shard])

    def read(self, outs: NDArray[np.int64], *, check: bool) -> tuple[NDArray[np.bool_], int]:
        """Read those that can be into memory at these addresses. Call `look` before.

        Args:
            outs: Room for each record, `(n,)`.
            check: Whether to compare them with their sums.

        Returns:
            Which are there and right, `(n,)`, and how many were waited for.
        """
        done, waited = np.zeros(len(outs), np.bool_), 0
        every = native.Extents(self._fds, self._begins, self.sizes, outs, self._seeds, self._sums)
        for flags in PASSES:
            left = np.flatnonzero(self.may & ~done)
            if not len(left):
                break
            some = every.take(left)
            if not flags:
                native.announce(some)
                waited = len(left)
            done[left] = native.read_records(some, self._block_bytes, check=check, flags=flags) == native.READ
        for number, generation in self._generations.items():
            if self._shards[number].file.generation != generation:  # bytes may have gone meanwhile
                done[self._own == number] = False
        return done, waited


ADVISED = hasattr(os, "posix_fadvise")
"""True if the system can be told what is about to be read."""
ALONE_FROM_BYTES = 64 * KIB
"""Reads from this size on are cheap enough one by one. What the system reads beyond them, guessing from what
is in the page cache around them, made batches up to twice as long.

Source: docs/design/026-plan-against-measured.md.
"""
SCRATCH_BYTES = 8192 * KIB
"""Bytes of blocks that are held together to take steps out of them."""
JOINED_BYTES = 256 * KIB
"""Most bytes to read in one call from records next to each other on disk.

The bytes are then still in the core's cache when they are compared with their checksums.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Some examples and where their values belong."""

    shard: NDArray[np.int32]
    row: NDArray[np.int32]
    starts: NDArray[np.int64]
    """Per example of the batch its shard, its row there, and its first step."""
    values: list[Any]
    """Per output a CPU tensor, or a list to be filled with tensors."""
    spaces: list[memoryview[Any] | None]
    """The bytes of the tensors; None for lists."""
    cuts: Mapping[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = dataclass_field(
        default_factory=dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
    )
    """By output that takes some rows of a ragged field: per example the first of them, and how many."""
    chosen: Mapping[str, ChosenRows] = dataclass_field(default_factory=dict[str, "ChosenRows"])
    """What is chosen of the examples' records, by group."""


class RecordRead:
    """Whole records of one field that are neighbors on disk."""

    __slots__ = ("_bytes", "_field", "_first", "_name", "_outs", "_shard")

    def __init__(self, shard: Shard, field: str, first: int, out: memoryview[Any]) -> None:
        self._shard, self._field, self._first = shard, shard.fields[field], first
        self._outs, self._bytes = [out], len(out)
        self._name = field

    def took(self, row: int, out: memoryview[Any]) -> bool:
        """Have another row read into `out` as well, if it is the next one and there is room; whether so."""
        if row != self._first + len(self._outs) or self._bytes + len(out) > JOINED_BYTES:
            return False
        self._outs.append(out)
        self._bytes += len(out)
        return True

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """Read them, or without `wait` only if the page cache has them; whether that was done.

        Raises:
            CorruptError: They do not match their sums.
        """
        if not wait or self._bytes <= JOINED_BYTES or self._shard.fileno() < 0:
            return self._field.rows(self._first, self._outs, verify, wait=wait)
        # A large record of a file here: the system reads ahead while a piece is compared.
        (out,) = self._outs
        length, block = self._field.length(self._first), rows_per_block(self._shard.columns[self._name].field)
        size = len(out) // length
        steps = max(1, JOINED_BYTES // size // block) * block
        for start in range(0, length, steps):
            stop = min(start + steps, length)
            self._field.read_into(self._first, start, stop, out[start * size : stop * size], verify)
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """Descriptor, offset and bytes of what is read."""
        offset, _ = self._field.extent(self._first, 0, 0, verify)
        return self._shard.advice(offset, self._bytes)


class StepRead:
    """Steps of one record that one example takes, for one output or several."""

    __slots__ = ("_first", "_place", "_row", "_run", "_shard", "_spaces")

    def __init__(
        self,
        shard: Shard,
        row: int,
        start: int,
        run: StepRun,
        spaces: list[memoryview[Any] | None],
        place: int,
    ) -> None:
        self._shard, self._row, self._first = shard, row, start + run.first
        self._run, self._spaces, self._place = run, spaces, place

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `RecordRead.read`."""
        run, first = self._run, self._first
        stop = first + run.stop - run.first
        data = self._shard.fields[run.field].steps(self._row, first, stop, verify, wait=wait)
        if data is None:
            return False
        for output, size, at, begin, count in run.targets:
            space = self._spaces[output]
            assert space is not None
            to = self._place * size + at
            space[to : to + count] = data[begin : begin + count]
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """As `RecordRead.extent`."""
        run, first = self._run, self._first
        stop = first + run.stop - run.first
        extent = self._shard.fields[run.field].extent(self._row, first, stop, verify)
        return self._shard.advice(*extent)


class RowsRead:
    """Rows of one record that are read together: no block of sums lies between two of them unread."""

    __slots__ = ("_field", "_out", "_row", "_rows", "_shard")

    def __init__(self, shard: Shard, field: str, row: int, rows: Sequence[int], out: memoryview[Any]) -> None:
        """`out`: the bytes of these rows, one after another."""
        self._shard, self._field, self._row, self._rows = shard, shard.fields[field], row, rows
        self._out = out

    def read(self, verify: Verify, *, wait: bool) -> bool:
        """As `RecordRead.read`."""
        rows, out, first = self._rows, self._out, self._rows[0]
        data = self._field.steps(self._row, first, rows[-1] + 1, verify, wait=wait)
        if data is None:
            return False
        if len(data) == len(out):
            out[:] = data
            return True
        size = len(out) // len(rows)
        for place, row in enumerate(rows):
            at = (row - first) * size
            out[place * size : (place + 1) * size] = data[at : at + size]
        return True

    def extent(self, verify: Verify) -> tuple[int, int, int]:
        """As `RecordRead.extent`."""
        extent = self._field.extent(self._row, self._rows[0], self._rows[-1] + 1, verify)
        return self._shard.advice(*extent)


DiskRead: TypeAlias = RecordRead | StepRead | RowsRead


class PieceReader:
    """Reads pieces of batches of these outputs; safe to use from several threads."""

    def __init__(self, schema: Schema, outputs: tuple[OutputSpec, ...], threads: int) -> None:
        """`threads`: how many read at a time."""
        self._outputs = outputs
        self._whole = [i for i, output in enumerate(outputs) if output.index == RECORD]
        self._sizes = [output.example_bytes for output in outputs]
        self._runs = plan_runs(schema, outputs)
        self._step_bytes = {run.field: schema[run.field].row_bytes for run in self._runs}
        self._rooms = {
            run: max(
                1,
                (run.stop - run.first + 2 * rows_per_block(schema[run.field])) * schema[run.field].row_bytes,
            )
            for run in self._runs
        }
        """Bytes that are read for an example at most: its steps, in complete blocks of sums."""
        runs = ((run.stop - run.first) * schema[run.field].row_bytes for run in self._runs)
        self._blocks = {
            i: rows_per_block(schema[output.field])
            for i, output in enumerate(outputs)
            if output.taken is Taken.ROWS and output.example_bytes
        }
        """By output of chosen rows how many rows share a sum."""
        most = max([0, *(self._sizes[i] for i in self._whole), *runs])
        self._alone = ADVISED and (most >= ALONE_FROM_BYTES or bool(self._blocks))
        # What all threads have open together is a part of what the process may have open.
        self._at_once = max(1, most_open() // threads)
        self._native = native.library() is not None
        self._kinds = len(self._whole) + len(self._runs)
        """Reads for each example, but for those of chosen rows."""
        self._told: weakref.WeakSet[Shard] = weakref.WeakSet()
        """Shards of which nothing is read on by the system."""

    def read(self, cache: Cache, piece: NDArray[np.int64], wanted: ReadRequest, verify: Verify) -> int:
        """Read the examples at these places of a batch, sorted by shard and row, into their outputs.

        Returns:
            How many reads had to wait for storage.
        Raises:
            CorruptError: A record's bytes do not match their checksums.
        """
        waited, begins = 0, np.flatnonzero(np.diff(wanted.shard[piece], prepend=-1))[:: self._at_once]
        for some in np.split(piece, begins[1:]):  # of few enough shards to have all of them open
            done: dict[int | StepRun, NDArray[np.bool_]] = {}
            if self._native and verify != "first":
                for i in self._whole:
                    if i not in wanted.cuts:
                        done[i], slow = self._read_together(cache, some, i, wanted, verify)
                        waited += slow
                for run in self._runs:
                    each = max(1, SCRATCH_BYTES // self._rooms[run])
                    parts = [some[at : at + each] for at in range(0, len(some), each)]
                    found = [self._read_steps(cache, part, run, wanted, verify) for part in parts]
                    done[run] = np.concatenate([there for there, _ in found])
                    waited += sum(slow for _, slow in found)
            if not self._blocks and len(done) == self._kinds and all(map(np.all, done.values())):
                continue
            reads = self._reads(cache, some, wanted, done)
            later = [read for read in reads if not read.read(verify, wait=False)]
            if ADVISED:
                for read in later:
                    with suppress(OSError):  # a file system that takes no advice is read all the same
                        os.posix_fadvise(*read.extent(verify), os.POSIX_FADV_WILLNEED)
            for read in later:
                read.read(verify, wait=True)
            waited += len(later)
        return waited

    def _read_together(
        self, cache: Cache, piece: NDArray[np.int64], i: int, wanted: ReadRequest, verify: Verify
    ) -> tuple[NDArray[np.bool_], int]:
        """Read records of output `i` in few calls, without the interpreter's lock.

        Returns:
            Which are there and right, and how many were waited for. The others are to be read one by one.
        """
        shards, own, rows = self._open(cache, piece, wanted)
        reads = RecordReads(shards, own, rows, self._outputs[i].field)
        reads.look()
        if not reads.may.any():
            return reads.may, 0
        if (space := wanted.spaces[i]) is None:
            for k, j in enumerate(piece.tolist()):
                self._place(shards[own[k]], i, int(rows[k]), wanted, j)
            outs = np.array([wanted.values[i][j].data_ptr() for j in piece.tolist()], np.int64)
        else:
            outs = np.frombuffer(space, np.uint8).ctypes.data + piece * self._sizes[i]
            reads.may &= reads.sizes == self._sizes[i]  # no byte goes beyond a record's room
        return reads.read(outs, check=verify != "off")

    def _read_steps(
        self, cache: Cache, piece: NDArray[np.int64], run: StepRun, wanted: ReadRequest, verify: Verify
    ) -> tuple[NDArray[np.bool_], int]:
        """Do the same with the steps that a run takes."""
        shards, own, rows = self._open(cache, piece, wanted)
        reads, size = RecordReads(shards, own, rows, run.field), self._step_bytes[run.field]
        first = (wanted.starts[piece] + run.first) * size
        low = reads.cut(first, first + (run.stop - run.first) * size, check=verify != "off")
        reads.look()
        if not reads.may.any():
            return reads.may, 0
        room = int(reads.sizes.max())
        scratch = np.empty(len(piece) * room, np.uint8)
        begins = scratch.ctypes.data + np.arange(len(piece)) * room
        done, waited = reads.read(begins, check=verify != "off")
        begins += first - low
        for output, each, at, begin, count in run.targets:
            space = wanted.spaces[output]
            assert space is not None
            targets = np.frombuffer(space, np.uint8).ctypes.data + piece * each + at
            native.copy(begins[done] + begin, targets[done], count)
        return done, waited

    def _open(
        self, cache: Cache, piece: NDArray[np.int64], wanted: ReadRequest
    ) -> tuple[list[Shard], NDArray[np.intp], NDArray[np.int64]]:
        """Return the shards of these examples, the place of each one's among them, and its row there."""
        numbers, own = np.unique(wanted.shard[piece], return_inverse=True)
        shards = [cache.shard(number) for number in numbers.tolist()]
        for shard in shards:
            self._tell(shard)
        return shards, own, wanted.row[piece].astype(np.int64)

    def _tell(self, shard: Shard) -> None:
        """Have the system read nothing on of a shard whose records are large."""
        if self._alone and shard not in self._told:
            self._told.add(shard)
            with suppress(OSError):
                os.posix_fadvise(shard.advice(0, 0)[0], 0, 0, os.POSIX_FADV_RANDOM)

    def _reads(
        self,
        cache: Cache,
        piece: NDArray[np.int64],
        wanted: ReadRequest,
        done: Mapping[int | StepRun, NDArray[np.bool_]],
    ) -> list[DiskRead]:
        """Return what reads the examples at these places, but for the outputs that are `done`."""
        shards = wanted.shard[piece].tolist()
        rows, starts = wanted.row[piece].tolist(), wanted.starts[piece].tolist()
        found: list[DiskRead] = []
        shard, last = None, -1
        open_rows: dict[int, RecordRead] = {}
        for k, (j, number, row, start) in enumerate(zip(piece.tolist(), shards, rows, starts, strict=True)):
            if shard is None or number != last:
                shard, last = cache.shard(number), number
                open_rows.clear()
                self._tell(shard)
            for i in self._whole:
                if i in done and done[i][k]:
                    continue
                if i in wanted.cuts:
                    found.append(self._cut(shard, i, row, wanted, j))
                    continue
                out = self._place(shard, i, row, wanted, j)
                if i not in open_rows or not open_rows[i].took(row, out):
                    open_rows[i] = RecordRead(shard, self._outputs[i].field, row, out)
                    found.append(open_rows[i])
            found += [
                StepRead(shard, row, start, run, wanted.spaces, j)
                for run in self._runs
                if run not in done or not done[run][k]
            ]
            for i in self._blocks:
                found += self._rows(shard, i, row, wanted, j)
        return found

    def _cut(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> StepRead:
        """Return what reads the rows that the batch's example `j` takes of output `i`."""
        output, (first, count) = self._outputs[i], (int(values[j]) for values in wanted.cuts[i])
        wanted.values[i][j] = torch.empty((count, *output.row_shape), dtype=output.dtype, device="cpu")
        space = bytes_of(wanted.values[i][j])
        run = StepRun(field=output.field, first=0, stop=count, targets=((0, 0, 0, 0, len(space)),))
        return StepRead(shard, row, first, run, [space], 0)

    def _rows(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> Iterator[RowsRead]:
        """Yield what reads the rows that are chosen of the batch's example `j` for output `i`."""
        output, space, chosen = self._outputs[i], wanted.spaces[i], wanted.chosen[self._outputs[i].group]
        assert space is not None
        rows, begin = chosen.rows[j, : chosen.lengths[j]], j * self._sizes[i]
        size = self._sizes[i] // chosen.rows.shape[1]
        cuts = np.flatnonzero(np.diff(rows // self._blocks[i]) > 1) + 1
        numbers = rows.tolist()
        for first, stop in pairwise((0, *cuts.tolist(), len(numbers))):
            if first < stop:
                out = space[begin + first * size : begin + stop * size]
                yield RowsRead(shard, output.field, row, numbers[first:stop], out)

    def _place(self, shard: Shard, i: int, row: int, wanted: ReadRequest, j: int) -> memoryview[Any]:
        """Return where output `i` of the batch's example `j` belongs, which is a record."""
        output, space = self._outputs[i], wanted.spaces[i]
        if space is not None:
            size = self._sizes[i]
            return space[j * size : (j + 1) * size]
        shape = (shard.length(output.field, row), *output.row_shape)
        wanted.values[i][j] = torch.empty(shape, dtype=output.dtype, device="cpu")
        return bytes_of(wanted.values[i][j])
