"""Which tensors of a batch a transform changes, and the batch with them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, WindowBatch

STATES = ("z0", "z1", "future")
"""Names of a window's states; all three are changed alike unless `fields` says otherwise."""


def change(
    batch: Any, fields: Sequence[str] | None, axes: int, function: Callable[[str, Tensor], Tensor]
) -> Any:
    """The batch with `function(name, values)` in place of some of its tensors.

    Args:
        fields: Names: `z0 z1 future` and conditions of windows, fields of records. None: the states of
            windows; of records, the only field that has enough axes.
        axes: Axes that an example needs for this transform.

    Raises:
        ConfigError: No such field, several to choose from, or one whose examples differ in length.
    """
    tensors = tensors_of(batch)
    chosen = _named(tensors, fields) if fields is not None else _meant(batch, tensors, axes)
    for name in chosen:
        values = tensors[name]
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
    return with_tensors(batch, {name: function(name, tensors[name]) for name in chosen})


def only_field(shapes: Mapping[str, tuple[int, ...]], fields: Sequence[str] | None, axes: int) -> str | None:
    """The field of records that `change` would change, by the shapes of examples; None: not exactly one."""
    chosen = [name for name, shape in shapes.items() if len(shape) >= axes] if fields is None else [*fields]
    fits = len(chosen) == 1 and len(shapes.get(chosen[0], ())) >= axes
    return chosen[0] if fits else None


def tensors_of(batch: Any) -> dict[str, Any]:
    """The tensors of a batch by name, without `index`; a list for a field of varying length."""
    if isinstance(batch, WindowBatch):
        states = {name: getattr(batch, name) for name in STATES}
        return {**batch.cond, **{name: values for name, values in states.items() if values is not None}}
    if isinstance(batch, Mapping):
        fields = cast("Mapping[str, Any]", batch)
        return {name: values for name, values in fields.items() if name != "index"}
    raise ConfigError(
        f"a transform got a batch of type {type(batch).__name__}. Expected what the loader hands out, so "
        "put functions that give something else last"
    )


def with_tensors(batch: Any, changed: Mapping[str, Any]) -> Any:
    """The same batch with other tensors under some names."""
    if isinstance(batch, WindowBatch):
        states = {name: values for name, values in changed.items() if name in STATES}
        others = {name: values for name, values in changed.items() if name not in STATES}
        return batch._replace(**states, cond={**batch.cond, **others})
    made = RecordBatch({**batch, **changed})
    made.position = batch.position
    return made


def _named(tensors: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """The fields that are asked for and there; `future` is absent at horizon 1 without being unknown."""
    unknown = [name for name in fields if name not in tensors and not (name == "future" and "z0" in tensors)]
    if unknown:
        raise ConfigError(
            f"`fields` of a transform names {unknown[0]!r}, which is not in the batch. "
            f"It has {_list(tensors)}"
        )
    return [name for name in fields if name in tensors]


def _meant(batch: Any, tensors: Mapping[str, Any], axes: int) -> list[str]:
    if isinstance(batch, WindowBatch):
        return [name for name in STATES if name in tensors]
    found = [name for name, values in tensors.items() if isinstance(values, Tensor) and values.dim() > axes]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} fields could be meant by a transform without `fields`: the batch has "
            f"{_list(tensors)}. Name one or more in a list, "
            f"as `fields` ['{(found or [*tensors] or ['image'])[0]}']"
        )
    return found


def _list(tensors: Mapping[str, Any]) -> str:
    shapes = {n: tuple(t.shape) if isinstance(t, Tensor) else "varying" for n, t in tensors.items()}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
