"""Caches over HTTP: what there is, whether it is sound, why it differs, and what may go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt
from starlette.responses import JSONResponse

from stoker.errors import NotFound
from stoker.service.answers import faults
from stoker.service.models import FINGERPRINT, OperationOut, Wait
from stoker.service.operations import Operation
from stoker.service.services import Here, Services

router = APIRouter(tags=["caches"])
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


@router.get("/caches", responses=faults())
def list_caches(here: Here) -> CacheList:
    """All caches that jobs have made; where the disk does not answer in time, as they were (`stale`)."""
    found = here.figures.caches.get()
    rows = [CacheRow.model_validate(row) for row in found.needed()]
    return CacheList(caches=rows, bytes=sum(row.bytes for row in rows), age_s=found.age_s, stale=found.stale)


@router.get("/caches/{name}/{fingerprint}", responses=faults(404))
def inspect_cache(name: Name, fingerprint: Print, here: Here) -> CacheDetail:
    """One cache: fields, sizes, statistics, quarantined samples. No record is read."""
    from stoker.pipeline.caches import inspect_cache as inspect

    return here.figures.folders.ask(
        f"cache {name}/{fingerprint}",
        lambda: CacheDetail.model_validate(inspect(cache_folder(here, name, fingerprint)).to_json()),
    )


@router.post(
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


@router.get("/caches/{name}/{fingerprint}/why", responses=faults(404))
def why(
    name: Name,
    fingerprint: Print,
    here: Here,
    other: Annotated[str | None, Query(pattern=f"^{PRINT}$", description="None: the nearest.")] = None,
) -> WhyOut:
    """What differs between two recipes of one name."""
    from stoker.pipeline.caches import explain

    def compare() -> WhyOut:
        beside = None if other is None else cache_folder(here, name, other)
        return WhyOut.model_validate(explain(cache_folder(here, name, fingerprint), beside).to_json())

    return here.figures.folders.ask(f"cache {name}/{fingerprint}", compare)


@router.post(
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


@router.delete(
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


@router.get("/operations/{operation_id}", responses=faults(404))
def get_operation(operation_id: Annotated[str, InPath(max_length=40)], here: Here) -> OperationOut:
    """How work stands that took longer than its answer."""
    try:
        return OperationOut.of(here.removals.get(operation_id))
    except NotFound:
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
        raise NotFound(f"there is no cache {name}/{fingerprint}. GET /api/v1/training/caches lists them")
    return path
