"""Decide from a cache and `Options` on a `Design`: all that a loader decides before it reads a record.

That happens once when a loader is made, and again when records of its cache were repaired: some records are
then stored elsewhere, and the examples are the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, MissingRecordError, arg
from stoker.loader.assembly import MASK, OFFSETS, Joiner, Pad, check_lengths, make_joiner
from stoker.loader.batch import STATES, Examples, Windows, main_field, number_examples
from stoker.loader.batching import BatchPlanner, GroupPlanner, TokenPlanner
from stoker.loader.choose import check_sizes
from stoker.loader.options import Options, check_share, check_static
from stoker.loader.order import (
    Draws,
    Order,
    RankShare,
    make_draws,
    own_records,
    parse_order,
    table_bytes,
)
from stoker.loader.outputs import OutputSpec, gathered_bytes, make_outputs
from stoker.loader.placement import reserve_plan, shard_parts
from stoker.loader.prefetch import (
    describe_remote,
)
from stoker.loader.records import (
    Cuts,
    RecordTable,
    cuts_of,
    cuts_points,
    find_records,
    groups_of,
    joined_keys,
    lengths_of,
    tokens_of,
    trajectory_lengths,
)
from stoker.loader.transform import NO_CUTS, FusedCuts, find_fused_cuts
from stoker.plan import MEMORY_LEDGER, Demand, MemoryLedger, Plan, Reservation, Resources, plan_tiers, probe
from stoker.plan.resources import memory_now
from stoker.schema import LENGTHS_SUFFIX
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.loader.filling import FillOrder
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything that was decided about a loader; nothing in it changes."""

    cache: Cache
    table: RecordTable
    examples: Examples
    outputs: tuple[OutputSpec, ...]
    options: Options
    """What was asked for."""
    order: Order
    share: RankShare
    plan: Plan
    """What to aim at; `Placement.plan` is what is aimed at by now."""
    demand: Demand
    """What the plan was made for."""
    measure: Callable[[], Resources]
    """Returns what this process may use now, to plan again."""
    reservation: Reservation
    """This loader's part of the memory of the process."""
    records_digest: str
    """Tells apart which samples are served, in which order and by which weights."""
    threads: int
    """Threads that gather one large batch together."""
    fill_threads: int = 1
    """Shards that are brought into memory at a time."""
    fill_timeout_s: float = 3600.0
    """Seconds that filling the device may take where nothing else can serve."""
    cuts: Cuts | None = None
    """How windows are cut from fields of points; their batches are put together by `assembly.py`."""
    fused_cuts: FusedCuts = NO_CUTS
    """Transforms that the device tier does while it gathers."""
    join: Joiner | None = None
    """What is done to fields of varying length in a batch; None: they stay lists."""
    fill: FillOrder | None = None
    """The order of examples while the cache is being filled; None: it is complete."""


def why_not_mixed(design: Design) -> str | None:
    """Return why a mixture cannot take turns with batches of this design; None: it can."""
    windows = design.options.windows
    if design.cuts is not None:
        return "cuts windows from fields of points, whose batches no mixture joins"
    if design.order.batches is not None:
        return f"has batches of varying size ({design.order.batches.text}), and turns take one size"
    if windows is not None and windows.rows:
        return "serves rows as examples (horizon=0), and windows of a mixture have z1"
    return None


MAX_GATHER_THREADS = 8
"""More threads than this do not make one gather quicker: memory is the limit, and the interpreter's lock.

Source: docs/project/benchmarks.md, rows of 147 KiB on 16 cores: 28 GB/s by 4 threads, 35 by 8, 26 by 16.
"""
MAX_FILL_THREADS = 8
"""Shards that are brought into memory at a time, at most; and no more than half of the processors."""
FILL_TIMEOUT_S = 24 * 3600.0
"""Seconds that encoding what a cache lacks may take before the first batch."""


def decide(
    cache: Cache, options: Options, plan: Plan | None = None, *, ledger: MemoryLedger = MEMORY_LEDGER
) -> Design:
    """Return what is served from where; opens shards where fields are ragged, and reads no record.

    Args:
        cache: A complete one.
        options: What was asked for.
        plan: One made before, which continues for the cache as it is now; None: make one.
        ledger: Where the loaders of this process note the memory that they reserve.

    Raises:
        ConfigError: A setting does not fit the cache or another one.
        CorruptError: A shard's header is damaged.
        ResourceError: The tier asked for cannot hold the records.
    """
    outputs = outputs_of(cache, options)
    table = find_records(cache, options.indices)
    batches = make_planner(cache, table, options)
    by_column = bool(joined_keys(cache, options.batch_by))  # then fields differ in shape as without it
    join = make_joiner(replace(options, batch_by=None) if by_column else options, outputs, cache.schema)
    if join is not None:
        check_lengths(join, cache, table)
    check_sizes(options.choose, cache, table)
    cuts, examples = _number(cache, table, options.windows)
    draws = None if options.weights is None else make_draws(options.weights, table, examples)
    lengths = _sizes(cache, table, outputs) if options.order.startswith("bucket") else None
    if lengths is not None and cuts is not None:  # windows: as long as their records
        lengths = lengths[examples.locate(np.arange(examples.count), examples.first)[0]]
    order = options.follow or order_of(options, outputs, examples.count, draws, lengths, batches)
    if order.count != examples.count:
        raise MissingRecordError(
            f"{cache.path} has {examples.count} records for {order.count} of another cache"
        )
    table = replace(table, own=own_records(order, examples, options.rank, options.world_size))
    demand = replace(
        _demand(cache, table, outputs, order.global_batch // options.world_size, str(options.device)),
        table_bytes=0 if options.device.type == "cpu" else table_bytes(order, len(table.indices)),
        remote=describe_remote(
            cache,
            order.kind,
            examples=order.positions,
            example_bytes=gathered_bytes(outputs),
            step_examples=order.global_batch,
        ),
    )
    made = _make_design(
        cache,
        options,
        plan or partial(_planned, cache, options),
        ledger,
        demand,
        table=table,
        examples=examples,
        outputs=outputs,
        join=join,
        order=order,
        cuts=cuts,
    )
    reserve_plan(made)
    return made


def decide_filling(cache: Cache, options: Options, fill: FillOrder) -> Design:
    """Return what is served of a cache that is being filled: examples in the order `fill`, from disk.

    Raises:
        ConfigError: As `decide`.
    """
    options = replace(options, tier="encode")
    outputs = outputs_of(cache, options)
    here = int(np.isin(fill.indices, cache.indices).sum())
    sizes = (f.row_bytes if f.ragged else f.size_bytes() for f in cache.recipe.columns.values())
    demand = Demand(
        records=len(fill.indices),
        record_bytes=float(sum(sizes)),
        batch_examples=options.batch_size,
        example_bytes=gathered_bytes(outputs),
        device=str(options.device),
        missing_records=len(fill.indices) - here,
    )
    return _make_design(
        cache,
        options,
        partial(_planned_filling, cache, options),
        MEMORY_LEDGER,
        demand,
        table=fill.table,
        examples=fill.examples,
        outputs=outputs,
        join=make_joiner(options, outputs, cache.schema),
        order=order_of(options, outputs, fill.examples.count, fill.draws),
        fill=fill,
    )


def outputs_of(cache: Cache, options: Options) -> tuple[OutputSpec, ...]:
    """Return what batches are made of.

    Raises:
        ConfigError: As `make_outputs`; or a column joined to the cache would replace one of them.
    """
    outputs = make_outputs(
        cache.schema,
        options.windows,
        options.dtype,
        options.normalize,
        device=options.device.type,
        choices=options.choose,
    )
    named = [o.name for o in outputs if o.role not in STATES]
    named += [o.name + end for o in outputs if o.ragged for end in (LENGTHS_SUFFIX, MASK, OFFSETS)]
    columns = () if cache.joined is None else cache.joined.schema
    if taken := [name for name in named if name in columns]:
        from stoker.store.joins import rename_hint

        raise ConfigError(
            f"a batch of {cache.name} has a tensor {taken[0]!r}, and a joined column has the same name",
            hint=f"Name the column otherwise: {rename_hint(taken[0])}",
        )
    return outputs


def order_of(
    options: Options,
    outputs: tuple[OutputSpec, ...],
    count: int,
    draws: Draws | None,
    lengths: NDArray[np.int64] | None = None,
    batches: BatchPlanner | None = None,
) -> Order:
    """Return the order of `count` examples that was asked for.

    Args:
        options, outputs: Of the loader.
        count: Examples to order.
        draws: What they are drawn from; None: each comes once.
        lengths: Of each, where they differ.
        batches: Puts them into batches of varying size.
    """
    example_bytes = gathered_bytes(outputs)
    return Order(
        kind=parse_order(options.order, world_size=options.world_size, example_bytes=example_bytes),
        count=count,
        seed=options.seed,
        global_batch=(options.batch_size if batches is None else batches.batch_size) * options.world_size,
        draws=draws,
        lengths=lengths,
        batches=batches,
    )


def make_planner(cache: Cache, table: RecordTable, options: Options) -> BatchPlanner | None:
    """Return what puts records into batches of varying size; None: batches have `batch_size` of them.

    Raises:
        ConfigError: No field can be batched by so, or a record has more tokens than a batch.
    """
    settings: dict[str, Any] = {
        "seed": options.seed,
        "world_size": options.world_size,
        "shuffle": options.order == "full",
        "drop_last": bool(options.drop_last),
    }
    if options.batch_tokens is not None:
        lengths = tokens_of(cache, table, options.batch_tokens)
        return TokenPlanner(lengths, options.batch_tokens, **settings)
    if options.batch_by is not None:
        groups = groups_of(cache, table, options.batch_by)
        by = options.batch_by
        if joined_keys(cache, by):  # whose values the cache's fingerprint does not cover
            by = f"{by} ({digest_of(groups)})"
        return GroupPlanner(groups, options.batch_size, by=by, **settings)
    return None


def _make_design(  # noqa: PLR0913 - all that both ways to decide have found
    cache: Cache,
    options: Options,
    plan: Plan | Callable[[Demand, Resources], Plan],
    ledger: MemoryLedger,
    demand: Demand,
    *,
    table: RecordTable,
    examples: Examples,
    outputs: tuple[OutputSpec, ...],
    join: Joiner | None,
    order: Order,
    cuts: Cuts | None = None,
    fill: FillOrder | None = None,
) -> Design:
    """Return a design with this plan, or with one that `plan` makes; the rest is as in `Design`."""
    static, drop_last = options.static, options.drop_last
    drop_last = static or None if drop_last is None else drop_last
    share = _share(order, options.rank, options.world_size, drop_last)
    check_share(share)
    check_static(static, options.tier, share, ragged=any(output.ragged for output in outputs))
    reservation = ledger.claim()
    probed = probe(device=str(options.device), path=cache.path)
    resources = reservation.usable(probed, shard_parts(cache, table.shards(), demand.record_bytes))
    on_gpu = options.device.type == "cuda"
    _check_batch_bytes(
        options, outputs, share.batch_size, probed.device_total_bytes if on_gpu else probed.host_total_bytes
    )
    # Joined columns and caches come later, and may have to move along.
    early = () if cache.joined or options.zipped else options.transforms
    return Design(
        cache=cache,
        table=table,
        examples=examples,
        outputs=outputs,
        options=options,
        order=order,
        share=share,
        plan=(plan if isinstance(plan, Plan) else plan(demand, resources)).holding(demand.records),
        demand=demand,
        measure=partial(memory_now, probed),
        reservation=reservation,
        threads=max(1, min(MAX_GATHER_THREADS, int(resources.cpus))),
        fill_threads=max(1, min(MAX_FILL_THREADS, int(resources.cpus) // 2)),
        records_digest=_records_digest(table, order),
        cuts=cuts,
        join=join,
        fill=fill,
        fused_cuts=find_fused_cuts(early, outputs, options.seed, windowed=options.windowed),
    )


def _check_batch_bytes(
    options: Options, outputs: tuple[OutputSpec, ...], batch_size: int, limit_bytes: int
) -> None:
    """Refuse a choice or a padding whose batch is larger than all of the memory that it is made in.

    Raises:
        ConfigError: As said.
    """
    sizes: dict[str, int] = {}
    for group in options.choose:
        rows = sum(output.example_bytes for output in outputs if output.group == group.name)
        sizes[f"choose={{{group.fields[0]!r}: {group.choice!r}}}"] = rows + 8 * group.count  # and its numbers
    pad = options.ragged
    if isinstance(pad, Pad) and pad.to is not None:
        for output in (one for one in outputs if one.ragged):
            row_bytes = math.prod(output.row_shape) * (output.cast or output.dtype).itemsize
            sizes[f"ragged=Pad(to={pad.to})"] = pad.to * row_bytes
    for what, example_bytes in sizes.items():
        if batch_size * example_bytes > limit_bytes:
            raise ConfigError(
                f"{what} makes batches of {format_bytes(batch_size * example_bytes)}, and there are "
                f"{format_bytes(limit_bytes)} of memory",
                hint="Choose fewer rows, or a smaller batch_size",
            )


def is_served_while_filling(cache: Cache, world_size: int) -> bool:
    """Return True if a loader of this cache begins in the order of filling.

    It does until a loader has served a full epoch, also if the filling has ended. So the order does not
    depend on how long the filling takes. Where ranks agreed on it each of their loaders does, since a rank
    knows of its own loaders alone.

    Raises:
        StokerError: Filling has failed.
    """
    filling = cache.filling
    if filling is None:
        return False
    served = filling.done() and filling.served
    return not served or (filling.agreed and world_size > 1)


def check_filling(cache: Cache, options: Options) -> None:
    """Refuse what has no meaning before a cache is complete.

    Raises:
        ConfigError: As said; tells why.
    """
    drawn = options.weights is not None and not options.weights.replacement
    varying = options.windows is not None and cache.schema[main_field(cache.schema, options.windows)].ragged
    wants = {
        f"world_size={options.world_size}": (
            options.world_size > 1 and cache.filling is not None and not cache.filling.agreed,
            "ranks have to agree on the order of the first epoch, which precompute does if every rank has "
            "called torch.distributed.init_process_group before",
        ),
        "windows over points": (
            cuts_points(cache.schema, options.windows),
            "how many steps and points a record has is known once it is stored",
        ),
        "batch_by=": (options.batch_by is not None, "shapes and keys are known once all are stored"),
        "batch_tokens=": (options.batch_tokens is not None, "lengths are known once all are stored"),
        "Windows(horizon=0)": (
            options.windows is not None and options.windows.rows,
            "rows are counted once all are stored",
        ),
        "static=True": (options.static, "batches at fixed addresses are gathered on a device that holds all"),
        f"an order of {options.order}": (
            options.order.startswith(("static", "bucket")),
            "its parts are of all examples",
        ),
        "Weights(replacement=False)": (drawn, "what is left to draw depends on all examples"),
        "weights= over windows of trajectories of varying length": (
            varying and options.weights is not None,
            "how many windows a weight is for is known once all are stored",
        ),
        "shuffle=False of several ranks over trajectories of varying length": (
            varying and options.order == "sequential" and options.world_size > 1,
            "where the piece of a rank begins is known once all are stored",
        ),
    }
    for what, (wanted, why) in wants.items():
        if wanted and cache.filling is None:
            raise ConfigError(
                "the state was saved in an epoch that was served while its cache was being filled, and "
                f"{what} cannot continue it: {why}",
                hint="Load it with the settings of then, or begin the next epoch",
            )
        if wanted:
            raise ConfigError(
                f"{what} needs a complete cache: {why}; and {cache.path} is filled in the first epoch, "
                f"{format_count(len(cache))} of {format_count(cache.recipe.count)} records are stored",
                hint=f"Leave {arg('wait', False)} out, so that it is filled first",
            )


def complete_cache(cache: Cache) -> Cache:
    """Return the cache with nothing missing, encoding it first if it has a filler.

    Raises:
        IncompleteError: Records are missing and no filler can encode them.
    """
    if cache.complete:
        return cache
    if cache.filling is not None and cache.filling.done():
        return reopen_complete(cache)
    missing = np.ones(cache.recipe.count, dtype=np.bool_)
    missing[cache.indices] = False
    missing[list(cache.quarantined)] = False
    numbers = np.flatnonzero(missing)
    if cache.filler is not None:
        cache.filler.fill(numbers.tolist(), FILL_TIMEOUT_S)
        return reopen_complete(cache)
    raise IncompleteError(
        f"{cache.path} holds {format_count(len(cache))} of {format_count(cache.recipe.count)} records; "
        f"{format_count(len(numbers))} are missing, the first is sample {int(numbers[0])}",
        hint="Run the same precompute again: it encodes exactly what is missing",
    )


def reopen_complete(cache: Cache) -> Cache:
    """Return the same cache as it is now, complete, with its filler."""
    from stoker.store import open_cache

    filled = open_cache(cache.path)
    filled.filler, filled.joined = cache.filler, cache.joined
    return filled


def _number(cache: Cache, table: RecordTable, windows: Windows | None) -> tuple[Cuts | None, Examples]:
    lengths, cuts = None, None
    if windows is not None and cuts_points(cache.schema, windows):
        cuts, lengths = cuts_of(cache, table, windows)
    elif windows is not None:
        lengths = trajectory_lengths(cache, table, windows)
    return cuts, number_examples(lengths, len(table.indices), windows)


def _sizes(cache: Cache, table: RecordTable, outputs: tuple[OutputSpec, ...]) -> NDArray[np.int64] | None:
    """Return the bytes of each record in fields of varying length; None where there is no such field."""
    fields = {output.field: cache.recipe.columns[output.field] for output in outputs if output.ragged}
    if not fields:
        return None
    sizes = [lengths_of(cache, table, name) * field.row_bytes for name, field in fields.items()]
    return np.stack(sizes).sum(axis=0, dtype=np.int64)


def _share(order: Order, rank: int, world_size: int, drop_last: bool | None) -> RankShare:
    """Return this rank's part; by default `drop_last` is set for training over ranks, else not."""
    sequential = order.kind.kind == "sequential"
    if order.batches is not None:
        sequential, drop_last = False, bool(drop_last)
    return RankShare(
        positions=order.positions,
        batch_size=order.global_batch // world_size,
        rank=rank,
        world_size=world_size,
        drop_last=world_size > 1 and not sequential if drop_last is None else drop_last,
        contiguous=sequential and world_size > 1,
        batches=order.batches,
    )


def _records_digest(table: RecordTable, order: Order) -> str:
    """Return the digest of the sample indices served, in order, and of their weights."""
    draws = order.draws
    weights = [] if draws is None else [draws.cumulative]
    if draws is not None and draws.weights is not None:
        weights.append(draws.weights)  # without repeats: other examples from the same weights
    return digest_of(table.indices, *weights)


def _demand(
    cache: Cache, table: RecordTable, outputs: tuple[OutputSpec, ...], batch_size: int, device: str
) -> Demand:
    """Return what is to be planned for: whole shards, since memory is filled by shard."""
    record_bytes = 0.0
    for name, field in cache.recipe.columns.items():
        lengths = cache.lengths(name) if field.ragged else None
        record_bytes += field.size_bytes() if lengths is None else float(lengths.mean()) * field.row_bytes
    whole = any(output.ragged for output in outputs)
    return Demand(
        records=sum(cache.index.shards[shard].rows for shard in table.shards()),
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
