"""The one loop that repeats what may succeed the next time."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import pytest

from stoker.errors import StalledError, TransferError
from stoker.runtime import threads as module
from stoker.runtime.threads import FailedAttempt, RetryPolicy, retry


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; time passes by them alone."""
    made: list[float] = []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return sum(made)

    monkeypatch.setattr(module, "pause", made.append)
    monkeypatch.setattr(module, "time", Clock)
    return made


class Fails:
    """An operation that fails some times, then returns the number of calls."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error, self.calls = times, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.left:
            raise self.error
        return self.calls


def test_an_operation_is_repeated_with_pauses_that_grow(pauses: list[float]) -> None:
    told: list[FailedAttempt] = []

    assert retry(Fails(4, OSError()), OSError, RetryPolicy(first_s=1, longest_s=5), on_retry=told.append) == 5

    assert pauses == [1, 2, 4, 5]
    assert [one.attempts for one in told] == [1, 2, 3, 4]
    assert [(one.spent_s, one.pause_s) for one in told] == [(0, 1), (1, 2), (3, 4), (7, 5)]


def test_jitter_does_not_draw_from_the_programs_random_state() -> None:
    before = random.getstate()
    pauses = {RetryPolicy(first_s=8, jitter=0.5).pause_s(1) for _ in range(20)}
    assert len(pauses) > 1
    assert random.getstate() == before


def test_jitter_takes_a_part_of_a_pause_away() -> None:
    policy = RetryPolicy(first_s=8, jitter=0.5)

    drawn = {policy.pause_s(1) for _ in range(200)}
    assert min(drawn) >= 4
    assert max(drawn) <= 8
    assert len(drawn) > 100
    assert [policy.pause_s(2, draw) for draw in (0, 0.5, 1)] == [8, 12, 16]
    assert 30 <= policy.pause_s(100_000) <= 60, "no overflow"


def test_a_field_of_the_error_decides_and_not_its_text(pauses: list[float]) -> None:
    same_text = "connection reset by peer"
    passes = lambda error: isinstance(error, TransferError) and error.transient  # noqa: E731

    assert retry(Fails(1, TransferError(same_text, transient=True)), passes, RetryPolicy(first_s=1)) == 2
    once = Fails(1, TransferError(same_text, transient=False))
    with pytest.raises(TransferError):
        retry(once, passes, RetryPolicy(first_s=1))
    assert once.calls == 1


def test_limits_of_attempts_and_time_raise_the_last_error_or_one_that_says_more(
    pauses: list[float],
) -> None:
    fails, late = Fails(9, OSError("away")), Fails(99, OSError("away"))

    with pytest.raises(OSError, match="away"):
        retry(fails, OSError, RetryPolicy(first_s=1, attempts=3))
    with pytest.raises(StalledError, match="4 attempts") as caught:
        retry(
            late, OSError, RetryPolicy(first_s=10, factor=1, timeout_s=35),
            give_up=lambda failed: StalledError(f"{failed.attempts} attempts"),
        )  # fmt: skip

    assert (fails.calls, late.calls) == (3, 4)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_pause_that_the_other_side_asked_for_is_made(pauses: list[float]) -> None:
    error = TransferError("busy", transient=True, wait_s=7)

    retry(Fails(2, error), TransferError, RetryPolicy(first_s=1), asked_pause_s=lambda one: one.wait_s)

    assert pauses == [7, 7]


@pytest.mark.parametrize("give_up", [None, lambda failed: StalledError("over")], ids=["last", "other"])
def test_an_error_that_was_raised_holds_nothing_once_it_is_gone(give_up: object) -> None:
    class Opened:
        pass

    made: list[weakref.ref[Opened]] = []

    def fails() -> None:
        opened = Opened()
        made.append(weakref.ref(opened))
        raise OSError

    gc.disable()
    try:
        with suppress(OSError, StalledError):
            retry(fails, OSError, RetryPolicy(first_s=0, attempts=2), give_up=give_up)  # type: ignore[arg-type]
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()


ENDS_WHILE_A_THREAD_PAUSES = """
from stoker.runtime.threads import RetryPolicy, retry
from stoker.runtime.threads import Pool

def fails():
    raise OSError

ticket = Pool(1, "x").submit(lambda: retry(fails, OSError, RetryPolicy(first_s=600, longest_s=600)))
while ticket.began is None:
    pass
"""


def test_a_pause_in_a_thread_does_not_delay_the_exit() -> None:
    def run(program: str) -> float:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
        return time.monotonic() - began

    idle = run("import stoker.runtime.threads")
    assert run(ENDS_WHILE_A_THREAD_PAUSES) < 3 * idle + 4, "the exit waits 5 s for a thread that is stuck"
