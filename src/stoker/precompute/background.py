"""Encode single samples on demand, for a loader that meets records which are missing or damaged."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import errors
from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved
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
from stoker.precompute.encode import TOLERANCE, Encoded, GroupEncoder, distance
from stoker.precompute.in_process import EncodeWatchdog
from stoker.precompute.queue import Feed
from stoker.precompute.run import Run, Standing
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.share import Interrupts, folder_mark
from stoker.precompute.stages import LOG_FOLDER, Bench
from stoker.runtime.processes.child import Drain, Output, oom_kills
from stoker.runtime.processes.wire import Channel, pack
from stoker.schema import Json, unfolded
from stoker.sources.files import confined_sources
from stoker.sources.protocol import Source
from stoker.sources.travel import packed
from stoker.store import Cache, Digests, Folder, Recipe, make_recipe, open_folder
from stoker.store.cache import GrowingCache
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# Fill a cache in a process of its own, while the caller trains on what is there.
#
# Not in a thread of the caller: switches of its own (TF32, threads, deterministic algorithms) would reach
# the encoder's bits, the encoder's Python would take turns with the training loop's, and what hangs in a
# thread cannot be killed. The process gets source and encoder pickled over a private descriptor, encodes
# block after block, and says how it ended. It ends in order, with what it encoded sealed, when it is told
# to or its caller is gone.


log = logging.getLogger("stoker")

_LOOK_S = 0.05
_SEAL_S = 10.0
"""How long the end of the caller waits for the sealing, which goes on without it."""
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be filled from what; pickled for the process that does it."""

    source: Source
    encoder: Encoder | None
    cache_dir: Path
    name: str
    settings: PrecomputeSettings


class Background:
    """A `stoker.store.storage.Filling`: a process that runs `run_precompute`.

    Raises:
        SourceError: Source or encoder cannot be sent to another process.
        ConfigError: The settings would take away what is being read.
        ResourceError: No process can be started.
    """

    def __init__(self, job: Job, folder: Folder) -> None:
        if job.settings.overwrite:
            raise ConfigError(
                f"overwrite removes what {arg('wait', False)} is to serve meanwhile. Leave one of them out"
            )
        settings = replace(job.settings, by_blocks=True, on_hang="exit", progress=None)
        missing = set(folder.missing(retry_quarantined=settings.retry_quarantined).tolist())
        again = {number: failure for number, failure in folder.failures().items() if number in missing}
        self._path = folder.path
        self._growing = GrowingCache(folder.path, folder.recipe, again)
        limits = settings.timeouts
        self._quiet_s = sum(getattr(limits, entry.name) for entry in fields(limits))
        self._mark, self._moved = folder_mark(folder.path), time.monotonic()
        self._end: dict[str, Any] | None = None
        self._owner = os.getpid()
        self._error: StokerError | Interrupted | None = None
        self._oom_kills = oom_kills()
        payload = _pickled(replace(job, settings=settings))
        logs = folder.path.parent.parent / ".workers"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._output = Output(logs / f"fill-{os.getpid()}-{folder.recipe.fingerprint}.txt")
        self._outputs = (Drain(), self._output)
        try:
            self._process, self._channel = _spawn(payload, self._output)
        except OSError as error:
            self._output.close(keep=False)
            raise ResourceError(f"a process to fill {folder.path} cannot be started: {error}") from error
        self._outputs[0].add(self._output)
        self._stop = weakref.finalize(self, _end, self._process, self._channel, self._outputs, os.getpid())
        log.info("%s is filled by process %d meanwhile", folder.path, self._process.pid)

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
            self._end = next(iter(self._channel.receive()), None)
            if self._end is None and self._process.poll() is not None:
                self._end = next(iter(self._channel.receive()), None) or {"kind": "died"}
            if self._end is not None and self._end["kind"] != "done":
                self._error = self._explained(self._end)
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
            if now - self._moved > self._quiet_s:
                self._process.kill()
                raise StalledError(
                    f"nothing was added to {self._path} for {self._quiet_s:g} s, so process "
                    f"{self._process.pid}, which fills it, was killed. Run it again to resume"
                )
            time.sleep(min(_LOOK_S, timeout_s))

    def stop(self) -> None:
        """End it in order: what was encoded is sealed, the same call resumes. Safe to call twice."""
        self._stop()

    def _check_process(self) -> None:
        """Refuse a fork of ours: what it took from the channel would never reach who began the filling."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"{self._path} is being filled for process {self._owner}, and this one is a fork of that. "
                "Make the loader here, or when the cache is complete"
            )

    def _explained(self, end: dict[str, Any]) -> StokerError | Interrupted:
        if end["kind"] == "failed":
            kind = getattr(errors, end["error"], StokerError)
            return kind(f"filling {self._path} beside the training failed: {end['message']}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOOK_S)
        code = self._process.returncode
        text = f"process {self._process.pid}, which fills {self._path}, "
        if code == StalledError.exit_code:
            return StalledError(f"{text}ended because its encoder hung: {self._output.tail(_TAIL_BYTES)}")
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = self._output.tail(_TAIL_BYTES)
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return ResourceError(
                f"{text}{how}: memory is short. What is sealed stays; run it again to resume"
            )
        said = f". It said: {tail}" if tail else ""
        return StokerError(f"{text}{how}. What is sealed stays; run it again to resume{said}")


def _pickled(job: Job) -> bytes:
    """The job, with the encoder on the CPU: the other process brings its own to the device."""
    with nullcontext() if job.encoder is None else moved(job.encoder, torch.device("cpu")):
        return packed(job, "job", otherwise=f"Or leave {arg('wait', False)} out")


def _spawn(payload: bytes, output: Output) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start the process in a session of its own, so that Ctrl-C reaches it through us alone."""
    frame = {
        "kind": "job",
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        "confined": confined_sources(),
        "threads": torch.get_num_threads(),
    }
    ours, theirs = socket.socketpair()
    work = os.memfd_create("stoker-fill", os.MFD_CLOEXEC)
    try:
        with theirs, open(work, "wb", closefd=False) as file:
            file.write(pack(frame, payload))
            file.write(payload)
            file.flush()
            fds = (theirs.fileno(), work)
            words = ["-m", "stoker.precompute.fill_process", *map(str, fds), str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, "-P", *words],
                stdin=subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                pass_fds=fds,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(work)
    output.handed_over()
    return process, Channel(ours)


def _end(
    process: subprocess.Popen[bytes], channel: Channel, outputs: tuple[Drain, Output], owner: int
) -> None:
    """Tell the process to end, and give it time to seal."""
    if os.getpid() != owner:  # a fork of ours: it is not its to end
        return
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SEAL_S)
    channel.close()
    drain, output = outputs
    drain.remove(output)
    drain.close()
    output.close(keep=process.poll() not in (0, -signal.SIGTERM))


# ----------------------------------------------------------------------------------------------------------
# Encode a few records again beside training, and compare them with what is stored.
#
# A checksum says that bytes are as they were written; this says that they are what source and encoder give
# now. It runs in a thread of the lowest priority, on the CPU, with a copy of the encoder and a reader
# process of its own, so that it takes what training leaves.


_POLL_S = 0.25
_END_S = 5.0
_LOWEST = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
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
    """What was compared."""

    wanted: int
    """Records that were to be compared."""
    checked: int = 0
    """Records that were."""
    different: list[Difference] = field(default_factory=list[Difference])
    """Those that differ by more than rounding."""
    failed: list[str] = field(default_factory=list[str])
    """Why records could not be compared."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
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
        chosen = np.random.default_rng(seed).choice(cache.numbers, count, replace=False)
        self._numbers = np.sort(chosen).astype(np.int64)
        self._report = SpotReport(wanted=count)
        self._stop = threading.Event()
        self._after: SpotCheck | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-spot-check", daemon=True)

    def start(self, *, after: SpotCheck | None = None) -> None:
        """Begin, when another one has ended; returns at once."""
        self._after = after
        self._thread.start()

    def _wait_for(self, other: SpotCheck) -> None:
        while other._thread.is_alive() and not self._stop.is_set():
            other._thread.join(_POLL_S)

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
        except Exception as error:  # noqa: BLE001 - a thread's edge: training goes on, and the report says it
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
                f"source and encoder give {recipe.fingerprint} now: they changed since the cache was made. "
                "Run precompute for a new one"
            )
        folder = Folder(cache.path, cache.name, recipe)
        bench = Bench(self._source, self._encoder, folder, settings, missing=self._numbers, rehearsal=True)
        feed = bench.feed()
        try:
            self._compare_all(bench, feed, bench.encoder())
        finally:
            feed.close()
            with suppress(OSError):  # not empty: a reader was lost, and its log is to be read
                bench.logs.rmdir()

    def _compare_all(self, bench: Bench, feed: Feed, encoder: GroupEncoder) -> None:
        while not (feed.finished or self._stop.is_set()):
            for parcel in feed.poll(_POLL_S):
                wanted = bench.queue.wanted(parcel.work)
                encoded = encoder.encode(parcel, wanted, bench.ledger.fault)
                if encoded is not None:
                    self._compare(encoded)
                feed.release(parcel)
        for failure in bench.ledger.failures:
            self._fail(f"sample {failure.number} ({failure.stage}: {failure.error})")

    def _compare(self, encoded: Encoded) -> None:
        for place, number in enumerate(encoded.numbers):
            stored = self._cache[number]
            fresh = {name: values[place] for name, values in encoded.records.items()}
            for name, values in unfolded(fresh, self._cache.schema).items():
                floats = self._cache.schema[name].floating
                limit = float(self._cache.index.error[name]["max"]) + TOLERANCE if floats else 0.0
                error = distance(stored[name], values)
                if not error <= limit:
                    self._report.different.append(
                        Difference(
                            cache=self._cache.name, number=number, field=name, error=error, limit=limit
                        )
                    )
                    log.warning(
                        "spot check of %s: field %r of sample %d differs from what its source and encoder "
                        "give now by %.2g of its largest value; %.2g is rounding. Look at what changed "
                        "(stoker why), and make the cache again with precompute.overwrite=true",
                        self._cache.name,
                        name,
                        number,
                        error,
                        limit,
                    )
            self._report.checked += 1


def recipe_of(
    source: Source, encoder: Encoder | None, cache_dir: Path, settings: PrecomputeSettings
) -> Recipe:
    """Return the recipe of what `settings` ask for; the encoder may be run for it, within its deadline."""
    watchdog = EncodeWatchdog.of_settings(settings, cache_dir / LOG_FOLDER)
    digests = Digests(cache_dir, settings.identity)
    return make_recipe(
        source,
        encoder,
        dtype=settings.dtype,
        encode_batch=settings.encode_batch,
        digests=digests,
        ask=watchdog.ask,
    )


class EncodeFiller:
    """A `stoker.store.storage.Filler`: encodes in this process, exactly the groups asked for.

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
        """Where raw samples come from."""
        return self._source

    @property
    def encoder(self) -> Encoder | None:
        """Makes records of them."""
        return self._encoder

    def fill(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Encode and store these samples unless they are stored, and write the index.

        Raises:
            SourceError: The source or the encoder is not what the cache was made from any more.
            StalledError: `deadline_s` had passed after a group; what was encoded by then is stored.
            MissingRecordError: A sample is quarantined; the message says why.
        """
        until = time.monotonic() + deadline_s
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
                f"sample {number} is quarantined ({failure.stage}: {failure.error}){more}. Fix that and run "
                f"precompute with {arg('retry_quarantined', True)}"
            )
        if not finished:
            raise StalledError(
                f"{format_count(len(missing), 'sample')} asked for, not encoded within {deadline_s:g} s. "
                f"Run precompute first, or give more time"
            )

    def begin(self) -> Background:
        """A process that encodes all that is missing, begun.

        Raises:
            SourceError: As `fill`; or source and encoder cannot be sent to a process.
        """
        job = Job(
            source=self._source,
            encoder=self._encoder,
            cache_dir=self._cache_dir,
            name=self._name,
            settings=self._all,
        )
        return Background(job, self._folder())

    def spot_check(self, cache: Cache, count: int, *, seed: int = 0) -> SpotCheck:
        """A comparison of `count` records of `cache` with what source and encoder give now, not begun."""
        return SpotCheck(self._source, self._encoder, cache, self._settings, count=count, seed=seed)

    def _encode(
        self, folder: Folder, missing: np.ndarray[tuple[int], np.dtype[np.int64]], until: float
    ) -> bool:
        bench = Bench(self._source, self._encoder, folder, self._settings, missing=missing)
        feed = bench.feed()
        standing = Standing(
            name=self._name,
            total=folder.recipe.count,
            missing=len(missing),
            quarantined=0,
            device=self._settings.device,
        )
        try:
            encoding, writer = bench.encoding(feed, compare_first=False), bench.writer()
            stages = bench.stages(feed, encoding, writer)
            try:
                finished = Run(stages, standing, interrupts=Interrupts(), sink=None, pace=None).go(until)
            finally:
                encoding.clock.alive(bounded=False)
                bench.seal(writer)
            writer.check()
        finally:
            feed.close()
            with suppress(OSError):  # not empty: a reader was lost, and its log is to be read
                bench.logs.rmdir()
        bench.leave_device()
        return finished

    def _folder(self) -> Folder:
        """The cache's folder, after a look at the source: it may have changed since the cache was made."""
        recipe = recipe_of(self._source, self._encoder, self._cache_dir, self._settings)
        if self._fingerprint not in (None, recipe.fingerprint):
            raise SourceError(
                f"{self._cache_dir / self._name / str(self._fingerprint)} was made from other data or by "
                f"another encoder: they give {recipe.fingerprint} now. Put the source back as it was, or "
                "run precompute for a new cache"
            )
        return open_folder(self._cache_dir, self._name, recipe)
