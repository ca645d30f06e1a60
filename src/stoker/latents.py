"""Transforms for generative training: draw latents from stored moments, drop conditions.

Public names of `stoker.transforms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from stoker.arguments import FLAG, NUMBER, check, finite, one_or_several, whole
from stoker.errors import ConfigError, arg
from stoker.loader.assembly import MASK, OFFSETS, PACKED, pack
from stoker.loader.batch import RecordBatch
from stoker.loader.choose import START
from stoker.loader.order import normal, uniform
from stoker.loader.transform import FieldTransform
from stoker.schema import FLOATS, LENGTHS_SUFFIX, SHAPE_SUFFIX
from stoker.sources.arguments import parse_names

LOGVAR_RANGE = (-30.0, 20.0)
"""Logarithms of variances are clamped to these, as in diffusers: the exponential of more overflows."""
_SUFFIXES = (LENGTHS_SUFFIX, MASK, OFFSETS, SHAPE_SUFFIX, START)
"""End the names of what a batch says about a field that is padded, packed or chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLatent(FieldTransform):
    """Draws a latent from stored moments, another one in each epoch: `(mean + std * noise - shift) * scale`.

    An autoencoder gives a mean and a deviation for each value. With both in the cache no epoch sees the same
    latent twice. The fields of moments leave the batch. All is computed in float32. The noise follows from
    seed, epoch and example, and is equal on one kind of device; between a CPU and a GPU its last bits differ.
    It is the same for lists, padded and packed records; padding stays as it is.

    Raises:
        ConfigError: More than one of `std`, `logvar` and `moments` is named, `dtype` is not a float, or
            numbers are not finite; later, a field is not there or its channels do not fit.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import DrawLatent
        >>> data = [{"moments": torch.zeros(8, 2, 2)}] * 4  # means and log-variances of 4 channels
        >>> cache = stoker.precompute(data, None, "caches", name="moments")
        >>> draw = DrawLatent(moments="moments", scale=0.18215)
        >>> batch = next(iter(stoker.Loader(cache, batch_size=4, transforms=draw)))
        >>> sorted(batch), batch["latent"].shape
        (['index', 'latent'], torch.Size([4, 4, 2, 2]))
    """

    mean: str = "mean"
    """Field of means."""
    std: str | None = None
    """Field of deviations; None: `std`, unless `logvar` or `moments` is given."""
    logvar: str | None = None
    """Field of logarithms of variances, in place of `std`."""
    moments: str | None = None
    """One field with means and then logarithms of variances along `axis`, in place of `mean` and `std`."""
    name: str = "latent"
    """Field of the batch that the latent becomes."""
    scale: float | Sequence[float] = 1.0
    """Factor at the end (`scaling_factor` of an autoencoder); one number, or one per channel."""
    shift: float | Sequence[float] = 0.0
    """What is subtracted before (`shift_factor`); one number, or one per channel."""
    axis: int = -3
    """The axis of channels, counted from the last: -3 for `(C, H, W)`, -2 for `(C, T)`."""
    random: bool = True
    """False: the mean itself, for validation."""
    dtype: str | None = None
    """Name of the float dtype of the latent; None: that of the mean, float32 where it holds integers."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        given = [name for name in ("std", "logvar", "moments") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"DrawLatent has {' and '.join(given)}", hint="Name one of them")
        check({"DrawLatent: scale": (self.scale, one_or_several(finite()))})
        check({"DrawLatent: shift": (self.shift, one_or_several(finite()))})
        check({"DrawLatent: random": (self.random, FLAG)})
        names = (self.mean, self.name, *(getattr(self, name) for name in given))
        parse_names("DrawLatent: a field", names, "the name of a field")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ConfigError(
                f"DrawLatent(dtype={self.dtype!r})", hint=f"Expected {', '.join(sorted(FLOATS))}"
            )
        check({"DrawLatent: axis": (self.axis, whole())})
        if self.axis >= 0:
            raise ConfigError(f"DrawLatent(axis={self.axis})", hint="Count from the last: -3 for (C, H, W)")

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with a latent in place of its moments."""
        named = [self.mean, self.logvar or self.std or "std"] if self.moments is None else [self.moments]
        values = [_field(batch, name, "DrawLatent") for name in named]
        made = _copy(batch)
        for name in named:
            del made[name]
        if isinstance(values[0], Tensor):
            for suffix in _SUFFIXES:
                told, *_ = [made.pop(name + suffix, None) for name in named]
                if told is not None:
                    made[self.name + suffix] = told
        by_channel = self.moments is not None or max(map(len, map(_listed, (self.scale, self.shift)))) > 1
        if by_channel and {self.name + OFFSETS, self.name + SHAPE_SUFFIX} <= made.keys():
            raise ConfigError(
                f"DrawLatent: records of {named[0]!r} are packed without axes, and channels are one",
                hint=f"Serve them with {arg('ragged', 'list')} or {arg('ragged', 'pad')}",
            )
        records = [_records(batch, name, own, "DrawLatent") for name, own in zip(named, values, strict=True)]
        if any(own is not None for own in records):
            rows = [own if one is None else one for own, one in zip(values, records, strict=True)]
            latents = self._by_record(rows, keys)
            made[self.name] = latents if isinstance(values[0], list) else torch.cat(latents)
        elif self.name + MASK in made or self.name + LENGTHS_SUFFIX in made:
            self._draw_padded(made, cast("list[Tensor]", values), keys)
        else:
            made[self.name] = self._drawn(cast("list[Tensor]", values), keys)
        return made

    def _by_record(self, values: Sequence[Sequence[Tensor] | Tensor], keys: Tensor) -> list[Tensor]:
        """Return the latent of each record, `values` by field and record."""
        rows = zip(*values, keys.split(1), strict=True)
        return [self._drawn([row[None] for row in own], key)[0] for *own, key in rows]

    def _draw_padded(self, made: RecordBatch, values: list[Tensor], keys: Tensor) -> None:
        """Put padded latents into a batch that says how its moments are padded."""
        sizes: Tensor | None = made.get(self.name + SHAPE_SUFFIX)
        if self.name + MASK in made:
            mask: Tensor = made[self.name + MASK]
        else:
            places = torch.arange(values[0].shape[1], device=keys.device)
            mask = places < made[self.name + LENGTHS_SUFFIX][:, None]
        padded = values[0] if self.moments is None else self._halves(values[0])[0]
        latent = padded.to(self._dtype_of(padded))
        if sizes is None:  # rows are in the same places whatever the padding is
            shown = mask.view(*mask.shape, *[1] * (latent.dim() - mask.dim()))
            made[self.name] = torch.where(shown, self._drawn(values, keys), latent)
            return
        latent = latent.clone()
        for place, (own, key) in enumerate(zip(sizes.tolist(), keys.split(1), strict=True)):
            real = (place, *(slice(size) for size in own))
            drawn = self._drawn([value[real][None] for value in values], key)[0]
            latent[place][tuple(slice(size) for size in drawn.shape)] = drawn
        made[self.name] = latent
        channels = latent.dim() + self.axis
        if self.moments is not None and channels < mask.dim():
            made[self.name + MASK] = mask.chunk(2, dim=channels)[0]
            made[self.name + SHAPE_SUFFIX] = sizes = sizes.clone()
            sizes[:, channels - 1] //= 2

    def _dtype_of(self, mean: Tensor) -> torch.dtype:
        if self.dtype is not None:
            return cast("torch.dtype", getattr(torch, self.dtype))
        return mean.dtype if mean.is_floating_point() else torch.float32

    def _halves(self, moments: Tensor) -> Sequence[Tensor]:
        """Return means and log-variances of `moments`."""
        if moments.dim() <= -self.axis or moments.shape[self.axis] % 2:
            raise ConfigError(
                f"DrawLatent: field {self.moments!r} has examples of shape {tuple(moments.shape[1:])}, "
                f"which are not means and log-variances along axis {self.axis}",
                hint="Give axis=, the axis of channels",
            )
        return moments.chunk(2, dim=self.axis)

    def _drawn(self, values: list[Tensor], keys: Tensor) -> Tensor:
        """Return the latents `(B, *shape)` of moments."""
        mean, spread = values if self.moments is None else self._halves(values[0])
        if mean.shape != spread.shape:
            raise ConfigError(
                f"DrawLatent: means have the shape {tuple(mean.shape[1:])}, deviations "
                f"{tuple(spread.shape[1:])}"
            )
        latent = mean.to(torch.float32)
        if self.random:
            spread = spread.to(torch.float32)
            if self.moments is not None or self.logvar is not None:
                spread = spread.clamp(*LOGVAR_RANGE).mul_(0.5).exp_()
            noise = normal(keys, math.prod(latent.shape[1:])).view(latent.shape)
            latent = noise.mul_(spread).add_(latent)
        latent = (latent - self._row(self.shift, latent)) * self._row(self.scale, latent)
        return latent.to(self._dtype_of(mean))

    def _row(self, numbers: float | Sequence[float], latent: Tensor) -> Tensor:
        """Return the numbers in the shape in which they meet a latent."""
        found = _listed(numbers)
        if len(found) > 1 and (latent.dim() <= -self.axis or latent.shape[self.axis] != len(found)):
            raise ConfigError(
                f"DrawLatent has {len(found)} channels, latents of shape {tuple(latent.shape[1:])} have "
                f"others along axis {self.axis}",
                hint="Give one number, or one for each channel",
            )
        if len(found) == 1:  # a latent may have fewer axes
            return _numbers_on(found, latent.device)
        return _numbers_on(found, latent.device).view(-1, *[1] * (-1 - self.axis))


Null: TypeAlias = "float | Tensor | Mapping[str, Any]"
"""What stands for no condition: a number, the values of one example, or either of them by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCondition(FieldTransform):
    """Replaces the conditions of an example by a null with probability `p`, for classifier-free guidance.

    One draw for all named fields: an example keeps all of them or loses all. A field of varying length takes
    the length of its null, in a list, padded or packed. With `batch_tokens` records keep their lengths, so
    the null must be a number.

    Raises:
        ConfigError: `p` is not in 0 to 1, or the null lacks a field; later, a field is not in the batch or
            the null has another shape.

    Examples:
        >>> import stoker, torch
        >>> from stoker.transforms import DropCondition
        >>> data = [{"image": torch.ones(3), "label": number} for number in range(4)]
        >>> drop = DropCondition("label", p=1.0, null=10)  # class 10: none
        >>> next(iter(stoker.cached(data, batch_size=4, transforms=drop)))["label"].tolist()
        [10, 10, 10, 10]
    """

    fields: str | Sequence[str] = field(kw_only=False)
    """Fields that are dropped together."""
    p: float
    """Probability, 0 to 1."""
    null: Null | None = None
    """A number, a tensor of the shape of one example, or one of these by field, such as the record of an
    empty caption, `cache[0]`. A number keeps the length of a field of varying length. None: 0 for fields of
    floats; fields of integers or bools need one that is named, for their 0 is a value like any other."""

    def __post_init__(self) -> None:
        """Refuse a wrong probability, and a null without one of the fields."""
        names = parse_names("DropCondition: fields", self.fields, "the name of a field")
        check({"DropCondition: p": (self.p, finite(least=0, most=1))})
        if not isinstance(self.null, Mapping):
            _check_null(self.null, "null")
            return
        for name in names:
            if name not in self.null:
                raise ConfigError(
                    f"DropCondition: the null has no {name!r}, it has {', '.join(map(str, self.null))}",
                    hint=_hint_at_names(name, self.null),
                )
            _check_null(self.null[name], f"null of {name!r}")

    @property
    def _names(self) -> Sequence[str]:
        return [self.fields] if isinstance(self.fields, str) else self.fields

    def _null_of(self, name: str, values: Tensor | list[Tensor]) -> Any:
        """Return what stands for no condition in a field.

        Raises:
            ConfigError: The field cannot hold it, or none is named for a field of integers or bools.
        """
        null = self.null[name] if isinstance(self.null, Mapping) else self.null
        dtype = (values[0] if isinstance(values, list) else values).dtype
        if null is None and not dtype.is_floating_point:
            known = False if dtype == torch.bool else min(1000, torch.iinfo(dtype).max)
            raise ConfigError(
                f"DropCondition: null= is left out, and field {name!r} holds {dtype}, where 0 is a value "
                "like any other",
                hint=f"Name what stands for no condition, as null={{{name!r}: {known}}}",
            )
        if null is not None and not _fits(null, dtype):
            raise ConfigError(
                f"DropCondition: field {name!r} of {dtype} cannot hold the null {null!r}",
                hint=f"Give another by field, as null={{{name!r}: 0}}",
            )
        return 0 if null is None else null

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with some conditions dropped."""
        dropped = uniform(keys, 1)[:, 0] < self.p
        made = _copy(batch)
        for name in self._names:
            values = _field(batch, name, "DropCondition")
            null = self._null_of(name, values)
            if isinstance(null, Tensor) and not null.dim() and isinstance(values, list):
                null = null.item()
            if isinstance(values, list) or name + OFFSETS in made:
                self._varying(made, name, null, dropped)
            elif _has_tokens(batch, name, values, "DropCondition"):
                self._by_tokens(made, name, null, dropped)
            else:
                self._fixed(made, name, null, dropped)
        return made

    def _fixed(self, made: RecordBatch, name: str, null: Any, dropped: Tensor) -> None:
        """Replace a field that is one tensor with an axis of examples, padded or not."""
        values = made[name]
        if isinstance(null, Tensor):
            length = len(null) if name + LENGTHS_SUFFIX in made else None
            null = _on(null, values.device).to(values.dtype)
            if length is not None:
                values, null = _same_length(values, null)
                self._tell_length(made, name, length, values.shape[1], dropped)
            if null.shape != values.shape[1:]:
                raise _unfit(name, null, tuple(values.shape[1:]))
        else:
            null = torch.full((), null, dtype=values.dtype, device=values.device)
        made[name] = torch.where(dropped.view(-1, *[1] * (values.dim() - 1)), null, values)

    def _tell_length(self, made: RecordBatch, name: str, length: int, padded: int, dropped: Tensor) -> None:
        lengths: Tensor = made[name + LENGTHS_SUFFIX]
        made[name + LENGTHS_SUFFIX] = torch.where(dropped, torch.full_like(lengths, length), lengths)
        if name + MASK in made:
            places = torch.arange(padded, device=dropped.device)
            made[name + MASK] = places < made[name + LENGTHS_SUFFIX][:, None]

    def _by_tokens(self, made: RecordBatch, name: str, null: Any, dropped: Tensor) -> None:
        """Replace the tokens of examples that are packed with others to a budget, by a number."""
        if isinstance(null, Tensor):
            raise ConfigError(
                f"DropCondition: the null of {name!r} has the shape {tuple(null.shape)}, and records that "
                "batch_tokens packed keep their lengths",
                hint=f"Give a number as null, or {arg('ragged', 'pack')} and batch_size for batch_tokens",
            )
        values: Tensor = made[name]
        sizes = made["cu_seqlens"].diff().long()
        rows = dropped.repeat_interleave(sizes, output_size=len(values))
        rows = rows.view(-1, *[1] * (values.dim() - 1))
        number = torch.full((), null, dtype=values.dtype, device=values.device)
        made[name] = torch.where(rows, number, values)

    def _varying(self, made: RecordBatch, name: str, null: Any, dropped: Tensor) -> None:
        """Replace examples of a field that comes as a list, or packed. Waits for a device, once."""
        packed = not isinstance(made[name], list)
        values = cast("list[Tensor]", made[name])
        if packed:
            values = [*made[name].split(made[name + OFFSETS].diff().tolist())]
        values = [*values]
        for place in dropped.nonzero().flatten().tolist():
            own = values[place]
            if isinstance(null, Tensor) and (null.dim() != own.dim() or null.shape[1:] != own.shape[1:]):
                raise _unfit(name, null, ("any", *own.shape[1:]))
            new = (
                _on(null, own.device).to(own.dtype)
                if isinstance(null, Tensor)
                else torch.full_like(own, null)
            )
            values[place] = new
        if packed:
            made[name], made[name + OFFSETS] = pack(values)
        else:
            made[name] = values


def _check_null(null: object, what: str) -> None:
    if null is not None and not isinstance(null, Tensor | bool):
        check({f"DropCondition: the {what}": (null, NUMBER)})


def _hint_at_names(name: str, null: Mapping[str, Any]) -> str:
    """Return what to do about a null that lacks a field, or has it by its name before caches were joined."""
    cache, dot, field = name.rpartition(".")
    if dot and field in null:
        return (
            "In batches of joined caches fields have other names. For the record of an empty caption give "
            f'null={{f"{cache}.{{name}}": value for name, value in record.items()}}'
        )
    return f"Give what stands for no condition of each field, as null={{{name!r}: ...}}"


@lru_cache(maxsize=64)
def _fits(null: Any, dtype: torch.dtype) -> bool:
    """Return True if a dtype can hold a null; floats may be rounded. Kept: a GPU would be waited for."""
    given = null.detach().cpu() if isinstance(null, Tensor) else torch.tensor(null, dtype=torch.float64)
    if dtype.is_floating_point:
        return bool((given.isfinite() == given.to(dtype).float().isfinite()).all())
    if isinstance(null, Tensor):
        return torch.equal(given.to(dtype).to(given.dtype), given)
    if dtype == torch.bool:
        return null in (0, 1)
    info = torch.iinfo(dtype)
    return null == null // 1 and info.min <= null <= info.max


def _same_length(values: Tensor, null: Tensor) -> tuple[Tensor, Tensor]:
    """Return padded values and a null of as many steps, zeros at the end of the shorter."""
    missing = len(null) - values.shape[1]
    if missing > 0:
        values = torch.cat((values, values.new_zeros((len(values), missing, *values.shape[2:]))), dim=1)
    elif missing < 0:
        null = torch.cat((null, null.new_zeros((-missing, *null.shape[1:]))))
    return values, null


def _unfit(name: str, null: Tensor, shape: tuple[Any, ...]) -> ConfigError:
    return ConfigError(
        f"DropCondition: the null of {name!r} has the shape {tuple(null.shape)}, examples have "
        f"({', '.join(map(str, shape))})",
        hint="Give the values of one example",
    )


def _copy(batch: Any) -> RecordBatch:
    made = RecordBatch(batch)
    made.position = batch.position
    return made


def _field(batch: Any, name: str, whose: str) -> Tensor | list[Tensor]:
    """Return a field of a batch.

    Raises:
        ConfigError: There is none, or the batch has no fields.
    """
    if not isinstance(batch, RecordBatch):
        raise ConfigError(
            f"{whose} takes batches of entire records, this is a {type(batch).__name__}",
            hint="Leave windows= out",
        )
    if name not in batch:
        known = ", ".join(repr(known) for known in batch if known != "index")
        raise ConfigError(f"{whose} takes the field {name!r}", hint=f"The batch has {known}")
    return batch[name]


def _records(batch: Any, name: str, values: Tensor | list[Tensor], whose: str) -> Sequence[Tensor] | None:
    """Return the values of each record of a field that is a list or packed; None: axis 0 is that of records.

    Packed, it waits for a device.
    """
    if isinstance(values, list):
        return values
    offsets = batch.get(name + OFFSETS)
    if offsets is None and _has_tokens(batch, name, values, whose):
        offsets = batch["cu_seqlens"]
    return None if offsets is None else values.split(offsets.diff().tolist())


def _has_tokens(batch: Any, name: str, values: Tensor, whose: str) -> bool:
    """Return True if the rows of a field are tokens of a batch made by `batch_tokens`.

    Raises:
        ConfigError: They may be tokens or records.
    """
    if not all(packed in batch for packed in PACKED):
        return False
    records, tokens = len(batch["cu_seqlens"]) - 1, len(batch["position_ids"])
    if records != tokens or len(values) != tokens:
        return len(values) == tokens
    if batch["max_seqlen"] > 1:
        raise ConfigError(
            f"{whose}: {name!r} has {tokens} rows, and the batch has as many records as tokens: they may be "
            "either",
            hint="Leave records without tokens out with indices=",
        )
    return False  # a token for each record


def _listed(values: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, Sequence) else (values,)


@lru_cache(maxsize=64)
def _numbers_on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers as float32 on a device, kept: a copy to a GPU would wait at every batch."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, kept as well."""
    with torch.inference_mode(False):
        return tensor.to(device)
