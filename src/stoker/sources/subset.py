"""The first samples of a source, for trials (`--limit`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.errors import ConfigError
from stoker.schema import Sample, Schema
from stoker.sources.protocol import Part, Proving, Source, SourceIdentity, locate


class Subset:
    """The first `count` samples of `source`, with the same numbers.

    Parts that are taken whole keep their identity, so their records are adopted when the limit is lifted.

    Raises:
        ConfigError: `count` is below 1. More than the source has means all of it.
    """

    def __init__(self, source: Source, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a limit of {count} samples leaves nothing to do. Give at least 1")
        self._source = source
        self._limit = count

    def __repr__(self) -> str:
        """The source and the limit."""
        return f"Subset({self._source!r}, {self._limit})"

    def __len__(self) -> int:
        """The smaller of the limit and the source."""
        return min(self._limit, len(self._source))

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """The source's sample `number`.

        Raises:
            IndexError: At or past the limit.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} does not exist: this subset has {len(self)}")
        return self._source.read(number, start, stop)

    def locate(self, number: int) -> str:
        """As the source says."""
        return locate(self._source, number)

    def prove(self) -> None:
        """As the source does, if it does."""
        if isinstance(self._source, Proving):
            self._source.prove()

    def runs(self) -> Sequence[range]:
        """The source's runs, the last one cut short."""
        count = len(self)
        return [range(run.start, min(run.stop, count)) for run in self._source.runs() if run.start < count]

    def keys(self) -> Sequence[str]:
        """The source's keys."""
        return self._source.keys()[: len(self)]

    def schema(self) -> Schema:
        """The source's schema."""
        return self._source.schema()

    def identity(self) -> SourceIdentity:
        """The source's identity with the parts up to the limit; a part cut short says so in its selection."""
        whole = self._source.identity()
        left = len(self)
        parts: list[Part] = []
        for part in whole.parts:
            taken = min(part.count, left)
            if taken == part.count:
                parts.append(part)
            elif taken:
                cut = f"first {taken} of {part.selection}"
                parts.append(dataclasses.replace(part, count=taken, selection=cut))
            left -= taken
        return dataclasses.replace(whole, parts=tuple(parts))
