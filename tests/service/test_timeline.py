"""The timeline of a job: its phases, and where the time of training went."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.service import timeline
from stoker.service.database import Event
from stoker.service.journal import Journal, read_lines
from stoker.service.timeline import Interval, StallSums, draw_timeline, merged, phases_of, timeline_of

PASS = {"step_s": 0.6, "wait_s": 0.3, "first_wait_s": 0.1, "parts": {"read": 0.2, "gather": 0.1}}


def event(kind: str, at: float, **data: Any) -> Event:
    return Event(number=round(1000 * at), job="j", kind=kind, at=at, data=data)


def stall(at: float, seconds: float, *, busy: float, read: float, tier: str = "disk") -> Event:
    return event("stall", at, seconds=seconds, busy_s=busy, waits={"read": read}, first_wait_s=0.0, tier=tier)


class Known:
    """An outbox with these events."""

    def __init__(self, *events: Event) -> None:
        self.events = [*events]

    def last_of(self, *_: Any, **__: Any) -> list[Event]:
        return self.events


class Done:
    """A job that has ended."""

    id, ended = "j", 100.0


def test_what_the_loop_tells_is_added_up_until_an_interval_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    for second in (1.0, 2.0, 3.0):
        now[0] = second
        sums.add({**PASS, "tiers": {"disk": 10, "host": 2}})
    sums.write()
    sums.write()  # nothing is left to write

    lines, _ = read_lines(tmp_path / "events.jsonl", 0)
    first, last = [line.data for line in lines]
    assert {line.kind for line in lines} == {"stall"}
    assert (first["seconds"], first["busy_s"], first["tier"]) == (2.0, 1.2, "disk")
    assert first["waits"] == {"read": 0.4, "gather": 0.2}
    assert (last["seconds"], last["busy_s"]) == (1.0, 0.6)


def test_a_long_run_writes_few_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    for second in range(100_000):
        now[0] = float(second)
        sums.add({**PASS, "tiers": {"disk": 10}})

    lines, position = read_lines(tmp_path / "events.jsonl", 0)
    assert position == (tmp_path / "events.jsonl").stat().st_size
    assert 100 < len(lines) < 2000
    assert sum(float(str(line.data["seconds"])) for line in lines) > 98_000


def test_phases_follow_the_events_of_a_job() -> None:
    kinds = {"queued": 0, "claimed": 3, "stall": 12, "paused": 20, "resumed": 30}
    events = [event(kind, at) for kind, at in kinds.items()]
    events.insert(2, event("started", 10, fill_s=5.0))
    events += [event("claimed", 31), event("failed", 32)]

    found = [(one.kind, one.begin, one.end) for one in phases_of(events, 99)]

    first = [("queued", 0, 3), ("start", 3, 5), ("fill", 5, 10), ("train", 10, 20), ("paused", 20, 30)]
    assert found == [*first, ("queued", 30, 31), ("start", 31, 32)]


def test_a_job_that_waits_for_its_data_is_one_wait_and_not_many_starts() -> None:
    moments = [
        event(kind, at) for n in range(4) for kind, at in (("queued", 2 * n), ("claimed", 2 * n + 1.9))
    ]
    # It is given back at once each time.
    events = [*moments, event("started", 9)]

    found = [(one.kind, one.begin, one.end) for one in phases_of(events, 99)]

    assert found == [("queued", 0, 7.9), ("start", 7.9, 9), ("train", 9, 99)]


def test_a_timeline_says_what_steps_waited_for_and_when_records_moved() -> None:
    events = [event("queued", 0), event("claimed", 1), event("started", 2),
              stall(12, 10, busy=5.0, read=5.0), stall(22, 10, busy=10.0, read=0.0, tier="host"),
              event("completed", 22)]  # fmt: skip

    found = timeline_of(Done(), Known(*events))  # pyright: ignore[reportArgumentType]
    text = " ".join(found.summary)

    assert found.stall == pytest.approx(0.25)
    assert "25 %" in text
    assert "reading from disk" in text
    assert "After 10 s" in text
    assert [(one.begin, one.end, one.tier) for one in found.intervals] == [(2, 12, "disk"), (12, 22, "host")]


def test_a_job_that_has_not_begun_has_no_picture() -> None:
    assert draw_timeline(timeline_of(Done(), Known())) is None  # pyright: ignore[reportArgumentType]


TIMES = st.floats(0.01, 50, allow_nan=False)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES, st.sampled_from(["disk", "host"])), max_size=60),
       st.integers(1, 20))  # fmt: skip
def test_merging_intervals_keeps_every_second(given_: list[Any], most: int) -> None:
    at, intervals = 0.0, list[Interval]()
    for gap, busy, read, tier in given_:
        begin = at + gap
        at = begin + busy + read
        intervals.append(Interval(begin=begin, end=at, busy_s=busy, waits_s={"read": read}, first_wait_s=0.0,
                                  tier=tier))  # fmt: skip

    found = merged(intervals, most)

    assert sum(one.busy_s for one in found) == pytest.approx(sum(one.busy_s for one in intervals))
    read = [sum(one.waits_s["read"] for one in some) for some in (found, intervals)]
    assert read[0] == pytest.approx(read[1])
    assert all(before.end <= after.begin for before, after in pairwise(found))
    assert len(found) <= 2 * most + 1


def test_an_event_that_was_stored_late_counts_from_when_it_was_written() -> None:
    told = {"seconds": 10, "busy_s": 8.0, "waits": {"read": 2.0}, "first_wait_s": 0.0, "tier": "disk"}
    late = [event("stall", 90 + n, until=12.0 + 10 * n, **told) for n in range(3)]

    found = timeline_of(Done(), Known(event("started", 2), *late))  # pyright: ignore[reportArgumentType]

    assert [(one.begin, one.end) for one in found.intervals] == [(2, 12), (12, 22), (22, 32)]


def test_a_job_whose_start_is_not_kept_any_more_still_has_a_picture() -> None:
    known = Known(stall(12, 10, busy=5.0, read=5.0))

    picture = draw_timeline(timeline_of(Done(), known))  # pyright: ignore[reportArgumentType]

    assert picture is not None
    assert picture.columns


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=20))
def test_each_column_of_the_picture_is_as_high_as_the_picture(given_: list[Any]) -> None:
    at, events = 2.0, [event("queued", 0), event("claimed", 1), event("started", 2)]
    for busy, read, rest in given_:
        at += busy + read + rest
        events.append(stall(at, busy + read + rest, busy=busy, read=read))
    events.append(event("completed", at))

    picture = draw_timeline(timeline_of(Done(), Known(*events)))  # pyright: ignore[reportArgumentType]
    assert picture is not None
    heights: dict[float, float] = {}
    for part in picture.columns:
        assert 0 <= part.x <= part.x + part.width <= timeline.WIDTH + 0.1
        assert -0.1 <= part.y <= timeline.HEIGHT
        heights[part.x] = heights.get(part.x, 0.0) + part.height
    assert all(height == pytest.approx(timeline.HEIGHT, abs=0.1) for height in heights.values())
