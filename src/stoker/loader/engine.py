"""The moving parts of a loader in one process: memories, threads, batches. Made anew after a fork."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from stoker.errors import StalledError
from stoker.loader import device as device_tier
from stoker.loader import residency
from stoker.loader.chunks import Chunk, Chunks, Locator
from stoker.loader.disk import DiskBatches, Reading
from stoker.loader.gather import STRIP_BATCHES, MemoryBatches, record_batches, window_batches
from stoker.loader.mapped import map_host
from stoker.loader.memory import Memory
from stoker.loader.order import Order
from stoker.loader.outputs import Output, step_lengths
from stoker.loader.packed import stored_outputs, unpacker
from stoker.loader.places import Places
from stoker.loader.ranks import Share
from stoker.loader.residency import Residency, assign
from stoker.loader.windows import Examples
from stoker.plan import Plan

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything that was decided about a loader; nothing in it changes."""

    cache: Cache
    places: Places
    examples: Examples
    outputs: tuple[Output, ...]
    windowed: bool
    order: Order
    share: Share
    plan: Plan
    device: torch.device
    static: bool
    threads: int
    """Threads that gather one large batch together."""
    reading: Reading
    """How batches are read from disk."""
    fill_s: float = 3600.0
    """Seconds that filling the device may take where nothing else can serve."""
    meter: StallMeter | None = None
    """Told what a batch was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Some consecutive batches, made as they are asked for."""

    batches: Iterable[Any]
    size: int
    """Examples in each."""
    examples: Any
    """Example numbers of all of them, numpy or on the device."""
    tier: str
    after: tuple[int, int]
    """Epoch and position after the last of them."""


class Engine:
    """Makes batches as a `Design` says."""

    def __init__(self, design: Design) -> None:
        self._design = design
        cache, places, outputs = design.cache, design.places, stored_outputs(design.outputs)
        homes = assign(cache, places, design.plan)
        memories: list[Memory] = []
        if homes["device"]:
            memories.append(device_tier.resident(cache, places, homes["device"], design.device))
        if homes["host"]:
            memories.append(map_host(cache, places, homes["host"]))
        alone = len(memories) == 1 and set(places.shards()) <= memories[0].shards
        whole = memories[0] if alone else None
        self.residency = Residency(memories=memories, whole=whole)
        on_device = whole is not None and whole.tier == "device"
        self.device = design.device if on_device else torch.device("cpu")
        self._locator = self._make_locator()
        self._chunks = Chunks(design.order, design.share, self._locator, self.device, self.residency.serving)
        self._chunks.meter = design.meter
        self._batches: MemoryBatches | None = None
        if whole is not None:
            self._batches = MemoryBatches(
                whole,
                cache.columns,
                outputs,
                design.share.batch_size,
                static=design.static,
                threads=design.threads,
            )
        self._disk = DiskBatches(cache, places, outputs, self._locator, memories, design.reading)
        self._unpack = unpacker(design.outputs, design.share.batch_size, static=design.static)
        self._names = (*(output.name for output in design.outputs), "index")
        self._disk.meter = design.meter
        # Fixed addresses exist where batches are gathered, so nothing can be served before memory is filled.
        self.residency.fill(design.fill_s if design.static else residency.FIRST_WAIT_S)
        if design.static and self.residency.serving() is None:
            raise StalledError(
                f"static=True: memory was not filled within {design.fill_s:.0f} s. "
                "Leave static out: batches then come from disk until it is"
            )

    def _make_locator(self) -> Locator:
        design = self._design
        numbers, first = design.places.numbers, design.examples.first
        on_device = self.device.type != "cpu"
        outputs = stored_outputs(design.outputs)
        whole_ragged = tuple(output.field for output in outputs if output.ragged)
        return Locator(
            examples=design.examples,
            first=torch.as_tensor(first).to(self.device) if on_device else first,
            numbers=torch.as_tensor(numbers.copy()).to(self.device) if on_device else numbers,
            windowed=design.windowed,
            step_lengths=step_lengths(outputs, design.cache.columns),
            ragged=whole_ragged,
            lengths={name: design.places.of_all(design.cache.lengths(name)) for name in whole_ragged},
        )

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """All batches of the rest of an epoch.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A read did not end in time.
        """
        serving = self.residency.serving
        for chunk in self._chunks.of(epoch, position):
            number = 0
            while number < chunk.span.batches:
                if serving() is not None:
                    yield from self._from_memory(chunk, number)
                    break
                for strip in self._from_disk(chunk, number):
                    number += 1
                    yield strip
                    if serving() is not None:
                        break

    def _from_memory(self, chunk: Chunk, number: int) -> Iterator[Strip]:
        """The chunk's batches from `number` on."""
        memory, size = self.residency.whole, chunk.span.batch
        assert self._batches is not None
        assert memory is not None
        rows = chunk.rows
        if rows is None:  # memory was still being filled when the chunk was made
            rows = self._locator.rows(memory, chunk.records, chunk.starts)
        own = slice(number * size, None)
        rows = {name: values[own] for name, values in rows.items()}
        for columns in self._batches.strips(rows, chunk.index[own], size):
            count = min(STRIP_BATCHES, chunk.span.batches - number)
            yield self._strip(columns, chunk, number, count, memory.tier)
            number += count

    def _from_disk(self, chunk: Chunk, number: int) -> Iterator[Strip]:
        for place, values in enumerate(self._disk.batches(chunk, number), number):
            columns: list[Iterable[Any]] = [[self._placed(value)] for value in values]
            yield self._strip(columns, chunk, place, 1, "disk")

    def _placed(self, value: Any) -> Any:
        """What was read from disk, where batches from memory will be too."""
        if isinstance(value, list):
            return [one.to(self.device) for one in cast("list[Tensor]", value)]
        return value.to(self.device)

    def _strip(self, columns: list[Iterable[Any]], chunk: Chunk, number: int, count: int, tier: str) -> Strip:
        positions = chunk.span.positions(number, count)
        if self._unpack is not None:
            columns = self._unpack(columns)
        if self._design.windowed:
            batches: Iterable[Any] = window_batches(self._design.outputs, columns, positions)
        else:
            batches = record_batches(self._names, columns, positions)
        size = chunk.span.batch
        own = chunk.examples[number * size : (number + count) * size]
        return Strip(batches=batches, size=size, examples=own, tier=tier, after=positions[-1])
