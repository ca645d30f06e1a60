"""What an epoch fetches of a set that lies elsewhere, through a local cache that is smaller than the set.

Blocks that are needed last go first (`loader/prefetch.py`). Where each block is needed once in an epoch,
an epoch then fetches just what does not fit; where it is needed often, at random, it is fetched often. So
what decides is how many times an order comes to a block.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.units import MIB, format_bytes

NET_OF = 0.95
"""The part of a mirror that holds blocks between clean-ups, which free a tenth of it."""
AHEAD_OF = 0.25
"""The part of it that what is fetched ahead of need may take."""
TRIED_BLOCKS, TRIED_USES = 200, 16
"""Blocks of the small set on which an order is tried, and uses of each in an epoch, at most."""
WANTED_BLOCK_BYTES = 8 * MIB
"""Bytes that an order should take together: few blocks are then shared by two of them."""
WANTED_BLOCKS = 256
"""Blocks of an order that are shuffled among themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDemand:
    """A set that lies elsewhere, and how it is served."""

    url: str
    bytes: int
    """Of all its shards."""
    room_bytes: int | None
    """Limit of the local mirror; None: no limit."""
    block_bytes: int
    """Least bytes that are fetched together."""
    examples: int
    example_bytes: float
    """Bytes that lie together and that one example takes."""
    step_examples: int
    """Examples of one step, over all ranks of a node."""
    order: str = "full"

    @property
    def fits(self) -> bool:
        """True if the local cache holds all of it."""
        return self.room_bytes is None or self.bytes <= self.room_bytes

    @property
    def held(self) -> float:
        """The part of the set that stays in the local cache from one epoch to the next."""
        if self.room_bytes is None:
            return 1.0
        return min(1.0, self.room_bytes * NET_OF / max(1, self.bytes))

    def fetched(self, order: str | None = None) -> float:
        """Return bytes that an epoch fetches once the local cache is full, as a multiple of the set's.

        Args:
            order: Another order than it is served in.
        """
        if self.fits:
            return 0.0
        return _missed(self.held, self._uses(order or self.order))

    def fetched_for(self, size: float) -> float:
        """Return bytes that come for each `size` bytes of examples that are served."""
        return size * self.fetched() * self.bytes / max(1.0, self.examples * self.example_bytes)

    def better(self) -> str:
        """Say which order fetches least, with numbers; empty if the gain is under a tenth of the set."""
        spacing = self.bytes / max(1, self.examples)
        room = self.room_bytes or self.bytes
        together = max(self.block_bytes, min(WANTED_BLOCK_BYTES, int(room * AHEAD_OF) // WANTED_BLOCKS))
        block = max(1, math.ceil(together / spacing))
        window = max(1, min(WANTED_BLOCKS, int(room * AHEAD_OF / (block * spacing))))
        order = f"block({block},{block * window})"
        return order if self.fetched() - self.fetched(order) > 0.1 else ""

    def say(self) -> str:
        """In words, with the arithmetic."""
        if self.fits:
            room = "" if self.room_bytes is None else f", which has room for {format_bytes(self.room_bytes)}"
            return f"from {self.url} through a local cache of all {format_bytes(self.bytes)}{room}"
        assert self.room_bytes is not None
        said = (
            f"from {self.url} through a local cache of {format_bytes(self.room_bytes)} of "
            f"{format_bytes(self.bytes)}: an epoch in {self.order} order fetches "
            f"{self._times(self.fetched())}"
        )
        better = self.better()
        if better:
            said += f", shuffle={better} {self._times(self.fetched(better))}"
        nodes = math.ceil(self.bytes / (self.room_bytes * NET_OF))
        return f"{said}; with {nodes} nodes or more partition=static fetches nothing after the first"

    def _times(self, fetched: float) -> str:
        return f"{format_bytes(round(fetched * self.bytes))} ({fetched:.2f} of the set)"

    def _uses(self, order: str) -> float:
        """Return how many times an epoch comes to a block, apart from each other."""
        found = re.fullmatch(r"block\((\d+),\s*(\d+)\)", order)
        blocks, room = max(1.0, self.bytes / self.block_bytes), self.room_bytes or self.bytes
        if found and int(found[2]) * self.bytes <= room * (1 - AHEAD_OF) * self.examples:
            return 1 + self.block_bytes * self.examples / (int(found[1]) * self.bytes)
        if order == "sequential":
            return 1.0
        touched = self.step_examples * (1 + self.example_bytes / self.block_bytes)
        # Examples of one step that are in the same block come to it once.
        distinct = blocks * -math.expm1(-touched / blocks)
        return max(1.0, self.examples / self.step_examples * distinct / blocks)


@functools.lru_cache(maxsize=64)
def _missed(held: float, uses: float) -> float:
    """Fetches per block and epoch, where `held` of the blocks are here, each used so often at random."""
    low = min(TRIED_USES, math.floor(uses))
    high = min(TRIED_USES, low + 1)
    a = 1 - held if low == 1 else _tried(held, low)
    if high == low:
        return a / TRIED_USES * uses
    b = _tried(held, high)
    return a + (b - a) * (uses - low)


def _tried(held: float, uses: int) -> float:
    random, room = np.random.default_rng(0), max(1, round(held * TRIED_BLOCKS))
    each = np.repeat(np.arange(TRIED_BLOCKS), uses)
    epochs = [random.permutation(each) for _ in range(4)]
    missed = _misses(np.concatenate(epochs).tolist(), room)
    return sum(missed[len(each) : 3 * len(each)]) / 2 / TRIED_BLOCKS


def _misses(uses: Sequence[int], room: int) -> list[bool]:
    """Return which of these uses find their block gone, where the one needed last goes first."""
    following, last = [len(uses)] * len(uses), dict[int, int]()
    for at in range(len(uses) - 1, -1, -1):
        following[at] = last.get(uses[at], len(uses))
        last[uses[at]] = at
    here: dict[int, int] = {}
    line: list[tuple[int, int]] = []
    missed: list[bool] = []
    for at, block in enumerate(uses):
        missed.append(block not in here)
        while block not in here and len(here) >= room:
            away, other = heapq.heappop(line)
            if here.get(other) == -away:
                del here[other]
        here[block] = following[at]
        heapq.heappush(line, (-following[at], block))
    return missed
