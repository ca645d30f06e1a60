"""Encode a few records again beside training, and compare them with what is stored.

A checksum says that bytes are as they were written; this says that they are what source and encoder give now.
It runs in a thread of the lowest priority, on the CPU, with a copy of the encoder and a reader process of its
own, so that it takes what training leaves.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from stoker.encoders.protocol import Encoder
from stoker.errors import SourceError, StokerError
from stoker.precompute.draws import TOLERANCE, distance
from stoker.precompute.encode import Encoded, GroupEncoder
from stoker.precompute.parcel import Feed
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.stages import Bench
from stoker.schema import Json, unfolded
from stoker.sources.protocol import Source
from stoker.store import Cache, Digests, Folder, make_recipe

log = logging.getLogger("stoker")

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
        self._settings = replace(settings, device="cpu", readers=1, progress=None)
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
