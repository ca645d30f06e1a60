"""Recognize samples that a sibling cache has a record of, so that they are read but not encoded again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stoker.precompute.encode import Copied, Encoded
from stoker.precompute.encoding import Encoding
from stoker.precompute.parcel import Parcel
from stoker.precompute.queue import WorkQueue
from stoker.schema import Schema
from stoker.store.recipe import Recipe
from stoker.store.same_samples import SameSamples, digest_samples


class Recognizing:
    """An `Encoding` around another one: it digests samples on their way, and keeps back those it recognizes.

    Args:
        inner: What encodes the others.
        same: Records of sibling caches; None: none are looked up.
        queue, recipe, schema: Of the run.
    """

    def __init__(
        self,
        inner: Encoding,
        same: SameSamples | None,
        *,
        queue: WorkQueue,
        recipe: Recipe,
        schema: Schema,
    ) -> None:
        self._inner, self._same = inner, same
        self._queue, self._recipe, self._schema = queue, recipe, schema
        self._digests: dict[int, NDArray[np.uint64]] = {}
        self._looked_at: Parcel | None = None
        self._copied: list[Encoded] = []
        self.clock = inner.clock

    @property
    def hungry(self) -> bool:
        """See `Encoding`."""
        return self._inner.hungry

    def take(self, parcel: Parcel) -> bool:
        """See `Encoding`."""
        if parcel is not self._looked_at:  # one that found no room comes again
            self._look(parcel)
            self._looked_at = parcel
        taken = self._inner.take(parcel)
        if taken:
            self._looked_at = None
        return taken

    def _look(self, parcel: Parcel) -> None:
        """Digest the samples of a parcel, and settle those that are recognized.

        A sample that comes in several stretches is encoded before its end is known; it gets no digest.
        """
        if parcel.over or parcel.start or not parcel.last:
            return
        numbers = self._queue.wanted(parcel.work)
        first = parcel.work.numbers.start
        digests = digest_samples(parcel.arrays, self._schema, [number - first for number in numbers])
        if self._same is not None and len(self._same):
            offset = self._recipe.parts[parcel.work.part].offset
            for match in self._same.find(digests, [number - offset for number in numbers]):
                own = [numbers[member] for member in match.members]
                copied = Copied(
                    origin=match.cache,
                    places=match.places,
                    moved=[numbers[member] for member in match.moved],
                    lost=self._same.refuse,
                )
                self._copied.append(Encoded(numbers=own, contents=digests[match.members], copied=copied))
                self._queue.settled.update(own)
        self._digests.update(zip(numbers, digests, strict=True))

    def results(self) -> list[Encoded]:
        """See `Encoding`; with the digests of the samples."""
        found, self._copied = self._copied, []
        for encoded in self._inner.results():
            unknown = np.zeros(2, np.uint64)
            digests = [self._digests.pop(number, unknown) for number in encoded.numbers]
            found.append(replace(encoded, contents=np.array(digests, np.uint64).reshape(-1, 2)))
        return found

    def wait(self, timeout_s: float) -> None:
        """See `Encoding`."""
        self._inner.wait(timeout_s)

    def processor_s(self) -> float:
        """See `Encoding`."""
        return self._inner.processor_s()

    def close(self) -> None:
        """See `Encoding`."""
        self._inner.close()
