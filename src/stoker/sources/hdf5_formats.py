"""Layouts of HDF5 files of simulations, PDEBench and The Well, and what such files state next to fields."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, arg
from stoker.schema import Json
from stoker.sources.files import space_rank
from stoker.sources.hdf5_declared import (
    contents,
    declared_fields,
    file_parameters,
    is_dataset,
    open_piece,
    rows_layout,
    sample_groups,
)
from stoker.sources.hdf5_fields import (
    SPACE,
    FieldLayout,
    FieldRole,
    FileLayout,
    Piece,
    as_text,
    declared_axes,
    make_piece,
)
from stoker.sources.hdf5_open import require_inside
from stoker.sources.protocol import read_as

# ----------------------------------------------------------------------------------------------------------
# Find the axes of a dataset: known layouts, compared with what the file states.
#
# A layout is a text such as `n t S c`; `S` stands for the space axes. Every layout with as many axes as
# the dataset gives a reading. Readings that contradict a coordinate dataset are dropped. If one is left,
# it is taken. If several are left, the documented layout is taken, unless its sizes are odd or another
# reading is as likely; then the user is asked. A wrong guess serves wrong data without an error, a
# question costs a line.


Axes: TypeAlias = "tuple[str, ...]"
"""One word per stored axis."""
Coordinates: TypeAlias = "Mapping[str, tuple[int, ...]]"
"""Axis word to the shape of its coordinate dataset."""

FEW_CHANNELS = 8
"""So many numbers per point are likely in any layout."""
MANY_CHANNELS = 16
"""More numbers per point than this are unlikely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    """Layouts that a dataset may have."""

    documented: tuple[str, ...]
    """Taken where nothing speaks against them, best first."""
    others: tuple[str, ...]
    """Taken where the coordinates leave no other."""
    steady: bool = False
    """None has time, even if the file has a time coordinate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesReading:
    """The axes of a dataset, or the options that are left when they are not clear."""

    axes: Axes | None = None
    """None: the user must choose."""
    options: tuple[Axes, ...] = ()
    """Likely ones first."""
    fits: bool = True
    """False: every option contradicts a coordinate or the number of space axes."""


def find_coordinates(*groups: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the coordinate datasets (`name_coordinates`) in open groups; later groups win."""
    return {
        word: tuple(int(size) for size in group[path].shape or ())
        for group in groups
        for word, path in name_coordinates(group).items()
    }


def name_coordinates(group: Any) -> dict[str, str]:
    """Return the paths of the coordinate datasets in an open group and in its group `grid`, by axis word.

    Names are `x`, `x-coordinate` or `x_coordinate`, also with `y`, `z`, `t` and `time`; `grid` wins.
    """
    found: dict[str, str] = {}
    for name in group:
        base = name.lower().replace("_", "-").removesuffix("-coordinate")
        word = "t" if base == "time" else base
        # A dataset called `T` is a temperature; times of more than two axes are data.
        if word not in (*SPACE, "t") or name == "T" or not is_dataset(group, name):
            continue
        if word in SPACE or len(group[name].shape or ()) in (1, 2):
            found[word] = name
    if group.get("grid", getclass=True) is h5py.Group:
        found |= {word: f"grid/{path}" for word, path in name_coordinates(group["grid"]).items()}
    return found


def read_axes(
    shape: Sequence[int], layouts: LayoutChoices, coordinates: Coordinates, rank: int | None
) -> AxesReading:
    """Return the one reading of a dataset, or those between which the user must choose.

    Args:
        shape: Of the dataset.
        layouts: All that it may have.
        coordinates: See `find_coordinates`.
        rank: Number of space axes, where no coordinate states it; None: unknown.
    """
    if layouts.steady:
        coordinates = {word: stated for word, stated in coordinates.items() if word != "t"}
    space = [word for word in SPACE if word in coordinates]
    names = [space] if space else [SPACE[:count] for count in ([rank] if rank else (1, 2, 3))]
    known = _readings(shape, layouts, names, coordinates)
    guessed = bool(space) and all(_channels(axes, shape) > MANY_CHANNELS for _, axes in known)
    if guessed:
        # So many channels may be a space axis without a coordinate.
        further = [[*space, word] for word in SPACE if word not in space]
        more = _readings(shape, layouts, further[:1], coordinates)
        guessed = bool(more)
        known += more
    # An axis of one number is a space axis only if nothing else is possible.
    known = [pair for pair in known if min(_grid_sizes(pair[1], shape)) > 1] or known
    if len(known) == 1 and not guessed:
        return AxesReading(axes=known[0][1])
    if not known:
        everything = [
            [_axes(layout, SPACE[:count], shape) for layout in some for count in (1, 2, 3)]
            for some in (layouts.documented, layouts.others)
        ]
        anything = next((some for some in everything if any(some)), [])
        return AxesReading(options=tuple(axes for axes in anything if axes), fits=False)
    # Where the number of space axes is unknown, one of them without channels is documented.
    simple = len(names) > 1
    ratio = 8 if simple else 4
    taken = [axes for layout, axes in known if layout in layouts.documented]
    default = next(
        (axes for axes in taken if not simple or ("c" not in axes and len(_grid(axes)) == 1)), None
    )
    options = tuple(axes for _, axes in known)
    usual = [axes for axes in options if _is_usual(axes, shape, coordinates)]
    if (
        not guessed
        and default is not None
        and default in usual
        and not any(
            _is_as_likely(axes, default, shape, coordinates, ratio) for axes in options if axes != default
        )
    ):
        return AxesReading(axes=default)
    return AxesReading(options=(*usual, *(axes for axes in options if axes not in usual)))


def _readings(
    shape: Sequence[int], layouts: LayoutChoices, names: Sequence[Sequence[str]], coordinates: Coordinates
) -> list[tuple[str, Axes]]:
    """Return each layout that fits with its axes, for each set of space axes."""
    return [
        (layout, axes)
        for layout in (*layouts.documented, *layouts.others)
        for words in names
        if (axes := _first_that_fits(layout, words, shape, coordinates))
    ]


def describe_axes(axes: Axes, shape: Sequence[int]) -> str:
    """Say what a reading means in numbers.

    >>> describe_axes(("n", "t", "c", "x", "y"), (4, 11, 2, 64, 64))
    '4 samples, 11 steps, 2 channels, 64 x 64 points'
    """
    names = {"n": "samples", "t": "steps", "c": "channels"}
    said = [f"{size} {names[axis]}" for axis, size in zip(axes, shape, strict=True) if axis in names]
    return ", ".join([*said, " x ".join(map(str, _grid_sizes(axes, shape))) + " points"])


def _axes(layout: str, space: Sequence[str], shape: Sequence[int]) -> Axes | None:
    """Return the words of a layout if there is one for each axis of the dataset.

    Converters append an axis of one number even to data with channels: it is another feature, `d`.
    """
    axes = tuple(word for part in layout.split() for word in (space if part == "S" else (part,)))
    if "c" in axes and len(axes) + 1 == len(shape) and shape[-1] == 1:
        axes = (*axes, "d")
    return axes if len(axes) == len(shape) else None


def _first_that_fits(
    layout: str, space: Sequence[str], shape: Sequence[int], coordinates: Coordinates
) -> Axes | None:
    """Return a layout's axes with the space axes in an order that the coordinates allow."""
    orders = (_axes(layout, order, shape) for order in permutations(space))
    return next((axes for axes in orders if axes and _fits(axes, shape, coordinates)), None)


def _fits(axes: Axes, shape: Sequence[int], coordinates: Coordinates) -> bool:
    """Return True if no coordinate contradicts the axes; it may have one entry more (cell edges)."""
    sizes = dict(zip(axes, shape, strict=True))
    for word, stated in coordinates.items():
        if word not in sizes or _is_of_another(word, stated, axes, shape, coordinates):
            return False
        # One coordinate for all samples, or one for each sample; of space also as a mesh.
        meant = [[sizes[word]], [sizes.get("n", -1), sizes[word]]]
        if word in SPACE:
            meant.append(_grid_sizes(axes, shape))
        claims = [claim for claim in meant if len(claim) == len(stated)]
        if claims and not any(
            all(given in (size, size + 1) for given, size in zip(stated, claim, strict=True))
            for claim in claims
        ):
            return False
    return True


def _is_of_another(
    word: str, stated: tuple[int, ...], axes: Axes, shape: Sequence[int], coordinates: Coordinates
) -> bool:
    """Return True if edges of cells along a space axis are the points of an axis without a coordinate."""
    sizes = dict(zip(axes, shape, strict=True))
    if word not in SPACE or len(stated) != 1 or stated[0] != sizes[word] + 1:
        return False
    return any(size == stated[0] for axis, size in sizes.items() if axis not in coordinates)


def _grid(axes: Axes) -> list[int]:
    return [at for at, axis in enumerate(axes) if axis in SPACE]


def _grid_sizes(axes: Axes, shape: Sequence[int]) -> list[int]:
    return [shape[at] for at in _grid(axes)]


def _channels(axes: Axes, shape: Sequence[int]) -> int:
    return shape[axes.index("c")] if "c" in axes else 0


def _is_usual(axes: Axes, shape: Sequence[int], coordinates: Coordinates) -> bool:
    """Return True if there are fewer channels than points along each axis, and a grid that is one."""
    if _channels(axes, shape) >= min(_grid_sizes(axes, shape)):
        return False
    return all(shape[at] > 2 or axes[at] in coordinates for at in _grid(axes))


def _is_as_likely(
    axes: Axes, default: Axes, shape: Sequence[int], coordinates: Coordinates, ratio: int
) -> bool:
    """Return True if sizes speak as much for a reading as for the documented one."""
    grid = _grid_sizes(axes, shape)
    if min(grid) <= 2:
        return False
    if "c" not in axes or axes.index("c") == (default.index("c") if "c" in default else None):
        # Time and space are exchanged: a square grid speaks for itself.
        return len(set(grid)) == 1 < len(grid) and len(set(_grid_sizes(default, shape))) > 1
    # A file that states space and not time may have no time: then a small grid is possible.
    only_space = "t" not in coordinates and all(axes[at] in coordinates for at in _grid(axes))
    most = FEW_CHANNELS if only_space else min(FEW_CHANNELS, min(grid) // ratio)
    return _channels(axes, shape) <= most


# ----------------------------------------------------------------------------------------------------------
# The layouts of PDEBench files, raw and converted, read by the names of their datasets.
#
#   1D          tensor (N,T,X)[,C]        x-coordinate, t-coordinate     -> data (T,1,X,C)
#   converted   data (N,T,...)            rank from coordinates or file name -> data (T,H,W,C)
#   Darcy       tensor (N,1,X,Y), nu (N,X,Y)                             -> data (H,W,1), nu (H,W,1)
#   CFD         density, pressure, Vx[, Vy, Vz] (N,T,X[,Y,Z])            -> data, channels in this order
#   2D NS       velocity, particles (N,T,X,Y,V) [, force]                -> data; force a field of its own
#   2D groups   0000/data (T,X,Y,C), 0000/grid/{t,x,y}                   -> data, one sample per group
#
# Other orders (channels before space, time last, one trajectory a file) are read where coordinates state
# them; see `read_axes`. Coordinates may have one entry more than the data (cell edges).


CFD_CHANNELS = ("density", "pressure", "Vx", "Vy", "Vz")
NS_CHANNELS = ("velocity", "particles")
MAIN = ("data", "tensor")

MOST_OPTIONS = 8
"""Ways to read a dataset that an error lists."""
_ROWS = LayoutChoices(
    documented=("n t S", "n t S c"),
    others=("n t c S", "n S t", "n S t c", "n S", "n S c", "n c S", "t S", "t S c", "t c S"),
)
_STEADY = LayoutChoices(documented=("n S", "n S c"), others=("n c S",), steady=True)
_SCALARS = LayoutChoices(documented=("n t S",), others=("n S t", "t S", "n S"))
_VECTORS = LayoutChoices(documented=("n t S c",), others=("n t c S", "n S t c", "t S c", "t c S", "n t S"))
_STILL_VECTORS = LayoutChoices(documented=("n S c",), others=("n c S", "S c", "c S"), steady=True)
_ONE_SAMPLE = LayoutChoices(documented=("t S", "t S c"), others=("t c S", "S t", "S t c", "S", "S c", "c S"))

_log = logging.getLogger("stoker")


def is_pdebench(file: Any) -> bool:
    """Return True if an open file has one of the layouts above."""
    names = (*MAIN, "density", "velocity")
    return any(is_dataset(file, name) for name in names) or bool(sample_groups(file, ["data"]))


def pdebench_layout(
    file: Any, name: str, *, where: str, fields: Mapping[str, str] | None = None
) -> FileLayout:
    """Return the layout of an open PDEBench file.

    Args:
        file: Open `h5py.File`.
        name: The file's relative name: it may state parameters and the number of space axes.
        where: Names the file in errors.
        fields: Axes that the user declares for datasets of the preset, `{"data": "n t x c"}`.

    Raises:
        SourceError: None of the known datasets is there, or axes are ambiguous.
    """
    stated = dict(declared_fields(fields).values()) if fields else {}
    reader = _PDEBenchReader(file, PurePosixPath(name).stem, stated, where)
    if any(is_dataset(file, dataset) for dataset in ("density", "pressure", "Vx")):
        found = reader.cfd()
    elif is_dataset(file, "velocity"):
        found = reader.navier_stokes()
    elif is_dataset(file, "tensor") and is_dataset(file, "nu"):
        found = reader.darcy()
    elif main := [dataset for dataset in MAIN if is_dataset(file, dataset)]:
        found = reader.single(main[0])
    elif groups := sample_groups(file, ["data"]):
        found = reader.grouped(groups)
    else:
        raise SourceError(
            f"{where} has none of PDEBench's datasets (tensor, data, density, pressure, Vx, velocity, or "
            f"groups with data). {contents(file)}",
            hint=f"Declare them, for example {arg('fields', {'u': 'n t x'})}",
        )
    unused = set(stated) - {piece.dataset for one in found.fields for piece in one.pieces}
    if unused:
        raise SourceError(
            f"{where}: fields declares {sorted(unused)}, which the preset does not read here",
            hint=f"Leave out {arg('preset', 'pdebench')} to name all datasets yourself",
        )
    values = file_parameters(file, PurePosixPath(name).stem, where=where)
    if clash := values.keys() & {one.name for one in found.fields}:
        raise SourceError(
            f"{where}: {sorted(clash)} is both a dataset and a parameter",
            hint=f"Declare {arg('fields')} instead",
        )
    return replace(found, values=values)


class _PDEBenchReader:
    """One file being described; holds what all layouts need."""

    def __init__(self, file: Any, stem: str, stated: Mapping[str, tuple[str, ...]], where: str) -> None:
        self._file, self._stem, self._stated, self._where = file, stem, stated, where

    def cfd(self) -> FileLayout:
        """Density, pressure and velocities stacked; the velocities present give the rank."""
        present = [name for name in CFD_CHANNELS if name in self._file]
        velocities = sum(name.startswith("V") for name in present)
        pieces = self._pieces(self._file, present, _SCALARS, rank=velocities or None)
        return rows_layout((FieldLayout(name="data", pieces=pieces),), where=self._where)

    def navier_stokes(self) -> FileLayout:
        """Velocity and particles stacked; force (with or without time) a field of its own."""
        present = [name for name in NS_CHANNELS if name in self._file]
        main = [self._pieces(self._file, [name], _VECTORS, rank=2)[0] for name in present]
        fields = [FieldLayout(name="data", pieces=tuple(main))]
        if "force" in self._file:
            timed = len(self._file["force"].shape) == len(main[0].shape)
            pieces = self._pieces(self._file, ["force"], _VECTORS if timed else _STILL_VECTORS, rank=2)
            fields.append(FieldLayout(name="force", pieces=pieces))
        return rows_layout(tuple(fields), where=self._where)

    def darcy(self) -> FileLayout:
        """Steady: solution `tensor` and coefficient `nu`, no time axis."""
        (nu,) = coefficient = self._pieces(self._file, ["nu"], _STEADY, rank=2)
        # Both are on one grid, so the coefficient tells which axes of the solution are space.
        grid = {axis: (size,) for axis, size in zip(nu.axes, nu.shape, strict=True) if axis in SPACE}
        solution = self._pieces(self._file, ["tensor"], _STEADY, coordinates=grid)
        fields = (FieldLayout(name="data", pieces=solution), FieldLayout(name="nu", pieces=coefficient))
        return rows_layout(fields, where=self._where)

    def single(self, dataset: str) -> FileLayout:
        """Return one dataset with all samples."""
        # Darcy flow is PDEBench's one steady problem; nothing but its name tells a converted file of it.
        layouts = _STEADY if "darcy" in self._stem.lower() else _ROWS
        pieces = self._pieces(self._file, [dataset], layouts)
        return rows_layout((FieldLayout(name="data", pieces=pieces),), where=self._where)

    def grouped(self, groups: list[str]) -> FileLayout:
        """Return one group per sample, with `grid/*` next to the data."""
        others = sorted(set(self._file) - set(groups))
        if others:
            _log.warning(
                "%s: %d entries without 'data' are not samples: %s", self._where, len(others), others[:5]
            )
        pieces = self._pieces(self._file[groups[0]], ["data"], _ONE_SAMPLE)
        fields = (FieldLayout(name="data", pieces=pieces),)
        return FileLayout(fields=fields, rows=len(groups), groups=tuple(groups))

    def _pieces(
        self,
        parent: Any,
        names: Sequence[str],
        layouts: LayoutChoices,
        *,
        rank: int | None = None,
        coordinates: Coordinates | None = None,
    ) -> tuple[Piece, ...]:
        """Datasets of the same axes, which the user or the first one declares, else found by what fits.

        Raises:
            SourceError: Several readings are left, or none.
        """
        axes = dict(self._stated)
        unknown = [name for name in names if name not in axes]
        if unknown and is_dataset(parent, unknown[0]) and math.prod(parent[unknown[0]].shape or (0,)):
            first = parent[unknown[0]]
            shape = tuple(int(size) for size in first.shape)
            stated = declared_axes(first, where=f"{self._where}: dataset {unknown[0]!r}")
            if stated is None:
                if coordinates is None:
                    coordinates = find_coordinates(*dict.fromkeys((self._file, parent)))
                found = read_axes(shape, layouts, coordinates, rank or space_rank(self._stem))
                if found.axes is None:
                    raise self._unclear(unknown, shape, coordinates, found)
                stated = found.axes
            axes |= dict.fromkeys(unknown, stated)
        return tuple(open_piece(parent, name, axes.get(name, ()), where=self._where) for name in names)

    def _unclear(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        coordinates: Coordinates,
        found: AxesReading,
    ) -> SourceError:
        """Say what is known about the axes, and the declaration for each way to read them."""
        lengths = ", ".join(f"{axis} {' x '.join(map(str, size))}" for axis, size in coordinates.items())
        known = f"its coordinates have lengths {lengths}" if lengths else "it has no coordinates"
        fact = "are not clear" if found.fits else "fit no known layout"
        own = {name: " ".join(axes) for name, axes in self._stated.items()}
        options = found.options[:MOST_OPTIONS] or (tuple("ntxyzcdefgh")[: len(shape)],)
        fields = [own | dict.fromkeys(names, " ".join(axes)) for axes in options]
        readings = ", or ".join(
            f"{arg('fields', one)} ({describe_axes(axes, shape)})"
            for one, axes in zip(fields, options, strict=True)
        )
        return SourceError(
            f"{self._where}: the axes of dataset {names[0]!r} {shape} {fact}: {known}",
            hint=f"Declare them with {arg('preset', 'pdebench')} and {readings}",
        )


def attribute_words(group: Any, name: str) -> tuple[str, ...]:
    """Return an attribute that lists names, as strings; empty when absent."""
    value = group.attrs.get(name)
    if value is None:
        return ()
    return tuple(as_text(item) for item in np.asarray(value).ravel())


# ----------------------------------------------------------------------------------------------------------
# The layout of The Well's files: fields by tensor rank, with attributes that name every axis.
#
# `t0_fields`, `t1_fields` and `t2_fields` hold scalars, vectors and matrices of shape `(n, t, *space[, d[,
# d]])`; attributes say which of these axes a dataset has. Fields with all axes become the channels of
# `data` `(T, H, W, C)`, in the files' own order (scalars, then vectors as `velocity_x`, `velocity_y`, then
# matrices); others become fields of their own. `scalars` become scalar fields, boundary conditions go into
# the identity; `stoker.sources.hdf5_formats` serves them as fields.


GROUPS = ("t0_fields", "t1_fields", "t2_fields")


def is_well(file: Any) -> bool:
    """Return True if an open file has this layout."""
    return "dimensions" in file and any(group in file for group in GROUPS)


def well_layout(file: Any, *, where: str) -> FileLayout:
    """Return the layout of an open file.

    Raises:
        SourceError: Not this layout, or a dataset's axes do not fit its attributes.
    """
    if not is_well(file):
        raise SourceError(
            f"{where} is not in The Well's layout (groups dimensions, t0_fields, t1_fields, t2_fields). "
            f"{contents(file)}",
            hint=f"Use {arg('preset', 'pdebench')}, or declare {arg('fields')}",
        )
    space = attribute_words(file["dimensions"], "spatial_dims")
    if not space or not set(space) <= {*SPACE}:
        raise SourceError(
            f"{where}: dimensions state spatial_dims {list(space)}; only x, y, z are read as a grid of "
            "equal cells",
            hint="To use this grid as if it were one, declare the fields in place of "
            f"{arg('preset', 'well')}, and call the one to train on 'data': "
            f"{arg('fields', _declaration(file, space, where))}",
        )
    stacked: list[Piece] = []
    single: list[FieldLayout] = []
    for name, piece in _pieces(file, space, where):
        if {"n", "t", *space} <= set(piece.axes):
            stacked.append(piece)
        else:
            single.append(FieldLayout(name=name, pieces=(piece,)))
    main = [FieldLayout(name="data", pieces=tuple(stacked))] if stacked else []
    values: dict[str, float] = {}
    for name, dataset in _scalars(file):
        require_inside(file, f"scalars/{name}", where=where)
        if dataset.shape == () or dataset.size == 1:
            values[name] = float(np.asarray(dataset[()]).item())
            continue
        axes = _present(dataset, ("n", "t"), where=f"{where}: scalars/{name}")
        piece = make_piece(dataset, f"scalars/{name}", axes, where=where)
        single.append(FieldLayout(name=name, pieces=(piece,)))
    found = rows_layout((*main, *single), where=where)
    return replace(found, values=dict(sorted(values.items())), notes=_boundaries(file))


def _pieces(file: Any, space: tuple[str, ...], where: str) -> list[tuple[str, Piece]]:
    """Return the fields of all ranks with their names."""
    return [
        (name, _field(file, f"{group}/{name}", rank, space, where))
        for rank, group in enumerate(GROUPS)
        if group in file
        for name in attribute_words(file[group], "field_names") or tuple(file[group])
    ]


def _declaration(file: Any, space: tuple[str, ...], where: str) -> dict[str, str]:
    """Return a declaration of all fields in which the axes of another geometry are called x, y, z."""
    words = dict(zip(space or SPACE, SPACE, strict=False))
    return {
        name: f"{piece.dataset}: {' '.join(words.get(axis, axis) for axis in piece.axes)}"
        for name, piece in _pieces(file, space or SPACE, where)
    }


def _scalars(file: Any) -> list[tuple[str, Any]]:
    return [(name, file["scalars"][name]) for name in sorted(file["scalars"])] if "scalars" in file else []


def _present(dataset: Any, axes: tuple[str, ...], *, where: str) -> tuple[str, ...]:
    """Those of `n t` that the attributes say vary; the layout stores no axis for what does not."""
    flags = {"n": "sample_varying", "t": "time_varying"}
    found = tuple(axis for axis in axes if bool(dataset.attrs.get(flags[axis], True)))
    if len(found) > len(dataset.shape):
        raise SourceError(
            f"{where} has shape {tuple(dataset.shape)}, its attributes say that {' '.join(found)} vary",
            hint="Correct sample_varying and time_varying",
        )
    return found


def _field(file: Any, name: str, rank: int, space: tuple[str, ...], where: str) -> Piece:
    dataset = require_inside(file, name, where=where)
    varying = dataset.attrs.get("dim_varying")
    flags = [True] * len(space) if varying is None else [bool(flag) for flag in np.ravel(varying)]
    grid = tuple(axis for axis, flag in zip(space, flags, strict=False) if flag)
    lead = _present(dataset, ("n", "t"), where=f"{where}: {name}")
    # A matrix may be stored as one axis of its elements.
    flat = rank == 2 and len(dataset.shape) == len(lead) + len(grid) + 1
    axes = (*lead, *grid, *("i", "j")[: 1 if flat else rank])
    if len(axes) != len(dataset.shape):
        raise SourceError(
            f"{where}: dataset {name!r} has shape {tuple(dataset.shape)}, its attributes give the axes "
            f"{' '.join(axes)!r}",
            hint="Correct sample_varying, time_varying and dim_varying",
        )
    base = name.rsplit("/", 1)[-1]
    words = (
        (base,),
        tuple(f"{base}_{a}" for a in space),
        tuple(f"{base}_{a}{b}" for a in space for b in space),
    )
    return make_piece(dataset, name, axes, where=where, parts=words[rank])


def _boundaries(file: Any) -> dict[str, Json]:
    """Name and type of each boundary condition."""
    if "boundary_conditions" not in file:
        return {}
    group = file["boundary_conditions"]
    listed: list[Json] = [
        f"{name}: {as_text(group[name].attrs.get('bc_type', 'unknown'))}" for name in sorted(group)
    ]
    return {"boundary_conditions": listed} if listed else {}


# ----------------------------------------------------------------------------------------------------------
# Times, coordinates and boundaries that a file of simulations states next to its fields, served on
# request.
#
#     time         `time` (T,) float32: the times of the stored steps, a field with time
#     dt           `dt` float32: the time between two steps of the sample, which must be constant
#     coordinates  `x`, `y`, `z`, each (points,) float32: cell centers along each axis of the grid
#     boundary     The Well: `boundary_NAME` float32, a number of `BOUNDARIES`; `boundary_NAME_mask` and
#                  `boundary_NAME_values` with the axes that they have in the file
#
# A coordinate of one entry more than points holds cell edges, and their midpoints are served; of times the
# first T are. All are stored with each sample: 4 bytes a number, and a mask takes 1 byte a point.


INCLUDABLE = ("time", "dt", "coordinates", "boundary")
"""Names that `include` takes."""
BOUNDARIES = ("WALL", "OPEN", "PERIODIC")
"""Types of boundaries; the place of a type is its number, as in The Well's own reader."""


@dataclass(slots=True, kw_only=True)
class _Additions:
    """Fields and numbers to add to the layout."""

    fields: list[FieldLayout] = field(default_factory=list[FieldLayout])
    values: dict[str, float] = field(default_factory=dict[str, float])


def with_included(file: Any, layout: FileLayout, include: Sequence[str], *, where: str) -> FileLayout:
    """Return the layout of an open file with the fields that `include` asks for.

    Raises:
        SourceError: The file does not state one of them, or its length does not fit the data.
    """
    if not include:
        return layout
    found = _Additions()
    group = layout.groups[0] if layout.groups else ""
    main = next((p for one in layout.fields for p in one.pieces if _is_main(p)), None)
    if main is None:
        raise SourceError(f"{where}: no dataset has time or space, so {arg('include', [*include])} is empty")
    parent = file[group] if group else file
    named = name_coordinates(parent)
    if "dimensions" in parent:  # The Well
        named |= {word: f"dimensions/{path}" for word, path in name_coordinates(parent["dimensions"]).items()}
    sizes = dict(zip(main.axes, main.shape, strict=True))
    wanted = {"t"} if {"time", "dt"} & {*include} else set[str]()
    if "coordinates" in include:
        wanted |= {word for word in SPACE if word in sizes}
    pieces = {
        word: _axis_piece(parent, named, word, sizes, layout.rows, where=where) for word in sorted(wanted)
    }
    for name, role in (("time", FieldRole.TIME), ("dt", FieldRole.DT)):
        if name in include:
            found.fields.append(FieldLayout(name=name, pieces=(pieces["t"],), role=role, points=sizes["t"]))
    if "dt" in include and "n" not in pieces["t"].axes:
        time_step(np.asarray(parent[pieces["t"].dataset][: sizes["t"]]), where=where)
    for word in SPACE if "coordinates" in include else ():
        if word in pieces:
            found.fields.append(
                FieldLayout(name=word, pieces=(pieces[word],), role=FieldRole.COORDINATE, points=sizes[word])
            )
    if "boundary" in include:
        _add_boundaries(file, found, where)
    return replace(layout, fields=(*layout.fields, *found.fields), values={**layout.values, **found.values})


def finish(layout: FieldLayout, raw: NDArray[Any], strides: Mapping[str, int], *, where: str) -> NDArray[Any]:
    """Return what is served of one sample of an included dataset.

    Args:
        layout: Its field.
        raw: As stored, without the sample axis; of `time` the wanted steps alone.
        strides: Subsampling by axis word.
        where: Names the sample in errors.

    Raises:
        SourceError: Times are not equally spaced, or too close together for float32.
        DecodeError: A number is beyond float32.
    """
    if layout.role is FieldRole.TIME:
        return _rounded_times(raw, where=where)
    if layout.role is FieldRole.DT:
        step = time_step(raw[: layout.points], where=where)
        return read_as(step * strides.get("t", 1), np.dtype(np.float32), where=where)
    if layout.role is FieldRole.COORDINATE:
        exact = raw.astype(np.float64)
        centers = exact if len(raw) == layout.points else (exact[1:] + exact[:-1]) / 2
        return read_as(centers[:: strides.get(layout.name, 1)], np.dtype(np.float32), where=where)
    axes = [axis for axis in layout.pieces[0].axes if axis != "n"]
    # Time was thinned while reading.
    return raw[tuple(slice(None, None, 1 if axis == "t" else strides.get(axis, 1)) for axis in axes)]


def time_step(times: NDArray[Any], *, where: str) -> float:
    """Return the one difference between times.

    Raises:
        SourceError: There are fewer than two times, they are not equally spaced, or there is no step.
    """
    steps = np.diff(times.astype(np.float64))
    if not len(steps):
        raise SourceError(f"{where} has one time, so there is no time step", hint="Leave 'dt' out of include")
    mean = float(steps.mean())
    if mean == 0 or not np.isfinite(steps).all():
        raise SourceError(
            f"{where}: times are {times[0]:.4g} to {times[-1]:.4g}, and the mean step is {mean:.4g}",
            hint="Correct them, or leave 'dt' out of include",
        )
    # Times are often float32, whose rounding is of the size of the last time, not of the step.
    rounding = 4 * float(np.finfo(np.float32).eps) * float(np.abs(times).max())
    if float(np.abs(steps - mean).max()) > 1e-3 * abs(mean) + min(rounding, 0.1 * abs(mean)):
        raise SourceError(
            f"{where}: times are not equally spaced, their steps are {steps.min():.4g} to {steps.max():.4g}",
            hint="Include 'time' in place of 'dt'",
        )
    return mean


def _rounded_times(times: NDArray[Any], *, where: str) -> NDArray[np.float32]:
    """Return times as float32, whose steps are those of the file within a tenth.

    Raises:
        SourceError: Rounding changes a step more, as it does far from zero.
    """
    rounded = read_as(times, np.dtype(np.float32), where=where)
    steps, kept = np.diff(times.astype(np.float64)), np.diff(rounded.astype(np.float64))
    if lost := [*map(int, np.flatnonzero(np.abs(kept - steps) > 0.1 * np.abs(steps)))]:
        first, second = times[lost[0]], times[lost[0] + 1]
        raise SourceError(
            f"{where}: times {first:.12g} and {second:.12g} are {kept[lost[0]]:.4g} apart as float32",
            hint="Store times that begin near 0, or include 'dt' in place of 'time'",
        )
    return rounded


def _is_main(piece: Piece) -> bool:
    return "t" in piece.axes or any(axis in SPACE for axis in piece.axes)


def _axis_piece(
    parent: Any, named: Mapping[str, str], word: str, sizes: Mapping[str, int], rows: int, *, where: str
) -> Piece:
    """Describe the coordinate dataset of an axis; it may have one entry more than the data."""
    what = {"t": "times"}.get(word, f"coordinates along {word}")
    hint = f"Leave {'time and dt' if word == 't' else 'coordinates'} out of include"
    if word not in sizes:
        raise SourceError(f"{where}: the data has no time axis, so there are no {what}", hint=hint)
    if word not in named:
        raise SourceError(f"{where} states no {what}. {contents(parent)}", hint=hint)
    path, points = named[word], sizes[word]
    shape = tuple(int(size) for size in parent[path].shape)
    for axes, claim in (((word,), ()), (("n", word), (rows,))):
        if len(shape) == len(axes) and shape[:-1] == claim and shape[-1] in (points, points + 1):
            if parent[path].dtype.kind == "c":
                raise SourceError(f"{where}: dataset {path!r} is complex, and no {what}", hint=hint)
            piece = open_piece(parent, path, axes, where=where)
            # Steps and cell edges are differences, which are taken before numbers are rounded.
            return replace(piece, dtype="float64", narrowed=False) if piece.narrowed else piece
    raise SourceError(
        f"{where}: dataset {path!r} has shape {shape}, expected {points} {what}, or one more, for all or "
        f"for each of {rows} samples",
        hint=hint,
    )


def _add_boundaries(file: Any, found: _Additions, where: str) -> None:
    group = file.get("boundary_conditions")
    if group is None or not len(group):
        raise SourceError(
            f"{where} states no boundary conditions (The Well has a group boundary_conditions). "
            f"{contents(file)}",
            hint="Leave 'boundary' out of include",
        )
    for name in sorted(group):
        own = group[name]
        label = f"{where}: boundary_conditions/{name}"
        kind = as_text(own.attrs.get("bc_type", "")).upper()
        if kind not in BOUNDARIES:
            raise SourceError(
                f"{label} is of type {kind or 'unknown'!r}, which has no number",
                hint=f"Types are {', '.join(BOUNDARIES)}. Correct the attribute bc_type, or leave "
                "'boundary' out of include",
            )
        found.values[f"boundary_{name}"] = float(BOUNDARIES.index(kind))
        for part in ("mask", "values"):
            if is_dataset(own, part):
                piece = _boundary_piece(own, part, f"boundary_conditions/{name}/{part}", label)
                found.fields.append(
                    FieldLayout(name=f"boundary_{name}_{part}", pieces=(piece,), role=FieldRole.BOUNDARY)
                )


def _boundary_piece(group: Any, part: str, path: str, label: str) -> Piece:
    """Describe the mask of a boundary, or its values, which are those of the points in the mask."""
    dataset = group[part]
    flags = (("n", "sample_varying"), ("t", "time_varying"))
    lead = tuple(axis for axis, flag in flags if bool(group.attrs.get(flag, False)))
    dims = tuple(as_text(item) for item in np.ravel(group.attrs.get("associated_dims", ())))
    for axes in ((*lead, *dims), (*lead, "p"), (*lead, "p", "c")):
        if len(axes) == len(dataset.shape):
            return make_piece(dataset, path, axes, where=label)
    raise SourceError(
        f"{label}/{part} has shape {tuple(dataset.shape)}, its attributes give the axes "
        f"{' '.join((*lead, *dims))!r}",
        hint="Correct sample_varying, time_varying and associated_dims",
    )
