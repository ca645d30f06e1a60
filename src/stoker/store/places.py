"""Files of shards whose columns are in the user's own files.

Such a shard is a file like any other, with numbers, sums and digests, but for holes where those columns would
be. `places-*.json` next to it says which bytes of which file belong there, and reading goes there. So all
that reads shards reads them, every byte is checked as ever, and a change in the user's file is found.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError
from stoker.runtime.files import RegularFile
from stoker.runtime.jsonio import canonical_json, read_strict
from stoker.schema import digest_json
from stoker.store.format import OpenFile, read_header
from stoker.units import MIB

MAX_PLACES_BYTES = 256 * MIB
CURE = (
    "Run stoker.index_in_place, or the command with precompute.in_place=true, again over the files as "
    "they are now: it keeps what did not change"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """One of the user's files, as it was when it was indexed."""

    path: Path
    bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnPlaces:
    """Location of one column: runs of bytes that follow one another in the column."""

    field: str
    file: int
    """Index of the file."""
    runs: NDArray[np.int64]
    """`(k, 2)`: offset in the file, bytes."""


def runs_of(at: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets and sizes of records, joined where they follow one another: `(k, 2)`.

    >>> runs_of(np.array([100, 110, 130]), np.array([10, 10, 5])).tolist()
    [[100, 20], [130, 5]]
    """
    some = sizes > 0
    at, sizes = at[some], sizes[some]
    if not len(at):
        return np.empty((0, 2), np.int64)
    starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1] + sizes[:-1]]))
    return np.stack([at[starts], np.add.reduceat(sizes, starts)], axis=1)


def dump_places(files: Sequence[UserFile], columns: Sequence[ColumnPlaces]) -> bytes:
    """Return the bytes of a `places-*.json`."""
    entries: dict[str, Any] = {
        "format": 1,
        "files": [{"path": str(f.path), "bytes": f.bytes, "mtime_ns": f.mtime_ns} for f in files],
        "columns": [
            {
                "field": column.field,
                "file": column.file,
                "runs": base64.b64encode(np.ascontiguousarray(column.runs, "<i8").tobytes()).decode(),
            }
            for column in columns
        ],
    }
    return canonical_json({**entries, "digest": digest_json(entries)}).encode()


def load_places(path: Path) -> tuple[list[UserFile], list[ColumnPlaces]]:
    """Read what `dump_places` made.

    Raises:
        CorruptError: It is damaged.
    """
    where = str(path)
    with RegularFile(path) as file:
        if file.size > MAX_PLACES_BYTES:
            raise CorruptError(f"{where} has {file.size:,} bytes, expected {MAX_PLACES_BYTES:,} at most")
        entries = read_strict(file.read_all(), where=where)
    try:
        if entries.pop("digest") != digest_json(entries) or entries["format"] != 1:
            raise CorruptError(f"{where} does not match its digest", hint=CURE)
        files = [
            UserFile(path=Path(f["path"]), bytes=int(f["bytes"]), mtime_ns=int(f["mtime_ns"]))
            for f in entries["files"]
        ]
        columns = [
            ColumnPlaces(
                field=str(c["field"]),
                file=int(c["file"]),
                runs=np.frombuffer(base64.b64decode(c["runs"], validate=True), "<i8").reshape(-1, 2),
            )
            for c in entries["columns"]
        ]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise CorruptError(f"{where} is malformed: {error!r}", hint=CURE) from error
    return files, columns


def open_placed(own: OpenFile, path: Path) -> PlacedFile:
    """Open a shard together with the files that its columns are in.

    Args:
        own: The shard.
        path: Where its places are noted.

    Raises:
        CorruptError: A file is gone or was changed, or the places do not fit the shard.
    """
    users, columns = load_places(path)
    where = str(path)
    header = read_header(own, where=where)
    files = [_open_user(user, path.parent) for user in users]
    pieces: list[tuple[int, int, RegularFile, int]] = []
    for column in columns:
        entry = header.tensors.get(column.field)
        if entry is None or int(column.runs[:, 1].sum()) != entry.end - entry.begin:
            raise CorruptError(f"{where} does not fit its shard: field {column.field!r}", hint=CURE)
        at = header.data_start + entry.begin
        for offset, size in column.runs.tolist():
            if offset < 0 or size < 1 or offset + size > files[column.file].size:
                raise CorruptError(f"{where} names bytes beyond its file", hint=CURE)
            pieces.append((at, at + size, files[column.file], offset))
            at += size
    return PlacedFile(own, sorted(pieces, key=lambda piece: piece[0]))


def _open_user(user: UserFile, folder: Path) -> RegularFile:
    try:
        file = RegularFile(user.path)
        found = user.path.stat()
    except FileNotFoundError as error:
        raise CorruptError(
            f"{user.path}, which {folder} serves in place, is not there any more", hint=CURE, folder=folder
        ) from error
    if (found.st_size, found.st_mtime_ns) != (user.bytes, user.mtime_ns):
        raise CorruptError(
            f"{user.path}, which {folder} serves in place, was changed since it was indexed: it has "
            f"{found.st_size:,} bytes, expected {user.bytes:,} of an earlier time",
            hint=CURE,
            folder=folder,
        )
    return file


class PlacedFile:
    """An `OpenFile` that is put together from several."""

    origin: str | None = None
    generation: tuple[int, int] | None = None

    def __init__(self, own: OpenFile, pieces: list[tuple[int, int, RegularFile, int]]) -> None:
        self._own = own
        self._pieces = pieces
        self._begins = [piece[0] for piece in pieces]

    @property
    def size(self) -> int:
        """Bytes, holes included."""
        return self._own.size

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`, from wherever the bytes are."""
        at = 0
        while at < len(out):
            file, place, room = self._place(offset + at)
            size = min(room, len(out) - at)
            file.read_into(place, out[at : at + size])
            at += size

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` from the page cache, where one file has all of it."""
        file, place, room = self._place(offset)
        return room >= sum(map(len, outs)) and file.read_cached(place, outs)

    def prefetch(self, offset: int, size: int) -> None:
        """Have the file that has the first of these bytes read ahead."""
        file, place, room = self._place(offset)
        file.prefetch(place, min(room, size))

    def refetch(self, offset: int, size: int) -> bool:
        """Return False: the bytes are nowhere else."""
        return False

    def fileno(self) -> int:
        """None: the bytes are in several files, and are on no pages."""
        return -1

    @property
    def direct_fd(self) -> int:
        """None."""
        return -1

    def here(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return False for all."""
        return np.zeros(len(begins), np.bool_)

    def close(self) -> None:
        """Release all files."""
        for file in {id(piece[2]): piece[2] for piece in self._pieces}.values():
            file.close()
        self._own.close()

    def _place(self, offset: int) -> tuple[OpenFile | RegularFile, int, int]:
        """Return which file has a byte, where, and how many follow it there."""
        i = bisect_right(self._begins, offset) - 1
        if i >= 0 and offset < self._pieces[i][1]:
            begin, end, file, at = self._pieces[i]
            return file, at + offset - begin, end - offset
        rest = self._begins[i + 1] if i + 1 < len(self._begins) else 1 << 62
        return self._own, offset, rest - offset
