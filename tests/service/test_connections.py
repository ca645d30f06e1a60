"""Databases that the operator named: rows are read with a password that no request or file of a job has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from stoker.errors import ConfigError
from stoker.service.connections import parse_connections, read_connection
from stoker.service.executor import LocalExecutor
from stoker.service.jobs import JobQueue
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from stoker.service.worker import WorkerSettings, worker_of
from tests.service.conftest import made_on
from tests.service.job_folders import SMALL, radio_dataset
from tests.service.running import ask
from tests.sources.sql.server import Server

SECRET = "s3cr@t:word"
JSON = {"content-type": "application/json"}


def file_with(folder: Path, url: str, mode: int = 0o600) -> Path:
    path = folder / "lab.url"
    path.write_text(url + "\n")
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        (
            "postgresql://me:a%40b@db:5433/lab?sslmode=require",
            "postgresql://me@db:5433/lab?sslmode=require",
            "a@b",
        ),
        ("postgresql:///lab", "postgresql:///lab", None),
        ("postgresql://me@/lab?password=x&host=/run/pg", "postgresql://me@/lab?host=/run/pg", "x"),
        ("postgres://me:p%25@db/lab", "postgresql://me@db/lab", "p%"),
        (
            "postgresql://me:x@db/lab?options=-c%20search_path%3Dlab&p%61ssword=a+b&sslmode=require",
            "postgresql://me@db/lab?options=-c%20search_path%3Dlab&sslmode=require",
            "a+b",
        ),
        ("postgresql://me:x@DB/a%2Fb", "postgresql://me@DB/a%2Fb", "x"),
    ],
)
def test_a_url_is_split_from_its_password(tmp_path: Path, url: str, bare: str, password: str | None) -> None:
    assert read_connection("lab", str(file_with(tmp_path, url))) == (bare, password)


@pytest.mark.parametrize("sign", "/#?@:%+&")
@pytest.mark.parametrize("form", ["postgresql://me:{}@db/lab", "postgresql://me@db/lab?password={}"])
def test_a_password_with_a_sign_is_read_rightly_or_refused(tmp_path: Path, sign: str, form: str) -> None:
    secret = f"hush{sign}secret"

    escaped = read_connection("lab", str(file_with(tmp_path, form.format(quote(secret, safe="")))))
    assert escaped == ("postgresql://me@db/lab", secret)

    file, told = file_with(tmp_path, form.format(secret)), ""
    try:
        found = read_connection("lab", str(file))
    except ConfigError as refused:
        found, told = escaped, str(refused)
    assert found == escaped
    assert not told or f"{sign} as {quote(sign, safe='')}" in told
    assert "hush" not in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("postgresql://me:hush@db/lab", 0o640, "chmod 600"),
        ("sqlite:////etc/hush.db", 0o600, "postgresql://"),
        ("hush", 0o600, "postgresql://"),
        ("postgresql://db/lab?sslpassword=hush", 0o600, "sslpassword"),
        ("postgresql://me:hush@db/lab\npostgresql://me:hush@db/lab", 0o600, "one line"),
        ("postgresql://me:hush@[db/lab", 0o600, "one line"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_without_what_is_in_it(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    file = file_with(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=why) as refused:
        parse_connections([f"lab={file}"])
    assert "hush" not in str(refused.value)
    assert str(file) in str(refused.value)


def test_connections_are_named_once_with_a_file(tmp_path: Path) -> None:
    file = file_with(tmp_path, "postgresql:///lab")
    for given in (
        ["lab"],
        ["=x"],
        [f"lab={file}", f"lab={file}"],
        [f"lab={tmp_path}/none"],
        [f"lab={tmp_path}"],
    ):
        with pytest.raises(ConfigError, match="connection"):
            parse_connections(given)


@pytest.fixture
def secured(server: Server) -> Iterator[tuple[str, str]]:
    """A database whose reader needs a password: its owner's URL, and the reader's."""
    owner = made_on(server)
    name = owner.partition("@/")[2].partition("?")[0]
    rules = Path(server.data) / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local {name} reader scram-sha-256\n{before}")
    with server.connect() as connection:
        connection.execute(f"CREATE ROLE reader LOGIN PASSWORD '{SECRET}'")
        connection.execute("SELECT pg_reload_conf()")
    yield owner, f"postgresql://reader:{quote(SECRET, safe='')}@/{name}?host={server.folder}"
    rules.write_text(before)
    with server.connect(name) as connection:
        connection.execute("DROP OWNED BY reader")
        connection.execute("DROP ROLE reader")


def say(services: Services, method: str, path: str, body: Any = None) -> Any:
    token = services.folder.token.read_text().strip()
    found = ask(
        create_app(services), method, path, {"authorization": f"Bearer {token}", **JSON},
        b"" if body is None else json.dumps(body).encode(),
    )  # fmt: skip
    assert SECRET.encode() not in found.body
    assert quote(SECRET, safe="").encode() not in found.body
    return found


@pytest.mark.slow
def test_rows_behind_a_named_connection_are_registered_read_planned_and_trained_on(
    tmp_path: Path, server: Server, secured: tuple[str, str]
) -> None:
    owner, reader = secured
    there = radio_dataset(tmp_path, url=owner)
    with server.connect(owner.partition("@/")[2].partition("?")[0]) as connection:
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    file = file_with(tmp_path, reader)
    services = open_services(tmp_path / "state", connections=[f"lab={file}"])
    api = "/api/v1/training"
    request = {"kind": "radio", "name": "rows", "connection": "lab", "set": there["id"]}

    made = say(services, "POST", f"{api}/datasets", request)
    assert (made.status, made.json()["facts"]["samples"]) == (201, 300)
    assert made.json()["spec"] == {"connection": "lab", "table": "measurement_features", "set": there["id"]}
    assert say(services, "POST", f"{api}/datasets/rows/validate").json()["health"] == "good"
    assert len(say(services, "GET", f"{api}/datasets/rows/samples").json()["samples"]) == 20
    assert say(services, "GET", "/datasets/rows").status == 200
    config = {"dataset_ids": ["rows"], "epochs": 2, "accelerator": "cpu", "early_stop_patience": 0}
    plan = say(services, "POST", f"{api}/plan?wait_s=20", {"config": config}).json()
    assert plan["result"]["records"], plan
    job = say(services, "POST", f"{api}/jobs", {"config": config}).json()["id"]
    settings = WorkerSettings(name="w", state=str(tmp_path / "state"), access=services.access)
    attempt = JobQueue(services.database).take("w")
    assert attempt is not None
    worker = worker_of(settings, services.database)
    assert isinstance(worker.executor, LocalExecutor)
    worker.work(attempt)

    done = say(services, "GET", f"{api}/jobs/{job}").json()["job"]
    assert done["status"] == "completed", done["error_message"]
    for kind in ("logs", "metrics", "files"):
        say(services, "GET", f"{api}/jobs/{job}/{kind}")
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert quote(SECRET, safe="").encode() not in path.read_bytes(), path
    assert SECRET not in os.environ.get("PGPASSWORD", "")
    services.database.close()

    again = open_services(tmp_path / "state")
    refused = say(again, "GET", f"{api}/datasets/rows/samples")
    assert (refused.status, "--connection lab=FILE" in refused.json()["error"]) == (422, True)
    again.database.close()


def test_a_request_names_a_connection_or_a_url(tmp_path: Path) -> None:
    services = open_services(
        tmp_path / "state", connections=[f"lab={file_with(tmp_path, 'postgresql://me:x@127.0.0.1:1/lab')}"]
    )
    row = {"kind": "radio", "name": "rows", "set": str(SMALL.dataset_id)}
    for given, why in (
        ({}, "neither connection nor url"),
        ({"connection": "lab", "url": "postgresql:///lab"}, "both connection and url"),
        ({"connection": "other"}, "the operator named: lab"),
        ({"url": "postgresql://127.0.0.1:1/lab"}, "--database-host"),
    ):
        refused = say(services, "POST", "/api/v1/training/datasets", {**row, **given})
        assert refused.status == 422
        assert why in refused.json()["error"]
    services.database.close()
