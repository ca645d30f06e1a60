"""Move values: flips, shifts on periodic axes, random crops.

Axes are counted from the last, so that one number means the same axis in `z0`, in `future` and in a record
with time: `(H, W, C)` has -3, -2, -1. Each example is moved in its own way and all its states alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.order import child_keys, integers, uniform
from stoker.loader.transform import ImageCut
from stoker.transforms.values import change, only_field

Border: TypeAlias = Literal["zeros", "wrap", "reflect"]
"""What is beyond an edge: nothing, the other end, or the mirror image without the edge itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Mirrors examples along one axis, each with probability `p`."""

    axis: int = field(default=-2, kw_only=False)
    """Counted from the last, so negative."""
    p: float = 0.5
    """Probability, 0..1."""
    negate: Sequence[int] = ()
    """Channels (places on the last axis) whose sign changes in the mirror: the velocity along `axis`."""
    fields: Sequence[str] | None = None
    """Tensors to flip; None: the states of windows, or the only field of records with such an axis."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis or probability."""
        check_axes((self.axis,))
        if not 0 <= self.p <= 1:
            raise ConfigError(f"Flip(p={self.p!r}): a probability is needed, 0..1")

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
                    f"Flip(negate={tuple(self.negate)}): values are {values.dtype} with "
                    f"{values.shape[-1]} channels. Expected signed ones, and places among the channels"
                )
            sign = torch.ones(values.shape[-1], dtype=values.dtype, device=values.device)
            for channel in self.negate:
                sign[channel] = -1
            flipped *= sign
        return torch.where(mirrored.view(-1, *[1] * (values.dim() - 1)), flipped, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """Shifts examples along periodic axes, each by a distance of its own."""

    axes: Sequence[int] = field(default=(-2,), kw_only=False)
    """Counted from the last, so negative; any distance along each is as likely as another."""
    fields: Sequence[str] | None = None
    """Tensors to shift; None: the states of windows, or the only field of records with these axes."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis."""
        check_axes(self.axes)

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
class Crop:
    """Cuts a random piece out of every example, from beyond its edges too if `padding` is given."""

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
        check_axes(self.axes)
        if self.border not in get_args(Border):
            raise ConfigError(f"Crop(border={self.border!r}). Expected {', '.join(get_args(Border))}")
        if min(self._sizes) < 1 or self.padding < 0 or len(self._sizes) != len(self.axes):
            raise ConfigError(
                f"Crop(size={self.size!r}, axes={tuple(self.axes)}, padding={self.padding}). Expected a size "
                "of at least 1 for each axis, and a padding of at least 0"
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
                    f"has {values.shape[axis]} points. Choose a smaller size= or padding="
                )
            starts.append(integers(child_keys(keys, number), 1, room + 1)[:, 0])
            values = padded(values, axis, self.padding, self.border)
        return windows(values, self.axes, self._sizes, starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The same piece of every example, or every k-th point: `Take({-2: slice(0, 64, 4)})`."""

    slices: Mapping[int, slice] = field(kw_only=False)
    """By axis, counted from the last, so negative."""
    fields: Sequence[str] | None = None
    """Tensors to cut; None: the states of windows, or the only field of records with these axes."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong axis or a step below 1."""
        check_axes(tuple(self.slices))
        if any((one.step or 1) < 1 for one in self.slices.values()):
            raise ConfigError(f"Take({dict(self.slices)}): steps must be at least 1. Mirror with Flip")

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


def check_axes(axes: Sequence[int]) -> None:
    """Refuse axes that are not counted from the last, or come twice.

    Raises:
        ConfigError: As said.
    """
    if isinstance(axes, int):
        raise ConfigError(f"axes are {axes}. Expected a list, as ({axes},)")
    if not axes or any(axis >= 0 for axis in axes) or len(set(axes)) != len(axes):
        raise ConfigError(
            f"axes are {tuple(axes)}. Expected different negative numbers, counted from the last: "
            "-3 and -2 are height and width of (H, W, C)"
        )
