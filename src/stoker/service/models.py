"""Models of requests and responses with their examples, and the handlers of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
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
from stoker.service.job_config import JobConfig
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


class JobRequest(BaseModel):
    """A training job to make."""

    model_config = ConfigDict(extra="forbid")
    job_name: Annotated[
        str, Field(default="training", min_length=1, max_length=200), AfterValidator(check_name)
    ]
    config: JobConfig
    description: str | None = Field(
        default=None,
        max_length=4000,
        description="Accepted from earlier clients and not stored; a header says so.",
    )


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
    total: int = Field(description="Of this status, or of all.")
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
Example = dict[str, Any]

CONFIG: Example = {
    "dataset_ids": [DATASET],
    "batch_size": 256,
    "epochs": 100,
    "learning_rate": 0.001,
    "preload_to_gpu": True,
    "accelerator": "auto",
}
_ROW: Example = {
    "epoch": 42, "at": 1772366460.0, "step": 546, "train_loss": 0.412, "val_loss": 0.437,
    "best_val_loss": 0.431, "learning_rate": 0.0007, "stall": 0.002, "tier": "host", "samples_per_s": 41000.0,
    "seconds": 0.079, "p50_m": 1830.0, "p95_m": 6920.0,
}  # fmt: skip
JOB_OUT: Example = {
    "id": JOB, "job_name": "rx-night-run", "job_type": "training", "status": "running",
    "created_at": "2026-03-01T12:00:00.123Z", "started_at": "2026-03-01T12:00:01.480Z", "completed_at": None,
    "config": CONFIG, "dataset_ids": [DATASET], "current_epoch": 42, "total_epochs": 100,
    "progress_percent": 42.0, "progress_message": "epoch 42 of 100", "train_loss": 0.412, "val_loss": 0.437,
    "best_val_loss": 0.431, "best_epoch": 40, "learning_rate": 0.0007, "stall": 0.002, "tier": "host",
    "checkpoint_path": "last-000000546", "parent_job_id": None, "attempt": 1, "worker": "node-0-9f31c2aa",
    "error_message": None, "exit_code": None,
}  # fmt: skip
JOB_LIST: Example = {"jobs": [JOB_OUT], "total": 1, "limit": 50, "offset": 0}
JOB_DETAIL: Example = {
    "job": JOB_OUT,
    "recent_metrics": [_ROW],
    "events_after": 1207,
}
JOB_METRICS: Example = {"job_id": JOB, "metrics": [_ROW]}
JOB_TIMELINE: Example = {
    "job_id": JOB,
    "phases": [
        {"kind": "queued", "begin": 1772366400.1, "end": 1772366401.4},
        {"kind": "start", "begin": 1772366401.4, "end": 1772366402.0},
        {"kind": "fill", "begin": 1772366402.0, "end": 1772366405.3},
        {"kind": "train", "begin": 1772366405.3, "end": 1772366425.3},
    ],
    "intervals": [
        {
            "begin": 1772366405.3, "end": 1772366407.3, "busy_s": 1.42, "waits_s": {"read": 0.4},
            "first_wait_s": 0.03, "tier": "disk",
        }
    ],
    "stall": 0.22,
    "summary": ["Steps waited 22 % of their time for data: reading from disk 22 %."],
}  # fmt: skip
JOB_FILES: Example = {
    "job_id": JOB,
    "files": [
        {"name": "model.safetensors", "bytes": 231480, "changed_at": "2026-03-01T12:03:10.004Z"},
        {
            "name": "checkpoints/best-000000559/model.safetensors", "bytes": 231480,
            "changed_at": "2026-03-01T12:02:41.220Z",
        },
    ],
}  # fmt: skip
JOB_LOG: Example = {
    "job_id": JOB,
    "lines": ["2026-03-01 12:01:00,004 INFO epoch 42 of 100: loss 0.412, validation 0.437, 79 ms"],
    "offset": 4096,
    "truncated": True,
}
DATASET_OUT: Example = {
    "id": DATASET, "name": "radio", "kind": "radio", "origin": "registered",
    "spec": {"url": "postgresql:///lab", "table": "measurement_features", "set": DATASET},
    "facts": {"samples": 4030, "least_gdop": 0.85, "most_gdop": 92.2, "most_receivers": 7},
    "health": "good",
    "report": [{"check": "receivers", "status": "pass", "detail": "4 to 7 receivers a row"}],
    "created_at": "2026-03-01T11:58:12.001Z", "checked_at": "2026-03-01T11:59:30.520Z",
}  # fmt: skip
DATASET_LIST: Example = {"datasets": [DATASET_OUT], "total": 1, "limit": 50, "offset": 0}
MADE: Example = {
    "dataset": {
        **DATASET_OUT, "origin": "generated", "facts": {"samples": 4030}, "health": "making", "report": [],
        "checked_at": None,
    },
    "job": {
        **JOB_OUT, "job_name": "make radio", "job_type": "generation", "total_epochs": 1, "current_epoch": 0,
        "progress_percent": 0.0, "status": "queued",
        "config": {"kind": "radio", "name": "radio", "rows": 4030, "seed": 0},
    },
}  # fmt: skip
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
SAMPLES: Example = {
    "dataset_id": DATASET,
    "samples": [
        {
            "recording_session_id": "00497be8-c873-48c4-a5fd-36db138ac1ab", "tx_latitude": 45.65,
            "tx_longitude": 6.85, "mean_snr_db": 17.6, "num_receivers_detected": 5, "gdop": 11.6,
            "timestamp": "2026-01-01T00:00:00+00:00",
        }
    ],
}  # fmt: skip
CACHE_LIST: Example = {
    "caches": [
        {
            "name": "radio_train", "fingerprint": FINGERPRINT, "bytes": 865382, "complete": True,
            "unused_s": 66.3, "claims": [], "broken": "",
        }
    ],
    "bytes": 865382, "age_s": 0.0, "stale": None,
}  # fmt: skip
CACHE: Example = {
    "name": "radio_train", "fingerprint": FINGERPRINT, "records": 3227, "count": 3227, "bytes": 860648,
    "complete": True, "fields": {"receivers": {"shape": [7, 6], "dtype": "float32"}}, "shards": 1,
    "quarantined": [],
}  # fmt: skip
WHY: Example = {
    "same": False,
    "a": f"radio_train/{FINGERPRINT}",
    "b": "radio_train/9b0d77c1e2f3a456",
    "differences": [{"entry": "source.where", "a": "gdop <= 5.0", "b": "", "note": ""}],
}
OPERATIONS: list[Example] = [
    {
        "id": "7797b520f5c3d258", "what": f"verify radio_train/{FINGERPRINT}", "state": "completed",
        "seconds": 0.031, "result": {"records": 3227, "ok": True, "bad": [], "unchecked": []}, "error": None,
        "done": None, "total": None,
    },
    {
        "id": "744906ddbeacd9a6", "what": "check every sample of cells", "state": "running", "seconds": 20.0,
        "result": None, "error": None, "done": 51200, "total": 400000,
    },
]  # fmt: skip
READY: Example = {"status": "ready", "version": "0.1.0", "jobs": 3, "error": None}
MACHINE: Example = {
    "host_bytes": 23734677504, "host_total_bytes": 25276510208, "host_limit": "memory.max of the container",
    "cpus": 8.0, "disk_bytes": 49879879680, "gpus": [], "stale": [],
    "workers": [
        {"slot": 0, "name": "node-0-9f31c2aa", "pid": 2121, "alive": True, "deaths": 0, "device": None}
    ],
}  # fmt: skip
AUDIT_ROW: Example = {
    "number": 812, "at": "2026-03-01T12:00:00.123Z", "who": "session 9f31c2aa", "client": "127.0.0.1",
    "method": "POST", "path": f"/api/v1/training/jobs/{JOB}/cancel", "status": 200,
}  # fmt: skip
LOGIN_CODE: Example = {"path": "/login?code=6eYVWuS94pygBw0nhGMeRP1hPgI1N4ep", "seconds": 600.0}
_TOO_LARGE = "2048 is given. Expected a whole number from 1 to 1024"
FAULT: Example = {
    "error": f"the request is refused: config.batch_size: {_TOO_LARGE}",
    "fact": f"the request is refused: config.batch_size: {_TOO_LARGE}",
    "hint": "",
    "fields": [{"path": "config.batch_size", "problem": _TOO_LARGE}],
}
EVENT = f'id: 1208\nevent: metrics\ndata: {{"job_id": "{JOB}", "at": 1772366460.0, "epoch": 42}}\n\n'
LOG_EVENT = 'id: 4181\nevent: log\ndata: {"lines": ["epoch 43 of 100: loss 0.409"]}\n\n'
PROMETHEUS = (
    "# TYPE stoker_up gauge\nstoker_up 1\n# TYPE stoker_database_up gauge\nstoker_database_up 1\n"
    '# TYPE stoker_jobs gauge\nstoker_jobs{state="running"} 1\n'
)
BY_MODEL: Mapping[str, Sequence[Example]] = MappingProxyType(
    {
        "JobConfig": [CONFIG],
        "JobRequest": [{"job_name": "rx-night-run", "config": CONFIG}],
        "MoreEpochs": [{"additional_epochs": 20}],
        "GcRequest": [{"keep": 1, "older_than_s": 2592000, "dry_run": True}],
        "JobOut": [JOB_OUT],
        "JobList": [JOB_LIST],
        "JobDetail": [JOB_DETAIL],
        "JobMetrics": [JOB_METRICS],
        "JobTimeline": [JOB_TIMELINE],
        "JobFiles": [JOB_FILES],
        "AuditOut": [AUDIT_ROW],
        "AuditList": [{"rows": [AUDIT_ROW]}],
        "JobLog": [JOB_LOG],
        "DatasetOut": [DATASET_OUT],
        "DatasetList": [DATASET_LIST],
        "GeneratedDataset": [MADE],
        "SampleList": [SAMPLES],
        "CacheList": [CACHE_LIST],
        "CacheDetail": [CACHE],
        "WhyOut": [WHY],
        "OperationOut": OPERATIONS,
        "Ready": [READY],
        "Health": [{"status": "ok"}],
        "Machine": [MACHINE],
        "LoginCode": [LOGIN_CODE],
        "ErrorOut": [FAULT],
    }
)
"""Examples of the bodies of requests and responses, by the name of the model."""


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


def install(app: FastAPI, *, page: Callable[[Request, int, str], Response]) -> None:
    """Make `app` answer every error in this form.

    Args:
        app: The application.
        page: Makes the page of a status and a fact, for a browser at an address that no route has.
    """

    def of_routing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(getattr(error, "headers", None) or {})
        if "Allow" in headers:  # each method is a separate route, and the first one names only its own
            headers["Allow"] = ", ".join(_allowed(request))
        said = {404: "nothing is at this address", 405: "this address does not take that method"}
        detail = said.get(status) or str(getattr(error, "detail", error))
        if wants_page(request) and not request.url.path.startswith("/api/"):
            response = page(request, status, detail)
            response.headers.update(headers)
            return response
        return JSONResponse(error_body(detail), status, headers=headers)

    app.add_exception_handler(StokerError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_fields)
    app.add_exception_handler(HTTPException, of_routing)


def status_of(error: Exception) -> int:
    """Return the status for an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 422)


def _of_ours(_request: Request, error: Exception) -> Response:
    status = status_of(error)
    wait = {"Retry-After": "2"} if status in (503, 504) else None
    body = error_body(error.fact, error.hint) if isinstance(error, StokerError) else error_body(str(error))
    return JSONResponse(body, status, headers=wait)


def _of_fields(request: Request, error: Exception) -> Response:
    errors = error.errors() if isinstance(error, RequestValidationError) else []
    found = [
        FieldErrorOut(path=path.removeprefix("body").removeprefix("."), problem=str(problem))
        for path, problem in wrong_fields(errors, _schema_of(request))
    ]
    said = format_few((f"{fault.path or 'the body'}: {fault.problem}" for fault in found), 3, "; ")
    fact = f"the request is refused: {said}"
    body = ErrorOut(error=fact, fact=fact, hint="", fields=found[:100])
    return JSONResponse(body.model_dump(), 422)


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
