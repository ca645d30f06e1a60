"""What happens, as it happens: Server-Sent Events from one feed, and the log as it grows."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi import Path as InPath
from starlette.responses import Response, StreamingResponse

from stoker.errors import Degraded, NotFound
from stoker.service import stream
from stoker.service.answers import faults
from stoker.service.database import ENDED, State
from stoker.service.models import EVENT, LOG_EVENT
from stoker.service.services import Here, Services
from stoker.service.stream import EventStream, as_text

router = APIRouter(tags=["live"])
Id = Annotated[str, InPath(min_length=1, max_length=36, description="The job's id.")]
Seen = Annotated[int | None, Query(ge=0, lt=2**63, description="The number of the event seen last.")]
LastId = Annotated[
    str | None, Header(alias="Last-Event-ID", pattern=r"^[0-9]{1,18}$", description="As `after`, and wins.")
]
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": EVENT}}}}
LOG: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": LOG_EVENT}}}}


@router.get("/jobs/{job_id}/logs/stream", response_class=StreamingResponse, responses={**LOG, **faults(404)})
def stream_logs(job_id: Id, here: Here, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow a job's log: events `log` with `lines`, at last `end`; ids are places in bytes."""
    job = here.jobs.get(job_id)
    begin = _place(last_id, after) or 0
    texts = stream.follow(
        here.folder.job(job.id).log, begin, lambda: _has_ended(here, job.id), lambda: here.feed.closing
    )
    return EventStream(here.feed, here.auth, texts)


@router.get("/jobs/{job_id}/events", response_class=StreamingResponse, responses={**STREAM, **faults(404)})
def job_events(job_id: Id, here: Here, after: Seen = None, last_id: LastId = None) -> Response:
    """Follow one job; without a number from now on. `gap` names events that are not to be had any more."""
    job = here.jobs.get(job_id)
    return EventStream(here.feed, here.auth, _sse(here, _place(last_id, after), job.id))


@router.get("/events", response_class=StreamingResponse, responses={**STREAM, **faults()})
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
    except NotFound:
        return True
    except Degraded:
        return False
