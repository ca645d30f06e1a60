"""Encoders on several devices, fed by the same readers: one process for each device, one writer for all.

A process of its own for each: the interpreter's lock would have encoders of one process take turns, and an
error that leaves a CUDA context beyond use would take the other devices with it (design note 036). Which
device a group goes to is a matter of who has room; its bits do not depend on it, since each call of an
encoder has the shape that the recipe names.

A device that is lost, hangs, dies or runs out of memory costs nobody else anything. The groups that it had in
hand are read again and go to whoever has room. Its process is started again, but not for ever, and not where
memory was short; a group at which processes end again and again ends the run.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from stoker import errors
from stoker.errors import DeviceError, Interrupted, ResourceError, StalledError, StokerError
from stoker.precompute.arena import Exchange
from stoker.precompute.device_process import DESKS, OWN_FAULTS
from stoker.precompute.encode import Encoded, GroupEncoder
from stoker.precompute.heartbeat import EncodeClock, guard_page
from stoker.precompute.process import LoggedChild
from stoker.precompute.queue import Feed, GroupWork, Ledger, Parcel, WorkQueue
from stoker.precompute.reading import SampleFault
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.share import Interrupts
from stoker.runtime.processes.child import Drain
from stoker.runtime.processes.wire import Frame
from stoker.runtime.threads import Pool
from stoker.schema import Sample, Schema
from stoker.store.values import from_array

log = logging.getLogger("stoker")

MAX_TRIES = 3
"""Processes that may end at one group, and starts of one device without a group encoded in between."""
_DUMP_S = 0.5
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What every process of a crew is started with."""

    payload: bytes
    """A `Task`, pickled once."""
    samples: Schema
    """Fields of a raw sample."""
    records: Schema
    """Fields of a record as encoded."""
    start_s: float
    """Seconds that a process may take to import and unpickle what it needs."""
    limit_s: float
    """Seconds that a call of the encoder, or its way to the device, may take."""
    logs: Path
    """Folder of output and stack dumps."""


class Crew:
    """An `Encoding` on several devices.

    Raises:
        ResourceError: Not one process can be started.
    """

    def __init__(
        self, devices: Sequence[str], equipment: Equipment, *, feed: Feed, queue: WorkQueue, ledger: Ledger
    ) -> None:
        self._equipment = equipment
        self._feed = feed
        self._queue = queue
        self._ledger = ledger
        self._drain = Drain()
        self._epoll = select.epoll()
        self._ready: list[Encoded] = []
        self._tries = Counter[int]()
        self._broken: set[int] = set()
        """Keys of samples whose encoder was lost half-way; what still comes of them is let go."""
        self.clock = EncodeClock(lanes=len(devices), limit_s=equipment.limit_s)
        self._devices = [_Device(name, place) for place, name in enumerate(devices)]
        self._last: StokerError | None = None
        self._used_s = 0.0
        try:
            for device in self._devices:
                self._start(device)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """Readable when there is something to take in."""
        return self._epoll.fileno()

    def watch(self, fd: int) -> None:
        """Have `wait`, and whoever polls `fd`, wake up for this descriptor too (signals)."""
        if fd >= 0:
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def hungry(self) -> bool:
        """See `Encoding`; one that is still starting waits for nobody."""
        return any(device.ready and not device.held for device in self._devices)

    def take(self, parcel: Parcel) -> bool:
        """See `Encoding`. The arrays are copied, so that the reader goes on at once."""
        work = parcel.work
        if parcel.over:
            self._broken.discard(work.key)
            for device in self._devices:
                device.forget(work)
            return True
        if parcel.start == 0:
            self._broken.discard(work.key)
        elif work.key in self._broken:
            self._feed.release(replace(parcel, last=False))
            if parcel.last:
                self._broken.discard(work.key)
                self._queue.give_back(work)
            return True
        at_it = [device for device in self._devices if work.key in device.works]
        free = [device for device in at_it or self._devices if device.ready and device.room]
        if not free:
            return False
        device = min(free, key=lambda one: len(one.held))
        device.take(parcel, self._queue.wanted(work), self._equipment.samples)
        self._feed.release(replace(parcel, last=False))  # done with only when its records are here
        self.clock.numbers = work.numbers
        return True

    def results(self) -> list[Encoded]:
        """See `Encoding`. Deadlines are enforced here."""
        for device in self._devices:
            if device.child is not None:
                self._take_in(device, device.child)
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """See `Encoding`."""
        if any(device.child is not None for device in self._devices):
            self._epoll.poll(timeout_s)

    def processor_s(self) -> float:
        """See `Encoding`."""
        return self._used_s + sum(d.child.processor_s() for d in self._devices if d.child is not None)

    def close(self) -> None:
        """See `Encoding`."""
        for device in self._devices:
            if device.child is not None:
                self._end(device, device.child, keep_log=False)
        self._drain.close()
        if not self._epoll.closed:
            self._epoll.close()

    def _start(self, device: _Device) -> None:
        try:
            child = device.start(self._equipment, self._drain)
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
        limit_s = beat.limit_s if beat.time_ns else self._equipment.start_s
        if limit_s and time.monotonic() - since > limit_s:
            child.request_stacks()  # its handler writes them without the interpreter's help
            if not _gone(child, _DUMP_S) and child.heartbeat.look().time_ns == beat.time_ns:
                text = f'it made no progress for {limit_s:g} s in stage "{beat.stage}"'
                self._lose(device, child, StalledError(text))

    def _records(self, device: _Device, frame: Frame) -> None:
        """Take the records of a group from a desk, which is free then."""
        work, last = device.held.pop(frame["desk"])
        for fault in frame["faults"]:
            self._ledger.fault(SampleFault(**fault))
        self.clock.seconds += frame["seconds"]
        self.clock.calls += 1
        if frame["numbers"]:
            shapes = {name: tuple(shape) for name, shape in frame["shapes"].items()}
            arrays = device.shared[DESKS + frame["desk"]].arrays(self._equipment.records, shapes)
            self._ready.append(_owned(frame, arrays, self._equipment.records))
        if last:
            del device.works[work.key]
            device.failures = 0
            self._tries.pop(work.key, None)
            self._queue.done()

    def _failed(self, device: _Device, child: LoggedChild, frame: Frame) -> None:
        kind = getattr(errors, frame["error"], StokerError)
        if kind not in OWN_FAULTS:
            raise kind(f"the encoder on {device.name}: {frame['message']}")
        self._lose(device, child, kind(frame["message"]))

    def _lose(self, device: _Device, child: LoggedChild, error: StokerError) -> None:
        """Do without a process: say why, have its groups read again, and start another unless that is vain.

        Raises:
            StokerError: It was the last device, or not the first process to end at this group.
        """
        works = [work for work, _ in device.works.values()]
        at = f" at samples {works[0].numbers.start}-{works[0].numbers.stop - 1}" if works else ""
        child.record(str(error))
        self._end(device, child, keep_log=True)
        for work, whole in reversed(device.works.values()):
            if whole:
                self._queue.give_back(work)
            else:
                self._broken.add(work.key)
        device.held, device.works = {}, {}
        device.failures += 1
        if works:
            self._tries[works[0].key] += 1
            if self._tries[works[0].key] >= MAX_TRIES:
                raise type(error)(
                    f"{MAX_TRIES} encoders in a row ended{at}, the last on {device.name}: "
                    f"{error.marked}. What is "
                    f"stored stays; run it again to resume once the cause is fixed. Stacks and output: "
                    f"{child.log}"
                )
        said = type(error)(f"the encoder on {device.name} is lost{at}: {error.marked}; output: {child.log}")
        if isinstance(error, ResourceError) or device.failures >= MAX_TRIES:
            self._give_up(device, said)
            return
        log.warning("%s. Its groups go to devices that have room, and it is started again", said)
        self._start(device)

    def _give_up(self, device: _Device, error: StokerError) -> None:
        """Go on with the other devices.

        Raises:
            StokerError: There is none.
        """
        device.given_up = True
        left = [one.name for one in self._devices if not one.given_up]
        if not left:
            raise type(error)(
                f"no device is left of {', '.join(one.name for one in self._devices)}. The last: "
                f"{error.marked}. "
                "What is stored stays; run it again to resume"
            ) from self._last
        self._last = error
        log.warning("%s. Its groups go to the rest: %s", error, ", ".join(left))


class _Device:
    """One device, its process if there is one, and what that has in hand."""

    def __init__(self, name: str, place: int) -> None:
        self.name = name
        self.child: LoggedChild | None = None
        self.shared: list[Exchange] = []
        """Desks with samples, then desks with records."""
        self.ready = False
        """The encoder is on the device."""
        self.held: dict[int, tuple[GroupWork, bool]] = {}
        """By desk: the group, and whether nothing of it comes after."""
        self.works: dict[int, tuple[GroupWork, bool]] = {}
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
        """Whether a desk is free."""
        return len(self.held) < DESKS

    def start(self, equipment: Equipment, drain: Drain) -> LoggedChild:
        """Start its process.

        Raises:
            ResourceError: No process, descriptor or memory is left.
        """
        self._starts += 1
        name = f"encoder-{self._place}-{self.name.replace(':', '')}-{self._starts}-{os.getpid()}.txt"
        shared = [Exchange.create() for _ in range(2 * DESKS)]
        fds = [exchange.fd for exchange in shared]
        try:
            child = LoggedChild(
                "stoker.precompute.device_process:serve",
                fds,
                what=f"a process to encode on {self.name}",
                log=equipment.logs / name,
                drain=drain,
                death_signal=signal.SIGTERM,
            )
        except BaseException:
            for exchange in shared:
                exchange.close()
            raise
        self.child, self.shared, self.ready, self.begun = child, shared, False, time.monotonic()
        frame = {
            "kind": "start",
            "threads": torch.get_num_threads(),
            "device": self.name,
            "limit_s": equipment.limit_s,
        }
        child.channel.send(frame, equipment.payload)
        return child

    def stop(self, *, keep_log: bool) -> None:
        """Let everything of its process go."""
        assert self.child is not None
        self.child.discard(keep_log=keep_log)
        for exchange in self.shared:
            exchange.close()
        self.child, self.shared, self.ready = None, [], False

    def forget(self, work: GroupWork) -> None:
        """Let go of what is there of the record of a sample that is over before its end."""
        if self.works.pop(work.key, None) is not None and self.child is not None:
            self.child.channel.send({"kind": "forget", "key": work.key})

    def take(self, parcel: Parcel, wanted: list[int], samples: Schema) -> None:
        """Lay a parcel on a free desk, and say so."""
        assert self.child is not None
        desk = next(desk for desk in range(DESKS) if desk not in self.held)
        shapes = {name: array.shape for name, array in parcel.arrays.items()}
        try:
            arrays = self.shared[desk].arrays(samples, shapes)
        except OSError as error:
            raise ResourceError(
                f"no memory to hand a group to {self.name}: {error}. Use fewer devices, or smaller groups"
            ) from error
        for name, array in parcel.arrays.items():
            np.copyto(arrays[name], array)
        work = parcel.work
        self.held[desk] = self.works[work.key] = (work, parcel.last)
        self.child.channel.send(
            {
                "kind": "work",
                "desk": desk,
                "key": work.key,
                "part": work.part,
                "first": work.numbers.start,
                "count": len(work.numbers),
                "start": parcel.start,
                "last": parcel.last,
                "wanted": wanted,
                "shapes": {name: list(shape) for name, shape in shapes.items()},
            }
        )


def _gone(child: LoggedChild, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    poller.poll(timeout_s * 1000)
    return child.ended()


def _owned(frame: Frame, arrays: Sample, schema: Schema) -> Encoded:
    """Records in memory that outlives the desk."""
    tensors = {name: from_array(array.copy(), schema[name].dtype) for name, array in arrays.items()}
    return Encoded(
        numbers=frame["numbers"],
        records={name: list(value) if schema[name].ragged else value for name, value in tensors.items()},
        marked=frame["marked"],
        size_bytes=sum(value.nbytes for value in tensors.values()),
    )


# ----------------------------------------------------------------------------------------------------------
# Calls the encoder in a thread, so that one that hangs can be left behind and a signal ends the run.
#
# The encoder runs in the caller's own process, where nothing can end a call of it. Past its deadline the
# stacks of all threads go to a file, and the caller gets a `StalledError`; with `on_hang="exit"` the
# process ends with the exit code for a stall. What was encoded before is kept either way. A process under a
# guardian is killed by that, also while the interpreter's lock is held, which no thread of ours could
# notice: it needs no thread.


T = TypeVar("T")

GRACE_S = 3.0
"""How long a call of the encoder may go on after a signal, so that its group is not lost."""
_LOOK_S = 0.25


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
            deadline_s=settings.deadlines.encode,
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
            "it again to encode the rest. For an encoder that is only slow, give deadlines={'encode': "
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


# ----------------------------------------------------------------------------------------------------------
# Who encodes the parcels of a run: this process, or one process for each of several devices (`crew.py`).


class Encoding(Protocol):
    """Takes parcels and gives records, in whatever order. Called by one thread."""

    clock: EncodeClock
    """Time inside the encoder, on all devices."""

    @property
    def hungry(self) -> bool:
        """Some encoder has nothing to do."""
        ...

    def take(self, parcel: Parcel) -> bool:
        """Have a parcel encoded; False when there is no room for it now.

        From then on it is this object that gives it back to its feed.

        Raises:
            StokerError: No other sample, and no other device, would mend what went wrong.
        """
        ...

    def results(self) -> list[Encoded]:
        """What has been encoded since the last call. Errors as `take`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there may be results or room, or after `timeout_s`."""
        ...

    def processor_s(self) -> float:
        """Processor time that processes of its own have used."""
        ...

    def close(self) -> None:
        """End the processes that it started; safe to call twice."""
        ...


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
