"""Shared memory for samples and records, and the batches in it.

An arena is a fixed piece of it, cut into slots. Each worker has one of its own: when a worker is killed in
the middle of a read, the kernel may still be copying into its slots. Such a slot must not belong to its
replacement. A memfd has no name, so nothing outlives the processes that hold it.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import EncoderError, ResourceError
from stoker.schema import Json, Sample, Schema, numpy_dtype, schema_from_json, schema_to_json

# ----------------------------------------------------------------------------------------------------------
# How samples lie in the arena: arithmetic on shapes and a budget, no memory is touched here.
#
# Three ways for a sample to cross from a worker:
#
# - `group`: a slot is one encoder call, members stacked, so the encoder reads the slot itself and nothing is
#   copied in between;
# - `steps`: the encoder takes long samples a chunk of time steps at a time; a slot is a few whole chunks;
# - `pieces`: the length is not known beforehand (ragged), or a group is larger than the budget allows twice;
#   a slot carries bytes, and the caller puts the group together in memory of its own.


Mode: TypeAlias = Literal["group", "steps", "pieces"]

ALIGNMENT = 4096
"""Every field starts on a page, in each mode: vector kernels may round otherwise by alignment."""

PIECE_BYTES = 64 * 1024**2
"""Largest single read along time, so that a long sample makes visible progress."""

_MIN_PIECE_SLOT = 1024**2
_SMALL_ARENA = 16 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One worker's arena."""

    schema: Schema
    """Fields of a sample."""
    mode: Mode
    """See the module."""
    samples: int
    """Members of a group."""
    steps: int
    """Rows of a slot along time in mode `steps`, a multiple of the encoder's chunk; 0 in the other modes."""
    slots: int
    """Slots of the arena."""
    slot_bytes: int
    """Bytes of one slot, a multiple of `ALIGNMENT`."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self.slots * self.slot_bytes

    @property
    def flight_bytes(self) -> int:
        """Bytes that one worker may hold in flight, with the group that the caller puts together."""
        if self.mode != "pieces" or any(field.ragged for field in self.schema.values()):
            return self.arena_bytes
        return self.arena_bytes + slot_size(self.schema, self.samples)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field's array in a slot: `(samples, *shape)`, time cut to `steps` rows."""
        return {
            name: (self.samples, *_cut(field.shape, self.steps if field.time else 0))
            for name, field in self.schema.items()
        }

    def to_json(self) -> dict[str, Json]:
        """For the worker; the inverse of `layout_from_json`."""
        return {
            "schema": schema_to_json(self.schema),
            "mode": self.mode,
            "numbers": [self.samples, self.steps, self.slots, self.slot_bytes],
        }


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    """Read what `Layout.to_json` wrote."""
    samples, steps, slots, slot_bytes = data["numbers"]
    return Layout(
        schema=schema_from_json(data["schema"]),
        mode=data["mode"],
        samples=samples,
        steps=steps,
        slots=slots,
        slot_bytes=slot_bytes,
    )


def _cut(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return (rows, *shape[1:]) if rows else shape


def align(size: int) -> int:
    """`size` rounded up to `ALIGNMENT`.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def slot_size(schema: Schema, samples: int, steps: int = 0) -> int:
    """Return the bytes of `samples` samples, each field aligned; time fields cut to `steps` rows if given."""
    return sum(
        align(samples * (field.size_bytes(steps) if steps and field.time else field.size_bytes()))
        for field in schema.values()
    )


def time_length(schema: Schema) -> int:
    """Return the rows along time that all time fields share; 0 if these differ, are ragged or missing."""
    lengths = {field.shape[0] if not field.ragged else 0 for field in schema.values() if field.time}
    return lengths.pop() if len(lengths) == 1 else 0


def plan_layout(schema: Schema, samples: int, steps: int | None, memory_bytes: int) -> Layout:
    """Choose mode, slots and slot size for one worker.

    Args:
        schema: Fields of a sample.
        samples, steps: The encoder's group.
        memory_bytes: What one arena may take. A single group (or chunk) is allowed to be larger.

    Raises:
        EncoderError: `steps` is given, but the time fields differ in length.
    """
    ragged = any(field.ragged for field in schema.values())
    if steps is not None and not ragged:
        return _steps_layout(schema, steps, memory_bytes)
    whole = 0 if ragged else slot_size(schema, samples)
    if ragged or 2 * whole > memory_bytes:
        slot_bytes = align(max(_MIN_PIECE_SLOT, min(PIECE_BYTES, memory_bytes // 4)))
        return Layout(schema=schema, mode="pieces", samples=samples, steps=0, slots=2, slot_bytes=slot_bytes)
    most = max(2, min(8, memory_bytes // max(whole, 1)))
    slots = min(most, max(3, _SMALL_ARENA // max(whole, 1)))
    slot_bytes = max(whole, ALIGNMENT)
    return Layout(schema=schema, mode="group", samples=samples, steps=0, slots=slots, slot_bytes=slot_bytes)


def _steps_layout(schema: Schema, steps: int, memory_bytes: int) -> Layout:
    length = time_length(schema)
    if not length:
        raise EncoderError(
            f"the encoder takes {steps} time steps at a time, but the time fields have no common length: "
            f"{ {name: f.shape for name, f in schema.items() if f.time} }",
            hint="Give it samples with one time axis",
        )
    chunks = -(-length // steps)
    per_chunk = max(1, slot_size(schema, 1, steps))
    held = max(1, min(chunks, min(memory_bytes // 3, PIECE_BYTES) // per_chunk))
    slot_bytes = max(ALIGNMENT, slot_size(schema, 1, held * steps))
    return Layout(schema=schema, mode="steps", samples=1, steps=held * steps, slots=3, slot_bytes=slot_bytes)


class Arena:
    """Slots of one worker. `fd` is inherited by the worker, which maps the same bytes."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self.layout = layout
        self._map = mmap.mmap(fd, layout.arena_bytes)

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """Return a fresh arena, which takes no memory until `reserve`, or until it is written to."""
        fd = os.memfd_create("stoker-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, layout.arena_bytes)
            return cls(fd, layout)
        except OSError:
            os.close(fd)
            raise

    def reserve(self) -> None:
        """Take its memory now rather than by a fault in the middle of a run.

        Raises:
            ResourceError: There is not enough.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.layout.arena_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ResourceError(
                    f"no memory for a worker's arena of {self.layout.arena_bytes:,} bytes: {error.strerror}",
                    hint="Use fewer workers or a smaller memory_bytes",
                ) from error
            raise

    def slot(self, index: int) -> memoryview:
        """Return the bytes of one slot, writable."""
        size = self.layout.slot_bytes
        return memoryview(self._map)[index * size : (index + 1) * size]

    def arrays(self, index: int) -> Sample:
        """Return views of a slot by field (modes `group` and `steps`); shapes are `Layout.shapes()`."""
        return slot_arrays(self.slot(index), self.layout.schema, self.layout.shapes())

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last array that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def slot_arrays(memory: memoryview, schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Sample:
    """Return arrays of the given shapes one after another in `memory`, each on a page of its own."""
    arrays: Sample = {}
    offset = 0
    for name, shape in shapes.items():
        dtype = numpy_dtype(schema[name].dtype)
        count = math.prod(shape)
        array: NDArray[Any] = (
            np.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else (np.empty(0, dtype))
        )
        arrays[name] = array.reshape(shape)
        offset += align(array.nbytes)
    return arrays


def private_arrays(schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Sample:
    """Return zeroed arrays of this process alone, aligned as those in a slot."""
    return slot_arrays(memoryview(mmap.mmap(-1, _bytes_of(schema, shapes))), schema, shapes)


def _bytes_of(schema: Schema, shapes: dict[str, tuple[int, ...]]) -> int:
    size = sum(align(math.prod(shape) * schema[name].itemsize) for name, shape in shapes.items())
    return max(size, mmap.PAGESIZE)


_SIZES_KEPT = 8
"""Sizes for which `ReusedMemory` keeps memory: batches have one for each field, ragged records have many."""


class ReusedMemory:
    """Memory for batches, used again once no record is in it: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array of `size` bytes with any content. Its memory is used again once the array is gone.

        A memoryview or `torch.from_numpy` keeps the array. A numpy view does not: its base is the memory.
        """
        if size not in self._free and len(self._free) >= _SIZES_KEPT:
            self._free.clear()
        free = self._free.setdefault(size, [])
        room = free.pop() if free else np.empty(size, np.uint8)
        lent = room[:]
        weakref.finalize(lent, free.append, room).atexit = False
        return lent

    def arrays(self, schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Sample:
        """Return arrays of any content, each aligned as the first is."""
        memory: Any = self.take(_bytes_of(schema, shapes))
        return slot_arrays(memoryview(memory), schema, shapes)


# ----------------------------------------------------------------------------------------------------------
# Memory that two processes share and that grows with need: one fills it and says so, the other looks.
#
# A memfd, so that it has no name and goes with the last of them. Fields begin on a page each, as in an
# arena: kernels may round otherwise by alignment.


Shapes = Mapping[str, "tuple[int, ...]"]
"""Whole shapes of arrays by field."""


class SharedArrays:
    """One end of such memory; neither process may write it while the other still reads it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedArrays:
        """Return fresh memory, empty so far."""
        return cls(os.memfd_create("stoker-exchange", os.MFD_CLOEXEC))

    def arrays(self, schema: Schema, shapes: Shapes) -> Sample:
        """Return views of it by field, one after another; it is as large as they need afterwards.

        Raises:
            OSError: There is not so much memory.
        """
        sizes = (
            math.prod(shape) * numpy_dtype(schema[name].dtype).itemsize for name, shape in shapes.items()
        )
        size = max(mmap.PAGESIZE, sum(map(align, sizes)))
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, size)  # or memory that is short would end us by a signal later
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.fd, size)  # the one before goes with the last array that views it
        return slot_arrays(memoryview(self._map), schema, dict(shapes))

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# ----------------------------------------------------------------------------------------------------------
# What reaches the encoder: the arrays of a group, or of a stretch of time of it.


@dataclass(slots=True, kw_only=True)
class ReadTask:
    """One group that someone reads."""

    key: int
    """Place among the groups of this run."""
    part: int
    """Index of the part."""
    numbers: range
    """Its members; fewer than the group's size at a part's end."""
    avoid: int = -1
    """Worker that failed on it; another one is to try, where there is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """Arrays ready to be encoded."""

    work: ReadTask
    """The group they belong to."""
    arrays: Sample
    """`(samples, *shape)` by field; rows of members that are missing are zeros."""
    start: int = 0
    """First time step held; above 0 for later stretches of a long sample."""
    last: bool = True
    """Nothing of this group comes after it."""
    owned: bool = False
    """The memory is this batch's alone, and need not be copied to outlive it."""
    origin: Any = None
    """For the feed that made it: what to free on release."""
    over: bool = False
    """It holds nothing: no more of a sample will come of which stretches came before."""
    members: tuple[int, ...] = ()
    """Of samples gathered by length: the number in each row, -1: none. Empty: those of `work`, in order."""
    works: tuple[ReadTask, ...] = ()
    """The groups of `members`, of which `work` is the first. Their feed has its arrays back already."""

    @property
    def numbers(self) -> Sequence[int]:
        """Sample of each row; -1: none."""
        return self.members or self.work.numbers

    @property
    def empty_fields(self) -> list[str]:
        """Fields without any element: a text without a token, which is encoded alone."""
        return [name for name, array in self.arrays.items() if not array.size]

    @property
    def tasks(self) -> tuple[ReadTask, ...]:
        """Groups that are dealt with once this is encoded."""
        return self.works or (self.work,)

    @property
    def span(self) -> range:
        """From the first to the last sample, for messages."""
        known = [number for number in self.members if number >= 0]
        return range(min(known), max(known) + 1) if known else self.work.numbers

    @classmethod
    def end(cls, work: ReadTask) -> LoadedBatch:
        """Return a batch that says that a sample ended early: what is there of its record can go."""
        return cls(work=work, arrays={}, last=False, origin=(-1, -1), over=True)
