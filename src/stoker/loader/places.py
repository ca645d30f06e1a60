"""Where each record lies: sample number, shard, row in the shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, MissingRecordError
from stoker.loader.tiers import Into, read_column
from stoker.loader.windows import Windows, time_field
from stoker.schema import SCALE_SUFFIX, SHAPE_SUFFIX, Schema
from stoker.store.rows import spread
from stoker.store.shard import offsets_in

if TYPE_CHECKING:
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The records that a loader serves, in the order in which they are numbered for it."""

    numbers: NDArray[np.int64]
    """Sample number of each record, `(records,)`."""
    shard: NDArray[np.int32]
    """Shard that holds it; -1: it is not stored yet."""
    row: NDArray[np.int32]
    """Row inside that shard."""
    chosen: NDArray[np.int64] | None
    """Place of each record among all stored ones; None: all of them, in number order."""
    own: tuple[int, int | None] = (0, None)
    """First and one past the last record that this rank may ever serve: fewer than all in static order."""

    def shards(self) -> list[int]:
        """The shards that hold any of its own, sorted. (`np.unique` would import `numpy.ma`: 20 ms.)"""
        own = self.shard[slice(*self.own)]
        return np.flatnonzero(np.bincount(own[own >= 0])).tolist()

    def by_shard(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Each of `shards()` with the records in it, as places here."""
        order = np.argsort(self.shard, kind="stable")
        inside, shards = self.shard[order], self.shards()
        begins, ends = (np.searchsorted(inside, shards, side=side) for side in ("left", "right"))
        for shard, begin, end in zip(shards, begins.tolist(), ends.tolist(), strict=True):
            yield shard, order[begin:end]

    def of_all(self, per_record: NDArray[Any]) -> NDArray[Any]:
        """Pick the served records' entries from an array over all stored records."""
        return per_record if self.chosen is None else per_record[self.chosen]


def find_places(cache: Cache, indices: Sequence[int] | NDArray[Any] | None) -> Places:
    """Look up every record to be served.

    Args:
        indices: Sample numbers in the order wanted, repeats allowed; None: all stored ones. Quarantined
            samples are left out, as they are without `indices`.

    Raises:
        MissingRecordError: A number is neither stored nor quarantined.
        IncompleteError: Nothing is left to serve.
    """
    runs = cache.segments
    row = spread(runs.row, runs.count, np.int32)
    shard = np.repeat(runs.shard.astype(np.int32), runs.count)
    numbers = cache.numbers
    chosen = None if indices is None else _choose(cache, numbers, np.asarray(indices))
    if chosen is not None:
        numbers, row, shard = numbers[chosen], row[chosen], shard[chosen]
    if not len(numbers):
        raise IncompleteError(
            f"{cache.path} has nothing to serve: {len(cache)} records stored, {len(cache.quarantined)} "
            "samples quarantined. Run `stoker precompute` again, or choose other indices"
        )
    return Places(numbers=numbers, shard=shard, row=row, chosen=chosen)


def joined_indices(
    cache: Cache, indices: Sequence[int] | NDArray[Any] | None
) -> Sequence[int] | NDArray[Any] | None:
    """The sample numbers to serve of a cache with joined columns: those with a row, where others drop out."""
    joined = cache.joined
    if joined is None or joined.numbers is None:
        return indices
    if indices is None:
        return joined.numbers
    wanted = np.asarray(indices)
    return wanted[np.isin(wanted, joined.numbers)]


def _choose(cache: Cache, numbers: NDArray[np.int64], wanted: NDArray[Any]) -> NDArray[np.int64]:
    if wanted.ndim != 1 or not (len(wanted) == 0 or np.issubdtype(wanted.dtype, np.integer)):
        raise ConfigError(f"indices must be a list of sample numbers, got {wanted.dtype} {wanted.shape}")
    wanted = wanted.astype(np.int64)
    place = np.searchsorted(numbers, wanted)
    found = place < len(numbers)
    found[found] = numbers[place[found]] == wanted[found]
    if not found.all():
        lost = [int(number) for number in wanted[~found] if int(number) not in cache.quarantined]
        if lost:
            raise MissingRecordError(
                f"{len(lost)} of {len(wanted)} indices are not in {cache.path}, first sample {lost[0]}. "
                f"It holds {len(numbers)} records of samples 0 to {cache.recipe.count - 1}"
            )
    return place[found]


def lengths_of(cache: Cache, places: Places, field: str) -> NDArray[np.int64]:
    """Steps of each of these records in a ragged field; reads nothing of shards that hold none of them."""
    lengths = np.zeros(len(places.numbers), np.int64)
    every = offsets_in(cache.shard, places.shards(), field, where=str(cache.path))
    for offsets, (_, own) in zip(every, places.by_shard(), strict=True):
        lengths[own] = np.diff(offsets)[places.row[own]]
    return lengths


# ----------------------------------------------------------------------------------------------------------
# Which positions of an epoch one rank serves, and in batches of which size.
#
# `batch_size` is per rank, so a step takes `batch_size * world_size` consecutive positions, of which rank `r`
# has slice `r`: the global batch is the same at every world size. In sequential order (evaluation) each
# rank has one contiguous piece instead, and no example is served twice.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Windows over points: consecutive steps of a folded field are consecutive rows of its record."""

    steps: int
    """Steps from the first of a window to its last."""
    rows: Mapping[str, NDArray[np.int64]]
    """By column the rows of one step in each record, which are its points."""


def cuts_points(schema: Schema, windows: Windows | None) -> bool:
    """Return True if windows are cut from a field of points."""
    return windows is not None and schema[time_field(schema, windows.field)].folded


def sizes_of(cache: Cache, places: Places, field: str) -> NDArray[np.int64]:
    """Return the sizes of the axes of a folded field in each record, `(records, axes)`, read and verified.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    name, axes = field + SHAPE_SUFFIX, len(cache.schema[field].axes)
    found = np.zeros((len(places.numbers), axes), np.int64)
    for shard, own in places.by_shard():
        column = torch.empty((cache.shard(shard).rows, axes), dtype=torch.int64, device="cpu")
        read_column(cache, shard, name, Into(column))
        found[own] = column.numpy()[places.row[own]]
    return found


def cuts_of(cache: Cache, places: Places, windows: Windows) -> tuple[Cuts, NDArray[np.int64]]:
    """Return how windows are cut from fields of points, and the steps of each record `(records,)`.

    Raises:
        ConfigError: Windows draw their stride or have several fields, or fields with time differ in steps.
    """
    main = time_field(cache.schema, windows.field)
    if windows.draws or isinstance(windows.field, tuple):
        raise ConfigError(
            f"windows of {main!r}, whose points differ in number, take one stride, horizon and field; "
            f"given are {windows.text()}. Use stoker.Windows(stride=1, horizon=1, field={main!r}): other "
            "fields of points come with it, in batch.nodes"
        )
    sizes = sizes_of(cache, places, main)
    rows: dict[str, NDArray[np.int64]] = {}
    for name, field in cache.schema.items():
        if not field.evolves or field.kept:
            continue
        own = sizes_of(cache, places, name) if field.folded else None
        steps = lengths_of(cache, places, name) if own is None else own[:, 0]
        if (differ := steps != sizes[:, 0]).any():
            number = int(places.numbers[int(np.argmax(differ))])
            raise ConfigError(
                f"sample {number} has time axes of different lengths in {main!r} and {name!r}, so no "
                "window of one matches the other. Store them in caches of their own"
            )
        if own is not None:
            rows[name] = rows[name + SCALE_SUFFIX] = own[:, 1]
    return Cuts(steps=windows.span + 1, rows=rows), sizes[:, 0]


def trajectory_lengths(cache: Cache, places: Places, windows: Windows) -> NDArray[np.int64]:
    """Steps of each record in the field that windows are cut from.

    Raises:
        ConfigError: Another field with time has another length.
    """
    main = time_field(cache.schema, windows.field)
    if not cache.schema[main].ragged:
        return places.of_all(cache.lengths(main))
    lengths = lengths_of(cache, places, main)
    for name, field in cache.schema.items():
        if name == main or not (field.time and field.ragged):
            continue
        differ = lengths_of(cache, places, name) != lengths
        if differ.any():
            number = int(places.numbers[int(np.argmax(differ))])
            raise ConfigError(
                f"sample {number} has time axes of different lengths in {main!r} and {name!r}, so no "
                "window of one matches the other. Store them in caches of their own"
            )
    return lengths
