"""The loader: a cache in, batches out, from the fastest tier that holds the records."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, StalledError, StokerError, UncountedError, arg
from stoker.loader import state as states
from stoker.loader.design import Engine, Strip, check_filling, completed, decide, decide_filling
from stoker.loader.filling import LOOK_S, Arrivals, FillOrder
from stoker.loader.options import (
    Options,
    check_cache,
    refuse_workers,
    take_dataloader_arguments,
)
from stoker.loader.order import kept_weights
from stoker.loader.places import joined_indices
from stoker.loader.prefetch import BatchPrefetcher, BegunStrip, Strips
from stoker.loader.state import EpochIterable, EpochPlace
from stoker.loader.transform import Columns, Finish, FixedBatch, Transform
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.store import open_cache
from stoker.store.joint import JointCache, reopen
from stoker.store.maintain import repair
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.loader.assembly import Ragged
    from stoker.loader.design import Design
    from stoker.loader.fused import Normalise
    from stoker.loader.order import Weights
    from stoker.loader.windows import Windows
    from stoker.monitor.meter import StallMeter
    from stoker.plan import Plan
    from stoker.schema import Json
    from stoker.store import Cache
    from stoker.store.cache import Filler
    from stoker.store.shard import Verify


# ----------------------------------------------------------------------------------------------------------
# Damaged records that a loader meets: set aside, encoded again from their source, and served after all.
#
# The damage is noted in the cache, so it is mended for everybody. Of several processes that meet it (ranks,
# loaders) one does the work under a claim, and the others find it done.


log = logging.getLogger("stoker")

MEND_DEADLINE_S = 600.0
"""Seconds that one mending may take: waiting for another process, reading a shard, encoding its records."""
TRIES = 2
"""How often a loader has the same record encoded again: storage that damages it each time is broken."""
_CLAIM = "mend"


class Mender:
    """Mends for one loader, and counts."""

    def __init__(self) -> None:
        self.records = 0
        """Records that were encoded again by this process."""
        self._tried: Counter[tuple[str, int | str]] = Counter()

    def mend(self, cache: Cache, error: CorruptError) -> Cache:
        """The cache with all the records that it had, those that `error` is about made again.

        Raises:
            CorruptError: Nobody can encode them, or it failed; says why and what to do.
        """
        if isinstance(cache, JointCache):
            owners = cache.owners(error)
            able = next((owner for owner in owners if owner.filler is not None), owners[0])
            mended = self.mend(able, error)
            return JointCache([mended if member in owners else member for member in cache.members])
        if cache.filler is None or not error.shard:
            raise error
        try:
            mended = self._mended(cache, error, cache.filler)
        except StokerError as reason:
            fact = f"{error.fact}. Encoding it again from its source failed: {reason}"
            raise CorruptError(fact, shard=error.shard, folder=error.folder) from reason
        mended.filler, mended.joined = cache.filler, cache.joined
        return mended

    def _mended(self, cache: Cache, error: CorruptError, filler: Filler) -> Cache:
        until = time.monotonic() + MEND_DEADLINE_S
        with lock_folder(cache.path, _CLAIM, timeout_s=MEND_DEADLINE_S) as got:
            if not got:
                raise StalledError(
                    f"{lock_holder(cache.path, _CLAIM)} has been repairing {cache.path} for "
                    f"{MEND_DEADLINE_S:g} s. See whether it hangs"
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
        self._say(error, [bad.index for bad in found.bad])
        return opened

    def _count(self, folder: str, keys: list[int] | list[str]) -> None:
        self._tried.update((folder, key) for key in keys)
        (folder, worst), times = self._tried.most_common(1)[0]
        if times > TRIES:
            what = f"sample {worst}" if isinstance(worst, int) else worst
            raise CorruptError(
                f"{what} of {folder} has been damaged {times} times in this run. Look at the storage"
            )

    def _say(self, error: CorruptError, numbers: list[int]) -> None:
        if not numbers:
            log.warning("%s. It is sound now: another process repaired it, or a read went wrong", error.fact)
            return
        shown = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if numbers[10:] else "")
        log.warning("%s. Encoded again from the source: samples %s", error.fact, shown)


def _lost(before: Cache, now: Cache) -> list[int]:
    """Samples that were stored before and are not now."""
    return np.setdiff1d(before.numbers, now.numbers).tolist()


# ----------------------------------------------------------------------------------------------------------
# What a loader serves from: a complete cache, or one that is being filled.


class Serving:
    """Makes the batches of one loader, from a complete cache."""

    def __init__(self, cache: Cache, options: Options, mender: Mender) -> None:
        """`cache` lacks nothing, or what can encode what it lacks.

        Raises:
            StokerError: As `decide` and `completed`.
        """
        self._mender, self._options = mender, options
        self.arrivals: Arrivals | None = None
        self.design = self._begin(cache)
        """What was decided, as it is by now."""
        self.engine: Engine | None = None
        """What makes batches in this process, since the first was asked for."""
        self.ahead = self._new_ahead()
        """What makes batches of host memory while the step computes; another one after a fork."""
        self._stop: weakref.finalize[[], Serving] | None = None
        self._process, self._known_to = 0, os.getpid()
        self._building: dict[int, threading.Lock] = {}
        """By process, since a lock that another thread held at a fork is never released in the child."""

    def _begin(self, cache: Cache) -> Design:
        cache = completed(cache)
        weights = kept_weights(self._options.weights, cache, self._options.indices)
        self._options = replace(self._options, weights=weights)
        return self._decided(cache, self._options)

    @property
    def steps(self) -> int | None:
        """Batches of this rank in an epoch; None: nobody can know yet."""
        return self.design.share.steps()

    @property
    def plan(self) -> Plan:
        """Which tier holds how many records by now."""
        return self.design.plan if self.engine is None else self.engine.residency.plan

    @property
    def faulted(self) -> int:
        """Page faults that went to disk since iteration began; not counted while all is read from disk."""
        return 0 if self.engine is None or self.arrivals is not None else self.engine.residency.faulted()

    @property
    def device(self) -> torch.device:
        """Where batches are made: where they are wanted, if they need not be read first."""
        return self.design.device if self.arrivals is None else torch.device("cpu")

    def begin(self, epoch: int, batch: int) -> int:
        """Position at which the batch of that number of an epoch begins."""
        share = self.design.share
        return min(batch * share.step, share.positions)

    def complete(self, *, wait: bool = False) -> Cache | None:
        """A complete cache to serve from now on, if this one is not and there is one; else None."""
        return None

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """The batches of the rest of an epoch; what is damaged is mended on the way.

        Raises:
            CorruptError: A record's bytes do not match their checksums, and nobody can encode it again.
            StalledError: A read did not end in time.
        """
        at = (epoch, position)
        while at[0] == epoch:
            try:
                for strip in self.running().strips(*at):
                    at = strip.after
                    yield strip
                    del strip  # it refers to memory that may be let go of before the next one
            except CorruptError as error:
                self._mend(error)
            else:
                return

    def running(self) -> Engine:
        """The engine of this process, the same for all its threads. Threads and locks do not survive a fork,
        so a child makes its own.
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
                    self.engine = Engine(replace(self.design, cache=cache), self.arrivals)
                self._process, self.ahead = os.getpid(), self._new_ahead()
                self._stop = weakref.finalize(self, self.engine.residency.stop)
                self._stop.atexit = False
            return self.engine

    def _new_ahead(self) -> BatchPrefetcher:
        # A thread of its own would be in another stream of a GPU, and write over a batch at a fixed address.
        inline = self.design.static or self.design.device.type != "cpu"
        return BatchPrefetcher(cores=1 if inline else self.design.threads)

    def _decided(self, cache: Cache, options: Options, plan: Plan | None = None) -> Design:
        """A design for `cache`, or for what it is once its headers are mended."""
        while True:
            try:
                return decide(cache, options, plan)
            except CorruptError as error:
                cache = self._mender.mend(cache, error)

    def _mend(self, error: CorruptError) -> None:
        """Have damaged records encoded again, and serve the same examples from where they are then."""
        if self.design.cache.filler is not None:
            # The engine's memory is wanted for the next one, and the frames of the error hold it too.
            error = error.with_traceback(None)
            self._retire()
        with torch.inference_mode(False):
            cache = self._mender.mend(self.design.cache, error)
            options = replace(self._options, indices=self.design.places.numbers)
            # Not planned anew: what is free by now is what the model and the old tier have left.
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

    def __init__(self, cache: Cache, options: Options, mender: Mender) -> None:
        """Decide about the examples of the entire cache, stored or not.

        Raises:
            ConfigError: Something was asked for that needs a complete cache.
        """
        check_filling(cache, options)
        super().__init__(cache, options, mender)
        assert self.design.fill is not None
        self._made_in = os.getpid()
        self._fill, self._positions = self.design.fill, self.design.order.positions
        self.arrivals = self._arrivals = Arrivals(cache, options, self._fill, self._changed)

    def _begin(self, cache: Cache) -> Design:
        options = self._options
        fill = FillOrder(
            cache.recipe,
            options.windows,
            options.indices,
            options.weights,
            seed=options.seed,
            shuffled=options.order != "sequential",
        )
        return decide_filling(cache, options, fill)

    @property
    def steps(self) -> int | None:
        """As `Serving.steps`; None while trajectories of varying length are still to be counted."""
        share = self.design.share
        if self._fill.varying:
            counted = self._arrivals.counted
            return None if counted is None else replace(share, positions=counted).steps()
        return share.steps()

    def begin(self, epoch: int, batch: int) -> int:
        """As `Serving.begin`; waits for the records before it.

        Raises:
            StokerError: As `Serving.strips`.
        """
        return self._arrivals.begin(epoch, batch)

    def complete(self, *, wait: bool = False) -> Cache | None:
        """The cache, once it is complete; None while it is not, unless that is to be waited for.

        Raises:
            StokerError: Filling failed.
            StalledError: It came to a halt.
        """
        cache = self.design.cache
        filling = cache.filling
        if filling is None:
            return cache
        settled = filling.look()[1]
        while not filling.done():
            if not wait and not settled.all():
                return None
            filling.wait(LOOK_S)
        return completed(cache)

    def running(self) -> Engine:
        """As `Serving.running`.

        Raises:
            ConfigError: In a fork, which nobody tells what is stored.
        """
        if self._made_in != os.getpid():
            raise ConfigError(
                "this loader's cache is being filled for the process that made it, and this one is a fork "
                "of that. Make the loader here, or when the cache is complete"
            )
        return super().running()

    def _changed(self, cache: Cache, lost: int) -> None:
        share = replace(self.design.share, positions=self._positions - lost)
        self.design = replace(self.design, cache=cache, share=share)

    def _mend(self, error: CorruptError) -> None:
        self._arrivals.mended(self._mender.mend(self.design.cache, error))


def begin_serving(cache: Cache, options: Options, mender: Mender) -> Serving:
    """Return what serves `cache`: while it is being filled, if it is or `tier="encode"` asks for it.

    Raises:
        ConfigError: Something was asked for that needs a complete cache.
        StokerError: Filling has failed; or as `Serving`.
    """
    if not cache.complete:
        if cache.filling is None and options.tier == "encode" and cache.filler is not None:
            cache.filling = cache.filler.begin()
        if cache.filling is not None and not cache.filling.done():
            return FillServing(cache, options, mender)
    return Serving(cache, options, mender)


def _after_fork() -> None:
    """Have torch compute on one thread in a process that was forked: those it had did not come along, and an
    operation that shares its work with them waits for ever.
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


# ----------------------------------------------------------------------------------------------------------
# The public class.


class Loader(EpochIterable):
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
        world_size: int = 1,
        order: str | None = None,
        indices: Sequence[int] | NDArray[Any] | None = None,
        weights: Sequence[float] | NDArray[Any] | Weights | None = None,
        dtype: str | None = None,
        normalise: Mapping[str, Normalise] | None = None,
        ragged: Ragged = "list",
        static: bool = False,
        drop_last: bool | None = None,
        reserve_bytes: int | None = None,
        verify: Verify = "always",
        transforms: Sequence[Transform] = (),
        meter: StallMeter | None = None,
        **dataloader: Any,
    ) -> None:
        """Decide what is served from where; records are read when iteration begins.

        Args:
            cache: What to serve. One that is being filled (`precompute(wait=False)`) is served meanwhile, in
                block order; another with records missing needs a filler, which then encodes them first.
            batch_size: Examples in a batch of this rank: windows if `windows` is given, else records.
            windows: How trajectories are cut; None serves whole records.
            tier: `auto`, or the tier that shall hold everything: `device`, `host`, `disk`, `encode`.
            device: Where batches are wanted: `cpu`, `cuda[:i]`, or `auto`: a GPU where there is one.
            seed, rank, world_size: The order's seed; this process's part of every global batch.
            order: `full` (default), `sequential` (evaluation), `block`, `block(block,window)`, `static`, or
                `bucket`, `bucket(batches)`: records of similar length in a batch.
            indices: Sample numbers to serve, repeats allowed; None: all that are stored.
            weights: Draw with replacement, in proportion to one weight per record (or per sample, where some
                are quarantined or not encoded yet); or `Weights`.
            dtype: Hand floats out as this dtype instead of the stored one.
            normalise: By field how values are normalised on the way, in float32 and on every tier alike.
            ragged: Whole records of varying length as `list`, `pad`, `pack`, or `Pad(to=..., value=...)`.
            static: Every batch at the same addresses, overwriting the last; device tier only.
            drop_last: Leave out a short last batch. None: only with several ranks, not in sequential order.
            reserve_bytes: Memory of the device to leave to the model.
            verify: When the disk tier compares what it reads with checksums: `always`, at the `first` read
                of each block by this process, or `off`. The other tiers do once, as they are filled.
            transforms: Functions `(batch, keys) -> batch`; `keys` holds a random int64 per example.
            meter: Told how long each batch was waited for.
            dataloader: Arguments of `torch.utils.data.DataLoader`; those without a meaning here say so.

        Raises:
            ConfigError: A setting does not fit the cache or another one.
            IncompleteError: Records are missing and nobody can encode them.
            ResourceError: `tier` cannot hold the records, or `device` is not there.
        """
        refuse_workers()
        check_cache(cache)
        order, timeout_s, pin_memory = take_dataloader_arguments(dataloader, order, Options.__slots__)
        self._options = Options(
            batch_size=batch_size,
            windows=windows,
            tier=tier,
            device=cast(torch.device, device),
            seed=seed,
            rank=rank,
            world_size=world_size,
            order=order,
            indices=joined_indices(cache, indices),
            weights=weights,
            dtype=dtype,
            static=static,
            drop_last=drop_last,
            reserve_bytes=reserve_bytes,
            timeout_s=timeout_s,
            verify=verify,
            normalise=normalise,
            ragged=ragged,
            transforms=cast("tuple[Transform, ...]", transforms),
            pin_memory=pin_memory,
            meter=meter,
        )
        self._columns = None if cache.joined is None else Columns(cache.joined, static=static)
        self._fixed = FixedBatch() if static and transforms else None
        self._mender = Mender()
        self._serving: Serving = begin_serving(cache, self._options, self._mender)
        self._turn = BegunStrip()
        self._place = EpochPlace()

    @property
    def plan(self) -> Plan:
        """Which tier holds how many records, and why; once batches were made, as it is by now."""
        return self._serving.plan

    @property
    def dataset(self) -> Cache:
        """The cache, under the name that a `DataLoader` has for it."""
        return self._serving.design.cache

    @property
    def batch_size(self) -> int:
        """Examples in a full batch of this rank."""
        return self._serving.design.share.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is left out."""
        return self._serving.design.share.drop_last

    @property
    def mended(self) -> int:
        """Damaged records that this process has encoded again from their source."""
        return self._mender.records

    @property
    def major_faults(self) -> int:
        """Page faults that went to disk since iteration began; more than a few mean that memory is short."""
        return self._serving.faulted

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch.

        Raises:
            UncountedError: Windows are cut from trajectories of varying length, not all of which are encoded.
        """
        steps = self._serving.steps
        if steps is None:
            raise UncountedError(
                f"{self.dataset.path} is being filled, and how many windows its trajectories have is known "
                f"once all are. Iterate without asking for the length, or leave {arg('wait', False)} out"
            )
        return steps

    def __repr__(self) -> str:
        design, size = self._serving.design, sum(row.bytes for row in self.plan.rows)
        steps, examples = self._serving.steps, format_count(design.examples.count, "example")
        if steps is None:
            examples, batches = "windows still to be counted", "batches"
        else:
            batches = "1 batch" if steps == 1 else f"{format_count(steps)} batches"
        return (
            f"Loader({design.cache.name!r}, {design.cache.fingerprint}, {examples} in {batches} of "
            f"{self.batch_size}, "
            f"{self._serving.design.order.kind} order, {self.plan.tier} tier, {format_bytes(size)})"
        )

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Json]:
        """Where to go on: after the batches handed out so far, or after the one whose `position` is given."""
        return states.dump(self._serving.design, self._place.at if position is None else position)

    def load_state_dict(self, state: dict[str, Any], *, allow_rebatch: bool = False) -> None:
        """Go on where `state` was taken, at any tier, world size or number of workers.

        Args:
            allow_rebatch: Accept another global batch; its first example is the next one.

        Raises:
            StaleStateError: The state belongs to another cache, order, seed or batch size.
        """
        self._follow(state)
        self._place.restore(states.restore(state, self._serving.design, allow_rebatch=allow_rebatch))

    def __iter__(self) -> Iterator[Any]:
        """One pass over the rest of the epoch: `WindowBatch`es, or `RecordBatch`es without windows."""
        refuse_workers()
        if not self._place.amid:
            self._complete()
        self._place.rewind()
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        # Where to begin is decided with the first batch: trainers make the iterator, then call `set_epoch`.
        epoch, position = last = self._place.begin()
        serving, meter = self._serving, self._options.meter
        finish = self._finish(serving)
        example_bytes = sum(output.served_bytes for output in serving.design.outputs)
        begin = perf_counter()
        strips = Strips(serving.strips(epoch, position), self._turn)
        try:
            for strip in strips:
                batches = strip.batches
                if strip.tier == "host":
                    batches = serving.ahead.of(batches, strip.count, strips)
                if finish:
                    batches = finish.apply(strip, batches, epoch)
                if meter is None:
                    for batch in batches:
                        self._place.at = last = batch.position
                        yield batch
                else:
                    size_bytes = example_bytes * strip.size
                    for batch in batches:
                        self._place.at = last = batch.position
                        meter.waited(perf_counter() - begin)
                        meter.handed(size_bytes, strip.size, strip.tier)
                        yield batch
                        begin = perf_counter()
                serving.ahead.ended()
                del strip, batches  # they refer to memory that may be let go of before the next ones
        finally:
            strips.close()
        if meter is not None:
            meter.ended()
        self._place.end(epoch, last)

    def _finish(self, serving: Serving) -> Finish:
        options = self._options
        wanted = options.device
        return Finish(
            device=None if wanted == serving.device else wanted,
            pin=options.pin_memory and wanted.type == "cpu" and torch.cuda.is_available(),
            transforms=options.transforms,
            seed=options.seed,
            meter=options.meter,
            columns=self._columns,
            fixed=self._fixed,
        )

    def _follow(self, state: dict[str, Any]) -> None:
        """Serve beside a filling, or from a complete cache, as the loader did whose state this is."""
        if not states.is_beside(state):
            self._complete(wait=True)
        elif not is_filling(self):
            self._serving = FillServing(self._serving.design.cache, self._options, self._mender)

    def _complete(self, *, wait: bool = False) -> None:
        """Serve the cache as a complete one, if it is by now, or when it is."""
        if (cache := self._serving.complete(wait=wait)) is not None:
            self._serving = Serving(cache, self._options, self._mender)


# pyright: reportPrivateUsage=false
# For whoever puts several loaders together.


def design_of(loader: Loader) -> Design:
    """All that was decided about a loader.

    Raises:
        ConfigError: It is none that a mixture can be made of.
    """
    if loader._serving.steps is None:
        raise ConfigError(
            f"a mixture lays out its turns by the batches of each cache, and those of {loader!r} are known "
            f"once it is filled. Leave {arg('wait', False)} out of its precompute"
        )
    return loader._serving.design


def is_filling(loader: Loader) -> bool:
    """Whether it serves beside the filling of its cache."""
    return loader._serving.design.fill is not None


def complete(loader: Loader) -> None:
    """Have it serve a complete cache from its next pass on, and wait for that."""
    loader._complete(wait=True)


def follow(loader: Loader, state: dict[str, Any]) -> None:
    """Have it serve beside a filling, or not, as the loader did whose state this is."""
    if states.is_beside(state) != is_filling(loader):
        loader._follow(state)


def pass_from(loader: Loader, epoch: int, batch: int) -> Iterator[Any]:
    """A pass that begins with the batch of that number of an epoch, from where the loader serves now."""
    loader._place.restore((epoch, loader._serving.begin(epoch, batch)))
    return loader._pass()
