"""What is handed to whoever encodes: this process with its workers, or many of them elsewhere.

`engine.py` knows whose turn it is, what is missing, and what to do about what comes back; an `Engine` does
the work between. `here.py` is the one of this machine, `stoker.extras.ray.engine` that of a cluster.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.errors import Interrupted
from stoker.precompute.progress import ProgressSink
from stoker.precompute.settings import PrecomputeSettings
from stoker.runtime.locks import lock_holder
from stoker.sources.protocol import Source
from stoker.store import Failure, Folder
from stoker.store.folder import SampleLookup

# ----------------------------------------------------------------------------------------------------------
# SIGINT and SIGTERM during a run: the first asks for an orderly end, the second ends at once.


TOGETHER_S = 0.3
"""Signals this close are one request: one to a whole group reaches a child twice, by its guardian as well."""
_EXIT_INTERRUPTED = 130


def takes(number: signal.Signals) -> bool:
    """Return whether a call may handle a signal: not where it is ignored (a shell does so for SIGINT in its
    background), or handled by C code, whose handler Python cannot put back.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


class Interrupts:
    """Catches both signals while entered, in the main thread only; elsewhere it never fires.

    A signal that the program ignores stays ignored. `fd` becomes readable at the first signal, so that a poll
    ends at once. `patient`: a second signal changes nothing, where the sender repeats the first, and none is
    ignored.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self.fd = -1
        self.signal: signal.Signals | None = None
        """The first signal that arrived, or None."""
        self._previous: dict[signal.Signals, Any] = {}
        self._write_fd = -1
        self._since = 0.0
        self._raises = False

    @contextmanager
    def raising(self) -> Generator[None]:
        """Have a signal end what is done while entered, as a KeyboardInterrupt does.

        For what may take long, cannot look at `signal`, and leaves nothing half done. Code that catches
        every Exception, as reading samples does, lets it pass.

        Raises:
            Interrupted: One came.
        """
        try:
            try:
                self._raises = True
                if self.signal is not None:
                    raise KeyboardInterrupt
                yield
            finally:
                self._raises = False
        except KeyboardInterrupt:
            if self.signal is None:
                raise
            raise Interrupted(f"stopped by {self.signal.name}. Run it again to resume") from None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for number in (signal.SIGINT, signal.SIGTERM):
                if self._patient or takes(number):
                    self._previous[number] = signal.signal(number, self._arrived)
        return self

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if not self._patient and now - self._since > TOGETHER_S:
                os._exit(_EXIT_INTERRUPTED)  # sealed shards are whole whatever happens; workers die with us
            return
        self.signal, self._since = signal.Signals(number), now
        os.write(self._write_fd, b"x")
        if self._raises:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write_fd)
            self.fd = self._write_fd = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Samples to encode, and how."""

    source: Source
    encoder: Encoder | None
    folder: Folder
    """Where records go; its recipe says in which groups they are encoded."""
    settings: PrecomputeSettings
    missing: NDArray[np.int64]
    """Numbers of the samples, ascending."""
    interrupts: Interrupts
    """A signal ends the work early, with what is encoded sealed."""
    lasts_s: float = float("inf")
    """Time from the first group on after which the work ends early in the same way."""
    compare_first: bool = True
    """See `GroupEncoder`; False where the same process has done so for an earlier share."""
    same: SampleLookup | None = None
    """Records of sibling caches that samples may be recognized in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of a share."""

    finished: bool = True
    """False: a signal came first, or the time was up."""
    encoded: int = 0
    """Records that were encoded and handed to the store."""
    adopted: int = 0
    """Records of sibling caches that were stored for samples which were recognized."""
    encode_seconds: float = 0.0
    """Time inside the encoder, of all that there were."""
    workers: int = 0
    """Worker processes at the end."""
    lost_workers: int = 0
    abandoned_workers: int = 0
    failures: tuple[Failure, ...] = ()
    """Samples set aside meanwhile."""


Engine: TypeAlias = Callable[[Share, ProgressSink | None], Done]
"""Encodes a share, and returns when all of it is stored or set aside, a signal came, or time is up.

Raises:
    StokerError: The work cannot go on; what was encoded until then is stored.
"""


# ----------------------------------------------------------------------------------------------------------
# One process encodes a cache at a time; the others wait, and say for whom.
#
# The claim saves work, nothing more: shards of two processes never collide. So whoever has waited long for
# a holder that makes no progress simply goes on without it.


log = logging.getLogger("stoker")

POLL_S = 0.2
_SAY_EVERY_S = 30.0


def take_turn(
    folder: Folder, stack: ExitStack, interrupts: Interrupts, *, quiet_s: float, shared: bool = False
) -> bool:
    """Wait until nobody else encodes this cache; the claim is held until `stack` closes.

    Args:
        quiet_s: How long the holder may leave the folder unchanged before we go on beside it.
        shared: Hold it together with others that say so too: the ranks of a run.

    Returns:
        Whether we had to wait, so that the folder must be looked at again.
    """
    mark, changed, said = None, time.monotonic(), float("-inf")
    waited = False
    while interrupts.signal is None:
        with ExitStack() as attempt:
            if attempt.enter_context(folder.lock(shared=shared)):
                stack.push(attempt.pop_all())
                return waited
        waited = True
        now, present = time.monotonic(), folder_mark(folder.path)
        if present != mark:
            mark, changed = present, now
        if now - said > _SAY_EVERY_S:
            said = now
            log.warning(
                "%s is being encoded by %s; waiting for it", folder.path, lock_holder(folder.path, "encode")
            )
        if now - changed > quiet_s:
            other = lock_holder(folder.path, "encode")
            log.warning("%s did nothing for %g s; encoding beside it", other, quiet_s)
            return True
        select.select([interrupts.fd] if interrupts.fd >= 0 else [], [], [], POLL_S)
    return waited


def folder_mark(path: Path) -> tuple[int, int]:
    """Files in a folder and their bytes: a holder that writes changes it, in the open shard as well."""
    sizes: list[int] = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                sizes.append(entry.stat(follow_symlinks=False).st_size)
            except FileNotFoundError:  # renamed or removed in between, which is progress
                sizes.append(-1)
    return len(sizes), sum(sizes)
