"""The largest batch that a training step takes, found by taking it.

Doubling until memory is short, then bisection: only a real step shows what activations, gradients, the
optimizer's state and the allocator come to. Model, optimizer and random numbers are put back to the last bit.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stoker.errors import ConfigError, ResourceError
from stoker.train.untouched import Untouched

MakeBatch: TypeAlias = Callable[[int], Any]
"""A batch of so many examples."""

log = logging.getLogger("stoker")


def find_batch_size(  # noqa: PLR0913 - the public face; every setting is named by the caller
    model: nn.Module,
    batches: Iterable[Any] | MakeBatch,
    step: Callable[[nn.Module, Any], object],
    *,
    optimizer: Optimizer | Sequence[Any] = (),
    initial: int = 8,
    maximum: int = 4096,
    precision: float = 0.05,
    steps: int = 2,
) -> int:
    """The largest number of examples with which `step(model, batch)` runs within memory.

    Args:
        model: Put back as it was: weights, buffers, gradients, training mode.
        batches: A `Loader` or anything that gives batches: its first one is repeated or cut to size, along
            axis 0 of every tensor in it. Or a function that makes a batch of so many examples.
        step: One whole step of training, with `backward()` and `optimizer.step()`; its result is dropped.
        optimizer: What the step changes besides the model: an optimizer, or several things with
            `state_dict` and `load_state_dict` (a schedule, a scaler). They are put back as they were too.
        initial, maximum: The first number that is tried, and the largest.
        precision: Bisection ends when the answer is known within this part of itself; 0: to the example.
        steps: Steps of each trial: in the first an optimizer makes its state, the second runs with it.

    Returns:
        A number that was tried and ran. Leave some room below it where sizes vary.

    Raises:
        ConfigError: A number is out of range, or `batches` has no tensor.
        ResourceError: Not even one example fits.
        Exception: Whatever `step` raises that is no shortage of memory, at once.
    """
    if not 1 <= initial <= maximum or steps < 1 or not 0 <= precision < 1:
        raise ConfigError(
            f"find_batch_size(initial={initial}, maximum={maximum}, precision={precision}, steps={steps}). "
            "Expected 1 <= initial <= maximum, 0 <= precision < 1 and at least one step"
        )
    others = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    make = batches if callable(batches) else _repeated(batches)
    with Untouched(model, others) as before:

        def fits(count: int) -> bool:
            ran = _try(model, make, step, count, steps=steps)
            before.restore()
            if not ran:
                _let_go()
            return ran

        return _search(fits, initial, maximum, precision)


def _search(fits: Callable[[int], bool], initial: int, maximum: int, precision: float) -> int:
    """Double from `initial` while it fits, then halve the gap between what does and what does not."""
    good, bad, count = 0, maximum + 1, initial
    while count < bad:
        if fits(count):
            good, count = count, max(count + 1, min(2 * count, maximum))
        else:
            bad = count
    while bad - good > max(1, int(good * precision)) and good < maximum:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    if not good:
        raise ResourceError(
            "not even a batch of one example fits into memory with this model and optimizer. Use a smaller "
            "model or smaller examples, or mixed precision"
        )
    log.info("a batch of %d examples fits%s", good, "" if bad > maximum else f", one of {bad} does not")
    return good


def _try(
    model: nn.Module, make: MakeBatch, step: Callable[[nn.Module, Any], object], count: int, *, steps: int
) -> bool:
    """Whether steps with so many examples run."""
    fits = True
    try:
        for _ in range(steps):
            step(model, make(count))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of this step must not be taken for one of the next
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fits = False
    return fits


def _let_go() -> None:
    """Give back what the last trial held: not in its `except`, where the error still holds its frames."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short: torch's own, Python's, or the CPU allocator's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def _repeated(batches: Iterable[Any]) -> MakeBatch:
    """The first batch, repeated or cut to so many examples; a loader's position stays what it was."""
    state = batches.state_dict() if hasattr(batches, "state_dict") else None  # type: ignore[attr-defined]
    one = next(iter(batches), None)
    if state is not None:
        batches.load_state_dict(state)  # type: ignore[attr-defined]
    examples = _examples(one)
    if not examples:
        raise ConfigError(
            f"find_batch_size got batches of type {type(one).__name__} without a tensor of examples. "
            "Expected a loader, or a function that makes a batch of so many examples"
        )
    return lambda count: _resized(one, examples, count)


def _examples(batch: Any) -> int:
    """The length of axis 0 that the first tensor has, or of `index`; 0 without either."""
    index = batch.get("index") if isinstance(batch, Mapping) else getattr(batch, "index", None)
    if isinstance(index, Tensor):
        return len(index)  # fields of varying length are no measure
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    inner = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(inner, Iterable) or isinstance(inner, str | bytes):
        return 0
    return next((found for item in cast("Iterable[Any]", inner) if (found := _examples(item))), 0)


def _resized(batch: Any, examples: int, count: int) -> Any:
    """The batch with `count` examples; what has no axis of examples stays as it is."""
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or len(batch) != examples:
            return batch
        return batch[torch.arange(count, device=batch.device) % examples]
    if isinstance(batch, Mapping):
        return {name: _resized(value, examples, count) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        parts = zip(batch._fields, batch, strict=True)  # type: ignore[attr-defined]
        return type(batch)(**{name: _resized(value, examples, count) for name, value in parts})
    if isinstance(batch, list | tuple):
        items = cast("Sequence[Any]", batch)
        if isinstance(batch, list) and len(items) == examples and all(isinstance(i, Tensor) for i in items):
            return [items[place % examples] for place in range(count)]  # ragged: one tensor per example
        return type(batch)(_resized(item, examples, count) for item in items)
    return batch
