"""Slices: whole groups, every sample in exactly one, an even share for each worker that has nothing."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.extras.ray import task as module
from stoker.extras.ray.task import Slices
from stoker.store import Recipe

GROUP = 4


def recipe(*counts, group=GROUP):
    parts = [{"name": f"part{i}", "count": count} for i, count in enumerate(counts)]
    return Recipe(entries={"source": {"parts": parts}, "group": {"samples": group, "steps": None}})


def slices(counts, missing=None, runs=()):
    whole = np.arange(sum(counts))
    return Slices(recipe(*counts), whole if missing is None else np.array(missing), runs)


def drained(some, idle=1):
    found = []
    while not some.empty:
        found.append(some.take(idle).numbers)
    return found


@pytest.mark.parametrize("missing", [None, [0, 3, 5, 9, 10, 11, 12, 22]], ids=["all", "some"])
@pytest.mark.parametrize("idle", [2, 3, 5, 50])
def test_each_sample_is_in_one_slice_and_a_group_is_never_cut(missing, idle):
    some = slices((10, 13), missing)
    found = [some.take(idle).numbers]
    some.put_back(found.pop())  # a worker that ended before it began
    found += drained(some, idle)

    assert sorted(np.concatenate(found).tolist()) == (missing or list(range(23)))
    # Groups begin anew in each part: 0-3, 4-7, 8-9, then 10-13, ...
    groups = [{n // GROUP if n < 10 else 3 + (n - 10) // GROUP for n in numbers} for numbers in found]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_all_that_is_left_is_dealt_out_evenly_to_those_that_have_nothing():
    some = slices((400,))

    found = [len(some.take(idle).numbers) for idle in (4, 3, 2, 1)]

    assert found == [100] * 4
    assert some.empty


def test_what_a_worker_did_not_get_to_is_cut_anew():
    some = slices((400,))
    first = some.take(1)
    assert some.empty

    some.put_back(first.numbers[-200:])

    assert [some.take(idle).span for idle in (2, 1)] == ["200-299", "300-399"]
    some.put_back(first.numbers[:0])
    assert some.empty


def test_a_slice_ends_where_a_run_of_the_source_ends_if_that_is_near():
    runs = [range(first, first + 90) for first in range(0, 4000, 90)]  # no multiple of a group
    some = slices((4000,), runs=runs)

    ends = [int(some.take(idle).numbers[-1]) + 1 for idle in (4, 3, 2)]

    # Each end is that of the group in which a run ends.
    assert [-(-end // GROUP) * GROUP for end in (990, 1980, 2970)] == ends
    far = slices((4000,), runs=[range(500), range(500, 4000)])
    assert len(far.take(4).numbers) == 1000


def test_a_slice_is_never_more_than_can_be_sent(monkeypatch):
    monkeypatch.setattr(module, "MOST_SAMPLES", 40)

    assert [len(numbers) for numbers in drained(slices((100,)))] == [40, 40, 20]


def test_what_a_lost_worker_stored_is_not_handed_out_again():
    some = slices((8,))
    lost, rest = some.take(2), some.take(1)
    assert some.empty

    some.give_back(lost, np.array([2, 3, 7]))

    again = some.take(1)
    assert some.empty
    assert (again.numbers.tolist(), again.losses, again.key) == ([2, 3], 1, lost.key)
    some.give_back(rest, np.array([], np.int64))
    assert some.empty
