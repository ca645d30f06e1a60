"""Times, coordinates and boundaries that a file of simulations states next to its fields, served on request.

    time         `time` (T,) float32: the times of the stored steps, a field with time
    dt           `dt` float32: the time between two steps of the sample, which must be constant
    coordinates  `x`, `y`, `z`, each (points,) float32: cell centers along each axis of the grid
    boundary     The Well: `boundary_NAME` float32, a number of `BOUNDARIES`; `boundary_NAME_mask` and
                 `boundary_NAME_values` with the axes that they have in the file

A coordinate of one entry more than points holds cell edges, and their midpoints are served; of times the
first T are. All are stored with each sample: 4 bytes a number, and a mask takes 1 byte a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, arg
from stoker.sources.hdf5_axes import name_coordinates
from stoker.sources.hdf5_declared import contents, is_dataset, open_piece
from stoker.sources.hdf5_fields import (
    SPACE,
    FieldLayout,
    FieldRole,
    FileLayout,
    Piece,
    as_text,
    make_piece,
)
from stoker.sources.protocol import read_as

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
        raise SourceError(f"{where} has one time, so there is no time step. Leave 'dt' out of include")
    mean = float(steps.mean())
    if mean == 0 or not np.isfinite(steps).all():
        raise SourceError(
            f"{where}: times are {times[0]:.4g} to {times[-1]:.4g}, and the mean step is {mean:.4g}. Correct "
            "them, or leave 'dt' out of include"
        )
    # Times are often float32, whose rounding is of the size of the last time, not of the step.
    rounding = 4 * float(np.finfo(np.float32).eps) * float(np.abs(times).max())
    if float(np.abs(steps - mean).max()) > 1e-3 * abs(mean) + min(rounding, 0.1 * abs(mean)):
        raise SourceError(
            f"{where}: times are not equally spaced, their steps are {steps.min():.4g} to {steps.max():.4g}. "
            "Include 'time' in place of 'dt'"
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
            f"{where}: times {first:.12g} and {second:.12g} are {kept[lost[0]]:.4g} apart as float32. Store "
            "times that begin near 0, or include 'dt' in place of 'time'"
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
        raise SourceError(f"{where}: the data has no time axis, so there are no {what}. {hint}")
    if word not in named:
        raise SourceError(f"{where} states no {what}. {contents(parent)} {hint}")
    path, points = named[word], sizes[word]
    shape = tuple(int(size) for size in parent[path].shape)
    for axes, claim in (((word,), ()), (("n", word), (rows,))):
        if len(shape) == len(axes) and shape[:-1] == claim and shape[-1] in (points, points + 1):
            if parent[path].dtype.kind == "c":
                raise SourceError(f"{where}: dataset {path!r} is complex, and no {what}. {hint}")
            piece = open_piece(parent, path, axes, where=where)
            # Steps and cell edges are differences, which are taken before numbers are rounded.
            return replace(piece, dtype="float64", narrowed=False) if piece.narrowed else piece
    raise SourceError(
        f"{where}: dataset {path!r} has shape {shape}, expected {points} {what}, or one more, for all or for "
        f"each of {rows} samples. {hint}"
    )


def _add_boundaries(file: Any, found: _Additions, where: str) -> None:
    group = file.get("boundary_conditions")
    if group is None or not len(group):
        raise SourceError(
            f"{where} states no boundary conditions (The Well has a group boundary_conditions). "
            f"{contents(file)} Leave 'boundary' out of include"
        )
    for name in sorted(group):
        own = group[name]
        label = f"{where}: boundary_conditions/{name}"
        kind = as_text(own.attrs.get("bc_type", "")).upper()
        if kind not in BOUNDARIES:
            raise SourceError(
                f"{label} is of type {kind or 'unknown'!r}, which has no number. Types are "
                f"{', '.join(BOUNDARIES)}. Correct the attribute bc_type, or leave 'boundary' out of include"
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
        f"{' '.join((*lead, *dims))!r}. Correct sample_varying, time_varying and associated_dims"
    )
