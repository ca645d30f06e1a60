"""From a cache and what was asked for to a `Design`: all that a loader decides before it reads a record.

Done once when a loader is made, and again when records of its cache were mended: then with other places for
some records, and the same examples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, StalledError, arg
from stoker.loader import placement
from stoker.loader.assembly import LENGTHS, MASK, OFFSETS, BatchAssembly, Joiner, check_lengths, make_joiner
from stoker.loader.batch import STATES
from stoker.loader.chunks import Chunk, Chunks, Locator
from stoker.loader.disk import DiskBatches, PartialBatches
from stoker.loader.gather import STRIP_BATCHES, MemoryBatches
from stoker.loader.options import Options, check_share, check_static
from stoker.loader.order import (
    Draws,
    Order,
    RankShare,
    Weights,
    own_records,
    parse_order,
    table_bytes,
    weighted,
)
from stoker.loader.outputs import OutputSpec, gathered_bytes, make_outputs, step_lengths
from stoker.loader.placement import Ask, Held, Residency, claim_plan, parts_of
from stoker.loader.places import (
    Cuts,
    Places,
    cuts_of,
    cuts_points,
    find_places,
    lengths_of,
    trajectory_lengths,
)
from stoker.loader.prefetch import (
    BlockLocator,
    BlockPrefetcher,
    elsewhere_of,
    fetching_of,
    read_ahead_of,
)
from stoker.loader.transform import NOTHING, Lowered, lowered
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.plan import LEDGER, Demand, Ledger, Plan, Reservation, Resources, plan_tiers, probe
from stoker.plan.resources import memory_now
from stoker.store.joins import rename_hint
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.loader.filling import Arrivals, FillOrder
    from stoker.loader.tiers import Memory
    from stoker.store import Cache


# ----------------------------------------------------------------------------------------------------------
# The moving parts of a loader in one process: memories, threads, batches. Made anew after a fork.


MOST_BATCHES = 1024
QUICK_S = 1.0
"""Batches that take less than this together may be followed by twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything that was decided about a loader; nothing in it changes."""

    cache: Cache
    places: Places
    examples: Examples
    outputs: tuple[OutputSpec, ...]
    options: Options
    """What was asked for."""
    order: Order
    share: RankShare
    plan: Plan
    """What to aim at; `Residency.plan` is what is aimed at by now."""
    ask: Ask
    """What the plan was made from."""
    claim: Reservation
    """This loader's part of the memory of the process."""
    records_digest: str
    """Tells apart which samples are served, in which order and by which weights."""
    threads: int
    """Threads that gather one large batch together."""
    fill_s: float = 3600.0
    """Seconds that filling the device may take where nothing else can serve."""
    cuts: Cuts | None = None
    """How windows are cut from fields of points; their batches are put together by `assembly.py`."""
    lowered: Lowered = NOTHING
    """Transforms that the device tier does while it gathers."""
    join: Joiner | None = None
    """What is done to fields of varying length in a batch; None: they stay lists."""
    fill: FillOrder | None = None
    """The order of examples while the cache is being filled; None: it is complete."""

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


class StripPace:
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

    def __init__(self, design: Design, arrivals: Arrivals | None = None) -> None:
        """`arrivals` gives the examples of a cache that is being filled, in place of the order."""
        self._design = design
        self._arrivals = arrivals
        self.residency = Residency(design)
        self.device = design.device if arrivals is None else torch.device("cpu")
        """Where batches are."""
        self._assembly = BatchAssembly(design.outputs, design.options, design.join)
        self._outputs = self._assembly.columns
        self._pace = StripPace()
        self._locators: dict[str, Locator] = {} if arrivals is None else {"cpu": arrivals.locator}
        self._chunked: dict[str, Chunks] = {}
        self._batches: tuple[Memory, MemoryBatches] | None = None
        self._disk = self._make_disk(self._outputs)
        self._partial: PartialBatches | None = None
        cpu = torch.device("cpu")
        self._reading_ahead: BlockPrefetcher | None = None
        if arrivals is None:
            self._reading_ahead = read_ahead_of(
                design.cache, self._reach, design.share, lambda epoch: self._make_chunks(cpu).order(epoch)
            )
        # Fixed addresses exist where batches are gathered, so nothing can be served before memory is filled.
        self.residency.fill(design.fill_s if design.static else placement.FIRST_WAIT_S)
        if design.static and self.residency.serving() is None:
            raise StalledError(
                f"static=True: memory was not filled within {design.fill_s:.0f} s. "
                "Leave static out: batches then come from disk until it is"
            )

    def _make_disk(self, outputs: tuple[OutputSpec, ...]) -> DiskBatches:
        design, locator = self._design, self._locator(torch.device("cpu"))
        made = DiskBatches(
            design.cache, design.places, outputs, locator, lambda: self.residency.held.host, design.options
        )
        made.fetching_s = fetching_of(design.cache)
        return made

    def _reach(self, block_bytes: int) -> BlockLocator:
        design = self._design
        return BlockLocator(design.cache, design.places, design.examples, self._outputs, block_bytes)

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

    def _chunks(self, device: torch.device) -> Arrivals | Chunks:
        """What says which examples come next, on `device`."""
        return self._make_chunks(device) if self._arrivals is None else self._arrivals

    def _make_chunks(self, device: torch.device) -> Chunks:
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
            device, make = torch.device("cpu"), self._from_disk
            if held.whole is not None and held.whole.device.type == self.device.type:
                device, make = held.whole.device, partial(self._from_memory, held.whole)
            elif held.device is not None or self.device.type != "cpu":
                make = partial(self._from_several, held)
            chunks = self._chunks(device).of(*at)
            for strip in chain.from_iterable(map(make, chunks)):
                at, count = strip.after, strip.count
                yield strip
                del strip  # it refers to the memory that its batches come from
                if self.residency.turn(count) is not held:
                    break
            else:
                return
            del held, make, chunks

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

    def _from_memory(self, memory: Memory, chunk: Chunk) -> Iterator[Strip]:
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
            yield self._strip(
                gathers.columns(some, chunk.index[own], size, views),
                chunk, number, count, memory.tier, lowered.count,
            )  # fmt: skip
            number += count

    def _from_disk(self, chunk: Chunk) -> Iterator[Strip]:
        tier = "disk" if self._arrivals is None else "encode"
        self._read_ahead(chunk, 0)
        for number, values in enumerate(self._disk.batches(chunk, 0)):
            self._read_ahead(chunk, number + 1)
            columns: list[Iterable[Any]] = [[value] for value in values]
            yield self._strip(columns, chunk, number, 1, tier)

    def _from_several(self, held: Held, chunk: Chunk) -> Iterator[Strip]:
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

    def _strip(
        self,
        columns: list[Iterable[Any]],
        chunk: Chunk,
        number: int,
        count: int,
        tier: str,
        transformed: int = 0,
    ) -> Strip:
        positions, size = chunk.span.positions(number, count), chunk.span.batch
        own = chunk.examples[number * size : (number + count) * size]
        return Strip(
            batches=self._assembly.batches(columns, positions, own, chunk.span.epoch, size),
            count=count,
            size=size,
            examples=own,
            tier=tier,
            after=positions[-1],
            transformed=transformed,
        )


MAX_GATHER_THREADS = 4
"""More threads than this do not make one gather quicker: memory is the limit."""
FILL_DEADLINE_S = 24 * 3600.0
"""Seconds that encoding what a cache lacks may take before the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is to serve, of a cache that is complete or will be."""

    places: Places
    examples: Examples
    outputs: tuple[OutputSpec, ...]
    join: Joiner | None
    """As `Design.join`."""
    order: Order
    demand: Demand
    shards: tuple[int, ...]
    """Those that it lies in, as far as they are there."""
    cuts: Cuts | None = None
    """How windows are cut from fields of points."""
    fill: FillOrder | None = None
    """As `Design.fill`."""


def decide(cache: Cache, options: Options, plan: Plan | None = None, *, ledger: Ledger = LEDGER) -> Design:
    """What is served from where; opens shards where fields are ragged, and reads no record.

    Args:
        plan: One made before, which goes on for the cache as it is now; None: make one.
        ledger: Where this loader and the others of the process note what they mean to hold.
    Raises:
        ConfigError: A setting does not fit the cache or another one.
        CorruptError: A shard's header is damaged.
        ResourceError: The tier asked for cannot hold the records.
    """
    outputs = outputs_of(cache, options)
    places = find_places(cache, options.indices)
    join = make_joiner(options.ragged, outputs, cache.schema, options.windows)
    if join is not None:
        check_lengths(join, cache, places)
    cuts, examples = _number(cache, places, options.windows)
    draws = None if options.weights is None else weighted(options.weights, places, examples)
    lengths = _sizes(cache, places, outputs) if options.order.startswith("bucket") else None
    if lengths is not None and cuts is not None:  # windows: as long as their records
        lengths = lengths[examples.locate(np.arange(examples.count), examples.first)[0]]
    order = order_of(options, outputs, examples.count, draws, lengths)
    places = replace(places, own=own_records(order, examples, options.rank, options.world_size))
    found = Found(
        places=places,
        examples=examples,
        outputs=outputs,
        join=join,
        order=order,
        demand=replace(
            _demand(cache, places, outputs, options.batch_size, str(options.device)),
            table_bytes=0 if options.device.type == "cpu" else table_bytes(order, len(places.numbers)),
            elsewhere=elsewhere_of(
                cache,
                order.kind,
                examples=order.positions,
                example_bytes=gathered_bytes(outputs),
                step_examples=order.global_batch,
            ),
        ),
        shards=tuple(places.shards()),
        cuts=cuts,
    )
    made = design(cache, options, found, plan or partial(_planned, cache, options), ledger=ledger)
    claim_plan(made.claim, cache, made.places, made.plan, made.ask.demand)
    return made


def decide_filling(cache: Cache, options: Options, fill: FillOrder) -> Design:
    """Return what is served of a cache that is being filled: examples in the order `fill`, from disk.

    Raises:
        ConfigError: As `decide`.
    """
    options = replace(options, tier="encode")
    outputs = outputs_of(cache, options)
    here = int(np.isin(fill.numbers, cache.numbers).sum())
    sizes = (f.row_bytes if f.ragged else f.size_bytes() for f in cache.recipe.columns.values())
    found = Found(
        places=fill.places,
        examples=fill.examples,
        outputs=outputs,
        join=make_joiner(options.ragged, outputs, cache.schema, options.windows),
        order=order_of(options, outputs, fill.examples.count, fill.draws),
        demand=Demand(
            records=len(fill.numbers),
            record_bytes=float(sum(sizes)),
            batch_examples=options.batch_size,
            example_bytes=gathered_bytes(outputs),
            device=str(options.device),
            missing_records=len(fill.numbers) - here,
        ),
        shards=(),
        fill=fill,
    )
    return design(cache, options, found, partial(_planned_filling, cache, options))


def outputs_of(cache: Cache, options: Options) -> tuple[OutputSpec, ...]:
    """What batches are made of.

    Raises:
        ConfigError: As `make_outputs`; or a column joined to the cache would replace one of them.
    """
    outputs = make_outputs(
        cache.schema, options.windows, options.dtype, options.normalise, device=options.device.type
    )
    named = [o.name for o in outputs if o.role not in STATES]
    named += [o.name + end for o in outputs if o.ragged for end in (LENGTHS, MASK, OFFSETS)]
    columns = () if cache.joined is None else cache.joined.schema
    if taken := [name for name in named if name in columns]:
        raise ConfigError(
            f"a batch of {cache.name} has a tensor {taken[0]!r}, and a joined column has the same name. Name "
            f"the column otherwise: {rename_hint(taken[0])}"
        )
    return outputs


def order_of(
    options: Options,
    outputs: tuple[OutputSpec, ...],
    count: int,
    draws: Draws | None,
    lengths: NDArray[np.int64] | None = None,
) -> Order:
    """The order of `count` examples that was asked for; `lengths`: of each, where they differ."""
    example_bytes = gathered_bytes(outputs)
    return Order(
        kind=parse_order(options.order, world_size=options.world_size, example_bytes=example_bytes),
        count=count,
        seed=options.seed,
        global_batch=options.batch_size * options.world_size,
        draws=draws,
        lengths=lengths,
    )


def design(
    cache: Cache,
    options: Options,
    found: Found,
    plan: Plan | Callable[[Demand, Resources], Plan],
    *,
    ledger: Ledger = LEDGER,
) -> Design:
    """The design of a loader that serves what was `found`; `plan`: one, or what makes one.

    Raises:
        ConfigError: As `decide`.
        ResourceError: As `decide`.
    """
    static, drop_last = options.static, options.drop_last
    drop_last = static or None if drop_last is None else drop_last
    share = _share(found.order, options.rank, options.world_size, drop_last)
    check_share(share)
    check_static(static, options.tier, share, ragged=any(output.ragged for output in found.outputs))
    demand, claim = found.demand, ledger.claim()
    probed = probe(device=str(options.device), path=cache.path)
    resources = claim.usable(probed, parts_of(cache, found.shards, demand.record_bytes))
    # Joined columns come later, and may have to move along.
    early = () if cache.joined else options.transforms
    return Design(
        cache=cache,
        places=found.places,
        examples=found.examples,
        outputs=found.outputs,
        options=options,
        order=found.order,
        share=share,
        plan=(plan if isinstance(plan, Plan) else plan(demand, resources)).holding(demand.records),
        ask=Ask(
            demand=demand,
            tier=options.tier,
            reserve_bytes=options.reserve_bytes,
            look=partial(memory_now, probed),
        ),
        claim=claim,
        threads=max(1, min(MAX_GATHER_THREADS, int(resources.cpus))),
        records_digest=_records_digest(found.places, found.order),
        cuts=found.cuts,
        join=found.join,
        fill=found.fill,
        lowered=lowered(early, found.outputs, options.seed, windowed=options.windows is not None),
    )


def check_filling(cache: Cache, options: Options) -> None:
    """Refuse what has no meaning before a cache is complete.

    Raises:
        ConfigError: As said; tells why.
    """
    drawn = isinstance(options.weights, Weights) and not options.weights.replacement
    varying = (
        options.windows is not None and cache.schema[time_field(cache.schema, options.windows.field)].ragged
    )
    wants = {
        f"world_size={options.world_size}": (
            options.world_size > 1,
            "ranks would have to agree on what is quarantined before each batch, and loaders do not talk",
        ),
        "windows over points": (
            cuts_points(cache.schema, options.windows),
            "how many steps and points a record has is known once it is stored",
        ),
        "static=True": (options.static, "batches at fixed addresses are gathered on a device that holds all"),
        f"order={options.order!r}": (
            options.order.startswith(("static", "bucket")),
            "its parts are of all examples",
        ),
        "Weights(replacement=False)": (drawn, "what is left to draw depends on all examples"),
        "weights= over windows of trajectories of varying length": (
            varying and options.weights is not None,
            "how many windows a weight is for is known once all are stored",
        ),
    }
    for what, (wanted, why) in wants.items():
        if wanted and cache.complete:
            raise ConfigError(
                "the state was saved in an epoch that was served while its cache was being filled, and "
                f"{what} cannot continue it: {why}. Load it with the settings of then, or begin the next "
                "epoch"
            )
        if wanted:
            raise ConfigError(
                f"{what} needs a complete cache: {why}; and {cache.path} is still being filled, "
                f"{format_count(len(cache))} of {format_count(cache.recipe.count)} records are stored. "
                f"Leave {arg('wait', False)} out, so that it is filled first"
            )


def completed(cache: Cache) -> Cache:
    """The cache with nothing missing, encoding it first where somebody can.

    Raises:
        IncompleteError: Records are missing and nobody can encode them.
    """
    if cache.complete:
        return cache
    if cache.filling is not None and cache.filling.done():
        return opened_anew(cache)
    missing = np.ones(cache.recipe.count, dtype=np.bool_)
    missing[cache.numbers] = False
    missing[list(cache.quarantined)] = False
    numbers = np.flatnonzero(missing)
    if cache.filler is not None:
        cache.filler.fill(numbers.tolist(), FILL_DEADLINE_S)
        return opened_anew(cache)
    raise IncompleteError(
        f"{cache.path} holds {format_count(len(cache))} of {format_count(cache.recipe.count)} records; "
        f"{format_count(len(numbers))} are missing, the first is sample {int(numbers[0])}. "
        "Run the same precompute again: it encodes exactly what is missing"
    )


def opened_anew(cache: Cache) -> Cache:
    """The same cache as it is now, complete, with whoever can encode for it."""
    from stoker.store import open_cache

    filled = open_cache(cache.path)
    filled.filler, filled.joined = cache.filler, cache.joined
    return filled


def _number(cache: Cache, places: Places, windows: Windows | None) -> tuple[Cuts | None, Examples]:
    lengths, cuts = None, None
    if windows is not None and cuts_points(cache.schema, windows):
        cuts, lengths = cuts_of(cache, places, windows)
    elif windows is not None:
        lengths = trajectory_lengths(cache, places, windows)
    return cuts, number_examples(lengths, len(places.numbers), windows)


def _sizes(cache: Cache, places: Places, outputs: tuple[OutputSpec, ...]) -> NDArray[np.int64] | None:
    """Bytes of each record in fields of varying length; None where there is no such field."""
    fields = {output.field: cache.recipe.columns[output.field] for output in outputs if output.ragged}
    if not fields:
        return None
    sizes = [lengths_of(cache, places, name) * field.row_bytes for name, field in fields.items()]
    return np.stack(sizes).sum(axis=0, dtype=np.int64)


def _share(order: Order, rank: int, world_size: int, drop_last: bool | None) -> RankShare:
    """This rank's part; without a word on `drop_last`, training over ranks has it and evaluation has not."""
    sequential = order.kind.kind == "sequential"
    return RankShare(
        positions=order.positions,
        batch_size=order.global_batch // world_size,
        rank=rank,
        world_size=world_size,
        drop_last=world_size > 1 and not sequential if drop_last is None else drop_last,
        contiguous=sequential and world_size > 1,
    )


def _records_digest(places: Places, order: Order) -> str:
    """Digest of the sample numbers served, in order, and of their weights."""
    draws = order.draws
    weights = [] if draws is None else [draws.cumulative]
    if draws is not None and draws.weights is not None:
        weights.append(draws.weights)  # without repeats: other examples from the same weights
    return digest_of(places.numbers, *weights)


def _demand(
    cache: Cache, places: Places, outputs: tuple[OutputSpec, ...], batch_size: int, device: str
) -> Demand:
    """What is to be planned for: whole shards, since memory is filled by shard."""
    record_bytes = 0.0
    for name, field in cache.recipe.columns.items():
        lengths = cache.lengths(name) if field.ragged else None
        record_bytes += field.size_bytes() if lengths is None else float(lengths.mean()) * field.row_bytes
    whole = any(output.ragged for output in outputs)
    return Demand(
        records=sum(cache.index.shards[shard].rows for shard in places.shards()),
        record_bytes=record_bytes,
        batch_examples=batch_size,
        example_bytes=record_bytes if whole else gathered_bytes(outputs),
        device=device,
        stored_ratio=cache.index.stored_ratio,
    )


def _planned(cache: Cache, options: Options, demand: Demand, resources: Resources) -> Plan:
    plan = plan_tiers(demand, resources, tier=options.tier, reserve_bytes=options.reserve_bytes)
    if not cache.quarantined:
        return plan
    logging.getLogger("stoker").info(
        "%s: %d quarantined samples are not served", cache.path, len(cache.quarantined)
    )
    return replace(plan, reason=f"{plan.reason}; {len(cache.quarantined)} quarantined samples are absent")


def digest_of(*arrays: Any) -> str:
    """16 hex digits over the bytes of arrays."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(memoryview(array).cast("B"))
    return digest.hexdigest()


def _planned_filling(cache: Cache, options: Options, demand: Demand, resources: Resources) -> Plan:
    reason = (
        f"{format_count(demand.missing_records)} of {format_count(demand.records)} records are encoded "
        "while this epoch is served: in block order, as they come, from disk. The next epoch has them "
        f"all, in {options.order} order, from the fastest tier"
    )
    logging.getLogger("stoker").info("%s: %s", cache.path, reason)
    plan = plan_tiers(demand, resources, tier="encode", reserve_bytes=options.reserve_bytes)
    return replace(plan, tier="encode", reason=reason)
