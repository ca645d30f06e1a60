"""What a run does in the process that called: reading with `workers=0`, and encoding where no child does.

Reading is in order, in one thread, and so without timeouts. The encoder is called in a thread that can be
left behind: nothing can end a call of it here. Past its timeout the stacks of all threads go to a file, and
the caller gets a `StalledError`; with `on_hang="exit"` the process ends with the exit code for a stall. What
was encoded before is kept either way. A process under a guardian is killed by that, also while the
interpreter's lock is held, which no thread of ours could notice: it needs no thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from stoker.errors import Interrupted, StalledError
from stoker.precompute.arena import Layout, private_arrays, time_length
from stoker.precompute.encode import Encoded, GroupEncoder
from stoker.precompute.heartbeat import EncodeClock, guard_page
from stoker.precompute.queue import Feed, GroupWork, Ledger, Parcel, ReaderView, WorkQueue
from stoker.precompute.reading import SampleFault, SampleFaultError, SampleReader, fill_group, pad_steps
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.share import Interrupts
from stoker.runtime.threads import Pool
from stoker.schema import Sample

log = logging.getLogger("stoker")

T = TypeVar("T")

GRACE_S = 3.0
"""How long a call of the encoder may go on after a signal, so that its group is not lost."""
_LOOK_S = 0.25


class Silent:
    """A pulse that nobody looks at."""

    def __init__(self) -> None:
        self.stage = "wait"
        self.number = -1

    def write(self, stage: str, number: int = -1, *, done: int = 0) -> None:
        """Remember stage and sample for the progress display."""
        self.stage, self.number = stage, number

    def progress(self, done: int) -> None:
        """Nobody waits for it."""


class InProcess:
    """A `Feed` that reads when it is polled."""

    def __init__(
        self,
        samples: SampleReader,
        layout: Layout,
        queue: WorkQueue,
        ledger: Ledger,
        *,
        pulse: Silent,
        interrupts: Interrupts,
    ) -> None:
        self._samples = samples
        self._layout = layout
        self._queue = queue
        self._ledger = ledger
        self._pulse = pulse
        self._interrupts = interrupts
        self._todo: deque[GroupWork] = deque()
        self._start = 0
        # One buffer for the whole run: a parcel is encoded before the next is read.
        self._arrays = private_arrays(layout.schema, layout.shapes()) if layout.mode != "pieces" else None

    def poll(self, timeout_s: float) -> list[Parcel]:
        """See `Feed.poll`; at most one parcel."""
        if not self._todo:
            self._todo.extend(self._queue.take(0, 1))
        if not self._todo:
            return []
        work = self._todo[0]
        try:
            with self._interrupts.raising(), _one_thread():
                arrays, faults, stop = self._read(work)
        except Interrupted:
            return []  # the loop that polls looks at signals itself
        start, last = self._start, bool(faults) or stop is None
        self._start = 0 if last or stop is None else stop
        if last:
            self._todo.popleft()
        if sum(not self._ledger.is_bad(number) for number in work.numbers) > len(faults):
            self._ledger.answered(work.part)
        again = [self._ledger.fault(fault) for fault in faults]
        if any(again) or not self._queue.wanted(work):
            if any(again):
                self._queue.give_back(work, avoid=0)
            elif last:
                self._queue.done()
            return [Parcel.end(work)] if start else []
        return [Parcel(work=work, arrays=arrays, start=start, last=last, owned=self._arrays is None)]

    def _read(self, work: GroupWork) -> tuple[Sample, list[SampleFault], int | None]:
        """Arrays, faults, and where to go on within a sample that comes in stretches."""
        bad: Callable[[int], bool] = self._ledger.is_bad
        if self._arrays is None:
            return *self._read_whole(work, bad), None
        if self._layout.mode == "group":
            return self._arrays, fill_group(self._samples, self._arrays, work.numbers, bad), None
        length = time_length(self._layout.schema)
        stop = min(self._start + self._layout.steps, length)
        try:
            self._samples.fill_steps(self._arrays, (0, 0), work.numbers[0], (self._start, stop))
        except SampleFaultError as error:
            return self._arrays, [error.fault], None
        pad_steps(self._arrays, self._layout.schema, stop - self._start)
        return self._arrays, [], None if stop == length else stop

    def _read_whole(self, work: GroupWork, bad: Callable[[int], bool]) -> tuple[Sample, list[SampleFault]]:
        """A group of unknown or very large size, in memory of its own."""
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
        return arrays, []

    def release(self, parcel: Parcel) -> None:
        """See `Feed.release`."""
        if parcel.last:
            self._queue.done()

    @property
    def finished(self) -> bool:
        """See `Feed.finished`."""
        return not self._todo and self._queue.finished

    def views(self) -> list[ReaderView]:
        """This process, as the one reader there is."""
        return [ReaderView(number=0, stage=self._pulse.stage, sample=self._pulse.number, seconds=0.0)]

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def _one_thread() -> Generator[None]:
    """One torch thread while a source is read, as in a reader: a sample made by torch has the same bits."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------
# Calls of the encoder in this process.


class EncodeWatchdog:
    """Makes calls on an encoder, one at a time, and waits for each no longer than its deadline.

    Args:
        clock: Of the encoder; a call counts from when it last began.
        deadline_s: Seconds that a call may take.
        logs: Folder for stacks.
        exit_on_hang: End this process at a hang.
        interrupts: A signal ends a wait, `GRACE_S` later.
    """

    def __init__(
        self, clock: EncodeClock, *, deadline_s: float, logs: Path, exit_on_hang: bool, interrupts: Interrupts
    ) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._logs = logs
        self._exit = exit_on_hang
        self._interrupts = interrupts
        self._pool = Pool(1, "stoker-encode")
        self._enter = _state_of_caller()

    @classmethod
    def of_settings(
        cls,
        settings: PrecomputeSettings,
        logs: Path,
        *,
        clock: EncodeClock | None = None,
        interrupts: Interrupts | None = None,
    ) -> EncodeWatchdog:
        """Return one with the deadline of `settings`; without a clock, with one of its own."""
        return cls(
            clock or EncodeClock(),
            deadline_s=settings.timeouts.encode,
            logs=logs,
            exit_on_hang=settings.on_hang == "exit",
            interrupts=interrupts or Interrupts(),
        )

    def ask(self, work: Callable[[], T], what: str = "at a sample of zeros") -> T:
        """As `run`, of work that is one call by itself."""
        with self._clock.starting(self._deadline_s):
            return self.run(work, what)

    def run(self, work: Callable[[], T], what: str = "") -> T:
        """Return what `work` does; its errors are raised here.

        Args:
            work: Calls the encoder.
            what: Where the encoder is meanwhile, in words; empty: at the samples of the clock.

        Raises:
            StalledError: A call of the encoder passed the deadline. Its thread is left behind.
            Interrupted: A signal came, and the call did not end within `GRACE_S`. Likewise.
        """
        if guard_page() is not None:
            return work()
        threads = torch.get_num_threads()
        ticket = self._pool.submit(partial(self._enter, threads, work))
        until = float("inf")
        try:
            while not ticket.done():
                ticket.wait(min(_LOOK_S, self._deadline_s / 4))
                now, begun = time.monotonic(), self._clock.begun
                if ticket.done():
                    break
                if begun is not None and now - begun > self._deadline_s:
                    raise self._stalled(what)
                if self._interrupts.signal is not None:
                    until = min(until, now + GRACE_S)
                    if now >= until:
                        raise Interrupted("stopped while the encoder was at work; its group is lost")
        except BaseException:  # a KeyboardInterrupt too, where signals are the caller's
            self._clock.give_up()
            raise
        return ticket.result(0.0, "the encoder")

    def _stalled(self, what: str) -> StalledError:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._logs / f"encoder-{os.getpid()}.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        numbers = self._clock.numbers
        where = what or f"at samples {numbers.start}-{numbers.stop - 1}"
        said = (
            f"the encoder has been {where} for more than {self._deadline_s:g} s; "
            f"stacks of all threads: {path}"
        )
        if self._exit:
            log.error("%s. This process ends (on_hang=exit)", said)
            os._exit(StalledError.exit_code)
        return StalledError(
            f"{said}. Its call is left behind in a thread of this process. What was encoded is kept; run "
            "it again to encode the rest. For an encoder that is only slow, give timeouts={'encode': "
            f"{10 * self._deadline_s:g}}}"
        )


def _state_of_caller() -> Callable[[int, Callable[[], Any]], Any]:
    """Return a function that does work in another thread as the calling thread, now, would do it.

    What torch keeps for each thread (autocast, the default device, the CUDA device and stream) is not that of
    a new thread, and the bits of a record may depend on it. Whether denormals are flushed is inherited from
    the thread that starts another, which is the caller.
    """
    context = copy_context()  # numpy's and decimal's handling of errors
    states: list[Callable[[], AbstractContextManager[object]]] = []
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            states.append(partial(torch.autocast, kind, dtype, cache_enabled=cached))
    if (default := torch.get_default_device()).type != "cpu":
        states.append(lambda: default)
    if torch.cuda.is_initialized():
        states.append(partial(torch.cuda.device, torch.cuda.current_device()))
        if (stream := torch.cuda.current_stream()) != torch.cuda.default_stream():
            states.append(partial(torch.cuda.stream, stream))
    graphs = _graphs_of_caller()

    def enter(threads: int, work: Callable[[], Any]) -> Any:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # OpenMP counts for each thread by itself
        for name, value in graphs.items():
            torch._C._stash_obj_in_tls(name, value)  # pyright: ignore[reportPrivateUsage]
        with ExitStack() as entered:
            for state in states:
                entered.enter_context(state())
            return context.run(work)

    return enter


def _graphs_of_caller() -> dict[str, Any]:
    """CUDA graphs that `torch.compile(mode="reduce-overhead")` recorded in this thread, for another one."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    local = getattr(module, "local", None)
    names = ("tree_manager_containers", "tree_manager_locks")
    return {name: getattr(local, name) for name in names if hasattr(local, name)}


class InPlace:
    """An `Encoding` in this process: what is taken is encoded at once, while `take` waits."""

    def __init__(
        self, encoder: GroupEncoder, watchdog: EncodeWatchdog, feed: Feed, queue: WorkQueue, ledger: Ledger
    ) -> None:
        self._encoder = encoder
        self._watchdog = watchdog
        self._feed = feed
        self._queue = queue
        self._ledger = ledger
        self._ready: list[Encoded] = []
        self.clock = encoder.clock

    @property
    def hungry(self) -> bool:
        """See `Encoding`."""
        return True

    def take(self, parcel: Parcel) -> bool:
        """See `Encoding`."""
        if self._ready:
            return False
        # Noted, and told here: a call that was given up must not write to the folder later on, and must not
        # keep it, with its lock, in memory.
        faults: list[SampleFault] = []
        wanted = self._queue.wanted(parcel.work)
        try:
            encoded = self._watchdog.run(lambda: self._encoder.encode(parcel, wanted, faults.append))
        except Interrupted:
            return True  # the loop that calls looks at signals itself
        finally:
            for fault in [*faults]:
                self._ledger.fault(fault)
        self._feed.release(parcel)
        if encoded is not None:
            self._ready.append(encoded)
        return True

    def results(self) -> list[Encoded]:
        """See `Encoding`."""
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """Nothing goes on here."""

    def processor_s(self) -> float:
        """There are no such processes."""
        return 0.0

    def close(self) -> None:
        """Nothing to end."""
