"""The host tier: every shard mapped read-only into one range of addresses, one copy per node.

The columns of a field lie page-aligned in their shards, so shards can be mapped side by side (`MAP_FIXED`
over a reserved range) such that rows have the same pitch throughout: any number of shards of any size is
served like one array. A shard begins at a virtual row whose address is a multiple of the page in every
mapped field; the rows in between are never asked for. Bytes reach the page cache through positional reads
that verify them; mapping comes after, so no unverified byte is served.

A field that would need too much alignment, small beside the others, is copied; so is everything where
mapping cannot work.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stoker.loader.memory import (
    Into,
    Layout,
    Memory,
    make_layout,
    read_column,
    record_rows,
    record_steps,
    torch_dtype,
    unit_bytes,
    unit_shape,
)
from stoker.loader.places import Places
from stoker.runtime import libc
from stoker.schema import Field, Schema

if TYPE_CHECKING:
    from stoker.store import Cache, Shard

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
"""Up to this part of the bytes may be copied in a memory whose shards come and go one by one; their copies
stay, since somebody may be reading them. With more of it, a memory is let go of as a whole."""

MADV_POPULATE_READ, MADV_DONTNEED = 22, 4
"""Linux's numbers, which the `mmap` module does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which fields are mapped, and the alignment in rows that this takes."""

    fields: frozenset[str]
    row_align: int
    step_align: Mapping[str, int]


def map_host(cache: Cache, places: Places, shards: frozenset[int], *, mapping: bool = True) -> Memory:
    """Lay out `shards` in memory; nothing is read yet except, for ragged fields, offsets.

    Where (nearly) all fields are mapped there are addresses for every shard that is served, and which of them
    are used may change.

    Args:
        mapping: False copies every field into memory of this process.
    """
    schema, reach = cache.recipe.columns, frozenset(places.shards())
    chosen = _choose_mapped(cache, schema, reach) if mapping else None
    movable = chosen is not None and _copied(schema, chosen.fields) <= MOST_COPIED
    if not movable:
        reach = shards
        chosen = _choose_mapped(cache, schema, reach) if mapping else None
    if chosen is None:
        chosen = Choice(fields=frozenset(), row_align=1, step_align={})
    layout = make_layout(cache, reach, schema, chosen.row_align, chosen.step_align)
    ranges: dict[str, AddressRange] = {}
    try:
        for name in chosen.fields:
            ranges[name] = AddressRange(layout.span(name) * unit_bytes(schema[name]))
    except OSError:  # the process may not have that many addresses (ulimit -v)
        return map_host(cache, places, shards, mapping=False)
    sources = {
        name: ranges[name].tensor(f) if name in ranges else _empty(f, layout.span(name))
        for name, f in schema.items()
    }
    parts = partial(_parts, cache, layout, ranges)
    return Memory(
        tier="host",
        device=torch.device("cpu"),
        sources=sources,
        rows=record_rows(layout, places),
        steps={name: record_steps(cache, layout, places, name) for name in layout.steps},
        load=partial(_load, cache, layout, ranges, sources),
        shards=reach,
        ready=bytearray(len(cache.index.shards)),
        private=_copied(schema, chosen.fields),
        drop=partial(_drop, parts) if movable else None,
        resident=partial(_resident, parts) if ranges else None,
    )


def _copied(schema: Schema, mapped: frozenset[str]) -> float:
    """The part of the bytes that lies in fields which are copied, 0..1."""
    sizes = {name: unit_bytes(f) for name, f in schema.items()}
    return sum(size for name, size in sizes.items() if name not in mapped) / max(1, sum(sizes.values()))


def _empty(field: Field, span: int) -> Tensor:
    return torch.empty((span, *unit_shape(field)), dtype=torch_dtype(field), device="cpu")


def _load(
    cache: Cache,
    layout: Layout,
    ranges: Mapping[str, AddressRange],
    sources: Mapping[str, Tensor],
    shard: int,
) -> None:
    for name, source in sources.items():
        begin, count = layout.part(name, shard)
        if name in ranges:
            read_column(cache, shard, name)
            ranges[name].map_at(begin * unit_bytes(cache.recipe.columns[name]), cache.shard(shard), name)
        else:
            read_column(cache, shard, name, Into(source[begin : begin + count]))


def _parts(
    cache: Cache, layout: Layout, ranges: Mapping[str, AddressRange], shard: int
) -> list[tuple[AddressRange, int, int]]:
    """Where the mapped columns of a shard lie: range, offset and bytes."""
    parts: list[tuple[AddressRange, int, int]] = []
    for name, addresses in ranges.items():
        begin, count = layout.part(name, shard)
        size = unit_bytes(cache.recipe.columns[name])
        parts.append((addresses, begin * size, count * size))
    return parts


def _drop(parts: Callable[[int], list[tuple[AddressRange, int, int]]], shard: int) -> None:
    for addresses, offset, size in parts(shard):
        addresses.let_go(offset, size)


def _resident(parts: Callable[[int], list[tuple[AddressRange, int, int]]], shard: int) -> float:
    counts = [addresses.resident(offset, size) for addresses, offset, size in parts(shard) if size]
    pages = sum(total for _, total in counts)
    return sum(kept for kept, _ in counts) / pages if pages else 1.0


def _choose_mapped(cache: Cache, schema: Schema, shards: frozenset[int]) -> Choice | None:
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
            "a copy. `stoker compact` makes fewer shards",
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
    return Choice(
        fields=frozenset(fixed + ragged),
        row_align=align,
        step_align={name: _alignment(unit_bytes(schema[name])) for name in ragged},
    )


def _alignment(size_bytes: int) -> int:
    """Rows of `size_bytes` after which an address is a multiple of the page again.

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
        """The range as `(virtual rows, *shape)`. Reading where no shard is mapped yet is fatal."""
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
        """Hold no page of a part that was mapped. The addresses stay good: who reads them gets the file."""
        if size_bytes:
            libc.advise(self._address + offset, size_bytes, MADV_DONTNEED)

    def resident(self, offset: int, size_bytes: int) -> tuple[int, int]:
        """Of the pages of a part that was mapped, how many are in memory, and how many there are."""
        pages = -(-size_bytes // PAGE)
        found = np.ones(pages, dtype=np.uint8)
        if not libc.resident_pages(self._address + offset, size_bytes, found.ctypes.data):
            return pages, pages  # nobody can tell
        return int((found & 1).sum()), pages
