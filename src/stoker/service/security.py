"""The guard in front of every route, page and file, sessions, and the data that requests may name.

The guard refuses every request that breaks one of these rules, so a route cannot be left unprotected:

1. `Host` is a name of this service (another site's name may resolve to this machine), and is given once.
2. `Origin` and `Sec-Fetch-Site`, if a browser sends them, name our own page. A change with a cookie has to
   carry one of them: a browser sends `Origin` with each such request.
3. The request has the token as `Authorization: Bearer`, or the cookie of a session; only `PUBLIC` needs none.
4. Headers, body, its nesting and its strings are within `RequestLimits`, and so is the time to answer.

Every answer has the headers that keep a browser from running or framing foreign content.
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
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, unquote_plus

from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.errors import ConfigError, PathRefusedError, Problem, StokerError
from stoker.runtime.files import create_file, replace_atomically
from stoker.runtime.jsonio import read_object
from stoker.sources.sql.query import parse_database_url

if TYPE_CHECKING:
    from stoker.service.audit import AuditLog
    from stoker.service.services import RequestTraffic

# ----------------------------------------------------------------------------------------------------------
# Bodies of requests: limited in size and time, and JSON that is safe for all code behind the guard.


_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


async def discard(receive: Receive, *, most: int, within_s: float) -> bool:
    """Read and drop a body; return whether that was all of it.

    Closing a connection with an unread body would lose our answer.
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
    """Return a `receive` that yields the body once, and then later messages."""
    waiting = [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again


def fault_in_json(body: bytes, *, depth: int, members: int, text_chars: int) -> str:
    """Return what is wrong with a body as JSON; empty for a valid one.

    Refused are nesting deeper than `depth` (which would crash the parser) and more values than `members`
    (each costs a check). So are strings longer than `text_chars`, duplicate names, NaN and infinities, and
    characters that no database accepts.
    """
    level = 0
    for match in _BRACKETS.finditer(body):
        first = match[0][:1]
        level += (first in b"[{") - (first in b"]}")
        if level > depth:
            return f"it is nested deeper than {depth} levels"
    try:
        value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_unique_members)
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a member twice")
    return found


_SEEN_AS_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and signs without ink: fillers of Hangul, and the empty Braille pattern."""


def check_name(name: str) -> str:
    """Return the name of a job or a data set, if a page shows it as it is.

    Letters of all languages are allowed. Characters that reverse or hide the text around them are not.

    >>> check_name("überfällig 100 %")
    'überfällig 100 %'

    Raises:
        ConfigError: It is blank, or has a character that cannot be shown.
    """
    # Two joiners belong to words of Persian and Indic scripts, and to signs made of several.
    hidden = [one for one in name if not one.isprintable() and one not in "\u200c\u200d"]
    if hidden:
        raise ConfigError(
            f"the name has the character U+{ord(hidden[0]):04X}, which cannot be shown",
            hint="Use letters, digits, signs and spaces",
        )
    if not any(unicodedata.category(one)[0] in "LNPS" and one not in _SEEN_AS_BLANK for one in name):
        raise ConfigError("the name is blank", hint="Use at least one letter, digit or sign")
    return name


# ----------------------------------------------------------------------------------------------------------
# Clients: programs with the token of the state folder, and browsers with a session.
#
# Programs send the token. A browser exchanges a one-time code for a cookie. The cookie contains its expiry
# and is signed with a key derived from the token, so it survives a restart and becomes invalid with the
# token.


SHORTEST = 32
"""Least number of characters of a secret; our tokens have 43, which are 256 bits."""
CODE_S = 600.0
"""How long a login code may be used."""
SESSION_S = 7 * 86400.0
CODES = 64
"""Login codes that are kept; the oldest is dropped first."""
CODE_BYTES = 24
"""Random bytes of a code: 192 bits."""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A browser that has logged in."""

    id: str
    until: float
    """Unix time at which it ends, unless it logs out before."""


def load_token(path: Path) -> SecretStr:
    """Return the token in a file, created at the first call: 256 bits that only its user may read.

    Raises:
        ConfigError: The file is not a valid or private token file.
        ReadOnlyError, ResourceError: It cannot be created.
    """
    if not path.exists():
        # Another service may create it first, and its token is as good.
        create_file(path, (secrets.token_urlsafe(32) + "\n").encode(), mode=0o600)
    return read_secret(path, "Remove it, and a new one is made")


def read_secret(path: Path, otherwise: str) -> SecretStr:
    """Return the secret in a file that only its user may read.

    Args:
        path: Of the file.
        otherwise: What to do with a file that cannot be used, for the error.
    Raises:
        ConfigError: The file is missing or not private, or its secret is too short.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=otherwise) from None
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        text = file.read(1024).decode("ascii", "replace").strip() if stat.S_ISREG(mode) else ""
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(
            f"{path} may be read by others (mode {stat.S_IMODE(mode):o}), expected 600", hint=otherwise
        )
    if len(text) < SHORTEST or not text.isprintable():
        raise ConfigError(f"{path} holds {len(text)} characters, expected {SHORTEST} or more", hint=otherwise)
    return SecretStr(text)


class Auth:
    """Checks tokens and exchanges codes for sessions. Safe to call from several threads."""

    def __init__(
        self, token: SecretStr, *, ended: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._token = token.get_secret_value()
        self._key = hmac.digest(self._token.encode(), b"stoker session", "sha256")
        self._clock = clock
        self._lock = threading.Lock()
        self._codes: dict[str, float] = {}
        """Expiry of each code, by its digest. Wrong tries are not counted: 192 random bits cannot be guessed,
        and a count would let anyone invalidate a code."""
        self._ended_file = ended
        self._ended = _read_ended(ended)
        """Expiry of the cookies of sessions that logged out, by session id."""
        self.cookie = f"stoker_{hmac.digest(self._key, b'name', 'sha256').hex()[:8]}"
        """Name of the cookie: cookies ignore ports, so two services on one machine need two names."""

    def is_token(self, value: str) -> bool:
        """Return True if a value is the token, in constant time."""
        return same(value, self._token)

    def new_code(self) -> str:
        """Return a code that opens one session within `CODE_S`."""
        now, code = self._clock(), secrets.token_urlsafe(CODE_BYTES)
        with self._lock:
            kept = [(digest, until) for digest, until in self._codes.items() if until > now]
            self._codes = dict([*kept[-(CODES - 1) :], (_digest(code), now + CODE_S)])
        return code

    def log_in(self, secret: str) -> str | None:
        """Return a cookie for a code, which becomes invalid, or for the token; None for anything else."""
        with self._lock:
            until = self._codes.pop(_digest(secret), 0.0)
        if until <= self._clock() and not self.is_token(secret):
            return None
        payload = f"{secrets.token_hex(16)}.{int(self._clock() + SESSION_S)}"
        return f"{payload}.{self._sign('session', payload)}"

    def session(self, cookie: str) -> BrowserSession | None:
        """Return the session of a cookie that is signed, not expired and not logged out, else None."""
        payload, _, signature = cookie.rpartition(".")
        if not same(signature, self._sign("session", payload)):
            return None
        name, _, until = payload.partition(".")
        session = BrowserSession(id=name, until=float(until))
        return session if self.is_open(session) else None

    def is_open(self, session: BrowserSession) -> bool:
        """Return True if a session has neither logged out nor expired."""
        return session.until > self._clock() and session.id not in self._ended

    def end(self, session: BrowserSession) -> None:
        """Invalidate the cookie of a session, also after a restart.

        Raises:
            ReadOnlyError, ResourceError: It cannot be stored, and is invalid only until the restart.
        """
        now = self._clock()
        with self._lock:
            ended = {name: until for name, until in self._ended.items() if until > now}
            self._ended = {**ended, session.id: now + SESSION_S}
            if self._ended_file is not None:
                with replace_atomically(self._ended_file) as temporary:
                    temporary.write_text(json.dumps(self._ended))

    def _sign(self, purpose: str, payload: str) -> str:
        return hmac.digest(self._key, f"{purpose}:{payload}".encode("utf-8", "replace"), "sha256").hex()


def _read_ended(path: Path | None) -> dict[str, float]:
    """Return the sessions that have logged out, from a file.

    Raises:
        ConfigError: The file is damaged.
    """
    if path is None or not path.exists():
        return {}
    try:
        return {str(name): float(until) for name, until in read_object(path).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which sessions have logged out: {error}",
            hint="Remove it and DIR/token; then all users log in again",
        ) from None


def same(given: str, expected: str) -> bool:
    """Return True if two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(code: str) -> str:
    """Return the digest of a code: the time of a look-up by digest reveals nothing about codes."""
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()


log = logging.getLogger("stoker")
PUBLIC = frozenset({("GET", "/health"), ("GET", "/login"), ("POST", "/login")})
"""All requests that need neither token nor session."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ONCE = ("host", "origin", "authorization", "cookie", "content-length", "sec-fetch-site")
"""Headers that must not come twice: a proxy and this service might each use another one."""
UNREAD_BYTES, UNREAD_S = 4 << 20, 2.0
"""How much of the body of a refused request is read, so that the client gets the answer."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,15}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request."""

    header_bytes: int = 16 << 10
    body_bytes: int = 1 << 20
    public_bytes: int = 8 << 10
    """Of a body without token and session."""
    depth: int = 32
    """Levels of nesting in JSON."""
    members: int = 5000
    """Values in JSON, names of members included."""
    text_chars: int = 4096
    """Characters of one string in JSON."""
    body_s: float = 15.0
    answer_s: float = 30.0
    """Until an answer begins; a stream after that has no limit."""


class Refusal(HTTPException):
    """The answer of the guard to a request that it does not let through."""

    def __init__(self, status: int, fact: str, hint: str = "") -> None:
        self.problem = Problem(fact, hint)
        super().__init__(status, str(self.problem))


class Guard:
    """Let only requests that keep the rules above reach the application, and limit each in size and time.

    `scope["state"]["session"]` is the session of the browser that asks; None for the token and for strangers.

    Args:
        app: The application behind it.
        auth: Knows tokens and sessions.
        hosts: Names and addresses by which the service may be called.
        limits: Of one request.
        headers: Sent with every answer.
        refusal_page: Makes the page of a refusal for a browser from status, fact, hint and the address.
        traffic: Counts every answer.
        audit: Keeps who has changed what.
    """

    def __init__(  # noqa: PLR0913 - what the service sets, by name
        self,
        app: ASGIApp,
        *,
        auth: Auth,
        hosts: Collection[str],
        limits: RequestLimits,
        headers: Sequence[tuple[str, str]],
        refusal_page: Callable[[int, str, str, str], Response],
        traffic: RequestTraffic,
        audit: AuditLog,
    ) -> None:
        self._app = app
        self._auth, self._limits, self._traffic, self._audit = auth, limits, traffic, audit
        self._refusal_page = refusal_page
        self._hosts = frozenset(host.lower() for host in hosts)
        self._headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request, began = Request(scope, receive), time.monotonic()
        request.state.session = None
        is_unread, has_started = True, False

        async def begin(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                clock.reschedule(None)  # what is streamed after the start has no end
                given = list(message.get("headers", []))
                message["headers"] = given + self._missing(given)
                self._traffic.note(message["status"], time.monotonic() - began)
                self._note_change(request, message["status"])
            await send(message)

        try:
            self._check_form(request)
            self._check_host(request)
            self._check_origin(request)
            self._check_sender(request)
            self._check_change(request)
            body = await self._read_body(request)
            is_unread = False
            self._check_json(request, body)
            async with asyncio.timeout(self._limits.answer_s) as clock:
                await self._app(scope, replay(body, receive), begin)
            return
        except ClientDisconnect:
            return
        except Refusal as error:
            refusal = error
        except TimeoutError:
            if has_started:
                raise
            refusal = Refusal(504, "no answer in time", "Try again")
        except Exception:
            log.exception("%s %s failed", request.method, scope["path"])
            if has_started:
                raise
            refusal = Refusal(500, "a fault of the service; its log has it")
        await self._refuse(request, refusal, receive, send, is_unread=is_unread)

    def _note_change(self, request: Request, status: int) -> None:
        """Keep who has asked for a change; strangers are kept only at the login, which anyone may try."""
        session: BrowserSession | None = request.state.session
        path = request.url.path
        if request.method in SAFE or path.endswith("/plan"):  # a plan changes nothing
            return
        who = "token" if session is None else f"session {session.id[:8]}"
        self._audit.note(
            who="" if _is_public(request) else who,
            client=request.client.host if request.client else "",
            method=request.method,
            path=path,
            status=status,
        )

    def _check_form(self, request: Request) -> None:
        headers = request.headers.raw
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes:
            raise Refusal(431, f"headers of more than {self._limits.header_bytes:,} bytes", "Send fewer")
        for name in ONCE:
            if len(request.headers.getlist(name)) > 1:
                raise Refusal(400, f"the header {name} is given twice", "Send it once")
        target = request.scope["path"] + unquote_plus(request.scope["query_string"].decode("latin-1"))
        if _CONTROL.search(target):
            raise Refusal(400, "the address holds control characters", "Remove them")

    def _check_host(self, request: Request) -> None:
        match = _HOST.fullmatch(request.headers.get("host", ""))
        name = (match[1] or match[2]).lower() if match else ""
        # An address of this machine is never what another site's name was made to resolve to.
        is_own_address = _is_address(name) and name == (request.scope.get("server") or ("",))[0]
        if name not in self._hosts and not is_own_address:
            raise Refusal(403, "the service is not known by this Host", "Start it with --allow-host NAME")

    def _check_origin(self, request: Request) -> None:
        origin, host = request.headers.get("origin", "").lower(), request.headers.get("host", "").lower()
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            raise Refusal(403, "a page of another Origin asks", "Only pages of this service may")
        if request.headers.get("sec-fetch-site", "").lower() not in ("", "same-origin", "none"):
            raise Refusal(403, "another site asks (Sec-Fetch-Site)", "Open the address by hand")

    def _check_sender(self, request: Request) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        session = request.state.session = self._auth.session(request.cookies.get(self._auth.cookie, ""))
        if scheme.lower() == "bearer":
            if self._auth.is_token(value.strip()):
                request.state.session = None
                return
            session = None  # a client that sends a token means it
        if session is None and not _is_public(request):
            raise Refusal(
                401, "no valid token or session", "Send `Authorization: Bearer TOKEN` (DIR/token), or log in"
            )

    def _check_change(self, request: Request) -> None:
        """With a cookie, which a browser adds automatically, a change has to say which page asks.

        `_check_origin` has refused all pages but ours; a request that names none is not a browser's.
        """
        is_named = (
            request.headers.get("origin")
            or request.headers.get("sec-fetch-site", "").lower() == "same-origin"
        )  # fmt: skip
        is_harmless = request.method in SAFE or _is_public(request)
        if request.state.session is not None and not is_harmless and not is_named:
            raise Refusal(403, "a change with a cookie needs an Origin", "Send the token instead")

    async def _read_body(self, request: Request) -> bytes:
        limits = self._limits
        most = limits.public_bytes if _is_public(request) else limits.body_bytes
        length = request.headers.get("content-length") or "0"
        if not _NUMBER.fullmatch(length):
            raise Refusal(400, "Content-Length is not a size that a body can have")
        too_large = Refusal(413, f"a body of more than {most:,} bytes", "Send less")
        if int(length) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise Refusal(
                408, f"the body was not complete within {limits.body_s:g} s", "Send it faster"
            ) from None
        return bytes(body)

    def _check_json(self, request: Request, body: bytes) -> None:
        if body and "json" in (request.headers.get("content-type") or "json").lower():
            limits = self._limits
            fault = fault_in_json(
                body, depth=limits.depth, members=limits.members, text_chars=limits.text_chars
            )
            if fault:
                raise Refusal(422, f"the body is refused: {fault}")

    async def _refuse(
        self, request: Request, refusal: Refusal, receive: Receive, send: Send, *, is_unread: bool
    ) -> None:
        """Answer with a refusal; what is unread of the body is read and dropped, if that is little."""
        status = refusal.status_code
        self._traffic.note(status, 0.0)
        fact, hint = refusal.problem
        if wants_page(request):
            query = request.scope["query_string"].decode("latin-1")
            asked = quote(request.scope["path"]) + (f"?{query}" if query else "")
            response = self._refusal_page(status, fact, hint, asked if request.method == "GET" else "/")
        else:
            body = {"error": refusal.detail, "fact": fact, "hint": hint, "fields": []}
            response = JSONResponse(body, status)
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if status == 504:
            response.headers["Retry-After"] = "5"
        if is_unread and not await discard(receive, most=UNREAD_BYTES, within_s=UNREAD_S):
            response.headers["Connection"] = "close"
        response.raw_headers += self._missing(response.raw_headers)
        await response(request.scope, receive, send)

    def _missing(self, given: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers for every answer that this one has not set itself."""
        names = {name.lower() for name, _ in given}
        return [(name, value) for name, value in self._headers if name not in names]


def wants_page(request: Request) -> bool:
    """Return True for a browser that opens an address; programs and scripts of pages want no HTML."""
    return "text/html" in request.headers.get("accept", "")


def _is_public(request: Request) -> bool:
    return (request.method, request.scope["path"]) in PUBLIC


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# Data that the service may read, below its roots and on named servers, and encoders that jobs may name.
#
# A data set stays registered when the service is started with other roots or servers. So the service and the
# worker of a job check it again before each use, by its names only: nothing is opened.


URL_OPTIONS = frozenset({"host", "sslmode", "connect_timeout"})
"""Options of a PostgreSQL URL that a request may give. Other options of libpq name files that it reads or
appends to, or change the rights of a session."""
_URL_PARTS = frozenset({"host", "port", "user", "password", "dbname"})
"""Options that a URL gives before `?`; it may give them after it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAccess:
    """The access that the operator allowed at the start."""

    roots: tuple[str, ...] = ()
    """Absolute folders, as given and with links resolved."""
    servers: tuple[str, ...] = ()
    """PostgreSQL servers: host names, folders of sockets, or `local` for the default socket."""
    connections: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files of the connections that the operator named, by name: see `connections.py`."""
    encoders: tuple[str, ...] = ()
    """Encoders that jobs may name, as `package.module:Class`: a job runs the code of its encoder."""

    def check(self, spec: Mapping[str, Any]) -> None:
        """Refuse a data set that may not be read.

        Args:
            spec: Of a data set, see `Dataset.spec`; generated data may always be read.
        Raises:
            PathRefusedError: It is outside the roots.
            ConfigError: It is on a server that was not allowed, or names a connection that was not given.
        """
        if "make" in spec:
            return
        if "connection" in spec:
            self.check_connection(str(spec["connection"]))
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
                f"{path} is outside the folders that this service may read ({', '.join(self.roots)})",
                hint=f"Start it also with --root {place.parent}, or delete the data set",
            )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a job that name code that the operator did not allow.

        Args:
            settings: `JobConfig.settings`.
        Raises:
            ConfigError: The encoder is not allowed, or an argument of it could be a path.
        """
        target = settings.get("encoder.target")
        if target is None:
            if settings.get("encoder.kind") == "module":
                raise ConfigError(
                    "settings: encoder.kind is 'module' without encoder.target",
                    hint="Name one of "
                    f"{', '.join(self.encoders) or 'none: the service was started without --allow-encoder'}",
                )
            return
        if target not in self.encoders:
            allowed = ", ".join(self.encoders) or "none"
            raise ConfigError(
                f"settings: encoder.target {target!r} is not an encoder that this service runs ({allowed})",
                hint=f"Start it with --allow-encoder {target}",
            )
        for text in texts_in(settings.get("encoder.arguments")):
            if "/" in text or "\\" in text or text.startswith("."):
                raise ConfigError(
                    f"settings: encoder.arguments holds {text!r}, which could be a path",
                    hint="A job gives numbers and choices; an allowed function may open files on its own",
                )

    def why_not(self, spec: Mapping[str, Any]) -> str | None:
        """Return why a data set may not be read; None if it may."""
        try:
            self.check(spec)
        except StokerError as error:
            return str(error)
        return None

    def check_connection(self, name: str) -> None:
        """Refuse a connection that the operator did not name.

        Raises:
            ConfigError: It is unknown.
        """
        if name not in self.connections:
            known = ", ".join(self.connections) or "none"
            raise ConfigError(
                f"connection {name!r} is unknown; the operator named: {known}",
                hint=f"Start the service with --connection {name}=FILE",
            )

    def check_server(self, url: str) -> None:
        """Refuse a server that the operator did not allow, and options that reach files or change sessions.

        Raises:
            ConfigError: The server or an option is not allowed, or more than one server is named.
        """
        options = parse_database_url(url).options
        host = options.get("host", "")
        if "," in host:  # libpq takes it for the next of several servers
            raise ConfigError(
                f"the database's URL names the servers {host!r}", hint="Expected one HOST or HOST:PORT"
            )
        if refused := sorted({*options} - _URL_PARTS - URL_OPTIONS):
            raise ConfigError(
                f"the database's URL has the option {', '.join(refused)}",
                hint=f"Expected none but {', '.join(sorted(URL_OPTIONS))}",
            )
        named = {"" if server == "local" else _same_server(server) for server in self.servers}
        if _same_server(host) not in named:
            name = host or "local"
            raise ConfigError(
                f"this service does not read from the database server {name!r}",
                hint=f"Start it with --database-host {name}",
            )


def _same_server(name: str) -> str:
    """Return a server's name in the form in which two are compared: only those of sockets have case."""
    return name if name.startswith(("/", "@")) else name.lower()


def texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, including names of members."""
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
# Files that a request may name: those below the roots given at the start, reached without a symbolic link.
#
# A path is walked folder by folder, each opened relative to the one before and never through a link. Links
# within a root are refused as well, since their targets may change later; the roots themselves may be links.
#
# The result is a path that other processes open later. By then a folder may have been replaced by a link. So
# these processes are confined to the data sets that they work on (`data_paths`): they ask the kernel for the
# real path of each file that they have open (`stoker.sources.files.confine_sources`).


LONGEST = 4096
"""Characters of a path (PATH_MAX of Linux)."""
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = (
    os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
)  # O_NONBLOCK: a pipe must not wait for a writer


@dataclass(frozen=True, slots=True)
class _Root:
    given: PurePosixPath
    """Absolute, as the operator gave it."""
    real: PurePosixPath


class Roots:
    """The folders below which requests may name files. Only for reading."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises: ConfigError: one is not a folder."""
        self._roots: list[_Root] = []
        for root in roots:
            real = Path(os.path.realpath(root))
            if not real.is_dir():
                raise ConfigError(f"--root {root} is not a folder", hint="Name one that holds data")
            self._roots.append(_Root(PurePosixPath(root.absolute()), PurePosixPath(real)))

    def __str__(self) -> str:
        return ", ".join(str(root.given) for root in self._roots)

    @property
    def places(self) -> tuple[str, ...]:
        """The roots as given and, where that is another path, with links resolved."""
        both = ((str(root.given), str(root.real)) for root in self._roots)
        return tuple(dict.fromkeys(place for pair in both for place in pair))

    def check(self, path: str) -> Path:
        """Return the real path of a regular file or a folder below a root.

        Args:
            path: Absolute, or below any of the roots, which are tried in turn.
        Raises:
            PathRefusedError: It is outside the roots, leads through a link, or is not a file or folder.
        """
        fd, real = self._open_first(path)
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise PathRefusedError(
                f"{_shown(path)} is neither a file nor a folder", hint="Name a file or a folder with data"
            )
        return real

    def _open_first(self, path: str) -> tuple[int, Path]:
        """Open the path below the first root that has it."""
        places = self._places(_parts(path))
        if not places:
            raise PathRefusedError(
                f"{_shown(path)} is outside the folders that jobs may read ({self})",
                hint="Move the data, or start the service with --root",
            )
        for root, inside in places:
            try:
                return _walk(str(root.real), inside), Path(root.real, *inside)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _refused(path, error) from None
        raise PathRefusedError(f"{_shown(path)} does not exist below {self}", hint="Name an existing path")

    def _places(self, parts: tuple[str, ...]) -> list[tuple[_Root, tuple[str, ...]]]:
        """Return the roots that may have the path, each with the parts of the path below it."""
        if parts[:1] != ("/",):
            return [(root, parts) for root in self._roots]
        found: list[tuple[_Root, tuple[str, ...]]] = []
        for root in self._roots:
            for base in dict.fromkeys((root.given, root.real)):
                if parts[: len(base.parts)] == base.parts:
                    found.append((root, parts[len(base.parts) :]))
        return found


def data_paths(specs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the files and folders of data sets, as they were checked; rows on a server have no path.

    Args:
        specs: Of registered data sets, see `Dataset.spec`.
    """
    found: list[str] = []
    for spec in specs:
        path = str(spec.get("path", ""))
        if "url" in spec:
            address = parse_database_url(str(spec["url"]))
            path = address.target if address.kind == "sqlite" else ""
        if "make" in spec:  # in the state folder, which may be behind links; only the service writes there
            path = os.path.realpath(path)
        found += [path] if path else []
    return found


def _parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path as given, without `.` and doubled slashes.

    Raises:
        PathRefusedError: It is empty or too long, contains `..`, or has unprintable characters.
    """
    if not path or len(path) > LONGEST:
        raise PathRefusedError(f"a path of {len(path):,} characters", hint=f"Expected 1 to {LONGEST:,}")
    if not path.isprintable():  # also lone surrogates, which no file system would take
        raise PathRefusedError(
            f"{_shown(path)} has characters that cannot be printed", hint="Rename the file"
        )
    if ".." in path.split("/"):
        raise PathRefusedError(f"{_shown(path)} goes up with `..`", hint="Write the path without it")
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


def _refused(path: str, error: OSError) -> PathRefusedError:
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
        return PathRefusedError(
            f"{_shown(path)} leads through a symbolic link, or through a file", hint="Name the real path"
        )
    return PathRefusedError(
        f"{_shown(path)} cannot be opened: {error.strerror}", hint="Let the service read it, or name another"
    )


def _shown(path: str) -> str:
    return ascii(path[:200])[1:-1]
