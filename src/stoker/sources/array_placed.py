"""Where the samples of named arrays lie in their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.errors import SourceError, arg
from stoker.sources.array_layout import ArrayField, Described
from stoker.sources.containers import Opened
from stoker.sources.hdf5_open import FOREIGN_ERRORS
from stoker.sources.placed import PlacedField, PlacedPart, check_order, offset_of, plain_dtype, row_places


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
