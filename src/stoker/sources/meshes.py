"""Particles and meshes in Zarr and HDF5: samples whose steps, points, edges and cells differ in number.

A sample is a group (or the root, which is one sample then). Axes of its arrays have words: `t` time, `p`
points or particles, `e` edges, `k` cells; any other word is an axis of the same size in all samples. Every
sample is checked when it is read: one T and one N for all of its fields, and connectivity within the points.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import AXIS_WORDS, SHAPE_SUFFIX, Field, Json, Sample, Schema, size_field
from stoker.sources.arrays import ContainerSource
from stoker.sources.containers import Container, ContainerReader
from stoker.sources.files import Paths, source_errors
from stoker.sources.protocol import Part, SourceIdentity, read_as, read_dtype
from stoker.units import GIB, format_bytes

VERSION = 1
"""Bumped by hand when the same files would give other samples."""
MeshLayout: TypeAlias = Literal["particles", "mesh", "grid"]
MAX_ARRAY_BYTES = 64 * GIB
"""Largest array of one sample; a header that states more is damaged, or the group is not a sample."""
CSR = ("indices", "indptr")
"""Neighbor lists in compressed rows, read where a particle set has no list of edges."""
log = logging.getLogger("stoker")

PRESETS: Mapping[MeshLayout, Mapping[str, str]] = {
    "particles": {
        "positions": "t p d",
        "velocities": "t p d",
        "edges": "neighbors/edges: e i",
        "time": "t",
    },
    "mesh": {"coords": "p d", "edges": "e i", "cells": "k i", "time": "t"},
    "grid": {"time": "t"},
}
"""Arrays that each layout knows, in addition to the group `fields`; all but the first are optional."""
REQUIRED: Mapping[MeshLayout, str] = {"particles": "positions", "mesh": "coords", "grid": "fields"}
"""The array or group that a sample of a layout is known by."""
FIELD_AXES: Mapping[MeshLayout, str] = {"particles": "t p c", "mesh": "t p c", "grid": "t h w c"}
"""Axes of the arrays in `fields`; the last one may be missing, for one channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshField:
    """One field of every sample, and where it is stored."""

    name: str
    array: str
    """Path below the sample's group; empty for an attribute."""
    words: tuple[str, ...]
    """Of the axes as stored."""
    field: Field
    """As served."""

    @property
    def order(self) -> tuple[int, ...]:
        """Stored axes in the order served: those that vary first, time before points."""
        varying = [i for word in AXIS_WORDS for i, own in enumerate(self.words) if own == word]
        return (*varying, *(i for i in range(len(self.words)) if i not in varying))

    @property
    def text(self) -> str:
        """The declaration that reads it."""
        return f"{self.array}: {' '.join(self.words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshContainer:
    """One file or folder, and the groups in it that are samples."""

    container: Container
    groups: tuple[str, ...]
    """Of its samples; the empty name is the root."""

    @property
    def count(self) -> int:
        """Samples in it."""
        return len(self.groups)


class MeshSource(ContainerSource[MeshContainer]):
    """Particle sets, meshes with fields, and grids, in Zarr folders and HDF5 files.

    Args:
        path: A file, a Zarr folder, a folder or pattern of these, or a list.
        layout: What the groups hold:
            `"particles"`: `positions (T, N, d)`, and as far as they are there `velocities (T, N, d)`,
            `neighbors/edges (E, 2)` (else `neighbors/indices`, `indptr`), `time (T,)`, `fields/<name> (T, N,
            C)`; `"mesh"`: `coords (N, d)`, and as far as they are there `edges (E, 2)`, `cells (K, k)`, `time
            (T,)`, `fields/<name> (T, N, C)`;
            `"grid"`: `fields/<name> (T, H, W, C)`, joined to one field `data` in the order of their names,
            and `time (T,)`; attributes `H` and `W`, where they are there, must agree.
        fields: In place of the layout's: `{"positions": "t p d", "mass": "p", "edges": "graph/pairs: e i"}`.
            A text is the words of the axes as stored, after an optional path and a colon. `t`, `p`, `e` and
            `k` (time, points, edges, cells) differ from sample to sample; `e` and `k` hold numbers of points.
        attributes: Numbers among each group's attributes that are fields, as float32; `neighbors/radius` is
            one of the group `neighbors`. None: `dt`, where the first sample has it and the layout is a grid.
        fill_missing: Take chunks that are not stored for their fill value.

    A sample's fields with time and points are folded (`stoker.schema.Field.axes`). `read` gives them as rows
    `(T * N, *rest)` with their sizes in `<name>.shape`. `stoker.schema.unfolded` turns these into
    `(T, N, *rest)`. float64 is read as float32.

    Raises:
        SourceError: Nothing is there; on first use: damaged, or not laid out so.
        ConfigError: A declaration cannot be understood, or zarr is not installed.

    Examples:
        >>> import h5py, numpy, stoker
        >>> from stoker.schema import unfolded
        >>> with h5py.File("heat.h5", "w") as file:
        ...     for number, points in enumerate((50, 60)):
        ...         file[f"{number}/coords"] = numpy.random.rand(points, 2)
        ...         file[f"{number}/fields/u"] = numpy.random.rand(20, points, 1)
        ...         file[str(number)].attrs["kappa"] = 0.1
        >>> source = stoker.MeshSource("heat.h5", layout="mesh", attributes=["kappa"])
        >>> unfolded(source.read(1), source.schema())["u"].shape
        (20, 60, 1)
    """

    def __init__(
        self,
        path: Paths,
        *,
        layout: MeshLayout = "mesh",
        fields: Mapping[str, str] | None = None,
        attributes: Sequence[str] | None = None,
        fill_missing: bool = False,
    ) -> None:
        if layout not in get_args(MeshLayout):
            raise ConfigError(
                f"layout {layout!r} is unknown", hint=f"Expected {', '.join(get_args(MeshLayout))}"
            )
        if layout == "grid" and fields is not None:
            raise ConfigError(
                "layout='grid' reads the group fields",
                hint=f"For other arrays use ArraySource, as {arg('layout', 'groups')} with "
                f"{arg('fields', {'data': 'u: t y x c'})}",
            )
        self._layout: MeshLayout = layout
        self._declared = None if fields is None else _declared(fields)
        self._attributes = None if attributes is None else tuple(attributes)
        super().__init__(path, fill_missing=fill_missing)
        self._described: tuple[tuple[MeshContainer, ...], tuple[MeshField, ...]] | None = None

    def schema(self) -> Schema:
        """Return fields of every sample; each folded one is followed by its sizes."""
        found: Schema = {}
        for one in self._fields():
            if not (self._layout == "grid" and one.array.startswith("fields/")):
                found[one.name] = one.field
            if one.field.folded:
                found[one.name + SHAPE_SUFFIX] = size_field(one.field)
        if self._layout == "grid":
            found["data"] = _grid_field([one for one in self._fields() if one.array.startswith("fields/")])
        return found

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read and check one sample; `start:stop` cuts the steps of fields that have time.

        Raises:
            SourceError: Damaged or missing data, fields of different T or N, or connectivity that names a
                point which is not there; tells file, group and values.
            IndexError: There is no such sample.
        """
        one, row = self._find(index)
        opened, where = self._reader.opened(one.container), self.locate(index)
        with source_errors(
            f"{where} cannot be read", "Copy or write the file again, or leave the sample out"
        ):
            stored = [self._array(opened, one.groups[row], field, where) for field in self._fields()]
            sizes = self._sizes(stored, where)
            sample: Sample = {}
            for field, array in zip(self._fields(), stored, strict=True):
                sample |= self._values(field, array, slice(start, stop), where)
        _check_connectivity(sample, self._fields(), sizes.get("p"), where)
        return self._joined(sample) if self._layout == "grid" else sample

    def locate(self, index: int) -> str:
        """Return file or folder, and group."""
        one, row = self._find(index)
        return (
            f"{one.container.path}: group {one.groups[row]!r}" if one.groups[row] else str(one.container.path)
        )

    def keys(self) -> Sequence[str]:
        """Return container and group of each sample."""
        return [f"{one.container.key}:{group}" for one in self._parts() for group in one.groups]

    def identity(self) -> SourceIdentity:
        """Return one part per file or folder, and how they are read."""
        contained, fields = self._describe()
        parts = tuple(
            Part(name=one.container.name, count=one.count, files=one.container.files()) for one in contained
        )
        read: list[Json] = [[one.name, one.array, list(one.words)] for one in fields]
        settings: dict[str, Json] = {
            "layout": self._layout,
            "fields": read,
            "fill_missing": self._fill_missing,
        }
        return SourceIdentity(kind=f"mesh/{VERSION}", parts=parts, settings=settings)

    # ------------------------------------------------------------------ what the files hold

    def _parts(self) -> Sequence[MeshContainer]:
        return self._describe()[0]

    def _edges(self, part: MeshContainer) -> Sequence[int]:
        """Each sample is read alone."""
        return range(part.count + 1)

    def _describe(self) -> tuple[tuple[MeshContainer, ...], tuple[MeshField, ...]]:
        if self._described is None:
            found = self._describe_each(self._samples_of)
            self._described = tuple(found), self._first_fields(found[0])
        return self._described

    def _fields(self) -> tuple[MeshField, ...]:
        """Return fields as read, before those of a grid are joined."""
        return self._describe()[1]

    def _samples_of(self, container: Container) -> MeshContainer:
        opened = self._reader.opened(container)
        wanted = [REQUIRED[self._layout]]
        if self._declared is not None:
            wanted = [path for path, _ in self._declared.values()]
        at_root = _holds(opened.arrays(""), wanted)
        groups = [name for name in opened.groups() if _holds(opened.arrays(name), wanted)]
        needed = " and ".join(wanted)
        if at_root and groups:
            raise SourceError(
                f"{container.path} has {needed} at its root and in the group {groups[0]!r}, so what a "
                "sample is cannot be told",
                hint="Put samples in groups of their own",
            )
        if not at_root and not groups:
            held = ", ".join([*opened.groups(), *(n for n in opened.arrays("") if "/" not in n)][:8])
            raise SourceError(
                f"{container.path} is not a set of layout {self._layout}: neither its root nor a group "
                f"holds {needed}",
                hint=f"It has {held or 'nothing'}. Name the arrays with {arg('fields')}, or another "
                f"{arg('layout')}",
            )
        if groups and (others := [name for name in opened.groups() if name not in {*groups}]):
            log.warning(
                "%s: groups without %s are not samples (%d): %s",
                *(container.path, needed, len(others), ", ".join(others[:20])),
            )
        return MeshContainer(container=container, groups=tuple(groups) or ("",))

    def _first_fields(self, one: MeshContainer) -> tuple[MeshField, ...]:
        """Return the fields of every sample, by the first one."""
        opened, group = self._reader.opened(one.container), one.groups[0]
        where = f"{one.container.path}" + (f": group {group!r}" if group else "")
        arrays = opened.arrays(group)
        declared = self._declared or self._known(arrays, where)
        found: list[MeshField] = []
        for name, (path, words) in declared.items():
            array = _lookup(arrays, path, where)
            found.append(_described_field(name, path, words, array, where))
        attributes = self._attributes
        if attributes is None:
            own = opened.attributes(group)
            attributes = ("dt",) if self._layout == "grid" and _is_number(own.get("dt")) else ()
        if self._layout == "grid":
            _check_grid(found, opened.attributes(group), where)
        scalar = Field(shape=(), dtype="float32")
        found += [
            MeshField(name=name.replace("/", "."), array="", words=(name,), field=scalar)
            for name in attributes
        ]
        return tuple(found)

    def _known(self, arrays: Mapping[str, Any], where: str) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return the arrays of a sample that the layout knows; says which it does not."""
        found = {
            name: (path, words)
            for name, (path, words) in _declared(PRESETS[self._layout]).items()
            if path in arrays or (name == "edges" and _has_csr(arrays, path))
        }
        axes = tuple(FIELD_AXES[self._layout].split())
        for path in arrays:
            if path.startswith("fields/"):
                name = path.removeprefix("fields/").replace("/", ".")
                if arrays[path].ndim not in (len(axes), len(axes) - 1):
                    raise SourceError(
                        f"{where}: array {path!r} has shape {tuple(arrays[path].shape)}, layout "
                        f"{self._layout} expects axes {' '.join(axes)}, the last of which may be missing"
                    )
                if name in found:
                    raise SourceError(
                        f"{where}: {path!r} and another array are both called {name!r}", hint="Rename it"
                    )
                found[name] = (path, axes[: arrays[path].ndim])
        paths = {path for path, _ in found.values()}
        folders = {path.rpartition("/")[0] for path in paths if path.startswith("neighbors/")}
        left = [p for p in arrays if p not in paths and p.rpartition("/")[0] not in {*folders, "fields"}]
        left = [p for p in left if not (self._layout == "grid" and p == "coords")]
        if left:
            log.warning(
                "%s: layout %s does not read %s. To read others, name all arrays with fields=",
                *(where, self._layout, ", ".join(left[:20])),
            )
        return found

    # ------------------------------------------------------------------ one sample

    def _array(self, opened: ContainerReader, group: str, field: MeshField, where: str) -> Any:
        """Return the stored array of a field, not read yet, or its values if they are not stored as such."""
        if not field.array:
            path, _, name = field.words[0].rpartition("/")
            value = opened.attributes("/".join(part for part in (group, path) if part)).get(name)
            if not _is_number(value):
                raise SourceError(
                    f"{where}: attribute {field.words[0]!r} is {value!r}", hint="Expected a number"
                )
            return np.asarray(value)
        name = f"{group}/{field.array}" if group else field.array
        arrays = opened.arrays(group) if field.name == "edges" else {}
        if field.name == "edges" and field.array not in arrays and _has_csr(arrays, field.array):
            folder = name.rpartition("/")[0]
            indices, indptr = (self._stored(opened, f"{folder}/{part}", where)[...] for part in CSR)
            return _edges_of_csr(indices, indptr, where)
        array = self._stored(opened, name, where)
        pairs = zip(field.words, array.shape, strict=False)  # of another number of axes: refused below
        own = tuple(size for word, size in pairs if word not in AXIS_WORDS)
        fixed = sum(word not in AXIS_WORDS for word in field.words)
        wanted = field.field.shape[len(field.field.shape) - fixed :]
        if array.ndim != len(field.words) or own != wanted:
            raise SourceError(
                f"{where}: array {field.array!r} has shape {tuple(array.shape)}, expected axes "
                f"{' '.join(field.words)} with {wanted} as in the first sample",
                hint=f"If axes are stored in another order, declare them: {self._hint()}",
            )
        return array

    def _hint(self) -> str:
        return arg("fields", {one.name: one.text for one in self._fields() if one.array})

    def _stored(self, opened: ContainerReader, name: str, where: str) -> Any:
        array = opened.array(name)
        size = math.prod(array.shape) * array.dtype.itemsize
        if size > MAX_ARRAY_BYTES:
            raise SourceError(
                f"{where}: array {name!r} of shape {tuple(array.shape)} is {format_bytes(size)}, more than "
                f"a sample may have ({format_bytes(MAX_ARRAY_BYTES)})",
                hint="Is its header damaged?",
            )
        rows = array.shape[0] if array.ndim else 1
        if not self._fill_missing and size and (absent := opened.absent(name, 0, rows)):
            raise SourceError(
                f"{where}: array {name!r}: chunk {absent} is not there",
                hint="Copy or write it again; if it was left out because it holds nothing but the fill "
                f"value, give {arg('fill_missing', True)}",
            )
        return array

    def _sizes(self, stored: Sequence[Any], where: str) -> dict[str, int]:
        """Steps and points of the sample, which all of its fields must have."""
        found: dict[str, tuple[int, str]] = {}
        for field, array in zip(self._fields(), stored, strict=True):
            for word, size in zip(field.words if field.array else (), array.shape, strict=False):
                if word not in ("t", "p"):
                    continue
                first, by = found.setdefault(word, (int(size), field.array))
                if first != size:
                    what = "steps" if word == "t" else "points"
                    raise SourceError(
                        f"{where}: {by!r} has {first:,} {what} and {field.array!r} {tuple(array.shape)} has "
                        f"{size:,}",
                        hint="Fields of a sample have the same steps and points: fix the file",
                    )
        sizes = {word: size for word, (size, _) in found.items()}
        if 0 in sizes.values():
            raise SourceError(
                f"{where} has no {'steps' if sizes.get('t') == 0 else 'points'}", hint="Leave it out"
            )
        return sizes

    def _values(self, one: MeshField, array: Any, steps: slice, where: str) -> Sample:
        if not one.array:
            return {one.name: read_as(array, np.dtype(np.float32), where=where).reshape(())}
        cut = one.words[0] == "t" and steps != slice(None)
        raw = np.asarray(array[steps] if cut else array[...])
        values = raw.transpose(one.order) if one.order != tuple(range(raw.ndim)) else raw
        if not cut and "t" in one.words:
            values = values[steps]
        dtype = read_dtype(raw.dtype, where=f"{where}: array {one.array!r}")
        if dtype.name != one.field.dtype:
            raise SourceError(
                f"{where}: array {one.array!r} is {raw.dtype}, in the first sample it is read as "
                f"{one.field.dtype}",
                hint="Write it in one dtype",
            )
        values = read_as(values, dtype, where=f"{where}: array {one.array!r}")
        if not one.field.folded:
            return {one.name: values}
        sizes = np.array(values.shape[:2], dtype=np.int64)
        return {one.name: values.reshape(-1, *values.shape[2:]), one.name + SHAPE_SUFFIX: sizes}

    def _joined(self, sample: Sample) -> Sample:
        """Return the sample of a grid, its fields as the channels of one."""
        names = [one.name for one in self._fields() if one.array.startswith("fields/")]
        channels = [sample[n] if sample[n].ndim == 4 else sample[n][..., None] for n in names]
        rest = {name: values for name, values in sample.items() if name not in names}
        return {**rest, "data": np.concatenate(channels, axis=-1)}


def _holds(arrays: Mapping[str, Any], wanted: Sequence[str]) -> bool:
    """Return True if a group has these arrays, or groups of arrays."""
    return all(any(name == one or name.startswith(f"{one}/") for name in arrays) for one in wanted)


def _declared(fields: Mapping[str, str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Field name to path and words of the axes.

    >>> _declared({"positions": "t p d", "edges": "graph/pairs: e i"})
    {'positions': ('positions', ('t', 'p', 'd')), 'edges': ('graph/pairs', ('e', 'i'))}
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, text in fields.items():
        path, colon, axes = text.rpartition(":")
        words = tuple(axes.split())
        lead = {*words} & {*AXIS_WORDS}
        if not lead or len({*words}) != len(words) or lead not in ({"t"}, {"p"}, {"t", "p"}, {"e"}, {"k"}):
            raise ConfigError(
                f"fields[{name!r}] is {text!r}",
                hint="Expected words of its axes, among them t (time), p (points), both, e (edges) or k "
                "(cells), each once, as 't p d' or 'graph/pairs: e i'",
            )
        found[name] = ((path if colon else name).strip().strip("/"), words)
    if not found:
        raise ConfigError(
            "fields is empty", hint="Name at least one array, for example {'positions': 't p d'}"
        )
    return found


def _described_field(name: str, path: str, words: tuple[str, ...], array: Any, where: str) -> MeshField:
    """Return a field as the first sample has it; `array` None: edges that are made of neighbor lists."""
    if array is None:
        field = Field(shape=(-1, 2), dtype="int64", ragged=True, axes=("e",))
        return MeshField(name=name, array=path, words=words, field=field)
    if array.ndim != len(words):
        raise SourceError(
            f"{where}: array {path!r} has shape {tuple(array.shape)}, expected axes {' '.join(words)}",
            hint=f"Name its axes with {arg('fields')}",
        )
    dtype = read_dtype(array.dtype, where=f"{where}: array {path!r}").name
    axes = tuple(word for word in AXIS_WORDS if word in words)
    rest = tuple(int(array.shape[i]) for i, word in enumerate(words) if word not in AXIS_WORDS)
    numbers = dtype in ("int32", "int64") and len(rest) == 1 and (axes != ("e",) or rest == (2,))
    if axes in (("e",), ("k",)) and not numbers:
        wanted = "(E, 2)" if axes == ("e",) else "(K, k)"
        turned = f"{path}: {' '.join(reversed(words))}"
        raise SourceError(
            f"{where}: array {path!r} is {array.dtype} {tuple(array.shape)} with axes {' '.join(words)}",
            hint=f"Expected whole numbers of points, {wanted}. If its axes are stored the other way round, "
            f"name all arrays to read, as {arg('fields', {'positions': 't p d', name: turned})}",
        )
    alone = axes == ("t",)
    field = Field(shape=(-1, *rest), dtype=dtype, ragged=True, time=alone, axes=() if alone else axes)
    return MeshField(name=name, array=path, words=words, field=field)


def _grid_field(fields: Sequence[MeshField]) -> Field:
    """Return the field `data` `(T, H, W, C)` of the fields of a grid.

    Raises:
        SourceError: Their grids or dtypes differ.
    """
    first = fields[0].field
    for one in fields:
        if (one.field.shape[1:3], one.field.dtype) != (first.shape[1:3], first.dtype):
            raise SourceError(
                f"{one.array!r} is {one.field.dtype} on {one.field.shape[1:3]}, {fields[0].array!r} is "
                f"{first.dtype} on {first.shape[1:3]}",
                hint="The fields of a grid have one grid and dtype",
            )
    channels = sum(one.field.shape[3] if len(one.field.shape) == 4 else 1 for one in fields)
    return Field(shape=(-1, *first.shape[1:3], channels), dtype=first.dtype, time=True, ragged=True)


def _check_grid(fields: Sequence[MeshField], attributes: Mapping[str, Any], where: str) -> None:
    """Refuse a grid whose attributes `H` and `W` say something else than its arrays."""
    for one in fields:
        shape = dict(zip(one.words, (0, *one.field.shape[1:]), strict=False))
        for name, word in (("H", "h"), ("W", "w")):
            told = attributes.get(name)
            if word in shape and _is_number(told) and int(np.asarray(told)) != shape[word]:
                raise SourceError(
                    f"{where}: array {one.array!r} has {shape[word]} points along {name}, its attribute "
                    f"{name} says {told}",
                    hint="Fix the file: axes are (T, H, W, C)",
                )


def _lookup(arrays: Mapping[str, Any], path: str, where: str) -> Any:
    if path not in arrays and _has_csr(arrays, path):
        return None
    if path not in arrays:
        raise SourceError(f"{where} has no array {path!r}", hint=f"It has {', '.join(arrays) or 'none'}")
    return arrays[path]


def _has_csr(arrays: Mapping[str, Any], edges: str) -> bool:
    folder = edges.rpartition("/")[0]
    return bool(folder) and all(f"{folder}/{part}" in arrays for part in CSR)


def _edges_of_csr(indices: NDArray[Any], indptr: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Return the edges `(E, 2)`, from point to neighbor, of compressed rows."""
    starts = np.asarray(indptr).astype(np.int64)
    whole = starts.ndim == indices.ndim == 1 and len(starts) and starts[0] == 0 and starts[-1] == len(indices)
    if not whole or bool((np.diff(starts) < 0).any()):
        raise SourceError(
            f"{where}: neighbors/indptr {tuple(starts.shape)} and neighbors/indices {tuple(indices.shape)} "
            "do not fit together",
            hint="Expected indptr from 0 up to the number of indices. Write them again",
        )
    points = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return np.stack([points, indices.astype(np.int64)], axis=1)


def _check_connectivity(sample: Sample, fields: Sequence[MeshField], points: int | None, where: str) -> None:
    """Refuse edges and cells that name a point which is not there."""
    for one in fields:
        if not one.field.numbers_points:
            continue
        values = sample[one.name]
        if points is None:
            raise SourceError(
                f"{where}: {one.array!r} numbers points, and no field has points", hint="Declare one"
            )
        bad = (values < 0) | (values >= points)
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            raise SourceError(
                f"{where}: row {row} of {one.array!r} is {values[row].tolist()}, and the sample has "
                f"{points:,} points, from 0 to {points - 1:,}",
                hint="Fix the file, or leave the sample out",
            )


def _is_number(value: Any) -> bool:
    try:
        return value is not None and bool(np.isfinite(float(np.asarray(value).reshape(()))))
    except (TypeError, ValueError):
        return False
