"""Readers under supervision: hand out work, collect parcels, and never wait for a process.

One poll over sockets and pidfds, with the next deadline as its timeout. A reader past a deadline is asked for
its stack, killed, and replaced; the sample it was at gets one more try on another reader and is then set
aside. The caller encodes between polls, so a hang is noticed at the latest one encoder call late.

What fails without end meets a limit: tries of a sample, samples of a part (`ledger.py`), starts of a reader,
readers lost in all (`limits.py`). What cannot even be killed is left behind, up to a number (`roster.py`).
"""

from __future__ import annotations

import logging
import select
import time
from dataclasses import dataclass

from stoker.errors import ReaderError, ResourceError, SourceError, arg
from stoker.precompute.fill import PartNames, SampleFault, passing_fault
from stoker.precompute.layout import Layout
from stoker.precompute.ledger import ATTEMPTS, Ledger
from stoker.precompute.limits import LossLimits
from stoker.precompute.parcel import Assembly, Parcel, ReaderView
from stoker.precompute.process import Launch
from stoker.precompute.queue import WorkQueue
from stoker.precompute.roster import Roster
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.worker import GRACE_S, Loss, Worker
from stoker.runtime.processes.wire import Frame
from stoker.schema import Sample

log = logging.getLogger("stoker")

_MAX_START_FAILURES = 3
_ITEMS_AHEAD = 2


@dataclass(slots=True, kw_only=True)
class _Incoming:
    """What a worker in mode `pieces` has sent of the group in progress."""

    assembly: Assembly
    waiting: list[Frame]
    unreleased: int = 0


class Supervisor:
    """A `Feed` over reader processes."""

    def __init__(
        self,
        launch: Launch,
        queue: WorkQueue,
        ledger: Ledger,
        *,
        settings: PrecomputeSettings,
        parts: PartNames,
    ) -> None:
        self._layout: Layout = launch.layout
        self._queue = queue
        self._ledger = ledger
        self._deadlines = settings.deadlines
        self._limits = LossLimits(settings.max_quarantined)
        self._parts = parts
        self._roster = Roster(launch)
        self._incoming: dict[int, _Incoming] = {}
        self._ready: list[Parcel] = []
        self._start_failures = 0
        self.given_up = False
        """A reader could not be started, and the run goes on without it."""
        self.wake_fd = -1
        """A descriptor whose readiness ends a poll early (signals)."""

    @property
    def readers(self) -> int:
        """Readers that are wanted."""
        return self._roster.wanted

    @property
    def idle(self) -> int:
        """Readers that cannot go on because the caller has not taken what they read."""
        return sum(worker.held >= self._layout.slots for worker in self._roster.working.values())

    @property
    def losses(self) -> int:
        """Readers that died or were killed."""
        return self._limits.losses

    @property
    def abandoned(self) -> int:
        """Readers that could not be killed in time."""
        return self._roster.abandoned_count

    @property
    def finished(self) -> bool:
        """Every group has been delivered or given up."""
        return self._queue.finished and not self._ready

    @property
    def _works(self) -> bool:
        """Some reader has delivered something, so that the run can end without those that do not start."""
        return any(worker.delivering for worker in self._roster.working.values())

    @property
    def all_delivering(self) -> bool:
        """Every reader has delivered something, so that waiting is no longer for their start."""
        return self._roster.all_delivering

    def start(self, readers: int) -> None:
        """Put that many more readers to work, parked ones first; they get it from the next `poll` on.

        Raises:
            ResourceError: Not one can be started. Fewer than asked for are said, and do.
        """
        self._roster.wanted += readers
        for _ in range(readers):
            self._add()

    def park(self) -> None:
        """Give one reader no more work; what it has in hand it still delivers."""
        if worker := self._roster.park():
            self._queue.leave(worker.number)

    def _add(self) -> None:
        try:
            self._roster.add()
        except ResourceError as error:
            if not self._roster.working:
                raise
            self._do_without(str(error))

    def _do_without(self, why: str) -> None:
        """Go on with one reader fewer: those that work are enough to end the run."""
        self._roster.wanted -= 1
        self.given_up = True
        log.warning("another reader cannot be started; going on with %d: %s", self._roster.wanted, why)

    def _keep_spare(self, now: float) -> None:
        """Have a reader in reserve once one was lost, or the run goes on for more than a moment."""
        if self._limits.read and not self._queue.finished:
            self._roster.keep_spare(now, at_once=self.losses > 0)

    def poll(self, timeout_s: float) -> list[Parcel]:
        """See `Feed.poll`. Deadlines are enforced here, after what has arrived was taken in.

        Raises:
            ReaderError: Readers cannot start, or are lost one after another.
            SourceError: The source cannot be loaded in a reader; holds the first traceback.
        """
        self._hand_out()
        limit = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._wait(0.0 if self._ready else max(0.0, min(limit, self._next_deadline()) - now))
            self._take_in()
            self._enforce(time.monotonic())
            self._hand_out()
            self._keep_spare(now)
            if self._ready or self.finished or time.monotonic() >= limit or self._woken():
                parcels, self._ready = self._ready, []
                return parcels

    def release(self, parcel: Parcel) -> None:
        """See `Feed.release`."""
        if parcel.last:
            self._queue.done()
        number, slot = parcel.origin
        worker = self._roster.working.get(number)
        if worker is None:
            return
        if slot >= 0:
            worker.free(slot)
        incoming = self._incoming.get(number)
        if incoming is not None:
            incoming.unreleased -= 1
            frames, incoming.waiting = incoming.waiting, []
            for frame in frames:
                self._piece(worker, frame)

    def views(self) -> list[ReaderView]:
        """See `Feed.views`."""
        now = time.monotonic_ns()
        return [worker.view(now) for _, worker in sorted(self._roster.working.items())]

    def close(self) -> None:
        """End every reader: close its socket, kill it, and wait a moment for it to vanish."""
        self._roster.close()
        self._ready = []

    def _woken(self) -> bool:
        return self.wake_fd >= 0 and bool(select.select([self.wake_fd], [], [], 0)[0])

    def _next_deadline(self) -> float:
        watched = [*self._roster.present, *self._roster.ending]
        dues = [worker.deadline(self._deadlines, self._layout.slots) for worker in watched]
        return min((due for due in dues if due is not None), default=float("inf"))

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        for worker in self._roster.present:
            if not worker.channel.closed:
                poller.register(
                    worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.backlog else 0)
                )
        for worker in (*self._roster.present, *self._roster.doomed):
            poller.register(worker.process.pidfd, select.POLLIN)
        if self.wake_fd >= 0:
            poller.register(self.wake_fd, select.POLLIN)
        poller.poll(min(timeout_s, 3600.0) * 1000 + (1 if timeout_s > 0 else 0))

    def _take_in(self) -> None:
        """Read and write what the sockets allow; notice processes that have ended."""
        for worker in self._roster.present:
            ended = worker.reap()  # looked at first: what it sent before its end is in the socket by then
            if worker.channel.flush():
                worker.touch()
            try:
                for frame in worker.channel.receive():
                    worker.touch()
                    self._frame(worker, frame)
            except ReaderError as error:
                worker.dismiss(Loss(stage="wait", number=-1, cause=f"reader {worker.number}: {error}"))
            if ended:
                self._lose(worker, worker.death())
            elif worker.loss is not None:
                self._lose(worker, worker.loss)

    def _enforce(self, now: float) -> None:
        for worker in self._roster.present:
            loss = worker.advance(self._deadlines, self._layout.slots, now)
            if loss is not None:
                self._lose(worker, loss)
        for worker in self._roster.sweep(now):
            self._abandon(worker)
        lost = (worker.loss.number for worker in self._roster.ending if worker.loss is not None)
        self._queue.on_hold = frozenset(self._parts.index(number) for number in lost if number >= 0)

    def _abandon(self, worker: Worker) -> None:
        """Note a reader that SIGKILL does not end, and stop reading a part that holds a second one."""
        number = -1 if worker.loss is None else worker.loss.number
        where = f"{self._place(number)}{worker.process.kernel_view()}"
        log.warning(
            "reader %d was not gone %g s after SIGKILL and is left behind: %s", worker.number, GRACE_S, where
        )
        part = self._parts.index(number)
        if number >= 0 and self._ledger.part_holds_readers(part):
            cause = "readers stuck in it cannot be killed; no more of it is read"
            self._give_up(part, number, f"{self._parts.name(number)}: {cause}")
        self._roster.check_abandoned(where)

    def _place(self, number: int) -> str:
        """Path, sample and attempt, as a prefix; nothing for a reader that had no sample in hand."""
        if number < 0:
            return ""
        tries = self._ledger.attempts(number)
        return f"{self._parts.place(number)}: sample {number}, attempt {tries} of {ATTEMPTS}: "

    def _frame(self, worker: Worker, frame: Frame) -> None:
        kind = frame["kind"]
        if kind == "fatal":
            worker.failed = True
            said = f"the source cannot be loaded in a reader process:\n{frame['error'].rstrip()}"
            if not self._works:
                raise SourceError(f"{said}\nFix that, or read in this process with {arg('readers', 0)}")
            log.warning("reader %d: %s", worker.number, said)
            return
        if kind == "ready":
            worker.ready()
            self._start_failures = 0
            return
        worker.held += frame["slot"] >= 0
        if kind == "parcel":
            self._group(worker, frame, worker.arena.arrays(frame["slot"]))
        else:
            self._piece(worker, frame)

    def _piece(self, worker: Worker, frame: Frame) -> None:
        incoming = self._incoming.get(worker.number)
        if incoming is None:
            incoming = _Incoming(assembly=Assembly(self._layout), waiting=[])
            self._incoming[worker.number] = incoming
        if incoming.unreleased:  # one whole group in the caller's hands is enough; the reader's slots fill up
            incoming.waiting.append(frame)
            return
        for chunk in frame["chunks"]:
            incoming.assembly.add(worker.arena.slot(frame["slot"]), chunk)
        if frame["slot"] >= 0:
            worker.free(frame["slot"])
        if frame["last"]:
            arrays = incoming.assembly.finish()
            incoming.assembly = Assembly(self._layout)
            incoming.unreleased += self._group(worker, frame | {"start": 0}, arrays)

    def _group(self, worker: Worker, frame: Frame, arrays: Sample) -> bool:
        """Take in (part of) a group: pass it on, or have it read again; whether it was passed on."""
        key, slot, last = frame["key"], frame["slot"], frame["last"]
        work = worker.delivered(key) if last else worker.work.get(key)
        assert work is not None
        faults = [SampleFault(**fault) for fault in frame["faults"]]
        read = sum(not self._ledger.is_bad(number) for number in work.numbers) - len(faults)
        if read > 0:
            self._limits.delivered(read if last else 0)
            self._ledger.answered(work.part)
            worker.delivering = True
        again = [self._ledger.fault(fault) for fault in faults]
        if any(again) or not self._queue.wanted(work):
            if any(again):
                self._queue.give_back(work, avoid=worker.number)
            elif last:
                self._queue.done()
            if slot >= 0:
                worker.free(slot)
            if frame["start"]:
                self._ready.append(Parcel.end(work))
            return False
        origin = (worker.number, slot)
        owned = self._layout.mode == "pieces"
        self._ready.append(
            Parcel(work=work, arrays=arrays, start=frame["start"], last=last, owned=owned, origin=origin)
        )
        return True

    def _lose(self, worker: Worker, loss: Loss) -> None:
        """Take back what a lost reader owes, note who is to blame, and put another in its place."""
        spare = worker is self._roster.spare
        self._incoming.pop(worker.number, None)
        if self._layout.mode == "steps":
            self._ready += [Parcel.end(work) for work in worker.work.values()]
        worker.failed = True
        self._queue.leave(worker.number)
        self._blame(worker, loss)
        self._limits.lost(attempt=self._ledger.attempts(loss.number))
        said = f"{self._place(loss.number)}{loss.cause}"
        log.warning("%s; stack and output: %s", said, worker.process.log)
        worker.process.record(said)
        parked = worker.number in self._roster.parked
        self._roster.remove(worker)
        if spare or parked or (loss.stage == "start" and self._fail_start(worker, loss)):
            return
        self._limits.check(self._roster.wanted, len(self._ledger.failures), said)
        self._add()

    def _fail_start(self, worker: Worker, loss: Loss) -> bool:
        """Count a reader that could not start; True when it is not to be replaced.

        Raises:
            ReaderError: Several in a row, and no other reader works.
        """
        self._start_failures += 1
        if self._start_failures < _MAX_START_FAILURES:
            return False
        if self._works:
            self._start_failures = 0
            self._do_without(loss.cause)
            return True
        tail = worker.process.tail()
        raise ReaderError(
            f"{self._start_failures} readers in a row could not start. The last: {loss.cause}"
            + (f"\n{tail}" if tail else "")
            + f"\nOutput and stack: {worker.process.log}. Reading in this process "
            f"({arg('readers', 0)}) may show more"
        )

    def _blame(self, worker: Worker, loss: Loss) -> None:
        """Give back what it owes; the sample in hand has failed once more, and its part may be dead."""
        for work in reversed(list(worker.work.values())):
            if loss.number not in work.numbers:
                self._queue.give_back(work)
                continue
            read = sum(not self._ledger.is_bad(n) for n in range(work.numbers.start, loss.number))
            if read:  # members before it, by this very process, though they are lost with it
                self._ledger.answered(work.part)
                self._limits.delivered(read)
            stage = loss.stage if loss.stage in ("open", "read") else "read"
            self._ledger.fault(passing_fault(loss.number, stage, loss.cause))
            self._queue.give_back(work, avoid=worker.number)
            if self._ledger.part_is_dead(work.part, loss.number):
                where = self._parts.place(loss.number)
                self._give_up(
                    work.part, loss.number, f"not tried, since reading failed at {where}: {loss.cause}"
                )

    def _give_up(self, part: int, number: int, error: str) -> None:
        """Set aside what is left of a part whose storage does not answer."""
        fault = passing_fault(number, "read", error)
        count = self._ledger.give_up(self._queue.part_numbers(part), fault)
        if count:
            name = self._parts.name(number)
            log.warning("%s does not answer: its other %d samples are quarantined as well", name, count)

    def _hand_out(self) -> None:
        """Give readers work: one item in hand and one ahead, unless another has none and few are left."""
        working = self._roster.active
        live = sum(worker.state == "ready" for worker in working)
        idle = sum(worker.state in ("starting", "ready") and not worker.items for worker in working)
        for worker in working:
            while worker.state == "ready" and len(worker.items) < _ITEMS_AHEAD:
                if worker.items and 0 < self._queue.untaken <= idle:
                    break
                works = self._queue.take(worker.number, live)
                if not works:
                    break
                idle -= not worker.items
                worker.hand_out(works, self._queue.absent)
