"""Workers under supervision: hand out work, collect batches, and never wait for a process.

One poll over sockets and pidfds, with the next deadline as its timeout. A worker past its timeout is asked
for its stack, killed, and replaced. The sample it was at gets one more try on another worker and is then set
aside. The caller hands batches on between polls.

What fails without end meets a limit: tries of a sample, samples of a part (`SampleLedger`), starts of a
worker, workers lost in all (`LossLimits`). What cannot even be killed is left behind, up to a number
(`WorkerRoster`).
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker.errors import ResourceError, SourceError, WorkerError, arg
from stoker.precompute.arena import Arena, Layout, LoadedBatch, ReadTask, private_arrays
from stoker.precompute.progress import WorkerView
from stoker.precompute.queue import ATTEMPTS, SampleLedger, WorkerMemory, WorkerPool, WorkQueue
from stoker.precompute.settings import PrecomputeSettings, Timeouts
from stoker.precompute.worker import PartNames, SampleFault, passing_fault
from stoker.runtime.processes.child import Drain, LoggedChild, ProgressTimeout
from stoker.runtime.processes.heartbeat import Heartbeat
from stoker.runtime.processes.wire import Frame
from stoker.schema import Sample

# ----------------------------------------------------------------------------------------------------------
# When losing workers must end: it is the machine or the code then, not the data.


_MAX_IN_A_ROW = 16
_LOST_OFTEN = 0.125
"""Workers may be lost on this part of the samples, or on what the settings allow to be quarantined."""


class LossLimits:
    """Compares the workers lost with the samples read.

    Args:
        max_quarantined: Fraction of the samples that the settings allow to fail.
    """

    def __init__(self, max_quarantined: float) -> None:
        self._lost_often = max(_LOST_OFTEN, max_quarantined)
        self._in_a_row = 0
        self.losses = 0
        """See `WorkerPool.losses`."""
        self.read = 0
        """Samples read."""

    def delivered(self, samples: int) -> None:
        """So many samples have been read, some of them a moment ago."""
        self.read += samples
        self._in_a_row = 0

    def lost(self, *, attempt: int) -> None:
        """Count one more lost worker, at that attempt at a sample; 0: it had none in hand."""
        self.losses += 1
        self._in_a_row += attempt < ATTEMPTS  # what failed once is expected to fail again

    def check(self, workers: int, quarantined: int, last: str) -> None:
        """Go on while losses stay within what bad samples explain.

        Args:
            workers: Those that are wanted.
            quarantined: Samples set aside by this run.
            last: The last loss in words.

        Raises:
            WorkerError: Too many in a row, or in all.
        """
        few = _MAX_IN_A_ROW + 2 * workers
        if self._in_a_row > few:
            what = f"{self._in_a_row} workers were lost in a row without a sample read"
        elif self.losses > few + ATTEMPTS * self._lost_often * (self.read + quarantined):
            what = (
                f"{self.losses} workers were lost while {self.read} samples were read, more than "
                f"{100 * self._lost_often:g} % of bad samples explains; a larger max_quarantined allows more"
            )
        else:
            return
        raise WorkerError(
            f"{what}. The last: {last}", hint="What is stored stays; fix the cause and run it again"
        )


# ----------------------------------------------------------------------------------------------------------
# One worker seen from outside: what it owes, whether it still moves, and what is done when it does not.


DUMP_S = 0.15
"""How long a worker past its timeout gets to write its stack before it is killed."""

GRACE_S = 5.0
"""How long a killed worker may take to vanish before it counts as abandoned, stuck in the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """A worker is gone, or as good as gone."""

    stage: str
    """Where it was."""
    number: int
    """The sample in hand, or -1."""
    cause: str
    """In words, with exit code or signal, or the timeout that passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLaunch:
    """Arguments with which every worker of a run is started."""

    payload: bytes
    """The source, pickled once."""
    frame: Frame
    """The rest of the start frame."""
    layout: Layout
    """Of each worker's arena."""
    logs: Path
    """Folder of the workers' output and stack dumps."""
    drain: Drain
    """Takes in their output."""
    modules: tuple[str, ...]
    """What they find imported."""


class Worker:
    """A worker process and the groups it owes.

    Raises:
        ResourceError: No process or descriptor is left.
    """

    def __init__(self, number: int, launch: WorkerLaunch) -> None:
        self.number = number
        self.state: Literal["starting", "ready", "dumping", "killed", "reaped"] = "starting"
        self.work: dict[int, ReadTask] = {}
        """Groups handed out and not yet delivered, by key, in the order of handing out."""
        self.items: deque[int] = deque()
        """The last key of each item handed out, oldest first."""
        self.held = 0
        """Filled slots that the caller has not given back."""
        self.delivering = False
        """It has read a sample."""
        self.failed = False
        """It was lost; its log is kept."""
        self.loss: WorkerLoss | None = None
        """Why it was killed."""
        self.until = 0.0
        """When it must have written its stack, or be gone; `time.monotonic()` seconds."""
        self.arena = _arena(launch.layout)
        log = launch.logs / f"worker-{number}-{os.getpid()}.txt"
        try:
            self.process = LoggedChild(
                "stoker.precompute.worker:serve",
                (self.arena.fd,),
                what="a worker process",
                log=log,
                drain=launch.drain,
                modules=launch.modules,
            )
        except BaseException:
            self.arena.close()
            raise
        self.channel, self.heartbeat = self.process.channel, self.process.heartbeat
        self.channel.send(launch.frame, launch.payload)
        self._loaded = False
        self._since = self._moved = time.monotonic()
        self._overdue: WorkerLoss | None = None
        self._last_beat = self.heartbeat.look()
        self._patience = ProgressTimeout(self.process.pid)

    def ready(self) -> None:
        """It has unpickled the source."""
        self._loaded = True
        if self.state == "starting":
            self.state = "ready"
        self.touch()

    def view(self, now_ns: int) -> WorkerView:
        """Return where it stands, by its own word; `now_ns` is `time.monotonic_ns()`."""
        beat = self.heartbeat.look()
        seconds = max(0, now_ns - (beat.time_ns or now_ns)) / 1e9
        return WorkerView(
            number=self.number,
            stage=beat.stage,
            sample=beat.number,
            seconds=seconds,
            processor_s=self.process.processor_s(),
        )

    def touch(self) -> None:
        """We have just heard from it or sent it something: its clock starts again."""
        self._since = time.monotonic()

    def hand_out(self, works: list[ReadTask], absent: Callable[[ReadTask], list[int]]) -> None:
        """Send an item and remember that it is owed; `absent` names the members that are zeros."""
        for work in works:
            self.work[work.key] = work
        self.items.append(works[-1].key)
        groups = [[work.key, work.numbers.start, len(work.numbers), absent(work)] for work in works]
        self.channel.send({"kind": "work", "groups": groups})
        self.touch()

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.held -= 1
        if self.state in ("starting", "ready", "dumping"):
            self.channel.send({"kind": "free", "slot": slot})
            self.touch()

    def delivered(self, key: int) -> ReadTask | None:
        """Note that a group has come completely and return it; None if it was not owed."""
        if self.items and self.items[0] == key:
            self.items.popleft()
        return self.work.pop(key, None)

    def deadline(self, timeouts: Timeouts, slots: int) -> float | None:
        """Return when to see if it has moved, in `time.monotonic()` seconds; None while it owes nothing."""
        if self.state in ("dumping", "killed"):
            return self.until
        clock = self._clock(timeouts, slots)
        return None if clock is None else self._patience.due(*clock)

    def _clock(self, timeouts: Timeouts, slots: int) -> tuple[float, float] | None:
        """Since when it has not moved, by its own word, and how long it may stay so."""
        beat = self.heartbeat.look()
        if beat != self._last_beat:  # a page that was scribbled over cannot have moved later than now
            self._last_beat = beat
            self._moved = min(beat.time_ns / 1e9, time.monotonic())
        if self.state == "starting":
            return self._since, timeouts.start
        if beat.stage in ("open", "read"):
            return self._moved, timeouts.open if beat.stage == "open" else timeouts.read
        if self.work and self.held < slots:  # it has work and room, and does not take it
            return max(self._moved, self._since), timeouts.read
        return None

    def advance(self, timeouts: Timeouts, slots: int, now: float) -> WorkerLoss | None:
        """Take the next step against a worker past its timeout; the loss, at the moment it is killed."""
        if self.state in ("starting", "ready"):
            clock = self._clock(timeouts, slots)
            if clock is None or now < self._patience.due(*clock):
                return None
            if self._patience.overdue(clock[1], now):
                self._ask_for_stacks(self._last_beat, clock[1], now)
        elif self.state == "dumping" and now >= self.until:
            # It had time to write its stacks. Only if the heartbeat did not move meanwhile is it stuck.
            if self.heartbeat.look() == self._last_beat and self._overdue is not None:
                return self.dismiss(self._overdue)
            self.state = "ready" if self._loaded else "starting"  # slow, not stuck
            self.touch()
        return None

    def _ask_for_stacks(self, beat: Heartbeat, limit_s: float, now: float) -> None:
        stage = "start" if self.state == "starting" else beat.stage
        where = "waiting for work that it was given" if stage == "wait" else f'in stage "{stage}"'
        self._overdue = WorkerLoss(
            stage=stage,
            number=beat.number if stage in ("open", "read") else -1,
            cause=f"worker {self.number} made no progress for {limit_s:g} s {where} "
            f"({self.process.kernel_view()})",
        )
        self.process.request_stacks()
        self.state, self.until = "dumping", now + DUMP_S

    def dismiss(self, loss: WorkerLoss | None = None) -> WorkerLoss | None:
        """Kill it, without waiting; what is left of its clock is the time to vanish."""
        self.process.kill()
        self.state, self.until, self.loss = "killed", time.monotonic() + GRACE_S, loss
        return loss

    def reap(self) -> bool:
        """Return True if the process has ended; its exit code is collected then."""
        if self.state != "reaped" and self.process.ended():
            self.state = "reaped"
        return self.state == "reaped"

    def death(self) -> WorkerLoss:
        """Return the loss of a process that ended on its own, with exit code or signal and last output."""
        beat = self.heartbeat.look()
        busy = beat.stage in ("open", "read")
        where = f' in stage "{beat.stage}"' if busy else ""
        tail = self.process.tail()
        cause = f"worker {self.number} (process {self.process.pid}) {self.process.exit}{where}"
        return WorkerLoss(
            stage=beat.stage,
            number=beat.number if busy else -1,
            cause=cause + (f"; its last output: {tail.splitlines()[-1][:200]}" if tail else ""),
        )

    def close(self) -> None:
        """Let descriptors go; the log stays if the worker was lost."""
        self.arena.close()
        self.process.discard(keep_log=self.failed)


def _arena(layout: Layout) -> Arena:
    try:
        return Arena.create(layout)
    except OSError as error:
        raise ResourceError(
            f"no descriptor or address is left for a worker's arena: {error}",
            hint="Use fewer workers, or raise the limits (ulimit -n, ulimit -v)",
        ) from error


# ----------------------------------------------------------------------------------------------------------
# The worker processes of a run: those at work, one in reserve, and those killed that are not yet gone.
#
# A replacement must import what the source needs, seconds with torch; the reserve has done so already. It
# costs a process without an arena, and is started once the others are at work or one was lost.


_SPARE_TRIES = 3
_SPARE_AFTER_S = 2.0
_CLOSE_S = 1.0


class WorkerRoster:
    """Starts workers, and keeps account of them until the kernel says that they are gone."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self.wanted = 0
        """Workers that are to be at work."""
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
        """Return those that may send something."""
        return [*self.working.values(), *([self.spare] if self.spare else [])]

    @property
    def doomed(self) -> list[Worker]:
        """Return those that will send nothing more."""
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
            # Not at the start: a worker in reserve takes no memory for an arena.
            worker.arena.reserve()
        except ResourceError:
            worker.dismiss()
            self.ending.append(worker)
            raise
        self.working[worker.number] = worker
        return worker

    @property
    def active(self) -> list[Worker]:
        """Return those at work that are not parked."""
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
        """Every worker has delivered something."""
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
            log.debug("no worker in reserve: %s", error)

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
            WorkerError: More than there are workers, and more than two.
        """
        most = max(2, self.wanted)
        if len(self.abandoned) > most:
            raise WorkerError(
                f"{len(self.abandoned)} workers cannot be killed (at most {most} are left behind): they "
                f"wait in the kernel for storage that does not answer. The last: {where}",
                hint="What is stored stays; when the storage answers again, run it again to resume",
            )

    def close(self) -> None:
        """End every worker: kill it, and wait a moment for all of them to vanish."""
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
                    "worker %d (%s) cannot be ended; left behind", worker.number, worker.process.kernel_view()
                )
            worker.close()
        self._launch.drain.close()


log = logging.getLogger("stoker")

_MAX_START_FAILURES = 3
_PEAK_FACTOR = 1.5
"""A worker may come to hold that many times what one has held so far. The next samples may be larger, and
malloc keeps what was freed in pieces that no large array fits into."""
_ITEMS_AHEAD = 2


@dataclass(slots=True)
class PieceAssembly:
    """Puts one group together from pieces (mode `pieces`)."""

    layout: Layout
    arrays: Sample = field(default_factory=dict[str, Any])

    def add(self, slot: memoryview, chunk: list[Any]) -> None:
        """Copy one run of bytes: `[field, member, offset, size, length]`, length -1 for a fixed shape."""
        name, member, offset, size, length = chunk
        if name not in self.arrays:
            self.arrays |= self._allocate(name, length)
        row = self.arrays[name][member : member + 1]
        row.reshape(-1).view(np.uint8)[offset : offset + size] = np.frombuffer(slot[:size], np.uint8)

    def finish(self) -> Sample:
        """Return the whole group; fields of which nothing came (all members absent or failing) are zeros."""
        for name in self.layout.schema:
            if name not in self.arrays:
                self.arrays |= self._allocate(name, 0)
        return {name: self.arrays[name] for name in self.layout.schema}

    def _allocate(self, name: str, length: int) -> Sample:
        spec = self.layout.schema[name]
        shape = (self.layout.samples, *((length, *spec.shape[1:]) if spec.ragged else spec.shape))
        return private_arrays(self.layout.schema, {name: shape})


@dataclass(slots=True, kw_only=True)
class _PartialBatch:
    """Samples of the encode batch in progress that a worker in mode `pieces` has sent."""

    assembly: PieceAssembly
    waiting: list[Frame]
    unreleased: int = 0


class Supervisor:
    """A `SampleFeed`, and its `WorkerPool`, over worker processes."""

    def __init__(
        self,
        launch: WorkerLaunch,
        queue: WorkQueue,
        ledger: SampleLedger,
        *,
        settings: PrecomputeSettings,
        parts: PartNames,
    ) -> None:
        self._layout: Layout = launch.layout
        self._queue = queue
        self._ledger = ledger
        self._timeouts = settings.timeouts
        self._limits = LossLimits(settings.max_quarantined)
        self._parts = parts
        self._roster = WorkerRoster(launch)
        self._incoming: dict[int, _PartialBatch] = {}
        self._ready: list[LoadedBatch] = []
        self._is_automatic = settings.workers is None
        self._start_failures = 0
        self._assembled_bytes = 0
        """The largest encode batch that was put together here."""
        self.given_up = False
        self.wake_fd = -1

    @property
    def pool(self) -> WorkerPool:
        """See `SampleFeed.pool`."""
        return self

    @property
    def workers(self) -> int:
        """See `WorkerPool.workers`."""
        return self._roster.wanted

    @property
    def idle(self) -> int:
        """See `WorkerPool.idle`."""
        return sum(worker.held >= self._layout.slots for worker in self._roster.working.values())

    @property
    def losses(self) -> int:
        """See `WorkerPool.losses`."""
        return self._limits.losses

    @property
    def abandoned(self) -> int:
        """See `WorkerPool.abandoned`."""
        return self._roster.abandoned_count

    @property
    def finished(self) -> bool:
        """Every group has been delivered or given up."""
        return self._queue.finished and not self._ready

    @property
    def reading(self) -> bool:
        """See `SampleFeed.reading`."""
        owed = any(worker.work for worker in self._roster.working.values())
        return owed or bool(self._ready) or self._queue.has_more

    @property
    def _works(self) -> bool:
        """Some worker has delivered something, so that the run can end without those that do not start."""
        return any(worker.delivering for worker in self._roster.working.values())

    @property
    def all_delivering(self) -> bool:
        """See `WorkerPool.all_delivering`."""
        return self._roster.all_delivering

    def memory(self) -> WorkerMemory:
        """See `WorkerPool.memory`."""
        present = {worker.number: worker.process.memory() for worker in self._roster.working.values()}
        largest = max((memory.peak_bytes for memory in present.values()), default=0)
        parked = self._roster.parked
        peak = int(_PEAK_FACTOR * largest)
        growth = sum(peak - memory.bytes for number, memory in present.items() if number not in parked)
        # A parked worker keeps its arena, and what it freed.
        held = [memory.bytes for number, memory in present.items() if number in parked]
        flight = max(self._layout.flight_bytes, self._layout.arena_bytes + self._assembled_bytes)
        return WorkerMemory(
            workers=self._roster.wanted,
            largest_bytes=largest,
            growth_bytes=growth,
            next_bytes=peak - min(held) if held else peak + flight,
        )

    def start(self, workers: int) -> None:
        """Put that many more workers to work, parked ones first; they get it from the next `poll` on.

        Raises:
            ResourceError: Not one can be started. Fewer than asked for are said, and do.
        """
        self._roster.wanted += workers
        for _ in range(workers):
            self._add()

    def park(self) -> None:
        """Give one worker no more work; what it has in hand it still delivers."""
        if worker := self._roster.park():
            self._queue.leave(worker.number)

    def _add(self) -> None:
        try:
            self._roster.add()
        except ResourceError as error:
            if not self._roster.working:
                raise
            self._do_without(str(error))

    def _do_without(self, why: str, what: str = "another worker cannot be started") -> None:
        """Go on with one worker fewer: those that work are enough to end the run."""
        self._roster.wanted -= 1
        self.given_up = True
        log.warning("%s; continuing with %d: %s", what, self._roster.wanted, why)

    def _keep_spare(self, now: float) -> None:
        """Have a worker in reserve once one was lost, or the run takes longer than a moment."""
        if self._limits.read and not self._queue.finished:
            self._roster.keep_spare(now, at_once=self.losses > 0)

    def poll(self, timeout_s: float) -> list[LoadedBatch]:
        """See `SampleFeed.poll`. Timeouts are enforced here, after what has arrived was taken in.

        Raises:
            WorkerError: Workers cannot start, or are lost one after another.
            SourceError: The source cannot be loaded in a worker; holds the first traceback.
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
                batches, self._ready = self._ready, []
                return batches

    def release(self, batch: LoadedBatch) -> None:
        """See `SampleFeed.release`."""
        if batch.last:
            self._queue.done(batch.work)
        number, slot = batch.origin
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

    def views(self) -> list[WorkerView]:
        """See `SampleFeed.views`."""
        now = time.monotonic_ns()
        return [worker.view(now) for _, worker in sorted(self._roster.working.items())]

    def close(self) -> None:
        """End every worker: close its socket, kill it, and wait a moment for it to vanish."""
        self._roster.close()
        self._ready = []

    def _woken(self) -> bool:
        return self.wake_fd >= 0 and bool(select.select([self.wake_fd], [], [], 0)[0])

    def _next_deadline(self) -> float:
        watched = [*self._roster.present, *self._roster.ending]
        dues = [worker.deadline(self._timeouts, self._layout.slots) for worker in watched]
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
            except WorkerError as error:
                worker.dismiss(WorkerLoss(stage="wait", number=-1, cause=f"worker {worker.number}: {error}"))
            if ended:
                self._lose(worker, worker.death())
            elif worker.loss is not None:
                self._lose(worker, worker.loss)

    def _enforce(self, now: float) -> None:
        for worker in self._roster.present:
            loss = worker.advance(self._timeouts, self._layout.slots, now)
            if loss is not None:
                self._lose(worker, loss)
        for worker in self._roster.sweep(now):
            self._abandon(worker)
        lost = (worker.loss.number for worker in self._roster.ending if worker.loss is not None)
        self._queue.on_hold = frozenset(self._parts.index(number) for number in lost if number >= 0)

    def _abandon(self, worker: Worker) -> None:
        """Note a worker that SIGKILL does not end, and stop reading a part that holds a second one."""
        number = -1 if worker.loss is None else worker.loss.number
        where = f"{self._place(number)}{worker.process.kernel_view()}"
        log.warning(
            "worker %d was not gone %g s after SIGKILL and is left behind: %s", worker.number, GRACE_S, where
        )
        part = self._parts.index(number)
        if number >= 0 and self._ledger.part_holds_workers(part):
            cause = "workers stuck in it cannot be killed; no more of it is read"
            self._give_up(part, number, f"{self._parts.name(number)}: {cause}")
        self._roster.check_abandoned(where)

    def _place(self, number: int) -> str:
        """Return path, sample and attempt, as a prefix; nothing for a worker that had no sample in hand."""
        if number < 0:
            return ""
        tries = self._ledger.attempts(number)
        return f"{self._parts.place(number)}: sample {number}, attempt {tries} of {ATTEMPTS}: "

    def _frame(self, worker: Worker, frame: Frame) -> None:
        kind = frame["kind"]
        if kind == "fatal":
            worker.failed = True
            said = f"the source cannot be loaded in a worker process:\n{frame['error'].rstrip()}"
            if not self._works:
                raise SourceError(f"{said}\nFix that, or read in this process with {arg('workers', 0)}")
            log.warning("worker %d: %s", worker.number, said)
            return
        if kind == "ready":
            worker.ready()
            self._start_failures = 0
            return
        worker.held += frame["slot"] >= 0
        if kind == "batch":
            self._group(worker, frame, worker.arena.arrays(frame["slot"]))
        else:
            self._piece(worker, frame)

    def _piece(self, worker: Worker, frame: Frame) -> None:
        incoming = self._incoming.get(worker.number)
        if incoming is None:
            incoming = _PartialBatch(assembly=PieceAssembly(self._layout), waiting=[])
            self._incoming[worker.number] = incoming
        if incoming.unreleased:  # one whole group in the caller's hands is enough; the worker's slots fill up
            incoming.waiting.append(frame)
            return
        for chunk in frame["chunks"]:
            incoming.assembly.add(worker.arena.slot(frame["slot"]), chunk)
        if frame["slot"] >= 0:
            worker.free(frame["slot"])
        if frame["last"]:
            arrays = incoming.assembly.finish()
            size_bytes = sum(array.nbytes for array in arrays.values())
            self._assembled_bytes = max(self._assembled_bytes, size_bytes)
            incoming.assembly = PieceAssembly(self._layout)
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
                self._queue.done(work)
            if slot >= 0:
                worker.free(slot)
            if frame["start"]:
                self._ready.append(LoadedBatch.end(work))
            return False
        origin = (worker.number, slot)
        owned = self._layout.mode == "pieces"
        self._ready.append(
            LoadedBatch(work=work, arrays=arrays, start=frame["start"], last=last, owned=owned, origin=origin)
        )
        return True

    def _lose(self, worker: Worker, loss: WorkerLoss) -> None:
        """Take back what a lost worker owes, note who is to blame, and put another in its place."""
        spare = worker is self._roster.spare
        self._incoming.pop(worker.number, None)
        if self._layout.mode == "steps":
            self._ready += [LoadedBatch.end(work) for work in worker.work.values()]
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
        ended = worker.process.exit
        if self._is_automatic and ended is not None and ended.out_of_memory and self._roster.wanted > 1:
            self._do_without(said, f"memory is too short for {self._roster.wanted} workers")
        else:
            self._add()

    def _fail_start(self, worker: Worker, loss: WorkerLoss) -> bool:
        """Count a worker that could not start; True when it is not to be replaced.

        Raises:
            WorkerError: Several in a row, and no other worker works.
        """
        self._start_failures += 1
        if self._start_failures < _MAX_START_FAILURES:
            return False
        if self._works:
            self._start_failures = 0
            self._do_without(loss.cause)
            return True
        tail = worker.process.tail()
        raise WorkerError(
            f"{self._start_failures} workers in a row could not start. The last: {loss.cause}"
            + (f"\n{tail}" if tail else "")
            + f"\nOutput and stack: {worker.process.log}",
            hint=f"Reading in this process ({arg('workers', 0)}) may show more",
        )

    def _blame(self, worker: Worker, loss: WorkerLoss) -> None:
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
        """Give workers work: one item in hand and one ahead, unless another has none and few are left."""
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
