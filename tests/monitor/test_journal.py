from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.monitor import StallJournal, StallMeter, meter


class Clock:
    """Seconds that pass when told, for meter and journal alike."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(meter, "perf_counter_ns", lambda: round(self.now_s * 1e9))

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serve(counted: StallMeter, clock: Clock, *, wait_s: float = 1.0, step_s: float = 3.0) -> None:
    clock.now_s += wait_s
    counted.waited(wait_s)
    counted.spent("read", 0.75 * wait_s)
    counted.handed(1000, 8, "disk")
    clock.now_s += step_s


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_interval_and_a_summary_of_all(clock: Clock, tmp_path: Path) -> None:
    counted = StallMeter(rank=2)
    journal = StallJournal(counted, tmp_path / "s.jsonl", every_s=10, clock=clock)

    for step in range(10):
        serve(counted, clock)
        journal.tick({"step": step})
    counted.ended()
    total = journal.close({"step": 9})

    lines = rows(tmp_path / "s.jsonl")
    assert [line["kind"] for line in lines] == ["interval"] * 4 + ["summary"]
    assert [line["batches"] for line in lines] == [3, 3, 3, 1, 10]
    assert [line["step"] for line in lines[:3]] == [2, 5, 8]
    assert {line["rank"] for line in lines} == {2}
    # the first batch of all is start-up, and its successor's wait is the first that counts
    assert (lines[0]["wait_s"], lines[1]["wait_s"]) == (2.0, 3.0)
    assert lines[1]["parts"] == {"read": 2.25, "gather": 0.75}
    assert lines[1]["stall"] == pytest.approx(3 / 12)
    assert total is not None
    assert (total.batches, total.wait_s, total.step_s) == (10, 9.0, 30.0)
    assert lines[-1]["stall"] == pytest.approx(9 / 39)


def test_between_passes_the_meter_is_reset_and_nothing_is_lost(clock: Clock, tmp_path: Path) -> None:
    counted = StallMeter()
    journal = StallJournal(counted, tmp_path / "s.jsonl", every_s=1000, clock=clock)
    for _ in range(2):
        for _ in range(3):
            serve(counted, clock)
        counted.ended()
        journal.cut()
        counted.reset()
        journal.restarted()
        clock.now_s += 500  # validation

    total = journal.close()

    assert total is not None
    assert (total.batches, total.wait_s, total.step_s) == (6, 4.0, 18.0)
    assert counted.epoch().batches == 0


def test_an_interval_without_a_batch_is_no_line(clock: Clock, tmp_path: Path) -> None:
    journal = StallJournal(StallMeter(), tmp_path / "s.jsonl", every_s=1, clock=clock)
    clock.now_s += 5

    assert journal.tick() is None
    assert journal.close() is None
    assert not (tmp_path / "s.jsonl").exists()


def test_without_a_file_intervals_are_only_handed_back(clock: Clock) -> None:
    counted = StallMeter()
    journal = StallJournal(counted, every_s=4, clock=clock)
    serve(counted, clock)

    found = journal.tick()

    assert found is not None
    assert found.batches == 1
    assert journal.tick() is None
