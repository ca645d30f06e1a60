"""Data sets that the service generates: several of one seed, and pages that follow their jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import SourceError
from stoker.extras.radio.demo import RadioSpec, radio_rows, write_radio
from stoker.service.database import JOBS, METRICS, State
from stoker.service.folders import JobFile
from stoker.service.job_config import JobConfig
from stoker.service.jobs import JobQueue, Outcome
from stoker.service.journal import Journal, Line
from stoker.service.runs import generate
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from stoker.service.views import USERS, similar_job
from tests.service.job_folders import lines
from tests.service.running import ask

API = "/api/v1/training"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    opened = open_services(tmp_path / "state")
    yield opened
    opened.database.close()


def say(services: Services, method: str, path: str, body: Any = None) -> Any:
    token = {"authorization": "Bearer " + services.folder.token.read_text().strip()}
    headers = {**token, "content-type": "application/json"}
    return ask(
        create_app(services), method, path, headers, b"" if body is None else json.dumps(body).encode()
    )


def made(services: Services, folder: Path, **body: Any) -> dict[str, Any]:
    """A data set, and its job done here."""
    dataset = say(services, "POST", f"{API}/datasets/generate", body).json()["dataset"]
    job = JobFile(
        id="g", name="g", kind="generation", attempt=1, epochs=1, epoch=0, checkpoint=None, config={},
        datasets=[dataset], dataset_ids=[dataset["id"]], caches="", data="", limits={},
    )  # fmt: skip
    folder.mkdir()
    generate(job, Journal(folder / "events.jsonl"))
    return say(services, "POST", f"{API}/datasets/{dataset['name']}/inspect", {}).json()


def test_several_sets_of_one_seed_are_generated_next_to_each_other(
    services: Services, tmp_path: Path
) -> None:
    first = made(services, tmp_path / "a", kind="radio", name="a", rows=40)
    second = made(services, tmp_path / "b", kind="radio", name="b", rows=40)
    third = made(services, tmp_path / "c", kind="radio", name="c", rows=60, seed=0)

    assert [one["facts"]["samples"] for one in (first, second, third)] == [40, 40, 60]
    assert len({one["id"] for one in (first, second, third)}) == 3
    told = [line["data"] for line in lines(tmp_path / "a", "progress")]
    assert told[0]["progress"] == 1 / 40


def test_names_change_keys_and_no_values() -> None:
    plain, other = (list(radio_rows(RadioSpec(rows=30, name=name))) for name in ("", "other"))
    keys = [[str(row.pop("recording_session_id")) for row in rows] for rows in (plain, other)]
    for row in (*plain, *other):
        row.pop("dataset_id")

    assert plain == other
    assert not {*keys[0]} & {*keys[1]}
    assert len({*keys[1]}) == 30


def test_rows_with_the_keys_of_another_set_say_what_to_do(tmp_path: Path) -> None:
    write_radio(tmp_path / "radio.db", RadioSpec(rows=20))

    with pytest.raises(SourceError, match="another seed"):
        write_radio(tmp_path / "radio.db", RadioSpec(rows=30))
    write_radio(tmp_path / "radio.db", RadioSpec(rows=30, seed=1))


def test_the_page_of_a_data_set_follows_the_job_that_makes_it(services: Services) -> None:
    body = {"kind": "radio", "name": "a", "rows": 40}
    begun = say(services, "POST", f"{API}/datasets/generate", body).json()
    queue, part = JobQueue(services.database), f"/parts/datasets/{begun['dataset']['id']}/making"
    page = say(services, "GET", "/datasets/a").body.decode()
    assert part in page
    assert begun["job"]["id"] in page
    assert "/parts/datasets/a/samples" not in page

    attempt = queue.take("w")
    assert attempt is not None
    queue.report(attempt, [Line(kind="progress", data={"message": "20 of 40 rows", "progress": 0.5})], 9)
    now = say(services, "GET", part)
    assert 'value="0.5"' in now.body.decode()
    assert "20 of 40 rows" in now.body.decode()
    assert "hx-refresh" not in now.headers

    queue.finish(attempt, Outcome(state=State.COMPLETED), lines=[], position=9)
    assert say(services, "GET", part).headers["hx-refresh"] == "true"
    assert part not in say(services, "GET", "/datasets/a").body.decode()


def test_the_page_of_a_data_set_finds_its_jobs_among_many_newer_ones(services: Services) -> None:
    body = {"kind": "radio", "name": "a", "rows": 40}
    begun = say(services, "POST", f"{API}/datasets/generate", body).json()
    id, maker = begun["dataset"]["id"], begun["job"]["id"]
    jobs = services.jobs
    older, _ = jobs.create({"batch_size": 8}, name="older", epochs=1, dataset_ids=[id])
    row = {"epoch": 1, "seconds": 2.0}
    with services.database.writing() as connection:
        connection.execute(JOBS.update().where(JOBS.c.id == older.id).values(epoch=1))
        connection.execute(METRICS.insert().values(job=older.id, epoch=1, at=1.0, data=row))
    for number in range(USERS):
        jobs.create({}, name=f"other {number}", epochs=1, dataset_ids=["other"])

    for path in ("/datasets/a", f"/parts/datasets/{id}/making"):
        assert maker in say(services, "GET", path).body.decode()
    assert older.id in say(services, "GET", "/datasets/a").body.decode()
    similar, seconds = similar_job(services, JobConfig(dataset_ids=("a",), batch_size=8))
    assert similar is not None
    assert (similar.id, seconds) == (older.id, 2.0)
