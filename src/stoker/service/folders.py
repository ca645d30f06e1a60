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

from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from stoker.errors import NotFound
from stoker.runtime.disk import format_inodes, free_space
from stoker.service.recent import Recent
from stoker.units import format_bytes

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
            raise NotFound(f"there is no job {id!r}: an id is written as 8-4-4-4-12 hexadecimal digits")
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


class Room:
    """Whether there is room in a state folder, told in time also where its disk says nothing."""

    def __init__(self, folder: StateFolder) -> None:
        self._asked: Recent[str | None] = Recent(folder.lack, f"the disk of {folder.path}", wait_s=ANSWER_S)

    def lack(self) -> str | None:
        """Why nothing can be begun there; None: there is room."""
        found = self._asked.get()
        return found.stale or found.value
