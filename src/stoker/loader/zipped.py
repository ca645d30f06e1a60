"""Several caches joined record by record: latents, text and labels of the same samples in one batch.

The first cache says which records there are and in which order. For each of its records every other cache has
a partner, found by key. A loader serves each cache as if it were alone, all in the order of the first
one, and puts their batches together. So each is served from the fastest tier that holds it, and many records
may share one partner, which is kept once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, cast, overload

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, MissingRecordError, RecordError, arg
from stoker.loader.assembly import Pad
from stoker.loader.batch import RecordBatch
from stoker.loader.choose import Choices, FieldGroup, resolve_choices
from stoker.loader.records import as_indices, no_indices
from stoker.schema import SHAPE_SUFFIX, Schema
from stoker.sources.arguments import format_value
from stoker.store import Cache
from stoker.store.access import is_index, read_many, sample_index, selected
from stoker.store.cache import open_cache, served_indices, served_schema
from stoker.store.keys import SampleKeys, text_keys
from stoker.store.where import field_columns, sample_columns, select_rows
from stoker.units import format_count, format_few

if TYPE_CHECKING:
    from stoker.loader.options import Options
    from stoker.store.dataset import CacheDataset

Relation: TypeAlias = "Literal['key', 'stem', 'index'] | Mapping[str, str] | Callable[[str], str]"
"""How the partner of a record is found: by equal keys, by keys without their file extension, or by equal
sample index. A dictionary or function gives the partner's key for each key of the first cache."""
_NAMED = 5
"""Keys that an error names."""


def zip(
    *,
    on: Relation | Mapping[str, Relation] = "key",
    missing: Literal["refuse", "drop"] = "refuse",
    **caches: Cache | str | Path,
) -> Zip:
    """Return several caches joined by key, which a `Loader` serves as one; nothing is read or copied.

    Each cache keeps its own recipe: a changed caption encodes one text again, another text encoder the texts.
    Batches have the fields of all. The field of a cache with one field gets the name of the cache, `latents`.
    Of a cache with several, each gets that name in front, `text.hidden`.

    Args:
        on: How partners are found: `"key"`, by equal keys (see `Cache.keys`); `"stem"`, by keys without their
            file extension; `"index"`, by equal sample index. By cache also a dictionary or function from the
            key of the first cache to that of the partner: `on={"text": captions}`. Several records may share
            a partner.
        missing: `"refuse"` records of the first cache that lack a partner, and name them, or `"drop"` them.
        **caches: At least two, or their paths, by the name that they get in batches. The first one says which
            records there are.

    Raises:
        ConfigError: A name or relation is unknown, or a partner's key is not unique.
        MissingRecordError: Partners are missing; names the first of them.
        IncompleteError: A cache lacks records.

    Examples:
        >>> import stoker, torch
        >>> def keyed(items, keys):
        ...     return stoker.TorchSource(items, keys=keys)
        >>> images = keyed([{"x": torch.ones(2) * i} for i in range(3)], ["a", "b", "c"])
        >>> texts = keyed([{"y": torch.ones(1) * i} for i in range(2)], ["red", "blue"])
        >>> images = stoker.precompute(images, None, "caches", name="images")
        >>> texts = stoker.precompute(texts, None, "caches", name="texts")
        >>> caption = {"a": "red", "b": "blue", "c": "red"}
        >>> both = stoker.zip(image=images, text=texts, on={"text": caption})
        >>> batch = next(iter(stoker.Loader(both, batch_size=3)))
        >>> batch["image"][:, 0], batch["text"][:, 0]
        (tensor([0., 1., 2.]), tensor([0., 1., 0.]))
    """
    opened = {name: _opened(name, one) for name, one in caches.items()}
    if len(opened) < 2:
        raise ConfigError(
            f"zip joins several caches, and got {len(opened)}",
            hint="Give at least two by name: stoker.zip(latents=..., text=...)",
        )
    if missing not in ("refuse", "drop"):
        raise ConfigError(f"missing is {missing!r}", hint="Expected refuse or drop")
    _refuse_equal_names(opened)
    (first, main), *others = opened.items()
    relations = _relations(on, [name for name, _ in others])
    indices_in = {first: served_indices(main)}
    has_partners = np.ones(len(served_indices(main)), np.bool_)
    for name, cache in others:
        indices_in[name] = _partners(main, cache, relations[name], name)
        has_partners &= indices_in[name] >= 0
        if missing == "refuse":
            _refuse_missing(main, cache, indices_in[name], name)
    if not has_partners.any():
        raise MissingRecordError(
            f"no record of {main.path} has a partner in every other cache",
            hint=f"Keys of {first} are such as {_some(main)}; of {others[0][0]} {_some(others[0][1])}",
        )
    return Zip(opened, {name: indices[has_partners] for name, indices in indices_in.items()})


class Zip:
    """Caches joined record by record: what `stoker.zip` returns.

    Its records are read as those of a `Cache`, by the sample index of the first one: `joined[5]`,
    `joined[-1]`, `joined[10:20]`, `for record in joined`. It can be pickled.

    Examples:
        >>> import stoker, torch
        >>> data = [{"x": torch.ones(2), "label": i % 2} for i in range(6)]
        >>> cache = stoker.precompute(data, None, "caches", name="six")
        >>> joined = stoker.zip(one=cache, two=cache)
        >>> joined, len(joined.where('"one.label" = 1'))
        (Zip(one=six, two=six, 6 records), 3)
    """

    def __init__(self, caches: Mapping[str, Cache], indices_in: Mapping[str, NDArray[np.int64]]) -> None:
        self.caches = dict(caches)
        """The caches by name; the first one says which records there are."""
        self.indices_in = dict(indices_in)
        """By cache the sample index in it of each record, `(len(self),)` int64."""

    @property
    def main(self) -> Cache:
        """The first cache."""
        return next(iter(self.caches.values()))

    @property
    def indices(self) -> NDArray[np.int64]:
        """Sample index of each record in the first cache, sorted, `(len(self),)`."""
        return next(iter(self.indices_in.values()))

    @property
    def name(self) -> str:
        """Names of the caches, joined by a plus."""
        return "+".join(self.caches)

    @cached_property
    def schema(self) -> Schema:
        """Fields of a record, by their names in batches."""
        return {
            new: served_schema(self.caches[name])[old]
            for name in self.caches
            for old, new in self.renamed(name).items()
        }

    def renamed(self, name: str) -> dict[str, str]:
        """Return by field of a cache its name in batches.

        Args:
            name: Name of the cache in this `Zip`.
        """
        return _names_of(name, self.caches[name])

    def keys(self) -> list[str]:
        """Return the key of each record in the first cache, in the order of `indices`."""
        keys = self.main.keys()
        return [keys[index] for index in self.indices.tolist()]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the records by sample index in the first cache."""
        for place in range(len(self)):
            yield self._record(place)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, SupportsIndex) and self._place(operator.index(index)) is not None

    @overload
    def __getitem__(self, key: SupportsIndex) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any] | Tensor) -> dict[str, Any]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return a record, or several, by sample index in the first cache, every byte checked.

        Indices, slices and lists mean what they do in `cache[key]`.

        Raises:
            MissingRecordError: There is no such record, or it has no partner.
            CorruptError: A record is damaged.
            RecordError: It is a name. Read a field of all records from its cache.
        """
        if isinstance(key, str):
            raise RecordError(f"{self!r} has no entry {key!r}", hint=self._field_hint(key))
        if not is_index(key):
            wanted = selected(key, self.main.index.count, self.indices, next(iter(self.schema)))
            return read_many(self.__getitem__, self.schema, wanted)
        index = sample_index(key, self.main.index.count)
        place = self._place(index)
        if place is None:
            self.main.locate(index)  # says what is wrong with it
            raise MissingRecordError(f"sample {index} of {self.main.name} is not among those joined")
        return self._record(place)

    def _place(self, index: int) -> int | None:
        """Return the place of a sample of the first cache among the records."""
        place = int(np.searchsorted(self.indices, index))
        return place if place < len(self) and self.indices[place] == index else None

    def _record(self, place: int) -> dict[str, Tensor]:
        return {
            self._names[name].get(field, field): value
            for name, cache in self.caches.items()
            for field, value in cache[int(self.indices_in[name][place])].items()
        }

    @cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        return {name: self.renamed(name) for name in self.caches}

    def _field_hint(self, wanted: str) -> str:
        for cache, names in self._names.items():
            for field, name in names.items():
                if name == wanted:
                    column = f"joined.caches[{cache!r}][{field!r}]"
                    return f"Read the field from its cache: {column}[joined.indices_in[{cache!r}]]"
        return f"Give a sample index of the first cache, as joined[5]. Fields are {', '.join(self.schema)}"

    def get(self, key: str) -> dict[str, Tensor]:
        """Return a record by its key in the first cache.

        Args:
            key: One of `keys()`.
        """
        return self[self.main.keys().index(key)]

    def where(self, condition: str) -> Zip:
        """Return the records that meet a condition, as a smaller `Zip`.

        Args:
            condition: As of `Cache.where`, over fields of all caches by their names in batches;
                `key` and `sample_index` are those of the first one. A name with a dot goes in double quotes.

        Raises:
            ConfigError, MissingRecordError: As of `Cache.where`.
        """
        columns = sample_columns(self.main, self.indices)
        for name, cache in self.caches.items():
            columns += field_columns(cache, self.indices_in[name], self.renamed(name))
        return self._at(select_rows(columns, condition, len(self), self.name))

    def select(self, indices: Sequence[int] | NDArray[Any]) -> Zip:
        """Return some of the records, as a smaller `Zip`.

        Args:
            indices: Sample indices in the first cache; each record comes once, in order.

        Raises:
            ConfigError: They are not whole numbers.
            MissingRecordError: One of them is not joined.
        """
        wanted = as_indices(indices)
        missing = np.setdiff1d(wanted, self.indices)
        if len(missing):
            raise MissingRecordError(
                f"{format_count(len(missing), 'sample')} of {self.main.name} are not among those joined, the "
                f"first is {missing[0]}"
            )
        return self._at(np.isin(self.indices, wanted))

    def _at(self, places: NDArray[Any]) -> Zip:
        """Return the records at some places, sorted, or where a mask is True."""
        return Zip(self.caches, {name: indices[places] for name, indices in self.indices_in.items()})

    def as_dataset(self) -> CacheDataset:
        """Return the records as a map-style `Dataset`; see `Cache.as_dataset`."""
        from stoker.store.dataset import CacheDataset  # imports torch.utils.data

        return CacheDataset(self)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={cache.name}" for name, cache in self.caches.items())
        return f"Zip({inside}, {format_count(len(self), 'record')})"


def _names_of(name: str, cache: Cache) -> dict[str, str]:
    """Return by field of a cache the name that it has in batches, where the cache is called `name`."""
    schema = served_schema(cache)
    sizes = {field + SHAPE_SUFFIX for field, one in schema.items() if one.folded}
    fields = [field for field in schema if field not in sizes]
    return {field: name if len(fields) == 1 else f"{name}.{field}" for field in fields}


def _refuse_equal_names(caches: Mapping[str, Cache]) -> None:
    """Refuse fields that would replace one another in batches.

    Raises:
        ConfigError: Two have one name, or one is called `index`.
    """
    taken = {"index"}
    for cache, names in ((name, _names_of(name, one)) for name, one in caches.items()):
        for field, name in names.items():
            if name in taken:
                raise ConfigError(
                    f"zip: field {field!r} of {cache!r} would be called {name!r} in batches, which have "
                    f"{'the sample indices under that name' if name == 'index' else 'such a field already'}",
                    hint=f"Give the cache another name than {cache!r} in stoker.zip",
                )
            taken.add(name)


# ----------------------------------------------------------------------------------------------------------
# Which record of another cache belongs to each record of the first one.


def _opened(name: str, given: object) -> Cache:
    cache = open_cache(given) if isinstance(given, str | Path) else given
    if not isinstance(cache, Cache):
        raise ConfigError(
            f"zip: {name} is {format_value(given)}", hint="Expected a stoker.Cache, or its path"
        )
    if not cache.complete:
        raise ConfigError(
            f"zip: {cache.path} is not complete, and partners are found among the records that are there",
            hint=f"Run its precompute to the end first, without {arg('wait', False)}",
        )
    return cache


def _relations(on: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the relation of each cache but the first."""
    found: dict[str, Any] = dict.fromkeys(names, "key")
    if isinstance(on, Mapping):
        given = cast("Mapping[str, Any]", on)
        if unknown := [name for name in given if name not in found]:
            raise ConfigError(
                f"on names {', '.join(map(repr, unknown))}; caches but the first are {', '.join(names)}",
                hint=f"Give a relation by cache, as on={{{names[0]!r}: {{key: key}}}}",
            )
        found.update(given)
    else:
        found = dict.fromkeys(names, on)
    for name, relation in found.items():
        if not (relation in ("key", "stem", "index") if isinstance(relation, str) else _maps(relation)):
            raise ConfigError(
                f"on={{{name!r}: {relation!r}}}",
                hint="Expected 'key', 'stem', 'index', or a dictionary or function from key to key",
            )
    return found


def _maps(relation: object) -> bool:
    return isinstance(relation, Mapping) or callable(relation)


def _partners(main: Cache, other: Cache, relation: Any, name: str) -> NDArray[np.int64]:
    """Return the sample index in `other` for each served record of `main`; -1: none is served."""
    indices = served_indices(main)
    if relation in ("key", "stem"):
        _refuse_positions(main, other, name)
    if relation == "index" or (relation == "key" and main.keys().digest == other.keys().digest):
        found = np.where(indices < other.index.count, indices, -1)
    else:
        found = _by_key(main.keys().select(indices), other, relation, name)
    return np.where(np.isin(found, served_indices(other)), found, -1)


def _refuse_positions(main: Cache, other: Cache, name: str) -> None:
    """Refuse keys that are positions in two different datasets.

    Raises:
        ConfigError: Neither cache has keys of its own, and they were not made of the same samples.
    """
    if main.keys().are_indices and other.keys().are_indices and _samples(main) != _samples(other):
        raise ConfigError(
            f"{main.path} ({format_count(main.index.count, 'sample')}) and {name} ({other.path}, "
            f"{format_count(other.index.count, 'sample')}) come from different data, and their samples have "
            "no keys that say which belong together",
            hint=f"Name the samples of both, as TorchSource(samples, keys=['a.png', 'b.png']), and run both "
            f"precomputes again, which encodes nothing; or join by position: {arg('on', 'index')}",
        )


def _samples(cache: Cache) -> list[dict[str, Any]]:
    """Return what a recipe says of the samples themselves: equal for caches of one dataset."""
    parts = cache.recipe.entries["source"]["parts"]
    return [{name: value for name, value in part.items() if name != "name"} for part in parts]


def _by_key(keys: SampleKeys, other: Cache, relation: Any, name: str) -> NDArray[np.int64]:
    """Return the sample in `other` for each key of the first cache; -1: none has it."""
    theirs = text_keys(map(_stem, other.keys())) if relation == "stem" else other.keys()
    partner_key: Callable[[str], object]
    if isinstance(relation, Mapping):
        partner_key = cast("Mapping[str, object]", relation).get
    else:
        partner_key = {"stem": _stem, "key": str}[relation] if isinstance(relation, str) else relation
    has_key = np.zeros(len(keys), np.bool_)

    def wanted() -> Iterator[str]:
        for place, key in enumerate(keys):
            partner = partner_key(key)
            if isinstance(partner, str):
                has_key[place] = True
                yield partner
            elif partner is not None:
                raise ConfigError(
                    f"on: the partner's key in {name} is {partner!r}",
                    hint="Expected a text, as in cache.keys()",
                )

    texts = text_keys(wanted())
    found = np.full(len(keys), -1, np.int64)
    found[has_key] = _unique(*theirs.find(texts), texts, other, name)
    return found


def _stem(key: str) -> str:
    path = PurePosixPath(key)
    return str(path.with_suffix("")) if path.name else key


def _unique(
    found: NDArray[np.int64], counts: NDArray[np.int64], keys: Sequence[str], other: Cache, name: str
) -> NDArray[np.int64]:
    """Return what was found, if it is one sample for each key."""
    if (counts > 1).any():
        place = int(np.argmax(counts > 1))
        raise ConfigError(
            f"{counts[place]} samples of {name} ({other.path}) have the key {keys[place]!r}, so it does not "
            "say which of them is the partner",
            hint=f"Give each another key, or {arg('on', 'index')} if samples have equal indices",
        )
    return found


def _refuse_missing(main: Cache, other: Cache, found: NDArray[np.int64], name: str) -> None:
    """Refuse records without a partner.

    Raises:
        MissingRecordError: Names the first of them by key.
    """
    lost = served_indices(main)[found < 0].tolist()
    if not lost:
        return
    keys = main.keys()
    named = format_few([repr(keys[index]) for index in lost[:_NAMED]], _NAMED)
    more = f" and {format_count(len(lost) - _NAMED)} more" if len(lost) > _NAMED else ""
    raise MissingRecordError(
        f"{format_count(len(lost))} of {format_count(len(found))} records have no partner in {name} "
        f"({other.path}): {named}{more}",
        hint=f"Its keys are such as {_some(other)}. Encode what is missing, give {arg('on', 'stem')} or a "
        f"dictionary of keys, or leave such records out with {arg('missing', 'drop')}",
    )


def _some(cache: Cache) -> str:
    return ", ".join(repr(key) for key in cache.keys()[:2])


# ----------------------------------------------------------------------------------------------------------
# What the loader of each cache is asked for, and how their batches become one.


@dataclass(frozen=True, slots=True)
class Member:
    """One cache of a `Zip`, as a loader serves it."""

    cache: Cache
    options: Options
    names: Mapping[str, str]
    """By field of the cache, the name in batches."""


def members_of(joined: Zip, options: Options) -> dict[str, Member]:
    """Return what the loader of each cache is asked for.

    Raises:
        ConfigError: A setting does not work with joined caches, or names an unknown field.
    """
    if options.windows is not None:
        raise ConfigError(
            f"{joined!r} has whole records, and windows= cuts them",
            hint="Leave windows out, or serve the cache with time alone, with a table joined by open_cache",
        )
    if unknown := sorted({*(options.normalize or {})} - joined.schema.keys()):
        raise ConfigError(f"normalize names {unknown}, but records have {', '.join(joined.schema)}")
    if unknown := sorted({n for group in options.choose for n in group.fields} - joined.schema.keys()):
        raise ConfigError(f"choose names {unknown}, but records have {', '.join(joined.schema)}")
    place = np.arange(len(joined))
    if options.indices is not None:
        wanted = as_indices(options.indices)
        place = np.searchsorted(joined.indices, wanted)
        is_joined = np.isin(wanted, joined.indices)
        if not is_joined.all():
            raise MissingRecordError(
                f"indices= names sample {wanted[~is_joined][0]}, which is not among those of {joined!r}"
            )
    if not len(place):
        raise no_indices(None if len(joined) else repr(joined))
    partners = tuple(
        f"{name}: {cache.fingerprint} {xxhash.xxh3_64_hexdigest(joined.indices_in[name][place].data)}"
        for name, cache in [*joined.caches.items()][1:]
    )
    found: dict[str, Member] = {}
    for name, cache in joined.caches.items():
        is_first = not found
        names = joined.renamed(name)
        all_of_it = is_first and options.indices is None and len(joined) == len(cache)
        member = replace(
            options,
            indices=None if all_of_it else joined.indices_in[name][place],
            normalize=_own(options.normalize, names),
            ragged=_own_pad(options.ragged, names),
            batch_by=_first_field(options.batch_by, joined),
            choose=resolve_choices(_own_choices(options.choose, names), cache, windowed=False),
            zipped=partners if is_first else (),
        )
        if not is_first:
            ragged = member.ragged if options.batch_tokens is None else "pack"
            member = replace(
                member, transforms=(), meter=None, weights=None, batch_by=None, batch_tokens=None
            )
            member = replace(member, ragged=ragged)
        found[name] = Member(cache, member, names)
    return found


def _first_field(batch_by: str | None, joined: Zip) -> str | None:
    """Return the field of the first cache that batches go by.

    Raises:
        ConfigError: It is a field of another cache.
    """
    field_of = {new: field for field, new in joined.renamed(next(iter(joined.caches))).items()}
    if batch_by is not None and batch_by != "shape" and batch_by not in field_of:
        raise ConfigError(
            f"{arg('batch_by', batch_by)} is not among the fields of the first cache: {', '.join(field_of)}",
            hint="Name the cache first whose field batches go by",
        )
    return field_of.get(batch_by, batch_by) if batch_by is not None else None


def _own(settings: Mapping[str, Any] | None, names: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the settings of one cache's fields, by the names that it has for them."""
    if settings is None:
        return None
    return {field: settings[new] for field, new in names.items() if new in settings}


def _own_choices(choices: Choices, names: Mapping[str, str]) -> Choices:
    """Return the choices of one cache's fields, by the names that it has for them.

    Raises:
        ConfigError: Fields of several caches are to share one.
    """
    field_of = {new: field for field, new in names.items()}
    found: list[FieldGroup] = []
    for group in choices:
        names_of_cache = [name for name in group.fields if name in field_of]
        if names_of_cache and len(names_of_cache) < len(group.fields):
            raise ConfigError(
                f"choose names {', '.join(group.fields)} together, which are fields of several caches",
                hint="Store what shares rows in one cache, or choose for each of them",
            )
        if names_of_cache:
            found.append(replace(group, fields=tuple(field_of[name] for name in names_of_cache)))
    return tuple(found)


def _own_pad(ragged: Any, names: Mapping[str, str]) -> Any:
    if isinstance(ragged, Pad) and isinstance(ragged.value, Mapping):
        return replace(ragged, value=_own(ragged.value, names))
    return ragged


class BatchZipper:
    """Puts the batches of several loaders together, those of one pass.

    Args:
        names: By field of the first cache, the name in batches.
        others: For each other cache its batches from the same place on, and its names.
    """

    def __init__(
        self, names: Mapping[str, str], others: Sequence[tuple[Iterator[Any], Mapping[str, str]]]
    ) -> None:
        self._names, self._others = names, others

    def added(self, batch: RecordBatch) -> RecordBatch:
        """Return the batch with the fields of all caches, by their names; it is one of the first cache."""
        made = RecordBatch(_named(batch, self._names))
        for batches, names in self._others:
            partner = next(batches)
            if len(partner["index"]) != len(batch["index"]):
                raise MissingRecordError("joined caches gave batches of different sizes")
            made.update(_named(partner, names))
        made["index"] = batch["index"]
        made.position = batch.position
        return made

    def close(self) -> None:
        """End the passes over the other caches."""
        for batches, _ in self._others:
            cast("Any", batches).close()


def _named(batch: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a batch by other names; what belongs to a field, as its mask, is named after it."""
    for name, value in batch.items():
        if name == "index":
            continue
        if name in names:
            yield names[name], value
            continue
        field, dot, rest = name.rpartition(".")
        yield (f"{names[field]}{dot}{rest}" if field in names else name), value
