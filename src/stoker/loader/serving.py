"""Make the batches of one loader in one process: memories, threads, and repairs on the way."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from stoker.errors import ConfigError, CorruptError, StalledError, StokerError, arg
from stoker.loader import placement
from stoker.loader.assembly import BatchAssembly
from stoker.loader.chunks import Chunk, Chunks, ColumnStrip, Locator, chosen_in
from stoker.loader.design import (
    check_filling,
    complete_cache,
    decide,
    decide_filling,
    is_served_while_filling,
)
from stoker.loader.disk import DiskBatches, PartialBatches
from stoker.loader.gather import STRIP_BATCHES, MemoryBatches
from stoker.loader.outputs import OutputSpec, step_lengths
from stoker.loader.placement import MemorySet, Placement
from stoker.loader.prefetch import (
    BatchPrefetcher,
    BlockLocator,
    BlockPrefetcher,
    find_mirror_roots,
    make_block_prefetcher,
)
from stoker.loader.records import column_of, drop_quarantined
from stoker.loader.transform import NO_CUTS
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.store import open_cache
from stoker.store.cache import JointCache, reopen
from stoker.units import format_few

if TYPE_CHECKING:
    from stoker.loader.choose import FieldGroup
    from stoker.loader.design import Design
    from stoker.loader.filling import FillChunks
    from stoker.loader.options import Options
    from stoker.loader.tiers import Memory
    from stoker.plan import Plan
    from stoker.store import Cache
    from stoker.store.cache import Filler

log = logging.getLogger("stoker")


# ----------------------------------------------------------------------------------------------------------
# Damaged records that a loader meets: set aside, encoded again from their source, and then served.
#
# The damage is noted in the cache, so the repair serves every process. Of several processes that meet it
# (ranks, loaders) one does the work under a lock, and the others find it done.


REPAIR_TIMEOUT_S = 600.0
"""Seconds that one repair may take: waiting for another process, reading a shard, encoding its records."""
TRIES = 2
"""How often a loader has the same record encoded again: storage that damages it each time is broken."""
LOCK_NAME = "repair"


class Repairer:
    """Has damaged records encoded again for one loader, and counts them."""

    def __init__(self) -> None:
        self.records = 0
        """Records that were encoded again by this process."""
        self._tried: Counter[tuple[str, int | str]] = Counter()

    def repair(self, cache: Cache, error: CorruptError) -> Cache:
        """Return the cache with all records that it had, those named by `error` encoded again.

        Raises:
            CorruptError: The cache has no filler, or encoding failed; says why and what to do.
        """
        if isinstance(cache, JointCache):
            owners = cache.owners(error)
            able = next((owner for owner in owners if self.has_source(owner, error)), owners[0])
            repaired = self.repair(able, error)
            return cache.of([repaired if member in owners else member for member in cache.members])
        if cache.filler is None or not error.shard:
            raise error
        try:
            repaired = self._encode_again(cache, error, cache.filler)
        except StokerError as reason:
            fact = f"{error.fact}. Encoding it again from its source failed: {reason.problem.fact}"
            hint = reason.problem.hint
            raise CorruptError(fact, hint=hint, shard=error.shard, folder=error.folder) from reason
        repaired.filler, repaired.joined = cache.filler, cache.joined
        return repaired

    def has_source(self, cache: Cache, error: CorruptError) -> bool:
        """Return True if a filler can encode again what `error` names."""
        if isinstance(cache, JointCache):
            return any(self.has_source(owner, error) for owner in cache.owners(error))
        return cache.filler is not None

    def _encode_again(self, cache: Cache, error: CorruptError, filler: Filler) -> Cache:
        from stoker.store.maintain import repair  # few runs meet a damaged record

        until = time.monotonic() + REPAIR_TIMEOUT_S
        with lock_folder(cache.path, LOCK_NAME, timeout_s=REPAIR_TIMEOUT_S) as got:
            if not got:
                raise StalledError(
                    f"{lock_holder(cache.path, LOCK_NAME)} has been repairing {cache.path} for "
                    f"{REPAIR_TIMEOUT_S:g} s",
                    hint="See whether it hangs",
                )
            found = repair(cache.path, shards=[error.shard])
            lost = _lost(cache, open_cache(cache.path, require_complete=False))
            self._count(str(cache.path), lost or [error.shard])
            if lost:
                filler.fill(lost, until - time.monotonic())
                self.records += len(lost)
        opened = open_cache(cache.path, require_complete=False)
        if lost := _lost(cache, opened):
            raise CorruptError(f"{len(lost)} records are still missing, the first is sample {lost[0]}")
        if bad := [record.index for record in found.bad if record.index >= 0]:
            log.warning("%s. Encoded again from the source: samples %s", error.fact, format_few(bad, 10))
        else:
            log.warning("%s. It is sound now: another process repaired it, or a read went wrong", error.fact)
        return opened

    def _count(self, folder: str, keys: list[int] | list[str]) -> None:
        self._tried.update((folder, key) for key in keys)
        (folder, worst), times = self._tried.most_common(1)[0]
        if times > TRIES:
            what = f"sample {worst}" if isinstance(worst, int) else worst
            raise CorruptError(
                f"{what} of {folder} has been damaged {times} times in this run", hint="Look at the storage"
            )


def _lost(before: Cache, now: Cache) -> list[int]:
    """Return the samples that were stored before and are not now."""
    return np.setdiff1d(before.indices, now.indices).tolist()


# ----------------------------------------------------------------------------------------------------------
# The moving parts of a loader in one process: memories, threads, batches. Made again after a fork.


MOST_BATCHES = 1024
CHOSEN_ROWS = 1 << 19
"""Rows that are chosen in one go at most: a few megabytes of their places."""
QUICK_S = 1.0
"""Batches that take less than this together may be followed by twice as many."""

ColumnMaker: TypeAlias = "Callable[[Chunk], Iterator[ColumnStrip]]"
"""Makes the batches of a chunk as columns, some at a time, from one place."""


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


class StripPace:
    """Batches to make before memory is looked at again: those of a second or a little more."""

    def __init__(self) -> None:
        self.batches = 4
        self._begun = time.monotonic()

    def next(self) -> int:
        """Return the most batches to make now."""
        now = time.monotonic()
        spent, self._begun = now - self._begun, now
        if spent < QUICK_S:
            self.batches = min(MOST_BATCHES, 2 * self.batches)
        elif spent > 4 * QUICK_S:
            self.batches = max(1, self.batches // 2)
        return self.batches


class Engine:
    """Makes batches as a `Design` says."""

    def __init__(self, design: Design, fill_chunks: FillChunks | None = None) -> None:
        """`fill_chunks` gives the examples of a cache that is being filled, in place of the order."""
        self._design = design
        self._fill_chunks = fill_chunks
        self.placement = Placement(design)
        self.device = design.options.device if fill_chunks is None else torch.device("cpu")
        """Where batches are made."""
        self._assembly = BatchAssembly(design.outputs, design.options, design.join)
        self._outputs = self._assembly.columns
        self._chosen_rows = sum(group.count for group in design.options.choose)
        """Rows that are chosen of each example."""
        self._pace = StripPace()
        self._locators: dict[str, Locator] = {} if fill_chunks is None else {"cpu": fill_chunks.locator}
        self._chunks: dict[str, Chunks] = {}
        self._batches: tuple[Memory, MemoryBatches] | None = None
        self._disk = self._make_disk(self._outputs)
        self._partial: PartialBatches | None = None
        cpu = torch.device("cpu")
        self._block_prefetcher: BlockPrefetcher | None = None
        if fill_chunks is None:
            self._block_prefetcher = make_block_prefetcher(
                design.cache,
                partial(BlockLocator, design.cache, design.table, design.examples, self._outputs),
                design.share,
                lambda epoch: self._chunks_on(cpu).order(epoch),
            )
        static = design.options.static
        # Fixed addresses exist where batches are gathered, so nothing can be served before memory is filled.
        self.placement.fill(design.fill_timeout_s if static else placement.FIRST_WAIT_S)
        if static and self.placement.serving() is None:
            raise StalledError(
                f"static=True: memory was not filled within {design.fill_timeout_s:.0f} s",
                hint="Leave static out: batches then come from disk until it is",
            )

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """Yield all batches of the rest of an epoch, each record from the fastest memory that holds it.

        Raises:
            CorruptError: A record's bytes do not match their checksums.
            StalledError: A read did not end in time.
        """
        at = (epoch, position)
        while at[0] == epoch:
            held = self._next_held()
            device, make, block_prefetcher = self._choose(held)
            if block_prefetcher is not None:
                block_prefetcher.at(*at)
            chunks = self._chunks_on(device) if self._fill_chunks is None else self._fill_chunks
            for strip in (self._strip(chunk, made) for chunk in chunks.of(*at) for made in make(chunk)):
                at, count = strip.after, strip.count
                if block_prefetcher is not None:
                    block_prefetcher.at(*at)
                yield strip
                del strip  # it refers to the memory that its batches come from
                if self.placement.turn(count) is not held:
                    break
            else:
                return
            del held, make

    def _next_held(self) -> MemorySet:
        """Return what is held now, and refer to no other memory: one that goes must be free for the next."""
        self._forget_all_but(self.placement.held)
        held = self.placement.turn(0)
        self._forget_all_but(held)
        return held

    def _forget_all_but(self, held: MemorySet) -> None:
        if self._batches is not None and self._batches[0] not in held.memories:
            self._batches = None
        self._disk.forget(held.host)
        if self._partial is not None:
            self._partial.forget(held.device, held.host)

    def _choose(self, held: MemorySet) -> tuple[torch.device, ColumnMaker, BlockPrefetcher | None]:
        """Return where the order is made, what makes batches, and what prefetches blocks for it."""
        whole, cpu = held.whole, torch.device("cpu")
        if whole is not None and whole.device.type == self.device.type:
            return whole.device, partial(self._from_memory, whole), None
        if held.device is None and self.device.type == "cpu":
            return cpu, self._disk.strips, self._block_prefetcher
        if self._partial is None:
            design = self._design
            self._partial = PartialBatches(
                self._outputs,
                design.cache,
                design.table,
                self._locator(cpu),
                self._make_disk,
                self.device,
                window=design.order.kind.window,
                most=self._pace.next,
                meter=design.options.meter,
            )
        return cpu, partial(self._partial.strips, near=held.device), self._block_prefetcher

    def _from_memory(self, memory: Memory, chunk: Chunk) -> Iterator[ColumnStrip]:
        design, size = self._design, chunk.span.batch
        cuts = design.fused_cuts if memory.tier == "device" else NO_CUTS
        if self._batches is None or self._batches[0] is not memory:
            gathers = MemoryBatches(
                memory,
                design.cache.recipe.columns,
                cuts.outputs(self._outputs),
                design.share.batch_size,
                static=design.options.static,
                threads=design.threads,
            )
            self._batches = (memory, gathers)
        gathers = self._batches[1]
        rows = chunk.rows
        if rows is None or chunk.memory is None or chunk.memory() is not memory:
            # Another one served when the chunk was made, or none.
            locator = self._locator(memory.device)
            rows = locator.rows(memory, chunk.records, chunk.starts, chunk.on_host)
        number = 0
        while number < chunk.span.batches:
            most = max(1, CHOSEN_ROWS // (size * self._chosen_rows)) if self._chosen_rows else STRIP_BATCHES
            count = min(self._pace.next(), STRIP_BATCHES, most, chunk.span.batches - number)
            own = slice(number * size, (number + count) * size)
            some = {name: values[own] for name, values in rows.items()}
            if chunk.draw is not None:
                chosen = chunk.draw.of(own).rows()
                some |= chosen_in(memory, self._outputs, chunk.records[own], chosen)
            views = cuts.views(chunk.span.epoch, chunk.examples[own], memory.device)
            columns = gathers.columns(some, chunk.index[own], size, views)
            yield ColumnStrip(columns, number, count, memory.tier, cuts.count)
            number += count

    def _strip(self, chunk: Chunk, made: ColumnStrip) -> Strip:
        span, number, count = chunk.span, made.number, made.batch_count
        positions, size = span.positions(number, count), span.batch
        own = chunk.examples[number * size : (number + count) * size]
        return Strip(
            batches=self._assembly.batches(made.columns, positions, own, span.epoch, size),
            count=count,
            size=size,
            examples=own,
            tier=made.tier if self._fill_chunks is None else "encode",
            after=positions[-1],
            transformed=made.transformed,
        )

    def _make_disk(self, outputs: tuple[OutputSpec, ...]) -> DiskBatches:
        design, locator = self._design, self._locator(torch.device("cpu"))
        return DiskBatches(
            design.cache,
            design.table,
            outputs,
            locator,
            lambda: self.placement.held.host,
            design.options,
            threads=design.threads,
            mirrors=find_mirror_roots(design.cache),
        )

    def _chunks_on(self, device: torch.device) -> Chunks:
        """Return the order, made on `device`."""
        kind = device.type
        if kind not in self._chunks:

            def serving() -> Memory | None:
                whole = self.placement.serving()
                return whole if whole is not None and whole.device.type == kind else None

            design, locator = self._design, self._locator(device)
            self._chunks[kind] = Chunks(
                design.order, design.share, locator, device, serving, design.options.meter
            )
        return self._chunks[kind]

    def _locator(self, device: torch.device) -> Locator:
        """Return what turns examples into rows, on `device`."""
        if device.type in self._locators:
            return self._locators[device.type]
        design = self._design
        indices, first = design.table.indices, design.examples.first
        on_device = device.type != "cpu"
        ragged = tuple(output.field for output in self._outputs if output.ragged)
        sizes = self._assembly.host_sizes if on_device else ()
        self._locators[device.type] = Locator(
            examples=design.examples,
            first=torch.as_tensor(first, device="cpu").to(device) if on_device else first,
            indices=torch.as_tensor(indices.copy(), device="cpu").to(device) if on_device else indices,
            windowed=design.options.windowed,
            step_lengths=step_lengths(self._outputs, design.cache.recipe.columns),
            ragged=ragged,
            lengths={name: design.table.of_all(design.cache.lengths(name)) for name in ragged},
            cuts=design.cuts,
            choices=design.options.choose,
            seed=design.options.seed,
            sizes={group.name: self._sizes(group, device) for group in design.options.choose},
            shapes={name: column_of(design.cache, design.table, name) for name in sizes},
        )
        return self._locators[device.type]

    def _sizes(self, group: FieldGroup, device: torch.device) -> Any:
        """Return the rows that each record has of a group of fields, where the order is made."""
        design = self._design
        sizes = design.table.of_all(design.cache.lengths(group.fields[0]))
        return sizes if device.type == "cpu" else torch.as_tensor(sizes, device="cpu").to(device)


# ----------------------------------------------------------------------------------------------------------
# What a loader serves from: a complete cache, or one that is being filled.


class Serving:
    """Makes the batches of one loader, from a complete cache."""

    def __init__(self, cache: Cache, options: Options, repairer: Repairer) -> None:
        """`cache` lacks nothing, or what can encode what it lacks.

        Raises:
            StokerError: As `decide` and `complete_cache`.
        """
        self._repairer, self._options = repairer, options
        self.fill_chunks: FillChunks | None = None
        self.design = self._begin(cache)
        """What was decided, as it is by now."""
        self.engine: Engine | None = None
        """What makes batches in this process, since the first was asked for."""
        self.prefetcher = self._make_prefetcher()
        """What makes batches of host memory while the step computes; another one after a fork."""
        self._stop: weakref.finalize[[], Serving] | None = None
        self._process, self._known_to = 0, os.getpid()
        self._building: dict[int, threading.Lock] = {}
        """By process, since a lock that another thread held at a fork is never released in the child."""

    def _begin(self, cache: Cache) -> Design:
        cache = complete_cache(cache)
        weights = drop_quarantined(self._options.weights, cache, self._options.indices)
        self._options = replace(self._options, weights=weights)
        return self._decided(cache, self._options)

    def steps(self, epoch: int) -> int | None:
        """Return the batches of this rank in an epoch; None: not known yet."""
        return self.design.share.steps(epoch=epoch)

    @property
    def plan(self) -> Plan:
        """Records by tier: as placed now, or as planned before the first batch."""
        return self.design.plan if self.engine is None else self.engine.placement.plan

    @property
    def faulted(self) -> int:
        """Page faults that went to disk since iteration began; not counted while all is read from disk."""
        return 0 if self.engine is None or self.fill_chunks is not None else self.engine.placement.faulted()

    @property
    def device(self) -> torch.device:
        """The device on which batches are made: the one asked for, or the CPU while the cache is filled."""
        return self.design.options.device if self.fill_chunks is None else torch.device("cpu")

    def begin(self, epoch: int, batch: int) -> int:
        """Position at which the batch of that number of an epoch begins."""
        return self.design.share.begin(epoch, batch)

    def complete(self, *, wait: bool = False) -> Cache | None:
        """Return a complete cache to serve from now on; None while this one is to be served."""
        return None

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """Yield the batches of the rest of an epoch; damaged records are repaired on the way.

        Raises:
            CorruptError: A record's bytes do not match their checksums, and no filler can encode it again.
            StalledError: A read did not end in time.
        """
        at = (epoch, position)
        while at[0] == epoch:
            try:
                for strip in self.running().strips(*at):
                    at = strip.after
                    yield strip
                    del strip  # it refers to memory that may be released before the next one
            except CorruptError as error:
                self._repair(error)
            else:
                return

    def running(self) -> Engine:
        """Return the engine of this process, the same for all its threads.

        Threads and locks do not survive a fork, so a child makes its own.
        """
        with self._building.setdefault(os.getpid(), threading.Lock()):
            if self.engine is None or self._process != os.getpid():
                cache = self.design.cache
                if self._known_to != os.getpid():
                    _after_fork()
                    self._known_to = os.getpid()
                if self.engine is not None:
                    cache = reopen(cache)
                with torch.inference_mode(False):  # memory outlives the caller's mode, and a thread fills it
                    self.engine = Engine(replace(self.design, cache=cache), self.fill_chunks)
                self._process, self.prefetcher = os.getpid(), self._make_prefetcher()
                self._stop = weakref.finalize(self, self.engine.placement.stop)
                self._stop.atexit = False
            return self.engine

    def close(self) -> None:
        """Give the memory back and close the files. The next pass reads them again."""
        if self._stop is not None:
            self._stop()
        self.engine = None
        self.design.cache.close()

    def _make_prefetcher(self) -> BatchPrefetcher:
        # A thread of its own would be in another stream of a GPU, and write over a batch at a fixed address.
        inline = self.design.options.static or self.design.options.device.type != "cpu"
        return BatchPrefetcher(cores=1 if inline else self.design.threads)

    def _decided(self, cache: Cache, options: Options, plan: Plan | None = None) -> Design:
        """Return a design for `cache`, or for what it is once its headers are repaired."""
        while True:
            try:
                return decide(cache, options, plan)
            except CorruptError as error:
                cache = self._repairer.repair(cache, error)

    def _repair(self, error: CorruptError) -> None:
        """Have damaged records encoded again, and serve the same examples from where they are then."""
        if self._repairer.has_source(self.design.cache, error):
            # The engine's memory is wanted for the next one, and the frames of the error hold it too.
            error = error.with_traceback(None)
            self._retire()
        with torch.inference_mode(False):
            cache = self._repairer.repair(self.design.cache, error)
            options = replace(self._options, indices=self.design.table.indices)
            # Not planned again: what is free by now is what the model and the old tier have left.
            self.design = self._decided(cache, options, self.design.plan)

    def _retire(self) -> None:
        """Let go of the engine; what it has read, and is reading, goes with it."""
        if self._stop is not None:
            self._stop()
        self.engine = self._stop = None


class FillServing(Serving):
    """The same from a cache that is being filled, also once that has ended: each example of the pass once.

    From the next epoch on the cache is complete, and the order is the one that was asked for.
    """

    def __init__(self, cache: Cache, options: Options, repairer: Repairer) -> None:
        """Decide about the examples of the entire cache, stored or not.

        Raises:
            ConfigError: Something was asked for that needs a complete cache.
        """
        from stoker.loader.filling import FillChunks  # most caches are complete

        check_filling(cache, options)
        super().__init__(cache, options, repairer)
        assert self.design.fill is not None
        self._made_in = os.getpid()
        self._fill, self._positions = self.design.fill, self.design.order.positions
        self.fill_chunks = self._fill_chunks = FillChunks(
            cache, options, self._fill, self.design.share, self._changed
        )

    def _begin(self, cache: Cache) -> Design:
        from stoker.loader.filling import FillOrder

        options = self._options
        return decide_filling(cache, options, FillOrder(cache.recipe, options))

    def steps(self, epoch: int) -> int | None:
        """As `Serving.steps`; None while trajectories of varying length are still to be counted."""
        share = self.design.share
        if self._fill.varying:
            counted = self._fill_chunks.counted
            return None if counted is None else replace(share, positions=counted).steps()
        return share.steps()

    def begin(self, epoch: int, batch: int) -> int:
        """As `Serving.begin`; waits for the records before it.

        Raises:
            StokerError: As `Serving.strips`.
        """
        if self.design.share.contiguous:  # no sample is skipped
            return super().begin(epoch, batch)
        return self._fill_chunks.begin(epoch, batch)

    def complete(self, *, wait: bool = False) -> Cache | None:
        """Return the cache, once it is complete; None while it is not, unless that is to be waited for.

        Raises:
            StokerError: Filling failed.
            StalledError: It came to a halt.
        """
        cache = self.design.cache
        filling = cache.filling
        if filling is None:
            return cache
        from stoker.loader.filling import LOOK_S

        settled = filling.look()[1]
        while not filling.done():
            if not wait and not settled.all():
                return None
            filling.wait(LOOK_S)
        filling.served = True
        return complete_cache(cache)

    def running(self) -> Engine:
        """As `Serving.running`.

        Raises:
            ConfigError: In a fork, which does not hear what is stored.
        """
        if self._made_in != os.getpid():
            raise ConfigError(
                "this loader's cache is being filled for the process that made it, and this one is a fork "
                "of that",
                hint="Make the loader here, or when the cache is complete",
            )
        return super().running()

    def _changed(self, cache: Cache, lost: int) -> None:
        share = replace(self.design.share, positions=self._positions - lost)
        self.design = replace(self.design, cache=cache, share=share)

    def _repair(self, error: CorruptError) -> None:
        self._fill_chunks.use_repaired(self._repairer.repair(self.design.cache, error))


def begin_serving(cache: Cache, options: Options, repairer: Repairer) -> Serving:
    """Return what serves `cache`: while it is being filled, if it is or `tier="encode"` asks for it.

    Raises:
        ConfigError: Something was asked for that needs a complete cache.
        StokerError: Filling has failed; or as `Serving`.
    """
    if not cache.complete and cache.filling is None and options.tier == "encode" and cache.filler is not None:
        if options.world_size > 1:
            raise ConfigError(
                f"tier='encode' with world_size={options.world_size} begins to fill {cache.path}, and a "
                "rank that comes when it is complete would serve another order",
                hint=f"Call precompute with {arg('wait', False)} in each rank, after init_process_group, "
                "and leave tier out",
            )
        cache.filling = cache.filler.begin()
    if is_served_while_filling(cache, options.world_size):
        return FillServing(cache, options, repairer)
    return Serving(cache, options, repairer)


def _after_fork() -> None:
    """Have torch compute on one thread in a process that was forked.

    A fork does not copy torch's threads, and an operation that shares its work with them waits forever.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
        logging.getLogger("stoker").warning(
            "process %d was forked, and the threads of torch were not: it computes on one here, where there "
            "were %d. Start processes by 'spawn' to have as many",
            os.getpid(),
            threads,
        )
