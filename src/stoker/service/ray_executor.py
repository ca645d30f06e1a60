"""Jobs on a Ray cluster that is there already: the `Executor` of `stoker serve --executor ray`.

An attempt is one submission of Ray's job API, named before it is sent, so that sending it twice makes one.
The job's folder says which submission is wanted; `ray_child.py` on the node looks there. A worker that dies
leaves the submission running: who has the job next finds it named there and goes on watching it. The database
stays where the truth is: jobs of Ray end with their cluster.
"""

from __future__ import annotations

import logging
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from stoker.errors import ConfigError, NotFound, ResourceError, StalledError
from stoker.runtime.files import replacing
from stoker.service.executor import Limits
from stoker.service.folders import JobFolder
from stoker.service.job_file import JobFile
from stoker.service.local import LocalExecutor, LocalHold
from stoker.service.ray_child import OVERTAKEN, UNSEEN, wanted
from stoker.service.ray_client import RayJobs, RayTarget
from stoker.units import format_seconds

_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Between two looks at a submission."""
SILENT_S = 60.0
"""How long the cluster may not answer before an attempt counts as lost."""
KILLED = -9
"""What an attempt ends with whose process is gone without a status: it is lost, and tried again."""
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

    def hold(self, folder: JobFolder) -> RayHold:
        """See `Executor.hold`; a submission that still runs is not ended, but taken over by `start`.

        Raises:
            StalledError: Whether an earlier submission still runs cannot be told, as the cluster is silent.
        """
        lock = self._local.hold(folder)
        try:
            running = self._running(wanted(folder))
        except (ResourceError, ConfigError) as error:
            lock.release()
            raise StalledError(
                f"{folder.submission} names {wanted(folder)}, and whether that still runs cannot be told: "
                f"{error}. The job is tried again later"
            ) from error
        except BaseException:
            lock.release()
            raise
        return RayHold(lock, folder, self._jobs, self._target, running=running)

    def _running(self, submission: str) -> str | None:
        if not submission:
            return None
        try:
            status = self._jobs.look(submission).get("status")
        except NotFound:  # it never came there, or its cluster is gone, and the job's processes with it
            return None
        return submission if status in _LIVE else None


class RayHold:
    """The right to submit a job; `RayExecutor.hold` makes it. It lasts until `release`, after the end."""

    def __init__(
        self,
        lock: LocalHold,
        folder: JobFolder,
        jobs: RayJobs,
        target: RayTarget,
        *,
        running: str | None,
    ) -> None:
        self._lock, self._folder, self._jobs, self._target = lock, folder, jobs, target
        self._running = running

    def start(self, command: Sequence[str], limits: Limits) -> RayRun:
        """See `Hold.start`; the command's first word is replaced by the interpreter of the nodes.

        Raises:
            ResourceError: The cluster does not answer, or refuses.
        """
        if self._running is not None:
            _log.info("%s still runs on the cluster and is taken over", self._running)
            return RayRun(self._jobs, self._folder, self._running, limits)
        told = JobFile.read(self._folder.job_file)
        submission = f"stoker-{told.id}-{told.attempt}-{secrets.token_hex(4)}"
        with replacing(self._folder.submission) as temporary:
            temporary.write_text(submission)
        python = self._target.python
        words = [python, "-m", "stoker.service.ray_child", str(self._folder.path), submission]
        entrypoint = shlex.join([*words, python, *command[1:]])
        try:
            self._jobs.submit(submission, entrypoint, gpus=self._target.gpus)
        except ConfigError as error:  # another token may be set for the next attempt
            raise ResourceError(str(error)) from error
        return RayRun(self._jobs, self._folder, submission, limits)

    def release(self) -> None:
        """See `Hold.release`."""
        self._lock.release()


class RayRun:
    """A submission; a thread looks at it, so that no call waits for the cluster."""

    def __init__(self, jobs: RayJobs, folder: JobFolder, submission: str, limits: Limits) -> None:
        self.submission = submission
        self._jobs, self._folder, self._limits = jobs, folder, limits
        self._started = time.monotonic()
        self._code: int | None = None
        self._kill = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="stoker-ray-job", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """See `Run.poll`."""
        return self._code

    def exceeded(self) -> str:
        """See `Run.exceeded`: time alone, since memory is on another machine."""
        ran_s, wall_s = time.monotonic() - self._started, self._limits.wall_s
        if wall_s is not None and ran_s > wall_s:
            return f"it ran for {format_seconds(ran_s)}; an attempt may take {format_seconds(wall_s)}"
        return ""

    def terminate(self) -> None:
        """See `Run.terminate`."""
        with suppress(OSError), replacing(self._folder.stop) as temporary:
            temporary.write_text(self.submission)

    def kill(self) -> None:
        """See `Run.kill`."""
        self._kill.set()

    def _follow(self) -> None:
        heard, asked = time.monotonic(), 0.0
        while self._code is None:
            try:
                if self._kill.is_set() and time.monotonic() - asked > SILENT_S / 4:
                    asked = time.monotonic()
                    self._jobs.stop(self.submission)
                self._code = self._judge(self._jobs.look(self.submission))
                heard = time.monotonic()
            except NotFound:
                self._code = KILLED
            except (ResourceError, ConfigError) as error:
                if time.monotonic() - heard > SILENT_S:
                    _log.error("%s; the attempt counts as lost", error)
                    self._code = KILLED
            if self._code is None:
                self._kill.wait(LOOK_S) if not self._kill.is_set() else time.sleep(LOOK_S)

    def _judge(self, found: dict[str, object]) -> int | None:
        """The exit status, if it has ended."""
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
