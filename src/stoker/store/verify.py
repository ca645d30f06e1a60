"""Read a cache and say which records are damaged, without stopping at the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stoker.errors import ConfigError, CorruptError, FormatError, MissingRecordError
from stoker.runtime.threads import MAP_TIMEOUT_S, map_in_order
from stoker.schema import JsonResult
from stoker.store.format import INDEX_FILE, KEYS_FILE, RECIPE_FILE
from stoker.store.index import LostShard, ShardInfo, load_index, load_recipe
from stoker.store.keys import read_keys
from stoker.store.shard import Shard
from stoker.store.storage import Storage, open_storage
from stoker.units import MIB, format_count

if TYPE_CHECKING:
    from stoker.store.cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord(JsonResult):
    """One damaged record, or a damaged file that holds none."""

    index: int
    """Sample index; -1 when no record is affected."""
    shard: str
    """File name."""
    why: str
    """What is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(JsonResult):
    """Records read by a verification, and what was wrong."""

    json_keys = ("records", "ok", "bad", "unchecked")

    records: int
    """Records read."""
    bad: list[BadRecord]
    """Everything damaged; empty when all is well."""
    unchecked: list[str] = field(default_factory=list[str])
    """What was not looked at, in words; empty when all records, recipe, index and keys were read in full."""

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not self.bad


THREADS = 4
"""Shards that are read at a time: hashing lets go of the interpreter's lock, and so do reads."""
SLOWEST_BYTES_PER_S = MIB
"""Storage that gives less than this to one reader is treated as hung."""


def read_timeout_s(shards: Sequence[ShardInfo]) -> float:
    """Return the seconds that reading the largest of these shards in full may take."""
    return MAP_TIMEOUT_S + max((shard.bytes for shard in shards), default=0) / SLOWEST_BYTES_PER_S


def verify(cache: Cache, subset: float, seed: int) -> VerifyReport:
    """Return which records are damaged, after reading all of them or a seeded sample; as `Cache.verify`."""
    if not 0 < subset <= 1:
        raise ConfigError(f"subset is {subset}, expected more than 0 and at most 1")
    bad = [bad for lost in cache.lost for bad in _bad_of_lost(cache, lost)]
    if subset < 1:
        count = math.ceil(subset * len(cache))
        numbers = np.sort(np.random.default_rng(seed).choice(cache.indices, count, replace=False))
        bad += _bad_of_sample(cache, numbers.tolist())
        unchecked = [
            f"{format_count(len(cache) - count)} of {format_count(len(cache), 'record')}",
            "digests of whole columns, padding",
            "recipe and index after they were opened, keys",
        ]
    else:
        count, unchecked = len(cache), []
        shards = range(len(cache.index.shards))
        what, timeout_s = f"verifying the shards of {cache.path}", read_timeout_s(cache.index.shards)
        for found in map_in_order(
            lambda i: [*_bad_of_shard(cache, i)], shards, what=what, threads=THREADS, timeout_s=timeout_s
        ):
            bad += found
        bad += _bad_files(cache)
    records = count + sum(lost.entry.records for lost in cache.lost)
    return VerifyReport(records=records, bad=bad, unchecked=unchecked)


def _bad_of_lost(cache: Cache, lost: LostShard) -> Iterator[BadRecord]:
    for number in _served(cache, lost.entry).values():
        yield BadRecord(index=number, shard=lost.entry.file, why=str(lost.error()))


def _served(cache: Cache, entry: ShardInfo) -> dict[int, int]:
    """Return the sample indices that a shard serves, by row."""
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
        # Through the cache, which compares with the index; not as an earlier read left it.
        shard = cache.shard(i, fresh=True)
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
    from stoker.store.cache import JointCache  # which imports this module

    if isinstance(cache, JointCache):
        for member in cache.members:
            yield from _bad_files(member)
        return
    try:
        load_recipe(cache.path)
    except (FormatError, OSError) as error:
        yield BadRecord(index=-1, shard=RECIPE_FILE, why=str(error))
    try:
        load_index(cache.path, cache.recipe)
    except (FormatError, OSError) as error:
        yield BadRecord(index=-1, shard=INDEX_FILE, why=str(error))
    yield from bad_keys(open_storage(cache.path), cache.index.count)


def bad_keys(storage: Storage, count: int) -> Iterator[BadRecord]:
    """Yield what is wrong with the keys of the samples, if anything is.

    Args:
        storage: The cache's folder.
        count: Samples of the cache.
    """
    try:
        read_keys(storage, count)
    except MissingRecordError:
        pass  # it was made before keys were kept
    except (FormatError, OSError) as error:
        yield BadRecord(index=-1, shard=KEYS_FILE, why=str(error))
