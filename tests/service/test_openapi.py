"""The description of the API: it is whole, its examples hold, and what it describes never ends in a fault."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from stoker.service import client, models
from stoker.service.database import DATASETS, JOBS, State
from stoker.service.jobs import JobQueue, Outcome
from stoker.service.journal import Line
from stoker.service.models import DATASET, FINGERPRINT, JOB, read_examples
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from tests.service.running import CONFIG, ask, note_radio, serving

PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"
LOOKS = {
    "facts": {"samples": 3, "named_splits": False},
    "check": [{"check": "rows", "status": "pass", "detail": "3 rows"}],
    "samples": [{"number": 0}],
    "remove": None,
}
"""What looking at any data set says: a process for each of thousands of requests would take an hour."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = open_services(tmp_path_factory.mktemp("openapi") / "state", database_hosts=["local"])
    note_radio(services, DATASET)
    services.jobs.create({**CONFIG, "dataset_ids": [DATASET]}, name="there", epochs=3)
    spec = {"url": "postgresql:///lab", "table": "measurement_features", "set": DATASET}
    with services.database.writing() as connection:
        connection.execute(DATASETS.update().values(name="lab", spec=spec))
        connection.execute(JOBS.update().values(id=JOB))
    pretend(services)
    yield services
    services.database.close()


def pretend(services: Services) -> None:
    """Data for the examples; streams that end at once."""
    (services.folder.data / "pdebench").mkdir()
    (services.folder.data / "pdebench" / "burgers1d_train.h5").touch()
    (services.folder.data / "cells").mkdir()
    services.datasets._probe = lambda what, *_args, **_more: json.loads(json.dumps(LOOKS[what]))
    services.feed.closing = True


@pytest.fixture(scope="module")
def described(here: Services) -> dict[str, Any]:
    return create_app(here).openapi()


def operations(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


def test_what_was_promised_is_there(described: dict[str, Any]) -> None:
    promised = """
        POST /jobs, GET /jobs, GET /jobs/{job_id}, PATCH /jobs/{job_id}, DELETE /jobs/{job_id},
        POST /jobs/{job_id}/cancel,
        POST /jobs/{job_id}/pause, POST /jobs/{job_id}/resume, POST /jobs/{job_id}/continue,
        GET /jobs/{job_id}/metrics, GET /jobs/{job_id}/timeline, GET /jobs/{job_id}/metrics.csv,
        GET /jobs/{job_id}/files, GET /jobs/{job_id}/files/{name},
        GET /jobs/{job_id}/logs, GET /jobs/{job_id}/logs/stream,
        GET /jobs/{job_id}/events, GET /events, POST /plan, POST /datasets, POST /datasets/generate,
        GET /datasets, GET /datasets/{dataset_id}, POST /datasets/{dataset_id}/inspect,
        POST /datasets/{dataset_id}/validate, GET /datasets/{dataset_id}/samples,
        DELETE /datasets/{dataset_id},
        GET /caches, GET /caches/{name}/{fingerprint}, POST /caches/{name}/{fingerprint}/verify,
        GET /caches/{name}/{fingerprint}/why,
        DELETE /caches/{name}/{fingerprint}, POST /caches/gc, GET /operations/{operation_id}, GET /ready,
        GET /machine, GET /machine/timeline, GET /audit, POST /login-codes
    """
    wanted = {one.strip().replace(" /", " /api/v1/training/") for one in promised.split(",")}

    assert wanted | {"GET /health", "GET /metrics"} == set(operations(described))


def test_every_operation_says_what_it_does_and_how_it_fails(described: dict[str, Any]) -> None:
    for name, operation in operations(described).items():
        assert operation["description"], name
        if not name.endswith("/health"):
            refusals = {"400", "401", "403", "408", "413", "422", "431", "503", "504"}
            assert refusals <= set(operation["responses"]), name
            assert operation["security"] == [{"HTTPBearer": []}], name


def test_the_names_that_programs_call_stay(described: dict[str, Any]) -> None:
    """Clients that are generated from the document have a function for each: rename none."""
    promised = """
        create_job list_jobs get_job change_job delete_job cancel_job pause_job resume_job
        continue_job get_metrics get_metrics_csv get_files get_file get_timeline get_logs plan_job
        stream_logs stream_job_events stream_events register_dataset list_datasets generate_dataset
        get_dataset delete_dataset inspect_dataset validate_dataset get_samples list_caches
        get_cache delete_cache verify_cache compare_caches collect_caches get_operation get_ready
        get_machine get_audit create_login_code get_health get_machine_timeline get_prometheus
    """

    assert sorted(promised.split()) == sorted(one["operationId"] for one in operations(described).values())


def test_the_page_of_the_api_shows_every_operation_and_its_commands_work(
    described: dict[str, Any], here: Services
) -> None:
    app = create_app(here)
    token = here.folder.token.read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    shown = ask(app, "GET", "/docs", headers)
    text = shown.body.decode()
    parts = [html.unescape(part) for part in re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.DOTALL)]

    assert (shown.status, ask(app, "GET", "/docs").status) == (200, 401)
    assert "http" not in re.sub(
        r"http://127\.0\.0\.1:8765", "", " ".join(re.findall(r"(?:src|href)=\S+", text))
    )
    assert set(re.findall(r'<details id="(\w+)"', text)) == {
        one["operationId"] for one in operations(described).values()
    }
    commands = [part for part in parts if part.startswith("curl")]
    assert len(commands) == len(operations(described))
    for command in commands:
        words = shlex.split(command.replace("$TOKEN", token).replace("$STOKER_SERVER", ""))
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        sent = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
        body = words[words.index("-d") + 1] if "-d" in words else ""
        path = words[-1].replace("JOB_ID", JOB).replace("DATASET_ID", DATASET)
        path = path.replace("FINGERPRINT", FINGERPRINT).replace("/NAME", "/radio_train")
        if method == "DELETE":
            continue
        with here.database.writing() as connection:
            connection.execute(JOBS.update().values(state=State.PAUSED))
        answer = ask(app, method, path, sent, body.encode())
        refused = answer.json() if answer.status >= 400 else {}
        # What only training makes is missing, but the request is understood.
        assert answer.status < 300 or answer.status in (404, 409), f"{command}: {refused}"
        assert "nothing is at" not in refused.get("fact", "")


def examples(described: dict[str, Any], content: dict[str, Any]) -> list[Any]:
    """Every example of a body."""
    shown: list[Any] = []
    for media in content.values():
        name = str(media.get("schema", {}).get("$ref", "")).rpartition("/")[2]
        shown += [one["value"] for one in media.get("examples", {}).values()]
        shown += [media["example"]] if "example" in media else []
        shown += described["components"]["schemas"].get(name, {}).get("examples", [])
    return shown


def test_every_body_has_examples(described: dict[str, Any]) -> None:
    for name, operation in operations(described).items():
        bodies = {status: answer.get("content", {}) for status, answer in operation["responses"].items()}
        bodies["request"] = operation.get("requestBody", {}).get("content", {})
        for what, content in bodies.items():
            assert examples(described, content) or not content, f"{name} {what} has no example"


@pytest.mark.parametrize(
    ("row", "model"),
    [
        (client.JobRow, models.JobOut), (client.JobPage, models.JobList),
        (client.JobDetail, models.JobDetail),
        (client.DatasetRow, models.DatasetOut), (client.DatasetPage, models.DatasetList),
    ],
)  # fmt: skip
def test_what_the_client_says_of_an_answer_is_in_it(row: Any, model: type[BaseModel]) -> None:
    """The client repeats the fields, since it has to work without the packages of the service."""
    assert {*row.__annotations__} <= {*model.model_fields}


def test_the_description_is_made_once(here: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(here)
    before = app.openapi()
    monkeypatch.delattr(Path, "read_text")

    assert app.openapi() == before


def test_examples_fit_their_models() -> None:
    models = {one.__name__: one for one in BaseModel.__subclasses__() if "stoker.service" in one.__module__}

    for name, shown in read_examples().items():
        for value in shown:
            assert models[name].model_validate(value).model_fields_set == set(value), name


def test_every_example_is_taken_and_answered_as_shown(described: dict[str, Any], here: Services) -> None:
    """The members of an example are those of an answer: neither can get one that the other lacks."""
    app = create_app(here)
    token = {"authorization": "Bearer " + here.folder.token.read_text().strip()}
    names = {"job_id": JOB, "dataset_id": DATASET}
    sent = 0
    for name, operation in sorted(operations(described).items(), reverse=True):  # what deletes comes last
        method, path = name.split()
        if "{fingerprint}" in path or path.endswith(("{operation_id}", "/continue", "/plan", "{name}")):
            continue  # they need what only training makes
        with here.database.writing() as connection:
            state = State.CANCELLED if method == "DELETE" else State.PAUSED
            connection.execute(JOBS.update().values(state=state))
        content = operation.get("requestBody", {}).get("content", {})
        for value in examples(described, content) if content else [None]:
            body = b"" if value is None else json.dumps(value).encode()
            headers = {**token, "content-type": "application/json"}
            answer = ask(app, method, path.format(**names), headers, body)
            sent += 1
            assert str(answer.status) in operation["responses"], name
            assert answer.status < 300, f"{name}: {answer.body[:300]!r}"
            shown = operation["responses"][str(answer.status)].get("content", {}).get("application/json")
            if shown is not None:
                assert_alike(examples(described, {"": shown}), answer.json(), name)
    assert sent >= 28


def assert_alike(shown: list[Any], got: dict[str, Any], name: str) -> None:
    """An example has the members of an answer; a machine tells more than an example of it shows."""
    for example in shown:
        missing = set(got) ^ set(example)
        assert not missing or name.endswith("/machine"), f"{name}: {missing}"


@contextmanager
def worked_on(services: Services) -> Iterator[None]:
    """Somebody takes the jobs and ends them in turn well, badly and not at all."""
    stop = threading.Event()

    def work() -> None:
        queue, count = JobQueue(services.database), 0
        while not stop.wait(0.05):
            if (attempt := queue.take("worker")) is None:
                continue
            count += 1
            row = [Line(kind="metrics", data={"epoch": 1, "val_loss": 0.5, "checkpoint": "last-1"})]
            if count % 3 == 0:
                queue.report(attempt, row, 9)
            else:
                state = State.COMPLETED if count % 3 == 1 else State.FAILED
                queue.finish(attempt, Outcome(state=state, exit_code=count % 3 - 1), lines=row, position=9)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(30)


WITHOUT = (
    "positive_data_acceptance",  # a schema cannot say which data sets there are
    "allow_header_conformance",  # /datasets/generate can be a data set's name, so it takes GET as well
)
PHASES = {"examples": "examples", "coverage": "coverage", "fuzzing": "fuzzing", "stateful": "stateful"}
EXAMPLES = int(os.environ.get("STOKER_EXAMPLES", "20"))
"""Requests made up for each operation, and courses of several: counts bound the test, not its time."""


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("phase", PHASES)
def test_no_generated_request_ends_in_a_fault(tmp_path: Path, phase: str) -> None:
    """Sound and unsound requests, alone and one after another, also without a token: no 500, and every
    answer is as described."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install schemathesis")
    with serving(tmp_path / "state") as running:
        note_radio(running.services, DATASET)
        pretend(running.services)
        began = time.monotonic()
        with worked_on(running.services):
            done = subprocess.run(
                [
                    sys.executable, "-c", PROGRAM, "run", running.api("/openapi.json"),
                    "--header", f"Authorization: Bearer {running.token}",
                    "--checks", "all", "--exclude-checks", ",".join(WITHOUT), "--phases", PHASES[phase],
                    "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color",
                ],
                cwd=tmp_path, capture_output=True, text=True, timeout=1900,
            )  # fmt: skip

    answers = running.services.traffic.answers
    print(f"{phase}: {answers.total():,} requests in {time.monotonic() - began:.0f} s")  # noqa: T201 (-s)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    count = len(operations(create_app(running.services).openapi()))
    assert f"{count}/{count}" in done.stdout
