"""Records of varying length as one tensor: padded with a mask, or one after another with offsets.

Every tier gathers such a field as a list of tensors; what is here joins that list, so that all tiers hand out
the same bytes. `u` padded comes as `u` `(B, L, *step)`, `u.lengths` `(B,)` and `u.mask` `(B, L)`; packed as
`u` `(sum of lengths, *step)` and `u.offsets` `(B + 1,)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, RecordError
from stoker.loader.batch import RecordBatch
from stoker.loader.buffers import sent
from stoker.loader.outputs import Output

if TYPE_CHECKING:
    from stoker.loader.places import Places
    from stoker.store import Cache

LENGTHS, MASK, OFFSETS = ".lengths", ".mask", ".offsets"
"""End the names of what comes beside a joined field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """How records of varying length are padded at their end; `ragged="pad"` is `Pad()`."""

    to: int | None = None
    """Steps of every batch; None: those of the longest record in the batch."""
    multiple: int = 1
    """Round the longest up to a multiple, so that a compiled model meets few shapes."""
    value: float | Mapping[str, float] = 0
    """What is put after the end: one number, or by field (0 where a field is not named)."""

    def __post_init__(self) -> None:
        """Refuse lengths below 1."""
        for name, size in (("to", self.to), ("multiple", self.multiple)):
            if size is not None and (not isinstance(cast(object, size), int) or size < 1):
                raise ConfigError(f"Pad({name}={size!r}) is not a length. Expected a whole number from 1 on")
        if self.to is not None and self.to % self.multiple:
            raise ConfigError(
                f"Pad(to={self.to}, multiple={self.multiple}) contradicts itself: {self.to} is no multiple"
            )

    def length(self, longest: int) -> int:
        """Steps of a batch whose longest record has `longest`.

        >>> Pad().length(13), Pad(multiple=8).length(13), Pad(to=20).length(13)
        (13, 16, 20)
        """
        return -(-longest // self.multiple) * self.multiple if self.to is None else self.to

    def value_of(self, name: str) -> float:
        """What is put after the end of one field."""
        return self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value


Ragged: TypeAlias = "str | Pad"
"""`list`, `pad`, `pack`, or a `Pad`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What is done to the lists in a batch."""

    fields: tuple[str, ...]
    """The fields that come as lists."""
    pad: Pad | None
    """None: one after another."""

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        """The same batch with one tensor for each list, and what tells its records apart.

        Raises:
            RecordError: A record is longer than `Pad.to`; names it.
        """
        joined = RecordBatch()
        for name, value in batch.items():
            if name not in self.fields:
                joined[name] = value
            elif self.pad is None:
                joined[name], joined[name + OFFSETS] = pack(cast("list[Tensor]", value))
            else:
                tensors = cast("list[Tensor]", value)
                self._check(name, tensors, batch["index"])
                found = pad(tensors, self.pad.length(max(map(len, tensors))), self.pad.value_of(name))
                joined[name], joined[name + LENGTHS], joined[name + MASK] = found
        joined.position = batch.position
        return joined

    def _check(self, name: str, tensors: Sequence[Tensor], index: Tensor) -> None:
        to = None if self.pad is None else self.pad.to
        if to is None:
            return
        for place, tensor in enumerate(tensors):
            if len(tensor) > to:
                raise too_long(name, int(index[place]), len(tensor), to)


def too_long(name: str, number: int, length: int, to: int) -> RecordError:
    """The error for a record that does not fit the length that batches are padded to."""
    return RecordError(
        f"field {name!r} of sample {number} has {length} steps, ragged=Pad(to={to}) leaves room for {to}. "
        f"Give at least Pad(to={length}), or leave such samples out with indices="
    )


def pad(tensors: Sequence[Tensor], length: int, value: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Records side by side.

    Returns:
        `(B, length, *step)`; lengths `(B,)` int64; and a mask `(B, length)` that is True at what is real.
    """
    first = tensors[0]
    sizes = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
    out = first.new_full((len(tensors), length, *first.shape[1:]), value)
    own = np.arange(int(sizes.sum())) + np.repeat(np.arange(len(sizes)) * length - _starts(sizes)[:-1], sizes)
    lengths = sent(sizes, first.device)
    # One copy by index: a copy for each record would be a kernel for each on a GPU.
    out.view(-1, *first.shape[1:]).index_copy_(0, sent(own, first.device), torch.cat([*tensors]))
    mask = torch.arange(length, device=first.device)[None, :] < lengths[:, None]
    return out, lengths, mask


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Records one after another, and where each begins: `(B + 1,)` int64, the total last."""
    sizes = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
    return torch.cat([*tensors]), sent(_starts(sizes), tensors[0].device)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def make_join(ragged: object, outputs: tuple[Output, ...]) -> Join | None:
    """What to do to batches of these outputs; None: nothing.

    Raises:
        ConfigError: `ragged` is none of the ways, or a name beside a joined field is taken.
    """
    if not (isinstance(ragged, Pad) or ragged in ("list", "pad", "pack")):
        raise ConfigError(
            f"ragged is {ragged!r}. Expected list, pad, pack or stoker.loader.Pad(to=..., value=...)"
        )
    fields = tuple(output.name for output in outputs if output.ragged)
    if ragged == "list" or not fields:
        return None
    how = ragged if isinstance(ragged, Pad) else Pad() if ragged == "pad" else None
    added = {name + end for name in fields for end in (LENGTHS, MASK, OFFSETS)}
    if taken := sorted(added & {output.name for output in outputs}):
        raise ConfigError(
            f"ragged={ragged!r} adds {', '.join(taken)} to batches, and records have fields of that name. "
            "Give them other names in the source, or take ragged='list'"
        )
    if how is not None:
        _check_values(how, {output.name: output for output in outputs if output.ragged})
    return Join(fields=fields, pad=how)


def _check_values(how: Pad, outputs: Mapping[str, Output]) -> None:
    if isinstance(how.value, Mapping) and (unknown := sorted(how.value.keys() - outputs.keys())):
        raise ConfigError(
            f"Pad(value=...) names {', '.join(unknown)}; fields of varying length are {', '.join(outputs)}"
        )
    for name, output in outputs.items():
        dtype, value = output.cast or output.dtype, how.value_of(name)
        if dtype.is_floating_point:
            continue
        fits = value in (0, 1) if dtype == torch.bool else _is_whole(value, torch.iinfo(dtype))
        if not fits:
            raise ConfigError(
                f"Pad(value={value!r}) cannot be held by field {name!r} of {dtype}. "
                f"Give a value by field, as Pad(value={{{name!r}: 0}})"
            )


def _is_whole(value: float, info: Any) -> bool:
    return value == value // 1 and info.min <= value <= info.max


def check_lengths(join: Join, cache: Cache, places: Places) -> None:
    """Refuse records that are longer than batches are padded to, before any is read.

    Raises:
        RecordError: As said; names the longest.
    """
    if join.pad is None or join.pad.to is None:
        return
    for name in join.fields:
        lengths = places.of_all(cache.lengths(name))
        longest = int(np.argmax(lengths)) if len(lengths) else 0
        if len(lengths) and lengths[longest] > join.pad.to:
            raise too_long(name, int(places.numbers[longest]), int(lengths[longest]), join.pad.to)
