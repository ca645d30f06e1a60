"""The layouts of PDEBench files, raw and converted, read by the names of their datasets.

    1D          tensor (N,T,X)[,C]        x-coordinate, t-coordinate         -> data (T,1,X,C)
    converted   data (N,T,...)            rank from coordinates or file name -> data (T,H,W,C)
    Darcy       tensor (N,1,X,Y), nu (N,X,Y)                                 -> data (H,W,1), nu (H,W,1)
    CFD         density, pressure, Vx[, Vy, Vz] (N,T,X[,Y,Z])                -> data, channels in this order
    2D NS       velocity, particles (N,T,X,Y,V) [, force]                    -> data; force a field of its own
    2D groups   0000/data (T,X,Y,C), 0000/grid/{t,x,y}                       -> data, one sample per group

Coordinates are used for their names alone; they may have one entry more than the data has steps (cell
edges). Channels are last unless the file or the user says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from stoker.errors import SourceError
from stoker.sources.declared import (
    contents,
    declared_fields,
    is_dataset,
    open_piece,
    rows_layout,
    sample_groups,
)
from stoker.sources.files import name_parameters, space_rank
from stoker.sources.hdf5_layout import SPACE, FieldLayout, FileLayout, Piece, as_text, declared_axes

CFD_CHANNELS = ("density", "pressure", "Vx", "Vy", "Vz")
NS_CHANNELS = ("velocity", "particles")
MAIN = ("data", "tensor")

_log = logging.getLogger("stoker")


def looks_like(file: Any) -> bool:
    """Whether an open file has one of the layouts above."""
    names = (*MAIN, "density", "velocity")
    return any(is_dataset(file, name) for name in names) or bool(sample_groups(file, ["data"]))


def pdebench_layout(
    file: Any, name: str, *, where: str, fields: Mapping[str, str] | None = None
) -> FileLayout:
    """The layout of an open PDEBench file.

    Args:
        file: Open `h5py.File`.
        name: The file's relative name: it may state parameters and the number of space axes.
        where: Names the file in errors.
        fields: Axes that the user declares for datasets of the preset, `{"data": "n t x c"}`.

    Raises:
        SourceError: None of the known datasets is there, or axes are ambiguous.
    """
    stated = dict(declared_fields(fields).values()) if fields else {}
    reader = _Reader(file, PurePosixPath(name).stem, stated, where)
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
            f"groups with data). {contents(file)} Declare them, for example fields={{'u': 'n t x'}}"
        )
    unused = set(stated) - {piece.dataset for one in found.fields for piece in one.pieces}
    if unused:
        raise SourceError(
            f"{where}: fields declares {sorted(unused)}, which the preset does not read here. Leave out "
            "preset='pdebench' to name all datasets yourself"
        )
    values = file_parameters(file, PurePosixPath(name).stem, where=where)
    if clash := values.keys() & {one.name for one in found.fields}:
        raise SourceError(
            f"{where}: {sorted(clash)} is both a dataset and a parameter. Declare fields= instead"
        )
    return FileLayout(fields=found.fields, rows=found.rows, groups=found.groups, values=values)


def file_parameters(file: Any, stem: str, *, where: str) -> dict[str, float]:
    """Parameters of a file: its numeric attributes of one element, and what its name states.

    Raises:
        SourceError: Attribute and name contradict each other.
    """
    values: dict[str, float] = {}
    for key, value in file.attrs.items():
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiu":
            values[str(key)] = float(array.item())
    for key, value in name_parameters(stem).items():
        match = next((other for other in values if other.lower() == key.lower()), None)
        if match is None:
            values[key] = value
        elif not np.isclose(values[match], value, rtol=1e-6, atol=0):
            raise SourceError(
                f"{where}: the name says {key} = {value:g}, the file's attribute says {values[match]:g}. "
                "Rename the file, or correct the attribute"
            )
    return dict(sorted(values.items()))


class _Reader:
    """One file being described; holds what all layouts need."""

    def __init__(self, file: Any, stem: str, stated: Mapping[str, tuple[str, ...]], where: str) -> None:
        self._file, self._stem, self._stated, self._where = file, stem, stated, where

    def cfd(self) -> FileLayout:
        """Density, pressure and velocities stacked; the velocities present give the rank."""
        present = [name for name in CFD_CHANNELS if name in self._file]
        space = SPACE[: max(1, sum(name.startswith("V") for name in present))]
        axes = ("n", "t", *space)
        pieces = [self._piece(self._file, name, axes) for name in present]
        return rows_layout((FieldLayout(name="data", pieces=tuple(pieces)),), where=self._where)

    def navier_stokes(self) -> FileLayout:
        """Velocity and particles stacked; force (with or without time) a field of its own."""
        present = [name for name in NS_CHANNELS if name in self._file]
        main = [self._piece(self._file, name, ("n", "t", "x", "y", "c")) for name in present]
        fields = [FieldLayout(name="data", pieces=tuple(main))]
        if "force" in self._file:
            timed = len(self._file["force"].shape) == 5
            axes = ("n", "t", "x", "y", "c") if timed else ("n", "x", "y", "c")
            fields.append(FieldLayout(name="force", pieces=(self._piece(self._file, "force", axes),)))
        return rows_layout(tuple(fields), where=self._where)

    def darcy(self) -> FileLayout:
        """Steady: solution `tensor` and coefficient `nu`, no time axis."""
        solution = self._piece(self._file, "tensor", ("n", "c", "x", "y"))
        coefficient = self._piece(self._file, "nu", ("n", "x", "y"))
        fields = (
            FieldLayout(name="data", pieces=(solution,)),
            FieldLayout(name="nu", pieces=(coefficient,)),
        )
        return rows_layout(fields, where=self._where)

    def single(self, dataset: str) -> FileLayout:
        """One dataset with all samples."""
        # Darcy flow is PDEBench's one steady problem; nothing but its name tells a converted file of it.
        lead = ("n",) if "darcy" in self._stem.lower() else ("n", "t")
        axes = self._axes(self._file[dataset], dataset, lead, self._coordinate_rank(self._file))
        piece = self._piece(self._file, dataset, axes)
        return rows_layout((FieldLayout(name="data", pieces=(piece,)),), where=self._where)

    def grouped(self, groups: list[str]) -> FileLayout:
        """One group per sample, with `grid/*` beside the data."""
        others = sorted(set(self._file) - set(groups))
        if others:
            _log.warning(
                "%s: %d entries without 'data' are no samples: %s", self._where, len(others), others[:5]
            )
        first = self._file[groups[0]]
        rank = self._coordinate_rank(first["grid"]) if "grid" in first else None
        axes = self._axes(first["data"], "data", ("t",), rank)
        piece = self._piece(first, "data", axes)
        return FileLayout(
            fields=(FieldLayout(name="data", pieces=(piece,)),), rows=len(groups), groups=tuple(groups)
        )

    def _coordinate_rank(self, names: Iterable[str]) -> int | None:
        """Space axes that have a coordinate dataset (`x`, `x-coordinate`, `x_coordinate`)."""
        words = {name.lower().replace("_", "-").removesuffix("-coordinate") for name in names}
        return sum(axis in words for axis in SPACE) or None

    def _axes(self, dataset: Any, name: str, lead: tuple[str, ...], rank: int | None) -> tuple[str, ...]:
        """Axes of a dataset that starts with `lead`: stated in the file, else by the number of space axes."""
        stated = declared_axes(dataset, where=f"{self._where}: dataset {name!r}")
        if name in self._stated or stated is not None:
            return self._stated.get(name) or stated or ()
        count = len(dataset.shape)
        rank = rank or space_rank(self._stem)
        if rank is None and count == len(lead) + 1:
            return (*lead, "x")
        if rank is not None and count == len(lead) + rank:
            return (*lead, *SPACE[:rank])
        if rank is not None and count == len(lead) + rank + 1:
            return (*lead, *SPACE[:rank], "c")
        raise SourceError(self._ambiguous(name, tuple(dataset.shape), lead, rank))

    def _ambiguous(self, name: str, shape: tuple[int, ...], lead: tuple[str, ...], rank: int | None) -> str:
        extra = len(shape) - len(lead)
        if rank is not None:
            known = f"its coordinates or name state {rank} space axes, which does not fit"
        else:
            known = "neither coordinates nor labels nor the file's name state which axes are space"
        options = [" ".join((*lead, *SPACE[:extra]))] if 1 <= extra <= 3 else []
        if 2 <= extra <= 4:
            options.append(" ".join((*lead, *SPACE[: extra - 1], "c")))
        shown = " or ".join(repr(option) for option in options) or "more axes than PDEBench has"
        example = options[-1] if options else "n t x c"
        return (
            f"{self._where}: the axes of dataset {name!r} {shape} are ambiguous ({shown}): {known}. "
            f"Declare them: fields={{{name!r}: {example!r}}}"
        )

    def _piece(self, parent: Any, name: str, axes: tuple[str, ...]) -> Piece:
        return open_piece(parent, name, self._stated.get(name, axes), where=self._where)


def attribute_words(group: Any, name: str) -> tuple[str, ...]:
    """An attribute that lists names, as strings; empty when absent."""
    value = group.attrs.get(name)
    if value is None:
        return ()
    return tuple(as_text(item) for item in np.asarray(value).ravel())
