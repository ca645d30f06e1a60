"""What a loader hands out: whole records, or windows cut from trajectories."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class RecordBatch(dict[str, Any]):
    """One batch of whole records: `{field: (B, *shape)}` and `index`, the sample numbers, `(B,)` int64.

    A field of varying length is a list of B tensors. The memory is the batch's own: nothing that was handed
    out is ever written to again, except in a loader made with `static=True`.
    """

    __slots__ = ("position",)

    position: tuple[int, int]
    """Epoch and example at which a loader goes on after this batch: `loader.state_dict(batch.position)`."""


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
    """Sample number and start, `(B, 2)` int64."""
    position: tuple[int, int]
    """Epoch and example at which a loader goes on after this batch: `loader.state_dict(batch.position)`."""

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
    """Sample number in its own cache, and start, `(B, 2)` int64."""
    position: tuple[int, int]
    task: str | None
    """Name of the cache that every example is from; None: they are from several, see `tasks`."""
    tasks: Tensor
    """For each example the place of its cache in `mixture.names`, `(B,)` int64."""
    mask: dict[str, Tensor]
    """By condition which of its numbers the example's cache has, `(B, C)` bool."""
