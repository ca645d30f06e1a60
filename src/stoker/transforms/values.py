"""Change values and leave them where they are: normalization, Gaussian noise."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, Role, WindowBatch
from stoker.loader.order import child_keys, normal
from stoker.loader.transform import run
from stoker.loader.windows import time_field
from stoker.schema import FLOATS

if TYPE_CHECKING:
    from stoker.store import Cache


# ----------------------------------------------------------------------------------------------------------
# Which tensors of a batch a transform changes, and the batch with them changed.


class TensorKey(NamedTuple):
    """Names one tensor of a batch. The role is part of it: a condition may be called `z0` too."""

    role: Role
    name: str


STATES = (
    TensorKey(Role.Z0, "z0"),
    TensorKey(Role.Z1, "z1"),
    TensorKey(Role.FUTURE, "future"),
)
"""A window's states; all three are changed alike unless `fields` says otherwise."""


def change(
    batch: Any, fields: Sequence[str] | None, axes: int, function: Callable[[TensorKey, Tensor], Tensor]
) -> Any:
    """Return the batch with `function(key, values)` in place of some of its tensors.

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
    """Return the field of records that `change` would change, by the shapes of examples; None: not one."""
    chosen = [name for name, shape in shapes.items() if len(shape) >= axes] if fields is None else [*fields]
    fits = len(chosen) == 1 and len(shapes.get(chosen[0], ())) >= axes
    return chosen[0] if fits else None


def tensors_of(batch: Any) -> dict[TensorKey, Any]:
    """Return the tensors of a batch by role and name, without `index`; lists for fields of varying length."""
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
    """Return the same batch with other tensors under some keys."""
    fields = {key.name: values for key, values in changed.items() if key.role is Role.FIELD}
    if isinstance(batch, WindowBatch):
        states = {key.name: values for key, values in changed.items() if key.role is not Role.FIELD}
        return batch._replace(**states, cond={**batch.cond, **fields})
    made = RecordBatch({**batch, **fields})
    made.position = batch.position
    return made


def _named(tensors: Mapping[TensorKey, Any], fields: Sequence[str], *, windowed: bool) -> list[TensorKey]:
    """Return the fields that were named and exist; `future` may be missing, at horizon 1."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize:
    """`(x - mean) / std`, computed in float32."""

    mean: float | Sequence[float]
    """One number, or one per place on `axis`."""
    std: float | Sequence[float]
    """Above 0; one number, or one per place on `axis`."""
    axis: int = -1
    """The axis of channels, counted from the last: -3 for `(C, H, W)`."""
    dtype: str | None = None
    """What comes out; None: the dtype that came in, float32 for integers."""
    fields: Sequence[str] | None = None
    """Tensors to change; None: the states of windows, or the only field of records."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong mean, std or dtype."""
        if not all(math.isfinite(value) for value in _listed(self.mean)):
            raise ConfigError(f"Normalize(mean={self.mean!r}). Expected finite numbers")
        if not all(value > 0 and math.isfinite(value) for value in _listed(self.std)):
            raise ConfigError(f"Normalize(std={self.std!r}). Expected finite numbers above 0")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ConfigError(f"Normalize(dtype={self.dtype!r}). Expected {', '.join(sorted(FLOATS))}")

    @staticmethod
    def of(cache: Cache, name: str | None = None, *, dtype: str | None = None) -> Normalize:
        """Normalization by the statistics that a cache's index keeps, per channel where it has them.

        Args:
            cache: Whose statistics; give the cache of the train split for the other splits too.
            name: The field; None: the one that windows are cut from, and the states made of it.
            dtype: As the attribute.

        Raises:
            ConfigError: The cache has no such field, or no finite value in it.
        """
        field_name = time_field(cache.schema, None) if name is None else name
        known: Mapping[str, Any] = cache.statistics.get(field_name, {})
        found: Mapping[str, Any] = known.get("channels", known)
        means, stds = (_listed(found.get(key)) for key in ("mean", "std"))
        if not means or any(value is None for value in (*means, *stds)):
            raise ConfigError(
                f"{cache.path} has no statistics of a field {field_name!r}. "
                f"Expected one of {', '.join(cache.statistics) or 'none'}"
            )
        stds = tuple(std or 1.0 for std in stds)  # what never varies is only shifted
        return Normalize(mean=means, std=stds, dtype=dtype, fields=None if name is None else (name,))

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch, normalized."""
        return change(batch, self.fields, 0, self._normalized)

    def _normalized(self, key: TensorKey, values: Tensor) -> Tensor:
        inverse = tuple(1.0 / value for value in _listed(self.std))
        rows = [_row(numbers, values.device) for numbers in (_listed(self.mean), inverse)]
        for row in rows:
            if len(row) > 1 and (values.dim() <= -self.axis or values.shape[self.axis] != len(row)):
                raise ConfigError(
                    f"Normalize has {len(row)} channels, but {key.name!r} has examples of shape "
                    f"{tuple(values.shape[1:])} and axis={self.axis}. Give one mean and std, or one "
                    "for each place on that axis"
                )
        mean, scale = (row.view(-1, *[1] * (-1 - self.axis)) for row in rows)
        kept = values.dtype if values.is_floating_point() else torch.float32
        wanted = kept if self.dtype is None else getattr(torch, self.dtype)
        return values.to(torch.float32, copy=True).sub_(mean).mul_(scale).to(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Adds Gaussian noise; the states of one window get the same, other fields noise of their own."""

    std: float | Sequence[float] = field(kw_only=False)
    """In the unit of the values; one number, or one per place on the last axis."""
    fields: Sequence[str] | None = None
    """Tensors to change; None: the states of windows, or the only field of records. `("z0",)`: the input
    of a step alone."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong deviation."""
        if not all(math.isfinite(value) and value >= 0 for value in _listed(self.std)) or self.std == ():
            raise ConfigError(f"Noise(std={self.std!r}). Expected finite numbers of at least 0")

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with noise on it."""
        drawn: dict[str, Tensor] = {}

        def noisy(key: TensorKey, values: Tensor) -> Tensor:
            if not values.is_floating_point():
                raise ConfigError(
                    f"Noise on {key.name!r}, which holds {values.dtype}. Put Normalize(...) before it"
                )
            # The later states have an axis more than `z0` and `z1`, whose noise they share.
            later = key.role is Role.FUTURE
            shape = values.shape[2:] if later else values.shape[1:]
            group = key.name if key.role is Role.FIELD else ""
            if group not in drawn:
                drawn[group] = self._draw(child_keys(keys, zlib.crc32(group.encode())), shape)
            noise = drawn[group][:, None] if later else drawn[group]
            return (values.to(torch.float32) + noise).to(values.dtype)

        return change(batch, self.fields, 0, noisy)

    def _draw(self, keys: Tensor, shape: torch.Size) -> Tensor:
        noise = normal(keys, math.prod(shape)).view(len(keys), *shape)
        std = _listed(self.std)
        if len(std) > 1 and (not shape or shape[-1] != len(std)):
            raise ConfigError(
                f"Noise has {len(std)} deviations, but examples of shape {tuple(shape)}. Give one number, or "
                "one per place on the last axis"
            )
        return noise * _row(std, noise.device)


def _listed(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, Sequence) else (values,)


@lru_cache(maxsize=64)
def _row(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers as float32 on a device, kept: a copy to a GPU would wait at every batch."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device)


# ----------------------------------------------------------------------------------------------------------
# Several augmented views of every example in one batch, as contrastive training takes them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Applies transforms `count` times with other random numbers, and puts the results side by side.

    What they changed gets an axis of views after that of examples, `(B, count, *shape)`; the rest of the
    batch, labels and `index` among it, stays as it is. Transforms before it in the list are common to all
    views. The functions must not write into the batch they are given.
    """

    transforms: Sequence[Callable[[Any, Tensor], Any]]
    """What makes a view, applied in order."""
    count: int = 2
    """Views of each example."""

    def __post_init__(self) -> None:
        """Refuse less than one view."""
        if self.count < 1:
            raise ConfigError(f"Views(count={self.count}). Expected at least 1")

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with `count` views of each example."""
        views = [run(self.transforms, batch, child_keys(keys, place)) for place in range(self.count)]
        before, each = tensors_of(batch), [tensors_of(view) for view in views]
        stacked: dict[TensorKey, Any] = {}
        for key, first in each[0].items():
            if first is not before.get(key):
                stacked[key] = torch.stack([view[key] for view in each], dim=1)
        return with_tensors(batch, stacked)
