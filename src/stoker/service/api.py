"""The routes of the API: jobs, live events, data sets, caches, the machine."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Body, Header, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

import stoker
from stoker.errors import ConfigError, ConflictError, DegradedError, NotFoundError
from stoker.schema import Json
from stoker.service import stream
from stoker.service.background import Operation
from stoker.service.database import ENDED, WAITING, State
from stoker.service.datasets import Dataset, Generation, Registration, describe, unmade
from stoker.service.figures import as_prometheus, look_at_machine
from stoker.service.models import (
    DATASET,
    EVENT,
    FINGERPRINT,
    LOG_EVENT,
    PROMETHEUS,
    JobDetail,
    JobList,
    JobLog,
    JobMetrics,
    JobOut,
    JobRequest,
    MoreEpochs,
    OperationOut,
    Wait,
    as_json,
    faults,
    utc,
)
from stoker.service.probes import probe
from stoker.service.security import CODE_S
from stoker.service.services import Here, Services
from stoker.service.stream import EventStream, as_text
from stoker.service.training_config import TrainingConfig, check

jobs_router = APIRouter(tags=["jobs"])
MOST_WAITING = 10_000
"""Jobs that may wait for a worker; more are refused until some were taken."""
PLAN_S = 300.0
"""How long a plan may take, whose data is opened in a process of its own."""
RECENT = 10
"""Epochs shown with a job."""
Id = Annotated[str, InPath(min_length=1, max_length=36, description="The job's id.")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="One key, one job: sent again, the answer is the job that was made first (200, not 201).",
    ),
]


@jobs_router.post(
    "/jobs",
    status_code=201,
    responses={200: {"model": JobOut, "description": "The job of that key."}, **faults(409)},
)
def create_job(body: JobRequest, here: Here, response: Response, key: Key = None) -> JobOut:
    """Make a training job; it is queued at once."""
    config, datasets = body.config, _fitting(here, body.config)
    if sum(here.jobs.count(state) for state in WAITING) >= MOST_WAITING:
        raise ConflictError(
            f"{MOST_WAITING:,} jobs are waiting, which is the limit. Ask again when a worker has taken some"
        )
    job, made = here.jobs.create(
        config.model_dump(mode="json"),
        name=body.job_name,
        epochs=config.epochs,
        dataset_ids=[str(dataset["id"]) for dataset in datasets],
        key=key,
    )
    response.status_code = 201 if made else 200
    response.headers["Location"] = f"/api/v1/training/jobs/{job.id}"
    if body.description:
        response.headers["Warning"] = '299 - "description is not kept; job_name is what is shown"'
    return JobOut.of(job)


@jobs_router.get("/jobs", response_model=JobList, responses=faults())
def list_jobs(
    here: Here,
    status: Annotated[State | None, Query(description="Only jobs of this status.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Response:
    """Jobs, the newest first."""
    found = here.jobs.list(status, limit=limit, offset=offset)
    total = here.jobs.count(status)
    jobs = [JobOut.of(job) for job in found]
    return as_json(JobList(jobs=jobs, total=total, limit=limit, offset=offset))


@jobs_router.get("/jobs/{job_id}", response_model=JobDetail, responses=faults(404))
def get_job(job_id: Id, here: Here) -> Response:
    """One job, its last epochs, and where to follow it."""
    newest = here.outbox.newest()  # first: what the job says may be later, never earlier
    job = here.jobs.get(job_id)
    return as_json(
        JobDetail(
            job=JobOut.of(job),
            recent_metrics=here.jobs.metrics(job_id, limit=RECENT, after=max(0, job.epoch - RECENT)),
            events_after=newest,
        )
    )


@jobs_router.post("/jobs/{job_id}/cancel", responses=faults(404, 409))
def cancel_job(job_id: Id, here: Here) -> JobOut:
    """End a job; its checkpoints stay. A running one is `cancelling` until its process has ended."""
    return JobOut.of(here.jobs.cancel(job_id))


@jobs_router.post("/jobs/{job_id}/pause", responses=faults(404, 409))
def pause_job(job_id: Id, here: Here) -> JobOut:
    """Stop a job at a checkpoint. A running one is `pausing` until that is written."""
    return JobOut.of(here.jobs.pause(job_id))


@jobs_router.post("/jobs/{job_id}/resume", responses=faults(404, 409))
def resume_job(job_id: Id, here: Here) -> JobOut:
    """Continue a paused, cancelled or failed job from its newest valid checkpoint."""
    return JobOut.of(here.jobs.resume(job_id))


@jobs_router.post("/jobs/{job_id}/continue", status_code=202, responses=faults(404, 409))
def continue_job(job_id: Id, body: MoreEpochs, here: Here) -> JobOut:
    """Train a completed job for more epochs, from its last checkpoint."""
    return JobOut.of(here.jobs.extend(job_id, body.additional_epochs))


@jobs_router.delete("/jobs/{job_id}", status_code=204, responses=faults(404, 409))
def delete_job(job_id: Id, here: Here) -> None:
    """Forget a job that has ended or is paused, with its metrics, log and checkpoints. Caches stay."""
    here.jobs.delete(job_id)


@jobs_router.get("/jobs/{job_id}/metrics", response_model=JobMetrics, responses=faults(404))
def get_metrics(
    job_id: Id,
    here: Here,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=0, le=10**9, description="From the epoch after this one on.")] = 0,
) -> Response:
    """What was measured, an epoch a row, in order."""
    return as_json(JobMetrics(job_id=job_id, metrics=here.jobs.metrics(job_id, limit=limit, after=after)))


@jobs_router.get("/jobs/{job_id}/logs", response_model=JobLog, responses=faults(404))
def get_logs(
    job_id: Id, here: Here, tail: Annotated[int, Query(ge=1, le=5000, description="Lines.")] = 200
) -> Response:
    """The end of what the job's process wrote."""
    job = here.jobs.get(job_id)
    lines, offset, truncated = stream.tail(here.folder.job(job.id).log, tail)
    return as_json(JobLog(job_id=job.id, lines=lines, offset=offset, truncated=truncated))


@jobs_router.post(
    "/plan",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **faults(404, 409)},
)
def plan_job(body: JobRequest, here: Here, response: Response, wait_s: Wait = 20.0) -> OperationOut:
    """Where the records of a job would be served from, and why; nothing is encoded.

    The result has `tiers`, `bytes`, `reason`, `predicted_stall` and more, as `stoker plan --json` prints
    them.
    """
    datasets = _fitting(here, body.config)

    def work() -> dict[str, Any]:
        return probe(
            "plan",
            str(datasets[0]["kind"]),
            cast("Mapping[str, Any]", datasets[0]["spec"]),
            timeout_s=PLAN_S,
            config=body.config.model_dump(mode="json"),
            datasets=datasets,
            caches=str(here.folder.caches),
            run_dir=str(here.folder.path / "plan"),  # holds nothing: no run has been there
        )

    what = f"plan {', '.join(str(one['name']) for one in datasets)} in batches of {body.config.batch_size}"
    operation = here.operations.start(what, work, wait_s=wait_s)
    response.status_code = 202 if operation.state == "running" else 200
    return OperationOut.of(operation)


def _fitting(here: Services, config: TrainingConfig) -> list[dict[str, Json]]:
    """The data sets of a configuration that fits them.

    Raises:
        ConfigError: One is not registered, or on a server that may not be read, or they do not fit; or an
            encoder is named that is not allowed.
        PathRefusedError: One is outside the roots of this start.
    """
    try:
        found = describe(here.database, config.dataset_ids)
    except NotFoundError as error:
        raise ConfigError(
            f"config.dataset_ids: {error}; POST to the same address registers one, as "
            '{"kind": "radio", "name": NAME, "url": DATABASE, "set": UUID}'
        ) from None
    here.access.check_settings(config.settings)
    for one in here.datasets.resolve(config.dataset_ids):
        here.datasets.check_access(one)
        if why := unmade(one):
            raise ConflictError(f"data set {one.name!r} is {why}")
    check(config, found)
    return found


# ----------------------------------------------------------------------------------------------------------
# What happens, as it happens: Server-Sent Events from one feed, and the log as it grows.


live_router = APIRouter(tags=["live"])
Seen = Annotated[int | None, Query(ge=0, lt=2**63, description="The number of the event seen last.")]
LastId = Annotated[
    str | None, Header(alias="Last-Event-ID", pattern=r"^[0-9]{1,18}$", description="As `after`, and wins.")
]
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": EVENT}}}}
LOG: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": LOG_EVENT}}}}


@live_router.get(
    "/jobs/{job_id}/logs/stream", response_class=StreamingResponse, responses={**LOG, **faults(404)}
)
def stream_logs(job_id: Id, here: Here, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow a job's log: events `log` with `lines`, at last `end`; ids are places in bytes."""
    job = here.jobs.get(job_id)
    begin = _place(last_id, after) or 0
    texts = stream.follow(
        here.folder.job(job.id).log, begin, lambda: _has_ended(here, job.id), lambda: here.feed.closing
    )
    return EventStream(here.feed, here.auth, texts)


@live_router.get(
    "/jobs/{job_id}/events", response_class=StreamingResponse, responses={**STREAM, **faults(404)}
)
def job_events(job_id: Id, here: Here, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow one job; without a number from now on. `gap` names events that are not to be had any more."""
    job = here.jobs.get(job_id)
    return EventStream(here.feed, here.auth, _sse(here, _place(last_id, after), job.id))


@live_router.get("/events", response_class=StreamingResponse, responses={**STREAM, **faults()})
def all_events(here: Here, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow all jobs; without a number from now on."""
    return EventStream(here.feed, here.auth, _sse(here, _place(last_id, after), None))


async def _sse(here: Services, after: int | None, job: str | None) -> AsyncGenerator[str]:
    async with aclosing(here.feed.follow(after, job)) as events:
        async for event in events:
            yield as_text(event)


def _place(last_id: str | None, after: int | None) -> int | None:
    return after if last_id is None else int(last_id)


def _has_ended(here: Services, job: str) -> bool:
    try:
        return here.jobs.get(job).state in (*ENDED, State.PAUSED)
    except NotFoundError:
        return True
    except DegradedError:
        return False


# ----------------------------------------------------------------------------------------------------------
# Data sets over HTTP: take one up, have one made, look at it, check it, forget it.


datasets_router = APIRouter(tags=["datasets"])
DatasetId = Annotated[
    str, InPath(min_length=1, max_length=100, description="Id or name.", examples=[DATASET])
]
Limit = Annotated[int, Query(ge=1, le=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]
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


class DatasetOut(BaseModel):
    """A data set as it stands."""

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
        """The answer for a data set."""
        same = ("id", "name", "kind", "origin", "spec", "facts", "health", "report")
        return cls(
            created_at=utc(dataset.created),
            checked_at=None if dataset.checked is None else utc(dataset.checked),
            **{name: getattr(dataset, name) for name in same},
        )


class DatasetList(BaseModel):
    """A page of data sets, the newest first."""

    datasets: list[DatasetOut]
    total: int
    limit: int
    offset: int


class Made(BaseModel):
    """A data set that is being made, and the job that makes it."""

    dataset: DatasetOut
    job: JobOut


class SampleList(BaseModel):
    """Some samples, as people look at them."""

    dataset_id: str
    samples: list[dict[str, Any]]


@datasets_router.post("/datasets", status_code=201, responses=faults(404, 409, 504))
def register_dataset(
    body: Annotated[Registration, Body(openapi_examples=REGISTER)],  # type: ignore[arg-type]
    here: Here,
) -> DatasetOut:
    """Take up a data set that is there (rows, HDF5 files, folders of images); nothing is copied."""
    return DatasetOut.of(here.datasets.register(body))


@datasets_router.post("/datasets/generate", status_code=202, responses=faults(409))
def generate_dataset(
    body: Annotated[Generation, Body(openapi_examples=GENERATE)],  # type: ignore[arg-type]
    here: Here,
) -> Made:
    """Have a data set made by a job; asked again with the same body, it is the same data set and job."""
    dataset = here.datasets.generate(body)
    job, _ = here.jobs.create(
        body.model_dump(mode="json"),
        name=f"make {dataset.name}",
        kind="generation",
        epochs=1,
        dataset_ids=[dataset.id],
        key=f"make {dataset.id} {dataset.created}",  # made anew when it was forgotten in between
    )
    return Made(dataset=DatasetOut.of(dataset), job=JobOut.of(job))


@datasets_router.get("/datasets", responses=faults())
def list_datasets(
    here: Here,
    kind: Literal["radio", "hdf5", "images"] | None = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> DatasetList:
    """Data sets that jobs may name, the newest first."""
    found = [DatasetOut.of(one) for one in here.datasets.list(kind=kind, limit=limit, offset=offset)]
    return DatasetList(datasets=found, total=here.datasets.count(kind), limit=limit, offset=offset)


@datasets_router.get("/datasets/{dataset_id}", responses=faults(404))
def get_dataset(dataset_id: DatasetId, here: Here) -> DatasetOut:
    """One data set, as it was when it was looked at last."""
    return DatasetOut.of(here.datasets.get(dataset_id))


@datasets_router.post("/datasets/{dataset_id}/inspect", responses=faults(404, 504, 507))
def inspect_dataset(dataset_id: DatasetId, here: Here) -> DatasetOut:
    """Look at a data set again: its size and fields as they are now."""
    return DatasetOut.of(here.datasets.inspect(dataset_id))


@datasets_router.get("/synthetic/datasets/{dataset_id}/validate", include_in_schema=False)
def report_of_dataset(dataset_id: DatasetId, here: Here) -> DatasetOut:
    """Return the report of a check made now, and note nothing: a GET changes nothing."""
    return DatasetOut.of(here.datasets.checked(dataset_id))


@datasets_router.post("/datasets/{dataset_id}/validate", responses=faults(404, 504, 507))
def validate_dataset(dataset_id: DatasetId, here: Here) -> DatasetOut:
    """Check a data set: what is missing, not finite, twice there or of another shape."""
    return DatasetOut.of(here.datasets.validate(dataset_id))


@datasets_router.get("/datasets/{dataset_id}/samples", responses=faults(404, 504, 507))
def get_samples(
    dataset_id: DatasetId, here: Here, limit: Annotated[int, Query(ge=1, le=100)] = 20, offset: Offset = 0
) -> SampleList:
    """Some samples of a data set."""
    dataset = here.datasets.get(dataset_id)
    samples = here.datasets.samples(dataset.id, limit=limit, offset=offset)
    return SampleList(dataset_id=dataset.id, samples=samples)


@datasets_router.delete("/datasets/{dataset_id}", status_code=204, responses=faults(404, 409, 504))
def delete_dataset(dataset_id: DatasetId, here: Here) -> None:
    """Forget a data set. One that was made goes; one that was registered stays where it is."""
    here.datasets.delete(dataset_id)


# ----------------------------------------------------------------------------------------------------------
# Caches over HTTP: what there is, whether it is sound, why it differs, and what may go.


caches_router = APIRouter(tags=["caches"])
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
PRINT = r"[0-9a-f]{16}"
Name = Annotated[str, InPath(pattern=f"^{NAME}$", examples=["radio_train"])]
Print = Annotated[str, InPath(pattern=f"^{PRINT}$", examples=[FINGERPRINT])]


class CacheRow(BaseModel):
    """One cache, as a list shows it."""

    name: str
    fingerprint: str
    bytes: int
    complete: bool
    unused_s: float = Field(description="Seconds since its last use.")
    claims: list[str] = Field(description="What is being done with it now.")
    broken: str = Field(description="Why it cannot be read; empty where it can.")


class CacheList(BaseModel):
    """All caches of the service."""

    caches: list[CacheRow]
    bytes: int
    age_s: float = Field(default=0.0, description="0: as it is now. Else how old the list is.")
    stale: str | None = Field(default=None, description="Why it is not of now; null: it is.")


class CacheDetail(BaseModel):
    """What one cache holds, from its index."""

    model_config = ConfigDict(extra="allow")
    name: str
    fingerprint: str
    records: int
    count: int
    bytes: int
    complete: bool


class WhyOut(BaseModel):
    """How two recipes differ."""

    same: bool
    a: str
    b: str
    differences: list[dict[str, Any]]


class GcRequest(BaseModel):
    """Which caches may go, also the newest and those just used; what is in use stays. Nothing goes unless
    `dry_run` is false."""

    model_config = ConfigDict(extra="forbid")
    keep: StrictInt | None = Field(
        default=None, ge=0, le=10**6, description="Recipes of each name that stay, newest."
    )
    max_bytes: StrictInt | None = Field(default=None, ge=0, le=2**53)
    older_than_s: Annotated[float, Field(ge=0, le=1e10, strict=True)] | None = None
    dry_run: StrictBool = True


@caches_router.get("/caches", responses=faults())
def list_caches(here: Here) -> CacheList:
    """All caches that jobs have made; where the disk does not answer in time, as they were (`stale`)."""
    found = here.figures.caches.get()
    rows = [CacheRow.model_validate(row) for row in found.needed()]
    return CacheList(caches=rows, bytes=sum(row.bytes for row in rows), age_s=found.age_s, stale=found.stale)


@caches_router.get("/caches/{name}/{fingerprint}", responses=faults(404))
def inspect_cache(name: Name, fingerprint: Print, here: Here) -> CacheDetail:
    """One cache: fields, sizes, statistics, quarantined samples. No record is read."""
    from stoker.run.caches import inspect_cache as inspect

    return here.figures.folders.ask(
        f"cache {name}/{fingerprint}",
        lambda: CacheDetail.model_validate(inspect(cache_folder(here, name, fingerprint)).to_json()),
    )


@caches_router.post(
    "/caches/{name}/{fingerprint}/verify",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **faults(404, 409)},
)
def verify_cache(
    name: Name,
    fingerprint: Print,
    here: Here,
    response: Response,
    subset: Annotated[float, Query(gt=0, le=1, description="Part of the records to read.")] = 1.0,
    wait_s: Wait = 20.0,
) -> OperationOut:
    """Read a cache back and compare checksums."""
    folder = cache_folder(here, name, fingerprint)

    def verify() -> dict[str, Any]:
        from stoker.store import open_cache

        return open_cache(folder, require_complete=False).verify(subset).to_json()

    return _answer(response, here.operations.start(f"verify {name}/{fingerprint}", verify, wait_s=wait_s))


@caches_router.get("/caches/{name}/{fingerprint}/why", responses=faults(404))
def why(
    name: Name,
    fingerprint: Print,
    here: Here,
    other: Annotated[str | None, Query(pattern=f"^{PRINT}$", description="None: the nearest.")] = None,
) -> WhyOut:
    """What differs between two recipes of one name."""
    from stoker.run.caches import explain

    def compare() -> WhyOut:
        beside = None if other is None else cache_folder(here, name, other)
        return WhyOut.model_validate(explain(cache_folder(here, name, fingerprint), beside).to_json())

    return here.figures.folders.ask(f"cache {name}/{fingerprint}", compare)


@caches_router.post(
    "/caches/gc",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **faults(409)},
)
def collect(body: GcRequest, here: Here, response: Response, wait_s: Wait = 20.0) -> OperationOut:
    """Remove, or list, what no cache needs any more and what the request lets go."""

    def work() -> dict[str, Any]:
        from stoker.store.gc import GcPolicy
        from stoker.store.gc import collect as run

        policy = GcPolicy(
            keep=body.keep, max_bytes=body.max_bytes, older_than_s=body.older_than_s, unprotected=True
        )
        return run(here.folder.caches, policy, dry_run=body.dry_run).to_json()

    return _answer(response, here.operations.start("gc", work, wait_s=wait_s))


@caches_router.delete(
    "/caches/{name}/{fingerprint}",
    status_code=204,
    response_model=None,
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **faults(404, 409)},
)
def delete_cache(name: Name, fingerprint: Print, here: Here, wait_s: Wait = 20.0) -> Response:
    """Remove one cache that is not in use. A job that needs it encodes its data again."""
    folder = cache_folder(here, name, fingerprint)

    def remove() -> dict[str, Any]:
        from stoker.store.gc import remove_cache

        remove_cache(folder)
        return {}

    operation = here.removals.start(f"delete {name}/{fingerprint}", remove, wait_s=wait_s, raises=True)
    if operation.state == "running":
        return JSONResponse(OperationOut.of(operation).model_dump(mode="json"), 202)
    return Response(status_code=204)


@caches_router.get("/operations/{operation_id}", responses=faults(404))
def get_operation(operation_id: Annotated[str, InPath(max_length=40)], here: Here) -> OperationOut:
    """How work stands that took longer than its answer."""
    try:
        return OperationOut.of(here.removals.get(operation_id))
    except NotFoundError:
        return OperationOut.of(here.operations.get(operation_id))


def _answer(response: Response, operation: Operation) -> OperationOut:
    response.status_code = 202 if operation.state == "running" else 200
    return OperationOut.of(operation)


def cache_folder(here: Services, name: str, fingerprint: str) -> Path:
    """The folder of a cache, which is no link: the names are matched again, whoever calls.

    Raises:
        NotFound: There is no such cache.
    """
    path = here.folder.caches / name / fingerprint
    fits = re.fullmatch(NAME, name) and re.fullmatch(PRINT, fingerprint)
    if not fits or not path.is_dir() or path.is_symlink() or path.parent.is_symlink():
        raise NotFoundError(f"there is no cache {name}/{fingerprint}. GET /api/v1/training/caches lists them")
    return path


# ----------------------------------------------------------------------------------------------------------
# Whether the service is well, what the machine has left, and where records of a job would be served from.


health_router = APIRouter(tags=["machine"])
metrics_router = APIRouter(tags=["machine"])
machine_router = APIRouter(tags=["machine"])


class Health(BaseModel):
    """The web server answers. What does not work while it is degraded says `ready`, which needs the token."""

    status: Literal["ok", "degraded"] = "ok"


class Ready(BaseModel):
    """Whether the database answers and takes something, and how many jobs there are."""

    status: Literal["ready", "degraded"]
    version: str
    jobs: int | None = Field(description="Jobs that it knows; null while they cannot be read.")
    error: str | None = None


class Machine(BaseModel):
    """What jobs may still take."""

    model_config = ConfigDict(extra="allow")
    host_bytes: int
    host_total_bytes: int
    host_limit: str = Field(description="Which limit of memory is the tightest.")
    cpus: float
    disk_bytes: int | None
    gpus: list[dict[str, Any]]
    stale: list[str] = Field(default=[], description="Which figures are not of now, and why.")
    workers: list[dict[str, Any]]


class LoginCode(BaseModel):
    """A way into the pages for one browser, once."""

    path: str
    seconds: float = Field(description="How long it may be used.")


@health_router.get("/health")
async def get_health(here: Here) -> Health:
    """Whether the web server answers, and whether all is well; the only address that needs no token."""
    return Health(status="degraded" if here.degraded else "ok")


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": PROMETHEUS}}}, **faults()},
)
def get_prometheus(here: Here) -> PlainTextResponse:
    """Figures for Prometheus, which sends the token as `authorization: {credentials_file: DIR/token}`.

    Answered whatever is away: then with what was known last, and with its age.
    """
    return PlainTextResponse(as_prometheus(here), media_type="text/plain; version=0.0.4")


@machine_router.get("/ready", responses={**faults(), 503: {"model": Ready, "description": "Degraded."}})
def get_ready(here: Here, response: Response) -> Ready:
    """Whether jobs can be made and done."""
    jobs, error = None, here.degraded
    try:
        jobs = here.jobs.count()
    except DegradedError as now:
        error = error or str(now)
    if error is not None:
        response.status_code = 503
    status = "ready" if error is None else "degraded"
    return Ready(status=status, version=stoker.__version__, jobs=jobs, error=error)


@machine_router.get("/machine", responses=faults())
def get_machine(here: Here) -> Machine:
    """Memory by the tightest limit, CPUs, disk, GPUs, and the service's workers."""
    return Machine.model_validate(look_at_machine(here))


@machine_router.post("/login-codes", status_code=201, responses=faults())
def make_login_code(here: Here) -> LoginCode:
    """A one-time code for the pages in a browser."""
    return LoginCode(path=f"/login?code={here.auth.new_code()}", seconds=CODE_S)
