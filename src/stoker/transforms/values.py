"""Transforms that change values and leave them where they are: normalization, Gaussian noise."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.keyed import child_keys, normal
from stoker.loader.outputs import Role
from stoker.loader.windows import time_field
from stoker.schema import FLOATS
from stoker.transforms.fields import TensorKey, change

if TYPE_CHECKING:
    from stoker.store import Cache


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
        """Refuse what cannot be divided by, and what is no dtype."""
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
        """The batch, normalized."""
        return change(batch, self.fields, 0, self._normalized)

    def _normalized(self, key: TensorKey, values: Tensor) -> Tensor:
        inverse = tuple(1.0 / value for value in _listed(self.std))
        rows = [_row(numbers, values.device) for numbers in (_listed(self.mean), inverse)]
        for row in rows:
            if len(row) > 1 and (values.dim() <= -self.axis or values.shape[self.axis] != len(row)):
                raise ConfigError(
                    f"Normalize has {len(row)} channels, but {key.name!r} has examples of shape "
                    f"{tuple(values.shape[1:])} and axis={self.axis}. Give one mean and std, or as many as "
                    "that axis has places"
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
        """Refuse what is no deviation."""
        if not all(math.isfinite(value) and value >= 0 for value in _listed(self.std)) or self.std == ():
            raise ConfigError(f"Noise(std={self.std!r}). Expected finite numbers of at least 0")

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """The batch with noise on it."""
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
    """Numbers as float32 on a device, kept: a copy to a GPU would wait at every batch."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device)
