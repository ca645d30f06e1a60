"""The layout of the state folder and of the folder of each job in it.

DIR/token               the secret of clients
DIR/stoker.db           the database, unless another is given
DIR/workers/lock        locked by the workers of one service together
DIR/caches/             encoded data, shared by all jobs
DIR/data/               generated data sets
DIR/jobs/ID/job.json    the task of the job
           events.jsonl events of its process, one line each
           log.txt      its standard output and error
           lock         locked by its process; says which one
           ray          on a Ray cluster: the submission that is to run; ray-stop: the one to stop
           checkpoints/
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from stoker.errors import ConfigError, NotFoundError, ResourceError
from stoker.runtime.disk import FreeSpace, explain_disk_errors, format_inodes, free_space
from stoker.runtime.files import make_folder, replace_atomically
from stoker.service.background import CachedValue
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.schema import Json

LEAST_BYTES, LEAST_INODES = 16 << 20, 64
"""With less free space no job starts: it could not even write its events."""
ANSWER_S = 2.0
"""Timeout of reading the free space of a state folder."""


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job_file = path / "job.json"
        """The task of the job, rewritten for each attempt."""
        self.events = path / "events.jsonl"
        """Events of its process (`journal`)."""
        self.log = path / "log.txt"
        """Standard output and error of its processes, one after the other."""
        self.lock = path / "lock"
        """Locked by its process."""
        self.submission = path / "ray"
        """Names the submission to a Ray cluster that is to run."""
        self.stop = path / "ray-stop"
        """Names the submission that is to write its checkpoint and end."""
        self.checkpoints = path / "checkpoints"
        """Checkpoints that its process can resume from."""

    def make(self) -> None:
        """Create the folder and that of its checkpoints, for its owner only."""
        for path in (self.path, self.checkpoints):
            make_folder(path, 0o700)


RESULTS = ("model.safetensors", "report.html", "curves.png", "metrics.jsonl", "stall.jsonl", "log.txt")
"""Files of a job that a user may take, besides those of its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """A file that a job has left."""

    name: str
    """Below the job's folder, with `/`."""
    bytes: int
    changed: float
    """Unix seconds."""


def result_files(folder: JobFolder) -> list[ResultFile]:
    """Return the files of a job that a user may take: results, then checkpoints with the best first.

    Links are left out.
    """
    found = [folder.path / name for name in RESULTS]
    with suppress(FileNotFoundError):
        for checkpoint in sorted(folder.checkpoints.iterdir()):
            if not checkpoint.name.startswith(".") and not checkpoint.is_symlink() and checkpoint.is_dir():
                found += sorted(checkpoint.iterdir())
    files: list[ResultFile] = []
    for path in found:
        with suppress(FileNotFoundError):  # a checkpoint may go at any time
            known = path.lstat()
            if stat.S_ISREG(known.st_mode) and not path.name.startswith("."):
                name = path.relative_to(folder.path).as_posix()
                files.append(ResultFile(name=name, bytes=known.st_size, changed=known.st_mtime))
    return files


class StateFolder:
    """The state folder of a service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "stoker.db"
        """The embedded database."""
        self.token = path / "token"
        """The secret that clients send."""
        self.caches = path / "caches"
        """Encoded data of all jobs."""
        self.data = path / "data"
        """Generated data sets."""
        self.workers = path / "workers"
        """Lock and logs of the worker processes."""
        self.jobs = path / "jobs"
        """The folders of the jobs."""

    def job(self, id: str) -> JobFolder:
        """Return the folder of one job, which need not exist.

        Raises:
            NotFoundError: The id is invalid.
        """
        try:
            known = str(UUID(id))
        except ValueError:
            known = ""
        if known != id:
            raise NotFoundError(
                f"job {id!r} does not exist: an id has the form 8-4-4-4-12 hexadecimal digits"
            )
        return JobFolder(self.jobs / known)

    def make(self) -> None:
        """Create all folders, for their owner only."""
        for path in (self.path, self.caches, self.data, self.workers, self.jobs):
            make_folder(path, 0o700)
        self.path.chmod(0o700)


class DiskRoom(CachedValue[FreeSpace]):
    """The free space of a state folder, known in time also when its disk does not answer."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        super().__init__(self._look, f"the disk of {folder.path}", wait_s=ANSWER_S)

    def _look(self) -> FreeSpace:
        try:
            return free_space(self._folder.path)
        except OSError as error:
            what = f"{self._folder.path} cannot be read: {error.strerror}"
            raise ResourceError(what, hint="Check its disk") from error

    def lack(self) -> str | None:
        """Return why no job can start there; None: there is space."""
        found = self.get()
        if found.value is None or found.error is not None:
            return found.stale
        free, inodes, _ = found.value
        if free >= LEAST_BYTES and (inodes is None or inodes >= LEAST_INODES):
            return None
        return (
            f"{self._what} is full: {format_bytes(free)} and {format_inodes(inodes)} left, "
            f"{format_bytes(LEAST_BYTES)} and {LEAST_INODES} are needed. Free space; jobs wait until then"
        )


# ----------------------------------------------------------------------------------------------------------
# The state folder is readable only by its user.


def prepare_state_dir(path: Path) -> StateFolder:
    """Create the folder and its subfolders, or check that it is safe to use; return it.

    Raises:
        ConfigError: It belongs to another user, others may read it, or anyone may replace it.
        ReadOnlyError: It cannot be created.
    """
    path = path.absolute()
    make_folder(path, 0o700)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, this is {os.geteuid()}",
            hint="Choose another --state-dir",
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):o}: others may read it",
            hint=f"It holds the token: chmod 700 {path}",
        )
    above = path.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"anyone may replace {path}: {path.parent} is writable by all", hint="Choose another --state-dir"
        )
    folder = StateFolder(path)
    with explain_disk_errors(path):
        folder.make()
    return folder


# ----------------------------------------------------------------------------------------------------------
# `job.json`: the task of a job's process, rewritten for each attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The task of a job's process. Everything else is in the folder of the file."""

    id: str
    name: str
    kind: str
    """`training` or `generation`."""
    attempt: int
    """1 the first time."""
    epochs: int
    """Epochs in total; more than in the configuration once a job was extended."""
    epoch: int
    """Epochs that were reported as finished; a later one may still have its checkpoint."""
    checkpoint: str | None
    """The newest reported checkpoint, so that a valid one must exist. None: none was reported."""
    config: dict[str, Json]
    datasets: list[dict[str, Json]]
    """The registered data sets of `dataset_ids`, described so that they can be opened."""
    dataset_ids: list[str]
    caches: str
    """Folder of the caches of all jobs."""
    data: str
    """Folder of generated data sets."""
    limits: dict[str, Json]
    """`memory_bytes`, `wall_s`, `grace_s`: to plan with; the worker enforces them."""
    connections: dict[str, str] = field(default_factory=dict[str, str])
    """Files of the connections that the data sets name: see `connections.py`."""
    resume: bool = True

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ResourceError: The disk is full.
        """
        with replace_atomically(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """Read the file."""
        return cls(**json.loads(path.read_text()))
