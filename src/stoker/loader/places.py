"""Where each record lies: sample number, shard, row in the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, MissingRecordError
from stoker.loader.order import SORTED_LIMIT, Draws, Ids, Order, Weights
from stoker.loader.windows import Examples
from stoker.store.rows import spread
from stoker.store.shard import offsets_in
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The records that a loader serves, in the order in which they are numbered for it."""

    numbers: NDArray[np.int64]
    """Sample number of each record, `(records,)`."""
    shard: NDArray[np.int32]
    """Shard that holds it."""
    row: NDArray[np.int32]
    """Row inside that shard."""
    chosen: NDArray[np.int64] | None
    """Place of each record among all stored ones; None: all of them, in number order."""
    own: tuple[int, int | None] = (0, None)
    """First and one past the last record that this rank may ever serve: fewer than all in static order."""

    def shards(self) -> list[int]:
        """The shards that hold any of its own, sorted. (`np.unique` would import `numpy.ma`: 20 ms.)"""
        return np.flatnonzero(np.bincount(self.shard[slice(*self.own)])).tolist()

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


def kept_weights(
    weights: Sequence[float] | NDArray[Any] | Weights | None,
    cache: Cache,
    indices: Sequence[int] | NDArray[Any] | None,
) -> Sequence[float] | NDArray[Any] | Weights | None:
    """Weights of what is stored, where they were given for quarantined samples too.

    So the same weights do beside the filling of a cache, when nobody knows what will be quarantined, and
    afterwards.
    """
    if weights is None or not cache.quarantined:
        return weights
    asked = weights if isinstance(weights, Weights) else Weights(values=weights)
    wanted = np.arange(cache.recipe.count) if indices is None else np.asarray(indices)
    values = np.asarray(asked.values)
    if values.shape != wanted.shape:
        return weights
    return replace(asked, values=values[~np.isin(wanted, list(cache.quarantined))])


def weighted(weights: Sequence[float] | NDArray[Any] | Weights, places: Places, examples: Examples) -> Draws:
    """Make the table that examples are drawn from, in proportion to their record's weight.

    Args:
        weights: One number per entry of `indices`, or per record in number order.

    Raises:
        ConfigError: Another number of weights, a negative one or a NaN, none above 0, or fewer examples
            above 0 than are to be drawn without repeats.
    """
    asked = weights if isinstance(weights, Weights) else Weights(values=weights)
    values = np.asarray(asked.values, dtype=np.float64)
    if values.shape != places.numbers.shape:
        raise ConfigError(
            f"weights have shape {values.shape}, but {len(places.numbers)} records are served. Give one "
            "weight per record in number order, or per entry of indices="
        )
    if not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ConfigError("weights must be finite, at least 0, and not all 0")
    first = examples.first
    if examples.per_record:
        first = np.arange(len(values) + 1, dtype=np.int64) * examples.per_record
    cumulative = np.cumsum(values * np.diff(first))
    if not cumulative[-1] > 0:
        raise ConfigError("every record with a weight above 0 is too short for one window")
    if asked.replacement:
        return Draws(cumulative=cumulative, first=first, samples=asked.samples)
    possible = int(np.diff(first)[values > 0].sum())
    samples = examples.count if asked.samples is None else asked.samples
    if samples > possible or examples.count > SORTED_LIMIT:
        raise ConfigError(
            f"{format_count(samples)} examples cannot be drawn without repeats: {format_count(possible)} of "
            f"{format_count(examples.count)} have a weight above 0, and {format_count(SORTED_LIMIT)} can be "
            "told apart. Choose fewer samples=, or replacement=True"
        )
    return Draws(cumulative=cumulative, first=first, samples=samples, weights=values)


# ----------------------------------------------------------------------------------------------------------
# Which positions of an epoch one rank serves, and in batches of which size.
#
# `batch_size` is per rank, so a step takes `batch_size * world` consecutive positions, of which rank `r`
# has slice `r`: the global batch is the same at every world size. In sequential order (evaluation) each
# rank has one contiguous piece instead, and no example is served twice.


def check_ranks(batch_size: int, rank: int, world: int) -> None:
    """Refuse a batch without examples, and a rank outside the world.

    Raises:
        ConfigError: As said.
    """
    if batch_size < 1 or not 0 <= rank < world:
        raise ConfigError(
            f"batch_size {batch_size}, rank {rank} of {world}. Expected batch_size >= 1 and 0 <= rank < world"
        )


def own_records(order: Order, examples: Examples, rank: int, world: int) -> tuple[int, int | None]:
    """First and one past the last record that a rank may ever serve: in static order those of its parts."""
    parts = order.kind.parts
    if order.kind.kind != "static" or order.draws is not None:
        return 0, None
    begin = order.count * (rank * parts // world) // parts
    end = order.count * -(-(rank + 1) * parts // world) // parts
    if begin == end:
        return 0, None
    if examples.per_record:
        return begin // examples.per_record, -(-end // examples.per_record)
    first, last = np.searchsorted(examples.first, [begin, end - 1], side="right").tolist()
    return first - 1, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of every epoch."""

    positions: int
    """Positions of an epoch over all ranks."""
    batch_size: int
    """Examples in a batch of one rank."""
    rank: int
    world: int
    drop_last: bool
    """Leave out the last, short step; every rank then has the same number of batches."""
    contiguous: bool
    """This rank's positions are one piece (sequential order) instead of a slice of every step."""

    def __post_init__(self) -> None:
        """Refuse ranks and sizes that are none."""
        check_ranks(self.batch_size, self.rank, self.world)

    @property
    def step(self) -> int:
        """Positions of one step over all ranks: the global batch."""
        return self.batch_size * self.world

    @property
    def _own(self) -> range:
        """Positions of a contiguous rank."""
        return range(self.positions * self.rank // self.world, self.positions * (self.rank + 1) // self.world)

    def steps(self, position: int = 0) -> int:
        """Batches that this rank serves from `position` to the end of the epoch."""
        if self.contiguous:
            left, size = len(self._own) - position // self.world, self.batch_size
        else:
            left, size = self.positions - position, self.step
        if self.drop_last and self.contiguous:
            return max(0, self.positions // self.world - position // self.world) // size
        if self.drop_last:
            return max(0, left) // size
        whole, rest = divmod(max(0, left), size)
        return whole + (1 if self._tail(rest) else 0)

    def _tail(self, rest: int) -> int:
        """Examples of this rank in a last step of `rest` positions."""
        if self.contiguous:
            return rest
        return rest * (self.rank + 1) // self.world - rest * self.rank // self.world

    def whole_and_tail(self, position: int) -> tuple[int, int]:
        """From `position` on: how many full batches this rank serves, and examples in the short last one."""
        steps = self.steps(position)
        if self.contiguous:
            own, size = len(self._own) - position // self.world, self.batch_size
        else:
            own, size = self.positions - position, self.step
        whole = min(steps, own // size)
        return whole, self._tail(own - whole * size) if steps > whole else 0

    def take(self, ids: Ids, position: int, steps: int) -> Any:
        """Examples of this rank in `steps` whole steps from `position`, in the order they are served."""
        if self.contiguous:
            begin = self._own.start + position // self.world
            return ids(begin, begin + steps * self.batch_size)
        examples = ids(position, position + steps * self.step)
        if self.world == 1:
            return examples
        return examples.reshape(steps, self.world, self.batch_size)[:, self.rank].reshape(-1)

    def take_tail(self, ids: Ids, position: int) -> Any:
        """Examples of this rank in the short last step, which begins at `position`."""
        if self.contiguous:
            return ids(self._own.start + position // self.world, self._own.stop)
        rest = self.positions - position
        begin = rest * self.rank // self.world
        return ids(position + begin, position + begin + self._tail(rest))
