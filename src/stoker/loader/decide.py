"""From a cache and what was asked for to a `Design`: all that a loader decides before it reads a record.

Done once when a loader is made, and again when records of its cache were mended: then with other places for
some records, and the same examples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, arg
from stoker.loader.arguments import Options, check_share, check_static
from stoker.loader.chunks import Cuts
from stoker.loader.draws import Weights
from stoker.loader.engine import Design
from stoker.loader.lowering import lowered
from stoker.loader.order import Draws, Order, parse_order, table_bytes
from stoker.loader.outputs import Output, Role, gathered_bytes, make_outputs
from stoker.loader.places import Places, find_places, lengths_of, weighted
from stoker.loader.points import PointJoin, cuts_of, cuts_points, make_joiner
from stoker.loader.ragged import LENGTHS, MASK, OFFSETS, Join, check_lengths
from stoker.loader.ranks import Share, own_records
from stoker.loader.read_ahead import elsewhere_of
from stoker.loader.residency import claim_plan, parts_of
from stoker.loader.state import digest_of
from stoker.loader.watch import Ask
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.plan import LEDGER, Demand, Ledger, Plan, Resources, plan_tiers, probe
from stoker.plan.resources import memory_now
from stoker.store.join import rename_hint
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.store import Cache

MAX_GATHER_THREADS = 4
"""More threads than this do not make one gather quicker: memory is the limit."""
FILL_DEADLINE_S = 24 * 3600.0
"""Seconds that encoding what a cache lacks may take before the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is to serve, of a cache that is complete or will be."""

    places: Places
    examples: Examples
    outputs: tuple[Output, ...]
    join: Join | PointJoin | None
    """As `Design.join`."""
    order: Order
    demand: Demand
    shards: tuple[int, ...]
    """Those that it lies in, as far as they are there."""
    cuts: Cuts | None = None
    """How windows are cut from fields of points."""
    beside: str | None = None
    """As `Design.beside`."""


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
    if isinstance(join, Join):
        check_lengths(join, cache, places)
    cuts, examples = _number(cache, places, options.windows)
    draws = None if options.weights is None else weighted(options.weights, places, examples)
    lengths = _sizes(cache, places, outputs) if options.order.startswith("bucket") else None
    if lengths is not None and cuts is not None:  # windows: as long as their records
        lengths = lengths[examples.locate(np.arange(examples.count), examples.first)[0]]
    order = order_of(options, outputs, examples.count, draws, lengths)
    places = replace(places, own=own_records(order, examples, options.rank, options.world))
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


def outputs_of(cache: Cache, options: Options) -> tuple[Output, ...]:
    """What batches are made of.

    Raises:
        ConfigError: As `make_outputs`; or a column joined to the cache would replace one of them.
    """
    outputs = make_outputs(
        cache.schema, options.windows, options.dtype, options.normalise, device=options.device.type
    )
    named = [o.name for o in outputs if o.role is Role.FIELD]
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
    outputs: tuple[Output, ...],
    count: int,
    draws: Draws | None,
    lengths: NDArray[np.int64] | None = None,
) -> Order:
    """The order of `count` examples that was asked for; `lengths`: of each, where they differ."""
    example_bytes = gathered_bytes(outputs)
    return Order(
        kind=parse_order(options.order, world=options.world, example_bytes=example_bytes),
        count=count,
        seed=options.seed,
        global_batch=options.batch_size * options.world,
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
    share = _share(found.order, options.rank, options.world, drop_last)
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
        beside=found.beside,
        lowered=lowered(early, found.outputs, options.seed, windowed=options.windows is not None),
    )


def check_beside(cache: Cache, options: Options) -> None:
    """Refuse what has no meaning before a cache is complete.

    Raises:
        ConfigError: As said; tells why.
    """
    drawn = isinstance(options.weights, Weights) and not options.weights.replacement
    varying = (
        options.windows is not None and cache.schema[time_field(cache.schema, options.windows.field)].ragged
    )
    wants = {
        f"world={options.world}": (
            options.world > 1,
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


def _sizes(cache: Cache, places: Places, outputs: tuple[Output, ...]) -> NDArray[np.int64] | None:
    """Bytes of each record in fields of varying length; None where there is no such field."""
    fields = {output.field: cache.recipe.columns[output.field] for output in outputs if output.ragged}
    if not fields:
        return None
    sizes = [lengths_of(cache, places, name) * field.row_bytes for name, field in fields.items()]
    return np.stack(sizes).sum(axis=0, dtype=np.int64)


def trajectory_lengths(cache: Cache, places: Places, windows: Windows) -> NDArray[np.int64]:
    """Steps of each record in the field that windows are cut from.

    Raises:
        ConfigError: Another field with time has another length.
    """
    main = time_field(cache.schema, windows.field)
    if not cache.schema[main].ragged:
        return places.of_all(cache.lengths(main))
    lengths = lengths_of(cache, places, main)
    for name, field in cache.schema.items():
        if name == main or not (field.time and field.ragged):
            continue
        differ = lengths_of(cache, places, name) != lengths
        if differ.any():
            number = int(places.numbers[int(np.argmax(differ))])
            raise ConfigError(
                f"sample {number} has time axes of different lengths in {main!r} and {name!r}, so no "
                "window of one matches the other. Store them in caches of their own"
            )
    return lengths


def _share(order: Order, rank: int, world: int, drop_last: bool | None) -> Share:
    """This rank's part; without a word on `drop_last`, training over ranks has it and evaluation has not."""
    sequential = order.kind.kind == "sequential"
    return Share(
        positions=order.positions,
        batch_size=order.global_batch // world,
        rank=rank,
        world=world,
        drop_last=world > 1 and not sequential if drop_last is None else drop_last,
        contiguous=sequential and world > 1,
    )


def _records_digest(places: Places, order: Order) -> str:
    """Digest of the sample numbers served, in order, and of their weights."""
    draws = order.draws
    weights = [] if draws is None else [draws.cumulative]
    if draws is not None and draws.weights is not None:
        weights.append(draws.weights)  # without repeats: other examples from the same weights
    return digest_of(places.numbers, *weights)


def _demand(
    cache: Cache, places: Places, outputs: tuple[Output, ...], batch_size: int, device: str
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
