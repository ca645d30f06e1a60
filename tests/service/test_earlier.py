"""Clients of the earlier training service: the same bodies and addresses, or an answer with the new way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from stoker.extras.compat.addresses import JOBS, REMOVED, REMOVED_FROM_SECOND_API, current_path
from stoker.extras.radio.demo import RadioSpec, write_radio
from stoker.service.database import State
from stoker.service.models import DATASET
from stoker.service.services import Services
from tests.compat.page import snippets
from tests.service.running import CONFIG, Answer, ask, note_radio

ID = CONFIG["dataset_ids"][0]
API = "/api/v1/training"
FORM = {
    "dataset_ids": [ID], "parent_model_id": None, "model_architecture": "triangulation", "pretrained": False,
    "freeze_backbone": False, "batch_size": 256, "num_workers": 0, "validation_split": 0.2,
    "preload_to_gpu": True, "n_mels": 128, "n_fft": 2048, "hop_length": 512, "epochs": 100,
    "learning_rate": 0.001, "weight_decay": 0.0001, "dropout_rate": 0.2, "lr_scheduler": "cosine",
    "warmup_epochs": 5, "early_stop_patience": 20, "early_stop_delta": 0.001, "max_grad_norm": 1.0,
    "accelerator": "auto", "devices": 1, "min_snr_db": 10.0, "max_gdop": 5.0, "only_approved": True,
}  # fmt: skip
"""The earlier `TrainingConfig`, every field at its default."""
Asking = Callable[..., Answer]


@pytest.fixture(scope="module")
def asking(here: Services, app: Any, token: dict[str, str]) -> Asking:
    """Ask with the token, and a body as JSON."""
    note_radio(here, ID)

    def asked(method: str, path: str, body: Any = None) -> Answer:
        headers = {**token, "content-type": "application/json"}
        return ask(app, method, path, headers, b"" if body is None else json.dumps(body).encode())

    return asked


@pytest.mark.parametrize("address", ["/api/training/jobs", f"{API}/jobs", JOBS])
def test_a_job_in_the_earlier_form_from_beginning_to_end(
    here: Services, asking: Asking, address: str
) -> None:
    made = asking("POST", address, {"job_name": "night", "config": FORM})
    assert made.status == 201, made.body
    job = made.json()
    assert (job["status"], job["total_epochs"]) == ("queued", 100)
    assert job["config"].items() >= FORM.items()
    one = f"{address}/{job['id']}"

    assert job["id"] in [
        other["id"] for other in asking("GET", f"{address}?status=queued&limit=5").json()["jobs"]
    ]
    assert asking("GET", one).json()["job"]["job_name"] == "night"
    assert asking("POST", f"{one}/pause").json()["status"] == "paused"
    assert asking("POST", f"{one}/resume").json()["status"] == "queued"
    assert asking("GET", f"{one}/metrics?limit=10").json() == {"job_id": job["id"], "metrics": []}
    assert asking("POST", f"{one}/cancel").json()["status"] == "cancelled"
    assert asking("POST", f"{one}/continue", {"additional_epochs": 5}).status == 409  # it is not completed
    assert "additional_epochs" in asking("POST", f"{one}/continue", {}).json()["error"]
    assert asking("DELETE", one).status == 204
    assert asking("GET", one).status == 404
    assert here.jobs.count(State.QUEUED) == 0


def test_one_dataset_and_a_description(here: Services, asking: Asking) -> None:
    """The oldest form; what is not kept is said in the answer."""
    config = {"dataset_id": ID, "accelerator": "cpu", "batch_size": 32, "num_workers": 4}

    answer = asking("POST", f"{API}/jobs", {"job_name": "n", "description": "at night", "config": config})

    assert answer.status == 201, answer.body
    assert answer.json()["dataset_ids"] == [ID]
    assert "description" in answer.headers["warning"]
    here.jobs.cancel(answer.json()["id"])
    here.jobs.delete(answer.json()["id"])


@pytest.mark.parametrize(
    ("change", "field", "way"),
    [
        ({"dataset_ids": ["0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b"]}, "dataset_ids", f"{API}/datasets"),
        ({"parent_model_id": "m"}, "parent_model_id", "continue"),
        ({"devices": 2}, "devices", "one GPU"),
        ({"only_approved": False}, "only_approved", "register"),
    ],
)
def test_a_field_that_cannot_be_honored_names_the_new_way(
    asking: Asking, change: dict[str, Any], field: str, way: str
) -> None:
    answer = asking("POST", "/api/training/jobs", {"job_name": "n", "config": {**FORM, **change}})

    assert answer.status == 422
    assert field in answer.json()["error"]
    assert way in answer.json()["error"]


GONE_NOW = [
    *((f"{prefix}{path}", "GET") for prefix in (API, "/api/training") for path in REMOVED),
    *((path, "POST") for path in REMOVED_FROM_SECOND_API),
    (f"{API}/synthetic/datasets/lab", "PATCH"),
    (f"{API}/synthetic/datasets/lab/repair", "POST"),
]


@pytest.mark.parametrize(("path", "method"), GONE_NOW)
def test_what_is_gone_answers_with_what_to_ask_instead(
    app: Any, asking: Asking, path: str, method: str
) -> None:
    path = path.replace("{rest:path}", "architectures")

    answer = asking(method, path)

    assert answer.status == 410
    named = [word for word in answer.json()["error"].split() if word.startswith(API)]
    assert named
    for word in named:  # an address that is named is one that is there
        there = word.rstrip(";.,").replace("JOB_ID", "x").replace("DATASET_ID", "x")
        found = {asking(method, there).status for method in ("GET", "POST")}
        assert found - {405, 410}, there
    assert ask(app, method, path).status == 401  # a stranger is not told


def test_data_sets_under_their_earlier_address(asking: Asking) -> None:
    assert asking("GET", f"{API}/synthetic/datasets").json()["total"] == 1
    assert asking("GET", f"{API}/synthetic/datasets/{ID}").json()["id"] == ID
    assert asking("GET", f"{API}/synthetic/datasets/nothing").status == 404
    assert asking("DELETE", f"{API}/synthetic/datasets/nothing").status == 404
    assert asking("GET", f"{API}/synthetic/datasets/nothing/samples").status == 404
    assert asking("POST", f"{API}/synthetic/generate", {}).status == 422
    assert asking("POST", f"{API}/synthetic/datasets", {}).status >= 404, "nothing is registered there"


def test_a_get_checks_a_data_set_and_changes_nothing(here: Services, app: Any, asking: Asking) -> None:
    spec = RadioSpec(rows=20, seed=5)
    write_radio(f"sqlite:///{here.folder.data / 'checked.db'}", spec)
    body = {"kind": "radio", "name": "checked", "set": str(spec.dataset_id)}
    url = f"sqlite:///{here.folder.data / 'checked.db'}"
    assert asking("POST", f"{API}/datasets", {**body, "url": url}).status == 201
    before = here.datasets.get("checked")

    path = "/synthetic/datasets/checked/validate"
    answers = [asking("GET", prefix + path) for prefix in (API, "/api/training")]

    assert [(one.status, one.json()["name"], bool(one.json()["report"])) for one in answers] == [
        (200, "checked", True)
    ] * 2
    assert here.datasets.get("checked") == before
    assert ask(app, "GET", API + path).status == 401


@pytest.mark.parametrize(
    "path",
    ["/api/trainings/jobs", "/api/training2", f"{API}2", f"{JOBS}s", "/x/api/training/jobs", "/static/x"],
)
def test_what_only_looks_like_an_earlier_address_is_left_as_it_is(path: str) -> None:
    assert current_path("GET", path) == path


def test_the_snippet_of_the_page_runs(here: Services, asking: Asking) -> None:
    """A data set is registered under the UUID of its rows, then a job names that."""
    spec = RadioSpec(rows=20)
    write_radio(f"sqlite:///{here.folder.data / 'lab.db'}", spec)
    (code,) = snippets("Jobs")
    code = code.replace("/srv/data", str(here.folder.data)).replace(DATASET, str(spec.dataset_id))
    requests = re.findall(r"\$A(/\S+).*?-d '(.*?)'", code, re.DOTALL)

    answers = [asking("POST", f"{API}{path}", json.loads(body)) for path, body in requests]

    assert [(path, answer.status) for (path, _), answer in zip(requests, answers, strict=True)] == [
        ("/datasets", 201), ("/jobs", 201),
    ], [answer.body for answer in answers]  # fmt: skip
    job = answers[1].json()
    assert job["dataset_ids"] == [str(spec.dataset_id)]
    here.jobs.cancel(job["id"])
