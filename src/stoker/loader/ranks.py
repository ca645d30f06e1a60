"""Which positions of an epoch one rank serves, and in batches of which size.

`batch_size` is per rank, so a step takes `batch_size * world` consecutive positions, of which rank `r` has
slice `r`: the global batch is the same at every world size. In sequential order (evaluation) each rank has
one contiguous piece instead, and no example is served twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import ConfigError
from stoker.loader.order import Ids, Order
from stoker.loader.windows import Examples


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
