"""Ask web servers: one small client with limits of time and size, and credentials for one server alone."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from enum import Enum
from http.client import HTTPException, HTTPMessage, HTTPResponse, responses
from typing import IO, Any, Self, TypedDict, Unpack, cast
from urllib.parse import urlsplit

from stoker.errors import ServiceError, StalledError
from stoker.runtime.threads import call_within

ANSWER_BYTES = 64 << 20
ERROR_BYTES = 64 << 10
"""The largest body of an answer whose status is not success."""
TOTAL_S = 600.0
LONGEST_WAIT_S = 600.0
"""The longest Retry-After that is taken seriously."""
_LINE_BYTES = 16 << 20
_LEAST_S = 0.1
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CREDENTIALS = ("Authorization", "Cookie", "Proxy-authorization")
"""Headers that go to the server they are meant for, as `urllib` writes their names."""


class FailureKind(Enum):
    """Reason for which there is no answer."""

    UNREACHABLE = "unreachable"
    """No connection was made: the server has not seen the request."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The connection ended before the answer began, or what came is not HTTP."""
    CUT = "cut"
    """The connection ended within the answer."""
    REFUSED = "refused"
    """It will be the same the next time: the URL is not valid, or a redirect may not be followed."""
    TOO_LARGE = "too large"
    ENCODED = "encoded"
    """It is compressed although that was not asked for; `reason` is the coding."""


class HttpFailure(Exception):  # noqa: N818 - each client makes an error for its users of it
    """No complete answer came. Clients turn it into an error that says what to do."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer, of any status."""

    status: int
    headers: Message
    body: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is one of success."""
        return 200 <= self.status < 300

    @property
    def shown_status(self) -> str:
        """The status for messages: `404 Not Found`."""
        return f"{self.status} {responses.get(self.status, '')}".rstrip()


class HttpStream:
    """An answer that is being read."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.headers: Message = response.headers

    def read(self, limit_bytes: int) -> bytes:
        """Return what has come, at most `limit_bytes`, waiting for the first byte; empty at the end.

        Raises:
            HttpFailure: The connection broke, or nothing came in time.
        """
        with _failures(FailureKind.CUT):
            return self._response.read1(limit_bytes)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the server has announced and not sent; 0 where it announced no size."""
        return self._response.length or 0

    def lines(self) -> Iterator[bytes]:
        """Yield the lines as they come; errors as `read`."""
        while True:
            with _failures(FailureKind.CUT):
                line = self._response.readline(_LINE_BYTES)
            if not line:
                return
            yield line

    def close(self) -> None:
        """End the connection."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RequestOptions(TypedDict, total=False):
    """Arguments of every request in addition to its method and URL."""

    headers: Mapping[str, str] | None
    body: Mapping[str, Any] | bytes | None
    """Sent as JSON; bytes as they are."""


class HttpClient:
    """Ask servers over http and https.

    Args:
        timeout_s: The longest wait for a connection, and for each next byte.
        total_s: The longest time for a complete answer, the lookup of the name included.
        limit_bytes: The largest answer.
        uses_proxies: Use the proxies of the system. They would see what is sent to http:// servers.
        follows_redirects: Follow them, but never from https to http, and with credentials only on the same
            server. Otherwise a redirect is an answer like any other.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        total_s: float = TOTAL_S,
        limit_bytes: int = ANSWER_BYTES,
        uses_proxies: bool = True,
        follows_redirects: bool = False,
    ) -> None:
        self._timeout_s, self._total_s, self._limit_bytes = timeout_s, total_s, limit_bytes
        # Not `build_opener`: it adds handlers that read local files and FTP.
        self._opener = urllib.request.OpenerDirector()
        self._opener.addheaders = [("User-Agent", "stoker")]
        handlers = (
            urllib.request.ProxyHandler(None if uses_proxies else {}),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            _Redirects(),
            _Statuses(follows_redirects=follows_redirects),
        )
        for handler in handlers:
            self._opener.add_handler(handler)

    def ask(
        self, method: str, url: str, *, total_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Answer:
        """Send a request, and return the complete answer, of whatever status.

        Args:
            total_s: In place of the client's own.

        Raises:
            HttpFailure: None came in time, it is larger than allowed, or it is compressed.
        """
        limit_s = self._total_s if total_s is None else max(_LEAST_S, total_s)
        until = time.monotonic() + limit_s

        def exchange() -> Answer:
            with self.open(method, url, timeout_s=min(self._timeout_s, limit_s), **options) as stream:
                return Answer(status=stream.status, headers=stream.headers, body=self._body(stream, until))

        try:  # in a thread: neither the lookup of a name nor a header that trickles has a timeout of its own
            return call_within(limit_s, exchange, url)
        except StalledError:
            raise HttpFailure(FailureKind.TIMEOUT, f"no complete answer within {limit_s:g} s") from None

    def open(
        self, method: str, url: str, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> HttpStream:
        """Send a request, and return the answer once its header is there, to be closed.

        Args:
            timeout_s: In place of the client's own.

        Raises:
            HttpFailure: None came in time, or it is compressed.
        """
        sent = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        body = options.get("body")
        data = body if isinstance(body, bytes) else None
        if isinstance(body, Mapping):
            sent["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        with _failures(FailureKind.BROKEN):
            if urlsplit(url).scheme not in ("http", "https"):
                raise ValueError("its scheme is not http or https")
            request = urllib.request.Request(url, data, sent, method=method)  # noqa: S310 - see above
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            try:
                response = cast(HTTPResponse, self._opener.open(request, timeout=limit_s))
            except urllib.error.HTTPError as error:  # redirects without end
                response = cast(HTTPResponse, error.fp)
        coding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
        if coding not in ("", "identity"):
            response.close()
            raise HttpFailure(FailureKind.ENCODED, coding)
        return HttpStream(response)

    def _body(self, stream: HttpStream, until: float) -> bytes:
        """Return the body; of an answer that failed only if it is short and sound."""
        is_success = 200 <= stream.status < 300
        limit_bytes = self._limit_bytes if is_success else ERROR_BYTES
        body = bytearray()
        try:
            while piece := stream.read(min(1 << 20, limit_bytes + 1 - len(body))):
                body += piece
                if time.monotonic() > until:
                    raise HttpFailure(FailureKind.TIMEOUT, "the answer does not end")
                if len(body) > limit_bytes:
                    raise HttpFailure(FailureKind.TOO_LARGE, f"the answer has over {limit_bytes:,} bytes")
            if stream.missing_bytes:
                raise HttpFailure(FailureKind.CUT, f"it ended {stream.missing_bytes:,} bytes early")
        except HttpFailure:
            if is_success:
                raise
            body.clear()
        return bytes(body)


def json_object(body: bytes, what: str, hint: str = "") -> dict[str, Any]:
    """Return the JSON object that an answer holds.

    Raises:
        ServiceError: It is something else; shows how it begins.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ServiceError(f"{what}: the answer is not a JSON object ({body[:80]!r}){hint}")
    return cast("dict[str, Any]", found)


def retry_after_s(headers: Message) -> float:
    """Return the seconds of a Retry-After, which may be a date; 0 if it is missing."""
    text = headers.get("Retry-After")
    if text is None:
        return 0.0
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(text)))
    except ValueError:
        pass
    try:
        from datetime import UTC, datetime

        left = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        return min(LONGEST_WAIT_S, max(0.0, left))
    except (ValueError, TypeError):
        return 0.0


@contextmanager
def _failures(broken: FailureKind) -> Generator[None]:
    """Turn the errors of sockets and of the library into failures; `broken` is the kind of most of them."""
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        cause: object = getattr(error, "reason", None) or error
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            kind = FailureKind.UNREACHABLE
        elif isinstance(cause, TimeoutError):
            kind = FailureKind.TIMEOUT
        else:
            kind = FailureKind.REFUSED if isinstance(error, ValueError) else broken
        why = getattr(cause, "strerror", None) or str(cause)
        raise HttpFailure(kind, why or type(cause).__name__) from None


class _Statuses(urllib.request.HTTPErrorProcessor):
    """Let every status through as an answer, but for redirects that are to be followed."""

    def __init__(self, *, follows_redirects: bool) -> None:
        self._follows_redirects = follows_redirects

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        if not self._follows_redirects or response.status not in _REDIRECTS:
            return response
        response.close()  # the library would read all of its body, which may have no end
        return self.parent.error(
            "http", request, response, response.status, response.reason, response.headers
        )

    https_response = http_response


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Never follows from a secured place to an open one; the library itself refuses files and the like."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if old.scheme == "https" and new.scheme == "http":
            raise ValueError("leads on to http://, which is not followed from https://")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            for name in _CREDENTIALS:
                request.remove_header(name)
        return request
