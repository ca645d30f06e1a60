"""What happened, read without missing anything."""

from __future__ import annotations

import threading

from stoker.service.database import EVENTS, Database, Outbox, append
from stoker.service.jobs import JobQueue, Jobs
from stoker.service.journal import Line


def test_a_reader_that_follows_many_writers_misses_nothing(database: Database) -> None:
    """A number that becomes visible after a higher one would be passed over for ever."""
    outbox, writers, each = Outbox(database), 6, 12
    seen: list[int] = []
    over = threading.Event()

    def write() -> None:
        for number in range(each):
            with database.writing() as connection:
                append(connection, database.wall, "job", [("progress", {}), ("batch", {"number": number})])

    def follow() -> None:
        while True:
            last_look = over.is_set()
            events = outbox.read(seen[-1] if seen else 0, limit=7)
            seen.extend(event.number for event in events)
            if last_look and not events:
                return

    reader = threading.Thread(target=follow)
    reader.start()
    threads = [threading.Thread(target=write) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    reader.join(60)

    assert seen == [*range(1, 2 * writers * each + 1)]
    assert outbox.newest() == len(seen)


def test_before_the_first_event_the_oldest_is_the_one_to_come(embedded: Database) -> None:
    page = Outbox(embedded).read_page(0, limit=5, most=100)

    assert (page.events, page.oldest, page.newest) == ([], 1, 0)


def test_events_of_one_job_are_read_alone_from_any_number_on(database: Database) -> None:
    jobs, outbox = Jobs(database), Outbox(database)
    one, other = (jobs.create({}, name=name, epochs=1)[0] for name in "ab")
    jobs.pause(one.id)
    jobs.cancel(other.id)

    assert [event.kind for event in outbox.read(0, job=one.id)] == ["queued", "paused"]
    assert [(event.number, event.job) for event in outbox.read(2)] == [(3, one.id), (4, other.id)]
    assert outbox.read(4) == []


def test_what_is_undone_leaves_neither_event_nor_number(database: Database) -> None:
    outbox = Outbox(database)

    try:
        with database.writing() as connection:
            append(connection, database.wall, "job", [("progress", {})])
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass

    assert (outbox.newest(), outbox.read(0)) == (0, [])


def test_old_events_are_removed_but_the_newest_and_the_count_goes_on(database: Database) -> None:
    jobs, outbox = Jobs(database), Outbox(database)
    job, _ = jobs.create({}, name="n", epochs=1)
    attempt = JobQueue(database).take("w")
    JobQueue(database).report(attempt, [Line(kind="batch", data={"batch": n}) for n in range(6)], 1)

    assert outbox.prune(max_age_s=3600.0, max_count=3) == 5
    assert [event.number for event in outbox.read(0)] == [6, 7, 8]
    with database.writing() as connection:
        connection.execute(EVENTS.update().values(at=0.0))
    assert outbox.prune(max_age_s=3600.0, max_count=3) == 2
    page = outbox.read_page(0, limit=5, most=100)
    assert ([event.number for event in page.events], page.oldest, page.newest) == ([8], 8, 8)
    jobs.cancel(job.id)
    assert [event.number for event in outbox.read(8)] == [9]


def test_the_newest_event_of_a_kind_is_found_behind_any_number_of_older_ones(database: Database) -> None:
    jobs, outbox = Jobs(database), Outbox(database)
    first, second, third = (jobs.create({}, name=name, epochs=1)[0].id for name in "abc")
    with database.writing() as connection:
        append(connection, database.wall, first, [("started", {"n": n}) for n in range(5100)])
    with database.writing() as connection:
        append(connection, database.wall, second, [("started", {"n": 1})])

    found = outbox.newest_of("started", [first, second, third])

    assert {job: event.data["n"] for job, event in found.items()} == {first: 5099, second: 1}
