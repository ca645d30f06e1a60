"""Samples from named arrays: variable-length trajectories in HDF5 and Zarr, grids in Zarr, `.npy` files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.containers import Container, ContainerReader, find_containers, open_container
from stoker.sources.files import FoundT, OpenFiles, Paths, describe_each, require_listable, source_errors
from stoker.sources.hdf5_declared import declared_fields, say_left_out
from stoker.sources.hdf5_fields import (
    FieldLocations,
    PartLocations,
    Piece,
    arrange,
    check_order,
    offset_of,
    piece_field,
    plain_dtype,
    row_places,
)
from stoker.sources.protocol import Part, PartedSource, PartT, SourceIdentity, read_as, read_dtype
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
    """With `offsets`: it has one row per step; else one row per sample. Elsewhere True."""
    field: Field
    """As served."""

    def arranged(self, raw: NDArray[Any], where: str) -> NDArray[Any]:
        """Return one sample as served.

        Raises:
            DecodeError: As `read_as`.
        """
        dtype = read_dtype(raw.dtype, where=self.array)
        values = raw if raw.dtype == dtype else read_as(raw, dtype, where=where)
        return np.array(values if self.axes is None else arrange(values, self.axes), order="C")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSamples:
    """The samples of one container."""

    container: Container
    layout: Layout
    count: int
    """Samples."""
    groups: tuple[str, ...] = ()
    starts: NDArray[np.int64] | None = None
    """With `offsets`: first step of each sample, and the total."""

    def place(self, row: int) -> str:
        """Return the place of a sample, for messages."""
        inside = f"group {self.groups[row]!r}" if self.groups else f"row {row}"
        return f"{self.container.path}: {inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """The user's settings for arrays."""

    layout: Layout | None
    fields: Mapping[str, str] | None
    offsets: str | None
    attributes: tuple[str, ...]


def describe_container(
    container: Container, opened: ContainerReader, options: ArrayOptions
) -> tuple[ContainerSamples, tuple[ArrayField, ...]]:
    """Return samples and fields of one container.

    Raises:
        SourceError: It holds no samples, or arrays that do not fit together.
    """
    where = str(container.path)
    groups = [name for name in opened.groups() if opened.arrays(name)]
    if options.layout == "groups" or (options.layout is None and groups):
        if not groups:
            raise SourceError(
                f"{where} has no groups with arrays, so no trajectories", hint=f"Use {arg('layout', 'rows')}"
            )
        known = set(groups)
        say_left_out([name for name in opened.groups() if name not in known], (), where=where)
        return _groups(container, opened, groups, options)
    arrays = {name: array for name, array in opened.arrays("").items() if "/" not in name or not groups}
    offsets = options.offsets or next((name for name in OFFSET_NAMES if name in arrays), None)
    layout = options.layout or ("offsets" if offsets in arrays else "rows")
    if options.attributes:
        raise ConfigError(
            f"{arg('attributes')} are read from the groups of samples, and {where} is read by {layout}"
        )
    if layout == "offsets":
        if offsets not in arrays:
            raise SourceError(
                f"{where} has no array {offsets or ', '.join(OFFSET_NAMES)} that says where samples begin",
                hint=f"Name it with {arg('offsets')}; it has {', '.join(arrays) or 'no array'}",
            )
        length = arrays[offsets].shape[0] if arrays[offsets].ndim else 0
        require_listable(length, f"{where}: {offsets!r}")
        if absent := opened.absent(offsets, 0, length):
            raise SourceError(
                f"{where}: {offsets!r}: chunk {absent} is not there", hint="Copy or write it again"
            )
        return _offsets(container, {name: opened.array(name) for name in arrays}, offsets, options)
    return _rows(container, {name: opened.array(name) for name in arrays}, options)


def _choose_fields(
    options: ArrayOptions, arrays: Mapping[str, Any], where: str
) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """Field name to array and declared axes: those named, or every array of numbers."""
    if options.fields is None:
        return {
            name.replace("/", "."): (name, None)
            for name, array in arrays.items()
            if array.dtype.kind in "biuf"
        }
    found: dict[str, tuple[str, tuple[str, ...] | None]] = {}
    for key, text in options.fields.items():
        plain = key.strip("/").replace("/", ".")
        if ":" in text or " " in text.strip() or (text and text not in arrays):
            (array, axes) = declared_fields({key: text})[plain]
            found[plain] = (array, axes)
        else:
            found[plain] = (text or key, None)
    for array, _ in found.values():
        if array not in arrays:
            raise SourceError(f"{where} has no array {array!r}", hint=f"It has {', '.join(arrays) or 'none'}")
    return found


def _make_field(
    where: str, array: Any, axes: tuple[str, ...] | None, shape: Sequence[int], *, ragged: bool, time: bool
) -> Field:
    """Return the field of one sample of stored `shape`; `where` names file and array."""
    dtype = read_dtype(array.dtype, where=where).name
    if axes is None:
        if dtype == "complex64":
            raise SourceError(
                f"{where} is complex", hint=f"Declare its axes, as {arg('fields', {'u': 't x'})}"
            )
        found = Field(shape=tuple(shape), dtype=dtype, time=time)
    else:
        found = piece_field(Piece(dataset="", axes=axes, shape=tuple(shape), dtype=dtype), {})
        if ragged and axes[0] not in ("t",) and any(axis in ("x", "y", "z") for axis in axes):
            raise SourceError(f"{where} varies along {axes[0]!r}; only time or nodes may vary")
    if ragged:
        return Field(shape=(-1, *found.shape[1:]), dtype=found.dtype, time=found.time, ragged=True)
    return found


def _rows(
    container: Container, arrays: Mapping[str, Any], options: ArrayOptions
) -> tuple[ContainerSamples, tuple[ArrayField, ...]]:
    where = str(container.path)
    fields: list[ArrayField] = []
    counts: dict[str, int] = {}
    for name, (path, axes) in _choose_fields(options, arrays, where).items():
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
            f"{where}: arrays have different numbers of samples along axis 0: {listed}",
            hint=f"Name those that belong together with {arg('fields')}",
        )
    found = ContainerSamples(container=container, layout="rows", count=next(iter(counts.values())))
    return found, tuple(fields)


def _offsets(
    container: Container, arrays: Mapping[str, Any], offsets: str, options: ArrayOptions
) -> tuple[ContainerSamples, tuple[ArrayField, ...]]:
    where = str(container.path)
    rest = {name: array for name, array in arrays.items() if name != offsets and array.ndim}
    chosen = _choose_fields(options, rest, where)
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
                f"{count:,} samples",
                hint="Is the file complete? If it is, name the arrays that belong to it with "
                f"{arg('fields')}",
            )
        shape = (1, *array.shape[1:]) if per_step else tuple(array.shape[1:])
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, axes, shape, ragged=per_step, time=per_step)
        fields.append(ArrayField(name=name, array=path, axes=axes, per_step=per_step, field=field))
    found = ContainerSamples(container=container, layout="offsets", count=count, starts=starts)
    return found, tuple(fields)


def _groups(
    container: Container, opened: ContainerReader, groups: list[str], options: ArrayOptions
) -> tuple[ContainerSamples, tuple[ArrayField, ...]]:
    where = str(container.path)
    first = opened.arrays(groups[0])
    chosen = _choose_fields(options, first, f"{where}: group {groups[0]!r}")
    shapes: dict[str, set[int]] = {name: set() for name in chosen}
    steps: list[tuple[int, ...]] = []
    for group in groups:
        arrays = opened.arrays(group)
        # What a group lacks is reported when it is read, so that one bad trajectory does not stop the others.
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
    for name in options.attributes:
        fields.append(ArrayField(name=name, array="", axes=None, per_step=True, field=scalar))
    found = ContainerSamples(container=container, layout="groups", count=len(groups), groups=tuple(groups))
    return found, tuple(fields)


# ----------------------------------------------------------------------------------------------------------
# Find the bytes of samples in files with named arrays.


def placed_arrays(
    one: ContainerSamples, opened: ContainerReader, fields: Sequence[ArrayField]
) -> PartLocations:
    """Return the samples of one container.

    Raises:
        SourceError: They cannot be served in place.
    """
    path = one.container.path
    if one.container.kind == "zarr":
        raise SourceError(
            f"{path} is Zarr, whose chunks are stored apart, so it cannot be served in place",
            hint="Encode it once instead: stoker.precompute(source, None, cache_dir, name=...)",
        )
    if any(not field.array for field in fields):
        raise SourceError(
            f"{path}: attributes are not served in place",
            hint=f"Leave {arg('attributes')} out, or precompute",
        )
    with source_errors(f"{path} cannot be read", "Copy it again"):
        return PartLocations(count=one.count, fields={f.name: _placed_field(one, opened, f) for f in fields})


def _placed_field(one: ContainerSamples, opened: ContainerReader, field: ArrayField) -> FieldLocations:
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
    return FieldLocations(
        field=served, path=one.container.path, at=at, lengths=lengths if served.ragged else None
    )


VERSION = 1
"""Bumped by hand when the same files would give other samples."""
OPEN_CONTAINERS = 16
BLOCK_BYTES = 64 * MIB
"""Whole chunks of an array that are kept while samples are read from them, at most."""


class ArrayReader:
    """Open containers of one process, and the last chunks read from them."""

    def __init__(self, *, fill_missing: bool) -> None:
        self._fill_missing = fill_missing
        self._files: OpenFiles[Container, tuple[ContainerReader, dict[str, Any]]] = OpenFiles(
            lambda container: (open_container(container), {}), lambda one: one[0].close(), OPEN_CONTAINERS
        )
        self._blocks: dict[tuple[str, str], tuple[int, NDArray[Any]]] = {}

    def opened(self, container: Container) -> ContainerReader:
        """Return the container, open in this process."""
        return self._files.get(container)[0]

    def close(self) -> None:
        """Close all."""
        self._files.close()
        self._blocks = {}

    def chunk_rows(self, one: ContainerSamples, field: ArrayField) -> int:
        """Return the rows along axis 0 of one chunk; 1 where the array is not chunked."""
        chunks = getattr(self._array(one, field.array), "chunks", None)
        return int(chunks[0]) if chunks else 1

    def _array(self, one: ContainerSamples, name: str) -> Any:
        opened, known = self._files.get(one.container)
        if one.layout == "groups":  # too many to keep
            return opened.array(name)
        if name not in known:
            known[name] = opened.array(name)
        return known[name]

    def read(
        self, one: ContainerSamples, field: ArrayField, row: int, span: tuple[int | None, int | None]
    ) -> NDArray[Any]:
        """Return one field of one sample, as served.

        Raises:
            SourceError: It cannot be read; names container, array and sample.
        """
        group = one.groups[row] if one.groups else ""
        where = f"{one.place(row)}: array {field.array!r}"
        with source_errors(
            f"{where} cannot be read", "Copy or write the file again, or leave the sample out"
        ):
            if group and not field.array:
                return _number(self.opened(one.container).attributes(group).get(field.name), field, where)
            raw = self._raw(one, field, row, span, where)
            found = field.arranged(raw, where)
        if field.field.time and not _time_first(field):
            found = np.array(found[slice(*span)], order="C")
        return found

    def _raw(
        self,
        one: ContainerSamples,
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
        found = self._rows(one, field.array, array, (row, row + 1), where)[0]
        return found[cut if array.ndim > 1 else ()]

    def _require_stored(self, one: ContainerSamples, name: str, rows: tuple[int, int], where: str) -> None:
        if not self._fill_missing and (absent := self.opened(one.container).absent(name, *rows)):
            raise SourceError(
                f"{where}: chunk {absent} is not there",
                hint="Copy or write it again; if it was left out because it holds nothing but the fill "
                f"value, give {arg('fill_missing', True)}",
            )

    def _rows(
        self, one: ContainerSamples, name: str, array: Any, rows: tuple[int, int], where: str
    ) -> NDArray[Any]:
        """Return rows along axis 0, through the chunks that were read last."""
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


class ContainerSource(PartedSource[PartT]):
    """Samples in files and folders with named arrays: what `ArraySource` and `MeshSource` share."""

    def __init__(self, path: Paths, *, fill_missing: bool) -> None:
        self._fill_missing = fill_missing
        self._containers = find_containers(path)
        self._reader = ArrayReader(fill_missing=fill_missing)

    def __repr__(self) -> str:
        """Return the first file, and how many there are."""
        return f"{type(self).__name__}({str(self._containers[0].path)!r}, {len(self._containers)} in all)"

    def __getstate__(self) -> dict[str, Any]:
        """Settings and description travel; open files stay."""
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reader = ArrayReader(fill_missing=self._fill_missing)

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._reader.close()

    def _describe_each(self, describe: Callable[[Container], FoundT]) -> list[FoundT]:
        """Return what `describe` says of each file.

        Raises:
            SourceError: Names all files that cannot be used.
        """

        def checked(container: Container) -> FoundT:
            with source_errors(
                f"{container.path}: the description of its arrays is damaged",
                "Copy or write the file again",
            ):
                return describe(container)

        return describe_each(self._containers, checked, str(self._containers[0].path.parent))


class ArraySource(ContainerSource[ContainerSamples]):
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
        ConfigError: `layout` is unknown, or zarr is not installed.

    Examples:
        >>> import h5py, numpy, stoker
        >>> with h5py.File("paths.h5", "w") as file:
        ...     for number, steps in enumerate((30, 20, 50)):
        ...         file[f"path{number}/position"] = numpy.zeros((steps, 3), "float32")
        >>> source = stoker.ArraySource("paths.h5", layout="groups")
        >>> len(source), source.read(2)["position"].shape, source.schema()["position"].ragged
        (3, (50, 3), True)
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
            raise ConfigError(f"layout {layout!r} is unknown", hint="Expected rows, groups, offsets or None")
        self._options = ArrayOptions(
            layout=layout,
            fields=None if fields is None else dict(fields),
            offsets=offsets,
            attributes=tuple(attributes),
        )
        super().__init__(path, fill_missing=fill_missing)
        self._described: tuple[tuple[ContainerSamples, ...], tuple[ArrayField, ...]] | None = None

    def schema(self) -> Schema:
        """Return the fields of every sample."""
        return {field.name: field.field for field in self._describe()[1]}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample; `start:stop` cuts fields that have time.

        Raises:
            SourceError: Damaged or missing data; names container, array and sample.
            IndexError: There is no such sample.
        """
        one, row = self._find(index)
        fields = self._describe()[1]
        return {field.name: self._reader.read(one, field, row, (start, stop)) for field in fields}

    def locate(self, index: int) -> str:
        """Return file or folder, and row or group."""
        one, row = self._find(index)
        return one.place(row)

    def _parts(self) -> Sequence[ContainerSamples]:
        return self._describe()[0]

    def _edges(self, part: ContainerSamples) -> Sequence[int]:
        """Samples in the same chunks are read together, else a few at a time."""
        if part.layout == "groups":
            return range(part.count + 1)
        rows = [self._reader.chunk_rows(part, field) for field in self._describe()[1] if field.per_step]
        step = max([1, *rows])
        if part.starts is None:
            return [*range(0, part.count, step), part.count]
        cuts = np.flatnonzero(np.diff(part.starts[:-1] // step)) + 1
        return [0, *cuts.tolist(), part.count]

    def keys(self) -> Sequence[str]:
        """Return container and group, or row, of each sample."""
        return [
            f"{one.container.key}:{one.groups[row] if one.groups else row}"
            for one in self._parts()
            for row in range(one.count)
        ]

    def identity(self) -> SourceIdentity:
        """Return one part per container, with all its files, and how they are read."""
        described, fields = self._describe()
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
            "offsets": self._options.offsets,
            "fill_missing": self._fill_missing,
        }
        return SourceIdentity(kind=f"arrays/{VERSION}", parts=parts, settings=settings)

    def places(self) -> Sequence[PartLocations]:
        """Return where samples are in the files, for `stoker.index_in_place`.

        Raises:
            SourceError: Zarr, chunked, compressed, or stored otherwise than served.
        """
        described, fields = self._describe()
        return [placed_arrays(one, self._reader.opened(one.container), fields) for one in described]

    def _describe(self) -> tuple[tuple[ContainerSamples, ...], tuple[ArrayField, ...]]:
        if self._described is None:
            found = self._describe_each(self._describe_one)
            require_listable(sum(one.count for one, _ in found), f"{self._containers[0].path.parent}")
            self._described = tuple(one for one, _ in found), _common_fields(found)
        return self._described

    def _describe_one(self, container: Container) -> tuple[ContainerSamples, tuple[ArrayField, ...]]:
        opened = self._reader.opened(container)
        found, fields = describe_container(container, opened, self._options)
        if not found.count:
            raise SourceError(f"{container.path} holds no sample: its arrays are empty", hint="Leave it out")
        require_listable(found.count, str(container.path))
        if container.kind == "hdf5" and found.layout != "groups" and not self._fill_missing:
            for field in fields:  # refuses an array of which next to nothing was written
                opened.absent(field.array, 0, 1)
        return found, fields


def _common_fields(
    found: Sequence[tuple[ContainerSamples, tuple[ArrayField, ...]]],
) -> tuple[ArrayField, ...]:
    """Return the fields of all containers; ragged if ragged in one, or of other lengths in another.

    Raises:
        SourceError: Containers have other fields or layouts than the first.
    """
    first = {field.name: field for field in found[0][1]}
    for described, fields in found:
        other = {field.name: field for field in fields}
        if other.keys() != first.keys() or described.layout != found[0][0].layout:
            raise SourceError(
                f"{described.container.path} has fields {', '.join(other)} by {described.layout}, "
                f"{found[0][0].container.path} has {', '.join(first)} by {found[0][0].layout}",
                hint=f"Name the fields with {arg('fields')}, or give only files of one kind",
            )
        for name, field in other.items():
            first[name] = _merged(first[name], field, described)
    return tuple(first.values())


def _merged(one: ArrayField, other: ArrayField, described: ContainerSamples) -> ArrayField:
    a, b = one.field, other.field
    if a == b:
        return one
    free = (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype) and described.layout == "groups"
    if not free or not a.shape or not b.shape:
        raise SourceError(
            f"{described.container.path}: field {one.name!r} is {b.dtype} {b.shape}, elsewhere it is "
            f"{a.dtype} {a.shape}",
            hint="Give files of one shape together",
        )

    field = dataclasses.replace(a, shape=(-1, *a.shape[1:]), ragged=True, time=a.time or b.time)
    return dataclasses.replace(one, field=field)


def _time_first(field: ArrayField) -> bool:
    return field.axes is None or field.axes[0] == "t"


def _number(value: Any, field: ArrayField, where: str) -> NDArray[Any]:
    if value is None:
        raise SourceError(f"{where}: attribute {field.name!r} is not there", hint="Write it, or leave it out")
    return read_as(value, np.dtype(np.float32), where=where).reshape(())
