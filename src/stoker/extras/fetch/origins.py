"""Files to fetch and the places to fetch them from.

Manifests name the files; they are read strictly, since others write them. A name says where below one folder
a file goes. It may not lead out of that folder, be hidden, or be the folder of another name. A place gives
the bytes of a file from an offset on, and says of which version they are.
"""

from __future__ import annotations

import json
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import responses
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Protocol, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker.config.models import Config
from stoker.errors import ConfigError, Problem, StalledError, StokerError, TransferError
from stoker.runtime.files import Algorithm
from stoker.runtime.http import FailureKind, HttpClient, HttpFailure, HttpStream, retry_after_s
from stoker.runtime.jsonio import parse_json
from stoker.runtime.processes.child import OutputStream, run_program
from stoker.runtime.threads import ItemClock, RetryPolicy, call_within, retry
from stoker.units import MIB

ALGORITHMS: Mapping[Algorithm, int] = {"sha256": 64, "sha1": 40, "md5": 32}
"""Digests that may be declared, the strongest first, and their hexadecimal digits."""
MANIFEST_BYTES = 64 * 1024 * 1024
NAME_BYTES, PART_BYTES = 1024, 200
"""A part of a name leaves room for the suffixes of partial files; file systems end at 255."""


class _Entry(BaseModel):
    """One file as a manifest describes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: Annotated[str, Field(alias="from", min_length=1, max_length=8192)]
    bytes: Annotated[int, Field(ge=0)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    sha1: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{40}$")] | None = None
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A file to fetch."""

    name: str
    """Its path below the folder."""
    source: str
    """Where it comes from: a URL, `remote:path`, or a path."""
    bytes: int | None = None
    """Its declared size, if any."""
    algorithm: Algorithm | None = None
    digest: str = ""
    """The declared digest of its content, lower case; empty: none is declared."""


class _FolderEntry(BaseModel):
    """One folder as a manifest describes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: Annotated[str, Field(alias="from", min_length=1, max_length=8192)]
    match: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    count: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFolder:
    """A folder of which all files are fetched."""

    name: str
    """Its path below the folder of all; ends in a slash."""
    source: str
    """Where it comes from: `remote:path`, or a path."""
    match: str | None = None
    """A pattern that the names of files end in, as `*_train_*.h5`; None: all."""
    count: int | None = None
    """The declared number of files, if any."""


def wanted_files(config: Config) -> tuple[WantedFile | WantedFolder, ...]:
    """Return all files and folders in `fetch.files`, then those of `fetch.manifest`.

    Raises:
        ConfigError: An entry is wrong, or both name the same file.
    """
    own = parse_wanted(config.fetch.files or {}, f"{config.where}: fetch.files")
    if config.fetch.manifest is None:
        return own
    more = read_manifest(Path(config.fetch.manifest))
    twice = {one.name for one in own} & {one.name for one in more}
    if twice:
        raise ConfigError(
            f"{config.where}: fetch.files and fetch.manifest both name {min(twice)!r}", hint="Name it once"
        )
    return (*own, *more)


def parse_wanted(files: Mapping[str, Mapping[str, Any]], where: str) -> tuple[WantedFile | WantedFolder, ...]:
    """Return the files of a mapping of names to `{from, bytes, sha256}`; a name that ends in / is a folder.

    Raises:
        ConfigError: Entries or names are wrong; lists all of them.
    """
    problems: list[Problem] = []
    found: list[WantedFile | WantedFolder] = []
    for name, entry in files.items():
        folder = name.endswith("/")
        if why := _wrong_name(name.removesuffix("/")) if name != "./" else None:
            problems.append(why.within(f"{where}: the name {name!r} "))
            continue
        try:
            kind = _FolderEntry if folder else _Entry
            found.append(_wanted(name, kind.model_validate(dict(entry))))
        except ValidationError as error:
            problems += [Problem(f"{where}: {name}: {_say(one, folder)}") for one in error.errors()]
    problems += [one.within(f"{where}: ") for one in _clashes(one.name.removesuffix("/") for one in found)]
    if problems:
        raise ConfigError.of_all(problems)
    return tuple(found)


def check_names(files: Iterable[WantedFile]) -> None:
    """Check the names of all files, including those that a folder listed.

    Raises:
        ConfigError: One leads out, comes twice, or is a file in one entry and a folder in another.
    """
    names = [one.name for one in files]
    problems = [why.within(f"the name {name!r} ") for name in names if (why := _wrong_name(name))]
    problems += [Problem(f"{name!r} is wanted twice") for name, count in Counter(names).items() if count > 1]
    problems += _clashes(names)
    if problems:
        raise ConfigError.of_all(problems)


def read_manifest(path: Path) -> tuple[WantedFile | WantedFolder, ...]:
    """Return the files of a JSON manifest, `{"files": {name: {"from": ..., "bytes": ..., "sha256": ...}}}`.

    Raises:
        ConfigError: It cannot be read, is not JSON, names a file twice, or an entry is wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES + 1)
        if len(data) > MANIFEST_BYTES:
            raise ConfigError(f"{path} is larger than {MANIFEST_BYTES:,} bytes, too large for a manifest")
        content = parse_json(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Expected a manifest") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not a manifest: {error}") from error
    files = cast("dict[str, Any]", content).get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or set(cast("dict[str, Any]", content)) != {"files"}:
        raise ConfigError(f'{path} is not a manifest: expected {{"files": {{name: {{"from": ...}}}}}}')
    entries = cast("dict[str, Any]", files)
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {name!r} is not a mapping", hint="Expected {from, bytes, sha256}")
    return parse_wanted(entries, str(path))


def _wanted(name: str, entry: _Entry | _FolderEntry) -> WantedFile | WantedFolder:
    if isinstance(entry, _FolderEntry):
        return WantedFolder(name=name, source=entry.source, match=entry.match, count=entry.count)
    for algorithm in ALGORITHMS:
        digest = getattr(entry, algorithm)
        if digest is not None:
            return WantedFile(
                name=name,
                source=entry.source,
                bytes=entry.bytes,
                algorithm=algorithm,
                digest=digest.lower(),
            )
    return WantedFile(name=name, source=entry.source, bytes=entry.bytes)


def _say(problem: Any, folder: bool) -> str:
    place = ".".join(map(str, problem["loc"]))
    known = "from, match, count" if folder else "from, bytes, sha256, sha1, md5"
    said = f"is not known (there are: {known})" if problem["type"] == "extra_forbidden" else problem["msg"]
    return f"{place}: {said}"


def _wrong_name(name: str) -> Problem | None:
    """Return why a name is refused; None: it is accepted.

    >>> _wrong_name("burgers/train_000.h5"), str(_wrong_name("../x"))
    (None, "has a part '..', which may not begin with a dot")
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return Problem("is not valid text")
    if not 0 < size <= NAME_BYTES:
        return Problem(f"has {size} bytes, expected 1 to {NAME_BYTES}")
    if any(unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp"} for letter in name) or "\\" in name:
        return Problem("has a character that a file name should not have")
    for part in name.split("/"):
        if not part:
            return Problem("is absolute, or has an empty part", "Expected a path below the folder")
        if part.startswith((".", "~", "-")):
            sign = {".": "a dot", "~": "a tilde", "-": "a dash"}[part[0]]
            return Problem(f"has a part {part!r}, which may not begin with {sign}")
        if len(part.encode()) > PART_BYTES:
            return Problem(f"has a part of {len(part.encode())} bytes, expected at most {PART_BYTES}")
    return None


def _clashes(names: Iterable[str]) -> list[Problem]:
    """Return a line for each name that is a file in one entry and a folder in another."""
    files = set(names)
    above = {name.rsplit("/", count)[0]: name for name in files for count in range(1, name.count("/") + 1)}
    both = sorted(files & above.keys())
    return [Problem(f"{name!r} is a file, and the folder of {above[name]!r}") for name in both]


# ----------------------------------------------------------------------------------------------------------
# Places to fetch from.


PIECE_BYTES = MIB
_REMOTE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_ +@.-]*:(?!//)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentVersion:
    """The content that a place has now."""

    bytes: int | None
    """Its size; None: unknown."""
    tag: str
    """Changes with the content; empty: the place gives nothing of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A file as a place lists it."""

    name: str
    """Its path below the folder that was listed."""
    bytes: int | None = None
    algorithm: Algorithm | None = None
    digest: str = ""


class Stream(Protocol):
    """The bytes of one file. `read` is called in one thread; `stop` may be called in another."""

    offset: int
    """Where it begins: at the requested offset, or at 0 where the content has changed."""
    version: ContentVersion

    def read(self) -> bytes:
        """Return the next piece, as soon as there is one; empty at the end.

        Raises:
            TransferError: The transfer broke off.
        """
        ...

    def close(self) -> None:
        """Close it; called once, in the thread that reads."""
        ...

    def stop(self) -> None:
        """End it early, where that is possible, so that a `read` that waits returns; harmless afterwards."""
        ...


class Origin(Protocol):
    """A file at the place where it comes from."""

    def open(self, offset: int, tag: str, *, stall_s: float) -> Stream:
        """Open the file at `offset`, if its content is still that of `tag`; else at its begin.

        Args:
            tag: Empty: any content, since a digest decides in the end.
            stall_s: Seconds without an answer after which it gives up, as far as it can.

        Raises:
            TransferError: The file does not exist, is refused, or the place does not answer.
        """
        ...


def is_remote(source: str) -> bool:
    """Return True if a source is one of rclone: `remote:path`."""
    return _REMOTE.match(source) is not None


def origin_of(source: str, base: Path) -> Origin:
    """Return the place that a source names.

    Args:
        base: Folder that paths are relative to.

    Raises:
        ConfigError: Its kind is unknown, or it carries a secret.
    """
    scheme = source.partition("://")[0].lower() if "://" in source else ""
    if scheme in ("http", "https"):
        parts = urlsplit(source)
        if not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                f"{shown_source(source)} names no host, or carries a user name",
                hint="Put secrets into an rclone remote, or into the query of a URL that expires soon",
            )
        return HttpOrigin(source)
    if scheme == "file":
        return FolderOrigin(Path(urlsplit(source).path))
    if scheme:
        raise ConfigError(
            f"{shown_source(source)} is of a kind that cannot be fetched",
            hint="Expected http://, https://, remote:path (rclone) or a path",
        )
    if source.startswith(":"):
        raise ConfigError(
            "an rclone remote written out in full (:s3,...:) would show its settings to everyone",
            hint="Give it a name: `rclone config`, or RCLONE_CONFIG_<NAME>_TYPE and so on in the environment",
        )
    if is_remote(source):
        return RcloneOrigin(source)
    return FolderOrigin(base / Path(source).expanduser())


def shown_source(source: str) -> str:
    """Return a source as messages may show it: without user name, password and query.

    >>> shown_source("https://me:secret@host/a.h5?token=1"), shown_source("b2:bucket/a.h5")
    ('https://host/a.h5?...', 'b2:bucket/a.h5')
    """
    if "://" not in source:
        return source if not source.startswith(":") else source.partition(",")[0] + ",...:"
    scheme, _, rest = source.partition("://")
    host, slash, path = rest.partition("/")
    path, query, _ = path.partition("?")
    return f"{scheme}://{host.rpartition('@')[2].partition('?')[0]}{slash}{path}{'?...' if query else ''}"


# ----------------------------------------------------------------------------------------------------------
# Files in folders of this machine, or of what is mounted.


class FolderOrigin:
    """A path. Opening it never waits for a writer: pipes and devices are refused."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, offset: int, tag: str, *, stall_s: float) -> FileStream:
        """See `Origin`."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"{self._path}: {error.strerror}") from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise TransferError(f"{self._path} is not a regular file")
        version = ContentVersion(
            bytes=found.st_size, tag=f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        )
        return FileStream(fd, offset if tag in ("", version.tag) else 0, version, self._path)


class FileStream:
    """An open file."""

    def __init__(self, fd: int, offset: int, version: ContentVersion, path: Path) -> None:
        self._fd, self._at, self._path = fd, offset, path
        self.offset, self.version = offset, version

    def read(self) -> bytes:
        """See `Stream`."""
        try:
            piece = os.pread(self._fd, PIECE_BYTES, self._at)
        except OSError as error:
            raise TransferError(f"{self._path}: {error.strerror}", transient=True) from error
        self._at += len(piece)
        return piece

    def stop(self) -> None:
        """Do nothing: a read of a file cannot be ended; its thread is left behind."""

    def close(self) -> None:
        """See `Stream`."""
        os.close(self._fd)


# ----------------------------------------------------------------------------------------------------------
# Files of web servers: a range is used only where the server promises the same content, and sends it.


TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may pass: another try may succeed."""
RANGE_NOT_SATISFIABLE = 416
_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+|\*)$")


class HttpOrigin:
    """A URL. Proxies are those of the system; redirects are followed to http and https only."""

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
        """Return the error for a rclone_error of the connection."""
        if error.kind is FailureKind.ENCODED:
            return TransferError(
                f"{self._shown} sends the file {error.reason}-encoded although identity was asked for",
                hint="Fetch it from another URL, or by hand",
            )
        return TransferError(
            f"{self._shown}: {error.reason}", transient=error.kind is not FailureKind.REFUSED
        )

    def _refused(self, answer: HttpStream) -> TransferError:
        return TransferError(
            f"{self._shown} answers {answer.status} {responses.get(answer.status, '')}",
            transient=answer.status in TRANSIENT_STATUSES,
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
        self.version = ContentVersion(bytes=size, tag=etag or answer.headers.get("Last-Modified") or "")

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
        """Do nothing: each wait for the network ends after `stall_s`."""


def _placed(answer: HttpStream, offset: int) -> tuple[int, int | None]:
    """Return where an answer begins, and the size of the complete file."""
    if answer.status == 206:
        found = _RANGE.match(answer.headers.get("Content-Range") or "")
        if found is None or int(found[1]) != offset:
            raise TransferError(
                f"the server answered another range than the one from {offset:,} on", transient=True
            )
        return offset, None if found[3] == "*" else int(found[3])
    if answer.status != 200:
        raise TransferError(f"the server answers {answer.status}, expected 200")
    length = answer.headers.get("Content-Length")
    return 0, int(length) if length is not None and length.isdigit() else None


# ----------------------------------------------------------------------------------------------------------
# Remotes of the rclone program. Its settings are in its own configuration or environment, not here.


MISSING = (3, 4)
"""Exit codes of rclone: a folder or a file does not exist."""
FATAL = 7
UNKNOWN_REMOTE = "didn't find section"
_TIME = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ")


class RcloneOrigin:
    """`remote:path`; a process writes the file to us, and is killed where it stalls."""

    def __init__(self, source: str) -> None:
        self._source = source

    def open(self, offset: int, tag: str, *, stall_s: float) -> RcloneStream:
        """See `Origin`."""
        found = self._look(stall_s)
        if found.get("IsDir"):
            raise TransferError(f"{self._source} is a folder, or does not exist", hint="Name a file")
        size = int(found["Size"])
        version = ContentVersion(bytes=None if size < 0 else size, tag=f"{size} {found.get('ModTime', '')}")
        offset = offset if tag in ("", version.tag) else 0
        words = [*_base(stall_s), "cat", "--offset", str(offset), "--", self._source]
        return RcloneStream(words, offset, version, self._source, stall_s)

    def _look(self, stall_s: float) -> dict[str, Any]:
        words = [*_base(stall_s), "lsjson", "--stat", "--", self._source]
        output = _run_rclone(words, self._source, stall_s)
        try:
            found = json.loads(output)
            return found if isinstance(found, dict) and isinstance(found.get("Size"), int) else {}["Size"]
        except (ValueError, KeyError):
            raise TransferError(f"{self._source}: rclone's answer cannot be read", transient=True) from None


def list_remote(source: str, timeout_s: float) -> list[ListedFile]:
    """Return all files below a folder of a remote, with the digests that it keeps."""
    kinds = [word for algorithm in ALGORITHMS for word in ("--hash-type", algorithm)]
    words = [*_base(min(60.0, timeout_s)), "lsjson", "-R", "--files-only", "--hash", *kinds, "--", source]
    output = _run_rclone(words, source, timeout_s)
    try:
        return [_listed(one) for one in json.loads(output)]
    except (ValueError, KeyError, TypeError):
        raise TransferError(f"{source}: rclone's list cannot be read", transient=True) from None


def _listed(entry: dict[str, Any]) -> ListedFile:
    size, digests = int(entry["Size"]), entry.get("Hashes") or {}
    for algorithm, digits in ALGORITHMS.items():
        digest = digests.get(algorithm)
        if isinstance(digest, str) and len(digest) == digits:
            return ListedFile(name=str(entry["Path"]), bytes=size, algorithm=algorithm, digest=digest.lower())
    return ListedFile(name=str(entry["Path"]), bytes=None if size < 0 else size)


def _run_rclone(words: list[str], source: str, timeout_s: float) -> bytes:
    """Return what a call of rclone prints.

    Raises:
        TransferError: It failed, or did not end in time.
    """
    with _rclone_errors(source):
        result = run_program(words, timeout_s=timeout_s)
    if result.code:
        raise rclone_error(source, result.code, result.errors)
    return result.output


class RcloneStream:
    """The output of a running `rclone cat`."""

    def __init__(
        self, words: list[str], offset: int, version: ContentVersion, source: str, stall_s: float
    ) -> None:
        self._source = source
        self.offset, self.version = offset, version
        with _rclone_errors(source):
            self._output = OutputStream(words, stall_s)

    def read(self) -> bytes:
        """See `Stream`."""
        with _rclone_errors(self._source):
            if piece := self._output.read():
                return piece
            code = self._output.finish()
        if code:
            raise rclone_error(self._source, code, self._output.errors)
        return b""

    def close(self) -> None:
        """See `Stream`."""
        self._output.close()

    def stop(self) -> None:
        """See `Stream`."""
        self._output.kill()


def rclone_error(source: str, code: int, said: bytes) -> TransferError:
    """Return the error for rclone's exit code and its last line."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = _TIME.sub("", lines[-1].strip()) if lines else "it said nothing"
    transient = code not in (*MISSING, FATAL) and UNKNOWN_REMOTE not in last
    return TransferError(f"{source}: rclone ended with exit code {code}: {last}", transient=transient)


def _base(stall_s: float) -> list[str]:
    """Return the command's first words: without its own retries, since they are decided here."""
    limit = f"{max(1, round(stall_s))}s"
    once = ["--retries", "1", "--low-level-retries", "1"]
    return ["rclone", *once, "--contimeout", limit, "--timeout", limit, "--log-level", "ERROR"]


@contextmanager
def _rclone_errors(source: str) -> Generator[None]:
    """Turn failures of the program itself into a `TransferError`."""
    try:
        yield
    except FileNotFoundError:
        raise TransferError(
            "rclone is not installed, which remotes need",
            hint="Install it: apt-get install rclone, or rclone.org",
        ) from None
    except OSError as error:
        raise TransferError(f"rclone cannot be started: {error.strerror}", transient=True) from error
    except StalledError as error:
        fact, hint = error.problem.within(f"{source}: ")
        raise TransferError(fact, hint=hint, transient=True) from None


# ----------------------------------------------------------------------------------------------------------
# The files of a wanted folder, as the place lists them: each with its size and, where known, digest.
#
# Names of a listing are trusted no more than those of a manifest. Hidden files are left out.


LIST_S = 600.0
"""Timeout of one listing; that of a remote may ask for each file."""


def list_folders(
    wanted: Sequence[WantedFile | WantedFolder],
    base: Path,
    policy: RetryPolicy,
    tell: Callable[[str], None],
) -> tuple[list[WantedFile], dict[WantedFolder, StokerError]]:
    """Return all wanted files, with those of folders; and the errors of folders that could not be listed.

    Args:
        base: Folder that paths are relative to.
        policy: How listing is retried.
        tell: Gets a line for each try that failed.
    """
    files: list[WantedFile] = []
    failed: dict[WantedFolder, StokerError] = {}
    for one in wanted:
        if isinstance(one, WantedFile):
            files.append(one)
            continue
        try:
            files += retry(
                partial(_files_of, one, base),
                is_transient,
                policy,
                on_retry=lambda failure, one=one: tell(f"{one.name}: {failure.error}; trying again"),
            )
        except StokerError as error:
            failed[one] = error
    check_names(files)
    return files, failed


def is_transient(error: Exception) -> bool:
    """Return True if another try may help after an error."""
    return isinstance(error, StalledError) or (isinstance(error, TransferError) and error.transient)


def _files_of(one: WantedFolder, base: Path) -> list[WantedFile]:
    """Return the files of a folder that match, by name.

    Raises:
        TransferError: No file matches, or another number than was declared; or listing failed.
    """
    found = _list(one.source, base)
    meant = [
        file
        for file in found
        if not any(part.startswith(".") for part in file.name.split("/"))
        and (one.match is None or PurePosixPath(file.name).match(one.match))
    ]
    which = "" if one.match is None else f" that match {one.match}"
    if not meant or one.count not in (None, len(meant)):
        expected = "at least one" if one.count is None else f"{one.count:,}"
        raise TransferError(
            f"{shown_source(one.source)} has {len(meant):,} files{which}, expected {expected} "
            f"({len(found):,} files in all)"
        )
    prefix = one.name.removeprefix("./")
    return [
        WantedFile(
            name=prefix + file.name,
            source=one.source + ("" if one.source.endswith(("/", ":")) else "/") + file.name,
            bytes=file.bytes,
            algorithm=file.algorithm,
            digest=file.digest,
        )
        for file in sorted(meant, key=lambda file: file.name)
    ]


def _list(source: str, base: Path) -> list[ListedFile]:
    origin_of(source, base)  # refuses what carries a secret
    if is_remote(source):
        return list_remote(source, LIST_S)
    if "://" in source and not source.startswith("file://"):
        raise TransferError(
            f"{shown_source(source)}: web servers list no folders",
            hint='Name the files, in a manifest: {"files": {name: {"from": "https://...", "sha256": "..."}}}',
        )
    top = Path(urlsplit(source).path) if "://" in source else base / Path(source).expanduser()
    clock = ItemClock()
    return call_within(
        LIST_S,
        lambda: list(_walk(top, clock.begin)),
        f"listing {top}",
        hint="Is the mount reachable?",
        clock=clock,
    )


def _walk(top: Path, begin: Callable[[int], None]) -> Iterator[ListedFile]:
    """Yield the regular files below a folder; links to files count, links to folders are not followed."""
    if not top.is_dir():
        raise TransferError(f"{top} is not a folder")

    def fail(error: OSError) -> None:
        raise TransferError(f"{error.filename}: {error.strerror}", transient=True) from error

    for number, (folder, _, names) in enumerate(os.walk(top, onerror=fail)):
        begin(number)
        for name in names:
            path = Path(folder, name)
            try:
                found = path.stat()
            except OSError as error:
                raise TransferError(f"{path}: {error.strerror}", hint="Remove it, or fix it") from error
            if stat.S_ISREG(found.st_mode):
                yield ListedFile(name=path.relative_to(top).as_posix(), bytes=found.st_size)
