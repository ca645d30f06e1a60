"""What comes next: the blocks that the next steps of an order take, up to one epoch ahead.

An order is a pure function of seed and epoch, so what an epoch begins with is known while the one before it
still runs. Nothing here reads or waits; `read_ahead` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.loader.order import Ids
from stoker.loader.ranks import Share

MOST_KNOWN = 1 << 22
"""Blocks, counted once in each stretch, that are known ahead at most: 32 MiB."""
MOST_EXAMPLES = 1 << 14
"""Examples in a stretch at most, so that to make one takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some consecutive steps of an epoch."""

    begin: tuple[int, int]
    end: tuple[int, int]
    """Epoch and position of the first step, and of what follows the last."""
    own: NDArray[np.int64]
    """Blocks that this rank takes, in the order in which it first does."""
    every: NDArray[np.int64]
    """Blocks that any rank takes."""


class Horizon:
    """The stretches from where a rank is on. Used by one thread."""

    def __init__(
        self,
        share: Share,
        ids: Callable[[int], Ids],
        blocks: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        most_blocks: Callable[[], int],
    ) -> None:
        """`ids`: an epoch's order; `blocks`: what examples take; `most_blocks`: what a stretch may take."""
        self._share, self._ids, self._blocks, self._most_blocks = share, ids, blocks, most_blocks
        self.stretches: deque[Stretch] = deque()
        """From the one that is being served on."""
        self.passed = 0
        """Stretches that are behind."""
        self._known = 0
        self._steps = 1
        """Of the next stretch that is made."""

    def at(self, epoch: int, position: int) -> None:
        """Serving has come to here."""
        while self.stretches and self.stretches[0].end <= (epoch, position):
            self._known -= len(self.stretches.popleft().every)
            self.passed += 1
        if not (self.stretches and self.stretches[0].begin <= (epoch, position)):
            self.passed += len(self.stretches)
            self.stretches.clear()
            self._known = 0
            self._add(epoch, position)

    @property
    def whole(self) -> bool:
        """Whether an epoch from here on is known: what is not in it is not served at all."""
        epoch, position = self.stretches[0].begin
        return self.stretches[-1].end >= (epoch + 1, position)

    def extend(self) -> bool:
        """Know one more stretch; False if enough is known."""
        if self.whole or self._known >= MOST_KNOWN:
            return False
        self._add(*self.stretches[-1].end)
        return True

    def next_use(self, count: int) -> NDArray[np.int64]:
        """Stretches until each of `count` blocks is taken by any rank; as many as are known: by none."""
        uses = np.full(count, len(self.stretches), np.int64)
        for away in range(len(self.stretches) - 1, -1, -1):
            uses[self.stretches[away].every] = away
        return uses

    def _add(self, epoch: int, position: int) -> None:
        share = self._share
        whole, tail = share.whole_and_tail(position)
        if not whole and not tail:
            epoch, position = epoch + 1, 0
            whole, tail = share.whole_and_tail(position)
        ids = self._ids(epoch)
        steps = min(whole, self._steps, max(1, MOST_EXAMPLES // share.step))
        if steps:
            own = self._blocks(share.take(ids, position, steps))
            end = position + steps * share.step
            alone = share.world == 1 or share.contiguous
            every = own if alone else self._blocks(ids(position, end))
        else:
            own = self._blocks(share.take_tail(ids, position))
            end = share.positions
            every = own if share.contiguous else self._blocks(ids(position, end))
        after = (epoch, end) if steps and (whole > steps or tail) else (epoch + 1, 0)
        self.stretches.append(Stretch(begin=(epoch, position), end=after, own=own, every=every))
        self._known += len(every)
        each = max(1, len(every) // max(1, steps))
        self._steps = max(1, min(2 * max(1, steps), self._most_blocks() // each))


class Depth:
    """How many bytes to have under way: twice what the way holds, bandwidth times the shortest answer.

    Rates are taken over each request's own time, by what came in all meanwhile, so that they count all that
    are under way together (the estimate of BBR, Cardwell et al., ACM Queue 2016). The shortest answer is
    looked for among many more: the few last ones may all have waited for each other.
    """

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least, self._most = least_bytes, most_bytes
        self.came = 0
        """Bytes that have come in all."""
        self._rates: deque[float] = deque(maxlen=64)
        self._took: deque[float] = deque(maxlen=2048)

    def ended(self, size: int, came_before: int, took_s: float) -> None:
        """A request of `size` bytes took so long; `came_before` is what `came` was as it began."""
        self.came += size
        if took_s > 0:
            self._rates.append((self.came - came_before) / took_s)
            self._took.append(took_s)

    @property
    def bytes_s(self) -> float:
        """The most that has come in a second of late; 0: not known."""
        return max(self._rates, default=0.0)

    @property
    def bytes(self) -> int:
        """What to have under way now."""
        held = self.bytes_s * min(self._took, default=0.0)
        return int(min(self._most, max(self._least, 2 * held)))
