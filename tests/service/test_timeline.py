"""The timeline of a job: its phases, and where the time of training went."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.service import timeline
from stoker.service.database import JOBS, Database, Event, Outbox, State
from stoker.service.jobs import JobQueue, Jobs, Outcome
from stoker.service.journal import Journal, Line, read_lines
from stoker.service.timeline import (
    Interval,
    StallSums,
    draw_machine,
    draw_timeline,
    machine_timeline,
    merged,
    phases_of,
    timeline_of,
)

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

    id, kind, ended = "j", "training", 100.0


def test_what_the_loop_tells_is_added_up_until_an_interval_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    for second in (1.0, 2.0, 3.0):
        now[0] = second
        sums.take("stall", {**PASS, "tiers": {"disk": 10, "host": 2}})
    sums.write()
    sums.write()  # nothing is left to write

    lines, _ = read_lines(tmp_path / "events.jsonl", 0)
    first, last = [line.data for line in lines]
    assert {line.kind for line in lines} == {"stall"}
    assert (first["seconds"], first["busy_s"], first["tier"]) == (2.0, 1.2, "disk")
    assert first["waits"] == {"read": 0.4, "gather": 0.2}
    assert (last["seconds"], last["busy_s"]) == (1.0, 0.6)


def test_an_interval_of_validation_alone_names_no_tier(tmp_path: Path) -> None:
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    sums.take("epoch", {"eval_seconds": 0.5})
    sums.take("done", {})

    (line,), _ = read_lines(tmp_path / "events.jsonl", 0)
    assert line.data["validate_s"] == 0.5
    assert "tier" not in line.data


def test_a_long_run_writes_few_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    for second in range(100_000):
        now[0] = float(second)
        sums.take("stall", {**PASS, "tiers": {"disk": 10}})

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
    events = [event("queued", 0), event("claimed", 1.9)]
    for at in (2.0, 4.0, 6.0):  # it is given back at once each time
        events += [event("queued", at, waits_for="data"), event("claimed", at + 1.9)]
    events += [event("started", 9)]

    found = [(one.kind, one.begin, one.end) for one in phases_of(events, 99)]

    assert found == [("queued", 0, 1.9), ("data", 1.9, 7.9), ("start", 7.9, 9), ("train", 9, 99)]


def test_a_start_of_a_moment_is_part_of_the_wait() -> None:
    events = [event("queued", 0), event("claimed", 2), event("queued", 2.1), event("claimed", 5)]

    found = [(one.kind, one.begin, one.end) for one in phases_of(events, 9)]

    assert found == [("queued", 0, 5), ("start", 5, 9)]


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


class Machine:
    """Jobs and events of a machine."""

    def __init__(self, events: dict[str, list[Event]]) -> None:
        self.events = [replace(one, job=job) for job, own in events.items() for one in own]
        self.names = [*events]

    def active_since(self, _: float, *, limit: int) -> list[Any]:
        assert limit == timeline.MOST_JOBS
        return [
            SimpleNamespace(id=name, name=name, kind="training", worker="w", ended=None)
            for name in self.names
        ][::-1]

    def last_of(self, jobs: list[str], kinds: list[str], *, limit: int, since: float = 0.0) -> list[Event]:
        assert limit
        return [one for one in self.events if one.job in jobs and one.kind in kinds and one.at >= since]


def machine(events: dict[str, list[Event]], seconds: float, **more: Any) -> timeline.MachineTimeline:
    known: Any = Machine(events)
    return machine_timeline(known, known, seconds, **more)


@pytest.fixture
def at_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline.time, "time", lambda: 100.0)


@pytest.mark.usefixtures("at_100")
def test_the_machines_timeline_shows_jobs_at_once_and_what_all_workers_did() -> None:
    first = [event("queued", 10), event("claimed", 30), event("started", 60, fill_s=20.0),
             stall(80, 20, busy=15.0, read=5.0), stall(100, 20, busy=20.0, read=0.0)]  # fmt: skip
    other = [event("claimed", 70), event("started", 80), stall(100, 20, busy=5.0, read=15.0)]

    found = machine({"a": first, "b": other}, 50.0, columns=5)

    assert [(one.name, [(p.kind, p.begin, p.end) for p in one.phases]) for one in found.jobs] == [
        ("a", [("fill", 50, 60), ("train", 60, 100)]),
        ("b", [("start", 70, 80), ("train", 80, 100)]),
    ]
    spent = [{kind: pytest.approx(s) for kind, s in column.spent_s.items()} for column in found.columns]
    assert spent == [
        {"fill": 10.0},
        {"busy": 7.5, "read": 2.5},
        {"start": 10.0, "busy": 7.5, "read": 2.5},
        {"busy": 12.5, "read": 7.5},
        {"busy": 12.5, "read": 7.5},
    ]
    assert found.stall == pytest.approx(20 / 60)
    assert "reading from disk" in " ".join(found.summary)


@pytest.mark.usefixtures("at_100")
def test_the_machines_timeline_says_how_busy_the_gpu_was_where_it_was_measured() -> None:
    told = {"seconds": 20, "busy_s": 20.0, "waits": {}, "first_wait_s": 0.0, "tier": "disk"}
    events = [event("started", 20), event("stall", 40, **told, gpu_busy=0.5), event("stall", 60, **told),
              event("stall", 80, **told, gpu_busy=0.9)]  # fmt: skip

    found = machine({"a": events}, 80.0, columns=4)

    assert [one.gpu_busy for one in found.columns] == [0.5, None, 0.9, None]
    picture = draw_machine(found, 1)
    assert picture is not None
    assert [len(points.split()) for points in picture.gpu] == [1, 1]


@pytest.mark.usefixtures("at_100")
def test_a_job_that_only_waited_has_no_line_and_an_idle_machine_no_picture() -> None:
    found = machine({"a": [event("claimed", 10), event("paused", 20)], "b": [event("queued", 50)]}, 60.0)

    assert found.jobs == []
    assert draw_machine(found, 2) is None


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=20), st.integers(1, 30))
def test_the_columns_of_a_machine_keep_every_second_of_their_time(given_: list[Any], columns: int) -> None:
    at, events = 0.0, [event("started", 0.0)]
    for busy, read, rest in given_:
        at += busy + read + rest
        events.append(stall(at, busy + read + rest, busy=busy, read=read))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline.time, "time", lambda: at)
        found = machine({"a": events}, at, columns=columns)

    busy = sum(one.spent_s.get("busy", 0.0) for one in found.columns)
    assert busy == pytest.approx(sum(one[0] for one in given_), rel=1e-6)
    assert sum(sum(one.spent_s.values()) for one in found.columns) == pytest.approx(at, rel=1e-6)
    picture = draw_machine(found, 1)
    assert picture is not None
    assert all(-0.1 <= part.y <= part.y + part.height <= timeline.HEIGHT + 0.1 for part in picture.columns)


def test_validation_checkpoints_and_the_gpu_are_told_with_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    sums = StallSums(Journal(tmp_path / "events.jsonl"))
    sums.take("epoch", {"eval_seconds": 0.5})
    sums.take("best", {"seconds": 0.25})
    now[0] = 4.0
    sums.take("stall", {**PASS, "tiers": {"disk": 10}})

    (line,), _ = read_lines(tmp_path / "events.jsonl", 0)
    told = {**line.data, "until": 4.0}
    found = timeline_of(Done(), Known(event("stall", 4.0, **told)))  # pyright: ignore[reportArgumentType]

    spent = found.intervals[0].spent_s()
    assert (spent["validate"], spent["checkpoint"]) == (0.5, 0.25)
    assert sum(spent.values()) == pytest.approx(4.0)


def test_the_machines_timeline_is_read_from_the_database(database: Database) -> None:
    jobs, queue = Jobs(database), JobQueue(database)
    ended, runs, waits = (jobs.create({}, name=name, epochs=1)[0] for name in ("ended", "runs", "waits"))
    now = timeline.time.time()
    told = {"seconds": 4.0, "busy_s": 3.0, "waits": {"read": 1.0}, "first_wait_s": 0.0, "tier": "disk"}
    for _ in (ended, runs):
        attempt = queue.take("w")
        assert attempt is not None
        queue.report(
            attempt, [Line(kind="started", data={}), Line(kind="stall", data={**told, "until": now})], 1
        )
        if attempt.job.id == ended.id:
            queue.finish(attempt, Outcome(state=State.COMPLETED, exit_code=0), lines=[], position=2)

    found = machine_timeline(jobs, Outbox(database), 3600.0)
    with database.writing() as connection:
        connection.execute(JOBS.update().where(JOBS.c.id == ended.id).values(ended=now - 7200.0))
    later = machine_timeline(jobs, Outbox(database), 3600.0)

    assert waits.id not in {one.job_id for one in found.jobs}
    assert [one.name for one in found.jobs] == ["ended", "runs"]
    assert sum(one.spent_s.get("read", 0.0) for one in found.columns) == pytest.approx(2.0)
    assert [one.name for one in later.jobs] == ["runs"]


@pytest.mark.usefixtures("at_100")
def test_intervals_that_are_too_many_to_add_up_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_EVENTS", 2)
    known: Any = Machine(
        {"a": [event("started", 20), stall(90, 10, busy=10.0, read=0.0), stall(100, 10, busy=10.0, read=0.0)]}
    )
    full = " ".join(machine_timeline(known, known, 50.0).summary)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 3)

    assert "10 s ago" in full
    assert "ago" not in " ".join(machine_timeline(known, known, 50.0).summary)
