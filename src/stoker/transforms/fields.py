"""Which tensors of a batch a transform changes, and the batch with them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, WindowBatch
from stoker.loader.outputs import Role


class TensorKey(NamedTuple):
    """Names one tensor of a batch. The role is part of it: a condition may be called `z0` too."""

    role: Role
    name: str


STATES = (
    TensorKey(Role.STATE, "z0"),
    TensorKey(Role.STATE, "z1"),
    TensorKey(Role.FUTURE, "future"),
)
"""A window's states; all three are changed alike unless `fields` says otherwise."""


def change(
    batch: Any, fields: Sequence[str] | None, axes: int, function: Callable[[TensorKey, Tensor], Tensor]
) -> Any:
    """The batch with `function(key, values)` in place of some of its tensors.

    Args:
        fields: Names: `z0 z1 future` and conditions of windows, fields of records. None: the states of
            windows; of records, the only field that has enough axes.
        axes: Axes that an example needs for this transform.

    Raises:
        ConfigError: No such field, one of two tensors of that name, several to choose from, or one whose
            examples differ in length.
    """
    tensors = tensors_of(batch)
    if fields is None:
        chosen = _meant(batch, tensors, axes)
    else:
        chosen = _named(tensors, fields, windowed=isinstance(batch, WindowBatch))
    for key in chosen:
        name, values = key.name, tensors[key]
        if not isinstance(values, Tensor):
            raise ConfigError(
                f"field {name!r} has another length in every record, which this transform cannot change. "
                "Write a function (batch, keys) -> batch for it"
            )
        if values.dim() <= axes:
            raise ConfigError(
                f"field {name!r} has examples of shape {tuple(values.shape[1:])}, but this transform needs "
                f"at least {axes} axes. Name others in its `fields`"
            )
    return with_tensors(batch, {key: function(key, tensors[key]) for key in chosen})


def only_field(shapes: Mapping[str, tuple[int, ...]], fields: Sequence[str] | None, axes: int) -> str | None:
    """The field of records that `change` would change, by the shapes of examples; None: not exactly one."""
    chosen = [name for name, shape in shapes.items() if len(shape) >= axes] if fields is None else [*fields]
    fits = len(chosen) == 1 and len(shapes.get(chosen[0], ())) >= axes
    return chosen[0] if fits else None


def tensors_of(batch: Any) -> dict[TensorKey, Any]:
    """The tensors of a batch by role and name, without `index`; a list for a field of varying length."""
    if isinstance(batch, WindowBatch):
        states = {key: getattr(batch, key.name) for key in STATES}
        if isinstance(batch.z0, dict):
            raise ConfigError(
                f"windows have the states {', '.join(batch.z0)}, and transforms of stoker.transforms change "
                "one. Write a function (batch, keys) -> batch, or name one field in Windows(field=...)"
            )
        present = {key: values for key, values in states.items() if values is not None}
        return present | {TensorKey(Role.FIELD, name): values for name, values in batch.cond.items()}
    if isinstance(batch, Mapping):
        fields = cast("Mapping[str, Any]", batch)
        return {TensorKey(Role.FIELD, name): values for name, values in fields.items() if name != "index"}
    raise ConfigError(
        f"a transform got a batch of type {type(batch).__name__}. Expected what the loader hands out, so "
        "put functions that give something else last"
    )


def with_tensors(batch: Any, changed: Mapping[TensorKey, Any]) -> Any:
    """The same batch with other tensors under some keys."""
    fields = {key.name: values for key, values in changed.items() if key.role is Role.FIELD}
    if isinstance(batch, WindowBatch):
        states = {key.name: values for key, values in changed.items() if key.role is not Role.FIELD}
        return batch._replace(**states, cond={**batch.cond, **fields})
    made = RecordBatch({**batch, **fields})
    made.position = batch.position
    return made


def _named(tensors: Mapping[TensorKey, Any], fields: Sequence[str], *, windowed: bool) -> list[TensorKey]:
    """The fields that are asked for and there; `future` is absent at horizon 1 without being unknown."""
    states = {key.name: key for key in STATES} if windowed else {}
    chosen: list[TensorKey] = []
    for name in fields:
        field = TensorKey(Role.FIELD, name)
        if name in states and field in tensors:
            raise ConfigError(
                f"`fields` of a transform names {name!r}, which is a state of the window and a condition. "
                "Give the condition another name in its source, or write a function (batch, keys) -> batch"
            )
        key = states.get(name, field)
        if key in tensors:
            chosen.append(key)
        elif name not in states:
            raise ConfigError(
                f"`fields` of a transform names {name!r}, which is not in the batch. It has {_list(tensors)}"
            )
    return chosen


def _meant(batch: Any, tensors: Mapping[TensorKey, Any], axes: int) -> list[TensorKey]:
    if isinstance(batch, WindowBatch):
        return [key for key in STATES if key in tensors]
    found = [key for key, values in tensors.items() if isinstance(values, Tensor) and values.dim() > axes]
    if len(found) != 1:
        example = next((key.name for key in (*found, *tensors)), "image")
        raise ConfigError(
            f"{len(found)} fields could be meant by a transform without `fields`: the batch has "
            f"{_list(tensors)}. Name one or more in a list, as `fields` ['{example}']"
        )
    return found


def _list(tensors: Mapping[TensorKey, Any]) -> str:
    shapes = {
        key: tuple(values.shape) if isinstance(values, Tensor) else "varying"
        for key, values in tensors.items()
    }
    return ", ".join(f"{key.name} {shape}" for key, shape in shapes.items()) or "none"
