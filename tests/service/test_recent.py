"""Figures that hang or fail: what was known is told with its age, and nobody waits for more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import DegradedError, ResourceError, StalledError
from stoker.runtime.threads import Pool
from stoker.service import api, folders, services
from stoker.service.background import CachedValue, Operations
from tests.service.running import Running, serving


class Source:
    """Something to ask, which can be made to hang or to fail."""

    def __init__(self) -> None:
        self.asked = 0
        self.free = threading.Event()
        self.free.set()
        self.fault: Exception | None = None

    def __call__(self, *_given: Any) -> int:
        self.asked += 1
        number = self.asked
        assert self.free.wait(30)
        if self.fault is not None:
            raise self.fault
        return number


def test_what_hangs_costs_one_thread_and_one_wait_however_often_it_is_asked() -> None:
    source = Source()
    recent = CachedValue(source, "the disk", wait_s=0.5)
    assert (recent.get().value, recent.get().value) == (1, 2), "as it is now"

    source.free.clear()
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: recent.get(), range(200)))
    assert {one.value for one in found} == {2}, "as it was"
    assert all("the disk did not answer within 0.5 s" in (one.stale or "") for one in found)
    assert found[-1].age_s >= 0.5
    assert source.asked == 3, "by one thread"
    began = time.monotonic()
    assert {recent.get().value for _ in range(200)} == {2}
    assert time.monotonic() - began < 50, "each that waited for itself would make 100 s"

    source.free.set()
    last = settled(recent)
    assert last >= 4, "asked for after it was wanted"


def settled(recent: CachedValue[int]) -> int:
    """What it is once it answers again."""
    deadline = time.monotonic() + 30
    while (found := recent.get()).error is not None:
        assert time.monotonic() < deadline, found
    return found.needed()


def test_what_was_never_known_is_an_error_and_what_fails_is_as_it_was() -> None:
    source = Source()
    recent = CachedValue(source, "the count", wait_s=0.1)
    source.free.clear()
    with pytest.raises(StalledError, match="the count did not answer"):
        recent.get().needed()
    source.free.set()
    known = settled(recent)

    source.fault = DegradedError("it is away")
    deadline = time.monotonic() + 30
    while not (found := recent.get()).stale or "it is away" not in found.stale:
        assert time.monotonic() < deadline, found
    assert found.stale.startswith("it is away (as it was ")
    assert found.needed() >= known


def test_many_who_ask_at_once_share_an_answer_that_is_newer_than_their_question() -> None:
    source = Source()
    recent = CachedValue(source, "the folder", wait_s=30.0)
    source.free.clear()
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(recent.get)
        deadline = time.monotonic() + 30
        while not source.asked and time.monotonic() < deadline:
            time.sleep(0.001)
        later = [pool.submit(recent.get) for _ in range(10)]
        time.sleep(0.05)
        source.free.set()
        assert first.result(30).error is None
        assert min(one.result(30).needed() for one in later) >= 2, "1 was asked for before they wanted it"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("recent") / "state") as found:
        yield found


def scrape(running: Running) -> dict[str, str]:
    """The samples that Prometheus would read."""
    answer = running.client.get(f"{running.address}/metrics")
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_scrape_is_answered_while_the_database_is_away(
    running: Running, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    running.services.jobs.create({}, name="known", epochs=1)
    source, asked = Source(), running.services.figures.jobs
    before = scrape(running)
    assert (before["stoker_up"], before["stoker_database_up"]) == ("1", "1")
    assert before['stoker_figure_age_seconds{figure="jobs"}'] == "0.0"

    monkeypatch.setattr(asked, "_wait_s", 0.2)
    monkeypatch.setattr(asked, "_ask", source)
    source.fault = DegradedError("the database does not do it")
    if how == "hangs":
        source.free.clear()
    try:
        away = scrape(running)
    finally:
        source.free.set()
    assert (away["stoker_up"], away["stoker_database_up"]) == ("1", "0")
    assert away['stoker_jobs{state="queued"}'] == before['stoker_jobs{state="queued"}']
    assert float(away['stoker_figure_age_seconds{figure="jobs"}']) > 0
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "stoker_streams"} <= {*away}
    assert int(away['stoker_answers_total{status="200"}']) >= 1


def test_a_disk_that_does_not_answer_costs_its_own_figure_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the mount of a server that is gone: every look at it hangs."""
    before = running.client.get(running.api("/machine")).json()
    assert before["stale"] == []

    source, threads = Source(), threading.active_count()
    source.free.clear()
    monkeypatch.setattr(running.services.figures.disk, "_wait_s", 0.2)
    monkeypatch.setattr(os, "statvfs", source)
    try:
        found = [running.client.get(running.api("/machine")).json() for _ in range(20)]
        hanging = threading.active_count() - threads
        assert "stoker_host_free_bytes" in scrape(running)
    finally:
        source.free.set()
    assert all(one["disk_bytes"] is not None for one in found)
    assert all("did not answer within 0.2 s" in one["stale"][0] for one in found)
    assert all(one["host_bytes"] and one["cpus"] for one in found)
    assert hanging < 10, "not one a request"


def test_room_is_told_while_the_disk_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "ANSWER_S", 0.2)
    room = folders.DiskRoom(folders.StateFolder(tmp_path))
    source = Source()
    source.free.clear()
    monkeypatch.setattr(os, "statvfs", source)
    try:
        assert f"the disk of {tmp_path} did not answer within 0.2 s" in (room.lack() or "")
        assert room.lack() is not None
    finally:
        source.free.set()


def test_caches_are_listed_as_they_were_while_their_folder_does_not_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running.services.folder.caches / "radio" / "0123456789abcdef").mkdir(parents=True)
    services.find_caches(running.services.folder)  # what it needs is imported at the first call
    before = running.client.get(running.api("/caches")).json()
    assert (len(before["caches"]), before["age_s"], before["stale"]) == (1, 0.0, None)

    source, look = Source(), services.find_caches
    source.free.clear()
    monkeypatch.setattr(running.services.figures.caches, "_wait_s", 0.2)
    monkeypatch.setattr(services, "find_caches", lambda folder: source() and look(folder))
    try:
        away = running.client.get(running.api("/caches")).json()
        page = running.client.get(f"{running.address}/caches").text
    finally:
        source.free.set()
    assert [one["name"] for one in away["caches"]] == ["radio"]
    assert away["age_s"] > 0
    assert "did not answer within 0.2 s" in away["stale"]
    assert "did not answer within 0.2 s" in page
    assert "radio" in page


def test_looks_into_one_cache_that_hang_are_few_and_leave_the_others_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    source.free.clear()
    monkeypatch.setattr(running.services.figures, "_folders", Pool(2, "test"))
    monkeypatch.setattr(services, "FOLDER_S", 0.2)
    monkeypatch.setattr(api, "cache_folder", source)
    path = "/caches/radio/0123456789abcdef"
    try:
        said = [running.client.get(running.api(path + part)) for part in ("", "/why", "", "/why")]
        assert [one.status_code for one in said] == [504] * 4
        assert source.asked == 2
        assert "did not answer within 0.2 s" in said[0].json()["error"]
        assert "limit" in said[-1].json()["error"]
        assert running.client.get(running.api("/jobs")).status_code == 200
    finally:
        source.free.set()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No thread can be started until it is undone."""

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        yield patched


def test_a_thread_that_cannot_be_started_takes_no_place(no_threads: pytest.MonkeyPatch) -> None:
    pool, operations = Pool(1, "test"), Operations(at_once=1)
    recent = CachedValue(lambda: 1, "figures", wait_s=5)

    with pytest.raises(ResourceError, match="can't start new thread"):
        pool.call_within(5, lambda: 1, "a folder")
    with pytest.raises(ResourceError, match="can't start new thread"):
        operations.start("work", dict)
    assert "can't start new thread" in str(recent.get().error)

    no_threads.undo()
    assert pool.call_within(5, lambda: 1, "a folder") == 1
    assert operations.start("work", dict, wait_s=5).state == "completed"
    assert recent.get().value == 1


def test_a_runtime_error_of_the_work_itself_passes_through_and_gives_its_place_back_once() -> None:
    pool = Pool(1, "test")

    def fails() -> int:
        raise RuntimeError("of its own")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="of its own"):
            pool.call_within(5, fails, "a folder")
    assert pool.call_within(5, lambda: 1, "a folder") == 1
