"""Who has changed what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from stoker.errors import DegradedError, ResourceError
from stoker.service import audit
from stoker.service.audit import AuditLog, AuditRow
from tests.service.running import CONFIG, Running, note_radio, serving


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "state") as found:
        note_radio(found.services, CONFIG["dataset_ids"][0])
        yield found


def rows_of(running: Running, count: int) -> list[AuditRow]:
    """Wait for so many rows; return them, the oldest first."""
    until = time.monotonic() + 20
    while len(rows := running.services.audit.read()) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(rows) == count, rows
    return rows[::-1]


def test_each_change_is_kept_with_who_asked_and_what_became_of_it(running: Running) -> None:
    client = running.client
    job = client.post(running.api("/jobs"), json={"config": CONFIG}).json()["id"]
    client.get(running.api("/jobs"))  # changes nothing
    client.post(running.api("/plan"), json={"config": {}})  # nor does this
    assert client.post(running.api("/jobs/none/cancel")).status_code == 404
    with httpx.Client(base_url=running.address, trust_env=False) as browser:
        code = client.post(running.api("/login-codes")).json()["path"]
        browser.get(code)
        origin = {"origin": running.address}
        assert browser.post(f"/api/v1/training/jobs/{job}/cancel", headers=origin).status_code == 200
        assert httpx.post(running.api("/jobs"), json={}, trust_env=False).status_code == 401

        rows = rows_of(running, 4)
        page = browser.get("/activity").text
    told = [(row.method, row.path.rpartition("/")[2], row.status) for row in rows]
    assert told == [("POST", "jobs", 201), ("POST", "cancel", 404), ("POST", "login-codes", 201),
                    ("POST", "cancel", 200)]  # fmt: skip
    assert [row.who.split()[0] for row in rows] == ["token", "token", "token", "session"]
    assert {row.client for row in rows} == {"127.0.0.1"}
    assert f"jobs/{job}/cancel" in page
    found = client.get(running.api("/audit"), params={"limit": 2}).json()["rows"]
    assert [row["number"] for row in found] == [rows[3].number, rows[2].number]
    older = client.get(running.api("/audit"), params={"before": rows[2].number}).json()["rows"]
    assert [row["number"] for row in older] == [rows[1].number, rows[0].number]


def test_no_secret_of_an_address_is_kept(running: Running) -> None:
    running.client.post(running.api("/jobs?token=secret"), json={"config": CONFIG})

    assert "secret" not in str(rows_of(running, 1))


@pytest.mark.parametrize(
    "error", [DegradedError("no answer"), ResourceError("full"), sa.exc.DataError("INSERT", {}, OSError())]
)
def test_rows_wait_while_they_cannot_be_written(
    running: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    log: AuditLog = running.services.audit
    write: Callable[..., Any] = running.services.database.writing

    def away(*_: Any, **__: Any) -> Any:
        raise error

    def note(path: str) -> None:
        log.note(who="token", client="c", method="POST", path=path, status=200)

    monkeypatch.setattr(audit, "MOST_WAITING", 3)
    monkeypatch.setattr(running.services.database, "writing", away)
    for number in range(5):
        note(f"/{number}")
    time.sleep(0.2)
    monkeypatch.setattr(running.services.database, "writing", write)
    with log._lock:
        assert [row["path"] for row in log._waiting] == ["/0", "/1", "/2"]
        log._waiting.popleft()  # room for the next one, which tries again
    note("/last")

    assert [row.path for row in rows_of(running, 3)] == ["/1", "/2", "/last"]


def test_a_row_is_never_longer_than_its_columns(running: Running) -> None:
    long = "X" * 2000
    running.services.audit.note(who=long, client=long, method=long, path=long, status=400)

    (row,) = rows_of(running, 1)
    assert [len(row.who), len(row.client), len(row.method), len(row.path)] == [60, 100, 10, 500]


def test_old_rows_are_removed(running: Running) -> None:
    log: AuditLog = running.services.audit
    for number in range(6):
        log.note(who="token", client="c", method="POST", path=f"/{number}", status=200)
    rows_of(running, 6)

    assert log.prune(max_age_s=3600.0, max_count=4) == 2
    assert [row.path for row in rows_of(running, 4)] == ["/2", "/3", "/4", "/5"]
    assert log.prune(max_age_s=-1.0, max_count=4) == 4
