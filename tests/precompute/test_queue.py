"""Groups are fixed by their part; work goes out in whole runs and comes back in a useful order."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.precompute.queue import PartSpan, WorkQueue

PARTS = [PartSpan(offset=0, count=10), PartSpan(offset=10, count=0), PartSpan(offset=10, count=7)]


def queue(missing, bad=()):
    return WorkQueue(PARTS, 4, np.array(missing, np.int64), bad=set(bad).__contains__)


def drain(work_queue, reader=1, workers=1):
    items = []
    while works := work_queue.take(reader, workers):
        items.append([list(work.numbers) for work in works])
    return items


def test_groups_begin_with_their_part_and_are_the_same_whatever_is_missing():
    every = [group for item in drain(queue(range(17))) for group in item]
    assert every == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16]]
    assert [g for item in drain(queue([5, 9, 16])) for g in item] == [[4, 5, 6, 7], [8, 9], [14, 15, 16]]


def test_only_missing_members_are_wanted_and_bad_ones_are_zeros():
    work_queue = queue([4, 5, 6], bad=[5, 7])
    (work,) = work_queue.take(1, 1)
    assert (work_queue.wanted(work), work_queue.absent(work)) == ([4, 6], [5, 7])


def runs_of(length, count):
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def decoded(owners, runs):
    """How many runs are decoded, over their number: each reader decodes what its groups touch, once."""
    touched = {
        (reader, index)
        for reader, groups in owners.items()
        for numbers in groups
        for index, run in enumerate(runs)
        if run.start < numbers.stop and numbers.start < run.stop
    }
    return len(touched) / len(runs)


def share_out(work_queue, speeds):
    """Let workers take items in turns, some more often than others."""
    owners = {reader: [] for reader in speeds}
    idle, turn = set(), 0
    while len(idle) < len(speeds):
        turn += 1
        for reader, every in speeds.items():
            if turn % every == 0 and reader not in idle:
                works = work_queue.take(reader, len(speeds))
                owners[reader] += [work.numbers for work in works]
                idle |= set() if works else {reader}
    return owners


def test_a_reader_goes_on_where_it_was_and_a_second_one_begins_where_a_run_and_a_group_end():
    work_queue = WorkQueue([PartSpan(offset=0, count=64)], 4, np.arange(64), bad=lambda _: False)
    work_queue.follow_runs([range(0, 22), range(22, 36), range(36, 64)], 16 * 1024**2)

    assert [work_queue.take(reader, 2)[0].numbers.start for reader in (1, 1, 2, 1, 2)] == [0, 4, 36, 8, 40]


@pytest.mark.parametrize("speeds", [{1: 1, 2: 1}, {1: 1, 2: 3}, {1: 1, 2: 2, 3: 5, 4: 1}])
@pytest.mark.parametrize(("group", "run"), [(8, 13), (10, 32), (10, 63), (4, 8)])
def test_runs_are_decoded_at_most_1_1_times_by_all_workers_together(speeds, group, run):
    count = 40 * run - 3
    work_queue = WorkQueue([PartSpan(offset=0, count=count)], group, np.arange(count), bad=lambda _: False)
    runs = runs_of(run, count)
    work_queue.follow_runs(runs, group * 1024**2)

    owners = share_out(work_queue, speeds)

    assert sorted(n for groups in owners.values() for group in groups for n in group) == list(range(count))
    assert all(owners.values())
    assert decoded(owners, runs) <= 1.1


def test_a_source_of_one_run_is_shared_by_all_workers():
    work_queue = WorkQueue([PartSpan(offset=0, count=400)], 1, np.arange(400), bad=lambda _: False)
    work_queue.follow_runs([range(400)], 1024**2)
    owners = share_out(work_queue, {1: 1, 2: 1})
    assert min(map(len, owners.values())) > 100


@pytest.mark.parametrize("runs", [[range(8)], [range(4), range(4, 8)]], ids=["one-run", "a-run-each"])
def test_two_groups_are_shared_by_two_workers(runs):
    work_queue = WorkQueue([PartSpan(offset=0, count=8)], 4, np.arange(8), bad=lambda _: False)
    work_queue.follow_runs(runs, 1)

    assert [work_queue.take(reader, 2)[0].numbers.start for reader in (1, 2)] == [0, 4]


def test_a_last_group_that_shares_a_run_stays_with_the_reader_that_has_decoded_it():
    work_queue = WorkQueue([PartSpan(offset=0, count=12)], 4, np.arange(12), bad=lambda _: False)
    work_queue.follow_runs([range(6), range(6, 12)], 64 * 1024**2)

    assert [work_queue.take(1, 2)[0].numbers.start for _ in range(2)] == [0, 4]
    assert work_queue.take(2, 2) == []
    assert work_queue.take(1, 2)[0].numbers.start == 8


def test_the_stretch_of_a_reader_that_left_is_taken_over_whole():
    work_queue = WorkQueue([PartSpan(offset=0, count=64)], 4, np.arange(64), bad=lambda _: False)
    work_queue.follow_runs(runs_of(8, 64), 1024**2)
    first = work_queue.take(1, 1)
    work_queue.leave(1)
    assert work_queue.take(2, 1)[0].numbers.start == first[-1].numbers.stop


def test_work_lost_through_no_fault_comes_first_and_a_failed_group_last_and_elsewhere():
    work_queue = WorkQueue([PartSpan(offset=0, count=16)], 4, np.arange(16), bad=lambda _: False)
    work_queue.follow_runs([range(i, i + 4) for i in range(0, 16, 4)], 64 * 1024**2)
    first, second = work_queue.take(1, 2), work_queue.take(1, 2)
    work_queue.give_back(first[0], avoid=1)
    work_queue.give_back(second[0])
    work_queue.leave(1)

    order = [works[0].numbers.start for works in (work_queue.take(2, 2) for _ in range(3))]
    assert order == [4, 8, 12]
    assert work_queue.take(1, 2) == []
    assert work_queue.take(2, 2)[0].numbers.start == 0
    assert not work_queue.finished
    for _ in range(4):
        work_queue.done(first[0])
    assert work_queue.finished


def test_a_group_all_of_whose_members_were_set_aside_is_not_read():
    bad = set()
    work_queue = WorkQueue([PartSpan(offset=0, count=8)], 4, np.arange(8), bad=bad.__contains__)
    bad |= {0, 1, 2, 3}
    assert [g for item in drain(work_queue) for g in item] == [[4, 5, 6, 7]]


def test_nothing_of_a_part_on_hold_is_handed_out_and_all_of_it_afterwards():
    spans = [PartSpan(offset=0, count=8), PartSpan(offset=8, count=8), PartSpan(offset=16, count=8)]
    queue = WorkQueue(spans, 2, np.arange(24), bad=lambda number: False)
    queue.follow_runs([range(0, 8), range(8, 16), range(16, 24)], 2**23)
    taken = {}
    for held in (frozenset({1}), frozenset()):
        queue.on_hold = held
        works = [work for _ in range(24) for reader in (1, 2) for work in queue.take(reader, 2)]
        taken[held] = [work.numbers.start for work in works]

    assert set(taken[frozenset({1})]).isdisjoint(range(8, 16))
    assert sorted(taken[frozenset({1})] + taken[frozenset()]) == list(range(0, 24, 2))


def test_a_second_try_waits_while_its_part_is_on_hold():
    queue = WorkQueue([PartSpan(offset=0, count=2)], 2, np.arange(2), bad=lambda number: False)
    (work,) = queue.take(1, 1)
    queue.give_back(work, avoid=1)

    queue.on_hold = frozenset({0})
    assert queue.take(2, 2) == []
    assert not queue.finished
    queue.on_hold = frozenset()
    assert queue.take(2, 2) == [work]
