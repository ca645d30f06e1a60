"""What ranks say of the caches that they filled: the work of all, and that all see the same records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from stoker.errors import IncompleteError
from stoker.scale.ranks import Ranks
from stoker.store import Cache, open_cache
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.pipeline.precompute import CacheResult


def agreed(caches: Sequence[CacheResult], ranks: Ranks, nodes: Sequence[int]) -> list[CacheResult]:
    """The caches, with what was done by all that share the cache folder in place of what this rank did.

    Args:
        caches: As this rank left them.
        ranks: All are to make this call.
        nodes: The machines that share the folder with this one.

    Raises:
        IncompleteError: Ranks see different records, so they would serve different batches.
        StalledError: A rank did not come.
    """
    own = [[cache.encoded, cache.adopted, cache.encode_seconds] for cache in caches]
    told = [json.loads(text) for text in ranks.tell(json.dumps([ranks.node, own]), "the end of precompute")]
    beside = [figures for node, figures in told if node in nodes]
    results: list[CacheResult] = []
    for result, *by_rank in zip(caches, *beside, strict=True):
        encoded, adopted, seconds = (sum(column) for column in zip(*by_rank, strict=True))
        # Whoever is done with the folder last may have stored what was tried again.
        cache = result.cache if ranks.world == 1 else _opened_again(result.cache)
        reused = max(0, len(cache) - encoded - adopted)
        results.append(
            replace(
                result, cache=cache, encoded=encoded, adopted=adopted, reused=reused, encode_seconds=seconds
            )
        )
    _check_equal([result.cache for result in results], ranks)
    return results


def _opened_again(cache: Cache) -> Cache:
    again = open_cache(cache.path)
    again.filler, again.filling = cache.filler, cache.filling
    return again


def _check_equal(caches: Sequence[Cache], ranks: Ranks) -> None:
    seen = [[c.name, c.fingerprint, len(c), xxhash.xxh3_64_hexdigest(c.numbers.tobytes())] for c in caches]
    told = [json.loads(text) for text in ranks.tell(json.dumps(seen), "a look at the caches of all ranks")]
    for rank, theirs in enumerate(told):
        for first, other in zip(told[0], theirs, strict=True):
            (name, key, count, _), (_, other_key, others, _) = first, other
            if first != other:
                raise IncompleteError(
                    f"{name}: rank 0 sees {format_count(count)} records of recipe {key}, rank {rank} "
                    f"{format_count(others)} of {other_key}. They would serve different batches. Expected "
                    "the same data and settings on every machine, and no sample set aside on one alone: "
                    "run `stoker precompute --retry-quarantined` there, or share the cache folder"
                )
