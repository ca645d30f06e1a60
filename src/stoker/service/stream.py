"""Live events and logs for any number of clients, without a queue per client.

A client has a place in the order of events and reads the events after it from the outbox, a page at a time.
One task polls for the newest number and wakes the clients. So a slow client holds one page, and a
disconnected one continues after the last number it saw. A `gap` names events that were pruned meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.errors import DegradedError
from stoker.service.database import Event, Outbox
from stoker.service.security import Auth, BrowserSession

log = logging.getLogger("stoker")
CLIENTS = 32
"""Streams at once."""
POLL_S = 0.25
HEARTBEAT_S = 15.0
"""Seconds without events after which a client gets a heartbeat."""
FULL = f"the limit of {CLIENTS} open event streams is reached"
FULL_HINT = "Close a page in another tab or a client, or ask for the state instead"
SEND_S = 20.0
"""How long a client may leave sent data unread before it is disconnected; it may reconnect."""
SESSION_LOOK_S = 0.5
"""Seconds between two checks whether the session of a stream has ended."""
PAGE, PAGE_CHARS = 200, 256 << 10
"""Most events and characters that one client gets at a time, but at least one event."""
NO_NUMBER = -1
DEGRADED_S = 1.0
"""Pause after the database did not answer."""


class EventFeed:
    """Wakes clients when there are new events, which each reads from the outbox.

    Args:
        outbox: Of the database.
        degraded: Returns what does not work now; clients get an event when that changes.
    """

    def __init__(self, outbox: Outbox, degraded: Callable[[], str | None] = lambda: None) -> None:
        self._outbox = outbox
        self._degraded = degraded
        self._newest = 0
        """The newest number at the last poll."""
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        self.clients = 0
        self.closing = False

    async def run(self) -> None:
        """Poll for new events while there are clients, until cancelled."""
        told = None
        while True:
            await self._wanted.wait()
            newest, pause_s = self._newest, POLL_S
            try:
                newest = await asyncio.to_thread(self._outbox.newest)
            except DegradedError as error:
                log.warning("no events for now: %s", error)
                pause_s = DEGRADED_S
            except Exception:  # the edge of the task: every client depends on it
                log.exception("events cannot be read")
                pause_s = DEGRADED_S
            if (newest, why := self._degraded()) != (self._newest, told):
                self._newest, told = newest, why
                self._tell()
            await asyncio.sleep(pause_s)

    def close(self) -> None:
        """End every stream."""
        self.closing = True
        self._tell()

    @property
    def full(self) -> bool:
        """True if no further client is accepted."""
        return self.clients >= CLIENTS

    @contextmanager
    def listening(self) -> Generator[None]:
        """Count one client for the length of the block."""
        self.clients += 1
        self._wanted.set()
        try:
            yield
        finally:
            self.clients -= 1
            if not self.clients:
                self._wanted.clear()

    async def follow(self, after: int | None, job: str | None = None) -> AsyncGenerator[Event | None]:
        """Yield events after number `after`, without end; None is a heartbeat. Call it while `listening`.

        Args:
            after: The last number seen; None: from now on.
            job: Only events of this job.
        """
        told: str | None = None
        place = after
        while not self.closing:
            if told != (why := self._degraded()):
                told = why
                yield _state(told, job)
            try:
                events, place = await asyncio.to_thread(self._read, place, job)
            except DegradedError:
                yield None
                await asyncio.sleep(DEGRADED_S)
                continue
            for event in events:
                yield event
            if not await self._wait(place):
                yield None

    def _read(self, place: int | None, job: str | None) -> tuple[list[Event], int]:
        """Return the next events, and the number up to which they are complete."""
        if place is None:
            return [], self._outbox.newest()
        page = self._outbox.read_page(place, job=job, limit=PAGE, most=PAGE_CHARS)
        if place > page.newest:
            why = f"number {place} is not known here: another database"
            return [_gap(1, page.newest, job, why)], page.newest
        if place < page.oldest - 1:
            return [_gap(place + 1, page.oldest - 1, job, "these events were pruned")], page.oldest - 1
        return page.events, page.events[-1].number if page.events else page.newest

    async def _wait(self, place: int) -> bool:
        """Wait for an event after `place`; return False if none came for `HEARTBEAT_S`."""
        if self._newest > place or self.closing:
            return True
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _state(why: str | None, job: str | None) -> Event:
    """Return an event without a number: the service is degraded, or has recovered."""
    kind = "recovered" if why is None else "degraded"
    return Event(number=NO_NUMBER, job=job or "", kind=kind, at=0.0, data={"error": why} if why else {})


def _gap(first: int, last: int, job: str | None, why: str) -> Event:
    """Return the event for pruned events `first` to `last`; it has the number of the last."""
    return Event(number=last, job=job or "", kind="gap", at=0.0, data={"from": first, "to": last, "why": why})


def as_text(event: Event | None) -> str:
    """Return an event in the format of Server-Sent Events; its number is the `Last-Event-ID`."""
    if event is None:
        return ": all is well\n\n"
    data = json.dumps({"job_id": event.job, "at": event.at, **event.data}, allow_nan=False)
    place = "" if event.number == NO_NUMBER else f"id: {event.number}\n"
    return f"{place}event: {event.kind}\ndata: {data}\n\n"


class EventStream(Response):
    """Server-Sent Events until the client leaves or is too slow, its session ends, or no events are left.

    It is refused at the limit of clients.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: EventFeed, auth: Auth, texts: AsyncGenerator[str]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._feed = feed
        self._auth = auth
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if self._feed.full:
            raise DegradedError(FULL, hint=FULL_HINT)

        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        with self._feed.listening():
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._texts) as texts:
                session = scope["state"]["session"]
                end = end_of_session(self._auth, session)
                done = await first_of(pump(texts, write), _left(receive), end)
                if done or (session is not None and not self._auth.is_open(session)):
                    with suppress(TimeoutError):  # a client that reads nothing is not waited for
                        async with asyncio.timeout(SEND_S):
                            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def pump(texts: AsyncIterator[str], write: Callable[[str], Awaitable[None]]) -> bool:
    """Write each text within `SEND_S`; return False if the client did not take one."""
    async for text in texts:
        try:
            async with asyncio.timeout(SEND_S):
                await write(text)
        except TimeoutError:
            return False
        await asyncio.sleep(0)  # a write into a buffer does not wait; let other clients have their turn
    return True


async def first_of(work: Coroutine[Any, Any, bool], *ends: Coroutine[Any, Any, None]) -> bool:
    """Return the result of `work`, or False if one of `ends` is first; cancel the others."""
    working, ending = asyncio.create_task(work), [asyncio.create_task(end) for end in ends]
    try:
        await asyncio.wait((working, *ending), return_when=asyncio.FIRST_COMPLETED)
        return working.done() and working.result()
    finally:
        working.cancel()
        for one in ending:
            one.cancel()
        await asyncio.gather(working, *ending, return_exceptions=True)


async def end_of_session(auth: Auth, session: BrowserSession | None) -> None:
    """Return when a session has logged out or expired; never without a session (token)."""
    while session is None or auth.is_open(session):
        await asyncio.sleep(SESSION_LOOK_S)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ----------------------------------------------------------------------------------------------------------
# The log of a job, from its end or from a position on.


TAIL_BYTES = 1 << 20
"""Most bytes of a log that are read for one answer."""
PIECE_BYTES = 64 << 10
LINE_CHARS = 4096
"""Longest shown line."""
LOG_POLL_S = 0.5
BEATS = 30
"""Polls without news after which a client gets a heartbeat."""


def tail(log: Path, lines: int) -> tuple[list[str], int, bool]:
    """Return the last lines of a log, the position after them, and whether there are earlier lines."""
    size = _size(log)
    start = max(0, size - TAIL_BYTES)
    data = _read(log, start, size - start)
    found = data.decode("utf-8", "replace").splitlines()
    if start and found:
        found = found[1:]  # incomplete: it began before the bytes that were read
    cut = len(found) > lines or start > 0
    return [line[:LINE_CHARS] for line in found[-lines:]], start + len(data), cut


async def follow(
    log: Path, after: int, ended: Callable[[], bool], closing: Callable[[], bool]
) -> AsyncGenerator[str]:
    """Yield what is appended to a log after byte `after`, as Server-Sent Events, until `ended` or `closing`.

    The id of each event is the position after it, so a disconnected client continues with `Last-Event-ID`.
    """
    quiet = 0
    while not closing():
        over = await asyncio.to_thread(ended)
        data = await asyncio.to_thread(_read, log, after, PIECE_BYTES)
        whole = data if len(data) == PIECE_BYTES or over else data[: data.rfind(b"\n") + 1]
        if b"\n" in whole[:-1] or whole:
            whole = whole[: whole.rfind(b"\n") + 1] or whole
            after += len(whole)
            lines = [line[:LINE_CHARS] for line in whole.decode("utf-8", "replace").splitlines()]
            yield f"id: {after}\nevent: log\ndata: {json.dumps({'lines': lines})}\n\n"
            quiet = 0
        elif over:
            yield f"id: {after}\nevent: end\ndata: {{}}\n\n"
            return
        else:
            quiet += 1
            if quiet % BEATS == 0:
                yield ": all is well\n\n"
            await asyncio.sleep(LOG_POLL_S)


def _size(log: Path) -> int:
    try:
        return log.lstat().st_size
    except OSError:
        return 0  # it does not exist yet


def _read(log: Path, start: int, count: int) -> bytes:
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, count, start)
    finally:
        os.close(fd)
