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
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import parse_qsl, unquote_plus, urlsplit

from pydantic import SecretStr
from starlette.responses import JSONResponse, Response

from stoker.errors import ConfigError, PathRefusedError, StokerError
from stoker.runtime.files import create_file, replace_atomically
from stoker.runtime.jsonio import read_object
from stoker.service.traffic import RequestTraffic
from stoker.sources.sql.query import parse_database_url

# ----------------------------------------------------------------------------------------------------------
# Bodies of requests: read whole within a size and a time, and JSON that no part behind this has to fear.


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class Gone(Exception):  # noqa: N818 (no error: the other side left)
    """The client left before its body was whole."""


async def read_body(receive: Receive, *, most: int, within_s: float) -> bytes | None:
    """The whole body; None when it is larger than `most` bytes.

    Raises:
        TimeoutError: It was not whole within `within_s`.
        Gone: The client left.
    """
    pieces: list[bytes] = []
    size = 0
    async with asyncio.timeout(within_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > most:
                return None
            if not message.get("more_body", False):
                return b"".join(pieces)


async def discard(receive: Receive, *, most: int, within_s: float) -> bool:
    """Read a body and keep nothing of it; False when that was not all of it.

    A connection that is closed with a body unread takes our answer with it.
    """
    size = 0
    try:
        async with asyncio.timeout(within_s):
            while size <= most:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        pass
    return False


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what comes after it."""
    waiting = [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again


def fault_in_json(body: bytes, *, depth: int, members: int, text_chars: int) -> str:
    """What is wrong with a body as JSON, in words; empty for a sound one.

    Refused are nesting deeper than `depth` (which would end the parser), more values than `members` (each
    costs a check), strings longer than `text_chars`, names given twice, NaN and infinities, and characters
    that no database takes.
    """
    level = 0
    for match in _BRACKETS.finditer(body):
        first = match[0][:1]
        level += (first in b"[{") - (first in b"]}")
        if level > depth:
            return f"it is nested deeper than {depth} levels"
    try:
        value = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except ValueError as error:  # also text that is not UTF-8, and numbers of thousands of digits
        return f"it is not JSON: {error}"
    return _fault_in_values(value, members, text_chars)


def _fault_in_values(value: object, members: int, text_chars: int) -> str:
    todo, seen = [value], 0
    while todo:
        one, seen = todo.pop(), seen + 1
        if seen + len(todo) > members:
            return f"it has more than {members:,} values"
        if isinstance(one, dict):
            pairs = cast("dict[str, object]", one)
            todo += [*pairs.keys(), *pairs.values()]
        elif isinstance(one, list):
            todo += cast("list[object]", one)
        elif isinstance(one, str):
            if len(one) > text_chars:
                return f"a string has {len(one):,} characters, expected {text_chars:,} at most"
            if "\0" in one or any("\ud800" <= char <= "\udfff" for char in one):
                return "a string holds NUL or half a surrogate pair"
        elif isinstance(one, float) and one in (float("inf"), float("-inf")):
            return "a number is too large"
    return ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a member twice")
    return found


# ----------------------------------------------------------------------------------------------------------
# Who may ask: a client that has the token of the state folder, or a session that was opened with it.
#
# Programs send the token. A browser is given a one-time code, which it trades for a cookie; the cookie
# carries its own end and is sealed with a key made from the token, so that it outlives a restart and dies
# with the token.


SHORTEST = 32
"""Characters that a token has at least; ours have 43, which are 256 bits."""
CODE_S = 600.0
"""How long a login code may be used."""
SESSION_S = 7 * 86400.0
CODES = 64
"""Login codes that are kept; the oldest goes first."""
CODE_BYTES = 24
"""Random ones in a code: 192 bits."""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A browser that has logged in."""

    id: str
    until: float
    """When it ends, as unix time, unless it logs out before."""


def load_token(path: Path) -> SecretStr:
    """The token in a file, made at the first call: 256 bits that only its user may read.

    Raises:
        ConfigError: The file is no such file.
        ReadOnlyError, ResourceError: It cannot be made.
    """
    if not path.exists():
        _make_token(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Remove it, and a new one is made"
        ) from None
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        text = file.read(1024).decode("ascii", "replace").strip() if stat.S_ISREG(mode) else ""
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(
            f"{path} may be read by others (mode {stat.S_IMODE(mode):o}). Expected 600; remove it"
        )
    if len(text) < SHORTEST or not text.isprintable():
        raise ConfigError(f"{path} holds {len(text)} characters, expected {SHORTEST} or more. Remove it")
    return SecretStr(text)


def _make_token(path: Path) -> None:
    # Another service may be faster, and its token is as good.
    create_file(path, (secrets.token_urlsafe(32) + "\n").encode(), mode=0o600)


class Auth:
    """Checks tokens, trades codes for sessions. Safe to call from several threads."""

    def __init__(
        self, token: SecretStr, *, ended: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._token = token.get_secret_value()
        self._key = hmac.digest(self._token.encode(), b"stoker session", "sha256")
        self._clock = clock
        self._lock = threading.Lock()
        self._codes: dict[str, float] = {}
        """Until when a code may be used, by its digest. Strangers cannot end one: 192 random bits need no
        count of wrong tries, and such a count would let anybody make a code worthless."""
        self._ended_file = ended
        self._ended = _read_ended(ended)
        """Until when the cookie of a session that logged out would be good, by its id."""
        self.cookie = f"stoker_{hmac.digest(self._key, b'name', 'sha256').hex()[:8]}"
        """Name of the cookie: cookies know no ports, so two services on one machine need two names."""

    def is_token(self, value: str) -> bool:
        """Whether it is the token, in constant time."""
        return same(value, self._token)

    def new_code(self) -> str:
        """A code that opens one session within `CODE_S`."""
        now, code = self._clock(), secrets.token_urlsafe(CODE_BYTES)
        with self._lock:
            kept = [(digest, until) for digest, until in self._codes.items() if until > now]
            self._codes = dict([*kept[-(CODES - 1) :], (_digest(code), now + CODE_S)])
        return code

    def log_in(self, secret: str) -> str | None:
        """The cookie for a code, which is used up, or for the token; None for anything else."""
        with self._lock:
            until = self._codes.pop(_digest(secret), 0.0)
        if until <= self._clock() and not self.is_token(secret):
            return None
        payload = f"{secrets.token_hex(16)}.{int(self._clock() + SESSION_S)}"
        return f"{payload}.{self._seal('session', payload)}"

    def session(self, cookie: str) -> BrowserSession | None:
        """The session of a cookie that we gave out, that has not passed, and that was not ended."""
        payload, _, seal = cookie.rpartition(".")
        if not same(seal, self._seal("session", payload)):
            return None
        name, _, until = payload.partition(".")
        session = BrowserSession(id=name, until=float(until))
        return session if self.is_open(session) else None

    def is_open(self, session: BrowserSession) -> bool:
        """Whether a session has neither logged out nor passed, now."""
        return session.until > self._clock() and session.id not in self._ended

    def end(self, session: BrowserSession) -> None:
        """Make a session's cookie worthless, also after a restart.

        Raises:
            ReadOnlyError, ResourceError: It cannot be noted; it is worthless until the restart.
        """
        now = self._clock()
        with self._lock:
            ended = {name: until for name, until in self._ended.items() if until > now}
            self._ended = {**ended, session.id: now + SESSION_S}
            if self._ended_file is not None:
                with replace_atomically(self._ended_file) as temporary:
                    temporary.write_text(json.dumps(self._ended))

    def _seal(self, purpose: str, payload: str) -> str:
        return hmac.digest(self._key, f"{purpose}:{payload}".encode("utf-8", "replace"), "sha256").hex()


def _read_ended(path: Path | None) -> dict[str, float]:
    """Return the sessions that a file says have logged out.

    Raises:
        ConfigError: It is not such a file.
    """
    if path is None or not path.exists():
        return {}
    try:
        return {str(name): float(until) for name, until in read_object(path).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which sessions have logged out: {error}. Remove it and DIR/token; then "
            "everybody logs in again"
        ) from None


def same(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(code: str) -> str:
    """Codes are looked up by digest, so that the time of a look-up says nothing about them."""
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()


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
"""Headers that must not come twice: two workers may believe two different ones."""
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
class GuardRules:
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
    traffic: RequestTraffic = field(default_factory=RequestTraffic)
    """Told of every answer."""


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request goes no further."""

    status: int
    error: str


class Guard:
    """The middleware. `scope["state"]["session"]` is the Session that asks, None for token or stranger."""

    def __init__(self, app: App, rules: GuardRules) -> None:
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

    def _judge(self, request: _Request) -> RequestRefusal | None:
        for rule in (self._form, self._host, self._origin, self._who, self._change):
            refusal = rule(request)
            if refusal is not None:
                return refusal
        return None

    def _form(self, request: _Request) -> RequestRefusal | None:
        if sum(len(name) + len(value) for name, value in request.headers) > self._limits.header_bytes:
            return RequestRefusal(
                431, f"headers of more than {self._limits.header_bytes:,} bytes. Send fewer"
            )
        for name in ONCE:
            if sum(name == header for header, _ in request.headers) > 1:
                return RequestRefusal(400, f"the header {name.decode()} is given twice. Send it once")
        target = request.path + unquote_plus(request.scope["query_string"].decode("latin-1"))
        if _CONTROL.search(target):
            return RequestRefusal(400, "the address holds control characters. Remove them")
        return None

    def _host(self, request: _Request) -> RequestRefusal | None:
        match = _HOST.fullmatch(request.header("host"))
        name = (match[1] or match[2]).lower() if match else ""
        # An address of this machine is never what another site's name was made to resolve to.
        ours = name in self._hosts or (
            _is_address(name) and name == (request.scope.get("server") or ("",))[0]
        )
        if not ours:
            return RequestRefusal(
                403, "the service is not known by this Host. Start it with --allow-host NAME"
            )
        return None

    def _origin(self, request: _Request) -> RequestRefusal | None:
        origin, host = request.header("origin").lower(), request.header("host").lower()
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return RequestRefusal(403, "a page of another Origin asks. Only pages of this service may")
        if request.header("sec-fetch-site").lower() not in ("", "same-origin", "none"):
            return RequestRefusal(403, "another site asks (Sec-Fetch-Site). Open the address by hand")
        return None

    def _who(self, request: _Request) -> RequestRefusal | None:
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
        return RequestRefusal(
            401, "no valid token or session. Send `Authorization: Bearer TOKEN` (DIR/token), or log in"
        )

    def _change(self, request: _Request) -> RequestRefusal | None:
        """With a cookie, which a browser adds by itself, a change has to say which page asks.

        `_origin` has refused all pages but ours; a request that names none is not a browser's.
        """
        named = request.header("origin") or request.header("sec-fetch-site").lower() == "same-origin"
        harmless = request.method in SAFE or (request.method, request.path) in PUBLIC
        if request.session is not None and not harmless and not named:
            return RequestRefusal(403, "a change with a cookie needs an Origin. Send the token instead")
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
            if isinstance(body, RequestRefusal):
                await self._refuse(request, body, receive, send, unread=body.status in (400, 408, 413))
                return
            async with asyncio.timeout(self._limits.answer_s) as clock:
                await self._app(request.scope, replay(body, receive), begin)
        except Gone:
            return
        except TimeoutError:
            if started:
                raise
            await self._refuse(request, RequestRefusal(504, "no answer in time. Try again"), receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if started:
                raise
            await self._refuse(
                request, RequestRefusal(500, "a fault of the service; its log has it"), receive, send
            )

    async def _body(self, request: _Request, receive: Receive) -> bytes | RequestRefusal:
        limits = self._limits
        public = (request.method, request.path) in PUBLIC
        most = limits.public_bytes if public else limits.body_bytes
        length = request.header("content-length") or "0"
        too_large = RequestRefusal(413, f"a body of more than {most:,} bytes. Send less")
        if not _NUMBER.fullmatch(length):
            return RequestRefusal(400, "Content-Length is not a size that a body can have")
        if int(length) > most:
            return too_large
        try:
            body = await read_body(receive, most=most, within_s=limits.body_s)
        except TimeoutError:
            return RequestRefusal(408, f"the body was not whole within {limits.body_s:g} s. Send it faster")
        if body is None:
            return too_large
        if body and "json" in (request.header("content-type").lower() or "json"):
            fault = fault_in_json(
                body, depth=limits.depth, members=limits.members, text_chars=limits.text_chars
            )
            if fault:
                return RequestRefusal(422, f"the body is refused: {fault}")
        return body

    async def _refuse(
        self,
        request: _Request,
        refusal: RequestRefusal,
        receive: Receive,
        send: Send,
        *,
        unread: bool = False,
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
    def session(self) -> BrowserSession | None:
        return self.scope["state"]["session"]

    @property
    def wants_page(self) -> bool:
        """Whether a person with a browser asks for a page."""
        return self.method == "GET" and "text/html" in self.header("accept")

    def remember(self, session: BrowserSession | None) -> None:
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


# ----------------------------------------------------------------------------------------------------------
# Which data the service may read since this start: below its roots, and on the servers that were named; and
# which encoders its jobs may name.
#
# A data set stays registered when the service is started with other roots or servers. So it is asked for
# again before each use, by the service and by the worker of a job, from the names alone: nothing is opened.


URL_OPTIONS = frozenset({"host", "sslmode", "connect_timeout"})
"""Options of a PostgreSQL URL that a request may give. The others of libpq name files that it reads or
appends to, or change what a session may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAccess:
    """What the operator allowed at the start."""

    roots: tuple[str, ...] = ()
    """Folders, absolute, as they were written and as they really are."""
    servers: tuple[str, ...] = ()
    """PostgreSQL servers: host names, folders of sockets, or `local` for the default socket."""
    encoders: tuple[str, ...] = ()
    """Encoders that jobs may name, as `package.module:Class`: naming one runs its code."""

    def check(self, spec: Mapping[str, Any]) -> None:
        """Refuse a data set that may not be read.

        Args:
            spec: Of a data set that was registered, see `Dataset.spec`; what the service made may be read.
        Raises:
            PathRefusedError: It is outside the roots.
            ConfigError: It is on a server that was not named.
        """
        if "make" in spec:
            return
        path = str(spec.get("path", ""))
        if "url" in spec:
            address = parse_database_url(str(spec["url"]))
            if address.kind != "sqlite":
                self.check_server(str(spec["url"]))
                return
            path = address.target
        place = PurePosixPath(path)
        if ".." in place.parts or not any(place.is_relative_to(root) for root in self.roots):
            raise PathRefusedError(
                f"{path} is outside the folders that this service may read ({', '.join(self.roots)}). "
                f"Start it also with --root {place.parent}, or delete the data set"
            )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a job that name code which the operator did not allow.

        Args:
            settings: `TrainingConfig.settings`.
        Raises:
            ConfigError: The encoder is not allowed, or an argument of it could be a path.
        """
        target = settings.get("encoder.target")
        if target is None:
            if settings.get("encoder.kind") == "module":
                raise ConfigError(
                    "settings: encoder.kind is 'module' without encoder.target. Name one of "
                    f"{', '.join(self.encoders) or 'none: the service was started without --allow-encoder'}"
                )
            return
        if target not in self.encoders:
            allowed = ", ".join(self.encoders) or "none"
            raise ConfigError(
                f"settings: encoder.target {target!r} is not an encoder that this service runs ({allowed}). "
                f"Start it with --allow-encoder {target}"
            )
        for text in texts_in(settings.get("encoder.arguments")):
            if "/" in text or "\\" in text or text.startswith("."):
                raise ConfigError(
                    f"settings: encoder.arguments holds {text!r}, which could be a path. A job gives numbers "
                    "and choices; a function that is allowed may open files by itself"
                )

    def why_not(self, spec: Mapping[str, Any]) -> str | None:
        """Return why a data set may not be read; None where it may."""
        try:
            self.check(spec)
        except StokerError as error:
            return str(error)
        return None

    def check_server(self, url: str) -> None:
        """Refuse a server that the operator did not name, and options that reach files or change sessions.

        Raises:
            ConfigError: It is one.
        """
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if refused := sorted({name for name, _ in options} - URL_OPTIONS):
            raise ConfigError(
                f"the database's URL has the option {', '.join(refused)}. Expected none but "
                f"{', '.join(sorted(URL_OPTIONS))}"
            )
        named = {"" if server == "local" else server for server in self.servers}
        servers = {value for name, value in options if name == "host"} or {parts.hostname or ""}
        for server in servers - named:
            name = server or "local"
            raise ConfigError(
                f"this service does not read from the database server {name!r}. Start it with "
                f"--database-host {name}"
            )


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield name
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("list[Any]", value):
            yield from texts_in(inner)


# ----------------------------------------------------------------------------------------------------------
# Which files a request may name: those below the roots given at start, reached without a symbolic link.
#
# A path is walked folder by folder, each opened from the one before and never through a link. Links within
# a root are refused as well, since where they lead may change later; the roots themselves may be links.
#
# What comes out is a name, and other processes open it later. A folder may have been swapped for a link by
# then, so these are confined to the data sets that they work on (`data_paths`): they ask the kernel where
# each file is that they have open (`stoker.sources.files.confine_sources`).


LONGEST = 4096
"""Characters of a path (PATH_MAX of Linux)."""
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = (
    os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
)  # O_NONBLOCK: a pipe must not wait for a writer


@dataclass(frozen=True, slots=True)
class _Root:
    given: PurePosixPath
    """As the operator wrote it, absolute."""
    real: PurePosixPath


class Roots:
    """The folders below which requests may name files. Read-only: nothing is ever written through it."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises: ConfigError: one is not a folder."""
        self._roots: list[_Root] = []
        for root in roots:
            real = Path(os.path.realpath(root))
            if not real.is_dir():
                raise ConfigError(f"--root {root} is not a folder. Name one that holds data")
            self._roots.append(_Root(PurePosixPath(root.absolute()), PurePosixPath(real)))

    def __str__(self) -> str:
        return ", ".join(str(root.given) for root in self._roots)

    @property
    def places(self) -> tuple[str, ...]:
        """The roots as they were written and, where that is another path, as they really are."""
        both = ((str(root.given), str(root.real)) for root in self._roots)
        return tuple(dict.fromkeys(place for pair in both for place in pair))

    def check(self, path: str) -> Path:
        """The real path of a regular file or a folder below a root.

        Args:
            path: Absolute, or below any of the roots, which are tried in turn.
        Raises:
            PathRefusedError: It is elsewhere, leads through a link, does not exist, or is something else.
        """
        fd, real = self._open_first(path)
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise PathRefusedError(
                f"{_shown(path)} is neither a file nor a folder. Name a file or a folder with data"
            )
        return real

    def _open_first(self, path: str) -> tuple[int, Path]:
        """Open the path below the first root that has it."""
        places = self._places(_parts(path))
        if not places:
            raise PathRefusedError(
                f"{_shown(path)} is outside the folders that jobs may read ({self}). "
                "Move the data, or start the service with --root"
            )
        for root, inside in places:
            try:
                return _walk(str(root.real), inside), Path(root.real, *inside)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PathRefusedError(_why(path, error)) from None
        raise PathRefusedError(f"there is no {_shown(path)} below {self}. Name what is there")

    def _places(self, parts: tuple[str, ...]) -> list[tuple[_Root, tuple[str, ...]]]:
        """Roots with the parts of the path below each."""
        if parts[:1] != ("/",):
            return [(root, parts) for root in self._roots]
        found: list[tuple[_Root, tuple[str, ...]]] = []
        for root in self._roots:
            for base in dict.fromkeys((root.given, root.real)):
                if parts[: len(base.parts)] == base.parts:
                    found.append((root, parts[len(base.parts) :]))
        return found


def data_paths(specs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the files and folders of data sets, as they were checked; rows on a server have none.

    Args:
        specs: Of registered data sets, see `Dataset.spec`.
    """
    found: list[str] = []
    for spec in specs:
        path = str(spec.get("path", ""))
        if "url" in spec:
            address = parse_database_url(str(spec["url"]))
            path = address.target if address.kind == "sqlite" else ""
        if "make" in spec:  # in the state folder, which only the service writes to; it may be behind links
            path = os.path.realpath(path)
        found += [path] if path else []
    return found


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a path as it was written; `.` and doubled slashes mean nothing.

    Raises:
        PathRefusedError: It is empty or too long, goes up, or has characters that no path needs.
    """
    if not path or len(path) > LONGEST:
        raise PathRefusedError(f"a path of {len(path):,} characters. Expected 1 to {LONGEST:,}")
    if not path.isprintable():  # also lone surrogates, which no file system would take
        raise PathRefusedError(f"{_shown(path)} has characters that cannot be printed. Rename the file")
    if ".." in path.split("/"):
        raise PathRefusedError(f"{_shown(path)} goes up with `..`. Write the path without it")
    parts = PurePosixPath(path).parts
    return ("/", *parts[1:]) if parts[:1] == ("//",) else parts


def _walk(root: str, parts: Sequence[str]) -> int:
    fd = os.open(root, _STEP)
    for place, part in enumerate(parts):
        step = _OPEN if place == len(parts) - 1 else _STEP
        try:
            deeper = os.open(part, step, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _why(path: str, error: OSError) -> str:
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
        return f"{_shown(path)} leads through a symbolic link, or through a file. Name the real path"
    return f"{_shown(path)} cannot be opened: {error.strerror}. Let the service read it, or name another"


def _shown(path: str) -> str:
    return ascii(path[:200])[1:-1]
