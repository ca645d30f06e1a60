"""Transforms of batches, on the device they are on, with randomness that belongs to the example.

A transform takes a batch and a key per example, and returns the batch on the same device.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
import torch
from torch import Tensor

from stoker.arguments import AXES, FLAG, IMAGE_SIZE, check, finite, one_or_several, whole
from stoker.errors import ConfigError
from stoker.latents import DrawLatent, DropCondition
from stoker.loader.batch import RecordBatch, Role, WindowBatch, time_field, to_device
from stoker.loader.order import bits, child_keys, integers, normal, uniform
from stoker.loader.transform import FieldTransform, ImageCut, as_transforms, run
from stoker.runtime.threads import Pool
from stoker.schema import FLOATS
from stoker.sources.arguments import parse_list, parse_names
from stoker.sources.image_geometry import Rules

if TYPE_CHECKING:
    from stoker.store import Cache

__all__ = [
    "Crop",
    "CropImages",
    "Decode",
    "DrawLatent",
    "DropCondition",
    "Flip",
    "Noise",
    "Normalize",
    "Roll",
    "Take",
    "Views",
    "bits",
    "child_keys",
    "integers",
    "normal",
    "uniform",
]

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
                f"field {name!r} has another length in every record, which this transform cannot change",
                hint="Write a function (batch, keys) -> batch for it",
            )
        if values.dim() <= axes:
            raise ConfigError(
                f"field {name!r} has examples of shape {tuple(values.shape[1:])}, but this transform needs "
                f"at least {axes} axes",
                hint="Name others in its `fields`",
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
                "one",
                hint="Write a function (batch, keys) -> batch, or name one field in Windows(field=...)",
            )
        present = {key: values for key, values in states.items() if values is not None}
        return present | {TensorKey(Role.FIELD, name): values for name, values in batch.cond.items()}
    if isinstance(batch, Mapping):
        fields = cast("Mapping[str, Any]", batch)
        return {TensorKey(Role.FIELD, name): values for name, values in fields.items() if name != "index"}
    raise ConfigError(
        f"a transform got a batch of type {type(batch).__name__}",
        hint="Expected what the loader hands out, so put functions that give something else last",
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
                f"`fields` of a transform names {name!r}, which is a state of the window and a condition",
                hint="Give the condition another name in its source, or write a function (batch, keys) -> "
                "batch",
            )
        key = states.get(name, field)
        if key in tensors:
            chosen.append(key)
        elif name not in states:
            raise ConfigError(
                f"`fields` of a transform names {name!r}, which is not in the batch",
                hint=f"It has {_list(tensors)}",
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
            f"{_list(tensors)}",
            hint=f"Name one or more in a list, as `fields` ['{example}']",
        )
    return found


def _list(tensors: Mapping[TensorKey, Any]) -> str:
    shapes = {
        key: tuple(values.shape) if isinstance(values, Tensor) else "varying"
        for key, values in tensors.items()
    }
    return ", ".join(f"{key.name} {shape}" for key, shape in shapes.items()) or "none"


def _check_fields(transform: object, fields: object) -> None:
    """Refuse what is not a list of names, or None; one name alone becomes a list."""
    if fields is not None:
        names = parse_names(f"{type(transform).__name__}: fields", fields, "the name of a field")
        object.__setattr__(transform, "fields", names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(FieldTransform):
    """Normalizes values: `(x - mean) / std`, computed in float32.

    `stoker.Normalization` does the same while records are gathered, for whole fields.

    Raises:
        ConfigError: A mean is not finite, a deviation is not above 0, or `dtype` is not a float.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Normalize
        >>> data = [{"x": torch.tensor([0.0, 2.0])}, {"x": torch.tensor([4.0, 6.0])}]
        >>> loader = stoker.cached(data, batch_size=2, transforms=Normalize(mean=3.0, std=2.0))
        >>> next(iter(loader))["x"].tolist()
        [[-1.5, -0.5], [0.5, 1.5]]
    """

    mean: float | Sequence[float]
    """One number, or one per place on `axis`; finite."""
    std: float | Sequence[float]
    """Above 0; one number, or one per place on `axis`."""
    axis: int = -1
    """The axis of channels, counted from the last: -3 for `(C, H, W)`."""
    dtype: str | None = None
    """Name of the float dtype that comes out; None: the dtype that came in, float32 for integers."""
    fields: Sequence[str] | None = None
    """Tensors to change; None: the states of windows, or the only field of records."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong mean, std, axis or dtype."""
        check({"Normalize: mean": (self.mean, one_or_several(finite()))})
        check({"Normalize: std": (self.std, one_or_several(finite(above=0)))})
        check({"axes": ((self.axis,), AXES)})
        _check_fields(self, self.fields)
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ConfigError(
                f"Normalize(dtype={self.dtype!r})", hint=f"Expected {', '.join(sorted(FLOATS))}"
            )

    @staticmethod
    def of(cache: Cache, name: str | None = None, *, dtype: str | None = None) -> Normalize:
        """Return a normalization by the statistics that a cache's index keeps, per channel where it has them.

        Args:
            cache: Whose statistics; give the cache of the train split for the other splits too.
            name: The field; None: the one with time, that windows are cut from, and the states made of it.
            dtype: Name of the float dtype that comes out, as of `Normalize`.

        Raises:
            ConfigError: The cache has no such field, or no finite value in it.

        Examples:
            >>> import stoker, torch
            >>> from stoker.transforms import Normalize
            >>> data = [{"x": torch.tensor([0.0, 2.0])}, {"x": torch.tensor([4.0, 6.0])}]
            >>> Normalize.of(stoker.precompute(data, None, "caches", name="pairs"), "x").mean
            (2.0, 4.0)
        """
        if name is None and not any(one.evolves for one in cache.schema.values()):
            known_fields = [repr(one) for one in cache.statistics]
            raise ConfigError(
                f"Normalize.of: no field of {cache.path} has time, so it is not clear which is meant",
                hint=f"Name it, as Normalize.of(cache, {known_fields[0] if known_fields else 'name'}); there "
                f"are {', '.join(known_fields) or 'none'}",
            )
        field_name = time_field(cache.schema, None) if name is None else name
        known: Mapping[str, Any] = cache.statistics.get(field_name, {})
        found: Mapping[str, Any] = known.get("channels", known)
        means, stds = (_listed(found.get(key)) for key in ("mean", "std"))
        if not means or any(value is None for value in (*means, *stds)):
            raise ConfigError(
                f"{cache.path} has no statistics of a field {field_name!r}",
                hint=f"Expected one of {', '.join(cache.statistics) or 'none'}",
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
                    f"{tuple(values.shape[1:])} and axis={self.axis}",
                    hint="Give one mean and std, or one for each place on that axis",
                )
        mean, scale = (row.view(-1, *[1] * (-1 - self.axis)) for row in rows)
        kept = values.dtype if values.is_floating_point() else torch.float32
        wanted = kept if self.dtype is None else getattr(torch, self.dtype)
        return values.to(torch.float32, copy=True).sub_(mean).mul_(scale).to(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(FieldTransform):
    """Adds Gaussian noise; the states of one window get the same, other fields noise of their own.

    Raises:
        ConfigError: A deviation is negative or not finite; later, a field does not hold floats.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Noise
        >>> loader = stoker.cached([{"x": torch.zeros(3)}] * 4, batch_size=4, transforms=Noise(0.1))
        >>> batch = next(iter(loader))
        >>> batch["x"].shape, bool((batch["x"] != 0).all())
        (torch.Size([4, 3]), True)
    """

    std: float | Sequence[float] = field(kw_only=False)
    """In the unit of the values; one number, or one per place on the last axis."""
    fields: Sequence[str] | None = None
    """Tensors to change; None: the states of windows, or the only field of records. `("z0",)`: the input
    of a step alone."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong deviation."""
        check({"Noise: std": (self.std, one_or_several(finite(least=0)))})
        _check_fields(self, self.fields)

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with noise on it."""
        drawn: dict[str, Tensor] = {}

        def noisy(key: TensorKey, values: Tensor) -> Tensor:
            if not values.is_floating_point():
                raise ConfigError(
                    f"Noise on {key.name!r}, which holds {values.dtype}", hint="Put Normalize(...) before it"
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
                f"Noise has {len(std)} deviations, but examples of shape {tuple(shape)}",
                hint="Give one number, or one per place on the last axis",
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
class Views(FieldTransform):
    """Applies transforms `count` times with other random numbers, for contrastive training.

    What they changed gets an axis of views after that of examples, `(B, count, *shape)`; the rest of the
    batch, labels and `index` among it, stays as it is. Transforms before it in the list are common to all
    views. The functions must not write into the batch they are given.

    Raises:
        ConfigError: `count` is below 1.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Noise, Views
        >>> views = Views(transforms=[Noise(0.1)], count=2)
        >>> loader = stoker.cached([{"x": torch.zeros(3)}] * 4, batch_size=4, transforms=views)
        >>> next(iter(loader))["x"].shape
        torch.Size([4, 2, 3])
    """

    transforms: Sequence[Callable[[Any, Tensor], Any]]
    """What makes a view, applied in order: functions `f(batch, keys)`."""
    count: int = 2
    """Views of each example, at least 1."""

    def __post_init__(self) -> None:
        """Refuse less than one view."""
        check({"Views: count": (self.count, whole(least=1))})
        if not as_transforms(self.transforms):
            raise ConfigError(
                "Views without transforms", hint="Give what makes a view, as transforms=[Noise(0.1)]"
            )

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with `count` views of each example."""
        views = [run(self.transforms, batch, child_keys(keys, place)) for place in range(self.count)]
        before, each = tensors_of(batch), [tensors_of(view) for view in views]
        stacked: dict[TensorKey, Any] = {}
        for key, first in each[0].items():
            if first is not before.get(key):
                stacked[key] = torch.stack([view[key] for view in each], dim=1)
        return with_tensors(batch, stacked)


# ----------------------------------------------------------------------------------------------------------
# Move values: flips, shifts on periodic axes, random crops.
#
# Axes are counted from the last, so that one number means the same axis in `z0`, in `future` and in a
# record with time: `(H, W, C)` has -3, -2, -1. Each example is moved in its own way and all its states
# alike.


Border: TypeAlias = Literal["zeros", "wrap", "reflect"]
"""What is beyond an edge: nothing, the other end, or the mirror image without the edge itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip(FieldTransform):
    """Mirrors examples along one axis, each with probability `p`.

    Raises:
        ConfigError: `axis` is not negative, or `p` is not in 0 to 1; later, `negate` does not fit a field.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Flip
        >>> data = [{"image": torch.tensor([[1, 2, 3]])}] * 2  # (H, W)
        >>> loader = stoker.cached(data, batch_size=2, transforms=Flip(axis=-1, p=1.0))
        >>> next(iter(loader))["image"].tolist()
        [[[3, 2, 1]], [[3, 2, 1]]]
    """

    axis: int = field(default=-2, kw_only=False)
    """The axis, counted from the last, so negative: -2 is the width of `(H, W, C)`."""
    p: float = 0.5
    """Probability, 0 to 1."""
    negate: Sequence[int] = ()
    """Channels (places on the last axis) whose sign changes in the mirror: the velocity along `axis`."""
    fields: Sequence[str] | None = None
    """Tensors to flip; None: the states of windows, or the only field of records with such an axis."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis or probability."""
        check({"axes": ((self.axis,), AXES)})
        check({"Flip: p, a probability,": (self.p, finite(least=0, most=1))})
        for channel in parse_list("Flip: negate", self.negate, "places of channels, as (0,)"):
            check({"Flip: negate": (channel, whole(least=0))})
        _check_fields(self, self.fields)

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with some of its examples mirrored."""
        mirrored = self._mirrored(keys)
        return change(batch, self.fields, -self.axis, lambda _, values: self._flip(values, mirrored))

    def as_cut(self, shapes: Mapping[str, tuple[int, ...]]) -> ImageCut | None:
        """Return this mirror as part of a gather: along the last axis of one field, its sign unchanged."""
        name = only_field(shapes, self.fields, 1)
        if name is None or self.axis != -1 or self.negate or len(shapes[name]) < 2:
            return None
        return ImageCut(field=name, draw=self._mirrored)

    def _mirrored(self, keys: Tensor) -> Tensor:
        return uniform(keys, 1)[:, 0] < self.p

    def _flip(self, values: Tensor, mirrored: Tensor) -> Tensor:
        flipped = values.flip(self.axis)
        if self.negate:
            if not values.is_signed() or max(self.negate) >= values.shape[-1]:
                raise ConfigError(
                    f"Flip(negate={tuple(self.negate)}): values are {values.dtype} with {values.shape[-1]} "
                    "channels",
                    hint="Expected signed ones, and places among the channels",
                )
            sign = torch.ones(values.shape[-1], dtype=values.dtype, device=values.device)
            for channel in self.negate:
                sign[channel] = -1
            flipped *= sign
        return torch.where(mirrored.view(-1, *[1] * (values.dim() - 1)), flipped, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll(FieldTransform):
    """Shifts examples along periodic axes, each by a distance of its own.

    Raises:
        ConfigError: An axis is not negative, or is given twice.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Roll
        >>> loader = stoker.cached([{"u": torch.arange(4)}] * 2, batch_size=2, transforms=Roll(axes=(-1,)))
        >>> shifted = next(iter(loader))["u"]
        >>> shifted.sort(dim=1).values.tolist()  # all values are still there
        [[0, 1, 2, 3], [0, 1, 2, 3]]
    """

    axes: Sequence[int] = field(default=(-2,), kw_only=False)
    """Counted from the last, so negative; any distance along each is as likely as another."""
    fields: Sequence[str] | None = None
    """Tensors to shift; None: the states of windows, or the only field of records with these axes."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis."""
        check({"axes": (self.axes, AXES)})
        _check_fields(self, self.fields)

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with every example shifted."""
        return change(batch, self.fields, -min(self.axes), lambda _, values: self._roll(values, keys))

    def _roll(self, values: Tensor, keys: Tensor) -> Tensor:
        sizes = [values.shape[axis] for axis in self.axes]
        starts: list[Tensor] = []
        for number, (axis, size) in enumerate(zip(self.axes, sizes, strict=True)):
            starts.append(integers(child_keys(keys, number), 1, size)[:, 0])
            values = torch.cat((values, values.narrow(axis, 0, size - 1)), axis)
        return windows(values, self.axes, sizes, starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop(FieldTransform):
    """Cuts a random piece out of every example, from beyond its edges too if `padding` is given.

    Raises:
        ConfigError: `size`, `axes`, `padding` or `border` is not as described; later, a piece does not fit.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Crop
        >>> data = [{"image": torch.rand(3, 8, 8)}] * 4  # (C, H, W)
        >>> loader = stoker.cached(data, batch_size=4, transforms=Crop(6, axes=(-2, -1), padding=1))
        >>> next(iter(loader))["image"].shape
        torch.Size([4, 3, 6, 6])
    """

    size: int | Sequence[int] = field(kw_only=False)
    """Points of the piece along each of `axes`; one number stands for all."""
    axes: Sequence[int] = (-3, -2)
    """Counted from the last, so negative; height and width of `(H, W, C)`."""
    padding: int = 0
    """Points beyond each edge that a piece may reach."""
    border: Border = "zeros"
    """What is there: `zeros`, `wrap` (periodic axes) or `reflect`."""
    fields: Sequence[str] | None = None
    """Tensors to cut; None: the states of windows, or the only field of records with these axes."""

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        check({"axes": (self.axes, AXES)})
        if self.border not in get_args(Border):
            raise ConfigError(f"Crop(border={self.border!r})", hint=f"Expected {', '.join(get_args(Border))}")
        _check_fields(self, self.fields)
        check({"Crop: padding, at each edge,": (self.padding, whole())})
        for size in (
            (self.size,) if isinstance(self.size, int) else parse_list("Crop: size", self.size, "numbers")
        ):
            check({"Crop: size": (size, whole())})
        if min(self._sizes) < 1 or self.padding < 0 or len(self._sizes) != len(self.axes):
            raise ConfigError(
                f"Crop(size={self.size!r}, axes={tuple(self.axes)}, padding={self.padding})",
                hint="Expected a size of at least 1 for each axis, and a padding of at least 0",
            )

    @property
    def _sizes(self) -> Sequence[int]:
        return [self.size] * len(self.axes) if isinstance(self.size, int) else self.size

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with every example cut to size."""
        return change(batch, self.fields, -min(self.axes), lambda _, values: self._crop(values, keys))

    def as_cut(self, shapes: Mapping[str, tuple[int, ...]]) -> ImageCut | None:
        """Return this crop as part of a gather: of the last two axes of one field, within its edges."""
        name = only_field(shapes, self.fields, -min(self.axes))
        if name is None or tuple(self.axes) != (-2, -1) or self.padding:
            return None
        room = [size - kept for size, kept in zip(shapes[name][-2:], self._sizes, strict=True)]
        if min(room) < 0:
            return None
        height, width = self._sizes
        draw = partial(_begins, [size + 1 for size in room])
        return ImageCut(field=name, draw=draw, crop=(height, width))

    def _crop(self, values: Tensor, keys: Tensor) -> Tensor:
        starts: list[Tensor] = []
        for number, (axis, size) in enumerate(zip(self.axes, self._sizes, strict=True)):
            room = values.shape[axis] + 2 * self.padding - size
            # A mirror image lacks the edge itself, so it is one point shorter than the other borders.
            if room < 0 or self.padding > values.shape[axis] - (self.border == "reflect"):
                raise ConfigError(
                    f"Crop(size={self.size!r}, padding={self.padding}, border={self.border!r}): axis {axis} "
                    f"has {values.shape[axis]} points",
                    hint="Choose a smaller size= or padding=",
                )
            starts.append(integers(child_keys(keys, number), 1, room + 1)[:, 0])
            values = padded(values, axis, self.padding, self.border)
        return windows(values, self.axes, self._sizes, starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Take(FieldTransform):
    """Cuts the same piece of every example, or takes every k-th point.

    Raises:
        ConfigError: An axis is not negative, or a step is below 1; later, nothing is left of an example.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import Take
        >>> data = [{"u": torch.arange(8)}] * 2
        >>> loader = stoker.cached(data, batch_size=2, transforms=Take({-1: slice(0, 8, 4)}))
        >>> next(iter(loader))["u"].tolist()
        [[0, 4], [0, 4]]
    """

    slices: Mapping[int, slice] = field(kw_only=False)
    """The piece by axis, counted from the last, so negative: `{-2: slice(0, 64, 4)}`."""
    fields: Sequence[str] | None = None
    """Tensors to cut; None: the states of windows, or the only field of records with these axes."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis or a step below 1."""
        given = cast("object", self.slices)
        ends = [
            end
            for one in (given.values() if isinstance(given, Mapping) else (None,))
            for end in ((one.start, one.stop, one.step) if isinstance(one, slice) else ("none",))
        ]
        if not all(end is None or (isinstance(end, int) and not isinstance(end, bool)) for end in ends):
            raise ConfigError(
                f"Take: slices is {given!r}", hint="Expected a slice by axis, as {-2: slice(0, 64, 4)}"
            )
        check({"axes": (tuple(self.slices), AXES)})
        _check_fields(self, self.fields)
        if any(one.step is not None and one.step < 1 for one in self.slices.values()):
            raise ConfigError(f"Take({dict(self.slices)}): steps must be at least 1", hint="Mirror with Flip")

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """Return the batch with every example cut in the same way."""
        return change(batch, self.fields, -min(self.slices), lambda _, values: self._take(values))

    def _take(self, values: Tensor) -> Tensor:
        places = [slice(None)] * values.dim()
        for axis, one in self.slices.items():
            places[axis] = one
        found = values[tuple(places)]
        if not found.numel():
            raise ConfigError(
                f"Take({dict(self.slices)}) leaves nothing of examples of shape {tuple(values.shape[1:])}"
            )
        return found.contiguous()


def _begins(below: Sequence[int], keys: Tensor) -> Tensor:
    """Return where crops begin along each axis, `(n, axes)`; the numbers that `Crop` draws."""
    drawn = [integers(child_keys(keys, number), 1, count) for number, count in enumerate(below)]
    return torch.cat(drawn, dim=1)


def windows(values: Tensor, axes: Sequence[int], sizes: Sequence[int], starts: Sequence[Tensor]) -> Tensor:
    """Return from every example the piece of `sizes` along `axes` that begins at its own `starts`, copied.

    In a view with an axis for the start, this is one indexing operation. It copies entire pieces, without an
    index per element, and the host never reads `starts`.

    Args:
        values: `(B, ...)`.
        starts: One `(B,)` int64 for each axis.
    """
    values = values.contiguous()
    shape, strides = list(values.shape), values.stride()
    begins = [shape[axis] - size + 1 for axis, size in zip(axes, sizes, strict=True)]
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    steps = [strides[axis] for axis in axes]
    view = values.as_strided((shape[0], *begins, *shape[1:]), (strides[0], *steps, *strides[1:]))
    return view[(torch.arange(shape[0], device=values.device), *starts)]


def padded(values: Tensor, axis: int, padding: int, border: Border) -> Tensor:
    """`values` with `padding` points more at both ends of an axis."""
    if not padding:
        return values
    size = values.shape[axis]
    first, last = values.narrow(axis, 0, padding), values.narrow(axis, size - padding, padding)
    if border == "zeros":
        before = after = torch.zeros_like(first)
    elif border == "wrap":
        before, after = last, first
    else:
        before = values.narrow(axis, 1, padding).flip(axis)
        after = values.narrow(axis, size - 1 - padding, padding).flip(axis)
    return torch.cat((before, values, after), axis)


# ----------------------------------------------------------------------------------------------------------
# Turn stored images into images of one size: decode encoded ones, crop those of one short side.


TIMEOUT_S = 120.0
"""For all images of one batch."""


class Decode(FieldTransform):
    """Decodes images that `ImageSource(store="encoded")` stored as files to `(B, C, H, W)` uint8, in threads.

    With the settings of the source the images are those that it would have stored as pixels, and its labels
    fit them.

    Args:
        size: (height, width) in pixels.
        field: The field with the encoded images.
        threads: Threads that decode; None: one for each processor of this process.
        **rules: `fit`, `color`, `filter`, `reduced` and `turned`, as of `ImageSource`.

    Raises:
        ConfigError: `fit="short"`, which gives images of various sizes.
        DecodeError: Later, bytes that are not an image.
        StalledError: Later, the images of a batch take longer than two minutes.

    Examples:
        >>> import stoker
        >>> from stoker.transforms import Decode
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Path("photos").mkdir()
        >>> for number in range(4):
        ...     Image.new("RGB", (64, 48), (number, 0, 0)).save(f"photos/{number}.png")
        >>> source = stoker.ImageSource("photos", size=(32, 32), store="encoded")
        >>> loader = stoker.cached(source, batch_size=4, transforms=Decode((32, 32)))
        >>> next(iter(loader))["image"].shape
        torch.Size([4, 3, 32, 32])
    """

    def __init__(
        self, size: tuple[int, int], *, field: str = "image", threads: int | None = None, **rules: Any
    ) -> None:
        check({"Decode: size": (size, IMAGE_SIZE)})
        if threads is not None:
            check({"Decode: threads": (threads, whole(least=1))})
        self._rules = Rules(size=size, **rules)
        if self._rules.fit == "short":
            raise ConfigError(
                "Decode(fit='short') gives images of various sizes", hint="Give stretch or letterbox"
            )
        self._field = field
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool: Pool | None = None

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with its images decoded, on the device that it is on.

        Raises:
            DecodeError: Bytes that are no image; what precompute stored has been decoded once.
        """
        encoded = _on_host(_images_of(batch, self._field, 1))
        if self._pool is None:
            self._pool = Pool(self._threads, "stoker-decode")
        tickets = [
            self._pool.submit(lambda own=encoded[part :: self._threads]: [self._one(x) for x in own])
            for part in range(min(self._threads, len(encoded)))
        ]
        images = torch.empty(
            (len(encoded), self._rules.channels, *self._rules.size), dtype=torch.uint8, device="cpu"
        )
        for part, ticket in enumerate(tickets):
            for place, pixels in enumerate(ticket.result(TIMEOUT_S, "decoding the images of a batch")):
                images[part + place * self._threads] = torch.from_numpy(pixels)
        made = RecordBatch(batch)
        made[self._field] = to_device(images, keys.device)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; threads stay."""
        return {**self.__dict__, "_pool": None}

    def _one(self, encoded: Tensor) -> np.ndarray:  # pyright: ignore[reportMissingTypeArgument]
        from stoker.sources.image_decoding import decode

        return decode(encoded.numpy().tobytes(), self._rules, where="a stored image")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CropImages(FieldTransform):
    """Crops images that `ImageSource(size=256, fit="short")` stored to `(B, C, H, W)` uint8.

    Boxes, keypoints, joints and cameras move along; boxes are cut at the crop, and those outside it
    are no longer valid.

    Raises:
        ConfigError: Later, `size` is larger than an image, or the batch has no such images.

    Examples:
        >>> import stoker
        >>> from stoker.transforms import CropImages
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Path("photos").mkdir()
        >>> for number in range(4):
        ...     Image.new("RGB", (64 + number, 48)).save(f"photos/{number}.png")
        >>> source = stoker.ImageSource("photos", size=32, fit="short")
        >>> loader = stoker.cached(source, batch_size=4, transforms=CropImages((24, 24)))
        >>> next(iter(loader))["image"].shape
        torch.Size([4, 3, 24, 24])
    """

    size: tuple[int, int] = field(kw_only=False)
    """(height, width) in pixels, no more than the short side."""
    random: bool = True
    """True: each example at a place of its own, any as likely as another. False: in the middle."""

    def __post_init__(self) -> None:
        """Refuse what is not a size."""
        check({"CropImages: size": (self.size, IMAGE_SIZE)})
        check({"CropImages: random": (self.random, FLAG)})

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with its images cropped."""
        images = _images_of(batch, "image", 2)
        shapes = batch["image_shape"].to(torch.int64)
        room = shapes - to_device(torch.tensor(self.size, device="cpu"), shapes.device)
        place = (
            uniform(keys, 2).to(torch.float64)
            if self.random
            else torch.full(room.shape, 0.5, dtype=torch.float64, device=room.device)
        )
        corners = (place.to(room.device) * (room + 1)).floor().to(torch.int64).minimum(room)
        (height, width), crops = self.size, list[Tensor]()
        numbers: list[list[int]] = torch.cat([shapes, corners], 1).tolist()  # waits for the device, once
        for image, (high, wide, top, left) in zip(images, numbers, strict=True):
            if high < height or wide < width:
                raise ConfigError(
                    f"CropImages({self.size}) is larger than an image of {high} x {wide}",
                    hint="Crop less, or store a longer short side",
                )
            whole = image.view(high, wide, image.shape[1])
            crops.append(whole[top : top + height, left : left + width].permute(2, 0, 1))
        made = RecordBatch(batch)
        made["image"] = torch.stack(crops)
        made["image_shape"] = shapes - room
        self._move_labels(made, corners)
        return made

    def _move_labels(self, batch: RecordBatch, corners: Tensor) -> None:
        """Boxes, points and cameras of the crops, in place of those of the whole images."""
        height, width = self.size
        shift = corners.flip(1).to(torch.float32)  # x, y
        if "boxes" in batch:
            edges = torch.tensor((width, height, width, height), device="cpu")
            limit = to_device(edges, shift.device)
            shifted = _shifted(batch["boxes"], shift.repeat(1, 2))
            moved = _like(shifted, [boxes.clamp(min=0).minimum(limit) for boxes in _rows(shifted)])
            keep = [(b[..., 2] > b[..., 0]) & (b[..., 3] > b[..., 1]) for b in _rows(moved)]
            batch["boxes"] = moved
            batch["boxes_valid"] = _like(
                moved, [v & k for v, k in zip(_rows(batch["boxes_valid"]), keep, strict=True)]
            )
        for name in ("keypoints", "hand_joints_2d"):
            if name in batch:
                batch[name] = _shifted(batch[name], shift)
        if "camera_intrinsics" in batch:
            cameras = batch["camera_intrinsics"].clone()
            cameras[:, :2, 2] -= shift
            batch["camera_intrinsics"] = cameras


def _on_host(images: list[Tensor]) -> Sequence[Tensor]:
    """Return the same in host memory, in one copy, made where the caller's stream is the current one."""
    if images[0].device.type == "cpu":
        return images
    whole: Any = torch.cat(images).cpu()
    return whole.split([len(image) for image in images])


def _images_of(batch: Any, name: str, axes: int) -> list[Tensor]:
    """Return the images of a batch, one tensor each.

    Raises:
        ConfigError: They are not as `ImageSource` stored them.
    """
    fields = cast("dict[str, Any]", batch) if isinstance(batch, dict) else {}
    if _are_images(fields.get(name), axes):
        return cast("list[Tensor]", fields[name])
    others = [other for other, values in fields.items() if _are_images(values, axes)]
    fact = (
        f"field {name!r} holds {_described(fields[name])}, not stored images"
        if name in fields
        else f"a batch has no field {name!r}; it has {', '.join(fields) or 'none'}"
    )
    if axes == 1 and others:
        hint = f"Give the field: Decode(size, field={others[0]!r})"
    elif f"{name}.offsets" in fields:
        hint = "Leave ragged='pack' out of the Loader, so that each image is a tensor of its own"
    elif axes == 1 and isinstance(fields.get(name), Tensor) and fields[name].dim() == 4:
        hint = "They are pixels already: leave Decode out"
    elif axes == 1:
        hint = (
            "Decode takes the bytes of image files: cache them with ImageSource(..., store='encoded'), or a "
            "TarSource with jpg or png members and Decode(size, field='jpg')"
        )
    else:
        hint = "CropImages takes the images of a cache of ImageSource(..., fit='short')"
    raise ConfigError(fact, hint=hint)


def _are_images(values: Any, axes: int) -> bool:
    found = cast("list[Any]", values) if isinstance(values, list) else []
    return bool(found) and all(
        isinstance(value, Tensor) and value.dim() == axes and value.dtype == torch.uint8 for value in found
    )


def _described(values: Any) -> str:
    """Return dtype and shape of a field of a batch."""
    if isinstance(values, list):
        found = cast("list[Any]", values)
        return f"a list of {_described(found[0])}" if found else "nothing"
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
    return type(values).__name__


def _rows(values: Any) -> Sequence[Tensor]:
    return cast("Sequence[Tensor]", values if isinstance(values, list) else list(values))


def _like(values: Any, rows: list[Tensor]) -> Any:
    return rows if isinstance(values, list) else torch.stack(rows)


def _shifted(values: Any, by: Tensor) -> Any:
    """Return every example less its row of `by`, padded or ragged."""
    return _like(values, [row - own for row, own in zip(_rows(values), by, strict=True)])
