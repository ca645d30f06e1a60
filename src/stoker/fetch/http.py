"""Files of web servers: a range only where the server promises the same content, and answers with it."""

from __future__ import annotations

import re
from http.client import responses

from stoker.errors import TransferError
from stoker.fetch.origin import PIECE_BYTES, Version, shown_source
from stoker.runtime.http import FailureKind, HttpClient, HttpFailure, HttpStream, retry_after_s

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be gone the next time."""
RANGE_NOT_SATISFIABLE = 416
_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+|\*)$")


class HttpOrigin:
    """A URL. Proxies are those of the system; nothing but http and https is followed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = shown_source(url)

    def open(self, offset: int, tag: str, *, stall_s: float) -> HttpFile:
        """See `Origin`."""
        headers: dict[str, str] = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if tag:
                headers["If-Range"] = tag
        try:
            answer = HttpClient(timeout_s=stall_s, follows_redirects=True).open(
                "GET", self._url, headers=headers
            )
        except HttpFailure as error:
            raise self.broken(error) from None
        try:
            if answer.status == RANGE_NOT_SATISFIABLE and offset:
                file = None
            elif 200 <= answer.status < 300:
                file = HttpFile(answer, offset, self)
                if tag and file.offset and file.version.tag not in ("", tag):  # it ignored If-Range
                    file = None
            else:
                raise self._refused(answer)
        except BaseException:
            answer.close()
            raise
        if file is None:
            answer.close()
            return self.open(0, "", stall_s=stall_s)
        return file

    def broken(self, error: HttpFailure) -> TransferError:
        """Return the error for a failure of the connection."""
        if error.kind is FailureKind.ENCODED:
            return TransferError(
                f"{self._shown} sends the file {error.reason}-encoded although identity was asked for. Fetch "
                "it from another address, or by hand"
            )
        return TransferError(f"{self._shown}: {error.reason}", passing=error.kind is not FailureKind.REFUSED)

    def _refused(self, answer: HttpStream) -> TransferError:
        return TransferError(
            f"{self._shown} answers {answer.status} {responses.get(answer.status, '')}",
            passing=answer.status in PASSING,
            wait_s=retry_after_s(answer.headers),
        )


class HttpFile:
    """An answer that is being read."""

    def __init__(self, answer: HttpStream, offset: int, origin: HttpOrigin) -> None:
        self._answer, self._origin = answer, origin
        etag = answer.headers.get("ETag") or ""
        if etag.startswith("W/"):  # two different contents may share it
            etag = ""
        self.offset, size = _placed(answer, offset)
        self.version = Version(bytes=size, tag=etag or answer.headers.get("Last-Modified") or "")

    def read(self) -> bytes:
        """See `Stream`."""
        try:
            return self._answer.read(PIECE_BYTES)
        except HttpFailure as error:
            raise self._origin.broken(error) from None

    def close(self) -> None:
        """See `Stream`."""
        self._answer.close()

    def stop(self) -> None:
        """Nothing: each wait for the network ends after `stall_s`."""


def _placed(answer: HttpStream, offset: int) -> tuple[int, int | None]:
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
