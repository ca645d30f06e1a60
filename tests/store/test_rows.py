"""Which rows serve, against the plainest way to say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.store.index import choose_rows, numbers_of, runs_of, spread


def served(chosen: list[NDArray[np.int64]]) -> list[dict[int, int]]:
    """Row by number, for each shard."""
    return [{n + k: row + k for row, n, c in own.tolist() for k in range(c)} for own in chosen]


def plainly(numbers: list[Any], bad: list[set[int]], offsets: list[int]) -> list[dict[int, int]]:
    """Shard after shard and row after row: whoever has a number first serves it."""
    taken: set[int] = set()
    found: list[dict[int, int]] = []
    for own, broken, offset in zip(numbers, bad, offsets, strict=True):
        found.append({})
        for row, number in enumerate(own.tolist()):
            if row not in broken and number + offset not in taken:
                taken.add(number + offset)
                found[-1][number] = row
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_number_serves_from_the_first_shard_and_row_that_is_sound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = int(rng.integers(1, 7))
    offsets = [int(rng.choice([0, 40])) for _ in range(shards)]
    numbers = []
    for _ in range(shards):
        stretches = [
            np.arange(a, a + int(rng.integers(1, 9))) for a in rng.integers(0, 30, rng.integers(1, 4))
        ]
        numbers.append(np.concatenate(stretches))
    bad = [{*rng.integers(0, len(own), rng.integers(0, 3)).tolist()} for own in numbers]

    chosen = choose_rows([runs_of(own) for own in numbers], [sorted(rows) for rows in bad], offsets)

    assert served(chosen) == plainly(numbers, bad, offsets)
    for own in chosen:
        assert np.all(np.diff(own[:, 1]) > 0), "sorted by number"
        joins = (own[1:, 0] == own[:-1, 0] + own[:-1, 2]) & (own[1:, 1] == own[:-1, 1] + own[:-1, 2])
        assert not joins.any(), "a run is as long as it can be"


def test_a_run_costs_the_same_however_long_it_is() -> None:
    """A byte per record would be 10 GB here."""
    runs = [np.array([[0, first, 10**9]]) for first in range(0, 10**10, 10**9)]

    chosen = choose_rows(runs, [()] * 10, [0] * 10)

    assert [own.tolist() for own in chosen] == [own.tolist() for own in runs]


def test_numbers_come_back_from_their_runs() -> None:
    numbers = np.array([7, 8, 9, 2, 3, 30, 29], np.int64)

    assert numbers_of(runs_of(numbers)).tolist() == numbers.tolist()
    assert len(runs_of(np.empty(0, np.int64))) == 0


def test_runs_are_spread_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.store.index.BLOCK", 10)
    rng = np.random.default_rng(0)
    first, count = rng.integers(0, 1000, 50), rng.choice([0, 1, 3, 40], 50)

    found = spread(first, count, np.int32)

    assert found.dtype == np.int32
    assert found.tolist() == [n + k for n, c in zip(first, count, strict=True) for k in range(c)]
    assert not len(spread(first[:0], count[:0]))
