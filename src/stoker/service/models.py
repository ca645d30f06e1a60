"""Bodies of requests and answers, with examples; the OpenAPI is made of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from stoker.service.states import State
from stoker.service.training_config import TrainingConfig

if TYPE_CHECKING:
    from stoker.service.jobs import Job
    from stoker.service.operations import Operation

Wait = Annotated[
    float, Query(ge=0, le=25, description="Seconds to wait for the end; then 202, and ask again.")
]
Epochs = Annotated[
    int, Field(ge=1, le=5000, strict=True, description="Epochs to train on top of those done.")
]


class JobRequest(BaseModel):
    """A training job to make."""

    model_config = ConfigDict(extra="forbid")
    job_name: str = Field(default="training", min_length=1, max_length=200)
    config: TrainingConfig
    description: str | None = Field(
        default=None,
        max_length=4000,
        description="Taken from earlier clients and not kept; a header says so.",
    )


class MoreEpochs(BaseModel):
    """How many more epochs a completed job is to train."""

    model_config = ConfigDict(extra="forbid")
    additional_epochs: Epochs


class JobOut(BaseModel):
    """A job as it stands. Times are UTC by the clock of the database."""

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
    attempt: int = Field(description="How often a worker took it.")
    worker: str | None
    error_message: str | None
    exit_code: int | None

    @classmethod
    def of(cls, job: Job) -> JobOut:
        """The answer for a job."""
        return cls(
            id=job.id,
            job_name=job.name,
            job_type="generation" if job.kind == "generation" else "training",
            status=job.state,
            created_at=utc(job.created),
            started_at=None if job.started is None else utc(job.started),
            completed_at=None if job.ended is None else utc(job.ended),
            config=job.config,
            dataset_ids=job.dataset_ids,
            current_epoch=job.epoch,
            total_epochs=job.epochs,
            progress_percent=round(100 * job.progress, 2),
            progress_message=job.message,
            parent_job_id=job.parent,
            checkpoint_path=job.checkpoint,
            error_message=job.error,
            **{name: getattr(job, name) for name in SAME},
        )


SAME = (
    "train_loss", "val_loss", "best_val_loss", "best_epoch", "learning_rate", "stall", "tier", "attempt",
    "worker", "exit_code",
)  # fmt: skip
"""Fields of a job that keep their name."""


class JobList(BaseModel):
    """A page of jobs, the newest first."""

    jobs: list[JobOut]
    total: int = Field(description="Of this status, or of all.")
    limit: int
    offset: int


class JobDetail(BaseModel):
    """A job with what its page shows first."""

    job: JobOut
    recent_metrics: list[dict[str, Any]] = Field(description="The last ten epochs.")
    events_after: int = Field(description="Follow events from this number on, and nothing is missed.")


class JobMetrics(BaseModel):
    """What was measured, an epoch a row."""

    job_id: str
    metrics: list[dict[str, Any]]


class JobLog(BaseModel):
    """The end of a job's log."""

    job_id: str
    lines: list[str]
    offset: int = Field(description="Bytes of the log up to here; `logs/stream?after=` continues from it.")
    truncated: bool = Field(description="There are earlier lines.")


class OperationOut(BaseModel):
    """Work that may take longer than an answer."""

    id: str
    what: str
    state: Literal["running", "completed", "failed"]
    seconds: float
    result: dict[str, Any] | None
    error: str | None

    @classmethod
    def of(cls, operation: Operation) -> OperationOut:
        """The answer for an operation."""
        return cls.model_validate(operation, from_attributes=True)


def utc(seconds: float) -> str:
    """Unix seconds as ISO 8601, to the millisecond.

    >>> utc(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
