"""Caches on object stores: S3 and compatible ones, Google, Azure.

The client takes credentials, region and endpoint from the environment, by the names that each provider uses.
They are in no setting, file, log or message of ours: of what a server answers only its code is repeated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from stoker.errors import AccessError, ConfigError, Problem, ReadOnlyError, ServiceError, docs_url
from stoker.store.remote import Expected, RemoteObject, ReplacedError, TransientError
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.store.format import Buffer

REQUEST_S = 30.0
"""One request, its answer included. What came of it before is kept, so a slow server needs no more."""
CONNECT_S = 10.0
SILENCE_S = 15.0
"""No byte of an answer for so long: the request hangs. A reader waits a minute by default, and must
outlast a few such in a row.
"""
PUT_S = 120.0
"""One put, or one part of a large one."""
PART_BYTES = 16 * MIB
PIECE_BYTES = MIB
_MACHINE_ASKED = re.compile(
    r"/latest/(api/token|meta-data)|computeMetadata|169\.254\.169\.254|/metadata/identity"
)
"""Where a client asks a rented machine for credentials, having found none; shows in what it says."""
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Z][A-Za-z ]{1,40}))?")
_REASONS = (
    ("timed out", "it timed out"),
    ("connection refused", "the connection was refused"),
    ("dns error", "its name is unknown"),
    ("certificate", "its certificate is not trusted"),
    ("connection closed", "the connection was cut"),
    ("connection reset", "the connection was cut"),
    ("end of file", "the answer was cut"),
    ("error decoding response body", "the answer was cut"),
    ("error sending request", "it could not be reached"),
)
_SET_VARIABLES = f"Set the provider's variables ({docs_url('how-to/objects')})"
_KNOWN = {
    "NoSuchBucket": Problem("there is no such bucket", "Create it, or fix the address"),
    "RequestTimeTooSkewed": Problem(
        "this machine's clock differs too much from the store's", "Set it, then run again"
    ),
    "InvalidAccessKeyId": Problem("the store does not know the key", _SET_VARIABLES),
    "SignatureDoesNotMatch": Problem("the key's secret is wrong", _SET_VARIABLES),
    "ExpiredToken": Problem("the session token has expired", "Get a new one"),
    "PermanentRedirect": Problem("the bucket is in another region", "Set AWS_REGION"),
    "AuthorizationHeaderMalformed": Problem("the bucket is in another region", "Set AWS_REGION"),
}
_LACKING = Problem(
    "no credentials were found",
    "Set the provider's variables, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    f"({docs_url('how-to/objects')})",
)


def _known(problem: Problem, where: str, *, status: int = 0) -> AccessError:
    return AccessError(f"{where}: {problem.fact}", hint=problem.hint, status=status)


class _Begun:
    """In which process the client's threads run: a fork has none, and would wait for them for ever."""

    pid = 0


def _client(url: str, options: Any, retries: Any) -> Any:
    try:
        return from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be used with the environment as it is ({_plain(error)})",
            hint=f"See {docs_url('how-to/objects')}",
        ) from None


class ObjectRemote:
    """Objects below a URL in a bucket. See `Remote`."""

    def __init__(self, url: str) -> None:
        self._url = url
        # Plain HTTP only where an endpoint says so; those of the providers do not.
        options: Any = {
            "timeout": f"{REQUEST_S:g}s",
            "connect_timeout": f"{CONNECT_S:g}s",
            "read_timeout": f"{SILENCE_S:g}s",
            "allow_http": True,
        }
        never: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_S)}
        self._store = _client(url, options, never)
        self._options = options
        self._conditional = True

    @cached_property
    def _writing(self) -> Any:
        """The client for what is written; it takes some 20 ms to make, and most only read."""
        # Of an upload in parts the client itself repeats the part that failed.
        parts: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=PUT_S)}
        slower: Any = {**self._options, "timeout": f"{PUT_S:g}s", "read_timeout": f"{PUT_S:g}s"}
        return _client(self._url, slower, parts)

    @property
    def url(self) -> str:
        """Its URL."""
        return self._url

    def list(self, folder: str = "") -> tuple[list[str], list[RemoteObject]]:
        """Folders and objects right below `folder`."""
        with self._asking("list", folder):
            found = obstore.list_with_delimiter(self._store, folder or None)
        cut = len(folder) + 1 if folder else 0
        objects = [
            RemoteObject(name=one["path"][cut:], bytes=one["size"], etag=one["e_tag"] or "")
            for one in found["objects"]
        ]
        folders = [str(prefix).rstrip("/")[cut:] for prefix in found["common_prefixes"]]
        return sorted(folders), sorted(objects, key=lambda one: one.name)

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Read bytes of an object, as `Remote.read`."""
        options: Any = {"range": (begin, end)}
        if etag:
            options["if_match"] = etag
        with self._asking("get", name):
            answer = obstore.get(self._store, name, options=options)
            if tuple(answer.range) != (begin, end):
                raise TransientError(f"bytes {answer.range} were sent, {begin}:{end} asked for")
            pieces = iter(answer.stream(min_chunk_size=PIECE_BYTES))
        at = begin
        while True:
            with self._asking("get", name):
                piece = next(pieces, None)
            if piece is None:
                break
            data = memoryview(piece)[: end - at]
            at += len(data)
            sink(data)  # what goes wrong there is not the store's
        if at < end:
            raise TransientError(f"the answer ended at byte {at}, expected {end}")

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """Return all of a small object, as `Remote.get`."""
        options: Any = {"if_none_match": known} if known else None
        with self._asking("get", name):
            try:
                answer = obstore.get(self._store, name, options=options)
            except NotModifiedError:
                return None
            data, meta = bytes(answer.bytes()), answer.meta
        if len(data) != meta["size"]:
            raise TransientError(f"the answer has {len(data)} bytes, expected {meta['size']}")
        return data, meta["e_tag"] or ""

    def head(self, name: str) -> RemoteObject:
        """Return size and etag of an object."""
        with self._asking("head", name):
            meta = obstore.head(self._store, name)
        return RemoteObject(name=name, bytes=meta["size"], etag=meta["e_tag"] or "")

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Put an object; large ones in parts, which become one object at the end."""
        with self._asking("put", name):
            mode = self._mode(name, expected)
            try:
                # An update of one version exists for puts in one part only, and what is updated is small.
                result = obstore.put(
                    self._writing,
                    name,
                    data,
                    mode=mode,
                    use_multipart=False if isinstance(mode, dict) else None,
                    chunk_size=PART_BYTES,
                    max_concurrency=4,
                )
            except BaseError as error:
                unknown = isinstance(error, NotSupportedError) or "status code: 501" in str(error)
                if mode == "overwrite" or not unknown:
                    raise
                self._conditional = False
                raise TransientError("the store has no conditional put; going on without") from None
        return result["e_tag"] or ""

    def _mode(self, name: str, expected: Expected) -> Any:
        """Return what the client takes for what a put replaces."""
        if not self._conditional or expected in ("anything", ""):
            return "overwrite"
        if expected is None:
            return "create"
        if not self._url.startswith("gs://"):
            return {"e_tag": expected}
        # Google counts versions, and only those can be expected.
        meta = obstore.head(self._store, name)
        if meta["e_tag"] != expected or meta["version"] is None:
            raise ReplacedError(name)
        return {"e_tag": expected, "version": meta["version"]}

    def move(self, name: str, new: str) -> None:
        """Give an object another name: a copy at the store, then the removal of the first."""
        with self._asking("put", new):
            obstore.rename(self._writing, name, new)

    def remove(self, name: str) -> None:
        """Remove an object."""
        with self._asking("delete", name):
            try:
                obstore.delete(self._writing, name)
            except FileNotFoundError:
                return

    @contextmanager
    def _asking(self, operation: str, name: str) -> Generator[None]:
        """Turn what the client raises into what `Remote` promises."""
        where = f"{operation} {self._url}/{name}" if name else f"{operation} {self._url}"
        if _Begun.pid and _Begun.pid != os.getpid():
            raise ConfigError(
                f"{where}: this process was forked from one that already talks to the store, which cannot "
                "go well",
                hint="Start workers with the method spawn (multiprocessing_context='spawn')",
            )
        _Begun.pid = os.getpid()
        try:
            yield
        except (PreconditionError, AlreadyExistsError) as error:
            raise ReplacedError(name) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._refused(where, operation, str(error)) from None
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _known(_KNOWN["NoSuchBucket"], where, status=404) from None
            raise FileNotFoundError(2, "no such object", f"{self._url}/{name}") from None
        except (BaseError, OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ServiceError | ConfigError | ReadOnlyError):
                raise
            raise self._failed(where, str(error)) from None

    @staticmethod
    def _refused(where: str, operation: str, text: str) -> ServiceError | ReadOnlyError:
        if _MACHINE_ASKED.search(text):
            return _known(_LACKING, where, status=403)
        code = match[1] if (match := _CODE.search(text)) else "AccessDenied"
        if known := _KNOWN.get(code):
            return _known(known, where, status=403)
        if operation in ("put", "delete"):
            return ReadOnlyError(
                f"{where}: the store allows no writing ({code})",
                hint="Use credentials that may write; what is there can be read and served all the same",
            )
        return AccessError(
            f"{where}: the store allows no reading ({code})",
            hint="Use credentials that may list and read",
            status=403,
        )

    @staticmethod
    def _failed(where: str, text: str) -> Exception:
        if _MACHINE_ASKED.search(text):
            return _known(_LACKING, where)
        code = match[1] if (match := _CODE.search(text)) else ""
        if code in _KNOWN:
            return _known(_KNOWN[code], where)
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        if 400 <= status < 500 and status not in (408, 425, 429):
            return ServiceError(f"{where}: the store answers {status} {code}", status=status)
        return TransientError(f"the store answers {status} {code}".rstrip() if status else _plain(text))


def _plain(error: object) -> str:
    """Return what went wrong on the way, without URLs and what a server wrote."""
    text = str(error).lower()
    return next((said for sign, said in _REASONS if sign in text), "it could not be reached")
