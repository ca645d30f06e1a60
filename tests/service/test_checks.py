"""The check of a data set says how much it read, and reads everything if it is asked to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import ServiceError
from stoker.service.client import Client
from stoker.service.kinds import spread
from stoker.service.probes import PROBES, _answer_of, probe
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from tests.service.job_folders import images_dataset, radio_dataset
from tests.service.running import ask, serving

API = "/api/v1/training"


def report(kind: str, spec: dict[str, Any], **given: Any) -> dict[str, dict[str, Any]]:
    return {str(row["check"]): row for row in PROBES["check"](kind, spec, **given)}


def test_one_broken_image_of_a_folder_is_found(tmp_path: Path) -> None:
    spec = images_dataset(tmp_path, count=40)["spec"]
    (tmp_path / "images" / "light" / "7.png").write_bytes(b"no image")

    found = report("images", spec)

    assert found["content"]["status"] == "fail"
    assert "7.png" in found["content"]["detail"]
    assert found["read"]["detail"] == "80 of 80 samples"


def test_a_check_that_reads_some_samples_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = images_dataset(tmp_path, count=30)["spec"]
    monkeypatch.setattr("stoker.service.kinds.CHECKED", 20)

    assert report("images", spec)["read"]["detail"].startswith("20 of 60")
    monkeypatch.setattr("stoker.service.kinds.CHECK_S", -1.0)
    assert report("images", spec)["read"]["detail"].startswith("8 of 60")
    told: list[tuple[int, int]] = []
    found = report("images", spec, everything=True, tell=lambda *one: told.append(one))
    assert found["read"]["detail"] == "60 of 60 samples"
    assert told[-1] == (60, 60)


def test_all_rows_of_a_database_are_checked(tmp_path: Path) -> None:
    assert report("radio", radio_dataset(tmp_path)["spec"])["read"]["detail"] == "300 of 300 rows"


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100, 1000])
def test_numbers_are_spread_and_different(count: int) -> None:
    few = [*spread(count, 8)]

    assert len({*few}) == min(count, 8)
    assert sorted(spread(count, count)) == [*range(count)]
    if count >= 100:
        gaps = [after - before for before, after in zip(sorted(few), [*sorted(few)[1:], count], strict=True)]
        assert max(gaps) < count / 3


def test_progress_is_reported_by_the_process_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = images_dataset(tmp_path)["spec"]
    told: list[tuple[int, int]] = []

    probe("check", "images", spec, everything=True, on_progress=lambda *one: told.append(one))

    assert told[0] == (1, 24)


def test_reading_everything_ends_at_its_limit_of_time_however_often_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.service.probes.TOTAL_S", 0.1)
    ours, theirs = socket.socketpair()
    wanted = threading.Event()

    def report() -> None:
        with theirs:
            for _ in range(1000):
                if wanted.wait(0.01):
                    break
                theirs.sendall(b"[1, 24]\n")

    reports = threading.Thread(target=report)
    reports.start()
    with ours:
        child: Any = SimpleNamespace(socket=ours, wait=lambda _: True)
        said = _answer_of(child, 60.0, lambda *_: None)
        wanted.set()
        reports.join()

    assert said is None


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    images_dataset(tmp_path / "data")
    opened = open_services(tmp_path / "state", roots=[tmp_path / "data"])
    yield opened
    opened.database.close()


def say(services: Services, method: str, path: str, body: Any = None) -> Any:
    token = {"authorization": "Bearer " + services.folder.token.read_text().strip()}
    headers = {**token, "content-type": "application/json"}
    data = b"" if body is None else json.dumps(body).encode()
    return ask(create_app(services), method, path, headers, data)


def test_reading_everything_is_an_operation_with_progress_and_an_end(
    services: Services, tmp_path: Path
) -> None:
    request = {"kind": "images", "name": "shades", "path": "images"}
    assert say(services, "POST", f"{API}/datasets", request).status == 201
    (tmp_path / "data" / "images" / "dark" / "3.png").write_bytes(b"no image")

    read, probe_it = threading.Event(), services.datasets._probe

    def waiting(what: str, *given: Any, **named: Any) -> Any:
        named["on_progress"](7, 24)
        assert read.wait(60)
        return probe_it(what, *given, **named)

    services.datasets._probe = waiting

    begun = say(services, "POST", f"{API}/datasets/shades/validate?all=true&wait_s=1", {})

    assert begun.status == 202
    assert (begun.json()["done"], begun.json()["total"]) == (7, 24)
    page = say(services, "GET", "/datasets/shades").body.decode()
    assert begun.json()["id"] in page, "the page follows what runs"
    assert say(services, "POST", f"{API}/datasets/shades/validate?all=true", {}).status == 409
    read.set()
    until = time.monotonic() + 60
    while (now := say(services, "GET", f"{API}/operations/{begun.json()['id']}").json())[
        "state"
    ] == "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    assert now["state"] == "completed"
    assert now["result"]["health"] == "bad"
    known = say(services, "GET", f"{API}/datasets/shades").json()
    assert known == now["result"]
    page = say(services, "GET", "/datasets/shades").body.decode()
    assert "24 of 24 samples read" in page
    assert "data-running" not in page
    services.datasets._probe = probe_it
    again = say(services, "POST", f"{API}/datasets/shades/validate?all=true", {})
    assert (again.status, again.json()["health"]) == (200, "bad")


def test_checks_delay_no_other_operation_and_end_with_their_data_set(
    services: Services, tmp_path: Path
) -> None:
    ended = threading.Event()

    def reading(*_: Any, **named: Any) -> Any:
        try:
            while True:
                named["on_progress"](7, 24)
                time.sleep(0.01)
        finally:
            ended.set()

    for name in ("a", "b"):
        images_dataset(tmp_path / "data" / name)
        request = {"kind": "images", "name": name, "path": f"{name}/images"}
        assert say(services, "POST", f"{API}/datasets", request).status == 201
    services.datasets._probe = reading
    begun = [
        say(services, "POST", f"{API}/datasets/{name}/validate?all=true&wait_s=0", {}) for name in ("a", "b")
    ]
    assert [one.status for one in begun] == [202, 202]

    assert say(services, "POST", f"{API}/caches/gc", {}).status == 200
    for name, one in zip("ab", begun, strict=True):
        ended.clear()
        assert say(services, "DELETE", f"{API}/datasets/{name}").status == 204
        assert ended.wait(60)
        where, until = f"{API}/operations/{one.json()['id']}", time.monotonic() + 60
        while (now := say(services, "GET", where).json())["state"] == "running":
            assert time.monotonic() < until
        assert "was deleted" in now["error"]


def test_the_client_waits_for_the_end_of_a_check(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as running:
        images_dataset(running.services.folder.data)
        client = Client(running.address, running.token)
        client.register({"kind": "images", "name": "shades", "path": "images"})

        assert client.dataset("shades", check="some")["health"] == "good"
        assert client.dataset("shades", check="all")["health"] == "good"

        def failing(*_: Any, **__: Any) -> Any:
            time.sleep(0.2)
            raise RuntimeError

        running.services.datasets._probe = failing
        with pytest.raises(ServiceError):
            client.dataset("shades", check="all")
