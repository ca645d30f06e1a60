"""What happens, as it happens: Server-Sent Events and WebSockets from one feed, and the log as it grows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, WebSocket
from fastapi import Path as InPath
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocketDisconnect

from stoker.errors import Degraded, NotFound
from stoker.service import logs
from stoker.service.answers import faults
from stoker.service.examples import EVENT, LOG_EVENT
from stoker.service.models import JobOut
from stoker.service.outbox import Event
from stoker.service.services import Here, Services
from stoker.service.states import ENDED, State
from stoker.service.stream import (
    FULL,
    NO_NUMBER,
    SEND_S,
    EventStream,
    as_text,
    end_of_session,
    first_of,
    pump,
)

router = APIRouter(tags=["live"])
sockets = APIRouter()
MESSAGES = 10
"""Messages a second that a WebSocket may send us."""
POLICY, TRY_LATER = 1008, 1013
"""Close codes of RFC 6455: against our rules; overloaded."""
NAMES = {"batch": "training:batch_progress"}
"""Event names of the WebSocket that are not `training:` and the kind."""
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
    texts = logs.follow(
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


@sockets.websocket("/ws/training/{job_id}")
async def follow_job(socket: WebSocket, job_id: str, here: Here, after: Seen = None) -> None:
    """Follow one job: `connected`, `training_status`, then `training:...` events and `heartbeat`s."""
    try:
        job = await asyncio.to_thread(here.jobs.get, job_id[:36])
    except NotFound as error:
        await socket.accept()
        await socket.close(POLICY, str(error)[:120])
        return
    except Degraded as error:
        await socket.accept()
        await socket.close(TRY_LATER, str(error)[:120])
        return
    state = {"event": "training_status", "data": JobOut.of(job).model_dump(mode="json")}
    await _follow(socket, here, after, job.id, [{"event": "connected", "job_id": job.id}, state])


@sockets.websocket("/ws")
async def follow_all(socket: WebSocket, here: Here, after: Seen = None) -> None:
    """Follow all jobs."""
    await _follow(socket, here, after, None, [{"event": "connected"}])


async def _follow(
    socket: WebSocket, here: Services, after: int | None, job: str | None, first: list[dict[str, Any]]
) -> None:
    await socket.accept()
    if here.feed.full:
        await socket.close(TRY_LATER, FULL[:120])
        return
    with here.feed.listening():
        for message in first:
            await socket.send_text(json.dumps(message))
        async with aclosing(_messages(here, after, job)) as texts:
            try:
                session = socket.state.session
                end = end_of_session(here.auth, session)
                done = await first_of(pump(texts, socket.send_text), _listen(socket), end)
                if session is not None and not here.auth.is_open(session):
                    with suppress(TimeoutError):  # a reader that takes nothing is not waited for
                        async with asyncio.timeout(SEND_S):
                            await socket.close(POLICY, "the session has ended. Log in again")
                    return
                if not done:
                    return
                await socket.close(1001)
            except WebSocketDisconnect:
                return


async def _listen(socket: WebSocket) -> None:
    """Answer pings; end with the client, or when it says too much."""
    clock = asyncio.get_running_loop()
    second, said = clock.time(), 0
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if clock.time() - second >= 1:
            second, said = clock.time(), 0
        said += 1
        if said > MESSAGES:
            await socket.close(POLICY, f"more than {MESSAGES} messages a second")
            return
        if "ping" in (message.get("text") or "")[:40]:
            await socket.send_text('{"event": "pong"}')


async def _messages(here: Services, after: int | None, job: str | None) -> AsyncGenerator[str]:
    async with aclosing(here.feed.follow(after, job)) as events:
        async for event in events:
            yield json.dumps(_message(event), allow_nan=False)


def _message(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {"event": "heartbeat"}
    name = NAMES.get(event.kind, f"training:{event.kind}")
    number = None if event.number == NO_NUMBER else event.number
    return {"event": name, "id": number, "job_id": event.job, "timestamp": event.at, "data": event.data}


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
