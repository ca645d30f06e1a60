"""Batches as a loader hands them out: whole records, or windows cut from trajectories."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of_class
from enum import Enum
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from stoker.errors import ConfigError, arg
from stoker.sources.arguments import parse_names
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.schema import Field, Schema


class Role(Enum):
    """What an output is in a batch, decided once from the schema. A name cannot tell: a field may be called
    `future`.
    """

    FIELD = "field"
    """A field of records."""
    CONDITION = "condition"
    """A number or a row of numbers for each example: a condition of windows, a small field of records."""
    SIZES = "sizes"
    """Of records: how long the axes of a field of points are in each."""
    Z0 = "z0"
    Z1 = "z1"
    FUTURE = "future"
    """The states after `z1`."""
    RAW = "raw"
    """A raw field that the cache keeps, in the conditions of windows."""
    MASK = "mask"
    """Which states of `future` are within the example's horizon, in the conditions of windows."""
    STEPS = "steps"
    """Steps of a field of points, from which z0, z1 and future are cut."""
    NODES = "nodes"
    """Another field of points, the same at every step."""


STATES = (Role.Z0, Role.Z1, Role.FUTURE)
"""The roles that are parts of a window of their own; their values are the names of these."""


BatchT = TypeVar("BatchT")


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch, or a part of one, with every tensor changed; what is not a tensor stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, RecordBatch | TupleBatch):
        if isinstance(value, RecordBatch):
            made = RecordBatch({name: map_tensors(part, change) for name, part in value.items()})
        else:
            made = TupleBatch(map_tensors(part, change) for part in value)
        made.take_place_of(value, change)
        return made
    if isinstance(value, WindowBatch | PointBatch | TaskBatch):
        fields = {name: map_tensors(getattr(value, name), change) for name in value._fields}
        return value._replace(**fields)
    if isinstance(value, dict):
        return {name: map_tensors(v, change) for name, v in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [map_tensors(v, change) for v in cast("list[Any]", value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(v, change) for v in cast("tuple[Any, ...]", value)))
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields_of_class(value):
            object.__setattr__(made, field.name, map_tensors(getattr(value, field.name), change))
        return made
    return value


def _to(self: BatchT, device: str | torch.device | int, *, non_blocking: bool = False) -> BatchT:
    """Return the batch with every tensor on `device`; see `torch.Tensor.to`.

    Args:
        device: Where tensors are wanted.
        non_blocking: Do not wait for copies from page-locked memory.
    """
    return map_tensors(self, partial(Tensor.to, device=torch.device(device), non_blocking=non_blocking))


def _pin_memory(self: BatchT) -> BatchT:
    """Return the batch with every tensor in page-locked memory, for fast copies to a GPU."""
    return map_tensors(self, Tensor.pin_memory)


class _PlacedBatch:
    """A batch of records: where a loader resumes after it, and which samples it has."""

    __slots__ = ()
    position: tuple[int, int]
    """Epoch and example at which a loader resumes after this batch: `loader.state_dict(batch.position)`."""
    index: Any
    """The sample indices, `(B,)` int64."""
    to, pin_memory = _to, _pin_memory

    def take_place_of(self, other: _PlacedBatch, change: Callable[[Tensor], Tensor]) -> None:
        """Set position and index to those of another batch, as far as it has them."""
        for name in ("position", "index"):
            with suppress(AttributeError):
                setattr(self, name, map_tensors(object.__getattribute__(other, name), change))


class RecordBatch(dict[str, Any], _PlacedBatch):
    """One batch of entire records: `{field: (B, *shape)}` and `index`, the sample indices, `(B,)` int64.

    A field is also an attribute: `batch.image` is `batch["image"]`. A field of varying length is a list of B
    tensors. The memory is the batch's own: nothing that was handed out is ever written to again, except in a
    loader made with `static=True`. `batch.position` is as in `WindowBatch`. `batch.to(device)` and
    `batch.pin_memory()` return the batch with all its tensors there.
    """

    __slots__ = ("index", "position")

    def __getattr__(self, name: str) -> Any:
        """Return a field of the batch.

        Raises:
            AttributeError: There is no such field.
        """
        if name == "position" or name not in self:
            raise AttributeError(
                f"the batch has no field {name!r}. Its fields are {', '.join(map(str, self))}"
            )
        return self[name]


class TupleBatch(tuple[Any, ...], _PlacedBatch):
    """One batch of a dataset whose items are tuples or lists: an entry for each place, `(B, *shape)`."""

    position: Any = None
    index: Any = None


# Libraries that map a function over nested tensors, as torchvision's transforms do, look into these as into a
# dict and a tuple. A loader gives position and index back to what they return.
register_pytree_node(
    RecordBatch,
    lambda batch: ([*batch.values()], [*batch]),
    lambda values, names: RecordBatch(zip(names, values, strict=True)),
)
register_pytree_node(TupleBatch, lambda batch: ([*batch], None), lambda values, _: TupleBatch(values))


class WindowBatch(NamedTuple):
    """One batch of windows; B counts windows. Memory, `to` and `pin_memory` are as of `RecordBatch`."""

    z0: Any
    """States at `start`, `(B, *step)`; with several state fields a dict of them, as are z1 and future."""
    z1: Any
    """States one stride later, `(B, *step)`; None at horizon 0."""
    future: Any
    """The `horizon - 1` states after `z1`, `(B, horizon - 1, *step)`; None up to horizon 1."""
    cond: dict[str, Tensor]
    """Every other field as `(B, C)`: a parameter as it is, a field with time at `start`. `dt` is the time
    from z0 to z1 where records have a field `time` with a time axis, else a field `dt` times the stride.
    `stride`, where strides are drawn, is the example's own. Raw fields that the cache keeps come with their
    own axes, at least `(B, N, C)`: `<name>0` at z0 and `<name>1` at z1; see `input_fields`. `future_mask`,
    where horizons are drawn, is `(B, horizon - 1, 1)` bool."""
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - the name scripts rely on
    """Sample index and start, `(B, 2)` int64."""
    position: tuple[int, int]
    """Epoch and example at which a loader resumes after this batch: `loader.state_dict(batch.position)`."""

    to, pin_memory = _to, _pin_memory

    @property
    def input_fields(self) -> dict[str, Tensor]:
        """The raw fields at z0, `{name: (B, *shape)}`, of a cache that keeps some (`precompute.keep`)."""
        return {name[:-1]: v for name, v in self.cond.items() if v.ndim > 2 and name.endswith("0")}


class TaskBatch(NamedTuple):
    """One batch of windows of a `Mixture`: a `WindowBatch`, value for value, and whose its examples are."""

    z0: Tensor
    """States at `start`, `(B, *step)`."""
    z1: Tensor
    """States one stride later, `(B, *step)`."""
    future: Tensor | None
    """The `horizon - 1` states after `z1`, `(B, horizon - 1, *step)`; None at horizon 1."""
    cond: dict[str, Tensor]
    """The conditions of all caches by name, sorted, `(B, C)`; zeros where a cache has none of that name."""
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - the name scripts rely on
    """Sample index in its own cache, and start, `(B, 2)` int64."""
    position: tuple[int, int]
    """Epoch and step at which a mixture resumes after this batch: `mixture.state_dict(batch.position)`."""
    task: str | None
    """Name of the cache that every example is from; None: they are from several, see `tasks`."""
    tasks: Tensor
    """For each example the place of its cache in `mixture.names`, `(B,)` int64."""
    mask: dict[str, Tensor]
    """By condition which of its numbers the example's cache has, `(B, C)` bool."""
    to, pin_memory = _to, _pin_memory


# ----------------------------------------------------------------------------------------------------------
# Memory for large batches: reused when nothing refers to it any more, else fresh.
#
# A fresh large tensor is bound by page faults (1.95 against 5.97 GB/s reused, measured on 38 MiB batches),
# so reuse pays; but a batch that somebody still holds must never be written to. The storage's own use count
# tells: every tensor, view and numpy array over it counts, and so does an open `untyped_storage()`.


REUSE_FROM_BYTES = MIB
"""Smaller tensors are made fresh: the allocator recycles them as quickly."""

KEPT = 8
"""Buffers remembered per output; with more batches held than this, further ones are fresh."""

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # pyright: ignore[reportPrivateUsage]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return an ordinary empty tensor whatever mode the caller is in.

    For memory that is written to again in other modes, and by threads.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device or "cpu")


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on `device`; page-locked first, so that nothing waits for a busy GPU."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type != "cpu" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Buffers:
    """Equal tensors for one output of a loader. For several threads: a pass that was left may read ahead."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._kept: list[tuple[Tensor, tuple[int, int]]] = []
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        """Return a tensor that nothing else refers to, `shape`, content undefined."""
        with self._lock:
            return self._take()

    def _take(self) -> Tensor:
        # Always from the front, so that as few buffers rotate as are in flight and they stay in the cache.
        for tensor, alone in self._kept:
            # Memory that was moved to another process has no count that tells.
            if _references(tensor) == alone and not tensor.is_shared():
                return tensor.view(self._shape)
        tensor = allocate(self._shape, self._dtype)
        if _use_count is not None:
            if len(self._kept) == KEPT:
                del self._kept[0]  # somebody keeps batches for good; their memory is theirs
            self._kept.append((tensor, _references(tensor)))
        return tensor.view(self._shape)


def _references(tensor: Tensor) -> tuple[int, int]:
    """Tensors over the storage, and references to the one Python object that stands for it.

    Both are compared with their values when nothing else referred to the tensor: versions of torch differ in
    whether that object counts as a tensor does.
    """
    storage: Any = tensor.untyped_storage()
    return cast("int", _use_count(storage._cdata)), sys.getrefcount(storage)


class PointBatch(NamedTuple):
    """One batch of windows over points; B counts windows, N points of one, S those of the batch together.

    Shapes are those of `ragged="list"` (lists of B tensors), `"pad"`, and `"pack"`.
    """

    z0: Any
    """States at `start`: `(N, *rest)` each, `(B, N, *rest)`, or `(S, *rest)`."""
    z1: Any
    """States one stride later."""
    future: Any
    """The `horizon - 1` states after `z1`: `(horizon - 1, N, *rest)` each, `(B, horizon - 1, N, *rest)`, or
    `(horizon - 1, S, *rest)`; None at horizon 1."""
    cond: dict[str, Tensor]
    """Every other field of a fixed shape as `(B, C)`: a parameter as it is, a field with time at `start`."""
    nodes: dict[str, Any]
    """Coordinates, edges, cells; other fields of points and time as `<name>0`, `<name>1`, `<name>.future`.
    Padded: `points.mask (B, N)` and `points.lengths (B,)`. Packed: `points.offsets (B + 1,)`, `points.batch
    (S,)`, and edges and cells number the points of the batch."""
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - as in WindowBatch
    """Sample index and start, `(B, 2)` int64."""
    position: tuple[int, int]
    """Epoch and example at which a loader resumes after this batch: `loader.state_dict(batch.position)`."""
    to, pin_memory = _to, _pin_memory


# ----------------------------------------------------------------------------------------------------------
# Cut trajectories into training examples: a start, a stride, a horizon.
#
# Trajectories are stored once, unstrided; stride and horizon are settings of the loader alone. An example
# is `(record, start)`, and takes rows `start + k * stride` for `k` in `0 .. horizon`. Of a range of
# strides or horizons each example draws its own in each epoch (`assembly.py`).


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Rules by which a trajectory becomes examples `(z0, z1, future)`.

    Raises:
        ConfigError: A number is below 1, a range is empty, or fields are named twice.

    Examples:
        >>> import stoker, torch
        >>> data = [{"u": torch.rand(11, 16)}] * 4  # 11 steps of 16 points
        >>> windows = stoker.Windows(stride=2, horizon=3)
        >>> loader = stoker.cached(data, time=["u"], windows=windows, batch_size=8)
        >>> batch = next(iter(loader))
        >>> batch.z0.shape, batch.z1.shape, batch.future.shape
        (torch.Size([8, 16]), torch.Size([8, 16]), torch.Size([8, 2, 16]))
        >>> windows.span, windows.count(11)  # steps that a window covers, windows in a trajectory
        (6, 5)
    """

    stride: int | tuple[int, int] = 1
    """Stored steps between one state and the next. A range `(1, 4)`, both ends included: each example draws
    its own stride in each epoch, and `cond["stride"]` `(B, 1)` int64 says which. Every window fits at the
    largest stride."""
    horizon: int | tuple[int, int] = 1
    """States after `z0`: `z1` is the first, `future` the `horizon - 1` others. A range: each example draws
    its own. `future` then has the states of the largest, zeros behind the example's own, and
    `cond["future_mask"]` `(B, H - 1, 1)` bool says which are there. At 0 each row of a field with time, or of
    varying length, is an example: `z0` alone."""
    start_every: int = 1
    """Stored steps between the starts of consecutive windows of one trajectory."""
    field: str | tuple[str, ...] | None = None
    """The field that has time, or at horizon 0 a varying length; None: the only one, or `latent`, or `data`.
    Several: `z0`, `z1` and `future` are dicts by field."""

    def __post_init__(self) -> None:
        """Refuse numbers below one and empty ranges."""
        for name in ("stride", "horizon"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                ends = tuple(cast("Sequence[object]", value))
                _check_range(name, ends)
                object.__setattr__(self, name, ends)
            else:
                _check_count(name, value, least=0 if name == "horizon" else 1)
        _check_count("start_every", self.start_every)
        if self.rows and self.stride != 1:
            raise ConfigError(
                f"windows.stride is {self.stride}, and at horizon 0 no state follows z0",
                hint=f"Leave {arg('stride', call='Windows')} out; for every second row give start_every=2",
            )
        if self.field is not None:
            parse_names("windows.field", self.field, "the name of a field")
        if isinstance(self.field, list | tuple):
            names = tuple(self.field)
            if not names or len({*names}) < len(names):
                raise ConfigError(
                    f"windows.field is {list(names)}", hint="Expected one or more names, each once"
                )
            object.__setattr__(self, "field", names)

    @property
    def rows(self) -> bool:
        """True if each row is an example of its own: horizon 0."""
        return self.horizon == 0

    @property
    def strides(self) -> tuple[int, int]:
        """The smallest and the largest stride."""
        return self.stride if isinstance(self.stride, tuple) else (self.stride, self.stride)

    @property
    def horizons(self) -> tuple[int, int]:
        """The smallest and the largest horizon."""
        return self.horizon if isinstance(self.horizon, tuple) else (self.horizon, self.horizon)

    @property
    def draws(self) -> bool:
        """True if each example has a stride or a horizon of its own."""
        return isinstance(self.stride, tuple) or isinstance(self.horizon, tuple)

    @property
    def span(self) -> int:
        """Steps from the first row of a window to its last, at the largest stride and horizon."""
        return self.horizons[1] * self.strides[1]

    def count(self, length: int) -> int:
        """Return the windows in a trajectory of `length` steps; one that is too short has none.

        Args:
            length: Steps of the trajectory.

        Examples:
            >>> import stoker
            >>> stoker.Windows(stride=2, horizon=3).count(101), stoker.Windows().count(1)
            (95, 0)
            >>> stoker.Windows(start_every=10).count(101)
            10
        """
        return max(0, -(-(length - self.span) // self.start_every))

    def counts(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `count` for many trajectories at once.

        Args:
            lengths: Steps of each trajectory, `(n,)` int64.
        """
        return np.maximum(0, -(-(lengths - self.span) // self.start_every))

    def text(self) -> str:
        """Return what the loader's state keeps of it."""
        stride, horizon = (
            f"{value[0]}..{value[1]}" if isinstance(value, tuple) else str(value)
            for value in (self.stride, self.horizon)
        )
        fields = f" field={'+'.join(self.field)}" if isinstance(self.field, tuple) else ""
        return f"stride={stride} horizon={horizon} start_every={self.start_every}{fields}"


def _check_count(name: str, value: object, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"windows.{name} is {value!r}", hint=f"Expected a whole number of at least {least}")


def _check_range(name: str, ends: tuple[object, ...]) -> None:
    whole = [int(end) for end in ends if not isinstance(end, bool) and isinstance(end, Integral)]
    if len(ends) != 2 or len(whole) != 2 or not 1 <= whole[0] <= whole[1]:
        raise ConfigError(
            f"windows.{name} is {list(ends)}",
            hint="Expected a whole number of at least 1, or a range of two, the smaller first, as (1, 4)",
        )


_KEEP_TIME = (
    "Leave windows= out to serve whole records, or keep the time axis: for a Dataset give cached or "
    "TorchSource time=['data'], the field whose axis 0 is time, and as encoder "
    'stoker.ModuleEncoder(module, time="steps")'
)


def time_field(schema: Schema, wanted: str | tuple[str, ...] | None) -> str:
    """Return the field that windows are cut from, the first of several.

    Raises:
        ConfigError: No field has time, `wanted` is not one, or there are several and none is called
            `latent` or `data`.
    """
    timed = [name for name, field in schema.items() if field.evolves and not field.kept]
    if isinstance(wanted, tuple):
        first, *_ = [time_field(schema, name) for name in wanted]
        return first
    if wanted is not None:
        if wanted not in timed:
            raise ConfigError(
                f"{arg('windows.field', wanted, setting='training.state_fields')} is not a field with time",
                hint=f"Fields with time: {', '.join(timed) or 'none'}",
            )
        return wanted
    if len(timed) == 1:
        return timed[0]
    for name in ("latent", "data"):
        if name in timed:
            return name
    if len(points := [name for name in timed if schema[name].folded]) == 1:
        return points[0]
    varying = [name for name, field in schema.items() if field.ragged and not field.axes]
    rows = f"For single rows as examples give Windows(horizon=0, field={varying[0]!r}). " if varying else ""
    raise ConfigError(
        f"windows need one field with time; this cache has {', '.join(timed) or 'none'}",
        hint=f"Name one, as {arg('field', timed[0], call='Windows', setting='training.state_fields')}"
        if timed
        else rows + _KEEP_TIME,
    )


def main_field(schema: Schema, windows: Windows) -> str:
    """Return the field that windows are cut from, or whose rows are examples; the first of several.

    Raises:
        ConfigError: As `time_field`; a field of rows has neither time nor a varying length.
    """
    if not windows.rows:
        return time_field(schema, windows.field)
    lengths = [n for n, f in schema.items() if f.ragged and not (f.folded or f.kept)]
    if windows.field is None:
        timed = any(field.evolves and not field.kept for field in schema.values())
        if len(lengths) != 1 or timed:
            return time_field(schema, None) if timed else _no_rows(lengths)
        return lengths[0]
    names = windows.field if isinstance(windows.field, tuple) else (windows.field,)
    for name in names:
        fits = [*lengths, *(n for n, f in schema.items() if f.evolves and not f.kept and n not in lengths)]
        if name not in fits:
            raise ConfigError(
                f"{arg('windows.field', name, setting='training.state_fields')} has neither time nor a "
                "varying length",
                hint=f"Fields whose rows can be examples: {', '.join(fits) or 'none'}",
            )
    return names[0]


def _no_rows(lengths: Sequence[str]) -> str:
    raise ConfigError(
        "rows as examples need one field with time or of varying length; without time this cache has "
        f"{', '.join(lengths) or 'none'}",
        hint=f"Name one, as {arg('field', lengths[0], call='Windows')}"
        if lengths
        else "Leave windows= out to serve whole records",
    )


def check_conditions(schema: Schema, main: str, *, rows: bool = False) -> None:
    """Refuse what cannot be a condition of the windows of field `main`.

    Args:
        schema: Of the records.
        main: The field that windows are cut from.
        rows: Rows are examples; fields of varying length then give the row of the same place.

    Raises:
        ConfigError: A field has neither time nor a fixed shape, or another number of steps than `main`.
    """
    steps = (schema[main].ragged, schema[main].shape[0])
    for name, field in schema.items():
        if field.axes:  # of particles and meshes: see assembly.py
            continue
        if field.time and (field.ragged, field.shape[0]) != steps:
            raise ConfigError(
                f"fields {main!r} {schema[main].shape} and {name!r} {field.shape} have time axes of "
                "different lengths, so no window of one matches the other",
                hint="Store them in caches of their own",
            )
        if field.ragged and not field.time and not (rows and schema[main].ragged):
            raise ConfigError(
                f"field {name!r} has another length in every record and no time, so it cannot be given with "
                "windows",
                hint="Serve whole records (no windows=), or store the cache without that field",
            )


def state_fields(schema: Schema, windows: Windows) -> tuple[str, ...]:
    """Return the fields that become `z0`, `z1` and `future`, in the order in which they were named."""
    first = main_field(schema, windows)
    return windows.field if isinstance(windows.field, tuple) else (first,)


def condition_width(field: Field) -> int:
    """Return the numbers per example that a condition has: a scalar gives one."""
    sizes = field.step_shape
    return int(np.prod(sizes, dtype=np.int64)) if sizes else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Numbering of examples: record after record, inside a record by start."""

    count: int
    """Examples in all."""
    per_record: int
    """Examples of every record, or 0 where records differ."""
    first: NDArray[np.int64]
    """First example of each record and the total, `(records + 1,)`; empty when all records have the same
    number."""
    start_every: int = 1

    def locate(self, ids: Any, first: Any) -> tuple[Any, Any]:
        """Record and start of each example.

        Args:
            ids: Example numbers, `(n,)`, int64, numpy or torch.
            first: `self.first` in the same library, on the same device.

        Returns:
            Places of records in number order, and starts in steps; both `(n,)`.
        """
        if self.per_record == 1:
            return ids, ids * 0
        if self.per_record:
            record = ids // self.per_record
            return record, (ids - record * self.per_record) * self.start_every
        if isinstance(ids, torch.Tensor):
            record = cast(Any, torch.searchsorted(first, ids, right=True) - 1)
        else:
            record = cast(Any, np.searchsorted(first, ids, side="right") - 1)
        return record, (ids - first[record]) * self.start_every


def number_examples(lengths: NDArray[np.int64] | None, records: int, windows: Windows | None) -> Examples:
    """Count the examples of every record.

    Args:
        lengths: Steps of each record, `(records,)`; None without windows.

    Raises:
        ConfigError: Every trajectory is too short for one window.
    """
    none = np.empty(0, dtype=np.int64)
    if windows is None or lengths is None:
        return Examples(count=records, per_record=1, first=none)
    counts = windows.counts(lengths)
    total = int(counts.sum())
    if records and not total:
        raise ConfigError(
            f"the longest trajectory has {int(lengths.max())} steps, but a window of stride "
            f"{windows.strides[1]} and horizon {windows.horizons[1]} spans {windows.span + 1}",
            hint=f"Choose a smaller {arg('stride')} or {arg('horizon')}",
        )
    if records and int(counts.min()) == int(counts.max()):
        return Examples(count=total, per_record=int(counts[0]), first=none, start_every=windows.start_every)
    first = np.zeros(records + 1, dtype=np.int64)
    np.cumsum(counts, out=first[1:])
    return Examples(count=total, per_record=0, first=first, start_every=windows.start_every)
