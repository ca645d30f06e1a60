"""The device tier: one resident tensor per field, filled straight from shards.

Bytes go from the file into a page-locked buffer, are hashed there, and are copied to the device on a stream
of their own while the next buffer is read: the host never holds more of the set than these buffers.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import StalledError, arg
from stoker.loader.memory import (
    Layout,
    Memory,
    bytes_of,
    make_layout,
    read_column,
    record_rows,
    record_steps,
    torch_dtype,
    unit_shape,
)
from stoker.loader.places import Places
from stoker.plan.resources import use_device
from stoker.store.shard_read import PIECE_BYTES
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.store import Cache

STAGING_BUFFERS = 8
"""Buffers of `PIECE_BYTES` for each shard that is being loaded."""
COPY_DEADLINE_S = 60.0
"""Seconds that one buffer may take to reach the device."""
RELAXED_CAPTURE = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED` of cuda.h."""
POLL_S = 20e-6
"""Seconds between two looks at a copy that is still going on, far less than one takes."""


def resident(cache: Cache, places: Places, shards: frozenset[int], device: torch.device) -> Memory:
    """Allocate the fields of `shards` on `device`; loading copies them there."""
    schema = cache.recipe.columns
    layout = make_layout(cache, shards, schema, 1, {})
    sources = {
        name: torch.empty((layout.span(name), *unit_shape(f)), dtype=torch_dtype(f), device=device)
        for name, f in schema.items()
    }
    if device.type == "cuda":
        # What was in this memory before may still be in use in the caller's stream; copies come in others.
        torch.cuda.current_stream(device).synchronize()
    tables = {name: record_steps(cache, layout, places, name) for name in layout.steps}
    return Memory(
        tier="device",
        device=device,
        sources=sources,
        rows=_placed(record_rows(layout, places), device),
        steps={name: _placed(table, device) for name, table in tables.items()},
        load=partial(_load, cache, layout, sources),
        shards=shards,
        ready=bytearray(len(cache.index.shards)),
    )


def finish_reads(device: torch.device) -> None:
    """Wait for all that was begun on a GPU: other streams may read memory that is let go of."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def begin_thread(device: torch.device) -> None:
    """Prepare a thread of the loader that copies to a GPU, or asks whether copies are done.

    The GPU is its current one, not GPU 0. While another thread captures a CUDA graph in the default mode,
    CUDA forbids all threads to allocate page-locked memory and to ask events, and one that does ruins
    the capture, unless it says that it has no part in captures (`cuThreadExchangeStreamCaptureMode`).
    """
    if device.type != "cuda":
        return
    use_device(device)
    if (driver := _driver()) is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE)))


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _placed(table: NDArray[np.int64], device: torch.device) -> Any:
    """A table where the order is made: numpy on a CPU."""
    return table if device.type == "cpu" else torch.as_tensor(table, device="cpu").to(device)


def _load(cache: Cache, layout: Layout, sources: Mapping[str, Tensor], shard: int) -> None:
    staging = Staging(next(iter(sources.values())).device)
    try:
        for name, source in sources.items():
            begin, count = layout.part(name, shard)
            target = source[begin : begin + count].reshape(-1).view(torch.uint8)
            read_column(cache, shard, name, staging.into(target))
    finally:
        staging.wait()  # also after an error: nothing may be written to memory that was let go


class Staging:
    """Page-locked buffers through which bytes go to a device: one is filled while others are copied.

    A `ColumnSink` for one thread. On a CPU the buffers are plain memory, and copies are done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._cuda, device="cpu")
            for _ in range(STAGING_BUFFERS)
        ]
        self._spaces = [bytes_of(buffer) for buffer in self._buffers]
        self._copied: list[Any] = [None] * STAGING_BUFFERS
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._target = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._next = 0

    def into(self, target: Tensor) -> Staging:
        """This, for a column that belongs into `target`, bytes on the device."""
        self._target = target
        return self

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """The next buffer, once it was copied from; at most `PIECE_BYTES`."""
        self._await(self._next)
        return self._spaces[self._next][:size]

    def filled(self, offset: int, size: int) -> None:
        """Begin to copy the buffer."""
        source, target = self._buffers[self._next][:size], self._target[offset : offset + size]
        if self._cuda:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                self._copied[self._next] = self._stream.record_event()
        else:
            target.copy_(source)
        self._next = (self._next + 1) % STAGING_BUFFERS

    def wait(self) -> None:
        """Wait until all buffers were copied.

        Raises:
            StalledError: A copy did not end in time.
        """
        for place in range(STAGING_BUFFERS):
            self._await(place)

    def _await(self, place: int) -> None:
        event, self._copied[place] = self._copied[place], None
        until = time.monotonic() + COPY_DEADLINE_S
        while event is not None and not event.query():
            if time.monotonic() > until:
                raise StalledError(
                    f"a copy of {format_bytes(PIECE_BYTES)} to {self._device} was not done after "
                    f"{COPY_DEADLINE_S:g} s. The device does not answer; serve from "
                    f"{arg('tier', 'host')} meanwhile"
                )
            time.sleep(POLL_S)
