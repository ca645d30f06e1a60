"""What a Ray cluster runs for a job: `python -m stoker.extras.ray.job_child FOLDER SUBMISSION COMMAND...`.

It starts the job's own process, ties it to itself, and looks into the job's folder, which worker and node
share: is this submission still the one that is wanted, and has it been asked to stop? So a job never goes on
beside a newer attempt, even where the two cannot hear each other, and has all the time for a checkpoint that
its worker allows; Ray's own way to stop a job leaves it three seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.service import confine
from stoker.service.folders import JobFolder

LOOK_S = 0.25
SIGHT_S = 30.0
"""How long what the worker has just written may take to be seen on another node."""
UNSEEN = 76
"""Exit status where this node does not see the job's folder as the worker does."""
OVERTAKEN = 77
"""Exit status where another submission took the place of this one."""
_SIGNALLED = 128
_CONFINE = str(confine.__file__)


def wanted(folder: JobFolder) -> str:
    """The submission that is to run; empty when there is none, or the folder cannot be seen."""
    try:
        return folder.submission.read_text()
    except OSError:
        return ""


def asked_to_stop(folder: JobFolder, submission: str) -> bool:
    """Whether that submission is to make its checkpoint and end."""
    try:
        return folder.stop.read_text() == submission
    except OSError:
        return False


def main(words: Sequence[str]) -> int:
    """Run the job; its exit status, 128 and the number of the signal where one ended it."""
    folder, submission, command = JobFolder(Path(words[0])), words[1], words[2:]
    until = time.monotonic() + SIGHT_S
    while (found := wanted(folder)) != submission:
        if found or time.monotonic() > until:
            what = f"another submission, {found}," if found else "nothing"
            sys.stderr.write(
                f"{os.uname().nodename}: {folder.submission} names {what} and not {submission}\n"
            )
            return OVERTAKEN if found else UNSEEN
        time.sleep(LOOK_S)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(folder.log, flags, 0o600)
    sign = os.open(folder.path / "ray-process", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    confined = [sys.executable, "-I", "-S", _CONFINE, str(os.getpid()), str(sign), *command]
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    process = subprocess.Popen(
        confined,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[sign],
        start_new_session=True,
    )
    return _watch(process, folder, submission, stops)


def _watch(process: subprocess.Popen[bytes], folder: JobFolder, submission: str, stops: list[int]) -> int:
    told = False
    while (code := process.poll()) is None:
        if wanted(folder) not in (submission, ""):  # a folder out of sight for a moment is no other attempt
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(LOOK_S * 40)
            return OVERTAKEN
        if not told and (stops or asked_to_stop(folder, submission)):
            told = True
            process.terminate()
        time.sleep(LOOK_S)
    return code if code >= 0 else _SIGNALLED - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
