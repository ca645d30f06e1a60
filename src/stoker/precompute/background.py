"""Fill a cache while it is served: single records on demand, all of it in a child, and spot checks."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import errors
from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import on_device
from stoker.errors import (
    ConfigError,
    Interrupted,
    MissingRecordError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
    arg,
)
from stoker.precompute.encode import TOLERANCE, BatchEncoder, EncodedRecords, TorchState, distance
from stoker.precompute.encoder_processes import stored
from stoker.precompute.in_process import ask_encoder
from stoker.precompute.loop import PrecomputeLoop, RunTotals
from stoker.precompute.queue import SampleFeed
from stoker.precompute.run import LOG_FOLDER, StageBuilder, commit, encode_here
from stoker.precompute.settings import EncodeShare, PrecomputeSettings, ShareOutcome
from stoker.runtime.processes.child import TORCH, Drain, LoggedChild, is_preloaded
from stoker.runtime.signals import Interrupts
from stoker.runtime.threads import launch_thread, start_thread
from stoker.schema import Json, unfolded
from stoker.sources.files import confined_sources
from stoker.sources.pickling import pickle_for_process
from stoker.sources.protocol import Source
from stoker.store import Cache, Digests, Folder, Recipe, make_recipe, open_folder
from stoker.store.cache import GrowingCache
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# Fill a cache in a child, while the caller trains on what is there.
#
# Not in a thread of the caller: reading and handing on would take turns with the training loop for the
# interpreter's lock, and what hangs in a thread cannot be killed. The child gets source and encoder pickled
# in shared memory, encodes block after block, and says how it ended. It ends in order, with what it encoded
# committed, when it is told to or its caller is gone.


log = logging.getLogger("stoker")

_POLL_S = 0.05
_HERE_S = 0.5
"""Seconds that the caller encodes before a child does. A call of the encoder is not cut short."""
_COMMIT_S = 10.0
"""How long the end of the caller waits for the last commit."""


def folder_mark(path: Path) -> tuple[int, int]:
    """Files in a folder and their bytes: a holder that writes changes it, in the open shard as well."""
    sizes: list[int] = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                sizes.append(entry.stat(follow_symlinks=False).st_size)
            except FileNotFoundError:  # renamed or removed in between, which is progress
                sizes.append(-1)
    return len(sizes), sum(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTask:
    """Cache to fill and its source; pickled for the child."""

    source: Source
    encoder: Encoder | None
    cache_dir: Path
    name: str
    settings: PrecomputeSettings
    state: TorchState
    """How the caller has set torch and numpy."""


class ChildFill:
    """Fill a cache in a child (`engine.fill_in_child`), from `start` on; a `BackgroundFill`.

    Raises:
        SourceError: Source or encoder cannot be sent to another process.
        ConfigError: The settings would take away what is being read.
    """

    def __init__(self, task: FillTask, folder: Folder) -> None:
        if task.settings.overwrite:
            raise ConfigError(
                f"overwrite removes what {arg('wait', False)} is to serve meanwhile",
                hint="Leave one of them out",
            )
        settings = replace(task.settings, by_blocks=True, progress=None)
        missing = set(folder.missing(retry_quarantined=settings.retry_quarantined).tolist())
        again = {number: failure for number, failure in folder.failures().items() if number in missing}
        self._path = folder.path
        self._growing = GrowingCache(folder.path, folder.recipe, again)
        self._quiet_s = settings.timeouts.total_s
        self._mark, self._moved = folder_mark(folder.path), time.monotonic()
        self._end: dict[str, Any] | None = None
        self._owner = os.getpid()
        self._error: StokerError | Interrupted | None = None
        self._start = _ChildStart(folder, _pickled(replace(task, settings=settings)))
        self._finalizer = weakref.finalize(self, self._start.end, os.getpid())
        self.served = self.agreed = False
        """As in the protocol."""
        self.here = ShareOutcome()
        """What the caller encoded before."""

    def start(self) -> None:
        """Start the child; returns at once."""
        self._start.begin()

    def end_here(self) -> None:
        """Note that the caller has encoded everything: there is no child."""
        self._end = {"kind": "done"}
        self._finalizer()

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """As in the protocol."""
        self.done()
        return self._growing.look()

    def forget(self) -> None:
        """As in the protocol."""
        self._growing.forget()

    def done(self) -> bool:
        """As in the protocol."""
        if self._end is None:
            self._check_process()
            if (child := self._start.child()) is None:
                return False
            ended = child.ended()  # looked at first: what it sent before its end is in the socket then
            self._end = next(iter(child.channel.receive()), {"kind": "died"} if ended else None)
            if self._end is not None and self._end["kind"] != "done":
                self._error = self._explained(self._end, child)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._end is not None

    def wait(self, timeout_s: float) -> None:
        """As in the protocol."""
        until = time.monotonic() + timeout_s
        while not self.done() and time.monotonic() < until:
            now, present = time.monotonic(), folder_mark(self._path)
            if present != self._mark:
                self._mark, self._moved = present, now
                return
            if now - self._moved > self._quiet_s and (child := self._start.child()) is not None:
                child.kill()
                raise StalledError(
                    f"nothing was added to {self._path} for {self._quiet_s:g} s, so process {child.pid}, "
                    "which fills it, was killed",
                    hint="Run it again to resume",
                )
            time.sleep(min(_POLL_S, timeout_s))

    def stop(self) -> None:
        """End it in order: what was encoded is committed, the same call resumes. Safe to call twice."""
        self._start.end(self._owner, wait_s=_COMMIT_S)
        self._finalizer.detach()

    def _check_process(self) -> None:
        """Refuse a fork of ours: what it took from the channel would never reach the process that began."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"{self._path} is being filled for process {self._owner}, and this one is a fork of that",
                hint="Make the loader here, or when the cache is complete",
            )

    def _explained(self, end: dict[str, Any], child: LoggedChild) -> StokerError | Interrupted:
        if end["kind"] == "failed":
            kind = getattr(errors, end["error"], StokerError)
            fact = f"filling {self._path} while training failed: {end['message']}"
            return Interrupted(fact) if kind is Interrupted else kind(fact, hint=end["hint"])
        ended, tail = child.exit, child.tail()
        kind = ResourceError if ended is not None and ended.out_of_memory else StokerError
        return kind(
            f"process {child.pid}, which fills {self._path}, {ended}{f'. It said: {tail}' if tail else ''}",
            hint="What is committed stays; run it again to resume",
        )


def _pickled(task: FillTask) -> bytes:
    """Return the task, with the encoder on the CPU: the child brings its own to the device."""
    with nullcontext() if task.encoder is None else on_device(task.encoder, torch.device("cpu")):
        return pickle_for_process(task, "job", otherwise=f"Or leave {arg('wait', False)} out")


class _ChildStart:
    """The child of a `ChildFill`. A thread starts it, since a start may wait for imports.

    The thread lives as long as the child: one that was started, and not forked, ends with its thread.
    """

    def __init__(self, folder: Folder, payload: bytes) -> None:
        self._path, self._fingerprint = folder.path, folder.recipe.fingerprint
        self._confined = confined_sources()  # now, and not when the child is there
        self._drain = Drain()
        self._task_fd = stored(payload)
        self._child: LoggedChild | None = None
        self._error: Exception | None = None
        self._started, self._unwanted, self._over = threading.Event(), threading.Event(), threading.Event()
        self._started.set()
        self._ending = threading.Lock()

    def begin(self) -> None:
        """Start it, unless it is unwanted by now; returns at once.

        Raises:
            ResourceError: Not even a thread can be started.
        """
        self._started.clear()
        try:
            start_thread(self._run, "stoker-fill")
        except ResourceError:
            self._started.set()
            raise

    def child(self) -> LoggedChild | None:
        """Return it; None while it is being started.

        Raises:
            StokerError: It cannot be started.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._child

    def end(self, owner: int, *, wait_s: float = 0.0) -> None:
        """Tell it to end, and give it time to commit. In a fork of its owner: do nothing.

        Args:
            owner: The process that it is of.
            wait_s: How long to wait for its start. After that, the thread that starts it ends it.
        """
        if os.getpid() != owner:
            return
        self._unwanted.set()
        if self._started.wait(wait_s):
            self._end()

    def _run(self) -> None:
        try:
            if not self._unwanted.is_set():
                self._child = self._begin()
        except Exception as error:  # noqa: BLE001  a thread's edge: raised where the cache is served
            self._error = error
        finally:
            self._started.set()
        if self._unwanted.is_set():
            self._end()
        self._over.wait()

    def _begin(self) -> LoggedChild:
        logs = self._path.parent.parent / LOG_FOLDER
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        child = LoggedChild(
            "stoker.precompute.engine:fill_in_child",
            (self._task_fd,),
            what=f"a process to fill {self._path}",
            log=logs / f"fill-{os.getpid()}-{self._fingerprint}.txt",
            drain=self._drain,
            death_signal=signal.SIGTERM,
        )
        child.channel.send({"kind": "start", "confined": self._confined})
        log.info("%s is filled by process %d meanwhile", self._path, child.pid)
        return child

    def _end(self) -> None:
        with self._ending:
            if self._over.is_set():
                return
            if (child := self._child) is not None:
                child.stop(_COMMIT_S)
                failed = child.exit is None or child.exit.code not in (0, -signal.SIGTERM)
                child.discard(keep_log=failed)
            self._drain.close()
            os.close(self._task_fd)
            self._over.set()


# ----------------------------------------------------------------------------------------------------------
# Encode a few records again while training, and compare them with what is stored.
#
# A checksum says that bytes are as they were written; this says that they are what source and encoder give
# now. It runs in a thread of the lowest priority, on the CPU, with a copy of the encoder and a worker
# process of its own, so that it takes what training leaves.


_LOOK_S = 0.25
_END_S = 5.0
_LOWEST = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotDifference:
    """One record that is not what its sample gives now."""

    cache: str
    """Name of its cache."""
    number: int
    """Sample number."""
    field: str
    error: float
    """Largest difference, as a fraction of the record's largest value."""
    limit: float
    """What was allowed."""


@dataclass(slots=True, kw_only=True)
class SpotReport:
    """Results of comparing stored records with fresh ones."""

    wanted: int
    """Records that were to be compared."""
    checked: int = 0
    """Records that were."""
    different: list[SpotDifference] = field(default_factory=list[SpotDifference])
    """Those that differ by more than rounding."""
    failed: list[str] = field(default_factory=list[str])
    """Why records could not be compared."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "wanted": self.wanted,
            "checked": self.checked,
            "different": [
                {"cache": d.cache, "index": d.number, "field": d.field, "error": d.error, "limit": d.limit}
                for d in self.different
            ],
            "failed": [*self.failed],
        }


class SpotChecks:
    """Comparisons of several caches, one after another."""

    def __init__(self, checks: Sequence[SpotCheck]) -> None:
        """Begin with the first."""
        self._checks = checks
        for before, check in zip((None, *checks), checks, strict=False):
            check.start(after=before)

    def finish(self, wait_s: float = 0.0) -> SpotReport:
        """End them, each after `wait_s` seconds at most, and say what they found together by then."""
        # From the last on: one that was stopped lets the next begin.
        reports = [check.finish(wait_s) for check in reversed(self._checks)][::-1]
        return SpotReport(
            wanted=sum(report.wanted for report in reports),
            checked=sum(report.checked for report in reports),
            different=[one for report in reports for one in report.different],
            failed=[why for report in reports for why in report.failed],
        )


class SpotCheck:
    """Compares `count` records of a cache, chosen by `seed`, in a thread that `start` begins."""

    def __init__(
        self,
        source: Source,
        encoder: Encoder | None,
        cache: Cache,
        settings: PrecomputeSettings,
        *,
        count: int,
        seed: int = 0,
    ) -> None:
        self._source, self._encoder, self._cache = source, copy.deepcopy(encoder), cache
        self._settings = replace(settings, device="cpu", workers=1, progress=None)
        count = min(count, len(cache))
        chosen = np.random.default_rng(seed).choice(cache.indices, count, replace=False)
        self._numbers = np.sort(chosen).astype(np.int64)
        self._report = SpotReport(wanted=count)
        self._stop = threading.Event()
        self._after: SpotCheck | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-spot-check", daemon=True)

    def start(self, *, after: SpotCheck | None = None) -> None:
        """Begin, when another one has ended; returns at once."""
        self._after = after
        launch_thread(self._thread, "checking records")

    def _wait_for(self, other: SpotCheck) -> None:
        while other._thread.is_alive() and not self._stop.is_set():
            other._thread.join(_LOOK_S)

    def finish(self, wait_s: float = 0.0) -> SpotReport:
        """End it, after `wait_s` seconds at most, and say what it found by then."""
        self._thread.join(wait_s)
        self._stop.set()
        self._thread.join(_END_S)
        return self._report

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), _LOWEST
            )  # this thread's alone, on Linux
        if self._after is not None:
            self._wait_for(self._after)
        if self._stop.is_set():
            return
        try:
            with torch.inference_mode():
                self._check_all()
        except (StokerError, OSError) as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a thread's edge: training continues, and the report says it
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._report.failed.append(f"{self._cache.name}: {why}")
        log.warning("spot check of %s: %s", self._cache.path, why)

    def _check_all(self) -> None:
        cache, settings = self._cache, self._settings
        digests = Digests(cache.path.parent.parent, settings.identity)
        recipe = make_recipe(
            self._source,
            self._encoder,
            dtype=settings.dtype,
            encode_batch=settings.encode_batch,
            digests=digests,
        )
        if recipe.fingerprint != cache.fingerprint:
            raise SourceError(
                f"source and encoder give {recipe.fingerprint} now: they changed since the cache was made",
                hint="Run precompute for a new one",
            )
        folder = Folder(cache.path, cache.name, recipe)
        builder = StageBuilder(
            self._source, self._encoder, folder, settings, missing=self._numbers, rehearsal=True
        )
        feed = builder.feed()
        try:
            self._compare_all(builder, feed, builder.encoder())
        finally:
            feed.close()
            builder.close()

    def _compare_all(self, builder: StageBuilder, feed: SampleFeed, encoder: BatchEncoder) -> None:
        while not (feed.finished or self._stop.is_set()):
            for batch in feed.poll(_LOOK_S):
                wanted = builder.queue.wanted(batch.work)
                encoded = encoder.encode(batch, wanted, builder.ledger.fault)
                if encoded is not None:
                    self._compare(encoded)
                feed.release(batch)
        for failure in builder.ledger.failures:
            self._fail(f"sample {failure.number} ({failure.stage}: {failure.error})")

    def _compare(self, encoded: EncodedRecords) -> None:
        for place, number in enumerate(encoded.numbers):
            stored = self._cache[number]
            fresh = {name: values[place] for name, values in encoded.records.items()}
            for name, values in unfolded(fresh, self._cache.schema).items():
                floats = self._cache.schema[name].floating
                limit = float(self._cache.index.error[name]["max"]) + TOLERANCE if floats else 0.0
                error = distance(stored[name], values)
                if not error <= limit:
                    self._report.different.append(
                        SpotDifference(
                            cache=self._cache.name, number=number, field=name, error=error, limit=limit
                        )
                    )
                    log.warning(
                        "spot check of %s: field %r of sample %d differs from what its source and encoder "
                        "give now by %.2g of its largest value; %.2g is rounding. Look at what changed "
                        "(stoker cache why), and make the cache again with precompute.overwrite=true",
                        self._cache.name,
                        name,
                        number,
                        error,
                        limit,
                    )
            self._report.checked += 1


def recipe_of(
    source: Source,
    encoder: Encoder | None,
    cache_dir: Path,
    settings: PrecomputeSettings,
    *,
    on_large_file: Callable[[], None] | None = None,
) -> Recipe:
    """Return the recipe of what `settings` ask for; the encoder may be run for it, within its timeout.

    Args:
        source, encoder, cache_dir, settings: As for `run_precompute`.
        on_large_file: See `Digests`.
    """
    digests = Digests(cache_dir, settings.identity, on_large_file=on_large_file)
    return make_recipe(
        source,
        encoder,
        dtype=settings.dtype,
        encode_batch=settings.encode_batch,
        digests=digests,
        ask=partial(ask_encoder, timeout_s=settings.timeouts.encode, logs=cache_dir / LOG_FOLDER),
    )


class EncodeFiller:
    """A `stoker.store.cache.Filler`: encodes in this process, exactly the groups asked for.

    Works in the same fixed groups as `precompute`, so a record filled in has the bits it would have had. One
    worker process reads, under the timeouts of the settings; with `workers=0` this process does, without.
    Nothing is opened before the first call.

    Args:
        source, encoder, cache_dir, name, settings: As for `run_precompute`.
        fingerprint: Of the cache to fill; None: whatever source and encoder give.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder | None,
        cache_dir: Path,
        *,
        name: str,
        settings: PrecomputeSettings,
        fingerprint: str | None = None,
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._cache_dir = cache_dir
        self._name = name
        self._all = settings
        self._settings = replace(settings, workers=settings.workers and 1, devices=(), progress=None)
        self._fingerprint = fingerprint

    @property
    def source(self) -> Source:
        """Return where raw samples come from."""
        return self._source

    @property
    def encoder(self) -> Encoder | None:
        """Makes records of them."""
        return self._encoder

    def fill(self, numbers: Sequence[int], timeout_s: float) -> None:
        """Encode and store these samples unless they are stored, and write the index.

        Raises:
            SourceError: The source or the encoder is not what the cache was made from any more.
            StalledError: `timeout_s` had passed after a group; what was encoded by then is stored.
            MissingRecordError: A sample is quarantined; the message says why.
        """
        until = time.monotonic() + timeout_s
        folder = self._folder()
        asked = np.unique(np.asarray(numbers, np.int64))
        missing = np.intersect1d(asked, folder.missing(retry_transient=False))
        finished = not len(missing) or self._encode(folder, missing, until)
        if len(missing):
            folder.finish()
        failed = {number: failure for number, failure in folder.failures().items() if number in asked}
        if failed:
            number, failure = next(iter(sorted(failed.items())))
            more = f", and {len(failed) - 1} more of those asked for" if len(failed) > 1 else ""
            raise MissingRecordError(
                f"sample {number} is quarantined ({failure.stage}: {failure.error}){more}",
                hint=f"Fix that and run precompute with {arg('retry_quarantined', True)}",
            )
        if not finished:
            raise StalledError(
                f"{format_count(len(missing), 'sample')} asked for, not encoded within {timeout_s:g} s",
                hint="Run precompute first, or give more time",
            )

    def begin(self) -> ChildFill:
        """Encode for half a second, and start a process that encodes the rest of what is missing.

        If that process can be forked at once, it encodes everything.

        Raises:
            SourceError: As `fill`; or source and encoder cannot be sent to a process.
            StokerError: As `run_precompute`, about what was encoded here.
        """
        task = FillTask(
            source=self._source,
            encoder=self._encoder,
            cache_dir=self._cache_dir,
            name=self._name,
            settings=self._all,
            state=TorchState.of_caller(),
        )
        folder = self._folder()
        filling = ChildFill(task, folder)  # its pickle is made before this process calls the encoder
        try:
            if is_preloaded(TORCH) or not self._begin_here(folder, filling):
                filling.start()
        except BaseException:
            filling.stop()
            raise
        return filling

    def _begin_here(self, folder: Folder, filling: ChildFill) -> bool:
        """Encode the first samples in this process; return True if that completed the cache.

        A child finishes a cache that held records before. It also encodes everything if there are other
        caches of the same name, whose records it may adopt, and if another process holds the lock.

        Raises:
            StokerError: As `run_precompute`.
        """
        siblings = len([*folder.path.parent.iterdir()]) > 1
        if siblings or self._all.together or self._all.workers is not None:
            return False
        until = time.monotonic() + _HERE_S
        with folder.lock() as is_free, Interrupts() as interrupts:
            if not is_free:
                return False
            fresh = not folder.stored_count()
            share = EncodeShare(
                source=self._source,
                encoder=self._encoder,
                folder=folder,
                settings=replace(self._all, by_blocks=True, progress=None),
                missing=folder.missing(retry_transient=False),
                interrupts=interrupts,
                here_until=until,
            )
            filling.here = encode_here(share, None)
            if interrupts.signal is not None:
                raise Interrupted(f"stopped by {interrupts.signal.name}. Run it again to resume")
            if not (fresh and filling.here.finished) or folder.failures():
                return False
            folder.finish()
            if len(folder.missing()):  # a transient failure, or damage that `finish` found
                return False
        filling.end_here()
        return True

    def spot_check(self, cache: Cache, count: int, *, seed: int = 0) -> SpotCheck:
        """Return a comparison of `count` records of `cache` with their samples now; it is not begun."""
        return SpotCheck(self._source, self._encoder, cache, self._settings, count=count, seed=seed)

    def _encode(
        self, folder: Folder, missing: np.ndarray[tuple[int], np.dtype[np.int64]], until: float
    ) -> bool:
        builder = StageBuilder(self._source, self._encoder, folder, self._settings, missing=missing)
        totals = RunTotals(
            name=self._name,
            total=folder.recipe.count,
            missing=len(missing),
            quarantined=0,
            device=self._settings.device,
        )
        with ExitStack() as ends:
            feed = builder.feed()
            ends.callback(builder.close)
            ends.callback(feed.close)
            encoding = builder.gathering(builder.encoding(feed, compare_first=False), feed)
            writer = builder.writer()
            ends.callback(encoding.close)
            loop = PrecomputeLoop(
                totals,
                interrupts=Interrupts(),
                sink=None,
                pacing=None,
            )
            try:
                finished = loop.run(builder.stages(feed, encoding, writer), until=until)
            finally:
                encoding.clock.alive(bounded=False)
                commit(writer)
            writer.check()
        builder.leave_device()
        return finished

    def _folder(self) -> Folder:
        """Return the cache's folder, after a look at the source, which may have changed meanwhile."""
        recipe = recipe_of(self._source, self._encoder, self._cache_dir, self._settings)
        if self._fingerprint not in (None, recipe.fingerprint):
            raise SourceError(
                f"{self._cache_dir / self._name / str(self._fingerprint)} was made from other data or by "
                f"another encoder: they give {recipe.fingerprint} now",
                hint="Put the source back as it was, or run precompute for a new cache",
            )
        return open_folder(self._cache_dir, self._name, recipe)
