"""From a cache and what was asked for to a `Design`: all that a loader decides before it reads a record.

Done once when a loader is made, and again when records of its cache were mended: then with other places for
some records, and the same examples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError
from stoker.loader import state as states
from stoker.loader.arguments import check_share, check_static
from stoker.loader.disk import READ_DEADLINE_S, Reading
from stoker.loader.draws import Weights
from stoker.loader.engine import Design
from stoker.loader.fused import Normalise
from stoker.loader.lowering import lowered
from stoker.loader.order import Order, parse_order
from stoker.loader.outputs import Output, make_outputs
from stoker.loader.places import Places, find_places, weighted
from stoker.loader.ragged import Ragged, check_lengths, make_join
from stoker.loader.ranks import Share, own_records
from stoker.loader.residency import claim_plan, parts_of
from stoker.loader.transform import Transform, names_of
from stoker.loader.watch import Ask
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.plan import LEDGER, Demand, Ledger, Plan, Resources, plan_tiers, probe
from stoker.plan.resources import memory_now
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache
    from stoker.store.blocks import Verify

MAX_GATHER_THREADS = 4
"""More threads than this do not make one gather quicker: memory is the limit."""
FILL_DEADLINE_S = 24 * 3600.0
"""Seconds that encoding what a cache lacks may take before the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a loader was asked for, by the names of its arguments; checked as far as no cache is needed."""

    batch_size: int
    windows: Windows | None
    tier: str
    device: torch.device
    seed: int
    rank: int
    world: int
    order: str
    indices: Sequence[int] | NDArray[Any] | None
    weights: Sequence[float] | NDArray[Any] | Weights | None
    dtype: str | None
    static: bool
    drop_last: bool | None
    reserve_bytes: int | None
    timeout_s: float | None
    verify: Verify
    normalise: Mapping[str, Normalise] | None
    ragged: Ragged
    transforms: tuple[Transform, ...]
    meter: StallMeter | None


def decide(cache: Cache, wishes: Wishes, plan: Plan | None = None, *, ledger: Ledger = LEDGER) -> Design:
    """What is served from where; opens shards where fields are ragged, and reads no record.

    Args:
        plan: One made before, which goes on for the cache as it is now; None: make one.
        ledger: Where this loader and the others of the process note what they mean to hold.
    Raises:
        ConfigError: A setting does not fit the cache or another one.
        CorruptError: A shard's header is damaged.
        ResourceError: The tier asked for cannot hold the records.
    """
    windows, rank, world = wishes.windows, wishes.rank, wishes.world
    outputs = make_outputs(cache.schema, windows, wishes.dtype, wishes.normalise, device=wishes.device.type)
    places = find_places(cache, wishes.indices)
    check_lengths(make_join(wishes.ragged, outputs), cache, places)
    examples = _number(cache, places, windows)
    example_bytes = sum(output.example_bytes for output in outputs)
    kind = parse_order(wishes.order, world=world, example_bytes=example_bytes)
    order = Order(
        kind=kind,
        count=examples.count,
        seed=wishes.seed,
        global_batch=wishes.batch_size * world,
        draws=None if wishes.weights is None else weighted(wishes.weights, places, examples),
        lengths=_lengths(cache, places, outputs) if kind.kind == "bucket" else None,
    )
    places = replace(places, own=own_records(order, examples, rank, world))
    static, drop_last = wishes.static, wishes.drop_last
    share = _share(order, rank, world, static or None if drop_last is None else drop_last)
    check_share(share)
    demand = _demand(cache, places, outputs, wishes.batch_size, str(wishes.device))
    claim, keys = ledger.claim(), parts_of(cache, places.shards(), demand.record_bytes)
    found = probe(device=str(wishes.device), path=cache.path)
    resources = claim.usable(found, keys)
    if plan is None:
        plan = _planned(cache, demand, resources, wishes.tier, wishes.reserve_bytes)
    plan = plan.holding(demand.records)
    claim_plan(claim, cache, places, plan, demand)
    check_static(static, wishes.tier, share, ragged=any(output.ragged for output in outputs))
    early = () if cache.joined else wishes.transforms  # joined columns come later, and may have to move along
    return Design(
        cache=cache,
        places=places,
        examples=examples,
        outputs=outputs,
        windowed=windows is not None,
        order=order,
        share=share,
        plan=plan,
        ask=Ask(
            demand=demand,
            tier=wishes.tier,
            reserve_bytes=wishes.reserve_bytes,
            look=partial(memory_now, found),
        ),
        claim=claim,
        device=wishes.device,
        static=static,
        threads=max(1, min(MAX_GATHER_THREADS, int(resources.cpus))),
        reading=Reading(deadline_s=wishes.timeout_s or READ_DEADLINE_S, verify=wishes.verify),
        meter=wishes.meter,
        lowered=lowered(early, outputs, wishes.seed, windowed=windows is not None),
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


def _number(cache: Cache, places: Places, windows: Windows | None) -> Examples:
    lengths = None
    if windows is not None:
        main = time_field(cache.schema, windows.field)
        lengths = places.of_all(cache.lengths(main))
        for name, field in cache.schema.items():
            if not (field.time and field.ragged):
                continue
            differ = places.of_all(cache.lengths(name)) != lengths
            if differ.any():
                number = int(places.numbers[int(np.argmax(differ))])
                raise ConfigError(
                    f"sample {number} has time axes of different lengths in {main!r} and {name!r}, so no "
                    "window of one matches the other. Store them in caches of their own"
                )
    return number_examples(lengths, len(places.numbers), windows)


def _lengths(cache: Cache, places: Places, outputs: tuple[Output, ...]) -> NDArray[np.int64] | None:
    """Bytes of each record in fields of varying length; None where there is no such field."""
    fields = {output.field: cache.recipe.columns[output.field] for output in outputs if output.ragged}
    if not fields:
        return None
    sizes = [places.of_all(cache.lengths(name)) * field.row_bytes for name, field in fields.items()]
    return np.stack(sizes).sum(axis=0, dtype=np.int64)


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


def terms_of(design: Design, wishes: Wishes) -> states.Terms:
    """What the meaning of a loader's positions depends on."""
    order, cache = design.order, design.cache
    draws = order.draws
    weights = [] if draws is None else [draws.cumulative]
    if draws is not None and draws.weights is not None:
        weights.append(draws.weights)  # without repeats: other examples from the same weights
    return states.Terms(
        seed=order.seed,
        order=str(order.kind),
        global_batch=order.global_batch,
        examples=order.count if draws is None else order.positions,
        fingerprint=cache.fingerprint,
        generation=cache.index.generation,
        records=states.digest_of(design.places.numbers, *weights),
        windows=None if wishes.windows is None else wishes.windows.text(),
        world=design.share.world,
        transforms=names_of(wishes.transforms),
    )


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
        example_bytes=record_bytes if whole else sum(output.example_bytes for output in outputs),
        device=device,
    )


def _planned(
    cache: Cache, demand: Demand, resources: Resources, tier: str, reserve_bytes: int | None
) -> Plan:
    plan = plan_tiers(demand, resources, tier=tier, reserve_bytes=reserve_bytes)
    if not cache.quarantined:
        return plan
    logging.getLogger("stoker").info(
        "%s: %d quarantined samples are not served", cache.path, len(cache.quarantined)
    )
    return replace(plan, reason=f"{plan.reason}; {len(cache.quarantined)} quarantined samples are absent")
