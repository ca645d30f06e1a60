"""A data set that was registered under other roots and servers is not read."""

from __future__ import annotations

import json
import pickle
import uuid
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from stoker.service.database import DATASETS, State
from stoker.service.datasets import Registration
from stoker.service.jobs import JobQueue
from stoker.service.probes import PROBES
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from stoker.service.worker import WorkerSettings, worker_of
from stoker.sources.sql.query import sqlite_url
from tests.service.job_folders import SMALL, burgers_dataset, radio_dataset
from tests.service.running import ask, note_radio

JSON = {"content-type": "application/json"}


@pytest.fixture
def two_roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders, with data in the first."""
    (tmp_path / "first").mkdir()
    burgers_dataset(tmp_path / "first")
    radio_dataset(tmp_path / "first")
    (tmp_path / "second").mkdir()
    return tmp_path / "first", tmp_path / "second"


def opened(state: Path, root: Path, *servers: str) -> Services:
    """A service that looks at data in this process."""
    services = open_services(state, roots=[root], database_hosts=servers)
    services.datasets._probe = lambda what, *given, **named: PROBES[what](*given, **named)
    return services


def registered(state: Path, root: Path) -> list[str]:
    """Data sets, a file and rows of a database, registered while the service was started with a root; ids."""
    found: list[str] = []
    services = opened(state, root, "lab.example")
    for request in (
        {"kind": "hdf5", "name": "file", "path": str(next(root.glob("*.h*5")))},
        {"kind": "radio", "name": "rows", "url": sqlite_url(root / "radio.db"), "set": SMALL.dataset_id},
    ):
        found.append(services.datasets.register(TypeAdapter(Registration).validate_python(request)).id)
    note_radio(services, str(uuid.uuid4()), "server")
    with services.database.writing() as connection:
        spec = {"url": "postgresql://lab.example/x", "table": "t", "set": str(uuid.uuid4())}
        connection.execute(DATASETS.update().where(DATASETS.c.name == "server").values(spec=spec))
    services.database.close()
    return found


@pytest.mark.parametrize("name", ["file", "rows", "server"])
def test_data_outside_of_the_roots_of_this_start_is_not_read(
    tmp_path: Path, two_roots: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_roots
    registered(tmp_path / "state", first)
    where = "lab.example" if name == "server" else str(first)

    services = open_services(tmp_path / "state", roots=[second])
    monkeypatch.setattr(services.datasets, "_probe", lambda *_, **__: pytest.fail("it was looked at"))
    token = {"authorization": f"Bearer {services.folder.token.read_text().strip()}"}
    app = create_app(services)
    one = f"/api/v1/training/datasets/{name}"
    told = ask(app, "GET", one, token).json()
    (listed,) = [row for row in ask(app, "GET", one.rpartition("/")[0], token).json()["datasets"]
                 if row["name"] == name]  # fmt: skip

    assert (told["health"], listed["health"]) == ("bad", "bad")
    assert where in told["report"][-1]["detail"]
    for method, path in (("POST", "/inspect"), ("POST", "/validate"), ("GET", "/samples")):
        refused = ask(app, method, one + path, token)
        assert refused.status in (403, 422)
        assert where in refused.json()["error"]
    for path in ("/jobs", "/plan"):
        body = json.dumps({"config": {"dataset_ids": [name]}}).encode()
        refused = ask(app, "POST", f"/api/v1/training{path}", {**token, **JSON}, body)
        assert refused.status in (403, 422)
        assert where in refused.json()["error"]
    page = ask(app, "GET", f"/datasets/{name}", token)
    assert where in page.body.decode()
    services.datasets.delete(name)
    services.database.close()


def test_data_is_there_again_with_the_root_it_was_registered_under(
    tmp_path: Path, two_roots: tuple[Path, Path]
) -> None:
    first, second = two_roots
    registered(tmp_path / "state", first)
    open_services(tmp_path / "state", roots=[second]).database.close()
    (tmp_path / "link").symlink_to(first)

    services = opened(tmp_path / "state", tmp_path / "link", "lab.example")

    assert {one.health for one in services.datasets.list()} == {"unknown", "good"}
    assert services.datasets.samples("file", limit=1)
    services.database.close()


def test_a_hint_of_data_outside_of_the_roots_works_when_it_is_followed(
    tmp_path: Path, two_roots: tuple[Path, Path]
) -> None:
    first, second = two_roots
    registered(tmp_path / "state", first)
    services = open_services(tmp_path / "state", roots=[second])
    why = services.access.why_not(services.datasets.get("file").spec)
    services.database.close()
    assert why is not None
    root = Path(why.partition("--root ")[2].partition(",")[0])

    again = open_services(tmp_path / "state", roots=[root])
    assert again.datasets.get("file").health == "unknown"
    again.database.close()


def test_a_job_that_waited_while_the_root_changed_is_told_why_it_cannot_read(
    tmp_path: Path, two_roots: tuple[Path, Path]
) -> None:
    first, second = two_roots
    id, _ = registered(tmp_path / "state", first)
    services = open_services(tmp_path / "state", roots=[second])
    job, _ = services.jobs.create({}, name="n", epochs=1, dataset_ids=[id])
    settings = WorkerSettings(name="w", state=str(tmp_path / "state"), access=services.access)
    worker = worker_of(settings, services.database)
    attempt = JobQueue(services.database).take("w")
    assert attempt is not None

    worker.work(attempt)

    ended = services.jobs.get(job.id)
    assert ended.state is State.FAILED
    assert str(first) in (ended.error or "")
    assert not services.folder.job(job.id).job_file.exists()
    services.database.close()
    assert pickle.loads(pickle.dumps(settings)) == settings, "as a worker process is told"


def test_a_job_whose_encoder_is_no_longer_allowed_does_not_run(tmp_path: Path) -> None:
    services = open_services(tmp_path / "state")
    config = {"settings": {"encoder.target": "nets:Net"}}
    job, _ = services.jobs.create(config, name="n", epochs=1, dataset_ids=[])
    settings = WorkerSettings(name="w", state=str(tmp_path / "state"), access=services.access)
    attempt = JobQueue(services.database).take("w")
    assert attempt is not None

    worker_of(settings, services.database).work(attempt)

    ended = services.jobs.get(job.id)
    assert ended.state is State.FAILED
    assert "--allow-encoder nets:Net" in (ended.error or "")
    services.database.close()
