"""Where caches are that are not on this machine: what a mirror asks of such a place, and their URLs.

`FolderRemote` is a folder on shared storage; `object_store.py` (extra `objects`) has S3, Google and Azure.
Each makes one attempt a call: `Retries` repeats what may pass, until a timeout.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from stoker.errors import ConfigError, FormatError, ReadOnlyError, StalledError, docs_url
from stoker.runtime.disk import READ_ONLY_ERRNOS, explain_disk_errors
from stoker.runtime.files import PendingFile, RegularFile, make_folder
from stoker.runtime.locks import lock_folder
from stoker.runtime.threads import FailedAttempt, Pool, RetryPolicy, is_exiting, retry
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.store.format import Buffer

# ----------------------------------------------------------------------------------------------------------
# What a mirror asks of the place that its caches are in, and the URLs of such places.


SCHEMES = ("s3", "gs", "az", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,3}|$)")
_MEANT = re.compile(rf"({'|'.join(SCHEMES)}):(/|$)|[A-Za-z][A-Za-z0-9+.-]*://")
"""Pattern of the beginning of a URL; one that went through a `Path` has one slash left."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_PART = re.compile(r"[\w.+=@ -]{1,255}")

Expected: TypeAlias = "str | Literal['anything'] | None"
"""What a put replaces: the version with this etag, nothing (None), or whatever is there."""


class TransientError(Exception):
    """One attempt failed in a way that may pass: a cut, a time-out, a busy server. Never leaves `Retries`."""


class ReplacedError(Exception):
    """An object is not the version that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """One object, by its name below the URL of its `Remote`."""

    name: str
    bytes: int
    etag: str
    """Changes when the content does; empty where the place has none."""


class Remote(Protocol):
    """A folder of objects. Methods make one attempt, and are safe to call from several threads.

    Raises:
        TransientError: Trying again may help.
        ReplacedError: The object is another version than asked for.
        FileNotFoundError: There is no such object.
        ReadOnlyError: It may not be written.
        ServiceError: The place refuses, and will refuse again; says what to do. `AccessError`: it is not
            there, or credentials are missing or wrong.
    """

    @property
    def url(self) -> str:
        """Its URL; holds no secrets."""
        ...

    def list(self, folder: str = "") -> tuple[list[str], list[RemoteObject]]:
        """Folders and objects right below `folder`, by name there; nothing where there is no such folder."""
        ...

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Hand bytes `begin:end` of an object to `sink`, piece by piece, in order.

        Raises:
            TransientError: It ended early; the pieces that came are right.
        """
        ...

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """Return all of a small object and its etag; None if that is `known`."""
        ...

    def head(self, name: str) -> RemoteObject:
        """Return size and etag of an object."""
        ...

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Put all of an object or nothing; return its etag."""
        ...

    def move(self, name: str, new: str) -> None:
        """Give an object another name."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object; no error if it is missing."""
        ...


def is_url(place: str | Path) -> bool:
    """Return True if a place is meant as a URL, also one that `parse_url` refuses, and not as a local path.

    >>> is_url("s3://bucket/caches"), is_url("http://host/caches"), is_url("data/latent_cache")
    (True, True, False)
    """
    return _MEANT.match(str(place)) is not None


def local_path(place: str | Path, what: str) -> Path:
    """Return a place that can only be a folder of this machine.

    Args:
        place: What was given.
        what: What it is for; begins the message.
    Raises:
        ConfigError: It is a URL.
    """
    if is_url(place):
        raise ConfigError(
            f"{what} is {masked(str(place))}, an address",
            hint="Expected a folder of this machine; only caches can be at a URL (stoker cache push)",
        )
    return Path(place)


def parse_url(place: str | Path) -> str:
    """Return the one way to write a URL: no slash at the end, no empty parts.

    >>> parse_url("s3://bucket/caches//burgers/")
    's3://bucket/caches/burgers'

    Raises:
        ConfigError: It is not a URL, or holds what goes in the environment; then it is not repeated.
    """
    text = str(place)
    found = _URL.match(text)
    if found is None or found[1].lower() not in SCHEMES:
        raise ConfigError(
            f"{masked(text)} is not an address of caches",
            hint="Expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or file:///FOLDER; "
            "a path on this machine has no ://",
        )
    scheme, rest = found[1].lower(), text[found.end() :]
    if "?" in rest or "#" in rest or (scheme != "file" and "@" in rest.partition("/")[0]):
        raise ConfigError(
            f"an address in {scheme}:// holds a user, a query or a fragment (not repeated here: it may be "
            "secret)",
            hint="Give the plain address; credentials come from the environment, see "
            f"{docs_url('how-to/objects')}",
        )
    parts = [part for part in rest.split("/") if part]
    if scheme == "file" and found[2] == "//":
        raise ConfigError(
            f"{masked(text)} names a host, not a path",
            hint=f"Expected three slashes, as file:///{'/'.join(parts)}",
        )
    if scheme != "file" and not parts:
        raise ConfigError(f"{masked(text)} names no bucket", hint=f"Expected {scheme}://BUCKET/FOLDER")
    if scheme != "file" and not _BUCKET.fullmatch(parts[0]):
        raise ConfigError(
            f"{masked(text)}: {parts[0]!r} is not the name of a bucket",
            hint="Expected three characters or more: letters, digits, '.', '_' and '-', the first a letter "
            "or a digit",
        )
    if any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
        raise ConfigError(
            f"{masked(text)} has a part with other characters than letters, digits and '_.+=@ -'",
            hint="Rename it",
        )
    return f"{scheme}://{'/' if scheme == 'file' else ''}{'/'.join(parts)}"


def masked(text: str) -> str:
    """Return a URL without what may be secret in it, for messages."""
    try:
        split = urlsplit(text)
    except ValueError:
        return "the address given"
    where = split.netloc.rpartition("@")[2]
    return f"{split.scheme}://{where}{split.path}" if split.scheme else text.partition("?")[0]


# ----------------------------------------------------------------------------------------------------------
# Repeat what may pass, with growing pauses, until a timeout.


T = TypeVar("T")
log = logging.getLogger("stoker")

TIMEOUT_S = 300.0
"""All attempts of one operation together."""
POLICY = RetryPolicy(first_s=0.1, longest_s=5.0, jitter=0.5)
SAY_AFTER = 4
"""Attempts in a row after which a warning says what does not work."""
SAY_AGAIN_S = 30.0
"""Seconds between two such warnings."""


@dataclass(slots=True)
class _Request:
    """One operation that has not ended yet."""

    what: str
    began: float
    """Monotonic time."""
    failure: FailedAttempt | None = None
    """The last one."""

    def __str__(self) -> str:
        if self.failure is None:
            return f"{self.what} has not been answered for {time.monotonic() - self.began:.1f} s"
        failed = self.failure
        return f"{self.what} failed {failed.attempts} times in {failed.spent_s:.1f} s: {failed.error}"


@dataclass(slots=True)
class Retries:
    """Counts attempts that had to be repeated, and knows those under way; one for each mirror."""

    count: int = 0
    _requests: list[_Request] = field(default_factory=list[_Request], repr=False)
    """Operations that have not ended yet, the oldest first."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def describe_slowest(self) -> str:
        """Say which operation under way failed most often, or has waited longest; empty without any."""
        with self._lock:
            slowest = max(
                self._requests, key=lambda one: one.failure.attempts if one.failure else 0, default=None
            )
        return "" if slowest is None else str(slowest)

    def run(self, operation: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
        """Return what `operation` returns in the end.

        Args:
            operation: One attempt; what it has achieved when it fails may stay.
            what: For messages, as `get s3://bucket/x`.
            timeout_s: Seconds from now after which no further attempt begins.
        Raises:
            StalledError: The timeout passed; names the last failure and the number of attempts. Or the
                process ends.
        """
        say_at, request = 0.0, _Request(what, time.monotonic())

        def note(failure: FailedAttempt) -> None:
            nonlocal say_at
            with self._lock:
                self.count += 1
                request.failure = failure
            if failure.attempts >= SAY_AFTER and failure.spent_s >= say_at:
                say_at = failure.spent_s + SAY_AGAIN_S
                left_s = timeout_s - failure.spent_s
                text = "%s failed %d times, tried again for at most %.0f s more: %s"
                log.warning(text, what, failure.attempts, left_s, failure.error)

        def give_up(failure: FailedAttempt) -> StalledError:
            if is_exiting():
                return StalledError(f"{what}: the process ends")
            return StalledError(
                f"{what} failed {failure.attempts} times in {failure.spent_s:.1f} s, {timeout_s:g} s are "
                f"allowed: {failure.error}",
                hint="See whether the store answers and the network holds, then run again: what arrived is "
                "kept",
            )

        with self._lock:
            self._requests.append(request)
        try:
            return retry(
                operation,
                TransientError,
                replace(POLICY, timeout_s=timeout_s),
                on_retry=note,
                give_up=give_up,
            )
        finally:
            with self._lock:
                self._requests = [one for one in self._requests if one is not request]
            request.failure = None  # its error keeps this frame: a circle


# ----------------------------------------------------------------------------------------------------------
# A folder on shared storage as the place that caches are in: `file:///mnt/share/caches`.


Tell: TypeAlias = Callable[[bytes], None]

PIECE_BYTES = MIB
ANSWER_S = 60.0
"""One call that the folder does not answer for so long failed, and is tried again."""
PUT_S = 300.0
"""The same while a file is written: making it durable takes its time."""
PIECES_AHEAD = 8
"""Pieces of a file that may be in memory before the caller has taken them."""
LOCK_WAIT_S = 60.0
"""How long a conditional put waits for another process that writes to the same folder."""
THREADS = 64
"""Calls at a time, those included that were given up and still hang."""
PASSING_ERRNOS = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN)
"""What a network file system says while its server is away."""


class FolderRemote:
    """Objects are files: written under a temporary name, durable, then renamed. See `Remote`.

    A thread makes every call to the system, and is left behind when the storage does not answer. A hard mount
    whose server is away blocks its callers forever.
    """

    def __init__(self, url: str) -> None:
        self._url, self._root = url, Path(url.removeprefix("file://"))
        self._pool = Pool(THREADS, "stoker-folder")

    @property
    def url(self) -> str:
        """Its URL."""
        return self._url

    def list(self, folder: str = "") -> tuple[list[str], list[RemoteObject]]:
        """Folders and regular files right below `folder`."""

        def work(tell: Tell) -> tuple[list[str], list[RemoteObject]]:
            folders: list[str] = []
            objects: list[RemoteObject] = []
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as found:
                for entry in found:
                    tell(b"")
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        objects.append(
                            RemoteObject(name=entry.name, bytes=status.st_size, etag=_etag(status))
                        )
            return sorted(folders), sorted(objects, key=lambda one: one.name)

        return self._answer(work)

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Read bytes of a file, as `Remote.read`."""

        def work(tell: Tell) -> None:
            with self._opened(name) as file:
                if etag and _etag(os.fstat(file.fileno())) != etag:
                    raise ReplacedError(name)
                for at in range(begin, end, PIECE_BYTES):
                    piece = os.pread(file.fileno(), min(PIECE_BYTES, end - at), at)
                    tell(piece)
                    if len(piece) < min(PIECE_BYTES, end - at):
                        raise TransientError(f"it ended at byte {at + len(piece)}, expected {end}")

        self._answer(work, sink)

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """Return all of a small file, as `Remote.get`."""

        def work(_: Tell) -> tuple[bytes, str] | None:
            with self._opened(name) as file:
                etag = _etag(os.fstat(file.fileno()))
                if known and etag == known:
                    return None
                data = bytearray(file.size)
                file.read_into(0, memoryview(data))
                return bytes(data), etag

        return self._answer(work)

    def head(self, name: str) -> RemoteObject:
        """Return size and etag of a file."""
        status = self._answer(lambda _: (self._root / name).lstat())
        return RemoteObject(name=name, bytes=status.st_size, etag=_etag(status))

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Write all of a file or nothing; with `expected`, under the lock of the folder."""
        path = self._root / name

        def work(tell: Tell) -> str:
            with explain_disk_errors(self._root):
                make_folder(path.parent, 0o700)
                if expected == "anything":
                    return self._write(path, data, tell)
                with lock_folder(path.parent, "put", timeout_s=LOCK_WAIT_S) as got:
                    if not got:
                        raise TransientError(
                            f"somebody has been writing to {path.parent} for {LOCK_WAIT_S:g} s"
                        )
                    now = _etag(path.lstat()) if path.exists() else None
                    if now != expected:
                        raise ReplacedError(name)
                    return self._write(path, data, tell)

        return self._answer(work, silence_s=PUT_S)

    def move(self, name: str, new: str) -> None:
        """Give a file another name."""

        def work(_: Tell) -> None:
            with explain_disk_errors(self._root):
                (self._root / name).replace(self._root / new)

        self._answer(work)

    def remove(self, name: str) -> None:
        """Remove a file."""

        def work(_: Tell) -> None:
            with explain_disk_errors(self._root):
                (self._root / name).unlink(missing_ok=True)

        self._answer(work)

    def _answer(
        self,
        work: Callable[[Tell], T],
        sink: Callable[[Buffer], None] | None = None,
        silence_s: float | None = None,
    ) -> T:
        """Return what `work` returns, done by a thread. It calls `tell` as it gets on, with bytes for `sink`.

        Raises:
            TransientError: It told nothing for `silence_s` seconds.
        """
        told: SimpleQueue[bytes | None] = SimpleQueue()
        given_up, room = threading.Event(), threading.Semaphore(PIECES_AHEAD)

        def tell(piece: bytes) -> None:
            # While the interpreter exits, this is the caller's own thread, which takes no pieces meanwhile.
            while piece and not is_exiting() and not room.acquire(timeout=0.25):
                if given_up.is_set():
                    break
            if given_up.is_set():
                raise _GivenUpError
            told.put(piece)

        def run() -> T:
            try:
                tell(b"")  # the caller may have given up while it waited in line
                with _passing():
                    return work(tell)
            finally:
                told.put(None)

        limit_s = ANSWER_S if silence_s is None else silence_s
        ticket = self._pool.submit(run)
        try:
            while (piece := told.get(timeout=limit_s)) is not None:
                if piece:
                    room.release()
                    if sink is not None:
                        sink(piece)
        except Empty:
            raise TransientError(f"the folder has not answered for {limit_s:g} s") from None
        finally:
            given_up.set()
        try:
            return ticket.result(limit_s, self._url)
        finally:
            del ticket  # an error keeps this frame, and the ticket keeps the error: a circle

    @staticmethod
    def _write(path: Path, data: bytes | Path, tell: Tell) -> str:
        pending = PendingFile(path.parent, path.name)
        try:
            if isinstance(data, bytes):
                pending.write_at(0, data)
            else:
                with data.open("rb") as file:
                    while piece := file.read(4 * MIB):
                        pending.write_at(file.tell() - len(piece), piece)
                        tell(b"")
            pending.commit()
        finally:
            pending.discard()
        return _etag(path.lstat())

    @contextmanager
    def _opened(self, name: str) -> Generator[RegularFile]:
        file = RegularFile(self._root / name)
        try:
            yield file
        finally:
            file.close()


class _GivenUpError(Exception):
    """The caller does not wait for this work any more."""


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


@contextmanager
def _passing() -> Generator[None]:
    try:
        yield
    except (FormatError, ReadOnlyError):
        raise
    except OSError as error:
        if error.errno in PASSING_ERRNOS:
            raise TransientError(f"{error.strerror} ({error.filename})") from error
        if error.errno in READ_ONLY_ERRNOS:
            raise ReadOnlyError(f"{error.filename} may not be used: {error.strerror}") from error
        raise
