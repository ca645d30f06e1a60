"""Rows of shards that serve: arithmetic on runs, so that it costs O(runs) and not O(records).

A run is `(row, first number, count)`: consecutive rows that hold consecutive numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

BLOCK = 1 << 20
"""Records that are spread at a time, in 16 MiB; more where one run has more."""


def runs_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the runs in the numbers of consecutive rows from 0 on: `(k, 3)`.

    >>> runs_of(np.array([4, 5, 6, 2, 3])).tolist()
    [[0, 4, 3], [3, 2, 2]]
    """
    if not len(numbers):
        return np.empty((0, 3), np.int64)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1]).astype(np.int64)
    return np.stack([begins, numbers[begins], np.diff(begins, append=len(numbers))], axis=1)


def numbers_of(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number in each row that runs cover, in their order.

    >>> numbers_of(np.array([[0, 4, 3], [3, 2, 2]])).tolist()
    [4, 5, 6, 2, 3]
    """
    return spread(runs[:, 1], runs[:, 2])


def choose_rows(
    runs: Sequence[NDArray[np.int64]], bad: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Return which rows of each shard serve: runs `(k, 3)`, sorted by number.

    A number stored twice is served from the first shard in the list, and its first row there.

    Args:
        runs: What each shard holds, in part-local numbers.
        bad: Rows of each shard that never serve.
        offsets: Global number of the first sample of each shard's part.
    """
    if not runs:
        return []
    sound = [without_rows(own, rows) if len(rows) else own for own, rows in zip(runs, bad, strict=True)]
    shard = np.repeat(np.arange(len(sound)), [len(own) for own in sound])
    base = np.array(offsets, np.int64)
    table = np.column_stack([shard, np.concatenate(sound)])
    table[:, 2] += base[shard]
    table = table[np.argsort(table[:, 2], kind="stable")]
    contested = _contested(table[:, 2], table[:, 3])
    if contested.any():
        table = np.concatenate([table[~contested], _settle(table[contested])])
    table = table[np.lexsort((table[:, 2], table[:, 0]))]
    table[:, 2] -= base[table[:, 0]]
    return np.split(table[:, 1:], np.searchsorted(table[:, 0], np.arange(1, len(sound))))


def without_rows(runs: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
    """Return the runs with some rows cut out."""
    numbers = numbers_of(runs)
    places = spread(runs[:, 0], runs[:, 2])
    keep = ~np.isin(places, rows)
    return _joined(np.zeros(int(keep.sum()), np.int64), places[keep], numbers[keep])[:, 1:]


def _contested(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the runs, sorted by `first`, may share a number with another one."""
    reach = np.maximum.accumulate(first + count)
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = first[1:] >= reach[:-1]
    cluster = np.cumsum(fresh) - 1
    return np.bincount(cluster)[cluster] > 1 if len(first) else fresh


def _settle(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return runs `(k, 4)` of (shard, row, number, count) in which each number comes once."""
    count = table[:, 3]
    shard, row, number = (
        np.repeat(table[:, 0], count),
        spread(table[:, 1], count),
        spread(table[:, 2], count),
    )
    order = np.lexsort((row, shard, number))
    shard, row, number = shard[order], row[order], number[order]
    first = np.concatenate([[True], np.diff(number) != 0])
    return _joined(shard[first], row[first], number[first])


def _joined(shard: NDArray[np.int64], row: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return runs `(k, 4)` of consecutive rows and numbers in one shard."""
    breaks = (np.diff(number) != 1) | (np.diff(shard) != 0) | (np.diff(row) != 1)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(number)), np.bool_), breaks]))
    counts = np.diff(begins, append=len(number))
    return np.stack([shard[begins], row[begins], number[begins], counts], axis=1)


def spread(first: NDArray[np.int64], count: NDArray[np.int64], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """`first`, `first + 1`, ... of each run, one after another.

    Made in blocks, so that at its peak it takes no more memory than what comes out.

    >>> spread(np.array([4, 0]), np.array([3, 2])).tolist()
    [4, 5, 6, 0, 1]
    """
    ends = np.cumsum(count)
    out = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    begin = done = 0
    while begin < len(count):
        stop = max(begin + 1, int(np.searchsorted(ends, done + BLOCK, side="right")))
        own, end = slice(begin, stop), int(ends[stop - 1])
        before = ends[own] - count[own] - done
        out[done:end] = np.repeat(first[own] - before, count[own]) + np.arange(end - done, dtype=np.int64)
        begin, done = stop, end
    return out
