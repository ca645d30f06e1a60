"""A cache some of whose records are taken from another one: corrected samples, without a copy of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingRecordError
from stoker.store.cache import Cache, JointCache, same_fields
from stoker.store.index import Index, ShardInfo
from stoker.store.keys import SampleKeys
from stoker.store.recipe import Recipe
from stoker.store.storage import UsageLock
from stoker.units import format_count


class UpdatedCache(JointCache):
    """Records of `base`, those of `fixes` in place of the ones with the same keys.

    Shards stay where they are, each opened by the cache that it belongs to.

    Raises:
        ConfigError: The records have other fields or another encoder, or a key is not unique.
        MissingRecordError: `base` has no sample with a key of `fixes`.
    """

    def __init__(self, members: Sequence[Cache]) -> None:
        """Take the records of two caches: `base` and `fixes`."""
        base, fixes = self.members = tuple(members)
        self._first_shard = np.array([0, len(base.index.shards)])
        recipe = _recipe(base, fixes)
        Cache.__init__(self, base.path, recipe, _index(base, fixes, recipe), use=UsageLock(base.path))
        self.joined = base.joined

    @cached_property
    def _keys(self) -> SampleKeys:
        return self.members[0].keys()


def _recipe(base: Cache, fixes: Cache) -> Recipe:
    if isinstance(base, JointCache) and not isinstance(base, UpdatedCache):
        raise ConfigError(f"{base!r} is several caches", hint="Update each of them")
    if not same_fields([base, fixes]):
        shapes = [{name: (f.shape, f.dtype) for name, f in one.schema.items()} for one in (base, fixes)]
        raise ConfigError(
            f"{base.path} has records of {shapes[0]}, {fixes.path} of {shapes[1]}",
            hint="Make the second with the same fields and dtypes; TorchSource(ragged=[...]) names fields of "
            "varying length",
        )
    if base.recipe.entries["encoder"] != fixes.recipe.entries["encoder"]:
        raise ConfigError(
            f"{fixes.path} was made by another encoder than {base.path}",
            hint="Make it with the same encoder and weights; `stoker cache why A B` lists what differs",
        )
    part = {**base.recipe.entries["source"]["parts"][0], "name": "all", "count": base.recipe.count}
    source = {"kind": "updated/1", "parts": [part], "caches": [base.fingerprint, fixes.fingerprint]}
    return Recipe(entries={**base.recipe.entries, "source": source})


def _index(base: Cache, fixes: Cache, recipe: Recipe) -> Index:
    replaced = _replaced(base, fixes)
    old, new = _places(base), _places(fixes)
    old = old[~np.isin(old[:, 2], replaced)]
    new[:, 2] = replaced[np.searchsorted(fixes.indices, new[:, 2])]
    shards = [*_serving(base, old), *_serving(fixes, new)]
    stored = len(old) + len(new)
    quarantined = {i: failure for i, failure in base.quarantined.items() if i not in replaced}
    return replace(
        base.index,
        fingerprint=recipe.fingerprint,
        generation=base.index.generation + fixes.index.generation,
        stored=stored,
        complete=stored + len(quarantined) == base.index.count,
        shards=tuple(shards),
        quarantined=quarantined,
        statistics={},
    )


def _replaced(base: Cache, fixes: Cache) -> NDArray[np.int64]:
    """Return the sample index in `base` of each stored record of `fixes`, in the order of its indices."""
    keys = fixes.keys()
    if keys.are_indices:
        raise ConfigError(
            f"{fixes.path} has no keys of its own, and would replace the first samples of {base.path}",
            hint=f"Give each the key of the sample that it replaces, such as {base.keys()[0]!r}: "
            "TorchSource(samples, keys=[...]); run its precompute again, which encodes nothing",
        )
    found, counts = base.keys().find(keys.select(fixes.indices))
    if (counts == 0).any():
        unknown = fixes.indices[counts == 0]
        raise MissingRecordError(
            f"{base.path} lacks {format_count(len(unknown))} of the {format_count(len(fixes))} keys of "
            f"{fixes.path}, the first is {keys[int(unknown[0])]!r}",
            hint="A fix has the key of the sample that it replaces; new samples are added by precompute",
        )
    if (counts > 1).any() or len({*found.tolist()}) < len(found):
        raise ConfigError(
            f"a key of {fixes.path} belongs to several samples of {base.path}, or comes twice",
            hint="Give each sample another key",
        )
    return found


def _places(cache: Cache) -> NDArray[np.int64]:
    """Return shard, row and sample index of each stored record, `(n, 3)`."""
    runs = cache.segments
    step = np.arange(len(cache)) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
    return np.stack(
        [np.repeat(runs.shard, runs.count), np.repeat(runs.row, runs.count) + step, cache.indices], axis=1
    ).astype(np.int64)


def _serving(cache: Cache, places: NDArray[np.int64]) -> list[ShardInfo]:
    """Return the shards of a cache, serving these records and no others."""
    found: list[ShardInfo] = []
    for shard, entry in enumerate(cache.index.shards):
        rows = places[places[:, 0] == shard]
        rows = rows[np.argsort(rows[:, 1])]
        ends = np.flatnonzero((np.diff(rows[:, 1:], axis=0) != 1).any(axis=1)) + 1
        begins = np.concatenate([np.zeros(min(1, len(rows)), np.int64), ends])
        counts = np.diff(np.append(begins, len(rows)))
        segments = np.stack([rows[begins, 1], rows[begins, 2], counts], axis=1).astype(np.int64)
        found.append(replace(entry, part=0, segments=segments))
    return found
