"""Samples from named arrays: variable-length trajectories in HDF5 and Zarr, grids in Zarr, `.npy` files."""

from __future__ import annotations

import bisect
import itertools
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, StokerError, arg
from stoker.schema import Json, Sample, Schema
from stoker.sources.array_layout import ArrayField, Described, Layout, Wanted, describe
from stoker.sources.array_placed import placed_arrays
from stoker.sources.containers import Container, Opened, find_containers, open_container
from stoker.sources.dtypes import read_as
from stoker.sources.files import Paths, refuse_together, require_listable
from stoker.sources.hdf5_open import FOREIGN_ERRORS, cause_of
from stoker.sources.placed import PlacedPart
from stoker.sources.protocol import Part, SourceIdentity
from stoker.units import MIB

VERSION = 1
"""Bumped by hand when the same files would give other samples."""
OPEN_CONTAINERS = 16
BLOCK_BYTES = 64 * MIB
"""Whole chunks of an array that are kept while samples are read from them, at most."""


class ArraySource:
    """Trajectories or rows in HDF5 files, Zarr folders (format 2 and 3) or `.npy` files.

    Args:
        path: A file, a Zarr folder, a folder or pattern of these, or a list.
        layout: `"groups"`: one group per trajectory; `"offsets"`: flat arrays and one that says where each
            trajectory begins; `"rows"`: samples along axis 0. None: by what the first file holds.
        fields: `{"u": "u"}`, or with axes as for `HDF5Source`, `{"u": "n t x c"}`, `{"v": "flow/v: t x"}`.
            None: every array of numbers, as stored.
        offsets: The array of beginnings, `(trajectories + 1,)`.
        attributes: Numbers among each group's attributes that are fields, as float32.
        fill_missing: Take chunks that are not stored for their fill value: zarr leaves out chunks of nothing
            else, HDF5 what was never written. False: such a sample cannot be read.

    The array of a `.npy` file is called `data`. Fields whose length along axis 0 varies are ragged; they have
    time where all of them vary alike, or where axes begin with `t`. float64 is read as float32.

    Raises:
        SourceError: Nothing is there; on first use: damaged, or not laid out so.
        ConfigError: zarr is not installed.
    """

    def __init__(
        self,
        path: Paths,
        *,
        layout: Layout | None = None,
        fields: Mapping[str, str] | None = None,
        offsets: str | None = None,
        attributes: Sequence[str] = (),
        fill_missing: bool = False,
    ) -> None:
        if layout not in (None, "rows", "groups", "offsets"):
            raise ConfigError(f"layout {layout!r} is unknown. Expected rows, groups, offsets or None")
        self._wanted = Wanted(
            layout=layout,
            fields=None if fields is None else dict(fields),
            offsets=offsets,
            attributes=tuple(attributes),
        )
        self._fill_missing = fill_missing
        self._containers = find_containers(path)
        self._scanned: tuple[tuple[Described, ...], tuple[ArrayField, ...]] | None = None
        self._reader = ArrayReader(fill_missing=fill_missing)

    def __repr__(self) -> str:
        """The first file, and how many there are."""
        return f"ArraySource({str(self._containers[0].path)!r}, {len(self._containers)} in all)"

    def __getstate__(self) -> dict[str, Any]:
        """Settings and description travel; open files stay."""
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = ArrayReader(fill_missing=self._fill_missing)

    def __len__(self) -> int:
        """Samples in all containers."""
        return sum(one.count for one in self._scan()[0])

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._reader.close()

    def schema(self) -> Schema:
        """Fields of every sample."""
        return {field.name: field.field for field in self._scan()[1]}

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample; `start:stop` cuts fields that have time.

        Raises:
            SourceError: Damaged or missing data; names container, array and sample.
            IndexError: No such number.
        """
        one, row = self._find(number)
        return {field.name: self._reader.read(one, field, row, (start, stop)) for field in self._scan()[1]}

    def locate(self, number: int) -> str:
        """File or folder, and row or group."""
        one, row = self._find(number)
        return one.place(row)

    def _find(self, number: int) -> tuple[Described, int]:
        described, _ = self._scan()
        firsts = list(itertools.accumulate((one.count for one in described), initial=0))
        if not 0 <= number < firsts[-1]:
            raise IndexError(f"sample {number} does not exist: this source has {firsts[-1]}")
        place = bisect.bisect_right(firsts, number) - 1
        return described[place], number - firsts[place]

    def runs(self) -> Sequence[range]:
        """Samples whose data lie in the same chunks, else a few at a time; never across containers."""
        found: list[range] = []
        first = 0
        for one in self._scan()[0]:
            edges = self._edges(one)
            found += [range(first + low, first + high) for low, high in itertools.pairwise(edges)]
            first += one.count
        return found

    def _edges(self, one: Described) -> list[int]:
        if one.layout == "groups":
            return [*range(one.count + 1)]
        rows = [self._reader.chunk_rows(one, field) for field in self._scan()[1] if field.per_step]
        step = max([1, *rows])
        if one.starts is None:
            return [*range(0, one.count, step), one.count]
        cuts = np.flatnonzero(np.diff(one.starts[:-1] // step)) + 1
        return [0, *cuts.tolist(), one.count]

    def keys(self) -> Sequence[str]:
        """Container and group, or row."""
        return [
            f"{one.container.key}:{one.groups[row] if one.groups else row}"
            for one in self._scan()[0]
            for row in range(one.count)
        ]

    def identity(self) -> SourceIdentity:
        """One part per container, with all its files, and how they are read."""
        described, fields = self._scan()
        parts = tuple(
            Part(name=one.container.name, count=one.count, files=one.container.files()) for one in described
        )
        read: list[Json] = [
            [field.name, field.array, None if field.axes is None else list(field.axes), field.per_step]
            for field in fields
        ]
        settings: dict[str, Json] = {
            "layout": described[0].layout,
            "fields": read,
            "offsets": self._wanted.offsets,
            "fill_missing": self._fill_missing,
        }
        return SourceIdentity(kind=f"arrays/{VERSION}", parts=parts, settings=settings)

    def places(self) -> Sequence[PlacedPart]:
        """Where samples lie in the files, for `stoker.index_in_place`.

        Raises:
            SourceError: Zarr, chunked, compressed, or stored otherwise than served.
        """
        described, fields = self._scan()
        return [placed_arrays(one, self._reader.opened(one.container), fields) for one in described]

    def _scan(self) -> tuple[tuple[Described, ...], tuple[ArrayField, ...]]:
        if self._scanned is None:
            found: list[tuple[Described, tuple[ArrayField, ...]]] = []
            bad: list[SourceError] = []
            for one in self._containers:
                try:
                    found.append(self._described(one))
                except SourceError as error:
                    bad.append(error)
            refuse_together(bad, len(self._containers), f"{self._containers[0].path.parent}")
            require_listable(sum(one.count for one, _ in found), f"{self._containers[0].path.parent}")
            self._scanned = tuple(one for one, _ in found), _common([fields for _, fields in found], found)
        return self._scanned

    def _described(self, container: Container) -> tuple[Described, tuple[ArrayField, ...]]:
        try:
            found = describe(container, self._reader.opened(container), self._wanted)
            if not found[0].count:
                raise SourceError(f"{container.path} holds no sample: its arrays are empty. Leave it out")
            require_listable(found[0].count, str(container.path))
            if container.kind == "hdf5" and found[0].layout != "groups" and not self._fill_missing:
                for field in found[1]:  # refuses an array of which next to nothing was written
                    self._reader.opened(container).absent(field.array, 0, 1)
            return found
        except StokerError:
            raise
        except FOREIGN_ERRORS as error:
            raise SourceError(
                f"{container.path}: the description of its arrays is damaged ({type(error).__name__}: "
                f"{error}). Copy or write the file again"
            ) from cause_of(error)


def _common(
    each: Sequence[tuple[ArrayField, ...]], found: Sequence[tuple[Described, tuple[ArrayField, ...]]]
) -> tuple[ArrayField, ...]:
    """The fields of all containers; what is ragged in one, or has other lengths in another, is ragged in all.

    Raises:
        SourceError: Containers have other fields or layouts than the first.
    """
    first = {field.name: field for field in each[0]}
    for described, fields in found:
        other = {field.name: field for field in fields}
        if other.keys() != first.keys() or described.layout != found[0][0].layout:
            raise SourceError(
                f"{described.container.path} has fields {', '.join(other)} by {described.layout}, "
                f"{found[0][0].container.path} has {', '.join(first)} by {found[0][0].layout}. "
                f"Name the fields with {arg('fields')}, or give only files of one kind"
            )
        for name, field in other.items():
            first[name] = _merged(first[name], field, described)
    return tuple(first.values())


def _merged(one: ArrayField, other: ArrayField, described: Described) -> ArrayField:
    a, b = one.field, other.field
    if a == b:
        return one
    free = (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype) and described.layout == "groups"
    if not free or not a.shape or not b.shape:
        raise SourceError(
            f"{described.container.path}: field {one.name!r} is {b.dtype} {b.shape}, elsewhere it is "
            f"{a.dtype} {a.shape}. Give files of one shape together"
        )
    import dataclasses

    field = dataclasses.replace(a, shape=(-1, *a.shape[1:]), ragged=True, time=a.time or b.time)
    return dataclasses.replace(one, field=field)


class ArrayReader:
    """Open containers of one process, and the last chunks read from them."""

    def __init__(self, *, fill_missing: bool) -> None:
        self._fill_missing = fill_missing
        self._owner = os.getpid()
        self._open: OrderedDict[str, Opened] = OrderedDict()
        self._blocks: dict[tuple[str, str], tuple[int, NDArray[Any]]] = {}
        self._arrays: dict[tuple[str, str], Any] = {}

    def opened(self, container: Container) -> Opened:
        """The container, open in this process."""
        if self._owner != os.getpid():  # handles of before a fork are a copy of the parent's: not closed
            self._owner, self._open = os.getpid(), OrderedDict()
            self._blocks, self._arrays = {}, {}
        key = str(container.path)
        if key not in self._open:
            while len(self._open) >= OPEN_CONTAINERS:
                old, one = self._open.popitem(last=False)
                self._arrays = {pair: array for pair, array in self._arrays.items() if pair[0] != old}
                one.close()
            self._open[key] = open_container(container)
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        """Close all."""
        for one in self._open.values() if self._owner == os.getpid() else ():
            one.close()
        self._open.clear()
        self._blocks, self._arrays = {}, {}

    def chunk_rows(self, one: Described, field: ArrayField) -> int:
        """Rows along axis 0 of one chunk; 1 where the array is not chunked."""
        chunks = getattr(self._array(one, field.array), "chunks", None)
        return int(chunks[0]) if chunks else 1

    def _array(self, one: Described, name: str) -> Any:
        key = (str(one.container.path), name)
        opened = self.opened(one.container)
        if one.layout == "groups":  # too many to keep
            return opened.array(name)
        if key not in self._arrays:
            self._arrays[key] = opened.array(name)
        return self._arrays[key]

    def read(
        self, one: Described, field: ArrayField, row: int, span: tuple[int | None, int | None]
    ) -> NDArray[Any]:
        """One field of one sample, as served.

        Raises:
            SourceError: It cannot be read; names container, array and sample.
        """
        group = one.groups[row] if one.groups else ""
        where = f"{one.place(row)}: array {field.array!r}"
        try:
            if group and not field.array:
                return _number(self.opened(one.container).attributes(group).get(field.name), field, where)
            raw = self._raw(one, field, row, span, where)
            found = field.arranged(raw, where)
        except FOREIGN_ERRORS as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(
                f"{where} cannot be read ({type(error).__name__}: {error}). "
                "Copy or write the file again, or leave the sample out"
            ) from error
        if field.field.time and not _time_first(field):
            found = np.array(found[slice(*span)], order="C")
        return found

    def _raw(
        self,
        one: Described,
        field: ArrayField,
        row: int,
        span: tuple[int | None, int | None],
        where: str,
    ) -> NDArray[Any]:
        cut = slice(*span) if field.field.time and _time_first(field) else slice(None)
        if one.layout == "groups":
            array = self._array(one, f"{one.groups[row]}/{field.array}")
            if not array.ndim:
                self._require_stored(one, f"{one.groups[row]}/{field.array}", (0, 1), where)
                return np.asarray(array[()])
            low, high, _ = cut.indices(array.shape[0])
            return self._rows(one, f"{one.groups[row]}/{field.array}", array, (low, max(low, high)), where)
        array = self._array(one, field.array)
        if one.starts is not None and field.per_step:
            begin, end = one.starts[row : row + 2].tolist()
            low, high, _ = cut.indices(end - begin)
            return self._rows(one, field.array, array, (begin + low, begin + max(low, high)), where)
        return self._rows(one, field.array, array, (row, row + 1), where)[0][cut if array.ndim > 1 else ()]

    def _require_stored(self, one: Described, name: str, rows: tuple[int, int], where: str) -> None:
        if not self._fill_missing and (absent := self.opened(one.container).absent(name, *rows)):
            raise SourceError(
                f"{where}: chunk {absent} is not there. Copy or write it again; if it was left out because "
                f"it holds nothing but the fill value, give {arg('fill_missing', True)}"
            )

    def _rows(self, one: Described, name: str, array: Any, rows: tuple[int, int], where: str) -> NDArray[Any]:
        """Rows along axis 0, through the chunks that were read last."""
        low, high = rows
        if low == high:
            return np.empty((0, *array.shape[1:]), array.dtype)
        self._require_stored(one, name, rows, where)
        chunks = getattr(array, "chunks", None)
        size = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        if not chunks or one.layout == "groups" or chunks[0] * size > BLOCK_BYTES:
            return np.asarray(array[low:high])
        key = (str(one.container.path), name)
        begin, end = low // chunks[0] * chunks[0], min(-(-high // chunks[0]) * chunks[0], array.shape[0])
        first, block = self._blocks.get(key, (0, np.empty(0)))
        if not (first <= low and high <= first + len(block)):
            first, block = begin, np.asarray(array[begin:end])
            if block.nbytes <= BLOCK_BYTES:
                self._blocks[key] = (first, block)
        return block[low - first : high - first]


def _time_first(field: ArrayField) -> bool:
    return field.axes is None or field.axes[0] == "t"


def _number(value: Any, field: ArrayField, where: str) -> NDArray[Any]:
    if value is None:
        raise SourceError(f"{where}: attribute {field.name!r} is not there. Write it, or leave it out")
    return read_as(value, np.dtype(np.float32), where=where).reshape(())
