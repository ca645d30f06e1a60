"""The loop of one run, its writer thread, and how many workers it has."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from stoker.errors import ResourceError, StalledError, StokerError
from stoker.plan.resources import host_memory
from stoker.precompute.arena import LoadedBatch
from stoker.precompute.encode import (
    CopiedRecords,
    EncodedRecords,
    EncodeStage,
    full_precision,
)
from stoker.precompute.progress import ProgressSink, Rate, Snapshot
from stoker.precompute.queue import SampleFeed
from stoker.runtime.openmp import end_team
from stoker.runtime.signals import Interrupts
from stoker.runtime.threads import launch_thread
from stoker.store import Failure
from stoker.store.write import RecordWriter
from stoker.units import KIB, format_bytes, format_count

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# How many workers: more while the encoder waits and another one helps, fewer while several are idle.


_FIRST_WINDOW_S = 0.25
_WINDOW_S = 0.75
_WINDOW_GROUPS = 4
_WAITS_MUCH = 0.15
_WAITS_LITTLE = 0.02
_GAIN = 1.05
_IDLE_WORKERS = 1.25
_SPARE_PROCESSOR = 0.25
_FIRST_REST = 8
_LONGEST_REST = 64

Change: TypeAlias = Literal[-1, 0, 1]


@dataclass(slots=True, kw_only=True)
class WorkerPacing:
    """Decides from what it is told; asks no clock and starts nothing.

    A window of time ends when it is long enough and enough groups came through; the first is short, since a
    run begins with few workers. A worker is added when the encoder spent more than 15 % of the window
    waiting. It is removed when the next window was not 5 % faster: then this source gives no more, or
    something else is the limit. None is tried while this process and its workers use all processors: it would
    cost a start and bring nothing. None is added for which there is no memory, and one is taken away when
    those at work could fill it. One is taken away, too, when the encoder hardly waited while more than one
    worker stood before a full arena. After a change that did not pay, the next trial comes 8 windows later,
    then 16, up to 64: a later file may be slower to read.
    """

    most: int
    """Upper bound: by cores, and by what the memory in flight allows."""
    memory_bound: str = ""
    """Why memory sets `most`; empty where cores or the work do."""
    processors: float = float("inf")
    """Processors that there are for us."""
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    idle_s: float = 0.0
    groups: int = 0
    is_held_back: bool = False
    """In the last window another worker was due, and `most` or memory did not allow it."""
    _trial: Change = 0
    _before: float = 0.0
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def step(self, waited_s: float, elapsed_s: float, groups: int, idle: int = 0) -> None:
        """Count what happened since the last call.

        Args:
            waited_s: Time that the encoder waited for workers.
            elapsed_s: Time in all.
            groups: Groups encoded.
            idle: Workers that have filled all their slots.
        """
        self.waited_s += waited_s
        self.elapsed_s += elapsed_s
        self.idle_s += idle * elapsed_s
        self.groups += groups

    def full(self, workers: int) -> bool:
        """Return True if the window is long enough to decide on."""
        length = _WINDOW_S if self._before else min(_FIRST_WINDOW_S, _WINDOW_S)
        return self.elapsed_s >= length and self.groups >= _WINDOW_GROUPS * workers

    def change(self, workers: int, processor_s: float = 0.0, fitting: float = math.inf) -> Change:
        """Return how many to add to the `workers` there are, or to do without; ends the window if it is full.

        Args:
            workers: At work.
            processor_s: Processor time used in the window, by this process and them.
            fitting: Workers that there is memory for.
        """
        if not self.full(workers):
            return 0
        spare = self.processors - processor_s / self.elapsed_s
        rate, waits, idle = (x / self.elapsed_s for x in (self.groups, self.waited_s, self.idle_s))
        self.restart()
        trial, self._trial = self._trial, 0
        self._rest = max(0, self._rest - 1)
        self.is_held_back = False
        if workers > fitting:
            self._before, self.is_held_back = rate, True
            return -1
        if trial > 0 and rate < self._before * _GAIN:
            return self._undo(-1)
        if trial < 0 and waits > _WAITS_MUCH and rate < self._before and workers < fitting:
            return self._undo(1)
        if trial:
            self._next_rest = _FIRST_REST
        self._before = rate
        if waits > _WAITS_MUCH and not self._rest and spare > _SPARE_PROCESSOR:
            self.is_held_back = workers >= min(self.most, fitting)
            self._trial = 0 if self.is_held_back else 1
        elif waits < _WAITS_LITTLE and idle > _IDLE_WORKERS and workers > 1 and not self._rest:
            self._trial = -1
        return self._trial

    def settle(self) -> None:
        """Try nothing for a long time: another worker did not start, or memory was too short for it."""
        self._trial, self._rest, self._next_rest = 0, _LONGEST_REST, _LONGEST_REST

    def restart(self) -> None:
        """Begin a new window, as when workers have just been started."""
        self.waited_s = self.elapsed_s = self.idle_s = 0.0
        self.groups = 0

    def _undo(self, change: Change) -> Change:
        self._rest = self._next_rest
        self._next_rest = min(_LONGEST_REST, 2 * self._next_rest)
        return change


_LOOK_S = 0.25
_OFFER_S = 0.02
_SMALL_BYTES = 16 * KIB
"""Records up to this size are written before this process reads on. Otherwise reader and writer pass the
interpreter's lock to and fro, which costs more than reading and writing (docs/LOG.md, 2026-11-28)."""
_CATCH_UP_S = 0.05
"""Seconds to wait for that at most: storage may be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Totals from before the run, for its progress display."""

    name: str
    """The cache's name."""
    total: int
    """Samples of the source."""
    missing: int
    """Samples that this run is to encode."""
    quarantined: int
    """Samples set aside before and not tried again."""
    device: str
    """Where the encoder runs."""
    adopted: int = 0
    """Records that other caches had, taken over before the run."""
    caches: int = 1
    """Caches that are filled in one pass; with several, all numbers are of their records together."""


class WriteStage(Protocol):
    """Stores records while the next are encoded: a `WriteThread`, or one for each of several caches."""

    @property
    def written(self) -> int:
        """Records handed to the store."""
        ...

    @property
    def copied(self) -> int:
        """Those of them that another cache had."""
        ...

    @property
    def shard_fill(self) -> tuple[int, int]:
        """Bytes in the open shard, and its capacity."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of records written by this run."""
        ...

    def offer(self, encoded: EncodedRecords, timeout_s: float) -> bool:
        """Queue records if there is room within `timeout_s`."""
        ...

    def catch_up(self) -> None:
        """Wait a moment until all is written."""
        ...

    def check(self) -> None:
        """Raise what went wrong meanwhile."""
        ...

    def close(self) -> None:
        """Write what is queued, commit, and end."""
        ...

    def abandon(self) -> None:
        """Stop without waiting; what is not committed is lost."""
        ...


class Failures(Protocol):
    """Holder of the failures of a run: a `SampleLedger`, or those of several caches."""

    @property
    def failures(self) -> Sequence[Failure]:
        """Samples that were quarantined by this run, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStages:
    """The parts a run is made of."""

    feed: SampleFeed
    ledger: Failures
    encoding: EncodeStage
    writer: WriteStage
    in_process: bool
    """Samples are read or encoded in this process."""


class PrecomputeLoop:
    """Drives stages until everything is encoded or a signal asks for an end.

    What reads and encodes may be replaced on the way: `run` is called once for each.
    """

    def __init__(
        self,
        totals: RunTotals,
        *,
        interrupts: Interrupts,
        sink: ProgressSink | None,
        pacing: WorkerPacing | None,
    ) -> None:
        self._totals = totals
        self._interrupts = interrupts
        self._sink = sink
        self._pacing = pacing
        self._batches: deque[LoadedBatch] = deque()
        self._begun = time.monotonic()
        self._first: float | None = None
        self._processor_s: float | None = None
        """Processor time used when the window of `pacing` began."""
        self._bound_said = False
        self._shown = 0.0
        self._rate = Rate(self._begun)
        self.encoded = 0
        """Records handed to the writer that were encoded."""
        self.copied = 0
        """Records handed to the writer that another cache has already."""

    def run(
        self,
        stages: RunStages,
        *,
        until: float = float("inf"),
        lasts_s: float = float("inf"),
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Work; True when nothing is left.

        Torch's products of float32 are in full precision meanwhile where this process reads or encodes.

        Args:
            stages: What works.
            until: Time to stop at, on the clock of `time.monotonic()`.
            lasts_s: Seconds after the first group was encoded to stop at: so something always is.
            enough: Asked between groups, while none is in hand; True: stop.

        Raises:
            StokerError: A stage failed for good.
        """
        self._stages = stages
        with full_precision() if stages.in_process else nullcontext():
            return self._loop(until, lasts_s, enough)

    def is_over(self, lasts_s: float) -> bool:
        """Return True after a signal, or when so much time has passed since the first group was encoded."""
        lasted = self._first is not None and time.monotonic() >= self._first + lasts_s
        return lasted or self._interrupts.signal is not None

    def _loop(self, until: float, lasts_s: float, enough: Callable[[], bool]) -> bool:
        stages = self._stages
        feed = stages.feed
        while not (feed.finished and not self._batches):
            if self._first is not None:
                until = min(until, self._first + lasts_s)
            if self._interrupts.signal is not None or time.monotonic() >= until:
                self._show(last=True)
                return False
            if not self._batches and enough():
                return False
            self._alive()
            begun, waited, hungry = time.monotonic(), 0.0, stages.encoding.hungry
            groups = self._deal()
            if not self._store() and not groups:
                self._wait(min(_LOOK_S, max(0.0, until - begun)))
                waited = time.monotonic() - begun if hungry else 0.0
            stages.writer.check()
            self._adjust(waited, time.monotonic() - begun, groups)
            self._show()
        self._show(last=True)
        return True

    def _deal(self) -> int:
        """Hand a batch to an encoder that has room; how many were handed over."""
        if not self._batches:
            return 0
        if not self._stages.encoding.take(self._batches[0]):
            return 0
        self._batches.popleft()
        return 1

    def _store(self) -> bool:
        """Hand to the writer what has been encoded; whether there was something."""
        results = self._stages.encoding.results()
        if self._stages.encoding.clock.calls or results:
            self._first = self._first or time.monotonic()
        for encoded in results:
            while not self._stages.writer.offer(encoded, _OFFER_S):
                # A slow disk has a timeout of its own, and must not keep us from noticing workers that hang.
                self._alive()
                if self._stages.feed.pool is not None:
                    self._batches.extend(self._stages.feed.poll(0.0))
                self._show()
            if encoded.copied is None:
                self.encoded += len(encoded.numbers)
            else:
                self.copied += len(encoded.numbers)
            if self._stages.feed.pool is None and encoded.size_bytes <= _SMALL_BYTES * len(encoded.numbers):
                self._stages.writer.catch_up()
        return bool(results)

    def _wait(self, timeout_s: float) -> None:
        """Wait for batches, or for encoders where only these can continue."""
        feed, refused = self._stages.feed, bool(self._batches)
        # Reading in this process fills one buffer again and again; workers are looked after at all times.
        if feed.pool is not None or not refused:
            self._batches.extend(feed.poll(timeout_s))
        if feed.pool is None and (refused or not self._batches):
            self._stages.encoding.wait(timeout_s)

    def _alive(self) -> None:
        """Say that the loop goes round; what is read in this process may take any time."""
        self._stages.encoding.clock.alive(bounded=self._stages.feed.pool is not None)

    def _adjust(self, waited_s: float, elapsed_s: float, groups: int) -> None:
        pool, pacing = self._stages.feed.pool, self._pacing
        if pacing is None or pool is None:
            return
        if pool.given_up:
            pacing.settle()
        if not pool.all_delivering:
            pacing.restart()
            self._processor_s = None
            return
        if self._processor_s is None:
            self._processor_s = self._used_s()
        pacing.step(waited_s, elapsed_s, groups, pool.idle)
        if not pacing.full(pool.workers):
            return
        used = self._used_s()
        memory, free = pool.memory(), host_memory()
        fitting = memory.fitting(free.usable_bytes) if memory.largest_bytes else math.inf
        change = pacing.change(pool.workers, used - self._processor_s, fitting)
        self._processor_s = used
        if pacing.is_held_back and fitting < pacing.most:
            held, size = format_bytes(memory.largest_bytes), format_bytes(free.usable_bytes)
            self._say_bound(
                min(pool.workers, int(fitting)), f"one has held {held}, and {size} are free ({free.label})"
            )
        elif pacing.is_held_back and pacing.memory_bound:
            self._say_bound(pool.workers, pacing.memory_bound)
        if change > 0:
            pool.start(1)
        elif change < 0:
            pool.park()

    def _say_bound(self, workers: int, why: str) -> None:
        """Say once that memory sets the number of workers, where cores would allow more."""
        if self._bound_said:
            return
        self._bound_said = True
        text = f"{self._totals.name}: memory allows {format_count(workers, 'worker')}: {why}"
        if self._sink is None:
            log.info(text)
        else:
            self._sink.note(text)

    def _used_s(self) -> float:
        """Return the processor time that this process and those below it have used so far."""
        workers = sum(view.processor_s for view in self._stages.feed.views())
        return time.process_time() + workers + self._stages.encoding.processor_s()

    def _show(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._sink is None or (not last and now - self._shown < self._sink.interval_s):
            return
        self._shown = now
        self._sink.update(self._snapshot(now))

    def _snapshot(self, now: float) -> Snapshot:
        totals, clock, failures = self._totals, self._stages.encoding.clock, self._stages.ledger.failures
        done = totals.total - totals.missing + self.encoded + self.copied + len(failures)
        last = (
            f"sample {failures[-1].number:,} ({failures[-1].stage}: {failures[-1].error})" if failures else ""
        )
        return Snapshot(
            name=totals.name,
            total=totals.total,
            done=done,
            encoded=self.encoded,
            adopted=totals.adopted + self.copied,
            caches=totals.caches,
            seconds=now - self._begun,
            rate=self._rate(now, self.encoded + self.copied),
            written_bytes=self._stages.writer.bytes,
            workers=tuple(self._stages.feed.views()),
            device=totals.device,
            group=clock.numbers,
            call_s=clock.seconds / max(1, clock.calls),
            busy=self._busy(now),
            shard_fill=self._stages.writer.shard_fill,
            quarantined=totals.quarantined + len(failures),
            last_failure=last,
        )

    def _busy(self, now: float) -> float:
        clock = self._stages.encoding.clock
        if self._first is None or now <= self._first:
            return 0.0
        return min(1.0, clock.seconds / clock.lanes / (now - self._first))


# ----------------------------------------------------------------------------------------------------------
# The writer: one thread that converts, checksums and commits, while the next batch is encoded.
#
# What waits for it is bounded in bytes, so a slow disk slows the encoder and the workers down and memory
# stays flat. Its errors surface in the calling thread, with the figures that matter, and leave a cache that
# resumes.


_TICK_S = 1.0


class WriteThread:
    """Feeds a `RecordWriter`, which no other thread touches."""

    def __init__(self, writer: RecordWriter, folder: Path, *, limit_bytes: int, timeout_s: float) -> None:
        self._writer = writer
        self._folder = folder
        self._limit = limit_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[EncodedRecords] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._is_behind = False
        """It did not catch up when it was waited for."""
        self._error: Exception | None = None
        self._begun: float | None = None
        self.written = 0
        """Records handed to the store."""
        self.copied = 0
        """Those of them that another cache had."""
        self._thread = threading.Thread(target=self._run, name="stoker-writer", daemon=True)
        launch_thread(self._thread, "writing the cache")

    @property
    def shard_fill(self) -> tuple[int, int]:
        """Bytes in the open shard, and its capacity."""
        return self._writer.shard_fill

    @property
    def bytes(self) -> int:
        """Bytes of records written by this run."""
        return self._writer.bytes

    def offer(self, encoded: EncodedRecords, timeout_s: float) -> bool:
        """Queue records if there is room within `timeout_s`; a group above the limit goes when it is alone.

        Raises:
            StalledError: The writer has been at one operation for longer than its timeout.
            ResourceError: The disk is full.
            StokerError: Whatever else the store refused.
        """
        with self._changed:
            self.check()
            if not self._room(encoded):
                self._changed.wait(timeout_s)
                self.check()
                if not self._room(encoded):
                    return False
            self._queue.append(encoded)
            self._waiting_bytes += encoded.size_bytes
            self._changed.notify_all()
            return True

    def catch_up(self) -> None:
        """Wait until all is written, for `_CATCH_UP_S` at most, and not again before it has been."""
        with self._changed:
            if not self._is_behind:
                self._is_behind = not self._changed.wait_for(
                    lambda: not self._waiting_bytes or self._error is not None, _CATCH_UP_S
                )

    def _room(self, encoded: EncodedRecords) -> bool:
        return not self._queue or self._waiting_bytes + encoded.size_bytes <= self._limit

    def check(self) -> None:
        """Raise what went wrong in the thread, or `StalledError` when it is past its timeout."""
        if self._error is not None:
            raise self._explained(self._error) from self._error
        self._check_timeout()

    def _check_timeout(self) -> None:
        begun = self._begun
        if begun is not None and time.monotonic() - begun > self._timeout_s:
            raise StalledError(
                f"writing to {self._folder} made no progress for {self._timeout_s:g} s: the storage does "
                f"not answer. {format_count(self.written)} records were handed over",
                hint="Run it again when it does, to resume",
            )

    def close(self) -> None:
        """Write what is queued, commit, and end the thread.

        Raises:
            StokerError: As for `offer`.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.1)
            self._check_timeout()
        self.check()

    def abandon(self) -> None:
        """Stop without waiting for more than what is in hand; what is not committed is lost."""
        with self._changed:
            self._queue.clear()
            self._closing = True
            self._error = self._error or StalledError("the run was given up")
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while (encoded := self._next()) is not None:
                self._step(encoded)
            self._begin()
            if self._error is None:
                self._writer.commit()
            else:
                self._writer.abort()
        except Exception as error:  # noqa: BLE001  a thread's edge: raised again in the caller's thread
            self._fail(error)
        finally:
            self._begun = None

    def _step(self, encoded: EncodedRecords) -> None:
        self._begin()
        if encoded.copied is not None:
            self._copy(encoded, encoded.copied)
        elif encoded.numbers:
            self._writer.append(
                encoded.numbers, encoded.records, marked=encoded.marked, contents=encoded.contents
            )
            self.written += len(encoded.numbers)
        else:
            self._writer.tick()
        end_team()  # the encoder computes faster without it
        with self._changed:
            self._begun = None
            self._waiting_bytes -= encoded.size_bytes
            self._is_behind = self._is_behind and self._waiting_bytes > 0
            self._changed.notify_all()

    def _copy(self, encoded: EncodedRecords, copied: CopiedRecords) -> None:
        damaged = self._writer.copy(encoded.numbers, copied.origin, copied.places, marked=copied.moved)
        if damaged and encoded.contents is not None:
            copied.lost(encoded.contents[[encoded.numbers.index(number) for number in damaged]])
        stored = len(encoded.numbers) - len(damaged)
        self.written += stored
        self.copied += stored

    def _begin(self) -> None:
        self._begun = time.monotonic()

    def _next(self) -> EncodedRecords | None:
        """Return what to write; an empty one to let the store look at the clock; None at the end."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(_TICK_S)
            if self._queue:
                return self._queue.popleft()
            return None if self._closing else EncodedRecords(numbers=[])

    def _fail(self, error: Exception) -> None:
        """Keep what the store still can (a refused record does not spoil those before it), then report."""
        try:
            if isinstance(error, OSError):
                self._writer.abort()
            else:
                self._writer.commit()
        except Exception as second:  # noqa: BLE001  the first error is the one to report
            error.add_note(f"and while closing: {second}")
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, StokerError) or not isinstance(error, OSError):
            return error
        return ResourceError(
            f"writing to {self._folder} failed: {error}", hint="Committed shards stay; run it again to resume"
        )
