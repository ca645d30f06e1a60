"""What every request passes first, of any method, to any route, page or file.

Nothing is answered but what these rules allow, so a route that somebody forgot to protect is protected:

1. `Host` is a name of ours (another site's name may resolve to this machine), and is given once.
2. `Origin` and `Sec-Fetch-Site`, where a browser sends them, say that our own page asks. With a cookie, what
   may change something has to carry one of them: a browser sends `Origin` with each such request.
3. The token as `Authorization: Bearer`, or the cookie of a session; only `PUBLIC` needs neither.
4. Headers, body, its nesting and its strings are within `RequestLimits`, and so is the time to answer.

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

from stoker.service.auth import Auth, Session
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
    """The middleware. `scope["state"]["session"]` is the Session that asks, None for token or stranger."""

    def __init__(self, app: App, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._auth, self._limits, self._traffic = rules.auth, rules.limits, rules.traffic
        self._hosts = frozenset(host.lower() for host in rules.hosts)
        self._headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in rules.headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = _Request(scope)
        refusal = self._judge(request)
        if refusal is not None:
            await self._refuse(request, refusal, receive, send, unread=True)
        else:
            await self._serve(request, receive, send)

    def _judge(self, request: _Request) -> Refusal | None:
        for rule in (self._form, self._host, self._origin, self._who, self._change):
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
        if scheme.lower() == "bearer":
            if self._auth.is_token(value.strip()):
                request.remember(None)
                return None
            session = None  # a client that sends a token means it
        if session is not None or (request.method, request.path) in PUBLIC:
            return None
        return Refusal(
            401, "no valid token or session. Send `Authorization: Bearer TOKEN` (DIR/token), or log in"
        )

    def _change(self, request: _Request) -> Refusal | None:
        """With a cookie, which a browser adds by itself, a change has to say which page asks.

        `_origin` has refused all pages but ours; a request that names none is not a browser's.
        """
        named = request.header("origin") or request.header("sec-fetch-site").lower() == "same-origin"
        harmless = request.method in SAFE or (request.method, request.path) in PUBLIC
        if request.session is not None and not harmless and not named:
            return Refusal(403, "a change with a cookie needs an Origin. Send the token instead")
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
        if refusal.status == 401 and stranger is not None and request.wants_page:
            response = stranger(request.scope, request.path)
            response.status_code = refusal.status
        else:
            response = JSONResponse({"error": refusal.error}, refusal.status)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.status == 504:
            response.headers["Retry-After"] = "5"
        if unread and not await discard(receive, most=UNREAD_BYTES, within_s=UNREAD_S):
            response.headers["Connection"] = "close"
        response.raw_headers += self._missing(response.raw_headers)
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
        return self.method == "GET" and "text/html" in self.header("accept")

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
