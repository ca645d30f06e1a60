"""What a loader serves from: a complete cache, or (`filling.py`) one beside its filling."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from stoker.errors import CorruptError, StalledError, StokerError
from stoker.loader.design import Design, Engine, Strip, completed, decide
from stoker.loader.order import kept_weights
from stoker.loader.prefetch import BatchPrefetcher
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.store import Cache, open_cache
from stoker.store.joins import Joint, reopened
from stoker.store.maintain import repair

if TYPE_CHECKING:
    from stoker.loader.options import Options
    from stoker.plan import Plan
    from stoker.store.storage import Filler


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
        if isinstance(cache, Joint):
            owners = cache.owners(error)
            able = next((owner for owner in owners if owner.filler is not None), owners[0])
            mended = self.mend(able, error)
            return Joint([mended if member in owners else member for member in cache.members])
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


class Serving(Protocol):
    """Makes the batches of one loader. `Whole` and `FillingPass` are the two there are."""

    @property
    def design(self) -> Design:
        """What was decided, as it is by now."""
        ...

    @property
    def steps(self) -> int | None:
        """Batches of this rank in an epoch; None: nobody can know yet."""
        ...

    @property
    def plan(self) -> Plan:
        """Which tier holds how many records by now."""
        ...

    @property
    def faulted(self) -> int:
        """Page faults that went to disk."""
        ...

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        ...

    @property
    def ahead(self) -> BatchPrefetcher:
        """What makes batches of host memory while the step computes; another one after a fork."""
        ...

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """The batches of the rest of an epoch; what is damaged is mended on the way."""
        ...

    def begin(self, epoch: int, batch: int) -> int:
        """Position at which the batch of that number of an epoch begins."""
        ...

    def complete(self, *, wait: bool = False) -> Cache | None:
        """A complete cache to serve from now on, if there is one by now, or when there is; else None."""
        ...


class Whole:
    """Serves a complete cache."""

    def __init__(self, cache: Cache, options: Options, mender: Mender) -> None:
        """`cache` lacks nothing, or what can encode what it lacks.

        Raises:
            StokerError: As `decide` and `completed`.
        """
        cache = completed(cache)
        self._mender = mender
        self._options = replace(options, weights=kept_weights(options.weights, cache, options.indices))
        self.design = self._decided(cache, self._options)
        self.engine: Engine | None = None
        """What makes batches in this process, since the first was asked for."""
        self.ahead = self._new_ahead()
        self._stop: weakref.finalize[[], Whole] | None = None
        self._process, self._known_to = 0, os.getpid()
        self._building: dict[int, threading.Lock] = {}
        """By process, since a lock that another thread held at a fork is never released in the child."""

    @property
    def steps(self) -> int:
        """As `Serving.steps`."""
        return self.design.share.steps()

    @property
    def plan(self) -> Plan:
        """As `Serving.plan`."""
        return self.design.plan if self.engine is None else self.engine.residency.plan

    @property
    def faulted(self) -> int:
        """Page faults that went to disk since iteration began."""
        return 0 if self.engine is None else self.engine.residency.faulted()

    @property
    def device(self) -> torch.device:
        """Where batches are made: where they are wanted."""
        return self.design.device

    def begin(self, epoch: int, batch: int) -> int:
        """As `Serving.begin`."""
        share = self.design.share
        return min(batch * share.step, share.positions)

    def complete(self, *, wait: bool = False) -> None:
        """Nothing: this one is."""

    def strips(self, epoch: int, position: int) -> Iterator[Strip]:
        """As `Serving.strips`.

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
                    cache = reopened(cache)
                with torch.inference_mode(False):  # memory outlives the caller's mode, and a thread fills it
                    self.engine = Engine(replace(self.design, cache=cache))
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
