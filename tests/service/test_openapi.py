"""The description of the API: it is whole, and what it describes never ends in a fault of ours."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import SourceError
from stoker.service.app import create_app
from stoker.service.services import open_services
from tests.service.running import CONFIG, note_radio, serving

CHECKS = (
    "not_a_server_error",
    "response_schema_conformance",
    "content_type_conformance",
    "status_code_conformance",
)
PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    services = open_services(tmp_path_factory.mktemp("openapi") / "state")
    try:
        return create_app(services).openapi()
    finally:
        services.database.close()


def operations(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


def test_what_was_promised_is_there(described: dict[str, Any]) -> None:
    promised = """
        POST /jobs, GET /jobs, GET /jobs/{job_id}, DELETE /jobs/{job_id}, POST /jobs/{job_id}/cancel,
        POST /jobs/{job_id}/pause, POST /jobs/{job_id}/resume, POST /jobs/{job_id}/continue,
        GET /jobs/{job_id}/metrics, GET /jobs/{job_id}/logs, GET /jobs/{job_id}/logs/stream,
        GET /jobs/{job_id}/events, GET /events, POST /plan, POST /datasets, POST /datasets/generate,
        GET /datasets, GET /datasets/{dataset_id}, POST /datasets/{dataset_id}/inspect,
        POST /datasets/{dataset_id}/validate, GET /datasets/{dataset_id}/samples,
        DELETE /datasets/{dataset_id},
        GET /caches, GET /caches/{name}/{fingerprint}, POST /caches/{name}/{fingerprint}/verify,
        GET /caches/{name}/{fingerprint}/why, POST /caches/gc, GET /operations/{operation_id}, GET /ready,
        GET /machine, POST /login-codes
    """
    wanted = {one.strip().replace(" /", " /api/v1/training/") for one in promised.split(",")}

    assert wanted | {"GET /health", "GET /metrics"} == set(operations(described))


def test_every_operation_says_what_it_does_and_how_it_fails(described: dict[str, Any]) -> None:
    for name, operation in operations(described).items():
        assert operation["description"], name
        if not name.endswith("/health"):
            assert {"401", "403", "422", "503"} <= set(operation["responses"]), name
        if "/api/" in name:
            assert operation["security"] == [{"HTTPBearer": []}], name
        if body := operation.get("requestBody"):
            content = body["content"]["application/json"]
            schema = described["components"]["schemas"].get(
                str(content["schema"].get("$ref", "")).rpartition("/")[2]
            )
            assert content.get("examples") or (schema or {}).get("examples"), f"{name} has no example"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_no_generated_request_ends_in_a_fault(tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install schemathesis")

    def look(*_args: object, **_more: object) -> None:
        raise SourceError("there is no such data")

    with serving(tmp_path / "state") as running:
        note_radio(running.services, CONFIG["dataset_ids"][0])
        running.services.jobs.create(dict(CONFIG), name="there", epochs=3)
        running.services.datasets._look = look  # a process each would take an hour
        done = subprocess.run(
            [
                sys.executable, "-c", PROGRAM, "run", running.api("/openapi.json"),
                "--header", f"Authorization: Bearer {running.token}",
                "--checks", ",".join(CHECKS),
                "--exclude-path-regex", "/events|/logs/stream",  # they have no end
                "--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--no-color",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "30 selected" in done.stdout
