"""The stage between a batch and whoever trains on it: functions with a random key per example.

A transform draws what it needs from the keys alone, so that its output is part of the pure function
`(seed, epoch, position)` like everything else: stopping, resuming and another world size change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, WindowBatch
from stoker.loader.buffers import lasting
from stoker.loader.keyed import child_keys, example_keys
from stoker.loader.ragged import Join

if TYPE_CHECKING:
    from stoker.loader.engine import Strip
    from stoker.monitor.meter import StallMeter
    from stoker.store.join import Joined

Transform: TypeAlias = "Callable[[Any, Tensor], Any]"
"""`transform(batch, keys)` returns the batch to hand on. `keys` is `(B,)` int64 on the batch's device, one
per example, equal for the same seed, epoch, example and place among the transforms."""


def run(transforms: Sequence[Transform], batch: Any, keys: Tensor, first: int = 0) -> Any:
    """The batch after all transforms from the `first` on, each with keys of its own: two of one kind draw
    different numbers.
    """
    for place, transform in enumerate(transforms[first:], first):
        batch = transform(batch, child_keys(keys, place))
    return batch


def names_of(transforms: Sequence[Transform]) -> tuple[str, ...]:
    """What a state says of transforms: their names, with the settings of those that are dataclasses."""
    return tuple(_name_of(transform) for transform in transforms)


def _name_of(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        settings = (f"{field.name}={_name_of(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(settings)})"
    if isinstance(value, partial):
        return _name_of(value.func)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_name_of, cast('Sequence[object]', value)))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class Columns:
    """Adds the columns of a table to batches; `static` ones are written to the same memory each time."""

    def __init__(self, joined: Joined, *, static: bool) -> None:
        self._joined = joined
        self._static = static
        self._memory: dict[str, Tensor] | None = None

    def added(self, batch: Any) -> Any:
        """The batch with the columns of its examples; beside windows they are conditions, `(B, C)`."""
        windowed = isinstance(batch, WindowBatch)
        found = self._of(batch.index[:, 0].contiguous() if windowed else batch["index"])
        if windowed:
            return batch._replace(cond={**batch.cond, **{n: v.reshape(len(v), -1) for n, v in found.items()}})
        batch.update(found)
        return batch

    def _of(self, numbers: Tensor) -> dict[str, Tensor]:
        if not self._static:
            return self._joined.of(numbers)
        if self._memory is None:
            self._memory = {
                name: lasting((len(numbers), *values.shape[1:]), values.dtype, numbers.device)
                for name, values in self._joined.values.items()
            }
        return self._joined.of(numbers, self._memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What happens to a batch after it was gathered; nothing, unless asked for."""

    join: Join | None
    """What is done to fields of varying length; None: they stay lists."""
    device: torch.device | None
    """Where batches go when they were not made there; None: they stay."""
    pin: bool
    """Copy batches into page-locked memory."""
    transforms: Sequence[Transform]
    seed: int
    columns: Columns | None = None
    """Columns of a table that batches are given before they are transformed."""
    meter: StallMeter | None = None
    """Told how much of a wait was for this."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return any((self.join, self.device is not None, self.pin, self.transforms, self.columns))

    def apply(self, strip: Strip, batches: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Finish the `batches` of a strip."""
        examples, size = strip.examples, strip.size
        for number, made in enumerate(batches):
            batch, begin = made, perf_counter()
            if self.join is not None:
                batch = self.join(batch)
            if self.pin:
                batch = _each(batch, Tensor.pin_memory)
            if self.device is not None:
                batch = _each(batch, partial(Tensor.to, device=self.device, non_blocking=True))
            copied = perf_counter()
            if self.columns is not None:
                batch = self.columns.added(batch)
            if len(self.transforms) > strip.transformed:
                own = torch.as_tensor(examples[number * size : (number + 1) * size], device=_device_of(batch))
                keys = example_keys(self.seed, epoch, own)
                batch = _placed(run(self.transforms, batch, keys, strip.transformed), batch.position)
            if self.meter is not None:
                self.meter.spent("copy", copied - begin)
                self.meter.spent("transform", perf_counter() - copied)
            yield batch


def _placed(made: Any, position: tuple[int, int]) -> Any:
    """What transforms made of a batch, with the place at which a loader goes on after it.

    Raises:
        ConfigError: They made something that cannot carry it.
    """
    if getattr(made, "position", None) is not None:
        return made
    if not isinstance(made, dict):
        raise ConfigError(
            f"the last of transforms= returned {type(made).__name__}, which cannot say where to go on after "
            "it. Expected the batch, changed (`batch._replace(...)` for windows), or a dict"
        )
    batch = RecordBatch(cast("dict[str, Any]", made))
    batch.position = position
    return batch


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, RecordBatch):
        changed = RecordBatch((name, _each(value, change)) for name, value in batch.items())
        changed.position = batch.position
        return changed
    if isinstance(batch, WindowBatch):
        return WindowBatch(*(_each(value, change) for value in batch[:-1]), position=batch.position)
    if isinstance(batch, dict):
        conditions = cast("dict[str, Any]", batch)
        return {name: _each(value, change) for name, value in conditions.items()}
    if isinstance(batch, list):
        return [_each(value, change) for value in cast("list[Any]", batch)]
    return batch


def _device_of(batch: Any) -> torch.device:
    return (batch.index if isinstance(batch, WindowBatch) else batch["index"]).device
