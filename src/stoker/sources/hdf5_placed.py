"""Where the samples of HDF5 simulations lie in their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from stoker.errors import SourceError, arg
from stoker.sources.hdf5_layout import FieldLayout, FieldRole, piece_field, sample_axes
from stoker.sources.hdf5_open import FOREIGN_ERRORS, FilePool, cause_of, require_inside
from stoker.sources.hdf5_scan import ScannedFile
from stoker.sources.placed import PlacedField, PlacedPart, check_order, offset_of, plain_dtype, row_places


def placed_part(file: ScannedFile, pool: FilePool, strides: Mapping[str, int]) -> PlacedPart:
    """The samples of one described file.

    Raises:
        SourceError: They cannot be served from where they lie.
    """
    if strides:
        raise SourceError(
            f"{file.path}: subsample={dict(strides)} changes what is read, and in place files are served as "
            "they are. Leave it out, and thin batches with transforms=[stoker.transforms.Take(...)]"
        )
    try:
        fields = {layout.name: _placed_field(file, layout, pool) for layout in file.layout.fields}
    except FOREIGN_ERRORS as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{file.path} cannot be read ({error}). Copy it again") from cause_of(error)
    values = {name: np.full(file.count, value, np.float32) for name, value in file.layout.values.items()}
    return PlacedPart(count=file.count, fields=fields, values=values)


def _placed_field(file: ScannedFile, layout: FieldLayout, pool: FilePool) -> PlacedField:
    where = f"{file.path}: field {layout.name!r}"
    if layout.role is not FieldRole.DATA:
        raise SourceError(
            f"{where} is computed from the file. Leave include out where files are served in place"
        )
    piece, *others = layout.pieces
    if others:
        raise SourceError(
            f"{where} is put together from {len(layout.pieces)} datasets, which are stored apart. Name each "
            f"as a field of its own, as {arg('fields', {'density': 'n t x y'})}"
        )
    if piece.axes.index("n") if "n" in piece.axes else 0:
        raise SourceError(
            f"{where} does not have samples along axis 0, so the bytes of a sample are not contiguous"
        )
    check_order(sample_axes(piece), where=where)
    rows = np.arange(file.layout.rows, dtype=np.int64) if file.rows is None else file.rows.astype(np.int64)
    if file.layout.groups:
        names = [f"{file.layout.groups[row]}/{piece.dataset}" for row in rows.tolist()]
        found = [pool.dataset(file.path, name, keep=False) for name in names]
        at = np.array([offset_of(one, where=f"{where}, {one.name}") for one in found], np.int64)
        first = found[0]
        if any(one.dtype != first.dtype or one.shape != first.shape for one in found):
            raise SourceError(f"{where} differs in dtype or shape from group to group")
    else:
        first = pool.dataset(file.path, piece.dataset, keep=False)
        require_inside(first.file, piece.dataset, where=str(file.path))
        whole = "n" not in piece.axes
        at = np.array([offset_of(first, where=where)]) if whole else row_places(first, rows, where=where)
    field = dataclasses.replace(piece_field(piece, {}), dtype=plain_dtype(first.dtype, where=where))
    return PlacedField(field=field, path=file.path, at=at)
