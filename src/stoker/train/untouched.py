"""A model, what trains it, and the random numbers, as they were before: each bit, and at the same place."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Untouched:
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

    def __enter__(self) -> Untouched:
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
