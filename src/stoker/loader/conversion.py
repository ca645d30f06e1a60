"""Describe what a gather does to values on their way into a batch: normalise and cast, crop and flip.

One rule holds on every device and tier. A stored value becomes float32 and is multiplied by a float32 scale.
The product, rounded, is added to a float32 shift. That sum, rounded, is cast to the batch's dtype, to the
nearest. No step is contracted into another (a fused multiply-add rounds once where this rounds twice), so a
processor, a GPU and a kernel of any make give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from stoker.errors import ConfigError
from stoker.schema import FLOATS, Field, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise:
    """Normalization of a field while it is served: `(value / divisor - mean) / std`, in float32."""

    mean: float | Sequence[float]
    """One for all values, or one per channel."""
    std: float | Sequence[float]
    """Likewise; none is 0."""
    axis: int = -3
    """The channels' axis of an example, counted from its end: -3 for images `(C, H, W)`, -1 for tokens."""
    divisor: float = 1.0
    """What values are divided by first: 255 for bytes with means that belong to 0..1."""

    def __post_init__(self) -> None:
        """Refuse numbers that no field can be normalised with."""
        object.__setattr__(self, "mean", _numbers("mean", self.mean))
        object.__setattr__(self, "std", _numbers("std", self.std))
        means, stds = self.channels
        if len(means) != len(stds):
            raise ConfigError(f"normalise: {len(means)} means and {len(stds)} deviations. Give one each")
        if 0.0 in stds or not self.divisor or not math.isfinite(self.divisor):
            raise ConfigError(
                f"normalise: std {self.std} and divisor {self.divisor} divide, so none may be 0"
            )
        if self.axis >= 0:
            raise ConfigError(
                f"normalise: axis {self.axis} counts from the front, where steps and batches come and go. "
                "Count from the end: -3 for images (C, H, W), -1 for tokens"
            )

    @property
    def channels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and deviations, of equal length."""
        means, stds = cast("Sequence[float]", self.mean), cast("Sequence[float]", self.std)
        most = max(len(means), len(stds))
        full = [tuple(values) * most if len(values) == 1 else tuple(values) for values in (means, stds)]
        return full[0], full[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Steps from one output's stored values to served ones, in the order of the fields."""

    dtype: torch.dtype
    """What is handed out."""
    crop: tuple[int, int] | None = None
    """Rows and columns kept of an image's last two axes; where they begin differs by example."""
    flip: bool = False
    """Columns may be mirrored; each batch comes with which of its examples are."""
    scale: tuple[float, ...] = ()
    """Factor per channel, float32; empty: values are only cast."""
    shift: tuple[float, ...] = ()
    """What is added then, per channel, float32."""
    inner: int = 1
    """Consecutive stored values of one channel: value `i` of an example has channel
    `i // inner % len(scale)`."""


def find_conversion(field: Field, normalise: Normalise | None, dtype: str | None) -> Conversion | None:
    """Return what serving `field` takes in addition to copying; None: nothing.

    Args:
        normalise: How to; values that are not floats are then handed out as float32.
        dtype: Handed out instead of the stored one, for floats.

    Raises:
        ConfigError: The field has no such axis, or another number of channels.
    """
    if normalise is None:
        if dtype is None or dtype == field.dtype or not field.floating:
            return None
        return Conversion(dtype=getattr(torch, dtype))
    means, stds = normalise.channels
    inner = 1
    if len(means) > 1:
        inner = _inner(field, normalise.axis, len(means))
    factors = [1.0 / (normalise.divisor * std) for std in stds]
    return Conversion(
        dtype=getattr(torch, dtype or (field.dtype if field.dtype in FLOATS else "float32")),
        scale=_float32(factors),
        shift=_float32([-mean / std for mean, std in zip(means, stds, strict=True)]),
        inner=inner,
    )


def check_normalise(normalise: object, schema: Schema) -> Mapping[str, Normalise]:
    """`normalise=` of a loader, checked against the fields that there are.

    Raises:
        ConfigError: It is no mapping of fields to `Normalise`, or names a field that no record has.
    """
    if normalise is None:
        return {}
    given = cast("Mapping[object, object]", normalise) if isinstance(normalise, Mapping) else {None: None}
    if not all(isinstance(value, Normalise) for value in given.values()):
        raise ConfigError(
            f"normalise is {normalise!r}. Expected fields and how to: "
            '{"image": stoker.loader.Normalise(mean=..., std=...)}'
        )
    unknown = [name for name in given if name not in schema]
    if unknown:
        raise ConfigError(f"normalise names {unknown}, but records have {', '.join(schema)}")
    return cast("Mapping[str, Normalise]", normalise)


def _inner(field: Field, axis: int, channels: int) -> int:
    step = field.step_shape
    if -axis > len(step) or step[axis] != channels:
        raise ConfigError(
            f"normalise: {channels} means for axis {axis} of a field whose "
            f"{'steps' if field.time or field.ragged else 'records'} are {step}. "
            "Give one mean per channel, and axis= from the end"
        )
    return math.prod(step[axis + 1 :]) if axis < -1 else 1


def _numbers(name: str, given: object) -> tuple[float, ...]:
    try:
        flat: list[float] = np.asarray(given, dtype=np.float64).reshape(-1).tolist()
    except (TypeError, ValueError):
        flat = []
    if not flat or not all(math.isfinite(value) for value in flat):
        raise ConfigError(f"normalise: {name} is {given!r}. Expected a number, or one per channel")
    return tuple(flat)


def _float32(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).tolist())
