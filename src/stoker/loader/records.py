"""Location of each record: sample index, shard, row in the shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.arguments import check, finite, whole
from stoker.errors import ConfigError, IncompleteError, MissingRecordError, arg
from stoker.loader.batch import Windows, main_field
from stoker.schema import SCALE_SUFFIX, SHAPE_SUFFIX, Schema
from stoker.splitmix import Salt, keys_of, stream
from stoker.store.access import MemorySink, read_column
from stoker.store.index import spread
from stoker.store.shard import offsets_in

if TYPE_CHECKING:
    from stoker.loader.order import Weights
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """The records that a loader serves, in the order in which they are numbered for it."""

    indices: NDArray[np.int64]
    """Sample index of each record, `(records,)`."""
    shard: NDArray[np.int32]
    """Shard that holds it; -1: it is not stored yet."""
    row: NDArray[np.int32]
    """Row inside that shard."""
    chosen: NDArray[np.int64] | None
    """Place of each record among all stored ones; None: all of them, in number order."""
    own: tuple[int, int | None] = (0, None)
    """First and one past the last record that this rank may ever serve: fewer than all in static order."""

    def shards(self) -> list[int]:
        """Return the shards of its own records, sorted. (`np.unique` would import `numpy.ma`: 20 ms.)"""
        own = self.shard[slice(*self.own)]
        return np.flatnonzero(np.bincount(own[own >= 0])).tolist()

    def by_shard(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each of `shards()` with the records in it, as places here."""
        order = np.argsort(self.shard, kind="stable")
        inside, shards = self.shard[order], self.shards()
        begins, ends = (np.searchsorted(inside, shards, side=side) for side in ("left", "right"))
        for shard, begin, end in zip(shards, begins.tolist(), ends.tolist(), strict=True):
            yield shard, order[begin:end]

    def of_all(self, per_record: NDArray[Any]) -> NDArray[Any]:
        """Pick the served records' entries from an array over all stored records."""
        return per_record if self.chosen is None else per_record[self.chosen]


def find_records(cache: Cache, indices: Sequence[int] | NDArray[Any] | None) -> RecordTable:
    """Look up every record to be served.

    Args:
        indices: Sample indices in the order wanted, repeats allowed; None: all stored ones. Quarantined
            samples are left out, as they are without `indices`.

    Raises:
        ConfigError: `indices` is empty.
        MissingRecordError: A number is neither stored nor quarantined.
        IncompleteError: Nothing is left to serve.
    """
    wanted = None if indices is None else as_indices(indices)
    if wanted is not None and not len(wanted):
        raise no_indices()
    runs = cache.segments
    row = spread(runs.row, runs.count, np.int32)
    shard = np.repeat(runs.shard.astype(np.int32), runs.count)
    numbers = cache.indices
    chosen = None if wanted is None else _choose(cache, numbers, wanted)
    if chosen is not None:
        numbers, row, shard = numbers[chosen], row[chosen], shard[chosen]
    if not len(numbers):
        raise IncompleteError(
            f"{cache.path} has nothing to serve: {len(cache)} records stored, {len(cache.quarantined)} "
            "samples quarantined",
            hint="Run `stoker precompute` again, or choose other indices",
        )
    return RecordTable(indices=numbers, shard=shard, row=row, chosen=chosen)


def no_indices(caches: str | None = None) -> ConfigError:
    """Return the error for `indices=` without any, or for joined caches without a record."""
    return ConfigError(
        f"{'indices=' if caches is None else caches} is empty, so there is nothing to serve",
        hint="Give at least one sample. From where() come none if no record meets its condition",
    )


def joined_indices(
    cache: Cache, indices: Sequence[int] | NDArray[Any] | None
) -> Sequence[int] | NDArray[Any] | None:
    """Return the samples to serve of a cache with joined columns: those that have a row."""
    if cache.joined is None or cache.joined.indices is None:
        return indices
    if indices is None:
        return cache.joined.indices
    wanted = np.asarray(indices)
    return wanted[np.isin(wanted, cache.joined.indices)]


def as_indices(indices: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return sample indices as an array.

    Raises:
        ConfigError: They are not a list of whole numbers.
    """
    wanted = np.asarray(indices)
    if wanted.ndim != 1 or not (len(wanted) == 0 or np.issubdtype(wanted.dtype, np.integer)):
        raise ConfigError(f"indices must be a list of sample indices, got {wanted.dtype} {wanted.shape}")
    return wanted.astype(np.int64)


def _choose(cache: Cache, numbers: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.searchsorted(numbers, wanted)
    found = place < len(numbers)
    found[found] = numbers[place[found]] == wanted[found]
    if not found.all():
        lost = [int(number) for number in wanted[~found] if int(number) not in cache.quarantined]
        if lost:
            raise MissingRecordError(
                f"{len(lost)} of {len(wanted)} indices are not in {cache.path}, first sample {lost[0]}",
                hint=f"It holds {len(numbers)} records of samples 0 to {cache.recipe.count - 1}",
            )
    return place[found]


def drop_quarantined(
    weights: Weights | None, cache: Cache, indices: Sequence[int] | NDArray[Any] | None
) -> Weights | None:
    """Return the weights of what is stored, where they were given for quarantined samples too.

    So the same weights do while a cache is being filled, before it is known what will be quarantined, and
    afterwards.
    """
    if weights is None or not cache.quarantined:
        return weights
    wanted = np.arange(cache.recipe.count) if indices is None else np.asarray(indices)
    values = np.asarray(weights.values)
    if values.shape != wanted.shape:
        return weights
    return replace(weights, values=values[~np.isin(wanted, list(cache.quarantined))])


def lengths_of(cache: Cache, table: RecordTable, field: str) -> NDArray[np.int64]:
    """Return the steps of each of these records in a ragged field; opens only the shards that hold them."""
    lengths = np.zeros(len(table.indices), np.int64)
    every = offsets_in(cache.shard, table.shards(), field, where=str(cache.path))
    for offsets, (_, own) in zip(every, table.by_shard(), strict=True):
        lengths[own] = np.diff(offsets)[table.row[own]]
    return lengths


# ----------------------------------------------------------------------------------------------------------
# What records are put into batches by: their shapes, a key, or their tokens.


def stacked_fields(schema: Schema, batch_by: str | None) -> frozenset[str]:
    """Return the fields of varying shape that have one shape in each batch.

    Raises:
        ConfigError: `batch_by` names no field that records can be batched by.
    """
    varying = [name for name, field in schema.items() if field.ragged]
    if batch_by is None:
        return frozenset()
    if batch_by in schema:
        if batch_by in varying:
            return frozenset({batch_by})
        if schema[batch_by].shape in ((), (1,)) and schema[batch_by].dtype in INTEGERS:
            return frozenset()
    elif batch_by == "shape":
        if varying:
            return frozenset(varying)
        raise ConfigError(
            f"{arg('batch_by', 'shape')}, and all records have one shape", hint=f"Leave {arg('batch_by')} out"
        )
    keys = [n for n, f in schema.items() if f.ragged or (f.shape in ((), (1,)) and f.dtype in INTEGERS)]
    raise ConfigError(
        f"{arg('batch_by', batch_by)} is neither 'shape' nor a field of varying shape or of one whole number",
        hint=f"Fields that records can be batched by: {', '.join(keys) or 'none'}",
    )


INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
"""Dtypes of keys."""


def groups_of(cache: Cache, table: RecordTable, batch_by: str) -> NDArray[np.int64]:
    """Return the group of each record, numbered in the order of first appearance, `(records,)`.

    Raises:
        ConfigError: As `stacked_fields`.
        CorruptError: Sizes or keys do not match their checksums.
    """
    keys = [values[table.indices] for values in joined_keys(cache, batch_by)]
    if not keys:
        fields = sorted(stacked_fields(cache.schema, batch_by))
        keys = [_shapes_of(cache, table, name) for name in fields] or [column_of(cache, table, batch_by)]
    every = np.concatenate([key.reshape(len(table.indices), -1).astype(np.int64) for key in keys], axis=1)
    _, first, group = np.unique(every, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[group.reshape(-1)]


def joined_keys(cache: Cache, batch_by: str | None) -> list[NDArray[Any]]:
    """Return a joined column of whole numbers, by sample, and which are known; empty: another or none."""
    joined = cache.joined
    if joined is None or batch_by is None or batch_by not in joined.schema:
        return []
    from stoker.store.joins import KNOWN

    field = joined.schema[batch_by]
    if field.shape not in ((), (1,)) or field.dtype not in INTEGERS:
        return []
    # A sample without a value has a 0 there, and is not of class 0.
    names = [name for name in (batch_by, batch_by + KNOWN) if name in joined.values]
    return [joined.values[name].numpy() for name in names]


def _shapes_of(cache: Cache, table: RecordTable, name: str) -> NDArray[np.int64]:
    return sizes_of(cache, table, name) if cache.schema[name].folded else lengths_of(cache, table, name)


def tokens_of(cache: Cache, table: RecordTable, most: int) -> NDArray[np.int64]:
    """Return the tokens of each record, its length in all fields of varying length, `(records,)`.

    Raises:
        ConfigError: No field has such a length, two differ in it, or a record has more than `most`.
    """
    schema = cache.schema
    names = [name for name, field in schema.items() if field.ragged]
    if not names or any(schema[name].axes for name in names):
        several = next((name for name in names if schema[name].axes), None)
        raise ConfigError(
            f"{arg('batch_tokens', most)} packs records of one varying length, and "
            + ("all records have one shape" if several is None else f"{several!r} has other axes that vary"),
            hint=f"Leave {arg('batch_tokens')} out",
        )
    found = {name: lengths_of(cache, table, name) for name in names}
    lengths = found[names[0]]
    for name, own in found.items():
        if (differ := own != lengths).any():
            at = int(np.argmax(differ))
            raise ConfigError(
                f"{arg('batch_tokens', most)} packs fields of one length, and sample {table.indices[at]} has "
                f"{lengths[at]} in {names[0]!r} and {own[at]} in {name!r}",
                hint="Store the cache without one of them, or use ragged='pack' and a batch_size",
            )
    longest = int(np.argmax(lengths))
    if lengths[longest] > most:
        raise ConfigError(
            f"sample {table.indices[longest]} has {lengths[longest]} tokens, more than "
            f"{arg('batch_tokens', most)}",
            hint=f"Give at least {arg('batch_tokens', int(lengths[longest]))}, or leave such samples out "
            "with indices=",
        )
    return lengths


# ----------------------------------------------------------------------------------------------------------
# How many steps a record has in the field that windows are cut from, and how windows over points are cut.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Windows over points: consecutive steps of a folded field are consecutive rows of its record."""

    steps: int
    """Steps from the first of a window to its last."""
    rows: Mapping[str, NDArray[np.int64]]
    """By column the rows of one step in each record, which are its points."""


def cuts_points(schema: Schema, windows: Windows | None) -> bool:
    """Return True if windows are cut from a field of points."""
    return windows is not None and schema[main_field(schema, windows)].folded


def sizes_of(cache: Cache, table: RecordTable, field: str) -> NDArray[np.int64]:
    """Return the sizes of the axes of a folded field in each record, `(records, axes)`, read and verified.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    return column_of(cache, table, field + SHAPE_SUFFIX)


def column_of(cache: Cache, table: RecordTable, name: str) -> NDArray[Any]:
    """Return a field of fixed shape of each record, `(records, *shape)`, read and verified.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    field = cache.schema[name]
    found = np.zeros((len(table.indices), *field.shape), field.dtype)
    for shard, own in table.by_shard():
        shape = (cache.shard(shard).rows, *field.shape)
        column = torch.empty(shape, dtype=getattr(torch, field.dtype), device="cpu")
        read_column(cache, shard, name, MemorySink(column))
        found[own] = column.numpy()[table.row[own]]
    return found


def cuts_of(cache: Cache, table: RecordTable, windows: Windows) -> tuple[Cuts, NDArray[np.int64]]:
    """Return how windows are cut from fields of points, and the steps of each record `(records,)`.

    Raises:
        ConfigError: Windows draw their stride or have several fields, or fields with time differ in steps.
    """
    main = main_field(cache.schema, windows)
    if windows.rows:
        raise ConfigError(
            f"rows as examples are of fields with one varying axis, and {main!r} has steps and points",
            hint=f"Use {arg('horizon', 1, call='Windows')}, or ragged='pack' without windows=",
        )
    if windows.draws or isinstance(windows.field, tuple):
        raise ConfigError(
            f"windows of {main!r}, whose points differ in number, take one stride, horizon and field; given "
            f"are {windows.text()}",
            hint=f"Use stoker.Windows(stride=1, horizon=1, field={main!r}): other fields of points come "
            "with it, in batch.nodes",
        )
    sizes = sizes_of(cache, table, main)
    rows: dict[str, NDArray[np.int64]] = {}
    for name, field in cache.schema.items():
        if not field.evolves or field.kept:
            continue
        own = sizes_of(cache, table, name) if field.folded else None
        steps = lengths_of(cache, table, name) if own is None else own[:, 0]
        _check_same_steps(table, (main, sizes[:, 0]), (name, steps))
        if own is not None:
            rows[name] = rows[name + SCALE_SUFFIX] = own[:, 1]
    return Cuts(steps=windows.span + 1, rows=rows), sizes[:, 0]


def trajectory_lengths(cache: Cache, table: RecordTable, windows: Windows) -> NDArray[np.int64]:
    """Return the steps of each record in the field that windows are cut from.

    Raises:
        ConfigError: Another field with time has another length.
    """
    main = main_field(cache.schema, windows)
    if not cache.schema[main].ragged:
        return table.of_all(cache.lengths(main))
    lengths = lengths_of(cache, table, main)
    for name, field in cache.schema.items():
        if name == main or not field.ragged or not (field.time or (windows.rows and not field.folded)):
            continue
        _check_same_steps(table, (main, lengths), (name, lengths_of(cache, table, name)))
    return lengths


def _check_same_steps(
    table: RecordTable, one: tuple[str, NDArray[np.int64]], other: tuple[str, NDArray[np.int64]]
) -> None:
    """Refuse two fields, each with its steps per record, whose time axes differ in length."""
    differ = one[1] != other[1]
    if differ.any():
        raise ConfigError(
            f"sample {table.indices[int(np.argmax(differ))]} has time axes of different lengths in "
            f"{one[0]!r} and {other[0]!r}, so no window of one matches the other",
            hint="Store them in caches of their own",
        )


# ----------------------------------------------------------------------------------------------------------
# Parts of a cache that stand for all of it.


def subset(cache: Cache, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the sample indices of a part of the stored records, sorted, for `indices=`.

    Each part of the source (a file, say) gives its share, to within one record. A smaller fraction with the
    same seed is a part of a larger one, so that runs on 1 %, 10 % and all of the data are comparable.

    Args:
        cache: The cache whose records are drawn.
        fraction: Part of the records, above 0 and at most 1.
        seed: Decides which records are drawn.

    Returns:
        Sample indices, int64, at least one.

    Raises:
        ConfigError: `fraction` is not above 0 and at most 1.

    Examples:
        >>> import stoker, torch
        >>> cache = stoker.precompute([{"x": torch.ones(1)}] * 100, None, "caches", name="ones")
        >>> tenth = stoker.subset(cache, 0.1)
        >>> len(tenth), len(stoker.Loader(cache, batch_size=5, indices=tenth))
        (10, 2)
    """
    check({"subset: fraction": (fraction, finite(above=0, most=1))})
    check({"subset: seed": (seed, whole())})
    numbers = cache.indices
    keys = keys_of(stream(seed, 0, Salt.SUBSET), numbers)
    ends = np.array([part.offset + part.count for part in cache.recipe.parts])
    part = np.searchsorted(ends, numbers, side="right")
    shuffled = np.lexsort((keys, part))
    sizes = np.bincount(part)
    first = np.cumsum(sizes) - sizes
    # The place of each record among those of its part, 0..1: taking the lowest takes the same share of each.
    place = (np.arange(len(numbers)) - first[part[shuffled]] + 0.5) / sizes[part[shuffled]]
    lowest = np.lexsort((keys[shuffled], place))[: max(1, round(fraction * len(numbers)))]
    return np.sort(numbers[shuffled[lowest]])
