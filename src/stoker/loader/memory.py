"""Records in memory: one tensor per field over all shards, and which shards are in it already.

`mapped.py` and `device.py` make these; gathering never asks which of the two it has. Rows are *virtual*:
shard `s` begins at row `base[s]` of every fixed field, and there may be unused rows between shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.places import Places
from stoker.schema import Field, Schema
from stoker.store.offsets import offsets_in
from stoker.store.shard_read import PIECE_BYTES

if TYPE_CHECKING:
    from stoker.store import Cache
    from stoker.store.protocols import ColumnSink


@dataclass(slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Memory:
    """What a tier in memory holds. Not to be shown: rows of shards that are not mapped are no memory."""

    tier: Literal["device", "host"]
    device: torch.device
    sources: Mapping[str, Tensor]
    """Per fixed field `(virtual rows, *shape)`; per ragged field its steps, `(virtual steps, *shape[1:])`."""
    rows: Any
    """Virtual row of each record that the loader serves, `(records,)` int64, numpy or on the device."""
    steps: Mapping[str, Any]
    """Per ragged field the first virtual step of each record, like `rows`."""
    load: Callable[[int], None]
    """`load(shard)` reads, verifies and places one shard. Called once per shard, and by several threads for
    different ones if need be.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    shards: frozenset[int]
    """The shards that there is room for. A host memory that is mapped has addresses for all of them."""
    private: float = 1.0
    """The part of its bytes that counts as taken by this process; what is mapped counts as free."""
    drop: Callable[[int], None] | None = None
    """`drop(shard)` lets go of one shard whose `ready` was taken back, at any time and from any thread: who
    still reads it gets the same bytes. None: only the memory as a whole can be let go of."""
    resident: Callable[[int], float] | None = None
    """`resident(shard)`: the part of it that the system has kept in memory, 0..1. None: all of it is."""
    ready: bytearray = field(default_factory=bytearray)
    """One byte per shard of the cache: 1 once it may be served from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the shards of a memory begin, in rows and, per ragged field, in steps."""

    rows: NDArray[np.int64]
    """Rows of each shard of the cache, `(shards,)`; 0 for those that are not to be held."""
    base: NDArray[np.int64]
    """First virtual row of each shard, and the total, `(shards + 1,)`."""
    steps: Mapping[str, NDArray[np.int64]]
    """Per ragged field: steps of each shard."""
    step_base: Mapping[str, NDArray[np.int64]]
    """Per ragged field: first virtual step of each shard, and the total."""

    def span(self, name: str) -> int:
        """Virtual rows (steps, for a ragged field) of a field over all shards."""
        return int(self.step_base.get(name, self.base)[-1])

    def part(self, name: str, shard: int) -> tuple[int, int]:
        """First virtual row and number of rows of one shard, in steps for a ragged field."""
        if name in self.steps:
            return int(self.step_base[name][shard]), int(self.steps[name][shard])
        return int(self.base[shard]), int(self.rows[shard])


def make_layout(
    cache: Cache, shards: frozenset[int], schema: Schema, row_align: int, step_align: Mapping[str, int]
) -> Layout:
    """Put the shards one after another, each beginning at a multiple of the alignment.

    Opens every shard only where a field is ragged, since its steps are in the shard alone.
    """
    count = len(cache.index.shards)
    rows = np.array([s.rows if i in shards else 0 for i, s in enumerate(cache.index.shards)], dtype=np.int64)
    steps: dict[str, NDArray[np.int64]] = {}
    for name in (name for name, f in schema.items() if f.ragged):
        steps[name], held = np.zeros(count, dtype=np.int64), sorted(shards)
        every = offsets_in(cache.shard, held, name, where=str(cache.path))
        steps[name][held] = [offsets[-1] for offsets in every]
    return Layout(
        rows=rows,
        base=aligned_starts(rows, row_align),
        steps=steps,
        step_base={name: aligned_starts(sizes, step_align.get(name, 1)) for name, sizes in steps.items()},
    )


def aligned_starts(sizes: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Starts of consecutive pieces, each a multiple of `align`; the last entry is the total.

    >>> aligned_starts(np.array([5, 8, 1]), 4).tolist()
    [0, 8, 16, 20]
    """
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(-(-sizes // align) * align, out=starts[1:])
    return starts


def read_column(cache: Cache, shard: int, name: str, sink: ColumnSink | None = None) -> None:
    """Read and verify one field of a shard, into `sink` if given, else only into the page cache.

    Rows that the index left out as damaged are neither checked nor served, nor given to `sink`.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    handle, bad = cache.shard(shard), set(cache.index.shards[shard].bad)
    if not bad:
        handle.verify_column(name, sink)
        return
    size, begin = handle.columns[name].field.row_bytes, 0
    for row in range(handle.rows):
        length = handle.length(name, row)
        if row not in bad:
            data = np.ascontiguousarray(handle.read(name, row)).reshape(-1).view(np.uint8).data
            for at in range(0, 0 if sink is None else len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                cast("ColumnSink", sink).room(begin + at, len(piece))[:] = piece
                cast("ColumnSink", sink).filled(begin + at, len(piece))
        begin += length * size


class Into:
    """Takes a column into memory that has room for all of it."""

    def __init__(self, out: Tensor) -> None:
        self._space = bytes_of(out)

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """The place where these bytes belong."""
        return self._space[offset : offset + size]

    def filled(self, offset: int, size: int) -> None:
        """Nothing is left to do."""


def record_rows(layout: Layout, places: Places) -> NDArray[np.int64]:
    """The virtual row of each served record."""
    return layout.base[places.shard] + places.row


def record_steps(cache: Cache, layout: Layout, places: Places, name: str) -> NDArray[np.int64]:
    """The first virtual step of each served record's ragged field; 0 for records held elsewhere."""
    found = np.zeros(len(places.numbers), dtype=np.int64)
    held = [(shard, own) for shard, own in places.by_shard() if layout.rows[shard]]
    every = offsets_in(cache.shard, [shard for shard, _ in held], name, where=str(cache.path))
    for offsets, (shard, own) in zip(every, held, strict=True):
        found[own] = layout.step_base[name][shard] + offsets[places.row[own]]
    return found


def torch_dtype(field: Field) -> torch.dtype:
    """The torch dtype that a stored field lies in memory as; packed ones as their bits in int8."""
    dtype = torch.int8 if field.packed else getattr(torch, field.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def unit_shape(field: Field) -> tuple[int, ...]:
    """Shape of one virtual row: a record, or one step of a ragged field."""
    return field.shape[1:] if field.ragged else field.shape


def unit_bytes(field: Field) -> int:
    """Bytes of one virtual row."""
    return field.row_bytes if field.ragged else field.size_bytes()


def bytes_of(tensor: Tensor) -> memoryview[Any]:
    """The memory of a contiguous CPU tensor, writable."""
    if not tensor.numel():
        return memoryview(bytearray())
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
