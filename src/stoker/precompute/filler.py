"""Encode single samples on demand, for a loader that meets records which are missing or damaged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from stoker.encoders.protocol import Encoder
from stoker.errors import MissingRecordError, SourceError, StalledError, arg
from stoker.precompute.background import Background, Job
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.run import Run, Standing
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.spot_check import SpotCheck
from stoker.precompute.stages import LOG_FOLDER, Bench
from stoker.precompute.watchdog import EncodeWatchdog
from stoker.sources.protocol import Source
from stoker.store import Cache, Digests, Folder, Recipe, make_recipe, open_folder
from stoker.units import format_count


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
    """A `stoker.store.protocols.Filler`: encodes in this process, exactly the groups asked for.

    Works in the same fixed groups as `precompute`, so a record filled in has the bits it would have had. One
    reader process reads, under the deadlines of the settings; with `readers=0` this process does, without.
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
        self._settings = replace(settings, readers=settings.readers and 1, devices=(), progress=None)
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
