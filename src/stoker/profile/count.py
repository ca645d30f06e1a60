"""What one step asks of any device: operations in matrix products, and calls of kernels."""

# Torch's modes carry no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode  # the place that torch's notes on it name
from torch.utils.flop_counter import FlopCounterMode

NO_WORDS: Mapping[str, Any] = MappingProxyType({})


class _Calls(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or NO_WORDS))


class StepCount:
    """Counts from when it is made until `close`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._products = self._stack.enter_context(FlopCounterMode(display=False))
        self._calls = self._stack.enter_context(_Calls())

    @property
    def flops(self) -> float:
        """Operations in matrix products and convolutions so far."""
        return float(self._products.get_total_flops())

    @property
    def calls(self) -> int:
        """Calls of kernels so far; views are none."""
        return self._calls.count

    def close(self) -> None:
        """Count no more."""
        self._stack.close()
