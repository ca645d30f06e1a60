"""Files of web servers: a range only where the server promises the same content, and answers with it."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse, responses
from typing import IO, cast
from urllib.parse import urlsplit

from stoker.errors import TransferError
from stoker.fetch.origin import PIECE_BYTES, Version, shown_source

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be gone the next time."""
RANGE_NOT_SATISFIABLE = 416
LONGEST_WAIT_S = 600.0
_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+|\*)$")


class HttpOrigin:
    """A URL. Proxies are those of the system; nothing but http and https is followed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = shown_source(url)
        self._opener = urllib.request.build_opener(_Redirects())

    def open(self, offset: int, tag: str, *, stall_s: float) -> HttpStream:
        """See `Origin`."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "stoker"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if tag:
                headers["If-Range"] = tag
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 - http(s), see origin_of
        try:
            answer = cast(HTTPResponse, self._opener.open(request, timeout=stall_s))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == RANGE_NOT_SATISFIABLE and offset:
                    return self.open(0, "", stall_s=stall_s)
                raise self._refused(error) from None
        except (OSError, HTTPException, ValueError) as error:
            raise self.broken(error) from None
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            answer.close()
            raise TransferError(
                f"{self._shown} sends the file {coding}-encoded although identity was asked for. Fetch it "
                "from another address, or by hand"
            )
        try:
            stream = HttpStream(answer, offset, self)
        except BaseException:
            answer.close()
            raise
        if tag and stream.offset and stream.version.tag not in ("", tag):  # it ignored If-Range
            stream.close()
            return self.open(0, "", stall_s=stall_s)
        return stream

    def broken(self, error: Exception) -> TransferError:
        """What a failure of the connection is called."""
        reason = getattr(error, "reason", None) or error
        said = str(reason) or type(reason).__name__
        return TransferError(f"{self._shown}: {said}", passing=not isinstance(error, ValueError))

    def _refused(self, error: urllib.error.HTTPError) -> TransferError:
        return TransferError(
            f"{self._shown} answers {error.code} {responses.get(error.code, '')}",
            passing=error.code in PASSING,
            wait_s=retry_after_s(error.headers.get("Retry-After")),
        )


class HttpStream:
    """An answer that is being read."""

    def __init__(self, answer: HTTPResponse, offset: int, origin: HttpOrigin) -> None:
        self._answer, self._origin = answer, origin
        etag = answer.headers.get("ETag") or ""
        if etag.startswith("W/"):  # two different contents may share it
            etag = ""
        self.offset, size = _placed(answer, offset)
        self.version = Version(bytes=size, tag=etag or answer.headers.get("Last-Modified") or "")

    def read(self) -> bytes:
        """See `Stream`."""
        try:
            return self._answer.read1(PIECE_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            raise self._origin.broken(error) from None

    def close(self) -> None:
        """See `Stream`."""
        self._answer.close()

    def stop(self) -> None:
        """Nothing: each wait for the network ends after `stall_s`."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: for requests with a credential, which goes to the given address alone."""

    def redirect_request(self, *_: object) -> None:  # type: ignore[override]
        """Refuse."""


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
        """See the library."""
        if req.type == "https" and urlsplit(newurl).scheme == "http":
            raise ValueError("leads on to http://, which is not followed from https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _placed(answer: HTTPResponse, offset: int) -> tuple[int, int | None]:
    """Where an answer begins, and the size of the whole file."""
    if answer.status == 206:
        found = _RANGE.match(answer.headers.get("Content-Range") or "")
        if found is None or int(found[1]) != offset:
            raise TransferError(
                f"the server answered another range than the one from {offset:,} on", passing=True
            )
        return offset, None if found[3] == "*" else int(found[3])
    if answer.status != 200:
        raise TransferError(f"the server answers {answer.status}, expected 200")
    length = answer.headers.get("Content-Length")
    return 0, int(length) if length is not None and length.isdigit() else None


def retry_after_s(text: str | None) -> float:
    """Seconds of a Retry-After, which may be a date; 0 where there is none."""
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
