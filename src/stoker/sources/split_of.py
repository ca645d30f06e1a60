"""One split of any source: by the names of its parts, or by fractions over its keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, SplitError
from stoker.schema import Json, Sample, Schema, digest_json
from stoker.sources.given import check_splits
from stoker.sources.placed import PlacedPart, Placing
from stoker.sources.protocol import Part, Proving, Source, SourceIdentity, locate
from stoker.sources.splits import SplitChoice, choose_split, split_numbers


class SplitOf:
    """The samples of `source` that belong to `split`, in their order, numbered anew.

    Parts named after splits (`data_train.zarr`) decide; else the keys are cut into fractions by a seeded
    hash, so that neither the order of samples nor other samples matter.

    Args:
        source: All samples.
        split: `"train"`, `"val"`, `"test"` or another name of `splits`.
        splits: Fractions; absent: 0.8/0.1/0.1.
        seed: Of the cut.

    Raises:
        SplitError: On first use: there is no such split, or nothing is left in it.
    """

    def __init__(
        self, source: Source, split: str, *, splits: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        check_splits(split, splits, seed)
        self._source, self._split = source, split
        self._splits = None if splits is None else dict(splits)
        self._seed = seed
        self._found: tuple[SplitChoice, NDArray[np.int64]] | None = None

    def __repr__(self) -> str:
        """The source and the split."""
        return f"SplitOf({self._source!r}, {self._split!r})"

    def __len__(self) -> int:
        """Samples of the split, at least one."""
        return len(self._chosen()[1])

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """The source's sample behind `number`.

        Raises:
            IndexError: No such number.
        """
        numbers = self._chosen()[1]
        if not 0 <= number < len(numbers):
            raise IndexError(f"sample {number} does not exist: this split has {len(numbers)}")
        return self._source.read(int(numbers[number]), start, stop)

    def locate(self, number: int) -> str:
        """As the source says."""
        return locate(self._source, int(self._chosen()[1][number]))

    def prove(self) -> None:
        """As the source does, if it does."""
        if isinstance(self._source, Proving):
            self._source.prove()

    def for_split(self, split: str | None) -> Source:
        """Another split of the same source; None: all of it."""
        if split is None:
            return self._source
        return SplitOf(self._source, split, splits=self._splits, seed=self._seed)

    def runs(self) -> Sequence[range]:
        """The source's runs, as far as they are in the split."""
        numbers = self._chosen()[1]
        stops = np.array([run.stop for run in self._source.runs()], dtype=np.int64)
        own = np.searchsorted(stops, numbers, side="right")
        edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(numbers)]
        return [range(low, high) for low, high in itertools.pairwise(edges)]

    def keys(self) -> Sequence[str]:
        """The source's keys of these samples."""
        keys = self._source.keys()
        return [keys[int(number)] for number in self._chosen()[1]]

    def schema(self) -> Schema:
        """The source's schema."""
        return self._source.schema()

    def identity(self) -> SourceIdentity:
        """The source's identity with the parts of the split; one that is cut says which samples are in it."""
        choice, numbers = self._chosen()
        whole = self._source.identity()
        parts: list[Part] = []
        first = 0
        for part in whole.parts:
            low, high = np.searchsorted(numbers, [first, first + part.count]).tolist()
            if high - low == part.count:
                parts.append(part)
            elif high > low:
                rows: list[Json] = [*(numbers[low:high] - first).tolist()]
                cut = digest_json([part.selection, rows])
                parts.append(dataclasses.replace(part, count=high - low, selection=cut))
            first += part.count
        settings: dict[str, Json] = {**whole.settings, "split": choice.to_json()}
        return dataclasses.replace(whole, parts=tuple(parts), settings=settings)

    def places(self) -> Sequence[PlacedPart]:
        """Where these samples lie, if the source knows.

        Raises:
            SourceError: It does not, or they cannot be served from there.
        """
        if not isinstance(self._source, Placing):
            raise SourceError(
                f"{self._source!r} does not know where its samples are stored. Use stoker.precompute"
            )
        numbers = self._chosen()[1]
        found: list[PlacedPart] = []
        first = 0
        for part in self._source.places():
            low, high = np.searchsorted(numbers, [first, first + part.count]).tolist()
            if high > low:
                found.append(part.take(numbers[low:high] - first))
            first += part.count
        return found

    def _chosen(self) -> tuple[SplitChoice, NDArray[np.int64]]:
        if self._found is None:
            self._found = self._choose()
        return self._found

    def _choose(self) -> tuple[SplitChoice, NDArray[np.int64]]:
        identity = self._source.identity()
        parts = identity.parts
        # A torch Dataset is named after its class; that its module is `train.py` says nothing about splits.
        of_class = identity.kind.startswith("torch/")
        firsts = np.cumsum([0, *(part.count for part in parts)])
        choice = choose_split(
            ["" if of_class else part.name for part in parts],
            split=self._split,
            splits=self._splits,
            seed=self._seed,
            where=repr(self._source),
        )
        spans = [np.arange(firsts[i], firsts[i + 1]) for i in choice.files]
        numbers = np.concatenate([np.empty(0, np.int64), *spans]).astype(np.int64)
        if choice.fractions is not None:
            keys = self._source.keys()
            own, where = [keys[int(number)] for number in numbers], repr(self._source)
            numbers = numbers[split_numbers(own, choice.fractions, self._split, self._seed, where=where)]
        if not len(numbers):
            raise SplitError(f"{self._source!r}: no sample is left in split {self._split!r}")
        return choice, numbers
