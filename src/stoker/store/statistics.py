"""Statistics of stored values, gathered while they are written: count, mean, std, min, max.

Sums are float64 and additive, so partial statistics of shards merge into those of the cache. Per channel
(last axis) where there are at most 64. The order of addition follows the order of writing; merged results
are rounded to 9 significant digits, which hides it: count, min and max are exact, mean and std agree to
1e-9 of the root mean square, for equal records in any order and any shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.schema import Field

MAX_CHANNELS = 64
CHUNK = 32_768
"""Elements converted at a time: stays in the core's cache, below the size at which torch starts threads."""
_BYTES = ("uint8", "int8", "bool")
LANES = 2048
"""Columns that sums run over side by side: adding wide rows is fast, adding rows of a few channels is not."""

Partial: TypeAlias = "dict[str, Any]"
"""Per channel `count` of finite values, `sum`, `squares`, `min`, `max`; and `nonfinite` values in all."""


def channel_count(field: Field) -> int:
    """Channels that get statistics of their own; 1: the field as a whole."""
    axes = field.shape[1:] if field.time or field.ragged else field.shape
    return axes[-1] if len(axes) and 1 <= axes[-1] <= MAX_CHANNELS else 1


class Accumulator:
    """Running sums of one field of one shard."""

    def __init__(self, field: Field) -> None:
        self._channels = channel_count(field)
        self._width = max(1, LANES // self._channels) * self._channels
        self._count = np.zeros(self._channels, np.int64)
        self._nonfinite = 0
        # One buffer for all chunks: a fresh one each time would be a fresh mapping, and twice as slow.
        # float32 adds up the squares of bytes exactly too, over the few rows of a chunk, in half the time.
        exact = field.dtype in _BYTES and not field.packed
        dtype = torch.float32 if exact else torch.float64
        self._buffer = torch.empty(max(CHUNK, self._width), dtype=dtype, device="cpu")
        self._sum, self._squares = np.zeros(self._width), np.zeros(self._width)
        self._min, self._max = np.full(self._width, np.inf), np.full(self._width, -np.inf)

    def update(self, values: Tensor) -> None:
        """Add stored values, `(n, *shape)`, any storable dtype, CPU, contiguous."""
        flat = values.reshape(-1)
        step = max(1, CHUNK // self._width) * self._width
        for begin in range(0, len(flat), step):
            chunk = flat[begin : begin + step]
            self._add(self._buffer[: len(chunk)].copy_(chunk).numpy())

    def _add(self, values: NDArray[np.floating[Any]]) -> None:
        whole = len(values) - len(values) % self._width
        table, rest = values[:whole].reshape(-1, self._width), values[whole:]
        with np.errstate(invalid="ignore"):  # infinities of both signs; found right below
            total = table.sum(0)
            finite = math.isfinite(float(total.sum()) + float(rest.sum()))
        if not finite:
            self._add_finite_only(values)
            return
        self._count += len(values) // self._channels
        if whole:
            self._sum += total
            self._squares += np.einsum("ij,ij->j", table, table)
            np.minimum(self._min, table.min(0), out=self._min)
            np.maximum(self._max, table.max(0), out=self._max)
        lanes = slice(0, len(rest))
        self._sum[lanes] += rest
        self._squares[lanes] += rest * rest
        np.minimum(self._min[lanes], rest, out=self._min[lanes])
        np.maximum(self._max[lanes], rest, out=self._max[lanes])

    def _add_finite_only(self, values: NDArray[np.floating[Any]]) -> None:
        table, lanes = values.reshape(-1, self._channels), slice(0, self._channels)
        finite = np.isfinite(table)
        self._nonfinite += int(finite.size - finite.sum())
        self._count += finite.sum(0)
        kept = np.where(finite, table, 0.0)
        self._sum[lanes] += kept.sum(0)
        self._squares[lanes] += np.square(kept).sum(0)
        np.minimum(self._min[lanes], np.where(finite, table, np.inf).min(0), out=self._min[lanes])
        np.maximum(self._max[lanes], np.where(finite, table, -np.inf).max(0), out=self._max[lanes])

    def partial(self) -> Partial:
        """What a shard's header carries."""
        lanes = (-1, self._channels)
        return {
            "count": self._count.tolist(),
            "nonfinite": self._nonfinite,
            "sum": self._sum.reshape(lanes).sum(0).tolist(),
            "squares": self._squares.reshape(lanes).sum(0).tolist(),
            "min": _plain(self._min.reshape(lanes).min(0)),
            "max": _plain(self._max.reshape(lanes).max(0)),
        }


def widest_partial(field: Field) -> Partial:
    """A partial whose JSON is at least as long as any other of this field; reserves room in a header."""
    long = [-2.2250738585072014e-308] * channel_count(field)
    count = [1 << 62] * channel_count(field)
    return {
        "count": [*count],
        "nonfinite": 1 << 62,
        "sum": [*long],
        "squares": [*long],
        "min": [*long],
        "max": [*long],
    }


def summarise(partials: Iterable[Partial]) -> dict[str, Any]:
    """Merge partials of one field into readable statistics.

    Returns:
        `count`, `nonfinite`, `mean`, `std` (of the population), `min`, `max` over finite values, None where
        there are none; and the last four again as lists under `channels`, when there are several.
    """
    merged = [*partials]
    if not merged:
        return {"count": 0, "nonfinite": 0, "mean": None, "std": None, "min": None, "max": None}
    count: NDArray[np.int64] = np.array([p["count"] for p in merged], np.int64).sum(0)
    total, squares = (np.array(_exact_sums([p[key] for p in merged])) for key in ("sum", "squares"))
    lowest = _extreme([p["min"] for p in merged], min)
    highest = _extreme([p["max"] for p in merged], max)
    result: dict[str, Any] = {
        "count": int(count.sum()),
        "nonfinite": sum(p["nonfinite"] for p in merged),
        **_moments(int(count.sum()), math.fsum(total), math.fsum(squares)),
        "min": _extreme([[v] for v in lowest], min)[0],
        "max": _extreme([[v] for v in highest], max)[0],
    }
    if len(count) > 1:
        moments = [
            _moments(int(n), float(s), float(q)) for n, s, q in zip(count, total, squares, strict=True)
        ]
        result["channels"] = {
            "mean": [m["mean"] for m in moments],
            "std": [m["std"] for m in moments],
            "min": lowest,
            "max": highest,
        }
    return result


def _moments(count: int, total: float, squares: float) -> dict[str, float | None]:
    if not count:
        return {"mean": None, "std": None}
    mean = total / count
    variance = max(0.0, squares / count - mean * mean)
    scale = math.sqrt(max(squares, 0.0) / count)
    return {"mean": _rounded(mean, scale), "std": _rounded(math.sqrt(variance), scale)}


def _rounded(value: float, scale: float) -> float:
    """`value` to 9 significant digits of `scale`."""
    if not math.isfinite(value) or not scale:
        return value if math.isfinite(value) else 0.0
    return round(value, 8 - math.floor(math.log10(scale))) + 0.0


def _exact_sums(columns: Sequence[Any]) -> list[float]:
    return [math.fsum(values) for values in zip(*columns, strict=True)]


def _extreme(columns: Sequence[Any], pick: Any) -> list[float | None]:
    return [pick((v for v in values if v is not None), default=None) for values in zip(*columns, strict=True)]


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
