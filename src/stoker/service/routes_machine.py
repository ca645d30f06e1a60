"""Whether the service is well, what the machine has left, and where records of a job would be served from."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

import stoker
from stoker.errors import Degraded
from stoker.service import models
from stoker.service.answers import faults
from stoker.service.figures import as_prometheus, look_at_machine
from stoker.service.security import CODE_S
from stoker.service.services import Here

health = APIRouter(tags=["machine"])
figures = APIRouter(tags=["machine"])
router = APIRouter(tags=["machine"])


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


@health.get("/health")
async def get_health(here: Here) -> Health:
    """Whether the web server answers, and whether all is well; the only address that needs no token."""
    return Health(status="degraded" if here.degraded else "ok")


@figures.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": models.PROMETHEUS}}}, **faults()},
)
def get_prometheus(here: Here) -> PlainTextResponse:
    """Figures for Prometheus, which sends the token as `authorization: {credentials_file: DIR/token}`.

    Answered whatever is away: then with what was known last, and with its age.
    """
    return PlainTextResponse(as_prometheus(here), media_type="text/plain; version=0.0.4")


@router.get("/ready", responses={**faults(), 503: {"model": Ready, "description": "Degraded."}})
def get_ready(here: Here, response: Response) -> Ready:
    """Whether jobs can be made and done."""
    jobs, error = None, here.degraded
    try:
        jobs = here.jobs.count()
    except Degraded as now:
        error = error or str(now)
    if error is not None:
        response.status_code = 503
    status = "ready" if error is None else "degraded"
    return Ready(status=status, version=stoker.__version__, jobs=jobs, error=error)


@router.get("/machine", responses=faults())
def get_machine(here: Here) -> Machine:
    """Memory by the tightest limit, CPUs, disk, GPUs, and the service's workers."""
    return Machine.model_validate(look_at_machine(here))


@router.post("/login-codes", status_code=201, responses=faults())
def make_login_code(here: Here) -> LoginCode:
    """A one-time code for the pages in a browser."""
    return LoginCode(path=f"/login?code={here.auth.new_code()}", seconds=CODE_S)
