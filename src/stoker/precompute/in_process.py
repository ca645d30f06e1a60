"""Read and encode in the calling process: the first batches, with `workers=0`, and where a child cannot.

Reading is in order, in the calling thread. Before there are workers, a read that hangs is interrupted by a
signal (`ReadWatch`), and workers try that sample again. Code in C that ignores signals cannot be interrupted:
a warning says so, and the next run begins with workers. With `workers=0` reading has no timeouts.

The encoder is called in a thread that can be left behind, since a call cannot be ended there. Past its
timeout the stacks of all threads go to a file, and the caller gets a `StalledError`; what was encoded before
is kept. A process under a guardian is killed by that, also while the interpreter's lock is held, which no
thread of ours could notice: it needs no thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from stoker.errors import Interrupted, StalledError
from stoker.precompute.arena import (
    Layout,
    LoadedBatch,
    ReadTask,
    ReusedMemory,
    private_arrays,
    time_length,
)
from stoker.precompute.encode import BatchEncoder, EncodeClock, EncodedRecords, TorchState
from stoker.precompute.progress import WorkerView
from stoker.precompute.queue import BatchOwner, SampleLedger, WorkerPool, WorkQueue
from stoker.precompute.settings import Timeouts
from stoker.precompute.worker import (
    SampleFault,
    SampleFaultError,
    SampleReader,
    fill_group,
    fill_rows,
    pad_steps,
    passing_fault,
)
from stoker.runtime.openmp import end_team
from stoker.runtime.processes.child import ProgressTimeout
from stoker.runtime.signals import Interrupts, guard_page
from stoker.runtime.threads import Pool, start_thread
from stoker.schema import Sample

log = logging.getLogger("stoker")

T = TypeVar("T")

_TURN_S = 0.25
"""Seconds for which a group is read before the loop looks around: for progress, signals and workers."""
_NO_WORKER = 1 << 30
"""Named as the worker that failed here, so that any worker may try again."""
GRACE_S = 3.0
"""Seconds that a call of the encoder may take after a signal, so that its batch is not lost."""
_LOOK_S = 0.25


class ReadingPosition:
    """Position of reading in this process, in place of a heartbeat page."""

    def __init__(self, *, limit_s: float = 0.0) -> None:
        """`limit_s`: seconds without progress after which a guardian kills this process; 0: it does not."""
        self.stage = "wait"
        self.number = -1
        self.since = time.monotonic()
        """When it last moved."""
        self._limit_s = limit_s
        self._page = guard_page() if limit_s else None

    def write(self, stage: str, number: int = -1, *, done: int = 0) -> None:
        """Note stage and sample."""
        self.stage, self.number = stage, number
        self.progress(done)

    def progress(self, done: int) -> None:
        """Note that some of the sample has been read."""
        self.since = time.monotonic()
        self.renew()

    def renew(self) -> None:
        """Tell a guardian that bytes still come."""
        if self._page is not None:
            self._page.write(self.stage, self.number, limit_s=0.0 if self.stage == "wait" else self._limit_s)


class ReadWatch:
    """A thread that interrupts a read of this process which hangs; a context manager.

    Args:
        position: Of the reader.
        timeouts: Seconds by stage.
        interrupts: Catches the signals of this process.
        logs: Folder for the stacks of all threads.
    """

    def __init__(
        self, position: ReadingPosition, timeouts: Timeouts, interrupts: Interrupts, logs: Path
    ) -> None:
        self._position = position
        self._limits_s = {"open": timeouts.open, "read": timeouts.read}
        self._interrupts = interrupts
        self._logs = logs
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._thread = start_thread(self._run, "stoker-read-watch")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def _run(self) -> None:
        progress = ProgressTimeout(os.getpid(), first_thread=True)
        while not self._over.wait(min(_LOOK_S, min(self._limits_s.values()) / 4)):
            stage, since, now = self._position.stage, self._position.since, time.monotonic()
            limit_s = self._limits_s.get(stage)
            if limit_s is None or now < progress.due(since, limit_s):
                continue
            if not progress.overdue(limit_s, now):
                self._position.renew()
                continue
            self._interrupt(stage, since, limit_s)
            while self._position.since == since and not self._over.wait(_LOOK_S):
                pass

    def _interrupt(self, stage: str, since: float, limit_s: float) -> None:
        """End the read that began at `since`; say so if it continues."""
        with suppress(OSError):
            _dump_stacks(self._logs, "reader")
        self._interrupts.stall(
            f'made no progress for {limit_s:g} s in stage "{stage}", in the calling process; stacks of all '
            f"threads: {self._logs}",
            lambda: self._position.since == since,
        )
        if not self._over.wait(GRACE_S) and self._position.since == since:
            log.warning(
                "sample %d still hangs: code in C that ignores signals cannot be interrupted. End this "
                "program and start it again: it begins with workers then, which can be killed",
                self._position.number,
            )


class InProcessReader:
    """A `SampleFeed` that reads when it is polled."""

    pool: WorkerPool | None = None

    def __init__(  # noqa: PLR0913  the parts of a run
        self,
        samples: SampleReader,
        layout: Layout,
        queue: WorkQueue,
        ledger: SampleLedger,
        *,
        position: ReadingPosition,
        interrupts: Interrupts,
        encodes: bool,
    ) -> None:
        """`encodes`: False: the arrays of a group that is read become its records."""
        self._samples = samples
        self._layout = layout
        self._queue = queue
        self._ledger = ledger
        self._position = position
        self._interrupts = interrupts
        self._todo: deque[ReadTask] = deque()
        self._start = 0
        self._rows: Iterator[SampleFault | None] | None = None
        """What reads the rest of the group in hand."""
        self._rows_read = 0
        self._faults: list[SampleFault] = []
        """Of the rows that are read."""
        self.stalled = False
        """A read hung, and was interrupted."""
        self.seconds = 0.0
        """Time spent on reading."""
        self.largest_bytes = 0
        """Of the ragged samples that were read."""
        self._memory = None if encodes or layout.mode != "group" else ReusedMemory()
        self._arrays: Sample = {}
        """Of the group in hand; one buffer for the run where a group is encoded before the next is read."""
        self._owned = layout.mode == "pieces" or self._memory is not None
        if not self._owned:
            self._arrays = private_arrays(layout.schema, layout.shapes())

    def poll(self, timeout_s: float) -> list[LoadedBatch]:
        """See `SampleFeed.poll`; at most one batch."""
        if not self._todo:
            self._todo.extend(self._queue.take(0, 1))
        if not self._todo:
            return []
        work, begun = self._todo[0], time.monotonic()
        try:
            with _as_a_worker(), self._interrupts.raising():
                read = self._read(work)
        except Interrupted:
            return []  # the loop that polls looks at signals itself
        except StalledError as error:
            return self._leave(work, error)
        finally:
            self.seconds += time.monotonic() - begun
        self._position.write("wait")
        if read is None:
            return []
        arrays, faults, stop = read
        start, last = self._start, bool(faults) or stop is None
        self._start = 0 if last or stop is None else stop
        if last:
            self._todo.popleft()
        if sum(not self._ledger.is_bad(number) for number in work.numbers) > len(faults):
            self._ledger.answered(work.part)
        again = [self._ledger.fault(fault) for fault in faults]
        if any(again) or not self._queue.wanted(work):
            if any(again):
                self._queue.give_back(work, avoid=_NO_WORKER)
            elif last:
                self._queue.done(work)
            return [LoadedBatch.end(work)] if start else []
        return [LoadedBatch(work=work, arrays=arrays, start=start, last=last, owned=self._owned)]

    def _leave(self, work: ReadTask, error: StalledError) -> list[LoadedBatch]:
        """Leave a group to workers: a read of it hung, and was interrupted."""
        self.stalled = True
        number, stage, start = self._position.number, self._position.stage, self._start
        log.warning("%s: sample %d %s", self._ledger.place(number), number, error.marked)
        self._position.write("wait")
        for fault in (*self._faults, passing_fault(number, stage, error.marked)):
            self._ledger.fault(fault)
        self._start, self._rows, self._rows_read, self._faults = 0, None, 0, []
        self._queue.give_back(self._todo.popleft(), avoid=_NO_WORKER)
        return [LoadedBatch.end(work)] if start else []

    def _read(self, work: ReadTask) -> tuple[Sample, list[SampleFault], int | None] | None:
        """Return arrays, faults, and where to continue within a sample that comes in stretches.

        None: some of the group is read.
        """
        bad: Callable[[int], bool] = self._ledger.is_bad
        if self._layout.mode == "pieces":
            return *self._read_whole(work, bad), None
        if self._layout.mode == "group":
            return self._read_rows(work, bad)
        length = time_length(self._layout.schema)
        stop = min(self._start + self._layout.steps, length)
        try:
            self._samples.fill_steps(self._arrays, (0, 0), work.numbers[0], (self._start, stop))
        except SampleFaultError as error:
            return self._arrays, [error.fault], None
        pad_steps(self._arrays, self._layout.schema, stop - self._start)
        return self._arrays, [], None if stop == length else stop

    def _read_rows(
        self, work: ReadTask, bad: Callable[[int], bool]
    ) -> tuple[Sample, list[SampleFault], None] | None:
        """Read samples of a group for some time; None: there are more."""
        if self._rows is None:
            if self._memory is not None:
                self._arrays = self._memory.arrays(self._layout.schema, self._layout.shapes())
            self._rows = fill_rows(self._samples, self._arrays, work.numbers, bad)
        until = time.monotonic() + _TURN_S
        for fault in self._rows:
            self._rows_read += 1
            if fault is not None:
                self._faults.append(fault)
            if time.monotonic() > until:
                return None
        faults, self._faults, self._rows, self._rows_read = self._faults, [], None, 0
        return self._arrays, faults, None

    def _read_whole(self, work: ReadTask, bad: Callable[[int], bool]) -> tuple[Sample, list[SampleFault]]:
        """Return a group of unknown or very large size, in memory of its own."""
        schema = self._layout.schema
        if not any(field.ragged for field in schema.values()):
            arrays = private_arrays(schema, self._layout.shapes())
            return arrays, fill_group(self._samples, arrays, work.numbers, bad)
        try:
            sample = self._samples.sample(work.numbers[0])
        except SampleFaultError as error:
            return {}, [error.fault]
        arrays = private_arrays(schema, {name: (1, *sample[name].shape) for name in schema})
        for name, array in arrays.items():
            array[0] = sample[name]
        self.largest_bytes = max(self.largest_bytes, sum(array.nbytes for array in arrays.values()))
        return arrays, []

    def release(self, batch: LoadedBatch) -> None:
        """See `SampleFeed.release`."""
        if batch.last:
            self._queue.done(batch.work)

    @property
    def between_samples(self) -> bool:
        """No sample has been handed out in part."""
        return not self._start

    @property
    def part_read(self) -> float:
        """The part of a group that has been read and not handed out."""
        return self._rows_read / len(self._todo[0].numbers) if self._rows_read else 0.0

    @property
    def finished(self) -> bool:
        """See `SampleFeed.finished`."""
        return not self._todo and self._queue.finished

    @property
    def reading(self) -> bool:
        """See `SampleFeed.reading`."""
        return bool(self._todo) or self._queue.has_more

    def views(self) -> list[WorkerView]:
        """Return this process as the only worker."""
        return [WorkerView(number=0, stage=self._position.stage, sample=self._position.number, seconds=0.0)]

    def close(self) -> None:
        """Leave to others what has not been begun."""
        while self._todo:
            self._queue.give_back(self._todo.pop())
        self._queue.leave(0)


_NUMPY_ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""What numpy does about them in a process that has not been told otherwise."""


@contextmanager
def _as_a_worker() -> Generator[None]:
    """Read as a worker does, under the defaults of torch and numpy, so that a sample has the same bits."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        if threads != 1:
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if deterministic:
            torch.use_deterministic_algorithms(False)
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=only_warns)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(np.errstate(**_NUMPY_ERRORS))
        if any(action == "error" for action, *_ in warnings.filters):
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("default")
        yield


# ----------------------------------------------------------------------------------------------------------
# Calls of the encoder in this process.


def encode_pool() -> Pool:
    """Return the thread in which an encoder is called."""
    return Pool(1, "stoker-encode", all_cores=True)


def call_encoder(  # noqa: PLR0913  all by name
    work: Callable[[], T],
    clock: EncodeClock,
    *,
    timeout_s: float,
    logs: Path,
    interrupts: Interrupts,
    what: str = "",
    pool: Pool | None = None,
) -> T:
    """Return what `work` does in another thread, which is left behind when a call of the encoder hangs.

    Args:
        work: Calls the encoder, as the calling thread would: under its settings of torch and numpy.
        clock: Of the encoder; a call counts from when it last began.
        timeout_s: Seconds that a call may take.
        logs: Folder for stacks.
        interrupts: A signal ends the wait, `GRACE_S` later.
        what: Where the encoder is meanwhile, in words; empty: at the samples of the clock.
        pool: One thread, for many calls; None: a thread for this call.

    Raises:
        StalledError: A call of the encoder passed the timeout.
        Interrupted: A signal came, and the call did not end within `GRACE_S`.
    """
    if guard_page() is not None:
        return work()
    end_team()  # of this thread, which only waits: the encoder computes faster without it
    pool = pool or encode_pool()
    ticket = pool.submit(partial(_state_of_caller(), work))
    until = float("inf")
    try:
        while not ticket.wait(min(_LOOK_S, timeout_s / 4)):
            now, begun = time.monotonic(), clock.begun
            if begun is not None and now - begun > timeout_s:
                numbers = clock.numbers
                raise _stalled(what or f"at samples {numbers.start}-{numbers.stop - 1}", timeout_s, logs)
            if interrupts.signal is not None:
                until = min(until, now + GRACE_S)
                if now >= until:
                    raise Interrupted("stopped while the encoder was at work; its batch is lost")
    except BaseException:  # a KeyboardInterrupt too, where signals are the caller's
        clock.give_up()
        raise
    return ticket.result(0.0, "the encoder")


def ask_encoder(
    work: Callable[[], T],
    *,
    timeout_s: float,
    logs: Path,
    what: str = "at a sample of zeros",
    clock: EncodeClock | None = None,
    interrupts: Interrupts | None = None,
) -> T:
    """Do as `call_encoder`, of work that is one call of the encoder or takes as long as one may."""
    clock = clock or EncodeClock()
    with clock.starting(timeout_s):
        return call_encoder(
            work, clock, timeout_s=timeout_s, logs=logs, interrupts=interrupts or Interrupts(), what=what
        )


def _stalled(where: str, timeout_s: float, logs: Path) -> StalledError:
    """Return the error for a call that hangs, with the stacks of all threads in a file."""
    path = _dump_stacks(logs, "encoder")
    return StalledError(
        f"the encoder has been {where} for more than {timeout_s:g} s; stacks of all threads: {path}. Its "
        "call is left behind in a thread of this process",
        hint="What was encoded is kept; run it again to encode the rest. For an encoder that is only slow, "
        f"give timeouts={{'encode': {10 * timeout_s:g}}}",
    )


def _dump_stacks(logs: Path, what: str) -> Path:
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = logs / f"{what}-{os.getpid()}.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def _state_of_caller() -> Callable[[Callable[[], T]], T]:
    """Return a function that does work in another thread as the calling thread, now, would do it.

    What torch and numpy keep for each thread is not that of a new thread, and the bits of a record may depend
    on it (`TorchState`).
    """
    state, graphs = TorchState.of_caller(), _graphs_of_caller()
    if torch.cuda.is_initialized():  # what the caller has queued on a stream of its own may be weights
        torch.cuda.current_stream().synchronize()

    def enter(work: Callable[[], T]) -> T:
        for name, value in graphs.items():
            torch._C._stash_obj_in_tls(name, value)  # pyright: ignore[reportPrivateUsage]
        with state.entered():
            return work()

    return enter


def _graphs_of_caller() -> dict[str, Any]:
    """Return CUDA graphs that `torch.compile(mode="reduce-overhead")` recorded in this thread."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    local = getattr(module, "local", None)
    names = ("tree_manager_containers", "tree_manager_locks")
    return {name: getattr(local, name) for name in names if hasattr(local, name)}


class InProcessEncoder:
    """An `EncodeStage` in this process: a batch that is taken is encoded at once, while `take` waits.

    Args:
        encoder: Encodes.
        call: `call_encoder` with everything but the work.
        feed, queue, ledger: Of the run.
    """

    def __init__(
        self,
        encoder: BatchEncoder,
        call: Callable[[Callable[[], EncodedRecords | None]], EncodedRecords | None],
        feed: BatchOwner,
        queue: WorkQueue,
        ledger: SampleLedger,
    ) -> None:
        self._encoder = encoder
        self._call = call
        self._feed = feed
        self._queue = queue
        self._ledger = ledger
        self._ready: list[EncodedRecords] = []
        self.clock = encoder.clock

    @property
    def hungry(self) -> bool:
        """See `EncodeStage`."""
        return True

    def take(self, batch: LoadedBatch) -> bool:
        """See `EncodeStage`."""
        if self._ready:
            return False
        # Noted, and told here: a call that was given up must not write to the folder later on, and must not
        # keep it, with its lock, in memory.
        faults: list[SampleFault] = []
        wanted = [number for work in batch.tasks for number in self._queue.wanted(work)]
        try:
            encoded = self._call(lambda: self._encoder.encode(batch, wanted, faults.append))
        except Interrupted:
            return True  # the loop that calls looks at signals itself
        finally:
            for fault in [*faults]:
                self._ledger.fault(fault)
        if batch.works:
            for work in batch.works:
                self._queue.done(work)
        else:
            self._feed.release(batch)
        if encoded is not None:
            self._ready.append(encoded)
        return True

    def results(self) -> list[EncodedRecords]:
        """See `EncodeStage`."""
        ready, self._ready = self._ready, []
        return ready

    def watch(self, fd: int) -> int:
        """Return `fd`: results are there at once."""
        return fd

    def wait(self, timeout_s: float) -> None:
        """Return at once: nothing is in progress here."""

    def processor_s(self) -> float:
        """Return 0: there are no such processes."""
        return 0.0

    def close(self) -> None:
        """Do nothing: there is nothing to end."""
