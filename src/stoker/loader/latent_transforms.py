"""Transforms for latent diffusion: draw a latent from stored moments, and drop conditions for stored nulls.

They are public as `stoker.transforms.DrawLatent` and `stoker.transforms.DropCondition`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, to_device
from stoker.loader.order import normal, uniform
from stoker.loader.transform import FieldTransform


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLatent(FieldTransform):
    """Draws a latent from the mean and deviation that an autoencoder gave: another one in each epoch.

    The latent is `(mean + std * noise - shift) * scale`, in float32. The moments leave the batch.

    Raises:
        ConfigError: Not exactly one of `std`, `logvar` and `moments` is named; later, a field is missing, or
            its shape is another.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import DrawLatent
        >>> data = [{"mean": torch.zeros(4, 8, 8), "std": torch.ones(4, 8, 8)}] * 6
        >>> loader = stoker.cached(data, batch_size=6, transforms=[DrawLatent(scale=0.18215)])
        >>> batch = next(iter(loader))
        >>> batch["latent"].shape, "mean" in batch, bool(abs(batch["latent"].std() - 0.18215) < 0.02)
        (torch.Size([6, 4, 8, 8]), False, True)
    """

    mean: str = "mean"
    """Field of the means, `(B, *shape)`."""
    std: str | None = None
    """Field of the deviations. `"std"` if none of the three is named."""
    logvar: str | None = None
    """Field of the logarithms of the variances in place of deviations; held to -30 .. 20, as in diffusers."""
    moments: str | None = None
    """Field `(B, 2C, ...)` of the means, then the logarithms of the variances, in place of both."""
    name: str = "latent"
    """Field that the latent is given under."""
    scale: float = 1.0
    """The model's scaling factor."""
    shift: float = 0.0
    """The model's shift factor, subtracted before."""
    random: bool = True
    """False: the mean itself, for validation."""
    dtype: str | None = None
    """Of the latent, as `"bfloat16"`; None: float32."""

    def __post_init__(self) -> None:
        """Refuse no, or several, fields of deviations."""
        named = [name for name in ("std", "logvar", "moments") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ConfigError(f"DrawLatent is given {' and '.join(named)}", hint="Name one of them")
        if not named:
            object.__setattr__(self, "std", "std")

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with the latent in place of the moments."""
        mean, std, used = self._moments(batch)
        latent = mean.to(torch.float32)
        if self.random:
            noise = normal(keys, latent[0].numel()).view(latent.shape)
            latent = torch.addcmul(latent, std.to(torch.float32), noise)
        latent = (latent - self.shift) * self.scale
        if self.dtype is not None:
            latent = latent.to(getattr(torch, self.dtype))
        made = RecordBatch({name: value for name, value in batch.items() if name not in used})
        made[self.name] = latent
        made.position = batch.position
        return made

    def _moments(self, batch: Any) -> tuple[Tensor, Tensor, set[str]]:
        """Return means, deviations, and the fields that they are from."""
        if self.moments is not None:
            mean, logvar = _field(self, batch, self.moments).to(torch.float32).chunk(2, dim=1)
            return mean, _std(logvar), {self.moments}
        mean = _field(self, batch, self.mean)
        name = cast("str", self.std or self.logvar)
        spread = _field(self, batch, name)
        if spread.shape != mean.shape:
            raise ConfigError(
                f"DrawLatent: {self.mean!r} has shape {tuple(mean.shape)} and {name!r} {tuple(spread.shape)}"
            )
        return mean, spread if self.logvar is None else _std(spread.to(torch.float32)), {self.mean, name}


def _std(logvar: Tensor) -> Tensor:
    return logvar.clamp(-30.0, 20.0).mul(0.5).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCondition(FieldTransform):
    """Replaces conditions of some examples by a stored null, for classifier-free guidance.

    All named fields of an example are replaced together, or none. Lists of tensors of varying length too: the
    null then has a length of its own.

    Raises:
        ConfigError: `p` is no probability, or no field is named; later, a field is missing, or a null does
            not fit it.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import DropCondition
        >>> data = [{"text": torch.ones(4), "mask": torch.ones(4)} for _ in range(1000)]
        >>> drop = DropCondition(["text", "mask"], p=0.1, null={"text": torch.zeros(4), "mask": 0})
        >>> batch = next(iter(stoker.cached(data, batch_size=1000, transforms=[drop])))
        >>> bool((batch["text"] == batch["mask"]).all()), 60 < (batch["text"][:, 0] == 0).sum().item() < 140
        (True, True)
    """

    fields: str | Sequence[str] = field(kw_only=False)
    """Fields of records."""
    p: float = 0.1
    """Probability that those of an example are replaced, 0 to 1."""
    null: Any = 0
    """What they become: a tensor or number for all, or by field, as the record of the empty text,
    `cache.get("")`. A field that it does not name becomes 0."""

    def __post_init__(self) -> None:
        """Refuse an empty list of fields, and a probability outside 0 to 1."""
        object.__setattr__(
            self, "fields", (self.fields,) if isinstance(self.fields, str) else (*self.fields,)
        )
        if not 0 <= self.p <= 1:
            raise ConfigError(f"DropCondition(p={self.p})", hint="Expected a probability, 0 to 1")
        if not self.fields:
            raise ConfigError("DropCondition names no field", hint='Name those to drop, as ["text"]')

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with the fields of some examples replaced."""
        dropped = uniform(keys, 1)[:, 0] < self.p
        made = RecordBatch(batch)
        made.position = batch.position
        for name in self.fields:
            made[name] = self._replaced(name, _any_field(self, batch, name), dropped)
        return made

    def _replaced(self, name: str, values: Any, dropped: Tensor) -> Any:
        given = self.null
        if isinstance(given, Mapping):
            given = cast("Mapping[str, Any]", given).get(name, 0)
        if isinstance(values, list):
            tensors = cast("list[Tensor]", values)
            null = _null(name, given, tensors[0]) if isinstance(given, Tensor) else None
            return [
                one if not gone else torch.zeros_like(one).add_(given) if null is None else null
                for one, gone in zip(tensors, dropped.tolist(), strict=True)
            ]
        null = _null(name, given, values)
        if null.ndim and null.shape != values.shape[1:]:
            raise ConfigError(
                f"DropCondition: {name!r} has examples of {tuple(values.shape[1:])}, and its null has the "
                f"shape {tuple(null.shape)}",
                hint="Encode the null as the examples were encoded",
            )
        return torch.where(dropped.view(-1, *[1] * (values.ndim - 1)), null, values)


def _null(name: str, given: Any, like: Tensor) -> Tensor:
    """Return the null of a field, on its device and in its dtype."""
    null = torch.as_tensor(given)
    exact = null.to(like.dtype)
    if not (like.dtype.is_floating_point or torch.equal(exact.to(null.dtype), null)):
        raise ConfigError(f"DropCondition: {name!r} is {like.dtype}, which cannot hold its null {given!r}")
    return to_device(exact, like.device)


def _field(transform: object, batch: Any, name: str) -> Tensor:
    values = _any_field(transform, batch, name)
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"{type(transform).__name__}: field {name!r} has another length in every record",
            hint="Give ragged='pad', or batch_by='shape'",
        )
    return values


def _any_field(transform: object, batch: Any, name: str) -> Any:
    fields = cast("Mapping[str, Any]", batch) if isinstance(batch, Mapping) else {}
    if name not in fields:
        known = ", ".join(one for one in fields if one != "index")
        raise ConfigError(
            f"{type(transform).__name__} names the field {name!r}",
            hint=f"The batch has {known or 'no fields by name'}",
        )
    return fields[name]
