"""The encoder in child processes: one for each device, fed by the same workers.

A child for each, also for a single device or the CPU (design notes 036 and 042):

- a call that hangs is killed with its process,
- an error that ruins a CUDA context harms nothing else,
- torch's allocator and switches are set outside the user's program,
- encoders do not compete for the lock of one interpreter.

An encode batch goes to a device that has room. Its bits do not depend on the device: each call of an encoder
has the shape that the recipe names, and the child computes as its owner would (`TorchState`).

A device that is lost, hangs, dies or runs out of memory costs the other devices nothing. Its groups are read
again and go to a device that has room. Its process is started again, but not for ever, and not where memory
was short. A group at which `MAX_TRIES` processes ended ends the run.

Groups and records travel in memory that both map, two desks in each direction, so that a child need not wait.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker import errors
from stoker.encoders.protocol import Encoder
from stoker.errors import DeviceError, ResourceError, StalledError, StokerError
from stoker.plan.resources import use_device
from stoker.precompute.arena import LoadedBatch, ReadTask, SharedArrays
from stoker.precompute.encode import (
    BatchEncoder,
    CopiedRecords,
    EncodeClock,
    EncodedRecords,
    EncodeStage,
    TorchState,
    full_precision,
)
from stoker.precompute.queue import BatchOwner, SampleLedger, WorkQueue
from stoker.precompute.worker import SampleFault
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.processes.child import Drain, LoggedChild
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.heartbeat import anonymous_file
from stoker.runtime.processes.preloaded import FORK_S
from stoker.runtime.processes.wire import Frame, WorkerChannel
from stoker.schema import Sample, Schema, with_lengths
from stoker.store import Recipe
from stoker.store.folder import SampleLookup, digest_samples
from stoker.store.values import from_array, view_bytes

log = logging.getLogger("stoker")

DESKS = 2
"""Groups that a process has in hand at most: one that it encodes, and the next."""
OWN_FAULTS = (DeviceError, ResourceError)
"""What is wrong with one device, and no reason to give up the others."""
MAX_TRIES = 3
"""Processes that may end at one group, and starts of one device without a group encoded in between."""
_DUMP_S = 0.5
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTask:
    """Source, encoder and settings of encoder processes; pickled once for all of them."""

    encoder: Encoder
    recipe: Recipe
    schema: Schema
    """Fields of a raw sample."""
    nan: str
    state: TorchState
    """How the program that asked has set torch and numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLaunch:
    """Arguments with which every encoder process of a run is started."""

    task_fd: int
    """A pickled `EncodeTask` in memory that all map; closed by the owner of the processes."""
    samples: Schema
    """Fields of a raw sample."""
    records: Schema
    """Fields of a record as encoded."""
    start_s: float
    """Seconds that a process may take to import and unpickle what it needs."""
    limit_s: float
    """Seconds that a call of the encoder, or its way to the device, may take."""
    compare_first: bool
    """See `BatchEncoder`."""
    logs: Path
    """Folder of output and stack dumps."""
    cache: str
    """Name of the cache, which is part of their names: one program may fill several."""


def stored(payload: bytes) -> int:
    """Return a descriptor of memory that holds `payload`, for `unpickled` in other processes.

    Raises:
        ResourceError: There is no memory or descriptor for it.
    """
    fd = -1
    try:
        fd = anonymous_file("stoker-task")
        with open(fd, "wb", closefd=False) as file:
            file.write(payload)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ResourceError(f"no memory to hand on a task of {len(payload):,} bytes: {error}") from error
    return fd


def unpickled(fd: int) -> Any:
    """Return what was pickled into `stored` memory, which all processes map; closes the descriptor."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        task = cloudpickle.loads(mapped)
    os.close(fd)
    return task


class EncoderProcesses:
    """An `EncodeStage` in a process for each device.

    Raises:
        ResourceError: Not one process can be started.
    """

    def __init__(
        self,
        devices: Sequence[str],
        launch: EncoderLaunch,
        *,
        feed: BatchOwner,
        queue: WorkQueue,
        ledger: SampleLedger,
        clock: EncodeClock,
    ) -> None:
        self._launch = launch
        self._feed = feed
        self._queue = queue
        self._ledger = ledger
        self._drain = Drain()
        self._epoll = select.epoll()
        self._ready: list[EncodedRecords] = []
        self._tries = Counter[int]()
        self._broken: set[int] = set()
        """Keys of samples whose encoder was lost half-way; what still comes of them is let go."""
        self.clock = clock
        clock.lanes, clock.limit_s = len(devices), launch.limit_s
        self._devices = [_Device(name, place) for place, name in enumerate(devices)]
        self._last: StokerError | None = None
        self._used_s = 0.0
        try:
            for device in self._devices:
                self._start(device)
        except BaseException:
            self.close()
            raise

    def watch(self, fd: int) -> int:
        """See `EncodeStage`; `wait` ends early for `fd` too."""
        if fd >= 0:
            self._epoll.register(fd, select.EPOLLIN)
        return self._epoll.fileno()

    @property
    def hungry(self) -> bool:
        """See `EncodeStage`; one that is still starting does not count."""
        return any(device.ready and not device.held for device in self._devices)

    def take(self, batch: LoadedBatch) -> bool:
        """See `EncodeStage`. The arrays are copied, so that the worker continues at once."""
        work = batch.work
        if batch.over:
            self._broken.discard(work.key)
            for device in self._devices:
                device.forget(work)
            return True
        if batch.start == 0:
            self._broken.discard(work.key)
        elif work.key in self._broken:
            self._feed.release(replace(batch, last=False))
            if batch.last:
                self._broken.discard(work.key)
                self._queue.give_back(work)
            return True
        # The stretches of a long sample all go to the process that has its beginning.
        at_it = [device for device in self._devices if work.key in device.works]
        free = [device for device in at_it or self._devices if device.ready and device.room]
        if not free:
            return False
        device = min(free, key=lambda one: len(one.held))
        wanted = [number for task in batch.tasks for number in self._queue.wanted(task)]
        device.take(batch, wanted, self._launch.samples)
        if not batch.works:
            self._feed.release(replace(batch, last=False))  # done with only when its records are here
        self.clock.numbers = batch.span
        return True

    def results(self) -> list[EncodedRecords]:
        """See `EncodeStage`. Timeouts are enforced here."""
        for device in self._devices:
            if device.child is not None:
                self._take_in(device, device.child)
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """See `EncodeStage`."""
        if any(device.child is not None for device in self._devices):
            self._epoll.poll(timeout_s)

    def processor_s(self) -> float:
        """See `EncodeStage`."""
        return self._used_s + sum(d.child.processor_s() for d in self._devices if d.child is not None)

    def close(self) -> None:
        """See `EncodeStage`."""
        for device in self._devices:
            if device.child is not None:
                self._end(device, device.child, keep_log=False)
        self._drain.close()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._launch.task_fd)

    def _start(self, device: _Device) -> None:
        try:
            with self.clock.starting(FORK_S):  # so that a guardian starts a command again that is killed now
                child = device.start(self._launch, self._drain)
        except ResourceError as error:
            self._give_up(device, error)
            return
        self._epoll.register(child.channel, select.EPOLLIN)
        self._epoll.register(child.pidfd, select.EPOLLIN)

    def _end(self, device: _Device, child: LoggedChild, *, keep_log: bool) -> None:
        """Kill a process and let its descriptors go; one that cannot be killed is left behind."""
        self._used_s += child.processor_s()
        self._epoll.unregister(child.channel)
        self._epoll.unregister(child.pidfd)
        child.kill()
        if not _gone(child, _GRACE_S):
            log.warning("the encoder on %s (%s) cannot be ended", device.name, child.kernel_view())
        device.stop(keep_log=keep_log)

    def _take_in(self, device: _Device, child: LoggedChild) -> None:
        ended = child.ended()  # looked at first: what it sent before its end is in the socket by then
        child.channel.flush()
        for frame in child.channel.receive():
            if frame["kind"] == "ready":
                device.ready = True
            elif frame["kind"] == "encoded":
                self._records(device, frame)
            else:
                self._failed(device, child, frame)
                return
        if ended:
            tail = child.tail()
            said = f"; its last output: {tail.splitlines()[-1][:200]}" if tail else ""
            self._lose(device, child, DeviceError(f"its process {child.exit}{said}"))
            return
        beat = child.heartbeat.look()
        since = beat.time_ns / 1e9 or device.begun
        limit_s = beat.limit_s if beat.time_ns else self._launch.start_s
        if limit_s and time.monotonic() - since > limit_s:
            child.request_stacks()  # its handler writes them without the interpreter's help
            # If the heartbeat moved while the stacks were written, the process was slow and is not stuck.
            if not _gone(child, _DUMP_S) and child.heartbeat.look().time_ns == beat.time_ns:
                text = f'it made no progress for {limit_s:g} s in stage "{beat.stage}"'
                self._lose(device, child, StalledError(text))

    def _records(self, device: _Device, frame: Frame) -> None:
        """Take the records of a group from a desk, which is free then."""
        batch = device.held.pop(frame["desk"])
        for fault in frame["faults"]:
            self._ledger.fault(SampleFault(**fault))
        self.clock.seconds += frame["seconds"]
        self.clock.calls += 1
        if frame["numbers"]:
            shapes = {name: tuple(shape) for name, shape in frame["shapes"].items()}
            arrays = device.shared[DESKS + frame["desk"]].arrays(self._launch.records, shapes)
            self._ready.append(_owned(frame, arrays, self._launch.records))
        if batch.last:
            del device.works[batch.work.key]
            device.failures = 0
            for task in batch.tasks:
                self._tries.pop(task.key, None)
                self._queue.done(task)

    def _failed(self, device: _Device, child: LoggedChild, frame: Frame) -> None:
        kind = getattr(errors, frame["error"], StokerError)
        if kind not in OWN_FAULTS:
            raise kind(f"the encoder on {device.name}: {frame['message']}", hint=frame["hint"])
        self._lose(device, child, kind(frame["message"], hint=frame["hint"]))

    def _lose(self, device: _Device, child: LoggedChild, error: StokerError) -> None:
        """Do without a process: say why, have its groups read again, and start another unless that is vain.

        Raises:
            StokerError: It was the last device, or not the first process to end at this group.
        """
        batches = [*device.works.values()]
        at = f" at samples {batches[0].span.start}-{batches[0].span.stop - 1}" if batches else ""
        child.record(str(error))
        self._end(device, child, keep_log=True)
        # The newest first: `give_back` puts each in front of the queue, so the oldest is read first again.
        for batch in reversed(batches):
            # Of a sample that came in part, more stretches are on their way. `take` drops them, and gives the
            # work back at the last one.
            if batch.last:
                for task in reversed(batch.tasks):
                    self._queue.give_back(task)
            else:
                self._broken.add(batch.work.key)
        device.held, device.works = {}, {}
        device.failures += 1
        if batches:
            self._tries.update(task.key for task in batches[0].tasks)
            if max(self._tries[task.key] for task in batches[0].tasks) >= MAX_TRIES:
                raise type(error)(
                    f"{MAX_TRIES} encoders in a row ended{at}, the last on {device.name}: "
                    f"{error.problem.fact}",
                    hint=f"{_before(error)}What is stored stays; run it again to resume once the cause is "
                    f"fixed. Stacks and output: {child.log}",
                )
        fact = f"the encoder on {device.name} is lost{at}: {error.problem.fact}; output: {child.log}"
        said = type(error)(fact, hint=error.problem.hint)
        if isinstance(error, ResourceError) or device.failures >= MAX_TRIES:
            self._give_up(device, said)
            return
        go = "are read again" if len(self._devices) == 1 else "go to devices that have room"
        log.warning("%s. Its groups %s, and it is started again", said, go)
        self._start(device)

    def _give_up(self, device: _Device, error: StokerError) -> None:
        """Go on with the other devices.

        Raises:
            StokerError: No other device is left.
        """
        device.given_up = True
        left = [one.name for one in self._devices if not one.given_up]
        if not left:
            raise type(error)(
                f"no device is left of {', '.join(one.name for one in self._devices)}. The last: "
                f"{error.problem.fact}",
                hint=f"{_before(error)}What is stored stays; run it again to resume",
            ) from self._last
        self._last = error
        log.warning("%s. Its groups go to the rest: %s", error, ", ".join(left))


class _Device:
    """One device, its process if there is one, and what that has in hand."""

    def __init__(self, name: str, place: int) -> None:
        self.name = name
        self.child: LoggedChild | None = None
        self.shared: list[SharedArrays] = []
        """Desks with samples, then desks with records."""
        self.ready = False
        """The encoder is on the device."""
        self.held: dict[int, LoadedBatch] = {}
        """By desk, without its arrays."""
        self.works: dict[int, LoadedBatch] = {}
        """The same by key, oldest first, until all records of the group are here."""
        self.begun = 0.0
        """When its process was started, `time.monotonic()`."""
        self.failures = 0
        """Processes that ended since it last encoded a group."""
        self.given_up = False
        self._place = place
        self._starts = 0

    @property
    def room(self) -> bool:
        """Return True if a desk is free."""
        return len(self.held) < DESKS

    def start(self, launch: EncoderLaunch, drain: Drain) -> LoggedChild:
        """Start its process.

        Raises:
            ResourceError: No process, descriptor or memory is left.
        """
        self._starts += 1
        words = "encoder", self._place, self.name.replace(":", ""), self._starts, os.getpid(), launch.cache
        name = f"{'-'.join(map(str, words))}.txt"
        shared = [SharedArrays.create() for _ in range(2 * DESKS)]
        fds = [launch.task_fd, *(exchange.fd for exchange in shared)]
        try:
            child = LoggedChild(
                "stoker.precompute.encoder_processes:serve",
                fds,
                what=f"a process to encode on {self.name}",
                log=launch.logs / name,
                drain=drain,
                death_signal=signal.SIGTERM,
            )
        except BaseException:
            for exchange in shared:
                exchange.close()
            raise
        self.child, self.shared, self.ready, self.begun = child, shared, False, time.monotonic()
        start = {"device": self.name, "limit_s": launch.limit_s, "compare_first": launch.compare_first}
        child.channel.send({"kind": "start", **start})
        return child

    def stop(self, *, keep_log: bool) -> None:
        """Let everything of its process go."""
        assert self.child is not None
        self.child.discard(keep_log=keep_log)
        for exchange in self.shared:
            exchange.close()
        self.child, self.shared, self.ready = None, [], False

    def forget(self, work: ReadTask) -> None:
        """Let go of what is there of the record of a sample that is over before its end."""
        if self.works.pop(work.key, None) is not None and self.child is not None:
            self.child.channel.send({"kind": "forget", "key": work.key})

    def take(self, batch: LoadedBatch, wanted: list[int], samples: Schema) -> None:
        """Lay a batch on a free desk, and say so."""
        assert self.child is not None
        desk = next(desk for desk in range(DESKS) if desk not in self.held)
        shapes = {name: array.shape for name, array in batch.arrays.items()}
        try:
            arrays = self.shared[desk].arrays(samples, shapes)
        except OSError as error:
            raise ResourceError(
                f"no memory to hand a group to {self.name}: {error}",
                hint="Use fewer devices, or smaller groups",
            ) from error
        for name, array in batch.arrays.items():
            np.copyto(arrays[name], array)
        work = batch.work
        self.held[desk] = self.works[work.key] = replace(batch, arrays={})
        self.child.channel.send(
            {
                "kind": "work",
                "desk": desk,
                "key": work.key,
                "part": work.part,
                "first": work.numbers.start,
                "count": len(work.numbers),
                "start": batch.start,
                "last": batch.last,
                "wanted": wanted,
                "members": list(batch.members),
                "shapes": {name: list(shape) for name, shape in shapes.items()},
            }
        )


def _before(error: StokerError) -> str:
    """Return the hint of an error, as a sentence before another."""
    return f"{error.problem.hint}. " if error.problem.hint else ""


def _gone(child: LoggedChild, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    poller.poll(timeout_s * 1000)
    return child.ended()


def _owned(frame: Frame, arrays: Sample, schema: Schema) -> EncodedRecords:
    """Return the records in memory that outlives the desk."""
    tensors = {name: from_array(array.copy(), schema[name].dtype) for name, array in arrays.items()}
    ragged = {name: [*tensors[name].split(lengths)] for name, lengths in frame["lengths"].items()}
    return EncodedRecords(
        numbers=frame["numbers"],
        records={**tensors, **ragged},
        marked=frame["marked"],
        size_bytes=sum(value.nbytes for value in tensors.values()),
    )


# ----------------------------------------------------------------------------------------------------------
# The child's side: takes groups, gives records, and says on its heartbeat page where it stands.


def serve(connection: Connection) -> int:
    """Encode until the caller closes its end."""
    keep_freed_memory()  # before there are threads
    channel = WorkerChannel(connection.socket)
    try:
        start = channel.next()
        if start is not None:
            _work(channel, start, connection)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the caller is gone
    except StokerError as error:
        kind = next((kind for kind in OWN_FAULTS if isinstance(error, kind)), type(error))
        channel.send({"kind": "failed", "error": kind.__name__, **error.to_json()})
        return 1
    except Exception as error:  # noqa: BLE001  a process edge: the caller decides what becomes of it
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        channel.send({"kind": "failed", "error": "StokerError", "message": message, "hint": ""})
        return 1
    return 0


def _work(channel: WorkerChannel, start: Frame, connection: Connection) -> None:
    task_fd, *desks = connection.shared
    task: EncodeTask = unpickled(task_fd)
    shared = [SharedArrays(fd) for fd in desks]
    device = torch.device(start["device"])
    clock = EncodeClock(page=connection.heartbeat)
    encoder = BatchEncoder(
        task.encoder, task.recipe, task.schema, device=str(device), nan=task.nan, clock=clock
    )
    encoder.compare_first = start["compare_first"]
    with task.state.entered(), full_precision():
        with clock.starting(start["limit_s"]):
            try:
                use_device(device)
                task.encoder.to(device)
            except Exception as error:
                raise DeviceError(f"{type(error).__name__}: {error}") from error
        clock.limit_s = start["limit_s"]
        channel.send({"kind": "ready"})
        while (frame := channel.next()) is not None:
            if frame["kind"] == "forget":
                encoder.forget(frame["key"])
                continue
            channel.send(_encoded(encoder, task, frame, shared))


def _encoded(encoder: BatchEncoder, task: EncodeTask, frame: Frame, shared: list[SharedArrays]) -> Frame:
    """Encode the group on one desk and put the records on the desk for records; return the answer."""
    faults: list[SampleFault] = []

    def fault(reason: SampleFault) -> bool:
        faults.append(reason)
        return False

    desk, before = frame["desk"], encoder.clock.seconds
    numbers = range(frame["first"], frame["first"] + frame["count"])
    batch = LoadedBatch(
        work=ReadTask(key=frame["key"], part=frame["part"], numbers=numbers),
        arrays=shared[desk].arrays(with_lengths(task.schema), frame["shapes"]),
        start=frame["start"],
        last=frame["last"],
        members=tuple(frame["members"]),
    )
    encoded = encoder.encode(batch, frame["wanted"], fault)
    encoder.clock.alive(bounded=False)  # it may wait for the next group as long as it takes
    answer: Frame = {"numbers": [], "marked": [], "shapes": {}, "lengths": {}}
    if encoded is not None:
        shapes = put_records(shared[DESKS + desk], task.recipe.encoded, encoded.records)
        lengths = {name: [*map(len, v)] for name, v in encoded.records.items() if isinstance(v, list)}
        answer = {
            "numbers": encoded.numbers,
            "marked": encoded.marked,
            "shapes": shapes,
            "lengths": lengths,
        }
    return {
        "kind": "encoded",
        "desk": desk,
        "faults": [asdict(one) for one in faults],
        "seconds": encoder.clock.seconds - before,
        **answer,
    }


def put_records(
    exchange: SharedArrays, schema: Schema, records: dict[str, Tensor | list[Tensor]]
) -> dict[str, list[int]]:
    """Copy records into shared memory, ragged ones one after another along axis 0; return all shapes."""
    whole = {name: torch.cat(value) if isinstance(value, list) else value for name, value in records.items()}
    arrays = exchange.arrays(schema, {name: tuple(value.shape) for name, value in whole.items()})
    for name, value in whole.items():
        if value.numel():
            np.copyto(arrays[name].reshape(-1).view(np.uint8), np.asarray(view_bytes(value.reshape(-1))))
    return {name: list(value.shape) for name, value in whole.items()}


# ----------------------------------------------------------------------------------------------------------
# Recognize samples that a sibling cache has a record of, so that they are read but not encoded again.


class SampleRecognizer:
    """An `EncodeStage` around another one: digests samples on their way, and keeps back known ones.

    Args:
        inner: What encodes the others.
        same: Records of sibling caches; None: none are looked up.
        queue, recipe, schema: Of the run.
        digests: Of samples whose records have not come yet, by number: kept from one stage to the next.
    """

    def __init__(
        self,
        inner: EncodeStage,
        same: SampleLookup | None,
        *,
        queue: WorkQueue,
        recipe: Recipe,
        schema: Schema,
        digests: dict[int, NDArray[np.uint64]],
    ) -> None:
        self._inner, self._same = inner, same
        self._queue, self._recipe, self._schema = queue, recipe, schema
        self._digests = digests
        self._looked_at: LoadedBatch | None = None
        self._copied: list[EncodedRecords] = []
        self.clock = inner.clock

    @property
    def hungry(self) -> bool:
        """See `EncodeStage`."""
        return self._inner.hungry

    def take(self, batch: LoadedBatch) -> bool:
        """See `EncodeStage`."""
        if batch is not self._looked_at:  # one that found no room comes again
            self._look(batch)
            self._looked_at = batch
        taken = self._inner.take(batch)
        if taken:
            self._looked_at = None
        return taken

    def _look(self, batch: LoadedBatch) -> None:
        """Digest the samples of a batch, and settle those that are recognized.

        A sample that comes in several stretches is encoded before its end is known; it gets no digest.
        """
        if batch.over or batch.start or not batch.last:
            return
        numbers = self._queue.wanted(batch.work)
        first = batch.work.numbers.start
        digests = digest_samples(batch.arrays, self._schema, [number - first for number in numbers])
        if self._same is not None and len(self._same):
            part = batch.work.part
            local = [number - self._recipe.parts[part].offset for number in numbers]
            for match in self._same.find(digests, [self._recipe.place(part, one) for one in local]):
                own = [numbers[member] for member in match.members]
                copied = CopiedRecords(
                    origin=match.cache,
                    places=match.places,
                    moved=[numbers[member] for member in match.moved],
                    lost=self._same.refuse,
                )
                self._copied.append(
                    EncodedRecords(numbers=own, contents=digests[match.members], copied=copied)
                )
                self._queue.settled.update(own)
        self._digests.update(zip(numbers, digests, strict=True))

    def results(self) -> list[EncodedRecords]:
        """See `EncodeStage`; with the digests of the samples."""
        found, self._copied = self._copied, []
        for encoded in self._inner.results():
            unknown = np.zeros(2, np.uint64)
            digests = [self._digests.pop(number, unknown) for number in encoded.numbers]
            found.append(replace(encoded, contents=np.array(digests, np.uint64).reshape(-1, 2)))
        return found

    def watch(self, fd: int) -> int:
        """See `EncodeStage`."""
        return self._inner.watch(fd)

    def wait(self, timeout_s: float) -> None:
        """See `EncodeStage`."""
        self._inner.wait(timeout_s)

    def processor_s(self) -> float:
        """See `EncodeStage`."""
        return self._inner.processor_s()

    def close(self) -> None:
        """See `EncodeStage`."""
        self._inner.close()
