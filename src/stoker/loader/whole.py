"""What a loader serves from: a complete cache, or (`filling.py`) one beside its filling."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from stoker.errors import CorruptError
from stoker.loader.ahead import Ahead
from stoker.loader.arguments import Options
from stoker.loader.decide import completed, decide
from stoker.loader.engine import Design, Engine, Strip
from stoker.loader.mend import Mender
from stoker.loader.places import kept_weights
from stoker.plan import Plan
from stoker.store import Cache
from stoker.store.joint import reopened


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
    def ahead(self) -> Ahead:
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

    def _new_ahead(self) -> Ahead:
        # A thread of its own would be in another stream of a GPU, and write over a batch at a fixed address.
        inline = self.design.static or self.design.device.type != "cpu"
        return Ahead(cores=1 if inline else self.design.threads)

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
