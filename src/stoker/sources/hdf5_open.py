"""Open HDF5 files, few at a time, per process, with errors that say what to do.

h5py raises OSError, RuntimeError, KeyError, ValueError or TypeError for the same damaged file, depending
on which bytes are hit; all of them become `SourceError` here.
"""

from __future__ import annotations

import functools
import math
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, StokerError
from stoker.runtime.threads import RetryPolicy, retry
from stoker.sources.files import (
    FOREIGN_ERRORS,
    OpenFiles,
    cause_of,
    check_opened,
    confined_sources,
    source_errors,
    why_unreadable,
)
from stoker.sources.hdf5_fields import FileLayout, Piece, sample_axes, sample_shape
from stoker.sources.protocol import read_as
from stoker.units import MIB

OPEN_FILES = 16
"""Files one copy of a source keeps open. Leaves room under a limit of 64 descriptors."""

_ROWS = 100_000
"""Rows of which each may be listed as never written."""

_LOCKED = RetryPolicy(first_s=0.25, factor=1.0, attempts=4)


def open_file(path: Path) -> Any:
    """Return an open, read-only `h5py.File`.

    Raises:
        SourceError: Missing, empty, truncated, locked by a writer, no HDF5 file, or outside of the paths
            that the process is confined to.
    """

    def attempt() -> Any:
        # `BlockReader` keeps what is decoded; HDF5's own chunk cache would hold it twice.
        file: Any = h5py.File(path, "r", rdcc_nbytes=0)
        try:
            check_opened(int(file.id.get_vfd_handle()), path)
        except StokerError:
            file.close()
            raise
        return file

    try:
        return retry(attempt, BlockingIOError, _LOCKED)
    except StokerError:
        raise
    except BlockingIOError as error:
        raise SourceError(
            f"{path} is locked by a process that writes it ({error})",
            hint="Wait until it has finished; if nothing writes (some network file systems), set "
            "HDF5_USE_FILE_LOCKING=FALSE",
        ) from error
    except FOREIGN_ERRORS as error:
        raise _cannot_open(path, error) from cause_of(error)


def _cannot_open(path: Path, error: Exception) -> SourceError:
    text = str(error)
    try:
        size = path.stat().st_size
    except OSError:
        size = None
    if isinstance(error, FileNotFoundError) or size is None:
        return SourceError(f"{path} does not exist (any more)", hint="Check the path or the mount")
    if "truncated file" in text:
        return SourceError(
            f"{path} is truncated at {size:,} bytes ({text})", hint="Copy or download it again"
        )
    if isinstance(error, PermissionError):
        return SourceError(f"{path} may not be read ({text})", hint="Change its permissions")
    hint = "Copy or download it again; if it is of another format, name that with data.kind"
    return SourceError(f"{path} is not a readable HDF5 file, {size:,} bytes ({text})", hint=hint)


def refuse_pipes(file: Any, seen: set[tuple[int, int]] | None = None) -> None:
    """Refuse a file whose external links lead to a pipe or a device: opening one may block forever.

    To be called before anything is looked up in the file, since h5py follows every link that it meets. Links
    to files are left to `require_inside`.

    Args:
        file: Open.
        seen: Device and inode of linked files that were looked at; more are added. Files may link each other.

    Raises:
        SourceError: Names the link and what it leads to.
    """
    links: list[str] = []
    seen = set[tuple[int, int]]() if seen is None else seen

    def note(name: bytes, info: Any) -> None:
        if info.type == h5py.h5l.TYPE_EXTERNAL:  # pyright: ignore[reportAttributeAccessIssue]
            links.append(name.decode(errors="surrogateescape"))

    # Damage in a part of the file that is not needed must not refuse the file.
    with suppress(*FOREIGN_ERRORS):
        root = file["/"]  # kept, since what it gives is closed with it
        root.id.links.visit(note, info=True)
    for name in links:
        target = file.get(name, getlink=True).filename
        folder = Path(file.filename).parent
        # Where HDF5 looks; an absolute path that is not there is looked for next to the file.
        for place in dict.fromkeys([folder / target, folder / Path(target).name, Path(target)]):
            try:
                status = place.stat()
            except (OSError, ValueError):
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(
                    f"{file.filename}: {name!r} is an external link to {place}, which is "
                    f"{why_unreadable(place) or 'a folder'}",
                    hint="Remove the link, or put the file there",
                )
            seen.add((status.st_dev, status.st_ino))
            try:
                with h5py.File(place, "r") as inner:
                    refuse_pipes(inner, seen)
            except SourceError as error:
                fact = f"{file.filename}: {name!r} is an external link; {error.problem.fact}"
                raise SourceError(fact, hint=error.problem.hint) from error
            except FOREIGN_ERRORS:
                continue  # what follows the link will report it


def open_checked(path: Path) -> Any:
    """As `open_file`, for a file whose links are going to be followed: none leads to a pipe or a device.

    Raises:
        SourceError: As `open_file` and `refuse_pipes`.
    """
    file = open_file(path)
    try:
        refuse_pipes(file)
    except BaseException:
        file.close()
        raise
    return file


def readable_dataset(file: Any, name: str, path: Path) -> Any:
    """Return the dataset `name` of the file that was opened at `path`.

    Raises:
        SourceError: Its bytes are not in `file`, or a filter that it needs is not installed.
    """
    dataset = require_inside(file, name, where=str(path))
    require_filters(dataset, where=f"{path}: dataset {name!r}")
    return dataset


def require_inside(file: Any, name: str, *, where: str) -> Any:
    """Return the dataset, if its bytes are in `file`: an identity has the content of `file` alone.

    Raises:
        SourceError: It is reached by an external link, virtual, or stored in other files.
    """
    dataset = file[name]
    refuse_outside(dataset, file.filename, name, where=where)
    return dataset


def refuse_outside(dataset: Any, filename: str, name: str, *, where: str) -> None:
    """As `require_inside`, for a dataset that is open; `filename` is that of the file it was looked up in."""
    if (holder := h5py.h5f.get_name(dataset.id).decode(errors="surrogateescape")) != filename:
        found = f"is an external link into {holder}"
    elif dataset.chunks is None and dataset.is_virtual:
        found = (
            f"is virtual, put together from {sorted({part.file_name for part in dataset.virtual_sources()})}"
        )
    elif dataset.external:
        found = f"is stored outside, in {sorted({part[0] for part in dataset.external})}"
    else:
        return
    raise SourceError(
        f"{where}: dataset {name!r} {found}, where a change would go unseen",
        hint="Copy it into the file (h5repack), or name the inner file as source",
    )


def require_filters(dataset: Any, *, where: str) -> None:
    """Refuse a dataset that is compressed by a plugin which is not there.

    hdf5plugin registers its filters in the process that imports it. It is imported here where it is needed:
    the user's own import has effect in the main process, and workers read the same files.

    Raises:
        SourceError: Names the filter.
    """
    plist = dataset.id.get_create_plist()
    for position in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(position)
        if h5py.h5z.filter_avail(code) or (_import_plugins() and h5py.h5z.filter_avail(code)):
            continue
        # An optional filter that was not there when the file was written has been left out of the chunks.
        if dataset.id.get_num_chunks() and dataset.id.get_chunk_info(0).filter_mask & (1 << position):
            continue
        known = f" ({name.decode(errors='replace')})" if name else ""
        raise SourceError(
            f"{where} is compressed by HDF5 filter {code}{known}, which is not installed",
            hint="Run pip install hdf5plugin, which is found from then on; for another filter set "
            "HDF5_PLUGIN_PATH. Or write the file again with gzip: h5repack -f GZIP=4",
        )


@functools.cache
def _import_plugins() -> bool:
    try:
        import_module("hdf5plugin")
    except ImportError:
        return False
    return True


def unwritten_rows(dataset: Any, axis: int | None) -> NDArray[np.bool_] | None:
    """Return which rows along an axis lack data that was never written; None: all was written.

    HDF5 gives such data as zeros or the fill value: what a program leaves that was stopped while it wrote.

    Args:
        dataset: Open; its data is not read.
        axis: None: one row.

    Raises:
        SourceError: Next to nothing of very many rows was written.
    """
    rows = 1 if axis is None else dataset.shape[axis]
    step, complete = rows, list[int]()
    if dataset.chunks is None:
        compact = dataset.id.get_create_plist().get_layout() == h5py.h5d.COMPACT
        if compact or dataset.id.get_storage_size():
            return None
    else:
        counts = [-(-size // length) for size, length in zip(dataset.shape, dataset.chunks, strict=True)]
        if dataset.id.get_num_chunks() >= math.prod(counts):
            return None
        step = rows if axis is None else dataset.chunks[axis]
        needed = math.prod(counts) // (1 if axis is None else counts[axis])
        complete = [place for place, count in _chunks_along(dataset, axis, step).items() if count >= needed]
    if rows > _ROWS and len(complete) * step < rows // 100:
        raise SourceError(
            f"{dataset.file.filename}: dataset {dataset.name!r} has {rows:,} rows, and at most "
            f"{len(complete) * step:,} of them were written",
            hint="Write it again, or cut it to what is there",
        )
    missing = np.ones(rows, np.bool_)
    for place in complete:
        missing[place * step : (place + 1) * step] = False
    return missing


def _chunks_along(dataset: Any, axis: int | None, step: int) -> Counter[int]:
    """Count the chunks that are stored, by their place along an axis."""
    found: Counter[int] = Counter()

    def note(chunk: Any) -> None:
        found[0 if axis is None else chunk.chunk_offset[axis] // step] += 1

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:  # HDF5 before 1.12.3
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))
    return found


class FilePool:
    """The open files of a source, and the datasets that were looked up in each."""

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._files: OpenFiles[Path, tuple[Any, dict[str, Any]]] = OpenFiles(
            lambda path: (open_file(path), {}), lambda opened: opened[0].close(), limit
        )

    def __len__(self) -> int:
        return len(self._files)

    def dataset(self, path: Path, name: str, *, keep: bool) -> Any:
        """Return an open dataset.

        Args:
            path, name: File, and the dataset's path inside it.
            keep: Remember the handle. False for groups per sample, which are too many to keep.

        Raises:
            SourceError: The file cannot be opened or lacks the dataset.
        """
        file, known = self._files.get(path)
        if name in known:
            return known[name]
        where = f"{path}: dataset {name!r}"
        with source_errors(
            f"{where} cannot be opened",
            "Is the file complete, and written by the same program as the others?",
        ):
            found = file[name]
            if confined_sources() is not None:  # the file may have been changed since it was described
                require_inside(file, name, where=str(path))
        require_filters(found, where=where)
        if keep:
            known[name] = found
        return found

    def close(self) -> None:
        """Close every file."""
        self._files.close()


# ----------------------------------------------------------------------------------------------------------
# Read samples so that each HDF5 chunk is decompressed once.
#
# h5py's default chunks cut the sample *and* the time axis, so a sample read alone decompresses every chunk
# it shares with its neighbors again. Here a block is read instead: as many samples as one row of chunks
# holds, over all time, decoded once and kept until a sample of another block is asked for. Reading the
# samples of a run in order therefore touches each chunk once, completely or in pieces along time.
#
# A block is bounded by `BLOCK_LIMIT_BYTES`. A file whose chunk rows are larger is read with fewer samples
# per block, at the price of decompressing chunks more than once; `redundancy` says how often.


BLOCK_BYTES = 8 * MIB
"""Size that a block aims for: large enough that calls cost nothing, small enough that runs stay even."""

BLOCK_LIMIT_BYTES = 512 * MIB
"""Limit of all blocks of one copy of a source. One row of h5py's default chunks of a
(10000, 201, 1024) float32 file is 258 MiB."""

_DIRECT_BYTES = 32 * 1024
"""From here on a contiguous sample is read by a call of its own: the call costs less than a second copy."""

_CONTIGUOUS_BLOCK_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The part of a piece that is read at a time."""

    samples: int
    """Samples per block; blocks start at multiples of it."""
    steps: int | None
    """Time steps (after subsampling) per block; None: all, or no time axis."""
    redundancy: int
    """Times a chunk is decompressed when all samples are read in order."""


def plan_block(piece: Piece, strides: Mapping[str, int], limit_bytes: int) -> Block:
    """Return the block of a piece: pure arithmetic on shapes.

    Args:
        piece: As stored.
        strides: Subsampling by axis word.
        limit_bytes: What one block may hold.
    """
    size, rows = piece.sample_bytes, piece.rows or 1
    per_chunk = _chunk(piece, "n")
    stride = strides.get("t", 1)
    size = max(1, size // stride if piece.steps else size)
    if piece.chunks is None and size >= _DIRECT_BYTES:
        return Block(samples=1, steps=1 if piece.steps else None, redundancy=1)
    row_bytes = per_chunk * size
    aim = min(_CONTIGUOUS_BLOCK_BYTES if piece.chunks is None else BLOCK_BYTES, limit_bytes)
    if row_bytes <= limit_bytes and (per_chunk > 1 or size <= aim):
        samples = per_chunk * max(1, aim // row_bytes)
        return Block(samples=min(samples, max(rows, 1)), steps=None, redundancy=1)
    if size <= limit_bytes and per_chunk > 1:
        pieces = math.ceil(per_chunk / (limit_bytes // size))
        return Block(samples=math.ceil(per_chunk / pieces), steps=None, redundancy=pieces)
    if piece.steps is None:
        return Block(samples=1, steps=None, redundancy=per_chunk)
    unit = math.lcm(_chunk(piece, "t"), stride) // stride
    step_bytes = max(1, size // math.ceil(piece.steps / stride))
    return Block(samples=1, steps=unit * max(1, aim // (unit * step_bytes)), redundancy=per_chunk)


def _chunk(piece: Piece, axis: str) -> int:
    """Chunk length along an axis; 1 when contiguous or without the axis."""
    if piece.chunks is None or axis not in piece.axes:
        return 1
    at = piece.axes.index(axis)
    return min(piece.chunks[at], piece.shape[at])


def block_bytes(piece: Piece, block: Block, strides: Mapping[str, int]) -> int:
    """Return bytes that a kept block of this piece holds."""
    size = piece.sample_bytes // strides.get("t", 1)
    if block.steps is not None and piece.steps:
        size = size * block.steps * strides.get("t", 1) // piece.steps
    return block.samples * size


def run_length(layout: FileLayout, blocks: Sequence[Block]) -> int:
    """Return how many consecutive rows of a file are cheap to read together.

    A multiple of every heavy piece's block where that stays small, and about `BLOCK_BYTES`.
    """
    total = max(1, sum(piece.sample_bytes for piece in layout.pieces))
    heavy = [
        block.samples
        for piece, block in zip(layout.pieces, blocks, strict=True)
        if piece.rows is not None and piece.sample_bytes * 8 >= total
    ]
    common = math.lcm(*heavy) if heavy else 1
    length = common if common <= 4 * max(heavy, default=1) else max(heavy)
    return length * max(1, BLOCK_BYTES // (length * total))


def fetch(dataset: Any, selection: tuple[slice, ...], out: NDArray[Any]) -> None:
    """The one place where sample bytes leave HDF5: `out` gets `dataset[selection]` in its dtype."""
    dataset.read_direct(out, selection)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlace:
    """One sample of one piece in a file."""

    path: Path
    """The file."""
    row: int
    """Row along the sample axis; ignored by pieces without one."""
    group: str
    """The sample's group; empty when samples are rows."""
    label: str
    """The file and where the sample is in it, for messages."""
    slot: int
    """Position of the piece in the layout: one block is kept per piece."""


class BlockReader:
    """Reads samples of pieces through blocks. One per process and copy of a source; never pickled."""

    def __init__(self, pool: FilePool, strides: Mapping[str, int]) -> None:
        self._pool = pool
        self._strides = dict(strides)
        self._kept: dict[int, tuple[tuple[object, ...], NDArray[Any]]] = {}
        self._damaged: set[tuple[object, ...]] = set()

    def read(
        self, place: SamplePlace, piece: Piece, block: Block, span: tuple[int, int] | None
    ) -> NDArray[Any]:
        """Return one sample of one piece, axes in stored order without `n`, freshly allocated.

        Args:
            place: Which sample.
            piece, block: What is read, and how much at a time.
            span: Time steps (after subsampling) `start, stop`; None without a time axis.

        Raises:
            SourceError: Names file, dataset and sample.
        """
        if span is None:
            if block.samples == 1:
                return self._direct(place, piece, (place.row, place.row + 1), None, drop=True)
            return self._from_block(place, piece, block, (0, 0), None)
        start, stop = span
        total = _steps(piece, self._strides)
        steps = min(block.steps or total, total)
        if start >= stop:
            return self._direct(place, piece, (place.row, place.row + 1), (start, start), drop=True)
        aligned = start % steps == 0 and (stop % steps == 0 or stop == total)
        if block.samples == 1 and aligned:
            return self._direct(place, piece, (place.row, place.row + 1), span, drop=True)
        cuts = [
            (max(first, start), min(first + steps, stop))
            for first in range(start - start % steps, stop, steps)
        ]
        found = [self._from_block(place, piece, block, (cut[0] // steps * steps, steps), cut) for cut in cuts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=sample_axes(piece).index("t"))

    def _from_block(
        self,
        place: SamplePlace,
        piece: Piece,
        block: Block,
        window: tuple[int, int],
        cut: tuple[int, int] | None,
    ) -> NDArray[Any]:
        """Copy the steps `cut` of a sample out of the block that starts at step `window[0]`."""
        first = place.row - place.row % block.samples if piece.rows is not None else 0
        rows = (first, min(first + block.samples, piece.rows or 1))
        begin, steps = window
        span = None if cut is None else (begin, min(begin + steps, _steps(piece, self._strides)))
        key = (place.path, place.group, piece.dataset, first, begin)
        if key in self._damaged:
            return self._direct(place, piece, (place.row, place.row + 1), cut, drop=True)
        if place.slot not in self._kept or self._kept[place.slot][0] != key:
            self._kept.pop(place.slot, None)  # before the next is read, or two blocks would be held
            try:
                self._kept[place.slot] = (key, self._direct(place, piece, rows, span, drop=False))
            except SourceError:
                # One bad chunk must not cost its neighbors: from here on sample by sample.
                self._damaged.add(key)
                return self._direct(place, piece, (place.row, place.row + 1), cut, drop=True)
        kept = self._kept[place.slot][1]
        index: list[int | slice] = [slice(None)] * kept.ndim
        if piece.rows is not None:
            index[piece.axes.index("n")] = place.row - first
        if cut is not None:
            index[piece.axes.index("t")] = slice(cut[0] - begin, cut[1] - begin)
        return kept[tuple(index)].copy()

    def _direct(
        self,
        place: SamplePlace,
        piece: Piece,
        rows: tuple[int, int],
        span: tuple[int, int] | None,
        *,
        drop: bool,
    ) -> NDArray[Any]:
        """Read rows and steps into a fresh array; `drop` removes the sample axis (of length 1)."""
        stride = self._strides.get("t", 1)
        selection: list[slice] = []
        shape: list[int] = []
        for axis, size in zip(piece.axes, piece.shape, strict=True):
            if axis == "n":
                selection.append(slice(*rows))
                shape.append(rows[1] - rows[0])
            elif axis == "t" and span is not None:
                selection.append(slice(span[0] * stride, (span[1] - 1) * stride + 1, stride))
                shape.append(span[1] - span[0])
            else:
                selection.append(slice(0, size))
                shape.append(size)
        out = np.empty(shape, dtype=piece.dtype)
        name = f"{place.group}/{piece.dataset}" if place.group else piece.dataset
        dataset = self._pool.dataset(place.path, name, keep=not place.group)
        if tuple(dataset.shape) != piece.shape:
            raise SourceError(
                f"{place.label}: dataset {name!r} has shape {tuple(dataset.shape)}, expected {piece.shape} "
                "as in the rest",
                hint="One sample differs, or the file changed; fix or exclude it",
            )
        if out.size:
            with source_errors(
                f"{place.label}: dataset {name!r} cannot be read",
                "The file is damaged there; copy or download it again, or leave the sample out",
            ):
                fetch(dataset, tuple(selection), out)
            if piece.narrowed and not np.isfinite(out).all():  # HDF5 narrows without a word
                exact = np.empty(shape, dtype=dataset.dtype)
                fetch(dataset, tuple(selection), exact)
                where = f"{place.label}: dataset {name!r}"
                read_as(exact, out.dtype, where=where)
        return out.squeeze(axis=piece.axes.index("n")) if drop and "n" in piece.axes else out


def _steps(piece: Piece, strides: Mapping[str, int]) -> int:
    """Time steps after subsampling."""
    return sample_shape(piece, strides)[sample_axes(piece).index("t")]
