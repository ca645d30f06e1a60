"""Readers under supervision: hand out work, collect parcels, and never wait for a process.

One poll over sockets and pidfds, with the next deadline as its timeout. A reader past a deadline is asked for
its stack, killed, and replaced; the sample it was at gets one more try on another reader and is then set
aside. The caller encodes between polls, so a hang is noticed at the latest one encoder call late.
"""

from __future__ import annotations

import logging
import select
import time
from dataclasses import dataclass

from stoker.errors import ReaderError, ResourceError, SourceError
from stoker.precompute.fill import PartNames, SampleFault
from stoker.precompute.layout import Layout
from stoker.precompute.ledger import Ledger
from stoker.precompute.parcel import Assembly, Parcel, ReaderView
from stoker.precompute.queue import GroupWork, WorkQueue
from stoker.precompute.settings import Deadlines
from stoker.precompute.wire import Frame
from stoker.precompute.worker import GRACE_S, Launch, Loss, Worker
from stoker.schema import Sample

log = logging.getLogger("stoker")

_MAX_START_FAILURES = 3
_MAX_LOSSES_IN_A_ROW = 16
_ITEMS_AHEAD = 2
_CLOSE_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Incoming:
    """What a worker in mode `pieces` has sent of the group in progress."""

    assembly: Assembly
    waiting: list[Frame]
    unreleased: int = 0


class Supervisor:
    """A `Feed` over reader processes."""

    def __init__(
        self, launch: Launch, queue: WorkQueue, ledger: Ledger, *, deadlines: Deadlines, parts: PartNames
    ) -> None:
        self._launch = launch
        self._layout: Layout = launch.layout
        self._queue = queue
        self._ledger = ledger
        self._deadlines = deadlines
        self._parts = parts
        self._workers: dict[int, Worker] = {}
        self._ending: list[Worker] = []
        self._incoming: dict[int, _Incoming] = {}
        self._ready: list[Parcel] = []
        self._spawned = 0
        self._wanted = 0
        self._start_failures = 0
        self._losses_in_a_row = 0
        self._abandoned: set[int] = set()
        self.losses = 0
        """Readers that died or were killed."""
        self.wake_fd = -1
        """A descriptor whose readiness ends a poll early (signals)."""

    @property
    def readers(self) -> int:
        """Readers that are wanted."""
        return self._wanted

    @property
    def finished(self) -> bool:
        """Every group has been delivered or given up."""
        return self._queue.finished and not self._ready

    @property
    def _works(self) -> bool:
        """Some reader has delivered something, so that the run can end without those that do not start."""
        return any(worker.delivering for worker in self._workers.values())

    @property
    def all_delivering(self) -> bool:
        """Every reader has delivered something, so that waiting is no longer for their start."""
        return all(worker.delivering for worker in self._workers.values())

    def start(self, readers: int) -> None:
        """Start that many reader processes; they get work from the first `poll` on.

        Raises:
            ResourceError: Not one can be started. Fewer than asked for are said, and do.
        """
        self._wanted += readers
        for _ in range(readers):
            self._spawn()

    def _spawn(self) -> None:
        self._spawned += 1
        try:
            self._workers[self._spawned] = Worker(self._spawned, self._launch)
        except ResourceError as error:
            if not self._workers:
                raise
            self._do_without(str(error))

    def _do_without(self, why: str) -> None:
        """Go on with one reader fewer: those that work are enough to end the run."""
        self._wanted -= 1
        log.warning("another reader cannot be started; going on with %d: %s", self._wanted, why)

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
            if self._ready or self.finished or time.monotonic() >= limit or self._woken():
                parcels, self._ready = self._ready, []
                return parcels

    def release(self, parcel: Parcel) -> None:
        """See `Feed.release`."""
        self._queue_done(parcel)
        number, slot = parcel.origin
        worker = self._workers.get(number)
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

    def _queue_done(self, parcel: Parcel) -> None:
        if parcel.last:
            self._queue.done()

    def views(self) -> list[ReaderView]:
        """See `Feed.views`."""
        now = time.monotonic_ns()
        looks = [(number, worker.beat.look()) for number, worker in sorted(self._workers.items())]
        return [
            ReaderView(
                number=n, stage=b.stage, sample=b.number, seconds=max(0, now - (b.time_ns or now)) / 1e9
            )
            for n, b in looks
        ]

    def close(self) -> None:
        """End every reader: close its socket, kill it, and wait a moment for it to vanish."""
        workers = [*self._workers.values(), *self._ending]
        self._workers, self._ending = {}, []
        for worker in workers:
            if worker.state not in ("killed", "reaped"):
                worker.kill()
        limit = time.monotonic() + _CLOSE_S
        for worker in workers:
            poller = select.poll()
            poller.register(worker.pidfd, select.POLLIN)
            while not worker.reap() and time.monotonic() < limit:
                poller.poll(max(1, int((limit - time.monotonic()) * 1000)))
            if not worker.reap():
                log.warning("reader %d (process %d) cannot be ended; left behind", worker.number, worker.pid)
            worker.close()
        self._ready = []

    def _woken(self) -> bool:
        return self.wake_fd >= 0 and bool(select.select([self.wake_fd], [], [], 0)[0])

    def _next_deadline(self) -> float:
        dues = [worker.deadline(self._deadlines, self._layout.slots) for worker in self._workers.values()]
        dues += [
            worker.deadline(self._deadlines, self._layout.slots)
            for worker in self._ending
            if worker.number not in self._abandoned
        ]
        return min((due for due in dues if due is not None), default=float("inf"))

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        for worker in self._workers.values():
            if not worker.channel.closed:
                poller.register(
                    worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.backlog else 0)
                )
        for worker in (*self._workers.values(), *self._ending):
            poller.register(worker.pidfd, select.POLLIN)
        if self.wake_fd >= 0:
            poller.register(self.wake_fd, select.POLLIN)
        poller.poll(min(timeout_s, 3600.0) * 1000 + (1 if timeout_s > 0 else 0))

    def _take_in(self) -> None:
        """Read and write what the sockets allow; notice processes that have ended."""
        for worker in list(self._workers.values()):
            ended = worker.reap()  # looked at first: what it sent before its end is in the socket by then
            if worker.channel.flush():
                worker.touch()
            for frame in worker.channel.receive():
                worker.touch()
                self._frame(worker, frame)
            if ended:
                self._lose(worker, worker.death())
        for worker in list(self._ending):
            if worker.reap():
                self._ending.remove(worker)
                self._abandoned.discard(worker.number)
                worker.close()

    def _enforce(self, now: float) -> None:
        for worker in list(self._workers.values()):
            loss = worker.advance(self._deadlines, self._layout.slots, now)
            if loss is not None:
                self._ending.append(worker)
                self._lose(worker, loss)
        for worker in self._ending:
            due = worker.deadline(self._deadlines, self._layout.slots)
            if due is not None and now >= due and worker.number not in self._abandoned:
                self._abandon(worker)

    def _abandon(self, worker: Worker) -> None:
        self._abandoned.add(worker.number)
        log.warning(
            "reader %d (process %d) was not gone %g s after SIGKILL", worker.number, worker.pid, GRACE_S
        )
        if len(self._abandoned) > max(2, self._wanted):
            raise ReaderError(
                f"{len(self._abandoned)} readers cannot be killed: they wait in the kernel for storage that "
                f"does not answer. Last at {worker.log.name}. When it answers again, the same command resumes"
            )

    def _frame(self, worker: Worker, frame: Frame) -> None:
        kind = frame["kind"]
        if kind == "fatal":
            worker.failed = True
            said = f"the source cannot be loaded in a reader process:\n{frame['error'].rstrip()}"
            if not self._works:
                raise SourceError(f"{said}\nMend that, or read in this process with readers=0")
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
        if len(faults) < sum(not self._ledger.is_bad(number) for number in work.numbers):
            self._ledger.answered(work.part)
            self._losses_in_a_row = 0
            worker.delivering = True
        again = [self._ledger.fault(fault) for fault in faults]
        if any(again) or not self._queue.wanted(work):
            if any(again):
                self._queue.give_back(work, avoid=worker.number)
            elif last:
                self._queue.done()
            if slot >= 0:
                worker.free(slot)
            return False
        origin = (worker.number, slot)
        owned = self._layout.mode == "pieces"
        self._ready.append(
            Parcel(work=work, arrays=arrays, start=frame["start"], last=last, owned=owned, origin=origin)
        )
        return True

    def _lose(self, worker: Worker, loss: Loss) -> None:
        """Take back what a lost reader owes, note who is to blame, and start a replacement."""
        del self._workers[worker.number]
        self._incoming.pop(worker.number, None)
        worker.failed = True
        if worker.state == "reaped":
            worker.close()
        self.losses += 1
        self._losses_in_a_row += 1
        log.warning("%s; stack and output: %s", loss.cause, worker.log)
        if loss.stage == "start" and self._fail_start(worker, loss):
            return
        if self._losses_in_a_row > _MAX_LOSSES_IN_A_ROW + 2 * self._wanted:
            raise ReaderError(
                f"{self._losses_in_a_row} readers were lost in a row without a sample read. "
                f"The last: {loss.cause}. What is stored stays; mend the cause and run the same command again"
            )
        self._queue.leave(worker.number)
        self._blame(worker, loss)
        self._spawn()

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
        tail = worker.tail()
        raise ReaderError(
            f"{self._start_failures} readers in a row could not start. The last: {loss.cause}"
            + (f"\n{tail}" if tail else "")
            + f"\nOutput and stack: {worker.log}. Reading in this process (readers=0) may show more"
        )

    def _blame(self, worker: Worker, loss: Loss) -> None:
        works = list(worker.work.values())
        for work in reversed(works):
            if loss.number not in work.numbers:
                self._queue.give_back(work)
                continue
            path = self._parts.name(loss.number)
            stage = loss.stage if loss.stage in ("open", "read") else "read"
            fault = SampleFault(
                number=loss.number,
                stage=stage,
                error=f"{path}: {loss.cause}"[:600],
                kind="transient",
                retry=True,
            )
            self._ledger.fault(fault)
            self._queue.give_back(work, avoid=worker.number)
            if self._ledger.part_is_dead(work.part, loss.number):
                count = self._ledger.give_up(self._queue.part_numbers(work.part), fault)
                log.warning("%s does not answer: its other %d samples are quarantined as well", path, count)

    def _hand_out(self) -> None:
        """Give readers work: one item in hand and one ahead."""
        live = sum(worker.state == "ready" for worker in self._workers.values())
        for worker in self._workers.values():
            while worker.state == "ready" and len(worker.items) < _ITEMS_AHEAD:
                works: list[GroupWork] = self._queue.take(worker.number, live)
                if not works:
                    break
                worker.hand_out(works, self._queue.absent)
