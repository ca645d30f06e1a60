"""The reader processes of a run: those at work, one in reserve, and those killed that are not yet gone.

A replacement must import what the source needs, seconds with torch; the reserve has done so already. It costs
a process without an arena, and is started once the others are at work or one was lost.
"""

from __future__ import annotations

import logging
import select
import time

from stoker.errors import ReaderError, ResourceError
from stoker.precompute.process import Launch
from stoker.precompute.worker import Worker

log = logging.getLogger("stoker")

_SPARE_TRIES = 3
_SPARE_AFTER_S = 2.0
_CLOSE_S = 1.0


class Roster:
    """Starts readers, and keeps account of them until the kernel says that they are gone."""

    def __init__(self, launch: Launch) -> None:
        self.wanted = 0
        """Readers that are to be at work."""
        self.working: dict[int, Worker] = {}
        """By number."""
        self.parked: set[int] = set()
        """Numbers of those that get no more work until one more is wanted."""
        self.spare: Worker | None = None
        """Idle; takes the place of the next that is lost."""
        self.ending: list[Worker] = []
        """Killed a moment ago."""
        self.abandoned: list[Worker] = []
        """Killed, and not gone within the grace: they wait in the kernel for storage that does not answer."""
        self.abandoned_count = 0
        """How many were ever abandoned, those that vanished later included."""
        self._launch = launch
        self._started = 0
        self._spare_tries = _SPARE_TRIES
        self._settled = float("inf")

    @property
    def present(self) -> list[Worker]:
        """Those that may send something."""
        return [*self.working.values(), *([self.spare] if self.spare else [])]

    @property
    def doomed(self) -> list[Worker]:
        """Those that will send nothing more."""
        return [*self.ending, *self.abandoned]

    def add(self) -> Worker:
        """Put one more to work: a parked one or the spare if there is one.

        Raises:
            ResourceError: The system starts no more, or has no memory for its arena.
        """
        if self.parked:
            return self.working[self.parked.pop()]
        worker = self.spare or self._start()
        self.spare = None
        try:
            worker.arena.reserve()
        except ResourceError:
            worker.dismiss()
            self.ending.append(worker)
            raise
        self.working[worker.number] = worker
        return worker

    @property
    def active(self) -> list[Worker]:
        """Those at work that are not parked."""
        return [worker for number, worker in self.working.items() if number not in self.parked]

    def park(self) -> Worker | None:
        """Do without the latest; None if there is but one."""
        active = self.active
        if len(active) < 2 or self.wanted < 2:
            return None
        self.wanted -= 1
        self.parked.add(active[-1].number)
        return active[-1]

    @property
    def all_delivering(self) -> bool:
        """Every reader has delivered something."""
        return all(worker.delivering for worker in self.working.values())

    def keep_spare(self, now: float, *, at_once: bool) -> None:
        """Have one in reserve when all have delivered for a while, or at once; not if that failed often."""
        self._settled = min(now, self._settled) if self.all_delivering else float("inf")
        wanted = at_once or now - self._settled > _SPARE_AFTER_S
        if not wanted or self.spare is not None or not self._spare_tries:
            return
        try:
            self.spare = self._start()
        except ResourceError as error:
            self._spare_tries = 0
            log.debug("no reader in reserve: %s", error)

    def _start(self) -> Worker:
        self._started += 1
        return Worker(self._started, self._launch)

    def remove(self, worker: Worker) -> None:
        """It was lost: close it, or see to it that it vanishes."""
        if worker is self.spare:
            self.spare = None
            self._spare_tries -= 1
        else:
            del self.working[worker.number]
            self.parked.discard(worker.number)
        if worker.state == "reaped":
            worker.close()
        else:
            self.ending.append(worker)

    def sweep(self, now: float) -> list[Worker]:
        """Collect what has vanished; what should have by `now` and did not is returned, as abandoned."""
        for group in (self.ending, self.abandoned):
            for worker in list(group):
                if worker.reap():
                    group.remove(worker)
                    worker.close()
        stuck = [worker for worker in self.ending if now >= worker.until]
        for worker in stuck:
            self.ending.remove(worker)
            worker.arena.close()
            worker.process.abandon()
        self.abandoned += stuck
        self.abandoned_count += len(stuck)
        return stuck

    def check_abandoned(self, where: str) -> None:
        """Go on while few are abandoned: each holds a process and its memory.

        Raises:
            ReaderError: More than there are readers, and more than two.
        """
        most = max(2, self.wanted)
        if len(self.abandoned) > most:
            raise ReaderError(
                f"{len(self.abandoned)} readers cannot be killed (at most {most} are left behind): they wait "
                f"in the kernel for storage that does not answer. The last: {where}. What is stored stays; "
                "when the storage answers again, run it again to resume"
            )

    def close(self) -> None:
        """End every reader: kill it, and wait a moment for all of them to vanish."""
        workers = [*self.present, *self.doomed]
        self.working, self.spare, self.ending, self.abandoned = {}, None, [], []
        for worker in workers:
            if worker.state not in ("killed", "reaped"):
                worker.dismiss()
        limit = time.monotonic() + _CLOSE_S
        for worker in workers:
            poller = select.poll()
            poller.register(worker.process.pidfd, select.POLLIN)
            while not worker.reap() and time.monotonic() < limit:
                poller.poll(max(1, int((limit - time.monotonic()) * 1000)))
            if not worker.reap():
                log.warning(
                    "reader %d (%s) cannot be ended; left behind", worker.number, worker.process.kernel_view()
                )
            worker.close()
        self._launch.drain.close()
