"""The records of caches as samples: to train on a cache, or to run another encoder on what one has made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stoker.errors import ConfigError, MissingRecordError, SourceError
from stoker.schema import Field, Sample, Schema, digest_json
from stoker.sources.protocol import Part, PartedSource, SourceIdentity
from stoker.store.cache import Cache, open_cache
from stoker.store.format import RECIPE_FILE
from stoker.store.remote import is_url
from stoker.store.storage import resolve_local


@dataclass(frozen=True, slots=True)
class _Records:
    """The stored records of one cache."""

    cache: Cache

    @property
    def count(self) -> int:
        return len(self.cache)


class CacheSource(PartedSource[_Records]):
    """The stored records of one cache, or of several with the same fields, as samples.

    Samples that were quarantined are left out. Quantized fields and bfloat16 are read as float32.

    Args:
        caches: A cache, its folder, a folder that holds caches by name, the URL of either, or a list of
            these. Of several fingerprints of a name, the newest complete one is taken.

    Raises:
        FormatError: On first use: there is no cache.
        SourceError: On first use: the caches have different fields, or fields of particles or meshes.

    Examples:
        >>> import stoker, torch
        >>> raw = stoker.precompute([{"x": torch.ones(3)}] * 4, None, "caches", name="raw")
        >>> source = stoker.CacheSource("caches/raw")
        >>> len(source), source.read(0)["x"].tolist()
        (4, [1.0, 1.0, 1.0])
        >>> encoder = stoker.ModuleEncoder(torch.nn.Linear(3, 2), field="x")
        >>> stoker.precompute(source, encoder, "caches", name="small")[0]["latent"].shape
        torch.Size([2])
    """

    def __init__(
        self, caches: Cache | str | os.PathLike[str] | Sequence[Cache | str | os.PathLike[str]]
    ) -> None:
        given = [caches] if isinstance(caches, Cache | str | os.PathLike) else [*caches]
        if not given:
            raise ConfigError(
                "no cache is named", hint="Give the folder of one, as data/latent_cache/a_train"
            )
        self._given = given
        self._opened: list[_Records] = []

    def __repr__(self) -> str:
        """Return the caches."""
        return f"CacheSource({', '.join(str(getattr(one, 'path', one)) for one in self._given)})"

    def __getstate__(self) -> dict[str, object]:
        """Leave opened files behind."""
        return {"_given": self._given, "_opened": []}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Return a record; every byte is checked.

        Raises:
            CorruptError: It is damaged.
            IndexError: There is no such sample.
        """
        records, row = self._find(index)
        record = records.cache[int(records.cache.indices[row])]
        sample: Sample = {}
        for name, field in records.cache.schema.items():
            values = record[name].float() if record[name].dtype is torch.bfloat16 else record[name]
            sample[name] = (values[start:stop] if field.time else values).numpy()
        return sample

    def locate(self, index: int) -> str:
        """Return the cache and the number of a record in it."""
        records, row = self._find(index)
        return f"{records.cache.path}, record {records.cache.indices[row]}"

    def keys(self) -> Sequence[str]:
        """Return the keys of the samples; cache and number of those of a cache made before keys were kept."""
        found: list[str] = []
        for records in self._parts():
            numbers = records.cache.indices.tolist()
            try:
                keys = records.cache.keys()
                found += [keys[number] for number in numbers]
            except MissingRecordError:
                found += [f"{records.cache.name}/{number}" for number in numbers]
        return found

    def schema(self) -> Schema:
        """Return the fields of a record, as they are read."""
        return {name: _as_read(field) for name, field in self._parts()[0].cache.schema.items()}

    def identity(self) -> SourceIdentity:
        """Return the fingerprints of the caches, and which of their records are stored."""
        parts = tuple(
            Part(
                name=records.cache.name,
                count=records.count,
                digest=records.cache.fingerprint,
                selection="all"
                if records.count == records.cache.recipe.count
                else digest_json(records.cache.indices.tolist()),
            )
            for records in self._parts()
        )
        return SourceIdentity(kind="cache/1", parts=parts)

    @property
    def caches(self) -> list[Cache]:
        """The caches, opened."""
        return [records.cache for records in self._parts()]

    def _parts(self) -> Sequence[_Records]:
        if not self._opened:
            caches = [one for given in self._given for one in _caches_of(given)]
            _check_alike(caches)
            self._opened = [_Records(cache) for cache in caches]
        return self._opened

    def _edges(self, part: _Records) -> Sequence[int]:
        """Return pieces of about a shard."""
        rows = max((shard.rows for shard in part.cache.index.shards), default=1)
        return [*range(0, part.count, rows), part.count]


def _caches_of(given: Cache | str | os.PathLike[str]) -> list[Cache]:
    if isinstance(given, Cache):
        return [given]
    place = os.fspath(given)
    folder = resolve_local(place) if is_url(place) else Path(place).expanduser()
    names = {recipe.parent.parent for recipe in folder.glob(f"[!.]*/[!.]*/{RECIPE_FILE}")}
    return [open_cache(path) for path in sorted(names or {folder})]


def _check_alike(caches: Sequence[Cache]) -> None:
    """Refuse caches that cannot be read as samples of one kind.

    Raises:
        SourceError: They have different fields, or fields of particles, meshes or several varying axes.
    """
    first = caches[0]
    if folded := [name for name, field in first.schema.items() if field.axes]:
        raise SourceError(
            f"{first.path} holds particles, meshes or a field of several varying axes ({folded[0]})",
            hint="Train on it with stoker.Loader",
        )
    for other in caches[1:]:
        if other.schema != first.schema:
            others = _shown(other.schema)
            raise SourceError(
                f"{other.path} has fields {others}, and {first.path} has {_shown(first.schema)}",
                hint="Name caches with the same fields",
            )


def _shown(schema: Schema) -> str:
    return ", ".join(f"{name} {field.shape} {field.dtype}" for name, field in schema.items())


def _as_read(field: Field) -> Field:
    wide = field.quantized or field.dtype == "bfloat16"
    return replace(field, dtype="float32", quantized=False) if wide else field
