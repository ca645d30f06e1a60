"""A request that is refused says in plain words which field, what was given, what is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from stoker.service.api import GcRequest
from stoker.service.datasets import Generation, Registration
from stoker.service.models import JobRequest, MoreEpochs
from stoker.service.server import create_app
from stoker.service.services import Services
from tests.service.running import Answer, ask

API = "/api/v1/training"
JOB = {"dataset_ids": ["a"]}
ROWS = {"kind": "radio", "name": "x"}
FILES = {"kind": "hdf5", "name": "x"}
WRONG: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    17,
    2**63,
    -1e300,
    "",
    "x" * 4000,
    "a\nb",
    [],
    [""],
    [[]],
    {},
)


def refused(answer: Answer) -> dict[str, str]:
    """What was said of each field."""
    assert answer.status == 422
    body = answer.json()
    assert body["error"]
    assert len(body["error"]) < 1000
    found = {fault["path"]: fault["problem"] for fault in body["fields"]}
    assert len(found) == len(body["fields"]), "one line a field"
    for path, problem in list(found.items())[:3]:
        assert path in body["error"]
        assert problem in body["error"]
    return found


def in_the_library(annotation: object, value: object) -> set[str]:
    """The sentences that the library that checks has for it, those of our own left out."""
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        return {one["msg"] for one in error.errors()}
    return set()


@pytest.mark.parametrize(
    ("asked", "body", "field", "facts"),
    [
        ("POST /datasets", {"name": "x"}, "kind", ["missing", "radio", "hdf5", "images"]),
        ("POST /datasets", {"name": "x", "kind": "hdf"}, "kind", ['"hdf"', "images", "mean hdf5?"]),
        ("POST /datasets", {"name": "x", "kind": "hdf5"}, "path", ["missing", "4096"]),
        ("POST /datasets", {"name": "x", "kind": "hdf5", "paht": "b"}, "paht", ["did you mean path?"]),
        ("POST /datasets", {**ROWS, "set": "no"}, "set", ['"no"', "UUID"]),
        ("POST /datasets", {"name": "", "kind": "hdf5", "path": "a"}, "name", ['""', "1 to 100"]),
        ("POST /datasets", {**FILES, "path": "a", "name": "  "}, "name", ["blank"]),
        ("POST /datasets", {**FILES, "path": "a", "name": "\u2800"}, "name", ["blank"]),
        ("POST /datasets", {**FILES, "path": "a", "name": "\u202egood"}, "name", ["U+202E"]),
        ("POST /datasets/generate", {**FILES, "name": "a\u200b"}, "name", ["U+200B"]),
        ("POST /datasets", [], "", ["list", "object", "kind"]),
        ("POST /datasets", None, "", ["missing", "object"]),
        ("POST /datasets/generate", {**ROWS, "rows": 0}, "rows", ["0 ", "from 1 to 1000000"]),
        ("POST /datasets/generate", {**ROWS, "seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
        ("POST /datasets/generate", {**FILES, "points": 17}, "points", ["17", "of 2 from 16 to 4096"]),
        ("POST /jobs", {"config": JOB, "job_name": "   "}, "job_name", ["blank"]),
        ("POST /jobs", {"config": JOB, "job_name": "\u3164"}, "job_name", ["blank"]),
        ("POST /jobs", {"config": JOB, "job_name": "\u202egood"}, "job_name", ["U+202E"]),
        ("POST /jobs", {"confg": JOB}, "confg", ["did you mean config?"]),
        ("POST /jobs", {"config": {**JOB, "batchsize": 1}}, "config.batchsize", ["mean batch_size?"]),
        ("POST /jobs", {"config": {**JOB, "batch_size": 0}}, "config.batch_size", ["0 ", "1 to 1024"]),
        ("POST /jobs", {"config": {**JOB, "batch_size": "8"}}, "config.batch_size", ['"8"', "1 to 1024"]),
        ("POST /jobs", {"config": {**JOB, "accelerator": "c"}}, "config.accelerator", ["auto, gpu or cpu"]),
        ("POST /jobs", {"config": {**JOB, "lr_scheduler": "cosin"}}, "config.lr_scheduler", ["mean cosine?"]),
        ("POST /jobs", {"config": {"dataset_ids": []}}, "config.dataset_ids", ["an empty list", "1 to 64"]),
        ("POST /jobs", {"config": {"dataset_ids": [""]}}, "config.dataset_ids.0", ['""', "1 to 200"]),
        ("POST /jobs", {"config": {**JOB, "devices": 2}}, "config.devices", ["devices=2", "one GPU"]),
        ("POST /jobs/x/continue", {"additional_epoch": 3}, "additional_epoch", ["additional_epochs?"]),
        ("POST /caches/gc", {"keep": -1}, "keep", ["-1", "from 0 to 1000000", "null"]),
        ("GET /jobs?limit=0", None, "query.limit", ['"0"', "from 1 to 500"]),
        ("GET /jobs?status=runing", None, "query.status.0", ['"runing"', "did you mean running?"]),
        ("GET /caches/a/zz", None, "path.fingerprint", ['"zz"', "text like"]),
        (f"GET /operations/{'x' * 41}", None, "path.operation_id", ["x" * 41, "at most 40"]),
        ("POST /plan?wait_s=x", {"config": JOB}, "query.wait_s", ['"x"', "a number from 0 to 25"]),
    ],
)
@pytest.mark.parametrize("prefix", [API, "/api/training"])
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    app: Any, token: Any, prefix: str, asked: str, body: object, field: str, facts: list[str]
) -> None:
    method, path = asked.split()
    raw = b"" if body is None else json.dumps(body).encode()

    said = refused(ask(app, method, prefix + path, {**token, "content-type": "application/json"}, raw))

    assert field in said
    for fact in facts:
        assert fact in said[field]


@pytest.mark.parametrize("kind", ["hdf5", "radio"])
@pytest.mark.parametrize("length", [10, 99, 250])
@pytest.mark.parametrize("count", [60, 2400])
def test_the_answer_to_many_wrong_settings_is_short(
    app: Any, token: Any, kind: str, length: int, count: int
) -> None:
    sent, name = {**token, "content-type": "application/json"}, f"many-{kind}"
    made = json.dumps({"kind": kind, "name": name}).encode()
    assert ask(app, "POST", f"{API}/datasets/generate", sent, made).status < 300
    settings = {f"{number:x}".ljust(length, "x"): "y" * 100 for number in range(count)}

    wrong = {"config": {"dataset_ids": [name], "settings": settings}}
    found = ask(app, "POST", f"{API}/jobs", sent, json.dumps(wrong).encode())

    assert found.status == 422
    assert found.json()["fields"]
    assert len(found.body) < 100_000
    assert found.body.count(b"training.max_steps") <= 3, "allowed names come once: in error, fact, fields"


def test_a_gpu_is_refused_where_jobs_can_have_none(here: Services, token: Any) -> None:
    raw = json.dumps({"config": {**JOB, "accelerator": "gpu"}}).encode()
    header = {**token, "content-type": "application/json"}
    for without_gpu in (True, False):  # else the data set is what is wrong
        app = create_app(replace(here, without_gpu=without_gpu))
        said = refused(ask(app, "POST", f"{API}/jobs", header, raw))
        assert ("config.accelerator" in said) == without_gpu


def test_a_body_of_another_content_type_is_not_repeated(app: Any, token: Any) -> None:
    raw = json.dumps({"config": {"secret": "abc"}}).encode()
    form = {**token, "content-type": "application/x-www-form-urlencoded"}

    said = refused(ask(app, "POST", f"{API}/jobs", form, raw))

    assert "application/json" in said[""]
    assert "abc" not in said[""]


REQUESTS: dict[str, tuple[str, object, dict[str, Any], str]] = {
    "job": ("/jobs", JobRequest, {"config": JOB}, "config"),
    "epochs": ("/jobs/x/continue", MoreEpochs, {"additional_epochs": 3}, ""),
    "gc": ("/caches/gc", GcRequest, {}, ""),
    "rows": ("/datasets", Registration, {"kind": "radio", "name": "x", "url": "u", "set": "y"}, ""),
    "files": ("/datasets", Registration, {"kind": "hdf5", "name": "x", "path": "p"}, ""),
    "images": ("/datasets", Registration, {"kind": "images", "name": "x", "path": "p"}, ""),
    "make rows": ("/datasets/generate", Generation, {"kind": "radio", "name": "x"}, ""),
    "make files": ("/datasets/generate", Generation, {"kind": "hdf5", "name": "x"}, ""),
}


def fields_of(annotation: Any, kind: str | None, inside: str) -> list[str]:
    """Names of the fields of a request's model, or of the one in its field `inside`."""
    schema = TypeAdapter[Any](annotation).json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    for model in models:
        properties = model.get("properties", {})
        if inside and inside in properties:
            continue
        if properties and kind in (None, properties.get("kind", {}).get("const")):
            return [name for name in properties if name != "kind"]
    raise AssertionError(f"no model of kind {kind}")


@pytest.mark.parametrize("which", REQUESTS)
def test_no_sentence_of_the_library_that_checks_reaches_a_user(app: Any, token: Any, which: str) -> None:
    path, annotation, sound, inside = REQUESTS[which]
    seen = 0
    for name in [*fields_of(annotation, sound.get("kind"), inside), "no_such_field"]:
        for value in WRONG:
            own = {**(sound[inside] if inside else sound), name: value}
            body = {**sound, inside: own} if inside else own
            theirs = {
                said for said in in_the_library(annotation, body) if not said.startswith("Value error, ")
            }
            if not theirs:
                continue
            answer = ask(app, "POST", API + path, {**token, "content-type": "application/json"},
                         json.dumps(body).encode())  # fmt: skip
            refused(answer)
            seen += 1
            assert not [said for said in theirs if said in answer.body.decode()]
            assert "Value error" not in answer.body.decode()
    assert seen > 10


def test_values_that_may_be_secret_or_huge_are_not_repeated(app: Any, token: Any) -> None:
    for body in (
        {"name": "x", "kind": "hdf5", "path": "p", "password": "canary"},
        {"name": "x", "kind": "postgresql://me:canary@db/lab"},
        {"name": "canary" * 600, "kind": "hdf5", "path": "x"},
        {"name": "x", "kind": {"password": "canary"}},
    ):
        answer = ask(app, "POST", f"{API}/datasets", {**token, "content-type": "application/json"},
                     json.dumps(body).encode())  # fmt: skip

        refused(answer)
        assert b"canary" not in answer.body


def test_a_job_whose_stored_configuration_is_not_taken_any_more_says_which_field() -> None:
    from stoker.service.child import config_of

    with pytest.raises(Exception, match="batch_size") as failed:
        config_of({"dataset_ids": ["a"], "batch_size": 0, "batchsize": 3})

    said = str(failed.value)
    assert "from 1 to 1024" in said
    assert "did you mean batch_size?" in said
    assert "pydantic" not in said


def test_a_model_in_a_model_is_described_by_its_fields() -> None:
    from stoker.config.names import schema_of, wrong_fields

    class Inner(BaseModel):
        one: int

    class Outer(BaseModel):
        inner: Inner

    with pytest.raises(ValidationError) as failed:
        Outer.model_validate({"inner": 5})

    ((path, problem),) = wrong_fields(failed.value.errors(), schema_of(Outer))
    assert path == "inner"
    assert "5 " in str(problem)
    assert "one" in str(problem)
