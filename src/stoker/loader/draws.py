"""Examples drawn by weight: how often is asked for, and draws without repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """How often each record is drawn: for `weights=`, where numbers alone do not say enough."""

    values: Sequence[float] | NDArray[Any] = field(kw_only=False)
    """One per stored record in number order, or per entry of `indices=`; at least 0, not all 0."""
    samples: int | None = None
    """Examples of an epoch; None: as many as there are."""
    replacement: bool = True
    """Whether an example may be drawn again in the same epoch."""

    def __post_init__(self) -> None:
        """Refuse an epoch without examples."""
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"Weights(samples={self.samples}). Expected at least 1, or None")


def without_repeats(
    weights: NDArray[np.float64], keys: NDArray[np.uint64], samples: int
) -> NDArray[np.int64]:
    """Draw `samples` examples one after another by weight, each from those that are left.

    The lowest of exponential numbers, each divided by its weight (Efraimidis and Spirakis, 2006).

    Args:
        weights: One per example; `samples` of them at least are above 0.
        keys: Random, one per example.
    """
    possible = np.flatnonzero(weights)
    uniform = ((keys[possible] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    times = -natural_log(uniform) / weights[possible]
    return possible[np.argsort(times, kind="stable")[:samples]]


def natural_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm by additions, products and quotients alone, to 15 digits: the same bits on every machine.

    A library's differs in the last bit from one processor to the next, and so would the order of examples.
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < np.sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    ratio = (mantissa - 1) / (mantissa + 1)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for odd in range(21, 0, -2):
        total = total * square + 1 / odd
    return 2 * ratio * total + exponent * 0.6931471805599453
