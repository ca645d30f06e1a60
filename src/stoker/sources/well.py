"""The layout of The Well's files: fields by tensor rank, with attributes that name every axis.

`t0_fields`, `t1_fields` and `t2_fields` hold scalars, vectors and matrices of shape
`(n, t, *space[, d[, d]])`; attributes say which of these axes a dataset has. Fields with all axes become
the channels of `data` `(T, H, W, C)`, in the files' own order (scalars, then vectors as `velocity_x`,
`velocity_y`, then matrices); others become fields of their own. `scalars` become scalar fields, boundary
conditions go into the identity; `stoker.sources.included` serves them as fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.errors import SourceError, arg
from stoker.schema import Json
from stoker.sources.declared import contents, rows_layout
from stoker.sources.hdf5_layout import SPACE, FieldLayout, FileLayout, Piece, as_text, make_piece
from stoker.sources.hdf5_open import require_inside
from stoker.sources.pdebench import attribute_words

GROUPS = ("t0_fields", "t1_fields", "t2_fields")


def looks_like(file: Any) -> bool:
    """Whether an open file has this layout."""
    return "dimensions" in file and any(group in file for group in GROUPS)


def well_layout(file: Any, *, where: str) -> FileLayout:
    """The layout of an open file.

    Raises:
        SourceError: Not this layout, or a dataset's axes do not fit its attributes.
    """
    if not looks_like(file):
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
    return FileLayout(
        fields=found.fields, rows=found.rows, values=dict(sorted(values.items())), notes=_boundaries(file)
    )


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
