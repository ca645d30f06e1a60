"""How a job's process is started, watched and ended: the seam between a worker and a machine.

A worker asks an `Executor` and knows nothing else about processes. `local.py` runs them on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.service.folders import JobFolder

STOPPED = 75
"""Exit status of a job that was asked to stop and has made a checkpoint; 0 is done, anything else failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a job may use."""

    memory_bytes: int | None = None
    """Memory of its own, all its processes together; pages of files that the system can drop do not count."""
    wall_s: float | None = None
    """How long one attempt may run; then it is stopped with a checkpoint and fails."""
    grace_s: float = 30.0
    """How long it may take to make its checkpoint when asked to stop."""
    devices: str | None = None
    """`CUDA_VISIBLE_DEVICES`; None: as the service itself, empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job's process ended."""

    code: int
    """Exit status; negative: the signal that ended it."""
    reason: str = ""
    """Why the executor ended it, where it did: a limit, with figures."""


class Run(Protocol):
    """One process of a job. None of the calls waits."""

    def poll(self) -> Ended | None:
        """How it ended; None while it runs. Limits are looked at here."""
        ...

    def terminate(self) -> None:
        """Ask it to make a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End it and every process it started."""
        ...


class Executor(Protocol):
    """Starts processes of jobs."""

    def start(self, folder: JobFolder, command: Sequence[str], limits: Limits, *, attempt: int) -> Run:
        """Start `command` for the job of a folder, after whatever is left of an earlier attempt has ended.

        Standard output and error go to the folder's log. No two processes of one job ever run at once, also
        when the worker of the earlier one was declared dead but is not.

        Raises:
            StalledError: An earlier process of the job cannot be ended.
            ResourceError: The system cannot start another process.
        """
        ...
