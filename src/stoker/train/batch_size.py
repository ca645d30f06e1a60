"""The largest batch that a training step takes, found by taking it.

Doubling until memory is short, then bisection: only a real step shows what activations, gradients, the
optimizer's state and the allocator come to. Model, optimizer and random numbers are put back to the last bit.
"""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stoker.errors import ConfigError, ResourceError
from stoker.plan.resources import is_out_of_memory

# ----------------------------------------------------------------------------------------------------------
# A model, what trains it, and the random numbers, as they were before: each bit, and at the same place.


class TrainingSnapshot:
    """Puts everything back when it is left, also after an error; `restore` does so in between.

    Copies are kept on the CPU, so that the device's memory is what it would be in training. Tensors get their
    values back where they are: tied weights stay tied, and references to them stay valid.

    Args:
        model: Weights, buffers, gradients and training mode.
        others: Optimizers, and whatever has `state_dict` and `load_state_dict`.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = [_OptimizerState(one) for one in others if isinstance(one, Optimizer)]
        rest = [one for one in others if not isinstance(one, Optimizer)]
        self._others = [(one, copy.deepcopy(one.state_dict())) for one in rest]

    def __enter__(self) -> TrainingSnapshot:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._values = [(tensor, _kept(tensor)) for tensor in tensors]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else _kept(parameter.grad))
            for parameter in self._model.parameters()
        ]
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Everything as it was when this was entered."""
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
            for parameter, gradient, value in self._gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)
            for state in self._optimizers:
                state.restore()
        for module, training in self._modes:
            module.training = training
        for one, state in self._others:
            one.load_state_dict(copy.deepcopy(state))
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class _OptimizerState:
    """State and settings of an optimizer; `load_state_dict` would make new tensors, and cast them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._state = [
            (parameter, [(name, value, _copied(value)) for name, value in held.items()])
            for parameter, held in optimizer.state.items()
        ]

    def restore(self) -> None:
        state = self._optimizer.state
        state.clear()  # what a trial has made goes, with its memory
        for parameter, held in self._state:
            state[parameter] = {}
            for name, value, kept in held:
                if isinstance(value, Tensor):
                    value.copy_(kept)
                state[parameter][name] = value if isinstance(value, Tensor) else copy.deepcopy(kept)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [*group]:
                if name != "params" and name not in kept:
                    del group[name]
            group.update(copy.deepcopy(kept))


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:
    return _kept(value) if isinstance(value, Tensor) else copy.deepcopy(value)


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
    """Return the largest number of examples with which `step(model, batch)` runs within memory.

    Args:
        model: Put back as it was: weights, buffers, gradients, training mode.
        batches: A `Loader` or anything that gives batches: its first one is repeated or cut to size, along
            axis 0 of every tensor in it. Or a function that makes a batch of so many examples.
        step: One entire step of training, with `backward()` and `optimizer.step()`; its result is dropped.
        optimizer: What the step changes in addition to the model: an optimizer, or several things with
            `state_dict` and `load_state_dict` (a schedule, a scaler). They are put back as they were too.
        initial: The first number that is tried.
        maximum: The largest number that is tried.
        precision: Bisection ends when the answer is known within this part of itself; 0: to the example.
        steps: Steps of each trial: in the first an optimizer makes its state, the second runs with it.

    Returns:
        A number that was tried and ran. Leave some room below it where sizes vary.

    Raises:
        ConfigError: A number is out of range, or `batches` has no tensor.
        ResourceError: Not even one example fits.
        Exception: Whatever `step` raises that is not a shortage of memory, at once.

    Examples:
        >>> import stoker, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, batch):
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> make = lambda count: torch.ones(count, 8)
        >>> stoker.find_batch_size(model, make, step, optimizer=optimizer, maximum=64)  # all fit
        64
    """
    if not 1 <= initial <= maximum or steps < 1 or not 0 <= precision < 1:
        raise ConfigError(
            f"find_batch_size(initial={initial}, maximum={maximum}, precision={precision}, steps={steps})",
            hint="Expected 1 <= initial <= maximum, 0 <= precision < 1 and at least one step",
        )
    others = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    make = batches if callable(batches) else _repeated(batches)
    with TrainingSnapshot(model, others) as before:

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
            "not even a batch of one example fits into memory with this model and optimizer",
            hint="Use a smaller model or smaller examples, or mixed precision",
        )
    log.info("a batch of %d examples fits%s", good, "" if bad > maximum else f", one of {bad} does not")
    return good


def _try(
    model: nn.Module, make: MakeBatch, step: Callable[[nn.Module, Any], object], count: int, *, steps: int
) -> bool:
    """Return True if steps with so many examples run."""
    fits = True
    try:
        for _ in range(steps):
            step(model, make(count))
        if torch.cuda.is_initialized():
            # A GPU reports an error late: one of this step must not be taken for one of the next.
            torch.cuda.synchronize(_gpu_of(model))
    except (RuntimeError, MemoryError, ResourceError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    return fits


def _gpu_of(model: nn.Module) -> torch.device | None:
    """Return the GPU of a model, which need not be the current one; None: it is on none."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return device if device.type == "cuda" else None


def _let_go() -> None:
    """Give back what the last trial held: not in its `except`, where the error still holds its frames."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _repeated(batches: Iterable[Any]) -> MakeBatch:
    """Return the first batch, repeated or cut to so many examples; a loader's position stays what it was."""
    state = batches.state_dict() if hasattr(batches, "state_dict") else None  # type: ignore[attr-defined]
    one = next(iter(batches), None)
    if state is not None:
        batches.load_state_dict(state)  # type: ignore[attr-defined]
    examples = _examples(one)
    if not examples:
        raise ConfigError(
            f"find_batch_size got batches of type {type(one).__name__} without a tensor of examples",
            hint="Expected a loader, or a function that makes a batch of so many examples",
        )
    return lambda count: _resized(one, examples, count)


def _examples(batch: Any) -> int:
    """Return the length of axis 0 that the first tensor has, or of `index`; 0 without either."""
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
    """Return the batch with `count` examples; what has no axis of examples stays as it is."""
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


# ----------------------------------------------------------------------------------------------------------
# `torch.compile` switched off, for debugging: breakpoints, prints and error lines are those of the code.


class disable_torch_compile:  # noqa: N801 - reads as the function it also is
    """Switches `torch.compile` off, also for functions that are compiled already.

    As a function it holds until `restore`, or for good; in a `with` block until its end.

        disable_torch_compile()

        with disable_torch_compile():
            model(batch)
    """

    def __init__(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    def restore(self) -> None:
        """Restore the setting from before."""
        self._stance.__exit__(None, None, None)

    def __enter__(self) -> disable_torch_compile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
