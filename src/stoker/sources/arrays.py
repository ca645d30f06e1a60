"""Samples from named arrays: variable-length trajectories in HDF5 and Zarr, grids in Zarr, `.npy` files."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, StokerError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.containers import Container, Opened, find_containers, open_container
from stoker.sources.files import Paths, refuse_together, require_listable
from stoker.sources.hdf5_layout import Piece, arrange, piece_field
from stoker.sources.hdf5_layouts import declared_fields, say_left_out
from stoker.sources.hdf5_open import FOREIGN_ERRORS, cause_of
from stoker.sources.placed import PlacedField, PlacedPart, check_order, offset_of, plain_dtype, row_places
from stoker.sources.protocol import Part, SourceIdentity, read_as, read_dtype
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# How the arrays of a container are samples: rows of arrays, one group each, or flat arrays with offsets.
#
# rows      every array has the samples along axis 0 (or the axis declared `n`) groups    one group per
# sample; lengths along axis 0 may differ from group to group offsets   samples one after another along axis
# 0, and an array that says where each begins


Layout: TypeAlias = Literal["rows", "groups", "offsets"]
OFFSET_NAMES = ("offsets", "ptr", "cu_seqlens", "row_splits")
"""Arrays that are taken for offsets where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayField:
    """One field of every sample."""

    name: str
    array: str
    """Path of its array, below a sample's group with `groups`."""
    axes: tuple[str, ...] | None
    """Words of the axes of one sample, as stored; None: as it is, axis 0 first."""
    per_step: bool
    """With `offsets`: it lies along the steps; else one row per sample. Elsewhere True."""
    field: Field
    """As served."""

    def arranged(self, raw: NDArray[Any], where: str) -> NDArray[Any]:
        """One sample as served.

        Raises:
            DecodeError: As `read_as`.
        """
        dtype = read_dtype(raw.dtype, where=self.array)
        values = raw if raw.dtype == dtype else read_as(raw, dtype, where=where)
        return np.array(values if self.axes is None else arrange(values, self.axes), order="C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What one container holds."""

    container: Container
    layout: Layout
    count: int
    """Samples."""
    groups: tuple[str, ...] = ()
    starts: NDArray[np.int64] | None = None
    """With `offsets`: first step of each sample, and the total."""

    def place(self, row: int) -> str:
        """Where a sample is, for messages."""
        inside = f"group {self.groups[row]!r}" if self.groups else f"row {row}"
        return f"{self.container.path}: {inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user said about arrays."""

    layout: Layout | None
    fields: Mapping[str, str] | None
    offsets: str | None
    attributes: tuple[str, ...]


def describe(
    container: Container, opened: Opened, wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    """Samples and fields of one container.

    Raises:
        SourceError: It holds no samples, or arrays that do not fit together.
    """
    where = str(container.path)
    groups = [name for name in opened.groups() if opened.arrays(name)]
    if wanted.layout == "groups" or (wanted.layout is None and groups):
        if not groups:
            raise SourceError(
                f"{where} has no groups with arrays, so no trajectories. Use {arg('layout', 'rows')}"
            )
        known = set(groups)
        say_left_out([name for name in opened.groups() if name not in known], (), where=where)
        return _groups(container, opened, groups, wanted)
    arrays = {name: array for name, array in opened.arrays("").items() if "/" not in name or not groups}
    offsets = wanted.offsets or next((name for name in OFFSET_NAMES if name in arrays), None)
    layout = wanted.layout or ("offsets" if offsets in arrays else "rows")
    if wanted.attributes:
        raise ConfigError(
            f"{arg('attributes')} are read from the groups of samples, and {where} is read by {layout}"
        )
    if layout == "offsets":
        if offsets not in arrays:
            raise SourceError(
                f"{where} has no array {offsets or ', '.join(OFFSET_NAMES)} that says where samples begin. "
                f"Name it with {arg('offsets')}; it has {', '.join(arrays) or 'no array'}"
            )
        length = arrays[offsets].shape[0] if arrays[offsets].ndim else 0
        require_listable(length, f"{where}: {offsets!r}")
        if absent := opened.absent(offsets, 0, length):
            raise SourceError(f"{where}: {offsets!r}: chunk {absent} is not there. Copy or write it again")
        return _offsets(container, {name: opened.array(name) for name in arrays}, offsets, wanted)
    return _rows(container, {name: opened.array(name) for name in arrays}, wanted)


def _wanted_fields(
    wanted: Wanted, arrays: Mapping[str, Any], where: str
) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """Field name to array and declared axes: those named, or every array of numbers."""
    if wanted.fields is None:
        return {
            name.replace("/", "."): (name, None)
            for name, array in arrays.items()
            if array.dtype.kind in "biuf"
        }
    found: dict[str, tuple[str, tuple[str, ...] | None]] = {}
    for key, text in wanted.fields.items():
        plain = key.strip("/").replace("/", ".")
        if ":" in text or " " in text.strip() or (text and text not in arrays):
            (array, axes) = declared_fields({key: text})[plain]
            found[plain] = (array, axes)
        else:
            found[plain] = (text or key, None)
    for array, _ in found.values():
        if array not in arrays:
            raise SourceError(f"{where} has no array {array!r}. It has {', '.join(arrays) or 'none'}")
    return found


def _make_field(
    where: str, array: Any, axes: tuple[str, ...] | None, shape: Sequence[int], *, ragged: bool, time: bool
) -> Field:
    """The field of one sample of stored `shape`; `where` names file and array."""
    dtype = read_dtype(array.dtype, where=where).name
    if axes is None:
        if dtype == "complex64":
            raise SourceError(f"{where} is complex. Declare its axes, as {arg('fields', {'u': 't x'})}")
        found = Field(shape=tuple(shape), dtype=dtype, time=time)
    else:
        found = piece_field(Piece(dataset="", axes=axes, shape=tuple(shape), dtype=dtype), {})
        if ragged and axes[0] not in ("t",) and any(axis in ("x", "y", "z") for axis in axes):
            raise SourceError(f"{where} varies along {axes[0]!r}; only time or nodes may vary")
    if ragged:
        return Field(shape=(-1, *found.shape[1:]), dtype=found.dtype, time=found.time, ragged=True)
    return found


def _rows(
    container: Container, arrays: Mapping[str, Any], wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    fields: list[ArrayField] = []
    counts: dict[str, int] = {}
    for name, (path, axes) in _wanted_fields(wanted, arrays, where).items():
        array = arrays[path]
        if axes is not None and (axes[0] != "n" or len(axes) != array.ndim):
            raise SourceError(
                f"{where}: axes {' '.join(axes)!r} of {path!r} {tuple(array.shape)} must be one word an axis "
                "and begin with n, the samples"
            )
        if not array.ndim:
            continue
        counts[path] = int(array.shape[0])
        own = None if axes is None else axes[1:]
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, own, array.shape[1:], ragged=False, time=False)
        fields.append(ArrayField(name=name, array=path, axes=own, per_step=True, field=field))
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "no array of numbers"
        raise SourceError(
            f"{where}: arrays have different numbers of samples along axis 0: {listed}. "
            f"Name those that belong together with {arg('fields')}"
        )
    return Described(container=container, layout="rows", count=next(iter(counts.values()))), tuple(fields)


def _offsets(
    container: Container, arrays: Mapping[str, Any], offsets: str, wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    rest = {name: array for name, array in arrays.items() if name != offsets and array.ndim}
    chosen = _wanted_fields(wanted, rest, where)
    starts = np.asarray(arrays[offsets][...])
    count = len(starts) - 1
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or count < 1 or starts[0] != 0:
        raise SourceError(
            f"{where}: {offsets!r} must hold whole numbers from 0 on, one more than there are samples; it is "
            f"{starts.dtype} {starts.shape}"
        )
    starts = starts.astype(np.int64)
    if bool((np.diff(starts) < 0).any()):
        raise SourceError(f"{where}: {offsets!r} falls at sample {int(np.argmax(np.diff(starts) < 0))}")
    fields: list[ArrayField] = []
    for name, (path, axes) in chosen.items():
        array, total = rest[path], int(starts[-1])
        per_step = int(array.shape[0]) == total
        if not per_step and int(array.shape[0]) != count:
            raise SourceError(
                f"{where}: {path!r} has {array.shape[0]:,} rows; {offsets!r} ends at {total:,} and has "
                f"{count:,} samples. Is the file complete? If it is, name the arrays that belong to it with "
                f"{arg('fields')}"
            )
        shape = (1, *array.shape[1:]) if per_step else tuple(array.shape[1:])
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, axes, shape, ragged=per_step, time=per_step)
        fields.append(ArrayField(name=name, array=path, axes=axes, per_step=per_step, field=field))
    found = Described(container=container, layout="offsets", count=count, starts=starts)
    return found, tuple(fields)


def _groups(
    container: Container, opened: Opened, groups: list[str], wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    first = opened.arrays(groups[0])
    chosen = _wanted_fields(wanted, first, f"{where}: group {groups[0]!r}")
    shapes: dict[str, set[int]] = {name: set() for name in chosen}
    steps: list[tuple[int, ...]] = []
    for group in groups:
        arrays = opened.arrays(group)
        # What a group lacks is said when it is read, so that one bad trajectory is no end of all.
        sizes = {n: int(arrays[p].shape[0]) for n, (p, _) in chosen.items() if p in arrays and arrays[p].ndim}
        for name, size in sizes.items():
            shapes[name].add(size)
        steps.append(tuple(sizes[name] for name in chosen if name in sizes))
    varying = [name for name, sizes in shapes.items() if len(sizes) > 1]
    # Fields that vary, and all alike, have the steps of the trajectory along axis 0.
    own = [i for i, name in enumerate(chosen) if name in varying]
    whole = [sizes for sizes in steps if len(sizes) == len(chosen)]
    alike = all(len({sizes[i] for i in own}) == 1 for sizes in whole) if own else False
    fields: list[ArrayField] = []
    for name, (path, axes) in chosen.items():
        array, ragged = first[path], name in varying
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, axes, array.shape, ragged=ragged, time=ragged and alike)
        fields.append(ArrayField(name=name, array=path, axes=axes, per_step=True, field=field))
    scalar = Field(shape=(), dtype="float32")
    for name in wanted.attributes:
        fields.append(ArrayField(name=name, array="", axes=None, per_step=True, field=scalar))
    found = Described(container=container, layout="groups", count=len(groups), groups=tuple(groups))
    return found, tuple(fields)


# ----------------------------------------------------------------------------------------------------------
# Where the samples of named arrays lie in their files.


def placed_arrays(one: Described, opened: Opened, fields: Sequence[ArrayField]) -> PlacedPart:
    """The samples of one container.

    Raises:
        SourceError: They cannot be served from where they lie.
    """
    path = one.container.path
    if one.container.kind == "zarr":
        raise SourceError(
            f"{path} is Zarr, whose chunks are stored apart, so it cannot be served in place. "
            "Encode it once instead: stoker.precompute(source, None, cache_dir, name=...)"
        )
    if any(not field.array for field in fields):
        raise SourceError(
            f"{path}: attributes are not served in place. Leave {arg('attributes')} out, or precompute"
        )
    try:
        return PlacedPart(count=one.count, fields={f.name: _placed_field(one, opened, f) for f in fields})
    except FOREIGN_ERRORS as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} cannot be read ({error}). Copy it again") from error


def _placed_field(one: Described, opened: Opened, field: ArrayField) -> PlacedField:
    where = f"{one.container.path}: array {field.array!r}"
    check_order(field.axes or (), where=where)
    lengths: Any = None
    if one.layout == "groups":
        found = [opened.array(f"{group}/{field.array}") for group in one.groups]
        first = found[0]
        if any(array.dtype != first.dtype or array.shape[1:] != first.shape[1:] for array in found):
            raise SourceError(f"{where} differs in dtype or shape from group to group")
        named = zip(found, one.groups, strict=True)
        at = np.array([offset_of(array, where=f"{where} of {group}") for array, group in named], np.int64)
        lengths = np.array([array.shape[0] if array.ndim else 1 for array in found], np.int64)
    else:
        first = opened.array(field.array)
        rows = np.arange(one.count, dtype=np.int64)
        if one.starts is not None and field.per_step:
            rows, lengths = one.starts[:-1], np.diff(one.starts)
        at = row_places(first, rows, where=where)
    served = dataclasses.replace(field.field, dtype=plain_dtype(first.dtype, where=where))
    return PlacedField(
        field=served, path=one.container.path, at=at, lengths=lengths if served.ragged else None
    )


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
