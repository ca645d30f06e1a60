"""Several caches of one schema as one, without copying a byte: their records are numbered one after another.

Code that serves a cache serves a joint one: shards stay where they are and are opened by the cache that they
belong to. It is a `Cache` because that is what loaders take; it differs only in whose shards it opens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from stoker.errors import ConfigError, CorruptError, IncompleteError
from stoker.schema import Schema
from stoker.store.cache import Cache
from stoker.store.failures import Failure
from stoker.store.index import Index, ShardInfo
from stoker.store.joins import JoinedColumns, JoinReport
from stoker.store.recipe import Recipe
from stoker.store.shard import Shard, ShardFacts
from stoker.store.use import UsageLock


class JointCache(Cache):
    """Handle on the records of several caches; the samples of one follow those of the one before.

    Raises:
        ConfigError: They differ in their fields, so they are no one set of records.
    """

    def __init__(self, members: Sequence[Cache]) -> None:
        _check_alike(members)
        recipe = _joint_recipe(members)
        self.members = tuple(members)
        self._first_shard = np.cumsum([0, *(len(member.index.shards) for member in members)])
        path = Path(os.path.commonpath([member.path for member in members]))
        super().__init__(path, recipe, _joint_index(members, recipe), use=UsageLock(members[0].path))
        self.joined = joint_columns(members)
        if any(member.filler is not None for member in members):
            self.filler = _JointFiller(self.members)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Number of each member's first sample here."""
        return tuple(np.cumsum([0, *(member.recipe.count for member in self.members)])[:-1].tolist())

    def fresh_shard(self, i: int, known: ShardFacts | None = None) -> Shard:
        """Return shard `i`, opened by the cache that it belongs to."""
        member = int(np.searchsorted(self._first_shard, i, side="right")) - 1
        return self.members[member].fresh_shard(i - int(self._first_shard[member]), known)

    def owners(self, error: CorruptError) -> list[Cache]:
        """Return the members that serve the damaged shard: several, if a cache is given twice.

        Raises:
            CorruptError: None of them.
        """
        found = [member for member in self.members if member.path == error.folder]
        if not found:
            raise error
        return found


def reopen(cache: Cache) -> Cache:
    """Return the same generation under a handle of its own: locks and descriptors do not survive a fork."""
    if isinstance(cache, JointCache):
        return JointCache([reopen(member) for member in cache.members])
    again = type(cache)(cache.path, cache.recipe, cache.index)
    again.filler, again.joined = cache.filler, cache.joined
    return again


def same_fields(caches: Sequence[Cache]) -> bool:
    """Return True if records of these caches have the same fields, stored dtypes and joined columns."""
    first = caches[0]
    return all(
        cache.schema == first.schema
        and cache.recipe.entries["dtype"] == first.recipe.entries["dtype"]
        and served_schema(cache) == served_schema(first)
        for cache in caches
    )


class _JointFiller:
    """Asks the members' fillers, each for its own samples."""

    def __init__(self, members: Sequence[Cache]) -> None:
        self._members = members

    def fill(self, numbers: Sequence[int], timeout_s: float) -> None:
        """As `Filler.fill`, with the joint numbers.

        Raises:
            IncompleteError: A member cannot encode.
        """
        until, offset = time.monotonic() + timeout_s, 0
        for member in self._members:
            own = [number - offset for number in numbers if 0 <= number - offset < member.recipe.count]
            if own and member.filler is None:
                raise IncompleteError(
                    f"{member.path} lacks {len(own)} samples, the first is {own[0]}, and has no source at "
                    "hand. Run the precompute that made it again"
                )
            if own and member.filler is not None:
                member.filler.fill(own, until - time.monotonic())
            offset += member.recipe.count

    def begin(self) -> NoReturn:
        """Refused: what fills several caches at once would need an order of all of them."""
        paths = ", ".join(str(member.path) for member in self._members if not member.complete)
        raise ConfigError(f"caches served as one must be complete, {paths} are not. Precompute them first")


def _check_alike(members: Sequence[Cache]) -> None:
    for member in members:
        if not same_fields([members[0], member]):
            a, b = (
                {name: (f.shape, f.dtype) for name, f in served_schema(c).items()}
                for c in (members[0], member)
            )
            raise ConfigError(
                f"{members[0].path} has records of {a}, {member.path} of {b}. One batch can hold records of "
                "both only where all fields are the same; mix='batch' serves batches of one cache each"
            )


def _joint_recipe(members: Sequence[Cache]) -> Recipe:
    parts: list[Mapping[str, Any]] = [
        {**part, "name": f"{place}/{part['name']}"}
        for place, member in enumerate(members)
        for part in member.recipe.entries["source"]["parts"]
    ]
    source = {"kind": "joint/1", "parts": parts, "caches": [member.fingerprint for member in members]}
    return Recipe(entries={**members[0].recipe.entries, "source": source})


def _joint_index(members: Sequence[Cache], recipe: Recipe) -> Index:
    shards: list[ShardInfo] = []
    quarantined: dict[int, Failure] = {}
    parts = samples = 0
    for member in members:
        shards += [replace(entry, part=entry.part + parts) for entry in member.index.shards]
        for number, failure in member.quarantined.items():
            quarantined[number + samples] = replace(failure, number=number + samples)
        parts += len(member.recipe.parts)
        samples += member.recipe.count
    return Index(
        fingerprint=recipe.fingerprint,
        name="+".join(member.name for member in members),
        generation=sum(member.index.generation for member in members),
        sequence=0,
        count=samples,
        stored=sum(member.index.stored for member in members),
        complete=all(member.complete for member in members),
        shards=tuple(shards),
        quarantined=quarantined,
        statistics={},
        error={},
    )


def served_schema(cache: Cache) -> Schema:
    """Return the fields of the records, and of the columns joined to them."""
    return dict(cache.schema) if cache.joined is None else {**cache.schema, **cache.joined.schema}


def joint_columns(members: Sequence[Cache]) -> JoinedColumns | None:
    """Return the joined columns of several caches, by the numbers that their samples have together."""
    found = [member.joined for member in members if member.joined is not None]
    if not found:
        return None
    first = np.cumsum([0, *(member.recipe.count for member in members)])
    numbers = [
        begin + (member.numbers if joined.numbers is None else joined.numbers)
        for begin, member, joined in zip(first, members, found, strict=False)
    ]
    reports = [{one.name: getattr(joined.report, one.name) for one in fields(JoinReport)} for joined in found]
    return JoinedColumns(
        schema=found[0].schema,
        values={name: torch.cat([joined.values[name] for joined in found]) for name in found[0].schema},
        numbers=None if all(joined.numbers is None for joined in found) else np.concatenate(numbers),
        report=JoinReport(**{name: sum(one[name] for one in reports) for name in reports[0]}),
    )
