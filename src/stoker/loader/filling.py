"""A pass over a cache that is still being filled: served beside the filling, each example once.

Examples come in the order in which the cache is filled (`stoker.store.cache`): window after window of a few
blocks, shuffled inside each. A window is served once every sample of it is settled, stored or quarantined, so
that what is served, and in which order, depends on the seed, the epoch and the samples alone, not on when
anything was ready. Samples that prove to be quarantined are passed over, and batches are filled up with those
that follow; a position counts all examples, also those passed over. From the next epoch on the cache is
complete, and the order is the one that was asked for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, IncompleteError, MissingRecordError, StalledError, arg
from stoker.loader.assembly import BatchAssembly, make_joiner
from stoker.loader.chunks import Chunk, Locator, Span
from stoker.loader.design import Design, Found, Strip, check_beside, completed, design, order_of, outputs_of
from stoker.loader.disk import DiskBatches
from stoker.loader.order import Draws, Order, OrderKind, Weights, apportion, weighted
from stoker.loader.outputs import gathered_bytes
from stoker.loader.places import Places, find_places, trajectory_lengths
from stoker.loader.prefetch import BatchPrefetcher
from stoker.loader.windows import Examples, Windows, number_examples, time_field
from stoker.plan import Demand, Plan, Resources, plan_tiers
from stoker.splitmix import Salt, keys_of, stream
from stoker.store.cache import BLOCKS, fill_blocks
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.loader.options import Options
    from stoker.loader.serving import Mender
    from stoker.store import Cache, Recipe
    from stoker.store.storage import Filling


# ----------------------------------------------------------------------------------------------------------
# The order of examples beside the filling of a cache: as it is filled, shuffled within windows of blocks.


WINDOW_BLOCKS = 4
"""Blocks whose examples are shuffled among themselves, a 64th of the set; part of the order, hence fixed."""
KIND = f"fill({BLOCKS},{WINDOW_BLOCKS})"
"""What the state keeps of it."""
ROOM = 1 << 32
"""Numbers set aside for the examples of a record whose length is not known before it is encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Records whose examples are shuffled together."""

    begin: int
    """Position of its first example."""
    stop: int
    """Position after its last one; where lengths vary, most positions are of no example."""
    slots: NDArray[np.int64]
    """The records, by their place among those that the loader serves."""


class FillOrder:
    """A pure function of recipe, samples, seed and epoch.

    Args:
        recipe: Of the cache.
        windows, indices, weights, seed: Of the loader.
        shuffled: False: by sample number.

    Raises:
        ConfigError, MissingRecordError: `indices` are no sample numbers of it, or `weights` not one for each.
    """

    def __init__(
        self,
        recipe: Recipe,
        windows: Windows | None,
        indices: Sequence[int] | NDArray[Any] | None,
        weights: Sequence[float] | NDArray[Any] | Weights | None,
        *,
        seed: int,
        shuffled: bool,
    ) -> None:
        self._seed, self._shuffled = seed, shuffled
        self.numbers = _numbers(recipe, indices)
        """Sample number of each record that is to be served, stored or not."""
        self.varying = windows is not None and recipe.schema[time_field(recipe.schema, windows.field)].ragged
        """How many examples a record has is known only once it is stored."""
        self.examples = _examples(recipe, windows, len(self.numbers))
        self.per_record = self.examples.per_record
        self.draws = None if weights is None else weighted(weights, self.places, self.examples)
        """What examples are drawn from by weight; None: each is served once."""
        self.windows = [*self._numbered(self._cut(fill_blocks(recipe)))]

    @property
    def places(self) -> Places:
        """The records, none of them anywhere yet."""
        none = np.full(len(self.numbers), -1, np.int32)
        return Places(numbers=self.numbers, shard=none, row=none, chosen=None)

    def served(
        self, window: Window, epoch: int, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples of a window in the order of an epoch, and their positions in it.

        Args:
            counts: Examples of each of its records, 0 of one that is quarantined.
        """
        if self.draws is not None:
            return self._drawn(window, epoch, counts > 0)
        room = counts if self.varying else np.full(len(counts), self.per_record, np.int64)
        ends = np.cumsum(room)
        starts = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - room, room)
        examples = np.repeat(window.slots * self.per_record, room) + starts
        here = np.repeat(counts > 0, room)
        if self._shuffled:
            order = np.argsort(keys_of(stream(self._seed, epoch, Salt.FILLING), examples), kind="stable")
            examples, here = examples[order], here[order]
        return examples[here], window.begin + np.flatnonzero(here)

    def _drawn(
        self, window: Window, epoch: int, here: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As many as the window has positions, by weight, of the records that are here; repeats occur."""
        assert self.draws is not None
        mass = np.diff(self.draws.cumulative, prepend=0.0)[window.slots] * here
        if not mass.any():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = np.arange(len(here) + 1, dtype=np.int64) * self.per_record
        order = Order(
            kind=OrderKind(kind="full"),
            count=int(first[-1]),
            seed=self._seed,
            global_batch=1,
            draws=Draws(cumulative=np.cumsum(mass), first=first),
        )
        slot, start = np.divmod(order.epoch(epoch)(window.begin, window.stop), self.per_record)
        return window.slots[slot] * self.per_record + start, np.arange(window.begin, window.stop)

    def lost(self, gone: NDArray[np.bool_]) -> int:
        """Positions to which nothing comes where these of its records are quarantined.

        Of records of varying length none are counted: they have no examples that anybody knows of.
        """
        if self.varying:
            return 0
        if self.draws is None:
            return int(gone.sum()) * self.per_record
        left = np.diff(self.draws.cumulative, prepend=0.0) * ~gone
        return sum(w.stop - w.begin for w in self.windows if not left[w.slots].any())

    def _cut(self, blocks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The records of each window."""
        if not self._shuffled:
            slots = np.arange(len(self.numbers), dtype=np.int64)
            return np.array_split(slots, BLOCKS // WINDOW_BLOCKS)
        by_start = np.argsort(blocks[:, 0])
        rank = by_start[np.searchsorted(blocks[by_start, 0], self.numbers, side="right") - 1]
        slots = np.argsort(rank, kind="stable")
        windows = -(-len(blocks) // WINDOW_BLOCKS)
        return np.split(slots, np.searchsorted(rank[slots] // WINDOW_BLOCKS, np.arange(1, windows)))

    def _numbered(self, pieces: Sequence[NDArray[np.int64]]) -> Iterator[Window]:
        """Windows with their positions; of draws each has its part by the weight of its records."""
        sizes = [len(piece) * self.per_record for piece in pieces]
        if self.draws is not None:
            mass = np.diff(self.draws.cumulative, prepend=0.0)
            wanted = (self.draws.samples or self.examples.count) / float(mass.sum())
            sizes = apportion([wanted * float(mass[piece].sum()) for piece in pieces])
        begin = 0
        for piece, size in zip(pieces, sizes, strict=True):
            if size:
                yield Window(begin=begin, stop=begin + size, slots=piece)
            begin += size


def _numbers(recipe: Recipe, indices: Sequence[int] | NDArray[Any] | None) -> NDArray[np.int64]:
    if indices is None:
        return np.arange(recipe.count, dtype=np.int64)
    wanted = np.asarray(indices)
    if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
        raise ConfigError(f"indices must be a list of sample numbers, got {wanted.dtype} {wanted.shape}")
    if len(wanted) == 0 or wanted.min() < 0 or wanted.max() >= recipe.count:
        raise MissingRecordError(f"indices= must name samples of the cache, from 0 to {recipe.count - 1}")
    return wanted.astype(np.int64)


def _examples(recipe: Recipe, windows: Windows | None, records: int) -> Examples:
    """Numbers of examples, with room for any length where lengths vary."""
    if windows is None:
        return number_examples(None, records, None)
    field = recipe.schema[time_field(recipe.schema, windows.field)]
    if field.ragged:
        none = np.empty(0, np.int64)
        return Examples(count=records * ROOM, per_record=ROOM, first=none, start_every=windows.start_every)
    return number_examples(np.full(records, field.shape[0], np.int64), records, windows)


log = logging.getLogger("stoker")

LOOK_S = 0.1
"""Between two looks at what is there by now."""


def begin_filling_pass(cache: Cache, options: Options, mender: Mender) -> FillingPass | None:
    """A pass beside the filling of `cache`, where it is being filled or `tier="encode"` asks for it.

    Raises:
        ConfigError: Something was asked for that needs a complete cache.
        StokerError: Filling has failed.
    """
    if cache.complete:
        return None
    filling = cache.filling
    if filling is None and options.tier == "encode" and cache.filler is not None:
        filling = cache.filling = cache.filler.begin()
    return None if filling is None or filling.done() else FillingPass(cache, options, mender)


class FillingPass:
    """Makes the batches of a pass that began before its cache was complete, also after that."""

    def __init__(self, cache: Cache, options: Options, mender: Mender) -> None:
        check_beside(cache, options)
        self._cache, self._options, self._mender, self._process = cache, options, mender, os.getpid()
        self._outputs = outputs_of(cache, options)
        join = make_joiner(options.ragged, self._outputs, cache.schema, options.windows)
        self._assembly = BatchAssembly(self._outputs, options, join)
        self._order = FillOrder(
            cache.recipe,
            options.windows,
            options.indices,
            options.weights,
            seed=options.seed,
            shuffled=options.order != "sequential",
        )
        self._numbers, self._examples = self._order.numbers, self._order.examples
        self._counted: dict[int, int] = {}
        """Examples of the windows that were come to, by where these begin; where lengths vary."""
        self._design = self._decide()
        self.device = torch.device("cpu")
        """Where batches are made."""
        self.faulted = 0
        """None are counted: batches are read from disk."""
        self.ahead = BatchPrefetcher(cores=1)
        self._take(cache, np.full(cache.recipe.count, cache.filling is None))

    @property
    def design(self) -> Design:
        """What is known of the loader now; its share shrinks when samples prove to be quarantined."""
        return self._design

    @property
    def steps(self) -> int | None:
        """As `Serving.steps`."""
        if not self._order.varying:
            return self._design.share.steps()
        if len(self._counted) < len(self._order.windows):
            return None
        return replace(self._design.share, positions=sum(self._counted.values())).steps()

    @property
    def plan(self) -> Plan:
        """What comes from where."""
        return self._design.plan

    def complete(self, *, wait: bool = False) -> Cache | None:
        """The cache, once it is complete; None while it is not, unless that is to be waited for.

        Raises:
            StokerError: Filling failed.
            StalledError: It came to a halt.
        """
        filling = self._cache.filling
        if filling is None:
            return self._cache
        settled = filling.look()[1]
        while not filling.done():
            if not wait and not settled.all():
                return None
            filling.wait(LOOK_S)
        return completed(self._cache)

    def begin(self, epoch: int, batch: int) -> int:
        """As `Serving.begin`: behind the batches before, and all that was passed over for them.

        Raises:
            StokerError: As `strips`.
        """
        left, at = batch * self._options.batch_size, 0
        for window in self._order.windows if left else ():
            places = self._stored(window, epoch)[1]
            if left < len(places):
                return int(places[left])
            left, at = left - len(places), window.stop
        return at

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """The batches of the rest of the pass, one a strip; damaged records are mended on the way.

        Raises:
            StalledError: A window was not settled in time.
            StokerError: Filling failed.
        """
        if self._process != os.getpid():
            raise ConfigError(
                "this loader's cache is being filled for the process that made it, and this one is a fork "
                "of that. Make the loader here, or when the cache is complete"
            )
        at, reader = (epoch, position), self._reader()
        while at[0] == epoch:
            try:
                for strip in self._pass(reader, *at):
                    at = strip.after
                    yield strip
            except CorruptError as error:
                filling = self._cache.filling
                mended = self._mender.mend(self._cache, error)
                mended.filling = filling
                self._take(mended, self._settled)
                if filling is not None:
                    filling.forget()
            else:
                return

    def _pass(self, reader: DiskBatches, epoch: int, position: int) -> Iterator[Strip]:
        size = self._options.batch_size
        more = size if self._options.drop_last else 1
        examples = places = np.empty(0, np.int64)
        for window in self._order.windows:
            if window.stop <= position:
                continue
            own, at = self._stored(window, epoch)
            rest = at >= position
            examples, places = np.append(examples, own[rest]), np.append(places, at[rest])
            # What follows may all be quarantined: a batch is not the last one if `more` examples are here.
            whole = max(0, (len(examples) - more) // size * size)
            yield from self._served(reader, epoch, examples[:whole], places[:whole], last=False)
            examples, places = examples[whole:], places[whole:]
        yield from self._served(reader, epoch, examples, places, last=True)
        self._await_verdict()
        self._check_counted()

    def _await_verdict(self) -> None:
        """Where samples were left out, wait for the end of the filling: it fails if they are too many.

        Raises:
            StokerError: Filling failed.
        """
        filling = self._cache.filling
        if filling is not None and bool((self._settled & ~self._here)[self._numbers].any()):
            while not filling.done():
                filling.wait(LOOK_S)

    def _check_counted(self) -> None:
        """Say so where an epoch had no batch because no trajectory is long enough for one."""
        counted, windows = self._counted.values(), self._options.windows
        if windows is not None and len(counted) == len(self._order.windows) and not any(counted):
            raise ConfigError(
                f"no trajectory of {self._cache.path} is long enough for a window of stride "
                f"{windows.strides[1]} and horizon {windows.horizons[1]}, which spans {windows.span + 1} "
                f"steps. Choose a smaller {arg('stride')} or {arg('horizon')}"
            )

    def _served(
        self,
        reader: DiskBatches,
        epoch: int,
        examples: NDArray[np.int64],
        places: NDArray[np.int64],
        *,
        last: bool,
    ) -> Iterator[Strip]:
        """Batches of these examples; a short one comes last, where that is wanted."""
        size = self._options.batch_size
        tail = 0 if self._options.drop_last else len(examples) % size
        whole = len(examples) // size
        for first, count, length in ((0, whole, size), (whole * size, min(1, tail), tail)):
            if not count:
                continue
            stop = first + count * length
            after = [(epoch, int(place) + 1) for place in places[first + length - 1 : stop : length]]
            if last and (stop == len(examples) or not tail):
                after[-1] = (epoch + 1, 0)
            chunk = self._chunk(reader, examples[first:stop], count, length)
            for k, values in enumerate(reader.batches(chunk, 0)):
                columns: list[Iterable[Any]] = [[value] for value in values]
                yield self._strip(columns, chunk.examples[k * length : (k + 1) * length], epoch, after[k])

    def _strip(
        self, columns: list[Iterable[Any]], examples: Any, epoch: int, after: tuple[int, int]
    ) -> Strip:
        batches = self._assembly.batches(columns, [after], examples, epoch, len(examples))
        return Strip(
            batches=batches, count=1, size=len(examples), examples=examples, tier="encode", after=after
        )

    def _chunk(self, reader: DiskBatches, examples: NDArray[np.int64], count: int, size: int) -> Chunk:
        """Consecutive batches, located in the cache as it is now."""
        slots, starts = self._examples.locate(examples, self._examples.first)
        numbers, records = np.unique(self._numbers[slots], return_inverse=True)
        places = find_places(self._cache, numbers)
        if len(places.numbers) != len(numbers):
            lost = int(np.setdiff1d(numbers, places.numbers)[0])
            raise MissingRecordError(
                f"sample {lost} was stored and is quarantined now. Start the epoch again"
            )
        reader.over(self._cache, places)
        index = torch.as_tensor(self._numbers[slots], device="cpu")
        if self._design.windowed:
            index = torch.stack([index, torch.as_tensor(starts, device="cpu")], dim=1)
        span = Span(epoch=0, position=0, batches=count, batch=size, step=0, short=False, last=False)
        return Chunk(
            span=span, examples=examples, records=records, starts=starts, index=index, rows=None, memory=None
        )

    def _reader(self) -> DiskBatches:
        """One for each pass: it is told for each of its chunks where the records are."""
        design = self._design
        locator = Locator(
            examples=design.examples,
            first=design.examples.first,
            numbers=self._numbers,
            windowed=design.windowed,
            step_lengths={},
            ragged=(),
            lengths={},
        )
        columns = self._assembly.columns
        return DiskBatches(self._cache, design.places, columns, locator, lambda: None, design.options)

    def _stored(self, window: Window, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples of a window that can be served, in the order of the epoch, and their positions."""
        begin = time.perf_counter()
        self._await(self._numbers[window.slots])
        if self._options.meter is not None:
            self._options.meter.spent("read", time.perf_counter() - begin)
        counts = self._counts(self._numbers[window.slots])
        if self._order.varying:
            self._counted[window.begin] = int(counts.sum())
        return self._order.served(window, epoch, counts)

    def _counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Examples of these samples, which are settled."""
        here, windows = self._here[numbers], self._options.windows
        counts = here.astype(np.int64)
        if windows is None or not self._order.varying:
            return counts * self._order.per_record
        if here.any():
            lengths = trajectory_lengths(self._cache, find_places(self._cache, numbers[here]), windows)
            counts[here] = windows.counts(lengths)
        return counts

    def _await(self, numbers: NDArray[np.int64]) -> None:
        """Wait until these samples are settled, and have the handle that knows them.

        A `timeout` given to the loader is the deadline; else it is the filling's own, which moves with it.
        """
        filling, timeout_s = self._cache.filling, self._options.timeout_s
        if filling is None:
            return
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ended = filling.done()
            self._look(filling)
            if self._settled[numbers].all():
                return
            if ended:
                lost = numbers[~self._settled[numbers]]
                raise IncompleteError(
                    f"{self._cache.path} was filled, and {format_count(len(lost))} samples of it are gone "
                    f"since, the first is {int(lost[0])}. Run the same precompute again"
                )
            if time.monotonic() >= until:
                raise StalledError(
                    f"{format_count(int((~self._settled[numbers]).sum()))} samples of the next window were "
                    f"not encoded within {timeout_s:g} s. Give the loader a longer timeout="
                )
            filling.wait(LOOK_S)

    def _look(self, filling: Filling) -> None:
        cache, settled = filling.look()
        if settled is not self._settled:
            cache.filler, cache.filling = self._cache.filler, filling
            cache.joined = self._cache.joined
            self._take(cache, settled)

    def _take(self, cache: Cache, settled: NDArray[np.bool_]) -> None:
        """Serve from this handle, the same cache as it is now; what is settled and not stored is left out."""
        self._cache, self._settled = cache, settled
        self._here = np.zeros(cache.recipe.count, np.bool_)
        self._here[cache.numbers] = True
        lost = self._order.lost((settled & ~self._here)[self._numbers])
        share = replace(self._design.share, positions=self._design.order.positions - lost)
        self._design = replace(self._design, cache=cache, share=share)

    def _decide(self) -> Design:
        order, options = self._order, replace(self._options, tier="encode")
        found = Found(
            places=order.places,
            examples=order.examples,
            outputs=self._outputs,
            join=None,
            order=order_of(options, self._outputs, order.examples.count, order.draws),
            demand=self._demand(),
            shards=(),
            beside=KIND,
        )
        return design(self._cache, options, found, self._planned)

    def _demand(self) -> Demand:
        cache, options = self._cache, self._options
        here = int(np.isin(self._numbers, cache.numbers).sum())
        sizes = (f.row_bytes if f.ragged else f.size_bytes() for f in cache.recipe.columns.values())
        return Demand(
            records=len(self._numbers),
            record_bytes=float(sum(sizes)),
            batch_examples=options.batch_size,
            example_bytes=gathered_bytes(self._outputs),
            device=str(options.device),
            missing_records=len(self._numbers) - here,
        )

    def _planned(self, demand: Demand, resources: Resources) -> Plan:
        reason = (
            f"{format_count(demand.missing_records)} of {format_count(demand.records)} records are encoded "
            "while this epoch is served: in block order, as they come, from disk. The next epoch has them "
            f"all, in {self._options.order} order, from the fastest tier"
        )
        log.info("%s: %s", self._cache.path, reason)
        plan = plan_tiers(demand, resources, tier="encode", reserve_bytes=self._options.reserve_bytes)
        return replace(plan, tier="encode", reason=reason)
