"""The worker process: what a child of a run does.

It unpickles the source that comes over its private socketpair, reads the groups it is given into free slots
of its arena, and says so. It decides nothing: retries, quarantine and timeouts are the caller's. It ends at
end of file on the socket, or with its parent. Torch is imported only if unpickling the source imports it.
"""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import asdict
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.precompute.arena import Arena, layout_from_json
from stoker.precompute.reading import (
    SampleFault,
    SampleFaultError,
    SampleReader,
    fill_group,
    pad_steps,
)
from stoker.runtime.processes.entry import Connection, use_one_thread
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.runtime.processes.wire import Frame, WorkerChannel
from stoker.schema import Sample
from stoker.sources.files import confine_sources


class Reader:
    """Takes work and room from the socket, and fills slots."""

    def __init__(self, channel: WorkerChannel, beat: HeartbeatPage, arena: Arena) -> None:
        self._channel = channel
        self._beat = beat
        self._arena = arena
        self._layout = arena.layout
        self._free = deque(range(arena.layout.slots))
        self._work: deque[list[Any]] = deque()

    def run(self, samples: SampleReader) -> None:
        """Work until the caller closes its end."""
        while self._wait_for(self._work):
            key, first, count, absent = self._work.popleft()
            numbers = range(first, first + count)
            if self._layout.mode == "group":
                going = self._send_group(samples, key, numbers, frozenset(absent))
            elif self._layout.mode == "steps":
                going = self._send_steps(samples, key, first)
            else:
                going = self._send_pieces(samples, key, numbers, frozenset(absent))
            if not going:
                return

    def _wait_for(self, queue: deque[Any]) -> bool:
        """Take frames until `queue` holds something; False once the caller is gone."""
        if not queue:
            self._beat.write("wait")
        while not queue:
            frame = self._channel.next()
            if frame is None:
                return False
            if frame["kind"] == "work":
                self._work.extend(frame["groups"])
            else:
                self._free.append(frame["slot"])
        return True

    def _send(self, frame: Frame) -> None:
        self._beat.write("wait")  # a full socket is the caller's pace, not a read that hangs
        self._channel.send(frame)

    def _send_group(self, samples: SampleReader, key: int, numbers: range, absent: frozenset[int]) -> bool:
        if not self._wait_for(self._free):
            return False
        slot = self._free.popleft()
        faults = fill_group(samples, self._arena.arrays(slot), numbers, absent.__contains__)
        self._send(
            {"kind": "parcel", "key": key, "slot": slot, "start": 0, "last": True, "faults": _plain(faults)}
        )
        return True

    def _send_steps(self, samples: SampleReader, key: int, number: int) -> bool:
        length = max(field.shape[0] for field in self._layout.schema.values() if field.time)
        for start in range(0, length, self._layout.steps):
            if not self._wait_for(self._free):
                return False
            slot = self._free.popleft()
            stop = min(start + self._layout.steps, length)
            arrays = self._arena.arrays(slot)
            faults: list[SampleFault] = []
            try:
                samples.fill_steps(arrays, (0, 0), number, (start, stop))
                pad_steps(arrays, self._layout.schema, stop - start)
            except SampleFaultError as error:
                faults = [error.fault]
            last = bool(faults) or stop == length
            self._send(
                {
                    "kind": "parcel",
                    "key": key,
                    "slot": slot,
                    "start": start,
                    "last": last,
                    "faults": _plain(faults),
                }
            )
            if faults:
                break
        return True

    def _send_pieces(self, samples: SampleReader, key: int, numbers: range, absent: frozenset[int]) -> bool:
        """Send members one after another as runs of bytes; then an empty piece that closes the group."""
        faults: list[SampleFault] = []
        for member, number in enumerate(numbers):
            if number in absent:
                continue
            try:
                for sample, row in samples.pieces(number):
                    if not self._send_sample(key, member, sample, row):
                        return False
            except SampleFaultError as error:
                faults.append(error.fault)
        self._send(
            {"kind": "piece", "key": key, "slot": -1, "chunks": [], "last": True, "faults": _plain(faults)}
        )
        return True

    def _send_sample(self, key: int, member: int, sample: Sample, row: int) -> bool:
        """Send one sample, or rows of it from `row` on, through as many slots as it takes."""
        for name, array in sample.items():
            field = self._layout.schema[name]
            data: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
            base = row * field.row_bytes if field.time and not field.ragged else 0
            length = array.shape[0] if field.ragged else -1
            for begin in range(0, max(len(data), 1), self._layout.slot_bytes):
                if not self._wait_for(self._free):
                    return False
                slot = self._free.popleft()
                part = data[begin : begin + self._layout.slot_bytes]
                np.frombuffer(self._arena.slot(slot), np.uint8)[: len(part)] = part
                chunk = [name, member, base + begin, len(part), length]
                self._send(
                    {
                        "kind": "piece",
                        "key": key,
                        "slot": slot,
                        "chunks": [chunk],
                        "last": False,
                        "faults": [],
                    }
                )
        return True


def _plain(faults: list[SampleFault]) -> list[dict[str, Any]]:
    return [asdict(fault) for fault in faults]


def serve(connection: Connection) -> int:
    """Run one reader, until the caller is gone.

    Torch, whenever the source imports it, begins with one thread, as `InProcess` reads: workers share the
    cores with the encoder. Numpy has read its own settings by now and keeps its threads.
    """
    use_one_thread()
    channel, beat = WorkerChannel(connection.socket), connection.heartbeat
    (arena_fd,) = connection.shared
    try:
        start = channel.next()
        if start is None:
            return 0
        beat.write("start")
        confine_sources(start["confined"])
        layout = layout_from_json(start["layout"])
        source = cloudpickle.loads(start["payload"])
        samples = SampleReader(source, layout.schema, start["offsets"], pulse=beat, nan=start["nan"])
    except Exception:  # noqa: BLE001  a process edge: the caller raises this with the traceback
        channel.send({"kind": "fatal", "error": traceback.format_exc()})
        return 1
    channel.send({"kind": "ready"})
    try:
        Reader(channel, beat, Arena(arena_fd, layout)).run(samples)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the caller is gone, and so is the reason to read
    return 0
