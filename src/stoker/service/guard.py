"""What every request passes first, of any method, to any route, page, file or WebSocket.

Nothing is answered but what these rules allow, so a route that somebody forgot to protect is protected:

1. `Host` is a name of ours (another site's name may resolve to this machine), and is given once.
2. `Origin` and `Sec-Fetch-Site`, where a browser sends them, say that our own page asks.
3. The token as `Authorization: Bearer`, or the cookie of a session; only `PUBLIC` needs neither.
4. With a cookie, what may change something carries the session's `X-CSRF-Token`; a WebSocket, its Origin.
5. Headers, body, its nesting and its strings are within `RequestLimits`, and so is the time to answer.

Every answer carries the headers that keep a browser from running or framing anything that is not ours.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus

from starlette.responses import JSONResponse, Response

from stoker.service.auth import Auth, Session, same
from stoker.service.bodies import Gone, Message, Receive, discard, fault_in_json, read_body, replay
from stoker.service.traffic import Traffic

log = logging.getLogger("stoker")
Send = Callable[[Message], Awaitable[None]]
Scope = dict[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

PUBLIC = frozenset({("GET", "/health"), ("GET", "/login"), ("POST", "/login")})
"""All that is answered without token and session."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ONCE = (
    b"host",
    b"origin",
    b"authorization",
    b"cookie",
    b"content-length",
    b"sec-fetch-site",
    b"x-csrf-token",
)
"""Headers that must not come twice: two readers may believe two different ones."""
UNREAD_BYTES, UNREAD_S = 4 << 20, 2.0
"""How much of the body of a refused request is read, so that its sender gets the answer."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,15}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may take."""

    header_bytes: int = 16 << 10
    body_bytes: int = 1 << 20
    public_bytes: int = 8 << 10
    """Of a body that nobody has to be known for."""
    depth: int = 32
    """Levels of nesting in JSON."""
    members: int = 5000
    """Values in JSON, names of members included."""
    text_chars: int = 4096
    """Characters of one string in JSON."""
    body_s: float = 15.0
    answer_s: float = 30.0
    """Until an answer begins; what is streamed after that has no end."""
    refused: int = 60
    """Answers to wrong tokens and codes in a minute; beyond, they are told to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a guard goes by."""

    auth: Auth
    """Knows tokens and sessions."""
    hosts: Collection[str] = LOOPBACK
    """Names and addresses by which the service may be called."""
    limits: RequestLimits = RequestLimits()
    headers: Sequence[tuple[str, str]] = ()
    """What every answer carries."""
    stranger: Callable[[Scope, str], Response] | None = None
    """The page for a browser that has to log in first, given the path that it asked for."""
    traffic: Traffic = field(default_factory=Traffic)
    """Told of every answer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further."""

    status: int
    error: str


class Guard:
    """The middleware. `scope["state"]["session"]` is the Session that asks, None for token or stranger;
    `["may_guess"]` counts a wrong code, and says whether it still gets a plain answer."""

    def __init__(self, app: App, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._refused: list[float] = []
        self._auth, self._limits, self._traffic = rules.auth, rules.limits, rules.traffic
        self._hosts = frozenset(host.lower() for host in rules.hosts)
        self._headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in rules.headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of any kind."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = _Request(scope)
        scope["state"]["may_guess"] = self._may_guess
        refusal = self._judge(request)
        if refusal is not None:
            unread = scope["type"] == "http"
            await self._refuse(request, refusal, receive, send, unread=unread)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._serve(request, receive, send)

    def _judge(self, request: _Request) -> Refusal | None:
        for rule in (self._form, self._host, self._origin, self._who, self._csrf):
            refusal = rule(request)
            if refusal is not None:
                return refusal
        return None

    def _form(self, request: _Request) -> Refusal | None:
        if sum(len(name) + len(value) for name, value in request.headers) > self._limits.header_bytes:
            return Refusal(431, f"headers of more than {self._limits.header_bytes:,} bytes. Send fewer")
        for name in ONCE:
            if sum(name == header for header, _ in request.headers) > 1:
                return Refusal(400, f"the header {name.decode()} is given twice. Send it once")
        target = request.path + unquote_plus(request.scope["query_string"].decode("latin-1"))
        if _CONTROL.search(target):
            return Refusal(400, "the address holds control characters. Remove them")
        return None

    def _host(self, request: _Request) -> Refusal | None:
        match = _HOST.fullmatch(request.header("host"))
        name = (match[1] or match[2]).lower() if match else ""
        # An address of this machine is never what another site's name was made to resolve to.
        ours = name in self._hosts or (
            _is_address(name) and name == (request.scope.get("server") or ("",))[0]
        )
        if not ours:
            return Refusal(403, "the service is not known by this Host. Start it with --allow-host NAME")
        return None

    def _origin(self, request: _Request) -> Refusal | None:
        origin, host = request.header("origin").lower(), request.header("host").lower()
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return Refusal(403, "a page of another Origin asks. Only pages of this service may")
        if request.header("sec-fetch-site").lower() not in ("", "same-origin", "none"):
            return Refusal(403, "another site asks (Sec-Fetch-Site). Open the address by hand")
        return None

    def _who(self, request: _Request) -> Refusal | None:
        scheme, _, value = request.header("authorization").partition(" ")
        session = self._auth.session(request.cookie(self._auth.cookie))
        request.remember(session)
        guess = scheme.lower() == "bearer"
        if guess:
            if self._auth.is_token(value.strip()):
                request.remember(None)
                return None
            session = None  # a client that sends a token means it
        if session is not None or (request.method, request.path) in PUBLIC:
            return None
        # No token at all, or the cookie of a session that has ended, guesses at nothing: pages that are left
        # open ask with it again and again, and must not shut others out.
        if guess and not self._may_guess():
            return Refusal(429, "too many wrong tokens. Wait a minute")
        return Refusal(
            401, "no valid token or session. Send `Authorization: Bearer TOKEN` (DIR/token), or log in"
        )

    def _may_guess(self) -> bool:
        """Whether a wrong token or code still gets a plain answer; right ones are never held up."""
        now = time.monotonic()
        self._refused = [at for at in self._refused if now - at < 60][-self._limits.refused :]
        self._refused.append(now)
        return len(self._refused) <= self._limits.refused

    def _csrf(self, request: _Request) -> Refusal | None:
        session = request.session
        if session is None:
            return None
        socket = request.scope["type"] == "websocket"
        if socket and not request.header("origin"):
            return Refusal(403, "a WebSocket with a cookie needs an Origin. Send the token instead")
        harmless = socket or request.method in SAFE or (request.method, request.path) in PUBLIC
        if not harmless and not same(request.header("x-csrf-token"), session.csrf):
            return Refusal(403, "X-CSRF-Token is missing or of another session. Reload the page")
        return None

    async def _serve(self, request: _Request, receive: Receive, send: Send) -> None:
        """Read the body, run the route, and give it the time it may take."""
        started, began = False, time.monotonic()

        async def begin(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                clock.reschedule(None)
                given = list(message.get("headers", []))
                message["headers"] = given + self._missing(given)
                self._traffic.note(message["status"], time.monotonic() - began)
            await send(message)

        try:
            body = await self._body(request, receive)
            if isinstance(body, Refusal):
                await self._refuse(request, body, receive, send, unread=body.status in (400, 408, 413))
                return
            async with asyncio.timeout(self._limits.answer_s) as clock:
                await self._app(request.scope, replay(body, receive), begin)
        except Gone:
            return
        except TimeoutError:
            if started:
                raise
            await self._refuse(request, Refusal(504, "no answer in time. Try again"), receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if started:
                raise
            await self._refuse(request, Refusal(500, "a fault of the service; its log has it"), receive, send)

    async def _body(self, request: _Request, receive: Receive) -> bytes | Refusal:
        limits = self._limits
        public = (request.method, request.path) in PUBLIC
        most = limits.public_bytes if public else limits.body_bytes
        length = request.header("content-length") or "0"
        too_large = Refusal(413, f"a body of more than {most:,} bytes. Send less")
        if not _NUMBER.fullmatch(length):
            return Refusal(400, "Content-Length is not a size that a body can have")
        if int(length) > most:
            return too_large
        try:
            body = await read_body(receive, most=most, within_s=limits.body_s)
        except TimeoutError:
            return Refusal(408, f"the body was not whole within {limits.body_s:g} s. Send it faster")
        if body is None:
            return too_large
        if body and "json" in (request.header("content-type").lower() or "json"):
            fault = fault_in_json(
                body, depth=limits.depth, members=limits.members, text_chars=limits.text_chars
            )
            if fault:
                return Refusal(422, f"the body is refused: {fault}")
        return body

    async def _refuse(
        self, request: _Request, refusal: Refusal, receive: Receive, send: Send, *, unread: bool = False
    ) -> None:
        """Answer with a refusal; what is `unread` of the body is read and dropped, if that is little."""
        self._traffic.note(refusal.status, 0.0)
        stranger = self._rules.stranger
        if refusal.status in (401, 429) and stranger is not None and request.wants_page:
            response = stranger(request.scope, request.path)
            response.status_code = refusal.status
        else:
            response = JSONResponse({"error": refusal.error}, refusal.status)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (429, 503, 504):
            response.headers["Retry-After"] = "60" if refusal.status == 429 else "5"
        if unread and not await discard(receive, most=UNREAD_BYTES, within_s=UNREAD_S):
            response.headers["Connection"] = "close"
        response.raw_headers += self._missing(response.raw_headers)
        if request.scope["type"] == "websocket":
            await receive()  # the connect message, which comes first
            if "websocket.http.response" not in request.scope.get("extensions", {}):
                await send({"type": "websocket.close", "code": 1008})
                return
        await response(request.scope, receive, send)

    def _missing(self, given: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers for every answer that this one has not set itself."""
        names = {name.lower() for name, _ in given}
        return [(name, value) for name, value in self._headers if name not in names]


class _Request:
    """The parts of a request that the rules look at."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.method: str = scope.get("method", "GET")
        self.headers: list[tuple[bytes, bytes]] = [(name.lower(), value) for name, value in scope["headers"]]
        self.remember(None)

    @property
    def session(self) -> Session | None:
        return self.scope["state"]["session"]

    @property
    def wants_page(self) -> bool:
        """Whether a person with a browser asks for a page."""
        return self.scope["type"] == "http" and self.method == "GET" and "text/html" in self.header("accept")

    def remember(self, session: Session | None) -> None:
        self.scope.setdefault("state", {})["session"] = session

    def header(self, name: str) -> str:
        wanted = name.encode()
        return next((value.decode("latin-1") for header, value in self.headers if header == wanted), "")

    def cookie(self, name: str) -> str:
        for pair in self.header("cookie").split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name:
                return value
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
