"""Jobs over HTTP: make, look, stop, go on, and what they measured and wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Response
from fastapi import Path as InPath

from stoker.errors import ConfigError, Conflict, NotFound
from stoker.schema import Json
from stoker.service import stream
from stoker.service.answers import as_json, faults
from stoker.service.database import WAITING, State
from stoker.service.datasets import describe, unmade
from stoker.service.models import (
    JobDetail,
    JobList,
    JobLog,
    JobMetrics,
    JobOut,
    JobRequest,
    MoreEpochs,
    OperationOut,
    Wait,
)
from stoker.service.probes import probe
from stoker.service.runs.settings import check
from stoker.service.services import Here, Services
from stoker.service.training_config import TrainingConfig

router = APIRouter(tags=["jobs"])
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


@router.post(
    "/jobs",
    status_code=201,
    responses={200: {"model": JobOut, "description": "The job of that key."}, **faults(409)},
)
def create_job(body: JobRequest, here: Here, response: Response, key: Key = None) -> JobOut:
    """Make a training job; it is queued at once."""
    config, datasets = body.config, _fitting(here, body.config)
    if sum(here.jobs.count(state) for state in WAITING) >= MOST_WAITING:
        raise Conflict(
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


@router.get("/jobs", response_model=JobList, responses=faults())
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


@router.get("/jobs/{job_id}", response_model=JobDetail, responses=faults(404))
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


@router.post("/jobs/{job_id}/cancel", responses=faults(404, 409))
def cancel_job(job_id: Id, here: Here) -> JobOut:
    """End a job; its checkpoints stay. A running one is `cancelling` until its process has ended."""
    return JobOut.of(here.jobs.cancel(job_id))


@router.post("/jobs/{job_id}/pause", responses=faults(404, 409))
def pause_job(job_id: Id, here: Here) -> JobOut:
    """Stop a job at a checkpoint. A running one is `pausing` until that is written."""
    return JobOut.of(here.jobs.pause(job_id))


@router.post("/jobs/{job_id}/resume", responses=faults(404, 409))
def resume_job(job_id: Id, here: Here) -> JobOut:
    """Continue a paused, cancelled or failed job from its newest valid checkpoint."""
    return JobOut.of(here.jobs.resume(job_id))


@router.post("/jobs/{job_id}/continue", status_code=202, responses=faults(404, 409))
def continue_job(job_id: Id, body: MoreEpochs, here: Here) -> JobOut:
    """Train a completed job for more epochs, from its last checkpoint."""
    return JobOut.of(here.jobs.extend(job_id, body.additional_epochs))


@router.delete("/jobs/{job_id}", status_code=204, responses=faults(404, 409))
def delete_job(job_id: Id, here: Here) -> None:
    """Forget a job that has ended or is paused, with its metrics, log and checkpoints. Caches stay."""
    here.jobs.delete(job_id)


@router.get("/jobs/{job_id}/metrics", response_model=JobMetrics, responses=faults(404))
def get_metrics(
    job_id: Id,
    here: Here,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=0, le=10**9, description="From the epoch after this one on.")] = 0,
) -> Response:
    """What was measured, an epoch a row, in order."""
    return as_json(JobMetrics(job_id=job_id, metrics=here.jobs.metrics(job_id, limit=limit, after=after)))


@router.get("/jobs/{job_id}/logs", response_model=JobLog, responses=faults(404))
def get_logs(
    job_id: Id, here: Here, tail: Annotated[int, Query(ge=1, le=5000, description="Lines.")] = 200
) -> Response:
    """The end of what the job's process wrote."""
    job = here.jobs.get(job_id)
    lines, offset, truncated = stream.tail(here.folder.job(job.id).log, tail)
    return as_json(JobLog(job_id=job.id, lines=lines, offset=offset, truncated=truncated))


@router.post(
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
    except NotFound as error:
        raise ConfigError(
            f"config.dataset_ids: {error}; POST to the same address registers one, as "
            '{"kind": "radio", "name": NAME, "url": DATABASE, "set": UUID}'
        ) from None
    here.access.check_settings(config.settings)
    for one in here.datasets.resolve(config.dataset_ids):
        here.datasets.check_access(one)
        if why := unmade(one):
            raise Conflict(f"data set {one.name!r} is {why}")
    check(config, found)
    return found
