"""Events as they happen: none is lost over a reconnect, and no reader costs memory."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from stoker.service import server, stream
from stoker.service.client import Client, StreamEvent
from stoker.service.database import Event, EventPage, append
from tests.service.running import CONFIG, Running, note_radio, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("live") / "state") as found:
        note_radio(found.services, CONFIG["dataset_ids"][0])
        yield found


@pytest.fixture
def job(running: Running) -> str:
    return running.services.jobs.create(dict(CONFIG), name="live", epochs=3)[0].id


def tell(running: Running, job: str, count: int, *, size: int = 10) -> None:
    """Events of a job, as its worker would write them."""
    database = running.services.database
    with database.writing() as connection:
        happened = [("progress", {"n": n, "text": "x" * size}) for n in range(count)]
        append(connection, database.wall, job, happened)


def client_of(running: Running) -> Client:
    return Client(running.address, running.token)


def take(told: Iterator[StreamEvent], count: int) -> list[StreamEvent]:
    return [next(told) for _ in range(count)]


def test_a_stream_gives_what_happens_after_a_number(running: Running, job: str) -> None:
    after = running.services.outbox.newest()
    told = client_of(running).follow(f"/jobs/{job}/events", after)
    tell(running, job, 3)
    running.services.jobs.cancel(job)

    found = take(told, 4)

    assert [(one.kind, one.data.get("n")) for one in found] == [
        ("progress", 0), ("progress", 1), ("progress", 2), ("cancelled", None),
    ]  # fmt: skip
    assert [one.number for one in found] == [after + n for n in range(1, 5)]
    assert {one.data["job_id"] for one in found} == {job}


@pytest.mark.parametrize("rounds", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_a_reader_that_is_cut_off_again_and_again_misses_nothing(
    running: Running, job: str, rounds: int
) -> None:
    """Cut at any byte: a whole event counts, a part of one is asked for again."""
    other = running.services.jobs.create(dict(CONFIG), name="other", epochs=3)[0].id
    begin, chance = running.services.outbox.newest(), random.Random(3)
    written = threading.Event()

    def write() -> None:
        for _ in range(rounds):
            tell(running, job, chance.randint(1, 40))
            tell(running, other, 5)
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    headers = {"Authorization": f"Bearer {running.token}"}
    deadline = time.monotonic() + 60 + 2 * rounds
    wanted: list[int] = [-1]
    while seen != wanted and time.monotonic() < deadline:
        cut = chance.randint(1, 6000)
        headers["Last-Event-ID"] = str(seen[-1] if seen else begin)
        text, limits = b"", httpx.Timeout(30, read=1)
        with (
            suppress(httpx.ReadTimeout),
            httpx.stream("GET", running.api(f"/jobs/{job}/events"), headers=headers, timeout=limits) as got,
        ):
            for piece in got.iter_raw():
                text += piece
                if len(text) >= cut:
                    break
        for block in text[:cut].decode().split("\n\n")[:-1]:
            if block.startswith("id:"):
                seen.append(int(block.partition("\n")[0][4:]))
        if written.is_set():
            wanted = [e.number for e in running.services.outbox.read(begin, job=job, limit=10**6)]
    writer.join(30)

    assert seen == wanted
    assert len(seen) >= rounds


def test_a_page_of_events_is_bounded_and_none_is_lost(
    running: Running, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as a job's process may make them, read by a client that is busy for a while."""
    monkeypatch.setattr(stream, "PAGE", 7)
    monkeypatch.setattr(stream, "PAGE_CHARS", 100_000)
    pages: list[list[Event]] = []
    real = running.services.outbox.read_page

    def read_page(after: int, **given: Any) -> EventPage:
        page = real(after, **given)
        pages.append(page.events)
        return page

    monkeypatch.setattr(running.services.outbox, "read_page", read_page)
    begin = running.services.outbox.newest()

    async def read() -> list[int]:
        feed = stream.EventFeed(running.services.outbox)
        reading = asyncio.create_task(feed.run())
        seen: list[int] = []
        with feed.listening():
            async with aclosing(feed.follow(begin, job)) as events, asyncio.timeout(60):
                for count, size in ((50, 10), (40, 40_000), (2, 250_000), (50, 10)):
                    tell(running, job, count, size=size)
                    await asyncio.sleep(2 * stream.POLL_S)
                    while len(seen) < (running.services.outbox.newest() - begin):
                        event = await anext(events)
                        assert event is not None
                        seen.append(event.number)
        reading.cancel()
        return seen

    seen = asyncio.run(read())

    assert seen == list(range(begin + 1, begin + 143))
    assert max(len(page) for page in pages) == 7
    assert max(sum(event.size for event in page) for page in pages if len(page) > 1) <= 100_000


def test_events_that_are_gone_are_named(running: Running, job: str) -> None:
    first = running.services.outbox.newest()
    tell(running, job, 30)
    running.services.outbox.prune(max_age_s=1e9, max_count=10)
    oldest = running.services.outbox.read(0, limit=1)[0].number
    assert oldest > first + 1

    told = take(client_of(running).follow("/events", first), 11)

    assert told[0].kind == "gap"
    assert (told[0].data["from"], told[0].data["to"]) == (first + 1, oldest - 1)
    assert [one.number for one in told[1:]] == list(range(oldest, oldest + 10))


def test_a_reader_is_told_that_the_service_is_degraded_and_when_it_no_longer_is(
    running: Running, job: str
) -> None:
    trouble, after = running.services.database.trouble, running.services.outbox.newest()
    told = client_of(running).follow(f"/jobs/{job}/events", after)
    tell(running, job, 1)
    found = take(told, 1)
    trouble.note("disk", "the disk is full")
    found += take(told, 1)
    trouble.note("disk", None)
    found += take(told, 1)
    tell(running, job, 1)
    found += take(told, 1)

    assert [one.kind for one in found] == ["progress", "degraded", "recovered", "progress"]
    assert found[1].data["error"] == "the disk is full"
    assert [one.number for one in found] == [after + 1, after + 1, after + 1, after + 2], "it has no place"


def test_a_number_of_another_database_is_answered_with_a_gap(running: Running, job: str) -> None:
    told = client_of(running).follow("/events", 10**9)

    assert next(told).kind == "gap"
    tell(running, job, 1)
    assert next(told).kind == "progress"


def test_a_log_is_followed_to_its_end_and_from_any_place(running: Running, job: str) -> None:
    folder = running.services.folder.job(job)
    folder.make()
    folder.log.write_text("one\ntwo\nhal")
    told = client_of(running).follow(f"/jobs/{job}/logs/stream", 0)
    first = next(told)
    assert first.data == {"lines": ["one", "two"]}

    with folder.log.open("a") as file:
        file.write("f\nlast without end")
    running.services.jobs.cancel(job)
    rest = list(told)

    assert [line for one in rest for line in one.data.get("lines", ())] == ["half", "last without end"]
    assert rest[-1].kind == "end"
    again = list(client_of(running).follow(f"/jobs/{job}/logs/stream", first.number))
    assert [line for one in again for line in one.data.get("lines", ())] == ["half", "last without end"]


@pytest.mark.slow
def test_hundreds_of_workers_that_read_nothing_hold_little_and_let_others_in(tmp_path: Path) -> None:
    """Most are refused; of those that are not, each holds what one send may hold and no queue."""
    with serving(tmp_path / "state") as own, ExitStack() as stack:
        note_radio(own.services, CONFIG["dataset_ids"][0])
        job = own.services.jobs.create(dict(CONFIG), name="live", epochs=3)[0].id
        for _ in range(240):
            stack.enter_context(closing(reader_that_reads_nothing(own, "/api/v1/training/events")))
        deadline = time.monotonic() + 60
        while own.services.feed.clients < stream.CLIENTS and time.monotonic() < deadline:
            time.sleep(0.05)
        held: list[int] = []
        for _ in range(10):
            tell(own, job, 20, size=40_000)
            held.extend(own.unsent())
            while (found := own.client.get(own.api("/jobs"))).status_code == 503:
                assert time.monotonic() < deadline, "the refused ones keep their connections"
                time.sleep(0.1)
            assert found.json()["total"] == 1

        assert own.services.feed.clients <= stream.CLIENTS
        assert max(held) < 256 << 10, "8 MB were told to each"


def test_streams_end_with_their_session(running: Running, job: str) -> None:
    """Events and a log of the one that logs out; those of another and of the token stay."""
    auth = running.services.auth
    running.services.folder.job(job).make()
    running.services.folder.job(job).log.write_text("said\n")
    cookies = [f"{auth.cookie}={auth.log_in(auth.new_code())}" for _ in range(2)]
    with ExitStack() as stack:

        def streams(headers: dict[str, str]) -> list[httpx.Response]:
            paths = ("/events", f"/jobs/{job}/events", f"/jobs/{job}/logs/stream")
            return [
                stack.enter_context(httpx.stream("GET", running.api(path), headers=headers, timeout=30))
                for path in paths
            ]

        own = streams({"cookie": cookies[0]})
        others = [*streams({"cookie": cookies[1]}), *streams({"authorization": f"Bearer {running.token}"})]
        left = httpx.post(
            running.address + "/logout", headers={"cookie": cookies[0], "origin": running.address}
        )
        assert left.status_code == 303

        for answer in own:
            answer.read()  # to its end
        tell(running, job, 1)
        for answer in others[:2] + others[3:5]:
            assert next(text for text in answer.iter_text() if "progress" in text)


def test_one_stream_too_many_is_refused_and_places_are_given_back(running: Running) -> None:
    deadline = time.monotonic() + 20
    while running.services.feed.clients and time.monotonic() < deadline:
        time.sleep(0.05)
    with ExitStack() as stack:
        for _ in range(stream.CLIENTS):
            headers = {"Authorization": f"Bearer {running.token}"}
            opened = httpx.stream("GET", running.api("/events"), headers=headers, timeout=30)
            assert stack.enter_context(opened).status_code == 200
        answer = running.client.get(running.api("/events"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        seen = running.client.get(running.api("/events"), headers={"accept": "text/html"})
        assert (seen.status_code, seen.headers["retry-after"]) == (503, "2")
        assert "<h1>" in seen.text
    while running.services.feed.clients and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running.services.feed.clients == 0


def reader_that_reads_nothing(running: Running, path: str) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", running.port))
    after = running.services.outbox.newest()
    request = (
        f"GET {path}?after={after} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
        f"Authorization: Bearer {running.token}\r\n"
    )
    raw.sendall(f"{request}\r\n".encode())
    return raw


def grown_mib(running: Running, job: str, megabytes: int) -> float:
    """Memory that this process grew by while workers that read nothing were told `megabytes`."""
    with ExitStack() as stack:
        for _ in range(stream.CLIENTS - 1):
            stack.enter_context(closing(reader_that_reads_nothing(running, "/api/v1/training/events")))
        deadline = time.monotonic() + 90
        while running.services.feed.clients < stream.CLIENTS - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running.services.feed.clients == stream.CLIENTS - 1
        good = client_of(running).follow("/events", running.services.outbox.newest())
        process = psutil.Process()
        before = process.memory_info().rss
        most = 0
        for _ in range(megabytes):
            tell(running, job, 500, size=2000)
            assert [one.data["n"] for one in take(good, 500)] == list(range(500)), (
                "others are served all the same"
            )
            most = max(most, process.memory_info().rss - before)
        good.close()
    return most / 2**20


@pytest.mark.parametrize("megabytes", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_workers_that_read_nothing_cost_no_memory(
    running: Running, job: str, megabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 workers, each told all of it: queues would hold 31 times that, this many MiB in the long run."""
    monkeypatch.setattr(stream, "SEND_S", 600.0)  # they stay

    grown = grown_mib(running, job, megabytes)

    assert grown < 30 + megabytes / 10, f"{grown:.0f} MiB for {megabytes} MiB of events"


@pytest.mark.parametrize(("send_s", "look_s"), [(0.5, 600.0), (600.0, 0.2)], ids=["stream", "connection"])
def test_a_reader_that_reads_nothing_is_cut_off(
    running: Running, job: str, monkeypatch: pytest.MonkeyPatch, send_s: float, look_s: float
) -> None:
    """Each of two does it alone: the stream that cannot write, and the watch over connections."""
    monkeypatch.setattr(stream, "SEND_S", send_s)
    monkeypatch.setattr(server, "LOOK_S", look_s)
    with closing(reader_that_reads_nothing(running, "/api/v1/training/events")):
        deadline = time.monotonic() + 60
        while not running.services.feed.clients and time.monotonic() < deadline:
            time.sleep(0.05)
        while running.services.feed.clients and time.monotonic() < deadline:
            tell(running, job, 200, size=2000)
            time.sleep(0.1)
        assert running.services.feed.clients == 0


def test_streams_end_with_the_service(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as own:
        told = client_of(own).follow("/events", 0)
        followed = threading.Thread(target=lambda: list(told))
        followed.start()
        deadline = time.monotonic() + 20
        while not own.services.feed.clients and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        own.stop()
    followed.join(20)

    assert not followed.is_alive()
    assert time.monotonic() - began < 15
