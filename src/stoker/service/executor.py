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
NO_ROOM = 74
"""The same of one that found the disk full: it goes on from its last checkpoint when there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a job may use."""

    memory_bytes: int | None = None
    """Memory of its own, all its processes together; pages of files that the system can drop do not count."""
    wall_s: float | None = None
    """How long one attempt may run; then it is stopped with a checkpoint and fails."""
    grace_s: float = 30.0
    """How long it may take to make its checkpoint when asked to stop, and to end after its last word."""
    quiet_s: float | None = 3600.0
    """How long it may say nothing at all; then it is taken to hang and is tried again."""
    devices: str | None = None
    """`CUDA_VISIBLE_DEVICES`; None: as the service itself, empty: none."""


class Run(Protocol):
    """One process of a job. No call waits for it."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. When it has ended, all of it has."""
        ...

    def exceeded(self) -> str:
        """Which of its limits it has passed, with figures; empty while none."""
        ...

    def terminate(self) -> None:
        """Ask it to make a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End it and every process it started."""
        ...


class Hold(Protocol):
    """The sole right to run a job's process; it passes to the process once that is started."""

    def start(self, command: Sequence[str], limits: Limits) -> Run:
        """Start `command`, its output going to the log of the job's folder.

        Raises:
            ResourceError: The system cannot start another process.
        """
        ...

    def release(self) -> None:
        """Let go of it; nothing to do after `start`."""
        ...


class Executor(Protocol):
    """Runs processes of jobs, never two of one job at once."""

    def hold(self, folder: JobFolder) -> Hold:
        """The right to run the job of a folder, after whatever is left of an earlier attempt has been ended.

        This is what keeps a job from running twice when a worker was declared dead and is not.

        Raises:
            StalledError: An earlier process of the job cannot be ended.
        """
        ...
