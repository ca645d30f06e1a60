"""Jobs on a running Ray cluster: the `Executor` of `stoker serve --executor ray`.

An attempt is one submission of Ray's job API, named before it is sent, so that sending it twice makes one.
The job's folder names the current submission; `python -m stoker.extras.ray.jobs` on the node reads it.
A worker that dies leaves the submission running: the next worker of the job finds its name there and watches
it. The database of the service decides what is true: jobs of Ray end with their cluster.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, NotFoundError, ResourceError, ServiceError, StalledError
from stoker.runtime.files import replace_atomically
from stoker.runtime.http import Answer, HttpClient, HttpFailure, json_object
from stoker.runtime.processes.child import Child, set_start_method
from stoker.runtime.threads import Pool, is_exiting
from stoker.service.executor import JobLimits, JobProgram, LocalExecutor, LocalJobLock, RayTarget, start_job
from stoker.service.folders import JobFile, JobFolder

# ----------------------------------------------------------------------------------------------------------
# Ray's job API, four requests of it, each with a timeout.
#
# Ray's own client waits for an answer as long as it takes, and needs Ray installed with the service; the
# requests are documented and few. The token is sent with each of them and never shown.


ANSWER_S = 10.0
"""How long the cluster may take to answer one request."""
_MOST_BYTES = 1 << 20


class RayJobs:
    """The jobs of a cluster.

    Args:
        address: Of its dashboard, over http or https.
        token: The bearer token that it asks for; None: it asks for none.

    Raises:
        ConfigError: The address is not a URL of http or https.
    """

    def __init__(self, address: str, token: str | None) -> None:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--ray-address is {address!r}",
                hint="Expected http://HOST:8265, the address of the dashboard that `ray start --head` prints",
            )
        self.address = address.rstrip("/")
        self._token = token
        self._http = HttpClient(timeout_s=ANSWER_S, total_s=3 * ANSWER_S, limit_bytes=_MOST_BYTES)

    def check(self) -> None:
        """Check that the cluster answers and takes the token. Errors as `submit`."""
        with suppress(NotFoundError):
            self.info("stoker")

    def submit(self, submission: str, entrypoint: str, *, gpus: float) -> None:
        """Have `entrypoint` run under a new name; a job that has the name already is this one.

        Raises:
            ResourceError: The cluster does not answer, or refuses.
            ConfigError: It wants another token.
        """
        body: dict[str, Any] = {"entrypoint": entrypoint, "submission_id": submission}
        if gpus:
            body["entrypoint_num_gpus"] = gpus
        try:
            self._ask("POST", "/api/jobs/", body)
        except ResourceError as error:
            try:  # it may have arrived all the same
                self.info(submission)
            except NotFoundError:
                raise error from None

    def info(self, submission: str) -> dict[str, Any]:
        """Return what the cluster says of a job: `status`, `driver_exit_code`, `message`.

        Raises:
            NotFoundError: It knows no job of that name.
            ResourceError, ConfigError: As `submit`.
        """
        return self._ask("GET", f"/api/jobs/{submission}")

    def stop(self, submission: str) -> None:
        """End a job: SIGTERM, and SIGKILL a few seconds later. Errors as `info`."""
        self._ask("POST", f"/api/jobs/{submission}/stop")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            answer = self._http.ask(method, self.address + path, headers=headers, body=body)
            if answer.is_success:
                return json_object(answer.body or b"{}", path)
        except (HttpFailure, ServiceError) as error:
            raise ResourceError(
                f"the Ray cluster at {self.address} does not answer {method} {path}: {error}",
                hint="Expected its dashboard there. If `ray status` on the head node shows a running "
                "cluster, run `pip install 'ray[default]'` there and restart the cluster: plain `ray` has "
                "no dashboard",
            ) from error
        raise self._refused(answer, path)

    def _refused(self, answer: Answer, path: str) -> ConfigError | NotFoundError | ResourceError:
        said = " ".join(answer.body[:2000].decode(errors="replace").split())[:500]
        if answer.status in (401, 403):
            return ConfigError(
                f"the Ray cluster at {self.address} wants another token ({answer.status})",
                hint="Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, for `stoker serve` as on the cluster",
            )
        if answer.status == 404:
            return NotFoundError(f"the Ray cluster at {self.address} has nothing at {path}: {said}")
        return ResourceError(f"the Ray cluster at {self.address} refuses {path} ({answer.status}): {said}")


def ray_token(environment: Mapping[str, str]) -> str | None:
    """Return the token for a Ray cluster, from where Ray itself takes it; None: it is not set."""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    home = Path(environment.get("HOME", "/nonexistent"))
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------------
# The worker's side.


_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Between two requests about a submission."""
SILENT_S = 60.0
"""How long the cluster may not answer before an attempt counts as lost."""
KILLED = -9
"""Exit status of an attempt whose process ended without one: it is lost, and tried again."""
_LIVE = ("PENDING", "RUNNING")
_SIGNALLED = 128


class RayExecutor:
    """Runs processes of jobs on a cluster.

    Args:
        target: Which, and how.
        jobs: Its job API.
        local: Keeps two workers of this machine from one job.
    """

    def __init__(self, target: RayTarget, jobs: RayJobs, local: LocalExecutor) -> None:
        self._target, self._jobs, self._local = target, jobs, local

    def lock(self, folder: JobFolder) -> RayJobLock:
        """See `Executor.lock`; a submission that still runs is not ended, but taken over by `start`.

        Raises:
            StalledError: The cluster does not say whether an earlier submission still runs.
        """
        lock = self._local.lock(folder)
        try:
            running = self._running(read_submission(folder))
        except (ResourceError, ConfigError) as error:
            lock.release()
            raise StalledError(
                f"{folder.submission} names {read_submission(folder)}, which may still run: "
                f"{error.problem.fact}",
                hint=". ".join(filter(None, (error.problem.hint, "The job is tried again later"))),
            ) from error
        except BaseException:
            lock.release()
            raise
        return RayJobLock(lock, folder, self._jobs, self._target, running=running)

    def _running(self, submission: str) -> str | None:
        if not submission:
            return None
        try:
            status = self._jobs.info(submission).get("status")
        except NotFoundError:  # it never arrived, or its cluster ended, and the job's processes with it
            return None
        return submission if status in _LIVE else None


def check_cluster(address: str, environment: Mapping[str, str]) -> None:
    """Check that a cluster answers and takes the token of `environment`.

    Raises:
        ConfigError, ResourceError: As `RayJobs.submit`.
    """
    RayJobs(address, ray_token(environment)).check()


def ray_executor(target: RayTarget, environment: Mapping[str, str], local: LocalExecutor) -> RayExecutor:
    """Return the executor of jobs on a cluster, with the token of `environment`."""
    return RayExecutor(target, RayJobs(target.address, ray_token(environment)), local)


class RayJobLock:
    """The right to submit a job; `RayExecutor.lock` makes it. It lasts until `release`, after the end."""

    def __init__(
        self,
        lock: LocalJobLock,
        folder: JobFolder,
        jobs: RayJobs,
        target: RayTarget,
        *,
        running: str | None,
    ) -> None:
        self._lock, self._folder, self._jobs, self._target = lock, folder, jobs, target
        self._running = running

    def start(self, program: JobProgram, limits: JobLimits) -> RayProcess:
        """See `JobLock.start`.

        Raises:
            ResourceError: The cluster does not answer, or refuses.
        """
        if self._running is not None:
            _log.info("%s still runs on the cluster and is taken over", self._running)
            return RayProcess(self._jobs, self._folder, self._running, limits)
        told = JobFile.read(self._folder.job_file)
        submission = f"stoker-{told.id}-{told.attempt}-{secrets.token_hex(4)}"
        with replace_atomically(self._folder.submission) as temporary:
            temporary.write_text(submission)
        node = [self._target.python, "-m", "stoker.extras.ray.jobs"]
        words = [*node, str(self._folder.path), submission, program.target]
        try:
            self._jobs.submit(submission, shlex.join(words), gpus=self._target.gpus)
        except ConfigError as error:  # another token may be set for the next attempt
            raise ResourceError(error.problem.fact, hint=error.problem.hint) from error
        return RayProcess(self._jobs, self._folder, submission, limits)

    def release(self) -> None:
        """See `JobLock.release`."""
        self._lock.release()


class RayProcess:
    """A submission; a thread asks about it, so that no call waits for the cluster."""

    def __init__(self, jobs: RayJobs, folder: JobFolder, submission: str, limits: JobLimits) -> None:
        self.submission = submission
        self._jobs, self._folder, self._limits = jobs, folder, limits
        self._started = time.monotonic()
        self._code: int | None = None
        self._kill = threading.Event()
        Pool(1, "stoker-ray-job").submit(self._follow)

    def poll(self) -> int | None:
        """See `JobProcess.poll`."""
        return self._code

    def exceeded(self) -> str:
        """See `JobProcess.exceeded`: time alone, since memory is on another machine."""
        return self._limits.late(time.monotonic() - self._started)

    def terminate(self) -> None:
        """See `JobProcess.terminate`."""
        with suppress(OSError), replace_atomically(self._folder.stop) as temporary:
            temporary.write_text(self.submission)

    def kill(self) -> None:
        """See `JobProcess.kill`."""
        self._kill.set()

    def _follow(self) -> None:
        answered, asked = time.monotonic(), 0.0
        while self._code is None and not is_exiting():
            try:
                if self._kill.is_set() and time.monotonic() - asked > SILENT_S / 4:
                    asked = time.monotonic()
                    self._jobs.stop(self.submission)
                self._code = self._exit_status(self._jobs.info(self.submission))
                answered = time.monotonic()
            except NotFoundError:
                self._code = KILLED
            except (ResourceError, ConfigError) as error:
                if time.monotonic() - answered > SILENT_S:
                    _log.error("%s; the attempt counts as lost", error)
                    self._code = KILLED
            if self._code is None:
                self._kill.wait(LOOK_S) if not self._kill.is_set() else time.sleep(LOOK_S)

    def _exit_status(self, found: dict[str, object]) -> int | None:
        """Return the exit status, if the submission has ended."""
        status, code = found.get("status"), found.get("driver_exit_code")
        if status in _LIVE:
            return None
        if status == "SUCCEEDED":
            return 0
        if status != "FAILED" or not isinstance(code, int) or code in (OVERTAKEN, 0):
            return KILLED
        if code == UNSEEN:
            self._note(
                f"the node on which Ray ran this job does not see {self._folder.path}. Expected the state "
                "folder (--state-dir) on storage that service and cluster share, at the same path"
            )
        return code if 0 < code < _SIGNALLED else KILLED

    def _note(self, text: str) -> None:
        with suppress(OSError), self._folder.log.open("a") as file:
            file.write(f"{text}\n")


# ----------------------------------------------------------------------------------------------------------
# What runs on the node: `python -m stoker.extras.ray.jobs FOLDER SUBMISSION TARGET`.
#
# It starts the job's own process, ties it to itself, and reads the job's folder, which worker and node share:
# is this submission still the current one, and should it stop? So a job never runs in parallel to a newer
# attempt, even where the two cannot reach each other. It also has all the time for a checkpoint that its
# worker allows; Ray's own way to stop a job leaves it three seconds.


NODE_LOOK_S = 0.25
SIGHT_S = 30.0
"""How long a file that the worker has just written may take to be seen on another node."""
UNSEEN = 76
"""Exit status where this node does not see the job's folder as the worker does."""
OVERTAKEN = 77
"""Exit status where another submission took the place of this one."""


def read_submission(folder: JobFolder) -> str:
    """Return the submission that should run; empty when none is named, or the folder cannot be read."""
    try:
        return folder.submission.read_text()
    except OSError:
        return ""


def is_stop_requested(folder: JobFolder, submission: str) -> bool:
    """Return True if the submission should make its checkpoint and end."""
    try:
        return folder.stop.read_text() == submission
    except OSError:
        return False


def main(words: Sequence[str]) -> int:
    """Run the job; return its exit status, 128 and the number of the signal where one ended it."""
    folder, submission, target = JobFolder(Path(words[0])), words[1], words[2]
    until = time.monotonic() + SIGHT_S
    while (found := read_submission(folder)) != submission:
        if found or time.monotonic() > until:
            what = f"another submission, {found}," if found else "nothing"
            sys.stderr.write(
                f"{os.uname().nodename}: {folder.submission} names {what} and not {submission}\n"
            )
            return OVERTAKEN if found else UNSEEN
        time.sleep(NODE_LOOK_S)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    sign = os.open(folder.path / "ray-process", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    set_start_method("spawn")  # one child in all: nothing to import ahead of need
    return _watch(start_job(folder, JobProgram(target=target), sign), folder, submission, stops)


def _watch(child: Child, folder: JobFolder, submission: str, stops: list[int]) -> int:
    told = False
    while not child.wait(NODE_LOOK_S):
        if read_submission(folder) not in (submission, ""):  # empty: the folder cannot be read at the moment
            child.stop(0.0)
            return OVERTAKEN
        if not told and (stops or is_stop_requested(folder, submission)):
            told = True
            child.terminate()
    code = None if child.exit is None else child.exit.code
    assert code is not None
    return code if code >= 0 else _SIGNALLED - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
