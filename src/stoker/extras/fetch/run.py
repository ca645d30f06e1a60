"""All files of a list: several at once, each under its timeouts, tried again where that may help.

The thread that calls `fetch_files` only watches. A try that makes no progress is left behind and another is
started, so that nothing below (a name server, a mount, a program) can hold up the others, or the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, TypeAlias

from stoker.errors import (
    ConfigError,
    DigestError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
    TransferError,
)
from stoker.extras.fetch.origins import Origin, Stream, expand, is_transient, origin_of, shown_source
from stoker.extras.fetch.wanted import WantedFile, WantedFolder
from stoker.runtime.disk import explain_disk_errors, free_space
from stoker.runtime.files import make_folder, replace_atomically
from stoker.runtime.jsonio import as_object, read_object
from stoker.runtime.locks import FileLock
from stoker.runtime.partial import PartialFile, new_digest
from stoker.runtime.retry import RetryPolicy
from stoker.schema import Json
from stoker.units import MIB, format_seconds

# ----------------------------------------------------------------------------------------------------------
# What was fetched into a folder before, so that a file that is there need not be read to be known.
#
# `.stoker-fetch.json` has size, time and digest of each file as it was when it got its name. A file that
# was touched since is compared in full again.


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


class Record:
    """The record of one folder; only the thread that made it may write."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self._files: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._files = as_object(read_object(self._path).get("files")) or {}

    def of(self, name: str) -> KnownFile | None:
        """What is known of a file."""
        try:
            return KnownFile(**self._files[name])
        except (KeyError, TypeError):
            return None

    def put(self, name: str, known: KnownFile) -> None:
        """Remember a file."""
        self._files[name] = asdict(known)
        with replace_atomically(self._path) as temporary:
            temporary.write_text(json.dumps({"files": self._files}, indent=1, sort_keys=True))


def look(target: Path) -> os.stat_result | None:
    """The regular file at a path, not followed; None where there is none."""
    with suppress(OSError):
        found = target.lstat()
        if stat.S_ISREG(found.st_mode):
            return found
    return None


def is_known(wanted: WantedFile, found: os.stat_result, known: KnownFile | None) -> bool:
    """Whether the file is the wanted one as far as the record says, without reading it."""
    if known is None or (found.st_size, found.st_mtime_ns) != (known.bytes, known.mtime_ns):
        return False
    if wanted.bytes is not None and wanted.bytes != known.bytes:
        return False
    if wanted.algorithm is not None:
        return (wanted.algorithm, wanted.digest) == (known.algorithm, known.digest)
    return wanted.source == known.source


def is_same(wanted: WantedFile, target: Path, found: os.stat_result, beat: Callable[[int], None]) -> bool:
    """Whether the file at a path has the declared digest; reads it."""
    if wanted.algorithm is None or wanted.bytes not in (None, found.st_size):
        return False
    digest, at = new_digest(wanted.algorithm), 0
    with target.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            at += len(piece)
            beat(at)
    return digest.hexdigest() == wanted.digest


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Be the only one that fetches into a folder; a lock of a dead process holds nobody up.

    Raises:
        ResourceError: Another process is at it.
    """
    with FileLock(folder / LOCK, mode=0o666) as lock:
        if not lock.acquire():
            raise ResourceError(
                f"{folder}: another stoker fetch ({lock.holder()}) is at it. Wait for it, then run again"
            )
        yield


# ----------------------------------------------------------------------------------------------------------
# One try at one file, in a thread of its own, which whoever started it may leave behind.


RESERVE_BYTES = 64 * MIB
"""Room that is left on the disk."""
Stage: TypeAlias = Literal["checking", "asking", "receiving", "naming", "done"]
LOCAL_STAGES = ("checking", "naming")
"""Stages that wait for our own disk alone: trying again would wait for it once more."""


class FetchAttempt:
    """The thread and what it came to. Fields are written by the thread and read by whoever watches it."""

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
        """When something last moved."""
        self.at = 0
        """Bytes that are there."""
        self.total = wanted.bytes
        self.received = 0
        """Bytes that came in this try."""
        self.present = False
        """The file was there already."""
        self.result: KnownFile | None = None
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"stoker-fetch {wanted.name}", daemon=True)

    def start(self, woken: Callable[[], None]) -> None:
        """Begin; `woken` is called in the thread once it ended."""
        self._woken = woken
        self.since = time.monotonic()
        self._thread.start()

    def give_up(self) -> bool:
        """Let it write nothing more, whether or not its thread ever ends; False: it hangs while writing."""
        self._given_up = True
        partial, stream = self._partial, self._stream
        if stream is not None:
            stream.stop()
        return partial is None or partial.abandon()

    def _beat(self, at: int) -> None:
        self.at, self.since = at, time.monotonic()

    def _enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()
        if self._given_up:
            raise TransferError("given up")

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: looked at by whoever watches
            self.error = error
        self.stage = "done"
        self._woken()

    def _do(self) -> None:
        found = look(self.target)
        if found is not None and (
            is_known(self.wanted, found, self._known) or is_same(self.wanted, self.target, found, self._beat)
        ):
            self.present, self.at, self.total = True, found.st_size, found.st_size
            tag = self._known.tag if self._known is not None else ""
            self.result = self._as_known(tag)
            return
        own = self.wanted
        partial = self._partial = PartialFile(
            self.target, self._beat, bytes=own.bytes, algorithm=own.algorithm, digest=own.digest
        )
        try:
            self._beat(partial.at)
            self._receive(partial)
            self._enter("naming")
            partial.finish()
        finally:
            partial.keep()
        self.result = self._as_known(partial.tag)

    def _receive(self, partial: PartialFile) -> None:
        """Fill the partial file up to what there is."""
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
            self._agree(stream, partial)
            partial.begin(stream.offset, stream.version.tag)
            self._beat(partial.at)
            while piece := stream.read():
                partial.write(piece)
                self.received += len(piece)
                self._beat(partial.at)
                self._enter("receiving")
        finally:
            stream.close()
        if self.total is not None and partial.at != self.total:
            raise TransferError(
                f"ended after {partial.at:,} of {self.total:,} bytes", transient=partial.at < self.total
            )

    def _agree(self, stream: Stream, partial: PartialFile) -> None:
        """Compare what there is with what was declared, and with the room for it.

        Raises:
            TransferError: Another size was declared.
            ResourceError: There is no room.
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
"""Beyond `stall_s`, in which a try whose waits have that limit ends by itself, and keeps what came."""
TELL_S = 0.5
Status: TypeAlias = Literal["present", "fetched", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How much at once, and how long."""

    at_once: int = 4
    tries: int = 5
    """Tries in a row that bring nothing new, after which a file has failed."""
    deadline_s: float = 4 * 3600.0
    """For one file, pauses included."""
    stall_s: float = 60.0
    """Without a byte, or an answer."""
    pause_s: float = 1.0
    """Before the second try; doubles up to a minute."""
    redact: Callable[[str], str] = str
    """Takes secrets out of messages of other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What became of one file."""

    name: str
    source: str
    """As messages may show it."""
    status: Status
    bytes: int
    received: int
    """Bytes that came over the wire now, those of tries that failed included."""
    resumed: int
    """Bytes that an earlier run had left, and that were kept."""
    tries: int
    seconds: float
    verified: str
    """What its content was compared with: a digest's name, `size`, or nothing."""
    why: str = ""
    """Why it failed."""
    exit_code: int = 0

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "name": self.name, "from": self.source, "status": self.status, "bytes": self.bytes,
            "received": self.received, "resumed": self.resumed, "tries": self.tries,
            "seconds": self.seconds, "verified": self.verified, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """What became of all files."""

    folder: Path
    files: tuple[Fetched, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Fetched, ...]:
        """Those that are not there."""
        return tuple(file for file in self.files if file.status == "failed")

    @property
    def exit_code(self) -> int:
        """0 when all files are there; else that of the first that is not."""
        return self.failed[0].exit_code if self.failed else 0

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
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
    """How far it is."""

    bytes: int
    """Of all files, as far as they are there."""
    total: int | None
    """Of all files; None: of some nobody said."""
    done: int
    count: int
    running: tuple[tuple[str, int, int | None], ...]
    """Name, bytes there, size of each file that is being fetched."""
    seconds: float


Listener: TypeAlias = Callable[[FetchProgress | Fetched | str], None]
"""Gets progress twice a second, each file that is done, and a line for each try that failed."""


@dataclass(slots=True)
class _Job:
    wanted: WantedFile
    target: Path
    origin: Origin
    begun: float = 0.0
    """When its first try began."""
    due: float = 0.0
    """When the next one may."""
    tries: int = 0
    idle: int = 0
    """Tries in a row that brought nothing new."""
    wrong: int = 0
    """Times that the whole file had another digest."""
    best: int = 0
    received: int = 0
    resumed: int | None = None
    attempt: FetchAttempt | None = None
    done: Fetched | None = field(default=None)


def fetch_files(
    wanted: Sequence[WantedFile | WantedFolder],
    folder: Path,
    settings: FetchSettings = FetchSettings(),
    *,
    base: Path = Path(),
    listen: Listener = lambda _: None,
) -> FetchReport:
    """Bring all files into a folder; one that fails leaves the others alone.

    Args:
        base: Folder that paths to fetch from are relative to.

    Raises:
        ConfigError: A name leads out of the folder, or an address is none.
        ResourceError: There is no room for what is missing, or another process fetches into the folder.
    """
    begin = time.monotonic()
    make_folder(folder)

    def tell(text: str) -> None:
        listen(settings.redact(text))

    every, unlisted = expand(wanted, base, tries=settings.tries, pause_s=settings.pause_s, tell=tell)
    jobs = [
        _Job(wanted=one, target=_target(folder, one.name), origin=origin_of(one.source, base))
        for one in every
    ]
    with alone(folder):
        _check_room(jobs, folder)
        _Run(jobs, Record(folder), settings, listen).run()
    files = tuple(job.done for job in jobs if job.done is not None)
    files += tuple(_unlisted(one, error, settings) for one, error in unlisted.items())
    return FetchReport(folder=folder, files=files, seconds=time.monotonic() - begin)


def _unlisted(one: WantedFolder, error: StokerError, settings: FetchSettings) -> Fetched:
    """A folder that could not be listed."""
    return Fetched(
        name=one.name, source=shown_source(one.source), status="failed", bytes=0, received=0, resumed=0,
        tries=settings.tries, seconds=0.0, verified="", why=settings.redact(str(error)),
        exit_code=error.exit_code,
    )  # fmt: skip


def _target(folder: Path, name: str) -> Path:
    """Where a file goes, its folder made; links below `folder` lead nowhere else.

    Raises:
        ConfigError: They do.
    """
    target = folder / name
    with explain_disk_errors(folder):
        place = folder
        for part in target.relative_to(folder).parts[:-1]:
            place /= part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise ConfigError(f"{place} is a link or a file, expected a folder of {folder}. Remove it")
            place.mkdir(exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise ConfigError(f"{target} is a folder, expected a file. Remove it, or choose another name")
    return target


def _check_room(jobs: Sequence[_Job], folder: Path) -> None:
    """Compare what is missing, as far as sizes are declared, with what is free."""
    missing = 0
    for job in jobs:
        found = look(job.target)
        part = look(job.target.with_name(f".{job.target.name}.part"))
        if job.wanted.bytes is not None and (found is None or found.st_size != job.wanted.bytes):
            missing += max(0, job.wanted.bytes - (0 if part is None else part.st_size))
    if missing:
        advice = "or choose another folder"
        need = "what is missing needs"
        free_space(folder).require(folder, missing, need, reserve_bytes=RESERVE_BYTES, advice=advice)


class _Run:
    """The loop that watches."""

    def __init__(
        self, jobs: Sequence[_Job], record: Record, settings: FetchSettings, listen: Listener
    ) -> None:
        self._jobs, self._record, self._settings, self._listen = jobs, record, settings, listen
        self._woken = Event()
        self._begin = self._told = time.monotonic()

    def run(self) -> None:
        """Until each job is done."""
        try:
            while any(job.done is None for job in self._jobs):
                self._start_due()
                self._woken.wait(LOOK_S)
                self._woken.clear()
                for job in self._jobs:
                    if job.attempt is not None:
                        self._look_at(job, job.attempt)
                    elif job.done is None and job.begun and self._late(job):
                        self._fail(job, self._overdue(job))
                self._tell()
        finally:
            for job in self._jobs:  # interrupted: what is there stays for the next run
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
                    job.wanted, job.target, job.origin, known, stall_s=self._settings.stall_s
                )
                job.attempt.start(self._woken.set)
                running += 1

    def _look_at(self, job: _Job, attempt: FetchAttempt) -> None:
        """End a try that is done, or that takes too long."""
        if attempt.stage == "done":
            job.attempt = None
            self._count(job, attempt)
            if attempt.result is not None:
                self._succeed(job, attempt)
            else:
                self._again(job, _as_stoker(attempt.error), free=True)
        elif self._late(job):
            attempt.give_up()
            job.attempt = None
            self._count(job, attempt)
            self._fail(job, self._overdue(job))
        elif time.monotonic() - attempt.since > self._settings.stall_s + OWN_END_S:
            free = attempt.stage not in LOCAL_STAGES and attempt.give_up()
            job.attempt = None
            self._count(job, attempt)
            stalled = StalledError(
                f"nothing moved for {format_seconds(self._settings.stall_s)} while {attempt.stage}, at "
                f"{attempt.at:,} bytes"
            )
            self._again(job, stalled, free=free)

    def _count(self, job: _Job, attempt: FetchAttempt) -> None:
        job.received += attempt.received
        if job.resumed is None:
            job.resumed = 0 if attempt.present else max(0, attempt.at - attempt.received)
        job.idle = 0 if attempt.at > job.best and attempt.received else job.idle + 1
        job.best = max(job.best, attempt.at)

    def _again(self, job: _Job, error: StokerError, *, free: bool) -> None:
        """Try a file again, unless that is of no use."""
        job.wrong += isinstance(error, DigestError)
        if not is_transient(error) or not free or job.wrong > 1 or job.idle >= self._settings.tries:
            self._fail(job, error)
            return
        policy = RetryPolicy(first_s=self._settings.pause_s, jitter=0.5)
        pause = policy.pause_s(max(1, job.idle), _draw(job))
        if isinstance(error, TransferError):
            pause = max(pause, error.wait_s)
        job.due = time.monotonic() + pause
        said = self._settings.redact(str(error))
        self._listen(f"{job.wanted.name}: {said}; trying again in {format_seconds(pause)}")

    def _succeed(self, job: _Job, attempt: FetchAttempt) -> None:
        assert attempt.result is not None
        if not attempt.present or self._record.of(job.wanted.name) != attempt.result:
            self._record.put(job.wanted.name, attempt.result)
        self._end(job, "present" if attempt.present else "fetched", attempt.result.bytes)

    def _fail(self, job: _Job, error: StokerError) -> None:
        self._end(job, "failed", job.best, self._settings.redact(str(error)), error.exit_code)

    def _end(self, job: _Job, status: Status, size: int, why: str = "", exit_code: int = 0) -> None:
        wanted = job.wanted
        verified = wanted.algorithm or ("size" if wanted.bytes is not None else "")
        job.done = Fetched(
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

    def _late(self, job: _Job) -> bool:
        return time.monotonic() - job.begun > self._settings.deadline_s

    def _overdue(self, job: _Job) -> StalledError:
        return StalledError(
            f"not there after {format_seconds(self._settings.deadline_s)}, at {job.best:,} bytes. Raise "
            "fetch.deadline, or run again: what came is kept"
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


def _draw(job: _Job) -> float:
    """Return a number between 0 and 1 for the pause after a try: the same each time, and per file."""
    return hashlib.sha256(f"{job.wanted.name}\0{job.tries}".encode()).digest()[0] / 255


def _as_stoker(error: BaseException | None) -> StokerError:
    """What a thread ended with, as an error of ours."""
    if isinstance(error, StokerError):
        return error
    if isinstance(error, OSError):
        return SourceError(f"{error.filename or 'the disk'}: {error.strerror or error}")
    return StokerError(f"unexpected {type(error).__name__}: {error}. Please report it")
