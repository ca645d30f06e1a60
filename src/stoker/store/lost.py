"""Shards that an index names and that are gone since, or not as long any more: their records are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stoker.errors import CorruptError, IncompleteError
from stoker.store.index import Index, ShardEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LostShard:
    """One shard that served records and cannot any more."""

    path: Path
    entry: ShardEntry
    """As the index has it, segments included."""
    size: int | None
    """Bytes of the file that is there instead; None: there is no regular file."""

    @property
    def records(self) -> int:
        """How many records it served."""
        return int(self.entry.segments[:, 2].sum())

    def error(self) -> IncompleteError | CorruptError:
        """What to raise where its records are needed."""
        advice = f"Run precompute again: it encodes its {self.records} records again, and only those"
        if self.size is None:
            return IncompleteError(f"{self.path} is missing. {advice}")
        return CorruptError(
            f"{self.path} has {self.size} bytes, expected {self.entry.bytes}: truncated or replaced. {advice}"
        )


def without_lost(index: Index, folder: Path, sizes: Mapping[str, int]) -> tuple[Index, tuple[LostShard, ...]]:
    """The index with nothing served from shards that are lost, in their places, and those shards.

    Args:
        index, folder: The index of a folder.
        sizes: Bytes by name of the files that are there.
    """
    lost = tuple(
        LostShard(path=folder / shard.file, entry=shard, size=sizes.get(shard.file))
        for shard in index.shards
        if len(shard.segments) and sizes.get(shard.file) != shard.bytes
    )
    if not lost:
        return index, lost
    gone = {shard.entry.file for shard in lost}
    nothing = np.empty((0, 3), np.int64)
    shards = tuple(replace(s, segments=nothing) if s.file in gone else s for s in index.shards)
    stored = index.stored - sum(shard.records for shard in lost)
    return replace(index, shards=shards, stored=stored, complete=False), lost
