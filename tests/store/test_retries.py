"""Attempts that are repeated until a deadline, and what is said meanwhile."""

from __future__ import annotations

import logging

import pytest

from stoker.errors import StalledError
from stoker.runtime import threads
from stoker.store.remote import Retries, TransientError


class Clock:
    """Time passes by pauses alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads, "pause", clock.sleep)


def test_who_waits_for_a_store_is_told_now_and_then_and_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_clock(monkeypatch)
    caplog.set_level(logging.WARNING)
    kept = Retries()

    def refused() -> None:
        raise TransientError("connection refused")

    with pytest.raises(StalledError, match=r"get x failed \d+ times in .* 120 s are allowed"):
        kept.run(refused, "get x", 120.0)

    said = [record.getMessage() for record in caplog.records]
    assert 3 <= len(said) <= 5
    assert said[0].startswith("get x failed 4 times, tried again for at most 1")
    assert all("connection refused" in line for line in said)
    assert kept.count > 20


def test_what_passes_soon_is_not_talked_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_clock(monkeypatch)
    left = [TransientError("503")] * 3

    def third() -> str:
        if left:
            raise left.pop()
        return "there"

    assert Retries().run(third, "get x") == "there"
    assert caplog.records == []
