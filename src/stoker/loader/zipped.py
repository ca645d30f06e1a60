"""Several caches joined record by record: latents, text and labels of the same samples in one batch.

The first cache says which records there are and in which order. For each of its records every other cache has
one of its own, found by key. A loader serves each cache as if it were alone, all in the order of the first
one, and puts their batches together. So each is served from the fastest tier that holds it, and many records
may share one partner, which is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, MissingRecordError, arg
from stoker.loader.assembly import Pad
from stoker.loader.batch import RecordBatch
from stoker.loader.choose import Choices, FieldGroup, resolve_choices
from stoker.loader.records import no_indices
from stoker.schema import SHAPE_SUFFIX, Schema, digest_json
from stoker.sources.arguments import format_value
from stoker.store import Cache
from stoker.store.cache import open_cache, served_schema
from stoker.store.keys import key_lines
from stoker.store.where import columns_of, select_rows
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
    Batches have the fields of all: a cache of one field gives it under its own name here, `latents`; of
    several, each gets that name in front, `text.hidden`.

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
    (first, main), *others = opened.items()
    relations = _relations(on, [name for name, _ in others])
    numbers = {first: main.indices}
    here = np.isin(main.indices, _served(main))
    for name, cache in others:
        numbers[name] = _partners(main, cache, relations[name], name)
        here &= numbers[name] >= 0
        if missing == "refuse":
            _refuse_missing(main, cache, numbers[name], name)
    if not here.any():
        raise MissingRecordError(
            f"no record of {main.path} has a partner in every other cache",
            hint=f"Keys of {first} are such as {_some(main)}; of {others[0][0]} {_some(others[0][1])}",
        )
    return Zip(opened, {name: own[here] for name, own in numbers.items()})


class Zip:
    """Caches joined record by record: what `stoker.zip` returns. It is read like a cache.

    Records go by the sample index of the first cache. It can be pickled.

    Examples:
        >>> import stoker, torch
        >>> data = [{"x": torch.ones(2), "label": i % 2} for i in range(6)]
        >>> cache = stoker.precompute(data, None, "caches", name="six")
        >>> joined = stoker.zip(one=cache, two=cache)
        >>> joined, len(joined.where('"one.label" = 1'))
        (Zip(one=six, two=six, 6 records), 3)
    """

    def __init__(self, caches: Mapping[str, Cache], numbers: Mapping[str, NDArray[np.int64]]) -> None:
        self.caches = dict(caches)
        """The caches by name; the first one says which records there are."""
        self.numbers = dict(numbers)
        """By cache the sample index in it of each record, `(len(self),)` int64."""

    @property
    def main(self) -> Cache:
        """The first cache."""
        return next(iter(self.caches.values()))

    @property
    def indices(self) -> NDArray[np.int64]:
        """Sample index of each record in the first cache, sorted, `(len(self),)`."""
        return next(iter(self.numbers.values()))

    @property
    def name(self) -> str:
        """Names of the caches, joined by a plus."""
        return "+".join(self.caches)

    @cached_property
    def schema(self) -> Schema:
        """Fields of a record, by the names that they have here."""
        return {
            new: served_schema(self.caches[name])[old]
            for name in self.caches
            for old, new in self.renamed(name).items()
        }

    def renamed(self, name: str) -> dict[str, str]:
        """Return by field of a cache the name that it has here.

        Args:
            name: Of the cache, here.
        """
        schema = served_schema(self.caches[name])
        sizes = {field + SHAPE_SUFFIX for field, one in schema.items() if one.folded}
        fields = [field for field in schema if field not in sizes]
        return {field: name if len(fields) == 1 else f"{name}.{field}" for field in fields}

    def keys(self) -> list[str]:
        """Return the key of each record in the first cache, in the order of `indices`."""
        keys = self.main.keys()
        return [keys[number] for number in self.indices.tolist()]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a record by its sample index in the first cache, every byte checked.

        Raises:
            MissingRecordError: There is no such record, or it has no partner.
            CorruptError: A record is damaged.
        """
        place = int(np.searchsorted(self.indices, index))
        if place == len(self) or self.indices[place] != index:
            self.main.locate(index)  # says what is wrong with it
            raise MissingRecordError(f"sample {index} of {self.main.name} is not among those joined")
        return {
            self.renamed(name).get(field, field): value
            for name, cache in self.caches.items()
            for field, value in cache[int(self.numbers[name][place])].items()
        }

    def get(self, key: str) -> dict[str, Tensor]:
        """Return a record by its key in the first cache.

        Args:
            key: One of `keys()`.
        """
        return self[self.main.keys().index(key)]

    def where(self, condition: str) -> Zip:
        """Return the records that meet a condition, as a smaller `Zip`.

        Args:
            condition: As of `Cache.where`, over fields of all caches by the names that they have here, `key`
                and `number`. A name with a dot goes in double quotes.

        Raises:
            ConfigError: It is no such condition; names the columns that there are.
        """
        columns = {
            own if own in ("key", "number") else self.renamed(name)[own]: values
            for place, name in enumerate(self.caches)
            for own, values in columns_of(self.caches[name], self.numbers[name])
            if place == 0 or own not in ("key", "number")
        }
        return self.select(self.indices[select_rows(columns, condition, len(self), self.name)])

    def select(self, indices: Sequence[int] | NDArray[Any]) -> Zip:
        """Return some of the records, as a smaller `Zip`.

        Args:
            indices: Sample indices in the first cache; each record comes once, in order.

        Raises:
            MissingRecordError: One of them is not here.
        """
        chosen = np.isin(self.indices, np.asarray(indices))
        if lost := sorted({*np.asarray(indices).tolist()} - {*self.indices.tolist()}):
            raise MissingRecordError(
                f"{format_count(len(lost), 'sample')} of {self.main.name} are not among those joined, the "
                f"first is {lost[0]}"
            )
        return Zip(self.caches, {name: own[chosen] for name, own in self.numbers.items()})

    def as_dataset(self) -> CacheDataset:
        """Return the records as a map-style `Dataset`; see `Cache.as_dataset`."""
        from stoker.store.dataset import CacheDataset  # imports torch.utils.data

        return CacheDataset(self)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={cache.name}" for name, cache in self.caches.items())
        return f"Zip({inside}, {format_count(len(self), 'record')})"


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
    """Return the sample index in `other` for each stored record of `main`; -1: none is stored."""
    own = main.indices
    if relation == "index" or (relation == "key" and main.keys().digest == other.keys().digest):
        found = np.where(own < other.index.count, own, -1)
    else:
        found = _by_key(main, other, relation, name)
    return np.where(np.isin(found, _served(other)), found, -1)


def _served(cache: Cache) -> NDArray[np.int64]:
    """Return the sample indices that a loader serves: a joined table may leave some out."""
    left = None if cache.joined is None else cache.joined.numbers
    return cache.indices if left is None else left


def _by_key(main: Cache, other: Cache, relation: Any, name: str) -> NDArray[np.int64]:
    keys, theirs = main.keys(), other.keys()
    own = main.indices.tolist()
    if relation == "stem":
        stems = [_stem(keys[number]) for number in own]
        return _unique(*_Stems(theirs).find(stems), stems, other, name)
    wanted: list[object]
    if isinstance(relation, Mapping):
        given = cast("Mapping[str, object]", relation)
        wanted = [given.get(keys[number]) for number in own]
    elif callable(relation):
        wanted = [relation(keys[number]) for number in own]
    else:
        wanted = [keys[number] for number in own]
    if wrong := [one for one in wanted if not isinstance(one, str | None)]:
        raise ConfigError(
            f"on: the partner's key in {name} is {wrong[0]!r}", hint="Expected a text, as in cache.keys()"
        )
    here = np.array([one is not None for one in wanted])
    texts = [str(one) for one in wanted if one is not None]
    found = np.full(len(wanted), -1, np.int64)
    found[here] = _unique(*theirs.find(key_lines(texts)), texts, other, name)
    return found


class _Stems:
    """Keys of a cache without their extension."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._first: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        for index, key in enumerate(keys):
            stem = _stem(key)
            self._first.setdefault(stem, index)
            self._counts[stem] = self._counts.get(stem, 0) + 1

    def find(self, wanted: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `SampleKeys.find`."""
        found = [(self._first.get(one, -1), self._counts.get(one, 0)) for one in wanted]
        first, counts = np.array(found, np.int64).reshape(-1, 2).T
        return first, counts


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
            hint=f"Give them keys of their own, or {arg('on', 'index')} if samples have equal numbers",
        )
    return found


def _refuse_missing(main: Cache, other: Cache, found: NDArray[np.int64], name: str) -> None:
    """Refuse records without a partner.

    Raises:
        MissingRecordError: Names the first of them by key.
    """
    lost = main.indices[found < 0].tolist()
    if not lost:
        return
    keys = main.keys()
    named = format_few([repr(keys[number]) for number in lost[:_NAMED]], _NAMED)
    more = f" and {format_count(len(lost) - _NAMED)} more" if len(lost) > _NAMED else ""
    raise MissingRecordError(
        f"{format_count(len(lost))} of {format_count(len(main))} records have no partner in {name} "
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
        ConfigError: A setting cannot be had for joined caches, or names a field that there is not.
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
        wanted = np.asarray(options.indices)
        place = np.searchsorted(joined.indices, wanted)
        there = place < len(joined)
        there[there] = joined.indices[place[there]] == wanted[there]
        if not there.all():
            raise MissingRecordError(
                f"indices= names sample {wanted[~there][0]}, which is not among those of {joined!r}"
            )
    if not len(joined):
        raise ConfigError(
            f"{joined!r} is empty, so there is nothing to serve",
            hint="From where() comes no record if none meets its condition",
        )
    if not len(place):
        raise no_indices()
    told = tuple(
        f"{name}: {cache.fingerprint} {digest_json(joined.numbers[name][place].tolist())[:16]}"
        for name, cache in [*joined.caches.items()][1:]
    )
    found: dict[str, Member] = {}
    for number, (name, cache) in enumerate(joined.caches.items()):
        names = joined.renamed(name)
        all_of_it = number == 0 and options.indices is None and len(joined) == len(cache)
        own = replace(
            options,
            indices=None if all_of_it else joined.numbers[name][place],
            normalize=_own(options.normalize, names),
            ragged=_own_pad(options.ragged, names),
            batch_by=_first_field(options.batch_by, joined),
            choose=resolve_choices(_own_choices(options.choose, names), cache, windowed=False),
            zipped=told if number == 0 else (),
        )
        if number:
            ragged = own.ragged if options.batch_tokens is None else "pack"
            own = replace(own, transforms=(), meter=None, weights=None, batch_by=None, batch_tokens=None)
            own = replace(own, ragged=ragged)
        found[name] = Member(cache, own, names)
    return found


def _first_field(batch_by: str | None, joined: Zip) -> str | None:
    """Return the field of the first cache that batches go by.

    Raises:
        ConfigError: It is a field of another cache.
    """
    own = {new: field for field, new in joined.renamed(next(iter(joined.caches))).items()}
    if batch_by is not None and batch_by != "shape" and batch_by not in own:
        raise ConfigError(
            f"{arg('batch_by', batch_by)} is not among the fields of the first cache: {', '.join(own)}",
            hint="Name the cache first whose field batches go by",
        )
    return own.get(batch_by, batch_by) if batch_by is not None else None


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
    own = {new: field for field, new in names.items()}
    found: list[FieldGroup] = []
    for group in choices:
        here = [name for name in group.fields if name in own]
        if here and len(here) < len(group.fields):
            raise ConfigError(
                f"choose names {', '.join(group.fields)} together, which are fields of several caches",
                hint="Store what shares rows in one cache, or choose for each of them",
            )
        if here:
            found.append(replace(group, fields=tuple(own[name] for name in here)))
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
