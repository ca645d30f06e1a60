"""Conditions of several caches under one roof: the same names, widths and dtypes in every batch.

A name that a cache lacks is given as zeros with a mask that says so; one that is narrower there is filled up
with zeros. Names come sorted, so the order of the caches decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.engine import Design
from stoker.loader.outputs import RECORD, Compute, Output, Role
from stoker.store.join import served_schema

OURS = ("task", "tasks", "mask")
"""What a mixture adds to a batch of whole records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition as batches of a mixture have it."""

    name: str
    shape: tuple[int, ...]
    """Shape of one example: that of every cache that has it, or the widest one's `(C,)`."""
    dtype: torch.dtype
    """The narrowest that holds the values of all caches."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """Its shape in each cache; None where it has none."""
    same_dtype: bool
    """All caches that have it have it in this dtype."""


class Conditions:
    """All conditions of a mixture, sorted by name."""

    def __init__(self, conditions: Sequence[Condition], raw: Sequence[frozenset[str]] = ()) -> None:
        """`raw` names per cache the kept raw fields: no conditions, they stay in its own batches alone."""
        self._all, self._raw = tuple(conditions), tuple(raw)
        members = range(len(self._all[0].shapes) if self._all else 0)
        self._as_it_is = {
            member: {one.name for one in self._all if one.shapes[member] == one.shape and one.same_dtype}
            for member in members
        }
        self._masks: dict[tuple[int, int, torch.device], dict[str, Tensor]] = {}
        self._tasks: dict[tuple[int, int, torch.device], Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(one.name for one in self._all)

    def tasks(self, member: int, index: Tensor) -> Tensor:
        """`member` for every example, as masks are given."""
        key = (member, len(index), index.device)
        if key not in self._tasks:
            with torch.inference_mode(False):  # it outlives the caller's mode
                self._tasks[key] = torch.tensor(member, device=index.device).expand(len(index))
        return self._tasks[key]

    def align(self, member: int, own: Mapping[str, Tensor], index: Tensor) -> tuple[dict[str, Tensor], ...]:
        """Conditions and masks of a batch by name. Masks are the same for every batch of a size and cache,
        so they are given without memory of their own: writing to one is an error.

        Args:
            member: Place of the batch's cache.
            own: The batch's values.
            index: Tells size and device.
        """
        as_it_is = self._as_it_is.get(member, ())
        values = {
            one.name: own[one.name] if one.name in as_it_is else _fitted(one, member, own, index)
            for one in self._all
        }
        if self._raw:
            values |= {name: own[name] for name in self._raw[member]}
        key = (member, len(index), index.device)
        if key not in self._masks:
            with torch.inference_mode(False):
                self._masks[key] = {one.name: _mask(one, member, index) for one in self._all}
        return values, self._masks[key].copy()


def _fitted(one: Condition, member: int, own: Mapping[str, Tensor], index: Tensor) -> Tensor:
    """Values of a cache in the shape and dtype of all; zeros where it has none."""
    shape = one.shapes[member]
    if shape is None:
        return torch.zeros((len(index), *one.shape), dtype=one.dtype, device=index.device)
    value = own[one.name].to(one.dtype)
    if shape == one.shape:
        return value
    value = value.reshape(len(index), -1)
    return F.pad(value, (0, one.shape[0] - value.shape[1]))


def _mask(one: Condition, member: int, index: Tensor) -> Tensor:
    shape, row = one.shapes[member], torch.zeros(one.shape, dtype=torch.bool, device="cpu")
    if shape == one.shape:
        row.fill_(True)
    elif shape is not None:
        row[: _width(shape)] = True
    return row.to(index.device).expand(len(index), *one.shape)


def find_conditions(designs: Mapping[str, Design]) -> Conditions:
    """The conditions of the caches that `designs` serve.

    With windows these are all but the field they are cut from; of whole records those without time that hold
    one number or a row of numbers, since only these can stand beside those of another cache.

    Raises:
        ConfigError: A field of whole records has a name that batches of a mixture give to something else.
    """
    for name, design in designs.items():
        if design.windows is not None and isinstance(design.windows.field, tuple):
            raise ConfigError(
                f"windows of {name!r} have several state fields, {', '.join(design.windows.field)}, which a "
                "mixture cannot line up with those of other caches. Name one field in Windows(field=...)"
            )
    found = [_outputs_of(design) for design in designs.values()]
    for name, design in designs.items():
        taken = [own for own in OURS if not design.windowed and own in served_schema(design.cache)]
        if taken:
            raise ConfigError(
                f"records of {name!r} have a field {taken[0]!r}, a name that batches of a mixture give to "
                "something else. Give the field another name in its source"
            )
    names = sorted({name for outputs in found for name in outputs})
    raw = [frozenset(_kept_by(design)) for design in designs.values()]
    return Conditions([_condition(name, found) for name in names], raw if any(raw) else ())


def _kept_by(design: Design) -> list[str]:
    """Names under which batches of windows give what is no condition: kept raw fields, a mask."""
    schema = design.cache.schema
    return [
        o.name
        for o in design.outputs
        if design.windowed and (schema[o.field].kept or o.compute is Compute.MASK)
    ]


def _outputs_of(design: Design) -> dict[str, Output]:
    outputs, columns = design.outputs, _column_outputs(design)
    if design.windowed:
        kept = _kept_by(design)
        conditions = [output for output in outputs if output.role is Role.FIELD]
        return {o.name: o for o in (*conditions, *columns) if o.name not in kept}
    schema = served_schema(design.cache)
    own = (*outputs, *columns)
    return {o.name: o for o in own if not (schema[o.field].time or o.ragged or len(o.shape) > 1)}


def _column_outputs(design: Design) -> list[Output]:
    """The columns of a table as batches have them: beside windows as `(B, C)`."""
    joined = design.cache.joined
    found = {} if joined is None else joined.values
    return [
        Output(
            name=name,
            field=name,
            index=RECORD,
            shape=(int(np.prod(values.shape[1:])),) if design.windowed else tuple(values.shape[1:]),
            dtype=values.dtype,
        )
        for name, values in found.items()
    ]


def _condition(name: str, found: Sequence[Mapping[str, Output]]) -> Condition:
    own = [outputs[name] for outputs in found if name in outputs]
    shapes, dtypes = {output.shape for output in own}, {output.cast or output.dtype for output in own}
    return Condition(
        name=name,
        shape=shapes.pop() if len(shapes) == 1 else (max(map(_width, shapes)),),
        dtype=reduce(torch.promote_types, dtypes),
        shapes=tuple(outputs[name].shape if name in outputs else None for outputs in found),
        same_dtype=len(dtypes) == 1,
    )


def _width(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
