"""The loader: a cache in, batches out, from the fastest tier that holds the records."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError
from stoker.loader import state as states
from stoker.loader.arguments import (
    NOT_BY_NUMBER,
    check_kinds,
    check_share,
    check_static,
    parse_device,
    refuse_workers,
    take_dataloader_arguments,
    whole_numbers,
)
from stoker.loader.disk import READ_DEADLINE_S
from stoker.loader.engine import Design, Engine
from stoker.loader.order import Order, parse_order
from stoker.loader.outputs import Output, make_outputs
from stoker.loader.places import Places, find_places, weighted
from stoker.loader.ranks import Share, check_ranks
from stoker.loader.transform import Finish, Transform
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.plan import Demand, Plan, Resources, plan_tiers, probe
from stoker.schema import Json
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache

MAX_GATHER_THREADS = 4
"""More threads than this do not make one gather quicker: memory is the limit."""
FILL_DEADLINE_S = 24 * 3600.0
"""Seconds that encoding what a cache lacks may take before the first batch."""


class Loader:
    """Iterable over batches, like a `DataLoader`; the same bytes whatever tier they come from.

    A finished pass goes on to the next epoch, an abandoned one starts its epoch again. Batches own their
    memory.
    """

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        cache: Cache,
        batch_size: int = 1,
        *,
        windows: Windows | None = None,
        tier: str = "auto",
        device: str | torch.device = "cpu",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        order: str | None = None,
        indices: Sequence[int] | NDArray[Any] | None = None,
        weights: Sequence[float] | NDArray[Any] | None = None,
        dtype: str | None = None,
        static: bool = False,
        drop_last: bool | None = None,
        reserve_bytes: int | None = None,
        transforms: Sequence[Transform] = (),
        meter: StallMeter | None = None,
        **dataloader: Any,
    ) -> None:
        """Decide what is served from where; records are read when iteration begins.

        Args:
            cache: What to serve. One with records missing needs a filler, which then encodes them now.
            batch_size: Examples in a batch of this rank: windows if `windows` is given, else records.
            windows: How trajectories are cut; None serves whole records.
            tier: `auto`, or the tier that shall hold everything: `device`, `host`, `disk`, `encode`.
            device: Where batches are wanted: `cpu`, or `cuda[:i]`.
            seed, rank, world: The order's seed; this process's part of every global batch.
            order: `full` (default), `sequential` (evaluation), `block`, `block(block,window)`, `static`.
            indices: Sample numbers to serve, repeats allowed; None: all that are stored.
            weights: Draw with replacement, in proportion to one weight per record.
            dtype: Hand floats out as this dtype instead of the stored one.
            static: Every batch at the same addresses, overwriting the last; device tier only.
            drop_last: Leave out a short last batch. None: only with several ranks, not in sequential order.
            reserve_bytes: Memory of the device to leave to the model.
            transforms: Functions `(batch, keys) -> batch`; `keys` holds a random int64 per example.
            meter: Told how long each batch was waited for.
            dataloader: Arguments of `torch.utils.data.DataLoader`; those without a meaning here say so.

        Raises:
            ConfigError: A setting does not fit the cache or another one.
            IncompleteError: Records are missing and nobody can encode them.
            ResourceError: `tier` cannot hold the records.
        """
        refuse_workers()
        batch_size, rank, world, seed = whole_numbers(
            batch_size=batch_size, rank=rank, world=world, seed=seed
        )
        check_ranks(batch_size, rank, world)
        check_kinds(windows, transforms, reserve_bytes)
        device = parse_device(device)
        order, timeout_s, pin = take_dataloader_arguments(dataloader, order)
        cache = _completed(cache)
        outputs = make_outputs(cache.schema, windows, dtype)
        places = find_places(cache, indices)
        examples = _number(cache, places, windows)
        example_bytes = sum(output.example_bytes for output in outputs)
        made = Order(
            kind=parse_order(order, world=world, example_bytes=example_bytes),
            count=examples.count,
            seed=seed,
            global_batch=batch_size * world,
            draws=None if weights is None else weighted(weights, places, examples),
        )
        share = _share(made, rank, world, static or None if drop_last is None else drop_last)
        check_share(share)
        resources = probe(device=str(device), path=cache.path)
        demand = _demand(cache, places, outputs, batch_size, str(device))
        plan = _planned(cache, demand, resources, tier, reserve_bytes)
        check_static(static, tier, share, ragged=any(output.ragged for output in outputs))
        self._design = Design(
            cache=cache,
            places=places,
            examples=examples,
            outputs=outputs,
            windowed=windows is not None,
            order=made,
            share=share,
            plan=plan,
            device=device,
            static=static,
            threads=max(1, min(MAX_GATHER_THREADS, int(resources.cpus))),
            deadline_s=timeout_s or READ_DEADLINE_S,
        )
        self._terms = _terms(self._design, windows)
        self._transforms = tuple(transforms)
        self._pin = pin and torch.cuda.is_available()
        self._meter = meter
        self._example_bytes = sum(output.served_bytes for output in outputs)
        self._engine: Engine | None = None
        self._process = 0
        self._at = (0, 0)
        self._resuming = False

    @property
    def plan(self) -> Plan:
        """Which tier holds how many records, and why."""
        return self._design.plan

    @property
    def dataset(self) -> Cache:
        """The cache, under the name that a `DataLoader` has for it."""
        return self._design.cache

    @property
    def batch_size(self) -> int:
        """Examples in a full batch of this rank."""
        return self._design.share.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is left out."""
        return self._design.share.drop_last

    @property
    def sampler(self) -> EpochSetter:
        """What trainers call `set_epoch` on."""
        return EpochSetter(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._at[0]

    @property
    def major_faults(self) -> int:
        """Page faults that went to disk since iteration began; more than a few mean that memory is short."""
        return 0 if self._engine is None else self._engine.residency.faulted()

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._design.share.steps()

    def __getitem__(self, _: object) -> NoReturn:
        """Refused: batches come in the order of an epoch."""
        raise ConfigError(NOT_BY_NUMBER)

    def __repr__(self) -> str:
        design, size = self._design, sum(row.bytes for row in self.plan.rows)
        return (
            f"Loader({design.cache.name!r}, {design.cache.fingerprint}, "
            f"{format_count(design.examples.count)} examples in {format_count(len(self))} batches of "
            f"{self.batch_size}, {self._terms.order} order, "
            f"{self.plan.tier} tier, {format_bytes(size)})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass serve `epoch`; a restored position in this very epoch is kept."""
        if epoch < 0:
            raise ConfigError(f"epoch {epoch} is not one. Expected 0 or more")
        if epoch != self._at[0]:
            self._at, self._resuming = (epoch, 0), False

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Json]:
        """Where to go on: after the batches handed out so far, or after the one whose `position` is given."""
        return states.dump(self._terms, self._at if position is None else position)

    def load_state_dict(self, state: dict[str, Any], *, allow_rebatch: bool = False) -> None:
        """Go on where `state` was taken, at any tier, world size or number of readers.

        Args:
            allow_rebatch: Accept another global batch; its first example is the next one.

        Raises:
            StaleStateError: The state belongs to another cache, order, seed or batch size.
        """
        self._at = states.restore(state, self._terms, allow_rebatch=allow_rebatch)
        self._resuming = True

    def __iter__(self) -> Iterator[Any]:
        """One pass over the rest of the epoch: `WindowBatch`es, or `RecordBatch`es without windows."""
        refuse_workers()
        if not self._resuming:
            self._at = (self._at[0], 0)
        self._resuming = False
        return self._pass(*self._at)

    def _pass(self, epoch: int, position: int) -> Iterator[Any]:
        meter = self._meter
        begin = perf_counter()
        engine = self._running()
        finish = self._finish(engine)
        for strip in engine.strips(epoch, position):
            batches = strip.batches
            if finish:
                batches = finish.apply(batches, strip.examples, strip.size, epoch)
            if meter is None:
                for batch in batches:
                    self._at = batch.position
                    yield batch
                continue
            size_bytes = self._example_bytes * strip.size
            for batch in batches:
                self._at = batch.position
                meter.waited(perf_counter() - begin)
                meter.handed(size_bytes, strip.size, strip.tier)
                yield batch
                begin = perf_counter()
        if meter is not None:
            meter.ended()
        if not self._design.share.steps(position):
            self._at = (epoch + 1, 0)

    def _finish(self, engine: Engine) -> Finish:
        wanted = self._design.device
        return Finish(
            device=None if wanted == engine.device else wanted,
            pin=self._pin and wanted.type == "cpu",
            transforms=self._transforms,
            seed=self._design.order.seed,
        )

    def _running(self) -> Engine:
        """The engine of this process. Threads and locks do not survive a fork, so a child makes its own."""
        if self._engine is None or self._process != os.getpid():
            cache = self._design.cache
            if self._engine is not None:
                cache = type(cache)(cache.path, cache.recipe, cache.index)
            with torch.inference_mode(False):  # its memory outlives the caller's mode, and a thread fills it
                self._engine = Engine(replace(self._design, cache=cache))
            self._process = os.getpid()
            weakref.finalize(self, self._engine.residency.stop).atexit = False
        return self._engine


class EpochSetter:
    """Stands where a `DataLoader` has its sampler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Batches of this rank in an epoch, times the batch size at most."""
        return len(self._loader) * self._loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


def _completed(cache: Cache) -> Cache:
    """The cache with nothing missing, encoding it first where somebody can."""
    if cache.complete:
        return cache
    missing = np.ones(cache.recipe.count, dtype=np.bool_)
    missing[cache.numbers] = False
    missing[list(cache.quarantined)] = False
    numbers = np.flatnonzero(missing)
    if cache.filler is not None:
        from stoker.store import open_cache

        cache.filler.fill(numbers.tolist(), FILL_DEADLINE_S)
        return open_cache(cache.path)
    raise IncompleteError(
        f"{cache.path} holds {format_count(len(cache))} of {format_count(cache.recipe.count)} records; "
        f"{format_count(len(numbers))} are missing, the first is sample {int(numbers[0])}. "
        "Run the same precompute again: it encodes exactly what is missing"
    )


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


def _terms(design: Design, windows: Windows | None) -> states.Terms:
    order, cache = design.order, design.cache
    weights = [] if order.draws is None else [order.draws.cumulative]
    return states.Terms(
        seed=order.seed,
        order=str(order.kind),
        global_batch=order.global_batch,
        examples=order.count,
        fingerprint=cache.fingerprint,
        generation=cache.index.generation,
        records=states.digest_of(design.places.numbers, *weights),
        windows=None if windows is None else windows.text(),
        world=design.share.world,
    )


def _demand(
    cache: Cache, places: Places, outputs: tuple[Output, ...], batch_size: int, device: str
) -> Demand:
    """What is to be planned for: whole shards, since memory is filled by shard."""
    record_bytes = 0.0
    for name, field in cache.schema.items():
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
