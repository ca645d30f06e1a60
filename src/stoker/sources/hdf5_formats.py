"""The layouts of PDEBench files, raw and converted, read by the names of their datasets.

    1D          tensor (N,T,X)[,C]        x-coordinate, t-coordinate         -> data (T,1,X,C)
    converted   data (N,T,...)            rank from coordinates or file name -> data (T,H,W,C)
    Darcy       tensor (N,1,X,Y), nu (N,X,Y)                                 -> data (H,W,1), nu (H,W,1)
    CFD         density, pressure, Vx[, Vy, Vz] (N,T,X[,Y,Z])                -> data, channels in this order
    2D NS       velocity, particles (N,T,X,Y,V) [, force]                    -> data; force a field of its own
    2D groups   0000/data (T,X,Y,C), 0000/grid/{t,x,y}                       -> data, one sample per group

Other orders (channels before space, time last, one trajectory a file) are read where coordinates state
them; see `stoker.sources.hdf5_axes`. Coordinates may have one entry more than the data (cell edges).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from stoker.errors import SourceError, arg
from stoker.schema import Json
from stoker.sources.files import space_rank
from stoker.sources.hdf5_axes import (
    AxesReading,
    Coordinates,
    LayoutChoices,
    describe_axes,
    find_coordinates,
    read_axes,
)
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
    FileLayout,
    Piece,
    as_text,
    declared_axes,
    make_piece,
)
from stoker.sources.hdf5_open import require_inside

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
            f"groups with data). {contents(file)} Declare them, for example {arg('fields', {'u': 'n t x'})}"
        )
    unused = set(stated) - {piece.dataset for one in found.fields for piece in one.pieces}
    if unused:
        raise SourceError(
            f"{where}: fields declares {sorted(unused)}, which the preset does not read here. Leave out "
            f"{arg('preset', 'pdebench')} to name all datasets yourself"
        )
    values = file_parameters(file, PurePosixPath(name).stem, where=where)
    if clash := values.keys() & {one.name for one in found.fields}:
        raise SourceError(
            f"{where}: {sorted(clash)} is both a dataset and a parameter. Declare {arg('fields')} instead"
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
                    raise SourceError(self._unclear(unknown, shape, coordinates, found))
                stated = found.axes
            axes |= dict.fromkeys(unknown, stated)
        return tuple(open_piece(parent, name, axes.get(name, ()), where=self._where) for name in names)

    def _unclear(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        coordinates: Coordinates,
        found: AxesReading,
    ) -> str:
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
        return (
            f"{self._where}: the axes of dataset {names[0]!r} {shape} {fact}: {known}. Declare them with "
            f"{arg('preset', 'pdebench')} and {readings}"
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
# the identity; `stoker.sources.hdf5_axes` serves them as fields.


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
            f"{contents(file)} Use {arg('preset', 'pdebench')}, or declare {arg('fields')}"
        )
    space = attribute_words(file["dimensions"], "spatial_dims")
    if not space or not set(space) <= {*SPACE}:
        raise SourceError(
            f"{where}: dimensions state spatial_dims {list(space)}; only x, y, z are read as a grid of equal "
            f"cells. To use this grid as if it were one, declare the fields in place of "
            f"{arg('preset', 'well')}, and call the one to train on 'data': "
            f"{arg('fields', _declaration(file, space, where))}"
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
            f"{where} has shape {tuple(dataset.shape)}, its attributes say that {' '.join(found)} vary. "
            "Correct sample_varying and time_varying"
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
            f"{' '.join(axes)!r}. Correct sample_varying, time_varying and dim_varying"
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
