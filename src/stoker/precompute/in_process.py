"""Reading in the calling process: in order, one thread, no reader processes, and so no deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from stoker.errors import Interrupted
from stoker.precompute.arena import private_arrays
from stoker.precompute.fill import SampleFault, SampleFaultError, SampleReader, fill_group, pad_steps
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.layout import Layout, time_length
from stoker.precompute.ledger import Ledger
from stoker.precompute.parcel import Parcel, ReaderView
from stoker.precompute.queue import GroupWork, WorkQueue
from stoker.schema import Sample


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
