"""Slices: whole groups, every sample in exactly one, few at a time towards the end."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.scale.slices import FIRST_GROUPS, Slices
from stoker.store import Recipe

GROUP = 4


def recipe(*counts, group=GROUP):
    parts = [{"name": f"part{i}", "count": count} for i, count in enumerate(counts)]
    return Recipe(entries={"source": {"parts": parts}, "group": {"samples": group, "steps": None}})


def slices(counts, missing=None, runs=(), longest_s=60.0):
    whole = np.arange(sum(counts))
    return Slices(recipe(*counts), whole if missing is None else np.array(missing), runs, longest_s=longest_s)


def drained(some, workers, seconds=1.0):
    found = []
    while not some.empty:
        found.append(some.take(workers))
        some.learn(found[-1], seconds)
    return found


@pytest.mark.parametrize("missing", [None, [0, 3, 5, 9, 10, 11, 12, 22]], ids=["all", "some"])
def test_each_sample_is_in_one_slice_and_a_group_is_never_cut(missing):
    found = drained(slices((10, 13), missing), workers=3)

    assert np.concatenate([one.numbers for one in found]).tolist() == (missing or list(range(23)))
    # Groups begin anew in each part: 0-3, 4-7, 8-9, then 10-13, ...
    groups = [{n // GROUP if n < 10 else 3 + (n - 10) // GROUP for n in one.numbers} for one in found]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_a_slice_costs_at_most_its_time_and_the_last_ones_are_short():
    some = slices((40_000,), longest_s=10.0)

    first = some.take(2)
    some.learn(first, len(first.numbers) / GROUP / 100)  # a hundred groups a second
    found = []
    while not some.empty:
        found.append(some.take(2))
        some.learn(found[-1], len(found[-1].numbers) / GROUP / 100)

    sizes = [len(one.numbers) // GROUP for one in found]
    assert len(first.numbers) == GROUP * FIRST_GROUPS
    assert max(sizes) == 1000  # ten seconds
    assert sizes == sorted(sizes, reverse=True)
    assert 200 <= sizes[-2] < 500  # two seconds at least, and less than what one worker would wait for


def test_a_slice_ends_where_a_run_of_the_source_ends():
    runs = [range(first, first + 100) for first in range(0, 4000, 100)]
    found = drained(slices((4000,), runs=runs), workers=4, seconds=1.0)

    ends = [one.numbers[-1] + 1 for one in found[1:]]  # the first is shorter than a run
    assert len(ends) > 2
    assert [end for end in ends if end % 100] == []


def test_what_a_lost_worker_stored_is_not_handed_out_again():
    some = slices((8,))
    lost = some.take(1)
    rest = drained(some, workers=1)

    assert some.give_back(lost, np.array([2, 3, 7]))
    again = some.take(1)
    assert some.empty
    assert (again.numbers.tolist(), again.losses, again.key) == ([2, 3], 1, lost.key)
    assert not some.give_back(rest[0], np.array([], np.int64))
    assert some.empty
