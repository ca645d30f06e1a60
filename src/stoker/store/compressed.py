"""Compressed shards, format 3: an ordinary shard cut into blocks that are compressed one by one.

`CompressedFile` reads such a file as if it were the ordinary shard, so everything above it (sums, windows,
repair, merging) works unchanged. A block has a checksum of its stored bytes. Only bytes that match it reach
the decompressor, which writes into memory of exactly the block's size. Blosc does the work: it shuffles bytes
or bits of numbers, then applies zstd or LZ4, and releases the interpreter's lock.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError
from stoker.runtime.threads import map_in_order
from stoker.store.format import (
    BLOCK_BYTES,
    COMPRESSED_FORMAT,
    ITEM_BYTES,
    PAGE,
    REFETCHES,
    Header,
    LocalFile,
    OpenFile,
    PendingWrite,
    TensorEntry,
    is_pad,
    pack_header,
    read_header,
)
from stoker.units import KIB, MIB

Compression = Literal["none", "zstd", "lz4", "auto"]
"""Compression of shards. `auto` is zstd for each shard that it makes smaller by `WORTHWHILE`, else none."""

TARGET_BYTES = 256 * KIB
"""Bytes of a block. Smaller ones compress latents much worse (docs/design/040-compression.md)."""
MAX_BLOCK_BYTES = MIB
"""Bytes of the largest block that is read: bounds what a file can make a reader allocate."""
LEVELS = {"zstd": 2, "lz4": 5}
"""Blosc's levels; 2 is level 3 of zstd."""
FILTERS = {0: "none", 1: "bytes", 2: "bits"}
"""Blosc's filters before compression: it can shuffle the bytes, or the bits, of the numbers of a block."""
SAMPLED_BLOCKS = 3
"""Blocks of a column on which the filters are tried."""
WORTHWHILE = 0.1
"""The part of a shard's bytes that `auto` wants to save."""
KEPT_BLOCKS = 4
"""Decompressed blocks that each reading thread keeps: neighboring records share one."""
READ_BLOCKS = 16
"""Blocks that are read from the file at once."""
THREADS = 4
"""Threads that compress the blocks of a shard, at most."""
FRAME_BYTES = 16
"""Bytes of a Blosc frame before its data: versions, sizes (at 4, 8, 12: all bytes, block, frame)."""
_MARK = b'{"__blocks__":'
"""Start of the header of a compressed shard; no other header begins so."""
_INSTALL = "Run pip install 'stoker[compression]'"


def check_compression(value: str) -> Compression:
    """Return `value`.

    Raises:
        ConfigError: It is not a `Compression`, or the library for it is not installed.
    """
    if value not in get_args(Compression):
        raise ConfigError(
            f"compression is {value!r}", hint=f"Expected one of {', '.join(get_args(Compression))}"
        )
    if value != "none" and importlib.util.find_spec("numcodecs") is None:
        raise ConfigError(f"compression {value!r} needs numcodecs, which is not installed", hint=_INSTALL)
    return cast("Compression", value)


def _blosc(why: str) -> Any:
    try:
        return importlib.import_module("numcodecs.blosc")
    except ImportError as error:
        raise ConfigError(f"{why} needs numcodecs, which is not installed", hint=_INSTALL) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainShard:
    """An ordinary shard that was written and is not visible yet."""

    read: Callable[[int, int], bytes]
    """Gives bytes by offset and size."""
    size: int
    tensors: Mapping[str, TensorEntry]
    data_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A part of a shard that is compressed alone."""

    begin: int
    size: int
    item_bytes: int = 0
    """Bytes of a number; 0: it is stored as it is."""
    filter: int = 0


def compress_shard(shard: PlainShard, compression: Compression, create: Callable[[], PendingWrite]) -> bool:
    """Write a compressed shard and commit it; return False, with nothing written, if `auto` finds no gain.

    Args:
        shard: The ordinary shard.
        compression: Not `none`.
        create: Begins the file.
    """
    name = "zstd" if compression == "auto" else compression
    blosc = _blosc(f"compression {compression!r}")
    pack = partial(_packed, blosc, shard, name)
    blocks, size = _plan_blocks(shard, pack)
    if compression == "auto" and size > (1 - WORTHWHILE) * shard.size:
        return False
    threads = min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    table = np.zeros((len(blocks), 4), "<u8")
    start = PAGE + table.nbytes
    at = 0
    pending = create()
    try:
        what = "compressing the blocks of a shard"
        for i, data in enumerate(map_in_order(pack, blocks, what=what, threads=threads)):
            pending.write_at(start + at, data)
            at += len(data)
            table[i] = (blocks[i].begin, blocks[i].size, len(data), xxhash.xxh3_64_intdigest(data))
        raw = table.tobytes()
        tensors = {
            "__table__": TensorEntry("U64", table.shape, 0, table.nbytes),
            "__blocks__": TensorEntry("U8", (at,), table.nbytes, table.nbytes + at),
        }
        metadata = {
            "format": str(COMPRESSED_FORMAT),
            "bytes": str(shard.size),
            "compression": name,
            "table": xxhash.xxh3_128_hexdigest(raw),
        }
        pending.write_at(PAGE, raw)
        pending.write_at(0, pack_header(tensors, metadata, PAGE))
        pending.commit()
    finally:
        pending.discard()
    return True


def _packed(blosc: Any, shard: PlainShard, name: str, block: _Block) -> bytes:
    """Return the bytes to store for a block: a Blosc frame, or the block itself if that is as short."""
    data = shard.read(block.begin, block.size)
    if not block.item_bytes or block.size < KIB:
        return data
    # The size of an item comes with the array: earlier numcodecs have no argument for it.
    items = np.frombuffer(data, f"u{block.item_bytes}")
    frame: bytes = blosc.compress(items, name.encode(), LEVELS[name], block.filter, block.size)
    return frame if len(frame) < len(data) else data


def _plan_blocks(shard: PlainShard, pack: Callable[[_Block], bytes]) -> tuple[list[_Block], float]:
    """Return all blocks in order, with the best filter for each column, and about their stored bytes."""
    tail = shard.data_start + shard.tensors["__number__"].begin
    blocks = [_Block(begin=at, size=size) for at, size in _pieces(0, shard.data_start, MAX_BLOCK_BYTES)]
    stored = float(shard.data_start)
    for name, entry in sorted(shard.tensors.items(), key=lambda item: item[1].begin):
        begin = shard.data_start + entry.begin
        if begin >= tail or is_pad(name):
            continue
        own = [
            _Block(begin=begin + at, size=size, item_bytes=ITEM_BYTES[entry.dtype])
            for at, size in _cuts(entry, ragged=f"{name}.offsets" in shard.tensors)
        ]
        some = (
            [own[i] for i in sorted({*np.linspace(0, len(own) - 1, SAMPLED_BLOCKS).astype(int)})]
            if own
            else []
        )
        tried = {
            kind: sum(len(pack(_filtered(block, kind))) for block in some)
            for kind in (FILTERS if ITEM_BYTES[entry.dtype] > 1 else (0, 2))
        }
        best = min(tried, key=tried.__getitem__)
        stored += tried[best] / max(1, sum(block.size for block in some)) * (entry.end - entry.begin)
        blocks += [_filtered(block, best) for block in own]
    blocks += [_Block(begin=at, size=size) for at, size in _pieces(tail, shard.size - tail, MAX_BLOCK_BYTES)]
    return blocks, stored + shard.size - tail


def _filtered(block: _Block, kind: int) -> _Block:
    return _Block(begin=block.begin, size=block.size, item_bytes=block.item_bytes, filter=kind)


def _pieces(begin: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    for at in range(0, size, most):
        yield begin + at, min(most, size - at)


def _cuts(entry: TensorEntry, *, ragged: bool) -> Iterator[tuple[int, int]]:
    """Yield where a column is cut: offset in it and bytes.

    Small records are together in a block, each complete, so that reading one takes one block. Larger ones
    are cut alone, at steps that begin a block of sums.
    """
    total = entry.end - entry.begin
    if not total:
        return
    record = total // max(1, entry.shape[0])
    step = record if ragged or len(entry.shape) < 2 else record // max(1, entry.shape[1])
    if record and not ragged and record <= TARGET_BYTES:
        yield from _pieces(0, total, TARGET_BYTES // record * record)
        return
    piece = max(1, step) * max(1, BLOCK_BYTES // max(1, step))
    size = TARGET_BYTES if piece > TARGET_BYTES else TARGET_BYTES // piece * piece
    for begin, own in _pieces(0, total, total if ragged else max(1, record)):
        yield from _pieces(begin, own, size)


def open_compressed(file: OpenFile, where: str) -> OpenFile:
    """Return `file`, or what reads it as an ordinary shard if it is a compressed one.

    Raises:
        CorruptError, FormatError: Its header or table is damaged or contradicts itself.
        ConfigError: numcodecs is not installed.
    """
    if file.size < PAGE:
        return file
    start = bytearray(8 + len(_MARK))
    file.read_into(0, memoryview(start))
    if not start.endswith(_MARK):
        return file
    _blosc(f"{where}, which is compressed,")
    for _ in range(REFETCHES):
        try:
            return CompressedFile(file, where)
        except CorruptError:
            if not file.refetch(0, file.size):
                raise
    return CompressedFile(file, where)


class _KeptBlocks(threading.local):
    """Blocks that a thread decompressed last, by file and number."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[int, int], memoryview[Any]] = OrderedDict()


_kept = _KeptBlocks()
_tokens = itertools.count()


class CompressedFile:
    """An `OpenFile` over a compressed shard: offsets and sizes are those of the ordinary one.

    Raises:
        CorruptError, FormatError: Header or table is damaged or contradicts itself.
    """

    def __init__(self, file: OpenFile, where: str) -> None:
        self._file, self._where = file, where
        header = read_header(file, where=where)
        table = _read_table(file, header, where)
        ends = np.cumsum(table[:, 2]) + header.data_start + header.tensors["__blocks__"].begin
        self._stored_ends: NDArray[np.int64] = ends
        self._stored_begins: NDArray[np.int64] = ends - table[:, 2]
        self._begin_array: NDArray[np.int64] = table[:, 0].copy()
        self._end_array: NDArray[np.int64] = table[:, 0] + table[:, 1]
        # Lists: a look-up of one number in them is several times quicker.
        self._begins: list[int] = self._begin_array.tolist()
        self._ends: list[int] = self._end_array.tolist()
        self._places: list[tuple[int, int]] = list(
            zip(self._stored_begins.tolist(), ends.tolist(), strict=True)
        )
        self._sums: list[int] = table[:, 3].view(np.uint64).tolist()
        self.size = self._ends[-1]
        """Bytes of the ordinary shard."""
        self.stored_bytes = file.size
        """Bytes of the file."""
        self.compression = header.metadata["compression"]
        self._token = next(_tokens)

    @property
    def origin(self) -> str | None:
        """The URL that its bytes come from."""
        return self._file.origin

    @property
    def generation(self) -> tuple[int, int] | None:
        """Another value whenever bytes may have been fetched again."""
        return self._file.generation

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`.

        Raises:
            CorruptError: A block does not match its checksum or cannot be decompressed; the message gives
                its place in the file.
        """
        self._fill(offset, [out], wait=True)

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` with what is decompressed already or in the page cache."""
        return self._fill(offset, outs, wait=False)

    def stored_extent(self, offset: int, size: int) -> tuple[int, int]:
        """Return offset and size in the file of the blocks that hold some bytes of the ordinary shard."""
        first = min(bisect_right(self._ends, offset), len(self._ends) - 1)
        last = max(first, bisect_left(self._begins, offset + size) - 1)
        return self._places[first][0], self._places[last][1] - self._places[first][0]

    def stored_extents(
        self, begin: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the same for many: where each begins and ends in the file; nothing of nothing."""
        first = np.minimum(np.searchsorted(self._end_array, begin, side="right"), len(self._ends) - 1)
        last = np.maximum(first, np.searchsorted(self._begin_array, end, side="left") - 1)
        low = self._stored_begins[first]
        return low, np.where(end > begin, self._stored_ends[last], low)

    def advice(self, offset: int, size: int) -> tuple[int, int, int]:
        """Return descriptor, offset and bytes of the file that hold some bytes of the ordinary shard."""
        return self._file.fileno(), *self.stored_extent(offset, size)

    def prefetch(self, offset: int, size: int) -> None:
        """Begin to bring the blocks near that hold these bytes."""
        self._file.prefetch(*self.stored_extent(offset, size))

    def refetch(self, offset: int, size: int) -> bool:
        """Have the blocks that hold these bytes fetched again at the next read."""
        begin, stored = self.stored_extent(offset, size)
        if not offset:
            begin, stored = 0, begin + stored
        self._token = next(_tokens)
        return self._file.refetch(begin, stored)

    def fileno(self) -> int:
        """None: its pages hold nothing that could be mapped."""
        return -1

    @property
    def direct_fd(self) -> int:
        """None."""
        return -1

    def here(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return False for all."""
        return np.zeros(len(begins), np.bool_)

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _fill(self, offset: int, outs: Sequence[memoryview[Any]], *, wait: bool) -> bool:
        end = offset + sum(map(len, outs))
        if end > self.size:
            raise CorruptError(f"{self._where} ends at byte {self.size} of its records, expected {end}")
        stored = _Stored(self._file, self._places, bisect_left(self._begins, end), wait=wait)
        for out in outs:
            at = 0
            while at < len(out):
                i = bisect_right(self._ends, offset)
                if self._begins[i] > offset:  # padding between columns, which is not stored
                    count = min(self._begins[i] - offset, len(out) - at)
                    out[at : at + count] = bytes(count)
                else:
                    low = offset - self._begins[i]
                    count = min(self._ends[i] - offset, len(out) - at)
                    if not self._copy(i, low, out[at : at + count], stored, wait=wait):
                        return False
                at, offset = at + count, offset + count
        return True

    def _copy(self, i: int, low: int, out: memoryview[Any], stored: _Stored, *, wait: bool) -> bool:
        """Fill `out` with block `i` from byte `low` of it on."""
        key = (self._token, i)
        block = _kept.blocks.get(key)
        if block is None:
            size = self._ends[i] - self._begins[i]
            data = stored.take(i)
            if data is not None and xxhash.xxh3_64_intdigest(data) != self._sums[i]:
                data = self._fetched_again(i) if wait else None
            if data is None:
                return False
            if len(out) == size:
                self._decompress(i, data, out)
                return True
            block = np.empty(size, np.uint8).data
            self._decompress(i, data, block)
            _kept.blocks[key] = block
            if len(_kept.blocks) > KEPT_BLOCKS:
                _kept.blocks.popitem(last=False)
        out[:] = block[low : low + len(out)]
        return True

    def _fetched_again(self, i: int) -> memoryview[Any]:
        begin, end = self._places[i]
        data = np.empty(end - begin, np.uint8).data
        for _ in range(REFETCHES):
            if not self._file.refetch(begin, end - begin):
                break
            self._file.read_into(begin, data)
            if xxhash.xxh3_64_intdigest(data) == self._sums[i]:
                return data
        raise self._damaged(i, "does not match its checksum")

    def _decompress(self, i: int, data: memoryview[Any], out: memoryview[Any]) -> None:
        if len(data) == len(out):
            out[:] = data
            return
        # Blosc takes sizes from the frame: one that claims other ones never reaches it.
        claimed = [int.from_bytes(data[at : at + 4], "little") for at in (4, 8, 12)]
        if len(data) < FRAME_BYTES or claimed[0] != len(out) or claimed[2] != len(data):
            raise self._damaged(i, f"claims {claimed[0]:,} bytes in {claimed[2]:,}, expected {len(out):,}")
        if not 0 < claimed[1] <= max(len(out), KIB):
            raise self._damaged(i, f"claims inner blocks of {claimed[1]:,} bytes")
        try:
            _blosc("reading a compressed shard").decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(i, f"cannot be decompressed: {error}") from error

    def _damaged(self, i: int, fact: str) -> CorruptError:
        begin, end = self._places[i]
        return CorruptError(f"{self._where}: the compressed block {i} (bytes {begin} to {end}) {fact}")


class _Stored:
    """The stored bytes of blocks up to `stop`, read several at a time."""

    def __init__(self, file: OpenFile, places: list[tuple[int, int]], stop: int, *, wait: bool) -> None:
        self._file, self._places, self._stop, self._wait = file, places, stop, wait
        self._first = self._last = 0
        self._data: memoryview[Any] = memoryview(b"")

    def take(self, i: int) -> memoryview[Any] | None:
        """Block `i`; None: it would have to be waited for.

        Raises:
            CorruptError: The file ends before it.
            OSError: It cannot be read.
        """
        if not self._first <= i < self._last:
            last = max(i + 1, min(i + READ_BLOCKS, self._stop))
            begin, end = self._places[i][0], self._places[last - 1][1]
            data = np.empty(end - begin, np.uint8).data
            if self._wait:
                self._file.read_into(begin, data)
            elif not self._file.read_cached(begin, [data]):
                return None
            self._first, self._last, self._data = i, last, data
        origin = self._places[self._first][0]
        begin, end = self._places[i]
        return self._data[begin - origin : end - origin]


def _read_table(file: OpenFile, header: Header, where: str) -> NDArray[np.int64]:
    """`(blocks, 4)`: begin in the ordinary shard, its bytes, stored bytes, sum (as signed bits).

    Raises:
        CorruptError, FormatError: It is damaged, or blocks are too large or leave parts of the shard out.
    """
    entry, blocks = header.tensors.get("__table__"), header.tensors.get("__blocks__")
    known = {"format", "bytes", "compression", "table"} <= header.metadata.keys()
    if entry is None or blocks is None or len(header.tensors) != 2 or not known:
        raise FormatError(f"{where} begins as a compressed shard and lacks its table", hint="Remove it")
    if entry.dtype != "U64" or blocks.dtype != "U8" or entry.shape[1:] != (4,) or not entry.shape[0]:
        raise FormatError(f"{where} has a table of {entry.dtype} {entry.shape}, expected U64 (blocks, 4)")
    raw = bytearray(entry.end - entry.begin)
    file.read_into(header.data_start + entry.begin, memoryview(raw))
    if xxhash.xxh3_128_hexdigest(raw) != header.metadata["table"]:
        raise CorruptError(f"{where}: the table of its blocks does not match its digest")
    unsigned = np.frombuffer(raw, "<u8").reshape(-1, 4)
    begin, size, stored, _ = unsigned.T
    bounded = (begin < 1 << 62) & (size >= 1) & (size <= MAX_BLOCK_BYTES) & (stored >= 1) & (stored <= size)
    table = unsigned.view(np.int64)
    gaps = table[1:, 0] - (table[:-1, 0] + table[:-1, 1])
    fits = bounded.all() and not table[0, 0] and bool(((gaps >= 0) & (gaps < PAGE)).all())
    whole = fits and int(table[:, 2].sum()) == blocks.end - blocks.begin
    if not whole or str(int(table[-1, 0] + table[-1, 1])) != header.metadata["bytes"]:
        raise FormatError(f"{where}: the table of its blocks contradicts itself or the file")
    return table


def decompression_rate(path: str | os.PathLike[str], budget_s: float) -> float | None:
    """Return the bytes per second that one thread decompresses of a shard; None if it is not compressed.

    The file is read through the page cache, and that is counted.
    """
    file = open_compressed(LocalFile(Path(path)), str(path))
    try:
        if not isinstance(file, CompressedFile):
            return None
        room = np.empty(min(file.size - PAGE, 4 * MIB), np.uint8).data
        file.read_into(PAGE, room)  # the pages, and the library
        begun, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begun < budget_s:
            file.read_into(PAGE, room)
            count += 1
        return len(room) * count / max(1e-9, time.perf_counter() - begun)
    finally:
        file.close()
