"""Fetch all files of a list: several at once, each with its timeouts, tried again where that may help.

The thread that calls `fetch_files` only watches. A try that makes no progress is left behind, and
another is started. So nothing below it (a name server, a mount, a program) can block the others, or the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, TypeAlias

from stoker.config import load_config
from stoker.config.sections import FetchConfig
from stoker.errors import (
    ConfigError,
    DigestError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
    TransferError,
    docs_url,
)
from stoker.extras.fetch.origins import (
    Origin,
    Stream,
    WantedFile,
    WantedFolder,
    is_transient,
    list_folders,
    origin_of,
    shown_source,
    wanted_files,
)
from stoker.runtime.disk import explain_disk_errors, free_space
from stoker.runtime.files import PartialFile, make_folder, new_digest, replace_atomically
from stoker.runtime.jsonio import as_object, read_object
from stoker.runtime.locks import FileLock
from stoker.runtime.threads import RetryPolicy, launch_thread
from stoker.schema import Json
from stoker.units import MIB, format_seconds

# ----------------------------------------------------------------------------------------------------------
# The record of what was fetched into a folder before, so that an existing file need not be read again.
#
# `.stoker-fetch.json` has size, time and digest of each file as it was when it got its name. A file that was
# changed since then is compared in full.


RECORD = ".stoker-fetch.json"
LOCK = ".stoker-fetch.lock"
PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """A file as it was when it was fetched, or compared."""

    bytes: int
    mtime_ns: int
    algorithm: str | None
    digest: str
    source: str
    tag: str


class FetchRecord:
    """The record of one folder; only the thread that made it may write."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self._files: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._files = as_object(read_object(self._path).get("files")) or {}

    def of(self, name: str) -> KnownFile | None:
        """Return the record of a file, if there is one."""
        try:
            return KnownFile(**self._files[name])
        except (KeyError, TypeError):
            return None

    def put(self, name: str, known: KnownFile) -> None:
        """Record a file."""
        self._files[name] = asdict(known)
        with replace_atomically(self._path) as temporary:
            temporary.write_text(json.dumps({"files": self._files}, indent=1, sort_keys=True))


def stat_regular(target: Path) -> os.stat_result | None:
    """Return the status of a regular file; None for links and everything else."""
    with suppress(OSError):
        found = target.lstat()
        if stat.S_ISREG(found.st_mode):
            return found
    return None


def is_known(wanted: WantedFile, found: os.stat_result, known: KnownFile | None) -> bool:
    """Return True if the file is the wanted one by the record, without reading it."""
    if known is None or (found.st_size, found.st_mtime_ns) != (known.bytes, known.mtime_ns):
        return False
    if wanted.bytes is not None and wanted.bytes != known.bytes:
        return False
    if wanted.algorithm is not None:
        return (wanted.algorithm, wanted.digest) == (known.algorithm, known.digest)
    return wanted.source == known.source


def is_same(wanted: WantedFile, target: Path, found: os.stat_result, on_read: Callable[[int], None]) -> bool:
    """Return True if the file at a path has the declared digest; reads it."""
    if wanted.algorithm is None or wanted.bytes not in (None, found.st_size):
        return False
    digest, at = new_digest(wanted.algorithm), 0
    with target.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            at += len(piece)
            on_read(at)
    return digest.hexdigest() == wanted.digest


# ----------------------------------------------------------------------------------------------------------
# One try at one file, in a thread of its own, which may be left behind.


RESERVE_BYTES = 64 * MIB
"""Space that stays free on the disk."""
Stage: TypeAlias = Literal["checking", "asking", "receiving", "naming", "done"]
LOCAL_STAGES = ("checking", "naming")
"""Stages that wait for our own disk alone: trying again would wait for it once more."""


class FetchAttempt:
    """A thread and its result. The thread writes the public fields, `_FetchLoop` reads them."""

    def __init__(
        self, wanted: WantedFile, target: Path, origin: Origin, known: KnownFile | None, *, stall_s: float
    ) -> None:
        self.wanted, self.target = wanted, target
        self._origin, self._known, self._stall_s = origin, known, stall_s
        self._partial: PartialFile | None = None
        self._stream: Stream | None = None
        self._given_up = False
        self.stage: Stage = "checking"
        self.since = time.monotonic()
        """When a byte last came, or the stage changed."""
        self.at = 0
        """Bytes that are on disk."""
        self.total = wanted.bytes
        self.received = 0
        """Bytes that came in this try."""
        self.is_present = False
        """The file existed already."""
        self.result: KnownFile | None = None
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"stoker-fetch {wanted.name}", daemon=True)

    def start(self, woken: Callable[[], None]) -> None:
        """Start; `woken` is called in the thread at its end."""
        self._woken = woken
        self.since = time.monotonic()
        launch_thread(self._thread, f"fetching {self.wanted.name}")

    def give_up(self) -> bool:
        """Let it write nothing more, even if its thread never ends; False: it hangs while writing."""
        self._given_up = True
        partial, stream = self._partial, self._stream
        if stream is not None:
            stream.stop()
        return partial is None or partial.abandon()

    def _moved(self, at: int) -> None:
        self.at, self.since = at, time.monotonic()

    def _enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()
        if self._given_up:
            raise TransferError("given up")

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the loop that watches handles it
            self.error = error
        self.stage = "done"
        self._woken()

    def _do(self) -> None:
        found = stat_regular(self.target)
        if found is not None and (
            is_known(self.wanted, found, self._known) or is_same(self.wanted, self.target, found, self._moved)
        ):
            self.is_present, self.at, self.total = True, found.st_size, found.st_size
            tag = self._known.tag if self._known is not None else ""
            self.result = self._as_known(tag)
            return
        own = self.wanted
        partial = self._partial = PartialFile(
            self.target, self._moved, bytes=own.bytes, algorithm=own.algorithm, digest=own.digest
        )
        try:
            self._moved(partial.at)
            self._receive(partial)
            self._enter("naming")
            partial.finish()
        finally:
            partial.keep()
        self.result = self._as_known(partial.tag)

    def _receive(self, partial: PartialFile) -> None:
        """Fetch the rest of the file into the partial one."""
        self._enter("asking")
        declared = self.wanted.algorithm is not None
        trusted = declared or bool(partial.tag)
        offset = partial.at if trusted else 0
        if self.wanted.bytes is not None and offset >= self.wanted.bytes:
            offset = partial.at if partial.at == self.wanted.bytes and declared else 0
            if offset:  # the last run ended between the last byte and the name
                return
        stream = self._stream = self._origin.open(
            offset, "" if declared else partial.tag, stall_s=self._stall_s
        )
        try:
            self._enter("receiving")
            self._check_size(stream, partial)
            partial.begin(stream.offset, stream.version.tag)
            self._moved(partial.at)
            while piece := stream.read():
                partial.write(piece)
                self.received += len(piece)
                self._moved(partial.at)
                self._enter("receiving")
        finally:
            stream.close()
        if self.total is not None and partial.at != self.total:
            raise TransferError(
                f"ended after {partial.at:,} of {self.total:,} bytes", transient=partial.at < self.total
            )

    def _check_size(self, stream: Stream, partial: PartialFile) -> None:
        """Compare the size with the declared one, and with the free space.

        Raises:
            TransferError: Another size was declared.
            ResourceError: The disk has no room.
        """
        size, declared = stream.version.bytes, self.wanted.bytes
        if size is not None and declared is not None and size != declared:
            raise TransferError(f"has {size:,} bytes, {declared:,} were declared")
        self.total = declared if size is None else size
        if self.total is None:
            return
        free_space(self.target.parent).require(
            self.target.parent,
            self.total - partial.at,
            f"{self.wanted.name} needs",
            reserve_bytes=RESERVE_BYTES,
            advice="or choose another folder",
        )

    def _as_known(self, tag: str) -> KnownFile:
        found = self.target.lstat()
        return KnownFile(
            bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            algorithm=self.wanted.algorithm,
            digest=self.wanted.digest,
            source=self.wanted.source,
            tag=tag,
        )


LOOK_S = 0.1
OWN_END_S = 2.0
"""Beyond `fetch.stall`: a try whose waits have that limit ends on its own, and keeps what came."""
DEFAULTS = FetchConfig()
PAUSE_S = 1.0
"""Before the second try; doubles up to a minute."""
TELL_S = 0.5
Status: TypeAlias = Literal["present", "fetched", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """The result of one file."""

    name: str
    source: str
    """As messages may show it."""
    status: Status
    bytes: int
    received: int
    """Bytes that were transferred now, including those of tries that failed."""
    resumed: int
    """Bytes that an earlier run had left, and that were kept."""
    tries: int
    seconds: float
    verified: str
    """What its content was compared with: a digest's name, `size`, or empty."""
    why: str = ""
    """Why it failed."""
    exit_code: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "name": self.name, "from": self.source, "status": self.status, "bytes": self.bytes,
            "received": self.received, "resumed": self.resumed, "tries": self.tries,
            "seconds": self.seconds, "verified": self.verified, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """The results of all files."""

    folder: Path
    files: tuple[FileResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[FileResult, ...]:
        """The files that could not be fetched."""
        return tuple(file for file in self.files if file.status == "failed")

    @property
    def exit_code(self) -> int:
        """0 when no file failed; else that of the first that did."""
        return self.failed[0].exit_code if self.failed else 0

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "folder": str(self.folder),
            "files": [file.to_json() for file in self.files],
            "bytes": sum(file.bytes for file in self.files if file.status != "failed"),
            "received": sum(file.received for file in self.files),
            "failed": [file.name for file in self.failed],
            "seconds": self.seconds,
            "exit_code": self.exit_code,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far all files are."""

    bytes: int
    """Bytes on disk, of all files."""
    total: int | None
    """Size of all files; None: that of some is unknown."""
    done: int
    count: int
    running: tuple[tuple[str, int, int | None], ...]
    """Name, bytes on disk, and size of each file that is being fetched."""
    seconds: float


Listener: TypeAlias = Callable[[FetchProgress | FileResult | str], None]
"""Gets progress twice a second, each file that is done, and a line for each try that failed."""


@dataclass(slots=True)
class _FileJob:
    wanted: WantedFile
    target: Path
    origin: Origin
    begun: float = 0.0
    """When its first try began."""
    due: float = 0.0
    """When the next one may begin."""
    tries: int = 0
    idle: int = 0
    """Tries in a row that brought nothing new."""
    wrong: int = 0
    """Times that the complete file had another digest."""
    best: int = 0
    received: int = 0
    resumed: int | None = None
    attempt: FetchAttempt | None = None
    done: FileResult | None = field(default=None)


def fetch(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    redact: Callable[[str], str] = str,
    listen: Listener = lambda _: None,
) -> FetchReport:
    """Fetch the files of a configuration, or of a JSON manifest.

    Args:
        path: The settings file. One that ends in `.json` is a manifest, and the settings are the defaults.
        folder: In place of `fetch.folder`; a manifest's files go into the manifest's folder by default.
        redact, listen: As for `fetch_files`.

    Raises:
        ConfigError: No file is named, or an entry is wrong.
        ResourceError: The disk has no room, or another process fetches into the folder.
    """
    if path.suffix == ".json":
        config = load_config(None, [*overrides, f"fetch.manifest={path}"])
        default = str(path.parent)
    else:
        config = load_config(path, overrides)
        default = config.data.root
    wanted = wanted_files(config)
    if not wanted:
        raise ConfigError(
            f"{config.where}: neither fetch.files nor fetch.manifest names a file",
            hint=f"Give one of them ({docs_url('how-to/fetch')})",
        )
    folder = folder or Path(config.fetch.folder or default)
    return fetch_files(wanted, folder, config.fetch, redact=redact, listen=listen)


def fetch_files(
    wanted: Sequence[WantedFile | WantedFolder],
    folder: Path,
    settings: FetchConfig = DEFAULTS,
    *,
    base: Path = Path(),
    redact: Callable[[str], str] = str,
    listen: Listener = lambda _: None,
) -> FetchReport:
    """Fetch all files into a folder; one that fails does not stop the others.

    Args:
        settings: Timeouts, tries, and how many files are fetched at once; files and folders in it are unused.
        base: Folder that paths to fetch from are relative to.
        redact: Takes secrets out of messages of other programs.

    Raises:
        ConfigError: A name leads out of the folder, or a source cannot be fetched from.
        ResourceError: The disk has no room for what is missing, or another process fetches into the folder.
    """
    begin = time.monotonic()
    make_folder(folder)

    def listen_redacted(event: FetchProgress | FileResult | str) -> None:
        listen(redact(event) if isinstance(event, str) else event)

    policy = RetryPolicy(first_s=PAUSE_S, attempts=settings.tries)
    every, unlisted = list_folders(wanted, base, policy, listen_redacted)
    jobs = [
        _FileJob(wanted=one, target=_target(folder, one.name), origin=origin_of(one.source, base))
        for one in every
    ]
    with FileLock(folder / LOCK, mode=0o666) as lock:
        if not lock.acquire():
            raise ResourceError(
                f"{folder}: another `stoker data fetch` ({lock.holder()}) is running",
                hint="Wait for it, then run again",
            )
        _check_room(jobs, folder)
        _FetchLoop(jobs, FetchRecord(folder), settings, redact, listen_redacted).run()
    files = [job.done for job in jobs if job.done is not None]
    files += [
        FileResult(
            name=one.name, source=shown_source(one.source), status="failed", bytes=0, received=0, resumed=0,
            tries=settings.tries, seconds=0.0, verified="", why=redact(str(error)), exit_code=error.exit_code,
        )
        for one, error in unlisted.items()
    ]  # fmt: skip
    return FetchReport(folder=folder, files=tuple(files), seconds=time.monotonic() - begin)


def _target(folder: Path, name: str) -> Path:
    """Return where a file goes, and make its folder.

    Raises:
        ConfigError: A link below `folder` would lead elsewhere, or something else is in the way.
    """
    target = folder / name
    with explain_disk_errors(folder):
        place = folder
        for part in target.relative_to(folder).parts[:-1]:
            place /= part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise ConfigError(
                    f"{place} is a link or a file, expected a folder of {folder}", hint="Remove it"
                )
            place.mkdir(exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise ConfigError(
                f"{target} is a folder, expected a file", hint="Remove it, or choose another name"
            )
    return target


def _check_room(jobs: Sequence[_FileJob], folder: Path) -> None:
    """Compare what is missing, as far as sizes are declared, with the free space."""
    missing = 0
    for job in jobs:
        found = stat_regular(job.target)
        part = stat_regular(job.target.with_name(f".{job.target.name}.part"))
        if job.wanted.bytes is not None and (found is None or found.st_size != job.wanted.bytes):
            missing += max(0, job.wanted.bytes - (0 if part is None else part.st_size))
    if missing:
        advice = "or choose another folder"
        need = "what is missing needs"
        free_space(folder).require(folder, missing, need, reserve_bytes=RESERVE_BYTES, advice=advice)


class _FetchLoop:
    """Starts tries, watches them, and decides what follows."""

    def __init__(
        self,
        jobs: Sequence[_FileJob],
        record: FetchRecord,
        settings: FetchConfig,
        redact: Callable[[str], str],
        listen: Listener,
    ) -> None:
        self._jobs, self._record, self._settings = jobs, record, settings
        self._redact, self._listen = redact, listen
        self._woken = Event()
        self._begin = self._told = time.monotonic()

    def run(self) -> None:
        """Run until each job is done."""
        try:
            while any(job.done is None for job in self._jobs):
                self._start_due()
                self._woken.wait(LOOK_S)
                self._woken.clear()
                for job in self._jobs:
                    if job.attempt is not None:
                        self._check(job, job.attempt)
                    elif job.done is None and job.begun and self._late(job):
                        self._fail(job, self._overdue(job))
                self._tell()
        finally:
            for job in self._jobs:  # interrupted: what came stays for the next run
                if job.attempt is not None:
                    job.attempt.give_up()

    def _start_due(self) -> None:
        now = time.monotonic()
        running = sum(job.attempt is not None for job in self._jobs)
        for job in self._jobs:
            if running >= self._settings.at_once:
                return
            if job.done is None and job.attempt is None and job.due <= now:
                job.begun = job.begun or now
                job.tries += 1
                known = self._record.of(job.wanted.name)
                job.attempt = FetchAttempt(
                    job.wanted, job.target, job.origin, known, stall_s=self._settings.stall
                )
                job.attempt.start(self._woken.set)
                running += 1

    def _check(self, job: _FileJob, attempt: FetchAttempt) -> None:
        """End a try that is done, or that takes too long."""
        if attempt.stage == "done":
            job.attempt = None
            self._count(job, attempt)
            if attempt.result is not None:
                self._succeed(job, attempt)
            else:
                self._retry(job, _as_stoker_error(attempt.error), may_retry=True)
        elif self._late(job):
            attempt.give_up()
            job.attempt = None
            self._count(job, attempt)
            self._fail(job, self._overdue(job))
        elif time.monotonic() - attempt.since > self._settings.stall + OWN_END_S:
            may_retry = attempt.stage not in LOCAL_STAGES and attempt.give_up()
            job.attempt = None
            self._count(job, attempt)
            stalled = StalledError(
                f"nothing moved for {format_seconds(self._settings.stall)} while {attempt.stage}, at "
                f"{attempt.at:,} bytes"
            )
            self._retry(job, stalled, may_retry=may_retry)

    def _count(self, job: _FileJob, attempt: FetchAttempt) -> None:
        job.received += attempt.received
        if job.resumed is None:
            job.resumed = 0 if attempt.is_present else max(0, attempt.at - attempt.received)
        job.idle = 0 if attempt.at > job.best and attempt.received else job.idle + 1
        job.best = max(job.best, attempt.at)

    def _retry(self, job: _FileJob, error: StokerError, *, may_retry: bool) -> None:
        """Try a file again, unless that cannot help."""
        job.wrong += isinstance(error, DigestError)
        if not is_transient(error) or not may_retry or job.wrong > 1 or job.idle >= self._settings.tries:
            self._fail(job, error)
            return
        # The same draw each time, per file: a run can be repeated, and files do not all retry at once.
        draw = hashlib.sha256(f"{job.wanted.name}\0{job.tries}".encode()).digest()[0] / 255
        pause = RetryPolicy(first_s=PAUSE_S, jitter=0.5).pause_s(max(1, job.idle), draw)
        if isinstance(error, TransferError):
            pause = max(pause, error.wait_s)
        job.due = time.monotonic() + pause
        self._listen(f"{job.wanted.name}: {error}; trying again in {format_seconds(pause)}")

    def _succeed(self, job: _FileJob, attempt: FetchAttempt) -> None:
        assert attempt.result is not None
        if not attempt.is_present or self._record.of(job.wanted.name) != attempt.result:
            self._record.put(job.wanted.name, attempt.result)
        self._end(job, "present" if attempt.is_present else "fetched", attempt.result.bytes)

    def _fail(self, job: _FileJob, error: StokerError) -> None:
        self._end(job, "failed", job.best, self._redact(str(error)), error.exit_code)

    def _end(self, job: _FileJob, status: Status, size: int, why: str = "", exit_code: int = 0) -> None:
        wanted = job.wanted
        verified = wanted.algorithm or ("size" if wanted.bytes is not None else "")
        job.done = FileResult(
            name=wanted.name,
            source=shown_source(wanted.source),
            status=status,
            bytes=size,
            received=job.received,
            resumed=job.resumed or 0,
            tries=job.tries,
            seconds=time.monotonic() - job.begun,
            verified="" if status == "failed" else verified,
            why=why,
            exit_code=exit_code,
        )
        self._listen(job.done)

    def _late(self, job: _FileJob) -> bool:
        return time.monotonic() - job.begun > self._settings.deadline

    def _overdue(self, job: _FileJob) -> StalledError:
        return StalledError(
            f"not complete after {format_seconds(self._settings.deadline)}, at {job.best:,} bytes",
            hint="Raise fetch.deadline, or run again: what came is kept",
        )

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told < TELL_S:
            return
        self._told = now
        there, total = 0, 0
        for job in self._jobs:
            size = job.attempt.total if job.attempt is not None else job.wanted.bytes
            there += job.done.bytes if job.done else job.attempt.at if job.attempt else job.best
            size = job.done.bytes if job.done and size is None else size
            total = None if size is None or total is None else total + size
        running = [job.attempt for job in self._jobs if job.attempt is not None]
        self._listen(
            FetchProgress(
                bytes=there,
                total=total,
                done=sum(job.done is not None for job in self._jobs),
                count=len(self._jobs),
                running=tuple((one.wanted.name, one.at, one.total) for one in running),
                seconds=now - self._begin,
            )
        )


def _as_stoker_error(error: BaseException | None) -> StokerError:
    """Return the exception that a thread ended with, as a `StokerError`."""
    if isinstance(error, StokerError):
        return error
    if isinstance(error, OSError):
        return SourceError(f"{error.filename or 'the disk'}: {error.strerror or error}")
    return StokerError(f"unexpected {type(error).__name__}: {error}", hint="Please report it")
