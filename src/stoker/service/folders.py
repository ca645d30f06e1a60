"""Where the service keeps what: the state folder and the folder of each job in it.

DIR/token               who may use the service
DIR/stoker.db           the database, unless it is elsewhere
DIR/workers/N.lock      held by the worker of slot N
DIR/caches/             encoded data, shared by all jobs
DIR/data/               data sets that the service made
DIR/jobs/ID/job.json    what the job is to do
           events.jsonl what it says about itself, a line each
           log.txt      its standard output and error
           lock         held by its process; says which one
           ray          on a Ray cluster: the submission that is to run; ray-stop: which is to stop
           checkpoints/
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from stoker.errors import ConfigError, NotFoundError
from stoker.runtime.disk import explain_disk_errors, format_inodes, free_space
from stoker.runtime.files import replace_atomically
from stoker.service.background import Recent
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.schema import Json

LEAST_BYTES, LEAST_INODES = 16 << 20, 64
"""With less room no job is begun: it could not even say what becomes of it."""
ANSWER_S = 2.0
"""How long the disk of a state folder may take to say how much room it has."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one job."""

    path: Path

    @property
    def job_file(self) -> Path:
        """What the job is to do, written anew for each attempt."""
        return self.path / "job.json"

    @property
    def events(self) -> Path:
        """What its process says, a line of JSON each."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """Standard output and error of its processes, one after the other."""
        return self.path / "log.txt"

    @property
    def lock(self) -> Path:
        """Held by its process."""
        return self.path / "lock"

    @property
    def submission(self) -> Path:
        """Says which submission to a Ray cluster is the one that is to run."""
        return self.path / "ray"

    @property
    def stop(self) -> Path:
        """Says which submission is to make its checkpoint and end."""
        return self.path / "ray-stop"

    @property
    def checkpoints(self) -> Path:
        """Where its process keeps what it can go on from."""
        return self.path / "checkpoints"

    def make(self) -> None:
        """The folder and that of its checkpoints, for its owner alone."""
        for path in (self.path, self.checkpoints):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The state folder of a service."""

    path: Path

    @property
    def database(self) -> Path:
        """The embedded database."""
        return self.path / "stoker.db"

    @property
    def token(self) -> Path:
        """The secret that clients show."""
        return self.path / "token"

    @property
    def caches(self) -> Path:
        """Encoded data of all jobs."""
        return self.path / "caches"

    @property
    def data(self) -> Path:
        """Data sets that the service made."""
        return self.path / "data"

    @property
    def workers(self) -> Path:
        """Locks and logs of the worker processes."""
        return self.path / "workers"

    @property
    def jobs(self) -> Path:
        """The folders of the jobs."""
        return self.path / "jobs"

    def job(self, id: str) -> JobFolder:
        """The folder of one job, whether it is there or not.

        Raises:
            NotFound: No job can have that id.
        """
        try:
            known = str(UUID(id))
        except ValueError:
            known = ""
        if known != id:
            raise NotFoundError(f"there is no job {id!r}: an id is written as 8-4-4-4-12 hexadecimal digits")
        return JobFolder(self.jobs / known)

    def lack(self) -> str | None:
        """Why nothing can be begun here; None: there is room."""
        try:
            free, inodes, _ = free_space(self.path)
        except OSError as error:
            return f"{self.path} cannot be looked at: {error.strerror}. Look at its disk"
        if free >= LEAST_BYTES and (inodes is None or inodes >= LEAST_INODES):
            return None
        return (
            f"the disk of {self.path} is full: {format_bytes(free)} and {format_inodes(inodes)} left, "
            f"{format_bytes(LEAST_BYTES)} and {LEAST_INODES} are wanted. Make room; jobs wait until then"
        )

    def make(self) -> None:
        """All folders, for their owner alone."""
        for path in (self.path, self.caches, self.data, self.workers, self.jobs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)


class DiskRoom:
    """Whether there is room in a state folder, told in time also where its disk says nothing."""

    def __init__(self, folder: StateFolder) -> None:
        self._asked: Recent[str | None] = Recent(folder.lack, f"the disk of {folder.path}", wait_s=ANSWER_S)

    def lack(self) -> str | None:
        """Why nothing can be begun there; None: there is room."""
        found = self._asked.get()
        return found.stale or found.value


# ----------------------------------------------------------------------------------------------------------
# The folder where a service keeps everything: nobody but its user may look inside.


def prepare_state_dir(path: Path) -> StateFolder:
    """Make the folder and those inside it, or check that it may be used.

    Raises:
        ConfigError: It belongs to somebody else, others may read it, or anybody may replace it.
        ReadOnlyError: It cannot be made.
    """
    path = path.absolute()
    with explain_disk_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, this is {os.geteuid()}. Choose another --state-dir"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):o}: others may look inside. It holds the token: "
            f"chmod 700 {path}"
        )
    above = path.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"anybody may replace {path}: {path.parent} is writable by all. Choose another --state-dir"
        )
    folder = StateFolder(path)
    with explain_disk_errors(path):
        folder.make()
    return folder


# ----------------------------------------------------------------------------------------------------------
# `job.json`: what a job's process is told, written anew for each attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a job's process is told. It finds everything else beside the file."""

    id: str
    name: str
    kind: str
    """`training` or `generation`."""
    attempt: int
    """1 the first time."""
    epochs: int
    """Epochs wanted in all; may be more than the configuration says, once a job was extended."""
    epoch: int
    """Epochs that were reported as finished; one that was not may still have its checkpoint."""
    checkpoint: str | None
    """The newest checkpoint that was reported: there has to be a valid one then. None: maybe none yet."""
    config: dict[str, Json]
    datasets: list[dict[str, Json]]
    """The registered data sets of `dataset_ids`, described so that they can be opened."""
    dataset_ids: list[str]
    caches: str
    """Folder of the caches of all jobs."""
    data: str
    """Folder of the data sets that the service makes."""
    limits: dict[str, Json]
    """`memory_bytes`, `wall_s`, `grace_s`: to plan with; who passes them is ended from outside."""
    resume: bool = True

    def write(self, path: Path) -> None:
        """Put it there in one step.

        Raises:
            ResourceError: The disk is full.
        """
        with replace_atomically(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))


# ----------------------------------------------------------------------------------------------------------
# `events.jsonl`: what a job's process says about itself, whole lines of JSON at the end of the file.
#
# A line is one `write`, so a kill leaves whole lines, and at most one that was not finished.


class Journal:
    """The file, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_disk_errors(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
        self.epoch = _end_of(path)
        """The newest epoch that was told of; 0: none."""

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite are null.

        Raises:
            ResourceError: The disk is full.
        """
        text = json.dumps({"kind": kind, "data": _plain(data)}, allow_nan=False, separators=(",", ":"))
        left = text.encode() + b"\n"
        with explain_disk_errors(self._path):
            while left:  # a disk that fills up takes a part, and refuses the next
                left = left[os.write(self._fd, left) :]
        if kind == "metrics":
            self.epoch = max(self.epoch, int(data["epoch"]))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def _end_of(path: Path) -> int:
    """The newest epoch in a file, whose last line is ended if a kill left it half written."""
    data, epoch = path.read_bytes(), 0
    if data and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for text in data.split(b"\n"):
        if b'"metrics"' in text:
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(text)
                epoch = max(epoch, int(said["data"]["epoch"])) if said["kind"] == "metrics" else epoch
    return epoch


def _plain(value: Any) -> Json:
    """The same for JSON: NaN and infinities as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in cast("Mapping[object, Any]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value
