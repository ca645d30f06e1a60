"""What reads on is given time, what does not is not, and nothing lasts for ever."""

from __future__ import annotations

import os

import pytest

from stoker.runtime.processes.child import MOST_DEADLINES, ProgressTimeout


@pytest.fixture
def judged(monkeypatch):
    """A judge of a process whose bytes the test decides: `judged.bytes`."""
    monkeypatch.setattr(ProgressTimeout, "_count", lambda self: self.bytes)
    patience = ProgressTimeout(1)
    patience.bytes = 100
    return patience


def test_what_does_not_move_is_overdue_at_its_deadline(judged):
    assert judged.due(10, 2) == 11
    assert not judged.overdue(2, 11)
    assert judged.due(10, 2) == 12
    assert judged.overdue(2, 12)


def test_what_reads_on_is_overdue_one_deadline_after_its_last_byte_at_the_latest(judged):
    judged.due(10, 2)
    judged.overdue(2, 11)
    judged.bytes += 1  # after 11, before 12
    assert not judged.overdue(2, 12)
    assert judged.due(10, 2) == 13
    assert judged.overdue(2, 13)


def test_reading_on_for_ever_is_a_hang_as_well(judged):
    now, looks = judged.due(0, 2), 0
    while not judged.overdue(2, now):
        judged.bytes += 1
        now = judged.due(0, 2)
        looks += 1
        assert looks < 100
    assert now == MOST_DEADLINES * 2


def test_a_new_beat_starts_anew(judged):
    judged.due(10, 2)
    judged.overdue(2, 11)
    assert judged.due(11.5, 2) == 12.5
    assert not judged.overdue(2, 12.5)


def test_looked_at_late_it_still_gets_a_moment_to_show_that_it_moves(judged):
    judged.due(10, 2)
    assert not judged.overdue(2, 20)
    assert judged.due(10, 2) == 20.5


def test_the_kernel_counts_what_a_process_reads(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10_000))
    patience = ProgressTimeout(os.getpid())
    before = patience._count()
    (tmp_path / "file").read_bytes()
    assert patience._count() >= before + 10_000
    assert ProgressTimeout(2**22 + 1)._count() == 0
