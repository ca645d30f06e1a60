"""One process below a run: a child with a channel of frames and a log. Nothing here waits for it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.precompute.arena import Layout
from stoker.runtime.processes.child import TORCH, Child, Drain, Output
from stoker.runtime.processes.wire import Channel, Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What every reader of a run is started with."""

    payload: bytes
    """The source, pickled once."""
    frame: Frame
    """The rest of the start frame."""
    layout: Layout
    """Of each reader's arena."""
    logs: Path
    """Folder of the readers' output and stack dumps."""
    drain: Drain
    """Takes in their output."""
    modules: tuple[str, ...]
    """What they find imported."""


class LoggedChild(Child):
    """A `Child` that talks in frames, and whose output goes to a file.

    Args:
        target: What it runs, as `module:name`.
        shared: Descriptors of memory that both map; they stay the caller's.
        what: It in words, as `a reader process`.
        log: Where standard output and error go, and the stacks that it wrote before its end.
        drain: Takes in its output.
        modules: What it finds imported.
        death_signal: What it gets when we die.

    Raises:
        ResourceError: No process or descriptor is left.
    """

    def __init__(  # noqa: PLR0913  all by name
        self,
        target: str,
        shared: Sequence[int],
        *,
        what: str,
        log: Path,
        drain: Drain,
        modules: tuple[str, ...] = TORCH,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log = log
        self._drain = drain
        self._logged = Output(log)
        try:
            super().__init__(
                target,
                what=what,
                shared=shared,
                output=self._logged,
                modules=modules,
                death_signal=death_signal,
            )
        except BaseException:
            self._logged.close(keep=False)
            raise
        self.channel = Channel(self.socket)
        self._drain.add(self._logged)

    def abandon(self) -> None:
        """Let everything go but what tells of its end, which may never come."""
        self.channel.close()
        self._drain.remove(self._logged)
        self._logged.close(keep=True)

    def discard(self, *, keep_log: bool) -> None:
        """Let all descriptors go."""
        self.abandon()
        self._logged.close(keep=keep_log)
        self.close()
