"""Define what a loader hands out: whole records, or windows cut from trajectories."""

from __future__ import annotations

import sys
import threading
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from stoker.units import MIB


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


class RecordBatch(dict[str, Any]):
    """One batch of whole records: `{field: (B, *shape)}` and `index`, the sample indices, `(B,)` int64.

    A field of varying length is a list of B tensors. The memory is the batch's own: nothing that was handed
    out is ever written to again, except in a loader made with `static=True`.
    """

    __slots__ = ("position",)

    position: tuple[int, int]
    """Epoch and example at which a loader resumes after this batch: `loader.state_dict(batch.position)`."""


class WindowBatch(NamedTuple):
    """One batch of windows; B counts windows. The memory is the batch's own, as in `RecordBatch`."""

    z0: Any
    """States at `start`, `(B, *step)`; with several state fields a dict of them, as are z1 and future."""
    z1: Any
    """States one stride later, `(B, *step)`."""
    future: Any
    """The `horizon - 1` states after `z1`, `(B, horizon - 1, *step)`; None at horizon 1."""
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

    @property
    def input_fields(self) -> dict[str, Tensor]:
        """The raw fields at z0, `{name: (B, *shape)}`, of a cache that keeps some (`precompute.keep`)."""
        return {name[:-1]: v for name, v in self.cond.items() if v.ndim > 2 and name.endswith("0")}


class TaskBatch(NamedTuple):
    """One batch of windows of a `Mixture`: a `WindowBatch`, value for value, and whose its examples are."""

    z0: Tensor
    """As in `WindowBatch`; so are the five that follow."""
    z1: Tensor
    future: Tensor | None
    cond: dict[str, Tensor]
    """The conditions of all caches by name, sorted, `(B, C)`; zeros where a cache has none of that name."""
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - the name scripts rely on
    """Sample index in its own cache, and start, `(B, 2)` int64."""
    position: tuple[int, int]
    task: str | None
    """Name of the cache that every example is from; None: they are from several, see `tasks`."""
    tasks: Tensor
    """For each example the place of its cache in `mixture.names`, `(B,)` int64."""
    mask: dict[str, Tensor]
    """By condition which of its numbers the example's cache has, `(B, C)` bool."""


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
    if device.type == "cuda" and tensor.device.type == "cpu":
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
