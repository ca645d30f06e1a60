"""The moving parts of a loader in one process: memories, threads, batches. Made anew after a fork."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stoker.errors import StalledError
from stoker.loader import residency
from stoker.loader.arguments import Options
from stoker.loader.assembly import Assembly
from stoker.loader.chunks import Chunk, Chunks, Cuts, Locator
from stoker.loader.disk import DiskBatches
from stoker.loader.gather import STRIP_BATCHES, MemoryBatches
from stoker.loader.lowering import NOTHING, Lowered
from stoker.loader.memory import Memory
from stoker.loader.order import Order
from stoker.loader.outputs import Output, step_lengths
from stoker.loader.partial import PartialBatches
from stoker.loader.places import Places
from stoker.loader.points import PointJoin
from stoker.loader.ragged import Join
from stoker.loader.ranks import Share
from stoker.loader.reach import Reach
from stoker.loader.read_ahead import fetching_of, read_ahead_of
from stoker.loader.residency import Held, Residency
from stoker.loader.watch import Ask
from stoker.loader.windows import Examples, Windows
from stoker.plan import Claim, Plan

if TYPE_CHECKING:
    from stoker.store import Cache

MOST_BATCHES = 1024
QUICK_S = 1.0
"""Batches that take less than this together may be followed by twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything that was decided about a loader; nothing in it changes."""

    cache: Cache
    places: Places
    examples: Examples
    outputs: tuple[Output, ...]
    options: Options
    """What was asked for."""
    order: Order
    share: Share
    plan: Plan
    """What to aim at; `Residency.plan` is what is aimed at by now."""
    ask: Ask
    """What the plan was made from."""
    claim: Claim
    """This loader's part of the memory of the process."""
    records_digest: str
    """Tells apart which samples are served, in which order and by which weights."""
    threads: int
    """Threads that gather one large batch together."""
    fill_s: float = 3600.0
    """Seconds that filling the device may take where nothing else can serve."""
    cuts: Cuts | None = None
    """How windows are cut from fields of points; their batches are put together by `points.py`."""
    lowered: Lowered = NOTHING
    """Transforms that the device tier does while it gathers."""
    join: Join | PointJoin | None = None
    """What is done to fields of varying length in a batch; None: they stay lists."""
    beside: str | None = None
    """How a pass beside the filling of its cache is ordered; None: the cache is complete."""

    @property
    def windows(self) -> Windows | None:
        """How examples are cut from trajectories; None: they are whole records."""
        return self.options.windows

    @property
    def windowed(self) -> bool:
        """Whether examples are windows of trajectories."""
        return self.options.windows is not None

    @property
    def device(self) -> torch.device:
        """Where batches are wanted, and made where that is possible."""
        return self.options.device

    @property
    def static(self) -> bool:
        """Whether every batch is at the same addresses."""
        return self.options.static


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Some consecutive batches, made as they are asked for."""

    batches: Iterable[Any]
    count: int
    """How many."""
    size: int
    """Examples in each."""
    examples: Any
    """Example numbers of all of them, numpy or on the device."""
    tier: str
    after: tuple[int, int]
    """Epoch and position after the last of them."""
    transformed: int = 0
    """How many of the first transforms are done."""


class Pace:
    """How many batches are made between two looks at what is held: as many as take a second or some more."""

    def __init__(self) -> None:
        self.batches = 4
        self._begun = time.monotonic()

    def next(self) -> int:
        """The batches to make now, at most."""
        now = time.monotonic()
        spent, self._begun = now - self._begun, now
        if spent < QUICK_S:
            self.batches = min(MOST_BATCHES, 2 * self.batches)
        elif spent > 4 * QUICK_S:
            self.batches = max(1, self.batches // 2)
        return self.batches


class Engine:
    """Makes batches as a `Design` says."""

    def __init__(self, design: Design) -> None:
        self._design = design
        self.residency = Residency(design)
        self.device = design.device
        """Where batches are."""
        self._assembly = Assembly(design.outputs, design.options)
        self._outputs = self._assembly.columns
        self._pace = Pace()
        self._locators: dict[str, Locator] = {}
        self._chunked: dict[str, Chunks] = {}
        self._batches: tuple[Memory, MemoryBatches] | None = None
        self._disk = self._make_disk(self._outputs)
        self._partial: PartialBatches | None = None
        cpu = torch.device("cpu")
        self._reading_ahead = read_ahead_of(
            design.cache, self._reach, design.share, lambda epoch: self._chunks(cpu).order(epoch)
        )
        # Fixed addresses exist where batches are gathered, so nothing can be served before memory is filled.
        self.residency.fill(design.fill_s if design.static else residency.FIRST_WAIT_S)
        if design.static and self.residency.serving() is None:
            raise StalledError(
                f"static=True: memory was not filled within {design.fill_s:.0f} s. "
                "Leave static out: batches then come from disk until it is"
            )

    def _make_disk(self, outputs: tuple[Output, ...]) -> DiskBatches:
        design, locator = self._design, self._locator(torch.device("cpu"))
        made = DiskBatches(
            design.cache, design.places, outputs, locator, lambda: self.residency.held.host, design.options
        )
        made.fetching_s = fetching_of(design.cache)
        return made

    def _reach(self, block_bytes: int) -> Reach:
        design = self._design
        return Reach(design.cache, design.places, design.examples, self._outputs, block_bytes)

    def _read_ahead(self, chunk: Chunk, number: int) -> None:
        """Tell what reads ahead that the batch of this number of a chunk is about to be made."""
        if self._reading_ahead is not None:
            span = chunk.span
            self._reading_ahead.at(span.epoch, span.position + number * span.step)

    def _locator(self, device: torch.device) -> Locator:
        """Turns examples into rows on `device`."""
        if device.type not in self._locators:
            self._locators[device.type] = self._make_locator(device)
        return self._locators[device.type]

    def _chunks(self, device: torch.device) -> Chunks:
        """The order, made on `device`."""
        if device.type not in self._chunked:
            design, locator = self._design, self._locator(device)
            serving = partial(self._whole_on, device)
            self._chunked[device.type] = Chunks(design.order, design.share, locator, device, serving)
            self._chunked[device.type].meter = design.options.meter
        return self._chunked[device.type]

    def _whole_on(self, device: torch.device) -> Memory | None:
        whole = self.residency.serving()
        return whole if whole is not None and whole.device.type == device.type else None

    def _make_locator(self, device: torch.device) -> Locator:
        design = self._design
        numbers, first = design.places.numbers, design.examples.first
        on_device = device.type != "cpu"
        whole_ragged = tuple(output.field for output in self._outputs if output.ragged)
        return Locator(
            examples=design.examples,
            first=torch.as_tensor(first, device="cpu").to(device) if on_device else first,
            numbers=torch.as_tensor(numbers.copy(), device="cpu").to(device) if on_device else numbers,
            windowed=design.windowed,
            step_lengths=step_lengths(self._outputs, design.cache.recipe.columns),
            ragged=whole_ragged,
            lengths={name: design.places.of_all(design.cache.lengths(name)) for name in whole_ragged},
            cuts=design.cuts,
        )

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """All batches of the rest of an epoch.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A read did not end in time.
        """
        at = (epoch, position)
        while at[0] == epoch:
            held = self._turn()
            for strip in self._from(held, *at):
                at, count = strip.after, strip.count
                yield strip
                del strip  # it refers to the memory that its batches come from
                if self.residency.turn(count) is not held:
                    break
            else:
                return
            del held

    def _turn(self) -> Held:
        """What is held now, and nothing else referred to: neither while memory is given back, nor later."""
        self._forget(self.residency.held)
        held = self.residency.turn(0)
        self._forget(held)
        return held

    def _forget(self, held: Held) -> None:
        """Refer to no memory that is not held any more, so that it is free for what comes in its place."""
        if self._batches is not None and self._batches[0] not in held.memories:
            self._batches = None
        self._disk.forget(held.host)
        if self._partial is not None:
            self._partial.forget(held.device, held.host)

    def _from(self, held: Held, epoch: int, position: int) -> Iterator[Strip]:
        """The same from what is held now, until that changes."""
        whole, device = held.whole, self.device
        if whole is not None and whole.device.type == device.type:
            for chunk in self._chunks(whole.device).of(epoch, position):
                yield from self._from_memory(chunk, whole)
            return
        for chunk in self._chunks(torch.device("cpu")).of(epoch, position):
            if held.device is None and device.type == "cpu":
                yield from self._from_disk(chunk)
            else:
                yield from self._from_several(chunk, held)

    def _from_memory(self, chunk: Chunk, memory: Memory) -> Iterator[Strip]:
        design, size = self._design, chunk.span.batch
        lowered = design.lowered if memory.tier == "device" else NOTHING
        if self._batches is None or self._batches[0] is not memory:
            gathers = MemoryBatches(
                memory,
                design.cache.recipe.columns,
                lowered.outputs(self._outputs),
                design.share.batch_size,
                static=design.static,
                threads=design.threads,
            )
            self._batches = (memory, gathers)
        gathers = self._batches[1]
        rows = chunk.rows
        if rows is None or chunk.memory is None or chunk.memory() is not memory:
            # Another one served when the chunk was made, or none.
            rows = self._locator(memory.device).rows(memory, chunk.records, chunk.starts)
        number = 0
        while number < chunk.span.batches:
            count = min(self._pace.next(), STRIP_BATCHES, chunk.span.batches - number)
            own = slice(number * size, (number + count) * size)
            some = {name: values[own] for name, values in rows.items()}
            views = lowered.views(chunk.span.epoch, chunk.examples[own], memory.device)
            for columns in gathers.strips(some, chunk.index[own], size, views):
                strip = self._strip(columns, chunk, number, count, memory.tier)
                yield replace(strip, transformed=lowered.count)
                del strip
            number += count

    def _from_disk(self, chunk: Chunk) -> Iterator[Strip]:
        self._read_ahead(chunk, 0)
        for number, values in enumerate(self._disk.batches(chunk, 0)):
            self._read_ahead(chunk, number + 1)
            columns: list[Iterable[Any]] = [[value] for value in values]
            yield self._strip(columns, chunk, number, 1, "disk")

    def _from_several(self, chunk: Chunk, held: Held) -> Iterator[Strip]:
        if self._partial is None:
            design, locator = self._design, self._locator(torch.device("cpu"))
            self._partial = PartialBatches(
                self._outputs, design.cache, design.places, locator, self._make_disk, self.device
            )
            self._partial.meter = design.options.meter
        number, window = 0, self._design.order.kind.window
        self._read_ahead(chunk, 0)
        for columns, count, tier in self._partial.strips(chunk, held.device, window, self._pace.next):
            self._read_ahead(chunk, number + count)
            yield self._strip(columns, chunk, number, count, tier)
            number += count

    def _strip(self, columns: list[Iterable[Any]], chunk: Chunk, number: int, count: int, tier: str) -> Strip:
        positions, size = chunk.span.positions(number, count), chunk.span.batch
        own = chunk.examples[number * size : (number + count) * size]
        batches = self._assembly.batches(columns, positions, own, chunk.span.epoch, size)
        return Strip(batches=batches, count=count, size=size, examples=own, tier=tier, after=positions[-1])
