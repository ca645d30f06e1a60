"""Data sets over HTTP: take one up, have one made, look at it, check it, forget it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from fastapi import Path as InPath
from pydantic import BaseModel, Field

from stoker.service.answers import faults
from stoker.service.datasets import Dataset, Generation, Registration
from stoker.service.models import DATASET, JobOut, utc
from stoker.service.services import Here

router = APIRouter(tags=["datasets"])
Id = Annotated[str, InPath(min_length=1, max_length=100, description="Id or name.", examples=[DATASET])]
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


@router.post("/datasets", status_code=201, responses=faults(404, 409, 504))
def register_dataset(
    body: Annotated[Registration, Body(openapi_examples=REGISTER)],  # type: ignore[arg-type]
    here: Here,
) -> DatasetOut:
    """Take up a data set that is there (rows, HDF5 files, folders of images); nothing is copied."""
    return DatasetOut.of(here.datasets.register(body))


@router.post("/datasets/generate", status_code=202, responses=faults(409))
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


@router.get("/datasets", responses=faults())
def list_datasets(
    here: Here,
    kind: Literal["radio", "hdf5", "images"] | None = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> DatasetList:
    """Data sets that jobs may name, the newest first."""
    found = [DatasetOut.of(one) for one in here.datasets.list(kind=kind, limit=limit, offset=offset)]
    return DatasetList(datasets=found, total=here.datasets.count(kind), limit=limit, offset=offset)


@router.get("/datasets/{dataset_id}", responses=faults(404))
def get_dataset(dataset_id: Id, here: Here) -> DatasetOut:
    """One data set, as it was when it was looked at last."""
    return DatasetOut.of(here.datasets.get(dataset_id))


@router.post("/datasets/{dataset_id}/inspect", responses=faults(404, 504, 507))
def inspect_dataset(dataset_id: Id, here: Here) -> DatasetOut:
    """Look at a data set again: its size and fields as they are now."""
    return DatasetOut.of(here.datasets.inspect(dataset_id))


@router.get("/synthetic/datasets/{dataset_id}/validate", include_in_schema=False)
def report_of_dataset(dataset_id: Id, here: Here) -> DatasetOut:
    """Return the report of a check made now, and note nothing: a GET changes nothing."""
    return DatasetOut.of(here.datasets.checked(dataset_id))


@router.post("/datasets/{dataset_id}/validate", responses=faults(404, 504, 507))
def validate_dataset(dataset_id: Id, here: Here) -> DatasetOut:
    """Check a data set: what is missing, not finite, twice there or of another shape."""
    return DatasetOut.of(here.datasets.validate(dataset_id))


@router.get("/datasets/{dataset_id}/samples", responses=faults(404, 504, 507))
def get_samples(
    dataset_id: Id, here: Here, limit: Annotated[int, Query(ge=1, le=100)] = 20, offset: Offset = 0
) -> SampleList:
    """Some samples of a data set."""
    dataset = here.datasets.get(dataset_id)
    samples = here.datasets.samples(dataset.id, limit=limit, offset=offset)
    return SampleList(dataset_id=dataset.id, samples=samples)


@router.delete("/datasets/{dataset_id}", status_code=204, responses=faults(404, 409, 504))
def delete_dataset(dataset_id: Id, here: Here) -> None:
    """Forget a data set. One that was made goes; one that was registered stays where it is."""
    here.datasets.delete(dataset_id)
