"""What pushing and pulling share: what is asked for, how far it is, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError
from stoker.schema import Json
from stoker.store.cache import Cache
from stoker.store.mirror.root import shown

AT_ONCE = 4
"""Shards on their way at a time; each in several parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which records a pull is for; by default all. Whole shards that hold any of them are brought.

    Raises:
        ConfigError: It contradicts itself.
    """

    rank: int | None = None
    """Only what this rank of `world` reads in the order `static(world)`, from 0."""
    world: int | None = None
    records: tuple[int, int] | None = None
    """Only samples from the first number up to the second, without it."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if (self.rank is None) != (self.world is None) or (self.rank is not None and self.records):
            raise ConfigError("give rank and world together, or records, or none of them")
        if self.rank is not None and self.world is not None and not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is {self.rank}, expected 0 to {self.world - 1}")
        if self.records and not 0 <= self.records[0] < self.records[1]:
            raise ConfigError(
                f"records are {self.records[0]}:{self.records[1]}, expected FIRST:STOP, FIRST < STOP"
            )

    @property
    def all(self) -> bool:
        """Whether nothing is left out."""
        return self.rank is None and self.records is None

    def shards(self, cache: Cache) -> set[str]:
        """The shards that hold any of the records, by file name.

        Raises:
            IncompleteError: Of the `records` there is none.
        """
        segments = cache.segments
        if self.records is not None:
            first, stop = self.records
            hit = (segments.first < stop) & (segments.first + segments.count > first)
            if not hit.any():
                raise IncompleteError(
                    f"{shown(cache.path)} has no record of the samples {first:,} to {stop - 1:,}: it has "
                    f"{cache.index.count:,} samples, from 0. Ask for others"
                )
        else:
            hit = _overlap(segments.count, *self._positions(len(cache)))
        return {cache.index.shards[i].file for i in np.unique(segments.shard[hit]).tolist()}

    def _positions(self, count: int) -> tuple[int, int]:
        """Places among the stored records. A record whose windows two ranks share belongs to both."""
        if self.rank is None or self.world is None:
            return 0, count
        return count * self.rank // self.world, -(-count * (self.rank + 1) // self.world)


def _overlap(counts: NDArray[np.int64], begin: int, end: int) -> NDArray[np.bool_]:
    ends = np.cumsum(counts)
    return (ends - counts < end) & (ends > begin)


@dataclass(slots=True, kw_only=True)
class TransferReport:
    """What a push or a pull did."""

    url: str
    path: str
    shards: int = 0
    """Shards that were brought."""
    bytes: int = 0
    """Their bytes."""
    present: int = 0
    """Shards that were there before."""
    records: int = 0
    """Records stored at the end where they were brought to."""
    complete: bool = False
    """Whether that is a complete cache."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class Progress:
    """How far it is; what `listen` is called with."""

    count: int = 0
    """Shards to bring."""
    total: int = 0
    """Their bytes."""
    done: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int, listen: Listen | None) -> None:
        """Count a shard; safe from several threads."""
        with self._lock:
            self.done += 1
            self.bytes += size
            if listen is not None:
                listen(self)


Listen: TypeAlias = Callable[[Progress], None]
