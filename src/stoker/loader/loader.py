"""The loader: a cache in, batches out, from the fastest tier that holds the records."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError
from stoker.loader import state as states
from stoker.loader.ahead import Ahead
from stoker.loader.arguments import (
    NOT_BY_NUMBER,
    check_kinds,
    check_verify,
    parse_device,
    refuse_workers,
    take_dataloader_arguments,
    whole_numbers,
)
from stoker.loader.decide import Wishes, completed, decide, terms_of
from stoker.loader.draws import Weights
from stoker.loader.engine import Design, Engine, Strip
from stoker.loader.filling import FillingPass, begin_filling_pass
from stoker.loader.fused import Normalise
from stoker.loader.mend import Mender
from stoker.loader.ranks import check_ranks
from stoker.loader.transform import Finish, Transform
from stoker.loader.windows import Windows
from stoker.plan import Plan
from stoker.schema import Json
from stoker.store.joint import reopened
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache
    from stoker.store.blocks import Verify


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
        weights: Sequence[float] | NDArray[Any] | Weights | None = None,
        dtype: str | None = None,
        normalise: Mapping[str, Normalise] | None = None,
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
            device: Where batches are wanted: `cpu`, or `cuda[:i]`.
            seed, rank, world: The order's seed; this process's part of every global batch.
            order: `full` (default), `sequential` (evaluation), `block`, `block(block,window)`, `static`.
            indices: Sample numbers to serve, repeats allowed; None: all that are stored.
            weights: Draw with replacement, in proportion to one weight per record; or `Weights`.
            dtype: Hand floats out as this dtype instead of the stored one.
            normalise: By field how values are normalised on the way, in float32 and on every tier alike.
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
            ResourceError: `tier` cannot hold the records.
        """
        refuse_workers()
        batch_size, rank, world, seed = whole_numbers(
            batch_size=batch_size, rank=rank, world=world, seed=seed
        )
        check_ranks(batch_size, rank, world)
        check_kinds(windows, transforms, reserve_bytes)
        check_verify(verify)
        device = parse_device(device)
        order, timeout_s, pin = take_dataloader_arguments(dataloader, order, Wishes.__slots__)
        self._wishes = Wishes(
            batch_size=batch_size,
            windows=windows,
            tier=tier,
            device=device,
            seed=seed,
            rank=rank,
            world=world,
            order=order,
            indices=indices,
            weights=weights,
            dtype=dtype,
            static=static,
            drop_last=drop_last,
            reserve_bytes=reserve_bytes,
            timeout_s=timeout_s,
            verify=verify,
            normalise=normalise,
        )
        self._mender = Mender()
        self._filling = begin_filling_pass(cache, self._wishes)
        self._serve(cache)
        self._transforms = tuple(transforms)
        self._pin = pin and torch.cuda.is_available()
        self._meter = meter
        self._ahead = self._new_ahead()
        self._example_bytes = sum(output.served_bytes for output in self._design.outputs)
        self._engine: Engine | None = None
        self._stop: weakref.finalize[[], Loader] | None = None
        self._process = 0
        self._at = (0, 0)
        self._resuming = False

    @property
    def plan(self) -> Plan:
        """Which tier holds how many records, and why; once batches were made, as it is by now."""
        return self._design.plan if self._engine is None else self._engine.residency.plan

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
    def mended(self) -> int:
        """Damaged records that this process has encoded again from their source."""
        return self._mender.records

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
        batches = "1 batch" if len(self) == 1 else f"{format_count(len(self))} batches"
        return (
            f"Loader({design.cache.name!r}, {design.cache.fingerprint}, "
            f"{format_count(design.examples.count)} examples in {batches} of {self.batch_size}, "
            f"{self._terms.order} order, {self.plan.tier} tier, {format_bytes(size)})"
        )

    def _serve(self, cache: Cache) -> None:
        """Take up `cache`: beside its filling, or as a complete one."""
        beside = self._filling
        self._design = self._decided(completed(cache), self._wishes) if beside is None else beside.design
        self._terms = terms_of(self._design, self._wishes.windows) if beside is None else beside.terms

    def _complete(self, *, wait: bool = False) -> None:
        """Serve the cache as a complete one, if it is by now, or when it is."""
        if self._filling is not None and (cache := self._filling.complete(wait=wait)) is not None:
            self._filling = None
            self._serve(cache)

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
        if states.is_beside(state):
            self._filling = self._filling or FillingPass(self._design.cache, self._wishes)
            self._serve(self._design.cache)
        else:
            self._complete(wait=True)
        self._at = states.restore(state, self._terms, allow_rebatch=allow_rebatch)
        self._resuming = True

    def __iter__(self) -> Iterator[Any]:
        """One pass over the rest of the epoch: `WindowBatch`es, or `RecordBatch`es without windows."""
        refuse_workers()
        if not (self._resuming and self._at[1]):
            self._complete()
        if not self._resuming:
            self._at = (self._at[0], 0)
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        # Where to begin is decided with the first batch: trainers make the iterator, then call `set_epoch`.
        epoch, position = self._at
        self._resuming = False
        meter = self._meter
        begin = perf_counter()
        for strip, finish in self._strips(epoch, position):
            batches = strip.batches
            if strip.tier == "host":
                batches = self._ahead.of(batches, strip.count)
            if finish:
                batches = finish.apply(batches, strip.examples, strip.size, epoch)
            if meter is None:
                for batch in batches:
                    self._at = batch.position
                    yield batch
            else:
                size_bytes = self._example_bytes * strip.size
                for batch in batches:
                    self._at = batch.position
                    meter.waited(perf_counter() - begin)
                    meter.handed(size_bytes, strip.size, strip.tier)
                    yield batch
                    begin = perf_counter()
            self._ahead.ended()
            del strip, batches  # they refer to memory that may be let go of before the next ones
        if meter is not None:
            meter.ended()
        if not self._design.share.steps(position):
            self._at = (epoch + 1, 0)

    def _strips(self, epoch: int, position: int) -> Iterator[tuple[Strip, Finish]]:
        """The rest of an epoch, and what is still to be done to its batches; mends what is damaged."""
        at = (epoch, position)
        if self._filling is not None:
            yield from self._strips_filling(self._filling, at)
            return
        while at[0] == epoch:
            try:
                finish = self._finish(self._running())
                for strip in self._running().strips(*at):
                    at = strip.after
                    yield strip, finish
                    del strip
            except CorruptError as error:
                self._mend(error)
            else:
                return

    def _strips_filling(self, beside: FillingPass, at: tuple[int, int]) -> Iterator[tuple[Strip, Finish]]:
        finish = self._finish(beside)
        beside.meter = self._meter
        for strip in beside.strips(*at, self._mender):
            self._settle(beside)
            yield strip, finish
        self._settle(beside)
        self._at = (at[0] + 1, 0)

    def _settle(self, beside: FillingPass) -> None:
        """Take over the length, which settles; a pass that outlived its filling has none to give."""
        if self._filling is beside:
            self._design = beside.design

    def _finish(self, engine: Engine | FillingPass) -> Finish:
        wanted = self._design.device
        return Finish(
            device=None if wanted == engine.device else wanted,
            pin=self._pin and wanted.type == "cpu",
            transforms=self._transforms,
            seed=self._design.order.seed,
            meter=self._meter,
        )

    def _decided(self, cache: Cache, wishes: Wishes, plan: Plan | None = None) -> Design:
        """A design for `cache`, or for what it is once its headers are mended."""
        while True:
            try:
                return decide(cache, wishes, plan)
            except CorruptError as error:
                cache = self._mender.mend(cache, error)

    def _mend(self, error: CorruptError) -> None:
        """Have damaged records encoded again, and serve the same examples from where they are then."""
        if self._design.cache.filler is not None:
            # The engine's memory is wanted for the next one, and the frames of the error hold it too.
            error = error.with_traceback(None)
            self._retire()
        with torch.inference_mode(False):
            cache = self._mender.mend(self._design.cache, error)
            wishes = replace(self._wishes, indices=self._design.places.numbers)
            # Not planned anew: what is free by now is what the model and the old tier have left.
            self._design = self._decided(cache, wishes, self._design.plan)
            self._terms = terms_of(self._design, self._wishes.windows)

    def _new_ahead(self) -> Ahead:
        # A thread of its own would be in another stream of a GPU, and write over a batch at a fixed address.
        inline = self._design.static or self._design.device.type != "cpu"
        return Ahead(cores=1 if inline else self._design.threads)

    def _retire(self) -> None:
        """Let go of the engine; what it has read, and is reading, goes with it."""
        if self._stop is not None:
            self._stop()
        self._engine = self._stop = None

    def _running(self) -> Engine:
        """The engine of this process. Threads and locks do not survive a fork, so a child makes its own."""
        if self._engine is None or self._process != os.getpid():
            cache = self._design.cache
            if self._engine is not None:
                cache = reopened(cache)
            with torch.inference_mode(False):  # its memory outlives the caller's mode, and a thread fills it
                self._engine = Engine(replace(self._design, cache=cache, meter=self._meter))
            self._process, self._ahead = os.getpid(), self._new_ahead()
            self._stop = weakref.finalize(self, self._engine.residency.stop)
            self._stop.atexit = False
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


def design_of(loader: Loader) -> Design:
    """All that was decided about a loader, for whoever puts several together."""
    if loader._filling is not None:  # pyright: ignore[reportPrivateUsage] - of this module
        raise ConfigError(
            f"a mixture needs complete caches, and {loader!r} is being filled. Precompute first"
        )
    return loader._design  # pyright: ignore[reportPrivateUsage] - of this module
