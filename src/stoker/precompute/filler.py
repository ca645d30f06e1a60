"""Encode single samples on demand, for a loader that meets records which are missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stoker.encoders.protocol import Encoder
from stoker.errors import MissingRecordError, StalledError
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.run import Run, Standing
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.stages import Bench
from stoker.sources.protocol import Source
from stoker.store import Digests, Folder, make_recipe, open_folder


class EncodeFiller:
    """A `stoker.store.protocols.Filler`: reads and encodes in this process, exactly the groups asked for.

    Works in the same fixed groups as `precompute`, so a record filled in has the bits it would have had.
    Nothing is opened before the first call.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder | None,
        cache_dir: Path,
        *,
        name: str,
        settings: PrecomputeSettings,
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._cache_dir = cache_dir
        self._name = name
        self._settings = replace(settings, readers=0, progress=None)
        self._opened: Folder | None = None

    def fill(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Encode and store these samples unless they are stored, and write the index.

        Raises:
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
            raise MissingRecordError(
                f"sample {number} is quarantined ({failure.stage}: {failure.error}), and {len(failed) - 1} "
                f"more of those asked for. Mend it and run precompute with retry_quarantined"
            )
        if not finished:
            raise StalledError(
                f"{len(missing)} samples were not encoded within {deadline_s:g} s. "
                f"Run precompute first, or give more time"
            )

    def _encode(
        self, folder: Folder, missing: np.ndarray[tuple[int], np.dtype[np.int64]], until: float
    ) -> bool:
        bench = Bench(self._source, self._encoder, folder, self._settings, missing=missing, cpus=1)
        feed, encoder = bench.feed(), bench.encoder()
        writer = bench.writer()
        standing = Standing(
            name=self._name,
            total=folder.recipe.count,
            missing=len(missing),
            quarantined=0,
            device=self._settings.device,
        )
        run = Run(
            bench.stages(feed, encoder, writer), standing, interrupts=Interrupts(), sink=None, pace=None
        )
        try:
            with bench.watchdog(encoder):
                finished = run.go(until)
        finally:
            bench.seal(writer)
        writer.check()
        return finished

    def _folder(self) -> Folder:
        if self._opened is None:
            digests = Digests(self._cache_dir, self._settings.identity)
            recipe = make_recipe(self._source, self._encoder, dtype=self._settings.dtype, digests=digests)
            self._opened = open_folder(self._cache_dir, self._name, recipe)
        return self._opened
