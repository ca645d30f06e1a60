"""Hold records in memory: one tensor per field over all shards, and which shards are in it already.

`map_host` and `allocate_on_device` make these; gathering never asks which of the two it has. Rows are
*virtual*: shard `s` begins at row `base[s]` of every fixed field, and rows between shards may be unused.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import StalledError, arg
from stoker.plan.resources import use_device
from stoker.runtime import libc
from stoker.store.access import MemorySink, read_column
from stoker.store.shard import offsets_in
from stoker.units import MIB, format_bytes

if TYPE_CHECKING:
    from stoker.loader.records import RecordTable
    from stoker.schema import Field, Schema
    from stoker.store import Cache, Shard


@dataclass(slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Memory:
    """Records that a tier holds in memory. No `repr`: rows of shards that are not mapped are absent."""

    tier: Literal["device", "host"]
    device: torch.device
    sources: Mapping[str, Tensor]
    """Per fixed field `(virtual rows, *shape)`; per ragged field its steps, `(virtual steps, *shape[1:])`."""
    rows: Any
    """Virtual row of each record that the loader serves, `(records,)` int64, numpy or on the device."""
    steps: Mapping[str, Any]
    """Per ragged field the first virtual step of each record, like `rows`."""
    host_steps: Mapping[str, NDArray[np.int64]]
    """The same in host memory."""
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
    still reads it gets the same bytes. None: only the memory as a whole can be released."""
    resident: Callable[[int], float] | None = None
    """`resident(shard)`: the part of it that the system has kept in memory, 0..1. None: all of it is."""
    ready: bytearray = field(default_factory=bytearray)
    """One byte per shard of the cache: 1 once it may be served from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """First row of each shard of a memory and, per ragged field, its first step."""

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
        """Return the first virtual row and number of rows of one shard, in steps for a ragged field."""
        if name in self.steps:
            return int(self.step_base[name][shard]), int(self.steps[name][shard])
        return int(self.base[shard]), int(self.rows[shard])


def make_layout(
    cache: Cache, shards: frozenset[int], schema: Schema, row_align: int, step_align: Mapping[str, int]
) -> MemoryLayout:
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
    return MemoryLayout(
        rows=rows,
        base=aligned_starts(rows, row_align),
        steps=steps,
        step_base={name: aligned_starts(sizes, step_align.get(name, 1)) for name, sizes in steps.items()},
    )


def aligned_starts(sizes: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Return the starts of consecutive pieces, each a multiple of `align`; the last entry is the total.

    >>> aligned_starts(np.array([5, 8, 1]), 4).tolist()
    [0, 8, 16, 20]
    """
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(-(-sizes // align) * align, out=starts[1:])
    return starts


def record_rows(layout: MemoryLayout, table: RecordTable) -> NDArray[np.int64]:
    """Return the virtual row of each served record."""
    return layout.base[table.shard] + table.row


def record_steps(cache: Cache, layout: MemoryLayout, table: RecordTable, name: str) -> NDArray[np.int64]:
    """Return the first virtual step of each served record's ragged field; 0 for records held elsewhere."""
    found = np.zeros(len(table.indices), dtype=np.int64)
    held = [(shard, own) for shard, own in table.by_shard() if layout.rows[shard]]
    every = offsets_in(cache.shard, [shard for shard, _ in held], name, where=str(cache.path))
    for offsets, (shard, own) in zip(every, held, strict=True):
        found[own] = layout.step_base[name][shard] + offsets[table.row[own]]
    return found


def torch_dtype(field: Field) -> torch.dtype:
    """Return the torch dtype of a stored field in memory; quantized ones as their bits in int8."""
    dtype = torch.int8 if field.quantized else getattr(torch, field.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def unit_shape(field: Field) -> tuple[int, ...]:
    """Return the shape of one virtual row: a record, or one step of a ragged field."""
    return field.shape[1:] if field.ragged else field.shape


def unit_bytes(field: Field) -> int:
    """Return the bytes of one virtual row."""
    return field.row_bytes if field.ragged else field.size_bytes()


def bytes_of(tensor: Tensor) -> memoryview[Any]:
    """Return the memory of a contiguous CPU tensor, writable."""
    if not tensor.numel():
        return memoryview(bytearray())
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


# ----------------------------------------------------------------------------------------------------------
# The host tier: every shard mapped read-only into one range of addresses, one copy per node.
#
# The columns of a field are page-aligned in their shards, so shards can be mapped side by side (`MAP_FIXED`
# over a reserved range) such that rows have the same pitch throughout: any number of shards of any size is
# served like one array. A shard begins at a virtual row whose address is a multiple of the page in every
# mapped field; the rows in between are never asked for. Bytes reach the page cache through positional reads
# that verify them; mapping comes after, so no unverified byte is served.
#
# A field that would need too much alignment, small next to the others, is copied; so is everything where
# mapping cannot work.


log = logging.getLogger("stoker")
PAGE = 4096
"""The alignment of columns in a shard. Pages of the machine must not be larger."""

MAX_MAPS = 30_000
"""Linux allows a process 65,530 maps by default; others need some too."""
MAX_RANGE_BYTES = 1 << 45
"""Addresses reserved per field at most, a quarter of what a process has."""
MAX_STRETCH = 2.0
"""A field beyond the largest is mapped only while unused virtual rows stay below this multiple."""

MOST_COPIED = 1 / 16
"""Largest part of the bytes that may be copied in a memory whose shards come and go one by one.

Their copies stay, since a thread may be reading them. With more of it, a memory is released at once.
"""

MADV_POPULATE_READ, MADV_DONTNEED = 22, 4
"""Linux's numbers, which the `mmap` module does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFields:
    """Fields whose files are mapped, and the alignment in rows that this takes."""

    fields: frozenset[str]
    row_align: int
    step_align: Mapping[str, int]


def map_host(cache: Cache, table: RecordTable, shards: frozenset[int], *, mapping: bool = True) -> Memory:
    """Lay out `shards` in memory; nothing is read yet except, for ragged fields, offsets.

    Where (nearly) all fields are mapped there are addresses for every shard that is served, and which of them
    are used may change.

    Args:
        mapping: False copies every field into memory of this process.
    """
    schema, reach = cache.recipe.columns, frozenset(table.shards())
    chosen = _choose_mapped(cache, schema, reach) if mapping else None
    movable = chosen is not None and _copied(schema, chosen.fields) <= MOST_COPIED
    if not movable:
        reach = shards
        chosen = _choose_mapped(cache, schema, reach) if mapping else None
    if chosen is None:
        chosen = MappedFields(fields=frozenset(), row_align=1, step_align={})
    layout = make_layout(cache, reach, schema, chosen.row_align, chosen.step_align)
    ranges: dict[str, AddressRange] = {}
    try:
        for name in chosen.fields:
            ranges[name] = AddressRange(layout.span(name) * unit_bytes(schema[name]))
    except OSError:  # the process may not have that many addresses (ulimit -v)
        return map_host(cache, table, shards, mapping=False)
    sources = {
        name: ranges[name].tensor(f) if name in ranges else _empty(f, layout.span(name))
        for name, f in schema.items()
    }
    held = HostShards(cache, layout, ranges, sources)
    steps = {name: record_steps(cache, layout, table, name) for name in layout.steps}
    return Memory(
        tier="host",
        device=torch.device("cpu"),
        sources=sources,
        rows=record_rows(layout, table),
        steps=steps,
        host_steps=steps,
        load=held.load,
        shards=reach,
        ready=bytearray(len(cache.index.shards)),
        private=_copied(schema, chosen.fields),
        drop=held.drop if movable else None,
        resident=held.resident if ranges else None,
    )


def _copied(schema: Schema, mapped: frozenset[str]) -> float:
    """Return the part of the bytes that is in copied fields, 0..1."""
    sizes = {name: unit_bytes(f) for name, f in schema.items()}
    return sum(size for name, size in sizes.items() if name not in mapped) / max(1, sum(sizes.values()))


def _empty(field: Field, span: int) -> Tensor:
    return torch.empty((span, *unit_shape(field)), dtype=torch_dtype(field), device="cpu")


class HostShards:
    """Brings shards into host memory, and lets go of them."""

    def __init__(
        self,
        cache: Cache,
        layout: MemoryLayout,
        ranges: Mapping[str, AddressRange],
        sources: Mapping[str, Tensor],
    ) -> None:
        """`ranges`: the addresses of mapped fields; `sources`: the memory of all."""
        self._cache, self._layout, self._ranges, self._sources = cache, layout, ranges, sources

    def load(self, shard: int) -> None:
        """As `Memory.load`."""
        for name, source in self._sources.items():
            if name in self._ranges:
                read_column(self._cache, shard, name)
                addresses, offset, _ = self._part(name, shard)
                addresses.map_at(offset, self._cache.shard(shard), name)
            else:
                begin, count = self._layout.part(name, shard)
                read_column(self._cache, shard, name, MemorySink(source[begin : begin + count]))

    def drop(self, shard: int) -> None:
        """As `Memory.drop`."""
        for name in self._ranges:
            addresses, offset, size = self._part(name, shard)
            addresses.let_go(offset, size)

    def resident(self, shard: int) -> float:
        """As `Memory.resident`."""
        parts = [self._part(name, shard) for name in self._ranges]
        counts = [addresses.resident(offset, size) for addresses, offset, size in parts if size]
        pages = sum(total for _, total in counts)
        return sum(kept for kept, _ in counts) / pages if pages else 1.0

    def _part(self, name: str, shard: int) -> tuple[AddressRange, int, int]:
        """Return where the mapped column of a shard is: range, offset and bytes."""
        begin, count = self._layout.part(name, shard)
        size = unit_bytes(self._cache.recipe.columns[name])
        return self._ranges[name], begin * size, count * size


def _choose_mapped(cache: Cache, schema: Schema, shards: frozenset[int]) -> MappedFields | None:
    """Map fields from the largest down while the alignment they need is affordable; None: map nothing."""
    if sys.platform != "linux" or mmap.ALLOCATIONGRANULARITY > PAGE:
        return None
    rows = np.array([cache.index.shards[shard].rows for shard in shards], dtype=np.int64)
    by_size = sorted(
        (name for name, f in schema.items() if unit_bytes(f)), key=lambda n: -unit_bytes(schema[n])
    )
    if len(by_size) * len(shards) > MAX_MAPS:
        log.warning(
            "%s: %d shards of %d fields are more than the %d that one process can map, so each process holds "
            "a copy. `stoker cache compact` makes fewer shards",
            cache.path, len(shards), len(by_size), MAX_MAPS,
        )  # fmt: skip
        return None
    if any(cache.shard(shard).fileno() < 0 for shard in shards):  # in place, or at a URL: no file of ours
        return None
    fixed: list[str] = []
    align = 1
    for name in (name for name in by_size if not schema[name].ragged):
        wanted = math.lcm(align, _alignment(unit_bytes(schema[name])))
        span = int((-(-rows // wanted) * wanted).sum())
        largest = unit_bytes(schema[(fixed or [name])[0]])
        if (not fixed or span <= MAX_STRETCH * rows.sum()) and span * largest < MAX_RANGE_BYTES:
            fixed.append(name)
            align = wanted
    ragged = [name for name in by_size if schema[name].ragged]
    return MappedFields(
        fields=frozenset(fixed + ragged),
        row_align=align,
        step_align={name: _alignment(unit_bytes(schema[name])) for name in ragged},
    )


def _alignment(size_bytes: int) -> int:
    """Return the rows of `size_bytes` after which an address is a multiple of the page again.

    >>> _alignment(1024), _alignment(101 * 1024), _alignment(8192), _alignment(12)
    (4, 4, 1, 1024)
    """
    return PAGE // math.gcd(size_bytes, PAGE)


class AddressRange:
    """Reserved addresses over which shards are mapped; given back when no tensor refers to them."""

    def __init__(self, size_bytes: int) -> None:
        self._address = libc.reserve_addresses(size_bytes)
        # Tensors refer to this array, and the addresses live as long as it does.
        self._array = (ctypes.c_char * size_bytes).from_address(self._address)
        weakref.finalize(self._array, libc.unmap, self._address, size_bytes).atexit = False

    def tensor(self, field: Field) -> Tensor:
        """Return the range as `(virtual rows, *shape)`. Reading where no shard is mapped yet is fatal."""
        flat = torch.frombuffer(self._array, dtype=torch_dtype(field))
        return flat.view(-1, *unit_shape(field))

    def map_at(self, offset: int, shard: Shard, name: str) -> None:
        """Map one column of `shard` at `offset` bytes into the range and touch its pages.

        Raises:
            OSError: The system refused the map.
        """
        column = shard.columns[name]
        if not column.nbytes:
            return
        where = self._address + offset
        try:
            libc.map_file_at(where, column.nbytes, shard.fileno(), column.offset)
        except OSError as error:
            raise OSError(error.errno, f"cannot map {shard.name}: {error.strerror}") from error
        # Kernels before 5.14 do not know the advice; their pages come in one by one at first use.
        libc.advise(where, column.nbytes, MADV_POPULATE_READ)

    def let_go(self, offset: int, size_bytes: int) -> None:
        """Hold no page of a part that was mapped. The addresses stay valid: reading them gives the file."""
        if size_bytes:
            libc.advise(self._address + offset, size_bytes, MADV_DONTNEED)

    def resident(self, offset: int, size_bytes: int) -> tuple[int, int]:
        """Of the pages of a part that was mapped, how many are in memory, and how many there are."""
        pages = -(-size_bytes // PAGE)
        found = np.ones(pages, dtype=np.uint8)
        if not libc.resident_pages(self._address + offset, size_bytes, found.ctypes.data):
            return pages, pages  # the system does not tell
        return int((found & 1).sum()), pages


# ----------------------------------------------------------------------------------------------------------
# The device tier: one resident tensor per field, filled straight from shards.
#
# Bytes go from the file into a page-locked buffer, are hashed there, and are copied to the device on a
# stream of their own while the next buffer is read: the host never holds more of the set than these
# buffers.


STAGING_BYTES = 4 * MIB
"""Bytes that are read, hashed and copied in one call each, at least `PIECE_BYTES`. To begin a copy takes the
host some 80 us, most of them with the interpreter's lock, which the threads that load other shards wait for.
"""
STAGING_BUFFERS = 2
"""Buffers of so many bytes for each shard that is being loaded. More of them take longer to allocate, 0.9 ms
for each MiB, than they save: a copy is ten times as quick as filling the next buffer."""
COPY_TIMEOUT_S = 60.0
"""Seconds that one buffer may take to reach the device."""
RELAXED_CAPTURE = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED` of cuda.h."""
POLL_S = 20e-6
"""Seconds between two looks at a copy that is still going on, far less than one takes."""


def allocate_on_device(
    cache: Cache, table: RecordTable, shards: frozenset[int], device: torch.device
) -> Memory:
    """Allocate the fields of `shards` on `device`; loading copies them there."""
    schema = cache.recipe.columns
    layout = make_layout(cache, shards, schema, 1, {})
    sources = {
        name: torch.empty((layout.span(name), *unit_shape(f)), dtype=torch_dtype(f), device=device)
        for name, f in schema.items()
    }
    if device.type == "cuda":
        # What was in this memory before may still be in use in the caller's stream; copies come in others.
        torch.cuda.current_stream(device).synchronize()
    steps = {name: record_steps(cache, layout, table, name) for name in layout.steps}
    return Memory(
        tier="device",
        device=device,
        sources=sources,
        rows=_placed(record_rows(layout, table), device),
        steps={name: _placed(first, device) for name, first in steps.items()},
        host_steps=steps,
        load=partial(_load_device, cache, layout, sources),
        shards=shards,
        ready=bytearray(len(cache.index.shards)),
    )


def finish_reads(device: torch.device) -> None:
    """Wait for all that was begun on a GPU: other streams may read memory that is to be released."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def begin_thread(device: torch.device) -> None:
    """Prepare a thread of the loader that copies to a GPU, or asks whether copies are done.

    The GPU is its current one, not GPU 0. While another thread captures a CUDA graph in the default mode,
    CUDA forbids all threads to allocate page-locked memory and to query events. A thread that does it ruins
    the capture, unless it has declared that it takes no part (`cuThreadExchangeStreamCaptureMode`).
    """
    if device.type != "cuda":
        return
    use_device(device)
    if (driver := _driver()) is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE)))


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _placed(values: NDArray[np.int64], device: torch.device) -> Any:
    """Return a table where the order is made: numpy on a CPU."""
    return values if device.type == "cpu" else torch.as_tensor(values, device="cpu").to(device)


def _load_device(cache: Cache, layout: MemoryLayout, sources: Mapping[str, Tensor], shard: int) -> None:
    staging = Staging(next(iter(sources.values())).device)
    try:
        for name, source in sources.items():
            begin, count = layout.part(name, shard)
            target = source[begin : begin + count].reshape(-1).view(torch.uint8)
            read_column(cache, shard, name, staging.into(target))
    finally:
        staging.wait()  # also after an error: nothing may be written to memory that was released


class Staging:
    """Page-locked buffers through which bytes go to a device: one is filled while others are copied.

    A `ColumnSink` for one thread. On a CPU the buffers are plain memory, and copies are done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._buffers = [
            torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=self._cuda, device="cpu")
            for _ in range(STAGING_BUFFERS)
        ]
        self._spaces = [bytes_of(buffer) for buffer in self._buffers]
        self._copied: list[Any] = [None] * STAGING_BUFFERS
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._target = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._next = 0
        self.piece_bytes = STAGING_BYTES
        self._begin = self._held = 0
        """Where the bytes that the next buffer holds belong, and how many they are."""

    def into(self, target: Tensor) -> Staging:
        """Return this, for a column that goes in `target`, bytes on the device."""
        self._send()
        self._target = target
        return self

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """Return a part of the next buffer, once that was copied from; at most `STAGING_BYTES`."""
        # Rows that are known to be damaged are passed over, and a column may be read once more.
        if self._held and (offset != self._begin + self._held or self._held + size > STAGING_BYTES):
            self._send()
        if not self._held:
            self._await(self._next)
            self._begin = offset
        return self._spaces[self._next][self._held : self._held + size]

    def filled(self, offset: int, size: int) -> None:
        """Begin to copy the buffer, if it is full."""
        self._held += size
        if self._held == STAGING_BYTES:
            self._send()

    def _send(self) -> None:
        """Begin to copy what the next buffer holds."""
        size, self._held = self._held, 0
        if not size:
            return
        source, target = self._buffers[self._next][:size], self._target[self._begin : self._begin + size]
        if self._cuda:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                self._copied[self._next] = self._stream.record_event()
        else:
            target.copy_(source)
        self._next = (self._next + 1) % STAGING_BUFFERS

    def wait(self) -> None:
        """Copy the rest, and wait until all buffers were copied.

        Raises:
            StalledError: A copy did not end in time.
        """
        self._send()
        for place in range(STAGING_BUFFERS):
            self._await(place)

    def _await(self, place: int) -> None:
        event, self._copied[place] = self._copied[place], None
        until = time.monotonic() + COPY_TIMEOUT_S
        while event is not None and not event.query():
            if time.monotonic() > until:
                raise StalledError(
                    f"a copy of {format_bytes(STAGING_BYTES)} to {self._device} was not done after "
                    f"{COPY_TIMEOUT_S:g} s",
                    hint=f"The device does not answer; serve from {arg('tier', 'host')} meanwhile",
                )
            time.sleep(POLL_S)
