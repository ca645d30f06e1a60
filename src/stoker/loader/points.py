"""Batches of particles and meshes: trajectories, or windows of them, whose points differ in number.

A folded field (`stoker.schema.Field.axes`) is stored in a shard as one row for each point of each step, so a
window is consecutive rows: every tier gathers those as a list, and what is here gives them their axes and
joins them.
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
from stoker.loader.batch import PointBatch, RecordBatch, sent
from stoker.loader.places import has_points
from stoker.loader.windows import Windows, time_field
from stoker.schema import SHAPE_SUFFIX, Schema

if TYPE_CHECKING:
    from stoker.loader.outputs import OutputSpec
    from stoker.loader.places import Places
    from stoker.store import Cache


# ----------------------------------------------------------------------------------------------------------
# Records of varying length as one tensor: padded with a mask, or one after another with offsets.
#
# Every tier gathers such a field as a list of tensors; what is here joins that list, so that all tiers hand
# out the same bytes. `u` padded comes as `u` `(B, L, *step)`, `u.lengths` `(B,)` and `u.mask` `(B, L)`;
# packed as `u` `(sum of lengths, *step)` and `u.offsets` `(B + 1,)`.


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
            if size is not None and (not isinstance(cast("object", size), int) or size < 1):
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


def make_join(ragged: object, outputs: tuple[OutputSpec, ...]) -> Join | None:
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


def _check_values(how: Pad, outputs: Mapping[str, OutputSpec]) -> None:
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


POINTS = "points"
"""Prefix of the names that say which point belongs to which window."""
BATCH = ".batch"


def make_joiner(
    ragged: Ragged, outputs: tuple[OutputSpec, ...], schema: Schema, windows: Windows | None
) -> Join | PointJoin | None:
    """Return what joins the lists of a batch; None: they stay lists, without axes to restore.

    Raises:
        ConfigError: `ragged` is unknown, or `Pad(to=...)` is asked for of fields with several axes.
    """
    join = make_join(ragged, outputs)
    if not has_points({output.field: schema[output.field] for output in outputs if output.field in schema}):
        return join
    how = ragged if isinstance(ragged, Pad) else Pad() if ragged == "pad" else None
    if how is not None and how.to is not None:
        raise ConfigError(
            f"ragged={how!r} gives one length, and particles and meshes have several axes that vary. Use "
            f"ragged='pad', or Pad(multiple=...)"
        )
    return PointJoin(
        schema=schema,
        outputs=outputs,
        pad=how,
        pack=ragged == "pack",
        windows=windows,
        main=None if windows is None else time_field(schema, windows.field),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointJoin:
    """Gives the fields of a batch their axes, and joins them as asked."""

    schema: Schema
    outputs: tuple[OutputSpec, ...]
    pad: Pad | None
    pack: bool
    windows: Windows | None
    main: str | None
    """The field that windows are cut from; None: records are served entire."""

    def __call__(self, batch: RecordBatch) -> Any:
        """The batch as handed out: a `RecordBatch`, or a `PointBatch` of windows."""
        return self._records(batch) if self.windows is None else self._windows(batch, self.windows)

    # ------------------------------------------------------------------ entire records

    def _records(self, batch: RecordBatch) -> RecordBatch:
        counts = None
        made = RecordBatch()
        made.position = batch.position
        for name, value in batch.items():
            field = self.schema.get(name.removesuffix(SHAPE_SUFFIX))
            if name.endswith(SHAPE_SUFFIX) and field is not None and field.folded:
                if self.pad is not None or self.pack:
                    made[name] = value
                continue
            field = self.schema.get(name)
            if field is None or not isinstance(value, list):
                made[name] = value
                continue
            tensors = cast("list[Tensor]", value)
            if field.folded and not self.pack:
                shapes = batch[name + SHAPE_SUFFIX].tolist()
                tensors = [t.view(*s, *t.shape[1:]) for t, s in zip(tensors, shapes, strict=True)]
            if field.numbers_points and self.pack:
                counts = self._counts(batch) if counts is None else counts
                tensors = _shifted(tensors, counts)
            self._put(made, name, tensors, axes=max(1, len(field.axes)))
        return made

    def _counts(self, batch: RecordBatch) -> list[int]:
        """Points of each record."""
        for name, field in self.schema.items():
            if field.axes == ("p",) and name in batch:
                return [len(tensor) for tensor in batch[name]]
            if "p" in field.axes and name + SHAPE_SUFFIX in batch:
                return batch[name + SHAPE_SUFFIX][:, field.axes.index("p")].tolist()
        raise ConfigError("records number points and have no field of points. Serve them as lists")

    def _put(self, made: dict[str, Any], name: str, tensors: list[Tensor], *, axes: int) -> None:
        """Add a field to what is handed out, joined as asked."""
        if self.pack:
            made[name], made[name + OFFSETS] = pack(tensors)
        elif self.pad is None:
            made[name] = tensors
        elif axes == 1:
            length = self.pad.length(max(map(len, tensors)))
            found = pad(tensors, length, self.pad.value_of(name))
            made[name], made[name + LENGTHS], made[name + MASK] = found
        else:
            made[name], made[name + MASK] = self._padded(name, tensors, range(axes))

    def _padded(self, name: str, tensors: Sequence[Tensor], varying: range) -> tuple[Tensor, Tensor]:
        """One tensor of tensors that differ along the axes `varying`, padded, and a mask of what is real."""
        assert self.pad is not None
        first, axes = tensors[0], varying.stop
        most = [
            self.pad.length(max(t.shape[axis] for t in tensors)) if axis in varying else first.shape[axis]
            for axis in range(axes)
        ]
        out = first.new_full((len(tensors), *most, *first.shape[axes:]), self.pad.value_of(name))
        mask = torch.zeros((len(tensors), *most), dtype=torch.bool, device=first.device)
        for place, tensor in enumerate(tensors):
            own = (place, *(slice(size) for size in tensor.shape[:axes]))
            out[own], mask[own] = tensor, True
        return out, mask

    # ------------------------------------------------------------------ windows

    def _windows(self, batch: RecordBatch, windows: Windows) -> PointBatch:
        main, schema = cast("str", self.main), self.schema
        steps = windows.span + 1
        states: dict[str, list[Tensor]] = {}
        cond: dict[str, Tensor] = {}
        nodes: dict[str, Any] = {}
        rest: dict[str, list[Tensor]] = {}
        for output in self.outputs:
            value, field = batch[output.name], schema[output.field]
            if field.folded:
                states[output.name] = [t.view(steps, -1, *t.shape[1:]) for t in cast("list[Tensor]", value)]
            elif output.ragged:
                rest[output.name] = cast("list[Tensor]", value)
            else:
                cond[output.name] = value
        counts = [tensor.shape[1] for tensor in states[main]]
        for name, tensors in rest.items():
            shift = self.pack and schema[name].numbers_points
            of_points = schema[name].axes == ("p",)
            self._put(nodes, name, _shifted(tensors, counts) if shift else tensors, axes=1)
            if of_points:  # told by `points.*`
                for end in (LENGTHS, MASK, OFFSETS):
                    nodes.pop(name + end, None)
        self._tell_apart(nodes, counts, states[main][0].device)
        made = {name: self._states(name, tensors, windows) for name, tensors in states.items()}
        for name, (first, second, future) in made.items():
            if name != main:
                nodes |= {f"{name}0": first, f"{name}1": second}
                nodes |= {} if future is None else {f"{name}.future": future}
        return PointBatch(*made[main], cond, nodes, batch["index"], batch.position)

    def _states(self, name: str, tensors: list[Tensor], windows: Windows) -> tuple[Any, Any, Any]:
        """z0, z1 and future of windows `(steps, N, *rest)`."""
        stride = windows.stride
        future = None if windows.horizon == 1 else [tensor[2 * stride :: stride] for tensor in tensors]
        pairs = [[tensor[at] for tensor in tensors] for at in (0, stride)]
        if self.pack:
            packed = None if future is None else torch.cat(future, dim=1)
            return torch.cat(pairs[0]), torch.cat(pairs[1]), packed
        if self.pad is None:
            return pairs[0], pairs[1], future
        length = self.pad.length(max(tensor.shape[1] for tensor in tensors))
        value = self.pad.value_of(name)
        sides = [pad(pair, length, value)[0] for pair in pairs]
        if future is None:
            return sides[0], sides[1], None
        return sides[0], sides[1], self._padded(name, future, range(1, 2))[0]

    def _tell_apart(self, nodes: dict[str, Any], counts: list[int], device: torch.device) -> None:
        sizes = np.array(counts, np.int64)
        if self.pack:
            nodes[POINTS + OFFSETS] = sent(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), device)
            nodes[POINTS + BATCH] = sent(np.repeat(np.arange(len(sizes)), sizes), device)
        elif self.pad is not None:
            length = self.pad.length(max(counts))
            nodes[POINTS + LENGTHS] = sent(sizes, device)
            nodes[POINTS + MASK] = sent(np.arange(length)[None] < sizes[:, None], device)


def _shifted(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Numbers of points within each record as numbers of points of the batch."""
    before = np.cumsum([0, *counts[:-1]]).tolist()
    return [tensor + first for tensor, first in zip(tensors, before, strict=True)]
