"""Time a loop from inside the loader that it iterates: no step function has to be known.

The loop is first given its own batches, then the last of them again and again, then one of the same form with
made-up numbers that lies on the device. What passes between handing a batch over and being asked for the next
is the step; what passes in between is the wait. The products of one more step are counted, not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from stoker.profile.count import StepCount

Part: TypeAlias = Literal["full", "cached", "synthetic"]
WARM = 2
"""Batches before the clock starts: the first ones start workers, allocate, and choose kernels."""


class Enough(BaseException):
    """Ends the loop that was measured; no error, so that nothing but `finally` blocks sees it."""


@dataclass(slots=True)
class Times:
    """Seconds of every step, and of the wait before it."""

    waits_s: list[float] = field(default_factory=list[float])
    steps_s: list[float] = field(default_factory=list[float])

    @property
    def wait_s(self) -> float:
        """Mean wait: stragglers count, as they do in an epoch."""
        return statistics.fmean(self.waits_s) if self.waits_s else 0.0

    @property
    def step_s(self) -> float:
        """Median step."""
        return statistics.median(self.steps_s) if self.steps_s else 0.0


class Probe:
    """Iterates batches for a loop until all three parts are timed, then raises `Enough` in it."""

    def __init__(self, batches: Iterable[Any], *, steps: int, device: torch.device) -> None:
        self.times: dict[Part, Times] = {"full": Times(), "cached": Times(), "synthetic": Times()}
        self.batch: Any = None
        """The last batch of the loop's own."""
        self.flops: float | None = None
        """Operations in matrix products and convolutions of a step; None: they could not be counted."""
        self.calls = 0
        """Calls of kernels in that step."""
        self.counting: StepCount | None = None
        """Counts while the last step goes on: code that fails under it had been timed by then."""
        self._batches, self._steps, self._device = batches, steps, device

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._batches)
        yield from self._timed("full", lambda: next(source, None))
        if self.batch is None:
            return
        yield from self._timed("cached", lambda: self.batch)
        made_up = synthetic(self.batch, self._device)
        yield from self._timed("synthetic", lambda: made_up)
        self.counting = StepCount()
        yield made_up
        self.flops, self.calls = self.counting.flops, self.counting.calls
        raise Enough

    def close(self) -> None:
        """Count no more."""
        counting, self.counting = self.counting, None
        if counting is not None:
            counting.close()

    def _timed(self, part: Part, take: Callable[[], Any]) -> Iterator[Any]:
        times = self.times[part]
        for number in range(WARM + self._steps):
            begin = time.perf_counter()
            batch = take()
            if batch is None:  # a loader shorter than that
                return
            if part == "full":
                self.batch = batch
            handed = time.perf_counter()
            yield batch
            self._finish()
            if number >= WARM:
                times.waits_s.append(handed - begin)
                times.steps_s.append(time.perf_counter() - handed)

    def _finish(self) -> None:
        """Wait for the GPU, whose queue runs ahead of the clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def over_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of lists, tuples and mappings with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        items = cast("Mapping[Any, Any]", batch).items()
        return {name: over_tensors(value, change) for name, value in items}
    if isinstance(batch, tuple) and hasattr(cast("Any", batch), "_fields"):
        return type(cast("Any", batch))(*(over_tensors(value, change) for value in cast("Any", batch)))
    if isinstance(batch, list | tuple):
        values = [over_tensors(value, change) for value in cast("list[Any]", batch)]
        return values if isinstance(batch, list) else tuple(values)
    return batch


def synthetic(batch: Any, device: torch.device) -> Any:
    """A batch like this one on the device: noise for floats, the same values for labels and masks."""

    def made_up(tensor: Tensor) -> Tensor:
        return torch.randn_like(tensor, device=device) if tensor.is_floating_point() else tensor.to(device)

    return over_tensors(batch, made_up)


def size_of(batch: Any) -> tuple[int, int]:
    """Bytes of a batch, and its examples: the length of its first tensor that has one."""
    sizes: list[int] = []
    lengths: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        if tensor.ndim:
            lengths.append(len(tensor))
        return tensor

    over_tensors(batch, look)
    return sum(sizes), lengths[0] if lengths else 1
