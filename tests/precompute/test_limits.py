"""Losing workers ends a run when bad samples do not explain it."""

from __future__ import annotations

import pytest

from stoker.errors import WorkerError
from stoker.precompute.workers import LossLimits


def lose(limits, count, *, attempt=1, quarantined=0):
    """Lose that many of two workers, checking after each."""
    for _ in range(count):
        limits.lost(attempt=attempt)
        limits.check(2, quarantined, "data/a.h5: sample 3, attempt 1 of 2: killed")


def test_workers_lost_in_a_row_end_a_run_with_the_last_cause():
    limits = LossLimits(0.001)
    lose(limits, 20)
    with pytest.raises(WorkerError, match=r"21 workers were lost in a row.*data/a\.h5: sample 3, attempt 1"):
        lose(limits, 1)


def test_a_sample_read_in_between_starts_the_row_anew():
    limits = LossLimits(0.001)
    for _ in range(10):
        lose(limits, 15)
        limits.delivered(1000)
    assert limits.losses == 150


def test_second_tries_that_fail_as_expected_are_no_row():
    """They come one after another at the end."""
    limits = LossLimits(0.001)
    limits.delivered(1000)
    lose(limits, 100, attempt=2, quarantined=50)
    assert limits.losses == 100
    with pytest.raises(WorkerError, match="in a row"):  # first tries are a row
        lose(limits, 21, attempt=1, quarantined=50)


def test_one_reader_for_every_other_sample_is_too_many_unless_allowed():
    strict, lenient = LossLimits(0.001), LossLimits(0.9)
    for _ in range(26):
        for limits in (strict, lenient):
            limits.delivered(1)
            lose(limits, 1)
    lose(lenient, 1)
    with pytest.raises(WorkerError, match=r"27 workers were lost while 26 samples.*max_quarantined"):
        lose(strict, 1)
