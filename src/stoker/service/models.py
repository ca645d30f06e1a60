"""Models of requests and responses, and the handlers of errors; their examples are in `examples.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from stoker.config.names import Schema, schema_of, without_null, wrong_fields
from stoker.errors import (
    ConfigError,
    ConflictError,
    DegradedError,
    NotFoundError,
    PathRefusedError,
    ReadOnlyError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
)
from stoker.service.database import State
from stoker.service.job_config import JobConfig, JobFieldError
from stoker.service.listing import MAX_TAGS, TAG_LENGTH, check_tags
from stoker.service.security import check_name, wants_page
from stoker.units import format_few

if TYPE_CHECKING:
    from stoker.service.background import Operation
    from stoker.service.datasets import Dataset
    from stoker.service.jobs import Job


Wait = Annotated[
    float, Query(ge=0, le=25, description="Seconds to wait for the end; then 202, and ask again.")
]
Epochs = Annotated[
    int, Field(ge=1, le=5000, strict=True, description="Epochs to train on top of those done.")
]


Tags = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=TAG_LENGTH)], ...],
    Field(max_length=MAX_TAGS, description="Short texts without commas, to find jobs by."),
    AfterValidator(check_tags),
]


class JobRequest(BaseModel):
    """A training job to make."""

    model_config = ConfigDict(extra="forbid")
    job_name: Annotated[
        str, Field(default="training", min_length=1, max_length=200), AfterValidator(check_name)
    ]
    config: JobConfig
    tags: Tags = ()
    description: str | None = Field(
        default=None,
        max_length=4000,
        description="Accepted from earlier clients and not stored; a header says so.",
    )


class JobChange(BaseModel):
    """A new name of a job, other tags, or both."""

    model_config = ConfigDict(extra="forbid")
    job_name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_name)] | None = Field(
        default=None, description="Null: the same name."
    )
    tags: Tags | None = Field(default=None, description="All tags of the job; null: those that it has.")
    add_tags: Tags = Field(default=(), description="Tags to add.")
    remove_tags: Tags = Field(default=(), description="Tags to remove; it may lack them.")


class MoreEpochs(BaseModel):
    """How many more epochs a completed job trains."""

    model_config = ConfigDict(extra="forbid")
    additional_epochs: Epochs


class JobOut(BaseModel):
    """The current state of a job. Times are UTC by the clock of the database."""

    id: str
    job_name: str
    job_type: Literal["training", "generation"]
    status: State
    created_at: str
    started_at: str | None
    completed_at: str | None
    config: dict[str, Any]
    dataset_ids: list[str]
    tags: list[str]
    current_epoch: int
    total_epochs: int
    progress_percent: float
    progress_message: str
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_epoch: int | None
    learning_rate: float | None
    stall: float | None = Field(description="Share of a step that waited for data, 0 to 1.")
    tier: str | None = Field(description="Where batches come from: device, host, disk or encode.")
    checkpoint_path: str | None = Field(description="Name of the newest checkpoint in the job's folder.")
    parent_job_id: str | None
    attempt: int = Field(description="How many times a worker took it.")
    worker: str | None
    error_message: str | None
    exit_code: int | None

    @classmethod
    def of(cls, job: Job) -> JobOut:
        """Return a job in the form of the API."""
        return cls(
            job_name=job.name,
            job_type="generation" if job.kind == "generation" else "training",
            status=job.state,
            created_at=utc(job.created),
            started_at=None if job.started is None else utc(job.started),
            completed_at=None if job.ended is None else utc(job.ended),
            current_epoch=job.epoch,
            total_epochs=job.epochs,
            progress_percent=round(100 * job.progress, 2),
            progress_message=job.message,
            parent_job_id=job.parent,
            checkpoint_path=job.checkpoint,
            error_message=job.error,
            **same_fields(cls, job),
        )


def same_fields(model: type[BaseModel], thing: object) -> dict[str, Any]:
    """Return the attributes of a thing that a model has under the same name."""
    return {name: getattr(thing, name) for name in model.model_fields if hasattr(thing, name)}


class JobList(BaseModel):
    """A page of jobs, the newest first."""

    jobs: list[JobOut]
    total: int = Field(description="Of the search, or of all.")
    limit: int
    offset: int


class JobDetail(BaseModel):
    """A job with its last epochs and its place in the events."""

    job: JobOut
    recent_metrics: list[dict[str, Any]] = Field(description="The last ten epochs.")
    events_after: int = Field(description="Follow events from this number on, and nothing is missed.")


class JobMetrics(BaseModel):
    """What was measured, one row per epoch."""

    job_id: str
    metrics: list[dict[str, Any]]


class FileOut(BaseModel):
    """A file that a job has left."""

    name: str = Field(description="To be asked for as `/jobs/{job_id}/files/{name}`.")
    bytes: int
    changed_at: str


class JobFiles(BaseModel):
    """The files that a job has left: results, then those of its checkpoints."""

    job_id: str
    files: list[FileOut]


class JobLog(BaseModel):
    """The end of a job's log."""

    job_id: str
    lines: list[str]
    offset: int = Field(description="Bytes of the log up to here; `logs/stream?after=` continues from it.")
    truncated: bool = Field(description="There are earlier lines.")


class DatasetOut(BaseModel):
    """The current state of a data set."""

    id: str
    name: str
    kind: Literal["radio", "hdf5", "images"]
    origin: Literal["registered", "generated"]
    spec: dict[str, Any] = Field(description="Where it is and how it is opened.")
    facts: dict[str, Any] = Field(description="What was found there: `samples`, and more by kind.")
    health: str = Field(description="Of the last check: unknown, making, good, doubtful or bad.")
    report: list[dict[str, Any]] = Field(description="Of that check: check, status and detail, a row each.")
    created_at: str
    checked_at: str | None

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetOut:
        """Return a data set in the form of the API."""
        return cls(
            created_at=utc(dataset.created),
            checked_at=None if dataset.checked is None else utc(dataset.checked),
            **same_fields(cls, dataset),
        )


class DatasetList(BaseModel):
    """A page of data sets, the newest first."""

    datasets: list[DatasetOut]
    total: int
    limit: int
    offset: int


class GeneratedDataset(BaseModel):
    """A data set that is being generated, and the job that does it."""

    dataset: DatasetOut
    job: JobOut


class SampleList(BaseModel):
    """Some samples in a readable form."""

    dataset_id: str
    samples: list[dict[str, Any]]


class OperationOut(BaseModel):
    """Work that may take longer than its request."""

    id: str
    what: str
    state: Literal["running", "completed", "failed"]
    seconds: float
    result: dict[str, Any] | None
    error: str | None
    done: int | None = Field(description="Parts that are done, as samples that were read; null: unknown.")
    total: int | None = Field(description="Of so many.")

    @classmethod
    def of(cls, operation: Operation) -> OperationOut:
        """Return an operation in the form of the API."""
        return cls.model_validate(operation, from_attributes=True)


def utc(seconds: float) -> str:
    """Return Unix seconds as ISO 8601, to the millisecond.

    >>> utc(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ----------------------------------------------------------------------------------------------------------
# Examples of requests and responses in the OpenAPI; a test sends each and compares.


DATASET = "6f1c2a34-8c1e-4b7e-9f0a-2d1b7f0c9e55"
JOB = "0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b"
FINGERPRINT = "3fa9c1d2e4b7a810"
REGISTER = {
    "simulations": {"value": {"kind": "hdf5", "name": "burgers", "path": "pdebench/burgers1d_train.h5"}},
    "images": {"value": {"kind": "images", "name": "cells", "path": "cells"}},
    "radio rows": {
        "value": {"kind": "radio", "name": "lab", "url": "postgresql:///lab", "set": DATASET},
    },
}
GENERATE = {
    "radio rows": {"value": {"kind": "radio", "name": "radio", "rows": 4030}},
    "simulations": {"value": {"kind": "hdf5", "name": "burgers-64", "trajectories": 64}},
}
EVENT = f'id: 1208\nevent: metrics\ndata: {{"job_id": "{JOB}", "at": 1772366460.0, "epoch": 42}}\n\n'
LOG_EVENT = 'id: 4181\nevent: log\ndata: {"lines": ["epoch 43 of 100: loss 0.409"]}\n\n'
PROMETHEUS = (
    "# TYPE stoker_up gauge\nstoker_up 1\n# TYPE stoker_database_up gauge\nstoker_database_up 1\n"
    '# TYPE stoker_jobs gauge\nstoker_jobs{state="running"} 1\n'
)


@cache
def read_examples() -> dict[str, list[dict[str, Any]]]:
    """Return examples of the bodies of requests and responses, by the name of the model."""
    return json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------
# Errors as responses: `{"error": "fact. hint", "fact", "hint", "fields": [...]}` and the status of the
# error's class.


STATUS: tuple[tuple[type[StokerError], int], ...] = (
    (PathRefusedError, 403),
    (NotFoundError, 404),
    (ConflictError, 409),
    (DegradedError, 503),
    (StalledError, 504),
    (ResourceError, 507),
    (ReadOnlyError, 507),
    (ConfigError, 422),
    (SourceError, 422),
)
"""Status by class, the first match counts; 422 for every other `StokerError`."""
EVERYWHERE = (400, 401, 403, 408, 413, 422, 431, 503, 504)
"""Statuses of every route: the guard's refusals, a wrong request, a database that does not answer."""
MOST_FIELDS = 100
"""Fields that one answer names as wrong."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class FieldErrorOut(BaseModel):
    """What is wrong with one field of a request."""

    path: str
    problem: str


class ErrorOut(BaseModel):
    """Why a request was not done."""

    error: str
    """All of it: fact and hint."""
    fact: str
    hint: str
    """What to do; empty where there is nothing to say."""
    fields: list[FieldErrorOut] = []


def error_body(fact: str, hint: str = "") -> dict[str, Any]:
    """Return the body of the answer to a request that was not done.

    >>> error_body("job 7 is over", "Start another")["error"]
    'job 7 is over. Start another'
    """
    return {"error": f"{fact}. {hint}" if hint else fact, "fact": fact, "hint": hint, "fields": []}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for the OpenAPI: `statuses` and those of every route."""
    return {status: {"model": ErrorOut} for status in sorted({*EVERYWHERE, *statuses})}


def as_json(body: BaseModel) -> Response:
    """Return a response to a frequent read: its body is serialized here and not validated a second time."""
    return Response(body.model_dump_json(), media_type="application/json")


def install(app: FastAPI, *, page: Callable[[Request, int, str, str], Response]) -> None:
    """Make `app` answer every error in this form, and with a page where a browser opens the address.

    Args:
        app: The application.
        page: Makes the page of a status, a fact and a hint.
    """

    def answer(request: Request, status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
        if not wants_page(request):
            return JSONResponse(body, status, headers=headers)
        response = page(request, status, body["fact"], body["hint"])
        response.headers.update(headers)
        return response

    def of_ours(request: Request, error: Exception) -> Response:
        status = status_of(error)
        body = (
            error_body(error.fact, error.hint) if isinstance(error, StokerError) else error_body(str(error))
        )
        if isinstance(error, JobFieldError):
            body["fields"] = [
                {"path": f"config.{name}", "problem": str(problem)}
                for name, problem in error.fields[:MOST_FIELDS]
            ]
        return answer(request, status, body, {"Retry-After": "2"} if status in (503, 504) else {})

    def of_fields(request: Request, error: Exception) -> Response:
        return answer(request, 422, _wrong_request(request, error), {})

    def of_routing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(getattr(error, "headers", None) or {})
        if "Allow" in headers:  # each method is a separate route, and the first one names only its own
            headers["Allow"] = ", ".join(_allowed(request))
        said = {404: "nothing is at this address", 405: "this address does not take that method"}
        return answer(
            request, status, error_body(said.get(status) or str(getattr(error, "detail", error))), headers
        )

    app.add_exception_handler(StokerError, of_ours)
    app.add_exception_handler(RequestValidationError, of_fields)
    app.add_exception_handler(HTTPException, of_routing)


def status_of(error: Exception) -> int:
    """Return the status for an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 422)


def _wrong_request(request: Request, error: Exception) -> dict[str, Any]:
    """Return the body of the answer to a request with wrong fields."""
    errors = error.errors() if isinstance(error, RequestValidationError) else []
    found = [
        FieldErrorOut(path=path.removeprefix("body").removeprefix(".")[:200], problem=str(problem)[:1000])
        for path, problem in wrong_fields(errors, _schema_of(request))
    ]
    said = format_few((f"{fault.path or 'the body'}: {fault.problem}" for fault in found), 3, "; ")
    fact = f"the request is refused: {said}"
    return ErrorOut(error=fact, fact=fact, hint="", fields=found[:MOST_FIELDS]).model_dump()


def _schema_of(request: Request) -> Schema:
    """Return the schema of all that the route of a request takes: body, query, path and headers."""
    route: APIRoute = request.scope["route"]
    taken = route.dependant
    parts = {"path": taken.path_params, "query": taken.query_params, "header": taken.header_params}
    places: dict[str, Schema] = {
        place: {"properties": {one.alias: without_null(_schema_of_field(one)) for one in fields}}
        for place, fields in parts.items()
    }
    if route.body_field is not None:
        places["body"] = _schema_of_field(route.body_field)
    return {"properties": places}


def _schema_of_field(field: Any) -> Schema:
    return schema_of(Annotated[field.field_info.annotation, field.field_info])


def _allowed(request: Request) -> list[str]:
    """Return the methods that the address of a request takes."""
    routes, scope = request.app.routes, request.scope
    return [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
