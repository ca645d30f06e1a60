"""The routes of the API: jobs, live events, data sets, caches, the machine."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast

from fastapi import APIRouter, Body, Header, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

import stoker
from stoker.errors import ConflictError, DegradedError, NotFoundError
from stoker.schema import Json, digest_json
from stoker.service import stream
from stoker.service.background import Operation, Operations, Progress
from stoker.service.database import ENDED_STATES, WAITING_STATES, State
from stoker.service.datasets import Dataset, Generation, Registration
from stoker.service.folders import ResultFile, result_files
from stoker.service.jobs import Job
from stoker.service.listing import NEWEST, JobFilter, Sort
from stoker.service.models import (
    DATASET,
    EVENT,
    FINGERPRINT,
    GENERATE,
    LOG_EVENT,
    PROMETHEUS,
    REGISTER,
    DatasetList,
    DatasetOut,
    FileOut,
    GeneratedDataset,
    JobChange,
    JobDetail,
    JobFiles,
    JobList,
    JobLog,
    JobMetrics,
    JobOut,
    JobRequest,
    MoreEpochs,
    OperationOut,
    SampleList,
    Wait,
    as_json,
    error_responses,
    utc,
)
from stoker.service.probes import probe
from stoker.service.security import CODE_S
from stoker.service.services import Services, ServicesDep, as_prometheus, look_at_machine, require_fit
from stoker.service.stream import EventStream, as_text
from stoker.service.timeline import (
    COLUMNS,
    MOST_INTERVALS,
    JobTimeline,
    MachineTimeline,
    machine_timeline,
    timeline_of,
)

jobs_router = APIRouter(tags=["jobs"])
MOST_WAITING = 10_000
"""Jobs that may wait for a worker; more are refused until a worker has taken some."""
PLAN_S = 300.0
"""Timeout of a plan, which opens the data in its own process."""
PIECE_BYTES = 1 << 18
"""Bytes of a file that are sent at once."""
CSV_CHARS = 64_000
"""Characters of CSV that are sent at once."""
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"example": "epoch,at,train_loss\n1,1772366460.0,0.41\n"}}}
}
BINARY = {"type": "string", "format": "binary"}
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": BINARY, "example": "the bytes of the file"}}}
}
SEARCHED = "Text in the name, a tag, a data set or the reason of a failure, or the start of the id."
RECENT = 10
"""Epochs shown with a job."""
Id = Annotated[str, InPath(min_length=1, max_length=36, description="The job's id.")]


def _key(description: str) -> Any:
    return Header(alias="Idempotency-Key", min_length=1, max_length=200, description=description)


Key = Annotated[
    str | None,
    _key("One key, one job: sent again, the answer is the job that was made first (200, not 201)."),
]
ContinueKey = Annotated[
    str | None, _key("Sent again for the same job, the answer is the job as it is, and no epochs are added.")
]


@jobs_router.post(
    "/jobs",
    status_code=201,
    responses={200: {"model": JobOut, "description": "The job of that key."}, **error_responses(409)},
)
def create_job(body: JobRequest, services: ServicesDep, response: Response, key: Key = None) -> JobOut:
    """Make a training job; it is queued at once."""
    config, (datasets, _) = body.config, require_fit(services, body.config)
    if sum(services.jobs.count(state) for state in WAITING_STATES) >= MOST_WAITING:
        raise ConflictError(
            f"{MOST_WAITING:,} jobs are waiting, which is the limit",
            hint="Ask again when a worker has taken some",
        )
    job, made = services.jobs.create(
        config.model_dump(mode="json"),
        name=body.job_name,
        epochs=config.epochs,
        dataset_ids=[str(dataset["id"]) for dataset in datasets],
        tags=body.tags,
        key=key,
    )
    response.status_code = 201 if made else 200
    response.headers["Location"] = f"/api/v1/training/jobs/{job.id}"
    if body.description:
        response.headers["Warning"] = '299 - "description is not stored; job_name is what is shown"'
    return JobOut.of(job)


@jobs_router.get("/jobs", response_model=JobList, responses=error_responses())
def list_jobs(  # noqa: PLR0913, PLR0917 (one parameter per part of the query)
    services: ServicesDep,
    q: Annotated[str, Query(max_length=200, description=SEARCHED)] = "",
    status: Annotated[Sequence[State], Query(description="Only jobs of these states.")] = (),
    kind: Annotated[Literal["training", "generation"] | None, Query(description="Only such jobs.")] = None,
    dataset: Annotated[str | None, Query(max_length=200, description="Id or name of a data set.")] = None,
    tag: Annotated[Sequence[str], Query(max_length=10, description="Only jobs with all these tags.")] = (),
    sort: Annotated[Sort, Query(description="`-`: the largest first. Jobs without a value: last.")] = NEWEST,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Response:
    """Return jobs of a search, the newest first; `status` and `tag` may be given several times."""
    which = JobFilter(
        text=q, states=frozenset(status), kind=kind, dataset=dataset, tags=tuple(tag), sort=sort
    )
    found = services.jobs.list(which, limit=limit, offset=offset)
    total = services.jobs.count(which)
    jobs = [JobOut.of(job) for job in found]
    return as_json(JobList(jobs=jobs, total=total, limit=limit, offset=offset))


@jobs_router.get("/jobs/{job_id}", response_model=JobDetail, responses=error_responses(404))
def get_job(job_id: Id, services: ServicesDep) -> Response:
    """Return one job, its last epochs, and where to follow it."""
    newest = services.outbox.newest()  # first: what the job says may be later, never earlier
    job = services.jobs.get(job_id)
    return as_json(
        JobDetail(
            job=JobOut.of(job),
            recent_metrics=services.jobs.metrics(job_id, limit=RECENT, after=max(0, job.epoch - RECENT)),
            events_after=newest,
        )
    )


@jobs_router.patch("/jobs/{job_id}", responses=error_responses(404))
def change_job(job_id: Id, body: JobChange, services: ServicesDep) -> JobOut:
    """Change the name or the tags of a job; two requests that add tags at the same time keep both."""
    changed = services.jobs.change(
        job_id, name=body.job_name, tags=body.tags, add_tags=body.add_tags, remove_tags=body.remove_tags
    )
    return JobOut.of(changed)


@jobs_router.post("/jobs/{job_id}/cancel", responses=error_responses(404, 409))
def cancel_job(job_id: Id, services: ServicesDep) -> JobOut:
    """End a job; its checkpoints stay. A running one is `cancelling` until its process has ended."""
    return JobOut.of(services.jobs.cancel(job_id))


@jobs_router.post("/jobs/{job_id}/pause", responses=error_responses(404, 409))
def pause_job(job_id: Id, services: ServicesDep) -> JobOut:
    """Stop a job at a checkpoint. A running one is `pausing` until that is written."""
    return JobOut.of(services.jobs.pause(job_id))


@jobs_router.post("/jobs/{job_id}/resume", responses=error_responses(404, 409))
def resume_job(job_id: Id, services: ServicesDep) -> JobOut:
    """Continue a paused, cancelled or failed job from its newest valid checkpoint."""
    _require_data(services, job_id)
    return JobOut.of(services.jobs.resume(job_id))


@jobs_router.post("/jobs/{job_id}/continue", status_code=202, responses=error_responses(404, 409))
def continue_job(job_id: Id, body: MoreEpochs, services: ServicesDep, key: ContinueKey = None) -> JobOut:
    """Train a completed job for more epochs, from its last checkpoint."""
    _require_data(services, job_id)
    return JobOut.of(services.jobs.extend(job_id, body.additional_epochs, key=key))


def _require_data(services: Services, id: str) -> None:
    """Refuse to queue a job again whose data is not registered any more; it would only fail.

    Raises:
        ConflictError: Names the data sets.
    """
    try:
        services.datasets.resolve(services.jobs.get(id).dataset_ids)
    except NotFoundError as error:
        raise ConflictError(
            f"job {id} needs data that was removed from the list: {error.fact}",
            hint="Register the same data again, or start a new job",
        ) from None


@jobs_router.delete("/jobs/{job_id}", status_code=204, responses=error_responses(404, 409))
def delete_job(job_id: Id, services: ServicesDep) -> None:
    """Delete a job that has ended or is paused, with its metrics, log and checkpoints. Caches stay."""
    services.jobs.delete(job_id)


@jobs_router.get("/jobs/{job_id}/metrics", response_model=JobMetrics, responses=error_responses(404))
def get_metrics(
    job_id: Id,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=0, le=10**9, description="Only epochs after this one.")] = 0,
) -> Response:
    """Return what was measured, one row per epoch, in order."""
    return as_json(JobMetrics(job_id=job_id, metrics=services.jobs.metrics(job_id, limit=limit, after=after)))


@jobs_router.get(
    "/jobs/{job_id}/metrics.csv", response_class=StreamingResponse, responses={**CSV, **error_responses(404)}
)
def get_metrics_csv(job_id: Id, services: ServicesDep) -> Response:
    """Return all that was measured as CSV, one line per epoch; a value that an epoch lacks is empty."""
    job = services.jobs.get(job_id)
    name = {"Content-Disposition": f'attachment; filename="metrics-{job.id}.csv"'}
    return StreamingResponse(_csv_lines(services, job.id), media_type="text/csv", headers=name)


def _csv_lines(services: Services, job: str) -> Iterator[str]:
    names = dict.fromkeys(("epoch", "at"))
    for row in _all_metrics(services, job):
        names |= dict.fromkeys(row)
    lines = StringIO()
    writer = csv.DictWriter(lines, [*names], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in _all_metrics(services, job):
        writer.writerow(row)
        if lines.tell() > CSV_CHARS:
            yield lines.getvalue()
            lines.seek(0)
            lines.truncate()
    yield lines.getvalue()


def _all_metrics(services: Services, job: str) -> Iterator[dict[str, Json]]:
    after = 0
    while rows := services.jobs.metrics(job, limit=1000, after=after):
        yield from rows
        after = cast("int", rows[-1]["epoch"])


@jobs_router.get("/jobs/{job_id}/files", responses=error_responses(404))
def get_files(job_id: Id, services: ServicesDep) -> JobFiles:
    """Return the files that a job has left: model, report, figures, log, and those of its checkpoints."""
    job, found = _files_of(services, job_id)
    files = [FileOut(name=one.name, bytes=one.bytes, changed_at=utc(one.changed)) for one in found]
    return JobFiles(job_id=job.id, files=files)


@jobs_router.get(
    "/jobs/{job_id}/files/{name:path}",
    response_class=StreamingResponse,
    responses={**FILE, **error_responses(404)},
)
def get_file(
    job_id: Id,
    services: ServicesDep,
    name: Annotated[str, InPath(max_length=200, description="As `/jobs/{job_id}/files` names it.")],
) -> Response:
    """Return one of these files, as long as it is now: that of a running job may still grow."""
    job, found = _files_of(services, job_id)
    if name not in {one.name for one in found}:
        raise NotFoundError(
            f"job {job.id} has no file {name!r}",
            hint=f"`stoker job files {job.id}` lists those that it has; a model comes at the end",
        )
    path = services.folder.job(job.id).path / name
    file = services.figures.look_into(f"{name} of job {job.id}", lambda: _opened(path))
    size = os.fstat(file.fileno()).st_size
    own = f"{job.id[:8]}-{name.removeprefix('checkpoints/').replace('/', '-')}"
    headers = {"Content-Disposition": f'attachment; filename="{own}"', "Content-Length": str(size)}
    return StreamingResponse(_pieces(file, size), media_type="application/octet-stream", headers=headers)


def _opened(path: Path) -> BinaryIO:
    """Open a file, and no link in its place.

    Raises:
        NotFoundError: It is gone, as a checkpoint that a newer one has replaced.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise NotFoundError(
            f"{path.name} cannot be opened: {error.strerror}", hint="List the files again"
        ) from None


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while size and (piece := file.read(min(size, PIECE_BYTES))):
            size -= len(piece)
            yield piece


def _files_of(services: Services, id: str) -> tuple[Job, list[ResultFile]]:
    job = services.jobs.get(id)
    folder = services.folder.job(job.id)
    return job, services.figures.look_into(f"the folder of job {job.id}", lambda: result_files(folder))


@jobs_router.get("/jobs/{job_id}/timeline", response_model=JobTimeline, responses=error_responses(404))
def get_timeline(
    job_id: Id,
    services: ServicesDep,
    intervals: Annotated[int, Query(ge=1, le=5000, description="About; at most twice.")] = MOST_INTERVALS,
) -> Response:
    """Return where the job's time went: its phases, and what the steps of training waited for."""
    return as_json(timeline_of(services.jobs.get(job_id), services.outbox, most=intervals))


@jobs_router.get("/jobs/{job_id}/logs", response_model=JobLog, responses=error_responses(404))
def get_logs(
    job_id: Id, services: ServicesDep, tail: Annotated[int, Query(ge=1, le=5000, description="Lines.")] = 200
) -> Response:
    """Return the end of what the job's process wrote."""
    job = services.jobs.get(job_id)
    lines, offset, truncated = stream.tail(services.folder.job(job.id).log, tail)
    return as_json(JobLog(job_id=job.id, lines=lines, offset=offset, truncated=truncated))


@jobs_router.post(
    "/plan",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **error_responses(404, 409)},
)
def plan_job(
    body: JobRequest, services: ServicesDep, response: Response, wait_s: Wait = 20.0
) -> OperationOut:
    """Return where the records of a job would be served from and why, without encoding anything.

    The result has `tiers`, `bytes`, `reason`, `predicted_stall` and more, as `stoker plan --json` prints
    them.
    """
    operation = begin_plan(services, body, services.operations, wait_s)
    response.status_code = 202 if operation.state == "running" else 200
    return OperationOut.of(operation)


def begin_plan(services: Services, body: JobRequest, among: Operations, wait_s: float) -> Operation:
    """Plan a job among other operations, and wait for its end up to `wait_s`; errors as `plan_job`."""
    datasets, password = require_fit(services, body.config)

    def work() -> dict[str, Any]:
        return probe(
            "plan",
            str(datasets[0]["kind"]),
            cast("Mapping[str, Any]", datasets[0]["spec"]),
            timeout_s=PLAN_S,
            password=password,
            config=body.config.model_dump(mode="json"),
            datasets=datasets,
            caches=str(services.folder.caches),
            run_dir=str(services.folder.path / "plan"),  # empty: no run has used it
        )

    what = f"plan {', '.join(str(one['name']) for one in datasets)} in batches of {body.config.batch_size}"
    digest = digest_json(body.config.model_dump(mode="json"))[:8]
    return among.start(f"{what} ({digest})", work, wait_s=wait_s)


# ----------------------------------------------------------------------------------------------------------
# Live events of jobs (Server-Sent Events from one feed) and live logs.


live_router = APIRouter(tags=["live"])
Seen = Annotated[int | None, Query(ge=0, lt=2**63, description="The number of the event seen last.")]
LastId = Annotated[
    str | None, Header(alias="Last-Event-ID", pattern=r"^[0-9]{1,18}$", description="As `after`, and wins.")
]
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": EVENT}}}}
LOG: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": LOG_EVENT}}}}


@live_router.get(
    "/jobs/{job_id}/logs/stream", response_class=StreamingResponse, responses={**LOG, **error_responses(404)}
)
def stream_logs(job_id: Id, services: ServicesDep, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow a job's log: events `log` with `lines`, at last `end`; ids are places in bytes."""
    job = services.jobs.get(job_id)
    begin = _place(last_id, after) or 0
    texts = stream.follow(
        services.folder.job(job.id).log,
        begin,
        lambda: _has_ended(services, job.id),
        lambda: services.feed.closing,
    )
    return EventStream(services.feed, services.auth, texts)


@live_router.get(
    "/jobs/{job_id}/events",
    operation_id="stream_job_events",
    response_class=StreamingResponse,
    responses={**STREAM, **error_responses(404)},
)
def job_events(job_id: Id, services: ServicesDep, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow one job, without a number from now on. A `gap` names events that were pruned."""
    job = services.jobs.get(job_id)
    return EventStream(services.feed, services.auth, _sse(services, _place(last_id, after), job.id))


@live_router.get(
    "/events",
    operation_id="stream_events",
    response_class=StreamingResponse,
    responses={**STREAM, **error_responses()},
)
def all_events(services: ServicesDep, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow all jobs, without a number from now on."""
    return EventStream(services.feed, services.auth, _sse(services, _place(last_id, after), None))


async def _sse(services: Services, after: int | None, job: str | None) -> AsyncGenerator[str]:
    async with aclosing(services.feed.follow(after, job)) as events:
        async for event in events:
            yield as_text(event)


def _place(last_id: str | None, after: int | None) -> int | None:
    return after if last_id is None else int(last_id)


def _has_ended(services: Services, job: str) -> bool:
    try:
        return services.jobs.get(job).state in (*ENDED_STATES, State.PAUSED)
    except NotFoundError:
        return True
    except DegradedError:
        return False


# ----------------------------------------------------------------------------------------------------------
# Data sets over HTTP: register, generate, inspect, check and delete them.


datasets_router = APIRouter(tags=["datasets"])
DatasetId = Annotated[
    str, InPath(min_length=1, max_length=100, description="Id or name.", examples=[DATASET])
]
Limit = Annotated[int, Query(ge=1, le=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]


@datasets_router.post("/datasets", status_code=201, responses=error_responses(404, 409, 504))
def register_dataset(
    body: Annotated[Registration, Body(openapi_examples=REGISTER)],  # type: ignore[arg-type]
    services: ServicesDep,
) -> DatasetOut:
    """Register an existing data set (rows, HDF5 files, folders of images) without copying it."""
    return DatasetOut.of(services.datasets.register(body))


@datasets_router.post("/datasets/generate", status_code=202, responses=error_responses(409))
def generate_dataset(
    body: Annotated[Generation, Body(openapi_examples=GENERATE)],  # type: ignore[arg-type]
    services: ServicesDep,
) -> GeneratedDataset:
    """Generate a data set in a job; the same body again returns the same data set and job."""
    dataset = services.datasets.generate(body)
    job, _ = services.jobs.create(
        body.model_dump(mode="json"),
        name=f"make {dataset.name}",
        kind="generation",
        epochs=1,
        dataset_ids=[dataset.id],
        key=f"make {dataset.id} {dataset.created}",  # a deleted data set is generated again
    )
    return GeneratedDataset(dataset=DatasetOut.of(dataset), job=JobOut.of(job))


@datasets_router.get("/datasets", responses=error_responses())
def list_datasets(
    services: ServicesDep,
    kind: Literal["radio", "hdf5", "images"] | None = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> DatasetList:
    """Return data sets that jobs may name, the newest first."""
    found = [DatasetOut.of(one) for one in services.datasets.list(kind=kind, limit=limit, offset=offset)]
    return DatasetList(datasets=found, total=services.datasets.count(kind), limit=limit, offset=offset)


@datasets_router.get("/datasets/{dataset_id}", responses=error_responses(404))
def get_dataset(dataset_id: DatasetId, services: ServicesDep) -> DatasetOut:
    """Return one data set as it was at the last look."""
    return DatasetOut.of(services.datasets.get(dataset_id))


@datasets_router.post("/datasets/{dataset_id}/inspect", responses=error_responses(404, 504, 507))
def inspect_dataset(dataset_id: DatasetId, services: ServicesDep) -> DatasetOut:
    """Read the current size and fields of a data set."""
    return DatasetOut.of(services.datasets.inspect(dataset_id))


@datasets_router.post(
    "/datasets/{dataset_id}/validate",
    response_model=DatasetOut,
    responses={
        202: {"model": OperationOut, "description": "Not done yet."},
        **error_responses(404, 409, 504, 507),
    },
)
def validate_dataset(
    dataset_id: DatasetId,
    services: ServicesDep,
    all: Annotated[bool, Query(description="Read every sample, for 6 hours at most.")] = False,
    wait_s: Wait = 20.0,
) -> DatasetOut | Response:
    """Check a data set: samples that cannot be read, values that are missing or not finite. Some samples are
    read, spread over all, or with `all` every one: if that takes longer than `wait_s`, as an operation, whose
    result is the data set."""
    if not all:
        return DatasetOut.of(services.datasets.validate(dataset_id))
    dataset, progress = services.datasets.get(dataset_id), Progress()

    def work() -> dict[str, Any]:
        found = services.datasets.validate(dataset.id, progress.tell)
        return DatasetOut.of(found).model_dump(mode="json")

    operation = services.checks.start(
        checks_all(dataset), work, wait_s=wait_s, raises=True, progress=progress
    )
    if operation.result is None:
        return JSONResponse(OperationOut.of(operation).model_dump(mode="json"), 202)
    return DatasetOut.model_validate(operation.result)


def checks_all(dataset: Dataset) -> str:
    """Return the name of the operation that reads every sample of a data set."""
    return f"check every sample of {dataset.name}"


@datasets_router.get("/datasets/{dataset_id}/samples", responses=error_responses(404, 504, 507))
def get_samples(
    dataset_id: DatasetId,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    offset: Offset = 0,
    pictures: Annotated[
        bool, Query(description="Add `pictures` of images and fields, as `data:` URLs.")
    ] = False,
) -> SampleList:
    """Return some samples of a data set: rows, or `values` (range of each field) of files. One that cannot be
    read has `error`."""
    dataset = services.datasets.get(dataset_id)
    samples = services.datasets.samples(dataset.id, limit=limit, offset=offset, pictures=pictures)
    return SampleList(dataset_id=dataset.id, samples=samples)


@datasets_router.delete("/datasets/{dataset_id}", status_code=204, responses=error_responses(404, 409, 504))
def delete_dataset(dataset_id: DatasetId, services: ServicesDep) -> None:
    """Delete a data set. A generated one is removed; the files of a registered one stay. A check of all its
    samples ends."""
    dataset = services.datasets.get(dataset_id)
    services.datasets.delete(dataset.id)
    services.checks.end(checks_all(dataset), f"data set {dataset.name!r} was deleted")


# ----------------------------------------------------------------------------------------------------------
# Caches over HTTP: list, inspect, verify, compare and remove them.


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
    claims: list[str] = Field(description="What uses it now.")
    broken: str = Field(description="Why it cannot be read; empty where it can.")


class CacheList(BaseModel):
    """All caches of the service."""

    caches: list[CacheRow]
    bytes: int
    age_s: float = Field(default=0.0, description="Age of the list; 0: it is current.")
    stale: str | None = Field(default=None, description="Why the list is not current; null: it is.")


class CacheDetail(BaseModel):
    """The contents of one cache, from its index."""

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
    """Which caches may be removed, including the newest and those just used. Caches in use stay. Nothing is
    removed unless `dry_run` is false."""

    model_config = ConfigDict(extra="forbid")
    keep: StrictInt | None = Field(
        default=None, ge=0, le=10**6, description="How many recipes of each name stay, the newest first."
    )
    max_bytes: StrictInt | None = Field(default=None, ge=0, le=2**53)
    older_than_s: Annotated[float, Field(ge=0, le=1e10, strict=True)] | None = None
    dry_run: StrictBool = True


@caches_router.get("/caches", responses=error_responses())
def list_caches(services: ServicesDep) -> CacheList:
    """Return all caches of jobs, or the last known list while the disk does not answer (`stale`)."""
    found = services.figures.caches.get()
    rows = [CacheRow.model_validate(row) for row in found.needed()]
    return CacheList(caches=rows, bytes=sum(row.bytes for row in rows), age_s=found.age_s, stale=found.stale)


@caches_router.get("/caches/{name}/{fingerprint}", operation_id="get_cache", responses=error_responses(404))
def inspect_cache(name: Name, fingerprint: Print, services: ServicesDep) -> CacheDetail:
    """Return one cache: fields, sizes, statistics, quarantined samples. No record is read."""
    from stoker.run.caches import inspect_cache as inspect

    return services.figures.look_into(
        f"cache {name}/{fingerprint}",
        lambda: CacheDetail.model_validate(inspect(cache_folder(services, name, fingerprint)).to_json()),
    )


@caches_router.post(
    "/caches/{name}/{fingerprint}/verify",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **error_responses(404, 409)},
)
def verify_cache(
    name: Name,
    fingerprint: Print,
    services: ServicesDep,
    response: Response,
    subset: Annotated[float, Query(gt=0, le=1, description="Part of the records to read.")] = 1.0,
    wait_s: Wait = 20.0,
) -> OperationOut:
    """Read a cache and compare its checksums."""
    folder = cache_folder(services, name, fingerprint)

    def verify() -> dict[str, Any]:
        from stoker.store import open_cache

        return open_cache(folder, require_complete=False).verify(subset).to_json()

    return _answer(response, services.operations.start(f"verify {name}/{fingerprint}", verify, wait_s=wait_s))


@caches_router.get(
    "/caches/{name}/{fingerprint}/why", operation_id="compare_caches", responses=error_responses(404)
)
def why(
    name: Name,
    fingerprint: Print,
    services: ServicesDep,
    other: Annotated[str | None, Query(pattern=f"^{PRINT}$", description="None: the nearest.")] = None,
) -> WhyOut:
    """Return what differs between two recipes of one name."""
    from stoker.run.caches import explain

    def compare() -> WhyOut:
        second = None if other is None else cache_folder(services, name, other)
        return WhyOut.model_validate(explain(cache_folder(services, name, fingerprint), second).to_json())

    return services.figures.look_into(f"cache {name}/{fingerprint}", compare)


@caches_router.post(
    "/caches/gc",
    operation_id="collect_caches",
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **error_responses(409)},
)
def collect(body: GcRequest, services: ServicesDep, response: Response, wait_s: Wait = 20.0) -> OperationOut:
    """Remove, or list, unreferenced files and the caches that the request releases."""

    def work() -> dict[str, Any]:
        from stoker.store.gc import GcPolicy
        from stoker.store.gc import collect as run

        policy = GcPolicy(
            keep=body.keep, max_bytes=body.max_bytes, older_than_s=body.older_than_s, unprotected=True
        )
        return run(services.folder.caches, policy, dry_run=body.dry_run).to_json()

    return _answer(response, services.operations.start("gc", work, wait_s=wait_s))


@caches_router.delete(
    "/caches/{name}/{fingerprint}",
    status_code=204,
    response_model=None,
    responses={202: {"model": OperationOut, "description": "Not done yet."}, **error_responses(404, 409)},
)
def delete_cache(name: Name, fingerprint: Print, services: ServicesDep, wait_s: Wait = 20.0) -> Response:
    """Remove one cache that is not in use. A job that needs it encodes its data again."""
    folder = cache_folder(services, name, fingerprint)

    def remove() -> dict[str, Any]:
        from stoker.store.gc import remove_cache

        remove_cache(folder)
        return {}

    operation = services.removals.start(f"delete {name}/{fingerprint}", remove, wait_s=wait_s, raises=True)
    if operation.state == "running":
        return JSONResponse(OperationOut.of(operation).model_dump(mode="json"), 202)
    return Response(status_code=204)


@caches_router.get("/operations/{operation_id}", responses=error_responses(404))
def get_operation(operation_id: Annotated[str, InPath(max_length=40)], services: ServicesDep) -> OperationOut:
    """Return the state of work that took longer than its request."""
    for kind in (services.removals, services.checks):
        with suppress(NotFoundError):
            return OperationOut.of(kind.get(operation_id))
    return OperationOut.of(services.operations.get(operation_id))


def _answer(response: Response, operation: Operation) -> OperationOut:
    response.status_code = 202 if operation.state == "running" else 200
    return OperationOut.of(operation)


def cache_folder(services: Services, name: str, fingerprint: str) -> Path:
    """Return the folder of a cache, which is not a link. The names are checked again for every caller.

    Raises:
        NotFoundError: The cache does not exist.
    """
    path = services.folder.caches / name / fingerprint
    fits = re.fullmatch(NAME, name) and re.fullmatch(PRINT, fingerprint)
    if not fits or not path.is_dir() or path.is_symlink() or path.parent.is_symlink():
        raise NotFoundError(
            f"cache {name}/{fingerprint} does not exist", hint="GET /api/v1/training/caches lists them"
        )
    return path


# ----------------------------------------------------------------------------------------------------------
# The health of the service and the free resources of the machine.


health_router = APIRouter(tags=["machine"])
metrics_router = APIRouter(tags=["machine"])
machine_router = APIRouter(tags=["machine"])


class AuditOut(BaseModel):
    """A request that changed something, or tried to."""

    number: int
    at: str
    who: str = Field(description="`token`, `session` and the beginning of its id; empty at a login.")
    client: str = Field(description="The address that asked.")
    method: str
    path: str
    status: int = Field(description="Of the answer; from 400 on nothing was changed.")


class AuditList(BaseModel):
    """Changes, the newest first."""

    rows: list[AuditOut]


class Health(BaseModel):
    """The web server answers. `/ready`, which needs the token, says what does not work."""

    status: Literal["ok", "degraded"] = "ok"


class Ready(BaseModel):
    """Whether the database can be read and written, and how many jobs it has."""

    status: Literal["ready", "degraded"]
    version: str
    jobs: int | None = Field(description="How many there are; null while they cannot be read.")
    error: str | None = None


class Machine(BaseModel):
    """The resources that jobs may still use."""

    model_config = ConfigDict(extra="allow")
    host_bytes: int
    host_total_bytes: int
    host_limit: str = Field(description="Which limit of memory is the tightest.")
    cpus: float
    disk_bytes: int | None
    gpus: list[dict[str, Any]]
    stale: list[str] = Field(default=[], description="Which figures are not current, and why.")
    workers: list[dict[str, Any]]


class LoginCode(BaseModel):
    """A link that logs one browser in, once."""

    path: str
    seconds: float = Field(description="How long it may be used.")


@health_router.get("/health")
async def get_health(services: ServicesDep) -> Health:
    """Return `ok` or `degraded`; needs no token."""
    return Health(status="degraded" if services.degraded else "ok")


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": PROMETHEUS}}}, **error_responses()},
)
def get_prometheus(services: ServicesDep) -> PlainTextResponse:
    """Return figures for Prometheus, which sends the token as `authorization: {credentials_file: DIR/token}`.

    Figures that cannot be read now are the last known ones, with their age.
    """
    return PlainTextResponse(as_prometheus(services), media_type="text/plain; version=0.0.4")


@machine_router.get(
    "/ready", responses={**error_responses(), 503: {"model": Ready, "description": "Degraded."}}
)
def get_ready(services: ServicesDep, response: Response) -> Ready:
    """Return `ready`, with the number of jobs, or `degraded` with the reason and status 503."""
    jobs, error = None, services.degraded
    try:
        jobs = services.jobs.count()
    except DegradedError as now:
        error = error or str(now)
    if error is not None:
        response.status_code = 503
    status = "ready" if error is None else "degraded"
    return Ready(status=status, version=stoker.__version__, jobs=jobs, error=error)


@machine_router.get("/machine", responses=error_responses())
def get_machine(services: ServicesDep) -> Machine:
    """Return free memory by the tightest limit, CPUs, disk, GPUs, and the workers."""
    return Machine.model_validate(look_at_machine(services))


@machine_router.get("/machine/timeline", response_model=MachineTimeline, responses=error_responses())
def get_machine_timeline(
    services: ServicesDep,
    seconds: Annotated[float, Query(ge=60, le=7 * 86_400, description="How far back.")] = 3600.0,
    columns: Annotated[int, Query(ge=1, le=1000)] = COLUMNS,
) -> Response:
    """Return where the time of all workers went: the phases of each job, and what the steps waited for."""
    return as_json(machine_timeline(services.jobs, services.outbox, seconds, columns=columns))


@machine_router.get("/audit", responses=error_responses())
def get_audit(
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=2**63, description="Only rows before this number.")] = None,
) -> AuditList:
    """Return who has changed what, the newest first: one row per request that changes something."""
    rows = services.audit.read(limit=limit, before=before)
    return AuditList(rows=[AuditOut.model_validate({**asdict(row), "at": utc(row.at)}) for row in rows])


@machine_router.post(
    "/login-codes", operation_id="create_login_code", status_code=201, responses=error_responses()
)
def make_login_code(services: ServicesDep) -> LoginCode:
    """Return a one-time code for the pages in a browser."""
    return LoginCode(path=f"/login?code={services.auth.new_code()}", seconds=CODE_S)
