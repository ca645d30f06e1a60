"""Read a cache and say which records are damaged, without stopping at the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.errors import ConfigError, CorruptError, FormatError
from stoker.runtime.threads import MAP_TIMEOUT_S, map_in_order
from stoker.schema import Json
from stoker.store.cache import Cache
from stoker.store.index import INDEX_FILE, ShardEntry, load_index
from stoker.store.lost import LostShard
from stoker.store.recipe import RECIPE_FILE, load_recipe
from stoker.store.shard_read import Shard
from stoker.units import MIB, format_count

THREADS = 4
"""Shards that are read at a time: hashing lets go of the interpreter's lock, and so do reads."""
SLOWEST_BYTES_PER_S = MIB
"""Storage that gives less than this to one reader hangs, as far as anybody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """One damaged record, or a damaged file that holds none."""

    index: int
    """Sample number; -1 when no record is affected."""
    shard: str
    """File name."""
    why: str

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {"index": self.index, "shard": self.shard, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was read and what was wrong."""

    records: int
    """Records read."""
    bad: list[BadRecord]
    """Everything damaged; empty when all is well."""
    unchecked: list[str] = field(default_factory=list[str])
    """What was not looked at, in words; empty when every byte was read."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.bad

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        bad: list[Json] = [record.to_json() for record in self.bad]
        return {"records": self.records, "ok": self.ok, "bad": bad, "unchecked": [*self.unchecked]}


def read_deadline_s(shards: Sequence[ShardEntry]) -> float:
    """Seconds that reading the largest of these shards in full may take."""
    return MAP_TIMEOUT_S + max((shard.bytes for shard in shards), default=0) / SLOWEST_BYTES_PER_S


def verify_cache(cache: Cache, subset: float = 1.0, *, seed: int = 0) -> VerifyReport:
    """Check every byte of a cache, or every byte of a sample of its records.

    Args:
        cache: What to read.
        subset: Fraction of the records.
        seed: Which ones, below 1: the same seed picks the same ones.
    Raises:
        ConfigError: `subset` is not in (0, 1].
    """
    if not 0 < subset <= 1:
        raise ConfigError(f"subset is {subset}, expected more than 0 and at most 1")
    bad = [bad for lost in cache.lost for bad in _bad_of_lost(cache, lost)]
    if subset < 1:
        count = math.ceil(subset * len(cache))
        numbers = np.sort(np.random.default_rng(seed).choice(cache.numbers, count, replace=False))
        bad += _bad_of_sample(cache, numbers.tolist())
        unchecked = [
            f"{format_count(len(cache) - count)} of {format_count(len(cache), 'record')}",
            "digests of whole columns, padding",
            "recipe and index after they were opened",
        ]
    else:
        count, unchecked = len(cache), []
        shards = range(len(cache.index.shards))
        what, timeout_s = f"verifying the shards of {cache.path}", read_deadline_s(cache.index.shards)
        for found in map_in_order(
            lambda i: [*_bad_of_shard(cache, i)], shards, what=what, threads=THREADS, timeout_s=timeout_s
        ):
            bad += found
        bad += _bad_files(cache)
    records = count + sum(lost.records for lost in cache.lost)
    return VerifyReport(records=records, bad=bad, unchecked=unchecked)


def _bad_of_lost(cache: Cache, lost: LostShard) -> Iterator[BadRecord]:
    for number in _served(cache, lost.entry).values():
        yield BadRecord(index=number, shard=lost.entry.file, why=str(lost.error()))


def _served(cache: Cache, entry: ShardEntry) -> dict[int, int]:
    """Global numbers that a shard serves, by row."""
    offset = cache.recipe.parts[entry.part].offset
    return {row + k: first + k + offset for row, first, n in entry.segments.tolist() for k in range(n)}


def _bad_of_sample(cache: Cache, numbers: list[int]) -> Iterator[BadRecord]:
    for number in numbers:
        try:
            cache[number]
        except (FormatError, OSError) as error:
            place = int(np.searchsorted(cache.segments.first, number, side="right")) - 1
            shard = cache.index.shards[int(cache.segments.shard[place])].file
            yield BadRecord(index=number, shard=shard, why=str(error))


def _bad_of_shard(cache: Cache, i: int) -> Iterator[BadRecord]:
    entry = cache.index.shards[i]
    served = _served(cache, entry)
    if not served:
        return
    try:
        # Through the cache, which compares with the index; afresh, not as an earlier read left it.
        shard = cache.fresh_shard(i)
    except (FormatError, OSError) as error:
        yield from (BadRecord(index=n, shard=entry.file, why=str(error)) for n in served.values())
        return
    for name in shard.columns:
        yield from _bad_of_column(shard, name, served)
    try:
        shard.check_padding()
    except (CorruptError, OSError) as error:
        yield BadRecord(index=-1, shard=entry.file, why=str(error))


def _bad_of_column(shard: Shard, field: str, served: dict[int, int]) -> Iterator[BadRecord]:
    for row, why in shard.damage(field).items():
        if row in served:
            yield BadRecord(index=served[row], shard=shard.name, why=why)


def _bad_files(cache: Cache) -> Iterator[BadRecord]:
    try:
        load_recipe(cache.path)
    except (FormatError, OSError) as error:
        yield BadRecord(index=-1, shard=RECIPE_FILE, why=str(error))
    try:
        load_index(cache.path, cache.recipe)
    except (FormatError, OSError) as error:
        yield BadRecord(index=-1, shard=INDEX_FILE, why=str(error))
