"""What a cache holds, from its index alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.schema import Json, JsonResult, Schema
from stoker.store import Cache, open_cache
from stoker.store.mirror.root import address_of
from stoker.store.recipe import RECIPE_FILE
from stoker.store.remote import is_url


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary(JsonResult):
    """One cache, as `stoker inspect` shows it."""

    name: str
    path: str
    address: str | None
    """Where it lies, if that is not this machine; `path` is then its mirror."""
    fingerprint: str
    records: int
    """Records stored."""
    count: int
    """Samples of the source; stored and quarantined together, when complete."""
    fields: Schema
    """Fields as stored."""
    shards: int
    bytes: int
    """Bytes of all shards on disk."""
    raw_bytes: int
    """Bytes of all shards uncompressed."""
    complete: bool
    quarantined: tuple[dict[str, Json], ...]
    """Number, stage and error of each sample set aside."""
    statistics: Mapping[str, Any]
    """Per field, as kept in the index."""
    error: Mapping[str, Any]
    """Per field: largest and root-mean-square rounding error of the storage dtype, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder(JsonResult):
    """The caches of one folder, as `stoker inspect` lists them."""

    path: str
    caches: tuple[CacheSummary, ...]
    """By name; of each name the one that `open_cache` would open."""
    unreadable: Mapping[str, str]
    """Why a cache that is there cannot be opened, by its name."""


def inspect_path(path: str | Path) -> CacheSummary | CacheFolder:
    """Return what a cache holds, or a folder of several caches.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
    """
    names = [] if is_url(path) else names_in(Path(path))
    if not names:
        return inspect_cache(path)
    caches: list[CacheSummary] = []
    unreadable: dict[str, str] = {}
    for name in names:
        try:
            caches.append(inspect_cache(Path(path, name)))
        except StokerError as error:
            unreadable[name] = str(error)
    return CacheFolder(path=str(path), caches=tuple(caches), unreadable=unreadable)


def names_in(folder: Path) -> list[str]:
    """Return the names of the caches in a folder, sorted; none where it is a cache itself."""
    if next(folder.glob(f"*/{RECIPE_FILE}"), None) is not None:
        return []
    return sorted({recipe.parent.parent.name for recipe in folder.glob(f"*/*/{RECIPE_FILE}")})


def inspect_cache(path: str | Path) -> CacheSummary:
    """Read a cache's index; costs O(shards), no record is read.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
    """
    cache = open_cache(path, require_complete=False)
    return CacheSummary(
        name=cache.name,
        path=str(cache.path),
        address=address_of(cache.path),
        fingerprint=cache.fingerprint,
        records=len(cache),
        count=cache.recipe.count,
        fields=cache.schema,
        shards=len(cache.index.shards),
        bytes=shard_bytes(cache),
        raw_bytes=raw_bytes(cache),
        complete=cache.complete,
        quarantined=tuple(list_quarantined(cache)),
        statistics=cache.statistics,
        error=cache.index.error,
    )


def list_quarantined(cache: Cache) -> list[dict[str, Json]]:
    """Number, stage, error and attempts of each sample set aside, by number."""
    return [
        {"number": number, "stage": f.stage, "error": f.error, "attempts": f.attempts, "kind": f.kind}
        for number, f in sorted(cache.index.quarantined.items())
    ]


def shard_bytes(cache: Cache) -> int:
    """Bytes of all shards on disk."""
    return sum(shard.bytes for shard in cache.index.shards)


def raw_bytes(cache: Cache) -> int:
    """Bytes of all shards uncompressed."""
    return sum(shard.raw_bytes for shard in cache.index.shards)


def worst_error(cache: Cache) -> float | None:
    """Largest relative rounding error over all fields; None where nothing was rounded."""
    errors = [entry.get("max") for entry in cache.index.error.values()]
    return max((error for error in errors if error is not None), default=None)
