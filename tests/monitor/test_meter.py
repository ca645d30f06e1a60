from __future__ import annotations

import json

import pytest

from stoker.monitor import StallMeter, meter


class Clock:
    """Seconds that pass when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**9
        monkeypatch.setattr(meter, "perf_counter_ns", lambda: self.now_ns)

    def __call__(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serve(counted: StallMeter, clock: Clock, *, batches: int, wait_s: float, step_s: float) -> None:
    """One pass: wait, hand over, step; at the end the loader is asked once more."""
    for _ in range(batches):
        clock(wait_s)
        counted.waited(wait_s)
        counted.handed(1000, 8, "host")
        clock(step_s)
    counted.ended()


def test_stall_is_waiting_over_waiting_and_stepping(clock: Clock) -> None:
    counted = StallMeter()

    serve(counted, clock, batches=5, wait_s=1.0, step_s=3.0)
    report = counted.epoch()

    assert (report.wait_s, report.step_s, report.first_wait_s) == (4.0, 15.0, 1.0)
    assert report.stall == pytest.approx(4 / 19)
    assert report.mean_step_s == 3.0
    assert (report.batches, report.examples, report.bytes) == (5, 40, 5000)
    assert report.tiers == {"host": 40}


def test_start_up_is_no_stall(clock: Clock) -> None:
    """Opening a cache and filling a tier happen once; as stall they would rule short runs."""
    counted = StallMeter()

    serve(counted, clock, batches=1, wait_s=60.0, step_s=1.0)

    assert counted.epoch().stall == 0
    assert counted.epoch().first_wait_s == 60.0


def test_time_between_passes_is_neither_wait_nor_step(clock: Clock) -> None:
    counted = StallMeter()

    serve(counted, clock, batches=2, wait_s=1.0, step_s=1.0)
    clock(100.0)  # validation
    serve(counted, clock, batches=2, wait_s=1.0, step_s=1.0)

    assert (counted.epoch().wait_s, counted.epoch().step_s) == (2.0, 4.0)


def test_waits_add_up_when_reported_in_parts(clock: Clock) -> None:
    counted = StallMeter()
    counted.handed(1, 1, "host")
    for _ in range(2):
        clock(1.0)
        counted.waited(1.0)
    counted.handed(1, 1, "disk")

    assert (counted.epoch().wait_s, counted.epoch().step_s) == (2.0, 0.0)
    assert counted.epoch().tiers == {"host": 1, "disk": 1}


def test_reset_begins_anew_and_keeps_the_ceiling(clock: Clock) -> None:
    counted = StallMeter()
    counted.ceiling(0.5)
    serve(counted, clock, batches=3, wait_s=1.0, step_s=1.0)
    counted.reset()

    report = counted.epoch()

    assert (report.batches, report.stall, report.mean_step_s, report.tiers) == (0, 0.0, 0.0, {})
    assert report.ceiling_step_s == 0.5
    assert report.lost is None


def test_below_the_ceiling_counts_what_loading_costs_the_step(clock: Clock) -> None:
    """No wait at all, yet every step takes longer than with its batch at hand: the cores were shared."""
    counted = StallMeter()
    serve(counted, clock, batches=4, wait_s=0.0, step_s=2.0)

    assert counted.epoch().lost is None
    counted.ceiling(1.5)
    assert counted.epoch().stall == 0
    assert counted.epoch().lost == pytest.approx(0.25)
    counted.ceiling(3.0)
    assert counted.epoch().lost == 0


def test_ending_twice_changes_nothing(clock: Clock) -> None:
    counted = StallMeter()
    serve(counted, clock, batches=2, wait_s=1.0, step_s=1.0)
    before = counted.epoch()
    clock(50.0)
    counted.ended()

    assert counted.epoch() == before


def test_a_report_is_json(clock: Clock) -> None:
    counted = StallMeter()
    serve(counted, clock, batches=2, wait_s=1.0, step_s=1.0)

    plain = json.loads(json.dumps(counted.epoch().to_json()))

    assert plain["stall"] == pytest.approx(1 / 3)
    assert plain["lost"] is None


def test_the_real_clock_is_never_negative() -> None:
    counted = StallMeter()
    for _ in range(100):
        counted.waited(1e-9)
        counted.handed(1, 1, "host")
    counted.ended()

    report = counted.epoch()

    assert report.step_s >= 0
    assert 0 <= report.stall <= 1


def test_a_wait_is_split_into_what_it_was_for(clock: Clock) -> None:
    counted = StallMeter()
    counted.handed(1, 1, "disk")
    for part, seconds in (("wait", 1.0), ("read", 4.0), ("copy", 2.0)):
        counted.spent(part, seconds)  # type: ignore[arg-type]
    clock(10.0)
    counted.waited(10.0)
    counted.handed(1, 1, "disk")

    report = counted.epoch()

    assert report.parts == {"wait": 1.0, "read": 4.0, "copy": 2.0, "gather": 3.0}
    assert sum(report.parts.values()) == report.wait_s


def test_parts_never_exceed_the_wait_and_start_up_has_none(clock: Clock) -> None:
    counted = StallMeter()
    counted.spent("read", 100.0)
    counted.waited(100.0)
    counted.handed(1, 1, "disk")
    counted.spent("read", 5.0)
    clock(1.0)
    counted.waited(1.0)
    counted.handed(1, 1, "disk")

    assert counted.epoch().parts == {"read": 1.0}


def test_what_lies_outside_is_neither_wait_nor_step(clock: Clock) -> None:
    counted = StallMeter()
    counted.outside(7.0)  # before the first batch there is nothing to leave out
    counted.handed(1, 1, "host")
    clock(10.0)
    counted.outside(7.0)
    counted.ended()

    assert counted.epoch().step_s == 3.0
